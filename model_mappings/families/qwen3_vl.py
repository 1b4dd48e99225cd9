"""Qwen 3 VL, dense and with experts: Qwen 3's text model, and a vision tower some of whose layers reach the text model (deepstack).

The hub's files hold the fused experts as MaxText does, (expert, embed, 2 · moe_mlp) and (expert, moe_mlp, embed). transformers v5
saves them transposed under the same names, and reads both (huggingface/transformers, conversion_mapping.py, `check_dims=True`,
v5.23.0). Shapes tell: whatever the sizes, no pair of tensors fits both ways. One tensor for each expert is read too. Whether the
head is tied, the outer flag says; transformers writes another into `text_config` that it doesn't use. MaxText refuses to scan a model
with deepstack, its text alone included (AI-Hypercomputer/maxtext, src/maxtext/configs/types.py, e591f30).
"""

from weightbeam.model_mappings.blocks import common_drops, experts_in_out, gated_mlp, text_part, tied_head
from weightbeam.model_mappings.configuration import fixed, inside
from weightbeam.model_mappings.families.qwen import DENSE, HEAD, MOE, decoder, moe_mlp, routed_experts, text_dims
from weightbeam.model_mappings.family import Family, Tower
from weightbeam.model_mappings.lines import (
    TIED,
    architecture,
)
from weightbeam.model_mappings.towers import (
    QWEN_VISION,
    deepstack_mergers,
    multimodal_rope,
    qwen_vision,
    qwen_vision_dims,
    whole_head,
)

HF, HF_TOWER = "model.language_model.", "model.visual."


def is_moe(c):
    return c["model_type"] == "qwen3_vl_moe"


def hub_experts(d, layout):
    """The experts as the hub's files fuse them; None where the checkpoint has them in another way."""
    gate_up, down = (f"{HF}layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    embed, expert, width = d["embed"], d["expert"], d["moe_mlp"]
    as_saved_by_v5 = {gate_up: (expert, 2 * width, embed), down: (expert, embed, width)}
    if gate_up not in layout.names or {name: layout.shapes.get(name) for name in as_saved_by_v5} == as_saved_by_v5:
        return None
    return experts_in_out("moe_block", "mlp.experts", width)


def dims(c, layout):
    return text_dims(text_part(c), is_moe(c)) | (qwen_vision_dims(c.part("vision_config")) if layout.multimodal else {})


def stacks(c, layout):
    t = text_part(c)
    mlp = moe_mlp(t, hub_experts(dims(c, layout), layout) or routed_experts(t, layout, HF)) if is_moe(c) else gated_mlp()
    out = decoder(t, layout, mlp, HF)
    if layout.multimodal:
        v = c.part("vision_config")
        out += qwen_vision(v, "Qwen3VL", HF_TOWER, deepstack_mergers(v))
    return out


def drops(c, layout):
    tower = {} if layout.multimodal else {f"{HF_TOWER}*": Tower("vision tower, convert it with --multimodal true")}
    return common_drops(text_part(c), layout, HF) | tower


ROPE, OWN = multimodal_rope((24, 20, 20), whole_head), (fixed("vision_encoder_block", "qwen3_vl"),)

FAMILY = Family(
    name="qwen3_vl",
    models={"qwen3-vl-[0-9]*": ("qwen3_vl", "qwen3_vl_moe")},
    dims=dims,
    stacks=stacks,
    drops=drops,
    copies=lambda c, layout: tied_head(text_part(c), layout, HF),
    configuration={
        "qwen3_vl": (*inside("text_config", (*DENSE, *ROPE)), *HEAD, *architecture("qwen3", "Qwen3VLForConditionalGeneration", "qwen3_vl"), *QWEN_VISION, *OWN),
        "qwen3_vl_moe": (*inside("text_config", (*MOE, *ROPE)), *TIED, *architecture("qwen3_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"), *QWEN_VISION, *OWN),
    },
    towers="vision",
    layouts=("unscanned",),
    releases="Qwen 3 VL, dense and with experts",
    checked=("qwen3-vl-2b", "qwen3-vl-30b-a3b"),
)
