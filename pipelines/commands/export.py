"""`weightbeam export`: an Orbax checkpoint back into a Hugging Face release."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from weightbeam.formats.encodings import stored_bytes
from weightbeam.formats.orbax import check_beside, files_beside, step_of
from weightbeam.formats.orbax.source import OrbaxCheckpoint, open_orbax
from weightbeam.formats.record.naming import digest, is_name
from weightbeam.formats.record.provenance import tensors_of
from weightbeam.formats.release.cutting import cut_release
from weightbeam.formats.release.files import ARCHIVE, carried_files, packed_files, role_of, token_ids
from weightbeam.formats.safetensors import HfCheckpoint, Shard, Tensor, open_hf
from weightbeam.formats.storage import StorageError, open_store, reason
from weightbeam.formats.storage.strict_json import JsonError, parse_json
from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.config import NEXTN
from weightbeam.model_mappings.config_json import as_taken, config_json
from weightbeam.model_mappings.configuration import MaxTextConfigError
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.maxtext_config import FILE
from weightbeam.model_mappings.registry import UnknownFamilyError
from weightbeam.pipelines.commands.adapters import ExportedAdapter, export_adapter
from weightbeam.pipelines.commands.releases import (
    about,
    check_hub,
    check_places,
    dry_run,
    going_to,
    loading,
    make_small_files,
    no_source,
    ready_text,
    size_lines,
    slots_for,
    to_dict,
)
from weightbeam.pipelines.running.carry import carry
from weightbeam.pipelines.running.prepare import check_beam, open_adapters, refuse
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.running.writing import DONE, Written
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import asked_of, keywords_of, takes
from weightbeam.pipelines.terminal.maxtext_file import read_maxtext_yaml
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import count, human
from weightbeam.transforms.cutting.quantizing import Given
from weightbeam.transforms.planning.adapters import AdapterExport, is_adapter, plan_adapter
from weightbeam.transforms.planning.export_planner import plan_export
from weightbeam.transforms.planning.exporting import DTYPES as SAVED
from weightbeam.transforms.planning.exporting import Export, Like, dtype_of_model
from weightbeam.transforms.planning.options import AUTO, ExportOptions, ToHub

LOG = logging.getLogger("weightbeam")
# keywords that adapters have no use for
OF_MODELS = ("save_dtype", "max_shard_size", "lora", "family", "maxtext_config", "tokenizer", "multimodal", "mtp")
GENERATION = "generation_config.json"
TOKENIZER_ROLES = ("tokenizer", "chat template", "processor")


@dataclasses.dataclass(frozen=True, repr=False)
class Exported(Shown):
    """What came of an export.

    Attributes:
      export: what was planned.
      written: where the release is, and how long it took.
    """

    export: Export
    written: Written

    @property
    def folder(self) -> str:
        """Where the release is."""
        return self.written.folder

    @property
    def page(self) -> str:
        """Of the commit on the hub; empty elsewhere."""
        return self.written.page

    def to_dict(self) -> dict[str, Any]:
        return to_dict(self.export, self.written)

    def blocks(self) -> list[str]:
        lines = [about(self.written, self.export.layout)]
        if self.written.state == DONE or self.page:
            for what, reasons in (
                ("rounded once", self.export.lossy),
                ("of the release left out", self.export.plan.dropped),
            ):
                if reasons:
                    lines.append(
                        f"{count(len(reasons), 'tensor')} {what}: {'; '.join(sorted(set(reasons.values()))[:3])}"
                    )
            lines += loading(self.folder, self.export.form.config)
            release, checkpoint = shlex.quote(self.folder), shlex.quote(self.export.source.root)
            lines.append(
                f"compare:  weightbeam diff {checkpoint} {release}"
                if self.export.adapters or self.export.decoded
                else f"check it: weightbeam verify --source {release} --checkpoint {checkpoint}"
            )
        if self.written.compared:
            lines += self.written.compared.lines()
        return lines


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
    check_places("export", source, output, beam)
    use_secret(how.hf_token_secret)
    checkpoint = _open(source, asked.step)
    if is_adapter(checkpoint):
        adapter = plan_adapter_with(checkpoint, asked)
        return export_adapter(adapter, output, how.overwrite, how.create_pr, asked.full_paths)
    if asked.lora_alpha is not None:
        raise Refused(f"--lora_alpha: is of an adapter, and {checkpoint.root} holds a model; leave it out")
    slots = slots_for(asked, beam, source, output, how.resume)
    planned = plan(checkpoint, asked=asked, output=output, slots=slots)
    return Exported(planned, carry(planned, output, how, beam, progress))


def _open(source: str, step: int | None) -> OrbaxCheckpoint:
    """The checkpoint that `--source` names.

    Raises:
      Refused: there is none, or its weights can't be taken.
    """
    if not source:
        raise Refused(no_source("export"))
    try:
        return open_orbax(source if step is None else step_of(source, step))
    except StorageError as e:
        raise Refused(str(e)) from e


def plan_adapter_with(checkpoint: OrbaxCheckpoint, asked: ExportOptions) -> AdapterExport:
    """Plans the export of an adapter; the release that it is for is found as for any checkpoint.

    Raises:
      Refused: the release can't be read, or an option has no meaning for factors, which are written as they are.
    """
    if vain := [f"--{name}" for name in OF_MODELS if getattr(asked, name) not in (None, AUTO, (), False)]:
        raise Refused(
            f"{', '.join(vain)}: {checkpoint.root} is an adapter, whose factors are written as they are; leave that out"
        )
    try:
        form, *_ = find_form(checkpoint, asked.like)
    except StorageError as e:
        raise Refused(str(e)) from e
    return plan_adapter(checkpoint, form, asked.lora_alpha, asked.maxtext_model, asked.param_scan_axis)


@takes(asked=ExportOptions)
def plan(
    source: str | OrbaxCheckpoint, *, asked: ExportOptions, output: str | None = None, slots: int | None = None
) -> Export:
    """Plans an export; problems stay in the plan. See `export`; `slots` as `plan_export` has it.

    Raises:
      Refused: there is nothing to plan.
    """
    if asked.maxtext_config and asked.like:
        raise Refused(
            "--maxtext_config and --like are both given; name what config.json should be made of, or the release that it is taken from"
        )
    checkpoint = source if isinstance(source, OrbaxCheckpoint) else _open(source, asked.step)
    options = going_to(output, asked)
    try:
        files_beside(open_store(checkpoint.root).parent)  # refuses what is no file
        parts = None
        if asked.maxtext_config:
            form, small, said = read_maxtext_config(asked.maxtext_config)
            options = dataclasses.replace(options, maxtext_model=asked.maxtext_model or said)
        else:
            form, small, parts = find_form(checkpoint, asked.like, bool(asked.multimodal or asked.mtp))
        if asked.tokenizer:
            small = with_tokenizer(small, carried_files(asked.tokenizer), asked.tokenizer)
    except StorageError as e:
        raise Refused(str(e)) from e
    given = Given.of(parts) if asked.quantize and asked.like and parts else None
    planned = plan_export(options, checkpoint, form, open_adapters(options), given, slots, parts)
    if planned.plan.problems:
        return planned
    try:
        return dataclasses.replace(planned, small=make_small(planned, small, output))
    except StorageError as e:  # they are read only now
        raise Refused(str(e)) from e


def plan_text(planned: Export, threads: int, output: str | None = None) -> str:
    """What an export would do, for a person: totals, what is rounded, left out and edited, and the command that does
    it.
    """
    plan = planned.plan
    lines = [
        f"source      {planned.source.root}: {planned.source.tree.kind}, {count(len(planned.encodings), 'weight')}, {human(planned.source_bytes)}",
        f"like        {planned.like.root or 'the table alone'}",
        f"family      {plan.family}"
        + (f", MaxText's {plan.model}" if plan.model else "")
        + (f": {plan.note}" if plan.note else ""),
    ]
    lines += size_lines(planned, threads, output)
    if planned.chunks:
        nbytes = sum(planned.source.weights[key].nbytes for key in planned.unpacked)
        lines.append(
            f"unpacked    {count(len(planned.chunks), 'chunk')} of {count(len(planned.unpacked), 'array')} first, {human(nbytes)} of disk meanwhile"
        )
    if planned.parts:
        nbytes = sum(map(stored_bytes, planned.carried.values()))
        lines.append(
            f"taken       {count(len(planned.carried), 'tensor')} of {planned.parts.root}, {human(nbytes)}: parts of the model that the checkpoint doesn't hold"
        )
    for title, reasons in (("rounded", planned.lossy), ("left out", plan.dropped)):
        for reason_, times in Counter(reasons.values()).most_common(5):
            lines.append(f"{title:12}{count(times, 'tensor')}: {reason_}")
    lines += [f"config.json {key} becomes {json.dumps(value)}" for key, value in planned.config_edits.items()]
    lines += [f"warning     {warning}" for warning in planned.warnings]
    return "\n".join(map(printable, lines))


def find_form(
    checkpoint: OrbaxCheckpoint, like: str | None, with_parts: bool = False
) -> tuple[Like, Mapping[str, bytes], HfCheckpoint | None]:
    """The release whose form is taken, and its small files: the one that is named, else what the checkpoint remembers,
    else where it came from. And that release with its weights, of which towers and prediction layers can be taken:
    where it is named, or `with_parts`.

    Raises:
      Refused: none is named, and the checkpoint remembers none.
      StorageError: it can't be read.
    """
    if like:
        try:
            return _open_like(like)
        except StorageError as e:
            raise Refused(f"--like={e}") from e
    record = checkpoint.record
    if isinstance(record.get("config"), dict) and isinstance(record.get("tensors"), dict):
        step = open_store(checkpoint.root).parent
        check_beside(step, record, ARCHIVE)
        small = packed_files(step) or {}
        parts = _release_of(record) if with_parts else None
        return Like.of(_remembered(record)), small, parts
    if isinstance(url := record.get("source"), str) and is_name(url):
        raise Refused(
            f"the checkpoint was made of {url}, which is a name and no place; --like says where that is, or names a release that it should be like"
        )
    if isinstance(url, str):
        try:
            return _open_like(url)
        except OSError as e:
            raise Refused(
                f"the checkpoint was made of {url}, which can't be read ({reason(e)}); name a release that it should be like with --like"
            ) from e
    raise Refused(
        "--like is missing: the release whose config.json, tokenizer and names are taken, since this checkpoint remembers none; "
        "for a model without a release --maxtext_config names its MaxText configuration"
    )


def _release_of(record: Mapping[str, Any]) -> HfCheckpoint | None:
    """The release that a checkpoint was made of; None where it isn't there any more, or was cut by a table that a file of
    the record's is.
    """
    try:
        cut = Cut.of(record.get("options"))
        return None if is_name(url := record.get("source")) else cut_release(_open_like(str(url))[2], cut)
    except (OSError, UnknownFamilyError):
        return None


def read_maxtext_config(file: str) -> tuple[Like, Mapping[str, bytes], str | None]:
    """What a MaxText configuration says of a release: its form, its small files, and MaxText's name of the model.

    Raises:
      Refused: the file can't be read, or no family's model is like that.
    """
    given, told = as_taken(read_maxtext_yaml("--maxtext_config", file))
    if told:
        LOG.warning("%s: %s", file, told)
    try:
        made = config_json(given)
    except MaxTextConfigError as e:
        raise Refused(f"--maxtext_config={file}: {e}") from e
    if made.unknown:
        LOG.warning("%s: nothing in config.json says %s", file, ", ".join(made.unknown))
    for limit in made.limits:
        LOG.warning("%s: transformers computes what MaxText doesn't: %s", file, limit)
    small = {GENERATION: json.dumps(made.generation, indent=2).encode() + b"\n"}
    return Like("", made.config), small, made.model


def with_tokenizer(small: Mapping[str, bytes], given: Mapping[str, bytes], where: str) -> dict[str, bytes]:
    """The small files of a release with another one's tokenizer; where they say nothing yet of the tokens that begin
    and end a text, its own.

    Raises:
      Refused: there is no tokenizer, or it can't be said in `generation_config.json`.
    """
    taken = {name: given[name] for name in given if role_of(name) in TOKENIZER_ROLES}
    if not any(role_of(name) == "tokenizer" for name in taken):
        raise Refused(f"--tokenizer={where}: holds no tokenizer, such as tokenizer.json or tokenizer.model")
    kept = {name: small[name] for name in small if role_of(name) not in TOKENIZER_ROLES}
    try:
        generation = parse_json(kept[GENERATION]) if GENERATION in kept else None
    except JsonError as e:
        raise Refused(f"{GENERATION}, into which the tokenizer's tokens go: {e}") from e
    if isinstance(generation, dict) and "eos_token_id" not in generation and (ids := token_ids(taken)):
        kept[GENERATION] = json.dumps(generation | ids, indent=2).encode() + b"\n"
    return {**kept, **taken}


def _open_like(url: str) -> tuple[Like, Mapping[str, bytes], HfCheckpoint]:
    checkpoint = open_hf(url)
    refuse(
        [
            problem
            for problem in checkpoint.problems
            if problem.kind != "missing" or problem.subject == "config.json" or not checkpoint.config
        ],
        of=f"--like={url}",
    )
    return Like.of(checkpoint, digest(checkpoint)), carried_files(checkpoint.root, checkpoint.opened), checkpoint


def open_given(like: str) -> Given | None:
    """What the release that `--like` names gives to one in FP8; None where it isn't quantised itself.

    Raises:
      Refused: it can't be read.
    """
    try:
        return Given.of(open_hf(like))
    except OSError as e:
        raise Refused(f"--like={like}: {reason(e)}") from e


def _remembered(record: Mapping[str, Any]) -> HfCheckpoint:
    """The release that a checkpoint was made of, as its record describes it: names, dtypes and shapes, in their files.

    Raises:
      StorageError: the record can't be read.
    """
    root = str(record.get("source", ""))
    files: dict[str, list[Tensor]] = {}
    for tensor in tensors_of(record).values():
        files.setdefault(tensor.path, []).append(dataclasses.replace(tensor, path=f"{root}/{tensor.path}"))
    shards = tuple(Shard(name, f"{root}/{name}", 0, "", tuple(tensors)) for name, tensors in files.items())
    return HfCheckpoint(root, dict(record["config"]), shards)


def make_small(planned: Export, small: Mapping[str, bytes], output: str | None = None) -> dict[str, bytes]:
    """The small files of the release that is written; `small` are those of the release that it is like."""
    if planned.form is not planned.like:
        text = json.dumps(dict(planned.form.config), indent=2, ensure_ascii=False)
        small = {name: small[name] for name in small if role_of(name) != "processor"} | {"config.json": text.encode()}
    files = make_small_files(
        small, planned.form.config, _edits(planned), ("quantisation",), planned.like.root, _facts(planned), planned.naming(output or ""), output,
        planned.plan.family, tags=["fp8"] if planned.quantization else [],
    )  # fmt: skip
    return files | ({FILE: planned.plan.maxtext.to_yaml().encode()} if planned.plan.maxtext else {})


def _edits(planned: Export) -> dict[str, Any]:
    """What `config.json` has to say otherwise, as `edit_config` takes it."""
    edits = planned.config_edits
    return {
        "dtype": _dtype(planned),
        "vocab_size": edits.get("vocab_size"),
        "drop_quantization": True,
        "quantization": planned.quantization or None,
        "nextn": next((edits[field] for field in NEXTN if field in edits), None),
        "fields": {field: value for field, value in edits.items() if field not in ("vocab_size", *NEXTN)},
    }


def _dtype(planned: Export) -> str | None:
    """The dtype that `config.json` is to say; None where it stays as it is."""
    if planned.options.save_dtype in SAVED:
        return planned.options.save_dtype
    config = planned.form.config
    if dtype_of_model(config) is None:  # engines would take float32, or float16
        names = (tensor.dtype.name for tensor in planned.layout.tensors.values())
        return Counter(name for name in names if name in SAVED).most_common(1)[0][0]
    decoded = any(key in config for key in ("quantization_config", "compression_config")) and not planned.kept
    return "bfloat16" if decoded else None


def _facts(planned: Export) -> dict[str, str]:
    """What the model card says of where the release comes from; what is empty isn't said."""
    taken, form = "", ""
    if planned.parts:
        taken = f"{count(len(planned.carried), 'tensor')} of {planned.parts.root}: parts of the model that the weights don't hold"
    if planned.form is not planned.like:
        form = (
            f"the language model alone, {planned.config_edits['model_type']}; config.json is its part of the release's"
        )
    return {
        "weights": planned.source.root,
        "tree": planned.source.tree.kind,
        "MaxText model": planned.plan.model or "",
        "config from": planned.like.root,
        **{
            f"adapter {number}": f"{adapter.root}, weight {adapter.weight:g}"
            for number, adapter in enumerate(planned.adapters, 1)
        },
        "rounded": _sum_up(planned.lossy),
        "taken from the release": taken,
        "form": form,
        "left out of the release": _sum_up(planned.plan.dropped),
    }


def _sum_up(reasons: Mapping[str, str]) -> str:
    """How many tensors there are reasons for, and the reasons; empty where there are none."""
    return f"{count(len(reasons), 'tensor')}: {'; '.join(sorted(set(reasons.values())))}" if reasons else ""


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Exports, and says what came of it; with `--dry_run` says what it would do."""
    if args.dry_run:
        use_secret(args.hf_token_secret)
        asked = asked_of(args, ExportOptions)
        checkpoint = _open(args.source, asked.step)
        if is_adapter(checkpoint):
            check_beam(rest, "export", {"source": args.source, "output": args.output})
            adapter = plan_adapter_with(checkpoint, asked)
            refuse(adapter.problems)
            check_hub(args.output, args.create_pr)
            what = f"an adapter for PEFT, of rank {adapter.rank} with alpha {adapter.alpha:g}"
            print(ready_text(args, rest, checkpoint.root, what).lstrip())
            return 0

        def planned(slots: int | None) -> Export:
            return plan(checkpoint, asked=asked, output=args.output, slots=slots)

        return dry_run(args, rest, asked, planned, plan_text)
    say(args, export(**keywords_of(args, export), beam=rest))
    return 0
