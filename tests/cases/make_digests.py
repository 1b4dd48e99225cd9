"""Makes `digests.json.gz` of MaxText's cases: `PYTHONPATH=tests python tests/cases/make_digests.py FOLDER`.

For each case: the MaxText model, the rows of its embedding, one digest of all its input tensors, and what MaxText's
converter made of them, scanned and unscanned: `{array: [shape, dtype, sha256 of its bytes]}`. Nothing that Weightbeam
converted takes part in it.
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
    return {
        "maxtext_model": case["maxtext_model"],
        "vocab": vocab,
        "inputs": input_digest(read_tensors(folder / "hf")),
        **layouts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes digests.json.gz of a folder of MaxText's cases.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    text = json.dumps({case.name: read_case(case) for case in sorted(folder.iterdir())}, separators=(",", ":"))
    # the same bytes each time
    with (HERE / "digests.json.gz").open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:
        file.write(text.encode())


if __name__ == "__main__":
    main()
