"""Makes `digests.json.gz` of MaxText's cases: `PYTHONPATH=tests python tests/cases/make_digests.py FOLDER`.

For each case: the MaxText model, one digest of all its input tensors, and what MaxText's converter made of them, scanned and unscanned:
`{array: [shape, dtype, sha256 of its bytes]}`. Nothing that Weightbeam converted takes part in it.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from support import input_digest, read_tensors

HERE = Path(__file__).parent
CASES = [
    "llama3.1",
    "llama3.1-fp32",
    "qwen2.5",
    "qwen2.5-tied",
    "qwen3",
    "qwen3-tied",
    "qwen3-moe",
    "mixtral",
    "deepseek2",
    "deepseek3",
    "deepseek3.2",
    "deepseek3-mtp-standalone",
]


def read_case(folder: Path) -> dict:
    model = json.loads((folder / "case.json").read_text())["maxtext_model"]
    layouts = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*scanned.json"))}
    return {"maxtext_model": model, "inputs": input_digest(read_tensors(folder / "hf")), **layouts}


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes digests.json.gz of a folder of MaxText's cases.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    text = json.dumps({case: read_case(folder / case) for case in CASES}, separators=(",", ":"))
    with (HERE / "digests.json.gz").open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:  # the same bytes each time
        file.write(text.encode())


if __name__ == "__main__":
    main()
