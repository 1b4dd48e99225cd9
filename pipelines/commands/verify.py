"""`weightbeam verify`: a checkpoint against its source, element by element."""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam

from weightbeam.formats.storage.identity import as_read
from weightbeam.model_mappings.plan import Array
from weightbeam.pipelines.checking.of_source import plan_verification
from weightbeam.pipelines.checking.subject import Subject, is_spare
from weightbeam.pipelines.checking.verification import Verification
from weightbeam.pipelines.running.beam_options import make_pipeline, pipeline_options
from weightbeam.pipelines.running.runners.failure import OUR_KIND, last_words
from weightbeam.pipelines.running.sources import check_read
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.terminal.keywords import asked_of, keywords_of, takes
from weightbeam.pipelines.terminal.notebook import as_in_a_script
from weightbeam.pipelines.terminal.progress import Report, quiet, reporter, roots, watch_progress
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Intended
from weightbeam.pipelines.terminal.tables import count, human
from weightbeam.transforms.comparing.verification import compared_elements, is_compared, tasks
from weightbeam.transforms.planning.options import VerifyOptions
from weightbeam.transforms.stages.comparing import COMPARED, CompareArrays, StagedSubject, read_findings
from weightbeam.transforms.stages.staged import remember


@takes(asked=VerifyOptions)
def verify(
    checkpoint: str,
    source: str | None = None,
    *,
    asked: VerifyOptions,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
) -> Verification:
    """Compares every element of a checkpoint with the tensors it was made of, in a way of its own. What differs doesn't
    raise: see `ok` and `check`.

    Args:
      checkpoint: an Orbax checkpoint, ours or MaxText's converter's: its root, a step or an item, in a folder or in
        `gs://`. Or a release that was exported, which is compared with the checkpoint it was made of.
      source: a folder, `gs://…` or `hf://…`; None for what the checkpoint says, and for the files of a virtual
        checkpoint. Of a release that was exported, the checkpoint.
      beam: Beam's options, as on the command line.
      progress: shown on standard error, told to a callback, or False for neither.

    Returns:
      What was compared, in elements and arrays, and what differs, by how much.

    Raises:
      Refused: it can't be compared.
      Failed: it failed on the way.

    Example:
      >>> compared = wb.verify("ckpt", progress=False)
      >>> compared.ok
      True
      >>> compared.check()  # raises `Failed` where anything differs
    """
    subject = plan_verification(checkpoint, source, _given(asked), asked.hf_token_secret, beam)
    findings = execute(subject, asked.sample, beam, reporter(progress))
    return subject.found(findings, asked.sample)


def _given(asked: VerifyOptions) -> dict[str, Any]:
    """What is said of the checkpoint's options; None for what it says itself."""
    given = {**vars(asked), "lora": asked.lora or None}
    return {name: value for name, value in given.items() if name not in ("sample", "hf_token_secret")}


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compares, reports, and says whether all of it is right."""
    if args.dry_run:
        asked = asked_of(args, VerifyOptions)
        subject = plan_verification(args.checkpoint, args.source, _given(asked), args.hf_token_secret, rest)
        conversion = subject.conversion
        arrays, items, source = conversion.plan.arrays, subject.items, conversion.source.root
        nbytes = sum(compared_bytes(array, args.sample) for array in arrays)
        sentence = f"would compare {count(len(arrays), 'array')}, {human(nbytes)}, of {items} with {source}"
        figures = {"checkpoint": str(items), "source": source, "arrays": len(arrays), "bytes": nbytes}
        say(args, Intended(sentence, figures))
        subject.found({}, args.sample).check()
        return 0
    found = verify(**keywords_of(args, verify), beam=rest)
    say(args, found)
    found.check()
    return 0


def compared_bytes(array: Array, sample: float) -> int:
    """Bytes of an array that are compared, about."""
    return compared_elements(array, sample) * array.dtype.itemsize


def execute(subject: Subject, sample: float, rest: Sequence[str], report: Report | None = None) -> dict[str, Any]:
    """Runs the comparison as a pipeline; see `read_findings`.

    Raises:
      Failed: it failed on the way.
    """
    conversion, all_tasks = subject.conversion, tasks(subject.conversion)
    skipped = {key for key, _ in subject.wrong} | {
        array.key for array in conversion.plan.arrays if is_spare(array) and array.key not in subject.keys
    }
    todo = [number for number, task in enumerate(all_tasks) if conversion.plan.arrays[task.array].key not in skipped]
    counterparts = [
        one for ones in subject.counterparts.values() for number, one in enumerate(ones) if is_compared(number, sample)
    ]
    shards = subject.shards(sample)
    todo += range(len(all_tasks), len(all_tasks) + len(counterparts) + len(shards))
    nbytes = sum(compared_bytes(array, sample) for array in conversion.plan.arrays if array.key not in skipped)
    nbytes += sum(one.nbytes for one in [*counterparts, *shards])
    remember(conversion)
    staged = StagedSubject(
        conversion.stage(), conversion.hash, subject.items, sample, subject.keys, subject.exported, counterparts, shards
    )
    noise = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings"
        try:
            pipeline = make_pipeline(pipeline_options(rest))
            before, places = COMPARED.total, [*roots(conversion.places), str(subject.items)]
            with (
                watch_progress(nbytes, lambda: COMPARED.total - before, "comparing", report, places=places),
                quiet(noise),
                as_in_a_script(),
            ):
                _ = pipeline | beam.Create(todo) | CompareArrays(staged, file)
                pipeline.run().wait_until_finish()
            found = read_findings(file, len(todo))
        except Exception as e:
            check_read(subject.sources)  # which says more
            raise Failed(f"  {as_read(OUR_KIND.sub('', last_words(e)))}") from e
    check_read(subject.sources)
    return found
