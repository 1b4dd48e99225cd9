"""What stands against a plan, told: all problems at once, by kind."""

from __future__ import annotations

import itertools
import logging
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.report import collapse
from weightbeam.pipelines.terminal.tables import count
from weightbeam.transforms.planning.layouts import UNKNOWN_FAMILY

LOG = logging.getLogger("weightbeam")
SHOWN = 20  # problems of one kind; the rest is counted
LINE = 5000  # characters of a problem: names and values in it are the files', however long
KINDS, NAME = 200, 300  # of tensors that an inventory lists, and characters of their names


def refuse(problems: Sequence[Problem], source: object = None, of: str = "") -> None:
    """Refuses what has problems; does nothing where there are none.

    Args:
      problems: all of them.
      source: what is read; of a release whose family nobody knows a person is told where to look.
      of: whose problems they are, where several things may have some.

    Raises:
      Refused: with all of them.
    """
    if not problems:
        return
    message = (f"{of}: " if of else "") + f"{count(len(problems), 'problem')}:\n{describe(problems)}"
    unknown = next((problem for problem in problems if problem.kind == UNKNOWN_FAMILY), None)
    if unknown and isinstance(source, HfCheckpoint) and not unknown.message.startswith("--"):
        LOG.debug(f"What {source.root} holds:\n{inventory(source)}\n")
        what, _, listed = unknown.message.partition("\n")  # the families, which fill a screen
        again = f"{printable(what.removesuffix(' Supported:'), NAME)} " if listed else ""
        message += f"\n{again}weightbeam inspect {shlex.quote(source.root)} lists what it holds."
    raise Refused(message, problems=problems)


def inventory(checkpoint: HfCheckpoint) -> str:
    """The tensors of a checkpoint, numbers in their names collapsed."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for name, tensor in checkpoint.tensors.items():
        groups[pattern(name)][f"{tensor.dtype.name} {list(tensor.shape)}"] += 1
    lines = [
        f"  {sum(kinds.values()):>6} × {printable(name, NAME)}  {', '.join(sorted(kinds)[:3])}{' …' if len(kinds) > 3 else ''}"
        for name, kinds in itertools.islice(groups.items(), KINDS)
    ]
    if len(groups) > KINDS:
        lines.append(f"  … and {len(groups) - KINDS:,} more kinds of names")
    return "\n".join(lines) or "  no tensors"


def describe(problems: Iterable[Problem]) -> str:
    """All problems, by kind; those that differ only in numbers once, and many of one kind are counted."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        kinds[problem.kind].append(printable(str(problem), LINE, lines=problem.kind == UNKNOWN_FAMILY))
    lines = []
    for kind, texts in kinds.items():
        different = collapse(texts)
        lines += [f"  {text}" for text in different[:SHOWN]]
        if len(different) > SHOWN:
            lines.append(f"  {kind}: … and {len(different) - SHOWN} more; plan and --dry_run list all with --json -")
    return "\n".join(lines)
