"""`weightbeam logits`: transformers' own model, loaded by its own `from_pretrained`, is what each is compared with."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.models import CASES, fill_tables, make
from lazily import lazily
from pairs import some
from processes import wait_until
from quantised import fp8_llama
from safetensors.numpy import load_file, save_file
from support import LLAMA, call, convert, make_release, peft_adapter, read_config, read_tensors, save

import weightbeam as wb
from weightbeam.formats.release.model_class import model_class
from weightbeam.pipelines.forward.in_maxtext import LARGE, portions
from weightbeam.pipelines.forward.maxtext import layers_and_parts

tokenizers, torch, transformers = lazily("tokenizers"), lazily("torch"), lazily("transformers")
TOKENS = [1, 5, 9, 60, 3, 5]
DENSE: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=96,
)  # fmt: skip
EXPERTS = DENSE | dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
LATENT = DENSE | dict(
    num_key_value_heads=4, head_dim=8, moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, n_group=2, topk_group=1,
    num_experts_per_tok=2,
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", DENSE),
    "qwen3, tied": ("Qwen3Config", DENSE | dict(tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "gemma2": ("Gemma2Config", DENSE | dict(num_hidden_layers=4)),
    "gemma3": ("Gemma3TextConfig", DENSE | dict(num_hidden_layers=6)),
    "gpt_oss": ("GptOssConfig", DENSE | dict(num_local_experts=4, num_experts_per_tok=2)),
    "llama4": ("Llama4TextConfig", DENSE | dict(num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=96)),
}


def write(folder: Path, family: str, **other: Any) -> Path:
    """A model of random weights in bfloat16, as transformers saves it."""
    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes | other)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def by_transformers(folder: Path, **options: Any) -> np.ndarray:
    """The logits of the whole model, loaded at once."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        return model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()


def in_mxfp4(release: Path) -> Path:
    """A gpt-oss of experts in MXFP4, as it is released: random codes, scales near 1."""
    (file,) = release.glob("*.safetensors")
    tensors, rng = load_file(file), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(121, 124, (experts, rows, columns // 32), np.uint8)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((release / "config.json").read_text())
    (release / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return release


def change(release: Path, name: str, by: Callable[[np.ndarray], np.ndarray]) -> None:
    """Changes a tensor of a release of one file."""
    (file,) = release.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name] = by(tensors[name]).astype(tensors[name].dtype)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("family", some([*FAMILIES], 2))
def test_bits_are_those_of_transformers_whole_model(tmp_path: Path, family: str) -> None:
    release = write(tmp_path / "hf", family)
    made = wb.logits(str(release), token_ids=TOKENS, progress=False)
    np.testing.assert_array_equal(made.logits, by_transformers(release))


@pytest.mark.parametrize("case", ["cases/gemma4-small", "models/qwen3_vl", "models/qwen3_omni"])
def test_the_language_model_of_one_that_sees(generated: Path, case: str) -> None:
    """Gemma 4 looks into its embedding for the padding's row, outside of the module."""
    model = getattr(transformers, str(model_class(read_config(generated / case))))
    whole = model.from_pretrained(generated / case, dtype=torch.float32)
    made = wb.logits(str(generated / case), token_ids=TOKENS, progress=False)
    with torch.no_grad():
        wanted = getattr(whole, "thinker", whole)(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_array_equal(made.logits, wanted)


def test_a_prompts_tokens_have_their_text(tmp_path: Path) -> None:
    """Beside their numbers, as those that are most likely next have."""
    release = write(tmp_path / "hf", "llama")
    words = [f"word{number}" for number in range(DENSE["vocab_size"])]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="word0")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(release)
    found = wb.logits(str(release), prompt="word5 word9 word60", progress=False)
    assert found.tokens == (5, 9, 60)
    assert "'word9' 9" in str(found)
    assert f"'word{found.next[-1]}' {found.next[-1]}" in str(found).splitlines()[-1]
    assert "'" not in str(wb.logits(str(release), token_ids=found.tokens, progress=False))


def test_fp8_is_run_as_its_values(tmp_path: Path) -> None:
    """Those that the release's own codes and scales make, saved as a plain release and run by transformers."""
    coded, _, values = fp8_llama(tmp_path / "fp8")
    plain = save(tmp_path / "plain", LLAMA, values)
    made = wb.logits(str(coded), token_ids=TOKENS, progress=False)
    np.testing.assert_array_equal(made.logits, by_transformers(plain))


def test_mxfp4_is_run_as_transformers_dequantises_it(tmp_path: Path) -> None:
    release = in_mxfp4(write(tmp_path / "hf", "gpt_oss"))
    made = wb.logits(str(release), token_ids=TOKENS, progress=False)
    whole = by_transformers(release, quantization_config=transformers.Mxfp4Config(dequantize=True))
    np.testing.assert_array_equal(made.logits, whole)


def test_a_fault_is_named_by_its_layer_and_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = (write(tmp_path / name, "qwen3_moe") for name in ("good", "bad"))
    assert call("logits", good, bad, "--token_ids", "1,5,9") == 0
    assert "no layer parts" in capsys.readouterr().out
    change(bad, "model.layers.1.self_attn.k_proj.weight", lambda values: -values)
    assert call("logits", good, bad, "--token_ids", "1,5,9", "--json", tmp_path / "found.json") == 1
    assert "they part in layer 1, in self_attn" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())["beside"]
    assert (found["parts_at"]["layer"], found["parts_at"]["module"]) == (1, "self_attn")
    assert "self_attn.k_proj.weight" in found["parts_at"]["tensors"]
    assert found["logits"]["tokens"] == 3
    assert found["logits"]["kl"] > 0


def test_a_fault_in_the_embedding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not the first module that it runs through. An array's numbers name tokens, too."""
    good, bad = (write(tmp_path / name, "qwen3_moe") for name in ("good", "bad"))
    change(bad, "model.embed_tokens.weight", lambda values: 1.5 * values)
    found = wb.logits(str(good), str(bad), token_ids=np.array([TOKENS]), progress=False).beside
    place = {"layer": None, "module": "embedding", "tensors": ["model.embed_tokens.weight"]}
    assert {**found.to_dict()["parts_at"], "tensors": [*found.tensors]} == place
    assert call("logits", good, bad, "--token_ids", "1,5,9") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "they part before the first layer, in embedding (model.embed_tokens.weight): by 0.5 of what it makes" in said


def test_a_fault_in_one_expert_is_named(tmp_path: Path) -> None:
    good, bad = (write(tmp_path / name, "deepseek_v3") for name in ("good", "bad"))
    for expert in range(8):
        change(bad, f"model.layers.2.mlp.experts.{expert}.down_proj.weight", lambda values: -values)
    found = wb.logits(str(good), str(bad), token_ids=TOKENS, progress=False).beside
    assert found.parts_at.name == "2/mlp"


@pytest.mark.parametrize("scan", ["true", "false"])
def test_a_checkpoint_is_read_back_through_its_table(tmp_path: Path, scan: str) -> None:
    """Stored in float32 it has the release's bits; in bfloat16 Llama's query is rounded, in the first layer."""
    release = make_release(tmp_path / "hf", LLAMA)
    options = ("--maxtext_model", "llama2-7b", "--scan_layers", scan)
    exact = convert(release, tmp_path / "exact", "--save_dtype", "float32", *options)
    rounded = convert(release, tmp_path / "rounded", *options)
    assert wb.logits(str(release), str(exact), token_ids=TOKENS, progress=False).ok
    found = wb.logits(str(release), str(rounded), token_ids=TOKENS, progress=False).beside
    assert found.ok == (LLAMA["hidden_size"] // LLAMA["num_attention_heads"] in (16, 64, 256))


def test_a_checkpoint_of_a_quantised_release_is_read_back_unrounded(tmp_path: Path) -> None:
    """Its release would be exported in bfloat16; the checkpoint has the values of the codes, but for Llama's query, which is
    scaled twice in float32.
    """
    release = make_release(tmp_path / "hf", LLAMA)
    assert call("quantize", release, tmp_path / "fp8") == 0
    how = ("--maxtext_model", "llama2-7b", "--save_dtype", "float32")
    exact = convert(tmp_path / "fp8", tmp_path / "exact", *how)
    found = wb.logits(str(tmp_path / "fp8"), str(exact), token_ids=TOKENS, progress=False).beside
    assert found.logits.relative < 1e-6


def test_an_adapter_is_run_in_its_release(tmp_path: Path) -> None:
    """As PEFT runs it."""
    import peft

    release = write(tmp_path / "hf", "llama")
    adapter, _ = peft_adapter(tmp_path / "lora", {"model.layers.1.self_attn.o_proj": (64, 64)})
    found = wb.logits(str(release), str(adapter), token_ids=TOKENS, progress=False).beside
    assert found.parts_at.name == "1/self_attn"
    model = transformers.AutoModelForCausalLM.from_pretrained(release, dtype=torch.bfloat16)
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = wb.logits(str(tmp_path / "merged"), str(release), token_ids=TOKENS, progress=False).beside
    assert abs(merged.logits.largest - found.logits.largest) < 1e-2 * found.logits.largest


def test_logits_are_saved(tmp_path: Path) -> None:
    release = write(tmp_path / "hf", "llama")
    assert call("logits", release, "--token_ids", "1,5", "--save_logits", tmp_path / "l.npy", "--dtype", "bf16") == 0
    assert np.load(tmp_path / "l.npy").shape == (2, 96)


def test_everything_that_stands_against_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = write(tmp_path / "hf", "llama")
    other = write(tmp_path / "other", "qwen3_moe", vocab_size=64, num_hidden_layers=2)
    unknown = save(tmp_path / "unknown", {"model_type": "nobody"}, {})
    lacking = make_release(tmp_path / "lacking", LLAMA)
    (file,) = lacking.glob("*.safetensors")
    kept = {name: values for name, values in load_file(file).items() if ".q_proj" not in name}
    save_file(kept, file)

    def refused(*words: object) -> str:
        assert call("logits", *words) == 2
        return capsys.readouterr().err

    said = refused(release, "--save_logits", tmp_path / "no" / "l.npy")
    assert "--prompt or --token_ids" in said
    assert "there is no folder" in said
    assert "is a folder; name a file" in refused(release, "--token_ids", "1", "--save_logits", tmp_path)
    assert "0 to 95, and no 96, 500" in refused(release, "--token_ids", "500,1,96")
    assert "no tokenizer" in refused(release, "--prompt", "hello")
    said = refused(release, other, "--token_ids", "1")
    assert all(fact in said for fact in ("model_type", "vocabulary: 96", "layers: 3"))
    assert "no such model" in refused(unknown, "--token_ids", "1")
    endless = save(tmp_path / "endless", read_config(release) | {"num_hidden_layers": 10**9}, read_tensors(release))
    assert "config.json says num_hidden_layers=1,000,000,000, of " in refused(endless, "--token_ids", "1")
    for number, senseless in enumerate(({"num_attention_heads": 5}, {"vocab_size": 10**18})):
        made = save(tmp_path / f"senseless{number}", read_config(release) | senseless, read_tensors(release))
        assert len(said := refused(made, "--token_ids", "1")) < 5000
        assert "transformers can't make a model of its config.json" in said
    said = refused(lacking, "--token_ids", "1")
    assert said.count("q_proj.weight: no tensor of the release becomes it") == LLAMA["num_hidden_layers"]
    assert "can't be run" in refused(release, "--token_ids", "1", "--maxtext", tmp_path / "python")
    (tmp_path / "hangs").write_text("#!/bin/sh\nexec sleep 100\n")
    (tmp_path / "hangs").chmod(0o755)
    hangs = ("--maxtext", tmp_path / "hangs", "--maxtext_patience", "0.5")
    assert "hasn't said within 0.5 seconds whether it has MaxText" in refused(release, "--token_ids", "1", *hangs)


STANDS_STILL = """\
#!/bin/sh
case "$2" in -c) echo 0.2.5; exit ;; esac
echo 'weightbeam: layer 1'
echo what it said
sleep 600 & echo $! > {note}
wait
"""


def standing_still(folder: Path) -> tuple[Path, Path]:
    """A program in place of an interpreter with MaxText: it runs a layer and no more. And where it notes the number of
    a process that it started.
    """
    program, note = folder / "python", folder / "note"
    program.write_text(STANDS_STILL.format(note=note))
    program.chmod(0o755)
    return program, note


def is_gone(note: Path) -> bool:
    """Whether a process that was noted has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{int(note.read_text())}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_maxtext_that_stands_still_is_stopped_with_all_that_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, note = standing_still(tmp_path)
    monkeypatch.chdir(tmp_path)  # the program runs elsewhere, and is named from here
    write(tmp_path / "hf", "llama")
    options = ("--token_ids", "1,5", "--maxtext_model", "llama2-7b", "--maxtext", "./python", "--maxtext_patience", "2")
    assert call("logits", "hf", *options) == 1
    said = capsys.readouterr().err
    assert "MaxText came no further for 2 seconds behind layer 1 of 3, and was stopped" in said
    assert "what it said" in said
    wait_until(lambda: is_gone(note))


def test_an_interrupt_stops_maxtext_with_all_that_it_started(tmp_path: Path) -> None:
    program, note = standing_still(tmp_path)
    release = write(tmp_path / "hf", "llama")
    options = ["--token_ids", "1,5", "--maxtext_model", "llama2-7b", "--maxtext", str(program)]
    words = [sys.executable, "-m", "weightbeam", "logits", str(release), *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        wait_until(lambda: note.exists() and note.read_text().strip() != "")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"stopped" in said
    assert b"Traceback" not in said
    wait_until(lambda: is_gone(note))
    assert not list(tmp_path.glob("weightbeam-logits-*"))


def sparse_llama(folder: Path, layers: int) -> Path:
    """A Llama of wide layers, whose file is a hole."""
    embed, mlp = 1024, 4096
    folder.mkdir()
    sizes = DENSE | dict(hidden_size=embed, intermediate_size=mlp, num_hidden_layers=layers, num_key_value_heads=4)
    (folder / "config.json").write_text(json.dumps(sizes | dict(model_type="llama", head_dim=256)))
    shapes = {"model.embed_tokens.weight": (96, embed), "model.norm.weight": (embed,), "lm_head.weight": (96, embed)}
    for layer in range(layers):
        of = f"model.layers.{layer}."
        shapes |= {f"{of}self_attn.{name}_proj.weight": (embed, embed) for name in "qkvo"}
        shapes |= {f"{of}mlp.{name}_proj.weight": (mlp, embed) for name in ("gate", "up")}
        shapes |= {f"{of}mlp.down_proj.weight": (embed, mlp)}
        shapes |= {f"{of}{name}_layernorm.weight": (embed,) for name in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    return folder


def test_memory_is_of_a_layer_not_of_the_model(tmp_path: Path) -> None:
    """A Llama of ten layers takes what one of two takes, and less than a layer more."""

    def peak(layers: int) -> int:
        words = [sys.executable, "-m", "weightbeam", "logits", str(sparse_llama(tmp_path / str(layers), layers))]
        with subprocess.Popen([*words, "--token_ids", "1,5"], stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_maxrss << 10

    layer = 4 * (4 * 1024**2 + 3 * 1024 * 4096)  # 67 MB in float32
    assert peak(10) - peak(2) < layer


def test_layers_that_maxtext_runs_as_one_have_the_names_of_the_last(tmp_path: Path) -> None:
    """Gemma 2's are two of a release's."""
    planned = wb.plan(str(write(tmp_path / "hf", "gemma2")), scan_layers=False)
    layers, names = layers_and_parts(planned.conversion.plan)
    assert layers == ["layers_0", "layers_1"]
    assert (names["0"], names["1"]) == ("1", "3")
    assert (names["1/mlp_local"], names["1/mlp_global"]) == ("2/mlp", "3/mlp")


def test_large_arrays_are_read_one_by_one() -> None:
    """What reading one takes besides, two and a half times itself, is there once."""
    wanted = {("a",): np.empty(8), ("b", "c"): np.empty(0, np.uint8), ("d",): np.broadcast_to(np.uint8(0), LARGE + 1)}
    assert [[*each] for each in portions(wanted)] == [[("d",)], [("a",), ("b", "c")]]
    assert portions({}) == []


MAXTEXT = os.environ.get("WEIGHTBEAM_MAXTEXT_PYTHON", "")
with_maxtext = pytest.mark.skipif(
    not MAXTEXT,
    reason="MaxText of the package index isn't installed: WEIGHTBEAM_MAXTEXT_PYTHON names no Python of an environment with it",
)


def check_maxtext(release: Path, model: str | None, count: int, **cut: str) -> None:
    """MaxText makes of a release, or of a cut of it, what transformers makes, layer by layer and module by module."""
    found = wb.logits(str(release), token_ids=TOKENS, maxtext=MAXTEXT, maxtext_model=model, progress=False, **cut)
    assert found.ok, str(found)
    compared = {each.name for each in found.beside.layers}
    assert {str(layer) for layer in range(count)} <= compared
    assert {f"{layer}/{part}" for layer in range(count) for part in ("self_attn", "mlp")} <= compared


@with_maxtext
def test_maxtext_makes_the_same_of_a_cut_with_experts(tmp_path: Path) -> None:
    check_maxtext(write(tmp_path / "hf", "deepseek_v3"), None, 2, layers="0:2", experts="0:4")


@with_maxtext
@pytest.mark.slow("MaxText, which is imported and compiles, half a minute each")
@pytest.mark.parametrize("family", ["llama", "qwen3, tied", "gpt_oss"])
def test_maxtext_makes_the_same(tmp_path: Path, family: str) -> None:
    model = {"llama": "llama2-7b", "qwen3, tied": "qwen3-0.6b"}.get(family)
    check_maxtext(write(tmp_path / "hf", family), model, 3)


@with_maxtext
@pytest.mark.slow("MaxText, which is imported and compiles, half a minute")
def test_maxtext_makes_the_same_where_layers_share_keys(tmp_path: Path) -> None:
    """Gemma 4 E2B: MaxText asks a layer for the keys that later ones share before it runs the layer."""
    kind, sizes, shard = CASES["gemma4-small"]
    make(kind, sizes, shard, tmp_path / "hf", seed=0)
    check_maxtext(tmp_path / "hf", None, 10)


def test_what_a_checkpoint_lacks_is_the_releases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek V4's routing tables, which MaxText's converter of e591f30 leaves out, as `export` takes them."""
    import orbax.checkpoint as ocp
    from flax.traverse_util import flatten_dict, unflatten_dict

    make(*CASES["deepseek4"], tmp_path / "hf", seed=0)
    arrays = flatten_dict(ocp.PyTreeCheckpointer().restore(convert(tmp_path / "hf", tmp_path / "ours") / "items"))
    theirs = {path: values for path, values in arrays.items() if "tid2eid" not in path}
    assert len(theirs) < len(arrays)
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", unflatten_dict(theirs))
    assert call("logits", tmp_path / "hf", tmp_path / "theirs", "--token_ids", "1,5,9") == 0
    assert "largest difference 0, relative 0" in capsys.readouterr().out


@with_maxtext
@pytest.mark.slow("MaxText, which is imported and compiles, twice")
def test_an_expert_that_a_token_names_twice(tmp_path: Path) -> None:
    """DeepSeek V4's layers, whose streams are compared, are the same; but where a row of its routing tables names an expert
    twice, as the zeros that transformers begins with, MaxText's dense multiplication counts it once.
    """
    kind, sizes, shard = CASES["deepseek4"]
    model = make(kind, sizes, shard, tmp_path / "hf", seed=0)
    how: dict[str, Any] = dict(token_ids=[*TOKENS, 60, 3, 44, 17, 23], maxtext=MAXTEXT, progress=False)
    twice = wb.logits(str(tmp_path / "hf"), **how).beside
    assert twice
    assert twice.parts_at
    assert twice.parts_at.name == "0"
    fill_tables(model)
    model.save_pretrained(tmp_path / "hf")
    once = wb.logits(str(tmp_path / "hf"), **how).beside
    assert once
    assert once.ok, str(once)
    assert {each.name for each in once.layers} == {str(layer) for layer in range(sizes["num_hidden_layers"])}


@with_maxtext
@pytest.mark.slow("MaxText, which is imported and compiles, half a minute")
def test_what_maxtext_cannot_express_is_named_with_its_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = write(tmp_path / "hf", "qwen3_moe", norm_topk_prob=False)
    options = ("--token_ids", "1,5,9", "--maxtext", MAXTEXT, "--maxtext_model", "qwen3-30b-a3b")
    assert call("logits", release, *options) == 1
    said = capsys.readouterr().out
    assert "they part in layer 0, in mlp (mlp.experts.*.down_proj.weight" in said
    assert "MaxText can't express this: norm_topk_prob is False" in said
