"""The image: its Dockerfile is linted, pinned, and its install steps run here, in a new environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import venv
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from processes import run

from deploy import pins

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PREFIX = "/opt/weightbeam"  # where the first stage installs to
PINS = dict(line.split("==") for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines() if "==" in line)


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """The Dockerfile's instructions: what, and with which value."""
    folder = tmp_path_factory.mktemp("parser")  # the parser opens its file for writing
    shutil.copy(DOCKERFILE, folder)
    return [(entry["instruction"], entry["value"]) for entry in DockerfileParser(str(folder)).structure]


def values(instructions: list[tuple[str, str]], kind: str) -> list[str]:
    return [value for instruction, value in instructions if instruction == kind]


def lint(text: str) -> set[str]:
    """The rules that hadolint finds broken."""
    command = [str(Path(sys.executable).with_name("hadolint")), "--no-fail", "--format", "json", "-"]
    ran = run(*command, input=text, status=0)
    return {problem["code"] for problem in json.loads(ran.stdout)}


def test_the_dockerfile_is_clean() -> None:
    assert lint(DOCKERFILE.read_text()) == set()


def test_the_linter_finds_faults() -> None:
    assert {"DL3007", "DL3042"} <= lint("FROM python:latest\nRUN pip install beam==1\n")


def test_images_are_pinned(instructions: list[tuple[str, str]]) -> None:
    images = [value.split()[0] for value in values(instructions, "FROM")]
    assert [image for image in images if not re.search(r":[\w.-]*\d{2}[\w.-]*(@sha256:[0-9a-f]{64})?$", image)] == []


def test_packages_are_installed_by_their_hashes(instructions: list[tuple[str, str]]) -> None:
    """The versions of `constraints.txt`, and beside them setuptools, which `pip freeze` leaves out."""
    lines = [line for line in pins.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert None not in found
    versions = {re.sub(r"[-_.]+", "-", pin[1]).lower(): pin[2] for pin in found if pin}
    versions.pop("setuptools")
    assert versions == {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PINS.items()}
    assert any("--require-hashes --requirement requirements.txt" in value for value in values(instructions, "RUN"))


def test_a_package_without_a_hash_is_an_error() -> None:
    item = {
        "metadata": {"name": "a", "version": "1"},
        "download_info": {"url": "https://x/a.whl", "archive_info": {"hashes": {}}},
    }
    with pytest.raises(ValueError, match="a: the index says no sha256"):
        pins.requirements_of({"install": [item]})


def test_an_extra_that_a_package_asks_for_has_a_pin_of_its_own() -> None:
    """The pip of Python 3.11.7 takes no other where hashes are required."""
    asks = ["b[x]>=1", "b[y]; extra == 'no'", "b[z]; extra == 'yes'", "c[w]"]
    items = [
        {
            "metadata": {"name": name, "version": "1", "requires_dist": requires},
            "download_info": {"url": f"https://x/{name}.whl", "archive_info": {"hashes": {"sha256": "0" * 64}}},
            "requested_extras": ["yes"],
        }
        for name, requires in (("a", asks), ("B", []))
    ]
    written = pins.requirements_of({"install": items}).removeprefix(pins.HEAD)
    assert [line.split()[0] for line in written.splitlines()] == ["a==1", "B==1", "B[x]==1", "B[z]==1"]


def test_images_are_pinned_by_digest_on_request(instructions: list[tuple[str, str]]) -> None:
    """By tag and digest; a second time by the digests of then. The image that results is the linter's to judge."""
    asked: list[str] = []

    def digest_of(image: str) -> str:
        asked.append(image)
        return f"sha256:{len(asked):064x}"

    once = pins.pinned(DOCKERFILE.read_text(), digest_of)
    images = [re.sub("@.*", "", value.split()[0]) for value in values(instructions, "FROM")]
    assert asked == images
    assert lint(once) == set()
    again = pins.pinned(once, digest_of)
    assert asked == images * 2
    assert again.count("@sha256:") == len(images)


def test_the_versions_agree(instructions: list[tuple[str, str]]) -> None:
    """The boot program and the SDK are of one Beam, and every image has this Python."""
    images = values(instructions, "FROM")
    beam = next(image for image in images if image.startswith("apache/beam"))
    assert beam.split()[0] == f"apache/beam_python3.11_sdk:{PINS['apache-beam']}"
    assert all(re.search(r"python:?311", image.replace(".", "")) for image in images)


def test_what_is_copied_is_there_and_not_ignored(instructions: list[tuple[str, str]]) -> None:
    copied = {
        source for value in values(instructions, "COPY") if "--from=" not in value for source in value.split()[:-1]
    }
    kept = {
        line[1:]
        for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == kept
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_stages_that_are_copied_from_exist(instructions: list[tuple[str, str]]) -> None:
    stages = {value.split(" AS ")[1] for value in values(instructions, "FROM") if " AS " in value}
    assert {stage for value in values(instructions, "COPY") for stage in re.findall(r"--from=(\S+)", value)} == stages


def test_the_launcher_is_a_file_that_is_copied(instructions: list[tuple[str, str]]) -> None:
    launcher = re.search(r"FLEX_TEMPLATE_PYTHON_PY_FILE=(\S+)", " ".join(values(instructions, "ENV")))
    assert launcher
    assert f"deploy/launch.py {launcher[1]}" in values(instructions, "COPY")


def install(instructions: list[tuple[str, str]], folder: Path) -> Path:
    """Runs the Dockerfile's steps as they stand there, but for the prefix, in a new environment; gives its programs'
    folder.
    """
    source, environment = folder / "source", folder / "environment"
    source.mkdir()
    venv.create(environment, with_pip=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    for instruction, value in instructions:
        if instruction == "COPY" and "--from=" not in value and not value.split()[-1].startswith("/"):
            *names, target = value.split()
            for name in names:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, source / target)
        elif instruction == "RUN":
            step = ["/bin/sh", "-c", value.replace(PREFIX, str(environment))]
            run(*step, cwd=source, env=variables, timeout=900, status=0)
    shutil.rmtree(source)  # as in the image: only what was installed is left
    return environment / "bin"


@pytest.mark.slow("installs the package anew from the package index")
def test_the_install_steps_make_what_the_image_needs(instructions: list[tuple[str, str]], tmp_path: Path) -> None:
    """One test, so that parallel runs install once."""
    programs = install(instructions, tmp_path)

    shown = run(programs / "weightbeam", "--help", cwd=tmp_path)
    assert (shown.returncode, "weightbeam convert" in shown.stdout) == (0, True), shown.stderr

    # it needs Beam and its Dataflow runner, to refuse an option that neither knows
    shutil.copy(ROOT / "deploy" / "launch.py", tmp_path)
    launched = run(
        programs / "python",
        "launch.py",
        f"--source={tmp_path}",
        f"--output={tmp_path / 'out'}",
        "--runner=DataflowRunner",
        "--no_such_option=1",
        cwd=tmp_path,
    )
    assert (launched.returncode, "--no_such_option=1" in launched.stderr, "Traceback" in launched.stderr) == (
        2,
        True,
        False,
    ), launched.stderr

    for module in ("torch", "transformers", "tensorflow", "jax", "orbax"):
        assert f"No module named '{module}'" in run(programs / "python", "-c", f"import {module}", cwd=tmp_path).stderr

    frozen = run(programs / "python", "-m", "pip", "freeze", "--exclude", "weightbeam", cwd=tmp_path).stdout.split()
    assert len(frozen) > 50
    assert {line for line in frozen if line.partition("==")[2] != PINS.get(line.partition("==")[0])} == set(), (
        "see the first line of deploy/constraints.txt"
    )
