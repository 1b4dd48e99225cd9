"""Checkpoints that someone damaged or made up: an export is planned or refused, in words, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import call, convert, make_release

import weightbeam as wb
from weightbeam.pipelines.commands.export import plan

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "../../../etc/passwd",
    "/etc",
    "a\x00b",
    [],
    [[]],
    {},
    {"key": "..", "key_type": 2},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint without a database, so that each array's metadata is a file."""
    folder = tmp_path_factory.mktemp("hostile")
    make_release(folder / "hf")
    return convert(folder / "hf", folder / "ckpt", "--maxtext_model", "llama2-7b", "--use_ocdbt", "false")


def places(value: Any) -> list[tuple]:
    """The paths of all values in a JSON value."""
    found: list[tuple] = [()]
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += [(key, *path) for path in places(child)]
    return found


def changed(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_metadata(checkpoint: Path, data: st.DataObject) -> None:
    """Any value in any place of any of its JSON files."""
    files = [checkpoint / "conversion.json", checkpoint / "_CHECKPOINT_METADATA", checkpoint / "items" / "_METADATA"]
    files += sorted((checkpoint / "items").glob("*/zarr.json"))[:3]
    file = data.draw(st.sampled_from([file for file in files if file.exists()]))
    original = file.read_text()
    value = json.loads(original)
    path = data.draw(st.sampled_from(places(value)))
    said = "planned"
    try:
        file.write_text(json.dumps(changed(value, path, data.draw(st.sampled_from(ODD)))))
        planned = plan(str(checkpoint))
        assert planned.plan.problems or planned.files is not None
        for name in planned.small if planned.files else ():
            assert ".." not in Path(name).parts
            assert not Path(name).is_absolute()
    except wb.Refused as e:
        said = str(e)
    finally:
        file.write_text(original)
    assert said


def test_what_isnt_there_or_isnt_whole(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chunk that is missing or cut short, an array that is gone, a tree of another kind: no release, and words."""
    array = "params.params.decoder.decoder_norm.scale"

    def chunk(step: Path) -> Path:
        return next(
            path for path in sorted((step / "items" / array).rglob("*")) if path.is_file() and path.name != "zarr.json"
        )

    def cut(step: Path) -> None:
        chunk(step).write_bytes(chunk(step).read_bytes()[:5])

    def foreign(step: Path) -> None:
        file = step / "items" / "_METADATA"
        file.write_text(file.read_text().replace("decoder", "inner_state"))

    for number, (damage, status) in enumerate(
        (
            (lambda step: chunk(step).unlink(), 1),
            (cut, 1),
            (lambda step: shutil.rmtree(step / "items" / array), 2),
            (foreign, 2),
        )
    ):
        step = Path(shutil.copytree(checkpoint, tmp_path / str(number) / "0"))
        damage(step)
        capsys.readouterr()
        assert call("export", step, tmp_path / "out") == status, number
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert array in said or status == 2
        assert not (tmp_path / "out").exists()
        assert call("export", checkpoint, tmp_path / "out", "--overwrite") == 0
        shutil.rmtree(tmp_path / "out")
