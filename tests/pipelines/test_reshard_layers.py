"""`weightbeam reshard --layers`: some layers of an Orbax checkpoint, as the conversion of a cut has them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from pairs import each, some
from support import (
    LLAMA,
    QWEN3_MOE,
    arrays,
    assert_same_bits,
    call,
    convert,
    converted,
    make_release,
    read_config,
    reshard,
    restore,
)
from trained import SHARED, needs_shared, trained_like

MODELS = {  # of a kind of stacks each: one, a dense prefix, cycles, two axes, collections, places without a layer, pairs
    "cases/llama3.1": "1:3",
    "cases/deepseek3": "1:4",
    "cases/gemma3": "0:6",
    "cases/gemma4-moe": "6:12",
    "cases/deepseek4": "1:5",
    "models/glm5": "3:6",
    "cases/gemma2": "2:4",
}


@pytest.mark.parametrize(
    ("model", "before", "after", "storage"),
    each(
        some([*MODELS], 2),
        ["true", "false"],
        ["true", "true", "false"],
        [[], ["--mesh", "fsdp=2"], ["--use_zarr3", "false"], ["--unit_bytes", "200000"]],
    ),
)
def test_as_the_cut_is_converted(
    generated: Path,
    tmp_path: Path,
    model: str,
    before: str,
    after: str,
    storage: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every bit, whichever way the layers are stacked; it verifies against the release, and exports as the cut."""
    how, layers = ["--maxtext_model", "llama3.1-8b"] if model == "cases/llama3.1" else [], ["--layers", MODELS[model]]
    assert call("convert", generated / model, tmp_path / "whole", "--scan_layers", before, *how) == 0
    step = reshard(tmp_path / "whole", tmp_path / "cut", "--scan_layers", after, *layers, *storage)
    assert f"check it:   weightbeam verify {step}" in capsys.readouterr().out  # `diff` would find other shapes
    assert_same_bits(
        restore(step), converted(generated / model, tmp_path / "wanted", "--scan_layers", after, *how, *layers)
    )
    assert call("verify", tmp_path / "cut") == 0
    assert (step / "maxtext.yml").read_text() == (tmp_path / "wanted" / "0" / "maxtext.yml").read_text()
    for name in ("cut", "wanted"):
        assert call("export", tmp_path / name, tmp_path / f"{name}-hf") == 0
    assert read_config(tmp_path / "cut-hf") == read_config(tmp_path / "wanted-hf")


EXPERTS = {  # named one by one, and side by side; in groups, with biases, beside shared ones, in two collections
    "cases/qwen3-moe": "2:6",
    "cases/mixtral": "0:2",
    "cases/deepseek2": "0:4",
    "cases/deepseek3": "4:8",
    "cases/gpt-oss": "1:3",
    "models/llama4": "0:2",
    "cases/gemma4-moe": "2:4",
    "cases/qwen3-next": "4:8",
    "cases/qwen3.5": "0:4",
    "models/glm5": "0:4",
    "models/hy3": "2:6",
}


@pytest.mark.parametrize(
    ("model", "before", "after", "also"),
    each(
        some([*EXPERTS], 3),
        ["true", "false"],
        ["true", "false"],
        [[], ["--mesh", "expert=2"], ["--use_zarr3", "false"], ["--unit_bytes", "200000"], ["--layers"]],
    ),
)
def test_experts_as_the_cut_is_converted(
    generated: Path, tmp_path: Path, model: str, before: str, after: str, also: list[str]
) -> None:
    """Every bit, with fewer layers at once or without; it verifies, and says of itself what the cut says."""
    asked = ["--experts", EXPERTS[model]]
    if also == ["--layers"]:
        also, asked = [], [*asked, "--layers", {"cases/gemma4-moe": "6:12", "models/glm5": "3:6"}.get(model, "0:4")]
    assert call("convert", generated / model, tmp_path / "whole", "--scan_layers", before) == 0
    step = reshard(tmp_path / "whole", tmp_path / "cut", "--scan_layers", after, *asked, *also)
    wanted = converted(generated / model, tmp_path / "wanted", "--scan_layers", after, *asked)
    assert_same_bits(restore(step), wanted)
    assert call("verify", tmp_path / "cut") == 0
    assert (step / "maxtext.yml").read_text() == (tmp_path / "wanted" / "0" / "maxtext.yml").read_text()


@pytest.mark.parametrize(
    ("model", "layers", "scan"),
    some(
        [
            ("qwen3_omni", "1:2", "false"),
            ("qwen3_vl", "1:2", "false"),
            ("qwen3_5", "0:4", "false"),
            ("gemma3-vision", "0:6", "true"),
            ("gemma4-vision", "0:6", "false"),
            ("gemma3-vision", "0:6", "false"),
        ],
        3,
    ),
)
def test_beside_towers(generated: Path, tmp_path: Path, model: str, layers: str, scan: str) -> None:
    """Whose blocks have numbers of their own, and stay."""
    how = ["--multimodal", "true", "--scan_layers", scan, "--layers", layers]
    assert call("convert", generated / "models" / model, tmp_path / "whole", *how[:4]) == 0
    assert call("convert", generated / "models" / model, tmp_path / "cut", *how) == 0
    wanted = arrays(tmp_path / "cut")
    assert any("vision_encoder" in key for key in wanted)
    assert_same_bits(arrays(reshard(tmp_path / "whole", tmp_path / "taken", "--layers", layers)), wanted)
    assert call("verify", tmp_path / "taken") == 0


@pytest.mark.parametrize("before", ["true", "false"])
def test_where_no_layer_of_a_stack_has_an_array(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str
) -> None:
    """GLM-5.2's layers with experts, of which none that is taken has an indexer: no arrays unscanned; scanned there would
    be zeros, which only a conversion makes.
    """
    source, taken = generated / "models" / "glm5", ["--layers", "0:3"]
    assert call("convert", source, tmp_path / "whole", "--scan_layers", before) == 0
    reshard(tmp_path / "whole", tmp_path / "refused", *taken, "--scan_layers", "true", status=2)
    assert "stacked there are zeros" in capsys.readouterr().err
    wanted = converted(source, tmp_path / "wanted", "--scan_layers", "false", *taken)
    assert_same_bits(restore(reshard(tmp_path / "whole", tmp_path / "cut", "--scan_layers", "false", *taken)), wanted)
    zeros = converted(source, tmp_path / "scanned", "--scan_layers", "true", *taken)
    assert not any(zeros[key].any() for key in zeros if "moe_layers.self_attention.indexer" in key)
    assert_same_bits(restore(reshard(tmp_path / "scanned", tmp_path / "apart", "--scan_layers", "false")), wanted)


@needs_shared
@pytest.mark.parametrize("scan", ["true", "false"])
def test_of_a_training_state(tmp_path: Path, scan: str) -> None:
    """Weights, moments and what else has layers: those of the layers that are taken; all else as it was."""
    source, like = SHARED / "trained" / "llama-fsdp8", trained_like(tmp_path / "like", "llama")
    options = ("--layers", "1:3", "--scan_layers", scan, "--like", like, "--maxtext_model", "llama3.1-8b")
    whole, made = arrays(source), arrays(reshard(source, tmp_path / "out", *options))
    count = read_config(like)["num_hidden_layers"]
    stacked = {key: values for key, values in whole.items() if re.search(r"\.decoder\.layers\.", key)}
    assert {key.partition(".")[0] for key in stacked} >= {"params", "opt_state"}
    wanted = {key: values for key, values in whole.items() if key not in stacked}
    for key, values in stacked.items():
        axis = 0 if key.startswith("nnx_aux.") else 1  # the state of modules
        assert values.shape[axis] == count
        kept = np.take(values, [1, 2], axis)
        parts = [(key, kept)] if scan == "true" else [
            (key.replace(".layers.", f".layers_{layer}."), kept.take(layer, axis)) for layer in range(2)
        ]  # fmt: skip
        wanted |= dict(parts)
    assert_same_bits(made, wanted)


@needs_shared
def test_experts_of_a_training_state(tmp_path: Path) -> None:
    """Weights and moments alike; all else as it was."""
    source, like = SHARED / "trained" / "qwen3moe-fsdp4-tensor2", trained_like(tmp_path / "like", "qwen3moe")
    wanted = arrays(source)
    count = read_config(like)["num_experts"]
    cut = 0
    for key, values in wanted.items():
        axis = -1 if re.search(r"\.gate\.kernel(\.value)?$", key) else 0
        if re.search(r"\.(wi_0|wi_1|wo|gate\.kernel)(\.value)?$", key) and ".moe" in key.lower():
            assert values.shape[axis] == count, key
            wanted[key], cut = np.take(values, range(2, 6), axis), cut + 1
    assert cut == 12  # four arrays: weights and two moments
    options = ("--experts", "2:6", "--like", like, "--maxtext_model", "qwen3-30b-a3b")
    assert_same_bits(arrays(reshard(source, tmp_path / "out", *options)), wanted)


def test_of_what_is_cut_already(tmp_path: Path) -> None:
    """The record counts the release's layers and experts, so that it verifies, and so does an inspection with a release."""
    source = make_release(tmp_path / "hf", LLAMA | dict(num_hidden_layers=6))
    model = ["--maxtext_model", "llama2-7b"]
    assert call("convert", source, tmp_path / "part", "--layers", "1:5", *model) == 0
    step = reshard(tmp_path / "part", tmp_path / "again", "--layers", "1,2:4")
    assert json.loads((step / "conversion.json").read_text())["options"]["layers"] == "2:5"
    assert call("verify", tmp_path / "again") == 0
    assert_same_bits(restore(step), converted(source, tmp_path / "wanted", "--layers", "2:5", *model))


def test_experts_of_what_is_cut_already(tmp_path: Path) -> None:
    """The record counts the release's; more than there are is refused."""
    source = make_release(tmp_path / "hf", QWEN3_MOE | dict(num_experts=8))
    assert call("convert", source, tmp_path / "part", "--experts", "2:8") == 0
    step = reshard(tmp_path / "part", tmp_path / "again", "--experts", "1:3")
    assert json.loads((step / "conversion.json").read_text())["options"]["experts"] == "3:5"
    assert call("verify", tmp_path / "again") == 0
    assert_same_bits(restore(step), converted(source, tmp_path / "wanted", "--experts", "3:5"))
    reshard(tmp_path / "part", tmp_path / "out", "--experts", "0:7", status=2)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["--layers", "0:9"], "the model has layers 0 to 3"),
        (["--layers", "5:9"], "1 problem:\n  cut: --layers: 5:9: the model has layers 0 to 3\n"),
        (
            ["--layers", "0,3"],
            "don't follow each other in it; keep one range of them, or have each apart (--scan_layers false)",
        ),
        (["--layers", "1,1"], "1 is named twice"),
        (["--experts", "0:2"], "1 problem:\n  cut: --experts: 0:2: the model has no experts\n"),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: list[str], message: str) -> None:
    source = make_release(tmp_path / "hf", LLAMA | dict(num_hidden_layers=4))
    assert call("convert", source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b") == 0
    reshard(tmp_path / "ckpt", tmp_path / "out", *layers, status=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_maxtext_cant_scan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tree may be asked for as it is; stacked, its cycles aren't whole."""
    sizes = dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, intermediate_size=40, vocab_size=97)

    def make(layers: int, name: str) -> Path:
        config = transformers.Olmo3Config(**sizes, num_hidden_layers=layers, sliding_window=4)
        transformers.Olmo3ForCausalLM(config).save_pretrained(tmp_path / name)
        return tmp_path / name

    make(5, "hf")
    step = convert(tmp_path / "hf", tmp_path / "ckpt", "--scan_layers", "false")
    assert_same_bits(restore(reshard(step, tmp_path / "same", "--scan_layers", "false")), restore(step))
    four = reshard(step, tmp_path / "four", "--layers", "0:4", "--scan_layers", "true")
    assert_same_bits(restore(four), converted(tmp_path / "hf", tmp_path / "wanted", "--layers", "0:4"))
    reshard(four, tmp_path / "out", "--scan_layers", "false", "--like", make(3, "three"), status=2)
    assert "--like: config.json: 3 layers, but MaxText scans" in capsys.readouterr().err
    for layers in ([], ["--layers", "0:2"]):
        capsys.readouterr()
        reshard(step, tmp_path / "out", "--scan_layers", "true", *layers, status=2)
        said = capsys.readouterr().err
        assert f"option: --{'layers' if layers else 'scan_layers'}: config.json:" in said
        assert "MaxText scans this model in cycles of 4; --scan_layers false has no such bound" in said


@needs_shared
def test_a_model_that_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reshard(SHARED / "trained" / "llama-fsdp8", tmp_path / "out", "--layers", "0:2", status=2)
    assert "--like names a release of it" in capsys.readouterr().err


def test_layers_apart_may_be_any(tmp_path: Path) -> None:
    """Where each lies by itself, none has to follow another."""
    source = make_release(tmp_path / "hf", LLAMA | dict(num_hidden_layers=4))
    model = ["--maxtext_model", "llama2-7b", "--scan_layers", "false"]
    assert call("convert", source, tmp_path / "ckpt", *model) == 0
    step = reshard(tmp_path / "ckpt", tmp_path / "out", "--layers", "0,3", "--scan_layers", "true")
    assert_same_bits(restore(step), converted(source, tmp_path / "wanted", "--layers", "0,3", *model[:2]))


@pytest.mark.parametrize("option", [["--scan_layers", "false"], ["--param_scan_axis", "0"], []], ids=" ".join)
def test_a_tree_of_layers_apart_and_stacked(
    tmp_path: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts as unscanned, and isn't: with a layout it is refused, without one copied as it is."""
    import orbax.checkpoint as ocp
    from flax.traverse_util import flatten_dict, unflatten_dict

    source = make_release(tmp_path / "hf", LLAMA | dict(num_hidden_layers=3))
    step = convert(source, tmp_path / "whole", "--maxtext_model", "llama2-7b")
    mixed = {}
    for path, values in flatten_dict(ocp.PyTreeCheckpointer().restore(step / "items")).items():
        if "layers" not in path:
            mixed[path] = values
            continue
        at = path.index("layers")
        mixed[path] = values[:, 1:]
        mixed[*path[:at], "layers_0", *path[at + 1 :]] = values[:, 0]
    ocp.PyTreeCheckpointer().save(tmp_path / "mixed" / "0" / "items", unflatten_dict(mixed))
    asked = ("reshard", tmp_path / "mixed", tmp_path / "out", "--like", source, "--maxtext_model", "llama2-7b")
    capsys.readouterr()
    if not option:
        assert call(*asked) == 0
        assert_same_bits(arrays(tmp_path / "out"), arrays(tmp_path / "mixed"))
        return
    assert call(*asked, *option) == 2
    assert "it is stacked, though other layers of the checkpoint stand apart" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_array_that_no_table_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import orbax.checkpoint as ocp

    source = make_release(tmp_path / "hf", LLAMA)
    tree = ocp.PyTreeCheckpointer().restore(
        convert(source, tmp_path / "whole", "--maxtext_model", "llama2-7b") / "items"
    )
    tree["params"]["params"]["decoder"]["foo"] = np.ones(3, np.float32)
    ocp.PyTreeCheckpointer().save(tmp_path / "odd" / "0" / "items", tree)
    asked = ("reshard", tmp_path / "odd", tmp_path / "out", "--like", source, "--maxtext_model", "llama2-7b")
    capsys.readouterr()
    assert call(*asked, "--scan_layers", "false") == 2
    assert "(on axis 1: decoder.foo is (3,) here, and isn't there)" in capsys.readouterr().err
