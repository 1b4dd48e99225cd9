"""`weightbeam logits`: what a model makes of some tokens, and where another one, or MaxText, makes something else."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightbeam.formats.orbax.source import open_orbax
from weightbeam.formats.safetensors import is_release
from weightbeam.formats.storage import open_store
from weightbeam.formats.storage.token import name_secret
from weightbeam.pipelines.commands.convert import convert
from weightbeam.pipelines.commands.export import find_like
from weightbeam.pipelines.commands.export import plan as plan_export
from weightbeam.pipelines.commands.plan import plan
from weightbeam.pipelines.forward import maxtext
from weightbeam.pipelines.forward.sides import Side, of_checkpoint, of_release
from weightbeam.pipelines.forward.streamed import StreamedModel, check_installed
from weightbeam.pipelines.forward.tokens import tokenize
from weightbeam.pipelines.running.prepare import check_read, reading
from weightbeam.pipelines.terminal.arguments.parser import refuse_unknown
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import keywords_of, takes
from weightbeam.pipelines.terminal.progress import Report, reporter, watch_progress
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import Block, Table, count, human
from weightbeam.transforms.comparing.logits import LayerDifference, LogitsDifference, Trace, compare_traces
from weightbeam.transforms.planning.options import LogitsOptions

LOG = logging.getLogger("weightbeam")
ADAPTER = "adapter_config.json"
MAXTEXT = "MaxText"
AGREES = 1e-4  # MaxText adds up in another order: 1.5e-7 after three layers
SHOWN = 20  # tokens and layers that a report lists
TRACED = 6  # modules of a layer that are compared, about


@dataclasses.dataclass(frozen=True)
class Beside:
    """How far another model, or MaxText, is from the first.

    Attributes:
      where: the other one.
      logits: how far the logits are apart.
      layers: how far what each layer, and each module in it, makes is apart, in the order in which they do.
      tolerance: the relative difference that counts as none.
      tensors: what the first one that parts has for weights, by their names.
      limits: what MaxText is known not to express of this model, and the way round it.
    """

    where: str
    logits: LogitsDifference
    layers: tuple[LayerDifference, ...]
    tolerance: float
    tensors: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    @property
    def parts_at(self) -> LayerDifference | None:
        """The first layer, or module in one, where they part; None where they don't."""
        return next((each for each in self.layers if each.beyond(self.tolerance)), None)

    @property
    def ok(self) -> bool:
        """Whether no layer parts, nor the logits."""
        return self.parts_at is None and self.logits.relative <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        first = self.parts_at
        layer, _, part = first.name.partition("/") if first else ("", "", "")
        return {
            "where": self.where,
            "ok": self.ok,
            "tolerance": self.tolerance,
            "logits": _finite(dataclasses.asdict(self.logits)),
            "parts_at": {"layer": int(layer), "module": part or None, "tensors": self.tensors} if first else None,
            "limits": self.limits,
            "layers": [_finite(dataclasses.asdict(each)) for each in self.layers],
        }

    def blocks(self) -> Iterator[Block]:
        """What a person sees: the layers that part, what both make of it, and where to look."""
        parted = [each for each in self.layers if "/" not in each.name and each.beyond(self.tolerance)]
        if parted:
            table = Table("layer", ">relative", ">max")
            for each in parted[:SHOWN]:
                table.add_row(each.name, f"{each.relative:.3g}", f"{each.largest:.3g}")
            yield from (
                table,
                *([f"… and {len(parted) - SHOWN:,} more; --json FILE has all"] if len(parted) > SHOWN else []),
            )
        apart = self.logits
        yield f"logits of {self.where}: largest difference {apart.largest:.3g}, relative {apart.relative:.3g}"
        yield f"next tokens: KL {apart.kl:.3g} nats (largest {apart.largest_kl:.3g}), the same most likely one for {apart.top1:,} of {apart.tokens:,}"
        yield self._where()
        yield from (f"MaxText can't express this: {limit}" for limit in self.limits if not self.ok)

    def _where(self) -> str:
        """Where they part, in a sentence."""
        if (first := self.parts_at) is None:
            whole = [each for each in self.layers if "/" not in each.name]
            if not self.ok:
                return "they part behind the last layer: in the last norm or the head"
            most = max(whole, key=lambda each: each.relative, default=None)
            furthest = f"; the largest is {most.relative:.3g}, in layer {most.name}" if most and most.relative else ""
            return f"no layer parts by more than {self.tolerance:g}{furthest}"
        layer, _, part = first.name.partition("/")
        named = f", in {part} ({', '.join(self.tensors)})" if part and self.tensors else f", in {part}" if part else ""
        return f"they part in layer {layer}{named}: by {first.relative:.3g} of what it makes"


def _finite(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures for programs; JSON has no NaN."""
    return {
        name: str(value) if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in found.items()
    }


@dataclasses.dataclass(frozen=True, repr=False)
class Logits(Shown):
    """What a model makes of some tokens.

    Attributes:
      source: the model.
      tokens: their ids.
      logits: (token, vocab), in float32.
      dtype: of the arithmetic.
      beside: how far another one is from it; None where there is none.
    """

    source: str
    tokens: tuple[int, ...]
    logits: np.ndarray
    dtype: str
    beside: Beside | None = None

    @property
    def ok(self) -> bool:
        """Whether another one, if there is one, makes the same within the tolerance."""
        return self.beside is None or self.beside.ok

    @property
    def next(self) -> list[int]:
        """The most likely token behind each."""
        return [int(token) for token in self.logits.argmax(-1)]

    def to_dict(self) -> dict[str, Any]:
        largest = [float(value) for value in self.logits.max(-1)]
        return {
            "source": self.source,
            "tokens": list(self.tokens),
            "dtype": self.dtype,
            "next": [
                {"token": token, **_finite({"logit": logit})} for token, logit in zip(self.next, largest, strict=True)
            ],
            "beside": self.beside.to_dict() if self.beside else None,
        }

    def blocks(self) -> Iterator[Block]:
        table = Table(">position", ">token", ">most likely next", ">its logit")
        rows = list(zip(range(len(self.tokens)), self.tokens, self.next, self.logits.max(-1), strict=True))
        for position, token, likely, logit in rows[-SHOWN:]:
            table.add_row(str(position), str(token), str(likely), f"{logit:.4g}")
        yield table
        if self.beside:
            yield ""
            yield from self.beside.blocks()

    def brief(self) -> str:
        return f"{self.source}: logits of {count(len(self.tokens), 'token')}"


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
    name_secret(asked.hf_token_secret)
    _check_asked(source, other, asked)
    check_installed()
    first = StreamedModel(_open(source), asked.dtype)
    tokens = _tokens(first, asked)
    if asked.maxtext:
        return _beside_maxtext(first, tokens, asked, progress)
    models = [first, *([StreamedModel(_open(other, source, asked.maxtext_model), asked.dtype)] if other else [])]
    _check_alike(models)
    LOG.info(_memory(models, len(tokens)))
    made = [_run(model, tokens, bool(other), progress) for model in models]
    found = Logits(source, tokens, made[0][0], asked.dtype)
    if other:
        found = dataclasses.replace(found, beside=_compare(first, other, made[0], made[1], asked.tolerance or 0.0))
    return _saved(found, asked.save_logits)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Runs, reports, and says whether both are the same within the tolerance."""
    refuse_unknown(args, rest)
    if not args.source:
        raise Refused("--source is missing: the release whose logits are wanted")
    found = logits(**keywords_of(args, logits))
    say(args, found)
    return 0 if found.ok else 1


def _check_asked(source: str, other: str | None, asked: LogitsOptions) -> None:
    """Raises `Refused` with all that can't be meant together."""
    wrong = []
    if bool(asked.prompt) == bool(asked.token_ids):
        wrong.append("--prompt and --token_ids: exactly one of them says what the model is run on")
    if other and asked.maxtext:
        wrong.append(f"--maxtext={asked.maxtext}: compares {source} with MaxText; leave {other} out, or --maxtext")
    if asked.maxtext and asked.dtype != "float32":
        wrong.append(f"--dtype={asked.dtype}: with --maxtext both compute in float32; leave it out")
    if asked.save_logits and not Path(asked.save_logits).absolute().parent.is_dir():
        wrong.append(f"--save_logits={asked.save_logits}: no such folder")
    if wrong:
        raise Refused.together([Refused(each) for each in wrong])


def _open(where: str, base: str | None = None, model: str | None = None) -> Side:
    """A release; or beside the release `base` an Orbax checkpoint, or an adapter for it.

    Raises:
      Refused: it can't be looked at, or problems stand against it.
    """
    with reading(where):
        store = open_store(where)
        store.check_readable()
        if base and ADAPTER in store.entries():
            return of_release(base, where)
        if is_release(store):
            return of_release(where)
        checkpoint = open_orbax(where)
        small = find_like(checkpoint, base)[1]
        return of_checkpoint(where, plan_export(checkpoint, like=base, maxtext_model=model), small)


def _tokens(model: StreamedModel, asked: LogitsOptions) -> tuple[int, ...]:
    """The tokens that the model is run on.

    Raises:
      Refused: some aren't the model's, or it has no tokenizer.
    """
    side = model.side
    tokens = asked.token_ids or tuple(tokenize(asked.prompt or "", side.small, side.where))
    if beyond := sorted({token for token in tokens if token >= model.vocab}):
        named = ", ".join(map(str, beyond[:SHOWN]))
        raise Refused(f"--token_ids: {side.where} knows tokens 0 to {model.vocab - 1}, and no {named}")
    return tokens


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
    first, second = facts[0], facts[-1]
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
    """Runs a model and tells how far it is, by layers.

    Raises:
      Failed: it failed on the way.
    """

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


def _beside_maxtext(
    model: StreamedModel, tokens: tuple[int, ...], asked: LogitsOptions, progress: bool | Report
) -> Logits:
    """A release beside MaxText, which is given the release as it is converted, and its `maxtext.yml`.

    Raises:
      Refused: the release can't be converted, or that interpreter has no MaxText.
      Failed: MaxText failed.
    """
    python = asked.maxtext or ""
    maxtext.check_python(python)
    planned = plan(
        model.side.sources[0].root, save_dtype="float32", scan_layers=False, maxtext_model=asked.maxtext_model
    )
    planned.check()
    config = planned.maxtext_config()
    LOG.info(_memory([model, model], len(tokens)))
    with tempfile.TemporaryDirectory(prefix="weightbeam-logits-") as folder:
        checkpoint = convert(planned, f"{folder}/checkpoint", progress=progress).path
        mine = _run(model, tokens, True, progress)
        LOG.info(f"running MaxText of {python} on {checkpoint}")
        theirs = maxtext.run(python, Path(folder), config.to_dict(), checkpoint, tokens, planned.conversion.plan)
    tolerance = AGREES if asked.tolerance is None else asked.tolerance
    beside = _compare(model, MAXTEXT, mine, theirs, tolerance)
    found = Logits(model.side.where, tokens, mine[0], asked.dtype, dataclasses.replace(beside, limits=config.limits))
    return _saved(found, asked.save_logits)


def _saved(found: Logits, file: str | None) -> Logits:
    """Writes the logits where they are asked for.

    Raises:
      Refused: the file can't be written.
    """
    if file:
        try:
            with Path(file).open("wb") as out:
                np.save(out, found.logits)
        except OSError as e:
            raise Refused(f"--save_logits={file}: {e.strerror}") from e
    return found
