"""FP8 for serving: the codes and scales that DeepSeek's formula gives, read back by our own convert and by
transformers.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pairs
import pytest
from lazily import lazily
from support import (
    BF16,
    F32,
    FP8,
    LLAMA,
    QWEN3_MOE,
    assert_same_bits,
    call,
    convert,
    converted,
    make_release,
    peft_adapter,
    random_tensors,
    read_config,
    restore,
    save,
)

import weightbeam as wb
from weightbeam.formats.encodings.made_codes import MadeCodes, MadeScales
from weightbeam.formats.encodings.quantizing import quantize
from weightbeam.formats.safetensors import Tensor, open_hf
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import CODED, ConvertOptions

safetensors = lazily("safetensors.torch")
torch = lazily("torch")

# Rows and columns of more than a block, of less, and of no whole number of them.
MODEL = LLAMA | dict(
    hidden_size=192,
    intermediate_size=320,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=48,
    architectures=["LlamaForCausalLM"],
)
MOE = QWEN3_MOE | dict(hidden_size=160, moe_intermediate_size=136, architectures=["Qwen3MoeForCausalLM"])


def read_with_torch(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a release, as torch reads them: safetensors knows no FP8 for numpy."""
    dtypes = {torch.float8_e4m3fn: FP8, torch.bfloat16: BF16, torch.float32: F32}
    tensors = {
        name: values for file in folder.glob("*.safetensors") for name, values in safetensors.load_file(file).items()
    }
    return {
        name: values.contiguous().view(torch.uint8).numpy().view(dtypes[values.dtype])
        for name, values in tensors.items()
    }


def by_definition(tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and the values that they mean: amax / 448 of each block of 128 × 128, block by block
    (deepseek-ai/DeepSeek-V3, inference/kernel.py).
    """
    values = tensor.astype(F32)
    codes, scales, meant = (
        np.empty(values.shape, FP8),
        np.empty([-(-n // 128) for n in values.shape], F32),
        np.empty_like(values),
    )
    for row, column in np.ndindex(scales.shape):
        at = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
        scales[row, column] = np.abs(values[at]).max() / np.float32(448)
        codes[at] = (values[at] / scales[row, column]).astype(FP8)
        meant[at] = codes[at].astype(F32) * scales[row, column]
    return codes, scales, meant


def assert_by_definition(made: dict[str, np.ndarray], tensors: dict[str, np.ndarray]) -> None:
    """Projections are codes and scales by the definition, all else is what it was."""
    projections = {name for name in tensors if name.endswith("_proj.weight")}
    assert made.keys() == tensors.keys() | {f"{name}_scale_inv" for name in projections}
    for name, tensor in tensors.items():
        if name in projections:
            codes, scales, _ = by_definition(tensor)
            assert made[name].dtype == FP8
            assert made[name].tobytes() == codes.tobytes(), name
            assert made[f"{name}_scale_inv"].tobytes() == scales.tobytes(), name
        else:
            assert made[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize(
    ("model", "dtype", "unit"),
    [(MODEL, BF16, "128MiB"), (MODEL, F32, "300000"), (MOE, BF16, "200000")],
    ids=["one unit", "blocks", "experts"],
)
def test_from_a_release(tmp_path: Path, model: dict, dtype: np.dtype, unit: str) -> None:
    """In units of a few blocks of rows, or of whole tensors: the same. `config.json` says what isn't quantised."""
    tensors = random_tensors(model, dtype)
    source = save(tmp_path / "hf", model, tensors)
    assert (
        call("quantize", "--format", "fp8", "--source", source, "--output", tmp_path / "fp8", "--unit_bytes", unit) == 0
    )
    assert_by_definition(read_with_torch(tmp_path / "fp8"), tensors)
    config = read_config(tmp_path / "fp8")["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    kept = {"lm_head"} & {name.removesuffix(".weight") for name in tensors} | {
        n.removesuffix(".weight") for n in tensors if n.endswith(".gate.weight")
    }
    assert set(config["modules_to_not_convert"]) == kept


@pytest.mark.parametrize(
    ("stored", "unit"), pairs.each([(MODEL, "true"), (MOE, "true"), (MODEL, "false")], ["128MiB", "700000"])
)
def test_from_a_checkpoint_in_one_pass(tmp_path: Path, stored: tuple[dict, str], unit: str) -> None:
    """A float32 checkpoint's values aren't rounded before they are quantised: the codes of the release that it was made
    of.
    """
    model, scan = stored
    tensors = random_tensors(model, F32)
    name = {"llama": "llama2-7b"}.get(model["model_type"])
    model_name = ("--maxtext_model", name) if name else ()
    step = convert(
        save(tmp_path / "hf", model, tensors),
        tmp_path / "ckpt",
        "--save_dtype",
        "float32",
        "--scan_layers",
        scan,
        *model_name,
        "--mesh",
        "fsdp=2",
    )
    assert call("quantize", "--source", step, "--output", tmp_path / "fp8", "--unit_bytes", unit) == 0
    made = read_with_torch(tmp_path / "fp8")
    # the query's factor is folded in and out, which rounds a float32
    scaled = {name for name in tensors if "q_proj" in name} if name else set()
    assert_by_definition(
        {n: v for n, v in made.items() if n.removesuffix("_scale_inv") not in scaled},
        {n: v for n, v in tensors.items() if n not in scaled},
    )
    for name in scaled:
        meant = by_definition(tensors[name])[2]
        np.testing.assert_allclose(
            made[name].astype(F32)
            * np.repeat(np.repeat(made[f"{name}_scale_inv"], 128, 0), 128, 1)[: meant.shape[0], : meant.shape[1]],
            meant,
            rtol=0.13,
        )


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8 to float32 or bfloat16 and again: the same codes; from float32 the same scales, too. Our own convert reads
    what the codes mean.
    """
    tensors = random_tensors(MODEL, BF16)
    source = save(tmp_path / "hf", MODEL, tensors)
    told: list[wb.Progress] = []
    wb.quantize(str(source), str(tmp_path / "fp8"), progress=told.append)
    assert told[-1].done == told[-1].total  # of what is written, not of the values before
    assert call("verify", tmp_path / "fp8") == 2
    assert f"weightbeam diff {source} {tmp_path / 'fp8'}" in capsys.readouterr().err
    first = read_with_torch(tmp_path / "fp8")
    for dtype in ("float32", "bfloat16"):
        assert (
            call("dequantize", "--source", tmp_path / "fp8", "--output", tmp_path / dtype, "--save_dtype", dtype) == 0
        )
        assert call("quantize", "--source", tmp_path / dtype, "--output", tmp_path / f"again-{dtype}") == 0
        again = read_with_torch(tmp_path / f"again-{dtype}")
        for name, values in first.items():
            if dtype == "float32" or values.dtype == FP8:
                assert again[name].tobytes() == values.tobytes(), name
    for name, values in read_with_torch(tmp_path / "float32").items():
        if name.endswith("_proj.weight"):
            assert values.tobytes() == by_definition(tensors[name])[2].tobytes(), name
    convert(tmp_path / "fp8", tmp_path / "ckpt", "--save_dtype", "float32", "--maxtext_model", "llama2-7b")
    assert call("diff", tmp_path / "fp8", tmp_path / "ckpt", "--maxtext_model", "llama2-7b") == 0


def masters(folder: Path, model: dict) -> tuple[Path, dict[str, np.ndarray]]:
    """A release in FP8 as one is made of float32 masters, whose scales bfloat16 values don't tell, and its tensors."""
    tensors = {
        name: values if "_proj" in name else values.astype(BF16) for name, values in random_tensors(model, F32).items()
    }
    source = save(folder / "masters", model, tensors)
    wb.quantize(str(source), str(folder / "fp8"), progress=False)
    return folder / "fp8", read_with_torch(folder / "fp8")


@pytest.mark.parametrize(
    ("model", "unit"),
    [
        (MODEL, "128MiB"),
        pytest.param(
            MOE,
            "200000",
            marks=pytest.mark.slow("experts of many tensors, 15 s; tests/formats/test_quantizing.py has the law"),
        ),
    ],
    ids=["dense", "experts"],
)
def test_scales_of_a_release_come_back(tmp_path: Path, model: dict, unit: str) -> None:
    """FP8 -> bfloat16 -> FP8 like the release: every byte of every tensor, and its `quantization_config`. A block that
    was touched has a scale of its own.
    """
    fp8, stored = masters(tmp_path, model)
    assert call("dequantize", fp8, tmp_path / "bf16", "--save_dtype", "bfloat16") == 0
    assert call("quantize", tmp_path / "bf16", tmp_path / "without") == 0
    without = read_with_torch(tmp_path / "without")
    assert [
        name for name in stored if name.endswith("_scale_inv") and without[name].tobytes() != stored[name].tobytes()
    ]
    assert call("quantize", tmp_path / "bf16", tmp_path / "again", "--like", fp8, "--unit_bytes", unit) == 0
    again = read_with_torch(tmp_path / "again")
    assert {name: values.tobytes() for name, values in again.items()} == {
        name: values.tobytes() for name, values in stored.items()
    }
    assert read_config(tmp_path / "again")["quantization_config"] == read_config(fp8)["quantization_config"]

    name = next(name for name, values in stored.items() if values.dtype == FP8 and min(values.shape) > 128)
    tensors = read_with_torch(tmp_path / "bf16")
    tensors[name] = tensors[name].copy()
    tensors[name][130, 5] *= 3
    assert (
        call(
            "quantize",
            save(tmp_path / "tuned", model, tensors),
            tmp_path / "touched",
            "--like",
            fp8,
            "--unit_bytes",
            unit,
        )
        == 0
    )
    touched = read_with_torch(tmp_path / "touched")
    codes, scales, _ = by_definition(tensors[name])
    wanted = stored[f"{name}_scale_inv"].copy()
    wanted[1, 0] = scales[1, 0]
    assert touched[f"{name}_scale_inv"].tobytes() == wanted.tobytes()
    assert touched[name][128:256, :128].tobytes() == codes[128:256, :128].tobytes()
    assert touched[name][:128].tobytes() == stored[name][:128].tobytes()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow("the same from another dtype, 10 s"))]
)
def test_scales_of_a_release_come_back_from_a_checkpoint(tmp_path: Path, dtype: str) -> None:
    """A dequantised Orbax checkpoint, like the release in FP8 that it was made of: its bytes, where a factor was folded
    into the query, too.
    """
    fp8, stored = masters(tmp_path, MODEL)
    step = convert(fp8, tmp_path / "ckpt", "--save_dtype", dtype, "--maxtext_model", "llama2-7b")
    assert call("quantize", step, tmp_path / "again", "--like", fp8) == 0
    again = read_with_torch(tmp_path / "again")
    assert [name for name, values in stored.items() if again[name].tobytes() != values.tobytes()] == []
    assert again.keys() == stored.keys()


def test_an_adapter_on_the_way(tmp_path: Path) -> None:
    """Merged and quantised in one pass: the codes of what `merge` writes in float32, not of its bfloat16."""
    tensors = random_tensors(MODEL, BF16)
    source = save(tmp_path / "hf", MODEL, tensors)
    name = "model.layers.0.self_attn.v_proj"
    lora, factors = peft_adapter(tmp_path / "adapter", {name: tensors[f"{name}.weight"].shape}, layers_to_transform=[0])
    a, b = (factors[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
    assert call("quantize", source, tmp_path / "fp8", "--lora", lora) == 0
    made = read_with_torch(tmp_path / "fp8")
    assert_by_definition(made, tensors | {f"{name}.weight": tensors[f"{name}.weight"].astype(F32) + 2 * b @ a})


@pytest.mark.parametrize(
    "case",
    pairs.some(["cases/deepseek4", "models/deepseek_v4", "cases/gpt-oss", "cases/gemma4-moe", "models/llama4"], 2),
)
def test_transformers_takes_no_code_for_a_value(generated: Path, tmp_path: Path, case: str) -> None:
    """Embeddings and heads under the names of the hub, compressors, fused experts that no engine loads as codes: they
    stay values, and what transformers loads without a GPU is what `dequantize` makes.
    """
    import transformers

    source = generated / case
    assert call("quantize", source, tmp_path / "fp8") == 0
    assert call("dequantize", tmp_path / "fp8", tmp_path / "values") == 0
    assert any(name.endswith("_scale_inv") for name in open_hf(tmp_path / "fp8").tensors)
    of = getattr(transformers, read_config(source)["architectures"][0])
    loaded, told = of.from_pretrained(tmp_path / "fp8", dtype=torch.float32, output_loading_info=True)
    assert not {key for key in told["unexpected_keys"] if key.endswith("_scale_inv")}
    wanted = of.from_pretrained(tmp_path / "values", dtype=torch.float32).state_dict()
    for name, values in loaded.state_dict().items():
        if all(size < 128 or size % 128 == 0 for size in values.shape):  # else transformers takes blocks of other sizes
            torch.testing.assert_close(values.float(), wanted[name].float(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("width", [128, 64], ids=["whole blocks", "parts of blocks"])
def test_codes_of_fused_experts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], width: int) -> None:
    """transformers loads them on some GPUs, and elsewhere takes them for values. Where the gate and the up projection
    would share blocks no code does for it.
    """
    experts = "model.layers.0.mlp.experts"
    tensors = {
        name: np.zeros(shape, BF16)
        for name, shape in (
            ("model.layers.0.self_attn.q_proj.weight", (128, 256)),
            (f"{experts}.gate_up_proj", (4, 2 * width, 256)),
            (f"{experts}.down_proj", (4, 256, width)),
        )
    }
    assert call("quantize", save(tmp_path / "source", MOE, tensors), tmp_path / "fp8") == 0
    assert ("takes such codes for weights" in capsys.readouterr().err) == (width == 128)
    made = open_hf(tmp_path / "fp8")
    assert (f"{experts}.gate_up_proj_scale_inv" in made.tensors) == (width == 128)
    kept = made.config["quantization_config"].get("modules_to_not_convert", [])
    assert kept == ([] if width == 128 else [experts])


@pytest.mark.parametrize("mlp", [200, 384], ids=["blocks cut off", "whole blocks"])
def test_codes_that_transformers_reads_otherwise_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mlp: int
) -> None:
    """It takes the last of several blocks for as large as the others, and the only one for what it is. A dry run says
    so, too, and the way to load names `dequantize` then.
    """
    import transformers

    attention = dict(head_dim=48 if mlp == 200 else 64, num_attention_heads=4, num_key_value_heads=2)
    model = LLAMA | dict(hidden_size=256, intermediate_size=mlp, architectures=["LlamaForCausalLM"]) | attention
    source = save(tmp_path / "source", model, random_tensors(model))
    assert call("quantize", "--dry_run", source, tmp_path / "fp8") == 0
    planned = capsys.readouterr().out
    assert call("quantize", source, tmp_path / "fp8") == 0
    out, err = capsys.readouterr()
    assert call("dequantize", tmp_path / "fp8", tmp_path / "values") == 0
    of = transformers.LlamaForCausalLM
    loaded = of.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16).state_dict()
    values = of.from_pretrained(tmp_path / "values", dtype=torch.bfloat16).state_dict()
    wrong = {name for name in values if not torch.equal(loaded[name], values[name])}
    kinds = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in wrong})
    assert kinds == (["down_proj", "gate_proj", "o_proj", "q_proj", "up_proj"] if mlp == 200 else [])
    told = f"{len(wrong)} of the tensors that are codes ({', '.join(kinds)}) have a last block that is cut off"
    assert (told in planned, told in err) == (bool(wrong), bool(wrong))
    assert (f"weightbeam dequantize {tmp_path / 'fp8'} VALUES" in out) == bool(wrong)
    assert (f"from_pretrained('{tmp_path / 'fp8'}')" in out) == (not wrong)


def test_an_adapter_of_one_expert(tmp_path: Path) -> None:
    """Merged into a release in FP8: engines join the experts of a layer, so all of them become values; other layers' stay
    codes.
    """
    source = make_release(tmp_path / "source", MOE)
    assert call("quantize", source, tmp_path / "fp8") == 0
    experts = "model.layers.1.mlp.experts"
    module = f"{experts}.2.down_proj"
    lora, _ = peft_adapter(tmp_path / "lora", {module: open_hf(source).tensors[f"{module}.weight"].shape})
    assert call("merge", tmp_path / "fp8", tmp_path / "merged", "--lora", lora) == 0
    before, after = open_hf(tmp_path / "fp8").tensors, open_hf(tmp_path / "merged")
    assert before.keys() - after.tensors.keys() == {
        name for name in before if name.startswith(f"{experts}.") and name.endswith("_scale_inv")
    }
    assert {tensor.dtype for name, tensor in after.tensors.items() if name.startswith(f"{experts}.")} == {BF16}
    kept = after.config["quantization_config"]["modules_to_not_convert"]
    assert {experts, module, f"{experts}.0.up_proj"} <= {*kept}


def test_what_engines_join_has_one_dtype(tmp_path: Path) -> None:
    """vLLM refuses a q in values beside a k in codes, and a gate beside an up; what it joins with nothing stays as it is."""
    source = make_release(tmp_path / "source", LLAMA | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128})
    assert call("quantize", source, tmp_path / "fp8") == 0
    layer = "model.layers.1"
    modules = [f"{layer}.self_attn.q_proj", f"{layer}.mlp.gate_proj"]
    shapes = {module: open_hf(source).tensors[f"{module}.weight"].shape for module in modules}
    lora, _ = peft_adapter(tmp_path / "lora", shapes)
    assert call("merge", tmp_path / "fp8", tmp_path / "merged", "--lora", lora) == 0
    made = open_hf(tmp_path / "merged")
    values = {*(f"{layer}.self_attn.{each}_proj" for each in "qkv"), f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"}
    linear = {name.removesuffix(".weight"): tensor.dtype for name, tensor in made.tensors.items() if "_proj" in name}
    assert {name for name, dtype in linear.items() if dtype == BF16} == values
    assert values <= {*made.config["quantization_config"]["modules_to_not_convert"]}
    lost = open_hf(tmp_path / "fp8").tensors.keys() - made.tensors.keys()
    assert lost == {f"{name}.weight_scale_inv" for name in values}


def test_prediction_layers_of_the_release(generated: Path, tmp_path: Path) -> None:
    """Like a release that has them: left out where they aren't asked for, else its codes and scales as they are."""
    source, like = generated / "cases" / "deepseek3-mtp-standalone", tmp_path / "fp8"
    assert call("quantize", source, like) == 0
    convert(source, tmp_path / "ckpt", "--save_dtype", "float32")
    wanted = read_with_torch(like)
    own = {name for name in wanted if name.startswith("model.layers.5.")}
    assert any(name.endswith("_scale_inv") for name in own)
    for folder, options, names in (("without", (), wanted.keys() - own), ("with", ("--mtp", "true"), wanted.keys())):
        assert call("quantize", tmp_path / "ckpt", tmp_path / folder, "--like", like, *options) == 0
        made = read_with_torch(tmp_path / folder)
        assert made.keys() == names
        assert all(made[name].tobytes() == wanted[name].tobytes() for name in own & names)
        assert call("verify", tmp_path / folder) == 0


@pytest.mark.parametrize("damage", ["infinite", "large", "scale"])
def test_verify_judges_each_block_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    """An element that is infinite, or a large one in another block, and a scale with codes of zero excuse nothing."""
    name, tensors = "model.layers.1.mlp.up_proj.weight", random_tensors(MODEL, F32)
    tensors[name][0, 0] = 1e9 if damage == "large" else 0
    convert(save(tmp_path / "hf", MODEL, tensors), tmp_path / "ckpt", "--save_dtype", "float32")
    assert call("quantize", tmp_path / "ckpt", tmp_path / "fp8") == 0
    assert call("verify", tmp_path / "fp8") == 0
    if damage == "scale":
        made = safetensors.load_file(tmp_path / "fp8/model.safetensors")
        made[name] = torch.zeros_like(made[name])
        made[f"{name}_scale_inv"] = torch.full_like(made[f"{name}_scale_inv"], 1e6)
        safetensors.save_file(made, tmp_path / "fp8/model.safetensors", {"format": "pt"})
    else:
        odd = tensors | {name: tensors[name] * -1}
        odd[name][0, 0] = np.inf if damage == "infinite" else 1e9
        shutil.rmtree(tmp_path / "ckpt")
        convert(save(tmp_path / "odd", MODEL, odd), tmp_path / "ckpt", "--save_dtype", "float32")
    capsys.readouterr()
    assert call("verify", tmp_path / "fp8") == 1
    assert f"{name}[" in capsys.readouterr().err


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is quantised already, what has nothing to quantise, another format: before anything is written."""
    source = make_release(tmp_path / "hf")
    assert call("quantize", source, tmp_path / "fp8") == 0
    plain = make_release(tmp_path / "plain")
    less = {name: values for name, values in random_tensors(LLAMA).items() if "layers.1.mlp.up_proj" not in name}
    bare = save(tmp_path / "bare", LLAMA, {"model.norm.weight": np.ones(32, BF16)})
    for arguments, message in (
        (["--source", tmp_path / "fp8"], "tensors are quantised already (FP8"),
        (["--source", bare], "none of its tensors"),
        (["--source", tmp_path / "none"], "none"),
        (["--source", source, "--format", "int3"], "invalid choice"),
        (["--source", source, "--like", plain], "isn't quantised"),
        (
            ["--source", source, "--step", "3", "--maxtext_model", "x"],
            "--maxtext_model, --step: of an Orbax checkpoint",
        ),
        (["--source", source, "--create_pr"], "only the hub has pull requests"),
        (
            ["--source", save(tmp_path / "less", LLAMA, less), "--like", tmp_path / "fp8"],
            "model.layers.1.mlp.up_proj.weight",
        ),
    ):
        try:
            status = call("quantize", *arguments, "--output", tmp_path / "out")
        except SystemExit as e:
            status = e.code
        assert status == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


# --- into MaxText's tree ----------------------------------------------------------------------------------------------

TREES = {
    "llama": MODEL | dict(hidden_size=256, intermediate_size=384, num_attention_heads=2, head_dim=128),
    "experts": MOE | dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=128, head_dim=128),
}
INTO = ("--save_dtype", "float8_e4m3fn")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", ()),
        ("llama", ("--unit_bytes", "300K", "--scan_layers", "false")),
        ("experts", ("--mesh", "fsdp=2", "--unit_bytes", "400K")),
        ("experts", ("--scan_layers", "false", "--use_ocdbt", "false")),
    ],
    ids=["scanned", "small units", "experts on a mesh", "experts apart"],
)
def test_into_a_tree(tmp_path: Path, family: str, options: tuple[str, ...]) -> None:
    """In one step as in two: quantised to a release, whose codes are kept; whatever a unit cuts of a block."""
    source = save(tmp_path / "hf", TREES[family], random_tensors(TREES[family], BF16))
    assert call("quantize", source, tmp_path / "fp8") == 0
    wanted = converted(tmp_path / "fp8", tmp_path / "two", *INTO, *options)
    made = convert(source, tmp_path / "one", *INTO, "--quantize", "fp8", *options)
    assert_same_bits(restore(made), wanted)
    assert any(array.dtype == FP8 for array in wanted.values())
    assert call("verify", made) == 0
    for name in ("one", "two"):
        assert call("export", tmp_path / name, tmp_path / f"{name}-back", *INTO) == 0
    backs = [read_with_torch(tmp_path / f"{name}-back") for name in ("one", "two")]
    assert backs[0].keys() == backs[1].keys()
    assert all(backs[0][name].tobytes() == values.tobytes() for name, values in backs[1].items())


def test_the_plan_says_that_weights_are_read_twice(tmp_path: Path) -> None:
    """Once for codes, once for scales."""
    tensors = random_tensors(TREES["llama"], BF16)
    source = save(tmp_path / "hf", TREES["llama"], tensors)
    planned = plan_conversion(ConvertOptions(save_dtype=CODED, quantize="fp8"), open_hf(source))
    once = sum(tensor.nbytes for tensor in tensors.values())
    twice = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("_proj.weight"))
    assert (planned.source_bytes, planned.read_bytes) == (once, once + twice)


def test_boxes_of_made_codes() -> None:
    """Any box is that part of the whole, whatever it cuts of blocks."""
    shape = (2, 300, 260)
    values = np.random.default_rng(0).standard_normal(shape, F32).astype(BF16)
    tensor = Tensor("experts", BF16, shape, "", 0)
    codes, scales = quantize(values, "experts")
    for encoding, whole, boxes in (
        (MadeCodes(tensor), codes, [((0, 2), (0, 300), (0, 260)), ((1, 2), (100, 290), (130, 135)), ((0, 1), (128, 129), (0, 260))]),
        (MadeScales(tensor), scales, [((0, 2), (0, 3), (0, 3)), ((1, 2), (1, 2), (2, 3))]),
    ):  # fmt: skip
        assert encoding.shape == whole.shape
        for box in boxes:
            (read,) = encoding.reads(box)
            stored = values[tuple(slice(*span) for span in read.box)]
            part = whole[tuple(slice(*span) for span in box)]
            assert encoding.decode([stored], box, encoding.weight.dtype).tobytes() == part.tobytes()


def test_what_no_tree_of_codes_is_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Codes, sizes that aren't whole blocks, and another dtype than that of codes."""
    source = save(tmp_path / "hf", TREES["llama"], random_tensors(TREES["llama"], BF16))
    assert call("quantize", source, tmp_path / "fp8") == 0
    small = make_release(tmp_path / "small")
    for place, options, message in (
        (tmp_path / "fp8", INTO, "--quantize takes values as they are stored"),
        (small, INTO, "isn't whole blocks of 128"),
        (source, (), "makes codes, which --save_dtype float8_e4m3fn writes"),
    ):
        capsys.readouterr()
        assert call("convert", place, tmp_path / "out", "--quantize", "fp8", *options) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out").exists()
