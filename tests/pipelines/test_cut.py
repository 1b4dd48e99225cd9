"""A part of a release: as a release of its own that transformers loads, and as a source of every command that takes one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from pairs import each, some
from quantised import fp8_llama
from safetensors import deserialize
from servers.clients import at_hub
from support import (
    BF16,
    DEEPSEEK,
    LLAMA,
    QWEN3_MOE,
    assert_same_bits,
    call,
    converted,
    make_release,
    peft_adapter,
    random_tensors,
    read_config,
    read_tensors,
    reference,
    restore,
    save,
    split,
)

import weightbeam as wb
from weightbeam.formats.release.model_class import model_class
from weightbeam.formats.release.small_files import MAX_FILE_BYTES
from weightbeam.formats.safetensors import INDEX
from weightbeam.pipelines.commands import merge, reshard
from weightbeam.transforms.planning.options import MergeOptions
from weightbeam.transforms.stages.staged import load

torch = lazily("torch")
transformers = lazily("transformers")

# Layers, experts and rows of the vocabulary of a model of each family, and the layers that MaxText keeps in one.
CUTS: Mapping[str, tuple[str, str | None, int]] = {
    "cases/llama3.1": ("0:1,2:4", None, 160),
    "models/mistral": ("1:3", None, 200),
    "cases/qwen2.5-tied": ("1:3", None, 160),
    "cases/qwen3-moe": ("0,3", "2:6", 160),
    "cases/mixtral": ("1:2", "0:2", 160),
    "cases/deepseek2": ("0:2,4", "0:4", 160),
    "cases/deepseek3": ("0,3:5", "4:8", 160),
    "cases/deepseek3.2": ("0:3", "0:4", 160),
    "models/kimi_k25": ("0:2", "0:4", 160),
    "cases/deepseek4": ("0:5", None, 160),
    "models/glm5": ("0:1,3:6", "0:4", 80),
    "models/hy3": ("0,2", "2:6", 80),
    "cases/olmo3": ("4:8", None, 160),
    "cases/gpt-oss": ("2:4", "1:3", 160),
    "models/llama4": ("4:8", "0:2", 160),
    "models/llama4-dense": ("0:4", "2:4", 160),
    "cases/gemma2": ("2:4", None, 160),
    "cases/gemma3": ("0:6", None, 160),
    "models/gemma3-text": ("6:13", None, 160),
    "cases/gemma4-moe": ("6:12", "2:4", 160),
    "models/gemma4-text": ("0:6", None, 160),
    "cases/gemma4-small": ("0:5", None, 160),
    "cases/qwen3-next": ("4:8", "4:8", 160),
    "cases/qwen3.5": ("0:4", "0:4", 160),
    "models/qwen3_vl_moe": ("1", "1:4", 160),
    "models/qwen3_omni": ("0", "0:2", 160),
}
UNSCANNED = ("cases/gemma4-small", "models/qwen3_vl_moe", "models/qwen3_omni")  # MaxText has them so only
ROWS = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight|.*\.tid2eid")
EXPERTS = re.compile(  # of a text model as transformers has it in memory: all experts in one tensor
    r".*layers\.\d+\.((mlp|feed_forward)\.)?(experts\.(gate_up_proj|down_proj)(_bias)?|(gate|router)\.(weight|bias)|((gate|router)\.)?e_score_correction_bias"
    r"|router\.(proj\.weight|per_expert_scale))"
)
PER_LAYER = {
    "embed_tokens_per_layer.weight": 1,
    "per_layer_model_projection.weight": 0,
}  # where Gemma 4's layers lie side by side


def stored(folder: Path) -> dict[str, tuple[list[int], bytes]]:
    """Every tensor of a release, codes too: its shape and its bytes, by the safetensors library."""
    held = (tensor for path in folder.glob("*.safetensors") for tensor in deserialize(path.read_bytes()))
    return {name: (about["shape"], bytes(about["data"])) for name, about in held}


def numbers(layers: str) -> list[int]:
    return [
        i
        for part in layers.split(",")
        for i in range(int(part.split(":")[0]), int(part.split(":")[-1]) + (":" not in part))
    ]


def options(layers: str, experts: str | None, rows: int) -> list[str]:
    return ["--layers", layers, *(["--experts", experts] if experts else []), "--vocab_rows", str(rows)]


def state(folder: Path) -> tuple[dict[str, Any], Any]:
    """The weights of a model that transformers loads, and its config; nothing is missing, and nothing left over."""
    model, found = getattr(transformers, str(model_class(read_config(folder)))).from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(found.values()), found
    return model.state_dict(), model.config


def part_of(
    weights: Mapping[str, Any], layers: list[int], experts: str | None, rows: int, count: int
) -> dict[str, Any]:
    """The part of a whole model's weights that a cut should have, in torch alone."""
    kept = {}
    for name, values in weights.items():
        found = re.fullmatch(r"((?:thinker\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.)(\d+)(\..*)", name)
        if found and int(found[2]) not in layers:
            continue
        if experts and EXPERTS.fullmatch(name) and "vis" not in name and "talker" not in name:
            values = values[slice(*map(int, experts.split(":")))]
        if ROWS.fullmatch(name) and "talker" not in name:
            values = values[:rows]
        for leaf, axis in PER_LAYER.items():
            if name.endswith(leaf):
                values = torch.cat([values.chunk(count, axis)[layer] for layer in layers], axis)
        kept[f"{found[1]}{layers.index(int(found[2]))}{found[3]}" if found else name] = values
    return kept


@pytest.mark.parametrize("model", some([*CUTS], 3))
def test_transformers_loads_it(generated: Path, tmp_path: Path, model: str) -> None:
    """What it loads is that part of the whole model, to the bit."""
    layers, experts, rows = CUTS[model]
    assert call("cut", generated / model, tmp_path / "cut", *options(layers, experts, rows)) == 0
    whole, config = state(generated / model)
    count = config.get_text_config(decoder=True).num_hidden_layers
    wanted, (made, _) = part_of(whole, numbers(layers), experts, rows, count), state(tmp_path / "cut")
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        assert made[name].shape == values.shape, name
        assert torch.equal(made[name], values), name


@pytest.mark.parametrize(("model", "scan"), each(some([*CUTS], 3), ["true", "false"]))
def test_its_conversion_is_the_same(generated: Path, tmp_path: Path, model: str, scan: str) -> None:
    """Of the cut as a release, and of the whole with the same options: every bit; it verifies, and an export of it is the
    cut again.
    """
    asked, scan = options(*CUTS[model]), "false" if model in UNSCANNED else scan
    how = ["--scan_layers", scan, *(["--maxtext_model", "llama3.1-8b"] if model == "cases/llama3.1" else [])]
    assert call("cut", generated / model, tmp_path / "cut", *asked) == 0
    wanted = converted(tmp_path / "cut", tmp_path / "a", *how)
    assert_same_bits(converted(generated / model, tmp_path / "b", *how, *asked), wanted)
    assert call("verify", tmp_path / "b") == 0
    assert call("export", tmp_path / "b", tmp_path / "exported") == 0
    made, cut = stored(tmp_path / "exported"), stored(tmp_path / "cut")
    assert {name: cut[name][0] for name in made} == {name: shape for name, (shape, _) in made.items()}


@pytest.mark.parametrize(
    ("model", "scan", "link"),
    each(some([*CUTS], 6), ["true", "false"], [[], ["--link", "symlink"], ["--link", "copy"]]),
)
def test_its_virtual_checkpoint_is_the_same(
    generated: Path, tmp_path: Path, model: str, scan: str, link: list[str]
) -> None:
    """Every bit, of the files' own ranges; and so is an ordinary checkpoint of it, where only these files are."""
    asked, scan = options(*CUTS[model]), "false" if model in UNSCANNED else scan
    how = ["--scan_layers", scan, *(["--maxtext_model", "llama3.1-8b"] if model == "cases/llama3.1" else []), *asked]
    source = shutil.copytree(generated / model, tmp_path / "hf")
    wanted = converted(source, tmp_path / "a", *how)
    assert_same_bits(converted(source, tmp_path / "b", *how, "--virtual", *link), wanted)
    record = json.loads((tmp_path / "b/0/conversion.json").read_text())
    assert record["references"]["bytes"] > sum(values.nbytes for values in wanted.values()) / 4
    if link != ["--link", "symlink"]:
        shutil.rmtree(source)
    assert call("verify", tmp_path / "b") == 0
    assert call("materialize", tmp_path / "b", tmp_path / "c") == 0
    assert_same_bits(restore(tmp_path / "c/0"), wanted)
    first, last = (json.loads((tmp_path / name / "0/conversion.json").read_text()) for name in "ac")
    for fact in ("config", "tensors", "digests", "family", "model"):
        assert first[fact] == last[fact], fact


@pytest.mark.parametrize(
    ("model", "layers", "kinds"),
    some(
        [
            ("cases/deepseek3", [1, 2, 4], {"dense_layers": 2, "moe_layers": 3}),
            ("cases/llama3.1", [1, 3], {"layers": 4}),
            ("cases/qwen3-moe", [0, 3], {"layers": 4}),
            ("cases/gpt-oss", [2, 3], {"layers": 4}),
            ("cases/olmo3", [0, 1, 2, 3], {"layers": 8}),
            ("cases/gemma3", [0, 1, 2, 3, 4, 5], {"layers": 8}),
            ("cases/qwen3-next", [4, 5, 6, 7], {"layers": 8}),
        ],
        3,
    ),
)
def test_the_cut_of_a_conversion(
    generated: Path, tmp_path: Path, model: str, layers: list[int], kinds: dict[str, int]
) -> None:
    """The arrays of the layers that are kept are those of the whole model's conversion."""
    how = ["--scan_layers", "false", *(["--maxtext_model", "llama3.1-8b"] if model == "cases/llama3.1" else [])]
    whole = converted(generated / model, tmp_path / "whole", *how)
    names = [f"{kind}_{number}" for kind, count in kinds.items() for number in range(count)]
    new = {f"decoder.{names[layer]}.": f"decoder.{kind}_{sum(name.startswith(kind) for name in map(names.__getitem__, layers[:at]))}."
           for at, layer in enumerate(layers) for kind in [names[layer].rpartition("_")[0]]}  # fmt: skip
    new |= {f"MoEBiasVar.{old}": f"MoEBiasVar.{kept}" for old, kept in new.items()}
    layered = r"(MoEBiasVar\.)?decoder\.\w*layers_\d+\."
    wanted = {key: values for key, values in whole.items() if not re.match(layered, key)}
    for old, kept in new.items():
        wanted |= {kept + key.removeprefix(old): values for key, values in whole.items() if key.startswith(old)}
    cut = ["--layers", ",".join(map(str, layers))]
    assert_same_bits(converted(generated / model, tmp_path / "cut", *how, *cut), wanted)


def test_every_command_that_takes_a_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of five layers: planned, inspected, loaded, opened, quantised, dequantised and merged as the cut itself."""
    config = LLAMA | dict(num_hidden_layers=5, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    tensors = random_tensors(config)
    source, cut = save(tmp_path / "hf", config, *split(tensors, 3)), ["--layers", "1,4", "--vocab_rows", "32"]
    model = ["--maxtext_model", "llama2-7b"]
    assert call("cut", source, tmp_path / "cut", *cut) == 0
    said = "layers 1:2,4:5, rows of the vocabulary 0:32: all tensors are the release's own bytes"
    assert said in capsys.readouterr().out
    small = config | dict(num_hidden_layers=2, vocab_size=32)
    wanted = {re.sub(r"layers\.[14]", lambda found: "layers.1" if "4" in found[0] else "layers.0", name): values
              for name, values in tensors.items() if not re.search(r"layers\.[023]\.", name)}  # fmt: skip
    wanted |= {name: wanted[name][:32] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert_same_bits(read_tensors(tmp_path / "cut"), wanted)
    assert read_config(tmp_path / "cut") == small
    index = (
        json.loads((tmp_path / "cut" / INDEX).read_text())["weight_map"]
        if (tmp_path / "cut" / INDEX).exists()
        else wanted
    )
    assert index.keys() == wanted.keys()
    assert "layers 1:2,4:5, rows of the vocabulary 0:32" in (tmp_path / "cut" / "README.md").read_text()

    capsys.readouterr()
    for command in (["plan", source, *model], ["plan", "cut", source, tmp_path / "new"], ["inspect", source]):
        assert call(*command, *cut) == 0
        assert "layers 1:2,4:5" in (said := capsys.readouterr().out) or "--layers 1,4" in said
    parsed = wb.plan(str(source), layers=[1, 4], vocab_rows=32, maxtext_model="llama2-7b")
    assert parsed.conversion.options.layers == "1:2,4:5"
    tree = wb.load(str(source), mesh="fsdp=1", layers="1,4", vocab_rows=32, maxtext_model="llama2-7b")
    arrays = reference(small, wanted, BF16)
    kernel = tree["params"]["params"]["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    np.testing.assert_array_equal(np.asarray(kernel), arrays["decoder.layers.self_attention.query.kernel"])
    opened = wb.open(str(source), as_is=True, layers="1,4")
    np.testing.assert_array_equal(
        opened["model.layers.1.mlp.up_proj.weight"][:], tensors["model.layers.4.mlp.up_proj.weight"]
    )

    assert call("quantize", source, tmp_path / "fp8", *cut) == 0
    assert call("quantize", tmp_path / "cut", tmp_path / "fp8-of-cut") == 0
    assert stored(tmp_path / "fp8") == stored(tmp_path / "fp8-of-cut")
    assert read_config(tmp_path / "fp8") == read_config(tmp_path / "fp8-of-cut")
    assert call("dequantize", tmp_path / "fp8", tmp_path / "bf16", "--layers", "1") == 0
    assert call("dequantize", tmp_path / "fp8", tmp_path / "both") == 0
    name = "self_attn.o_proj.weight"
    one, both = read_tensors(tmp_path / "bf16"), read_tensors(tmp_path / "both")
    assert one[f"model.layers.0.{name}"].tobytes() == both[f"model.layers.1.{name}"].tobytes()


def test_codes_and_scales(tmp_path: Path) -> None:
    """A quantised release keeps them byte for byte, and says the same of them."""
    source, tensors, _ = fp8_llama(tmp_path / "fp8")
    assert call("cut", source, tmp_path / "cut", "--layers", "1:2") == 0
    wanted = {
        name.replace("layers.1", "layers.0"): values for name, values in tensors.items() if "layers.0" not in name
    }
    assert stored(tmp_path / "cut") == {name: ([*values.shape], values.tobytes()) for name, values in wanted.items()}
    assert read_config(tmp_path / "cut")["quantization_config"] == read_config(source)["quantization_config"]


def test_prediction_layers(tmp_path: Path) -> None:
    """DeepSeek's layer behind the last is converted with --mtp as from the whole; without it it is gone."""
    config = DEEPSEEK | dict(num_nextn_predict_layers=1)
    tensors = random_tensors(config)
    behind = "model.layers.3."
    tensors[f"{behind}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{behind}shared_head.head.weight"] = tensors["lm_head.weight"]
    source = save(tmp_path / "hf", config, *split(tensors, 2))
    whole = converted(source, tmp_path / "whole", "--mtp", "true")
    part = converted(source, tmp_path / "part", "--mtp", "true", "--layers", "0,2,3")
    assert part["decoder.moe_layers.self_attention.wq_a.kernel"].shape[1] == 1
    predicting = {key: values for key, values in whole.items() if key.startswith("mtp_block.")}
    assert predicting
    assert_same_bits({key: values for key, values in part.items() if key.startswith("mtp_block.")}, predicting)
    assert call("cut", source, tmp_path / "cut", "--layers", "0:2") == 0
    assert read_config(tmp_path / "cut")["num_nextn_predict_layers"] == 0


def test_without_dense_layers(generated: Path, tmp_path: Path) -> None:
    """MaxText 0.2.5 refuses a model of experts alone whose other width isn't theirs, which no layer has."""
    for layers, width in (("1:4", 128), ("2:4", 48)):
        keys = wb.plan(str(generated / "cases/deepseek3"), layers=layers).maxtext_config().to_dict()
        assert (keys["base_mlp_dim"], keys["base_moe_mlp_dim"]) == (width, 48)


def test_files_of_which_nothing_is_kept(tmp_path: Path) -> None:
    """They are gone, and the names of the others say how many there are."""
    config = LLAMA | dict(num_hidden_layers=4)
    tensors = random_tensors(config)
    by_layer = [{name: values for name, values in tensors.items() if f"layers.{layer}." in name} for layer in range(4)]
    source = save(
        tmp_path / "hf", config, {name: values for name, values in tensors.items() if "layers" not in name}, *by_layer
    )
    assert call("cut", source, tmp_path / "cut", "--layers", "2:4") == 0
    assert sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors")) == [
        f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)
    ]


def test_only_what_is_kept_is_read_from_the_hub(tmp_path: Path) -> None:
    """Of the weights' bytes no others are sent than those that are kept, once, and the last one of each file."""
    config = QWEN3_MOE | dict(
        num_hidden_layers=4, hidden_size=256, moe_intermediate_size=128, architectures=["Qwen3MoeForCausalLM"]
    )
    tensors = random_tensors(config)
    source = save(tmp_path / "hf", config, *split(tensors, 2))
    with at_hub() as hub:
        hub.add("org/model", source)
        assert (
            call("cut", "hf://org/model", tmp_path / "cut", "--layers", "1:3", "--experts", "0:2", "--vocab_rows", "8")
            == 0
        )
        kept = sum(values.nbytes for values in read_tensors(tmp_path / "cut").values())
        headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in source.glob("*.safetensors"))
        assert kept < sum(values.nbytes for values in tensors.values()) / 3
        small = sum(file.stat().st_size for file in source.glob("*.json"))
        assert hub.cdn.log.sent <= kept + 2 * headers + small + 1000
    card = (tmp_path / "cut" / "README.md").read_text()
    assert "base_model: org/model" in card
    assert "layers 1:3, experts 0:2" in card


@pytest.mark.parametrize("command", ["cut", "quantize", "export"])
def test_small_files_that_are_not_carried_over_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A tokenizer that is a link out of the folder, and one that is too large."""
    source = make_release(tmp_path / "source", LLAMA)
    (tmp_path / "secret").write_text("secret")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    (source / "merges.txt").touch()
    os.truncate(source / "merges.txt", MAX_FILE_BYTES + 1)
    (source / "1_Pooling").mkdir()
    for name in ("modules.json", "1_Pooling/config.json", ".gitattributes", "pytorch_model.bin"):
        (source / name).touch()
    words = {
        "cut": ("cut", source, tmp_path / "out", "--layers", "0:1"),
        "quantize": ("quantize", source, tmp_path / "out"),
        "export": ("export", tmp_path / "ckpt", tmp_path / "out", "--like", source),
    }
    if command == "export":
        assert call("convert", source, tmp_path / "ckpt") == 0
        capsys.readouterr()
    assert call(*words[command]) == 0
    said = capsys.readouterr().err
    assert f"{source}/tokenizer.json isn't carried over: a symbolic link that leads out of the folder" in said
    assert f"{source}/merges.txt isn't carried over: has {MAX_FILE_BYTES + 1:,} bytes" in said
    assert f"{source} is an embedding model, of which 1_Pooling, modules.json aren't carried over; copy them" in said
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_an_adapter_of_more_than_is_taken_is_merged_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_release(tmp_path / "hf")
    modules = {f"model.layers.{layer}.self_attn.q_proj": (32, 32) for layer in range(2)}
    adapter, _ = peft_adapter(tmp_path / "adapter", modules)
    assert call("merge", source, tmp_path / "out", "--lora", adapter, "--layers", "0:1") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "doesn't fit layers 0:1 of its base; one of the whole release is merged first" in said
    assert "is that the base here?" not in said
    assert call("merge", source, tmp_path / "merged", "--lora", adapter) == 0
    assert call("cut", tmp_path / "merged", tmp_path / "out", "--layers", "0:1") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cut", "SOURCE", "OUT"], "none of them says what is kept"),
        (["cut", "SOURCE", "OUT", "--layer", "0:1"], "unknown options: --layer 0:1; did you mean --layers?"),
        (["cut", "SOURCE", "OUT", "--layers", "0:9"], "the model has layers 0 to 1"),
        (["inspect", "CKPT", "--layers", "0:1"], "is an Orbax checkpoint"),
        (["quantize", "CKPT", "OUT", "--layers", "0:1"], "takes --layers and --experts of an Orbax checkpoint"),
        (["merge", "SOURCE", "OUT"], "names no adapter to merge"),
        (["merge", "SOURCE", "OUT", "--layers", "1:2", "--lora", "ADAPTER"], "--lora beside layers 1:2: an adapter has the numbers of the whole"),
        (["convert", "SOURCE", "OUT", "--layers", "1", "--lora", "ADAPTER"], "merge it first"),
        (["quantize", "SOURCE", "OUT", "--layers", "0,1", "--experts", "1:2", "--lora", "ADAPTER"], "--lora beside layers 0:2, experts 1:2"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    source = make_release(tmp_path / "hf")
    if "CKPT" in arguments:
        assert call("convert", source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b") == 0
    places = {"SOURCE": source, "CKPT": tmp_path / "ckpt", "OUT": tmp_path / "out", "ADAPTER": tmp_path / "adapter"}
    assert call(*(places.get(each, each) for each in arguments)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_the_layers_that_are_kept(tmp_path: Path) -> None:
    """The first layers keep their numbers: merged on the way, or before, is the same."""
    source = make_release(tmp_path / "hf")
    lora, _ = peft_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": (32, 32)}, layers_to_transform=[0])
    assert call("merge", source, tmp_path / "merged", "--lora", lora) == 0
    assert call("cut", tmp_path / "merged", tmp_path / "then", "--layers", "0:1") == 0
    assert call("merge", source, tmp_path / "at_once", "--lora", lora, "--layers", "0:1") == 0
    assert_same_bits(read_tensors(tmp_path / "at_once"), read_tensors(tmp_path / "then"))


@pytest.mark.parametrize("number", ["00", "\u0660"])  # the digit 0 of Arabic
@pytest.mark.parametrize("beside", [True, False])
def test_a_number_in_another_spelling_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str, beside: bool
) -> None:
    """Written anew it would be layer 0: beside the tensor of that name, or in its place."""
    tensors = random_tensors(LLAMA)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name.replace(".0.", f".{number}.")] = tensors[name] if beside else tensors.pop(name)
    source = save(tmp_path / "source", LLAMA, tensors)
    assert call("cut", source, tmp_path / "out", "--layers", "0:1") == 2
    assert (
        f"model.layers.{number}.mlp.up_proj.weight is no tensor's name that can be numbered anew"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_loading_a_checkpoint_takes_none(tmp_path: Path) -> None:
    source = make_release(tmp_path / "hf")
    wb.convert(str(source), str(tmp_path / "ckpt"), maxtext_model="llama2-7b", progress=False)
    with pytest.raises(wb.Refused, match="taken of a release"):
        wb.load(str(tmp_path / "ckpt"), mesh="fsdp=1", layers="0:1")


def test_what_is_kept_identifies_a_plan(tmp_path: Path) -> None:
    """Another part is another plan; workers make the same one of what is staged."""
    source = str(make_release(tmp_path / "hf", LLAMA | dict(num_hidden_layers=4)))
    kept = dict(vocab_rows=8, maxtext_model="llama2-7b")
    plans = [wb.plan(source, layers=layers, **kept).conversion for layers in ("0:2", "0:2", "2:4")]
    assert plans[0].hash == plans[1].hash != plans[2].hash
    cuts = [merge.plan(source, MergeOptions(layers=layers, vocab_rows=8)) for layers in ("0:2", "2:4")]
    wb.convert(source, str(tmp_path / "ckpt"), maxtext_model="llama2-7b", progress=False)
    resharded = [reshard.plan(str(tmp_path / "ckpt"), layers=layers) for layers in ("0:2", "2:4")]
    for planned in (*plans, *cuts, *resharded):
        assert load(planned.stage()).hash == planned.hash
    assert len({planned.hash for planned in (*plans, *cuts, *resharded)}) == 6
