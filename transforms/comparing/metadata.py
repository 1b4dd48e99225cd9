"""Whether what a checkpoint of ours says of itself is what its record says: dtypes, both metadata files, markers, the
step, keys.
"""

from __future__ import annotations

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

SHOWN = 200  # letters of a stray's name
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
    for array in arrays:
        if array.key in stores and stores[array.key].dtype.numpy_dtype != array.dtype:
            yield array.key, f"is stored as {stores[array.key].dtype.name}, expected {array.dtype.name}"
    yield from beside_faults(items.parent, record)
    known = summary({**record, "dropped": {}})
    for store, where in ((items, f"{items.name}/"), (items.parent, "")):
        if not store.exists(MARKER):
            yield f"{where}{MARKER}", "is missing: readers that wait for it don't see the checkpoint"
        custom = custom_metadata(store)
        if (said := custom.get("scan_layers")) is not options["scan_layers"]:
            yield f"{where}{CHECKPOINT_METADATA}", f"says scan_layers {said}, expected {options['scan_layers']}"
        copy = custom.get("weightbeam", {})
        if not isinstance(copy, Mapping):
            yield f"{where}{CHECKPOINT_METADATA}", f"holds no copy of {RECORD}"
            continue
        for name in sorted((copy.keys() & known.keys()) - UNCOMPARED):
            if copy[name] != known[name]:
                yield f"{where}{CHECKPOINT_METADATA}", f"says another {name} than {RECORD}"
    yield from _tree_faults(items)
    if STEP.key in stores:
        try:
            found = int(stores[STEP.key].read().result())
        except ValueError as e:
            yield STEP.key, f"can't be read: {str(e).partition(' [')[0]}"
        else:
            if found != options.get("step", 0):
                yield STEP.key, f"is {found}, expected {options.get('step', 0)}"
    if read_tree(items).get("use_ocdbt", True):
        known = tuple(f"{key}/" for key in stores)
        keys = ts.KvStore.open(ocdbt.database(items), context=ocdbt.context()).result().list().result()
        for key in sorted(
            {key.decode(errors="replace").rpartition("/")[0] or key.decode(errors="replace") for key in keys}
        ):
            if not f"{key}/".startswith(known):
                yield key[:SHOWN], "is in the database, but the checkpoint's metadata don't name it"


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
