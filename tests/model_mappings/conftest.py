"""What several tests here need: a plan of a tiny checkpoint, and the pieces carried out in plain numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import pytest

from weightbeam.model_mappings.audit import audit
from weightbeam.model_mappings.boxes import Box, extent
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.family import Family, rename
from weightbeam.model_mappings.plan import Array, Problem, TensorSpec, expand, make_arrays
from weightbeam.model_mappings.registry import family_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _make_specs(shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype = BFLOAT16) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, dtype, "model.safetensors") for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True)
class Checked:
    """A table against a checkpoint."""

    arrays: tuple[Array, ...]
    dropped: dict[str, str]
    problems: list[Problem]


def _check(
    config: Mapping,
    tensors: Mapping[str, TensorSpec],
    layout: Layout = Layout(),  # noqa: B008, it is frozen
    family: Family | None = None,
) -> Checked:
    config = Config(config)
    family = family or family_of(config, layout.model)
    tensors = {rename(name, family.aliases): spec for name, spec in tensors.items()}
    layout = dataclasses.replace(layout, shapes={name: spec.shape for name, spec in tensors.items()})
    arrays = make_arrays(expand(family, config, layout), tensors, BFLOAT16)
    return Checked(arrays, *audit(arrays, tensors, family.drops(config, layout), family.name))


def _assemble(made: Array | Part, tensors: Mapping[str, np.ndarray], out: np.ndarray, box: Box) -> None:
    for cell in made.cells(box):
        for piece in cell.pieces(box):
            read = tensors[piece.tensor][tuple(slice(*span) for span in piece.source.box)].copy()
            assert read.shape == extent(piece.source.box), "a piece must not ask for what its tensor doesn't hold"
            values = piece.source.of(read, tuple(start for start, _ in piece.source.box)).transpose(piece.order)
            for op in piece.ops:
                values = op.apply(values)
            target = piece.target.of(out, tuple(start for start, _ in box))
            assert target.shape == values.shape, "a piece's two views must have one shape"
            target[...] = values


@pytest.fixture(scope="session")
def make_specs() -> Callable[..., dict[str, TensorSpec]]:
    """`make_specs(shapes, dtype)`: what the headers of plain tensors of these shapes say."""
    return _make_specs


@pytest.fixture(scope="session")
def check() -> Callable[..., Checked]:
    """`check(config, specs, layout, family)`: expands the family's table for the checkpoint and audits it."""
    return _check


@pytest.fixture(scope="session")
def assemble() -> Callable[..., None]:
    """`assemble(made, tensors, out, box)`: makes a box of an array as a worker does, from the boxes that the pieces
    name and nothing else.
    """
    return _assemble
