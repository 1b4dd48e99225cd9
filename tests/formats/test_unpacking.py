"""Large chunks as streams: the bytes that stock Orbax wrote, a piece at a time, however small they were made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from lazily import lazily
from strangers import BIG, CRC, DATABASES, LITTLE, item, sharded, zarr2, zarr3
from support import call

from weightbeam.formats.orbax import unpacking
from weightbeam.formats.orbax.copying import read_chunks
from weightbeam.formats.orbax.references import files_of
from weightbeam.formats.orbax.source import ChunkRead, load_checkpoint, open_orbax
from weightbeam.formats.orbax.zarr import ArraySpec
from weightbeam.formats.safetensors import read_boxes
from weightbeam.formats.storage import StorageError, open_store

ocp = lazily("orbax.checkpoint")


def test_no_more_than_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are a thousand times as many as the bytes that they are stored in."""
    values = np.zeros((256, 257), np.float32)
    values[17, 3] = 1.5
    ocp.PyTreeCheckpointer().save(tmp_path / "items", {"params": {"params": {"w": values}}})
    monkeypatch.setattr(unpacking, "PIECE", 1000)
    (array,) = open_orbax(tmp_path / "items").arrays.values()
    assert array.chunk == values.shape
    stream = unpacking.decoded(array, (0, 0))
    pieces = list(iter(lambda: stream.read(unpacking.PIECE), b""))
    assert max(map(len, pieces)) <= 1000
    assert b"".join(pieces) == values.tobytes()


ZSTD2, ZSTD3 = {"id": "zstd", "level": 1}, {"name": "zstd", "configuration": {"level": 1}}
VALUES = np.arange(20 * 30, dtype=np.float32).reshape(20, 30) - 7.5
TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}

# how a chunk is stored, and what of it is said where it can't be decoded in parts
FORMS = {
    "zarr 2": (zarr2(VALUES), ""),
    "zarr 2, zstd": (zarr2(VALUES, compressor=ZSTD2), ""),
    "zarr 2, big-endian": (zarr2(VALUES, dtype=">f4"), ""),
    "zarr 2, big-endian, zstd": (zarr2(VALUES, dtype=">f4", compressor=ZSTD2), ""),
    "zarr 2, keys with slashes": (zarr2(VALUES, dimension_separator="/"), ""),
    "zarr 2, keys with slashes, zstd": (zarr2(VALUES, dimension_separator="/", compressor=ZSTD2), ""),
    "zarr 2, Fortran's order": (zarr2(VALUES, order="F"), "the order F"),
    "zarr 2, Fortran's order, zstd": (zarr2(VALUES, order="F", compressor=ZSTD2), "the order F"),
    "zarr 2, gzip": (zarr2(VALUES, compressor={"id": "gzip", "level": 1}), "stored with gzip"),
    "zarr 2, chunks that are too large": (zarr2(VALUES, chunks=[21, 30]), "larger than the array"),
    "zarr 3": (zarr3(VALUES), ""),
    "zarr 3, big-endian": (zarr3(VALUES, [BIG]), ""),
    "zarr 3, big-endian, zstd": (zarr3(VALUES, [BIG, ZSTD3]), ""),
    "zarr 3, keys as in zarr 2": (zarr3(VALUES, chunk_key_encoding={"name": "v2"}), ""),
    "zarr 3, keys with dots": (
        zarr3(VALUES, chunk_key_encoding={"name": "default", "configuration": {"separator": "."}}),
        "",
    ),
    "zarr 3, transposed": (zarr3(VALUES, [TRANSPOSE, LITTLE]), "stored with transpose"),
    "zarr 3, with a checksum": (zarr3(VALUES, [LITTLE, CRC]), "stored with crc32c"),
    "a shard": (zarr3(VALUES, [sharded((20, 30), [BIG, ZSTD3])]), ""),
    "a shard's index first": (zarr3(VALUES, [sharded((20, 30), index_location="start")]), "shards of a kind"),
    "a shard's index big-endian": (zarr3(VALUES, [sharded((20, 30), index_codecs=[BIG, CRC])]), "shards of a kind"),
    "a shard's index unchecked": (zarr3(VALUES, [sharded((20, 30), index_codecs=[LITTLE])]), "shards of a kind"),
}


@pytest.mark.parametrize("use_ocdbt", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_streamed_or_not_the_same_bits(
    tmp_path: Path, form: str, use_ocdbt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk in parts is what TensorStore makes of it; what can't be decoded so is known before."""
    about, whole = FORMS[form]
    monkeypatch.setattr(unpacking, "PIECE", 1000)
    (array,) = open_orbax(item(tmp_path / "items", {"params.params.w": (VALUES, about)}, use_ocdbt)).arrays.values()
    assert np.array_equal(ChunkRead.fetch([ChunkRead(array, ((0, 20), (0, 30)))])[0][0], VALUES)
    assert whole in unpacking.why_whole(array)
    assert unpacking.can_unpack(array) == (not whole)
    if whole:
        with pytest.raises(StorageError, match=whole):
            unpacking.decoded(array, (0, 0))
        return
    (tmp_path / "files").mkdir()
    assert unpacking.unpack(array, (0, 0), open_store(tmp_path / "files")) == VALUES.nbytes
    unpacked = unpacking.UnpackedArray(array, str(tmp_path / "files"))
    box = ((3, 17), (1, 29))
    assert np.array_equal(unpacked.decode(read_boxes(unpacked.reads(box))[0], box, VALUES.dtype), VALUES[3:17, 1:29])


SOME = np.concatenate([VALUES, np.zeros_like(VALUES)])  # the second of two chunks is all zeros
GRID = {"name": "regular", "configuration": {"chunk_shape": [20, 30]}}
SPARSE = {
    "zarr 2": zarr2(SOME, chunks=[20, 30], compressor=ZSTD2, fill_value=0),
    "zarr 3": zarr3(SOME, [LITTLE, ZSTD3], chunk_grid=GRID),
    "a shard": zarr3(SOME, [sharded((20, 30))], chunk_grid=GRID),
}


@pytest.mark.parametrize("use_ocdbt", [False, True])
@pytest.mark.parametrize("form", SPARSE)
def test_a_chunk_that_is_left_out(tmp_path: Path, form: str, use_ocdbt: bool) -> None:
    """An older Orbax stores no chunk that is all zeros; a newer one stores each, so one that isn't there is damage."""
    items = item(tmp_path / "items", {"params.params.w": (SOME, SPARSE[form])}, use_ocdbt)
    (array,) = open_orbax(items).arrays.values()
    (tmp_path / "files").mkdir()
    files = open_store(tmp_path / "files")
    assert unpacking.can_unpack(array)
    assert [unpacking.unpack(array, (i, 0), files) for i in (0, 1)] == [VALUES.nbytes] * 2
    unpacked, box = unpacking.UnpackedArray(array, str(tmp_path / "files")), ((3, 40), (1, 29))
    assert np.array_equal(unpacked.decode(read_boxes(unpacked.reads(box))[0], box, VALUES.dtype), SOME[3:, 1:29])
    with pytest.raises(StorageError, match="is missing"):
        unpacking.decoded(dataclasses.replace(array, sparse=False), (1, 0))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_shard_that_holds_nothing(is_sparse: bool, tmp_path: Path) -> None:
    """zarr-python writes an index of no chunk where TensorStore writes no shard: zeros, where chunks may be left out."""
    about = SPARSE["a shard"]
    (array,) = open_orbax(item(tmp_path / "items", {"params.params.w": (SOME, about)})).arrays.values()
    array = dataclasses.replace(array, sparse=is_sparse)
    index = b"\xff" * 16
    (tmp_path / "items/params.params.w/c/1").mkdir(exist_ok=True)
    shard = tmp_path / "items/params.params.w/c/1/0"
    assert not shard.exists()
    shard.write_bytes(index + google_crc32c.value(index).to_bytes(4, "little"))
    spec = ArraySpec("w", SOME.shape, SOME.dtype, (20, 30), (20, 30))
    reads = (
        lambda: unpacking.decoded(array, (1, 0)).read(10**6),
        lambda: read_chunks([(array, json.dumps(about), spec, (1, 0))])[0].values.tobytes(),
    )
    for read in reads:
        if is_sparse:
            assert read() == bytes(VALUES.nbytes)
        else:
            with pytest.raises(StorageError, match=r"is missing|damaged"):
                read()


def test_what_is_left_out_is_no_zero(tmp_path: Path) -> None:
    """A stranger's metadata say what a chunk holds that isn't stored: another value isn't made into zeros."""
    about = zarr3(SOME, fill_value=1.5, chunk_grid=GRID)
    (array,) = open_orbax(item(tmp_path / "items", {"params.params.w": (SOME, about)})).arrays.values()
    assert "are filled with 1.5" in unpacking.why_whole(array)


def test_another_checkpoint_in_its_place(tmp_path: Path) -> None:
    """Between the plan and the first byte another array of the same name came there: said in words."""
    (array,) = open_orbax(item(tmp_path / "items", {"params.params.w": (VALUES, FORMS["zarr 2"][0])})).arrays.values()
    (tmp_path / "items" / "params.params.w" / ".zarray").write_text("{}")
    with pytest.raises(StorageError, match=r"items: params\.params\.w: "):
        ChunkRead.fetch([ChunkRead(array, ((0, 20), (0, 30)))])


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_a_worker_gets_the_plan_of_another_checkpoint_in_its_place(tmp_path: Path, use_ocdbt: bool) -> None:
    """A process may carry out plans one after the other, and open none of the checkpoints for them: the first one's
    database stayed open, and no read of the second one's came to an end without an error.
    """
    staged, values = [], [VALUES, -VALUES]
    for number, each in enumerate(values):
        items = item(tmp_path / "items", {"params.params.w": (each, zarr3(each, [LITTLE, ZSTD3]))}, use_ocdbt)
        staged.append(open_orbax(items).to_json())
        (tmp_path / "items").rename(tmp_path / str(number))
    for number, each in enumerate(values):
        (tmp_path / str(number)).rename(tmp_path / "items")
        (array,) = load_checkpoint(staged[number] | {"folders": []}).arrays.values()
        assert unpacking.decoded(array, (0, 0)).read(each.nbytes) == each.tobytes()
        assert np.array_equal(ChunkRead.fetch([ChunkRead(array, ((0, 20), (0, 30)))])[0][0], each)
        (tmp_path / "items").rename(tmp_path / str(number))


def test_metadata_that_are_gone(tmp_path: Path) -> None:
    """Said in words, without the name of an error of ours."""
    items = item(tmp_path / "items", {"params.params.w": (VALUES, FORMS["zarr 2"][0])})
    (array,) = open_orbax(items).arrays.values()
    (items / "params.params.w" / ".zarray").unlink()
    assert unpacking.why_whole(array) == f"its metadata can't be read: {items}: params.params.w/.zarray is missing"


@pytest.mark.parametrize("form", ["zarr 2, big-endian, zstd", "zarr 2, keys with slashes", "zarr 2, Fortran's order"])
def test_small_units_make_the_same_copy(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command: the values of the source, or words before anything is written."""
    about, whole = FORMS[form]
    items = item(tmp_path / "0" / "items", {"params.params.w": (VALUES, about)})
    small = ("--unit_bytes", "1200", "--mesh", "fsdp=2", "--use_zarr3", "true")
    assert call("reshard", items, tmp_path / "out", *small) == (2 if whole else 0)
    assert whole in capsys.readouterr().err
    assert (tmp_path / "out").exists() == (not whole)
    if not whole:
        (array,) = open_orbax(tmp_path / "out").arrays.values()
        assert np.array_equal(ChunkRead.fetch([ChunkRead(array, ((0, 20), (0, 30)))])[0][0], VALUES)


HOLES = np.concatenate([SOME, VALUES, VALUES])  # a shard of two chunks, one of which is all zeros, and a whole one


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_a_copy_stores_what_a_shard_leaves_out(use_ocdbt: bool, tmp_path: Path) -> None:
    """The copy says that every chunk is stored, so that one that isn't would be damage."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [40, 30]}}
    about = zarr3(HOLES, [sharded((20, 30), [LITTLE, ZSTD3])], chunk_grid=grid)
    items = item(tmp_path / "0" / "items", {"params.params.w": (HOLES, about)}, use_ocdbt)
    assert call("reshard", items, tmp_path / "out") == 0
    (array,) = open_orbax(tmp_path / "out").arrays.values()
    assert not array.sparse
    assert np.array_equal(ChunkRead.fetch([ChunkRead(array, ((0, 80), (0, 30)))])[0][0], HOLES)


def test_small_units_copy_what_is_left_out(tmp_path: Path) -> None:
    """A state of training whose moments are zeros, in chunks larger than a unit: the copy stores them."""
    items = item(tmp_path / "0" / "items", {"params.params.w": (SOME, SPARSE["zarr 3"])})
    assert call("reshard", items, tmp_path / "out", "--unit_bytes", "1200", "--mesh", "fsdp=5") == 0
    (array,) = open_orbax(tmp_path / "out").arrays.values()
    assert np.array_equal(ChunkRead.fetch([ChunkRead(array, ((0, 40), (0, 30)))])[0][0], SOME)


@pytest.mark.parametrize("settings", DATABASES)
def test_a_database_with_settings_of_its_own(tmp_path: Path, settings: str) -> None:
    """Those that its manifest tells are taken, whoever wrote it."""
    about = zarr3(VALUES, [LITTLE, ZSTD3])
    items = item(tmp_path / "items", {"params.params.w": (VALUES, about)}, use_ocdbt=True, config=DATABASES[settings])
    (array,) = open_orbax(items).arrays.values()
    assert np.array_equal(ChunkRead.fetch([ChunkRead(array, ((0, 20), (0, 30)))])[0][0], VALUES)
    (tmp_path / "files").mkdir()
    assert unpacking.unpack(array, (0, 0), open_store(tmp_path / "files")) == VALUES.nbytes
    (held,) = files_of(open_store(items), [array.key]).values()
    assert held
    assert all(Path(file).exists() for file in held)
