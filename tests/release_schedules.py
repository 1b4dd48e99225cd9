"""Commands that write releases, and sleep and wake at every operation on their output, in an order that the test
chooses: to a folder, to a bucket and to the hub.

The commands are `pipelines.running.carry.carry`, from its first look to its last line; only Beam is left out: the units
are made one after the other. The hub is the test server, asked by huggingface_hub; a process stops before each of its
requests.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from huggingface_hub import constants
from schedules import MemoryBucket, Process, World, _here
from servers.hub import FakeHub

from weightbeam.formats.staging import lease
from weightbeam.formats.storage import hub as storage
from weightbeam.formats.targets import hub as hub_publishing
from weightbeam.formats.targets.published import RECORD
from weightbeam.formats.targets.release_bucket import ReleaseBucket
from weightbeam.model_mappings.boxes import whole
from weightbeam.pipelines.running import carry, hub, output
from weightbeam.pipelines.running import graph as execution
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.transforms.cutting.files import Entry, plan_files
from weightbeam.transforms.planning.options import Delivery, ExportOptions
from weightbeam.transforms.planning.to_release import ToRelease
from weightbeam.transforms.stages.assembly import stage

TOKEN, REPO = "hf_nobody", "org/tuned"
# of each plan besides: no other plan's may lie beside it
SMALL = {"A": "tokenizer.json", "B": "chat_template.jinja", "last": "vocab.json"}


class TinyPlan(ToRelease):
    """A release of two tensors in two files, two units of work, and small files of its own."""

    kind, doing, title, warnings, inputs = "export", "exporting", "Export", (), ("gs://nowhere/run",)
    source_bytes = 0
    lossy: Any = None
    config_edits: Any = None
    __setattr__ = object.__setattr__  # no dataclass of its own

    def __init__(self, name: str):
        self.name = name
        self.hash_ = hashlib.sha256(name.encode()).hexdigest()
        self.options: Any = ExportOptions(family=name)
        self.plan: Any = SimpleNamespace(problems=(), code="")
        self.tensors = {each: np.frombuffer(f"{name:>4}{each:>4}".encode(), np.float32) for each in ("a", "b")}
        self.files = plan_files(
            (Entry(each, it.dtype, it.shape) for each, it in self.tensors.items()), max_shard_size=8
        )
        self.small = {
            "config.json": json.dumps({"of": name}).encode(),
            SMALL[name]: name.encode(),
            "README.md": name.encode(),
        }
        self.units = ((), ())

    hash: Any = property(lambda self: self.hash_)
    source: Any = None
    sources: Any = ()  # what is read is in the plan itself

    def was_touched(self, since: Any) -> bool:
        return False

    def record(self) -> dict[str, Any]:
        return {"plan": self.hash}

    config = settled = facts = staged = expand = None  # type: ignore[assignment]

    def check(self) -> None:
        """Its source never changes."""

    @functools.cached_property
    def content(self) -> dict[str, bytes]:
        """The whole release without its record."""
        values = {tensor.path: self.tensors[tensor.name].tobytes() for tensor in self.layout.tensors.values()}
        return {**self.target.texts, **{name: header + values[name] for name, header, _ in self.target.files}}

    def run(self, staging: Any, beam: Any, ours: Any, how: Delivery, report: Any = None) -> int:
        """What the pipeline does, in its order."""
        overwrite = how.overwrite
        if not stage(self, staging, how):
            staging.publish(overwrite)
            return 0
        done = staging.ledger.done()
        for unit, tensor in enumerate(self.layout.tensors.values()):
            if unit not in done:
                box = whole(tensor.shape)
                rows = SimpleNamespace(parts=lambda values, of=(tensor, box): [(*of, values)])
                self.write(staging, SimpleNamespace(id=unit, recipes=[rows], copies=()), [self.tensors[tensor.name]])  # type: ignore[arg-type]
        self.assemble(staging, overwrite)
        return 0

    def stage(self) -> bytes:
        return gzip.compress(json.dumps({"hash": self.hash, "name": self.name}).encode(), mtime=0)


PLANS = {name: TinyPlan(name) for name in SMALL}


class ComposingBucket(MemoryBucket):
    """A bucket in memory that composes."""

    def compose(self, name: str, components: Sequence[str]) -> None:
        self._put(name, b"".join(self.read(each) for each in components))


class Stepping:
    """The hub's interface, a process stopping before each request."""

    def __init__(self, api: Any):
        self._api = api

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._api, name)
        if not callable(found):
            return found

        @functools.wraps(found)
        def stepping(*arguments: Any, **keywords: Any) -> Any:
            if (process := getattr(_here, "process", None)) is not None:
                process.pause()
            return found(*arguments, **keywords)

        return stepping


def _stepping_api() -> Stepping:
    return Stepping(storage.api())


class ReleaseWorld(World):
    """An output, commands at work on it, and what must always hold."""

    def __init__(self, kind: str):
        self._open(kind)
        self.url = {"folder": f"{self.root}/here/out", "bucket": "gs://bucket/out", "hub": f"hf://{REPO}"}[kind]
        if kind == "hub":
            self._begin_hub()
        patches: dict[Any, dict[str, Any]] = {
            lease: dict(PATIENCE=0, HEARTBEAT=1e6),
            execution: dict(run_units=lambda plan, *rest, **how: plan.run(*rest, **how)),
            carry: dict(get_ready=lambda *_: contextlib.nullcontext()),
            hub: dict(get_ready=lambda *_: contextlib.nullcontext()),
            output: dict(load=lambda staged: PLANS[json.loads(gzip.decompress(staged))["name"]]),
        }
        if kind == "bucket":
            patches[carry]["find_place"] = lambda planned, url: ReleaseBucket(
                ComposingBucket("gs://bucket"),  # type: ignore[arg-type]
                "out",
                planned.hash,
            )
        self._patch(patches)

    def _begin_hub(self) -> None:
        self.hub = self.stack.enter_context(FakeHub())
        self.hub.users.add(TOKEN)
        self.hub.writers.add(TOKEN)
        settings = self.hub.env(TOKEN) | {"XDG_CACHE_HOME": self.root}
        self.stack.enter_context(mock.patch.dict(os.environ, settings))
        self.stack.enter_context(mock.patch.object(constants, "HF_HUB_DISABLE_XET", True))
        self.stack.enter_context(mock.patch.object(storage, "BACKOFF", 0.001))
        self.stack.enter_context(mock.patch.object(hub_publishing, "api", _stepping_api))

    def start(self, plan: str, resume: bool, overwrite: bool) -> Process:
        def work() -> str:
            try:
                written = carry.carry(PLANS[plan], self.url, Delivery(resume, overwrite), (), False)
            except (Refused, Failed) as e:
                return f"{type(e).__name__}: {e}"
            return written.state

        about = {"plan": plan, "overwrite": overwrite, "root": self.root}
        return self._begin(work, f"{plan}{' --resume' * resume}{' --overwrite' * overwrite}", about)

    def age(self) -> None:
        """Whoever has a lease hasn't renewed it for long."""
        for path in Path(self.root).rglob("*-lease"):
            with contextlib.suppress(OSError):
                os.utime(path, (0, 0), follow_symlinks=False)
        for name, found in list(MemoryBucket.objects.items()):
            if name.endswith("-lease"):
                MemoryBucket.objects[name] = found[0], found[1], 0.0
        self.log.append("the lease is stale")

    def held(self) -> dict[str, bytes]:
        """What a reader finds in the place."""
        if self.kind == "folder":
            folder = Path(self.url)
            return {path.name: path.read_bytes() for path in folder.glob("*")} if folder.is_dir() else {}
        if self.kind == "bucket":
            below = f"{self.url}/"
            return {
                name.removeprefix(below): data
                for name, (data, *_) in MemoryBucket.objects.items()
                if name.startswith(below) and not name.startswith(f"{below}.")
            }
        return self._commits()[0] if REPO in self.hub.repositories else {}

    def _commits(self) -> list[dict[str, bytes]]:
        return [
            {name: bytes(blob.data) for name, blob in commit.files.items() if name != ".gitattributes"}
            for commit in self.hub.repositories[REPO].head.history()
        ]

    def check(self, actor: Process) -> None:
        """What is published is whole, of one plan, and was only replaced by one that was asked to."""
        story, held = "\n".join(self.log), self.held()
        plan = None
        if RECORD in held:
            name = {each.hash: each.name for each in PLANS.values()}[json.loads(held.pop(RECORD))["plan"]]
            wanted = dict(PLANS[name].content)
            if self.kind == "hub":  # the first card stays
                wanted["README.md"] = held.get("README.md", b"")
            held.pop("plan.json.gz", None)
            assert held == wanted, (name, sorted(held), story)
            plan = name
        elif self.kind != "bucket":
            assert not held, (sorted(held), story)
        if plan != self.published:
            assert plan is not None or (self.kind == "bucket" and actor.about["overwrite"]), story
            if plan is not None:
                assert actor.about["plan"] == plan, story
                assert self.published is None or actor.about["overwrite"], story
            self.published = plan

    def end(self) -> None:
        """All are brought to their ends; then a command goes through, and leaves nothing but its release. On the hub
        each commit is a whole release, and none was made twice.
        """
        for process in self.processes:
            self.finish(process)
        self.age()
        last = self.start("last", resume=False, overwrite=True)
        assert self.finish(last) == "done", (last.end, "\n".join(self.log))
        if self.kind == "folder":
            assert os.listdir(f"{self.root}/here") == ["out"], "\n".join(self.log)
        elif self.kind == "bucket":
            assert {name.split("/")[3] for name in MemoryBucket.objects} == {"out"}, "\n".join(self.log)
        else:
            *commits, first = self._commits()
            assert not first
            records = [json.loads(files[RECORD])["plan"] for files in commits]
            assert all(one != other for one, other in itertools.pairwise(records)), "\n".join(self.log)
            left = [path.name for path in Path(self.root, "weightbeam").glob(f"*{PLANS['last'].hash[:16]}*")]
            assert left == [], "\n".join(self.log)


def release_schedules(kind: str, seeds: Iterable[int]) -> Iterator[Counter[str]]:
    """Two to four commands in a random order, with sleeps, takeovers and kills; yields how each ended."""
    for seed in seeds:
        rng = random.Random(seed)
        world = ReleaseWorld(kind)
        try:
            for _ in range(rng.randint(4, 14)):
                alive = [process for process in world.processes if not process.over]
                what = rng.random()
                if len(alive) < 2 or (what < 0.15 and len(alive) < 3):
                    world.age() if alive and rng.random() < 0.7 else None
                    mode = rng.choice([(False, True), (False, True), (True, False), (True, True), (False, False)])
                    world.run(world.start(rng.choice("AB"), *mode), rng.randint(1, 80))
                elif what < 0.25:
                    world.kill(rng.choice(alive))
                elif what < 0.4:
                    world.finish(rng.choice(alive))
                else:
                    world.run(rng.choice(alive), rng.choice([1, 2, 3, 5, 20]))
            world.end()
            yield Counter(process.end.partition(":")[0] for process in world.processes)
        except (AssertionError, OSError) as e:
            raise AssertionError(f"{kind}, seed {seed}: {e}\n" + "\n".join(world.log)) from e
        finally:
            world.close()
