"""The receiver of webhooks, faced with senders that mean harm."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from processes import wait_until

from weightbeam.pipelines.watching import receiver
from weightbeam.pipelines.watching.receiver import MAX_CONNECTIONS, receive_webhooks

SECRET = "wéird"


@pytest.fixture
def changed() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def port(changed: queue.SimpleQueue[str]) -> Iterator[int]:
    with receive_webhooks(0, SECRET, changed.put) as port:
        yield port


def post(port: int, name: object, secret: bytes) -> int:
    content = json.dumps(
        dict(event=dict(action="update", scope="repo.content"), repo=dict(type="model", name=name))
    ).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sender:
        sender.sendall(
            b"POST / HTTP/1.1\r\nX-Webhook-Secret: %b\r\nContent-Length: %d\r\n\r\n%b" % (secret, len(content), content)
        )
        return int(sender.makefile("rb").readline().split()[1])


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).status == 200
    return False


def test_senders_that_never_end_keep_nobody_out(port: int, changed: queue.SimpleQueue[str]) -> None:
    """Four times as many as may be connected, who send nothing more: the health check is answered, and so is the hub."""
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(4 * MAX_CONNECTIONS):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)))
            slow[-1].sendall(b"POST / HTTP/1.1\r\nX-")
        wait_until(lambda: answers(port), seconds=20, every=0.05)
        assert post(port, "acme/tiny", SECRET.encode()) == 202
        assert changed.get(timeout=5) == "acme/tiny"
        slow[0].settimeout(5)
        assert slow[0].recv(1) == b""  # hung up on


def test_a_request_has_a_deadline_however_it_trickles(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte at a time would begin a time-out of single reads anew for ever."""
    monkeypatch.setattr(receiver, "DEADLINE", 1.0)
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sender:
        sender.settimeout(0.2)
        while True:
            assert time.monotonic() < begun + 10
            try:
                sender.sendall(b"G")
                if sender.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("secret", "status"), [(SECRET.encode(), 202), (b"wrong", 401), (b"w\xe9ird", 401), (b"", 401)]
)
def test_a_secret_is_bytes(port: int, secret: bytes, status: int) -> None:
    """One with a letter that isn't ASCII is sent in UTF-8, and was always turned away."""
    assert post(port, "acme/tiny", secret) == status


@pytest.mark.parametrize(
    "name", ["acme/../../../../usr", "../x", "acme/..", "/etc", "acme/a/b", "", 7, None, "acme/\x1b[31m"]
)
def test_a_name_that_would_lead_elsewhere_is_refused(port: int, name: object, changed: queue.SimpleQueue[str]) -> None:
    assert post(port, name, SECRET.encode()) == 400
    assert changed.empty()
