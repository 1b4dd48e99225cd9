"""Whose weights a model runs with: tensors by the release's names, each read when its layer is reached."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from weightbeam.formats.adapters import open_adapter
from weightbeam.formats.release.adapted import merge_release
from weightbeam.formats.release.small_files import small_files
from weightbeam.formats.release.source import open_source
from weightbeam.formats.storage import open_store
from weightbeam.model_mappings.boxes import Box, extent, slices, whole
from weightbeam.model_mappings.cut import Cut
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.sources import open_release
from weightbeam.transforms.cutting.blocks import Block
from weightbeam.transforms.cutting.tensor_rows import rows_of
from weightbeam.transforms.cutting.units import Fetch
from weightbeam.transforms.execution.boxes import BoxRecipe, arrange, decode, read
from weightbeam.transforms.execution.operands import Operand, stored_operand
from weightbeam.transforms.execution.stack import stack
from weightbeam.transforms.planning.exporting import Export
from weightbeam.transforms.planning.transfer import Source


@dataclasses.dataclass(frozen=True)
class Side:
    """A model's configuration and weights.

    Attributes:
      where: as the user named it.
      config: `config.json`.
      tensors: by the release's names; quantised ones by their values.
      sources: what is read.
      small: the small files of the release, its tokenizer among them.
    """

    where: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Operand]
    sources: tuple[Source, ...]
    small: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


def of_release(where: str, lora: str | None = None, cut: Cut | None = None) -> Side:
    """A release, or what is taken of it, with an adapter merged into it where one is named.

    Raises:
      Refused: problems stand against it: all of them.
      StorageError: it can't be looked at.
    """
    checkpoint = open_release(where, cut=cut)
    source, adapters = open_source(checkpoint), [open_adapter(lora)] if lora else []
    if adapters:
        source = source.merged(merge_release(checkpoint, source, adapters))
    refuse([*checkpoint.problems, *source.problems], of=lora or where)
    return Side(
        lora or where,
        checkpoint.config,
        {name: stored_operand(encoding) for name, encoding in source.encodings.items()},
        (checkpoint, *(adapter.files for adapter in adapters)),
        small_files(open_store(checkpoint.root), known=checkpoint.opened),
    )


def of_checkpoint(where: str, export: Export, small: Mapping[str, bytes]) -> Side:
    """An Orbax checkpoint as its export would write it; `small` are the small files of the release that it is like.

    Raises:
      Refused: it can't be exported: all that stands against it.
    """
    refuse(export.plan.problems, export.source)
    return Side(where, export.form.config, _tensors_of(export), export.sources, small)


def _tensors_of(export: Export) -> dict[str, Operand]:
    """The tensors that an export would write, each made of the arrays that it lies in, or taken from the release."""
    everything = [Block(number, whole(grid.spec.grid), 0, ("", 0)) for number, grid in enumerate(export.grids)]
    arrays = [export.encodings[grid.spec.key] for grid in export.grids]

    def fetch(name: str, box: Box) -> np.ndarray:
        tensor = export.layout.tensors[name]
        made = np.empty(tensor.shape, tensor.dtype)
        for part, pieces in rows[tables_name[name]]:
            fetches = [Fetch(arrays[number], piece.source.box, arrays[number].dtype) for number, piece in pieces]
            values = decode(fetches, read(fetches)[0])
            fill = None if pieces else 0.0
            recipe = BoxRecipe(part, tensor.dtype, fill, tuple((at, piece) for at, (_, piece) in enumerate(pieces)))
            made[slices(part)] = stack(recipe, arrange(fetches, values, recipe.pieces)).reshape(extent(part))
        return made[slices(box)]

    rows = rows_of(export.plan.arrays, export.grids, everything)
    tables_name = {name: table for table, names in export.names.items() for name in names}
    return {
        name: Operand(tensor.shape, tensor.dtype, (), (1,) * len(tensor.shape), functools.partial(fetch, name))
        for name, tensor in export.layout.tensors.items()
        if name not in export.taken
    } | {name: stored_operand(encoding) for name, encoding in export.taken.items()}
