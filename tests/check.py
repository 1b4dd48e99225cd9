"""What can be known within a minute of what changed: style, types, the direction of imports, and the nearest tests.

    python tests/check.py [BASE]

`make check` runs it. Changed is what isn't committed, and what the commits have that the branch's upstream, else `main`,
hasn't; or all since BASE. Of the files that changed, the definitions that did count: the tests that reach one
(`reach.py`) run, nearest first, until the time is over. What wasn't run is told; `make test` runs everything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import forked
from reach import ROOT, Graph, Node

SECONDS = float(os.environ.get("SECONDS_TO_CHECK", "52"))  # for all of it; a test is stopped then
TYPED = ("model_mappings/", "formats/", "transforms/", "pipelines/", "weightbeam/")


def git(*words: str) -> str:
    """What git says; nothing where it has nothing to say."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def find_base() -> str:
    """The commit that the branch left its upstream at, else `main`."""
    found = (git("merge-base", "HEAD", name).strip() for name in ("@{upstream}", "origin/main", "main"))
    return next(filter(None, found), "HEAD")


def changed_lines(base: str) -> dict[str, list[range]]:
    """Of each file that changed since `base`, the lines, as they are now; of a new file, all."""
    changed: dict[str, list[range]] = {}
    lines: list[range] = []
    for line in git("diff", "--unified=0", "--no-color", "--no-renames", base, "--").splitlines():
        if line.startswith("+++ "):
            lines = changed.setdefault(line[6:], []) if line != "+++ /dev/null" else []
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(found[1]), int(found[2] or 1)
            lines.append(range(start, start + max(count, 1)))  # where lines were taken away: the line before them
    new = git("ls-files", "--others", "--exclude-standard").splitlines()
    return changed | {file: [range(1, 1 << 30)] for file in new}


def changed_definitions(graph: Graph, changed: Mapping[str, list[range]]) -> set[Node]:
    """The definitions that changed, and those that read a file that did; of a module's imports, all that it has."""
    found: set[Node] = set()
    for file, lines in changed.items():
        module = graph.modules.get(file)
        if module is None:
            found |= graph.reading(file)
            continue
        touched = {
            (file, name)
            for name, statements in module.definitions.items()
            for each in statements
            for own in [
                range(min([each.lineno, *(d.lineno for d in getattr(each, "decorator_list", []))]), each.end_lineno + 1)
            ]
            if any(span.start < own.stop and own.start < span.stop for span in lines)
        }
        found |= touched or graph.whole(file)
    return found


class Linters:
    """What checks style, types and imports while the tests run."""

    def __init__(self, graph: Graph, changed: Mapping[str, list[range]]) -> None:
        there = Path(sys.executable).parent
        near = {path for (path, _), ends in graph.edges.items() for end, _ in ends if end in changed} | {*changed}
        typed = sorted(
            path for path in near if path.startswith(TYPED) and path.endswith(".py") and "/families/" not in path
        )
        commands: dict[str, list] = {
            "ruff check": [there / "ruff", "check", "-q", "."],
            "ruff format": [there / "ruff", "format", "--check", "-q", "."],
            "import direction": [there / "lint-imports", "--no-logo"],
        }
        if typed or not changed:
            commands[f"types of {len(typed) or 'all'} files"] = [
                there / "pyright",
                "--pythonpath",
                sys.executable,
                *typed,
            ]
        self.running = {
            name: subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for name, command in commands.items()
        }

    def failures(self) -> list[str]:
        """What those say that aren't content; waits for them."""
        said = {name: process.communicate()[0] for name, process in self.running.items()}
        return [f"{name}:\n{said[name]}" for name, process in self.running.items() if process.returncode]


class Tests:
    """The tests of what changed, and how far they are."""

    def __init__(self, tests: list[Node], until: float) -> None:
        self.tests, self.until = tests, until
        self.passed, self.failed = 0, list[str]()
        self.left = list(dict.fromkeys(file for file, _ in tests))  # files that weren't run, or not to their end
        self.files = len(self.left)

    def run(self) -> None:
        """Runs them file by file until the time is over."""
        if self.tests:
            forked.warm(forked.HEAVY[:-1])  # most import no torch
        temp = Path(tempfile.mkdtemp(prefix="check-"))
        for batch in forked.batches(self.tests):
            files = dict.fromkeys(file for file, _ in batch)
            events = list(self.follow(batch, temp))
            over = events[-1]["event"] == "stopped"
            at = str(events[-1]["test"]).partition("::")[0]
            done = [*files][: [*files].index(at)] if over and at in files else [] if over else [*files]
            self.left = [file for file in self.left if file not in done]
            if over:
                break
        shutil.rmtree(temp, ignore_errors=True)

    def follow(self, batch: list[Node], temp: Path) -> Iterator[forked.Event]:
        options = ["-q", "-m", forked.TIERS["test"]]
        for event in forked.run_tests(ROOT, forked.Chosen(batch), options, temp, SECONDS, self.until):
            if event["event"] == "passed":
                self.passed += 1
            elif event["event"] in ("failed", "crashed", "late"):
                self.failed.append(event["test"])
                print(f"\n{event['test']}: {event['event']}\n{event.get('text', '')}", flush=True)
            elif event["event"] == "started":
                self.tell(event["test"])
            elif event["event"] == "ended" and event["status"] > 1 and event["status"] != 5:
                self.failed.append(batch[0][0])
                print((temp / "printed").read_text()[-3000:])
            yield event

    def tell(self, test: str) -> None:
        """The line of progress: in a terminal one that changes, else one for each file."""
        file = test.partition("::")[0]
        done = f"{self.passed} tests passed, {len(self.failed)} failed, {max(0, self.until - time.monotonic()):.0f} s left: "
        if sys.stdout.isatty():
            print(f"\r{done}{test}"[: shutil.get_terminal_size().columns], end="\x1b[K", flush=True)
        elif file != self.__dict__.get("told"):
            print(f"{done}{file}", flush=True)
        self.told = file


def main(base: str = "") -> int:
    until = time.monotonic() + SECONDS
    base = base or os.environ.get("BASE") or find_base()
    changed = changed_lines(base)
    graph = Graph()
    linters = Linters(graph, changed)
    definitions = changed_definitions(graph, changed)
    tests = Tests(graph.nearest(definitions, forked.durations()), until)
    since = git("log", "-1", "--format=%h %s", base).strip()
    print(
        f"{len(definitions)} definitions in {len(changed)} files changed since {since}; {len(tests.tests)} tests in {tests.files} files reach them",
        flush=True,
    )
    tests.run()
    print("\r\x1b[K" * sys.stdout.isatty() + "waiting for " + ", ".join(linters.running), flush=True)
    failures = linters.failures()
    print("\n".join(failures) or "linters are content")
    print(
        f"{tests.passed} tests passed, {len(tests.failed)} failed"
        if tests.tests
        else "nothing changed that a test reaches"
    )
    if tests.left:
        print(
            f"not run, or not to their end, for lack of time: {len(tests.left)} of {tests.files} files; make test runs all, and these:"
        )
        print(
            f"  {Path(sys.executable).relative_to(ROOT) if Path(sys.executable).is_relative_to(ROOT) else 'python'} -m pytest {' '.join(tests.left)}"
        )
    return bool(failures or tests.failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
