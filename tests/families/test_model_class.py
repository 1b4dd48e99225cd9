"""Which class loads a release: what transformers' own Auto classes say of every model that it wrote for the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.models import CASES, MODELS
from lazily import lazily
from support import read_config

from weightbeam.formats.release.model_class import OWN_CODE, loading_code, model_class
from weightbeam.model_mappings.registry import FAMILIES
from weightbeam.pipelines.commands.releases import loading

configuration_auto = lazily("transformers.models.auto.configuration_auto")
transformers = lazily("transformers")


@pytest.mark.parametrize("model", [*(f"cases/{case}" for case in CASES), *(f"models/{model}" for model in MODELS)])
def test_the_class_is_the_one_that_wrote_it(generated: Path, model: str) -> None:
    """The Auto class, asked by transformers for the class of the folder's configuration."""
    folder = generated / model
    auto = getattr(transformers, model_class(config := read_config(folder)))
    found = auto._model_mapping[type(transformers.AutoConfig.from_pretrained(folder))]
    assert found.__name__ == config["architectures"][0]


def test_every_model_type_that_transformers_lacks_is_known() -> None:
    kinds = {kind for family in FAMILIES for kind in family.model_types}
    without_release = {"weaver_omni"}  # which MaxText names, and no release that is known
    assert kinds - configuration_auto.CONFIG_MAPPING_NAMES.keys() == {*OWN_CODE, *without_release}


def test_the_line() -> None:
    kimi = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert loading_code(kimi, "a b") == (
        "transformers.AutoModelForCausalLM.from_pretrained('a b', trust_remote_code=True)"
    )
    kimi = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"]}
    kimi |= {"auto_map": {"AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration"}}
    assert loading_code(kimi, "a") == "transformers.AutoModelForCausalLM.from_pretrained('a', trust_remote_code=True)"
    assert loading_code({}, "me/x", revision="ab").endswith(
        "AutoModelForCausalLM.from_pretrained('me/x', revision='ab')"
    )
    assert model_class({"architectures": ["BertForMaskedLM"]}) == "BertForMaskedLM"


def test_the_last_lines_wherever_it_lies() -> None:
    """In a folder, on the hub by its commit, and in a bucket, which transformers can't read."""
    said = [
        loading(folder, {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {}}, {})
        for folder in ("/a/x", "hf://me/x@abc", "gs://bucket/x")
    ]
    load = "transformers.AutoModelForImageTextToText.from_pretrained"
    assert said[0] == [f"load it:  {load}('/a/x')"]
    assert said[1] == [f"load it:  {load}('me/x', revision='abc')"]
    assert said[2] == ["load it:  gcloud storage cp -r gs://bucket/x .", f"          {load}('x')"]
