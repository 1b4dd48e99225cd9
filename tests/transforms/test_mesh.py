"""Meshes and partition specs: MaxText's rules, as Flax applies them."""

from __future__ import annotations

import itertools
import json

import facts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazily import lazily
from support import DEEPSEEK, LLAMA, QWEN3_MOE, headers_only

from weightbeam.model_mappings.versions import VERSIONS
from weightbeam.transforms.cutting.mesh import (
    Mesh,
    MeshError,
    RulesError,
    axes_in,
    base_rules,
    mesh_axes,
    model_rules,
    partition_spec,
    read_rules,
)
from weightbeam.transforms.planning.conversion import rules_of
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions
from weightbeam.transforms.stages.staged import load

nn = lazily("flax.linen")

MIXTRAL = LLAMA | dict(model_type="mixtral", num_local_experts=4)
CONFIGS = {
    "llama": LLAMA,
    "mistral": LLAMA | dict(model_type="mistral"),
    "qwen2": LLAMA | dict(model_type="qwen2"),
    "qwen3": LLAMA | dict(model_type="qwen3"),
    "qwen3 moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek v3": DEEPSEEK,
}
RULE_NAMES = sorted({name for name, _ in base_rules()})


def canonical(spec: object) -> tuple[tuple[str, ...], ...]:
    """Flax writes one mesh axis or several, None or nothing: here always a tuple."""
    return tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec)  # type: ignore[attr-defined]


def flax_spec(names: tuple[str | None, ...]) -> tuple[tuple[str, ...], ...]:
    return canonical(nn.logical_to_mesh_axes(names, base_rules()))


def names_of_arrays() -> set[tuple[str | None, ...]]:
    """The logical axes of every array of the families, scanned and unscanned, in both versions of MaxText."""
    found = set()
    for config, scan, version in itertools.product(CONFIGS.values(), (True, False), VERSIONS):
        conversion = plan_conversion(ConvertOptions(scan_layers=scan, maxtext=version), headers_only(config))
        assert not conversion.plan.problems
        found |= {array.logical_axes for array in conversion.plan.arrays}
    return found


def test_the_rules_are_maxtexts() -> None:
    """Those of base.yml, in their order."""
    given_rules = json.loads((facts.HERE / "logical_axis_rules.json").read_text())
    assert [(name, canonical([axes])[0]) for name, axes in base_rules()] == [
        (name, canonical([axes])[0]) for name, axes in given_rules
    ]
    used = {axis for _, axes in base_rules() for axis in canonical([axes])[0]}
    assert used <= set(mesh_axes())


def test_specs_of_our_arrays_equal_flaxs() -> None:
    """Every combination of logical axes that an array of a family has; the rules of both versions are the same."""
    names = names_of_arrays()
    assert len(names) > 15
    assert {"embed_attn", "embed_router", "embed_moe"} <= {axis for axes in names for axis in axes}
    assert {axes: canonical(partition_spec(axes, base_rules())) for axes in names} == {
        axes: flax_spec(axes) for axes in names
    }
    assert any(any(spec) for spec in map(flax_spec, names))


@settings(max_examples=300, deadline=None)
@given(
    names=st.lists(st.sampled_from(RULE_NAMES), max_size=5, unique=True), empty=st.sets(st.integers(0, 5), max_size=2)
)
def test_specs_of_any_names_equal_flaxs(names: list[str], empty: set[int]) -> None:
    """Any logical axes that the rules know, with nameless ones in between: the same mesh axes, each used once."""
    axes: list[str | None] = list(names)
    for at in sorted(empty):
        axes.insert(min(at, len(axes)), None)
    spec = canonical(partition_spec(tuple(axes), base_rules()))
    assert spec == flax_spec(tuple(axes))
    used = [axis for group in spec for axis in group]
    assert len(used) == len(set(used))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_specs_under_any_rules_equal_flaxs(data: st.DataObject) -> None:
    """Rules of any order, with names that stand several times and mesh axes that clash: the algorithm, not the table."""
    mesh = st.sampled_from("abcd")
    assignment = st.one_of(st.none(), mesh, st.lists(mesh, max_size=3, unique=True).map(tuple))
    rules = data.draw(st.lists(st.tuples(st.sampled_from("uvwxyz"), assignment), max_size=10))
    names = tuple(data.draw(st.lists(st.one_of(st.none(), st.sampled_from("uvwxyz")), max_size=4, unique=True)))
    assert canonical(partition_spec(names, rules)) == canonical(nn.logical_to_mesh_axes(names, rules))


def test_a_mesh_is_axes_and_sizes() -> None:
    """Sizes multiply over the mesh axes of an assignment; an axis that isn't named has one part."""
    mesh = Mesh.parse("fsdp=16, expert=4")
    assert (mesh.sizes, mesh.text) == ({"fsdp": 16, "expert": 4}, "fsdp=16, expert=4")
    assert [mesh.ways(axes) for axes in (None, "fsdp", ("fsdp", "expert"), ("tensor",), ())] == [1, 16, 64, 1, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "''"), ("fsdp", "fsdp=16"), ("fsdp=", "fsdp="), ("=4", "=4"), ("fsdp=0", "fsdp=0"), ("fsdp=-2", "fsdp=-2"), ("fsdp=2.0", "fsdp=2.0"),
        ("fsdp=four", "fsdp=four"), ("fsdp=²", "fsdp=²"), ("fsdp=16,", "''"), ("fsdp=4=4", "fsdp=4=4"), ("fsdp=4;expert=2", "fsdp=4;expert=2"),
        ("fdsp=4", "fdsp"), ("model=4", "fsdp, "), ("fsdp=4,fsdp=4", "twice"), ("16", "'16'"), ("fsdp=-1", "all devices that are left"),
    ],
)  # fmt: skip
def test_a_mesh_that_cant_be_read(text: str, said: str) -> None:
    """The message repeats what was written, and says what was expected."""
    with pytest.raises(MeshError, match=r"--mesh=") as caught:
        Mesh.parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("fsdp=-1", [8]), ("fsdp=2,tensor=-1", [2, 4]), ("fsdp=-1,tensor=2", [4, 2]), ("fsdp=16,tensor=-1", [16, 1])],
)
def test_an_axis_takes_the_devices_that_are_left(text: str, sizes: list[int]) -> None:
    """Where it is known how many there are; only one can."""
    assert [*Mesh.parse(text, devices=8).sizes.values()] == sizes
    with pytest.raises(MeshError, match="and expert can't both be all devices that are left"):
        Mesh.parse(f"{text},expert=-1", devices=8)


# --- rules of the user's own, and of a model's ------------------------------------------------------------------------

PURE_FSDP = [["embed", ["fsdp"]], ["embed_vocab", ["fsdp"]], ["exp_with_fsdp", "fsdp"], ["heads", None], ["kv", []]]


def test_a_list_and_a_whole_configuration_replace_the_rules() -> None:
    """JSON's list; one of MaxText's custom_mesh_and_rule, which has its own mesh_axes; one that is based on base.yml;
    one that says so.
    """
    expected = (
        ("embed", ("fsdp",)),
        ("embed_vocab", ("fsdp",)),
        ("exp_with_fsdp", "fsdp"),
        ("heads", None),
        ("kv", ()),
    )
    rules = {"logical_axis_rules": PURE_FSDP}
    for given_file in (
        PURE_FSDP,
        rules | {"mesh_axes": ["fsdp"]},
        rules | {"base_config": "base.yml"},
        rules | {"override_logical_axis_rules": True},
        tuple(
            (name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in PURE_FSDP
        ),  # as MaxText holds them
    ):
        assert read_rules(given_file, base_rules()) == expected


def test_a_models_configuration_overrides_some_rules() -> None:
    """As MaxText merges them: all rules of that name give way, the new ones come last, the others stay in their order."""
    for given_file in (
        {"logical_axis_rules": [["embed", "tensor"]]},
        {"logical_axis_rules": [["embed", "tensor"]], "mesh_axes": [], "override_logical_axis_rules": False},
    ):
        rules = read_rules(given_file, base_rules())
        assert rules == (*((name, axes) for name, axes in base_rules() if name != "embed"), ("embed", "tensor"))


def test_llama2_shards_its_norms_over_fsdp() -> None:
    """What MaxText's llama2-*.yml say; no other model of the families says anything."""
    assert partition_spec(("norm", "layers"), model_rules("llama2-7b")) == ("fsdp", "stage")
    assert (
        partition_spec(("norm", "layers"), model_rules("llama3.1-8b"))
        == partition_spec(("norm", "layers"), base_rules())
        == (("tensor",), "stage")
    )
    conversion = plan_conversion(ConvertOptions(maxtext_model="llama2-70b", mesh=("fsdp=4",)), headers_only(LLAMA))
    (norm,) = (grid for grid in conversion.grids if grid.spec.key.endswith("decoder_norm.scale"))
    assert (norm.partition, norm.spec.shape, norm.spec.chunk) == ({"fsdp=4": ("fsdp",)}, (32,), (8,))


def test_rules_are_part_of_the_plan_and_reach_the_workers() -> None:
    """Another rule, another hash and another grid; a worker makes the same of what is staged."""
    rules = read_rules([["embed", ["rows", "fsdp"]], ["heads", None]], base_rules())
    plain, own = (
        plan_conversion(ConvertOptions(mesh=("fsdp=4",), sharding_rules=given_rules), headers_only(LLAMA))
        for given_rules in (None, rules)
    )
    assert plain.hash != own.hash
    assert load(own.stage()).grids == own.grids
    assert rules_of(load(own.stage()).options) == rules
    assert {grid.partition["fsdp=4"] for grid in own.grids if "mlp.wi_0" in grid.spec.key} == {
        (("rows", "fsdp"), None, None)
    }
    with pytest.raises(MeshError, match="no axis 'rows'"):
        plan_conversion(ConvertOptions(mesh=("rows=4",)), headers_only(LLAMA))
    assert "rows" in axes_in(rules)
    assert (
        plan_conversion(ConvertOptions(mesh=("rows=4",), sharding_rules=rules), headers_only(LLAMA)).grids != own.grids
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "list of rules"), ("embed", "list of rules"), ([], "list of rules"), ({}, "no logical_axis_rules"), ({"mesh_axes": []}, "no logical_axis_rules"),
        ({"logical_axis_rules": {"embed": "fsdp"}}, "list of rules"), ([["embed"]], r'\["embed"\]'), (["embed"], '"embed"'), ([["embed", 4]], "4"),
        ([["embed", ["fsdp", 4]]], "4"), ([[4, "fsdp"]], "4"), ([["embed", ["fsdp", "fsdp"]]], "each once"), ([["embed", {"fsdp": 1}]], "fsdp"),
    ],
)  # fmt: skip
def test_rules_that_cant_be_read(content: object, said: str) -> None:
    """The message repeats the rule, and says what was expected."""
    with pytest.raises(RulesError, match=said):
        read_rules(content, base_rules())
