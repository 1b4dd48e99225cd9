"""Qwen 3 VL, dense and with experts: Qwen 3's text model, and a vision tower some of whose layers reach the text model (deepstack).
Under other names the dense one is the reasoner of Cosmos 3, and Weaver's.

The hub's files hold the fused experts as MaxText does, (expert, embed, 2 · moe_mlp) and (expert, moe_mlp, embed). transformers v5
saves them transposed under the same names, and reads both (huggingface/transformers, conversion_mapping.py, `check_dims=True`,
v5.23.0). Shapes tell: whatever the sizes, no pair of tensors fits both ways. One tensor for each expert is read too. Whether the
head is tied, the outer flag says; transformers writes another into `text_config` that it doesn't use. MaxText refuses to scan a model
with deepstack, its text alone included (AI-Hypercomputer/maxtext, src/maxtext/configs/types.py, e591f30 and 0.2.5).

Cosmos3-Nano and -Super have the reasoner's tensors without a prefix, attention as diffusers names it, and beside them a generator of
pictures, video, sound and actions, which neither transformers' class nor MaxText has (huggingface/transformers,
conversion_mapping.py and models/cosmos3_omni, v5.23.0; NVIDIA/cosmos-framework, _convert_model_to_diffusers.py, 5eee9ed).
MaxText has them since #4920 and #5074, later than 0.2.5 (the trees: branch cosmos3_nano_bringup, d6b3a0a, was run). 0.2.5 has
weaver-mini and weaver-max, whose mapping wants the very names and sizes of Nano and Super (`WEAVER_MAXTEXT_TO_HF_PARAM_MAPPING`);
no release of the `model_type` that it gives them is known.
"""

from weightbeam.model_mappings.blocks import (
    common_drops,
    experts_in_out,
    gated_mlp,
    text_part,
    tied_head,
    with_defaults,
)
from weightbeam.model_mappings.configuration import fixed, inside
from weightbeam.model_mappings.families.qwen import DENSE, HEAD, MOE, decoder, moe_mlp, routed_experts, text_dims
from weightbeam.model_mappings.family import Family, Tower
from weightbeam.model_mappings.lines import NORMED, TIED, architecture, tied_unscaled
from weightbeam.model_mappings.towers import (
    DEEPSTACK,
    deepstack_mergers,
    multimodal_rope,
    qwen_vision,
    qwen_vision_dims,
    qwen_vision_lines,
    whole_head,
)

HF, HF_TOWER = "model.language_model.", "model.visual."
REASONERS = ("cosmos3_omni", "weaver_omni")
PARTS = {HF: ("embed_tokens", "layers", "norm"), HF_TOWER: ("patch_embed", "pos_embed", "blocks", "merger", "deepstack_merger_list")}
ATTENTION = dict(to_q="q_proj", to_k="k_proj", to_v="v_proj", to_out="o_proj", norm_q="q_norm", norm_k="k_norm")
ALIASES = {  # the reasoners' names
    **{part: f"{prefix}{part}" for prefix, parts in PARTS.items() for part in parts},
    **{f"{prefix}layers.*.self_attn.{theirs}": f"{HF}layers.*.self_attn.{ours}" for prefix in ("", HF) for theirs, ours in ATTENTION.items()},
}
GENERATOR = (
    "*moe_gen*", "*.self_attn.add_?_proj.*", "*.self_attn.to_add_out.*", "*.self_attn.norm_added_?.*",
    "proj_in.*", "proj_out.*", "time_embedder.*", "audio_*", "action_*",
)  # fmt: skip


def is_moe(c):
    return c["model_type"] == "qwen3_vl_moe"


def text(c):
    """The text model's part of `config.json`; transformers' class for a reasoner doesn't tie the head unless told to."""
    return text_part(with_defaults(c, tie_word_embeddings=False) if c["model_type"] in REASONERS else c)


def hub_experts(d, layout):
    """The experts as the hub's files fuse them; None where the checkpoint has them in another way."""
    gate_up, down = (f"{HF}layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    embed, expert, width = d["embed"], d["expert"], d["moe_mlp"]
    as_saved_by_v5 = {gate_up: (expert, 2 * width, embed), down: (expert, embed, width)}
    if gate_up not in layout.names or {name: layout.shapes.get(name) for name in as_saved_by_v5} == as_saved_by_v5:
        return None
    return experts_in_out("moe_block", "mlp.experts", width)


def dims(c, layout):
    return text_dims(text(c), is_moe(c)) | (qwen_vision_dims(c.part("vision_config")) if layout.multimodal else {})


def stacks(c, layout):
    t = text(c)
    mlp = moe_mlp(t, hub_experts(dims(c, layout), layout) or routed_experts(t, layout, HF)) if is_moe(c) else gated_mlp()
    out = decoder(t, layout, mlp, HF)
    if layout.multimodal:
        v = c.part("vision_config")
        out += qwen_vision(v, "Qwen3VL", HF_TOWER, deepstack_mergers(v))
    return out


def drops(c, layout):
    tower = {} if layout.multimodal else {f"{HF_TOWER}*": Tower("vision tower, convert it with --multimodal true")}
    generator = dict.fromkeys(GENERATOR, Tower("of the generator; MaxText has the reasoner")) if c["model_type"] in REASONERS else {}
    return common_drops(text(c), layout, HF) | tower | generator


ROPE, OWN = multimodal_rope((24, 20, 20), whole_head, 500_000), (fixed("vision_encoder_block", "qwen3_vl"),)


def dense_lines(kind, name, head):
    return (*inside("text_config", (*DENSE, *ROPE)), *head, *architecture("qwen3", f"{name}ForConditionalGeneration", kind), *qwen_vision_lines(DEEPSTACK), *OWN)


FAMILY = Family(
    name="qwen3_vl",
    models={"qwen3-vl-[0-9]*": ("qwen3_vl", "qwen3_vl_moe"), "cosmos3-*-reasoner": ("cosmos3_omni",), "weaver-*": ("weaver_omni",)},
    dims=dims,
    stacks=stacks,
    drops=drops,
    copies=lambda c, layout: tied_head(text(c), layout, HF),
    configuration={
        "qwen3_vl": dense_lines("qwen3_vl", "Qwen3VL", HEAD),
        **dict.fromkeys(REASONERS, dense_lines("cosmos3_omni", "Cosmos3Omni", tied_unscaled(text))),  # transformers has no class for Weaver
        "qwen3_vl_moe": (*inside("text_config", (*MOE, NORMED, *ROPE)), *TIED, *architecture("qwen3_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"), *qwen_vision_lines(DEEPSTACK), *OWN),
    },
    towers="vision",
    layouts=("unscanned",),
    aliases=ALIASES,
    releases="Qwen 3 VL, dense and with experts; the reasoners of Cosmos 3 and Weaver",
    trees="e591f30 and 0.2.5; Weaver: 0.2.5; Cosmos 3: branch cosmos3_nano_bringup (d6b3a0a), built; its trainer *not run*",
    checked=("qwen3-vl-2b", "qwen3-vl-30b-a3b", "cosmos3-nano-reasoner", "weaver-mini", "weaver-max"),
    missing="the generators of Cosmos 3 and Weaver",
)
