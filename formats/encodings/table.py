"""The table of formats; what belongs to a quantised model but to no weight; and what is refused by its name."""

from __future__ import annotations

from weightbeam.formats.encodings import bitsandbytes, fp4, fp8, gptq, packed
from weightbeam.formats.encodings.format import QuantizedFormat

FORMATS: tuple[QuantizedFormat, ...] = (
    *fp8.FORMATS,
    *fp4.FORMATS,
    *packed.FORMATS,
    *gptq.FORMATS,
    *bitsandbytes.FORMATS,
)

METHODS = frozenset(method for entry in FORMATS for method in entry.methods)  # `quant_method`s with an entry

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

# `quant_method`s without an entry whose name says less than it could.
REFUSED_METHODS = {
    "auto-round": "AutoRound's own packing",
    "intel/auto-round": "AutoRound's own packing",
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


def support_table() -> str:
    """The formats as a Markdown table, for `docs/reference/formats.md`."""
    rows = ["| format | written by, or released as | `quant_method` |", "|---|---|---|"]
    for entry in FORMATS:
        rows.append(f"| {entry.name} | {entry.releases} | {', '.join(f'`{method}`' for method in entry.methods)} |")
    return "\n".join(rows)


def refused() -> str:
    """What is refused by its name, for `docs/reference/formats.md`."""
    return ", ".join(sorted({*REFUSED_METHODS.values(), *REFUSED_NAMES}, key=str.lower))
