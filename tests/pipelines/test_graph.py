"""The Beam graph: one chain of named stages, numbers alone through shuffles, and the same bits however Beam runs it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from support import DEEPSEEK, convert, digests, given, given_arrays, headers_only, make_release, restore

from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.staging import staging_at
from weightbeam.pipelines.running.beam_options import make_pipeline, pipeline_options
from weightbeam.pipelines.running.graph import build
from weightbeam.transforms.cutting.units import Unit
from weightbeam.transforms.execution.arena import Arena
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions, Delivery
from weightbeam.transforms.stages.staged import load
from weightbeam.transforms.stages.work import Work, WorkCoder

STAGES = ["ExpandUnits", "ReadBoxes", "Dequantize", "Reshape", "Stack", "WriteChunks", "AssembleCheckpoint"]
WORKING = STAGES[1:-1]  # those that handle bytes
CASE = "qwen3-moe"


def test_the_stages_are_one_chain(tmp_path: Path) -> None:
    """Each stage is a transform of its own, whose only input is what the one before puts out."""
    pipeline = beam.Pipeline(options=PipelineOptions([]))
    build(pipeline, plan_conversion(ConvertOptions(), headers_only(DEEPSEEK)), staging_at(tmp_path / "out", 0))
    proto = pipeline.to_runner_api()
    transforms = proto.components.transforms
    (root,) = (transforms[name] for name in proto.root_transform_ids)
    chain = [transforms[name] for name in root.subtransforms]
    assert [transform.unique_name for transform in chain] == ["Units", *STAGES]
    for before, after in itertools.pairwise(chain):
        assert len(before.outputs) == 1
        assert list(after.inputs.values()) == list(before.outputs.values())


def test_nothing_is_shuffled_between_read_and_write(tmp_path: Path) -> None:
    """Two shuffles of the units' numbers: before the stages that hold arrays, and behind them; each of those stages is
    one plain ParDo.
    """
    pipeline = beam.Pipeline(options=PipelineOptions([]))
    build(pipeline, plan_conversion(ConvertOptions(), headers_only(DEEPSEEK)), staging_at(tmp_path / "out", 0))
    leaves = [t for t in pipeline.to_runner_api().components.transforms.values() if t.spec.urn and not t.subtransforms]
    shuffles = {t.unique_name.split("/")[0] for t in leaves if t.spec.urn == "beam:transform:group_by_key:v1"}
    assert shuffles == {"ExpandUnits", "AssembleCheckpoint"}
    for stage in WORKING:
        (only,) = (t for t in leaves if t.unique_name.startswith(f"{stage}/"))
        assert only.spec.urn == "beam:transform:pardo:v1"
        assert (len(only.inputs), len(only.outputs)) == (1, 1)


def test_every_stage_did_its_own_work(generated: Path, tmp_path: Path) -> None:
    """Each counts bytes and milliseconds: what is read is the source, what is written the arrays. That the run passed
    proves that no `Work` was encoded on the way, since that raises.
    """
    conversion = plan_conversion(ConvertOptions(unit_bytes=100_000), open_hf(generated / "cases" / CASE))
    assert len(conversion.units) > 5
    staging = staging_at(tmp_path / "out", 0)
    staging.create(conversion.stage())
    conversion.prepare(staging, Delivery())
    pipeline = make_pipeline(pipeline_options([]))
    build(pipeline, conversion, staging)
    result = pipeline.run()
    found = {
        (counter.key.metric.namespace, counter.key.metric.name): counter.result
        for counter in result.metrics().query()["counters"]
    }
    for stage in WORKING:
        assert found[stage, "bytes"] > 0
        assert found[stage, "milliseconds"] > 0
    assert conversion.read_bytes == conversion.source_bytes == conversion.target_bytes
    # gaps of less than a page are read too
    assert conversion.source_bytes <= found["ReadBoxes", "bytes"] < 1.1 * conversion.source_bytes
    assert found["WriteChunks", "bytes"] == found["Stack", "bytes"] == conversion.target_bytes


def test_work_cannot_be_encoded() -> None:
    """Beam uses the guarding coder for `Work`; sizes are estimated without encoding."""
    coder = beam.coders.registry.get_coder(Work)
    assert isinstance(coder, WorkCoder)
    work = Work(Unit(0, (), ()), Arena())
    work.shards = [np.zeros((3, 5), np.float32)]
    with pytest.raises(RuntimeError, match="must not be encoded"):
        coder.encode(work)
    assert coder.estimate_size(work) == 60
    assert coder.get_impl().estimate_size(work) >= 60


def test_plain_numbers_are_shuffled(tmp_path: Path) -> None:
    """What a worker is told of a unit is its number and whether it is done, in Beam's standard coders: nothing of ours
    is unpickled.
    """
    pipeline = beam.Pipeline(options=PipelineOptions([]))
    build(pipeline, plan_conversion(ConvertOptions(), headers_only(DEEPSEEK)), staging_at(tmp_path / "out", 0))
    components = pipeline.to_runner_api().components
    (shuffle,) = (t for name, t in components.transforms.items() if t.unique_name == "ExpandUnits/Expand")
    (made,) = shuffle.outputs.values()

    def urns(coder: str) -> list[str]:
        found = components.coders[coder]
        return [found.spec.urn, *(urn for part in found.component_coder_ids for urn in urns(part))]

    assert urns(components.pcollections[made].coder_id) == [
        "beam:coder:kv:v1",
        "beam:coder:varint:v1",
        "beam:coder:bool:v1",
    ]


def test_each_worker_makes_the_same_units(tmp_path: Path) -> None:
    """What a worker finds in its own copy of the plan is what the launcher planned."""
    source = make_release(tmp_path / "hf", DEEPSEEK)
    conversion = plan_conversion(ConvertOptions(unit_bytes=30_000, mesh=("fsdp=4",)), open_hf(source))
    staging = staging_at(tmp_path / "out", 0, conversion.hash)
    staging.create(conversion.stage())
    copy = load(staging.read_plan())
    assert copy is not conversion
    assert len(conversion.units) > 5
    for number in range(len(conversion.units)):
        assert copy.expand(number) == conversion.expand(number)


WAYS = {
    "every bundle twice": "--direct_runner_bundle_repeat=1",
    "every bundle three times, threads": "--direct_runner_bundle_repeat=2 --direct_running_mode=multi_threading --direct_num_workers=4",
    "one thread": "--direct_num_workers=1",
    "four threads": "--direct_running_mode=multi_threading --direct_num_workers=4",
    "eight threads": "--direct_running_mode=in_memory --direct_num_workers=8",
    "the DirectRunner, by name": "--runner=DirectRunner",
}


@pytest.mark.parametrize("way", WAYS)
def test_however_beam_runs_it_the_bits_are_the_same(generated: Path, tmp_path: Path, way: str) -> None:
    """MaxText's own bits, in many units, whatever the mode and the number of workers; a stage that runs again changes
    nothing.
    """
    options = [
        "--unit_bytes",
        "100000",
        "--mesh",
        "fsdp=4",
        "--maxtext_model",
        given()[CASE]["maxtext_model"],
        *WAYS[way].split(),
    ]
    step = convert(generated / "cases" / CASE, tmp_path / "out", *options)
    assert digests(restore(step)) == given_arrays(CASE, "scanned")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0"]


class Meet(beam.DoFn):
    """Goes on when as many are here as there should be threads."""

    barrier = threading.Barrier(4)

    def process(self, element: int) -> None:
        self.barrier.wait(20)


@pytest.mark.parametrize("mode", ["", "--direct_running_mode=multi_threading", "--direct_running_mode=in_memory"])
def test_local_threads_work_side_by_side(mode: str) -> None:
    """Whatever mode is asked for."""
    with make_pipeline(pipeline_options(["--direct_num_workers=4", *mode.split()])) as pipeline:
        _ = pipeline | beam.Create(range(40)) | beam.Reshuffle() | beam.ParDo(Meet())


class Make(beam.DoFn):
    """So many elements: more than one buffer of a channel holds."""

    def process(self, count: int) -> Iterator[bytes]:
        for number in range(count):
            yield number.to_bytes(8, "big") + bytes(600)


class Tick(beam.DoFn):
    seen: ClassVar[list[int]] = []

    def process(self, element: bytes) -> None:
        self.seen.append(int.from_bytes(element[:8], "big"))


def test_no_element_is_lost() -> None:
    """As Beam's own `multi_threading` does now and then."""
    Tick.seen.clear()
    with make_pipeline(
        pipeline_options(["--direct_running_mode=multi_threading", "--direct_num_workers=4"])
    ) as pipeline:
        _ = (
            pipeline
            | beam.Create([100_000])
            | beam.ParDo(Make()).with_output_types(bytes)
            | beam.Reshuffle()
            | beam.ParDo(Tick())
        )
    assert sorted(Tick.seen) == list(range(100_000))


TIMED = {"_CHECKPOINT_METADATA"}  # says when it was made


def test_chunk_keys_are_the_same_too(tmp_path: Path) -> None:
    """Without a database every chunk is a file: the same names with the same bytes, whatever the workers."""
    source = make_release(tmp_path / "hf", DEEPSEEK, files=3)
    files = []
    for name, way in enumerate(("--direct_num_workers=1", "--direct_num_workers=4", "--direct_runner_bundle_repeat=1")):
        options = [
            "--use_ocdbt",
            "false",
            "--use_zarr3",
            "false",
            "--mesh",
            "fsdp=4",
            "--unit_bytes",
            "30000",
            *way.split(),
        ]
        items = convert(source, tmp_path / str(name), *options) / "items"
        files.append(
            {
                str(path.relative_to(items)): path.read_bytes()
                for path in items.rglob("*")
                if path.is_file() and path.name not in TIMED
            }
        )
    assert len(files[0]) > 60
    assert files[0] == files[1] == files[2]
