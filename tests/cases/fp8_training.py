"""Trains a tiny Llama in FP8 with MaxText 0.2.5 and packs its state: `python tests/cases/fp8_training.py OUTPUT.tar.gz`, by
an interpreter that has MaxText. `… fp8_training.py FOLDER RUN LAYOUT STEPS` trains so far, or goes on to there, and leaves the
losses in FOLDER/RUN.jsonl.

`quantization=fp8` keeps weights in float32, computes in FP8 (Flax's `Fp8DirectDotGeneralOp`), and keeps for each kernel the
largest magnitudes of the last 1,024 steps and the scales that follow from them: variables of the model's, beside its
parameters. The archive has step 1 of a run with layers stacked and of one with layers apart. Synthetic data, 2 devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SIZES = dict(
    base_emb_dim=32, base_num_query_heads=4, base_num_kv_heads=2, head_dim=8, base_mlp_dim=48, base_num_decoder_layers=2, vocab_size=64,
)  # fmt: skip
RUN = dict(
    hardware="cpu", dataset_type="synthetic", attention="dot_product", enable_checkpointing=True, async_checkpointing=False, checkpoint_period=1,
    per_device_batch_size=1, max_target_length=32, enable_goodput_recording=False, monitor_goodput=False, skip_jax_distributed_system=True,
    override_model_config=True, model_name="llama3.1-8b", quantization="fp8",
)  # fmt: skip
DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


def train(folder: Path, run: str, scan_layers: bool, steps: int) -> Path:
    """Trains so many steps, or goes on to them; the folder of the steps."""
    import maxtext  # pyright: ignore[reportMissingImports]

    told = {
        **RUN,
        **SIZES,
        "run_name": run,
        "base_output_directory": folder,
        "scan_layers": scan_layers,
        "steps": steps,
        "metrics_file": folder / f"{run}.jsonl",
    }
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    words = [sys.executable, "-m", "maxtext.trainers.pre_train.train", str(base)]
    subprocess.run([*words, *(f"{key}={value}" for key, value in told.items())], check=True, env=os.environ | DEVICES)
    return folder / run / "checkpoints"


def main(output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(output, "w:gz", compresslevel=9) as archive:
        for layout in ("scanned", "unscanned"):
            steps = train(Path(folder), layout, layout == "scanned", 2)
            archive.add(steps / "1", f"{layout}/1")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        where, name, layout, count = sys.argv[1:]
        train(Path(where), name, layout == "scanned", int(count))
