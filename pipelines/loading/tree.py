"""`weightbeam.open`: the arrays of a release or a checkpoint as a lazy tree. Nothing is read before it is indexed, and
then only that box.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from weightbeam.formats.storage import ChangedError, StorageError
from weightbeam.model_mappings.cells import pattern
from weightbeam.pipelines.loading.indexing import find_box
from weightbeam.pipelines.loading.opening import choose, find_source, values_asked
from weightbeam.pipelines.loading.source import ArraySource, Wanted
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import Block, Table, count, human, shape_text
from weightbeam.transforms.cutting.mesh import Rules
from weightbeam.transforms.planning.conversion import rules_of

if TYPE_CHECKING:
    import jax


CHECKED = 1 << 20  # bytes of a box; a look at the files takes longer than to read a smaller one


@contextlib.contextmanager
def _opened_once() -> Iterator[None]:
    """Context manager: what is read of a source fails in words for who has opened it."""
    try:
        yield
    except ChangedError as e:
        raise Failed(f"{e.what}; open it again") from e
    except StorageError as e:
        raise Failed(str(e)) from e


def check(source: ArraySource) -> None:
    """Checks that the files of a source are those that were opened.

    Raises:
      Failed: one isn't, or is gone.
    """
    with _opened_once():
        source.check()


class LazyArray:
    """An array that isn't read yet. What an index selects of it is read, dequantised and arranged as numpy.

    Attributes:
      key: its name in the tree.
      shape, dtype: as a conversion would store it.
      logical_axes: MaxText's logical name of each axis, None where it has none or none is known.
      lossy: why its values aren't the source's to the bit; None where they are.
    """

    def __init__(self, key: str, source: ArraySource, rules: Rules):
        described = source.arrays[key]
        self.key, self.shape, self.dtype = key, described.shape, described.dtype
        self.logical_axes, self.lossy = described.axes, described.lossy
        self._source, self._rules = source, rules

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def sharding(self, mesh: jax.sharding.Mesh | str) -> jax.sharding.NamedSharding:
        """How MaxText's logical axis rules shard it over a mesh, or over this process's devices as `"fsdp=4,tensor=2"`.

        An axis that a mesh doesn't divide evenly isn't sharded.

        Raises:
          Refused: the mesh can't be read, or has another number of devices than there are.
        """
        from weightbeam.pipelines.loading.mesh import check_jax, named_sharding, open_mesh

        check_jax()
        return named_sharding(self.shape, self.logical_axes, open_mesh(mesh, self._rules), self._rules)

    def __getitem__(self, index: Any) -> np.ndarray:
        box, rest = find_box(index, self.shape)
        with _opened_once():
            (values,), _ = self._source.make([Wanted(self.key, box, self.dtype)])
        if values.nbytes >= CHECKED and "://" not in self._source.url and not self._source.checks_itself:
            check(self._source)
        return values[rest]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self.key} isn't read yet: an array of it is a copy")
        values = np.asarray(self[...])
        return values if dtype is None else values.astype(dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[at] for at in range(len(self)))

    def __repr__(self) -> str:
        return f"LazyArray({self.key}: {shape_text(self.shape)}, {self.dtype.name})"


class LazyTree(Shown, Mapping[str, LazyArray]):
    """Arrays by key: Orbax's dotted keys, or the tensors' names of a release as it is. `source` says where they are."""

    def __init__(self, source: ArraySource, rules: Rules):
        self.source = source.url
        self._source = source
        self._arrays = {key: LazyArray(key, source, rules) for key in source.arrays}

    def __getitem__(self, key: str) -> LazyArray:
        return self._arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def check(self) -> None:
        """Checks that the files are those that were opened, all of them, whether a box of them was read or not.

        Raises:
          Failed: one isn't, or is gone: what was read may be of either.
        """
        check(self._source)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.values())

    def brief(self) -> str:
        return f"{self.source}: {count(len(self), 'array')}, {human(self.nbytes)}"

    def blocks(self) -> list[Block]:
        groups: dict[tuple, list[LazyArray]] = defaultdict(list)
        for array in self.values():
            groups[pattern(array.key), array.shape, array.dtype.name].append(array)
        rows = Table("array", "shape", "dtype", ">arrays", spare=("arrays", "dtype"))
        for (_, shape, dtype), same in groups.items():
            name = same[0].key if len(same) == 1 else f"{same[0].key} …"
            rows.add_row(name, shape_text(shape), dtype, str(len(same)))
        return [rows, "", self.brief()]

    def to_dict(self) -> dict[str, Any]:
        """Where the arrays are, and each array's shape and dtype."""
        arrays = {key: {"shape": array.shape, "dtype": array.dtype.name} for key, array in self.items()}
        return {"source": self.source, "arrays": arrays}


def open(
    source: str | PathLike[str], *, as_is: bool = False, release: str | PathLike[str] | None = None, **options: Any
) -> LazyTree:
    """Opens a release or an Orbax checkpoint: reads headers and metadata, no values.

    Args:
      source: a folder, `gs://…`, or `hf://org/name[@revision]`; of an Orbax checkpoint its root, a step, or the item.
      as_is: a release's own tensors under their own names, quantised ones dequantised to float32; else MaxText's
        arrays.
      release: of a checkpoint that Weightbeam didn't write, such as a training run's, a release of its model, whose
        `config.json` tells the weights' `logical_axes`, and so their `sharding`.
      options: those of `weightbeam convert` that say what MaxText's tree is: `scan_layers`, `save_dtype`, `vocab_size`,
        `maxtext_model` …; of a checkpoint only those that it can follow, such as `save_dtype` of FP8 codes.

    Returns:
      The arrays by their names. An index, in elements, reads that box of one, as numpy.

    Raises:
      Refused: there is no such source, or problems stand against it: all of them.

    Example:
      >>> tree = wb.open("models/qwen3")
      >>> kernel = tree["params.params.decoder.layers.mlp.wi_0.kernel"]
      >>> kernel.shape, kernel[:, 1].shape
      ((64, 2, 128), (64, 128))
    """
    if as_is not in (True, False):
        raise Refused(f"as_is={as_is!r} should be True or False")
    options = {name: value for name, value in options.items() if value is not None}
    chosen = dataclasses.replace(choose(options), unit_bytes=sys.maxsize)  # who indexes says how much is read at a time
    return LazyTree(find_source(source, chosen, as_is, release, values_asked(options), options), rules_of(chosen))
