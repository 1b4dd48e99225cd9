"""What an entry in the table of formats says: which tensors are codes, which belong to them, and how they become an
encoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weightbeam.formats.encodings.encoding import Encoding
from weightbeam.formats.encodings.quantization import Quantization
from weightbeam.formats.safetensors import BoxRead, Tensor, read_boxes
from weightbeam.model_mappings.boxes import whole

# bytes of a tensor that is read while the plan is made; the largest that anyone writes has a few hundred
MAX_READ = 1 << 16


class MismatchError(ValueError):
    """Tensors that belong together don't fit together; the message says what was expected and what was found."""


class UnknownBlockError(MismatchError):
    """Nothing says how large the blocks of a weight are."""


@dataclasses.dataclass(frozen=True)
class Companion:
    """A tensor that belongs to the codes and holds no weights by itself.

    Attributes:
      suffix: what its name has in place of the codes' suffix.
      dtypes: those it may have; another makes the format not fit.
      required: whether the format needs it.
      telling: whether any name with this suffix is such a tensor. `_scale` isn't telling: models have weights whose
        names end like that. It is one behind `weight` only (`weight_scale`).
    """

    suffix: str
    dtypes: frozenset[np.dtype]
    required: bool = True
    telling: bool = False


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """The tensors of one quantised weight, as a format's `make` gets them.

    Attributes:
      name: the weight's logical name.
      codes: the tensor with the codes.
      companions: those that are there, by their suffix.
      quantization: what the checkpoint says about it.
    """

    name: str
    codes: Tensor
    companions: Mapping[str, Tensor]
    quantization: Quantization

    def __getitem__(self, suffix: str) -> Tensor:
        return self.companions[suffix]

    def get(self, suffix: str) -> Tensor | None:
        """A companion that the format doesn't require.

        Args:
          suffix: of it, as its `Companion` has it.

        Returns:
          The tensor; None where the weight has none.
        """
        return self.companions.get(suffix)

    @staticmethod
    def read(tensor: Tensor) -> np.ndarray:
        """A small tensor's values, where a shape can't be known without them. It is read while the plan is made: use it
        sparingly.

        Args:
          tensor: the codes' or a companion's, of at most `MAX_READ` bytes.

        Returns:
          Its values, in its dtype and shape.

        Raises:
          MismatchError: it can't be read, is empty, or is larger than anything that is meant.
        """
        if not 0 < tensor.nbytes <= MAX_READ:
            raise MismatchError(f"{tensor.name} has {tensor.nbytes:,} bytes; 1 to {MAX_READ:,} can be meant")
        try:
            return read_boxes([BoxRead(tensor, whole(tensor.shape))])[0][0]
        except OSError as e:
            raise MismatchError(
                f"{tensor.name}, without which the weight's shape isn't known, can't be read: {e}"
            ) from e


@dataclasses.dataclass(frozen=True)
class QuantizedFormat:
    """An entry in the table of formats.

    A tensor is of this format if its dtype is one of `dtypes`, its name ends in `suffix`, and all required companions
    are there with the dtypes they may have. Where several entries fit, the one with the most companions is meant; if
    that isn't one alone, the checkpoint is refused.

    Attributes:
      name: for messages, and for the manual's table.
      suffix: of the tensor with the codes; may be empty.
      dtypes: of the codes.
      companions: see `Companion`.
      make: the encoding; raises MismatchError where the parts don't fit together.
      logical: what stands in the weight's name in place of `suffix`.
      releases: who publishes it, for the manual's table.
      methods: the `quant_method`s that may go with it; empty for any.
      in_blocks: whether its scales may lie in blocks of a size that the shapes don't tell (`fp8.find_block`).

    Example:
      >>> from weightbeam.formats.encodings.encoding import Plain
      >>> eighths = QuantizedFormat(
      ...     name="eighths",
      ...     suffix="weight_q",  # up.weight_q holds the codes of up.weight
      ...     logical="weight",
      ...     dtypes=dtypes(np.int8),
      ...     companions=(Companion("unit", dtypes(np.float32)),),  # and up.unit belongs to them
      ...     make=lambda parts: Plain(parts.codes),  # a real one gives an Encoding of codes and parts["unit"]
      ...     methods=("eighths",),
      ... )
      >>> [companion.suffix for companion in eighths.companions if companion.required]
      ['unit']
    """

    name: str
    suffix: str
    dtypes: frozenset[np.dtype]
    companions: tuple[Companion, ...]
    make: Callable[[QuantizedTensor], Encoding]
    logical: str = ""
    releases: str = ""
    methods: tuple[str, ...] = ()
    in_blocks: bool = False


def dtypes(*names: Any) -> frozenset[np.dtype]:
    """A set of dtypes.

    Args:
      names: whatever numpy takes for one, such as "uint8" or `ml_dtypes.float8_e4m3fn`.

    Returns:
      The set, for `QuantizedFormat` and `Companion`.
    """
    return frozenset(np.dtype(name) for name in names)
