"""Messages name options as their reader writes them, and every refusal holds its problems."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support import LLAMA, random_tensors, save

import weightbeam as wb
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines import api
from weightbeam.pipelines.terminal import wording
from weightbeam.pipelines.terminal.arguments.commands import COMMANDS, SHELL
from weightbeam.pipelines.terminal.arguments.parser import make_parser
from weightbeam.pipelines.terminal.errors import Busy, Failed, Refused
from weightbeam.pipelines.terminal.keywords import read_options
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import Block, Table
from weightbeam.pipelines.terminal.wording import FUNCTIONS, KEYWORDS, at_the_shell, worded
from weightbeam.transforms.planning.options import ConvertOptions


@dataclasses.dataclass(frozen=True)
class One(Shown):
    """A value that shows one table."""

    table: Table

    def blocks(self) -> Iterable[Block]:
        return [self.table]


@pytest.mark.parametrize(
    ("typed", "called"),
    [
        ("go on with --resume, or start anew with --overwrite", "go on with resume=True, or start anew with overwrite=True"),
        ("the same command with --resume goes on", "the same call with resume=True goes on"),
        ("--output is missing: the folder", "output= is missing: the folder"),
        ("choose another --output or --step", "choose another output= or step="),
        ("--like names a release of it", "like= names a release of it"),
        ("--like RELEASE takes it", "like=RELEASE takes it"),
        ("--state params takes the weights", 'state="params" takes the weights'),
        ("--multimodal false writes it", "multimodal=False writes it"),
        ("needs --use_ocdbt true and --use_zarr3 true: only", "needs use_ocdbt=True and use_zarr3=True: only"),
        ("--mesh=fsdp=8: no axis", 'mesh="fsdp=8": no axis'),
        ("as in --mesh fsdp=16", 'as in mesh="fsdp=16"'),
        ("--output=/a/b: exists", "output=/a/b: exists"),
        ("--vocab_size=100 asks", "vocab_size=100 asks"),
        ("--lora_alpha: is of an adapter", "lora_alpha: is of an adapter"),
        ("--link symlink refers to it, --link copy copies it", 'link="symlink" refers to it, link="copy" copies it'),
        ("can't be put there (--link hard): why", 'can\'t be put there (link="hard"): why'),
        ("convert with --maxtext_model llama3.1-70b (or -8b)", 'convert with maxtext_model="llama3.1-70b" (or -8b)'),
        ("give --vocab_size 262208, or run", "give vocab_size=262208, or run"),
        ("if that is meant: --accept tokenizer.json", 'if that is meant: accept="tokenizer.json"'),
        ("if that is meant: --accept rope_theta", 'if that is meant: accept="rope_theta"'),
        ("--lora '/a b/c' merges it", 'lora="/a b/c" merges it'),
        ("--lora hf://me/it merges it", 'lora="hf://me/it" merges it'),
        ("merge it instead, without --adapter_only", "merge it instead, without adapter_only=True"),
        ("left out: convert it with --mtp", "left out: convert it with mtp=True"),
        ("leave --multimodal out", "leave multimodal= out"),
        ("--virtual: leaves the bytes", "virtual: leaves the bytes"),
        ("(--mesh was fsdp=4, is fsdp=8)", "(mesh was fsdp=4, is fsdp=8)"),
        ("… and 17 more; --json FILE has all", "… and 17 more; to_json() has all"),
        # a command is the call that does the same
        ("weightbeam reshard /a /b --state params", 'weightbeam.reshard("/a", "/b", state="params")'),
        ("compare:  weightbeam diff '/a b/c' q", 'compare:  weightbeam.diff("/a b/c", "q")'),
        ("compares them:\n  weightbeam diff a b", 'compares them:\n  weightbeam.diff("a", "b")'),
        ("how much? weightbeam diff a b", 'how much? weightbeam.diff("a", "b")'),
        ("say where it is: weightbeam verify SOURCE q", 'say where it is: weightbeam.verify("q", SOURCE)'),
        ("check it: weightbeam verify --source gs://a --checkpoint b", 'check it: weightbeam.verify(source="gs://a", checkpoint="b")'),
        ("  weightbeam convert a OUT --virtual --mesh fsdp=8 --mesh tensor=2", '  weightbeam.convert("a", OUT, virtual=True, mesh=["fsdp=8", "tensor=2"])'),
        ("weightbeam inspect '/a b' lists what it holds.", 'weightbeam.inspect("/a b") lists what it holds.'),
        ("weightbeam export writes it, which weightbeam convert takes", "weightbeam.export writes it, which weightbeam.convert takes"),
        ("already: weightbeam inspect, verify and export take it", "already: weightbeam.inspect, verify and export take it"),
        ("weightbeam diff compares them, or --lora names it", "weightbeam.diff compares them, or lora= names it"),
        ("`weightbeam reshard --lora` merges it; --lora", "`weightbeam.reshard(…, lora=…)` merges it; lora="),
        ("; weightbeam plan --virtual says why", "; weightbeam.plan(…, virtual=True) says why"),
        ("2 more; plan and --dry_run list all with --json -; --resume", "2 more; .problems has all; resume=True"),
        # Beam's options, and commands without a function, are the same in both
        ("`weightbeam help virtual` says it", "`weightbeam help virtual` says it"),
        ("--runner=FlinkRunner: no such", "--runner=FlinkRunner: no such"),
    ],
)  # fmt: skip
def test_both_languages(typed: str, called: str) -> None:
    """What is typed at a shell, and what is called; what is said once isn't changed again."""
    assert worded(typed) == called == worded(called)
    with at_the_shell():
        assert worded(typed) == typed


def literals(file: Path) -> Iterator[str]:
    """The texts in a module that aren't docstrings; what a text is filled with is X1."""
    tree = ast.parse(file.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def test_every_message_is_reworded() -> None:
    """Whoever calls functions reads no option of theirs as a shell has it, and no command, in any text of the code."""
    package = Path(wording.__file__).parents[2]
    shell = {package / "pipelines" / "terminal" / name for name in ("arguments", "wording.py")}
    texts = [
        text
        for name in ("pipelines", "transforms", "formats", "model_mappings")
        for file in (package / name).rglob("*.py")
        if not shell.intersection((file, *file.parents))
        for text in literals(file)
    ]
    asked = [text for text in texts if re.search(r"--[a-z]\w+|weightbeam [a-z]", text)]
    assert len(asked) > 300
    for text in asked:
        called = re.sub(r"weightbeam (?!{})[a-z].*".format("|".join(FUNCTIONS)), "", worded(text))  # of the shell alone
        assert not KEYWORDS.intersection(re.findall(r"--([a-z]\w+)", called)), text
        assert not FUNCTIONS.keys() & {*re.findall(r"weightbeam ([a-z]+)", called)}, text


def test_the_options_that_are_keywords() -> None:
    """Are all of them."""
    commands = next(action for action in make_parser()._actions if action.dest == "command")
    options = {action.dest for command in dict(commands.choices or {}).values() for action in command._actions}  # type: ignore[call-overload]
    functions = [function for name in api.HOMES if inspect.isfunction(function := getattr(api, name))]
    keywords = {name for function in functions for name in inspect.signature(function).parameters}
    assert options & keywords - SHELL == KEYWORDS


def test_the_commands_that_are_functions() -> None:
    """Are all of them, with the places that both have."""
    assert FUNCTIONS.keys() == COMMANDS.keys() & api.HOMES.keys()
    for name, places in FUNCTIONS.items():
        parameters = inspect.signature(getattr(api, name)).parameters.values()
        takes = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
        assert takes == list(reversed(places) if name == "verify" else places)
        assert [place for place in COMMANDS[name].places if place in takes] == list(places)


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("--output is missing: where", [("option", "output")]),
        ("--mesh=fdsp=8: no axis 'fdsp'", [("option", "mesh")]),
        ("sample=2 should be a number", [("option", "sample")]),
        ("like=… or mesh=… is missing: nobody knows", [("option", "like")]),
        ("/a b/c: no such folder; did you mean hf://c?", [("path", "/a b/c")]),
        ("nowhere: no such folder", [("path", "nowhere")]),
        ("hf://a/b: no such repository", [("path", "hf://a/b")]),
        ("the files have changed:\n  a\n  b", [("call", "")]),
        ("", [("call", "")]),
    ],
)
def test_a_refusal_without_problems_has_them(message: str, wanted: list[tuple[str, str]]) -> None:
    """One for each that its message tells, in either language, in another process, too."""
    for kind in (Refused, Busy):
        assert [(problem.kind, problem.subject) for problem in kind(message).problems] == wanted
        with at_the_shell():
            assert [(problem.kind, problem.subject) for problem in kind(message).problems] == wanted
        again = pickle.loads(pickle.dumps(kind(message)))
        assert (str(again), again.problems) == (str(kind(message)), kind(message).problems)


def test_several_reasons() -> None:
    """Are as many lines, and as many problems."""
    there = Problem("output", "/a/0", "another conversion is at work there")
    refused = Refused("--source is missing: what", there, Problem("link", "", "a isn't a local file"))
    assert str(refused).splitlines() == ["source= is missing: what", f"  {there}", "  link: a isn't a local file"]
    assert [(problem.kind, problem.subject) for problem in refused.problems] == [
        *(("option", "source"), ("output", "/a/0"), ("link", ""))
    ]


def test_problems_that_are_given() -> None:
    """Are kept, each in its reader's words."""
    given = [Problem("virtual", "--virtual", "leaves the bytes as they are; convert without --virtual")]
    (told,) = Refused("1 problem:\n…", problems=given).problems
    assert (told.subject, told.message) == ("virtual", "leaves the bytes as they are; convert without virtual=True")
    with at_the_shell():
        assert Refused("1 problem:\n…", problems=given).problems == tuple(given)
    assert str(Failed("  went wrong; the same command with --resume goes on")).endswith("resume=True goes on")


def test_tables_and_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a plan, and of what a call says meanwhile."""
    source = save(tmp_path / "source", LLAMA, random_tensors(LLAMA))
    (source / "adapter_model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    table = Table("why")
    table.add_row("vision tower, convert it with --multimodal true")
    assert "multimodal=True" in str(One(table))
    assert "multimodal=True" in One(table)._repr_html_()
    with at_the_shell():
        assert "--multimodal true" in str(One(table))
    (warning,) = wb.plan(str(source)).warnings
    assert warning.endswith(f'lora="{source}" merges it')
    wb.convert(str(source), str(tmp_path / "out"), progress=False)
    assert warning in caplog.messages


@pytest.mark.parametrize("value", [True, False])
def test_true_of_an_option_with_more_than_two_values(value: bool) -> None:
    """As messages advise it."""
    assert read_options(ConvertOptions, {"check_source": value}).check_source == str(value).lower()
