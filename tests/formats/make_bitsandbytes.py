"""Writes `bitsandbytes.safetensors`: what bitsandbytes makes of small weights, and what it dequantises them to.

    pip install bitsandbytes==0.50.2
    python tests/formats/make_bitsandbytes.py

The tensors of a case `c` are `c/x.weight`, its companions under the names that `Linear4bit` and `Linear8bitLt` give
them in a state dict, and `c/values`. It runs on the CPU, but not with the CPU's own kernel: that one (0.50.2, with
AVX-512) begins a new block with each row, and is far off where rows aren't whole blocks, as bitsandbytes' quantiser and
its other kernels have it not.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from safetensors.torch import save_file

FOUR_BITS = {
    "nf4": dict(shape=(33, 65), quant_type="nf4", blocksize=64),
    "nf4 nested": dict(shape=(60, 576), quant_type="nf4", blocksize=64, compress_statistics=True),
    "nf4 nested, as bfloat16": dict(
        shape=(24, 96), quant_type="nf4", blocksize=128, compress_statistics=True, quant_storage=torch.bfloat16
    ),
    "fp4": dict(shape=(17, 128), quant_type="fp4", blocksize=64),
    "fp4 nested, as float32": dict(
        shape=(4, 6, 80), quant_type="fp4", blocksize=32, compress_statistics=True, quant_storage=torch.float32
    ),
}


def main() -> None:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for case, options in FOUR_BITS.items():
        packed, state = bnb.quantize_4bit(torch.randn(options.pop("shape")) * 0.05, **options)
        tensors[f"{case}/x.weight"] = packed
        tensors |= {f"{case}/x.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        magnitudes = (
            bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
        )
        octets = packed.view(torch.uint8).reshape(-1)
        tensors[f"{case}/values"] = _dequantize_4bit_compute(
            octets, magnitudes, state.code, state.blocksize, state.shape, torch.float32
        )
    codes, scales, _ = bnb.int8_vectorwise_quant((torch.randn(19, 70) * 0.05).half())
    layout = torch.tensor(0, dtype=torch.uint8)
    tensors |= {
        "int8/x.weight": codes,
        "int8/x.SCB": scales,
        "int8/x.weight_format": layout,
        "int8/values": bnb.int8_vectorwise_dequant(codes, scales),
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        Path(__file__).with_name("bitsandbytes.safetensors"),
    )


if __name__ == "__main__":
    main()
