"""`weightbeam plan`: a dry run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines import report, virtual
from pipelines.errors import RefusedError
from pipelines.prepare import prepare_conversion, refuse


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the plan, writes it as JSON if asked, and says whether it can be carried out."""
    if rest:
        # An option of the runner's is fine here: it is how `convert` would be called. Beam is imported only to check it.
        from pipelines.options import check_options

        check_options(rest)
    conversion = prepare_conversion(args)
    threads = report.threads_of(rest)
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(report.json_report(conversion, threads) | virtual.json_report(conversion), indent=1))
        except OSError as e:
            raise RefusedError(f"--json={args.json}: {e.strerror}") from e
    if conversion.plan.arrays:
        report.print_plan(conversion, threads)
    if conversion.placements:
        virtual.print_placements(conversion)
    refuse(conversion, conversion.plan.problems)
    return 0


if __name__ == "__main__":
    from pipelines.cli import main

    sys.exit(main(["plan", *sys.argv[1:]]))
