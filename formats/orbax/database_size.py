"""How large an OCDBT database is once TensorStore has decoded it, counted before that happens: a stranger's 20 KB can be
gigabytes.

A node of the database's tree is compressed, its keys are written without what they share with the key before, and a
node may be named many times:

    on disk        zstd(3 keys, sharing 0 5 5, and of their own 7 1 1: "aaaaa/0" "1" "2")
    in memory      aaaaa/0  aaaaa/1  aaaaa/2          once for each way that leads from the root to the node

So each node is decompressed up to a limit here, and only the lengths in it are read and added up. The format is
google/tensorstore, tensorstore/kvstore/ocdbt/index.rst, 07830a3f, version 0; before a manifest's other settings stands
its kind, which that page lacks.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from urllib.parse import unquote

import numpy as np
import tensorstore as ts
import zstandard

from weightbeam.formats.orbax import ocdbt
from weightbeam.formats.staging import LOCK
from weightbeam.formats.storage import StorageError, Store

MANIFESTS = "manifest."  # and, where they are numbered, a number
MANIFEST_MAGIC, NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
MAX_MANIFEST = 1 << 20  # bytes of a manifest, decompressed; Orbax's have some hundred
MAX_DECODED = 384 << 20  # bytes of a database in memory: some two and a half million chunks
MAX_NODE, MAX_NODES = 128 << 20, 10_000  # bytes of a node, and nodes of a database; Orbax's have at most 100 MB each
MAX_INNER = 16 << 20  # bytes of a node that names others, in memory
MAX_ENTRIES = 1 << 20  # of a node or a table; TensorStore reads no more
ENTRY_BYTES = 64  # of a key or a path in memory, besides itself
AT_A_TIME = 64 << 20  # bytes of nodes that are read together
MOST_GROUPS = 5  # of seven bits of a length
_HEAD, _FOOT = 14, 4  # bytes before and behind what a manifest or a node holds


def check_database_size(items: Store) -> None:
    """Makes sure that the database of an item takes no more memory than can be meant.

    Raises:
      StorageError: it does, or it is damaged.
    """
    manifests = [file for file in items.list(MANIFESTS, recursive=False) if not file.name.endswith(LOCK)]
    if not manifests:
        return  # as whoever opens it says
    for file in manifests:
        _read_manifest(items, file.name, file.size)
    try:
        base, shared = ts.KvStore.open(items.kvstore()).result(), ts.Context({})
        versions = ts.ocdbt.dump(base, context=shared).result()["versions"]
        # by place the ways that lead to a node, and the letters that keys have on these ways
        level = {versions[-1]["root"]["location"]: (1, 0)} if versions and "location" in versions[-1]["root"] else {}
        nodes = decoded = 0
        while level:
            nodes, below = nodes + len(level), dict[str, tuple[int, int]]()
            for location, body in _bodies(items, base, level):
                (ways, letters), (size, height, entries) = level[location], _count(items, location, body)
                decoded += size * ways + entries * letters
                if decoded > MAX_DECODED or (height and size > MAX_INNER):
                    raise _too_large(items)
                if nodes + (entries if height else 0) > MAX_NODES:
                    raise StorageError(f"{items}: its database has more than {MAX_NODES:,} nodes; that can't be meant")
                for child in ts.ocdbt.dump(base, location, context=shared).result()["entries"] if height else ():
                    before, more = below.get(child["location"], (0, 0)), len(child["subtree_common_prefix"])
                    below[child["location"]] = before[0] + ways, before[1] + letters + more * ways
            level = below
    except ValueError as e:
        raise StorageError(f"{items}: its database can't be read: {ocdbt.brief(e)}") from e


def _too_large(items: Store) -> StorageError:
    return StorageError(f"{items}: its database takes more than {MAX_DECODED:,} bytes of memory; that can't be meant")


def _read_manifest(items: Store, name: str, size: int) -> None:
    """Adds up what a manifest names."""
    if size > MAX_MANIFEST:
        raise StorageError(f"{items.path(name)}: has {size:,} bytes, more than {MAX_MANIFEST:,}; that can't be meant")
    stored = items.read(name)
    body = _decompress(items, name, stored, MANIFEST_MAGIC, MAX_MANIFEST)
    lengths = _Lengths(f"{items.path(name)}", body)
    lengths.skip(16)  # the database's id
    lengths.read(3)  # the manifest's kind, and two limits of what is written
    lengths.skip(1)
    if lengths.read(1)[0]:  # how nodes are compressed
        lengths.skip(4)
    if not lengths.at_end and lengths.table() > MAX_DECODED:
        raise _too_large(items)


def _bodies(items: Store, base: ts.KvStore, locations: Collection[str]) -> Iterator[tuple[str, bytes | memoryview]]:
    """What nodes hold, decompressed, in groups that fit into memory.

    Raises:
      StorageError: one isn't there, or has more bytes than can be meant.
      ValueError: one can't be read.
    """
    waiting: list[tuple[str, str, ts.Future]] = []
    held = 0
    for i, location in enumerate(locations, 1):
        _, folder, path, offset, length = location.split(":")
        start, nbytes = int(offset), int(length)
        if nbytes > MAX_NODE:
            raise _too_large(items)
        name = unquote(folder) + unquote(path)
        waiting.append((location, name, base.read(name, byte_range=slice(start, start + nbytes))))
        held += nbytes
        if held >= AT_A_TIME or i == len(locations):
            for where, file, read in waiting:
                answer = read.result()
                if answer.state == "missing":
                    raise StorageError(f"{items}: {file} is missing: the checkpoint isn't whole")
                yield where, _decompress(items, where, answer.value, NODE_MAGIC, MAX_NODE)
            waiting, held = [], 0


def _decompress(items: Store, name: str, stored: bytes, magic: int, most: int) -> bytes | memoryview:
    """What a manifest or a node holds. Raises StorageError where it is neither, or has more bytes than `most`."""
    if len(stored) < _HEAD + _FOOT or int.from_bytes(stored[:4], "big") != magic or stored[12] or stored[13] > 1:
        raise StorageError(f"{items}: {name} isn't OCDBT's, or is damaged")
    body = memoryview(stored)[_HEAD:-_FOOT]
    if stored[13]:
        try:
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
                body = reader.read(most + 1)
        except zstandard.ZstdError as e:
            raise StorageError(f"{items}: {name} is damaged: {e}") from e
    if len(body) > most:
        raise StorageError(f"{items}: {name} has more than {most:,} bytes; that can't be meant")
    return body


def _count(items: Store, name: str, body: bytes | memoryview) -> tuple[int, int, int]:
    """Bytes of a node in memory, its height over the leaves, and how many keys or children it has."""
    lengths = _Lengths(f"{items}: {name}", body)
    height = lengths.byte()
    size = len(body) + lengths.table()
    count = int(lengths.read(1)[0])
    shared, own = lengths.texts(count)
    return size + count * ENTRY_BYTES + int(shared.sum()) + int(own.sum()), height, count


class _Lengths:
    """The numbers of a node or a manifest, one after the other."""

    def __init__(self, name: str, body: bytes | memoryview):
        self._name, self._body, self._at = name, np.frombuffer(body, np.uint8), 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._body)

    def byte(self) -> int:
        self.skip(1)
        return int(self._body[self._at - 1])

    def skip(self, count: int) -> None:
        """Passes bytes.

        Raises:
          StorageError: there aren't so many.
        """
        self._at += count
        if self._at > len(self._body):
            raise self._damaged()

    def read(self, count: int) -> np.ndarray:
        """So many numbers in groups of seven bits, the lowest first; the high bit says that more follow.

        Raises:
          StorageError: there aren't so many, or one is over 2 ** 35.
        """
        found = self._body[self._at : self._at + MOST_GROUPS * count]
        ends = np.flatnonzero(found < 128)[:count]
        starts = np.concatenate([[0], ends + 1])
        widths = np.diff(starts)
        if len(ends) < count or (count and widths.max() > MOST_GROUPS):
            raise self._damaged()
        parts = found[: starts[-1]].astype(np.int64) & 127
        parts <<= 7 * (np.arange(len(parts)) - np.repeat(starts[:-1], widths))
        self.skip(len(parts))
        return np.add.reduceat(parts, starts[:-1]) if count else parts

    def texts(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of sorted texts: what each shares with the one before, and what it has of its own."""
        if count > MAX_ENTRIES:
            raise StorageError(f"{self._name} has more than {MAX_ENTRIES:,} entries; that can't be meant")
        return self.read(max(count - 1, 0)), self.read(count)

    def table(self) -> int:
        """Passes a table of files; returns what their paths take in memory."""
        count = int(self.read(1)[0])
        shared, own = self.texts(count)
        self.read(count)  # how much of each path is the database's
        self.skip(int(own.sum()))
        return int(shared.sum()) + int(own.sum()) + count * ENTRY_BYTES

    def _damaged(self) -> StorageError:
        return StorageError(f"{self._name} ends too early, or is damaged")
