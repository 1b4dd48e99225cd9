"""What `make check` and `make mutants` stand on: which tests reach what, and that a fault that is put in is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import check
import mutants
import pytest
from processes import run
from reach import ROOT, Graph, Node

SOURCE = b'''"""A module of 3 lines."""
SIZES: tuple[int, ...] = (7,)


def first(values: list[int], strict: bool = True) -> bool:
    """Whether 1 == 1."""
    if not values or values[1:size] == SIZES:
        raise ValueError(f"{len(values) + 1} values")
    for value in values:
        if value < 2 and strict:
            continue
        print("no faults in what is shown", 5)
        values.append(value)
    return value in SIZES


class Box:
    def __repr__(self) -> str:
        return "4" * 4
'''
TRACE = """
import json, pathlib, sys, pytest
root, called, now = pathlib.Path().resolve(), set(), []
class Plugin:
    def pytest_runtest_call(self, item): now.append(item.originalname)
    def pytest_runtest_teardown(self, item): now.clear()
def trace(frame, event, _):
    if now and event == "call":
        called.add((now[0], frame.f_code.co_filename, frame.f_code.co_qualname.partition(".")[0]))
sys.setprofile(trace)
pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Plugin()])
sys.setprofile(None)
real = {file: pathlib.Path(file).resolve() for _, file, _ in called}
ours = [(test, str(real[file].relative_to(root)), name) for test, file, name in called if real[file].is_relative_to(root)]
print("\\n" + json.dumps(ours))
"""
FOUND = """
2 constant: 7 -> 8
5 constant: True -> False
7 and, or: not values or values[1:size] == SIZES -> (not values and values[1:size] == SIZES)
7 not left out: not values -> (values)
7 comparison: values[1:size] == SIZES -> (values[1:size] != SIZES)
7 constant: 1 -> 2
7 slice: size -> (size) - 1
8 raise left out: raise ValueError(f"{len(values) + 1} values") -> pass
10 and, or: value < 2 and strict -> (value < 2 or strict)
10 comparison: value < 2 -> (value <= 2)
10 constant: 2 -> 3
11 continue left out: continue -> pass
13 call left out: values.append(value) -> pass
14 comparison: value in SIZES -> (value not in SIZES)
14 return: return value in SIZES -> return not (value in SIZES)
"""


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph()


def near(graph: Graph, *nodes: Node) -> dict[str, int]:
    """The files of tests that reach a definition, and by how many imports."""
    found: dict[str, int] = {}
    for (file, _), distance in graph.reaching(nodes).items():
        found[file] = min(distance, found.get(file, distance))
    return found


@pytest.mark.slow("of a tool that only developers use, half a minute of a processor")
def test_near_tests_come_first(graph: Graph) -> None:
    """Those of the module's own file before the commands, and before what has nothing to do with it."""
    found = near(graph, ("formats/staging/lease.py", "hold"))
    assert found["tests/formats/test_lease.py"] == 1
    assert found["tests/formats/test_lease.py"] < found["tests/pipelines/test_resume.py"]
    assert "tests/model_mappings/test_cells.py" not in found
    order = [file for file, _ in graph.nearest([("formats/staging/lease.py", "hold")], {})]
    assert order.index("tests/formats/test_lease.py") < order.index("tests/pipelines/test_resume.py")


@pytest.mark.parametrize(
    ("node", "test"),
    [
        pytest.param(("pipelines/commands/diff.py", "diff"), ("tests/pipelines/test_api.py", ""), id="the face, an attribute"),
        pytest.param(("pipelines/watching/watch.py", "run"), ("tests/pipelines/test_watch.py", ""), id="-m in a string"),
        pytest.param(("pipelines/commands/verify.py", "run"), ("tests/pipelines/test_verify.py", ""), id="main(['verify', …])"),
        pytest.param(("pipelines/entry.py", "run"), ("tests/pipelines/test_terminal.py", ""), id="a program's text"),
        pytest.param(("tests/cases/models.py", "write"), ("tests/pipelines/test_transformers.py", ""), id="a script that a fixture runs"),
        pytest.param(("formats/encodings/fp8.py", "_entry"), ("tests/formats/test_encodings_fp8.py", ""), id="a table of another module"),
        pytest.param(("examples/demo.py", "main"), ("tests/test_readme.py", ""), id="an example"),
    ],
)  # fmt: skip
def test_every_way_of_use_is_seen(graph: Graph, node: Node, test: Node) -> None:
    nodes = [node] if node in graph.edges else graph.whole(node[0])
    assert test[0] in near(graph, *nodes)


def test_a_command_that_is_not_named_is_not_reached(graph: Graph) -> None:
    """`test_lease.py` runs `convert` alone, and never compares two checkpoints."""
    assert "tests/formats/test_lease.py" not in near(graph, ("pipelines/commands/diff.py", "diff"))


def test_a_golden_file_leads_to_its_test(graph: Graph) -> None:
    readers = {path for path, _ in graph.reading("tests/golden/llama-scanned.txt")}
    assert "tests/model_mappings/test_golden_plans.py" in readers
    assert "tests/test_docs.py" in {path for path, _ in graph.reading("docs/howto/lora.md")}


@pytest.mark.slow("of a tool that only developers use, half a minute of a processor")
def test_what_is_called_is_reached(graph: Graph) -> None:
    """A trace of real tests: every function of the project that they call is in the graph as reached by them."""
    file = "tests/transforms/test_units.py"
    ran = run(sys.executable, "-c", TRACE, file, cwd=ROOT)
    called = json.loads(ran.stdout.splitlines()[-1])
    nodes = graph.edges.keys() - graph.whole("tests/conftest.py")  # pytest calls its hooks
    seen = {(test, path, name) for test, path, name in called if (path, name) in nodes}
    assert len(seen) > 100
    assert {each for each in seen if each[1:] not in graph.distances((file, each[0]))} == set()


def test_the_operators() -> None:
    """Every fault of a small module: none in docstrings, messages, annotations, and what is printed."""
    sites = mutants.Sites("kernels", "a.py", SOURCE).found
    told = sorted((each.line, each.operator, each.before, each.after) for each in sites)
    wanted = [line.split(" ", 1) for line in FOUND.strip().splitlines()]
    assert told == sorted(
        (int(number), *rest.split(": ", 1)[:1], *rest.split(": ", 1)[1].split(" -> ")) for number, rest in wanted
    )
    (slip,) = [each for each in sites if each.operator == "slice"]
    assert slip.apply(SOURCE) == SOURCE.replace(b"[1:size]", b"[1:(size) - 1]")


def test_every_fault_of_the_project_is_another_program() -> None:
    """It compiles; a hundred are of all groups and operators, and the same for the same seed."""
    found = [*mutants.mutants()]
    chosen = mutants.choose(found, 100, 0)
    assert chosen == mutants.choose(found, 100, 0) != mutants.choose(found, 100, 1)
    assert len({(each.path, each.line) for each in chosen}) == 100
    assert {each.group for each in chosen} == set(mutants.GROUPS)
    assert {each.operator for each in chosen} == {each.operator for each in found}
    for mutant in chosen:
        source = (ROOT / mutant.path).read_bytes()
        assert compile(mutant.apply(source), mutant.path, "exec").co_code
        assert source[mutant.start : mutant.end].decode() == mutant.before


@pytest.mark.slow("whole runs of the tests, for a tool that only developers use: a minute of a processor")
def test_a_planted_fault_is_found_and_a_harmless_one_is_not(tmp_path: Path) -> None:
    """In a process of its own, as `make mutants` runs: `a < b` for `a <= b` in an operation is found by its own test,
    and the checkout isn't touched; a line that says the same in other words isn't found.
    """
    path = "model_mappings/boxes.py"
    source = (ROOT / path).read_bytes()
    program = f"""
import json, pathlib, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import forked, mutants
from mutants import *
graph, source = Graph(), (ROOT / {path!r}).read_bytes()
bench = Bench(graph, pathlib.Path({str(tmp_path)!r}), {{}}, 1)
sites = [each for each in Sites("kernels", {path!r}, source).found if each.definition == "extent"]
fault = next(each for each in sites if each.operator == "return")
harmless = dataclasses.replace(fault, after=fault.before + "  # no other")
print(json.dumps([bench.find(each, ["test"]) for each in (fault, harmless)]))
print((bench.root / {path!r}).read_bytes() == source)
"""
    ran = run(sys.executable, "-c", program, cwd=tmp_path, timeout=900, status=0)
    told, unchanged = ran.stdout.splitlines()[-2:]
    fault, harmless = json.loads(told)
    assert (fault["tier"], fault["killed"].startswith("tests/")) == ("test", True)
    assert harmless["survived"] == ["test"]
    assert harmless["tests"] > 0
    assert unchanged == "True"
    assert (ROOT / path).read_bytes() == source


def test_what_changed_is_told_by_lines(graph: Graph) -> None:
    """A changed line counts for its definition; one between definitions for all; a page for the tests that read it."""
    path = "formats/staging/lease.py"
    (first,) = graph.modules[path].definitions["hold"]
    lines = range(first.end_lineno, first.end_lineno + 1)
    assert check.changed_definitions(graph, {path: [lines]}) == {(path, "hold")}
    assert check.changed_definitions(graph, {path: [range(1, 2)]}) == graph.whole(path)
    assert any(file == "tests/test_docs.py" for file, _ in check.changed_definitions(graph, {"docs/howto/lora.md": []}))
