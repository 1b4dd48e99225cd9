"""`weightbeam reshard --lora`: a checkpoint and an adapter of MaxText's become one checkpoint, with the bits of
`convert --lora`.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from lazily import lazily
from support import assert_same_bits, call, convert, flatten, make_release, read_file, read_tensors, restore

from weightbeam.pipelines.commands.reshard import plan, plan_dict, plan_rows
from weightbeam.transforms.stages.staged import load

jnp = lazily("jax.numpy")
ocp = lazily("orbax.checkpoint")

SAID = ("--save_dtype", "float32", "--maxtext_model", "llama3.1-8b")
# MaxText multiplies it by 1 / √8, which no float is: the sum is rounded after that here, and before it in `convert
# --lora`
QUERY = "query"


@pytest.fixture(scope="module")
def made(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each layout: the base, the adapter as MaxText's, and what `convert --lora` makes of both."""
    folder, case = tmp_path_factory.mktemp("made"), written / "plain"
    for name, layout in (("scanned", ()), ("apart", ("--scan_layers", "false"))):
        convert(case / "base", folder / name / "base", *SAID, *layout)
        convert(
            case / "base",
            folder / name / "adapter",
            *SAID,
            *layout,
            "--lora",
            str(case / "adapter"),
            "--adapter_only",
            "true",
        )
        convert(case / "base", folder / name / "merged", *SAID, *layout, "--lora", str(case / "adapter"))
    return folder


@pytest.fixture(scope="module")
def trained(made: Path) -> Path:
    """The adapter as training leaves it: a state of `params.params`, moments and a step, each array one compressed
    chunk.
    """
    factors = flatten(ocp.PyTreeCheckpointer().restore(made / "scanned" / "adapter" / "0" / "items"))
    tree: dict = {}
    for key, values in factors.items():
        at = tree
        for component in key.removesuffix(".value").split(".")[:-1]:
            at = at.setdefault(component, {})
        at[key.removesuffix(".value").split(".")[-1]] = jnp.asarray(values)
    state = {"params": {"params": tree}, "opt_state": {"0": {"mu": {"params": tree}}}, "step": jnp.int32(5)}
    custom = {"lora": {"lora_rank": 4, "lora_alpha": 6}, "scan_layers": True}
    with ocp.CheckpointManager(made / "trained", item_names=("items",)) as run:
        run.save(5, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)), custom_metadata=custom)
    return made / "trained"


def merged(base: Path, adapter: object, output: Path, *options: object) -> dict[str, np.ndarray]:
    """The parameters of the result."""
    assert call("reshard", base, output, "--lora", adapter, *options) == 0
    return restore(output / "0")


def assert_merged(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """The same bits; of the query the same but for the last ones."""
    assert_same_bits(
        {key: got[key] for key in got if QUERY not in key}, {key: wanted[key] for key in wanted if QUERY not in key}
    )
    for key in wanted:
        np.testing.assert_allclose(got[key], wanted[key], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("base", "adapter", "options"),
    [
        ("scanned", "scanned", ()),
        ("scanned", "scanned", ("--mesh", "fsdp=4,tensor=2", "--unit_bytes", "20000")),
        ("scanned", "apart", ("--use_ocdbt", "false", "--compression", "zstd")),
        ("apart", "apart", ("--mesh", "fsdp=8")),
        ("apart", "scanned", ()),
    ],
)
def test_the_bits_of_convert(made: Path, tmp_path: Path, base: str, adapter: str, options: tuple[str, ...]) -> None:
    """Layers stacked or apart on either side, in any chunks."""
    got = merged(made / base / "base", made / adapter / "adapter", tmp_path / "out", *options)
    assert_merged(got, restore(made / base / "merged" / "0"))


def test_as_peft_merges(made: Path, written: Path, tmp_path: Path) -> None:
    """Restacked on the way, and exported: the release that PEFT's `merge_and_unload` makes."""
    got = merged(made / "scanned" / "base", made / "scanned" / "adapter", tmp_path / "out", "--scan_layers", "false")
    assert_merged(got, restore(made / "apart" / "merged" / "0"))
    assert call("export", tmp_path / "out", tmp_path / "release") == 0
    exported, base = read_tensors(tmp_path / "release"), read_tensors(written / "plain" / "base")
    for name, values in read_file(written / "plain" / "merged.safetensors").items():
        np.testing.assert_allclose(exported[name], values, rtol=3e-6, atol=3e-6, err_msg=name)
    assert any(values.tobytes() != base[name].tobytes() for name, values in exported.items())


def test_a_trained_adapter(made: Path, trained: Path, tmp_path: Path) -> None:
    """Its moments aren't the weights', its chunks are unpacked where a unit is small, and a bfloat16 base is rounded
    once.
    """
    small = ("--unit_bytes", "30000")
    got = merged(made / "scanned" / "base", trained, tmp_path / "out", *small)
    assert_merged(got, restore(made / "scanned" / "merged" / "0"))
    assert any(
        "lora" in array.key
        for array in plan(str(made / "scanned" / "base"), lora=str(trained), unit_bytes=30000).unpacked
    )
    assert not list((tmp_path / "out").glob("*/unpacked*"))
    rounded = merged(
        made / "scanned" / "base", trained, tmp_path / "half", "--save_dtype", "bfloat16", "--mesh", "fsdp=2"
    )
    assert_same_bits(rounded, {key: values.astype(ml_dtypes.bfloat16) for key, values in got.items()})


def test_an_adapter_resharded_is_one_still(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bits are those of the adapter that is made so, and what is said to MaxText is said of an adapter."""
    step = tmp_path / "out" / "0"
    assert call("reshard", made / "scanned" / "adapter", tmp_path / "out", "--scan_layers", "false") == 0
    said = capsys.readouterr()
    assert f"in MaxText: lora.enable_lora=true lora.lora_restore_path={step / 'items'} lora.lora_rank=4" in said.out
    assert "isn't the model" not in said.err
    both = (step, made / "apart" / "adapter" / "0")
    assert_same_bits(*(flatten(ocp.PyTreeCheckpointer().restore(one / "items")) for one in both))


def test_half_of_one_twice(made: Path, tmp_path: Path) -> None:
    """Products are multiplied by their weights and summed; the plan and the record say which arrays are merged, and
    which took part.
    """
    adapter = made / "scanned" / "adapter"
    half = f"{adapter},0.5"
    got = merged(made / "scanned" / "base", half, tmp_path / "out", "--lora", half)
    for key, values in restore(made / "scanned" / "merged" / "0").items():
        np.testing.assert_allclose(got[key], values, rtol=2e-6, atol=2e-6)
    planned = plan(str(made / "scanned" / "base"), lora=[half, half])
    said = plan_dict(planned)
    assert [(one["lora_rank"], one["lora_alpha"], one["weight"], len(one["arrays"])) for one in said["adapters"]] == [
        (4, 6, 0.5, 14)
    ] * 2
    assert {f"merged into {key}" for key, array in said["arrays"].items() if array["lossy"]} == set(
        said["adapters"][0]["arrays"].values()
    )
    said = f"{adapter}/0/items: rank 4, alpha 6, weight 0.5; 14 arrays merged"
    assert [row for row in plan_rows(planned, 4) if row[0] == "adapter"] == [("adapter", said)] * 2
    assert load(planned.stage()).hash == planned.hash
    record = json.loads((tmp_path / "out" / "0" / "conversion.json").read_text())
    assert [one["weight"] for one in record["adapters"]] == [0.5, 0.5]


def test_verify_says_that_it_cant_judge(
    made: Path, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for PEFT's own adapter, which it can."""
    merged(made / "scanned" / "base", made / "scanned" / "adapter", tmp_path / "out", "--save_dtype", "bfloat16")
    source = ("--source", written / "plain" / "base", "--checkpoint", tmp_path / "out")
    assert call("verify", *source) == 2
    assert "an adapter of MaxText's" in capsys.readouterr().err
    assert call("verify", *source, "--lora", written / "plain" / "adapter") == 0


def test_what_cant_be_merged_is_said(
    made: Path, trained: Path, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, all at once, before anything is written."""
    base = made / "scanned" / "base"
    for adapter, said in (
        ((written / "plain" / "adapter",), "is an adapter of PEFT's"),
        ((base,), "holds other arrays than the factors of a LoRA"),
        ((tmp_path / "none",), "none"),
    ):
        assert call("reshard", base, tmp_path / "out", "--lora", *adapter) == 2
        assert said in capsys.readouterr().err
    for checkpoint in trained.rglob("_CHECKPOINT_METADATA"):
        about = json.loads(checkpoint.read_text())
        checkpoint.write_text(json.dumps({**about, "custom_metadata": {"scan_layers": True}}))
    assert call("reshard", base, tmp_path / "out", "--lora", trained, "--lora", base) == 2
    message = capsys.readouterr().err
    assert "name it with --lora_alpha" in message
    assert "holds other arrays" in message
    assert not (tmp_path / "out").exists()
    assert_merged(
        merged(base, trained, tmp_path / "out", "--lora_alpha", "6"), restore(made / "scanned" / "merged" / "0")
    )


def test_another_models_adapter(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its factors have other sizes, each of which is said."""
    convert(make_release(tmp_path / "hf"), tmp_path / "base", *SAID)
    assert call("reshard", tmp_path / "base", tmp_path / "out", "--lora", made / "scanned" / "adapter") == 2
    message = capsys.readouterr().err
    assert "mlp.wo.kernel_lora_a: (56, 2, 4) in the checkpoint, by config.json it is (48, 2, 4)" in message
    assert "mlp.wi_0.kernel_lora_b: (4, 2, 56)" in message
    assert not (tmp_path / "out").exists()
