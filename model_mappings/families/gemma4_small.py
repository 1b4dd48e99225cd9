"""Gemma 4 E2B and E4B: every layer has inputs of its own, the later layers share keys and values, and no two need be alike.

* MaxText doesn't scan them, has no towers for them ("pending clipped-linears in the vision encoder"), and takes the cycle from
  the model's name: `gemma4-e2b` has a global layer every five layers, any other name every six.
* The last `num_kv_shared_layers` layers use the keys and values of the last layer of their kind before them. The hub's files
  have weights for them all the same; transformers ignores these, and MaxText has no arrays for them. E2B makes up for it with
  an MLP of twice the width in these layers (`use_double_wide_mlp`).
* The embedding of the layers' inputs is scaled in MaxText's layer (`Gemma4SmallPLE`), not in the checkpoint.

AI-Hypercomputer/maxtext, src/maxtext/models/gemma4_small.py and configs/types.py, e591f30; huggingface/transformers,
models/gemma4/modeling_gemma4.py, v5.23.0. The rest is as in `gemma4.py`.
"""

from weightbeam.model_mappings.blocks import common_drops, gated_mlp, tied_head, top
from weightbeam.model_mappings.config import ConfigError, Layout
from weightbeam.model_mappings.configuration import copied, count, fixed, size, truth
from weightbeam.model_mappings.families.gemma4 import (
    ALIASES,
    AROUND,
    GLOBAL,
    HF,
    LAYER,
    LOCAL,
    SHARED,
    attention,
    composite,
    is_small,
    text,
    text_dims,
)
from weightbeam.model_mappings.family import Family, Tower
from weightbeam.model_mappings.maxtext_models import run_as
from weightbeam.model_mappings.ops import Scale
from weightbeam.model_mappings.rules import rule, stack


def cycle(t, layout):
    """The kinds of layers that MaxText repeats; without its model's name, those of `config.json`."""
    types = t.get("layer_types")
    every_five = layout.model == "gemma4-e2b" if layout.model else isinstance(types, list) and types[4:5] == [GLOBAL]
    return (LOCAL,) * (4 if every_five else 5) + (GLOBAL,)


def first_shared(t):
    """The first layer that shares keys and values, or the number of layers."""
    return t.size("num_hidden_layers") - t.count("num_kv_shared_layers")


def dims(c, layout):
    t = text(c)
    kinds = cycle(t, layout)
    d = text_dims(t, kinds)
    if t.flag("enable_moe_block") or t.flag("attention_k_eq_v") or first_shared(t) < len(kinds):
        raise ConfigError("config.json: MaxText's Gemma 4 E2B and E4B have no experts (enable_moe_block), no attention_k_eq_v, and a whole cycle of layers before those that share keys and values")
    per_layer = t.size("hidden_size_per_layer_input")
    return d | dict(wide_mlp=2 * d["mlp"], per_layer=per_layer, layer=t.size("num_hidden_layers"), layer_vocab=t.size("vocab_size_per_layer_input"))


INPUTS = [
    rule("embed_tokens_per_layer", "embed_tokens_per_layer.weight", "layer_vocab (layer per_layer)", "vocab embed_vocab"),
    rule("per_layer_model_projection/kernel", "per_layer_model_projection.weight", "(layer per_layer) embed -> embed (layer per_layer)", "embed mlp"),
    rule("per_layer_projection_norm/scale", "per_layer_projection_norm.weight", "per_layer", "norm"),
]
GATE = [
    rule("per_layer_input_gate/kernel", "per_layer_input_gate.weight", "per_layer embed -> embed per_layer", "embed mlp"),
    rule("per_layer_projection/kernel", "per_layer_projection.weight", "embed per_layer -> per_layer embed", "mlp embed"),
    rule("post_per_layer_input_norm/scale", "post_per_layer_input_norm.weight", "embed", "norm"),
]


def stacks(c, layout):
    t = text(c)
    kinds, shared = cycle(t, layout), first_shared(t)

    def table(layer):
        own = layer < shared
        width = "mlp" if own or not t.flag("use_double_wide_mlp") else "wide_mlp"
        return [*attention(kinds[layer % len(kinds)], key=own, value=own), *AROUND, *gated_mlp(width=width), *GATE]

    return [
        top(t, layout, Scale(t.size("hidden_size") ** 0.5), hf=HF),
        stack("decoder/per_layer_embedder", HF, 0, INPUTS),
        *(stack(f"decoder/layers_{layer}", LAYER, layer, table(layer)) for layer in range(t.size("num_hidden_layers"))),
    ]


def drops(c, layout):
    t = text(c)
    reason = "MaxText's Gemma 4 E2B and E4B are text only"
    vision, audio = (Tower(reason, {section: None}) for section in ("vision_config", "audio_config"))
    towers = {"vision_tower": vision, "embed_vision": vision, "audio_tower": audio, "embed_audio": audio}
    shared = range(first_shared(t), t.size("num_hidden_layers"))
    unused = {f"{HF}layers.{layer}.self_attn.{name}.*": "the layer shares the keys and values of an earlier one" for layer in shared for name in ("k_proj", "k_norm", "v_proj", "v_norm")}
    return common_drops(t, layout, HF) | {f"model.{name}.*": reason for name, reason in towers.items()} | unused


def layer_types(keys):
    """Those that MaxText repeats for its model of this name; of what `config.json` doesn't say, every sixth is global."""
    period = 5 if run_as(str(keys["model_name"])) == "gemma4-e2b" else 6
    return [GLOBAL if layer % period == period - 1 else LOCAL for layer in range(keys["base_num_decoder_layers"])]


LINES = (
    *SHARED,
    copied("layer_types", layer_types),
    size("hidden_size_per_layer_input", "hidden_size_per_layer_input", default=256),
    size("vocab_size_per_layer_input", "vocab_size_per_layer_input", default=262_144),
    count("num_kv_shared_layers", "num_kv_shared_layers"),
    truth("use_double_wide_mlp", "use_double_wide_mlp"),
    fixed("decoder_block", "gemma4_small"),
)

FAMILY = Family(
    name="gemma4_small",
    models={"gemma4-e[0-9]*": ("gemma4", "gemma4_text")},
    dims=dims,
    stacks=stacks,
    drops=drops,
    copies=lambda c, layout: tied_head(text(c), layout, HF),
    configuration=composite(LINES),
    is_model=lambda c, model: (model == "gemma4-e2b") == (len(cycle(text(c), Layout())) == 5),
    releases="Gemma 4 E2B, E4B",
    checked=("gemma4-e2b",),
    missing="its towers",
    layouts=("unscanned",),
    aliases=ALIASES,
    fits=is_small,
)
