"""Why a release doesn't fit its table, where its names or `config.json` tell: one cause in place of what follows from it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence

from weightbeam.formats.release.source import ReleaseTensors
from weightbeam.model_mappings.audit import find_drops
from weightbeam.model_mappings.config import Config, ConfigError, Layout, faults_of
from weightbeam.model_mappings.family import Family, Prediction, Tower, rename
from weightbeam.model_mappings.plan import Array, Problem
from weightbeam.model_mappings.registry import UnknownFamilyError, family_by_config, load_family
from weightbeam.transforms.planning.layouts import config_problem

WITHOUT_PREFIX = (
    "all {:,} names begin with {!r}, and none of the {} table does; rename the tensors, each file with "
    "safetensors.torch.save_file({{name.removeprefix({!r}): tensor for name, tensor in "
    "safetensors.torch.load_file(FILE).items()}}, FILE, {{'format': 'pt'}}), and in the index, if there is one"
)
HEAD = ".decoder.logits_dense.kernel"
HEADLESS = (
    "; if the model is one without a head, such as those that embed text, say tie_word_embeddings: true in a copy of its config.json: "
    "MaxText then takes the embedding for the head, its states are the model's, and its logits mean nothing"
)


def config_problems(
    error: ConfigError | UnknownFamilyError, config: Config, layout: Layout, named: str | None
) -> list[Problem]:
    """What a table can't do with in `config.json`: the fault that ended the plan, and those behind it.

    Args:
      error: what ended the plan.
      config: `config.json`.
      layout: what is asked for.
      named: the family's name, where `--family` says it.
    """
    faults = []
    if isinstance(error, ConfigError):
        with contextlib.suppress(UnknownFamilyError, ConfigError):  # the family itself may hang on the field
            family = load_family(named) if named else family_by_config(config)
            faults = faults_of(lambda: family.dims(config, layout), lambda: family.table(config, layout))
    return list(dict.fromkeys(config_problem(fault) for fault in (error, *map(ConfigError, faults))))


def without_parts(
    family: Family, config: Config, layout: Layout, source: ReleaseTensors
) -> tuple[Layout, list[Problem]]:
    """A layout without the parts of MaxText's model that it asks for and the release has no tensor of; and that it has
    none.

    Raises:
      ConfigError: `config.json` lacks what the table needs.
    """
    text = dataclasses.replace(layout, mtp=False, multimodal=False)
    if layout == text:
        return layout, []
    reasons = find_drops(family.drops(config, text), source.specs())[0].values()
    problems = []
    for option, supported, kind, what in (
        ("mtp", family.mtp, Prediction, "multi-token-prediction layers"),
        ("multimodal", family.towers, Tower, "vision or audio towers"),
    ):
        if getattr(layout, option) and supported and not any(isinstance(reason, kind) for reason in reasons):
            message = f"the release has no {what} by names that {family.name} knows; leave the option out"
            problems.append(Problem("option", f"--{option}", message))
            layout = dataclasses.replace(layout, **{option: False})
    return layout, problems


def explain(
    problems: Sequence[Problem], family: Family, arrays: Iterable[Array], source: ReleaseTensors
) -> list[Problem]:
    """The problems of the tensors, with their cause: a prefix of all names, or biases that MaxText's model doesn't have."""
    if {"missing", "unused"} <= {problem.kind for problem in problems}:
        wanted = {name for array in arrays for part in array.parts for name in part.tensors}
        if prefix := _prefix(source.encodings, wanted, family):
            message = WITHOUT_PREFIX.format(len(source.encodings), prefix, family.name, prefix)
            others = [problem for problem in problems if problem.kind not in ("missing", "unused")]
            return [*others, Problem("unused", f"{prefix}*", message)]
    heads = {name for array in arrays if array.key.endswith(HEAD) for part in array.parts for name in part.tensors}
    biases = f"config.json says {' and '.join(source.biases)}, and MaxText's {family.name} models have no such bias; if all are zeros, say false there"

    def why(problem: Problem) -> str:
        if problem.kind == "missing" and problem.subject in heads:
            return HEADLESS
        return f": {biases}" if problem.kind == "unused" and source.biases and problem.subject.endswith(".bias") else ""

    return [
        dataclasses.replace(problem, message=f"{problem.message}{also}") if (also := why(problem)) else problem
        for problem in problems
    ]


def _prefix(names: Collection[str], wanted: Collection[str], family: Family) -> str:
    """The prefix of whole components that all names have and none of the table's has, and without which most are the
    table's, the shortest of several; empty where there is none.
    """
    least, most = (name.split(".") for name in (min(names), max(names)))  # what they share, all between them do, too
    shared = (
        one for one, _ in itertools.takewhile(lambda both: both[0] == both[1], zip(least[:-1], most, strict=False))
    )
    hits = {
        prefix: sum(rename(name.removeprefix(prefix), family.aliases) in wanted for name in names)
        for prefix in itertools.accumulate(f"{component}." for component in shared)
        if not any(name.startswith(prefix) for name in wanted)
    }
    best = max(hits, key=hits.__getitem__, default="")
    return best if hits.get(best) else ""
