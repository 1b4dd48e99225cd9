"""Qwen 3 Omni: both towers compute what transformers' do, the thinker is Qwen 3 MoE, and what speaks is left out."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from families.qwen_towers import Arrays, check_audio, check_vision
from lazily import lazily
from support import assert_same_bits, call, converted, read_config, read_model, save

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families.qwen3_omni import FAMILY
from weightbeam.model_mappings.plan import expand

torch = lazily("torch")
transformers = lazily("transformers")

UNSCANNED, TOWERS = ("--scan_layers", "false"), ("--multimodal", "true")
SPEECH = "makes speech; MaxText has the thinker alone"


@pytest.fixture(scope="module")
def both(generated: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Arrays]:
    """transformers' thinker, and the converted arrays, in float32, of the files' bfloat16."""
    folder = generated / "models" / "qwen3_omni"
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.thinker.model, converted(
        folder, tmp_path_factory.mktemp("all"), *UNSCANNED, *TOWERS, "--save_dtype", "float32"
    )


@pytest.mark.usefixtures("no_grad")
def test_the_vision_towers_layers_compute_what_transformers_do(both: tuple[torch.nn.Module, Arrays]) -> None:
    thinker, arrays = both
    assert check_vision(thinker.visual, arrays, "Qwen3OmniMoe") == 1 + 3 * 6 + 2 + 1


@pytest.mark.usefixtures("no_grad")
def test_the_audio_towers_layers_compute_what_transformers_do(both: tuple[torch.nn.Module, Arrays]) -> None:
    """Convolutions, their projection, norms, attention, MLPs and the projector, one by one and together."""
    thinker, arrays = both
    assert check_audio(thinker.audio_tower, arrays) == 3 + 2 + 2 + 2 * 5


@pytest.mark.parametrize("vocab", [256, 300, 200])
def test_the_text_model_is_qwen_3_moes(generated: Path, tmp_path: Path, vocab: int) -> None:
    """The same arrays as from its tensors alone, spelled as Qwen 3 MoE's, of which MaxText's own bits are known; also
    padded and cut.
    """
    config, tensors, _ = read_model(generated, "qwen3_omni")
    alone = config["thinker_config"]["text_config"] | {"model_type": "qwen3_moe", "tie_word_embeddings": False}
    text = {
        re.sub(r"^thinker\.", "", name): values
        for name, values in tensors.items()
        if name.startswith(("thinker.model.", "thinker.lm_head."))
    }
    options = (*UNSCANNED, "--vocab_size", str(vocab))
    wanted = converted(save(tmp_path / "alone", alone, text), tmp_path / "wanted", *options)
    assert wanted["decoder.logits_dense.kernel"].shape == (64, vocab)
    assert_same_bits(converted(generated / "models" / "qwen3_omni", tmp_path / "made", *options), wanted)


def test_every_spelling_makes_the_same(generated: Path, tmp_path: Path) -> None:
    """The hub's names, those of transformers' memory, and a thinker saved alone, in either."""
    config, tensors, state = read_model(generated, "qwen3_omni")
    assert {
        "thinker.visual.merger.ln_q.bias",
        "thinker.model.layers.0.mlp.experts.4.up_proj.weight",
    } <= tensors.keys() - state.keys()
    assert {
        "thinker.model.visual.merger.ln_q.bias",
        "thinker.model.language_model.layers.0.mlp.experts.gate_up_proj",
    } <= state.keys() - tensors.keys()

    def alone(spelled: Arrays) -> dict[str, np.ndarray]:
        return {
            name.removeprefix("thinker."): values for name, values in spelled.items() if name.startswith("thinker.")
        }

    spellings = {"hub": (config, tensors), "memory": (config, state)}
    spellings |= {
        f"{name}-alone": (config["thinker_config"], alone(spelled)) for name, (_, spelled) in spellings.items()
    }
    made = {}
    for name, (settings, spelled) in spellings.items():
        made[name] = converted(save(tmp_path / name, settings, spelled), tmp_path / f"from_{name}", *UNSCANNED, *TOWERS)
        assert_same_bits(made[name], made["hub"])
    assert Counter(key.partition(".")[0] for key in made["hub"]) == dict(
        token_embedder=1, decoder=2 + 2 * 12, vision_encoder=69, audio_encoder=45
    )


@pytest.mark.parametrize("multimodal", [False, True])
def test_what_is_left_out_is_named(generated: Path, tmp_path: Path, multimodal: bool) -> None:
    _, tensors, _ = read_model(generated, "qwen3_omni")
    options = TOWERS if multimodal else ()
    assert (
        call(
            "plan",
            "--source",
            generated / "models" / "qwen3_omni",
            *UNSCANNED,
            *options,
            "--json",
            tmp_path / "plan.json",
        )
        == 0
    )
    reasons = {"talker.": SPEECH, "code2wav.": SPEECH}
    if not multimodal:
        reasons["thinker.visual."] = "vision tower, convert it with --multimodal true"
        reasons["thinker.audio_tower."] = "audio tower, convert it with --multimodal true"
    wanted = {name: reason for name in tensors for prefix, reason in reasons.items() if name.startswith(prefix)}
    assert set(wanted.values()) == set(reasons.values())
    assert json.loads((tmp_path / "plan.json").read_text())["dropped"] == wanted


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("text_config", dict(mlp_only_layers=[1]), "mixes dense and MoE layers"),
        (
            "vision_config",
            dict(deepstack_visual_indexes="0, 2"),
            "'deepstack_visual_indexes' should be a list of the tower's layers, but is '0, 2'",
        ),
        ("audio_config", dict(encoder_layers=0), "'encoder_layers' should be a positive integer, but is 0"),
        ("audio_config", dict(num_mel_bins=0), "'num_mel_bins' should be a positive integer, but is 0"),
    ],
)
def test_configs_that_maxtext_has_no_model_for(generated: Path, part: str, fields: dict, message: str) -> None:
    config, layout = read_config(generated / "models" / "qwen3_omni"), Layout(scan=False, multimodal=True)
    expand(FAMILY, Config(config), layout)
    thinker = config["thinker_config"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        expand(FAMILY, Config(config | {"thinker_config": thinker | {part: thinker[part] | fields}}), layout)


@pytest.mark.parametrize("broken", [{}, {"thinker_config": None}, {"thinker_config": {"text_config": []}}])
def test_a_config_without_a_text_model(broken: dict) -> None:
    with pytest.raises(ConfigError):
        expand(FAMILY, Config({"model_type": "qwen3_omni_moe"} | broken), Layout(scan=False))
