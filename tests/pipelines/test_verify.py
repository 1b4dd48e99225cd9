"""`weightbeam verify`: what is right passes, and each kind of fault is found, with the tensor and the index."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from pairs import each
from support import DEEPSEEK, FP8, LLAMA, QWEN3_MOE, call, convert, make_release, peft_adapter, random_tensors, save
from trained import SHARED, needs_shared, trained_like

from weightbeam.formats.orbax import find_items, open_arrays
from weightbeam.formats.storage.stoppable import StoppablePool
from weightbeam.formats.targets.published import RECORD
from weightbeam.pipelines.commands import verify as command
from weightbeam.transforms.comparing import verification

BF16 = np.dtype(ml_dtypes.bfloat16)
P = "params.params.decoder."
MODEL = ("--maxtext_model", "llama2-7b")
MODELS = {"llama": LLAMA, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK}


@pytest.fixture
def source(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint with an expert and a square matrix of everything."""
    config = MODELS[getattr(request, "param", "qwen3_moe")]
    return make_release(tmp_path / "source", config, files=2)


def verify(source: Path, step: Path, *options: str) -> tuple[int, dict]:
    """The exit status, and what `--json` says of each array."""
    file = step.parent / "found.json"
    status = call("verify", "--source", source, "--checkpoint", step, "--json", file, *options)
    found = json.loads(file.read_text())
    found.pop("notes", None)
    return status, found


def edit_array(step: Path, key: str, edit) -> None:
    """Edits the values of one array in place, through TensorStore."""
    stored = open_arrays(find_items(step))[key]
    writable = ts.open(stored.spec(), open=True, read=True, write=True).result()
    values = np.array(writable.read().result())
    writable.write(edit(values)).result()


@pytest.mark.parametrize(
    ("source", "options"),
    each(
        list(MODELS),
        [
            (),
            ("--scan_layers", "false"),
            ("--param_scan_axis", "0", "--save_dtype", "float32"),
            ("--vocab_size", "80", "--mesh", "fsdp=8"),
            ("--vocab_size", "50", "--use_ocdbt", "false", "--use_zarr3", "false"),
        ],
    ),
    indirect=["source"],
)
def test_what_was_converted_passes(source: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Whatever the options, which the checkpoint itself tells."""
    step = convert(source, tmp_path / "out", *options)
    status, found = verify(source, step)
    assert status == 0
    assert all(entry["different"] == 0 for entry in found.values())
    wanted = sum(store.size for key, store in open_arrays(find_items(step)).items() if key != "step")
    assert sum(entry["compared"] for entry in found.values()) == wanted, "every element takes part"


FAULTS = {
    "one flipped bit": (f"{P}layers.moe_block.wo", lambda a: flip(a, (1, 0, 3, 5))),
    "two experts swapped": (f"{P}layers.moe_block.wi_0", lambda a: a[[1, 0, *range(2, len(a))]]),
    "two layers swapped": (f"{P}layers.self_attention.key.kernel", lambda a: a[:, ::-1]),
    "a transposed square matrix": (
        f"{P}layers.self_attention.out.kernel",
        lambda a: a.reshape(32, 2, 32).transpose(2, 1, 0).reshape(a.shape),
    ),
    "a zero": (f"{P}decoder_norm.scale", lambda a: np.where(np.arange(a.size) == 7, np.zeros_like(a), a)),
    "a NaN": (
        f"{P}logits_dense.kernel",
        lambda a: np.where(np.arange(a.size).reshape(a.shape) == 100, np.nan, a).astype(a.dtype),
    ),
}


def flip(values: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """The values with the lowest bit of one element flipped."""
    values.view(np.uint16)[index] ^= 1
    return values


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, fault: str) -> None:
    """Exit 1; the array that was changed is named, and no other."""
    step = convert(source, tmp_path / "out")
    key, edit = FAULTS[fault]
    edit_array(step, key, edit)
    status, found = verify(source, step)
    assert status == 1
    assert [name for name, entry in found.items() if entry["different"]] == [key]
    assert key.removeprefix("params.params.") in capsys.readouterr().err


def test_the_first_difference_is_named(source: Path, tmp_path: Path) -> None:
    """The tensor, and the index in the tensor's own layout."""
    step = convert(source, tmp_path / "out")
    edit_array(step, f"{P}layers.moe_block.wo", lambda a: flip(a, (1, 0, 3, 5)))  # (expert, layer, moe_mlp, embed)
    _, found = verify(source, step)
    entry = found[f"{P}layers.moe_block.wo"]
    assert entry["different"] == 1
    assert entry["message"].startswith("model.layers.0.mlp.experts.1.down_proj.weight[5, 3] should be ")


def test_the_same_whichever_thread_is_faster(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found of an array is put together in the order of its cells: the first difference is the first one."""
    step = convert(source, tmp_path / "out")
    edit_array(step, f"{P}layers.moe_block.wo", lambda a: flip(flip(a, (1, 0, 3, 5)), (2, 1, 0, 0)))
    monkeypatch.setattr(verification, "TASK_BYTES", 1)
    expected, compare = list(verify(source, step, "--direct_num_workers=1")[1].items()), verification.run_task

    def late(task: verification.CompareTask, *given: Any) -> verification.ArrayResult:
        time.sleep(0.02 if task.first % 2 == 0 else 0)
        return compare(task, *given)

    monkeypatch.setattr(command, "run_task", late)
    assert list(verify(source, step, "--direct_num_workers=8")[1].items()) == expected


def test_the_system_refuses_a_thread(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Limited(StoppablePool):
        def submit(self, *_: Any) -> Any:
            raise RuntimeError("can't start new thread")

    step = convert(source, tmp_path / "out")
    monkeypatch.setattr(command, "StoppablePool", Limited)
    assert call("verify", source, step) == 1
    assert "  the system refuses another thread; raise the limit on memory (ulimit -v)" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["llama"], indirect=True)
def test_rope_halves_that_are_not_interleaved_are_found(source: Path, tmp_path: Path) -> None:
    """Converted for Llama 3.3, whose RoPE keeps the halves apart, it isn't Llama 3.1."""
    step = convert(source, tmp_path / "out", "--maxtext_model", "llama3.3-70b")
    assert verify(source, step)[0] == 0
    status, found = verify(source, step, "--maxtext_model", "llama3.1-8b")
    assert status == 1
    assert {key for key, entry in found.items() if entry["different"]} == {
        f"{P}layers.self_attention.{name}.kernel" for name in ("query", "key")
    }


def test_a_missing_scale_is_found(tmp_path: Path) -> None:
    """The codes of an FP8 checkpoint, taken for weights, aren't what it holds."""
    config = LLAMA | dict(quantization_config=dict(quant_method="fp8", weight_block_size=[16, 16]))
    codes = random_tensors(LLAMA)
    quantised = dict(codes)
    for name in [name for name in codes if name.endswith("_proj.weight")]:
        quantised[name] = codes[name].astype(FP8)
        codes[name] = quantised[name].astype(BF16)
        quantised[f"{name}_scale_inv"] = np.full([-(-n // 16) for n in codes[name].shape], 0.5, np.float32)
    step = convert(save(tmp_path / "codes", LLAMA, codes), tmp_path / "out")
    source = save(tmp_path / "source", config, quantised)
    status, found = verify(source, step)
    assert status == 1
    assert sum(entry["different"] > 0 for entry in found.values()) == 7
    assert verify(source, convert(source, tmp_path / "right"))[0] == 0


@pytest.mark.parametrize("source", ["llama"], indirect=True)
def test_padding_and_the_tree_are_compared_too(source: Path, tmp_path: Path) -> None:
    """A padded row that isn't zero; an array that is missing, and one that nobody asked for."""
    step = convert(source, tmp_path / "out", "--vocab_size", "80")
    edit_array(step, "params.params.token_embedder.embedding", lambda a: flip(a, (79, 3)))
    status, found = verify(source, step)
    assert status == 1
    assert "padding at [79, 3]" in found["params.params.token_embedder.embedding"]["message"]
    tied = save(
        tmp_path / "tied",
        LLAMA | dict(tie_word_embeddings=True),
        {k: v for k, v in random_tensors(LLAMA).items() if k != "lm_head.weight"},
    )
    status, found = verify(tied, step)
    assert status == 1
    assert "nothing of the source belongs there" in found[f"{P}logits_dense.kernel"]["message"]
    status, found = verify(source, convert(tied, tmp_path / "tied_out"))
    assert status == 1
    assert found[f"{P}logits_dense.kernel"]["message"] == "is missing"


def test_a_tied_head_that_is_stored_is_compared_with_the_embedding(tmp_path: Path, capsys) -> None:
    """A plan sees a sample of it, and says so; all of it is compared here."""
    tensors = random_tensors(LLAMA)
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    source = save(tmp_path / "tied", LLAMA | dict(tie_word_embeddings=True), tensors)
    step = convert(source, tmp_path / "out")
    assert verify(source, step)[0] == 0
    assert f"{head.size:,} elements of 1 tensor of the source compared" in capsys.readouterr().out
    assert call("plan", source) == 0
    assert "the same in a sample" in " ".join(capsys.readouterr().out.split())
    head[2] += 1  # no row of the sample
    edited = save(tmp_path / "edited", LLAMA | dict(tie_word_embeddings=True), tensors)
    status, found = verify(edited, step)
    assert (status, found["lm_head.weight"]["different"]) == (1, head.shape[1])


def test_a_sample_is_quick_and_still_looks_everywhere(source: Path, tmp_path: Path) -> None:
    """It compares fewer elements, but some of every array."""
    step = convert(source, tmp_path / "out")
    status, found = verify(source, step, "--sample", "0.1")
    assert status == 0
    assert all(entry["compared"] > 0 for entry in found.values())
    experts = found[f"{P}layers.moe_block.wo"]
    assert experts["compared"] < np.prod(open_arrays(find_items(step))[f"{P}layers.moe_block.wo"].shape)


def test_what_can_not_be_compared_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Exit 2, in a line or two: no checkpoint, no source, a source with problems. A source that isn't named is the
    recorded one.
    """
    step = convert(source, tmp_path / "out")
    assert call("verify", "--source", source, "--checkpoint", tmp_path / "nowhere") == 2
    assert call("verify", "--source", tmp_path / "nowhere", "--checkpoint", step) == 2
    assert call("verify", "--checkpoint", step) == 0
    (source / "config.json").unlink()
    assert call("verify", "--source", source, "--checkpoint", step) == 2
    assert "Traceback" not in capsys.readouterr().err
    shutil.rmtree(step / "items" / "d")
    assert call("verify", "--source", source, "--checkpoint", step) == 2


def test_adapters_are_not_merged_twice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Into a release that has them already; into another base that was merged into, they are."""
    source = make_release(tmp_path / "hf", LLAMA)
    adapter, _ = peft_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (32, 32)})
    step, merged = convert(source, tmp_path / "ckpt", *MODEL, "--lora", str(adapter)), tmp_path / "merged"
    assert call("merge", source, merged, "--lora", adapter) == 0
    assert call("verify", merged, step) == 2
    assert "adapters were merged into it already" in " ".join(capsys.readouterr().err.split())
    assert call("verify", source, step) == 0
    assert (
        call("cut", source, tmp_path / "cut", "--layers", "0:2") == 0
    )  # all of it, of which nobody has merged anything
    assert call("verify", tmp_path / "cut", step) == 0
    assert call("verify", merged, convert(merged, tmp_path / "twice", *MODEL, "--lora", str(adapter))) == 0


def test_either_may_be_named_first(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A release that doesn't say it is an export isn't taken for one, whatever comes first."""
    convert(source, tmp_path / "out")
    for words in ((source, tmp_path / "out"), (tmp_path / "out", source)):
        capsys.readouterr()
        assert call("verify", *words) == 0
        assert "exported" not in capsys.readouterr().out
    assert call("verify", source, tmp_path / "out", "--like", source) == 2
    assert "--like: is for an export" in capsys.readouterr().err


def test_a_release_of_ours_that_is_no_export(source: Path, tmp_path: Path) -> None:
    """A quantised one is the source of what was converted from it, whatever comes first."""
    assert call("quantize", source, tmp_path / "fp8") == 0
    convert(tmp_path / "fp8", tmp_path / "out")
    for words in ((tmp_path / "fp8", tmp_path / "out"), (tmp_path / "out", tmp_path / "fp8")):
        assert call("verify", *words) == 0


# --- a training run ---------------------------------------------------------------------------------------------------


@needs_shared
def test_of_a_training_state_the_weights_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A step of a run, given by the run's folder. What differs is said of each weight with how far it is off, the
    optimizer in one line, and the last line is the command that shows more.
    """
    run, like = tmp_path / "run", trained_like(tmp_path / "like", "llama")
    shutil.copytree(SHARED / "trained" / "llama-fsdp8", run / "checkpoints")
    assert call("export", run, tmp_path / "base", "--like", like, "--save_dtype", "bfloat16") == 0
    (tmp_path / "base" / RECORD).unlink()  # so that it is no export of this run
    capsys.readouterr()
    assert call("verify", tmp_path / "base", run) == 1
    said = capsys.readouterr()
    assert "a training state: its optimizer (26 arrays) and its nnx_aux (30 arrays) are not compared" in said.out
    assert not any(word in said.err for word in ("opt_state", "nnx_aux"))
    *_, wo, last = said.err.splitlines()
    assert wo.startswith("  decoder.layers.mlp.wo.kernel: 24,576 of 24,576 elements differ, by up to 0.000488; ")
    items = find_items(run)
    assert last == f"what did training change, and how much? weightbeam diff {tmp_path / 'base'} {items}"
    assert call(*last.partition("? weightbeam ")[2].split()) == 1

    step = tmp_path / "again"  # and of a reshard of it, whose tree is MaxText's too
    assert call("reshard", run, step, "--like", like) == 0
    assert call("verify", tmp_path / "base", step) == 1
    assert "expected" not in capsys.readouterr().err


@needs_shared
@pytest.mark.parametrize("run", ["llama-fsdp8-paramonly-unscanned", "llama-linen-paramonly-unscanned"])
def test_weights_are_known_whatever_the_tree_calls_them(tmp_path: Path, run: str) -> None:
    """Those of MaxText's tools, one of which names each array `….value`; neither says that layers are apart."""
    step, like = SHARED / "trained" / run, trained_like(tmp_path / "like", "llama")
    assert call("export", step, tmp_path / "base", "--like", like) == 0
    (tmp_path / "base" / RECORD).unlink()
    assert call("verify", tmp_path / "base", step) == 0


def test_two_checkpoints_are_told_of_diff(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With the command to type; and so is one whose release nobody knows."""
    for name in "ab":
        convert(source, tmp_path / name)
    assert call("verify", tmp_path / "a", tmp_path / "b") == 2
    assert f"\n  weightbeam diff {tmp_path / 'a'} {tmp_path / 'b'}\n" in capsys.readouterr().err
    (tmp_path / "b" / "0" / "conversion.json").unlink()
    assert call("verify", tmp_path / "b") == 2
    said = capsys.readouterr().err
    assert (
        f"\n  weightbeam verify SOURCE {tmp_path / 'b/0/items'}\n  weightbeam diff OTHER {tmp_path / 'b/0/items'}\n"
        in said
    )
    assert call("reshard", tmp_path / "b", tmp_path / "c") == 0
    assert call("verify", tmp_path / "c") == 2
    assert f"\n  weightbeam diff {tmp_path / 'b/0/items'} {tmp_path / 'c/0/items'}\n" in capsys.readouterr().err
    assert call("reshard", tmp_path / "c", tmp_path / "d") == 0
    shutil.rmtree(tmp_path / "c")
    assert call("verify", tmp_path / "d") == 2
    assert f"\n  weightbeam diff {tmp_path / 'b/0/items'} {tmp_path / 'd/0/items'}\n" in capsys.readouterr().err


def test_of_codes_the_error_is_said(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Values of FP8 are quantised, not rounded."""
    convert(source, tmp_path / "out")
    assert call("quantize", tmp_path / "out", tmp_path / "fp8") == 0
    capsys.readouterr()
    assert call("verify", tmp_path / "fp8", tmp_path / "out") == 0
    found = re.search(r"quantised: a tensor's relative error is at most (\d\.\d\d)%", capsys.readouterr().out)
    assert found
    assert 1 < float(found[1]) < 4
