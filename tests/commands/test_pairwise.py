"""Units, meshes, layouts and what is cut away don't change a bit, whatever a release is stored in and wherever it goes.

One law, for every command, by a table in which each two of (kind of family × format × layout × unit × mesh ×
direction × cut) meet. What each side of it is made of is proved elsewhere: that the boxes of every family tile (`tests/
model_mappings/test_tiling.py`), that every encoding decodes to what its writer meant (`tests/formats`), that the
arrays are MaxText's own (`tests/cases`). The expected values are plain numpy: `support.reference`, and the values that
were quantised.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from pairs import Row, name, pairwise
from quantised import GROUP, awq, compressed, gptq, nf4
from stored import COMPRESSED
from support import (
    BF16,
    DEEPSEEK,
    F32,
    FP8,
    LLAMA,
    QWEN3_MOE,
    assert_same_bits,
    bare,
    call,
    peft_adapter,
    random_tensors,
    read_tensors,
    reference,
    restore,
    save,
    split,
)

import weightbeam as wb

jax = lazily("jax")

Arrays = Mapping[str, np.ndarray]

SIZES = dict(hidden_size=64, head_dim=16, intermediate_size=96, architectures=["LlamaForCausalLM"])
KINDS: dict[str, dict[str, Any]] = {
    "dense": LLAMA | SIZES,
    "tied": LLAMA | SIZES | dict(model_type="qwen3", tie_word_embeddings=True),
    "experts": QWEN3_MOE | SIZES | dict(moe_intermediate_size=32),
    "latent": DEEPSEEK | SIZES | dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, moe_intermediate_size=32),
}
PACKED = {
    "int4": (compressed, COMPRESSED),
    "gptq": (gptq, dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=True, sym=False)),
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm")),
    "nf4": (nf4, dict(quant_method="bitsandbytes", load_in_4bit=True)),
}
WEIGHTS = dict(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True, actorder=None)
COMPRESSED_CONFIG = COMPRESSED | {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": [],
}
PLAIN = ("bfloat16", "float32")
KEPT_LAYERS = {"dense": [1], "tied": [0], "experts": [1], "latent": [0, 2]}  # that are kept: of each kind of stack one
KEPT_EXPERTS, KEPT_ROWS = slice(2, 4), slice(0, 48)
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
ROUTER = re.compile(r".*\.mlp\.gate\.(weight|e_score_correction_bias)")


def fp8(tensor: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, a scale for each block, and the values: float32(code) · float32(scale)."""
    rng = np.random.default_rng(tensor.size)
    scale = rng.uniform(1e-3, 2e-2, [-(-size // step) for size, step in zip(tensor.shape, block, strict=True)])
    codes, scale = (tensor.astype(F32) * 100).astype(FP8), scale.astype(F32)
    rows, columns = np.indices(tensor.shape)
    return codes, scale, codes.astype(F32) * scale[rows // block[0], columns // block[1]]


@functools.cache
def model(kind: str, form: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A release of a kind in a format: its config, its tensors, and the values of its weights."""
    config, stored, values = dict(KINDS[kind]), {}, {}
    if form in PACKED:
        config["quantization_config"] = COMPRESSED_CONFIG if form == "int4" else PACKED[form][1]
    elif form.startswith("fp8"):
        block = [int(size) for size in form.removeprefix("fp8 ").split("x")]
        config["quantization_config"] = dict(
            quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=block
        )
    tensors = random_tensors(config, F32 if form == "float32" else BF16)
    for seed, (key, tensor) in enumerate(tensors.items()):
        if form in PLAIN or not key.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            stored[key] = values[key] = tensor
        elif form in PACKED:
            made, values[key] = PACKED[form][0](key, tensor.shape, seed)
            stored |= made
        else:
            stored[key], stored[f"{key}_scale_inv"], values[key] = fp8(tensor, (block[0], block[1]))
    return config, stored, values


@functools.cache
def part(kind: str, form: str, kept: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What is kept of a release: its config, and the values of its weights."""
    config, _, values = model(kind, form)
    if kept == "layers":
        layers = KEPT_LAYERS[kind]
        config = config | dict(num_hidden_layers=len(layers))
        found = {name: re.match(r"(model\.layers\.)(\d+)(.*)", name) for name in values}
        values = {
            f"{layer[1]}{layers.index(int(layer[2]))}{layer[3]}" if layer else name: values[name]
            for name, layer in found.items()
            if not layer or int(layer[2]) in layers
        }
    elif kept == "experts":
        config = config | {name: 2 for name in ("num_experts", "n_routed_experts") if name in config}
        found = {name: re.match(r"(.*\.experts\.)(\d+)(.*)", name) for name in values}
        values = {
            f"{expert[1]}{int(expert[2]) - KEPT_EXPERTS.start}{expert[3]}" if expert else name: values[name]
            for name, expert in found.items()
            if not expert or KEPT_EXPERTS.start <= int(expert[2]) < KEPT_EXPERTS.stop
        }
        values |= {name: values[name][KEPT_EXPERTS] for name in values if ROUTER.fullmatch(name)}
    elif kept == "rows":
        config = config | dict(vocab_size=KEPT_ROWS.stop)
        values = values | {name: values[name][KEPT_ROWS] for name in TABLES if name in values}
    return config, values


@functools.cache
def wanted(kind: str, form: str, layout: str, kept: str) -> dict[str, np.ndarray]:
    """MaxText's arrays in bfloat16."""
    config, values = part(kind, form, kept)
    scanned = reference(config, values, BF16)
    if layout == "scanned":
        return scanned
    made = {}
    for key, array in scanned.items():
        if not (stacked := re.fullmatch(r"((?:MoEBiasVar\.)?decoder\.(?:\w+_)?layers)\.(.*)", key)):
            made[key] = array
            continue
        at = 0 if key.startswith("MoEBiasVar.") else 1
        for layer in range(array.shape[at]):
            made[f"{stacked[1]}_{layer}.{stacked[2]}"] = array.take(layer, at)
    return made


def keeping(row: Row) -> dict[str, Any]:
    """The option that keeps what a row keeps, as a keyword."""
    layers, experts = ",".join(map(str, KEPT_LAYERS[row["kind"]])), f"{KEPT_EXPERTS.start}:{KEPT_EXPERTS.stop}"
    options = {"layers": {"layers": layers}, "experts": {"experts": experts}, "rows": {"vocab_rows": KEPT_ROWS.stop}}
    return options.get(row["kept"], {})


def cut(row: Row, *names: str) -> list[str]:
    """The options of a row."""
    options = {
        "unit": ["--unit_bytes", str(row["unit"])],
        "mesh": ["--mesh", row["mesh"]] if row["mesh"] else [],
        "layout": ["--scan_layers", str(row["layout"] == "scanned").lower()],
        "kept": [word for name, value in keeping(row).items() for word in (f"--{name}", str(value))],
        "model": ["--maxtext_model", "llama2-7b"] if row["kind"] == "dense" else [],
    }
    return [word for each in names for word in options[each]]


# --- the directions: each makes something in small pieces, and returns what it made and what it should be -------------


def by_convert(source: Path, folder: Path, row: Row) -> tuple[Arrays, Arrays]:
    assert call("convert", source, folder / "out", *cut(row, "unit", "mesh", "layout", "model", "kept")) == 0
    return restore(folder / "out" / "0"), wanted(row["kind"], row["form"], row["layout"], row["kept"])


def by_virtual(source: Path, folder: Path, row: Row) -> tuple[Arrays, Arrays]:
    assert (
        call("convert", source, folder / "out", *cut(row, "unit", "mesh", "layout", "model", "kept"), "--virtual") == 0
    )
    return restore(folder / "out" / "0"), wanted(row["kind"], row["form"], row["layout"], row["kept"])


def by_reshard(source: Path, folder: Path, row: Row) -> tuple[Arrays, Arrays]:
    """From the other layout."""
    other = row | {"layout": "unscanned" if row["layout"] == "scanned" else "scanned"}
    assert call("convert", source, folder / "ckpt", *cut(other, "layout", "model")) == 0
    assert call("reshard", folder / "ckpt", folder / "out", *cut(row, "unit", "mesh", "layout", "kept")) == 0
    return restore(folder / "out" / "0"), wanted(row["kind"], row["form"], row["layout"], row["kept"])


def by_export(source: Path, folder: Path, row: Row) -> tuple[Arrays, Arrays]:
    """The query's scale is a power of two here, so that the way back is exact."""
    assert call("convert", source, folder / "ckpt", *cut(row, "mesh", "layout", "model", "kept")) == 0
    assert call("export", folder / "ckpt", folder / "out", *cut(row, "unit"), "--save_dtype", "bfloat16") == 0
    _, values = part(row["kind"], row["form"], row["kept"])
    return read_tensors(folder / "out"), {key: tensor.astype(BF16) for key, tensor in values.items()}


def by_load(source: Path, folder: Path, row: Row) -> tuple[Arrays, Arrays]:
    """On this process's one device."""
    settings: dict[str, Any] = dict(mesh="fsdp=1", unit_bytes=row["unit"], scan_layers=row["layout"] == "scanned")
    settings |= keeping(row)
    if row["kind"] == "dense":
        settings["maxtext_model"] = "llama2-7b"
    made = wb.load(str(source), **settings)
    flat = {
        bare(".".join(str(key.key) for key in path)): np.asarray(array)
        for path, array in jax.tree_util.tree_leaves_with_path(made)
    }
    return flat, wanted(row["kind"], row["form"], row["layout"], row["kept"])


def by_merge(source: Path, folder: Path, row: Row) -> tuple[Arrays, Arrays]:
    """In small units as in one."""
    _, values = part(row["kind"], row["form"], row["kept"])
    modules = {
        key.removesuffix(".weight"): tensor.shape
        for key, tensor in values.items()
        if key.endswith(("q_proj.weight", "o_proj.weight"))
    }
    adapter, _ = peft_adapter(folder / "adapter", modules, base_model_name_or_path=str(source))
    for output, unit in (("out", cut(row, "unit", "kept")), ("whole", cut(row, "kept"))):
        assert call("merge", source, folder / output, "--lora", adapter, *unit) == 0
    return read_tensors(folder / "out"), read_tensors(folder / "whole")


def by_dequantize(source: Path, folder: Path, row: Row) -> tuple[Arrays, Arrays]:
    assert call("dequantize", source, folder / "out", *cut(row, "unit", "kept")) == 0
    _, values = part(row["kind"], row["form"], row["kept"])
    return read_tensors(folder / "out"), {key: tensor.astype(BF16) for key, tensor in values.items()}


DIRECTIONS = {
    made.__name__.removeprefix("by_"): made
    for made in (by_convert, by_virtual, by_reshard, by_export, by_load, by_merge, by_dequantize)
}


def possible(row: Row) -> bool:
    direction, form, kind, kept = row["direction"], row["form"], row["kind"], row["kept"]
    if kept == "experts" and kind not in ("experts", "latent"):
        return False
    if kept == "rows" and direction == "reshard":
        return False  # rows are cut of a release
    if direction == "merge" and (kept == "experts" or (kept == "layers" and KEPT_LAYERS[kind] != [0])):
        return False  # an adapter has the numbers of the whole release
    if direction in ("merge", "dequantize", "load") and row["mesh"]:
        return False  # without a mesh
    if direction == "dequantize":
        return form not in PLAIN
    if direction in ("merge", "virtual"):
        return form == "bfloat16"
    return not (row["mesh"] == "expert=2" and kind not in ("experts", "latent"))


ROWS = pairwise(
    possible,
    kind=list(KINDS),
    form=[*PLAIN, "fp8 128x128", "fp8 24x16", *PACKED],
    layout=["scanned", "unscanned"],
    unit=[3_000, 20_000, 1 << 30],
    mesh=["", "fsdp=2", "fsdp=4,tensor=2", "expert=2"],
    direction=list(DIRECTIONS),
    kept=["", "layers", "experts", "rows"],
)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_bits_are_the_same(tmp_path: Path, row: Row) -> None:
    config, stored, _ = model(row["kind"], row["form"])
    source = save(tmp_path / "hf", config, *split(stored, 2))
    assert_same_bits(*DIRECTIONS[row["direction"]](source, tmp_path, row))
