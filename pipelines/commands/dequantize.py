"""`weightbeam dequantize`: a quantised release as an ordinary one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from weightbeam.pipelines.commands.merge import Merged, plan, plan_rows
from weightbeam.pipelines.commands.releases import make_release, run_release
from weightbeam.pipelines.terminal.keywords import asked_of, takes
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.transforms.planning.options import DequantizeOptions, MergeOptions, ToHub, options_as


@takes(asked=DequantizeOptions, how=ToHub)
def dequantize(
    source: str,
    output: str,
    *,
    asked: DequantizeOptions,
    how: ToHub,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged:
    """Writes a quantised release with the values of its weights, computed in float32 and cast once; all else is its own
    bytes.

    Args:
      source, output, beam, progress: as for `merge`.

    Returns:
      Where the new release is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.dequantize("models/qwen3-fp8", "plain", save_dtype="float32", progress=False)
      <weightbeam.Merged: .../plain: 25 tensors in 1 file, ...>
    """
    return Merged(*make_release("dequantize", source, output, _as_values(asked), how, beam, progress, plan))


def _as_values(asked: DequantizeOptions) -> MergeOptions:
    return options_as(MergeOptions, asked, dequantize=True)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Dequantises, and says what came of it; with `--dry_run` whether it could."""
    return run_release(args, rest, _as_values(asked_of(args, DequantizeOptions)), dequantize, plan, plan_rows)
