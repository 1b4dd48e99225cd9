"""What the test servers share: HTTP/1.1 with faults on demand, and a log of every request."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import email.message
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import traceback
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, cast

from servers.traffic import Entry, Fault, Log

CONTROL = "/_control"  # GET: the log and the faults; POST: sets faults and the server's settings
PIECE = 1 << 18  # bytes that are sent at a time
TESTS = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Call:
    """A request: `path` as it was sent, percent-encoded; `query` decoded."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: email.message.Message
    body: bytes

    def get(self, name: str) -> str | None:
        """A parameter of the query."""
        return self.query.get(name, [None])[-1]


@dataclasses.dataclass
class Reply:
    """An answer.

    Attributes:
      kind: what was asked for, for the log: `read`, `write`, `list`, …
      name: the object or file that it was asked of.
      start: where the body lies in it, bytes.
    """

    status: int
    body: bytes | memoryview = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kind: str = "other"
    name: str = ""
    start: int = 0


def json_reply(
    status: int, content: Any, headers: Mapping[str, str] | None = None, kind: str = "other", name: str = ""
) -> Reply:
    return Reply(
        status,
        json.dumps(content).encode(),
        {"Content-Type": "application/json; charset=UTF-8"} | dict(headers or {}),
        kind,
        name,
    )


def ranged(data: Any, header: str | None) -> tuple[int, int, dict[str, str]] | None:
    """What a `Range` header asks for of `data`: start, stop and the headers to send; None if it lies outside."""
    size = len(data)
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", (header or "").strip())
    if not match or match[0] == "bytes=-":  # as if it weren't there, says RFC 9110
        return 0, size, {}
    first, last = match[1], match[2]
    start, stop = (
        (int(first), min(size, int(last) + 1) if last else size) if first else (max(0, size - int(last)), size)
    )
    if start >= stop:
        return None
    return start, stop, {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}


def media(data: Any, call: Call, headers: Mapping[str, str], name: str) -> Reply:
    """The bytes of an object, or the range of them that was asked for."""
    part = ranged(data, call.headers["Range"])
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"} | dict(headers)
    if part is None:
        return Reply(416, b"", headers | {"Content-Range": f"bytes */{len(data)}"}, "read", name)
    start, stop, more = part
    kind = "stat" if call.method == "HEAD" else "read"
    return Reply(206 if more else 200, memoryview(data)[start:stop], headers | more, kind, name, start)


class Server:
    """An HTTP server in threads of this process, from `with` to its end; subclasses answer.

    Attributes:
      faults: what goes wrong; an empty list heals it. `fail` adds one.
      log: every request, but for those to the control endpoint.
      errors: what the server itself did wrong; the end of `with` raises the first.
    """

    SETTINGS: tuple[str, ...] = ("faults",)  # attributes that the control endpoint sets

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.faults: list[Fault] = []
        self.log = Log()
        self.errors: list[Exception] = []
        self.lock = threading.RLock()
        self.stopped = threading.Event()
        self._http = _Http((host, port), self)
        self.url = f"http://{host}:{self._http.server_port}"

    def answer(self, call: Call) -> Reply:
        """Answers a request.

        Raises:
          NotImplementedError: no such endpoint here.
        """
        raise NotImplementedError

    def refusal(self, fault: Fault) -> Reply:
        """The answer of a fault of the kind `status`."""
        headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
        return json_reply(fault.status, {"error": "fault"}, headers)

    def fail(self, kind: Any, **how: Any) -> Fault:
        """Adds a fault, see there."""
        fault = Fault(kind, **how)
        self.faults = [*self.faults, fault]
        return fault

    def draw(self, call: Call) -> dict[str, Fault]:
        """The faults that happen to a request, by kind."""
        line = f"{call.method} {call.path}?{urllib.parse.urlencode(call.query, doseq=True)}"
        with self.lock:
            return {fault.kind: fault for fault in self.faults if fault.draw(line)}

    def control(self, call: Call) -> Reply:
        """Sets what is sent, says how things are."""
        settings = json.loads(call.body or b"{}")
        if settings.pop("clear", False):
            self.log.clear()
        for name, value in settings.items():
            if name not in self.SETTINGS:
                return json_reply(400, {"error": f"no such setting: {name}"})
            setattr(self, name, [Fault(**fault) for fault in value] if name == "faults" else value)
        state = {name: getattr(self, name) for name in self.SETTINGS} | {
            "faults": [fault.described() for fault in self.faults]
        }
        return json_reply(
            200,
            state
            | {
                "log": [dataclasses.asdict(entry) for entry in list(self.log)],
                "errors": [repr(error) for error in self.errors],
            },
        )

    def start(self) -> None:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Ends all connections, and what is stalled."""
        self.stopped.set()
        self._http.shutdown()
        self._http.server_close()
        self._http.disconnect()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind is None and self.errors:
            raise self.errors[0]


def flipped(data: bytes | memoryview) -> bytes:
    """The same but for a bit in the middle."""
    changed = bytearray(data)
    if changed:
        changed[len(changed) // 2] ^= 1
    return bytes(changed)


class _Http(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def __init__(self, address: tuple[str, int], app: Server) -> None:
        self.app = app
        self.connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def disconnect(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave when they like; that isn't printed."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    @property
    def app(self) -> Server:
        return cast(_Http, self.server).app

    def handle_call(self) -> None:
        app = self.app
        url = urllib.parse.urlsplit(self.path)
        call = Call(
            self.command, url.path, urllib.parse.parse_qs(url.query, keep_blank_values=True), self.headers, self._body()
        )
        if call.path == CONTROL:
            self._send(app.control(call), Entry("control", call.method, "", 200), {})
            return
        faults = app.draw(call)
        if "slow" in faults:
            app.stopped.wait(faults["slow"].seconds)
        if "reset" in faults:
            reply = Reply(0)
        elif "status" in faults:
            reply = app.refusal(faults["status"])
        else:
            reply = self._answer(call)
        if "lost" in faults:
            reply = dataclasses.replace(reply, status=0)
        entry = Entry(
            reply.kind,
            call.method,
            reply.name,
            reply.status,
            reply.start,
            reply.start,
            0,
            len(call.body),
            " ".join(faults),
        )
        app.log.append(entry)
        if reply.status:
            self._send(reply, entry, faults)
        else:
            self._reset()

    def handle_expect_100(self) -> bool:
        """Says at once that the body may come: what is written here is buffered, and libcurl waits a second for it with
        each body above 1 MB.
        """
        super().handle_expect_100()
        self.wfile.flush()
        return True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_call  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """`Server.log` has it."""

    def _answer(self, call: Call) -> Reply:
        try:
            return self.app.answer(call)
        except Exception as e:
            e.add_note(f"{call.method} {self.path}")
            self.app.errors.append(e)
            status = 501 if isinstance(e, NotImplementedError) else 500
            return json_reply(status, {"error": traceback.format_exc()})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            body = self.rfile.read(size := int(self.headers.get("Content-Length") or 0))
            if len(body) < size:
                raise ConnectionError("the client is gone")  # killed, with half of its request sent
            return body
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, reply: Reply, entry: Entry, faults: Mapping[str, Fault]) -> None:
        """Sends a reply, and counts the bytes of its body in `entry`."""
        empty = self.command == "HEAD" or reply.status in (204, 304)
        body = memoryview(b"" if empty else flipped(reply.body) if "flip" in faults else reply.body)
        half = len(body) // 2 if {"cut", "stall"} & set(faults) else 0
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.status not in (204, 304):
            self.send_header("Content-Length", str(len(reply.body)))
        try:
            self.end_headers()
            self._write(body[:half], entry)
            self.wfile.flush()
            if "stall" in faults:
                self.app.stopped.wait(faults["stall"].seconds)
            if "cut" in faults or ("stall" in faults and self._left()):
                self.close_connection = True
            else:
                self._write(body[half:], entry)
                self.wfile.flush()
        except OSError:
            self.close_connection = True

    def _write(self, data: memoryview, entry: Entry) -> None:
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            entry.sent += len(piece)
            entry.stop += len(piece) if entry.kind == "read" else 0
            self.wfile.write(piece)

    def _left(self) -> bool:
        """Whether the client has hung up."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())


# --- in a process of its own ------------------------------------------------------------------------------------------


class Control:
    """A server in another process, by its control endpoint."""

    def __init__(self, url: str) -> None:
        self.url = url

    def set(self, **settings: Any) -> dict[str, Any]:
        """Sets attributes of the server, `faults` as dicts; `clear=True` empties the log. Returns its state."""
        request = urllib.request.Request(self.url + CONTROL, data=json.dumps(settings).encode() if settings else None)
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    @property
    def log(self) -> Log:
        return Log(Entry(**entry) for entry in self.set()["log"])


@contextlib.contextmanager
def process(name: str, *arguments: str) -> Iterator[Control]:
    """Starts `servers/<name>.py` in a process of its own."""
    command = [sys.executable, str(TESTS / "servers" / f"{name}.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield Control(started.stdout.readline().strip())
        finally:
            started.terminate()


def serve(server: Server) -> None:
    """Serves until the process is ended; says where first."""
    print(server.url, flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    made.add_argument("--port", type=int, default=0, help="0 takes a free one")
    return made


Route = tuple[str, str, Callable[..., Reply]]


def route(routes: Iterable[Route], method: str, path: str) -> tuple[Callable[..., Reply], list[str]]:
    """The first function whose method and path pattern fit, and the decoded parts of the path.

    Raises:
      NotImplementedError: none fits.
    """
    for methods, pattern, function in routes:
        if method in methods.split() and (match := re.fullmatch(pattern, path)):
            return function, [urllib.parse.unquote(part or "") for part in match.groups()]
    raise NotImplementedError(f"{method} {path}")
