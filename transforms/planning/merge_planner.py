"""The planner of merges, dequantisations and quantisations. Names and headers only."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.adapters import Adapter, Merging
from weightbeam.formats.adapters.merging import other_bases
from weightbeam.formats.adapters.modules import EXPERT
from weightbeam.formats.encodings import Encoding, Plain, quantizing
from weightbeam.formats.encodings.quantizing import experts_of
from weightbeam.formats.encodings.table import KEPT_MODULES
from weightbeam.formats.release.adapted import merge_release
from weightbeam.formats.release.source import ReleaseTensors, open_source, stored_tensors
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.model_mappings.ops import dtype_named
from weightbeam.model_mappings.plan import ArrayPlan, Problem, is_float
from weightbeam.transforms.cutting.files import Entry, plan_files
from weightbeam.transforms.cutting.quantizing import (
    Given,
    find_quantized,
    quantization_config,
    warn_of_codes,
    with_scales,
)
from weightbeam.transforms.cutting.row_blocks import row_units
from weightbeam.transforms.planning.exporting import dtype_of_model
from weightbeam.transforms.planning.merging import Merge
from weightbeam.transforms.planning.options import MergeOptions, options_from

# the weights of a module that vLLM joins into one tensor, beside experts (`packed_modules_mapping` of its models,
# vllm-project/vllm, vllm/model_executor/models)
JOINED = {
    name: together
    for together in (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("in_proj_qkv", "in_proj_z"),
        ("in_proj_b", "in_proj_a"),
    )
    for name in together
}


def load(inputs: Mapping[str, Any]) -> Merge:
    """The merge that `Merge.stage` staged."""
    adapters = [Adapter.from_json(adapter) for adapter in inputs["adapters"]]
    given = Given.of(HfCheckpoint.from_json(inputs["given"])) if inputs["given"] else None
    return plan_merge(
        options_from(MergeOptions, inputs["options"]),
        HfCheckpoint.from_json(inputs["source"]),
        adapters,
        given,
        inputs.get("slots"),
    )


def plan_merge(
    options: MergeOptions,
    checkpoint: HfCheckpoint,
    adapters: Sequence[Adapter],
    given: Given | None = None,
    slots: int | None = None,
) -> Merge:
    """Plans a merge. What stands against it is in `plan.problems`.

    Args:
      given: a release in FP8 that the quantised one is to be like.
      slots: units at a time that they are cut for, if that is known; see `blocks.target_bytes`.
    """
    source = open_source(checkpoint)
    merging = merge_release(checkpoint, source, adapters, options.family)
    touched = {name: merging.encodings[name] for name in merging.touched}
    if options.dequantize:
        touched = {name: encoding for name, encoding in source.encodings.items() if encoding.label} | touched
    touched = _with_neighbours(touched, source)
    decoded = dict.fromkeys(name for name in touched if source.encodings[name].label)  # in order, to go through it
    replaced = _replaced(options, checkpoint, source, decoded)
    quantization, why = _quantization(checkpoint, source, decoded)
    problems = (*_find_problems(options, checkpoint, source, adapters, merging, touched), *why)
    plan = ArrayPlan("identity", (), replaced, problems)
    made = Merge(options=options, source=checkpoint, adapters=tuple(adapters), plan=plan, merging=merging)
    if problems:
        return made
    encodings = _encodings(checkpoint, touched, decoded, replaced)
    entries = [
        Entry(name, _dtype(name, decoded, checkpoint, options.save_dtype), encoding.shape)
        for name, encoding in encodings.items()
    ]
    codes = find_quantized(entries, given) if options.quantize else frozenset()
    if options.quantize:
        if amiss := _without_codes(checkpoint, entries, codes, given):
            return dataclasses.replace(made, plan=ArrayPlan("identity", (), {}, tuple(amiss)))
        quantization = given.quantization_config if given else quantization_config(entries, codes)
    files = plan_files(with_scales(entries, codes), _files_of(checkpoint, encodings), options.max_shard_size)
    return dataclasses.replace(
        made,
        encodings=encodings,
        files=files,
        units=tuple(row_units(encodings, files, options.unit_bytes, codes, slots)),
        quantization=quantization,
        quantized=codes,
        given=given,
        warnings=(
            *checkpoint.notes,
            *other_bases(adapters, checkpoint.root),
            *files.warnings,
            *warn_of_codes(files.tensors, codes),
        ),
        slots=slots,
    )


def _with_neighbours(touched: Mapping[str, Encoding], source: ReleaseTensors) -> dict[str, Encoding]:
    """The same and, where a quantised one is among them, the other quantised ones that engines join with it into one
    tensor, which is of codes or of values: a layer's experts, or its q, k and v.
    """
    joined = {_joined_as(name) for name in touched if source.encodings[name].label} - {None}
    others = {
        name: encoding for name, encoding in source.encodings.items() if encoding.label and _joined_as(name) in joined
    }
    return {**others, **touched}


def _joined_as(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The module that a weight is in, and which of its weights engines join with it; None for what stays alone."""
    if experts := _experts_of(name):
        return experts, ()  # all of them
    module, _, own = name.removesuffix(".weight").rpartition(".")
    return (module, JOINED[own]) if own in JOINED else None


def _experts_of(name: str) -> str | None:
    """The module of experts that a weight of one expert, or of all of them, is in."""
    if expert := EXPERT.match(name):
        return expert["experts"]
    return experts_of(name)


def _replaced(
    options: MergeOptions, checkpoint: HfCheckpoint, source: ReleaseTensors, decoded: Iterable[str]
) -> dict[str, str]:
    """The release's tensors that aren't written, with the reason: codes and scales of weights that are written as their
    values; where all are, also what of the quantisation no weight needs.
    """
    return {
        **(source.dropped if options.dequantize else {}),
        **{
            tensor: f"codes or scales of {name}, which is written as its values"
            for name, tensors in stored_tensors(checkpoint, source, decoded).items()
            for tensor in sorted(tensors)
        },
    }


def _find_problems(
    options: MergeOptions,
    checkpoint: HfCheckpoint,
    source: ReleaseTensors,
    adapters: Sequence[Adapter],
    merging: Merging,
    touched: Collection[str],
) -> list[Problem]:
    """What stands against the inputs; that there is nothing to do, or that it is done already, only where nothing else
    does.
    """
    problems = [*checkpoint.problems, *source.problems, *(merging.problems if checkpoint.tensors else ())]
    if not (adapters or options.dequantize or options.quantize or options.cut):
        problems.append(Problem("option", "--lora", "names no adapter to merge"))
    if options.dequantize and not touched and not problems:
        message = "none of its tensors is quantised; there is nothing to dequantise"
        problems.append(Problem("quantised", checkpoint.root, message))
    if options.quantize and not problems:
        problems += _already_quantized(checkpoint, source)
    return problems


def _already_quantized(checkpoint: HfCheckpoint, source: ReleaseTensors) -> list[Problem]:
    """The formats that the release is quantised in."""
    labels = Counter(encoding.label for encoding in source.encodings.values() if encoding.label)
    message = "{:,} of its tensors are quantised already ({}); dequantise the release first"
    return [Problem("quantised", checkpoint.root, message.format(number, label)) for label, number in labels.items()]


def _encodings(
    checkpoint: HfCheckpoint, touched: Mapping[str, Encoding], decoded: Collection[str], replaced: Collection[str]
) -> dict[str, Encoding]:
    """How each tensor that is written is stored, in the release's order; a weight stands where its codes do, if the
    release has none of its name.
    """
    kept = (name for name in checkpoint.tensors if name not in replaced and name not in decoded)
    encodings = {name: touched[name] if name in touched else Plain(checkpoint.tensors[name]) for name in kept}
    encodings |= {name: touched[name] for name in decoded}
    place = {name: at for at, name in enumerate(checkpoint.tensors)}
    return dict(sorted(encodings.items(), key=lambda item: place.get(item[0], place.get(item[1].weight.name, -1))))


def _files_of(checkpoint: HfCheckpoint, encodings: Mapping[str, Encoding]) -> dict[str, str]:
    """The release's file that each tensor, or its codes, lie in."""
    files = {name: tensor.path.rpartition("/")[2] for name, tensor in checkpoint.tensors.items()}
    return {name: files.get(name) or files[encoding.weight.name] for name, encoding in encodings.items()}


def _dtype(name: str, decoded: Collection[str], checkpoint: HfCheckpoint, save_dtype: str | None) -> np.dtype:
    """What a tensor is written in: its own dtype, a quantised one in the one that was asked for, or in the model's."""
    if name not in decoded:
        return checkpoint.tensors[name].dtype
    return dtype_named(save_dtype or dtype_of_model(checkpoint.config) or "bfloat16")


def _without_codes(
    checkpoint: HfCheckpoint, entries: Sequence[Entry], codes: Collection[str], given: Given | None
) -> list[Problem]:
    """What stands against codes: there are none, or not those of a given release, or engines wouldn't read them so."""
    if given:
        amiss = [*given.problems, *given.missing(entries)]
    else:
        shapes = ((entry.name, entry.shape) for entry in entries if is_float(entry.dtype))
        amiss = [Problem("quantised", *each) for each in quantizing.why_not(checkpoint.config, shapes)]
    if not codes and not amiss:
        amiss = [Problem("quantised", checkpoint.root, "none of its tensors is a weight that is quantised")]
    return amiss


def _quantization(
    checkpoint: HfCheckpoint, source: ReleaseTensors, merged: Collection[str]
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """`quantization_config` once these quantised weights aren't any more, and what stands against it."""
    if not merged:
        return None, []
    if not any(encoding.label for name, encoding in source.encodings.items() if name not in merged):
        return {}, []
    found = checkpoint.config.get("quantization_config")
    said = found if isinstance(found, dict) else {}
    method = str(said.get("quant_method", "")).lower()
    if (field := KEPT_MODULES.get(method)) is None:
        message = f"is quantised ({method or 'without a quantization_config'}), and its format can't say that some of its weights aren't; dequantise it first"
        return None, [Problem("quantised", sorted(merged)[0], message)]
    kept = said.get(field)
    default = [] if isinstance(kept, list) else ["lm_head"]  # what transformers takes where the field is missing
    modules = [
        *(name.removesuffix(".weight") for name in sorted(merged)),
        *sorted({experts for name in merged if (experts := _experts_of(name))}),
    ]
    return {
        **said,
        field: [
            *(kept if isinstance(kept, list) else default),
            *(name for name in modules if name not in (kept or ())),
        ],
    }, []
