"""A PEFT adapter as MaxText's: the product of its factors is what merging adds, in MaxText's layout; what it can't hold
is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lazily import lazily
from support import call, flatten, make_release, peft_adapter

from weightbeam.formats.adapters import open_adapter
from weightbeam.formats.safetensors import open_hf
from weightbeam.model_mappings.boxes import whole
from weightbeam.transforms.execution.boxes import make_boxes
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions
from weightbeam.transforms.stages.staged import load

ocp = lazily("orbax.checkpoint")

PARAMETERS = "params.params."


def plan(folder: Path, *, lora: bool = True, **options: object) -> Conversion:
    """A conversion of a case, with its adapter or without."""
    adapters = [open_adapter(folder / "adapter")] if lora else []
    return plan_conversion(ConvertOptions(save_dtype="float32", **options), open_hf(folder / "base"), adapters)


def arrays(conversion: Conversion) -> dict[str, np.ndarray]:
    """Every array that a conversion makes."""
    assert not conversion.plan.problems
    wanted = [(array, whole(array.shape)) for array in conversion.plan.arrays]
    made, _ = make_boxes(wanted, conversion.encodings)
    return {array.key: values for (array, _), values in zip(wanted, made, strict=True)}


def product(a: np.ndarray, b: np.ndarray, scan_axis: int | None) -> np.ndarray:
    """(in, out) of each layer, stacked as the factors are: MaxText's own delta, as its sources say it."""
    if scan_axis is None:
        return a @ b
    layers = [
        one @ other for one, other in zip(np.moveaxis(a, scan_axis, 0), np.moveaxis(b, scan_axis, 0), strict=True)
    ]
    return np.stack(layers)


@pytest.mark.parametrize("case", ["plain", "one-layer", "rslora", "patterns"])
@pytest.mark.parametrize("layout", [{}, {"scan_layers": False}, {"param_scan_axis": 0}])
@pytest.mark.parametrize("model", ["llama3.1-8b", "llama2-7b"])  # paired rotary halves, and halves apart
def test_the_product_is_what_merging_adds(written: Path, case: str, layout: dict, model: str) -> None:
    """Query's factor and rotary order, the output kernel's axes, layers without an adapter, one rank and one scaling
    for all.
    """
    folder, options = written / case, {"maxtext_model": model, **layout}
    base, merged = arrays(plan(folder, lora=False, **options)), arrays(plan(folder, **options))
    made = plan(folder, adapter_only=True, **options)
    factors = arrays(made)
    assert made.folding is not None
    scaling = made.folding.metadata["lora_alpha"] / made.folding.metadata["lora_rank"]
    scan_axis = layout.get("param_scan_axis", 1) if layout.get("scan_layers", True) else None
    changed = {key for key, values in merged.items() if (values != base[key]).any()}
    assert {f"{key.removeprefix(PARAMETERS)}_lora_{side}.value" for key in changed for side in "ab"} == set(factors)
    for key in changed:
        name = key.removeprefix(PARAMETERS)
        a, b = factors[f"{name}_lora_a.value"], factors[f"{name}_lora_b.value"]
        delta = (merged[key].astype(np.float64) - base[key]).astype(np.float32)
        delta = delta if scan_axis is None else np.moveaxis(delta, scan_axis, 0)
        np.testing.assert_allclose(scaling * product(a, b, scan_axis).reshape(delta.shape), delta, rtol=1e-4, atol=1e-5)
    if case == "plain":  # nothing to fold: the factors are the adapter's own, and so is alpha
        assert made.folding.metadata == {"lora_rank": 4, "lora_alpha": 6}


def test_layers_are_stacked_before_the_rank(written: Path) -> None:
    """Nothing reads an adapter whose rank isn't its last axis; layers apart have none to be stacked on."""
    (problem,) = plan(written / "plain", adapter_only=True, maxtext_model="llama2-7b", param_scan_axis=2).plan.problems
    assert (problem.kind, problem.subject) == ("option", "--param_scan_axis=2")
    asked = {"maxtext_model": "llama2-7b", "scan_layers": False, "param_scan_axis": 2}
    assert not plan(written / "plain", adapter_only=True, **asked).plan.problems


def test_alpha_is_the_number_in_the_file(tmp_path: Path) -> None:
    """16 / 49 · 49 isn't 16."""
    make_release(tmp_path / "base")
    peft_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (32, 32)}, 49)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 16}))
    made = plan(tmp_path, adapter_only=True, maxtext_model="llama2-7b")
    assert made.folding is not None
    assert made.folding.metadata == {"lora_rank": 49, "lora_alpha": 16}


@pytest.mark.parametrize("case", ["dora", "lora_bias", "bias-all", "modules_to_save", "embedding", "experts", "v4"])
def test_what_maxtext_cant_hold_is_refused(written: Path, case: str) -> None:
    """By name, each with what to do instead."""
    problems = plan(written / case, adapter_only=True).plan.problems
    assert problems
    assert all("merge it instead" in problem.message for problem in problems), problems


def test_a_worker_plans_the_same(written: Path) -> None:
    """The adapter is staged, and planned with again."""
    for only in (False, True):
        made = plan(written / "plain", adapter_only=only, maxtext_model="llama2-7b")
        assert load(made.stage()).hash == made.hash
        assert made.hash != plan(written / "plain", lora=False, adapter_only=only, maxtext_model="llama2-7b").hash


def test_the_checkpoint_is_as_maxtext_reads_it(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stock Orbax restores a tree of `.value` leaves from `decoder` on, without a step, and the metadata tell rank and
    alpha.
    """
    folder = written / "patterns"
    options = ("--maxtext_model", "llama3.1-8b", "--save_dtype", "float32", "--adapter_only", "true")
    assert (
        call(
            "convert", "--source", folder / "base", "--lora", folder / "adapter", "--output", tmp_path / "out", *options
        )
        == 0
    )
    step = tmp_path / "out" / "0"
    said = capsys.readouterr().out
    scale = "lora.lora_rank=5 lora.lora_alpha=5"
    assert f"in MaxText: lora.enable_lora=true lora.lora_restore_path={step / 'items'} {scale} scan_layers=true" in said
    assert "only MaxText's SFT applies an adapter; pre_train ignores lora.* without a word" in said
    assert "load_parameters_path" not in said
    tree = ocp.PyTreeCheckpointer().restore(step / "items")
    assert set(tree) == {"decoder"}
    assert tree["decoder"]["layers"]["self_attention"]["query"]["kernel_lora_a"]["value"].shape == (32, 2, 5)
    wanted = arrays(plan(folder, adapter_only=True, maxtext_model="llama3.1-8b"))
    restored = flatten(tree)
    assert set(restored) == set(wanted)
    for key, values in wanted.items():
        np.testing.assert_array_equal(restored[key], values)
    custom = json.loads((step / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    assert custom["scan_layers"] is True
    assert custom["lora"] == {"lora_rank": 5, "lora_alpha": 5}
