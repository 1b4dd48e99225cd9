"""Which arrays are virtual, why others aren't, and how they are cut: decided from headers alone, at real sizes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from support import BF16, DEEPSEEK_V3, F32, LLAMA, LLAMA_8B, QWEN3_MOE, headers_only, random_tensors, save

from weightbeam.formats.orbax import zarr
from weightbeam.formats.safetensors import open_hf
from weightbeam.transforms.cutting.read_cost import load_of
from weightbeam.transforms.cutting.virtual import loads_of, percent
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

QWEN_30B = QWEN3_MOE | dict(
    vocab_size=151936, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_hidden_layers=48, num_experts=128,
    moe_intermediate_size=768,
)  # fmt: skip
P = "params.params.decoder."


def plan(config: dict, dtype: np.dtype = BF16, **options: object) -> Conversion:
    return plan_conversion(ConvertOptions(virtual=True, **options), headers_only(config, dtype))  # type: ignore[arg-type]


def reasons(conversion: Conversion) -> dict[str, str]:
    """Why arrays aren't virtual."""
    return {
        array.key: placed.reason
        for array, placed in zip(conversion.plan.arrays, conversion.placements, strict=True)
        if not placed.spec
    }


def test_a_release_in_the_stored_dtype_is_virtual_as_a_whole() -> None:
    """Every chunk one range, of at most 4 MiB; nothing is left to units."""
    made = plan(QWEN_30B)
    assert not made.plan.problems
    assert not reasons(made)
    assert not made.units
    assert made.virtual_bytes == made.target_bytes
    chunks = {grid.spec.key.removeprefix("params.params."): (grid.spec.chunk, grid.spec.order) for grid in made.grids}
    assert chunks["token_embedder.embedding"] == ((128, 2048), ())  # 151,936 is 128 times a prime
    assert all(math.prod(chunk) * 2 <= 4 << 20 for chunk, _ in chunks.values())
    assert chunks["decoder.layers.moe_block.wi_0"] == ((1, 1, 2048, 768), (0, 1, 3, 2))
    assert chunks["decoder.layers.moe_block.wo"] == ((1, 1, 768, 2048), (0, 1, 3, 2))
    assert chunks["decoder.layers.self_attention.query.kernel"] == ((2048, 1, 8, 128), (1, 2, 3, 0))
    assert chunks["decoder.decoder_norm.scale"] == ((2048,), ())


@pytest.mark.parametrize(
    "options", [{}, {"mesh": ("fsdp=16",)}, {"mesh": ("expert=16,fsdp=4", "tensor=8")}, {"scan_layers": False}]
)
@pytest.mark.parametrize("config", [QWEN_30B, DEEPSEEK_V3 | dict(num_hidden_layers=5)], ids=["qwen3-moe", "deepseek3"])
def test_references_tile_the_arrays_and_the_tensors(config: dict, options: dict) -> None:
    """Exactly the keys of each array; and of the files every byte that belongs to a virtual array exactly once, spare arrays
    left out, which are of the same bytes as others.
    """
    made = plan(config, **options)
    keys = [
        key
        for grid, placed in zip(made.grids, made.placements, strict=True)
        if placed.spec
        for key in list(zarr.keys(grid.spec, made.format))[1:]
    ]
    references = list(made.references())
    assert sorted(reference.key for reference in references) == sorted(keys)
    at: dict[str, int] = {}
    virtual = {shard.path.rpartition("/")[2]: shard.size for shard in made.source.shards}
    spare = tuple(f"{array.key}/" for array in made.plan.arrays if array.parts[0].rule.spare)
    once = (reference for reference in references if not reference.key.startswith(spare))
    for reference in sorted(once, key=lambda reference: (reference.path, reference.offset)):
        assert reference.offset == at.get(reference.path, 0), "the headers have no holes, and every tensor is used"
        at[reference.path] = reference.offset + reference.length
    assert at == virtual


def test_rows_follow_the_mesh_and_columns_can_not() -> None:
    """`fsdp` on `embed`: the down projection has it in its rows, the up projections have it in their columns."""
    grids = {grid.spec.key: grid.spec for grid in plan(QWEN_30B, mesh=("fsdp=16",)).grids}
    assert grids[f"{P}layers.moe_block.wo"].chunk == (1, 1, 768, 128)
    assert grids[f"{P}layers.moe_block.wi_0"].chunk == (1, 1, 2048, 768)
    grids = {grid.spec.key: grid.spec for grid in plan(QWEN_30B, mesh=("tensor=8",)).grids}
    assert grids[f"{P}layers.moe_block.wi_0"].chunk == (1, 1, 2048, 96)


def test_arithmetic_and_rows_that_change_places_are_written() -> None:
    """Llama 3.1: the query is scaled, and the halves of query's and key's heads are interleaved."""
    made = plan(LLAMA_8B, maxtext_model="llama3.1-8b")
    why = {key.removeprefix(f"{P}layers.self_attention."): reason for key, reason in reasons(made).items()}
    assert why["query.kernel"].startswith("scaled by 0.0883")
    assert why["key.kernel"] == "rows change places within an axis, as rotary halves that are interleaved do"
    assert set(why) == {"query.kernel", "key.kernel"}
    assert {made.plan.arrays[block.array].key for unit in made.units for block in unit} == set(reasons(made))
    assert made.made_bytes == sum(array.nbytes for array in made.plan.arrays if array.key in reasons(made))


def test_padding_is_written_and_a_cut_vocabulary_is_not() -> None:
    """More rows than the file has are nowhere; fewer are a range of them."""
    assert set(reasons(plan(LLAMA_8B, vocab_size=128512))) == {
        "params.params.token_embedder.embedding", f"{P}logits_dense.kernel", f"{P}layers.self_attention.query.kernel",
    }  # fmt: skip
    cut = plan(LLAMA_8B, vocab_size=128000)
    assert set(reasons(cut)) == {f"{P}layers.self_attention.query.kernel"}
    assert cut.grids[0].spec.shape[0] == 128000


def test_a_changed_dtype_is_refused_where_it_is_most_of_the_model(tmp_path: Path) -> None:
    """And is written where it is a part of it, as a router's bias in float32."""
    for dtype, save_dtype in ((F32, "bfloat16"), (BF16, "float32")):
        (problem,) = plan(LLAMA_8B, dtype, save_dtype=save_dtype).plan.problems
        assert (problem.kind, problem.subject) == ("virtual", "--virtual")
        assert f"a changed dtype; --save_dtype {dtype.name}" in problem.message
    tensors = random_tensors(LLAMA)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(F32)
    made = plan_conversion(
        ConvertOptions(virtual=True, maxtext_model="llama3.3-70b"), open_hf(save(tmp_path / "source", LLAMA, tensors))
    )
    assert not made.plan.problems
    assert reasons(made)[f"{P}decoder_norm.scale"] == "float32, stored as bfloat16"


@pytest.mark.parametrize("options", [dict(use_ocdbt=False), dict(use_zarr3=False), dict(compression="zstd")])
def test_formats_that_can_not_refer_are_refused(options: dict) -> None:
    """By name, with what to do."""
    assert any(problem.subject == "--virtual" for problem in plan(LLAMA_8B, **options).plan.problems)


def test_a_small_share_is_a_warning() -> None:
    """Below 80 %, with the number; above, nothing."""
    assert not plan(LLAMA_8B).warnings
    padded = plan(LLAMA_8B | dict(num_hidden_layers=1), vocab_size=128512)
    (warning,) = padded.warnings
    assert warning.startswith(f"only {percent(padded.virtual_bytes, padded.target_bytes)} of the bytes are virtual")


def test_a_load_that_reads_much_for_nothing_is_a_warning() -> None:
    """`fsdp` shards columns, which no chunk follows; experts are served exactly. It is the arithmetic of `inspect
    --mesh`.
    """
    (warning,) = [text for text in plan(QWEN_30B, mesh=("fsdp=16",)).warnings if "a host reads" in text]
    assert warning.startswith("on fsdp=16 a host reads 1")
    assert not [text for text in plan(QWEN_30B, mesh=("tensor=4",)).warnings if "a host reads" in text]
    made = plan(QWEN_30B, mesh=("fsdp=16",))
    load = loads_of(made.grids, made.meshes)["fsdp=16"]
    chunks = {grid.spec.key: grid for grid in made.grids}
    assert (
        load_of(
            chunks[f"{P}layers.moe_block.wo"].spec,
            chunks[f"{P}layers.moe_block.wo"].partition["fsdp=16"],
            made.meshes[0],
        ).worst
        == 1
    )
    assert (
        load_of(
            chunks[f"{P}layers.moe_block.wi_0"].spec,
            chunks[f"{P}layers.moe_block.wi_0"].partition["fsdp=16"],
            made.meshes[0],
        ).worst
        == 16
    )
    assert 4 < load.mean < 16


def test_a_share_is_whole_only_if_all_of_it_is() -> None:
    """99.98 % isn't 100 %."""
    assert [percent(part, 10_000) for part in (10_000, 9_998, 9_951, 5_700, 0)] == [
        "100 %",
        "99.98 %",
        "99.5 %",
        "57 %",
        "0 %",
    ]
