"""Refusals: exit status 2, every problem in one message, no traceback, and no output folder."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from processes import run
from safetensors.numpy import save_file
from support import (
    DEEPSEEK,
    FP8,
    INDEX,
    LLAMA,
    QWEN3_MOE,
    call,
    convert,
    make_release,
    random_tensors,
    read_config,
    read_file,
    save,
    split,
)

from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.staging import staging_at
from weightbeam.formats.staging.folder import new_id
from weightbeam.model_mappings import entry_points
from weightbeam.pipelines.cli import Failed
from weightbeam.pipelines.running.graph import run_units
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions, Delivery

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
LLAMA3_ROPE = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}

Refused = Callable[..., str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A good checkpoint of two files, to be damaged."""
    return make_release(tmp_path / "hf", files=2)


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Runs `convert`, and checks what every refusal has in common; returns the message."""

    def run(source: Path, *options: object) -> str:
        output = tmp_path / "out"
        before = sorted(tmp_path.rglob("*"))
        assert call("convert", "--source", source, "--output", output, *options) == 2
        printed, message = capfd.readouterr()
        assert "Traceback" not in printed + message
        assert sorted(tmp_path.rglob("*")) == before
        assert printed == ""
        return message

    return run


def file_of(source: Path, tensor: str) -> Path:
    return source / json.loads((source / INDEX).read_text())["weight_map"][tensor]


def change(source: Path, **tensors: np.ndarray | None) -> None:
    """Writes the checkpoint anew with other tensors; None leaves one out. The index follows."""
    index = json.loads((source / INDEX).read_text())
    for name, values in tensors.items():
        file = source / index["weight_map"].get(name, FIRST)
        held = {key: value for key, value in read_file(file).items() if key != name}
        if values is None:
            del index["weight_map"][name]
        else:
            held[name], index["weight_map"][name] = values, file.name
        save_file(held, file)
    (source / INDEX).write_text(json.dumps(index))


def configure(source: Path, **fields: Any) -> None:
    """Changes `config.json`; None removes a field."""
    config = {key: value for key, value in (read_config(source) | fields).items() if value is not None}
    (source / "config.json").write_text(json.dumps(config))


def reindex(source: Path, **entries: Any) -> None:
    index = json.loads((source / INDEX).read_text())
    index["weight_map"] |= entries
    (source / INDEX).write_text(json.dumps(index))


def corrupt(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header)


# what is wrong -> (how to make it so, what the message must name)
DAMAGES: dict[str, tuple[Callable[[Path], object], Sequence[str]]] = {
    "a missing shard": (lambda s: (s / SECOND).unlink(), ["missing", SECOND]),
    "a missing tensor": (
        lambda s: change(s, **{UP: None}),
        ["missing", UP, "params.params.decoder.layers.mlp.wi_1.kernel"],
    ),
    "a head of its own, though config.json says tied": (
        lambda s: configure(s, tie_word_embeddings=True),
        ["copy: lm_head.weight", "model.embed_tokens.weight", "row 0", "tie_word_embeddings to false"],
    ),
    "an extra tensor": (
        lambda s: change(s, **{"model.layers.1.mlp.extra.weight": np.zeros((2, 3), np.float32)}),
        ["unused", "mlp.extra", "(2, 3)", FIRST],
    ),
    "a layer too many": (
        lambda s: change(s, **{"model.layers.2.input_layernorm.weight": np.zeros(32, np.float32)}),
        ["unused", "model.layers.2."],
    ),
    "a wrong shape": (
        lambda s: change(s, **{UP: np.zeros((32, 48), np.float32)}),
        ["shape", UP, "(32, 48)", "mlp embed", "(48, 32)"],
    ),
    "a wrong rank": (lambda s: change(s, **{UP: np.zeros((48, 32, 1), np.float32)}), ["shape", UP, "(48, 32, 1)"]),
    "integers for weights": (lambda s: change(s, **{UP: np.zeros((48, 32), np.int32)}), ["dtype", UP, "int32"]),
    "booleans for weights": (lambda s: change(s, **{UP: np.zeros((48, 32), np.bool_)}), ["dtype", UP, "bool"]),
    "complex numbers for weights": (
        lambda s: change(s, **{UP: np.zeros((48, 32), np.complex64)}),
        ["dtype", UP, "complex64"],
    ),
    "FP8 without a scale": (lambda s: change(s, **{UP: np.zeros((48, 32), FP8)}), ["unscaled", UP, f"{UP}_scale_inv"]),
    "a scale without its weight": (
        lambda s: change(s, **{"model.layers.1.mlp.x.weight_scale_inv": np.zeros((1, 1), np.float32)}),
        ["scale", "mlp.x.weight_scale_inv"],
    ),
    "a scale beside plain weights": (
        lambda s: change(s, **{f"{UP}_scale_inv": np.zeros((1, 1), np.float32)}),
        ["scale", UP, "bfloat16"],
    ),
    "a scale of a dtype that no format has": (
        lambda s: change(
            s, **{UP: np.zeros((48, 32), FP8), UP.replace("weight", "weight_scale"): np.zeros((48, 1), np.int64)}
        ),
        ["unscaled", UP, "weight_scale", "int64"],
    ),
    "scales of a wrong shape": (
        lambda s: (
            configure(s, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}),
            change(s, **{UP: np.zeros((48, 32), FP8), f"{UP}_scale_inv": np.zeros((2, 3), np.float32)}),
        ),
        ["scale", UP, "(3, 2)", "(2, 3)"],
    ),
    "a header cut off": (lambda s: os.truncate(s / SECOND, 100), ["corrupt", SECOND, "truncated"]),
    "data cut off": (
        lambda s: os.truncate(s / SECOND, (s / SECOND).stat().st_size - 1),
        ["corrupt", SECOND, "truncated"],
    ),
    "an empty file": (lambda s: os.truncate(s / SECOND, 0), ["corrupt", SECOND, "0 bytes"]),
    "a header that isn't JSON": (lambda s: corrupt(s / SECOND, b"{nonsense"), ["corrupt", SECOND, "JSON"]),
    "a header with a number of 5000 digits": (
        lambda s: corrupt(s / SECOND, b'{"x":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"),
        ["corrupt", SECOND],
    ),
    "a header with half a character": (
        lambda s: corrupt(s / SECOND, b'{"a\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        ["corrupt", SECOND],
    ),
    "a git-lfs pointer": (
        lambda s: (s / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        [SECOND, "git lfs pull"],
    ),
    "an index that points nowhere": (
        lambda s: reindex(s, ghost="model-00009-of-00002.safetensors"),
        ["missing", "model-00009-of-00002.safetensors"],
    ),
    "an index that names a tensor that isn't there": (lambda s: reindex(s, ghost=FIRST), ["ghost", FIRST]),
    "an index that climbs out": (lambda s: reindex(s, ghost="../x.safetensors"), ["ghost", "../x.safetensors"]),
    "an index that isn't JSON": (lambda s: (s / INDEX).write_text("{"), [INDEX, "JSON"]),
    "files without an index": (lambda s: (s / INDEX).unlink(), [INDEX]),
    "no files": (lambda s: [path.unlink() for path in s.glob("model*")], ["safetensors"]),
    "pickle files": (
        lambda s: [*(path.unlink() for path in s.glob("model*")), (s / "pytorch_model.bin").write_bytes(b"\x80")],
        ["pickle", "pytorch_model.bin"],
    ),
    "no config": (lambda s: (s / "config.json").unlink(), ["config.json", "no such file"]),
    "a config that isn't JSON": (lambda s: (s / "config.json").write_text("{'a': 1}"), ["config.json", "JSON"]),
    "a config that isn't an object": (lambda s: (s / "config.json").write_text("[]"), ["config.json"]),
    "a config without a size": (lambda s: configure(s, hidden_size=None), ["config.json", "hidden_size"]),
    "a string for a size": (lambda s: configure(s, hidden_size="32"), ["config.json", "hidden_size", "'32'"]),
    "a float for a size": (lambda s: configure(s, num_hidden_layers=2.0), ["config.json", "num_hidden_layers", "2.0"]),
    "a boolean for a size": (lambda s: configure(s, vocab_size=True), ["config.json", "vocab_size", "True"]),
    "four faults at once": (
        lambda s: configure(s, hidden_size=0, num_key_value_heads="2", tie_word_embeddings="no", vocab_size=None),
        ["hidden_size", "num_key_value_heads", "tie_word_embeddings", "vocab_size", "4 problems"],
    ),
    "a negative size": (lambda s: configure(s, intermediate_size=-48), ["config.json", "intermediate_size", "-48"]),
    "a string for a flag": (
        lambda s: configure(s, tie_word_embeddings="no"),
        ["config.json", "tie_word_embeddings", "'no'"],
    ),
    "a config without a model_type": (lambda s: configure(s, model_type=None), ["model_type", "llama", "deepseek_v3"]),
    "a rope that two MaxText models read differently": (
        lambda s: configure(s, **LLAMA3_ROPE),
        ["--maxtext_model", "llama3.1-8b", "llama3.3-70b"],
    ),
    "a rope_scaling that isn't an object": (
        lambda s: configure(s, rope_scaling="llama3"),
        ["config.json", "rope_scaling"],
    ),
    "a quantisation that isn't supported": (
        lambda s: configure(s, quantization_config={"quant_method": "hqq"}),
        ["hqq", "config.json"],
    ),
    "a block size that makes no sense": (
        lambda s: (
            configure(s, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 0]}),
            change(s, **{UP: np.zeros((48, 32), FP8), f"{UP}_scale_inv": np.zeros((1, 1), np.float32)}),
        ),
        ["weight_block_size", "[128, 0]"],
    ),
    "a link out of the folder": (
        lambda s: (
            (s / SECOND).rename(s.parent / "elsewhere.safetensors"),
            (s / SECOND).symlink_to("../elsewhere.safetensors"),
        ),
        [SECOND, "link"],
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_source(source: Path, refused: Refused, name: str) -> None:
    """One thing is wrong, and the message names it."""
    damage, words = DAMAGES[name]
    damage(source)
    message = refused(source)
    assert [word for word in words if word not in message] == [], message


def test_a_field_that_nothing_is_about_is_named(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's arithmetic may depend on it."""
    configure(source, dual_chunk_attention_config={"chunk_size": 16})
    assert call("plan", source) == 0
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).split())
    assert "nothing here is about: dual_chunk_attention_config; where" in said
    configure(source, **{f"{number}{'x' * 10_000}": 1 for number in range(100)})
    assert call("plan", source) == 0
    captured = capsys.readouterr()
    assert " and 91 more; where" in " ".join((captured.out + captured.err).split())
    assert len(captured.out + captured.err) < 8000


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="root reads every file unless that is taken from it")
@pytest.mark.parametrize("name", [SECOND, INDEX, "config.json"])
def test_a_file_that_may_not_be_read_is_not_corrupt(source: Path, name: str) -> None:
    (source / name).chmod(0)
    words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable, "-m", "weightbeam"]
    ran = run(*(words if os.getuid() == 0 else words[2:]), "plan", source, status=2)
    assert f"unreadable: {name}: Permission denied" in ran.stderr
    assert "corrupt" not in ran.stderr


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_other_8_bit_floats_without_a_scale(source: Path, refused: Refused, dtype: str) -> None:
    """No 8-bit float is a weight as it stands: its scale is missing, and to guess 1 would be silent garbage."""
    change(source, **{UP: np.zeros((48, 32), np.uint8).view(getattr(ml_dtypes, dtype))})
    message = refused(source)
    assert UP in message
    assert dtype in message


# options -> what the message must name
OPTIONS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "a mesh axis that MaxText hasn't": (["--mesh", "fdsp=4"], ["fdsp", "fsdp, "]),
    "a mesh without sizes": (["--mesh", "fsdp"], ["--mesh=fsdp", "fsdp=16"]),
    "a mesh of no devices": (["--mesh", "fsdp=0"], ["fsdp=0"]),
    "a mesh of a fraction": (["--mesh", "fsdp=2.5"], ["fsdp=2.5"]),
    "an empty mesh": (["--mesh", ""], ["--mesh: says nothing"]),
    "a mesh axis named twice": (["--mesh", "fsdp=2,fsdp=4"], ["twice"]),
    "a mesh of whatever is left": (["--mesh", "fsdp=-1"], ["fsdp=-1", "say a number"]),
    "a mesh in MaxText's settings": (
        ["--mesh", "ici_fsdp_parallelism=4"],
        ["ici_fsdp_parallelism", "multiplied, are fsdp here"],
    ),
    "a mesh that no cluster has": (["--mesh", "fsdp=1000,tensor=1000"], ["fsdp=1000,tensor=1000", "262,144 devices"]),
    "a mesh beyond all numbers": (["--mesh", f"fsdp={'9' * 5000}"], ["262,144 devices"]),
    "a bad mesh behind a good one": (["--mesh", "fsdp=4", "--mesh", "tensor"], ["tensor"]),
    "a misspelt option": (["--scan_layer", "true"], ["--scan_layer"]),
    "a misspelt option of Beam's": (["--direct_num_worker=2"], ["--direct_num_worker"]),
    "a stray word": (["stray"], ["stray"]),
    "neither true nor false": (["--scan_layers", "maybe"], ["scan_layers", "maybe"]),
    "a dtype that can't be stored": (["--save_dtype", "float16"], ["save_dtype", "float16"]),
    "a compression that isn't there": (["--compression", "lz4"], ["compression", "lz4"]),
    "a negative step": (["--step", "-1"], ["step"]),
    "a vocabulary of nothing": (["--vocab_size", "0"], ["vocab_size"]),
    "units of nothing": (["--unit_bytes", "0"], ["unit_bytes"]),
    "units too small for a row": (["--unit_bytes", "100"], ["--unit_bytes=100", "needs at least"]),
    "bytes in no unit": (["--unit_bytes", "5parsecs"], ["unit_bytes", "5parsecs"]),
    "a model of another family": (["--maxtext_model", "qwen3-8b"], ["qwen3-8b", "llama"]),
    "a model that MaxText hasn't": (["--maxtext_model", "lama3.1-8b"], ["lama3.1-8b", "llama3.1-"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cant_be(source: Path, refused: Refused, name: str) -> None:
    """What is wrong with the command line, in its own words."""
    options, words = OPTIONS[name]
    message = refused(source, *options)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize("url", ["s3://bucket/model", "ftp://host/x"])
def test_stores_that_arent_supported(refused: Refused, tmp_path: Path, url: str) -> None:
    """Source and output on them are refused by name."""
    assert url.partition("://")[0] in refused(url)  # type: ignore[arg-type]
    folder = make_release(tmp_path / "hf")
    assert url.partition("://")[0] in refused(folder, "--output", url)


@pytest.mark.parametrize(
    ("url", "meant"), [("gs:/b/x", "gs://b/x"), ("hf:/acme/tiny", "hf://acme/tiny"), ("hf:acme/tiny", "hf://acme/tiny")]
)
def test_a_url_that_lacks_a_slash(refused: Refused, tmp_path: Path, url: str, meant: str) -> None:
    """It isn't taken for a folder of this machine."""
    assert f"{url}: did you mean {meant}?" in refused(url)  # type: ignore[arg-type]
    assert f"{url}: did you mean {meant}?" in refused(make_release(tmp_path / "hf"), "--output", url)


def test_the_home_folder_of_nobody(refused: Refused, tmp_path: Path) -> None:
    """Source and output: in words."""
    assert "there is no user nosuchuser" in refused("~nosuchuser/x")  # type: ignore[arg-type]
    assert "no such folder" in refused("./~nosuchuser")  # type: ignore[arg-type]
    assert "there is no user nosuchuser" in refused(make_release(tmp_path / "hf"), "--output", "~nosuchuser/x")


def test_a_source_that_isnt_there(refused: Refused, tmp_path: Path) -> None:
    """A folder that doesn't exist, and a file where a folder should be."""
    assert "nowhere" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "file" in refused(tmp_path / "file")
    assert "File name too long" in refused(tmp_path / ("x" * 300))
    assert call("export", tmp_path / ("x" * 300), tmp_path / "out") == 2


def test_a_link_beside_the_weights_that_leads_to_itself(tmp_path: Path) -> None:
    """What isn't the model's is nobody's business, before the conversion and after it."""
    source = make_release(tmp_path / "hf")
    (source / "loop").symlink_to("loop")
    convert(source, tmp_path / "out")


@pytest.mark.parametrize("missing", ["--source", "--output"])
def test_an_option_that_must_be_there(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], missing: str
) -> None:
    """Neither has a default."""
    options = {"--source": source, "--output": tmp_path / "out"}
    del options[missing]
    assert call("convert", *(word for option in options.items() for word in option)) == 2
    assert missing in capfd.readouterr().err


ODD = [None, -1, "x", [], {}, {"rope_type": 3}, 1.5, True, 3, 10**30]


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=lambda config: config["model_type"])
def test_no_value_in_a_config_is_a_traceback(tmp_path: Path, config: dict[str, Any]) -> None:
    """Whatever stands in any field that a table reads: the plan is made, or refused."""
    folder = make_release(tmp_path / "hf", config)
    faults = {}
    for field in [*config, "rope_scaling", "rope_parameters", "quantization_config", "index_n_heads"]:
        for value in ODD:
            (folder / "config.json").write_text(json.dumps(config | {field: value}))
            try:
                assert call("plan", "--source", folder) in (0, 2)
            except Exception as e:
                faults[field, str(value)] = repr(e)
    assert faults == {}


@pytest.mark.parametrize("option", ["--param_scan_axis", "--unit_bytes", "--step", "--mesh=fsdp"])
def test_no_number_on_the_command_line_is_a_traceback(tmp_path: Path, option: str) -> None:
    """From 0 to what no machine integer holds: the plan is made, or refused."""
    folder = make_release(tmp_path / "hf")
    for number in (0, 1, 7, 2**31, 2**63, 10**30):
        assert call("plan", "--source", folder, f"{option}={number}") in (0, 2)


@pytest.mark.parametrize("rows", [2**63, 10**30])
def test_a_vocabulary_beyond_all_measure_is_refused(tmp_path: Path, rows: int) -> None:
    """At once and in little memory, rather than planned for as long as the machine bears it."""
    folder = make_release(tmp_path / "hf")
    command = f"ulimit -v 8000000; exec '{sys.executable}' -m weightbeam plan --source '{folder}' --vocab_size {rows}"
    ran = run("bash", "-c", command, timeout=15, status=2)
    assert "vocab_size" in ran.stderr


def _import_too_much() -> None:
    raise ImportError("_rust.abi3.so: failed to map segment from shared object")


def _start_too_many() -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda: bytearray(1 << 60), "the system gives no more memory; raise the limit on it (ulimit -v)"),
        (_import_too_much, "the system gives no more memory; raise the limit on it (ulimit -v)"),
        (
            _start_too_many,
            "the system refuses another thread; raise the limit on memory (ulimit -v) or on processes (ulimit -u)",
        ),
    ],
)
def test_what_the_system_has_no_more_of_is_said(
    fails: Callable[[], Any],
    words: str,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = convert(source, source.parent / "out")
    monkeypatch.setattr("zstandard.ZstdDecompressor", fails)
    assert call("inspect", step) == 1
    assert f"inspect: failed\n  {words}" in capsys.readouterr().err


def test_a_file_that_config_json_names_is_refused(source: Path, refused: Refused) -> None:
    """transformers loads it, whatever the index says; a copy of the field would name a file that isn't in the result."""
    for named in ("other.safetensors", INDEX):
        configure(source, transformers_weights=named)
        assert f"'transformers_weights' is '{named}'" in refused(source)


def test_a_family_that_ends_the_process_is_refused(
    source: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script without a guard, in a file or in an installed package: else the command ended with status 0."""
    table = tmp_path / "ends.py"
    table.write_text("import sys\nsys.exit(0)\n")
    assert f"--family={table}: SystemExit 0" in refused(source, "--family", table)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        entry_points.EntryPointError, match="the family 'ends' of ends:FAMILY can't be loaded: SystemExit 0"
    ):
        entry_points.load(EntryPoint("ends", "ends:FAMILY", "weightbeam.families"), "family")


def test_an_unknown_family_gets_an_inventory(source: Path, refused: Refused) -> None:
    """What the checkpoint holds, numbers collapsed, and every model_type that has a table."""
    configure(source, model_type="gpt_neox")
    message = refused(source)
    assert "'gpt_neox'" in message
    assert "\\n" not in message  # the list is one of lines
    for kind in (
        "llama",
        "mistral",
        "qwen2",
        "qwen3_moe",
        "mixtral",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "kimi_k2",
    ):
        assert kind in message
    last = message.splitlines()[-1]  # behind the list, which fills a terminal
    assert last.startswith(
        "no table for model_type 'gpt_neox' of config.json; for plain JAX --family identity takes any (weightbeam help jax), "
        "for MaxText weightbeam new-family drafts a table (weightbeam help contributors_day), "
        "and --family NAME takes what is one of these by another name. weightbeam inspect "
    )
    # shows what it holds, as -v does, before the refusal
    inventory = refused(source, "-v")
    assert "2 × model.layers.*.mlp.up_proj.weight  bfloat16 [48, 32]" in inventory
    assert "1 × lm_head.weight  bfloat16 [64, 32]" in inventory
    assert inventory.index("lm_head.weight") < inventory.index("'gpt_neox'")


def test_several_faults_are_all_listed(source: Path, refused: Refused) -> None:
    """Seven different ones at once, each by its kind and name, in one message; and a file's own fault isn't told again
    for its tensors.
    """
    change(
        source,
        **{
            UP: None,
            "model.layers.0.mlp.up_proj.weight": np.zeros((3, 3), np.float32),
            "model.layers.0.mlp.gate_proj.weight": np.zeros((48, 32), np.int64),
            "model.layers.0.mlp.down_proj.weight": np.zeros((32, 48), FP8),
            "model.layers.0.self_attn.o_proj.bias": np.ones(32, np.float32),
            "model.layers.1.mlp.x.weight_scale_inv": np.zeros((1, 1), np.float32),
        },
    )
    reindex(source, ghost=FIRST)
    message = refused(source)
    faults = {
        "missing": UP,
        "shape": "model.layers.0.mlp.up_proj.weight",
        "dtype": "model.layers.0.mlp.gate_proj.weight",
        "unscaled": "model.layers.0.mlp.down_proj.weight",
        "unused": "model.layers.0.self_attn.o_proj.bias",
        "orphan scale": "model.layers.1.mlp.x.weight_scale_inv",
        "index": "ghost",
    }
    for kind, subject in faults.items():
        assert f"{kind}: {subject}: " in message
    assert "7 problems" in message
    assert len([line for line in message.splitlines() if line.startswith("  ")]) == 7


def test_a_missing_shard_is_one_line(source: Path, refused: Refused) -> None:
    """Not one for each tensor in it; and a fault elsewhere is still told."""
    change(source, **{"model.extra": np.zeros(3, np.float32)})
    assert file_of(source, "model.extra").name == FIRST
    (source / SECOND).unlink()
    message = refused(source)
    assert "2 problems" in message
    assert "model.extra" in message


def test_many_alike_are_counted(tmp_path: Path, refused: Refused) -> None:
    """A thousand missing tensors are one line and a number where their names differ in numbers only; else some examples
    and a number.
    """
    config = DEEPSEEK | dict(n_routed_experts=300)
    message = refused(save(tmp_path / "hf", config, random_tensors(DEEPSEEK)))
    assert "1,782 problems" in message
    assert message.count("(and 591 alike)") == 3
    assert len(message.splitlines()) < 10
    others = {f"model.extra_{chr(97 + i)}": np.zeros(3, np.float32) for i in range(26)}
    message = refused(save(tmp_path / "others", DEEPSEEK, random_tensors(DEEPSEEK) | others))
    assert "unused: … and 6 more" in message
    assert len(message.splitlines()) < 30


def test_fp8_scales_are_checked_across_files(tmp_path: Path, refused: Refused) -> None:
    """Every weight of a DeepSeek that lost its scales is named, or counted; none is used without."""
    tensors = random_tensors(DEEPSEEK)
    lost = [name for name in tensors if ".layers.2." in name and name.endswith("_proj.weight")]
    stored = tensors | {name: tensors[name].astype(FP8) for name in lost}
    message = refused(save(tmp_path / "hf", DEEPSEEK, *split(stored, 3)))
    assert f"{len(lost)} problems" in message
    assert "unscaled" in message


@pytest.mark.parametrize("kind", ["a checkpoint", "a folder", "a stopped conversion", "a file", "a link to nothing"])
def test_an_output_that_exists(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    """It is left as it is, to the byte and the time, and the message says how to go on."""
    output = tmp_path / "out"
    if kind == "a checkpoint":
        convert(source, output)
    elif kind == "a folder":
        (output / "0").mkdir(parents=True)
    elif kind == "a stopped conversion":
        staged = output / f"0.{new_id()}.orbax-checkpoint-tmp"
        (staged / "items").mkdir(parents=True)
        (staged / "plan.json.gz").touch()
    elif kind == "a file":
        output.write_text("")
    else:
        output.symlink_to("nowhere")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    capfd.readouterr()
    assert call("convert", "--source", source, "--output", output) == 2
    message = capfd.readouterr().err
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert (f"is {kind}" if kind in ("a file", "a link to nothing") else "--overwrite") in message
    assert "Traceback" not in message
    if kind == "a stopped conversion":
        assert "--resume" in message


def test_a_bad_source_and_an_output_that_exists_are_told_together(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All problems at once, on both sides."""
    (tmp_path / "out" / "0").mkdir(parents=True)
    change(source, **{UP: None})
    assert call("convert", "--source", source, "--output", tmp_path / "out") == 2
    message = capfd.readouterr().err
    assert UP in message
    assert "--overwrite" in message


def test_a_source_that_changes_after_it_was_planned(tmp_path: Path) -> None:
    """A file that shrinks in between fails the run: the message has the file and how to go on, and nothing is
    published.
    """
    source = make_release(tmp_path / "hf")
    conversion = plan_conversion(ConvertOptions(), open_hf(source))
    os.truncate(source / "model.safetensors", 3000)
    with pytest.raises(Failed, match=r"model\.safetensors changed while it was converted, [^$]*overwrite=True"):
        run_units(conversion, staging_at(tmp_path / "out", 0), [], {}, Delivery(), None)
    assert not (tmp_path / "out" / "0").exists()


@pytest.mark.parametrize(
    ("command", "place", "read", "written"),
    [
        ("convert", "source", "the folder with config.json and the safetensors files", "checkpoint"),
        ("reshard", "source", "the Orbax checkpoint", "checkpoint"),
        ("materialize", "checkpoint", "the virtual checkpoint", "checkpoint"),
        ("quantize", "source", "a release, or an Orbax checkpoint", "release"),
        ("merge", "source", "the release", "release"),
    ],
)
def test_all_places_that_are_missing(
    capfd: pytest.CaptureFixture[str], command: str, place: str, read: str, written: str
) -> None:
    """Named at once, and what each of them should be."""
    assert call(command) == 2
    told = f"--{place} is missing: {read}\n--output is missing: the folder that the {written} should lie in"
    assert told in capfd.readouterr().err


# --- another model than was meant -------------------------------------------------------------------------------------


def adapter_for(folder: Path, size: int, base: str) -> Path:
    """A LoRA of PEFT's for the query of the first layer."""
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file(
        {name.format("A"): np.ones((2, size), np.float32), name.format("B"): np.ones((4, 2), np.float32)},
        folder / "adapter_model.safetensors",
    )
    about = dict(peft_type="LORA", r=2, lora_alpha=2, target_modules=["q_proj"], base_model_name_or_path=base)
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def test_what_is_another_model_is_said_first(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """An adapter's base, a release that a checkpoint isn't like; and a weight that is none. An adapter by itself isn't
    looked at as a release of nothing.
    """
    adapter = adapter_for(tmp_path / "adapter", 7, "me/other")
    assert call("merge", source, tmp_path / "out", "--lora", adapter) == 2
    first = capsys.readouterr().err.splitlines()[2]
    assert (
        first
        == f"  adapter: {adapter}: was trained on me/other, by its base_model_name_or_path; is that the base here?"
    )
    assert call("merge", source, tmp_path / "out", "--lora", adapter_for(tmp_path / "its own", 7, str(source))) == 2
    assert "is that the base here?" not in capsys.readouterr().err  # it is
    assert call("merge", source, tmp_path / "out", "--lora", f"{adapter},abc") == 2
    assert f"abc isn't a weight, which is a number, as in {adapter},0.5" in capsys.readouterr().err
    assert call("inspect", adapter) == 2
    said = capsys.readouterr()
    assert (said.out, "a LoRA adapter, not a model" in said.err) == ("", True)

    convert(source, tmp_path / "ckpt")
    other = save(tmp_path / "other", QWEN3_MOE, random_tensors(QWEN3_MOE))
    capsys.readouterr()
    assert call("export", tmp_path / "ckpt", tmp_path / "out", "--like", other) == 2
    first = capsys.readouterr().err.splitlines()[2]
    assert first.startswith(f"  like: {other}: is a qwen3_moe model, and the checkpoint isn't that one but a llama: ")


@pytest.mark.parametrize("scan", ["true", "false"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"intermediate_size": 64},
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8},
    ],
)
def test_a_release_of_other_sizes_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture, scan: str, sizes: dict[str, int]
) -> None:
    """Which sizes differ, and not what follows of it for each array and tensor; what else is amiss is told, too."""
    config = LLAMA | dict(head_dim=8)
    convert(save(tmp_path / "source", config, random_tensors(config)), tmp_path / "ckpt", "--scan_layers", scan)
    other = config | sizes
    like = save(tmp_path / "other", other, random_tensors(other))
    capsys.readouterr()
    assert call("export", tmp_path / "ckpt", tmp_path / "out", "--like", like) == 2
    said = "; ".join(f"{name} is {sizes[name]}, the checkpoint's is {config[name]}" for name in sorted(sizes))
    told = ["weightbeam export: refused", "1 problem:", f"  like: {like}: has other sizes: {said}"]
    assert capsys.readouterr().err.splitlines() == told
    tensors = random_tensors(other)
    more = {"model.layers.0.strange.weight": tensors["model.norm.weight"]}
    like = save(tmp_path / "strange", other, tensors | more)
    assert call("export", tmp_path / "ckpt", tmp_path / "out", "--like", like) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (lines[1], len(lines)) == ("2 problems:", 4)
    assert "model.layers.0.strange.weight" in lines[3]


def test_a_run_of_other_sizes_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Where no record says what the sizes were."""
    config = LLAMA | dict(head_dim=8)
    step = convert(save(tmp_path / "source", config, random_tensors(config)), tmp_path / "ckpt")
    for file in ("conversion.json", "release.tar.gz"):
        (step / file).unlink(missing_ok=True)
    other = config | {"hidden_size": 64, "intermediate_size": 96}
    like = save(tmp_path / "other", other, random_tensors(other))
    capsys.readouterr()
    assert call("export", step / "items", tmp_path / "out", "--like", like) == 2
    lines = capsys.readouterr().err.splitlines()
    said = "hidden_size is 64, the checkpoint's is 32; intermediate_size is 96, the checkpoint's is"
    assert lines[2].startswith(f"  like: {like}: has other sizes: {said}")


@pytest.mark.parametrize("output", ["/gs/bucket/ckpt", "/hf/ckpt", "{}/gs:/ckpt", "{}/my-gs:"])
def test_a_path_that_orbax_takes_for_a_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str) -> None:
    """Its restore looks elsewhere, or fails."""
    source = make_release(tmp_path / "hf")
    assert call("convert", source, output.format(tmp_path), "--maxtext_model", "llama2-7b") == 2
    assert "is a path that Orbax takes for a bucket's" in capsys.readouterr().err


def test_a_vocabulary_that_is_cut_is_said_once(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As a warning, and not as what is left out on purpose besides."""
    convert(source, tmp_path / "out", "--vocab_size", "50")
    said = capsys.readouterr()
    assert "rows (" in said.err
    assert "left out on purpose" not in said.out


@pytest.mark.parametrize("name", ["tuned.orbax-checkpoint-tmp", "tuned.orbax-checkpoint-tmp/x", "0.replaced-0123abcd"])
def test_an_output_with_the_name_of_what_is_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """No command reads such a checkpoint, nor does Orbax."""
    source = make_release(tmp_path / "hf")
    assert call("convert", source, tmp_path / name, "--maxtext_model", "llama2-7b") == 2
    assert "has the name of what isn't published yet" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_names_in_a_locale_without_utf8(tmp_path: Path) -> None:
    """TensorStore takes names for UTF-8: in such a locale it would read, and write, another folder than is named."""
    source = make_release(tmp_path / "source")
    command = [sys.executable, "-m", "weightbeam", "convert"]
    where = {"PYTHONPATH": str(Path(__file__).parents[2])}
    for said, words in (("--output", (source, tmp_path / "oü")), ("ascii", (tmp_path / "quü", tmp_path / "out"))):
        ran = run(*command, *words, env=os.environ | where | NO_UTF8, status=2)
        assert said in ran.stderr
        assert "set PYTHONUTF8=1" in ran.stderr
    assert os.listdir(tmp_path) == ["source"]
    run(*command, source, tmp_path / "oü", env=os.environ | where | NO_UTF8 | {"PYTHONUTF8": "1"}, status=0)


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    source, gone = make_release(tmp_path / "source"), tmp_path / "gone"
    gone.mkdir()
    where = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    code = f"import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, [sys.executable, '-m', 'weightbeam', 'convert', {str(source)!r}, 'out'])"
    ran = run(sys.executable, "-c", code, env=where, cwd=gone, status=2)
    assert "the folder that this was begun in isn't there any more" in ran.stderr
