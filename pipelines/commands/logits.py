"""`weightbeam logits`: what a model makes of some tokens, and where another one, or MaxText, makes something else."""

from __future__ import annotations

import argparse
import dataclasses
import io
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from weightbeam.formats.adapters.config import CONFIG
from weightbeam.formats.orbax.source import OrbaxCheckpoint, open_orbax
from weightbeam.formats.safetensors import is_release
from weightbeam.formats.storage import open_store
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.versions import NEWEST
from weightbeam.pipelines.commands.convert import convert
from weightbeam.pipelines.commands.export import plan as plan_export
from weightbeam.pipelines.commands.plan import Plan, plan
from weightbeam.pipelines.forward import maxtext
from weightbeam.pipelines.forward.report import SHOWN, Beside, Logits
from weightbeam.pipelines.forward.sides import Side, of_checkpoint, of_release
from weightbeam.pipelines.forward.streamed import StreamedModel, check_installed
from weightbeam.pipelines.forward.tokens import Tokenizer
from weightbeam.pipelines.running.like import find_like
from weightbeam.pipelines.running.sources import check_read, reading
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.terminal.errors import Refusals, Refused
from weightbeam.pipelines.terminal.keywords import asked_of, keywords_of, takes
from weightbeam.pipelines.terminal.option_files import why_unwritable
from weightbeam.pipelines.terminal.progress import Report, reporter, watch_progress
from weightbeam.pipelines.terminal.shell import say, write_bytes
from weightbeam.pipelines.terminal.shown import Intended
from weightbeam.pipelines.terminal.tables import count, human
from weightbeam.pipelines.terminal.wording import worded
from weightbeam.transforms.comparing.logits import LogitsDifference, Trace, compare_traces
from weightbeam.transforms.planning.options import LogitsOptions

LOG = logging.getLogger("weightbeam")
MAXTEXT = "MaxText"
AGREES = 1e-4  # MaxText adds up in another order: 1.5e-7 after three layers
TRACED = 6  # modules of a layer that are compared, about


@takes(asked=LogitsOptions)
def logits(source: str, other: str | None = None, *, asked: LogitsOptions, progress: bool | Report = True) -> Logits:
    """Runs a model on some tokens with transformers' own layers, the weights of one layer in memory at a time; and
    another one, or MaxText, beside it. What differs doesn't raise: see `Logits.ok`. Needs torch and transformers.

    Args:
      source: a release, quantised or not: a folder, `gs://…`, `hf://…`.
      other: what is compared with it: a release, an Orbax checkpoint of the model, or a PEFT adapter for it.
      progress: shown on standard error, told to a callback, or False for neither.

    Returns:
      The logits, of shape (token, vocab), and how far the other's are from them; it prints as the command does.

    Raises:
      Refused: it can't be done: everything that stands against it.
      Failed: it failed on the way.

    Example:
      >>> compared = wb.logits("models/qwen3", "ckpt", token_ids=(1, 2, 3), progress=False)
      >>> compared.ok
      True
    """
    use_secret(asked.hf_token_secret)
    ready = _prepare(source, other, asked)
    if ready.planned:
        found = _beside_maxtext(ready, ready.planned, asked, progress)
    else:
        LOG.info(_memory(ready.models, len(ready.tokens)))
        made = [_run(model, ready.tokens, bool(other), progress) for model in ready.models]
        beside = _compare(ready.models[0], other, made[0], made[1], asked.tolerance or 0.0) if other else None
        found = Logits(source, ready.tokens, made[0][0], asked.dtype, beside)
    if ready.tokenizer:
        found = dataclasses.replace(found, texts=ready.tokenizer.texts([*found.tokens, *found.next]))
    return _saved(found, asked.save_logits)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Runs, reports, and says whether both are the same within the tolerance; with `--dry_run` what it would run."""
    if not args.source:
        raise Refused("--source is missing: the release whose logits are wanted")
    if args.dry_run:
        asked = asked_of(args, LogitsOptions)
        use_secret(asked.hf_token_secret)
        ready = _prepare(args.source, args.other, asked)
        figures = {"source": args.source, "other": args.other, "tokens": list(ready.tokens)}
        figures |= {"layers": len(ready.models[0].layers), "bytes": sum(model.nbytes for model in ready.models)}
        say(args, Intended([f"would run {_memory(ready.models, len(ready.tokens))}"], figures))
        return 0
    found = logits(**keywords_of(args, logits))
    say(args, found)
    return 0 if found.ok else 1


@dataclasses.dataclass
class _Ready:
    """What a run is made of, as far as it could be made.

    Attributes:
      models: the first, and the one beside it.
      tokens: that they are run on.
      tokenizer: that made them of a prompt; None where they were given.
      planned: how the first is converted for MaxText.
      version: of MaxText.
    """

    models: list[StreamedModel] = dataclasses.field(default_factory=list)
    tokens: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None
    planned: Plan | None = None
    version: str = ""


def _prepare(source: str, other: str | None, asked: LogitsOptions) -> _Ready:
    """Everything that can be known before a model runs. Raises Refused: all that stands against it."""
    check_installed()
    ready, refusals = _Ready(), Refusals()
    for wrong in _wrong(source, other, asked):
        with refusals.kept():
            raise Refused(wrong)
    with refusals.kept():
        ready.version = maxtext.check_python(asked.maxtext, asked.maxtext_patience) if asked.maxtext else ""
    with refusals.kept():
        ready.models.append(StreamedModel(_open(source, asked), asked.dtype))
        ready.planned = _plan(source, asked) if asked.maxtext else None
    with refusals.kept():
        if ready.models:
            side = ready.models[0].side
            ready.tokenizer = Tokenizer(side.small, side.where) if asked.prompt else None
            ready.tokens = asked.token_ids or (ready.tokenizer.ids(str(asked.prompt)) if ready.tokenizer else ())
            _check_known(ready.tokens, ready.models[0])
    with refusals.kept():
        beside = _open(other, asked, source) if other else None
        ready.models += [StreamedModel(beside, asked.dtype)] if beside else []
        held = beside.sources if beside else ()
        if asked.maxtext_model and not asked.maxtext and not any(isinstance(one, OrbaxCheckpoint) for one in held):
            why = "is for an Orbax checkpoint beside the release, or for --maxtext; leave it out"
            raise Refused(f"--maxtext_model={asked.maxtext_model}: {why}")
    with refusals.kept():
        _check_alike(ready.models)
    refusals.check()
    return ready


def _wrong(source: str, other: str | None, asked: LogitsOptions) -> Iterator[str]:
    """All that can't be meant together."""
    if bool(asked.prompt) == bool(asked.token_ids):
        yield "--prompt or --token_ids says what the model is run on; give one of them"
    if other and asked.maxtext:
        yield f"--maxtext={asked.maxtext}: compares {source} with MaxText; leave {other} out, or --maxtext"
    if asked.maxtext and asked.dtype != "float32":
        yield f"--dtype={asked.dtype}: with --maxtext both compute in float32; leave it out"
    if not asked.maxtext and asked.maxtext_patience != LogitsOptions().maxtext_patience:
        yield "--maxtext_patience: is of --maxtext; leave it out"
    if asked.save_logits and (why := why_unwritable(asked.save_logits)):
        yield f"--save_logits={asked.save_logits}: {why}"


def _open(where: str, asked: LogitsOptions, base: str | None = None) -> Side:
    """A release, or what is taken of it; or beside the release `base` an Orbax checkpoint, or an adapter for it. Raises
    Refused where it can't be looked at, or problems stand against it.
    """
    with reading(where):
        store = open_store(where)
        store.check_readable()
        if base and CONFIG in store.entries():
            if asked.cut != Cut():
                raise Refused(f"{where}: is an adapter, which --layers, --experts and --vocab_rows can't cut")
            return of_release(base, where)
        if is_release(store):
            return of_release(where, cut=asked.cut)
        if base is None:
            raise Refused(f"{where}: is no release; name the release first, then what is compared with it")
        if asked.cut != Cut():
            raise Refused(
                f"{where}: is an Orbax checkpoint; compare it with what `weightbeam cut` writes of {base}, without --layers, --experts and --vocab_rows"
            )
        checkpoint = open_orbax(where)
        like = find_like(checkpoint, base)
        # a release that isn't quantised has its own dtypes; codes have values in float32, which an export would round
        dtype = "float32" if "quantization_config" in like.config else "auto"
        planned = plan_export(checkpoint, like=base, maxtext_model=asked.maxtext_model, save_dtype=dtype)
        return of_checkpoint(where, planned, like.small)


def _plan(source: str, asked: LogitsOptions) -> Plan:
    """How a release, or what is taken of it, is converted for MaxText. Raises Refused where it can't be."""
    kept = dict(layers=asked.layers, experts=asked.experts, vocab_rows=asked.vocab_rows)
    how = dict(save_dtype="float32", scan_layers=False, maxtext=NEWEST, maxtext_model=asked.maxtext_model)
    planned = plan(source, **how, **kept)
    planned.check()
    return planned


def _check_known(tokens: Sequence[int], model: StreamedModel) -> None:
    """Raises Refused where some tokens aren't the model's."""
    if beyond := sorted({token for token in tokens if token >= model.vocab}):
        named = ", ".join(map(str, beyond[:SHOWN]))
        raise Refused(f"--token_ids: {model.side.where} knows tokens 0 to {model.vocab - 1}, and no {named}")


def _check_alike(models: Sequence[StreamedModel]) -> None:
    """Raises `Refused` with all in which two models aren't of one kind."""
    facts = [
        {
            "model_type": model.model.config.get_text_config().model_type,
            "vocabulary": model.vocab,
            "hidden_size": model.model.config.get_text_config().hidden_size,
            "layers": len(model.layers),
        }
        for model in models
    ]
    if len(facts) < 2:
        return
    first, second = facts
    a, b = models[0].side.where, models[-1].side.where
    if wrong := [
        f"  {name}: {first[name]} of {a}, {second[name]} of {b}" for name in first if first[name] != second[name]
    ]:
        raise Refused("logits of two models of different kinds can't be compared:\n" + "\n".join(wrong))


def _memory(models: Sequence[StreamedModel], tokens: int) -> str:
    """What the run takes, in a sentence."""
    largest = max((model.largest for model in models), key=lambda group: group.nbytes)
    first, traced = models[0], 0
    if len(models) > 1:
        width = first.model.config.get_text_config().hidden_size
        traced = len(models) * len(first.layers) * TRACED * tokens * width * 4
    kept = traced + len(models) * tokens * first.vocab * 4
    return (
        f"{count(len(first.layers), 'layer')}, {count(tokens, 'token')}: at most twice {human(largest.nbytes)} of weights in memory ({largest.name})"
        f" and {human(kept)} of what they make; {human(sum(model.nbytes for model in models))} go through"
    )


def _run(model: StreamedModel, tokens: Sequence[int], trace: bool, progress: bool | Report) -> tuple[np.ndarray, Trace]:
    """Runs a model and tells how far it is, by layers. Raises Failed where it failed on the way."""

    def state() -> str:
        return f"layer {model.layer} of {len(model.layers)}"

    with watch_progress(model.nbytes, lambda: model.done, "running", reporter(progress), state, [model.side.where]):
        made = model.run(tokens, trace)
    check_read(model.side.sources)
    return made


def _compare(
    model: StreamedModel, where: str, a: tuple[np.ndarray, Trace], b: tuple[np.ndarray, Trace], tolerance: float
) -> Beside:
    """What a model made of tokens, beside what another one did."""
    rows = min(a[0].shape[-1], b[0].shape[-1])  # MaxText's vocabulary may be padded
    apart = LogitsDifference.of(a[0][:, :rows], b[0][:, :rows])
    found = Beside(where, apart, tuple(compare_traces(a[1], b[1])), tolerance)
    if (first := found.parts_at) is None:
        return found
    return dataclasses.replace(found, tensors=tuple(model.tensors_below(first.name)))


def _beside_maxtext(ready: _Ready, planned: Plan, asked: LogitsOptions, progress: bool | Report) -> Logits:
    """A release beside MaxText, which is given the release as it is converted, and its `maxtext.yml`. Raises Failed
    where MaxText failed, or came no further.
    """
    (model,), tokens, version = ready.models, ready.tokens, ready.version
    python, config = asked.maxtext or "", planned.maxtext_config()
    LOG.info(_memory([model, model], len(tokens)))
    if version != NEWEST:
        LOG.warning(worded(f"--maxtext={python}: is MaxText {version}; what is known of it is of {NEWEST}"))
    with tempfile.TemporaryDirectory(prefix="weightbeam-logits-") as folder:
        checkpoint = convert(planned, f"{folder}/checkpoint", progress=progress).path
        mine = _run(model, tokens, True, progress)
        LOG.info(f"running MaxText {version} of {python}")
        keys, arrays = config.to_dict(), planned.conversion.plan
        theirs = maxtext.run(
            python, Path(folder), keys, checkpoint, tokens, arrays, asked.maxtext_patience, reporter(progress)
        )
    tolerance = AGREES if asked.tolerance is None else asked.tolerance
    beside = _compare(model, MAXTEXT, mine, theirs, tolerance)
    return Logits(model.side.where, tokens, mine[0], asked.dtype, dataclasses.replace(beside, limits=config.limits))


def _saved(found: Logits, file: str | None) -> Logits:
    """Writes the logits where they are asked for. Raises Failed where the file can't be written."""
    if file:
        np.save(made := io.BytesIO(), found.logits)
        write_bytes("--save_logits", file, made.getvalue())
    return found
