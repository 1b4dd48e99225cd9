"""`weightbeam verify`: a checkpoint against its source, element by element."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import tensorstore as ts

from weightbeam.formats.orbax import STEP, find_items, open_arrays, record_of
from weightbeam.formats.printable import printable
from weightbeam.formats.storage import Store
from weightbeam.formats.storage.token import name_secret
from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.pipelines.errors import Failed, Refused
from weightbeam.pipelines.keywords import keywords_of, read_loras
from weightbeam.pipelines.notebook import as_in_a_script
from weightbeam.pipelines.options import check_options, make_pipeline, pipeline_options
from weightbeam.pipelines.prepare import SHOWN, open_adapters, open_source, options_of, reading, refuse
from weightbeam.pipelines.progress import Report, quiet, reporter, watch_progress
from weightbeam.pipelines.runners.failure import last_words
from weightbeam.pipelines.shell import write_json
from weightbeam.pipelines.tables import CELL, count, page
from weightbeam.pipelines.virtual import check_files, open_own_source
from weightbeam.transforms.conversion import Conversion, prepare
from weightbeam.transforms.metadata import find_metadata_faults
from weightbeam.transforms.staged import remember
from weightbeam.transforms.verification import COMPARED, CompareArrays, Finding, compared_elements, read_findings, tasks

LOG = logging.getLogger("weightbeam")
MISSING = "is missing"


@dataclasses.dataclass(frozen=True)
class Verification:
    """What a comparison found.

    Attributes:
      checkpoint, source: what was compared.
      findings: of each array that was compared, by its key.
      wrong: arrays that are missing, unexpected or of another shape, and what is wrong with each.
      sample: the share of each array's tensors that was compared.
    """

    checkpoint: str
    source: str
    findings: Mapping[str, Finding]
    wrong: tuple[tuple[str, str], ...]
    sample: float = 1.0

    @property
    def ok(self) -> bool:
        """Whether all that was compared is right."""
        return not self.faults

    @property
    def left_out(self) -> list[str]:
        """Arrays that aren't in the checkpoint, and not among the parameters that MaxText loads."""
        return [key for key, what in self.wrong if what == MISSING and not key.startswith(PARAMETERS)]

    @property
    def faults(self) -> list[str]:
        """What differs, a line each."""
        left_out = set(self.left_out)
        faults = [f"{key.removeprefix(PARAMETERS)} {what}" for key, what in self.wrong if key not in left_out]
        return faults + [
            f"{key.removeprefix(PARAMETERS)}: {found.different:,} of {found.compared:,} elements differ; {found.first}"
            for key, found in self.findings.items()
            if found.different
        ]

    def check(self) -> None:
        """Raises `Failed` with all that differs, if anything does."""
        if faults := self.faults:
            shown = "\n".join(f"  {fault}" for fault in faults[:SHOWN])
            more = f"\n  … and {len(faults) - SHOWN} more; --json FILE has all" if len(faults) > SHOWN else ""
            raise Failed(f"{shown}{more}")

    def to_dict(self) -> dict[str, Any]:
        """What `weightbeam verify --json` writes: for each array what was found."""
        arrays: dict[str, Any] = {key: {"different": None, "message": what} for key, what in self.wrong}
        for key, found in self.findings.items():
            message = str(found.first) if found.first else None
            arrays[key] = {"compared": found.compared, "different": found.different, "rounded": found.rounded, "message": message}
        return arrays

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        kinds = Counter("different" if found.different else "rounded" if found.rounded else "exact" for found in self.findings.values())
        compared = sum(found.compared for found in self.findings.values())
        part = f", a sample of {self.sample:.3g}" if self.sample < 1 else ""
        lines = [f"{compared:,} elements of {count(len(self.findings), 'array')} compared{part}"]
        texts = dict(exact="exact", rounded="rounded once, as the plan says", different="different")
        lines += [f"  {kinds[kind]:>6,} {text}" for kind, text in texts.items() if kinds[kind]]
        if self.left_out:
            name = printable(self.left_out[0], CELL)
            lines.append(f"  {len(self.left_out):>6,} not in the checkpoint, and not among the parameters that MaxText loads: {name} …")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return page([str(self), *self.faults])


def verify(
    checkpoint: str,
    source: str | None = None,
    *,
    lora: str | Sequence[str] = (),
    sample: float = 1.0,
    maxtext_model: str | None = None,
    scan_layers: bool | None = None,
    param_scan_axis: int | None = None,
    hf_token_secret: str | None = None,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Verification:
    """Compares every element of a checkpoint with the tensors it was made of, in a way of its own. What differs doesn't raise: see `ok` and `check`.

    Args:
      checkpoint: an Orbax checkpoint, ours or MaxText's converter's: its root, a step or an item, in a folder or in `gs://`.
      source: a folder, `gs://…` or `hf://…`; None for the files of a virtual checkpoint.
      lora: adapters that were merged, where they aren't where the checkpoint says.
      sample: compare only this share of each array's tensors, but one at least.
      maxtext_model, scan_layers, param_scan_axis: None for what the checkpoint says.
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token.
      beam: Beam's options, as on the command line.
      progress: shown on standard error, told to a callback, or False for neither.

    Raises:
      Refused: it can't be compared.
      Failed: it failed on the way.
    """
    check_options(beam, "verify", {"source": source, "checkpoint": checkpoint})
    name_secret(hf_token_secret)
    if not checkpoint:
        raise Refused("--checkpoint is missing: what was made of the source")
    if not 0 < sample <= 1:
        raise Refused(f"sample={sample} should be a number above 0 and up to 1")
    with reading(checkpoint):
        items = find_items(checkpoint)
        if found := check_files(items):
            LOG.info(found)
        elif not source:
            raise Refused("--source is missing: only a virtual checkpoint has its source with it")
        stores = open_arrays(items)
        opened = open_source(source, bool(record_of(items).get("options", {}).get("allow_links"))) if source else open_own_source(items)
    given = {"scan_layers": scan_layers, "param_scan_axis": param_scan_axis, "maxtext_model": maxtext_model, "lora": read_loras(lora)}
    with reading(checkpoint):
        options = options_of(items, stores, given)
        conversion = prepare(options, opened, open_adapters(options))
    refuse(conversion, conversion.plan.problems)
    with reading(checkpoint):
        wrong = (*compare_trees(conversion, stores), *find_metadata_faults(items, stores, conversion.plan.arrays, record_of(items)))
    findings = execute(conversion, items, {key for key, _ in wrong}, sample, beam, reporter(progress))
    return Verification(str(items), opened.root, findings, wrong, sample)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compares, reports, and says whether all of it is right."""
    found = verify(**keywords_of(args, verify), beam=rest)
    if args.json:
        write_json(args.json, found.to_dict())
    print(found)
    found.check()
    return 0


def compare_trees(conversion: Conversion, stores: Mapping[str, ts.TensorStore]) -> Iterator[tuple[str, str]]:
    """The arrays that are missing, unexpected, or of another shape: `(key, what is wrong)`."""
    wanted = {array.key: array for array in conversion.plan.arrays}
    for key, array in wanted.items():
        if key not in stores:
            yield key, MISSING
        elif tuple(stores[key].shape) != array.shape:
            yield key, f"has the shape {tuple(stores[key].shape)}, expected {array.shape}"
    for key in sorted(set(stores) - set(wanted) - {STEP.key}):
        yield key, "is in the checkpoint, but nothing of the source belongs there"


def execute(conversion: Conversion, items: Store, skipped: set[str], sample: float, rest: Sequence[str], report: Report | None = None) -> dict[str, Finding]:
    """Runs the comparison as a pipeline.

    Raises:
      Failed: it failed on the way.
    """
    todo = [number for number, task in enumerate(tasks(conversion)) if conversion.plan.arrays[task.array].key not in skipped]
    elements = sum(compared_elements(array, sample) for array in conversion.plan.arrays if array.key not in skipped)
    remember(conversion)
    noise = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings"
        try:
            pipeline = make_pipeline(pipeline_options(rest))
            before = COMPARED.total
            with watch_progress(elements, lambda: COMPARED.total - before, "comparing", report), quiet(noise), as_in_a_script():
                _ = pipeline | beam.Create(todo) | CompareArrays(conversion.stage(), conversion.hash, items, sample, file)
                pipeline.run().wait_until_finish()
            return read_findings(file, len(todo))
        except Exception as e:
            raise Failed(f"  {last_words(e)}") from e


if __name__ == "__main__":
    from weightbeam.pipelines.cli import main

    sys.exit(main(["verify", *sys.argv[1:]]))
