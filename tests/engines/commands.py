"""The command as the engine tests give it, as a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm
from processes import wait_until

from engines.programs import WANTED

LONG = pytest.mark.skipif(WANTED != "all", reason="runs with WEIGHTBEAM_ENGINES=all, as make test-engines sets it")


def weightbeam(*words: object) -> warm.Process:
    """The command, as a process of its own."""
    return warm.start(*words)


def ended(process: warm.Process, status: int = 0, seconds: float = 300) -> str:
    """Waits for a command's end; returns what it said on standard error."""
    _, told = process.communicate(timeout=seconds)
    assert process.returncode == status, told
    return told


def begin(source: Path, output: Path, *options: object) -> tuple[warm.Process, list[object]]:
    """A conversion that has done its first unit, and its command's words."""
    words = ["convert", "--source", source, "--output", output, "--unit_bytes", "4MB", *options]
    process = weightbeam(*words)

    def begun() -> bool:
        assert process.poll() is None, process.communicate()
        return any(output.glob("*/units/*/*.json"))

    try:
        wait_until(begun, lambda: "no unit was done", seconds=300, every=0.01)
    except BaseException:
        process.kill()
        raise
    return process, words
