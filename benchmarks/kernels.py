"""The kernels on one core: decoding to bfloat16, and the copies that transpose.

    python -m benchmarks.kernels --json benchmarks/results.json

Each kernel alternates with a memcpy of as many bytes as it reads, in the same process, which is pinned to one core; the
medians count. Input, output and the copy's target are touched before. Rates are bytes read: packed codes and their
scales, or the array.

What is expected of them: FP8 400 MB/s, 4 bits 150 MB/s, and of a copy a third of memcpy. numpy has no instruction that
transposes, and moves one element after the other, three or four a nanosecond at best: of 2 bytes each that is 6 to 8
GB/s where memcpy has 25.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.figures import Figure, make_parser, report
from weightbeam.formats.encodings import Encoding, Scaled
from weightbeam.formats.encodings.bitsandbytes import BlockCodes, Nested, ScaledRows8
from weightbeam.formats.encodings.gptq import Awq, Gptq
from weightbeam.formats.encodings.packed import PackedRows
from weightbeam.formats.safetensors import Tensor
from weightbeam.model_mappings.boxes import extent, whole
from weightbeam.transforms.execution.stack import copy

ROWS, COLUMNS = 2048, 7168  # outputs and inputs of an expert of DeepSeek-V3 and Kimi-K2
FP8_RATE, FOUR_BIT_RATE, COPY_SHARE = 400e6, 150e6, 1 / 3
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Something to measure.

    Attributes:
      name: for the table.
      nbytes: it reads.
      run: does it once.
      rate: bytes a second that are expected; None for none.
      share: of memcpy's rate that is expected; None for none.
    """

    name: str
    nbytes: int
    run: Callable[[], object]
    rate: float | None = None
    share: float | None = None


def random(shape: tuple[int, ...], dtype: Any, low: float = 0.001, high: float = 0.02) -> np.ndarray:
    """Integers of all bits, or floats of a range."""
    rng = np.random.default_rng(0)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu" or dtype == ml_dtypes.float8_e4m3fn:
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    return rng.uniform(low, high, shape).astype(dtype)


def tensor(name: str, dtype: Any, *shape: int) -> Tensor:
    """A tensor of no file."""
    return Tensor(name, np.dtype(dtype), shape, "", 0)


def decoding(name: str, encoding: Encoding, rate: float | None, **given: np.ndarray) -> Kernel:
    """Decodes a whole tensor to bfloat16, as the stage does: from what was read, into memory that is there.

    Args:
      name: for the table.
      encoding: with tensors of no file.
      rate: expected.
      given: what its tensors hold, by their names; others are random.
    """
    box = whole(encoding.shape)
    stored = [
        given[read.tensor.name] if read.tensor.name in given else random(extent(read.box), read.tensor.dtype)
        for read in encoding.reads(box)
    ]
    memory = np.zeros(ROWS * COLUMNS, BF16)
    return Kernel(
        f"{name} → bfloat16",
        sum(array.nbytes for array in stored),
        lambda: encoding.decode(stored, box, BF16, lambda shape, dtype: memory.reshape(shape)),
        rate,
    )


def decoders() -> Iterator[Kernel]:
    """Every format with a kernel of its own, and the usual sizes of groups."""
    scales = tensor("scale", np.float32, -(-ROWS // 128), -(-COLUMNS // 128))
    codes = tensor("codes", ml_dtypes.float8_e4m3fn, ROWS, COLUMNS)
    yield decoding("FP8, blocks of 128 × 128", Scaled(codes, "float8_e4m3fn", scales, (128, 128), ""), FP8_RATE)

    nibbles = tensor("codes", np.uint8, ROWS, COLUMNS // 2)
    mx = tensor("scale", ml_dtypes.float8_e8m0fnu, ROWS, COLUMNS // 32)
    powers = np.random.default_rng(0).integers(110, 130, mx.shape).astype(np.uint8).view(mx.dtype)
    yield decoding("MXFP4", Scaled(nibbles, "e2m1", mx, (1, 32), ""), FOUR_BIT_RATE, scale=powers)
    nv, second = tensor("scale", ml_dtypes.float8_e4m3fn, ROWS, COLUMNS // 16), tensor("second", np.float32, 1, 1)
    blocks = random(nv.shape, np.float32, 1, 400).astype(nv.dtype)
    yield decoding("NVFP4", Scaled(nibbles, "e2m1", nv, (1, 16), "", second=second), FOUR_BIT_RATE, scale=blocks)

    words = tensor("codes", np.int32, ROWS, COLUMNS // 8)
    for group, zero in ((32, None), (128, tensor("zero", np.int32, ROWS // 8, COLUMNS // 128))):
        scale = tensor("scale", BF16, ROWS, COLUMNS // group)
        name = f"int4, groups of {group}" + (" and zeros" if zero else "")
        yield decoding(name, PackedRows(words, scale, (ROWS, COLUMNS), 4, group, zero=zero), FOUR_BIT_RATE)

    scale, zero = tensor("scale", np.float16, COLUMNS // 128, ROWS), tensor("zero", np.int32, COLUMNS // 128, ROWS // 8)
    sevens = np.full(zero.shape, 0x77777777, np.int32)
    order = np.random.default_rng(0).permutation(COLUMNS).astype(np.int32) // 128
    down, index = tensor("codes", np.int32, COLUMNS // 8, ROWS), tensor("index", np.int32, COLUMNS)
    yield decoding("GPTQ, 4 bits, groups of 128", Gptq(down, scale, zero, 4, 128), FOUR_BIT_RATE, zero=sevens)
    yield decoding(
        "GPTQ, in the activations' order",
        Gptq(down, scale, zero, 4, 128, index, ordered=False),
        FOUR_BIT_RATE,
        zero=sevens,
        index=order,
    )
    yield decoding(
        "AWQ, groups of 128", Awq(tensor("codes", np.int32, COLUMNS, ROWS // 8), scale, zero, 128), FOUR_BIT_RATE
    )

    count = ROWS * COLUMNS // 64
    nested = Nested(tensor("meant", np.float32, 256), tensor("scales", np.float32, count // 256), 256, 0.5)
    quant_map, absmax = tensor("quant_map", np.float32, 16), tensor("absmax", np.uint8, count)
    flat = tensor("codes", np.uint8, ROWS * COLUMNS // 2, 1)
    yield decoding(
        "nf4, magnitudes in 8 bits",
        BlockCodes(flat, (ROWS, COLUMNS), "nf4", quant_map, absmax, 64, nested),
        FOUR_BIT_RATE,
    )
    yield decoding(
        "LLM.int8()", ScaledRows8(tensor("codes", np.int8, ROWS, COLUMNS), tensor("absmax", np.float32, ROWS)), None
    )


def copies() -> Iterator[Kernel]:
    """The copies of `transforms/execution/stack.py` that change the order of axes."""
    ways: dict[str, tuple[tuple[int, int], Callable[[np.ndarray], np.ndarray]]] = {
        "transpose of 4096 × 4096": ((4096, 4096), lambda a: a.T),
        "transpose of 7168 × 2048": ((7168, 2048), lambda a: a.T),
        "2048 × 128 heads of 64, by head": ((2048, 8192), lambda a: a.reshape(2048, 128, 64).transpose(1, 0, 2)),
        "128 heads of 64 × 2048, the query": ((8192, 2048), lambda a: a.reshape(128, 64, 2048).transpose(2, 0, 1)),
        "the same, rotary halves paired": ((8192, 2048), lambda a: a.reshape(128, 2, 32, 2048).transpose(3, 0, 2, 1)),
    }
    for dtype in (BF16, np.dtype(np.float32)):
        for name, (shape, view) in ways.items():
            source = view(random(shape, dtype))
            target = np.zeros(source.shape, dtype)
            run = lambda source=source, target=target: copy(source, target)  # noqa: E731
            yield Kernel(f"{name}, {dtype.name}", source.nbytes, run, share=COPY_SHARE)


def measure(kernel: Kernel, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figure of a kernel, and the rate of a memcpy of the bytes that it reads."""
    source, target = np.ones(kernel.nbytes, np.uint8), np.zeros(kernel.nbytes, np.uint8)
    seconds: dict[str, list[float]] = {"kernel": [], "memcpy": []}
    for _ in range(rounds + 1):
        for name, run in (("kernel", kernel.run), ("memcpy", lambda: np.copyto(target, source))):
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    ours, memcpy = (kernel.nbytes / statistics.median(taken[1:]) for taken in seconds.values())  # the first warms up
    wanted = kernel.rate if kernel.rate else kernel.share * memcpy if kernel.share else None
    because = f"{kernel.share:.2f} × memcpy" if kernel.share else ""
    figure = Figure(kernel.name, "", ours / 1e6, "MB/s", wanted and wanted / 1e6, because, at_least=True)
    return [figure], {"bytes": kernel.nbytes, "memcpy_bytes_per_second": memcpy}


def main() -> None:
    """Measures all kernels and prints the table."""
    args = make_parser(__doc__, None, layers=None, rounds=15).parse_args()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    figures, details = list[Figure](), dict[str, Any]()
    for kernel in itertools.chain(decoders(), copies()):
        more, details[kernel.name] = measure(kernel, args.rounds)
        figures += more
    os.sched_setaffinity(0, cores)  # the report counts them
    report("kernels", figures, details, args)


if __name__ == "__main__":
    main()
