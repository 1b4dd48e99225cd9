"""The hub's webhooks: an HTTP server that hands on which repository has changed, and does nothing else.

It faces strangers. So a request has a deadline for all of it, and there are at most `MAX_CONNECTIONS` at a time: a
further one takes the place of the oldest, which has had more time than any honest sender needs. Health checks are
answered whatever others do.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from weightbeam.pipelines.watching.notices import warn

SECRET = "WEIGHTBEAM_WEBHOOK_SECRET"  # in the environment: what the hub's webhook was given as its secret
HEADER = "X-Webhook-Secret"
MAX_BODY = 1 << 20  # bytes
DEADLINE = 10.0  # seconds that a sender may take for all of a request
MAX_CONNECTIONS = 64
PAUSE = 0.2  # seconds, where the system has no descriptors left

Receive = Callable[[str], None]


@contextlib.contextmanager
def receive_webhooks(port: int, secret: str, changed: Receive) -> Iterator[int]:
    """Context manager: serves, and calls `changed` with the name of each model whose files have changed. Gives the
    port.

    Raises:
      OSError: the port can't be had.
    """
    server = _Server(("", port), _handler(secret, changed))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are only so many, and each for so long."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        self._begun: dict[socket.socket, float] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptors are left; it would be asked again at once
            time.sleep(PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._begun) >= MAX_CONNECTIONS:
                self._hang_up(next(iter(self._begun)))
            self._begun[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hangs up on those whose time is over; called twice a second."""
        with self._lock:
            for request in [request for request, begun in self._begun.items() if time.monotonic() - begun > DEADLINE]:
                self._hang_up(request)

    def _hang_up(self, request: socket.socket) -> None:
        """Ends a connection, whose thread then notices."""
        self._begun.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._begun.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # else the sender is gone, or was hung up on
            warn(f"a webhook: {type(error).__name__}: {error}")


def changed_model(payload: object) -> str | None:
    """The model whose files a webhook's payload says have changed; None if it says something else.

    Raises:
      ValueError: it isn't a payload of the hub's.
    """
    try:
        kind, name, scope = payload["repo"]["type"], payload["repo"]["name"], payload["event"]["scope"]  # pyright: ignore
    except (TypeError, KeyError) as e:
        raise ValueError("not a webhook of the hub's") from e
    is_about_files = isinstance(scope, str) and scope.split(".")[0] == "repo"  # else about a discussion
    if kind != "model" or not is_about_files:
        return None
    if not isinstance(name, str):
        raise ValueError("not the name of a model")
    try:
        validate_repo_id(name)  # it becomes part of a path
    except HFValidationError as e:
        raise ValueError("not the name of a model") from e
    return name


def _handler(secret: str, changed: Receive) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = DEADLINE

        def do_GET(self) -> None:
            """For those who ask whether it is alive."""
            self._answer(HTTPStatus.OK, "alive")

        def do_POST(self) -> None:
            # A header's bytes come as Latin-1, whatever they are.
            if not hmac.compare_digest(self.headers.get(HEADER, "").encode("latin-1"), secret.encode()):
                self._answer(HTTPStatus.UNAUTHORIZED, f"{HEADER} is wrong")
                return
            length = self.headers.get("Content-Length", "")
            if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY:
                self._answer(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY} bytes, and their number is needed"
                )
                return
            try:
                name = changed_model(json.loads(self.rfile.read(int(length))))
            except (ValueError, RecursionError):
                self._answer(HTTPStatus.BAD_REQUEST, "not a webhook of the hub's")
                return
            if name is not None:
                changed(name)
            self._answer(HTTPStatus.ACCEPTED, "noted" if name else "nothing to do")

        def _answer(self, status: HTTPStatus, text: str) -> None:
            self.close_connection = True
            body = f"{text}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """What comes of it is logged."""

    return Handler
