"""FP8 weights that stay codes: against the tree that MaxText 0.2.5 wrote of the same release, and against the values that
codes and scales stand for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from quantised import quantise
from support import (
    DEEPSEEK,
    DEEPSEEK_V3,
    F32,
    FP8,
    HERE,
    LLAMA,
    QWEN3_MOE,
    assert_same_bits,
    call,
    converted,
    digests,
    headers_only,
    random_tensors,
    save,
    shapes,
    write_once,
)

from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.transforms.planning.conversion_planner import prepare
from weightbeam.transforms.planning.options import Options

KEPT = ("--save_dtype", "float8_e4m3fn")
BLOCK = (4, 4)


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release that MaxText was given."""
    return write_once(tmp_path_factory, "fp8_release", [sys.executable, str(HERE / "cases" / "fp8_release.py")])


@functools.cache
def maxtext() -> dict[str, list]:
    """What MaxText made of it, by the names of the parameters."""
    said = json.loads((HERE / "cases" / "fp8_digests.json").read_bytes())
    return {key.removeprefix("params.params."): value for key, value in said.items() if key != "step"}


WAYS = {
    "as it is": (),
    "for a mesh": ("--mesh", "fsdp=2"),
    "zarr2": ("--use_ocdbt", "false", "--use_zarr3", "false"),
    "virtual": ("--virtual", "true"),
    "small units": ("--unit_bytes", "200K"),
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_the_tree_that_maxtext_writes(release: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Every array, codes and scales, is its own, bit for bit."""
    assert digests(converted(release, tmp_path / "out", *KEPT, *options)) == maxtext()


def test_unscanned(release: Path, tmp_path: Path) -> None:
    """Each layer by itself is its part of the stacks."""
    stacked = converted(release, tmp_path / "scanned", *KEPT)
    apart = converted(release, tmp_path / "unscanned", *KEPT, "--scan_layers", "false")
    wanted = {}
    for key, array in stacked.items():
        _, found, rest = key.partition("layers.layer_")
        if not found:
            wanted[key] = array
            continue
        place, _, rest = rest.partition(".")
        for cycle in range(2):
            wanted[f"decoder.layers_{4 * cycle + int(place)}.{rest}"] = np.take(array, cycle, axis=1)
    assert_same_bits(apart, wanted)


def test_what_maxtext_must_be_told(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The keys of MaxText's own file of such a model (configs/models/qwen3.5-35b-a3b-fp8.yml, 0.2.5)."""
    converted(release, tmp_path / "out", *KEPT)
    said = (tmp_path / "out" / "0" / "maxtext.yml").read_text()
    assert "weight_dtype: float8_e4m3fn\nweight_block_size: 128\n" in said
    modules = "token_embedder, logits_dense, gate, shared_expert_gate, conv1d, in_proj_ba, A_log, dt_bias, norm"  # in its order
    assert f"unquantized_modules: [{modules}]" in said
    capsys.readouterr()
    assert call("plan", "--source", release, *KEPT) == 0
    told = capsys.readouterr().out
    assert "34 arrays of FP8 codes, each with its scales beside it; the others in their own dtypes" in told


FAMILIES = {
    "deepseek": DEEPSEEK,
    "qwen3_moe": QWEN3_MOE,
    "qwen3": LLAMA | dict(model_type="qwen3"),
    "kimi": DEEPSEEK | dict(model_type="kimi_k2"),
    "llama": LLAMA | dict(head_dim=4),  # MaxText divides its queries by √4
}


def in_blocks(tmp_path: Path, config: dict, block: tuple[int, int] = BLOCK, scale: np.dtype = F32) -> Path:
    """A model whose linear layers are in FP8."""
    quantization = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=list(block))
    spelled = config | dict(model_type="deepseek_v3") if config["model_type"] == "kimi_k2" else config
    tensors = quantise(random_tensors(spelled), block, scale)
    return save(tmp_path / "release", config | dict(quantization_config=quantization), tensors)


@pytest.mark.parametrize("layout", ["true", "false"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_family(tmp_path: Path, family: str, layout: str) -> None:
    """Codes times the scales of their blocks are the values that are converted without `--save_dtype`, to the bit."""
    source = in_blocks(tmp_path, FAMILIES[family])
    scan = ("--scan_layers", layout)
    values = converted(source, tmp_path / "values", "--save_dtype", "float32", *scan)
    kept = converted(source, tmp_path / "kept", *KEPT, *scan)
    scales = {key for key in kept if key.removesuffix("_scale") in kept and key.endswith("_scale")}
    assert {key for key, array in kept.items() if array.dtype == FP8} == {key.removesuffix("_scale") for key in scales}
    assert scales
    assert kept.keys() - scales == values.keys()
    for key, array in kept.items():
        if key in scales:
            continue
        made = array.astype(F32)
        if f"{key}_scale" in kept:
            scale = kept[f"{key}_scale"]
            ratio = [n // count for n, count in zip(array.shape, scale.shape, strict=True)]
            made *= np.kron(scale.astype(F32), np.ones(ratio, F32))
        np.testing.assert_array_equal(made, values[key], err_msg=key)


def refused(capsys: pytest.CaptureFixture[str], source: Path, *options: str) -> str:
    """What `convert` says when it refuses."""
    capsys.readouterr()
    assert call("convert", "--source", source, "--output", source / "out", *KEPT, *options) == 2
    assert not (source / "out").exists()
    return " ".join(capsys.readouterr().err.split())


def test_a_family_without_mapping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan says so."""
    assert call("plan", "--source", in_blocks(tmp_path, DEEPSEEK), *KEPT) == 0
    assert "MaxText 0.2.5 has no mapping of deepseek weights in FP8" in " ".join(capsys.readouterr().out.split())


def test_sizes_that_are_not_whole_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each array is named, with the size that stands against it."""
    told = refused(capsys, in_blocks(tmp_path, LLAMA, (16, 16)))
    assert "self_attention.query.kernel: its weights can't stay float8_e4m3fn: a block of 16 × 16" in told
    told = refused(capsys, in_blocks(tmp_path / "other", LLAMA, (4, 8)))
    assert "is FP8 in blocks of 4 × 8; MaxText keeps float8_e4m3fn in square blocks only" in told


def test_heads_of_deepseek_v3() -> None:
    """At full size a head of 192 is a block and a half, and the compressed keys are four and a half."""
    known = {}
    for name, shape in shapes(DEEPSEEK_V3).items():
        known[name] = shape
        if name.endswith("_proj.weight") or ("kv_a" in name and len(shape) == 2):
            known[f"{name}_scale_inv"] = tuple(-(-n // 128) for n in shape)
    quantization = dict(quant_method="fp8", weight_block_size=[128, 128])
    config = DEEPSEEK_V3 | dict(quantization_config=quantization)
    checkpoint = headers_only(config, known=known)
    problems = prepare(Options(save_dtype=KEPT[1]), with_dtypes(checkpoint)).plan.problems
    attention = (
        "decoder.{}_layers.self_attention.{}.kernel: its weights can't stay float8_e4m3fn: {} isn't whole blocks of 128"
    )
    wanted = {"wq_b": "heads 128 × q_dim 192", "wkv_a": "kv_lora_rope 576"}
    assert {str(problem).removeprefix("blocks: params.params.") for problem in problems} == {
        attention.format(kind, name, size) for kind in ("dense", "moe") for name, size in wanted.items()
    }


def with_dtypes(checkpoint: HfCheckpoint) -> HfCheckpoint:
    """A checkpoint of which the weights with scales are FP8, and the scales float32."""
    scales = {name for name in checkpoint.tensors if name.endswith("_scale_inv")}
    dtypes = dict.fromkeys(scales, F32) | {name.removesuffix("_scale_inv"): FP8 for name in scales}
    shards = (
        dataclasses.replace(
            shard,
            tensors=tuple(dataclasses.replace(each, dtype=dtypes.get(each.name, each.dtype)) for each in shard.tensors),
        )
        for shard in checkpoint.shards
    )
    return dataclasses.replace(checkpoint, shards=tuple(shards))


def test_meshes_that_do_not_divide_blocks(release: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """MaxText can't make its model there, though the kernels could be divided."""
    assert call("convert", "--source", release, "--output", tmp_path / "out", *KEPT, "--mesh", "fsdp=4") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "in_proj_qkvz.kernel_scale: embed = 2 doesn't divide over fsdp=4" in told
    assert not (tmp_path / "out").exists()


def test_a_stack_that_is_quantised_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One array can't hold codes of one layer and values of another."""
    tensors = quantise(random_tensors(LLAMA), BLOCK, F32)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(F32)
    del tensors[f"{name}_scale_inv"]
    quantization = dict(quant_method="fp8", weight_block_size=list(BLOCK))
    source = save(tmp_path / "release", LLAMA | dict(quantization_config=quantization), tensors)
    assert f"model.layers.0.mlp.up_proj.weight is quantised, {name} isn't" in refused(capsys, source)
    assert call("convert", "--source", source, "--output", tmp_path / "out", *KEPT, "--scan_layers", "false") == 0


def test_nothing_to_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "release", LLAMA, random_tensors(LLAMA))
    assert "none of its weights is quantised" in refused(capsys, source)
