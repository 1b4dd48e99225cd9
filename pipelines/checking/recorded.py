"""The options that a checkpoint or a release was made with, by its record, or else as its arrays show."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import tensorstore as ts

from weightbeam.formats.orbax import item_metadata
from weightbeam.formats.storage import Store
from weightbeam.formats.targets.published import RECORD, record_of
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.scales import CODES
from weightbeam.model_mappings.trees import has_scales, is_scanned
from weightbeam.model_mappings.versions import DEFAULT
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.transforms.planning.layouts import EMBEDDING, parts_of, version_of
from weightbeam.transforms.planning.options import ConvertOptions


def options_of_export(release: str | Store) -> dict[str, Any]:
    """The model, and the other options of a conversion back, with which a release was exported; empty where it wasn't."""
    record = record_of(release)
    made = record.get("options")
    if record.get("command") != "export" or not isinstance(made, dict):
        return {}
    said = {"maxtext_model": record.get("model"), **{name: made.get(name) for name in ("param_scan_axis", "family")}}
    said = {name: value for name, value in said.items() if value is not None}
    for name, value in said.items():
        if type(value) is not (int if name == "param_scan_axis" else str):
            raise Refused(f"{release}/{RECORD}: says {value!r} for --{name}, which can't be meant")
    return said | ({"multimodal": False} if made.get("multimodal") is False else {})  # the language model alone


def recorded_options(items: Store) -> dict[str, Any]:
    """The options that a checkpoint says it was made with; empty where it doesn't."""
    about = item_metadata(items).get("weightbeam")
    return dict(about["options"]) if isinstance(about, dict) and isinstance(about.get("options"), dict) else {}


def options_made_with(
    items: Store, stores: Mapping[str, ts.TensorStore], given: Mapping[str, Any], config: Mapping[str, Any]
) -> ConvertOptions:
    """The options that the checkpoint was made with: as given (where not None), else as it says, else as its arrays
    show; `config` is its release's.
    """
    custom, said = item_metadata(items), recorded_options(items)
    if has_scales(stores):
        said["save_dtype"] = CODES
    if "scan_layers" in custom:
        said["scan_layers"] = custom["scan_layers"]
    said.setdefault("scan_layers", is_scanned(stores))
    if "vocab_size" not in said and (embedding := stores.get(EMBEDDING)):
        said["vocab_size"] = embedding.shape[0]
    said = parts_of(stores) | said
    left_out = {"mesh", "sharding_rules", "unit_bytes", "compression", "use_ocdbt", "use_zarr3", "step", "virtual"}
    known = {field.name for field in dataclasses.fields(ConvertOptions)} - left_out
    said |= {key: value for key, value in given.items() if value is not None}
    options = ConvertOptions(**{key: value for key, value in said.items() if key in known})
    return options if "maxtext" in said else dataclasses.replace(options, maxtext=_version(options, stores, config))


def _version(options: ConvertOptions, keys: Collection[str], config: Mapping[str, Any]) -> str:
    """The version of MaxText whose arrays these are."""
    layout = Layout(scan=options.scan_layers, mtp=options.mtp, multimodal=options.multimodal)
    try:
        family = family_of(Config(config), options.maxtext_model, options.family)
        return version_of(family, Config(config), layout, keys)
    except (ConfigError, UnknownFamilyError):
        return DEFAULT  # the plan will say what is wrong
