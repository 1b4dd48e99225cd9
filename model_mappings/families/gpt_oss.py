"""gpt-oss: sliding and full attention in turn, sinks, biases everywhere; an expert's gate and up alternate in one tensor.

MaxText scans a sliding and a full layer as one step. Its layers apply 1/√dim to the query themselves and keep the rotary
halves apart (`rope_interleave: false`), so nothing is scaled or permuted; `wi_0` is the gate (AI-Hypercomputer/maxtext,
src/maxtext/models/gpt_oss.py and layers/moe.py `apply_ffn_activation`, e591f30). Experts lie in the files as MaxText has them,
(expert, in, out): their matrices may be square, so no shape would tell (huggingface/transformers,
models/gpt_oss/modeling_gpt_oss.py, v5.23.0).
"""

from weightbeam.model_mappings.blocks import (
    NORMS,
    attention,
    attention_biases,
    check_cycle,
    check_whole,
    common_dims,
    common_drops,
    cycles,
    tied_head,
    top,
)
from weightbeam.model_mappings.configuration import fixed, only, real, size
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family
from weightbeam.model_mappings.lines import CONTEXT, MLP, SIZES, TIED, architecture, eps, head_dim
from weightbeam.model_mappings.rope import attention_scaling, plain_rope
from weightbeam.model_mappings.rules import rule

ATTENTION, MOE = "GptOssAttention", "GptOssMlp"
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
TABLE = [
    *NORMS,
    *attention(target=ATTENTION),
    *attention_biases(ATTENTION),
    rule(f"{ATTENTION}/out/bias", "self_attn.o_proj.bias", "embed", "embed_attn"),
    rule(f"{ATTENTION}/sinks", "self_attn.sinks", "heads", "-"),
    rule(f"{MOE}/gate/kernel", "mlp.router.weight", "expert embed -> embed expert", "embed -"),
    rule(f"{MOE}/gate/bias", "mlp.router.bias", "expert", "-"),
    rule(f"{MOE}/wi_0", f"{GATE_UP}[..., 0::2]", "expert embed mlp", "exp embed_moe mlp_moe"),
    rule(f"{MOE}/wi_1", f"{GATE_UP}[..., 1::2]", "expert embed mlp", "exp embed_moe mlp_moe"),
    rule(f"{MOE}/wi_0_bias", f"{GATE_UP}_bias[..., 0::2]", "expert mlp", "exp activation_mlp"),
    rule(f"{MOE}/wi_1_bias", f"{GATE_UP}_bias[..., 1::2]", "expert mlp", "exp activation_mlp"),
    rule(f"{MOE}/wo", DOWN, "expert mlp embed", "exp mlp_moe embed_moe"),
    rule(f"{MOE}/wo_bias", f"{DOWN}_bias", "expert embed", "exp activation_embed"),
]


def dims(c, layout):
    return common_dims(c) | dict(expert=c.size("num_local_experts"))


def stacks(c, layout):
    check_cycle(c, ("sliding_attention", "full_attention"))
    check_whole(c, layout, 2)
    return [top(c, layout), *cycles(layout, c.size("num_hidden_layers"), [TABLE, TABLE])]


LINES = (
    *SIZES, head_dim(64), MLP, eps(1e-5), CONTEXT, *plain_rope(150_000), *architecture("gpt_oss", "GptOssForCausalLM", "gpt_oss"), *TIED,
    size("base_moe_mlp_dim", "intermediate_size"),
    size("num_experts", "num_local_experts"),
    size("num_experts_per_tok", "num_experts_per_tok", default=4),
    size("sliding_window_size", "sliding_window", default=128),
    fixed("mlp_activations", ["sigmoid", "linear"]),
    real("mlp_activations_limit", "swiglu_limit", default=7.0),
    *(fixed(key, True) for key in ("attention_bias", "attention_sink", "routed_bias", "mlp_bias")),
    *attention_scaling(),
    fixed("rope_interleave", False),
    fixed("inhomogeneous_layer_cycle_interval", 2),
    only("attention_bias", True, "MaxText's layers add the biases of attention, transformers' leave them out then; logits differ", default=True),
    only("swiglu_alpha", 1.702, "MaxText's layer has 1.702 built in; logits differ", default=1.702),
)  # fmt: skip

FAMILY = Family(
    name="gpt_oss",
    models={"gpt-oss-[0-9]*": ("gpt_oss",)},
    dims=dims,
    stacks=stacks,
    drops=common_drops,
    copies=tied_head,
    configuration={"gpt_oss": LINES},
    aliases=WITHOUT_HEAD,
    releases="gpt-oss 20b, 120b",
    checked=("gpt-oss-20b",),
)
