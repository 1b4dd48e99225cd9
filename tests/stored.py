"""What the tests of quantised formats share: packed words, checkpoints of a few tensors, any box of them, and a
comparison to the bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support import BF16, F32

from weightbeam.formats.encodings import Encoding
from weightbeam.formats.release.source import ReleaseTensors, open_source
from weightbeam.formats.safetensors import open_hf, read_boxes
from weightbeam.model_mappings.boxes import Box, extent, whole

# of the codes of a word, from its lowest bits up (AutoAWQ 0.2.9, awq/utils/packing_utils.py)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def pack(codes: np.ndarray, bits: int, dense: bool = True) -> np.ndarray:
    """Rows of unsigned codes as int32 words: each row is one long number, the first code in its lowest bits."""
    rows, columns = codes.shape
    per_word = 32 // bits
    words = math.ceil(columns * bits / 32) if dense else math.ceil(columns / per_word)
    packed = np.zeros((rows, words), np.uint32)
    for row in range(rows):
        number = 0
        for column in range(columns):
            place = column * bits if dense else 32 * (column // per_word) + bits * (column % per_word)
            number |= int(codes[row, column]) << place
        packed[row] = np.frombuffer(number.to_bytes(4 * words, "little"), "<u4")
    return packed.view(np.int32)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """Words along the second axis, with codes in AWQ's order."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for place, column in enumerate(AWQ_COLUMNS):
        words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def source_of(
    folder: Path, tensors: Mapping[str, np.ndarray], quantization: Mapping[str, Any] | None = None
) -> ReleaseTensors:
    """Writes a checkpoint into `folder` and opens it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "any"} | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return open_source(open_hf(folder))


def encoding_of(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    quantization: Mapping[str, Any] | None = None,
    name: str = "x.weight",
) -> Encoding:
    """The encoding of the only quantised weight."""
    source = source_of(folder, tensors, quantization)
    assert source.problems == ()
    return source.encodings[name]


def message_of(folder: Path, tensors: Mapping[str, np.ndarray], quantization: Mapping[str, Any] | None = None) -> str:
    """The messages of a checkpoint's problems."""
    source = source_of(folder, tensors, quantization)
    assert source.problems
    assert "x.weight" not in source.encodings
    return "\n".join(f"{problem.subject}: {problem.message}" for problem in source.problems)


def decode(encoding: Encoding, box: Box | None = None, dtype: Any = F32) -> np.ndarray:
    """The values of a box, or of the whole."""
    box = whole(encoding.shape) if box is None else box
    made = []

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made.append(np.full(shape, 77, dtype))  # a value that is wrong where it stays
        return made[-1]

    values = encoding.decode(read_boxes(encoding.reads(box))[0], box, np.dtype(dtype), empty)
    assert values.shape == extent(box)
    assert len(made) == 1
    assert np.shares_memory(values, made[0]) or not values.size
    return values


def assert_decodes(encoding: Encoding, wanted: np.ndarray, box: Box) -> None:
    """The whole and the box have the values `wanted` in float32 and in bfloat16, to the bit."""
    assert wanted.dtype == F32
    assert encoding.shape == wanted.shape
    for dtype in (F32, BF16):
        with np.errstate(over="ignore"):
            rounded = wanted.astype(dtype)
        for part in (whole(wanted.shape), box):
            got = np.ascontiguousarray(decode(encoding, part, dtype))
            assert got.dtype == dtype
            bits = np.dtype(f"u{dtype.itemsize}")
            np.testing.assert_array_equal(got.view(bits), np.ascontiguousarray(rounded[slices(part)]).view(bits))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box that isn't empty."""
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return tuple((start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True))
