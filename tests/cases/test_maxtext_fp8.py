"""MaxText's FP8 model on our checkpoints: the logits that it has on the one that its own converter wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from support import HERE, LLAMA, call, make_release

MAXTEXT = os.environ.get("WEIGHTBEAM_MAXTEXT_PYTHON", "")
CASES = HERE / "cases"
WITHIN = 1e-4  # of logits of a standard deviation of 1.6; two runs of MaxText in float32 differ by 4e-5


@pytest.mark.skipif(not MAXTEXT, reason="WEIGHTBEAM_MAXTEXT_PYTHON names no Python of an environment with MaxText")
@pytest.mark.slow("MaxText, which is imported and compiles, a minute each")
@pytest.mark.parametrize("layout", ["true", "false"], ids=["scanned", "unscanned"])
def test_maxtext_computes_on_the_codes(tmp_path: Path, layout: str) -> None:
    """Told what `maxtext.yml` says, it takes codes and scales, stacked or not."""
    release, kept = tmp_path / "release", tmp_path / "kept"
    subprocess.run([sys.executable, str(CASES / "fp8_release.py"), str(release)], check=True)
    assert call("convert", release, kept, "--save_dtype", "float8_e4m3fn", "--scan_layers", layout) == 0
    with np.load(CASES / "fp8_logits.npz") as recorded:
        tokens, wanted = recorded["tokens"][0], recorded["logits"][0]
    config = yaml.safe_load((kept / "0" / "maxtext.yml").read_text())
    assert config["weight_dtype"] == "float8_e4m3fn"
    job, result = tmp_path / "job.json", tmp_path / "logits.npy"
    job.write_text(json.dumps({"config": config, "checkpoint": str(kept / "0" / "items"), "tokens": tokens.tolist()}))
    words = [MAXTEXT, "-P", str(CASES / "fp8_logits.py"), str(job), str(result)]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run(words, check=True, cwd=tmp_path, env=clean, timeout=1800)
    made = np.load(result)
    assert np.abs(made - wanted).max() < WITHIN
    np.testing.assert_array_equal(made.argmax(-1), wanted.argmax(-1))


def train(folder: Path, run: str, layout: str, steps: int) -> dict[int, float]:
    """Trains so far with `quantization=fp8`; the losses of the steps that this took."""
    losses = folder / f"{run}.jsonl"
    losses.unlink(missing_ok=True)
    words = [MAXTEXT, "-P", str(CASES / "fp8_training.py"), str(folder), run, layout, str(steps)]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run(words, check=True, cwd=folder, env=clean, timeout=1800)
    rows = [json.loads(line) for line in losses.read_text().splitlines()]
    return {int(row["step"]): row["learning/loss"] for row in rows}


@pytest.mark.skipif(not MAXTEXT, reason="WEIGHTBEAM_MAXTEXT_PYTHON names no Python of an environment with MaxText")
@pytest.mark.slow("MaxText trains, a minute each time")
@pytest.mark.parametrize("layouts", [("scanned", "unscanned"), ("unscanned", "scanned")], ids="-".join)
def test_training_in_fp8_goes_on_in_the_other_layout(tmp_path: Path, layouts: tuple[str, str]) -> None:
    """Weights, moments, magnitudes and scales of step 1 make the losses of steps 2 and 3 that the run itself goes on to."""
    there, other = layouts
    whole = train(tmp_path, "whole", there, 4)
    moved = tmp_path / "moved" / "checkpoints"
    step = tmp_path / "whole" / "checkpoints" / "1"
    told = ("--like", make_release(tmp_path / "like", LLAMA), "--maxtext_model", "llama3.1-8b")
    scan = ("--scan_layers", str(other == "scanned").lower())
    assert call("reshard", step, moved, "--state", "full", *told, *scan) == 0
    rest = train(tmp_path, "moved", other, 4)
    assert sorted(rest) == [2, 3]
    np.testing.assert_allclose([rest[2], rest[3]], [whole[2], whole[3]], rtol=1e-5)
