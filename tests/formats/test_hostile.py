"""Headers and indexes from strangers: large ones in bounded time and memory, and the fuzzer's corpus."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fuzz_header import HEADER, RAW, SHARDS, check_input, seeds
from hostile import with_header
from hypothesis import given, settings
from hypothesis import strategies as st
from support import HERE, INDEX

from weightbeam.formats.safetensors import HeaderError, open_hf, read_header
from weightbeam.formats.storage import LocalFolder
from weightbeam.formats.storage.strict_json import MAX_TOGETHER, MAX_VALUES, Budget, JsonError, object_in, parse_json

CORPUS = sorted((HERE / "corpus" / "inputs").iterdir())


def measured(path: Path) -> tuple[int | None, float, int]:
    """Reads a header: its tensors (None where it is refused), the processor's seconds, and the most bytes of memory on
    the way.
    """
    start = time.process_time()
    tracemalloc.start()
    try:
        count: int | None = len(read_header(str(path)))
    except HeaderError:
        count = None
    finally:
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return count, time.process_time() - start, memory


@pytest.mark.parametrize(
    "tensors",
    [
        20_000,
        pytest.param(
            100_000,
            marks=pytest.mark.slow("a header of a hundred thousand tensors, 20 s; twenty thousand are always tried"),
        ),
    ],
)
def test_a_header_of_many_tensors(tmp_path: Path, tensors: int) -> None:
    """Legal, though larger than any model's: read in seconds, with memory for what it holds."""
    entries = {
        f"model.layers.{i}.weight": {"dtype": "U8", "shape": [1, 1], "data_offsets": [i, i + 1]} for i in range(tensors)
    }
    with_header(tmp_path / "x.safetensors", json.dumps(entries).encode(), tensors)
    count, seconds, memory = measured(tmp_path / "x.safetensors")
    assert count == tensors
    assert seconds < 30 * tensors / 100_000  # traced; 1 s for 100,000 without
    assert memory < (400 << 20) * tensors / 100_000


LARGE = {
    "lists": lambda n: b'{"x":[' + b"[]," * (n // 2 - 10) + b"0]}",
    "objects": lambda n: b'{"x":[' + b"{}," * (n // 2 - 10) + b"0]}",
    "metadata": lambda n: b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(n // 2 - 10)) + b',"x":0}}',
    "large numbers": lambda n: b'{"x":[' + b"1234567890," * (n - 10) + b"0]}",
    "wide texts": lambda n: (
        b'{"x":{' + ",".join(f'"{i}\U0001f600":"\U0001f600"' for i in range(n // 4 - 10)).encode() + b"}}"
    ),
    "wide texts, escaped": lambda n: (
        b'{"x":{' + b",".join(rb'"%d\ud83d\ude00":"\ud83d\ude00"' % i for i in range(n // 4 - 10)) + b"}}"
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_header_with_as_many_values_as_are_allowed(tmp_path: Path, kind: str) -> None:
    """A tenth of them, for the sake of time: whatever the values are, they take less than 200 bytes each; so all take
    less than 1 GB.
    """
    header = LARGE[kind](MAX_VALUES // 10)
    with_header(tmp_path / "x.safetensors", header)
    count, seconds, memory = measured(tmp_path / "x.safetensors")
    assert count is None
    assert seconds < 30
    assert memory < 3 * len(header) + 200 * MAX_VALUES // 10


def test_a_header_with_more_values_than_are_allowed(tmp_path: Path) -> None:
    """Refused before any of them is made."""
    header = b'{"x":[' + b"[]," * (MAX_VALUES // 2) + b"0]}"
    with_header(tmp_path / "x.safetensors", header)
    count, _, memory = measured(tmp_path / "x.safetensors")
    assert count is None
    assert memory < 3 * len(header)


def test_wide_characters_and_what_was_read_before(tmp_path: Path) -> None:
    """A text of 95 MB became 1.4 GB, since Python has four bytes for each of its characters; files that are read
    together have one bound, and one that is read again counts once.
    """
    text = b'"' + b"a" * (MAX_TOGETHER // 4) + "\U0001f600".encode() + b'"'
    with pytest.raises(JsonError, match="not only narrow ones"):
        parse_json(text)
    assert parse_json(text[:-5] + b'"')
    budget, half = Budget(), b"[" + b"0," * (MAX_VALUES // 2) + b"0]"
    for _ in range(3):
        parse_json(half, budget=budget, file="one")
    with pytest.raises(JsonError, match=r"more than 5,000,000 values, with the files that were read before"):
        parse_json(half, budget=budget, file="two")


def test_an_object_or_nothing(tmp_path: Path) -> None:
    """A file that isn't there, or holds anything else, says nothing."""
    store = LocalFolder(str(tmp_path))
    assert object_in(store, "a.json") == {}
    for content, said in (
        (b'{"a": 1}', {"a": 1}),
        (b"[1]", {}),
        (b"null", {}),
        (b"{", {}),
        (b'{"a": 1, "a": 2}', {}),
        (b"\xff", {}),
    ):
        store.write("a.json", content)
        assert object_in(store, "a.json") == said


# --- structures at random: valid, nearly valid, and not at all --------------------------------------------------------

names = st.one_of(
    st.sampled_from(
        ["x", "y", "model.norm.weight", "../x", "/x", "", "__metadata__", "a\x00", "é", "\u202e", "a\\u0000"]
    ),
    st.text(max_size=3),
)
numbers = st.one_of(
    st.integers(0, 30),
    st.sampled_from([-1, -0.0, True, None, 1.0, 2**31, 2**63 - 1, 2**63, 2**64, "1", 10**30, [], {}]),
)
dtypes = st.one_of(
    st.sampled_from(
        ["U8", "F32", "BF16", "BOOL", "C64", "F8_E8M0", "F8_E4M3FNUZ", "F4", "F6_E2M3", "f32", "I128", "", 1, None]
    )
)
ITEMSIZE = {"U8": 1, "BOOL": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "BF16": 2, "F32": 4, "C64": 8}


@st.composite
def headers(draw: st.DrawFn) -> str:
    """A header's text: a row of tensors that fit, with a few faults put in."""
    entries: list[tuple[str, Any]] = []
    offset = 0
    for _ in range(draw(st.integers(0, 4))):
        dtype, shape = draw(st.sampled_from(sorted(ITEMSIZE))), draw(st.lists(st.integers(0, 3), max_size=3))
        size = ITEMSIZE[dtype]
        for n in shape:
            size *= n
        entries.append((draw(names), {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}))
        offset += size
    for _ in range(draw(st.integers(0, 2)) if entries else 0):
        entry = draw(st.sampled_from(entries))[1]
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
        wrong = {
            "dtype": dtypes,
            "shape": st.lists(numbers, max_size=3),
            "data_offsets": st.lists(numbers, min_size=1, max_size=3),
            "more": numbers,
        }[field]
        entry[field] = draw(st.one_of(wrong, numbers))
    if draw(st.booleans()):
        entries.append(
            (
                "__metadata__",
                draw(st.one_of(st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2), numbers)),
            )
        )
    entries = draw(st.permutations(entries))
    return (
        "{"
        + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries)
        + "}"
        + draw(st.sampled_from(["", "", " ", "\n", "x", "\0"]))
    )


@settings(max_examples=800, deadline=None)
@given(text=headers())
def test_headers_at_random_agree_with_the_library(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Refused by both or read alike; where we alone refuse, for a reason that `fuzz_header.STRICTER` has."""
    check_input(HEADER + text.encode(), tmp_path_factory.getbasetemp())


files = st.one_of(
    st.sampled_from(
        ["a.safetensors", "b.safetensors", "c.safetensors", "../a.safetensors", "/a.safetensors", ".", "", None, 3]
    ),
    st.text(max_size=9),
)
indexes = st.fixed_dictionaries(
    {},
    optional={
        "metadata": numbers,
        "weight_map": st.dictionaries(st.one_of(st.sampled_from("ab"), names), files, max_size=4),
    },
)


@settings(max_examples=200, deadline=None)
@given(index=st.one_of(indexes, numbers))
def test_indexes_at_random(tmp_path_factory: pytest.TempPathFactory, index: Any) -> None:
    """Problems or none, but no exception; no file outside the folder is opened; a good index says what the headers say."""
    check_input(SHARDS + json.dumps(index).encode(), tmp_path_factory.getbasetemp())


# --- the fuzzer's corpus ----------------------------------------------------------------------------------------------


def test_the_corpus_of_the_fuzzer(tmp_path: Path) -> None:
    """What atheris found in ten minutes, an input for each way through the parser: still treated as the library treats
    it.
    """
    became = Counter(check_input(path.read_bytes(), tmp_path) for path in CORPUS)
    became.update(check_input(seed, tmp_path) for seed in seeds())
    print(f"{len(CORPUS)} inputs, {len(became)} answers")
    assert len(CORPUS) > 40
    assert {kind for path in CORPUS for kind in path.read_bytes()[:1]} >= {RAW[0], HEADER[0], SHARDS[0]}
    assert {"good", "1 tensors", "2 tensors"} <= set(became)
    assert len(became) > 15
    assert sum(path.stat().st_size for path in CORPUS) < 300_000


def test_what_the_fuzzer_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that lets a hole pass is found out."""
    hole = HEADER + b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'
    check_input(hole, tmp_path)
    monkeypatch.setattr("fuzz_header.read_header", lambda path: ())
    with pytest.raises(AssertionError, match="the library refuses"):
        check_input(hole, tmp_path)


# --- what else a folder may hold --------------------------------------------------------------------------------------


def test_names_are_never_printed_raw(tmp_path: Path) -> None:
    """A name of an index that would move the cursor is shown with its escapes."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x\x1b[2J": "a.safetensors"}}))
    problems = [str(problem) for problem in open_hf(tmp_path).problems]
    assert any(r"x\x1b[2J" in problem for problem in problems)
    assert not any(re.search(r"[\x00-\x1f]", problem) for problem in problems)


def test_files_with_names_that_no_index_can_have_are_left_alone(tmp_path: Path) -> None:
    """Neither read nor listed: such a name can't be printed."""
    (tmp_path / "config.json").write_text('{"a": 1}')
    with_header(tmp_path / "x.safetensors", b"{}")
    for name in (b"a\nb.safetensors", b"\xff.safetensors"):
        (Path(str(tmp_path)) / name.decode(errors="surrogateescape")).write_bytes(b"")
    checkpoint = open_hf(tmp_path)
    assert ([shard.name for shard in checkpoint.shards], checkpoint.ignored, checkpoint.problems) == (
        ["x.safetensors"],
        (),
        (),
    )
