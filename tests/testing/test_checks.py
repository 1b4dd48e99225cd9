"""`weightbeam.testing` finds what is wrong, one fault at a time; and takes ours, of which the other tests are made."""

from __future__ import annotations

import dataclasses
import doctest
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantised import Quantised, awq, compressed, gptq, nf4

from weightbeam.formats.storage import File, LocalFolder, Store
from weightbeam.model_mappings.config import Config
from weightbeam.model_mappings.families import qwen
from weightbeam.model_mappings.plan import TensorSpec
from weightbeam.testing import (
    check_elements,
    check_encoding,
    check_family,
    check_finished,
    check_readable_store,
    check_sizes_differ,
    check_store,
    check_tree,
    encoding,
    family,
    store,
)
from weightbeam.testing.store import HELD


@pytest.mark.parametrize("module", [encoding, family, store], ids=lambda module: module.__name__.rpartition(".")[2])
def test_examples(module: Any) -> None:
    """What the docstrings show, runs."""
    found = doctest.testmod(module)
    assert (found.failed, found.attempted > 0) == (0, True)


def test_what_it_imports() -> None:
    """Neither JAX, Orbax, PyTorch nor a test runner, nor Beam."""
    code = "import weightbeam.testing, sys; print(sorted({'jax', 'orbax', 'torch', 'safetensors', 'pytest', 'apache_beam'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- families ---------------------------------------------------------------------------------------------------------

CONFIG = dict(
    model_type="qwen3", hidden_size=6, intermediate_size=10, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=12, tie_word_embeddings=False,
)  # fmt: skip
LAYER = {
    "input_layernorm": (6,), "post_attention_layernorm": (6,), "self_attn.q_norm": (8,), "self_attn.k_norm": (8,),
    "self_attn.q_proj": (32, 6), "self_attn.k_proj": (16, 6), "self_attn.v_proj": (16, 6), "self_attn.o_proj": (6, 32),
    "mlp.gate_proj": (10, 6), "mlp.up_proj": (10, 6), "mlp.down_proj": (6, 10),
}  # fmt: skip
SHAPES = {"model.embed_tokens.weight": (12, 6), "model.norm.weight": (6,), "lm_head.weight": (12, 6)} | {
    f"model.layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in LAYER.items()
}
HEADERS = {name: TensorSpec(shape, np.dtype(np.float32), "model.safetensors") for name, shape in SHAPES.items()}


def test_a_family_that_is_right() -> None:
    for check in (check_family, check_elements, check_sizes_differ):
        check(qwen.FAMILY, CONFIG, HEADERS)


@pytest.mark.parametrize("check", [check_family, check_elements])
def test_a_tensor_too_many_one_too_few_and_one_of_another_shape(check: Callable[..., None]) -> None:
    more = HEADERS | {"model.layers.0.extra.weight": HEADERS["lm_head.weight"]}
    less = {name: spec for name, spec in HEADERS.items() if name != "model.norm.weight"}
    other = HEADERS | {"lm_head.weight": dataclasses.replace(HEADERS["lm_head.weight"], shape=(6, 12))}
    for headers, words in (
        (more, "unused: model.layers.0.extra"),
        (less, "missing: model.norm"),
        (other, "shape: lm_head"),
    ):
        with pytest.raises(AssertionError, match=words):
            check(qwen.FAMILY, CONFIG, headers)


def test_a_model_is_too_large_to_count() -> None:
    large = HEADERS | {"more": TensorSpec((1 << 13, 1 << 13), np.dtype(np.float32), "model.safetensors")}
    with pytest.raises(AssertionError, match="take a tiny model"):
        check_elements(qwen.FAMILY, CONFIG, large)


def test_a_relation_that_reads_back_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loses the first piece of each tensor."""
    right = family.Part.pieces_back
    monkeypatch.setattr(family.Part, "pieces_back", lambda *given: list(right(*given))[1:])
    with pytest.raises(AssertionError, match="read back"):
        check_elements(qwen.FAMILY, CONFIG, HEADERS)


def test_sizes_that_are_alike() -> None:
    config = CONFIG | dict(num_key_value_heads=8)
    headers = dict(HEADERS)
    for layer in range(2):
        for each in "kv":
            headers[f"model.layers.{layer}.self_attn.{each}_proj.weight"] = TensorSpec(
                (64, 6), np.dtype(np.float32), ""
            )
    check_elements(qwen.FAMILY, config, headers)
    with pytest.raises(AssertionError, match="kv and dim are both 8"):
        check_sizes_differ(qwen.FAMILY, config, headers)


def test_a_tree_that_differs() -> None:
    layout = family.Layout(scan=False)
    made = family.audited(qwen.FAMILY, CONFIG, HEADERS, layout).arrays
    tree = {array.key.replace(".", "/"): (array.shape, array.logical_axes) for array in made}
    check_tree(qwen.FAMILY, CONFIG, tree, layout)
    path = "params/params/decoder/decoder_norm/scale"
    for changed, words in (
        ({each: fact for each, fact in tree.items() if each != path}, "MaxText has no such parameter"),
        (tree | {f"{path}2": tree[path]}, "the table doesn't make it"),
        (tree | {path: ((6,), ("embed",))}, r"\('norm',\)\), MaxText has \(\(6,\), \('embed',\)\)"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_tree(qwen.FAMILY, CONFIG, changed, layout)
    assert Config(CONFIG)["model_type"] in qwen.FAMILY.model_types


# --- encodings --------------------------------------------------------------------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True}, "targets": ["Linear"]}},
}  # fmt: skip
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("write", "quantization"),
    [(compressed, COMPRESSED), (gptq, GPTQ), (awq, AWQ), (nf4, NF4)],
    ids=["compressed", "gptq", "awq", "nf4"],
)
def test_encodings_of_ours(
    write: Callable[[str, tuple[int, ...], int], Quantised], quantization: dict[str, Any]
) -> None:
    tensors, values = write("x.weight", (64, 128), 3)
    check_encoding(tensors, values, quantization)
    with pytest.raises(AssertionError, match="values differ"):
        check_encoding(tensors, values + np.float32(1), quantization)
    with pytest.raises(AssertionError, match="shape is"):
        check_encoding(tensors, values.T.copy(), quantization)


def test_what_a_format_requires() -> None:
    """Without each part that its entry requires the weight is refused; a format that isn't there is named."""
    tensors, values = compressed("x.weight", (64, 128), 3)
    name = next(
        entry.name for entry in encoding.known().formats if entry.suffix == "weight_packed" or "pack" in entry.name
    )
    check_encoding(tensors, values, COMPRESSED, format=name)
    with pytest.raises(AssertionError, match="no format is called 'none'"):
        check_encoding(tensors, values, COMPRESSED, format="none")


# --- stores -----------------------------------------------------------------------------------------------------------


class Unsorted(LocalFolder):
    def list(self, prefix: str = "", recursive: bool = True) -> list[File]:
        return super().list(prefix, recursive)[::-1]


class Twice(LocalFolder):
    def create(self, name: str, data: bytes) -> bool:
        self.write(name, data)
        return True


class Short(LocalFolder):
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return super().read(name, start, stop)[:100]


class Keeps(LocalFolder):
    def delete_folder(self, name: str = "") -> None:
        """Nothing goes."""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Unsorted, "names_are_listed"),
        (Twice, "writing_is_whole"),
        (Short, "ranges_are_read"),
        (Keeps, "writing_is_whole"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_stores_that_break_a_promise(kind: type[Store], words: str, tmp_path: Path) -> None:
    numbers = iter(range(100))

    def make() -> Store:
        made = kind(str(tmp_path / str(next(numbers))))
        made.make()
        return made

    with pytest.raises(AssertionError, match=words):
        check_store(make)


def test_a_store_that_is_only_read(tmp_path: Path) -> None:
    for name, data in HELD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    check_readable_store(LocalFolder(str(tmp_path)))
    with pytest.raises(AssertionError, match="read"):
        check_readable_store(Short(str(tmp_path)))


# --- drafts -----------------------------------------------------------------------------------------------------------


def test_marks_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2  # TODO: is it?\n")
    with pytest.raises(AssertionError, match=r"a\.py:2: y = 2"):
        check_finished(tmp_path / "a.py")
