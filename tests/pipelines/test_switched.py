"""A source that is another one for a while, and the planned one again before anybody looks; an output that goes away."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import TIME, call, make_dated_release

import weightbeam as wb
from weightbeam.formats.orbax.copying import copy_spec, read_chunks
from weightbeam.formats.orbax.source import OrbaxCheckpoint, load_checkpoint, open_orbax
from weightbeam.formats.orbax.state import surroundings
from weightbeam.formats.orbax.unpacking import chunks, unpack
from weightbeam.formats.safetensors import BoxRead, HfCheckpoint, open_hf, read_boxes
from weightbeam.formats.staging.links import COPY, HARD, put_source
from weightbeam.formats.storage import ChangedError, LocalFolder, local, open_store
from weightbeam.formats.targets import orbax
from weightbeam.model_mappings.boxes import whole
from weightbeam.pipelines.loading.checkpoint import Orbax
from weightbeam.pipelines.loading.source import Wanted
from weightbeam.transforms.cutting.units import Fetch
from weightbeam.transforms.execution import boxes as execution

MODEL = ("--maxtext_model", "llama2-7b")
Switch = Callable[[Path, str], contextlib.AbstractContextManager[None]]


def point(link: Path, target: str) -> None:
    os.symlink(target, link.with_name("new"))
    os.replace(link.with_name("new"), link)


@contextlib.contextmanager
def link_switched(source: Path, other: str) -> Iterator[None]:
    before = os.readlink(source)
    point(source, other)
    yield
    point(source, before)


@contextlib.contextmanager
def folder_switched(source: Path, other: str) -> Iterator[None]:
    """The folder that a link leads to is moved aside, and another one there."""
    real = source.resolve()
    os.rename(real, real.with_name("aside"))
    os.rename(source.with_name(other), real)
    yield
    os.rename(real, source.with_name(other))
    os.rename(real.with_name("aside"), real)


@contextlib.contextmanager
def file_switched(source: Path, other: str) -> Iterator[None]:
    """A file alone, which is a link as in a hub cache's snapshot, leads to another one."""
    point(source.resolve() / "model.safetensors", str(source.with_name(other) / "model.safetensors"))
    yield
    point(source.resolve() / "model.safetensors", "blob")


SWITCHES = pytest.mark.parametrize("switch", [link_switched, folder_switched, file_switched])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A link to the release `one`, beside which `two` lies."""
    for seed, name in enumerate(("one", "two")):
        make_dated_release(tmp_path / name, seed)
    os.rename(tmp_path / "one" / "model.safetensors", tmp_path / "one" / "blob")
    point(tmp_path / "one" / "model.safetensors", "blob")
    point(tmp_path / "src", "one")
    return tmp_path / "src"


def read(files: HfCheckpoint) -> list[np.ndarray]:
    return read_boxes([BoxRead(tensor, whole(tensor.shape)) for tensor in files.tensors.values()])[0]


@SWITCHES
@pytest.mark.parametrize("staged", [False, True])
def test_what_is_read_is_what_was_planned_with(switch: Switch, staged: bool, source: Path) -> None:
    """As every command and every load reads, also with a plan that was staged: nobody would see it afterwards."""
    opened = open_hf(source)
    if staged:
        opened = HfCheckpoint.from_json(json.loads(json.dumps(opened.to_json())))
    before = read(opened)
    with switch(source, "two"), pytest.raises(ChangedError, match=r"model\.safetensors changed .*isn.t the file"):
        read(opened)
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(read(opened), before, strict=True))
    opened.check()


@SWITCHES
@pytest.mark.parametrize("link", [COPY, HARD])
def test_what_a_virtual_checkpoint_gets_is_what_was_planned_with(
    link: str, switch: Switch, source: Path, tmp_path: Path
) -> None:
    """Its copies are of the file that was compared, and its links lead to that."""
    opened, folder = open_hf(source), LocalFolder(str(tmp_path / "made"))
    with switch(source, "two"), pytest.raises(ChangedError, match=r"model\.safetensors changed .*isn.t the file"):
        put_source(folder, opened, link)
    assert not [name for name in folder.entries() if name.endswith(".safetensors")]
    put_source(folder, opened, link)
    made, before = (Path(place) / "model.safetensors" for place in (folder, source))
    assert made.read_bytes() == before.read_bytes()
    assert made.stat().st_mtime_ns == before.stat().st_mtime_ns
    assert made.samefile(before) == (link == HARD)


def test_units_read_while_the_source_was_another(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is published, where a mixture of the two was."""
    written, write = [], orbax.write_unit

    def switching(*args: object, **named: object) -> object:
        written.append(None)
        if len(written) in (2, 6):
            point(source, "two" if len(written) == 2 else "one")
        return write(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(orbax, "write_unit", switching)
    options = ["--maxtext_model", "llama2-7b", "--unit_bytes", "20000"]
    assert call("convert", "--source", source, "--output", source.with_name("out"), *options) == 1
    assert not (source.with_name("out") / "0").exists()


def test_a_load_while_the_source_was_another(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read after those of the plan is of the other one."""
    count, read_ranges = [], local.read_ranges

    def switching(*args: Any) -> int:
        count.append(None)
        with link_switched(source, "two") if len(count) == planned + 1 else contextlib.nullcontext():
            return read_ranges(*args)

    monkeypatch.setattr(local, "read_ranges", switching)
    planned, mesh = 1 << 30, jax.make_mesh((1,), ("fsdp",))
    open_hf(source)
    planned = len(count)  # reads of the plan alone
    count.clear()
    with pytest.raises(wb.Failed, match=r"model\.safetensors changed .*isn.t the file .*; load it again"):
        wb.load(str(source), maxtext_model="llama2-7b", mesh=mesh)


def test_on_other_machines_only_sizes_and_times_are_compared(source: Path) -> None:
    """Inodes and times of change are what the file system of one says."""
    staged = open_hf(source).to_json() | {"machine": "another"}
    shutil.copytree(source, source.with_name("copy"), copy_function=shutil.copy2)
    shutil.rmtree(source.with_name("one"))
    os.rename(source.with_name("copy"), source.with_name("one"))
    read(HfCheckpoint.from_json(staged))
    os.utime(source / "model.safetensors", ns=(TIME, TIME + 1))
    with pytest.raises(ChangedError, match=r"changed .*isn.t the file"):
        read(HfCheckpoint.from_json(staged))


def test_another_name_doesnt_hide_a_change(source: Path) -> None:
    """Other bytes in place, the time set back, and a further name, which is a change of the file as well."""
    opened = open_hf(source)
    file, start = source / "model.safetensors", opened.shards[0].tensors[0].offset
    raw = file.read_bytes()
    with file.open("r+b") as data:
        data.write(raw[:start] + bytes(byte ^ 1 for byte in raw[start:]))
    os.utime(file, ns=(TIME, TIME))
    os.link(file, source.with_name("backup"))
    with pytest.raises(ChangedError, match="though its size and time are as before"):
        opened.check()


def checkpoints(source: Path, *options: str) -> Path:
    """A link to a checkpoint of the release `one`, beside which one of `two` lies."""
    for name in ("one", "two"):
        made = source.with_name(f"{name}-orbax")
        assert call("convert", source.with_name(name), made, "--maxtext_model", "llama2-7b", *options) == 0
    point(source.with_name("checkpoint"), "one-orbax")
    return source.with_name("checkpoint")


def by_units(opened: OrbaxCheckpoint, folder: Path) -> Callable[[], object]:
    """As every command reads that decodes arrays."""
    return lambda: execution.read([Fetch(array, whole(array.shape), array.dtype) for array in opened.arrays.values()])


def by_copying(opened: OrbaxCheckpoint, folder: Path) -> Callable[[], object]:
    """As `reshard` reads what stays as it is encoded."""
    zarr = surroundings(opened).zarr
    arrays = [array for array in opened.weights.values() if array.key in zarr]
    specs = [(array, copy_spec(zarr[array.key], array.key, array.dtype)) for array in arrays]
    return lambda: read_chunks(
        [(array, zarr[array.key], spec, (0,) * len(array.shape)) for array, spec in specs if spec is not None]
    )


def by_unpacking(opened: OrbaxCheckpoint, folder: Path) -> Callable[[], object]:
    """As chunks are read that no unit can hold."""
    folder.mkdir()
    place, array = LocalFolder(str(folder)), next(iter(opened.weights.values()))
    return lambda: [unpack(array, index, place) for index in chunks(array)]


def by_load(opened: OrbaxCheckpoint, folder: Path) -> Callable[[], object]:
    """As `load` and an open tree read."""
    source = Orbax(open_store(opened.root))
    wanted = [Wanted(key, whole(array.shape), array.dtype) for key, array in source.arrays.items()]
    return lambda: source.make(wanted)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("format", ["true", "false"])
@pytest.mark.parametrize("reader", [by_units, by_copying, by_unpacking, by_load])
def test_a_checkpoint_that_is_another_one_for_a_while(
    reader: Callable[..., Callable[[], object]], staged: bool, format: str, source: Path, tmp_path: Path
) -> None:
    """Its files are opened by TensorStore, by their paths; nothing but the plan tells whose they are."""
    checkpoint = checkpoints(source, "--use_ocdbt", format)
    opened = open_orbax(checkpoint)
    if staged:
        opened = load_checkpoint(json.loads(json.dumps(opened.to_json())))
    read = reader(opened, tmp_path / "unpacked")
    with link_switched(checkpoint, "two-orbax"), pytest.raises(ChangedError, match="isn't the folder"):
        read()
    read()
    opened.check()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("reader", [by_units, by_copying, by_load])
def test_links_that_lead_to_another_release_for_a_while(
    reader: Callable[..., Callable[[], object]], staged: bool, source: Path, tmp_path: Path
) -> None:
    """The release of a virtual checkpoint, or a folder above it, is renamed and another one there; the files themselves
    look as before.
    """
    release, other = tmp_path / "above" / "release", tmp_path / "other"
    for seed, folder in enumerate((release, other / "release")):
        folder.parent.mkdir()
        make_dated_release(folder, seed)
    links = ("--virtual", "--link", "symlink", "--scan_layers", "false")
    assert call("convert", release, tmp_path / "made", *MODEL, *links) == 0
    opened = open_orbax(tmp_path / "made")
    if staged:
        opened = load_checkpoint(json.loads(json.dumps(opened.to_json())))
    read = reader(opened, tmp_path / "unpacked")
    with exchanged(other, release.parent), pytest.raises(ChangedError, match="isn't the folder"):
        read()
    (release / "README.md").touch()  # which is nothing to us
    read()
    with exchanged(other / "release", release):
        pass
    with pytest.raises(ChangedError, match="was renamed"):
        read()
    if not staged:
        with pytest.raises(ChangedError, match="was renamed"):
            opened.check()


@contextlib.contextmanager
def exchanged(one: Path, other: Path) -> Iterator[None]:
    """Two folders have each other's names for a while."""
    for is_over in (False, True):
        os.rename(one, one.with_name("aside"))
        os.rename(other, one)
        os.rename(one.with_name("aside"), other)
        if not is_over:
            yield


def test_pieces_of_another_checkpoint_are_not_left(source: Path, tmp_path: Path) -> None:
    """The next attempt keeps those that are there."""
    checkpoint, folder = checkpoints(source), tmp_path / "unpacked"

    class Switching(LocalFolder):
        def write(self, name: str, data: bytes) -> None:
            super().write(name, data)
            point(checkpoint, "two-orbax")

    folder.mkdir()
    array = next(iter(open_orbax(checkpoint).weights.values()))
    with pytest.raises(ChangedError, match="isn't the folder"):
        unpack(array, chunks(array)[0], Switching(str(folder)))
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_a_chunk_that_is_another_one_for_a_while(source: Path) -> None:
    """A file that was renamed and back has changed since, and isn't taken for what was planned with."""
    checkpoint = checkpoints(source, "--use_ocdbt", "false")
    opened = open_orbax(checkpoint)
    chunk = next(path for path in sorted((checkpoint / "0/items").rglob("*")) if path.name == "0")
    other = source.with_name("two-orbax") / chunk.relative_to(checkpoint)
    os.rename(chunk, source.with_name("aside"))
    os.rename(other, chunk)
    by_units(opened, source)()
    os.rename(chunk, other)
    os.rename(source.with_name("aside"), chunk)
    with pytest.raises(ChangedError, match="though its size and time are as before"):
        opened.check()


# --- the small files --------------------------------------------------------------------------------------------------


def one_by_one(source: Path) -> None:
    """Small files alone are exchanged, as a download does it."""
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        os.replace(source.with_name("two") / name, source.resolve() / name)


def whole_folder(source: Path) -> None:
    point(source, "two")


@pytest.mark.parametrize("exchange", [one_by_one, whole_folder])
@pytest.mark.parametrize("command", ["convert", "export", "cut"])
def test_a_release_that_is_exchanged_while_it_is_planned_with(
    command: str, exchange: Callable[[Path], None], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each file that is opened: all small files are of one release, or the command refuses."""
    for number, name in enumerate(("one", "two")):
        folder = tmp_path / name
        (folder / "tokenizer.json").write_text(json.dumps({"of": number}))
        (folder / "generation_config.json").write_text(json.dumps({"of": number}))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"of": number}))
    opened, found = local.open_file, set[str]()
    saved = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-saved"), symlinks=True)
    if command == "export":
        assert call("convert", source, tmp_path / "ckpt", *MODEL) == 0
    for moment in range(40):
        calls = iter(range(1000))

        def open_file(path: str, calls: Iterator[int] = calls, moment: int = moment) -> int:
            if str(path).startswith((str(source), str(tmp_path / "one"))) and next(calls) == moment:
                exchange(source)
            return opened(path)

        with monkeypatch.context() as patched:
            patched.setattr(local, "open_file", open_file)
            arguments = {
                "convert": ["convert", source, tmp_path / "made", *MODEL],
                "export": ["export", tmp_path / "ckpt", tmp_path / "made", "--like", source],
                "cut": ["cut", source, tmp_path / "made", "--layers", "0:1"],
            }[command]
            status = call(*arguments)
        if status:
            found.add("refused" if status == 2 else "failed")
            assert not (tmp_path / "made" / "0").exists()
        elif command == "convert":
            with zipfile.ZipFile(tmp_path / "made" / "0" / "release.zip") as packed:
                found.add(str({json.loads(packed.read(name))["of"] for name in packed.namelist()}))
        else:
            held = [tmp_path / "made" / name for name in ("config.json", "tokenizer.json", "generation_config.json")]
            found.add(str({json.loads(path.read_text())["of"] for path in held}))
        is_over = next(calls) <= moment
        shutil.rmtree(tmp_path / "made", ignore_errors=True)
        for name in ("one", "two", "src"):
            restore(saved / name, tmp_path / name)
        if is_over:
            break
    assert is_over
    assert "refused" in found
    assert found <= {"refused", "failed", "{0}", "{1}"}, found


def restore(saved: Path, path: Path) -> None:
    """A file of the beginning, with its time."""
    if saved.is_symlink():
        point(path, os.readlink(saved))
    else:
        shutil.rmtree(path)
        shutil.copytree(saved, path, symlinks=True)


@pytest.mark.parametrize("side", ["the checkpoint", "the export"])
def test_a_verdict_is_of_one_state(side: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are both wrong, one in its weights and one in a small file, whichever lies there for a while: never that
    all is well.
    """
    (tmp_path / "one" / "tokenizer.json").write_text("{}")
    for name in ("one", "two"):
        assert call("convert", tmp_path / name, tmp_path / f"ckpt-{name}", *MODEL) == 0
    if side == "the checkpoint":
        good, wrong, judged = tmp_path / "ckpt-one", "0/maxtext.yml", ["verify", source, tmp_path / "in"]
        other = tmp_path / "ckpt-two"
        for name in ("conversion.json", "release.zip", "maxtext.yml"):
            shutil.copy2(good / "0" / name, other / "0" / name)
    else:
        good, wrong, judged = tmp_path / "hf", "tokenizer.json", ["verify", tmp_path / "ckpt-one", tmp_path / "in"]
        assert call("export", tmp_path / "ckpt-one", good) == 0
        other = Path(shutil.copytree(good, tmp_path / "other"))
        with open(other / "model.safetensors", "r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))
    path = Path(shutil.copytree(good, tmp_path / "edited")) / wrong
    path.write_text(path.read_text() + "\n")
    for name, status in ((good.name, 0), ("edited", 1), (other.name, 1)):
        point(tmp_path / "in", name)
        assert call(*judged) == status
    opened, found = local.open_file, set[int]()
    for first, more in itertools.product(range(0, 120, 4), (2, 9)):
        calls = iter(range(1000))
        point(tmp_path / "in", "edited")

        def open_file(path: str, calls: Iterator[int] = calls, first: int = first, more: int = more) -> int:
            if str(path).startswith(str(tmp_path / "in")) and (number := next(calls)) in (first, first + more):
                point(tmp_path / "in", other.name if number == first else "edited")
            return opened(path)

        with monkeypatch.context() as patched:
            patched.setattr(local, "open_file", open_file)
            found.add(call(*judged))
        if next(calls) <= first:
            break
    assert 2 in found
    assert 0 not in found


@pytest.mark.parametrize("name", ["plan.json.gz", "release.zip"])
def test_an_output_whose_link_is_switched_as_it_is_begun(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
    point(link := tmp_path / "link", "here")
    write = local.write_file

    def switch(path: Path, data: bytes) -> None:
        if path.name == name:
            point(link, "elsewhere")
        write(path, data)

    monkeypatch.setattr(local, "write_file", switch)
    assert call("convert", source, link / "out", *MODEL) == 1
    assert "orbax-checkpoint-tmp was stopped, taken over by another conversion, or removed" in capsys.readouterr().err
    assert not os.listdir(tmp_path / "elsewhere")
