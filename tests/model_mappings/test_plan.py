"""What a plan says of an array besides its shape: key, dtype, and whether its values are the tensor's to the bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.ops import Scale, Shift
from weightbeam.model_mappings.plan import Problem, TensorSpec, expand, holds, key_of, make_arrays
from weightbeam.model_mappings.rules import Segment, rule, stack


def make_array(stored, save, *ops, encoding=None, layers=0):
    """The array that one rule makes of tensors of a dtype."""
    rules = [stack("", "{layer}.", layers, [rule("scale", "w", "embed", "norm", *ops)], "layers" if layers else "")]
    parts = expand(
        Family("made-up", {}, lambda c, layout: dict(embed=3), lambda c, layout: rules, lambda c, layout: {}, ""),
        Config(),
        Layout(),
    )
    specs = {
        f"{layer}.w": TensorSpec((3,), _dtype(name), "model.safetensors", encoding)
        for layer, name in enumerate(stored.split())
    }
    (array,) = make_arrays(parts, specs, _dtype(save))
    return array


def _dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize(
    ("stored", "save"),
    [
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "bfloat16"),
    ],
)
def test_exact(stored, save):
    """The dtype holds every value of the tensor's."""
    assert make_array(stored, save).lossy is None


@pytest.mark.parametrize(
    ("stored", "save"),
    [("float32", "bfloat16"), ("float64", "float32"), ("float64", "bfloat16"), ("float16", "bfloat16")],
)
def test_rounded(stored, save):
    """It doesn't: the plan names both dtypes."""
    assert make_array(stored, save).lossy == f"{stored}, rounded to {save}"


@pytest.mark.parametrize("wide", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "narrow",
    ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"],
)
def test_holds(wide, narrow):
    """`holds` agrees with trying every finite value of the narrower dtype."""
    dtype = _dtype(narrow)
    values = np.arange(2 ** (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}").view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        assert holds(_dtype(wide), dtype) == (values.astype(_dtype(wide)).astype(np.float32) == values).all()


def test_rounded_in_one_layer():
    """One float32 layer among bfloat16 ones is enough."""
    assert make_array("bfloat16 bfloat16 float32", "bfloat16", layers=[0, 1, 2]).lossy == "float32, rounded to bfloat16"
    assert make_array("bfloat16 bfloat16 bfloat16", "bfloat16", layers=[0, 1, 2]).lossy is None


def test_quantised():
    """A dequantised value is a product: rounded, and the encoding is named."""
    assert make_array("float32", "bfloat16", encoding="fp8 128x128").lossy == "fp8 128x128, rounded once to bfloat16"


def test_lossy_ops():
    """A scale by a power of two is exact, any other isn't, a shift never is."""
    assert make_array("bfloat16", "bfloat16", Scale(0.125)).lossy is None
    assert make_array("bfloat16", "bfloat16", Scale(128**-0.5)).lossy == "scaled by 0.0883883, rounded once to bfloat16"
    assert make_array("bfloat16", "bfloat16", Shift(1.0)).lossy == "shifted by +1, rounded once to bfloat16"


def test_rounded_behind_an_exact_op():
    """A head of 64 scales the query by 1/8, exactly; a float32 checkpoint is rounded all the same."""
    assert make_array("float32", "bfloat16", Scale(0.125)).lossy == "float32, rounded to bfloat16"


@pytest.mark.parametrize(("total", "fill"), [(5, 0.0), (3, None)])
def test_fill_is_for_what_no_cell_makes(total, fill):
    """A padded array has the fill of its rule; where the cells tile it there is nothing to fill."""
    rules = [stack("", "", 0, [rule("scale", "w", "embed", "norm", embed=Segment(0, 3, total, fill=0.0))])]
    family = Family("made-up", {}, lambda c, layout: {}, lambda c, layout: rules, lambda c, layout: {}, "")
    (array,) = make_arrays(expand(family, Config(), Layout()), {}, _dtype("bfloat16"))
    assert (array.shape, array.fill) == ((total,), fill)


def test_bytes():
    """`nbytes` counts elements by the stored dtype, not the tensor's."""
    assert make_array("bfloat16", "float32").nbytes == 12
    assert make_array("float32 float32", "bfloat16", layers=[0, 1]).nbytes == 12


def test_rules_that_disagree():
    """Two rules of one array must make the same shape and names: a fault of the table, found when it is expanded."""

    def parts(*rules):
        stacks = [stack("", "", 0, rules)]
        return expand(
            Family(
                "made-up",
                {},
                lambda c, layout: dict(embed=3, mlp=4),
                lambda c, layout: stacks,
                lambda c, layout: {},
                "",
            ),
            Config(),
            Layout(),
        )

    with pytest.raises(ValueError, match=r"kernel: two rules disagree: \(3,\) .* \(4,\)"):
        parts(rule("kernel", "a", "embed", "norm"), rule("kernel", "b", "mlp", "norm"))
    with pytest.raises(ValueError, match="kernel: two rules disagree"):
        parts(rule("kernel", "a", "embed", "norm"), rule("kernel", "b", "embed", "embed"))


def test_key_and_problem_as_text():
    """Orbax's dotted key; a problem as one line."""
    assert key_of("params/decoder/decoder_norm/scale") == "params.params.decoder.decoder_norm.scale"
    assert str(Problem("missing", "lm_head.weight", "no file holds it")) == "missing: lm_head.weight: no file holds it"
