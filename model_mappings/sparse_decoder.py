"""The decoder of DeepSeek V3 and its descendants: layers with one MLP, then layers with experts, their routers' biases,
indexers, and a layer behind the last that predicts one token more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from weightbeam.model_mappings.blocks import LAYER, Table, gated_mlp, layers, top
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.rules import ABSENT, Rule, Stack, rule, stack

PREDICTION = "mtp_block/mtp_layer_1/mtp_1_transformer_layer"  # where MaxText has the layer behind the last
BIAS = "MoEBiasVar"  # the collection of the routers' biases (src/maxtext/layers/moe.py, 0.2.5)
MTP: Table = [
    rule("mtp_1_embedding_norm/scale", "enorm.weight", "embed", "norm"),
    rule("mtp_1_hidden_state_norm/scale", "hnorm.weight", "embed", "norm"),
    rule("mtp_1_projection/kernel", "eh_proj.weight", "embed pair -> pair embed", "embed -"),
]
INDEXER: Table = [
    rule(
        "wq_b/kernel",
        "wq_b.weight",
        "(index_heads index_dim) q_lora -> q_lora index_heads index_dim",
        "q_lora q_heads kv",
    ),
    rule("wk/kernel", "wk.weight", "index_dim embed -> embed index_dim", "embed_attn kv"),
    rule("k_norm/scale", "k_norm.weight", "index_dim", ""),
    rule("k_norm/bias", "k_norm.bias", "index_dim", ""),
    rule("weights_proj/kernel", "weights_proj.weight", "index_heads embed -> embed index_heads", "embed_attn q_heads"),
]


def dense_prefix(c: Config, default: int | None = None) -> int:
    """How many layers before the others have one MLP and no experts: by `mlp_layer_types`, which transformers writes, or
    by `first_k_dense_replace`, or `default` for a class without that field; all layers if there are fewer.

    Raises:
      ConfigError: layers behind the first one with experts have none.
    """
    types, n = c.get("mlp_layer_types"), c.size("num_hidden_layers")
    if types is None:
        return min(c.count("first_k_dense_replace") if default is None else default, n)
    dense = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * dense + ["sparse"] * (n - dense):
        raise ConfigError(
            f"config.json: 'mlp_layer_types' should be 'dense' and then 'sparse', {n} in all, as MaxText's layers are"
        )
    return dense


def dense_then_routed(
    c: Config, layout: Layout, dense: int, table: Table, routed: Table, last_norm: list[Rule]
) -> list[Stack]:
    """Embedding, the first `dense` layers, and the others, which have experts; with MTP the layer behind the last, too.

    MaxText's MTP block has no array for the layer's copies of embedding and head: it applies the model's
    (AI-Hypercomputer/maxtext, src/maxtext/layers/multi_token_prediction.py and decoders.py, e591f30).

    Args:
      table: what all layers have, but for their MLP.
      routed: the MLP of the others: router, experts, shared experts.
      last_norm: that of a prediction layer, which the newest MaxText has.
    """
    n, others = c.size("num_hidden_layers"), [*table, *routed]
    made = [
        top(c, layout),
        *layers(layout, "decoder/dense_layers", range(dense), [*table, *gated_mlp()], name="dense_layers"),
        *layers(layout, "decoder/moe_layers", range(dense, n), others, name="moe_layers"),
    ]
    if layout.mtp:
        made += [stack("mtp_block/mtp_layer_1", LAYER, n, [*MTP, last_norm]), stack(PREDICTION, LAYER, n, others)]
    return made


def is_prediction(layout: Layout, prefix: str) -> bool:
    """Whether the layer whose tensors' names begin with `prefix` is one for multi-token prediction: it has tensors that
    no other layer has. Any may be where the tensors aren't known.
    """
    own = (f"{prefix}{each.source}" for lines in MTP for each in lines)
    return not layout.names or any(name in layout.names for name in own)


def as_spare(lines: list[Rule], is_newest: bool) -> list[Rule]:
    """What the newest MaxText has in a collection of its own, such as a router's bias (`bias_variables`), as a parameter: it
    is only read where a model is loaded for decoding (`from_pretrained`). In the earlier one a bias is nothing else.
    """
    return [dataclasses.replace(each, spare=is_newest) for each in lines]


def bias_variables(c: Config, layout: Layout, dense: int, bias: list[Rule], is_newest: bool) -> list[Stack]:
    """The routers' biases behind the first `dense` layers as the newest MaxText has them, in a collection of their own."""
    if not bias or not is_newest:
        return []
    n = c.size("num_hidden_layers")
    made = layers(layout, "decoder/moe_layers", range(dense, n), [bias], name="moe_layers", collection=BIAS)
    return [*made, stack(PREDICTION, LAYER, n, [bias], collection=BIAS)] if layout.mtp else made


def indexers(
    layout: Layout, target: str, ids: Iterable[int], full: Collection[int], name: str = "layers"
) -> list[Stack]:
    """The indexers of the layers `ids`, of which those in `full` have one; the others attend to the tokens that the last
    one before them chose, and have no tensors.

    MaxText has no arrays for the others where layers aren't scanned, and a place for every layer where they are, which
    nothing reads (AI-Hypercomputer/maxtext, pull request 4832, src/maxtext/layers/attention_mla.py, 83a6fce): zeros.
    """
    ids, below, source = list(ids), "self_attention/indexer", f"{LAYER}self_attn.indexer."
    if not layout.scan:
        return [stack(f"{target}_{i}/{below}", source, at, INDEXER) for i, at in enumerate(ids) if at in full]
    places = [at if at in full else ABSENT for at in ids]
    return [stack(f"{target}/{below}", source, places, INDEXER, name)] if ids else []
