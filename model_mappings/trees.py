"""Trees: how the weights of a checkpoint are called, whoever wrote it, and which of its arrays they are.

MaxText's trainer, its converters, its tools and Tunix write the same weights below different names. Here they get one:
`params.params.decoder.…`, that of MaxText's own parameter checkpoints. Everything else (the optimizer, random
generators, counters) is the state around them. (AI-Hypercomputer/maxtext, src/maxtext/common/checkpointing.py and
train_state_nnx.py, e591f30; Tunix's PeftTrainer.)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping

from weightbeam.model_mappings.plan import PARAMETERS, PREFIX
from weightbeam.model_mappings.scales import ARRAY_SUFFIX, SCALES

Path = tuple[str, ...]

VALUE = "value"  # the leaf of an nnx variable
COUNTER = "step"  # which checkpoints of weights alone have, too
STATE = (
    "opt_state",
    "optimizer",
    "optimizer_state",
    "nnx_aux",
    COUNTER,
    "iter",
    "accumulated_metrics",
    "accumulated_grads",
)
# beside them `params`, the global weights, has no axis of replicas (trainers/diloco/diloco.py)
DILOCO = {"inner_state", "outer_opt_state"}
# MaxText's NNX variables that are weights and no parameters, by the end of their paths; a training state holds them
# beside its parameters, below `nnx_aux.model` (src/maxtext/layers/moe.py, common/checkpointing.py, 0.2.5)
MODULES = ("nnx_aux", "model")
VARIABLES = {("gate", "bias"): "MoEBiasVar", ("tid2eid",): "Tid2EidVar"}
PARTS = {"decoder", "token_embedder", "vision_encoder", "audio_encoder", "mtp_block"}  # of MaxText's models
# What training in FP8 keeps for each kernel, of bfloat16 or float32: the largest magnitudes of the last steps, and the scales
# that follow from them (google/flax, flax/linen/fp8_ops.py, 0.12.12; `quantization=fp8` in MaxText)
MAGNITUDES, OVERWRITTEN = "_amax_history", "_overwrite_with_gradient"
GENERATORS = re.compile(r"(^|\.)(rngs|to_nnx__rngs)(\.|$)")
FACTOR = re.compile(r"(?P<kernel>.+)_lora_(?P<side>[ab])")  # a kernel's, of an adapter

PIPELINE = (
    "a checkpoint of pipeline parallelism, whose layers are stacked by stages (pipeline_module); take one of a run whose "
    "ici_pipeline_parallelism and dcn_pipeline_parallelism are 1"
)


class TreeError(ValueError):
    """A tree whose weights can't be taken; the message names its kind and what to do."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """The arrays of a checkpoint, sorted.

    Attributes:
      kind: what wrote it, in a few words.
      weights: MaxText's key of each weight -> its key in the checkpoint.
      state: the keys of all other arrays.
      scales: of each weight that is FP8 codes, MaxText's key of its scales, which are among the weights.
    """

    kind: str
    weights: Mapping[str, str]
    state: tuple[str, ...]
    scales: Mapping[str, str] = dataclasses.field(default_factory=dict)


def recognize(paths: Iterable[Path]) -> Tree:
    """Finds the weights among the paths of a checkpoint's arrays.

    Raises:
      TreeError: there are none, or a kind of tree whose weights aren't plain arrays.
    """
    paths = list(paths)
    _refuse(paths)
    tops = {path[0] for path in paths if path}
    kind, prefix = _kind(paths, tops)
    of_fp8 = _of_fp8_training(paths)
    numbers_lists = _is_of_maxtext(paths, prefix)
    weights: dict[str, str] = {}
    state: list[str] = []
    for path in paths:
        key = ".".join(path)
        if collection := _collection(path):
            named = ".".join([PREFIX, collection, *_folded(path[len(MODULES) :], numbers_lists)])
            state += [weights[named]] if named in weights else []
            weights[named] = key
            continue
        inner = path[len(prefix) :] if path[: len(prefix)] == prefix else ()
        if not inner or (not prefix and path[0] in STATE) or path in of_fp8 or GENERATORS.search(key):
            state.append(key)
            continue
        named = _named(inner, prefix == (PREFIX,), numbers_lists)
        if path[:1] != MODULES[:1] and weights.get(named, "").startswith(f"{MODULES[0]}."):
            state.append(key)  # what training began with, not the newest
            continue
        if named in weights:
            raise TreeError(f"two arrays are {named}: {weights[named]} and {key}")
        weights[named] = key
    if not weights:
        raise TreeError(
            f"no weights among its {len(paths)} arrays, such as {'.'.join(paths[0])}" if paths else "no arrays"
        )
    scales = _scales(weights)
    if scales:
        kind = f"{kind}, FP8 codes with scales beside them"
    elif is_lora(weights):
        kind = f"{kind}, the factors of a LoRA alone"
    return Tree(kind, weights, tuple(state), scales)


def is_lora(weights: Collection[str]) -> bool:
    """Whether weights, by their names, are the factors of a LoRA and nothing else."""
    return bool(weights) and all(FACTOR.fullmatch(name) for name in weights)


def _of_fp8_training(paths: Iterable[Path]) -> set[Path]:
    """The arrays that training in FP8 keeps beside its weights; they are none, though some are called `kernel_scale`."""
    folders = {path: _bare(path)[:-1] for path in paths if path}
    kept = {folder for path, folder in folders.items() if _bare(path)[-1].endswith(MAGNITUDES)}
    return {path for path, folder in folders.items() if folder in kept or OVERWRITTEN in path}


def _bare(path: Path) -> Path:
    """A path without nnx's last component."""
    return path[:-1] if path[-1] == VALUE and len(path) > 1 else path


def _scales(weights: Mapping[str, str]) -> dict[str, str]:
    """Of each weight that is codes, MaxText's key of its scales (`model_mappings/scales.py`). Raises TreeError: scales
    without the weight that they belong to.
    """
    scaled = {key.removesuffix(ARRAY_SUFFIX): key for key in weights if SCALES.search(key)}
    if alone := next((key for codes, key in scaled.items() if codes not in weights), None):
        raise TreeError(f"FP8 scales, {weights[alone]}, without the codes that they belong to")
    return scaled


def twins(key: str) -> set[str]:
    """The keys that a weight may have besides, as a parameter or as a variable: where a table makes both, they are the
    same values, and a program asks for one.
    """
    _, collection, rest = [*key.split(".", 2), "", ""][:3]
    return {f"{PREFIX}.{other}.{rest}" for other in ("params", *VARIABLES.values()) if other != collection}


def has_scales(keys: Iterable[str]) -> bool:
    """Whether weights of these keys are FP8 codes, with scales beside them."""
    return any(SCALES.search(key) for key in keys)


def is_state(key: str) -> bool:
    """Whether an array is a training state's, and no weight: the optimizer's, a counter, a random generator."""
    return key.partition(".")[0] in (*STATE, *DILOCO) or GENERATORS.search(key) is not None


def _kind(paths: list[Path], tops: set[str]) -> tuple[str, Path]:
    """What wrote a tree, and the components in front of its weights."""
    values = all(
        path[-1:] == (VALUE,)
        for path in paths
        if path and path[0] not in STATE and not GENERATORS.search(".".join(path))
    )
    if PREFIX in tops and tops & DILOCO:
        return "the global weights of a DiLoCo state", (PREFIX,)
    if PREFIX in tops:
        trained = "a training state" if tops & {"opt_state", "nnx_aux"} else "parameters"
        return (f"{trained}, each leaf an nnx variable" if values else trained), (PREFIX,)
    if "base" in tops:
        return "an RL wrapper's nnx model", ("base",)
    if "model" in tops:
        return "an nnx training state", ("model",)
    if "model_params" in tops:
        return "a training engine's nnx model", ("model_params",)
    return ("an nnx model" if values else "a bare tree of parameters"), ()


def _is_of_maxtext(paths: Iterable[Path], prefix: Path) -> bool:
    """Whether the weights are of a model of MaxText's; those of `--family identity` keep their names, of which some begin
    as MaxText's do (T5's `decoder.block.0`, beside `shared` and `encoder`).
    """
    heads = {
        path[len(prefix) :][:2]
        for path in paths
        if path[: len(prefix)] == prefix and path[0] not in STATE and not GENERATORS.search(".".join(path))
    }
    return any("token_embedder" in head for head in heads) or not any(PARTS.isdisjoint(head) for head in heads)


def _named(path: Path, below_params: bool, numbers_lists: bool) -> str:
    """MaxText's key of a weight: `decoder.layers.0.mlp.wi_0.kernel.value` ->
    `params.params.decoder.layers_0.mlp.wi_0.kernel`.
    """
    is_collection = below_params and PARTS.isdisjoint(path[:1])
    folded = _folded(path, numbers_lists)
    return ".".join([PREFIX, *folded]) if is_collection else PARAMETERS + ".".join(folded)


def _collection(path: Path) -> str | None:
    """The collection of a weight that a training state holds with the state of its modules; None for all else."""
    if path[: len(MODULES)] != MODULES:
        return None
    path = _bare(path)
    return next((name for end, name in VARIABLES.items() if path[-len(end) :] == end), None)


def _folded(path: Path, numbers_lists: bool) -> list[str]:
    """The components of a weight's key: those of a path without nnx's own, elements of an nnx.List numbered."""
    path = _bare(path)
    numbers_lists = numbers_lists and not PARTS.isdisjoint(path[:2])
    folded: list[str] = []
    for component in path:
        if component.isdecimal() and folded and numbers_lists:
            folded[-1] += f"_{component}"
        else:
            folded.append(component)
    return folded


def _refuse(paths: list[Path]) -> None:
    """Refuses the kinds of trees that hold no plain weights."""
    components = {component for path in paths for component in path}
    tops = {path[0] for path in paths if path}

    def has(*names: str) -> bool:
        return bool(components.intersection(names))

    if tops & DILOCO and PREFIX not in tops:
        raise TreeError(
            "a DiLoCo state without the global weights (params), whose replicas have an axis in front; save the parameters of one first"
        )
    # training with quantised arithmetic keeps its weights whole, and leaves random states alone where these would be
    kept = {component for path in paths if not GENERATORS.search(".".join(path)) for component in path}
    if "aqt" in tops or has("qrhs") or any(component.startswith("AqtDotGeneral") for component in kept):
        raise TreeError(
            "an AQT checkpoint for serving: its quantised kernels aren't weights any more; take the checkpoint it was made of"
        )
    if has("qvalue"):
        raise TreeError(
            "a Qwix QLoRA base, whose kernels are quantised (array.qvalue); take the checkpoint it was made of"
        )
    if has("pipeline_module"):
        raise TreeError(PIPELINE)
    if any(component.endswith("_packed") for component in components):
        raise TreeError(
            "MXFP4 experts (…_packed beside …_scale), which MaxText keeps in a layout of its own; take the release it was made of"
        )
    if tops == {"checkpoint"}:
        raise TreeError("an old MaxText checkpoint (msgpack); save it anew with a MaxText that reads it")


def is_scanned(weights: Iterable[str]) -> bool:
    """Whether the layers of a kind are stacked, by the names: `layers.`, not `layers_0.`; DeepSeek V4 has
    `scanned_blocks.` behind layers of their own.
    """
    weights = list(weights)
    return any(".scanned_blocks." in key for key in weights) or not any(
        re.search(r"\.(dense_|moe_)?layers_\d+\.", key.replace("layers.layers_", "layers.place_"))
        for key in weights
        if "remainder" not in key
    )
