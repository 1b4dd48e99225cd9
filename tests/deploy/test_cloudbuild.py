"""The build: what it substitutes is declared, what it names exists, and the guide gives it all it asks for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
BUILD = (DEPLOY / "cloudbuild.yaml").read_text()
GUIDE = (DEPLOY / "README.md").read_text()
BUILT_IN = {"PROJECT_ID", "PROJECT_NUMBER", "BUILD_ID", "LOCATION"}


def problems(text: str) -> list[str]:
    """Substitutions that are used but not declared, or declared but not used."""
    build = yaml.safe_load(text)
    declared = set(build.pop("substitutions", {}))
    used = set(re.findall(r"(?<!\$)\$\{?([A-Z_][A-Z0-9_]*)", yaml.safe_dump(build, width=10_000)))
    return sorted(
        [f"undeclared: {name}" for name in used - declared - BUILT_IN] + [f"unused: {name}" for name in declared - used]
    )


def test_substitutions_are_declared_and_used() -> None:
    assert problems(BUILD) == []


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("${_BUCKET}/temp", "${_BUCKETS}/temp", "undeclared: _BUCKETS"),
        ("${_BUCKET}/temp", "$_OTHER/temp", "undeclared: _OTHER"),
        ("${_WORKER}", "worker", "unused: _WORKER"),
    ],
)
def test_the_check_finds_what_is_wrong(right: str, wrong: str, problem: str) -> None:
    assert right in BUILD
    assert problem in problems(BUILD.replace(right, wrong))


def test_the_files_are_there() -> None:
    named = re.findall(r"--(?:file|metadata-file)=(\S+?)[,\s]", BUILD)
    assert len(named) == 2
    assert [name for name in named if not (DEPLOY.parent / name).is_file()] == []


def test_the_guide_gives_every_substitution() -> None:
    given = set(re.findall(r"\b(_[A-Z]+)=", GUIDE))
    assert given == set(yaml.safe_load(BUILD)["substitutions"])


def test_the_guide_reads_outputs_that_there_are() -> None:
    outputs = set(re.findall(r'^output "(\w+)"', (DEPLOY / "terraform" / "outputs.tf").read_text(), re.MULTILINE))
    read = set(re.findall(r"\$\(output (\w+)\)", GUIDE))
    assert read
    assert read <= outputs


def test_the_guide_sets_variables_that_there_are() -> None:
    variables = set(re.findall(r'^variable "(\w+)"', (DEPLOY / "terraform" / "variables.tf").read_text(), re.MULTILINE))
    given = set(re.findall(r"^(\w+) += ", GUIDE, re.MULTILINE)) | set(re.findall(r"-var=?['\" ]*(\w+)=", GUIDE))
    assert given
    assert given <= variables
