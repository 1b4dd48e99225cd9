"""Fragments of tables that families share. Axis words mean the same in every family:

`vocab embed heads kv dim mlp expert moe_mlp shared_mlp`, where `heads` counts query heads, `kv` key and value heads, and
`dim` is the size of a head. A family says their sizes once, in `dims`.
"""

from __future__ import annotations

from collections.abc import Iterable

from model_mappings.config import Config, Layout
from model_mappings.ops import Op
from model_mappings.rules import Rule, Segment, Stack, rule, stack

Table = list[list[Rule]]
LAYER = "model.layers.{layer}."  # the prefix of a layer's tensors


def common_dims(c: Config) -> dict[str, int]:
    """The axis words that nearly every family has."""
    embed, heads = c.size("hidden_size"), c.size("num_attention_heads")
    return dict(
        embed=embed,
        heads=heads,
        kv=c.size("num_key_value_heads", heads),
        dim=c.size("head_dim", embed // heads),
        mlp=c.size("intermediate_size"),
    )


def layers(layout: Layout, target: str, ids: Iterable[int], table: Table, source: str = LAYER, name: str = "layers") -> list[Stack]:
    """Alike layers `ids`: one stack, or `target_0`, `target_1`, … where the layout isn't scanned."""
    ids = list(ids)
    if not ids:
        return []
    if layout.scan:
        return [stack(target, source, ids, table, name)]
    return [stack(f"{target}_{i}", source, layer, table) for i, layer in enumerate(ids)]


def top(c: Config, layout: Layout, *ops: Op, hf: str = "model.", norm_ops: tuple[Op, ...] = ()) -> Stack:
    """Embedding, final norm and head. `Layout.vocab` pads the vocabulary with zeros, or cuts it."""
    size = c.size("vocab_size")
    total = layout.vocab or size
    rows = f"[:{total}]" if total < size else ""
    vocab = Segment(0, min(size, total), total, fill=0.0 if total > size else None)
    head = f"lm_head.weight{rows}"
    table = [
        rule("token_embedder/embedding", f"{hf}embed_tokens.weight{rows}", "vocab embed", "vocab embed_vocab", *ops, vocab=vocab),
        rule("decoder/decoder_norm/scale", f"{hf}norm.weight", "embed", "norm", *norm_ops),
        rule("decoder/logits_dense/kernel", head, "vocab embed -> embed vocab", "embed_vocab vocab", vocab=vocab, when=not is_tied(c)),
    ]
    return stack("", "", 0, table)


def is_tied(c: Config) -> bool:
    """Whether the head is the embedding, so that MaxText has no array for it (`logits_via_embedding`)."""
    return c.flag("tie_word_embeddings")


def common_drops(c: Config, layout: Layout, hf: str = "model.") -> dict[str, str]:
    """Tensors, or parts of them, that are left out on purpose, as `{pattern or window: reason}`."""
    drops = {f"{hf}layers.*.self_attn.rotary_emb.inv_freq": "computed, not learned"}
    if is_tied(c):
        drops["lm_head.weight"] = "the head is tied to the embedding"
    if layout.vocab and layout.vocab < c.size("vocab_size"):
        for name in (f"{hf}embed_tokens.weight", "lm_head.weight"):
            drops[f"{name}[{layout.vocab}:]"] = f"beyond --vocab_size={layout.vocab}"
    return drops


NORMS: Table = [
    rule("pre_self_attention_layer_norm/scale", "input_layernorm.weight", "embed", "norm"),
    rule("post_self_attention_layer_norm/scale", "post_attention_layernorm.weight", "embed", "norm"),
]


def attention(*query_ops: Op, paired_rope: bool = False) -> Table:
    """Grouped-query attention.

    Hugging Face keeps the two halves of a head's rotary dimensions apart (h0 h0 … h1 h1 …); where MaxText pairs them
    (h0 h1 h0 h1 …) query and key are permuted: axes `two half` with dim = 2 · half.
    """
    split, joined = ("two half", "(half two)") if paired_rope else ("dim", "dim")
    return [
        rule("self_attention/query/kernel", "self_attn.q_proj.weight", f"(heads {split}) embed -> embed heads {joined}", "embed q_heads kv", *query_ops),
        rule("self_attention/key/kernel", "self_attn.k_proj.weight", f"(kv {split}) embed -> embed kv {joined}", "embed kv_heads kv_head_dim"),
        rule("self_attention/value/kernel", "self_attn.v_proj.weight", "(kv dim) embed -> embed kv dim", "embed kv_heads kv_head_dim"),
        rule("self_attention/out/kernel", "self_attn.o_proj.weight", "embed (heads dim) -> heads dim embed", "heads kv embed"),
    ]


def gated_mlp(target: str = "mlp", source: str = "mlp", width: str = "mlp") -> Table:
    """Gate, up and down projections of one expert or of a dense layer; `width` is the axis word of the hidden size."""
    return [
        rule(f"{target}/wi_0/kernel", f"{source}.gate_proj.weight", f"{width} embed -> embed {width}", "embed mlp"),
        rule(f"{target}/wi_1/kernel", f"{source}.up_proj.weight", f"{width} embed -> embed {width}", "embed mlp"),
        rule(f"{target}/wo/kernel", f"{source}.down_proj.weight", f"embed {width} -> {width} embed", "mlp embed"),
    ]


def experts(
    target: str,
    source: str,
    width: int,
    fused: bool,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Table:
    """Routed experts, stacked in MaxText; in the checkpoint a tensor for each, or `fused` as transformers v5 holds them.

    The fused `gate_up_proj` is (expert, 2 · moe_mlp, embed), gate first; `down_proj` is (expert, embed, moe_mlp)
    (huggingface/transformers, models/qwen3_moe/modeling_qwen3_moe.py, v5.23.0). `width` is moe_mlp.
    """
    if fused:
        gate, up, down = f"gate_up_proj[:, :{width}]", f"gate_up_proj[:, {width}:]", "down_proj"
    else:
        gate, up, down = (f"{{expert}}.{projection}.weight" for projection in projections)
    return [
        rule(f"{target}/wi_0", f"{source}.{gate}", "expert moe_mlp embed -> expert embed moe_mlp", "exp embed_moe mlp_moe"),
        rule(f"{target}/wi_1", f"{source}.{up}", "expert moe_mlp embed -> expert embed moe_mlp", "exp embed_moe mlp_moe"),
        rule(f"{target}/wo", f"{source}.{down}", "expert embed moe_mlp -> expert moe_mlp embed", "exp mlp_moe embed_moe"),
    ]
