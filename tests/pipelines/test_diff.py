"""`weightbeam diff`: releases, quantised releases and Orbax checkpoints of other writers against each other."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from support import BF16, DEEPSEEK, F32, LLAMA, QWEN3_MOE, call, convert, make_release, random_tensors, save, split
from trained import SHARED, needs_shared, trained_like

import weightbeam
from weightbeam.formats.encodings.quantizing import quantization_config, quantize, why_kept
from weightbeam.formats.storage import open_store
from weightbeam.formats.text.printable import where_apart
from weightbeam.transforms.comparing import release_faults
from weightbeam.transforms.comparing.release_faults import unlike_files

jax = lazily("jax")
ocp = lazily("orbax.checkpoint")
transformers = lazily("transformers")


def statuses(*arguments: object, status: int, folder: Path) -> dict[str, dict[str, Any]]:
    """What `diff --json` says of each tensor."""
    assert call("diff", *arguments, "--json", folder / "found.json") == status
    return json.loads((folder / "found.json").read_bytes())["tensors"]


def kinds(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    told = [each["status"] for each in found.values()]
    return {status: told.count(status) for status in set(told)}


def test_the_same_in_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other files, another order, float32 in place of bfloat16: nothing differs."""
    tensors = random_tensors(LLAMA)
    a = save(tmp_path / "a", LLAMA, tensors)
    b = save(tmp_path / "b", LLAMA, *split({name: values.astype(F32) for name, values in reversed(tensors.items())}, 3))
    assert kinds(statuses(a, b, status=0, folder=tmp_path)) == {"equal": len(tensors)}
    told = capsys.readouterr().out
    assert f"{len(tensors)} tensors of {a} and {b}" in told
    assert f"{len(tensors)} equal" in told


def test_what_differs_and_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One value changed, one tensor rounded, one missing on each side, one of another shape: each by its name, with the
    measures.
    """
    tensors = {name: values.astype(F32) + np.float32(1e-6) for name, values in random_tensors(LLAMA).items()}
    other: dict[str, np.ndarray] = dict(tensors)
    norm, gate, up, head = (
        "model.norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    )
    other[norm] = tensors[norm].copy()
    other[norm][3] += 0.5
    other[gate] = tensors[gate].astype(BF16)
    other["extra.weight"] = other.pop(head)
    other[up] = tensors[up][:-1]
    a, b = save(tmp_path / "a", LLAMA, tensors), save(tmp_path / "b", LLAMA, other)
    found = statuses(a, b, status=1, folder=tmp_path)
    assert kinds(found) == {"equal": len(tensors) - 4, "changed": 1, "rounded": 1, "missing": 2, "shape": 1}
    assert found[head] == {"status": "missing", "message": f"not in {b}"}
    assert found["extra.weight"] == {"status": "missing", "message": f"not in {a}"}
    assert (found[norm]["different"], found[norm]["share"]) == (1, 1 / tensors[norm].size)
    x, y = (side[norm].astype(np.float64) for side in (tensors, other))
    np.testing.assert_allclose(
        [found[norm][key] for key in ("max", "mean")], [np.abs(x - y).max(), np.abs(x - y).mean()]
    )
    np.testing.assert_allclose(found[norm]["cosine"], (x @ y) / np.sqrt((x @ x) * (y @ y)))
    told = capsys.readouterr().out
    assert "5 tensors differ beyond the tolerance of 0" in told
    assert call("diff", a, a) == 0


def test_small_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What another `config.json` or tokenizer makes of the same tensors is said, and isn't counted."""
    first = make_release(tmp_path / "first")
    second = Path(shutil.copytree(first, tmp_path / "second"))
    config = json.loads((first / "config.json").read_text())
    changed = config | dict(rope_theta=1.0, rope_scaling={"factor": 2.0})
    (second / "config.json").write_text(json.dumps(changed))
    (second / "tokenizer.json").write_text("{}")
    (second / "README.md").write_text("mine")
    (second / "notes.txt").write_text("mine")
    assert call("diff", first, second, "--json", tmp_path / "found") == 0
    found = json.loads((tmp_path / "found").read_text())
    said = {name: (each["a"], each["b"]) for name, each in found["files"].items()}
    theta = json.dumps(config["rope_theta"]) if "rope_theta" in config else "nothing"
    assert said.pop("config.json: rope_theta") == (theta, "1.0")
    assert said.pop("config.json: rope_scaling.factor") == ("nothing", "2.0")
    assert said.pop("tokenizer.json")[1].startswith("SHA-256 44136fa355b3")
    assert not said
    assert "rope_scaling.factor" in capsys.readouterr().out
    assert call("diff", first, first, "--json", tmp_path / "found") == 0
    assert json.loads((tmp_path / "found").read_text())["files"] == {}


def test_small_files_that_say_odd_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is NaN on both sides is the same; of long values that is shown where they part; a file that isn't compared is
    named, whatever the other side has.
    """
    monkeypatch.setattr(release_faults, "MAX_BYTES", 1)
    first, second = (open_store(str(tmp_path / name)) for name in ("first", "second"))
    for name, last in (("first", "full"), ("second", "sliding")):
        (tmp_path / name).mkdir()
        kinds = ", ".join(["full"] * 30 + [last])
        (tmp_path / name / "config.json").write_text(f'{{"eps": NaN, "kinds": "{kinds}"}}')
        (tmp_path / name / "tokenizer.json").write_text("{}")
    found = unlike_files(first, second)
    assert found.keys() == {"config.json: kinds", "tokenizer.json"}
    parted = [text.removeprefix("…") for text in where_apart(*found["config.json: kinds"])]
    assert parted[0].endswith(', full"')
    assert parted[1].endswith(', sliding"')
    (tmp_path / "second" / "config.json").unlink()
    assert unlike_files(first, second)["config.json"][0] == "can be read"


def test_tolerance(tmp_path: Path) -> None:
    """Of the largest difference of an element; what is missing is never within it."""
    tensors = random_tensors(LLAMA)
    other = {name: values.astype(F32) + np.float32(0.01) for name, values in tensors.items()}
    a, b = save(tmp_path / "a", LLAMA, tensors), save(tmp_path / "b", LLAMA, other)
    assert call("diff", a, b) == 1
    assert call("diff", a, b, "--tolerance", "0.02") == 0
    assert call("diff", a, b, "--tolerance", "0.005") == 1
    del other["lm_head.weight"]
    assert call("diff", a, save(tmp_path / "c", LLAMA, other), "--tolerance", "10") == 1


@pytest.mark.parametrize("text", ["-1", "nan", "x", "inf"])
def test_tolerances_that_nobody_means(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--tolerance", "--fail_over"):
        assert call("diff", tmp_path, tmp_path, option, text) == 2
        assert f"{option}: '{text}' should be a number from 0 on" in capsys.readouterr().err


def test_what_changed_most_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the norm of the change over that of the tensor, not by the largest difference, in which large tensors win; then
    kinds and layers, all of each together.
    """
    tensors = {name: values.astype(F32) for name, values in random_tensors(LLAMA).items()}
    factors = {name: 1 + 0.001 * number for number, name in enumerate(tensors)}
    factors["model.layers.1.input_layernorm.weight"] = 1.5
    tensors["model.layers.1.input_layernorm.weight"] *= np.float32(1e-3)
    other = {name: (values * np.float32(factors[name])).astype(F32) for name, values in tensors.items()}
    a, b = save(tmp_path / "a", LLAMA, tensors), save(tmp_path / "b", LLAMA, other)
    assert call("diff", a, b, "--json", tmp_path / "found.json") == 1
    told = json.loads((tmp_path / "found.json").read_bytes())
    for name, each in told["tensors"].items():
        np.testing.assert_allclose(each["relative"], factors[name] - 1, rtol=1e-3, atol=1e-9)
    rows = [line.split() for line in capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]]
    assert [row[0] for row in rows] == sorted(factors, key=lambda name: -factors[name])[:20]
    for layer, total in told["layers"].items():
        names = [name for name in tensors if f".layers.{layer}." in name or (layer == "-1" and ".layers." not in name)]
        change = sum(((tensors[name] - other[name]).astype(np.float64) ** 2).sum() for name in names)
        size = sum((tensors[name].astype(np.float64) ** 2).sum() for name in names)
        np.testing.assert_allclose(total["relative"], np.sqrt(change / size), rtol=1e-3)
    assert set(told["layers"]) == {"-1", "0", "1"}
    assert told["kinds"]["mlp.up_proj.weight"]["elements"] == 2 * tensors["model.layers.0.mlp.up_proj.weight"].size


def test_fail_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tensor's relative change, whatever the tolerance; what isn't finite or is missing is over any."""
    tensors = {name: values.astype(F32) for name, values in random_tensors(LLAMA).items()}
    other = {name: (values * np.float32(1.01)).astype(F32) for name, values in tensors.items()}
    a, b = save(tmp_path / "a", LLAMA, tensors), save(tmp_path / "b", LLAMA, other)
    assert call("diff", a, b, "--fail_over", "0.011") == 0
    assert "differ" not in capsys.readouterr().out.splitlines()[-1]
    other["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.02)
    assert call("diff", a, save(tmp_path / "more", LLAMA, other), "--fail_over", "0.011") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 tensor differs by more than 0.011 of its norm"
    other["model.norm.weight"] = tensors["model.norm.weight"].copy()
    other["model.norm.weight"][3] = np.nan
    c = save(tmp_path / "c", LLAMA, other)
    assert call("diff", a, c, "--fail_over", "1e9") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1].split()[:2] == ["model.norm.weight", "nan"]  # the first, and no angle of -1
    assert "-1.000000" not in said[1]
    assert said[-2:] == [
        f"NaN or infinite elements in model.norm.weight of {c}",
        "1 tensor differs by more than 1e+09 of its norm",
    ]
    assert call("diff", c, c) == 0
    assert f"NaN or infinite elements in model.norm.weight of {c}" in capsys.readouterr().out
    del other["model.norm.weight"]
    assert call("diff", a, save(tmp_path / "d", LLAMA, other), "--fail_over", "1e9") == 1


NORM = "model.norm.weight"


def with_value(value: float, *places: int) -> dict[str, np.ndarray]:
    """A model, one of whose tensors has this value at these places."""
    tensors = {name: values.copy() for name, values in random_tensors(LLAMA, F32).items()}
    tensors[NORM][list(places)] = value
    return tensors


@pytest.mark.parametrize(
    "options", [(), ("--fail_over", "0.5"), ("--tolerance", "9"), ("--fail_over", "0.5", "--tolerance", "9")]
)
@pytest.mark.parametrize(
    ("a", "b", "odd"),
    [
        (with_value(math.nan, 3), with_value(1.0), "a"),
        (with_value(1.0), with_value(math.nan, 3), "b"),
        (with_value(1.0), with_value(math.inf, 3), "b"),
        (with_value(math.inf, 3), with_value(-math.inf, 3), "ab"),
        (with_value(math.inf, 3), with_value(math.nan, 3), "ab"),
        (with_value(math.nan, 3), with_value(math.nan, 3), None),
        (with_value(math.inf, 3), with_value(math.inf, 3), None),
        ({NORM: np.ones(32, F32)}, {"model.other.weight": np.ones(32, F32)}, ""),
    ],
    ids=["NaN left", "NaN right", "inf", "inf and -inf", "inf and NaN", "NaN on both", "inf on both", "missing"],
)  # fmt: skip
def test_a_difference_is_told_however_quiet(
    a: dict[str, np.ndarray],
    b: dict[str, np.ndarray],
    odd: str | None,
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the text isn't printed, a line on standard error says what differs and where something isn't finite."""
    monkeypatch.chdir(tmp_path)
    for name, tensors in (("a", a), ("b", b)):
        save(tmp_path / name, LLAMA, tensors)
    for said in (("-q",), ("--json", "-", "--progress", "none"), ("-q", "--json", "-"), ("-q", "--json", "found.json")):
        assert call("diff", "a", "b", *options, *said) == (odd is not None)
        out, err = capsys.readouterr()
        if "-" in said:
            assert json.loads(out)["ok"] == (odd is None)
        else:
            assert out == ""
        if odd is None:
            assert err == ""
        else:
            (line,) = err.splitlines()
            assert line.startswith(f"warning: a and b: {'1 tensor differs' if odd else '2 tensors differ'} b")
            assert [side for side in "ab" if f"elements in {NORM} of {side}" in line] == list(odd)


def test_a_quantised_release_against_its_values(tmp_path: Path) -> None:
    """FP8 beside bfloat16 that was dequantised from it: rounded; beside the original: changed, and close to it."""
    tensors = random_tensors(DEEPSEEK)
    stored, dequantised = {}, {}
    for name, values in tensors.items():
        if why_kept(name, values.shape):
            stored[name] = dequantised[name] = values
        else:
            stored[name], stored[f"{name}_scale_inv"] = quantize(values, name)
            rows, columns = (np.arange(n) // 128 for n in values.shape)
            dequantised[name] = (stored[name].astype(F32) * stored[f"{name}_scale_inv"][rows][:, columns]).astype(BF16)
    config = DEEPSEEK | {"quantization_config": quantization_config([])}
    original, fp8, back = (
        save(tmp_path / "a", DEEPSEEK, tensors),
        save(tmp_path / "q", config, stored),
        save(tmp_path / "d", DEEPSEEK, dequantised),
    )
    found = statuses(fp8, back, status=1, folder=tmp_path)
    assert set(found) == set(tensors)
    assert kinds(found).keys() == {"equal", "rounded"}
    found = statuses(original, fp8, status=1, folder=tmp_path)
    changed = [each for each in found.values() if each["status"] == "changed"]
    assert changed
    assert all(each["cosine"] > 0.999 for each in changed)


@pytest.mark.parametrize("options", [(), ("--scan_layers", "false"), ("--save_dtype", "float32")])
def test_a_release_and_its_checkpoint(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Either way round; exact arrays are equal, scaled ones are rounded as documented; a change is found in the array
    that holds it.
    """
    source = make_release(tmp_path / "source")
    step = convert(source, tmp_path / "out", *options)
    found = statuses(source, tmp_path / "out", status=0, folder=tmp_path)
    assert statuses(step / "items", source, status=0, folder=tmp_path) == found
    assert kinds(found).keys() <= {"equal", "rounded"}
    other = random_tensors(LLAMA)
    other["model.norm.weight"].view(np.uint16)[3] ^= 1 << 7
    found = statuses(save(tmp_path / "other", LLAMA, other), step, status=1, folder=tmp_path)
    assert [name for name, each in found.items() if each["status"] == "changed"] == [
        "params.params.decoder.decoder_norm.scale"
    ]


def test_a_checkpoint_that_was_rounded_for_a_release(tmp_path: Path) -> None:
    """A float32 checkpoint, whose values no bfloat16 holds, and its bfloat16 export, either way round; with one value
    changed by more than a step it is another.
    """
    random = np.random.default_rng(5)
    values = {
        name: (random.standard_normal(tensor.shape) + 0.1).astype(F32) for name, tensor in random_tensors(LLAMA).items()
    }
    source = save(tmp_path / "hf", LLAMA, values)
    assert call("convert", source, tmp_path / "out", "--save_dtype", "float32") == 0
    assert call("export", tmp_path / "out", tmp_path / "back", "--save_dtype", "bfloat16") == 0
    for sides in ((tmp_path / "out", tmp_path / "back"), (tmp_path / "back", tmp_path / "out")):
        assert kinds(statuses(*sides, status=1, folder=tmp_path)).keys() == {"rounded"}
    values["model.norm.weight"][3] *= 1.02
    save(tmp_path / "other", LLAMA, {name: tensor.astype(BF16) for name, tensor in values.items()})
    found = statuses(tmp_path / "out", tmp_path / "other", status=1, folder=tmp_path)
    assert [name for name, each in found.items() if each["status"] == "changed"] == [
        "params.params.decoder.decoder_norm.scale"
    ]


def test_orbax_checkpoints_of_two_writers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours, and a training state of nnx that stock Orbax saved, with `value` leaves and an optimizer: the weights are
    compared, nothing else, and that is said.
    """
    source = make_release(tmp_path / "source", QWEN3_MOE)
    step = convert(source, tmp_path / "out")
    weights = ocp.PyTreeCheckpointer().restore(step / "items")["params"]["params"]
    state = {"params": {"params": _boxed(weights)}, "opt_state": {"count": np.int32(3)}, "step": np.int64(7)}
    with ocp.CheckpointManager(tmp_path / "trained") as manager:
        manager.save(7, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    assert kinds(statuses(tmp_path / "out", tmp_path / "trained", status=0, folder=tmp_path)).keys() == {"equal"}
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"       2 of {tmp_path / 'trained'} not compared: ")


def test_training_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer is compared, too, unless only the weights are asked for; a moment that is gone is missing."""
    weights = {"decoder": {"decoder_norm": {"scale": np.ones(8, F32)}}}
    moments = {"decoder_norm": np.ones(8, F32), "embedding": np.ones(8, F32)}
    for name, changed in (("a", {}), ("b", {"embedding": np.arange(8, dtype=F32)}), ("c", {"embedding": {}})):
        state = {"params": {"params": weights}, "opt_state": [{"nu": moments | changed}], "step": np.int64(7)}
        ocp.PyTreeCheckpointer().save(tmp_path / name / "7" / "items", state)
    a, b, c = (tmp_path / name / "7" for name in "abc")
    assert kinds(statuses(a, a, status=0, folder=tmp_path)) == {"equal": 4}
    found = statuses(a, b, status=1, folder=tmp_path)
    assert [name for name, each in found.items() if each["status"] == "changed"] == ["opt_state.0.nu.embedding"]
    assert statuses(a, c, status=1, folder=tmp_path)["opt_state.0.nu.embedding"]["status"] == "missing"
    assert kinds(statuses(a, b, "--state", "params", status=0, folder=tmp_path)) == {"equal": 1}
    assert f"3 of {b} not compared: not a weight (--state params)" in capsys.readouterr().out


def test_what_of_training_states_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts, what is empty in another way, and random keys of another generator with the same bits."""
    bits = np.asarray([0, 3, 0, 3], np.uint32)
    base: dict[str, Any] = {
        "params": {"params": {"decoder": {"decoder_norm": {"scale": np.ones(8, F32)}}}},
        "opt_state": [{"nu": np.ones(8, F32)}, None],
        "note": "hello",
        "rng": jax.random.wrap_key_data(bits, impl="rbg"),
        "step": np.int64(7),
    }
    others: dict[str, dict[str, Any]] = {
        "same": {},
        "note": {"note": "hellO"},
        "opt_state.1": {"opt_state": [base["opt_state"][0], {}]},
        "rng": {"rng": jax.random.wrap_key_data(bits, impl="unsafe_rbg")},
        "rng as numbers": {"rng": bits},
    }
    for name, changed in others.items():
        ocp.PyTreeCheckpointer().save(tmp_path / name / "7" / "items", base | changed)
    for name in others:
        found = statuses(tmp_path / "same", tmp_path / name, status=int(name != "same"), folder=tmp_path)
        assert [key for key, each in found.items() if each["status"] == "changed"] == [name.split()[0]] * (
            name != "same"
        )
    without = {key: value for key, value in base.items() if key != "note"}
    ocp.PyTreeCheckpointer().save(tmp_path / "without" / "7" / "items", without)
    statuses(tmp_path / "without", tmp_path / "same", status=1, folder=tmp_path)
    assert f'not there in {tmp_path / "without"}, the text "hello" in {tmp_path / "same"}' in " ".join(
        capsys.readouterr().out.split()
    )


@needs_shared
@pytest.mark.parametrize("scan", ["true", "false"])
def test_a_reshard_of_a_training_state(tmp_path: Path, scan: str) -> None:
    """Every array of it is compared, that of a layer with its share of what is stacked."""
    source, like = SHARED / "trained" / "llama-fsdp8", trained_like(tmp_path / "like", "llama")
    options = ("--scan_layers", scan, "--like", like, "--maxtext_model", "llama3.1-8b")
    assert call("reshard", source, tmp_path / "new", *options) == 0
    found = statuses(source, tmp_path / "new", status=0, folder=tmp_path)
    assert kinds(found).keys() == {"equal"}
    assert len(found) == (69 if scan == "true" else 204)


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK])
def test_layers_stacked_or_not(tmp_path: Path, config: dict[str, Any]) -> None:
    """The same model scanned and unscanned: equal, layer by layer, either way round; a change is found in its layer."""
    source = save(tmp_path / "source", config, tensors := random_tensors(config))
    scanned, unscanned = (convert(source, tmp_path / flag, "--scan_layers", flag) for flag in ("true", "false"))
    found = statuses(scanned, unscanned, status=0, folder=tmp_path)
    assert kinds(found).keys() == {"equal"}
    assert statuses(unscanned, scanned, status=0, folder=tmp_path).keys() == found.keys()
    tensors["model.layers.1.post_attention_layernorm.weight"].view(np.uint16)[3] ^= 1 << 7
    other = convert(save(tmp_path / "other", config, tensors), tmp_path / "changed", "--scan_layers", "true")
    found = statuses(other, unscanned, status=1, folder=tmp_path)
    (changed,) = (name for name, each in found.items() if each["status"] == "changed")
    assert "layers_" in changed


@pytest.mark.parametrize("case", ["gpt-oss", "gemma2", "gemma3", "olmo3", "a short gemma3"])
@pytest.mark.parametrize("axis", ["0", "1"])
def test_layers_stacked_in_cycles_or_not(generated: Path, tmp_path: Path, case: str, axis: str) -> None:
    """Each layer of a cycle is a stack of its own, and what remains behind the last one lies apart, if not all does."""
    source = generated / "cases" / case
    if case == "a short gemma3":  # than a cycle
        sizes = dict(
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=64,
        )
        model = transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**sizes, num_hidden_layers=3, query_pre_attn_scalar=8)
        )
        model.save_pretrained(source := tmp_path / "short")
    scanned = convert(source, tmp_path / "scanned", "--param_scan_axis", axis)
    unscanned = convert(source, tmp_path / "unscanned", "--scan_layers", "false")
    for sides in ((scanned, unscanned), (unscanned, scanned)):
        assert kinds(statuses(*sides, status=0, folder=tmp_path)).keys() == {"equal"}


@pytest.mark.parametrize("axis", ["0", "1", "2"])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
def test_layers_stacked_where_sizes_are_equal(tmp_path: Path, axis: str, recorded: bool) -> None:
    """As many layers as heads: one axis is meant for all arrays, though a query's shape fits several."""
    config = LLAMA | dict(num_hidden_layers=4, num_key_value_heads=4)
    source = save(tmp_path / "source", config, random_tensors(config))
    scanned = convert(source, tmp_path / "scanned", "--param_scan_axis", axis)
    unscanned = convert(source, tmp_path / "unscanned", "--scan_layers", "false")
    if not recorded:
        for record in [scanned / "conversion.json", *scanned.rglob("_CHECKPOINT_METADATA")]:
            record.unlink()
    assert kinds(statuses(scanned, unscanned, status=0, folder=tmp_path)).keys() == {"equal"}
    assert kinds(statuses(unscanned, scanned, status=0, folder=tmp_path)).keys() == {"equal"}
    assert kinds(statuses(source, scanned, status=0, folder=tmp_path)).keys() == {"equal", "rounded"}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("axes", [(1, 0), (0, 2), (2, 1)])
def test_layers_stacked_on_two_axes(tmp_path: Path, axes: tuple[int, int], recorded: bool) -> None:
    """What a reshard to another axis advises to look at: the same weights, element by element."""
    source = save(tmp_path / "source", LLAMA, random_tensors(LLAMA))
    first = convert(source, tmp_path / "first", "--param_scan_axis", str(axes[0]))
    assert call("reshard", first, tmp_path / "second", "--param_scan_axis", axes[1]) == 0
    other = convert(
        save(tmp_path / "b", LLAMA, random_tensors(LLAMA, seed=1)), tmp_path / "c", "--param_scan_axis", str(axes[1])
    )
    if not recorded:
        for record in [*tmp_path.rglob("conversion.json"), *tmp_path.rglob("_CHECKPOINT_METADATA")]:
            record.unlink()
    assert kinds(statuses(first, tmp_path / "second" / "0", status=0, folder=tmp_path)).keys() == {"equal"}
    found = statuses(first, other, status=1, folder=tmp_path)
    assert kinds(found).keys() == {"changed"}
    wanted = statuses(source, tmp_path / "b", status=1, folder=tmp_path)
    layers = (wanted[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in range(LLAMA["num_hidden_layers"]))
    largest = max(layer["max"] for layer in layers)
    assert next(each["max"] for key, each in found.items() if key.endswith("mlp.wi_1.kernel")) == largest


@pytest.mark.parametrize("axis", [-5, 7, True, 10**30, "1"])
def test_a_record_of_an_axis_that_is_none(tmp_path: Path, axis: Any) -> None:
    """The shapes decide."""
    source = save(tmp_path / "source", LLAMA, random_tensors(LLAMA))
    first, second = (convert(source, tmp_path / name, "--param_scan_axis", "0") for name in ("first", "second"))
    record = json.loads((second / "conversion.json").read_text())
    record["options"]["param_scan_axis"] = axis
    (second / "conversion.json").write_text(json.dumps(record))
    assert kinds(statuses(first, second, status=0, folder=tmp_path)).keys() == {"equal"}


def _boxed(tree: Any) -> Any:
    return {key: _boxed(value) for key, value in tree.items()} if isinstance(tree, dict) else {"value": tree}


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback: what, where, why."""
    source = make_release(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    assert call("diff", source, tmp_path / "empty") == 2
    assert "no Orbax checkpoint" in capsys.readouterr().err
    assert call("diff", tmp_path / "none", source) == 2
    assert "no such folder" in capsys.readouterr().err
    broken = make_release(tmp_path / "broken")
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[:-10])
    assert call("diff", source, broken) == 2
    assert "truncated" in capsys.readouterr().err


def test_from_python(tmp_path: Path) -> None:
    """A value with everything in it; nothing is printed."""
    a = make_release(tmp_path / "a")
    found = weightbeam.diff(str(a), str(a), progress=False)
    assert found.ok
    assert found.counts["equal"] == len(found.tensors)
    assert json.loads(found.to_json())["ok"] is True
    assert "equal" in found._repr_html_()
    with pytest.raises(weightbeam.Refused, match="tolerance"):
        weightbeam.diff(str(a), str(a), tolerance=-1.0)


def test_the_order_of_what_differs_alike(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Layer 2 stands before layer 10, and step 2 before step 10."""
    config = LLAMA | dict(num_hidden_layers=12)
    tensors = random_tensors(config)
    source = save(tmp_path / "a", config, tensors)
    for layer in (2, 10):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][0, 0] = np.nan
    assert call("diff", source, save(tmp_path / "b", config, tensors)) == 1
    said = capsys.readouterr().out
    assert "model.layers.2.mlp.up_proj.weight, model.layers.10.mlp.up_proj.weight of " in said
    assert [line.split()[0] for line in said.splitlines() if line.startswith(("2  ", "10  "))] == ["2", "10"]
    for step in ("2", "10"):
        (tmp_path / "run" / step / "items").mkdir(parents=True)
        (tmp_path / "run" / step / "items" / "_METADATA").write_text("{}")
    assert call("inspect", tmp_path / "run") == 2
    assert f"2 steps: name one of 2, 10, as in {tmp_path / 'run' / '10'}" in capsys.readouterr().err
