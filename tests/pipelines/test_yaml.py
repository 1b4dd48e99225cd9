"""YAML from a stranger: what a few bytes of it may make, and what can't be made of it at all."""

from __future__ import annotations

import itertools
import resource
import time
from pathlib import Path

import pytest
import yaml
from support import call

from weightbeam.formats.storage.strict_yaml import MAX_YAML, parse_yaml

NAMES = "abcdefghij"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise(NAMES)
)
BAD = {
    "aliases of aliases": f"{LAUGHS}logical_axis_rules: *j\nbase_emb_dim: *j\n",
    "itself": "base_emb_dim: &a [*a]\nlogical_axis_rules: *a\n",
    "a mapping in itself": "logical_axis_rules: &a {<<: *a}\n",
    "deep": f"logical_axis_rules: {'[' * 5000}{']' * 5000}\n",
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep blocks": "- " * 5000,
    "no date": "base_emb_dim: 2001-13-45\n",
    "no number": "base_emb_dim: 0x_\n",
    "an empty number": 'base_emb_dim: !!int ""\n',
    "no bool": "base_emb_dim: !!bool x\n",
    "no float": "base_emb_dim: !!float x\n",
    "no time": 'base_emb_dim: !!timestamp ""\n',
    "a long number": f"base_emb_dim: {'9' * 5000}\n",
    "a long number in base 60": f"base_emb_dim: {':'.join(['1'] * 3000)}\n",
    "large": f"base_emb_dim: {'x' * MAX_YAML}\n",
}


@pytest.mark.parametrize("name", BAD)
def test_yaml_that_is_refused(name: str) -> None:
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(yaml.YAMLError):
        parse_yaml(BAD[name])
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


def test_yaml_that_is_taken() -> None:
    assert parse_yaml("base: &a {x: 1}\nmore: [*a, *a]\nover: {<<: *a, y: 2}\n") == {
        "base": {"x": 1}, "more": [{"x": 1}] * 2, "over": {"x": 1, "y": 2},
    }  # fmt: skip
    assert parse_yaml("") is None


@pytest.mark.parametrize("name", BAD)
def test_files_of_it_that_commands_are_given(
    source: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are refused in few words."""
    file = tmp_path / "odd.yml"
    file.write_text(BAD[name])
    for command in (
        ("plan", source, "--sharding_rules", file),
        ("fit", source, file),
        ("watch", "--config", file, "--once"),
    ):
        assert call(*command) == 2
        said = capfd.readouterr().err
        assert str(file) in said.replace("\n", "")
        assert len(said) < 1000


def test_configurations_that_are_each_others_base(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, base in (("one", "other"), ("other", "one")):
        (tmp_path / f"{name}.yml").write_text(f"base_config: {base}.yml\n")
    assert call("fit", source, tmp_path / "one.yml") == 2
    assert "its base_config leads back to it" in " ".join(capfd.readouterr().err.split())
