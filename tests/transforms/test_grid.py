"""The chunk grid and the units: what is written fits the meshes, what is read is read once, and a unit fits its memory."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import facts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazily import lazily
from support import BF16, DEEPSEEK, DEEPSEEK_V3, FP8, LLAMA, LLAMA_8B, QWEN3_MOE, headers_only, nbytes, shapes

from weightbeam.formats.orbax.zarr import Format
from weightbeam.formats.safetensors import HfCheckpoint, Shard, Tensor
from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.plan import Array, expand, make_arrays
from weightbeam.model_mappings.registry import family_of
from weightbeam.transforms.cutting import row_blocks
from weightbeam.transforms.cutting.grid import SourceCost, count_experts, make_grid
from weightbeam.transforms.cutting.mesh import Mesh, base_rules, partition_spec
from weightbeam.transforms.cutting.read_cost import Load, load_of, total
from weightbeam.transforms.cutting.units import Unit
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.makespan import efforts_of
from weightbeam.transforms.planning.merge_planner import plan_merge
from weightbeam.transforms.planning.options import ConvertOptions, MergeOptions

nn = lazily("flax.linen")

MIB = 1 << 20
SMALL_V3 = DEEPSEEK_V3 | dict(num_hidden_layers=5)  # three dense layers, two with 256 experts: 50 GB
# four of its layers: 35 GB
LLAMA_405B = LLAMA_8B | dict(hidden_size=16384, num_attention_heads=128, intermediate_size=53248, num_hidden_layers=4)
MODELS = {"llama 8b": LLAMA_8B, "llama 405b": LLAMA_405B, "deepseek v3": SMALL_V3}
MESHES = {
    "no mesh": (),
    "fsdp 16": ("fsdp=16",),
    "fsdp 64, expert 4": ("fsdp=64,expert=4",),
    "tensor 8": ("tensor=8",),
    "two meshes": ("expert=64", "fsdp=32,tensor=4"),
}


def plan(config: dict[str, Any], **options: Any) -> Conversion:
    conversion = plan_conversion(ConvertOptions(**options), headers_only(config))
    assert not conversion.plan.problems
    return conversion


def ways(names: tuple[str | None, ...], mesh: str) -> list[int]:
    """Into how many parts Flax cuts each axis over a mesh."""
    sizes = {name.strip(): int(size) for name, size in (item.split("=") for item in mesh.split(","))}
    spec = nn.logical_to_mesh_axes(names, base_rules())
    groups = [() if axes is None else (axes,) if isinstance(axes, str) else axes for axes in spec]
    return [math.prod(sizes.get(name, 1) for name in group) for group in groups]


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64])
mesh_texts = st.builds(lambda items: ",".join(f"{name}={size}" for name, size in items.items()), st.dictionaries(
    st.sampled_from(["fsdp", "tensor", "expert", "stage", "fsdp_transpose", "data", "context"]), sizes, min_size=1, max_size=3
))  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A model of any family, from tiny to sizes where chunks have to be cut; vocabularies of odd sizes too."""
    base = draw(st.sampled_from([LLAMA, QWEN3_MOE, DEEPSEEK]))
    heads = draw(st.sampled_from([1, 2, 6, 8, 32]))
    changes = dict(
        vocab_size=draw(st.sampled_from([64, 1000, 32001, 129280])), hidden_size=draw(st.sampled_from([32, 96, 720, 2048, 7168])), num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=draw(st.sampled_from([48, 1408, 14336])), num_hidden_layers=draw(st.integers(2, 5)),
        head_dim=draw(st.sampled_from([8, 64, 128])),
    )  # fmt: skip
    experts, width = draw(st.sampled_from([1, 3, 8, 16])), draw(st.sampled_from([24, 768, 1536]))
    if base is QWEN3_MOE:
        changes |= dict(num_experts=experts, moe_intermediate_size=width)
    if base is DEEPSEEK:
        changes |= dict(
            n_routed_experts=experts, moe_intermediate_size=width, kv_lora_rank=draw(st.sampled_from([16, 512]))
        )
    return base | changes


@settings(max_examples=100, deadline=None)
@given(config=models(), meshes=st.lists(mesh_texts, min_size=1, max_size=3, unique=True), scan=st.booleans())
def test_a_chunk_divides_the_shards_of_every_mesh(config: dict[str, Any], meshes: list[str], scan: bool) -> None:
    """On every axis that a mesh cuts evenly, whole chunks make up a device's share, so that a host reads what it owns
    and no more; an axis that a mesh doesn't divide has a warning, and no other has.
    """
    conversion = plan(config, mesh=tuple(meshes), scan_layers=scan)
    expected = set()
    for array, grid in zip(conversion.plan.arrays, conversion.grids, strict=True):
        chunk, shard = grid.spec.chunk, grid.spec.shard
        assert all(1 <= part <= size for part, size in zip(chunk, array.shape, strict=True))
        assert all(whole % part == 0 for whole, part in zip(shard, chunk, strict=True))
        assert math.prod(chunk) * array.dtype.itemsize <= 4 * MIB
        for mesh in meshes:
            for axis, parts in enumerate(ways(array.logical_axes, mesh)):
                if array.shape[axis] % parts:
                    expected.add((array.key, mesh, array.logical_axes[axis]))
                elif parts > 1:
                    assert array.shape[axis] // parts % shard[axis] == 0, (array.key, mesh, axis)
    assert sum(len(grid.uneven) for grid in conversion.grids) == len(expected)
    for key, mesh, axis in expected:
        assert any(key in text and mesh in text and axis in text for text in conversion.warnings)


def working_set(conversion: Conversion, number: int) -> int:
    """All that a unit makes in memory: what it reads, what it decodes, and the shards."""
    unit = conversion.expand(number)
    stored = sum(read.nbytes for fetch in unit.fetches for read in fetch.encoding.reads(fetch.box))
    decoded = sum(
        math.prod(b - a for a, b in fetch.box) * fetch.dtype.itemsize for fetch in unit.fetches if fetch.encoding.label
    )
    return stored + decoded + made_bytes(unit)


def made_bytes(unit: Unit) -> int:
    return sum(math.prod(b - a for a, b in recipe.box) * recipe.spec.dtype.itemsize for recipe in unit.recipes)


def sample(conversion: Conversion, count: int) -> list[int]:
    """About `count` units, from the first to the last."""
    last = len(conversion.units) - 1
    return sorted({i * last // max(1, count - 1) for i in range(count)})


def assert_each_shard_once(conversion: Conversion) -> None:
    """Every shard of every array is in exactly one unit."""
    times = [np.zeros(grid.spec.grid, int) for grid in conversion.grids]
    for block in itertools.chain(*conversion.units):
        times[block.array][tuple(slice(*span) for span in block.shards)] += 1
    assert all((count == 1).all() for count in times)


@settings(max_examples=30, deadline=None)
@given(
    config=models(),
    mesh=st.lists(mesh_texts, max_size=2, unique=True),
    unit_mib=st.sampled_from([32, 128]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_units_tile_the_arrays_within_their_memory(
    config: dict[str, Any], mesh: list[str], unit_mib: int, dtype: str
) -> None:
    """Any model, meshes and bound: each shard once, and no unit above its bound (three units are spelled out)."""
    conversion = plan(
        config,
        mesh=tuple(mesh),
        unit_bytes=unit_mib * MIB,
        save_dtype=dtype,
        scan_layers=config["num_hidden_layers"] % 2 == 0,
    )
    assert_each_shard_once(conversion)
    assert all(working_set(conversion, number) <= unit_mib * MIB for number in sample(conversion, 3))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_real_sizes(model: str, mesh: str) -> None:
    """For models of real size: source bytes are read once (≤ 1.02), each shard is in one unit, and units hold their
    bound.
    """
    conversion = plan(MODELS[model], mesh=MESHES[mesh])
    twice = sum(array.nbytes for array in conversion.plan.arrays if array.parts[0].rule.spare)
    assert conversion.source_bytes == conversion.target_bytes - twice == nbytes(MODELS[model])
    assert_each_shard_once(conversion)
    assert all(working_set(conversion, number) <= conversion.options.unit_bytes for number in sample(conversion, 12))
    assert 1 <= conversion.read_bytes / conversion.source_bytes <= 1.02


@pytest.mark.parametrize("mesh", ["no mesh", "fsdp 16", "tensor 8"])
@pytest.mark.parametrize("unit_mib", [32, 64])
def test_smaller_units_hold_their_bound(unit_mib: int, mesh: str) -> None:
    """Where a row of a head's weights, and not a whole head, is what fits: a 405B's layers in small units."""
    conversion = plan(LLAMA_405B, mesh=MESHES[mesh], unit_bytes=unit_mib * MIB)
    assert all(working_set(conversion, number) <= unit_mib * MIB for number in sample(conversion, 25))


def test_what_the_plan_says_is_read_is_what_units_fetch() -> None:
    """`read_bytes`, which the plan reports, against every unit spelled out."""
    for options in (dict(), dict(mesh=("fsdp=4,tensor=2",)), dict(mesh=("expert=2",), unit_bytes=30_000)):
        conversion = plan(DEEPSEEK, **options)
        units = [conversion.expand(number) for number in range(len(conversion.units))]
        fetched = sum(
            read.nbytes for unit in units for fetch in unit.fetches for read in fetch.encoding.reads(fetch.box)
        )
        assert fetched == conversion.read_bytes
        assert sum(map(made_bytes, units)) == conversion.target_bytes


@pytest.mark.parametrize("model", MODELS)
def test_chunks_have_a_good_size(model: str) -> None:
    """At real sizes on a mesh of 16 nearly all bytes lie in chunks of 1 to 4 MB."""
    conversion = plan(MODELS[model], mesh=("fsdp=16",))
    good = sum(
        array.nbytes
        for array, grid in zip(conversion.plan.arrays, conversion.grids, strict=True)
        if MIB <= math.prod(grid.spec.chunk) * array.dtype.itemsize <= 4 * MIB
    )
    assert good >= 0.9 * conversion.target_bytes


def test_chunks_grow_along_the_axes_that_select_tensors_last() -> None:
    """A layer of a stack is a chunk of its own wherever that makes a megabyte: so one layer can be read without the
    others.
    """
    conversion = plan(LLAMA_8B, mesh=("fsdp=16",))
    grids = {grid.spec.key.removeprefix("params.params."): grid.spec for grid in conversion.grids}
    up = grids["decoder.layers.mlp.wi_1.kernel"]
    assert up.shape == (4096, 32, 14336)
    assert up.chunk[1] == 1
    norm = grids["decoder.layers.pre_self_attention_layer_norm.scale"]
    assert (norm.shape, norm.chunk) == ((4096, 32), (256, 32)) or norm.chunk[1] > 1


def test_small_units_are_gathered() -> None:
    """A unit of a few KB costs as much as one of a megabyte: a tiny model is one unit, whatever its arrays."""
    conversion = plan(DEEPSEEK, scan_layers=False)
    assert len(conversion.plan.arrays) > 40
    assert len(conversion.units) == 1


def fp8_headers(config: dict[str, Any], plain: str = "nothing") -> HfCheckpoint:
    """The same model with its projections in FP8 and a scale for each 128 × 128, but for those with `plain` in their
    names.
    """
    tensors, offset = [], 0
    for name, shape in shapes(config).items():
        quantised = name.endswith("_proj.weight") and plain not in name
        parts = [(name, FP8 if quantised else np.dtype(np.float32), shape)]
        if quantised:
            parts.append((f"{name}_scale_inv", np.dtype(np.float32), tuple(-(-size // 128) for size in shape)))
        for part, dtype, extents in parts:
            tensors.append(Tensor(part, dtype, extents, "/nowhere/model.safetensors", offset))
            offset += tensors[-1].nbytes
    quantization = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    return HfCheckpoint(
        "/nowhere",
        dict(config) | quantization,
        (Shard("model.safetensors", "/nowhere/model.safetensors", offset, 0, tuple(tensors)),),
    )


@pytest.mark.parametrize("options", [dict(dequantize=True), dict(quantize="fp8")], ids=str)
@pytest.mark.parametrize("slots", [None, 4])
def test_rows_of_a_form_are_cut_as_those_of_each(
    options: dict[str, Any], slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DEEPSEEK_V3 | dict(num_hidden_layers=4, n_routed_experts=4)
    headers = headers_only(config) if "quantize" in options else fp8_headers(config, ".2.self_attn")
    asked = MergeOptions(unit_bytes=9 * MIB, **options)
    units = plan_merge(asked, headers, (), slots=slots).units
    assert len(units) > 50
    monkeypatch.setattr(row_blocks, "stored_form", id)
    assert plan_merge(asked, headers, (), slots=slots).units == units


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("plain", ["nothing", ".4.mlp.experts", ".experts.5.down_proj"])
def test_units_of_a_kind_are_counted_once(plain: str, scan: bool) -> None:
    """And what each reads is what it fetches, also where some layers or experts are stored in another way."""
    config = DEEPSEEK_V3 | dict(num_hidden_layers=6, n_routed_experts=8, hidden_size=512, vocab_size=1024)
    options = ConvertOptions(scan_layers=scan, mesh=("expert=2",), unit_bytes=2 * MIB)
    conversion = plan_conversion(options, fp8_headers(config, plain))
    units = [conversion.expand(number) for number in range(len(conversion.units))]
    reads = [[read.nbytes for fetch in unit.fetches for read in fetch.encoding.reads(fetch.box)] for unit in units]
    assert [(effort.read, effort.reads) for effort in efforts_of(conversion)] == [(sum(one), len(one)) for one in reads]
    assert conversion.read_bytes == sum(map(sum, reads))
    assert len(set(conversion.alike)) < len(units)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_of_real_size(mesh: str, dtype: str) -> None:
    """Codes, scales, decoded values and arrays count towards a unit's bound; scales that two units need are all that is
    read twice.
    """
    conversion = plan_conversion(
        ConvertOptions(mesh=MESHES[mesh], save_dtype=dtype), fp8_headers(DEEPSEEK_V3 | dict(num_hidden_layers=4))
    )
    assert not conversion.plan.problems
    assert_each_shard_once(conversion)
    assert 1 <= conversion.read_bytes / conversion.source_bytes <= 1.02
    assert all(working_set(conversion, number) <= conversion.options.unit_bytes for number in sample(conversion, 12))


def test_a_bound_that_is_too_small_is_a_problem() -> None:
    """Not even a row fits: the plan says which array, and how much it needs."""
    conversion = plan_conversion(ConvertOptions(unit_bytes=100), headers_only(LLAMA))
    (problem,) = conversion.plan.problems
    assert "--unit_bytes=100" in str(problem)
    needed = re.search(r"needs at least (\d+)", str(problem))
    assert needed
    assert not plan_conversion(ConvertOptions(unit_bytes=int(needed[1])), headers_only(LLAMA)).plan.problems


# --- with no mesh named: every common mesh, for every model that MaxText has ------------------------------------------

TREES = {name: tree for name, tree in facts.load_trees().items() if "tiny" not in tree.model}
LARGE = 64_000_000  # bytes of an array that is held to the limit by itself
LIMIT = 1.1


def powers(limit: int) -> list[int]:
    """1, 2, 4, …, at most `limit`."""
    return [1 << n for n in range(limit.bit_length())]


def common_meshes(experts: int) -> Iterator[Mesh]:
    """`fsdp` up to 64 with `tensor` up to 8; and, if there are experts, with `expert` up to 64 where that divides them,
    on up to 512 devices.
    """
    for fsdp, tensor in itertools.product(powers(64), powers(8)):
        yield Mesh(f"fsdp={fsdp},tensor={tensor}", {"fsdp": fsdp, "tensor": tensor})
    for fsdp, expert in itertools.product(powers(64), powers(min(experts, 64))[1:]):
        if experts % expert == 0 and fsdp * expert <= 512:
            yield Mesh(f"fsdp={fsdp},expert={expert}", {"fsdp": fsdp, "expert": expert})


@functools.cache
def arrays_of(name: str) -> tuple[Array, ...]:
    """All parameters of a model of MaxText's, at full size."""
    tree = TREES[name]
    config = Config(facts.config_of(tree))
    layout = Layout(scan=tree.scan, mtp=tree.mtp, multimodal=tree.multimodal, model=tree.model, vocab=tree.vocab)
    return make_arrays(expand(family_of(config, tree.model), config, layout), {}, BF16)


def loads(
    arrays: tuple[Array, ...],
    meshes: list[Mesh],
    format: Format = Format(),  # noqa: B008, it is frozen
    named: tuple[Mesh, ...] = (),
) -> dict[str, dict[Array, Load]]:
    """By mesh, what the hosts read of the arrays, which were cut for those `named`; arrays of layers that are alike are
    together one, with its load.
    """
    alike = collections.Counter((array.shape, array.logical_axes, array.dtype, pattern(array.key)) for array in arrays)
    kinds = {(array.shape, array.logical_axes, array.dtype, pattern(array.key)): array for array in arrays}
    experts = count_experts(arrays)
    grids = {
        kind: make_grid(array, SourceCost(2), named, base_rules(), ConvertOptions().unit_bytes, format, experts)
        for kind, array in kinds.items()
    }
    return {
        mesh.text: {
            array: load_of(grids[kind].spec, partition_spec(array.logical_axes, base_rules()), mesh) * alike[kind]
            for kind, array in kinds.items()
        }
        for mesh in meshes
    }


@pytest.mark.parametrize("name", TREES)
def test_every_common_mesh_reads_what_it_needs(name: str) -> None:
    """No host of a common mesh reads more than 1.1 × what it needs: not of the model, and not of a large array."""
    arrays = arrays_of(name)
    for mesh, each in loads(arrays, list(common_meshes(count_experts(arrays)))).items():
        assert total(each.values()).worst <= LIMIT, mesh
        large = {array.key: load.worst for array, load in each.items() if array.nbytes >= LARGE}
        assert all(worst <= LIMIT for worst in large.values()), (mesh, large)


EXPERT_MESHES = ("fsdp=4,expert=8", "fsdp=16,expert=4", "expert=16", "fsdp=2,tensor=2,expert=4")


@pytest.mark.parametrize("name", TREES)
def test_a_mesh_with_experts_that_is_named_is_read_without_waste(name: str) -> None:
    """Every array, by MaxText 0.2.5's axes: attention, experts and router are cut by three different rules there."""
    arrays = arrays_of(name)
    if not count_experts(arrays):
        return
    for text in EXPERT_MESHES:
        mesh = Mesh.parse(text)
        (each,) = loads(arrays, [mesh], named=(mesh,)).values()
        assert {array.key: load.worst for array, load in each.items() if load.worst != 1} == {}, text


def test_more_experts_than_64_are_served_where_chunks_are_large() -> None:
    """A device for each expert: the scanned models, and the large ones; a small model's experts share chunks."""
    for name, expert in {
        "deepseek3-671b--unscan": 256,
        "kimi-k2-1t--unscan": 128,
        "qwen3-30b-a3b--scan": 128,
        "qwen3-next-80b-a3b--scan": 512,
    }.items():
        (each,) = loads(arrays_of(name), [Mesh("", {"expert": expert})]).values()
        assert total(each.values()).worst <= LIMIT, name
    (each,) = loads(arrays_of("qwen3-30b-a3b--unscan"), [Mesh("", {"expert": 128})]).values()
    assert 1.5 < total(each.values()).worst <= 2


@pytest.mark.slow("plans two models of a trillion parameters")
def test_shards_without_a_mesh_are_few_and_their_indexes_small() -> None:
    """A shard is an object: one for 100 KB on average, even of the smallest experts; an index takes at most a sixteenth
    of a chunk.
    """
    for name in TREES:
        arrays = arrays_of(name)
        shards = 0
        for array in arrays:
            spec = make_grid(
                array, SourceCost(2), (), base_rules(), ConvertOptions().unit_bytes, Format(), count_experts(arrays)
            ).spec
            shards += math.prod(spec.grid)
            packed = math.prod(spec.shard) // math.prod(spec.chunk)
            assert packed == 1 or packed * 16 * 16 <= math.prod(spec.chunk) * 2
        assert sum(array.nbytes for array in arrays) / shards > 1e5, name
