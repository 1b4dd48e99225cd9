"""The audit: every byte of every tensor claimed exactly once, every element of every array made exactly once."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.plan import Array, Problem, TensorSpec, is_float

MAX_PROBLEMS = 50_000  # a table with more doesn't describe the checkpoint, and nobody reads them
Claim = tuple[range, ...]  # the indices of each axis of a tensor that something takes


def is_disjoint(a: Claim, b: Claim) -> bool:
    """Whether two claims on a tensor share no element."""
    return any(_apart(x, y) for x, y in zip(a, b, strict=True))


def _apart(a: range, b: range) -> bool:
    """Whether two progressions have no number in common; in a few steps, however long they are.

    The numbers that are in both, endless as they then would be, are a progression themselves: of the steps' least
    common multiple, or empty where the starts differ by no multiple of the steps' greatest common divisor (Chinese
    remainder theorem). For `range(0, 8, 2)` and `range(1, 8, 3)` they are 4, 10, …; and 4 lies in both.
    """
    if not a or not b:
        return True
    low, high = max(a[0], b[0]), min(a[-1], b[-1])
    common = math.gcd(a.step, b.step)
    if low > high or (b[0] - a[0]) % common:
        return True
    turn = b.step // common
    first = a[0] + a.step * ((b[0] - a[0]) // common * pow(a.step // common, -1, turn) % turn)
    return first + -(-max(0, low - first) // (a.step * turn)) * a.step * turn > high


def find_drops(
    drops: Mapping[str, str], tensors: Mapping[str, TensorSpec]
) -> tuple[dict[str, str], dict[str, list[Claim]]]:
    """Applies a family's drops: `({tensor or window: reason}, {tensor: claims of the dropped windows})`."""
    dropped: dict[str, str] = {}
    windows: dict[str, list[Claim]] = defaultdict(list)
    for entry, reason in drops.items():
        match = re.fullmatch(r"(.+)\[(\d+):\]", entry)
        if match is None:
            dropped.update(dict.fromkeys(fnmatch.filter(tensors, entry), reason))
        elif match[1] in tensors and match[1] not in dropped:
            shape = tensors[match[1]].shape
            if shape and int(match[2]) < shape[0]:
                dropped[entry] = reason
                windows[match[1]].append((range(int(match[2]), shape[0]), *(range(n) for n in shape[1:])))
    return dropped, windows


def drop_reason(name: str, drops: Mapping[str, str]) -> str | None:
    """Why a whole tensor of this name is dropped; None where it isn't."""
    return next((reason for entry, reason in drops.items() if fnmatch.fnmatchcase(name, entry)), None)


def audit(
    arrays: Iterable[Array], tensors: Mapping[str, TensorSpec], drops: Mapping[str, str], family: str
) -> tuple[dict[str, str], list[Problem]]:
    """Checks a table against a checkpoint: `(what is dropped, the problems)`."""
    dropped, windows = find_drops(drops, tensors)
    problems: list[Problem] = []
    claims: dict[str, list[Claim]] = defaultdict(list)
    for array in arrays:
        problems += _check_tiling(array)
        for part in array.parts:
            claim = part.source_box()
            for name in part.tensors:
                claims[name] += [] if part.rule.spare else [claim]
                if len(problems) <= MAX_PROBLEMS:
                    problems += _check_tensor(name, part, array, tensors.get(name), dropped.get(name), family)
    bad = {problem.subject for problem in problems}
    for name, boxes in claims.items():
        if name in tensors and name not in bad:
            problems += _check_claims(name, boxes + windows[name], tensors[name])
    unused = ((name, spec) for name, spec in tensors.items() if name not in claims and name not in dropped)
    for name, spec in itertools.islice(unused, max(0, MAX_PROBLEMS + 1 - len(problems))):
        message = f"{spec.dtype.name} {spec.shape} in {spec.file}: the {family} table has no place for it, and doesn't drop it"
        problems.append(Problem("unused", name, message))
    if len(problems) > MAX_PROBLEMS:  # said by itself, since those that are listed may all come to be settled
        message = f"doesn't describe this checkpoint: more than {MAX_PROBLEMS:,} of its lines don't fit"
        problems.append(Problem("unused", f"the {family} table", message))
    return dropped, problems


def _check_tensor(
    name: str, part: Part, array: Array, spec: TensorSpec | None, drop: str | None, family: str
) -> list[Problem]:
    """Name, dtype, shape and window of one tensor against one line of the table."""
    if spec is None:
        return [Problem("missing", name, f"the {family} table makes {array.key} of it, but no file holds it")]
    if drop is not None:
        return [
            Problem("overlap", name, f"both dropped ({drop}) and used for {array.key}; a fault of the {family} table")
        ]
    # training holds integers as floats, and JAX as narrower ones, from which an export takes them, if that is what they are
    fits = is_float(array.dtype) or np.can_cast(array.dtype, spec.dtype)
    if not (fits and np.issubdtype(spec.dtype, np.integer) if part.rule.integer else is_float(spec.dtype)):
        wanted = f"integers of one dtype, {array.dtype.name}" if part.rule.integer else "floating-point weights"
        return [Problem("dtype", name, f"{spec.dtype.name} in {spec.file}, but {array.key} is made of {wanted}")]
    taken = tuple(len(range(*window.indices(size))) for window, size in zip(part.window, spec.shape, strict=False))
    if len(spec.shape) != len(part.window_shape) or taken != part.window_shape:
        axes = part.rule.axes.left[len(part.rule.name_axes) :]
        text = " ".join(f"({' '.join(axis)})" if len(axis) != 1 else axis[0] for axis in axes)
        where = " in a part of it" if part.rule.window else ""
        config = ""
        if axes[:1] == (("vocab",),) and taken[1:] == part.window_shape[1:]:
            rows, said = spec.shape[0], part.window_shape[0]
            config = f"; vocab_size of config.json is {said:,}, and should be {rows:,}"
            config += f", or leave the others out with --vocab_rows {said}" if rows > said else ""
        message = f'{spec.shape} in {spec.file}, the {family} table says "{text}" = {part.window_shape}{where}{config}'
        return [Problem("shape", name, message)]
    if not math.prod(spec.shape):
        return [Problem("shape", name, f"{spec.shape} in {spec.file}: has no elements, as no array of a checkpoint")]
    return []


def _check_claims(name: str, claims: Sequence[Claim], spec: TensorSpec) -> list[Problem]:
    """The claims on one tensor must tile it."""
    if len(claims) > 1 and not all(is_disjoint(a, b) for a, b in itertools.combinations(claims, 2)):
        return [Problem("overlap", name, f"{len(claims)} lines of the table share elements of it")]
    claimed = sum(math.prod(len(indices) for indices in claim) for claim in claims)
    if claimed < math.prod(spec.shape):
        message = f"{claimed:,} of {math.prod(spec.shape):,} elements of {spec.shape} in {spec.file} are used"
        return [Problem("unclaimed part", name, message)]
    return []


def _check_tiling(array: Array) -> list[Problem]:
    """The parts of one array must tile it, but for what `fill` pads."""
    made = [part for part in array.parts if part.rule.source is not None]
    boxes = [_segment_box(part) for part in made]
    if not all(is_disjoint(a, b) for a, b in itertools.combinations(boxes, 2)):
        return [Problem("overlap", array.key, "two lines of the table make the same elements", is_array=True)]
    covered = sum(part.elements for part in made)
    if covered < math.prod(array.shape) and array.fill is None:
        message = f"{covered:,} of {math.prod(array.shape):,} elements have a source"
        return [Problem("gap", array.key, message, is_array=True)]
    return []


def _segment_box(part: Part) -> Claim:
    """The indices of each factor of the array that a part makes."""
    sizes = np.concatenate([np.asarray(sizes, int) for sizes in part.source_factors] or [np.zeros(0, int)])
    return tuple(
        range(factor.start, factor.start + int(sizes[factor.which])) if factor.kind == "free" else range(factor.size)
        for axis in part.target_axes
        for factor in axis
    )
