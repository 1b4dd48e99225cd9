"""`plan --load`: how each array would be read, and the schedule's arithmetic: each element is read once, by one
process.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from facts import load_headers
from support import DEEPSEEK_V3, FP8, LLAMA_8B, QWEN3_MOE, call, headers_only, make_release, random_tensors, save

from weightbeam.formats.safetensors import open_hf
from weightbeam.model_mappings.boxes import volume
from weightbeam.pipelines.loading import release
from weightbeam.pipelines.loading.release import MappedRelease
from weightbeam.pipelines.loading.report import layout_on, plan_load
from weightbeam.pipelines.loading.schedule import boxes_of, make_steps
from weightbeam.transforms.cutting.mesh import Mesh, partition_spec
from weightbeam.transforms.cutting.units import fetches_for
from weightbeam.transforms.execution.boxes import plan_boxes
from weightbeam.transforms.planning.conversion import Conversion, rules_of
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

QUANTISED = QWEN3_MOE | dict(
    hidden_size=48, moe_intermediate_size=40, quantization_config=dict(quant_method="fp8", weight_block_size=[16, 16])
)


@pytest.mark.parametrize(
    ("mesh", "hosts"), [("fsdp=8", 2), ("fsdp=4,tensor=2", 4), ("tensor=2,fsdp=2,expert=2", 8), ("fsdp=6", 3)]
)
@pytest.mark.parametrize("unit_bytes", [1 << 27, 300_000])
def test_exchanged_arrays_are_tiled_by_the_hosts(mesh: str, hosts: int, unit_bytes: int) -> None:
    """Whatever the sizes, all hosts together read as many elements of an exchanged array as it has."""
    config = QWEN3_MOE | dict(
        hidden_size=256, vocab_size=1001, num_experts=6, moe_intermediate_size=136, num_attention_heads=12, head_dim=48
    )
    source = MappedRelease(plan_conversion(ConvertOptions(), headers_only(config)))
    parsed = Mesh.parse(mesh)
    layouts = {
        key: layout_on(array.shape, partition_spec(array.axes, rules_of(ConvertOptions())), parsed, hosts)
        for key, array in source.arrays.items()
    }
    read = dict.fromkeys(layouts, 0)
    exchanged = set()
    for step in make_steps(source, layouts, unit_bytes):
        for block in step.blocks:
            read[block.key] += sum(volume(box) for host in range(hosts) for box in boxes_of(block, host))
            if block.ways is not None:
                exchanged.add(block.key)
    assert len(exchanged) > 5
    assert all(read[key] == volume(tuple((0, n) for n in source.arrays[key].shape)) for key in exchanged)


def test_a_real_model_is_read_once_by_any_number_of_hosts() -> None:
    conversion = plan_conversion(ConvertOptions(mesh=("fsdp=16",)), headers_only(LLAMA_8B))
    planned = plan_load(conversion, Mesh.parse("fsdp=16"), 4)
    assert planned.host_bytes * 4 < 1.01 * conversion.source_bytes
    assert planned.ways["params.params.decoder.layers.mlp.wi_0.kernel"] == "exchanged"
    assert planned.ways["params.params.decoder.layers.mlp.wo.kernel"] == "direct"
    assert planned.memory_bytes < 1 << 30
    assert planned.unit_bytes < 128 << 20


def assert_costs_are_spelled_out(conversion: Conversion) -> None:
    """What a source says that boxes cost is what their reads take, one by one."""
    source = MappedRelease(conversion)
    for array in conversion.plan.arrays:
        for shard in (1, 2, 3):
            box = tuple((size // (shard + 1), max(size // shard, size // (shard + 1) + 1)) for size in array.shape)
            reads = [
                read
                for fetch in plan_boxes([(array, box)], conversion.encodings)[0]
                for read in fetch.encoding.reads(fetch.box)
            ]
            assert source.cost(array.key, [box]) == (
                sum(read.nbytes for read in reads),
                sum(read.runs for read in reads),
            ), (array.key, box)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_cost_of_boxes_is_that_of_their_reads(tmp_path: Path, mixed: bool) -> None:
    """Counted once for all layers and experts that are alike; spelled out where a layer is stored in another way."""
    tensors = random_tensors(QUANTISED)
    rng = np.random.default_rng(1)
    for name in [name for name in tensors if name.endswith("_proj.weight") and not (mixed and ".1." in name)]:
        blocks = tuple(-(-size // 16) for size in tensors[name].shape)
        tensors[name], tensors[f"{name}_scale_inv"] = tensors[name].astype(FP8), rng.random(blocks, np.float32)
    conversion = plan_conversion(ConvertOptions(), open_hf(save(tmp_path / "hf", QUANTISED, tensors)))
    assert not conversion.plan.problems
    assert_costs_are_spelled_out(conversion)


def test_a_layer_without_a_tensor_costs_nothing() -> None:
    """Some of GLM-5's layers have no indexer; MaxText's stacks have one for each."""
    glm = load_headers()["glm5"]
    headers = headers_only(glm.config, known={name: spec.shape for name, spec in glm.tensors.items()})
    assert_costs_are_spelled_out(plan_conversion(ConvertOptions(), headers))


def test_a_full_size_mixture_of_experts_is_planned_by_kinds_of_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers of DeepSeek-V3 have 3,840 tensors of experts; what reading them costs is spelled out for a few dozen
    boxes of one each.
    """
    spelled_out: list[int] = []
    monkeypatch.setattr(
        release, "fetches_for", lambda wanted: spelled_out.append(len(boxes := list(wanted))) or fetches_for(boxes)
    )
    conversion = plan_conversion(ConvertOptions(), headers_only(DEEPSEEK_V3 | dict(num_hidden_layers=8)))
    planned = plan_load(conversion, Mesh.parse("fsdp=64"), 16)
    assert planned.host_bytes * 16 < 1.01 * conversion.source_bytes
    assert len(spelled_out) < 200 < planned.steps


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_release(tmp_path / "hf", QWEN3_MOE)
    command = ["plan", "--source", folder, "--load"]
    assert call(*command, "--mesh", "fsdp=4", "--hosts", "2", "--json", tmp_path / "plan.json") == 0
    assert "loaded onto fsdp=4, by 2 hosts" in capsys.readouterr().out
    (told,) = json.loads((tmp_path / "plan.json").read_text())["load"]
    assert told["hosts"] == 2
    assert set(told["arrays"].values()) == {"direct"}
    assert call(*command, "--mesh", "fsdp=200000") == 2
    assert "500,000 are all that is planned for" in capsys.readouterr().err
    assert call(*command) == 2
    assert "--load needs --mesh" in capsys.readouterr().err
    assert call("plan", folder, "--mesh", "fsdp=4", "--hosts", "2") == 2
    assert "--hosts needs --load" in capsys.readouterr().err
    assert call(*command, "--mesh", "fsdp=4", "--hosts", "3") == 2
    assert "can't share evenly" in capsys.readouterr().err
