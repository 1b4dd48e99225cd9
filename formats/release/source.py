"""The checkpoint as the tables see it: views over the stored tensors, raw -> dequantised.

A view takes the companions of a quantised tensor (its scales) out of sight and shows the tensor under its own name with
its logical shape. What can't be paired is a problem: no weight is ever used without its scale. Which tensors belong
together is told by their names and dtypes (`encodings/matching.py`); `quantization_config` must agree, and settles what
headers can't tell.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.adapters import Merging
from weightbeam.formats.adapters.merged import MergedWeight, Replaced, Shifted
from weightbeam.formats.encodings import ContentError, Encoding, Plain, Scaled, stored_bytes
from weightbeam.formats.encodings.format import UnknownBlockError
from weightbeam.formats.encodings.fp8 import find_block
from weightbeam.formats.encodings.made_codes import MadeCodes, MadeScales
from weightbeam.formats.encodings.matching import (
    SourceError,
    check_method,
    check_names,
    find_matches,
    logical_names,
    make_encoding,
    make_plain,
    why_dropped,
)
from weightbeam.formats.encodings.quantization import Quantization
from weightbeam.formats.encodings.quantizing import BLOCK, is_linear
from weightbeam.formats.encodings.scaled import KeptScales
from weightbeam.formats.encodings.table import KEPT_MODULES, known
from weightbeam.formats.safetensors import BoxRead, HfCheckpoint, read_boxes
from weightbeam.formats.storage import StorageError
from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.family import rename
from weightbeam.model_mappings.keeping import NO_CODES, NOT_SQUARE, ONE_SCALE
from weightbeam.model_mappings.plan import Problem, TensorSpec
from weightbeam.model_mappings.scales import CODES, TENSOR_SUFFIX, in_square

# of biases that are read while the plan is made; those of a model of 72 billion parameters take 4 MB
MAX_SPARE_BYTES = 1 << 26
SAMPLE_BYTES, SAMPLE_ROWS = 1 << 16, 4  # read of a tensor that should be a copy of another one, while the plan is made
ZEROS = "zeros that AutoGPTQ stores for layers without a bias"


@dataclasses.dataclass(frozen=True)
class ReleaseTensors:
    """The logical tensors of a checkpoint.

    Attributes:
      encodings: how each is stored.
      problems: quantised tensors that can't be decoded.
      dropped: tensors of the quantisation that no weight needs, with the reason.
      lost: the weights that problems stand against; they aren't missing.
      blocks: of each weight that stays codes (`as_codes`), the elements on each axis that share a scale.
      biases: the fields of `config.json` that say that layers have biases, such as `attention_bias`.
    """

    encodings: Mapping[str, Encoding]
    problems: tuple[Problem, ...]
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    blocks: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    biases: tuple[str, ...] = ()

    def specs(self) -> dict[str, TensorSpec]:
        """What the tables see: a quantised tensor's values are float32."""
        return {name: _spec(name, encoding) for name, encoding in self.encodings.items()}

    def check_config(self, config: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
        """How `config.json` contradicts the quantised tensors: where other loaders take codes for values, and what a
        person should know.
        """
        quantization, problems = Quantization.of(config), [*Quantization.check(config)]
        coded = [name for name, one in self.encodings.items() if one.label is not None]
        # under another name the codes would be missed, not mistaken
        mistaken = [name for name in coded if self.encodings[name].weight.name == name]
        if config and mistaken and not quantization.fields and not problems:
            label, more = self.encodings[mistaken[0]].label, _and_more(mistaken)
            message = (
                f"is {label}{more}, but config.json has no quantization_config: transformers takes the codes for values "
                "then; give it the one of the release that the tensors are from"
            )
            problems.append(Problem("quantised", mistaken[0], message))
        warnings = []
        if quantization.fields and self.encodings and not (coded or problems or self.problems):
            said = f"{quantization.file} has {quantization.place}"
            warnings.append(f"{said}, but none of the weights is quantised; they are taken as they are")
        field = KEPT_MODULES.get(quantization.method or "", "modules_to_not_convert")
        kept = quantization.fields.get(field)
        kept = tuple(f"{module}." for module in kept if module) if isinstance(kept, list) else ()
        if odd := [name for name in coded if f"{name}.".startswith(kept)]:
            said = f"{quantization.place} says that it isn't ({field})"
            warnings.append(f"{odd[0]} is {self.encodings[odd[0]].label}{_and_more(odd)}, but {said}; it is decoded")
        return problems, warnings

    def renamed(self, aliases: Mapping[str, str]) -> ReleaseTensors:
        """The same tensors under the names of a family's table; two that would get one name are a problem."""
        encodings: dict[str, Encoding] = {}
        problems = list(self.problems)
        for given, encoding in self.encodings.items():
            name = rename(given, aliases)
            if name in encodings:
                problems.append(
                    Problem("overlap", given, f"another spelling of {encodings[name].weight.name}, which is there too")
                )
            encodings.setdefault(name, encoding)
        lost = frozenset(rename(name, aliases) for name in self.lost)
        return dataclasses.replace(self, encodings=encodings, problems=tuple(problems), lost=lost)

    def merged(self, merging: Merging) -> ReleaseTensors:
        """The same tensors with adapters merged into them."""
        return dataclasses.replace(self, encodings=merging.encodings, problems=(*self.problems, *merging.problems))

    def quantized(self, unneeded: Callable[[str], object]) -> ReleaseTensors:
        """The same tensors with codes and scales made of each weight of a linear layer, as `weightbeam quantize` makes
        them, and of fused experts of any shape: MaxText loads those.

        Args:
          unneeded: whether a tensor is left out.
        """
        needed = {name: one for name, one in self.encodings.items() if not unneeded(name)}
        problems = [
            Problem("quantised", name, f"is {one.label}; --quantize takes values as they are stored")
            for name, one in needed.items()
            if one.label is not None
        ]
        linear = {
            name: one.weight
            for name, one in needed.items()
            if one.label is None and is_linear(name, one.weight.dtype, one.shape)
        }
        if not linear and not problems:
            problems.append(Problem("quantised", "config.json", "it has no linear layer that FP8 is for"))
        codes = {name: MadeCodes(weight) for name, weight in linear.items()}
        scales = {name + TENSOR_SUFFIX: MadeScales(weight) for name, weight in linear.items()}
        blocks = {name: in_square(len(weight.shape), BLOCK[0]) for name, weight in linear.items()}
        return dataclasses.replace(
            self,
            encodings={**self.encodings, **codes, **scales},
            blocks={**self.blocks, **blocks},
            problems=(*self.problems, *problems),
        )

    def as_codes(self, unneeded: Callable[[str], object]) -> ReleaseTensors:
        """The same tensors with two in place of each quantised one: its codes, under its name, and its scales.

        Args:
          unneeded: whether a tensor is left out, and may be stored in any way.
        """
        encodings, blocks, problems = dict(self.encodings), dict(self.blocks), list(self.problems)
        wanted = {name: one for name, one in self.encodings.items() if one.label is not None and not unneeded(name)}
        for name, one in wanted.items():
            if isinstance(one, Scaled) and one.square:
                encodings |= {name: Plain(one.weight), name + TENSOR_SUFFIX: KeptScales(one.scale)}
                blocks[name] = one.block
            else:
                problems.append(Problem("blocks", name, f"is {one.label}; {_without_place(one)}"))
        sizes = {block[-1] for block in blocks.values()}
        if len(sizes) > 1:
            message = f"blocks of {' and '.join(map(str, sorted(sizes)))}; MaxText's weight_block_size is one for all"
            problems.append(Problem("blocks", "config.json", message))
        if not wanted:
            message = (
                f"none of its weights is quantised, so none can be kept as {CODES}; --quantize fp8 makes codes of them"
            )
            problems.append(Problem("blocks", "config.json", message))
        return dataclasses.replace(self, encodings=encodings, blocks=blocks, problems=tuple(problems))

    def drop_zero_biases(self, unused: Iterable[str]) -> tuple[dict[str, str], list[Problem]]:
        """Reads the biases of weights among tensors that a table has no use for, and drops those that are all zeros:
        AutoGPTQ stores them where the model has none (AutoGPTQ/AutoGPTQ#555), and who dequantises may keep them.

        Returns:
          The reason for each that is dropped, and a problem for each of the others that lies beside codes.
        """
        tensors = {name: self.encodings[name].weight for name in unused if self._is_spare(name)}
        coded = [name for name in tensors if (weight := self._weight_of(name)) and weight.label is not None]
        what = "a bias that the table has no place for"
        if (nbytes := sum(tensor.nbytes for tensor in tensors.values())) > MAX_SPARE_BYTES:
            message = f"{what}; {nbytes:,} bytes of such are too many to see whether all are zeros"
            return {}, [Problem("unused", name, message) for name in coded]
        try:
            values = read_boxes([BoxRead(tensor, whole(tensor.shape)) for tensor in tensors.values()])[0]
        except (OSError, StorageError) as e:
            message = f"{what}; if it isn't {ZEROS} can't be told: {e}"
            return {}, [Problem("unused", name, message) for name in coded]
        dropped = {name: ZEROS for name, held in zip(tensors, values, strict=True) if not held.any()}
        message = f"{what}, and that isn't {ZEROS}"
        return dropped, [Problem("unused", name, message) for name in coded if name not in dropped]

    def _is_spare(self, name: str) -> bool:
        """Whether a tensor is the bias of a weight, and may be one that the model has no use for."""
        weight = self._weight_of(name) if name.endswith(".bias") else None
        if weight is None or weight.shape[:1] != self.encodings[name].shape:
            return False
        return weight.label is not None or not self.biases

    def _weight_of(self, bias: str) -> Encoding | None:
        return self.encodings.get(f"{bias.removesuffix('.bias')}.weight")

    def find_unlike(self, copies: Mapping[str, str]) -> dict[str, str]:
        """Reads a sample of tensors that should be copies of others, and of those: `SAMPLE_BYTES` at most of each, from
        its first row to its last.

        Args:
          copies: what each should be a copy of.

        Returns:
          How each that isn't one differs, in words.
        """
        return {
            copy: how
            for copy, original in copies.items()
            if (found := self.encodings.get(copy)) is not None and (wanted := self.encodings.get(original)) is not None
            if (how := _unlike(found, wanted))
        }


def _unlike(found: Encoding, wanted: Encoding) -> str:
    """How a sample of one matrix differs from the other's, in words; empty where it doesn't."""
    if found.shape != wanted.shape or len(found.shape) != 2:
        return f"its shape is {found.shape}, and {wanted.shape} there"
    if found.label is not None:
        return f"it is {found.label}, so that it can't be compared"
    rows, columns = found.shape
    row_bytes = max(1, -(-max(map(stored_bytes, (found, wanted))) // max(1, rows)))
    width = max(1, min(columns, columns * SAMPLE_BYTES // (SAMPLE_ROWS * row_bytes)))
    for row in sorted({(rows - 1) * number // (SAMPLE_ROWS - 1) for number in range(SAMPLE_ROWS)}):
        box = ((row, row + 1), (0, width))
        try:
            one, other = (
                encoding.decode(read_boxes(encoding.reads(box))[0], box, np.dtype(np.float32)).astype(np.float64)
                for encoding in (found, wanted)
            )
        except (OSError, ContentError) as e:
            if isinstance(e, FileNotFoundError) or isinstance(e.__cause__, FileNotFoundError):
                return ""  # headers alone are there, and whatever is made of the files will fail
            return f"can't be compared: {e}"
        if not np.array_equal(one, other, equal_nan=True):
            return f"row {row:,} of {rows:,} differs, for example"
    return ""


def _and_more(names: Sequence[str]) -> str:
    return f", and {len(names) - 1:,} more" if len(names) > 1 else ""


def _spec(name: str, encoding: Encoding) -> TensorSpec:
    is_stored = encoding.label is None or isinstance(encoding, MadeCodes | MadeScales)
    dtype = encoding.weight.dtype if is_stored else np.dtype(np.float32)
    file = encoding.weight.path.rpartition("/")[2]
    stored = encoding.weight.name
    return TensorSpec(encoding.shape, dtype, file if stored == name else f"{file} (as {stored})", encoding.label)


def _without_place(encoding: Encoding) -> str:
    """Why a weight that isn't stored as its values can't stay codes."""
    if isinstance(encoding, MergedWeight | Shifted | Replaced):
        return "what an adapter makes of it has no codes until weightbeam quantize makes some"
    if not isinstance(encoding, Scaled) or not encoding.has_codes:
        return NO_CODES
    return ONE_SCALE if encoding.block[-2:] == encoding.shape[-2:] else NOT_SQUARE


def open_source(checkpoint: HfCheckpoint) -> ReleaseTensors:
    """The views over a checkpoint, with everything that stands against them."""
    tensors = checkpoint.tensors
    quantization = Quantization.of(checkpoint.config)
    matches = {
        name: found for name, tensor in tensors.items() if (found := find_matches(tensor, tensors, quantization))
    }
    quantization, unknown = find_block(
        quantization, (parts for found in matches.values() for entry, parts in found if entry.in_blocks)
    )
    claimed = {part.name for found in matches.values() for _, parts in found for part in parts.companions.values()}
    problems = [*unknown, *known().problems, *check_method(quantization, matches)]
    problems += Quantization.contradictions(checkpoint.config) if matches else ()
    problems += check_names(tensors, claimed | matches.keys())
    is_quantized = bool(matches or quantization.fields)
    told = quantization if is_quantized else None

    encodings: dict[str, Encoding] = {}
    dropped: dict[str, str] = {}
    lost: set[str] = set()
    for name, tensor in tensors.items():
        if name in claimed:
            continue
        if is_quantized and (reason := why_dropped(name)):
            dropped[name] = reason
            continue
        logical = matches[name][0][1].name if name in matches else name
        try:
            encoding = (
                make_encoding(matches[name], quantization) if name in matches else make_plain(tensor, tensors, told)
            )
        except UnknownBlockError as e:
            lost.add(logical)
            if not unknown or not matches[name][0][0].in_blocks:  # else one problem for all of them is there already
                problems.append(Problem("scale", name, str(e)))
        except SourceError as e:
            lost |= {logical, *logical_names(tensor)}
            problems.append(Problem(e.kind, name, str(e)))
        else:
            if logical in encodings:
                problems.append(Problem("overlap", name, f"holds {logical}, as {encodings[logical].weight.name} does"))
            encodings.setdefault(logical, encoding)
    return ReleaseTensors(encodings, tuple(problems), dropped, frozenset(lost), biases=_biases(checkpoint.config))


def _biases(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of `config.json`, and of the objects in it, that say there are biases."""
    sections = [config, *(each for each in config.values() if isinstance(each, Mapping))]
    said = (key for section in sections for key, value in section.items() if key.endswith("bias") and value is True)
    return tuple(dict.fromkeys(said))


def stored_tensors(checkpoint: HfCheckpoint, source: ReleaseTensors, names: Iterable[str]) -> dict[str, set[str]]:
    """The stored tensors of each quantised weight: those that it is decoded from, and others that lie below its name."""
    ordered = sorted(checkpoint.tensors.keys() - source.encodings.keys())

    def stored(name: str) -> set[str]:
        encoding = source.encodings[name]
        read = {part.tensor.name for part in encoding.reads(whole(encoding.shape)) if isinstance(part, BoxRead)}
        prefix = f"{name.removesuffix('.weight')}."
        after = (ordered[at] for at in range(bisect.bisect_left(ordered, prefix), len(ordered)))
        below = itertools.takewhile(lambda other: other.startswith(prefix), after)
        return {*read, *below, encoding.weight.name}

    return {name: stored(name) for name in names}
