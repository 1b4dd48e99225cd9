"""The command line: what it imports, what its help names, what `plan` and `inspect` tell."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from processes import run
from support import (
    DEEPSEEK,
    FP8,
    LLAMA,
    assert_same_bits,
    bare,
    call,
    convert,
    make_release,
    random_tensors,
    restore,
    save,
    split,
)

import weightbeam
from weightbeam.pipelines.running.without_beam import cores, is_local, says_threads, threads_in
from weightbeam.pipelines.terminal.arguments.commands import COMMANDS, SHELL
from weightbeam.transforms.cutting.mesh import mesh_axes
from weightbeam.transforms.planning.options import ConvertOptions, Token, options_of

ocp = lazily("orbax.checkpoint")

HEAVY = ["apache_beam", "numpy", "ml_dtypes", "tensorstore", "rich", "grpc", "torch", "transformers", "jax", "orbax"]
WEIGHTBEAM = str(Path(sys.executable).parent / "weightbeam")


def imported_by(code: str) -> set[str]:
    """The top-level modules that a fresh process has after this code."""
    ran = run(
        sys.executable,
        "-c",
        f"import sys\n{code}\nprint('MODULES', *{{name.partition('.')[0] for name in sys.modules}})",
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.rpartition("MODULES ")[2].split())


def help_of(*command: str) -> str:
    """The help's text, on one line."""
    ran = run(WEIGHTBEAM, *command, "--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    return " ".join(ran.stdout.split())


@pytest.mark.parametrize("command", [[], ["convert"], ["plan"], ["inspect"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    """Help is there at once: neither Beam nor numpy nor TensorStore is imported for it."""
    code = f"from weightbeam.pipelines.cli import main\ntry:\n    main([*{command!r}, '--help'])\nexcept SystemExit as e:\n    assert e.code == 0"
    assert imported_by(code) & set(HEAVY) == set()


DOCUMENTED = [  # DESIGN.md 3
    "source", "output", "scan_layers", "param_scan_axis", "save_dtype", "mesh", "maxtext_model", "vocab_size", "mtp", "use_ocdbt", "use_zarr3",
    "compression", "unit_bytes", "step", "resume", "overwrite",
]  # fmt: skip


def test_help_names_every_option() -> None:
    """Those of the design, those of the code, in both commands that take them, with their defaults."""
    convert_help, plan_help = help_of("convert"), help_of("plan")
    options = {each.name for each in COMMANDS["convert"].all_options()} - SHELL
    assert set(DOCUMENTED) <= options
    for option in options:
        assert f"--{option} " in convert_help
    for option in {*(each.name for each in (*options_of(ConvertOptions), *options_of(Token))), "source", "json"}:
        assert f"--{option} " in plan_help
    for default in ("default: true", "default: bfloat16", "default: 1)", "default: none", "default: 128MiB"):
        assert default in convert_help
    assert all(command in help_of() for command in ("convert", "plan", "inspect"))


def test_version() -> None:
    """`--version` says the package's; `test_package.py` compares it with what is built."""
    assert run(WEIGHTBEAM, "--version").stdout == f"weightbeam {weightbeam.__version__}\n"


def test_no_command_is_a_usage_error() -> None:
    """Exit status 2, and how to use it."""
    ran = run(WEIGHTBEAM)
    assert ran.returncode == 2
    assert "usage: weightbeam" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_module_is_the_command(tmp_path: Path) -> None:
    """`weightbeam convert` and `python -m weightbeam convert` are the same; nothing on stderr. Paths may be
    relative.
    """
    make_release(tmp_path / "hf")
    arrays = []
    for name, command in {"a": [WEIGHTBEAM, "convert"], "b": [sys.executable, "-m", "weightbeam", "convert"]}.items():
        ran = run(*command, "--source", "hf", "--output", name, cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert re.match(rf".*{name}/0/items: 12 arrays, .* in .* s \(.*/s\)\n", ran.stdout)
        arrays.append(restore(tmp_path / name / "0"))
    assert_same_bits(*arrays)
    refusals = [
        run(*command, "--source", "hf", "--output", "a", cwd=tmp_path)
        for command in ([WEIGHTBEAM, "convert"], [sys.executable, "-m", "weightbeam", "convert"])
    ]
    assert refusals[0].returncode == refusals[1].returncode == 2
    assert refusals[0].stderr == refusals[1].stderr


def test_nothing_is_lost_at_the_end(tmp_path: Path) -> None:
    """The command ends in its own way; what it printed comes out though it failed, and what others have to do at the
    end is done.
    """
    folder = make_release(tmp_path / "hf")
    (folder / "model-2.safetensors").write_bytes(b"nothing")
    ran = run(WEIGHTBEAM, "inspect", folder)
    assert ran.returncode == 2
    assert "1 problem:" in ran.stderr
    assert ran.stdout.rstrip().splitlines()[-1].startswith(f"{folder}: model_type llama, ")
    code = "import atexit\nfrom pipelines import cli\ncli.main = lambda at_end: atexit.register(print, 'done at the end') and 3\ncli.run()"
    ran = run(sys.executable, "-c", code, cwd=Path(__file__).parents[2])
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "done at the end\n", "")


def test_a_conversion_imports_no_framework(tmp_path: Path) -> None:
    """Neither torch nor transformers nor jax nor orbax nor flax, in planning, the stages, or the assembly."""
    source = make_release(tmp_path / "hf", DEEPSEEK, files=2)
    arguments = ["convert", "--source", str(source), "--output", str(tmp_path / "out"), "--mesh", "fsdp=4"]
    code = f"from weightbeam.pipelines.cli import main\nassert main({arguments!r}) == 0"
    modules = imported_by(code)
    assert modules & {"torch", "transformers", "jax", "jaxlib", "orbax", "flax", "tensorflow"} == set()
    assert {"apache_beam", "tensorstore", "numpy"} <= modules


def test_a_plan_needs_no_beam(tmp_path: Path) -> None:
    """A dry run imports numpy at most."""
    source = make_release(tmp_path / "hf")
    modules = imported_by(
        f"from weightbeam.pipelines.cli import main\nassert main(['plan', '--source', {str(source)!r}]) == 0"
    )
    assert "apache_beam" not in modules


def test_a_local_command_leaves_out_beams_services(tmp_path: Path) -> None:
    """The console script imports no client of a service that a local run has nothing to do with, and converts as well."""
    source = make_release(tmp_path / "hf")
    code = f"import sys\nfrom weightbeam.pipelines import cli\nsys.argv = ['weightbeam', 'convert', {str(source)!r}, {str(tmp_path / 'out')!r}]\n"
    end = "import os\nos._exit = lambda status: print('MODULES', status, *(name for name, module in sys.modules.items() if module))\n"
    ran = run(sys.executable, "-c", f"{code}{end}cli.run()")
    status, *modules = ran.stdout.rpartition("MODULES ")[2].split()
    assert status == "0", ran.stderr
    assert "apache_beam" in modules
    assert not [name for name in modules if name.startswith(("google.cloud.bigquery", "google.pubsub", "pymongo"))]


@pytest.mark.parametrize(
    ("arguments", "local"),
    [
        ([], True),
        (["--runner=DirectRunner"], True),
        (["--runner", "apache_beam.runners.portability.fn_api_runner.FnApiRunner"], True),
        (["convert", "--runner"], True),
        (["--runner=FlinkRunner"], False),
        (["--runner", "DataflowRunner"], False),
    ],
)
def test_what_runs_here(arguments: list[str], local: bool) -> None:
    assert is_local(arguments) is local


def test_threads_alone_need_no_beam(tmp_path: Path) -> None:
    """A refusal comes without Beam where its only option says how many threads there are; a wrong number is refused."""
    arguments = ["convert", str(tmp_path / "none"), str(tmp_path / "out"), "--direct_num_workers=2"]
    modules = imported_by(f"from weightbeam.pipelines.cli import main\nassert main({arguments!r}) == 2")
    assert "apache_beam" not in modules
    assert call(*arguments[:-1], "--direct_num_workers=two") == 2
    assert not says_threads(["--direct_num_workers=0"])
    assert threads_in(["--direct_num_workers=0"]) == cores()
    assert not says_threads(["--direct_num_workers=2", "--runner=FlinkRunner"])


# --- plan -------------------------------------------------------------------------------------------------------------


def plan_json(source: Path, tmp_path: Path, *options: str, status: int = 0) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    assert call("plan", "--source", source, "--json", file, *options) == status
    return json.loads(file.read_text())


def test_the_plans_json_is_what_the_design_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every field of DESIGN.md 3, on an FP8 DeepSeek with a layer to drop, against what the conversion then makes."""
    config = DEEPSEEK | dict(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    tensors = random_tensors(DEEPSEEK)
    up = "model.layers.0.mlp.up_proj.weight"
    tensors |= {
        up: tensors[up].astype(FP8),
        f"{up}_scale_inv": np.ones((1, 1), np.float32),
        "model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32),
    }
    source = save(tmp_path / "hf", config, *split(tensors, 2))
    before = sorted(tmp_path.rglob("*"))
    plan = plan_json(source, tmp_path, "--mesh", "fsdp=4,expert=2", "--mesh", "tensor=2")
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "plan.json"])
    assert {"arrays", "dropped", "problems", "units", "bytes", "memory", "family", "source"} <= set(plan)
    assert (plan["family"], plan["source"], plan["problems"]) == ("deepseek", str(source), [])
    assert plan["dropped"] == {"model.layers.3.eh_proj.weight": "multi-token prediction, convert it with --mtp"}
    assert plan["units"] >= 1
    assert plan["bytes"]["source"] == sum(values.nbytes for name, values in tensors.items() if "layers.3." not in name)
    assert plan["bytes"]["target"] == sum(
        2 * values.size * (2 if name.endswith("e_score_correction_bias") else 1)  # a parameter, and a variable
        for name, values in tensors.items()
        if "layers.3." not in name and not name.endswith("_scale_inv")
    )
    assert plan["bytes"]["read_amplification"] == 1
    assert 128 << 20 < plan["memory"]["per_worker_bytes"] < 64 << 30

    arrays = restore(convert(source, tmp_path / "out", "--mesh", "fsdp=4,expert=2", "--mesh", "tensor=2"))
    assert {bare(key) for key in plan["arrays"]} == set(arrays)
    for key, told in plan["arrays"].items():
        values = arrays[bare(key)]
        assert set(told) == {"shape", "dtype", "axes", "chunk", "partition", "lossy"}
        assert (tuple(told["shape"]), told["dtype"]) == (values.shape, "bfloat16")
        assert len(told["axes"]) == len(told["chunk"]) == values.ndim
        assert set(told["partition"]) == {"fsdp=4,expert=2", "tensor=2"}
        assert all(len(spec) == values.ndim for spec in told["partition"].values())
    wi_0 = plan["arrays"]["params.params.decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.wi_0"]
    assert wi_0["axes"] == ["exp", "moe_layers", "embed_moe", "mlp_moe"]
    assert (
        plan["arrays"]["params.params.decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.kernel"]["axes"][-1] is None
    )
    lossy = {key: told["lossy"] for key, told in plan["arrays"].items() if told["lossy"]}
    assert list(lossy) == ["params.params.decoder.dense_layers.mlp.wi_1.kernel"]
    assert "FP8" in lossy["params.params.decoder.dense_layers.mlp.wi_1.kernel"]
    assert "multi-token prediction" in capfd.readouterr().out


def test_a_plan_with_problems_is_written_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All of them, each with its kind and what it is about; exit status 2."""
    tensors = random_tensors(LLAMA)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    del tensors["model.norm.weight"]
    plan = plan_json(save(tmp_path / "hf", LLAMA, tensors), tmp_path, status=2)
    problems = {(problem["kind"], problem.get("tensor")): problem["message"] for problem in plan["problems"]}
    assert set(problems) == {("shape", "model.layers.0.mlp.up_proj.weight"), ("missing", "model.norm.weight")}
    assert all(problems.values())
    assert len(plan["arrays"]) == 12
    message = capfd.readouterr().err
    assert "2 problems" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("damage", ["no config", "no tensors", "an unknown family"])
def test_a_plan_of_next_to_nothing_is_written_too(tmp_path: Path, damage: str) -> None:
    """Even where no table can be found: problems or not, the file is written (DESIGN.md 3)."""
    source = save(
        tmp_path / "hf",
        LLAMA | ({"model_type": "gpt_neox"} if damage == "an unknown family" else {}),
        random_tensors(LLAMA),
    )
    if damage != "an unknown family":
        (source / ("config.json" if damage == "no config" else "model.safetensors")).unlink()
    assert plan_json(source, tmp_path, status=2)["problems"]


def test_a_plan_takes_converts_options(tmp_path: Path) -> None:
    """Beam's own too, so that a command can be tried as it is; a misspelt one is refused."""
    source = make_release(tmp_path / "hf")
    one, two = (
        plan_json(source, tmp_path, f"--direct_num_workers={n}", "--unit_bytes", "64MiB")["memory"]["per_worker_bytes"]
        for n in (1, 2)
    )
    assert two - one == 64 << 20
    assert call("plan", "--source", source, "--direct_num_worker=2") == 2


@pytest.mark.parametrize(("scan", "arrays"), [("true", 12), ("false", 21)])
def test_a_printed_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str], scan: str, arrays: int) -> None:
    """What a person needs to know: arrays, chunks, units, bytes, the memory bound, what is lossy and what was inferred."""
    source = make_release(tmp_path / "hf")
    assert call("plan", "--source", source, "--scan_layers", scan, "--mesh", "fsdp=7") == 0
    text = capfd.readouterr().out
    for words in (
        f"in {arrays} arrays",
        "kept apart",
        "scaled by",
        "units",
        "memory",
        "1.000 × the source",
        "doesn't divide over fsdp=7",
        "but not for fsdp=7, which MaxText will refuse",
        "embed_vocab",
    ):
        assert words in text


def test_every_mesh_axis_of_maxtext_is_taken(tmp_path: Path) -> None:
    """Each by its name."""
    source = make_release(tmp_path / "hf")
    meshes = [word for axis in mesh_axes() for word in ("--mesh", f"{axis}=2")]
    plan = plan_json(source, tmp_path, *meshes)
    assert set(plan["arrays"]["params.params.token_embedder.embedding"]["partition"]) == {
        f"{axis}=2" for axis in mesh_axes()
    }


# --- inspect ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [[], ["--use_ocdbt", "false", "--use_zarr3", "false"], ["--compression", "zstd", "--scan_layers", "false"]],
    ids=str,
)
def test_inspect_our_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str]) -> None:
    """The tree with shapes and dtypes, from the root, the step and the item alike; alike layers are one line."""
    source = make_release(tmp_path / "hf")
    step = convert(source, tmp_path / "out", *options)
    capfd.readouterr()
    texts = []
    for path in (tmp_path / "out", step, step / "items"):
        assert call("inspect", path) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert "params.params.token_embedder.embedding" in texts[0]
    assert "64 × 32" in texts[0]
    assert ("bfloat16 compressed" in texts[0]) == ("zstd" in options)
    assert f"{len(restore(step)) + 1} arrays" in texts[0]
    assert f"scan_layers={str('--scan_layers' not in options).lower()}" in texts[0]


def test_inspect_a_stock_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Orbax's own, with what its codecs compress."""
    tree = {"params": {"params": {"w": np.arange(6000, dtype=np.float32).reshape(60, 100)}}, "step": 5, "opt_state": {}}
    ocp.PyTreeCheckpointer().save(tmp_path / "stock", tree)
    assert call("inspect", tmp_path / "stock") == 0
    text = capfd.readouterr().out
    assert re.search(r"params\.params\.w +60 × 100 +float32 compressed", text)
    assert "2 arrays" in text


def test_inspect_safetensors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Tensors of a folder, alike ones on one line; and its problems, if there are any."""
    tensors = random_tensors(DEEPSEEK)
    source = save(tmp_path / "hf", DEEPSEEK, *split(tensors, 2))
    assert call("inspect", source) == 0
    text = capfd.readouterr().out
    total = sum(math.prod(values.shape) * 2 for values in tensors.values())
    assert f"model_type deepseek_v3, {len(tensors)} tensors in 2 files, {total / 1000:.3g} KB" in text
    assert re.search(r"model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight … +24 × 32 +bfloat16 +\d+ +", text)
    (source / "model-00002-of-00002.safetensors").unlink()
    assert call("inspect", source) == 2
    assert "model-00002-of-00002.safetensors" in capfd.readouterr().err


@pytest.mark.parametrize("place", ["nowhere", "empty", "a file"])
def test_inspect_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str) -> None:
    """Refused with the path."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("")
    assert call("inspect", tmp_path / place) == 2
    message = capfd.readouterr().err
    assert place in message
    assert "Traceback" not in message
