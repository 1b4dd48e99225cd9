"""A tree whose quantised weights stay codes: its arrays, and what MaxText must be told of them. Names and integers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.plan import Problem, key_of
from weightbeam.model_mappings.scales import ARRAY_SUFFIX, CODES, SCALES, BlockError, in_square, kept_parts

VERSION = "0.2.5"
MAPPED = frozenset(
    {"qwen3_5"}
)  # families whose FP8 releases MaxText has models for (src/maxtext/configs/models/*-fp8.yml)
# The modules that MaxText can be told to leave unquantised: those that it asks `get_weight_dtype` for
# (src/maxtext/common/common_types.py and models/qwen3.py, 0.2.5); `norm` stands for every norm.
UNQUANTIZED = (
    "token_embedder",
    "logits_dense",
    "gate",
    "shared_expert_gate",
    "conv1d",
    "in_proj_ba",
    "A_log",
    "dt_bias",
    "norm",
)
DECODER = "params/decoder/"
# Facts of 0.2.5 that messages say: `DType` in src/maxtext/configs/types.py, `DenseGeneral` in layers/linears.py, `RoutedMoE`
# in layers/moe.py, the recipes in layers/quantizations.py.
NO_CODES = (
    f"{CODES} alone is kept; MaxText {VERSION}'s weights are that, float8_e5m2 or unquantised (te_mxfp8 and te_nvfp4 quantise "
    "while it computes, and store nothing)"
)
NOT_SQUARE = (
    f"{CODES} is kept in square blocks only: of two sizes of a weight_block_size MaxText {VERSION} takes the first for all "
    "axes of a kernel that has heads"
)
ONE_SCALE = (
    f"{CODES} is kept in square blocks only; MaxText {VERSION} could hold one scale a matrix (weight_block_size: null), "
    "which isn't written"
)

Parts = Mapping[str, list[Part]]  # of each array, by its path
Blocks = Mapping[str, Sequence[int]]  # of each tensor that stays codes, the elements on each axis that share a scale


def keep_codes(parts: Parts, blocks: Blocks) -> tuple[dict[str, list[Part]], list[Problem]]:
    """The arrays of a table with the scales of each that is made of codes behind it, and what can't be kept so."""
    kept: dict[str, list[Part]] = {}
    problems: list[Problem] = []
    for path, same in parts.items():
        kept[path] = same
        coded = [name for part in same for name in part.tensors if name in blocks]
        if not coded:
            continue
        plain = [name for part in same for name in part.tensors if name not in blocks]
        try:
            if plain:
                raise BlockError(f"{coded[0]} is quantised, {plain[0]} isn't; MaxText has one array for them")
            pairs = [kept_parts(part, blocks[part.tensors[0]]) for part in same]
        except BlockError as e:
            problems.append(Problem("blocks", key_of(path), f"its weights can't stay {CODES}: {e}", is_array=True))
            continue
        kept[path], kept[path + ARRAY_SUFFIX] = ([pair[which] for pair in pairs] for which in (0, 1))
    return kept, problems


def keep_arrays(parts: Parts, sizes: Mapping[str, int]) -> tuple[dict[str, list[Part]], list[Problem]]:
    """`keep_codes` of a checkpoint whose arrays are there; `sizes` are those of a block, by the keys of the codes."""
    blocks = {
        name: in_square(len(part.window_shape), sizes[key_of(path)])
        for path, same in parts.items()
        if key_of(path) in sizes
        for part in same
        for name in part.tensors
    }
    return keep_codes(parts, blocks)


def block_size(codes: Sequence[int], scales: Sequence[int]) -> int:
    """Rows, and columns, of the blocks of an array of codes, by its shape and that of its scales."""
    return max((n // max(1, count) for n, count in zip(codes, scales, strict=False)), default=1)


def is_scale(key: str, keys: Iterable[str] | Mapping[str, Any]) -> bool:
    """Whether an array holds the scales of another one among `keys`, by its key."""
    return SCALES.search(key) is not None and key.removesuffix(ARRAY_SUFFIX) in keys


def modules_of(path: str) -> list[str]:
    """The modules among `UNQUANTIZED` that an array belongs to."""
    names = path.split("/")
    return [
        module
        for module in UNQUANTIZED
        if module in names or (module == "norm" and any("norm" in name for name in names))
    ]


def check_modules(parts: Parts, family: str) -> list[Problem]:
    """Where a release is quantised otherwise than MaxText's FP8 model of this family can be; `parts` as they are kept."""
    problems = []
    for path, same in parts.items():
        coded, modules = path + ARRAY_SUFFIX in parts, modules_of(path)
        if family not in MAPPED or not path.startswith(DECODER) or is_scale(path, parts) or same[0].rule.source is None:
            continue
        if coded and modules:
            message = f"is quantised; MaxText {VERSION}'s FP8 models compute with an unquantised {modules[0]}"
            problems.append(Problem("blocks", key_of(path), message, is_array=True))
        if not coded and not modules:
            message = f"isn't quantised; MaxText {VERSION}'s FP8 model has codes there, and can't be told otherwise"
            problems.append(Problem("blocks", key_of(path), message, is_array=True))
    return problems


def maxtext_keys(parts: Parts, size: int) -> dict[str, Any]:
    """What MaxText must be told of weights that stay codes, in blocks of this size."""
    found = {module for path in parts if path + ARRAY_SUFFIX not in parts for module in modules_of(path)}
    return {
        "weight_dtype": CODES,
        "weight_block_size": size,
        "unquantized_modules": [module for module in UNQUANTIZED if module in found],
    }


def why_without_codes(maxtext: str | None) -> str:
    """Why a version of MaxText has no place for codes; empty where it has, or where none is named."""
    if maxtext in (None, VERSION):
        return ""
    return (
        f"has no model with FP8 weights (its weight_dtype is bfloat16, float32 or float16); MaxText {VERSION} has, "
        "which is written without this option"
    )


def without_mapping(family: str) -> list[str]:
    """That MaxText has no model for such weights of a family, where it hasn't."""
    if family in MAPPED:
        return []
    return [
        f"MaxText {VERSION} has no mapping of {family} weights in FP8: codes and scales lie as in its models that have one "
        f"({', '.join(sorted(MAPPED))})"
    ]
