"""From the command line's arguments to a planned conversion, or to a refusal that lists everything at once."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from formats.safetensors import Checkpoint, open_checkpoint
from formats.storage import StorageError, local_path
from model_mappings.cells import pattern
from model_mappings.plan import Problem
from pipelines.errors import RefusedError
from pipelines.report import count
from transforms.conversion import UNKNOWN_FAMILY, Conversion, Options, prepare
from transforms.mesh import MeshError

SHOWN = 20  # problems of one kind; the rest is counted


def prepare_conversion(args: argparse.Namespace) -> Conversion:
    """Plans what the arguments ask for; problems stay in the plan.

    Raises:
      RefusedError: there is nothing to plan: no source, no such mesh.
    """
    if not args.source:
        raise RefusedError("--source is missing: the folder with config.json and the safetensors files")
    values = vars(args) | {"mesh": tuple(args.mesh or ())}
    options = Options(**{field.name: values[field.name] for field in dataclasses.fields(Options)})
    try:
        checkpoint = open_checkpoint(local_path(args.source))
    except StorageError as e:
        raise RefusedError(str(e)) from e
    try:
        return prepare(options, checkpoint)
    except MeshError as e:
        raise RefusedError(str(e)) from e


def refuse(conversion: Conversion, problems: Sequence[Problem]) -> None:
    """Says everything that stands against a conversion.

    Raises:
      RefusedError: there is something.
    """
    if not problems:
        return
    message = f"{count(len(problems), 'problem')}:\n{describe(problems)}"
    if any(problem.kind == UNKNOWN_FAMILY for problem in problems):
        message += f"\n\nWhat {conversion.checkpoint.root} holds:\n{inventory(conversion.checkpoint)}"
    raise RefusedError(message)


def inventory(checkpoint: Checkpoint) -> str:
    """The tensors of a checkpoint, numbers in their names collapsed."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for name, tensor in checkpoint.tensors.items():
        groups[pattern(name)][f"{tensor.dtype.name} {list(tensor.shape)}"] += 1
    lines = [f"  {sum(kinds.values()):>6} × {name}  {', '.join(sorted(kinds)[:3])}{' …' if len(kinds) > 3 else ''}" for name, kinds in groups.items()]
    return "\n".join(lines) or "  no tensors"


def describe(problems: Iterable[Problem]) -> str:
    """All problems, by kind; many of one kind are counted."""
    kinds: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        kinds[problem.kind].append(problem)
    lines = []
    for kind, same in kinds.items():
        lines += [f"  {problem}" for problem in same[:SHOWN]]
        if len(same) > SHOWN:
            lines.append(f"  {kind}: … and {len(same) - SHOWN} more; weightbeam plan --json lists all")
    return "\n".join(lines)
