"""Buckets of Google Cloud Storage: google-cloud-storage for what is small or conditional, TensorStore for what is
large.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

import google_crc32c
import tensorstore as ts
from google.api_core import exceptions
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from weightbeam.formats.storage import patience
from weightbeam.formats.storage.store import (
    PIECE,
    PROBE,
    ByteRange,
    File,
    Request,
    StorageError,
    Store,
    Trouble,
    UnreachedError,
    as_base64,
    make_requests,
    stretches,
)
from weightbeam.formats.text.printable import without_user

CONNECTIONS = 128  # that are kept: 16 for each of eight threads
TIMEOUT: Any = (10.0, 60.0)  # seconds to connect, and between two pieces of an answer
RETRY_SECONDS = 300.0  # in all
LONGEST_BACKOFF = 10.0  # seconds between two tries
UNREACHED_SECONDS = 20.0  # the same where nothing has answered this process yet: rather no network than a hiccup
MAX_REQUEST_BYTES = 4 << 20  # bytes of a request
MAX_REQUEST_SECONDS = 1800.0  # seconds for one; TensorStore asks for a token without end where it is refused
MAX_REQUESTS = 16  # requests of this process at a time, whose bytes are held beside the buffers that they go to
NO_CHECKSUM: Any = None  # what is read is checked by those who know its hash
NAMING = "it has 3 to 63 lower-case letters, digits, dashes, underscores and dots, and begins and ends with a letter or a digit"
ORIGINAL = "original"  # in an object's metadata: `File.original`
FIELDS = "items(name,size,generation,crc32c,updated,metadata),prefixes,nextPageToken"
CONTEXT = {
    "gcs_request_concurrency": {"limit": 32},
    "gcs_request_retries": {"max_retries": 16, "initial_delay": "500ms", "max_delay": "30s"},
}
HELD = re.compile(
    r"retention polic|object retention|under active [\w -]*hold"
)  # what Google's storage says of it, with 403
# below that a request is repeated
STALL_LIMITS = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30", "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1024"}
ADDRESS, ITS_ADDRESS = "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"  # which other store Google's client asks
# TensorStore's names for what Google's client, or `requests` below it, reads under others
ITS_NAMES = {ITS_ADDRESS: (ADDRESS,), "TENSORSTORE_CA_BUNDLE": ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")}
# of a look whether TensorStore gets there at all, which shouldn't take as long as a pipeline's requests may
LOOK = {"gcs_request_retries": {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}}


_REQUESTS = threading.BoundedSemaphore(MAX_REQUESTS)


class _Reach:
    """Whether the service can be reached from this process.

    Attributes:
      is_known: whether it has answered.
      since, last: when it couldn't be reached first and last, of tries that follow each other.
    """

    def __init__(self) -> None:
        self.is_known = False
        self.since = self.last = -math.inf

    def answered(self, *_: Any, **__: Any) -> None:
        """Takes note of an answer."""
        self.is_known = True

    def is_given_up(self) -> bool:
        """Takes note that it can't be reached, and tells whether that has gone on for too long."""
        now = time.monotonic()
        if now - self.last > 3 * UNREACHED_SECONDS:  # another command
            self.since = now
        self.last = now
        return not self.is_known and now - self.since > UNREACHED_SECONDS


_REACH = _Reach()
_TROUBLE = Trouble()


def _unreached(error: Exception | None) -> tuple[str, str] | None:
    """Which host no connection could be made to, and why, if that is behind what the clients made of it."""
    if isinstance(error, exceptions.RetryError):
        error = error.cause
    if isinstance(error, TransportError) and error.args and isinstance(error.args[0], Exception):  # of credentials
        error = error.args[0]
    why = getattr(error.args[0], "reason", None) if isinstance(error, RequestException) and error.args else None
    if not isinstance(error, RequestException) or not isinstance(why, NewConnectionError | ConnectTimeoutError):
        return None
    asked = urlsplit(str(error.request.url)) if error.request is not None else None
    host = without_user(f"{asked.scheme}://{asked.netloc}") if asked else "Google's storage"
    return host, str(why).rpartition(": ")[2]


def _is_repeated(error: Exception) -> bool:
    """Whether a request is repeated: what a repetition can mend, as the client's own policy knows."""
    unreached = _unreached(error)
    if (unreached and _REACH.is_given_up()) or not patience.left():
        return False
    if is_passing := bool(DEFAULT_RETRY._predicate(error)):
        who, why = unreached or ("Google's storage", str(getattr(error, "code", "") or type(error).__name__))
        _TROUBLE.note(who, why)
    return is_passing


RETRY: Any = DEFAULT_RETRY.with_predicate(_is_repeated).with_timeout(RETRY_SECONDS).with_delay(maximum=LONGEST_BACKOFF)


class _Hurried(HTTPAdapter):
    """An answer is waited for as long as its request says, but where somebody was stopped no longer than they wait."""

    def send(self, *arguments: Any, timeout: Any = None, **more: Any) -> Any:
        if isinstance(timeout, tuple):
            timeout = tuple(min(each, max(1.0, patience.left())) for each in timeout)
        return super().send(*arguments, timeout=timeout, **more)


@functools.cache
def _client() -> storage.Client:
    """This process's client."""
    client = _connect()
    client._http.hooks["response"].append(_REACH.answered)
    # the stock pool throws away what goes beyond ten
    client._http.mount("https://", _Hurried(pool_maxsize=CONNECTIONS))
    client._http.mount("http://", _Hurried(pool_maxsize=CONNECTIONS))
    return client


def _connect() -> storage.Client:
    try:
        return storage.Client()
    except DefaultCredentialsError as e:
        why = str(e).splitlines()[0]
        raise StorageError(
            f"gs:// needs Google credentials: {why} `gcloud auth application-default login` makes them"
        ) from e
    except OSError as e:  # no project, which only creating buckets would need
        return storage.Client(project="none") if "project" in str(e).lower() else _fail("gs://", e)


@functools.cache
def _context() -> ts.Context:
    return ts.Context(CONTEXT)


def _result(future: ts.Future, seconds: float) -> Any:
    """What TensorStore answers within some seconds, which its own waiting counts by a clock that may be set. Raises
    TimeoutError where there is no answer.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    future.force()
    if not done.wait(seconds):
        raise TimeoutError
    return future.result()


_MET: set[tuple[str, str, str]] = set()  # the buckets that TensorStore was seen to get to: what it did, where


def _settle() -> str:
    """Tells TensorStore what the environment tells Google's client, and how long a stall may last; returns the address
    that it asks, empty for Google's own.
    """
    for name, others in ITS_NAMES.items():
        told = next(filter(None, map(os.environ.get, others)), "")
        if "://" in told or os.path.isfile(told):  # of certificates there may be a folder, which that name doesn't take
            os.environ.setdefault(name, told)
    for name, value in STALL_LIMITS.items():
        os.environ.setdefault(name, value)
    return os.environ.get(ITS_ADDRESS, "")


def _remedy() -> str:
    """What sends TensorStore where Google's client goes."""
    return (
        _parted()
        or "TensorStore takes a proxy from https_proxy, and the certificates of a company from TENSORSTORE_CA_BUNDLE"
    )


def _parted() -> str:
    """That the two clients are told different addresses; empty where they aren't."""
    emulator, theirs = os.environ.get(ADDRESS, ""), os.environ.get(ITS_ADDRESS, "")
    if emulator.rstrip("/") == theirs.rstrip("/"):
        return ""
    told = [without_user(said) or "not set" for said in (emulator, theirs)]
    how = "one address" if told[0] != told[1] else "one user and password"
    return f"{ADDRESS} is {told[0]}, {ITS_ADDRESS} is {told[1]}: set both to {how}"


def _fail(url: str, error: Exception) -> NoReturn:
    """Turns a client's error into ours."""
    emulator = os.environ.get(ADDRESS, "")
    message, hint = (str(error) or type(error).__name__).replace(emulator, without_user(emulator)), ""
    if unreached := _unreached(error):
        host, why = unreached
        parted = _parted() if emulator and ITS_ADDRESS in os.environ else ""  # else the one is made of the other
        message, hint = f"{host} can't be reached: {why}", f"; is this machine online?{parted and ' '}{parted}"
    if isinstance(error, exceptions.Forbidden | exceptions.Unauthorized) or message.startswith("PERMISSION_DENIED"):
        hint = "; grant the account roles/storage.objectUser on the bucket (objectViewer is enough to read)"
    if HELD.search(message):  # whatever the account may do
        hint = "; what is written grows, and is moved: choose a bucket, or a folder, in which objects may be deleted"
    raise UnreachedError(f"{url}: {message.splitlines()[0].partition(' [http_')[0]}{hint}") from error


class Bucket(Store):
    """A folder of a bucket: the objects whose names begin with it."""

    at_a_time = 16
    held_bytes = MAX_REQUESTS * MAX_REQUEST_BYTES
    stages = True

    def __init__(self, url: str):
        super().__init__(url)
        _, _, rest = url.partition("//")
        self.bucket, _, self.folder = rest.partition("/")
        if not self.bucket:
            raise StorageError("gs:// names no bucket; it should be gs://bucket/folder")
        try:
            ts.KvStore.Spec({"driver": "gcs", "bucket": self.bucket})
        except ValueError as e:
            raise StorageError(f"{url}: {self.bucket} can't be a bucket's name; {NAMING}") from e
        if self.folder and not {"", ".", ".."}.isdisjoint(self.folder.split("/")):
            raise StorageError(f"{url}: has an empty part, or a dot for one; buckets don't resolve them")

    @property
    def _prefix(self) -> str:
        return f"{self.folder}/" if self.folder else ""

    def _blob(self, name: str) -> storage.Blob:
        return _client().bucket(self.bucket).blob(f"{self._prefix}{name}")

    @contextlib.contextmanager
    def _translate_errors(self, name: str = "") -> Iterator[None]:
        """Turns the clients' errors into ours, and what they raise of an answer that is none, such as a proxy's page."""
        try:
            yield
        except (FileNotFoundError, StorageError):
            raise
        except (AttributeError, TypeError, LookupError) as e:
            raise StorageError(
                f"{self.path(name) if name else self.url}: what came is no answer of a bucket's ({type(e).__name__}); "
                "is a proxy, or a page to log in, between?"
            ) from e
        except (
            exceptions.GoogleAPICallError,
            exceptions.RetryError,
            DataCorruption,
            RequestException,
            GoogleAuthError,
            ValueError,
            OSError,
        ) as e:
            _fail(self.path(name) if name else self.url, e)

    def check_readable(self) -> None:
        with self._translate_errors():
            try:
                pages = _client().list_blobs(
                    self.bucket, prefix=self._prefix, max_results=1, fields=FIELDS, timeout=TIMEOUT, retry=RETRY
                )
                found = next(iter(pages), None)
            except exceptions.NotFound as e:
                raise StorageError(f"{self.url}: no such bucket") from e
        if found is None:
            raise StorageError(f"{self.url}: no objects there")
        self.check_reached(found.name.removeprefix(self._prefix))

    def check_reached(self, name: str) -> None:
        if (seen := (self.bucket, "read", _settle())) in _MET:
            return
        self._ask_tensorstore(
            "read", lambda store: store.read(name, byte_range=slice(0, 0)), lambda read: read.state == "value"
        )
        _MET.add(seen)

    def check_writable(self) -> None:
        """Makes sure that the folder can be written; and, once in a process, that each of the two clients reads what the
        other one writes.
        """
        self._open_tensorstore()
        name, ours, theirs = f"{PROBE}.{uuid.uuid4().hex}", b"Google's client", b"TensorStore"
        try:
            self.write(name, ours)
            if (seen := (self.bucket, "written", _settle())) not in _MET:
                self._ask_tensorstore("read", lambda store: store.read(name), lambda read: read.value == ours)
                self._ask_tensorstore(
                    "write", lambda store: store.write(name, theirs), lambda _: self.read(name) == theirs
                )
                _MET.add(seen)
        finally:
            self.delete(name)

    def _open_tensorstore(self) -> ts.KvStore:
        """What TensorStore takes for this folder; asks nobody. Raises StorageError where no folder of a bucket can have
        such a name.
        """
        try:
            return ts.KvStore.open(self.kvstore(), context=ts.Context(LOOK)).result()
        except ValueError as e:
            raise StorageError(f"{self.url}: no such name can be written in a bucket, says TensorStore") from e

    def _ask_tensorstore(
        self, what: str, ask: Callable[[ts.KvStore], ts.Future], is_right: Callable[[Any], bool]
    ) -> None:
        """Makes sure that TensorStore, which moves the bytes, gets to where Google's client just was.

        Args:
          what: it should do, in a word.
          ask: does that.
          is_right: whether such an answer is the one that Google's client would have got.

        Raises:
          StorageError: it doesn't, within 20 seconds; with what may help.
        """
        store = self._open_tensorstore()
        try:
            if is_right(_result(ask(store), UNREACHED_SECONDS)):
                return
            why = "it was answered, but as if by another store"
        except TimeoutError:
            why = f"no answer in {UNREACHED_SECONDS:.0f} s"
        except ValueError as e:
            why = str(e).splitlines()[0].partition(" [")[0].rpartition(" attempts failed: ")[2]
        raise StorageError(
            f"{self.url}: Google's client gets there, but TensorStore, which moves the bytes, can't {what} there: {why}; {_remedy()}"
        )

    def _list(self, prefix: str, recursive: bool, pattern: str | None = None) -> tuple[list[File], set[str]]:
        with self._translate_errors():
            try:
                found: Any = _client().list_blobs(
                    self.bucket,
                    prefix=f"{self._prefix}{prefix}",
                    delimiter=None if recursive else "/",
                    match_glob=pattern,
                    fields=FIELDS,
                    timeout=TIMEOUT,
                    retry=RETRY,
                    page_size=1000,
                )
                files = [self._file(blob) for blob in found if not blob.name.endswith("/")]
            except exceptions.NotFound as e:
                raise StorageError(f"gs://{self.bucket}: no such bucket") from e
        return sorted(files, key=lambda file: file.name), set(found.prefixes)

    def _file(self, blob: Any) -> File:
        updated = blob.updated.timestamp() if blob.updated else 0.0
        original = (blob.metadata or {}).get(ORIGINAL, "")
        return File(
            blob.name.removeprefix(self._prefix),
            blob.size or 0,
            str(blob.generation),
            updated,
            crc32c=blob.crc32c,
            original=original,
        )

    def list(self, prefix: str = "", recursive: bool = True) -> list[File]:
        return self._list(prefix, recursive)[0]

    def below(self, names: Sequence[str]) -> list[File]:
        # cloud.google.com/storage/docs/json_api/v1/objects/list, matchGlob
        escaped = re.sub(r"[\\*?\[\]{},]", r"\\\g<0>", self._prefix)
        return self._list("", True, f"{escaped}*/{{{','.join(names)}}}")[0]

    def folders(self) -> Sequence[str]:
        return sorted(prefix.removeprefix(self._prefix).rstrip("/") for prefix in self._list("", recursive=False)[1])

    def stat(self, name: str) -> File | None:
        with self._translate_errors(name):
            try:
                blob = self._blob(name)
                blob.reload(timeout=TIMEOUT, retry=RETRY)
                return self._file(blob)
            except exceptions.NotFound:
                return None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and stop <= start:
            return b""
        with self._translate_errors(name):
            try:
                last = None if stop is None else stop - 1
                data = self._blob(name).download_as_bytes(
                    start=start or None, end=last, raw_download=True, checksum=NO_CHECKSUM, timeout=TIMEOUT, retry=RETRY
                )
            except exceptions.RequestRangeNotSatisfiable:
                return b""
            except exceptions.NotFound as e:
                raise FileNotFoundError(2, "no such object", self.path(name)) from e
        if stop is not None and len(data) > stop - start:
            more = f"{len(data):,} bytes came where bytes {start:,} to {stop:,} were asked for"
            raise StorageError(f"{self.path(name)}: {more}; does a proxy leave out the range of a request?")
        return data

    def read_into(self, name: str, ranges: Iterable[ByteRange]) -> int:
        store = ts.KvStore.open(self.kvstore(), context=_context()).result()
        total = 0
        waiting: collections.deque[tuple[Request, ts.Future]] = collections.deque()

        def finish() -> None:
            request, future = waiting[0]
            try:
                found = _result(future, MAX_REQUEST_SECONDS)
            except Exception as e:
                if not str(e).startswith("OUT_OF_RANGE"):
                    _fail(f"{self.path(name)}: bytes {request.start:,} to {request.stop:,}", e)
                found = None
            if found is None or found.state != "value" or len(found.value) != request.stop - request.start:
                raise StorageError(
                    f"{self.path(name)}: is gone, or ends before byte {request.stop:,}; was it changed after it was planned?"
                )
            request.scatter(request.start, memoryview(found.value))
            waiting.popleft()
            _REQUESTS.release()

        try:
            for request in make_requests(ranges, MAX_REQUEST_BYTES):
                # others have the rest: one's own are what can be waited for
                while not _REQUESTS.acquire(blocking=not waiting):
                    finish()
                waiting.append((request, store.read(name, byte_range=slice(request.start, request.stop))))
                total += request.stop - request.start
            while waiting:
                finish()
        finally:
            if waiting:
                _REQUESTS.release(len(waiting))
        return total

    def write(self, name: str, data: bytes) -> None:
        self._upload(name, data, None)

    def create(self, name: str, data: bytes) -> bool:
        return self._upload(name, data, 0) is not None

    def replace(self, name: str, data: bytes, version: str | None) -> str | None:
        """Writes an object whole if it is still of that version (None: if there is none); returns its new version, or
        None where it isn't.
        """
        written = self._upload(name, data, int(version or 0))
        return written.version if written else None

    def write_over(self, name: str, data: bytes, before: File | None) -> bool:
        return self.replace(name, data, before.version if before else None) is not None

    def now(self) -> float:
        """The time by the bucket's clock, in seconds since 1970: when an object was made, which is deleted again."""
        name = f"{PROBE}.{uuid.uuid4().hex}"  # nobody else's
        written = self._upload(name, b"", None)
        self.delete(name)
        return written.updated if written else 0.0

    def _upload(self, name: str, data: bytes, generation: int | None) -> File | None:
        """Writes an object whole; only over that generation, if one is named. Returns it, or None where there was
        another.
        """
        with self._translate_errors(name):
            blob = self._blob(name)
            blob.metadata = {"attempt": uuid.uuid4().hex}
            try:
                blob.upload_from_string(
                    data,
                    content_type="application/octet-stream",
                    if_generation_match=generation,
                    checksum="crc32c",
                    timeout=TIMEOUT,
                    retry=RETRY,
                )
            except exceptions.PreconditionFailed:
                found = _client().bucket(self.bucket).get_blob(blob.name, timeout=TIMEOUT, retry=RETRY)
                if found is None or (found.metadata or {}).get("attempt") != blob.metadata["attempt"]:
                    return None
                return self._file(found)  # it is ours: the first attempt succeeded, and its answer was lost
            except exceptions.NotFound as e:
                if generation:
                    return None
                raise StorageError(f"gs://{self.bucket}: no such bucket") from e
            return self._file(blob)

    def compose(self, name: str, components: Sequence[str]) -> None:
        """Has the store make an object of others, at most 32, one behind the other.

        Raises:
          FileNotFoundError: one of them is gone.
        """
        with self._translate_errors(name):
            try:
                self._blob(name).compose([self._blob(each) for each in components], timeout=TIMEOUT, retry=RETRY)
            except exceptions.NotFound as e:
                raise FileNotFoundError(2, "no such object", str(e)) from e

    def copy(self, source: Store, file: File) -> None:
        self._copy(source, file, None)

    def copy_new(self, source: Store, file: File) -> None:
        self._copy(source, file, 0)

    def _copy(self, source: Store, file: File, generation: int | None) -> None:
        """Copies a file; only over that generation, if one is named."""
        with self._translate_errors(file.name):
            try:
                if isinstance(source, Bucket):
                    self._rewrite(source, file, generation)
                else:
                    self._stream(source, file, generation)
            except exceptions.NotFound as e:
                raise StorageError(
                    f"{source.path(file.name)}: is gone, or there is no bucket gs://{self.bucket}"
                ) from e
            except exceptions.PreconditionFailed as e:
                there = None if generation is None else self.stat(file.name)
                if there is None:
                    raise StorageError(f"{source.path(file.name)}: is another one by now") from e
                if not there.is_copy_of(file):  # else an answer was lost
                    raise StorageError(f"{self.path(file.name)}: somebody has put it there; move it away") from e

    def _rewrite(self, source: Bucket, file: File, generation: int | None) -> None:
        """Has the store copy an object, if it is still of that version."""
        blob, original, token = self._blob(file.name), source._blob(file.name), None
        while True:
            token, _, _ = blob.rewrite(
                original, token=token, if_generation_match=generation, if_source_generation_match=int(file.version),
                timeout=TIMEOUT, retry=RETRY,
            )  # fmt: skip
            if token is None:
                return

    def _stream(self, source: Store, file: File, generation: int | None) -> None:
        """Uploads a file of another kind of store."""
        blob, summed = self._blob(file.name), google_crc32c.Checksum()
        blob.metadata = {ORIGINAL: file.version}
        try:
            opened: Any = blob.open(
                "wb", chunk_size=PIECE, if_generation_match=generation, timeout=TIMEOUT, retry=RETRY
            )
            with opened as upload:
                for piece in stretches(source, file.name, file.size, file.sha256):
                    summed.update(piece)
                    upload.write(piece)
        except InvalidResponse as e:  # whose own text may show the upload's address, which is signed
            raise exceptions.from_http_status(e.response.status_code, e.response.reason or "refused") from None
        blob.reload(timeout=TIMEOUT, retry=RETRY)
        if blob.crc32c != as_base64(summed):
            if (blob.metadata or {}).get(ORIGINAL) == file.version:  # else somebody has written over it
                self.delete(file.name, str(blob.generation))
            raise StorageError(f"{self.path(file.name)}: what is there isn't what was sent")

    def delete(self, name: str, version: str | None = None) -> None:
        """Deletes an object; only that version of it, if one is named."""
        with self._translate_errors(name), contextlib.suppress(exceptions.NotFound, exceptions.PreconditionFailed):
            self._blob(name).delete(
                if_generation_match=None if version is None else int(version), timeout=TIMEOUT, retry=RETRY
            )

    def copy_over(self, source: Store, file: File, there: File) -> None:
        """Does what `copy` does, over the file that is known to have the copy's name.

        Raises:
          StorageError: another one has it by now; or see `copy`.
        """
        self._copy(source, file, int(there.version))

    def delete_folder(self, name: str = "") -> None:
        self.delete_all(self.list(f"{name}/" if name else ""))

    def delete_all(self, files: Iterable[File]) -> None:
        """Deletes objects that were listed; one that was written anew since stays."""
        with concurrent.futures.ThreadPoolExecutor(self.at_a_time) as pool:
            list(pool.map(lambda file: self.delete(file.name, file.version), files))

    def copy_all(self, source: Bucket, files: Iterable[File]) -> None:
        """Has the store copy objects that were listed in another folder, as `copy_new` does.

        Raises:
          StorageError: one of them is gone, or was written anew since; or can't be copied there.
        """
        with concurrent.futures.ThreadPoolExecutor(self.at_a_time) as pool:
            list(pool.map(functools.partial(self.copy_new, source), files))

    def kvstore(self) -> dict[str, Any]:
        _client()  # without credentials TensorStore would look for them without end
        _settle()
        return {"driver": "gcs", "bucket": self.bucket, "path": self._prefix}
