"""Writing a checkpoint in units, and assembling it: attempts that count once, attempts that don't count, and deaths in
between.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lazily import lazily
from processes import run
from servers.clients import asking
from servers.gcs import FakeGcs
from support import BF16, HERE

from weightbeam.formats.orbax import find_items, read_arrays
from weightbeam.formats.orbax.metadata import read_tree, record_of
from weightbeam.formats.orbax.ocdbt import ATTEMPT
from weightbeam.formats.orbax.zarr import ArraySpec, Format
from weightbeam.formats.staging import IncompleteError, Staging, TakenOverError, staging_at
from weightbeam.formats.storage import ChangedError, LocalFolder, StorageError, Store, create_file, open_store
from weightbeam.formats.targets.orbax import OrbaxTarget, write_unit

ocp = lazily("orbax.checkpoint")

SPECS = [
    ArraySpec("params.params.a", (6, 8), np.dtype(np.float32), (2, 4), (2, 4)),
    ArraySpec("params.params.b.c", (5, 7), BF16, (2, 3), (2, 3)),  # no chunk divides it
    ArraySpec("params.params.b.d", (8,), BF16, (8,), (8,)),
]
DEFAULT = Format()
EITHER = [DEFAULT, Format(use_ocdbt=False)]
FORMATS = [
    Format(ocdbt, zarr3, compression)
    for ocdbt in (True, False)
    for zarr3 in (True, False)
    for compression in ("none", "zstd")
]


def values(spec: ArraySpec) -> np.ndarray:
    """What the array should hold: no two arrays alike, zeros (the fill value) among them."""
    size = int(np.prod(spec.shape))
    return (np.arange(size) % 11 + len(spec.key) * (np.arange(size) % 2)).reshape(spec.shape).astype(spec.dtype)


Shards = list[tuple[ArraySpec, tuple[tuple[int, int], ...], np.ndarray]]


def shards(spec: ArraySpec) -> Shards:
    """Every shard of an array."""
    boxes = [spec.shard_box(index) for index in itertools.product(*map(range, spec.grid))]
    return [(spec, box, np.ascontiguousarray(values(spec)[tuple(slice(*span) for span in box)])) for box in boxes]


def units() -> list[Shards]:
    """Four units: halves of the first array in different units, each beside a part of another."""
    a, b, d = (shards(spec) for spec in SPECS)
    return [a[:3] + b[:4], b[4:], a[3:], d]


def create_staging(output: Path | str) -> Staging:
    staging = staging_at(output, 0)
    staging.create(b"the plan")
    return staging


def write_all(staging: Staging, format: Format, done: tuple[int, ...] = ()) -> None:
    for number, unit in enumerate(units()):
        if number not in done:
            write_unit(staging, number, unit, format)


def finish(staging: Staging, format: Format = DEFAULT, overwrite: bool = False) -> None:
    OrbaxTarget(SPECS, format, scan_layers=True).assemble(
        staging, len(units()), {"source": "here", "dropped": {"a": "why", "b": "why"}}, overwrite
    )


def restored(staging: Staging) -> dict[str, np.ndarray]:
    params = ocp.PyTreeCheckpointer().restore(Path(staging.final) / "items")["params"]["params"]
    return {
        "params.params.a": params["a"],
        "params.params.b.c": params["b"]["c"],
        "params.params.b.d": params["b"]["d"],
    }


def assert_whole(staging: Staging) -> None:
    """The published checkpoint holds what it should, and nothing of the staging is left."""
    for spec in SPECS:
        got = restored(staging)[spec.key]
        assert (got.dtype, got.shape, got.tobytes()) == (spec.dtype, spec.shape, values(spec).tobytes())
    assert [path.name for path in Path(staging.output).iterdir()] == ["0"]
    assert {path.name for path in Path(staging.final).iterdir()} == {
        "items",
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
        "conversion.json",
    }
    assert (Path(staging.final) / "items" / "commit_success.txt").exists()


def attempts(items: Store) -> set[str]:
    return {name.removeprefix(ATTEMPT) for name in items.folders() if name.startswith(ATTEMPT)}


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_units_become_a_checkpoint(tmp_path: Path, format: Format) -> None:
    """In every format: partial chunks at the edges, chunks of one array from several units, and stock Orbax reads it."""
    staging = create_staging(tmp_path / "out")
    write_all(staging, format)
    assert set(staging.ledger.done()) == {0, 1, 2, 3}
    finish(staging, format)
    assert_whole(staging)
    metadata = json.loads((Path(staging.final) / "_CHECKPOINT_METADATA").read_bytes())
    record = json.loads((Path(staging.final) / "conversion.json").read_bytes())
    assert record["source"] == "here"
    assert set(record["digests"]) == {spec.key for spec in SPECS}
    assert metadata["custom_metadata"] == {"scan_layers": True, "weightbeam": record | {"dropped": {"why": 2}}}


@pytest.mark.parametrize("format", [Format(), Format(use_ocdbt=False, use_zarr3=False)], ids=str)
def test_of_two_attempts_at_a_unit_one_counts(tmp_path: Path, format: Format) -> None:
    """The first to enter the ledger counts; the other is told so, and its database is deleted."""
    staging = create_staging(tmp_path / "out")
    first = write_unit(staging, 0, units()[0], format)
    assert write_unit(staging, 0, units()[0], format) == first
    write_all(staging, format, done=(0,))
    assert staging.ledger.entries()[0]["attempt"] == first
    if format.use_ocdbt:
        assert len(attempts(staging.items)) == 5
    counted = {entry["attempt"] for entry in staging.ledger.entries().values()}
    finish(staging, format)
    assert_whole(staging)
    if format.use_ocdbt:
        assert attempts(staging.final / "items") == counted


def test_a_zombie_with_other_values_changes_nothing(tmp_path: Path) -> None:
    """An attempt that comes too late doesn't count, whatever it wrote."""
    staging = create_staging(tmp_path / "out")
    write_all(staging, Format())
    write_unit(staging, 2, [(spec, box, array + 100) for spec, box, array in units()[2]], Format())
    finish(staging)
    assert_whole(staging)


@pytest.mark.parametrize("format", EITHER, ids=str)
def test_a_missing_unit_is_refused(tmp_path: Path, format: Format) -> None:
    """Nothing is published, and the missing unit can be made afterwards."""
    staging = create_staging(tmp_path / "out")
    write_all(staging, format, done=(1,))
    with pytest.raises(IncompleteError, match=r"1 of 4 units are missing, e\.g\. \[1\]"):
        finish(staging, format)
    assert not Path(staging.final).exists()
    write_unit(staging, 1, units()[1], format)
    finish(staging, format)
    assert_whole(staging)


EXTRA = ArraySpec("params.params.zzz", (4,), np.dtype(np.float32), (4,), (4,))


@pytest.mark.parametrize(
    ("unit", "parts", "message", "format"),
    [
        *((1, units()[1][:-1], "1 keys missing", format) for format in EITHER),  # the ledger may say done
        (3, units()[3] + units()[2][:1], "1 written twice", DEFAULT),  # the last copied would win silently
        *((3, units()[3] + shards(EXTRA), r"1 (keys )?extra.*zzz", format) for format in EITHER),
    ],
    ids=["missing", "missing, in files", "of two units", "extra", "extra, in files"],
)
def test_a_unit_of_other_shards_than_planned(
    tmp_path: Path, unit: int, parts: Shards, message: str, format: Format
) -> None:
    """Some missing, those of another unit, an array that nobody asked for: the keys tell, and nothing is published."""
    staging = create_staging(tmp_path / "out")
    write_unit(staging, unit, parts, format)
    write_all(staging, format, done=(unit,))
    with pytest.raises(IncompleteError, match=message):
        finish(staging, format)
    assert not Path(staging.final).exists()


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_an_entry_that_cant_be_read_is_none(tmp_path: Path, kind: str) -> None:
    """Nor does it fail whoever assembles: the unit is missing then, and the next attempt makes it."""
    with contextlib.ExitStack() as stack:
        if kind == "bucket":
            stack.enter_context(asking(stack.enter_context(FakeGcs("bucket"))))
        staging = create_staging(tmp_path / "out" if kind == "folder" else "gs://bucket/out")
        write_all(staging, Format())
        attempt = staging.ledger.entries()[2]["attempt"]
        staging.plan_folder.write(f"{staging.units}/2.json", b"")
        staging.plan_folder.write(f"{staging.units}/withdrawn.json", b"{")
        with pytest.raises(IncompleteError, match="1 of 4 units are missing"):
            finish(staging)
        staging.ledger.drop_unreadable()
        assert set(staging.ledger.done()) == {0, 1, 3}
        assert write_unit(staging, 2, units()[2], Format()) != attempt
        assert set(staging.ledger.entries()) == {0, 1, 2, 3}


def test_a_lost_database_is_noticed(tmp_path: Path) -> None:
    """A database that the ledger names but that is gone merges as empty, silently, in TensorStore: the keys are missing
    here.
    """
    staging = create_staging(tmp_path / "out")
    write_all(staging, Format())
    lost = Path(staging.items) / f"{ATTEMPT}{staging.ledger.entries()[2]['attempt']}"
    lost.rename(tmp_path / "elsewhere")
    with pytest.raises(IncompleteError, match="missing"):
        finish(staging)
    assert not Path(staging.final).exists()


@pytest.mark.parametrize("format", [Format(), Format(use_ocdbt=False, use_zarr3=False)], ids=str)
def test_assembling_twice_changes_nothing(tmp_path: Path, format: Format) -> None:
    """A repeated bundle after the publication: not a byte, not a time."""
    staging = create_staging(tmp_path / "out")
    write_all(staging, format)
    finish(staging, format)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in Path(staging.output).rglob("*")}
    finish(staging, format)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in Path(staging.output).rglob("*")} == before


def test_an_existing_checkpoint_isnt_touched(tmp_path: Path) -> None:
    """Without `overwrite` it is neither replaced nor mixed with the new one."""
    staging = create_staging(tmp_path / "out")
    Path(staging.final).mkdir()
    (Path(staging.final) / "old").write_text("old")
    write_all(staging, Format())
    with pytest.raises(OSError, match="isn't what it was as this began, and stays"):
        finish(staging)
    assert (Path(staging.final) / "old").read_text() == "old"


def test_overwrite_leaves_nothing_of_the_old_checkpoint(tmp_path: Path) -> None:
    """With it the new one stands in its place, alone."""
    staging = create_staging(tmp_path / "out")
    Path(staging.final).mkdir()
    (Path(staging.final) / "old").write_text("old")
    write_all(staging, Format())
    finish(staging, overwrite=True)
    assert_whole(staging)


@pytest.mark.parametrize("format", EITHER, ids=str)
def test_a_late_unit_of_another_plan_doesnt_count(tmp_path: Path, format: Format) -> None:
    """A worker that wakes after another plan was staged in the same place: its unit isn't entered, and isn't in the
    checkpoint.
    """
    old, new = (staging_at(tmp_path / "out", 0, plan) for plan in ("old", "new"))
    old.create(b"the old plan")
    new.create(b"the new plan")
    with pytest.raises(TakenOverError):
        write_unit(old, 0, [(spec, box, array + 100) for spec, box, array in units()[0]], format)
    assert new.ledger.done() == {}
    write_all(new, format)
    finish(new, format)
    assert_whole(new)


# --- deaths -----------------------------------------------------------------------------------------------------------

# Forks a process for each death: TensorStore is used in them alone.
WRITER = """
import os, runpy, signal, sys, time
sys.path.insert(0, {here!r})
test = runpy.run_path({this!r})
import weightbeam.formats.storage.local
from weightbeam.formats.targets import orbax
format = test["Format"](use_ocdbt={use_ocdbt})

def write(staging, number, unit, ready):
    orbax.write_unit(staging, number, test["units"]()[unit], format)
    os.write(ready, b"x")

def run(moment, staging, ready):
    if moment is None:
        weightbeam.formats.storage.local.create_file = lambda *_: os._exit(9)
    write(staging, 0, 0, ready)
    for number in range(4, 10**9):
        write(staging, number, 1, ready)

for moment, output in {jobs!r}:
    staging = test["create_staging"](test["Path"](output))
    get, ready = os.pipe()
    child = os.fork()
    if child == 0:
        run(moment, staging, ready)
    if moment is not None:
        os.read(get, 1)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1])
"""
MOMENTS = [None, 0.0, 0.003, 0.01, 0.02, 0.05]  # seconds after the first unit; None: before its ledger entry


@pytest.fixture(scope="module", params=[True, False], ids=["ocdbt", "folders"])
def dead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Format, dict[float | None, Staging]]:
    """What processes left behind that wrote a unit, and then others without end, until they died at a moment."""
    folder = tmp_path_factory.mktemp("dead")
    left = {moment: staging_at(folder / str(moment), 0) for moment in MOMENTS}
    jobs = [(moment, str(Path(staging.output))) for moment, staging in left.items()]
    script = WRITER.format(here=str(HERE), this=__file__, use_ocdbt=request.param, jobs=jobs)
    ran = run(sys.executable, "-c", script, timeout=60)
    statuses = [int(line) for line in ran.stdout.split()]
    assert [os.WIFSIGNALED(status) for status in statuses] == [moment is not None for moment in MOMENTS], ran.stderr
    assert os.WEXITSTATUS(statuses[0]) == 9, ran.stderr
    return Format(use_ocdbt=request.param), left


def test_an_attempt_that_dies_before_its_ledger_entry_doesnt_count(
    dead: tuple[Format, dict[float | None, Staging]],
) -> None:
    """Its data was written and nothing entered: the unit is missing, and its remains are deleted in the end."""
    format, staging = dead[0], dead[1][None]
    assert staging.ledger.done() == {}
    remains = attempts(staging.items)
    assert len(remains) == (1 if format.use_ocdbt else 0)
    write_all(staging, format, done=(0,))
    with pytest.raises(IncompleteError):
        finish(staging, format)
    write_unit(staging, 0, units()[0], format)
    finish(staging, format)
    assert_whole(staging)
    assert not remains & attempts(staging.final / "items")


@pytest.mark.parametrize("moment", MOMENTS[1:])
def test_kills_at_any_moment_leave_nothing_that_counts_halfway(
    dead: tuple[Format, dict[float | None, Staging]], moment: float
) -> None:
    """Whatever the ledger names after a SIGKILL is whole."""
    format, staging = dead[0], dead[1][moment]
    done = staging.ledger.done()
    assert 0 in done
    for unit in [number for number in done if number >= 4]:  # beyond the four of the checkpoint: not in this one
        staging.plan_folder.delete(f"{staging.units}/{unit}.json")
    write_all(staging, format, done=(0,))
    finish(staging, format)
    assert_whole(staging)


def test_a_file_is_created_at_most_once(tmp_path: Path) -> None:
    """The ledger rests on it: the first content stays, and nothing else is left in the folder."""
    path = tmp_path / "0.json"
    assert create_file(path, b"first")
    assert not create_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_was_written_is_what_inspection_reads(tmp_path: Path, format: Format) -> None:
    """Shapes, dtypes, chunks and compression come back; from the root, the step or the item."""
    staging = create_staging(tmp_path / "out")
    write_all(staging, format)
    finish(staging, format)
    items = staging.final / "items"
    assert [find_items(place) for place in (staging.output, staging.final, items)] == [items] * 3
    found = {array.spec.key: array for array in read_arrays(items)}
    assert set(found) == {*(spec.key for spec in SPECS), "step"}
    for spec in SPECS:
        assert found[spec.key].spec == spec
        assert found[spec.key].compressed == (format.compression == "zstd")


def test_a_stock_checkpoint_is_read_too(tmp_path: Path) -> None:
    """Orbax's own, with its codecs."""
    tree = {"step": 3, "params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}}
    ocp.PyTreeCheckpointer().save(tmp_path / "stock", tree)
    found = {array.spec.key: array.spec for array in read_arrays(find_items(tmp_path / "stock"))}
    assert (found["params.w"].shape, found["params.w"].dtype) == ((3, 4), np.float32)
    assert found["step"].shape == ()


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    """A folder without one, and a root with two steps, are refused by name."""
    with pytest.raises(StorageError, match="no Orbax checkpoint"):
        find_items(tmp_path)
    for step in ("0", "5"):
        (tmp_path / step / "items").mkdir(parents=True)
        (tmp_path / step / "items" / "_METADATA").write_text("{}")
    with pytest.raises(StorageError, match=f"2 steps: name one of 0, 5, as in {tmp_path}/5"):
        find_items(tmp_path)


@pytest.mark.parametrize("read", [record_of, read_tree])
def test_what_is_replaced_while_it_is_read_isnt_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Store], object]
) -> None:
    """Nobody is told to move the new checkpoint's record away."""

    def replaced(*_: object) -> bytes:
        raise ChangedError("x: was replaced")

    monkeypatch.setattr(LocalFolder, "read", replaced)
    with pytest.raises(ChangedError, match=r"^x: was replaced$"):
        read(open_store(tmp_path) / "items")
