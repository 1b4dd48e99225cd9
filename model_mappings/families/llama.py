"""Llama 2, 3, 3.1, 3.2, 3.3 and Mistral: dense, grouped-query attention.

MaxText folds 1/√dim into the query. The models whose rotary embedding is Llama 3.1's pair the rotary halves, the others
keep them apart (AI-Hypercomputer/maxtext, src/maxtext/layers/attentions.py, e591f30: `LLaMARotaryEmbedding` where the
model's name or `rope_type` begins with llama3.1, else `RotaryEmbedding`). MaxText has no Llama 3.2 of its own; it is run
with `rope_type: llama3.1`.
"""

from weightbeam.model_mappings.blocks import (
    NORMS,
    attention,
    common_dims,
    common_drops,
    gated_mlp,
    layers,
    tied_head,
    top,
)
from weightbeam.model_mappings.configuration import derived, unless
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family
from weightbeam.model_mappings.lines import (
    CONTEXT,
    MLP,
    SIZES,
    TIED,
    activation,
    architecture,
    eps,
    head_dim,
    no_window,
)
from weightbeam.model_mappings.ops import Scale
from weightbeam.model_mappings.rope import (
    PLAIN,
    is_yarn,
    linear_lines,
    llama3_limit,
    llama3_lines,
    only_kinds,
    rope_of,
    scaled_rope,
)

PAIRED = ("llama3.1-", "llama3.2-")
SCALED = (*PAIRED, "llama3.3-")  # whose releases scale the rotary embedding as Llama 3.1's do


def is_scaled(c):
    return rope_of(c)["rope_type"] == "llama3"


def is_model(c, model):
    return model.startswith(SCALED) == is_scaled(c)


def is_paired(model):
    return (model or "").startswith(PAIRED)


def dims(c, layout):
    d = common_dims(c)
    return d | dict(two=2, half=d["dim"] // 2)  # a head's rotary halves


def stacks(c, layout):
    scale = Scale(dims(c, layout)["dim"] ** -0.5)
    table = [*NORMS, *attention(scale, paired_rope=is_paired(layout.model)), *gated_mlp()]
    return [top(c, layout), *layers(layout, "decoder/layers", range(c.size("num_hidden_layers")), table)]


def limit(c, model):
    rope = rope_of(c)
    if is_scaled(c) and not is_paired(model):
        way = "convert with --maxtext_model llama3.1-70b (or -8b, -405b) and run MaxText with rope_type=llama3.1"
        return f"rope_type is 'llama3': under the name {model} MaxText doesn't scale its rotary embedding; logits differ (by 0.26 of 1 in a test). The way round: {way}"
    if other := llama3_limit(rope):
        return other
    if is_paired(model) and rope["rope_type"] in PLAIN and rope["rope_type"] != "default":
        return f"rope_type is {rope['rope_type']!r}: under the name {model} MaxText's embedding isn't scaled that way; without --maxtext_model it would be"
    return None


def rope(c, model):
    return "llama3.1" if is_paired(model) else "yarn" if is_yarn(c) else "default"


BLOCK = (
    *SIZES, head_dim(), MLP, *activation(), eps(), CONTEXT,
    *scaled_rope(), only_kinds(*PLAIN, "llama3"),
    derived("rope_type", rope, "rope_parameters.rope_type", to_field=lambda kind: "llama3" if kind == "llama3.1" else kind),
    derived("rope_use_scale", lambda c, model: is_scaled(c) if is_paired(model) else True),
    *llama3_lines(), *linear_lines(), unless(limit),
)  # fmt: skip
LLAMA = (*BLOCK, *architecture("llama2", "LlamaForCausalLM", "llama"), *TIED)
MISTRAL = (*BLOCK, *architecture("mistral", "MistralForCausalLM", "mistral"), *TIED, no_window(default=4096))


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
    aliases=WITHOUT_HEAD,
    releases="Llama 2, 3, 3.1, 3.2, 3.3, Mistral",
    checked=("llama2-7b", "llama2-70b", "llama3-8b", "llama3.1-8b", "llama3.1-8b-Instruct", "llama3.1-70b", "llama3.3-70b", "mistral-7b"),
    missing="Llama 3.2's vision models",
    configuration={"llama": LLAMA, "mistral": MISTRAL},
    is_model=is_model,
    variant=is_paired,
    note=lambda c, layout: "rotary halves " + ("paired (Llama 3.1's RoPE)" if is_paired(layout.model) else "kept apart (as in Llama 2, 3, 3.3 and Mistral)"),
)
