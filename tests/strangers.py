"""Orbax items of any form, as a stranger's program may have written them: TensorStore writes what stock Orbax doesn't."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from weightbeam.formats.orbax import ocdbt
from weightbeam.formats.storage import open_store

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
    usual = {
        "chunk_shape": list(chunk),
        "codecs": list(codecs),
        "index_codecs": [LITTLE, CRC],
        "index_location": "end",
    }
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
