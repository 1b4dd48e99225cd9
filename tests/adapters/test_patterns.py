"""Regular expressions of adapters: the same answers as `re` gives PEFT, and an end, whatever they are."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support import LLAMA, call, random_tensors, save

from weightbeam.formats.adapters.config import AdapterConfig, read_config
from weightbeam.formats.adapters.patterns import PatternError, Patterns, parse

MODULE = "model.layers.11.self_attn.q_proj"
LETTERS = st.sampled_from("ab.1_")
ONE = LETTERS.map(re.escape) | st.sampled_from([".", r"\d", r"\w", r"\S", "[ab]", "[^a1]", "[a-c.]"])
AROUND = st.sampled_from([r"\b", r"\B", "(?<=a)", "(?<!a.)", r"(?<=\b[ab])"])
EXPRESSIONS = st.recursive(
    ONE | AROUND,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
        | st.tuples(st.sampled_from("=!"), inner).map(lambda two: f"(?{two[0]}{two[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{0,2}", "{1,}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        )
    ),
    max_leaves=6,
)
WHOLE = st.tuples(st.sampled_from(["", "^", ".*"]), EXPRESSIONS, st.sampled_from(["", "$", ")|(a"])).map("".join)


@settings(max_examples=500, deadline=None)
@given(WHOLE, st.text("ab.1_", min_size=1, max_size=9))  # `\B` of an empty one depends on Python
def test_the_same_as_pefts(pattern: str, module: str) -> None:
    """`get_pattern_key` (peft, utils/other.py) matches this expression."""
    wanted = bool(re.match(rf"(.*\.)?({pattern})$", module))
    assert Patterns({pattern: True}).find(module, False) is wanted


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("ab.*", min_size=1, max_size=4), unique=True), st.text("ab.", max_size=6))
def test_the_first_that_fits(patterns: list[str], module: str) -> None:
    """Of names and others in any order."""
    known = {}
    for number, pattern in enumerate(patterns):
        try:
            parse(pattern)
        except PatternError:
            with pytest.raises(re.error):
                re.compile(pattern)
        else:
            known[pattern] = number
    wanted = next((value for pattern, value in known.items() if re.match(rf"(.*\.)?({pattern})$", module)), None)
    assert Patterns(known).find(module, None) == wanted


@pytest.mark.parametrize(
    ("pattern", "alpha"),
    [
        ("(.*)*x", 8.0),
        ("(.*)*proj", 1.0),
        ("(((a|b|.)*)*)*[^j]", 8.0),
        ("(.*)(.*)(.*)(.*)(.*)(.*)(.*)x", 8.0),
        ("(([a-z._0-9]+)+)+!", 8.0),
        ("((.{1,60}){1,60}){1,60}x", 8.0),
        (".{0,4000000000}x", 8.0),
        ("(?=(.*)*y)x", 8.0),
        ("((?!(.*)*y).)*proj", 1.0),
        (r"layers\.(1|11|12)\.self_attn\.[qk]_proj", 1.0),
        (r"^model\.layers\.[0-9]+\..*\.q_proj", 1.0),
    ],
)
def test_what_backtracks_ends(pattern: str, alpha: float) -> None:
    """With the right answer, at once."""
    config = AdapterConfig(alpha_pattern={pattern: 1.0})
    start = time.process_time()
    assert config.scaling(MODULE) * config.r == alpha
    assert time.process_time() - start < 1


def test_many_patterns_and_modules() -> None:
    """As EVA writes them: a pattern for each module."""
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(50) for j in range(100)]
    config, start = AdapterConfig(rank_pattern={name: i + 1 for i, name in enumerate(names)}), time.process_time()
    assert [config.rank(name) for name in names] == list(range(1, len(names) + 1))
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(?<=a*)x", "isn't a regular expression that is supported"),
        (r"(a)\1", "isn't a regular expression that is supported"),
        ("(?i:a)", "isn't a regular expression that is supported"),
        ("(?>a*)a", "isn't a regular expression that is supported"),
        ("(" * 300 + "a" + ")" * 300, "isn't a regular expression"),
        ("(" * 30 + "a" + ")" * 30, "more than 20 deep"),
        ("a{99999999999}", "isn't a regular expression"),
        ("a" * 1001, "has more than 1,000 characters"),
        ("[", "isn't a regular expression"),
    ],
)
def test_what_isnt_supported_is_said(pattern: str, said: str) -> None:
    """Before anything is matched."""
    _, (problem,) = read_config({"peft_type": "LORA", "r": 4, "alpha_pattern": {pattern: 1}})
    assert said in problem.message


@pytest.mark.parametrize(
    ("pattern", "patterns", "name", "modules"),
    [
        ("((" + ".?" * 200 + ")*)*[!?]{{{}}}", 1000, MODULE + ".{}", 1000),
        (".*" + "(?=a)" * 150 + ".{{{}}}x", 8, "x{}" + "a" * 9_000, 1000),
        ("z[ab]q{}[ab]+", 9000, MODULE + ".{}", 18_000),
    ],
    ids=["repetitions", "places from which it looks ahead", "texts that stand in no name"],
)
def test_too_much_is_refused(pattern: str, patterns: int, name: str, modules: int) -> None:
    """Expressions that take long, each with each module: took minutes."""
    config = AdapterConfig(rank_pattern={pattern.format(number): 1 for number in range(1, patterns + 1)})
    start = time.process_time()
    with pytest.raises(PatternError, match="take too long"):
        _ = [config.rank(name.format(number)) for number in range(modules)]
    assert time.process_time() - start < 30


def test_every_command_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`merge`, `convert`, `plan` and `export`, with an expression that never ended; the delta has the right scaling."""
    tensors = random_tensors(LLAMA)
    base = save(tmp_path / "base", LLAMA, tensors)
    adapter, plain = tmp_path / "adapter", tmp_path / "plain"
    for folder, patterns in ((adapter, {"(.*)*x": 1}), (plain, {})):
        folder.mkdir()
        fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "alpha_pattern": patterns}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        factors = {"A": np.ones((4, 32), np.float32), "B": np.ones((32, 4), np.float32)}
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        save_file(
            {f"{name}.lora_{factor}.weight": values for factor, values in factors.items()},
            folder / "adapter_model.safetensors",
        )
    llama = ("--maxtext_model", "llama2-7b")
    assert call("plan", "--source", base, "--lora", adapter, *llama) == 0
    assert call("merge", base, tmp_path / "out", "--lora", adapter) == 0
    assert call("merge", base, tmp_path / "wanted", "--lora", plain) == 0
    wanted = (tmp_path / "wanted" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == wanted
    assert call("convert", "--source", base, "--output", tmp_path / "ckpt", "--lora", adapter, *llama) == 0
    assert call("export", tmp_path / "ckpt", tmp_path / "back", "--lora", adapter, "--dry_run") == 0
    capsys.readouterr()


KINDS = [*(f"self_attn.{letter}_proj" for letter in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
MODULES = [f"model.layers.{layer}.{kind}" for layer in range(80) for kind in KINDS]
EXPERTS = [
    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
    for layer in range(48)
    for expert in range(128)
    for part in ("gate", "up", "down")
]


@pytest.mark.parametrize(
    ("patterns", "modules", "ranks"),
    [
        ([f"^{name}" for name in MODULES], MODULES, range(1, 561)),
        ([rf"layers\.{layer}\..*" for layer in range(80)], MODULES, [layer + 1 for layer in range(80) for _ in KINDS]),
        (["^model.layers.0.self_attn.q_proj"], [*EXPERTS, MODULES[0]], [8] * len(EXPERTS) + [1]),
    ],
    ids=["each", "layers", "experts"],
)
def test_ordinary_patterns_take_no_time(patterns: list[str], modules: list[str], ranks: Iterable[int]) -> None:
    """However many patterns and modules there are; each module is looked up for its rank, and for its scaling."""
    config = AdapterConfig(rank_pattern={text: number + 1 for number, text in enumerate(patterns)})
    start = time.process_time()
    assert [config.rank(name) for name in modules] == list(ranks)
    assert [config.scaling(name) for name in modules] == [config.alpha / rank for rank in ranks]
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [("^q_proj", False), (r"^model\.q_proj$", True), (r"\Amodel.q_proj\Z", True), ("q_proj$", True)],
)
def test_an_anchored_name(pattern: str, fits: bool) -> None:
    """`^` means the whole name, as PEFT's expression has it."""
    assert bool(re.match(rf"(.*\.)?({pattern})$", "model.q_proj")) is fits
    assert Patterns({pattern: True}).find("model.q_proj", False) is fits
