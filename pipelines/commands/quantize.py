"""`weightbeam quantize`: a release in FP8, from an ordinary one or straight from an Orbax checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from weightbeam.formats.safetensors import is_release
from weightbeam.formats.storage import open_store, reason
from weightbeam.pipelines.commands import export, merge
from weightbeam.pipelines.commands.export import Exported
from weightbeam.pipelines.commands.merge import Merged
from weightbeam.pipelines.commands.releases import make_release, run_release
from weightbeam.pipelines.running.like import open_given
from weightbeam.pipelines.running.sources import check_named
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import asked_of, takes
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.transforms.planning.exporting import Export
from weightbeam.transforms.planning.merging import Merge
from weightbeam.transforms.planning.options import (
    OF_CHECKPOINTS,
    ExportOptions,
    MergeOptions,
    QuantizeOptions,
    ToHub,
    options_as,
    options_of,
)


@takes(asked=QuantizeOptions, how=ToHub)
def quantize(
    source: str,
    output: str,
    *,
    asked: QuantizeOptions,
    how: ToHub,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged | Exported:
    """Writes a release whose linear layers are FP8 in blocks of 128 × 128, as DeepSeek's are: for vLLM, SGLang and
    transformers.

    Args:
      source: a release, or an Orbax checkpoint, which is exported in the same pass.
      output, beam, progress: as for `export`.

    Returns:
      Where the new release is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.quantize("models/qwen3", "smaller", progress=False)
      <weightbeam.Merged: .../smaller: 39 tensors in 1 file, ...>
    """
    planned, written = make_release("quantize", source, output, asked, how, beam, progress, plan)
    return Exported(planned, written) if isinstance(planned, Export) else Merged(planned, written)


@takes(asked=QuantizeOptions)
def plan(source: str, *, asked: QuantizeOptions, output: str | None = None, slots: int | None = None) -> Merge | Export:
    """Plans a quantisation; problems stay in the plan. See `quantize`; `slots` as `plan_merge` has it.

    Raises:
      Refused: there is nothing to plan.
    """
    check_named("quantize", source=source)
    try:
        released = is_release(open_store(source))
    except OSError as e:
        raise Refused(reason(e)) from e
    if not released and asked.cut:
        raise Refused(
            f"{asked.cut}: is taken of a release, and {source} is none; `weightbeam reshard` takes --layers and --experts of an Orbax checkpoint"
        )
    if not released:
        return export.plan(
            source, asked=options_as(ExportOptions, asked, quantize=asked.format), output=output, slots=slots
        )
    of_checkpoints = {each.name: each for each in options_of(QuantizeOptions) if each.help.startswith(OF_CHECKPOINTS)}
    # by identity: 0 and False say something where None is the default
    if vain := [
        f"--{name}" for name, each in sorted(of_checkpoints.items()) if getattr(asked, name) is not each.default
    ]:
        raise Refused(f"{', '.join(vain)}: {OF_CHECKPOINTS}, and {source} is a release")
    given = open_given(asked.like) if asked.like else None
    if asked.like and given is None:
        raise Refused(
            f"--like={asked.like}: isn't quantised, and a release is quantised like one that is; leave it out"
        )
    return merge.plan(source, options_as(MergeOptions, asked, quantize=asked.format), given, output, slots)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Quantises, and says what came of it; with `--dry_run` whether it could."""
    return run_release(args, rest, asked_of(args, QuantizeOptions), quantize, plan, _plan_rows)


def _plan_rows(planned: Export | Merge) -> Iterator[tuple[str, str]]:
    return export.plan_rows(planned) if isinstance(planned, Export) else merge.plan_rows(planned)
