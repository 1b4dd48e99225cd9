"""The demo: a small DeepSeek-V3-style FP8 checkpoint, converted, restored with stock Orbax, and checked.

python -m examples.demo out/demo
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from safetensors import deserialize
from safetensors.numpy import save_file

from weightbeam.pipelines.cli import main as weightbeam

LAYERS, DENSE, EXPERTS, EMBED, HEADS, BLOCK = 4, 1, 8, 256, 4, 128
NOPE, ROPE, V_DIM, Q_LORA, KV_LORA, MLP, MOE_MLP, VOCAB = 48, 16, 48, 96, 80, 320, 160, 512
CONFIG = dict(
    model_type="deepseek_v3", hidden_size=EMBED, num_attention_heads=HEADS, num_key_value_heads=HEADS, num_hidden_layers=LAYERS,
    first_k_dense_replace=DENSE, n_routed_experts=EXPERTS, n_shared_experts=1, intermediate_size=MLP, moe_intermediate_size=MOE_MLP,
    qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V_DIM, q_lora_rank=Q_LORA, kv_lora_rank=KV_LORA, vocab_size=VOCAB,
    tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=10_000, max_position_embeddings=4096, num_experts_per_tok=2, n_group=1, topk_group=1,
    routed_scaling_factor=2.5, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc",
    quantization_config=dict(quant_method="fp8", fmt="e4m3", weight_block_size=[BLOCK, BLOCK]),
)  # fmt: skip
DTYPES = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32}


def write_checkpoint(folder: Path) -> None:
    """Writes the checkpoint as the hub has it: a file for each layer, FP8 linears with their scales, an index."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * 0.1).astype(ml_dtypes.bfloat16)

    def mlp(prefix: str, width: int) -> dict[str, tuple[int, int]]:
        return {
            f"{prefix}.gate_proj": (width, EMBED),
            f"{prefix}.up_proj": (width, EMBED),
            f"{prefix}.down_proj": (EMBED, width),
        }

    files = {
        0: {
            "model.embed_tokens.weight": weight(VOCAB, EMBED),
            "model.norm.weight": weight(EMBED),
            "lm_head.weight": weight(VOCAB, EMBED),
        }
    }
    for layer in range(LAYERS):
        p = f"model.layers.{layer}"
        linears = {
            f"{p}.self_attn.q_a_proj": (Q_LORA, EMBED), f"{p}.self_attn.q_b_proj": (HEADS * (NOPE + ROPE), Q_LORA),
            f"{p}.self_attn.kv_a_proj_with_mqa": (KV_LORA + ROPE, EMBED), f"{p}.self_attn.kv_b_proj": (HEADS * (NOPE + V_DIM), KV_LORA),
            f"{p}.self_attn.o_proj": (EMBED, HEADS * V_DIM),
        }  # fmt: skip
        norms = {
            "input_layernorm": EMBED,
            "post_attention_layernorm": EMBED,
            "self_attn.q_a_layernorm": Q_LORA,
            "self_attn.kv_a_layernorm": KV_LORA,
        }
        tensors = {f"{p}.{name}.weight": weight(size) for name, size in norms.items()}
        if layer < DENSE:
            linears |= mlp(f"{p}.mlp", MLP)
        else:
            linears |= mlp(f"{p}.mlp.shared_experts", MOE_MLP)
            for expert in range(EXPERTS):
                linears |= mlp(f"{p}.mlp.experts.{expert}", MOE_MLP)
            tensors |= {
                f"{p}.mlp.gate.weight": weight(EXPERTS, EMBED),
                f"{p}.mlp.gate.e_score_correction_bias": weight(EXPERTS),
            }
        for name, shape in linears.items():
            scale = rng.uniform(0.001, 0.01, [-(-n // BLOCK) for n in shape]).astype(np.float32)
            tensors[f"{name}.weight"] = rng.standard_normal(shape, np.float32).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}.weight_scale_inv"] = scale
        files[layer + 1] = tensors
    folder.mkdir(parents=True)
    names = {number: f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in files}
    for number, tensors in files.items():
        save_file(tensors, folder / names[number], metadata={"format": "pt"})
    weight_map = {name: names[number] for number, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def expected(folder: Path) -> dict[str, np.ndarray]:
    """A few arrays made the plain way: everything in memory, numpy only, none of Weightbeam's code."""
    stored = {}
    for path in folder.glob("*.safetensors"):
        for name, entry in deserialize(path.read_bytes()):
            stored[name] = np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def tensor(name: str) -> np.ndarray:
        values = stored[f"model.layers.{name}.weight"].astype(np.float32)
        scale = stored.get(f"model.layers.{name}.weight_scale_inv")
        if scale is not None:
            rows, columns = values.shape
            values *= np.repeat(np.repeat(scale, BLOCK, 0)[:rows], BLOCK, 1)[:, :columns]
        return values.astype(ml_dtypes.bfloat16)

    moe = range(DENSE, LAYERS)
    experts = [
        np.stack([tensor(f"{layer}.mlp.experts.{expert}.gate_proj").T for expert in range(EXPERTS)]) for layer in moe
    ]
    out = [tensor(f"{layer}.self_attn.o_proj").T.reshape(HEADS, V_DIM, EMBED) for layer in moe]
    down = [tensor(f"{layer}.mlp.down_proj").T for layer in range(DENSE)]
    return {
        "token_embedder/embedding": stored["model.embed_tokens.weight"],
        "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/wi_0": np.stack(experts, axis=1),
        "decoder/moe_layers/self_attention/out/kernel": np.stack(out, axis=1),
        "decoder/dense_layers/mlp/wo/kernel": np.stack(down, axis=1),
    }


def main(folder: Path) -> int:
    """Runs the demo in `folder`; returns its exit status."""
    source, output = folder / "DeepSeek-V3-tiny", folder / "maxtext"
    for made_earlier in (source, output):
        shutil.rmtree(made_earlier, ignore_errors=True)
    write_checkpoint(source)
    files = len(list(source.glob("*.safetensors")))
    print(f"1. wrote {source}: config.json, {files} safetensors files and their index")
    for number, command in enumerate(
        [["convert", str(source), str(output), "--mesh", "fsdp=4"], ["verify", str(output)]], 2
    ):
        print(f"\n{number}. weightbeam {' '.join(command)}")
        if status := weightbeam(command):
            return status
    print("\n4. restored with stock Orbax, compared with plain numpy:")
    tree = ocp.PyTreeCheckpointer().restore((output / "0" / "items").absolute())["params"]["params"]
    wanted = expected(source)
    different = [path for path, values in wanted.items() if not same_bits(tree, path, values)]
    for path, values in wanted.items():
        print(f"   {path} {values.shape}: {'DIFFERENT' if path in different else 'equal to the bit'}")
    if different:
        print(f"\nSomething is wrong: {len(different)} of {len(wanted)} arrays aren't what they should be.")
        return 1
    program = (
        "weightbeam" if shutil.which("weightbeam") else os.path.relpath(Path(sys.executable).with_name("weightbeam"))
    )
    print(f"\nAll is well. {program} inspect {output} shows what is in there.")
    return 0


def same_bits(tree: dict, path: str, wanted: np.ndarray) -> bool:
    """Whether the array at `a/b/c` of a restored tree is the one that is wanted."""
    node = tree
    for key in path.split("/"):
        node = node[key]
    return np.array_equal(np.asarray(node).view(np.uint16), wanted.view(np.uint16))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo")))
