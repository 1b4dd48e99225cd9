"""LoRA adapters, and weights with adapters in them. Below the tables: nothing above knows that a weight is merged.

    config.py   `adapter_config.json`: what changes a value, and what is refused by name
    adapter.py  a folder of PEFT's, its tensors by the modules they belong to
    modules.py  where the weight of a module in memory lies in the files
    delta.py    the product of two factors, as a part of a tensor
    ties.py     which head is the embedding, so that one change is both's
    merged.py   the encodings: a weight with its deltas, a bias, a whole tensor
    merging.py  adapters over the tensors of a checkpoint
    folding.py  an adapter as MaxText keeps one

Facts about the format are of huggingface/peft, version 0.21.2, unless another is named.
"""

from weightbeam.formats.adapters.adapter import Adapter, open_adapter
from weightbeam.formats.adapters.folding import Folding, fold
from weightbeam.formats.adapters.merging import Merging, merge

__all__ = ["Adapter", "Folding", "Merging", "fold", "merge", "open_adapter"]
