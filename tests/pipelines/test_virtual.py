"""Virtual checkpoints: they restore as ordinary ones do, bit for bit; they don't lie when their files change; and they
become ordinary ones.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from lazily import lazily
from pairs import each, some
from processes import run
from support import (
    BF16,
    FP8,
    HERE,
    LLAMA,
    QWEN3_MOE,
    assert_same_bits,
    call,
    convert,
    digests,
    given,
    given_arrays,
    make_release,
    random_tensors,
    restore,
    save,
)

import weightbeam as wb
from weightbeam.formats.orbax import find_items, ocdbt
from weightbeam.formats.staging import folder, links
from weightbeam.formats.staging.links import SOURCE
from weightbeam.formats.storage import Store, open_store
from weightbeam.pipelines.checking import virtual

ocp = lazily("orbax.checkpoint")

MODELS = [
    "llama", "mistral", "qwen3", "mixtral", "deepseek_v3", "deepseek_v4", "olmo3-grouped", "gemma2-27b", "gemma3-text", "gemma3-vision", "llama4",
    "llama4-dense", "kimi_k25", "qwen3_5", "qwen3_5-text", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni", "gemma4-vision", "gemma4-text", "gemma4-e4b",
]  # fmt: skip
UNSCANNED_ONLY = ("gemma4-small", "gemma4-e4b", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni")
SOURCES = some([("cases", case) for case in given()] + [("models", model) for model in MODELS], 6)


def options_of(kind: str, name: str, layout: str) -> list[str]:
    options = ["--scan_layers", str(layout == "scanned").lower()]
    if name.endswith("-fp32"):
        options += ["--save_dtype", "float32"]
    if kind == "cases":
        options += ["--maxtext_model", given()[name]["maxtext_model"], "--vocab_size", str(given()[name]["vocab"])]
    return options


def record(step: Path) -> dict:
    return json.loads((step / "conversion.json").read_bytes())


def keys(step: Path) -> set[str]:
    """Every key of a checkpoint's database."""
    store = ts.KvStore.open(ocdbt.database(find_items(step)), context=ocdbt.context()).result()
    return {key.decode() for key in store.list().result()}


def own_bytes(step: Path) -> int:
    """Bytes of a checkpoint that aren't the source's."""
    return sum(path.stat().st_size for path in step.rglob("*") if path.is_file() and path.suffix != ".safetensors")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model that is virtual as a whole."""
    return make_release(tmp_path / "source", QWEN3_MOE, files=2)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A model whose query is scaled, so that it is written."""
    return make_release(tmp_path / "mixed", files=2)


# --- what is restored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        (source, layout)
        for source, layout in each(SOURCES, ["scanned", "unscanned"])
        if layout == "unscanned" or source[1] not in UNSCANNED_ONLY
    ],
)
def test_restores_what_the_ordinary_conversion_writes(
    generated: Path, tmp_path: Path, source: tuple[str, str], layout: str
) -> None:
    """All virtual or mixed, cut for a mesh or not: the same names, shapes, dtypes and bits.

    That a reference is the very bytes that a conversion would write doesn't depend on the family: `tests/transforms/
    test_virtual.py` proves it of boxes, `tests/model_mappings/test_tiling.py` of every family's arrays.
    """
    kind, name = source
    folder, options = generated / kind / name, options_of(kind, name, layout)
    wanted = restore(convert(folder, tmp_path / "ordinary", *options))
    mesh = ["--mesh", "fsdp=4,tensor=2"] if layout == "scanned" else []
    step = convert(folder, tmp_path / "virtual", *options, *mesh, "--virtual")
    assert_same_bits(restore(step), wanted)
    assert record(step)["references"]["arrays"] > 0


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        pytest.param(1, "1x1", marks=pytest.mark.slow("restores in a process of JAX, 20 s; eight devices always run")),
        (8, "4x2"),
    ],
)
def test_every_way_to_restore(generated: Path, tmp_path: Path, devices: int, mesh: str) -> None:
    """Stock Orbax's and MaxText's ways, with and without targets: MaxText's own bits, of a virtual and of a mixed
    checkpoint.
    """
    cases = ("deepseek3", "mixtral")
    steps = [
        convert(
            generated / "cases" / case,
            tmp_path / case,
            *options_of("cases", case, "scanned"),
            "--virtual",
            "--mesh",
            "fsdp=2",
        )
        for case in cases
    ]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(HERE),
        "JAX_PLATFORMS": "cpu",
    }
    script = [sys.executable, str(HERE / "pipelines" / "restore_ways.py"), tmp_path / "told.json", mesh, *steps]
    run(*script, env=environment, status=0)
    for case, told in zip(cases, json.loads((tmp_path / "told.json").read_bytes()).values(), strict=True):
        assert len(told) == 9
        assert all(result["arrays"] == given_arrays(case, "scanned") for result in told.values())


def test_no_weight_is_written(source: Path, tmp_path: Path) -> None:
    """The files are the source's own; the rest is an index and what describes it."""
    step = convert(source, tmp_path / "out", "--virtual")
    for file in source.glob("*.safetensors"):
        assert (step / "items" / SOURCE / file.name).samefile(file)
    assert own_bytes(step) < 30_000
    assert not list((step / "items").glob("ocdbt.process_*"))
    assert sorted(path.name for path in (step / "items" / SOURCE).iterdir()) == sorted(
        path.name for path in source.iterdir()
    )


def test_beam_is_not_needed_where_nothing_is_made(source: Path, tmp_path: Path) -> None:
    """Start-up is most of the time then."""
    code = "import sys; from weightbeam.pipelines.cli import main; "
    code += f"main(['convert','--source',{str(source)!r},'--output',{str(tmp_path / 'out')!r},'--virtual']); "
    code += "sys.exit('apache_beam' in sys.modules)"
    run(sys.executable, "-c", code, cwd=HERE.parent, status=0)
    assert restore(tmp_path / "out" / "0")


@pytest.mark.parametrize("link", ["hard", "symlink", "copy"])
def test_each_kind_of_link(mixed: Path, tmp_path: Path, link: str) -> None:
    """All hold the same; a hub's cache is links, of which the real file is taken, and which tells the files' hashes."""
    wanted = restore(convert(mixed, tmp_path / "ordinary"))
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in sorted(mixed.iterdir()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    step = convert(snapshot, tmp_path / "out", "--virtual", "--link", link)
    assert_same_bits(restore(step), wanted)
    for file in record(step)["references"]["files"]:
        path = step / "items" / SOURCE / file["name"]
        assert path.is_symlink() == (link == "symlink")
        assert path.samefile(snapshot / file["name"]) == (link != "copy")
        assert file["link"] == link
        assert file["sha256"] == (snapshot / file["name"]).resolve().name
        assert file["inode"] == path.stat().st_ino


def test_links_lead_to_a_source_that_is_told_by_its_name(mixed: Path, tmp_path: Path) -> None:
    """With `--full_paths false` the record doesn't say where the source lies; the links do."""
    step = convert(mixed, tmp_path / "out", "--virtual", "--link", "symlink", "--full_paths", "false")
    assert "/" not in record(step)["source"]
    assert call("verify", tmp_path / "out") == 0
    assert call("materialize", tmp_path / "out", tmp_path / "ordinary") == 0
    assert_same_bits(restore(tmp_path / "ordinary" / "0"), restore(step))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_quantised_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With the reason; nothing is left behind."""
    tensors = random_tensors(LLAMA)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].astype(FP8)
        tensors[f"{name}_scale_inv"] = np.full([-(-n // 16) for n in tensors[name].shape], 0.5, np.float32)
    config = LLAMA | dict(quantization_config=dict(quant_method="fp8", weight_block_size=[16, 16]))
    source = save(tmp_path / "source", config, tensors)
    assert call("convert", "--source", source, "--output", tmp_path / "out", "--virtual") == 2
    assert "quantised" in (told := capsys.readouterr().err)
    assert "Convert without --virtual" in told
    assert not (tmp_path / "out").exists()


def test_another_file_system_is_refused_with_the_ways_out(
    source: Path, mixed: Path, capsys: pytest.CaptureFixture
) -> None:
    """A hard link can't lead there; a symbolic one and a copy can."""
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == source.stat().st_dev:
        pytest.skip("there is only one file system")
    with tempfile.TemporaryDirectory(dir=other) as folder:
        for model in (source, mixed):  # without units, and with some
            output = Path(folder) / model.name
            assert call("convert", "--source", model, "--output", output, "--virtual") == 2
            told = capsys.readouterr().err
            assert "another file system; --link symlink" in told
            assert "--link copy" in told
            assert not output.exists()
            for link in ("symlink", "copy"):
                assert restore(convert(model, output / link, "--virtual", "--link", link))


@pytest.mark.parametrize("link", ["hard", "symlink"])
def test_a_file_system_without_links_is_refused_with_what_it_can(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, link: str
) -> None:
    """As exFAT in FUSE answers."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "symlink", refuse)
    assert call("convert", source, tmp_path / "out", "--virtual", "--link", link) == 2
    told = capsys.readouterr().err
    assert "Function not implemented: this system doesn't allow it; --link copy copies it" in told


def test_a_small_share_is_a_warning_that_says_how_small(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """gpt-oss's gate and up alternate in one tensor: they are written."""
    source = generated / "cases" / "gpt-oss"
    assert call("plan", "--source", source, "--virtual", "--json", tmp_path / "plan.json") == 0
    shown = capsys.readouterr().out
    assert "warning: only 57 % of the bytes are virtual, the rest is written\n" in shown  # the table says why
    assert "takes one of 2 elements that lie side by side" in shown
    told = json.loads((tmp_path / "plan.json").read_bytes())["virtual"]
    assert {key.rpartition(".")[2] for key, why in told["arrays"].items() if why} == {
        "wi_0",
        "wi_1",
        "wi_0_bias",
        "wi_1_bias",
    }
    assert told["bytes"]["virtual"] > told["bytes"]["written"] > 0
    assert 0 < told["bytes"]["index"] < 10_000
    convert(source, tmp_path / "out", "--virtual")
    assert "the rest is written; weightbeam plan --virtual says why\n" in capsys.readouterr().err


# --- what is interrupted ----------------------------------------------------------------------------------------------


def test_a_copy_for_which_there_is_no_room(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """That is said, and not that the source changed, also where only its last bytes have none."""
    source = make_release(tmp_path / "source", files=1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((source / "model.safetensors").stat().st_size - 10, limit[1]))
    try:
        assert call("convert", source, tmp_path / "out", "--virtual", "--link", "copy") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = capfd.readouterr().err
    assert "(--link copy): File too large" in said
    assert "changed" not in said


@pytest.mark.parametrize("link", ["hard", "copy"])
def test_resume_goes_on(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str) -> None:
    """Killed when the index was merged, but not yet published: the units and the copies that are there stay, and the
    result is the same.
    """
    wanted = restore(convert(mixed, tmp_path / "ordinary"))
    command = ["convert", "--source", mixed, "--output", tmp_path / "out", "--virtual", "--link", link]
    with monkeypatch.context() as patched:
        patched.setattr("weightbeam.formats.targets.orbax._check_references", lambda *_: 1 / 0)
        assert call(*command) == 1
    (staging,) = (tmp_path / "out").glob("0.*.orbax-checkpoint-tmp")
    before = {
        path: path.stat().st_ino
        for path in [*staging.glob("items/ocdbt.process_*/d/*"), *staging.glob("items/source/*.safetensors")]
    }
    assert before
    assert call(*command, "--resume") == 0
    after = {path: (tmp_path / "out" / "0" / path.relative_to(staging)).stat().st_ino for path in before}
    assert after == before
    assert_same_bits(restore(tmp_path / "out" / "0"), wanted)
    assert call(*command, "--resume") == 0
    assert call(*command) == 2
    assert call(*command, "--overwrite") == 0


@pytest.mark.parametrize("again", [("--link", "copy"), ("--sha256",), ("moved",)], ids=lambda words: words[-1])
def test_what_is_whole_but_for_its_name_refers_to_what_is_asked_for(
    again: tuple[str, ...], mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Links that lead to where the release was would read whatever lies there by now."""
    source = Path(shutil.copytree(mixed, tmp_path / "hf"))

    def fails(*_: object) -> None:
        raise OSError(5, "the power is gone")

    with monkeypatch.context() as patched:
        patched.setattr(folder, "rename_new", fails)
        assert call("convert", source, tmp_path / "out", "--virtual", "--link", "symlink") == 1
    if again == ("moved",):
        source, again = source.rename(tmp_path / "elsewhere"), ()
    options = ("--virtual", "--link", "symlink", *again, "--resume")
    capsys.readouterr()
    assert call("convert", source, tmp_path / "out", *options) == 2
    assert "start anew with --overwrite" in capsys.readouterr().err
    assert not (tmp_path / "out" / "0").exists()
    assert call("convert", source, tmp_path / "out", *options[:-1], "--overwrite") == 0
    assert call("verify", tmp_path / "out") == 0


def test_a_virtual_conversion_that_has_no_units_resumes_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Beam it is the same staging folder."""
    command = ["convert", "--source", source, "--output", tmp_path / "out", "--virtual"]
    with monkeypatch.context() as patched:
        patched.setattr(
            "weightbeam.formats.staging.FolderStaging.publish", lambda *_: (_ for _ in ()).throw(OSError("stopped"))
        )
        assert call(*command) == 1
    assert call(*command) == 2
    assert call(*command, "--resume") == 0
    assert call("verify", "--source", source, "--checkpoint", tmp_path / "out") == 0


# --- what happens later -----------------------------------------------------------------------------------------------


def weights(source: Path) -> Path:
    return sorted(source.glob("*.safetensors"))[0]


def move(source: Path) -> None:
    source.rename(source.with_name("elsewhere"))


def replace(source: Path) -> None:
    """By another file of the same size and the same times, as a download does it."""
    file, other = weights(source), source / "other"
    shutil.copy2(file, other)
    with other.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"\1\2")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.rename(file)


def change_last_bytes(source: Path) -> None:
    with weights(source).open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"\1\2")


def truncate(source: Path) -> None:
    os.truncate(weights(source), weights(source).stat().st_size - 2)


ACCIDENTS = {
    "moved": move,
    "deleted": shutil.rmtree,
    "replaced by rename": replace,
    "changed in place": change_last_bytes,
    "truncated": truncate,
}
TOLD = {  # exit status, and what is said
    ("hard", "moved"): (2, "no such folder"),
    ("hard", "deleted"): (2, "no such folder"),
    ("hard", "replaced by rename"): (1, "elements differ"),
    ("hard", "changed in place"): (1, "was changed in place, or touched"),
    ("hard", "truncated"): (1, "bytes, and had"),
    ("symlink", "moved"): (1, "is gone; it was a link to"),
    ("symlink", "deleted"): (1, "is gone; it was a link to"),
    ("symlink", "replaced by rename"): (1, "is another file"),
    ("symlink", "changed in place"): (1, "was changed in place, or touched"),
    ("symlink", "truncated"): (1, "bytes, and had"),
    ("copy", "moved"): (2, "no such folder"),
    ("copy", "deleted"): (2, "no such folder"),
    ("copy", "replaced by rename"): (1, "elements differ"),
    ("copy", "changed in place"): (1, "elements differ"),
    ("copy", "truncated"): (2, "truncated?"),
}


@pytest.mark.parametrize(("link", "accident"), each(["hard", "symlink", "copy"], [*ACCIDENTS]))
def test_verify_says_what_happened_to_the_source(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, link: str, accident: str
) -> None:
    """Each time; and where the checkpoint itself isn't concerned, it is still right by its own files."""
    step = convert(source, tmp_path / "out", "--virtual", "--link", link)
    wanted = restore(step)
    assert call("verify", "--source", source, "--checkpoint", step) == 0
    ACCIDENTS[accident](source)
    capsys.readouterr()
    status, words = TOLD[link, accident]
    assert call("verify", "--source", source, "--checkpoint", step) == status
    assert words in capsys.readouterr().err
    concerned = link == "symlink" or (link == "hard" and accident in ("changed in place", "truncated"))
    assert call("verify", "--checkpoint", step) == (1 if concerned else 0)
    assert call("export", step, tmp_path / "back") == (2 if concerned else 0)
    if not concerned:
        assert_same_bits(restore(step), wanted)


@pytest.mark.parametrize(
    "files",
    [[1], {"a": 1}, [{"name": "../../x", "size": 1, "version": "1", "inode": 1, "link": "hard", "sha256": None}]],
)
def test_a_record_whose_files_make_no_sense(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, files: object
) -> None:
    """It is refused in words, and nothing is looked for outside of the folder."""
    step = convert(source, tmp_path / "out", "--virtual")
    told = record(step)
    told["references"]["files"] = files
    (step / "conversion.json").write_text(json.dumps(told))
    for command in (["verify"], ["inspect"], ["export", "--output", tmp_path / "back"]):
        capsys.readouterr()
        assert call(command[0], step, *command[1:]) == 2
        assert "the files that are referred to makes no sense" in capsys.readouterr().err


@pytest.mark.parametrize(("link", "accident"), each(["hard", "symlink", "copy"], ["by rename", "in place"]))
def test_another_model_of_the_same_size_and_time(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, link: str, accident: str
) -> None:
    """The file that the checkpoint refers to is another model's by now: no copy of what was there."""
    step = convert(source, tmp_path / "out", "--virtual", "--link", link)
    file = step / "items" / SOURCE / weights(source).name
    file = Path(os.readlink(file)) if link == "symlink" else file
    others = make_release(tmp_path / "other", QWEN3_MOE, 2, seed=1)
    before, content = file.stat(), (others / file.name).read_bytes()
    assert before.st_size == len(content)
    if accident == "by rename":
        file.unlink()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    capsys.readouterr()
    assert call("verify", step) == 1
    said = capsys.readouterr().err
    assert f"source/{file.name} holds other bytes" in said
    assert "copies made since" not in said
    assert call("materialize", step, tmp_path / "made") != 0
    for command in ("export", "reshard"):
        assert call(command, step, tmp_path / command) == 2
        assert not (tmp_path / command).exists()
    with pytest.raises(wb.Refused, match="holds other bytes"):
        wb.load(step, mesh="fsdp=1")


def test_hashes_tell_a_touch_from_a_change(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With `--sha256`; the list of hashes is one that `sha256sum -c` reads."""
    step = convert(source, tmp_path / "out", "--virtual", "--sha256")
    assert all(file["sha256"] for file in record(step)["references"]["files"])
    run("sha256sum", "-c", "--quiet", "SHA256SUMS", cwd=step / "items" / SOURCE, status=0)
    os.utime(weights(source))
    assert call("verify", "--source", source, "--checkpoint", step) == 0
    change_last_bytes(source)
    capsys.readouterr()
    assert call("verify", "--source", source, "--checkpoint", step) == 1
    assert "holds other bytes: its sha256 isn't" in capsys.readouterr().err


@pytest.mark.parametrize("link", ["hard", "symlink", "copy"])
def test_materialize_compares_the_hashes(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, link: str
) -> None:
    """With `--sha256`, also where no block that is looked at changed, and neither size nor time; what is right is made
    the same as without, and its files count as checked.
    """
    step = convert(source, tmp_path / "out", "--virtual", "--sha256", "--link", link)
    assert call("materialize", step, tmp_path / "made") == 0
    assert record(tmp_path / "made" / "0")["digests"] == record(convert(source, tmp_path / "wanted"))["digests"]
    assert {shard["hash"] for shard in record(tmp_path / "made" / "0")["shards"]} == {"checked"}
    file = (step / "items" / SOURCE / weights(source).name).resolve()
    known, size = os.stat(file), file.stat().st_size
    with file.open("r+b") as changed:
        changed.seek(size // 2 + 4099)
        byte = changed.read(1)
        changed.seek(-1, os.SEEK_CUR)
        changed.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
    capsys.readouterr()
    assert call("materialize", step, tmp_path / "again") == 2
    assert "its sha256 isn't" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("link", ["hard", "symlink"])
def test_training_on_top_leaves_the_source_intact(source: Path, tmp_path: Path, link: str) -> None:
    """A manager that keeps one step saves step 1 and removes step 0, the virtual one."""
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()}
    step = convert(source, tmp_path / "out", "--virtual", "--link", link)
    tree = ocp.PyTreeCheckpointer().restore(step / "items")
    with ocp.CheckpointManager(tmp_path / "out", options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        manager.save(1, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
    assert not step.exists()
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()} == before


def test_a_copy_of_the_folder_is_a_whole_checkpoint(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Without the source and without the original; `verify` says that the files are copies."""
    step = convert(mixed, tmp_path / "out", "--virtual")
    wanted = restore(step)
    shutil.copytree(tmp_path / "out", tmp_path / "copy", copy_function=shutil.copy)
    assert call("verify", "--source", mixed, "--checkpoint", tmp_path / "copy") == 0
    assert "2 are copies made since" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(mixed)
    assert_same_bits(restore(tmp_path / "copy" / "0"), wanted)
    assert call("verify", "--checkpoint", tmp_path / "copy") == 0


# --- an ordinary checkpoint of it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "layout", "link"),
    [
        (*case, link)
        for case, link in each(
            [("mixtral", "scanned"), ("qwen3-moe", "scanned"), ("deepseek3", "unscanned")], ["hard", "symlink", "copy"]
        )
    ],
)
def test_materialize_equals_an_ordinary_conversion(
    generated: Path, tmp_path: Path, case: str, layout: str, link: str
) -> None:
    """The same digests, the same keys of chunks, and MaxText's own bits."""
    folder, options = generated / "cases" / case, [*options_of("cases", case, layout), "--maxtext", "e591f30"]
    wanted = convert(folder, tmp_path / "ordinary", *options, "--mesh", "fsdp=16")
    convert(folder, tmp_path / "virtual", *options, "--virtual", "--link", link)
    assert call("materialize", tmp_path / "virtual", "--output", tmp_path / "out", "--mesh", "fsdp=16") == 0
    made = tmp_path / "out" / "0"
    assert record(made)["digests"] == record(wanted)["digests"]
    assert record(made)["plan"] == record(wanted)["plan"]
    assert keys(made) == keys(wanted)
    assert "references" not in record(made)
    assert digests(restore(made)) == given_arrays(case, layout)


def test_materialize_needs_no_source_and_can_take_the_place(mixed: Path, tmp_path: Path) -> None:
    """The checkpoint holds all it needs; with `--overwrite` it is replaced at the end."""
    step = convert(mixed, tmp_path / "out", "--virtual")
    wanted, release = restore(step), (step / "release.zip").read_bytes()
    shutil.rmtree(mixed)
    assert call("materialize", tmp_path / "out", "--output", tmp_path / "out") == 2
    assert call("materialize", tmp_path / "out", "--output", tmp_path / "out", "--overwrite") == 0
    assert_same_bits(restore(step), wanted)
    assert not (step / "items" / SOURCE).exists()
    assert (step / "release.zip").read_bytes() == release
    assert call("materialize", tmp_path / "out", "--output", tmp_path / "again") == 2


def test_materialize_in_place_that_is_killed_behind_its_end(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The virtual checkpoint is replaced, and lies beside the ordinary one: the same command removes it."""
    wanted = restore(convert(mixed, tmp_path / "out", "--virtual"))
    words = ["materialize", tmp_path / "out", tmp_path / "out", "--overwrite", "-q"]
    code = """
        import os, sys
        from weightbeam.formats.staging import folder
        from weightbeam.pipelines.cli import main
        remove = folder._remove
        folder._remove = lambda place: os._exit(9) if "replaced-" in str(place) else remove(place)
        sys.exit(main(sys.argv[1:]))
        """
    run(sys.executable, "-c", textwrap.dedent(code), *words, status=9)
    (replaced,) = (tmp_path / "out").glob("0.replaced-*")
    assert (
        call("materialize", tmp_path / "out", tmp_path / "other", "--mesh", "fsdp=2") == 2
    )  # which isn't what was made
    assert not virtual.is_virtual(find_items(tmp_path / "out"))
    assert virtual.is_virtual(open_store(replaced / "items"))
    capsys.readouterr()
    assert call(*words[:-1], "--resume") == 0
    assert "is finished already" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0"]
    assert_same_bits(restore(tmp_path / "out" / "0"), wanted)


def test_materialize_for_rules_of_ones_own(source: Path, tmp_path: Path) -> None:
    """Other rules than the virtual checkpoint was made for, as an ordinary conversion takes them."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([["embed", []], ["heads", ["fsdp"]], ["mlp", ["fsdp"]]]))
    options = ("--mesh", "fsdp=2", "--sharding_rules", str(rules))
    convert(source, tmp_path / "virtual", "--virtual")
    assert call("materialize", tmp_path / "virtual", "--output", tmp_path / "made", *options) == 0
    made, wanted = tmp_path / "made" / "0", convert(source, tmp_path / "wanted", *options)
    assert (record(made)["digests"], record(made)["plan"]) == (record(wanted)["digests"], record(wanted)["plan"])
    assert keys(made) == keys(wanted) != keys(convert(source, tmp_path / "other", "--mesh", "fsdp=2"))


@pytest.mark.parametrize(
    ("link", "accident"),
    [("hard", "changed in place"), ("symlink", "replaced by rename"), ("symlink", "moved"), ("hard", "truncated")],
)
def test_materialize_refuses_files_that_have_changed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, link: str, accident: str
) -> None:
    """Before any work."""
    convert(source, tmp_path / "virtual", "--virtual", "--link", link)
    ACCIDENTS[accident](source)
    assert call("materialize", tmp_path / "virtual", "--output", tmp_path / "out") == 2
    assert "have changed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_reshard_in_one_process_of_another_checkpoint_at_the_same_path(tmp_path: Path) -> None:
    """Each time what lies there now; nothing is open that was there before."""
    made = tmp_path / "virtual"
    for seed in range(2):
        source = make_release(tmp_path / f"source-{seed}", files=2, seed=seed)
        shutil.rmtree(made, ignore_errors=True)
        wanted = restore(convert(source, made, "--virtual"))
        assert call("reshard", made, tmp_path / f"out-{seed}") == 0
        assert_same_bits(restore(tmp_path / f"out-{seed}" / "0"), wanted)


def test_values_of_a_wider_dtype_stay_as_they_are(tmp_path: Path) -> None:
    """float32 from float32, and bfloat16 not made of it."""
    tensors = random_tensors(LLAMA, np.dtype(np.float32))
    source = save(tmp_path / "source", LLAMA, tensors)
    assert call("convert", "--source", source, "--output", tmp_path / "out", "--virtual") == 2
    step = convert(source, tmp_path / "out", "--virtual", "--save_dtype", "float32")
    restored = restore(step)
    assert {values.dtype.name for values in restored.values()} == {"float32"} != {BF16.name}
    np.testing.assert_array_equal(restored["decoder.logits_dense.kernel"], tensors["lm_head.weight"].T)


@pytest.mark.parametrize("command", ["materialize", "verify"])
def test_a_file_that_is_replaced_after_it_was_compared(
    command: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another one of the same size and times: what is read is the file that was compared, or nothing is made."""
    step = convert(source, tmp_path / "virtual", "--virtual", "--link", "copy")
    file = step / "items" / SOURCE / weights(source).name

    def find(items: Store, files: Sequence[links.FileIdentity]) -> list[str]:
        found = links.find_changes(items, files)
        known, other = file.stat(), tmp_path / "other.safetensors"
        shutil.copy(file, other)
        change_last_bytes(tmp_path)
        os.utime(other, ns=(known.st_atime_ns, known.st_mtime_ns))
        os.replace(other, file)
        return found

    monkeypatch.setattr(virtual, "find_changes", find)
    assert call(command, step, *([tmp_path / "made"] if command == "materialize" else [])) == 1
    assert not (tmp_path / "made" / "0").exists()
