"""`weightbeam merge`: PEFT adapters into a release."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence

from weightbeam.formats.release.config_text import ConfigEdits
from weightbeam.formats.release.small_files import carried_files, files_of
from weightbeam.formats.storage import StorageError
from weightbeam.model_mappings.registry import UnknownFamilyError
from weightbeam.pipelines.commands.releases import (
    Released,
    adapter_facts,
    going_to,
    loading,
    make_release,
    make_small_files,
    run_release,
)
from weightbeam.pipelines.running.sources import check_named, open_adapters, open_release
from weightbeam.pipelines.terminal.errors import refusing, try_each
from weightbeam.pipelines.terminal.keywords import asked_of, takes
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.pipelines.terminal.tables import count, human
from weightbeam.transforms.cutting.quantizing import Given
from weightbeam.transforms.planning.merge_planner import plan_merge
from weightbeam.transforms.planning.merging import Merge
from weightbeam.transforms.planning.options import MergeOptions, ToHub

CODES = "codes and scales of weights that are written as their values"


@dataclasses.dataclass(frozen=True, repr=False)
class Merged(Released):
    """What came of a merge, a cut, a quantisation or a dequantisation; see `Released`."""

    planned: Merge

    def details(self) -> list[str]:
        planned, lines = self.planned, [self.planned.changes]
        if planned.plan.dropped:
            lines.append(f"{count(len(planned.plan.dropped), 'tensor')} left out: {CODES}")
        lines += loading(self.folder, planned.source.config, planned.layout.tensors)
        if not planned.source.cut:
            lines.append(f"compare:  weightbeam diff {shlex.quote(planned.source.root)} {shlex.quote(self.folder)}")
        return lines


@takes(asked=MergeOptions, how=ToHub)
def merge(
    source: str,
    output: str,
    *,
    asked: MergeOptions,
    how: ToHub,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged:
    """Merges PEFT adapters into a release, which appears in `output` whole, at the end.

    Args:
      source: the release: a folder, `gs://bucket/folder` or `hf://organisation/model[@revision]`.
      output: a folder or `gs://bucket/folder` for the new one, which must not be there yet; or `hf://owner/name`, where
        it becomes one commit.
      beam: Beam's options.
      progress: whether to show it, or what is told of it.

    Returns:
      Where the new release is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.merge("models/qwen3", "merged", lora="adapter,0.5", progress=False)  # at half its weight
      <weightbeam.Merged: .../merged: 25 tensors in 1 file, ...>
    """
    return Merged(*make_release("merge", source, output, asked, how, beam, progress, plan))


def plan(
    source: str, asked: MergeOptions, given: Given | None = None, output: str | None = None, slots: int | None = None
) -> Merge:
    """Plans a release with its quantised weights, adapters, or both as values; or in FP8, like a `given` one. `slots`
    as `plan_merge` has it.

    Raises:
      Refused: there is nothing to plan.
    """
    check_named("merge", source=source)
    options = going_to(output, asked)
    checkpoint, adapters = try_each(lambda: open_release(source, cut=asked.cut), lambda: open_adapters(options))
    with refusing(UnknownFamilyError):
        planned = plan_merge(options, checkpoint, adapters, given, slots)
    if planned.plan.problems:
        return planned
    with refusing(StorageError):
        small = files_of(checkpoint, carried_files(checkpoint.root, checkpoint.opened))
        return dataclasses.replace(planned, small=make_small(planned, small, output))


def make_small(planned: Merge, small: Mapping[str, bytes], output: str | None = None) -> dict[str, bytes]:
    """The small files of the release that is written; `small` are those of the one that it is made of."""
    quantized = {"base_model_relation": "quantized", "tags": ["fp8"]} if planned.quantization else {}
    gone = planned.quantization == {}
    edits = ConfigEdits(planned.options.save_dtype, drop_quantization=gone, quantization=planned.quantization or None)
    facts = {"base": planned.source.root, "kept": planned.source.cut}
    facts |= {"scales of": planned.given.files.root} if planned.given else {}
    facts |= adapter_facts(planned.adapters)
    return make_small_files(planned, planned.source, small, edits, facts, output, **quantized)


def plan_rows(planned: Merge) -> Iterator[tuple[str, str]]:
    """What would be written, for a person."""
    yield "source", f"{planned.source.root}, {human(planned.source_bytes)}"
    yield "changes", planned.changes
    if planned.plan.dropped:
        yield "left out", f"{count(len(planned.plan.dropped), 'tensor')}: {CODES}"


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Merges, and says what came of it; with `--dry_run` whether it could."""
    return run_release(args, rest, asked_of(args, MergeOptions), merge, plan, plan_rows)
