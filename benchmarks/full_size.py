"""Plans of full-size models: DeepSeek-V3 (671 B) and a Kimi-K2-like one (1 T), FP8, from headers alone.

    python -m benchmarks.full_size --folder out/full_size --rounds 3

The shards are sparse: headers with the true names, dtypes and shapes, files of the true sizes, no data, so that they
take a few MB of disk. (DeepSeek-V3's come to 688,586,727,865 bytes; the hub's to 688,586,727,753.)
`benchmarks/full_run.py` converts them.

Measured is `weightbeam plan` as a subprocess, start-up and imports inside: the median of the rounds' seconds, and in
one more run the peak memory of its process tree; and once the same of `plan --load`. The counts are the plan's own, but
for tensors and cells.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from facts.tiny import shapes  # pyright: ignore[reportMissingImports] — of the tests

from benchmarks.figures import Figure, make_parser, measure_each, of_runs, report
from benchmarks.measure import WEIGHTBEAM, run
from benchmarks.stock import BLOCK
from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.plan import expand
from weightbeam.model_mappings.registry import family_of

MESH = "fsdp=64,expert=4"
LOAD_HOSTS = "16"  # that share the mesh's devices, of a load
MAX_SECONDS, MAX_BYTES = 10.0, 1 << 30
ITEMSIZE = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
NOISE_SHARE, NOISE_BYTES = 128, 1 << 25  # one byte in so many isn't zero; the noise that those bytes are taken from

# config.json of deepseek-ai/DeepSeek-V3, as far as it says something about shapes
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, num_hidden_layers=61, num_nextn_predict_layers=1, first_k_dense_replace=3,
    intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_attention_heads=128, num_key_value_heads=128,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, tie_word_embeddings=False,
    quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[BLOCK, BLOCK]),
)  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | dict(
    model_type="kimi_k2", vocab_size=163840, n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64,
    first_k_dense_replace=1, num_nextn_predict_layers=0,
)  # fmt: skip
MODELS = {"DeepSeek-V3": (DEEPSEEK_V3, 163), "Kimi-K2-like": (KIMI_K2, 61)}  # config.json, and how many files


def tensors(config: dict) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Every tensor of a checkpoint: its name, dtype and shape.

    Linear layers of a quantised one are FP8 with a scale for each block, of which the last along an axis may be partial;
    embeddings, norms, gates and the projection of the multi-token-prediction module aren't quantised
    (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md).
    """
    for name, shape in shapes(config).items():
        is_linear = name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and not name.endswith(".eh_proj.weight")
        if is_linear and "quantization_config" in config:
            yield name, "F8_E4M3", shape
            yield f"{name}_scale_inv", "F32", tuple(-(-size // BLOCK) for size in shape)
        else:
            yield name, "F32" if name.endswith(".e_score_correction_bias") else "BF16", shape


def write(config: dict, files: int, folder: Path, noisy: bool = False) -> int:
    """Writes a checkpoint of sparse shards of about equal size, whatever tensors that parts.

    Args:
      config: of the model.
      files: how many shards.
      folder: doesn't exist yet.
      noisy: the head of each tensor, a `NOISE_SHARE`th, isn't zero but noise, another for each; float32 ones are noise
        throughout.

    Returns:
      The bytes of its tensors.
    """
    entries = [(name, dtype, shape, math.prod(shape) * ITEMSIZE[dtype]) for name, dtype, shape in tensors(config)]
    total = sum(nbytes for *_, nbytes in entries)
    shards: list[dict] = [{} for _ in range(files)]
    sizes = [0] * files
    written = 0
    for name, dtype, shape, nbytes in entries:
        at = written * files // total
        shards[at][name] = {"dtype": dtype, "shape": shape, "data_offsets": [sizes[at], sizes[at] + nbytes]}
        sizes[at] += nbytes
        written += nbytes
    folder.mkdir(parents=True)
    noise = make_noise() if noisy else {}
    weight_map: dict[str, str] = {}
    for number, (shard, size) in enumerate(zip(shards, sizes, strict=True), start=1):
        name = f"model-{number:05}-of-{files:06}.safetensors"
        header = json.dumps({"__metadata__": {"format": "pt"}, **shard}, separators=(",", ":")).encode()
        with open(folder / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            data = file.tell()
            file.truncate(data + size)
            for position, entry in enumerate(list(shard.values()) if noisy else [], start=len(weight_map)):
                begin, end = entry["data_offsets"]
                count = end - begin
                if entry["dtype"] != "F32":
                    count = max(count // NOISE_SHARE // 4 * 4, min(count, 4096))
                start = position * 977 * 4 % (NOISE_BYTES - count)
                file.seek(data + begin)
                file.write(noise[entry["dtype"]][start : start + count])
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return total


def make_noise() -> dict[str, memoryview]:
    """For each dtype `NOISE_BYTES` of finite values."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, NOISE_BYTES, dtype=np.uint8)
    codes[np.isnan(codes.view(ml_dtypes.float8_e4m3fn))] = 0
    halves = rng.integers(0, 1 << 16, NOISE_BYTES // 2, dtype=np.uint16) & 0xBFFF  # exponents below 2
    scales = rng.uniform(1e-4, 1e-3, NOISE_BYTES // 4).astype(np.float32)
    return {"F8_E4M3": codes.data, "BF16": halves.view(np.uint8).data, "F32": scales.view(np.uint8).data}


def count_cells(config: dict) -> int:
    """Cells of the scanned plan: places of arrays that a tensor fills."""
    parts = expand(family_of(Config(config)), Config(config), Layout())
    return sum(part.layers.size * math.prod(part.name_shape) for same in parts.values() for part in same)


def measure(model: str, folder: Path, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model, and every single round."""
    config, files = MODELS[model]
    source, plan_file = folder / model, folder / f"{model}.plan.json"
    shutil.rmtree(source, ignore_errors=True)  # written anew each time: that takes a second
    total = write(config, files, source)
    command = (WEIGHTBEAM, "plan", "--source", source, "--mesh", MESH, "--json", plan_file)
    timed = [run(*command) for _ in range(rounds)]
    watched = run(*command, watch=True)
    load = run(*command, "--load", "--hosts", LOAD_HOSTS, watch=True)
    plan = json.loads(plan_file.read_bytes())
    figures = [
        *of_runs("plan", model, timed, watched, MAX_SECONDS, most_bytes=MAX_BYTES),
        Figure("plan --load", model, load.seconds, "s", MAX_SECONDS),
        Figure("plan --load, peak memory", model, load.peak_bytes, "bytes", MAX_BYTES),
        Figure("tensors", model, sum(1 for _ in tensors(config))),
        Figure("arrays", model, len(plan["arrays"])),
        Figure("cells", model, count_cells(config)),
        Figure("units", model, plan["units"]),
        Figure("read amplification, planned", model, plan["bytes"]["read_amplification"], "×", 1.02),
        Figure("memory bound of a worker", model, plan["memory"]["per_worker_bytes"], "bytes"),
    ]
    details = {
        "files": files,
        "disk_bytes": sum(path.stat().st_blocks * 512 for path in source.iterdir()),
        "tensor_bytes": total,
        "source_bytes": plan["bytes"]["source"],
        "target_bytes": plan["bytes"]["target"],
        "plan_seconds": [one.seconds for one in timed],
        "plan_cpu_seconds": [one.cpu_seconds for one in timed],
    }
    return figures, details


def main() -> None:
    """Measures all models and prints the table."""
    args = make_parser(__doc__, "out/full_size", layers=None, rounds=3).parse_args()
    figures, details = measure_each(MODELS, lambda model: measure(model, args.folder, args.rounds))
    report("plan", figures, details, args)


if __name__ == "__main__":
    main()
