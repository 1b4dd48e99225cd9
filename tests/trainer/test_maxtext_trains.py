"""MaxText from the package index, as it is, with our checkpoints: it trains from them, what it trained is exported, and
its resharded states go on.

The environment variable `WEIGHTBEAM_MAXTEXT_PYTHON` names an interpreter of an environment that has it (0.2.5 was run with jax
0.11.1, Python 3.12, on a CPU); without one these tests are skipped. `WRITE_TRAINED=FILE` adds a line for each model to
a file: that is the table of docs/maxtext_job.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from processes import run
from support import call, given

from weightbeam.pipelines.commands import convert, export, reshard

torch = lazily("torch")
transformers = lazily("transformers")

PYTHON = os.environ.get("WEIGHTBEAM_MAXTEXT_PYTHON", "")
SCRIPT = Path(__file__).with_name("run_maxtext.py")
CASES = (
    "llama3.1", "qwen2.5", "qwen3", "qwen3-tied", "qwen3-moe", "mixtral", "deepseek2", "deepseek3", "deepseek3.2", "gpt-oss", "olmo3", "qwen3-next",
    "qwen3.5", "gemma2", "gemma3", "gemma4-dense", "gemma4-moe",
)  # fmt: skip
# MaxText rounds a tied table to bfloat16 for the head, and Gemma's is scaled by √embed; the chunked delta rule adds up
# in another order
FURTHER = {
    "gemma2": 2e-2,
    "gemma3": 2e-2,
    "gemma4-dense": 2e-2,
    "gemma4-moe": 2e-2,
    "qwen3-next": 2e-3,
    "qwen3.5": 2e-3,
}
PLAIN = (
    "dtype=float32", "weight_dtype=float32", "matmul_precision=highest", "dataset_type=synthetic", "per_device_batch_size=1", "max_target_length=64",
    "hardware=cpu", "skip_jax_distributed_system=true", "attention=dot_product", "checkpoint_period=1", "async_checkpointing=false", "steps=4",
    "enable_tensorboard=false", "enable_goodput_recording=false", "monitor_goodput=false", "routed_bias_update_rate=0.0",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow("the real MaxText, twice for each model: imports and compiles for minutes"),
    pytest.mark.skipif(not PYTHON, reason="WEIGHTBEAM_MAXTEXT_PYTHON names no interpreter that has MaxText"),
]


def flags_of(made: Any) -> list[str]:
    """What is printed for MaxText, but for the path."""
    told = {key: value for key, value in made.to_dict()["maxtext"].items() if not key.startswith("load_")}
    return [f"{key}={value}" for key, value in told.items()]


def maxtext(place: Path, *jobs: dict[str, Any]) -> None:
    (place / "jobs.json").write_text(json.dumps(jobs))
    run(PYTHON, SCRIPT, place / "jobs.json", cwd=place, status=0, timeout=1500)


def logits_of(release: Path, tokens: np.ndarray) -> np.ndarray:
    """transformers', of the language model."""
    config = transformers.AutoConfig.from_pretrained(release)
    if getattr(config, "qk_rope_head_dim", None):  # what DeepSeek's releases say; the cases' is that of other models
        config.head_dim = config.qk_rope_head_dim
    named = getattr(transformers, config.architectures[0])
    model = named.from_pretrained(release, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("case", CASES)
def test_maxtext_trains_and_goes_on(generated: Path, tmp_path: Path, case: str, scan: bool) -> None:
    """Four steps from our checkpoint; the release of the last has MaxText's logits; the state after the third, with its
    layers stacked the other way, has the last step's loss.
    """
    release, model = generated / "cases" / case, given()[case]["maxtext_model"]
    said = dict(maxtext_model=model, progress=False)
    made = convert.convert(
        str(release),
        str(tmp_path / "ckpt"),
        save_dtype="float32",
        scan_layers=scan,
        vocab_size=given()[case]["vocab"],
        **said,
    )
    begin = [*flags_of(made), *PLAIN, f"base_output_directory={tmp_path / 'runs'}"]
    losses = tmp_path / "losses.json"
    maxtext(tmp_path, {"train": [*begin, "run_name=run", f"load_parameters_path={made.path}"], "losses": str(losses)})
    begun = json.loads(losses.read_text())

    steps, like = tmp_path / "runs" / "run" / "checkpoints", dict(like=str(release), **said)
    plain = reshard.reshard(str(steps / "3"), str(tmp_path / "params"), state="params", **like)
    moved = reshard.reshard(str(steps / "2"), str(tmp_path / "moved"), scan_layers=not scan, **like)
    export.export(str(steps / "3"), str(tmp_path / "tuned"), save_dtype="float32", **like)
    tokens = np.random.default_rng(0).integers(0, 200, (2, 64), dtype=np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    on = [*flags_of(moved), *PLAIN, f"base_output_directory={tmp_path / 'runs'}", "run_name=again"]
    maxtext(
        tmp_path,
        {"logits": [*begin, "run_name=l", f"load_parameters_path={plain.path}"], "tokens": str(tmp_path / "tokens.npy"), "out": str(tmp_path / "logits.npy")},
        {"train": [*on, f"load_full_state_path={moved.path}"], "losses": str(tmp_path / "on.json")},
    )  # fmt: skip
    went_on = json.loads((tmp_path / "on.json").read_text())
    wanted = logits_of(tmp_path / "tuned", tokens)
    apart = float(np.abs(np.load(tmp_path / "logits.npy")[..., : wanted.shape[-1]] - wanted).max())
    if table := os.environ.get("WRITE_TRAINED"):
        row = dict(case=case, scan=scan, losses=begun, on=went_on, logits=apart)
        with Path(table).open("a") as file:
            file.write(json.dumps(row) + "\n")
    assert len(begun) == 4
    assert begun["3"] < begun["0"]
    assert went_on["3"] == pytest.approx(begun["3"], abs=2e-5)
    assert apart < FURTHER.get(case, 1e-4)
    assert call("verify", "--source", tmp_path / "tuned", "--checkpoint", steps / "3") == 0
