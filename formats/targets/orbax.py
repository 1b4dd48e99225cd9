"""An Orbax checkpoint as a target: the shards of units, and the checkpoint that is assembled of them.

    <output>/<step>/
        _CHECKPOINT_METADATA, conversion.json, maxtext.yml, release.zip, commit_success.txt
        items/_METADATA, _CHECKPOINT_METADATA, commit_success.txt, manifest.ocdbt, d/, ocdbt.process_<attempt>/
        items/source/                         the source's files, if the checkpoint is virtual

Where it is until it is whole: `formats/staging/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from weightbeam.formats.orbax import ocdbt, zarr
from weightbeam.formats.orbax.metadata import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    METADATA,
    STEP,
    STRINGS,
    checkpoint_around,
    checkpoint_metadata,
    hash_beside,
    is_checkpoint,
    plan_hash_of,
    record_of,
    tree_metadata,
)
from weightbeam.formats.orbax.others import others_in
from weightbeam.formats.orbax.reading import find_damage, is_unpublished
from weightbeam.formats.orbax.references import Reference, find_faults, remove_database, write_database
from weightbeam.formats.orbax.zarr import ArraySpec, EncodedChunk, Format
from weightbeam.formats.record.provenance import RECORD, See, record_json, summary, total
from weightbeam.formats.staging import ITEMS, LOCK, MARKER, IncompleteError, Staging, staging_at
from weightbeam.formats.staging.links import SOURCE
from weightbeam.formats.storage import TEMPORARY, LocalFolder, Store
from weightbeam.formats.storage.case import clash
from weightbeam.formats.storage.local import said_of_mounts
from weightbeam.formats.targets.orbax_units import Shard, find_changed, write_unit
from weightbeam.formats.targets.target import Conclude, Target, lies_in
from weightbeam.formats.text.printable import listed

OTHERS = "what others have put there"
# folders below the root that etils' epath, by which Orbax finds files, takes for schemes (gpath.py, `_URI_MAP_ROOT`)
SCHEMES = ("gs", "s3", "az", "hf")


@dataclasses.dataclass(frozen=True)
class OrbaxTarget(Target[Staging]):
    """An Orbax checkpoint in a folder or in a bucket.

    Attributes:
      specs: every array.
      format: how it is stored.
      step: under which it is written.
      scan_layers: what MaxText looks for in the custom metadata; None where nobody knows.
      references: the chunks that no unit makes: ranges of files in `items/source/`.
      bare: whether the arrays are the whole tree, without the step and the (empty) optimizer state of a TrainState.
      custom: more custom metadata.
      files: what else lies beside the record, or below the item or another one, by name.
      tree: every leaf, as Orbax's `tree_metadata` has it; None for MaxText's TrainState of parameters alone.
      metadata: of arrays whose chunks were copied, what describes them.
      handlers: Orbax's names for the handlers of other items.
      see: is shown each shard that is written; see `write_unit`.
    """

    specs: Sequence[ArraySpec]
    format: Format
    step: int = 0
    scan_layers: bool | None = None
    references: Callable[[], Iterable[Reference]] = tuple
    bare: bool = False
    custom: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    tree: Mapping[str, Any] | None = None
    metadata: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    handlers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    see: See | None = None

    name, another = "orbax", "choose another --output or --step"
    beside = ", --step writes another one beside it"

    @property
    def arrays(self) -> list[ArraySpec]:
        """Every array that is stored, with the step where it is a scalar of ours."""
        return [*self.specs] if self.bare or self.tree is not None else [*self.specs, STEP]

    @property
    def identity(self) -> list[Any]:
        return [(spec.chunk, spec.shard, spec.order) for spec in self.specs]

    def place(self, output: str, plan_hash: str) -> Staging:
        return staging_at(output, self.step, plan_hash)

    def prepare(self, place: Staging) -> None:
        """Nothing has to be there."""

    def write(
        self,
        place: Staging,
        unit: int,
        parts: Sequence[Shard],
        notes: Mapping[str, Any] | None = None,
        copies: Sequence[EncodedChunk] = (),
    ) -> None:
        write_unit(place, unit, parts, self.format, copies, notes, self.see)

    def complete(self, place: Staging, units: int, record: Mapping[str, Any], conclude: Conclude) -> None:
        """Makes one database of the units', or of their files one item, and describes it. A reference that leads out of
        its file is found.
        """
        if place.is_complete():
            return
        place.gather()
        try:
            _complete(place, self, units, record, conclude)
        except Exception as e:
            if place.is_staged():
                raise
            place.sweep()
            raise place.taken_over() from e

    def find_changed(self, place: Staging) -> list[int]:
        return find_changed(place, self.format)

    @staticmethod
    def record_of(folder: Store) -> Mapping[str, Any]:
        return record_of(folder / ITEMS)

    @staticmethod
    def made_by(folder: Store) -> str | None:
        return plan_hash_of(folder)

    def find_damage(self, place: Staging) -> str:
        return find_damage(place.final, self.arrays, self.format)

    def find_unfit(self, place: Staging) -> tuple[str, str] | None:
        if is_unpublished(place.output.name) or is_unpublished(place.output.parent.name):
            return str(place.output), "has the name of what isn't published yet, which nobody reads; choose another"
        if around := checkpoint_around(place.output):
            return str(place.output), f"is a checkpoint itself, or a part of one, {around}; choose another"
        if isinstance(place.output, LocalFolder):
            if os.path.lexists(folder := place.output.folder) and not folder.is_dir():
                return str(place.output), "is a file" if folder.exists() else "is a link to nothing"
            if not place.output.name:
                return str(place.output), "is the root of the file system; name a folder"
            if folder.parts[1] in SCHEMES or any(part.endswith("gs:") for part in folder.parts):
                return str(place.output), "is a path that Orbax takes for a bucket's; choose another, or a link to it"
            place.final.kvstore()  # raises where TensorStore can't write
            keys = [] if self.format.use_ocdbt else [spec.key for spec in self.arrays]
            if why := clash(place.output.folder, [*keys, *self.files]):
                return str(place.output), f"{why}, or write a database (--use_ocdbt true)"
        return None

    def find_overlap(self, place: Staging, inputs: Iterable[str], swaps: bool = False) -> str:
        for url in inputs:
            if not swaps and any(lies_in(url, there.url) for there in (place.final, *place.beside())):
                return f"holds the source, or what it consists of ({url}), and would be deleted; {self.another}"
            if lies_in(url, place.output.url) and lies_in(place.output.url, url):
                return f"would lie among the files of {url}, which it is made of; {self.another}"
        if (files := _weights_in(place.output)) and not place.exists() and not place.is_taken():
            return f"lies in a release, with {listed(files, 2)}, as which it would be read; choose another --output"
        return ""

    def why_not_replace(self, place: Staging) -> str:
        foreign = f"exists, and is no Orbax checkpoint: --overwrite deletes nothing else; {self.another}, or remove it"
        if place.grows_in_place:
            if not place.is_complete() and place.is_remains():
                return self._deletes(place.unknown(), OTHERS)
            return self._deletes(others_in(place.final)) if is_checkpoint(place.final) else foreign
        final = Path(place.final.url)
        if final.is_symlink():
            return f"is a symbolic link to {os.readlink(final)}: --overwrite doesn't replace links; {self.another}, or remove it"
        if not final.is_dir():
            return f"is a file: --overwrite doesn't replace files; {self.another}, or remove it"
        if mounted := said_of_mounts(final):
            return f"{mounted}, and can't be replaced; {self.another}"
        if any(final.iterdir()) and not is_checkpoint(place.final):
            return foreign
        below = (os.path.join(folder, name) for folder, names, _ in os.walk(final) for name in names)
        for folder in itertools.chain([str(final)], below):
            if not os.path.islink(folder) and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                return (
                    f"holds {folder}, from which nothing can be removed: --overwrite can't replace it; {self.another}"
                )
        return self._deletes(others_in(place.final))

    def why_not_discard(self, place: Staging) -> str:
        """In a bucket what was staged lies where it will be read; one who slept may stage a plan beside what is whole."""
        if not place.grows_in_place:
            return ""
        return self.why_not_replace(place) if place.is_complete() else self._deletes(place.unknown(), OTHERS)

    def _deletes(self, others: Sequence[str], what: str = "what is no checkpoint's") -> str:
        if not others:
            return ""
        return f"holds {what}, and --overwrite would delete: {listed(others)}; move it away, or {self.another}"

    def bytes_left(self, place: Staging, made_bytes: int, resume: bool) -> int:
        """Bytes that are still to be written; 0 where all but the name is there."""
        if resume and place.is_complete():
            return 0
        return made_bytes - (place.ledger.bytes_done() if resume else 0)


def _weights_in(output: Store) -> list[str]:
    """The files of a release's weights that lie in an output; none where it can't be listed."""
    with contextlib.suppress(OSError):  # which is told where it is written
        return sorted(name for name in output.entries() if name.endswith(".safetensors"))
    return []


def _complete(staging: Staging, target: OrbaxTarget, units: int, record: Mapping[str, Any], conclude: Conclude) -> None:
    """Makes a whole checkpoint of what is staged: the arrays, then what describes them, the markers last."""
    done, ledger = staging.ledger.done(), staging.ledger.whole(units)
    concluded = conclude(ledger)
    objects = _objects(target, staging.step)
    if target.format.use_ocdbt:
        _merge(staging, target, {f"{ocdbt.ATTEMPT}{entry['attempt']}" for entry in ledger.values()}, objects)
    else:
        described = {f"{ITEMS}/{key}": value for key, value in objects}
        staging.announce(described)
        for name, value in described.items():
            staging.put(name, value)
        _check_files(staging.items, target.arrays, target.format)
    _check_same(staging, done)  # the merge may have made the folder anew
    tree = tree_metadata(target.specs, target.format, target.bare, target.tree)
    staging.put(f"{ITEMS}/{METADATA}", _json(tree))
    for name, content in target.files.items():
        staging.put(name, content)
    digests = total(entry["digests"] for entry in ledger.values())
    _put_record(staging, target, {**record, **concluded}, digests)
    _check_same(staging, done)
    staging.mark()


def _objects(target: OrbaxTarget, step: int) -> list[tuple[str, bytes]]:
    """What the item holds besides the units' chunks, by key: each array's description, and the step itself."""
    format, arrays = target.format, target.arrays
    plain = dataclasses.replace(format, compression="none")  # how the step is stored
    objects = []
    for spec in arrays:
        described = target.metadata.get(spec.key) or zarr.metadata_json(spec, plain if spec is STEP else format)
        objects.append((f"{spec.key}/{format.metadata_name}", described))
    if arrays[-1] is STEP:
        objects.append((list(zarr.keys(STEP, format))[1], np.int64(step).tobytes()))
    return objects


def _merge(staging: Staging, target: OrbaxTarget, attempts: Set[str], objects: Sequence[tuple[str, bytes]]) -> None:
    """Makes one database of those of the attempts, of the references and of objects, and makes sure that it is there."""
    items = staging.items
    held = {name for name in items.folders() if name.startswith(ocdbt.ATTEMPT)}
    if lost := attempts - held:
        raise IncompleteError(
            f"{len(lost)} of {len(attempts)} databases are missing in {items}, e.g. {sorted(lost)[0]}"
        )
    for name in held - attempts:
        if staging.is_own(name.removeprefix(ocdbt.ATTEMPT)):
            items.delete_folder(name)
    # of a merge that was killed: TensorStore writes over it, and leaves what reaches beyond
    items.delete(f"{ocdbt.MANIFEST}{LOCK}")
    databases = [items / attempt for attempt in sorted(attempts)]
    if references := list(target.references()):
        write_database(items / SOURCE, references)
        databases.append(items / SOURCE)
    wanted = ((spec.key, zarr.keys(spec, target.format)) for spec in target.arrays)
    ocdbt.merge(items, databases, objects, wanted, staging.manifest)
    if staging.manifest != items:
        staging.put(f"{ITEMS}/{ocdbt.MANIFEST}", staging.manifest.read(ocdbt.MANIFEST))
    if not items.exists(ocdbt.MANIFEST):  # by Python's own eyes: TensorStore may understand a path in its own way
        raise IncompleteError(f"{items.path(ocdbt.MANIFEST)} isn't there, though it was written")
    if references:
        remove_database(items / SOURCE)
        _check_references(items, references)


def _put_record(staging: Staging, target: OrbaxTarget, record: Mapping[str, Any], digests: Mapping[str, Any]) -> None:
    """Puts what says where the checkpoint comes from, and Orbax's metadata, which have a summary of it."""
    beside: dict[str, str] = {}
    for place in dict.fromkeys((staging.aside, staging.checkpoint)):
        beside |= hash_beside(place)
    carried = sorted({name.partition("/")[0] for name in target.files if "/" in name} - {ITEMS})
    record = {**record, **({"files": beside} if beside else {}), **({"carried": carried} if carried else {})}
    record["digests"] = digests
    staging.put(RECORD, record_json(record))
    scan = {} if target.scan_layers is None else {"scan_layers": target.scan_layers}
    about = _json(checkpoint_metadata({**scan, **target.custom, "weightbeam": summary(record)}, target.handlers))
    # where MaxText looks for scan_layers: load_parameters_path is the item
    staging.put(f"{ITEMS}/{CHECKPOINT_METADATA}", about)
    staging.put(CHECKPOINT_METADATA, about)


def _check_same(staging: Staging, done: Mapping[int, Any]) -> None:
    """Makes sure that the ledger is the one that was read."""
    if staging.ledger.done() != done:
        raise staging.taken_over()


def _check_references(items: Store, references: Sequence[Reference]) -> None:
    """The merged database, read back: every reference is there and lies within its file."""
    wanted = (dataclasses.replace(reference, path=f"{SOURCE}/{reference.path}") for reference in references)
    if faults := list(itertools.islice(find_faults(items, wanted), 3)):
        raise IncompleteError(f"the index doesn't refer to what it should: {'; '.join(faults)}")


def _check_files(items: Store, specs: Sequence[ArraySpec], format: Format) -> None:
    """Without a database every key is a file: all of them, and no others."""
    wanted = {key for spec in specs for key in zarr.keys(spec, format)}
    # of an assembly that was stopped
    held = {file.name for file in items.list()} - {METADATA, CHECKPOINT_METADATA, MARKER, STRINGS}
    held = {name for name in held if not name.startswith(f"{ARRAY_METADATAS}/")}
    # TensorStore's and ours, of writes that were killed
    for stray in [key for key in held - wanted if key.endswith((".__lock", TEMPORARY))]:
        items.delete(stray)
        held.remove(stray)
    if wanted != held:
        missing, extra = sorted(wanted - held), sorted(held - wanted)
        raise IncompleteError(
            f"the units left {len(missing)} keys missing and {len(extra)} extra, e.g. {(missing or extra)[:3]}"
        )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode()
