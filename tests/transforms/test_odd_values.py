"""NaN, infinities and matrices of zeros are counted on the way, by tensor, whatever the layout, the units and the
restarts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import BF16, DEEPSEEK, F32, LLAMA, call, convert, make_release, random_tensors, save

from weightbeam.formats.record import provenance
from weightbeam.formats.record.extremes import Extremes
from weightbeam.pipelines.commands.convert import convert as convert_release
from weightbeam.transforms.comparing import odd_values

MODEL = ("--maxtext_model", "llama2-7b")
NOT_FINITE = {
    "model.layers.1.mlp.up_proj.weight": {"nan": 2, "infinite": 1},
    "model.norm.weight": {"nan": 1, "infinite": 0},
}
ZERO = ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight"]
SPECIAL = [
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x3F80,
    0xBF80,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0xFF80,
    0x7F81,
    0xFF81,
    0x7FC0,
    0xFFC0,
    0x7FFF,
    0xFFFF,
]


def odd_tensors() -> dict[str, np.ndarray]:
    """A model with what a release hardly means."""
    tensors = random_tensors(LLAMA)
    tensors["model.norm.weight"][3] = np.nan
    tensors["model.layers.1.mlp.up_proj.weight"][2, 5] = -np.inf
    tensors["model.layers.1.mlp.up_proj.weight"][2, 7] = -np.nan
    tensors["model.layers.1.mlp.up_proj.weight"][47, 31] = np.nan
    tensors["model.layers.0.self_attn.q_proj.weight"][:] = 0
    tensors["lm_head.weight"][:] = -0.0
    tensors["model.layers.0.mlp.down_proj.weight"][:31] = 0  # not throughout
    tensors["model.layers.0.input_layernorm.weight"][:] = 0  # no matrix
    return tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("odd") / "hf", LLAMA, odd_tensors())


@given(st.lists(st.sampled_from(SPECIAL) | st.integers(0, 0xFFFF), max_size=8))
def test_what_the_bits_tell(bits: list[int]) -> None:
    """The same as numpy says of the values."""
    for dtype, shift in ((BF16, 0), (np.dtype(np.float16), 0), (F32, 16)):
        values = (np.array(bits, f"u{dtype.itemsize}") << shift).view(dtype)
        found = Extremes(dtype)
        for part in np.array_split(values, 3):
            found.look(part)
        with np.errstate(invalid="ignore"):
            wide = values.astype(F32)
            assert (found.is_finite, found.is_zero) == (bool(np.isfinite(wide).all()), not wide.any())


def test_integers_are_no_weights() -> None:
    found = Extremes(np.dtype(np.int32))
    found.look(np.zeros(3, np.int32))
    assert (found.is_finite, found.is_zero) == (True, False)


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        (("--scan_layers", "false", "--mesh", "fsdp=4"), 1 << 18),
        (("--unit_bytes", "24000", "--mesh", "fsdp=4", "--use_ocdbt", "false"), 64),
        (("--save_dtype", "float32", "--vocab_size", "70"), 1 << 18),
    ],
)
def test_they_are_told_and_recorded(
    options: tuple[str, ...],
    piece: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of padding nothing; each kind in one line, and in the record and `--json` all of them."""
    monkeypatch.setattr(provenance, "CACHED_BYTES", piece)
    capsys.readouterr()
    assert call("convert", source, tmp_path / "out", *MODEL, *options, "--json", tmp_path / "told.json", "-q") == 0
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if "finite" in line or "zero throughout" in line]
    assert lines == [
        "warning: 2 tensors hold values that aren't finite: model.layers.1.mlp.up_proj.weight (2 NaN, 1 infinite), model.norm.weight (1 NaN)",
        "warning: 2 matrices are zero throughout: lm_head.weight, model.layers.0.self_attn.q_proj.weight",
    ]
    for told in (
        json.loads((tmp_path / "told.json").read_bytes()),
        json.loads((tmp_path / "out/0/conversion.json").read_bytes()),
    ):
        assert (told["not_finite"], told["zero"]) == (NOT_FINITE, ZERO)


def test_they_survive_a_restart(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was counted before the conversion stopped stands in the ledger."""

    def stop(*args: Any) -> None:
        raise OSError("stopped")

    options = ("convert", source, tmp_path / "out", *MODEL, "--unit_bytes", "24000")
    with monkeypatch.context() as patched:
        patched.setattr("weightbeam.formats.targets.orbax.OrbaxTarget.assemble", stop)
        assert call(*options) == 1
    monkeypatch.setattr(odd_values, "find_odd", stop)  # nothing is left to be counted
    assert call(*options, "--resume") == 0
    assert "2 matrices are zero throughout" in capsys.readouterr().err


def test_many_are_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three by name; of experts each is a matrix."""
    tensors = {
        name: np.zeros_like(values) if ".experts." in name else values
        for name, values in random_tensors(DEEPSEEK).items()
    }
    made = convert_release(str(save(tmp_path / "hf", DEEPSEEK, tensors)), str(tmp_path / "out"), progress=False)
    number = sum(".experts." in name for name in tensors)
    assert len(made.odd_values["zero"]) == number
    assert made.warnings[0].endswith(f" and {number - 3} more")
    assert made.warnings[0].startswith(
        f"{number} matrices are zero throughout: model.layers.1.mlp.experts.0.down_proj.weight, "
    )


def test_ordinary_values_make_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zeros that a table fills in, or that pad an axis, are meant."""
    step = convert(make_release(tmp_path / "hf"), tmp_path / "out", *MODEL, "--vocab_size", "100")
    record = json.loads((step / "conversion.json").read_bytes())
    assert not record.keys() & {"not_finite", "zero"}
    assert "zero throughout" not in capsys.readouterr().err
