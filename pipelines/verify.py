"""`weightbeam verify`: a checkpoint against its source, element by element."""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import tensorstore as ts

from weightbeam.formats.orbax import STEP, find_items, open_arrays
from weightbeam.formats.printable import printable
from weightbeam.formats.storage import StorageError, Store
from weightbeam.formats.storage.token import name_secret
from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.pipelines import report
from weightbeam.pipelines.errors import FailedError, RefusedError
from weightbeam.pipelines.options import check_options, make_pipeline, pipeline_options
from weightbeam.pipelines.prepare import SHOWN, open_adapters, open_source, options_of, refuse
from weightbeam.pipelines.progress import ShowProgress, quiet
from weightbeam.pipelines.virtual import check_files, open_own_source
from weightbeam.transforms.conversion import Conversion, prepare, remember
from weightbeam.transforms.verification import COMPARED, CompareArrays, Finding, compared_elements, read_findings, tasks

MISSING = "is missing"


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compares, reports, and says whether all of it is right."""
    check_options(rest, args)
    name_secret(args.hf_token_secret)
    if not args.checkpoint:
        raise RefusedError("--checkpoint is missing: what was made of the source")
    try:
        items = find_items(args.checkpoint)
        if not check_files(items) and not args.source:
            raise RefusedError("--source is missing: only a virtual checkpoint has its source with it")
        stores = open_arrays(items)
        checkpoint = open_source(args.source) if args.source else open_own_source(items)
    except StorageError as e:
        raise RefusedError(str(e)) from e
    except (OSError, ValueError, KeyError, TypeError) as e:  # a checkpoint whose metadata is damaged
        raise RefusedError(f"{args.checkpoint}: can't be read: {e}") from e
    options = options_of(args, items, stores)
    conversion = prepare(options, checkpoint, open_adapters(options))
    refuse(conversion, conversion.plan.problems)
    wrong = list(compare_trees(conversion, stores))
    unreadable = {key for key, _ in wrong}
    findings = execute(conversion, items, unreadable, args.sample, rest)
    return _report(conversion, findings, wrong, args)


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


def execute(conversion: Conversion, items: Store, skipped: set[str], sample: float, rest: Sequence[str]) -> dict[str, Finding]:
    """Runs the comparison as a pipeline.

    Raises:
      FailedError: it failed on the way.
    """
    todo = [number for number, task in enumerate(tasks(conversion)) if conversion.plan.arrays[task.array].key not in skipped]
    elements = sum(compared_elements(array, sample) for array in conversion.plan.arrays if array.key not in skipped)
    remember(conversion)
    noise = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings"
        try:
            pipeline = make_pipeline(pipeline_options(rest))
            _ = pipeline | beam.Create(todo) | CompareArrays(conversion.stage(), conversion.hash, items, sample, file)
            before = COMPARED.total
            with ShowProgress(elements, lambda: COMPARED.total - before, "comparing"), quiet(noise):
                pipeline.run().wait_until_finish()
            return read_findings(file, len(todo))
        except Exception as e:
            raise FailedError(f"  {(str(e).strip().splitlines() or [type(e).__name__])[-1]}") from e


def _report(conversion: Conversion, findings: Mapping[str, Finding], wrong: Sequence[tuple[str, str]], args: argparse.Namespace) -> int:
    """Prints what was found; returns the exit status."""
    left_out = [key for key, what in wrong if what == MISSING and not key.startswith(PARAMETERS)]
    faults = [f"{key.removeprefix(PARAMETERS)} {what}" for key, what in wrong if key not in left_out]
    faults += [
        f"{key.removeprefix(PARAMETERS)}: {found.different:,} of {found.compared:,} elements differ; {found.first}"
        for key, found in findings.items()
        if found.different
    ]
    if args.json:
        _write_json(Path(args.json), findings, wrong)
    kinds = Counter("different" if found.different else "rounded" if found.rounded else "exact" for found in findings.values())
    compared = sum(found.compared for found in findings.values())
    print(f"{compared:,} elements of {len(findings):,} arrays compared" + (f", a sample of {args.sample:.3g}" if args.sample < 1 else ""))
    texts = dict(exact="exact", rounded="rounded once, as the plan says", different="different")
    for kind, text in texts.items():
        if kinds[kind]:
            print(f"  {kinds[kind]:>6,} {text}")
    if left_out:
        print(f"  {len(left_out):>6,} not in the checkpoint, and not among the parameters that MaxText loads: {printable(left_out[0], report.CELL)} …")
    if not faults:
        return 0
    shown = "\n".join(f"  {fault}" for fault in faults[:SHOWN])
    more = f"\n  … and {len(faults) - SHOWN} more; --json FILE has all" if len(faults) > SHOWN else ""
    raise FailedError(f"{shown}{more}")


def _write_json(file: Path, findings: Mapping[str, Finding], wrong: Sequence[tuple[str, str]]) -> None:
    arrays: dict[str, Any] = {key: {"different": None, "message": what} for key, what in wrong}
    for key, found in findings.items():
        message = str(found.first) if found.first else None
        arrays[key] = {"compared": found.compared, "different": found.different, "rounded": found.rounded, "message": message}
    try:
        file.write_text(json.dumps(arrays, indent=1))
    except OSError as e:
        raise RefusedError(f"--json={file}: {e.strerror}") from e


if __name__ == "__main__":
    from weightbeam.pipelines.cli import main

    sys.exit(main(["verify", *sys.argv[1:]]))
