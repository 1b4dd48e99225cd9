"""Models of MaxText's branches at full size: every tensor of transformers' own model has its place in the plan."""

from __future__ import annotations

import json
import math
import re

import pytest
from facts import config_of, load_trees
from lazily import lazily
from support import headers_only

from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.transforms.planning.conversion_planner import prepare
from weightbeam.transforms.planning.options import Options

torch = lazily("torch")
transformers = lazily("transformers")
MODELS = {  # the class, and the tree whose config.json has the sizes; transformers' defaults where MaxText has no such file
    "gemma4-12b": ("Gemma4UnifiedForConditionalGeneration", "gemma4-12b--unscan"),
    "cosmos3-nano-reasoner": ("Cosmos3OmniForConditionalGeneration", "cosmos3-nano-reasoner--unscan"),
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
    kind, tree = MODELS[name]
    said = config_of(load_trees("e591f30")[tree]) if tree else {}
    config = getattr(transformers, kind).config_class(**said)
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    known = as_written({key: tuple(tensor.shape) for key, tensor in model.state_dict().items()})
    assert sum(map(math.prod, known.values())) > 8e9
    options = Options(scan_layers=False, maxtext_model=name, multimodal=name != "glm5.3-flash")
    plan = prepare(options, headers_only(json.loads(config.to_json_string(use_diff=False)), known=known)).plan
    assert not plan.problems, plan.problems[:5]
    assert sum(array.key.startswith(PARAMETERS) for array in plan.arrays) > 500
