"""Conversions that sleep and wake at every operation on their output, in an order that the test chooses.

Each conversion runs in a thread of its own, stops before every operation on the store, and goes on when it is told to.
The code is the real one but for what TensorStore does: a unit's database is a few plain files, and merging writes a
list of the databases.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import google_crc32c
import numpy as np

from weightbeam.formats.orbax import ocdbt, plan_hash_of
from weightbeam.formats.orbax.zarr import ArraySpec, Format
from weightbeam.formats.record import provenance
from weightbeam.formats.staging import Staging, lease, staging_at
from weightbeam.formats.storage import File, LocalFolder, StorageError, Store, renaming
from weightbeam.formats.storage.store import as_base64
from weightbeam.formats.targets import orbax_units
from weightbeam.formats.targets.orbax import OrbaxTarget, write_unit

UNITS, PARTS = 2, 2  # of a conversion; files of a unit's database
SPEC = ArraySpec("a", (UNITS,), np.dtype(np.float32), (1,), (1,))
WRITES = {
    "os.rename",
    "os.link",
    "os.symlink",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.utime",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
    "open",
    "weightbeam.rename",
}
_here = threading.local()


class Killed(BaseException):
    """What a process that is killed feels: it can't do anything any more, cleaning up included."""


class Process(threading.Thread):
    """A conversion that takes a step when it is told to."""

    def __init__(self, work: Callable[[], str], about: dict[str, Any]):
        super().__init__(daemon=True)
        self.work, self.about = work, about
        self.told, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.dead, self.over = False, False
        self.end = ""
        self.fault: Exception | None = None
        self.start()

    def run(self) -> None:
        _here.process = self
        try:
            self.pause()
            self.end = self.work()
        except (StorageError, OSError, ValueError) as e:
            self.end = f"failed: {type(e).__name__}: {e}"
        except Killed:
            self.end = "killed"
        except Exception as e:  # none that a command may end with: the schedule is at fault, or the command
            self.fault = e
        finally:
            _here.process = None
            self.over = True
            self.done.release()

    def pause(self) -> None:
        """Waits for its turn."""
        if not self.dead:
            self.done.release()
            self.told.acquire()
        if self.dead:
            raise Killed

    def step(self) -> None:
        """Lets it do one operation; returns when it is before the next."""
        if not self.over:
            self.told.release()
            self.wait()

    def wait(self) -> None:
        assert self.done.acquire(timeout=60), "it hangs"
        if self.fault:
            raise self.fault

    def kill(self) -> None:
        if not self.over:
            self.dead = True
            self.step()


def _hook(event: str, arguments: tuple) -> None:
    process = getattr(_here, "process", None)
    if process is None or event not in WRITES or not str(arguments[0]).startswith(process.about["root"]):
        return
    if event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR):
        process.pause()


class MemoryBucket(Store):
    """A bucket as `formats.storage.bucket.Bucket` is, in memory; every call is an operation."""

    at_a_time, stages = 1, True
    objects: ClassVar[dict[str, tuple[bytes, int, float]]] = {}
    generation = 0

    def _put(self, name: str, data: bytes) -> str:
        cls = MemoryBucket
        cls.generation += 1
        cls.objects[self.path(name)] = data, cls.generation, time.time()
        return str(cls.generation)

    def _get(self, name: str) -> tuple[bytes, int, float] | None:
        if (process := getattr(_here, "process", None)) is not None:
            process.pause()
        return self.objects.get(self.path(name))

    def list(self, prefix: str = "", recursive: bool = True) -> list[File]:
        self._get("")
        below, names = f"{self.url}/", sorted(self.objects)
        names = [name[len(below) :] for name in names if name.startswith(below + prefix)]
        return [
            _file(name, self.objects[below + name]) for name in names if recursive or "/" not in name[len(prefix) :]
        ]

    def folders(self) -> list[str]:
        return sorted({file.name.partition("/")[0] for file in self.list() if "/" in file.name})

    def stat(self, name: str) -> File | None:
        found = self._get(name)
        return _file(name, found) if found else None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if (found := self._get(name)) is None:
            raise FileNotFoundError(2, "no such object", self.path(name))
        return found[0][start:stop]

    def read_into(self, name: str, ranges: Iterable) -> int:
        raise NotImplementedError

    def write(self, name: str, data: bytes) -> None:
        self._get(name)
        self._put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        return self.replace(name, data, None) is not None

    def replace(self, name: str, data: bytes, version: str | None) -> str | None:
        found = self._get(name)
        return self._put(name, data) if (str(found[1]) if found else None) == version else None

    def now(self) -> float:
        return time.time()

    def delete(self, name: str, version: str | None = None) -> None:
        found = self._get(name)
        if found and version in (None, str(found[1])):
            del self.objects[self.path(name)]

    def delete_all(self, files: Iterable[File]) -> None:
        for file in files:
            self.delete(file.name, file.version)

    def delete_folder(self, name: str = "") -> None:
        self.delete_all(self.list(f"{name}/" if name else ""))

    def copy(self, source: Store, file: File) -> None:
        self._copy(source, file, lambda there: True)

    def copy_new(self, source: Store, file: File) -> None:
        self._copy(source, file, lambda there: there is None or there.is_copy_of(file))

    def copy_over(self, source: Store, file: File, there: File) -> None:
        self._copy(source, file, lambda held: held is not None and held.version == there.version)

    def _copy(self, source: Store, file: File, may: Callable[[File | None], bool]) -> None:
        assert isinstance(source, MemoryBucket)
        found = source._get(file.name)  # the store does the rest in one step
        held = self.objects.get(self.path(file.name))
        if found is None or str(found[1]) != file.version or not may(_file(file.name, held) if held else None):
            raise StorageError(f"{source.path(file.name)}: is another one by now, or one that may not go lies there")
        self._put(file.name, found[0])

    def copy_all(self, source: Store, files: Iterable[File]) -> None:
        for file in files:
            self.copy_new(source, file)


def _file(name: str, found: tuple[bytes, int, float]) -> File:
    data, generation, updated = found
    return File(name, len(data), str(generation), updated, crc32c=as_base64(google_crc32c.value(data)))


# --- in the place of TensorStore --------------------------------------------------------------------------------------


def _write_anyway(store: Store, name: str, data: bytes) -> None:
    """Makes the folders of a file too, as TensorStore does."""
    if isinstance(store, LocalFolder):
        path = Path(store.path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    else:
        store.write(name, data)


def _write(staging: Staging, attempt: str, shards: Any, format: Format, copies: Any = ()) -> None:
    """A unit: its database in parts, or its shard under a name that every plan has."""
    ((_, unit, plan),) = shards
    for part in range(PARTS):
        if format.use_ocdbt:
            _write_anyway(staging.items / f"{ocdbt.ATTEMPT}{attempt}", f"part{part}", f"{plan} {unit}".encode())
    if not format.use_ocdbt:
        _write_anyway(staging.shards, f"a/c/{unit}", f"{plan} {unit}".encode())


def _merge(
    items: Store, databases: Iterable[Store], objects: Any, expected: Any, manifest: Store | None = None
) -> None:
    names = [database.name for database in databases]
    _write_anyway(manifest or items, ocdbt.MANIFEST, json.dumps(names).encode())


def act_as_convert(
    staging: Staging, plan: str, resume: bool, overwrite: bool, format: Format, submitted: Callable[[], None]
) -> str:
    """What `pipelines.convert` and the workers do, in their order; says when the workers have it."""

    def problem() -> str:
        if resume and not staging.exists() and plan_hash_of(staging.final) == plan:
            return "finished"
        if staging.exists() and not resume and not overwrite:
            return "refused: stopped"
        if staging.exists() and resume and staging.is_staged() and staging.read_plan() != plan.encode():
            return "refused: another plan"
        return "refused: exists" if staging.is_taken() and not overwrite else ""

    if (why := problem()) and why != "finished":
        return why
    staging.output.make()
    with staging.hold():
        if why := problem():
            if why == "finished":
                staging.clean()
            return why
        if resume and plan_hash_of(staging.checkpoint) == plan:
            staging.publish(overwrite)
            return "published"
        if resume and staging.is_staged():
            staging.write_plan(plan.encode())
        else:
            staging.create(plan.encode())
        staging.aside.write("release", plan.encode())
        worker: Staging = pickle.loads(pickle.dumps(staging))
        submitted()
        done = worker.ledger.done()
        for unit in range(UNITS):
            if unit not in done:
                write_unit(worker, unit, [(SPEC, unit, plan)], format)  # type: ignore[arg-type]
        target = OrbaxTarget([SPEC], format, scan_layers=True, bare=True)
        target.assemble(worker, UNITS, {"plan": plan, "dropped": {}}, overwrite)
    return "published" if plan_hash_of(staging.final) == plan else "failed: isn't its result"


# --- the world --------------------------------------------------------------------------------------------------------


class World:
    """An output, conversions at work on it, and what must always hold.

    Attributes:
      kind: "folder"; "folder in two": without a rename that swaps; "bucket".
    """

    def __init__(self, kind: str, database: bool = True):
        self._open(kind)
        self.format = Format(use_ocdbt=database)
        self.output: Store = MemoryBucket("gs://bucket/out") if kind == "bucket" else LocalFolder(f"{self.root}/out")
        patches: dict[Any, dict[str, Any]] = {
            lease: dict(PATIENCE=0, HEARTBEAT=1e6),
            orbax_units: dict(_write=_write, _written_files=lambda *_: {}),
            provenance: dict(digest=lambda *_: 0),
            ocdbt: dict(merge=_merge),
        }
        if kind == "folder in two":
            # a lock of one process, which these are not
            patches[renaming] = dict(_renameat2=_no_renames, _ONE=contextlib.nullcontext())
        self._patch(patches)

    def _open(self, kind: str) -> None:
        """Nothing has happened yet, in a folder and a bucket of its own."""
        if not getattr(World, "hooked", False):
            sys.addaudithook(_hook)
            World.hooked = True  # type: ignore[attr-defined]
        self.kind = kind
        self.processes: list[Process] = []
        self.published: str | None = None
        self.log: list[str] = []
        shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.root = tempfile.mkdtemp(prefix="weightbeam-schedules-", dir=shm)
        MemoryBucket.objects = {}
        self.stack = contextlib.ExitStack()
        self.stack.callback(shutil.rmtree, self.root, ignore_errors=True)

    def _patch(self, patches: dict[Any, dict[str, Any]]) -> None:
        """Until the end: other values of modules' names, and nothing is synced to a disk."""
        for module, values in patches.items():
            self.stack.enter_context(mock.patch.multiple(module, **values))
        self.stack.enter_context(mock.patch("weightbeam.formats.storage.local.os.fsync"))

    def start(self, plan: str, resume: bool, overwrite: bool) -> Process:
        staging = staging_at(self.output, 0, plan)

        about: dict[str, Any] = {"plan": plan, "overwrite": overwrite, "root": self.root}

        def work() -> str:
            submitted = lambda: about.update(staging=staging)  # noqa: E731
            return act_as_convert(staging, plan, resume, overwrite, self.format, submitted)

        return self._begin(work, f"{plan}{' --resume' * resume}{' --overwrite' * overwrite}", about)

    def stop(self, process: Process) -> Process:
        """Who stops a conversion, whose workers don't know: from his end on they publish nothing."""

        def work() -> str:
            process.about["staging"].stop()
            process.about["stopped"] = True
            return "stopped"

        about = {"plan": None, "overwrite": False, "root": self.root}
        return self._begin(work, f"stops {self.processes.index(process)}", about)

    def _begin(self, work: Callable[[], str], how: str, about: dict[str, Any]) -> Process:
        process = Process(work, about)
        process.wait()
        self.processes.append(process)
        self.log.append(f"{len(self.processes) - 1}: {how}")
        return process

    def run(self, process: Process, steps: int) -> None:
        for _ in range(steps):
            if process.over:
                break
            process.step()
            self.check(process)
        self.log.append(f"{self.processes.index(process)} × {steps}{f': {process.end}' if process.over else ''}")

    def finish(self, process: Process) -> str:
        self.run(process, 100_000)
        assert process.over
        return process.end

    def kill(self, process: Process) -> None:
        process.kill()
        self.check(process)
        self.log.append(f"{self.processes.index(process)} killed: {process.end}")

    def age(self) -> None:
        """Whoever has the lease hasn't renewed it for long."""
        name = "0.weightbeam-lease"
        if isinstance(self.output, LocalFolder):
            with contextlib.suppress(OSError):
                os.utime(self.output.path(name), (0, 0), follow_symlinks=False)
        elif found := MemoryBucket.objects.get(self.output.path(name)):
            MemoryBucket.objects[self.output.path(name)] = found[0], found[1], 0.0
        self.log.append("the lease is stale")

    def check(self, actor: Process) -> None:
        """What is published is whole, of one plan, and was only replaced by one that was asked to."""
        final, story = self.output / "0", "\n".join(self.log)
        items = final / "items"
        plan = plan_hash_of(final)
        if plan is not None:
            assert items.read("commit_success.txt"), story
            assert final.read("release").decode() == plan, story
            if self.format.use_ocdbt:
                names = json.loads(items.read(ocdbt.MANIFEST))
                parts = [(items / name).read(f"part{part}").decode() for name in names for part in range(PARTS)]
                assert sorted(parts) == sorted(f"{plan} {unit}" for unit in range(UNITS) for _ in range(PARTS)), (
                    parts,
                    story,
                )
            else:
                assert [items.read(f"a/c/{unit}").decode() for unit in range(UNITS)] == [
                    f"{plan} {unit}" for unit in range(UNITS)
                ], story
        elif self.kind != "bucket":
            assert (
                not isinstance(final, LocalFolder)
                or not final.folder.exists()
                or not final.exists("commit_success.txt")
            ), story
        if plan != self.published:
            if plan is None:
                assert self.kind != "folder", f"what was published is gone: {actor.about}\n{story}"
                assert any(process.about["overwrite"] for process in self.processes), story
            else:
                # in two: whoever tidies up may bring the old one back
                assert actor.about["plan"] == plan or self.kind == "folder in two", story
                assert "stopped" not in actor.about or self.kind == "folder in two", (
                    f"published though stopped\n{story}"
                )
                assert self.published is None or actor.about["overwrite"], story
            self.published = plan

    def end(self) -> None:
        """All are brought to their ends; then a conversion goes through, and leaves nothing but its checkpoint."""
        for process in self.processes:
            self.finish(process)
        self.age()
        last = self.start("last", resume=False, overwrite=True)
        assert self.finish(last) == "published", (last.end, "\n".join(self.log))
        left = self.output.entries() if isinstance(self.output, LocalFolder) else sorted(self.output.folders())
        assert list(left) == ["0"], (left, "\n".join(self.log))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.stack.close()


def _no_renames(old: Path, new: Path, flags: int) -> None:
    raise renaming.UnsupportedError(22, "Invalid argument", str(old))


def schedules(kind: str, seeds: Iterable[int]) -> Iterator[int]:
    """Two to four conversions in a random order, with sleeps, takeovers and kills; yields each seed that went well."""
    for seed in seeds:
        rng = random.Random(seed)
        world = World(kind, database=rng.random() < 0.7)
        try:
            for _ in range(rng.randint(4, 16)):
                alive = [process for process in world.processes if not process.over]
                submitted = [process for process in alive if "staging" in process.about]
                what = rng.random()
                if len(alive) < 2 or (what < 0.15 and len(alive) < 3):
                    world.age() if alive and rng.random() < 0.8 else None
                    mode = rng.choice([(False, True), (False, True), (True, False), (True, True), (False, False)])
                    world.run(world.start(rng.choice("AB"), *mode), rng.randint(1, 120))
                elif what < 0.25:
                    world.kill(rng.choice(alive))
                elif what < 0.35:
                    world.finish(rng.choice(alive))
                elif what < 0.45 and submitted:
                    world.run(world.stop(rng.choice(submitted)), rng.choice([1, 2, 5, 1000]))
                else:
                    world.run(rng.choice(alive), rng.choice([1, 2, 5, 20, 60]))
            world.end()
            yield seed
        except (AssertionError, OSError) as e:
            raise AssertionError(f"{kind}, seed {seed}: {e}\n" + "\n".join(world.log)) from e
        finally:
            world.close()
