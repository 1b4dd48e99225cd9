"""FP8 in blocks, written: codes and scales against torch and against the formulas on scalars, and read back by our own
decoder.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lazily import lazily
from safetensors.numpy import save_file
from stored import source_of
from support import BF16, F32, FP8

from weightbeam.formats.encodings import ContentError
from weightbeam.formats.encodings.quantizing import (
    find_scales,
    not_converted,
    quantization_config,
    quantize,
    scale_shape,
    stays_fused,
    to_codes,
    why_kept,
    why_not,
)
from weightbeam.model_mappings.boxes import whole

torch = lazily("torch")

RNG = np.random.default_rng(7)


def weights(shape: tuple[int, ...], dtype: np.dtype = BF16, spread: float = 0.02) -> np.ndarray:
    return (RNG.standard_normal(shape, np.float32) * np.float32(spread)).astype(dtype)


def test_every_rounding_to_a_code() -> None:
    """Every half of a float32 with every kind of rest: below, at and above each tie. torch rounds alike, but makes NaN
    of what is too large.
    """
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for rest in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        values = (upper | rest).view(np.float32)
        values = values[np.isfinite(values)]
        wanted = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        np.testing.assert_array_equal(to_codes(values).view(np.uint8), wanted)


def by_torch(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The formula as DeepSeek has it, block by block."""
    x = torch.from_numpy(values.astype(np.float32))
    codes, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(scale_shape(values.shape))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            scale = x[at].abs().max() / 448.0  # deepseek-ai/DeepSeek-V3, inference/kernel.py: s = max / 448, y = x / s
            code = x[at] / scale
            scales[row, column], codes[at] = scale, code.clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy().view(FP8), scales.numpy()


@pytest.mark.parametrize("dtype", [BF16, F32, np.dtype(np.float16)])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (129, 127), (300, 500), (64, 1000)])
def test_formula(shape: tuple[int, int], dtype: np.dtype) -> None:
    values = weights(shape, dtype, 1.5)
    codes, scales = quantize(values, "x")
    wanted = by_torch(values)
    np.testing.assert_array_equal(scales, wanted[1])
    np.testing.assert_array_equal(codes.view(np.uint8), wanted[0].view(np.uint8))
    assert (codes.dtype, scales.dtype) == (FP8, F32)


def test_leading_axes_are_by_themselves() -> None:
    values = weights((2, 3, 130, 140))
    codes, scales = quantize(values, "x")
    assert scales.shape == (2, 3, 2, 2)
    for at in np.ndindex(2, 3):
        for both, one in zip((codes, scales), quantize(values[at], "x"), strict=True):
            np.testing.assert_array_equal(both[at], one)


def test_boxes_at_blocks_give_parts_of_the_whole() -> None:
    """A unit may take any rows and columns of blocks."""
    values = weights((400, 300))
    codes, scales = quantize(values, "x")
    part = quantize(values[128:400, 128:300], "x")
    np.testing.assert_array_equal(part[0], codes[128:, 128:])
    np.testing.assert_array_equal(part[1], scales[1:, 1:])


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-38, 1e-45, 3e38])
def test_blocks_of_zeros_and_of_extremes(size: float) -> None:
    """No NaN and no infinity comes of them; zeros stay zeros."""
    codes, scales = quantize(np.full((128, 130), size, np.float32), "x")
    assert np.isfinite(scales).all()
    assert np.isfinite(codes.astype(np.float32)).all()
    decoded = codes.astype(np.float32) * np.repeat(scales, [128, 2], axis=1)[:, :130]
    assert np.abs(decoded - np.float32(size)).max() <= max(size * 2**-4, 1e-44)


def test_empty_axes() -> None:
    for shape in ((0, 5), (5, 0), (0, 3, 5)):
        codes, scales = quantize(np.zeros(shape, BF16), "x")
        assert (codes.shape, scales.shape) == (shape, scale_shape(shape))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_has_no_code(bad: float) -> None:
    values = weights((300, 10), F32)
    values[200, 3] = bad
    with pytest.raises(ContentError, match="x: a value in rows 128 to 256 is NaN or infinite"):
        quantize(values, "x")


SOURCES = st.sampled_from([(BF16, 1.0), (F32, 1.0), (F32, 1e-6), (BF16, 300.0)])


@given(hnp.array_shapes(min_dims=2, max_dims=2, max_side=200), SOURCES, st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_codes_come_back(shape: tuple[int, int], source: tuple[np.dtype, float], seed: int) -> None:
    """FP8 -> bfloat16 -> FP8: the same codes. Through float32, or with the scales kept, the same scales too, and from
    bfloat16 values as well.
    """
    dtype, spread = source
    values = (np.random.default_rng(seed).standard_normal(shape) * spread).astype(dtype)
    codes, scales = quantize(values, "x")
    rows, columns = (np.arange(n) // 128 for n in shape)
    decoded = codes.astype(np.float32) * scales[rows][:, columns]
    again = {
        "bfloat16": quantize(decoded.astype(BF16), "x"),
        "float32": quantize(decoded, "x"),
        "kept": quantize(decoded.astype(BF16), "x", scales=scales),
    }
    for way, (found, _) in again.items():
        np.testing.assert_array_equal(found.view(np.uint8), codes.view(np.uint8), way)
    np.testing.assert_array_equal(again["float32"][1], scales)
    np.testing.assert_array_equal(again["kept"][1], scales)
    if dtype == BF16:
        np.testing.assert_array_equal(again["bfloat16"][1], scales)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf, 0.5])
def test_given_scales_that_do_not_fit(bad: float) -> None:
    """Each block by itself: one whose given scale can't have made its values has its own."""
    codes, scales = quantize(weights((256, 200), F32), "x")
    decoded = (codes.astype(np.float32) * np.repeat(np.repeat(scales, 128, 0), 128, 1)[:, :200]).astype(BF16)
    given, wanted = scales.copy(), scales.copy()
    given[1, 0] = bad
    again = quantize(decoded, "x", scales=given)
    wanted[1, 0] = quantize(decoded[128:, :128], "x")[1][0, 0]
    np.testing.assert_array_equal(again[1], wanted)
    np.testing.assert_array_equal(again[0].view(np.uint8), codes.view(np.uint8))


def test_our_decoder_reads_it(tmp_path: Path) -> None:
    """Partial blocks and fused experts; the values differ from the original by at most half a step of the codes."""
    given = {
        "model.layers.0.mlp.up_proj.weight": weights((300, 200)),
        "model.layers.0.mlp.experts.down_proj": weights((3, 130, 256)),
    }
    stored = {}
    for name, values in given.items():
        stored[name], stored[f"{name}_scale_inv"] = quantize(values, name)
    source = source_of(tmp_path / "x", stored, quantization_config([]))
    assert source.problems == ()
    for name, values in given.items():
        encoding = source.encodings[name]
        box = whole(values.shape)
        reads = encoding.reads(box)
        decoded = encoding.decode(type(reads[0]).fetch(reads)[0], box, F32)
        largest = np.abs(values.astype(np.float32)).max()
        assert np.abs(decoded - values.astype(np.float32)).max() <= largest * 2**-4


@pytest.mark.parametrize("shape", [(128 * 40, 512), (128, 1 << 17)])
def test_memory_is_bounded(shape: tuple[int, int]) -> None:
    """Beside the result a few columns of a row of blocks, measured by the allocator."""
    import tracemalloc

    values = weights(shape)
    quantize(values[:, :512][:128], "x")  # makes the table
    for make in (quantize, find_scales):
        tracemalloc.start()
        made = make(values, "x")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - sum(each.nbytes for each in (made if make is quantize else [made])) < 8 << 20


KEPT = [
    "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.3.mlp.gate.weight",
    "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.router.weight", "model.layers.0.feed_forward.router.weight",
    "model.layers.0.mlp.shared_expert_gate.weight", "model.layers.61.eh_proj.weight", "model.layers.61.shared_head.head.weight",
    "model.layers.61.embed_tokens.weight", "model.layers.61.enorm.weight", "model.visual.blocks.0.mlp.linear_fc1.weight", "visual.merger.mlp.0.weight",
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", "multi_modal_projector.linear_1.weight", "mm_projector.proj.0.weight",
    "model.layers.0.linear_attn.in_proj_ba.weight", "model.layers.0.linear_attn.in_proj_a.weight", "model.layers.0.self_attn.indexer.weights_proj.weight",
    "model.layers.0.self_attn.q_a_layernorm.weight", "thinker.audio_tower.layers.0.fc1.weight", "model.layers.0.self_attn.q_proj.bias",
    "gpt_neox.embed_in.weight", "embed_out.weight", "model.decoder.embed_positions.weight", "backbone.embeddings.weight", "transformer.wpe.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "output.weight",
    "model.layers.0.mlp.gate.e_score_correction_bias", "talker.model.layers.0.mlp.up_proj.weight", "mtp.fc.weight",
    "blocks.0.attn.qkv.weight", "deepstack_merger_list.0.linear_fc1.weight", "merger.linear_fc2.weight",
]  # fmt: skip
QUANTISED = [
    "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.3.mlp.experts.7.down_proj.weight",
    "model.layers.3.mlp.shared_experts.gate_proj.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "mtp.layers.0.mlp.up_proj.weight",
    "model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.layers.0.linear_attn.in_proj_qkvz.weight", "model.layers.0.linear_attn.out_proj.weight",
    "language_model.model.layers.0.self_attn.o_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.indexer.wq_b.weight",
    "model.transformer.blocks.0.att_proj.weight",
]  # fmt: skip


def test_which_weights() -> None:
    assert [name for name in KEPT if why_kept(name, (256, 256)) is None] == []
    assert [name for name in QUANTISED if why_kept(name, (256, 256)) is not None] == []
    assert why_kept("model.layers.0.mlp.experts.gate_up_proj", (4, 256, 256)) is None
    assert why_kept("model.layers.0.linear_attn.conv1d.weight", (256, 1, 4)) == "no weight of a linear layer"
    assert why_kept("model.layers.0.mlp.up_proj.weight", (256,)) == "no weight of a linear layer"


def test_fused_experts_that_stay() -> None:
    """gpt-oss's, with a bias; Llama 4's, inputs before outputs; parts of blocks."""
    whole = {"down_proj": (4, 256, 128), "gate_up_proj": (4, 256, 256)}
    for place, more, shapes in [
        ("mlp.experts", {"gate_up_proj_bias": (4, 256), "down_proj_bias": (4, 256)}, whole),
        ("feed_forward.experts", {}, whole),
        ("mlp.experts", {}, {"down_proj": (4, 256, 192), "gate_up_proj": (4, 384, 256)}),
        ("mlp.experts", {}, {"gate_up_proj": (4, 256, 256)}),
    ]:
        there = {f"model.layers.0.{place}.{name}": shape for name, shape in (shapes | more).items()}
        assert all(stays_fused(f"model.layers.0.{place}.{name}", there) for name in shapes)
    there = {f"model.layers.0.mlp.experts.{name}": shape for name, shape in whole.items()}
    assert not any(stays_fused(name, there) for name in there)


def test_modules_that_config_json_names() -> None:
    """Experts that are values, however the files join them: transformers has them in a module `experts`."""
    layer = "model.layers.0"
    tensors = {
        f"{layer}.mlp.experts.gate_up_proj": (4, 256, 256),
        f"{layer}.block_sparse_moe.input_linear.weight": (4, 256, 256),
        f"{layer}.ffn.experts.mlp.w1": (1024, 256),
        f"{layer}.mlp.experts.bias": (4,),
        f"{layer}.conv1d.weight": (256, 1, 4),
        f"{layer}.mlp.router.weight": (4, 256),
        "embed_out.weight": (256, 256),
    }
    modules = ["block_sparse_moe.experts", "ffn.experts", "mlp.experts", "mlp.router"]
    assert not_converted(tensors.items()) == ["embed_out", *(f"{layer}.{module}" for module in modules)]


def test_what_engines_would_read_otherwise() -> None:
    """transformers' Conv1D, what may be experts under a name that isn't known, and what ends as a module's name does
    that isn't quantised.
    """
    experts = {"model.layers.0.mlp.input_linear.weight": (4, 256, 256)}
    assert [name for name, _ in why_not({"model_type": "jetmoe"}, experts.items())] == list(experts)
    decoder = {"model_type": "vision-encoder-decoder", "decoder": {"model_type": "gpt2"}}
    deep = {"model_type": ["gpt2"], "parts": {"text": {"model_type": "clvp_decoder"}}}
    for config in ({"model_type": "gpt2"}, decoder, deep):
        assert [name for name, _ in why_not(config, ())] == ["config.json"]
    known = {
        "model.layers.0.mlp.experts.up_proj": (4, 256, 256),
        "model.layers.0.conv1d.weight": (256, 1, 4),
        "vision_tower.blocks.0.conv.weight": (256, 3, 32, 32),
        "model.embed.weight": (4, 256, 256),
    }
    assert why_not({"model_type": "qwen3_moe"}, known.items()) == []
    query = "model.layers.0.self_attn.q_proj.weight"
    head = {"lm_head.weight": (256, 256), query: (256, 256)}
    assert why_not({}, head.items()) == []
    assert [name for name, _ in why_not({}, {**head, "proj.weight": (256, 256)}.items())] == [query]


def test_transformers_loads_it(tmp_path: Path) -> None:
    """A tiny Qwen 3, quantised by these rules: transformers dequantises it by its own code, and leaves the same modules
    alone.
    """
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
    )
    config.tie_word_embeddings = False
    model = Qwen3ForCausalLM(config).bfloat16()
    state = {name: value.detach().view(torch.uint16).numpy().view(BF16) for name, value in model.state_dict().items()}
    stored = {}
    for name, values in state.items():
        if why_kept(name, values.shape):
            stored[name] = values
        else:
            stored[name], stored[f"{name}_scale_inv"] = quantize(values, name)
    kept = not_converted((name, values.shape) for name, values in state.items())
    assert kept == ["lm_head"]
    model.config.quantization_config = quantization_config(kept)
    model.config.save_pretrained(tmp_path)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True))
    for name, value in loaded.state_dict().items():
        if f"{name}_scale_inv" in stored:
            rows, columns = (np.arange(n) // 128 for n in stored[name].shape)
            wanted = stored[name].astype(np.float32) * stored[f"{name}_scale_inv"][rows][:, columns]
        else:
            wanted = stored[name].astype(np.float32)
        np.testing.assert_array_equal(
            value.to(torch.float32).numpy().astype(ml_dtypes.bfloat16), wanted.astype(ml_dtypes.bfloat16), name
        )
