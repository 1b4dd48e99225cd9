"""All benchmarks: one table, its JSON, and a picture.

    make bench                      # measures all that fits into an hour
    make bench-full                 # a whole DeepSeek-V3: half an hour
    python -m benchmarks --show     # the table and the picture of what the file has

Each benchmark is a module of its own and runs as a process of its own; `python -m benchmarks.load --help` explains one.
Run them on a machine that has nothing else to do.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import figures

SECTIONS = {
    "convert": "bench", "kept": "kept", "export": "export", "reshard": "reshard", "merging": "merging", "load": "load", "mesh_load": "mesh_load",
    "kernels": "kernels", "plan": "full_size", "virtual": "virtual", "following": "following", "link": "shaped_link", "hosts": "hosts",
}  # fmt: skip  # and their modules


def main() -> None:
    """Measures, prints the table and draws the picture."""
    parser = figures.make_parser(__doc__, layers=None, rounds=None)
    parser.set_defaults(json=Path(__file__).with_name("results.json"))
    parser.add_argument("--rounds", type=int, help="of each measurement; each benchmark has a default")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some of the benchmarks")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE", default=Path("docs/reference/bench.png"))
    args = parser.parse_args()
    for section in () if args.show else args.only:
        command = [sys.executable, "-m", f"benchmarks.{SECTIONS[section]}", "--json", args.json]
        command += ["--folder", args.folder] if section != "kernels" else []
        command += ["--rounds", str(args.rounds)] if args.rounds else []
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    results = figures.read(args.json)
    figures.show(results)

    from benchmarks.picture import draw  # only now: the table doesn't need matplotlib

    draw(results, args.picture)


if __name__ == "__main__":
    main()
