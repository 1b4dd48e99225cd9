"""Adapters on a quantised base: dequantised, then merged in float32, a part at a time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from quantised import Quantised, awq, compressed, gptq, nf4
from safetensors.numpy import save_file
from stored import COMPRESSED
from support import BF16, FP8, decoded

from weightbeam.formats.adapters import merge, open_adapter
from weightbeam.formats.adapters.merged import STRIP_ELEMENTS
from weightbeam.formats.adapters.ties import Ties
from weightbeam.formats.encodings import Encoding
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import open_hf

NAME = "model.layers.0.self_attn.q_proj"
SHAPE = (96, 1024)  # of more than one strip


def fp8(name: str, shape: tuple[int, ...], seed: int) -> Quantised:
    """Blocks of 64 by 128."""
    rng = np.random.default_rng(seed)
    codes = rng.standard_normal(shape, np.float32).astype(FP8)
    scales = rng.uniform(0.01, 0.1, (-(-shape[0] // 64), -(-shape[1] // 128))).astype(np.float32)
    rows, columns = np.indices(shape)
    return {name: codes, f"{name}_scale_inv": scales}, codes.astype(np.float32) * scales[rows // 64, columns // 128]


WEIGHTS = dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True, actorder=None)
FORMATS: dict[str, tuple[Callable[[str, tuple[int, ...], int], Quantised], dict]] = {
    "fp8": (fp8, dict(quant_method="fp8", weight_block_size=[64, 128])),
    "nf4": (nf4, dict(quant_method="bitsandbytes", load_in_4bit=True)),
    "int4": (compressed, COMPRESSED | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}}),
    "gptq": (gptq, dict(quant_method="gptq", bits=4, group_size=32, desc_act=True, sym=False)),
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")),
}


def write_quantised(
    folder: Path, quantiser: Callable[[str, tuple[int, ...], int], Quantised], quantization: dict, dora: bool
) -> tuple[Encoding, np.ndarray]:
    """A quantised weight with an adapter on it, and what it should be in float64."""
    rng = np.random.default_rng(1)
    stored, values = quantiser(f"{NAME}.weight", SHAPE, 3)
    a, b = rng.standard_normal((5, SHAPE[1]), np.float32), rng.standard_normal((SHAPE[0], 5), np.float32)
    base, adapter = folder / "base", folder / "adapter"
    for place, tensors, file, config in (
        (base, stored, "model.safetensors", {"model_type": "any", "quantization_config": quantization}),
        (
            adapter,
            {f"base_model.model.{NAME}.lora_{side}.weight": factor for side, factor in (("A", a), ("B", b))},
            "adapter_model.safetensors",
            {"peft_type": "LORA", "r": 5, "lora_alpha": 2, "use_dora": dora},
        ),
    ):
        place.mkdir(parents=True)
        if dora and place == adapter:
            tensors[f"base_model.model.{NAME}.lora_magnitude_vector"] = rng.uniform(1, 2, SHAPE[0]).astype(np.float32)
            magnitude = tensors[f"base_model.model.{NAME}.lora_magnitude_vector"]
        save_file(tensors, place / file)
        (place / ("config.json" if place == base else "adapter_config.json")).write_text(json.dumps(config))
    source = open_source(open_hf(base))
    assert not source.problems
    merging = merge(source.encodings, [open_adapter(adapter)], {}, "any", Ties())
    assert not merging.problems
    wanted = values.astype(np.float64) + 2 / 5 * b.astype(np.float64) @ a
    if dora:
        wanted *= magnitude[:, None] / np.linalg.norm(wanted, axis=1, keepdims=True)
    return merging.encodings[f"{NAME}.weight"], wanted


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_dequantised_and_merged(tmp_path: Path, kind: str, dora: bool) -> None:
    """All of it and parts of it, in both dtypes; a part has the bits of the whole."""
    assert SHAPE[0] * SHAPE[1] > STRIP_ELEMENTS
    encoding, wanted = write_quantised(tmp_path, *FORMATS[kind], dora)
    everything = decoded(encoding)
    np.testing.assert_allclose(everything, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(decoded(encoding, dtype=BF16), everything.astype(BF16))
    rng = random.Random(2)
    for _ in range(6):
        box = tuple(tuple(sorted(rng.sample(range(size + 1), 2))) for size in SHAPE)
        np.testing.assert_array_equal(decoded(encoding, box), everything[tuple(slice(*span) for span in box)])
    assert encoding.label is not None
    assert ("DoRA" if dora else "LoRA") in encoding.label


def test_the_base_is_never_whole_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decoded some rows at a time, so that merging takes no more memory than a strip."""
    encoding, _ = write_quantised(tmp_path, *FORMATS["fp8"], dora=False)
    sizes = []
    decode = type(encoding.base).decode

    def watch(self: Encoding, stored: list, box: tuple, *rest: object) -> np.ndarray:
        sizes.append(np.prod([stop - start for start, stop in box]))
        return decode(self, stored, box, *rest)

    monkeypatch.setattr(type(encoding.base), "decode", watch)
    decoded(encoding)
    assert len(sizes) > 1
    assert max(sizes) <= STRIP_ELEMENTS
