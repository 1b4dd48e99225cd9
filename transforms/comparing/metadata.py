"""Whether what a checkpoint of ours says of itself is what its record says: dtypes, both metadata files, markers, the
step, keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorstore as ts

from weightbeam.formats.orbax import (
    CHECKPOINT_METADATA,
    METADATA,
    STEP,
    beside_faults,
    custom_metadata,
    ocdbt,
    read_tree,
)
from weightbeam.formats.orbax.metadata import path_of
from weightbeam.formats.record.provenance import RECORD, summary
from weightbeam.formats.staging import MARKER
from weightbeam.formats.storage import Store
from weightbeam.model_mappings.plan import Array

NAME_LETTERS = 200  # letters of a stray's name
KEY, SAID = {"key", "key_type"}, {"value_type", "skip_deserialize"}  # of an entry of `_METADATA`
UNCOMPARED = {
    "files",
    "source",
    "dropped",
}  # of a record: what is edited once files are moved, and what its copies only count
VALUE_TYPES = {STEP.key: "scalar"}  # of `_METADATA`; of all others `np.ndarray`


def find_metadata_faults(
    items: Store, stores: Mapping[str, ts.TensorStore], arrays: Iterable[Array], record: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """What is wrong with the metadata of a checkpoint that Weightbeam made: `(key or file, what)`. Of others nothing is
    known.

    Args:
      items: the item.
      stores: its arrays, opened so that a chunk that isn't there is an error.
      arrays: those that the plan makes.
      record: `conversion.json`; empty where the item came without its step.
    """
    options = record.get("options")
    if not isinstance(options, Mapping) or "scan_layers" not in options or "source" not in record:
        return  # a reshard of somebody else's tree is a tree of theirs
    yield from _dtype_faults(stores, arrays)
    yield from beside_faults(items.parent, record)
    yield from _copy_faults(items, record, options["scan_layers"])
    yield from _tree_faults(items)
    yield from _step_faults(stores, options.get("step", 0))
    if read_tree(items).get("use_ocdbt", True):
        yield from _stray_keys(items, stores)


def _dtype_faults(stores: Mapping[str, ts.TensorStore], arrays: Iterable[Array]) -> Iterator[tuple[str, str]]:
    """Arrays that are stored in another dtype than the plan's."""
    for array in arrays:
        if array.key in stores and stores[array.key].dtype.numpy_dtype != array.dtype:
            yield array.key, f"is stored as {stores[array.key].dtype.name}, expected {array.dtype.name}"


def _copy_faults(items: Store, record: Mapping[str, Any], scan_layers: object) -> Iterator[tuple[str, str]]:
    """Markers that are missing, and custom metadata, of the item and of its step, that say something else than the record."""
    known = summary({**record, "dropped": {}})
    for store, where in ((items, f"{items.name}/"), (items.parent, "")):
        if not store.exists(MARKER):
            yield f"{where}{MARKER}", "is missing: readers that wait for it don't see the checkpoint"
        custom = custom_metadata(store)
        if (said := custom.get("scan_layers")) is not scan_layers:
            yield f"{where}{CHECKPOINT_METADATA}", f"says scan_layers {said}, expected {scan_layers}"
        copy = custom.get("weightbeam", {})
        if not isinstance(copy, Mapping):
            yield f"{where}{CHECKPOINT_METADATA}", f"holds no copy of {RECORD}"
            continue
        for name in sorted((copy.keys() & known.keys()) - UNCOMPARED):
            if copy[name] != known[name]:
                yield f"{where}{CHECKPOINT_METADATA}", f"says another {name} than {RECORD}"


def _step_faults(stores: Mapping[str, ts.TensorStore], expected: int) -> Iterator[tuple[str, str]]:
    """Whether the array of the step holds another number."""
    if STEP.key not in stores:
        return
    try:
        found = int(stores[STEP.key].read().result())
    except ValueError as e:
        yield STEP.key, f"can't be read: {str(e).partition(' [')[0]}"
    else:
        if found != expected:
            yield STEP.key, f"is {found}, expected {expected}"


def _stray_keys(items: Store, stores: Mapping[str, ts.TensorStore]) -> Iterator[tuple[str, str]]:
    """Folders of the database that are of none of the arrays."""
    keys = ts.KvStore.open(ocdbt.database(items), context=ocdbt.context()).result().list().result()
    names = (key.decode(errors="replace") for key in keys)
    for name in sorted({name.rpartition("/")[0] or name for name in names}):
        if not any(around in stores for around in itertools.accumulate(name.split("/"), "{}/{}".format)):
            yield name[:NAME_LETTERS], "is in the database, but the checkpoint's metadata don't name it"


def _tree_faults(items: Store) -> Iterator[tuple[str, str]]:
    """Entries of `_METADATA` that would have readers make something else of an array."""
    for name, entry in read_tree(items)["tree_metadata"].items():
        path, said = path_of(entry), entry["value_metadata"]
        key = ".".join(path)
        if name != str(path):  # by which Orbax finds it
            yield key, f"is called {name} in {METADATA}, expected {path}"
        if said.keys() != SAID or any(part.keys() != KEY or part["key_type"] != 2 for part in entry["key_metadata"]):
            yield key, f"isn't of Orbax's form in {METADATA}"
        if said.get("skip_deserialize"):
            continue
        wanted = VALUE_TYPES.get(key, "np.ndarray")
        if said.get("value_type") != wanted:
            yield key, f"has the value_type {said.get('value_type')} in {METADATA}, expected {wanted}"
