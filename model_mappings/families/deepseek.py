"""DeepSeek V2, V3, R1, V3.1, V3.2 and Kimi K2 to K2.6: latent attention, a dense prefix, shared experts, an indexer (V3.2).

Latent and rotary parts stay side by side in MaxText as in Hugging Face, and the rotary part is interleaved on both sides:
no permutation.

Kimi K2.5 and K2.6 are Kimi K2 behind `language_model.`, with a vision tower that MaxText doesn't have. transformers (v5.23.0)
says `model.language_model.` in memory, and its `save_pretrained` writes `blocks` for `layers`, the tower's word.
"""

import functools
import itertools
import math

from weightbeam.model_mappings.blocks import (
    LAYER,
    NORMS,
    common_dims,
    common_drops,
    experts,
    gated_mlp,
    is_fused,
    text_part,
    tied_head,
)
from weightbeam.model_mappings.config import Config
from weightbeam.model_mappings.configuration import (
    copied,
    count,
    derived,
    fixed,
    flag,
    inside,
    number,
    only,
    real,
    size,
    unless,
    written,
)
from weightbeam.model_mappings.expert_groups import expert_groups, why_not_in_groups
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family, Prediction, Tower, Variable
from weightbeam.model_mappings.lines import (
    CONTEXT,
    NOBODY,
    NORMED,
    SIZES,
    TIED,
    WHOLE_LOSS,
    activation,
    architecture,
    eps,
)
from weightbeam.model_mappings.lines import experts as expert_lines
from weightbeam.model_mappings.rope import attention_scale, is_yarn, rope_of, theta, yarn_limit, yarn_scale
from weightbeam.model_mappings.rules import rule, stack
from weightbeam.model_mappings.sparse_decoder import (
    INDEXER,
    PREDICTION,
    as_spare,
    bias_variables,
    dense_prefix,
    dense_then_routed,
    indexers,
    is_prediction,
)

MOE = "DeepSeekMoeBlock_0"
ROUTER = f"{MOE}/MoeBlock_0"


def dims(c, layout):
    c = text_part(c)
    nope, rope, v_dim, kv_lora = (c.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    moe_mlp = c.size("moe_intermediate_size")
    return common_dims(c) | dict(
        q_dim=nope + rope, kv_dim=nope + v_dim, v_dim=v_dim, q_lora=c.count("q_lora_rank"), kv_lora=kv_lora, kv_lora_rope=kv_lora + rope,
        expert=c.size("n_routed_experts"), moe_mlp=moe_mlp, shared_mlp=moe_mlp * c.size("n_shared_experts"),
        index_heads=c.count("index_n_heads"), index_dim=c.count("index_head_dim"), pair=2 * c.size("hidden_size"),
    )  # fmt: skip


def latent_attention(c):
    q_lora = c.count("q_lora_rank")
    return [
        rule("self_attention/query/kernel", "self_attn.q_proj.weight", "(heads q_dim) embed -> embed heads q_dim", "embed_attn q_heads kv", when=not q_lora),
        rule("self_attention/wq_a/kernel", "self_attn.q_a_proj.weight", "q_lora embed -> embed q_lora", "embed_attn q_lora_up_proj", when=q_lora),
        rule("self_attention/q_norm/scale", "self_attn.q_a_layernorm.weight", "q_lora", "norm", when=q_lora),
        rule("self_attention/wq_b/kernel", "self_attn.q_b_proj.weight", "(heads q_dim) q_lora -> q_lora heads q_dim", "q_lora q_heads kv", when=q_lora),
        rule("self_attention/wkv_a/kernel", "self_attn.kv_a_proj_with_mqa.weight", "kv_lora_rope embed -> embed kv_lora_rope", "embed_attn kv_lora_up_proj"),
        rule("self_attention/kv_norm/scale", "self_attn.kv_a_layernorm.weight", "kv_lora", "norm"),
        rule("self_attention/wkv_b/kernel", "self_attn.kv_b_proj.weight", "(heads kv_dim) kv_lora -> kv_lora heads kv_dim", "kv_lora kv_heads kv_head_dim"),
        rule("self_attention/out/kernel", "self_attn.o_proj.weight", "embed (heads v_dim) -> heads v_dim embed", "heads kv embed_attn"),
    ]


def decoder(c, layout, dense, full, is_newest):
    """The model whose first `dense` layers have no experts; the layers in `full` have an indexer of their own."""
    n = c.size("num_hidden_layers")
    bias = rule(f"{ROUTER}/gate/bias", "mlp.gate.e_score_correction_bias", "expert", "-", when=c["model_type"] != "deepseek_v2")
    routed = [
        *gated_mlp(f"{MOE}/shared_experts", "mlp.shared_experts", "shared_mlp"),
        rule(f"{ROUTER}/gate/kernel", "mlp.gate.weight", "expert embed -> embed expert", "embed_router -"),
        as_spare(bias, is_newest),
        *experts(ROUTER, "mlp.experts", c.size("moe_intermediate_size"), is_fused(layout, f"model.layers.{dense}.mlp.experts")),
    ]
    norm = rule("mtp_1_final_norm/scale", "shared_head.norm.weight", "embed", "norm", when=is_newest)
    out = dense_then_routed(c, layout, dense, [*NORMS, *latent_attention(c)], routed, norm)
    if full:
        out += indexers(layout, "decoder/dense_layers", range(dense), full, "dense_layers")
        out += indexers(layout, "decoder/moe_layers", range(dense, n), full, "moe_layers")
    if full and layout.mtp:
        out.append(stack(f"{PREDICTION}/self_attention/indexer", f"{LAYER}self_attn.indexer.", n, INDEXER))
    return out + bias_variables(c, layout, dense, bias, is_newest)


def stacks(c, layout, is_newest=True):
    c = text_part(c)
    full = range(c.size("num_hidden_layers")) if c.count("index_n_heads") else ()
    return decoder(c, layout, dense_prefix(c), full, is_newest)


def drops(c, layout):
    c = text_part(c)
    mtp = f"model.layers.{c.size('num_hidden_layers')}."
    towers = ("vision_tower.*", "mm_projector.*", "model.vision_tower.*", "model.mm_projector.*")
    common = common_drops(c, layout) | dict.fromkeys(towers, Tower("vision tower, MaxText's Kimi K2 has none"))
    if not layout.mtp:
        prefixes = (f"model.layers.{layer}." for layer in itertools.count(c.size("num_hidden_layers")))
        found = itertools.takewhile(functools.partial(is_prediction, layout), prefixes) if layout.names else [mtp]
        return common | {f"{prefix}*": Prediction("multi-token prediction, convert it with --mtp") for prefix in found}
    shared = "shared_head" if layout.maxtext in FAMILY.earlier else "shared_head.head"
    return common | {
        f"{mtp}embed_tokens.weight": "a copy of the embedding, MaxText shares it",
        f"{mtp}{shared}.*": Variable(f"MaxText's MTP block shares the model's {'head and last norm' if layout.maxtext in FAMILY.earlier else 'head'}"),
    }


def softmax_mscale(rope):
    """What MaxText's layer multiplies by 0.1 · ln(factor) for its softmax: transformers takes `mscale_all_dim`, and nothing without it."""
    return number(rope.get("mscale_all_dim", 0)) if rope["rope_type"] == "yarn" else 1


def mscale_limit(c, model):
    rope = rope_of(c)
    if rope["rope_type"] not in ("default", "yarn"):
        return f"rope_type is {rope['rope_type']!r}: MaxText's layer has the default embedding without it; logits differ, most in long contexts"
    return yarn_limit(rope) if is_yarn(c) else None


def latent_eps(default=1e-6, whose="transformers"):
    """What the norms of the two latents add to a variance, of a class whose `rms_norm_eps` is `default`: transformers' DeepseekV2, V3,
    V32 and GlmMoeDsaRMSNorm (v5.23.0) their own default, MaxText's MLA (layers/attention_mla.py, e591f30 and 0.2.5) the configuration's.
    """

    def limit(c, model):
        found = default if c.get("rms_norm_eps") is None else c["rms_norm_eps"]
        return None if found == 1e-6 else f"rms_norm_eps is {found}: in the norms of the two latents {whose} adds 1e-6, MaxText's layer this; logits differ a little"

    return unless(limit)


def scales_attention(c, model):
    """Whether MaxText's embedding is to multiply query and key by YaRN's usual scale, as transformers' does; the softmax has its own."""
    rope = rope_of(c)
    usual = yarn_scale(rope)
    return is_yarn(c) and usual > 1 and math.isclose(attention_scale(rope), usual)


def yarn_of(c):
    """YaRN's parameters; none where the embedding isn't YaRN's, whatever stands beside its type."""
    return rope_of(c) if is_yarn(c) else Config()


def original_context(c, model):
    return number(yarn_of(c).get("original_max_position_embeddings", c.size("max_position_embeddings", 4096)))


YARN = (  # without YaRN too: factor 1 is the plain embedding, which MaxText's other class doesn't interleave
    theta(),
    fixed("rope_type", "yarn"),
    written("rope_parameters.rope_type", "yarn"),
    *(derived(key, lambda c, model, name=name, default=default: number(yarn_of(c).get(name, default)), f"rope_parameters.{name}") for key, name, default in (
        ("rope_factor", "factor", 1), ("beta_fast", "beta_fast", 32), ("beta_slow", "beta_slow", 1))),
    derived("original_max_position_embeddings", original_context, "rope_parameters.original_max_position_embeddings"),
    derived("mscale", lambda c, model: softmax_mscale(rope_of(c)), "rope_parameters.mscale_all_dim"),
    copied("rope_parameters.mscale", lambda keys: None if keys["rope_attention_scaling"] else keys["mscale"]),
    copied("rope_parameters.attention_factor", lambda keys: None if keys["rope_attention_scaling"] or keys["mscale"] else 1.0),
    fixed("rope_interleave", True),
    derived("rope_truncate", lambda c, model: flag(yarn_of(c).get("truncate", True))),
    derived("rope_attention_scaling", scales_attention),
    unless(mscale_limit),
)


def groups(c):
    """How many there are, and how many are chosen; MaxText routes without groups unless told."""
    number, chosen = expert_groups(c)
    return (-1, -1) if number == chosen else (number, chosen)  # all groups are none


def groups_limit(c, model):
    found, wanted, (number, chosen) = c.size("n_routed_experts"), c.size("num_experts_per_tok"), expert_groups(c)
    none = next((name for name in ("n_group", "topk_group") if c.get(name) == 0), None)
    why = f"{none} is 0" if none else why_not_in_groups(c, found)
    if not why and (chosen > number or found // number * chosen < wanted):
        why = f"the router chooses {chosen} of {number} groups, and {wanted} of their experts"
    return why and f"n_routed_experts is {found}: {why}; {NOBODY}"


GROUPS = (
    derived("n_routing_groups", lambda c, model: groups(c)[0], "n_group", to_field=lambda n: 1 if n == -1 else n),
    derived("topk_routing_group", lambda c, model: groups(c)[1], "topk_group", to_field=lambda n: 1 if n == -1 else n),
    unless(groups_limit),
)


def v2_limit(c, model):
    """Groups don't change the choice where as many of them are chosen as experts: the best k experts lie in the k best groups at most."""
    number, chosen = expert_groups(c)
    if c.get("topk_method") == "group_limited_greedy" and number != chosen < c.size("num_experts_per_tok"):
        return f"topk_method is 'group_limited_greedy' with {chosen} of {number} groups: MaxText's DeepSeek V2 chooses among all experts; logits differ. There is no way round"
    return None


def mlp_width(c, model):
    """The dense layers' width. Where there are none, as in a cut, MaxText wants the experts' (configs/types.py, 0.2.5)."""
    return c.size("intermediate_size" if dense_prefix(c) else "moe_intermediate_size")


SHARED = (
    *SIZES, derived("base_mlp_dim", mlp_width, "intermediate_size"), *activation(), eps(), CONTEXT, *YARN, *TIED,
    *expert_lines("n_routed_experts"),
    size("shared_experts", "n_shared_experts"),
    derived("first_num_dense_layers", lambda c, model: dense_prefix(c), "first_k_dense_replace"),
    count("q_lora_rank", "q_lora_rank"),
    *(size(name, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    fixed("attention_type", "mla"),
    latent_eps(),
)  # fmt: skip
V2 = (
    *SHARED, *architecture("deepseek", "DeepseekV2ForCausalLM", "deepseek_v2"),
    real("routed_scaling_factor", "routed_scaling_factor", default=1.0),
    fixed("routed_score_func", "softmax"),
    fixed("routed_bias", False),
    unless(v2_limit),
)  # fmt: skip
SIGMOID = (
    *SHARED,
    real("routed_scaling_factor", "routed_scaling_factor", default=2.5),
    fixed("routed_score_func", "sigmoid"),
    fixed("routed_bias", True),
    NORMED,
)  # fmt: skip
INTERLEAVED = only(
    "rope_interleave", True, "MaxText's layer turns pairs that lie side by side; attention is wrong. There is no way round", default=True)
V3 = (*SIGMOID, *GROUPS, INTERLEAVED, *architecture("deepseek", "DeepseekV3ForCausalLM", "deepseek_v3"), derived("use_indexer", lambda c, model: False))
INDEX = (
    fixed("use_indexer", True),
    WHOLE_LOSS,
    size("indexer_n_heads", "index_n_heads"),
    size("indexer_head_dim", "index_head_dim"),
    size("indexer_topk", "index_topk", default=2048),
)
V32 = (*SIGMOID, *GROUPS, *architecture("deepseek", "DeepseekV32ForCausalLM", "deepseek_v32"), *INDEX)
K2 = (*SIGMOID, *GROUPS, INTERLEAVED, *architecture("deepseek", "DeepseekV3ForCausalLM", "kimi_k2"), derived("use_indexer", lambda c, model: False))

def copies(c, layout):
    c = text_part(c)
    mtp = f"model.layers.{c.size('num_hidden_layers')}."
    tied = tied_head(c, layout)
    return tied | {f"{mtp}embed_tokens.weight": "model.embed_tokens.weight", f"{mtp}shared_head.head.weight": tied.get("lm_head.weight", "lm_head.weight")}


FAMILY = Family(
    name="deepseek",
    models={
        "deepseek2-[0-9]*": ("deepseek_v2",),
        "deepseek3-*": ("deepseek_v3",),
        "deepseek3.2-*": ("deepseek_v32",),
        "kimi-k2-[0-9]*": ("kimi_k2", "deepseek_v3", "kimi_k25"),
    },
    dims=dims,
    stacks=stacks,
    earlier={"e591f30": functools.partial(stacks, is_newest=False)},
    drops=drops,
    copies=copies,
    configuration={"deepseek_v2": V2, "deepseek_v3": V3, "deepseek_v32": V32, "kimi_k2": K2, "kimi_k25": inside("text_config", K2)},
    mtp=True,
    aliases=WITHOUT_HEAD | {"language_model": "", "language_model.model.blocks": "model.layers", "model.language_model": "model"},
    releases="DeepSeek V2, V2-Lite, V3, R1, V3.1, V3.2, Kimi K2, K2-Thinking, K2.5, K2.6",
    checked=("deepseek2-16b", "deepseek3-671b", "deepseek3.2-671b", "kimi-k2-1t"),
    missing="Kimi K2.5's vision tower",
)
