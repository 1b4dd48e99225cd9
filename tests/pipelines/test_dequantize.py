"""A quantised release as an ordinary one: the values by their definition, all else byte for byte, and transformers
loads it.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from quantised import fp8_llama
from support import LLAMA, assert_same_bits, call, make_release, random_tensors, read_config, read_tensors, save

import weightbeam as wb


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_values_by_their_definition(tmp_path: Path, dtype: str) -> None:
    """Code × scale in float32, cast once; norms and embeddings stay as they are; no scale and no `quantization_config`
    is left.
    """
    source, stored, values = fp8_llama(tmp_path / "fp8")
    assert (
        call(
            "dequantize",
            "--source",
            source,
            "--output",
            tmp_path / "out",
            "--save_dtype",
            dtype,
            "--unit_bytes",
            "20000",
        )
        == 0
    )
    made = read_tensors(tmp_path / "out")
    assert made.keys() == values.keys()
    for name, tensor in made.items():
        wanted = stored[name] if "proj" not in name else values[name].astype(getattr(ml_dtypes, dtype, None) or dtype)
        assert tensor.tobytes() == wanted.tobytes(), name
    assert "quantization_config" not in read_config(tmp_path / "out")
    dropped = [*json.loads((tmp_path / "out" / "weightbeam.json").read_text())["dropped"]]
    assert dropped
    assert all(codes < scale for codes, scale in zip(dropped[::2], dropped[1::2], strict=True))  # whichever the process
    assert call("diff", source, tmp_path / "out") == (0 if dtype == "float32" else 1)


@pytest.mark.parametrize("stored", [np.uint8, ml_dtypes.float8_e8m0fnu], ids=["U8", "F8_E8M0"])
def test_blocks_of_32_with_exponents(tmp_path: Path, stored: type) -> None:
    """As DeepSeek-V4.1 has them: its config, its names, every code, exponents of every size, in units that cut through
    blocks; and a table with a scale for 32 columns of each row, whose `quantization_config` says nothing of it.
    """
    said = dict(
        quant_method="fp8",
        activation_scheme="dynamic",
        weight_block_size=[32, 32],
        scale_fmt="ue8m0",
        expert_dtype="fp4",
    )
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {"norm.weight": rng.standard_normal(100).astype(ml_dtypes.bfloat16)}
    values = dict(tensors)
    for name, block in (("layers.1.attn.wq_a", (32, 32)), ("layers.1.engram.embed", (1, 32))):
        codes = np.resize(np.arange(256, dtype=np.uint8), (200, 160)).view(ml_dtypes.float8_e4m3fn)
        rows, columns = np.indices(codes.shape)
        exponents = rng.integers(0, 255, (-(-200 // block[0]), 160 // block[1]), np.uint8)
        scales = np.ldexp(np.float64(1), exponents.astype(np.int32) - 127).astype(np.float32)
        tensors |= {f"{name}.weight": codes, f"{name}.scale": exponents.view(stored)}
        with np.errstate(over="ignore", invalid="ignore"):
            wide = codes.astype(np.float32) * scales[rows // block[0], columns // block[1]]
            values[f"{name}.weight"] = wide.astype(ml_dtypes.bfloat16)
    source = save(tmp_path / "hf", {"model_type": "deepseek_v41", "quantization_config": said}, tensors)
    assert call("dequantize", "--source", source, "--output", tmp_path / "out", "--unit_bytes", "6000") == 0
    assert_same_bits(read_tensors(tmp_path / "out"), values)


def test_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A release that isn't quantised is refused, and so is an output that is there."""
    plain = make_release(tmp_path / "plain")
    assert call("dequantize", "--source", plain, "--output", tmp_path / "out") == 2
    assert "nothing to dequantise" in capsys.readouterr().err
    source, *_ = fp8_llama(tmp_path / "fp8")
    assert call("dequantize", "--source", source, "--output", plain, "--overwrite") == 2
    assert not (tmp_path / "out").exists()


def int8_llama() -> dict[str, np.ndarray]:
    """Tensors of a release whose projections are int8 with a scale for each row."""
    stored: dict[str, np.ndarray] = {}
    for name, tensor in random_tensors(LLAMA).items():
        stored[name] = tensor
        if "proj" in name:
            stored[name] = (tensor.astype(np.float32) * 100).astype(np.int8)
            stored[f"{name}_scale"] = np.full((len(tensor), 1), 0.01, np.float32)
    return stored


@pytest.mark.parametrize("fault", ["a scale is missing", "a scale is transposed"])
def test_codes_without_their_scale_stop_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """By the tensor's name, before anything is written: codes were published as values, or left out without a word."""
    name = "model.layers.1.mlp.down_proj.weight"
    stored = int8_llama()
    scale = stored.pop(f"{name}_scale")
    if fault == "a scale is transposed":
        stored[f"{name}_scale"] = np.ascontiguousarray(scale.T)
    said = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    source = save(tmp_path / "int8", LLAMA | {"quantization_config": said}, stored)
    out = tmp_path / "out"
    for command in (
        ("plan", source), ("convert", source, out), ("dequantize", source, out), ("quantize", source, out),
        ("diff", source, source), ("quantize", make_release(tmp_path / "plain"), out, "--like", source, "--overwrite"),
    ):  # fmt: skip
        assert call(*command) == 2, command
        assert name in "".join(capsys.readouterr()), command
        assert not out.exists()
    with pytest.raises(wb.Refused, match=name.replace(".", r"\.")):
        wb.open(str(source), as_is=True)
