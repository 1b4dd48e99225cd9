"""`weightbeam diff`: two checkpoints of any kinds, tensor by tensor in one spelling.

Two releases are compared under the names of their family's table, quantised tensors by their values. Where one side is
an Orbax checkpoint, both are compared as MaxText's arrays: a release as it would be converted into that checkpoint. Two
Orbax checkpoints are compared by MaxText's keys, whoever wrote them, and layer by layer where one has its layers
stacked and the other hasn't.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from weightbeam.formats.encodings import ContentError
from weightbeam.formats.orbax import open_arrays
from weightbeam.formats.orbax.scaled import values_of
from weightbeam.formats.orbax.source import OrbaxCheckpoint, open_orbax
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import HfCheckpoint, is_release, open_hf
from weightbeam.formats.storage import StorageError, Store, open_store, reason
from weightbeam.formats.storage.token import name_secret
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.plan import PARAMETERS, Array, is_float
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.trees import is_scanned
from weightbeam.pipelines.running.prepare import check_read, describe, options_of, options_of_export, refuse
from weightbeam.pipelines.running.without_beam import cores
from weightbeam.pipelines.terminal.arguments.parser import refuse_unknown
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.keywords import keywords_of, takes
from weightbeam.pipelines.terminal.progress import Report, reporter, watch_progress
from weightbeam.pipelines.terminal.report import kind_and_layer
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import Block, Table, count, shape_text
from weightbeam.transforms.comparing.differences import CHANGED, EQUAL, ROUNDED, Difference, compare_each, cut
from weightbeam.transforms.cutting.files import natural
from weightbeam.transforms.execution.boxes import make_boxes
from weightbeam.transforms.execution.operands import Operand, stored_operand
from weightbeam.transforms.planning.conversion_planner import prepare
from weightbeam.transforms.planning.options import COMPUTED, DiffOptions

MISSING, SHAPE = "missing", "shape"
STACKED = re.compile(r"(.+?\.\w*layers)\.(.+)")  # the key of an array with all layers of a kind
TEXTS = {
    EQUAL: "equal",
    ROUNDED: "rounded: no element differs by more than one step of the coarser dtype",
    CHANGED: "changed",
    SHAPE: "of another shape",
    MISSING: "on one side only",
}
SCAN_AXIS = 1  # where MaxText stacks layers unless it is told (`param_scan_axis`)
SHOWN = 20  # tensors, kinds or layers that a report lists
NAMED = 3  # tensors in a sentence
AT_ONCE = 4  # boxes at most, each of all sides: 16 MB a side, up to 256 MB where chunks are large

Key = TypeVar("Key")
Side = Mapping[str, Operand]


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

    def within(self, tolerance: float, fail_over: float | None = None) -> bool:
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
    """

    a: str
    b: str
    tensors: Mapping[str, Verdict]
    tolerance: float = 0.0
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fail_over: float | None = None

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
        """How far all tensors of a kind are apart together, by what they are called in their layer."""
        return self._totals(lambda name: kind_and_layer(name)[0])

    @property
    def layers(self) -> dict[int, Difference]:
        """How far all tensors of a layer are apart together, by its number; of what is in none, or where all layers are
        one array, -1.
        """
        return self._totals(lambda name: kind_and_layer(name)[1])

    def _totals(self, group: Callable[[str], Key]) -> dict[Key, Difference]:
        totals: dict[Key, Difference] = {}
        for name, found in self.tensors.items():
            if found.difference:
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
        yield f"{count(len(self.tensors), 'tensor')} of {self.a} and {self.b}"
        yield from (f"  {number:>6,} {TEXTS[status]}" for status, number in self.counts.items() if number)
        if self.left_out:
            yield f"  {len(self.left_out):>6,} of the release not compared: its table leaves them out on purpose"
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
                "in none" if key == -1 else str(key).removeprefix(PARAMETERS): (total, "")
                for key, total in totals.items()
            }
            yield from _ranked(heading, {name: found for name, found in named.items() if found[0].different})

    def _odd(self) -> Iterator[str]:
        """On which side which tensors have elements that aren't finite."""
        for side, where in (("a", self.a), ("b", self.b)):
            if odd := [n for n, each in self.tensors.items() if each.difference and side in each.difference.not_finite]:
                more = f" and {len(odd) - NAMED:,} more" if len(odd) > NAMED else ""
                yield f"NaN or infinite elements in {', '.join(sorted(odd, key=natural)[:NAMED])}{more} of {where}"

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


@takes(asked=DiffOptions)
def diff(a: str, b: str, *, asked: DiffOptions, progress: bool | Report = True) -> Comparison:
    """Compares two checkpoints of any kinds, every element, in bounded memory. What differs doesn't raise: see
    `Comparison.ok`.

    Args:
      a, b: releases (quantised or not) or Orbax checkpoints (a root, a step or an item): folders, `gs://…`, releases
        also `hf://…`.
      progress: shown on standard error, told to a callback, or False for neither.

    Returns:
      The tensors of both sides: equal, different and by how much, or on one side alone.

    Raises:
      Refused: one of them can't be looked at, or problems stand against it.
      Failed: it failed on the way.

    Example:
      >>> compared = wb.diff("models/qwen3", "ckpt", progress=False)
      >>> compared.ok
      True
    """
    name_secret(asked.hf_token_secret)
    (found,) = compare_pairs([open_pair(a, b, asked.maxtext_model, asked.family)], reporter(progress))
    return dataclasses.replace(found, tolerance=asked.tolerance, fail_over=asked.fail_over)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compares, reports, and says whether they are the same within the tolerance."""
    refuse_unknown(args, rest)
    found = diff(**keywords_of(args, diff))
    say(args, found)
    return 0 if found.ok else 1


@dataclasses.dataclass(frozen=True)
class ComparedPair:
    """Two checkpoints that are compared.

    Attributes:
      a, b: where they are.
      first, second: what they hold, under the same names.
      left_out: tensors of a release that its table leaves out on purpose, with the reason.
      sources: what is read.
    """

    a: str
    b: str
    first: Side
    second: Side
    left_out: Mapping[str, str]
    sources: tuple[HfCheckpoint | OrbaxCheckpoint, ...] = ()

    def shared(self, name: str) -> bool:
        """Whether both have a tensor of that name and of one shape."""
        first, second = self.first.get(name), self.second.get(name)
        return first is not None and second is not None and first.shape == second.shape


def open_pair(a: str, b: str, maxtext_model: str | None = None, family: str | None = None) -> ComparedPair:
    """Looks at two checkpoints; see `diff`.

    Raises:
      Refused: one of them can't be looked at, or problems stand against it.
    """
    sources = [_look(place) for place in (a, b)]
    (first, second), left_out = _in_one_spelling(sources, maxtext_model, family)
    return ComparedPair(a, b, first, second, left_out, tuple(sources))


def _look(where: str) -> HfCheckpoint | OrbaxCheckpoint:
    """A release by its headers, or an Orbax checkpoint by its metadata.

    Raises:
      Refused: neither can be found there.
    """
    try:
        store = open_store(where)
        store.check_readable()
        return open_hf(store) if is_release(store) else open_orbax(store)
    except StorageError as e:
        raise Refused(str(e)) from e
    except OSError as e:
        raise Refused(f"{where}: {reason(e)}") from e


def _in_one_spelling(
    where: Sequence[HfCheckpoint | OrbaxCheckpoint], model: str | None, named: str | None
) -> tuple[tuple[Side, Side], dict[str, str]]:
    """Both sides under the same names, and what of a release has no place there."""
    releases = [place for place in where if isinstance(place, HfCheckpoint)]
    if len(releases) == 2:
        families = [_family(release, model, named) for release in releases]
        known = families[0] if all(family is families[0] for family in families) else None
        return (_tensors(releases[0], known), _tensors(releases[1], known)), {}
    if not releases:
        first, second = (_arrays(checkpoint) for checkpoint in where if isinstance(checkpoint, OrbaxCheckpoint))
        return (_layer_by_layer(first, second), _layer_by_layer(second, first)), {}
    (checkpoint,) = (place for place in where if isinstance(place, OrbaxCheckpoint))
    there = _arrays(checkpoint)
    here, left_out = _converted(releases[0], open_store(checkpoint.root), there, model, named)
    return (here, there) if isinstance(where[0], HfCheckpoint) else (there, here), left_out


def _family(release: HfCheckpoint, model: str | None, named: str | None) -> Family | None:
    """The family of a release, whose table names its tensors; None where there is no table.

    Raises:
      Refused: the family was named, and there is none.
    """
    try:
        return family_of(Config(release.config), model, named)
    except (ConfigError, UnknownFamilyError) as e:
        if named:
            raise Refused(str(e)) from e
        return None


def _tensors(release: HfCheckpoint, family: Family | None) -> Side:
    """A release's own tensors; quantised ones by their values in float32."""
    source = open_source(release)
    source = source.renamed(family.aliases) if family else source
    problems = [
        problem
        for problem in (*release.problems, *source.problems)
        if (problem.kind, problem.subject) != ("missing", "config.json")
    ]
    if problems:
        raise Refused(f"{release.root}: {count(len(problems), 'problem')}:\n{describe(problems)}", problems)
    return {name: stored_operand(encoding) for name, encoding in source.encodings.items()}


def _arrays(checkpoint: OrbaxCheckpoint) -> Side:
    """An Orbax checkpoint's weights by MaxText's keys; FP8 codes by their values in float32."""
    return {key: stored_operand(array) for key, array in values_of(checkpoint).items()}


def _layer_by_layer(side: Side, other: Side) -> Side:
    """A side whose stacked arrays are seen as an array for each layer, where the other side has them so.

    `decoder.layers.mlp.wi_0.kernel` (embed, layers, mlp) is `decoder.layers_0.mlp.wi_0.kernel` (embed, mlp) and so on.
    Only what the other side has as many of as there are layers, each of the shape that is left, is taken apart.
    """
    found: dict[str, Operand] = {}
    for key, stored in side.items():
        match = STACKED.fullmatch(key)
        layers = (
            list(itertools.takewhile(other.__contains__, (f"{match[1]}_{i}.{match[2]}" for i in itertools.count())))
            if match
            else []
        )
        axes = [axis for axis, size in enumerate(stored.shape) if size == len(layers)]
        axes = [
            axis
            for axis in axes
            if all(other[name].shape == stored.shape[:axis] + stored.shape[axis + 1 :] for name in layers)
        ]
        if key in other or not axes:
            found[key] = stored
            continue
        # several fit only where sizes are equal: MaxText's default, or the last place
        axis = SCAN_AXIS if SCAN_AXIS in axes else axes[-1]
        found |= {name: _layer(stored, axis, number) for number, name in enumerate(layers)}
    return found


def _layer(stored: Operand, axis: int, number: int) -> Operand:
    """One layer of a stacked array."""

    def without(values: Sequence[int]) -> tuple[int, ...]:
        return (*values[:axis], *values[axis + 1 :])

    def fetch(box: Box) -> np.ndarray:
        return stored.read((*box[:axis], (number, number + 1), *box[axis:])).squeeze(axis)

    order = tuple(other - (other > axis) for other in stored.order if other != axis)
    return Operand(without(stored.shape), stored.dtype, order, without(stored.grain), fetch, stored.lossy)


def _converted(
    release: HfCheckpoint, items: Store, there: Side, model: str | None, named: str | None
) -> tuple[Side, dict[str, str]]:
    """A release as the arrays that it would become in an Orbax checkpoint, and what is left out of them.

    Raises:
      Refused: it can't be converted so.
    """
    try:
        given = {name: value for name, value in (("maxtext_model", model), ("family", named)) if value is not None}
        options = options_of(items, open_arrays(items), options_of_export(release.root) | given, release.config)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Refused(f"{items}: can't be read: {e}") from e
    options = dataclasses.replace(options, scan_layers=is_scanned(there))
    dtypes = Counter(stored.dtype.name for stored in there.values() if stored.dtype.name in COMPUTED)
    if dtypes:
        options = dataclasses.replace(options, save_dtype=dtypes.most_common(1)[0][0])
    conversion = prepare(options, release)
    refuse(conversion.plan.problems, conversion.source)
    grids = {grid.spec.key: grid for grid in conversion.grids}

    def stored(array: Array) -> Operand:
        other = there.get(array.key)
        dtype = other.dtype if other and is_float(array.dtype) and other.dtype.name in COMPUTED else array.dtype
        made = dataclasses.replace(array, dtype=dtype)
        order = tuple(reversed(grids[array.key].growth))
        return Operand(
            array.shape,
            dtype,
            order,
            (1,) * len(array.shape),
            lambda box: make_boxes([(made, box)], conversion.encodings)[0][0],
            array.lossy,
        )

    return {array.key: stored(array) for array in conversion.plan.arrays}, dict(conversion.plan.dropped)


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
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
    ):
        try:
            for future in concurrent.futures.as_completed([pool.submit(comparing.work) for _ in range(threads)]):
                future.result()
        except (StorageError, ContentError) as e:
            check_read(source for pair in pairs for source in pair.sources)  # which says more
            raise Failed(f"  {e}") from e
        finally:
            comparing.ended.set()
    check_read(source for pair in pairs for source in pair.sources)
    return [
        Comparison(pair.a, pair.b, _verdicts(pair, found), left_out=pair.left_out)
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
            found = compare_each([self.pairs[number].first[name].read(box) for number in numbers], values)
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
    return found


def _cut(sides: Sequence[Operand]) -> Iterator[Box]:
    """The boxes in which a tensor is read from all sides: cut as the side whose chunks are decoded whole wants it."""
    grain = tuple(map(max, *(side.grain for side in sides))) if sides[0].shape else ()
    first = max(sides, key=lambda side: max(side.grain, default=1))
    return cut(first.shape, max(side.dtype.itemsize for side in sides), first.order, grain)
