"""A new target is one file and a row: this one, of arrays as .npy files, and the row that the test adds."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import BF16, LLAMA, random_tensors, restore, save

import weightbeam as wb
from weightbeam.formats.orbax.zarr import ArraySpec
from weightbeam.formats.staging import Staging, staging_at
from weightbeam.formats.storage import LocalFolder, StorageError, Store
from weightbeam.formats.targets import TARGETS, published
from weightbeam.formats.targets.target import Conclude, Target, nothing

RECORD = "arrays.json"
UNITS = dict(maxtext_model="llama2-7b", unit_bytes=24_000, progress=False)


class NpyTarget(Target[Staging]):
    """A folder of .npy files, one for each array, made at their full size before any unit is."""

    name, another = "npy", "choose another --output"

    def __init__(self, specs: Sequence[ArraySpec], step: int, **_: Any):
        self.specs, self.step = specs, step

    @property
    def identity(self) -> list[Any]:
        return [self.name, *(spec.shard for spec in self.specs)]

    def place(self, output: str, plan_hash: str) -> Staging:
        return staging_at(output, self.step, plan_hash)

    def prepare(self, place: Staging) -> None:
        for spec in self.specs:
            file = place.checkpoint.path(f"{spec.key}.npy")
            if not Path(file).exists():
                np.lib.format.open_memmap(file, "w+", np.dtype(f"V{spec.dtype.itemsize}"), spec.shape)

    def write(
        self,
        place: Staging,
        unit: int,
        parts: Sequence[Any],
        notes: Mapping[str, Any] | None = None,
        copies: Sequence[Any] = (),
    ) -> None:
        place.check()
        for spec, box, values in parts:
            file = np.load(place.checkpoint.path(f"{spec.key}.npy"), mmap_mode="r+")
            there = tuple(slice(start, min(stop, size)) for (start, stop), size in zip(box, spec.shape, strict=True))
            within = tuple(slice(0, at.stop - at.start) for at in there)
            file[there] = values[within].view(file.dtype)
            file.flush()
        place.enter(unit, dict(notes or {}))

    def assemble(
        self,
        place: Staging,
        units: int,
        record: Mapping[str, Any],
        overwrite: bool = False,
        conclude: Conclude = nothing,
    ) -> None:
        ledger = place.ledger.entries()
        if missing := set(range(units)) - set(ledger):
            raise StorageError(f"{len(missing)} units are missing")
        place.put(RECORD, json.dumps({**record, **conclude(ledger)}).encode())
        place.mark()
        place.publish(overwrite)

    @staticmethod
    def record_of(place: Store) -> Mapping[str, Any]:
        return json.loads(place.read(RECORD)) if place.exists(RECORD) else {}

    @staticmethod
    def made_by(place: Store) -> str | None:
        return NpyTarget.record_of(place).get("plan")

    def find_overlap(self, place: Staging, inputs: Iterable[str], swaps: bool = False) -> str:
        return ""

    def why_not_replace(self, place: Staging) -> str:
        return "" if self.made_by(place.final) else "isn't a folder of arrays"

    def bytes_left(self, place: Staging, made_bytes: int, resume: bool) -> int:
        return 0 if place.exists() else made_bytes


@pytest.fixture
def into_npy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> wb.Plan:
    """The plan of a conversion into the new target."""
    monkeypatch.setitem(TARGETS, "npy", NpyTarget)
    source = save(tmp_path / "hf", LLAMA, random_tensors(LLAMA, BF16))
    plan = wb.plan(str(source), maxtext_model="llama2-7b", unit_bytes=24_000)
    return dataclasses.replace(plan, conversion=dataclasses.replace(plan.conversion, to="npy"))


def test_convert_into_a_new_target(into_npy: wb.Plan, tmp_path: Path) -> None:
    """The same bits as of an Orbax checkpoint, of several units."""
    assert len(into_npy.conversion.units) > 3
    assert wb.convert(into_npy, str(tmp_path / "npy")).state == "done"
    wanted = wb.convert(into_npy.source, str(tmp_path / "orbax"), **UNITS)
    arrays = restore(Path(wanted.path).parent)
    made = {path.stem: np.load(path) for path in (tmp_path / "npy" / "0").glob("*.npy")}
    assert made.keys() == {array.key for array in into_npy.conversion.plan.arrays}
    for key, values in made.items():
        assert values.tobytes() == np.asarray(arrays[key.removeprefix("params.params.")]).tobytes(), key
    assert {"release.zip", RECORD} <= {path.name for path in (tmp_path / "npy" / "0").iterdir()}


def test_a_stopped_one_goes_on(into_npy: wb.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`resume`, `overwrite` and their refusals are those of every target, and workers make the same plan of what is
    staged.
    """
    output, write, written = str(tmp_path / "npy"), NpyTarget.write, []

    def stops(self: NpyTarget, *given: Any) -> None:
        if len(written) > 1:
            raise OSError("stopped")
        written.append(write(self, *given))

    with monkeypatch.context() as patched:
        patched.setattr(NpyTarget, "write", stops)
        with pytest.raises(wb.Failed, match=r"The whole story is in .*/failure\.txt") as told:
            wb.convert(into_npy, output, beam=["--direct_num_workers=1"])
    assert "stopped" in Path(str(told.value).split("story is in ")[1].split("\n")[0].rstrip(".")).read_text()
    with pytest.raises(wb.Refused, match="holds a stopped conversion"):
        wb.convert(into_npy, output)
    monkeypatch.setattr("weightbeam.transforms.stages.staged._LOADED", {})
    assert wb.convert(into_npy, output, resume=True).state == "done"
    assert wb.convert(into_npy, output, resume=True).state == "nothing to do"
    with pytest.raises(wb.Refused, match="exists"):
        wb.convert(into_npy, output)
    assert wb.convert(into_npy, output, overwrite=True).state == "done"


@pytest.mark.parametrize("most", [0, published.MOST_READ], ids=["a part of it", "all of it"])
def test_what_tells_whether_weights_were_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Of a large file some bytes of each tensor, of a small one all; no time, so that a copy is the same."""
    monkeypatch.setattr(published, "MOST_READ", most)
    release, copy = LocalFolder(str(tmp_path / "a")), LocalFolder(str(tmp_path / "b"))
    tensors = {name: np.arange(4096, dtype=np.float32) for name in "ab"}
    (tmp_path / "a").mkdir()
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "card").write_text("x")
    told = published.contents_of(release, ["card"])
    assert [told[name].split(" ")[1] for name in ("model.safetensors", "card")] == [
        "crc32c" if most else "blocks",
        "crc32c",
    ]
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    assert published.replaced_in(copy, told) == []
    save_file({**tensors, "b": tensors["b"] + 1}, tmp_path / "b" / "model.safetensors")
    assert published.replaced_in(copy, told) == ["model.safetensors"]
    (tmp_path / "b" / "card").write_text("y")
    assert published.replaced_in(copy, told) == ["card", "model.safetensors"]
    size = (tmp_path / "b" / "model.safetensors").stat().st_size
    assert published.replaced_in(copy, {"model.safetensors": f"{size} md5 1"}) == []
    assert published.replaced_in(copy, {"model.safetensors": f"{size + 1} md5 1"}) == ["model.safetensors"]
