"""A release that is written to a bucket: units write components of its files, the store composes them, and the record
publishes.

A bucket has no write at an offset and no rename. So a unit writes each stretch of its rows as an object of its own, and
its ledger entry says where in which file that belongs. Once all units are done the store composes the files, each is
checked by its crc32c, and copies them to their places:

    <output>.weightbeam/<id>/                      plan, ledger, failure
        parts/<attempt>/…                          the units' components
        aside/                                     composed files, and the small ones
    <output>/                                      filled from there; config.json and then weightbeam.json come last
"""

from __future__ import annotations

import concurrent.futures
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import google_crc32c

from weightbeam.formats.adapters.config import CONFIG as ADAPTER
from weightbeam.formats.release.files import CONFIG
from weightbeam.formats.release.small_files import remove_others
from weightbeam.formats.staging import ASIDE, BucketStaging, IncompleteError
from weightbeam.formats.storage.bucket import Bucket
from weightbeam.formats.storage.composing import Component, check_tiling, compose
from weightbeam.formats.targets.release_place import ReleasePlace

PARTS = "parts"
PART_BYTES = 16 << 20  # of a component; a longer stretch is cut
MAX_COMPOSED_FILES = 4  # that are composed at a time
MAX_UPLOADS = 2  # components that a unit uploads; with their copies 32 MiB


class ReleaseBucket(ReleasePlace, BucketStaging):
    """The place of a release in a bucket."""

    # no loader takes a folder without it for a model, or for an adapter
    looked_for, written = frozenset({CONFIG, ADAPTER}), None

    @property
    def parts(self) -> Bucket:
        """Where components lie."""
        return self.plan_folder / PARTS

    def is_empty(self) -> bool:
        """What a command left that was thrown away is nobody's; nothing gets there before all is done."""
        return bool(self._left())

    def lay_out(self, files: Iterable[tuple[str, bytes, int]], small: Mapping[str, bytes]) -> None:
        """Writes the small files, to be copied with the others."""
        remove_others(self.aside, {*small, *(name for name, _, _ in files)})
        with concurrent.futures.ThreadPoolExecutor(self.aside.at_a_time) as pool:
            list(pool.map(self.aside.write, small.keys(), small.values()))

    def write_stretches(self, stretches: Iterable[tuple[str, int, memoryview]]) -> dict[str, Any]:
        """Writes stretches `(file, offset, bytes)`; returns what the ledger's entry says of them."""
        attempt = self.attempt()

        def write(numbered: tuple[int, tuple[str, int, list[memoryview]]]) -> tuple[str, int, int, str, int]:
            number, (file, start, held) = numbered
            data, name = b"".join(held), f"{attempt}/{number}"
            self.parts.write(name, data)
            return file, start, start + len(data), name, google_crc32c.value(data)

        with concurrent.futures.ThreadPoolExecutor(MAX_UPLOADS) as pool:
            return {"parts": list(pool.map(write, enumerate(join(stretches))))}

    def seal(self, files: Iterable[tuple[str, bytes, int]], ledger: Mapping[int, Mapping[str, Any]]) -> None:
        """Composes the files `(name, header, size)` of what the ledger's units wrote.

        Raises:
          IncompleteError: components are missing.
          StorageError: one is gone, or a file isn't what was written.
        """
        written: dict[str, list[Component]] = defaultdict(list)
        for entry in ledger.values():
            for file, *component in entry["parts"]:
                written[file].append(Component(*component))

        def seal(file: tuple[str, bytes, int]) -> None:
            name, header, size = file
            self._seal_file(name, header, size, written[name])

        with concurrent.futures.ThreadPoolExecutor(MAX_COMPOSED_FILES) as pool:
            list(pool.map(seal, files))

    def _seal_file(self, name: str, header: bytes, size: int, written: Iterable[Component]) -> None:
        head = Component(0, len(header), f"header/{name}", google_crc32c.value(header))
        self.parts.write(head.name, header)
        components = [head, *sorted(written)]
        try:
            check_tiling(self.final.path(name), components, size)
        except ValueError as e:
            raise IncompleteError(str(e)) from e
        joined = f"{PARTS}/joined/{name}"
        compose(
            self.plan_folder,
            f"{ASIDE}/{name}",
            [part._replace(name=f"{PARTS}/{part.name}") for part in components],
            joined,
        )
        self.check()
        with concurrent.futures.ThreadPoolExecutor(self.parts.at_a_time) as pool:
            list(pool.map(lambda part: self.parts.delete(part.name), components))
        self.plan_folder.delete_folder(joined)


def join(stretches: Iterable[tuple[str, int, memoryview]]) -> Iterator[tuple[str, int, list[memoryview]]]:
    """Stretches of bytes, those that adjoin together, as long as they have at most `PART_BYTES`; longer ones cut."""
    file, start, held, end = "", 0, [], 0
    for name, offset, data in sorted(stretches, key=lambda one: one[:2]):
        while data:
            if held and ((name, offset) != (file, end) or end - start == PART_BYTES):
                yield file, start, held
                held = []
            if not held:
                file, start, end = name, offset, offset
            taken = data[: PART_BYTES - (end - start)]
            held.append(taken)
            end, offset, data = end + len(taken), offset + len(taken), data[len(taken) :]
    if held:
        yield file, start, held
