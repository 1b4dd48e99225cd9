"""Fuzzing of headers and indexes. An input is a kind and some bytes; `check_input` is what must hold of every one.

    python tests/fuzz_header.py -max_total_time=600 -dict=tests/corpus/tokens.dict tests/corpus/inputs

needs atheris (not among the project's dependencies); new inputs go to the folder. `tests/formats/test_hostile.py`
checks those that are kept.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

try:
    import atheris
except ImportError:  # the tests use `check_input` without it
    atheris = None
if atheris and __name__ == "__main__":
    with atheris.instrument_imports(
        include=["weightbeam.formats.safetensors", "weightbeam.formats.storage.strict_json", "json", "json.decoder"]
    ):
        from weightbeam.formats.safetensors import HeaderError, open_hf, read_header
else:
    from weightbeam.formats.safetensors import HeaderError, open_hf, read_header

INDEX = "model.safetensors.index.json"
RAW, HEADER, SHARDS = b"\0", b"\1", b"\2"  # the kinds: a whole file, a header to which a file is made, an index
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # or half a character: no message may have one
MAX_DATA = 10_000  # bytes that a file gets behind a header

# Where we refuse what the library lets pass: what our message says, and why.
STRICTER = {
    "stands twice": "duplicate keys: the library keeps one of them",
    "is empty, has control characters": "names that do harm on terminals and in paths",
    "isn't a list of at most 32 sizes": "a rank that numpy can't hold",
    "an entry has dtype, shape and data_offsets": "fields that the format doesn't have",
    "unknown dtype 'F4'": "elements of less than a byte",
    "unknown dtype 'F6_": "elements of less than a byte",
    "unknown dtype {": "a dtype is a string; the library reads an object with null too, as its derived parser happens to",
    "doesn't start with '{'": "the format says that it does; the library allows spaces in front",
    "more than 5,000,000 values": "bounded memory",
}


def file_of(data: bytes) -> bytes:
    """The file that an input stands for."""
    kind, rest = data[:1], data[1:]
    if kind == RAW:
        return rest
    numbers = [int(digits) for digits in re.findall(rb"\b(\d{1,5})\s*\]", rest)]  # the ends of tensors are among them
    return struct.pack("<Q", len(rest)) + rest + bytes(max((n for n in numbers if n <= MAX_DATA), default=0))


def check_input(data: bytes, folder: Path) -> str:
    """Raises where an input is treated wrongly; returns what became of it, without numbers.

    A header is refused by a `HeaderError`, or read as the safetensors library reads it; what the library refuses is
    refused, and what it lets pass is refused for a reason in `STRICTER` only. An index is a matter of `problems` and of
    files inside the folder.
    """
    return check_index(data[1:], folder) if data[:1] == SHARDS else check_header(file_of(data), folder)


def check_header(content: bytes, folder: Path) -> str:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    try:
        read = {tensor.name: tensor for tensor in read_header(str(path))}
    except HeaderError as e:
        message = str(e)
        assert not CONTROL.search(message), ascii(message)
        if not any(words in message for words in STRICTER) and library(content) is not None:
            raise AssertionError(f"the library reads what we refuse: {message}") from e
        return re.sub(r"[\d,]+|'.*'|[^ ]*: .*", "*", message)
    wanted = library(content)
    assert wanted is not None, "the library refuses what we read"
    start = len(content) - sum(tensor.nbytes for tensor in read.values())
    assert wanted == {
        name: (list(tensor.shape), content[tensor.offset : tensor.offset + tensor.nbytes])
        for name, tensor in read.items()
    }
    assert all(tensor.offset >= start for tensor in read.values())
    return f"{len(read)} tensors"


def library(content: bytes) -> dict[str, tuple[list[int], bytes]] | None:
    """Shapes and bytes as the safetensors library reads them; None where it refuses the file."""
    try:
        return {name: (list(found["shape"]), bytes(found["data"])) for name, found in deserialize(content)}
    except SafetensorError:
        return None


def make_shards(folder: Path) -> None:
    """Two files that an index may name."""
    for name in "ab":
        save_file({name: np.zeros(3, np.float32)}, folder / f"{name}.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')


def check_index(content: bytes, folder: Path) -> str:
    shards = folder / "shards"
    if not shards.exists():
        shards.mkdir()
        make_shards(shards)
    (shards / INDEX).write_bytes(content)
    checkpoint = open_hf(shards)
    assert {shard.path for shard in checkpoint.shards} <= {str(shards / f"{name}.safetensors") for name in "ab"}
    for problem in checkpoint.problems:
        assert not CONTROL.search(str(problem)), ascii(str(problem))
    if not checkpoint.problems:
        assert json.loads(content)["weight_map"] == {
            tensor.name: shard.name for shard in checkpoint.shards for tensor in shard.tensors
        }
    return " ".join(sorted({problem.kind for problem in checkpoint.problems})) or "good"


def seeds() -> list[bytes]:
    """Good inputs to start from."""
    x = '{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}'
    y = '{"dtype":"U8","shape":[4],"data_offsets":[24,28]}'
    texts = ["{}", f'{{"x":{x}}}', f'{{"x":{x},"y":{y}}}  ', f'{{"__metadata__":{{"format":"pt"}},"x":{x}}}']
    texts += [
        '{"x":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}',
        f'{{"z":{{"dtype":"I8","shape":[0,3],"data_offsets":[0,0]}},"x":{x}}}',
    ]
    indexes = [
        '{"metadata":{},"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}',
        '{"weight_map":{"a":"b.safetensors","../c":"../c.safetensors"}}',
    ]
    return (
        [HEADER + text.encode() for text in texts]
        + [SHARDS + text.encode() for text in indexes]
        + [RAW + file_of(HEADER + texts[2].encode())]
    )


def main(arguments: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        atheris.Setup(list(arguments), lambda data: check_input(data, Path(folder)))
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
