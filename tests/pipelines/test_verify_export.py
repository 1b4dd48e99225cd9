"""`weightbeam verify` of an export: its config, its other small files and its record, and the checkpoint's own digests."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file as read_file
from safetensors.numpy import save_file
from support import LLAMA, QWEN3_MOE, call, convert, make_release, random_tensors, read_tensors, save
from trained import SHARED, needs_shared, trained_like

import weightbeam as wb
from weightbeam.formats.storage import LocalFolder, open_store
from weightbeam.formats.storage.strict_json import JsonError
from weightbeam.formats.targets.published import RECORD, record_of
from weightbeam.formats.text.printable import printable
from weightbeam.transforms.comparing.baselines import FILE, read_found
from weightbeam.transforms.comparing.release_faults import compare_config, find_release_faults

MODEL = QWEN3_MOE | dict(
    architectures=["Qwen3MoeForCausalLM"], torch_dtype="bfloat16", rope_theta=10000.0, rms_norm_eps=1e-6, vocab_size=512
)
TOKENIZER = {"model": {"vocab": {"a": 0}}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and what was exported of it."""
    folder = tmp_path_factory.mktemp("exports")
    source = make_release(folder / "hf", MODEL, files=2)
    (source / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (source / "generation_config.json").write_text('{"eos_token_id": 1}')
    step = convert(source, folder / "ckpt")
    assert call("export", step, folder / "tuned") == 0
    return step, folder / "tuned"


@pytest.fixture
def export(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "tuned"))


def edited(file: str, *place: str, value: Any) -> Callable[[Path], None]:
    """Sets a field of a JSON file; None removes it."""

    def edit(release: Path) -> None:
        said = inner = json.loads((release / file).read_text())
        for name in place[:-1]:
            inner = inner.setdefault(name, {})
        inner[place[-1]] = value
        if value is None:
            del inner[place[-1]]
        (release / file).write_text(json.dumps(said))

    return edit


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FAULTS = {  # what is planted -> how, and what names it
    "FP8 over bfloat16": (edited("config.json", "quantization_config", value=FP8), "quantization_config"),
    "another dtype": (edited("config.json", "torch_dtype", value="float16"), "torch_dtype"),
    "a second dtype": (edited("config.json", "dtype", value="float32"), "dtype"),
    "rope_theta": (edited("config.json", "rope_theta", value=1000000.0), "rope_theta"),
    "rms_norm_eps": (edited("config.json", "rms_norm_eps", value=1e-5), "rms_norm_eps"),
    "another model_type": (edited("config.json", "model_type", value="qwen2_moe"), ""),
    "no model_type": (edited("config.json", "model_type", value=None), ""),
    "architectures": (edited("config.json", "architectures", value=["LlamaForCausalLM"]), "architectures"),
    "norm_topk_prob": (edited("config.json", "norm_topk_prob", value=True), "norm_topk_prob"),
    "rope_scaling": (edited("config.json", "rope_scaling", "factor", value=8.0), "rope_scaling.factor"),
    "a field is gone": (edited("config.json", "num_experts_per_tok", value=None), "num_experts_per_tok"),
    "experts for each token": (edited("config.json", "num_experts_per_tok", value=1), "num_experts_per_tok"),
    "tied": (edited("config.json", "tie_word_embeddings", value=True), ""),
    "no config": (lambda release: (release / "config.json").unlink(), "config.json"),
    "the tokenizer": (edited("tokenizer.json", "model", "vocab", "b", value=1), "tokenizer.json"),
    "no tokenizer": (lambda release: (release / "tokenizer.json").unlink(), "tokenizer.json"),
    "generation": (edited("generation_config.json", "eos_token_id", value=2), "generation_config.json"),
    "the index's total": (
        edited("model.safetensors.index.json", "metadata", "total_size", value=7),
        "model.safetensors.index.json",
    ),
    "no index": (lambda release: (release / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
}


@pytest.mark.parametrize("damage", [b"[]", b"", b"null", (b'"command"', b'"cmmmand"')])
def test_a_damaged_record_is_refused(
    damage: bytes | tuple[bytes, bytes], export: Path, made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """It isn't one that isn't there: nobody knows what the small files were."""
    record = export / RECORD
    record.write_bytes(damage if isinstance(damage, bytes) else record.read_bytes().replace(*damage, 1))
    assert call("verify", "--source", export, "--checkpoint", made[0]) == 2
    assert f"{RECORD}: is no record of Weightbeam's, or is damaged" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("model", [[], 7])
def test_a_model_that_is_no_text_is_the_records_fault(
    model: object, export: Path, made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the checkpoint's, and no traceback."""
    edited(RECORD, "model", value=model)(export)
    for command in (["verify", "--source", export, "--checkpoint", made[0]], ["diff", export, made[0]]):
        assert call(*command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{RECORD}: says {model!r} for --maxtext_model, which can't be meant" in said


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(
    fault: str, export: Path, made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command that export prints: exit 1 with the field or the file and both values, or a refusal."""
    plant, named = FAULTS[fault]
    plant(export)
    capsys.readouterr()
    status = call("verify", "--source", export, "--checkpoint", made[0])
    said = capsys.readouterr().err
    assert status in (1, 2)
    assert named in said
    if named and named != "config.json" and status == 1:
        assert f"--accept {named}" in said
        assert "the export wrote" in said


def test_a_tensor_of_another_dtype_is_found(
    export: Path, made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its values are rounded, and by no plan."""
    shard = sorted(export.glob("*.safetensors"))[0]
    tensors = read_file(shard)
    name = next(name for name, tensor in tensors.items() if tensor.dtype.name == "bfloat16")
    save_file(tensors | {name: tensors[name].astype(np.float16)}, shard, metadata={"format": "pt"})
    assert call("verify", "--source", export, "--checkpoint", made[0]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"{name} is float16; tensors of this dtype: 1 here, and 0 that the export wrote" in said


def test_a_tensor_of_a_wider_dtype_is_right(export: Path, made: tuple[Path, Path]) -> None:
    """It holds the same values."""
    for shard in export.glob("*.safetensors"):
        save_file({name: tensor.astype(np.float32) for name, tensor in read_file(shard).items()}, shard)
    assert call("verify", "--source", export, "--checkpoint", made[0], "--accept", "model.safetensors.index.json") == 0


def test_what_is_alike_in_python_is_not_alike_in_json(tmp_path: Path) -> None:
    """A name with a dot is no field of an object, and 1 isn't true."""
    (tmp_path / "config.json").write_text(json.dumps({"rope.theta": 5, "a": 1, "b": [1], "c": True, "d": 2.0}))
    expected = {"rope": {"theta": 5}, "a": True, "b": [True], "c": True, "d": 2}
    said = compare_config(open_store(tmp_path), expected, "the release has")
    assert [what for what, _ in said] == [f"config.json: {field}" for field in ("rope.theta", "a", "b", "rope.theta")]


@pytest.mark.parametrize("first", [True, False])
def test_a_lost_record_is_said(
    first: bool, export: Path, made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever comes first; and what of `config.json` differs from the checkpoint's release."""
    (export / RECORD).unlink()
    edited("config.json", "rope_theta", value=7.5)(export)
    sides = (export, made[0]) if first else (made[0], export)
    capsys.readouterr()
    assert call("verify", "--checkpoint", sides[0], "--source", sides[1]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"warning: {RECORD} " in said
    assert "warning: config.json: rope_theta 7.5," in said


def test_without_a_record_the_axis_of_the_layers_follows_from_the_shapes(tmp_path: Path) -> None:
    """As training leaves a checkpoint: `verify` finds what `export` found, of the export and of the release."""
    source = make_release(tmp_path / "hf", LLAMA)
    step = convert(source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b", "--param_scan_axis", "0")
    items = shutil.copytree(step / "items", tmp_path / "trained" / "0" / "items").parent
    metadata = items / "items" / "_CHECKPOINT_METADATA"
    said = json.loads(metadata.read_text())
    del said["custom_metadata"]["weightbeam"]
    metadata.write_text(json.dumps(said))
    model = ("--maxtext_model", "llama2-7b")
    assert call("export", items, tmp_path / "tuned", "--like", source, *model) == 0
    assert call("verify", tmp_path / "tuned") == 0
    assert call("verify", source, items, *model) == 0
    assert call("verify", source, items, *model, "--param_scan_axis", "1") == 1


def test_a_nan_of_another_payload_is_another_one(tmp_path: Path) -> None:
    """What is only copied is copied bit by bit."""
    tensors = random_tensors(LLAMA, np.dtype(np.float32))
    name = "model.norm.weight"
    tensors[name].view(np.uint32)[:2] = 0x7FC00001, 0xFFC00000
    step = convert(save(tmp_path / "hf", LLAMA, tensors), tmp_path / "ckpt", "--save_dtype", "float32")
    assert call("export", step, tmp_path / "out") == 0
    assert read_tensors(tmp_path / "out")[name].tobytes() == tensors[name].tobytes()
    assert call("verify", tmp_path / "out") == 0
    for place, bits in ((0, 0x7FC00002), (1, 0x7FC00000)):
        there = read_tensors(tmp_path / "out")
        there[name].view(np.uint32)[place] = bits
        save_file(there, tmp_path / "out" / "model.safetensors", {"format": "pt"})
        found = wb.verify(str(step), str(tmp_path / "out"), progress=False).to_dict()
        assert [each["different"] for key, each in found.items() if key.endswith("decoder_norm.scale")] == [1]
        save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})


def test_two_releases_are_for_diff(export: Path, made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Neither was made of the other."""
    capsys.readouterr()
    assert call("verify", "--checkpoint", export, "--source", made[1]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{export} and {made[1]} are both releases; weightbeam diff compares them" in said


def test_what_is_right_is_all_right(export: Path, made: tuple[Path, Path]) -> None:
    """Nothing is noted, but for a card and a licence that somebody wrote; what no loader reads is nobody's."""
    found = wb.verify(str(export), str(made[0]), progress=False)
    assert found.ok
    assert not found.warnings
    assert "15 arrays of the checkpoint compared with their digests" in str(found)
    (export / "README.md").write_text("# mine\n")
    (export / "LICENSE").write_text("free\n")
    (export / "notes.txt").write_text("mine\n")
    found = wb.verify(str(export), str(made[0]), progress=False)
    assert found.ok
    assert found.warnings == [
        "README.md isn't what the export wrote",
        "LICENSE wasn't written by the export, and is taken for a part of it",
    ]


def adapter(file: Path) -> None:
    save_file({"base_model.model.lm_head.lora_A.weight": np.zeros((1, 1), np.float32)}, file)


ADDED: dict[str, Callable[[Path], object]] = {
    "vocab.json": lambda file: file.write_text("{}"),
    "tokenizer.model": lambda file: file.write_bytes(b"sp"),
    "additional_chat_templates/tool.jinja": lambda file: file.write_text("{{ messages }}"),
    "model-00003-of-00003.safetensors": lambda file: shutil.copyfile(
        file.with_name("model-00001-of-00002.safetensors"), file
    ),
    "model.safetensors": adapter,
    "pytorch_model.bin": lambda file: file.write_bytes(b"pickle"),
    "adapter_config.json": lambda file: file.write_text("{}"),
    "adapter_model.safetensors": adapter,
    "modeling_other.py": lambda file: file.write_text("raise SystemExit"),
    "custom_generate/generate.py": lambda file: file.write_text("raise SystemExit"),
    "consolidated.00.pth": lambda file: file.write_bytes(b"pickle"),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_file_that_was_added_is_named(
    name: str, export: Path, made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Another model's tokenizer, a shard too many, a stale adapter: loaders take them; `--accept` allows one."""
    (export / name).parent.mkdir(exist_ok=True)
    ADDED[name](export / name)
    capsys.readouterr()
    assert call("verify", export, made[0]) == 1
    said = capsys.readouterr().err
    assert f"{name} wasn't written by the export" in said
    assert f"--accept {name}" in said
    assert call("verify", export, made[0], "--accept", name) == 0
    assert name in capsys.readouterr().out


def test_an_edit_that_is_meant_is_accepted(export: Path, made: tuple[Path, Path]) -> None:
    """By name: that field and no other; what lies in it too; a file, or all of `config.json`. It is said all the same."""
    edited("config.json", "rope_scaling", "factor", value=8.0)(export)
    edited("config.json", "use_cache", value=False)(export)
    edited("tokenizer.json", "added", value=[])(export)
    words = {"rope_scaling", "use_cache", "tokenizer.json"}
    for left in words:
        found = wb.verify(str(export), str(made[0]), accept=sorted(words - {left}), progress=False)
        (fault,) = found.faults
        assert left in fault
    found = wb.verify(str(export), str(made[0]), accept=["config.json", "tokenizer.json"], progress=False)
    assert found.ok
    assert len(found.warnings) == 3
    assert "use_cache false, the export wrote nothing" in " ".join(found.warnings)
    assert call("verify", export, made[0], *(word for name in words for word in ("--accept", name))) == 0
    assert call("verify", made[0], "--accept", "rope_scaling") == 2


def test_damage_that_was_exported_is_found(
    export: Path, made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint without its digests is exported damaged, and gets them back: both are alike, and the digests tell."""
    step = Path(shutil.copytree(made[0].parent, tmp_path / "ckpt")) / "0"
    file = max((step / "items").glob("ocdbt.process_*/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    record = (step / "conversion.json").read_text()
    (step / "conversion.json").write_text(json.dumps(json.loads(record) | {"digests": {}}))
    assert call("export", step, tmp_path / "damaged") == 0
    (step / "conversion.json").write_text(record)
    capsys.readouterr()
    assert call("verify", "--source", tmp_path / "damaged", "--checkpoint", step) == 1
    said = capsys.readouterr().err
    assert "isn't what conversion.json says was written, by its digest: the checkpoint is damaged" in said
    assert str(step) in said
    found = wb.verify(str(tmp_path / "damaged"), str(step), sample=0.5, progress=False)
    assert found.ok
    assert "not compared: 15 of 15 arrays" in str(found).splitlines()[-1]


def test_a_record_of_an_older_version_is_said(export: Path, made: tuple[Path, Path]) -> None:
    """It has no hashes: what differs from the checkpoint's release is noted, and isn't a fault."""
    for field in ("files", "config"):
        edited(RECORD, field, value=None)(export)
    found = wb.verify(str(export), str(made[0]), progress=False)
    assert found.ok
    assert [warning.partition(" ")[0] for warning in found.warnings] == [RECORD]
    edited("config.json", "quantization_config", value=FP8)(export)
    found = wb.verify(str(export), str(made[0]), progress=False)
    assert any("quantization_config" in warning for warning in found.warnings)


def test_a_record_names_only_what_exports_write(tmp_path: Path) -> None:
    """Names of a stranger's record lead nowhere else, whatever hash they have, and are read as far as they may be meant."""
    release = tmp_path / "tuned"
    release.mkdir()
    (release / "config.json").write_text("{}")
    (release / "secret").write_text("secret")
    (tmp_path / "tokenizer.json").write_text("secret")
    (release / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    (release / "LICENSE").write_text("secret")
    with open(release / "vocab.json", "wb") as large:
        large.truncate(400 << 20)
    known = hashlib.sha256(b"secret").hexdigest()
    names = [str(release / "secret"), "../tokenizer.json", "tokenizer.json", "secret", "a\0b", "\x1b[2J", "vocab.json"]
    record = {"files": dict.fromkeys([*names, "LICENSE"], known), "config": {}}
    tracemalloc.start()
    try:
        faults, notes = find_release_faults(LocalFolder(str(release)), record, {}, ())
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert [name for name, _ in faults] == [printable(name) for name in names]
    assert not notes
    assert all(name.isprintable() for name, _ in faults)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"digests": {}, "digests": {}}'])
def test_records_of_strangers(text: str, tmp_path: Path) -> None:
    """What a release says of itself is read like all JSON of strangers."""
    release = LocalFolder(str(tmp_path))
    for name in (RECORD, FILE):
        release.write(name, text.encode())
    assert record_of(release) == {}
    with pytest.raises(JsonError):
        read_found(release)


def test_notes_have_a_place_of_their_own(export: Path, made: tuple[Path, Path]) -> None:
    """In JSON, beside the arrays and tensors: the name of a file, or of nothing, isn't an array's."""
    assert "notes" not in wb.verify(str(export), str(made[0]), progress=False).to_dict()
    (export / "README.md").write_text("# mine\n")
    said = wb.verify(str(export), str(made[0]), sample=0.5, progress=False).to_dict()
    assert list(said.pop("notes")) == ["README.md", "not compared:"]
    assert all(key.startswith("params.") for key in said)


def test_all_that_is_read_counts_as_progress(export: Path, made: tuple[Path, Path]) -> None:
    """The checkpoint is read once for the values, and once more for its digests."""
    told: list[Any] = []
    found = wb.verify(str(export), str(made[0]), progress=told.append)
    values = sum(array.nbytes for array in found.conversion.plan.arrays)
    assert (told[-1].done, told[-1].total) == (2 * values, 2 * values)
    wb.verify(str(export), str(made[0]), sample=0.5, progress=told.append)
    assert told[-1].total < values


@needs_shared
def test_digests_of_a_training_state_that_are_not_compared_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export has the weights; 57 arrays of the optimizer have digests, too, with which nothing is compared."""
    like = trained_like(tmp_path / "like", "llama")
    words = ("--like", like, "--maxtext_model", "llama3.1-8b")
    assert call("reshard", SHARED / "trained" / "llama-fsdp8", tmp_path / "full", *words) == 0
    assert call("export", tmp_path / "full", tmp_path / "out") == 0
    capsys.readouterr()
    assert call("verify", tmp_path / "out", tmp_path / "full") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "12 arrays of the checkpoint compared with their digests" in said
    assert "not compared: 56 of 68 arrays: nothing here is made of them" in said
