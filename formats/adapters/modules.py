"""Where the weight of a module lies in the files: transformers holds the experts of a layer in two parameters, releases
often in a tensor each.

`experts.gate_up_proj` and `experts.down_proj` in memory are `experts.7.gate_proj.weight`, … in the files, or the other
way round where an adapter is of transformers v4 and the files are fused (huggingface/transformers,
conversion_mapping.py, v5.23.0).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from weightbeam.formats.encodings import Encoding
from weightbeam.formats.encodings.quantizing import CONV1D_MODELS
from weightbeam.model_mappings.family import rename

PARAMETERS = ("gate_up_proj", "down_proj")  # of fused experts, in the order in which a module defines them
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # of one expert: gate, up, down
# in memory and in files, those of LLaVA's and Mistral 3's kind last (transformers 5.23, conversion_mapping.py)
SPELLINGS = (
    ("", ""), (".mlp.", ".block_sparse_moe."), (".block_sparse_moe.", ".mlp."), ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."), ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)  # fmt: skip
# The same of some models, by `model_type`: elsewhere these names could be meant otherwise.
_QWEN_VL = (("model.language_model.", "model."), ("model.visual.", "visual."))
_GRANITE = (
    (".experts.gate_up_proj", ".input_linear.weight"), (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
)  # fmt: skip
SPELLINGS_OF: Mapping[str, tuple[tuple[str, str], ...]] = {
    "qwen2_vl": _QWEN_VL, "qwen2_5_vl": _QWEN_VL, "mllama": (("model.vision_model.", "vision_model."),),
    "phimoe": ((".mlp.router.", ".block_sparse_moe.gate."),), "gpt_neox": (("lm_head.", "embed_out."),),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE),
}  # fmt: skip

# By `model_type`. Fused experts whose parameters are (expert, in, out) in memory; else they are (expert, out, in).
IN_OUT = frozenset({"gpt_oss", "llama4", "llama4_text"})
# Those of the hub's files, which transformers turns around where they differ from memory.
IN_OUT_FILES = IN_OUT | {"qwen3_vl_moe", "qwen3_vl_moe_text"}
# Those that transformers marks `is_transposed`, which PEFT asks for.
MARKED = frozenset({"gpt_oss"})
# Modules of transformers' class Conv1D, whose weights are (in, out), by the last word of their names; PEFT turns around what
# it adds to these and to no others, whatever fan_in_fan_out says (peft, tuners/lora/model.py, `_create_new_module`, 0.21.2).
CONV1D = frozenset({"c_attn", "q_attn", "c_proj", "c_fc"})

EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d{1,6})\.(?P<projection>\w+)")


@dataclasses.dataclass(frozen=True)
class WeightPart:
    """A part of a module's weight, and the tensor that holds it.

    Attributes:
      tensor: its name.
      expert: for a tensor of one expert, which of the module's it is; for a module of one expert, which of the
        tensor's; else None.
      row: the output of the module at which the tensor begins; negative where the module begins within the tensor.
      outputs: of a module that is a part of the tensor, how many it has.
    """

    tensor: str
    expert: int | None = None
    row: int = 0
    outputs: int | None = None


class ModuleFiles:
    """The tensors of the files by the names of modules in memory.

    Attributes:
      encodings: by the names of a family's table.
      aliases: of that family.
      model_type: of `config.json`.
      tied: the embedding by the head that is tied to it.
    """

    def __init__(
        self,
        encodings: Mapping[str, Encoding],
        aliases: Mapping[str, str],
        model_type: str,
        tied: Mapping[str, str] | None = None,
    ):
        self.encodings, self.aliases, self.model_type, self.tied = encodings, aliases, model_type, tied or {}

    def find(self, name: str) -> str | None:
        """The tensor of this name, however it is spelled; of a tied head the embedding, whether the files hold the head or
        not.
        """
        named = self._spelled(name)
        return next((tensor for one in named if (tensor := self.tied.get(one, one)) in self.encodings), None)

    def _spelled(self, name: str) -> Iterator[str]:
        for theirs, ours in (*SPELLINGS, *SPELLINGS_OF.get(self.model_type, ())):
            yield rename(name.replace(theirs, ours) if theirs else name, self.aliases)

    def is_tied_head(self, name: str) -> bool:
        """Whether a weight is of a head that is the embedding."""
        return any(one in self.tied for one in self._spelled(name))

    def places(self, module: str) -> list[WeightPart]:
        """Where the weight of a module lies; none where no tensor has its name."""
        if tensor := self.find(f"{module}.weight"):
            return [WeightPart(tensor)]
        match = EXPERT.fullmatch(module)
        fused = {name: at for names in PROJECTIONS for name, at in zip(names, ("gate", "up", "down"), strict=True)}
        if match is None or (projection := fused.get(match["projection"])) is None:
            return []
        tensor = self.find(f"{match['experts']}.{PARAMETERS[projection == 'down']}")
        if tensor is None or len(self.encodings[tensor].shape) != 3:
            return []
        outputs = self.encodings[tensor].shape[2 if self.is_in_out(tensor) else 1]
        if projection != "down":
            outputs //= 2
        return [WeightPart(tensor, int(match["expert"]), -outputs if projection == "up" else 0, outputs)]

    def places_of_parameter(self, module: str, parameter: str) -> list[WeightPart]:
        """Where a parameter of a module lies, such as fused experts; none where no tensor has its name."""
        if tensor := self.find(f"{module}.{parameter}"):
            return [WeightPart(tensor)]
        if parameter not in PARAMETERS:
            return []
        for names in PROJECTIONS:
            parts = names[:2] if parameter == PARAMETERS[0] else names[2:]
            found = list(self._of_experts(module, parts))
            if found:
                return found
        return []

    def _of_experts(self, module: str, projections: tuple[str, ...]) -> Iterator[WeightPart]:
        expert = 0
        while all(tensors := [self.find(f"{module}.{expert}.{projection}.weight") for projection in projections]):
            row = 0
            for tensor in filter(None, tensors):
                yield WeightPart(tensor, expert, row)
                row += self.encodings[tensor].shape[0]
            expert += 1

    def is_turned(self, module: str) -> bool:
        """Whether a module that isn't of experts has a weight of (in, out), other than a linear layer."""
        return self.model_type in CONV1D_MODELS and module.rpartition(".")[2] in CONV1D

    def is_in_out(self, tensor: str) -> bool:
        """Whether fused experts are (expert, in, out) in the files. Both of a layer tell it by their shapes: Qwen 3 VL's are
        so on the hub, and (expert, out, in) where transformers 5 has written them.

            (expert, out, in)    gate_up_proj (E, 2 F, D)    down_proj (E, D, F)
            (expert, in, out)    gate_up_proj (E, D, 2 F)    down_proj (E, F, D)
        """
        module = tensor.rpartition(".")[0]
        both = [self.encodings[name].shape for part in PARAMETERS if (name := f"{module}.{part}") in self.encodings]
        if [len(shape) for shape in both] == [3, 3]:
            (_, *gate_up), (_, rows, columns) = both
            if gate_up in ([2 * columns, rows], [columns, 2 * rows]):
                return gate_up == [columns, 2 * rows]
        return self.model_type in IN_OUT_FILES
