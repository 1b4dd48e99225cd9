"""The stores: one contract for folders and buckets, and what the network does to buckets and to the hub."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import email.message
import hashlib
import itertools
import json
import logging
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from google.api_core import exceptions
from google.cloud import storage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import run
from racing import race
from servers.clients import asking, at_hub
from servers.dataflow import FakeDataflow
from servers.gcs import FakeGcs
from servers.hub import FakeHub
from servers.server import Call, Reply, json_reply
from support import make_release

from weightbeam.formats.orbax import find_items
from weightbeam.formats.safetensors import open_hf, read_header
from weightbeam.formats.staging import lease
from weightbeam.formats.staging.links import COPY, put_source
from weightbeam.formats.storage import File, LocalFolder, StorageError, Store, local, open_store, stretches
from weightbeam.formats.storage import bucket as buckets
from weightbeam.formats.storage import hub as hubs
from weightbeam.formats.storage import store as stores
from weightbeam.formats.storage.store import Request, make_requests
from weightbeam.testing import STORE_CHECKS, check_readable_store
from weightbeam.testing.store import HELD, fetch

ROOT = Path(__file__).parents[2]
DATA = random.Random(0).randbytes(200_000)
REPO, SHARD = "org/model", "weights/model.safetensors"
TOKEN = "hf_thisisthetoken"
FILES = {SHARD: DATA, "config.json": b"{}", "weights/more/tokenizer.json": b'{"a": 1}'}


def outside(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own, without this one's credentials and servers."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GOOGLE_", "GCE_", "STORAGE_", "TENSORSTORE_", "HF_", "CLOUDSDK_"))
    }
    command = [sys.executable, "-c", code, *arguments]
    return run(*command, env=kept | env, cwd=ROOT, stderr=subprocess.STDOUT, timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeGcs]:
    with FakeGcs("bucket", "other") as server, asking(server) as patch:
        patch.setattr(buckets, "RETRY", buckets.RETRY.with_delay(0.01, 0.02).with_timeout(2.0))
        patch.setitem(
            buckets.CONTEXT, "gcs_request_retries", {"max_retries": 6, "initial_delay": "10ms", "max_delay": "10ms"}
        )
        yield server


@pytest.fixture
def gcs(server: FakeGcs) -> FakeGcs:
    server.faults, server.forbidden, server.read_only, server.clock = [], [], [], time.time
    server.log.clear()
    return server


@pytest.fixture
def bucket(gcs: FakeGcs) -> buckets.Bucket:
    return buckets.Bucket(f"gs://bucket/{uuid.uuid4().hex}")


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made = open_store(tmp_path / "folder") if request.param == "folder" else request.getfixturevalue("bucket")
    made.make()
    return made


# --- what all of them do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_what_a_store_promises(store: Store, check: Callable[[Store], None]) -> None:
    check(store)


def test_what_another_wrote_since_stays(store: Store) -> None:
    """One who wants to write over what he has read comes too late."""
    store.write("a", b"1")
    before = store.stat("a")
    store.write("a", b"22")
    for stale in (before, None):
        assert not store.write_over("a", b"333", stale)
        assert store.read("a") == b"22"
    assert store.write_over("a", b"333", store.stat("a"))
    assert store.write_over("b", b"1", None)
    assert not store.write_over("c", b"1", before)
    assert {file.name: store.read(file.name) for file in store.list()} == {"a": b"333", "b": b"1"}


@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_file_that_others_write_while_it_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """After so many swaps of a late writer another one writes: his file is the newest, and stays."""
    store, swap, swaps = LocalFolder(str(tmp_path)), local.exchange, []

    def exchange(one: Path, other: Path) -> None:
        swap(one, other)
        swaps.append(other)
        if len(swaps) == late:
            store.write("a", b"newest")

    store.write("a", b"1")
    before = store.stat("a")
    store.write("a", b"2")
    monkeypatch.setattr(local, "exchange", exchange)
    assert not store.write_over("a", b"3", before)
    assert store.read("a") == (b"newest" if late <= len(swaps) else b"2")
    assert [file.name for file in store.list()] == ["a"]


def test_a_stopped_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a file is made durable."""

    def stop(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        LocalFolder(str(tmp_path)).write("a", b"1")
    assert not [*tmp_path.iterdir()]


def test_of_racing_processes_one_creates(tmp_path: Path) -> None:
    code = "import sys; from formats.storage import open_store as o; input(); print([o(sys.argv[1]).create(str(i), b'x') for i in range(20)])"
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    racers: list[Any] = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) for _ in range(8)]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    told = [json.loads(racer.communicate()[0].lower()) for racer in racers]
    assert [sum(column) for column in zip(*told, strict=True)] == [1] * 20


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/x", "isn't supported"),
        ("gs://", "names no bucket"),
        ("gs:///x", "names no bucket"),
        ("gs://in/x", "in can't be a bucket's name"),  # TensorStore alone refuses it, in the workers
        ("gs://Bucket/x", "Bucket can't be a bucket's name"),
        ("gs://bucket//x", "has an empty part"),
        ("gs://bucket/x/../y", "or a dot for one"),
    ],
)
def test_what_is_no_store(url: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        open_store(url)


# --- requests ---------------------------------------------------------------------------------------------------------


RANGES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 700)), max_size=40)


@given(RANGES, st.integers(1, 3000))
def test_requests(ranges: list[tuple[int, int]], most: int) -> None:
    """Every byte, in requests that aren't too long; at most 1/64 more than was asked for, and none twice but where
    ranges overlap.
    """
    data = DATA[:6000]
    buffers = [(start, memoryview(bytearray(size))) for start, size in ranges]
    requests = list(make_requests(buffers, most))
    for request in requests:
        assert 0 < request.stop - request.start <= most
        for at in range(request.start, request.stop, 100):  # as it arrives
            request.scatter(at, memoryview(data)[at : min(at + 100, request.stop)])
    assert [bytes(buffer) for _, buffer in buffers] == [data[start : start + size] for start, size in ranges]
    assert 64 * (sum(request.stop - request.start for request in requests) - sum(size for _, size in ranges)) <= sum(
        size for _, size in ranges
    )
    if all(a + n <= b for (a, n), (b, _) in itertools.pairwise(sorted(ranges))):
        assert all(one.stop <= other.start for one, other in itertools.pairwise(requests))


def test_gaps_dont_add_up() -> None:
    """Each of them is short, and together they would be half of it."""
    buffers, at = [(0, memoryview(bytearray(6400)))], 6400
    for _ in range(100):
        at += at // 70
        buffers.append((at, memoryview(bytearray(1))))
        at += 1
    requests = list(make_requests(buffers, 1 << 20))
    assert sum(request.stop - request.start for request in requests) <= 6500 * 65 / 64


@pytest.fixture(params=["folder", "bucket", "hub"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store that has the shard."""
    if request.param == "hub":
        return request.getfixturevalue("model")
    made = open_store(tmp_path / "folder") if request.param == "folder" else request.getfixturevalue("bucket")
    made.make()
    made.write(SHARD, DATA)
    return made


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=st.lists(st.tuples(st.integers(0, len(DATA) - 5000), st.integers(0, 5000)), max_size=15))
def test_any_ranges(full: Store, ranges: list[tuple[int, int]]) -> None:
    wanted = [(start, start + size) for start, size in ranges]
    assert fetch(full, SHARD, *wanted) == [DATA[start:stop] for start, stop in wanted]


def test_a_repository_promises_what_is_read(hub: FakeHub, tmp_path: Path) -> None:
    """As a store of a package's own that can only be read."""
    for name, data in HELD.items():
        (tmp_path / "held" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "held" / name).write_bytes(data)
    hub.add("org/held")
    hub.commit("org/held", tmp_path / "held", remove=[".gitattributes"])
    check_readable_store(open_store("hf://org/held"))


def test_what_is_counted(bucket: buckets.Bucket, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server counts it: each byte once, in as many requests as it takes."""
    monkeypatch.setattr(buckets, "MAX_REQUEST_BYTES", 50_000)
    bucket.write("x", DATA)
    gcs.log.clear()
    buffers = [(start, memoryview(bytearray(5000))) for start in range(0, len(DATA), 5000)]
    random.Random(0).shuffle(buffers)
    assert bucket.read_into("x", buffers) == len(DATA) == gcs.log.sent
    assert gcs.log.counts() == {"read": 4}
    assert gcs.log.read_twice() == 0


def test_threads_share_the_requests(bucket: buckets.Bucket, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are under way as there may be, however many threads read; those of a read that failed are there for
    others again.
    """
    monkeypatch.setattr(buckets, "MAX_REQUEST_BYTES", 10_000)
    bucket.write("x", DATA)
    with pytest.raises(StorageError, match="ends before byte"):
        bucket.read_into("x", [(0, memoryview(bytearray(len(DATA) + 1)))])
    read = [bytearray(len(DATA)) for _ in range(5)]
    with ThreadPoolExecutor(len(read)) as threads:
        list(threads.map(lambda buffer: bucket.read_into("x", [(0, memoryview(buffer))]), read))
    assert all(bytes(buffer) == DATA for buffer in read)
    assert all(buckets._REQUESTS.acquire(blocking=False) for _ in range(buckets.MAX_REQUESTS))
    buckets._REQUESTS.release(buckets.MAX_REQUESTS)


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_more_names_than_a_page_holds(bucket: buckets.Bucket, gcs: FakeGcs) -> None:
    names = [f"{number:04}" for number in range(2500)]
    for name in names:
        gcs.put("bucket", f"{bucket.folder}/x/{name}/y", b"")
    assert [file.name for file in bucket.list()] == [f"x/{name}/y" for name in names]
    assert gcs.log.counts() == {"list": 3}
    assert (bucket / "x").folders() == names


def test_a_lost_answer(bucket: buckets.Bucket, gcs: FakeGcs) -> None:
    """What was done is told as done, though the repetition is refused; and another's work isn't taken for ours, though
    it is the same.
    """
    gcs.fail("lost", times=1, matching="^POST .*upload")
    assert bucket.create("a", b"1")
    assert not bucket.create("a", b"1")
    found = bucket.stat("a")
    assert found is not None
    fault = gcs.fail("lost", times=1, matching="^POST .*upload")
    version = bucket.replace("a", b"2", found.version)
    assert fault.hits == 1
    again = bucket.stat("a")
    assert again is not None
    assert version == again.version
    assert bucket.replace("a", b"2", found.version) is None
    assert bucket.replace("none", b"2", found.version) is None
    gcs.fail("lost", times=1, matching="^DELETE")
    bucket.delete("a")
    assert bucket.list() == []


def test_another_generation_isnt_deleted(bucket: buckets.Bucket) -> None:
    bucket.write("x", DATA)
    found = bucket.stat("x")
    assert found is not None
    bucket.write("x", DATA[::-1])
    bucket.delete("x", found.version)
    assert bucket.exists("x")


@pytest.mark.parametrize(
    "fault",
    [dict(kind="status", status=429), dict(kind="status", status=503), dict(kind="reset"), dict(kind="cut")],
    ids=str,
)
def test_a_bucket_that_fails_now_and_then(bucket: buckets.Bucket, gcs: FakeGcs, fault: dict[str, Any]) -> None:
    """Every other answer of what either client asks for."""
    made = gcs.fail(**fault, every=2)
    bucket.write("x", DATA)
    assert bucket.create("y", b"1")
    assert [file.name for file in bucket.list()] == ["x", "y"]
    assert bucket.exists("x")
    assert bucket.read("x", 10, 150_000) == DATA[10:150_000]
    assert fetch(bucket, "x", (0, 90_000), (100_000, 200_000)) == [DATA[:90_000], DATA[100_000:]]
    bucket.delete_folder()
    assert bucket.list() == []
    assert made.hits > 3


def test_a_bucket_that_always_fails(bucket: buckets.Bucket, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "RETRY", buckets.RETRY.with_timeout(0.3))
    bucket.write("x", DATA)
    gcs.fail("status", status=503)
    began = time.monotonic()
    for ask in (
        bucket.list,
        lambda: bucket.stat("x"),
        lambda: bucket.read("x"),
        lambda: bucket.write("y", b""),
        lambda: fetch(bucket, "x", (0, 10)),
    ):
        with pytest.raises(StorageError, match=f"{bucket.url}.*503|{bucket.url}.*a fault that was asked for"):
            ask()
    assert time.monotonic() - began < 20


def test_a_bucket_that_goes_on_failing_is_named(
    bucket: buckets.Bucket, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for long without a word."""
    monkeypatch.setattr(stores, "SILENCE", 0.1)
    monkeypatch.setattr(buckets, "RETRY", buckets.RETRY.with_timeout(0.5))
    gcs.fail("status", status=503)
    with pytest.raises(StorageError):
        bucket.list()
    said = {record.getMessage() for record in caplog.records if record.name == "weightbeam.storage"}
    assert said == {"waiting for Google's storage, which is asked again: 503"}


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b""),
        json_reply(200, []),
        json_reply(200, {"items": [5]}),
        json_reply(200, {"items": [{"name": 5}]}),
        json_reply(412, {"error": {"code": 412, "message": "no\x1b[31m"}}),
    ],
    ids=["nothing", "list", "number", "name", "412"],
)
def test_an_answer_that_is_none_of_a_buckets(
    bucket: buckets.Bucket, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch, reply: Reply
) -> None:
    """A proxy's page, and what a bucket says where nobody set a condition."""
    monkeypatch.setattr(gcs, "answer", lambda _: reply)
    asked = (
        bucket.list,
        bucket.folders,
        bucket.check_readable,
        lambda: bucket.write("x", b"5"),
        lambda: bucket.now(),
        lambda: bucket.compose("x", ["y"]),
    )
    for ask in asked:
        with contextlib.suppress(StorageError):
            ask()
    for ask in asked[:3]:
        with pytest.raises(StorageError, match=bucket.url):
            ask()


def test_more_than_was_asked_for(bucket: buckets.Bucket, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole object where some bytes of it were asked for is none of what is read."""
    bucket.write("x", b"0123456789")
    honest = gcs.answer

    def whole(call: Call) -> Reply:
        del call.headers["Range"]
        return honest(call)

    monkeypatch.setattr(gcs, "answer", whole)
    assert bucket.read("x") == b"0123456789"
    with pytest.raises(StorageError, match="10 bytes came where bytes 0 to 8 were asked for"):
        bucket.read("x", 0, 8)


@pytest.mark.parametrize("part", [8, 100], ids=["the length", "the header"])
def test_less_than_was_asked_for(
    bucket: buckets.Bucket, gcs: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """A short answer, such as a proxy's page, isn't taken for a short file."""
    make_release(tmp_path / "hf")
    shard = next((tmp_path / "hf").glob("*.safetensors"))
    bucket.write("x.safetensors", shard.read_bytes())
    honest = gcs.answer

    def short(call: Call) -> Reply:
        reply = honest(call)
        return dataclasses.replace(reply, body=reply.body[:6]) if len(reply.body) >= part else reply

    monkeypatch.setattr(gcs, "answer", lambda call: short(call) if "Range" in call.headers else honest(call))
    with pytest.raises(StorageError, match=rf"x.safetensors: 6 bytes came where .* of {shard.stat().st_size:,} were"):
        read_header(bucket.path("x.safetensors"))


@pytest.fixture
def new_client() -> Iterator[None]:
    """A client of the test's own."""
    buckets._client.cache_clear()
    yield
    buckets._client.cache_clear()


def test_a_bucket_that_cant_be_reached(new_client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a network that isn't there; after a first answer it is a hiccup."""
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url := f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://me:secret@127.0.0.1:1")
        parted = f"{url}, TENSORSTORE_GCS_HTTP_URL is http://127.0.0.1:1: set both to one address"
        monkeypatch.setattr(buckets, "UNREACHED_SECONDS", 0.3)
        for is_known, timeout, shortest, longest in ((False, 60.0, 0.2, 30.0), (True, 1.0, 0.8, 30.0)):
            monkeypatch.setattr(buckets, "RETRY", buckets.RETRY.with_delay(0.01, 0.02).with_timeout(timeout))
            monkeypatch.setattr(buckets, "_REACH", reach := buckets._Reach())
            reach.is_known = is_known
            began = time.monotonic()
            with pytest.raises(
                StorageError, match=rf"gs://bucket/x: {url} can't be reached: .*refused; is this.* is {parted}"
            ):
                buckets.Bucket("gs://bucket/x").check_readable()
            assert shortest < time.monotonic() - began < longest
            reach.last -= 4 * buckets.UNREACHED_SECONDS  # another command of this process, later
            assert not reach.is_given_up()


def test_an_answer_is_known(new_client: None, bucket: buckets.Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_REACH", reach := buckets._Reach())
    assert bucket.list() == []
    assert reach.is_known


def test_what_is_forbidden(bucket: buckets.Bucket, gcs: FakeGcs) -> None:
    """Said once, with what to do."""
    bucket.write("x", DATA)
    gcs.read_only = ["bucket"]
    gcs.log.clear()
    assert bucket.read("x") == DATA
    for ask in (
        bucket.check_writable,
        lambda: bucket.create("y", b""),
        lambda: bucket.delete("x"),
        bucket.delete_folder,
    ):
        with pytest.raises(StorageError, match=f"{bucket.url}.*roles/storage.objectUser"):
            ask()
    gcs.forbidden = ["bucket"]
    gcs.log.clear()
    asks = (
        bucket.check_readable,
        bucket.list,
        lambda: bucket.stat("x"),
        lambda: bucket.read("x"),
        lambda: fetch(bucket, "x", (0, 10)),
    )
    for ask in asks:
        with pytest.raises(StorageError, match=f"{bucket.url}.*roles/storage.objectUser") as error:
            ask()
        assert "[http_" not in str(error.value)
    assert len(gcs.log) == len(asks)


@pytest.mark.parametrize(
    "why",
    [
        "subject to bucket's retention policy and cannot be deleted",
        "under active Event-Based hold and cannot be deleted",
    ],
)
def test_what_is_held(bucket: buckets.Bucket, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """A retention policy refuses whoever asks: no role is advised (cloud.google.com/storage/docs/bucket-lock)."""

    def refuse(*_: Any, **__: Any) -> None:
        raise exceptions.Forbidden(f"DELETE x: Object 'bucket/x' is {why} until 2027-01-01")

    monkeypatch.setattr(storage.Blob, "delete", refuse)
    with pytest.raises(StorageError, match=r"cannot be deleted .*choose a bucket, or a folder") as error:
        bucket.check_writable()
    assert "roles/" not in str(error.value)


def test_no_such_bucket(gcs: FakeGcs) -> None:
    none = open_store("gs://none/x")
    for ask in (none.check_readable, none.check_writable, none.list, lambda: none.write("x", b"")):
        with pytest.raises(StorageError, match=r"gs://none.*no such bucket"):
            ask()
    assert none.stat("x") is None
    with pytest.raises(StorageError, match="gs://none/x/y: is gone"):
        fetch(none, "y", (0, 1))
    with pytest.raises(StorageError, match="gs://other/x: no objects there"):
        open_store("gs://other/x").check_readable()


def test_many_threads_keep_their_connections(bucket: buckets.Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """The client's pool is large enough; it warns of each connection that it throws away."""
    names = [str(number) for number in range(100)]
    for name in names:
        bucket.write(name, b"")
    race(lambda _: list(bucket.read_many(names)))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_stalled_bucket_is_timed_out(gcs: FakeGcs, bucket: buckets.Bucket) -> None:
    """TensorStore's reads, in a process that it has to itself: it reads its environment once."""
    bucket.write("x", DATA[:2000])
    gcs.fail("stall", times=1, seconds=60, matching="^GET")
    code = (
        "import sys; from formats.storage import open_store; b = bytearray(2000); "
        "open_store(sys.argv[1]).read_into('x', [(0, memoryview(b))]); print(b.hex())"
    )
    began = time.monotonic()
    told = outside(code, bucket.url, **gcs.env(), TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS="1")
    assert time.monotonic() - began < 30
    assert told.stdout.splitlines()[-1] == DATA[:2000].hex()


ASK = """
import sys
from weightbeam.formats.storage import StorageError, open_store
store = open_store("gs://bucket/x")
for ask in (store.list, lambda: store.read_into("x", [(0, memoryview(bytearray(10)))]), store.kvstore):
    try:
        ask()
    except StorageError as e:
        print(e)
"""


def test_no_credentials(tmp_path: Path) -> None:
    """Said soon, though the host that would know on Google's machines keeps silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        metadata = dict(
            GCE_METADATA_IP=where, GCE_METADATA_HOST=where, GCE_METADATA_TIMEOUT="1", GCE_METADATA_DETECT_RETRIES="1"
        )
        told = outside(ASK, HOME=str(tmp_path), CLOUDSDK_CONFIG=str(tmp_path), **metadata)
    assert time.monotonic() - began < 20
    assert [line.partition(":")[2][:31] for line in told.stdout.splitlines()] == ["// needs Google credentials: Yo"] * 3


def test_credentials_that_are_refused(tmp_path: Path) -> None:
    with FakeDataflow() as google:
        google.fail("status", status=400)
        told = outside(
            "from formats.storage import open_store; open_store('gs://bucket/x').list()", **google.env(tmp_path)
        )
    assert told.stdout.splitlines()[-1].startswith("weightbeam.formats.storage.store.UnreachedError: gs://bucket/x: ")


# --- a lease in a bucket ----------------------------------------------------------------------------------------------


OTHER = json.dumps({"owner": "o", "host": "elsewhere", "boot": "b", "pid": 1, "process": "1"}).encode()


def test_one_holds_a_lease(bucket: buckets.Bucket) -> None:
    with lease.hold(bucket, "lease"):
        assert [file.name for file in bucket.list()] == ["lease"]
        with pytest.raises(lease.HeldError, match=f"process {os.getpid()} on "), lease.hold(bucket, "lease"):
            pass
    assert bucket.list() == []


def test_a_lease_is_renewed(bucket: buckets.Bucket, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though answers get lost; else its owner would take it for another's."""
    monkeypatch.setattr(lease, "HEARTBEAT", 0.02)
    with lease.hold(bucket, "lease"):
        gcs.fail("lost", times=3, every=2, matching="^POST .*upload")
        versions = set()
        deadline = time.monotonic() + 10
        while len(versions) < 8 and time.monotonic() < deadline:
            found = bucket.stat("lease")
            assert found is not None
            versions.add(found.version)
            time.sleep(0.01)
        assert len(versions) >= 8
        assert gcs.faults[0].hits == 3
    assert bucket.list() == []


def test_of_many_racers_for_a_stale_lease_one_wins(bucket: buckets.Bucket, gcs: FakeGcs) -> None:
    for number in range(3):
        name, over = str(number), threading.Barrier(8)
        gcs.clock = lambda: time.time() - lease.STALE - 5
        bucket.write(name, OTHER)
        gcs.clock = time.time

        def take(name: str = name, over: threading.Barrier = over) -> bool:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(lease.hold(bucket, name))
                    won = True
                except lease.HeldError:
                    won = False
                over.wait()
                return won

        assert sorted(race(lambda _: take())) == [False] * 7 + [True]
    assert bucket.list() == []


def test_a_lease_that_was_lost_is_left_alone(bucket: buckets.Bucket) -> None:
    with lease.hold(bucket, "lease"):
        bucket.write("lease", OTHER)
    assert bucket.read("lease") == OTHER


def test_a_lease_is_judged_by_the_buckets_clock(
    bucket: buckets.Bucket, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this machine's says."""
    gcs.clock = lambda: time.time() - 2 * lease.STALE
    bucket.write("lease", OTHER)
    with pytest.raises(lease.HeldError, match="elsewhere"), lease.hold(bucket, "lease"):
        pass
    now = time.time()
    monkeypatch.setattr(lease.time, "time", lambda: now - 2 * lease.STALE)
    gcs.clock = lambda: now - lease.STALE + 5
    with lease.hold(bucket, "lease"):
        pass
    assert bucket.list() == []


def test_a_lease_that_cant_be_released(bucket: buckets.Bucket, gcs: FakeGcs) -> None:
    """What was done under it is done."""
    with lease.hold(bucket, "lease"):
        gcs.read_only = ["bucket"]
    assert bucket.exists("lease")


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["hub", "folder", "bucket"])
def model_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store that holds a model."""
    folder = make_release(tmp_path / "release")
    if request.param == "folder":
        return open_store(folder)
    if request.param == "hub":
        request.getfixturevalue("hub").add("org/release", folder)
        return open_store("hf://org/release")
    made = request.getfixturevalue("bucket") / "release"
    for path in folder.iterdir():
        made.write(path.name, path.read_bytes())
    return made


def test_a_copy_replaces_nothing(model_store: Store, bucket: buckets.Bucket, gcs: FakeGcs) -> None:
    """Where it may not: what another has put there stays, and a copy whose answer was lost is there."""
    file = next(file for file in model_store.list() if file.name.endswith(".safetensors"))
    wanted, target = model_store.read(file.name), bucket / "copy"
    fault = gcs.fail("lost", times=1, matching="^POST .*(rewriteTo|upload)|^PUT")
    for _ in range(2):
        target.copy_new(model_store, file)
        assert target.read(file.name) == wanted
    assert fault.hits == 1
    target.write(file.name, b"mine")
    with pytest.raises(StorageError, match="somebody has put it there"):
        target.copy_new(model_store, file)
    assert target.read(file.name) == b"mine"


def test_a_finished_copy_is_kept(model_store: Store, bucket: buckets.Bucket, gcs: FakeGcs, tmp_path: Path) -> None:
    """In a bucket or a folder; another one is replaced."""
    checkpoint = open_hf(model_store)
    shard, config = checkpoint.shards[0], len(model_store.read("config.json"))
    wanted = model_store.read(shard.name)
    for target in (bucket / "copy", open_store(tmp_path / "copy")):
        put_source(target, checkpoint, COPY)
        first = target.stat(shard.name)
        gcs.log.clear()
        put_source(target, checkpoint, COPY)
        assert target.stat(shard.name) == first
        assert gcs.log.received < config + 5000
        for other in (wanted[::-1], wanted[:-1]):
            target.write(shard.name, other)
            put_source(target, checkpoint, COPY)
            assert target.read(shard.name) == wanted


def test_what_cant_be_copied(bucket: buckets.Bucket, gcs: FakeGcs, tmp_path: Path) -> None:
    """A source that is gone, a bucket that isn't there, or may not be written to."""
    folder = open_store(tmp_path)
    bucket.write("x", DATA)
    folder.write("x", DATA)
    for source in (bucket, folder):
        with pytest.raises(StorageError, match=f"{source.url}/none: is gone"):
            (bucket / "copy").copy(source, File("none", 5, "1"))
        with pytest.raises(StorageError, match="there is no bucket gs://none"):
            buckets.Bucket("gs://none/x").copy(source, File("x", len(DATA), "1"))
    gcs.read_only = ["bucket"]
    for source in (bucket, folder):
        with pytest.raises(StorageError, match=f"{bucket.url}/copy/x: 403.*roles/storage.objectUser"):
            (bucket / "copy").copy(source, File("x", len(DATA), "1"))
    assert [file.name for file in bucket.list()] == ["x"]


def test_what_comes_is_checked(bucket: buckets.Bucket) -> None:
    bucket.write("x", DATA)
    found = bucket.stat("x")
    assert found is not None
    assert b"".join(stretches(bucket, "x", len(DATA), hashlib.sha256(DATA).hexdigest(), found.crc32c)) == DATA
    bucket.write("x", DATA[::-1])
    with pytest.raises(StorageError, match="its crc32c isn't"):
        list(stretches(bucket, "x", len(DATA), crc32c=found.crc32c))
    with pytest.raises(StorageError, match="its sha256 isn't"):
        list(stretches(bucket, "x", len(DATA), sha256=hashlib.sha256(DATA).hexdigest()))


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """With short waits."""
    for name, data in FILES.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with at_hub() as server:
        monkeypatch.setattr(hubs, "BACKOFF", 0.002)
        monkeypatch.setattr(hubs, "STALL_SECONDS", 0.4)
        server.add(REPO, tmp_path / "model")
        yield server


@pytest.fixture
def model(hub: FakeHub) -> hubs.Repository:
    return hubs.open_repository(f"hf://{REPO}")


def commit_another(hub: FakeHub, tmp_path: Path, **how: Any) -> str:
    """Commits another shard."""
    path = tmp_path / "changed" / SHARD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(DATA[::-1])
    return hub.commit(REPO, tmp_path / "changed", **how)


def test_what_a_repository_holds(model: hubs.Repository, hub: FakeHub) -> None:
    files = {file.name: file for file in model.list()}
    assert {name: file.size for name, file in files.items() if name in FILES} == {
        name: len(data) for name, data in FILES.items()
    }
    assert files[SHARD].sha256 == hashlib.sha256(DATA).hexdigest()
    assert files["config.json"].sha256 is None
    assert files[SHARD].version == files[SHARD].sha256
    assert [file.name for file in model.list("weights/", recursive=False)] == [SHARD]
    assert [file.name for file in model.list("weights/")] == [SHARD, "weights/more/tokenizer.json"]
    assert hub.log.counts() == {"info": 1}
    assert {name: model.read(name) for name in FILES} == FILES
    assert model.read(SHARD, 10, 20) == DATA[10:20]
    assert model.read(SHARD, 20, 10) == b""
    with pytest.raises(FileNotFoundError):
        model.read("none")
    with pytest.raises(StorageError, match="none: no such file"):
        fetch(model, "none", (0, 1))
    with pytest.raises(StorageError, match="can't be written to"):
        model.write("x", b"")
    assert pickle.loads(pickle.dumps(model)).read("config.json") == b"{}"


def test_a_file_that_a_commit_leaves_alone_keeps_its_version(
    model: hubs.Repository, hub: FakeHub, tmp_path: Path
) -> None:
    """So a new model card doesn't make another plan."""
    commit_another(hub, tmp_path)
    again = open_store(f"hf://{REPO}")
    assert again.url != model.url
    kept = ["config.json", "weights/more/tokenizer.json"]
    assert [again.stat(name) for name in kept] == [model.stat(name) for name in kept]
    assert len({file.version for store in (model, again) for name in FILES if (file := store.stat(name))}) == 4


def test_a_link_above_that_leads_elsewhere_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a folder really lies is asked once, so that a file in it isn't taken for a link out of it."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "LICENSE").touch()
    link, plain = tmp_path / "current", os.path.realpath
    link.symlink_to("first")

    def turning(path: Any, **more: Any) -> str:
        found = plain(path, **more)
        link.unlink()
        link.symlink_to("second")
        return found

    monkeypatch.setattr(os.path, "realpath", turning)
    LocalFolder(link).check_file("LICENSE")


def test_few_commits_are_kept_in_mind(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher sees new ones for months; what was forgotten is asked for anew."""
    monkeypatch.setattr(hubs, "MAX_KNOWN", 2)
    seen = []
    for _ in range(4):
        commit_another(hub, tmp_path)
        seen.append(hubs.open_repository(f"hf://{REPO}"))
        assert SHARD in seen[-1].files()
    newest = {(each.repo, each.commit) for each in seen[-2:]}
    assert newest == {*hubs._KNOWN}
    assert SHARD in seen[0].files()


def test_a_repository_holds_no_orbax_checkpoint(model: hubs.Repository) -> None:
    with pytest.raises(StorageError, match=f"{model.url} can't hold an Orbax checkpoint"):
        find_items(f"hf://{REPO}")


@pytest.mark.parametrize("redirected", [False, True])
def test_small_files(model: hubs.Repository, hub: FakeHub, redirected: bool) -> None:
    hub.resolve_cache = redirected
    assert model.read("weights/more/tokenizer.json", 2, 5) == b'a":'


def test_a_revision_is_resolved_once(model: hubs.Repository, hub: FakeHub, tmp_path: Path) -> None:
    first = hub.repositories[REPO].head.sha
    second = commit_another(hub, tmp_path)
    third = commit_another(hub, tmp_path, branch="refs/pr/1", title="A proposal")
    hub.repositories[REPO].tags["v1"] = hub.repositories[REPO].commits[first]
    assert (model.url, model.read(SHARD)) == (f"hf://{REPO}@{first}", DATA)
    for revision, commit, data in (
        ("main", second, DATA[::-1]),
        ("v1", first, DATA),
        ("refs/pr/1", third, DATA[::-1]),
        (first, first, DATA),
    ):
        found = open_store(f"hf://{REPO}@{revision}")
        assert found.url == f"hf://{REPO}@{commit}"
        assert found.read(SHARD) == data


@pytest.mark.parametrize(
    "fault",
    [
        dict(kind="cut"),
        dict(kind="reset"),
        dict(kind="stall", seconds=30),
        dict(kind="status", status=503),
        dict(kind="status", status=429, retry_after=0),
    ],
    ids=lambda fault: fault["kind"] + str(fault.get("status", "")),
)
def test_a_hub_that_fails_now_and_then(
    model: hubs.Repository, hub: FakeHub, fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range goes on where it broke: no byte comes twice."""
    monkeypatch.setattr(hubs, "MAX_REQUEST_BYTES", 70_000)
    made = hub.cdn.fail(**fault, every=2, times=3)
    assert fetch(model, SHARD, (1, len(DATA))) == [DATA[1:]]
    assert made.hits >= 2
    assert (hub.cdn.log.sent, hub.cdn.log.read_twice()) == (len(DATA) - 1 + (_sent_by_refusals(hub)), 0)
    assert hub.log.counts() == {"info": 1, "resolve": 1}


def _sent_by_refusals(hub: FakeHub) -> int:
    return sum(entry.sent for entry in hub.cdn.log if entry.status >= 400)


def test_a_hub_whose_metadata_fails_now_and_then(hub: FakeHub) -> None:
    hub.fail("status", status=500, every=2)
    hub.fail("slow", seconds=30, times=2)
    assert open_store(f"hf://{REPO}").read(SHARD) == DATA


def test_what_the_hub_asks_for_is_waited_for(
    model: hubs.Repository, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in (hub, hub.cdn):
        server.fail("status", status=429, retry_after=1, times=1)
        began = time.monotonic()
        assert model.read(SHARD) == DATA
        assert 1 <= time.monotonic() - began < 5
    monkeypatch.setattr(hubs, "ATTEMPTS", 2)  # a limit doesn't count
    hub.cdn.fail("status", status=429, retry_after=0, times=5)
    assert model.read(SHARD) == DATA


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (dict(kind="status", status=503), "at byte 0: the hub answered 503 Service Unavailable"),
        (dict(kind="status", status=429, retry_after=7200), "at byte 0: the hub answered 429 Too Many Requests"),
        (dict(kind="reset"), "can't be reached"),
        (dict(kind="slow", seconds=60), "can't be reached: .*timed out"),
    ],
    ids=["503", "429", "reset", "slow"],
)
def test_a_hub_that_always_fails(model: hubs.Repository, hub: FakeHub, fault: dict[str, Any], message: str) -> None:
    """It is given up after a bounded number of attempts; where it asks for too long a wait, at once."""
    hub.cdn.fail(**fault)
    began = time.monotonic()
    with pytest.raises(StorageError, match=f"{SHARD}: .*{message}") as error:
        model.read(SHARD)
    assert time.monotonic() - began < 15
    assert "Signature" not in str(error.value)
    assert hub.cdn.faults[0].hits == (1 if fault.get("retry_after") else hubs.ATTEMPTS)


def test_a_connection_that_is_too_slow(model: hubs.Repository, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It always brings something, and it would take for ever."""
    monkeypatch.setattr(hubs, "MAX_REQUEST_SECONDS", 0.3)
    hub.cdn.fail("slow", seconds=0.2)
    hub.cdn.fail("cut")
    with pytest.raises(StorageError, match="too slow"):
        model.read(SHARD)


def test_what_wont_pass_isnt_repeated(model: hubs.Repository, hub: FakeHub) -> None:
    for status, requests in ((404, 1), (410, 1), (401, 2), (403, 2)):  # a signature may have expired
        hub.cdn.faults = []
        fault = hub.cdn.fail("status", status=status)
        with pytest.raises(StorageError, match=f"the hub .*{status}"):
            model.read(SHARD)
        assert fault.hits == requests
    hub.faults = []
    fault = hub.fail("status", status=403)
    with pytest.raises(StorageError, match="403"):
        open_store(f"hf://{REPO}@main")
    assert fault.hits == 1


def test_a_signature_that_expires(model: hubs.Repository, hub: FakeHub) -> None:
    hub.expiry = 100
    assert model.read(SHARD, 0, 10) == DATA[:10]
    assert model.read(SHARD, 10, 20) == DATA[10:20]
    assert hub.log.counts()["resolve"] == 1
    now = time.time()
    hub.clock = lambda: now + 200
    assert model.read(SHARD) == DATA
    assert hub.log.counts()["resolve"] == 2


def test_a_repository_that_is_renamed_on_the_way(model: hubs.Repository, hub: FakeHub) -> None:
    """The hub leads from the former name to the new one, for small files (which it sends itself) and large ones."""
    small = "config.json"
    before = model.read(small)
    hub.repositories["org/new"] = hub.repositories.pop(REPO)
    hub.renamed[REPO] = "org/new"
    assert model.read(small) == before
    assert model.read(SHARD) == DATA


def test_a_file_that_isnt_what_the_hub_said(
    model: hubs.Repository, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shorter; or sent whole, or from elsewhere, whatever was asked for."""
    blob = hub.repositories[REPO].head.files[SHARD]
    model.read(SHARD, 0, 1)
    answer = hub.cdn.answer
    with monkeypatch.context() as patch:
        patch.setattr(blob, "data", DATA[:150_000])
        with pytest.raises(StorageError, match="ends before byte 150,001"):
            model.read(SHARD)

    def whole(call: Call) -> Reply:
        return answer(dataclasses.replace(call, headers=email.message.Message()))

    def elsewhere(call: Call) -> Reply:
        headers = email.message.Message()
        headers["Range"] = "bytes=0-9"
        return answer(dataclasses.replace(call, headers=headers))

    for wrong in (whole, elsewhere):
        monkeypatch.setattr(hub.cdn, "answer", wrong)
        with pytest.raises(StorageError, match=r"asked for bytes 10 to 20, was answered 20[06] with others"):
            model.read(SHARD, 10, 20)


def test_after_a_failure_no_buffer_is_written(
    model: hubs.Repository, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may belong to another read by then."""
    monkeypatch.setattr(hubs, "MAX_REQUEST_BYTES", 10_000)
    monkeypatch.setattr(hubs, "STALL_SECONDS", 30.0)
    answer, scatter, busy = hub.cdn.answer, Request.scatter, threading.Event()

    def fails_first(call: Call) -> Reply:
        if call.headers["Range"].startswith("bytes=0-"):
            busy.wait(10)
            return Reply(404)
        return answer(call)

    def slow(request: Request, at: int, data: memoryview) -> None:
        busy.set()
        time.sleep(0.3)
        scatter(request, at, data)

    monkeypatch.setattr(hub.cdn, "answer", fails_first)
    monkeypatch.setattr(Request, "scatter", slow)
    buffer = bytearray(len(DATA))
    with pytest.raises(StorageError, match="404"):
        model.read_into(SHARD, [(0, memoryview(buffer))])
    left = bytes(buffer)
    time.sleep(0.5)
    assert bytes(buffer) == left


def test_after_a_failure_few_requests_are_made(
    model: hubs.Repository, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What still waits, because the hub limits it, asks no more."""
    monkeypatch.setattr(hubs, "MAX_REQUEST_BYTES", 50_000)
    monkeypatch.setattr(hubs, "MAX_REQUEST_SECONDS", 6.0)
    together, asked = threading.Barrier(4), []  # of four stretches one fails, when the others have been refused

    def answer(call: Call) -> Reply:
        asked.append(call.headers["Range"])
        if len(asked) <= 4:
            together.wait(10)
        return Reply(404) if call.headers["Range"].startswith("bytes=0-") else Reply(429, headers={"Retry-After": "3"})

    monkeypatch.setattr(hub.cdn, "answer", answer)
    began = time.monotonic()
    with pytest.raises(StorageError, match="404"):
        fetch(model, SHARD, (0, len(DATA)))
    assert time.monotonic() - began < 2
    assert len(asked) == len(set(asked)) == 4


def test_few_connections_at_a_time(model: hubs.Repository, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of threads and requests."""
    monkeypatch.setattr(hubs, "MAX_REQUEST_BYTES", 5000)
    # a busy machine is slow to answer, and would still count what the client gave up
    monkeypatch.setattr(hubs, "STALL_SECONDS", 30.0)
    answer, lock, now, most = hub.cdn.answer, threading.Lock(), 0, 0

    def counted(call: Call) -> Reply:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return answer(call)

    monkeypatch.setattr(hub.cdn, "answer", counted)
    assert race(lambda _: fetch(model, SHARD, (0, len(DATA)))) == [[DATA]] * 8
    assert hubs.CONNECTIONS // 2 <= most <= hubs.CONNECTIONS
    assert len(hub.cdn._http.connections) <= hubs.CONNECTIONS
    assert hub.log.counts()["resolve"] == 1


def test_who_may_read(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated, private, and what isn't there: what to do about it."""
    hub.add("org/gated", tmp_path / "model", gated="manual")
    hub.add("org/private", tmp_path / "model", private=True)

    def refused(name: str, message: str) -> None:
        with pytest.raises(StorageError, match=message):
            open_store(f"hf://{name}").check_readable()

    page = f"org/gated@.*is gated: request access and accept its terms on {hub.url}/org/gated"
    refused("org/gated", f"{page}; then set HF_TOKEN to a token of that account, or log in with `hf auth login`")
    refused("org/private", "no such repository, or a private one: HF_TOKEN isn't set")
    refused("org/none", "no such repository, or a private one: HF_TOKEN isn't set")
    refused(f"{REPO}@none", "hf://org/model@none: no such revision")
    refused("org/model/weights", "should be hf://organisation/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    refused(REPO, "doesn't accept the token that is set")
    hub.allow(TOKEN)
    refused("org/gated", f"{page}; the token that is set has no access yet")
    refused("org/private", "no such repository, or a private one that the token which is set can't see")
    with pytest.raises(StorageError, match=f"{SHARD}.*is gated"):
        fetch(open_store("hf://org/gated"), SHARD, (0, 1))
    hub.allow(TOKEN, "org/gated", "org/private")
    for name in ("org/gated", "org/private"):
        found = open_store(f"hf://{name}")
        found.check_readable()
        assert found.read(SHARD) == DATA
    assert hub.cdn.leaks == []


LOUD = """
import logging, sys, traceback
logging.basicConfig(level=logging.DEBUG)
from weightbeam.formats.storage import hub, open_store
hub.BACKOFF, hub.STALL_SECONDS = 0.002, 0.5
for url in sys.argv[2:]:
    try:
        store = open_store(url)
        store.check_readable()
        print(len(store.read(sys.argv[1])))
    except OSError:
        traceback.print_exc()
"""


def test_secrets_are_never_told(hub: FakeHub, tmp_path: Path) -> None:
    """The token goes to the hub only; neither it nor a signed address is in a log, a message or a traceback, whatever
    happens.
    """
    hub.allow(TOKEN)
    hub.add("org/gated", tmp_path / "model", gated="manual")
    faults: dict[str, dict[str, Any]] = {
        "m404": dict(status=404),
        "m403": dict(status=403),
        "m503": dict(status=503),
        "reset": {},
    }
    for name, fault in faults.items():
        hub.add(f"org/{name}", tmp_path / "model")
        hub.cdn.fail("status" if fault else "reset", matching=f"org/{name}/", **fault)
    urls = [
        f"hf://{REPO}",
        "hf://org/gated",
        "hf://org/none",
        f"hf://{REPO}@none",
        *(f"hf://org/{name}" for name in faults),
    ]
    output = outside(LOUD, SHARD, *urls, **hub.env(TOKEN), HF_HOME=str(tmp_path / "home")).stdout
    for told in (
        "200000",
        "is gated",
        "no such repository",
        "no such revision",
        "404 Not Found",
        "403 Forbidden",
        "503 Service",
        "can't be reached",
    ):
        assert told in output
    for secret in (TOKEN[3:], base64.b64encode(TOKEN.encode()).decode(), "Signature="):
        assert secret not in output
    assert len(hub.cdn.log) > len(urls)
    assert hub.cdn.leaks == []


# --- two clients of one bucket ----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """TensorStore's requests go where nobody listens, Google's client's don't."""
    monkeypatch.setitem(buckets.LOOK, "gcs_request_retries", {"max_retries": 1, "initial_delay": "10ms"})
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", url := "http://127.0.0.1:1")
    return url


@pytest.mark.parametrize("name", ["a\nb", "a" * 1100])
def test_a_name_that_a_bucket_does_not_take(gcs: FakeGcs, bucket: buckets.Bucket, name: str) -> None:
    with pytest.raises(StorageError, match="no such name can be written in a bucket"):
        (bucket / name).check_writable()


def test_a_bucket_that_answers_one_client(
    gcs: FakeGcs, bucket: buckets.Bucket, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before any pipeline, with what to do; nothing is left of the look."""
    bucket.write("0/items/_METADATA", b"{}")
    said = f"{bucket.url}.*: Google's client gets there, but TensorStore.* can't read there: CURL error.*"
    addresses = f"STORAGE_EMULATOR_HOST is {gcs.url}, TENSORSTORE_GCS_HTTP_URL is {elsewhere}: set both"
    for ask in (bucket.check_readable, bucket.check_writable, lambda: find_items(bucket)):
        with pytest.raises(StorageError, match=said + addresses):
            ask()
    assert [file.name for file in bucket.list()] == ["0/items/_METADATA"]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", elsewhere)  # such as a proxy, or certificates
    with pytest.raises(StorageError, match=r"proxy from https_proxy.*TENSORSTORE_CA_BUNDLE"):
        bucket.check_readable()


def test_a_bucket_that_never_answers_one_client(
    gcs: FakeGcs, bucket: buckets.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "UNREACHED_SECONDS", 0.3)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(StorageError, match="can't read there: no answer in 0 s; STORAGE_EMULATOR_HOST is"):
            bucket.check_writable()


def test_what_tensorstore_answers_is_waited_for_in_seconds_that_pass() -> None:
    """TensorStore's own bound goes by the clock of the day, which may be set."""
    promise, future = ts.Promise.new()
    threading.Timer(0.5, promise.set_result, (7,)).start()
    assert buckets._result(future, 30) == 7
    _held, never = ts.Promise.new()
    with pytest.raises(TimeoutError):
        buckets._result(never, 0.1)


def test_another_store_that_answers_the_other_client(
    gcs: FakeGcs, bucket: buckets.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGcs("bucket") as another:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", another.url)
        with pytest.raises(StorageError, match="can't read there: it was answered, but as if by another store"):
            bucket.check_writable()


def test_one_address_is_enough(gcs: FakeGcs, bucket: buckets.Bucket, tmp_path: Path) -> None:
    """What sends Google's client to an emulator, or has it trust a company, does so with TensorStore."""
    code = "import os, sys, weightbeam.formats.storage as s; b = s.open_store(sys.argv[1]); b.check_writable(); "
    code += "b.write('a', b'1'); b.check_readable(); print(os.environ['TENSORSTORE_CA_BUNDLE'])"
    (tmp_path / "ca.pem").write_text("")
    told = outside(code, bucket.url, STORAGE_EMULATOR_HOST=gcs.url, REQUESTS_CA_BUNDLE=str(tmp_path / "ca.pem"))
    assert told.stdout.splitlines()[-1] == str(tmp_path / "ca.pem"), told.stdout
    assert [file.name for file in bucket.list()] == ["a"]


def test_both_clients_are_looked_at_once(gcs: FakeGcs, bucket: buckets.Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_MET", set())
    for requests in (5, 2):  # made by each client, read by the other one, deleted; then as ever
        gcs.log.clear()
        bucket.check_writable()
        assert len([*gcs.log]) <= requests + 1, [*gcs.log]
