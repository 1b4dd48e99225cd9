"""The tree of MaxText 0.2.5: a router's bias as a variable, there and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from pairs import each, some
from support import assert_same_bits, call, convert, converted, flatten, read_tensors

from weightbeam.model_mappings.trees import recognize
from weightbeam.model_mappings.versions import VERSIONS

BIAS = "MoeBlock_0.gate.bias"


@pytest.fixture(scope="module")
def folder(generated: Path) -> Path:
    return generated / "cases" / "deepseek3"


@pytest.mark.parametrize("model", some(["models/glm5", "models/hy3"], 2))
def test_so_does_that_of_models_of_pull_requests(generated: Path, tmp_path: Path, model: str) -> None:
    """As 0.2.5 has it in the same layers of its own models."""
    test_the_bias_lies_in_both_places_and_comes_back(generated / model, tmp_path, "true")


@pytest.mark.parametrize("scan", ["true", "false"])
def test_the_bias_lies_in_both_places_and_comes_back(folder: Path, tmp_path: Path, scan: str) -> None:
    """Layers on the first axis of the variable, on the second of the parameter; the release comes back to the bit."""
    arrays = converted(folder, tmp_path / "out", "--maxtext", "0.2.5", "--scan_layers", scan)
    variables = {key.removeprefix("MoEBiasVar."): values for key, values in arrays.items() if "MoEBiasVar" in key}
    assert variables
    assert all(key.endswith(BIAS) for key in variables)
    assert_same_bits({key: values.T for key, values in variables.items()}, {key: arrays[key] for key in variables})
    earlier = converted(folder, tmp_path / "earlier", "--maxtext", "e591f30", "--scan_layers", scan)
    assert_same_bits({key: values for key, values in arrays.items() if "MoEBiasVar" not in key}, earlier)
    assert call("verify", "--source", folder, "--checkpoint", tmp_path / "out") == 0
    assert call("export", tmp_path / "out", tmp_path / "back", "--like", folder) == 0
    back, before = read_tensors(tmp_path / "back"), read_tensors(folder)
    assert back.keys() == before.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(back[name].view("u1"), values.view("u1"), err_msg=name)


@pytest.mark.parametrize(("case", "spare"), [("deepseek3", BIAS), ("deepseek4", "tid2eid")])
def test_what_only_repeats_a_variable_may_be_missing(generated: Path, tmp_path: Path, case: str, spare: str) -> None:
    """The parameter that earlier versions had in its place, or the variable, in somebody else's checkpoint."""
    from flax.traverse_util import unflatten_dict

    release = generated / "cases" / case
    convert(release, tmp_path / "ours", "--maxtext", "0.2.5")
    arrays = flatten(ocp.PyTreeCheckpointer().restore(tmp_path / "ours" / "0" / "items"))
    theirs = {key: one for key, one in arrays.items() if not (key.startswith("params.params.") and key.endswith(spare))}
    assert len(theirs) < len(arrays)
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", unflatten_dict(theirs, sep="."))
    assert call("verify", "--source", release, "--checkpoint", tmp_path / "theirs") == 0


def test_a_training_state_holds_the_newest_bias_with_its_modules() -> None:
    """What training began with is state, where it is kept."""
    where = ("decoder", "moe_layers", "DeepSeekMoeBlock_0", *BIAS.split("."))
    begun, newest = ("params", "MoEBiasVar", *where), ("nnx_aux", "model", *where, "value")
    kernel = ("params", "params", "decoder", "decoder_norm", "scale")
    for paths in ([begun, kernel, newest], [newest, kernel, begun]):
        tree = recognize([*paths, ("nnx_aux", "model", "rngs", "count")])
        assert tree.weights[".".join(begun)] == ".".join(newest)
        assert set(tree.state) == {".".join(begun), "nnx_aux.model.rngs.count"}
        assert len(tree.weights) == 2


def as_trained(folder: Path, tables: Callable[[np.ndarray], np.ndarray]) -> dict:
    """A state as 0.2.5's trainer saves it of a checkpoint: variables lie with the modules, routing tables in float32."""
    from flax.traverse_util import unflatten_dict

    weights = flatten(ocp.PyTreeCheckpointer().restore(folder / "0" / "items")["params"])
    variables = {key for key in weights if key.startswith(("MoEBiasVar.", "Tid2EidVar."))}
    repeated = {f"params.{key.partition('.')[2]}" for key in variables}
    state = {f"params.{key}": values for key, values in weights.items() if key not in repeated | variables}
    for key in variables:
        values = tables(weights[key]).astype(np.float32) if "tid2eid" in key else weights[key]
        state[f"nnx_aux.model.{key.partition('.')[2]}.value"] = values
    return unflatten_dict(state, sep=".")


@pytest.mark.parametrize("scan", ["true", "false"])
def test_routing_tables_come_back_as_integers(generated: Path, tmp_path: Path, scan: str, capsys: Any) -> None:
    """DeepSeek V4's, which training holds as floats: the release to the bit, in both versions' tree; a table that holds
    something else is refused by its name.
    """
    release = generated / "models" / "deepseek_v4"
    convert(release, tmp_path / "made", "--scan_layers", scan, "--save_dtype", "float32")
    ocp.PyTreeCheckpointer().save(tmp_path / "trained", as_trained(tmp_path / "made", lambda table: table))
    for number, version in enumerate(VERSIONS):
        told = ("--like", release, "--maxtext", version, "--state", "params")
        assert call("reshard", tmp_path / "trained", tmp_path / version, *told) == 0
        held = {key.partition(".")[0] for key in weights(tmp_path / version) if key.endswith("tid2eid")}
        assert held == [{"decoder", "Tid2EidVar"}, {"Tid2EidVar"}][number]
    for one in ("trained", *VERSIONS):
        assert call("export", tmp_path / one, tmp_path / f"{one}-back", "--like", release) == 0
        back, before = read_tensors(tmp_path / f"{one}-back"), read_tensors(release)
        assert_same_bits(back, {name: values for name, values in before.items() if not name.startswith("mtp.")})
    ocp.PyTreeCheckpointer().save(tmp_path / "odd", as_trained(tmp_path / "made", lambda table: table + 0.5))
    capsys.readouterr()
    assert call("export", tmp_path / "odd", tmp_path / "odd-back", "--like", release) == 1
    assert "tid2eid" in (said := capsys.readouterr().err)
    assert "isn't one of int64" in said


def weights(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a checkpoint, as `converted` has them, with or without anything beside them."""
    tree = ocp.PyTreeCheckpointer().restore(folder / "0" / "items")["params"]
    return flatten(tree.pop("params")) | flatten(tree)


@pytest.fixture(scope="module")
def made(generated: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Path]:
    """What `convert` makes of a case, for a version, with its layers stacked or not; each once."""
    place = tmp_path_factory.mktemp("made")

    @functools.cache
    def make(case: str, version: str, scan: str) -> Path:
        folder = place / f"{case}-{version}-{scan}"
        convert(generated / "cases" / case, folder, "--maxtext", version, "--scan_layers", scan)
        return folder

    return make


@pytest.mark.parametrize(
    ("case", "versions", "scan"),
    each(["deepseek3", "deepseek4", "qwen3-next"], [VERSIONS, VERSIONS[::-1]], ["true", "false"]),
)
def test_one_versions_tree_becomes_the_others(
    made: Callable[[str, str, str], Path], tmp_path: Path, case: str, versions: tuple[str, str], scan: str
) -> None:
    """As `convert` makes it of the release, whatever is done with the layers besides; and the record says which it is."""
    before, after = versions
    for layout, state in ((scan, "full"), ({"true": "false", "false": "true"}[scan], "params")):
        options = ("--maxtext", after, "--scan_layers", layout, "--state", state)
        assert call("reshard", made(case, before, scan), tmp_path / layout, *options) == 0
        assert_same_bits(weights(tmp_path / layout), weights(made(case, after, layout)))
        record = json.loads((tmp_path / layout / "0" / "conversion.json").read_text())
        assert record["options"]["maxtext"] == after
