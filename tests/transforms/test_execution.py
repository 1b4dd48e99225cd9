"""Any box of any array can be made by itself: it is the same box of what plain numpy makes of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    BF16,
    DEEPSEEK,
    F32,
    LLAMA,
    QWEN3_MOE,
    assert_same_bits,
    bare,
    random_tensors,
    reference,
    save,
    split,
)

from weightbeam.formats.safetensors import open_hf
from weightbeam.model_mappings.boxes import whole
from weightbeam.transforms.execution.boxes import make_boxes
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

MODELS = {"llama": LLAMA, "qwen3_moe": QWEN3_MOE, "deepseek": DEEPSEEK}


def planned(folder: Path, config: dict[str, Any], **options: Any) -> tuple[Conversion, dict[str, np.ndarray]]:
    tensors = random_tensors(config)
    conversion = plan_conversion(ConvertOptions(**options), open_hf(save(folder, config, *split(tensors, 2))))
    assert not conversion.plan.problems
    return conversion, reference(config, tensors, conversion.save_dtype)


@pytest.mark.parametrize("save_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", MODELS)
def test_any_box_is_the_slice_of_the_whole(tmp_path: Path, model: str, save_dtype: str) -> None:
    """Boxes of several arrays in one go, of any place and size, empty ones too."""
    conversion, wanted = planned(tmp_path / "hf", MODELS[model], save_dtype=save_dtype)
    rng = np.random.default_rng(0)
    for _ in range(5):
        boxes = []
        for array in conversion.plan.arrays:
            spans = [sorted(rng.integers(0, size + 1, 2).tolist()) for size in array.shape]
            boxes.append((array, tuple(map(tuple, spans))))
        made, _ = make_boxes(boxes, conversion.encodings)
        for (array, box), values in zip(boxes, made, strict=True):
            part = wanted[bare(array.key)][tuple(slice(*span) for span in box)]
            assert_same_bits({array.key: values}, {array.key: part})


def test_padding_is_filled(tmp_path: Path) -> None:
    """A box that lies half in the vocabulary, and one that lies behind it."""
    conversion, wanted = planned(tmp_path / "hf", LLAMA, vocab_size=80)
    array = next(array for array in conversion.plan.arrays if array.key.endswith("embedding"))
    (half, behind), _ = make_boxes([(array, ((60, 70), (0, 8))), (array, ((70, 80), (3, 5)))], conversion.encodings)
    assert_same_bits({"": half[:4]}, {"": wanted["token_embedder.embedding"][60:64, :8]})
    assert not half[4:].any()
    assert not behind.any()
    assert half.dtype == behind.dtype == BF16


def test_what_boxes_share_is_read_once(tmp_path: Path) -> None:
    """Eight column slices of an array read as many bytes as the whole, each once."""
    conversion, wanted = planned(tmp_path / "hf", LLAMA, save_dtype="float32")
    array = next(array for array in conversion.plan.arrays if array.key.endswith("wi_0.kernel"))
    slices = [(array, ((at, at + 4), *whole(array.shape)[1:])) for at in range(0, 32, 4)]
    made, nbytes = make_boxes(slices, conversion.encodings)
    assert nbytes == array.nbytes // F32.itemsize * BF16.itemsize
    assert_same_bits({"": np.concatenate(made)}, {"": wanted["decoder.layers.mlp.wi_0.kernel"]})
