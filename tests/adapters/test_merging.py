"""Adapters merged as a view, against what PEFT's `merge_and_unload` makes of them, for each kind of adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support import read_file

from weightbeam.formats.adapters import Merging, merge, open_adapter
from weightbeam.formats.encodings import Encoding
from weightbeam.formats.safetensors import open_checkpoint, read_boxes
from weightbeam.formats.sources import open_source
from weightbeam.model_mappings.boxes import Box, whole

F32 = np.dtype(np.float32)
CASES = (
    "plain", "second", "rslora", "patterns", "dora", "lora_bias", "bias-all", "bias-lora_only", "modules_to_save", "embedding", "embedding-dora",
    "embedding-tied", "fan_in_fan_out", "fan_in_fan_out-dora", "experts", "experts-router", "experts-up", "experts-square", "experts-mixtral",
    "experts-gpt_oss", "v4", "v4-mixtral", "experts-0.18", "experts-square-0.18",
)  # fmt: skip


def merge_case(base: Path, *adapters: tuple[Path, float]) -> Merging:
    """A base and adapters, merged below any table."""
    checkpoint = open_checkpoint(base)
    return merge(open_source(checkpoint).encodings, [open_adapter(*adapter) for adapter in adapters], {}, checkpoint.config["model_type"])


def values(encoding: Encoding, box: Box | None = None, dtype: np.dtype = F32) -> np.ndarray:
    """The values of a box, by default of all of it."""
    box = whole(encoding.shape) if box is None else box
    return encoding.decode(read_boxes(encoding.reads(box))[0], box, dtype)


def in_memory(merged: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """The parameter in memory, or the part of it, that a tensor of the files is."""
    if name in merged or ".experts." not in name:
        return merged[name]
    module, expert, projection, _ = name.replace(".block_sparse_moe.", ".mlp.").rsplit(".", 3)
    if projection in ("down_proj", "w2"):
        return merged[f"{module}.down_proj"][int(expert)]
    fused = merged[f"{module}.gate_up_proj"][int(expert)]
    return np.split(fused, 2)[projection in ("up_proj", "w3")]


def spelled(name: str) -> str:
    """Mixtral's router, as transformers v5 has it in memory."""
    return name if ".experts." in name else name.replace(".block_sparse_moe.", ".mlp.")


@pytest.mark.parametrize("case", CASES)
def test_as_peft_merges_it(written: Path, case: str) -> None:
    """Every tensor is what PEFT makes of it, but for the order in which products are summed; those that no adapter names have the base's bits."""
    folder = written / case
    merging = merge_case(folder / "base", (folder / "adapter", 1.0))
    assert not merging.problems
    merged, base = read_file(folder / "merged.safetensors"), read_file(folder / "base" / "model.safetensors")
    changed = 0
    for name, encoding in merging.encodings.items():
        wanted = in_memory(merged, spelled(name))
        if name in merging.touched:
            np.testing.assert_allclose(values(encoding), wanted, rtol=2e-6, atol=2e-6)
            changed += bool((wanted != base[name]).any())
        else:
            np.testing.assert_array_equal(values(encoding), base[name])
            np.testing.assert_array_equal(wanted, base[name])
    assert changed == len(merging.touched)  # PEFT changed all that we changed
    assert set(merging.uses[0]) == set(read_file(folder / "adapter" / "adapter_model.safetensors"))  # each tensor is used, or not needed
