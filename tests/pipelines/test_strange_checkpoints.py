"""Orbax checkpoints from strangers: every command that reads them refuses what can't be meant, and what isn't theirs, in
words, within bounded time and memory.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measured import Measure
from pairs import each, some
from strangers import DATABASES, LITTLE, bare, database_of, item, node_of, sharded, tree, varints, zarr2, zarr3
from support import LLAMA, assert_same_bits, call, convert, flatten, make_release, random_tensors, read_tensors, save

import weightbeam as wb
from weightbeam.formats.orbax import state as orbax_state
from weightbeam.formats.orbax.source import open_orbax
from weightbeam.formats.orbax.state import surroundings
from weightbeam.formats.storage import StorageError
from weightbeam.model_mappings.plan import MAX_ELEMENTS
from weightbeam.pipelines.commands.export import plan

SECONDS, MEGABYTES = 30, 1536  # of the processor's time, which other work on a machine makes longer; of a process
KEY = "params.params.decoder.decoder_norm.scale"
KERNEL = "params.params.decoder.layers.mlp.wi_0.kernel"
MODEL = ("--maxtext_model", "llama2-7b")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("strange") / "hf")


@pytest.fixture(scope="module")
def files(release: Path) -> Path:
    """A checkpoint without a database."""
    return convert(release, release.parent / "files", *MODEL, "--use_ocdbt", "false")


@pytest.fixture(scope="module")
def database(release: Path) -> Path:
    return convert(release, release.parent / "database", *MODEL)


def commands(checkpoint: Path, release: Path) -> list[list[object]]:
    """Every one that reads a checkpoint's arrays."""
    out = checkpoint.parent / "out"
    return [
        ["inspect", checkpoint],
        ["verify", "--checkpoint", checkpoint, "--source", release],
        ["export", checkpoint, out, "--like", release],
        ["reshard", checkpoint, out],
        ["diff", checkpoint, checkpoint],
    ]


def assert_refused(measure: Measure, checkpoint: Path, release: Path, said: str) -> None:
    """All commands refuse a checkpoint, and `weightbeam.open`; nothing is written."""
    for command in commands(checkpoint, release):
        told = measure(command, checkpoint.parent / "printed")
        assert (told["status"], said in told["message"]) == (2, True), (command[0], told)
        assert "Traceback" not in told["message"]
        assert told["cpu"] <= SECONDS
        assert told["megabytes"] <= MEGABYTES
        assert not (checkpoint.parent / "out").exists()
    with pytest.raises(wb.Refused, match=said):
        wb.open(str(checkpoint))


# --- what isn't the checkpoint's own ----------------------------------------------------------------------------------


def chunk(step: Path) -> Path:
    """A file with values: of an array, or of the database."""
    found = step / "items" / KEY / "c" / "0"
    return found if found.exists() else next((step / "items").glob("ocdbt.process_*/d/*"))


def moved_out(path: Path, step: Path) -> None:
    """A file or folder lies elsewhere, and a link leads to it."""
    elsewhere = step.parent / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def replaced_by_pipe(step: Path) -> None:
    file = chunk(step)
    file.unlink()
    os.mkfifo(file)


def replaced_by_socket(step: Path) -> None:
    name = "items/s"  # the path of a socket is short
    here = Path.cwd()
    os.chdir(step)
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(name)
    finally:
        os.chdir(here)


LINK, IRREGULAR = "a symbolic link that leads out of the checkpoint", "isn't a regular file"
FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file with values is a link": (lambda step: moved_out(chunk(step), step), LINK),
    "a folder with values is a link": (lambda step: moved_out(chunk(step).parent, step), LINK),
    "the record is a link": (lambda step: moved_out(step / "conversion.json", step), LINK),
    "a file with values is a pipe": (replaced_by_pipe, IRREGULAR),
    "a socket": (replaced_by_socket, IRREGULAR),
    "a device": (lambda step: (step / "items" / "zero").symlink_to("/dev/zero"), LINK),
}


@pytest.mark.parametrize(("what", "kind"), each([*FOREIGN], ["files", "database"]))
def test_what_isnt_its_own(
    what: str, kind: str, release: Path, request: pytest.FixtureRequest, tmp_path: Path, measure: Measure
) -> None:
    """Links out, pipes, sockets: no byte of them is read, and nobody waits for them."""
    step = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "0"))
    change, said = FOREIGN[what]
    change(step)
    assert_refused(measure, step, release, said)


def test_an_item_that_lies_elsewhere(files: Path, release: Path, tmp_path: Path, measure: Measure) -> None:
    """A stranger's step that is the user's own checkpoint; where it leads to can be named."""
    own = Path(shutil.copytree(files, tmp_path / "own"))
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "0").symlink_to(own)
    assert_refused(measure, tmp_path / "strange", release, "by a symbolic link; name where it leads to")
    assert call("diff", tmp_path / "strange" / "0", files) == 0


def test_links_within(files: Path, tmp_path: Path) -> None:
    """From one file of the item to another, as tools that save space make them; or to a blob of a hub's cache."""
    step = Path(shutil.copytree(files, tmp_path / "snapshots" / "abc" / "0"))
    values = chunk(step)
    values.rename(step / "items" / "values")
    values.symlink_to("../../values")
    (tmp_path / "blobs").mkdir()
    (step / "items" / "_METADATA").rename(tmp_path / "blobs" / "0123")
    (step / "items" / "_METADATA").symlink_to("../../../../blobs/0123")
    assert call("diff", step, files) == 0


def test_other_items_that_arent_its_own(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is copied as it is: a link to a file of the user's isn't."""
    step = Path(shutil.copytree(files, tmp_path / "0"))
    (tmp_path / "secret").write_text("secret")
    (step / "iter").mkdir()
    (step / "iter" / "process_0.json").symlink_to(tmp_path / "secret")
    assert call("reshard", step, tmp_path / "out") == 2
    assert LINK in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_many_files_of_other_items(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take time as they are many, not as their square; and there is a limit."""
    step = Path(shutil.copytree(files, tmp_path / "0"))
    (step / "iter").mkdir()
    for number in range(40_000):
        (step / "iter" / f"process_{number}.json").touch()
    checkpoint = open_orbax(str(step))
    start = time.process_time()
    assert len(surroundings(checkpoint).files) == 40_000
    assert time.process_time() - start < 8
    monkeypatch.setattr(orbax_state, "MOST_FILES", 39_999)
    with pytest.raises(StorageError, match="more than 39,999 files"):
        surroundings(checkpoint)


def test_a_virtual_checkpoint_refers_to_what_it_was_made_of(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its links lead out, to files that its record names, as long as they are those."""
    source = Path(shutil.copytree(release, tmp_path / "hf"))
    step = convert(source, tmp_path / "ckpt", *MODEL, "--virtual", "--link", "symlink")
    assert call("diff", step, source, *MODEL) == 0
    assert call("export", step, tmp_path / "back") == 0
    shutil.copy2(source / "model.safetensors", tmp_path / "other")
    (tmp_path / "other").rename(source / "model.safetensors")
    assert call("export", step, tmp_path / "again") == 2
    assert "is another file" in capsys.readouterr().err


# --- what can't be meant ----------------------------------------------------------------------------------------------


def rewritten(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes a JSON file of the item."""

    def rewrite(step: Path) -> None:
        file = step / "items" / name
        about = json.loads(file.read_text())
        change(about)
        file.write_text(json.dumps(about))

    return rewrite


def described(shape: Sequence[int], chunk: Sequence[int], *codecs: dict[str, Any]) -> Callable[[Path], None]:
    """An array of that shape, of which no chunk is there."""
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    fields = zarr3(np.zeros(1, np.float32), codecs or (LITTLE,), shape=list(shape), chunk_grid=grid)
    return rewritten(f"{KEY}/zarr.json", lambda about: (about.clear(), about.update(fields)))


def appended(name: str, text: str) -> Callable[[Path], None]:
    """Members at the end of a JSON object."""

    def append(step: Path) -> None:
        file = step / "items" / name
        file.write_text(f"{file.read_text().rstrip()[:-1]}, {text}}}")

    return append


def leaf(key: str, **said: Any) -> dict[str, Any]:
    """An entry of `_METADATA`."""
    return {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": said or {"skip_deserialize": True}}


BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "6 million values": (appended("_METADATA", f'"x": [{",".join(["[]"] * 6_000_000)}]'), "more than 5,000,000 values"),
    "many bytes": (appended("_METADATA", f'"x": "{" " * 100_000_000}"'), "has more than 100,000,000 bytes"),
    "101,000 leaves": (
        rewritten(
            "_METADATA", lambda about: about["tree_metadata"].update({str(n): leaf(str(n)) for n in range(101_000)})
        ),
        "leaves; more than 30,000 can't be meant",
    ),
    "a field twice": (appended("_METADATA", '"use_zarr3": false'), "stands twice"),
    "a key twice": (
        rewritten("_METADATA", lambda about: about["tree_metadata"].update(x=leaf(KEY, value_type="np.ndarray"))),
        "two leaves have the key",
    ),
    "a chunk of 2^55 elements": (described([32], [1 << 55]), "bytes each, more than"),
    "a chunk of a whole large array": (described([1 << 40], [1 << 40]), "bytes each, more than"),
    "a chunk larger than its array": (described([32], [1 << 30]), "larger than itself"),
    "a shape of 2^45 elements": (
        described([1 << 40, 2, 2, 8], [1, 2, 2, 8]),
        "has more than 8,796,093,022,208 elements",
    ),
    "a shape of nothing, 2^60 long": (described([1 << 60, 0], [1, 1]), "has more than 8,796,093,022,208 elements"),
    "a shard of 2^23 chunks": (described([1 << 32], [1 << 32], sharded([512])), "chunks each"),
    "chunks of an element each": (described([1 << 36, 2, 2, 8], [1, 1, 1, 1]), "of so few elements"),
    "a description of 3 GB": (
        lambda step: os.truncate(step / "items" / KEY / "zarr.json", 3 << 30),
        "has more than 1,048,576 bytes",
    ),
    "a description that is deep": (
        appended(f"{KEY}/zarr.json", f'"attributes": {"[" * 100_000}{"]" * 100_000}'),
        "isn't JSON",
    ),
    "a field of a description twice": (appended(f"{KEY}/zarr.json", '"shape": [31]'), "stands twice"),
    "a description that isn't there": (lambda step: (step / "items" / KEY / "zarr.json").unlink(), KEY),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_cant_be_meant(bomb: str, files: Path, release: Path, tmp_path: Path, measure: Measure) -> None:
    """Neither read nor allocated, let alone ended by a signal."""
    step = Path(shutil.copytree(files, tmp_path / "0"))
    change, said = BOMBS[bomb]
    change(step)
    assert_refused(measure, step, release, said)


@pytest.mark.parametrize("dtype", some(["int16", "bool", "int8", "int64", "uint16", "int4"], 2))
def test_integers_that_would_be_weights(
    dtype: str, files: Path, release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Codes whose scales nobody knows, or the bits of bfloat16: no weights, and none are made of them."""
    step = Path(shutil.copytree(files, tmp_path / "0"))
    (step / "conversion.json").unlink()  # which would tell
    fill = False if dtype == "bool" else 0
    rewritten(f"{KERNEL}/zarr.json", lambda about: about.update(data_type=dtype, fill_value=fill))(step)
    assert call("export", step, tmp_path / "out", "--like", release) == 2
    assert f"{KERNEL}: {dtype} in the checkpoint, but what is made of it are" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["manifest.ocdbt", "manifest.0000000000000001", "../release.zip", "../maxtext.yml"])
def test_files_that_are_sparse_and_huge(
    name: str, database: Path, release: Path, tmp_path: Path, measure: Measure
) -> None:
    """They take no disk, travel in a tar, and were read whole."""
    step = Path(shutil.copytree(database, tmp_path / "0"))
    with open(step / "items" / name, "ab") as file:
        file.truncate(4 << 40)
    told = measure(["reshard", step, tmp_path / "out"], tmp_path / "printed")
    assert (told["status"], "has 4,398,046,511,104 bytes, more than" in told["message"]) == (2, True), told
    assert told["megabytes"] <= MEGABYTES


def filled(name: str) -> Callable[[Path], object]:
    """A JSON file with a field of three million values that nobody reads."""

    def fill(step: Path) -> None:
        told = json.loads((step / name).read_bytes())
        (step / name).write_text(json.dumps(told | {"more": [0] * 3_000_000}))

    return fill


def many_entries(step: Path) -> None:
    """An archive of empty files, of whose hash no record says anything."""
    told = json.loads((step / "conversion.json").read_bytes())
    told.pop("files")
    (step / "conversion.json").write_text(json.dumps(told))
    with zipfile.ZipFile(step / "release.zip", "w") as archive:
        for number in range(10_001):
            archive.writestr(str(number), b"")


TOO_LARGE: dict[str, tuple[Sequence[Callable[[Path], object]], str]] = {
    "two of three million values": (
        (filled("items/_METADATA"), filled("conversion.json")),
        "conversion.json: more than 5,000,000 values, with the files that were read before",
    ),
    "an archive of ten thousand files": ((many_entries,), "release.zip: has more than 10,000 entries"),
    "a configuration of MaxText's": (
        (lambda step: (step / "maxtext.yml").write_text("x: 1\n" * 300_000),),
        "maxtext.yml: has 1,500,000 bytes, more than 1,048,576",
    ),
}


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_what_lies_with_a_checkpoint_is_bounded(
    kind: str, database: Path, release: Path, tmp_path: Path, measure: Measure
) -> None:
    """Before it is parsed: 380 MB of JSON took 2.6 GB, an archive of 101 MB 1.2 GB, 25 MB of YAML a minute."""
    step, (changes, said) = Path(shutil.copytree(database, tmp_path / "0")), TOO_LARGE[kind]
    for change in changes:
        change(step)
    told = measure(["export", step, tmp_path / "out"], tmp_path / "printed")
    assert (told["status"], said in " ".join(told["message"].split())) == (2, True), told
    assert told["cpu"] <= SECONDS
    assert told["megabytes"] <= MEGABYTES
    assert not (tmp_path / "out").exists()


def test_descriptions_are_counted_as_they_are_read(release: Path, tmp_path: Path, measure: Measure) -> None:
    """Thousands of names of one file of a MiB, which takes no more disk."""
    step = tmp_path / "0"
    keys = [f"params.params.w{number}" for number in range(3000)]
    about = json.dumps(zarr3(np.zeros(4, np.float32)) | {"attributes": {"x": "y" * 1_000_000}})
    for number, key in enumerate(keys):
        (step / "items" / key).mkdir(parents=True)
        if number:
            os.link(step / "items" / keys[0] / "zarr.json", step / "items" / key / "zarr.json")
        else:
            (step / "items" / key / "zarr.json").write_text(about)
    (step / "items" / "_METADATA").write_text(json.dumps(tree(keys, use_zarr3=True)))
    assert_refused(measure, step, release, "more than 200,000,000 bytes, with the files that were read before")


NODES: dict[str, Callable[[Path], object]] = {
    "long keys": lambda items: database_of(items, node_of(100_000, 60_000)),
    "long paths": lambda items: database_of(items, node_of(1, 60_000, files=100_000)),
    "zeros": lambda items: database_of(items, bytes(256 << 20)),
    "counts": lambda items: database_of(items, b"\0\0" + varints([100_000_000]) + bytes(100 << 20)),
    "long keys of inner nodes": lambda items: database_of(
        items, node_of(10, 100), node_of(9_000, 60_000, height=1, below=(0, 60)), height=1
    ),
    "ways": lambda items: ways(items, 6),
}


def ways(items: Path, height: int) -> None:
    """A tree each node of which names the one below it a hundred times."""
    nodes, place = [node_of(10, 1000)], (0, 0)
    for above in range(1, height + 1):
        database_of(items, *nodes)
        end = place[0] + place[1]
        place = end, (items / "d" / "nodes").stat().st_size - end
        nodes.append(node_of(100, 1000, height=above, below=place))
    database_of(items, *nodes, height=height)


@pytest.mark.parametrize("kind", NODES)
def test_a_small_database_that_is_large_in_memory(
    kind: str, database: Path, release: Path, tmp_path: Path, measure: Measure
) -> None:
    """TensorStore decodes whatever it finds: 41 KB took 5.8 GB."""
    step = Path(shutil.copytree(database, tmp_path / "0"))
    NODES[kind](step / "items")
    assert sum(path.stat().st_size for path in (step / "items" / "d").iterdir()) < 2 << 20
    assert_refused(measure, step, release, "that can't be meant")


@pytest.mark.parametrize("stored", [("--use_zarr3", "false"), (), ("--compression", "zstd")], ids=str)
def test_a_chunk_that_is_sparse_and_huge(
    stored: tuple[str, ...], release: Path, tmp_path: Path, measure: Measure
) -> None:
    made = convert(release, tmp_path / "files", *MODEL, "--use_ocdbt", "false", *stored)
    os.truncate(next(path for path in (made / "items" / KERNEL).rglob("*0") if path.is_file()), 4 << 40)
    assert_refused(measure, made, release, "has 4,398,046,511,104 bytes, more than")


def test_a_description_that_is_too_long_in_a_database(tmp_path: Path) -> None:
    """Whose values have no files to look at."""
    values = np.zeros(4, np.float32)
    names = {"dimension_names": ["x" * (1 << 21)]}
    with pytest.raises(StorageError, match="has more than 1,048,575 bytes"):
        open_orbax(item(tmp_path / "items", {"params.params.w": (values, zarr3(values, **names))}, use_ocdbt=True))


@pytest.mark.parametrize("settings", ["small nodes", "numbered manifests"])
def test_a_database_with_settings_of_its_own(
    settings: str, database: Path, release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command takes the settings that its manifest tells, and every bit is what it was."""
    step = Path(shutil.copytree(database, tmp_path / "0"))
    held = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/items/"}).result()
    values = {key: held.read(key).result().value for key in held.list().result()}
    for path in (step / "items").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    (step / "items" / "manifest.ocdbt").unlink()
    spec = {"driver": "ocdbt", "base": f"file://{step}/items/", "config": DATABASES[settings]}
    theirs = ts.KvStore.open(spec).result()
    for key, value in values.items():
        theirs.write(key, value).result()
    copy, exported = tmp_path / "copy", {place: tmp_path / place.parent.name for place in (step, database)}
    for command in (
        ["inspect", step],
        ["verify", release, step],
        *(["export", place, folder, "--like", release] for place, folder in exported.items()),
        ["reshard", step, copy, "--mesh", "fsdp=2"],
        ["diff", database, step],
        ["diff", database, copy],
    ):
        assert call(*command) == 0, (command, capsys.readouterr().err)
    assert_same_bits(*map(read_tensors, exported.values()))
    loaded, wanted = (
        {key: np.asarray(value) for key, value in flatten(wb.load(str(place), mesh="fsdp=1")).items()}
        for place in (step, database)
    )
    assert_same_bits(loaded, wanted)


@pytest.mark.parametrize("zarr3", ["true", "false"])
def test_zeros_that_an_older_orbax_left_out(zarr3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its metadata don't say that all chunks are stored: one that isn't there is of zeros for every command, as for
    Orbax. Where they say so, it is a damage.
    """
    tensors = random_tensors(LLAMA)
    tensors["model.norm.weight"][:] = 0
    release = save(tmp_path / "hf", LLAMA, tensors)
    form = ("--use_ocdbt", "false", "--use_zarr3", zarr3, "--compression", "zstd")  # so that chunks are copied
    step = convert(release, tmp_path / "ckpt", *form, "--mesh", "fsdp=2")
    whole = Path(shutil.copytree(step, tmp_path / "whole" / "0"))
    (place,) = (step / "items").glob("*.decoder_norm.scale")
    chunks = [path for path in place.rglob("*") if path.is_file() and not path.name.startswith((".", "zarr"))]
    metadata = step / "items" / "_METADATA"
    said = json.loads(metadata.read_text())
    for chunk in chunks:
        chunk.unlink()
    assert call("reshard", step, tmp_path / "damaged", "--mesh", "fsdp=2") == 1
    assert "is missing" in capsys.readouterr().err
    assert said.pop("store_array_data_equal_to_fill_value")
    metadata.write_text(json.dumps(said))
    for chunk in chunks:
        chunk.touch()
    assert call("reshard", step, tmp_path / "emptied", "--mesh", "fsdp=2") == 1
    for chunk in chunks:
        chunk.unlink()
    for command in (
        ["diff", whole, step],
        ["reshard", step, tmp_path / "same", "--mesh", "fsdp=2"],
        ["reshard", step, tmp_path / "other", "--mesh", "fsdp=8"],
        *(["diff", step, tmp_path / name] for name in ("same", "other")),
        ["export", step, tmp_path / "exported", "--like", release],
        ["verify", whole, tmp_path / "exported"],
    ):
        assert call(*command) == 0, (command, capsys.readouterr().err)


def test_shapes_as_large_as_may_be(files: Path, tmp_path: Path, measure: Measure) -> None:
    """8.8 trillion elements of which nothing is there: compared until the first chunk, which is missing."""
    step = Path(shutil.copytree(files, tmp_path / "0"))
    described([1 << 38, 2, 2, 8], [16, 2, 2, 8])(step)
    told = measure(["diff", step, step], tmp_path / "printed")
    assert (told["status"], "is missing" in told["message"]) == (1, True), told
    assert told["megabytes"] <= MEGABYTES


@pytest.mark.parametrize("command", ["diff", "verify", "open"])
def test_chunks_larger_than_the_machine(command: str, tmp_path: Path, release: Path, measure: Measure) -> None:
    """Told before they are decoded, where they have to be decoded whole."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory > 60 << 30:
        pytest.skip("a chunk may have at most 64 GiB")
    elements = memory // 4 + 1
    about = zarr2(np.zeros(1, np.float32), shape=[elements], chunks=[elements])
    items = bare(tmp_path / "0" / "items", about)
    if command == "open":
        with pytest.raises(wb.Refused, match="this machine has"):
            wb.open(str(items))
        return
    arguments = [items, items] if command == "diff" else ["--checkpoint", items, "--source", release]
    told = measure([command, *arguments], tmp_path / "printed")
    assert (told["status"] in (1, 2), "this machine has" in told["message"]) == (True, True), told


def test_a_broken_archive(files: Path, tmp_path: Path) -> None:
    """Each file of it is read only when it is needed; the API says what it documents."""
    step = Path(shutil.copytree(files, tmp_path / "0"))
    archive = step / "release.zip"
    whole = archive.read_bytes()
    at = whole.index(b"config.json") + 40
    archive.write_bytes(whole[:at] + b"####" + whole[at + 4 :])
    with pytest.raises(wb.Refused, match=r"release\.zip"):
        plan(str(step))


def test_an_array_that_is_no_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Orbax saves one; it has no name to be taken by."""
    ocp.PyTreeCheckpointer().save(tmp_path / "one", np.zeros(4, np.float32))
    for command in (["inspect", tmp_path / "one"], ["diff", tmp_path / "one", tmp_path / "one"]):
        assert call(*command) == 2
        assert "holds an array without a name, as a checkpoint of one array does" in capsys.readouterr().err


# --- any numbers ------------------------------------------------------------------------------------------------------

SIZES = st.integers(0, 62).map(lambda n: 1 << n) | st.integers(0, 40) | st.just(-1)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    shape=st.lists(SIZES, max_size=4),
    chunks=st.lists(SIZES, max_size=4),
    is_zarr3=st.booleans(),
    strange=st.dictionaries(
        st.sampled_from(["shape", "chunks", "dtype", "order", "filters", "compressor", "data_type", "codecs", "x"]),
        st.none()
        | st.booleans()
        | st.text(max_size=3)
        | st.lists(st.integers(-1, 3), max_size=3)
        | st.just({"id": "zstd"}),
        max_size=1,
    ),
)
def test_any_description(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    chunks: list[int],
    is_zarr3: bool,
    strange: dict[str, Any],
) -> None:
    """Opened, or refused in words; what is opened is within all bounds."""
    one = np.zeros(1, np.float32)
    grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
    about = zarr3(one, shape=shape, chunk_grid=grid) if is_zarr3 else zarr2(one, shape=shape, chunks=chunks)
    items = bare(tmp_path_factory.mktemp("any") / "items", about | strange)
    try:
        (array,) = open_orbax(items).arrays.values()
    except StorageError:
        pass
    else:
        assert array.nbytes <= 4 * MAX_ELEMENTS
        assert array.chunk_bytes <= 64 << 30
        (items / "_METADATA").write_text(json.dumps(tree(["params.params.v"])))
        with pytest.raises(StorageError):
            open_orbax(items)
