"""`weightbeam merge`: a release with adapters in it, as a release."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from quantised import nf4
from support import BF16, INDEX, call, decoded, read_config, read_file, read_tensors, save, split

from weightbeam.formats.adapters import open_adapter
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import open_hf
from weightbeam.transforms.execution.boxes import arrange, decode, read
from weightbeam.transforms.execution.stack import stack
from weightbeam.transforms.planning.merge_planner import plan_merge
from weightbeam.transforms.planning.merging import Merge, MergeOptions
from weightbeam.transforms.stages.staged import load


def plan(base: Path, *adapters: Path, **options: object) -> Merge:
    """A merge of adapters, planned."""
    lora = tuple((str(adapter), 1.0) for adapter in adapters)
    return plan_merge(MergeOptions(lora, **options), open_hf(base), [open_adapter(adapter) for adapter in adapters])


def made(merge: Merge) -> dict[str, np.ndarray]:
    """Every tensor that a merge writes, put together of what its units make; each element exactly once."""
    assert not merge.plan.problems
    assert merge.files is not None
    values = {name: np.zeros(tensor.shape, tensor.dtype) for name, tensor in merge.files.tensors.items()}
    counts = {name: np.zeros(tensor.shape, int) for name, tensor in merge.files.tensors.items()}
    for number in range(len(merge.units)):
        unit = merge.expand(number)
        fetched = decode(unit.fetches, read(unit.fetches)[0])
        for recipe in unit.recipes:
            part = tuple(slice(*span) for span in recipe.box)
            values[recipe.tensor.name][part] = stack(recipe, arrange(unit.fetches, fetched, recipe.pieces)).reshape(
                values[recipe.tensor.name][part].shape
            )
            counts[recipe.tensor.name][part] += 1
    assert all((count == 1).all() for count in counts.values())
    return values


@pytest.mark.parametrize(
    "case", ["plain", "dora", "modules_to_save", "embedding-dora", "experts", "v4-mixtral", "fan_in_fan_out"]
)
@pytest.mark.parametrize("unit_bytes", [128 << 20, 3000])
def test_the_touched_tensors_are_peft_s_and_the_rest_are_the_release_s(
    written: Path, case: str, unit_bytes: int
) -> None:
    """Under the release's own names, however small the units are; of models without a table, too."""
    folder = written / case
    merge = plan(folder / "base", folder / "adapter", unit_bytes=unit_bytes)
    tensors, base, merged = made(merge), read_tensors(folder / "base"), read_file(folder / "merged.safetensors")
    assert set(tensors) == set(base)
    assert merge.merging.touched
    for name, values in tensors.items():
        if name not in merge.merging.touched:
            np.testing.assert_array_equal(values, base[name])
        elif name in merged:
            np.testing.assert_allclose(values, merged[name], rtol=2e-6, atol=2e-6)
    assert load(merge.stage()).hash == merge.hash


def test_files_stay_as_they_are(written: Path, tmp_path: Path) -> None:
    """Each tensor in the file that it was in, in its dtype."""
    base = {name: values.astype(BF16) for name, values in read_tensors(written / "plain" / "base").items()}
    folder = save(tmp_path / "base", read_config(written / "plain" / "base"), *split(base, 3))
    merge = plan(folder, written / "plain" / "adapter")
    assert merge.files is not None
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {name: tensor.path for name, tensor in merge.files.tensors.items()} == where
    assert {tensor.dtype for tensor in merge.files.tensors.values()} == {BF16}


def quantised(written: Path, folder: Path, names: tuple[str, ...]) -> Path:
    """The base of the case `plain` with some weights in nf4."""
    tensors = {}
    for name, values in read_tensors(written / "plain" / "base").items():
        stored = nf4(name, values.shape, 1)[0] if name.endswith(names) else {name: values.astype(BF16)}
        tensors |= stored
    config = read_config(written / "plain" / "base") | {
        "quantization_config": dict(quant_method="bitsandbytes", load_in_4bit=True)
    }
    return save(folder, config | {"dtype": "float16"}, tensors)


def test_a_quantised_weight_is_written_in_the_model_s_dtype(written: Path, tmp_path: Path) -> None:
    """Its codes and scales are gone, those of the others are the same bytes, and the config names what isn't quantised
    any more.
    """
    folder = quantised(written, tmp_path / "base", ("q_proj.weight", "mlp.up_proj.weight"))
    adapter = written / "second" / "adapter"  # of q_proj and down_proj
    merge = plan(folder, adapter)
    tensors, stored = made(merge), read_tensors(folder)
    gone = {name for name in stored if ".q_proj.weight." in name}
    assert gone
    assert set(tensors) == set(stored) - gone
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == np.float16
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    for name in set(tensors) - set(merge.merging.touched):
        assert tensors[name].tobytes() == stored[name].tobytes()
    assert merge.quantization is not None
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert merge.quantization["llm_int8_skip_modules"] == ["lm_head", *modules]
    assert set(merge.plan.dropped) >= gone


def test_nothing_quantised_left(written: Path, tmp_path: Path) -> None:
    """Then the config says nothing of it."""
    assert (
        plan(quantised(written, tmp_path / "base", ("q_proj.weight",)), written / "second" / "adapter").quantization
        == {}
    )
    folder = quantised(written, tmp_path / "other", ("up_proj.weight",))
    # what is merged isn't quantised: carried through
    assert plan(folder, written / "second" / "adapter").quantization is None


def test_problems_come_all_at_once(written: Path) -> None:
    """Those of the adapter, and that there is none."""
    assert "names no adapter" in str(plan(written / "plain" / "base").plan.problems[0])
    assert plan(written / "experts" / "base", written / "lora_bias" / "adapter").plan.problems


def test_the_hash_tells_adapters_apart(written: Path) -> None:
    """Their files, their weights and the order of the tensors."""
    one = plan(written / "plain" / "base", written / "plain" / "adapter")
    assert one.hash != plan(written / "plain" / "base", written / "second" / "adapter").hash
    half = dataclasses.replace(
        one, adapters=tuple(dataclasses.replace(adapter, weight=0.5) for adapter in one.adapters)
    )
    assert half.hash != one.hash


def test_the_command(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A release that transformers reads: its small files, its config, a record; once there, it isn't replaced."""
    folder, output = written / "plain", tmp_path / "merged"
    asked = ("merge", "--source", folder / "base", "--lora", folder / "adapter", "--output", output)
    assert call(*asked) == 0
    merged = read_file(folder / "merged.safetensors")
    for name, values in read_tensors(output).items():
        np.testing.assert_allclose(values, merged[name], rtol=2e-6, atol=2e-6)
    assert read_config(output) == read_config(folder / "base")
    assert (output / "generation_config.json").exists()
    record = json.loads((output / "weightbeam.json").read_text())
    assert [adapter["source"] for adapter in record["adapters"]] == [str(folder / "adapter")]
    assert len(record["merged"]) == 14
    capsys.readouterr()
    assert call(*asked) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert call(*asked, "--resume") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert call(*asked[:-1], folder / "base") == 2
    assert call("merge", "--source", folder / "base", "--output", tmp_path / "none") == 2
    assert "names no adapter" in capsys.readouterr().err


def test_the_command_on_a_quantised_release(written: Path, tmp_path: Path) -> None:
    """What is written is read again, as what it says it is: the merged weight plain, the others quantised as before."""
    folder = quantised(written, tmp_path / "base", ("q_proj.weight", "mlp.up_proj.weight"))
    output = tmp_path / "merged"
    assert call("merge", "--source", folder, "--lora", written / "second" / "adapter", "--output", output) == 0
    before, after = (open_source(open_hf(release)) for release in (folder, output))
    assert not after.problems
    assert after.encodings["model.layers.1.self_attn.q_proj.weight"].label is None
    up = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(decoded(after.encodings[up]), decoded(before.encodings[up]))
    assert "model.layers.0.self_attn.q_proj" in read_config(output)["quantization_config"]["llm_int8_skip_modules"]


def test_an_adapter_that_was_trained_on_another_base_is_named(written: Path, tmp_path: Path) -> None:
    """Shapes don't tell a base from its instruction-tuned release; a copy in a folder of the same name is silent."""
    base, adapter = written / "plain" / "base", tmp_path / "adapter"
    shutil.copytree(written / "plain" / "adapter", adapter)
    file = adapter / "adapter_config.json"
    for said, warned in (
        ("acme/Other-8B", True),
        (f"acme/{base.name.upper()}", False),
        (str(base), False),
        (None, False),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": said}))
        assert any(f"was trained on {said}, by its" in line for line in plan(base, adapter).warnings) == warned
