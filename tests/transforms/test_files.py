"""The planned files of a release, written and read back by safetensors itself, by transformers' rules, and by our own
reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from lazily import lazily
from safetensors import safe_open
from safetensors.numpy import save_file
from support import BF16, F32, FP8

from weightbeam.formats.safetensors import DTYPES, open_hf, read_header
from weightbeam.transforms.cutting.files import MAX_INDEX, Entry, FileLayout, natural, plan_files

transformers = lazily("transformers")

WORDS = st.lists(
    st.sampled_from(["model", "layers", "2", "10", "mlp", "weight", "ä", "experts", "0"]), min_size=1, max_size=5
).map(".".join)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
ENTRIES = st.dictionaries(WORDS, st.tuples(st.sampled_from(sorted(DTYPES.values(), key=str)), SHAPES), max_size=12).map(
    lambda found: [Entry(name, dtype, shape) for name, (dtype, shape) in found.items()]
)
LIMITS = st.one_of(st.none(), st.integers(0, 300))


def bytes_of(entry: Entry) -> bytes:
    """What a tensor holds in these tests: no two of them alike."""
    return bytes((len(entry.name) * 7 + at) % 251 for at in range(entry.nbytes))


def write_release(layout: FileLayout, entries: list[Entry], folder: Path) -> None:
    """Writes each tensor where the plan says, in any order."""
    folder.mkdir(parents=True, exist_ok=True)
    for planned in layout.files:
        (folder / planned.name).write_bytes(planned.header + b"\xff" * (planned.size - len(planned.header)))
    for entry in reversed(entries):
        place = layout.tensors[entry.name]
        with open(folder / place.path, "r+b") as file:
            file.seek(place.offset)
            file.write(bytes_of(entry))
    if layout.index is not None:
        (folder / "model.safetensors.index.json").write_bytes(layout.index)
    (folder / "config.json").write_text('{"model_type": "any"}')


LIKE = st.dictionaries(
    WORDS, st.sampled_from(["model.safetensors", "b.safetensors", "model-9.safetensors"]), max_size=20
)


@given(ENTRIES, st.one_of(st.none(), LIKE), LIMITS)
@settings(deadline=None)  # files are written
def test_read_back(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], like: dict[str, str] | None, most: int | None
) -> None:
    layout = plan_files(entries, like, most)
    folder = tmp_path_factory.mktemp("release")
    write_release(layout, entries, folder)
    assert sorted(layout.tensors) == sorted(entry.name for entry in entries)
    for planned in layout.files:
        assert (len(planned.header) % 8, planned.size) == (0, (folder / planned.name).stat().st_size)
        assert all(tensor.offset % min(8, tensor.dtype.itemsize) == 0 for tensor in planned.tensors)
        with safe_open(folder / planned.name, "np") as file:
            assert file.metadata() == {"format": "pt"}
            assert sorted(file.keys()) == sorted(tensor.name for tensor in planned.tensors)
            assert all(file.get_slice(tensor.name).get_shape() == list(tensor.shape) for tensor in planned.tensors)
        raw = (folder / planned.name).read_bytes()
        held = {tensor.name: tensor for tensor in read_header(str(folder / planned.name))}
        for entry in (entry for entry in entries if layout.tensors[entry.name].path == planned.name):
            found = held[entry.name]
            assert (found.dtype, found.shape, found.offset) == (
                entry.dtype,
                entry.shape,
                layout.tensors[entry.name].offset,
            )
            assert raw[found.offset : found.offset + found.nbytes] == bytes_of(entry)
    assert (layout.index is None) == (len(layout.files) == 1)
    if entries:
        assert open_hf(folder).problems == ()
        assert open_hf(folder).ignored == ()


@given(ENTRIES, st.integers(0, 300))
def test_files_are_no_larger_than_the_limit(entries: list[Entry], most: int) -> None:
    """A file may hold more than the limit only where a single tensor has more."""
    for planned in plan_files(entries, None, most).files:
        sizes = [tensor.nbytes for tensor in planned.tensors if tensor.nbytes]
        assert sum(sizes) <= most or len(sizes) == 1


def test_natural_order() -> None:
    """Layers by their numbers, as a reader expects them; transformers' own order is that of the modules."""
    entries = [Entry(f"model.layers.{layer}.mlp.weight", F32, (4,)) for layer in (10, 9, 0, 100)]
    layout = plan_files(entries, None, 32)
    assert [[tensor.name.split(".")[2] for tensor in file.tensors] for file in layout.files] == [
        ["0", "9"],
        ["10", "100"],
    ]
    assert [file.name for file in layout.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert natural("a.2.b") < natural("a.10.b") < natural("a.10.c")


def vectors(folder: Path, files: Mapping[str, list[str]]) -> tuple[list[Entry], dict[str, str]]:
    """A release of vectors, written by safetensors, as `(its tensors, the file of each)`."""
    for name, tensors in files.items():
        save_file({tensor: np.zeros(4, np.float32) for tensor in tensors}, folder / name)
    like = {tensor.name: name for name in files for tensor in read_header(str(folder / name))}
    return [Entry(name, F32, (4,)) for name in like], like


def test_the_layout_of_a_release_is_kept(tmp_path: Path) -> None:
    files = {"model-00001-of-00002.safetensors": ["z", "b"], "model-00002-of-00002.safetensors": ["a", "c.weight"]}
    entries, like = vectors(tmp_path, files)
    layout = plan_files(reversed(entries), like)
    assert {name: tensor.path for name, tensor in layout.tensors.items()} == like
    assert [tensor.name for file in layout.files for tensor in file.tensors] == list(like)


def test_a_scale_lies_behind_its_codes(tmp_path: Path) -> None:
    """What the release doesn't have goes where its neighbour is; wider elements still come first."""
    files = {
        "model-00001-of-00002.safetensors": ["z", "b"],
        "model-00002-of-00002.safetensors": ["a.weight", "c.weight"],
    }
    _, like = vectors(tmp_path, files)
    entries = [Entry(name, FP8, (8, 8)) for name in like] + [
        Entry("a.weight_scale_inv", F32, (1, 1)),
        Entry("A", F32, ()),
    ]
    layout = plan_files(entries, like)
    assert [[tensor.name for tensor in file.tensors] for file in layout.files] == [
        ["b", "z"],
        ["A", "a.weight_scale_inv", "a.weight", "c.weight"],
    ]


@pytest.mark.parametrize(
    "like",
    [
        {"a": "consolidated.00.pth.safetensors", "b": "other.safetensors"},
        {"a": "model-1.safetensors", "b": "pytorch_model.safetensors"},
    ],
)
def test_names_that_not_every_loader_wants(like: dict[str, str]) -> None:
    layout = plan_files([Entry("a", F32, (4,)), Entry("b", F32, (4,))], like)
    assert [file.name for file in layout.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_file_of_the_release_that_has_grown_is_split_where_a_limit_is_named(tmp_path: Path) -> None:
    files = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}
    entries, like = vectors(tmp_path, files)
    layout = plan_files(entries, like, 16)
    assert [(file.name, [tensor.name for tensor in file.tensors]) for file in layout.files] == [
        (f"model-0000{number}-of-00003.safetensors", [name]) for number, name in enumerate("abc", 1)
    ]


def test_a_file_that_would_be_empty_is_left_out(tmp_path: Path) -> None:
    """Here the second file: one is left, so there is no index."""
    _, like = vectors(tmp_path, {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b"]})
    layout = plan_files([Entry("a", F32, (4,))], like)
    assert ([file.name for file in layout.files], layout.index) == (["model.safetensors"], None)


def llama(**fields: Any) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **fields
        )
    )


def test_index_as_transformers_writes_it(tmp_path: Path) -> None:
    """The same model saved by transformers: the index, but for which file, is the same text; the sizes of files agree."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(tmp_path, max_shard_size=4000)
    text = (tmp_path / "model.safetensors.index.json").read_bytes()
    theirs = open_hf(tmp_path)
    like = {tensor.name: shard.name for shard in theirs.shards for tensor in shard.tensors}
    layout = plan_files([Entry(tensor.name, tensor.dtype, tensor.shape) for tensor in theirs.tensors.values()], like)
    assert layout.index == text
    assert [(file.name, file.size - len(file.header)) for file in layout.files] == [
        (shard.name, shard.size - min(tensor.offset for tensor in shard.tensors)) for shard in theirs.shards
    ]


def test_numbers_of_files_as_huggingface_hub_has_them() -> None:
    """Their greedy split and ours make files of the same sizes from tensors in the same order."""
    model = llama(tie_word_embeddings=True)
    state = {
        name: value
        for name, value in sorted(model.state_dict().items(), key=lambda item: natural(item[0]))
        if name != "lm_head.weight"
    }
    theirs = split_torch_state_dict_into_shards(state, max_shard_size=9000)
    ours = plan_files([Entry(name, F32, tuple(value.shape)) for name, value in state.items()], None, 9000)
    assert {name: tensor.path for name, tensor in ours.tensors.items()} == theirs.tensor_to_filename


def test_a_large_index_is_compact_and_said() -> None:
    """As many bytes of names as a trillion parameters in int4 have, with three tensors an expert."""
    names = [f"model.layers.{layer}.{'experts.' * 60}{expert}" for layer in range(61) for expert in range(384)]
    layout = plan_files([Entry(name, BF16, (1,)) for name in names], None, 4000)
    assert layout.index is not None
    assert len(layout.index) > MAX_INDEX
    assert b"\n" not in layout.index
    assert json.loads(layout.index)["metadata"] == {"total_parameters": len(names), "total_size": 2 * len(names)}
    assert "huggingface_hub" in layout.warnings[0]


def test_two_tensors_with_one_name() -> None:
    with pytest.raises(ValueError, match="two tensors would be called a"):
        plan_files([Entry("a", F32, (1,)), Entry("a", F32, (2,))])
