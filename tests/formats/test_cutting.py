"""A view over a release: which bytes of the files its tensors are, and what its small files say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantised import FP8_LLAMA, fp8_llama
from support import BF16, DEEPSEEK, F32, LLAMA, QWEN3_MOE, headers_only, random_tensors, save, shapes, split

from weightbeam.formats.release.cutting import cut_release
from weightbeam.formats.release.small_files import files_of, small_files
from weightbeam.formats.safetensors import BoxRead, HfCheckpoint, open_hf, read_boxes
from weightbeam.formats.storage import open_store
from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.cut import Cut

GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=64, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
    num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=4, tie_word_embeddings=False, layer_types=["sliding_attention", "full_attention"] * 2,
    quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn", "model.layers.2.self_attn"]},
)  # fmt: skip


def read(checkpoint: HfCheckpoint) -> dict[str, np.ndarray]:
    """Every tensor of a view, as a unit of work reads it."""
    assert not checkpoint.problems
    tensors = checkpoint.tensors
    return dict(
        zip(tensors, read_boxes([BoxRead(each, whole(each.shape)) for each in tensors.values()])[0], strict=True)
    )


def assert_equal(made: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        assert (made[name].dtype, made[name].shape) == (values.dtype, values.shape), name
        assert made[name].tobytes() == values.tobytes(), name


def of_layers(tensors: Mapping[str, np.ndarray], layers: Mapping[int, int]) -> dict[str, np.ndarray]:
    """The tensors of some layers under their new numbers, and those that belong to none."""
    kept = {}
    for name, values in tensors.items():
        parts = name.split(".")
        if parts[1] == "layers":
            if int(parts[2]) not in layers:
                continue
            parts[2] = str(layers[int(parts[2])])
        kept[".".join(parts)] = values
    return kept


def test_layers(tmp_path: Path) -> None:
    config = LLAMA | dict(num_hidden_layers=5)
    tensors = random_tensors(config)
    made = cut_release(open_hf(save(tmp_path / "hf", config, *split(tensors, 3))), Cut("0:2,4:5"))
    assert_equal(read(made), of_layers(tensors, {0: 0, 1: 1, 4: 2}))
    assert made.config == config | dict(num_hidden_layers=3)
    again = HfCheckpoint.from_json(json.loads(json.dumps(made.to_json())))  # as a worker gets it
    assert_equal(read(again), read(made))
    assert (again.identity, again.edits, again.cut) == (made.identity, made.edits, "layers 0:2,4:5")


@pytest.mark.parametrize("config", [QWEN3_MOE, DEEPSEEK], ids=lambda config: config["model_type"])
def test_experts_and_vocabulary(tmp_path: Path, config: dict[str, Any]) -> None:
    """An expert's own tensors are renumbered, the router keeps its rows and its biases, the embedding its first rows."""
    tensors = random_tensors(config)
    made = cut_release(open_hf(save(tmp_path / "hf", config, *split(tensors, 2))), Cut(None, "1:3", 10))
    wanted = {}
    for name, values in tensors.items():
        if ".experts." in name:
            before, _, rest = name.partition(".experts.")
            number, _, leaf = rest.partition(".")
            if number in ("1", "2"):
                wanted[f"{before}.experts.{int(number) - 1}.{leaf}"] = values
        elif name.endswith((".gate.weight", "e_score_correction_bias")):
            wanted[name] = values[1:3]
        else:
            wanted[name] = values[:10] if name.startswith(("lm_head", "model.embed")) else values
    assert_equal(read(made), wanted)
    assert made.config["vocab_size"] == 10


def test_codes_and_scales_of_fused_experts(tmp_path: Path) -> None:
    """MXFP4's blocks and scales, the biases and the router, of the same experts; the list of modules is cut, too."""
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": (64, 64), "model.norm.weight": (64,), "lm_head.weight": (64, 64)}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp"
        tensors |= {f"{prefix}.router.weight": (4, 64), f"{prefix}.router.bias": (4,)}
        for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            stem = f"{prefix}.experts.{name}"
            tensors |= {
                f"{stem}_blocks": (4, rows, columns // 32, 16),
                f"{stem}_scales": (4, rows, columns // 32),
                f"{stem}_bias": (4, rows),
            }
    stored = {
        name: rng.integers(0, 200, shape).astype(np.uint8 if name.endswith(("_blocks", "_scales")) else BF16)
        for name, shape in tensors.items()
    }
    made = cut_release(open_hf(save(tmp_path / "hf", GPT_OSS, *split(stored, 2))), Cut("2:4", "2:4"))
    kept = of_layers(stored, {2: 0, 3: 1})
    assert_equal(read(made), {name: values[2:4] if ".mlp." in name else values for name, values in kept.items()})
    assert made.config == GPT_OSS | dict(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], num_local_experts=2, num_experts_per_tok=2,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"]},
    )  # fmt: skip
    assert "num_experts_per_tok is 2, not 4" in made.notes[0]


def test_codes_and_scales_of_layers(tmp_path: Path) -> None:
    source, stored, _ = fp8_llama(tmp_path / "fp8")
    assert_equal(read(cut_release(open_hf(source), Cut("1:2"))), of_layers(stored, {1: 0}))


def test_scales_of_a_quantised_head(tmp_path: Path) -> None:
    """Whole blocks of rows, or a part of the last one: as many scales as there are blocks."""
    config = FP8_LLAMA | dict(vocab_size=300, hidden_size=128)
    tensors = random_tensors(LLAMA | dict(vocab_size=300, hidden_size=128))
    codes = tensors["lm_head.weight"].astype(F32).astype("float8_e4m3fn")
    scales = np.arange(1, 4, dtype=F32).reshape(3, 1)
    stored = tensors | {"lm_head.weight": codes, "lm_head.weight_scale_inv": scales}
    made = read(cut_release(open_hf(save(tmp_path / "hf", config, stored)), Cut(vocab_rows=200)))
    assert made["lm_head.weight"].tobytes() == codes[:200].tobytes()
    assert made["lm_head.weight_scale_inv"].tolist() == [[1], [2]]


@pytest.mark.parametrize("said", [True, False], ids=["shape", "no shape"])
def test_rows_of_a_packed_head(tmp_path: Path, said: bool) -> None:
    """Its codes and scales are cut; not where a tensor beside them says the shape of the whole, which nobody rewrites."""
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    quantization = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }  # fmt: skip
    packed = np.arange(64 * 4, dtype=np.int32).reshape(64, 4)
    head = {"weight_packed": packed, "weight_scale": np.arange(64, dtype=F32).reshape(64, 1) + 1}
    head |= {"weight_shape": np.array([64, 32])} if said else {}
    stored = {name: values for name, values in random_tensors(LLAMA).items() if not name.startswith("lm_head")}
    stored |= {f"lm_head.{name}": values for name, values in head.items()}
    source = save(tmp_path / "hf", LLAMA | dict(quantization_config=quantization), stored)
    cut = cut_release(open_hf(source), Cut(vocab_rows=40))
    if said:
        (problem,) = cut.problems
        assert problem.subject == "--vocab_rows"
        assert "lm_head.weight: lm_head.weight_shape says the shape of the whole weight" in problem.message
        return
    assert read(cut)["lm_head.weight_packed"].tobytes() == packed[:40].tobytes()


@pytest.mark.parametrize(
    ("pattern", "new"),
    [
        ("re:.*layers.10.*", "re:.*layers.0.*"),
        (r"re:model\.layers\.1[0]\.mlp", None),
        ("re:.*layers.1.*", None),  # names 10 and 11, too
        (r"re:.*\.10\.mlp", None),
        ("10.mlp", None),
        (r"re:^(?!.*layers\.10).*$", None),
        (r"re:^(?!.*lm_head).*$", r"re:^(?!.*lm_head).*$"),
        (r"re:.*\bq_proj\b", r"re:.*\bq_proj\b"),
        ("*.10.mlp*", None),
        ("model.layers.10*", "model.layers.0*"),
        (r"re:.*layers\.\d+\.mlp", r"re:.*layers\.\d+\.mlp"),
        (r"re:(model|visual)\..*\.mlp\..*", r"re:(model|visual)\..*\.mlp\..*"),
        ("visual.blocks.10", "visual.blocks.10"),
        ("model.layers.1", ""),  # isn't kept
    ],
)
def test_patterns_of_a_quantisation(pattern: str, new: str | None, tmp_path: Path) -> None:
    """They name the same modules of a cut as of the whole, or it is refused: whatever the spelling of a layer's number."""
    config = LLAMA | dict(num_hidden_layers=12)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", pattern]}
    source = save(tmp_path / "hf", config | dict(quantization_config=quantization), random_tensors(config))
    cut = cut_release(open_hf(source), Cut(layers="10:12"))
    if new is None:
        assert any(
            "modules_to_not_convert" in problem.message and repr(pattern) in problem.message for problem in cut.problems
        )
    else:
        assert not cut.problems
        assert cut.config["quantization_config"]["modules_to_not_convert"] == ["lm_head", *filter(None, [new])]


def test_a_count_that_is_left_out(tmp_path: Path) -> None:
    """DeepSeek's class has three dense layers; of those a cut keeps one, which it has to say."""
    config = DEEPSEEK | dict(num_hidden_layers=5, first_k_dense_replace=3)
    tensors = random_tensors(config)
    del config["first_k_dense_replace"]
    cut = cut_release(open_hf(save(tmp_path / "hf", config, tensors)), Cut(layers="2:5"))
    assert not cut.problems
    assert cut.config["first_k_dense_replace"] == 1


def test_a_pattern_without_a_prefix(tmp_path: Path) -> None:
    """A key of GPTQModel's `dynamic` is one; and of experts, by their own numbers."""
    config = QWEN3_MOE | dict(num_hidden_layers=3)
    for key, cut in ((r".*\.2\..*down.*", Cut(layers="1:3")), (r"-:.*experts\.3\..*", Cut(experts="2:4"))):
        quantization = {"quant_method": "mxfp4", "dynamic": {key: {"bits": 8}}}
        source = save(tmp_path / str(cut), config | dict(quantization_config=quantization), random_tensors(config))
        (problem,) = cut_release(open_hf(source), cut).problems
        assert problem.subject == ("--layers" if cut.layers else "--experts")
        assert f"says {key!r}, which can't be renumbered" in problem.message
        assert not cut_release(open_hf(source), Cut(vocab_rows=40)).problems


def test_a_box_in_the_middle_of_rows(tmp_path: Path) -> None:
    """A window of columns, and a box of that window: the very elements, no others' bytes read."""
    values = np.arange(6 * 8 * 5, dtype=np.float32).reshape(6, 8, 5)
    tensor = open_hf(save(tmp_path / "hf", LLAMA, {"x": values})).tensors["x"]
    window = tensor.window(((1, 5), (2, 6), (0, 5)))
    reads = [
        BoxRead(window, whole(window.shape)),
        BoxRead(window, ((1, 3), (0, 4), (1, 4))),
        BoxRead(window, ((2, 3), (1, 3), (0, 5))),
    ]
    arrays, nbytes = read_boxes(reads)
    for array, wanted in zip(arrays, (values[1:5, 2:6], values[2:4, 2:6, 1:4], values[3:4, 3:5]), strict=True):
        np.testing.assert_array_equal(array, wanted)
    assert nbytes >= sum(array.nbytes for array in arrays)
    assert window.window(((0, 4), (1, 2), (0, 5))).window(((1, 2), (0, 1), (0, 5))) == tensor.window(
        ((2, 3), (3, 4), (0, 5))
    )


def test_small_files(tmp_path: Path) -> None:
    """`config.json` with the edits and every other byte as it was; what isn't edited is told by its version still."""
    fields = '"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32,\n "num_attention_heads": 4, "num_key_value_heads": 2'
    text = f'{{"model_type": "llama",  {fields},\n "intermediate_size": 48}}\n'
    source = save(tmp_path / "hf", LLAMA, random_tensors(LLAMA))
    (source / "config.json").write_text(text)
    (source / "tokenizer.json").write_text("{}")
    made = cut_release(open_hf(source), Cut("0:1", vocab_rows=8))
    files = files_of(made, small_files(open_store(source)))
    assert files["config.json"].decode() == text.replace('layers": 2', 'layers": 1').replace("64", "8")
    assert files["tokenizer.json"] == b"{}"
    assert json.loads(files["config.json"]) == made.config
    assert files.hashes["config.json"] != small_files(open_store(source)).hashes["config.json"]
    whole_release = open_hf(source)
    assert files_of(whole_release, files) is files


@pytest.mark.parametrize(
    ("config", "cut", "messages"),
    [
        (LLAMA, Cut("0:1,5:9"), ["0:1,5:9: the model has layers 0 to 1"]),
        (LLAMA, Cut("0:2,1"), ["1 is named twice"]),
        (LLAMA, Cut("1,0"), ["layers stay in their order"]),
        (LLAMA, Cut(None, "0:2"), ["the model has no experts"]),
        (LLAMA, Cut("3", "0:2", 99), ["layers 0 to 1", "no experts", "has 64 rows"]),
        (QWEN3_MOE, Cut(None, "0:5"), ["experts 0 to 3"]),
        (QWEN3_MOE, Cut(None, "0,2"), ["lie side by side"]),
        (DEEPSEEK | dict(n_group=2, topk_group=1), Cut(None, "0:3"), ["2 groups"]),
    ],
)
def test_what_is_not_there(config: dict[str, Any], cut: Cut, messages: list[str]) -> None:
    """All of it at once; the release is whole then."""
    checkpoint = headers_only(config)
    made = cut_release(checkpoint, cut)
    assert made.tensors == checkpoint.tensors
    said = [str(problem) for problem in made.problems]
    for message in messages:
        assert any(message in each for each in said), said


def test_blocks() -> None:
    """Cycles of the same kinds in the same places; what is left of the last one may stay as it was."""
    config = GPT_OSS | dict(quantization_config=None)
    names = {f"model.layers.{layer}.self_attn.sinks": (4,) for layer in range(4)} | {
        "model.embed_tokens.weight": (64, 64)
    }
    for layers, whole_blocks in (
        ("0:2", True),
        ("2:4", True),
        ("0,3", True),
        ("1:3", False),
        ("0:1", False),
        ("0:3", False),
    ):
        problems = cut_release(headers_only(config, known=names), Cut(layers)).problems
        assert not problems if whole_blocks else "in blocks of 2; keep whole ones" in str(problems[0]), layers


def test_a_model_without_a_table() -> None:
    """Names tell its layers where nothing else is numbered; experts and rows aren't guessed."""
    config = dict(model_type="novel", n_layer=3, vocab_size=8)
    names = {f"transformer.h.{layer}.attn.weight": (4, 4) for layer in range(3)} | {"transformer.wte.weight": (8, 4)}
    made = cut_release(headers_only(config, known=names), Cut("0,2"))
    assert [*made.tensors] == ["transformer.h.0.attn.weight", "transformer.h.1.attn.weight", "transformer.wte.weight"]
    assert made.config["n_layer"] == 2
    for cut in (Cut(None, "0:1"), Cut(vocab_rows=2)):
        assert "there is no table for this model" in str(
            cut_release(headers_only(config, known=names), cut).problems[0]
        )
    tower = names | {"vision.blocks.0.weight": (4, 4)}
    problem = cut_release(headers_only(config, known=tower), Cut("0:2")).problems[0]
    assert "which of its tensors are its layers' names leave open" in str(problem)


def test_prediction_layers_behind_the_last(tmp_path: Path) -> None:
    """They stay behind it where they are named, and are gone with their number where they aren't; their copies of the
    embedding and of the head are cut as those.
    """
    config, names = DEEPSEEK | dict(num_nextn_predict_layers=1), shapes(DEEPSEEK)
    behind = {"enorm.weight": (32,), "embed_tokens.weight": (64, 32), "shared_head.head.weight": (64, 32)}
    names |= {f"model.layers.3.{name}": shape for name, shape in behind.items()}
    kept = cut_release(headers_only(config, known=names), Cut("0:2,3:4", vocab_rows=16))
    assert not kept.problems
    assert {name: tensor.shape for name, tensor in kept.tensors.items() if name.startswith("model.layers.2.")} == {
        "model.layers.2.enorm.weight": (32,), "model.layers.2.embed_tokens.weight": (16, 32), "model.layers.2.shared_head.head.weight": (16, 32),
    }  # fmt: skip
    assert (kept.config["num_hidden_layers"], kept.config["num_nextn_predict_layers"]) == (2, 1)
    gone = cut_release(headers_only(config, known=names), Cut("0:2"))
    assert not any("enorm" in name for name in gone.tensors)
    assert (gone.config["num_hidden_layers"], gone.config["num_nextn_predict_layers"]) == (2, 0)
    alone = cut_release(headers_only(config, known=names), Cut("3"))
    assert "names no layer of the model itself" in str(alone.problems[0])


@pytest.mark.parametrize(("only", "has"), [((0,), "alone has"), ((1, 2, 3), "has no")])
def test_a_first_layer_unlike_the_others(tmp_path: Path, only: tuple[int, ...], has: str) -> None:
    """RWKV's has a norm more, that of ModernBERT's decoder one less: no other layer can be the first."""
    tensors = {f"blocks.{layer}.ln1.weight": np.ones(4, F32) for layer in range(4)}
    tensors |= {f"blocks.{layer}.pre_ln.weight": np.ones(4, F32) for layer in only}
    release = open_hf(save(tmp_path / "hf", dict(model_type="rwkv", n_layers=4), tensors))
    (problem,) = cut_release(release, Cut("1:3")).problems
    assert f"layer 0 {has} blocks.*.pre_ln.weight" in str(problem)
    assert not cut_release(release, Cut("0:2")).problems
    kinds = ["a" if layer in only else "b" for layer in range(4)]  # of another kind, not the first
    release = open_hf(
        save(tmp_path / "kinds", dict(model_type="lfm2", num_hidden_layers=4, layer_types=kinds), tensors)
    )
    assert not cut_release(release, Cut("1:3")).problems


def test_a_last_layer_unlike_the_others(tmp_path: Path) -> None:
    """GPT-NeoX-Japanese's alone has a bias: no other layer can be the last."""
    tensors = {f"blocks.{layer}.ln1.weight": np.ones(4, F32) for layer in range(4)}
    tensors["blocks.3.attention.dense_bias"] = np.ones(4, F32)
    config = dict(model_type="gpt_neox_japanese", num_hidden_layers=4)
    release = open_hf(save(tmp_path / "hf", config, tensors))
    (problem,) = cut_release(release, Cut("0:2")).problems
    assert "layer 3 alone has blocks.*.attention.dense_bias, and the last layer that is kept would be made so" in str(
        problem
    )
    assert not cut_release(release, Cut("0,3")).problems
    kinds = open_hf(save(tmp_path / "kinds", config | dict(layer_types=["a", "a", "a", "b"]), tensors))
    assert not cut_release(kinds, Cut("0:2")).problems


def test_layers_that_share_weights(tmp_path: Path) -> None:
    """Zamba2's lie with the first that has them, and are numbered by those of a kind: only the first layers can be kept."""
    tensors = {f"model.layers.{layer}.mamba.weight": np.ones(4, F32) for layer in range(4)}
    config = dict(model_type="zamba2", num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2)
    release = open_hf(save(tmp_path / "hf", config, tensors))
    (problem,) = cut_release(release, Cut("2:4")).problems
    assert "what layer 2 computes depends on its number" in str(problem)
    assert not cut_release(release, Cut("0:2")).problems
