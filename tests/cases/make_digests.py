"""Makes `digests-<version>.json.gz` of MaxText's cases: `PYTHONPATH=tests python tests/cases/make_digests.py FOLDER VERSION`.

For each case: the MaxText model, the rows of its embedding, one digest of all its input tensors, and what MaxText's
converter made of them, scanned and unscanned: `{array: [shape, dtype, sha256 of its bytes]}`, or the message with which it
stopped. Nothing that Weightbeam converted takes part in it. The folder of 0.2.5 is one that `run_converter.py` went through:

    python tests/cases/models.py OUT
    PYTHON tests/cases/run_converter.py FOLDER      # FOLDER/<case>: hf, as OUT/cases/<case>, and case.json
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from support import input_digest, read_tensors

HERE = Path(__file__).parent


def read_case(folder: Path) -> dict:
    case = json.loads((folder / "case.json").read_text())
    vocab = next(
        int(override.removeprefix("vocab_size="))
        for override in case["maxtext_overrides"]
        if override.startswith("vocab_size=")
    )
    layouts = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*scanned.json"))}
    stopped = {file.stem: file.read_text().strip() for file in sorted(folder.glob("*scanned.txt"))}
    return {
        "maxtext_model": case["maxtext_model"],
        "vocab": vocab,
        "inputs": input_digest(read_tensors(folder / "hf")),
        **layouts,
        **stopped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes digests-VERSION.json.gz of a folder of MaxText's cases.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("version")
    args = parser.parse_args()
    text = json.dumps({case.name: read_case(case) for case in sorted(args.folder.iterdir())}, separators=(",", ":"))
    # the same bytes each time
    file = HERE / f"digests-{args.version}.json.gz"
    with file.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as packed:
        packed.write(text.encode())


if __name__ == "__main__":
    main()
