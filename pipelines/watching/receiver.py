"""The hub's webhooks: an HTTP server that hands on which repository has changed, and does nothing else."""

from __future__ import annotations

import contextlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "WEIGHTBEAM_WEBHOOK_SECRET"  # in the environment: what the hub's webhook was given as its secret
HEADER = "X-Webhook-Secret"
MAX_BODY = 1 << 20  # bytes
TIMEOUT = 10.0  # seconds that a sender may take

Receive = Callable[[str], None]


@contextlib.contextmanager
def receive_webhooks(port: int, secret: str, changed: Receive) -> Iterator[int]:
    """Serves while it is entered; calls `changed` with the name of each model whose files have changed. Gives the port.

    Raises:
      OSError: the port can't be had.
    """
    server = ThreadingHTTPServer(("", port), _handler(secret, changed))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
    return name if kind == "model" and isinstance(name, str) and is_about_files else None


def _handler(secret: str, changed: Receive) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT

        def do_GET(self) -> None:
            """For those who ask whether it is alive."""
            self._answer(HTTPStatus.OK, "alive")

        def do_POST(self) -> None:
            if not hmac.compare_digest(self.headers.get(HEADER, "").encode(), secret.encode()):
                self._answer(HTTPStatus.UNAUTHORIZED, f"{HEADER} is wrong")
                return
            length = self.headers.get("Content-Length", "")
            if not length.isascii() or not length.isdigit() or int(length) > MAX_BODY:
                self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY} bytes, and their number is needed")
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
