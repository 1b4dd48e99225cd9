"""What a verification found, for people and for programs."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.pipelines.running.problems import SHOWN
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.terminal.report import collapse
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import CELL, count
from weightbeam.transforms.comparing.array_sums import Compared
from weightbeam.transforms.comparing.verification import ArrayResult
from weightbeam.transforms.planning.conversion import Conversion

MISSING = "is missing"


OPTIMIZERS = ("opt_state", "optimizer", "outer_opt_state")  # how the keys of an optimizer's arrays begin


NOTES = "notes"  # in JSON


@dataclasses.dataclass(frozen=True, repr=False)
class Verification(Shown):
    """What a comparison found.

    Attributes:
      checkpoint: what was compared.
      conversion: what it should be the result of.
      findings: of each array that was compared, by its key.
      wrong: arrays that are missing, unexpected or of another shape, and what is wrong with each.
      sample: the share of each array's tensors that was compared.
      export: the release, where it is the one that is judged: an export of the checkpoint.
      others: what was found of the release's tensors that no array makes, by what they were compared with.
      unjudged: its tensors that were compared with nothing, with the reason why the table leaves them out.
      notes: what of it, or of the source, isn't wrong and yet to be known, and what is to be said of that.
      digests: how many of the checkpoint's arrays were compared with the digests of its record.
      state: the checkpoint's arrays that are no weights, and weren't compared: a training state's.
    """

    checkpoint: str
    conversion: Conversion
    findings: Mapping[str, ArrayResult]
    wrong: tuple[tuple[str, str], ...]
    sample: float = 1.0
    export: str | None = None
    others: Mapping[str, Mapping[str, ArrayResult]] = dataclasses.field(default_factory=dict)
    unjudged: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()
    digests: Compared | None = None
    state: tuple[str, ...] = ()

    @property
    def _all(self) -> Mapping[str, ArrayResult]:
        return dict(itertools.chain(self.findings.items(), *(found.items() for found in self.others.values())))

    @property
    def ok(self) -> bool:
        """Whether all that was compared is right."""
        return not self.faults

    @property
    def left_out(self) -> list[str]:
        """Arrays that aren't in the checkpoint, and not among the parameters that MaxText loads."""
        return [key for key, what in self.wrong if what == MISSING and not key.startswith(PARAMETERS)]

    @property
    def faults(self) -> list[str]:
        """What differs, a line each: first what is missing or too much, then values."""
        left_out = set(self.left_out)
        faults = [f"{key.removeprefix(PARAMETERS)} {what}" for key, what in self.wrong if key not in left_out]
        return faults + [
            f"{key.removeprefix(PARAMETERS)}: {found.different:,} of {found.compared:,} elements differ"
            f"{f', by up to {found.largest:.3g}' if found.largest else ''}; {found.first}"
            for key, found in self._all.items()
            if found.different
        ]

    def check(self) -> None:
        """Raises `Failed` with all that differs, if anything does; the last line is the command that shows how much."""
        if faults := self.faults:
            lines = [f"  {fault}" for fault in faults[:SHOWN]]
            if len(faults) > SHOWN:
                lines.append(f"  … and {len(faults) - SHOWN} more; --json FILE has all")
            if any(found.different for found in self.findings.values()):
                what = "did training change" if self.state else "differs"
                lines.append(f"what {what}, and how much? {diff_command(self.conversion.source.root, self.checkpoint)}")
            raise Failed("\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """What `weightbeam verify --json` writes: what was found of each array, and of an export's other tensors, each by its
        key; and by `notes`, where there are any, what is to be known of what.
        """
        arrays: dict[str, Any] = {key: {"different": None, "message": what} for key, what in self.wrong}
        for key, found in self._all.items():
            message = str(found.first) if found.first else None
            arrays[key] = {
                "compared": found.compared,
                "different": found.different,
                "rounded": found.rounded,
                "message": message,
            }
        return {**arrays, NOTES: dict(self.notes)} if self.notes else arrays

    @property
    def warnings(self) -> list[str]:
        """What is right, and yet strange: tensors with NaN or infinite elements, matrices that are zero throughout, and the
        notes.
        """
        odd = [found.not_finite for found in self.findings.values() if found.not_finite[0]]
        zero = [name for found in self.findings.values() for name in found.zero]
        warnings = []
        if odd:
            elements = sum(number for number, _ in odd)
            are = "is" if elements == 1 else "are"
            warnings.append(
                f"{count(elements, 'element')} of the source {are} NaN or infinite, in {count(len(odd), 'array')}, the first in {odd[0][1]}"
            )
        if zero:
            warnings.append(
                f"{count(len(zero), 'tensor')} of the source {'is' if len(zero) == 1 else 'are'} zero throughout, the first is {zero[0]}"
            )
        warnings += [f"{key} {what}" for key, what in self.notes]
        return [printable(warning) for warning in warnings]

    def blocks(self) -> list[str]:
        kinds = Counter(map(_kind, self._all.values()))
        compared = _elements(self.findings)
        part = f", a sample of {self.sample:.3g}" if self.sample < 1 else ""
        judged = f" with {printable(self.export)}, as if it were exported of them" if self.export else ""
        lines = [f"{compared:,} elements of {count(len(self.findings), 'array')} compared{judged}{part}"]
        lines += [
            f"{_elements(found):,} elements of {count(len(found), 'tensor')} of {'it' if self.export else 'the source'} compared with {printable(origin)}"
            for origin, found in self.others.items()
        ]
        error = max((found.error for found in self._all.values()), default=0.0)
        texts = dict(
            exact="exact",
            rounded="rounded once, as the plan says",
            quantised=f"quantised: a tensor's relative error is at most {error:.2%}, by norms",
            different="different",
        )
        for kind, text in texts.items():
            if kinds[kind]:
                lines.append(f"  {kinds[kind]:>6,} {text}")
            if kind == "rounded":
                keys = [key.removeprefix(PARAMETERS) for key, found in self._all.items() if _kind(found) == "rounded"]
                lines += [f"         {printable(key, CELL)}" for key in collapse(keys)]
        if self.left_out:
            name = printable(self.left_out[0], CELL)
            lines.append(
                f"  {len(self.left_out):>6,} not in the checkpoint, and not among the parameters that MaxText loads: {name} …"
            )
        for why, times in Counter(self.unjudged.values()).items():
            lines.append(f"  {times:>6,} of its tensors compared with nothing: {printable(why)}")
        if self.state:
            lines.append(_state_text(self.state))
        if self.digests and self.digests.arrays:
            lines.append(f"{count(self.digests.arrays, 'array')} of the checkpoint compared with their digests")
        return [*lines, *(f"warning: {warning}" for warning in self.warnings)]

    def whole(self) -> list[str]:
        return [*self.blocks(), *self.faults]

    def brief(self) -> str:
        found = "nothing differs" if self.ok else count(len(self.faults), "fault")
        return f"{self.checkpoint}: {_elements(self.findings):,} elements of {count(len(self.findings), 'array')} compared, {found}"


def _kind(found: ArrayResult) -> str:
    """How an array, or a tensor, compares."""
    if found.different:
        return "different"
    return "quantised" if found.error else "rounded" if found.rounded else "exact"


def _state_text(keys: Sequence[str]) -> str:
    """That a training state's other arrays weren't compared."""
    optimizer = sum(key.startswith(OPTIMIZERS) for key in keys)
    others = sorted({key.partition(".")[0] for key in keys if not key.startswith(OPTIMIZERS)})
    parts = [f"its optimizer ({count(optimizer, 'array')})"] if optimizer else []
    parts += [f"its {' and '.join(others)} ({count(len(keys) - optimizer, 'array')})"] if others else []
    return f"a training state: {' and '.join(parts)} {'are' if len(parts) > 1 else 'is'} not compared"


def diff_command(a: str, b: str) -> str:
    """The command that compares any two checkpoints."""
    return f"weightbeam diff {shlex.quote(a)} {shlex.quote(b)}"


def _elements(findings: Mapping[str, ArrayResult]) -> int:
    """How many elements were compared."""
    return sum(found.compared for found in findings.values())
