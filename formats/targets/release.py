"""A release as a target: rows of tensors into safetensors files, by many at a time, published once.

The headers follow from the plan, so every unit knows the bytes of the files that its rows are. In a folder the files
are made at their full size before any tensor is there, and a unit writes to its places (`release_place.py`); in a
bucket it writes components, which are composed (`release_bucket.py`); the hub gets what was made in a folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightbeam.formats.adapters.adapter import WEIGHTS as ADAPTER
from weightbeam.formats.orbax.metadata import checkpoint_around
from weightbeam.formats.record.extremes import SEEN, see_infinite
from weightbeam.formats.record.provenance import take_shares, total
from weightbeam.formats.safetensors import BoxRead, Tensor
from weightbeam.formats.storage import LocalFolder, StorageError, Store, is_hub, store_to_write
from weightbeam.formats.storage.case import clash
from weightbeam.formats.storage.local import is_mount_point, said_of_mounts
from weightbeam.formats.targets.published import RECORD, others_in, plan_hash_of, record_of
from weightbeam.formats.targets.release_place import ReleaseFolder, ReleasePlace
from weightbeam.formats.targets.target import Conclude, Target, lies_in
from weightbeam.formats.text.printable import listed
from weightbeam.model_mappings.boxes import Box

# a tensor whose `path` is its file's name in the release, a box of it, and its values
Rows = tuple[Tensor, Box, np.ndarray]
Files = Sequence[tuple[str, bytes, int]]  # safetensors files: name, header, and size in bytes
FOREIGN = "isn't a release that Weightbeam wrote"


class HoldsOthers(str):
    """Why a place can't be taken: others' files lie in it, and would be deleted."""


@dataclasses.dataclass(frozen=True)
class ReleaseTarget(Target[ReleasePlace]):
    """A release in a folder, in a bucket, or on the hub.

    Attributes:
      files: the safetensors files.
      texts: the files that are known before any tensor is: the small ones and the index.
      gather: files that are made of the ledger's entries.
      own: names of these, which `--overwrite` may delete.
    """

    files: Files
    texts: Mapping[str, bytes]
    gather: Callable[[Iterable[Mapping[str, Any]]], Mapping[str, bytes]] = lambda entries: {}
    own: frozenset[str] = frozenset()

    name, another = "release", "choose another --output"

    @property
    def identity(self) -> list[Any]:
        return [(name, header.hex()) for name, header, _ in self.files]

    def place(self, output: str, plan_hash: str) -> ReleasePlace:
        return release_staging(output, plan_hash)

    def prepare(self, place: ReleasePlace) -> None:
        """Puts the small files there, and in a folder the others at their full size."""
        place.lay_out(self.files, self.texts)
        place.note_small(self.texts)

    def find_changed(self, place: ReleasePlace) -> list[int]:
        return place.find_changed(self.files)

    def write(
        self,
        place: ReleasePlace,
        unit: int,
        parts: Sequence[Rows],
        notes: Mapping[str, Any] | None = None,
        copies: Sequence[Any] = (),
    ) -> None:
        write_unit(place, unit, parts, notes)

    def complete(self, place: ReleasePlace, units: int, record: Mapping[str, Any], conclude: Conclude) -> None:
        """Adds the files that `self.gather` makes of the ledger's entries, and the record."""
        if not place.is_complete():
            ledger = place.ledger.whole(units)
            place.check()
            concluded = conclude(ledger)
            place.seal(self.files, ledger)
            place.gather()
            for name, data in self.gather(ledger.values()).items():
                place.put(name, data)
            about = {
                **record,
                **concluded,
                **place.small_noted(),
                "digests": total(entry["digests"] for entry in ledger.values()),
            }
            place.put(RECORD, json.dumps(about, indent=1).encode())
        if small := place.small_noted().get("files"):
            place.drop_others({RECORD, *small, *self.own, *(name for name, *_ in self.files)})

    @staticmethod
    def record_of(folder: Store) -> dict[str, Any]:
        return record_of(folder)

    @staticmethod
    def made_by(folder: Store) -> str | None:
        return plan_hash_of(folder)

    def find_unfit(self, place: ReleasePlace) -> tuple[str, str] | None:
        folder = place.final.folder if isinstance(place.final, LocalFolder) else None
        if folder and (folder.is_symlink() or (folder.exists() and not folder.is_dir())):
            return str(place.final), "is a link or a file; name a folder"
        if folder and is_mount_point(folder):
            return str(place.final), "is a mount point, and can't be replaced; name a folder in it"
        if around := checkpoint_around(place.final.parent):
            return str(place.final), f"lies in a checkpoint, {around}; choose another"
        if folder and (why := clash(folder, [*(name for name, *_ in self.files), *self.texts])):
            return str(place.final), why
        return None

    def find_overlap(self, place: ReleasePlace, inputs: Iterable[str], swaps: bool = False) -> str:
        for url in inputs:
            for there in (place.final, *place.beside()):
                if lies_in(url, there.url):
                    return f"holds {url}, which it is made of; {self.another}"
                if lies_in(there.url, url):
                    return f"lies in {url}, which it is made of; {self.another}"
        return ""

    def why_not_replace(self, place: ReleasePlace) -> str:
        if isinstance(place.final, LocalFolder) and (mounted := said_of_mounts(place.final.folder)):
            return f"{mounted}, and can't be replaced; {self.another}"
        if plan_hash_of(place.final) is None:
            foreign = f"exists, {FOREIGN}, and isn't deleted; {self.another}"
            return self._deletes(place.unknown()) if place.is_empty() else foreign
        if {name for name, *_ in self.files} == {ADAPTER} and not place.final.exists(ADAPTER):
            return f"exists, and is a model, which no adapter takes the place of; {self.another}"
        return self._deletes({*others_in(place.final)} - self.own)

    def why_not_discard(self, place: ReleasePlace) -> str:
        if plan_hash_of(place.final) is not None:  # in a bucket, where one who slept staged a plan beside it
            return self.why_not_replace(place)
        return self._deletes(place.unknown())

    def _deletes(self, others: Collection[str]) -> str:
        if not others:
            return ""
        why = f"holds what Weightbeam didn't write there, and --overwrite would delete: {listed(sorted(others))}"
        return HoldsOthers(f"{why}; move it away, or {self.another}")

    def bytes_left(self, place: ReleasePlace, made_bytes: int, resume: bool) -> int:
        """Bytes that are still to be written; 0 where the files lie there at their full size."""
        return 0 if place.exists() else sum(size for *_, size in self.files)


def release_staging(output: str | Path | Store, plan: str = "plan") -> ReleasePlace:
    """The place of a release, by the plan with that hash: a folder or one in a bucket.

    Raises:
      StorageError: nothing can be written there.
    """
    if is_hub(output):
        raise StorageError(f"{output}: it can be written to a folder or to gs://bucket/folder, not to the hub")
    store: Any = store_to_write(output)
    if isinstance(store, LocalFolder):
        if not store.name:
            raise StorageError(f"{output}: is the root of the file system")
        place = ReleaseFolder(store.parent, store.name, plan)
        place.check_name()
        return place
    from weightbeam.formats.targets.release_bucket import ReleaseBucket  # only now: the clients take a while to import

    if not store.folder:
        raise StorageError(f"{output}: is a whole bucket; name a folder in it")
    return ReleaseBucket(store.parent, store.name, plan)


def write_unit(staging: ReleasePlace, unit: int, rows: Sequence[Rows], notes: Mapping[str, Any] | None = None) -> None:
    """Writes rows durably to their places, and enters the unit in the ledger; `notes` is what else its entry says."""
    staging.check()
    buffers = [
        (tensor, box, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data) for tensor, box, values in rows
    ]
    stretches = [
        (tensor.path, offset, part)
        for tensor, box, buffer in buffers
        for offset, part in BoxRead(tensor, box).ranges(buffer)
    ]
    about = staging.write_stretches(stretches)
    written = ((tensor.name, tensor.dtype, box, np.frombuffer(buffer, tensor.dtype)) for tensor, box, buffer in buffers)
    digests, seen = take_shares(written, see_infinite)
    staging.enter(unit, {"digests": digests, **about, **({SEEN: seen} if seen else {}), **(notes or {})})
