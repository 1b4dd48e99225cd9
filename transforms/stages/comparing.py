"""The stages of a verification: numbers of tasks in, what was found of each array out; what a comparison is stands in
`verification.py`.
"""

# pyright: reportReturnType=false
# Beam says of `pcoll | transform` only that it is a PValue.

from __future__ import annotations

import dataclasses
import operator
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import apache_beam as beam

from weightbeam.formats.orbax import open_arrays
from weightbeam.formats.storage import Store, write_file
from weightbeam.transforms.comparing.array_sums import ShardsRead, ShardsTask
from weightbeam.transforms.comparing.counterparts import Counterpart, compare_counterparts
from weightbeam.transforms.comparing.verification import ArrayResult, run_task, tasks
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.stages.staged import load_bytes
from weightbeam.transforms.stages.work import Tally

COMPARED = Tally()  # bytes of the checkpoint; twice those that are read once more for their digests


@dataclasses.dataclass(frozen=True)
class StagedSubject:
    """What is compared with what, as workers get it.

    Attributes:
      staged, plan_hash: the conversion of the source.
      items: the checkpoint.
      sample: the share of each array that is compared.
      keys: the checkpoint's key of each array.
      exported: whether it is the release that is judged: an export of the checkpoint.
      counterparts: what of that no array makes; numbered behind the last task.
      shards: of the checkpoint that are compared with its digests; numbered behind the last counterpart.
    """

    staged: bytes
    plan_hash: str
    items: Store
    sample: float
    keys: Mapping[str, str]
    exported: bool = False
    counterparts: Sequence[Counterpart] = ()
    shards: Sequence[ShardsTask] = ()


class CompareArrays(beam.PTransform):
    """Numbers of tasks -> a file with all findings, which `read_findings` reads."""

    def __init__(self, subject: StagedSubject, report: Path):
        super().__init__()
        self.fn, self.report = _CompareFn(subject), report

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return (
            pcoll
            | "Compare" >> beam.ParDo(self.fn).with_output_types(bytes)
            | beam.WithKeys(0)
            | beam.GroupByKey()
            | "Report" >> beam.Map(_write, self.report)
        )


class _CompareFn(beam.DoFn):
    def __init__(self, subject: StagedSubject):
        self.subject = subject

    def setup(self) -> None:
        of = self.subject
        self.stores = open_arrays(of.items)
        self.conversion = cast(Conversion, load_bytes(of.staged, of.plan_hash))
        self.tasks = tasks(self.conversion)

    def process(self, number: int) -> Iterator[bytes]:
        yield pickle.dumps((number, self._compare(number)))

    def _compare(self, number: int) -> ArrayResult | ShardsRead:
        """What is found of a task."""
        counterparts = self.subject.counterparts
        if number >= len(self.tasks) + len(counterparts):
            shards = self.subject.shards[number - len(self.tasks) - len(counterparts)]
            found = shards.run()
            COMPARED.add(shards.nbytes)
            return found
        if number >= len(self.tasks):
            counterpart = counterparts[number - len(self.tasks)]
            COMPARED.add(counterpart.nbytes)
            return compare_counterparts(counterpart)
        task = self.tasks[number]
        store = self.stores[self.subject.keys[self.conversion.plan.arrays[task.array].key]]
        finding = run_task(task, self.conversion, store, self.subject.sample, self.subject.exported)
        COMPARED.add(finding.compared * self.conversion.plan.arrays[task.array].dtype.itemsize)
        return finding


def _write(gathered: tuple[int, Iterable[bytes]], report: Path) -> None:
    write_file(report, pickle.dumps(list(gathered[1])))


def read_findings(report: Path, tasks: int) -> dict[str, Any]:
    """What was found of each array, and of each tensor that has a counterpart: an `ArrayResult`; and of the shards that
    were read for a digest: `ShardsRead`. In the order of the tasks, whichever was done first.

    Raises:
      RuntimeError: not all of so many tasks are there: the runner lost some.
    """
    found: dict[str, Any] = {}
    findings = pickle.loads(report.read_bytes()) if tasks else []  # nobody gathers nothing
    if len(findings) != tasks:
        raise RuntimeError(f"{len(findings):,} of {tasks:,} comparisons were made; Beam lost the others")
    for _, finding in sorted(map(pickle.loads, findings), key=operator.itemgetter(0)):
        found[finding.key] = found[finding.key] + finding if finding.key in found else finding
    return found
