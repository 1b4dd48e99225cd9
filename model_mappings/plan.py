"""The plan: what each array is made of, and every problem, from `config.json` and the tensors' shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.cells import Cell, Part, Piece
from weightbeam.model_mappings.config import MAX_SIZE, Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.maxtext_config import MaxTextConfig
from weightbeam.model_mappings.naming import ModelNaming
from weightbeam.model_mappings.rules import TODO
from weightbeam.model_mappings.scales import is_scales

MAX_ELEMENTS = 1 << 43  # of a model: 8.8 trillion parameters
MAX_ARRAYS = 100_000  # of a checkpoint; the largest models have some thousands where their layers aren't stacked
# a table that needs more than these makes doesn't describe the checkpoint, and would take hours to say so
MIN_CELLS, CELLS_PER_TENSOR = 200_000, 2
PREFIX = "params"  # where MaxText's TrainState keeps the collections of the model's variables
PARAMETERS = f"{PREFIX}.params."  # what the keys of its parameters begin with


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the tables see it: after renaming and dequantisation.

    Attributes:
      shape, dtype: of the values; a quantised tensor has the dtype that its values are computed in (float32).
      file: where it lies, for messages.
      encoding: how its values are stored, where that isn't plain; for the plan's report.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    file: str
    encoding: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A reason not to convert.

    Attributes:
      kind: missing, unused, shape, dtype, unscaled, orphan scale, unclaimed part, overlap, gap, …
        (`docs/reference/plan.md`).
      subject: the name of a tensor, an array or a file; empty where the message names it.
      message: what was expected, what was found, and what to do.
      is_array: whether the subject is an array.
      cause: which of its kind it is, for a program that goes on by that; empty where none does.
    """

    kind: str
    subject: str
    message: str
    is_array: bool = False
    cause: str = dataclasses.field(default="", repr=False)

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.kind, self.subject, self.message)))

    def to_dict(self) -> dict[str, str]:
        """As `--json` writes it."""
        return {"kind": self.kind, "array" if self.is_array else "tensor": self.subject, "message": self.message}


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of the checkpoint.

    Attributes:
      key: Orbax's dotted key.
      shape: of the array.
      dtype: stored dtype.
      logical_axes: MaxText's logical name of each axis, None where it has none.
      parts: what it is made of.
      fill: the value of elements that no cell supplies; None where the cells tile the array.
      lossy: why the stored values aren't the tensor's to the bit; None where they are.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[str | None, ...]
    parts: tuple[Part, ...]
    fill: float | None
    lossy: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cells(self, box: Box | None = None) -> Iterable[Cell]:
        """The cells, or those that may have a share in `box`."""
        return (cell for part in self.parts for cell in part.cells(box))

    def pieces(self, box: Box) -> Iterator[Piece]:
        """What `box` is made of."""
        return (piece for cell in self.cells(box) for piece in cell.pieces(box))


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
    """The arrays that a command makes, and whether it may.

    Attributes:
      family: the family's name.
      arrays: in the order of the table.
      dropped: tensors (or windows) left out on purpose, with the reason.
      problems: everything that stands against it; empty for a plan that can be carried out.
      note: what was inferred.
      support: what of the family is supported.
      model: the MaxText model; None where none has these sizes and none was named.
      sizes: the sizes in which it differs from that model, as MaxText's keys; the model needs them as overrides.
      maxtext: what MaxText must be told; None where `config.json` doesn't say it all, which is then a warning.
      code: the family's.
    """

    family: str
    arrays: tuple[Array, ...]
    dropped: Mapping[str, str]
    problems: tuple[Problem, ...]
    note: str = ""
    support: str = ""
    model: str | None = None
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    maxtext: MaxTextConfig | None = None
    code: str = ""

    @property
    def lossy(self) -> dict[str, str]:
        """Why arrays are rounded, by their keys."""
        return {array.key: array.lossy for array in self.arrays if array.lossy}

    @classmethod
    def of(
        cls,
        family: Family,
        naming: ModelNaming,
        arrays: tuple[Array, ...],
        dropped: Mapping[str, str],
        problems: Iterable[Problem],
        note: str,
        maxtext: MaxTextConfig | None,
    ) -> ArrayPlan:
        """That of one of a family's models."""
        name, support, code = family.name, family.support, family.code
        return cls(name, arrays, dropped, tuple(problems), note, support, naming.model, naming.sizes, maxtext, code)


def expand(family: Family, config: Config, layout: Layout) -> dict[str, list[Part]]:
    """The parts of each array of a family's table, by the array's path.

    Raises:
      ConfigError: `config.json` lacks what the table needs, or says sizes that nobody can mean.
      ValueError: two rules disagree about an array (a fault of the table).
    """
    dims = dict(family.dims(config, layout))
    parts: dict[str, list[Part]] = {}
    cells, most = 0, MIN_CELLS + CELLS_PER_TENSOR * len(layout.names)
    for stack in family.table(config, layout):
        for rule in stack.rules:
            try:
                part = Part(stack, rule, dims, layout.scan_axis)
            except KeyError as e:
                raise ConfigError(
                    f"the table of {family.name}: {rule.source} has an axis {e}, of which dims says no size"
                ) from e
            if (size := max(part.factors, default=0)) > MAX_SIZE:
                raise ConfigError(
                    f"config.json: its sizes make {part.path} {size:,} long; more than {MAX_SIZE:,} can't be meant"
                )
            cells += part.layers.size * math.prod(part.name_shape)
            if cells > most:
                raise ConfigError(
                    f"config.json: its layers and experts ask for more than {most:,} tensors, the files hold {len(layout.names):,}"
                )
            same = parts.setdefault(part.path, [])
            if same and (same[0].shape, same[0].logical_axes) != (part.shape, part.logical_axes):
                raise ValueError(
                    f"{part.path}: two rules disagree: {same[0].shape} {same[0].logical_axes}, {part.shape} {part.logical_axes}"
                )
            same.append(part)
    if drafted := [path for path in parts if TODO in path.split("/")]:
        raise ConfigError(
            f"the table of {family.name} is a draft: {drafted[0]}, one of {len(drafted):,} arrays, has no name yet; its lines are marked {TODO}"
        )
    if len(parts) > MAX_ARRAYS:
        raise ConfigError(
            f"{len(layout.names):,} tensors become {len(parts):,} arrays by the table {family.name}; more than {MAX_ARRAYS:,} "
            "aren't planned: a family's own table has layers and experts in one array"
        )
    if (elements := sum(math.prod(same[0].shape) for same in parts.values())) > MAX_ELEMENTS:
        raise ConfigError(
            f"config.json: its sizes make a model of {elements:,} elements; more than {MAX_ELEMENTS:,} can't be meant"
        )
    return parts


def key_of(path: str) -> str:
    """Orbax's key of an array, by its path: `params/decoder/decoder_norm/scale` ->
    `params.params.decoder.decoder_norm.scale`.
    """
    return f"{PREFIX}/{path}".replace("/", ".")


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype holds real numbers, ml_dtypes' included (whose kind is V)."""
    return dtype.name.startswith(("float", "bfloat"))


def bits_of(dtype: np.dtype) -> np.dtype:
    """What numpy moves, and compares bit by bit, in place of a dtype: integers, several times faster than ml_dtypes'
    floats; bytes where there are none so large.
    """
    return np.dtype(f"u{dtype.itemsize}" if dtype.itemsize <= 8 else f"V{dtype.itemsize}")


def holds(dtype: np.dtype, values: np.dtype) -> bool:
    """Whether every value of the floating-point dtype `values` is one of `dtype`."""
    wide, narrow = ml_dtypes.finfo(dtype), ml_dtypes.finfo(values)
    return (
        narrow.nmant <= wide.nmant
        and narrow.maxexp <= wide.maxexp
        and narrow.minexp - narrow.nmant >= wide.minexp - wide.nmant
    )


def make_arrays(
    parts: Mapping[str, list[Part]], tensors: Mapping[str, TensorSpec], save_dtype: np.dtype | None
) -> tuple[Array, ...]:
    """The arrays of a table, with the dtypes that the checkpoint's tensors give them; without `save_dtype` each has the
    one that holds all of its tensors' values.
    """
    return tuple(_array(key_of(path), same, tensors, save_dtype) for path, same in parts.items())


def _own_dtype(parts: Iterable[Part], tensors: Mapping[str, TensorSpec]) -> np.dtype:
    """The narrowest dtype of the tensors that holds the values of all; bfloat16 for a constant, float32 for scales to
    which a factor goes: an exponent (float8_e8m0fnu) holds no product.
    """
    if any(is_scales(part.rule) and not op.is_exact for part in parts for op in part.rule.ops):
        return np.dtype(np.float32)
    stored = {tensors[name].dtype for part in parts for name in part.tensors if name in tensors}
    floats = sorted(filter(is_float, stored), key=lambda dtype: (dtype.itemsize, dtype.name))
    holding = (dtype for dtype in floats if all(holds(dtype, other) for other in floats))
    return next(holding, np.dtype(np.float32) if floats else np.dtype(ml_dtypes.bfloat16))


def _array(key: str, parts: list[Part], tensors: Mapping[str, TensorSpec], save_dtype: np.dtype | None) -> Array:
    reasons: dict[str, None] = {}  # in order
    save_dtype = _own_dtype(parts, tensors) if save_dtype is None else save_dtype
    dtype = save_dtype
    for part in parts:
        inexact = [op for op in part.rule.ops if not op.is_exact]
        for stored, encoding in {
            (spec.dtype, spec.encoding): None for name in part.tensors if (spec := tensors.get(name))
        }:
            if part.rule.integer:
                dtype = dtype if not is_float(dtype) and np.can_cast(stored, dtype) else stored
            elif encoding:
                reasons[f"{encoding}, rounded once to {save_dtype.name}"] = None
            elif not inexact and is_float(stored) and not holds(save_dtype, stored):
                reasons[f"{stored.name}, rounded to {save_dtype.name}"] = None
        reasons |= dict.fromkeys(f"{op}, rounded once to {save_dtype.name}" for op in inexact)
    fill = next((part.fill for part in parts if part.fill is not None), None)
    gap = sum(part.elements for part in parts) < math.prod(parts[0].shape)
    return Array(
        key,
        parts[0].shape,
        dtype,
        parts[0].logical_axes,
        tuple(parts),
        fill if gap else None,
        "; ".join(reasons) or None,
    )
