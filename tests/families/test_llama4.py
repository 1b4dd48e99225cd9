"""Llama 4, which MaxText's converter doesn't know: what its layers compute, what MaxText's stand-alone script lays out,
and every spelling.

The layers are those of MaxText e591f30 in numpy (src/maxtext/models/llama4.py; layers/attentions.py, embeddings.py
`LLaMARotaryEmbedding`, moe.py), on arrays that the command line made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families.numpy_decoder import silu
from support import BF16, assert_same_bits, converted, headers_only, read_config, read_tensors, save

from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

# as Scout: experts in every layer, normed query and key; as Maverick: in every second, not normed
MODELS = ["llama4", "llama4-dense"]
Arrays = dict[str, np.ndarray]


# --- what MaxText computes --------------------------------------------------------------------------------------------


def rms(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"])


def rotate(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    """(token, head, dim): neighbours turn together."""
    dim = x.shape[-1]
    frequency = np.repeat(c["rope_parameters"]["rope_theta"] ** -(np.arange(0, dim, 2) / dim), 2)
    angle = np.arange(len(x))[:, None, None] * frequency
    even = np.arange(dim) % 2 == 0
    neighbours = np.where(even, -np.roll(x, -1, -1), np.roll(x, 1, -1))
    return x * np.cos(angle) + neighbours * np.sin(angle)


def attention(a: Arrays, x: np.ndarray, c: dict[str, Any], layer: int) -> np.ndarray:
    query, key, value = (
        np.einsum("te,ehd->thd", x, a[f"self_attention.{name}.kernel"]) for name in ("query", "key", "value")
    )
    at = np.arange(len(x))
    seen = at[:, None] >= at
    if (layer + 1) % 4:
        query, key = rotate(query, c), rotate(key, c)
        if c["use_qk_norm"]:
            query, key = rms(query, c), rms(key, c)
        seen &= at[:, None] // c["attention_chunk_size"] == at // c["attention_chunk_size"]
    else:
        query = query * (np.log(np.floor((at + 1) / c["floor_scale"]) + 1) * c["attn_scale"] + 1)[:, None, None]
    group = query.shape[1] // key.shape[1]
    logits = np.einsum("thd,shd->hts", query * query.shape[-1] ** -0.5, np.repeat(key, group, 1))
    weights = np.exp(np.where(seen, logits, -np.inf) - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd,hde->te", weights, np.repeat(value, group, 1), a["self_attention.out.kernel"])


def gated(a: Arrays, prefix: str, x: np.ndarray, suffix: str = ".kernel", expert: int | tuple[()] = ()) -> np.ndarray:
    gate, up, down = (a[f"{prefix}.{name}{suffix}"][expert] for name in ("wi_0", "wi_1", "wo"))
    return (silu(x @ gate) * (x @ up)) @ down


def feed_forward(a: Arrays, x: np.ndarray) -> np.ndarray:
    if "mlp.wo.kernel" in a:
        return gated(a, "mlp", x)
    routed = "Llama4MoEBlock_0.MoeBlock_0"
    logits = x @ a[f"{routed}.gate.kernel"]
    best = logits.argmax(-1)
    scaled = x / (1 + np.exp(-logits.max(-1, keepdims=True)))
    return gated(a, "Llama4MoEBlock_0.shared_experts", x) + np.stack(
        [gated(a, routed, row, "", expert) for row, expert in zip(scaled, best, strict=True)]
    )


def layer_of(arrays: Arrays, layer: int, scanned: bool) -> Arrays:
    prefix = f"decoder.layers.layers_{layer % 4}." if scanned else f"decoder.layers_{layer}."
    found = {key.removeprefix(prefix): values for key, values in arrays.items() if key.startswith(prefix)}
    return {key: values.take(layer // 4, 1) for key, values in found.items()} if scanned else found


def forward(
    arrays: Arrays, c: dict[str, Any], tokens: np.ndarray, scanned: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """The states behind the embedding and each layer, and the logits."""
    states = [arrays["token_embedder.embedding"][tokens]]
    for number in range(c["num_hidden_layers"]):
        a, x = layer_of(arrays, number, scanned), states[-1]
        x = x + attention(a, rms(x, c) * a["pre_self_attention_layer_norm.scale"], c, number)
        states.append(x + feed_forward(a, rms(x, c) * a["post_self_attention_layer_norm.scale"]))
    return states, rms(states[-1], c) * arrays["decoder.decoder_norm.scale"] @ arrays["decoder.logits_dense.kernel"]


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
@pytest.mark.parametrize("model", MODELS)
def test_layers_compute_what_transformers_computes(generated: Path, tmp_path: Path, model: str, layout: str) -> None:
    """The whole model, of eight layers: with and without RoPE, dense and MoE, more than one chunk of attention."""
    import torch
    from transformers import Llama4ForConditionalGeneration

    folder = generated / "models" / model
    c, tokens = read_config(folder)["text_config"], np.random.default_rng(1).integers(0, 256, 11)
    reference = Llama4ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).language_model
    with torch.no_grad():
        wanted = reference(input_ids=torch.tensor(tokens[None]), output_hidden_states=True)
    scan = str(layout == "scanned").lower()
    arrays = converted(folder, tmp_path / "out", "--scan_layers", scan, "--save_dtype", "float32")
    states, logits = forward(
        {key: values.astype(np.float64) for key, values in arrays.items()}, c, tokens, layout == "scanned"
    )
    for made, state in zip(
        [*states[:-1], logits], [*wanted.hidden_states[: len(states) - 1], wanted.logits], strict=True
    ):
        np.testing.assert_allclose(made, state[0].numpy(), rtol=1e-4, atol=1e-4 * float(state.abs().max()))


# --- what MaxText's script lays out -----------------------------------------------------------------------------------


def script_arrays(tensors: Arrays, c: dict[str, Any]) -> Arrays:
    """Unscanned, as `_convert_huggingface_to_jax_weights` has them (standalone_scripts/llama4_ckpt_unscanned.py), the
    query not scaled.
    """
    heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

    def get(name: str, *shape: int) -> np.ndarray:
        flipped = tensors[f"language_model.{name}.weight"].T
        return flipped.reshape(shape or flipped.shape)

    made = {
        "token_embedder.embedding": get("model.embed_tokens").T,
        "decoder.decoder_norm.scale": get("model.norm"),
        "decoder.logits_dense.kernel": get("lm_head"),
    }
    for number in range(c["num_hidden_layers"]):
        hf, target = f"model.layers.{number}", f"decoder.layers_{number}"
        ffn = f"{hf}.feed_forward"
        for norm, theirs in dict(pre="input", post="post_attention").items():
            made[f"{target}.{norm}_self_attention_layer_norm.scale"] = get(f"{hf}.{theirs}_layernorm")
        for name, shape in dict(
            query=(-1, heads, dim), key=(-1, kv, dim), value=(-1, kv, dim), out=(heads, dim, -1)
        ).items():
            made[f"{target}.self_attention.{name}.kernel"] = get(f"{hf}.self_attn.{name[0]}_proj", *shape)
        is_moe = (number + 1) % c["interleave_moe_layer_step"] == 0
        mlp, theirs = (
            (f"{target}.Llama4MoEBlock_0.shared_experts", f"{ffn}.shared_expert") if is_moe else (f"{target}.mlp", ffn)
        )
        made |= {
            f"{mlp}.{name}.kernel": get(f"{theirs}.{part}_proj")
            for name, part in dict(wi_0="gate", wi_1="up", wo="down").items()
        }
        if is_moe:
            routed = f"{target}.Llama4MoEBlock_0.MoeBlock_0"
            made[f"{routed}.gate.kernel"] = get(f"{ffn}.router")
            made[f"{routed}.wi_0"], made[f"{routed}.wi_1"] = np.split(
                tensors[f"language_model.{ffn}.experts.gate_up_proj"], 2, axis=-1
            )
            made[f"{routed}.wo"] = tensors[f"language_model.{ffn}.experts.down_proj"]
    return made


@pytest.mark.parametrize(
    "options", ["", "--mesh fsdp=4,expert=2 --unit_bytes 40000", "--mesh tensor=8 --unit_bytes 40000"]
)
@pytest.mark.parametrize("model", MODELS)
def test_bits_are_laid_out_as_by_maxtexts_script(generated: Path, tmp_path: Path, model: str, options: str) -> None:
    """Not a bit changes, however the arrays are cut; scanned, the arrays of the same place in the cycle of four are
    stacked.
    """
    folder = generated / "models" / model
    wanted = script_arrays(read_tensors(folder), read_config(folder)["text_config"])
    assert_same_bits(converted(folder, tmp_path / "a", "--scan_layers", "false", *options.split()), wanted)
    stacked = {key: values for key, values in wanted.items() if ".layers_" not in key}
    for place in range(4):
        cycles = [layer_of(wanted, number, scanned=False) for number in (place, place + 4)]
        stacked |= {
            f"decoder.layers.layers_{place}.{key}": np.stack([cycle[key] for cycle in cycles], 1) for key in cycles[0]
        }
    assert_same_bits(converted(folder, tmp_path / "b", *options.split()), stacked)


# --- spellings, towers, patterns --------------------------------------------------------------------------------------


def linear_experts(tensors: Arrays) -> Arrays:
    """A linear layer for each expert, as quantised releases have them (transformers, quantizers/base.py
    `SequentialLlama4TextExperts`).
    """
    made = {}
    for name, values in tensors.items():
        prefix, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), np.split(values, 2, axis=-1), strict=True))
        elif part == "down_proj":
            parts = {part: values}
        else:
            made[name] = values
            continue
        made |= {
            f"{prefix}.{i}.{each}.weight": np.ascontiguousarray(matrix.T)
            for each, stacked in parts.items()
            for i, matrix in enumerate(stacked)
        }
    return made


def text_only(tensors: Arrays) -> Arrays:
    """What transformers' `Llama4ForCausalLM` saves."""
    return {
        name.removeprefix("language_model."): values
        for name, values in tensors.items()
        if name.startswith("language_model.")
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_spelling_gives_the_same_arrays(generated: Path, tmp_path: Path, model: str) -> None:
    """The text model alone, and experts in a linear layer each."""
    folder = generated / "models" / model
    config, tensors = read_config(folder), read_tensors(folder)
    wanted = converted(folder, tmp_path / "out")
    text, linear = (
        save(tmp_path / "text", config["text_config"], text_only(tensors)),
        save(tmp_path / "linear", config, linear_experts(tensors)),
    )
    both = save(tmp_path / "both", config["text_config"], linear_experts(text_only(tensors)))
    for source in (text, linear, both):
        assert_same_bits(
            converted(source, tmp_path / f"{source.name}-out", "--maxtext_model", "llama4-17b-16e"), wanted
        )


TEXT = dict(
    hidden_size=5120, num_hidden_layers=4, num_attention_heads=40, num_key_value_heads=8, head_dim=128, intermediate_size=8192,
    intermediate_size_mlp=16384, vocab_size=202048, num_local_experts=16, interleave_moe_layer_step=2,
)  # fmt: skip


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The text model's tensors, as a release has them, and one of its vision tower."""
    embed, vocab, experts, width = c["hidden_size"], c["vocab_size"], c["num_local_experts"], c["intermediate_size"]
    rows = dict(
        q=c["num_attention_heads"] * c["head_dim"],
        k=c["num_key_value_heads"] * c["head_dim"],
        v=c["num_key_value_heads"] * c["head_dim"],
    )
    made: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, embed),
        "model.norm.weight": (embed,),
        "lm_head.weight": (vocab, embed),
    }
    for number in range(c["num_hidden_layers"]):
        layer = {f"self_attn.{name}_proj.weight": (n, embed) for name, n in rows.items()} | {
            "self_attn.o_proj.weight": (embed, rows["q"])
        }
        layer |= {"input_layernorm.weight": (embed,), "post_attention_layernorm.weight": (embed,)}
        mlp, n = "feed_forward", c["intermediate_size_mlp"]
        if (number + 1) % c["interleave_moe_layer_step"] == 0:
            layer |= {
                "feed_forward.experts.gate_up_proj": (experts, embed, 2 * width),
                "feed_forward.experts.down_proj": (experts, width, embed),
            }
            layer |= {"feed_forward.router.weight": (experts, embed)}
            mlp, n = "feed_forward.shared_expert", width
        layer |= {
            f"{mlp}.gate_proj.weight": (n, embed),
            f"{mlp}.up_proj.weight": (n, embed),
            f"{mlp}.down_proj.weight": (embed, n),
        }
        made |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {f"language_model.{name}": shape for name, shape in made.items()} | {"vision_model.class_embedding": (1408,)}


def plan(text: dict[str, Any], **options: Any) -> Conversion:
    return plan_conversion(
        ConvertOptions(**options), headers_only({"model_type": "llama4", "text_config": text}, known=shapes(text))
    )


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("mesh", [(), ("fsdp=16",), ("tensor=8",), ("fsdp=4,expert=4",)], ids=str)
def test_each_byte_is_read_once(mesh: tuple[str, ...], scan: bool) -> None:
    """At real sizes: gate and up lie side by side in one tensor."""
    conversion = plan(TEXT, mesh=mesh, scan_layers=scan)
    assert conversion.plan.problems == ()
    assert 1 <= conversion.read_bytes / conversion.source_bytes <= 1.02


def test_the_vision_tower_is_left_out_with_a_reason(generated: Path) -> None:
    """Nothing else is."""
    conversion = plan(TEXT)
    assert conversion.plan.dropped == {
        "vision_model.class_embedding": "vision tower; Weightbeam converts Llama 4's text model"
    }
    towers = {name for name in read_tensors(generated / "models" / "llama4") if not name.startswith("language_model.")}
    assert {name.split(".")[0] for name in towers} == {"vision_model", "multi_modal_projector"}


@pytest.mark.parametrize("around", [True, False])
def test_its_language_model_says_whether_the_head_is_tied(around: bool) -> None:
    """`tie_word_embeddings` around `text_config` counts for nothing, as in transformers."""
    tied = TEXT | {"tie_word_embeddings": True}
    without_head = {name: shape for name, shape in shapes(tied).items() if "lm_head" not in name}
    config = {"model_type": "llama4", "tie_word_embeddings": around}
    for text, tensors, has_head in ((tied, without_head, False), (TEXT, shapes(TEXT), True)):
        made = plan_conversion(ConvertOptions(), headers_only(config | {"text_config": text}, known=tensors)).plan
        assert made.problems == ()
        assert any("logits_dense" in array.key for array in made.arrays) is has_head
        assert made.maxtext is not None
        assert made.maxtext["logits_via_embedding"] is not has_head


def test_a_section_that_is_none_is_one_fault() -> None:
    """Nothing that follows from it is told."""
    config = {"model_type": "llama4", "text_config": [1]}
    made = plan_conversion(ConvertOptions(), headers_only(config, known=shapes(TEXT)))
    assert [problem.message for problem in made.plan.problems if problem.kind == "config"] == [
        "'text_config' should be an object, but is [1]"
    ]


def test_the_vocabulary_may_be_padded(generated: Path, tmp_path: Path) -> None:
    """`--vocab_size` reaches the nested model's embedding and head."""
    arrays = converted(generated / "models" / "llama4", tmp_path / "out", "--vocab_size", "260")
    assert (arrays["token_embedder.embedding"].shape, arrays["decoder.logits_dense.kernel"].shape) == (
        (260, 64),
        (64, 260),
    )
    assert not arrays["token_embedder.embedding"][256:].astype(np.float32).any()
    assert {values.dtype for values in arrays.values()} == {BF16}


CHUNKED, FULL = "chunked_attention", "full_attention"


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (dict(moe_layers=[0, 1]), "moe_layers"),
        (dict(moe_layers=[1, "3"]), "moe_layers"),
        (dict(moe_layers=[]), "moe_layers"),
        (dict(moe_layers=[4]), "moe_layers"),
        (dict(no_rope_layers=[0, 1, 1, 1]), "no_rope_layers"),
        (dict(no_rope_layer_interval=2), "no_rope_layer_interval"),
        (dict(layer_types=[CHUNKED, FULL, CHUNKED, FULL]), "layer_types"),
        (dict(interleave_moe_layer_step=3, num_hidden_layers=12), "interleave_moe_layer_step"),
        (dict(num_hidden_layers=6), "cycles of 4"),
    ],
    ids=str,
)
def test_other_patterns_are_refused(change: dict[str, Any], hint: str) -> None:
    """What MaxText's cycle of four layers doesn't have is refused before any work."""
    (problem,) = plan(TEXT | change).plan.problems
    assert (problem.kind, hint in problem.message) == ("config", True)


@pytest.mark.parametrize(
    "change",
    [
        dict(
            moe_layers=[1, 3], no_rope_layers=[1, 1, 1, 0], layer_types=[CHUNKED] * 3 + [FULL], no_rope_layer_interval=4
        ),
        dict(moe_layers=None, no_rope_layers=[]),
        dict(interleave_moe_layer_step=1),
        dict(interleave_moe_layer_step=4),
    ],
    ids=str,
)
def test_its_own_pattern_is_taken(change: dict[str, Any]) -> None:
    """Written out, left out or empty; MoE in every layer, or in one of four."""
    assert plan(TEXT | change).plan.problems == ()


@pytest.mark.parametrize(
    ("listed", "step"), [([3, 1], 2), ([2, 0, 1, 3], 1), ([3], 4), ([*range(48)], 1), ([1, 3, 5], 2)], ids=str
)
def test_a_list_of_layers_counts_before_a_number(listed: list[int], step: int) -> None:
    """As in transformers, which looks whether a layer is in it."""
    for said in (2, 3):
        text = TEXT | dict(moe_layers=listed, interleave_moe_layer_step=said)
        tensors = shapes(TEXT | dict(interleave_moe_layer_step=step))
        config = {"model_type": "llama4", "text_config": text}
        made = plan_conversion(ConvertOptions(), headers_only(config, known=tensors)).plan
        assert made.problems == ()
        assert made.maxtext is not None
        assert made.maxtext["interleave_moe_layer_step"] == step


def test_layers_beyond_a_cycle_are_taken_unscanned() -> None:
    """Only a scan goes by whole cycles."""
    assert plan(TEXT | dict(num_hidden_layers=6), scan_layers=False).plan.problems == ()
