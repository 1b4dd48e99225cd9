"""A cut: what of a release is kept, as it was asked for. Numbers only, and no file is opened.

--layers 0:2,58:61    layers 0, 1, 58, 59 and 60, which become 0 to 4
--experts 0:8         of each layer the first eight
--vocab_rows 1000     of the embedding and of the head the first thousand
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

Span = tuple[int, int]  # from the first to behind the last
MAX_NUMBER = 2**31 - 1


def spans(text: str) -> tuple[Span, ...]:
    """Ranges of numbers: `0:2,58:61` is 0, 1, 58, 59, 60, and a number alone stands for itself. Neighbours become one.

    Raises:
      ValueError: the text says no ranges.
    """
    found: list[Span] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})\s*(?::\s*([0-9]{1,10})\s*)?", part)
        start = int(match[1]) if match else 0
        stop = (int(match[2]) if match[2] else start + 1) if match else 0
        if not start < stop <= MAX_NUMBER:
            raise ValueError(f"{text!r} should be ranges with the end behind the last, such as 0:4 or 0:2,58:61")
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def numbers(text: str, most: int) -> list[int]:
    """The numbers of ranges, as far as they are below `most`."""
    return [*itertools.chain(*(range(min(start, most), min(stop, most)) for start, stop in spans(text)))]


def spelled(ranges: tuple[Span, ...]) -> str:
    """Ranges as they are written."""
    return ",".join(f"{start}:{stop}" for start, stop in ranges)


def _is_ranges(said: object) -> bool:
    try:
        return isinstance(said, str) and bool(spans(said))
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class Cut:
    """What of a release is kept; None for all.

    Attributes:
      layers, experts: ranges of their numbers, see `spans`.
      vocab_rows: how many rows of the vocabulary, from the first on.
      family: the table that says where they are; None for that of `config.json`.
    """

    layers: str | None = None
    experts: str | None = None
    vocab_rows: int | None = None
    family: str | None = None

    @classmethod
    def of(cls, said: Any, family: str | None = None) -> Cut:
        """As the options of a record say, whoever wrote it; what makes no sense is as if it weren't there. `family` is
        what the command says.
        """
        given = said if isinstance(said, Mapping) else {}
        texts = {name: given[name] for name in ("layers", "experts") if _is_ranges(given.get(name))}
        rows, family = given.get("vocab_rows"), family or given.get("family")
        return cls(
            **texts, vocab_rows=rows if type(rows) is int else None, family=family if isinstance(family, str) else None
        )

    @property
    def renumbers(self) -> bool:
        """Whether something of what is kept gets another number: it isn't the first layers, or the first experts, alone."""
        kept = (spans(ranges) for ranges in (self.layers, self.experts) if ranges)
        return any(start > 0 for found in kept for start, _ in found)  # neighbours are one range

    def __bool__(self) -> bool:
        return (self.layers, self.experts, self.vocab_rows) != (None, None, None)

    def __str__(self) -> str:
        parts = {
            "layers": self.layers,
            "experts": self.experts,
            "rows of the vocabulary": self.vocab_rows and f"0:{self.vocab_rows}",
        }
        return ", ".join(f"{what} {which}" for what, which in parts.items() if which)
