"""Blocks that mix tokens or residual streams otherwise than attention does: Kimi delta attention and hyper-connections."""

from __future__ import annotations

from weightbeam.model_mappings.blocks import Table
from weightbeam.model_mappings.config import Config
from weightbeam.model_mappings.rules import rule, segments


def hyper_dims(c: Config) -> dict[str, int]:
    """The axis words of `hyper_connection`: `mixed` is `stream` once more, and `streams` all of them side by side."""
    n = c.size("hc_mult")
    return dict(stream=n, mixed=n, streams=n * c.size("hidden_size"))


def hyper_connection(target: str, source: str, n: int) -> Table:
    """`n` residual streams are mixed into one (pre), spread again (post), and mixed among themselves (res).

    The rows of a tensor are those of pre, post and res, in this order, and so are its three scalars; MaxText's norm of
    the streams has a weight, which is 1 (AI-Hypercomputer/maxtext, src/maxtext/layers/mhc.py, e591f30).
    """
    parts = [
        ("pre", 0, n, "stream", "-"),
        ("post", n, 2 * n, "stream", "-"),
        ("res", 2 * n, (2 + n) * n, "stream mixed", "- -"),
    ]
    table = [rule(f"{target}/mhc_norm/scale", None, "streams", "norm", fill=1.0)]
    for i, (part, start, stop, axes, names) in enumerate(parts):
        table += [
            rule(
                f"{target}/{part}_alpha",
                f"{source}_fn[{start}:{stop}]",
                f"({axes}) streams -> streams ({axes})",
                "activation_embed -",
            ),
            rule(f"{target}/{part}_beta", f"{source}_base[{start}:{stop}]", f"({axes}) -> {axes}", names),
            rule(f"{target}/{part}_alpha_scale", f"{source}_scale[{i}:{i + 1}]", "1", "-"),
        ]
    return table


def delta_attention(target: str, width: int) -> Table:
    """Kimi delta attention: a decay for each of the `linear_dim` elements of each of `linear_heads` heads (`linear`, or `width`, all of
    them), by a projection of low rank, as the output's gate is; convolutions of `taps` tokens over query, key and value,
    which MaxText has in one array (AI-Hypercomputer/maxtext, src/maxtext/models/glm5_next.py, 0630439).
    """
    return [
        *(
            rule(f"{target}/{name}_proj/kernel", f"self_attn.{name}_proj.weight", "linear embed -> embed linear", axes)
            for name, axes in (("q", "embed q_heads"), ("k", "embed kv_heads"), ("v", "embed kv_heads"))
        ),
        *(
            rule(
                f"{target}/conv1d/kernel",
                f"self_attn.{name}_conv1d.weight",
                "linear 1 taps -> taps 1 linear",
                "",
                linear=part,
            )
            for name, part in zip("qkv", segments(width, width, width), strict=True)
        ),
        rule(f"{target}/A_log", "self_attn.A_log", "linear_heads", "heads"),
        rule(f"{target}/dt_bias", "self_attn.dt_bias", "linear", "heads"),
        rule(
            f"{target}/b_proj/kernel",
            "self_attn.b_proj.weight",
            "linear_heads embed -> embed linear_heads",
            "embed heads",
        ),
        *(
            line
            for gate in "fg"
            for line in (
                rule(
                    f"{target}/{gate}_a_proj/kernel",
                    f"self_attn.{gate}_a_proj.weight",
                    "linear_dim embed -> embed linear_dim",
                    "embed head_dim",
                ),
                rule(
                    f"{target}/{gate}_b_proj/kernel",
                    f"self_attn.{gate}_b_proj.weight",
                    "linear linear_dim -> linear_dim linear",
                    "head_dim heads",
                ),
            )
        ),
        rule(f"{target}/o_norm/scale", "self_attn.o_norm.weight", "linear_dim", "head_dim"),
        rule(f"{target}/o_proj/kernel", "self_attn.o_proj.weight", "embed linear -> linear embed", "heads embed"),
    ]
