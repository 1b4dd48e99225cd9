"""What docs/reference/python.md says of every value that a call returns, tried for a real model: its text, a short `repr`, HTML,
`to_dict` and `to_json`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LLAMA, random_tensors, save

import weightbeam as wb
from weightbeam import pipelines
from weightbeam.model_mappings.values import BRIEF, Value
from weightbeam.pipelines.cli import main

MODEL = LLAMA | dict(hidden_size=256, intermediate_size=256, vocab_size=512)
NAME = "llama2-7b"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a release, `hf`, and what was made of it."""
    folder = tmp_path_factory.mktemp("values")
    save(folder / "hf", MODEL, random_tensors(MODEL))
    return folder


CALLS: dict[str, Callable[[str], Any]] = {  # in this order: some take what those before made
    "plan": lambda at: wb.plan(f"{at}/hf", mesh="fsdp=2", maxtext_model=NAME),
    "convert": lambda at: wb.convert(f"{at}/hf", f"{at}/ckpt", maxtext_model=NAME),
    "convert, finished": lambda at: wb.convert(f"{at}/hf", f"{at}/ckpt", maxtext_model=NAME, resume=True),
    "convert, virtual": lambda at: wb.convert(
        f"{at}/hf", f"{at}/virtual", maxtext_model=NAME, virtual=True, scan_layers=False
    ),
    "verify": lambda at: wb.verify(f"{at}/ckpt"),
    "inspect": lambda at: wb.inspect(f"{at}/ckpt"),
    "inspect, a release": lambda at: wb.inspect(f"{at}/hf"),
    "inspect, on a mesh": lambda at: wb.inspect(f"{at}/ckpt", mesh="fsdp=2"),
    "export": lambda at: wb.export(f"{at}/ckpt", f"{at}/exported"),
    "verify, an export": lambda at: wb.verify(f"{at}/exported"),
    "reshard": lambda at: wb.reshard(f"{at}/ckpt", f"{at}/resharded", scan_layers=False),
    "cut": lambda at: wb.cut(f"{at}/hf", f"{at}/small", layers="0:1"),
    "quantize": lambda at: wb.quantize(f"{at}/hf", f"{at}/fp8"),
    "dequantize": lambda at: wb.dequantize(f"{at}/fp8", f"{at}/bf16"),
    "diff": lambda at: wb.diff(f"{at}/hf", f"{at}/fp8"),
    "materialize": lambda at: wb.materialize(f"{at}/virtual", f"{at}/whole"),
    "fit": lambda at: wb.fit(f"{at}/hf", NAME),
    "maxtext_config": lambda at: wb.maxtext_config(f"{at}/hf"),
    "open": lambda at: wb.open(f"{at}/hf"),
}


@pytest.fixture(scope="module")
def made(at: Path) -> dict[str, Any]:
    """What each call returns."""
    return {name: call(str(at)) for name, call in CALLS.items()}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no table is fitted."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.mark.parametrize("name", CALLS)
def test_every_value(name: str, made: dict[str, Any], at: Path) -> None:
    """However large the model: a line at a prompt, all of it as text, as HTML and as JSON."""
    value = made[name]
    assert isinstance(value, Value)
    assert "\n" not in repr(value)
    assert repr(value).startswith(f"<weightbeam.{type(value).__name__}: ")
    assert len(repr(value)) <= BRIEF + 50
    assert str(at) in repr(value) or name == "maxtext_config"
    text, page = str(value), value._repr_html_()
    assert len(text) > 20
    assert "object at" not in text
    assert page.startswith(("<pre", "<table"))
    tables = page.count("<table")  # behind each the text has an empty line
    assert text.count("\n") <= page.count("\n") + page.count("<tr>") + page.count("<pre") + max(2, tables)
    assert json.loads(value.to_json()) == json.loads(json.dumps(value.to_dict()))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("verify", ["verify", "{at}/ckpt"]),
        ("inspect", ["inspect", "{at}/ckpt"]),
        ("diff", ["diff", "{at}/hf", "{at}/fp8"]),
        ("fit", ["fit", "{at}/hf", NAME]),
        ("convert, finished", ["convert", "{at}/hf", "{at}/ckpt", "--maxtext_model", NAME, "--resume"]),
    ],
)
def test_the_text_is_the_commands(
    name: str, command: list[str], made: dict[str, Any], at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([word.format(at=at) for word in command])
    printed = capsys.readouterr().out
    made[name].show()
    assert capsys.readouterr().out == printed
    assert "".join(str(made[name]).split()) == "".join(printed.split())


def subclasses(of: type) -> Iterator[type]:
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


def test_no_value_has_a_repr_of_its_own() -> None:
    """A dataclass's would hold the whole plan."""
    for module in pkgutil.walk_packages(pipelines.__path__, "weightbeam.pipelines."):
        importlib.import_module(module.name)
    found = [each for each in subclasses(Value) if each.__module__.startswith("weightbeam.")]  # not the tests' own
    assert len(found) > 15
    assert [each.__name__ for each in found if "__repr__" in vars(each)] == []
    assert [each.__name__ for each in found if not each.__subclasses__() and each.to_dict is Value.to_dict] == []
