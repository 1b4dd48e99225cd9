"""What `diff` and `verify` compare is what they opened: a side that changes meanwhile gives no result."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import QWEN3_MOE, call, convert, make_release

import weightbeam as wb
from weightbeam.formats.storage import local

MODEL = QWEN3_MOE | dict(architectures=["Qwen3MoeForCausalLM"], torch_dtype="bfloat16")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    convert(make_release(made / "hf", MODEL), made / "ckpt")
    assert call("export", made / "ckpt", made / "tuned") == 0
    return made


COMMANDS = {
    "verify": (wb.verify, "ckpt", "hf"),
    "verify of an export": (wb.verify, "tuned", "ckpt"),
    "diff of releases": (wb.diff, "hf", "tuned"),
    "diff of both kinds": (wb.diff, "tuned", "ckpt"),
    "diff of a checkpoint": (wb.diff, "ckpt", "ckpt"),
    "logits": (functools.partial(wb.logits, token_ids=[1, 2, 3], tolerance=1), "hf", "tuned"),
}


def replaced_at_the_end(file: Path) -> Callable[[Any], None]:
    """Replaces a file by the same one, of the same times, once all of it was compared."""
    done: list[bool] = []

    def told(progress: Any) -> None:
        if progress.done == progress.total and not done:
            done.append(True)
            other = file.with_name("other")
            shutil.copy2(file, other)
            os.replace(other, file)

    return told


@pytest.mark.parametrize(
    ("command", "side"), [(command, side) for command in COMMANDS for side in sorted(set(COMMANDS[command][1:]))]
)
def test_a_side_that_is_replaced_meanwhile(command: str, side: str, inputs: Path, tmp_path: Path) -> None:
    """Either one, after its last byte was read; said as one who reads would say it."""
    shutil.copytree(inputs, here := tmp_path / "here")
    compare, first, second = COMMANDS[command]
    files = [path for path in (here / side).rglob("*") if path.suffix == ".safetensors" or path.parent.name == "d"]
    file = max(files, key=lambda path: path.stat().st_size)
    with pytest.raises(wb.Failed) as raised:
        compare(str(here / first), str(here / second), progress=replaced_at_the_end(file))
    said = str(raised.value)
    assert f"{file} changed while it was read" in said
    assert "compare it again" in said
    assert "--overwrite" not in said
    assert compare(str(here / first), str(here / second), progress=False).ok


@pytest.mark.parametrize("command", COMMANDS)
def test_a_side_that_is_another_one_while_it_is_read(
    command: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the right one again afterwards, so that only the read itself can tell: said as one who reads would say it.

    The name is never without a file: other threads look at it meanwhile.
    """
    shutil.copytree(inputs, here := tmp_path / "here")
    compare, first, second = COMMANDS[command]
    side = next((side for side in (first, second) if side != "ckpt"), None)
    if side is None:
        pytest.skip("TensorStore reads checkpoints")
    file = max((here / side).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    other = tmp_path / "other"
    shutil.copy2(file, other)
    read_ranges, lock = local.read_ranges, threading.Lock()

    def switching(path: str, *given: Any) -> int:
        with lock:
            os.link(file, tmp_path / "aside")
            os.rename(other, file)
            try:
                return read_ranges(path, *given)
            finally:
                os.link(file, other)
                os.rename(tmp_path / "aside", file)

    def told(progress: Any) -> None:
        monkeypatch.setattr(local, "read_ranges", switching)

    with pytest.raises(wb.Failed) as raised:
        compare(str(here / first), str(here / second), progress=told)
    said = str(raised.value)
    assert f"{file} changed while it was read" in said
    assert "compare it again" in said
    assert "--overwrite" not in said
    assert "weightbeam." not in said
