"""The Flex Template: its metadata names the options there are, and its launcher's parameters become a command line."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import SetupOptions, WorkerOptions
from processes import run

from deploy import metadata
from deploy.launch import conversion_options, to_arguments
from weightbeam.pipelines.running.beam_options import pipeline_options
from weightbeam.pipelines.terminal.arguments.commands import SHELL
from weightbeam.pipelines.terminal.arguments.parser import parse as parse_line
from weightbeam.transforms.planning.values import boolean

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "deploy" / "launch.py"
IMAGE = "us-central1-docker.pkg.dev/p/weightbeam/weightbeam:1"


def parameters() -> dict[str, dict]:
    """The template's parameters by name, as the file has them."""
    return {parameter["name"]: parameter for parameter in json.loads(metadata.FILE.read_text())["parameters"]}


def parse(*arguments: str) -> argparse.Namespace:
    return parse_line(["convert", *arguments])[0]


def test_the_file_is_what_the_options_make() -> None:
    """`python -m deploy.metadata` writes it anew."""
    assert metadata.FILE.read_text() == metadata.text()


def test_the_parameters_are_the_options() -> None:
    shown = run(sys.executable, "-m", "weightbeam.pipelines.cli", "convert", "--help", cwd=ROOT, status=0).stdout
    options = set(re.findall(r"^  --(\w+)", shown, re.MULTILINE)) - set(metadata.LEFT_OUT) - SHELL
    assert len(options) > 15
    assert set(parameters()) == options | set(metadata.FROM_BEAM)


def test_what_is_left_out_is_an_option() -> None:
    assert set(metadata.LEFT_OUT) <= set(conversion_options())


def test_only_source_and_output_must_be_given() -> None:
    assert {name for name, parameter in parameters().items() if not parameter.get("isOptional")} == {"source", "output"}


@pytest.mark.parametrize(
    "name", sorted(name for name, parameter in parameters().items() if "defaultValue" in parameter)
)
def test_a_default_that_is_sent_changes_nothing(name: str) -> None:
    """The console sends every default; what isn't sent has the same value."""
    parameter = parameters()[name]
    default = parameter["defaultValue"]
    assert all(re.search(regex, default) for regex in parameter.get("regexes", []))
    assert default in [option["value"] for option in parameter.get("enumOptions", [{"value": default}])]
    assert parse(*to_arguments([f"--{name}={default}"])) == parse()


SAMPLES = (
    "true", "false", "yes", "0", "1", "16", "-1", "1.5", "x", "", "?", "128MiB", "128 MB", "GiB", "hf_token", "a b",
    "projects/p/secrets/s/versions/latest", "projects/p/secrets/s", "projects/p/secrets/s/versions/1 or 2",
)  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, option in conversion_options().items()
        if option.type and not option.choices and name not in metadata.LEFT_OUT
    ),
)
def test_the_api_takes_what_the_command_line_takes(name: str, sample: str) -> None:
    """But for other spellings of true and false: the console has a box to tick."""
    type_ = conversion_options()[name].type
    assert callable(type_)
    try:
        taken = type_(sample) is not None
    except argparse.ArgumentTypeError:
        taken = False
    if type_ is not boolean or sample in ("true", "false") or not taken:
        assert all(re.search(regex, sample) for regex in parameters()[name]["regexes"]) == taken


@pytest.mark.parametrize(("name", "taken"), [("source", ("gs", "hf")), ("output", ("gs",))])
def test_places_are_in_the_cloud(name: str, taken: tuple[str, ...]) -> None:
    places = {scheme: f"{scheme}://a/b" for scheme in ("gs", "hf", "http", "file")} | {"": "/a/b"}
    assert (
        tuple(
            scheme
            for scheme, place in places.items()
            if all(re.search(regex, place) for regex in parameters()[name]["regexes"])
        )
        == taken
    )


def test_a_switch_is_true_or_false() -> None:
    made = parse(*to_arguments(["--resume=true", "--overwrite=false"]))
    assert (made.resume, made.overwrite) == (True, False)
    with pytest.raises(SystemExit):
        parse(*to_arguments(["--resume=perhaps"]))


def test_several_meshes_have_spaces_between_them() -> None:
    assert parse(*to_arguments(["--mesh=fsdp=16,expert=4 fsdp=64"])).mesh == ["fsdp=16,expert=4", "fsdp=64"]


def test_workers_run_the_launchers_image_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its environment, as the Dockerfile sets it."""
    monkeypatch.setenv("WEIGHTBEAM_IMAGE", IMAGE)
    for given, image in (([], IMAGE), (["--sdk_container_image=mine"], "mine")):
        options = pipeline_options(to_arguments(["--runner=DataflowRunner", "--experiments=a", *given]))
        assert (options.view_as(WorkerOptions).sdk_container_image, options.view_as(SetupOptions).setup_file) == (
            image,
            None,
        )


def test_the_launcher_runs_a_file(tmp_path: Path) -> None:
    """From anywhere, by its path, and it ends as the command does: here refused, with the parameters understood."""
    environment = {**os.environ, "WEIGHTBEAM_IMAGE": IMAGE}
    command = [
        sys.executable,
        str(LAUNCH),
        f"--source={tmp_path / 'none'}",
        f"--output={tmp_path / 'out'}",
        "--resume=false",
        "--mesh=fsdp=2 fsdp=4",
    ]
    ran = run(*command, cwd=tmp_path, env=environment, status=2)
    assert ran.stderr.startswith("weightbeam convert: refused")
    assert "Traceback" not in ran.stderr


def test_the_guides_parameters_are_the_templates() -> None:
    guide = (ROOT / "deploy" / "README.md").read_text()
    launched = re.findall(r'--parameters="\^~\^(.+)"', guide)
    assert launched
    given = [parameter.partition("=") for line in launched for parameter in line.split("~")]
    for name, _, value in given:
        assert all(re.search(regex, value) for regex in parameters()[name].get("regexes", [])), name
