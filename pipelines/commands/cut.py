"""`weightbeam cut`: some layers, experts and rows of the vocabulary of a release, as a release of their own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from weightbeam.pipelines.commands.merge import Merged, plan, plan_rows
from weightbeam.pipelines.commands.releases import make_release, run_release
from weightbeam.pipelines.terminal.arguments.parser import refuse_unknown
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import asked_of, takes
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.transforms.planning.options import CutOptions, MergeOptions, ToHub, options_as


@takes(asked=CutOptions, how=ToHub)
def cut(
    source: str, output: str, *, asked: CutOptions, how: ToHub, beam: Sequence[str] = (), progress: bool | Report = True
) -> Merged:
    """Writes a part of a release as a release of its own: the tensors that are kept are its own bytes, codes and scales
    among them, and `config.json` describes them.

    Args:
      source, output, beam, progress: as for `merge`.

    Returns:
      Where the smaller release is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.cut("models/qwen3", "one_layer", layers="0:1", progress=False)
      <weightbeam.Merged: .../one_layer: 14 tensors in 1 file, ...>
    """
    return Merged(*make_release("cut", source, output, _as_merge(asked), how, beam, progress, plan))


def _as_merge(asked: CutOptions) -> MergeOptions:
    """A merge of nothing into what is kept. Raises Refused where nothing was said of that."""
    if not asked.cut:
        raise Refused("--layers, --experts and --vocab_rows: none of them says what is kept, such as --layers 0:4")
    return options_as(MergeOptions, asked)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Cuts, and says what came of it; with `--dry_run` whether it could."""
    asked = asked_of(args, CutOptions)
    if not asked.cut:  # what isn't known was meant to say it, rather than for Beam
        refuse_unknown(args, rest)
    return run_release(args, rest, _as_merge(asked), cut, plan, plan_rows)
