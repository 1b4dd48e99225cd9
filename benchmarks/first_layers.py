"""A small model first: four layers of DeepSeek-V3 at its full width, cut, converted and run beside MaxText; and the memory
of `logits` on a 2 GB model.

    nice python -m benchmarks.first_layers MAXTEXT_PYTHON --folder out/first_layers

DeepSeek-V3's 163 files are sparse (`benchmarks/full_size.py`), but for what the cut keeps: the first four layers, 16 of
256 experts, 8,192 rows of the vocabulary are random values. Takes some 25 GB of disk, in a folder that mustn't exist. Memory is the greatest of the
process tree, MaxText's process among them; bounds are 8 GB, and two layers and 1 GiB.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks import models
from benchmarks.figures import Figure, make_parser, report
from benchmarks.full_size import DEEPSEEK_V3, MODELS, write
from benchmarks.measure import WEIGHTBEAM, run
from weightbeam.formats.safetensors import Tensor, open_hf

MODEL = "DeepSeek-V3, 4 layers"
KEPT = ("--layers", "0:4", "--experts", "0:16", "--vocab_rows", "8192")
LAYERS, EXPERTS, ROWS = 4, 16, 8192
MAX_BYTES, MORE_BYTES = 8 * 10**9, 1 << 30
TOKENS = ("--token_ids", "1,5,9,60,3,5,8191,77")
STRIPE = 1 << 24  # elements that are drawn at once
# config.json of deepseek-ai/DeepSeek-V3, as far as it says how it computes
CONFIG = DEEPSEEK_V3 | dict(
    num_experts_per_tok=8, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
    hidden_act="silu", rms_norm_eps=1e-06, rope_theta=10000, max_position_embeddings=163840, attention_bias=False,
    rope_scaling=dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096),
)  # fmt: skip


def fill(folder: Path) -> None:
    """Puts random values where a sparse DeepSeek-V3 has what the cut keeps."""
    rng = np.random.default_rng(0)
    for tensor in (tensor for shard in open_hf(folder).shards for tensor in shard.tensors):
        name = tensor.name
        path = name.split(".")
        if "layers" in path and int(path[path.index("layers") + 1]) >= LAYERS:
            continue
        if "experts" in path and int(path[path.index("experts") + 1]) >= EXPERTS:
            continue
        rows = ROWS if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor.shape[0]
        _fill(name, tensor, rows * math.prod(tensor.shape[1:]), rng)


def _fill(name: str, tensor: Tensor, count: int, rng: np.random.Generator) -> None:
    """Puts random values into the first elements of a tensor: matrices of a standard deviation of 0.02, norms around 1."""
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset)
        for begin in range(0, count, STRIPE):
            noise = rng.standard_normal(min(STRIPE, count - begin), np.float32)
            if name.endswith("_scale_inv"):
                values = np.clip(1e-3 + 1e-4 * noise, 1e-4, None).astype(np.float32)
            elif tensor.dtype == ml_dtypes.float8_e4m3fn:
                values = np.clip(20 * noise, -400, 400)
            else:
                values = 1 + 0.1 * noise if "norm" in name else 0.02 * noise
            file.write(values.astype(tensor.dtype).tobytes())


def measure_first_layers(folder: Path, python: str) -> tuple[list[Figure], dict[str, object]]:
    """DeepSeek-V3 cut, converted, read back, and run beside MaxText."""
    source, cut, found = folder / "DeepSeek-V3", folder / "cut", folder / "found.json"
    write(CONFIG, MODELS["DeepSeek-V3"][1], source)
    fill(source)
    cutting = run(WEIGHTBEAM, "cut", source, cut, *KEPT, watch=True)
    how = ("--save_dtype", "float32", "--scan_layers", "false")
    converting = run(WEIGHTBEAM, "convert", cut, folder / "ckpt", *how, watch=True)
    # exit status 1, where they part, raises
    beside = run(WEIGHTBEAM, "logits", cut, folder / "ckpt" / "0" / "items", *TOKENS, watch=True)
    shutil.rmtree(folder / "ckpt")
    maxtext = run(WEIGHTBEAM, "logits", cut, *TOKENS, "--maxtext", python, "--json", found, watch=True)
    runs = {"cut": cutting, "convert": converting, "logits, its checkpoint": beside, "logits --maxtext": maxtext}
    figures: list[Figure] = []
    for what, one in runs.items():
        figures.append(Figure(what, MODEL, one.seconds, "s"))
        figures.append(Figure(f"{what}, peak memory", MODEL, one.peak_bytes, "bytes", MAX_BYTES))
    apart = json.loads(found.read_text())["beside"]
    return [*figures, Figure("logits from MaxText's, relative", MODEL, apart["logits"]["relative"])], {"maxtext": apart}


def measure_memory(folder: Path) -> list[Figure]:
    """The memory of `logits` on a Llama of 2 GB."""
    models.write("llama", folder / "llama", layers=8)
    config, shapes = models.MODELS["llama"]
    sizes = models.sizes_of(config)
    layer = sum(math.prod(sizes[axis] for axis in axes) for name, axes in shapes.items() if "{layer}" in name)
    figures = []
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        one = run(WEIGHTBEAM, "logits", folder / "llama", *TOKENS, "--dtype", dtype, watch=True)
        limit = 2 * layer * width + MORE_BYTES, "2 layers + 1 GiB"
        figures.append(Figure(f"logits in {dtype}, peak memory", "2 GB Llama", one.peak_bytes, "bytes", *limit))
    return figures


def main() -> None:
    """Measures both and prints the table."""
    parser = make_parser(__doc__, "out/first_layers", layers=None, rounds=None)
    parser.add_argument("maxtext", metavar="MAXTEXT_PYTHON", help="the interpreter of an environment with MaxText")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    figures = measure_memory(args.folder)
    more, details = measure_first_layers(args.folder, args.maxtext)
    report("first_layers", figures + more, details, args)


if __name__ == "__main__":
    main()
