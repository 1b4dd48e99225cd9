"""The table of formats, ours and those of installed packages; what belongs to a quantised model but to no weight; and
what is refused by its name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import numpy as np

from weightbeam.formats.encodings import bitsandbytes, fp4, fp8, gptq, packed
from weightbeam.formats.encodings.format import QuantizedFormat
from weightbeam.formats.encodings.quantization import AUTOROUND
from weightbeam.model_mappings import entry_points
from weightbeam.model_mappings.plan import Problem

FORMATS: tuple[QuantizedFormat, ...] = (
    *fp8.FORMATS,
    *fp4.FORMATS,
    *packed.FORMATS,
    *gptq.FORMATS,
    *bitsandbytes.FORMATS,
)

# By the endings of their names: scales of activations and of the KV cache. They hold for a serving engine's own 8-bit
# arithmetic; no weight needs them.
DROPPED = {
    "a scale of the activations": (
        ".input_scale", "_input_scale", ".input_global_scale", "_input_global_scale", ".input_zero_point", ".input_scale_ub",
        ".activation_scale", "_activation_scale", ".qscale_act",
    ),
    "a scale of the KV cache or of attention": (
        ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point",
        "q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale",
        "q_proj.output_zero_point", "k_proj.output_zero_point", "v_proj.output_zero_point",
    ),
}  # fmt: skip

# By `quant_method`: the field of `quantization_config` that names modules which aren't quantised.
KEPT_MODULES = {
    "fp8": "modules_to_not_convert", "mxfp4": "modules_to_not_convert", "awq": "modules_to_not_convert", "bitsandbytes": "llm_int8_skip_modules",
    "compressed-tensors": "ignore",
}  # fmt: skip

# `quant_method`s without an entry whose name says less than it could.
REFUSED_METHODS = {
    **dict.fromkeys(AUTOROUND, "AutoRound's own packing"),
    "bitnet": "BitNet",
    "fp_quant": "FP-Quant",
    "quark": "AMD Quark",
}

# compressed-tensors' `format`s that are read (`mixed-precision` has one for each group). Unknown ones might look like
# these: MXFP6 has the names and dtypes of MXFP4.
COMPRESSED_TENSORS = frozenset({
    "dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized", "mxfp8-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "pack-quantized",
})  # fmt: skip

# Endings of names that give a format away where `config.json` is silent.
REFUSED_NAMES = {
    "AQLM": (".codebooks",),
    "EETQ": (".weight_scales",),
    "FP-Quant": (".dqweight", ".forward_hadamard_matrix"),
    "HIGGS": (".tables2",),
    "HQQ": (".W_q",),
    "Quanto": (".weight._data", ".weight._scale", ".weight._shift"),
    "SpQR": (".dense_weights", ".row_offsets"),
    "VPTQ": (".centroids.weight", ".indices.weight"),
    "scaling the inputs of a weight (AWQ's pre_quant_scale)": (".pre_quant_scale", "_pre_quant_scale"),
    "torchao": ("_weight_qdata", ".weight_qdata", ".weight:_data"),
}


@dataclasses.dataclass(frozen=True)
class Known:
    """The formats that a checkpoint may have, and what follows from them.

    Attributes:
      formats: of installed packages, and ours.
      problems: what stands against those of installed packages; they aren't among the formats.
    """

    formats: tuple[QuantizedFormat, ...]
    problems: tuple[Problem, ...] = ()

    @functools.cached_property
    def methods(self) -> frozenset[str]:
        """The `quant_method`s with an entry."""
        return frozenset(method for entry in self.formats for method in entry.methods)

    @functools.cached_property
    def by_dtype(self) -> Mapping[np.dtype, tuple[QuantizedFormat, ...]]:
        """Those whose codes have a dtype."""
        found = frozenset().union(*(entry.dtypes for entry in self.formats))
        return {dtype: tuple(entry for entry in self.formats if dtype in entry.dtypes) for dtype in found}

    @functools.cached_property
    def scales(self) -> Mapping[str, bool]:
        """What the names of companions end in, and whether that alone tells them."""
        return {companion.suffix: companion.telling for entry in self.formats for companion in entry.companions}

    @functools.cached_property
    def orphans(self) -> tuple[str, ...]:
        """What the name of a scale without codes ends in."""
        return tuple(suffix if telling else f"weight{suffix}" for suffix, telling in self.scales.items())


@functools.cache
def known() -> Known:
    """All formats. A package's entry that can't be loaded, or that has the name of another one, is a problem."""
    found: list[QuantizedFormat] = []
    problems = []
    for entry in entry_points.entries(entry_points.ENCODINGS):
        where = f"{entry_points.ENCODINGS}: {entry.name}"
        try:
            found += _checked(entry_points.load(entry, "encoding"), {each.name for each in (*found, *FORMATS)})
        except entry_points.EntryPointError as e:
            problems.append(Problem("encoding", where, str(e)))
    return Known((*found, *FORMATS), tuple(problems))


def _checked(loaded: object, names: set[str]) -> list[QuantizedFormat]:
    """The formats that an entry point names, none of which may have one of these names. Raises EntryPointError where it names
    something else, or one of them does.
    """
    given = list(loaded) if isinstance(loaded, Iterable) else [loaded]
    formats = [each for each in given if isinstance(each, QuantizedFormat)]
    if not given or len(formats) != len(given):
        raise entry_points.EntryPointError(
            f"should be a weightbeam.formats.encodings.format.QuantizedFormat, or several, but is {loaded!r:.200}"
        )
    if taken := names & {each.name for each in formats}:
        raise entry_points.EntryPointError(
            f"there is a format {', '.join(sorted(taken))} already; give it a name of its own"
        )
    return formats


def support_table() -> str:
    """The formats as a Markdown table, for `docs/reference/formats.md`."""
    rows = ["| format | written by, or released as | `quant_method` |", "|---|---|---|"]
    for entry in FORMATS:
        rows.append(f"| {entry.name} | {entry.releases} | {', '.join(f'`{method}`' for method in entry.methods)} |")
    return "\n".join(rows)


def refused() -> str:
    """What is refused by its name, for `docs/reference/formats.md`."""
    return ", ".join(sorted({*REFUSED_METHODS.values(), *REFUSED_NAMES}, key=str.lower))
