"""Mixtral: Llama's attention without paired rotary halves, experts named w1 (gate), w3 (up), w2 (down).

transformers v5 says `mlp` in memory where the hub's files say `block_sparse_moe`.
"""

from weightbeam.model_mappings.blocks import (
    NORMS,
    attention,
    common_dims,
    common_drops,
    experts,
    is_fused,
    layers,
    tied_head,
    top,
)
from weightbeam.model_mappings.configuration import size
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family
from weightbeam.model_mappings.lines import TIED, architecture, dense, eps, no_window
from weightbeam.model_mappings.ops import Scale
from weightbeam.model_mappings.rope import plain_rope
from weightbeam.model_mappings.rules import rule


def dims(c, layout):
    d = common_dims(c)
    return d | dict(expert=c.size("num_local_experts"), moe_mlp=d["mlp"])


def stacks(c, layout):
    d = dims(c, layout)
    fused = is_fused(layout, "model.layers.0.mlp.experts")
    moe = "mlp" if fused else "block_sparse_moe"
    table = [
        *NORMS,
        *attention(Scale(d["dim"] ** -0.5)),
        rule("MoeBlock_0/gate/kernel", f"{moe}.gate.weight", "expert embed -> embed expert", "embed -"),
        *experts("MoeBlock_0", f"{moe}.experts", d["moe_mlp"], fused, ("w1", "w3", "w2")),
    ]
    return [top(c, layout), *layers(layout, "decoder/layers", range(c.size("num_hidden_layers")), table)]


LINES = (
    *dense(plain_rope(1_000_000)), eps(1e-5),
    *architecture("mixtral", "MixtralForCausalLM", "mixtral"),
    *TIED,
    size("base_moe_mlp_dim", "intermediate_size"),
    size("num_experts", "num_local_experts"),
    size("num_experts_per_tok", "num_experts_per_tok"),
    no_window(),
)

FAMILY = Family(
    name="mixtral",
    models={"mixtral-[0-9]*": ("mixtral",)},
    dims=dims,
    stacks=stacks,
    drops=common_drops,
    copies=tied_head,
    configuration={"mixtral": LINES},
    aliases=WITHOUT_HEAD,
    releases="Mixtral 8x7B, 8x22B",
    checked=("mixtral-8x7b",),
)
