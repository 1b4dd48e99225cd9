"""The fake Google Cloud Storage, driven by the stock clients only: what they write is what they read, and faults reach
them as such.
"""

from __future__ import annotations

import base64
import io
import random
import time
from collections.abc import Iterator
from pathlib import Path

import gcsfs
import pytest
import requests
import tensorstore as ts
from etils import epath
from google.api_core import exceptions
from google.cloud import storage
from google.cloud.storage._media.requests import ResumableUpload
from google.cloud.storage.retry import DEFAULT_RETRY
from racing import race

from servers.gcs import CHUNK, FakeGcs
from servers.server import process

QUICK = DEFAULT_RETRY.with_delay(initial=0.01, maximum=0.01)  # the stock one waits a second
DATA = random.Random(0).randbytes(3 * CHUNK + 1000)


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with FakeGcs("bucket") as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def client(gcs: FakeGcs) -> storage.Client:
    return storage.Client(project="test")


@pytest.fixture
def bucket(client: storage.Client) -> storage.Bucket:
    return client.bucket("bucket")


def context() -> ts.Context:
    """TensorStore's, with nothing cached from before, and with short waits."""
    return ts.Context({"gcs_request_retries": {"max_retries": 6, "initial_delay": "10ms", "max_delay": "10ms"}})


def kvstore(path: str = "", bucket: str = "bucket") -> ts.KvStore:
    return ts.KvStore.open({"driver": "gcs", "bucket": bucket, "path": path}, context=context()).result()


# --- TensorStore ------------------------------------------------------------------------------------------------------


def test_tensorstore(gcs: FakeGcs) -> None:
    store = kvstore("a/")
    store.write("x/y", DATA).result()
    assert store["x/y"] == DATA
    for part in (slice(0, 10), slice(500, None), slice(-7, None), slice(len(DATA) - 1, len(DATA))):
        assert store.read("x/y", byte_range=part).result().value == DATA[part]
    assert store.read("none").result().state == "missing"
    store["x/z ü%2F+?#"] = b""
    assert store.list().result() == [b"x/y", "x/z ü%2F+?#".encode()]
    assert store["x/z ü%2F+?#"] == b""
    store.delete_range(ts.KvStore.KeyRange("x/y", "x/z")).result()
    assert store.list().result() == ["x/z ü%2F+?#".encode()]
    assert list(gcs.objects["bucket"]) == ["a/x/z ü%2F+?#"]


def test_tensorstore_conditions(gcs: FakeGcs) -> None:
    """A generation is what a condition compares with."""
    store = kvstore()
    none = store.read("x").result().stamp.generation
    first = store.write("x", b"1").result()
    second = store.write("x", b"2", if_equal=first.generation).result()
    assert second.generation != first.generation
    assert store.write("x", b"3", if_equal=first.generation).result().generation == b""  # unknown: it wasn't written
    assert store.write("x", b"3", if_equal=none).result().generation == b""  # must not be there
    assert store.read("x", if_not_equal=second.generation).result().state == "unspecified"
    assert store["x"] == b"2"
    store.delete_range(ts.KvStore.KeyRange()).result()
    assert store.write("x", b"4", if_equal=none).result().generation not in (b"", first.generation, second.generation)


def test_an_atomic_transaction_in_ocdbt(gcs: FakeGcs) -> None:
    """All keys or none, in a database that another client opens."""
    values = {f"key/{i}": random.Random(i).randbytes(5000) for i in range(100)}
    database = {"driver": "ocdbt", "base": {"driver": "gcs", "bucket": "bucket", "path": "database/"}}
    store = ts.KvStore.open(database, context=context()).result()
    with ts.Transaction(atomic=True) as transaction:
        for key, value in values.items():
            store.with_transaction(transaction)[key] = value
        assert gcs.log.counts()["write"] == 0
    # a manifest, and one file of data
    assert sorted(name.rpartition("/")[0] for name in gcs.objects["bucket"]) == ["database", "database/d"]
    again = ts.KvStore.open(database, context=context()).result()
    assert {key.decode(): again[key] for key in again.list().result()} == values
    gcs.fail("status", status=503, matching="POST .*upload", times=2)
    with ts.Transaction(atomic=True) as transaction:
        again.with_transaction(transaction)["key/0"] = b"new"
    assert ts.KvStore.open(database, context=context()).result()["key/0"] == b"new"


@pytest.mark.parametrize(
    "fault",
    [
        dict(kind="status", status=503),
        dict(kind="status", status=429, retry_after=0),
        dict(kind="reset"),
        dict(kind="cut"),
    ],
)
def test_tensorstore_tries_again(gcs: FakeGcs, fault: dict) -> None:
    gcs.put("bucket", "x", DATA)
    store = kvstore()
    made = gcs.fail(**fault, times=2, matching="GET .*alt=media")
    assert store["x"] == DATA
    assert made.hits == 2
    made = gcs.fail(**fault | {"kind": "status"}, times=2, matching="POST")
    store["y"] = DATA
    assert made.hits == 2
    assert gcs.objects["bucket"]["y"].data == DATA


# --- google-cloud-storage ---------------------------------------------------------------------------------------------


def test_google_client(bucket: storage.Bucket, gcs: FakeGcs) -> None:
    """What looks like the end of a part, or of a line, is data like any other."""
    for data in (b"", b"\r\n", DATA, b"--===============1==\r\n\r\n--", b"abc\r\n\n"):
        blob = bucket.blob("a/ü b%2F?#+")
        blob.upload_from_string(data, content_type="text/x")
        again = bucket.blob(blob.name)
        assert again.download_as_bytes() == data
        again.reload()
        assert (again.size, again.content_type, again.crc32c) == (len(data), "text/x", blob.crc32c)
    blob.upload_from_string(DATA)
    assert blob.download_as_bytes(start=5, end=9) == DATA[5:10]
    assert blob.download_as_bytes(start=len(DATA) - 3) == DATA[-3:]
    with pytest.raises(exceptions.RequestRangeNotSatisfiable):
        blob.download_as_bytes(start=len(DATA))
    blob.metadata = {"key": "value"}
    blob.patch()
    again = bucket.get_blob(blob.name)
    assert again is not None
    assert (again.metadata, again.metageneration, again.generation) == ({"key": "value"}, 2, blob.generation)
    assert again.updated >= again.time_created
    blob.delete()
    assert not blob.exists()
    with pytest.raises(exceptions.NotFound, match="No such object"):
        blob.delete()


def test_what_arrives_broken_is_refused(bucket: storage.Bucket, gcs: FakeGcs) -> None:
    blob = bucket.blob("x")
    blob.md5_hash = base64.b64encode(bytes(16)).decode()
    with pytest.raises(exceptions.BadRequest, match="doesn't match calculated"):
        blob.upload_from_string(b"other")
    assert gcs.objects["bucket"] == {}


@pytest.mark.parametrize("size", [0, 1, CHUNK, 2 * CHUNK, len(DATA)])
def test_resumable_upload(bucket: storage.Bucket, gcs: FakeGcs, size: int) -> None:
    """Of known and of unknown size, in chunks."""
    bucket.blob("known", chunk_size=CHUNK).upload_from_file(io.BytesIO(DATA[:size]), size=size)
    with bucket.blob("unknown", chunk_size=CHUNK).open("wb", ignore_flush=True) as file:
        file.write(DATA[:size])
    assert bucket.blob("known").download_as_bytes() == bucket.blob("unknown").download_as_bytes() == DATA[:size]
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("known", chunk_size=CHUNK).upload_from_file(io.BytesIO(DATA), if_generation_match=0)


def test_an_upload_that_is_interrupted_goes_on(gcs: FakeGcs) -> None:
    """The client asks how much has arrived; what the answer says was kept isn't sent again."""
    session = requests.Session()
    upload = ResumableUpload(f"{gcs.url}/upload/storage/v1/b/bucket/o?uploadType=resumable", CHUNK)
    upload._retry_strategy = None
    upload.initiate(session, io.BytesIO(DATA), {"name": "x"}, "application/octet-stream")
    upload.transmit_next_chunk(session)
    gcs.fail("lost", matching="PUT", times=1)
    with pytest.raises(requests.ConnectionError):
        upload.transmit_next_chunk(session)
    upload._make_invalid()
    upload.recover(session)
    assert upload.bytes_uploaded == 2 * CHUNK
    while not upload.finished:
        upload.transmit_next_chunk(session)
    assert gcs.objects["bucket"]["x"].data == DATA
    assert gcs.log.received - len(DATA) < 100  # besides the data, its name


def test_lists(client: storage.Client, gcs: FakeGcs) -> None:
    names = sorted(f"{folder}/{i}" for folder in ("a", "b/c", "b/d", "b") for i in range(5))
    for name in names:
        gcs.put("bucket", name, b"")
    for size in (1, 3, 1000):
        assert [blob.name for blob in client.list_blobs("bucket", page_size=size)] == names
        found = client.list_blobs("bucket", prefix="b/", delimiter="/", page_size=size)
        assert [blob.name for blob in found] == [f"b/{i}" for i in range(5)]
        assert found.prefixes == {"b/c/", "b/d/"}
    assert [blob.name for blob in client.list_blobs("bucket", start_offset="a/3", end_offset="b/1")] == [
        "a/3",
        "a/4",
        "b/0",
    ]
    assert len(list(client.list_blobs("bucket", max_results=7))) == 7


def test_copies_on_the_server(bucket: storage.Bucket, gcs: FakeGcs) -> None:
    source = bucket.blob("source")
    source.upload_from_string(DATA)
    gcs.rewrite_bytes = CHUNK
    gcs.log.clear()
    copy = bucket.blob("copy")
    token, *_ = copy.rewrite(source)
    assert not copy.exists()
    calls = 1
    while token:
        token, done, size = copy.rewrite(source, token=token)
        calls += 1
    assert (calls, done, size) == (4, len(DATA), len(DATA))
    with pytest.raises(exceptions.PreconditionFailed):
        copy.rewrite(source, if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        copy.rewrite(source, if_source_generation_match=1)
    assert gcs.log.received < 1000
    assert copy.download_as_bytes() == DATA
    both = bucket.blob("both")
    both.compose([source, copy])
    assert both.download_as_bytes() == DATA + DATA
    assert (both.md5_hash, both.component_count) == (None, 2)
    moved = bucket.move_blob(both, "moved")
    assert moved.download_as_bytes() == DATA + DATA
    assert sorted(gcs.objects["bucket"]) == ["copy", "moved", "source"]


def test_many_requests_in_one(client: storage.Client, bucket: storage.Bucket, gcs: FakeGcs) -> None:
    for i in range(5):
        gcs.put("bucket", str(i), b"")
    with client.batch():
        for i in range(3):
            bucket.blob(str(i)).delete()
    assert sorted(gcs.objects["bucket"]) == ["3", "4"]
    with client.batch(raise_exception=False) as batch:
        bucket.blob("0").delete()
        bucket.blob("4").delete()
    assert [response.status_code for response in batch._responses] == [404, 204]
    assert sorted(gcs.objects["bucket"]) == ["3"]


def test_buckets(client: storage.Client, gcs: FakeGcs) -> None:
    client.create_bucket("new")
    assert [bucket.name for bucket in client.list_buckets()] == ["bucket", "new"]
    with pytest.raises(exceptions.Conflict):
        client.create_bucket("new")
    client.get_bucket("new").delete()
    assert client.lookup_bucket("new") is None
    with pytest.raises(exceptions.NotFound, match="bucket does not exist"):
        client.bucket("new").blob("x").upload_from_string(b"")
    with pytest.raises(ValueError, match="bucket does not exist"):
        kvstore(bucket="new").write("x", b"").result()


def test_what_is_forbidden(client: storage.Client, bucket: storage.Bucket, gcs: FakeGcs) -> None:
    """Wholly, or to writers."""
    gcs.put("bucket", "closed/x", b"1")
    gcs.put("bucket", "fixed/x", b"1")
    gcs.forbidden, gcs.read_only = ["bucket/closed/"], ["bucket/fixed/"]
    with pytest.raises(exceptions.Forbidden):
        bucket.blob("closed/x").download_as_bytes()
    with pytest.raises(exceptions.Forbidden):
        list(client.list_blobs("bucket", prefix="closed/"))
    assert bucket.blob("fixed/x").download_as_bytes() == b"1"
    for write in (lambda: bucket.blob("fixed/x").delete(), lambda: bucket.blob("fixed/y").upload_from_string(b"")):
        with pytest.raises(exceptions.Forbidden):
            write()
    with pytest.raises(exceptions.Forbidden):
        bucket.blob("fixed/z", chunk_size=CHUNK).upload_from_file(io.BytesIO(DATA))
    with pytest.raises(ValueError, match="does not have permission"):
        kvstore("fixed/").write("x", b"").result()
    assert {name: one.data for name, one in gcs.objects["bucket"].items()} == {"closed/x": b"1", "fixed/x": b"1"}


# --- racing -----------------------------------------------------------------------------------------------------------


def test_of_racing_creators_one_wins(client: storage.Client, gcs: FakeGcs) -> None:
    """Whichever client they use, and whichever kind of upload."""
    store = kvstore()
    none = store.read("race").result().stamp.generation

    def create(number: int) -> object:
        if number % 4 == 0:
            return store.write("race", b"%d" % number, if_equal=none).result().generation or None
        blob = client.bucket("bucket").blob("race", chunk_size=CHUNK if number % 4 == 1 else None)
        blob.upload_from_file(io.BytesIO(b"%d" % number), if_generation_match=0)
        return blob.generation

    for _ in range(5):
        results = race(create, caught=exceptions.GoogleAPICallError)
        winners = [number for number, result in enumerate(results) if result and not isinstance(result, Exception)]
        assert [gcs.objects["bucket"].pop("race").data] == [b"%d" % number for number in winners]
        assert sum(isinstance(result, exceptions.PreconditionFailed) for result in results) >= 5


def test_no_change_is_lost(client: storage.Client, gcs: FakeGcs) -> None:
    """Eight writers who each raise a number five times, on condition that it is what they read."""
    gcs.put("bucket", "number", b"0")

    def add(_: int) -> int:
        done = 0
        while done < 5:
            try:
                blob = client.bucket("bucket").get_blob("number")
                value = int(blob.download_as_bytes())  # of that generation: 404 if there is another by now
                client.bucket("bucket").blob("number").upload_from_string(
                    b"%d" % (value + 1), if_generation_match=blob.generation
                )
                done += 1
            except (exceptions.NotFound, exceptions.PreconditionFailed):
                continue
        return done

    assert race(add, caught=exceptions.GoogleAPICallError) == [5] * 8
    assert gcs.objects["bucket"]["number"].data == b"40"


# --- faults -----------------------------------------------------------------------------------------------------------

READ, WRITE = "GET .*alt=media", "POST .*upload"


def test_the_google_client_tries_again(client: storage.Client, gcs: FakeGcs) -> None:
    """After each kind of fault, and the right bytes come in the end."""
    blob = client.bucket("bucket").blob("x")
    blob.upload_from_string(DATA)
    for fault in (dict(status=503), dict(status=429, retry_after=0)):
        gcs.faults = []
        reading, writing = (
            gcs.fail("status", matching=READ, times=2, **fault),
            gcs.fail("status", matching=WRITE, times=2, **fault),
        )
        assert blob.download_as_bytes(retry=QUICK) == DATA
        blob.upload_from_string(DATA, if_generation_match=blob.generation, retry=QUICK)
        assert (reading.hits, writing.hits) == (2, 2)
    for kind in ("reset", "cut", "stall"):
        gcs.faults = []
        fault = gcs.fail(kind, matching=READ, times=1, seconds=60)
        assert blob.download_as_bytes(retry=QUICK, timeout=0.5) == DATA
        assert fault.hits == 1


def test_without_retries_a_fault_is_seen(client: storage.Client, gcs: FakeGcs) -> None:
    gcs.put("bucket", "x", DATA)
    blob = client.bucket("bucket").blob("x")

    def read(timeout: float = 60) -> bytes:
        return blob.download_as_bytes(retry=None, timeout=timeout)

    gcs.fail("status", status=429, retry_after=7)
    with pytest.raises(exceptions.TooManyRequests) as e:
        read()
    assert e.value.response.headers["Retry-After"] == "7"
    for kind, error in (
        ("reset", requests.ConnectionError),
        ("cut", requests.exceptions.ChunkedEncodingError),
        ("stall", requests.ConnectionError),
    ):
        gcs.faults = []
        gcs.fail(kind, seconds=60)
        with pytest.raises(error):
            read(0.3 if kind == "stall" else 60)
    gcs.faults = []
    assert read() == DATA


def test_an_answer_that_is_lost(client: storage.Client, gcs: FakeGcs) -> None:
    """The object is there, but who made it is told that it was there already: what every conditional write over a
    network must reckon with.
    """
    gcs.fail("lost", matching=WRITE, times=1)
    with pytest.raises(exceptions.PreconditionFailed):
        client.bucket("bucket").blob("x").upload_from_string(b"mine", if_generation_match=0, retry=QUICK)
    assert gcs.objects["bucket"]["x"].data == b"mine"


def test_every_nth_and_a_fraction(gcs: FakeGcs) -> None:
    """Counted over all clients; by chance, but the same in each run."""
    gcs.put("bucket", "x", b"")
    session = requests.Session()

    def statuses(number: int) -> list[int]:
        return [session.get(f"{gcs.url}/storage/v1/b/bucket/o/x").status_code for _ in range(number)]

    fault = gcs.fail("status", every=3)
    assert statuses(7) == [200, 200, 503, 200, 200, 503, 200]
    assert fault.hits == 2
    runs = []
    for _ in range(2):
        gcs.faults = []
        fault = gcs.fail("status", fraction=0.3, matching="/x")
        runs.append(statuses(100))
    assert runs[0] == runs[1]
    assert 15 < fault.hits < 45
    gcs.faults = []
    gcs.fail("slow", seconds=0.05)
    start = time.monotonic()
    statuses(3)
    assert time.monotonic() - start >= 0.15


# --- gcsfs and epath --------------------------------------------------------------------------------------------------


def test_gcsfs(gcs: FakeGcs) -> None:
    """The folders that it makes up, a file in parts, and a copy, a move and a removal of many."""
    fs = gcsfs.GCSFileSystem(skip_instance_cache=True)
    fs.pipe({f"bucket/a/{i}": b"%d" % i for i in range(5)})
    assert fs.cat("bucket/a/3") == b"3"
    assert fs.ls("bucket", detail=False) == ["bucket/a"]
    with fs.open("bucket/b/large", "wb", block_size=CHUNK) as file:
        file.write(DATA)
    assert fs.cat("bucket/b/large") == DATA
    assert fs.cat_ranges(["bucket/b/large"] * 2, [0, 1000], [10, 1001]) == [DATA[:10], DATA[1000:1001]]
    assert fs.cat_file("bucket/b/large", start=-5) == DATA[-5:]
    assert fs.info("bucket/b/large")["size"] == len(DATA)
    fs.mv("bucket/a/0", "bucket/c")
    fs.cp("bucket/b/large", "bucket/d")
    fs.rm("bucket/a", recursive=True)
    assert fs.find("bucket") == ["bucket/b/large", "bucket/c", "bucket/d"]
    with pytest.raises(FileNotFoundError):
        fs.cat("bucket/none")
    fault = gcs.fail("status", matching="GET .*/d", times=1)
    assert fs.cat("bucket/d") == DATA
    assert fault.hits == 1


def test_epath(gcs: FakeGcs) -> None:
    """What Orbax uses."""
    gcs.objects["paths"] = {}
    folder = epath.Path("gs://paths/folder")
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x").write_bytes(DATA)
    (folder / "y").write_text("text")
    assert (folder / "sub" / "x").read_bytes() == DATA
    assert sorted(path.name for path in folder.iterdir()) == ["sub", "y"]
    assert [path.name for path in folder.glob("*/x")] == ["x"]
    assert (folder / "y").stat().length == 4
    (folder / "y").rename(folder / "z")
    assert ((folder / "y").exists(), (folder / "z").read_text()) == (False, "text")
    folder.rmtree()
    assert not folder.exists()
    assert gcs.objects["paths"] == {}


# --- the log, and a process of its own --------------------------------------------------------------------------------


def test_the_log_knows_what_was_read_twice(bucket: storage.Bucket, gcs: FakeGcs) -> None:
    gcs.put("bucket", "x", DATA)
    for start, end in ((0, 99), (100, 199), (1000, 1099)):
        bucket.blob("x").download_as_bytes(start=start, end=end)
    assert gcs.log.ranges() == {"bucket/x": [(0, 100), (100, 200), (1000, 1100)]}
    assert gcs.log.read_twice() == 0
    bucket.blob("x").download_as_bytes(start=150, end=1049)
    assert gcs.log.read_twice() == 100
    assert (gcs.log.counts()["read"], gcs.log.of("read").sent) == (4, 1200)
    gcs.log.clear()
    gcs.fail("cut", times=1, matching="alt=media")  # and not what the client asks by itself, in the background
    assert (
        requests.get(
            f"{gcs.url}/storage/v1/b/bucket/o/x?alt=media", headers={"Range": "bytes=0-99"}, stream=True
        ).raw.read(50)
        == DATA[:50]
    )
    assert [(entry.stop, entry.fault) for entry in gcs.log.of("read")] == [(50, "cut")]


def test_what_it_cannot_do_is_not_passed_over() -> None:
    """A request that no endpoint is there for fails the test, whatever the client makes of the answer."""

    def use() -> int:
        with FakeGcs("bucket") as gcs:
            return requests.get(f"{gcs.url}/storage/v1/b/bucket/acl").status_code

    with pytest.raises(NotImplementedError, match="GET /storage/v1/b/bucket/acl"):
        use()


def test_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started as a script: its buckets come from a folder, faults and log go through its control endpoint."""
    (tmp_path / "bucket" / "a").mkdir(parents=True)
    (tmp_path / "bucket" / "a" / "x").write_bytes(DATA)
    with process("gcs", "--folder", str(tmp_path)) as control:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", control.url)
        blob = storage.Client(project="test").bucket("bucket").blob("a/x")
        control.set(faults=[dict(kind="status", status=503, times=1)])
        assert blob.download_as_bytes(retry=QUICK) == DATA
        assert [(entry.status, entry.sent) for entry in control.log if entry.kind == "read"] == [(200, len(DATA))]
        state = control.set(faults=[], forbidden=["bucket"], clear=True)
        assert (state["log"], state["faults"], state["errors"]) == ([], [], [])
        with pytest.raises(exceptions.Forbidden):
            blob.download_as_bytes()
