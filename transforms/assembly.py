"""The two ends of a conversion, without Beam: what is staged, and the checkpoint that is made of it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging

from weightbeam.formats.links import HARD, SOURCE, identify, put_source
from weightbeam.formats.orbax import Contents, assemble, plan_of
from weightbeam.formats.release import ARCHIVE, pack, small_files
from weightbeam.formats.staging import ITEMS, Staging
from weightbeam.formats.storage import StorageError, Store, open_store
from weightbeam.transforms.conversion import Conversion

LOGGER = logging.getLogger("weightbeam")


def stage(conversion: Conversion, staging: Staging, resume: bool, link: str = HARD, hashed: bool = False) -> bool:
    """Stages the plan, the release's small files, and with `--virtual` the source's files.

    Args:
      conversion: what to do; its plan has no problems.
      staging: where.
      resume: go on with what is staged there.
      link: how the source's files get there.
      hashed: read them once, so that their hashes are known.

    Returns:
      Whether anything is left to do but publishing.

    Raises:
      StorageError: the small files can't be read, or the source's files can't be put there so (LinkError); what was staged only
        now is removed.
    """
    if resume and plan_of(staging.checkpoint) == conversion.hash:
        return False
    resumed = resume and staging.is_staged()
    if resumed:
        staging.write_plan(conversion.stage())
    else:
        staging.create(conversion.stage())
    try:
        put_release(staging.checkpoint, open_store(conversion.checkpoint.root))
        if conversion.virtual_bytes:
            put_source(staging.items / SOURCE, conversion.checkpoint, link, hashed)
    except StorageError:
        if not resumed:
            staging.discard()
        raise
    return True


def put_release(step: Store, source: Store) -> None:
    """Packs a release's small files into the archive that lies with a checkpoint; those of a virtual checkpoint lie with that one.

    Raises:
      StorageError: one can't be read.
    """
    if (source.parent.name, source.name) == (ITEMS, SOURCE) and (virtual := source.parent.parent).exists(ARCHIVE):
        step.write(ARCHIVE, virtual.read(ARCHIVE))
        return
    files = small_files(source)
    for name, why in files.left.items():
        LOGGER.warning("%s isn't kept with the checkpoint: %s", source.path(name), why)
    with concurrent.futures.ThreadPoolExecutor(source.at_a_time) as pool:
        step.write(ARCHIVE, pack(dict(zip(files, pool.map(files.__getitem__, files), strict=True))))


def assemble_checkpoint(conversion: Conversion, staging: Staging, overwrite: bool) -> None:
    """Makes the published checkpoint of the units that are done and of the source's files.

    Raises:
      StorageError: the source changed meanwhile.
      ocdbt.IncompleteError: units are missing, or don't hold what they should.
    """
    conversion.check()
    record, references = conversion.record(), list(conversion.references())
    if references:
        files = identify(staging.items / SOURCE, conversion.checkpoint)
        arrays = sum(placement.spec is not None for placement in conversion.placements)
        about = {"arrays": arrays, "bytes": conversion.virtual_bytes, "chunks": len(references), "files": [dataclasses.asdict(file) for file in files]}
        record["references"] = about
    specs = [grid.spec for grid in conversion.grids]
    scan, folding = conversion.options.scan_layers, conversion.folding
    custom = {"lora": folding.metadata} if folding else {}
    contents = Contents(specs, conversion.format, len(conversion.units), scan, record, references, bare=folding is not None, custom=custom)
    assemble(staging, contents, overwrite)
