"""Plans of full-size models: DeepSeek-V3 (671 B) and a Kimi-K2-like one (1 T), FP8, from headers alone.

    python -m benchmarks.full_size --folder out/full_size --rounds 3

The shards are sparse: headers with the true names, dtypes and shapes, files of the true sizes, no data, so that they
take a few MB of disk. (DeepSeek-V3's come to 688,586,727,721 bytes; the hub's to 688,586,727,753.)
`benchmarks/full_run.py` converts them.

Measured is `weightbeam plan` as a subprocess, start-up and imports inside: the median of the rounds' seconds, and in
one more run the peak memory of its process tree; and once the same of `plan --load`. The counts are the plan's own, but
for tensors and cells.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.figures import Figure, report
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

TensorEntry = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def tensors(c: dict) -> Iterator[TensorEntry]:
    """Every tensor of a checkpoint, layer by layer; the layer behind the last is the multi-token-prediction module.

    Linear layers are FP8 with a scale for each block; embeddings, norms, gates and the module's projection aren't
    quantised (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md).
    """
    embed, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    yield "model.embed_tokens.weight", "BF16", (vocab, embed)
    for layer in range(layers + c["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        if layer >= layers:
            yield f"{prefix}embed_tokens.weight", "BF16", (vocab, embed)
            yield f"{prefix}enorm.weight", "BF16", (embed,)
            yield f"{prefix}hnorm.weight", "BF16", (embed,)
            yield f"{prefix}eh_proj.weight", "BF16", (embed, 2 * embed)
            yield f"{prefix}shared_head.norm.weight", "BF16", (embed,)
            yield f"{prefix}shared_head.head.weight", "BF16", (vocab, embed)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", "BF16", (embed,)
        yield from attention(c, f"{prefix}self_attn.")
        if layer < c["first_k_dense_replace"]:
            yield from mlp(f"{prefix}mlp.", embed, c["intermediate_size"])
            continue
        yield f"{prefix}mlp.gate.weight", "BF16", (c["n_routed_experts"], embed)
        yield f"{prefix}mlp.gate.e_score_correction_bias", "F32", (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            yield from mlp(f"{prefix}mlp.experts.{expert}.", embed, c["moe_intermediate_size"])
        yield from mlp(f"{prefix}mlp.shared_experts.", embed, c["moe_intermediate_size"] * c["n_shared_experts"])
    yield "model.norm.weight", "BF16", (embed,)
    yield "lm_head.weight", "BF16", (vocab, embed)


def attention(c: dict, prefix: str) -> Iterator[TensorEntry]:
    """Latent attention of one layer."""
    embed, heads, q_lora, kv_lora = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield from linear(f"{prefix}q_a_proj", q_lora, embed)
    yield f"{prefix}q_a_layernorm.weight", "BF16", (q_lora,)
    yield from linear(f"{prefix}q_b_proj", heads * (nope + rope), q_lora)
    yield from linear(f"{prefix}kv_a_proj_with_mqa", kv_lora + rope, embed)
    yield f"{prefix}kv_a_layernorm.weight", "BF16", (kv_lora,)
    yield from linear(f"{prefix}kv_b_proj", heads * (nope + v_dim), kv_lora)
    yield from linear(f"{prefix}o_proj", embed, heads * v_dim)


def mlp(prefix: str, embed: int, width: int) -> Iterator[TensorEntry]:
    """Gate, up and down projections."""
    yield from linear(f"{prefix}gate_proj", width, embed)
    yield from linear(f"{prefix}up_proj", width, embed)
    yield from linear(f"{prefix}down_proj", embed, width)


def linear(name: str, rows: int, columns: int) -> Iterator[TensorEntry]:
    """A quantised weight and its scales; the last block of an axis may be partial."""
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "F32", (-(-rows // BLOCK), -(-columns // BLOCK))


def write(
    config: dict,
    files: int,
    folder: Path,
    tensors: Callable[[dict], Iterator[TensorEntry]] = tensors,
    noisy: bool = False,
) -> int:
    """Writes a checkpoint of sparse shards of about equal size, whatever tensors that parts.

    Args:
      config: of the model.
      files: how many shards.
      folder: doesn't exist yet.
      tensors: of a config.
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
                count = (
                    end - begin
                    if entry["dtype"] == "F32"
                    else max((end - begin) // NOISE_SHARE // 4 * 4, min(end - begin, 4096))
                )
                start = position * 977 * 4 % (NOISE_BYTES - count)
                file.seek(data + begin)
                file.write(noise[entry["dtype"]][start : start + count])
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    )
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
    if source.exists():
        shutil.rmtree(source)  # written anew each time: that takes a second
    total = write(config, files, source)
    command = (WEIGHTBEAM, "plan", "--source", source, "--mesh", MESH, "--json", plan_file)
    timed = [run(*command) for _ in range(rounds)]
    watched = run(*command, watch=True)
    load = run(*command, "--load", "--hosts", LOAD_HOSTS, watch=True)
    plan = json.loads(plan_file.read_bytes())
    figures = [
        Figure("plan", model, statistics.median(one.seconds for one in timed), "s", MAX_SECONDS),
        Figure("plan, CPU", model, statistics.median(one.cpu_seconds for one in timed), "s"),
        Figure("plan, peak memory", model, watched.peak_bytes, "bytes", MAX_BYTES),
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


def main() -> int:
    """Measures all models and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("out/full_size"), help="where the sparse checkpoints go; a few MB of disk"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the figures into this file")
    args = parser.parse_args()
    figures, details = [], {"rounds": args.rounds}
    for model in MODELS:
        more, details[model] = measure(model, args.folder, args.rounds)
        figures += more
    report("plan", figures, details, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
