"""`convert --lora`, end to end: a real run, stock Orbax, the record, `verify` and `plan`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support import F32, call, convert, read_file, reference, restore, unfuse

MODEL = ("--maxtext_model", "llama3.1-8b")


def test_a_checkpoint_with_adapters_in_it(written: Path, tmp_path: Path) -> None:
    """What stock Orbax restores is MaxText's layout of what PEFT merged; `verify` finds it right, with the adapters and
    not without.
    """
    folder = written / "plain"
    adapters = ("--lora", str(folder / "adapter"), "--lora", f"{written / 'second' / 'adapter'},0.5")
    step = convert(
        folder / "base", tmp_path / "out", *adapters, *MODEL, "--save_dtype", "float32", "--unit_bytes", "40000"
    )
    config = json.loads((folder / "base" / "config.json").read_text())
    wanted = reference(
        config, unfuse(config, read_file(written / "both" / "merged.safetensors")), F32, paired_rope=True
    )
    made = restore(step)
    assert set(made) == set(wanted)
    for key, values in wanted.items():
        np.testing.assert_allclose(made[key], values, rtol=2e-6, atol=2e-6)
    record = json.loads((step / "conversion.json").read_text())
    assert [(adapter["weight"], adapter["files"][0]["name"]) for adapter in record["adapters"]] == [
        (1.0, "adapter_model.safetensors"),
        (0.5, "adapter_model.safetensors"),
    ]
    assert call("verify", "--source", folder / "base", "--checkpoint", tmp_path / "out") == 0
    # one of them is missing
    assert (
        call("verify", "--source", folder / "base", "--checkpoint", tmp_path / "out", "--lora", folder / "adapter") == 1
    )


def test_units_in_bits(written: Path, tmp_path: Path) -> None:
    """However the work is cut, and stacked or not, an element has the same bits."""
    folder = written / "experts"
    options = ("--lora", str(folder / "adapter"))
    large = restore(convert(folder / "base", tmp_path / "large", *options))
    small = restore(convert(folder / "base", tmp_path / "small", *options, "--unit_bytes", "30000", "--mesh", "fsdp=4"))
    for key, values in large.items():
        np.testing.assert_array_equal(values, small[key])


def test_resumed_with_another_adapter(written: Path, tmp_path: Path, capsys) -> None:
    """A stopped conversion goes on with its own adapters only."""
    folder = written / "plain"
    options = ("--source", folder / "base", "--output", tmp_path / "out", *MODEL)
    assert call("convert", *options, "--lora", folder / "adapter") == 0
    assert call("convert", *options, "--lora", written / "second" / "adapter", "--resume") == 2
    assert "was made with other options" in capsys.readouterr().err
    assert call("convert", *options, "--lora", folder / "adapter", "--resume") == 0


def test_the_plan_says_what_each_tensor_is_for(written: Path, tmp_path: Path, capsys) -> None:
    """In a line, and as JSON each."""
    folder = written / "modules_to_save"
    assert (
        call(
            "plan", "--source", folder / "base", "--lora", folder / "adapter", *MODEL, "--json", tmp_path / "plan.json"
        )
        == 0
    )
    assert "4 merged; 7 put" in capsys.readouterr().out
    (adapter,) = json.loads((tmp_path / "plan.json").read_text())["adapters"]
    assert set(adapter["tensors"]) == set(read_file(folder / "adapter" / "adapter_model.safetensors"))
    assert adapter["tensors"]["base_model.model.lm_head.weight"] == "put into lm_head.weight"
