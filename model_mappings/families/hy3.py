"""Hy3: grouped-query attention with norms of query and key, and DeepSeek V3's dense prefix, router and shared expert.

No release of MaxText has it: tree, layer and configuration are those of AI-Hypercomputer/maxtext, pull request 4704
(75d2826), src/maxtext/models/hy3.py and configs/models/hy3-295b.yml, for which its model was built abstractly; its trainer
wasn't run. Its mapping leaves the layer for multi-token prediction out; that layer's names: vllm-project/vllm,
vllm/model_executor/models/hy_v3_mtp.py, 03742c0. transformers says `gate`, `e_score_correction_bias` and `shared_experts`
in memory (v5.23.0, conversion_mapping.py), the hub's files say what the table does.
"""

import functools

from weightbeam.model_mappings.blocks import NORMS, attention, common_dims, experts, gated_mlp, is_fused
from weightbeam.model_mappings.configuration import copied, derived, fixed, real, size
from weightbeam.model_mappings.families import deepseek
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.lines import TIED, architecture, dense, eps, mlp_layer_types
from weightbeam.model_mappings.lines import experts as expert_lines
from weightbeam.model_mappings.rope import plain_rope
from weightbeam.model_mappings.rules import rule
from weightbeam.model_mappings.sparse_decoder import as_spare, bias_variables, dense_prefix, dense_then_routed

MOE = "Hy3MoeBlock_0"
ROUTER = f"{MOE}/MoeBlock_0"


def dims(c, layout):
    moe_mlp = c.size("moe_intermediate_size")
    return common_dims(c) | dict(
        expert=c.size("num_experts"), moe_mlp=moe_mlp, shared_mlp=moe_mlp * c.size("num_shared_experts", 1), pair=2 * c.size("hidden_size")
    )


def stacks(c, layout, is_newest=True):
    first = dense_prefix(c)
    bias = rule(f"{ROUTER}/gate/bias", "mlp.expert_bias", "expert", "-")
    norm = rule("mtp_1_final_norm/scale", "final_layernorm.weight", "embed", "norm", when=is_newest)
    table = [
        *NORMS,
        *attention(),
        rule("self_attention/query_norm/scale", "self_attn.q_norm.weight", "dim", "norm"),
        rule("self_attention/key_norm/scale", "self_attn.k_norm.weight", "dim", "norm"),
    ]
    routed = [
        *gated_mlp(f"{MOE}/shared_experts", "mlp.shared_mlp", "shared_mlp"),
        rule(f"{ROUTER}/gate/kernel", "mlp.router.gate.weight", "expert embed -> embed expert", "embed_router -"),
        as_spare(bias, is_newest),
        *experts(ROUTER, "mlp.experts", c.size("moe_intermediate_size"), is_fused(layout, f"model.layers.{first}.mlp.experts")),
    ]
    return dense_then_routed(c, layout, first, table, routed, norm) + bias_variables(c, layout, first, bias, is_newest)


def drops(c, layout):
    norm = f"model.layers.{c.size('num_hidden_layers')}.final_layernorm.weight"
    is_dropped = layout.mtp and layout.maxtext in FAMILY.earlier
    return deepseek.drops(c, layout) | ({norm: "MaxText's MTP block applies the model's last norm"} if is_dropped else {})


LINES = (
    *dense(plain_rope(11_158_840)), *architecture("hy3", "HYV3ForCausalLM", "hy_v3"), *TIED, eps(1e-5), *expert_lines(),
    size("shared_experts", "num_shared_experts", default=1),
    derived("first_num_dense_layers", lambda c, model: dense_prefix(c), "first_k_dense_replace"),
    copied("mlp_layer_types", mlp_layer_types),
    real("routed_scaling_factor", "router_scaling_factor", default=2.826),
    fixed("routed_score_func", "sigmoid"),
    fixed("routed_bias", True),
    fixed("norm_topk_prob", True),
    fixed("use_qk_norm", True),
)  # fmt: skip

FAMILY = Family(
    name="hy3",
    models={"hy3-[0-9]*": ("hy_v3",)},
    dims=dims,
    stacks=stacks,
    earlier={"e591f30": functools.partial(stacks, is_newest=False)},
    drops=drops,
    copies=deepseek.copies,
    configuration={"hy_v3": LINES},
    mtp=True,
    aliases={
        "model.layers.*.mlp.gate": "model.layers.*.mlp.router.gate",
        "model.layers.*.mlp.e_score_correction_bias": "model.layers.*.mlp.expert_bias",
        "model.layers.*.mlp.shared_experts": "model.layers.*.mlp.shared_mlp",
    },
    releases="Hy3 (295B)",
    trees="pull request 4704 (75d2826), built; its trainer *not run*",
    checked=("hy3-295b",),
    note=lambda c, layout: "arrays of MaxText's pull request 4704 (75d2826): no release of MaxText has this model",
)
