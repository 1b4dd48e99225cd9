"""Gemma 4 26B-A4B (experts beside a dense MLP), 31B and 12B: five local layers and a global one repeat.

* MaxText scans twice, over the blocks of six and over the five local layers of each (`Gemma4ScannableBlock`). transformers
  makes the last layer a global one in any case (`Gemma4TextConfig.__post_init__`), MaxText every sixth. So layers behind the
  last whole block would be other ones in each, and are refused; MaxText's converter and its model don't agree on them either.
* The global layers have heads of another size, and with `attention_k_eq_v` their keys are their values too: neither side has
  a value projection. transformers 5 saves their sizes as `per_layer_config`; the hub's `config.json` has `global_head_dim`.
* Norms are plain weights, not 1 + w. √embed is folded into the embedding, not rounded to bfloat16 first.
* The hub fuses the experts; quantised releases have one tensor each, some below `moe.` (vllm-project/vllm, #39045 and #41206).
* MaxText's vision tower has no clipped linear layers. Where the release doesn't standardize, its std_scale and std_bias are
  constants. The position table is summed over x and y, its first axis and MaxText's second (`factorized_posemb`).
* 12B (`gemma4_unified`) has the dense text model and no tower: an embedder takes squares of patches straight to the projector.
  Its position table lies as MaxText's does. Its norms add 1e-5 in transformers (`torch.nn.LayerNorm`), 1e-6 in MaxText, which has
  it in a branch only (agagik-gemma4-12b, 85b12b8, `Gemma4UnifiedVisionEmbedder`; its trees were made by running that).

AI-Hypercomputer/maxtext, src/maxtext/models/gemma4.py and gemma4_vision.py, checkpoint_conversion/utils/param_mapping.py,
e591f30; huggingface/transformers, models/{gemma4,gemma4_unified}/{configuration,modeling}_*.py, v5.23.0.
"""

import numpy as np

from weightbeam.model_mappings.blocks import (
    check_cycle,
    common_dims,
    common_drops,
    cycles,
    experts,
    gated_mlp,
    is_fused,
    sandwich_norms,
    tied_head,
    top,
    with_defaults,
)
from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.configuration import (
    derived,
    fixed,
    inside,
    number,
    of_tower,
    only,
    positive,
    real,
    size,
    truth,
    written,
)
from weightbeam.model_mappings.family import Family, Tower
from weightbeam.model_mappings.lines import CONTEXT, LAYERS, MLP, VOCAB, WIDTHS, activation, fixed_eps, tied
from weightbeam.model_mappings.ops import Scale
from weightbeam.model_mappings.rope import FULL, only_kinds, sole_rope
from weightbeam.model_mappings.rules import rule, stack
from weightbeam.model_mappings.towers import layer_norm, linear_layer, tower_activation, tower_eps, tower_theta

HF = "model.language_model."
LAYER = HF + "layers.{layer}."
LOCAL, GLOBAL = "sliding_attention", FULL
CYCLE = (LOCAL,) * 5 + (GLOBAL,)
DEFAULTS = dict(num_key_value_heads=4, head_dim=256, global_head_dim=512, vocab_size_per_layer_input=262_144, hidden_size_per_layer_input=256)
VISION_DEFAULTS = dict(num_key_value_heads=12, head_dim=64, patch_size=16, position_embedding_size=10_240)
UNIFIED_VISION_DEFAULTS = dict(mm_embed_dim=3840, mm_posemb_size=1120, output_proj_dims=3840)
TEXT_PARTS = ("embed_tokens", "layers", "norm", "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
ALIASES = {f"model.{part}": HF + part for part in TEXT_PARTS}  # of a text-only release
TOWER, PROJECTOR = "vision_encoder/Gemma4VisionEncoderLayer_0", "vision_encoder/Gemma4VisionProjector_0"
EMBEDDER = "vision_encoder/Gemma4UnifiedVisionEmbedder_0"
EMBEDDED = ("patch_ln1", "patch_dense", "patch_ln2", "pos_embedding", "pos_norm")  # the embedder's tensors
UNIFIED_ALIASES = {  # transformers' names in memory
    **{f"model.embed_vision.{name}": f"model.vision_embedder.{name}" for name in EMBEDDED},
    "model.embed_vision.multimodal_embedder": "model.embed_vision",
}


def text(c):
    """The text model's part of `config.json`: all of it in a text-only release. Whether the head is tied, the outer level says."""
    tied = with_defaults(c, tie_word_embeddings=True)["tie_word_embeddings"]
    part = c.part("text_config") if "text_config" in c else c
    return Config(with_defaults(part, **DEFAULTS) | {"tie_word_embeddings": tied})


def is_unified(c):
    """12B: an embedder in place of the towers."""
    return c["model_type"].startswith("gemma4_unified")


def is_small(c):
    """E2B and E4B: their layers have inputs of their own."""
    return not is_unified(c) and text(c).count("hidden_size_per_layer_input") > 0


def text_dims(t, cycle):
    n = t.size("num_hidden_layers")
    check_cycle(t, cycle)
    if n % len(cycle):
        raise ConfigError(f"config.json: 'num_hidden_layers' is {n}; MaxText has a global layer every {len(cycle)} layers, transformers also as the last")
    dim, kv = global_sizes(t, range(len(cycle) - 1, n, len(cycle)))
    return common_dims(t) | dict(global_dim=dim, global_kv=kv)


def global_sizes(t, layers):
    """The size of a head of the global `layers`, and the number of their key and value heads."""
    kv = t.size("num_key_value_heads")
    if "per_layer_config" not in t:
        return t.size("global_head_dim"), t.size("num_global_key_value_heads", kv) if t.flag("attention_k_eq_v") else kv
    given = t.part("per_layer_config")
    sizes = [given.part(layer) for layer in given] or [Config()]
    ids = sorted(int(layer) if layer.isdecimal() else -1 for layer in given)
    if ids not in ([], [*layers]) or any(own != sizes[0] for own in sizes) or not {"head_dim", "num_key_value_heads"}.issuperset(sizes[0]):
        raise ConfigError("config.json: MaxText's global layers differ from the others, all alike, in head_dim and num_key_value_heads; 'per_layer_config' says something else")
    return sizes[0].size("head_dim", t.size("head_dim")), sizes[0].size("num_key_value_heads", kv)


def dims(c, layout):
    t = text(c)
    if t.count("num_kv_shared_layers"):
        raise ConfigError("config.json: 'num_kv_shared_layers' isn't 0; in MaxText only Gemma 4 E2B and E4B share keys and values between layers")
    moe = dict(expert=t.size("num_experts"), moe_mlp=t.size("moe_intermediate_size")) if t.flag("enable_moe_block") else {}
    return text_dims(t, CYCLE) | moe | (vision_dims(c) if layout.multimodal else {})


def attention(kind, key=True, value=True):
    dim, kv = ("global_dim", "global_kv") if kind == GLOBAL else ("dim", "kv")
    return [
        rule("self_attention/query/kernel", "self_attn.q_proj.weight", f"(heads {dim}) embed -> embed heads {dim}", "embed_attn q_heads kv"),
        rule("self_attention/query_norm/scale", "self_attn.q_norm.weight", dim, "norm"),
        rule("self_attention/key/kernel", "self_attn.k_proj.weight", f"({kv} {dim}) embed -> embed {kv} {dim}", "embed_attn kv_heads kv_head_dim", when=key),
        rule("self_attention/key_norm/scale", "self_attn.k_norm.weight", dim, "norm", when=key),
        rule("self_attention/value/kernel", "self_attn.v_proj.weight", f"({kv} {dim}) embed -> embed {kv} {dim}", "embed_attn kv_heads kv_head_dim", when=value),
        rule("self_attention/out/kernel", "self_attn.o_proj.weight", f"embed (heads {dim}) -> heads {dim} embed", "heads kv embed_attn"),
    ]


AROUND = [*sandwich_norms(), rule("layer_scalar", "layer_scalar", "1", "-")]  # attention and MLP


def routed(t, layout):
    """The experts, and the dense MLP beside them that MaxText calls shared."""
    block = "mlp/moe_block/MoeBlock_0"
    # transformers has them so, and reads no others; what nobody has written yet is for it
    fused = not layout.names or is_fused(layout, f"{HF}layers.0.experts")
    norms = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    return [
        *gated_mlp("mlp/moe_block/shared_experts"),
        *(rule(f"mlp/{norm}/scale", f"{norm}.weight", "embed", "norm") for norm in norms),
        rule("mlp/pre_forward_scale_2", "router.scale", "embed", "embed"),
        rule(f"{block}/gate/kernel", "router.proj.weight", "expert embed -> embed expert", "embed_moe -"),
        rule(f"{block}/per_expert_scale", "router.per_expert_scale", "expert", "exp"),
        *experts(block, "experts", t.size("moe_intermediate_size"), fused),
    ]


def stacks(c, layout):
    t = text(c)
    n, mlp = t.size("num_hidden_layers"), routed(t, layout) if t.flag("enable_moe_block") else gated_mlp()
    local = [*attention(LOCAL), *AROUND, *mlp]
    whole = [*attention(GLOBAL, value=not t.flag("attention_k_eq_v")), *AROUND, *mlp]
    out = [top(t, layout, Scale(t.size("hidden_size") ** 0.5), hf=HF)]
    if layout.scan:
        blocks = np.arange(n).reshape(-1, len(CYCLE))
        out.append(stack("decoder/scanned_blocks/local_layers", LAYER, blocks[:, :-1], local, "layers local_layers"))
        out.append(stack("decoder/scanned_blocks/global_layer", LAYER, blocks[:, -1], whole, "layers"))
    else:
        out += cycles(layout, n, [local] * 5 + [whole], LAYER)
    return out + (vision(c) if layout.multimodal else [])


def vision(c):
    v = c.part("vision_config")
    return embedder() if is_unified(c) else tower(with_defaults(v, **VISION_DEFAULTS))


def vision_dims(c):
    v = c.part("vision_config")
    return embedder_dims(with_defaults(v, **UNIFIED_VISION_DEFAULTS)) if is_unified(c) else tower_dims(with_defaults(v, **VISION_DEFAULTS))


def patch_side(v, model=None):
    """Pixels along a side of what the embedder takes: a square of patches."""
    return v.size("patch_size", 16) * v.size("pooling_kernel_size", 3)


def embedder_dims(v):
    embed, side = v.size("mm_embed_dim"), patch_side(v)
    if embed != v.size("output_proj_dims") or side != v.size("model_patch_size", side):
        raise ConfigError("config.json: vision_config contradicts itself: mm_embed_dim and output_proj_dims are one size, model_patch_size is patch_size times pooling_kernel_size")
    return dict(v_embed=embed, patch=3 * side**2, xy=2, position=v.size("mm_posemb_size"))


def embedder():
    table = [
        *layer_norm("patch_ln1", "patch_ln1", "patch"),
        *linear_layer("patch_dense", "patch_dense", "v_embed", "patch", "embed", "mlp"),
        *layer_norm("patch_ln2", "patch_ln2", "v_embed"),
        rule("pos_emb_param", "pos_embedding", "position xy v_embed", ""),
        *layer_norm("pos_norm", "pos_norm", "v_embed"),
    ]
    return [stack(EMBEDDER, "model.vision_embedder.", 0, table), projector()]


def projector():
    table = [rule("projection/kernel", "embedding_projection.weight", "embed v_embed -> v_embed embed", "embed mlp")]
    return stack(PROJECTOR, "model.embed_vision.", 0, table)


def tower_dims(v):
    embed, heads, dim = v.size("hidden_size"), v.size("num_attention_heads"), v.size("head_dim")
    if embed != heads * dim or heads != v.size("num_key_value_heads") or v.flag("use_clipped_linears"):
        raise ConfigError("config.json: MaxText's vision tower has heads that fill hidden_size, as many for keys, and no clipped linear layers; vision_config differs")
    return dict(
        v_embed=embed, v_heads=heads, v_dim=dim, v_mlp=v.size("intermediate_size"), patch=3 * v.size("patch_size") ** 2, xy=2,
        position=v.size("position_embedding_size"),
    )  # fmt: skip


def tower(v):
    scale, bias = ("std_scale", "std_bias") if v.flag("standardize") else (None, None)
    ends = [
        rule("vision_entry/input_projection/kernel", "patch_embedder.input_proj.weight", "v_embed patch -> patch v_embed", ""),
        rule("vision_entry/pos_emb_param", "patch_embedder.position_embedding_table", "xy position v_embed -> position xy v_embed", ""),
        rule("std_scale", scale, "v_embed", "-", fill=None if scale else 1.0),
        rule("std_bias", bias, "v_embed", "-", fill=None if bias else 0.0),
    ]
    names = dict(query="q_heads kv", key="kv_heads kv_head_dim", value="kv_heads kv_head_dim")
    layer = [
        *(rule(f"attention/{to}/kernel", f"self_attn.{to[0]}_proj.linear.weight", "(v_heads v_dim) v_embed -> v_embed v_heads v_dim", f"embed_attn {names[to]}") for to in names),
        rule("attention/out/kernel", "self_attn.o_proj.linear.weight", "v_embed (v_heads v_dim) -> v_heads v_dim v_embed", "heads kv embed_attn"),
        rule("attention/query_norm/scale", "self_attn.q_norm.weight", "v_dim", "norm"),
        rule("attention/key_norm/scale", "self_attn.k_norm.weight", "v_dim", "norm"),
        rule("pre_attention_norm/scale", "input_layernorm.weight", "v_embed", "norm"),
        rule("post_attention_norm/scale", "post_attention_layernorm.weight", "v_embed", "norm"),
        rule("pre_ffw_norm/scale", "pre_feedforward_layernorm.weight", "v_embed", "norm"),
        rule("post_ffw_norm/scale", "post_feedforward_layernorm.weight", "v_embed", "norm"),
        rule("mlp/wi_0/kernel", "mlp.gate_proj.linear.weight", "v_mlp v_embed -> v_embed v_mlp", "embed mlp"),
        rule("mlp/wi_1/kernel", "mlp.up_proj.linear.weight", "v_mlp v_embed -> v_embed v_mlp", "embed mlp"),
        rule("mlp/wo/kernel", "mlp.down_proj.linear.weight", "v_embed v_mlp -> v_mlp v_embed", "mlp embed"),
    ]
    return [
        stack(TOWER, "model.vision_tower.", 0, ends),
        *(stack(f"{TOWER}/layer_{i}", "model.vision_tower.encoder.layers.{layer}.", i, layer) for i in range(v.size("num_hidden_layers"))),
        projector(),
    ]


def drops(c, layout):
    vision = Tower("vision tower, convert it with --multimodal true", {"vision_config": None})
    audio = Tower("MaxText has no audio tower for Gemma 4", {"audio_config": None})
    found = common_drops(text(c), layout, HF) | {"model.audio_tower.*": audio, "model.embed_audio.*": audio}
    names = ("vision_embedder" if is_unified(c) else "vision_tower", "embed_vision")
    return found | ({} if layout.multimodal else {f"model.{name}.*": vision for name in names})


def own_sizes(t, model):
    """(head_dim, key heads) of the global layers, 0 where they have as many as the others."""
    dim, kv = global_sizes(with_defaults(t, **DEFAULTS), ids(t))
    return dim, 0 if kv == with_defaults(t, **DEFAULTS)["num_key_value_heads"] else kv


def ids(t):
    types, n = t.get("layer_types"), t.size("num_hidden_layers")
    return [i for i in range(n) if (types[i] == GLOBAL if isinstance(types, list) and len(types) == n else i % 6 == 5)]


def thetas(t, kind, default):
    field = "rope_parameters" if t.get("rope_scaling") is None else "rope_scaling"  # which takes the other's place
    said = t.get(field)
    if said is not None and not (isinstance(said, dict) and all(isinstance(said.get(each), dict) for each in (LOCAL, GLOBAL))):
        # transformers v5.23.0, configuration_gemma4.py, `convert_rope_params_to_dict`: no other spelling is read
        raise ConfigError(f"config.json: {field!r} should hold {LOCAL} and {GLOBAL}, or transformers can't run the model; it says {said!r}")
    return positive((sole_rope(t, kind) or {}).get("rope_theta", default))


def turned(t, model):
    """How much of a head turns in layers that look at all: a quarter where nothing is said of any layers, else all of it unless it is said."""
    own = sole_rope(t, GLOBAL)
    return number(0.25 if own is None else own.get("partial_rotary_factor", 1))


SHARED = (
    *WIDTHS[:2], size("base_num_kv_heads", "num_key_value_heads", default=DEFAULTS["num_key_value_heads"]),
    LAYERS, VOCAB, MLP, *activation("hidden_activation", "gelu_pytorch_tanh"), *fixed_eps(), CONTEXT,
    size("head_dim", "head_dim", default=DEFAULTS["head_dim"]),
    derived("global_head_dim", lambda t, model: own_sizes(t, model)[0], "global_head_dim"),
    derived("global_num_kv_heads", lambda t, model: own_sizes(t, model)[1], "num_global_key_value_heads", to_field=lambda n: n or None),
    *(fixed(key, True) for key in ("use_post_attn_norm", "use_post_ffw_norm")),
    fixed("v_norm_with_scale", False),
    size("sliding_window_size", "sliding_window", default=lambda t: 1024 if t.get("model_type") == "gemma4_unified_text" else 512),
    real("final_logits_soft_cap", "final_logit_softcapping", default=None, none=0),
    derived("local_rope_max_timescale", lambda t, model: thetas(t, LOCAL, 10_000), f"rope_parameters.{LOCAL}.rope_theta"),
    written(f"rope_parameters.{LOCAL}.rope_type", "default"),
    derived("global_rope_max_timescale", lambda t, model: thetas(t, GLOBAL, 1_000_000), f"rope_parameters.{GLOBAL}.rope_theta"),
    derived("rope_max_timescale", lambda t, model: thetas(t, GLOBAL, 1_000_000)),
    written(f"rope_parameters.{GLOBAL}.rope_type", "proportional"),
    derived("global_rope_proportion", turned, f"rope_parameters.{GLOBAL}.partial_rotary_factor"),
    derived("local_rope_proportion", lambda t, model: 1),
    only_kinds("default", kind=LOCAL, of=sole_rope), only_kinds("proportional", kind=GLOBAL, of=sole_rope),
)  # fmt: skip
HEAD = tied(text=text)
POOLED = "MaxText makes a token of 3 by 3 patches whatever its configuration says; an image has other tokens, and not as many. There is no way round"
VISION = (*inside("vision_config", (
    size("hidden_size_for_vit", "hidden_size"),
    size("intermediate_size_for_vit", "intermediate_size"),
    size("num_hidden_layers_for_vit", "num_hidden_layers"),
    size("num_attention_heads_for_vit", "num_attention_heads"),
    size("patch_size_for_vit", "patch_size", default=16),
    size("conv_stride_for_vit", "patch_size", default=16),
    size("num_position_embeddings_for_vit", "position_embedding_size", default=10_240),
    size("vision_output_length", "default_output_length", default=280),
    tower_theta(100),
    fixed("vision_encoder_block", "gemma4"),
), when=bool), *of_tower("vision_config", (
    tower_activation("vision_config.hidden_activation"), tower_eps("rms_norm_eps"), only("vision_config.pooling_kernel_size", 3, POOLED, default=3),
)))  # fmt: skip
UNIFIED_VISION = (*inside("vision_config", (
    size("hidden_size_for_vit", "mm_embed_dim", default=UNIFIED_VISION_DEFAULTS["mm_embed_dim"]),
    derived("patch_size_for_vit", patch_side),
    derived("conv_stride_for_vit", patch_side),
    size("num_position_embeddings_for_vit", "mm_posemb_size", default=UNIFIED_VISION_DEFAULTS["mm_posemb_size"]),
    size("vision_output_length", "num_soft_tokens", default=280),
    fixed("vision_encoder_block", "gemma4_unified"),
), when=bool), *of_tower("vision_config", (tower_eps("rms_norm_eps"),)))  # fmt: skip


def has_experts(t):
    return bool(t.get("enable_moe_block"))


LARGE = (
    *SHARED,
    size("num_experts", "num_experts", when=has_experts),
    size("num_experts_per_tok", "top_k_experts", when=has_experts),
    size("base_moe_mlp_dim", "moe_intermediate_size", when=has_experts),
    derived("shared_experts", lambda t, model: int(has_experts(t)), "enable_moe_block", to_field=bool),
    derived("norm_topk_prob", lambda t, model: True, when=has_experts),
    truth("share_kv_projections", "attention_k_eq_v"),
    written("hidden_size_per_layer_input", 0),
    fixed("decoder_block", "gemma4"),
)


def composite(text_lines, kind="gemma4", name="Gemma4", vision_lines=VISION):
    """The lines for each `model_type`: a text model alone, and one with towers."""
    return {
        f"{kind}_text": (*text_lines, HEAD, written("architectures", [f"{name}ForCausalLM"]), written("model_type", f"{kind}_text")),
        kind: (*inside("text_config", text_lines), HEAD, *vision_lines, written("architectures", [f"{name}ForConditionalGeneration"]), written("model_type", kind)),
    }


TOWERED, UNIFIED = ("gemma4", "gemma4_text"), ("gemma4_unified", "gemma4_unified_text")
BRANCH = "MaxText has gemma4-12b in a branch only, agagik-gemma4-12b (85b12b8), and neither in e591f30 nor in 0.2.5"

FAMILY = Family(
    name="gemma4",
    models={"gemma4-12b": UNIFIED, "gemma4-26b": TOWERED, "gemma4-31b": TOWERED},
    dims=dims,
    stacks=stacks,
    drops=drops,
    copies=lambda c, layout: tied_head(text(c), layout, HF),
    configuration=composite(LARGE) | composite(LARGE, "gemma4_unified", "Gemma4Unified", UNIFIED_VISION),
    releases="Gemma 4 12B, 26B-A4B, 31B",
    trees="e591f30 and 0.2.5; 12B: branch agagik-gemma4-12b (85b12b8), built; its trainer *not run*",
    checked=("gemma4-12b", "gemma4-26b", "gemma4-31b"),
    missing="audio",
    towers="vision",
    note=lambda c, layout: BRANCH if is_unified(c) else "",
    aliases=ALIASES | UNIFIED_ALIASES | {f"{prefix}layers.*.moe.experts": f"{HF}layers.*.experts" for prefix in ("model.", HF)},
    fits=lambda c: not is_small(c),
)
