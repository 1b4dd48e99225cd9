"""Which of MaxText's models a checkpoint is: named by its sizes, or by the user, who must not contradict them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.configuration import read_known
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.maxtext_models import SIZES, differences, keys_of, models, of_these_sizes, own_name
from weightbeam.model_mappings.meant import did_you_mean


class ModelNameError(ValueError):
    """The MaxText model that was named has other sizes, or `config.json` leaves open which one it is."""


@dataclasses.dataclass(frozen=True)
class ModelNaming:
    """The MaxText model of a checkpoint.

    Attributes:
      model: its name; None where no model has these sizes and none was named.
      sizes: the sizes in which the checkpoint differs from the model that was named: `{MaxText's key: the checkpoint's
        value}`.
    """

    model: str | None = None
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def name_model(family: Family, config: Config, named: str | None = None) -> ModelNaming:
    """The MaxText model of a checkpoint.

    Args:
      family: the checkpoint's.
      config: its `config.json`.
      named: what the user says, a name of the family's.

    Raises:
      ConfigError: what tells the family's models apart makes no sense.
      ModelNameError: `named` has other sizes, and they are those of another model; or several models fit that the table
        tells apart.
    """
    kind = config.get("model_type")
    family_models = [model for model in models() if kind in family.types_of(model)]
    keys = read_known(family.configuration.get(str(kind), ()), config)
    candidates = [model for model in family_models if family.is_model(config, model)]
    if named is not None:
        return _check(named, keys, of_these_sizes(keys, family_models))
    fitting = of_these_sizes(keys, candidates)
    variants: dict[object, list[str]] = {}
    for model in sorted(fitting) or candidates:
        variants.setdefault(family.variant(model), []).append(model)
    if len(variants) > 1:
        told = ((family.note(config, Layout(model=same[0])), ", ".join(same)) for same in variants.values())
        groups = (": ".join(filter(None, words)) for words in told)
        raise ModelNameError(
            f"config.json fits several MaxText models that differ; choose with --maxtext_model the one that the weights come from: {'; '.join(groups)}"
        )
    return ModelNaming(fitting[0] if fitting else None)


def check_made_for(family: Family, record: Mapping[str, Any], model: str | None, of: str) -> None:
    """Makes sure that a checkpoint's arrays are read as they were made: what the table takes from a model's name, such as
    the order of rotary halves, is a fact of the arrays.

    Args:
      family: whose table reads them.
      record: the checkpoint's own, with the model that it was made for; empty for a checkpoint of somebody else's.
      model: as which it is read.
      of: the checkpoint, for the message.

    Raises:
      ModelNameError: for that model the table would have made other arrays.
    """
    made = record.get("model")
    if record.get("family") != family.name or "model" not in record or not isinstance(made, str | None):
        return
    if family.variant(made or "") != family.variant(model or ""):
        unnamed = "a model that MaxText has no name for"
        raise ModelNameError(
            f"{of} was made for {made or unnamed}; read as {model or unnamed} its weights would lie in another order (of rotary "
            f"halves, for example). --maxtext_model, if anything, must name a model of the former kind, and so must that of an "
            "adapter and of the weights that it is merged into"
        )


def unknown_name(named: str | None) -> list[str]:
    """What is to be known of a name that none of MaxText's models has: a slip of the pen, or a model of the user's own."""
    if named is None or keys_of(named) is not None:
        return []
    meant = did_you_mean(named, models()) or "."
    return [
        f"--maxtext_model={named}: MaxText has no model of this name{meant} Only a file of your own can give it its sizes"
    ]


def _check(named: str, keys: Mapping[str, Any], fitting: list[str]) -> ModelNaming:
    if own_name(named) in fitting:
        return ModelNaming(named)
    sizes = {key: ours for key, (ours, _) in differences(keys, named, SIZES).items()}
    if fitting:
        theirs = ", ".join(f"{key} {ours}, not {said}" for key, (ours, said) in differences(keys, named, SIZES).items())
        raise ModelNameError(
            f"--maxtext_model={named}: config.json has the sizes of {' or '.join(fitting)}"
            + (f": {theirs}" if theirs else "")
        )
    return ModelNaming(named, sizes)
