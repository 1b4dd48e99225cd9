"""The programs of the engines, fetched once from Maven Central and Go's module proxy into a cache outside the
repository.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightbeam-engines"
# Unset: tests are skipped where a program is missing. `required`: they fail. `all`: they fail, and the long ones run
# too.
WANTED = os.environ.get("WEIGHTBEAM_ENGINES", "")
PRISM = "github.com/apache/beam/sdks/v2/go/cmd/prism@v2.77.0"
COMPOSE = "github.com/compose-spec/compose-go/v2@v2.16.2"
PATIENCE = 1200  # seconds for a download


def need(*programs: str, root: bool = False) -> None:
    """Skips a test where a program, or root's rights, are missing; fails it where the engines are asked for."""
    missing = [program for program in programs if shutil.which(program) is None]
    if root and os.geteuid() != 0:
        missing.append("root's rights (for network namespaces)")
    if missing:
        _give_up(f"{', '.join(missing)} missing here")


def _give_up(why: str) -> None:
    pytest.fail(why) if WANTED else pytest.skip(why)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Context manager: nobody else makes this part of the cache meanwhile."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(place: Path, *command: object, environment: dict[str, str] | None = None) -> None:
    """Runs what fetches a place of the cache, if that isn't there, to `PLACE.part`; gives the test up where it fails."""
    with _locked(place.name):
        if place.exists():
            return
        part = place.parent / f"{place.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        words = [str(part) for part in command]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=PATIENCE, check=False, env=os.environ | (environment or {})
        )
        if done.returncode:
            _give_up(f"{' '.join(words[:3])} …: {(done.stdout + done.stderr)[-500:]}")
        part.rename(place)


@functools.cache
def jars(profile: str) -> Path:
    """The folder with the jars of a profile of the pom, `flink` or `spark`; 150 MB each."""
    need("java", "mvn")
    pom = HERE / "pom.xml"
    home = CACHE / f"{profile}-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"
    _fetch(
        home,
        "mvn",
        "-B",
        "-q",
        "-f",
        pom,
        "-P",
        profile,
        "dependency:copy-dependencies",
        f"-DoutputDirectory={home}.part/jars",
        "-DincludeScope=runtime",
    )
    return home / "jars"


@functools.cache
def prism() -> Path:
    """Beam's Prism, of the version that setup.py asks for."""
    need("go")
    home = CACHE / PRISM.rpartition("/")[2]
    _fetch(home, "go", "install", PRISM, environment={"GOBIN": f"{home}.part"})
    return home / "prism"


@functools.cache
def compose_schema() -> Any:
    """What a compose file may say, by those who define it."""
    need("go")
    home = CACHE / f"compose-{COMPOSE.rpartition('@')[2]}"
    _fetch(home, "go", "mod", "download", COMPOSE, environment={"GOMODCACHE": f"{home}.part", "GOFLAGS": "-modcacherw"})
    return json.loads((home / COMPOSE / "schema/compose-spec.json").read_text())
