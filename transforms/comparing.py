"""The stages of a verification: numbers of tasks in, what was found of each array out; what a comparison is stands in
`verification.py`.
"""

# pyright: reportReturnType=false
# Beam says of `pcoll | transform` only that it is a PValue.

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import apache_beam as beam

from weightbeam.formats.orbax import open_arrays
from weightbeam.formats.storage import Store, write_file
from weightbeam.transforms.conversion import Conversion
from weightbeam.transforms.counterparts import Counterpart, compare_counterparts
from weightbeam.transforms.staged import load_bytes
from weightbeam.transforms.verification import ArrayResult, run_task, tasks
from weightbeam.transforms.work import Tally

COMPARED = Tally()  # bytes of the checkpoint


class CompareArrays(beam.PTransform):
    """Numbers of tasks -> a file with all findings, which `read_findings` reads.

    With `keys`, the checkpoint's key of each array, it is the release that is judged: an export of the checkpoint. Its
    `counterparts` are numbered behind the last task.
    """

    def __init__(
        self,
        staged: bytes,
        plan_hash: str,
        items: Store,
        sample: float,
        report: Path,
        keys: Mapping[str, str] | None = None,
        counterparts: Sequence[Counterpart] = (),
    ):
        super().__init__()
        self.fn = _CompareFn(staged, plan_hash, items, sample, keys, counterparts)
        self.report = report

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return (
            pcoll
            | beam.Reshuffle()
            | "Compare" >> beam.ParDo(self.fn).with_output_types(bytes)
            | beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "Report" >> beam.Map(_write, self.report)
        )


class _CompareFn(beam.DoFn):
    def __init__(
        self,
        staged: bytes,
        plan_hash: str,
        items: Store,
        sample: float,
        keys: Mapping[str, str] | None,
        counterparts: Sequence[Counterpart],
    ):
        self.staged, self.plan_hash, self.items, self.sample, self.keys = staged, plan_hash, items, sample, keys
        self.counterparts = counterparts

    def setup(self) -> None:
        self.stores = open_arrays(self.items)
        self.conversion = cast(Conversion, load_bytes(self.staged, self.plan_hash))
        self.tasks = tasks(self.conversion)

    def process(self, number: int) -> Iterator[bytes]:
        if number >= len(self.tasks):
            counterpart = self.counterparts[number - len(self.tasks)]
            COMPARED.add(counterpart.nbytes)
            yield pickle.dumps(compare_counterparts(counterpart))
            return
        task = self.tasks[number]
        key = self.conversion.plan.arrays[task.array].key
        store = self.stores[key if self.keys is None else self.keys[key]]
        finding = run_task(task, self.conversion, store, self.sample, self.keys is not None)
        COMPARED.add(finding.compared * self.conversion.plan.arrays[task.array].dtype.itemsize)
        yield pickle.dumps(finding)


def _write(findings: Sequence[bytes], report: Path) -> None:
    write_file(report, pickle.dumps(list(findings)))


def read_findings(report: Path, tasks: int) -> dict[str, ArrayResult]:
    """What was found of each array, and of each tensor that has a counterpart.

    Raises:
      RuntimeError: not all of so many tasks are there: the runner lost some.
    """
    found: dict[str, ArrayResult] = {}
    findings = pickle.loads(report.read_bytes())
    if len(findings) != tasks:
        raise RuntimeError(f"{len(findings):,} of {tasks:,} comparisons were made; Beam lost the others")
    for packed in findings:
        finding = pickle.loads(packed)
        found[finding.key] = found[finding.key] + finding if finding.key in found else finding
    return found
