"""FP8 in blocks of 128 × 128, the other way: bfloat16 or float32 values to codes and scales, for DeepSeek's and vLLM's
layouts.

    values  (…, rows, columns)                     model.layers.0.mlp.up_proj.weight             BF16
    codes   (…, rows, columns)                     model.layers.0.mlp.up_proj.weight             F8_E4M3
    scales  (…, ⌈rows / 128⌉, ⌈columns / 128⌉)     model.layers.0.mlp.up_proj.weight_scale_inv   F32

    value ≈ code · scale, and scale = the largest magnitude of its block / 448

Decoding is `fp8.py`. Codes that are decoded to bfloat16 and quantised again come back as they were: the largest code of
a block is ±448, so its scale moves by less than one part in 256, and each value by less than half the step to the next
code. Scales come back too, where values are decoded to float32, or where the largest magnitude was a number of
bfloat16; and everywhere, if the scales that the values were decoded with are given.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings.encoding import ContentError
from weightbeam.formats.encodings.fp8 import blocks_over
from weightbeam.model_mappings.plan import is_float

CODES = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_CODE = np.float32(448)  # of the codes
STRIP = 2048  # columns that are quantised at a time: in float32 a block's rows of them are 1 MiB, which a core's cache holds
BLOCK = (128, 128)  # rows and columns that share a scale; serving engines have kernels for no other size
# one unit in the last place of bfloat16, relative: how far one rounding, and a factor undone, move a value
UNTOUCHED = np.float32(2**-7)
REASON = "quantised to FP8, a scale for each 128 × 128 values"  # why values aren't a source's to the bit
SUFFIX = "_scale_inv"  # behind the weight's name; the scale multiplies, whatever it is called


def _scales_for(amax: np.ndarray) -> np.ndarray:
    """DeepSeek's and compressed-tensors' scales, amax / 448; 1 for blocks of zeros, and for those so small that float32 has
    no scale for them: their codes are 0 either way.
    """
    scale = amax / LARGEST_CODE
    return np.where(scale != 0, scale, np.float32(1))


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a weight."""
    return blocks_over(shape, (1,) * (len(shape) - 2) + BLOCK)


def find_scales(values: np.ndarray, name: str) -> np.ndarray:
    """The scales of a weight alone; see `quantize`."""
    made = np.empty(scale_shape(values.shape), np.float32)
    for box, blocks in _strips(values.shape):
        made[blocks] = _scales_for(_magnitudes(values[box].astype(np.float32), name, box[-2].start))
    return made


def _strips(shape: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """`(values, scales)`: the indices of neighbouring blocks of a row of them, `STRIP` columns at most, and of their scales."""
    for lead in np.ndindex(*shape[:-2]):
        for row, top in enumerate(range(0, shape[-2], BLOCK[0])):
            for left in range(0, shape[-1], STRIP):
                blocks = slice(left // BLOCK[1], (left + STRIP) // BLOCK[1])
                yield (*lead, slice(top, top + BLOCK[0]), slice(left, left + STRIP)), (*lead, row, blocks)


def _magnitudes(band: np.ndarray, name: str, start: int) -> np.ndarray:
    """The largest magnitude of each block of a row of them, in float32; (rows, columns) -> (blocks,). Raises
    ContentError where a value is NaN or infinite.
    """
    largest = np.maximum(band.max(axis=0), -band.min(axis=0))
    starts = np.arange(0, band.shape[-1], BLOCK[1])
    amax = np.maximum.reduceat(largest, starts) if len(starts) else largest
    if not np.isfinite(amax).all():
        raise ContentError(
            f"{name}: a value in rows {start:,} to {start + len(band):,} is NaN or infinite; FP8 has no code for it"
        )
    return amax


def quantize(values: np.ndarray, name: str, scales: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Quantises a weight, or a box of one that begins and ends at blocks (or at the weight's end).

    Memory beside the result: a few MiB.

    Args:
      values: (…, rows, columns), bfloat16, float16 or float32.
      name: for messages.
      scales: those that the values may have been decoded with. A block of which every value is a code times its scale,
        but for one rounding to bfloat16, keeps it, and so gets its codes back; by chance a value in four lies so near,
        a block never. The scales of other blocks follow from their values.

    Returns:
      Codes in the shape of `values`, scales in `scale_shape` of it.

    Raises:
      ContentError: a value is NaN or infinite.
    """
    shape = scale_shape(values.shape)
    given = None if scales is None else scales.astype(np.float32).reshape(shape)
    codes, made = np.empty(values.shape, CODES), np.empty(shape, np.float32)
    for box, blocks in _strips(values.shape):
        band = values[box].astype(np.float32)
        starts = np.arange(0, band.shape[-1], BLOCK[1])
        widths = np.diff(starts, append=band.shape[-1])
        amax = _magnitudes(band, name, box[-2].start)
        scale = _scales_for(amax)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            kept = None if given is None else _decoded_with(given[blocks], band, starts, widths)
        made[blocks], coded = scale, codes[box]
        if kept is None or not kept.all():
            coded[:] = to_codes(np.divide(band, np.repeat(scale, widths), out=band if kept is None else None))
        if given is not None and kept is not None and kept.any():
            made[blocks][kept] = given[blocks][kept]
            columns = np.repeat(kept, widths)
            coded[:, columns] = to_codes(band[:, columns] / np.repeat(given[blocks], widths)[columns])
    return codes, made


def _decoded_with(scale: np.ndarray, band: np.ndarray, starts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Which blocks of a row of them hold nothing but codes times their scale, but for one rounding; (rows, columns) and
    (blocks,) -> (blocks,).
    """
    usable = np.isfinite(scale) & (scale != 0)
    spread = np.repeat(np.where(usable, scale, np.float32(1)), widths)
    meant = to_codes(band / spread).astype(np.float32) * spread
    near = (np.abs(meant - band) <= np.abs(meant) * UNTOUCHED).all(axis=0)
    return usable & (np.logical_and.reduceat(near, starts) if len(starts) else near)


def to_codes(values: np.ndarray) -> np.ndarray:
    """float32 values as the nearest codes, ties to even; beyond ±448 the largest.

    Exact by rounding to odd: of a float32 the upper half is kept, which has four mantissa bits more than a code, and
    its last bit is set if anything was cut off. So no tie arises that wasn't one, and a table of 65,536 entries says
    the code.
    """
    bits = values.view(np.uint32)
    # nothing is clipped; numpy is faster so
    return _table().take((bits >> 16) | ((bits & 0xFFFF) != 0), mode="clip").view(CODES)


@functools.cache
def _table() -> np.ndarray:
    """The code of every bfloat16, as a byte."""
    with np.errstate(invalid="ignore"):
        meanings = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        return np.clip(meanings, -LARGEST_CODE, LARGEST_CODE).astype(CODES).view(np.uint8)


# --- which weights, and what config.json says -------------------------------------------------------------------------

KEPT: Mapping[str, re.Pattern[str]] = {  # by the name of the tensor without `.weight`; releases in FP8 keep these
    "an embedding": re.compile(
        r"(.*\.)?(embed|embed_tokens|wte|word_embeddings|embed_tokens_per_layer|\w*pos_embed\w*|\w*position_embedding\w*|relative_attention_bias)"
    ),
    "the head": re.compile(r"(.*\.)?(lm_head|shared_head\.head)|head"),
    "a norm": re.compile(r"(.*\.)?\w*norm\d?"),
    "a router": re.compile(r"(.*\.)?(gate|router(\.\w+)*|shared_expert_gate)"),
    "a projection of the MTP block": re.compile(r"(.*\.)?(eh_proj|mtp\.fc)"),
    "a low-rank or depthwise part of linear attention": re.compile(r"(.*\.)?(conv1d|in_proj_(a|b|ba)|[fb]_[ab]_proj|[qkv]_conv1d)"),
    "the indexer's weights": re.compile(r"(.*\.)?weights_proj"),
    "a compressor's projection": re.compile(r"(.*\.)?compressor\.(.*\.)?(wkv|wgate|kv_proj|gate_proj)"),
    "a tower or its projector": re.compile(
        r"(.*\.)?(visual|vision_\w+|audio_\w+|\w*multi_?modal_\w*|mm_\w+|embed_vision|embed_audio|image_newline|talker|code2wav)(\..*)?"
        r"|((blocks|deepstack_merger_list)\.\d+|merger)\..*"  # Cosmos 3's
    ),
}  # fmt: skip
OUTSIDE = "outside of the layers"  # an embedding or a head, whatever this model calls it
IN_A_LAYER = re.compile(r"(.*\.)?\d+\..*")
# (expert, rows, columns), as transformers has them in memory
FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj)")


def why_kept(name: str, shape: Sequence[int]) -> str | None:
    """Why a tensor isn't quantised; None for the weight of a linear layer, or of fused experts."""
    if len(shape) == 3 and FUSED.fullmatch(name):
        return None
    module = name.removesuffix(".weight")
    if len(shape) != 2 or module == name:
        return "no weight of a linear layer"
    reason = next((reason for reason, pattern in KEPT.items() if pattern.fullmatch(module)), None)
    return reason or (None if IN_A_LAYER.fullmatch(module) else OUTSIDE)


def is_linear(name: str, dtype: np.dtype, shape: Sequence[int]) -> bool:
    """Whether a tensor is a weight that is quantised: of a linear layer, of a dtype that isn't quantised already."""
    return is_float(dtype) and dtype.itemsize > 1 and why_kept(name, shape) is None and math.prod(shape) > 0


def experts_of(name: str) -> str | None:
    """The module of fused experts that a tensor is of."""
    return name.rpartition(".")[0] if FUSED.fullmatch(name) else None


def stays_fused(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a tensor is of fused experts that engines don't load as codes (huggingface/transformers, v5.23.0,
    integrations/finegrained_fp8.py, `FP8Experts`).

    These have biases, as gpt-oss's, or are Llama 4's, or have sizes of no whole number of blocks, so that the gate and
    the up projection share one.

    Args:
      name: of the tensor.
      shapes: of all tensors.
    """
    if (module := experts_of(name)) is None:
        return False
    down = shapes.get(f"{module}.down_proj")
    is_whole = down is not None and all(size % block == 0 for size, block in zip(down[-2:], BLOCK, strict=True))
    return not is_whole or f"{name}_bias" in shapes or module.endswith(".feed_forward.experts")


# Several experts in one tensor, which transformers has in a module `experts` (Granite MoE's: its conversion_mapping.py).
JOINED = re.compile(r"(?P<experts>.*\.experts)\.(?!\d).*|(?P<moe>.*\.block_sparse_moe)\.(input|output)_linear\.weight")
# Their layers aren't nn.Linear: the weights are (inputs, outputs), and no engine takes them for codes.
CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"})
KERNEL = 16  # a convolution's is smaller


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A `config.json` and the objects in it, at any depth: a decoder may be of a kind of its own."""
    yield config
    for part in config.values():
        if isinstance(part, Mapping):
            yield from _parts(part)


def why_not(config: Mapping[str, Any], tensors: Iterable[tuple[str, Sequence[int]]]) -> list[tuple[str, str]]:
    """What can't be written so that engines read it as it is meant: the subject, and why.

    Args:
      config: `config.json`.
      tensors: `(name, shape)` of each.
    """
    if kind := next((kind for part in _parts(config) if (kind := str(part.get("model_type"))) in CONV1D_MODELS), None):
        why = f"'model_type' is {kind!r}, whose layers are transformers' Conv1D, which engines don't load in FP8"
        return [("config.json", why)]
    shapes = dict(tensors)
    outer = [(name, shape) for name, shape in shapes.items() if name.count(".") == 1]
    bare = tuple(module for module in not_converted(outer) if "." not in module)
    named = [
        (name, f"{next(filter(module.endswith, bare))} isn't quantised, and engines go by how a module's name ends")
        for name, shape in shapes.items()
        if (module := name.removesuffix(".weight")).endswith(bare) and len(shape) == 2 and why_kept(name, shape) is None
    ]
    unknown = "what engines make of such a tensor isn't known, and so nor whether they take it for codes"
    return named + [(name, f"{tuple(shape)}: {unknown}") for name, shape in shapes.items() if _is_unknown(name, shape)]


def _is_unknown(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is several matrices of a layer, and not known as experts, a tower's, or small kernels."""
    is_joined = len(shape) > 2 and min(shape[-2:]) >= KERNEL and IN_A_LAYER.fullmatch(name)
    return bool(is_joined) and not JOINED.fullmatch(name) and not KEPT["a tower or its projector"].fullmatch(name)


def not_converted(tensors: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """The modules with a matrix that isn't quantised, for `modules_to_not_convert`; embeddings and norms are no linear
    layers.

    Args:
      tensors: `(name, shape)` of each.
    """
    modules = set()
    for name, shape in tensors:
        if len(shape) == 2 and name.endswith(".weight"):
            if why_kept(name, shape) not in (None, "an embedding", "a norm"):
                modules.add(name.removesuffix(".weight"))
        elif len(shape) > 1 and (joined := JOINED.fullmatch(name)):
            modules.add(joined["experts"] or f"{joined['moe']}.experts")
    return sorted(modules)


def quantization_config(modules: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` as DeepSeek-V3 has it, which transformers, vLLM and SGLang read; `modules` as
    `not_converted` lists them.
    """
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    return config | ({"modules_to_not_convert": list(modules)} if modules else {})
