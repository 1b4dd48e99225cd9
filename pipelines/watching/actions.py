"""The actions of the watcher's tasks, each in a process of its own: plans, results, and what is said of them. An action
takes and returns what can be sent, and imports what it needs there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from weightbeam.pipelines.running.without_beam import leave_out_services
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.tables import count
from weightbeam.pipelines.watching.config import EXPORT, MERGED, RESHARD
from weightbeam.transforms.planning.options import (
    ConvertOptions,
    Delivery,
    ExportOptions,
    Linking,
    VerifyOptions,
    hashed,
    options_as,
)


def prepare_to_make(local: bool) -> None:
    """Imports what plans, exports and verifies a step of a run; `local`: as pipelines of this machine."""
    if local:
        leave_out_services()
    for name in ("commands.export", "commands.verify", "running.graph"):
        importlib.import_module(f"weightbeam.pipelines.{name}")


def prepare_to_compare() -> None:
    """Imports what tells what a step changed, and draws it once, since a first picture takes longer."""
    from weightbeam.pipelines.watching import changes, describing  # noqa: F401
    from weightbeam.transforms.comparing.differences import Difference

    changes.picture({"": changes.grid_of({"weight": Difference(1, 1, squares=1.0, left=1.0)})}, "")


# --- of a release -----------------------------------------------------------------------------------------------------


def plan(source: str, asked: ConvertOptions) -> dict[str, Any]:
    """Plans a conversion; returns what is worth knowing of it.

    Raises:
      Refused: it has problems.
      Failed: a file can't be read, or isn't whole, which may be different another time.
    """
    from weightbeam.pipelines.commands.plan import plan
    from weightbeam.pipelines.running.problems import describe

    made = plan(source, asked=asked)
    if any(problem.kind in ("corrupt", "unreadable") for problem in made.problems):
        raise Failed(describe(made.problems))
    made.check()
    conversion = made.conversion
    return _about(conversion, conversion.plan.family, conversion.target_bytes) | {"made_of": _made_of(conversion)}


def _about(planned: Any, family: str, size: int) -> dict[str, Any]:
    """What is worth knowing of any plan; `size`: bytes of what is written."""
    return {"plan": planned.hash, "family": family, "target_bytes": size, "warnings": list(planned.warnings)}


def _made_of(conversion: Any) -> str:
    """What tells the content of a conversion's sources, and how its arrays are made of them, however its units are cut."""
    from weightbeam.formats.record.naming import digest

    facts = [[digest(source) for source in conversion.sources], conversion.making]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def convert(
    source: str, output: str, asked: ConvertOptions, how: Linking, beam: Sequence[str] = (), made_of: str = ""
) -> dict[str, Any]:
    """Converts, or goes on with it.

    Args:
      made_of: as `plan` found it; empty where an earlier version planned it.

    Raises:
      Refused: the runner can't be reached, or the plan has problems.
      Failed: it would be made of others by now; the next attempt plans anew.
    """
    from weightbeam.pipelines.commands.convert import carry_out, plan_into
    from weightbeam.pipelines.running.sources import check_beam

    check_beam(beam, "convert", {"source": source, "output": output})
    conversion = plan_into(source, output, asked, how, beam)
    if made_of and not conversion.plan.problems and _made_of(conversion) != made_of:
        also = ", or what is merged into it," if asked.lora else ", or its table,"
        raise Failed(f"{source}{also} isn't what the conversion was planned with any more")
    print(carry_out(conversion, output, how, beam))
    return {}


def verify(source: str, checkpoint: str, asked: VerifyOptions, beam: Sequence[str] = ()) -> dict[str, Any]:
    """Verifies; returns how many elements and arrays were compared, and of which share of them."""
    from weightbeam.pipelines.commands.verify import verify

    found = verify(checkpoint, source, asked=asked, beam=beam)
    print(found)
    found.check()
    findings = found.findings.values()
    about = {
        "elements": sum(each.compared for each in findings),
        "arrays": len(found.findings),
        "rounded": sum(each.rounded for each in findings),
    }
    return about | {"sample": found.sample}


# --- of a run ---------------------------------------------------------------------------------------------------------


def plan_step(kind: str, source: str, asked: Any, lora: str) -> dict[str, Any]:
    """Plans what is made of a step; returns what is worth knowing of it.

    Args:
      kind: `export`, `quantize` or `reshard`, the command that makes it.
      source: URL of the step.
      asked: the command's options.
      lora: what becomes of an adapter.

    Raises:
      Refused: it has problems.
      Failed: the step can't be read, which may be different another time.
    """
    from weightbeam.transforms.planning.adapters import is_adapter

    checkpoint = _opened(source)
    if kind != RESHARD and is_adapter(checkpoint):
        return _planned_adapter(checkpoint, kind, asked, lora)
    command = importlib.import_module(f"weightbeam.pipelines.commands.{kind}")
    return _planned(kind, command.plan(checkpoint if kind == EXPORT else source, asked=asked))


def _planned_adapter(checkpoint: Any, kind: str, asked: Any, lora: str) -> dict[str, Any]:
    """What is worth knowing of an adapter that is to be written for PEFT, or merged into the release that it is for. Raises
    Refused where it has problems.
    """
    from weightbeam.pipelines.commands import export

    written = dataclasses.replace(options_as(ExportOptions, asked), max_shard_size=None, family=None)
    about = _planned(EXPORT, export.plan(checkpoint, asked=written))
    if lora == MERGED:
        facts = [about["plan"], about["form_told"], MERGED if kind == EXPORT else kind, hashed(asked)]
        about["plan"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return about | {"family": "an adapter", "lora": True}


def _planned(kind: str, planned: Any) -> dict[str, Any]:
    """What is worth knowing of what is planned to be made of a step. Raises Refused where it has problems."""
    from weightbeam.formats.record.naming import digest
    from weightbeam.pipelines.running.problems import refuse

    refuse(planned.plan.problems)
    read = {"read": digest(planned.sources[0])}
    if kind == RESHARD:
        return _about(planned, planned.tree.kind, planned.target_bytes) | read
    reasons = Counter(planned.lossy.values())
    rounded = "; ".join(f"{count(number, 'tensor')}: {why}" for why, number in reasons.items())
    form = {"form": planned.like.root, "form_told": planned.like.digest}  # as records call it
    size = planned.files.size if planned.files else 0
    return _about(planned, planned.plan.family, size) | read | {"rounded": rounded} | form


def _opened(source: str) -> Any:
    """A checkpoint of a run.

    Raises:
      Refused: its tree isn't one that can be taken.
      Failed: it can't be read, which may be different another time.
    """
    from weightbeam.formats.orbax.source import open_orbax
    from weightbeam.formats.storage import StorageError
    from weightbeam.model_mappings.trees import TreeError

    try:
        return open_orbax(source)
    except StorageError as e:
        raise (Refused if isinstance(e.__cause__, TreeError) else Failed)(str(e)) from e


def write(command: str, **keywords: Any) -> dict[str, Any]:
    """Writes a result: goes on with what an attempt before made, or begins anew where the source isn't the same any
    more; what is staged there, or whole, is the watcher's own.

    Args:
      command: `export`, `quantize`, `merge` or `reshard`.
      keywords: of it, and the digests of what it was planned with: `read` of the step, `form_digest` of the release that
        the result is to be like, or to be merged into.

    Raises:
      Failed: it was made of others; nothing of it is kept, and the next attempt plans anew.
    """
    from weightbeam.formats.record.naming import digest
    from weightbeam.formats.storage import open_store
    from weightbeam.pipelines.running.output import ANOTHER_PLAN, ANOTHER_RESULT, HOLDS_OTHERS

    function = getattr(importlib.import_module(f"weightbeam.pipelines.commands.{command}"), command)
    read, form_digest = keywords.pop("read", ""), keywords.pop("form_digest", "")
    output = open_store(keywords["output"])
    try:
        made = function(**keywords, progress=False)
    except Refused as e:
        causes = {problem.cause for problem in e.problems}
        if causes.isdisjoint((ANOTHER_PLAN, ANOTHER_RESULT, HOLDS_OTHERS)):
            raise
        if ANOTHER_PLAN not in causes:
            output.delete_folder()
        how: Delivery = dataclasses.replace(keywords["how"], resume=False, overwrite=True)
        made = function(**{**keywords, "how": how}, progress=False)
    print(made)
    held, (root, now) = [digest(source) for source in made.planned.sources], made.planned.pattern
    changed = [root] if form_digest and now and now != form_digest else []
    if read and read not in held:
        changed.append(keywords["source"])
    if changed:
        output.delete_folder()
        raise Failed(f"{changed[0]} isn't what the step was planned with any more")
    return {}


def verify_reshard(a: str, b: str) -> dict[str, Any]:
    """Compares a copy `b` with the checkpoint that it was made of, array by array.

    Raises:
      Failed: an array differs by more than one rounding, or is missing.
    """
    from weightbeam.pipelines.commands.diff import diff

    found = diff(a, b, progress=False)
    wrong = [name for name, verdict in found.tensors.items() if verdict.status not in ("equal", "rounded")]
    if wrong:
        raise Failed(
            f"{count(len(wrong), 'array')} aren't the checkpoint's, such as {wrong[0]}: {found.tensors[wrong[0]].status}"
        )
    elements = sum(verdict.difference.elements for verdict in found.tensors.values() if verdict.difference)
    rounded = sum(verdict.status == "rounded" for verdict in found.tensors.values())
    return {"elements": elements, "arrays": len(found.tensors), "rounded": rounded, "sample": 1.0}
