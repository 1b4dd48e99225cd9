"""bitsandbytes' 4 and 8 bits, against formulas in plain Python for boxes that cut bytes and blocks anywhere, and
against bitsandbytes itself.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import assert_decodes, boxes, decode, encoding_of, message_of, source_of
from support import read_file

from weightbeam.formats.encodings.nibbles import ScaleError

SAID = {"quant_method": "bitsandbytes", "load_in_4bit": True}
GOLDEN = Path(__file__).with_name("bitsandbytes.safetensors")  # `make_bitsandbytes.py` wrote it
STORAGE = (np.uint8, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def golden() -> dict[str, dict[str, np.ndarray]]:
    """The tensors of each case."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    for name, values in read_file(GOLDEN).items():
        case, _, name = name.partition("/")
        cases.setdefault(case, {})[name] = values
    return cases


def state(shape: tuple[int, ...], block: int, kind: str = "nf4", **nested: Any) -> np.ndarray:
    """What isn't a tensor in a quantisation, as the bytes of its JSON."""
    text = json.dumps({"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": shape} | nested)
    return np.frombuffer(text.encode(), np.uint8)


def magnitudes(
    rng: np.random.Generator, blocks: int, nested: int | None
) -> tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray]:
    """Tensors, fields of the JSON, and what they mean: one magnitude for each block, quantised in blocks of `nested`,
    or not.
    """
    if nested is None:
        plain = rng.uniform(0.01, 2, blocks).astype(np.float32)
        return {"x.weight.absmax": plain}, {}, plain
    codes, meanings = rng.integers(0, 256, blocks).astype(np.uint8), rng.uniform(-1, 1, 256).astype(np.float32)
    scale, offset = rng.uniform(0.01, 2, -(-blocks // nested)).astype(np.float32), 0.3
    meant = np.array(
        [meanings[code] * scale[block // nested] + np.float32(offset) for block, code in enumerate(codes)], np.float32
    )
    tensors = {"x.weight.absmax": codes, "x.weight.nested_absmax": scale, "x.weight.nested_quant_map": meanings}
    return tensors, {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}, meant


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    shape = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))
    return dict(
        shape=shape, block=draw(st.sampled_from([2, 4, 6, 32, 64])), kind=draw(st.sampled_from(["nf4", "fp4"])),
        nested=draw(st.sampled_from([None, 1, 3, 256])), storage=draw(st.sampled_from(STORAGE)), box=draw(boxes(shape)), seed=draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(case=cases())
def test_four_bits(tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]) -> None:
    """Any box is the slice of `meanings[code] · magnitude`, whatever the rank, the dtype that the bytes hide in, and
    the magnitudes' own quantisation.
    """
    rng = np.random.default_rng(case["seed"])
    shape, block = case["shape"], case["block"]
    elements = math.prod(shape)
    codes, meanings = rng.integers(0, 16, elements), rng.uniform(-1, 1, 16).astype(np.float32)
    tensors, fields, meant = magnitudes(rng, -(-elements // block), case["nested"])
    padded = np.append(codes, 0)[: elements + elements % 2]
    octets = (padded[::2] << 4 | padded[1::2]).astype(np.uint8)  # the first in the high half
    size = np.dtype(case["storage"]).itemsize
    octets = np.pad(octets, (0, -len(octets) % size)).view(case["storage"])[:, None]
    tensors |= {"x.weight": octets, "x.weight.quant_map": meanings}
    tensors[f"x.weight.quant_state.bitsandbytes__{case['kind']}"] = state(shape, block, case["kind"], **fields)
    encoding = encoding_of(tmp_path_factory.mktemp("bnb"), tensors, SAID)
    wanted = np.array([meanings[code] * meant[k // block] for k, code in enumerate(codes)], np.float32)
    assert_decodes(encoding, wanted.reshape(shape), case["box"])


@pytest.mark.parametrize("case", [case for case in golden() if case != "int8"])
def test_equals_bitsandbytes(tmp_path: Path, case: str) -> None:
    """To the bit, in float32."""
    tensors = golden()[case]
    values = tensors.pop("values")
    box = tuple((size // 3, size - size // 5) for size in values.shape)
    assert_decodes(encoding_of(tmp_path, tensors, SAID), values, box)


def test_eight_bits_equal_bitsandbytes(tmp_path: Path) -> None:
    """With the layout said and not said."""
    tensors = golden()["int8"]
    values = tensors.pop("values")
    assert_decodes(
        encoding_of(tmp_path / "said", tensors, {"quant_method": "bitsandbytes"}), values, ((3, 11), (5, 68))
    )
    del tensors["x.weight_format"]
    assert_decodes(
        encoding_of(tmp_path / "silent", tensors, {"quant_method": "bitsandbytes"}), values, ((0, 19), (69, 70))
    )


def test_every_code_of_eight_bits(tmp_path: Path) -> None:
    """-128 to 127 with magnitudes of all sizes: code · magnitude / 127 within one rounding more than exact."""
    scales = np.array([1, 1e-38, 2e36, 0, 0.1, 127], np.float32)
    codes = np.broadcast_to(np.arange(-128, 128).astype(np.int8), (len(scales), 256))
    values = decode(encoding_of(tmp_path, {"x.weight": codes, "x.SCB": scales}, {"quant_method": "bitsandbytes"}))
    exact = codes.astype(np.float64) * scales.astype(np.float64)[:, None] / 127
    np.testing.assert_allclose(values, exact, rtol=2**-23, atol=2**-148)
    assert values[5].tolist() == list(range(-128, 128))


def test_every_byte(tmp_path: Path) -> None:
    """All pairs of codes; the first is in the high half."""
    meanings = np.linspace(-1, 1, 16, dtype=np.float32)
    tensors = {
        "x.weight": np.arange(256, dtype=np.uint8)[:, None],
        "x.weight.quant_map": meanings,
        "x.weight.absmax": np.array([1, -2, 1e-38, 3e38, 0, 1e-45, 0.1, 7], np.float32),
        "x.weight.quant_state.bitsandbytes__nf4": state((512,), 64),
    }
    wanted = np.array(
        [meanings[code] for byte in range(256) for code in (byte >> 4, byte & 15)], np.float32
    ) * np.repeat(tensors["x.weight.absmax"], 64)
    assert_decodes(encoding_of(tmp_path, tensors, SAID), wanted, ((63, 450),))


def test_a_box_reads_its_own_bytes_and_blocks_alone(tmp_path: Path) -> None:
    """Whole rows are one range; cut rows one each, with the blocks that they touch."""
    tensors, fields, _ = magnitudes(np.random.default_rng(0), 128, 16)
    tensors |= {"x.weight": np.zeros((4096, 1), np.uint8), "x.weight.quant_map": np.zeros(16, np.float32)}
    tensors["x.weight.quant_state.bitsandbytes__nf4"] = state((64, 128), 64, **fields)
    encoding = encoding_of(tmp_path, tensors, SAID)
    assert encoding.label == "nf4 in blocks of 64, magnitudes in 8 bits"
    maps = [("quant_map", ((0, 16),)), ("nested_quant_map", ((0, 256),))]
    whole_rows = [("", ((640, 1280),)), ("absmax", ((20, 40),)), ("nested_absmax", ((1, 3),))]
    cut_rows = [
        ("", ((671, 674),)),
        ("absmax", ((20, 22),)),
        ("nested_absmax", ((1, 2),)),
        ("", ((735, 738),)),
        ("absmax", ((22, 24),)),
        ("nested_absmax", ((1, 2),)),
    ]
    for box, wanted in ((((10, 20), (0, 128)), whole_rows), (((10, 12), (63, 67)), cut_rows)):
        reads = [
            (read.tensor.name.removeprefix("x.weight").removeprefix("."), read.box) for read in encoding.reads(box)
        ]
        assert reads == [*maps, *wanted]


def nf4() -> dict[str, np.ndarray]:
    """Tensors that are well."""
    return {
        "x.weight": np.zeros((128, 1), np.uint8),
        "x.weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32),
        "x.weight.absmax": np.ones(4, np.float32),
        "x.weight.quant_state.bitsandbytes__nf4": state((4, 64), 64),
    }


def int8() -> dict[str, np.ndarray]:
    return {"x.weight": np.zeros((4, 8), np.int8), "x.SCB": np.ones(4, np.float32)}


def test_a_module_that_isnt_to_be_quantised(tmp_path: Path) -> None:
    """What the config says of it stands in this format's own field; it is told, and decoded."""
    said = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["x"]}
    problems, warnings = source_of(tmp_path, int8(), said).check_config({"quantization_config": said})
    assert not problems
    assert ["says that it isn't (llm_int8_skip_modules)" in warning for warning in warnings] == [True]


STATE = "x.weight.quant_state.bitsandbytes__nf4"
REFUSED: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "no JSON": (nf4() | {STATE: np.zeros(9, np.uint8)}, "isn't JSON with a shape and a blocksize"),
    "no shape": (
        nf4() | {STATE: np.frombuffer(b'{"blocksize": 64}', np.uint8)},
        "isn't JSON with a shape and a blocksize",
    ),
    "half a million brackets": (nf4() | {STATE: np.frombuffer(b"[" * 500_000, np.uint8)}, "500,000 bytes"),
    "brackets that fit": (
        nf4() | {STATE: np.frombuffer(b"[" * 60_000, np.uint8)},
        "isn't JSON with a shape and a blocksize",
    ),
    "a block of no axis": (nf4() | {STATE: state((4, 64), 2**31)}, "an even blocksize"),
    "a shape of no tensor": (nf4() | {STATE: state((2**31, 64), 64)}, "expected quant_type nf4, a shape"),
    "an odd block": (nf4() | {STATE: state((4, 64), 63)}, "an even blocksize"),
    "another kind": (nf4() | {STATE: state((4, 64), 64, "fp4")}, "expected quant_type nf4"),
    "another shape": (nf4() | {STATE: state((4, 65), 64)}, "should be a column of 130 bytes"),
    "a row": (nf4() | {"x.weight": np.zeros((1, 128), np.uint8)}, "should be a column of 128 bytes"),
    "other blocks": (nf4() | {STATE: state((4, 64), 32)}, "needs 8 magnitudes"),
    "too few meanings": (nf4() | {"x.weight.quant_map": np.zeros(8, np.float32)}, "16 meanings"),
    "magnitudes that are codes of nothing": (
        nf4() | {"x.weight.absmax": np.ones(4, np.uint8)},
        "is uint8; in 8 bits it needs nested_absmax",
    ),
    "no magnitudes": (
        {name: values for name, values in nf4().items() if name != "x.weight.absmax"},
        "x.weight.absmax is missing",
    ),
    "8 bits laid out for Turing": (int8() | {"x.weight_format": np.array(2, np.uint8)}, "laid out as col_turing"),
    "8 bits with other magnitudes": (int8() | {"x.SCB": np.ones(8, np.float32)}, "a magnitude for each row"),
    "8 bits with magnitudes of float16": (int8() | {"x.SCB": np.ones(4, np.float16)}, "x.SCB is float16"),
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"nested_offset": 1e300}, "nested_offset 1e+300"), ({"nested_blocksize": 2**63}, "nested_blocksize")],
)
def test_nested_fields_that_make_no_sense(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    tensors, nested, _ = magnitudes(np.random.default_rng(0), 4, 256)
    assert message in message_of(tmp_path, nf4() | tensors | {STATE: state((4, 64), 64, **nested | fields)}, SAID)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    tensors, message = REFUSED[case]
    assert message in message_of(tmp_path, tensors, SAID)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_magnitudes_that_are_no_numbers_are_refused_when_met(tmp_path: Path, number: float) -> None:
    tensors = nf4()
    tensors["x.weight.absmax"][2] = number
    encoding = encoding_of(tmp_path / "4", tensors, SAID)
    assert decode(encoding, ((0, 2), (0, 64))).shape == (2, 64)
    with pytest.raises(ScaleError, match=r"x\.weight\.absmax"):
        decode(encoding, ((2, 3), (5, 6)))
    tensors = int8()
    tensors["x.SCB"][2] = number
    encoding = encoding_of(tmp_path / "8", tensors, SAID)
    assert decode(encoding, ((0, 2), (0, 8))).shape == (2, 8)
    with pytest.raises(ScaleError, match=r"x\.SCB"):
        decode(encoding, ((2, 3), (5, 6)))
