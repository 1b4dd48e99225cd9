"""GLM-5.3-Flash: Kimi delta attention, each fourth layer latent attention without RoPE, residual streams, experts behind dense layers.

The table's names are the hub's. MaxText's tree is read from a branch and wasn't run: its layers (AI-Hypercomputer/maxtext,
src/maxtext/models/glm5_next.py, 0630439) and sizes (configs/models/glm5.3-flash.yml, 4c8ee5b). The branch's mapping
(checkpoint_conversion/utils/param_mapping.py, d1b6229) has no latent attention and no router bias, and names the experts as no layer
does; here they are as the layers and `RoutedAndSharedMoE` (layers/moe.py, e591f30) have them. The branch has no scan of these layers, and
its latent attention no indexer: it looks at every token, as the model does in up to `index_topk` of them.
"""

import functools

from weightbeam.model_mappings.blocks import common_drops, experts, gated_mlp, is_fused, text_part, tied_head, top
from weightbeam.model_mappings.config import ConfigError
from weightbeam.model_mappings.configuration import derived, fixed, inside, real, size, unless
from weightbeam.model_mappings.families.deepseek import GROUPS
from weightbeam.model_mappings.family import Family, Prediction, Tower, Variable
from weightbeam.model_mappings.lines import CONTEXT, MLP, NORMED, SIZES, STREAMS, TIED, activation, architecture, eps
from weightbeam.model_mappings.lines import experts as expert_lines
from weightbeam.model_mappings.mixers import delta_attention, hyper_connection, hyper_dims
from weightbeam.model_mappings.rules import rule, stack
from weightbeam.model_mappings.sparse_decoder import BIAS, as_spare, dense_prefix, is_prediction

HF = "model.language_model."
CYCLE = 4
LATENT_ATTENTION = [
    rule("attention/q_a_proj/kernel", "self_attn.q_a_proj.weight", "q_lora embed -> embed q_lora", "embed q_lora"),
    rule("attention/q_a_layernorm/scale", "self_attn.q_a_layernorm.weight", "q_lora", "norm"),
    rule("attention/q_b_proj/kernel", "self_attn.q_b_proj.weight", "(heads q_dim) q_lora -> q_lora (heads q_dim)", "q_lora heads"),
    rule("attention/kv_a_proj_with_mqa/kernel", "self_attn.kv_a_proj_with_mqa.weight", "kv_lora embed -> embed kv_lora", "embed kv_lora"),
    rule("attention/kv_a_layernorm/scale", "self_attn.kv_a_layernorm.weight", "kv_lora", "norm"),
    rule("attention/kv_b_proj/kernel", "self_attn.kv_b_proj.weight", "(heads kv_dim) kv_lora -> kv_lora (heads kv_dim)", "kv_lora heads"),
    rule("attention/o_proj/kernel", "self_attn.o_proj.weight", "embed (heads v_dim) -> (heads v_dim) embed", "heads embed"),
]


def dense_layers(c):
    """transformers' class (v5.23.0) has no `first_k_dense_replace`."""
    return dense_prefix(c, default=3)


def check_layers(c):
    """transformers reads `full_attention` as `indexed_attention`."""
    n, types = c.size("num_hidden_layers"), c.get("layer_types")
    kinds = [["linear_attention"], ["indexed_attention", "full_attention"]]
    if types is not None and (len(types) != n or any(kind not in kinds[i % CYCLE == CYCLE - 1] for i, kind in enumerate(types))):
        raise ConfigError(f"config.json: 'layer_types' isn't the pattern of MaxText's model over {n} layers: linear_attention, each fourth indexed_attention")


def dims(c, layout):
    c = text_part(c)
    nope, v_dim, moe_mlp = (c.size(key) for key in ("qk_nope_head_dim", "v_head_dim", "moe_intermediate_size"))
    heads, dim = c.size("linear_num_heads", 64), c.size("linear_head_dim", 128)
    return hyper_dims(c) | dict(
        embed=c.size("hidden_size"), heads=c.size("num_attention_heads"), q_dim=nope, kv_dim=nope + v_dim, v_dim=v_dim, mlp=c.size("intermediate_size"),
        q_lora=c.size("q_lora_rank"), kv_lora=c.size("kv_lora_rank"), linear_heads=heads, linear_dim=dim, linear=heads * dim,
        taps=c.size("linear_conv_kernel_dim", 4), expert=c.size("n_routed_experts"), moe_mlp=moe_mlp, shared_mlp=moe_mlp * c.size("n_shared_experts"),
    )  # fmt: skip


def stacks(c, layout, is_newest=True):
    c = text_part(c)
    check_layers(c)
    n, dense, streams = c.size("num_hidden_layers"), dense_layers(c), c.size("hc_mult")
    fused = is_fused(layout, f"{HF}layers.{dense}.mlp.experts")
    common = [
        rule("input_layernorm/scale", "input_layernorm.weight", "embed", "norm"),
        rule("post_attention_layernorm/scale", "post_attention_layernorm.weight", "embed", "norm"),
        *hyper_connection("attn_hc", "hc_attn", streams),
        *hyper_connection("ffn_hc", "hc_ffn", streams),
    ]
    bias = rule("mlp/MoeBlock_0/gate/bias", "mlp.gate.e_score_correction_bias", "expert", "-")
    moe = [
        rule("mlp/MoeBlock_0/gate/kernel", "mlp.gate.weight", "expert embed -> embed expert", "embed_router -"),
        as_spare(bias, is_newest),
        *experts("mlp/MoeBlock_0", "mlp.experts", c.size("moe_intermediate_size"), fused),
        *gated_mlp("mlp/shared_experts", "mlp.shared_experts", "shared_mlp"),
    ]
    linear = delta_attention("attention", c.size("linear_num_heads", 64) * c.size("linear_head_dim", 128))
    out = [top(c, layout, hf=HF)]
    for i in range(n):
        table = [*common, *(LATENT_ATTENTION if i % CYCLE == CYCLE - 1 else linear), *(moe if i >= dense else gated_mlp())]
        out.append(stack(f"decoder/layers_{i}", f"{HF}layers.{{layer}}.", i, table))
    variables = range(dense, n) if is_newest else ()
    return out + [stack(f"decoder/layers_{i}", f"{HF}layers.{{layer}}.", i, [bias], collection=BIAS) for i in variables]


def drops(c, layout):
    c = text_part(c)
    mtp = f"{HF}layers.{c.size('num_hidden_layers')}."
    prediction = {f"{mtp}*": Prediction("multi-token prediction, which MaxText's GLM-5.3 doesn't have")} if is_prediction(layout, mtp) else {}
    return common_drops(c, layout, hf=HF) | prediction | {
        f"{HF}layers.*.self_attn.indexer.*": Variable("MaxText's latent attention looks at every token"),
        "model.visual.*": Tower("vision tower, MaxText's GLM-5.3 has none"),
    }


def window_limit(c, model):
    topk = c.get("index_topk", 2048)
    return f"index_topk is {topk}: MaxText's latent attention looks at every token; logits differ beyond {topk} tokens. There is no way round"


LINES = (
    *SIZES, MLP, *activation(), eps(1e-5), CONTEXT, *TIED, *architecture("glm5_3", "Glm5NextForConditionalGeneration", "glm5_next_text"),
    *expert_lines("n_routed_experts"),
    size("shared_experts", "n_shared_experts"),
    derived("first_num_dense_layers", lambda c, model: dense_layers(c)),
    *(size(name, name) for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")),
    fixed("qk_rope_head_dim", 0),
    size("head_dim", "qk_nope_head_dim"),
    fixed("inhomogeneous_layer_cycle_interval", CYCLE),
    size("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
    size("linear_head_dim", "linear_head_dim", default=128),
    size("linear_num_heads", "linear_num_heads", default=64),
    real("linear_lower_bound", "linear_lower_bound", default=-5.0),
    *STREAMS,
    real("mlp_activations_limit", "swiglu_limit", default=10.0),
    real("swiglu_limit", "swiglu_limit", default=10.0),
    real("routed_scaling_factor", "routed_scaling_factor", default=2.5),
    fixed("routed_score_func", "sigmoid"),
    fixed("routed_bias", True),
    fixed("norm_topk_prob", True),
    NORMED,
    *GROUPS,
    unless(window_limit),
)  # fmt: skip

FAMILY = Family(
    name="glm5_next",
    models={"glm5.3-*": ("glm5_next", "glm5_next_text")},
    dims=dims,
    stacks=stacks,
    earlier={"e591f30": functools.partial(stacks, is_newest=False)},
    drops=drops,
    copies=lambda c, layout: tied_head(text_part(c), layout, hf=HF),
    configuration={"glm5_next": inside("text_config", LINES), "glm5_next_text": LINES},
    trees="branch, models/glm5_next.py (0630439), read; *not run*",
    releases="GLM-5.3-Flash (a branch of MaxText)",
    missing="vision tower, multi-token prediction, the indexer",
    layouts=("unscanned",),
)
