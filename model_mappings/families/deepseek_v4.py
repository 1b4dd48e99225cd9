"""DeepSeek V4: compressed attention, residual streams joined by hyper-connections, hash routing in the first layers.

The table's names are the hub's own. The aliases are transformers' names in memory, most of which MaxText's mapping expects, and
the mixture that its `save_pretrained` writes (huggingface/transformers, conversion_mapping.py, models/deepseek_v4, v5.23.0). A
hyper-connection's rows are those of pre, post and residual, in this order, and so are its three scalars; MaxText's norm of it
has a weight, which is 1. Rotary dimensions are interleaved pairs at the end of a head on both sides: no permutation.

To MaxText, routing tables and the routers' biases aren't parameters but variables of other collections, which the scan stacks on
their first axis and its converter leaves out. The scan takes pairs of an HCA and a CSA layer behind the hash-routed ones. The
converter stacks the experts of those first, unscanned layers on the scan's axis; here they are as the model has them
(AI-Hypercomputer/maxtext, src/maxtext/models/deepseek4.py, layers/moe.py, mhc.py, attention_compressed.py and nnx_scan.py, and
checkpoint_conversion/to_maxtext.py, e591f30).
"""

import functools
import math

from weightbeam.model_mappings.blocks import (
    beyond_vocabulary,
    common_drops,
    experts,
    gated_mlp,
    is_fused,
    tied_head,
    top,
    vocabulary,
)
from weightbeam.model_mappings.config import ConfigError
from weightbeam.model_mappings.configuration import derived, fixed, number, only, only_in, positive, real, size, unless
from weightbeam.model_mappings.family import Family, Prediction
from weightbeam.model_mappings.lines import (
    CONTEXT,
    NORMED,
    SIZES,
    STREAMS,
    TIED,
    WHOLE_LOSS,
    activation,
    architecture,
    eps,
    head_dim,
)
from weightbeam.model_mappings.lines import experts as expert_lines
from weightbeam.model_mappings.mixers import hyper_connection, hyper_dims
from weightbeam.model_mappings.rope import THETA, only_kinds, rope_of, sole_rope
from weightbeam.model_mappings.rules import rule, stack
from weightbeam.model_mappings.sparse_decoder import BIAS, as_spare
from weightbeam.model_mappings.versions import NEWEST

LAYER = "layers.{layer}."
MOE = "mlp/MoeBlock_0"
TOP = dict(hf="", embed="embed", head="head")
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {"sliding_attention": 0, CSA: 4, HCA: 128}  # tokens compressed into one
OLD_RATES = {"compress_rate_csa": CSA, "compress_rate_hca": HCA}  # fields for a kind by itself
PAIR = [128, 4]  # the rates of the layers that MaxText scans
NAMES = {  # the hub's: transformers'
    "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base", "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn": "self_attn", "ffn": "mlp",
    "attn.attn_sink": "self_attn.sinks", "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_a": "self_attn.q_a_proj", "attn.wq_b": "self_attn.q_b_proj", "attn.wkv": "self_attn.kv_proj",
    "attn.wo_a": "self_attn.o_a_proj", "attn.wo_b": "self_attn.o_b_proj",
    **{f"attn.{ours}.{leaf}": f"self_attn.{theirs}.{name}"
       for ours, theirs in (("compressor", "compressor"), ("indexer.compressor", "compressor.indexer"))
       for leaf, name in (("wkv", "kv_proj"), ("wgate", "gate_proj"), ("ape", "position_bias"), ("norm", "kv_norm"))},
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj", "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias", "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj", "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "attn.kv_norm": "attn.norm",  # as save_pretrained writes it
}  # fmt: skip


def compress_ratios(c):
    """The rate of each layer: 0, 4 with an indexer (CSA), or a higher one without (HCA). The ratios beyond the last layer's are the MTP layers'.
    Where nothing is said, both kinds take turns behind two HCA layers; a rate for a kind by itself counts before `compress_rates`
    (transformers v5.23.0, configuration_deepseek_v4.py).
    """
    n, field = c.size("num_hidden_layers"), "compress_ratios" if c.get("layer_types") is None else "layer_types"
    rates = RATES if c.get("compress_rates") is None else RATES | c.part("compress_rates")
    rates = rates | {kind: c[name] for name, kind in OLD_RATES.items() if c.get(name) is not None}
    ratios = found = c.get(field)
    if found is None:
        field, found = "layer_types", [CSA if i > 1 and i % 2 else HCA for i in range(n)]
    if field == "layer_types" and isinstance(found, list):
        ratios = [rates.get(str(kind)) for kind in found]
        if any((kind == CSA) != (ratio == RATES[CSA]) for kind, ratio in zip(found, ratios, strict=True)):
            raise ConfigError(f"config.json: 'compress_rates' (or {' and '.join(OLD_RATES)}) should be {RATES[CSA]} for {CSA} and no others, as MaxText knows them by it, but is {rates}")
    if not isinstance(ratios, list) or len(ratios) < n or not all(type(ratio) is int and (ratio == 0 or ratio >= 4) for ratio in ratios[:n]):
        raise ConfigError(f"config.json: {field!r} should say for each of {n} layers whether and how it compresses what MaxText knows, but is {found!r}")
    return ratios[:n]


def hash_layers(c):
    """How many layers, from the first on, choose experts by the token alone."""
    n, types = c.size("num_hidden_layers"), c.get("mlp_layer_types")
    if types is None:
        return min(n, 3 if c.get("num_hash_layers") is None else c.count("num_hash_layers"))
    count = types[:n].count("hash_moe") if isinstance(types, list) else 0
    if not isinstance(types, list) or types[:n] != ["hash_moe"] * count + ["moe"] * (n - count):
        raise ConfigError(f"config.json: 'mlp_layer_types' should be 'hash_moe' for the first of {n} layers and 'moe' for the others, but is {types!r}")
    return count


def dims(c, layout):
    embed, heads, dim, moe_mlp = (c.size(key) for key in ("hidden_size", "num_attention_heads", "head_dim", "moe_intermediate_size"))
    index_heads, index_dim, groups = c.size("index_n_heads"), c.size("index_head_dim"), c.size("o_groups")
    return dict(
        embed=embed, heads=heads, kv=c.size("num_key_value_heads", 1), dim=dim, q_lora=c.size("q_lora_rank"),
        group=groups, group_dim=heads * dim // groups, o_lora=c.size("o_lora_rank"),
        wide=2 * dim, index_dim=index_dim, index_wide=2 * index_dim, index_heads=index_heads, index_query=index_heads * index_dim,
        **{f"rate_{rate}": rate for rate in compress_ratios(c)},
        expert=c.size("n_routed_experts"), moe_mlp=moe_mlp, shared_mlp=moe_mlp * c.size("n_shared_experts"), chosen=c.size("num_experts_per_tok"),
        **hyper_dims(c),
    )  # fmt: skip


def compressor(target, source, rate, dim, wide):
    return [
        rule(f"{target}/kv_proj/kernel", f"{source}.wkv.weight", f"{wide} embed -> embed {wide}", "embed_attn kv"),
        rule(f"{target}/gate_proj/kernel", f"{source}.wgate.weight", f"{wide} embed -> embed {wide}", "embed_attn kv"),
        rule(f"{target}/position_bias", f"{source}.ape", f"rate_{rate} {wide}", ""),
        rule(f"{target}/kv_norm/scale", f"{source}.norm.weight", dim, "norm"),
    ]


def attention(rate):
    csa = "self_attention/csa_compressor"
    table = [
        rule("self_attention/wq_a/kernel", "attn.wq_a.weight", "q_lora embed -> embed q_lora", "embed_attn q_lora"),
        rule("self_attention/q_norm/scale", "attn.q_norm.weight", "q_lora", "norm"),
        rule("self_attention/wq_b/kernel", "attn.wq_b.weight", "(heads dim) q_lora -> q_lora heads dim", "q_lora q_heads kv"),
        rule("self_attention/wkv/kernel", "attn.wkv.weight", "(kv dim) embed -> embed kv dim", "embed_attn kv_heads kv_head_dim"),
        rule("self_attention/kv_norm/scale", "attn.kv_norm.weight", "dim", "norm"),
        rule("self_attention/sinks", "attn.attn_sink", "heads", "-"),
        rule("self_attention/o_a_proj/kernel", "attn.wo_a.weight", "(group o_lora) group_dim -> group group_dim o_lora", "o_groups q_heads o_lora_up_proj"),
        rule("self_attention/o_b_proj/kernel", "attn.wo_b.weight", "embed (group o_lora) -> (group o_lora) embed", "o_lora_up_proj embed_attn"),
    ]
    if rate > 4:
        table += compressor("self_attention/hca_compressor", "attn.compressor", rate, "dim", "dim")
    elif rate:
        table += [
            *compressor(csa, "attn.compressor", rate, "dim", "wide"),
            *compressor(f"{csa}/indexer", "attn.indexer.compressor", rate, "index_dim", "index_wide"),
            rule(f"{csa}/indexer/q_proj/kernel", "attn.indexer.wq_b.weight", "index_query q_lora -> q_lora index_query", "q_lora indexer_q"),
            rule(f"{csa}/indexer/weights_proj/kernel", "attn.indexer.weights_proj.weight", "index_heads embed -> embed index_heads", "embed_attn indexer_weights"),
        ]
    return table


def decoder_layer(c, layout, rate):
    fused = is_fused(layout, "layers.0.ffn.experts")
    return [
        rule("pre_self_attention_layer_norm/scale", "attn_norm.weight", "embed", "norm"),
        rule("post_self_attention_layer_norm/scale", "ffn_norm.weight", "embed", "norm"),
        *hyper_connection("mhc_attention", "hc_attn", c.size("hc_mult")),
        *hyper_connection("mhc_mlp", "hc_ffn", c.size("hc_mult")),
        *attention(rate),
        rule(f"{MOE}/gate/kernel", "ffn.gate.weight", "expert embed -> embed expert", "embed_router -"),
        *experts(MOE, "ffn.experts", c.size("moe_intermediate_size"), fused, ("w1", "w3", "w2")),
        *gated_mlp("mlp/shared_experts", "ffn.shared_experts", "shared_mlp", ("w1", "w3", "w2")),
    ]


def stacks(c, layout, is_newest=True):
    ratios, hashed, n = compress_ratios(c), hash_layers(c), c.size("num_hidden_layers")
    if layout.scan and ratios[hashed:] != PAIR * ((n - hashed) // 2):
        raise ConfigError(
            f"config.json: behind the {hashed} hash-routed layers MaxText scans pairs with the compress ratios {PAIR}, but they are {ratios[hashed:]}; "
            "convert with --scan_layers false"
        )
    rows, vocab = vocabulary(c, layout)
    routing = rule(f"{MOE}/tid2eid", f"ffn.gate.tid2eid{rows}", "vocab chosen", "", integer=True, vocab=vocab)
    bias = rule(f"{MOE}/gate/bias", "ffn.gate.bias", "expert", "-")
    head = [
        rule("hc_fn", "hc_head_fn", "stream streams -> streams stream", "activation_embed -"),
        rule("hc_base", "hc_head_base", "stream", "-"),
        rule("hc_scale", "hc_head_scale", "1", "-"),
    ]
    out = [top(c, layout, **TOP), stack("decoder/hc_head", "", 0, head)]

    def add(target, ids, rate, names, variable, collection):
        """A layer with what it has in a collection of its own, which 0.2.5's `from_pretrained` takes from the parameters."""
        spare = [as_spare(variable, True)] if is_newest else []
        out.append(stack(target, LAYER, ids, [*decoder_layer(c, layout, rate), *spare], names))
        out.append(stack(target, LAYER, ids, [variable], names, collection))

    for i in range(hashed):
        add(f"decoder/layers_{i}", i, ratios[i], "", routing, "Tid2EidVar")
    for i in range(hashed, hashed if layout.scan else n):
        add(f"decoder/layers_{i}", i, ratios[i], "", bias, BIAS)
    for place, rate in enumerate(PAIR if layout.scan and hashed < n else ()):
        add(f"decoder/scanned_blocks/layers_{place}", range(hashed + place, n, 2), rate, "scanned_blocks", bias, BIAS)
    return out


def drops(c, layout):
    return {
        **common_drops(c, layout, **TOP),
        **beyond_vocabulary(c, layout, *(f"layers.{i}.ffn.gate.tid2eid" for i in range(hash_layers(c)))),
        "mtp.*": Prediction("multi-token prediction, which MaxText's DeepSeek V4 doesn't have"),
    }


def layers_rope(c, kind):
    """The base and the share of a head that turns, of `main` or `compress` layers, as transformers has them (v5.23.0,
    configuration_deepseek_v4.py, `__post_init__`, and modeling_deepseek_v4.py): of objects for both kinds, which fields around them
    fill in; else of those fields alone, whatever else `rope_parameters` says.
    """
    own, share = {each: sole_rope(c, each) for each in ("main", "compress")}, c.get("partial_rotary_factor")
    if None not in own.values():
        return {"rope_theta": c.get("rope_theta", THETA), "partial_rotary_factor": 1.0 if share is None else share} | own[kind]
    if share is None:
        share = 64 / 512 if c.get("qk_rope_head_dim") is None else c.size("qk_rope_head_dim") / c.size("head_dim")
    theta = c.get("rope_theta", THETA) if kind == "main" else c.get("compress_rope_theta", 160_000)
    return {"rope_theta": theta, "partial_rotary_factor": share}


def base(kind, key, field):
    return derived(key, lambda c, model: positive(layers_rope(c, kind)["rope_theta"]), field)


def turned(c, kind):
    """How many dimensions of a head turn."""
    share = layers_rope(c, kind)["partial_rotary_factor"]
    found = int(c.size("head_dim") * share) if type(share) in (int, float) and 0 < share < math.inf else 0
    if not found:
        raise ConfigError(f"config.json: 'partial_rotary_factor' should be the share of a head that turns, but is {share!r}")
    return found


def turned_limit(c, model):
    """MaxText turns `qk_rope_head_dim` in both kinds of layers."""
    main, compress = turned(c, "main"), turned(c, "compress")
    return None if main == compress else f"rope_parameters.main turns {main} of a head, and compress {compress}: MaxText turns {main} in all layers; logits differ"


def shared_limit(c, model):
    """transformers clamps what enters a shared expert's product, too (v5.23.0, `DeepseekV4MLP`); MaxText's is a plain MLP
    (`RoutedAndSharedMoE` in layers/moe.py and `MlpBlock` in layers/linears.py, e591f30 and 0.2.5).
    """
    return f"swiglu_limit is {c.get('swiglu_limit', 10.0)}: MaxText clamps the routed experts' activations alone; logits differ where a shared expert's are larger. There is no way round"


LINES = (
    *SIZES, size("base_num_kv_heads", "num_key_value_heads", default=1), head_dim(), *activation(), eps(), CONTEXT, *TIED, *architecture("deepseek4", "DeepseekV4ForCausalLM", "deepseek_v4"),
    size("base_mlp_dim", "moe_intermediate_size"),
    *expert_lines("n_routed_experts"),
    size("shared_experts", "n_shared_experts"),
    *(size(name, name) for name in ("q_lora_rank", "o_lora_rank", "o_groups")),
    derived("qk_rope_head_dim", lambda c, model: turned(c, "main"), "qk_rope_head_dim"),
    size("indexer_n_heads", "index_n_heads"),
    size("indexer_head_dim", "index_head_dim"),
    size("indexer_topk", "index_topk", default=512),
    *STREAMS,
    size("sliding_window_size", "sliding_window", default=128),
    derived("first_num_hash_layers", lambda c, model: hash_layers(c), "num_hash_layers"),
    derived("compress_ratios", lambda c, model: compress_ratios(c), "compress_ratios"),
    real("mlp_activations_limit", "swiglu_limit", default=10.0),
    unless(shared_limit),
    fixed("routed_score_func", "sqrtsoftplus"),
    only("scoring_func", "sqrtsoftplus", "MaxText's router takes the square root of softplus; other experts are chosen", default="sqrtsoftplus"),
    fixed("routed_bias", True),
    fixed("norm_topk_prob", True),
    NORMED,
    real("routed_scaling_factor", "routed_scaling_factor", default=1.5),
    fixed("attention_type", "compressed"),
    only_in(NEWEST, derived("use_indexer", lambda c, model: True)),  # in e591f30 it is of latent attention alone
    WHOLE_LOSS,
    derived("attention", lambda c, model: "dot_product"),  # MaxText refuses its default
    base("main", "rope_max_timescale", "rope_theta"),
    base("compress", "compressed_rope_max_timescale", "compress_rope_theta"),
    only_kinds("default", kind="main", of=sole_rope), only_kinds("default", kind="compress"),
    unless(turned_limit),
    derived("rope_type", lambda c, model: "default"),
    derived("original_max_position_embeddings", lambda c, model: number(rope_of(c, "compress").get("original_max_position_embeddings", 65_536))),
    only_in("e591f30", unless(lambda c, model: "routing tables and router biases aren't parameters to MaxText, and e591f30 doesn't load them: see docs/explanation/numerics.md, DeepSeek V4")),
)  # fmt: skip

FAMILY = Family(
    name="deepseek_v4",
    models={"deepseek4-*": ("deepseek_v4",)},
    dims=dims,
    stacks=stacks,
    earlier={"e591f30": functools.partial(stacks, is_newest=False)},
    drops=drops,
    copies=lambda c, layout: tied_head(c, layout, **TOP),
    configuration={"deepseek_v4": LINES},
    releases="DeepSeek V4",
    checked=("deepseek4-284b", "deepseek4-tiny"),
    missing="multi-token prediction",
    aliases={f"model.layers.*.{theirs}": f"layers.*.{ours}" for ours, theirs in NAMES.items()}
    | {f"model.hc_head.hc_{leaf}": f"hc_head_{leaf}" for leaf in ("fn", "base", "scale")}
    | {"model": "", "model.embed_tokens": "embed", "lm_head": "head"},
)
