"""A quantised release as an ordinary one: the values by their definition, all else byte for byte, and transformers
loads it.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import pytest
from quantised import fp8_llama
from support import call, make_release, read_config, read_tensors


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
    assert call("diff", source, tmp_path / "out") == (0 if dtype == "float32" else 1)


def test_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A release that isn't quantised is refused, and so is an output that is there."""
    plain = make_release(tmp_path / "plain")
    assert call("dequantize", "--source", plain, "--output", tmp_path / "out") == 2
    assert "nothing to dequantise" in capsys.readouterr().err
    source, *_ = fp8_llama(tmp_path / "fp8")
    assert call("dequantize", "--source", source, "--output", plain, "--overwrite") == 2
    assert not (tmp_path / "out").exists()
