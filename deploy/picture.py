"""The README's picture: the plan of a small model, its tensors on the left, its arrays and their chunks on the right.
`python -m deploy.picture` draws `docs/plan.svg` anew.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import weightbeam as wb
from weightbeam.model_mappings.plan import Array
from weightbeam.pipelines.commands.plan import Plan
from weightbeam.transforms.cutting.grid import Grid

FILE = Path(__file__).parents[1] / "docs" / "plan.svg"
LAYERS, MESH = 4, "fsdp=4"
HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCAB = 64, 4, 2, 16, 128, 192
CONFIG = dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=HIDDEN, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, intermediate_size=MLP, vocab_size=VOCAB,
    rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, hidden_act="silu", dtype="bfloat16",
)  # fmt: skip
WIDTH, TOP, BOTTOM, GAP = 960, 64, 16, 3
LEFT, RIGHT, STRIP, BOX = 150, 470, 26, 190  # where the files are, where the arrays are, and how wide
SCALE, THIN = 0.0011, 14  # pixels a byte; the least height of an array
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#d4a72c")


@dataclasses.dataclass(frozen=True)
class Strip:
    """What is drawn of a tensor or an array: its upper edge, its height, in pixels."""

    top: float
    height: float


def release(folder: Path) -> None:
    """Writes a small release, of zeros: a plan reads headers alone."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        of_layer = {
            "input_layernorm": (HIDDEN,), "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD), "self_attn.q_norm": (HEAD,),
            "self_attn.k_norm": (HEAD,), "post_attention_layernorm": (HIDDEN,), "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN), "mlp.down_proj": (HIDDEN, MLP),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    save_file(
        {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))


def drawn(plan: Plan) -> str:
    """The picture of a plan, as SVG."""
    conversion = plan.conversion
    sizes = {name: _bytes(array) / len(_names(array)) for array in plan.arrays for name in _names(array)}
    tensors = {name: sizes[name] for name in conversion.source.tensors}
    from_ = _stacked(tensors, 0.5, 1.5)
    order = sorted(range(len(plan.arrays)), key=lambda at: min(from_[name].top for name in _names(plan.arrays[at])))
    arrays = {plan.arrays[at].key: float(_bytes(plan.arrays[at])) for at in order}
    to = _stacked(arrays, GAP, THIN)
    colours = {key: COLOURS[at % len(COLOURS)] for at, key in enumerate(arrays)}
    height = max(strip.top + strip.height for strip in (*from_.values(), *to.values())) + BOTTOM
    parts = [
        _text(LEFT, 24, "a Hugging Face release", bold=True),
        _text(LEFT, 44, f"{len(tensors)} tensors, a layer after the other", small=True),
        _text(RIGHT, 24, f"MaxText's checkpoint, for {conversion.options.mesh[0]}", bold=True),
        _text(RIGHT, 44, f"{len(arrays)} arrays, layers stacked; each host reads its chunks", small=True),
    ]
    for at in order:
        array, grid = plan.arrays[at], conversion.grids[at]
        parts += _ribbons(array, from_, to[array.key], colours[array.key])
        parts += _box(array, grid, to[array.key], colours[array.key])
    parts += _brackets(from_)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" role="img" '
        f'aria-label="The tensors of a release, and the arrays and chunks that a plan makes of them">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _names(array: Array) -> list[str]:
    return [name for part in array.parts for name in part.tensors]


def _bytes(array: Array) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _stacked(sizes: dict[str, float], gap: float, least: float) -> dict[str, Strip]:
    """Strips below one another, as high as they have bytes."""
    strips, top = dict[str, Strip](), float(TOP)
    for name, size in sizes.items():
        strips[name] = Strip(top, max(least, size * SCALE))
        top += strips[name].height + gap
    return strips


def _ribbons(array: Array, from_: dict[str, Strip], to: Strip, colour: str) -> Iterator[str]:
    """From each tensor to its place in an array."""
    for at, name in enumerate(names := _names(array)):
        strip = from_[name]
        left, right, middle = LEFT + STRIP, RIGHT, (LEFT + STRIP + RIGHT) / 2
        top, low = (to.top + to.height * edge / len(names) for edge in (at, at + 1))
        upper = f"M{left} {strip.top:.1f} C{middle} {strip.top:.1f} {middle} {top:.1f} {right} {top:.1f}"
        base = strip.top + strip.height
        lower = f"L{right} {low:.1f} C{middle} {low:.1f} {middle} {base:.1f} {left} {base:.1f} Z"
        yield f'<path d="{upper} {lower}" fill="{colour}" fill-opacity="0.35"/>'
        yield f'<rect x="{LEFT}" y="{strip.top:.1f}" width="{STRIP}" height="{strip.height:.1f}" fill="{colour}"/>'


def _box(array: Array, grid: Grid, to: Strip, colour: str) -> Iterator[str]:
    """An array, cut into its chunks, with its name and shape."""
    chunks = math.prod(math.ceil(size / chunk) for size, chunk in zip(array.shape, grid.spec.chunk, strict=True))
    for at in range(chunks):
        x, width = RIGHT + BOX * at / chunks, BOX / chunks
        yield f'<rect x="{x:.1f}" y="{to.top:.1f}" width="{width:.1f}" height="{to.height:.1f}" fill="{colour}" stroke="#ffffff"/>'
    name = array.key.removeprefix("params.params.").removeprefix("decoder.").removeprefix("layers.")
    shape = " × ".join(map(str, array.shape))
    yield _text(RIGHT + BOX + 10, to.top + to.height / 2 + 4, f"{name}  {shape}", small=True)


def _brackets(from_: dict[str, Strip]) -> Iterator[str]:
    """The names of the tensors, those of a layer together."""
    groups = dict[str, list[Strip]]()
    for name, strip in from_.items():
        groups.setdefault(
            found[0] if (found := re.search(r"layers\.\d+", name)) else name.removesuffix(".weight"), []
        ).append(strip)
    for name, strips in groups.items():
        if sum(strip.height for strip in strips) > THIN:
            top, low = strips[0].top, strips[-1].top + strips[-1].height
            yield f'<path d="M{LEFT - 4} {top:.1f} h-4 V{low:.1f} h4" fill="none" stroke="#57606a"/>'
            yield _text(LEFT - 14, (top + low) / 2 + 4, name.removeprefix("model."), small=True, anchor="end")


def _text(x: float, y: float, text: str, bold: bool = False, small: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{12 if small else 15}" fill="#24292f" text-anchor="{anchor}"{weight}>{html.escape(text)}</text>'


def main() -> str:
    """The picture of the small model's plan."""
    with tempfile.TemporaryDirectory() as folder:
        release(Path(folder))
        return drawn(wb.plan(folder, mesh=MESH))


if __name__ == "__main__":
    FILE.write_text(main())
