"""Qwen 3.5 with experts: the layers of Qwen 3 Next, and a vision tower.

The delta net's input projections are four tensors. MaxText has them as Qwen 3 Next's files do: query, key, values and gates z of a
key head side by side, then those of the next, and likewise b and a (AI-Hypercomputer/maxtext, `Qwen3NextGatedDeltaNet` in
src/maxtext/models/qwen3.py, e591f30). The hub fuses the experts of a layer; FP8 releases and transformers' `save_pretrained` write
one tensor for each. A text model saved alone has a flat `config.json` and no `language_model` in its names. MaxText has no dense
Qwen 3.5 (src/maxtext/configs/models).
"""

import functools

from weightbeam.model_mappings.blocks import common_drops, text_part, tied_head
from weightbeam.model_mappings.configuration import fixed, inside
from weightbeam.model_mappings.families.qwen3_next import BA, LINES, MTP, QKVZ, decoder, partial
from weightbeam.model_mappings.families.qwen3_next import dims as text_dims
from weightbeam.model_mappings.family import Family, Tower
from weightbeam.model_mappings.lines import TIED, architecture
from weightbeam.model_mappings.rules import rule, segments
from weightbeam.model_mappings.towers import multimodal_rope, qwen_vision, qwen_vision_dims, qwen_vision_lines

HF, HF_TOWER = "model.language_model.", "model.visual."


def in_proj(d):
    """The columns of `in_proj_qkvz` and `in_proj_ba` by key head; in the files the query's rows come first, then the key's."""
    rows, heads = d["key_heads"] * d["key_dim"], d["value_heads"] // d["key_heads"]  # of the query; value heads of one key head
    q, k, v, z = segments(d["key_dim"], d["key_dim"], heads * d["value_dim"], heads * d["value_dim"])
    b, a = segments(heads, heads)
    axes, names = "(key_heads part) embed -> embed (key_heads part)", "embed_attn gdn_head"
    return [
        rule(QKVZ, f"linear_attn.in_proj_qkv.weight[:{rows}]", axes, names, part=q),
        rule(QKVZ, f"linear_attn.in_proj_qkv.weight[{rows}:{2 * rows}]", axes, names, part=k),
        rule(QKVZ, f"linear_attn.in_proj_qkv.weight[{2 * rows}:]", axes, names, part=v),
        rule(QKVZ, "linear_attn.in_proj_z.weight", axes, names, part=z),
        rule(BA, "linear_attn.in_proj_b.weight", axes, names, part=b),
        rule(BA, "linear_attn.in_proj_a.weight", axes, names, part=a),
    ]


def dims(c, layout):
    return text_dims(text_part(c), layout) | (qwen_vision_dims(c.part("vision_config")) if layout.multimodal else {})


def stacks(c, layout, norm="norm"):
    tower = qwen_vision(c.part("vision_config"), "Qwen3_5Moe", HF_TOWER) if layout.multimodal else []
    return decoder(text_part(c), layout, in_proj(dims(c, layout)), HF, norm=norm) + tower


def drops(c, layout):
    tower = {} if layout.multimodal else {f"{HF_TOWER}*": Tower("vision tower, convert it with --multimodal true")}
    return common_drops(text_part(c), layout, HF) | MTP | tower


TEXT = (*LINES, *multimodal_rope((11, 11, 10), lambda c: int(c.size("head_dim", 256) * partial(c))))

FAMILY = Family(
    name="qwen3_5",
    models={"qwen3.5-[0-9]*": ("qwen3_5_moe", "qwen3_5_moe_text")},
    dims=dims,
    stacks=stacks,
    earlier={"e591f30": functools.partial(stacks, norm="-")},
    drops=drops,
    copies=lambda c, layout: tied_head(text_part(c), layout, HF),
    configuration={
        "qwen3_5_moe_text": (*TEXT, *TIED, *architecture("qwen3_5", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")),
        "qwen3_5_moe": (*inside("text_config", TEXT), *TIED, *architecture("qwen3_5", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"), *qwen_vision_lines(), fixed("vision_encoder_block", "qwen3_5")),
    },
    towers="vision",
    aliases={f"model.{part}": f"{HF}{part}" for part in ("embed_tokens", "layers", "norm")},
    releases="Qwen 3.5 with experts (MaxText has no dense ones)",
    checked=("qwen3.5-35b-a3b", "qwen3.5-397b-a17b"),
    missing="dense models; multi-token prediction",
)
