"""Llama 4 Scout and Maverick, the text model: every layer (16 experts) or every second (128) is MoE, every fourth has no RoPE.

MaxText scans four layers as one step. Its layers apply 1/√dim to the query themselves, and their norm of query and key has
no weights. Rotary halves are paired in the files already, as in MaxText: nothing is permuted
(huggingface/transformers, models/llama4/modeling_llama4.py `apply_rotary_emb`, v5.23.0; AI-Hypercomputer/maxtext,
src/maxtext/models/llama4.py, layers/attentions.py, checkpoint_conversion/standalone_scripts/llama4_ckpt_unscanned.py, e591f30).

Fused experts lie in the files as in MaxText, (expert, in, out), gate before up; some quantised releases have a linear layer
for each (transformers, quantizers/base.py `SequentialLlama4TextExperts`). The table's names are those of the text model
alone; the releases say `language_model.` in front of them.
"""

from weightbeam.model_mappings.blocks import (
    NORMS,
    attention,
    check_whole,
    common_dims,
    common_drops,
    cycles,
    experts,
    experts_in_out,
    gated_mlp,
    is_fused,
    text_part,
    tied_head,
    top,
)
from weightbeam.model_mappings.config import ConfigError
from weightbeam.model_mappings.configuration import derived, fixed, inside, only, size, truth, unless, written
from weightbeam.model_mappings.family import Family, Tower
from weightbeam.model_mappings.lines import CONTEXT, SIZES, TIED, activation, eps, head_dim
from weightbeam.model_mappings.rope import llama3_limit, llama3_lines, only_kinds, rope_of, theta
from weightbeam.model_mappings.rules import rule

CYCLE = 4
MOE = "Llama4MoEBlock_0"
ROUTED, SHARED = f"{MOE}/MoeBlock_0", f"{MOE}/shared_experts"


def moe_step(t):
    """Every how many layers there is an MoE layer; the first has number step - 1. A list of them counts before the number, in any
    order and with others that the model hasn't got; an empty one is of a model without (transformers v5.23.0,
    configuration_llama4.py and modeling_llama4.py).
    """
    n, listed = t.size("num_hidden_layers"), t.get("moe_layers")
    if listed is None:
        return t.size("interleave_moe_layer_step", 1)
    is_numbers = isinstance(listed, list) and all(type(layer) is int for layer in listed)
    numbers = sorted({*range(n)}.intersection(listed)) if is_numbers else None
    for step in (1, 2, CYCLE):
        if numbers == list(range(step - 1, n, step)):
            return step
    raise ConfigError(f"config.json: 'moe_layers' should be each layer, or each second or fourth, as MaxText's Llama 4 has them, but is {listed!r}")


def checked_step(t):
    """The same, where the pattern of the layers is MaxText's."""
    n, step = t.size("num_hidden_layers"), moe_step(t)
    rope = [int((layer + 1) % CYCLE != 0) for layer in range(n)]
    kinds = ["chunked_attention" if has_rope else "full_attention" for has_rope in rope]
    pattern = dict(no_rope_layer_interval=CYCLE, no_rope_layers=rope, layer_types=kinds)
    for key, wanted in pattern.items():
        if t.get(key) not in (None, [], wanted):  # released configs leave them out, or leave them empty
            raise ConfigError(f"config.json: {key!r} should be {wanted}, as MaxText's Llama 4 has it, but is {t[key]!r}")
    if CYCLE % step:
        raise ConfigError(f"config.json: 'interleave_moe_layer_step' is {step}, which MaxText's cycle of {CYCLE} layers isn't a multiple of")
    return step


def dims(c, layout):
    t = text_part(c)
    moe_mlp = t.size("intermediate_size")
    return common_dims(t) | dict(mlp=t.size("intermediate_size_mlp", 16384), expert=t.size("num_local_experts", 16), moe_mlp=moe_mlp, shared_mlp=moe_mlp)


def stacks(c, layout):
    t = text_part(c)
    check_whole(t, layout, CYCLE)
    step, width = checked_step(t), t.size("intermediate_size")
    # transformers has them so, and reads no others; what nobody has written yet is for it
    fused = not layout.names or is_fused(layout, f"model.layers.{step - 1}.feed_forward.experts")
    routed = experts_in_out(ROUTED, "feed_forward.experts", width) if fused else experts(ROUTED, "feed_forward.experts", width, fused=False)
    dense = [*NORMS, *attention(), *gated_mlp(source="feed_forward")]
    moe = [
        *NORMS,
        *attention(),
        rule(f"{ROUTED}/gate/kernel", "feed_forward.router.weight", "expert embed -> embed expert", "embed_moe -"),
        *routed,
        *gated_mlp(SHARED, "feed_forward.shared_expert", "shared_mlp"),
    ]
    tables = [dense if (place + 1) % step else moe for place in range(CYCLE)]
    return [top(t, layout), *cycles(layout, t.size("num_hidden_layers"), tables)]


def drops(c, layout):
    reason = Tower("vision tower; Weightbeam converts Llama 4's text model")
    return common_drops(text_part(c), layout) | {"vision_model.*": reason, "multi_modal_projector.*": reason}


def has_dense_layers(t):
    return moe_step(t) != 1


def scaled(t):
    return rope_of(t)["rope_type"] == "llama3"


TEXT = (
    *SIZES, head_dim(), *activation(), eps(1e-5), CONTEXT,
    theta(default=500_000),
    fixed("rope_type", "llama3.1"),
    derived("rope_use_scale", lambda t, model: scaled(t), "rope_parameters.rope_type", to_field=lambda yes: "llama3" if yes else "default"),
    *llama3_lines(), only_kinds("default", "llama3"), unless(lambda t, model: llama3_limit(rope_of(t))),
    size("base_mlp_dim", "intermediate_size_mlp", default=16384, when=has_dense_layers),
    size("base_mlp_dim", "intermediate_size", when=lambda t: not has_dense_layers(t)),  # no layer has it
    size("base_moe_mlp_dim", "intermediate_size"),
    size("num_experts", "num_local_experts", default=16),
    size("num_experts_per_tok", "num_experts_per_tok", default=1),
    fixed("shared_experts", 1),
    truth("use_qk_norm", "use_qk_norm", default=True),
    fixed("nope_layer_interval", CYCLE),
    derived("interleave_moe_layer_step", lambda t, model: moe_step(t), "interleave_moe_layer_step"),
    fixed("inhomogeneous_layer_cycle_interval", CYCLE),
    derived("temperature_tuning", lambda t, model: bool(t.get("attn_temperature_tuning", True)), "attn_temperature_tuning"),
    only("attn_scale", 0.1, "MaxText's layer has 0.1 built in; logits differ beyond 8192 tokens", default=0.1),
    only("floor_scale", 8192, "MaxText's layer has 8192 built in; logits differ beyond as many tokens", default=8192),
    size("chunk_attn_window_size", "attention_chunk_size", default=8192),
    fixed("decoder_block", "llama4"),
    fixed("routed_score_func", ""),
)  # fmt: skip

FAMILY = Family(
    name="llama4",
    models={"llama4-*": ("llama4", "llama4_text")},
    dims=dims,
    stacks=stacks,
    drops=drops,
    copies=lambda c, layout: tied_head(text_part(c), layout),
    configuration={
        "llama4_text": (*TEXT, *TIED, written("architectures", ["Llama4ForCausalLM"]), written("model_type", "llama4_text")),
        "llama4": (*inside("text_config", (*TEXT, *TIED)), written("architectures", ["Llama4ForConditionalGeneration"]), written("model_type", "llama4")),
    },
    aliases={"language_model": ""},
    releases="Llama 4 Scout, Maverick (text)",
    checked=("llama4-17b-16e", "llama4-17b-128e"),
    missing="the vision tower",
)
