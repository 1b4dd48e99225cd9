"""`weightbeam fit`, and `weightbeam plan --maxtext_config`: what MaxText must be told, at the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from facts import config_of, load_trees
from support import LLAMA, call, convert, make_release, save

import weightbeam as wb

QWEN3 = next(config_of(tree) for tree in load_trees().values() if tree.model == "qwen3-8b")


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """The config.json of Qwen3-8B; its tensors aren't needed."""
    return save(tmp_path / "hf", QWEN3, {})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A whole model of sizes that MaxText hasn't got."""
    return make_release(tmp_path / "llama")


def test_a_release_that_fits(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("fit", qwen, "--maxtext_model", "qwen3-8b") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "qwen3-8b fits"
    assert wb.fit(str(qwen), "qwen3-8b").ok


def test_another_model_differs_field_by_field(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each key with both values and what the difference does; exit status 1; the line that puts it right."""
    assert call("fit", "--source", qwen, "--maxtext_model", "qwen3-4b", "--json", "-") == 1
    found = json.loads(capsys.readouterr().out)
    differences = {entry["key"]: entry for entry in found["differences"]}
    assert (differences["base_emb_dim"]["needed"], differences["base_emb_dim"]["said"]) == (4096, 2560)
    assert "doesn't load" in differences["base_emb_dim"]["effect"]
    assert call("fit", qwen, "--maxtext_model", "qwen3-4b", "-q") == 1
    quietly = capsys.readouterr()
    assert quietly.out == ""
    assert quietly.err.startswith(
        f"warning: {qwen}: {len(differences)} differences from qwen3-4b; MaxText must be told"
    )
    assert call("fit", qwen, "--maxtext_model", "qwen3-4b") == 1
    said = capsys.readouterr().out
    assert all(key in said for key in differences)
    assert (
        f"{len(differences)} differences from qwen3-4b; MaxText must be told: scan_layers=true model_name=qwen3-8b"
        in said.splitlines()[-1]
    )


def test_what_a_name_alone_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MaxText takes the query's scale of Gemma 3, and the layers' kinds of Gemma 4, from the model's name: no key of a
    file says it.
    """
    trees = {tree.model: config_of(tree) for tree in load_trees().values()}
    for model, other, word in (
        ("gemma3-4b", "gemma3-27b", "'query_pre_attn_scalar' is 256, but gemma3-27b multiplies the query by 1/√320"),
        ("gemma4-e2b", "gemma4-e4b", "'layer_types' isn't the pattern"),
    ):
        release, file = save(tmp_path / model, trees[model], {}), tmp_path / f"{model}.yml"
        call("plan", release, "--scan_layers", str(model == "gemma3-4b").lower(), "--maxtext_config", file)
        call("fit", release, "--maxtext_model", file)
        assert "under the name" not in capsys.readouterr().out
        file.write_text(file.read_text().replace(f"model_name: {model}", f"model_name: {other}"))
        assert call("fit", release, "--maxtext_model", file) == 1
        assert f"under the name {other}: config.json: {word}" in capsys.readouterr().out


def test_a_file_of_ones_own(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What convert writes fits; a wrong constant in it is named with what it does."""
    # the tensors are missing, and the file is written all the same
    assert call("plan", qwen, "--maxtext_config", tmp_path / "mine.yml") == 2
    assert call("fit", qwen, "--maxtext_model", tmp_path / "mine.yml") == 0
    (tmp_path / "staged.yml").write_text((tmp_path / "mine.yml").read_text() + "ici_pipeline_parallelism: 2\n")
    assert call("fit", qwen, "--maxtext_model", tmp_path / "staged.yml") == 1
    assert "ici_pipeline_parallelism other than 1 make it stack layers by stages" in capsys.readouterr().out
    unscanned = (tmp_path / "mine.yml").read_text().replace("scan_layers: true", "scan_layers: false")
    (tmp_path / "unscanned.yml").write_text(unscanned)  # which convert does, too
    assert call("fit", qwen, "--maxtext_model", tmp_path / "unscanned.yml") == 0
    (tmp_path / "mine.yml").write_text(
        (tmp_path / "mine.yml").read_text().replace("rope_max_timescale: 1000000", "rope_max_timescale: 10000")
    )
    capsys.readouterr()
    assert call("fit", qwen, "--maxtext_model", tmp_path / "mine.yml") == 1
    said = capsys.readouterr().out
    assert "rope_max_timescale" in said
    assert "positions turn otherwise" in said


@pytest.mark.parametrize(
    ("against", "words"),
    [
        ("qwen3-9b", "qwen3-9b"),
        ("none.yml", "No such file"),
        ("text.yml", "should hold keys and values"),
        ("odd.yml", "no YAML"),
        ("other.yml", "which no MaxText that is known here has"),
    ],
)
def test_what_fit_refuses(
    qwen: Path, tmp_path: Path, against: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, with exit status 2."""
    (tmp_path / "text.yml").write_text("a text")
    (tmp_path / "odd.yml").write_text("{")
    (tmp_path / "other.yml").write_text("model_name: qwen3-9b\n")
    assert call("fit", qwen, "--maxtext_model", tmp_path / against if against.endswith(".yml") else against) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message


def test_fit_needs_both(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("fit", qwen) == 2
    assert "--maxtext_model" in capsys.readouterr().err
    with pytest.raises(wb.Refused, match="maxtext_model= is missing"):
        wb.fit(str(qwen), "")
    assert call("fit", tmp_path, "--maxtext_model", "llama2-7b") == 2
    assert "config.json: no such file" in capsys.readouterr().err


def test_the_configuration_on_standard_output(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else is printed; it is what a file gets, what convert writes, and what Python has."""
    options = ("--maxtext_model", "llama2-7b")
    assert call("plan", llama, *options, "--maxtext_config", "-") == 0
    printed = capsys.readouterr().out
    assert call("plan", llama, *options, "--maxtext_config", tmp_path / "mine.yml") == 0
    step = convert(llama, tmp_path / "out", *options)
    made = wb.maxtext_config(str(llama), maxtext_model="llama2-7b")
    assert printed == (tmp_path / "mine.yml").read_text() == (step / "maxtext.yml").read_text() == str(made)
    assert yaml.safe_load(printed) == dict(made)
    assert (made["base_emb_dim"], made["scan_layers"], made.model) == (LLAMA["hidden_size"], True, "llama2-7b")


def test_the_last_line_of_convert_is_the_configuration_s(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where MaxText has no model of these sizes, and with what isn't in config.json."""
    made = wb.convert(
        str(llama),
        str(tmp_path / "out"),
        maxtext_model="llama2-7b",
        scan_layers=False,
        vocab_size=100,
        use_ocdbt=False,
        progress=False,
    )
    flags = made.maxtext
    assert list(flags)[:3] == ["load_parameters_path", "scan_layers", "model_name"]
    assert flags["load_parameters_path"] == str(tmp_path / "out" / "0" / "items")
    told = dict(
        scan_layers="false", model_name="llama2-7b", override_model_config="true", vocab_size="100", base_mlp_dim="48"
    )
    assert {key: flags[key] for key in told} == told
    assert flags["checkpoint_storage_use_ocdbt"] == "false"
    assert set(made.planned.plan.maxtext.overrides()) <= set(flags)
    assert (
        f"model_name=llama2-7b checkpoint_storage_use_ocdbt=false\n            and the keys of {made.written.folder}/maxtext.yml"
        in str(made)
    )
    told = (tmp_path / "out" / "0" / "maxtext.yml").read_text().replace("\n#   ", " ")
    assert "scan_layers=false model_name=llama2-7b override_model_config=true" in told
