"""A model of transformers whose weights come when a layer needs them, and go when it is done.

The model is built on the meta device, without weights. A hook before each layer reads its tensors, and has
transformers make the layer's parameters of them; a hook behind it drops them. So what runs is transformers' own
`forward`, and what is in memory is one layer.

    model.embed_tokens      the rows of the tokens, and of the padding; they stay, as some models look into them later
    model.layers.0 … 60     each as a whole
    model.norm, lm_head     each by itself

How tensors become parameters (experts are one parameter in memory and a tensor each in files) is transformers' own
conversion: `get_model_conversion_mapping`, `rename_source_key` and `convert_and_load_state_dict_in_model` of version
5.23.0 (`conversion_mapping.py`, `core_model_loading.py`), by which `from_pretrained` loads. They aren't in its
documented API; PEFT uses the first, and the extra `models` pins the version.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings import ContentError
from weightbeam.formats.heaps import trim_heaps
from weightbeam.formats.release.model_class import model_class
from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.identity import as_read
from weightbeam.formats.text.installing import install
from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.config import MAX_MESSAGE, QUANTIZATIONS
from weightbeam.pipelines.forward.sides import Side
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.tables import count
from weightbeam.transforms.comparing.logits import EMBEDDING, Trace
from weightbeam.transforms.execution.operands import Operand

if TYPE_CHECKING:
    import torch

SHOWN = 10  # names in a message
DTYPES: Mapping[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def check_installed() -> None:
    """Raises `Refused` where torch or transformers are missing."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as e:
        raise Refused(f"logits: needs torch and transformers ({e}); {install('models')}") from e


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A tensor as transformers' loader takes one: read where it is indexed.

    Attributes:
      rows: those that are read; the others are zeros that take no memory. None for all.
      dtype: of the values where there are rows.
    """

    tensor: Operand
    dtype: str
    rows: Sequence[int] | None = None

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        if self.rows is None:
            return _to_torch(self.tensor.read(whole(self.tensor.shape)))
        values = np.zeros(self.tensor.shape, DTYPES[self.dtype])  # pages that nobody touches aren't there
        for row in self.rows:
            box = ((row, row + 1), *whole(self.tensor.shape[1:]))
            values[row] = self.tensor.read(box)[0].astype(values.dtype)
        return _to_torch(values)


def _to_torch(values: np.ndarray) -> torch.Tensor:
    import torch

    values = np.ascontiguousarray(values)  # one that is turned around would multiply in another order
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


@dataclasses.dataclass
class Group:
    """The parameters that are in memory together.

    Attributes:
      name: of their module.
      is_layer: whether it is one of a list of layers.
      names: of the parameters, and of the buffers that are stored, in the model.
      nbytes: of them all.
    """

    name: str
    is_layer: bool
    names: list[str] = dataclasses.field(default_factory=list)
    nbytes: int = 0


class StreamedModel:
    """A model of transformers over the tensors of a side.

    Args:
      dtype: of the parameters, and so of the arithmetic.

    Attributes:
      layers: the language model's, in order.
      done: bytes of the parameters that were filled so far.
      layer: how many layers were filled.

    Raises:
      Refused: transformers has no such model, or its parameters and the tensors don't fit: all that don't.
    """

    def __init__(self, side: Side, dtype: str):
        from transformers.utils import logging

        logging.disable_progress_bar()  # the loader's own, of each layer
        logging.set_verbosity_error()
        self.side, self.dtype, self.done, self.layer = side, dtype, 0, 0
        self.model = _on_meta(side, dtype)
        self._speaking = getattr(self.model, "thinker", self.model)  # Qwen's Omni has a talker beside it
        self._loading = self._load_config()
        self._tied: Mapping[str, str] = self.model.all_tied_weights_keys or {}
        self._groups = self._find_groups()
        self._sources = self._find_sources()
        self.layers = [group for group in self._needed() if group.is_layer]
        self._check()

    @property
    def vocab(self) -> int:
        """How many tokens it knows."""
        return self._speaking.get_input_embeddings().num_embeddings

    @property
    def largest(self) -> Group:
        """What takes most memory of all that comes and goes; the embedding doesn't count, of which rows are read."""
        return max(self._read_whole(), key=lambda group: group.nbytes)

    @property
    def nbytes(self) -> int:
        """Of all parameters that are filled while tokens run through."""
        return sum(group.nbytes for group in self._read_whole())

    def tensors_below(self, name: str) -> list[str]:
        """The kinds of tensors that the embedding, a layer, or a module in one, is made of; `name` is as a `Trace` has it."""
        if name == EMBEDDING:
            return [
                tensor for group in self._needed() if self._is_embedding(group) for tensor in self._sources[group.name]
            ]
        number, _, part = name.partition("/")
        layer = self.layers[int(number)].name
        inside = re.compile(rf"layers\.{layer.rpartition('.')[2]}\.(.*)")
        found = (match[1] for tensor in self._sources[layer] if (match := inside.search(tensor)))
        return list(dict.fromkeys(pattern(kind) for kind in found if kind.startswith(part)))

    def run(self, tokens: Sequence[int], trace: bool = False) -> tuple[np.ndarray, Trace]:
        """The logits of tokens, (token, vocab), in float32; and where they are asked for, what the layers make of them.

        Raises:
          Failed: a tensor can't be read, or transformers' layers can't compute this.
        """
        import torch

        hooks, seen, ids = [], dict[str, np.ndarray](), torch.tensor([list(tokens)])

        def fill(group: Group, args: tuple[Any, ...]) -> tuple[Any, ...]:
            # Llama 4 sends them to where the embedding isn't yet
            if args and self._is_embedding(group) and args[0].is_meta:
                args = (ids, *args[1:])
            self._fill(group, args)
            return args

        for name, group in self._groups.items():
            module = self.model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(lambda module, args, group=group: fill(group, args)))
            hooks.append(module.register_forward_hook(lambda module, args, made, group=group: self._free(group)))
        if trace and self.layers:
            first = self.model.get_submodule(self.layers[0].name)
            hooks.append(first.register_forward_pre_hook(functools.partial(_note_input, seen), with_kwargs=True))
        for number, layer in enumerate(self.layers if trace else ()):
            module = self.model.get_submodule(layer.name)
            for name, part in (*module.named_children(), ("", module)):
                key = f"{number}/{name}".rstrip("/")
                hooks.append(part.register_forward_hook(lambda module, args, made, key=key: _note(seen, key, made)))
        try:
            with torch.inference_mode():
                made = self._speaking(input_ids=ids, use_cache=False)
        except (StorageError, ContentError) as e:
            raise Failed(f"  {as_read(str(e))}") from e
        except (RuntimeError, NotImplementedError) as e:
            raise Failed(f"  {self.side.where}: transformers' {type(self.model).__name__} failed: {e}") from e
        finally:
            for hook in hooks:
                hook.remove()
        return _to_numpy(made.logits[0]), seen

    def _load_config(self) -> Any:
        import torch
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        dtype = getattr(torch, self.dtype)
        mapping: Any = get_model_conversion_mapping(self.model)
        plan = self.model._get_dtype_plan(dtype)
        return LoadStateDictConfig(dtype=dtype, dtype_plan=plan, weight_mapping=mapping)

    def _find_groups(self) -> dict[str, Group]:
        """The groups by the names of their modules: each element of a list of modules that lies in no other, and each
        other module that has parameters of its own.
        """
        import torch

        groups: dict[str, Group] = {}
        for name, parameter in self.model.state_dict().items():
            path = name.split(".")[:-1]
            parents = (".".join(path[:end]) for end in range(len(path)))
            lists = (
                at
                for at, parent in enumerate(parents)
                if isinstance(self.model.get_submodule(parent), torch.nn.ModuleList)
            )
            end = next(lists, None)
            group = Group(".".join(path if end is None else path[: end + 1]), end is not None)
            group = groups.setdefault(group.name, group)
            group.names.append(name)
            group.nbytes += parameter.numel() * parameter.element_size()
        return groups

    def _find_sources(self) -> dict[str, list[str]]:
        """By group the tensors that its parameters are made of."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [each for each in self._loading.weight_mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in self._loading.weight_mapping if isinstance(each, WeightConverter)]
        of = {name: group.name for group in self._groups.values() for name in group.names}
        state, found = self.model.state_dict(), defaultdict[str, list[str]](list)
        for name in self.side.tensors:
            parameter, _ = rename_source_key(name, renamings, converters, self.model.base_model_prefix, state)
            if parameter not in of and name in of:
                parameter = name
            if parameter in of:
                found[of[parameter]].append(name)
        for target, source in self._tied.items():  # a head that is the embedding
            if target in of and source in of and not found[of[target]]:
                found[of[target]] = found[of[source]]
        return found

    def _needed(self) -> list[Group]:
        """The groups that text runs through: the language model's, and the head."""
        decoder, head = self._speaking.get_decoder(), self._speaking.get_output_embeddings()
        named = {id(module): name for name, module in self.model.named_modules()}
        stem = f"{name}." if (name := named[id(decoder)]) else ""  # Llama 4's text model is its own decoder
        return [
            group for group in self._groups.values() if group.name.startswith(stem) or group.name == named.get(id(head))
        ]

    def _read_whole(self) -> list[Group]:
        return [group for group in self._needed() if not self._is_embedding(group)]

    def _is_embedding(self, group: Group) -> bool:
        import torch

        return isinstance(self.model.get_submodule(group.name), torch.nn.Embedding)

    def _check(self) -> None:
        """Has transformers make all parameters of tensors without values. Raises Refused where one that text runs
        through isn't made, or has another shape.
        """
        import torch

        tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in self.side.tensors.items()}
        found = self._load(tensors, dataclasses.replace(self._loading, device_map={"": "meta"}))
        needed = {name for group in self._needed() for name in group.names}
        problems = [
            f"  {name}: is {tuple(theirs)}, and {type(self.model).__name__} wants {tuple(ours)}"
            for name, theirs, ours in sorted(found.mismatched_keys)
            if name in needed
        ]
        problems += [
            f"  {name}: no tensor of the release becomes it"
            for name in sorted(found.missing_keys & needed - self._tied.keys())
        ]
        problems += [f"  {name}: {str(why).splitlines()[-1]}" for name, why in sorted(found.conversion_errors.items())]
        if problems:
            more = [f"  … and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
            listed = "\n".join([*problems[:SHOWN], *more])
            raise Refused(
                f"{self.side.where}: {count(len(problems), 'parameter')} of transformers' {type(self.model).__name__} can't be filled:\n{listed}"
            )

    def _load(self, tensors: dict[str, Any], config: Any) -> Any:
        """Has transformers make parameters of tensors; what came of it."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        return convert_and_load_state_dict_in_model(self.model, tensors, config, None)[0]

    def _fill(self, group: Group, args: tuple[Any, ...]) -> None:
        """Reads the tensors of a group."""
        rows = self._rows(group, args)
        tensors = {name: _Slice(self.side.tensors[name], self.dtype, rows) for name in self._sources[group.name]}
        self._load(tensors, self._loading)
        for target, source in self._tied.items():
            if target in group.names and source not in group.names and self._parameter(target).is_meta:
                self._set(target, self._parameter(source))
                self._set(source, self._parameter(source).to("meta"))
        if lacking := [name for name in group.names if self._parameter(name).is_meta]:
            raise Failed(f"  {self.side.where}: transformers made no {', '.join(lacking[:SHOWN])} of its tensors")
        self.done += 0 if rows else group.nbytes
        self.layer += group in self.layers

    def _rows(self, group: Group, args: tuple[Any, ...]) -> list[int] | None:
        """The rows of an embedding that are read; None of anything else."""
        if not self._is_embedding(group) or not args:
            return None
        padding = self.model.get_submodule(group.name).padding_idx
        return sorted({*args[0].flatten().tolist(), *([] if padding is None else [padding])})

    def _free(self, group: Group) -> None:
        """Lets go of the parameters of a group, unless it is an embedding, which is a few rows."""
        if self._is_embedding(group):
            return
        for name in group.names:
            self._set(name, self._parameter(name).to("meta"))
        trim_heaps()  # else it takes 30 MB more with each layer of 67 MB

    def _parameter(self, name: str) -> torch.Tensor:
        module, _, own = name.rpartition(".")
        return getattr(self.model.get_submodule(module), own)

    def _set(self, name: str, value: torch.Tensor) -> None:
        import torch

        path, _, own = name.rpartition(".")
        module = self.model.get_submodule(path)
        is_parameter = own in module._parameters
        setattr(module, own, torch.nn.Parameter(value, requires_grad=False) if is_parameter else value)


def _note(seen: dict[str, np.ndarray], key: str, made: Any) -> None:
    """Notes what a module made of one text's tokens: (1, token, embed) or (1, token, stream, embed), perhaps with more
    behind it.
    """
    values = made[0] if isinstance(made, tuple) else made
    if getattr(values, "ndim", 0) in (3, 4) and len(values) == 1:
        seen[key] = _to_numpy(values[0])


def _note_input(seen: dict[str, np.ndarray], module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Notes what enters the first layer."""
    _note(seen, EMBEDDING, args[0] if args else kwargs.get("hidden_states"))


def _layers_said(config: Mapping[str, Any]) -> int:
    """How many layers `config.json` says the model has, which transformers makes before any tensor is looked for."""
    held: list[Any] = [config, *(config.get(section) for section in ("text_config", "thinker_config"))]
    said = [section.get("num_hidden_layers") for section in held if isinstance(section, dict)]
    return max((layers for layers in said if isinstance(layers, int)), default=0)


def _on_meta(side: Side, dtype: str) -> Any:
    """A release's model without weights; what isn't stored, such as the frequencies of its RoPE, is computed. Raises
    Refused where transformers hasn't it.
    """
    import torch
    import transformers

    kind = str(side.config.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        raise Refused(
            f"{side.where}: config.json says model_type={kind!r}, and transformers {transformers.__version__} has no such model"
        )
    if (layers := _layers_said(side.config)) > len(side.tensors):
        raise Refused(f"{side.where}: config.json says num_hidden_layers={layers:,}, of {len(side.tensors):,} tensors")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(_plain(side.config))
        made = getattr(transformers, model_class(side.config))
        make = made.from_config if made.__name__.startswith("Auto") else made._from_config
        with torch.device("meta"):
            model = make(config, dtype=getattr(torch, dtype))
    except MemoryError:
        raise
    except Exception as e:  # another's code, on a file of anybody's
        said = printable(str(e) or type(e).__name__, MAX_MESSAGE)
        raise Refused(f"{side.where}: transformers can't make a model of its config.json: {said}") from e
    for module in model.modules():
        if unsaved := module._non_persistent_buffers_set:
            for name in unsaved & {name for name, value in module._buffers.items() if value is not None}:
                module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
            model._init_weights(module)
    return model.eval()


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what says how the weights are stored: they come as values."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in QUANTIZATIONS
    }


def _to_numpy(values: torch.Tensor) -> np.ndarray:
    return values.float().numpy().copy()
