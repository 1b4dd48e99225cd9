"""What a cut does to `config.json`: sizes, values by layer, names of layers. Objects in, edits out.

Only fields that are known are edited (transformers v5.23.0, the configuration classes, and what releases of the hub say).
A list that may be one of a value per layer, and isn't known, is a problem: it is neither cut nor left by a guess.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weightbeam.model_mappings.anatomy import LAYERS
from weightbeam.model_mappings.config import NEXTN, QUANTIZATIONS, text_parts
from weightbeam.model_mappings.expert_groups import expert_groups, why_not_in_groups
from weightbeam.model_mappings.family import rename
from weightbeam.model_mappings.left_out import left_out

Path = tuple[str, ...]

VALUES = {  # a value, or a letter, per layer; those behind the last layer's are prediction layers'
    "layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta", "compress_ratios", "swiglu_limits",
    "swiglu_limits_shared", "activation_sparsity_pattern", "moe_layer_freq", "intermediate_size",
    "hybrid_override_pattern", "attn_type_list", "num_attention_heads_per_layer", "rope_theta", "partial_rotary_factors",
}  # fmt: skip
NUMBERS = {  # lists of layers, or texts such as "3,4,5"
    "mlp_only_layers", "moe_layers", "moe_layers_enum", "cross_attention_layers", "hybrid_layer_ids", "attn_layer_indices", "full_attn_idxs",
    "local_layer_ids",
}  # fmt: skip
FROM_ONE = {"full_attn_layers", "kda_layers", "ple_layer_ids"}  # likewise; the first layer is 1
FIRST = {  # how many of the first
    "first_k_dense_replace", "num_hash_layers", "max_window_layers", "num_dense_layers", "moe_layer_start_index",
}  # fmt: skip
SHARED = {
    "indexer_types",
    "index_topk_pattern",
}  # for each layer "full", or "shared": it takes what the last full one chose
LAST = {"num_kv_shared_layers"}  # how many of the last
EVERY = {  # every how many
    "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "moe_layer_interval", "full_attention_interval", "no_rope_layer_interval",
    "sliding_window_pattern", "attn_layer_period", "expert_layer_period", "global_attn_every_n_layers", "cross_layer_interval",
    "n_layers_per_attn_res_block",
}  # fmt: skip
LISTED = {  # where a list by layer says the same, it counts
    "no_rope_layer_interval": "no_rope_layers", "sliding_window_pattern": "layer_types", "global_attn_every_n_layers": "layer_types",
}  # fmt: skip
REPEATED = {"sliding_window_pattern", "block_types"}  # a value for each layer of a block, which is repeated
BY_NUMBER = {  # layers compute with their number; Zamba2's share blocks by it, which lie with the first that has them
    ("scale_attn_by_inverse_layer_idx", True), ("model_type", "diffllama"), ("model_type", "beam"), ("model_type", "zamba2"),
}  # fmt: skip
# or with how many there are: MiniCPM's residuals, Evolla's aligners, the decay of lightning attention (MiniMax, Ring)
BY_COUNT = {"scale_depth", "aligner_num_add_layers"}
LIGHTNING = {"minimax", "bailing_moe_linear"}


def _by_number(*rows: tuple[int | None, str, str]) -> dict[str, tuple[int | None, str]]:
    return {kind: (block, field) for block, field, kinds in rows for kind in kinds.split()}


# Kinds of layers that transformers makes by a layer's number where config.json lists none, of model types without a
# table: how many layers a block of them has (None: they aren't blocks), the field that says it where one does, the types
MADE = {
    "layer_types": _by_number(
        (2, "", "vaultgemma t5_gemma_module"),
        (3, "", "ultrabert"),
        (3, "global_attn_every_n_layers", "modernbert modernbert-decoder"),
        (4, "", "cwm granite_swa granitemoe_swa muse_glimmer_text muse_spark_text olmo_hybrid"),
        (4, "sliding_window_pattern", "cohere2 cohere2_moe exaone4 exaone_moe"),
        (4, "global_attn_every_n_layers", "afmoe"),
        (4, "full_attention_interval", "qwen3_5_text qwen4_exp_text"),
        (5, "", "gemma3n_text kolibri1"),
        (6, "", "diffusion_gemma_text inkling2_text neomme"),
        (6, "sliding_window_pattern", "embedding_gemma2_text t5gemma2_decoder t5gemma2_text"),
        (6, "layer_group_size", "bailing_hybrid"),
        (6, "local_layer_ids", "inkling_text"),
        (None, "", "dots3_note_text flint lfm3 mimo_v2_flash"),
    ),
    "no_rope_layers": _by_number((4, "no_rope_layer_interval", "smollm3 mistral_large4_text")),
    "mlp_layer_types": _by_number(
        (None, "", "ernie4_5_vl_moe_text glm4_moe_lite hy_v4 laguna mimo_v2_flash"),
        (None, "first_k_dense_replace", "axk1 axk2 bailing_hybrid dots3_note_text exaone_moe mistral_large4_text unlimited_ocr_text"),
        (None, "moe_layers_enum", "step3p5"),
    ),
}  # fmt: skip
# the types among them whose last layer then has full attention, or whose layers are counted from the last one
ENDING = {
    "diffusion_gemma_text", "embedding_gemma2_text", "flint", "muse_glimmer_text", "muse_spark_text", "neomme", "olmo_hybrid",
}  # fmt: skip
DELTA = {"kda_safe_gate", "kda_lower_bound", "short_conv_kernel_size"}  # of linear layers that know no decay by number
# transformers gives their last layer full attention, whatever it is told
LAST_FULL = {"gemma4_text", "gemma4_unified_text", "embedding_gemma2_text", "diffusion_gemma_text"}
KNOWN = VALUES | NUMBERS | FROM_ONE | SHARED
NESTED = ("linear_attn_config", "attn_config")  # objects that have such members, too
NOT_LAYERS = re.compile(
    r"architectures|(?!.*layer).*_ids?|keys_to_ignore.*|mrope_section|(mtp|vision|audio)_.*|deepstack_.*"
)
OF_LAYERS = re.compile(
    r".*(layer|pattern).*"
)  # what is called so, and isn't known, may be a list of them of any length
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_k",
    "moe_topk",
    "moe_top_k",
)


@dataclasses.dataclass(frozen=True)
class Renumbered:
    """What a cut keeps of a model, by its numbers.

    Attributes:
      count: how many layers the model has.
      layers: the new number of each layer that is kept, prediction layers among them.
      numbered_mtp: whether prediction layers stand behind the last one.
      experts: those that are kept; None for all.
      vocab_rows: how many are kept; None for all.
      stems: what stands before a layer's number in the names of tensors, such as `model.layers.`
      aliases: see `Family.aliases`.
    """

    count: int
    layers: Mapping[int, int]
    numbered_mtp: bool = False
    experts: range | None = None
    vocab_rows: int | None = None
    stems: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def kept(self) -> list[int]:
        """The layers of the model itself, in their order."""
        return [layer for layer in self.layers if layer < self.count]

    @property
    def cuts_layers(self) -> bool:
        """Whether it has fewer layers."""
        return len(self.kept) < self.count

    @functools.cached_property
    def place_of_layer(self) -> re.Pattern[str]:
        """What stands before a layer's number in the name of a module, a glob or a regular expression: `model.layers.`, in
        any spelling of it, or an end of that, `layers.`.
        """
        ours = {rename(f"{stem}0", self.aliases)[:-1] for stem in self.stems}
        others = {
            alias + stem.removeprefix(prefix)
            for stem in ours
            for alias, prefix in self.aliases.items()
            if prefix and stem.startswith(f"{prefix}.")
        }
        whole = self.stems | ours | others
        ends = {".".join(words[at:]) for stem in whole for words in [stem.split(".")] for at in range(len(words) - 1)}
        stems = (
            "|".join(re.escape(end).replace(r"\.", r"\\?\.") for end in sorted(ends, key=len, reverse=True)) or "(?!)"
        )
        return re.compile(rf"(?:re:|[-+]:)?\^?(?:\.?\*\.?)?(?:{stems})")


class Edits:
    """The edits of a release's JSON files, as they are collected.

    Attributes:
      made: the new value of each member, `{(file, key, …): value}`.
      problems: what can't be edited: the option, and why.
      notes: what a person should know of the rest.
      renamed: what names modules in the description of a quantisation, each as it is in the cut, `{(file, key, …, name):
        new name}`; None where it names what isn't kept.
    """

    def __init__(self) -> None:
        self.renamed: dict[Path, str | None] = {}
        self.made: dict[Path, Any] = {}
        self.problems: list[tuple[str, str]] = []
        self.notes: list[str] = []

    def set(self, path: Path, before: Any, value: Any) -> None:
        if value != before:
            self.made[path] = value


def edit(config: Mapping[str, Any], cut: Renumbered, others: Sequence[str] = ()) -> Edits:
    """The edits of `config.json`, and of `others`: files about a quantisation, which `config` has under their names."""
    edits = Edits()
    sections = text_parts(config)
    nested = [
        ((*section, name), inner)
        for section, part in sections
        for name in NESTED
        if isinstance(inner := part.get(name), Mapping)
    ]
    for section, part in (*sections, *nested):
        _edit_section(edits, section, part, cut)
    for section, part in sections:
        for key in QUANTIZATIONS:
            if key in part:
                _edit_names(edits, ("config.json", *section, key), part[key], cut)
    for name in others:
        _edit_names(edits, (name,), config.get(name), cut)
    if cut.vocab_rows is not None and not any("vocab_size" in part for _, part in sections):
        edits.set(("config.json", *sections[-1][0], "vocab_size"), None, cut.vocab_rows)
    edits.notes += _notes(sections, edits, cut)
    return edits


def _edit_section(edits: Edits, section: Path, part: Mapping[str, Any], cut: Renumbered) -> None:
    """Edits the fields of a section of `config.json`, and those that it leaves to transformers' defaults."""
    defaults: dict[str, Any] = {field: size for field in sorted(FIRST) if (size := left_out(part, field)) is not None}
    for field, kinds in MADE.items():
        made = kinds.get(str(part.get("model_type")))
        if made and part.get(field) is None and part.get(made[1]) is None:
            defaults[field] = made[0]
    for key, value in {**part, **defaults}.items():
        for option, found in _edited(key, value, part, cut):
            if isinstance(found, _Refused):
                edits.problems.append((option, f"config.json: {'.'.join((*section, key))!r} {found}"))
            else:
                edits.set(("config.json", *section, key), value, found)


def applied(config: Mapping[str, Any], made: Mapping[Path, Any]) -> dict[str, Any]:
    """`config`, edited."""
    new = dict(config)
    for (file, *keys), value in made.items():
        at = new
        *way, last = keys if file == "config.json" else (file, *keys)
        for key in way:
            at[key] = dict(at[key])
            at = at[key]
        at[last] = value
    return new


class _Refused(str):
    """Why a field can't be cut."""


def _edited(key: str, value: Any, part: Mapping[str, Any], cut: Renumbered) -> Iterator[tuple[str, Any]]:
    """The new value of a field, with the option that asks for it; nothing where it stays."""
    listed = part.get(LISTED.get(key, ""))
    if (cut.cuts_layers or cut.numbered_mtp) and not (isinstance(listed, list) and len(listed) == cut.count):
        for fits, change in _LAYERS:
            if fits(key, value, cut):
                yield "--layers", change(value, part, cut)
    if cut.experts is not None and key in EXPERTS and type(value) is int:
        yield "--experts", len(cut.experts)
    if cut.experts is not None and key in CHOSEN and type(value) is int:
        yield "--experts", min(value, _reachable(part, len(cut.experts)))
    if cut.vocab_rows is not None and key == "vocab_size":
        yield "--vocab_rows", cut.vocab_rows
    if cut.vocab_rows is not None and key == "pad_token_id" and type(value) is int and value >= cut.vocab_rows:
        yield "--vocab_rows", None  # torch makes no embedding whose padding lies outside of it


def _reachable(part: Mapping[str, Any], experts: int) -> int:
    """How many experts the router can choose of so many: with groups, those of the groups that it chooses."""
    groups, chosen = expert_groups(part)
    return experts // groups * min(chosen, groups)


def expert_count(config: Mapping[str, Any]) -> int:
    """How many experts each layer has; 0 where it has none."""
    return max(
        (part[key] for _, part in text_parts(config) for key in EXPERTS if type(part.get(key)) is int), default=0
    )


def check_experts(config: Mapping[str, Any], kept: int) -> Iterator[str]:
    """Why a router can't do with so many experts, if it can with those that it has."""
    for _, part in text_parts(config):
        there = expert_count(part)
        if there and not why_not_in_groups(part, there) and (why := why_not_in_groups(part, kept)):
            yield f"{why}; keep a multiple of {expert_groups(part)[0]}"


def tells_apart(layer: int, config: Mapping[str, Any], count: int) -> bool:
    """Whether a list says that a layer, the first or the last, is of another kind than all others: what it alone has isn't
    for being the first, or the last.
    """
    alone: list[set[Any]] = [{layer}, {*range(count)} - {layer}]
    lists = [(key, value) for _, part in text_parts(config) for key, value in part.items() if isinstance(value, list)]
    return any(
        (key in VALUES and len(value) == count and value.count(value[layer]) == 1)
        or (key in NUMBERS and all(type(each) is int for each in value) and {*value} in alone)
        for key, value in lists
    )


def _has_value_per_layer(key: str, value: Any, cut: Renumbered) -> bool:
    return key in VALUES and isinstance(value, list | str) and len(value) >= cut.count


def _values(value: Any, part: Mapping[str, Any], cut: Renumbered) -> Any:
    """Of the layers that are kept; those of prediction layers that stand elsewhere stay."""
    beyond = [] if cut.numbered_mtp else [*value[cut.count :]]
    kept = [value[layer] for layer in cut.layers if layer < len(value)] + beyond
    return "".join(kept) if isinstance(value, str) else kept


def _numbers(value: Any, part: Mapping[str, Any], cut: Renumbered, first: int = 0) -> Any:
    """Of the layers that are kept, in order; `first` is the number of the first layer."""
    try:
        layers = map(int, value.split(",")) if isinstance(value, str) else value
        kept = [
            cut.layers[layer - first] + first for layer in layers if type(layer) is int and layer - first in cut.layers
        ]
    except ValueError:
        return _Refused(f"is {value!r}, which should be numbers of layers with commas between")
    if isinstance(value, str) and not kept:  # which nobody reads as a list of none
        return _Refused(f"is {value!r}, and no layer of these is kept")
    return ",".join(map(str, kept)) if isinstance(value, str) else kept


def _first(value: Any, part: Mapping[str, Any], cut: Renumbered) -> Any:
    return sum(layer < value for layer in cut.kept)


def _last(value: Any, part: Mapping[str, Any], cut: Renumbered) -> Any:
    """How many of those that are kept; each must find what it shares where it was."""
    first, types = cut.count - value, part.get("layer_types")
    shared = [layer for layer in cut.kept if layer >= first]
    own = [layer for layer in range(cut.count) if layer < first]
    if isinstance(types, list) and len(types) == cut.count:
        for layer in shared:
            source = max((other for other in own if types[other] == types[layer]), default=None)
            if source not in cut.layers:
                return _Refused(f"is {value}: layer {layer} takes keys and values of layer {source}, which isn't kept")
    return len(shared)


def _shared(value: Any, part: Mapping[str, Any], cut: Renumbered) -> Any:
    """Likewise; each must find the choice of the layer where it was."""
    own = [layer for layer, kind in enumerate(value) if kind in ("full", "F")]
    for layer in cut.kept:
        source = max((other for other in own if other <= layer), default=None)
        if source not in cut.layers:
            return _Refused(f"says that layer {layer} takes the tokens that layer {source} chose, which isn't kept")
    return _values(value, part, cut)


def _frequency(value: Any, part: Mapping[str, Any], cut: Renumbered) -> Any:
    """Which layers choose tokens of their own, where no list says it."""
    if any(part.get(key) for key in SHARED):
        return value
    first = part.get("index_skip_topk_offset", 2)
    places = [[max(layer - first + 1, 0) % value for layer in (old, cut.layers[old])] for old in cut.kept]
    for old, (before, after) in zip(cut.kept, places, strict=True):
        if before != after:
            return _Refused(
                f"is {value}: layer {old} would be layer {cut.layers[old]}, at another place among those that share"
            )
    return value


def _every(value: int | Sequence[Any], part: Mapping[str, Any], cut: Renumbered) -> Any:
    """A block's layers by their number, or by a value for each: `LLLG`."""
    block = value if isinstance(value, int) else len(value)
    moved = [layer for layer in cut.kept if layer % block != cut.layers[layer] % block]
    if moved:
        return _Refused(
            f"is {value!r}: layer {moved[0]} would be layer {cut.layers[moved[0]]}, at another place of its block; keep whole blocks of {block}"
        )
    return value


def _made(value: int | None, part: Mapping[str, Any], cut: Renumbered) -> Any:
    """Kinds by a layer's number, in blocks of so many."""
    block = value or cut.count
    moved = [layer for layer in cut.kept if cut.layers[layer] % block != layer % block]
    if not moved and not (part.get("model_type") in ENDING and len(cut.kept) % block):
        return value
    how = f"keep whole blocks of {value}" if value else "keep the first layers"
    return _Refused(
        f"isn't there: the kind of layer {(moved or cut.kept[-1:])[0]} follows from its number, which would be another, or from "
        f"how many layers there are; {how}, or save the config with transformers first, which lists the kinds"
    )


def _stay(value: Any, part: Mapping[str, Any], cut: Renumbered) -> Any:
    """Of GPT-2 that divides by a layer's number, DiffLlama whose λ follows from it."""
    moved = next((layer for layer in cut.kept if cut.layers[layer] != layer), None)
    if moved is None:
        return value
    return _Refused(
        f"is {value!r}: what layer {moved} computes depends on its number, which would be {cut.layers[moved]}"
    )


def _end(value: int, part: Mapping[str, Any], cut: Renumbered) -> Any:
    """The last of those layers; -1 is the model's."""
    kept = [layer for layer in cut.kept if layer <= value]
    if value >= 0 and not kept:
        return _Refused(f"is {value}, and no layer up to it is kept")
    return len(kept) - 1 if value >= 0 else value


def _group(value: int, part: Mapping[str, Any], cut: Renumbered) -> Any:
    """The last layer of each group has full attention, unless a list says which have; the others may be lightning's."""
    if DELTA.isdisjoint(part):
        return _by_count(value, part, cut)
    return value if isinstance(part.get("layer_types"), list) else _every(value, part, cut)


def _by_count(value: Any, part: Mapping[str, Any], cut: Renumbered) -> Any:
    if not cut.cuts_layers:
        return value
    return _Refused(
        f"is {value!r}: what a layer computes depends on how many layers there are, so that of a cut is another"
    )


def _types(value: Sequence[Any], part: Mapping[str, Any], cut: Renumbered) -> Any:
    last = cut.kept[-1]
    if part.get("model_type") in LAST_FULL and value[last] != "full_attention":
        return _Refused(
            f"says {value[last]!r} of layer {last}, and the last layer of such a model has full attention; keep one more that has"
        )
    return _values(value, part, cut)


def _table(value: Any, part: Mapping[str, Any], cut: Renumbered) -> Any:
    return {str(cut.layers[int(layer)]): of for layer, of in value.items() if int(layer) in cut.layers}


def _may_be_of_layers(key: str, value: Any, cut: Renumbered) -> bool:
    """Whether it may be a list of layers, or of a value for each, and isn't known."""
    if key in VALUES and isinstance(value, list | str):
        return 0 < len(value) < cut.count
    if key in KNOWN | EVERY | REPEATED or NOT_LAYERS.fullmatch(key) or cut.count == 1:
        return False
    if isinstance(value, list):
        return len(value) == cut.count or bool(value and OF_LAYERS.fullmatch(key))
    return isinstance(value, str) and len(value) > 1 and key.endswith(("_pattern", "_layers", "_enum"))


def _unknown(value: Any, part: Mapping[str, Any], cut: Renumbered) -> Any:
    many = f"has {len(value)} values" + ", as many as there are layers" * (len(value) == cut.count)
    what = f"is {value!r}" if isinstance(value, str) else many
    return _Refused(
        f"{what}, and whether it says something of each layer isn't known; edit it by hand in a copy, or leave --layers out"
    )


_Fits = Callable[[str, Any, Renumbered], bool]
_Change = Callable[[Any, Mapping[str, Any], Renumbered], Any]
_LAYERS: tuple[tuple[_Fits, _Change], ...] = (  # which fields --layers concerns, and how
    (lambda key, value, cut: key in LAYERS and value == cut.count, lambda value, part, cut: len(cut.kept)),
    (lambda key, value, cut: key in NEXTN and cut.numbered_mtp, lambda value, part, cut: len(cut.layers) - len(cut.kept)),
    (lambda key, value, cut: key in SHARED and isinstance(value, list | str) and len(value) == cut.count, _shared),
    (lambda key, value, cut: key == "index_topk_freq" and type(value) is int and value > 1, _frequency),
    (lambda key, value, cut: key == "layer_types" and _has_value_per_layer(key, value, cut), _types),
    (lambda key, value, cut: key != "layer_types" and _has_value_per_layer(key, value, cut), _values),
    (lambda key, value, cut: key in NUMBERS and isinstance(value, list | str), _numbers),
    (lambda key, value, cut: key in FROM_ONE and isinstance(value, list | str), functools.partial(_numbers, first=1)),
    (lambda key, value, cut: key in FIRST and type(value) is int, _first),
    (lambda key, value, cut: key in MADE and (value is None or type(value) is int), _made),
    (lambda key, value, cut: key in LAST and type(value) is int and value > 0, _last),
    (lambda key, value, cut: key in EVERY and type(value) is int and value > 1, _every),
    (lambda key, value, cut: key in REPEATED and isinstance(value, list | str) and bool(value), _every),
    (lambda key, value, cut: (key, value) in BY_NUMBER if isinstance(value, str | bool) else False, _stay),
    (lambda key, value, cut: bool(value) and (key in BY_COUNT or (key == "model_type" and str(value) in LIGHTNING)), _by_count),
    (lambda key, value, cut: key == "attn_type_list" and isinstance(value, list) and 0 in value, _by_count),
    (lambda key, value, cut: key == "moe_layer_end_index" and type(value) is int, _end),
    (lambda key, value, cut: key == "layer_group_size" and type(value) is int and value > 1, _group),
    (lambda key, value, cut: isinstance(value, dict) and bool(value) and all(layer.isdecimal() for layer in value), _table),
    (_may_be_of_layers, _unknown),
)  # fmt: skip


def _notes(sections: Sequence[tuple[Path, Mapping[str, Any]]], edits: Edits, cut: Renumbered) -> Iterator[str]:
    """What a person should know: the router chooses fewer, tokens have no row."""
    for section, part in sections:
        for key, value in part.items():
            path = ("config.json", *section, key)
            if key in CHOSEN and path in edits.made:
                yield f"{'.'.join(path[1:])} is {edits.made[path]}, not {value}: the router has no more experts to choose from"
        ids = {key: value for key, value in part.items() if key.endswith("_token_id") and type(value) is int}
        if cut.vocab_rows is not None and (
            beyond := [f"{key} {value}" for key, value in ids.items() if value >= cut.vocab_rows]
        ):
            yield f"tokens from {cut.vocab_rows} on have no row, {', '.join(beyond)} among them; the tokenizer knows them all the same"


# --- names in what describes a quantisation ---------------------------------------------------------------------------

# what may stand behind a layer's place for any layer: in a glob, in a regular expression, or nothing
_ANY = re.compile(r"\.?\*|\.\+|\(?(\\d|\\w|\[0-9\]|\[\^\.\])[+*]|$")
_EXPERT = re.compile(r"experts\\?\.(\d+)(?=\D|$)")


def _edit_names(edits: Edits, path: Path, value: Any, cut: Renumbered) -> None:
    """Renumbers layers and experts in the lists and tables of a quantisation, and leaves out those that aren't kept."""
    for key, held in value.items() if isinstance(value, Mapping) else ():
        edits.set((*path, key), held, _renamed(held, edits, (*path, key), cut))


def _renamed(value: Any, edits: Edits, path: Path, cut: Renumbered) -> Any:
    def name(text: Any) -> Any:
        if not isinstance(text, str):
            return _renamed(text, edits, path, cut)
        try:
            return edits.renamed.setdefault((*path, text), renumber(text, cut))
        except ValueError as e:
            edits.problems.append(("--layers", f"{path[0]}: {'.'.join(path[1:])!r} says {text!r}, {e}"))
            return text

    if isinstance(value, Mapping):
        return {new: _renamed(held, edits, path, cut) for key, held in value.items() if (new := name(key)) is not None}
    if isinstance(value, list):
        return [new for each in value if (new := name(each)) is not None]
    return value


def renumber(name: str, cut: Renumbered) -> str | None:
    """The name of a module, a glob or a regular expression as it is in the cut; None where it names what isn't kept.

    Raises:
      ValueError: which layers it names can't be told.
    """
    found = cut.place_of_layer.match(name)
    if found is None:
        return name
    before, behind = found[0], name[found.end() :]
    number = re.match(r"\d+", behind)
    if number is None:
        if _ANY.match(behind):
            return name
        raise ValueError("a pattern of layers that can't be renumbered")
    layer, rest = int(number[0]), behind[number.end() :]
    if rest.startswith("*") and any(str(each).startswith(number[0]) for each in cut.layers if each != layer):
        raise ValueError(f"which names more layers than {layer} and can't be renumbered")
    if layer not in cut.layers:
        return None
    name = f"{before}{cut.layers[layer]}{rest}"
    expert = _EXPERT.search(name)
    if cut.experts is None or expert is None:
        return name
    if int(expert[1]) not in cut.experts:
        return None
    return f"{name[: expert.start(1)]}{int(expert[1]) - cut.experts.start}{name[expert.end(1) :]}"
