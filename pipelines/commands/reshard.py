"""`weightbeam reshard`: any Orbax checkpoint into another one."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.adapters.config import CONFIG
from weightbeam.formats.orbax import METADATA, MODEL_ITEM, check_beside, check_committed, files_beside, step_of
from weightbeam.formats.orbax.source import OrbaxCheckpoint, open_orbax
from weightbeam.formats.orbax.state import surroundings
from weightbeam.formats.record.naming import is_name
from weightbeam.formats.record.provenance import tensors_said
from weightbeam.formats.staging import ITEMS
from weightbeam.formats.storage import StorageError, Store, open_store
from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.config_json import config_json
from weightbeam.model_mappings.configuration import MaxTextConfigError
from weightbeam.model_mappings.maxtext_config import FILE, scalar
from weightbeam.pipelines.commands.dry_run import conclude
from weightbeam.pipelines.running.carry import carry
from weightbeam.pipelines.running.like import find_like, read_maxtext_config
from weightbeam.pipelines.running.slots import slots_of, slots_of_checkpoint
from weightbeam.pipelines.running.sources import check_beam, check_named, check_places, reading
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.running.without_beam import threads_in
from weightbeam.pipelines.running.writing import Made
from weightbeam.pipelines.terminal.errors import Refused, refusing
from weightbeam.pipelines.terminal.keywords import asked_of, keywords_of, takes
from weightbeam.pipelines.terminal.maxtext_file import parse_maxtext_yaml
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.pipelines.terminal.report import (
    adapter_flags,
    by_mesh,
    count_arrays,
    maxtext_lines,
    memory_text,
    storage_flags,
    units_text,
)
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Intended
from weightbeam.pipelines.terminal.tables import Table, count, human, pace
from weightbeam.transforms.comparing.array_sums import CHECKED, Compared
from weightbeam.transforms.cutting.mesh import MeshError
from weightbeam.transforms.planning.adapters import is_adapter, said_of
from weightbeam.transforms.planning.adapting import MaxTextAdapter
from weightbeam.transforms.planning.options import FULL, FromHub, ReshardOptions
from weightbeam.transforms.planning.reshard_planner import plan_reshard
from weightbeam.transforms.planning.resharding import Reshard
from weightbeam.transforms.planning.tree_model import Model


@dataclasses.dataclass(frozen=True, repr=False)
class Resharded(Made):
    """What came of a reshard."""

    planned: Reshard

    @property
    def path(self) -> str:
        """Where the checkpoint is: MaxText's `load_parameters_path` or `load_full_state_path`."""
        return f"{self.written.folder}/{ITEMS}"

    @property
    def compared(self) -> Compared | None:
        """How many arrays were compared with the digests of the source's record, where it has any."""
        return self.written.compared

    def blocks(self) -> list[str]:
        if self.written.instead:
            return [self.written.instead]
        planned, step = self.planned, self.written.folder
        made = count_arrays([array.key for array in planned.plan.arrays])
        lines = [f"{self.path}: {made}, {pace(planned.target_bytes, self.written.nbytes, self.seconds)}"]
        lines += [
            f"{count(times, 'array')} rounded: {reason}"
            for reason, times in Counter(planned.plan.lossy.values()).items()
        ]
        if planned.plan.dropped:
            lines.append(
                f"{count(len(planned.plan.dropped), 'array')} left out: {', '.join(sorted(set(planned.plan.dropped.values())))}"
            )
        if planned.tree.is_maxtext:
            lines += maxtext_lines(self.maxtext, step, planned.tree.maxtext is not None)
            if planned.tree.maxtext is None and FILE in planned.beside:
                lines.append(f"            with what else {step}/{FILE} says of the model")
        if not planned.taken:
            label = "compare:" if planned.adapters else "check it:"  # what was merged is a difference
            lines.append(f"{label:11} weightbeam diff {shlex.quote(planned.source.root)} {shlex.quote(self.path)}")
        elif source := self.written.record.get("source"):  # a part of the model is compared with that of the release
            of = ["SOURCE"] if is_name(source) else []
            lines.append(f"check it:   {shlex.join(['weightbeam', 'verify', *of, step])}")
        lines += self.compared.lines() if self.compared else []
        return lines

    @property
    def maxtext(self) -> dict[str, str]:
        """What MaxText must be told to load it, as far as that is known."""
        planned = self.planned
        is_full = any(kept.role == "moment" for kept in planned.tree.arrays)
        flags: dict[str, Any] = {"load_full_state_path" if is_full else "load_parameters_path": self.path}
        if is_adapter(planned.source) and not is_full:
            flags = adapter_flags(self.path, said_of(planned.source))
        if planned.tree.maxtext:
            flags |= planned.tree.maxtext.flags()
        else:
            flags |= {} if planned.tree.scan is None else {"scan_layers": planned.tree.scan}
            flags |= {"param_scan_axis": planned.tree.scan_axis} if planned.tree.scan_axis not in (None, 1) else {}
            name = "" if planned.tree.misfit else planned.tree.model or planned.model.name
            flags |= {"model_name": printable(name)} if name else {}
        return {name: scalar(value) for name, value in (flags | storage_flags(planned.format)).items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            **plan_dict(self.planned),
            "path": self.path,
            **({"maxtext": self.maxtext} if self.planned.tree.is_maxtext else {}),
            "state": self.state,
            "seconds": self.seconds,
            "written": self.written.nbytes,
            **({CHECKED: self.compared.to_dict()} if self.compared else {}),
        }


@takes(asked=ReshardOptions, how=FromHub)
def reshard(
    source: str,
    output: str,
    *,
    asked: ReshardOptions,
    how: FromHub,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
) -> Resharded:
    """Writes an Orbax checkpoint anew: for other meshes, with layers stacked or apart, in another dtype or storage,
    with or without the optimizer.

    Args:
      source: the checkpoint, anyone's: its root, a step or the item, in a folder or in `gs://`.
      output: a folder or `gs://bucket/folder`; it must not hold that step yet.
      beam, progress: as for `convert`.

    Returns:
      Where the new checkpoint is, what it took, and how each array went, copied or cut anew.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.reshard("ckpt", "ckpt8", mesh="fsdp=8", scan_layers=False, progress=False)
      <weightbeam.Resharded: .../ckpt8/0/items: 26 arrays (step among them), ...>
    """
    check_places(beam, "reshard", source=source, output=output)
    use_secret(how.hf_token_secret)
    planned = plan(source, asked=asked, slots=_slots(asked, beam, source, output, how.resume))
    return Resharded(planned, carry(planned, output, how, beam, progress, by_mesh(planned.warnings)))


@takes(asked=ReshardOptions)
def plan(source: str, *, asked: ReshardOptions, slots: int | None = None) -> Reshard:
    """Plans a reshard; problems stay in the plan. See `reshard`; `slots` as `plan_reshard` has it.

    Raises:
      Refused: there is nothing to plan.
    """
    if asked.lora_alpha is not None and not asked.lora:
        raise Refused("--lora_alpha: says how an adapter is scaled; name it with --lora, or leave this out")
    checkpoint = _open(source, asked.step, asked.state)
    step = asked.step if asked.step is not None else _step_of(checkpoint)
    options = dataclasses.replace(asked, step=step)
    adapters = [MaxTextAdapter(_open_adapter(url), weight, options.lora_alpha) for url, weight in options.lora]
    with reading(source):
        around = surroundings(checkpoint)
        model = find_model(checkpoint, options.like, options.maxtext_config, options.maxtext_model)
        with refusing(MeshError):
            return plan_reshard(options, checkpoint, around, model, adapters, slots)


def _slots(asked: ReshardOptions, beam: Sequence[str], source: str, output: str, resume: bool) -> int | None:
    """Units at a time that those of the plan are cut for; see `running/slots.py`."""
    slots = slots_of(beam, asked.unit_bytes, source, output)
    if not resume:
        return slots
    step = asked.step if asked.step is not None else _step_of(_open(source, None, FULL))
    return slots_of_checkpoint(output, step, slots)


def _step_of(checkpoint: OrbaxCheckpoint) -> int:
    """The step that a checkpoint is, or 0."""
    name = open_store(checkpoint.root).parent.name
    return int(name) if name.isdecimal() else 0


def _open(source: str, step: int | None, state: str) -> OrbaxCheckpoint:
    """The checkpoint that `--source` names, and `--step` where it has several. Raises Refused where there is none, it
    isn't whole, or it can't be read.
    """
    check_named("reshard", source=source)
    with refusing(StorageError):
        place = open_store(source)
        if step is not None and not place.exists(METADATA) and (named := step_of(place, step)).folders():
            place = named
        check_committed(place)
        checkpoint = open_orbax(place, any_tree=True)
        items = open_store(checkpoint.root)
        if (
            state == FULL
            and items.name == MODEL_ITEM
            and place.url != items.url
            and len(there := _array_items(items.parent)) > 1
        ):
            message = f"{items.parent}: has {' and '.join(there)}; --state params takes the weights, or name one, which is copied by itself"
            raise Refused(message)
    return checkpoint


def _open_adapter(url: str) -> OrbaxCheckpoint:
    """An adapter of MaxText's that `--lora` names. Raises Refused where there is none, or it is one of PEFT's."""
    try:
        place = open_store(url)
        if place.exists(CONFIG):
            raise Refused(
                f"--lora={url}: is an adapter of PEFT's, which is merged on the side of the release: with convert, export or merge --lora"
            )
        check_committed(place)
        return open_orbax(place)
    except StorageError as e:
        raise Refused(f"--lora={e}") from e


def _array_items(step: Store) -> list[str]:
    """The items of a step that hold arrays."""
    return sorted(name for name in step.folders() if (step / name).exists(METADATA))


def find_model(
    checkpoint: OrbaxCheckpoint, like: str | None, maxtext_config: str | None, maxtext_model: str | None
) -> Model:
    """What is known of a checkpoint's model: what the release says that it should be like, or a MaxText configuration;
    else what the checkpoint remembers, or the `maxtext.yml` beside it; else MaxText's model of a name.

    Raises:
      Refused: one of them can't be read, or no family has such a model.
    """
    if like and maxtext_config:
        raise Refused("--maxtext_config and --like are both given; name a release of the model, or its configuration")
    step = open_store(checkpoint.root).parent
    files = {name: step.read(name) for name in files_beside(step)}
    check_beside(step, checkpoint.record)
    if like is None and maxtext_config:
        described, of = read_maxtext_config(maxtext_config), f"--maxtext_config={maxtext_config}"
        return Model(described.config, {}, maxtext_model or described.model, files=files, of=of)
    name = _name_of(checkpoint, maxtext_model)
    if like is None and not isinstance(checkpoint.record.get("config"), dict):
        return _model_of_maxtext(step, files, name, maxtext_model)
    found = find_like(checkpoint, like)
    config, shapes = dict(found.config), {name: shape for name, (_, shape, _) in found.tensors.items()}
    if like is None:
        return Model(config, shapes, name, {}, files, "its config.json")
    assert found.release is not None  # it was named
    remembered = {"config": config, "tensors": tensors_said(found.release.tensors.values()), "like": found.root}
    return Model(config, shapes, name, remembered, files, f"--like={like}")


def _name_of(checkpoint: OrbaxCheckpoint, maxtext_model: str | None) -> str | None:
    """MaxText's name of a model: the one that is given, else what a checkpoint's record has."""
    said = maxtext_model or checkpoint.options.get("maxtext_model") or checkpoint.record.get("model")
    return said if isinstance(said, str) else None


def _model_of_maxtext(step: Store, files: Mapping[str, bytes], name: str | None, maxtext_model: str | None) -> Model:
    """What the `maxtext.yml` among the files beside a checkpoint says of its model, else MaxText's model of a name.
    Raises Refused where no family has such a model.
    """
    keys, of = {"model_name": maxtext_model}, f"--maxtext_model={maxtext_model}"
    if FILE in files:
        keys, of = parse_maxtext_yaml(files[FILE], step.path(FILE)), step.path(FILE)
    elif not maxtext_model:
        return Model(name=name, files=files)
    try:
        made = config_json(keys)
        return Model(made.config, {}, name or made.model, files=files, of=of)
    except MaxTextConfigError as e:
        if FILE in files:  # somebody's own file
            return Model(name=name, files=files)
        raise Refused(f"{of}: {e}") from e


def plan_rows(planned: Reshard, threads: int, output: str | None = None) -> Iterator[tuple[str, str]]:
    """What a reshard would do, for a person: what is copied, re-cut or unpacked, what is rounded or left out, the bound
    on memory.
    """
    plan, tree = planned.plan, planned.tree
    layout = {True: "scanned", False: "unscanned", None: "no layers known"}[tree.scan]
    read = f"{count_arrays(planned.source.arrays)}, {human(planned.source_bytes)}"
    largest = max((array.chunk_bytes for array in planned.source.arrays.values()), default=0)
    yield "source", f"{planned.source.root}: {tree.kind}, {read}; its largest chunk is {human(largest)}"
    meshes = " and ".join(planned.options.mesh) or "chunks for any mesh where they are cut anew"
    made = count_arrays([array.key for array in plan.arrays])
    yield "target", f"{made}, {human(planned.target_bytes)}, {layout}, {meshes}"
    if tree.version:
        yield "MaxText", f"{tree.version}, its tree and its names of axes"
    ways = {
        "copied": "as they are encoded",
        "re-cut": "read and written once",
        "unpacked": "chunks that no unit can hold, decoded once into files beside the checkpoint",
    }
    for name, (arrays, nbytes) in sorted(planned.by_way().items()):
        yield name, f"{count(arrays, 'array')}, {human(nbytes)}: {ways[name]}"
    for adapter in planned.adapted.adapters:
        scale = f"rank {adapter['lora_rank']}, alpha {adapter['lora_alpha']:g}, weight {adapter['weight']:g}"
        yield "adapter", f"{adapter['source']}: {scale}; {count(len(adapter['arrays']), 'array')} merged"
    if planned.units:
        yield "units", units_text(planned)
    if planned.chunks:
        scratch = sum(array.nbytes for array in planned.unpacked)
        yield "unpacked", f"{count(len(planned.chunks), 'chunk')} first, {human(scratch)} of disk meanwhile"
    yield "memory", memory_text(planned, threads, output)
    for title, reasons in (("rounded", plan.lossy), ("left out", plan.dropped)):
        for reason, times in Counter(reasons.values()).items():
            yield title, f"{count(times, 'array')}: {reason}"


def plan_dict(planned: Reshard) -> dict[str, Any]:
    """What `--json` writes of a planned reshard, with every array."""
    arrays = {
        array.key: {
            "shape": list(array.shape), "dtype": array.dtype.name, "way": way.name, "chunk": list(way.grid.spec.chunk), "shard": list(way.grid.spec.shard),
            "lossy": array.lossy, "axes": list(array.logical_axes),
        }
        for array, way in planned.arrays
    }  # fmt: skip
    return {
        "source": planned.source.root,
        "tree": planned.tree.kind,
        "scan_layers": planned.tree.scan,
        "maxtext_version": planned.tree.version,
        "plan": planned.hash,
        "arrays": arrays,
        "bytes": {
            "source": planned.source_bytes,
            "target": planned.target_bytes,
            "unpacked": sum(array.nbytes for array in planned.unpacked),
        },
        "units": len(planned.units),
        "slots": planned.slots,
        "unit_bytes": planned.unit_working_bytes,
        "left_out": dict(planned.plan.dropped),
        "adapters": list(planned.adapted.adapters),
        "problems": [problem.to_dict() for problem in planned.plan.problems],
        "warnings": by_mesh(planned.warnings),
    }


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Reshards, and says what came of it; with `--dry_run` says what it would do."""
    if args.dry_run:
        check_beam(rest, "reshard", {"source": args.source, "output": args.output})
        asked = asked_of(args, ReshardOptions)
        slots = _slots(asked, rest, args.source, args.output or "", args.resume)
        planned = plan(args.source, asked=asked, slots=slots)
        table = Table.of(plan_rows(planned, threads_in(rest), args.output or ""))
        say(args, Intended([table], plan_dict(planned), by_mesh(planned.warnings)))
        return conclude(args, rest, planned, asked_of(args, FromHub), human(planned.target_bytes))
    say(args, reshard(**keywords_of(args, reshard), beam=rest))
    return 0
