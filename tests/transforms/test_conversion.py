"""A planned conversion is the same everywhere: staged and loaded, in any process, and told apart from every other by
its hash.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run
from support import BF16, DEEPSEEK, FP8, HERE, LLAMA, QWEN3_MOE, headers_only, random_tensors, save, shapes, split

from weightbeam import formats, model_mappings, transforms
from weightbeam.formats.safetensors import HfCheckpoint, Shard, Tensor, open_hf
from weightbeam.model_mappings.maxtext_config import MaxTextConfig, maxtext_config
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.inputs import this_code
from weightbeam.transforms.planning.options import ConvertOptions
from weightbeam.transforms.stages.staged import load

SMALL_UNITS = ConvertOptions(mesh=("fsdp=4", "expert=2"), unit_bytes=30_000)


def units_digest(conversion: Conversion) -> str:
    """Of every unit, spelled out."""
    return hashlib.sha256(
        b"".join(repr(conversion.expand(unit)).encode() for unit in range(len(conversion.units)))
    ).hexdigest()


def test_plans_are_alike_in_every_process() -> None:
    """Another process with another hash seed makes the same units and the same hash of the same headers."""
    script = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import support, runpy; test = runpy.run_path({__file__!r});"
        "conversion = test['plan_conversion'](test['SMALL_UNITS'], support.headers_only(support.QWEN3_MOE));"
        "print(conversion.hash, test['units_digest'](conversion), len(conversion.units))"
    )
    conversion = plan_conversion(SMALL_UNITS, headers_only(QWEN3_MOE))
    here = [conversion.hash, units_digest(conversion), str(len(conversion.units))]
    for seed in ("1", "2"):
        ran = run(sys.executable, "-c", script, env=os.environ | {"PYTHONHASHSEED": seed}, status=0)
        assert ran.stdout.split() == here
    assert len(conversion.units) > 3


@pytest.mark.parametrize("scan", [True, False])
def test_staging_keeps_everything(tmp_path: Path, scan: bool) -> None:
    """What a worker loads is what was staged: options, arrays, grids, drops, units, FP8 encodings; and it is small."""
    config = DEEPSEEK | dict(quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    tensors = random_tensors(DEEPSEEK)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        blocks = tuple(-(-size // 16) for size in tensors[name].shape)
        tensors[name] = tensors[name].astype(FP8)
        tensors[f"{name}_scale_inv"] = random_tensors(LLAMA)["model.embed_tokens.weight"][
            : blocks[0], : blocks[1]
        ].astype("float32")
    tensors["model.layers.3.enorm.weight"] = tensors["model.norm.weight"].copy()  # multi-token prediction: dropped
    checkpoint = open_hf(save(tmp_path / "hf", config, *split(tensors, 3)))
    made = plan_conversion(dataclasses.replace(SMALL_UNITS, scan_layers=scan), checkpoint)
    assert not made.plan.problems
    assert made.plan.dropped
    loaded = load(made.stage())
    assert (loaded.options, loaded.hash, loaded.units) == (made.options, made.hash, made.units)
    assert [grid.spec for grid in loaded.grids] == [grid.spec for grid in made.grids]
    assert units_digest(loaded) == units_digest(made)
    assert made.stage() == load(made.stage()).stage()
    assert len(made.stage()) < 12_000


def test_a_lock_of_an_editor_is_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is named with a dot leads nowhere, and tells nothing; a module's bytes do."""
    for package in (formats, model_mappings, transforms):
        monkeypatch.setattr(package, "__file__", str(tmp_path / package.__name__ / "__init__.py"))
    package = tmp_path / formats.__name__
    package.mkdir()
    (package / "reading.py").write_text("a = 1")
    before = this_code.__wrapped__()
    (package / ".#reading.py").symlink_to("nobody@nowhere.1")
    assert this_code.__wrapped__() == before
    (package / "reading.py").write_text("a = 2")
    assert this_code.__wrapped__() != before


@pytest.mark.parametrize("fact", ["hash", "code"])
def test_another_version_is_refused(fact: str) -> None:
    """A worker that would plan it differently, or whose code is another, doesn't start; nor does `--resume` go on."""
    inputs = json.loads(gzip.decompress(plan_conversion(SMALL_UNITS, headers_only(LLAMA)).stage()))
    with pytest.raises(RuntimeError, match="another version"):
        load(gzip.compress(json.dumps(inputs | {fact: "0" * 64}).encode()))


CHANGES: dict[str, dict[str, Any]] = {
    "scan_layers": dict(scan_layers=False), "param_scan_axis": dict(param_scan_axis=0), "save_dtype": dict(save_dtype="float32"),
    "quantize": dict(quantize="fp8", save_dtype="float8_e4m3fn"),
    "mesh": dict(mesh=("fsdp=8",)), "sharding_rules": dict(sharding_rules=(("embed", "fsdp"),)), "maxtext_model": dict(maxtext_model="llama3.1-8b"),
    "vocab_size": dict(vocab_size=128), "use_ocdbt": dict(use_ocdbt=False), "use_zarr3": dict(use_zarr3=False),
    "compression": dict(compression="zstd"), "unit_bytes": dict(unit_bytes=50_000), "step": dict(step=1),
    "virtual": dict(virtual=True), "lora": dict(lora=(("/nowhere/adapter", 0.5),)), "adapter_only": dict(adapter_only=True),
    "family": dict(family="llama"), "allow_links": dict(allow_links=True), "check_source": dict(check_source="true"),
    "full_paths": dict(full_paths=False), "maxtext": dict(maxtext="e591f30"),
    "layers": dict(layers="0:1"), "experts": dict(experts="0:1"), "vocab_rows": dict(vocab_rows=64),
}  # fmt: skip


def test_the_hash_tells_every_option_apart() -> None:
    """Whatever changes a byte or a chunk's key changes the hash, so that `--resume` never mixes two conversions."""
    checkpoint = headers_only(LLAMA)
    hashes = {
        name: plan_conversion(dataclasses.replace(SMALL_UNITS, **change), checkpoint).hash
        for name, change in CHANGES.items()
    }
    assert len({plan_conversion(SMALL_UNITS, checkpoint).hash, *hashes.values()}) == len(hashes) + 1
    # Llama has neither; below
    assert {field.name for field in dataclasses.fields(ConvertOptions)} - set(CHANGES) == {"mtp", "multimodal"}
    deepseek = headers_only(DEEPSEEK)
    assert plan_conversion(ConvertOptions(mtp=True), deepseek).hash != plan_conversion(ConvertOptions(), deepseek).hash


def test_the_hash_tells_sources_apart() -> None:
    """Another file time, size, name or config: another source."""
    checkpoint = headers_only(LLAMA)
    shard = checkpoint.shards[0]
    others = [
        dataclasses.replace(checkpoint, shards=(dataclasses.replace(shard, version="1"),)),
        dataclasses.replace(checkpoint, shards=(dataclasses.replace(shard, size=shard.size + 1),)),
        dataclasses.replace(checkpoint, shards=(dataclasses.replace(shard, name="other.safetensors"),)),
        dataclasses.replace(checkpoint, config=checkpoint.config | {"rms_norm_eps": 1e-6}),
    ]
    assert len({plan_conversion(SMALL_UNITS, one).hash for one in [checkpoint, *others]}) == len(others) + 1


def test_the_hash_tells_apart_what_maxtext_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version that says another key isn't told that there is nothing to do."""
    checkpoint = headers_only(LLAMA)
    before = plan_conversion(SMALL_UNITS, checkpoint)

    def says_more(*given: Any) -> MaxTextConfig:
        return maxtext_config(*given).with_keys({"rope_factor": 1})

    monkeypatch.setattr("weightbeam.transforms.planning.layouts.maxtext_config", says_more)
    after = plan_conversion(SMALL_UNITS, checkpoint)
    assert before.plan.maxtext
    assert after.plan.maxtext == before.plan.maxtext.with_keys({"rope_factor": 1})
    assert after.hash != before.hash


def test_the_hash_doesnt_know_where_the_files_lie() -> None:
    """A checkpoint that was moved, or that another machine mounts elsewhere, is the same."""
    checkpoint = headers_only(LLAMA)

    def moved(shard: Any) -> Any:
        path = shard.path.replace("/nowhere", "/elsewhere")
        return dataclasses.replace(
            shard, path=path, tensors=tuple(dataclasses.replace(tensor, path=path) for tensor in shard.tensors)
        )

    elsewhere = HfCheckpoint("/elsewhere", checkpoint.config, tuple(moved(shard) for shard in checkpoint.shards))
    assert plan_conversion(SMALL_UNITS, elsewhere).hash == plan_conversion(SMALL_UNITS, checkpoint).hash


def gptq_headers(index: bool) -> HfCheckpoint:
    """A model of some size in GPTQ, with 4 bits in groups of 32, by its headers alone."""
    model = LLAMA | dict(
        model_type="qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=8,
        head_dim=128,
        vocab_size=2048,
    )
    tensors: list[Tensor] = []

    def add(name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        end = tensors[-1].offset + tensors[-1].nbytes if tensors else 0
        tensors.append(Tensor(name, np.dtype(dtype), shape, "/nowhere/model.safetensors", end))

    for name, shape in shapes(model).items():
        if name.endswith("_proj.weight"):
            (outputs, inputs), stem = shape, name.removesuffix("weight")
            add(f"{stem}qweight", np.int32, (inputs // 8, outputs))
            add(f"{stem}qzeros", np.int32, (inputs // 32, outputs // 8))
            add(f"{stem}scales", np.float16, (inputs // 32, outputs))
            add(f"{stem}g_idx", np.int32, (inputs,))
        else:
            add(name, BF16, shape)
    config = model | {"quantization_config": dict(quant_method="gptq", bits=4, group_size=32, desc_act=index, sym=True)}
    size = tensors[-1].offset + tensors[-1].nbytes
    return HfCheckpoint("/nowhere", config, (Shard("model.safetensors", tensors[0].path, size, 0, tuple(tensors)),))


@pytest.mark.parametrize("index", [False, True], ids=["ordered", "desc_act"])
@pytest.mark.parametrize("unit_bytes", [1 << 20, 4 << 20, 64 << 20])
@pytest.mark.parametrize("options", [{}, {"scan_layers": False}, {"mesh": ("fsdp=16,tensor=4",)}], ids=str)
def test_groups_in_any_order_are_read_once(index: bool, unit_bytes: int, options: dict[str, Any]) -> None:
    """Where each input has its own group, a unit takes all inputs of some outputs: no scale is read for every part, and
    units stay within bounds.
    """
    conversion = plan_conversion(ConvertOptions(unit_bytes=unit_bytes, **options), gptq_headers(index))
    assert not conversion.plan.problems
    assert conversion.unit_working_bytes <= unit_bytes
    assert max(conversion.expand(unit).working_bytes for unit in range(len(conversion.units))) <= unit_bytes
    assert conversion.read_bytes < 1.1 * conversion.source_bytes


def test_units_that_cannot_hold_all_inputs_are_a_problem() -> None:
    conversion = plan_conversion(ConvertOptions(unit_bytes=10_000), gptq_headers(index=True))
    assert {problem.kind for problem in conversion.plan.problems} == {"memory"}


def test_units_are_values() -> None:
    """A unit can be pickled and is equal afterwards: it is what crosses Beam's shuffle."""
    conversion = plan_conversion(SMALL_UNITS, headers_only(DEEPSEEK))
    for number in range(len(conversion.units)):
        unit = conversion.expand(number)
        assert unit.id == number
        assert pickle.loads(pickle.dumps(unit)) == unit
