"""Meshes and partition specs: MaxText's rules, as Flax applies them."""

from __future__ import annotations

import json

import facts
import pytest
from flax.linen import logical_to_mesh_axes
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEEPSEEK, LLAMA, QWEN3_MOE, headers_only

from transforms.conversion import Options, prepare
from transforms.mesh import Mesh, MeshError, base_rules, mesh_axes, partition_spec

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
    return canonical(logical_to_mesh_axes(names, base_rules()))


def names_of_arrays() -> set[tuple[str | None, ...]]:
    """The logical axes of every array of the families, scanned and unscanned."""
    found = set()
    for config in CONFIGS.values():
        for scan in (True, False):
            conversion = prepare(Options(scan_layers=scan), headers_only(config))
            assert not conversion.plan.problems
            found |= {array.names for array in conversion.plan.arrays}
    return found


def test_the_rules_are_maxtexts() -> None:
    """Those of base.yml, in their order."""
    given_rules = json.loads((facts.HERE / "logical_axis_rules.json").read_text())
    assert [(name, canonical([axes])[0]) for name, axes in base_rules()] == [(name, canonical([axes])[0]) for name, axes in given_rules]
    used = {axis for _, axes in base_rules() for axis in canonical([axes])[0]}
    assert used <= set(mesh_axes())


def test_specs_of_our_arrays_equal_flaxs() -> None:
    """Every combination of logical axes that an array of a family has."""
    names = names_of_arrays()
    assert len(names) > 15
    assert {axes: canonical(partition_spec(axes, base_rules())) for axes in names} == {axes: flax_spec(axes) for axes in names}
    assert any(any(spec) for spec in map(flax_spec, names))


@settings(max_examples=300, deadline=None)
@given(names=st.lists(st.sampled_from(RULE_NAMES), max_size=5, unique=True), empty=st.sets(st.integers(0, 5), max_size=2))
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
    assert canonical(partition_spec(names, rules)) == canonical(logical_to_mesh_axes(names, rules))


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
        ("fdsp=4", "fdsp"), ("model=4", "fsdp, "), ("fsdp=4,fsdp=4", "twice"), ("16", "'16'"),
    ],
)  # fmt: skip
def test_a_mesh_that_cant_be_read(text: str, said: str) -> None:
    """The message repeats what was written, and says what was expected."""
    with pytest.raises(MeshError, match=r"--mesh=") as caught:
        Mesh.parse(text)
    assert said in str(caught.value)
