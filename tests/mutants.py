"""Small faults in the code that must not be wrong, and the tests that find them.

    python tests/mutants.py [--count 100] [--seed 0] [--tier all] [--jobs 2] [--results out/mutants.json]

`make mutants` runs it. A script chooses the faults, as many of each of `GROUPS`, as many with each operator as there
are: a comparison that is another, a number one more, `and` for `or`, a statement left out. Each is put into a copy of
the repository, and the tests that reach the changed definition (`reach.py`) run against it, nearest and quickest first,
until one fails or takes too long. A test that fails without the fault, too, doesn't count. What `make test`'s tests
don't find goes on to `make test-landing`'s. `--results` keeps what is known, and another run goes on from there.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import hypothesis
import pytest
from reach import ROOT, Graph

GROUPS = {  # what must not be wrong -> its modules
    "kernels": "formats/encodings transforms/execution/boxes.py transforms/cutting/quantizing.py formats/adapters/kernels.py "
    "formats/orbax/copying.py model_mappings/ops.py model_mappings/relation.py model_mappings/cells.py model_mappings/boxes.py model_mappings/rope.py",
    "ledger": "formats/staging formats/targets formats/orbax/ocdbt.py formats/storage/composing.py transforms/stages/handshake.py",
    "lease": "formats/staging/lease.py",
    "comparers": "transforms/comparing transforms/execution/operands.py pipelines/checking",
    "planners": "transforms/planning transforms/cutting model_mappings/plan.py",
}
ALL = 1 << 30  # files
LIMIT = 120  # seconds of a test: a fault may make a loop endless
# A counterexample is enough, the smallest one isn't needed, and none is for the next fault.
HASTE = dict(database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])


# --- the faults -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: other text for some bytes of a file."""

    group: str
    path: str
    definition: str  # at the top level, which it lies in
    line: int
    start: int
    end: int
    operator: str
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]

    @property
    def key(self) -> str:
        """Its name among results."""
        return f"{self.path}:{self.line}:{self.start} {self.operator}: {self.before} → {self.after}"

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.line} {self.operator}: {_cut(before)} → {_cut(after)}"


def _cut(text: str, length: int = 70) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


COMPARISONS: dict[type, type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type, type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
# What is only shown, or can't be noticed: no faults in there.
SHOWN = {"__repr__", "__str__", "_repr_html_", "show", "describe", "__getstate__"}
CALLS = (
    "log.",
    "logger.",
    "logging.",
    "warnings.",
    "print",
    "progress",
    "TypeVar",
    "cast",
    "Metrics.",
    "_log.",
    "tell",
)


class Sites(ast.NodeVisitor):
    """The places of a module where a fault can be."""

    def __init__(self, group: str, path: str, source: bytes) -> None:
        self.group, self.path, self.source = group, path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.definition = ""
        self.predicate = False
        self.found: list[Mutant] = []
        for node in ast.parse(source).body:
            targets = (
                [node.name]
                if hasattr(node, "name")
                else [
                    each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                ]
            )
            self.definition = (targets or [""])[0]
            if not self.definition.startswith("__"):
                self.visit(node)

    def add(self, operator: str, node: Any, after: str) -> None:
        start, end = (
            self.starts[line - 1] + column
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        before = self.source[start:end].decode()
        self.found.append(
            Mutant(self.group, self.path, self.definition, node.lineno, start, end, operator, before, after)
        )

    def change(self, operator: str, node: Any, **fields: Any) -> None:
        """Adds a node with other fields."""
        old = {name: getattr(node, name) for name in node._fields}
        self.add(operator, node, f"({ast.unparse(type(node)(**old | fields))})")

    def visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in SHOWN:
            return
        outer, self.predicate = self.predicate, node.returns is not None and ast.unparse(node.returns) == "bool"
        for each in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if each is not None:
                self.visit(each)
        self.predicate = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_function  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in node.body:
            self.visit(each)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def skip(self, node: ast.AST) -> None:
        """Messages, checks of what can't be otherwise, and imports."""

    visit_JoinedStr = visit_Assert = visit_Import = visit_ImportFrom = skip  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.dump(node.test) and "__main__" not in ast.dump(node.test):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add("raise left out", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add("continue left out", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not ast.unparse(node.value.func).startswith(CALLS):
            self.add("call left out", node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).startswith(CALLS):
            return
        for each in (node.func, *node.args, *(keyword.value for keyword in node.keywords if keyword.arg != "strict")):
            self.visit(each)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, op in enumerate(node.ops):
            self.change("comparison", node, ops=[*node.ops[:place], COMPARISONS[type(op)](), *node.ops[place + 1 :]])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.change("and, or", node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add("not left out", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = (ast.List, ast.Tuple, ast.JoinedStr)
        words = any(
            isinstance(each, text) or isinstance(getattr(each, "value", 0), str) for each in (node.left, node.right)
        )
        joined = isinstance(node.op, ast.Div) and self.group in ("ledger", "lease")  # paths
        if type(node.op) in ARITHMETIC and not words and not joined:
            self.change("arithmetic", node, op=ARITHMETIC[type(node.op)]())
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("assignment left out", node, "pass")
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self.add("constant", node, str(node.value + 1))

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound, sign in ((node.lower, "+"), (node.upper, "-")):
            if bound is not None and not isinstance(bound, ast.Constant):
                self.add("slice", bound, f"({ast.unparse(bound)}) {sign} 1")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            after = f"not ({ast.unparse(node.value)})" if self.predicate else "None"
            self.add("return", node, f"return {after}")
        self.generic_visit(node)


def mutants(root: Path = ROOT) -> Iterator[Mutant]:
    """All faults that there are."""
    for group, paths in GROUPS.items():
        for path in paths.split():
            for file in sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]:
                yield from Sites(group, file.relative_to(root).as_posix(), file.read_bytes()).found


def choose(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """As many of each group, and of an operator drawn for each, at most one in a line; always the same of a seed."""
    rng = random.Random(seed)
    pools: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in found:
        pools[mutant.group][mutant.operator].append(mutant)
    chosen: dict[tuple[str, int], Mutant] = {}
    while len(chosen) < min(count, len({(each.path, each.line) for each in found})):
        for group in pools:
            mutant = rng.choice(pools[group][rng.choice(sorted(pools[group]))])
            if len(chosen) < count:
                chosen.setdefault((mutant.path, mutant.line), mutant)
    return list(chosen.values())


# --- what finds them --------------------------------------------------------------------------------------------------

Tests = list[tuple[str, str]]  # (file, function)


class Bench:
    """A copy of the repository, in which one fault after the other is put, and the tests run against it."""

    def __init__(self, graph: Graph, temp: Path, durations: Mapping[str, float], files: int) -> None:
        self.graph, self.durations, self.files = graph, durations, files
        self.temp = Path(tempfile.mkdtemp(dir=temp))
        self.root = copy(graph, self.temp / "tree")
        self.healthy: set[str] = set()  # tests that were seen to pass without a fault
        self.broken: set[str] = set()  # and that weren't
        self.cpu = 0.0

    def find(self, mutant: Mutant, tiers: Sequence[str]) -> dict[str, Any]:
        """Runs the tests that reach a fault, tier by tier, until one finds it."""
        tests = self.graph.nearest([(mutant.path, mutant.definition)], self.durations)
        near = [*dict.fromkeys(file for file, _ in tests)][: self.files]
        tests = [test for test in tests if test[0] in near]
        start, self.cpu = time.monotonic(), 0.0
        found = (self.meets(mutant, batch, tier) for tier in tiers for batch in forked.batches(tests))
        killed = next(filter(None, found), None)
        took = dict(tests=len(tests), seconds=round(time.monotonic() - start, 1), cpu=round(self.cpu, 1))
        return (killed or dict(survived=list(tiers))) | took

    def meets(self, mutant: Mutant, tests: Tests, tier: str) -> dict[str, Any] | None:
        """Runs tests against a fault until one fails that passes without it; None: none does."""
        while True:
            with planted(mutant, self.root):
                failed = self.run(tests, tier)
            if failed is None:
                return None
            name, how = failed["test"] or tests[0][0], failed["event"]
            if self.passes(name, tier):
                return dict(killed=name, how=how, tier=tier)
            print(f"  {name} fails without the fault, too ({how})", file=sys.stderr, flush=True)
            tests = [test for test in tests if test[0] != name]  # a file that can't be collected

    def passes(self, name: str, tier: str) -> bool:
        """Whether a test, or the collection of a file, does well without any fault."""
        if name not in self.healthy | self.broken:
            file, _, test = name.partition("::")
            failed = self.run([(file, test.partition("[")[0])], tier, only=name if test else "")
            (self.broken if failed else self.healthy).add(name)
        return name in self.healthy

    def run(self, tests: Tests, tier: str, only: str = "") -> dict[str, Any] | None:
        """Runs tests; returns what failed, or ended the run otherwise."""
        options = ["-x", "-q", "-m", forked.TIERS[tier]]
        chosen = forked.Chosen(tests, self.broken, only)
        chosen.settings = HASTE
        events = [*forked.run_tests(self.root, chosen, options, self.temp / "base", LIMIT)]
        shutil.rmtree(self.temp / "base" / "run", ignore_errors=True)
        last = events[-1]
        self.cpu += last["cpu"]
        if failed := [event for event in events if event["event"] == "failed"]:
            return failed[0]
        if last["event"] == "ended" and last["status"] not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"pytest didn't run:\n{(self.temp / 'base' / 'printed').read_text()[-3000:]}")
        return None if last["event"] == "ended" else last


def copy(graph: Graph, folder: Path) -> Path:
    """A copy of the repository as it now is."""
    for path in graph.files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    for link in (path for path in (ROOT / "weightbeam").iterdir() if path.is_symlink()):
        (folder / "weightbeam" / link.name).symlink_to(os.readlink(link))
    return folder


@contextlib.contextmanager
def planted(mutant: Mutant, root: Path) -> Iterator[None]:
    """Context manager: the fault is in a copy."""
    file = root / mutant.path
    source, before = file.read_bytes(), file.stat()
    file.write_bytes(mutant.apply(source))
    os.utime(file, (zlib.crc32(mutant.key.encode()),) * 2)  # what was compiled isn't taken for it, nor for the next one
    try:
        yield
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


# --- the program ------------------------------------------------------------------------------------------------------


_bench: list[Bench] = []  # of a worker process


def _start(*arguments: Any) -> None:
    _bench.append(Bench(*arguments))


def _find(mutant: Mutant, tiers: Sequence[str]) -> dict[str, Any]:
    return _bench[0].find(mutant, tiers)


def is_done(known: Mapping[str, Any], tiers: Sequence[str]) -> bool:
    """Whether nothing is left to try."""
    return "killed" in known or set(tiers) <= set(known.get("survived", ()))


def line(number: int, name: str, found: Mapping[str, Any]) -> str:
    """A mutant's line in the table."""
    took = f"{found['seconds']:6.0f} s {found['cpu']:6.0f} cpu"
    if "killed" not in found:
        return f"{number:3} SURVIVED {took}  {name}  ({found['tests']} tests reach it)"
    how = "" if found["how"] == "failed" else f", {found['how']}"
    return f"{number:3} killed   {took}  {name}  by {found['killed']} ({found['tier']}{how})"


def try_all(
    mutants: Mapping[int, Mutant], tiers: Sequence[str], jobs: int, files: int, results: Path
) -> dict[int, Any]:
    """Tries faults, tells of each, and returns (and keeps) what is known of all, by their numbers in the table."""
    durations = forked.durations()
    known: dict[str, Any] = json.loads(results.read_bytes()) if results.is_file() else {}
    left = {number: each for number, each in mutants.items() if not is_done(known.get(each.key, {}), tiers)}
    forked.warm()
    graph = Graph()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temp:
        forking = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(
            jobs, forking, _start, (graph, Path(temp), durations, files)
        ) as pool:
            running = {}
            for number, mutant in left.items():
                before = known.get(mutant.key, {}).get("survived", ())
                running[pool.submit(_find, mutant, [tier for tier in tiers if tier not in before])] = (
                    number,
                    mutant,
                    before,
                )
            for future in concurrent.futures.as_completed(running):
                number, mutant, before = running[future]
                found = future.result()
                if "survived" in found:  # a first look doesn't count
                    found["survived"] = [*before, *found["survived"]] if files == ALL else [*before]
                known[mutant.key] = found
                results.parent.mkdir(parents=True, exist_ok=True)
                results.write_text(json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
                print(line(number, str(mutant), found), flush=True)
    return {number: known[mutant.key] for number, mutant in mutants.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100, help="so many faults")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only those of these numbers in the table")
    parser.add_argument(
        "--tier", choices=[*forked.TIERS, "all"], default="all", help="whose tests (all: one after the other)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    parser.add_argument("--files", type=int, default=ALL, help="only the nearest files of tests, for a first look")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "mutants.json", help="kept there, gone on from")
    parser.add_argument("--list", action="store_true", help="only say what they are")
    args = parser.parse_args()
    chosen = dict(enumerate(choose([*mutants()], args.count, args.seed), 1))
    if args.list:
        print("\n".join(f"{number:3} {mutant}" for number, mutant in chosen.items()))
        return 0
    only = {number: chosen[number] for number in args.only} if args.only else chosen
    tiers = [*forked.TIERS] if args.tier == "all" else [args.tier]
    found = try_all(only, tiers, args.jobs, args.files, args.results)
    survived = [number for number in only if "killed" not in found[number]]
    print(f"{len(only) - len(survived)} of {len(only)} killed, by {' and '.join(tiers)}; seed {args.seed}. Survivors:")
    print("\n".join(f"{number:3} {only[number]}" for number in survived) or "  none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
