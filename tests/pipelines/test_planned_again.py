"""A plan that each worker makes again must come out the same: in another process, whose hashes of texts differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quantised import fp8_llama
from support import convert, make_release, peft_adapter

PLANS = """
import sys
from weightbeam.pipelines.commands import export
from weightbeam.pipelines.commands import merge
from weightbeam.pipelines.commands import quantize
from weightbeam.pipelines.commands import reshard
from weightbeam.transforms.planning.options import MergeOptions
release, fp8, ckpt, lora = sys.argv[1:]
for plan in (
    merge.plan(fp8, MergeOptions(dequantize=True)), merge.plan(fp8, MergeOptions(lora=((lora, 1.0),))), merge.plan(release, MergeOptions(lora=((lora, 1.0),))),
    quantize.plan(release), quantize.plan(ckpt),
    export.plan(ckpt, lora=lora, unit_bytes=30000), reshard.plan(ckpt, mesh="fsdp=2", unit_bytes=30000),
):
    print(plan.hash)
"""


def test_in_every_process(tmp_path: Path) -> None:
    """Of a release, a quantised one, a checkpoint, and an adapter beside them."""
    release = make_release(tmp_path / "hf")
    fp8, *_ = fp8_llama(tmp_path / "fp8")
    convert(release, tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    lora, _ = peft_adapter(
        tmp_path / "lora",
        {f"model.layers.{n}.self_attn.{name}": (32, 32) for n in range(2) for name in ("q_proj", "o_proj")},
    )
    command = [sys.executable, "-c", PLANS, release, fp8, tmp_path / "ckpt", lora]
    started = [
        subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert len(said[0].split()) == 7
    assert said[0] == said[1]
