"""How many units are worked on at a time, and units that are cut for that, by every command that moves weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import assert_same_bits, call, convert, read_tensors, restore

from weightbeam.pipelines.commands import convert as converting
from weightbeam.pipelines.commands import export, quantize, reshard
from weightbeam.pipelines.running.slots import slots_of
from weightbeam.transforms.planning.options import UNIT_BYTES
from weightbeam.transforms.stages.staged import load

BUCKETS = ("gs://in/model", "gs://out/ckpt")


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units may be as small as those of a small model have to be, and folders count as buckets."""
    monkeypatch.setattr("weightbeam.transforms.execution.overlap.REMOTE", "/")
    monkeypatch.setattr("weightbeam.transforms.cutting.blocks.LEAST_UNITS", 1)
    monkeypatch.setattr("weightbeam.transforms.cutting.blocks.LEAST_UNIT_BYTES", 1000)


@pytest.mark.parametrize(
    ("beam", "slots"),
    [
        (["--direct_num_workers=3"], 3),
        (["--runner=FlinkRunner", "--parallelism=6"], 6),
        (["--runner=PortableRunner"], None),  # nobody says how many
        (["--runner=DataflowRunner", "--max_num_workers=10"], 40),
        (["--runner=DataflowRunner", "--num_workers=2", "--number_of_worker_harness_threads=8"], 16),
        (["--runner=SparkRunner", "--num_workers=3"], 6),
    ],
)
def test_who_says_how_many(beam: list[str], slots: int | None) -> None:
    assert slots_of(beam, UNIT_BYTES, *BUCKETS) == slots


def test_a_size_that_is_given_is_kept() -> None:
    """Also where it is that of the default."""
    assert slots_of(["--parallelism=6"], UNIT_BYTES, *BUCKETS)
    for given in (int(UNIT_BYTES), "128MiB", "64M"):
        assert slots_of(["--parallelism=6"], given, *BUCKETS) is None


def test_from_disk_to_disk_units_are_as_large_as_they_may_be() -> None:
    assert slots_of(["--direct_num_workers=3"], UNIT_BYTES, "/models/llama", "/ckpt") is None


@pytest.mark.usefixtures("small")
def test_the_command_tells_a_size_that_is_given(source: Path, tmp_path: Path) -> None:
    """`--unit_bytes 128MiB` isn't the default, though it is as large."""
    for given, slots in (((), 2), (("--unit_bytes", "128MiB"), None)):
        assert (
            call(
                "plan",
                "--source",
                source,
                "--output",
                tmp_path / "out",
                "--direct_num_workers=2",
                "--json",
                tmp_path / "plan.json",
                *given,
            )
            == 0
        )
        assert json.loads((tmp_path / "plan.json").read_text())["slots"] == slots
    assert (
        converting.convert(
            str(source), str(tmp_path / "given"), unit_bytes=int(UNIT_BYTES), progress=False
        ).planned.slots
        is None
    )


@pytest.mark.usefixtures("small")
def test_every_plan_is_cut_for_its_slots(source: Path, checkpoint: Path) -> None:
    """More units for more slots, none larger than before; workers make the same plan of what is staged."""
    plans = {
        "export": lambda slots: export.plan(str(checkpoint), slots=slots),
        "quantize": lambda slots: quantize.plan(str(source), slots=slots),
        "reshard": lambda slots: reshard.plan(str(checkpoint), mesh="fsdp=4", slots=slots),
    }
    for kind, plan in plans.items():
        none, few, many = plan(None), plan(1), plan(4)
        assert len(none.units) < len(few.units) < len(many.units), kind
        assert none.unit_working_bytes > few.unit_working_bytes >= many.unit_working_bytes, kind
        assert load(many.stage()).hash == many.hash != few.hash, kind


@pytest.mark.usefixtures("small")
def test_others_go_on_with_the_units_there_are(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export and a reshard that were stopped with two slots are resumed with four, and are what they would have
    been.
    """
    commands = {
        "export": ("weightbeam.formats.targets.release.ReleaseTarget.assemble", ()),
        "reshard": ("weightbeam.formats.orbax.ocdbt.merge", ("--mesh", "fsdp=4")),
    }
    for command, (last, options) in commands.items():
        words = (command, "--source", checkpoint, *options)
        with monkeypatch.context() as failing:
            failing.setattr(last, lambda *_, **__: 1 // 0)
            assert call(*words, "--output", tmp_path / command, "--direct_num_workers=2") == 1
        assert call(*words, "--output", tmp_path / command, "--direct_num_workers=4", "--resume") == 0
        assert call(*words, "--output", tmp_path / f"{command} at once", "--unit_bytes=128MiB") == 0
    assert_same_bits(read_tensors(tmp_path / "export"), read_tensors(tmp_path / "export at once"))
    assert_same_bits(restore(tmp_path / "reshard/0"), restore(tmp_path / "reshard at once/0"))
    assert json.loads((tmp_path / "reshard/0/conversion.json").read_text())["slots"] == 2
