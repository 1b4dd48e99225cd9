"""Reading safetensors files: every rule of a header has its broken file, valid files read as the safetensors library
reads them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import elsewhere
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from support import INDEX, LLAMA, make_release, random_tensors, read_file, save, split

from weightbeam.formats.safetensors import MAX_HEADER, BoxRead, HeaderError, open_hf, read_boxes, read_header
from weightbeam.formats.storage import StorageError

PLAIN = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def entry(**changes: Any) -> dict[str, Any]:
    """One tensor of 24 bytes, with something wrong."""
    return {"x": PLAIN | changes}


def write_header(
    folder: Path, header: str | bytes | Mapping[str, Any], data: int = 24, length: int | None = None
) -> Path:
    """A file with this header and `data` bytes behind it; `length` lies about the header's."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    path = folder / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data))
    return path


GOOD = json.dumps({"x": PLAIN})
TWO = {"x": PLAIN, "y": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]}}

# rule -> (header, bytes of data, what the message must say)
BROKEN: dict[str, tuple[Any, int, str]] = {
    "starts with {": (f" {GOOD}", 24, "start"),
    "is an object": ("[]", 0, "start"),
    "is UTF-8": (GOOD.encode().replace(b"x", b"\xff"), 24, "UTF-8"),
    "is JSON": ('{"x":', 24, "JSON"),
    "has nothing behind its end": (GOOD + "{}", 24, "JSON"),
    "is not nested without end": ('{"x":' + "[" * 100_000, 24, "JSON"),
    "names a tensor once": (GOOD[:-1] + "," + GOOD[1:], 24, "twice"),
    "names a field once": ('{"x":{"dtype":"F32","shape":[2,3],"shape":[2,3],"data_offsets":[0,24]}}', 24, "twice"),
    "has metadata that is an object": ({"__metadata__": ["a"], "x": PLAIN}, 24, "__metadata__"),
    "has metadata of strings": ({"__metadata__": {"a": 1}, "x": PLAIN}, 24, "__metadata__"),
    "has entries that are objects": ({"x": [1]}, 24, "x: "),
    "has a dtype": ({"x": {"shape": [2, 3], "data_offsets": [0, 24]}}, 24, "dtype"),
    "has a shape": ({"x": {"dtype": "F32", "data_offsets": [0, 24]}}, 24, "shape"),
    "has offsets": ({"x": {"dtype": "F32", "shape": [2, 3]}}, 24, "data_offsets"),
    "has a known dtype": (entry(dtype="F33"), 24, "F33"),
    "has a dtype that is a string": (entry(dtype=["F32"]), 24, "dtype"),
    "has a shape that is a list": (entry(shape=6), 24, "shape"),
    "has sizes that aren't booleans": (entry(shape=[True, 6]), 24, "shape"),
    "has sizes that aren't floats": (entry(shape=[2.0, 3]), 24, "shape"),
    "has sizes that aren't negative": (entry(shape=[-2, -3]), 24, "shape"),
    "has sizes that aren't strings": (entry(shape=["2", 3]), 24, "shape"),
    "has sizes that aren't NaN": ('{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,24]}}', 24, "NaN"),
    "has offsets that are two": (entry(data_offsets=[0, 12, 24]), 24, "data_offsets"),
    "has offsets that aren't booleans": (entry(data_offsets=[False, 24]), 24, "data_offsets"),
    "has offsets that aren't floats": (entry(data_offsets=[0.0, 24.0]), 24, "data_offsets"),
    "has offsets that aren't negative": (entry(data_offsets=[-24, 0]), 24, "data_offsets"),
    "has offsets in order": (entry(data_offsets=[24, 0]), 24, "24 bytes"),
    "has as many bytes as its shape": (entry(shape=[2, 4]), 24, "32 bytes"),
    "has a product of sizes without overflow": (entry(shape=[2**32, 2**32, 4]), 24, "overflow"),
    "has a product of sizes without overflow, a zero behind it": (
        entry(shape=[2**62, 2**62, 0], data_offsets=[0, 0]),
        0,
        "x: ",
    ),
    "has sizes that fit 64 bits": (entry(shape=[2**64, 0], data_offsets=[0, 0]), 0, "shape"),
    "has sizes of a sane number of digits": (
        '{"x":{"dtype":"F32","shape":[' + "9" * 5000 + '],"data_offsets":[0,24]}}',
        24,
        "header",
    ),
    "has a sane rank": (entry(shape=[1] * 2000 + [6]), 24, "shape"),
    "has no hole in front": (entry(data_offsets=[4, 28]), 28, "hole"),
    "has no hole in between": (TWO | {"y": {"dtype": "U8", "shape": [4], "data_offsets": [25, 29]}}, 29, "hole"),
    "has no overlap": (TWO | {"y": {"dtype": "U8", "shape": [4], "data_offsets": [20, 24]}}, 24, "overlap"),
    "ends with the file": (TWO, 29, "file at"),
    "doesn't end behind the file": (TWO, 27, "truncated"),
    "has names that aren't empty": ({"": PLAIN}, 24, "name"),
    "has names without line breaks": ({"a\nb": PLAIN}, 24, "name"),
    "has names without escape sequences": ({"a\x1b[31m": PLAIN}, 24, "name"),
    "has names without 8-bit control characters": ({"a\x9b31m": PLAIN}, 24, "name"),
    "has names without lone surrogates": ('{"a\\ud800":' + json.dumps(PLAIN) + "}", 24, "name"),
    "has names that don't climb": ({"../../etc/x": PLAIN}, 24, "name"),
    "has names that aren't absolute": ({"/etc/x": PLAIN}, 24, "name"),
}
# What the library lets pass, and we don't: duplicates (serde keeps one), and names that would do harm outside.
STRICTER = {
    "starts with {", "names a tensor once", "has names that aren't empty", "has names without line breaks", "has names without escape sequences",
    "has names without 8-bit control characters", "has names that don't climb", "has names that aren't absolute", "has a sane rank",
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_every_rule_of_a_header(tmp_path: Path, rule: str) -> None:
    """A file that breaks the rule is refused with a message that says so; the safetensors library refuses it too, where
    it checks.
    """
    header, data, message = BROKEN[rule]
    path = write_header(tmp_path, header, data)
    with pytest.raises(HeaderError, match=re.escape(message)):
        read_header(str(path))
    if rule not in STRICTER:
        with pytest.raises(SafetensorError), safe_open(path, "np"):
            pass


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_header_with_random_damage(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes of a good file changed, put in or taken out: it is refused as a header error and in no other way, or else
    the library reads the same tensors.
    """
    raw = bytearray(json.dumps({"__metadata__": {"format": "pt"}, **TWO}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.one_of(st.binary(max_size=2), st.sampled_from([b"0", b"-", b"9" * 20, b'"', b"e9", b"true"]))
        )
    path = write_header(tmp_path_factory.mktemp("damaged"), bytes(raw), 28)
    try:
        read = read_header(str(path))
    except HeaderError:
        return
    with safe_open(path, "np") as opened:
        assert {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()} == {  # noqa: SIM118, safetensors has no other way
            tensor.name: tensor.shape for tensor in read
        }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"\x02\0\0\0", "4 bytes"),
        (struct.pack("<Q", 3) + b"{}", "truncated"),
        (struct.pack("<Q", MAX_HEADER + 1) + b"{}", "100,000,001"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "header of"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n",
            "git lfs pull",
        ),
    ],
    ids=["empty", "four bytes", "cut off", "a header above the limit", "a header of 2^64 bytes", "git-lfs pointer"],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    """Lengths that can't be, and the file that git leaves in place of a large one."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(HeaderError, match=message):
        read_header(str(path))


def test_a_huge_header_is_refused_by_its_length_alone(tmp_path: Path) -> None:
    """A sparse file that claims a header of 2^40 bytes, and has them, is refused by its length alone."""
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**40))
        file.truncate(2**40 + 8)
    with pytest.raises(HeaderError, match="at most"):
        read_header(str(path))


@pytest.mark.parametrize(
    ("header", "data", "shapes"),
    [
        (GOOD + "   ", 24, {"x": (2, 3)}),
        ({"__metadata__": {"format": "pt"}}, 0, {}),
        ("{}", 0, {}),
        (entry(shape=[], data_offsets=[0, 4]), 4, {"x": ()}),
        (entry(shape=[0, 7], data_offsets=[0, 0]), 0, {"x": (0, 7)}),
        ({"b": PLAIN, "a": PLAIN | {"data_offsets": [24, 48]}}, 48, {"b": (2, 3), "a": (2, 3)}),
        ({"x": PLAIN, "e": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, 24, {"x": (2, 3), "e": (0,)}),
        ({"größe.weight": PLAIN}, 24, {"größe.weight": (2, 3)}),
    ],
    ids=[
        "spaces at the end",
        "metadata alone",
        "nothing",
        "a scalar",
        "empty",
        "in another order",
        "an empty one among others",
        "a name beyond ASCII",
    ],
)
def test_what_is_legal(tmp_path: Path, header: Any, data: int, shapes: dict[str, tuple[int, ...]]) -> None:
    """Corners of the format that the library accepts, and so do we."""
    path = write_header(tmp_path, header, data)
    with safe_open(path, "np") as opened:
        assert set(opened.keys()) == set(shapes)
    assert {tensor.name: tensor.shape for tensor in read_header(str(path))} == shapes


DTYPES = [
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "complex64",
]
DTYPES += ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def bits(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Random bits, as values of `dtype`."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), np.uint8)
    return raw.view(kind).reshape(shape)


small_shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
names = st.text(
    st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="/\\"), min_size=1, max_size=12
).filter(lambda n: n not in ("__metadata__", ".", ".."))  # which are refused


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.dictionaries(names, st.tuples(small_shapes, st.sampled_from(DTYPES), st.integers(0, 999)), max_size=6)
)
def test_agrees_with_the_library(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[tuple[int, ...], str, int]]
) -> None:
    """Files that the library writes: the same names, dtypes, shapes and bits, scalars and empty tensors among them."""
    arrays = {name: bits(*spec) for name, spec in tensors.items()}
    path = tmp_path_factory.mktemp("library") / "x.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    read = {tensor.name: tensor for tensor in read_header(str(path))}
    assert set(read) == set(arrays)
    values, _ = read_boxes([BoxRead(tensor, tuple((0, n) for n in tensor.shape)) for tensor in read.values()])
    for (name, tensor), got in zip(read.items(), values, strict=True):
        wanted = arrays[name]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (wanted.dtype, wanted.shape, wanted.nbytes)
        assert (got.dtype, got.shape, got.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@st.composite
def boxes(draw: st.DrawFn) -> list[tuple[tuple[int, ...], str, list[tuple[tuple[int, int], ...]]]]:
    """Tensors, each with some boxes, empty ones too."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 60), max_size=3)))
        wanted = []
        for _ in range(draw(st.integers(1, 4))):
            box = []
            for size in shape:
                start = draw(st.integers(0, size))
                box.append((start, draw(st.integers(start, size))))
            wanted.append(tuple(box))
        made.append((shape, draw(st.sampled_from(["bfloat16", "uint8", "float32"])), wanted))
    return made


@settings(max_examples=150, deadline=None)
@given(case=boxes())
def test_a_box_is_a_slice(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    """Any boxes of any tensors, read at once, overlapping or not, equal numpy's slices; no byte of the file is read in
    vain but for gaps of less than a page.
    """
    arrays = {f"t{i}": bits(shape, dtype, i) for i, (shape, dtype, _) in enumerate(case)}
    path = tmp_path_factory.mktemp("boxes") / "x.safetensors"
    save_file(arrays, path)
    tensors = {tensor.name: tensor for tensor in read_header(str(path))}
    wanted = [(tensors[f"t{i}"], box) for i, (_, _, group) in enumerate(case) for box in group]
    got, nbytes = read_boxes([BoxRead(tensor, box) for tensor, box in wanted])
    for (tensor, box), values in zip(wanted, got, strict=True):
        expected = arrays[tensor.name][tuple(slice(*span) for span in box)]
        assert (values.dtype, values.shape, values.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        assert BoxRead(tensor, box).nbytes == expected.nbytes
    assert nbytes >= max(values.nbytes for values in got)


@pytest.mark.skipif(elsewhere.is_hidden(), reason="what was read is counted by /proc")
def test_whole_rows_read_nothing_else(tmp_path: Path) -> None:
    """Boxes of whole rows, in several tensors of two files: bytes read = bytes needed. The file's own counter says so."""
    arrays = {name: bits((64, 4096), "bfloat16", i) for i, name in enumerate("abcd")}
    folder = save(tmp_path / "hf", {}, *split(arrays, 2))
    tensors = open_hf(folder).tensors
    reads = [BoxRead(tensors[name], ((8, 40), (0, 4096))) for name in "abcd"]
    before = bytes_read_by_this_process()
    got, nbytes = read_boxes(reads)
    seen = bytes_read_by_this_process() - before
    needed = sum(read.nbytes for read in reads)
    assert nbytes == needed == sum(values.nbytes for values in got)
    assert needed <= seen <= needed + 10_000  # /proc itself is read


def bytes_read_by_this_process() -> int:
    """What read calls returned, in all."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


def test_neighbouring_rows_of_a_column_read_no_page_twice(tmp_path: Path) -> None:
    """A narrow column of a matrix with short rows costs the matrix once, not a page for each row."""
    arrays = {"a": bits((1000, 100), "bfloat16", 0)}
    save_file(arrays, tmp_path / "x.safetensors")
    (tensor,) = read_header(str(tmp_path / "x.safetensors"))
    (got,), nbytes = read_boxes([BoxRead(tensor, ((0, 1000), (7, 9)))])
    assert got.tobytes() == arrays["a"][:, 7:9].tobytes()
    assert nbytes <= tensor.nbytes


def test_a_file_that_shrank_after_it_was_planned(tmp_path: Path) -> None:
    """Reading says which file, rather than giving garbage; also where nobody knows what file it was."""
    save_file({"a": bits((100, 100), "float32", 0)}, tmp_path / "x.safetensors")
    (tensor,) = read_header(str(tmp_path / "x.safetensors"))
    os.truncate(tmp_path / "x.safetensors", 5000)
    for planned, words in ((tensor, "changed"), (dataclasses.replace(tensor, file=None), "ends at")):
        with pytest.raises(StorageError, match=rf"x\.safetensors:? {words}"):
            read_boxes([BoxRead(planned, ((0, 100), (0, 100)))])


# --- folders ----------------------------------------------------------------------------------------------------------


def sharded(folder: Path) -> Path:
    """A good checkpoint of three files."""
    return make_release(folder, files=3)


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in open_hf(folder).problems]


def test_single_and_sharded_checkpoints_hold_the_same(tmp_path: Path) -> None:
    """One file, several with an index, and files that the index doesn't name."""
    tensors = random_tensors(LLAMA)
    single, several = save(tmp_path / "single", LLAMA, tensors), sharded(tmp_path / "several")
    save_file({"stray": np.zeros(3)}, several / "consolidated.safetensors")
    for folder in (single, several):
        checkpoint = open_hf(folder)
        assert not checkpoint.problems
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in checkpoint.tensors.items()} == {
            n: (v.shape, v.dtype) for n, v in tensors.items()
        }
    assert open_hf(several).ignored == ("consolidated.safetensors",)


FIRST = "model-00001-of-00003.safetensors"
INDEX_RULES: dict[str, tuple[Callable[[Path], object], str]] = {
    "names files that are there": (lambda f: (f / FIRST).unlink(), f"missing: {FIRST}"),
    "names tensors that their file holds": (lambda f: change_index(f, lambda m: m.update({"ghost": FIRST})), "ghost"),
    "names every tensor": (lambda f: change_index(f, lambda m: m.pop("model.norm.weight")), "model.norm.weight"),
    "says the right file": (
        lambda f: change_index(f, lambda m: m.update({"model.norm.weight": FIRST})),
        "model.norm.weight",
    ),
    "has no path that climbs": (
        lambda f: change_index(f, lambda m: m.update({"a": "../x.safetensors"})),
        "../x.safetensors",
    ),
    "has no absolute path": (
        lambda f: change_index(f, lambda m: m.update({"a": "/etc/x.safetensors"})),
        "/etc/x.safetensors",
    ),
    "has no path into a folder": (
        lambda f: change_index(f, lambda m: m.update({"a": "sub/x.safetensors"})),
        "sub/x.safetensors",
    ),
    "has no backslashes": (lambda f: change_index(f, lambda m: m.update({"a": "..\\x.safetensors"})), "x.safetensors"),
    "has names that are strings": (lambda f: change_index(f, lambda m: m.update({"a": 3})), "3"),
    "names no pickle": (lambda f: change_index(f, lambda m: m.update({"a": "model.bin"})), "model.bin"),
    "names a tensor once": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        "twice",
    ),
    "has a weight_map": (lambda f: (f / INDEX).write_text('{"metadata": {}}'), "weight_map"),
    "has a weight_map that is an object": (lambda f: (f / INDEX).write_text('{"weight_map": ["a"]}'), "weight_map"),
    "is an object": (lambda f: (f / INDEX).write_text("[1]"), INDEX),
    "is JSON": (lambda f: (f / INDEX).write_text("{"), INDEX),
    "is there": (lambda f: (f / INDEX).unlink(), INDEX),
}


@pytest.mark.parametrize("rule", INDEX_RULES)
def test_every_rule_of_an_index(tmp_path: Path, rule: str) -> None:
    """An index that breaks the rule is a problem that names what breaks it."""
    folder = sharded(tmp_path / "hf")
    assert problems(folder) == []
    damage, words = INDEX_RULES[rule]
    damage(folder)
    assert any(words in problem for problem in problems(folder)), problems(folder)


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    """A checkpoint cloned without git-lfs."""
    folder = sharded(tmp_path / "hf")
    (folder / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert any("git lfs pull" in problem and FIRST in problem for problem in problems(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_files_are_refused(tmp_path: Path, name: str) -> None:
    """A folder of pickle files alone is refused, never opened."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n")
    assert any("pickle" in problem and name in problem for problem in problems(folder))


def test_links_inside_the_folder_and_from_a_hub_cache(tmp_path: Path) -> None:
    """Files may be links within the folder, and a hub cache's links from its snapshot to its blobs."""
    folder = sharded(tmp_path / "hf")
    (folder / "real").mkdir()
    (folder / FIRST).rename(folder / "real" / "a")
    (folder / FIRST).symlink_to("real/a")
    assert problems(folder) == []

    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for path in sorted(sharded(tmp_path / "other").iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(repository / "blobs" / digest)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    assert problems(snapshot) == []
    linked = tmp_path / "link"
    linked.symlink_to(snapshot)
    assert problems(linked) == []
    assert len(open_hf(linked).tensors) == len(random_tensors(LLAMA))


@pytest.mark.parametrize("target", ["../outside.safetensors", "absolute", "../../blobs/x", "nowhere"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, target: str) -> None:
    """A link elsewhere is a problem with its name, even where the file behind it is a good one, and even to a folder
    `blobs` where the checkpoint isn't a hub cache's `snapshots/<revision>`.
    """
    folder = sharded(tmp_path / "a" / "hf")
    outside = tmp_path / "a" / "outside.safetensors"
    (tmp_path / "blobs").mkdir()
    for place in (outside, tmp_path / "blobs" / "x"):
        place.write_bytes((folder / FIRST).read_bytes())
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to(outside if target == "absolute" else target)
    assert any(FIRST in problem for problem in problems(folder)), problems(folder)


def test_a_tensor_in_two_files_is_a_problem(tmp_path: Path) -> None:
    """Where the index names one of them, the other file's copy is said."""
    folder = make_release(tmp_path / "hf", files=3)
    name = next(iter(read_file(folder / FIRST)))
    second = folder / "model-00002-of-00003.safetensors"
    save_file(read_file(second) | {name: np.zeros(2, np.float32)}, second)
    assert any(name in problem for problem in problems(folder))


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", '{"a": 1, "a": 2}', "\xff"])
def test_a_config_that_isnt_json(tmp_path: Path, text: str) -> None:
    """Whatever `config.json` holds, it is a problem and not a traceback."""
    folder = sharded(tmp_path / "hf")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert any("config.json" in problem for problem in problems(folder))
    (folder / "config.json").unlink()
    assert any("missing: config.json" in problem for problem in problems(folder))
