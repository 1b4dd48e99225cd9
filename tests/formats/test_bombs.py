"""Releases that are made to take a planner's time or memory: planned or refused, within the bounds that
docs/explanation/promises.md names.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from bombs import FOLDERS, LLAMA, empty, releases, write_release
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measured import Measure

from weightbeam.model_mappings.audit import _apart

# of the processor's time; on a machine with nothing else to do that is about the time
SECONDS, MEGABYTES, CHARACTERS = 20, 1024, 400_000


def assert_within_bounds(measure: Measure, folder: Path, command: str, *options: str) -> dict[str, Any]:
    """Runs a command on a release; what it took is within the bounds, and there is no traceback."""
    source = ["--source", folder] if command == "plan" else [folder]
    told = measure([command, *source, *options], folder.parent / "printed")
    assert told["status"] in (0, 2), told["message"]
    assert "Traceback" not in told["message"]
    assert told["cpu"] <= SECONDS
    assert told["megabytes"] <= MEGABYTES
    assert told["length"] <= CHARACTERS
    return told


MANY = ("240,000", "450,000", "million", "1.7 TiB")  # these take seconds to tens of them


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.slow("bombs that take half a minute to be planned or refused")]
            * any(size in name for size in MANY),
        )
        for name in FOLDERS
    ],
)
def test_bombs_are_planned_or_refused_in_time(name: str, tmp_path: Path, measure: Measure) -> None:
    folder = tmp_path / "hf"
    FOLDERS[name](folder)
    model = () if "layers" in name or "windows" in name else ("--maxtext_model", "llama2-7b")
    assert_within_bounds(measure, folder, "plan", *model)
    assert_within_bounds(measure, folder, "inspect")
    shutil.rmtree(folder)


def test_many_quantized_weights(tmp_path: Path, measure: Measure) -> None:
    """The time grows with their number, and not with its square."""
    config = LLAMA | dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    names = [f"layers.{i}.q_proj.weight" for i in range(25_000)]
    codes = dict.fromkeys(names, ("F8_E4M3", (1, 1))) | {f"{name}_scale_inv": ("F32", (1, 1)) for name in names}
    write_release(tmp_path / "hf", config, codes)
    assert_within_bounds(measure, tmp_path / "hf", "dequantize", str(tmp_path / "out"), "--dry_run")


def test_more_arrays_than_are_planned(tmp_path: Path, measure: Measure) -> None:
    """A table that makes an array of each tensor is for models whose tensors can be counted."""
    write_release(tmp_path / "hf", LLAMA, {f"{i}": ("BF16", (1,)) for i in range(150_000)})
    options = (str(tmp_path / "out"), "--family", "identity", "--dry_run")
    told = assert_within_bounds(measure, tmp_path / "hf", "convert", *options)
    assert told["status"] == 2


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(releases())
def test_any_bomb(measure: Measure, tmp_path: Path, made: tuple[dict[str, Any], dict[str, Any], int]) -> None:
    """Sizes of any order of magnitude, tensors that fit them or don't."""
    config, tensors, more = made
    folder = tmp_path / "hf"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        write_release(folder, config, tensors | empty(f"more.{i}" for i in range(more)))
    except (OSError, OverflowError):  # larger than any file
        return
    assert_within_bounds(measure, folder, "plan")


spans = st.builds(range, st.integers(0, 40), st.integers(0, 80), st.integers(1, 9))


@given(spans, spans)
def test_progressions_are_compared_as_sets_are(a: range, b: range) -> None:
    assert _apart(a, b) == _apart(b, a) == set(a).isdisjoint(b)


@given(st.integers(1, 1 << 60), st.integers(1, 1 << 60), st.integers(0, 1 << 60), st.integers(0, 1 << 60))
def test_long_progressions(step: int, other: int, start: int, begin: int) -> None:
    """At once, however long: with a number that they share they aren't apart, and odd and even are."""
    shared = start + step * 5
    assert not _apart(range(start, start + step * 100, step), range(shared % other, shared + other * 3, other))
    assert _apart(range(0, 2 * step, 2), range(1, 2 * other, 2))
