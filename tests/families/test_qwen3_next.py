"""Qwen 3 Next: other spellings, ties, and what is left out. What its layers compute is tested with Qwen 3.5's, in
test_qwen3_5.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import BF16, assert_same_bits, call, converted, read_config, read_tensors, save

MOE = "model.layers.{}.mlp.experts."


@pytest.fixture(scope="module")
def folder(generated: Path) -> Path:
    return generated / "cases" / "qwen3-next"


def fuse(tensors: dict[str, np.ndarray], layers: int, experts: int) -> dict[str, np.ndarray]:
    """The experts of a layer in two tensors, as transformers holds them in memory."""
    fused = {name: values for name, values in tensors.items() if ".experts." not in name}
    for prefix in map(MOE.format, range(layers)):
        gate, up, down = (
            np.stack([tensors[f"{prefix}{e}.{name}_proj.weight"] for e in range(experts)])
            for name in ("gate", "up", "down")
        )
        fused |= {f"{prefix}gate_up_proj": np.concatenate([gate, up], 1), f"{prefix}down_proj": down}
    return fused


@pytest.mark.parametrize("scan", ["true", "false"])
def test_fused_experts_make_the_same(folder: Path, tmp_path: Path, scan: str) -> None:
    config, tensors = read_config(folder), read_tensors(folder)
    fused = fuse(tensors, config["num_hidden_layers"], config["num_experts"])
    assert len(fused) < len(tensors)
    made = converted(save(tmp_path / "fused", config, fused), tmp_path / "from_fused", "--scan_layers", scan)
    assert_same_bits(made, converted(folder, tmp_path / "from_apart", "--scan_layers", scan))


def test_a_tied_head_and_multi_token_prediction_are_left_out(folder: Path, tmp_path: Path) -> None:
    """The same arrays without the head; `--mtp true` is refused."""
    config, tensors = read_config(folder) | {"tie_word_embeddings": True}, read_tensors(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    mtp = {
        "mtp.fc.weight": (64, 128),
        "mtp.pre_fc_norm_hidden.weight": (64,),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": (48, 64),
    }
    source = save(tmp_path / "in", config, tensors | {name: np.zeros(shape, BF16) for name, shape in mtp.items()})
    assert call("plan", "--source", source, "--json", tmp_path / "plan.json") == 0
    dropped = json.loads((tmp_path / "plan.json").read_text())["dropped"]
    reason = "multi-token prediction, MaxText has no block for this model's"
    assert dropped == dict.fromkeys(mtp, reason) | {
        "lm_head.weight": "the head is tied to the embedding (the same in a sample of 64 KiB)"
    }
    assert call("plan", "--source", source, "--mtp", "true") != 0
    wanted = converted(folder, tmp_path / "untied")
    del wanted["decoder.logits_dense.kernel"]
    assert_same_bits(converted(source, tmp_path / "tied"), wanted)


def test_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    """More rows are zeros."""
    arrays, wanted = (converted(folder, tmp_path / str(rows), "--vocab_size", str(rows)) for rows in (260, 256))
    assert arrays["token_embedder.embedding"].shape == (260, 64)
    assert not arrays["token_embedder.embedding"][256:].any()
    assert_same_bits(
        {"head": arrays["decoder.logits_dense.kernel"][:, :256]}, {"head": wanted["decoder.logits_dense.kernel"]}
    )


def test_both_stackings_hold_the_same(folder: Path, tmp_path: Path) -> None:
    """MaxText 0.2.5 stacks the delta nets over (cycle, place), e591f30 those of each place."""
    newest, earlier = (converted(folder, tmp_path / version, "--maxtext", version) for version in ("0.2.5", "e591f30"))
    local, whole = "decoder.layers.local_layers.", "decoder.layers.global_layer."
    for key, values in newest.items():
        if key.startswith(local):
            rest = key.removeprefix(local)
            apart = [earlier[f"decoder.layers.layer_{place}.{rest}"] for place in range(3)]
            np.testing.assert_array_equal(values.astype("f4"), np.stack(apart, 2).astype("f4"))
        else:
            same = key.replace(whole, "decoder.layers.layer_3.")
            np.testing.assert_array_equal(values.astype("f4"), earlier[same].astype("f4"))
    assert sum(3 if key.startswith(local) else 1 for key in newest) == len(earlier)
