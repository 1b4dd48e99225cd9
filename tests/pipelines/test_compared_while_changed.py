"""What `diff` and `verify` compare is what they opened: a side that changes meanwhile gives no result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import QWEN3_MOE, call, convert, make_release

import weightbeam as wb

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
