"""`open`: the arrays of a release or a checkpoint as numpy, any part of them, and nothing else is read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from processes import read_so_far
from support import (
    BF16,
    DEEPSEEK,
    F32,
    FP8,
    LLAMA,
    assert_same_bits,
    bare,
    convert,
    make_release,
    random_tensors,
    read_tensors,
    reference,
    restore,
    save,
    split,
)

import weightbeam as wb
from weightbeam.model_mappings.boxes import extent
from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.pipelines.loading.indexing import find_box
from weightbeam.pipelines.loading.tree import LazyTree
from weightbeam.pipelines.loading.tree import open as open_tree
from weightbeam.pipelines.terminal.errors import Refused


def names(tree: LazyTree) -> dict[str, np.ndarray]:
    return {bare(key): np.asarray(array) for key, array in tree.items()}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_box_and_the_rest_are_numpys_index(data: st.DataObject) -> None:
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=4, max_side=6))
    index = (
        data.draw(arrays.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
        if shape
        else data.draw(st.sampled_from([(), ..., None]))
    )
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    box, rest = find_box(index, shape)
    part = values[tuple(slice(*span) for span in box)]
    assert part.shape == extent(box)
    np.testing.assert_array_equal(part[rest], values[index])


@pytest.mark.parametrize("index", [5, -6, (0, 0, 0), (..., ...), 1.5, True, [0, 1], "a"])
def test_other_indices_are_errors(index: Any) -> None:
    with pytest.raises(IndexError):
        find_box(index, (5, 4))


def test_a_release_is_maxtexts_tree(tmp_path: Path) -> None:
    """Keys, shapes, values; and an index reads the rows that it selects."""
    config = LLAMA | dict(vocab_size=4096, hidden_size=64)
    tensors = random_tensors(config)
    tree = open_tree(str(save(tmp_path / "hf", config, *split(tensors, 2))))
    wanted = reference(config, tensors, BF16)
    assert_same_bits(names(tree), wanted)
    embedding = tree[f"{PARAMETERS}token_embedder.embedding"]
    assert embedding.logical_axes == ("vocab", "embed_vocab")
    assert (embedding.ndim, len(embedding), embedding.nbytes) == (2, 4096, 4096 * 64 * 2)
    before = read_so_far()
    part = embedding[100:400:3, ::-1]
    assert read_so_far() - before < 300 * 64 * 2 + 20_000  # and what /proc/self/io itself takes
    assert_same_bits({"": part}, {"": wanted["token_embedder.embedding"][100:400:3, ::-1]})
    assert "4096 × 64" in str(tree)


def test_a_release_as_it_is(tmp_path: Path) -> None:
    """Plain tensors as they are stored; FP8 with its scales, in float32."""
    config = DEEPSEEK | dict(quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    tensors, values = random_tensors(DEEPSEEK), {}
    rng = np.random.default_rng(1)
    for name, plain in list(tensors.items()):
        values[name] = plain
        if name.endswith("_proj.weight"):
            rows, columns = (-(-size // 16) for size in plain.shape)
            scales = rng.random((rows, columns), F32)
            tensors[name], tensors[f"{name}_scale_inv"] = plain.astype(FP8), scales
            values[name] = (
                tensors[name].astype(F32) * scales.repeat(16, 0).repeat(16, 1)[: plain.shape[0], : plain.shape[1]]
            )
    folder = save(tmp_path / "hf", config, tensors)
    tree = open_tree(str(folder), as_is=True)
    assert_same_bits({name: np.asarray(array) for name, array in tree.items()}, values)
    part = open_tree(str(folder))[f"{PARAMETERS}decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.wi_0"][2, 1, :, 5]
    assert_same_bits({"": part}, {"": values["model.layers.2.mlp.experts.2.gate_proj.weight"][5].astype(BF16)})


def test_an_orbax_checkpoint(tmp_path: Path) -> None:
    """The same arrays as of the release that it was made of, with their logical axes; the scalar of the step too."""
    folder = make_release(tmp_path / "hf")
    step = convert(folder, tmp_path / "out", "--mesh", "fsdp=4", "--vocab_size", "72")
    tree, release = open_tree(str(tmp_path / "out")), open_tree(str(folder), vocab_size=72)
    assert tree["step"][()] == 0
    assert_same_bits({key: value for key, value in names(tree).items() if key != "step"}, restore(step))
    assert {key: array.logical_axes for key, array in tree.items() if key != "step"} == {
        key: array.logical_axes for key, array in release.items()
    }
    kernel = tree[f"{PARAMETERS}decoder.layers.mlp.wo.kernel"]
    assert_same_bits({"": kernel[7, 1]}, {"": restore(step)["decoder.layers.mlp.wo.kernel"][7, 1]})


@pytest.mark.parametrize("option", [dict(scan_layers=False), dict(maxtext="e591f30"), dict(vocab_size=72)], ids=str)
def test_a_checkpoint_is_opened_as_it_is(option: dict[str, Any], tmp_path: Path) -> None:
    """What says what is made of a release is refused, not passed over."""
    convert(make_release(tmp_path / "hf"), tmp_path / "out")
    ((name, value),) = option.items()
    for opens in (open_tree, functools.partial(wb.load, mesh="fsdp=1")):
        with pytest.raises(Refused, match=rf"^{name}={value}: says what is made of a release, and .* opened as it is"):
            opens(str(tmp_path / "out"), **option)
    for option in (
        dict(save_dtype="float32"),
        dict(save_dtype="float8_e4m3fn"),
        dict(family="llama"),
        dict(maxtext_model="x"),
    ):
        for opens in (open_tree, functools.partial(wb.load, mesh="fsdp=1")):
            with pytest.raises(Refused, match=rf"^{next(iter(option))}=.* is an Orbax checkpoint"):
                opens(str(tmp_path / "out"), **option)
    assert open_tree(str(tmp_path / "out"), save_dtype="bfloat16")


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    """All problems at once, and in words."""
    tensors = random_tensors(LLAMA)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    folder = save(tmp_path / "hf", LLAMA, tensors)
    with pytest.raises(Refused, match="2 problems") as refused:
        open_tree(str(folder))
    assert all(name in str(refused.value) for name in ("model.norm.weight", "layers.1.mlp.up_proj.weight"))
    assert set(open_tree(str(folder), as_is=True)) == set(read_tensors(folder))
    with pytest.raises(Refused, match="no Orbax checkpoint"):
        open_tree(str(tmp_path))
    with pytest.raises(TypeError, match="unit_bytes"):
        open_tree(str(folder), unit_bytes=3)
