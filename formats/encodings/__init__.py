"""How the values of a tensor are stored: as they are, or quantised.

An encoding says which boxes of which stored tensors a box of values needs, and decodes them. The tables of the families
never see it. Values are computed in float32 and cast once.

    encoding.py      what an encoding is
    nibbles.py       the kernel: bytes of codes, a scale for each group
    scaled.py        FP8, FP4, int8: codes with a scale for each block
    packed.py        integers in 32-bit words, and compressed-tensors' `pack-quantized`
    gptq.py          GPTQ and AWQ
    bitsandbytes.py  nf4, fp4 and LLM.int8()
    format.py        what an entry in the table of formats says
    fp8.py, fp4.py   entries
    quantization.py  `quantization_config`
    table.py         the table of formats, what is dropped, and what is refused by name
    matching.py      which tensors belong together

To add a format, write an encoding, or use `Scaled`, and a `QuantizedFormat`, and put it into the `FORMATS` of its
module. The entry names the suffix and the dtypes of the tensor with the codes and the companions that belong to it, and
has a `make` that checks shapes and returns the encoding, or raises `MismatchError`. A new module is listed in
`table.py`. `matching.py` does the rest: it finds the parts, refuses codes without scales and scales without codes, and
collects all problems.
"""

from weightbeam.formats.encodings.encoding import (
    ContentError,
    Encoding,
    Overhead,
    Plain,
    Read,
    StoredArray,
    Transposed,
    stored_bytes,
    values_dtype,
)
from weightbeam.formats.encodings.nibbles import ScaleError
from weightbeam.formats.encodings.scaled import Scaled

__all__ = [
    "ContentError", "Encoding", "Overhead", "Plain", "Read", "ScaleError", "Scaled", "StoredArray", "Transposed",
    "stored_bytes", "values_dtype",
]  # fmt: skip
