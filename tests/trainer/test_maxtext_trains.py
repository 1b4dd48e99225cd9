"""MaxText from the package index, as it is, with our checkpoints: it trains from them, what it trained is exported, and
its resharded states go on.

The environment variable `WEIGHTBEAM_MAXTEXT_PYTHON` names an interpreter of an environment that has it (0.2.5 was run with jax
0.11.1, Python 3.12, on a CPU); without one these tests are skipped. With `WRITE_TRAINED=yes` each adds a line to
`tests/facts/trained.jsonl`, of which `python -m deploy.tables` writes the table of docs/reference/measurements.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.models import CASES as SIZES
from cases.models import fill_tables, make
from lazily import lazily
from support import call, given

from weightbeam.pipelines.commands import convert, export, plan, reshard

torch = lazily("torch")
transformers = lazily("transformers")

CASES = (
    "llama3.1", "qwen2.5", "qwen3", "qwen3-tied", "qwen3-moe", "mixtral", "deepseek2", "deepseek3", "deepseek3.2", "gpt-oss", "olmo3", "qwen3-next",
    "qwen3.5", "gemma2", "gemma3", "gemma4-dense", "gemma4-moe", "deepseek4", "gemma4-small",
)  # fmt: skip
MODELS = {
    "mistral": "mistral-7b",
    "llama4": None,
    "kimi_k25": None,
    "qwen3_vl": None,
    "qwen3_omni": None,
}  # MaxText's, if said
UNSCANNED = {"gemma4-small", "qwen3_vl", "qwen3_omni"}  # MaxText has no other layout of theirs
IDS = [(case, scan) for case in (*CASES, *MODELS) for scan in (True, False) if not (scan and case in UNSCANNED)]
# Experts are multiplied densely: MaxText's kernels for them are a TPU's, which a CPU interprets.
PLAIN = (
    "dtype=float32", "weight_dtype=float32", "matmul_precision=highest", "dataset_type=synthetic", "per_device_batch_size=1", "max_target_length=64",
    "hardware=cpu", "skip_jax_distributed_system=true", "attention=dot_product", "checkpoint_period=1", "async_checkpointing=false", "steps=4",
    "enable_tensorboard=false", "enable_goodput_recording=false", "monitor_goodput=false", "routed_bias_update_rate=0.0",
    "sparse_matmul=false", "megablox=false", "capacity_factor=-1.0", "use_batch_split_schedule=false",
)  # fmt: skip

ROWS = Path(__file__).parents[1] / "facts" / "trained.jsonl"

pytestmark = [
    pytest.mark.slow("the real MaxText, three times for each model: compiles for half a minute"),
    pytest.mark.skipif(
        not os.environ.get("WEIGHTBEAM_MAXTEXT_PYTHON"),
        reason="WEIGHTBEAM_MAXTEXT_PYTHON names no interpreter that has MaxText",
    ),
]


def flags_of(made: Any) -> list[str]:
    """What is printed for MaxText, but for the path."""
    told = {key: value for key, value in made.to_dict()["maxtext"].items() if not key.startswith("load_")}
    return [f"{key}={value}" for key, value in told.items()]


def logits_of(release: Path, tokens: np.ndarray, dtype: Any = None) -> np.ndarray:
    """transformers', of the language model, whose tied table is rounded for the head as MaxText rounds it, and whose
    indexers take the first of equal scores as MaxText's do.
    """
    dtype = dtype or torch.float32
    config = transformers.AutoConfig.from_pretrained(release)
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):  # what DeepSeek's releases say; the cases' is that of other models
        text.head_dim = text.qk_rope_head_dim
    named = getattr(transformers, config.architectures[0])
    how = dict(attn_implementation="eager", experts_implementation="eager")  # what else there is has no float64
    model = named.from_pretrained(release, config=config, dtype=dtype, **how).eval()
    model = getattr(model, "thinker", model)  # of Qwen 3 Omni
    if model.config.tie_word_embeddings or model.config.get_text_config().tie_word_embeddings:
        # https://github.com/AI-Hypercomputer/maxtext, src/maxtext/layers/embeddings.py, attend_on_embedding, 0.2.5
        rounded = model.get_output_embeddings().weight.detach().bfloat16().to(dtype)
        model.get_output_embeddings().weight = torch.nn.Parameter(rounded)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "topk", first_of_equals)
        return model(input_ids=torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def first_of_equals(values: Any, k: int, dim: int = -1, **how: Any) -> Any:
    """`topk`, of equal values the first ones. An indexer's scores are sums over its heads of what a ReLU leaves: with the
    cases' 2 and 4 heads many are 0, with a release's 64 none. torch takes any of them.
    (https://github.com/AI-Hypercomputer/maxtext, src/maxtext/layers/attention_mla.py, generate_mask, 0.2.5)
    """
    found = values.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk([each.narrow(dim, 0, k) for each in found])


def release_of(case: str, generated: Path, tmp_path: Path) -> Path:
    """A case's. DeepSeek V4's is written anew, with other routing tables than the zeros that transformers makes: MaxText
    counts an expert that a token's row names twice once, where it multiplies experts densely (src/maxtext/layers/moe.py,
    reshape_and_update_weights, 0.2.5).
    """
    if case != "deepseek4":
        return generated / ("models" if case in MODELS else "cases") / case
    kind, sizes, shard = SIZES[case]
    model = make(kind, sizes, shard, tmp_path / "release", seed=0)
    fill_tables(model)
    model.save_pretrained(tmp_path / "release")
    return tmp_path / "release"


def rows_of(release: Path) -> int:
    """Of its embedding. Those that MaxText's converter adds are zeros, which synthetic tokens would hit: behind a norm of a
    zero vector the gradient is a thousand times larger, and infinite behind all of Gemma 3's.
    """
    config = json.loads((release / "config.json").read_text())
    config = config.get("thinker_config", config)
    return config.get("text_config", config)["vocab_size"]


def losses_of(maxtext: Any, file: Path, *flags: str) -> dict[str, float]:
    """What the trainer made of each step."""
    maxtext.do({"train": flags, "losses": str(file)})
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("case", "scan"), IDS, ids=[f"{case}-{'scanned' if scan else 'unscanned'}" for case, scan in IDS]
)
def test_maxtext_trains_and_goes_on(maxtext: Any, generated: Path, tmp_path: Path, case: str, scan: bool) -> None:
    """Four steps from our checkpoint; the release of the last has MaxText's logits; the state after the third, with its
    layers stacked the other way, has the last step's loss.
    """
    release = release_of(case, generated, tmp_path)
    model = MODELS[case] if case in MODELS else given()[case]["maxtext_model"]
    named = dict(maxtext_model=model)
    said = dict(named, progress=False)
    made = convert.convert(
        str(release),
        str(tmp_path / "ckpt"),
        save_dtype="float32",
        scan_layers=scan,
        vocab_size=rows_of(release),
        **said,
    )
    plain = [*PLAIN, f"base_output_directory={tmp_path / 'runs'}", f"jax_cache_dir={maxtext.cache}"]
    begin = [*flags_of(made), *plain]
    begun = losses_of(maxtext, tmp_path / "begun.json", *begin, "run_name=run", f"load_parameters_path={made.path}")

    steps, like = tmp_path / "runs" / "run" / "checkpoints", dict(like=str(release), **said)
    params = reshard.reshard(str(steps / "3"), str(tmp_path / "params"), state="params", **like)
    moved = reshard.reshard(
        str(steps / "2"), str(tmp_path / "moved"), scan_layers=not scan and case not in UNSCANNED, **like
    )
    export.export(str(steps / "3"), str(tmp_path / "tuned"), save_dtype="float32", **like)
    on = [*flags_of(moved), *plain, "run_name=again", f"load_full_state_path={moved.path}"]
    went_on = losses_of(maxtext, tmp_path / "on.json", *on)
    tokens, out = np.random.default_rng(0).integers(0, 200, (2, 64), dtype=np.int32), tmp_path / "logits.npy"
    np.save(tmp_path / "tokens.npy", tokens)
    loads = [*begin, "run_name=logits", f"load_parameters_path={params.path}"]
    maxtext.do({"logits": loads, "tokens": str(tmp_path / "tokens.npy"), "out": str(out)})
    wanted = logits_of(tmp_path / "tuned", tokens)
    found = np.load(out)[..., : wanted.shape[-1]]
    apart = float(np.abs(found - wanted).max())
    row: dict[str, Any] = dict(case=case, scan=scan, losses=list(begun.values()), on=went_on["3"], logits=apart)
    # MaxText computes another model where the plan says so. And a delta rule in float32 isn't that exact itself: there
    # MaxText is hardly further off than transformers. Weights so small reach no clamp.
    said = plan.plan(str(release), **named).maxtext_config().limits
    if limits := [limit for limit in said if not limit.startswith("swiglu_limit")]:
        row["limits"] = limits
    elif apart >= 1e-4:
        exact = logits_of(tmp_path / "tuned", tokens, torch.float64)
        row["exact"] = [float(np.abs(each - exact).max()) for each in (found, wanted)]
    if os.environ.get("WRITE_TRAINED"):
        with ROWS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    assert len(begun) == 4
    assert 0 < begun["3"] < begun["0"]
    assert went_on["3"] == pytest.approx(begun["3"], abs=2e-5)
    if limits:
        assert apart > 1e-2
    elif apart >= 1e-4:
        assert row["exact"][0] < 2 * row["exact"][1]
    assert call("verify", "--source", tmp_path / "tuned", "--checkpoint", steps / "3") == 0
