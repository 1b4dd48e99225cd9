"""Makes `headers.json.gz`: `config.json`, names, shapes and dtypes of the tiny checkpoints that transformers writes.

    export PYTHONPATH=tests; python tests/cases/models.py FOLDER && python tests/facts/make_headers.py FOLDER

The families that are written down a second time in `tiny.py` aren't in it.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from support import read_config, read_tensors

HERE = Path(__file__).parent
WRITTEN_DOWN = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
)


def read_headers(folder: Path) -> dict:
    """What the tables see of one checkpoint."""
    return {
        "config": read_config(folder),
        "tensors": {name: [values.dtype.name, *values.shape] for name, values in read_tensors(folder).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes headers.json.gz of what models.py wrote.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    models = {
        path.parent.name: path.parent
        for path in sorted(folder.glob("*/*/config.json"))
        if not path.parent.name.endswith("-fp32")
    }
    found = {
        name: read_headers(path) for name, path in models.items() if read_config(path)["model_type"] not in WRITTEN_DOWN
    }
    # the same bytes each time
    with (HERE / "headers.json.gz").open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:
        file.write(json.dumps(found, separators=(",", ":")).encode())
    print(", ".join(found))


if __name__ == "__main__":
    main()
