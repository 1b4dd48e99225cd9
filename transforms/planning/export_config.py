"""What an export changes in the release's `config.json`, and what it says of parts that stay out of the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from weightbeam.formats.encodings.quantization import Quantization
from weightbeam.formats.orbax.source import OrbaxCheckpoint
from weightbeam.model_mappings.config import NEXTN, TEXT_SECTIONS, Config
from weightbeam.model_mappings.configuration import lookup
from weightbeam.model_mappings.family import Family, Prediction, Tower, Variable
from weightbeam.model_mappings.plan import Problem, expand, key_of
from weightbeam.transforms.cutting.quantizing import quantization_config
from weightbeam.transforms.planning.export_state import (
    ExportDrops,
    ExportFit,
    ExportTable,
    ExportTensors,
    ExportView,
    ExportWritten,
    made_of,
)
from weightbeam.transforms.planning.exporting import Like
from weightbeam.transforms.planning.layouts import EMBEDDING
from weightbeam.transforms.planning.options import CODED
from weightbeam.transforms.planning.text_model import has_towers, text_class


def config_edits(
    table: ExportTable, fit: ExportFit, drops: ExportDrops, tensors: ExportTensors, like: Like
) -> dict[str, Any]:
    """What `config.json` has to say otherwise: rows of a cut vocabulary, prediction layers and towers that aren't there,
    the class of the language model alone.
    """
    nested = table.config.get("text_config")
    text = nested if isinstance(nested, dict) else table.config
    edits = _vocabulary(text, fit, tensors)
    if _lacks_predictions(drops, tensors):
        edits |= {field: 0 for field in NEXTN if text.get(field)}
    edits |= _without_towers(table.config, drops, tensors)
    if table.form is not like:
        edits |= {field: table.form.config[field] for field in ("architectures", "model_type")}
    return edits


def _vocabulary(text: Mapping[str, Any], fit: ExportFit, tensors: ExportTensors) -> dict[str, Any]:
    """The size of the vocabulary, where the checkpoint has another."""
    rows = {tensors.made[name].shape[0] for name in made_of(array for array in fit.arrays if array.key == EMBEDDING)}
    if len(rows) == 1 and (count := rows.pop()) != text.get("vocab_size", count):
        return {"vocab_size": count}
    return {}


def _lacks_predictions(drops: ExportDrops, tensors: ExportTensors) -> bool:
    """Whether the table leaves prediction layers out, and they aren't taken from the release."""
    left_out, taken = (
        any(isinstance(reason, Prediction) for reason in reasons.values()) for reasons in (drops.reasons, tensors.taken)
    )
    return left_out and not taken


def _without_towers(config: Config, drops: ExportDrops, tensors: ExportTensors) -> dict[str, Any]:
    """The fields by which a model is made without the towers that the table leaves out, and that aren't taken from the
    release.
    """
    there = [reason.absent for reason in tensors.taken.values() if isinstance(reason, Tower)]
    return {
        field: value
        for tower in drops.reasons.values()
        if isinstance(tower, Tower) and tower.absent not in there
        for field, value in tower.absent.items()
        if not _is_absent(config, field, value)
    }


def _is_absent(config: Mapping[str, Any], field: str, value: Any) -> bool:
    """Whether `config.json` says already that a part isn't there; a dot of the field leads into a section.

    A section that is null, or isn't there, describes nothing; but a flag that isn't there is true.
    """
    *sections, name = field.split(".")
    for section in sections:
        config = config.get(section) or {}
        if not config:
            return True
    return not config.get(name) if value is None else config.get(name, True) == value


def quantization_of(written: ExportWritten, view: ExportView, like: Like) -> dict[str, Any]:
    """`quantization_config` as it will be; empty where nothing is quantised."""
    if view.kept:
        plain = [entry for entry in written.entries if entry.dtype.name != CODED]
        block = max(max(scaled.block) for scaled in view.scaled.values())
        made = quantization_config([*plain, *written.taken], frozenset()) | {"weight_block_size": [block, block]}
        return dict(Quantization.of(like.config).fields) or made
    if not written.quantized:
        return {}
    if like.given:
        return like.given.quantization_config
    return quantization_config([*written.entries, *written.taken], written.quantized)


def warn_of_towers(dropped: Mapping[str, str], like: Like, family: Family) -> Iterator[str]:
    """Towers that stay out: those that `config.json` goes on to describe, since no field of it can take them back, and
    others.
    """
    towers = [reason for reason in dropped.values() if isinstance(reason, Tower)]
    config = Config(like.config)
    ways = ["--like RELEASE takes them from the release"]
    if has_towers(family, config) and text_class(config, family):
        ways.append("--multimodal false writes the language model alone")
    of, hint = like.root or "the release", ", ".join(ways)
    if described := sum(not tower.absent for tower in towers):
        yield (
            f"config.json describes towers that the checkpoint doesn't hold ({described:,} tensors of {of}), "
            f"so loaders miss them: {hint}"
        )
    if fields := dict.fromkeys(field for tower in towers for field in tower.absent):
        yield (
            f"parts that the checkpoint doesn't hold stay out ({len(towers) - described:,} tensors of {of}), and config.json says so "
            f"({', '.join(fields)}): {hint}"
        )


def lost_rows(source: OrbaxCheckpoint, table: ExportTable) -> Iterator[Problem]:
    """Rows of tokens that the checkpoint's record knows, and the release hasn't: they are no padding."""
    known, wanted = _recorded_tokens(source), _tokens_of(table.config)
    if known is not None and wanted is not None and known > wanted:
        message = (
            f"has {wanted:,} tokens, and the checkpoint's model {known:,}, by its record: {known - wanted:,} rows of the "
            "vocabulary would be lost; a folder with that model's own config.json and tokenizer will do"
        )
        yield Problem("like", table.form.root or "config.json", message)


def warn_of_rows(source: OrbaxCheckpoint, table: ExportTable, fit: ExportFit) -> Iterator[str]:
    """Rows that may be padding, or tokens: neither a record tells, nor are they MaxText's own padding of the family."""
    held, wanted = _held_rows(source), _tokens_of(table.config)
    if _recorded_tokens(source) is None and wanted is not None and held > wanted:
        usual = expand(table.family, table.config, dataclasses.replace(fit.layout, vocab=None))
        if any(key_of(path) == EMBEDDING and parts[0].shape[0] == held for path, parts in usual.items()):
            return
        yield (
            f"{held - wanted:,} rows of the vocabulary are left out as padding, behind the {wanted:,} of "
            f"{table.form.root or 'config.json'}; if tokens were added, name a release that has them (--like)"
        )


def _recorded_tokens(source: OrbaxCheckpoint) -> int | None:
    """How many tokens the model of a checkpoint has, by its record, of those that are in it; None where that says none."""
    before = source.record.get("config")
    said = _tokens_of(before) if isinstance(before, Mapping) else None
    return None if said is None else min(said, _held_rows(source))


def _tokens_of(config: Mapping[str, Any]) -> int | None:
    """How many tokens the language model of a `config.json` has; None where it doesn't say it."""
    said = (lookup(config, ".".join((*section, "vocab_size"))) for section in reversed(TEXT_SECTIONS))
    return next((tokens for tokens in said if type(tokens) is int), None)


def _held_rows(source: OrbaxCheckpoint) -> int:
    """How many rows of the vocabulary a checkpoint has."""
    return source.weights[EMBEDDING].shape[0] if EMBEDDING in source.weights else 0


def warn_of_variables(table: ExportTable, tensors: ExportTensors) -> Iterator[str]:
    """What training may have changed, and the checkpoint doesn't hold: taken from the release, or missed by loaders."""
    taken, missed = (
        [name for name, reason in reasons.items() if isinstance(reason, Variable)]
        for reasons in (tensors.taken, tensors.dropped)
    )
    if taken:
        yield (
            f"{len(taken):,} tensors that the checkpoint doesn't hold are those of {table.form.root}, as before any training: "
            f"no parameters in MaxText, such as {taken[0]}"
        )
    if missed:
        yield (
            f"left out, and missed by loaders: {len(missed):,} of the tensors of {table.form.root or 'the release'}, no parameters in "
            f"MaxText, such as {missed[0]}; --like RELEASE takes them from the release"
        )
