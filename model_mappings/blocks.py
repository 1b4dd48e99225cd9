"""Fragments of tables that families share. Axis words mean the same in every family:

`vocab embed heads kv dim mlp expert moe_mlp shared_mlp`, where `heads` counts query heads, `kv` key and value heads,
and `dim` is the size of a head. A family says their sizes once, in `dims`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.ops import Op
from weightbeam.model_mappings.rules import PARAMS, Rule, Segment, Stack, rule, stack

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


def text_part(c: Config) -> Config:
    """The text model's part of `config.json`; a model with towers says outside of it whether the head is tied, or else
    in it.
    """
    if "text_config" not in c:
        return c
    text = c.part("text_config")
    return Config(text | {"tie_word_embeddings": c.get("tie_word_embeddings", text.get("tie_word_embeddings"))})


def with_defaults(c: Config, **defaults: object) -> Config:
    """`c`, with transformers' defaults for fields that releases leave out (or null)."""
    return Config(defaults | {key: value for key, value in c.items() if value is not None})


def layers(
    layout: Layout,
    target: str,
    ids: Iterable[int],
    table: Table,
    source: str = LAYER,
    name: str = "layers",
    collection: str = PARAMS,
) -> list[Stack]:
    """Alike layers `ids`: one stack, or `target_0`, `target_1`, … where the layout isn't scanned."""
    ids = list(ids)
    if not ids:
        return []
    if layout.scan:
        return [stack(target, source, ids, table, name, collection)]
    return [stack(f"{target}_{i}", source, layer, table, collection=collection) for i, layer in enumerate(ids)]


def cycles(
    layout: Layout, count: int, tables: Sequence[Table], source: str = LAYER, place: str = "layers"
) -> list[Stack]:
    """Layers 0 to `count` whose kinds repeat, a table for each place of the cycle.

    Scanned, `decoder/layers/layers_0`, `layers_1`, … hold the layers of one place each, over the whole cycles, and
    `decoder/layers_remainder` the rest, not stacked; `place` is the word in front of the number.
    """
    n = len(tables)
    if not layout.scan:
        return [stack(f"decoder/layers_{layer}", source, layer, tables[layer % n]) for layer in range(count)]
    whole = count - count % n
    stacked = [
        stack(f"decoder/layers/{place}_{i}", source, range(i, whole, n), tables[i], "layers")
        for i in range(n if whole else 0)
    ]
    return stacked + [
        stack(f"decoder/layers_remainder/{place}_{i}", source, whole + i, tables[i]) for i in range(count - whole)
    ]


def check_cycle(c: Config, kinds: Sequence[str]) -> None:
    """Checks the pattern of the layers, where `config.json` says it, against the cycle that MaxText's model repeats.

    Raises:
      ConfigError: another pattern.
    """
    types, n = c.get("layer_types"), c.size("num_hidden_layers")
    if types is not None and types != [kinds[layer % len(kinds)] for layer in range(n)]:
        raise ConfigError(
            f"config.json: 'layer_types' isn't the pattern that MaxText repeats over the {n} layers: {', '.join(kinds)}"
        )
    # older configs say the length of the cycle
    if types is None and c.get("sliding_window_pattern") not in (None, len(kinds)):
        raise ConfigError(
            f"config.json: 'sliding_window_pattern' is {c['sliding_window_pattern']!r}; MaxText repeats {len(kinds)} layers: {', '.join(kinds)}"
        )


def check_whole(c: Config, layout: Layout, cycle: int) -> None:
    """Checks that MaxText's scan takes every layer, where it takes a `cycle` of them at a time and leaves the rest out.

    Raises:
      ConfigError: it doesn't.
    """
    n = c.size("num_hidden_layers")
    if layout.scan and n % cycle:
        raise ConfigError(
            f"config.json: {n} layers, but MaxText scans this model in cycles of {cycle}; --scan_layers false has no such bound"
        )


def vocabulary(c: Config, layout: Layout) -> tuple[str, Segment]:
    """The window of the vocabulary's rows that `Layout.vocab` keeps, and their place: it pads with zeros, or cuts."""
    size = c.size("vocab_size")
    total = layout.vocab or size
    return f"[:{total}]" if total < size else "", Segment(
        0, min(size, total), total, fill=0.0 if total > size else None
    )


def beyond_vocabulary(c: Config, layout: Layout, *names: str) -> dict[str, str]:
    """The rows of these tensors that `Layout.vocab` cuts, for a family's drops."""
    if not layout.vocab or layout.vocab >= c.size("vocab_size"):
        return {}
    return {f"{name}[{layout.vocab}:]": f"beyond --vocab_size={layout.vocab}" for name in names}


def top(
    c: Config,
    layout: Layout,
    *ops: Op,
    hf: str = "model.",
    norm_ops: tuple[Op, ...] = (),
    norm: str = "norm",
    embed: str = "embed_tokens",
    head: str = "lm_head",
) -> Stack:
    """Embedding, final norm and head; `norm` is MaxText's logical name of the norm's axis."""
    rows, vocab = vocabulary(c, layout)
    table = [
        rule(
            "token_embedder/embedding",
            f"{hf}{embed}.weight{rows}",
            "vocab embed",
            "vocab embed_vocab",
            *ops,
            vocab=vocab,
        ),
        rule("decoder/decoder_norm/scale", f"{hf}norm.weight", "embed", norm, *norm_ops),
        rule(
            "decoder/logits_dense/kernel",
            f"{head}.weight{rows}",
            "vocab embed -> embed vocab",
            "embed_vocab vocab",
            vocab=vocab,
            when=not is_tied(c),
        ),
    ]
    return stack("", "", 0, table)


def is_tied(c: Config) -> bool:
    """Whether the head is the embedding, so that MaxText has no array for it (`logits_via_embedding`)."""
    return c.flag("tie_word_embeddings")


def common_drops(
    c: Config, layout: Layout, hf: str = "model.", embed: str = "embed_tokens", head: str = "lm_head"
) -> dict[str, str]:
    """Tensors, or parts of them, that are left out on purpose, as `{pattern or window: reason}`."""
    drops = {f"{hf}layers.*.self_attn.rotary_emb.inv_freq": "computed, not learned"}
    if is_tied(c):
        drops[f"{head}.weight"] = "the head is tied to the embedding"
    return drops | beyond_vocabulary(c, layout, f"{hf}{embed}.weight", f"{head}.weight")


def tied_head(
    c: Config, layout: Layout, hf: str = "model.", embed: str = "embed_tokens", head: str = "lm_head"
) -> dict[str, str]:
    """The head where it is the embedding, for a family's `copies`."""
    return {f"{head}.weight": f"{hf}{embed}.weight"} if is_tied(c) else {}


NORMS: Table = [
    rule("pre_self_attention_layer_norm/scale", "input_layernorm.weight", "embed", "norm"),
    rule("post_self_attention_layer_norm/scale", "post_attention_layernorm.weight", "embed", "norm"),
]


def sandwich_norms(*ops: Op, suffix: str = "") -> Table:
    """Norms before and behind attention and MLP, as Gemma has them."""
    names = dict(
        pre_self_attention_norm="input_layernorm",
        post_self_attention_norm="post_attention_layernorm",
        pre_ffw_norm="pre_feedforward_layernorm",
        post_ffw_norm="post_feedforward_layernorm",
    )
    return [
        rule(f"{target}{suffix}/scale", f"{source}.weight", "embed", "norm", *ops) for target, source in names.items()
    ]


def attention(*query_ops: Op, paired_rope: bool = False, target: str = "self_attention") -> Table:
    """Grouped-query attention.

    Hugging Face keeps the two halves of a head's rotary dimensions apart (h0 h0 … h1 h1 …); where MaxText pairs them
    (h0 h1 h0 h1 …) query and key are permuted: axes `two half` with dim = 2 · half.
    """
    split, joined = ("two half", "(half two)") if paired_rope else ("dim", "dim")
    return [
        rule(
            f"{target}/query/kernel",
            "self_attn.q_proj.weight",
            f"(heads {split}) embed -> embed heads {joined}",
            "embed_attn q_heads kv",
            *query_ops,
        ),
        rule(
            f"{target}/key/kernel",
            "self_attn.k_proj.weight",
            f"(kv {split}) embed -> embed kv {joined}",
            "embed_attn kv_heads kv_head_dim",
        ),
        rule(
            f"{target}/value/kernel",
            "self_attn.v_proj.weight",
            "(kv dim) embed -> embed kv dim",
            "embed_attn kv_heads kv_head_dim",
        ),
        rule(
            f"{target}/out/kernel",
            "self_attn.o_proj.weight",
            "embed (heads dim) -> heads dim embed",
            "heads kv embed_attn",
        ),
    ]


def gated_mlp(
    target: str = "mlp",
    source: str = "mlp",
    width: str = "mlp",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Table:
    """Gate, up and down projections of one expert or of a dense layer; `width` is the axis word of the hidden size."""
    gate, up, down = (f"{source}.{projection}.weight" for projection in projections)
    return [
        rule(f"{target}/wi_0/kernel", gate, f"{width} embed -> embed {width}", "embed mlp"),
        rule(f"{target}/wi_1/kernel", up, f"{width} embed -> embed {width}", "embed mlp"),
        rule(f"{target}/wo/kernel", down, f"embed {width} -> {width} embed", "mlp embed"),
    ]


def attention_biases(target: str = "self_attention", when: object = True) -> Table:
    """The biases of query, key and value."""
    return [
        rule(f"{target}/query/bias", "self_attn.q_proj.bias", "(heads dim) -> heads dim", "q_heads kv", when=when),
        rule(f"{target}/key/bias", "self_attn.k_proj.bias", "(kv dim) -> kv dim", "kv_heads kv_head_dim", when=when),
        rule(f"{target}/value/bias", "self_attn.v_proj.bias", "(kv dim) -> kv dim", "kv_heads kv_head_dim", when=when),
    ]


def check_all_moe(c: Config) -> None:
    """Checks that no layer is dense, as Qwen's `config.json` could say and MaxText's models don't have.

    Raises:
      ConfigError: some are.
    """
    if c.get("mlp_only_layers") or c.size("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            "config.json mixes dense and MoE layers (mlp_only_layers, decoder_sparse_step); MaxText's model has no dense layers"
        )


def is_fused(layout: Layout, source: str) -> bool:
    """Whether the experts below `source` are fused, as transformers v5 holds them, or are tensors of their own."""
    return f"{source}.gate_up_proj" in layout.names


def experts(
    target: str,
    source: str,
    width: int,
    fused: bool,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    inputs: str = "embed",
) -> Table:
    """Routed experts, stacked in MaxText; in the checkpoint a tensor for each, or `fused` as transformers v5 holds
    them.

    The fused `gate_up_proj` is (expert, 2 · moe_mlp, embed), gate first; `down_proj` is (expert, embed, moe_mlp)
    (huggingface/transformers, models/qwen3_moe/modeling_qwen3_moe.py, v5.23.0). `width` is moe_mlp, `inputs` the axis word of what goes in and comes out.
    """
    if fused:
        gate, up, down = f"gate_up_proj[:, :{width}]", f"gate_up_proj[:, {width}:]", "down_proj"
    else:
        gate, up, down = (f"{{expert}}.{projection}.weight" for projection in projections)
    return [
        rule(
            f"{target}/wi_0",
            f"{source}.{gate}",
            f"expert moe_mlp {inputs} -> expert {inputs} moe_mlp",
            "exp embed_moe mlp_moe",
        ),
        rule(
            f"{target}/wi_1",
            f"{source}.{up}",
            f"expert moe_mlp {inputs} -> expert {inputs} moe_mlp",
            "exp embed_moe mlp_moe",
        ),
        rule(
            f"{target}/wo",
            f"{source}.{down}",
            f"expert {inputs} moe_mlp -> expert moe_mlp {inputs}",
            "exp mlp_moe embed_moe",
        ),
    ]


def experts_in_out(target: str, source: str, width: int) -> Table:
    """Fused experts that lie in the files as in MaxText: `gate_up_proj` (expert, embed, 2 · moe_mlp), gate first."""
    return [
        rule(
            f"{target}/wi_0", f"{source}.gate_up_proj[..., :{width}]", "expert embed moe_mlp", "exp embed_moe mlp_moe"
        ),
        rule(
            f"{target}/wi_1", f"{source}.gate_up_proj[..., {width}:]", "expert embed moe_mlp", "exp embed_moe mlp_moe"
        ),
        rule(f"{target}/wo", f"{source}.down_proj", "expert moe_mlp embed", "exp mlp_moe embed_moe"),
    ]


def latent_experts(target: str, source: str, width: int, projections: tuple[str, str, str]) -> Table:
    """Experts in a latent: a projection down to `latent`, the router's experts there, a norm of what they make together,
    and a projection up again (AI-Hypercomputer/maxtext, src/maxtext/layers/latent_moe.py, 4b27699).
    """
    down, up, norm = (f"routed_expert_{part}" for part in ("down_proj", "up_proj", "norm"))
    return [
        rule(f"{target}/{down}/kernel", f"{source}.{down}.weight", "latent embed -> embed latent", "embed latent_moe"),
        *experts(f"{target}/routed_experts", f"{source}.experts", width, False, projections, "latent"),
        rule(f"{target}/{norm}/scale", f"{source}.{norm}.weight", "latent", "norm"),
        rule(f"{target}/{up}/kernel", f"{source}.{up}.weight", "embed latent -> latent embed", "latent_moe embed"),
    ]
