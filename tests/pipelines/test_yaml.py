"""YAML from a stranger: what a few bytes of it may make, and what can't be made of it at all."""

from __future__ import annotations

import itertools
import resource
import time
from pathlib import Path

import pytest
import yaml
from support import call

from weightbeam.formats.storage.strict_yaml import MAX_YAML, parse_yaml
from weightbeam.model_mappings.config_json import full_keys
from weightbeam.model_mappings.maxtext_models import base, models, said_by
from weightbeam.pipelines.running.like import read_maxtext_config
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import sharding_rules
from weightbeam.pipelines.terminal.maxtext_file import read_maxtext_yaml

NAMES = "abcdefghij"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise(NAMES)
)
BAD = {
    "aliases of aliases": f"{LAUGHS}logical_axis_rules: *j\nbase_emb_dim: *j\n",
    "itself": "base_emb_dim: &a [*a]\nlogical_axis_rules: *a\n",
    "a mapping in itself": "logical_axis_rules: &a {<<: *a}\n",
    "deep": f"logical_axis_rules: {'[' * 5000}{']' * 5000}\n",
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep blocks": "- " * 5000,
    "no date": "base_emb_dim: 2001-13-45\n",
    "no number": "base_emb_dim: 0x_\n",
    "an empty number": 'base_emb_dim: !!int ""\n',
    "no bool": "base_emb_dim: !!bool x\n",
    "no float": "base_emb_dim: !!float x\n",
    "no time": 'base_emb_dim: !!timestamp ""\n',
    "a long number": f"base_emb_dim: {'9' * 5000}\n",
    "a long number in base 60": f"base_emb_dim: {':'.join(['1'] * 3000)}\n",
    "large": f"base_emb_dim: {'x' * MAX_YAML}\n",
}


@pytest.mark.parametrize("name", BAD)
def test_yaml_that_is_refused(name: str) -> None:
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(yaml.YAMLError):
        parse_yaml(BAD[name])
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


def test_yaml_that_is_taken() -> None:
    assert parse_yaml("base: &a {x: 1}\nmore: [*a, *a]\nover: {<<: *a, y: 2}\n") == {
        "base": {"x": 1}, "more": [{"x": 1}] * 2, "over": {"x": 1, "y": 2},
    }  # fmt: skip
    assert parse_yaml("") is None


@pytest.mark.parametrize("name", BAD)
def test_files_of_it_that_commands_are_given(
    source: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are refused in few words."""
    file = tmp_path / "odd.yml"
    file.write_text(BAD[name])
    for command in (
        ("plan", source, "--sharding_rules", file),
        ("fit", source, file),
        ("watch", "--config", file, "--once"),
    ):
        assert call(*command) == 2
        said = capfd.readouterr().err
        assert str(file) in said.replace("\n", "")
        assert len(said) < 1000


def test_configurations_that_are_each_others_base(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, below in (("one", "other"), ("other", "one")):
        (tmp_path / f"{name}.yml").write_text(f"base_config: {below}.yml\n")
    assert call("fit", source, tmp_path / "one.yml") == 2
    assert "its base_config leads back to it" in " ".join(capfd.readouterr().err.split())


def test_a_key_that_is_there_twice_is_refused_as_maxtext_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "twice.yml").write_text("base_emb_dim: 64\nhead_dim: 16\nbase_emb_dim: 32\n")
    with pytest.raises(Refused, match="base_emb_dim stands in lines 1, 3"):
        read_maxtext_yaml("--maxtext_config", str(tmp_path / "twice.yml"))
    (tmp_path / "once.yml").write_text(
        'sizes: &sizes {a: 1, b: 2}\nmore: {<<: *sizes, a: 3, 1: 2, "1": 3}\nhead_dim: 16\n'
    )
    assert read_maxtext_yaml("--maxtext_config", str(tmp_path / "once.yml"))["more"] == {"a": 3, "b": 2, 1: 2, "1": 3}


@pytest.mark.parametrize("beside", ["configs/models", "models"])
def test_a_model_s_own_file_beside_a_configuration_is_above_it(
    tmp_path: Path, beside: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As MaxText merges them; what the table knows of the model is out of force then. `override_model_config` turns it."""
    (tmp_path / beside).mkdir(parents=True)
    (tmp_path / "configs").mkdir(exist_ok=True)
    (tmp_path / beside / "llama3-8b.yml").write_text("base_emb_dim: 64\nnormalization_layer_epsilon: 1.e-3\n")
    mine = tmp_path / "configs" / "mine.yml"
    mine.write_text(
        "model_name: llama3-8b\nbase_config: base.yml\nnormalization_layer_epsilon: 1.e-6\nvocab_size: 100\n"
    )
    keys = full_keys(read_maxtext_yaml("--maxtext_config", str(mine)))
    asked = ("base_emb_dim", "normalization_layer_epsilon", "vocab_size", "rope_max_timescale")
    assert [keys[key] for key in asked] == [64, 1e-3, 100, 10_000]
    assert "MaxText takes normalization_layer_epsilon of" in caplog.text
    caplog.clear()
    mine.write_text(f"{mine.read_text()}override_model_config: true\n")
    assert full_keys(read_maxtext_yaml("--maxtext_config", str(mine)))["normalization_layer_epsilon"] == 1e-6
    read_maxtext_config(str(tmp_path / beside / "llama3-8b.yml").replace("/models/", "/models/../models/"))
    assert not caplog.records


@pytest.mark.parametrize("name", models())
def test_a_models_own_file_is_called_as_the_model(tmp_path: Path, name: str) -> None:
    """It doesn't say `model_name`; of Llama 3.1, Gemma 3's 27B and Gemma 4's E2B MaxText takes something from the name."""
    file = tmp_path / f"{name}.yml"
    file.write_text(yaml.dump(dict(said_by(name) or {})))
    assert full_keys(read_maxtext_yaml("--maxtext_config", str(file))) | {"override_model_config": True} == full_keys(
        {"model_name": name, "override_model_config": True}
    )


@pytest.mark.parametrize("text", ["base_config: base.yml", "run_name: mine", "model_name: llama2-7b", "steps: 10"])
def test_a_runs_file_that_is_called_as_a_model(tmp_path: Path, text: str) -> None:
    """Its model is the one that it names, if it names one; whatever begins as Llama 3.1's names is the same."""
    for name in ("llama3.1-8b", "llama3.1-finetune"):
        run = tmp_path / f"{name}.yml"
        run.write_text(f"{text}\nbase_emb_dim: 64\n")
        assert read_maxtext_yaml("--maxtext_config", str(run)).get("model_name") in (None, "llama2-7b")


def test_a_model_of_somebodys_own_that_begins_as_llama_31(tmp_path: Path) -> None:
    """Nothing tells which rotary embedding its arrays have."""
    own = tmp_path / "llama3.1-tiny.yml"
    own.write_text("decoder_block: llama2\nbase_emb_dim: 64\nmodel_name:\n")
    with pytest.raises(Refused, match=r"name one of MaxText.s models in the file, such as model_name: llama3.1-8b"):
        read_maxtext_yaml("--maxtext_config", str(own))
    own.write_text("decoder_block: llama2\nbase_emb_dim: 64\nrope_type: llama3.1\n")  # which says it
    assert full_keys(read_maxtext_yaml("--maxtext_config", str(own)))["rope_type"] == "llama3.1"


@pytest.mark.parametrize("place", ["configs", "configs/tpu", "configs/tpu/v5e"])
def test_maxtexts_own_base_is_below_the_model(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    """In a checkout of MaxText's its base.yml is found; what that says isn't said of the model. Another's isn't looked for."""
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / "configs" / "models").mkdir()
    (tmp_path / "base.yml").write_text("head_dim: 8\n")
    (tmp_path / "configs" / "base.yml").write_text(yaml.dump(dict(base()) | {"attention_bias": True, "run_name": ""}))
    (tmp_path / place / "mine.yml").write_text("base_config: base.yml\nmodel_name: llama3-8b\nrun_name: mine\n")
    given = read_maxtext_yaml("--maxtext_config", str(tmp_path / place / "mine.yml"))
    assert given["run_name"] == "mine"
    assert full_keys(given) | {"attention_bias": False} == full_keys({"model_name": "llama3-8b"}) | {
        key: given[key] for key in ("base_config", "run_name")
    }
    assert full_keys(given)["attention_bias"] is True  # which isn't MaxText's
    assert not caplog.records


def test_what_maxtext_may_have_taken_otherwise_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A configuration beside the model that it names, or a base that isn't there; not a run's dump, nor other sizes."""
    file = tmp_path / "mine.yml"

    def said(text: str) -> str:
        caplog.clear()
        file.write_text(text)
        read_maxtext_config(str(file))
        return caplog.text

    other = "model_name: llama3-8b\nrope_max_timescale: 1234\n"
    assert "rope_max_timescale: 1234, not 500000; MaxText takes the model's where it is given" in said(other)
    assert read_maxtext_config(str(file)).config["rope_parameters"]["rope_theta"] == 1234
    assert "MaxText takes the model's, and so is done here" in said(f"{other}base_config: base.yml\n")
    assert read_maxtext_config(str(file)).config["rope_parameters"]["rope_theta"] == 500_000
    assert not said(
        "base_config: base.yml\nmodel_name: llama3-8b\nrope_type: yarn\nrope_factor: 4\nrope_interleave: false\n"
    )  # which only base.yml says
    assert "normalization_layer_epsilon: 1e-06, not 1e-05" in said(
        "model_name: llama3-8b\nnormalization_layer_epsilon: 1.e-6\n"
    )
    assert "its base_config, ours.yml, isn't there" in said(f"{other}base_config: ours.yml\n")
    assert not said(f"{other}override_model_config: true\n")
    assert not said(f"{other}base_config: src/maxtext/configs/base.yml\nbase_emb_dim: 64\n")
    assert not said(f"{other}override_model_config: false\nemb_dim: 4096\nbase_config: ours.yml\n")
    assert not said("model_name: llama3-8b\nattn_logits_soft_cap: None\nfinal_logits_soft_cap: none\n")


def test_rules_of_a_run_s_dump(tmp_path: Path) -> None:
    """Python's tuples, as MaxText wrote them."""
    dump = {"mesh_axes": ["fsdp"], "logical_axis_rules": (("embed", ("fsdp",)), ("heads", ()))}
    (tmp_path / "config.yml").write_text(yaml.dump(dump))
    assert sharding_rules(tmp_path / "config.yml", None) == (("embed", ("fsdp",)), ("heads", ()))


@pytest.mark.parametrize(
    ("scale", "sizes"), [(1, (8, 32, 128, 3)), (2, (16, 32, 256, 3)), (4, (16, 64, 256, 3)), (16, (32, 64, 512, 6))]
)
def test_a_scaled_model(scale: int, sizes: tuple[int, ...]) -> None:
    given = {"base_num_query_heads": 8, "base_emb_dim": 32, "base_mlp_dim": 128, "base_num_decoder_layers": 3}
    keys = full_keys(given | {"global_parameter_scale": scale})
    assert tuple(keys[key] for key in given) == sizes
    assert keys["base_moe_mlp_dim"] == -1  # none
