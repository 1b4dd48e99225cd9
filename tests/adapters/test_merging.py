"""Adapters merged as a view, against what PEFT's `merge_and_unload` makes of them, for each kind of adapter."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from processes import run
from safetensors.numpy import save_file
from support import BF16, decoded, read_config, read_file, save

from weightbeam.formats.adapters import Merging, merge, open_adapter
from weightbeam.formats.adapters.delta import Delta
from weightbeam.formats.adapters.merged import MergedWeight
from weightbeam.formats.adapters.modules import ModuleFiles
from weightbeam.formats.adapters.ties import find_ties
from weightbeam.formats.encodings import Plain
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import Tensor, open_hf, read_header
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.config import Config

F32 = np.dtype(np.float32)
CASES = (
    "plain", "second", "one-layer", "rslora", "patterns", "dora", "lora_bias", "bias-all", "bias-lora_only", "modules_to_save", "modules_to_save-layers",
    "embedding", "embedding-dora",
    "embedding-tied", "fan_in_fan_out", "fan_in_fan_out-dora", "experts", "experts-router", "experts-up", "experts-square", "experts-mixtral",
    "experts-gpt_oss", "router-mixtral", "v4", "v4-mixtral", "experts-0.18", "experts-square-0.18", "embedding-own-rows", "weight-patterns", "weight-of-module",
    "fan_in_fan_out-linear", "untied-tying", "llava", "qwen2_vl",
    "qwen2_5_vl", "mllama", "phimoe", "granitemoe", "gpt_neox", "experts-all-linear", "experts-as-modules",
)  # fmt: skip


def merge_case(base: Path, *adapters: tuple[Path, float]) -> Merging:
    """A base and adapters, merged below any table."""
    checkpoint = open_hf(base)
    encodings = open_source(checkpoint).encodings
    return merge(
        encodings,
        [open_adapter(*adapter) for adapter in adapters],
        {},
        checkpoint.config["model_type"],
        find_ties(Config(), encodings),
    )


def in_memory(merged: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """The parameter in memory, or the part of it, that a tensor of the files is."""
    if name in merged or ".experts." not in name:
        return merged[name]
    module, expert, projection, _ = name.replace(".block_sparse_moe.", ".mlp.").rsplit(".", 3)
    if projection in ("down_proj", "w2"):
        return merged[f"{module}.down_proj"][int(expert)]
    fused = merged[f"{module}.gate_up_proj"][int(expert)]
    return np.split(fused, 2)[projection in ("up_proj", "w3")]


# in files and in memory, as transformers v5 has them there
RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "qwen2_vl": ((r"^model\.", "model.language_model."), (r"^visual\.", "model.visual.")),
    "mllama": ((r"^vision_model\.", "model.vision_model."),),
    "phimoe": ((r"block_sparse_moe\.gate\.", "mlp.router."),),
    "granitemoe": ((r"input_linear\.weight", "experts.gate_up_proj"), (r"output_linear\.weight", "experts.down_proj"), (r"router\.layer", "router")),
    "gpt_neox": (("^embed_out", "lm_head"),),
}  # fmt: skip


def spelled(name: str, case: str) -> str:
    """A tensor of the files as it is called in memory."""
    for theirs, ours in RENAMED.get(case.replace("qwen2_5", "qwen2"), ()):
        if (renamed := re.sub(theirs, ours, name)) != name:
            return renamed
    if name.startswith(("vision_tower.", "multi_modal_projector.")):
        return f"model.{name}"
    name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head.", "lm_head.")
    return name if ".experts." in name else name.replace(".block_sparse_moe.", ".mlp.")


@pytest.mark.parametrize("case", CASES)
def test_as_peft_merges_it(written: Path, case: str) -> None:
    """Every tensor is what PEFT makes of it, but for the order in which products are summed; those that no adapter
    names have the base's bits.
    """
    folder = written / case
    merging = merge_case(folder / "base", (folder / "adapter", 1.0))
    assert not merging.problems
    merged, base = read_file(folder / "merged.safetensors"), read_file(folder / "base" / "model.safetensors")
    changed = 0
    for name, encoding in merging.encodings.items():
        wanted = in_memory(merged, spelled(name, case))
        if name in merging.touched:
            np.testing.assert_allclose(decoded(encoding), wanted, rtol=2e-6, atol=2e-6)
            changed += bool((wanted != base[name]).any())
        else:
            np.testing.assert_array_equal(decoded(encoding), base[name])
            np.testing.assert_array_equal(wanted, base[name])
    assert changed == len(merging.touched)  # PEFT changed all that we changed
    # each tensor is used
    assert set(merging.uses[0]) == set(read_file(folder / "adapter" / "adapter_model.safetensors"))


def test_several_are_summed(written: Path) -> None:
    """As PEFT's `add_weighted_adapter` with the combination `cat` does it."""
    merging = merge_case(
        written / "plain" / "base", (written / "plain" / "adapter", 1.0), (written / "second" / "adapter", 0.5)
    )
    assert not merging.problems
    merged = read_file(written / "both" / "merged.safetensors")
    for name, encoding in merging.encodings.items():
        np.testing.assert_allclose(decoded(encoding), merged[name], rtol=2e-6, atol=2e-6)


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    cuts = [sorted(rng.sample(range(size + 1), 2)) for size in shape]
    return tuple((start, stop) for start, stop in cuts)


@pytest.mark.parametrize(
    "case",
    [
        "plain",
        "dora",
        "embedding",
        "embedding-dora",
        "lora_bias",
        "fan_in_fan_out",
        "experts",
        "experts-0.18",
        "experts-gpt_oss",
    ],
)
def test_a_box_has_the_bits_of_the_whole(written: Path, case: str) -> None:
    """However a unit cuts a merged tensor, in bfloat16 and in float32; single columns and rows, too."""
    rng = random.Random(0)
    merging = merge_case(written / case / "base", (written / case / "adapter", 1.0))
    for name in merging.touched:
        encoding = merging.encodings[name]
        everything = decoded(encoding)
        for _ in range(4):
            box = random_box(rng, encoding.shape)
            part = tuple(slice(*span) for span in box)
            np.testing.assert_array_equal(decoded(encoding, box), everything[part])
            np.testing.assert_array_equal(decoded(encoding, box, BF16), everything[part].astype(BF16))


@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(300, 700, 64), (40, 3000, 300), (1, 5000, 8), (5000, 1, 8), (130, 257, 1)]
)
def test_large_products_have_the_same_bits_in_any_tile(tmp_path: Path, rows: int, columns: int, rank: int) -> None:
    """The product is made in tiles; what they are depends on the box, and must not show."""
    rng = np.random.default_rng(0)
    save_file({"w": rng.standard_normal((rows, columns), np.float32)}, tmp_path / "w.safetensors")
    save_file(
        {"a": rng.standard_normal((rank, columns), np.float32), "b": rng.standard_normal((rows, rank), np.float32)},
        tmp_path / "f.safetensors",
    )
    (w,), (a, b) = (read_header(str(tmp_path / name)) for name in ("w.safetensors", "f.safetensors"))
    encoding = MergedWeight(Plain(w), (Delta(a, b, 0.7),))
    everything = decoded(encoding)
    held = {
        name: values_ for file in ("w", "f") for name, values_ in read_file(tmp_path / f"{file}.safetensors").items()
    }
    wanted = held["w"] + 0.7 * (held["b"].astype(np.float64) @ held["a"])
    np.testing.assert_allclose(everything, wanted, rtol=1e-5, atol=1e-4)
    pick = random.Random(1)
    for _ in range(20):
        box = random_box(pick, (rows, columns))
        np.testing.assert_array_equal(decoded(encoding, box), everything[tuple(slice(*span) for span in box)])


@pytest.mark.parametrize("core", ["Haswell", "SkylakeX"])
def test_other_processors(core: str) -> None:
    """The same with OpenBLAS's routines for AVX2 and for AVX-512, whichever this processor would take by itself."""
    info = Path("/proc/cpuinfo")
    if {"Haswell": " avx2 ", "SkylakeX": " avx512vl "}[core] not in (info.read_text() if info.exists() else ""):
        pytest.skip("this processor can't run them")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{__file__}", "-k", "large_products"]
    ran = run(*command, env=os.environ | {"OPENBLAS_CORETYPE": core})
    assert (ran.returncode, "5 passed" in ran.stdout) == (0, True), ran.stdout


def test_a_bfloat16_base_is_rounded_once(written: Path, tmp_path: Path) -> None:
    """A float32 adapter on a bfloat16 base: the float32 sum, cast once."""
    base = {
        name: tensor.astype(BF16)
        for name, tensor in read_file(written / "plain" / "base" / "model.safetensors").items()
    }
    save(tmp_path / "base", read_config(written / "plain" / "base"), base)
    merging = merge_case(tmp_path / "base", (written / "plain" / "adapter", 1.0))
    factors = read_file(written / "plain" / "adapter" / "adapter_model.safetensors")
    assert len(merging.touched) == len(factors) // 2
    for name in merging.touched:
        a, b = (
            factors[f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight"].astype(np.float64)
            for side in "AB"
        )
        wanted = (base[name].astype(np.float64) + 6 / 4 * b @ a).astype(np.float32).astype(BF16)
        found = decoded(merging.encodings[name], dtype=BF16)
        assert (found != wanted).mean() < 1e-3  # where the order of the sum decides a rounding
        np.testing.assert_allclose(found.astype(F32), wanted.astype(F32), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("is_in_out", [True, False])
@pytest.mark.parametrize("wide", [(64, 24), (64, 32), (24, 64)])
def test_which_way_fused_experts_lie(wide: tuple[int, int], is_in_out: bool) -> None:
    """Both of a layer tell it, whatever their sizes: Qwen 3 VL's lie one way on the hub, another where transformers wrote."""
    width, hidden = wide
    shapes = {"gate_up_proj": (4, 2 * hidden, width), "down_proj": (4, width, hidden)}
    if is_in_out:
        shapes = {name: (experts, columns, rows) for name, (experts, rows, columns) in shapes.items()}
    tensors = {
        f"layers.0.mlp.experts.{name}": Tensor(f"layers.0.mlp.experts.{name}", F32, shape, "f", 0)
        for name, shape in shapes.items()
    }
    files = ModuleFiles({name: Plain(tensor) for name, tensor in tensors.items()}, {}, "qwen3_vl_moe")
    assert [files.is_in_out(name) for name in tensors] == [is_in_out] * 2
