"""Every family that Weightbeam knows, and which one a checkpoint belongs to."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path

from weightbeam.model_mappings import entry_points
from weightbeam.model_mappings.config import Config
from weightbeam.model_mappings.families import (
    deepseek,
    deepseek_v4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_small,
    glm5,
    glm5_next,
    gpt_oss,
    hy3,
    identity,
    kimi_k3,
    llama,
    llama4,
    mixtral,
    olmo3,
    qwen,
    qwen3_5,
    qwen3_next,
    qwen3_omni,
    qwen3_vl,
)
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.meant import did_you_mean
from weightbeam.model_mappings.naming import ModelNameError, name_model
from weightbeam.model_mappings.trust import NAMED_BY_A_RECORD

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen.FAMILY,
    mixtral.FAMILY,
    deepseek.FAMILY,
    deepseek_v4.FAMILY,
    glm5.FAMILY,
    hy3.FAMILY,
    glm5_next.FAMILY,
    kimi_k3.FAMILY,
    olmo3.FAMILY,
    gpt_oss.FAMILY,
    llama4.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    gemma4_small.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    qwen3_vl.FAMILY,
    qwen3_omni.FAMILY,
)


# Models without a table, by `model_type`, and what they are. MaxText has DeepSeek V4.1's sizes in a branch
# (configs/models/deepseek4.1-flash.yml, b7c38e9).
REFUSED = {
    "deepseek_v41": "DeepSeek V4.1's layers share keys, values and indices, and look n-grams up in Engram tables; "
    "MaxText has only DeepSeek V4's, which do neither",
    "kimi_linear": "Kimi Linear's experts work in no latent and its gates have a low rank; "
    "MaxText's branch (4b27699) has Kimi K3's layers, which do otherwise",
}


class UnknownFamilyError(ValueError):
    """No table describes the checkpoint, or the MaxText model that was named is another one."""


@functools.cache
def families() -> tuple[Family, ...]:
    """The families of installed packages, by entry point, and ours; the former are asked first.

    Raises:
      UnknownFamilyError: what an entry point names can't be loaded, or isn't a family.
    """
    found = []
    for entry in entry_points.entries(entry_points.FAMILIES):
        try:
            family = entry_points.load(entry, "family")
        except entry_points.EntryPointError as e:
            raise UnknownFamilyError(str(e)) from e
        family = _checked(family, f"the entry point {entry.name!r}, {entry.value},")
        found.append(dataclasses.replace(family, code=" ".join(entry_points.version(entry))))
    return (*found, *FAMILIES)


def load_family(name: str) -> Family:
    """The family that `--family` names: one of ours, one of an installed package, or a file of Python whose `FAMILY` it
    is.

    Raises:
      UnknownFamilyError: there is none, the file can't be run, or a record alone names it.
    """
    if name.startswith(NAMED_BY_A_RECORD):
        file = name.removeprefix(NAMED_BY_A_RECORD)
        raise UnknownFamilyError(
            f"{file}: a record names this file as the table, and files are code of whoever wrote them: if you trust it, "
            f"--family={file} takes it"
        )
    known = {family.name: family for family in (identity.FAMILY, *reversed(families()))}
    if not name.endswith(".py"):
        if name not in known:
            near = did_you_mean(name, known)
            meant = f"{near} Known" if near else "; known"
            raise UnknownFamilyError(
                f"--family={name}: no such family{meant} are {', '.join(known)}, or name a file, FAMILY.py"
            )
        return known[name]
    if os.path.exists(name) and not os.path.isfile(name):  # a pipe would make us wait
        raise UnknownFamilyError(f"--family={name}: isn't a regular file")
    try:
        text = Path(name).read_bytes()
    except FileNotFoundError as e:
        raise UnknownFamilyError(f"--family={name}: no such file") from e
    except OSError as e:
        raise UnknownFamilyError(f"--family={name}: {e}") from e
    try:
        family = _checked(_run(text, name).get("FAMILY"), f"--family={name}: FAMILY")
        return dataclasses.replace(family, code=hashlib.sha256(text).hexdigest())
    except UnknownFamilyError:
        raise
    except (Exception, SystemExit) as e:
        raise UnknownFamilyError(f"--family={name}: {type(e).__name__} {e}") from e


def _run(text: bytes, name: str) -> Mapping[str, object]:
    """What a file of Python defines, as `runpy.run_path` runs it; the bytes are those that are hashed."""
    module = types.ModuleType("<run_path>")
    module.__file__ = name
    sys.modules[module.__name__] = module  # where a dataclass of its own looks for it
    try:
        exec(compile(text, name, "exec"), module.__dict__)
    finally:
        sys.modules.pop(module.__name__, None)
    return module.__dict__


def _checked(family: object, what: str) -> Family:
    if not isinstance(family, Family):
        raise UnknownFamilyError(
            f"{what} should be a weightbeam.model_mappings.family.Family, but is {type(family).__name__}"
        )
    return family


RENAMED = "and --family NAME takes what is one of these by another name"
PLAIN = "for plain JAX --family identity takes any (weightbeam help jax)"
DRAFTED = "for MaxText weightbeam new-family drafts a table (weightbeam help contributors_day)"


def shown(pattern: str) -> str:
    """A pattern of MaxText's model names as a person reads it."""
    return pattern.replace("[0-9]*", "*")


def supported() -> str:
    """The supported `model_type`s, for a message."""
    return "\n".join(f"  {family.name}: {', '.join(family.model_types)} ({family.releases})" for family in FAMILIES)


def family_by_config(config: Config) -> Family:
    """The family of a checkpoint by `model_type` alone, whatever its MaxText model.

    Raises:
      UnknownFamilyError: none is like that.
    """
    kind = config.get("model_type")
    family = next((family for family in families() if kind in family.model_types and family.fits(config)), None)
    if family is None:
        why = REFUSED.get(kind) if isinstance(kind, str) else None
        ways = f": {why}; {PLAIN}" if why else f"; {PLAIN}, {DRAFTED}, {RENAMED}"
        raise UnknownFamilyError(f"no table for model_type {kind!r} of config.json{ways}. Supported:\n{supported()}")
    return family


def family_of(config: Config, model: str | None = None, named: str | None = None) -> Family:
    """The family of a checkpoint, by `model_type`; `model` (MaxText's name) must agree and settles what that leaves
    open.

    Args:
      config: `config.json`.
      model: what `--maxtext_model` says.
      named: what `--family` says; it is taken whatever `config.json` says.

    Raises:
      UnknownFamilyError: says what was found and what is supported.
    """
    kind = config.get("model_type")
    family = load_family(named) if named else family_by_config(config)
    if model is not None and family.models and kind not in family.types_of(model):
        choices = [shown(pattern) for pattern, kinds in family.models.items() if kind in kinds]
        raise UnknownFamilyError(
            f"--maxtext_model={model} is not a MaxText model for model_type {kind!r} of config.json; its names look like {', '.join(choices)}"
        )
    try:
        name_model(family, config, model)
    except ModelNameError as e:
        raise UnknownFamilyError(str(e)) from e
    return family


def support_table() -> str:
    """What is converted of each family, as a Markdown table, for `docs/reference/families.md`."""
    rows = ["| family | releases | MaxText models | on request | not converted |", "|" + "---|" * 5]
    for family in FAMILIES:
        mtp, towers = "`--mtp`" if family.mtp else "", f"`--multimodal`: {family.towers}" if family.towers else ""
        requests = ", ".join(filter(None, [mtp, towers]))
        missing = ", ".join(filter(None, ["" if len(family.layouts) > 1 else "scanned layers", family.missing]))
        models = _code(map(shown, family.models))
        rows.append(f"| {family.name} | {family.releases} | {models} | {requests} | {missing} |")
    return "\n".join(rows)


def branches_table() -> str:
    """Where those of MaxText's models are that not both of its versions have, for `docs/reference/families.md`."""
    rows = ["| family | MaxText |", "|---|---|"]
    rows += [f"| {family.name} | {family.trees} |" for family in FAMILIES if family.trees != Family.trees]
    return "\n".join(rows)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
