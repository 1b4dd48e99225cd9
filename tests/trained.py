"""What lies beside the project: checkpoints that MaxText itself wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "maxtext"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="MaxText's own checkpoints aren't beside the project")
TRAINED = {
    "llama-fsdp8": "llama3.1-8b",
    "llama-fsdp8-paramonly-unscanned": "llama3.1-8b",
    "llama-linen-paramonly-unscanned": "llama3.1-8b",
}
TRAINED |= {"qwen3moe-fsdp4-tensor2": "qwen3-30b-a3b"}


def trained_like(folder: Path, run: str) -> Path:
    """The `config.json` of the models that were trained."""
    llama = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, vocab_size=256, num_hidden_layers=4, tie_word_embeddings=False, rms_norm_eps=1e-5, dtype="float32",
    )  # fmt: skip
    moe = dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, moe_intermediate_size=32, vocab_size=256, num_hidden_layers=3, num_experts=8, num_experts_per_tok=2,
        decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(moe if "moe" in run else llama))
    return folder
