"""Fuzzing of a checkpoint's metadata. An input is a file of it and what to do to it; `answers` is what must hold of
every one.

    PYTHONPATH=.:tests python tests/fuzz_metadata.py --seconds 600

changes files of a small checkpoint at random and asks every command that reads them. An input that ends in an answer
that none before ended in is added to `corpus/metadata.jsonl`, which `tests/pipelines/test_damaged.py` checks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostile import MISSING, mutated, paths
from measured import call
from support import HERE, make_release

CORPUS = HERE / "corpus" / "metadata.jsonl"
FILES = ("0/conversion.json", "0/_CHECKPOINT_METADATA", "0/items/_METADATA", "0/items/_CHECKPOINT_METADATA")
VALUES: list[Any] = [
    None, True, 0, -1, 10**30, 1.5, "", "\x1b[31m[/x]", "../../x", "a.b", "bfloat16", "\ud800",
    [], [[]], [None], [0], [-1], [10**12, 10**12], {}, {"": {}}, {"a": {}}, {"a": None}, MISSING,
]  # fmt: skip
TEXTS = [
    "",
    "{",
    "null",
    "[1]",
    '"x"',
    "1e999",
    "NaN",
    "[" * 5000,
    '{"a":' * 5000,
    '{"a": 1, "a": 2}',
    "\ufeff{}",
    '{"a": "\\ud800"}',
]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")  # a carriage return is a bar's


def make_checkpoint(folder: Path) -> Path:
    """A small checkpoint with nothing wrong."""
    model = make_release(folder / "hf")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert call("convert", model, folder / "good", "--maxtext_model", "llama2-7b") == 0
    return folder / "good"


def commands(checkpoint: Path) -> list[tuple[object, ...]]:
    """Every command that reads metadata, as far as it does; none of them writes."""
    output = checkpoint.parent / "made"
    return [
        ("inspect", checkpoint),
        ("inspect", checkpoint, "--mesh", "fsdp=2"),
        ("materialize", checkpoint, output, "--dry_run"),
        ("reshard", checkpoint, output, "--mesh", "fsdp=2", "--scan_layers", "false", "--dry_run"),
        ("export", checkpoint, output, "--dry_run"),
    ]


def damage(good: Path, checkpoint: Path, what: dict[str, Any]) -> None:
    """Makes a copy of a good checkpoint in which one file is another: its `text`, or its JSON with another `value`
    (none: without it) at a `place`.
    """
    shutil.rmtree(checkpoint, ignore_errors=True)
    shutil.copytree(good, checkpoint)
    file = checkpoint / what["file"]
    if "text" in what:
        file.write_bytes(what["text"].encode("utf-8", "surrogatepass"))
        return
    value = what.get("value", MISSING)
    file.write_text(json.dumps(mutated(json.loads(file.read_bytes()), what["place"], value)))


def answers(good: Path, checkpoint: Path, what: dict[str, Any]) -> list[str]:
    """What the commands answer, without names and numbers.

    Raises:
      AssertionError: one neither reads the checkpoint nor refuses it in words, or says what a terminal would act on.
    """
    damage(good, checkpoint, what)
    found = []
    for command in commands(checkpoint):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = call(*command)
        said = out.getvalue() + err.getvalue()
        assert status in (0, 2), (what, command, said)
        assert "Traceback" not in said, (what, command, said)
        assert not CONTROL.search(said), (what, command, said)
        last = err.getvalue().splitlines()[1:3] if status else []
        found.append(
            f"{command[0]} {status} "
            + re.sub(r"\W*\d+\W*|/\S+", "#", " ".join(last).replace(str(checkpoint), ""))[:120]
        )
    return found


def read_corpus() -> list[dict[str, Any]]:
    """The inputs that are kept."""
    return [json.loads(line) for line in CORPUS.read_text().splitlines()] if CORPUS.exists() else []


def main(options: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Changes a checkpoint's metadata at random.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    args = parser.parse_args(options)
    dice, kept, end, tried = random.Random(args.seed), read_corpus(), time.monotonic() + args.seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        good, checkpoint = make_checkpoint(Path(folder)), Path(folder) / "ckpt"
        places = {file: list(paths(json.loads((good / file).read_bytes()))) for file in FILES}
        known = {answer for what in kept for answer in answers(good, checkpoint, what)}
        while time.monotonic() < end:
            file = dice.choice(FILES)
            what: dict[str, Any] = {"file": file}
            if dice.random() < 0.1:
                what["text"] = dice.choice(TEXTS)
            else:
                what["place"] = dice.choice(places[file])
                value = dice.choice(VALUES)
                what |= {} if value is MISSING else {"value": value}
            tried += 1
            found = set(answers(good, checkpoint, what))
            if not found <= known:
                known |= found
                with CORPUS.open("a") as corpus:
                    corpus.write(json.dumps(what) + "\n")
    print(f"seed {args.seed}: {tried:,} inputs, {len(known)} answers, {len(read_corpus())} inputs kept")


if __name__ == "__main__":
    main()
