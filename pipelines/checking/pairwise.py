"""Pairs of checkpoints compared, boxes of a tensor at a time, by threads."""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from weightbeam.formats.encodings import ContentError
from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.identity import as_read
from weightbeam.formats.storage.stoppable import StoppablePool
from weightbeam.model_mappings.boxes import Box
from weightbeam.pipelines.checking.comparison import MISSING, SHAPE, Comparison, Verdict
from weightbeam.pipelines.checking.pairs import ComparedPair
from weightbeam.pipelines.running.sources import check_read
from weightbeam.pipelines.running.without_beam import cores
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.terminal.progress import Report, watch_progress
from weightbeam.pipelines.terminal.tables import shape_text
from weightbeam.transforms.comparing.differences import CHANGED, EQUAL, ROUNDED, Difference, coarser, compare_each, cut
from weightbeam.transforms.execution.operands import Operand

AT_ONCE = 4  # boxes at most, each of all sides: 16 MB a side, up to 256 MB where chunks are large


def compare_pairs(
    pairs: Sequence[ComparedPair], report: Report | None = None, known: Sequence[Mapping[str, Difference]] = ()
) -> list[Comparison]:
    """Compares each pair, boxes of a tensor at a time, some at once. The second of all pairs is the same checkpoint: a
    box of it is read once for all of them that have the tensor under one name, in one shape and dtype: whatever it is
    compared with, its values are the same then.

    Args:
      pairs: what is compared.
      report: is told how far it has come.
      known: for each pair, what was found before; a tensor of which that says all isn't read.

    Raises:
      Failed: a file can't be read, or holds what can't be right.
    """
    differences = [_start(pair, known[number] if number < len(known) else {}) for number, pair in enumerate(pairs)]
    comparing = _Comparing(pairs, differences)
    places = list(dict.fromkeys(url for pair in pairs for url in (pair.a, pair.b)))
    threads = min(AT_ONCE, cores() + 1)  # one reads while the others compare
    with (
        watch_progress(comparing.total, lambda: comparing.done, "comparing", report, places=places),
        StoppablePool(threads) as pool,
    ):
        try:
            for future in concurrent.futures.as_completed([pool.submit(comparing.work) for _ in range(threads)]):
                future.result()
        except (StorageError, ContentError) as e:
            check_read(source for pair in pairs for source in pair.sources)  # which says more
            raise Failed(f"  {as_read(str(e))}") from e
        finally:
            comparing.ended.set()
    check_read(source for pair in pairs for source in pair.sources)
    return [
        Comparison(pair.a, pair.b, _verdicts(pair, found), left_out=pair.left_out, apart=pair.apart)
        for pair, found in zip(pairs, differences, strict=True)
    ]


def _start(pair: ComparedPair, known: Mapping[str, Difference]) -> dict[str, Difference]:
    """The differences of the tensors of a pair before any is read: those of which all is known; of the others none yet."""
    found = {name: Difference() for name in pair.first if pair.shared(name)}
    return found | {
        name: difference
        for name, difference in known.items()
        if name in found and difference.elements == math.prod(pair.second[name].shape)
    }


class _Comparing:
    """Boxes that threads compare, each the next that is left, and what they found.

    Attributes:
      pairs: what is compared.
      differences: for each pair, those of its tensors; what isn't known of them yet is added up here.
      groups: what is read together: the numbers of the pairs, by the second side's tensor.
      total, done: bytes of the second sides that are to be compared, and that have been.
      ended: is set where no more should be compared.
    """

    def __init__(self, pairs: Sequence[ComparedPair], differences: Sequence[dict[str, Difference]]) -> None:
        self.pairs, self.differences = pairs, differences
        self.groups: dict[tuple[str, tuple[int, ...], np.dtype], list[int]] = {}
        for number, pair in enumerate(pairs):
            for name in (name for name, difference in differences[number].items() if not difference.elements):
                second = pair.second[name]
                self.groups.setdefault((name, second.shape, second.dtype), []).append(number)
        self.total = sum(
            math.prod(shape) * dtype.itemsize * len(numbers) for (_, shape, dtype), numbers in self.groups.items()
        )
        self.done, self.ended = 0, threading.Event()
        self._lock, self._boxes = threading.Lock(), self._all_boxes()

    def _all_boxes(self) -> Iterator[tuple[str, list[int], Box]]:
        """All boxes: of which tensor, of which pairs."""
        for (name, *_), numbers in self.groups.items():
            sides = [self.pairs[numbers[0]].second[name], *(self.pairs[number].first[name] for number in numbers)]
            yield from ((name, numbers, box) for box in _cut(sides))

    def work(self) -> None:
        """Compares boxes as long as there are any."""
        while not self.ended.is_set():
            with self._lock:
                name, numbers, box = next(self._boxes, ("", [], ()))
            if not name:
                return
            values = self.pairs[numbers[0]].second[name].read(box)
            firsts = [self.pairs[number].first[name] for number in numbers]
            own = self.pairs[numbers[0]].second[name].precision
            steps = [coarser(first.precision, own) for first in firsts]
            found = compare_each([first.read(box) for first in firsts], values, steps)
            with self._lock:
                for number, difference in zip(numbers, found, strict=True):
                    self.differences[number][name] += difference
                self.done += values.nbytes * len(numbers)


def _verdicts(pair: ComparedPair, differences: Mapping[str, Difference]) -> dict[str, Verdict]:
    """What was found of each tensor of a pair, in the order in which the first has them."""
    found: dict[str, Verdict] = {}
    for name in [*pair.first, *(name for name in pair.second if name not in pair.first)]:
        a, b, difference = pair.first.get(name), pair.second.get(name), differences.get(name)
        if a is None or b is None:
            found[name] = Verdict(MISSING, message=f"not in {pair.a if a is None else pair.b}")
        elif difference is None:
            found[name] = Verdict(SHAPE, message=f"{shape_text(a.shape)} and {shape_text(b.shape)}")
        else:
            lossy = a.lossy or b.lossy
            status = ROUNDED if lossy and difference.status == EQUAL else difference.status
            found[name] = Verdict(status, difference, lossy)
    return found | {name: Verdict(CHANGED, message=how) for name, how in pair.unlike.items()}


def _cut(sides: Sequence[Operand]) -> Iterator[Box]:
    """The boxes in which a tensor is read from all sides: cut as the side whose chunks are decoded whole wants it."""
    grain = tuple(map(max, *(side.grain for side in sides))) if sides[0].shape else ()
    first = max(sides, key=lambda side: max(side.grain, default=1))
    return cut(first.shape, max(side.dtype.itemsize for side in sides), first.order, grain)
