"""Qwen 3 Omni's thinker: Qwen 3 MoE's text model, Qwen 3 VL's vision tower, and an audio tower.

MaxText has nothing that speaks: talker and code2wav are left out. A thinker saved alone has no `thinker_config` and no `thinker.`
in its names; transformers v5 has the towers below `model.` in memory. The audio tower's positions are computed, and its layers take
no rotary embedding. MaxText refuses to scan a model with deepstack (AI-Hypercomputer/maxtext, src/maxtext/configs/types.py, and the
towers in models/qwen3.py, e591f30).
"""

from weightbeam.model_mappings.blocks import common_drops, text_part, tied_head
from weightbeam.model_mappings.configuration import fixed, inside, of_tower, size, unless
from weightbeam.model_mappings.families.qwen import MOE, decoder, moe_mlp, routed_experts, text_dims
from weightbeam.model_mappings.family import Family, Tower
from weightbeam.model_mappings.lines import NORMED, TIED, architecture
from weightbeam.model_mappings.rules import rule, stack
from weightbeam.model_mappings.towers import (
    DEEPSTACK,
    deepstack_mergers,
    layer_norm,
    linear_layer,
    multimodal_rope,
    qwen_vision,
    qwen_vision_dims,
    qwen_vision_lines,
    tower_activation,
    whole_head,
)

HF, HEAD, HF_VISION, HF_AUDIO = "thinker.model.", "thinker.lm_head", "thinker.visual.", "thinker.audio_tower."
ENCODER, PROJECTOR = "audio_encoder/Qwen3OmniAudioEncoder_0", "audio_encoder/Qwen3OmniAudioProjector_0"


def thinker(c):
    return c.part("thinker_config") if "thinker_config" in c else c


def audio_dims(a):
    embed, heads, channels, bands = a.size("d_model"), a.size("encoder_attention_heads"), a.size("downsample_hidden_size"), a.size("num_mel_bins", 128)
    for _ in range(3):  # convolutions that halve them
        bands = (bands + 1) // 2
    return dict(
        a_embed=embed, a_heads=heads, a_dim=embed // heads, a_mlp=a.size("encoder_ffn_dim"), a_hidden=embed, a_out=a.size("output_dim"),
        a_channels=channels, a_from=channels, a_bands=bands, band_taps=3, time_taps=3,
    )  # fmt: skip


def convolution(name, channels):
    return [
        rule(f"{name}/kernel", f"{name}.weight", f"a_channels {channels} band_taps time_taps -> band_taps time_taps {channels} a_channels", ""),
        rule(f"{name}/bias", f"{name}.bias", "a_channels", ""),
    ]


def audio(a):
    stem = [
        *convolution("conv2d1", "1"),
        *convolution("conv2d2", "a_from"),
        *convolution("conv2d3", "a_from"),
        rule("conv_out/kernel", "conv_out.weight", "a_embed (a_channels a_bands) -> (a_channels a_bands) a_embed", ""),
        *layer_norm("layernorm_post", "ln_post", "a_embed"),
    ]
    layer = [*layer_norm("input_layer_norm", "self_attn_layer_norm", "a_embed"), *layer_norm("post_attention_layer_norm", "final_layer_norm", "a_embed")]
    for name, names in dict(query="q_heads kv", key="kv_heads kv_head_dim", value="kv_heads kv_head_dim").items():
        target, source = f"self_attention_audio/{name}", f"self_attn.{name[0]}_proj"
        layer += [
            rule(f"{target}/kernel", f"{source}.weight", "(a_heads a_dim) a_embed -> a_embed a_heads a_dim", f"embed_attn {names}"),
            rule(f"{target}/bias", f"{source}.bias", "(a_heads a_dim) -> a_heads a_dim", names),
        ]
    layer += [
        rule("self_attention_audio/out/kernel", "self_attn.out_proj.weight", "a_embed (a_heads a_dim) -> a_heads a_dim a_embed", "heads kv embed_attn"),
        rule("self_attention_audio/out/bias", "self_attn.out_proj.bias", "a_embed", "embed_attn"),
        *linear_layer("AudioMLP/wi", "fc1", "a_mlp", "a_embed", "embed", "mlp"),
        *linear_layer("AudioMLP/wo", "fc2", "a_embed", "a_mlp", "mlp", "embed"),
    ]
    projector = [*linear_layer("proj1", "proj1", "a_hidden", "a_embed"), *linear_layer("proj2", "proj2", "a_out", "a_hidden")]
    return [
        stack(ENCODER, HF_AUDIO, 0, stem),
        *(stack(f"{ENCODER}/layers_{i}", HF_AUDIO + "layers.{layer}.", i, layer) for i in range(a.size("encoder_layers"))),
        stack(PROJECTOR, HF_AUDIO, 0, projector),
    ]


def dims(c, layout):
    c = thinker(c)
    towers = qwen_vision_dims(c.part("vision_config")) | audio_dims(c.part("audio_config")) if layout.multimodal else {}
    return text_dims(text_part(c), moe=True) | towers


def stacks(c, layout):
    c = thinker(c)
    t = text_part(c)
    out = decoder(t, layout, moe_mlp(t, routed_experts(t, layout, HF)), HF, HEAD)
    if layout.multimodal:
        v = c.part("vision_config")
        out += qwen_vision(v, "Qwen3OmniMoe", HF_VISION, deepstack_mergers(v), "merger_list", "ln_q", ("mlp.0", "mlp.2"))
        out += audio(c.part("audio_config"))
    return out


def drops(c, layout):
    left = dict.fromkeys(("talker.*", "code2wav.*"), Tower("makes speech; MaxText has the thinker alone", {"enable_audio_output": False}))
    if not layout.multimodal:
        left |= {f"{HF_VISION}*": Tower("vision tower, convert it with --multimodal true"), f"{HF_AUDIO}*": Tower("audio tower, convert it with --multimodal true")}
    return common_drops(text_part(thinker(c)), layout, HF, head=HEAD) | left


def short_sighted(c, model):
    """MaxText's layers look at one chunk of twice `n_window` frames, whatever its key for `n_window_infer` says (`Qwen3OmniAudioEncoder`)."""
    audio = c.part("audio_config")
    chunk, window = 2 * audio.size("n_window", 50), audio.size("n_window_infer", 800)
    effect = f"MaxText's audio tower looks at {chunk} frames at a time; what it makes of longer sounds differs. There is no way round"
    return None if window // chunk == 1 else f"audio_config.n_window_infer is {window}: {effect}"


THINKER = (
    *inside("text_config", (*MOE, NORMED, *multimodal_rope((24, 20, 20), whole_head, 1_000_000), *TIED)),
    *qwen_vision_lines(DEEPSTACK),
    size("position_id_per_seconds", "position_id_per_seconds", default=25),
    fixed("vision_encoder_block", "qwen3_omni"),
    *inside("audio_config", (
        size("d_model_for_audio", "d_model"),
        size("encoder_layers_for_audio", "encoder_layers"),
        size("encoder_attention_heads_for_audio", "encoder_attention_heads"),
        size("encoder_ffn_dim_for_audio", "encoder_ffn_dim"),
        size("downsample_hidden_size_for_audio", "downsample_hidden_size"),
        size("output_dim_for_audio", "output_dim"),
        size("num_mel_bins_for_audio", "num_mel_bins", default=128),
        size("n_window_for_audio", "n_window", default=50),
        size("n_window_infer_for_audio", "n_window_infer", default=800),
        size("max_source_positions_for_audio", "max_source_positions", default=1500),
        size("conv_chunksize_for_audio", "conv_chunksize", default=500),
    ), when=bool),
    *of_tower("audio_config", (tower_activation("audio_config.activation_function", "gelu"), unless(short_sighted))),
)  # fmt: skip

FAMILY = Family(
    name="qwen3_omni",
    models={"qwen3-omni-*": ("qwen3_omni_moe", "qwen3_omni_moe_thinker")},
    dims=dims,
    stacks=stacks,
    drops=drops,
    copies=lambda c, layout: tied_head(text_part(thinker(c)), layout, HF, head=HEAD),
    configuration={
        "qwen3_omni_moe_thinker": (*THINKER, *architecture("qwen3_moe", "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker")),
        "qwen3_omni_moe": (*inside("thinker_config", THINKER), *architecture("qwen3_moe", "Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe")),
    },
    towers="vision and audio",
    layouts=("unscanned",),
    aliases={"model": "thinker.model", "lm_head": "thinker.lm_head"}
    | {f"{prefix}model.language_model": "thinker.model" for prefix in ("", "thinker.")}
    | {f"{prefix}{tower}": f"thinker.{tower}" for prefix in ("", "model.", "thinker.model.") for tower in ("visual", "audio_tower")},
    releases="Qwen 3 Omni 30B-A3B Instruct, Thinking, Captioner (the thinker)",
    checked=("qwen3-omni-30b-a3b",),
    missing="talker and code2wav",
)
