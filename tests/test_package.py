"""What is built, installed and declared: the sdist, the wheel made of it, and pyproject.toml."""

from __future__ import annotations

import email
import os
import re
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from facts import tiny
from packaging.requirements import Requirement
from processes import run
from support import save

import weightbeam

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("model_mappings", "formats", "transforms", "pipelines")
BUILT_FROM = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "docs", "weightbeam", *PACKAGES)
# where it isn't the requirement's name with underscores
MODULES = {"pyyaml": "yaml", "google-cloud-storage": "google.cloud.storage"}

THEIRS = '''
"""A user's training script beside folders and files of the user's own, which have the names of Weightbeam's packages."""
import sys
from pathlib import Path
import formats, transforms.crop
from pipelines.data import ROWS
import weightbeam as wb

source, output = sys.argv[1:]
assert (ROWS, transforms.crop.SIZE, formats.KINDS) == (3, 4, 5)
plan = wb.plan(source, mesh="fsdp=2")
assert not plan.problems
wb.convert(source, output)
assert wb.verify(output).ok
assert (wb.__version__, "site" in Path(wb.__file__).parts) == (sys.stdin.read(), True)
'''


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of the sdist, as pip and Dataflow's workers build it: what the sdist lacks, it lacks."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "source").mkdir()
    for name in BUILT_FROM:  # a copy: a build leaves its traces
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / "source" / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    run(*command, status=0)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the wheel, without the requirements, which this environment has."""
    folder = tmp_path_factory.mktemp("installed") / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        str(folder),
        str(wheel),
    ]
    run(*command, status=0)
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of a user's own: a package `pipelines`, a plain folder `transforms`, a file `formats.py`, a script, and
    a model.
    """
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "__init__.py").touch()
    (tmp_path / "pipelines" / "data.py").write_text("ROWS = 3\n")
    (tmp_path / "transforms").mkdir()
    (tmp_path / "transforms" / "crop.py").write_text("SIZE = 4\n")
    (tmp_path / "formats.py").write_text("KINDS = 5\n")
    (tmp_path / "train.py").write_text(THEIRS)
    config = tiny.CONFIGS["qwen3"]
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in tiny.shapes(config).items()
    }
    save(tmp_path / "model", config, tensors)
    return tmp_path


def run_theirs(site: Path, theirs: Path, *command: str, stdin: str = "") -> str:
    """What a command prints in the user's folder, both of them on Python's path."""
    environment = os.environ | {"PYTHONPATH": f".{os.pathsep}{site}"}
    return run(*command, cwd=theirs, env=environment, input=stdin, status=0).stdout


def test_what_is_installed_is_one_package(site: Path) -> None:
    assert {path.name for path in site.iterdir()} == {
        "bin",
        "weightbeam",
        f"weightbeam-{weightbeam.__version__}.dist-info",
    }
    assert [path for path in site.rglob("*") if path.is_symlink()] == []
    sources = {
        path.relative_to(ROOT)
        for name in (*PACKAGES, "docs")
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".md", ".json")
    }
    assert {path for path in sources if not (site / "weightbeam" / path).is_file()} == set()
    assert (site / "weightbeam" / "py.typed").is_file()


def test_a_script_beside_folders_of_the_same_names(site: Path, theirs: Path) -> None:
    run_theirs(site, theirs, sys.executable, "train.py", "model", "out", stdin=weightbeam.__version__)
    assert (theirs / "out" / "0" / "items").is_dir()


def test_commands_beside_folders_of_the_same_names(site: Path, theirs: Path) -> None:
    command = str(site / "bin" / "weightbeam")
    assert run_theirs(site, theirs, command, "--version") == f"weightbeam {weightbeam.__version__}\n"
    assert "ready" in run_theirs(site, theirs, command, "plan", "model")
    assert run_theirs(site, theirs, command, "help", "numerics").startswith("# ")


def test_the_metadata_describe_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        name = next(name for name in opened.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(opened.read(name))
    assert metadata["Version"] == weightbeam.__version__
    assert str(metadata.get_payload()).startswith("# Weightbeam")
    assert metadata["Requires-Python"] == ">=3.11"
    assert [
        field for field in ("Summary", "Author", "Keywords", "License-Expression", "Project-URL") if not metadata[field]
    ] == []
    pythons = set(re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier", []))))
    assert pythons == set(re.findall(r'"(3\.\d+)"', (ROOT / "noxfile.py").read_text()))


def test_the_version_stands_once() -> None:
    files = [path for path in ROOT.glob("*.*") if path.suffix in (".py", ".toml")]
    assert [path.name for path in files if weightbeam.__version__ in path.read_text()] == []


def imported() -> set[str]:
    """Every module that the packages import, with its parents, and the first name imported from each."""
    text = "\n".join(path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    found = re.findall(r"^ *(?:from ([\w.]+) )?import ([\w.]+)", text, re.MULTILINE)
    names = {f"{package}.{name}".strip(".") for package, name in found}
    return {".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 2)}


def test_every_requirement_is_imported() -> None:
    modules = {
        requirement: MODULES.get(name, name.replace("-", "_"))
        for requirement in PROJECT["dependencies"]
        for name in [Requirement(requirement).name]
    }
    used = imported()
    assert {requirement for requirement, module in modules.items() if module not in used} == set()


def test_every_extra_that_is_named_exists_and_is_explained() -> None:
    extras = set(PROJECT["optional-dependencies"])
    files = [
        ROOT / "Makefile",
        ROOT / "noxfile.py",
        *(path for name in (*PACKAGES, "docs", "deploy") for path in (ROOT / name).rglob("*") if path.is_file()),
    ]
    text = "\n".join(
        path.read_text() for path in files if path.suffix in (".md", ".py", "") and "__pycache__" not in path.parts
    )
    named = {
        extra.strip()
        for found in re.findall(r"""['"](?:\.|weightbeam)\[([\w,]+)\]['"]""", text)
        for extra in found.split(",")
    }
    assert named <= extras
    assert {extra for extra in extras if f"`{extra}`" not in (ROOT / "README.md").read_text()} == set()
