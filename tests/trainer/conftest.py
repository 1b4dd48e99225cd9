"""One process of MaxText for all tests: it imports for ten seconds and compiles what several models have in common once."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("WEIGHTBEAM_MAXTEXT_PYTHON", "")
SCRIPT = Path(__file__).with_name("run_maxtext.py")
TIMEOUT = 1500  # seconds, of a job
# Tiny models compile for longer than they run: what was compiled is kept, and LLVM doesn't spend time on it.
COMPILED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


class MaxText:
    """The process, which begins with the first job, and anew behind one that failed.

    Args:
      folder: for what it prints and what it compiled.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def do(self, job: dict[str, Any]) -> None:
        """Does a job; fails with MaxText's words where it does."""
        process = self._process = self._process or self._begin()
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        answered, _, _ = select.select([process.stdout], [], [], TIMEOUT)
        said = process.stdout.readline() if answered else ""
        wrong = json.loads(said) if said else f"no answer:\n{(self._folder / 'log').read_text()[-8000:]}"
        if wrong:
            self.end()
            pytest.fail(wrong)

    def _begin(self) -> subprocess.Popen[str]:
        environment = os.environ | COMPILED
        with (self._folder / "log").open("a") as log:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
            return subprocess.Popen([PYTHON, SCRIPT], text=True, cwd=self._folder, env=environment, **pipes)

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process:
            self._process.kill()
            self._process.communicate()
        self._process = None

    @property
    def cache(self) -> Path:
        """Where MaxText keeps what it compiled."""
        return self._folder / "compiled"


@pytest.fixture(scope="session")
def maxtext(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MaxText]:
    """MaxText at work."""
    made = MaxText(tmp_path_factory.mktemp("maxtext"))
    yield made
    made.end()
