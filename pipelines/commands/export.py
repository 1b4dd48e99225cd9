"""`weightbeam export`: an Orbax checkpoint back into a Hugging Face release."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from weightbeam.formats.encodings import stored_bytes
from weightbeam.formats.orbax import files_beside, step_of
from weightbeam.formats.orbax.source import OrbaxCheckpoint, open_orbax
from weightbeam.formats.release.config_text import ConfigEdits
from weightbeam.formats.release.files import role_of
from weightbeam.formats.storage import StorageError, open_store
from weightbeam.model_mappings.config import NEXTN, QUANTIZATIONS
from weightbeam.model_mappings.maxtext_config import FILE
from weightbeam.pipelines.commands.adapters import ExportedAdapter, small_files
from weightbeam.pipelines.commands.releases import (
    Released,
    adapter_facts,
    going_to,
    loading,
    make_release,
    make_small_files,
    run_release,
)
from weightbeam.pipelines.running.like import find_like, read_maxtext_config, read_tokenizer, with_tokenizer
from weightbeam.pipelines.running.sources import check_named, open_adapters
from weightbeam.pipelines.terminal.errors import Refused, refusing, try_each
from weightbeam.pipelines.terminal.keywords import asked_of, takes
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.pipelines.terminal.tables import count, human
from weightbeam.transforms.cutting.quantizing import Given
from weightbeam.transforms.planning.adapter_export import AdapterExport, plan_adapter
from weightbeam.transforms.planning.adapters import is_adapter
from weightbeam.transforms.planning.export_planner import plan_export
from weightbeam.transforms.planning.exporting import Export, Like, dtype_of_model
from weightbeam.transforms.planning.options import AUTO, RELEASED, ExportOptions, ToHub

# keywords that adapters have no use for
OF_MODELS = ("save_dtype", "max_shard_size", "lora", "family", "maxtext_config", "tokenizer", "multimodal", "mtp")


@dataclasses.dataclass(frozen=True, repr=False)
class Exported(Released):
    """What came of an export; see `Released`."""

    planned: Export

    def details(self) -> list[str]:
        reasons = {"rounded once": self.planned.lossy, "of the release left out": self.planned.plan.dropped}
        lines = [
            f"{count(len(why), 'tensor')} {what}: {'; '.join(sorted(set(why.values()))[:3])}"
            for what, why in reasons.items()
            if why
        ]
        release, checkpoint = shlex.quote(self.folder), shlex.quote(self.planned.source.root)
        check = (
            f"compare:  weightbeam diff {checkpoint} {release}"
            if self.planned.adapters or self.planned.decoded
            else f"check it: weightbeam verify --source {release} --checkpoint {checkpoint}"
        )
        return [*lines, *loading(self.folder, self.planned.form.config, self.planned.layout.tensors), check]


@takes(asked=ExportOptions, how=ToHub)
def export(
    source: str,
    output: str,
    *,
    asked: ExportOptions,
    how: ToHub,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Exported | ExportedAdapter:
    """Writes an Orbax checkpoint as a Hugging Face release: safetensors files, index, `config.json`, tokenizer and the
    rest. An adapter of MaxText's becomes a folder for PEFT.

    Args:
      source: the checkpoint: its root, a step or the item, in a folder or in `gs://`; one that MaxText's training
        wrote, too.
      output: the folder of the release, which must not be there yet; or `hf://owner/name`, where it becomes one commit.
      beam: Beam's options.
      progress: whether to show it, or what is told of it.

    Returns:
      Where the release is, and what it took; of an adapter, the folder for PEFT.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> tuned = wb.export("ckpt", "tuned", progress=False)
      >>> wb.diff("models/qwen3", "tuned", progress=False).ok
      True
    """
    planned, written = make_release("export", source, output, asked, how, beam, progress, plan)
    return ExportedAdapter(planned, written) if isinstance(planned, AdapterExport) else Exported(planned, written)


def _open(source: str, step: int | None) -> OrbaxCheckpoint:
    """The checkpoint that `--source` names. Raises Refused where there is none, or its weights can't be taken."""
    check_named("export", source=source)
    with refusing(StorageError):
        if step is None:
            return open_orbax(source)
        place = step_of(source, step)
        steps = sorted((name for name in place.parent.folders() if name.isdecimal()), key=int)
        if steps and place.name not in steps:
            raise Refused(f"--step={step}: {place.parent} has no such step; there are {', '.join(steps)}")
        return open_orbax(place)


@takes(asked=ExportOptions)
def plan(
    source: str | OrbaxCheckpoint, *, asked: ExportOptions, output: str | None = None, slots: int | None = None
) -> Export:
    """Plans an export; problems stay in the plan. See `export`; `slots` as `plan_export` has it.

    Raises:
      Refused: there is nothing to plan.
    """
    checkpoint = source if isinstance(source, OrbaxCheckpoint) else _open(source, asked.step)
    if is_adapter(checkpoint):
        return _plan_adapter(checkpoint, asked, output, slots)
    if asked.maxtext_config and asked.like:
        raise Refused(
            "--maxtext_config and --like are both given; name what config.json should be made of, or the release that it is taken from"
        )
    if asked.lora_alpha is not None:
        raise Refused(f"--lora_alpha: is of an adapter, and {checkpoint.root} holds a model; leave it out")
    like, tokenizer, adapters = try_each(
        lambda: _find_like(checkpoint, asked),
        lambda: read_tokenizer(asked.tokenizer) if asked.tokenizer else None,
        lambda: open_adapters(asked),
    )
    options = dataclasses.replace(going_to(output, asked), maxtext_model=asked.maxtext_model or like.model)
    small = with_tokenizer(like.small, tokenizer) if tokenizer else like.small
    if asked.quantize and asked.like and like.release:
        like = dataclasses.replace(like, given=Given.of(like.release))
    planned = plan_export(options, checkpoint, like, adapters, slots)
    if planned.plan.problems:
        return planned
    with refusing(StorageError):  # they are read only now
        return dataclasses.replace(planned, small=make_small(planned, small, output))


def _plan_adapter(
    checkpoint: OrbaxCheckpoint, asked: ExportOptions, output: str | None, slots: int | None
) -> AdapterExport:
    """Plans the export of an adapter; the release that it is for is found as for any checkpoint. Raises Refused where that
    can't be read, or an option has no meaning for factors.
    """
    if vain := [f"--{name}" for name in OF_MODELS if getattr(asked, name) not in (None, AUTO, (), False)]:
        raise Refused(
            f"{', '.join(vain)}: {checkpoint.root} is an adapter, whose factors are written as they are; leave that out"
        )
    with refusing(StorageError):
        like = find_like(checkpoint, asked.like)
        planned = plan_adapter(going_to(output, asked), checkpoint, like, slots)
    if planned.plan.problems:
        return planned
    return dataclasses.replace(planned, small=small_files(planned, output or ""))


def _find_like(checkpoint: OrbaxCheckpoint, asked: ExportOptions) -> Like:
    """The release whose form the new one has. Raises Refused where it can't be found, or read."""
    with refusing(StorageError):
        files_beside(open_store(checkpoint.root).parent)  # refuses what is no file
        if asked.maxtext_config:
            return read_maxtext_config(asked.maxtext_config)
        return find_like(checkpoint, asked.like, bool(asked.multimodal or asked.mtp))


def plan_rows(planned: Export) -> Iterator[tuple[str, str]]:
    """What an export would do, for a person: what it takes, what is rounded, left out and edited."""
    plan, weights = planned.plan, count(len(planned.encodings), "weight")
    yield "source", f"{planned.source.root}: {planned.source.tree.kind}, {weights}, {human(planned.source_bytes)}"
    yield "like", planned.like.root or "the table alone"
    named = f"{plan.family}, MaxText's {plan.model}" if plan.model else plan.family
    yield "family", f"{named}: {plan.note}" if plan.note else named
    if isinstance(planned, AdapterExport):
        yield "adapter", planned.scaling
    if planned.chunks:
        nbytes = sum(array.nbytes for array in planned.unpacked)
        of = f"{count(len(planned.chunks), 'chunk')} of {count(len(planned.unpacked), 'array')}"
        yield "unpacked", f"{of} first, {human(nbytes)} of disk meanwhile"
    if planned.taken:
        yield "taken", f"{_taken(planned)}, {human(sum(map(stored_bytes, planned.taken.values())))}"
    for title, reasons in (("rounded", planned.lossy), ("left out", plan.dropped)):
        for reason_, times in Counter(reasons.values()).most_common(5):
            yield title, f"{count(times, 'tensor')}: {reason_}"
    for key, value in planned.config_edits.items():
        yield "config.json", f"{key} becomes {json.dumps(value)}"


def make_small(planned: Export, small: Mapping[str, bytes], output: str | None = None) -> dict[str, bytes]:
    """The small files of the release that is written; `small` are those of the release that it is like."""
    if planned.is_text_alone:
        text = json.dumps(dict(planned.form.config), indent=2, ensure_ascii=False)
        small = {name: small[name] for name in small if role_of(name) != "processor"} | {"config.json": text.encode()}
    tags = ["fp8"] if planned.quantization else []
    files = make_small_files(planned, planned.form, small, _edits(planned), _facts(planned), output, tags=tags)
    return files | ({FILE: planned.plan.maxtext.to_yaml().encode()} if planned.plan.maxtext else {})


def _edits(planned: Export) -> ConfigEdits:
    """What `config.json` has to say otherwise."""
    edits = planned.config_edits
    return ConfigEdits(
        dtype=_dtype(planned),
        vocab_size=edits.get("vocab_size"),
        drop_quantization=True,
        quantization=planned.quantization or None,
        nextn=next((edits[field] for field in NEXTN if field in edits), None),
        fields={field: value for field, value in edits.items() if field not in ("vocab_size", *NEXTN)},
    )


def _dtype(planned: Export) -> str | None:
    """The dtype that `config.json` is to say; None where it stays as it is."""
    if planned.options.save_dtype in RELEASED:
        return planned.options.save_dtype
    config = planned.form.config
    if dtype_of_model(config) is None:  # engines would take float32, or float16
        names = (tensor.dtype.name for tensor in planned.layout.tensors.values())
        return Counter(name for name in names if name in RELEASED).most_common(1)[0][0]
    decoded = any(key in config for key in QUANTIZATIONS) and not planned.kept
    return "bfloat16" if decoded else None


def _facts(planned: Export) -> dict[str, str]:
    """What the model card says of where the release comes from; what is empty isn't said."""
    form = ""
    if planned.is_text_alone:
        form = (
            f"the language model alone, {planned.config_edits['model_type']}; config.json is its part of the release's"
        )
    return {
        "weights": planned.source.root,
        "tree": planned.source.tree.kind,
        "MaxText model": planned.plan.model or "",
        "config from": planned.like.root,
        **adapter_facts(planned.adapters),
        "rounded": _sum_up(planned.lossy),
        "taken from the release": _taken(planned),
        "form": form,
        "left out of the release": _sum_up(planned.plan.dropped),
    }


def _taken(planned: Export) -> str:
    """What is taken of a release beside the checkpoint's weights; empty for nothing."""
    if not planned.taken:
        return ""
    return (
        f"{count(len(planned.taken), 'tensor')} of {planned.like.root}: parts of the model that the weights don't hold"
    )


def _sum_up(reasons: Mapping[str, str]) -> str:
    """How many tensors there are reasons for, and the reasons; empty where there are none."""
    return f"{count(len(reasons), 'tensor')}: {'; '.join(sorted(set(reasons.values())))}" if reasons else ""


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Exports, and says what came of it; with `--dry_run` says what it would do."""
    return run_release(args, rest, asked_of(args, ExportOptions), export, plan, plan_rows)
