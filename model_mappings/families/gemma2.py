"""Gemma 2: a local and a global layer make one of MaxText's, norms on both sides of attention and MLP, a tied head.

MaxText folds into the weights what Hugging Face's model computes: norms hold 1 + w, the embedding is multiplied by √embed and
the query by 1/√query_pre_attn_scalar, since its attention doesn't scale (AI-Hypercomputer/maxtext, src/maxtext/models/gemma2.py
and layers/attentions.py, e591f30). MaxText's converter takes 1/√head_dim for the query, which is the same for 2B and the hub's
9B but not for 27B, 144 against 128; its stand-alone script takes 144 too (convert_gemma2_chkpt.py).
"""

import dataclasses

from weightbeam.model_mappings.blocks import (
    attention,
    check_cycle,
    common_dims,
    common_drops,
    gated_mlp,
    layers,
    sandwich_norms,
    tied_head,
    top,
    with_defaults,
)
from weightbeam.model_mappings.config import ConfigError
from weightbeam.model_mappings.configuration import Line, copied, fixed, real, size, truth
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family
from weightbeam.model_mappings.lines import CONTEXT, MLP, WIDTHS, activation, architecture, fixed_eps, head_dim
from weightbeam.model_mappings.ops import Scale, Shift
from weightbeam.model_mappings.rope import plain_rope

DEFAULTS = dict(vocab_size=256_000, head_dim=256, query_pre_attn_scalar=256, tie_word_embeddings=True)  # transformers v5.23.0, configuration_gemma2.py


def padded(c, layout):
    """The layout with MaxText's rows of the vocabulary."""
    return dataclasses.replace(layout, vocab=layout.vocab or rows_of(c.size("vocab_size")))


def rows_of(vocab):
    """The next multiple of 128 above: 256,128 for the releases' 256,000."""
    return (vocab // 128 + 1) * 128


def vocab_of(rows):
    """The vocabulary that has these rows: 256,000 for MaxText's 256,128; other rows don't tell, so that all of them count."""
    return 256_000 if rows == rows_of(256_000) else rows


def dims(c, layout):
    return common_dims(with_defaults(c, **DEFAULTS))


def stacks(c, layout):
    c = with_defaults(c, **DEFAULTS)
    n, one, scale = c.size("num_hidden_layers"), Shift(1.0), Scale(c.size("query_pre_attn_scalar") ** -0.5)
    check_cycle(c, ("sliding_attention", "full_attention"))
    if n % 2:
        raise ConfigError(f"config.json: 'num_hidden_layers' is {n}; MaxText's Gemma 2 has layers in pairs, a local and a global one")

    def half(kind):
        return [*attention(scale, target=f"self_attention_{kind}"), *gated_mlp(f"mlp_{kind}"), *sandwich_norms(one, suffix=f"_{kind}")]

    return [
        top(c, padded(c, layout), Scale(c.size("hidden_size") ** 0.5), norm_ops=(one,)),
        *layers(layout, "decoder/layers", range(0, n, 2), half("local")),
        *layers(layout, "decoder/layers", range(1, n, 2), half("global")),
    ]


def drops(c, layout):
    c = with_defaults(c, **DEFAULTS)
    return common_drops(c, padded(c, layout))


LINES = (
    *WIDTHS, size("base_num_decoder_layers", "num_hidden_layers", times=2), head_dim(DEFAULTS["head_dim"]), MLP,
    *activation("hidden_activation", "gelu_pytorch_tanh"), *fixed_eps(), CONTEXT, *plain_rope(),
    *architecture("gemma2", "Gemma2ForCausalLM", "gemma2"),
    Line("vocab_size", "vocab_size", to_key=rows_of, to_field=vocab_of, default=DEFAULTS["vocab_size"]),
    truth("logits_via_embedding", "tie_word_embeddings", default=True),
    fixed("use_post_attn_norm", True),
    fixed("use_post_ffw_norm", True),
    size("sliding_window_size", "sliding_window", default=4096),
    real("final_logits_soft_cap", "final_logit_softcapping", default=30.0, none=0),
    real("attn_logits_soft_cap", "attn_logit_softcapping", default=50.0, none=0),
    copied("query_pre_attn_scalar", lambda keys: keys["base_emb_dim"] // keys["base_num_query_heads"] if keys.get("model_name") == "gemma2-27b" else keys["head_dim"]),
)  # fmt: skip

FAMILY = Family(
    name="gemma2",
    models={"gemma2-[0-9]*": ("gemma2",)},
    dims=dims,
    stacks=stacks,
    drops=drops,
    copies=lambda c, layout: tied_head(with_defaults(c, **DEFAULTS), layout),
    configuration={"gemma2": LINES},
    aliases=WITHOUT_HEAD,
    releases="Gemma 2 2B, 9B, 27B",
    checked=("gemma2-2b", "gemma2-9b"),
)
