"""Vision towers that families share. Their axis words begin with `v_` where a text model has the word too.

What MaxText's towers have built in: AI-Hypercomputer/maxtext, src/maxtext/models/gemma3.py, gemma4_vision.py and qwen3.py (of
all Qwens' towers), e591f30 and 0.2.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightbeam.model_mappings.blocks import Table
from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.configuration import (
    Line,
    derived,
    fixed,
    inside,
    lookup,
    of_tower,
    positive,
    same,
    size,
    unless,
    written,
)
from weightbeam.model_mappings.lines import EXACT_GELU
from weightbeam.model_mappings.rope import THETA, only_kinds, rope_of, theta
from weightbeam.model_mappings.rules import Stack, rule, stack


def qwen_vision_dims(v: Config) -> dict[str, int]:
    """The axis words of `qwen_vision`; `v` is the tower's part of `config.json`."""
    embed, heads, patch = v.size("hidden_size"), v.size("num_heads"), v.size("patch_size", 16)
    merged = embed * v.size("spatial_merge_size", 2) ** 2  # of a square of patches
    return dict(
        v_embed=embed, v_heads=heads, v_dim=embed // heads, v_mlp=v.size("intermediate_size"), v_merged=merged, v_hidden=merged,
        v_out=v.size("out_hidden_size"), positions=v.size("num_position_embeddings", 2304), rgb=v.size("in_channels", 3),
        frames=v.size("temporal_patch_size", 2), patch_rows=patch, patch_columns=patch,
    )  # fmt: skip


TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")  # one function


def stated(c: Config, path: str, default: Any) -> Any:
    """The value at a path; the default where it is absent or null."""
    found = lookup(c, path)
    return default if found is None else found


def tower_activation(path: str, default: str = TANH[0]) -> Line:
    """MaxText's towers have the tanh form of GELU (`nnx.gelu`, `jax.nn.gelu`)."""

    def limit(c: Config, model: str | None) -> str | None:
        if (found := stated(c, path, default)) in TANH:
            return None
        built_in = "MaxText's tower has GELU built in; what it makes of its inputs is wrong. There is no way round"
        return f"{path} is {found!r}: {EXACT_GELU if found == 'gelu' else built_in}"

    return unless(limit)


def tower_eps(field: str = "") -> Line:
    """The norms of MaxText's vision towers add what those of the text model add (`normalization_layer_epsilon`).

    Args:
      field: what transformers' tower adds to a variance; where it has no field for it, 1e-6.

    Returns:
      The line.
    """

    def limit(c: Config, model: str | None) -> str | None:
        ours = stated(c, "text_config.rms_norm_eps", 1e-6)
        theirs = stated(c, f"vision_config.{field}", 1e-6) if field else 1e-6
        what = f"vision_config.{field} is {theirs!r}" if field else f"text_config.rms_norm_eps is {ours!r}"
        added = f"MaxText's vision tower adds {ours!r} to a variance, as its decoder does, and the model's {theirs!r}"
        return None if ours == theirs else f"{what}: {added}; what it makes of images differs"

    return unless(limit)


def tower_theta(default: float = THETA) -> Line:
    """The base of the frequencies of a vision tower."""
    return derived("rope_theta_for_vit", lambda v, model: positive(rope_of(v).get("rope_theta", default)))


DEEPSTACK = (8, 16, 24)  # transformers' default for Qwen 3 VL and 3 Omni; Qwen 3.5 has no such layers


def qwen_vision_lines(deepstack: tuple[int, ...] = ()) -> tuple[Line, ...]:
    """MaxText's keys of `qwen_vision`; `deepstack` are the layers with mergers of their own where none are said."""
    return (*inside("vision_config", (
        size("hidden_size_for_vit", "hidden_size"),
        size("intermediate_size_for_vit", "intermediate_size"),
        size("num_hidden_layers_for_vit", "depth"),
        size("num_attention_heads_for_vit", "num_heads"),
        size("num_channels_for_vit", "in_channels", default=3),
        size("patch_size_for_vit", "patch_size", default=16),
        size("temporal_patch_size_for_vit", "temporal_patch_size", default=2),
        size("spatial_merge_size_for_vit", "spatial_merge_size", default=2),
        size("out_hidden_size_for_vit", "out_hidden_size"),
        size("num_position_embeddings_for_vit", "num_position_embeddings", default=2304),
        same("deepstack_visual_indexes_for_vit", "deepstack_visual_indexes", default=deepstack),
        tower_theta(),
    ), when=bool), *of_tower("vision_config", (tower_activation("vision_config.hidden_act"), tower_eps())))  # fmt: skip


def multimodal_rope(
    sections: tuple[int, ...], turning: Callable[[Config], int], base: float = THETA
) -> tuple[Line, ...]:
    """The rotary embedding in sections for time, height and width, with the release's numbers where `config.json` has
    none.

    `turning` says how many of a head's dimensions turn, `base` which base transformers' class has where `config.json`
    says none. MaxText refuses sections that aren't half as many in all (src/maxtext/layers/embeddings.py,
    `Qwen3OmniMoeThinkerTextRotaryEmbedding`, e591f30 and 0.2.5); transformers doesn't look.
    """

    def find(c: Config, model: str | None) -> list[int]:
        own, half = list(rope_of(c).get("mrope_section", sections)), turning(c) // 2
        return own if sum(own) == half else taken_sections(own, half)

    return (
        theta(default=base),
        fixed("use_mrope", True),
        derived("mrope_section", find, "rope_parameters.mrope_section"),
        fixed("rope_type", "default"),
        written("rope_parameters.rope_type", "default"),
        written("rope_parameters.mrope_interleaved", True),
        only_kinds("default", "mrope"),
    )


def taken_sections(sections: list[int], half: int) -> list[int]:
    """How many of `half` frequencies are time's, height's and width's, where the sections aren't as many: of each three
    in turn the second is height's and the third width's, as long as their sections last; time has the others
    (transformers v5.23.0, `recomposition_frequencies`).
    """
    height, width = (len(range(offset, min(3 * sections[offset], half), 3)) for offset in (1, 2))
    return [half - height - width, height, width]


def whole_head(c: Config) -> int:
    """All of a head's dimensions turn."""
    return c.size("head_dim", c.size("hidden_size") // c.size("num_attention_heads"))


def deepstack_mergers(v: Config) -> int:
    """How many layers of the tower reach the text model by a merger of their own.

    Raises:
      ConfigError: `deepstack_visual_indexes` isn't a list of layers.
    """
    indexes = v.get("deepstack_visual_indexes", list(DEEPSTACK))
    if not isinstance(indexes, list) or not all(
        type(index) is int and 0 <= index < v.size("depth") for index in indexes
    ):
        raise ConfigError(
            f"config.json: 'deepstack_visual_indexes' should be a list of the tower's layers, but is {indexes!r}"
        )
    return len(indexes)


def qwen_vision(
    v: Config,
    name: str,
    source: str,
    deepstack: int = 0,
    mergers: str = "deepstack_merger_list",
    norm: str = "norm",
    linear: tuple[str, str] = ("linear_fc1", "linear_fc2"),
) -> list[Stack]:
    """The tower of Qwen 3 VL, 3.5 and 3 Omni: patches of several frames, blocks with biases, a merger in front of the
    text model.

    Query, key and value are thirds of one tensor. The blocks aren't stacked, whatever the layout.

    Args:
      v: the tower's part of `config.json`.
      name: what the names of MaxText's classes begin with.
      source: prefix of the tensors.
      deepstack: how many mergers more there are, whose results go to text layers, and `mergers` their name in the
        files.
      norm, linear: names of a merger's layers.
    """
    encoder = f"vision_encoder/{name}VisionEncoder_0"
    projector = f"vision_encoder/{name}VisionProjector_0"
    embed = v.size("hidden_size")
    patches = [
        rule(
            "proj/kernel",
            "proj.weight",
            "v_embed rgb frames patch_rows patch_columns -> frames patch_rows patch_columns rgb v_embed",
            "",
        ),
        rule("proj/bias", "proj.bias", "v_embed", ""),
    ]
    block = [
        *layer_norm("ln1", "norm1", "v_embed"),
        *layer_norm("ln2", "norm2", "v_embed"),
        *linear_layer("mlp", "mlp.linear_fc1", "v_mlp", "v_embed"),
        *linear_layer("mlp_out", "mlp.linear_fc2", "v_embed", "v_mlp"),
        rule(
            "attn/attn/out/kernel",
            "attn.proj.weight",
            "v_embed (v_heads v_dim) -> v_heads v_dim v_embed",
            "heads kv embed_attn",
        ),
        rule("attn/attn/out/bias", "attn.proj.bias", "v_embed", "embed_attn"),
    ]
    for third, (target, names) in enumerate(
        dict(query="q_heads kv", key="kv_heads kv_head_dim", value="kv_heads kv_head_dim").items()
    ):
        rows = f"[{third * embed}:{(third + 1) * embed}]"
        block += [
            rule(
                f"attn/attn/{target}/kernel",
                f"attn.qkv.weight{rows}",
                "(v_heads v_dim) v_embed -> v_embed v_heads v_dim",
                f"embed_attn {names}",
            ),
            rule(f"attn/attn/{target}/bias", f"attn.qkv.bias{rows}", "(v_heads v_dim) -> v_heads v_dim", names),
        ]

    def merger(width: str) -> Table:
        """`width`: whether the norm comes before the patches are merged, `v_embed`, or behind it, `v_merged`."""
        return [
            *layer_norm("ln_q", norm, width),
            *linear_layer("mlp_0", linear[0], "v_hidden", "v_merged"),
            *linear_layer("mlp_2", linear[1], "v_out", "v_hidden"),
        ]

    return [
        stack(f"{encoder}/patch_embed", f"{source}patch_embed.", 0, patches),
        stack(
            encoder, source, 0, [rule("pos_embed_interpolate/pos_embed", "pos_embed.weight", "positions v_embed", "")]
        ),
        *(stack(f"{encoder}/blocks_{i}", f"{source}blocks.{{layer}}.", i, block) for i in range(v.size("depth"))),
        *(
            stack(f"{encoder}/merger_{i}", f"{source}{mergers}.{{layer}}.", i, merger("v_merged"))
            for i in range(deepstack)
        ),
        stack(f"{projector}/merger", f"{source}merger.", 0, merger("v_embed")),
    ]


def layer_norm(target: str, source: str, axis: str) -> Table:
    """A norm with a bias, without logical axes."""
    return [rule(f"{target}/scale", f"{source}.weight", axis, ""), rule(f"{target}/bias", f"{source}.bias", axis, "")]


def linear_layer(target: str, source: str, out: str, into: str, *names: str) -> Table:
    """A projection with a bias; `names` are MaxText's logical names of the kernel's axes, if it has them."""
    return [
        rule(f"{target}/kernel", f"{source}.weight", f"{out} {into} -> {into} {out}", " ".join(names)),
        rule(f"{target}/bias", f"{source}.bias", out, names[-1] if names else ""),
    ]
