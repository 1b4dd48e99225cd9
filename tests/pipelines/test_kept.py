"""FP8 weights that stay codes: against the tree that MaxText 0.2.5 wrote of the same release, and against the values that
codes and scales stand for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pairs
import pytest
from lazily import lazily
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
    convert,
    converted,
    digest,
    digests,
    headers_only,
    peft_adapter,
    random_tensors,
    read_config,
    restore,
    save,
    shapes,
    write_once,
)

import weightbeam
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

jax = lazily("jax")
safetensors = lazily("safetensors")

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
    "deepseek": DEEPSEEK | dict(q_lora_rank=32),  # of 8 blocks, for meshes of 4
    "qwen3_moe": QWEN3_MOE,
    "qwen3": LLAMA | dict(model_type="qwen3"),
    "kimi": DEEPSEEK | dict(model_type="kimi_k2", q_lora_rank=32),
    "llama": LLAMA | dict(head_dim=4),  # MaxText divides its queries by √4
    "in 32": QWEN3_MOE | dict(hidden_size=128, head_dim=32, intermediate_size=128, moe_intermediate_size=64),
}
BLOCKS = {"in 32": (32, 32)}


def in_blocks(
    tmp_path: Path,
    config: dict,
    block: tuple[int, int] = BLOCK,
    scale: np.dtype = F32,
    finite: bool = False,
    spelled: Callable[[str], str] = str,
) -> Path:
    """A model whose linear layers are in FP8; `spelled` says what a tensor is called."""
    quantization = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=list(block))
    tensors = quantise(random_tensors(config), block, scale)
    if finite:  # without the codes that are NaN
        tensors |= {
            name: np.nan_to_num(codes.astype(F32)).astype(FP8) for name, codes in tensors.items() if codes.dtype == FP8
        }
    tensors = {spelled(name): tensor for name, tensor in tensors.items()}
    return save(tmp_path / "release", config | dict(quantization_config=quantization), tensors)


@pytest.mark.parametrize(("family", "layout"), pairs.each([*FAMILIES], ["true", "false"]))
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
    for key in kept.keys() - scales:
        np.testing.assert_array_equal(decoded(kept, key), values[key], err_msg=key)


def decoded(kept: dict[str, np.ndarray], key: str) -> np.ndarray:
    """The values of an array, which may be codes."""
    values = kept[key].astype(F32)
    if f"{key}_scale" in kept:
        scale = kept[f"{key}_scale"]
        ratio = [n // count for n, count in zip(values.shape, scale.shape, strict=True)]
        values *= np.kron(scale.astype(F32), np.ones(ratio, F32))
    return values


def test_codes_and_scales_that_are_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where they are decoded: NaN among codes is counted, among scales it stops the run."""
    config, tensors = read_config(in_blocks(tmp_path, LLAMA)), quantise(random_tensors(LLAMA), BLOCK, F32)
    for codes in tensors.values():
        if codes.dtype == FP8:
            codes.view(np.uint8)[:] &= 0x77  # none is NaN
    name = next(name for name, codes in tensors.items() if codes.dtype == FP8)
    tensors[name].view(np.uint8)[0, :2] = 0x7F, 0xFF
    save(tmp_path / "codes", config, tensors)
    assert call("convert", tmp_path / "codes", tmp_path / "out", *KEPT) == 0
    assert f"1 tensor holds values that aren't finite: {name} (2 NaN)" in capsys.readouterr().err
    tensors[name + "_scale_inv"][0, 0] = np.nan
    save(tmp_path / "scales", config, tensors)
    assert call("convert", tmp_path / "scales", tmp_path / "none", *KEPT) == 1
    assert f"{name}_scale_inv in {tmp_path / 'scales'}" in capsys.readouterr().err
    assert not (tmp_path / "none" / "0").exists()


def test_scales_that_are_exponents(tmp_path: Path) -> None:
    """E8M0, as DeepSeek V3.1 has them, are FP8 by the name of their dtype, and no codes."""
    source = in_blocks(tmp_path, FAMILIES["qwen3"], scale=np.dtype(ml_dtypes.float8_e8m0fnu))
    convert(source, tmp_path / "out", *KEPT)
    assert call("export", tmp_path / "out", tmp_path / "back") == 0
    assert stored(tmp_path / "back") == stored(source)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_a_factor_that_scales_have_no_room_for(tmp_path: Path, dtype: Any) -> None:
    """MaxText's queries of heads of 8 are divided by √8: such a scale is stored in float32, the others as they were."""
    source = in_blocks(tmp_path, LLAMA, scale=np.dtype(dtype))
    values = converted(source, tmp_path / "values", "--save_dtype", "float32")
    kept = converted(source, tmp_path / "kept", *KEPT)
    query = "decoder.layers.self_attention.query.kernel"
    dtypes = {key: array.dtype for key, array in kept.items() if key.endswith("_scale")}
    assert dtypes.pop(f"{query}_scale") == F32
    assert set(dtypes.values()) == {np.dtype(dtype)}
    np.testing.assert_allclose(decoded(kept, query), values[query], rtol=2**-22)
    assert call("verify", tmp_path / "kept") == 0
    assert call("export", tmp_path / "kept", tmp_path / "back") == 0
    assert call("diff", source, tmp_path / "back", "--tolerance", "1e-6") == 0


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
    assert "is FP8 in blocks of 4 × 8; float8_e4m3fn is kept in square blocks only: of two sizes" in told


def test_scales_that_maxtext_has_another_place_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One scale a matrix it could hold (weight_block_size: null): the message doesn't say that it couldn't."""
    values = random_tensors(LLAMA)
    tensors = quantise(values, (1 << 10, 1 << 10), F32)
    quantization = dict(quant_method="fp8", activation_scheme="dynamic")
    source = save(tmp_path / "release", LLAMA | dict(quantization_config=quantization), tensors)
    told = refused(capsys, source)
    assert "is FP8 with one scale; float8_e4m3fn is kept in square blocks only; MaxText 0.2.5 could hold one" in told


def test_codes_of_other_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of E5M2 MaxText has the dtype, of 4 bits nothing."""
    quantization = dict(quant_method="fp8", weight_block_size=list(BLOCK))
    e5m2 = np.dtype("float8_e5m2")
    tensors = {
        name: array.astype(F32).astype(e5m2) if array.dtype == FP8 else array
        for name, array in quantise(random_tensors(LLAMA), BLOCK, F32).items()
    }
    told = refused(capsys, save(tmp_path / "release", LLAMA | dict(quantization_config=quantization), tensors))
    assert "float8_e4m3fn alone is kept; MaxText 0.2.5's weights are that, float8_e5m2 or unquantised" in told


def test_a_version_without_codes(release: Path, checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    """MaxText of August has no model that computes on them."""
    told = refused(capsys, release, "--maxtext", "e591f30")
    assert "--maxtext=e591f30: has no model with FP8 weights" in told
    assert call("reshard", checkpoint, tmp_path / "out", "--maxtext", "e591f30") == 2
    assert "has no model with FP8 weights" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


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
    problems = plan_conversion(ConvertOptions(save_dtype=KEPT[1]), with_dtypes(checkpoint)).plan.problems
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
    assert "in_proj_qkvz.kernel_scale: embed_attn = 2 doesn't divide over fsdp=4" in told
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


# --- the ways back and across -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def checkpoint(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release as a checkpoint of codes and scales, which no test changes."""
    return convert(release, tmp_path_factory.mktemp("kept") / "ck", *KEPT)


def stored(folder: Path) -> dict[str, tuple]:
    """Every tensor of a release as its files have it, by safetensors: dtype, shape, bytes."""
    return {
        name: (about["dtype"], about["shape"], bytes(about["data"]))
        for file in folder.glob("*.safetensors")
        for name, about in safetensors.deserialize(file.read_bytes())
    }


def unnamed(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint as MaxText's converter leaves it: nothing says what it was made of, and with which options."""
    shutil.copytree(checkpoint, folder / "0")
    (folder / "0" / "conversion.json").unlink()
    (folder / "0" / "_CHECKPOINT_METADATA").write_text("{}")
    return folder / "0"


@pytest.mark.parametrize(
    "way", ["as it remembers", "like the release", "of an unnamed one", "asked for", "small units"]
)
def test_export_bit_for_bit(release: Path, checkpoint: Path, tmp_path: Path, way: str) -> None:
    """Codes, scales and everything else are the release's own, and so is `quantization_config`."""
    options = {
        "as it remembers": (),
        "like the release": ("--like", release),
        "of an unnamed one": ("--like", release),
        "asked for": KEPT,
        "small units": ("--unit_bytes", "1M"),
    }[way]
    source = unnamed(checkpoint, tmp_path / "unnamed") if way == "of an unnamed one" else checkpoint
    assert call("export", source, tmp_path / "out", *options) == 0
    assert stored(tmp_path / "out") == stored(release)
    said, wanted = (json.loads((folder / "config.json").read_bytes()) for folder in (tmp_path / "out", release))
    assert said["quantization_config"] == wanted["quantization_config"]
    assert call("verify", "--source", tmp_path / "out", "--checkpoint", source) == 0


def test_export_of_values(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    """With a dtype it is what `dequantize` makes of the release."""
    assert call("dequantize", release, tmp_path / "wanted", "--save_dtype", "bfloat16") == 0
    assert call("export", checkpoint, tmp_path / "out", "--save_dtype", "bfloat16") == 0
    assert stored(tmp_path / "out") == stored(tmp_path / "wanted")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_bytes())


def test_export_like_a_release_without_codes(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    """What `--like` has in bfloat16 is written so, but for codes that are asked for."""
    assert call("dequantize", release, tmp_path / "like", "--save_dtype", "bfloat16") == 0
    assert call("export", checkpoint, tmp_path / "values", "--like", tmp_path / "like") == 0
    assert stored(tmp_path / "values") == stored(tmp_path / "like")
    assert call("export", checkpoint, tmp_path / "codes", "--like", tmp_path / "like", *KEPT) == 0
    assert stored(tmp_path / "codes") == stored(release)
    said = json.loads((tmp_path / "codes" / "config.json").read_bytes())["quantization_config"]
    assert (said["quant_method"], said["weight_block_size"]) == ("fp8", [128, 128])


MESHES = ["", "fsdp=2", "tensor=2", "fsdp=2,expert=2", "fsdp=4"]  # each cuts an axis that is counted in blocks
LAYOUTS = ["true", "false"]
UNITS = ["", "4K"]  # of one array at a time, and of some blocks of it


@pytest.mark.parametrize(("family", "layout", "mesh", "unit"), pairs.each(list(FAMILIES), LAYOUTS, MESHES, UNITS))
def test_any_family_and_back(tmp_path: Path, family: str, layout: str, mesh: str, unit: str) -> None:
    """Both arrays of each kernel come back as the tensors that they were, of a conversion for any mesh and of a reshard
    of it for none.
    """
    source = in_blocks(tmp_path, FAMILIES[family], BLOCKS.get(family, BLOCK))
    sharded = ("--mesh", mesh) if mesh else ()
    units = ("--unit_bytes", unit) if unit else ()
    kept = convert(source, tmp_path / "kept", *KEPT, "--scan_layers", layout, *sharded, *units)
    assert call("export", kept, tmp_path / "out", *units) == 0
    assert stored(tmp_path / "out") == stored(source)
    turned = "false" if layout == "true" else "true"
    assert call("reshard", kept, tmp_path / "turned", "--scan_layers", turned, *units) == 0
    assert call("export", tmp_path / "turned", tmp_path / "again") == 0
    assert stored(tmp_path / "again") == stored(source)


@pytest.mark.parametrize(
    ("family", "spelled"),
    [
        ("qwen3", lambda name: name.removeprefix("model.")),  # as transformers writes a model without a head
        ("kimi", lambda name: f"language_model.{name}"),
    ],
)
def test_other_spellings_and_back(tmp_path: Path, family: str, spelled: Callable[[str], str]) -> None:
    """Scales have the names of their weights, where the release calls these otherwise than the table does."""
    source = in_blocks(tmp_path, FAMILIES[family] | dict(tie_word_embeddings=True), spelled=spelled)
    kept = convert(source, tmp_path / "kept", *KEPT)
    assert call("export", kept, tmp_path / "out") == 0
    assert stored(tmp_path / "out") == stored(source)
    assert call("export", kept, tmp_path / "like", "--like", source) == 0
    assert stored(tmp_path / "like") == stored(source)


def test_reshard(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Codes and scales together, apart and back, for a mesh; MaxText is told what it was."""
    apart = converted(release, tmp_path / "wanted", *KEPT, "--scan_layers", "false")
    assert call("reshard", checkpoint, tmp_path / "apart", "--scan_layers", "false", "--like", release) == 0
    assert_same_bits(restore(tmp_path / "apart" / "0"), apart)
    told = (tmp_path / "apart" / "0" / "maxtext.yml").read_text()
    assert "weight_dtype: float8_e4m3fn\nweight_block_size: 128\nunquantized_modules: [token_embedder" in told
    options = ("--scan_layers", "true", "--mesh", "fsdp=2", "--like", release)
    assert call("reshard", tmp_path / "apart", tmp_path / "back", *options) == 0
    assert digests(restore(tmp_path / "back" / "0")) == maxtext()


def test_reshard_of_experts(experts: tuple[Path, Path], tmp_path: Path) -> None:
    """Codes and scales of the experts that are taken, as the cut of the release is converted."""
    source, checkpoint = experts
    wanted = converted(source, tmp_path / "wanted", *KEPT, "--experts", "1:3")
    assert any(key.endswith("_scale") for key in wanted)
    assert call("reshard", checkpoint, tmp_path / "out", "--experts", "1:3", "--scan_layers", "false") == 0
    apart = converted(source, tmp_path / "apart", *KEPT, "--experts", "1:3", "--scan_layers", "false")
    assert_same_bits(restore(tmp_path / "out" / "0"), apart)
    assert call("reshard", checkpoint, tmp_path / "as", "--experts", "1:3") == 0
    assert_same_bits(restore(tmp_path / "as" / "0"), wanted)


@pytest.mark.parametrize("options", [(), ("--mesh", "fsdp=2"), ("--layers", "0:4")], ids=["like", "mesh", "layers"])
def test_export_of_a_reshard(release: Path, checkpoint: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """What `--like` names is remembered with its codes and scales, so that they come back without being asked for."""
    assert call("reshard", checkpoint, tmp_path / "new", "--like", release, *options) == 0
    assert call("export", tmp_path / "new", tmp_path / "out") == 0
    wanted = release
    if "--layers" in options:
        wanted = tmp_path / "cut"
        assert call("cut", release, wanted, *options) == 0
    assert stored(tmp_path / "out") == stored(wanted)
    said, like = (json.loads((folder / "config.json").read_bytes()) for folder in (tmp_path / "out", wanted))
    assert said["quantization_config"] == like["quantization_config"]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("reshard", ("--save_dtype", "bfloat16"), "is FP8 codes; weightbeam export writes their values"),
        ("reshard", ("--mesh", "fsdp=4"), "kernel_scale: embed = 2 doesn't divide over fsdp=4"),
        ("quantize", (), "its weights are FP8 codes already"),
    ],
)
def test_what_codes_are_not_for(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    """No command takes codes for values: it says what else does."""
    assert call(command, checkpoint, tmp_path / "out", *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One is merged into values, which `quantize` makes codes of where it is told to; never into codes."""
    source = in_blocks(tmp_path, FAMILIES["qwen3"], finite=True)
    kept = convert(source, tmp_path / "kept", *KEPT)
    adapter, _ = peft_adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": (48, 32)})
    told = refused(capsys, source, "--lora", str(adapter))
    assert "up_proj.weight: is FP8 in blocks of 4 × 4" in told
    assert "what an adapter makes of it has no codes until weightbeam quantize makes some" in told
    assert call("export", kept, tmp_path / "no", "--lora", adapter) == 2
    assert "weightbeam quantize --lora makes codes of these" in " ".join(capsys.readouterr().err.split())
    assert call("quantize", kept, tmp_path / "out", "--lora", adapter) == 0
    assert call("export", kept, tmp_path / "values", "--lora", adapter, "--save_dtype", "float32") == 0
    assert call("quantize", tmp_path / "values", tmp_path / "wanted") == 0
    made, wanted = stored(tmp_path / "out"), stored(tmp_path / "wanted")
    coded = {name for name in wanted if name.removesuffix("_scale_inv") + "_scale_inv" in wanted}
    assert "model.layers.0.mlp.up_proj.weight" in coded
    assert {name: made[name] for name in coded} == {name: wanted[name] for name in coded}


def test_export_of_codes_from_values(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of values has none."""
    values = convert(release, tmp_path / "values")
    assert call("export", values, tmp_path / "out", *KEPT) == 2
    assert "holds no FP8 codes; weightbeam quantize makes them" in " ".join(capsys.readouterr().err.split())


def test_inspect_verify_and_diff(
    release: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They know the tree, with a record of ours or without one."""
    assert call("inspect", checkpoint) == 0
    assert "(parameters, FP8 codes with scales beside them)" in " ".join(capsys.readouterr().out.split())
    source = unnamed(checkpoint, tmp_path / "unnamed")
    assert call("verify", "--source", release, "--checkpoint", source) == 0
    assert call("diff", source, checkpoint) == 0
    assert "70 equal" in " ".join(capsys.readouterr().out.split())
    assert call("diff", checkpoint, release) == 0


def test_load(release: Path, checkpoint: Path) -> None:
    """Codes and scales on a mesh, of the checkpoint and of the release; never codes as values."""
    made = weightbeam.load(str(checkpoint), mesh="fsdp=1")
    of_release = weightbeam.load(str(release), mesh="fsdp=1", save_dtype="float8_e4m3fn")
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(made)}
    others = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(of_release)}
    assert {key: digest(np.asarray(leaf)) for key, leaf in leaves.items()} == {
        key: digest(np.asarray(leaf)) for key, leaf in others.items()
    }
    assert sum(leaf.dtype == FP8 for leaf in leaves.values()) == 34
    plain = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.numpy.bfloat16, sharding=leaf.sharding), made
    )
    with pytest.raises(weightbeam.Refused, match="FP8 codes are no values without their scales"):
        weightbeam.load(str(checkpoint), like=plain)


def leaves_of(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree, by their paths."""
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("unit_bytes", [1 << 26, 100_000], ids=["whole", "in parts"])
def test_load_of_values(release: Path, checkpoint: Path, dtype: str, unit_bytes: int) -> None:
    """What the codes of a checkpoint stand for has the bits of a load of its release: asked for by name, or by a tree
    that has no place for scales.
    """
    wanted = weightbeam.load(str(release), mesh="fsdp=1", save_dtype=dtype)
    asked = weightbeam.load(str(checkpoint), mesh="fsdp=1", save_dtype=dtype, unit_bytes=unit_bytes)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), wanted)
    for made in (asked, weightbeam.load(str(checkpoint), like=like, unit_bytes=unit_bytes)):
        found, expected = leaves_of(made), leaves_of(wanted)
        assert found.keys() == expected.keys()
        for key, array in found.items():
            np.testing.assert_array_equal(array.astype(F32), expected[key].astype(F32), err_msg=key)
    opened = weightbeam.open(str(checkpoint), save_dtype=dtype)
    key = "params.params.decoder.layers.layer_0.mlp.routed_experts.wi_0"
    assert str(opened[key].dtype) == dtype
    np.testing.assert_array_equal(
        opened[key][1, :, 5:250, 3:].astype(F32),
        weightbeam.open(str(release), save_dtype=dtype)[key][1, :, 5:250, 3:].astype(F32),
    )


def test_load_of_an_unnamed_one(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A release tells the axes of codes and scales of a checkpoint that doesn't, and those of values."""
    source = unnamed(checkpoint, tmp_path / "unnamed")
    for options in ({}, dict(save_dtype="bfloat16")):
        named = weightbeam.open(str(source), release=str(release), **options)
        axes = named["params.params.decoder.layers.layer_0.mlp.routed_experts.wi_0"].logical_axes
        assert axes == ("exp", "layers", "embed_moe", "mlp_moe")


# --- codes and scales that are parted ---------------------------------------------------------------------------------

SCALES = "params.params.decoder.layers.moe_block.wi_1_scale"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A release with FP8 experts, and its checkpoint of codes and scales, an array a folder."""
    folder = tmp_path_factory.mktemp("experts")
    source = in_blocks(folder, FAMILIES["qwen3_moe"])
    return source, convert(source, folder / "ck", *KEPT, "--use_ocdbt", "false", "--use_zarr3", "false")


def without_scales(checkpoint: Path, folder: Path, known: bool) -> Path:
    """A copy whose tree has no scales of one array of codes; its record knows them, or there is none."""
    step = Path(shutil.copytree(checkpoint, folder / "0")) if known else unnamed(checkpoint, folder)
    shutil.rmtree(step / "items" / SCALES)
    metadata = json.loads((step / "items" / "_METADATA").read_bytes())
    leaves = metadata["tree_metadata"]
    (lost,) = [key for key in leaves if key.endswith("'wi_1_scale')")]
    del leaves[lost]
    (step / "items" / "_METADATA").write_text(json.dumps(metadata))
    return step


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("known", [True, False])
def test_codes_without_their_scales(
    experts: tuple[Path, Path], tmp_path: Path, known: bool, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were taken for values: wrong weights, and no error."""
    release, checkpoint = experts
    source = without_scales(checkpoint, tmp_path / "ck", known)
    assert call("export", source, tmp_path / "out", "--like", release, "--save_dtype", dtype) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "moe_block.wi_1: float8_e4m3fn without scales, which would be" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("integers", [False, True], ids=["gone", "integers"])
def test_load_of_values_whose_scales_are_amiss(experts: tuple[Path, Path], tmp_path: Path, integers: bool) -> None:
    """Neither codes nor wrong values."""
    if integers:
        source = unnamed(experts[1], tmp_path / "ck")
        described = source / "items" / SCALES / ".zarray"
        described.write_text(json.dumps(json.loads(described.read_bytes()) | {"dtype": "<i4"}))
    else:
        source = without_scales(experts[1], tmp_path / "ck", known=False)
    with pytest.raises(weightbeam.Refused, match=r"moe_block\.wi_1: FP8 codes are no values without their scales"):
        weightbeam.load(str(source), mesh="fsdp=1", release=str(experts[0]), save_dtype="bfloat16")


@pytest.mark.parametrize("layers", [(), ("--layers", "0:1")], ids=["whole", "layers"])
def test_an_array_that_the_record_knows_is_gone(
    experts: tuple[Path, Path], tmp_path: Path, layers: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither resharded nor loaded."""
    source = without_scales(experts[1], tmp_path / "ck", known=True)
    assert call("reshard", source, tmp_path / "out", "--like", experts[0], *layers) == 2
    said = f"{SCALES}: conversion.json says that it was written, and it isn't there"
    assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(weightbeam.Refused, match="it isn't there: the checkpoint is damaged"):
        weightbeam.load(str(source), mesh="fsdp=1")


def test_scales_that_are_integers(
    experts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes of another type as numbers: `export` wrote wrong values, `verify` failed with numpy's words."""
    source = unnamed(experts[1], tmp_path / "ck")
    described = source / "items" / SCALES / ".zarray"
    described.write_text(json.dumps(json.loads(described.read_bytes()) | {"dtype": "<i4"}))
    assert call("export", source, tmp_path / "out", "--like", experts[0], "--save_dtype", "bfloat16") == 2
    assert "they are int32, and scales are floating-point numbers" in " ".join(capsys.readouterr().err.split())
    assert call("verify", "--source", experts[0], "--checkpoint", source) == 1
    said = capsys.readouterr()
    assert "decoder.layers.moe_block.wi_1_scale is stored as int32, expected float32" in said.err
    assert "ValueError" not in said.err
