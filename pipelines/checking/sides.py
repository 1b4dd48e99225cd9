"""Which side is which: what is judged, and what it should be the result of."""

from __future__ import annotations

import contextlib
import shlex

from weightbeam.formats.orbax import find_items, record_of
from weightbeam.formats.orbax.source import open_orbax
from weightbeam.formats.record.naming import is_name, is_named
from weightbeam.formats.safetensors import is_release
from weightbeam.formats.storage import StorageError, Store, open_store
from weightbeam.formats.targets import published
from weightbeam.pipelines.checking.verification import diff_command
from weightbeam.pipelines.terminal.errors import Refused


def _is_there(checkpoint: str) -> bool:
    try:
        return find_items(checkpoint) is not None
    except (StorageError, OSError):
        return False


def source_of(items: Store) -> str:
    """The release that a checkpoint says it was made of.

    Raises:
      Refused: it doesn't say it.
    """
    record = record_of(items)
    if isinstance(source := record.get("source"), str):
        return source
    before = record.get("resharded_from")
    known = [before.get(name) for name in ("checkpoint", "first")] if isinstance(before, dict) else []
    if places := [place for place in known if isinstance(place, str)]:
        raise Refused(
            f"{items} was made of another checkpoint, and of no release that is known; compare it with that checkpoint, "
            f"or with a release:\n  {diff_command(next(filter(_is_there, places), places[0]), str(items))}\n"
            f"  weightbeam verify SOURCE {shlex.quote(str(items))}"
        )
    raise Refused(
        f"--source is missing: {items} doesn't say what it was made of; name the release that it should be, "
        f"or compare it with any checkpoint:\n  weightbeam verify SOURCE {shlex.quote(str(items))}\n  {diff_command('OTHER', str(items))}"
    )


def in_order(checkpoint: str, source: str | None) -> tuple[str, str | None]:
    """Checkpoint and source: a release that isn't an export, where the checkpoint should stand, is the source of what
    stands where it should.

    Raises:
      Refused: both are Orbax checkpoints.
    """
    with contextlib.suppress(StorageError):  # which is told where they are looked for
        if source and is_release(open_store(checkpoint)) and not is_release(open_store(source)):
            is_export = published.record_of(checkpoint).get("command") == "export"
            return (checkpoint, source) if is_export else (source, checkpoint)
        if source and not is_release(open_store(source)) and find_items(source) and find_items(checkpoint):
            raise Refused(
                f"{source} and {checkpoint} are both Orbax checkpoints, and verify compares one with the release that it was made of; "
                f"weightbeam diff compares any two:\n  {diff_command(source, checkpoint)}"
            )
    return checkpoint, source


def find_export(checkpoint: str, source: str | None) -> tuple[str, str] | None:
    """The release and the checkpoint it was exported of, where that is what should be judged, whichever is named first;
    else None.

    A release that stands where the checkpoint should is an export. One that stands where it should is one if its record
    says that it was made of this checkpoint.

    Raises:
      Refused: a release stands alone, and doesn't say what it was made of, or was made of another one; or adapters were
        merged on the way.
      StorageError: one of them can't be looked at.
    """
    try:
        stands_first = is_release(open_store(checkpoint))
    except StorageError:  # which is told where the checkpoint is looked for
        return None
    if stands_first:
        release, made_of = checkpoint, source
        record = published.record_of(release)
        if not made_of and not isinstance(made_of := record.get("source"), str):
            line = f"weightbeam verify {shlex.quote(release)} CHECKPOINT"
            raise Refused(f"{release} doesn't say which checkpoint it was exported from; name that, too:\n  {line}")
        if not source and is_name(made_of):
            raise Refused(only_named(release, made_of, checkpoint))
        with contextlib.suppress(StorageError):  # which is told where the checkpoint is looked for
            if is_release(open_store(made_of)):
                raise Refused(
                    f"{release} and {made_of} are both releases; weightbeam diff compares them:\n  {diff_command(made_of, release)}"
                )
    elif source and (record := published.record_of(source)).get("command") == "export":
        release, made_of = source, checkpoint
        items, origin = find_items(checkpoint), record.get("made_from")
        plan = record_of(items).get("plan")
        if not _is_made_of(record.get("source"), items) and (
            plan is None or not isinstance(origin, dict) or origin.get("plan") != plan
        ):
            return None
    else:
        return None
    if record.get("adapters"):
        raise Refused(
            f"{release}: adapters were merged into it while it was exported; weightbeam diff compares it with another release"
        )
    return release, made_of


def _is_made_of(said: object, items: Store) -> bool:
    """Whether a record says that it was made of this checkpoint: where it lies, or by its name."""
    return said == str(items) or (is_name(said) and is_named(said, open_orbax(items, any_tree=True)))


def only_named(what: str, source: str, given: str) -> str:
    """What a command says whose other side is published without the paths of the machine where it was made."""
    return f"{what} was made of {source}, which is a name and no place; say where it is: weightbeam verify SOURCE {shlex.quote(given)}"
