"""Checkpoints with damaged metadata: refused in words by every command that reads them; faults of metadata are found by
verify.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pairs
import pytest
import tensorstore as ts
from fuzz_metadata import answers, read_corpus
from hostile import mutated, paths
from support import call, convert

from weightbeam.formats.orbax import find_items, open_arrays, record_of
from weightbeam.pipelines.commands import inspect
from weightbeam.pipelines.running import sources
from weightbeam.transforms.comparing.metadata import find_metadata_faults

ROUNDS = 40
VALUES: list[Any] = [None, True, -1, 10**30, "", "\x1b[31m[/x]", [], [[]], {}, {"a": {}}, 1.5, "../../x"]
FILES = ("0/conversion.json", "0/_CHECKPOINT_METADATA", "0/items/_METADATA", "0/items/_CHECKPOINT_METADATA")
MODEL = ("--maxtext_model", "llama2-7b")


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("whole"), *MODEL).parent


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "ckpt"))


def commands(source: Path, checkpoint: Path) -> list[list[object]]:
    output = checkpoint.parent / "made"
    return [
        ["inspect", checkpoint],
        ["inspect", checkpoint, "--mesh", "fsdp=2"],
        ["materialize", checkpoint, "--output", output],
    ]


@pytest.mark.parametrize("name", FILES)
def test_mutated_metadata_end_in_words(
    name: str, source: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any field with any value: refused, or read; nothing of it on the terminal but text."""
    good = json.loads((checkpoint / name).read_bytes())
    places, dice = list(paths(good)), random.Random(f"{name} {pairs.SEED}")
    for _ in range(ROUNDS):
        (checkpoint / name).write_text(json.dumps(mutated(good, dice.choice(places), dice.choice(VALUES))))
        for command in commands(source, checkpoint):
            assert call(*command) in (0, 2), command
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize(
    ("name", "content"),
    pairs.each(
        FILES, [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b'{"tree_metadata": []}', b'{"a": 1, "a": 2}']
    ),
)
def test_what_is_no_metadata(name: str, content: bytes, source: Path, checkpoint: Path) -> None:
    (checkpoint / name).write_bytes(content)
    for command in [*commands(source, checkpoint), ["verify", "--source", source, "--checkpoint", checkpoint, *MODEL]]:
        assert call(*command) in ((0, 1, 2) if command[0] == "verify" else (0, 2)), command


def test_a_lost_database_is_said_in_a_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without TensorStore's description of how it opened it, which is a thousand characters long."""
    for file in (checkpoint / "0/items/d").iterdir():
        file.unlink()
    assert call("inspect", checkpoint) == 2
    said = capsys.readouterr().err
    assert "is missing: the checkpoint isn't whole" in said
    assert "tensorstore_spec" not in said


CORPUS = read_corpus()


@pytest.mark.parametrize(
    "part",
    [
        0,
        *(
            pytest.param(part, marks=pytest.mark.slow("the corpus takes a minute; an eighth of it always runs"))
            for part in range(1, 8)
        ),
    ],
)
def test_the_corpus_of_the_fuzzer(part: int, whole: Path, tmp_path: Path) -> None:
    """An input for each answer that was found: still refused in words, or read; never a traceback, nothing that a
    terminal acts on.
    """
    assert len(CORPUS) > 60
    assert len({what["file"] for what in CORPUS}) > 2
    for what in CORPUS[part::8]:
        assert answers(whole, tmp_path / "ckpt", what)


def test_what_the_fuzzer_checks_can_fail(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose errors nobody translates is found out."""
    monkeypatch.setattr(sources, "reading", contextlib.nullcontext)
    monkeypatch.setattr(inspect, "reading", contextlib.nullcontext)
    with pytest.raises((AssertionError, TypeError, AttributeError, ValueError)):
        [answers(whole, tmp_path / "ckpt", what) for what in CORPUS]


def mutating(file: str, *place: str | int, value: Any) -> Callable[[Path], object]:
    def apply(checkpoint: Path) -> None:
        good = json.loads((checkpoint / file).read_bytes())
        (checkpoint / file).write_text(json.dumps(mutated(good, place, value)))

    return apply


def database(checkpoint: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint}/0/items/"}).result()


def set_value_type(checkpoint: Path) -> None:
    file = checkpoint / "0/items/_METADATA"
    good = json.loads(file.read_bytes())
    next(entry for entry in good["tree_metadata"].values() if len(entry["key_metadata"]) > 1)["value_metadata"][
        "value_type"
    ] = "scalar"
    file.write_text(json.dumps(good))


def renaming(old: str, new: str) -> Callable[[Path], object]:
    """What is said of a leaf; stock Orbax raises KeyError."""

    def damage(checkpoint: Path) -> None:
        file = checkpoint / "0/items/_METADATA"
        file.write_text(file.read_text().replace(old, new, 1))

    return damage


def set_step(checkpoint: Path) -> None:
    kvs = database(checkpoint)
    key = next(key for key in kvs.list().result() if key.startswith(b"step/") and not key.endswith(b".json"))
    kvs.write(key, np.int64(999).tobytes()).result()


def lose_step(checkpoint: Path) -> None:
    """Stock Orbax raises ValueError."""
    kvs = database(checkpoint)
    key = next(key for key in kvs.list().result() if key.startswith(b"step/") and not key.endswith(b".json"))
    kvs.write(key, None).result()


def set_digest(checkpoint: Path) -> None:
    """As where the record of another checkpoint lies here."""
    key = next(iter(json.loads((checkpoint / "0/conversion.json").read_bytes())["digests"]))
    mutating("0/conversion.json", "digests", key, value="0" * 32)(checkpoint)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "scan_layers of the item": (
        mutating("0/items/_CHECKPOINT_METADATA", "custom_metadata", "scan_layers", value=False),
        "says scan_layers False",
    ),
    "the model of the record": (
        mutating("0/conversion.json", "model", value="llama3.1-8b"),
        "_CHECKPOINT_METADATA says another model than conversion.json",
    ),
    "no copy of the record": (
        mutating("0/items/_CHECKPOINT_METADATA", "custom_metadata", "weightbeam", value=[1]),
        "items/_CHECKPOINT_METADATA holds no copy of conversion.json",
    ),
    "no marker of the step": (lambda c: (c / "0/commit_success.txt").unlink(), "commit_success.txt"),
    "no marker of the item": (lambda c: (c / "0/items/commit_success.txt").unlink(), "items/commit_success.txt"),
    "a key more": (lambda c: database(c).write("params.params.stray/0.0", b"x").result(), "in the database"),
    "the kind of a value": (set_value_type, "value_type scalar"),
    "a field of a leaf": (renaming('"skip_deserialize": false', '"skip_deserialiZe": false'), "isn't of Orbax's form"),
    "the kind of a key": (renaming('"key_type": 2', '"key_type": 0'), "isn't of Orbax's form"),
    "the name of a leaf": (renaming("('params', 'params'", "('params', 'qarams'"), "is called ('params', 'qarams'"),
    "a digest": (set_digest, "isn't what conversion.json says was written, by its digest"),
    "no step": (lose_step, "step can't be read: NOT_FOUND"),
    "the step": (set_step, "is 999, expected 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds_faults_of_metadata(
    fault: str, source: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, words = FAULTS[fault]
    plant(checkpoint)
    assert call("verify", "--source", source, "--checkpoint", checkpoint, *MODEL) == 1
    assert words in capsys.readouterr().err


class LookedUp(dict[str, Any]):
    """A mapping that nobody goes through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("gone through")


def test_strays_are_found_without_comparing_each_key_with_each_array(checkpoint: Path) -> None:
    """Of 90,000 arrays and as many keys that took minutes before the first byte was read."""
    database(checkpoint).write("params.params.stray/0.0", b"x").result()
    items = find_items(str(checkpoint))
    faults = find_metadata_faults(items, LookedUp(open_arrays(items)), [], record_of(items))
    assert [key for key, what in faults if "in the database" in what] == ["params.params.stray"]


def test_options_that_are_none_are_the_records_fault(
    source: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever reads the record names it."""
    mutating("0/conversion.json", "options", value=[])(checkpoint)
    for command in (["verify", source, checkpoint], ["export", checkpoint, checkpoint.parent / "out"]):
        assert call(*command) == 2
        assert "conversion.json: should be an object, and so should its options" in capsys.readouterr().err


def test_half_a_character_in_a_record(source: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No system has such a name: the record is named, and nothing is made of it."""
    mutating("0/conversion.json", "source", value="/a\ud800")(checkpoint)
    for command in (["verify", checkpoint], ["export", checkpoint, checkpoint.parent / "out", "--dry_run"]):
        assert call(*command) == 2
        assert r"conversion.json: has '\ud800', half of a character" in capsys.readouterr().err
    mutating("0/conversion.json", "source", value="/a\udcff")(checkpoint)  # a byte that isn't UTF-8, which Linux allows
    assert call("verify", source, checkpoint) == 0


def test_verify_finds_another_dtype_than_was_asked_for(
    source: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for float32, stored as bfloat16: rounded, but not as the plan says."""
    for file, place in (
        ("0/conversion.json", ("options",)),
        ("0/_CHECKPOINT_METADATA", ("custom_metadata", "weightbeam", "options")),
    ):
        mutating(file, *place, "save_dtype", value="float32")(checkpoint)
    assert call("verify", "--source", source, "--checkpoint", checkpoint, *MODEL) == 1
    assert "is stored as bfloat16, expected float32" in capsys.readouterr().err


def test_verify_of_a_whole_one(source: Path, checkpoint: Path) -> None:
    assert call("verify", "--source", source, "--checkpoint", checkpoint, *MODEL) == 0
