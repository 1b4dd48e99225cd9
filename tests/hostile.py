"""Bad inputs, each made by a small function: folders to refuse, headers that are large, and configs with one field
changed.

What `tests/formats/test_safetensors.py` and `tests/pipelines/test_errors.py` break isn't broken here a second time.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from facts import load_headers, tiny
from measured import measuring
from support import BF16, INDEX, LLAMA, make_release

from weightbeam.formats.safetensors import HF_QUANT_CONFIG, HfCheckpoint, Shard, Tensor
from weightbeam.model_mappings.plan import TensorSpec

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CONFIG = "config.json"


def good(folder: Path) -> Path:
    """A checkpoint of two files with nothing wrong."""
    return make_release(folder, files=2)


# --- folders ----------------------------------------------------------------------------------------------------------


def with_header(path: Path, header: bytes, data: int = 0) -> None:
    """Writes a file with this header and as many bytes of data, which take no space."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + data)


def one(name: str, dtype: str, shape: str, begin: int, end: int) -> str:
    """A header's entry, as text: shapes may be what JSON libraries don't write."""
    return f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def header(folder: Path, text: str, data: int = 0) -> None:
    with_header(folder / SECOND, text.encode("utf-8", "surrogatepass"), data)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Puts something else in a file's place."""
    path.unlink()
    make(path)


def listen(path: Path) -> None:
    """A socket in place of a file; its path is relative, since a socket's may have 107 bytes only."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


def rewrite(path: Path, **fields: Any) -> None:
    """Changes fields of a file of JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def reindex(folder: Path, **entries: Any) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    rewrite(folder / INDEX, weight_map=weight_map | entries)


def hub_cache(folder: Path, blob: Callable[[Path], object]) -> None:
    """The folder as a snapshot of a hub's cache, whose second file is a link to this blob."""
    snapshot = folder.parent / "models--org--name" / "snapshots" / "0123"
    (snapshot.parent.parent / "blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    (snapshot / SECOND).unlink()
    blob(snapshot.parent.parent / "blobs" / "b")
    (snapshot / SECOND).symlink_to("../../blobs/b")
    folder.symlink_to(snapshot)


def nested(depth: int, inner: str = "1") -> str:
    return '{"a":' * depth + inner + "}" * depth


def config_text(fields: str) -> str:
    """`config.json` with more fields, as text."""
    return json.dumps(LLAMA)[:-1] + "," + fields + "}"


FOLDERS: dict[str, Callable[[Path], object]] = {
    # Files that aren't regular ones, and links
    "a pipe for a shard": lambda f: replace(f / SECOND, os.mkfifo),
    "a pipe for the config": lambda f: replace(f / CONFIG, os.mkfifo),
    "a pipe for the index": lambda f: replace(f / INDEX, os.mkfifo),
    "a pipe for the quantisation": lambda f: os.mkfifo(f / HF_QUANT_CONFIG),
    "a pipe for a hub's blob": lambda f: hub_cache(f, os.mkfifo),
    "a folder for a hub's blob": lambda f: hub_cache(f, Path.mkdir),
    "a folder for a shard": lambda f: replace(f / SECOND, Path.mkdir),
    "a folder for the config": lambda f: replace(f / CONFIG, Path.mkdir),
    "a folder for the index": lambda f: replace(f / INDEX, Path.mkdir),
    "a socket for a shard": lambda f: replace(f / SECOND, listen),
    "a device for a shard": lambda f: replace(f / SECOND, lambda p: p.symlink_to("/dev/zero")),
    "a device for the config": lambda f: replace(f / CONFIG, lambda p: p.symlink_to("/dev/zero")),
    "a shard that is a link to itself": lambda f: replace(f / SECOND, lambda p: p.symlink_to(p.name)),
    "a config that is a link to itself": lambda f: replace(f / CONFIG, lambda p: p.symlink_to(p.name)),
    "an index that is a link to itself": lambda f: replace(f / INDEX, lambda p: p.symlink_to(p.name)),
    "a config that is a link to nowhere": lambda f: replace(f / CONFIG, lambda p: p.symlink_to("nowhere.json")),
    "an index that is a link to nowhere": lambda f: replace(f / INDEX, lambda p: p.symlink_to("nowhere.json")),
    "a config outside": lambda f: ((f / CONFIG).rename(f.parent / "c.json"), (f / CONFIG).symlink_to("../c.json")),
    "an index outside": lambda f: ((f / INDEX).rename(f.parent / "i.json"), (f / INDEX).symlink_to("../i.json")),
    "a shard through a linked folder": lambda f: (
        (f / SECOND).rename(f.parent / SECOND),
        (f / "up").symlink_to(".."),
        (f / SECOND).symlink_to(f"up/{SECOND}"),
    ),
    # Shards
    "a shard with a byte too many": lambda f: (f / SECOND).open("ab").write(b"\0"),
    "a shard with a terabyte too many": lambda f: os.truncate(f / SECOND, 1 << 40),
    "a shard without its data": lambda f: os.truncate(f / SECOND, 8 + struct.unpack("<Q", (f / SECOND).read_bytes()[:8])[0]),
    "a shard of zeros": lambda f: replace(f / SECOND, lambda p: p.write_bytes(bytes(1000))),
    "a shard that is the other one": lambda f: (f / SECOND).write_bytes((f / FIRST).read_bytes()),
    "a shard that is a zip file": lambda f: (f / SECOND).write_bytes(b"PK\x03\x04" + bytes(100)),
    "a shard that is GGUF": lambda f: (f / SECOND).write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1)),
    "a shard that is a web page": lambda f: (f / SECOND).write_text("<!DOCTYPE html><html><head><title>404</title></head></html>"),
    "all git-lfs pointers": lambda f: [p.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n") for p in f.glob("model*")],
    "a git-lfs pointer for the config": lambda f: (f / CONFIG).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"),
    # Headers
    "a header with a byte-order mark": lambda f: header(f, "\ufeff{}"),
    "a header in UTF-16": lambda f: with_header(f / SECOND, "{}".encode("utf-16-le")),
    "a header with a NUL behind it": lambda f: header(f, "{}\0"),
    "a header of half a million brackets": lambda f: header(f, "[" * 500_000),
    "a shape of lists within lists": lambda f: header(f, f"{{{one('x', 'F32', '[' * 900 + ']' * 900, 0, 0)}}}"),
    "an entry of objects within objects": lambda f: header(f, f'{{"x":{nested(900)}}}'),
    "metadata within metadata": lambda f: header(f, f'{{"__metadata__":{nested(900)}}}'),
    "a shape of a million sizes": lambda f: header(f, f"{{{one('x', 'F32', str([1] * 1_000_000), 0, 4)}}}", 4),
    "a header of six million values": lambda f: header(f, f"{{{one('x', 'F32', '[' + '0,' * 6_000_000 + '0]', 0, 0)}}}"),
    "a header of four million empty lists": lambda f: header(f, f"{{{one('x', 'F32', '[' + '[],' * 4_000_000 + '0]', 0, 0)}}}"),
    "a name of a megabyte": lambda f: header(f, f"{{{one('x' * 1_000_000, 'F33', '[1]', 0, 4)}}}", 4),
    "a dtype of a megabyte": lambda f: header(f, f"{{{one('x', 'F' * 1_000_000, '[1]', 0, 4)}}}", 4),
    "a shape whose product wraps to the right size": lambda f: header(f, f"{{{one('x', 'F32', f'[{2**33},{2**31},6]', 0, 0)}}}"),
    "a size of 2^63": lambda f: header(f, f"{{{one('x', 'U8', f'[{2**63}]', 0, 0)}}}"),
    "offsets beyond 2^63": lambda f: header(f, f"{{{one('x', 'U8', '[4]', 2**64, 2**64 + 4)}}}", 4),
    "offsets that are equal and far away": lambda f: header(f, f"{{{one('x', 'U8', '[0]', 10**9, 10**9)}}}"),
    "two tensors in the same bytes": lambda f: header(f, f"{{{one('x', 'U8', '[4]', 0, 4)},{one('y', 'U8', '[4]', 0, 4)}}}", 4),
    "a minus zero": lambda f: header(f, f"{{{one('x', 'U8', '[-0.0]', 0, 0)}}}"),
    "a size in e-notation": lambda f: header(f, f"{{{one('x', 'U8', '[1e0]', 0, 1)}}}", 1),
    "infinity": lambda f: header(f, f"{{{one('x', 'U8', '[Infinity]', 0, 0)}}}"),
    "an entry with a fourth field": lambda f: header(f, '{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":1}}'),
    "a name twice, once escaped": lambda f: header(f, f'{{{one("x", "U8", "[0]", 0, 0)},"\\u0078":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}'),
    "metadata twice": lambda f: header(f, '{"__metadata__":{},"__metadata__":{}}'),
    "metadata of null": lambda f: header(f, '{"__metadata__":null}'),
    "a 6-bit float": lambda f: header(f, f"{{{one('x', 'F6_E2M3', '[4]', 0, 3)}}}", 3),
    "a name with a NUL": lambda f: header(f, f"{{{one(chr(0), 'U8', '[0]', 0, 0)}}}"),
    "a name out of the folder, backwards": lambda f: header(f, "{" + one("..\\..\\x", "U8", "[0]", 0, 0) + "}"),
    "a 16 TB tensor in a file that is as long": lambda f: header(f, f"{{{one('x', 'U8', f'[{1 << 43}]', 0, 1 << 43)}}}", 1 << 43),
    # The index
    "an index that is empty": lambda f: (f / INDEX).write_text(""),
    "an index of nothing": lambda f: (f / INDEX).write_text("{}"),
    "an index in UTF-16": lambda f: (f / INDEX).write_bytes((f / INDEX).read_text().encode("utf-16")),
    "an index with a byte-order mark": lambda f: (f / INDEX).write_bytes(b"\xef\xbb\xbf" + (f / INDEX).read_bytes()),
    "an index without a map": lambda f: (f / INDEX).write_text('{"metadata":{}}'),
    "an index whose map is a list": lambda f: rewrite(f / INDEX, weight_map=[FIRST, SECOND]),
    "an index whose map is empty": lambda f: rewrite(f / INDEX, weight_map={}),
    "an index with a number for a file": lambda f: reindex(f, x=7),
    "an index with a list for a file": lambda f: reindex(f, x=[FIRST]),
    "an index with null for a file": lambda f: reindex(f, x=None),
    "an index with an empty file name": lambda f: reindex(f, x=""),
    "an index with an absolute path": lambda f: reindex(f, x="/etc/x.safetensors"),
    "an index with a path below": lambda f: reindex(f, x=f"sub/{FIRST}"),
    "an index with a Windows path": lambda f: reindex(f, x="..\\x.safetensors"),
    "an index with the folder itself": lambda f: reindex(f, x="."),
    "an index with a NUL in a file name": lambda f: reindex(f, x="a\0.safetensors"),
    "an index with a line break in a file name": lambda f: reindex(f, x="a\n.safetensors"),
    "an index with half a character in a file name": lambda f: reindex(f, x="\ud800.safetensors"),
    "an index with an escape sequence for a tensor": lambda f: reindex(f, **{"x\x1b[2J": FIRST}),
    "an index with half a character for a tensor": lambda f: reindex(f, **{"\ud800": FIRST}),
    "an index with a file name of 5000 letters": lambda f: reindex(f, x="a" * 5000 + ".safetensors"),
    "an index with a pickle": lambda f: reindex(f, x="pytorch_model.bin"),
    "an index with a tensor twice": lambda f: (f / INDEX).write_text(f'{{"weight_map":{{"x":"{FIRST}","x":"{SECOND}"}}}}'),
    "an index of 100,000 tensors": lambda f: reindex(f, **{f"x{i}": FIRST for i in range(100_000)}),
    "an index of ten thousand files": lambda f: reindex(f, **{f"x{i}": f"{i}.safetensors" for i in range(10_000)}),
    "an index of half a million brackets": lambda f: (f / INDEX).write_text("[" * 500_000),
    "an index nested 900 deep": lambda f: (f / INDEX).write_text(nested(900)),
    "an index of a terabyte": lambda f: os.truncate(f / INDEX, 1 << 40),
    # config.json
    "a config that is empty": lambda f: (f / CONFIG).write_text(""),
    "a config of null": lambda f: (f / CONFIG).write_text("null"),
    "a config in UTF-16": lambda f: (f / CONFIG).write_bytes((f / CONFIG).read_text().encode("utf-16")),
    "a config in UTF-32": lambda f: (f / CONFIG).write_bytes((f / CONFIG).read_text().encode("utf-32")),
    "a config with a byte-order mark": lambda f: (f / CONFIG).write_bytes(b"\xef\xbb\xbf" + (f / CONFIG).read_bytes()),
    "a config that isn't UTF-8": lambda f: (f / CONFIG).write_bytes(b'{"a": "\xff"}'),
    "a config of half a million brackets": lambda f: (f / CONFIG).write_text('{"a":' + "[" * 500_000),
    "a config nested 900 deep": lambda f: (f / CONFIG).write_text(config_text(f'"a":{nested(900)}')),
    "a config with a field twice": lambda f: (f / CONFIG).write_text(config_text('"vocab_size":65')),
    "a config of a terabyte": lambda f: os.truncate(f / CONFIG, 1 << 40),
    "a config of six million values": lambda f: (f / CONFIG).write_text(config_text('"a":[' + "0," * 6_000_000 + "0]")),
    "a config with 5000 digits": lambda f: (f / CONFIG).write_text(config_text('"a":' + "9" * 5000)),
    "a config that quotes a megabyte": lambda f: rewrite(f / CONFIG, hidden_size="8" * 1_000_000),
    "a config with an escape sequence": lambda f: rewrite(f / CONFIG, model_type="\x1b[2J"),
    "a config with half a character": lambda f: rewrite(f / CONFIG, model_type="\ud800"),
    "a config whose model_type is a list": lambda f: rewrite(f / CONFIG, model_type=["llama"]),
    "a config whose model_type is an object": lambda f: rewrite(f / CONFIG, model_type={}),
    "a config of 2000 layers of 100,000 experts": lambda f: rewrite(f / CONFIG, model_type="mixtral", num_hidden_layers=2000, num_local_experts=100_000),
    "a config of 10^30 layers": lambda f: rewrite(f / CONFIG, num_hidden_layers=10**30),
    "a config of sizes just below the limit": lambda f: rewrite(
        f / CONFIG, **dict.fromkeys(("hidden_size", "head_dim", "num_attention_heads", "vocab_size", "intermediate_size"), 2**31 - 1)
    ),
    "a quantisation of lists": lambda f: rewrite(f / CONFIG, quantization_config={"quant_method": [], "config_groups": {"a": {"format": []}}}),
    "a quantisation that isn't JSON": lambda f: (f / HF_QUANT_CONFIG).write_text("{"),
    "a quantisation that is a list": lambda f: (f / HF_QUANT_CONFIG).write_text("[]"),
    "a quantisation nested 900 deep": lambda f: (f / HF_QUANT_CONFIG).write_text(nested(900)),
    "a quantisation that is a link to nowhere": lambda f: (f / HF_QUANT_CONFIG).symlink_to("nowhere.json"),
}  # fmt: skip


# --- configs ----------------------------------------------------------------------------------------------------------

MISSING = object()
NAN, INFINITY = float("nan"), float("inf")
VALUES: tuple[Any, ...] = (
    MISSING,
    None,
    "8",
    "",
    -1,
    0,
    1.5,
    NAN,
    INFINITY,
    True,
    False,
    10**12,
    2**31 - 1,
    [],
    {},
    [None],
    {"a": {}},
)

Tensors = Mapping[str, TensorSpec]


def tiny_checkpoints() -> dict[str, tuple[dict[str, Any], Tensors]]:
    """A tiny checkpoint of every kind in the facts, `(config.json, tensors)` by name."""
    found = {name: (headers.config, headers.tensors) for name, headers in load_headers().items()}
    written = {
        name: (config, {tensor: TensorSpec(shape, BF16, "") for tensor, shape in tiny.shapes(config).items()})
        for name, config in tiny.CONFIGS.items()
    }
    return written | found


def checkpoint_of(config: dict[str, Any], tensors: Tensors) -> HfCheckpoint:
    """A checkpoint that is known by its headers, without a file."""
    held: list[Tensor] = []
    offset = 0
    for name, spec in tensors.items():
        held.append(Tensor(name, spec.dtype, spec.shape, "/nowhere/model.safetensors", offset))
        offset += held[-1].nbytes
    return HfCheckpoint(
        "/nowhere", config, (Shard("model.safetensors", "/nowhere/model.safetensors", offset, 0, tuple(held)),)
    )


def paths(value: Any, prefix: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The place of every field, and of the first element of every list."""
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, child in items:
        yield (*prefix, key)
        yield from paths(child, (*prefix, key))


def mutated(config: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The config with another value at one place."""
    changed = copy.deepcopy(config)
    parent: Any = changed
    for key in path[:-1]:
        parent = parent[key]
    if value is MISSING:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return changed


# --- running them -----------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything in a folder: kind, size and time of change. Links aren't followed."""
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {
        name: (stat.S_IFMT(at.st_mode), 0 if stat.S_ISDIR(at.st_mode) else at.st_size, at.st_mtime_ns)
        for name, at in found.items()
    }


def main(root: Path) -> None:
    """Plans and converts each bad folder; prints a line of JSON for each command."""
    sys.dont_write_bytecode = True
    with measuring() as measure:
        assert measure(["plan", "--source", good(root / "good")], root / "printed")["status"] == 0
        for name, damage in FOLDERS.items():
            place = root / "place"
            source = good(place / "hf")
            damage(source)
            before = snapshot(place)
            for command in ("plan", "convert"):
                told = measure(
                    [command, "--source", source, *(["--output", place / "out"] if command == "convert" else [])],
                    root / "printed",
                )
                print(
                    json.dumps(dict(name=name, command=command, untouched=snapshot(place) == before, **told)),
                    flush=True,
                )
            shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
