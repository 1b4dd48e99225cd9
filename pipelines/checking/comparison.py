"""What a comparison of two checkpoints found, for people and for programs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from weightbeam.formats.text.printable import listed, where_apart
from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.model_mappings.trees import is_state
from weightbeam.pipelines.terminal.report import kind_and_layer
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import Block, Table, count
from weightbeam.transforms.comparing.differences import CHANGED, EQUAL, ROUNDED, Difference
from weightbeam.transforms.cutting.files import natural

MISSING, SHAPE = "missing", "shape"


TEXTS = {
    EQUAL: "equal",
    ROUNDED: "rounded: no element differs by more than one step of the coarser dtype",
    CHANGED: "changed",
    SHAPE: "of another shape",
    MISSING: "on one side only",
}


SHOWN = 20  # tensors, kinds or layers that a report lists


NAMED = 3  # tensors in a sentence


Key = TypeVar("Key")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found of one tensor.

    Attributes:
      status: `equal`, `rounded`, `changed`, `missing`, or `shape` where the shapes differ.
      difference: of the values; None where they weren't compared.
      message: what is missing where, or which shapes.
    """

    status: str
    difference: Difference | None = None
    message: str | None = None

    def within(self, tolerance: float, fail_over: float | None) -> bool:
        """Whether no element is further off than `tolerance`, or the relative change isn't over `fail_over`."""
        difference = self.difference
        if difference is None:
            return False
        return difference.largest <= tolerance or (fail_over is not None and difference.relative <= fail_over)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"status": self.status}
        if self.message:
            found["message"] = self.message
        return found | (_measures(self.difference) if self.difference else {})


def _measures(difference: Difference) -> dict[str, Any]:
    """How far two tensors are apart, for programs."""
    found: dict[str, Any] = {
        "elements": difference.elements,
        "different": difference.different,
        "share": difference.share,
    }
    measures = {
        "relative": difference.relative,
        "max": difference.largest,
        "mean": difference.mean,
        "cosine": difference.cosine,
    }
    # JSON has no NaN
    found |= {name: value if math.isfinite(value) else str(value) for name, value in measures.items()}
    return found | ({"not_finite": difference.not_finite} if difference.not_finite else {})


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """What a comparison of two checkpoints found.

    Attributes:
      a, b: what was compared.
      tensors: what was found of each, by its name.
      tolerance: the largest absolute difference of an element that counts as none.
      left_out: tensors of a release that its table leaves out on purpose, with the reason; they weren't compared.
      fail_over: the largest relative change of a tensor that counts as none, whatever the tolerance; None for none.
      apart: of `a` and of `b` the arrays of a training state that weren't compared, with the reason.
      files: of two releases each field of `config.json`, and each other small file, that isn't the same, with what stands
        in `a` and in `b`; it doesn't count for `ok`.
    """

    a: str
    b: str
    tensors: Mapping[str, Verdict]
    tolerance: float = 0.0
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fail_over: float | None = None
    apart: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    files: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every tensor is on both sides, and differs by no more than what counts as none."""
        return not self.beyond

    @property
    def beyond(self) -> dict[str, Verdict]:
        """The tensors that differ by more than what counts as none, or are missing."""
        return {name: each for name, each in self.tensors.items() if not each.within(self.tolerance, self.fail_over)}

    @property
    def kinds(self) -> dict[str, Difference]:
        """How far all weights of a kind are apart together, by what they are called in their layer."""
        return self._totals(lambda name: kind_and_layer(name)[0])

    @property
    def layers(self) -> dict[int, Difference]:
        """How far all weights of a layer are apart together, by its number; of what is in none, or where all layers are
        one array, -1.
        """
        return self._totals(lambda name: kind_and_layer(name)[1])

    def _totals(self, group: Callable[[str], Key]) -> dict[Key, Difference]:
        totals: dict[Key, Difference] = {}
        for name, found in self.tensors.items():
            if found.difference and not is_state(name):
                key = group(name)
                totals[key] = totals.get(key, Difference()) + found.difference
        return totals

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors there are of each status."""
        counts = Counter(found.status for found in self.tensors.values())
        return {
            status: counts[status]
            for status in (EQUAL, ROUNDED, CHANGED, SHAPE, MISSING)
            if counts[status] or status != SHAPE
        }

    def to_dict(self) -> dict[str, Any]:
        about = {
            "a": self.a,
            "b": self.b,
            "tolerance": self.tolerance,
            "ok": self.ok,
            "counts": self.counts,
            "left_out": dict(self.left_out),
            "fail_over": self.fail_over,
            "not_compared": {"a": dict(self.apart[0]), "b": dict(self.apart[1])},
            "files": {name: {"a": a, "b": b} for name, (a, b) in self.files.items()},
            "kinds": {kind: _measures(total) for kind, total in self.kinds.items()},
            "layers": {str(layer): _measures(total) for layer, total in sorted(self.layers.items())},
        }
        return about | {"tensors": {name: found.to_dict() for name, found in self.tensors.items()}}

    def blocks(self) -> Iterator[Block]:
        """What a person sees: the tensors that differ, those that changed most first; the same of kinds and layers; how
        many there are of each status.
        """
        yield from self._absent()
        yield from self._apart()
        if self.files:
            table = Table("not counted", "a", "b")
            for name, (a, b) in itertools.islice(self.files.items(), SHOWN):
                table.add_row(name, *where_apart(a, b))
            yield from _listed(table, len(self.files))
        yield f"{count(len(self.tensors), 'tensor')} of {self.a} and {self.b}"
        yield from (f"  {number:>6,} {TEXTS[status]}" for status, number in self.counts.items() if number)
        if self.left_out:
            yield f"  {len(self.left_out):>6,} of the release not compared: its table leaves them out on purpose"
        for where, apart in zip((self.a, self.b), self.apart, strict=True):
            for reason, number in Counter(apart.values()).items():
                yield f"  {number:>6,} of {where} not compared: {reason}"
        yield from self._odd()
        if not self.ok:
            yield self._excess()

    def _absent(self) -> Iterator[Block]:
        """The tensors whose values weren't compared, and why."""
        absent = {name: found.message or "" for name, found in self.tensors.items() if found.difference is None}
        if absent:
            table = Table("tensor", "")
            for name, message in itertools.islice(absent.items(), SHOWN):
                table.add_row(name.removeprefix(PARAMETERS), message)
            yield from _listed(table, len(absent))

    def _apart(self) -> Iterator[Block]:
        """How far the tensors are apart, and then all of a kind and all of a layer where there are some layers."""
        apart = {
            name.removeprefix(PARAMETERS): (found.difference, found.status)
            for name, found in self.tensors.items()
            if found.difference and found.status != EQUAL
        }
        yield from _ranked("tensor", apart, "status")
        groups = (("kind of tensor, all layers", self.kinds), ("layer", self.layers))
        for heading, totals in groups if len(self.layers) > 2 else ():
            named = {
                "outside of layers" if key == -1 else str(key).removeprefix(PARAMETERS): (total, "")
                for key, total in totals.items()
            }
            yield from _ranked(heading, {name: found for name, found in named.items() if found[0].different})

    def _odd(self) -> Iterator[str]:
        """On which side which tensors have elements that aren't finite."""
        for side, where in (("a", self.a), ("b", self.b)):
            if odd := [n for n, each in self.tensors.items() if each.difference and side in each.difference.not_finite]:
                yield f"NaN or infinite elements in {listed(sorted(odd, key=natural), NAMED)} of {where}"

    def complaint(self) -> str:
        return "" if self.ok else f"{self.a} and {self.b}: {'; '.join([self._excess(), *self._odd()])}"

    def _excess(self) -> str:
        """How many tensors differ too much, and what that is."""
        beyond = len(self.beyond)
        bounds = [f"by more than {self.fail_over:g} of its norm"] if self.fail_over is not None else []
        bounds += [f"beyond the tolerance of {self.tolerance:g}"] if self.tolerance or not bounds else []
        return f"{count(beyond, 'tensor')} {'differs' if beyond == 1 else 'differ'} {' and '.join(bounds)}"

    def brief(self) -> str:
        counts = ", ".join(f"{number:,} {status}" for status, number in self.counts.items() if number)
        return f"{count(len(self.tensors), 'tensor')} of {self.a} and {self.b}: {counts}"


def _listed(table: Table, number: int) -> Iterator[Block]:
    """A table of the first of so many."""
    yield table
    if number > SHOWN:
        yield f"… and {number - SHOWN:,} more; --json FILE has all"
    yield ""


def _ranked(heading: str, found: Mapping[str, tuple[Difference, str]], last: str = "") -> Iterator[Block]:
    """How far each is apart, with a last word: what isn't finite, and then what changed most comes first."""
    if not found:
        return
    spare = ("mean", "max", "differ", last, "cosine")
    table = Table(heading, ">relative", ">max", ">mean", ">differ", ">cosine", last, spare=spare)

    def rank(item: tuple[str, tuple[Difference, str]]) -> tuple[float, str]:
        change = item[1][0].relative
        return (-math.inf if math.isnan(change) else -change), natural(item[0])

    for name, (difference, status) in sorted(found.items(), key=rank)[:SHOWN]:
        figures = (f"{value:.3g}" for value in (difference.relative, difference.largest, difference.mean))
        table.add_row(name, *figures, f"{100 * difference.share:.3g} %", f"{difference.cosine:.6f}", status)
    yield from _listed(table, len(found))
