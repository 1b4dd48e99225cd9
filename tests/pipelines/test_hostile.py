"""Hostile input: exit 2 or a valid plan, in bounded time and memory, nothing written, never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pairs
import pytest
from facts import layouts_of
from hostile import FOLDERS, VALUES, checkpoint_of, mutated, paths, tiny_checkpoints
from processes import run
from support import HERE

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.maxtext_config import maxtext_config
from weightbeam.model_mappings.naming import name_model
from weightbeam.model_mappings.registry import family_of
from weightbeam.transforms.planning import conversion_planner as planner
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

CHECKPOINTS = tiny_checkpoints()
SECONDS, MEGABYTES, CHARACTERS = 20, 1500, 20_000  # of CPU and memory of one command, and what it printed
SHARE = 64  # of the pairs of a field and a value one is tried


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What `plan` and `convert` did with each bad folder, see `hostile.main`."""
    script = [sys.executable, str(HERE / "hostile.py"), str(tmp_path_factory.mktemp("hostile"))]
    ran = run(*script, timeout=900, env=os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}"}, status=0)
    told: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, ran.stdout.splitlines()):
        told.setdefault(row["name"], []).append(row)
    return told


def test_every_bad_folder_is_refused(refusals: dict[str, list[dict[str, Any]]]) -> None:
    """Exit 2 by both commands, nothing written or changed, and a message that a terminal can bear."""
    assert set(refusals) == set(FOLDERS)
    faults = {}
    for name, rows in refusals.items():
        assert [row["command"] for row in rows] == ["plan", "convert"]
        for row in rows:
            unfit = (
                row["status"] != 2
                or "Traceback" in row["message"]
                or not row["untouched"]
                or row["length"] > CHARACTERS
            )
            large = row["cpu"] > SECONDS or row["megabytes"] > MEGABYTES
            if unfit or large or any(not character.isprintable() and character != "\n" for character in row["message"]):
                faults[name] = row
    assert faults == {}
    most, longest = (max(row[what] for rows in refusals.values() for row in rows) for what in ("megabytes", "seconds"))
    print(f"{len(refusals)} bad folders refused; at most {most} MB and {longest} s")


# message -> the damages that it must be the answer to
SAID = {
    "isn't a regular file": [
        "a pipe for a shard",
        "a pipe for the config",
        "a pipe for the index",
        "a pipe for a hub's blob",
        "a folder for a shard",
    ],
    "leads out of the folder": [
        "a device for a shard",
        "a config outside",
        "an index outside",
        "a shard through a linked folder",
    ],
    "leads back to itself": [
        "a shard that is a link to itself",
        "a config that is a link to itself",
        "an index that is a link to itself",
    ],
    "git lfs pull": ["all git-lfs pointers", "a git-lfs pointer for the config"],
    "deep": ["a config nested 900 deep", "a quantisation nested 900 deep", "an index nested 900 deep"],
    "more than 5,000,000 values": [
        "a header of six million values",
        "a config of six million values",
        "a header of four million empty lists",
    ],
    "more than 100,000,000 bytes": ["a config of a terabyte", "an index of a terabyte"],
    "twice": [
        "a name twice, once escaped",
        "metadata twice",
        "a config with a field twice",
        "an index with a tensor twice",
    ],
    "isn't a plain name": [
        "an index with an absolute path",
        "an index with a path below",
        "an index with half a character in a file name",
    ],
    "layers and experts": ["a config of 2000 layers of 100,000 experts"],
}


@pytest.mark.parametrize("words", SAID)
def test_the_message_says_what_is_wrong(refusals: dict[str, list[dict[str, Any]]], words: str) -> None:
    """Not just any refusal: the one that the damage deserves."""
    assert [name for name in SAID[words] for row in refusals[name] if words not in row["message"]] == []


# --- config.json, field by field --------------------------------------------------------------------------------------


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises where something takes longer."""

    def late(number: int, frame: types.FrameType | None) -> None:
        raise TimeoutError(f"still at work after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def options_of(config: dict[str, Any]) -> ConvertOptions:
    """Options that use most of a checkpoint: its towers, if it has any."""
    layout = list(layouts_of(config).values())[-1]
    return ConvertOptions(scan_layers=layout.scan, multimodal=layout.multimodal)


def is_refused(planned: Conversion) -> bool:
    """Whether it is refused; else every unit of the plan must come out."""
    if planned.plan.problems:
        return True
    assert [planned.expand(unit).id for unit in range(len(planned.units))] == list(range(len(planned.units))) != []
    return False


def fields_read(ask_for: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the fields of configs that something asks for."""
    read: set[str] = set()

    def listening(method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(fields: Config, key: str, *default: Any) -> Any:
            read.add(key)
            return (
                fields.__missing__(key)
                if method is dict.__getitem__ and not dict.__contains__(fields, key)
                else method(fields, key, *default)
            )

        return ask

    with monkeypatch.context() as patched:
        for method in (dict.__getitem__, dict.get, dict.__contains__):
            patched.setattr(Config, method.__name__, listening(method), raising=False)
        ask_for()
    return read


@pytest.mark.parametrize("name", pairs.some([*CHECKPOINTS], 2))
def test_any_value_in_any_field_of_a_config(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields that the tables read, wherever they stand, with every kind of wrong value: problems, or a plan with
    all its units; soon, and never anything else. One pair in `SHARE` is tried; `tests/soak.py` does it for all of them,
    and for all layouts.
    """
    config, tensors = CHECKPOINTS[name]
    options = options_of(config)
    with monkeypatch.context() as patched:
        patched.setattr(planner, "maxtext_of", lambda *_: (None, ()))  # its fields are the next test's
        read = fields_read(lambda: plan_conversion(options, checkpoint_of(config, tensors)), monkeypatch)
    assert {"hidden_size", "num_hidden_layers", "model_type"} <= read
    assert not is_refused(plan_conversion(options, checkpoint_of(config, tensors)))
    refused = 0
    for path in paths(config):
        if read.isdisjoint(path[-1:]):
            continue
        for value in VALUES:
            if zlib.crc32(f"{path} {value}".encode()) % SHARE == 0:
                with limited(SECONDS):
                    refused += is_refused(
                        plan_conversion(options, checkpoint_of(mutated(config, path, value), tensors))
                    )
    assert refused > 60 // SHARE


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.slow("every field with every kind of value, a minute")
def test_any_value_in_any_field_that_maxtext_is_told(name: str) -> None:
    """Every field of a config with every kind of wrong value: MaxText's configuration of it, or what is wrong with it."""
    config, tensors = CHECKPOINTS[name]
    config = {"num_experts_per_tok": 2} | config  # which no table reads
    options = options_of(config)
    family = family_of(Config(config), None)
    naming = name_model(family, Config(config))
    layout = Layout(
        scan=options.scan_layers,
        multimodal=options.multimodal,
        shapes={tensor: spec.shape for tensor, spec in tensors.items()},
    )
    assert maxtext_config(family, Config(config), layout, naming).keys
    for path in paths(config):
        for value in VALUES:
            with limited(SECONDS), contextlib.suppress(ConfigError):
                maxtext_config(family, Config(mutated(config, path, value)), layout, naming)
