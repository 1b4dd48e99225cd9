"""An OCDBT database whose values are ranges of files that OCDBT didn't write, and reading such references back.

TensorStore has no way to write a reference to a file of someone else's. The format has: a leaf entry is a value, or the
(file, offset, length) where it lies. So one leaf node is encoded here, by the format's description (google/tensorstore,
tensorstore/kvstore/ocdbt/index.rst, version 0, the only one so far). It is read by TensorStore and copied into the
checkpoint's own database, and then deleted: what stays was written by TensorStore.

Files are named relative to the database, and have to lie below it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
import tensorstore as ts

from weightbeam.formats.orbax import ocdbt
from weightbeam.formats.orbax.database_size import NODE_MAGIC
from weightbeam.formats.storage import Store

NODES, NODE = "d", "d/references"


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A key, and the range of a file that is its value; the file is named relative to the database."""

    key: str
    path: str
    offset: int
    length: int


def write_database(folder: Store, references: Iterable[Reference]) -> None:
    """Writes a database that holds the references, durably; another one that is there is replaced."""
    node = encode_leaf(sorted(references, key=lambda reference: reference.key.encode()))
    folder.write(NODE, node.data)
    statistics = {"num_indirect_value_bytes": node.referenced, "num_keys": node.keys, "num_tree_bytes": len(node.data)}
    version = {
        "commit_time": time.time_ns(),
        "generation_number": 1,
        "root_height": 0,
        "root": {"location": f"btreenode::{NODE}:0:{len(node.data)}", "statistics": statistics},
    }
    config = ocdbt.CONFIG | {"uuid": uuid.uuid4().hex, "compression": {"id": "zstd"}, "version_tree_arity_log2": 4}
    del config["manifest_kind"]
    manifest = {"config": config, "version_tree_nodes": [], "versions": [version]}
    folder.write(ocdbt.MANIFEST, ts.ocdbt.undump_manifest(manifest))


def remove_database(folder: Store) -> None:
    """Removes what `write_database` wrote; the files that it refers to stay."""
    for name in (ocdbt.MANIFEST, f"{ocdbt.MANIFEST}.__lock"):
        folder.delete(name)
    folder.delete_folder(NODES)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An encoded leaf node: its bytes, how many keys it has, and to how many bytes it refers."""

    data: bytes
    keys: int
    referenced: int


def encode_leaf(references: Sequence[Reference]) -> Leaf:
    """A leaf node that is the whole tree. The references come in order of their keys."""
    paths = sorted({reference.path.encode() for reference in references})
    number = {path.decode(): i for i, path in enumerate(paths)}
    shared, lengths, tails = _front_code([reference.key.encode() for reference in references])
    path_shared, path_lengths, path_tails = _front_code(paths)
    body = b"".join(
        [
            b"\0",  # height
            _varints([len(paths)]),
            _varints(path_shared[1:]),
            _varints(path_lengths),
            bytes(len(paths)),  # each file's base path is the database's own
            b"".join(path_tails),
            _varints([len(references)]),
            _varints(shared[1:]),
            _varints(lengths),
            b"".join(tails),
            _varints([reference.length for reference in references]),
            b"\1" * len(references),  # none of the values stands here, all are elsewhere
            _varints([number[reference.path] for reference in references]),
            _varints([reference.offset for reference in references]),
        ]
    )
    # format version 0, not compressed
    head = NODE_MAGIC.to_bytes(4, "big") + (len(body) + 18).to_bytes(8, "little") + b"\0\0"
    return Leaf(_with_checksum(head + body), len(references), sum(reference.length for reference in references))


def _varints(numbers: Iterable[int]) -> bytes:
    """Numbers in groups of seven bits, the lowest first; the high bit says that more follow."""
    encoded = bytearray()
    for number in numbers:
        while number > 127:
            encoded.append(number & 127 | 128)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


def _front_code(texts: Sequence[bytes]) -> tuple[list[int], list[int], list[bytes]]:
    """For each text how many bytes it shares with the one before, how many are left, and these."""
    shared = [0] * min(1, len(texts))
    shared += [len(os.path.commonprefix((a, b))) for a, b in itertools.pairwise(texts)]  # noqa: RUF071
    tails = [text[n:] for text, n in zip(texts, shared, strict=True)]
    return shared, [len(tail) for tail in tails], tails


def _with_checksum(data: bytes) -> bytes:
    """The data and its crc32c, which zarr's codec of that name appends in the same form."""
    codecs = [{"name": "bytes"}, {"name": "crc32c"}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [len(data)]}}
    metadata = {"shape": [len(data)], "data_type": "uint8", "codecs": codecs, "chunk_grid": grid}
    store = ts.open({"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}, create=True).result()
    store.write(np.frombuffer(data, np.uint8)).result()
    kvstore: Any = store.kvstore
    return kvstore.read("c/0").result().value


def read_references(folder: Store) -> Iterator[Reference]:
    """Every value of a database that lies in a file, as TensorStore tells it; small ones, in ours those of at most 1 KiB,
    stand in the database itself.
    """
    store, shared = ts.KvStore.open(folder.kvstore()).result(), ts.Context({})
    latest = ts.ocdbt.dump(store, context=shared).result()["versions"][-1]["root"]
    nodes = [(b"", latest["location"])] if "location" in latest else []
    while nodes:
        prefix, location = nodes.pop()
        for entry in ts.ocdbt.dump(store, location, context=shared).result()["entries"]:
            key = prefix + entry["key"]
            if "subtree_common_prefix" in entry:
                nodes.append((prefix + entry["subtree_common_prefix"], entry["location"]))
            elif "indirect_value" in entry:
                _, base, path, offset, length = entry["indirect_value"].split(":")
                yield Reference(key.decode(), unquote(base) + unquote(path), int(offset), int(length))


def files_of(items: Store, keys: Sequence[str]) -> dict[str, list[str]]:
    """The files that hold arrays of an item: those that its database refers to, or the folder of each."""
    if not items.exists(ocdbt.MANIFEST):
        return {key: [items.path(key)] for key in keys}
    found: dict[str, set[str]] = {key: set() for key in keys}
    for reference in read_references(items):
        if (key := reference.key.partition("/")[0]) in found:
            found[key].add(items.path(reference.path))
    return {key: sorted(files) or [items.path(ocdbt.MANIFEST)] for key, files in found.items()}


def find_faults(folder: Store, expected: Iterable[Reference]) -> Iterator[str]:
    """What is wrong with the references of a database: those that aren't as expected, and those that reach beyond their
    file.

    Every reference of the database counts, also those that nobody expects: they must lie within their files too.
    """
    held = {reference.key: reference for reference in read_references(folder)}
    sizes: dict[str, int] = {}
    for reference in held.values():
        if reference.path not in sizes:
            file = folder.stat(reference.path)
            sizes[reference.path] = file.size if file else -1
        if reference.offset + reference.length > sizes[reference.path]:
            found = f"has {sizes[reference.path]:,} bytes" if sizes[reference.path] >= 0 else "isn't there"
            yield f"{reference.key} is {reference.path}, bytes {reference.offset:,} to {reference.offset + reference.length:,}, but the file {found}"
    for reference in expected:
        if held.get(reference.key) != reference:
            yield f"{reference.key} should be {reference}, but is {held.get(reference.key)}"
