"""Gemma 1: 2B and 7B, one norm before attention and one before the MLP, a tied head.

MaxText folds into the weights what Hugging Face's model computes: norms hold 1 + w, the embedding is multiplied by √embed and the
query by 1/√dim (AI-Hypercomputer/maxtext, src/maxtext/models/gemma.py and
checkpoint_conversion/standalone_scripts/convert_gemma_chkpt.py, e591f30). `to_maxtext` has no mapping for it.
"""

from weightbeam.model_mappings.blocks import (
    attention,
    common_dims,
    common_drops,
    gated_mlp,
    layers,
    tied_head,
    top,
    with_defaults,
)
from weightbeam.model_mappings.configuration import Line, truth
from weightbeam.model_mappings.families.gemma2 import padded, rows_of, vocab_of
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family
from weightbeam.model_mappings.lines import CONTEXT, LAYERS, MLP, WIDTHS, activation, architecture, fixed_eps, head_dim
from weightbeam.model_mappings.ops import Scale, Shift
from weightbeam.model_mappings.rope import plain_rope
from weightbeam.model_mappings.rules import rule

DEFAULTS = dict(vocab_size=256_000, head_dim=256, tie_word_embeddings=True)  # transformers v5.23.0, configuration_gemma.py
ONE = Shift(1.0)


def text(c):
    return with_defaults(c, **DEFAULTS)


def stacks(c, layout):
    c = text(c)
    table = [
        rule("pre_self_attention_norm/scale", "input_layernorm.weight", "embed", "norm", ONE),
        rule("pre_ffw_norm/scale", "post_attention_layernorm.weight", "embed", "norm", ONE),
        *attention(Scale(c.size("head_dim") ** -0.5)),
        *gated_mlp(),
    ]
    head = top(c, padded(c, layout), Scale(c.size("hidden_size") ** 0.5), norm_ops=(ONE,))
    return [head, *layers(layout, "decoder/layers", range(c.size("num_hidden_layers")), table)]


ACTIVATION, _ = activation("hidden_act", "gelu_pytorch_tanh")  # its releases say gelu and mean the tanh form, as transformers takes it
LINES = (
    *WIDTHS, LAYERS, head_dim(DEFAULTS["head_dim"]), MLP, ACTIVATION, *fixed_eps(), CONTEXT, *plain_rope(),
    *architecture("gemma", "GemmaForCausalLM", "gemma"),
    Line("vocab_size", "vocab_size", to_key=rows_of, to_field=vocab_of, default=DEFAULTS["vocab_size"]),
    truth("logits_via_embedding", "tie_word_embeddings", default=True),
)  # fmt: skip

FAMILY = Family(
    name="gemma",
    models={"gemma-[0-9]*": ("gemma",)},
    dims=lambda c, layout: common_dims(text(c)),
    stacks=stacks,
    drops=lambda c, layout: common_drops(text(c), padded(text(c), layout)),
    copies=lambda c, layout: tied_head(text(c), layout),
    configuration={"gemma": LINES},
    aliases=WITHOUT_HEAD,
    releases="Gemma 2B, 7B",
    checked=("gemma-2b", "gemma-7b"),
)
