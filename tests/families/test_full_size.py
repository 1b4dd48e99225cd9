"""Models of MaxText's branches, and Weaver, at full size: every tensor of transformers' own model has its place in the plan."""

from __future__ import annotations

import json
import math
import re

import pytest
from facts import config_of, kimi_k3, load_trees
from lazily import lazily
from support import headers_only

from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

torch = lazily("torch")
transformers = lazily("transformers")
# the class, and the version and the tree whose config.json has the sizes; transformers' defaults where MaxText has no such file
COSMOS = "Cosmos3OmniForConditionalGeneration"
MODELS = {
    "gemma4-12b": ("Gemma4UnifiedForConditionalGeneration", ("e591f30", "gemma4-12b--unscan")),
    "cosmos3-nano-reasoner": (COSMOS, ("e591f30", "cosmos3-nano-reasoner--unscan")),
    "cosmos3-super-reasoner": (COSMOS, ("0.2.5", "weaver-max--unscan")),
    "weaver-mini": (COSMOS, ("0.2.5", "weaver-mini--unscan")),  # whose names MaxText's mapping of Weaver has, too
    "weaver-max": (COSMOS, ("0.2.5", "weaver-max--unscan")),
    "glm5.3-flash": ("Glm5NextForConditionalGeneration", None),
}


Shapes = dict[str, tuple[int, ...]]


def as_written(known: Shapes) -> Shapes:
    """GLM-5.3's tensors by the names of its files; in memory transformers has three convolutions in one."""
    written: Shapes = {}
    for name, shape in known.items():
        spelled = re.sub(r"\.(attn|ffn)_hc\.", r".hc_\1_", name.replace(".forget_gate.", "."))
        if name.endswith("self_attn.conv1d.weight"):
            parts = [spelled.replace(".conv1d.", f".{part}_conv1d.") for part in "qkv"]
            written |= dict.fromkeys(parts, (shape[0] // 3, *shape[1:]))
        else:
            written[spelled] = shape
    return written


@pytest.mark.parametrize("name", MODELS)
def test_a_release_at_full_size_is_planned_without_problems(name: str) -> None:
    """With its tower where MaxText has one; what is left out is said."""
    kind, place = MODELS[name]
    said = config_of(load_trees(place[0])[place[1]]) if place else {}
    config = getattr(transformers, kind).config_class(
        **{key: value for key, value in said.items() if key != "model_type"}
    )
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    known = as_written({key: tuple(tensor.shape) for key, tensor in model.state_dict().items()})
    assert sum(map(math.prod, known.values())) > 8e9
    options = ConvertOptions(scan_layers=False, maxtext_model=name, multimodal=name != "glm5.3-flash")
    written = json.loads(config.to_json_string(use_diff=False))
    if name.startswith("weaver"):  # transformers has no class of that kind
        written["model_type"] = "weaver_omni"
    plan = plan_conversion(options, headers_only(written, known=known)).plan
    assert not plan.problems, plan.problems[:5]
    assert sum(array.key.startswith(PARAMETERS) for array in plan.arrays) > 500


def test_kimi_k3_at_full_size_is_planned_without_problems() -> None:
    """2.8T parameters: as many tensors as MaxText's mapping of the release has, each with its place."""
    known = kimi_k3.shapes_of(kimi_k3.TEXT)
    assert len(known) == kimi_k3.TENSORS
    assert 2.7e12 < sum(map(math.prod, known.values())) < 2.8e12
    plan = plan_conversion(
        ConvertOptions(scan_layers=False), headers_only(kimi_k3.config_of(kimi_k3.TEXT), known=known)
    ).plan
    assert not plan.problems, plan.problems[:5]
    arrays = {array.key.removeprefix(PARAMETERS): array.shape for array in plan.arrays}
    assert len(arrays) == 5 + 93 * 6 + 69 * 14 + 24 * 8 + 3 + 92 * 11
    assert arrays["decoder.layers_91.mlp.routed_experts.wi_0"] == (896, 3584, 3072)
    assert arrays["decoder.layers_92.self_attention.g_proj.kernel"] == (7168, 96, 128)
    assert arrays["decoder.layers_90.self_attention.A_log"] == (96,)
