"""Qwen 2.5 (biases), Qwen 3 (query and key norms), Qwen 3 MoE."""

from weightbeam.model_mappings.blocks import (
    NORMS,
    attention,
    attention_biases,
    check_all_moe,
    common_dims,
    common_drops,
    experts,
    gated_mlp,
    is_fused,
    layers,
    tied_head,
    top,
)
from weightbeam.model_mappings.configuration import copied, derived, fixed, only, size
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family
from weightbeam.model_mappings.lines import (
    CONTEXT,
    NORM_TOPK,
    SIZES,
    TIED,
    activation,
    architecture,
    dense,
    eps,
    head_dim,
    tied,
)
from weightbeam.model_mappings.lines import experts as experts_lines
from weightbeam.model_mappings.rope import plain_rope
from weightbeam.model_mappings.rules import rule


def is_moe(c):
    return c["model_type"] == "qwen3_moe"


def text_dims(c, moe):
    """The axis words of the text model, with `moe` those of experts too."""
    sizes = moe and dict(expert=c.size("num_experts", c.count("num_local_experts") or None), moe_mlp=c.size("moe_intermediate_size"))
    return common_dims(c) | (sizes or {})


def moe_mlp(c, routed):
    """Router and `routed` experts, in every layer."""
    check_all_moe(c)
    return [rule("moe_block/gate/kernel", "mlp.gate.weight", "expert embed -> embed expert", "embed -"), *routed]


def routed_experts(c, layout, hf="model."):
    """Experts in one tensor each, or fused as transformers v5 holds them."""
    return experts("moe_block", "mlp.experts", c.size("moe_intermediate_size"), is_fused(layout, f"{hf}layers.0.mlp.experts"))


def decoder(c, layout, mlp, hf="model.", head="lm_head"):
    """The text model; `mlp` are the rules of a layer's MLP, `hf` is the prefix of the tensors, and `head` the head's name."""
    biased = c.get("model_type") == "qwen2"
    table = [
        *NORMS,
        *attention(),
        *attention_biases(when=biased),
        rule("self_attention/query_norm/scale", "self_attn.q_norm.weight", "dim", "norm", when=not biased),
        rule("self_attention/key_norm/scale", "self_attn.k_norm.weight", "dim", "norm", when=not biased),
        *mlp,
    ]
    return [top(c, layout, hf=hf, head=head), *layers(layout, "decoder/layers", range(c.size("num_hidden_layers")), table, f"{hf}layers.{{layer}}.")]


def dims(c, layout):
    return text_dims(c, is_moe(c))


def stacks(c, layout):
    return decoder(c, layout, moe_mlp(c, routed_experts(c, layout)) if is_moe(c) else gated_mlp())


HEAD = (tied(), fixed("normalize_embedding_logits", False))
WINDOW = only("use_sliding_window", False, "MaxText's layers look at all tokens; logits differ beyond the window. There is no way round", default=False)
DENSE = (*dense(rope=()), fixed("use_qk_norm", True))
MOE = (
    *SIZES, head_dim(), *activation(), eps(), CONTEXT, *experts_lines(), fixed("use_qk_norm", True),
    size("base_mlp_dim", "moe_intermediate_size"),
    copied("intermediate_size", lambda keys: keys["base_mlp_dim"]),  # no layer has it
    derived("norm_topk_prob", lambda c, model: True, "norm_topk_prob"),
)  # fmt: skip
QWEN2 = (*dense(), *architecture("qwen2", "Qwen2ForCausalLM", "qwen2"), *HEAD, fixed("use_qk_norm", False), fixed("attention_bias", True), WINDOW)
QWEN3 = (*DENSE, *plain_rope(), *architecture("qwen3", "Qwen3ForCausalLM", "qwen3"), *HEAD, WINDOW)
QWEN3_MOE = (*MOE, *plain_rope(), *architecture("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe"), *TIED, WINDOW, only("norm_topk_prob", True, NORM_TOPK, default=False))

CHECKED = (
    "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-1.7b-base", "qwen3-4b", "qwen3-4b-base", "qwen3-4b-thinking-2507",
    "qwen3-8b", "qwen3-8b-base", "qwen3-14b-base", "qwen3-32b", "qwen3-30b-a3b", "qwen3-30b-a3b-base", "qwen3-coder-480b-a35b",
)  # fmt: skip

FAMILY = Family(
    name="qwen",
    models={
        "qwen2.5-[0-9]*": ("qwen2",),
        "qwen3-[0-9]*": ("qwen3", "qwen3_moe"),
        "qwen3-coder-*": ("qwen3_moe",),
    },
    dims=dims,
    stacks=stacks,
    drops=common_drops,
    copies=tied_head,
    configuration={"qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE},
    aliases=WITHOUT_HEAD,
    releases="Qwen 2.5, Qwen 3, Qwen 3 MoE, Qwen 3 Coder",
    checked=CHECKED,
    missing="Qwen 3 MoE with dense layers among the others",
)
