"""Fragments of tables that families share. Axis words mean the same in every family:

`vocab embed heads kv dim mlp expert moe_mlp shared_mlp`, where `heads` counts query heads, `kv` key and value heads,
and `dim` is the size of a head. A family says their sizes once, in `dims`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weightbeam.model_mappings.config import TIE, Config, ConfigError, Layout, said_of_tie
from weightbeam.model_mappings.family import Beyond
from weightbeam.model_mappings.ops import Op
from weightbeam.model_mappings.rules import PARAMS, Rule, Segment, Stack, rule, stack

Table = list[list[Rule]]
TIED_HEAD = "the head is tied to the embedding"
LAYER = "model.layers.{layer}."  # the prefix of a layer's tensors
# the buffers of rotary embeddings in transformers (models/llama/modeling_llama.py, v5.23.0 and v4.28.0)
ROTARY = ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")


def common_dims(c: Config) -> dict[str, int]:
    """The axis words that nearly every family has.

    Args:
      c: `config.json`, or its text model's part.

    Returns:
      The size of `embed`, `heads`, `kv`, `dim` and `mlp`, in elements; `kv` is `heads` and `dim` is embed / heads where
      no field says them.

    Raises:
      ConfigError: a field is missing.

    Example:
      >>> common_dims(Config(hidden_size=64, num_attention_heads=4, intermediate_size=96))
      {'embed': 64, 'heads': 4, 'kv': 4, 'dim': 16, 'mlp': 96}
    """
    embed, heads = c.size("hidden_size"), c.size("num_attention_heads")
    return dict(
        embed=embed,
        heads=heads,
        kv=c.size("num_key_value_heads", heads),
        dim=c.size("head_dim", embed // heads),
        mlp=c.size("intermediate_size"),
    )


def text_part(c: Config) -> Config:
    """The text model's part of `config.json`.

    Args:
      c: `config.json`, of a release with towers or of the text model alone.

    Returns:
      `text_config`, or `c` where there is none, with what counts of whether the head is tied (`said_of_tie`).

    Example:
      >>> text_part(Config(text_config={"hidden_size": 64}, tie_word_embeddings=True))
      {'hidden_size': 64, 'tie_word_embeddings': True}
    """
    if "text_config" not in c:
        return c
    text = c.part("text_config")
    return Config(text | {TIE: said_of_tie(c, text)})


def with_defaults(c: Config, **defaults: object) -> Config:
    """`config.json` with what releases leave out (or null).

    Args:
      c: `config.json`, or a part of it.
      defaults: transformers' default of each field.

    Returns:
      Another one, with every one of these fields.

    Example:
      >>> with_defaults(Config(hidden_size=64, head_dim=None), head_dim=256)
      {'head_dim': 256, 'hidden_size': 64}
    """
    return Config(defaults | {key: value for key, value in c.items() if value is not None or key not in defaults})


def layers(
    layout: Layout,
    target: str,
    ids: Iterable[int],
    table: Table,
    source: str = LAYER,
    name: str = "layers",
    collection: str = PARAMS,
) -> list[Stack]:
    """Layers that are alike: one stack, or an array for each layer where the layout isn't scanned.

    Args:
      layout: that the user wants.
      target: path of the stack, such as `decoder/layers`; unscanned `target_0`, `target_1`, …
      ids: the layers' numbers in the release, in MaxText's order.
      table: the lines of one layer.
      source: what its tensors' names begin with.
      name: MaxText's logical name of the stacked axis.
      collection: of MaxText's variables.

    Returns:
      The stacks, none where there are no layers.

    Example:
      >>> [each.target for each in layers(Layout(scan=False), "decoder/layers", range(2), NORMS)]
      ['decoder/layers_0', 'decoder/layers_1']
    """
    ids = list(ids)
    if not ids:
        return []
    if layout.scan:
        return [stack(target, source, ids, table, name, collection)]
    return [stack(f"{target}_{i}", source, layer, table, collection=collection) for i, layer in enumerate(ids)]


def cycles(
    layout: Layout, count: int, tables: Sequence[Table], source: str = LAYER, place: str = "layers"
) -> list[Stack]:
    """Layers whose kinds repeat.

    Scanned, `decoder/layers/layers_0`, `layers_1`, … hold the layers of one place each, over the whole cycles, and
    `decoder/layers_remainder` the rest, not stacked.

    Args:
      layout: that the user wants.
      count: of the layers, from 0.
      tables: the lines of a layer, for each place of the cycle.
      source: what a layer's tensors' names begin with.
      place: the word in front of the place's number.

    Returns:
      The stacks.

    Example:
      >>> [(each.target, each.layers.tolist()) for each in cycles(Layout(), 5, [NORMS, NORMS])]
      [('decoder/layers/layers_0', [0, 2]), ('decoder/layers/layers_1', [1, 3]), ('decoder/layers_remainder/layers_0', 4)]
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

    Args:
      c: `config.json`, with the number of layers.
      kinds: of the layers of one cycle, in the words of `layer_types`.

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

    Args:
      c: `config.json`, with the number of layers.
      layout: that the user wants.
      cycle: how many layers MaxText takes at a time.

    Raises:
      ConfigError: it doesn't.
    """
    n = c.size("num_hidden_layers")
    if layout.scan and n % cycle:
        raise ConfigError(
            f"config.json: {n} layers, but MaxText scans this model in cycles of {cycle}; --scan_layers false has no such bound"
        )


def vocabulary(c: Config, layout: Layout) -> tuple[str, Segment]:
    """The rows of the vocabulary that `Layout.vocab` keeps: it pads with zeros, or cuts.

    Args:
      c: `config.json`, with the release's rows.
      layout: with MaxText's.

    Returns:
      A window to write behind a tensor's name, empty where all rows are kept; and their place among MaxText's.

    Example:
      >>> vocabulary(Config(vocab_size=50), Layout(vocab=48))
      ('[:48]', Segment(start=0, size=48, total=48, fill=None))
    """
    size = c.size("vocab_size")
    total = layout.vocab or size
    return f"[:{total}]" if total < size else "", Segment(
        0, min(size, total), total, fill=0.0 if total > size else None
    )


def beyond_vocabulary(c: Config, layout: Layout, *names: str) -> dict[str, str]:
    """The rows that `Layout.vocab` cuts, for a family's drops.

    Args:
      c: `config.json`, with the release's rows.
      layout: with MaxText's.
      names: of the tensors whose rows are the vocabulary's.

    Returns:
      The reason by window (the rows behind those that are kept); nothing where all rows are.
    """
    if not layout.vocab or layout.vocab >= c.size("vocab_size"):
        return {}
    return {f"{name}[{layout.vocab}:]": Beyond.of(name, layout.vocab) for name in names}


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
    """Embedding, final norm and head.

    Args:
      c: `config.json`: whether the head is tied, and the vocabulary's size.
      layout: that the user wants.
      ops: what MaxText changes of the embedding's values.
      hf: what the names of embedding and norm begin with in the release.
      norm_ops: what it changes of the norm's.
      norm: MaxText's logical name of the norm's axis.
      embed, head: what the release calls the two.

    Returns:
      One stack, without layers; it has no head where that is tied.
    """
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
    """Whether the head is the embedding, so that MaxText has no array for it (`logits_via_embedding`).

    Args:
      c: `config.json`, or its text model's part.

    Returns:
      What `tie_word_embeddings` says.
    """
    return c.flag(TIE)


def common_drops(
    c: Config, layout: Layout, hf: str = "model.", embed: str = "embed_tokens", head: str = "lm_head"
) -> dict[str, str]:
    """Tensors, or parts of them, that are left out on purpose: rotary tables, a tied head, rows beyond the vocabulary.

    Args:
      c: `config.json`, or its text model's part.
      layout: that the user wants.
      hf, embed, head: see `top`.

    Returns:
      The reason by pattern or window, for a family's `drops`.
    """
    places = (f"{hf}{of}rotary_emb." for of in ("layers.*.self_attn.", ""))
    drops = {f"{place}{name}": "computed, not learned" for place in places for name in ROTARY}
    if is_tied(c):
        drops[f"{head}.weight"] = TIED_HEAD
    return drops | beyond_vocabulary(c, layout, f"{hf}{embed}.weight", f"{head}.weight")


def tied_head(
    c: Config, layout: Layout, hf: str = "model.", embed: str = "embed_tokens", head: str = "lm_head"
) -> dict[str, str]:
    """The head where it is the embedding, for a family's `copies`.

    Args:
      c: `config.json`, or its text model's part.
      layout: that the user wants.
      hf, embed, head: see `top`.

    Returns:
      The embedding by the head; nothing where the head isn't tied.
    """
    return {f"{head}.weight": f"{hf}{embed}.weight"} if is_tied(c) else {}


NORMS: Table = [
    rule("pre_self_attention_layer_norm/scale", "input_layernorm.weight", "embed", "norm"),
    rule("post_self_attention_layer_norm/scale", "post_attention_layernorm.weight", "embed", "norm"),
]


def sandwich_norms(*ops: Op, suffix: str = "") -> Table:
    """Norms before and behind attention and MLP, as Gemma has them: (embed) each.

    Args:
      ops: what MaxText changes of their values, such as `Shift(1.0)`.
      suffix: of MaxText's names.

    Returns:
      Four lines.
    """
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

    Args:
      query_ops: what MaxText folds into the query, such as `Scale(dim ** -0.5)`.
      paired_rope: whether MaxText pairs the halves; the family's `dims` have `half` and `two` then.
      target: path of MaxText's attention below the layer.

    Returns:
      Query (heads dim, embed), key and value (kv dim, embed), and out (embed, heads dim), as the release has them.
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
    """The projections of a dense layer, or of one expert.

    Args:
      target, source: MaxText's path and the release's name, below the layer.
      width: the axis word of the hidden size.
      projections: what the release calls gate, up and down.

    Returns:
      Gate and up (width, embed) and down (embed, width), as the release has them.
    """
    gate, up, down = (f"{source}.{projection}.weight" for projection in projections)
    return [
        rule(f"{target}/wi_0/kernel", gate, f"{width} embed -> embed {width}", "embed mlp"),
        rule(f"{target}/wi_1/kernel", up, f"{width} embed -> embed {width}", "embed mlp"),
        rule(f"{target}/wo/kernel", down, f"embed {width} -> {width} embed", "mlp embed"),
    ]


def attention_biases(target: str = "self_attention", when: object = True) -> Table:
    """The biases of query, key and value.

    Args:
      target: path of MaxText's attention below the layer.
      when: whether the model has them.

    Returns:
      Query (heads dim), key and value (kv dim), as the release has them; nothing unless `when`.
    """
    return [
        rule(f"{target}/query/bias", "self_attn.q_proj.bias", "(heads dim) -> heads dim", "q_heads kv", when=when),
        rule(f"{target}/key/bias", "self_attn.k_proj.bias", "(kv dim) -> kv dim", "kv_heads kv_head_dim", when=when),
        rule(f"{target}/value/bias", "self_attn.v_proj.bias", "(kv dim) -> kv dim", "kv_heads kv_head_dim", when=when),
    ]


def check_all_moe(c: Config) -> None:
    """Checks that no layer is dense, as Qwen's `config.json` could say and MaxText's models don't have.

    Args:
      c: `config.json`.

    Raises:
      ConfigError: some are.
    """
    if c.get("mlp_only_layers") or c.size("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            "config.json mixes dense and MoE layers (mlp_only_layers, decoder_sparse_step); MaxText's model has no dense layers"
        )


def is_fused(layout: Layout, source: str) -> bool:
    """Whether experts are fused, as transformers v5 holds them, or are tensors of their own.

    Args:
      layout: with the names of the release's tensors.
      source: whole name of what the experts lie below, in one layer.

    Returns:
      Whether there is a `gate_up_proj`.
    """
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
    (huggingface/transformers, models/qwen3_moe/modeling_qwen3_moe.py, v5.23.0).

    Args:
      target, source: MaxText's path and the release's name of the experts, below the layer.
      width: moe_mlp, in elements.
      fused: see `is_fused`.
      projections: what the release calls gate, up and down where they aren't fused.
      inputs: the axis word of what goes in and comes out.

    Returns:
      Three lines.
    """
    if fused:
        gate, up, down = f"gate_up_proj[:, :{width}]", f"gate_up_proj[:, {width}:]", "down_proj"
    else:
        gate, up, down = (f"{{expert}}.{projection}.weight" for projection in projections)
    wide, narrow = f"expert moe_mlp {inputs}", f"expert {inputs} moe_mlp"
    return [
        rule(f"{target}/wi_0", f"{source}.{gate}", f"{wide} -> {narrow}", "exp embed_moe mlp_moe"),
        rule(f"{target}/wi_1", f"{source}.{up}", f"{wide} -> {narrow}", "exp embed_moe mlp_moe"),
        rule(f"{target}/wo", f"{source}.{down}", f"{narrow} -> {wide}", "exp mlp_moe embed_moe"),
    ]


def experts_in_out(target: str, source: str, width: int) -> Table:
    """Fused experts that lie in the files as in MaxText: `gate_up_proj` (expert, embed, 2 · moe_mlp), gate first.

    Args:
      target, source: MaxText's path and the release's name of the experts, below the layer.
      width: moe_mlp, in elements.

    Returns:
      Three lines.
    """
    fused, axes = f"{source}.gate_up_proj", "exp embed_moe mlp_moe"
    return [
        rule(f"{target}/wi_0", f"{fused}[..., :{width}]", "expert embed moe_mlp", axes),
        rule(f"{target}/wi_1", f"{fused}[..., {width}:]", "expert embed moe_mlp", axes),
        rule(f"{target}/wo", f"{source}.down_proj", "expert moe_mlp embed", "exp mlp_moe embed_moe"),
    ]
