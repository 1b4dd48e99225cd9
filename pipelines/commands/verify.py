"""`weightbeam verify`: a checkpoint against its source, element by element."""

from __future__ import annotations

import argparse
import concurrent.futures
import traceback
from collections.abc import Sequence
from typing import Any

from weightbeam.formats.orbax import open_arrays
from weightbeam.formats.storage.identity import as_read
from weightbeam.formats.storage.stoppable import StoppablePool
from weightbeam.pipelines.checking.of_source import plan_verification
from weightbeam.pipelines.checking.subject import Subject, is_spare
from weightbeam.pipelines.checking.verification import Verification
from weightbeam.pipelines.running.runners.failure import OUR_KIND
from weightbeam.pipelines.running.sources import check_read
from weightbeam.pipelines.running.threads import check_addresses, telling_of_threads
from weightbeam.pipelines.running.without_beam import threads_in
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.terminal.keywords import asked_of, keywords_of, takes
from weightbeam.pipelines.terminal.progress import Report, reporter, roots, watch_progress
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Intended
from weightbeam.pipelines.terminal.tables import count, human
from weightbeam.transforms.comparing.array_sums import ShardsRead
from weightbeam.transforms.comparing.counterparts import compare_counterparts
from weightbeam.transforms.comparing.verification import (
    ArrayResult,
    CompareTask,
    compared_bytes,
    is_compared,
    run_task,
    tasks,
)
from weightbeam.transforms.planning.options import VerifyOptions


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
      beam: Beam's options, as on the command line: `--direct_num_workers=N`, how many threads compare.
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
        say(args, Intended([sentence], figures))
        subject.found({}, args.sample).check()
        return 0
    found = verify(**keywords_of(args, verify), beam=rest)
    say(args, found)
    found.check()
    return 0


def execute(subject: Subject, sample: float, rest: Sequence[str], report: Report | None = None) -> dict[str, Any]:
    """Compares in threads, each one task at a time.

    Returns:
      What was found of each array, and of each tensor that has a counterpart: an `ArrayResult`; and of the shards that
      were read for a digest: `ShardsRead`. In the order of the tasks, whichever was done first.

    Raises:
      Failed: it failed on the way.
    """
    conversion, arrays = subject.conversion, subject.conversion.plan.arrays
    skipped = {key for key, _ in subject.wrong} | {
        array.key for array in arrays if is_spare(array) and array.key not in subject.keys
    }
    counterparts = [
        one for ones in subject.counterparts.values() for number, one in enumerate(ones) if is_compared(number, sample)
    ]
    shards = subject.shards(sample)
    nbytes = sum(compared_bytes(array, sample) for array in arrays if array.key not in skipped)
    nbytes += sum(one.nbytes for one in [*counterparts, *shards])
    threads, places, done = threads_in(rest), [*roots(conversion.places), str(subject.items)], 0
    try:
        check_addresses(threads)
        stores = open_arrays(subject.items)

        def compare_cells(task: CompareTask) -> tuple[ArrayResult, int]:
            array = arrays[task.array]
            found = run_task(task, conversion, stores[subject.keys[array.key]], sample, subject.exported)
            return found, found.compared * array.dtype.itemsize

        with (
            watch_progress(nbytes, lambda: done, "comparing", report, places=places),
            telling_of_threads(),
            StoppablePool(threads) as pool,
        ):
            futures: list[concurrent.futures.Future[tuple[ArrayResult | ShardsRead, int]]] = [
                *(
                    pool.submit(compare_cells, each)
                    for each in tasks(conversion)
                    if arrays[each.array].key not in skipped
                ),
                *(pool.submit(lambda one: (compare_counterparts(one), one.nbytes), each) for each in counterparts),
                *(pool.submit(lambda one: (one.run(), one.nbytes), each) for each in shards),
            ]
            for future in concurrent.futures.as_completed(futures):
                done += future.result()[1]
    except Exception as e:
        check_read(subject.sources)  # which says more
        raise Failed(f"  {as_read(OUR_KIND.sub('', traceback.format_exception_only(e)[0].strip()))}") from e
    check_read(subject.sources)
    found: dict[str, Any] = {}
    for finding, _ in (future.result() for future in futures):
        found[finding.key] = found[finding.key] + finding if finding.key in found else finding
    return found
