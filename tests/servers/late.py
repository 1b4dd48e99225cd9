"""A bucket that is late with one request: with what it does, or only with its answer."""

from __future__ import annotations

import re
import threading
import time
import urllib.parse

from servers.gcs import FakeGcs
from servers.server import Call, Reply


class LateGcs(FakeGcs):
    """A server of one bucket.

    Attributes:
      asked: set when the request has come, and, unless the bucket acts late, when it was carried out.
    """

    def __init__(self, matching: str, acts_late: bool, seconds: float = 3.0) -> None:
        super().__init__("bucket")
        self._matching, self._acts_late, self._seconds, self.asked = matching, acts_late, seconds, threading.Event()

    def answer(self, call: Call) -> Reply:
        said = f"{urllib.parse.unquote(call.path)} {call.query} {call.body[:2000].decode('latin1')}"
        is_it = call.method in ("POST", "PUT") and re.search(self._matching, said) and not self.asked.is_set()
        if is_it and self._acts_late:
            self.asked.set()
            time.sleep(self._seconds)
        reply = super().answer(call)
        if is_it and not self._acts_late:
            self.asked.set()
            time.sleep(self._seconds)
        return reply
