"""Gemma 3: five local layers and a global one repeat, norms on both sides of attention and MLP, a SigLIP vision tower.

MaxText folds into the weights what Hugging Face's model computes: norms hold 1 + w (the vision tower's don't), and the embedding
is multiplied by √embed rounded to bfloat16. The query isn't scaled: MaxText's layer does it, by the model's name
(AI-Hypercomputer/maxtext, src/maxtext/models/gemma3.py, `get_query_pre_attn_scalar`, e591f30). The layers behind the last whole
cycle aren't stacked. Text-only releases have `config.json` and names without the outer level.
"""

from weightbeam.model_mappings.blocks import (
    attention,
    check_cycle,
    common_dims,
    common_drops,
    cycles,
    gated_mlp,
    sandwich_norms,
    text_part,
    tied_head,
    top,
    with_defaults,
)
from weightbeam.model_mappings.config import ConfigError
from weightbeam.model_mappings.configuration import (
    copied,
    derived,
    fixed,
    inside,
    of_tower,
    only,
    positive,
    real,
    size,
    unless,
    written,
)
from weightbeam.model_mappings.family import Family, Tower
from weightbeam.model_mappings.lines import CONTEXT, LAYERS, MLP, activation, architecture, fixed_eps, tied
from weightbeam.model_mappings.ops import Scale, Shift
from weightbeam.model_mappings.rope import FULL, linear_factor, nested_rope, only_kinds, passed_over, rope_of, theta
from weightbeam.model_mappings.rules import rule, stack
from weightbeam.model_mappings.towers import layer_norm, linear_layer, tower_activation, tower_eps

# of transformers v5.23.0, configuration_gemma3.py; the hub's gemma-3-4b-it names none of them
DEFAULTS = dict(vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256, tie_word_embeddings=True)
CYCLE = ("sliding_attention",) * 5 + ("full_attention",)
VOCAB = 262_144  # of MaxText's models; the hub's rows behind them stand for images, which replace them
ONE = Shift(1.0)
TOWER, HF_TOWER = "vision_encoder/Gemma3VisionEncoderLayer_0", "vision_tower.vision_model."


def text(c):
    """The text model's part of `config.json`, and the prefix of its tensors."""
    return with_defaults(text_part(c), **DEFAULTS), "language_model.model." if "text_config" in c else "model."


def dims(c, layout):
    d = common_dims(text(c)[0])
    if not layout.multimodal:
        return d
    v = c.part("vision_config")
    embed, heads, patch = v.size("hidden_size"), v.size("num_attention_heads"), v.size("patch_size", 16)
    return d | dict(
        v_embed=embed, v_heads=heads, v_dim=embed // heads, v_mlp=v.size("intermediate_size"), rgb=v.size("num_channels", 3),
        patch_rows=patch, patch_columns=patch, positions=(v.size("image_size", 224) // patch) ** 2,
    )  # fmt: skip


def check_query_scale(c, d, layout):
    """MaxText's layer multiplies the query by 1/√dim, or by 1/√(embed / heads) if its model is gemma3-27b."""
    by_dim, by_embed = {d["dim"]}, {d["embed"] // d["heads"]}
    scales = by_dim | by_embed if layout.model is None else by_embed if layout.model == "gemma3-27b" else by_dim
    if (scalar := c.size("query_pre_attn_scalar")) not in scales:
        theirs = " or ".join(f"1/√{n}" for n in sorted(scales))
        raise ConfigError(f"config.json: 'query_pre_attn_scalar' is {scalar}, but {layout.model or 'MaxText'} multiplies the query by {theirs}")


def vision(c):
    """SigLIP without its pooling head, and the projector in front of the text model. The blocks aren't stacked, whatever the layout."""
    attn, block = "MultiHeadDotProductAttention_0", []
    for target, source, names in (("query", "q", "q_heads kv"), ("key", "k", "kv_heads kv_head_dim"), ("value", "v", "kv_heads kv_head_dim")):
        block += [
            rule(f"{attn}/{target}/kernel", f"self_attn.{source}_proj.weight", "(v_heads v_dim) v_embed -> v_embed v_heads v_dim", f"embed_attn {names}"),
            rule(f"{attn}/{target}/bias", f"self_attn.{source}_proj.bias", "(v_heads v_dim) -> v_heads v_dim", names),
        ]
    block += [
        rule(f"{attn}/out/kernel", "self_attn.out_proj.weight", "v_embed (v_heads v_dim) -> v_heads v_dim v_embed", "heads kv embed_attn"),
        rule(f"{attn}/out/bias", "self_attn.out_proj.bias", "v_embed", "embed_attn"),
        *linear_layer("MlpBlockViT_0/Dense_0", "mlp.fc1", "v_mlp", "v_embed"),
        *linear_layer("MlpBlockViT_0/Dense_1", "mlp.fc2", "v_embed", "v_mlp"),
        *layer_norm("LayerNorm_0", "layer_norm1", "v_embed"),
        *layer_norm("LayerNorm_1", "layer_norm2", "v_embed"),
    ]
    around = [
        rule("embedding/kernel", "embeddings.patch_embedding.weight", "v_embed rgb patch_rows patch_columns -> patch_rows patch_columns rgb v_embed", ""),
        rule("embedding/bias", "embeddings.patch_embedding.bias", "v_embed", ""),
        rule("pos_embedding", "embeddings.position_embedding.weight", "positions v_embed -> 1 positions v_embed", ""),
        *layer_norm("Transformer/encoder_norm", "post_layernorm", "v_embed"),
    ]
    projector = [
        rule("mm_input_projection/w", "mm_input_projection_weight", "v_embed embed", ""),
        rule("mm_soft_embedding_norm/scale", "mm_soft_emb_norm.weight", "v_embed", "norm", ONE),
    ]
    blocks = range(c.part("vision_config").size("num_hidden_layers"))
    return [
        stack(TOWER, HF_TOWER, 0, around),
        *(stack(f"{TOWER}/Transformer/encoderblock_{i}", HF_TOWER + "encoder.layers.{layer}.", i, block) for i in blocks),
        stack("vision_encoder/VisionEmbedder_0", "multi_modal_projector.", 0, projector),
    ]


def stacks(c, layout):
    t, hf = text(c)
    check_cycle(t, CYCLE)
    check_query_scale(t, common_dims(t), layout)
    table = [
        *attention(),
        rule("self_attention/query_norm/scale", "self_attn.q_norm.weight", "dim", "norm", ONE),
        rule("self_attention/key_norm/scale", "self_attn.k_norm.weight", "dim", "norm", ONE),
        *gated_mlp(),
        *sandwich_norms(ONE),
    ]
    return [
        top(t, layout, Scale(t.size("hidden_size") ** 0.5, "bfloat16"), hf=hf, norm_ops=(ONE,)),
        *cycles(layout, t.size("num_hidden_layers"), [table] * len(CYCLE), hf + "layers.{layer}."),
        *(vision(c) if layout.multimodal else ()),
    ]


def drops(c, layout):
    if layout.multimodal:
        tower = {f"{HF_TOWER}head.*": Tower("SigLIP's pooling head, which neither Gemma 3 nor MaxText uses", {"vision_config.vision_use_head": False})}
    else:
        tower = dict.fromkeys(("vision_tower.*", "multi_modal_projector.*"), Tower("vision tower, convert it with --multimodal true"))
    t, hf = text(c)
    return common_drops(t, layout, hf) | tower


def note(c, layout):
    rows = text(c)[0].size("vocab_size")
    if layout.vocab or rows <= VOCAB:
        return ""
    return f"the embedding has {rows:,} rows, MaxText's Gemma 3 has {VOCAB:,}: give --vocab_size {VOCAB}, or run MaxText with vocab_size={rows}"


LOCAL = "sliding_attention"


def local_theta(c, model):
    return positive((nested_rope(c, LOCAL) or {}).get("rope_theta", c.get("rope_local_base_freq", 10_000)))


def query_scalar(keys):
    return keys["base_emb_dim"] // keys["base_num_query_heads"] if keys.get("model_name") == "gemma3-27b" else keys["head_dim"]


def is_model(c, model):
    t = text(c)[0]
    by_name = t.count("hidden_size") // t.size("num_attention_heads") if model == "gemma3-27b" else t["head_dim"]
    return t["query_pre_attn_scalar"] == by_name


TEXT = (
    size("base_emb_dim", "hidden_size"),
    *(size(key, field, default=DEFAULTS[field]) for key, field in dict(
        base_num_query_heads="num_attention_heads", base_num_kv_heads="num_key_value_heads", head_dim="head_dim", vocab_size="vocab_size").items()),
    LAYERS, MLP, *activation("hidden_activation", "gelu_pytorch_tanh"), *fixed_eps(), CONTEXT,
    *(fixed(key, True) for key in ("use_post_attn_norm", "use_post_ffw_norm")),
    size("sliding_window_size", "sliding_window", default=4096),
    real("final_logits_soft_cap", "final_logit_softcapping", default=None, none=0),
    real("attn_logits_soft_cap", "attn_logit_softcapping", default=None, none=0),
    derived("local_rope_max_timescale", local_theta, f"rope_parameters.{LOCAL}.rope_theta"),
    written(f"rope_parameters.{LOCAL}.rope_type", "default"),
    theta(FULL, 1_000_000),
    derived("rope_linear_scaling_factor", lambda c, model: linear_factor(rope_of(c, FULL)), f"rope_parameters.{FULL}.factor"),
    written(f"rope_parameters.{FULL}.rope_type", "linear"),
    only_kinds("default", "linear", kind=FULL), only_kinds("default", kind=LOCAL, of=nested_rope), unless(passed_over),
    copied("query_pre_attn_scalar", query_scalar),
)  # fmt: skip
HEAD = tied(default=True)
VISION = (*inside("vision_config", (
    size("hidden_size_for_vit", "hidden_size"),
    size("intermediate_size_for_vit", "intermediate_size"),
    size("num_hidden_layers_for_vit", "num_hidden_layers"),
    size("num_attention_heads_for_vit", "num_attention_heads"),
    size("patch_size_for_vit", "patch_size", default=16),
    size("conv_stride_for_vit", "patch_size", default=16),
    size("image_size_for_vit", "image_size", default=224),
    size("num_channels_for_vit", "num_channels", default=3),
    fixed("vision_encoder_block", "gemma3"),
), when=bool), *of_tower("vision_config", (
    tower_activation("vision_config.hidden_act"), tower_eps("layer_norm_eps"),
    only("mm_tokens_per_image", 256, "MaxText's vision tower makes 256 tokens of an image whatever its configuration says. There is no way round", default=256),
)))  # fmt: skip

FAMILY = Family(
    name="gemma3",
    models=dict.fromkeys(("gemma3-4b", "gemma3-12b", "gemma3-27b"), ("gemma3", "gemma3_text")),
    dims=dims,
    stacks=stacks,
    drops=drops,
    copies=lambda c, layout: tied_head(text(c)[0], layout, text(c)[1]),
    configuration={
        "gemma3_text": (*TEXT, HEAD, *architecture("gemma3", "Gemma3ForCausalLM", "gemma3_text")),
        "gemma3": (*inside("text_config", TEXT), HEAD, *architecture("gemma3", "Gemma3ForConditionalGeneration", "gemma3"), *VISION),
    },
    is_model=is_model,
    releases="Gemma 3 4B, 12B, 27B",
    checked=("gemma3-4b", "gemma3-27b"),
    towers="vision",
    aliases={
        "model.language_model": "language_model.model",
        "model.vision_tower": "vision_tower.vision_model",
        "model.vision_tower.vision_model": "vision_tower.vision_model",
        "model.multi_modal_projector": "multi_modal_projector",
        "language_model.lm_head": "lm_head",
        **{f"vision_tower.{part}": HF_TOWER + part for part in ("embeddings", "encoder", "post_layernorm", "head")},  # as transformers 5.8 and later save
    },
    note=note,
)
