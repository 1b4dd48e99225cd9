"""Checkpoints as safetensors files: strict headers (`header`), single or sharded with an index (`folder`), and reads of
boxes (`reading`).
"""

from weightbeam.formats.safetensors.folder import (
    AWQ_CONFIG,
    CONFIGS,
    GPTQ_CONFIG,
    HF_QUANT_CONFIG,
    INDEX,
    QUANT_CONFIGS,
    SINGLE,
    HfCheckpoint,
    Shard,
    is_release,
    open_hf,
    open_shard,
    view,
)
from weightbeam.formats.safetensors.header import DTYPE_NAMES, DTYPES, MAX_HEADER, HeaderError, Tensor, read_header
from weightbeam.formats.safetensors.reading import Allocate, BoxRead, read_boxes

__all__ = [
    "AWQ_CONFIG", "CONFIGS", "DTYPES", "DTYPE_NAMES", "GPTQ_CONFIG", "HF_QUANT_CONFIG", "INDEX", "MAX_HEADER",
    "QUANT_CONFIGS", "SINGLE", "Allocate", "BoxRead", "HeaderError", "HfCheckpoint", "Shard", "Tensor", "is_release",
    "open_hf", "open_shard", "read_boxes", "read_header", "view",
]  # fmt: skip
