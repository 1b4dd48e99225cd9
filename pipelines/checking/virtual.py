"""Virtual checkpoints at the terminal: what a plan says of them, and whether the files that one refers to are still
those it was made of.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.orbax import record_of
from weightbeam.formats.orbax.references import Reference, encode_leaf
from weightbeam.formats.record.naming import is_name
from weightbeam.formats.release.cutting import cut_release
from weightbeam.formats.safetensors import HfCheckpoint, open_hf
from weightbeam.formats.staging.links import SOURCE, SYMBOLIC, find_changes, identities
from weightbeam.formats.storage import StorageError, Store
from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.plan import PARAMETERS, Array
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.tables import Block, Table, count, human, shape_text
from weightbeam.transforms.cutting.virtual import loads_of, percent
from weightbeam.transforms.planning.conversion import Conversion


def placement_blocks(conversion: Conversion) -> Iterator[Block]:
    """A line for each kind of array, and totals."""
    total, grids = conversion.target_bytes, {grid.spec.key: grid for grid in conversion.grids}
    groups: dict[tuple, list[Array]] = defaultdict(list)
    for array, placement in zip(conversion.plan.arrays, conversion.placements, strict=True):
        groups[pattern(array.key), array.shape, placement.reason, grids[array.key].spec.chunk].append(array)
    rows = Table("array", "bytes are", "chunk", ">arrays", ">share", "why", spare=("chunk", "arrays"))
    for (_, _, reason, chunk), arrays in groups.items():
        name = arrays[0].key.removeprefix(PARAMETERS) + (" …" if len(arrays) > 1 else "")
        nbytes = sum(array.nbytes for array in arrays)
        kind = "written" if reason else "the source's"
        rows.add_row(name, kind, shape_text(chunk), str(len(arrays)), percent(nbytes, total), reason)
    yield from ("", rows)
    references = list(conversion.references())
    virtual = sum(placement.spec is not None for placement in conversion.placements)
    totals = Table("", "")
    totals.add_row(
        "virtual",
        f"{count(virtual, 'array')} of {len(conversion.placements):,}, {percent(conversion.virtual_bytes, total)} of the bytes",
    )
    totals.add_row(
        "written",
        f"{human(conversion.made_bytes)} in arrays, and an index of about {human(index_bytes(references))} for {count(len(references), 'chunk')}",
    )
    for mesh, load in loads_of(conversion.grids, conversion.meshes).items():
        totals.add_row(
            f"on {mesh}", f"{load.mean:.2f} bytes are read for each byte that a host needs, at worst {load.worst:.2f}"
        )
    yield from ("", totals)


def index_bytes(references: Sequence[Reference]) -> int:
    """About what references take in a checkpoint's database, which is compressed."""
    return len(zlib.compress(encode_leaf(sorted(references, key=lambda reference: reference.key)).data, level=1))


def json_report(conversion: Conversion) -> dict[str, Any]:
    """What `weightbeam plan --virtual --json` adds to the plan; see `docs/howto/virtual.md`."""
    if not conversion.placements:
        return {}
    why = {
        array.key: placement.reason or None
        for array, placement in zip(conversion.plan.arrays, conversion.placements, strict=True)
    }
    references = list(conversion.references())
    sizes = {"virtual": conversion.virtual_bytes, "written": conversion.made_bytes, "index": index_bytes(references)}
    loads = {
        mesh: {"mean": load.mean, "worst": load.worst}
        for mesh, load in loads_of(conversion.grids, conversion.meshes).items()
    }
    return {"virtual": {"arrays": why, "bytes": sizes, "references": len(references), "amplification": loads}}


def is_virtual(items: Store) -> bool:
    """Whether a checkpoint says that it refers to files of its source."""
    return bool(identities(record_of(items)))


def check_files(items: Store) -> str:
    """Makes sure that the files which a checkpoint refers to are those that it was made of; says what they are, nothing
    if it isn't virtual.

    Raises:
      Failed: some aren't, or can't be told.
    """
    files = identities(record_of(items))
    if changes := find_changes(items, files):
        raise Failed("\n".join(f"  {change}" for change in changes))
    if not files:
        return ""
    moved = sum(file.is_moved(items / SOURCE) for file in files)
    copies = f"; {moved} are copies made since, known by size and some bytes" if moved else ""
    return f"{count(len(files), 'file')} of the source that the checkpoint refers to: as when it was made, by size, times and some bytes{copies}"


def open_own_source(items: Store, family: str | None) -> tuple[HfCheckpoint, str]:
    """The source of a virtual checkpoint, or what was taken of it: its own folder, or where its links lead; and what
    `check_files` says. Opened first, and then compared: a file that comes to lie there later is another one than was
    opened, which is noticed before anything is published.

    Args:
      items: the checkpoint.
      family: the table that the command names, if any.

    Raises:
      Refused: the folder that the links lead to isn't what it was.
      Failed: see `check_files`.
      StorageError: its source can't be opened.
    """
    try:
        opened = _open(items, family)
    except (Refused, StorageError):
        check_files(items)  # which knows what has become of them
        raise
    return opened, check_files(items)


def _open(items: Store, family: str | None) -> HfCheckpoint:
    """The source of a virtual checkpoint, whose files may have changed.

    Raises:
      Refused, StorageError: see `open_own_source`.
    """
    record = record_of(items)
    files = {file.name: file for file in identities(record)}
    if all(file.link != SYMBOLIC for file in files.values()):
        return _taken(open_hf(items / SOURCE), record, family)
    where = record["source"]
    if is_name(where):  # which leads nowhere; the links do
        name = next(iter(files))
        where = os.path.realpath((items / SOURCE).path(name)).removesuffix(f"/{name}")
    try:
        checkpoint = open_hf(where)
    except StorageError as e:
        raise Refused(f"  {e}; the links in {items / SOURCE} lead there") from e
    checkpoint = _taken(checkpoint, record, family)
    found = {shard.name: (shard.size, shard.version, shard.inode) for shard in checkpoint.shards}
    if changed := sorted(
        found.items() ^ {name: (file.size, file.version, file.inode) for name, file in files.items()}.items()
    ):
        raise Refused(f"  {checkpoint.root}/{changed[0][0]} isn't the file that the checkpoint was made of")
    return checkpoint


def with_hashes(release: HfCheckpoint, record: Mapping[str, Any]) -> HfCheckpoint:
    """The source of a virtual checkpoint with the hashes that the record has of its files."""
    known = {file.name: file for file in identities(record)}
    shards = (
        dataclasses.replace(shard, sha256=known[shard.name].sha256, crc32c=known[shard.name].crc32c)
        for shard in release.shards
    )
    return dataclasses.replace(release, shards=tuple(shards))


def _taken(release: HfCheckpoint, record: Mapping[str, Any], family: str | None) -> HfCheckpoint:
    """What was taken of a release. Its `config.json` is the record's: where files are missing of which nothing was taken,
    nobody can tell any more whether they had layers for prediction.
    """
    made = cut_release(release, Cut.of(record.get("options"), family))
    return dataclasses.replace(made, config=record["config"], edits={}) if made.cut else made
