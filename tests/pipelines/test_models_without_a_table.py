"""Models that MaxText hasn't got, for plain JAX: `--family identity`, there, onto a mesh, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.models import BASE, DELTA_NET, QWEN_VISION, make
from lazily import lazily
from support import LLAMA, assert_same_bits, call, converted, random_tensors, read_config, read_tensors, save

import weightbeam as wb

jax = lazily("jax")
transformers = lazily("transformers")

IDENTITY = ("--family", "identity")
LINEAR = {key: value for key, value in DELTA_NET.items() if key.startswith("linear_")}
PIXTRAL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16)
GLM = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, first_k_dense_replace=1,
    n_group=1, topk_group=1,
)  # fmt: skip
MINIMAX = dict(num_local_experts=4, num_experts_per_tok=2)
# model_type -> transformers' class and what its config has besides BASE, or a multimodal model's parts
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", dict(text_config=BASE | LINEAR, vision_config=QWEN_VISION)),
    "ministral3": ("Ministral3", {}),
    "mistral3": (
        "Mistral3",
        dict(
            text_config=BASE | dict(model_type="ministral3"), vision_config=PIXTRAL | dict(image_size=28, patch_size=14)
        ),
    ),
    "glm4_moe": ("Glm4Moe", GLM),
    "minimax": ("MiniMax", MINIMAX),
    "minimax_m2": ("MiniMaxM2", MINIMAX | dict(bos_token_id=0, eos_token_id=1)),
}


@pytest.fixture(scope="module", params=MODELS)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the kind, in several files, as transformers saves it."""
    folder = tmp_path_factory.mktemp(request.param)
    make(*MODELS[request.param], "100KB", folder, seed=0)
    assert read_config(folder)["model_type"] == request.param
    return folder


def test_without_a_table_it_is_refused_and_told_the_way(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "--source", release) == 2
    printed = capsys.readouterr()
    assert f"no table for model_type {release.name[:-1]!r}" in printed.err
    assert "--family identity" in printed.err


def test_there_and_back(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stock Orbax restores every tensor under its own name, bit for bit; export gives the files' tensors again."""
    tensors = read_tensors(release)
    assert_same_bits(converted(release, tmp_path / "checkpoint", *IDENTITY), tensors)
    assert "warning" not in capsys.readouterr().err
    step = tmp_path / "checkpoint" / "0"
    assert call("verify", "--source", release, "--checkpoint", step) == 0
    assert call("export", step, tmp_path / "back", "--like", release) == 0  # its record says how it was made
    assert_same_bits(read_tensors(tmp_path / "back"), tensors)
    config = read_config(release)
    assert read_config(tmp_path / "back") == config | {"torch_dtype": config["dtype"]}


def test_names_that_begin_as_maxtexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T5's `decoder.block.0` is no list of MaxText's modules; nothing is told that holds for MaxText alone."""
    transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ).bfloat16().save_pretrained(tmp_path / "hf")
    tensors = read_tensors(tmp_path / "hf")
    assert call("plan", tmp_path / "hf", *IDENTITY) == 0
    assert_same_bits(converted(tmp_path / "hf", tmp_path / "checkpoint", *IDENTITY), tensors)
    said = capsys.readouterr().out
    assert "MaxText" not in said
    assert f"weightbeam.load('{tmp_path}/checkpoint/0', like=…)" in said
    assert call("export", tmp_path / "checkpoint", tmp_path / "back") == 0
    assert_same_bits(read_tensors(tmp_path / "back"), tensors)
    assert "load it:  transformers.T5ForConditionalGeneration.from_pretrained" in capsys.readouterr().out
    assert call("diff", tmp_path / "hf", tmp_path / "checkpoint") == 0
    loaded = wb.load(tmp_path / "checkpoint", mesh=f"fsdp={jax.device_count()}")
    arrays = {".".join(key.key for key in path): array for path, array in jax.tree.flatten_with_path(loaded)[0]}
    assert_same_bits({key.removeprefix("params.params."): np.asarray(array) for key, array in arrays.items()}, tensors)


def test_names_stay_as_they_are(tmp_path: Path) -> None:
    """Those of a release without a head, too, and both spellings side by side."""
    tensors = random_tensors(LLAMA) | {"norm.weight": np.ones(3, np.float32), "layers.0.x": np.ones((2, 3), np.float32)}
    source = save(tmp_path / "hf", LLAMA, tensors)
    arrays = converted(source, tmp_path / "checkpoint", *IDENTITY, "--save_dtype", "float32")
    assert arrays.keys() == tensors.keys()


def test_onto_a_mesh(release: Path, tmp_path: Path) -> None:
    """With partition specs of one's own, from the release and from its checkpoint; without, each device has all of it."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    tensors = read_tensors(release)

    def abstract(array: Any) -> Any:
        names = ["x" if size == max(array.shape) and size % jax.device_count() == 0 else None for size in array.shape]
        spec = jax.sharding.PartitionSpec(
            *(name if place == names.index(name) else None for place, name in enumerate(names))
        )
        return jax.ShapeDtypeStruct(array.shape, "bfloat16", sharding=jax.sharding.NamedSharding(mesh, spec))

    like = {key: abstract(array) for key, array in wb.open(release, family="identity").items()}
    assert like.keys() == {f"params.params.{name}" for name in tensors}
    wb.convert(release, tmp_path / "checkpoint", family="identity")
    with pytest.raises(wb.Refused, match="no MaxText model has"):
        wb.convert(release, tmp_path / "other", family="identity", maxtext_model="llama2-7b")
    for loaded in (wb.load(release, like=like, family="identity"), wb.load(tmp_path / "checkpoint", like=like)):
        assert {key: array.sharding for key, array in loaded.items()} == {
            key: leaf.sharding for key, leaf in like.items()
        }
        assert_same_bits(
            {key.removeprefix("params.params."): np.asarray(array) for key, array in loaded.items()}, tensors
        )
    whole = wb.load(release, mesh=f"fsdp={jax.device_count()}", family="identity")
    assert all(array.sharding.is_fully_replicated for array in jax.tree.leaves(whole))
