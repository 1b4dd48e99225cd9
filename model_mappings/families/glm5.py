"""GLM-5, 5.1 and 5.2: DeepSeek V3.2's tensors in other sizes; in 5.2 three of four layers choose no tokens of their own.

No release of MaxText has them: tree, layer and configuration are those of AI-Hypercomputer/maxtext, pull request 4832
(83a6fce), src/maxtext/models/glm5.py and configs/models/glm5.1-744b.yml, glm5.2-744b.yml, for which its model was built
abstractly; its trainer wasn't run. That the indexer's pairs lie side by side is a key of a later commit (09ca06a); the
earlier one refuses a configuration that has it, as any key that it doesn't know. Which layers have an indexer:
huggingface/transformers, v5.23.0, models/glm_moe_dsa/configuration_glm_moe_dsa.py. The layer for multi-token prediction
has one in any case (ROCm/ATOM, pull request 1362).
"""

import functools

from weightbeam.model_mappings.config import ConfigError
from weightbeam.model_mappings.configuration import copied, derived, fixed, only
from weightbeam.model_mappings.families import deepseek
from weightbeam.model_mappings.family import WITHOUT_HEAD, Family
from weightbeam.model_mappings.lines import architecture, eps, mlp_layer_types
from weightbeam.model_mappings.sparse_decoder import dense_prefix

KINDS = {"F": "full", "S": "shared"}  # an indexer of its own, or the choice of the last layer before it that has one


def indexer_types(c):
    """For each layer "full" or "shared"; transformers' rule where `config.json` doesn't list them."""
    n, types = c.size("num_hidden_layers"), c.get("indexer_types") or c.get("index_topk_pattern")
    if types is None:
        every, first = max(c.count("index_topk_freq"), 1), c.size("index_skip_topk_offset", 2)
        return ["full" if max(layer - first + 1, 0) % every == 0 else "shared" for layer in range(n)]
    types = [KINDS.get(kind, kind) if isinstance(kind, str) else None for kind in types] if isinstance(types, str | list) else []
    if len(types) != n or types[0] != "full" or not set(types) <= set(KINDS.values()):
        raise ConfigError(f"config.json: 'indexer_types' should be {n} of 'full' and 'shared', the first of them 'full'")
    return types


def stacks(c, layout, is_newest=True):
    full = {layer for layer, kind in enumerate(indexer_types(c)) if kind == "full"}
    return deepseek.decoder(c, layout, dense_prefix(c), full, is_newest)


def is_sharing(c):
    return "shared" in indexer_types(c)


def layers_of(keys):
    """The layers' kinds, of the pattern that MaxText repeats; None where each has an indexer."""
    if not keys.get("use_index_share"):
        return None
    n, pattern = keys["base_num_decoder_layers"], keys["index_share_pattern"]
    return [KINDS[kind] for kind in (pattern * n)[:n]]


LINES = (
    *deepseek.SIGMOID, *deepseek.GROUPS, *deepseek.INDEX, *architecture("glm5", "GlmMoeDsaForCausalLM", "glm_moe_dsa"), eps(1e-5),
    derived("first_num_dense_layers", lambda c, model: dense_prefix(c), "first_k_dense_replace"),
    derived("norm_topk_prob", lambda c, model: True, "norm_topk_prob"),
    derived("use_index_share", lambda c, model: is_sharing(c)),
    derived("index_share_pattern", lambda c, model: "".join(kind[0].upper() for kind in indexer_types(c)), when=is_sharing),
    copied("indexer_types", layers_of),
    copied("mlp_layer_types", mlp_layer_types),
    fixed("indexer_rope_interleave", True),
    only("indexer_rope_interleave", True, "in transformers' indexer pairs that lie side by side turn all the same, and so in MaxText's", default=True),
    deepseek.latent_eps(1e-5),
)  # fmt: skip

FAMILY = Family(
    name="glm5",
    models={"glm5.[0-9]*": ("glm_moe_dsa",)},
    dims=deepseek.dims,
    stacks=stacks,
    earlier={"e591f30": functools.partial(stacks, is_newest=False)},
    drops=deepseek.drops,
    copies=deepseek.copies,
    configuration={"glm_moe_dsa": LINES},
    mtp=True,
    aliases=WITHOUT_HEAD,
    releases="GLM-5, GLM-5.1, GLM-5.2",
    trees="pull request 4832 (83a6fce; keys of 09ca06a), built; its trainer *not run*",
    checked=("glm5.1-744b", "glm5.2-744b"),
    note=lambda c, layout: "arrays of MaxText's pull request 4832 (83a6fce), keys of a later commit of it (09ca06a): no release of MaxText has this model",
)
