"""Llama 2, 3, 3.1, 3.2, 3.3 and Mistral: dense, grouped-query attention.

MaxText folds 1/√dim into the query. The models whose rotary embedding is Llama 3.1's pair the rotary halves, the others
keep them apart (AI-Hypercomputer/maxtext, src/maxtext/layers/attentions.py, e591f30: `LLaMARotaryEmbedding` where the
model's name or `rope_type` begins with llama3.1, else `RotaryEmbedding`). MaxText has no Llama 3.2 of its own; it is run
with `rope_type: llama3.1`.
"""

from weightbeam.model_mappings.blocks import HEAD_DIM, MLP, NORMS, SIZES, attention, common_dims, common_drops, gated_mlp, layers, tied_head, top
from weightbeam.model_mappings.config import ConfigError
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.ops import Scale

PAIRED = ("llama3.1-", "llama3.2-")
SCALED = (*PAIRED, "llama3.3-")  # whose releases scale the rotary embedding as Llama 3.1's do
LINES = (*SIZES, HEAD_DIM, MLP)


def rope_type(c):
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"config.json: 'rope_scaling' should be an object, but is {rope!r}")
    return rope.get("rope_type") or rope.get("type")


def is_model(c, model):
    return model.startswith(SCALED) == (rope_type(c) == "llama3")


def is_paired(model):
    return (model or "").startswith(PAIRED)


def dims(c, layout):
    d = common_dims(c)
    return d | dict(two=2, half=d["dim"] // 2)  # a head's rotary halves


def stacks(c, layout):
    scale = Scale(dims(c, layout)["dim"] ** -0.5)
    table = [*NORMS, *attention(scale, paired_rope=is_paired(layout.model)), *gated_mlp()]
    return [top(c, layout), *layers(layout, "decoder/layers", range(c.size("num_hidden_layers")), table)]


FAMILY = Family(
    name="llama",
    models={
        "llama2-[0-9]*": ("llama",),
        "llama3-[0-9]*": ("llama",),
        "llama3.1-[0-9]*": ("llama",),
        "llama3.2-[0-9]*": ("llama",),
        "llama3.3-[0-9]*": ("llama",),
        "mistral-[0-9]*": ("mistral", "llama"),
    },
    dims=dims,
    stacks=stacks,
    drops=common_drops,
    copies=tied_head,
    releases="Llama 2, 3, 3.1, 3.2, 3.3, Mistral",
    checked=("llama2-7b", "llama2-70b", "llama3-8b", "llama3.1-8b", "llama3.1-8b-Instruct", "llama3.1-70b", "llama3.3-70b", "mistral-7b"),
    missing="Llama 3.2's vision models",
    configuration={"llama": LINES, "mistral": LINES},
    is_model=is_model,
    variant=is_paired,
    note=lambda c, layout: "rotary halves " + ("paired (Llama 3.1's RoPE)" if is_paired(layout.model) else "kept apart (as in Llama 2, 3, 3.3 and Mistral)"),
)
