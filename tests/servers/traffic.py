"""What goes over the wire: the faults that a server makes on demand, and its log."""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from typing import Any, Literal


@dataclasses.dataclass
class Fault:
    """What goes wrong with some requests.

    Attributes:
      kind: `slow`: answered after `seconds`. `status`: refused with `status`, nothing is done. `reset`: the connection
        is reset, nothing is done. `lost`: done, then the connection is reset. `cut`: half of the body, then the
        connection is closed. `stall`: headers and half of the body, then nothing for `seconds`. `flip`: a bit in the
        middle of the body is another one.
      every: each n-th of the requests that match.
      fraction: of those, so many by chance; the same ones in each run.
      matching: a pattern that is looked for in `GET /path?query`.
      times: how often at most.
      retry_after: seconds; sent with `status`.
      hits: how often it has happened.
    """

    kind: Literal["slow", "status", "reset", "lost", "cut", "stall", "flip"]
    every: int = 1
    fraction: float = 1.0
    matching: str = ""
    times: int | None = None
    seconds: float = 0.0
    status: int = 503
    retry_after: int | None = None
    hits: int = 0
    _seen: int = dataclasses.field(default=0, init=False, repr=False)
    _random: random.Random = dataclasses.field(default_factory=lambda: random.Random(0), init=False, repr=False)

    def draw(self, line: str) -> bool:
        """Whether it happens to this request; not thread-safe."""
        if (self.times is not None and self.hits >= self.times) or not re.search(self.matching, line):
            return False
        self._seen += 1
        hit = self._seen % self.every == 0 and self._random.random() < self.fraction
        self.hits += hit
        return hit

    def described(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}


@dataclasses.dataclass
class Entry:
    """A request in the log. It is there before its answer is sent, so that a client that has the answer finds it.

    Attributes:
      start, stop: the bytes of `name` that were sent.
      sent, received: bytes of the bodies.
      status: 0 if there was no answer.
      fault: what went wrong with it, or nothing.
    """

    kind: str
    method: str
    name: str
    status: int
    start: int = 0
    stop: int = 0
    sent: int = 0
    received: int = 0
    fault: str = ""


class Log(list[Entry]):
    """Every request so far, in the order of the answers. Bytes are counted when they are sent, whether the client waits
    for them or not.
    """

    def counts(self) -> Counter[str]:
        """Requests by kind."""
        return Counter(entry.kind for entry in self)

    @property
    def sent(self) -> int:
        return sum(entry.sent for entry in self)

    @property
    def received(self) -> int:
        return sum(entry.received for entry in self)

    def of(self, kind: str, name: str = "") -> Log:
        """The requests of a kind, of names that begin so."""
        return Log(entry for entry in self if entry.kind == kind and entry.name.startswith(name))

    def ranges(self) -> dict[str, list[tuple[int, int]]]:
        """The ranges that were read of each object, sorted."""
        found: dict[str, list[tuple[int, int]]] = {}
        for entry in self.of("read"):
            if entry.stop > entry.start:
                found.setdefault(entry.name, []).append((entry.start, entry.stop))
        return {name: sorted(ranges) for name, ranges in found.items()}

    def read_twice(self) -> int:
        """Bytes that were sent again after they had been sent."""
        total = 0
        for ranges in self.ranges().values():
            end = 0
            for start, stop in ranges:
                total += max(0, min(end, stop) - start)
                end = max(end, stop)
        return total
