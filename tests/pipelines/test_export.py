"""The way back: what was converted comes back bit for bit, what MaxText's training wrote becomes a release that
transformers loads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from lazily import lazily
from pairs import some
from quantised import fp8_llama
from safetensors.numpy import load_file
from servers.hub import FakeHub
from support import (
    BF16,
    F32,
    LLAMA,
    QWEN3_MOE,
    call,
    convert,
    given,
    make_release,
    peft_adapter,
    random_tensors,
    read_config,
    read_tensors,
    save,
)
from trained import SHARED, TRAINED, needs_shared, trained_like

import weightbeam as wb
from weightbeam.formats.targets import release as release_target

ocp = lazily("orbax.checkpoint")
torch = lazily("torch")
jax = lazily("jax")
transformers = lazily("transformers")

CASES = [case for case in given() if case != "deepseek3-mtp-standalone"]


def export(source: Path, output: Path, *options: object) -> dict[str, np.ndarray]:
    """Runs `weightbeam export`; returns the tensors that it wrote."""
    assert call("export", "--source", source, "--output", output, *options) == 0
    return read_tensors(output)


def compare(made: dict[str, np.ndarray], wanted: dict[str, np.ndarray], lossy: dict[str, str]) -> None:
    """Every tensor that was written has the wanted bits, but for those that are rounded by what the record says."""
    for name, values in made.items():
        assert (values.dtype, values.shape) == (wanted[name].dtype, wanted[name].shape), name
        if name in lossy:
            np.testing.assert_allclose(
                values.astype(F32), wanted[name].astype(F32), rtol=2**-7, atol=2**-7, err_msg=name
            )
        else:
            assert values.tobytes() == wanted[name].tobytes(), name


@pytest.mark.parametrize("case", some(CASES, 3))
def test_there_and_back(generated: Path, tmp_path: Path, case: str) -> None:
    """Converted to float32 and exported without being told anything: the original bits, tensor by tensor, and the
    release's files. That every family's table reads back what it wrote is proved by `tests/families/test_rebuilt.py`.
    """
    source, facts = generated / "cases" / case, given()[case]
    scan = "false" if "scanned" not in facts else "true"
    convert(
        source,
        tmp_path / "ckpt",
        "--maxtext_model",
        facts["maxtext_model"],
        "--save_dtype",
        "float32",
        "--scan_layers",
        scan,
        "--mesh",
        "fsdp=4",
    )
    made, wanted = export(tmp_path / "ckpt", tmp_path / "back"), read_tensors(source)
    record = json.loads((tmp_path / "back" / "weightbeam.json").read_text())
    shifted = {name for name, why in record["lossy"].items() if "shifted" in why}  # 1 + w loses a bit of 1 in 10^5
    compare(made, wanted, {name: why for name, why in record["lossy"].items() if name in shifted})
    left_out = set(wanted) - set(made)
    assert left_out <= set(record["left_out"])
    assert all(
        any(word in record["left_out"][name] for word in ("tower", "prediction", "text only")) for name in left_out
    )
    assert ("| left out of the release |" in (tmp_path / "back" / "README.md").read_text()) == bool(record["left_out"])
    config, released = read_config(tmp_path / "back"), read_config(source)
    assert {
        key: value
        for key, value in config.items()
        if released.get(key) != value and key not in ("dtype", "torch_dtype")
    } == record["config_edits"]
    assert (tmp_path / "back" / "generation_config.json").exists() == (source / "generation_config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt", "back"}


@pytest.mark.parametrize("case", some(["llama3.1", "deepseek3", "gemma2", "gpt-oss", "qwen3-next"], 2))
def test_from_unscanned_bfloat16(generated: Path, tmp_path: Path, case: str) -> None:
    """In units of a few chunks, from a layer's array each: exact where the record doesn't say otherwise."""
    source = generated / "cases" / case
    convert(source, tmp_path / "ckpt", "--maxtext_model", given()[case]["maxtext_model"], "--scan_layers", "false")
    made = export(tmp_path / "ckpt", tmp_path / "back", "--unit_bytes", "200000", "--max_shard_size", "100000")
    record = json.loads((tmp_path / "back" / "weightbeam.json").read_text())
    compare(made, read_tensors(source), record["lossy"])
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1


@needs_shared
@pytest.mark.parametrize("case", some([case for case in CASES if case != "gemma3"], 3))
def test_maxtexts_own_conversions(tmp_path: Path, case: str) -> None:
    """What MaxText's converter made comes back as the release that it was made of; its chunks hold all layers."""
    source = SHARED / "cases" / case
    if not (source / "scanned").exists():
        pytest.skip("MaxText has it unscanned only")
    made = export(
        source / "scanned",
        tmp_path / "back",
        "--like",
        source / "hf",
        "--maxtext_model",
        given()[case]["maxtext_model"],
    )
    record = json.loads((tmp_path / "back" / "weightbeam.json").read_text())
    wanted = {
        name: values for file in (source / "hf").glob("*.safetensors") for name, values in load_file(file).items()
    }
    compare(made, wanted, record["lossy"])


@needs_shared
def test_variables_that_maxtexts_converter_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek V4's routing tables and router biases: taken from the release, with a warning, and judged by it; refused
    where a release has no weights.
    """
    source = SHARED / "cases" / "deepseek4"
    export(source / "scanned", tmp_path / "back", "--like", source / "hf", "--maxtext_model", "deepseek4-284b")
    assert "7 tensors that the checkpoint doesn't hold are those of" in " ".join(capsys.readouterr().err.split())
    taken = json.loads((tmp_path / "back" / "weightbeam.json").read_text())["taken"]["tensors"]
    assert {name.rpartition(".")[2] for name in taken} == {"tid2eid", "e_score_correction_bias"}
    assert call("verify", tmp_path / "back") == 0
    assert "1,568 elements of 7 tensors of it compared" in capsys.readouterr().out
    (tmp_path / "form").mkdir()
    shutil.copy(source / "hf" / "config.json", tmp_path / "form")
    assert call("export", source / "scanned", tmp_path / "x", "--like", tmp_path / "form") == 2
    assert "5 problems:" in (said := capsys.readouterr().err)
    assert "--like RELEASE takes it from there" in said


@needs_shared
@pytest.mark.parametrize("run", TRAINED)
def test_what_maxtexts_training_wrote(tmp_path: Path, run: str) -> None:
    """Training states, parameters alone, with and without `.value`: the tensors that MaxText's own exporter makes of
    them in float32.
    """
    source = SHARED / "trained" / run
    like = trained_like(tmp_path / "like", run)
    facts = json.loads((source / "to_huggingface.json").read_text())
    dtype = "float32" if "weight_dtype_float32" in facts else "bfloat16"
    made = export(source, tmp_path / "out", "--like", like, "--maxtext_model", TRAINED[run], "--save_dtype", dtype)
    wanted = facts[f"weight_dtype_{dtype}"]["tensors"]
    assert made.keys() == wanted.keys()
    for name, (shape, kind, digest) in wanted.items():
        assert (list(made[name].shape), made[name].dtype.name) == (shape, kind)
        # the query's factor: MaxText multiplies, and rounds to bfloat16 first
        if "llama" not in run or "q_proj" not in name:
            assert hashlib.sha256(made[name].tobytes()).hexdigest() == digest, name
    assert call("verify", "--source", source, "--checkpoint", tmp_path / "out", "--maxtext_model", TRAINED[run]) == 0


@pytest.mark.parametrize(
    ("config", "kind"), [(LLAMA, "LlamaForCausalLM"), (QWEN3_MOE, "Qwen3MoeForCausalLM")], ids=["llama", "qwen3_moe"]
)
def test_transformers_computes_the_same(tmp_path: Path, config: dict, kind: str) -> None:
    """`from_pretrained` of the release and of what came back: the same logits."""
    source = save(tmp_path / "hf", config | {"architectures": [kind]}, random_tensors(config))
    convert(source, tmp_path / "ckpt", "--save_dtype", "float32")
    export(tmp_path / "ckpt", tmp_path / "back")
    tokens = torch.arange(24).reshape(2, 12) % config["vocab_size"]
    with torch.no_grad():
        logits = [
            getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)(tokens).logits
            for folder in (source, tmp_path / "back")
        ]
    assert torch.equal(*logits)


def test_large_chunks_are_unpacked_once(tmp_path: Path) -> None:
    """A stock Orbax checkpoint whose compressed chunks hold whole arrays, against units far smaller than one: the same
    bits.
    """
    tensors = random_tensors(LLAMA, F32)
    source = save(tmp_path / "hf", LLAMA, tensors)
    step = convert(source, tmp_path / "ours", "--save_dtype", "float32", "--maxtext_model", "llama2-7b")
    tree = ocp.PyTreeCheckpointer().restore(step / "items")
    ocp.PyTreeCheckpointer().save(tmp_path / "stock" / "0" / "items", tree)
    made = export(
        tmp_path / "stock" / "0" / "items",
        tmp_path / "back",
        "--like",
        source,
        "--maxtext_model",
        "llama2-7b",
        "--unit_bytes",
        "30000",
    )
    record = json.loads((tmp_path / "back" / "weightbeam.json").read_text())
    compare(made, tensors, record["lossy"])
    assert not (tmp_path / "back" / "unpacked").exists()


@pytest.mark.parametrize("stage", ["unpack", "seal", "publish"])
def test_stopped_at_every_other_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """While chunks are unpacked, while files are made whole, while they are published: nothing is seen, and the same
    command goes on.
    """
    from weightbeam.formats.targets.release_place import ReleaseFolder
    from weightbeam.transforms.planning import from_checkpoint

    tensors = random_tensors(LLAMA, F32)
    source = save(tmp_path / "hf", LLAMA, tensors)
    tree = ocp.PyTreeCheckpointer().restore(
        convert(source, tmp_path / "ours", "--save_dtype", "float32", "--maxtext_model", "llama2-7b") / "items"
    )
    ocp.PyTreeCheckpointer().save(tmp_path / "stock", tree)
    command = (
        "export",
        tmp_path / "stock",
        tmp_path / "back",
        "--like",
        source,
        "--maxtext_model",
        "llama2-7b",
        "--unit_bytes",
        "30000",
    )
    where, name = {
        "unpack": (from_checkpoint, "unpack"),
        "seal": (ReleaseFolder, "seal"),
        "publish": (ReleaseFolder, "publish"),
    }[stage]
    function, calls = getattr(where, name), []

    def fails(*arguments, **more):
        calls.append(arguments)
        if len(calls) > (stage == "unpack"):
            raise OSError(5, "the power is gone")
        return function(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, fails)
        assert call(*command) == 1
    assert calls
    assert not (tmp_path / "back").exists()
    assert call(*command, "--resume") == 0
    compare(
        read_tensors(tmp_path / "back"),
        tensors,
        json.loads((tmp_path / "back" / "weightbeam.json").read_text())["lossy"],
    )
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "ours", "stock", "back"}


def test_dtypes_and_a_padded_vocabulary(tmp_path: Path) -> None:
    """Rows that were added for MaxText are cropped; `--save_dtype` rounds once, and `config.json` says both names of
    the dtype.
    """
    tensors = random_tensors(LLAMA, F32)
    source = save(tmp_path / "hf", LLAMA, tensors)
    convert(source, tmp_path / "ckpt", "--save_dtype", "float32", "--vocab_size", "512", "--maxtext_model", "llama2-7b")
    made = export(tmp_path / "ckpt", tmp_path / "back", "--save_dtype", "bfloat16")
    for name, values in tensors.items():
        assert made[name].tobytes() == values.astype(BF16).tobytes(), name
    config = read_config(tmp_path / "back")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["vocab_size"] == LLAMA["vocab_size"]


def test_values_beyond_the_largest_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """float16 ends at 65,504: what becomes infinite is counted by whatever writes it, and stands in its record."""
    tensors, name = random_tensors(LLAMA, F32), "model.layers.0.mlp.up_proj.weight"
    tensors[name][0, :3] = 1e5, -1e5, 3.4e38
    source = save(tmp_path / "hf", LLAMA, tensors)
    convert(source, tmp_path / "ckpt", "--save_dtype", "float32", "--maxtext_model", "llama2-7b")
    key = "params.params.decoder.layers.mlp.wi_1.kernel"
    for command, source, dtype, output, told in (
        ("export", "ckpt", "float16", "half", f"{name} (3 infinite)"),
        ("reshard", "ckpt", "bfloat16", "narrow", f"{key} (1 infinite)"),
    ):
        capsys.readouterr()
        assert call(command, tmp_path / source, tmp_path / output, "--save_dtype", dtype) == 0
        assert f"1 tensor holds values that aren't finite: {told}" in capsys.readouterr().err
    record = json.loads((tmp_path / "half" / "weightbeam.json").read_text())
    assert record["not_finite"] == {name: {"nan": 0, "infinite": 3}}


def test_a_unit_of_padding_alone(tmp_path: Path) -> None:
    """It makes nothing, and is done as any other one."""
    tensors = random_tensors(LLAMA, F32)
    source = save(tmp_path / "hf", LLAMA, tensors)
    convert(source, tmp_path / "ckpt", "--vocab_size", "256")
    made = export(tmp_path / "ckpt", tmp_path / "back", "--unit_bytes", "4096")
    assert made.keys() == tensors.keys()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert made[name].tobytes() == tensors[name].astype(BF16).astype(made[name].dtype).tobytes(), name


def test_a_model_without_a_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`config.json` of MaxText's configuration, the user's tokenizer, and what ends a text: transformers loads it and
    computes the same.
    """
    config = LLAMA | {"architectures": ["LlamaForCausalLM"]}
    source = make_release(tmp_path / "hf", config, dtype=F32)
    step = convert(source, tmp_path / "ours", "--save_dtype", "float32", "--maxtext_model", "llama2-7b")
    items = shutil.copytree(step / "items", tmp_path / "trained")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 2, "content": "</s>"}, {"id": 1, "content": "<s>"}]})
    )
    (tmp_path / "tokens" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": {"content": "<s>"}})
    )
    (tmp_path / "tokens" / "notes.txt").write_text("mine")
    given = ("--maxtext_config", step / "maxtext.yml", "--tokenizer", tmp_path / "tokens", "--save_dtype", "float32")
    made = export(items, tmp_path / "out", *given)
    assert {name: values.shape for name, values in made.items()} == {
        name: values.shape for name, values in read_tensors(source).items()
    }
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "_from_model_config": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    names = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "maxtext.yml",
        "weightbeam.json",
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"model.safetensors"}
    tokens = torch.arange(24).reshape(2, 12) % config["vocab_size"]
    with torch.no_grad():
        logits = [
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
            for folder in (source, tmp_path / "out")
        ]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    (tmp_path / "bad.yml").write_text("decoder_block: chimera\n")
    damaged = Path(shutil.copytree(source, tmp_path / "damaged"))
    (damaged / "generation_config.json").write_text("[" * 100_000)
    for wrong, message in (
        (("--maxtext_config", step / "maxtext.yml", "--like", source), "both given"),
        (("--maxtext_config", tmp_path / "bad.yml"), "nearest is"),
        (("--maxtext_config", tmp_path / "none.yml"), "No such file"),
        (("--like", source, "--tokenizer", tmp_path / "ours"), "holds no tokenizer"),
        (("--like", source, "--tokenizer", tmp_path / "none"), f"--tokenizer={tmp_path / 'none'}: no such folder"),
        (
            ("--like", source, "--tokenizer", step / "maxtext.yml"),
            f"--tokenizer={step / 'maxtext.yml'}: no such folder",
        ),
        (("--like", source, "--lora_alpha", "8", "--dry_run"), "--lora_alpha: is of an adapter"),
        (("--like", damaged, "--tokenizer", tmp_path / "tokens"), "generation_config.json, into which"),
    ):
        assert call("export", items, tmp_path / "x", *wrong) == 2
        assert message in capsys.readouterr().err
    assert call("export", tmp_path / "ours", tmp_path / "x", "--step", "7") == 2
    assert f"{tmp_path / 'ours'} has no such step; there are 0" in capsys.readouterr().err
    wrong = [word for name in ("like", "tokenizer", "lora") for word in (f"--{name}", tmp_path / "none")]
    assert call("export", items, tmp_path / "x", *wrong) == 2
    said = capsys.readouterr().err
    assert all(f"--{name}={tmp_path / 'none'}: no such folder" in said for name in ("like", "tokenizer", "lora"))


SMALL = dict(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128,
    vocab_size=128, max_position_embeddings=256,
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip
SCALED = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000, "original_max_position_embeddings": 8}
ALONE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # configuration class, its fields, what config.json has to say
    "gemma4": (
        "Gemma4Text", dict(num_hidden_layers=6, sliding_window=16, global_head_dim=32, hidden_size_per_layer_input=0, attention_k_eq_v=True),
        dict(architectures=["Gemma4ForCausalLM"]),
    ),
    "gemma4 of five": (
        "Gemma4Text", dict(
            num_hidden_layers=10, sliding_window=16, global_head_dim=32, hidden_size_per_layer_input=16, vocab_size_per_layer_input=128,
            num_kv_shared_layers=5, layer_types=[*["sliding_attention"] * 4, "full_attention"] * 2,
        ),
        dict(layer_types=[*["sliding_attention"] * 4, "full_attention"] * 2),
    ),
    "llama4": (
        "Llama4Text", dict(num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=128, interleave_moe_layer_step=1, rope_parameters=SCALED),
        dict(architectures=["Llama4ForCausalLM"]),
    ),
    "gemma4 of experts": (
        "Gemma4Text", dict(
            num_hidden_layers=6, sliding_window=16, global_head_dim=32, hidden_size_per_layer_input=0, num_global_key_value_heads=2, enable_moe_block=True,
            num_experts=4, top_k_experts=2, moe_intermediate_size=32, layer_types=[*["sliding_attention"] * 5, "full_attention"],
        ),
        {},
    ),
    "deepseek_v2": ("DeepseekV2", LATENT | dict(head_dim=8, q_lora_rank=None, topk_method="greedy"), dict(q_lora_rank=None)),
    "deepseek_v3": ("DeepseekV3", LATENT | dict(head_dim=8, q_lora_rank=32, n_group=2, topk_group=1), dict(q_lora_rank=32)),
    "deepseek_v3 without dense layers": (
        "DeepseekV3", LATENT | dict(head_dim=8, q_lora_rank=32, n_group=2, topk_group=1, first_k_dense_replace=0), dict(first_k_dense_replace=0),
    ),
    "gemma2": (
        "Gemma2", dict(final_logit_softcapping=None, attn_logit_softcapping=None, query_pre_attn_scalar=16),
        dict(final_logit_softcapping=None, attn_logit_softcapping=None),
    ),
    "mistral": ("Mistral", dict(sliding_window=None), dict(sliding_window=None)),
    "linear": ("Llama", dict(rope_parameters=LINEAR), dict(rope_parameters=LINEAR)),
    "yarn": ("Qwen3", dict(rope_parameters=YARN, head_dim=16), {}),
    "yarn in all layers": (
        "Olmo3", dict(num_hidden_layers=4, sliding_window=16, rope_parameters=dict.fromkeys(("sliding_attention", "full_attention"), YARN)), {},
    ),
    "qwen3_5": (
        "Qwen3_5MoeText", dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        ),
        dict(architectures=["Qwen3_5MoeForCausalLM"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ALONE)
def test_what_has_no_release_is_what_transformers_loads(tmp_path: Path, case: str) -> None:
    """No tensor is missing, none is left over, and the class computes the same; what its default isn't is said, null too."""
    kind, fields, said = ALONE[case]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**SMALL | fields))
    model.save_pretrained(tmp_path / "hf")
    options = ("--save_dtype", "float32", "--scan_layers", "false")
    step = convert(tmp_path / "hf", tmp_path / "ours", *options)
    items = shutil.copytree(step / "items", tmp_path / "trained")
    export(items, tmp_path / "out", "--maxtext_config", step / "maxtext.yml", "--save_dtype", "float32")
    config = read_config(tmp_path / "out")
    assert {field: config[field] for field in said} == said
    made, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(found[which] for which in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits = made.eval()(tokens).logits[..., : SMALL["vocab_size"]]  # Gemma 2's vocabulary is padded
        torch.testing.assert_close(logits, model.eval()(tokens).logits, atol=1e-5, rtol=1e-5)
    if config["vocab_size"] == SMALL["vocab_size"]:  # of padded rows the metadata says that they are a release's
        assert call("verify", tmp_path / "out") == 0


def test_the_language_model_of_one_with_towers_needs_no_release(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `convert` says of it is enough, whatever MaxText calls the whole model; what has towers has a release."""
    source = generated / "models" / "qwen3_vl"
    words = ("--scan_layers", "false")
    step = convert(source, tmp_path / "text", *words)
    assert call("export", step, tmp_path / "out", "--maxtext_config", step / "maxtext.yml") == 0
    assert call("verify", tmp_path / "out") == 0
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    step = convert(source, tmp_path / "whole", *words, "--multimodal", "true")
    capsys.readouterr()
    assert call("export", step, tmp_path / "none", "--maxtext_config", step / "maxtext.yml") == 2
    assert "doesn't say it; name a release of the model in its place (--like)" in capsys.readouterr().err


def test_routing_tables_need_no_release(generated: Path, tmp_path: Path) -> None:
    """DeepSeek V4's are integers in training's tree, and stay so where no release says it."""
    step = convert(generated / "models" / "deepseek_v4", tmp_path / "ours", "--scan_layers", "false")
    words = ("--maxtext_config", step / "maxtext.yml")
    assert call("export", step, tmp_path / "out", *words) == 0
    tables = {name: values for name, values in read_tensors(tmp_path / "out").items() if "tid2eid" in name}
    assert tables
    assert all(values.dtype == np.int64 and values.any() for values in tables.values())
    assert call("verify", tmp_path / "out") == 0


def test_routing_tables_of_a_state_that_jax_saved(generated: Path, tmp_path: Path) -> None:
    """Without its 64-bit integers; they are written as the release has them."""
    source = generated / "models" / "deepseek_v4"
    step = convert(source, tmp_path / "ours", "--scan_layers", "false")
    checkpointer = ocp.PyTreeCheckpointer()
    tree = jax.tree.map(
        lambda each: np.int32(each) if getattr(each, "dtype", None) == np.int64 else each,
        checkpointer.restore(step / "items"),
    )
    checkpointer.save(tmp_path / "saved" / "0" / "items", tree)
    assert call("export", tmp_path / "saved", tmp_path / "out", "--like", source, "--save_dtype", "float32") == 0
    wanted = read_tensors(source)
    tables = {name: values for name, values in read_tensors(tmp_path / "out").items() if "tid2eid" in name}
    assert tables
    for name, values in tables.items():
        assert values.dtype == wanted[name].dtype
        assert np.array_equal(values, wanted[name])


def test_rows_of_tokens_that_the_release_lacks_are_not_lost(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens were added to the model that the checkpoint was made of. Without a record they may be padding, which is said."""
    source, like = (make_release(tmp_path / str(size), LLAMA | {"vocab_size": size}) for size in (72, 64))
    step = convert(source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    words = ("--output", tmp_path / "out", "--like", like, "--maxtext_model", "llama2-7b")
    assert call("export", "--source", step, *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has 64 tokens, and the checkpoint's model 72, by its record: 8 rows of the vocabulary would be lost" in said
    assert not (tmp_path / "out").exists()
    items = shutil.copytree(step / "items", tmp_path / "trained")
    assert call("export", "--source", items, *words) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "8 rows of the vocabulary are left out as padding, behind the 64 of" in said
    padded = convert(like, tmp_path / "padded", "--maxtext_model", "llama2-7b", "--vocab_size", "72")
    assert call("export", "--source", padded, *words, "--overwrite") == 0
    gemma = generated / "cases/gemma2"  # MaxText pads it itself
    items = shutil.copytree(convert(gemma, tmp_path / "gemma") / "items", tmp_path / "padded by MaxText")
    assert call("export", "--source", items, "--output", tmp_path / "gemma2 again", "--like", gemma) == 0
    assert "padding" not in capsys.readouterr().err


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before any work, with nothing written: no like, another model's like, an output that is there, a place that
    the source lies in.
    """
    source = make_release(tmp_path / "hf")
    other = make_release(tmp_path / "other", LLAMA | {"num_hidden_layers": 5})
    step = convert(source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    foreign = shutil.copytree(step / "items", tmp_path / "foreign")
    for arguments, message in (
        (["--source", foreign, "--output", tmp_path / "x"], "--like is missing"),
        (["--source", step, "--output", tmp_path / "x", "--like", other], "has other sizes: num_hidden_layers is 5, "),
        (["--source", step, "--output", tmp_path / "full", "--overwrite"], "isn't a release that Weightbeam wrote"),
        (["--source", step, "--output", step / "items"], "lies in a checkpoint"),
        (["--source", step, "--output", tmp_path], "which it is made of; choose another"),
        (["--source", tmp_path / "nothing", "--output", tmp_path / "x"], "nothing"),
        ([], "--source is missing: the Orbax checkpoint\n--output is missing: the folder"),
        (["--source", step, "--output", tmp_path / "x", "--like", tmp_path / "nothing"], "--like="),
        (["--source", step, "--output", tmp_path / "x", "--like", tmp_path / "ckpt"], "an Orbax checkpoint already"),
        (["--source", step, "--output", tmp_path / "x", "--unit_bytes", "100"], "raise --unit_bytes"),
    ):
        assert call("export", *arguments) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def replace_files(release: Path) -> None:
    """Puts others of the same sizes and times in the place of a release's files, which differ in a byte that no
    fingerprint looks at.
    """
    for file in release.glob("*.safetensors"):
        before, data = file.stat(), bytearray(file.read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1
        file.with_suffix(".new").write_bytes(data)
        os.utime(file.with_suffix(".new"), ns=(before.st_atime_ns, before.st_mtime_ns))
        file.with_suffix(".new").rename(file)


def said_of_replaced(release: Path) -> str:
    """What a refusal says of the files that `replace_files` has replaced, as a pattern."""
    first = min(release.glob("*.safetensors"))
    return (
        rf"another plan \(the source's files have changed: {first} is another file .*\); --overwrite without --resume"
    )


def test_resumed_with_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the source was replaced meanwhile, of the same sizes and times even, nothing of two sources is mixed."""
    source = make_release(tmp_path / "hf")
    lora, _ = peft_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": (32, 32)})
    command = ("merge", source, tmp_path / "out", "--lora", lora)

    with monkeypatch.context() as patched:
        patched.setattr(release_target, "write_unit", no_space)
        assert call(*command) == 1
    capsys.readouterr()
    replace_files(source)
    assert call(*command, "--resume") == 2
    assert re.search(said_of_replaced(source), capsys.readouterr().err)
    assert call(*command, "--overwrite") == 0


def test_resumed_with_another_release_for_the_towers(
    generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same of the release that gives the towers: not those of one in a part, and of another one in the rest."""
    like = shutil.copytree(generated / "models" / "qwen3_vl", tmp_path / "like")
    convert(like, tmp_path / "ckpt", "--scan_layers", "false")
    command = ("export", tmp_path / "ckpt", tmp_path / "out", "--like", like)
    with monkeypatch.context() as patched:
        patched.setattr(release_target, "write_unit", no_space)
        assert call(*command) == 1
    capsys.readouterr()
    replace_files(like)
    assert call(*command, "--resume") == 2
    assert re.search(said_of_replaced(like), capsys.readouterr().err)
    assert call(*command, "--overwrite") == 0
    made, towers = read_tensors(tmp_path / "out"), read_tensors(like)
    assert all(made[name].tobytes() == values.tobytes() for name, values in towers.items() if ".visual." in name)


def test_stopped_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Units that were done are kept; nothing is there until all is; the same command goes on, and does nothing once it
    is done.
    """
    source = make_release(tmp_path / "hf")
    step = convert(source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    command = [
        "export",
        "--source",
        step,
        "--output",
        tmp_path / "back",
        "--unit_bytes",
        "12000",
        "--direct_num_workers=1",
    ]
    original, done = release_target.write_unit, []

    def fails(staging, unit, rows):
        if len(done) == 3:
            raise OSError(28, "No space left on device")
        done.append(unit)
        original(staging, unit, rows)

    with monkeypatch.context() as patched:
        patched.setattr(release_target, "write_unit", fails)
        assert call(*command) == 1
    assert not (tmp_path / "back").exists()
    assert call(*command) == 2
    assert "--resume" in capsys.readouterr().err
    assert call(*command, "--max_shard_size=50KB", "--resume") == 2
    assert "another plan (--max_shard_size was not given, is 50000); --overwrite" in capsys.readouterr().err
    assert call(*command, "--resume") == 0
    assert call(*command, "--resume") == 0
    assert "nothing to do" in capsys.readouterr().out
    compare(
        read_tensors(tmp_path / "back"),
        read_tensors(source),
        json.loads((tmp_path / "back" / "weightbeam.json").read_text())["lossy"],
    )
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "ckpt", "back"}


def test_plans_and_results_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan export …` is `export --dry_run`; `--json -` prints nothing else; merge, dequantize and quantize alike."""
    source = make_release(tmp_path / "hf")
    step = convert(source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b", "--save_dtype", "float32")
    capsys.readouterr()
    assert call("plan", "export", step, tmp_path / "out", "--json", "-") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["problems"] == []
    assert planned["tensors"]["model.norm.weight"]["dtype"] == "bfloat16"
    assert planned["tensors"]["model.norm.weight"]["lossy"]
    assert call("plan", "export", step, tmp_path / "out") == 0
    assert f"weightbeam export {step / 'items'} {tmp_path / 'out'}" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert call("export", step, tmp_path / "out", "--json", "-") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["output"], made["state"]) == (str(tmp_path / "out"), "done")
    assert planned.items() <= made.items()
    assert call("plan", "export", step, tmp_path / "out") == 2  # the output counts
    assert "exists" in capsys.readouterr().err
    assert call("plan", "quantize", source, "--json", tmp_path / "q.json", "-q") == 0
    assert json.loads((tmp_path / "q.json").read_text())["tensors"]["model.layers.0.mlp.up_proj.weight_scale_inv"][
        "shape"
    ] == [1, 1]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["export", "quantize", "merge", "reshard"])
def test_the_last_line_of_a_dry_run_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """From another folder, with relative paths and a blank in them: every option that was given is there."""
    tensors = random_tensors(LLAMA)
    source = save(tmp_path / "a b" / "hf", LLAMA, tensors)
    tree = ocp.PyTreeCheckpointer().restore(
        convert(source, tmp_path / "ours", "--maxtext_model", "llama2-7b") / "items"
    )
    ocp.PyTreeCheckpointer().save(tmp_path / "a b" / "stock", tree)
    peft_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": (32, 32)})
    monkeypatch.chdir(tmp_path)
    options = {
        "export": (
            "--like",
            "a b/hf",
            "--maxtext_model",
            "llama2-7b",
            "--save_dtype",
            "float16",
            "--max_shard_size",
            "20KB",
        ),
        "quantize": ("--like", "a b/hf", "--maxtext_model", "llama2-7b", "--lora", "adapter"),
        "merge": ("--lora", "adapter,0.5"),
        "reshard": (
            "--like",
            "a b/hf",
            "--scan_layers",
            "false",
            "--mesh",
            "fsdp=2",
            "--mesh",
            "fsdp=4",
            "--direct_num_workers=1",
        ),
    }[name]
    before = set(tmp_path.iterdir())
    assert call(name, "a b/hf" if name == "merge" else "a b/stock", "out", *options, "--dry_run") == 0
    assert set(tmp_path.iterdir()) == before
    *_, ready, command = capsys.readouterr().out.rstrip().splitlines()
    assert re.fullmatch(r"ready: [\d.]+ [KM]?B to write", ready)
    words = shlex.split(command)
    assert words[:2] == ["weightbeam", name]
    assert not {"--source", "--output"} & set(words)
    assert [option for option in options if option not in words and "KB" not in option and "=1" not in option] == []
    assert call(*words[1:]) == 0
    assert (tmp_path / "out").is_dir()


def test_a_form_without_tensors_has_its_dtype(tmp_path: Path) -> None:
    """`config.json` alone says float32, float16 or nothing: the tensors are what the new one says, or it says what they
    are.
    """
    source = make_release(tmp_path / "hf", dtype=F32)
    tree = ocp.PyTreeCheckpointer().restore(
        convert(source, tmp_path / "ours", "--save_dtype", "float32", "--maxtext_model", "llama2-7b") / "items"
    )
    ocp.PyTreeCheckpointer().save(tmp_path / "stock", tree)
    for said, wanted in ((None, "bfloat16"), ("float32", "float32")):
        form = tmp_path / f"form-{said}"
        form.mkdir()
        (form / "config.json").write_text(
            json.dumps(
                {key: value for key, value in LLAMA.items() if "dtype" not in key} | ({"dtype": said} if said else {})
            )
        )
        assert (
            call("export", tmp_path / "stock", tmp_path / f"out-{said}", "--like", form, "--maxtext_model", "llama2-7b")
            == 0
        )
        assert {values.dtype.name for values in read_tensors(tmp_path / f"out-{said}").values()} == {wanted}
        assert [read_config(tmp_path / f"out-{said}")[key] for key in ("dtype", "torch_dtype")] == [wanted] * 2


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that isn't there, and a release, are called what they are."""
    source = make_release(tmp_path / "hf")
    for given_, words in (
        (tmp_path / "none", "none: no such folder"),
        (source, "but a release; weightbeam convert makes a checkpoint of it"),
    ):
        for command in ("export", "reshard"):
            assert call(command, given_, tmp_path / "out") == 2
            assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("made", ["export", "quantize"])
def test_verify_judges_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str) -> None:
    """Whichever side is named first: rounded as the table and the dtypes say; a changed element is named."""
    config = LLAMA | {"hidden_size": 160}
    source = make_release(tmp_path / "hf", config, dtype=F32)
    step = convert(
        source,
        tmp_path / "ckpt",
        "--maxtext_model",
        "llama2-7b",
        "--save_dtype",
        "float32",
        "--vocab_size",
        "80",
        "--mesh",
        "fsdp=2",
    )
    assert call(made, step, tmp_path / "out", *(("--save_dtype", "bfloat16") if made == "export" else ())) == 0
    assert call("plan", tmp_path / "out", "--maxtext_model", "llama2-7b") == 0  # its headers, by the same table
    for arguments in (
        (tmp_path / "out",),
        ("--source", step, "--checkpoint", tmp_path / "out"),
        ("--source", tmp_path / "out", "--checkpoint", step),
    ):
        capsys.readouterr()
        assert call("verify", *arguments) == 0
        assert "12 rounded once" in capsys.readouterr().out or made == "quantize"
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    name = "model.norm.weight" if made == "export" else "model.layers.1.mlp.up_proj.weight"
    data[start + json.loads(data[8:start])[name]["data_offsets"][0]] ^= 0x11
    file.write_bytes(data)
    assert call("verify", "--source", step, "--checkpoint", tmp_path / "out") == 1
    assert f"{name}[0" in capsys.readouterr().err


@needs_shared
def test_verify_knows_the_model_of_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that an export names, word for word: a checkpoint of MaxText's doesn't say how its rotary halves lie,
    but the export does.
    """
    like = trained_like(tmp_path / "like", "llama")
    assert (
        call(
            "export",
            SHARED / "trained" / "llama-fsdp8",
            tmp_path / "out",
            "--like",
            like,
            "--maxtext_model",
            "llama3.1-8b",
        )
        == 0
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("check it: ")]
    assert call(*shlex.split(line)[3:]) == 0
    assert call("verify", tmp_path / "out") == 0
    assert call("diff", SHARED / "trained" / "llama-fsdp8", tmp_path / "out") == 0


def test_as_a_library(tmp_path: Path) -> None:
    """`weightbeam.export`: a value that says what came of it, typed errors, nothing printed."""
    source = make_release(tmp_path / "hf")
    step = convert(source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    made = wb.export(str(step), str(tmp_path / "back"), progress=False)
    assert made.folder == str(tmp_path / "back")
    assert ml_dtypes.bfloat16 == read_tensors(tmp_path / "back")["model.norm.weight"].dtype
    with pytest.raises(wb.Refused) as refused:
        wb.export(str(step), str(tmp_path / "back"), progress=False)
    assert refused.value.problems[0].kind == "output"


def test_onto_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One commit that holds the release; nothing stays in the cache; without a token it is refused before any work."""
    source = make_release(tmp_path / "hf")
    step = convert(source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b", "--save_dtype", "float32")
    with FakeHub() as server:
        for name, value in server.env("hf_secret").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        server.users.add("hf_secret")
        server.writers.add("hf_secret")
        assert call("export", "--source", step, "--output", "hf://org/tuned") == 0
        assert "published" in capsys.readouterr().out
        held = server.repositories["org/tuned"].branches["main"].files
        (tmp_path / "got").mkdir()
        (tmp_path / "got" / "model.safetensors").write_bytes(bytes(held["model.safetensors"].data))
        compare(read_tensors(tmp_path / "got"), read_tensors(source), {})
        assert {"config.json", "README.md", "weightbeam.json"} <= set(held)
        lora, _ = peft_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": (32, 32)})
        fp8, *_ = fp8_llama(tmp_path / "fp8")
        for command in (("merge", source, "--lora", lora), ("dequantize", fp8), ("quantize", source)):
            assert call(*command, "--output", tmp_path / command[0]) == 0
            assert call(*command, "--output", f"hf://org/{command[0]}") == 0
            held = server.repositories[f"org/{command[0]}"].branches["main"].files
            assert {name: bytes(held[name].data) for name in ("config.json", "model.safetensors")} == {
                name: (tmp_path / command[0] / name).read_bytes() for name in ("config.json", "model.safetensors")
            }
        assert call("dequantize", fp8, "--output", "hf://org/quantize", "--create_pr") == 0
        assert [made.title.partition(" of ")[0] for made in server.repositories["org/quantize"].pulls] == [
            "Dequantisation"
        ]
        # what a stopped command left isn't gone on with if the files may have been written to since
        merge = ("merge", source, "--lora", lora, "--output", "hf://org/again")
        with monkeypatch.context() as patched:
            patched.setattr(release_target, "write_unit", no_space)
            assert call(*merge) == 1
        for file in source.glob("*.safetensors"):
            file.chmod(0o600)
        assert call(*merge) == 0
        assert list((tmp_path / "cache").glob("weightbeam/*")) == []
        monkeypatch.delenv("HF_TOKEN")
        assert call("export", "--source", step, "--output", "hf://org/tuned") == 2
        assert "HF_TOKEN" in capsys.readouterr().err
        close_session()
