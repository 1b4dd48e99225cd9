"""Large compressed chunks, unpacked once: a chunk that holds all layers is decoded as a stream into files that any part
can be read of.

MaxText's training writes chunks of 1 to 2 GiB, a device's whole shard, and a part of a compressed chunk can't be read
alone. So each is read once, in pieces of its bytes, decoded as it comes, and written to a few files in C order; no more
than a piece of it is ever in memory. A unit then reads the rows of one layer from there.

    chunk (128, 80, 28672) of a kernel (8192, 80, 28672) ─▸ files of 3 rows each: (3, 80, 28672), 28 MiB

(zarr3 `sharding_indexed` with the inner chunk equal to the outer one, and zarr2 with zstd, as Orbax 0.12.8 writes
them; in either byte order. What is stored otherwise is read whole, or refused where a plan has no room for that.)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import google_crc32c
import numpy as np
import tensorstore as ts
import xxhash
import zstandard

from weightbeam.formats.encodings.encoding import InOrder
from weightbeam.formats.orbax import ocdbt, zarr
from weightbeam.formats.orbax.source import OrbaxArray, opened_store
from weightbeam.formats.orbax.zarr import INDEX
from weightbeam.formats.record.provenance import begin
from weightbeam.formats.record.provenance import pieces as pieces_of
from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.formats.staging import UNPACKED
from weightbeam.formats.storage import ChangedError, StorageError, Store
from weightbeam.formats.storage.identity import same_folders
from weightbeam.formats.storage.strict_json import parse_json
from weightbeam.model_mappings.boxes import Box, extent, inside, intersection, slices, volume

PIECE = 32 << 20  # bytes of a file; one is decoded while one is written
READ = 8 << 20  # encoded bytes that are read at a time
INDEX_BYTES = zarr.INDEX_ENTRY_BYTES + zarr.INDEX_CHECKSUM_BYTES  # of a shard with one chunk
ZEROS = ("None", "False", "0", "0.0", "[0, 0]", "[0.0, 0.0]")  # as metadata say what a chunk is that isn't stored


@dataclasses.dataclass(frozen=True, slots=True)
class UnpackedArray(InOrder):
    """An array whose chunks lie unpacked in files.

    Attributes:
      array: as it is stored.
      place: URL of the folder with the files.
      prefix: of the files' names.
    """

    array: OrbaxArray
    place: str
    prefix: str = ""
    label = "unpacked"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        """A read for each file that holds a part of the box."""
        return tuple(read for read, _ in self._parts(box))

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        """The box, put together of its parts; in the stored dtype."""
        values = empty(extent(box), self.dtype)
        for part, (_, target) in zip(stored, self._parts(box), strict=True):
            values[slices(inside(target, box))] = part
        return values

    def _parts(self, box: Box) -> Iterator[tuple[BoxRead, Box]]:
        """What lies in each file, and which box of the array that is."""
        numbers = [
            range(start // step, -(-stop // step)) for (start, stop), step in zip(box, self.array.chunk, strict=True)
        ]
        for index in itertools.product(*numbers):
            for number, piece in enumerate(pieces(self.array, index)):
                met = intersection(piece, box)
                if all(low < high for low, high in met):
                    tensor = Tensor(
                        self.array.key,
                        self.dtype,
                        extent(piece),
                        f"{self.place}/{file_name(self.array, index, number, self.prefix)}",
                        0,
                    )
                    yield BoxRead(tensor, inside(met, piece)), met


def chunks(array: OrbaxArray) -> list[tuple[int, ...]]:
    """The indices of an array's chunks."""
    return list(
        itertools.product(*(range(-(-size // step)) for size, step in zip(array.shape, array.chunk, strict=True)))
    )


def pieces(array: OrbaxArray, index: Sequence[int]) -> list[Box]:
    """The boxes of a chunk that a file each holds, in C order of the chunk; a chunk at the array's end has what lies
    beyond it, too. The array has an axis at least.

    The first axes have one index each, the next a range, the others all there is.
    """
    start = [i * step for i, step in zip(index, array.chunk, strict=True)]
    inner = [math.prod(array.chunk[axis + 1 :]) * array.dtype.itemsize for axis in range(len(array.chunk))]
    cut = next(axis for axis, nbytes in enumerate(inner) if nbytes <= PIECE)
    rows = PIECE // inner[cut]
    leading = [
        [(at + i, at + i + 1) for i in range(step)] for at, step in zip(start[:cut], array.chunk[:cut], strict=True)
    ]
    ranges = [
        (start[cut] + low, start[cut] + min(low + rows, array.chunk[cut])) for low in range(0, array.chunk[cut], rows)
    ]
    rest = [(at, at + step) for at, step in zip(start[cut + 1 :], array.chunk[cut + 1 :], strict=True)]
    return [(*first, span, *rest) for first in itertools.product(*leading) for span in ranges]


def file_name(array: OrbaxArray, index: Sequence[int], piece: int | str, prefix: str) -> str:
    """The file of a piece of a chunk, by its number; `prefix` tells arrays of one name apart."""
    return f"{UNPACKED}/{prefix}{array.key}/{'.'.join(map(str, index)) or '0'}.{piece}"


def share_name(array: OrbaxArray, index: Sequence[int], prefix: str = "") -> str:
    """The file of a chunk's share in the array's digest."""
    return file_name(array, index, "digest", prefix)


def unpack(array: OrbaxArray, index: Sequence[int], folder: Store, prefix: str = "", summed: bool = False) -> int:
    """Unpacks a chunk into files below `folder`; those that are there already are kept. `prefix` as of `file_name`;
    with `summed` there is a file of the chunk's share in the array's digest, too.

    Returns:
      Bytes that were decoded.

    Raises:
      StorageError: the chunk is missing or damaged, or another checkpoint lies there than was planned with.
    """
    boxes = pieces(array, index)
    wanted = [volume(box) * array.dtype.itemsize for box in boxes]
    names = [file_name(array, index, number, prefix) for number in range(len(boxes))]
    if all(
        (file := folder.stat(name)) is not None and file.size == nbytes
        for name, nbytes in zip(names, wanted, strict=True)
    ) and (not summed or folder.exists(share_name(array, index, prefix))):
        return 0
    chunk = [(i * n, (i + 1) * n) for i, n in zip(index, array.chunk, strict=True)]
    hashed = begin(array.key, array.dtype, _cropped(chunk, array.shape))
    with (
        _removed_if_changed(folder, names),
        same_folders(array.folders),
        concurrent.futures.ThreadPoolExecutor(1) as writer,  # a piece is written while the next one is decoded
    ):
        stream, written = decoded(array, index), None
        for name, nbytes, box in zip(names, wanted, boxes, strict=True):
            piece = stream.read(nbytes)
            if len(piece) != nbytes:
                raise _another_size(array, index)
            if summed:
                _hash(hashed, array, box, piece)
            if written:
                written.result()
            written = writer.submit(folder.write, name, piece)
        if stream.read(1):
            raise _another_size(array, index)
        if written:
            written.result()
    if summed:
        folder.write(share_name(array, index, prefix), hashed.hexdigest().encode())
    return sum(wanted)


@contextlib.contextmanager
def _removed_if_changed(folder: Store, names: Sequence[str]) -> Iterator[None]:
    """Context manager: files go that may be another checkpoint's; else the next attempt would take them."""
    try:
        yield
    except ChangedError:
        for name in names:
            folder.delete(name)
        raise


def _hash(hashed: xxhash.xxh3_128, array: OrbaxArray, box: Box, piece: bytes) -> None:
    """Adds a piece of a chunk to a shard's hash, without what lies beyond the array's end."""
    inside = tuple(slice(0, stop - start) for start, stop in _cropped(box, array.shape))
    for part in pieces_of(np.frombuffer(piece, array.dtype).reshape(extent(box))[inside]):
        hashed.update(part.view(np.uint8).data)


def _cropped(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> Box:
    """What of a box lies within an array; empty where all of it lies beyond."""
    return tuple((start, max(start, min(stop, size))) for (start, stop), size in zip(box, shape, strict=True))


def _another_size(array: OrbaxArray, index: Sequence[int]) -> StorageError:
    return StorageError(f"{array.items}: {array.key}: chunk {tuple(index)} has another size than its metadata say")


class Stream(Protocol):
    """Bytes in order."""

    def read(self, size: int) -> bytes:
        """The next bytes, as many as `size` but for the end."""
        ...


def decoded(array: OrbaxArray, index: Sequence[int]) -> Stream:
    """The bytes of a chunk in C order; no more of them are in memory than are asked for at a time.

    Raises:
      StorageError: the chunk is missing or damaged; its bytes' damage is told as they are read.
    """
    base = opened_store(array)
    form = _form(array, _about(base, array))
    key = f"{array.key}/{form.separator.join([*form.prefix, *map(str, index)]) or '0'}"
    try:
        encoded = _Value(base, array, key, *_range(base, array, key, form))
    except _MissingError:
        if not array.sparse:
            raise
        return _Zeros(math.prod(array.chunk) * array.dtype.itemsize)
    stream = _Decoder(encoded, f"{array.items}: {key}") if form.codecs else encoded
    return _Swapped(stream, array.dtype) if form.is_swapped else stream


def _range(base: ts.KvStore, array: OrbaxArray, key: str, form: _Form) -> tuple[int, int]:
    """Where in its value an encoded chunk lies: its first byte, and the one behind its last.

    Raises:
      StorageError: the chunk isn't there (_MissingError), or the index of its shard is damaged.
    """
    if not form.is_sharded:
        return 0, _size(base, array, key)
    entry = _read(base, array, key, -INDEX_BYTES, None)
    if google_crc32c.value(entry[:-4]) != int.from_bytes(entry[-4:], "little"):
        raise StorageError(f"{array.items}: {key}: the index of the shard is damaged")
    if entry[:-4] == zarr.NO_ENTRY:
        raise _MissingError(f"{array.items}: {key} is missing")
    start, length = int.from_bytes(entry[:8], "little"), int.from_bytes(entry[8:16], "little")
    return start, start + length


class _Value:
    """A range of a value, as a file to read from; the next bytes are on their way while the last ones are used."""

    def __init__(self, base: ts.KvStore, array: OrbaxArray, key: str, start: int, stop: int):
        self._base, self._array, self._key, self._at, self._stop = base, array, key, start, stop
        self._ahead: tuple[slice, Any] | None = None  # a range, and the read of it

    def read(self, size: int) -> bytes:
        wanted = slice(self._at, min(self._at + size, self._stop))
        if wanted.start == wanted.stop:
            return b""
        under_way = (
            self._ahead[1]
            if self._ahead and self._ahead[0] == wanted
            else self._base.read(self._key, byte_range=wanted)
        )
        self._at = wanted.stop
        rest = slice(self._at, min(self._at + size, self._stop))
        self._ahead = (rest, self._base.read(self._key, byte_range=rest)) if rest.start < rest.stop else None
        return _value(under_way, self._array, self._key)


class _Decoder:
    """What a zstd stream becomes. A reader, since an object that is fed returns all that its input becomes: zeros are a
    thousand times as many.
    """

    def __init__(self, encoded: Stream, name: str):
        self._name = name
        source: Any = encoded
        self._reader = zstandard.ZstdDecompressor().stream_reader(source, read_size=READ, read_across_frames=True)

    def read(self, size: int) -> bytes:
        try:
            return self._reader.read(size)
        except zstandard.ZstdError as e:
            raise StorageError(f"{self._name}: damaged: {e}") from e


class _Zeros:
    """A chunk that isn't stored, since it is all zeros."""

    def __init__(self, nbytes: int):
        self._left = nbytes

    def read(self, size: int) -> bytes:
        size = min(size, self._left)
        self._left -= size
        return bytes(size)


class _Swapped:
    """Numbers of the other byte order, as this machine's; so many bytes are read as whole numbers have."""

    def __init__(self, stream: Stream, dtype: np.dtype):
        self._stream = stream
        self._part = np.dtype(f"u{dtype.itemsize // (2 if dtype.kind == 'c' else 1)}")

    def read(self, size: int) -> bytes:
        got = self._stream.read(max(self._part.itemsize, size // self._part.itemsize * self._part.itemsize))
        if len(got) % self._part.itemsize:  # ends too early, as whoever counts them notices
            return got
        return np.frombuffer(got, self._part).byteswap().tobytes()


@dataclasses.dataclass(frozen=True)
class _Form:
    """How the chunks of an array are stored.

    Attributes:
      codecs: names of those behind the bytes.
      is_sharded: whether each is the only one of a shard.
      is_swapped: whether numbers are in the other byte order.
      separator, prefix: of the chunks' keys.
    """

    codecs: list[str]
    is_sharded: bool
    is_swapped: bool
    separator: str
    prefix: tuple[str, ...]


def why_whole(array: OrbaxArray) -> str:
    """Why the chunks of an array can't be decoded as streams, by what its metadata say; empty where they can."""
    try:
        _form(array, _about(opened_store(array), array))
    except _WholeError as e:
        return str(e)
    except StorageError as e:
        return f"its metadata can't be read: {e}"
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        return f"its metadata can't be read: {type(e).__name__}: {e}"
    return ""


def can_unpack(array: OrbaxArray) -> bool:
    """Whether the chunks of an array can be decoded as streams."""
    return not why_whole(array)


class _WholeError(StorageError):
    """A chunk has to be decoded whole; the message says why."""


class _MissingError(StorageError):
    """A chunk isn't stored."""


def _about(base: ts.KvStore, array: OrbaxArray) -> dict[str, Any]:
    """What zarr says of an array."""
    return parse_json(_read(base, array, f"{array.key}/{zarr.DESCRIPTIONS[array.driver]}", 0, None))


def _form(array: OrbaxArray, about: dict[str, Any]) -> _Form:
    """How the chunks of an array are stored, where they can be decoded in parts. Raises _WholeError where they can't."""
    form, chunk = _form3(about, array.dtype) if array.driver == "zarr3" else _form2(about, array.dtype)
    if form.codecs not in ([], ["zstd"]):
        raise _WholeError(f"they are stored with {', '.join(form.codecs)}")
    if chunk != array.chunk:
        raise _WholeError(f"they are {chunk}, larger than the array")
    if array.sparse and str(about.get("fill_value")) not in ZEROS:
        raise _WholeError(f"those that aren't stored are filled with {reprlib.repr(about['fill_value'])}")
    return form


def _form2(about: dict[str, Any], dtype: np.dtype) -> tuple[_Form, tuple[int, ...]]:
    """How the chunks of a zarr 2 array are stored, and the shape of one."""
    if about.get("filters"):
        raise _WholeError("they are stored with filters")
    chunk = tuple(about["chunks"])
    if about["order"] != "C" and sum(size > 1 for size in chunk) > 1:
        raise _WholeError(f"they are stored in the order {about['order']}")
    codecs = [about["compressor"]["id"]] if about.get("compressor") else []
    is_swapped = str(about["dtype"]).startswith(">") and dtype.itemsize > 1
    return _Form(codecs, False, is_swapped, about.get("dimension_separator", "."), ()), chunk


def _form3(about: dict[str, Any], dtype: np.dtype) -> tuple[_Form, tuple[int, ...]]:
    """How the chunks of a zarr 3 array are stored, and the shape of one."""
    codecs, chunk = about["codecs"], tuple(about["chunk_grid"]["configuration"]["chunk_shape"])
    is_sharded = codecs[0]["name"] == "sharding_indexed"
    if is_sharded:
        inner = codecs[0]["configuration"]
        if tuple(inner["chunk_shape"]) != chunk or (inner.get("index_location", "end"), inner["index_codecs"]) != INDEX:
            raise _WholeError("they are shards of a kind that isn't read in parts")
        codecs = inner["codecs"]
    endian = codecs[0].get("configuration", {}).get("endian")
    if codecs[0]["name"] != "bytes" or (endian not in ("little", "big") and dtype.itemsize > 1):
        raise _WholeError(f"they are stored with {codecs[0]['name']}")
    keys = about["chunk_key_encoding"]
    is_default = keys["name"] == "default"
    separator = keys.get("configuration", {}).get("separator", "/" if is_default else ".")
    names = [codec["name"] for codec in codecs[1:]]
    is_swapped = endian == "big" and dtype.itemsize > 1
    return _Form(names, is_sharded, is_swapped, separator, ("c",) if is_default else ()), chunk


def _size(base: ts.KvStore, array: OrbaxArray, key: str) -> int:
    """Bytes of a value: a key-value store doesn't say, so they are found by doubling and halving; thirty reads of a
    byte.
    """
    low, high = 0, READ
    while len(_read(base, array, key, high - 1, high, may_end=True)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if len(_read(base, array, key, middle - 1, middle, may_end=True)):
            low = middle
        else:
            high = middle
    return low


def _read(base: ts.KvStore, array: OrbaxArray, key: str, start: int, stop: int | None, may_end: bool = False) -> bytes:
    under_way = base.read(key, byte_range=slice(start, stop)) if start or stop is not None else base.read(key)
    return _value(under_way, array, key, may_end)


def _value(under_way: Any, array: OrbaxArray, key: str, may_end: bool = False) -> bytes:
    """What a read brought, once it is over."""
    try:
        got = under_way.result()
    except ValueError as e:
        if may_end and "OUT_OF_RANGE" in str(e):
            return b""
        raise StorageError(f"{array.items}: {key}: {ocdbt.brief(e)}") from e
    if got.state != "value":
        raise _MissingError(f"{array.items}: {key} is missing")
    return got.value
