"""Orbax items of any form, as a stranger's program may have written them: TensorStore writes what stock Orbax doesn't."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import zstandard

from weightbeam.formats.orbax import ocdbt, references
from weightbeam.formats.orbax.database_size import NODE_MAGIC
from weightbeam.formats.storage import LocalFolder, open_store

NAMES = {"zarr": ".zarray", "zarr3": "zarr.json"}
LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
BIG: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "big"}}
CRC: dict[str, Any] = {"name": "crc32c"}
# settings of databases that TensorStore writes for others: its own, and what else each of them may be
# (google/tensorstore, tensorstore/kvstore/ocdbt/schema.yml)
DATABASES: dict[str, dict[str, Any]] = {
    "TensorStore's own": {},
    "nothing inline": {"max_inline_value_bytes": 0},
    "all inline": {"max_inline_value_bytes": 1 << 20},
    "small nodes": {"max_decoded_node_bytes": 500},
    "versions in small nodes": {"version_tree_arity_log2": 1},
    "not compressed": {"compression": None},
    "compressed further": {"compression": {"id": "zstd", "level": 9}},
    "numbered manifests": {"manifest_kind": "numbered"},
}


def tree(keys: Iterable[str], use_ocdbt: bool = False, use_zarr3: bool = False) -> dict[str, Any]:
    """`_METADATA` of these arrays."""
    entries = {}
    for key in keys:
        path = key.split(".")
        entries[str(tuple(path))] = {
            "key_metadata": [{"key": name, "key_type": 2} for name in path],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    return {"tree_metadata": entries, "use_ocdbt": use_ocdbt, "use_zarr3": use_zarr3}


def zarr2(values: np.ndarray, **other: Any) -> dict[str, Any]:
    """`.zarray` of an array in one chunk, with some fields changed."""
    usual = {
        "zarr_format": 2,
        "shape": list(values.shape),
        "chunks": list(values.shape),
        "dtype": values.dtype.str,
        "compressor": None,
        "filters": None,
        "order": "C",
        "fill_value": None,
        "dimension_separator": ".",
    }
    return usual | other


def zarr3(values: np.ndarray, codecs: Iterable[Mapping[str, Any]] = (LITTLE,), **other: Any) -> dict[str, Any]:
    """`zarr.json` of an array in one chunk, with some fields changed."""
    usual = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(values.shape),
        "data_type": values.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(values.shape)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": list(codecs),
        "fill_value": 0,
    }
    return usual | other


def sharded(chunk: Iterable[int], codecs: Iterable[Mapping[str, Any]] = (LITTLE,), **other: Any) -> dict[str, Any]:
    """The codec of shards."""
    usual = {"chunk_shape": list(chunk), "codecs": list(codecs), "index_codecs": [LITTLE, CRC], "index_location": "end"}
    return {"name": "sharding_indexed", "configuration": usual | other}


def item(
    folder: Path,
    arrays: Mapping[str, tuple[np.ndarray, Mapping[str, Any]]],
    use_ocdbt: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """An item of arrays, each of values and what zarr says of them; a step's folder is around it. `config`: the settings
    of its database, where they aren't those of Orbax.
    """
    folder.mkdir(parents=True)
    base: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    if use_ocdbt:
        ours = ocdbt.written_database(open_store(folder))
        base = ours if config is None else {"driver": "ocdbt", "base": base, "config": dict(config)}
    driver = "zarr3"
    for key, (values, about) in arrays.items():
        driver = "zarr3" if about["zarr_format"] == 3 else "zarr"
        kvstore = {**base, "path": f"{base.get('path', '')}{key}/"}
        spec = {"driver": driver, "kvstore": kvstore, "metadata": dict(about)}
        opened = ts.open(spec, create=True, context=ocdbt.context()).result()
        opened.write(values).result()
    (folder / "_METADATA").write_text(json.dumps(tree(arrays, use_ocdbt, driver == "zarr3")))
    return folder


def bare(folder: Path, about: Mapping[str, Any], key: str = "params.params.w") -> Path:
    """An item of one array that is described, and isn't there."""
    (folder / key).mkdir(parents=True)
    is_zarr3 = about["zarr_format"] == 3
    (folder / key / NAMES["zarr3" if is_zarr3 else "zarr"]).write_text(json.dumps(about))
    (folder / "_METADATA").write_text(json.dumps(tree([key], use_zarr3=is_zarr3)))
    return folder


varints = references._varints


def database_of(items: Path, *nodes: bytes, height: int = 0) -> Path:
    """An item's database of one file, whose nodes hold these bytes; the last is its root. Decompressed, a node has a
    height, a table of files, and keys (google/tensorstore, tensorstore/kvstore/ocdbt/index.rst).
    """
    place, ends = LocalFolder(str(items)), [0]
    stored = []
    for node in nodes:
        packed = zstandard.compress(node)
        head = NODE_MAGIC.to_bytes(4, "big") + (len(packed) + 18).to_bytes(8, "little") + b"\0\1"
        stored.append(references._with_checksum(head + packed))
        ends.append(ends[-1] + len(stored[-1]))
    place.write("d/nodes", b"".join(stored))
    root = {
        "location": f"btreenode::d/nodes:{ends[-2]}:{len(stored[-1])}",
        "statistics": {"num_indirect_value_bytes": 1, "num_keys": 1, "num_tree_bytes": len(stored[-1])},
    }
    version = {"commit_time": 1, "generation_number": 1, "root_height": height, "root": root}
    config = ocdbt.CONFIG | {"uuid": "0" * 32, "compression": {"id": "zstd"}, "version_tree_arity_log2": 4}
    del config["manifest_kind"]
    told = {"config": config, "version_tree_nodes": [], "versions": [version]}
    place.write("manifest.ocdbt", ts.ocdbt.undump_manifest(told))
    return items


def node_of(keys: int, length: int, files: int = 0, height: int = 0, below: tuple[int, int] = (0, 0)) -> bytes:
    """A node of so many keys, or children, of so many letters, the last six of which differ; its table names so many
    files of as long names. Values are empty; all children are the node at one place, its offset and length in the file.
    """

    def texts(count: int, more: bytes = b"") -> bytes:
        shared = [0, *[length - 6] * max(count - 2, 0)][: max(count - 1, 0)]
        own = [b"!", b"a" * (length - 6) + b"%06d" % 1, *(b"%06d" % number for number in range(2, count))][:count]
        return varints(shared) + varints(map(len, own)) + more + b"".join(own)

    file = b"" if files else b"d/nodes"
    table = varints([files or 1]) + (texts(files, bytes(files)) if files else b"\7\0" + file)
    entries = varints([keys]) + texts(keys, varints([1, *[length] * (keys - 1)]) if height else b"")
    if height:
        offset, size = below
        numbers = [[0] * keys, [offset] * keys, [size] * keys, [1] * keys, [1] * keys, [0] * keys]
        values = b"".join(map(varints, numbers))
    else:
        values = bytes(keys) + bytes(keys)
    return bytes([height]) + table + entries + values
