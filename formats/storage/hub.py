"""Repositories of the Hugging Face hub, read at one commit, in ranges.

What the hub's cache on this machine holds of that commit is read from there, and with `HF_HUB_OFFLINE=1` nothing else
is.

A file's URL is resolved once in each process, to where its bytes lie; that address is signed, needs no token, and is
asked for anew when it has expired, or its host can't be reached. So a hub sees one request a file, and its token goes
nowhere else.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

import httpx2
import tenacity
from huggingface_hub import HfApi, ModelInfo, RepoFile, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, parse_ratelimit_headers

from weightbeam.formats.storage import hub_cache, patience
from weightbeam.formats.storage.identity import is_other, was_touched
from weightbeam.formats.storage.local import LocalFolder
from weightbeam.formats.storage.store import (
    ByteRange,
    File,
    Request,
    StorageError,
    Store,
    Trouble,
    UnreachedError,
    make_requests,
    reason,
    repo_of,
)
from weightbeam.formats.storage.token import token
from weightbeam.formats.text.printable import printable, without_user

LOG_IN = "log in with `hf auth login`"  # which keeps a token where this reads it
COMMIT = re.compile(r"[0-9a-f]{40}")
DOTS = re.compile(r"(^|/)\.\.?(/|$)")  # in a revision: clients take them for another address
CONNECT, STALL_SECONDS = 10.0, 30.0  # seconds to connect, and between two pieces of an answer
ANSWER_SECONDS = 300.0  # the same where something is published: the hub makes a commit before it answers
AGAIN = (408, 429, 500, 502, 503, 504)  # answers after which a request is made again
ATTEMPTS = 8  # in a row, without a byte of progress
FIRST_ATTEMPTS = 4  # at the first request of all: who is offline is told so in seconds
BACKOFF = 0.5  # seconds; doubled before each attempt
NO_REVISION = "no such revision"  # of messages, by which a watcher knows that a commit is gone
MAX_REQUEST_SECONDS = 3600.0  # seconds for one request, and for attempts in a row
MAX_REQUEST_BYTES = 16 << 20  # bytes of a request
CONNECTIONS = 16  # of this process
DESCRIBED = 1000  # files that a description of a repository lists for certain
PORTS = {"http": 80, "https": 443}
OURS = "weightbeam"  # as the hub's client names us in each request
MAX_PAGES = 10_000  # of one list of the hub's: a longer one never ends
MAX_SAID = 300  # characters of what it says of an error
MAX_ANSWER = 32 << 20  # bytes of one answer; what the hub says of 10,000 files has 5 MB
P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def _silence() -> None:
    """What the clients have to say shows signed addresses."""
    for logger in ("huggingface_hub", "httpx2", "httpcore2"):
        logging.getLogger(logger).setLevel(logging.ERROR)


class NoRepositoryError(UnreachedError):
    """There is no such repository, or no such revision of it, as far as we may see."""


def open_repository(url: str) -> Repository:
    """`hf://organisation/model`, `@` a branch, tag or commit; the revision is resolved to a commit.

    Raises:
      NoRepositoryError: the hub has no such thing.
      StorageError: it can't be reached, or doesn't let us.
    """
    repo, revision = repo_of(url)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo) or DOTS.search(revision):
        raise StorageError(f"{url}: should be hf://organisation/model, with @revision for another than main")
    if COMMIT.fullmatch(revision):
        return Repository(url)
    if hub_cache.is_offline():
        return Repository(f"hf://{repo}@{_cached_commit(url, repo, revision or 'main')}")
    return Repository(f"hf://{repo}@{_ask(repo, revision or None, url).commit}")


def _cached_commit(url: str, repo: str, revision: str) -> str:
    """The commit of a branch or tag, by the cache. Raises StorageError where it doesn't know."""
    if commit := hub_cache.commit_of(repo, revision):
        return commit
    raise StorageError(
        f"{url}: HF_HUB_OFFLINE is set, and {hub_cache.root()} doesn't know {revision} of this repository; without it the hub is asked"
    )


class Repository(Store):
    """A repository at a commit; read only."""

    def __init__(self, url: str):
        super().__init__(url)
        _silence()
        self.repo, self.commit = repo_of(url)

    def check_readable(self) -> None:
        if hub_cache.is_offline():
            if hub_cache.snapshot(self.repo, self.commit) is None:
                raise StorageError(
                    f"{self.url}: HF_HUB_OFFLINE is set, and {hub_cache.root()} has no snapshot of this commit"
                )
            return
        if self._known().gated and any(file.name.endswith((".json", ".safetensors")) for file in self.fetched()):
            with hub_errors(self.url, self.repo):
                retried(api().auth_check)(self.repo)

    def files(self) -> dict[str, File]:
        """Everything in the repository, by name; offline, what the cache holds of it."""
        if hub_cache.is_offline():
            cached = hub_cache.snapshot(self.repo, self.commit)
            names = [file.name for file in cached.list()] if cached else []
            return {name: file for name in names if cached and (file := hub_cache.file_of(cached, name))}
        return {name: self._cached(name)[1] or file for name, file in self._known().files.items()}

    def _known(self) -> Known:
        """What the hub says of it."""
        return _KNOWN.get((self.repo, self.commit)) or _ask(self.repo, self.commit, self.url)

    def fetched(self) -> list[File]:
        """The files that the hub's cache on this machine doesn't hold, so that reading them fetches them."""
        return [file for file in self.files().values() if not file.inode]

    def list(self, prefix: str = "", recursive: bool = True) -> list[File]:
        files = sorted(self.files().items())
        return [
            file
            for name, file in files
            if name.startswith(prefix) and (recursive or "/" not in name.removeprefix(prefix))
        ]

    def stat(self, name: str) -> File | None:
        return self._cached(name)[1] or (None if hub_cache.is_offline() else self._known().files.get(name))

    def _cached(self, name: str) -> tuple[LocalFolder, File] | tuple[None, None]:
        """The snapshot in the cache, and the file as it lies there, if it is what the hub knows: of the same size, and
        under its hash. Of one that is replaced there the inode is another one. The hub isn't asked where there is none.
        """
        cached = hub_cache.snapshot(self.repo, self.commit)
        if cached is None or (found := hub_cache.file_of(cached, name)) is None:
            return None, None
        known = found if hub_cache.is_offline() else self._known().files.get(name)
        is_same = known is not None and (known.size, known.version) == (found.size, found.version)
        return (cached, found) if is_same else (None, None)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if (file := self.stat(name)) is None:
            raise FileNotFoundError(2, "no such file", self.path(name))
        stop = file.size if stop is None else min(stop, file.size)
        is_whole = (start, stop) == (0, file.size)
        if is_whole and (cached := self._cached(name)[0]):
            return hub_cache.read_whole(cached, name)
        buffer = bytearray(max(0, stop - start))
        self.read_into(name, [(start, memoryview(buffer))] if buffer else [])
        data = bytes(buffer)
        if is_whole and hub_cache.HASH.fullmatch(file.version) and not hub_cache.has_hash(data, file.version):
            kind = "sha256" if file.sha256 else "hash in git"
            raise StorageError(f"{self.path(name)}: its {kind} isn't {file.version}, what came is damaged")
        return data

    def read_known(self, file: File, start: int = 0, stop: int | None = None) -> bytes:
        data, now = self.read(file.name, start, stop), self.stat(file.name)
        if now and (is_other(file, now) or was_touched(file, now)):
            raise StorageError(f"{self.path(file.name)}: was replaced in {hub_cache.root()} since it was listed")
        return data

    def read_checked(self, name: str, ranges: Iterable[ByteRange], check: Callable[[File], None]) -> int:
        cached, found = self._cached(name)
        if cached is None or found is None:
            return self.read_into(name, ranges)
        version = found.version
        return cached.read_checked(name, ranges, lambda opened: check(dataclasses.replace(opened, version=version)))

    def read_into(self, name: str, ranges: Iterable[ByteRange]) -> int:
        if cached := self._cached(name)[0]:
            return cached.read_into(name, ranges)
        if hub_cache.is_offline():
            raise StorageError(f"{self.path(name)}: HF_HUB_OFFLINE is set, and the file isn't in {hub_cache.root()}")
        wanted = list(make_requests(ranges, MAX_REQUEST_BYTES))
        ended = threading.Event()
        futures = [_pool().submit(self._fetch, name, request, ended) for request in wanted]
        try:
            for future in futures:
                future.result()
        except Exception:  # nobody writes into the buffers any more; who is stopped doesn't wait for that
            ended.set()
            concurrent.futures.wait([future for future in futures if not future.cancel()])
            raise
        finally:
            ended.set()
            for future in futures:
                future.cancel()
        return sum(request.stop - request.start for request in wanted)

    def _fetch(self, name: str, request: Request, ended: threading.Event) -> None:
        """Fetches one stretch, going on where a connection broke, until someone says that it is of no use any more."""
        done, latest = request.start, time.monotonic() + MAX_REQUEST_SECONDS
        again = _retrying(ended)
        while not ended.is_set():
            with hub_errors(f"{self.path(name)}: at byte {done:,}", self.repo):
                try:
                    done = again(self._go_on, name, request, done, ended, latest)
                except EntryNotFoundError:
                    raise StorageError(f"{self.path(name)}: no such file") from None
            if done >= request.stop:
                return
            ended.wait(BACKOFF)

    def _go_on(self, name: str, request: Request, start: int, ended: threading.Event, latest: float) -> int:
        """Fetches from `start` on; returns how far it came, and raises an error that may pass only if nothing came."""
        done = start
        if ended.is_set():  # while the next attempt was waited for
            raise StorageError(f"{self.path(name)}: at byte {done:,}: given up")
        try:
            with self._open(name, start, request.stop) as answer:
                for data in answer.iter_raw():
                    if ended.is_set() or time.monotonic() > latest:
                        raise StorageError(
                            f"{self.path(name)}: at byte {done:,}: given up after {MAX_REQUEST_SECONDS:,.0f} s, the connection is too slow"
                        )
                    request.scatter(done, memoryview(data)[: request.stop - done])
                    done += len(data)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            _locations.forget(self.repo, self.commit, name)  # the host is away, and the file may be elsewhere by now
            raise
        except httpx2.TransportError:
            if done == start:
                raise
        if done == start:
            raise httpx2.RemoteProtocolError("the answer was empty")
        return done

    @contextlib.contextmanager
    def _open(self, name: str, start: int, stop: int) -> Iterator[httpx2.Response]:
        """The answer that brings these bytes; where a file lies is asked again, once, when a signature has expired or the
        repository was renamed.
        """
        for renewed in (False, True):
            location, headers = _locations(self.repo, self.commit, name)
            wanted = headers | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
            with get_session().stream(
                "GET",
                location,
                headers=wanted,
                timeout=httpx2.Timeout(STALL_SECONDS, connect=CONNECT),
                follow_redirects=False,
            ) as answer:
                if (answer.is_redirect or answer.status_code in (401, 403)) and not renewed:
                    _locations.forget(self.repo, self.commit, name, location)
                    continue
                if (coded := answer.headers.get("Content-Encoding", "identity")) != "identity":
                    raise StorageError(
                        f"{self.path(name)}: was sent as {coded}, though its bytes as they are were asked for"
                    )
                if answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                    yield answer
                    return
                if answer.status_code == 416:
                    raise StorageError(
                        f"{self.path(name)}: ends before byte {start + 1:,}, and should have {stop:,} at least; it is damaged on the hub"
                    )
                hf_raise_for_status(answer)
                raise StorageError(
                    f"{self.path(name)}: asked for bytes {start:,} to {stop:,}, was answered {answer.status_code} with others"
                )


class _Locations:
    """Where the bytes of files lie: for each the address, and the headers that it needs.

    Raises:
      ValueError: the hub redirects to what is no address, or to one that names a user, whom the client would log in as.
    """

    def __init__(self) -> None:
        self._locks: defaultdict[tuple[str, str, str], threading.Lock] = defaultdict(threading.Lock)
        self._found: dict[tuple[str, str, str], str] = {}

    def __call__(self, repo: str, commit: str, name: str) -> tuple[str, dict[str, str]]:
        key = (repo, commit, name)
        with self._locks[key]:  # the others wait for an address rather than ask for it too
            if key not in self._found:
                url = hf_hub_url(repo, name, revision=commit, endpoint=_endpoint())
                self._found[key] = get_hf_file_metadata(
                    url, token=token() or False, timeout=STALL_SECONDS, endpoint=_endpoint(), library_name=OURS
                ).location
            location = self._found[key]
        place = urlsplit(location)
        if place.username is not None and place.netloc != urlsplit(_endpoint()).netloc:
            raise ValueError(f"a file that lies at {place.hostname}, for a user of that host")
        return location, build_hf_headers(token=token() or False if _is_endpoint(location) else False)

    def forget(self, repo: str, commit: str, name: str, location: str | None = None) -> None:
        """Asks anew next time, unless someone has done so already: it isn't `location` any more."""
        with self._locks[repo, commit, name]:
            if location in (None, self._found.get((repo, commit, name))):
                self._found.pop((repo, commit, name), None)


_locations = _Locations()


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(CONNECTIONS, "hub")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


def _is_endpoint(url: str) -> bool:
    """Whether an address is the hub's, whom its token is for; the same host's by TLS is, too."""
    hub, there = (urlsplit(each) for each in (_endpoint(), url))
    ports = [each.port or PORTS.get(each.scheme) for each in (hub, there)]
    is_same = hub.scheme == there.scheme and ports[0] == ports[1]
    return hub.hostname == there.hostname and (is_same or ports == [*PORTS.values()])


def told_endpoint() -> str:
    """The hub's address as people are told it."""
    return without_user(_endpoint())


def api() -> HfApi:
    """The hub's interface, as us."""
    _silence()
    return HfApi(endpoint=_endpoint(), token=token() or False, library_name=OURS)


def is_passing(error: BaseException) -> bool:
    """Whether a request that failed so may succeed when it is repeated."""
    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code in AGAIN
    return isinstance(error, httpx2.TransportError) and not isinstance(error, httpx2.UnsupportedProtocol)


def wait(state: tenacity.RetryCallState) -> float:
    """Seconds before the next attempt: what the hub asks for, else more each time."""
    error = state.outcome.exception() if state.outcome else None
    answer = error.response if isinstance(error, HfHubHTTPError) else None
    if answer is not None and (asked := _asked_pause(answer)) is not None:
        return max(BACKOFF, asked)
    return min(30.0, BACKOFF * 2**state.attempt_number)


def _asked_pause(answer: httpx2.Response) -> float | None:
    """Seconds before the next request that a hub asks for; None where it doesn't."""
    if (asked := answer.headers.get("Retry-After", "")).isdecimal():
        return float(asked)
    limit = parse_ratelimit_headers(answer.headers) if answer.status_code == 429 else None
    return float(limit.reset_in_seconds) if limit and limit.remaining == 0 else None


class _Bounded(httpx2.SyncByteStream):
    """An answer's bytes, as many and in such a time as one can mean."""

    def __init__(self, stream: httpx2.SyncByteStream):
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        left, latest = MAX_ANSWER, time.monotonic() + ANSWER_SECONDS
        for data in self._stream:
            if (left := left - len(data)) < 0:
                raise ValueError(f"an answer of more than {MAX_ANSWER:,} bytes")
            if time.monotonic() > latest:
                raise ValueError(f"an answer that wasn't over after {ANSWER_SECONDS:,.0f} s")
            yield data

    def close(self) -> None:
        self._stream.close()


def _look_at(answer: httpx2.Response) -> None:
    """Looks at each answer that huggingface_hub gets, which waits by itself as long as it is asked to, without a word.

    Raises:
      HfHubHTTPError: the pause that is asked for is longer than we wait.
      ValueError: what our question was answered with is packed: it may be larger than any memory.
    """
    if getattr(_PAGES, "left", None) is not None:
        if (coded := answer.headers.get("Content-Encoding", "identity")) != "identity":
            raise ValueError(f"an answer that is {coded}, though it was asked for as it is")
        if isinstance(answer.stream, httpx2.SyncByteStream):
            answer.stream = _Bounded(answer.stream)
    if answer.status_code not in AGAIN or (pause := _asked_pause(answer)) is None:
        return
    if pause > MAX_REQUEST_SECONDS:
        answer.read()
        hf_raise_for_status(answer)
    _TROUBLE.note(answer.url.host, f"it answered {answer.status_code}", pause)


def _bound(request: httpx2.Request) -> None:
    """Gives a request of huggingface_hub a time-out that has none, and a list of the hub's an end. Asks without our token
    where a file lies at another host. Raises ValueError where a list has too many pages, or another answer names such a
    host, to which its client would send the token.
    """
    is_ours = OURS in request.headers.get("User-Agent", "")  # anyone's requests go this way
    if is_ours and "Authorization" in request.headers and request.url.host and not _is_endpoint(str(request.url)):
        if request.method != "HEAD":
            raise ValueError(
                f"an answer that names {request.url.host}, where its client would send the token for the hub"
            )
        del request.headers["Authorization"]  # such as a mirror's, whose files lie at another hub
    if (left := getattr(_PAGES, "left", None)) is not None:
        request.headers["Accept-Encoding"] = "identity"
        _PAGES.left = left - (request.method == "GET")
        if not left:
            raise ValueError(f"a list of more than {MAX_PAGES:,} pages")
    if (request.extensions.get("timeout") or {}).get("read") is None:
        request.extensions = {
            **request.extensions,
            "timeout": httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT).as_dict(),
        }


def _watch_session(_: object = None) -> None:
    """Has each request and answer of huggingface_hub's client looked at. The client is another one after a failure, and
    anyone's in this process.
    """
    session = get_session()
    hooks = session.event_hooks
    if _look_at not in hooks["response"]:
        session.event_hooks = {"request": [*hooks["request"], _bound], "response": [*hooks["response"], _look_at]}


def _is_over(state: tenacity.RetryCallState, attempts: int) -> bool:
    """Whether to give up. A hub that says when to come again is obeyed however often, as long as that is soon enough."""
    if (
        state.upcoming_sleep > patience.left()
        or (state.seconds_since_start or 0.0) + state.upcoming_sleep > MAX_REQUEST_SECONDS
    ):
        return True
    error = state.outcome.exception() if state.outcome else None
    limited = isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code == 429
    return state.attempt_number >= attempts and not limited


_TROUBLE = Trouble()


def _retrying(ended: threading.Event | None = None, attempts: int = ATTEMPTS) -> tenacity.Retrying:
    """Repeats what may pass, until `ended` is set."""
    ended = ended or threading.Event()

    def stop(state: tenacity.RetryCallState) -> bool:
        return ended.is_set() or _is_over(state, attempts)

    def note(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        answer = getattr(error, "response", None)  # the error's own text may have an address that is signed
        why = f"it answered {answer.status_code}" if answer is not None else type(error).__name__
        _TROUBLE.note(_host_of(error), why, state.upcoming_sleep)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_passing),
        wait=wait,
        stop=stop,
        before=_watch_session,
        sleep=tenacity.sleep_using_event(ended),
        before_sleep=note,
        reraise=True,
    )


def _host_of(error: BaseException | None) -> str:
    """Who was asked in vain: the hub, or the host that it redirects to."""
    try:
        asked = urlsplit(str(error.request.url)) if isinstance(error, httpx2.HTTPError) else None
    except RuntimeError:  # the error knows no request
        asked = None
    return asked.hostname if asked and asked.hostname and not _is_endpoint(asked.geturl()) else told_endpoint()


_PAGES = threading.local()  # `left`: how many pages a question of this thread to the hub may still ask for


def retried(ask: Callable[P, T], attempts: int = ATTEMPTS) -> Callable[P, T]:
    """Decorates a function that asks the hub: it is called again where that may help."""

    def asked(*arguments: P.args, **keywords: P.kwargs) -> T:
        before, _PAGES.left = getattr(_PAGES, "left", None), MAX_PAGES
        try:
            return ask(*arguments, **keywords)
        finally:
            _PAGES.left = before

    return _retrying(attempts=attempts).wraps(functools.wraps(ask)(asked))


# what the hub's client raises of an answer that has no JSON, lacks something, or has something else in its place, such as
# the page of a proxy
NO_ANSWER = (
    json.JSONDecodeError, LookupError, TypeError, AttributeError, NameError, RecursionError, httpx2.InvalidURL,
)  # fmt: skip


def no_answer(error: Exception) -> str:
    """What to say of such an answer."""
    about = f"{type(error).__name__}: {str(error)[:200]}"
    return (
        f"what came of {told_endpoint()} is no answer of the hub's ({about}); is a proxy, or a page to log in, between?"
    )


def answered(answer: httpx2.Response) -> str:
    """What to say of an answer that is an error."""
    pause = _asked_pause(answer) or 0.0
    when = f", and asks for a pause of {pause:,.0f} s" if pause > MAX_REQUEST_SECONDS else ""
    return f"the hub answered {answer.status_code} {answer.reason_phrase}".rstrip() + when


class Known(NamedTuple):
    """What the hub said of a repository at a commit, which doesn't change.

    Attributes:
      commit: its 40 hexadecimal digits.
      gated: whether it is read by those alone who have accepted its terms.
      files: all of them, by name.
    """

    commit: str
    gated: bool
    files: dict[str, File]


_KNOWN: dict[tuple[str, str], Known] = {}
MAX_KNOWN = 64  # commits of which that is kept: it may be megabytes, and a watcher sees new ones for months


def _ask(repo: str, revision: str | None, url: str) -> Known:
    """Asks the hub, and keeps what it says; of the oldest commits that is forgotten, and asked for anew if need be."""
    with hub_errors(url, repo):
        found = describe(api(), repo, revision, FIRST_ATTEMPTS)
    commit, files = found.sha or "", dict[str, File]()
    for file in found.siblings or []:
        sha256 = file.lfs.sha256 if file.lfs else None
        files[file.rfilename] = File(file.rfilename, file.size or 0, sha256 or file.blob_id or commit, sha256=sha256)
    known = _KNOWN[repo, commit] = Known(commit, bool(found.gated), files)
    for old in list(_KNOWN)[:-MAX_KNOWN]:
        _KNOWN.pop(old, None)  # another thread may have done so
    return known


def describe(hub: HfApi, repo: str, revision: str | None, attempts: int = ATTEMPTS) -> ModelInfo:
    """What a hub says of a repository at a commit, with all of its files: where they are many, its description may lack
    some (huggingface/huggingface_hub, src/huggingface_hub/_snapshot_download.py, 2.4.0), and they are listed apart.

    Raises:
      HfHubHTTPError, httpx2.HTTPError: the hub can't be asked, or refuses.
      ValueError: its answer is none.
    """
    found = retried(hub.model_info, attempts)(repo, revision=revision, files_metadata=True, timeout=STALL_SECONDS)
    check_form(found)
    if not 0 < len(found.siblings or []) < DESCRIBED:
        try:
            found.siblings = retried(_list_files, attempts)(hub, repo, found.sha)
        except EntryNotFoundError:
            if found.siblings:
                raise
        check_form(found)
    return found


def name_now(repo: str, attempts: int = ATTEMPTS) -> str:
    """The `owner/name` of a repository: one that was renamed is found by its former names, too. As given where there is
    none.

    Raises:
      StorageError: the hub can't be asked, or refuses.
    """
    with hub_errors(f"hf://{repo}", repo), contextlib.suppress(RepositoryNotFoundError):
        return retried(api().model_info, attempts)(repo, timeout=STALL_SECONDS).id
    return repo


def _list_files(hub: HfApi, repo: str, commit: str | None) -> list[RepoSibling]:
    listed = hub.list_repo_tree(repo, recursive=True, revision=commit)
    files = [file for file in listed if isinstance(file, RepoFile)]
    return [RepoSibling(file.path, file.size, file.blob_id, file.lfs) for file in files]


def check_form(info: ModelInfo) -> None:
    """Raises ValueError for an answer without a commit, or with files whose names, sizes or hashes are none."""
    if not COMMIT.fullmatch(info.sha or ""):
        raise ValueError(f"{info.sha!r} is no commit")
    for file in info.siblings or []:
        texts = (file.rfilename, file.blob_id or "", file.lfs.sha256 if file.lfs else "")
        has_size = file.size is None or (isinstance(file.size, int) and file.size >= 0)
        if not all(isinstance(text, str) for text in texts) or not has_size:
            raise ValueError(f"a file called {file.rfilename!r} of {file.size!r} bytes")


@contextlib.contextmanager
def hub_errors(where: object, repo: str, writing: bool = False) -> Iterator[None]:
    """Context manager: the hub's errors become ours, with what to do; `where` begins the message. They aren't chained:
    they may show signed addresses.

    Raises:
      NoRepositoryError: there is no such repository, or no such revision of it.
      StorageError: the hub can't be asked, or refuses.
    """
    broken_off = RuntimeError if writing else httpx2.StreamError  # an upload has errors of its own
    try:
        yield
    except StorageError:
        raise
    except (httpx2.HTTPError, broken_off, OSError, ValueError, *NO_ANSWER) as e:
        is_none = isinstance(e, RevisionNotFoundError | RepositoryNotFoundError) and not isinstance(e, GatedRepoError)
        message = _explain(e, repo, writing).replace(_endpoint(), told_endpoint())  # in what a client says
        is_name = isinstance(e, HFValidationError)  # of ours, and none
        kind = NoRepositoryError if is_none else StorageError if is_name else UnreachedError
        raise kind(f"{where}: {message}") from None


def _explain(error: Exception, repo: str, writing: bool) -> str:
    """What to say of an error of the hub's client."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # of an upload
        error = error.__cause__
    if denied := _explain_denial(error, repo, writing):
        return denied
    if (answer := getattr(error, "response", None)) is not None:
        return answered(answer) + (f": {said}" if (said := _own_words(error)) else "")
    is_ours = writing or isinstance(error, HFValidationError)  # a model card, a file, a name
    if isinstance(error, NO_ANSWER) or (isinstance(error, ValueError) and not is_ours):
        return no_answer(error)
    if isinstance(error, ValueError):
        return _one_line(str(error)) or "refused"
    if isinstance(error, OSError):  # a file of ours, such as one that someone removed
        return f"{error.filename}: {reason(error)}" if error.filename else reason(error)
    why = str(error) if isinstance(error, httpx2.TransportError) else ""
    message = f"{_endpoint()}, or the host of its files, can't be reached: {why or type(error).__name__}"
    if (commit := hub_cache.commit_of(repo, "main")) and hub_cache.snapshot(repo, commit):
        message += f"; a snapshot of it lies in {hub_cache.root()}, and HF_HUB_OFFLINE=1 reads that"
    return message


def _own_words(error: Exception) -> str:
    """The hub's own reason, such as that a limit is reached; empty where it says none."""
    said = _one_line(getattr(error, "server_message", None) or "").rstrip(". ")
    return "" if said.startswith("<") else said  # a store's XML


def _one_line(text: str) -> str:
    """What a client or a hub says, in one line; of an address neither who asks there, nor what a signed one ends with."""
    words = text[: 2 * MAX_SAID].split()
    if len(text) > 2 * MAX_SAID:  # the last one is cut
        words[-1:] = ["…"]
    words = [re.sub(r"(://[^?#]*)[?#].*", r"\1", re.sub(r"://[^/]*@", "://", word)) for word in words]
    return printable(" ".join(words))


def _explain_denial(error: Exception, repo: str, writing: bool) -> str:
    """What to say where the hub has no such repository, or doesn't let us see it, or write there; else empty."""
    is_known, is_missing = token() is not None, isinstance(error, RepositoryNotFoundError)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401 and is_known and (writing or not is_missing):
        return f"the hub doesn't accept the token that is set; is it wrong, or has it expired? Set another, or {LOG_IN}"
    if writing and status == 401:
        return "HF_TOKEN isn't set; publishing needs a token that may write there"
    if writing and (status == 403 or is_missing):
        also = "; or somebody has just deleted or renamed the repository" if is_missing else ""  # answered the same
        said = _own_words(error)
        why = (
            f"the hub doesn't let us write there: {said}; if that is about the token, it"
            if said
            else "the token that is set may not write there; it"
        )
        return f"{why} needs the role `write`, and its owner access to {repo.partition('/')[0]}{also}"
    if isinstance(error, GatedRepoError):
        todo = (
            "the token that is set has no access yet: is it of that account, and the request granted?"
            if is_known
            else f"then set HF_TOKEN to a token of that account, or {LOG_IN}"
        )
        return f"is gated: request access and accept its terms on {_endpoint()}/{repo}; {todo}"
    if isinstance(error, RevisionNotFoundError):
        return NO_REVISION
    if is_missing:
        unseen = " that the token which is set can't see" if is_known else f": HF_TOKEN isn't set; set it, or {LOG_IN}"
        return f"no such repository, or a private one{unseen}"
    return ""
