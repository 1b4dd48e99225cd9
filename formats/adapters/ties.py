"""Which head is the embedding: one weight in memory under two names, of which the files hold one, or both.

The configuration decides, not the files: many releases store the head beside the embedding, with the same values.
transformers ties them then, and PEFT changes both in one (transformers, modeling_utils.py, `tie_weights`, 5.23.0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from weightbeam.model_mappings.audit import drop_reason
from weightbeam.model_mappings.blocks import text_part
from weightbeam.model_mappings.config import TIE, Config, Layout
from weightbeam.model_mappings.family import Family, Prediction

HEAD = "lm_head.weight"
# Last words of modules' names in models without a table (transformers, `_tied_weights_keys`, 5.23.0).
HEADS = frozenset({"lm_head", "embed_out", "output_projection", "proj_out"})
EMBEDDINGS = frozenset({
    "embed_tokens", "wte", "word_embeddings", "embed_in", "shared", "tok_embeddings", "tokens_embed", "embeddings",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ties:
    """The heads of a model that are its embedding.

    Attributes:
      heads: the embedding by the head, whether the files hold the head or not.
      perhaps: the same, where nothing says whether they are tied.
      unsure: heads and embeddings that are tied to others, and it isn't known which of them to which.
    """

    heads: Mapping[str, str] = dataclasses.field(default_factory=dict)
    perhaps: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsure: frozenset[str] = frozenset()


def find_ties(
    config: Config, names: Collection[str], family: Family | None = None, layout: Layout | None = None
) -> Ties:
    """Which heads are the embedding.

    Args:
      config: `config.json`.
      names: of the files' tensors, by the family's table, or as they are.
      family: whose table tells; None where there is no table.
      layout: that the table is asked for.

    Raises:
      ConfigError: what `config.json` says of it can't be meant, or the table lacks something.
    """
    if family is None:
        flag = None if text_part(config).get(TIE) is None else text_part(config).flag(TIE)
        return _by_names(names, flag)
    # transformers' model, which PEFT changes, has no prediction layers
    layout = dataclasses.replace(layout or Layout(), mtp=False)
    drops = family.drops(config, layout)
    heads = {
        head: embedding
        for head, embedding in family.copies(config, layout).items()
        if not isinstance(drop_reason(head, drops), Prediction) and not _in_a_layer(head)
    }
    return Ties(heads) if heads else _by_names(names, tied=False)


def _by_names(names: Collection[str], tied: bool | None) -> Ties:
    """By the tensors' names; `tied` is what the configuration says. Where the files have no head at all, it is the
    embedding.
    """
    heads, embeddings = _ending(names, HEADS), _ending(names, EMBEDDINGS)
    if heads and tied is False:
        return Ties()
    if len(heads) > 1 or len(embeddings) != 1:
        return Ties(unsure=frozenset(heads + embeddings)) if tied else Ties()
    pairs = dict.fromkeys(heads or [HEAD], embeddings[0])
    return Ties(perhaps=pairs) if heads and tied is None else Ties(pairs)


def _ending(names: Collection[str], words: Collection[str]) -> list[str]:
    """The weights outside of layers whose modules' names end in one of these words."""
    weights = (name for name in names if name.endswith(".weight") and not _in_a_layer(name))
    return [name for name in weights if name.split(".")[-2] in words]


def _in_a_layer(name: str) -> bool:
    """Whether a tensor is of a layer, as a prediction layer's copies of the embedding and the head are."""
    return any(part.isdigit() for part in name.split("."))
