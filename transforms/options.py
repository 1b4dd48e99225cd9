"""The options of a conversion and their defaults. Imports nothing: the command line's `--help` doesn't wait for it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for, as far as it changes a byte or a chunk's key. `weightbeam convert --help` explains each."""

    scan_layers: bool = True
    param_scan_axis: int = 1
    save_dtype: str = "bfloat16"
    mesh: tuple[str, ...] = ()
    # what the file says; None for MaxText's own
    sharding_rules: tuple[tuple[str, str | tuple[str, ...] | None], ...] | None = None
    maxtext_model: str | None = None
    vocab_size: int | None = None
    mtp: bool = False
    multimodal: bool = False
    use_ocdbt: bool = True
    use_zarr3: bool = True
    compression: str = "none"
    unit_bytes: int = 128 << 20
    step: int = 0
    virtual: bool = False
    family: str | None = None
    check_source: str = "auto"  # whether the source's files are read for their known hashes
    allow_links: bool = False  # files of the source that are links to elsewhere
    lora: tuple[tuple[str, float], ...] = ()  # adapters to merge: URL, and what their deltas are multiplied by
    adapter_only: bool = False  # the adapter as MaxText's, not merged
    full_paths: bool | None = None  # how sources are named in what is published, see `formats/naming.py`
