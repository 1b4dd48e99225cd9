"""OLMo 3: norms behind attention and MLP instead of before them, query and key normed over all heads at once.

Three local layers and a global one repeat, and MaxText scans whole cycles of four. The norms of query and key are as long as
all heads together, in MaxText too (AI-Hypercomputer/maxtext, src/maxtext/models/olmo3.py; `GlobalRMSNorm` in
layers/normalizations.py, e591f30). Long-context and base models, `olmo3-7b` and `olmo3-7b-pt`, differ in RoPE only.
"""

from weightbeam.model_mappings.blocks import (
    attention,
    check_cycle,
    check_whole,
    common_dims,
    common_drops,
    cycles,
    gated_mlp,
    tied_head,
    top,
)
from weightbeam.model_mappings.config import Config
from weightbeam.model_mappings.configuration import copied, fixed, size, truth, unless, write
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family
from weightbeam.model_mappings.lines import CONTEXT, MLP, SIZES, activation, architecture, eps, head_dim
from weightbeam.model_mappings.rope import (
    FULL,
    ROPE,
    attention_scaling,
    is_yarn,
    nested_rope,
    passed_over,
    plain_rope,
    rope_of,
)
from weightbeam.model_mappings.rules import rule

LOCAL = "sliding_attention"
THETA = 500_000
CYCLE = ("sliding_attention",) * 3 + ("full_attention",)


def dims(c, layout):
    d = common_dims(c)
    return d | dict(all_heads=d["heads"] * d["dim"], all_kv=d["kv"] * d["dim"])


def stacks(c, layout):
    check_cycle(c, CYCLE)
    check_whole(c, layout, len(CYCLE))
    table = [
        *attention(target="attention"),
        rule("attention/query_norm/scale", "self_attn.q_norm.weight", "all_heads", "norm"),
        rule("attention/key_norm/scale", "self_attn.k_norm.weight", "all_kv", "norm"),
        rule("post_self_attention_layer_norm/scale", "post_attention_layernorm.weight", "embed", "norm"),
        *gated_mlp(),
        rule("post_mlp_layer_norm/scale", "post_feedforward_layernorm.weight", "embed", "norm"),
    ]
    return [top(c, layout), *cycles(layout, c.size("num_hidden_layers"), [table] * len(CYCLE))]


def turning(rope):
    """What an embedding depends on."""
    plain = ("rope_type", "rope_theta")
    return {key: value for key, value in rope.items() if key in plain or (rope["rope_type"] != "default" and key != "type")}


def uneven(c, model):
    full = Config(rope_theta=THETA) | rope_of(c, FULL)
    # a `rope_theta` beside the layers' own objects is of those with full attention (transformers v5.23.0)
    local = Config(rope_type="default", rope_theta=THETA) | (nested_rope(c, LOCAL) or {})
    if turning(local) == turning(full):
        return None
    if full["rope_type"] == "yarn" and local["rope_type"] == "default":
        return "rope_parameters: the model has YaRN in the layers with full attention, MaxText in all; logits differ much (39 % of the tokens agree in a test). There is no way round"
    return f"rope_parameters: {LOCAL} layers have {dict(local)}, {FULL} ones {dict(full)}, and MaxText's all the latter; logits differ. There is no way round"


ROTARY = (*plain_rope(THETA, FULL), *attention_scaling(FULL))


def full_rope(keys):
    """MaxText has one embedding in all layers."""
    return write(ROTARY, keys)[ROPE][FULL]


LINES = (
    *SIZES, head_dim(), MLP, *activation(), eps(1e-5), CONTEXT,
    *architecture("olmo3", "Olmo3ForCausalLM", "olmo3"),
    truth("logits_via_embedding", "tie_word_embeddings"),
    fixed("normalize_embedding_logits", False),
    fixed("use_qk_norm", True),
    fixed("inhomogeneous_layer_cycle_interval", len(CYCLE)),
    size("sliding_window_size", "sliding_window", default=4096),
    *ROTARY,
    fixed("rope_interleave", False),
    copied(f"{ROPE}.{LOCAL}", full_rope),
    unless(uneven), unless(passed_over),
)  # fmt: skip

FAMILY = Family(
    name="olmo3",
    models={"olmo3-[0-9]*": ("olmo3",)},
    dims=dims,
    stacks=stacks,
    drops=common_drops,
    copies=tied_head,
    configuration={"olmo3": LINES},
    is_model=lambda c, model: (model == "olmo3-7b-pt") == (not is_yarn(c, FULL)),
    aliases=WITHOUT_HEAD,
    releases="OLMo 3 7B, 32B",
    checked=("olmo3-7b", "olmo3-7b-pt"),
)
