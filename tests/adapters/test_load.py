"""`load` and `open` with `lora=`: the bits of a conversion with the same adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lazily import lazily
from support import assert_same_bits, convert, flatten, read_file, restore

import weightbeam as wb

jax = lazily("jax")


@pytest.mark.parametrize("case", ["plain", "experts", "dora"])
def test_bits_of_a_conversion(written: Path, tmp_path: Path, case: str) -> None:
    """Adapters with weights, of experts, and with magnitudes."""
    folder = written / case
    lora = [f"{folder / 'adapter'}"] + ([f"{written / 'second' / 'adapter'},0.5"] if case == "plain" else [])
    model = {} if case == "experts" else {"maxtext_model": "llama3.1-8b"}
    options = [word for adapter in lora for word in ("--lora", adapter)] + [
        word for name, value in model.items() for word in (f"--{name}", value)
    ]
    wanted = restore(convert(folder / "base", tmp_path / "out", *options))
    loaded = wb.load(str(folder / "base"), mesh=jax.make_mesh((1,), ("fsdp",)), lora=lora, **model)
    assert_same_bits({key: np.asarray(value) for key, value in flatten(loaded["params"]["params"]).items()}, wanted)
    assert_same_bits(
        {
            key.removeprefix("params.params."): np.asarray(value)
            for key, value in wb.open(folder / "base", lora=lora, **model).items()
        },
        wanted,
    )


def test_a_release_as_it_is(written: Path) -> None:
    """PEFT's own merge, tensor by tensor, and rows of it alone."""
    folder = written / "plain"
    tree = wb.open(str(folder / "base"), lora=str(folder / "adapter"), as_is=True)
    merged = read_file(folder / "merged.safetensors")
    assert set(tree) == set(merged)
    for name, values in merged.items():
        np.testing.assert_allclose(np.asarray(tree[name], np.float32), values.astype(np.float32), rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(tree[name][3:5], np.asarray(tree[name])[3:5])


def test_what_cannot_be_merged_is_refused(written: Path, tmp_path: Path) -> None:
    """Before anything is read: no such adapter; one of another model; a source that is no release."""
    base = str(written / "plain" / "base")
    with pytest.raises(wb.Refused, match="lora"):
        wb.open(base, lora=str(tmp_path / "nowhere"))
    with pytest.raises(wb.Refused, match="adapter"):
        wb.load(base, mesh="fsdp=1", lora=str(written / "experts" / "adapter"))
    step = convert(written / "plain" / "base", tmp_path / "out", "--maxtext_model", "llama3.1-8b")
    with pytest.raises(wb.Refused, match="is merged into a release"):
        wb.load(str(step), mesh="fsdp=1", lora=str(written / "plain" / "adapter"))
