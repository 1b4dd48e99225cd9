"""The docstrings of the face: each says what it takes, returns and raises, and its example runs."""

from __future__ import annotations

import doctest
import sys
from importlib import import_module as module
from pathlib import Path

import pytest
from support import LLAMA, make_release, peft_adapter

import weightbeam as wb
from deploy.site import code
from weightbeam.formats.storage import File, Store
from weightbeam.pipelines.api import HOMES

FUNCTIONS = [name for name in HOMES if hasattr(getattr(wb, name), "__wrapped__")]
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=256, head_dim=16)
QWEN3 = (
    LLAMA | SIZES | dict(model_type="qwen3", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
)
ADAPTED = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in range(2)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples name: a release, the same in FP8, an adapter for it, and a checkpoint made of it."""
    folder = tmp_path_factory.mktemp("examples")
    release = make_release(folder / "models" / "qwen3", QWEN3)
    wb.quantize(str(release), f"{release}-fp8", progress=False)
    wb.convert(str(release), str(folder / "ckpt"), progress=False)
    peft_adapter(folder / "adapter", ADAPTED)
    return folder


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_function_runs(name: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands; what only differs from machine to machine is `...` there."""
    monkeypatch.chdir(models)
    function = getattr(wb, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(function, name, module=False, globs={"wb": wb})
    assert found.examples
    shown: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(found, out=shown.append).failed == 0, "".join(shown)


@pytest.mark.parametrize("home", code.EXTENDING)
def test_the_examples_of_what_others_build_on_run(home: str) -> None:
    """At least one beside each of these interfaces."""
    modules = [
        sys.modules[each] for each in sorted({getattr(module(home), n).__module__ for n in code.EXTENDING[home]})
    ]
    ran = [doctest.testmod(each, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE) for each in modules]
    assert [each.failed for each in ran] == [0] * len(ran)
    assert all(each.attempted for each in ran)


def test_the_public_names_are_documented() -> None:
    """What they take, return and raise; what the values have; and what others build on."""
    assert code.undocumented() == []


def test_what_a_docstring_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(source: str, *, beam: str = "") -> None:
        """Does it.

        Args:
          source: a folder.

        Raises:
          Refused: it can't.
        """

    monkeypatch.setattr(wb, "fit", bare, raising=False)
    assert code.undocumented() == ["fit: no Returns:", "fit: no Example:", "fit: no word on beam"]


def test_what_an_interface_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that takes something says what, and what it gives for it."""

    def exists(self: Store, name: str) -> bool:
        """Whether there is such a file."""
        return bool(name)

    def stat(self: Store, name: str) -> File | None:
        """What is known.

        Args:
          name: of a file.

        Returns:
          One of two: a file, or None.
        """

    monkeypatch.setattr(Store, "exists", exists)
    monkeypatch.setattr(Store, "stat", stat)
    missing = [each.partition(", for")[0] for each in code.undocumented()]
    lacks = [f"Store.exists: no {part}" for part in ("Args:", "Returns:", "word on name")]
    assert missing == ["Store.stat: no type before a colon in Returns", *lacks]
