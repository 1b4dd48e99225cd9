"""Kimi K2.5 and K2.6: Kimi K2's tree from a nested `config.json` and nested names, in every spelling.

The hub's names are those on the left of transformers' conversion (v5.23.0, conversion_mapping.py "kimi_k25").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import load_trees
from support import (
    BF16,
    assert_same_bits,
    call,
    converted,
    digests,
    given_arrays,
    read_config,
    read_file,
    read_tensors,
    reference,
    save,
    split,
    unfuse,
)

from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.plan import expand, make_arrays
from weightbeam.model_mappings.registry import family_of
from weightbeam.model_mappings.versions import UNSAID

TREES = {name: tree for name, tree in load_trees().items() if tree.model == "kimi-k2-1t"}
VISION = "vision tower, MaxText's Kimi K2 has none"
Tensors = dict[str, np.ndarray]


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of a text model as K2.5 has it."""
    return {
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "text_config": config,
        "vision_config": {"model_type": "kimi_k25_vision"},
    }


def hub_names(tensors: Tensors) -> Tensors:
    """What transformers saves, as the hub has it: its `save_pretrained` turns some names that it should leave alone."""
    changed = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
    made = {}
    for name, values in tensors.items():
        wrong = next((prefix for prefix in changed if name.startswith(prefix)), "")
        made[changed.get(wrong, "") + name.removeprefix(wrong)] = values
    return made


def state_of(generated: Path) -> Tensors:
    return read_file(generated / "models" / "kimi_k25.state.safetensors")


@pytest.mark.parametrize("name", TREES)
def test_table_makes_maxtexts_tree(name: str) -> None:
    """At full size: the paths, shapes and logical axes of kimi-k2-1t."""
    tree = TREES[name]
    config = Config(nested({"model_type": "kimi_k2"} | tree.config))
    layout = Layout(scan=tree.scan, vocab=tree.vocab, model=tree.model, maxtext=UNSAID)
    arrays = make_arrays(expand(family_of(config, tree.model), config, layout), {}, np.dtype("float32"))
    assert {array.key: (array.shape, array.logical_axes) for array in arrays} == {
        path.replace("/", "."): fact for path, fact in tree.arrays.items()
    }


def test_equals_numpy_on_the_state_dict(generated: Path, tmp_path: Path) -> None:
    """Every array of the model that transformers saved, against plain numpy on what it has in memory."""
    folder = generated / "models" / "kimi_k25"
    text = read_config(folder)["text_config"]
    state = {
        name.replace("model.language_model.", "model."): values
        for name, values in state_of(generated).items()
        if "model.language_model." in name or name == "lm_head.weight"
    }
    arrays = converted(
        folder, tmp_path / "out", "--maxtext_model", "kimi-k2-1t", "--mesh", "fsdp=4", "--unit_bytes", "60000"
    )
    assert_same_bits(arrays, reference(text, unfuse(text, state), BF16))


def test_every_spelling_gives_the_same_arrays(generated: Path, tmp_path: Path) -> None:
    """The hub's names, and those in memory, with fused experts."""
    folder = generated / "models" / "kimi_k25"
    config, tensors, wanted = read_config(folder), read_tensors(folder), converted(folder, tmp_path / "out")
    hub, memory = hub_names(tensors), state_of(generated)
    assert len(hub.keys() - tensors.keys()) > 60
    assert "model.language_model.layers.1.mlp.experts.gate_up_proj" in memory
    assert_same_bits(converted(save(tmp_path / "hub", config, *split(hub, 3)), tmp_path / "a"), wanted)
    assert_same_bits(converted(save(tmp_path / "memory", config, memory), tmp_path / "b"), wanted)


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
def test_wrapped_deepseek_gives_maxtexts_bits(generated: Path, tmp_path: Path, layout: str) -> None:
    """A DeepSeek V3 that MaxText's converter converted, wrapped as K2.5 is."""
    folder = generated / "cases" / "deepseek3"
    wrapped = {f"language_model.{name}": values for name, values in read_tensors(folder).items()}
    source = save(tmp_path / "hf", nested(read_config(folder) | {"model_type": "kimi_k2"}), wrapped)
    arrays = converted(
        source, tmp_path / "out", "--maxtext", "e591f30", "--scan_layers", str(layout == "scanned").lower()
    )
    assert digests(arrays) == given_arrays("deepseek3", layout)


def test_mtp_of_a_nested_model(generated: Path, tmp_path: Path) -> None:
    """A multi-token-prediction layer behind the last, as some have added to K2.5, converts as DeepSeek's does."""
    folder = generated / "cases" / "deepseek3-mtp-standalone"
    wrapped = {f"language_model.{name}": values for name, values in read_tensors(folder).items()}
    source = save(tmp_path / "hf", nested(read_config(folder)), wrapped)
    assert_same_bits(
        converted(source, tmp_path / "a", "--mtp", "true"), converted(folder, tmp_path / "b", "--mtp", "true")
    )


@pytest.mark.parametrize("spelling", ["saved", "hub", "memory"])
def test_the_vision_tower_is_left_out_with_a_reason(generated: Path, tmp_path: Path, spelling: str) -> None:
    """Tower and projector, and nothing of the text model, are dropped, in each spelling."""
    folder = generated / "models" / "kimi_k25"
    tensors = {
        "saved": read_tensors,
        "hub": lambda folder: hub_names(read_tensors(folder)),
        "memory": lambda _: state_of(generated),
    }[spelling](folder)
    source = save(tmp_path / "hf", read_config(folder), tensors)
    assert call("plan", "--source", source, "--json", tmp_path / "plan.json") == 0
    dropped = json.loads((tmp_path / "plan.json").read_text())["dropped"]
    assert set(dropped.values()) == {VISION}
    assert set(dropped) == {name for name in tensors if "vision_tower." in name or "mm_projector." in name}
    assert len(dropped) > 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(text_config=None), "'text_config' should be an object"),
        (dict(text_config={"model_type": "kimi_k2"}), "has no 'qk_nope_head_dim'"),
        (dict(tie_word_embeddings="no"), "'tie_word_embeddings' should be true or false"),
    ],
    ids=str,
)
def test_a_wrong_config_is_refused(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    """With the field that is wrong."""
    folder = generated / "models" / "kimi_k25"
    source = save(tmp_path / "hf", read_config(folder) | change, read_tensors(folder))
    assert call("convert", "--source", source, "--output", tmp_path / "out") == 2
    assert message in capsys.readouterr().err


def test_a_tied_head_is_said_outside_of_the_text_model(generated: Path, tmp_path: Path) -> None:
    """As transformers reads it; without `lm_head` a checkpoint that says it is untied is incomplete."""
    folder = generated / "models" / "kimi_k25"
    config, tensors = read_config(folder), read_tensors(folder)
    del tensors["language_model.lm_head.weight"]
    assert call("plan", "--source", save(tmp_path / "untied", config, tensors)) == 2
    arrays = converted(save(tmp_path / "tied", config | {"tie_word_embeddings": True}, tensors), tmp_path / "out")
    assert "decoder.logits_dense.kernel" not in arrays
