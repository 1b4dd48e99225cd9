"""A database is counted before TensorStore decodes it, whoever wrote it: as large as it is, and no larger."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorstore as ts
from strangers import DATABASES, database_of, node_of

from weightbeam.formats.orbax import database_size
from weightbeam.formats.orbax.database_size import ENTRY_BYTES, check_database_size
from weightbeam.formats.storage import LocalFolder, StorageError

LEAF = node_of(3, 1000)


def opened(items: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{items}/"}).result()


def at_most(items: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a database takes no more than so many bytes."""
    monkeypatch.setattr(database_size, "MAX_DECODED", most)
    try:
        check_database_size(LocalFolder(str(items)))
    except StorageError:
        return False
    return True


@pytest.mark.parametrize("settings", DATABASES)
def test_a_database_of_tensorstores(settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key counts once, with its letters but for what all of a node begin with, whatever the settings."""
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": DATABASES[settings]}
    with ts.Transaction() as transaction:
        store = ts.KvStore.open(spec).result().with_transaction(transaction)
        for number in range(500):
            store.write(f"params.layers_{number:03}.kernel/c/0/{number}", bytes(200)).result()
    assert len(opened(tmp_path).list().result()) == 500
    assert at_most(tmp_path, 500 * (ENTRY_BYTES + 400), monkeypatch)
    assert not at_most(tmp_path, 500 * (ENTRY_BYTES + 20), monkeypatch)


def test_a_node_counts_for_each_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three keys, which a node names three times, and another one that node."""
    database_of(tmp_path, LEAF)
    assert len(opened(tmp_path).list().result()) == 3
    assert at_most(tmp_path, 3500, monkeypatch)
    assert not at_most(tmp_path, 3000, monkeypatch)
    size = (tmp_path / "d" / "nodes").stat().st_size
    middle = node_of(3, 1000, height=1, below=(0, size))
    database_of(tmp_path, LEAF, middle, height=1)
    assert len(opened(tmp_path).list().result()) == 9
    places = [(0, size), (size, (tmp_path / "d" / "nodes").stat().st_size - size)]
    database_of(tmp_path, LEAF, middle, node_of(3, 1000, height=2, below=places[1]), height=2)
    assert len(opened(tmp_path).list().result()) == 27
    assert at_most(tmp_path, 90_000, monkeypatch)
    assert not at_most(tmp_path, 80_000, monkeypatch)


@pytest.mark.parametrize("part", ["magic", "cut", "numbers"])
def test_what_is_damaged_is_said(part: str, tmp_path: Path) -> None:
    database_of(tmp_path, LEAF if part != "numbers" else LEAF[:14])
    file = tmp_path / "d" / "nodes"
    if part == "magic":
        file.write_bytes(b"\0" + file.read_bytes()[1:])
    elif part == "cut":
        file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(StorageError, match=r"damaged|can't be read"):
        check_database_size(LocalFolder(str(tmp_path)))
