"""An export, planned: an Orbax checkpoint into a release's safetensors files, by the family's table read back.

What a unit reads is a block of whole chunks of the arrays; what it writes are the rows of the tensors that lie in them. Along the
axes that hold a tensor's columns a block takes all there is, so that a row is written in one go, and along the others as many
chunks as its bytes allow:

    array wi_0 (embed, layers, mlp), chunks of (512, 1, 512)      tensor gate_proj (mlp, embed) of layer 7
    block: all of embed, layer 7, mlp [1024, 2048)          ─▸    rows [1024, 2048), whole
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.formats.adapters import Adapter, merge
from weightbeam.formats.encodings import Encoding
from weightbeam.formats.orbax_source import OrbaxArray, OrbaxCheckpoint, load_checkpoint
from weightbeam.formats.provenance import versions
from weightbeam.formats.safetensors import Checkpoint
from weightbeam.formats.sources import open_source
from weightbeam.formats.storage import Store
from weightbeam.formats.unpacking import UnpackedArray, can_unpack, chunks, unpack
from weightbeam.formats.zarr import ArraySpec
from weightbeam.model_mappings.audit import audit
from weightbeam.model_mappings.boxes import Box, extent, volume
from weightbeam.model_mappings.cells import Cell, Piece
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family, rename
from weightbeam.model_mappings.naming import name_model
from weightbeam.model_mappings.ops import inverses
from weightbeam.model_mappings.plan import Array, Plan, Problem, TensorSpec, expand, holds, is_float, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.transforms.files import FileLayout, plan_files
from weightbeam.transforms.grid import Grid, Stored, cut_rows
from weightbeam.transforms.inputs import Identity, pack_inputs
from weightbeam.transforms.layouts import EMBEDDING, MTP, SCAN_AXES, layout_of, maxtext_of, scan_axis_of, scan_of
from weightbeam.transforms.quantizing import REASON, Entry, find_quantised, in_blocks, job_for, keep_blocks, quantization_config, with_scales
from weightbeam.transforms.rows import VALUES, ReleasePlan, RowsUnit, made_here
from weightbeam.transforms.units import Block, Fetch, element_box, find_twins, largest_first, pack

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("bfloat16", "float16", "float32")}
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """What the user asked for, as far as it changes a byte."""

    save_dtype: str = AUTO
    maxtext_model: str | None = None
    param_scan_axis: int | None = None
    max_shard_size: int | None = None
    unit_bytes: int = 128 << 20
    lora: tuple[tuple[str, float], ...] = ()
    family: str | None = None
    quantize: str | None = None  # one of `quantizing.FORMATS`: write the weights of linear layers so


@dataclasses.dataclass(frozen=True)
class Like:
    """The release whose form an export takes.

    Attributes:
      root: its URL; empty where there is none.
      config: its `config.json`.
      tensors: name -> (dtype, shape, file), of the values: a quantised tensor is bfloat16, its scales aren't there.
    """

    root: str
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...], str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Like:
        """A release, by its headers."""
        source = open_source(checkpoint)
        tensors = {}
        for name, encoding in source.encodings.items():
            dtype = encoding.weight.dtype.name if encoding.label is None else "bfloat16"
            tensors[name] = (dtype, encoding.shape, encoding.weight.path.rpartition("/")[2])
        return cls(checkpoint.root, checkpoint.config, tensors)


@dataclasses.dataclass(frozen=True)
class Export(ReleasePlan):
    """The plan of an export.

    Attributes:
      options, source, like: the inputs.
      plan: the arrays, what of the release is left out, and the problems.
      names: the tensors that are written, by the table's name for each: `(name in the release, ...)`.
      files: where each tensor goes; None if there are problems.
      grids: one for each array.
      units: the blocks of each unit.
      lossy: by tensor, why its values aren't the array's to the bit.
      config_edits: what of `config.json` has to change: `{field: value}`.
      adapters: what is merged on the way.
      merged: by the table's name, what adapters make of a tensor.
      quantised: the tensors, by the release's names, that are written as codes and scales.
      quantization: `quantization_config` as it will be; empty where nothing is quantised.
    """

    options: ExportOptions
    source: OrbaxCheckpoint
    like: Like
    plan: Plan
    names: Mapping[str, tuple[str, ...]]
    files: FileLayout | None
    grids: tuple[Grid, ...]
    units: tuple[tuple[Block, ...], ...]
    lossy: Mapping[str, str]
    config_edits: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    merged: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)
    quantised: frozenset[str] = frozenset()
    quantization: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unpacked: frozenset[str] = frozenset()  # keys of the arrays whose chunks are unpacked first
    small: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # the release's small files as they will be; not staged

    kind = "export"

    @functools.cached_property
    def encodings(self) -> dict[str, OrbaxArray]:
        """The weights, by MaxText's keys."""
        return self.source.weights

    @functools.cached_property
    def source_bytes(self) -> int:
        """Bytes of the arrays that are read."""
        return sum(self.encodings[array.key].nbytes for array in self.plan.arrays if array.key in self.encodings)

    @property
    def read_bytes(self) -> int:
        """Bytes of the chunks that the units read, decoded."""
        return sum(
            math.prod(extent(element_box(self.grids[block.array].spec, block.shards))) * self.grids[block.array].spec.dtype.itemsize
            for unit in self.units
            for block in unit
        )

    @functools.cached_property
    def chunks(self) -> list[tuple[str, tuple[int, ...]]]:
        """The chunks to unpack before the first unit: each array's key and the chunk's index."""
        return [(key, index) for key in sorted(self.unpacked) for index in chunks(self.encodings[key])]

    def unpack(self, number: int, place: Store) -> int:
        """Unpacks a chunk; returns the bytes that were decoded."""
        key, index = self.chunks[number]
        return unpack(self.encodings[key], index, place)

    def expand(self, unit: int, place: Store) -> RowsUnit:
        """A unit, spelled out; `place` is where the plan is at work."""
        fetches: list[Fetch] = []
        for block in self.units[unit]:
            array = self.plan.arrays[block.array]
            stored = self.encodings[array.key]
            encoding = UnpackedArray(stored, place.url) if array.key in self.unpacked else stored
            fetches.append(Fetch(encoding, element_box(self.grids[block.array].spec, block.shards), stored.dtype))
        jobs = []
        for name, boxes in rows_of(self.plan.arrays, self.grids, self.units[unit]).items():
            for box, inside in boxes:
                jobs += [job_for(self.layout.tensors, given, self.quantised, box, inside, self.merged.get(name)) for given in self.names[name]]
        return RowsUnit(unit, tuple(fetches), tuple(jobs))

    @functools.cached_property
    def hash(self) -> str:
        """Identifies the result: the checkpoint's files, the options, the table, the files that are written."""
        identity = Identity()
        identity.add(self.kind, dataclasses.asdict(self.options), self.source.root, self.source.files, self.like.config)
        for adapter in self.adapters:
            identity.add(adapter.identity)
        for array in self.plan.arrays:
            identity.add(array.key, array.shape, array.dtype.name, [(part.rule.source, repr(part.rule), part.layers.tolist()) for part in array.parts])
        for file in self.files.files if self.files else ():
            identity.add(file.name, file.header.hex())
        for unit in self.units:
            identity.add([(block.array, block.shards) for block in unit])
        return identity.hash

    @property
    def inputs(self) -> Sequence[str]:
        return self.source.root, self.like.root, *(adapter.root for adapter in self.adapters)

    def check(self) -> None:
        self.source.check()
        for adapter in self.adapters:
            adapter.files.check()

    def unreadable(self) -> list[Problem]:
        """The adapters' files whose end can't be read."""
        return [problem for adapter in self.adapters for problem in adapter.files.unreadable()]

    def record(self) -> dict[str, Any]:
        """Where the release comes from."""
        return {
            "command": "export",
            "source": self.source.root,
            "like": self.like.root,
            "plan": self.hash,
            "family": self.plan.family,
            "model": self.plan.model,
            "tree": self.source.tree.kind,
            "adapters": [adapter.record() for adapter in self.adapters],
            "options": dataclasses.asdict(self.options),
            "made_from": {key: self.source.record[key] for key in ("source", "plan", "options", "versions") if key in self.source.record},
            "versions": versions(),
            "lossy": dict(self.lossy),
            "left_out": dict(self.plan.dropped),
            "config_edits": dict(self.config_edits),
        }

    def stage(self) -> bytes:
        """The inputs, compressed; `load` makes the same plan of them."""
        inputs = {
            "kind": self.kind,
            "options": dataclasses.asdict(self.options),
            "source": self.source.stage(),
            "like": dataclasses.asdict(self.like),
            "adapters": [[adapter.files.to_json(), adapter.weight] for adapter in self.adapters],
            "hash": self.hash,
        }
        return pack_inputs(inputs)


def load(inputs: Mapping[str, Any]) -> Export:
    """The export that `Export.stage` staged."""
    tensors = {name: (dtype, tuple(shape), file) for name, (dtype, shape, file) in inputs["like"]["tensors"].items()}
    like = Like(inputs["like"]["root"], inputs["like"]["config"], tensors)
    adapters = [Adapter(Checkpoint.from_json(files), weight) for files, weight in inputs["adapters"]]
    lora = tuple((url, weight) for url, weight in inputs["options"]["lora"])
    return plan_export(ExportOptions(**inputs["options"] | {"lora": lora}), load_checkpoint(inputs["source"]), like, adapters)


def rows_of(arrays: Sequence[Array], grids: Sequence[Grid], blocks: Sequence[Block]) -> dict[str, list[tuple[Box, tuple[tuple[int, Piece], ...]]]]:
    """By tensor the boxes that blocks of arrays fill, and with what: pieces, each with the number of the block that holds its source."""
    pieces: dict[str, list[tuple[int, Piece]]] = {}
    for number, block in enumerate(blocks):
        array, box = arrays[block.array], element_box(grids[block.array].spec, block.shards)
        for cell in array.cells(box):
            for piece in back(cell, box, array.key):
                pieces.setdefault(str(cell.tensor), []).append((number, piece))
    return {name: list(_boxes(placed)) for name, placed in pieces.items()}


def back(cell: Cell, box: Box, key: str) -> Iterator[Piece]:
    """What a cell takes of a box of its array, as pieces from the array to the tensor."""
    for piece in cell.pieces(box):
        order = tuple(map(piece.order.index, range(len(piece.order))))
        yield Piece(key, piece.target, piece.source, order, inverses(piece.ops))


def _boxes(pieces: Sequence[tuple[int, Piece]]) -> Iterator[tuple[Box, tuple[tuple[int, Piece], ...]]]:
    """The boxes of a tensor that pieces fill, and which; pieces whose boxes join without holes fill one."""
    boxes: list[tuple[Box, int, list[tuple[int, Piece]]]] = []  # with the elements that are filled
    for number, piece in pieces:
        new = (piece.target.box, _elements(piece), [(number, piece)])
        boxes.append(new)
        while len(boxes) > 1:
            (a, filled, mine), (b, more, others) = boxes[-1], boxes[-2]
            union = tuple((min(x[0], y[0]), max(x[1], y[1])) for x, y in zip(a, b, strict=True))
            if volume(union) > volume(a) + volume(b):
                break
            boxes[-2:] = [(union, filled + more, others + mine)]
    for box, filled, inside in boxes:
        if filled == volume(box):
            yield box, tuple(inside)
        else:  # rows of several windows alternate: each window on its own
            yield from ((row, ((number, piece),)) for number, piece in inside for row in _rows(piece))


def _elements(piece: Piece) -> int:
    """Elements of a piece."""
    picks = itertools.chain(*piece.target.picks)
    return math.prod(pick[1] - pick[0] for pick in picks if not isinstance(pick, int))


def _rows(piece: Piece) -> Iterator[Box]:
    """The box of a piece that fills all of it."""
    if _elements(piece) != volume(piece.target.box):
        raise ValueError(f"rows of a tensor that is made of {piece.tensor} alternate with others that aren't made with them")
    yield piece.target.box


def plan_export(options: ExportOptions, source: OrbaxCheckpoint, like: Like, adapters: Sequence[Adapter] = ()) -> Export:
    """Plans an export. What stands against it is in `plan.problems`."""
    weights = source.weights
    config = Config(like.config)
    try:
        family = family_of(config, options.maxtext_model or _said_model(source), options.family)
        naming = name_model(family, config, options.maxtext_model or _said_model(source))
        given = _given(like, family)
        arrays, layout, problems = _arrays(options, source, family, config, naming.model, given)
    except (ConfigError, UnknownFamilyError) as e:
        kind = "config" if isinstance(e, ConfigError) else "family"
        text = str(e).removeprefix("config.json: ").removeprefix("config.json ")
        return Export(options, source, like, Plan("unknown", (), {}, (Problem(kind, "config.json", text),)), {}, None, (), (), {}, {})
    shapes = _tensor_shapes(arrays)
    drops = dict(family.drops(config, layout))
    copies = {copy: original for copy, original in family.copies(config, layout).items() if copy in given}
    specs = {name: TensorSpec(shape, DTYPES["bfloat16"], like.root or "the table") for name, shape in shapes.items()}
    specs |= {name: TensorSpec(shapes.get(name, shape), _dtype(dtype), file) for name, (dtype, shape, file, _) in given.items() if name not in copies}
    dropped, found = audit(arrays, specs, drops, family.name)
    problems += [problem for problem in found if not (problem.kind == "missing" and not given)]
    dropped = {name: reason for name, reason in dropped.items() if "[" not in name}
    names = {name: tuple(held[3] for held in [given[name]]) if name in given else (name,) for name in shapes}
    for copy, original in copies.items():
        if original in names:
            names[original] += (given[copy][3],)
            dropped.pop(copy, None)
    merging = merge({name: made_here(name, shape) for name, shape in shapes.items()}, adapters, family.aliases, str(config.get("model_type")))
    merged = {name: merging.encodings[name] for name in merging.touched}
    if not problems:
        problems += [*merging.problems, *merging.in_vain(drops), *_needing_columns(merged)]
    dtypes = {name: _target_dtype(options, specs[name].dtype) for name in shapes}
    wanted = [(one, dtypes[name], shapes[name]) for name, ones in names.items() for one in ones]
    codes = _quantised(options, arrays, weights, names, wanted) if not problems else frozenset[str]()
    if options.quantize and not codes and not problems:
        problems.append(Problem("quantised", source.root, "none of its weights is one that is quantised"))
    blocks = frozenset(name for name, ones in names.items() if codes.intersection(ones))
    dtypes |= dict.fromkeys(blocks, VALUES)  # what is quantised isn't rounded before
    sizes = {name: dtype.itemsize + (VALUES.itemsize if name in merged else 0) + (name in blocks) for name, dtype in dtypes.items()}
    lossy = {given_name: reason for name, reason in _lossy(arrays, dtypes).items() for given_name in names[name]}
    lossy |= {one: "merged in float32, rounded once" for name in merged for one in names[name]} | dict.fromkeys(sorted(codes), REASON)
    edits = _config_edits(config, family, arrays, shapes, given, dropped)
    files, grids, units, warnings, unpacked = None, (), (), [], frozenset[str]()
    if not problems:
        order = {held[3]: held[2] for held in given.values()}
        files = plan_files(with_scales(wanted, codes), order or None, options.max_shard_size)
        warnings += files.warnings
        grids = tuple(_grid(array, weights[array.key], weights[array.key].chunk, sizes, blocks) for array in arrays)
        large = {grid.spec.key for grid in grids if _smallest_bytes(grid) > options.unit_bytes or weights[grid.spec.key].chunk_bytes > options.unit_bytes}
        unpacked = frozenset(key for key in large if can_unpack(weights[key]))
        grids = tuple(_grid(a, weights[a.key], (1,) * len(a.shape), sizes, blocks) if a.key in unpacked else g for a, g in zip(arrays, grids, strict=True))
        problems += _too_large(grids, options.unit_bytes)
        units = tuple(_units(options, arrays, grids)) if not problems else ()
    dropped = {given[name][3] if name in given else name: reason for name, reason in dropped.items()}
    maxtext, _ = maxtext_of(family, config, layout, naming)
    plan = Plan(family.name, arrays, dropped, tuple(problems), family.note(config, layout), family.support, naming.model, naming.sizes, maxtext)
    return Export(
        options,
        source,
        like,
        plan,
        names,
        files,
        grids,
        units,
        lossy,
        edits,
        tuple(warnings),
        tuple(adapters),
        merged,
        quantised=codes,
        quantization=quantization_config(wanted, codes) if codes else {},
        unpacked=unpacked,
    )


def _needing_columns(merged: Mapping[str, Encoding]) -> Iterator[Problem]:
    """Merged tensors of which a unit, which makes whole rows, can't make any box by itself: DoRA's norms over a column each."""
    for name, encoding in merged.items():
        if 0 in encoding.indivisible:
            yield Problem("adapter", name, "DoRA on a weight that is stored transposed needs whole columns; merge it into the release, with weightbeam merge")


def _said_model(source: OrbaxCheckpoint) -> str | None:
    """The MaxText model that a checkpoint of ours was made for."""
    made = source.record.get("options")
    model = made.get("maxtext_model") if isinstance(made, dict) else None
    return model if isinstance(model, str) else None


def _given(like: Like, family: Family) -> dict[str, tuple[str, tuple[int, ...], str, str]]:
    """The release's tensors by the table's names: dtype, shape, file, and the name that the release has for it."""
    return {rename(name, family.aliases): (dtype, shape, file, name) for name, (dtype, shape, file) in like.tensors.items()}


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _arrays(
    options: ExportOptions, source: OrbaxCheckpoint, family: Family, config: Config, model: str | None, given: Mapping[str, tuple]
) -> tuple[tuple[Array, ...], Layout, list[Problem]]:
    """The arrays of the table, as the checkpoint has them; the layout that it is in; and where they differ.

    Raises:
      ConfigError: `config.json` lacks what the table needs.
    """
    weights = source.weights
    said = options.param_scan_axis if options.param_scan_axis is not None else scan_axis_of(source)
    axes = SCAN_AXES if said is None else (said,)
    base = layout_of(weights, scan_of(source, weights), model, {name: shape for name, (_, shape, *_) in given.items()})
    tried = []
    for axis in axes:
        layout = dataclasses.replace(base, scan_axis=axis)
        parts = expand(family, config, layout)
        problems, arrays = [], []
        for path, same in parts.items():
            key = key_of(path)
            if all(part.rule.source is None for part in same):
                continue
            if key not in weights:
                problems.append(Problem("missing", key, f"the {family.name} table makes tensors of it, but the checkpoint doesn't hold it", is_array=True))
            elif weights[key].shape != same[0].shape:
                message = f"{weights[key].shape} in the checkpoint, by config.json it is {same[0].shape}"
                problems.append(Problem("shape", key, message, is_array=True))
            else:
                fill = next((part.rule.fill for part in same if part.rule.fill is not None), None)
                arrays.append(Array(key, same[0].shape, weights[key].dtype, same[0].names, tuple(same), fill))
        known = {key_of(path) for path in parts}
        for key in weights:
            if key not in known:
                problems.append(Problem("unused", key, f"the {family.name} table makes no tensor of it", is_array=True))
        tried.append((problems, tuple(arrays), layout))
        if not layout.scan:
            break
    fitting = [one for one in tried if not one[0]]
    if len(fitting) > 1 and len({tuple((a.key, tuple(f for p in a.parts for f in p.target_axes)) for a in arrays) for _, arrays, _ in fitting}) > 1:
        choices = " or ".join(str(layout.scan_axis) for _, _, layout in fitting)
        message = f"the shapes fit {choices}, and the checkpoint doesn't say where its layers are stacked; name it"
        return fitting[0][1], fitting[0][2], [Problem("option", "--param_scan_axis", message)]
    problems, arrays, layout = fitting[0] if fitting else min(tried, key=lambda one: len(one[0]))
    return arrays, layout, list(problems)


def _tensor_shapes(arrays: Iterable[Array]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that arrays are made into: as far as their windows reach."""
    shapes: dict[str, tuple[int, ...]] = {}
    for array in arrays:
        for part in array.parts:
            reach = tuple(indices[-1] + 1 for indices in part.source_box())
            for name in part.tensors:
                held = shapes.get(name, reach)
                shapes[name] = tuple(map(max, held, reach))
    return shapes


def _target_dtype(options: ExportOptions, released: np.dtype) -> np.dtype:
    return DTYPES[options.save_dtype] if options.save_dtype != AUTO and is_float(released) else released


def _lossy(arrays: Iterable[Array], dtypes: Mapping[str, np.dtype]) -> dict[str, str]:
    """By tensor, why its values aren't those of the array to the bit."""
    reasons: dict[str, str] = {}
    for array in arrays:
        for part in array.parts:
            inexact = [op for op in inverses(part.rule.ops) if not op.is_exact]
            for name in part.tensors:
                dtype = dtypes[name]
                if inexact:
                    reasons[name] = "; ".join(f"{op}, rounded once to {dtype.name}" for op in inexact)
                elif is_float(array.dtype) and not holds(dtype, array.dtype):
                    reasons[name] = f"{array.dtype.name}, rounded to {dtype.name}"
    return reasons


def _quantised(
    options: ExportOptions, arrays: Sequence[Array], weights: Mapping[str, OrbaxArray], names: Mapping[str, tuple[str, ...]], wanted: Sequence[Entry]
) -> frozenset[str]:
    """The tensors that are written as codes; those stay as they are whose parts, in arrays of their own, don't begin and end at blocks of rows."""
    if not options.quantize:
        return frozenset()
    codes = find_quantised(wanted)
    shapes = {name: shape for name, _, shape in wanted}
    coded = frozenset(name for name, ones in names.items() if codes.intersection(ones))
    held = [array for array in arrays if any(name in coded for part in array.parts for name in part.tensors)]
    sizes = dict.fromkeys(itertools.chain.from_iterable(part.tensors for array in held for part in array.parts), 2 * VALUES.itemsize + 1)
    grids = [_grid(array, weights[array.key], weights[array.key].chunk, sizes, coded) for array in held]
    amiss: set[str] = set()
    for group in find_twins(held, math.inf):
        cut = [list(_blocks(number, grids[number], options.unit_bytes // len(group))) for number in group]
        for blocks in (one for made in [list(zip(*cut, strict=True))] for one in (made[0], made[-1])):
            for name, boxes in rows_of(held, grids, blocks).items():
                shape = shapes[names[name][0]]
                if name in coded and not all(in_blocks(box, shape) for box, _ in boxes):
                    amiss.update(itertools.chain.from_iterable(part.tensors for number in group for part in held[number].parts))
    return codes - {one for name in amiss for one in names[name]}


def _config_edits(
    config: Config, family: Family, arrays: Sequence[Array], shapes: Mapping[str, tuple[int, ...]], given: Mapping, dropped: Mapping[str, str]
) -> dict[str, Any]:
    """What `config.json` has to say otherwise: rows of a cut vocabulary, prediction layers that aren't there."""
    edits: dict[str, Any] = {}
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    embedding = next((array for array in arrays if array.key == EMBEDDING), None)
    if embedding is not None:
        rows = {shapes[name][0] for part in embedding.parts for name in part.tensors}
        if len(rows) == 1 and (count := rows.pop()) != text.get("vocab_size", count):
            edits["vocab_size"] = count
    if text.get("num_nextn_predict_layers") and not any(array.key.startswith(MTP) for array in arrays):
        edits["num_nextn_predict_layers"] = 0
    return edits


def _grid(array: Array, stored: OrbaxArray, grain: tuple[int, ...], sizes: Mapping[str, int], quantised: Container[str]) -> Grid:
    """How an array is cut into blocks: of whole grains, such as chunks as they are stored, and whole along the columns of its tensors.

    Where a tensor is quantised, also of whole blocks of its rows. `sizes` are the bytes that an element of each tensor takes.
    """
    part = next(part for part in array.parts if part.rule.source)
    whole_axes, rows = cut_rows(part, array.dtype.itemsize, Stored())
    names = sorted(axis for axis in part.stack_axes if any(f.kind == "name" for f in part.target_axes[axis]))
    growth = tuple(dict.fromkeys([*rows, *names, *(axis for axis in range(len(array.shape)) if axis not in whole_axes)]))
    coded = any(name in quantised for part in array.parts for name in part.tensors)
    target = max(sizes[name] for part in array.parts for name in part.tensors)
    element_bytes = array.dtype.itemsize * (2 if stored.compressed else 1) + target
    spec = ArraySpec(array.key, array.shape, array.dtype, grain, grain)
    grid = Grid(spec, {}, whole_axes, growth, element_bytes, ())
    return keep_blocks(grid, part) if coded else grid


def _smallest(grid: Grid) -> list[int]:
    """The extents of the smallest block."""
    return [n if axis in grid.whole else min(chunk, n) for axis, (n, chunk) in enumerate(zip(grid.spec.shape, grid.spec.shard, strict=True))]


def _smallest_bytes(grid: Grid) -> int:
    """Memory for the smallest block."""
    return grid.working_bytes(_smallest(grid))


def _too_large(grids: Sequence[Grid], unit_bytes: int) -> Iterator[Problem]:
    """Arrays whose smallest block doesn't fit into a unit."""
    for grid in grids:
        if (needed := _smallest_bytes(grid)) > unit_bytes:
            message = f"rows of its tensors need {needed:,} bytes together, a unit has {unit_bytes:,}; raise --unit_bytes"
            yield Problem("memory", grid.spec.key, message, is_array=True)


def _units(options: ExportOptions, arrays: Sequence[Array], grids: Sequence[Grid]) -> list[tuple[Block, ...]]:
    """The units: blocks of chunks, those of arrays together whose tensors' rows they share."""
    blocks: list[tuple[Block, ...]] = []
    for group in find_twins(arrays, math.inf):
        cut = [list(_blocks(number, grids[number], options.unit_bytes // len(group))) for number in group]
        blocks += zip(*cut, strict=True)
    return largest_first(pack(blocks, options.unit_bytes))


def _blocks(number: int, grid: Grid, unit_bytes: int) -> Iterator[Block]:
    """Cuts an array into blocks of at most `unit_bytes`, as long as possible along its tensors' rows."""
    spec = grid.spec
    counts = [count if axis in grid.whole else 1 for axis, count in enumerate(spec.grid)]
    for axis in grid.growth:
        extents = [min(n * shard, size) for n, shard, size in zip(counts, spec.shard, spec.shape, strict=True)]
        most = min(spec.grid[axis], unit_bytes // max(1, grid.working_bytes(extents)))
        counts[axis] = -(-spec.grid[axis] // -(-spec.grid[axis] // max(1, most)))  # blocks of about equal length
        if counts[axis] < spec.grid[axis]:
            break
    starts = [range(0, total, count) for total, count in zip(spec.grid, counts, strict=True)]
    for at, first in enumerate(itertools.product(*starts)):
        shards = tuple((at, min(at + n, total)) for at, n, total in zip(first, counts, spec.grid, strict=True))
        yield Block(number, shards, grid.working_bytes(extent(element_box(spec, shards))), (spec.key, at))
