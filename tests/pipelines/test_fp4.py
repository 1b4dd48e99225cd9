"""gpt-oss in MXFP4, DeepSeek-V4 in FP4 and FP8, DeepSeek-V3 in NVFP4: the conversion equals that of a twin whose
weights were dequantised to float32 before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from pairs import each, some
from safetensors.numpy import save_file
from support import (
    BF16,
    DEEPSEEK,
    F32,
    FP8,
    assert_same_bits,
    call,
    converted,
    random_tensors,
    read_config,
    read_tensors,
    save,
    split,
)

from weightbeam.formats.safetensors import HfCheckpoint, Shard, Tensor
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=64, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
    num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False, sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
)  # fmt: skip
GPT_OSS_20B = GPT_OSS | dict(
    vocab_size=201088, hidden_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_hidden_layers=24,
    num_local_experts=32, layer_types=["sliding_attention", "full_attention"] * 12,
)  # fmt: skip
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
EXPERTS = ("gate_up_proj", "down_proj")


def shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """A gpt-oss as it is released: plain tensors in bfloat16, experts as blocks and scales (openai/gpt-oss-20b)."""
    embed, heads, kv, experts, mlp = (
        c[key]
        for key in (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "num_local_experts",
            "intermediate_size",
        )
    )
    dim = c["head_dim"]
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], embed)}
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        made |= {f"{prefix}{name}_layernorm.weight": (embed,) for name in ("input", "post_attention")}
        for name, width in dict(q=heads, k=kv, v=kv).items():
            made |= {
                f"{prefix}self_attn.{name}_proj.weight": (width * dim, embed),
                f"{prefix}self_attn.{name}_proj.bias": (width * dim,),
            }
        made |= {
            f"{prefix}self_attn.o_proj.weight": (embed, heads * dim),
            f"{prefix}self_attn.o_proj.bias": (embed,),
            f"{prefix}self_attn.sinks": (heads,),
        }
        made |= {f"{prefix}mlp.router.weight": (experts, embed), f"{prefix}mlp.router.bias": (experts,)}
        for name, rows, columns in zip(EXPERTS, (2 * mlp, embed), (embed, mlp), strict=True):
            made |= {
                f"{prefix}mlp.experts.{name}_blocks": (experts, rows, columns // 32, 16),
                f"{prefix}mlp.experts.{name}_scales": (experts, rows, columns // 32),
                f"{prefix}mlp.experts.{name}_bias": (experts, rows),
            }
    return made | {"model.norm.weight": (embed,), "lm_head.weight": (c["vocab_size"], embed)}


def gpt_oss() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def make(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("_blocks"):
            return rng.integers(0, 256, shape, np.uint8)
        return (
            rng.integers(110, 130, shape, np.uint8)
            if name.endswith("_scales")
            else rng.standard_normal(shape, F32).astype(BF16)
        )

    return {name: make(name, shape) for name, shape in shapes(GPT_OSS).items()}


def dequantised(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The twin: experts in float32, (experts, in, out), as the releases in bfloat16 have them."""
    made = {}
    for name, values in tensors.items():
        if name.endswith("_blocks"):
            wide = np.stack([E2M1[values & 15], E2M1[values >> 4]], -1).reshape(*values.shape[:3], 32)
            scale = np.ldexp(np.float32(1), tensors[name.replace("_blocks", "_scales")].astype(np.int32) - 127)
            made[name.removesuffix("_blocks")] = (
                (wide * scale[..., None]).reshape(*values.shape[:2], -1).transpose(0, 2, 1).copy()
            )
        elif not name.endswith("_scales"):
            made[name] = values
    return made


@pytest.mark.parametrize(
    "options", some(["", "--scan_layers false --unit_bytes 100000", "--mesh fsdp=4,expert=2 --save_dtype float32"], 2)
)
def test_gpt_oss_in_mxfp4(tmp_path: Path, options: str) -> None:
    """Every bit, in every layout; blocks and scales lie in different files."""
    tensors = gpt_oss()
    source = save(tmp_path / "mxfp4", GPT_OSS, *split(tensors, 3))
    plain = {key: value for key, value in GPT_OSS.items() if key != "quantization_config"}
    twin = dequantised(tensors)
    arrays = converted(source, tmp_path / "a", *options.split())
    assert_same_bits(arrays, converted(save(tmp_path / "plain", plain, twin), tmp_path / "b", *options.split()))
    if "false" not in options:  # and the twin isn't all there is to say: the gate's rows are the even ones of the file
        gate = next(values for key, values in arrays.items() if key.endswith("layers_1.GptOssMlp.wi_0"))
        wanted = np.stack([twin[f"model.layers.{layer}.mlp.experts.gate_up_proj"][..., 0::2] for layer in (1, 3)], 1)
        np.testing.assert_array_equal(gate, wanted.astype(gate.dtype))


def test_an_adapter_of_one_projection_of_the_experts(tmp_path: Path) -> None:
    """The other one of the same module becomes values, too: engines have codes in a module, or values; other layers' stay."""
    tensors, module, rng = gpt_oss(), "model.layers.1.mlp.experts", np.random.default_rng(1)
    source = save(tmp_path / "mxfp4", GPT_OSS, *split(tensors, 3))
    experts, rows, columns = dequantised(tensors)[f"{module}.gate_up_proj"].shape
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    factors = {"A": (2 * experts, rows), "B": (columns, 2 * experts)}
    save_file(
        {
            f"base_model.model.{module}.lora_{name}.weight": rng.standard_normal(shape, F32)
            for name, shape in factors.items()
        },
        adapter / "adapter_model.safetensors",
    )
    said = dict(peft_type="LORA", r=2, lora_alpha=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    assert call("merge", source, tmp_path / "out", "--lora", adapter) == 0
    made = read_tensors(tmp_path / "out")
    assert made[f"{module}.gate_up_proj"].dtype == made[f"{module}.down_proj"].dtype == BF16
    codes = {name for name in tensors if name.endswith(("_blocks", "_scales"))}
    assert codes - made.keys() == {name for name in codes if name.startswith(f"{module}.")}
    assert module in read_config(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]


@pytest.mark.parametrize(
    "options", some(["--unit_bytes 150000 --mesh fsdp=4,expert=2", "--save_dtype float32 --scan_layers false"], 2)
)
def test_gpt_oss_in_nvfp4(tmp_path: Path, options: str) -> None:
    """As ModelOpt writes fused experts: (experts, pairs of inputs, outputs), scales along the inputs too, one second
    scale, one for activations.
    """
    rng = np.random.default_rng(0)
    twin = dequantised(gpt_oss())
    stored = dict(twin)
    for name in [name for name in twin if name.endswith(EXPERTS)]:
        experts, inputs, outputs = twin[name].shape
        packed, second = rng.integers(0, 256, (experts, inputs // 2, outputs), np.uint8), np.array(0.00037, F32)
        scale = rng.uniform(1, 448, (experts, inputs // 16, outputs)).astype(FP8)
        stored |= {
            name: packed,
            f"{name}_weight_scale": scale,
            f"{name}_weight_scale_2": second,
            f"{name}_input_scale": np.ones((), F32),
        }
        codes = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], 2).reshape(experts, inputs, outputs)
        twin[name] = codes * np.repeat(scale.astype(F32) * second, 16, 1)
    plain = {key: value for key, value in GPT_OSS.items() if key != "quantization_config"}
    source = save(
        tmp_path / "nvfp4",
        plain | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        *split(stored, 3),
    )
    arrays = converted(source, tmp_path / "a", *options.split())
    assert_same_bits(arrays, converted(save(tmp_path / "plain", plain, twin), tmp_path / "b", *options.split()))


def test_a_plan_of_gpt_oss_20b_reads_each_byte_once() -> None:
    """Gate and up alternate in the rows of one tensor that is stored transposed, and yet nothing is read twice."""
    tensors, offset = [], 0
    for name, shape in shapes(GPT_OSS_20B).items():
        dtype = np.dtype(np.uint8) if name.endswith(("_blocks", "_scales")) else BF16
        tensors.append(Tensor(name, dtype, shape, "/nowhere/model.safetensors", offset))
        offset += tensors[-1].nbytes
    checkpoint = HfCheckpoint(
        "/nowhere", GPT_OSS_20B, (Shard("model.safetensors", "/nowhere/model.safetensors", offset, 0, tuple(tensors)),)
    )
    conversion = plan_conversion(ConvertOptions(unit_bytes=128 << 20), checkpoint)
    assert not conversion.plan.problems
    assert conversion.source_bytes == offset
    assert conversion.read_bytes == offset
    assert conversion.unit_working_bytes <= 128 << 20


@pytest.mark.parametrize("options", some(["--unit_bytes 60000", "--save_dtype float32 --mesh fsdp=4"], 2))
def test_deepseek_v4_in_fp4_and_fp8(generated: Path, tmp_path: Path, options: str) -> None:
    """As it is released: routed experts in int8 that holds FP4, other linears in FP8, E8M0 scales, integers and float32
    beside them.
    """
    config, tensors = (
        read_config(generated / "models" / "deepseek_v4"),
        read_tensors(generated / "models" / "deepseek_v4"),
    )
    rng = np.random.default_rng(0)
    config["moe_intermediate_size"] = 64  # so that rows of the second matrix are whole groups of 32
    for name in [name for name in tensors if "experts." in name]:
        tensors[name] = rng.standard_normal(
            (config["hidden_size"], 64) if ".w2." in name else (64, config["hidden_size"]), F32
        ).astype(BF16)
    stored, twin = dict(tensors), dict(tensors)
    for name, values in tensors.items():
        rows, columns = values.shape if values.ndim == 2 else (0, 0)
        scale_name = name.replace(".weight", ".scale")
        if ".ffn.experts." in name and columns % 32 == 0:
            packed, exponents = (
                rng.integers(0, 256, (rows, columns // 2), np.uint8),
                rng.integers(115, 125, (rows, columns // 32), np.uint8),
            )
            stored |= {name: packed.view(np.int8), scale_name: exponents.view(E8M0)}
            twin[name] = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1).reshape(values.shape) * np.repeat(
                exponents.view(E8M0).astype(F32), 32, 1
            )
        elif (
            name.endswith((".wq_a.weight", ".wq_b.weight", ".wkv.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
            and "compressor" not in name
        ):
            exponents = rng.integers(115, 125, (-(-rows // 32), -(-columns // 16)), np.uint8)
            stored |= {name: values.astype(FP8), scale_name: exponents.view(E8M0)}
            twin[name] = (
                values.astype(FP8).astype(F32)
                * exponents.view(E8M0).astype(F32)[np.arange(rows) // 32][:, np.arange(columns) // 16]
            )
    assert {values.dtype.name for values in stored.values()} >= {
        "int8",
        "float8_e4m3fn",
        "float8_e8m0fnu",
        "int64",
        "float32",
        "bfloat16",
    }
    said = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 16]}
    source = save(tmp_path / "fp4", config | {"quantization_config": said, "expert_dtype": "fp4"}, *split(stored, 2))
    arrays = converted(source, tmp_path / "a", *options.split())
    assert_same_bits(arrays, converted(save(tmp_path / "plain", config, twin), tmp_path / "b", *options.split()))


NVFP4_CONFIG = {"compressed-tensors": {"format": "nvfp4-pack-quantized"}, "modelopt": {"quant_algo": "NVFP4"}}


@pytest.mark.parametrize(
    ("writer", "options"), each(list(NVFP4_CONFIG), ["--unit_bytes 30000 --mesh fsdp=2", "--save_dtype float32"])
)
def test_deepseek_in_nvfp4(tmp_path: Path, writer: str, options: str) -> None:
    """As compressed-tensors and as ModelOpt write it, next to FP8 with one scale and plain tensors, with scales for
    activations.
    """
    config = DEEPSEEK | dict(moe_intermediate_size=32)
    rng = np.random.default_rng(0)
    stored: dict[str, np.ndarray] = {}
    twin: dict[str, np.ndarray] = {}
    for name, values in random_tensors(config).items():
        stem = name.removesuffix(".weight")
        if "experts." in name:
            packed = rng.integers(0, 256, (values.shape[0], values.shape[1] // 2), np.uint8)
            scale = rng.uniform(1, 448, (values.shape[0], values.shape[1] // 16)).astype(FP8)
            second = np.array([777.7], F32)
            wide = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1).reshape(values.shape)
            if writer == "modelopt":
                second = (1 / second).reshape(())
                stored |= {
                    name: packed,
                    f"{stem}.weight_scale": scale,
                    f"{stem}.weight_scale_2": second,
                    f"{stem}.input_scale": np.ones((), F32),
                }
                of_each = scale.astype(F32) * second
            else:
                stored |= {
                    f"{name}_packed": packed,
                    f"{stem}.weight_scale": scale,
                    f"{stem}.weight_global_scale": second,
                    f"{stem}.input_global_scale": second,
                }
                of_each = scale.astype(F32) / second
            twin[name] = wide * np.repeat(of_each, 16, 1)
        elif name.endswith("o_proj.weight"):
            stored |= {name: values.astype(FP8), f"{stem}.weight_scale": np.array([0.03], BF16)}
            twin[name] = values.astype(FP8).astype(F32) * np.array(0.03, BF16).astype(F32)
        else:
            stored[name] = twin[name] = values
    said = {"quantization_config": NVFP4_CONFIG[writer] | {"quant_method": writer}}
    source = save(tmp_path / "nvfp4", config | said, *split(stored, 2))
    arrays = converted(source, tmp_path / "a", *options.split())
    assert_same_bits(arrays, converted(save(tmp_path / "plain", config, twin), tmp_path / "b", *options.split()))
    assert call("plan", "--source", source, "--json", tmp_path / "plan.json") == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    dropped = {name for name in stored if name.endswith(("input_scale", "input_global_scale"))}
    assert dropped
    assert set(plan["dropped"]) == dropped
