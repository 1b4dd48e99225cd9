"""`weightbeam diff`: two checkpoints of any kinds, tensor by tensor in one spelling.

Two releases are compared under the names of their family's table, quantised tensors by their values. Where one side is
an Orbax checkpoint, both are compared as MaxText's arrays: a release as it would be converted into that checkpoint. Two
Orbax checkpoints are compared by MaxText's keys, whoever wrote them, and layer by layer where one has its layers
stacked and the other hasn't; two training states with what is around their weights. How two releases differ in their
small files is said beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.formats.storage import open_store
from weightbeam.pipelines.checking.comparison import Comparison
from weightbeam.pipelines.checking.pairs import open_pair
from weightbeam.pipelines.checking.pairwise import compare_pairs
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.terminal.keywords import asked_of, keywords_of, takes
from weightbeam.pipelines.terminal.progress import Report, reporter
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Intended
from weightbeam.pipelines.terminal.tables import count
from weightbeam.transforms.comparing.release_faults import unlike_files
from weightbeam.transforms.planning.options import DiffOptions


@takes(asked=DiffOptions)
def diff(a: str, b: str, *, asked: DiffOptions, progress: bool | Report = True) -> Comparison:
    """Compares two checkpoints of any kinds, every element, in bounded memory; of two training states all arrays. What
    differs doesn't raise: see `Comparison.ok`.

    Args:
      a, b: releases (quantised or not) or Orbax checkpoints (a root, a step or an item): folders, `gs://…`, releases
        also `hf://…`.
      progress: shown on standard error, told to a callback, or False for neither.

    Returns:
      The tensors of both sides, equal, different and by how much, or on one side alone.

    Raises:
      Refused: one of them can't be looked at, or problems stand against it.
      Failed: it failed on the way.

    Example:
      >>> compared = wb.diff("models/qwen3", "ckpt", progress=False)
      >>> compared.ok
      True
    """
    use_secret(asked.hf_token_secret)
    pair = open_pair(a, b, asked.maxtext_model, asked.family, asked.state)
    (found,) = compare_pairs([pair], reporter(progress))
    releases = [open_store(source.root) for source in pair.sources if isinstance(source, HfCheckpoint)]
    files = unlike_files(*releases) if len(releases) == 2 else {}
    return dataclasses.replace(found, tolerance=asked.tolerance, fail_over=asked.fail_over, files=files)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compares, reports, and says whether they are the same within the tolerance; with `--dry_run` what it would compare."""
    if args.dry_run:
        asked = asked_of(args, DiffOptions)
        use_secret(asked.hf_token_secret)
        pair = open_pair(args.a, args.b, asked.maxtext_model, asked.family, asked.state)
        shared, alone = [*filter(pair.shared, pair.first)], len(pair.first.keys() ^ pair.second.keys())
        sentence = (
            f"would compare {count(len(shared), 'tensor')} of {args.a} and {args.b}; {alone:,} are on one side alone"
        )
        figures = {"a": args.a, "b": args.b, "tensors": len(shared), "on_one_side": alone}
        say(args, Intended([sentence], figures))
        return 0
    found = diff(**keywords_of(args, diff))
    say(args, found)
    return 0 if found.ok else 1
