"""`weightbeam plan`: a dry run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from weightbeam.pipelines import report, virtual
from weightbeam.pipelines.errors import RefusedError
from weightbeam.pipelines.prepare import prepare_conversion, refuse
from weightbeam.transforms.conversion import Conversion
from weightbeam.transforms.makespan import Estimate, Worker, efforts_of, estimate


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the plan, writes it as JSON if asked, and says whether it can be carried out."""
    if rest:
        # An option of the runner's is fine here: it is how `convert` would be called. Beam is imported only to check it.
        from weightbeam.pipelines.options import check_options

        check_options(rest)
    conversion = prepare_conversion(args)
    threads = report.threads_of(report.thread_options(rest))
    estimates = simulate(conversion, args, rest)
    if args.json:
        simulated = {"workers": [dataclasses.asdict(each) for each in estimates]} if args.workers else {}
        try:
            Path(args.json).write_text(json.dumps(report.json_report(conversion, threads) | virtual.json_report(conversion) | simulated, indent=1))
        except OSError as e:
            raise RefusedError(f"--json={args.json}: {e.strerror}") from e
    if conversion.plan.arrays:
        report.print_plan(conversion, threads)
    if conversion.placements:
        virtual.print_placements(conversion)
    if estimates:
        report.print_estimates(estimates)
    refuse(conversion, conversion.plan.problems)
    return 0


def simulate(conversion: Conversion, args: argparse.Namespace, rest: Sequence[str]) -> list[Estimate]:
    """The conversion on as many workers as are asked for, each time; nothing without `--workers`, or if nothing can be converted."""
    if not args.workers or conversion.plan.problems:
        return []
    worker = Worker(args.worker_gbps, args.worker_hour_price, report.threads_of(report.thread_options(rest), report.THREADS_PER_CORE * Worker.cores))
    efforts, files = list(efforts_of(conversion)), len(conversion.checkpoint.shards)
    from_hub = conversion.checkpoint.root.startswith("hf://")
    return [estimate(efforts, workers, worker, files, from_hub) for workers in args.workers]


if __name__ == "__main__":
    from weightbeam.pipelines.cli import main

    sys.exit(main(["plan", *sys.argv[1:]]))
