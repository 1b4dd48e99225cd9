"""An Orbax checkpoint: how it is assembled of units, and how one is read for inspection.

    <output>/<step>/
        _CHECKPOINT_METADATA, conversion.json, maxtext.yml, release.zip, commit_success.txt
        items/_METADATA, _CHECKPOINT_METADATA, commit_success.txt, manifest.ocdbt, d/, ocdbt.process_<attempt>/
        items/source/                         the source's files, if the checkpoint is virtual

Where it is until it is whole: `formats/staging.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from weightbeam.formats import ocdbt, zarr
from weightbeam.formats.links import SOURCE
from weightbeam.formats.provenance import RECORD, digest, record_json, summary, total
from weightbeam.formats.references import Reference, find_faults, read_references, remove_database, write_database
from weightbeam.formats.staging import GROWING, ITEMS, LOCK, MARKER, Staging
from weightbeam.formats.storage import TEMPORARY, StorageError, Store, open_store
from weightbeam.formats.strict_json import parse_json
from weightbeam.formats.zarr import ArraySpec, EncodedChunk, Format
from weightbeam.model_mappings.boxes import Box

STEP = ArraySpec("step", (), np.dtype(np.int64), (), ())  # the scalar that MaxText's TrainState keeps beside the parameters
METADATA, CHECKPOINT_METADATA = "_METADATA", "_CHECKPOINT_METADATA"
ARRAY_METADATAS, STRINGS = "array_metadatas", "_strings.json"  # of an item: what its arrays were, and the leaves that are texts
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def write_unit(staging: Staging, unit: int, shards: Sequence[tuple[ArraySpec, Box, np.ndarray]], format: Format, copies: Sequence[EncodedChunk] = ()) -> str:
    """Writes the shards of a unit durably, and chunks that are encoded already, into a database all or none of them; enters the unit in the ledger.

    Returns:
      The attempt that counts: this one, or an earlier one that was first.

    Raises:
      TakenOverError: the place isn't this plan's any more; nothing of the unit is left.
    """
    staging.check()
    attempt = staging.attempt()
    try:
        _write(staging, attempt, shards, format, copies)
        staging.check()
    except Exception as e:
        if staging.is_staged():
            raise
        staging.sweep(f"{ocdbt.ATTEMPT}{attempt}")
        raise staging.taken_over() from e
    shares: dict[str, int] = {}
    for spec, box, values in (*shards, *((copy.spec, copy.box, copy.values) for copy in copies)):
        shares[spec.key] = shares.get(spec.key, 0) + digest(spec, box, values)
    # Once it is entered it may count, and be published by whoever has taken over: from here on nothing of it is removed.
    entry = staging.enter(unit, {"attempt": attempt, "digests": {key: f"{share:x}" for key, share in shares.items()}})
    if format.use_ocdbt:
        staging.items.forget(f"{ocdbt.ATTEMPT}{attempt}/d")  # the page cache would grow by the whole checkpoint, and push out what others read
    return entry["attempt"]


def _write(staging: Staging, attempt: str, shards: Sequence[tuple[ArraySpec, Box, np.ndarray]], format: Format, copies: Sequence[EncodedChunk]) -> None:
    shared = ocdbt.context()
    transaction = ts.Transaction(atomic=True) if format.use_ocdbt else None
    kvstore = ocdbt.database(staging.items / f"{ocdbt.ATTEMPT}{attempt}") if format.use_ocdbt else staging.shards.kvstore()
    futures = []
    for spec, same in itertools.groupby(shards, key=lambda shard: shard[0]):
        futures += zarr.write_shards(kvstore, spec, format, [(box, values) for _, box, values in same], shared, transaction)
    if copies:
        store = ts.KvStore.open(kvstore, context=shared).result()
        store = store if transaction is None else store.with_transaction(transaction)
        futures += [store.write(copy.key, copy.encoded) for copy in copies]
    for future in futures:
        future.result()
    if transaction is not None:
        transaction.commit_sync()


STEP_NAME = re.compile(r"(\w*_)?\d+")  # of a step's folder: 100, or with a prefix, checkpoint_100


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a checkpoint is made of.

    Attributes:
      specs: every array.
      format: how it is stored.
      units: how many units the plan has; their ids count from 0.
      scan_layers: what MaxText looks for in the custom metadata; None where nobody knows.
      record: where the checkpoint comes from (`formats/provenance.py`), without digests.
      references: the chunks that no unit makes: ranges of files in `items/source/`.
      bare: whether the arrays are the whole tree, without the step and the (empty) optimizer state of a TrainState.
      custom: more custom metadata.
      files: what else lies beside the record, or below the item or another one, by name.
      tree: every leaf, as Orbax's `tree_metadata` has it; None for MaxText's TrainState of parameters alone.
      metadata: of arrays whose chunks were copied, what describes them.
      handlers: Orbax's names for the handlers of other items.
      digests: of arrays whose values and shards are known from before.
    """

    specs: Sequence[ArraySpec]
    format: Format
    units: int
    scan_layers: bool | None
    record: Mapping[str, Any]
    references: Sequence[Reference] = ()
    bare: bool = False
    custom: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    tree: Mapping[str, Any] | None = None
    metadata: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    handlers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> list[ArraySpec]:
        """Every array that is stored, with the step where it is a scalar of ours."""
        return [*self.specs] if self.bare or self.tree is not None else [*self.specs, STEP]


def assemble(staging: Staging, contents: Contents, overwrite: bool = False) -> None:
    """Makes one checkpoint of the units that the ledger names, and publishes it. Does nothing where that has happened.

    Args:
      staging: where the units are.
      contents: what it should hold.
      overwrite: replace a checkpoint that has the same place.

    Raises:
      ocdbt.IncompleteError: units are missing, or don't hold what they should, or a reference leads out of its file.
    """
    if not staging.exists() and staging.is_taken():
        return
    if not staging.is_complete():
        try:
            _complete(staging, contents)
        except Exception as e:
            if staging.is_staged():
                raise
            staging.sweep()
            raise staging.taken_over() from e
    publish(staging, overwrite)


def publish(staging: Staging, overwrite: bool = False) -> None:
    """Lets readers see what is staged; see `Staging.publish`."""
    staging.publish(overwrite)


def _complete(staging: Staging, contents: Contents) -> None:
    """Makes a whole checkpoint of what is staged, the markers last."""
    format, items = contents.format, staging.items
    done, ledger = staging.done(), staging.ledger()
    if missing := set(range(contents.units)) - set(ledger):
        raise ocdbt.IncompleteError(f"{len(missing)} of {contents.units} units are missing, e.g. {sorted(missing)[:3]}")
    everything = contents.arrays
    plain = dataclasses.replace(format, compression="none")  # how the step is stored
    objects = [
        (f"{spec.key}/{format.metadata_name}", contents.metadata.get(spec.key) or zarr.metadata_json(spec, plain if spec is STEP else format))
        for spec in everything
    ]
    if everything[-1] is STEP:
        objects.append((list(zarr.keys(STEP, format))[1], np.int64(staging.step).tobytes()))
    if format.use_ocdbt:
        attempts = {f"{ocdbt.ATTEMPT}{entry['attempt']}" for entry in ledger.values()}
        held = {name for name in items.folders() if name.startswith(ocdbt.ATTEMPT)}
        if lost := attempts - held:
            raise ocdbt.IncompleteError(f"{len(lost)} of {len(attempts)} databases are missing in {items}, e.g. {sorted(lost)[0]}")
        for name in held - attempts:
            if staging.is_own(name.removeprefix(ocdbt.ATTEMPT)):
                items.delete_folder(name)
        items.delete(f"{ocdbt.MANIFEST}{LOCK}")  # of a merge that was killed: TensorStore writes over it, and leaves what reaches beyond
        databases = [items / attempt for attempt in sorted(attempts)]
        if contents.references:
            write_database(items / SOURCE, contents.references)
            databases.append(items / SOURCE)
        ocdbt.merge(items, databases, objects, ((spec.key, zarr.keys(spec, format)) for spec in everything), staging.manifest)
        if staging.manifest != items:
            staging.put(f"{ITEMS}/{ocdbt.MANIFEST}", staging.manifest.read(ocdbt.MANIFEST))
        if not items.exists(ocdbt.MANIFEST):  # by Python's own eyes: TensorStore may understand a path in its own way
            raise ocdbt.IncompleteError(f"{items.path(ocdbt.MANIFEST)} isn't there, though it was written")
        if contents.references:
            remove_database(items / SOURCE)
            _check_references(items, contents.references)
    else:
        for key, value in objects:
            staging.put(f"{ITEMS}/{key}", value)
        _check_files(items, everything, format)
    _check_same(staging, done)  # the merge may have made the folder anew
    staging.put(f"{ITEMS}/{METADATA}", _json(_tree_metadata(contents)))
    record = {**contents.record, "digests": total(entry["digests"] for entry in ledger.values())}
    if other := [key for key, known in contents.digests.items() if record["digests"].get(key) != known]:
        raise ocdbt.IncompleteError(f"{len(other)} arrays have other values than the source's record says, e.g. {other[0]}: the source is damaged")
    staging.put(RECORD, record_json(record))
    for name, content in contents.files.items():
        staging.put(name, content)
    scan = {} if contents.scan_layers is None else {"scan_layers": contents.scan_layers}
    about = _json(_checkpoint_metadata({**scan, **contents.custom, "weightbeam": summary(record)}, contents.handlers))
    staging.put(f"{ITEMS}/{CHECKPOINT_METADATA}", about)  # where MaxText looks for scan_layers: load_parameters_path is the item
    staging.put(CHECKPOINT_METADATA, about)
    _check_same(staging, done)
    staging.mark()


def _check_same(staging: Staging, done: Mapping[int, Any]) -> None:
    """Makes sure that the ledger is the one that was read."""
    if staging.done() != done:
        raise staging.taken_over()


def _check_references(items: Store, references: Sequence[Reference]) -> None:
    """The merged database, read back: every reference is there and lies within its file."""
    wanted = (dataclasses.replace(reference, path=f"{SOURCE}/{reference.path}") for reference in references)
    if faults := list(itertools.islice(find_faults(items, wanted), 3)):
        raise ocdbt.IncompleteError(f"the index doesn't refer to what it should: {'; '.join(faults)}")


def _check_files(items: Store, specs: Sequence[ArraySpec], format: Format) -> None:
    """Without a database every key is a file: all of them, and no others."""
    wanted = {key for spec in specs for key in zarr.keys(spec, format)}
    held = {file.name for file in items.list()} - {METADATA, CHECKPOINT_METADATA, MARKER, STRINGS}  # of an assembly that was stopped
    held = {name for name in held if not name.startswith(f"{ARRAY_METADATAS}/")}
    for stray in [key for key in held - wanted if key.endswith((".__lock", TEMPORARY))]:  # TensorStore's and ours, of writes that were killed
        items.delete(stray)
        held.remove(stray)
    if wanted != held:
        missing, extra = sorted(wanted - held), sorted(held - wanted)
        raise ocdbt.IncompleteError(f"the units left {len(missing)} keys missing and {len(extra)} extra, e.g. {(missing or extra)[:3]}")


def plan_of(step: Store) -> str | None:
    """The hash of the plan that a complete checkpoint was made by; None where it isn't complete, or isn't ours."""
    if not step.exists(MARKER):
        return None
    about = custom_metadata(step).get("weightbeam")
    return about.get("plan") if isinstance(about, dict) else None


def is_checkpoint(step: Store) -> bool:
    """Whether a step is an Orbax checkpoint, ours or anyone's, whole or damaged: something that only a checkpoint has is there."""
    if any(step.exists(name) for name in (MARKER, CHECKPOINT_METADATA, METADATA)):
        return True
    return any((step / name).exists(METADATA) for name in step.folders())


def find_damage(step: Store, everything: Sequence[ArraySpec], format: Format) -> str:
    """What is missing of a published checkpoint, as far as its index and the sizes of its files tell; empty if nothing is.

    No array is read.
    """
    items = step / ITEMS
    sizes = {file.name: file.size for file in items.list()}
    if gone := sorted({METADATA, CHECKPOINT_METADATA, MARKER} - sizes.keys()):
        return f"{items.path(gone[0])} is gone"
    wanted = [key for spec in everything for key in zarr.keys(spec, format)]
    if not format.use_ocdbt:
        gone = [key for key in wanted if key not in sizes]
        return f"{len(gone)} of {len(wanted)} files are gone, e.g. {items.path(gone[0])}" if gone else ""
    try:
        ocdbt.check(items, len(wanted), ((spec.key, zarr.keys(spec, format)) for spec in everything))
        for reference in read_references(items):
            if reference.offset + reference.length > sizes.get(reference.path, -1):
                what = "ends too early" if reference.path in sizes else "is gone"
                return f"{items.path(reference.path)} {what}"
    except ValueError as e:  # TensorStore's errors too
        return f"its index can't be read: {str(e).splitlines()[0]}"
    return ""


def custom_metadata(step: Store) -> dict[str, Any]:
    """A step's custom metadata; empty where there is none, or none that can be read."""
    try:
        custom = parse_json(step.read(CHECKPOINT_METADATA))["custom_metadata"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return custom if isinstance(custom, dict) else {}


def item_metadata(items: Store) -> dict[str, Any]:
    """The custom metadata of an item's step; the item's own where it was copied without its step."""
    return custom_metadata(items.parent) or custom_metadata(items)


def record_of(items: Store) -> dict[str, Any]:
    """Where a checkpoint comes from, in full; empty where nothing says it, as where the item was copied without its step."""
    try:
        record = parse_json(items.parent.read(RECORD))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _tree_metadata(contents: Contents) -> dict[str, Any]:
    """`_METADATA`: every array as a numpy array, so that no device mesh is baked in."""

    def entry(path: tuple[str, ...], kind: str, skip: bool = False) -> tuple[str, Any]:
        keys = [{"key": key, "key_type": 2} for key in path]  # 2: a dict's key
        return str(path), {"key_metadata": keys, "value_metadata": {"value_type": kind, "skip_deserialize": skip}}

    state = [] if contents.bare else [entry(("opt_state",), "Dict", skip=True), entry((STEP.key,), "scalar")]
    return {
        "tree_metadata": contents.tree or dict([*state, *(entry(tuple(spec.key.split(".")), "np.ndarray") for spec in contents.specs)]),
        "use_ocdbt": contents.format.use_ocdbt,
        "use_zarr3": contents.format.use_zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _checkpoint_metadata(custom: Mapping[str, Any], handlers: Mapping[str, Any]) -> dict[str, Any]:
    now = time.time_ns()
    return {
        "item_handlers": {"items": HANDLER, **handlers},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": dict(custom),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of a checkpoint that exists, and whether its chunks are compressed."""

    spec: ArraySpec
    compressed: bool


def find_items(where: str | Path | Store) -> Store:
    """The item of a checkpoint given by its root (with one step), a step, or the item itself.

    Raises:
      StorageError: none of them.
    """
    store = open_store(where)
    store.kvstore()  # refused where no checkpoint can be
    if unpublished := [part for part in (store.name, store.parent.name) if _is_unpublished(part)]:
        raise StorageError(f"{store}: {unpublished[0]} is of a conversion that wasn't published, or was replaced; it is no checkpoint")
    if item := _item_of(store):
        return item
    folders = store.folders()
    steps = {name: item for name in folders if STEP_NAME.fullmatch(name) and (item := _item_of(store / name))}
    if len(steps) == 1:
        return next(iter(steps.values()))
    found = f"{len(steps)} steps: name one of {', '.join(steps)}" if steps else "no Orbax checkpoint"
    if not steps and (stopped := sorted(filter(_is_unpublished, folders))):
        found += f"; {stopped[0]} is of a conversion that wasn't published: the command that made it goes on with --resume"
    raise StorageError(f"{store}: {found}")


def check_committed(store: Store) -> None:
    """Checks that a step, or an item, is whole. In a folder Orbax names it when it is; in a bucket a marker says so.

    Raises:
      StorageError: it is still being written, or its writing was broken off.
    """
    if store.url.startswith("gs://") and (items := find_items(store)) and not items.exists(MARKER) and not items.parent.exists(MARKER):
        raise StorageError(f"{items}: has no {MARKER}: it is still being written, or was broken off; wait, or take another step")


def _item_of(store: Store) -> Store | None:
    """The item that a folder is, or the one below a step that holds arrays: ours, or anyone's, whatever its name; None where there is none.

    Raises:
      StorageError: a step has several.
    """
    if store.exists(METADATA):
        return store
    if (store / ITEMS).exists(METADATA):
        return store / ITEMS
    others = [name for name in store.folders() if not STEP_NAME.fullmatch(name) and not _is_unpublished(name)]
    items = [name for name in others if (store / name).exists(METADATA)]
    if len(items) > 1:
        raise StorageError(f"{store}: {len(items)} items with arrays: name one of {', '.join(items)}")
    return store / items[0] if items else None


def _is_unpublished(name: str) -> bool:
    """Whether a folder of that name holds what will be a checkpoint, or what was one."""
    return GROWING in name or bool(re.fullmatch(r"\w+\.replaced-[0-9a-f]+", name))


def open_arrays(items: Store, complete: bool = False) -> dict[str, ts.TensorStore]:
    """The arrays of a checkpoint, ours or anyone's, by their keys; opened, not read.

    With `complete` a chunk that isn't there is an error where the metadata say that all are stored, and not zeros.
    """
    metadata = parse_json(items.read(METADATA))
    format = Format(use_ocdbt=metadata.get("use_ocdbt", True), use_zarr3=metadata.get("use_zarr3", False))
    shared = ocdbt.context()
    keys = [
        ".".join(key["key"] for key in entry["key_metadata"])
        for entry in metadata["tree_metadata"].values()
        if not entry["value_metadata"].get("skip_deserialize")
    ]
    kvstore = ocdbt.database(items) if format.use_ocdbt else items.kvstore()
    fill = {"fill_missing_data_reads": not (complete and metadata.get("store_array_data_equal_to_fill_value", False))}
    opened = [ts.open({"driver": format.driver, "kvstore": zarr.below(kvstore, key), **fill}, open=True, read=True, context=shared) for key in keys]
    return {key: future.result() for key, future in zip(keys, opened, strict=True)}


def read_arrays(items: Store) -> list[StoredArray]:
    """What the metadata of a checkpoint, ours or anyone's, say of its arrays."""
    arrays = []
    for key, store in open_arrays(items).items():
        layout, codec = store.chunk_layout, json.dumps(store.codec.to_json() if store.codec else None)
        chunk, shard = layout.read_chunk.shape or store.shape, layout.write_chunk.shape or store.shape
        spec = ArraySpec(key, tuple(store.shape), np.dtype(store.dtype.numpy_dtype), tuple(chunk), tuple(shard))
        arrays.append(StoredArray(spec, any(name in codec for name in ('"zstd"', '"gzip"', '"blosc"'))))
    return arrays
