"""The API below the commands: what importing does, keywords and values, problems in exceptions, progress, a script and
a notebook.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from processes import run
from servers.clients import at_hub
from support import LLAMA, assert_same_bits, make_release, random_tensors, restore, save

import weightbeam as wb
from deploy import face
from weightbeam.pipelines import api
from weightbeam.pipelines.terminal.arguments.commands import SHELL
from weightbeam.pipelines.terminal.arguments.parser import make_parser
from weightbeam.transforms.planning.options import ConvertOptions
from weightbeam.transforms.planning.values import size

jax = lazily("jax")


def script(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script of its own."""
    return run(sys.executable, "-c", textwrap.dedent(code), *arguments)


def test_arithmetic_without_subnormal_numbers_is_refused(tmp_path: Path) -> None:
    """Such as after torch was told so, or a library that was built with -ffast-math was loaded, in this thread; `load` says
    it once its processes have met. Nothing is written.
    """
    code = """
    import sys, torch, weightbeam as wb
    release, out = sys.argv[1:]
    torch.set_flush_denormal(True)
    calls = (
        lambda: wb.convert(release, out, progress=False), lambda: wb.plan(release),
        lambda: wb.load(release, mesh="fsdp=1"), lambda: wb.diff(release, release, progress=False),
    )
    for call in calls:
        try:
            call()
        except wb.Refused as e:
            print(e)
    torch.set_flush_denormal(False)
    print(wb.convert(release, out, progress=False).path)
    """
    out = tmp_path / "out"
    told = script(code, make_release(tmp_path / "release"), out).stdout.splitlines()
    assert ["subnormal" in line for line in told] == [True] * 4 + [False]
    assert [path.name for path in out.iterdir()] == ["0"]


def test_importing_does_nothing() -> None:
    """Neither the face nor any module below it configures logging, changes the environment or prints; the face imports
    nothing else.
    """
    code = """
        import logging, os, pkgutil, sys
        before, root = dict(os.environ), logging.getLogger()
        import weightbeam
        assert "numpy" not in sys.modules and "apache_beam" not in sys.modules, sorted(sys.modules)
        assert [name for name in sys.modules if name.startswith("weightbeam.")] == []
        import apache_beam, google.cloud.storage, huggingface_hub, tensorstore, rich.progress, pydantic, requests
        huggingface_hub.HfApi  # whose own effects aren't ours
        before, handlers, level = dict(os.environ), list(root.handlers), root.level
        levels = {name: logging.getLogger(name).level for name in ("huggingface_hub", "httpx2", "httpcore2", "weightbeam")}
        for module in pkgutil.walk_packages(weightbeam.__path__, "weightbeam."):
            __import__(module.name)
        assert dict(os.environ) == before
        assert (root.handlers, root.level) == (handlers, level)
        assert levels == {name: logging.getLogger(name).level for name in levels}
        """
    ran = script(code)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_the_face() -> None:
    """Names are there, are listed, and a wrong one is an AttributeError, not an import."""
    assert {"plan", "convert", "verify", "inspect", "materialize", "Refused", "Failed"} <= set(dir(wb))
    assert all(callable(getattr(wb, name)) for name in api.HOMES)
    with pytest.raises(AttributeError, match="conver"):
        _ = wb.conver  # type: ignore[attr-defined]


def test_the_face_is_one_list() -> None:
    """`__all__`, what Tab offers, what a type checker sees, and what there is."""
    shown = [name for name in dir(wb) if not name.startswith("__")]
    checked = re.findall(r"^(?:def (\w+)\(|from \S+ import (\w+) as \2$)", face.FILE.read_text(), re.M)
    assert sorted(wb.__all__) == shown == sorted(map("".join, checked)) == sorted(api.HOMES)


def test_the_stub_is_what_the_options_make() -> None:
    """`python -m deploy.face` writes it anew."""
    assert face.FILE.read_text() == face.text()


def test_functions_are_those_of_the_face() -> None:
    """By their names, for `help` and for pickle, and always the same ones."""
    for name in api.HOMES:
        assert pickle.loads(pickle.dumps(getattr(wb, name))) is getattr(wb, name)


@pytest.mark.parametrize("name", ["plan", "convert", "verify", "inspect", "materialize"])
def test_keywords_are_the_commands_options(name: str) -> None:
    """By the same names, with the same defaults."""
    keywords = inspect.signature(getattr(wb, name)).parameters
    commands = next(action for action in make_parser()._actions if action.dest == "command")
    options = {
        action.dest: action.default for action in commands.choices[name]._actions if action.dest not in {"help", *SHELL}
    }
    if name == "plan":
        # for the verdict and the last line; a plan has `maxtext_config()`
        for asked in ("output", "resume", "overwrite", "maxtext_config", "load", "hosts"):
            del options[asked]
    assert set(options) == set(keywords) - {"beam", "progress"}
    for option, default in options.items():
        wanted = keywords[option].default
        assert (
            default == wanted
            or {default, wanted} <= {None, (), inspect.Parameter.empty}
            or size(str(default)) == size(str(wanted))
        ), option


def test_a_script(source: Path, tmp_path: Path) -> None:
    """Plans, converts, verifies and inspects without a word but the progress bar's, which nobody sees here."""
    code = """
        import sys
        import weightbeam as wb
        source, output = sys.argv[1:]
        plan = wb.plan(source, mesh="fsdp=2", unit_bytes="64MiB")
        assert not plan.problems and len(plan.arrays) == 12, plan
        made = wb.convert(plan, output, progress=False)
        assert made.path == f"{output}/0/items", made.path
        found = wb.verify(output, source, progress=False)
        assert found.ok and not found.faults and len(found.findings) == 12
        assert "params.params.decoder.decoder_norm.scale" in wb.inspect(output).to_dict()["arrays"]
        try:
            wb.convert(source, output)
        except wb.Refused as e:
            assert [(p.kind, p.subject) for p in e.problems] == [("output", f"{output}/0")], e.problems
        else:
            raise AssertionError
        """
    ran = script(code, source, tmp_path / "out")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_plain_install(source: Path, tmp_path: Path) -> None:
    """Without the extras: nothing is printed that isn't ours, the root logger is as it was, and who wants JAX is told what
    to install.
    """
    code = """
        import logging, sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("apitools", "jax", "jaxlib", "orbax"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())
        import weightbeam as wb
        source, output, *rest = sys.argv[1:]
        wb.convert(source, output, progress=False) if not rest else wb.verify(output, source, progress=False).check()
        assert ("apache_beam" in sys.modules) == (not rest) and not logging.getLogger().handlers
        assert logging.warning.__module__ == "logging", logging.warning
        try:
            wb.load(source, mesh="fsdp=1")
        except wb.Refused as e:
            assert "pip install '.[restore]'" in str(e), e
        else:
            raise AssertionError
        logging.warning("this is shown")
        """
    for rest in ((), ("verify",)):
        ran = script(code, source, tmp_path / "out", *rest)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "WARNING:root:this is shown\n")


def test_the_same_as_the_command(source: Path, tmp_path: Path) -> None:
    """Bit for bit, from a plan or from its source."""
    made = [
        wb.convert(str(source), str(tmp_path / "a"), mesh=["fsdp=2"], scan_layers=False),
        wb.convert(wb.plan(str(source), mesh="fsdp=2", scan_layers="false"), str(tmp_path / "b"), progress=False),  # type: ignore[arg-type]
    ]
    assert made[0].planned.hash == made[1].planned.hash
    assert_same_bits(*(restore(tmp_path / name / "0") for name in "ab"))


def test_problems_are_values(source: Path, tmp_path: Path) -> None:
    """A plan with problems is a plan; converting it is refused with all of them, and nothing is written."""
    tensors = random_tensors(LLAMA)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    plan = wb.plan(str(save(tmp_path / "hf", LLAMA, tensors)))
    assert {problem.kind for problem in plan.problems} == {"missing", "shape"}
    assert "2 problems" in str(plan)
    for call in (plan.check, lambda: wb.convert(plan, str(tmp_path / "out"))):
        with pytest.raises(wb.Refused) as refused:
            call()
        assert set(refused.value.problems) == set(plan.problems)
    assert not (tmp_path / "out").exists()
    with pytest.raises(wb.Refused, match="no such folder"):
        wb.plan(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        (dict(save_dtype="fp8"), wb.Refused, "save_dtype='fp8' should be bfloat16 or float32"),
        (dict(save_dtype=np.int32), wb.Refused, "should be bfloat16 or float32"),
        (dict(save_dtype=("f4", -1)), wb.Refused, "should be bfloat16 or float32"),
        (dict(hf_token_secret=3), wb.Refused, "secret"),
        (dict(vocab_size=-1), wb.Refused, "vocab_size"),
        (dict(unit_bytes="much"), wb.Refused, "unit_bytes"),
        (dict(mesh="fdsp=2"), wb.Refused, "fdsp"),
        (dict(sharding_rules="nowhere.yml"), wb.Refused, "nowhere.yml"),
        (dict(scan_layer=True), TypeError, "did you mean scan_layers"),
        (dict(family=""), wb.Refused, "family='' says nothing; leave it out"),
        (dict(lora=""), wb.Refused, "lora='' says nothing"),
        (dict(lora=["adapter", None]), wb.Refused, "should be a path, or a list of paths"),
        (dict(mesh=[None]), wb.Refused, "should be a text, or a list of texts"),
        (dict(mesh=b"fsdp=2"), wb.Refused, "should be a text, or a list of texts"),
        (dict(mesh={"fsdp": 8}), wb.Refused, "should be a text, or a list of texts"),
        (dict(beam="--runner=DirectRunner"), wb.Refused, "beam='--runner=DirectRunner' should be a list of texts"),
        (dict(unit_bytes=[1]), wb.Refused, r"unit_bytes='\[1\]' should be bytes"),
        (dict(param_scan_axis=[0]), wb.Refused, "should be an integer"),
        (dict(save_dtype=["float32"]), wb.Refused, "should be bfloat16 or float32"),
        (dict(maxtext_model="\ud800"), wb.Refused, "half a character"),
        (dict(beam=["--direct_num_workers=x"]), wb.Refused, "--direct_num_workers: invalid int value: 'x'"),
        (dict(worker_gbps=3.0), wb.Refused, "worker_gbps= needs workers="),
        (dict(beam=["--nonsense"]), wb.Refused, "unknown options: --nonsense"),
        (dict(beam=["--help"]), wb.Refused, "unknown options: --help"),
    ],
    ids=str,
)
def test_wrong_keywords(source: Path, keywords: dict, error: type[Exception], words: str) -> None:
    """What the command line would refuse is refused, and a keyword that isn't there is Python's own mistake."""
    with pytest.raises(error, match=words):
        wb.plan(str(source), **keywords)


def test_beams_options_end_no_process(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for beam in (["--help"], ["--nonsense", "4", "--num_workers", "4"], ["--nonsense", "x", "--temp_location", "x"]):
        with pytest.raises(wb.Refused, match="unknown options: --"):
            wb.convert(source, tmp_path / "out", beam=beam)
    with pytest.raises(wb.Refused, match=r"--runner=json\.nope: "):
        wb.convert(source, tmp_path / "out", beam=["--runner=json.nope"])
    assert capsys.readouterr() == ("", "")


def test_dtypes_are_taken_as_numpy_and_jax_name_them(source: Path) -> None:
    for dtype in (np.float32, np.dtype("float32"), jax.numpy.float32, "float32", "fp32"):
        assert {array.dtype.name for array in wb.plan(source, save_dtype=dtype).arrays} == {"float32"}


def test_a_place_is_a_text(source: Path, tmp_path: Path) -> None:
    for call in (
        lambda: wb.export(source, tmp_path / "out", like=3),
        lambda: wb.export(source, tmp_path / "out", maxtext_config={"base_emb_dim": 3}),
        lambda: wb.logits(source, token_ids=[1], save_logits=3),
    ):
        with pytest.raises(wb.Refused, match="should be a text: a path, a URL or a name"):
            call()


def test_a_plan_is_a_value(source: Path) -> None:
    """Text, HTML, JSON, a short repr; equal to what the command writes."""
    plan = wb.plan(str(source), mesh="fsdp=2")
    assert "token_embedder.embedding" in str(plan)
    assert max(len(line) for line in str(plan).splitlines() if "weightbeam.convert" not in line) <= 80
    assert plan._repr_html_().count("<table>") >= 2
    assert json.loads(plan.to_json()) == json.loads(json.dumps(plan.to_dict()))
    assert set(plan.to_dict()["arrays"]) == {array.key for array in plan.arrays}
    assert repr(plan) == f"<weightbeam.Plan: {source}: 12 arrays, {plan.conversion.target_bytes / 1000:.3g} KB>"


@pytest.mark.parametrize("nothing", [dict(lora=[]), dict(lora=()), dict(mesh=[]), dict(mesh=())], ids=str)
def test_none_of_several(source: Path, nothing: dict) -> None:
    """An empty list of adapters or meshes is as none given."""
    assert wb.plan(str(source), **nothing).to_json() == wb.plan(str(source)).to_json()


MISTAKES: dict[str, Callable[[str, str], Any]] = {  # of a release and a folder for what is made
    "no such folder": lambda hf, tmp: wb.plan(f"{tmp}/nowhere"),
    "no such folder to convert": lambda hf, tmp: wb.convert(f"{tmp}/nowhere", f"{tmp}/out"),
    "no such mesh": lambda hf, tmp: wb.convert(hf, f"{tmp}/out", mesh="fdsp=8"),
    "half a mesh": lambda hf, tmp: wb.plan(hf, mesh="8"),
    "no output": lambda hf, tmp: wb.convert(hf, ""),
    "no source": lambda hf, tmp: wb.convert("", f"{tmp}/out"),
    "neither": lambda hf, tmp: wb.convert("", ""),
    "output is a file": lambda hf, tmp: wb.convert(hf, f"{hf}/config.json"),
    "exists": lambda hf, tmp: wb.convert(hf, f"{tmp}/ckpt"),
    "a number": lambda hf, tmp: wb.plan(hf, vocab_size=-1),
    "a size": lambda hf, tmp: wb.plan(hf, unit_bytes="much"),
    "a dtype": lambda hf, tmp: wb.plan(hf, save_dtype="int3"),
    "rules": lambda hf, tmp: wb.plan(hf, sharding_rules=f"{tmp}/nowhere.yml"),
    "rules in place": lambda hf, tmp: wb.plan(hf, sharding_rules=[1]),
    "an adapter": lambda hf, tmp: wb.plan(hf, lora=f"{tmp}/nowhere"),
    "an adapter's weight": lambda hf, tmp: wb.plan(hf, lora=f"{tmp}/nowhere,0"),
    "a virtual one": lambda hf, tmp: wb.convert(hf, f"{tmp}/out", virtual=True, use_zarr3=False),
    "a runner": lambda hf, tmp: wb.convert(hf, f"{tmp}/out", beam=["--runner=Nobody"]),
    "Beam's option": lambda hf, tmp: wb.convert(hf, f"{tmp}/out", beam=["--rnner=DirectRunner"]),
    "a family": lambda hf, tmp: wb.convert(hf, f"{tmp}/out", family="nobody"),
    "export without like": lambda hf, tmp: wb.export(f"{tmp}/strange", f"{tmp}/out"),
    "export of a release": lambda hf, tmp: wb.export(hf, f"{tmp}/out"),
    "export to nowhere": lambda hf, tmp: wb.export(f"{tmp}/ckpt", ""),
    "export like nothing": lambda hf, tmp: wb.export(f"{tmp}/ckpt", f"{tmp}/out", like=f"{tmp}/nowhere"),
    "export of alpha": lambda hf, tmp: wb.export(f"{tmp}/ckpt", f"{tmp}/out", lora_alpha=1),
    "export to a request": lambda hf, tmp: wb.export(f"{tmp}/ckpt", f"{tmp}/out", create_pr=True),
    "reshard to nowhere": lambda hf, tmp: wb.reshard(f"{tmp}/ckpt", ""),
    "reshard of nothing": lambda hf, tmp: wb.reshard("", f"{tmp}/out"),
    "reshard a state": lambda hf, tmp: wb.reshard(f"{tmp}/ckpt", f"{tmp}/out", state="half"),
    "reshard layers": lambda hf, tmp: wb.reshard(f"{tmp}/strange", f"{tmp}/out", scan_layers=False),
    "merge nothing": lambda hf, tmp: wb.merge(hf, f"{tmp}/out"),
    "quantise to": lambda hf, tmp: wb.quantize(hf, f"{tmp}/out", format="fp3"),
    "quantise a release's steps": lambda hf, tmp: wb.quantize(hf, f"{tmp}/out", step=3, param_scan_axis=0),
    "dequantise nothing": lambda hf, tmp: wb.dequantize(hf, f"{tmp}/out"),
    "verify nothing": lambda hf, tmp: wb.verify(""),
    "verify a strange one": lambda hf, tmp: wb.verify(f"{tmp}/strange"),
    "verify a sample": lambda hf, tmp: wb.verify(f"{tmp}/ckpt", sample=2),
    "verify like": lambda hf, tmp: wb.verify(f"{tmp}/ckpt", like=hf),
    "inspect nothing": lambda hf, tmp: wb.inspect(""),
    "inspect a release's mesh": lambda hf, tmp: wb.inspect(hf, mesh="fsdp=2"),
    "materialise an ordinary one": lambda hf, tmp: wb.materialize(f"{tmp}/ckpt", f"{tmp}/out"),
    "diff of what isn't": lambda hf, tmp: wb.diff(hf, f"{tmp}/nowhere"),
    "diff less than none": lambda hf, tmp: wb.diff(hf, hf, tolerance=-1),
    "fit to nothing": lambda hf, tmp: wb.fit(hf, f"{tmp}/nowhere.yml"),
    "fit to nobody": lambda hf, tmp: wb.fit(hf, "llama3-8000b"),
    "load to nowhere": lambda hf, tmp: wb.load(hf),
    "load to half a mesh": lambda hf, tmp: wb.load(hf, mesh="8"),
    "load to too many": lambda hf, tmp: wb.load(hf, mesh="fsdp=4096"),
    "open nothing": lambda hf, tmp: wb.open(f"{tmp}/nowhere"),
}


@pytest.fixture(scope="module")
def mistaken(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of ours and one that says nothing of itself."""
    folder = tmp_path_factory.mktemp("mistaken")
    wb.convert(str(source), str(folder / "ckpt"), progress=False)
    shutil.copytree(folder / "ckpt", folder / "strange")
    for told in (
        *folder.glob("strange/0/items/_CHECKPOINT_METADATA"),
        *folder.glob("strange/0/*.json"),
        *folder.glob("strange/0/release.*"),
        *folder.glob("strange/0/maxtext.yml"),
    ):
        told.unlink()
    metadata = folder / "strange" / "0" / "items" / "_METADATA"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"custom_metadata": {}}))
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_has_its_problems(mistake: str, source: Path, mistaken: Path) -> None:
    """One at least, each with a kind and a message, told in Python's words."""
    with pytest.raises(wb.Refused) as refused:
        MISTAKES[mistake](str(source), str(mistaken))
    assert refused.value.problems
    assert mistake not in OF_OPTIONS or {problem.kind for problem in refused.value.problems} == {"option"}
    for problem in refused.value.problems:
        assert problem.kind
        assert problem.message
        assert problem.message in str(refused.value)
    told = str(refused.value)
    ours = [
        option
        for option in re.findall(r"(?<![\w`-])--(\w+)", re.sub(r"weightbeam [a-z]+[^;\n]*", "", told))
        if option not in BEAMS
    ]
    assert not ours, told


OF_OPTIONS = {
    "no such mesh",
    "no output",
    "neither",
    "rules in place",
    "export of alpha",
    "export to a request",
    "verify like",
}
BEAMS = {"runner", "rnner", "help"}  # which are given as on the command line


def test_options_are_spelled_out() -> None:
    """For `help()` and completion: every option, with its default."""
    parameters = inspect.signature(wb.convert).parameters
    for name, default in vars(ConvertOptions()).items():
        assert parameters[name].default == default


def test_progress_is_told(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """To a callback: from nothing to all of it, the last time with `finished`; nothing is printed."""
    told: list[wb.Progress] = []
    plan = wb.plan(str(source))
    wb.convert(plan, str(tmp_path / "out"), progress=told.append)
    assert told[-1].finished
    assert not any(now.finished for now in told[:-1])
    assert (told[-1].doing, told[-1].done, told[-1].total) == (
        "converting",
        plan.conversion.target_bytes,
        plan.conversion.target_bytes,
    )
    told.clear()
    wb.verify(str(tmp_path / "out"), str(source), progress=told.append)
    assert told[-1].done == told[-1].total > 0
    assert capfd.readouterr() == ("", "")


def test_a_callback_that_fails(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and the work goes on."""

    def fail(now: wb.Progress) -> None:
        raise ValueError("mine")

    assert wb.convert(source, tmp_path / "out", progress=fail).state == "done"
    assert [record.getMessage() for record in caplog.records if "callback" in record.getMessage()] == [
        "progress isn't told any more: the callback failed with ValueError: mine"
    ]


def test_a_plan_that_is_older_than_its_source(source: Path, tmp_path: Path) -> None:
    """Only another plan helps; nothing was begun."""
    copy = shutil.copytree(source, tmp_path / "hf")
    plan = wb.plan(copy)
    os.utime(next(copy.glob("*.safetensors")))
    with pytest.raises(wb.Refused, match="plan it anew"):
        wb.convert(plan, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    assert wb.convert(wb.plan(copy), tmp_path / "out", progress=False).state == "done"


def test_values_go_from_process_to_process(source: Path, tmp_path: Path) -> None:
    """As a pool of processes gives them back, of folders and of the hub."""
    converted = wb.convert(source, tmp_path / "out", progress=False)
    virtual = wb.convert(source, tmp_path / "virtual", virtual=True, link="copy", progress=False)
    values = [converted, virtual, wb.plan(source), wb.verify(tmp_path / "out", progress=False)]
    values += [wb.materialize(tmp_path / "virtual", tmp_path / "own", progress=False)]
    with at_hub() as hub:
        hub.add("org/model", source)
        values += [wb.plan("hf://org/model"), wb.convert("hf://org/model", tmp_path / "of_hub", progress=False)]
        for value in values:
            sent = pickle.loads(pickle.dumps(value))
            assert (repr(sent), sent.to_dict()) == (repr(value), value.to_dict())
        planned = pickle.loads(pickle.dumps(values[2]))
        assert wb.convert(planned, tmp_path / "planned", progress=False).state == "done"


class Place:
    """A path of another package's."""

    def __init__(self, path: Path):
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_places_of_other_kinds(source: Path, tmp_path: Path) -> None:
    """What says where it is, is a path; what doesn't is refused, and no folder gets its name."""
    wb.cut(Place(source), Place(tmp_path / "cut"), layers="0:1", progress=False)
    assert (tmp_path / "cut" / "model.safetensors").exists()
    for output in (True, ["out"], 5, object()):
        with pytest.raises(wb.Refused, match=r"output=.* should be a text: a path, a URL or a name"):
            wb.convert(source, output, progress=False)
    with pytest.raises(wb.Refused, match="other='' names nothing"):
        wb.logits(source, "", token_ids=[1])
    with pytest.raises(wb.Refused, match="as_is='false' should be True or False"):
        wb.open(source, as_is="false")


def test_warnings_are_logged(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the logger `weightbeam`."""
    wb.convert(str(source), str(tmp_path / "out"), mesh="fsdp=7", progress=False)
    assert any(
        record.name == "weightbeam" and record.levelname == "WARNING" and "fsdp=7" in record.getMessage()
        for record in caplog.records
    )


def test_a_notebook(source: Path, tmp_path: Path) -> None:
    """In a kernel of its own: a plan shows itself as HTML, a conversion runs beside the kernel's event loop and says
    where the checkpoint is.
    """
    import nbclient
    import nbformat

    cells = [
        f"import weightbeam as wb\nplan = wb.plan({str(source)!r}, mesh='fsdp=2')\nplan",
        f"told = []\nmade = wb.convert(plan, {str(tmp_path / 'out')!r}, progress=told.append)\nprint(made.path, told[-1].finished)",
        f"wb.verify({str(tmp_path / 'out')!r}, {str(source)!r}, progress=False)",
        f"wb.convert({str(source)!r}, {str(tmp_path / 'out')!r})",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    nbclient.NotebookClient(notebook, timeout=120, allow_errors=True).execute()
    planned, converted, verified, refused = (cell.outputs for cell in notebook.cells)
    assert "<table>" in planned[0]["data"]["text/html"]
    assert [output["text"] for output in converted] == [f"{tmp_path / 'out'}/0/items True\n"]
    assert "12 arrays compared" in verified[0]["data"]["text/html"]
    assert (refused[-1]["ename"], "exists; overwrite=True" in refused[-1]["evalue"]) == ("Refused", True)


def test_an_interrupted_cell(source: Path, tmp_path: Path) -> None:
    """It shows that it is at work before anything is read, how far it is while it is; its interrupt is one line, which
    says how to go on, and so does the next call.
    """
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    output = tmp_path / "out"

    def run(code: str, until: str = "") -> list[dict]:
        """What a cell shows; interrupted once it shows some text."""
        client.execute(code)
        shown: list[dict] = []
        while True:
            message = client.get_iopub_msg(timeout=120)
            content = message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                if message["parent_header"]["msg_type"] == "execute_request":
                    return shown
            elif message["msg_type"] not in ("status", "execute_input"):
                shown.append(content)
                if until and until in str(content):
                    manager.interrupt_kernel()
                    until = ""

    try:
        run("import weightbeam as wb")
        convert = f"wb.convert({str(source)!r}, {str(output)!r}, unit_bytes='4KB', beam=['--direct_num_workers=1'])"
        first, *_, last = run(convert, until="converting: ")
        assert first["data"]["text/plain"] == "convert: reading headers"
        told = "convert was stopped; what is done is kept, the same call with resume=True goes on from there"
        assert (last["ename"], last["evalue"], last["traceback"]) == ("Interrupted", told, [f"Interrupted: {told}"])
        *_, refused = run(convert)
        assert "resume=True" in refused["evalue"]
        assert "--" not in refused["evalue"]
        *_, value = run(convert.replace("beam=", "resume=True, beam="))
        assert value["data"]["text/plain"].startswith(f"<weightbeam.Converted: {output}/0/items: 12 arrays")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_paths_and_what_is_none(tmp_path: Path) -> None:
    """Places may be paths; what can't be one is refused."""
    source = make_release(tmp_path / "hf")
    wb.cut(source, tmp_path / "cut", layers="0:1", progress=False)
    assert (tmp_path / "cut" / "model.safetensors").exists()
    for options in (dict(lora=5), dict(mesh=3)):
        with pytest.raises(wb.Refused, match=f"{next(iter(options))}={next(iter(options.values()))} should be"):
            wb.plan(source, **options)
    with pytest.raises(wb.Refused, match=r"adapter_config\.json"):
        wb.merge(source, tmp_path / "out", lora=tmp_path / "hf", progress=False)
    for progress in ("x", None, 5):
        with pytest.raises(wb.Refused, match="should be True, False"):
            wb.cut(source, tmp_path / "out", layers="0:1", progress=progress)
    for mesh in ([], 5, Path("fsdp=1")):
        with pytest.raises(wb.Refused, match=r"should be a jax\.sharding\.Mesh"):
            wb.load(source, mesh=mesh)
    keys, here = list(wb.open(source)), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wide = {key: jax.ShapeDtypeStruct(array.shape, "float64", sharding=here) for key, array in wb.open(source).items()}
    for like, words in ((dict.fromkeys(keys, 3), "the tree asks for"), (wide, "float64, of which JAX makes float32")):
        with pytest.raises(wb.Refused, match=words):
            wb.load(source, like=like)
    for call in (
        lambda: wb.plan(source, sharding_rules="\0"),
        lambda: wb.cut(source, "a\0b", layers="0:1"),
        lambda: wb.fit(source, Path("a\0.yml")),
    ):
        with pytest.raises(wb.Refused, match="holds a NUL"):
            call()
    with pytest.raises(wb.Refused, match=r"maxtext_model=.*my\.yml"):
        wb.fit(source, tmp_path / "my.yml")
    assert not (tmp_path / "out").exists()
