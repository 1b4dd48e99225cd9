"""From the hub and from buckets: the command as a user runs it, against servers that behave like the real ones, and
badly too.

Every command is a process of its own; it finds the servers by its environment alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import warm
from processes import run
from servers.gcs import FakeGcs
from servers.hub import FakeHub
from support import (
    BF16,
    HERE,
    QWEN3_MOE,
    assert_same_bits,
    convert,
    digests,
    make_release,
    random_tensors,
    reference,
    restore,
)

MODEL = QWEN3_MOE | dict(hidden_size=128, moe_intermediate_size=64, vocab_size=512)
SECRET = "hf_a-token-that-nobody-may-see"
OPTIONS = ("--mesh", "fsdp=2", "--unit_bytes", "200000")

RESTORE = """
import json, sys
import numpy as np, orbax.checkpoint as ocp
from support import digests, flatten
tree = ocp.PyTreeCheckpointer().restore(sys.argv[1])
print(json.dumps(digests({key: np.asarray(value) for key, value in flatten(tree["params"]["params"]).items()})))
"""

MANAGER = """
import json, sys
import orbax.checkpoint as ocp
with ocp.CheckpointManager(sys.argv[1]) as manager:
    print(json.dumps({step: sorted(manager.item_metadata(step).keys()) for step in manager.all_steps()}))
"""
CHECKPOINT = ("_CHECKPOINT_METADATA", "commit_success.txt", "conversion.json", "maxtext.yml")  # files of a step


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in three files."""
    return make_release(tmp_path_factory.mktemp("remote") / "source", MODEL, files=3)


@pytest.fixture(scope="module")
def wanted(source: Path) -> dict[str, list]:
    """The digests of what it should become."""
    return digests(reference(MODEL, random_tensors(MODEL), BF16))


@pytest.fixture
def gcs() -> Iterator[FakeGcs]:
    with FakeGcs("bucket") as server:
        yield server


@pytest.fixture
def hub(source: Path) -> Iterator[FakeHub]:
    with FakeHub() as server:
        server.add("org/model", source)
        yield server


def begin(*arguments: str, env: Mapping[str, str]) -> warm.Process:
    return warm.start(*arguments, env=os.environ | env)


def printed(*arguments: str, env: Mapping[str, str], status: int = 0) -> str:
    """Runs `weightbeam` to its end; returns all that it printed."""
    ran = warm.run(*arguments, env=os.environ | env, status=status, timeout=300)
    assert "Traceback" not in ran.stderr
    return ran.stdout + ran.stderr


def restored(url: str, env: Mapping[str, str]) -> dict[str, list]:
    """The digests of what stock Orbax restores from a bucket."""
    return ask_orbax(RESTORE, url, env)


def steps_in(url: str, env: Mapping[str, str]) -> dict[str, list[str]]:
    """The steps that stock Orbax finds in a bucket, and the items of each."""
    return ask_orbax(MANAGER, url, env)


def ask_orbax(script: str, url: str, env: Mapping[str, str]) -> dict[str, list]:
    path = f"{HERE}{os.pathsep}{HERE.parent}"
    made = run(sys.executable, "-c", script, url, env=os.environ | env | {"PYTHONPATH": path}, status=0)
    return json.loads(made.stdout.splitlines()[-1])


def test_from_the_hub_to_a_bucket(gcs: FakeGcs, hub: FakeHub, source: Path, wanted: dict[str, list]) -> None:
    """Stock Orbax restores the very bits; each byte of the files is read once, in ranges, and the hub is asked once for
    each file.
    """
    env = gcs.env() | hub.env()
    printed("convert", "--source", "hf://org/model", "--output", "gs://bucket/ckpt", *OPTIONS, env=env)
    assert restored("gs://bucket/ckpt/0/items", env) == wanted

    files = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    # config.json, the index, and config.json to be kept with the checkpoint
    assert hub.log.counts() == Counter(info=1, resolve=len(files), stat=2, read=3)
    assert hub.cdn.log.sent == sum(files.values()) + len(files)  # the last byte of each was read before any work
    assert hub.cdn.log.read_twice() == len(files)
    assert max(entry.sent for entry in hub.cdn.log) < min(files.values())  # no whole file in one request
    assert not hub.cdn.leaks

    names = sorted(gcs.objects["bucket"])
    assert all(name.startswith("ckpt/0/") for name in names)  # nothing of the staging is left
    assert {name.removeprefix("ckpt/0/") for name in names if "/items/" not in name} == {*CHECKPOINT, "release.zip"}
    assert steps_in("gs://bucket/ckpt", env) == {"0": ["items"]}
    record = json.loads(gcs.objects["bucket"]["ckpt/0/conversion.json"].data)
    assert record["source"] == f"hf://org/model@{hub.repositories['org/model'].head.sha}"
    assert {shard["name"] for shard in record["shards"] if len(shard["sha256"]) == 64} == set(files)
    units = sum("ocdbt.process_" in name and name.endswith("manifest.ocdbt") for name in names)
    assert len(gcs.log.of("write")) <= 4 * units + 16
    assert "15 exact" in printed("verify", "--source", "hf://org/model", "--checkpoint", "gs://bucket/ckpt", env=env)


@pytest.mark.slow("many commands and restores by Orbax in processes; test_reshard has the law for folders")
def test_reshard_within_a_bucket(gcs: FakeGcs, source: Path, wanted: dict[str, list]) -> None:
    """The same bits in other chunks; chunks that fit are copied; a step without its marker is refused."""
    env = gcs.env()
    printed("convert", "--source", str(source), "--output", "gs://bucket/ckpt", *OPTIONS, env=env)
    assert "copied" in printed("reshard", "gs://bucket/ckpt", "gs://bucket/same", "--dry_run", env=env)
    printed("reshard", "gs://bucket/ckpt", "gs://bucket/same", env=env)
    printed("reshard", "gs://bucket/ckpt", "gs://bucket/cut", "--mesh", "fsdp=2", "--compression", "zstd", env=env)
    assert restored("gs://bucket/same/0/items", env) == restored("gs://bucket/cut/0/items", env) == wanted
    assert steps_in("gs://bucket/cut", env) == {"0": ["items"]}
    for name in [
        name for name in gcs.objects["bucket"] if name.startswith("ckpt/") and name.endswith("commit_success.txt")
    ]:
        del gcs.objects["bucket"][name]
    assert "still being written" in printed("reshard", "gs://bucket/ckpt", "gs://bucket/late", env=env, status=2)


@pytest.mark.slow("waits for retries of every request")
def test_faults_everywhere_change_nothing(gcs: FakeGcs, hub: FakeHub, wanted: dict[str, list]) -> None:
    """Refusals, cut answers and resets, of the hub, of the host with its files, and of the bucket."""
    faults = [
        hub.fail("status", every=4, status=429, retry_after=0),
        hub.cdn.fail("cut", every=3),
        hub.cdn.fail("reset", every=7),
        hub.cdn.fail("status", every=5, status=503),
        gcs.fail("status", every=9, status=503),
        gcs.fail("status", every=13, status=429, retry_after=0),
        gcs.fail("cut", every=11, matching="^GET"),
        gcs.fail("reset", every=17),
        gcs.fail("lost", every=19, matching="^POST"),
    ]
    env = gcs.env() | hub.env(SECRET)
    hub.allow(SECRET, "org/model")
    said = printed("convert", "--source", "hf://org/model", "--output", "gs://bucket/ckpt", *OPTIONS, env=env)
    assert all(fault.hits for fault in faults), faults
    assert not hub.cdn.leaks
    assert SECRET not in said
    assert not any(SECRET.encode() in made.data for made in gcs.objects["bucket"].values())
    assert hub.cdn.log.read_twice() <= sum(entry.sent for entry in hub.cdn.log if entry.fault) + 3
    gcs.faults = []
    assert restored("gs://bucket/ckpt/0/items", gcs.env()) == wanted


def test_a_killed_conversion_in_a_bucket_goes_on(gcs: FakeGcs, source: Path, wanted: dict[str, list]) -> None:
    """Until its marker is there no reader takes it for a checkpoint; --resume makes the units that are missing, and
    one whose objects somebody wrote to meanwhile, and only those.
    """
    arguments = (
        "convert",
        "--source",
        str(source),
        "--output",
        "gs://bucket/ckpt",
        *OPTIONS,
        "--direct_num_workers",
        "1",
    )
    gcs.fail("slow", seconds=0.1, matching="POST .*process")
    process = begin(*arguments, env=gcs.env())
    deadline = time.monotonic() + 120
    while (done := sum("/units/" in name for name in list(gcs.objects["bucket"]))) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    gcs.faults = []
    assert "ckpt/0/commit_success.txt" not in gcs.objects["bucket"]
    printed("inspect", "gs://bucket/ckpt", env=gcs.env(), status=2)
    assert "--resume" in printed(*arguments, env=gcs.env(), status=2)
    entries = {name: made.generation for name, made in gcs.objects["bucket"].items() if "/units/" in name}
    assert len(entries) >= done
    changed = next(iter(entries))
    attempt = json.loads(gcs.objects["bucket"][changed].data)["attempt"]
    (data,) = (name for name in list(gcs.objects["bucket"]) if f"{attempt}/d/" in name)
    gcs.put("bucket", data, gcs.objects["bucket"][data].data[::-1])
    del entries[changed]
    gcs.log.clear()
    assert "1 of the staged units aren't as they were written" in printed(*arguments, "--resume", env=gcs.env())
    assert not [entry for entry in gcs.log.of("write") if entry.name.removeprefix("bucket/") in entries]
    assert restored("gs://bucket/ckpt/0/items", gcs.env()) == wanted
    assert all(name.startswith("ckpt/0/") for name in gcs.objects["bucket"])


@pytest.mark.slow("many commands; the law is that of staging, tests/formats/test_ownership.py")
def test_two_conversions_into_one_place(gcs: FakeGcs, source: Path) -> None:
    """One is refused, by the lease, and says who is at work; afterwards the place is taken."""
    arguments = ("convert", "--source", str(source), "--output", "gs://bucket/ckpt", *OPTIONS)
    gcs.fail("slow", seconds=0.2, matching="^POST")
    processes = [begin(*arguments, env=gcs.env()) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 2], said
    assert any("is at work there" in text or "exists" in text or "stopped conversion" in text for text in said)
    gcs.faults = []
    assert "--overwrite replaces it" in printed(*arguments, env=gcs.env(), status=2)
    first = gcs.objects["bucket"]["ckpt/0/commit_success.txt"].generation
    printed(*arguments, "--overwrite", env=gcs.env())
    assert gcs.objects["bucket"]["ckpt/0/commit_success.txt"].generation > first


def test_from_a_bucket_to_a_folder_and_back(gcs: FakeGcs, source: Path, tmp_path: Path) -> None:
    """The same bits and digests as from a folder; a source that changes between plan and end is refused."""
    for path in source.iterdir():
        gcs.put("bucket", f"models/it/{path.name}", path.read_bytes())
    printed("convert", "--source", "gs://bucket/models/it", "--output", str(tmp_path / "ckpt"), *OPTIONS, env=gcs.env())
    step = convert(source, tmp_path / "local", *OPTIONS)
    assert_same_bits(restore(tmp_path / "ckpt" / "0"), restore(step))
    ours, theirs = (json.loads((place / "conversion.json").read_bytes()) for place in (tmp_path / "ckpt" / "0", step))
    assert ours["digests"] == theirs["digests"]
    assert all(int(shard["version"]) > 0 and shard["crc32c"] for shard in ours["shards"])
    assert "15 exact" in printed(
        "verify", "--source", "gs://bucket/models/it", "--checkpoint", str(tmp_path / "ckpt"), env=gcs.env()
    )

    gcs.fail("slow", seconds=0.05, matching="GET .*safetensors")
    process = begin(
        "convert", "--source", "gs://bucket/models/it", "--output", str(tmp_path / "other"), *OPTIONS, env=gcs.env()
    )
    while not list((tmp_path / "other").glob("0.*.orbax-checkpoint-tmp/plan.json.gz")):
        assert process.poll() is None
        time.sleep(0.01)
    name = "models/it/model-00001-of-00003.safetensors"
    gcs.put("bucket", name, gcs.objects["bucket"][name].data)
    assert "changed while it was converted" in process.communicate(timeout=300)[1]
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--source", "hf://org/nothing"), "no such repository"),
        (("--source", "hf://org/model@nothing"), "no such revision"),
        (("--source", "hf://org/gated"), "accept its terms on"),
        (("--source", "hf://not a name"), "should be hf://organisation/model"),
        (("--source", "gs://nothing/x"), "no such bucket"),
        (("--source", "gs://bucket/nothing"), "no objects there"),
        (("--source", "s3://bucket/x"), "s3:// isn't supported"),
        (("--source", "hf://org/model", "--output", "gs://nothing/x"), "no such bucket"),
        (("--source", "hf://org/model", "--output", "gs://bucket/forbidden/x"), "roles/storage.objectUser"),
        (("--source", "hf://org/model", "--output", "hf://org/other"), "can't be written to the hub"),
    ],
    ids=lambda value: " ".join(value[1::2]) if isinstance(value, tuple) else "",
)
def test_what_cant_be_reached_is_said_before_any_work(
    arguments: tuple[str, ...], message: str, gcs: FakeGcs, hub: FakeHub, source: Path
) -> None:
    hub.add("org/gated", source, gated="manual")
    gcs.forbidden = ("bucket/forbidden",)
    output = () if "--output" in arguments else ("--output", "gs://bucket/ckpt")
    assert message in printed("convert", *arguments, *output, env=gcs.env() | hub.env(), status=2)
    assert not gcs.objects["bucket"]


@pytest.mark.parametrize(
    "place",
    [
        "bucket",
        pytest.param("hub", marks=pytest.mark.slow("many commands a place; the bucket always runs")),
        pytest.param("folder", marks=pytest.mark.slow("many commands a place; the bucket always runs")),
    ],
)
def test_virtual_in_a_bucket(place: str, gcs: FakeGcs, hub: FakeHub, source: Path, wanted: dict[str, list]) -> None:
    """The source's files are objects of the checkpoint, copied by the store itself where they are in it already;
    materialised it is an ordinary one.
    """
    for path in source.iterdir():
        gcs.put("bucket", f"models/it/{path.name}", path.read_bytes())
    env, where = (
        gcs.env() | hub.env(),
        dict(hub="hf://org/model", bucket="gs://bucket/models/it", folder=str(source))[place],
    )
    gcs.log.clear()
    said = printed("convert", "--virtual", "--source", where, "--output", "gs://bucket/virtual", env=env)
    assert "the source's own files" in said
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert gcs.log.received < 200_000 if place == "bucket" else size < gcs.log.received < size + 200_000
    assert restored("gs://bucket/virtual/0/items", env) == wanted
    assert "as when it was made, by size, times and some bytes" in printed(
        "verify", "--checkpoint", "gs://bucket/virtual", env=env
    )

    printed("materialize", "gs://bucket/virtual", "--output", "gs://bucket/made", "--mesh", "fsdp=4", env=env)
    printed("convert", "--source", where, "--output", "gs://bucket/converted", "--mesh", "fsdp=4", env=env)
    made, converted = (
        json.loads(gcs.objects["bucket"][f"{name}/0/conversion.json"].data) for name in ("made", "converted")
    )
    assert made["digests"] == converted["digests"]
    assert made["source"] == converted["source"], "the release, wherever it lies, and not the virtual checkpoint"

    assert "holds the source" in printed(
        "materialize", "gs://bucket/virtual", "--output", "gs://bucket/virtual", "--overwrite", env=env, status=2
    )

    name = "virtual/0/items/source/model-00002-of-00003.safetensors"
    held = gcs.objects["bucket"][name].data
    for changed, message in (
        (held[:-1] + b"?", "holds other bytes: its crc32c isn't"),
        (held[:-9], "and had"),
        (None, "is gone"),
    ):
        del gcs.objects["bucket"][name]
        if changed is not None:
            gcs.put("bucket", name, changed)
        assert message in printed("verify", "--checkpoint", "gs://bucket/virtual", env=env, status=1)

    for name in [name for name in gcs.objects["bucket"] if name.startswith("virtual/")]:
        del gcs.objects["bucket"][name]
    if place == "folder":  # of which a bucket knows the name only
        printed("verify", where, "gs://bucket/made", env=env)
    else:
        assert f"compared with {made['source']}, " in printed("verify", "gs://bucket/made", env=env)
