"""Databases of references: TensorStore reads what was encoded by hand, and what is wrong with a reference is found."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbeam.formats.orbax import ocdbt
from weightbeam.formats.orbax.ocdbt import MANIFEST
from weightbeam.formats.orbax.references import Reference, find_faults, read_references, remove_database, write_database
from weightbeam.formats.storage import open_store

DATA = bytes(range(256)) * 64
FILES = ("model-00001-of-00002.safetensors", "model.safetensors", "a b:%é.safetensors")


def merged(items: Path, references: list[Reference]) -> ts.KvStore:
    """The references in a database below `items`, merged into the one of `items`."""
    folder = open_store(items / "source")
    folder.make()
    for name in FILES:
        folder.write(name, DATA)
    write_database(folder, references)
    ocdbt.merge(
        open_store(items),
        [folder],
        [("step/c", b"0")],
        [("k", [reference.key for reference in references]), ("step", ["step/c"])],
    )
    remove_database(folder)
    assert folder.entries() == sorted(FILES)
    return ts.KvStore.open(ocdbt.database(open_store(items)), context=ocdbt.context()).result()


KEYS = st.text("abc/.019é", min_size=1, max_size=30).map("k/".__add__)
RANGES = st.tuples(st.sampled_from(FILES), st.integers(0, len(DATA) - 1), st.integers(1, 3000)).map(
    lambda r: (r[0], r[1], min(r[2], len(DATA) - r[1]))
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(KEYS, RANGES, min_size=1, max_size=60))
def test_tensorstore_reads_the_bytes_that_are_referred_to(
    tmp_path_factory: pytest.TempPathFactory, ranges: dict[str, tuple[str, int, int]]
) -> None:
    """Any keys, any files, any ranges; listed, read, and told by TensorStore's own dump."""
    items = tmp_path_factory.mktemp("items")
    references = [Reference(key, *where) for key, where in ranges.items()]
    store = merged(items, references)
    assert {key.decode() for key in store.list().result()} == {"step/c", *(reference.key for reference in references)}
    for reference in references:
        assert store.read(reference.key).result().value == DATA[reference.offset : reference.offset + reference.length]
    moved = [dataclasses.replace(reference, path=f"source/{reference.path}") for reference in references]
    assert sorted(read_references(open_store(items)), key=lambda r: r.key) == sorted(moved, key=lambda r: r.key)
    assert not list(find_faults(open_store(items), moved))


def test_a_hundred_thousand_references_and_files_of_many_gigabytes(tmp_path: Path) -> None:
    """Offsets beyond 32 bits, and one node whatever the number of keys."""
    (tmp_path / "big.safetensors").touch()
    os.truncate(tmp_path / "big.safetensors", 1 << 40)  # sparse
    references = [Reference(f"array/c/{i}/0", "big.safetensors", i << 23, 1 << 23) for i in range(100_000)]
    write_database(open_store(tmp_path), references)
    assert (
        len(ts.KvStore.open(ocdbt.database(open_store(tmp_path)), context=ocdbt.context()).result().list().result())
        == 100_000
    )
    assert not list(find_faults(open_store(tmp_path), references))
    assert (tmp_path / "d" / "references").stat().st_size < 2_000_000


def test_faults_are_found(tmp_path: Path) -> None:
    """A file that is too short, one that is gone, another range than expected, a key that isn't there."""
    references = [Reference("k/a", FILES[0], 0, 100), Reference("k/b", FILES[1], 200, 100)]
    merged(tmp_path, references)
    moved = [dataclasses.replace(reference, path=f"source/{reference.path}") for reference in references]
    (other,) = find_faults(open_store(tmp_path), [moved[0], dataclasses.replace(moved[1], offset=201)])
    assert other.startswith("k/b should be")
    (missing,) = find_faults(open_store(tmp_path), [*moved, Reference("c", "x", 0, 1)])
    assert missing.endswith("but is None")
    (tmp_path / "source" / FILES[1]).write_bytes(DATA[:299])
    assert list(find_faults(open_store(tmp_path), moved)) == [
        f"k/b is source/{FILES[1]}, bytes 200 to 300, but the file has 299 bytes"
    ]
    (tmp_path / "source" / FILES[0]).unlink()
    assert f"k/a is source/{FILES[0]}, bytes 0 to 100, but the file isn't there" in list(
        find_faults(open_store(tmp_path), moved)
    )


def test_the_hand_made_node_carries_a_checksum(tmp_path: Path) -> None:
    """A flipped bit is an error, not another offset."""
    (tmp_path / FILES[0]).write_bytes(DATA)
    write_database(open_store(tmp_path), [Reference(f"k{i}", FILES[0], i, 8) for i in range(20)])
    node = tmp_path / "d" / "references"
    data = bytearray(node.read_bytes())
    data[40] ^= 1
    node.write_bytes(data)
    with pytest.raises(ValueError, match="CRC"):
        ts.KvStore.open(ocdbt.database(open_store(tmp_path)), context=ocdbt.context()).result().list().result()
    assert (tmp_path / MANIFEST).exists()
