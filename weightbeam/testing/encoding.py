"""Stored tensors against the values that they mean, as plans and workers read them."""

from __future__ import annotations

import json
import math
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings import Encoding
from weightbeam.formats.encodings.table import known
from weightbeam.formats.release.source import ReleaseTensors, open_source
from weightbeam.formats.safetensors import open_hf, read_boxes
from weightbeam.formats.safetensors.header import DTYPE_NAMES
from weightbeam.model_mappings.boxes import Box, extent, slices, whole

DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
UNTOUCHED = 77  # what lies in an array before it is decoded into
BOXES = 40  # of a weight that are decoded by themselves


def write_release(
    folder: Path, tensors: Mapping[str, np.ndarray], quantization: Mapping[str, Any] | None = None
) -> Path:
    """Writes tensors as a release of one file, with a `config.json` that names no family."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "any"} | ({"quantization_config": dict(quantization)} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    header, at, stored = {}, 0, []
    for name, values in tensors.items():
        data = np.ascontiguousarray(values).tobytes()
        where = {"dtype": DTYPE_NAMES[values.dtype], "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        header[name], at = where, at + len(data)
        stored.append(data)
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    (folder / "model.safetensors").write_bytes(len(said).to_bytes(8, "little") + said + b"".join(stored))
    return folder


def check_encoding(
    tensors: Mapping[str, np.ndarray],
    values: np.ndarray,
    quantization: Mapping[str, Any] | None = None,
    name: str = "x.weight",
    format: str | None = None,
) -> None:
    """Checks how a weight is stored: which tensors belong to it is found, its values are right to the bit in float32 and
    rounded once in bfloat16, any box of it is the slice of the whole, and without a part that it needs it is refused.

    Args:
      tensors: all that is stored of the weight, by name. What its values are must come from somewhere else than the
        encoding: from whoever writes such releases, or from plain numpy.
      values: of the weight, in float32.
      quantization: `quantization_config` of `config.json`.
      name: the weight's logical name.
      format: the `QuantizedFormat` that is meant, by name; any unless said.

    Raises:
      AssertionError: one of these doesn't hold.

    Example:
      >>> codes, scale = np.array([[1, -2], [3, 4]], ml_dtypes.float8_e4m3fn), np.array([0.5], np.float32)
      >>> stored = {"x.weight": codes, "x.weight_scale": scale}
      >>> told = {"quant_method": "fp8", "activation_scheme": "static"}
      >>> check_encoding(stored, codes.astype(np.float32) * np.float32(0.5), told)
    """
    if values.dtype != np.float32:
        raise AssertionError(f"values should be float32, but are {values.dtype}")
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(open_hf(write_release(Path(folder, "whole"), tensors, quantization)))
        encoding = _only(source, name)
        _check_value(encoding, values)
        for dtype in DTYPES:
            _check_boxes(encoding, values, dtype)
        for missing in _required(tensors, format):
            rest = {each: stored for each, stored in tensors.items() if each != missing}
            found = open_source(open_hf(write_release(Path(folder, f"without {missing}"), rest, quantization)))
            _holds(bool(found.problems), f"without {missing} nothing stands against the release")
            _holds(name not in found.encodings, f"without {missing} {name} is read all the same")


def _holds(true: bool, otherwise: str) -> None:
    """Raises AssertionError in words; `assert` is left out by `python -O`."""
    if not true:
        raise AssertionError(otherwise)


def _only(source: ReleaseTensors, name: str) -> Encoding:
    """The encoding of the weight, which must be all that the release holds."""
    _holds(not source.problems, "\n".join(map(str, source.problems)))
    _holds(set(source.encodings) == {name}, f"holds {', '.join(source.encodings)}; {name} was meant")
    return source.encodings[name]


def _check_value(encoding: Encoding, values: np.ndarray) -> None:
    """What a plan asks of an encoding."""
    rank = len(values.shape)
    _holds(encoding.shape == values.shape, f"shape is {encoding.shape}, should be {values.shape}")
    _holds(sorted(encoding.order) == list(range(rank)), f"order is {encoding.order}, no order of {rank} axes")
    _holds(encoding.indivisible <= set(range(rank)), f"indivisible is {set(encoding.indivisible)} of {rank} axes")
    _holds(encoding.decode_rate > 0, f"decode_rate is {encoding.decode_rate}")
    _holds(encoding.label is None or encoding.label.isprintable(), f"label is {encoding.label!r}")
    _holds(pickle.loads(pickle.dumps(encoding)) == encoding, "pickled it is another one")
    hash(encoding)


def _check_boxes(encoding: Encoding, values: np.ndarray, dtype: np.dtype) -> None:
    """The whole and many boxes, to the bit; no box reads more than the whole."""
    with np.errstate(over="ignore"):
        wanted = values.astype(dtype)
    total = sum(read.nbytes for read in encoding.reads(whole(values.shape)))
    for box in _boxes(values.shape):
        reads = encoding.reads(box)
        _holds(sum(read.nbytes for read in reads) <= total, f"{box} reads more bytes than the whole weight")
        got = _decode(encoding, box, dtype)
        _holds(got.dtype == dtype or encoding.label is None, f"{box} is {got.dtype}, should be {dtype}")
        _same_bits(got.astype(dtype), wanted[slices(box)], f"{box} in {dtype}")


def _decode(encoding: Encoding, box: Box, dtype: np.dtype) -> np.ndarray:
    """A box's values, in an array that held something else before."""

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.full(shape, UNTOUCHED, dtype)

    got = encoding.decode(read_boxes(encoding.reads(box))[0], box, dtype, empty)
    _holds(got.shape == extent(box), f"{box} has the shape {got.shape}")
    return got


def _same_bits(got: np.ndarray, wanted: np.ndarray, where: str) -> None:
    """The same bit patterns, -0 and 0 apart; NaNs count as alike."""
    lost = np.isnan(wanted.astype(np.float32))
    bits = f"u{wanted.dtype.itemsize}"
    other = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(wanted).view(bits)
    other = np.where(lost, ~np.isnan(got.astype(np.float32)), other)
    if other.any():
        at = tuple(int(each[0]) for each in np.nonzero(other))
        _holds(False, f"{where}: {other.sum():,} values differ; at {at} {got[at]} in place of {wanted[at]}")


def _boxes(shape: tuple[int, ...]) -> Iterator[Box]:
    """The whole, and boxes anywhere in it, the same at every run."""
    yield whole(shape)
    random = np.random.default_rng(0)
    for _ in range(BOXES if math.prod(shape) > 1 else 0):
        starts = [int(random.integers(0, size)) for size in shape]
        yield tuple((start, int(random.integers(start, size)) + 1) for start, size in zip(starts, shape, strict=True))


def _required(tensors: Mapping[str, np.ndarray], format: str | None) -> Iterator[str]:
    """The tensors without which a weight can't be read, by the format that is meant."""
    for entry in known().formats:
        if format is not None and entry.name == format:
            for each in tensors:
                if any(companion.required and each.endswith(companion.suffix) for companion in entry.companions):
                    yield each
            return
    _holds(format is None, f"no format is called {format!r}; known are {', '.join(e.name for e in known().formats)}")
