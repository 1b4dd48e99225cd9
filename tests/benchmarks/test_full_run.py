"""The check of the full-size run, on a model of the same structure that takes seconds: it passes, and it can fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.full_run import check, places
from benchmarks.full_size import DEEPSEEK_V3, tensors, write
from weightbeam.formats.orbax import find_items
from weightbeam.formats.storage import Store
from weightbeam.pipelines.cli import main

CONFIG = DEEPSEEK_V3 | dict(
    vocab_size=512, hidden_size=256, num_hidden_layers=4, first_k_dense_replace=2, intermediate_size=384, moe_intermediate_size=128, n_routed_experts=4,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Converted:
    source: Path
    items: Store


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("full")
    total = write(CONFIG, 5, folder / "source", noisy=True)
    assert total == sum(entry.stat().st_size for entry in (folder / "source").glob("*.safetensors")) - headers(
        folder / "source"
    )
    assert (
        main(
            ["convert", "--source", str(folder / "source"), "--output", str(folder / "output"), "--compression", "zstd"]
        )
        == 0
    )
    return Converted(folder / "source", find_items(folder / "output"))


def headers(source: Path) -> int:
    """Bytes of the files that aren't tensors'."""
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in source.glob("*.safetensors"))


def test_known_places(converted: Converted) -> None:
    sizes = {name.removesuffix(".weight"): shape for name, _, shape in tensors(CONFIG)}
    expected = sum(
        rows * (columns[0] if columns else 1) for rows, *columns in (sizes[tensor] for _, _, tensor in places(CONFIG))
    )
    assert check(converted.items, converted.source, CONFIG) == expected


@pytest.mark.parametrize(
    ("there", "here"), [("layers.3", "layers.2"), ("experts.3", "experts.1"), ("gate_proj", "up_proj")]
)
def test_another_tensor_is_found_out(
    converted: Converted, there: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = [(key, where, tensor.replace(there, here)) for key, where, tensor in places(CONFIG) if there in tensor]
    for place in moved:
        monkeypatch.setattr("benchmarks.full_run.places", lambda config, place=place: [place])
        with pytest.raises(RuntimeError, match="isn't"):
            check(converted.items, converted.source, CONFIG)
