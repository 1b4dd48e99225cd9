"""The MaxText configuration of a checkpoint, from its `config.json`: as a file, as overrides of one line, and what
can't be said.

MaxText merges its `base.yml`, the file of the model that `model_name` names, and the command line; with
`override_model_config=true` the last may contradict the second (AI-Hypercomputer/maxtext,
src/maxtext/configs/pyconfig.py, e591f30). It also takes some of a model from its very name, so the name belongs to the
configuration.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.configuration import Line, read
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.maxtext_models import SCHEDULES, base, keys_of, models, nearest, run_as
from weightbeam.model_mappings.naming import ModelNaming
from weightbeam.model_mappings.values import Value

FILE = "maxtext.yml"
TOWERS = ("vision_config", "audio_config")
WIDTH = 120
NAMES = {  # why a model runs under another one's name
    "kimi-k2-1t": "under the name kimi-k2-1t MaxText e591f30's router doesn't normalise scores and takes them after the bias (73 % of tokens agree)",
    "cosmos3-nano-reasoner": "MaxText 0.2.5 has no file for Cosmos 3, and the very model under this one; later versions have its own",
    "cosmos3-super-reasoner": "MaxText 0.2.5 has no file for Cosmos 3, and the very model under this one; later versions have its own",
    "llama3.2-1b": "MaxText has no file for Llama 3.2",
    "llama3.2-3b": "MaxText has no file for Llama 3.2",
}
BY_NAME = "MaxText takes the rotary embedding, norms or routing of this model from its name"
IGNORED = (  # fields that change no logits of a forward pass, or that the family's table checks
    "*token_id", "*token_ids", "*token_index", "*dropout*", "*_name_or_path", "*aux_loss*", "*_alpha",
    "architectures", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "initializer_range",
    "use_cache", "id2label", "label2id", "problem_type", "output_*", "return_dict", "is_encoder_decoder",
    "chunk_size_feed_forward", "quantization_config", "compression_config", "router_jitter_noise", "seq_aux",
    "ep_size", "pretraining_tp", "max_window_layers", "layer_types", "*sliding_window_pattern",
    "num_nextn_predict_layers", "cache_implementation", "mm_tokens_per_image", "vision_*", "audio_*",
    "talker_config", "code2wav_config", "text_config", "thinker_config", "enable_*", "mtp_*", "unsloth*",
    "sliding_window", "use_sliding_window", "attention_bias", "mlp_bias", "decoder_sparse_step", "mlp_only_layers",
    "rope_scaling", "rope_theta", "rope_local_base_freq", "rope_parameters", "rope_interleave", "head_dim",
    "qk_head_dim", "query_pre_attn_scalar", "topk_method", "scoring_func", "moe_layer_freq", "n_group",
    "topk_group", "no_rope_layers", "no_rope_layer_interval", "moe_layers", "per_layer_config",
    "initial_context_length", "experts_per_token", "expert_dtype", "compress_*",
    "num_hash_layers", "mlp_layer_types", "partial_rotary_factor", "full_attention_interval",
    "shared_expert_intermediate_size", "norm_topk_prob", "attn_output_gate", "mamba_ssm_dtype", "use_qk_norm",
    "qkv_bias", "for_llm_class", "pooling_kernel_size", "bos_token", "eos_token", "intermediate_size",
    "num_local_experts", "num_experts", "use_bidirectional_attention", "attention_k_eq_v",
    "attn_temperature_tuning", "max_position_embeddings", "tokenizer_class", "hidden_act", "tie_word_embeddings",
    "num_kv_shared_layers", "use_double_wide_mlp", "vocab_size_per_layer_input", "language_model_only", "is_causal",
    "task_specific_params", "_*", "transformers.js_config", "bad_words_ids", "swiglu_alpha", "use_mrope",
    "index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration", "moe_router_dtype",
    "max_sequence_length", "sliding_window_size", "is_llama_config", "use_grouped_topk",
    "*config.json",  # another file's, such as hf_quant_config.json
    # what transformers before 5 writes of every model, most of it about generation (v4.57.1, configuration_utils.py)
    "add_cross_attention", "begin_suppress_tokens", "cross_attention_hidden_size", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task", "is_decoder",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "prefix", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "suppress_tokens", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "top_k",
    "top_p", "torchscript", "typical_p", "use_bfloat16",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class MaxTextConfig(Value, Mapping[str, Any]):
    """What MaxText must be told to compute what the model computes; as a mapping, what `maxtext.yml` says.

    Attributes:
      model: the name that MaxText runs it under.
      settings: MaxText's keys and their values, all that the model's `config.json` settles.
      limits: what MaxText can't express, what that does to the logits, and the way round it.
      notes: what was chosen for MaxText's sake.
      unknown: fields of `config.json` that nothing here is about.
    """

    model: str
    settings: Mapping[str, Any]
    limits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def __str__(self) -> str:
        return self.to_yaml()

    def brief(self) -> str:
        return f"{self.model}, {len(self)} keys"

    def to_dict(self) -> dict[str, Any]:
        """What the file says."""
        return {"model_name": self.model, "override_model_config": True, **self.settings}

    def with_keys(self, keys: Mapping[str, Any]) -> MaxTextConfig:
        """This configuration with keys that `config.json` doesn't settle."""
        return dataclasses.replace(self, settings={**self.settings, **keys})

    def overrides(self) -> dict[str, Any]:
        """The keys that `base.yml` and the model's file say otherwise."""
        said = keys_of(self.model) or base()
        return {
            key: value
            for key, value in self.settings.items()
            if said.get(key, LAYOUT.get(key)) != value and not is_idle(key, self.settings)
        }

    def flags(self) -> dict[str, Any]:
        """What MaxText's command line must say, in order: the layout, the model, and what contradicts that model's file."""
        scan = {"scan_layers": self.settings["scan_layers"]} if "scan_layers" in self.settings else {}
        overrides = {key: value for key, value in self.overrides().items() if key not in scan}
        override = {"override_model_config": True} if overrides.keys() - LAYOUT.keys() else {}
        return scan | {"model_name": self.model} | override | overrides

    def command_line(self) -> str:
        """The same as MaxText takes it, in one line."""
        return " ".join(shlex.quote(f"{key}={scalar(value)}") for key, value in self.flags().items())

    def to_yaml(self) -> str:
        """The file, with its limits and uses as comments."""
        uses = [
            "MaxText's configuration of this checkpoint, made by Weightbeam of the model's config.json.",
            f"As the file of a model: copy it to models/{self.model}.yml beside your own configuration, or over that of MaxText's src/maxtext/configs/models.",
            f"As overrides of MaxText's base.yml: {self.command_line()}",
        ]
        comments = [*uses, *self.notes, *(f"MaxText can't express this: {limit}" for limit in self.limits)]
        lines = [
            line
            for text in comments
            for line in textwrap.wrap(
                text, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False
            )
        ]
        return (
            "\n".join([*lines, *(f"{key}: {scalar(value, blank=' ')}" for key, value in self.to_dict().items())]) + "\n"
        )


# base.yml's, of what no model's file contradicts: override_model_config isn't needed for it
LAYOUT = {"scan_layers": True, "param_scan_axis": 1, "mtp_num_layers": 0}


def is_idle(key: str, keys: Mapping[str, Any]) -> bool:
    """Whether MaxText doesn't look at a key: the longest context only matters to YaRN, a scale of tied logits only
    where they are tied.
    """
    if key == "max_position_embeddings":
        return keys.get("rope_type") != "yarn"
    if key == "normalize_embedding_logits":
        return keys.get("logits_via_embedding") is False
    return key.endswith(("_for_vit", "_for_audio")) and not keys.get("use_multimodal")


def scalar(value: Any, blank: str = "") -> str:
    """A value as YAML 1.1 and OmegaConf read it: `1e-06` would be text to them."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, list | tuple):
        return f"[{f',{blank}'.join(scalar(each) for each in value)}]"
    return str(value) if value != "" else '""'


def layout_keys(layout: Layout, family: Family) -> dict[str, Any]:
    """The keys that say how the checkpoint is laid out."""
    keys: dict[str, Any] = {"scan_layers": layout.scan if len(family.layouts) > 1 else family.layouts == ("scanned",)}
    if layout.scan_axis != 1:
        keys["param_scan_axis"] = layout.scan_axis
    if layout.vocab:
        keys["vocab_size"] = layout.vocab
    if layout.mtp:
        keys["mtp_num_layers"] = 1
    if family.towers:  # some models' files ask for them
        keys["use_multimodal"] = layout.multimodal
    if "audio" in family.towers:
        keys["use_audio"] = layout.multimodal
    return keys


def maxtext_config(family: Family, config: Config, layout: Layout, naming: ModelNaming) -> MaxTextConfig:
    """The MaxText configuration of a checkpoint.

    Args:
      family: the checkpoint's.
      config: its `config.json`.
      layout: how its arrays are laid out.
      naming: the MaxText model that it is.

    Raises:
      ConfigError: `config.json` lacks a field that MaxText must be told, or says what no key can say.
    """
    kind = config.get("model_type")
    lines = family.configuration.get(str(kind))
    if not lines:
        raise ConfigError(f"{family.name}: nothing is known of what MaxText must be told")
    named = naming.model or _template(family, config, lines)
    if named is None:
        raise ConfigError(f"{family.name}: MaxText has no model of this kind whose name could stand for it")
    ours = [line for line in lines if line.version in (None, layout.maxtext) and (layout.multimodal or not line.tower)]
    reading = read(ours, config, named)
    notes = [f"It runs as {run_as(named)}: {NAMES[named]}."] if named in NAMES else []
    if naming.model is None:
        notes.append(f"None of MaxText's models has these sizes; it runs as {run_as(named)} with its own. {BY_NAME}.")
    keys = reading.keys | layout_keys(layout, family)
    limits = (*reading.limits, *_fractions(keys), *_looking_ahead(lines, config), *_beyond_norms(layout))
    return MaxTextConfig(run_as(named), keys, limits, tuple(notes), tuple(unknown_fields(lines, config)))


def _fractions(keys: Mapping[str, Any]) -> Iterator[str]:
    """MaxText's type of a key is that of its default (src/maxtext/configs/types.py and base.yml, e591f30)."""
    for key, value in keys.items():
        if isinstance(value, float) and isinstance(base().get(key), int):
            yield f"{key} is {value}: MaxText takes whole numbers alone, and refuses the configuration"


def _looking_ahead(lines: Iterable[Line], config: Config) -> Iterator[str]:
    """Encoders, such as EmbeddingGemma: transformers (v5.23.0, masking_utils.py) lets their tokens look at later ones."""
    for about in {line.part: line.about(config) for line in lines if not line.part.endswith(TOWERS)}.values():
        for field, ahead in (("is_causal", (False,)), ("use_bidirectional_attention", (True, "all"))):
            if about.get(field) in ahead:
                yield f"{field} is {about[field]!r}: MaxText's layers look at earlier tokens alone; logits differ. There is no way round"


def _beyond_norms(layout: Layout) -> Iterator[str]:
    """Flax (0.12.8, flax/core/axes_scan.py) asserts that each array has the axis on which layers are stacked."""
    if layout.scan and layout.scan_axis > 1:
        yield (
            f"param_scan_axis is {layout.scan_axis}: Flax can't stack norms, whose scales have one axis, on another than 0 or 1; "
            "MaxText can't make the model. Take 0 or 1"
        )


def _template(family: Family, config: Config, lines: Iterable[Line]) -> str | None:
    """The model of MaxText's that is nearest to one that it hasn't got."""
    kind = config.get("model_type")
    names = [
        name
        for name in models()
        if kind in family.types_of(name)
        and not name.endswith(SCHEDULES)
        and family.is_model(config, name)
        and family.variant(name) == family.variant("")
    ]
    return nearest(read(lines, config).keys, names)


def unknown_fields(lines: Iterable[Line], config: Mapping[str, Any]) -> list[str]:
    """The fields of `config.json` that no line is about and that could matter."""
    known = {line.path for line in lines if line.path} | {line.path.rpartition(".")[0] for line in lines if line.path}
    parts = sorted({line.part for line in lines if not line.part.endswith(TOWERS)}, key=len)
    found = []
    for part in parts:
        prefix = f"{part}." if part else ""
        about: Any = config
        for word in filter(None, part.split(".")):
            about = about.get(word) or {}
        for field, value in about.items():
            path = prefix + field
            if (
                value is not None
                and path not in known
                and not any(fnmatch.fnmatchcase(field, pattern) for pattern in IGNORED)
            ):
                found.append(path)
    return found


SHAPES = "other arrays, or arrays of other shapes: the checkpoint doesn't load"
ROTARY = "no error: positions turn otherwise; logits are wrong, most in long contexts"
ROUTING = "no error: tokens go to other experts, or with other weights; logits are wrong"
WINDOW = "no error: layers look at other tokens; logits are wrong beyond a window"
EFFECTS = {  # what a wrong key does, by patterns; the first that fits
    "decoder_block": "another architecture: the checkpoint doesn't load",
    "vocab_size": "the embedding has another number of rows: the checkpoint doesn't load",
    "base_*|head_dim|num_experts|*_head_dim|*_lora_rank|*_heads|o_groups|mhc_*|first_num_*|shared_experts|gdn_*": SHAPES,
    "*_for_vit|*_for_audio|vision_*|use_multimodal|use_audio": "the towers are others",
    "*rope*|*mscale|beta_*|*position_embeddings|partial_rotary_factor|mrope_*|use_mrope|nope_*": ROTARY,
    "routed_*|n_routing_*|topk_*|norm_topk_prob|num_experts_per_tok|interleave_*": ROUTING,
    "indexer_sparse_training": "no error: MaxText's trainer leaves the model's own loss out; only an indexer's is trained, if any",
    "sliding_window_size|chunk_*|attention_type|compress_*|indexer_*|use_indexer|inhomogeneous_*": WINDOW,
    "normalization_layer_epsilon": "no error: norms differ a little, logits by rounding to a few per cent",
    "*_soft_cap": "no error: logits, or attention, are capped otherwise",
    "logits_via_embedding": "the head is another array, or none: the checkpoint doesn't load",
    "normalize_embedding_logits": "no error: logits are divided by √embed",
    "*bias|attention_sink|use_qk_norm|use_post_*|share_kv_*|v_norm_*": "arrays that are missing or left over: the checkpoint doesn't load",
    "scan_layers|param_scan_axis": "layers are stacked otherwise: the checkpoint doesn't load",
}
WRONG = "no error: the model computes something else; logits are wrong"


def effect_of(key: str) -> str:
    """What a wrong value of one of MaxText's keys does."""
    return next(
        (
            effect
            for patterns, effect in EFFECTS.items()
            if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns.split("|"))
        ),
        WRONG,
    )


def compare(ours: MaxTextConfig, theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys in which a configuration differs from what the model needs: `{key: (needed, said)}`."""
    return {
        key: (value, theirs[key])
        for key, value in ours.settings.items()
        if key in theirs and theirs[key] != value and not is_idle(key, ours.settings)
    }
