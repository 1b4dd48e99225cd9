"""Checkpoints as transformers writes them, sharded, against plain numpy on the model's own `state_dict()`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import each
from support import (  # fmt: skip
    BF16,
    F32,
    INDEX,
    LLAMA,
    QWEN3_MOE,
    assert_same_bits,
    call,
    convert,
    converted,
    make_release,
    random_tensors,
    read_config,
    read_file,
    read_tensors,
    reference,
    restore,
    save,
    unfuse,
)

MODELS = ["llama", "mistral", "qwen3", "mixtral", "deepseek_v3"]


def read_state(generated: Path, model: str) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """Folder, config and `state_dict()` of a model."""
    folder = generated / "models" / model
    return folder, read_config(folder), read_file(generated / "models" / f"{model}.state.safetensors")


@pytest.mark.parametrize(("model", "dtype"), each(MODELS, [BF16, F32]), ids=str)
def test_equals_numpy_on_the_state_dict(generated: Path, tmp_path: Path, model: str, dtype: np.dtype) -> None:
    """Every array: reshaped, stacked and (for Llama, Mistral, Mixtral) scaled in float32 with one cast. Without
    `--maxtext_model` the rotary halves stay apart.
    """
    folder, config, state = read_state(generated, model)
    assert len(json.loads((folder / INDEX).read_text())["weight_map"]) > 1
    assert len(list(folder.glob("*.safetensors"))) >= 3
    arrays = converted(folder, tmp_path / "out", "--save_dtype", dtype.name, "--mesh", "fsdp=4")
    assert_same_bits(arrays, reference(config, unfuse(config, state), dtype))


def test_the_maxtext_model_settles_the_rotary_halves(generated: Path, tmp_path: Path) -> None:
    """llama3.1: query and key in pairs; llama3.3: apart; all else alike."""
    folder, config, state = read_state(generated, "llama")
    paired = converted(folder, tmp_path / "paired", "--maxtext_model", "llama3.1-8b")
    apart = converted(folder, tmp_path / "apart", "--maxtext_model", "llama3.3-70b")
    assert_same_bits(paired, reference(config, state, BF16, paired_rope=True))
    assert_same_bits(apart, reference(config, state, BF16))
    differing = {key for key in paired if not np.array_equal(paired[key], apart[key])}
    assert differing == {"decoder.layers.self_attention.query.kernel", "decoder.layers.self_attention.key.kernel"}


@pytest.mark.parametrize("model", ["mixtral", "deepseek_v3"])
def test_fused_experts_give_the_same_arrays(generated: Path, tmp_path: Path, model: str) -> None:
    """transformers v5's in-memory spelling (all experts in two tensors), written as it is, converts like the file of an
    expert each.
    """
    folder, config, state = read_state(generated, model)
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    assert not any("gate_up_proj" in name for name in read_tensors(folder))
    fused = save(tmp_path / "fused", config, state)
    assert_same_bits(converted(fused, tmp_path / "a", "--unit_bytes", "30000"), converted(folder, tmp_path / "b"))


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_saved_without_a_head(generated: Path, tmp_path: Path, model: str) -> None:
    """The names that transformers' class without a head writes, as Qwen3-Embedding has them; and back."""
    _, config, state = read_state(generated, model)
    tied, own = config | dict(tie_word_embeddings=True), unfuse(config, state)
    own.pop("lm_head.weight", None)
    bare = save(tmp_path / "bare", tied, {name.removeprefix("model."): values for name, values in own.items()})
    arrays = converted(bare, tmp_path / "a", "--save_dtype", "float32")
    assert_same_bits(arrays, converted(save(tmp_path / "whole", tied, own), tmp_path / "b", "--save_dtype", "float32"))
    assert call("export", tmp_path / "a", tmp_path / "back", "--like", bare) == 0
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(bare))


def test_fused_experts_of_qwen(tmp_path: Path) -> None:
    """The same for Qwen 3 MoE, gate rows first."""
    tensors = random_tensors(QWEN3_MOE)
    fused = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(QWEN3_MOE["num_hidden_layers"]):
        each = [f"model.layers.{layer}.mlp.experts.{expert}" for expert in range(QWEN3_MOE["num_experts"])]
        gate_up = [
            np.concatenate([tensors[f"{name}.gate_proj.weight"], tensors[f"{name}.up_proj.weight"]]) for name in each
        ]
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(gate_up)
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack(
            [tensors[f"{name}.down_proj.weight"] for name in each]
        )
    arrays = converted(save(tmp_path / "fused", QWEN3_MOE, fused), tmp_path / "a", "--mesh", "expert=4")
    assert_same_bits(arrays, reference(QWEN3_MOE, tensors, BF16))


@pytest.mark.parametrize("rows", [384, 200])
def test_vocab_size_pads_with_zeros_or_cuts(generated: Path, tmp_path: Path, rows: int) -> None:
    """Embedding and head get the rows that were asked for: zeros behind the model's own 300, or the first 200 of them."""
    folder, config, state = read_state(generated, "qwen3")
    arrays = converted(folder, tmp_path / "out", "--vocab_size", str(rows), "--mesh", "fsdp=2,tensor=4")
    wanted = reference(config, state, BF16)
    for key, axis in {"token_embedder.embedding": 0, "decoder.logits_dense.kernel": 1}.items():
        values = np.moveaxis(wanted[key], axis, 0)[:rows]
        padded = np.concatenate([values, np.zeros((rows - len(values), values.shape[1]), BF16)])
        wanted[key] = np.moveaxis(padded, 0, axis)
    assert_same_bits(arrays, wanted)


def test_float16_and_float32_weights_are_rounded_once(tmp_path: Path) -> None:
    """Tensors of other float dtypes convert too: computed in float32, cast once."""
    tensors = random_tensors(LLAMA, F32)
    mixed = {name: values.astype(np.float16) if i % 2 else values for i, (name, values) in enumerate(tensors.items())}
    assert_same_bits(converted(save(tmp_path / "mixed", LLAMA, mixed), tmp_path / "out"), reference(LLAMA, mixed, BF16))


def test_tied_embeddings_have_no_head(tmp_path: Path) -> None:
    """Where the head is the embedding, MaxText has no array for it; a copy in the file is left out."""
    config = LLAMA | dict(tie_word_embeddings=True)
    tensors = random_tensors(config)
    copied = save(tmp_path / "copied", config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    arrays = converted(save(tmp_path / "tied", config, tensors), tmp_path / "a")
    assert "decoder.logits_dense.kernel" not in arrays
    assert_same_bits(arrays, reference(config, tensors, BF16))
    assert_same_bits(converted(copied, tmp_path / "b"), arrays)


def test_overwrite_replaces_a_checkpoint(tmp_path: Path) -> None:
    """A second conversion into the same place needs `--overwrite`, and then leaves nothing of the first."""
    first, second = (make_release(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second")))
    step = convert(first, tmp_path / "out", "--scan_layers", "false")
    convert(second, tmp_path / "out", "--overwrite")
    assert_same_bits(restore(step), reference(LLAMA, read_tensors(second), BF16))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0"]
