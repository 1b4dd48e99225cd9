"""Tables of one's own: a file, an installed package's entry point, and the identity; each converts, and verifies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run
from safetensors.numpy import save_file
from support import call, convert, make_release, save

from weightbeam.formats.orbax import open_arrays
from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.storage import open_store
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

TABLE = """
from weightbeam.model_mappings.blocks import layers, stack
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.rules import rule

UP = rule("up/kernel", "up.weight", "mlp embed -> embed mlp", "embed mlp")
FAMILY = Family(
    name="tiny_mlp",
    models={"tiny-*": ("tiny_mlp",)},
    dims=lambda c, layout: dict(embed=c.size("width"), mlp=c.size("hidden")),
    stacks=lambda c, layout: layers(layout, "decoder/layers", range(c.size("depth")), [UP], "blocks.{layer}."),
    drops=lambda c, layout: {},
    releases="a model of nobody's",
)
"""


def write_mlp(folder: Path, kind: str = "tiny_mlp") -> dict[str, np.ndarray]:
    """Two layers of one matrix."""
    folder.mkdir()
    tensors = {f"blocks.{layer}.up.weight": np.arange(15, dtype=np.float32).reshape(5, 3) + layer for layer in range(2)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "width": 3, "hidden": 5, "depth": 2}))
    return tensors


def weightbeam(*arguments: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, *([str(path)] if path else [])])}
    return run(sys.executable, "-m", "weightbeam.pipelines.cli", *arguments, env=env)


def arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    return {
        key: store.read().result() for key, store in open_arrays(open_store(str(checkpoint / "0" / "items"))).items()
    }


def package(folder: Path, version: str = "1.0") -> Path:
    """A package outside the project, as pip would install it."""
    folder.mkdir()
    (folder / "tiny_tables.py").write_text(TABLE)
    about = folder / f"tiny_tables-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tiny-tables\nVersion: {version}\n")
    (about / "entry_points.txt").write_text("[weightbeam.families]\ntiny_mlp = tiny_tables:FAMILY\n")
    return folder


@pytest.mark.parametrize("way", ["file", "entry point"])
def test_a_family_outside_the_project(tmp_path, way):
    """Converted as its table says, and verified from what the checkpoint remembers; a file only if it is named again."""
    tensors = write_mlp(tmp_path / "source")
    path, options = None, []
    if way == "file":
        (tmp_path / "own.py").write_text(TABLE)
        options = ["--family", tmp_path / "own.py"]
    else:
        path = package(tmp_path / "site")
    done = weightbeam(
        "convert",
        "--source",
        tmp_path / "source",
        "--output",
        tmp_path / "out",
        "--save_dtype",
        "float32",
        *options,
        path=path,
    )
    assert done.returncode == 0, done.stderr
    made = arrays(tmp_path / "out")["params.params.decoder.layers.up.kernel"]
    np.testing.assert_array_equal(made, np.stack([tensor.T for tensor in tensors.values()], 1))
    verify = ("verify", "--source", tmp_path / "source", "--checkpoint", tmp_path / "out")
    found = weightbeam(*verify, *options, path=path)
    assert found.returncode == 0, found.stdout + found.stderr
    if way == "file":
        refused = weightbeam(*verify)
        assert refused.returncode == 2
        assert f"--family={tmp_path / 'own.py'} takes it" in " ".join(refused.stderr.split())


def test_a_release_of_nothing(tmp_path, capsys):
    """A checkpoint of no array would be nothing that anybody can load."""
    source = save(tmp_path / "hf", {"model_type": "mine"}, {})
    assert call("convert", source, tmp_path / "ckpt", "--family", "identity") == 2
    assert "holds no tensor" in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()


def test_identity(tmp_path):
    """A model that nobody has a table for: a tensor's name is the array's path."""
    tensors = write_mlp(tmp_path / "source", "unheard_of")
    assert weightbeam("plan", "--source", tmp_path / "source").returncode == 2
    done = weightbeam(
        "convert",
        "--source",
        tmp_path / "source",
        "--output",
        tmp_path / "out",
        "--save_dtype",
        "float32",
        "--family",
        "identity",
    )
    assert done.returncode == 0, done.stderr
    made = arrays(tmp_path / "out")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(made[f"params.params.{name}"], tensor)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FAMILY = 1", "should be a weightbeam"),
        ("1/0", "ZeroDivisionError"),
        (None, "no such file"),
        ("open('nowhere')", "FileNotFoundError"),
        ("other = 2", "should be a weightbeam"),
    ],
)
def test_a_file_that_is_no_family(tmp_path, text, words):
    """Refused in words."""
    write_mlp(tmp_path / "source")
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    done = weightbeam("plan", "--source", tmp_path / "source", "--family", tmp_path / "own.py")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("virtual", [True, False])
def test_a_record_has_no_say_in_what_runs(virtual: bool, tmp_path: Path) -> None:
    """A stranger's checkpoint, or the record of his release, names a file of Python as its table: `verify`, `diff` and
    `materialize` ran it. It stays named in what is made of the checkpoint.
    """
    ran, evil = tmp_path / "ran", tmp_path / "evil.py"
    evil.write_text(f"open({str(ran)!r}, 'w').close()\nfrom weightbeam.model_mappings.families.llama import FAMILY\n")
    release = make_release(tmp_path / "hf")
    step = convert(release, tmp_path / "ckpt", "--maxtext_model", "llama2-7b", *["--virtual"] * virtual)
    assert call("export", step, tmp_path / "exported") == 0

    def name(about: Any) -> None:
        for key, value in about.items() if isinstance(about, dict) else ():
            if key == "options" and isinstance(value, dict):
                value["family"] = str(evil)
            name(value)

    for file in (*step.rglob("_CHECKPOINT_METADATA"), step / "conversion.json", tmp_path / "exported/weightbeam.json"):
        name(about := json.loads(file.read_bytes()))
        file.write_text(json.dumps(about))
    exported, made = tmp_path / "exported", tmp_path / "made"
    for command in (
        ("verify", step), ("verify", release, step), ("verify", exported, step), ("diff", release, step),
        ("diff", step, exported), ("materialize", step, made), ("export", step, made), ("inspect", step),
        ("reshard", step, tmp_path / "again", "--mesh", "fsdp=2"),
    ):  # fmt: skip
        call(*command)
        assert not ran.exists(), command
        shutil.rmtree(made, ignore_errors=True)
    if not virtual:
        said = json.loads((tmp_path / "again/0/conversion.json").read_bytes())["options"]["family"]
        assert said == str(evil)
        assert call("verify", step, "--family", evil) == 0
        assert ran.exists()


def test_a_table_that_changes_is_another_plan(tmp_path: Path) -> None:
    """Also where no rule's words say it, as with an operation of the file's own: --resume mixed both."""
    write_mlp(tmp_path / "source")
    file = tmp_path / "own.py"
    file.write_text(TABLE)
    before = plan_conversion(ConvertOptions(family=str(file)), open_hf(tmp_path / "source")).hash
    file.write_text(f"{TABLE}\nFACTOR = 3\n")
    assert plan_conversion(ConvertOptions(family=str(file)), open_hf(tmp_path / "source")).hash != before


def test_the_table_that_runs_is_the_one_of_the_plan(tmp_path: Path) -> None:
    """Not what lies there by the time the plan is named: here a file that another one took the place of as it ran."""
    write_mlp(tmp_path / "source")
    file = tmp_path / "own.py"
    file.write_text(f"{TABLE}\nopen(__file__, 'w').write({TABLE!r})\n")
    ran = plan_conversion(ConvertOptions(family=str(file)), open_hf(tmp_path / "source")).hash
    assert file.read_text() == TABLE
    assert plan_conversion(ConvertOptions(family=str(file)), open_hf(tmp_path / "source")).hash != ran


def test_resume_with_another_version_of_a_package(tmp_path: Path) -> None:
    """What its operations do stands in no rule's words: --resume mixed both."""
    write_mlp(tmp_path / "source")
    command = ("convert", tmp_path / "source", tmp_path / "out", "--save_dtype", "float32", "--resume")
    site = package(tmp_path / "site")
    stopped = "import weightbeam.formats.targets.orbax as t; t.write_unit = None; from weightbeam.pipelines.cli import main; main()"
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(site)])
    run(sys.executable, "-c", stopped, *command[:-1], env=os.environ | {"PYTHONPATH": path})
    assert list((tmp_path / "out").glob("*.orbax-checkpoint-tmp"))
    refused = weightbeam(*command, path=package(tmp_path / "newer", "2.0"))
    assert refused.returncode == 2
    assert "another package than tiny_mlp tiny-tables 2.0" in refused.stderr
    done = weightbeam(*command, path=site)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", "../victim/0"), ("step", "x"), ("compression", "gz"), ("unit_bytes", "1e9"), ("use_ocdbt", "no")],
)
def test_options_of_a_record_are_checked(
    name: str, value: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`materialize` took a stranger's as they stood: a step's number led out of the output."""
    step = convert(make_release(tmp_path / "hf"), tmp_path / "ckpt", "--maxtext_model", "llama2-7b", "--virtual")
    about = json.loads((step / "conversion.json").read_bytes())
    about["options"][name] = value
    (step / "conversion.json").write_text(json.dumps(about))
    assert call("materialize", step, tmp_path / "made", "--overwrite") == 2
    assert f"says {value!r} for --{name}, which can't be meant" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "hf"]
