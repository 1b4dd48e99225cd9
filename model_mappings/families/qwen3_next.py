"""Qwen 3 Next: three gated delta nets and one attention with an output gate repeat; every layer has experts and a gated shared one.

The delta net's rows lie together by key head, its query, key, values and gates z in turn, in the files and in MaxText's layer; a
head's query lies beside its output gate. Norms hold w of 1 + w on both sides, the delta net's holds w (AI-Hypercomputer/maxtext,
src/maxtext/models/qwen3.py and layers/normalizations.py, e591f30). Multi-token prediction is left out: MaxText's block can't make
the one attention layer of it, but only a whole cycle of layers (models/models.py, layers/multi_token_prediction.py). MaxText's own
shapes of the files can't be used, `QWEN3_NEXT_HF_WEIGHTS_TO_SHAPE` returns nothing and mistakes `head_dim` for the size of a value
head (checkpoint_conversion/utils/hf_shape.py); the sizes here are those of its parameters.
"""

import numpy as np

from weightbeam.model_mappings.blocks import (
    check_all_moe,
    check_cycle,
    check_whole,
    common_drops,
    cycles,
    experts,
    gated_mlp,
    is_fused,
    tied_head,
    top,
)
from weightbeam.model_mappings.config import ConfigError
from weightbeam.model_mappings.configuration import copied, derived, fixed, number, size, written
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family, Prediction
from weightbeam.model_mappings.lines import CONTEXT, NORMED, SIZES, TIED, activation, architecture, eps
from weightbeam.model_mappings.lines import experts as expert_lines
from weightbeam.model_mappings.rope import only_kinds, rope_of, theta
from weightbeam.model_mappings.rules import rule, stack

CYCLE = ("linear_attention",) * 3 + ("full_attention",)
QKVZ, BA = "attention/in_proj_qkvz/kernel", "attention/in_proj_ba/kernel"
IN_PROJ = [
    rule(QKVZ, "linear_attn.in_proj_qkvz.weight", "qkvz embed -> embed qkvz", "embed_attn gdn_head"),
    rule(BA, "linear_attn.in_proj_ba.weight", "ba embed -> embed ba", "embed_attn gdn_head"),
]
DELTA_NET = [
    rule("attention/conv1d/kernel", "linear_attn.conv1d.weight", "qkv 1 taps -> taps 1 qkv", ""),
    rule("attention/A_log", "linear_attn.A_log", "value_heads", ""),
    rule("attention/dt_bias", "linear_attn.dt_bias", "value_heads", ""),
    rule("attention/norm/rms_norm/scale", "linear_attn.norm.weight", "value_dim", "-"),
    rule("attention/out_proj/kernel", "linear_attn.out_proj.weight", "embed (value_heads value_dim) -> (value_heads value_dim) embed", "gdn_head embed_attn"),
]
ATTENTION = [
    rule("attention/attention/query/kernel", "self_attn.q_proj.weight", "(heads query_gate) embed -> embed heads query_gate", "embed_attn q_heads kv"),
    rule("attention/attention/key/kernel", "self_attn.k_proj.weight", "(kv dim) embed -> embed kv dim", "embed_attn kv_heads kv_head_dim"),
    rule("attention/attention/value/kernel", "self_attn.v_proj.weight", "(kv dim) embed -> embed kv dim", "embed_attn kv_heads kv_head_dim"),
    rule("attention/attention/out/kernel", "self_attn.o_proj.weight", "embed (heads dim) -> (heads dim) embed", "mlp embed_attn"),
    rule("attention/attention/query_norm/scale", "self_attn.q_norm.weight", "dim", "-"),
    rule("attention/attention/key_norm/scale", "self_attn.k_norm.weight", "dim", "-"),
]
MTP = {"mtp.*": Prediction("multi-token prediction, MaxText has no block for this model's")}


def dims(c, layout):
    keys, values, key_dim, value_dim = (c.size(f"linear_{key}") for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    if values % keys:
        raise ConfigError(f"config.json: {values} value heads can't be shared out among {keys} key heads (linear_num_value_heads, linear_num_key_heads)")
    dim, z = c.size("head_dim", 256), values * value_dim
    return dict(
        embed=c.size("hidden_size"), heads=c.size("num_attention_heads"), kv=c.size("num_key_value_heads"), dim=dim, query_gate=2 * dim,
        key_heads=keys, value_heads=values, key_dim=key_dim, value_dim=value_dim, qkv=2 * keys * key_dim + z, qkvz=2 * keys * key_dim + 2 * z, ba=2 * values,
        taps=c.size("linear_conv_kernel_dim"), expert=c.size("num_experts"), moe_mlp=c.size("moe_intermediate_size"),
    )  # fmt: skip


def in_cycles(layout, count, tables, source):
    """Scanned, the layers of each place in the cycle are one stack."""
    return cycles(layout, count, tables, source, place="layer")


def by_kind(layout, count, tables, source):
    """Scanned, the delta nets are one stack over (cycle, place), and the attention layers one over the cycles, as in MaxText 0.2.5."""
    if not layout.scan:
        return in_cycles(layout, count, tables, source)
    numbers = np.arange(count).reshape(-1, len(CYCLE))
    return [
        stack("decoder/layers/local_layers", source, numbers[:, :-1], tables[0], "layers local_layers"),
        stack("decoder/layers/global_layer", source, numbers[:, -1], tables[-1], "layers"),
    ]


def decoder(c, layout, in_proj, hf="model.", lay_out=in_cycles, norm="norm"):
    """The text model.

    Args:
      in_proj: the rules of the delta net's input projections.
      hf: the prefix of the tensors.
      lay_out: how a version of MaxText stacks the layers of the cycle.
      norm: what it calls the axis of the last norm.
    """
    moe_mlp, shared_mlp = c.size("moe_intermediate_size"), c.size("shared_expert_intermediate_size")
    check_cycle(c, CYCLE)
    check_whole(c, layout, len(CYCLE))
    if c.size("full_attention_interval", len(CYCLE)) != len(CYCLE):
        raise ConfigError(f"config.json: full attention is one layer in {c['full_attention_interval']}, in MaxText's model one in {len(CYCLE)}")
    check_all_moe(c)
    if shared_mlp != moe_mlp:
        raise ConfigError(f"config.json: the shared expert's size is {shared_mlp}, a routed one's {moe_mlp}; MaxText gives both the same")
    moe = [
        rule("input_layernorm/scale", "input_layernorm.weight", "embed", "-"),
        rule("post_attention_layernorm/scale", "post_attention_layernorm.weight", "embed", "-"),
        rule("mlp/routed_experts/gate/kernel", "mlp.gate.weight", "expert embed -> embed expert", "embed -"),
        *experts("mlp/routed_experts", "mlp.experts", moe_mlp, is_fused(layout, f"{hf}layers.0.mlp.experts")),
        *gated_mlp("mlp/shared_expert", "mlp.shared_expert", "moe_mlp"),
        rule("mlp/shared_expert_gate/kernel", "mlp.shared_expert_gate.weight", "1 embed -> embed 1", "embed -"),
    ]
    delta_net, attention = [*in_proj, *DELTA_NET, *moe], [*ATTENTION, *moe]
    tables = [attention if kind == "full_attention" else delta_net for kind in CYCLE]
    return [top(c, layout, hf=hf, norm=norm), *lay_out(layout, c.size("num_hidden_layers"), tables, f"{hf}layers.{{layer}}.")]


def partial(c, model=None):
    return number(rope_of(c).get("partial_rotary_factor", c.get("partial_rotary_factor", 0.25)))


LINES = (
    *SIZES, *activation(), eps(), CONTEXT, theta(), *expert_lines(),
    written("rope_parameters.rope_type", "default"),
    size("base_mlp_dim", "moe_intermediate_size"),
    copied("shared_expert_intermediate_size", lambda keys: keys["base_moe_mlp_dim"]),
    fixed("shared_experts", 1),
    size("head_dim", "head_dim", default=256),
    derived("partial_rotary_factor", partial, "rope_parameters.partial_rotary_factor"),
    *(size(f"gdn_{name}", f"linear_{name}") for name in ("key_head_dim", "value_head_dim")),
    size("gdn_num_key_heads", "linear_num_key_heads"),
    size("gdn_num_value_heads", "linear_num_value_heads"),
    size("gdn_conv_kernel_dim", "linear_conv_kernel_dim"),
    fixed("inhomogeneous_layer_cycle_interval", len(CYCLE)),
    fixed("norm_topk_prob", True),
)  # fmt: skip
NEXT = (*LINES, *TIED, *architecture("qwen3_next", "Qwen3NextForCausalLM", "qwen3_next"), NORMED, only_kinds("default"))

FAMILY = Family(
    name="qwen3_next",
    models={"qwen3-next-[0-9]*": ("qwen3_next",)},
    dims=dims,
    stacks=lambda c, layout: decoder(c, layout, IN_PROJ, lay_out=by_kind),
    earlier={"e591f30": lambda c, layout: decoder(c, layout, IN_PROJ, norm="-")},
    drops=lambda c, layout: common_drops(c, layout) | MTP,
    copies=tied_head,
    configuration={"qwen3_next": NEXT},
    aliases=WITHOUT_HEAD,
    releases="Qwen 3 Next 80B-A3B, Qwen 3 Coder Next",
    checked=("qwen3-next-80b-a3b",),
    missing="multi-token prediction",
)
