"""MaxText's own bits: what its converter made of these checkpoints, ours makes too, bit for bit, in whatever way it is
asked to work.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import convert, converted, digest, digests, given, given_arrays, input_digest, read_tensors, restore

from weightbeam.model_mappings.versions import NEWEST

BIAS, LAYOUTS = "missing keys:\n{'MoEBiasVar-decoder-moe_layers", ("scanned", "unscanned")
STOPS = {  # where the converter of 0.2.5 ends with an error, and what it says
    **{(case, layout): BIAS for case in ("deepseek3", "deepseek3.2") for layout in LAYOUTS},
    (
        "deepseek2",
        "scanned",
    ): "cannot reshape array of size 6144 into shape (4,96)",  # a router's kernel stacked on axis 0, likewise
    ("mixtral", "scanned"): "MoeBlock_0-gate-kernel'. Expected (64, 4, 4), but got (4, 64, 4)",
    ("gemma4-small", "scanned"): "gemma4-e2b requires scan_layers=False",
}
CASES = [case for case in given() if case != "deepseek3-mtp-standalone"]


def options_of(case: str, layout: str, version: str = "e591f30") -> list[str]:
    """Those of what a version of MaxText, whose bits these are, was told."""
    dtype = "float32" if case.endswith("-fp32") else "bfloat16"
    scan = "true" if layout == "scanned" else "false"
    vocab = str(given()[case]["vocab"])
    return [
        "--maxtext_model",
        given()[case]["maxtext_model"],
        "--vocab_size",
        vocab,
        "--scan_layers",
        scan,
        "--maxtext",
        version,
        "--save_dtype",
        dtype,
    ]


@pytest.mark.parametrize("case", given())
def test_the_inputs_are_those_that_maxtext_was_given(generated: Path, case: str) -> None:
    """If this fails, transformers writes other checkpoints than it did (5.23.0); the digests below say nothing then."""
    assert input_digest(read_tensors(generated / "cases" / case)) == given()[case]["inputs"]


# collections of MaxText's DeepSeek V4 that its converter leaves out; see the test below
VARIABLES = ("Tid2EidVar.", "MoEBiasVar.")


def made(version: str) -> list[tuple[str, str]]:
    """The cases, each with a layout, that the converter of a version of MaxText converts."""
    of = given(version)
    return [(case, layout) for case in CASES for layout in LAYOUTS if isinstance(of.get(case, {}).get(layout), dict)]


def as_made(source: Path, out: Path, wanted: dict[str, list], *options: str) -> dict[str, np.ndarray]:
    """What we make of a case, in MaxText's dtypes.

    MaxText stores some arrays as float32 whatever its `--save_dtype`: a bfloat16 norm plus a Python float is promoted,
    or a norm of ones is made. Ours have one dtype. Such an array must have MaxText's bits in a conversion to float32,
    and be those values, rounded once, in the conversion to bfloat16.
    """
    arrays = converted(source, out / "out", *options)
    promoted = {key for key, (_, dtype, _) in wanted.items() if dtype == "float32" != options[-1]} & set(arrays)
    if promoted:
        unrounded = converted(source, out / "unrounded", *options[:-1], "float32")
        for key in promoted:
            assert arrays[key].dtype.name == options[-1]
            assert digest(unrounded[key].astype(arrays[key].dtype)) == digest(arrays[key]), key
            arrays[key] = unrounded[key]
    return arrays


@pytest.mark.parametrize(("case", "layout"), made("e591f30"))
def test_equals_maxtexts_converter(generated: Path, tmp_path: Path, case: str, layout: str) -> None:
    """Names, shapes, dtypes and bits, through the command line and a stock restore."""
    wanted = given_arrays(case, layout)
    arrays = as_made(generated / "cases" / case, tmp_path, wanted, *options_of(case, layout))
    variables = {key for key in arrays if key.startswith(VARIABLES)}
    assert bool(variables) == (case == "deepseek4")
    for key in variables:
        del arrays[key]
    assert digests(arrays) == wanted


@pytest.mark.parametrize(("case", "layout"), made(NEWEST))
def test_equals_the_newest_maxtexts_converter(generated: Path, tmp_path: Path, case: str, layout: str) -> None:
    """The same of what comes from the package index."""
    assert input_digest(read_tensors(generated / "cases" / case)) == given(NEWEST)[case]["inputs"]
    wanted = given_arrays(case, layout, NEWEST)
    arrays = as_made(generated / "cases" / case, tmp_path, wanted, *options_of(case, layout, NEWEST))
    spare = {key.partition(".")[2] for key in arrays if key.startswith(VARIABLES)}  # which parameters repeat
    assert digests({key: values for key, values in arrays.items() if key not in spare}) == wanted


def test_what_the_newest_maxtexts_converter_stops_at() -> None:
    """With which words; docs/explanation/numerics.md tells them."""
    stopped = {
        (case, layout): about[layout]
        for case, about in given(NEWEST).items()
        for layout in LAYOUTS
        if isinstance(about.get(layout), str)
    }
    assert stopped.keys() == STOPS.keys()
    for place, words in STOPS.items():
        assert words in stopped[place]


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
def test_variables_that_maxtext_leaves_out(generated: Path, tmp_path: Path, layout: str) -> None:
    """DeepSeek V4's routing tables and router biases are the input's own tensors; scanned, the biases are stacked on
    their first axis.
    """
    source = generated / "cases" / "deepseek4"
    made = converted(source, tmp_path / "out", *options_of("deepseek4", layout))
    gate = {
        layer: read_tensors(source)[
            f"model.layers.{layer}.mlp.gate.{'tid2eid' if layer < 3 else 'e_score_correction_bias'}"
        ]
        for layer in range(7)
    }
    wanted = {f"Tid2EidVar.decoder.layers_{layer}.mlp.MoeBlock_0.tid2eid": gate[layer] for layer in range(3)}
    if layout == "scanned":
        blocks = {place: np.stack([gate[layer] for layer in range(3 + place, 7, 2)]) for place in (0, 1)}
        wanted |= {
            f"MoEBiasVar.decoder.scanned_blocks.layers_{place}.mlp.MoeBlock_0.gate.bias": biases
            for place, biases in blocks.items()
        }
    else:
        wanted |= {f"MoEBiasVar.decoder.layers_{layer}.mlp.MoeBlock_0.gate.bias": gate[layer] for layer in range(3, 7)}
    assert digests({key: values for key, values in made.items() if key.startswith(VARIABLES)}) == digests(wanted)


VARIANTS = {
    "one mesh": ("llama3.1", "scanned", "--mesh fsdp=4"),
    "experts over a mesh": ("qwen3-moe", "scanned", "--mesh fsdp=2,expert=4"),
    "experts over a mesh, unscanned": ("qwen3-moe", "unscanned", "--mesh expert=8"),
    "tensor parallel": ("deepseek3", "unscanned", "--mesh fsdp=4,tensor=2"),
    "two meshes at once": ("mixtral", "scanned", "--mesh fsdp=8 --mesh expert=4,tensor=2"),
    "a mesh that doesn't divide": ("deepseek3", "scanned", "--mesh fsdp=7"),
    "many units": ("deepseek3", "scanned", "--unit_bytes 60000"),
    "many units, unscanned": ("deepseek3.2", "unscanned", "--unit_bytes 60000"),
    "many units in float32": ("llama3.1-fp32", "scanned", "--unit_bytes 60000"),
    "many units over a mesh": ("qwen3-moe", "scanned", "--unit_bytes 60000 --mesh fsdp=4,expert=2"),
    "for Pathways": ("deepseek3.2", "scanned", "--use_ocdbt false --use_zarr3 false"),
    "for Pathways, many units over a mesh": (
        "qwen2.5-tied",
        "unscanned",
        "--use_ocdbt false --use_zarr3 false --unit_bytes 60000 --mesh fsdp=16",
    ),
    "folders of zarr3": ("qwen2.5", "scanned", "--use_ocdbt false --mesh fsdp=2"),
    "a database of zarr2": ("qwen3", "scanned", "--use_zarr3 false"),
    "zstd": ("mixtral", "unscanned", "--compression zstd"),
    "zstd in zarr2 folders": (
        "deepseek2",
        "scanned",
        "--compression zstd --use_ocdbt false --use_zarr3 false --unit_bytes 100000",
    ),
    "zstd over a mesh": ("deepseek3", "scanned", "--compression zstd --mesh fsdp=4,expert=2 --unit_bytes 100000"),
    "another step": ("qwen3-tied", "unscanned", "--step 7"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_no_option_of_the_storage_changes_a_bit(generated: Path, tmp_path: Path, name: str) -> None:
    """Meshes, units, formats and compression decide where bytes lie, never what they are."""
    case, layout, options = VARIANTS[name]
    arrays = converted(generated / "cases" / case, tmp_path / "out", *options_of(case, layout), *options.split())
    assert digests(arrays) == given_arrays(case, layout)


@pytest.mark.parametrize("axis", [0, 2])
def test_param_scan_axis_moves_the_layers_and_nothing_else(generated: Path, tmp_path: Path, axis: int) -> None:
    """With the layers' axis moved back to 1, MaxText's default, every array has MaxText's bits."""
    source = generated / "cases" / "qwen3-moe"
    arrays = converted(source, tmp_path / "out", *options_of("qwen3-moe", "scanned"), "--param_scan_axis", str(axis))
    moved = 0
    for key, wanted in given_arrays("qwen3-moe", "scanned").items():
        values = arrays[key]
        if ".layers." in key:
            at = min(axis, values.ndim - 1)
            assert values.shape[at] == 4
            moved += at != 1
            values = np.moveaxis(values, at, 1)
        assert digest(values) == wanted, key
    assert moved >= 8


def test_mtp_equals_maxtexts_script_within_float16(generated: Path, tmp_path: Path) -> None:
    """MaxText converts multi-token prediction with a stand-alone script that stores every array as float16. Its
    bfloat16 inputs are ours, so our bits rounded once to float16 must be its bits; names and shapes are the same.
    """
    case = "deepseek3-mtp-standalone"
    step = convert(generated / "cases" / case, tmp_path / "out", *options_of(case, "scanned"), "--mtp", "true")
    arrays = restore(step)
    assert {values.dtype.name for values in arrays.values()} == {"bfloat16"}
    assert sum(key.startswith("mtp_block.") for key in arrays) == 20
    assert digests({key: values.astype(np.float16) for key, values in arrays.items()}) == given_arrays(case, "scanned")


def test_without_mtp_the_same_files_give_the_model_alone(generated: Path, tmp_path: Path) -> None:
    """The multi-token-prediction layer is left out, and nothing else changes: the arrays of the case without it."""
    arrays = converted(
        generated / "cases" / "deepseek3-mtp-standalone", tmp_path / "out", *options_of("deepseek3", "scanned")
    )
    assert digests(arrays) == given_arrays("deepseek3", "scanned")
