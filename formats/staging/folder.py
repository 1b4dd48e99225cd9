"""What is staged beside its place in a folder, where a rename publishes it.

Everything lies in one place:

    <output>/<name>.weightbeam-lease                who is at work
    <output>/<name>.<id>.orbax-checkpoint-tmp/      what will be <output>/<name>/, as it grows
        plan.json.gz, units/<plan>/<unit>.json      the staged plan and the ledger
        failure.txt                                 what Beam said of a failure
        job.json                                    the job that is at work there, on another engine
    <output>/<name>.replaced-<id>/                  with a plan in it: whole, and about to be published; without: what it has replaced
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import itertools
import logging
import os
import re
import uuid
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from weightbeam.formats.staging.links import SOURCE
from weightbeam.formats.staging.staging import FAILURE, ITEMS, JOB, LOCK, PLAN, UNITS, UNPACKED, Staging
from weightbeam.formats.storage import TEMPORARY, LocalFolder, StorageError, Store, reason, sync_folder
from weightbeam.formats.storage.local import remove_tree, said_of_mounts
from weightbeam.formats.storage.renaming import UnsupportedError, exchange, rename_new
from weightbeam.formats.storage.strict_json import MAX_BYTES, parse_json

CAME = (
    "isn't what it was as this began, and stays; look at it, and the same command with --resume --overwrite replaces it"
)
# of files in order: name, size in bytes, time in nanoseconds; of folders the name
Note = tuple[tuple[str, int, int], ...]
LAYER = "lies in a layer of an overlay that is only read, such as a container's image, and can't be renamed there; move it elsewhere, or remove it"
REPLACED = r"\.replaced-([0-9a-f]+)"  # how the name of what was replaced goes on, with its id; a pattern
HASH = re.compile("[0-9a-f]{64}")  # of a plan
BELOW = 320  # bytes of a path below what is staged, at most: /items/, a name of 255, and a chunk's below it with a lock
LOG = logging.getLogger("weightbeam")


class FolderStaging(Staging):
    """Staged beside its place in a folder; a rename is all that a reader ever sees."""

    output: LocalFolder
    on_disk = True

    def __init__(self, output: LocalFolder, name: str, plan_hash: str):
        super().__init__(output, name, plan_hash)
        self._folder: str | None = None  # what is staged; None until it is claimed or created
        self._replaces: Note | None = None  # what may be replaced; None where nobody has looked

    def check_name(self) -> None:
        """Makes sure that the file system takes the names that lie beside the final one.

        Raises:
          StorageError: they are too long for it, or the paths of what lies below.
        """
        self.output.check_name_length(self.name, len(self._new_name()) - len(self.name), BELOW)

    @property
    def checkpoint(self) -> LocalFolder:
        return self.output / (self._folder or next(iter(self._staged()), self._new_name()))

    @property
    def plan_folder(self) -> LocalFolder:
        return self.checkpoint

    @property
    def items(self) -> LocalFolder:
        return self.checkpoint / ITEMS

    @property
    def final(self) -> LocalFolder:
        return self.output / self.name

    def _entries(self, pattern: str) -> list[str]:
        """The folders beside the final one whose names go on so, if we made them: an id of ours is in the name, or a
        plan of ours lies in there, as in those of earlier versions.
        """
        ids = self._named(pattern)
        return sorted(name for name in ids if _is_id(ids[name]) or holds_plan(self.output / name))

    def _named(self, pattern: str) -> dict[str, str]:
        """The folders beside the final one whose names go on so, with the id that is in each; whoever made them."""
        try:
            names = os.listdir(self.output)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        ids = {
            name: found[1] or ""
            for name in names
            if name.startswith(self.name) and (found := re.fullmatch(pattern, name[len(self.name) :]))
        }
        return {name: ids[name] for name in ids if (path := Path(self.output, name)).is_dir() and not path.is_symlink()}

    def _staged(self) -> Sequence[str]:
        """What is staged: what this plan would go on with first, then what has any plan, then what has none."""

        def rank(name: str) -> tuple[bool, bool]:
            folder = self.output / name
            return not Path(folder / self.units).exists(), not folder.exists(PLAN)

        # what is published goes from the one name to the other, and back where that fails: looked for in this order, it
        # isn't missed
        growing = self._entries(self._staged_name)
        whole = [name for name in self._replaced() if (self.output / name).exists(PLAN)]
        return sorted(dict.fromkeys([*whole, *growing, *self._entries(self._staged_name)]), key=rank)

    @property
    def _staged_name(self) -> str:
        """How the name of what is staged goes on, with its id, which some of earlier versions don't have; a pattern."""
        return rf"(?:\.([0-9a-f]+))?{re.escape(self.growing)}"

    def _replaced(self) -> list[str]:
        return self._entries(REPLACED)

    def _new_name(self) -> str:
        return f"{self.name}.{new_id()}{self.growing}"

    def check_staged(self) -> None:
        for name in self._staged():
            check_unmounted(self.output / name)

    def claim(self) -> None:
        claimed: list[str] = []
        while found := self._staged():
            taken = {name: self._take(name) for name in found if name not in claimed}
            claimed += filter(None, taken.values())
            if None not in taken.values():  # else it may have another name by now
                break
        self._folder = claimed[0] if claimed else self._new_name()
        for name in claimed[1:]:  # of one that woke and began after it had lost the lease
            _remove(self.output / name)

    def _take(self, name: str) -> str | None:
        """Gives what is staged a name that nobody else knows; None where it was published, or thrown away."""
        mine = self._new_name()
        try:
            with _layer_named(Path(self.output, name)):
                os.rename(self.output / name, self.output / mine)
        except FileNotFoundError:
            return None
        # it was published at this moment: this is what it replaced
        if ".replaced-" in name and not (self.output / mine).exists(PLAN):
            os.rename(self.output / mine, self.output / name)
            return None
        return mine

    def give_up(self) -> None:
        if self._folder:  # it grows, or is about to be published
            _ = self._take(self._folder) or self._take(self._sealed_name())

    def _sealed_name(self) -> str:
        """How what grows is called while it is published: by the same id, so that who stops it finds it."""
        found = re.fullmatch(self._staged_name, self.checkpoint.name[len(self.name) :])
        return f"{self.name}.replaced-{(found and found[1]) or new_id()}"

    def tidy(self) -> None:
        self.output.sweep_probes()
        for pattern, ours in ((self._staged_name, self._staged()), (REPLACED, self._replaced())):
            for name in sorted({*self._named(pattern)} - {*ours}):
                if os.path.lexists(self.output / name / PLAN):
                    said = "%s is called as what a stopped command leaves, but its %s isn't one of Weightbeam's, or is damaged"
                    LOG.warning(f"{said}: nobody goes on with it, and it stays as it is", self.output / name, PLAN)
        final = Path(self.final)
        for name in self._replaced():
            if not (self.output / name).exists(PLAN):
                if os.path.lexists(final):
                    _remove(self.output / name)
                else:  # without a rename that swaps, its successor died before it came here
                    rename_new(Path(self.output / name), final)
        # who published it was killed before he could
        if self.final.exists(self.marker) and holds_plan(self.final):
            (final / PLAN).unlink(missing_ok=True)

    def look_there(self) -> None:
        self._replaces = _note(Path(self.final))

    @property
    def has_looked(self) -> bool:
        return self._replaces is not None

    def exists(self) -> bool:
        return self.checkpoint.folder.exists()

    def beside(self) -> Sequence[LocalFolder]:
        return [self.output / name for name in {*self._staged(), *self._replaced()}]

    def is_taken(self) -> bool:
        return os.path.lexists(self.final)

    def create(self, plan: bytes) -> None:
        self.discard()
        self._folder = self._new_name()
        Path(self.items).mkdir(parents=True)
        Path(self.plan_folder / self.units).mkdir(parents=True)
        try:
            self._check_lease()  # who took it away before hasn't seen this folder, and won't take it over
        except StorageError:
            self.discard()
            raise
        self.plan_folder.write(PLAN, plan)

    def discard(self) -> None:
        for name in [self._folder] if self._folder else self._staged():
            _remove(self.output / name)
            if os.path.lexists(self.output / name):
                why = said_of_mounts(Path(self.output / name)) or "is it another user's?"
                LOG.warning("%s, where a command was at work before, can't be removed; %s", self.output / name, why)

    def write_plan(self, plan: bytes) -> None:
        """Lock files of writers that were killed go too: TensorStore writes over them, and leaves what reaches beyond."""
        if self._folder is None:
            self.claim()
        for folder, _, names in os.walk(self.items):
            for name in names:
                if name.endswith(LOCK):
                    Path(folder, name).unlink(missing_ok=True)
        super().write_plan(plan)

    def sweep(self, database: str = "") -> None:
        _remove(self.checkpoint)  # TensorStore made it anew; its name is nobody else's

    def note_failure(self, text: str) -> str:
        Path(self.plan_folder.path(FAILURE)).write_text(text)  # not durably, and only if the folder is there
        return self.plan_folder.path(FAILURE)

    def publish(self, overwrite: bool = False) -> None:
        growing, final = Path(self.checkpoint), Path(self.final)
        sealed = self._seal(growing)
        _strip(sealed, final)
        try:
            with _layer_named(final):
                self._replace(sealed, final) if overwrite else rename_new(sealed, final)
        except FileNotFoundError as e:
            raise self.taken_over() from e
        except OSError as e:
            with contextlib.suppress(OSError):
                os.rename(sealed, growing)
            if isinstance(e, FileExistsError):
                raise StorageError(f"{final}: {CAME}") from e
            raise
        try:  # the rename was the publication
            sync_folder(Path(self.output))
            (final / PLAN).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # somebody has moved it already
                sync_folder(final)
        except OSError as e:  # until that is durable, what it replaced stays; `tidy` removes it
            LOG.warning(
                "%s is published; the next command there cleans up what this one couldn't: %s", final, reason(e)
            )
            return
        for left in (sealed, growing):  # what was replaced; what late writers made anew
            _remove(left)
            if left.exists():
                LOG.warning("%s was replaced, and can't be removed: delete it", left)

    def _seal(self, growing: Path) -> Path:
        """Gives what grows a name that no late writer knows, and returns that.

        Raises:
          TakenOverError: another attempt is publishing it; or it isn't whole, and has its old name again.
        """
        sealed = Path(self.output, self._sealed_name())
        try:
            os.rename(growing, sealed)
        except (FileNotFoundError, FileExistsError) as e:
            raise self.taken_over() from e
        except OSError as e:
            if e.errno == errno.ENOTEMPTY:  # another attempt is publishing it
                raise self.taken_over() from e
            raise
        if not (sealed / self.marker).exists() or not (sealed / PLAN).exists():
            os.rename(sealed, growing)
            raise self.taken_over()
        return sealed

    def remove(self) -> None:
        """Removes what is published, its marker first: what is left if this is stopped isn't whole.

        Raises:
          HeldError: the place isn't this one's any more.
        """
        self._check_lease()
        self.final.delete(self.marker)
        self.final.delete_folder()

    def _replace(self, sealed: Path, final: Path) -> None:
        """Puts a folder in the place of what is there, if that is what was there as the command began. Raises OSError
        where it isn't; it is there again.
        """
        if self.has_looked and _note(final) not in ((), self._replaces):
            raise StorageError(f"{final}: {CAME}")
        self._swap(sealed, final)
        if self.has_looked and _note(sealed) not in ((), self._replaces):  # it came at this moment
            self._swap(sealed, final)
            raise StorageError(f"{final}: {CAME}")

    def _swap(self, sealed: Path, final: Path) -> None:
        """Puts a folder in the place of what is there, if anything is; `sealed` is that then. Raises FileNotFoundError
        where `sealed` isn't there any more; nothing happens.
        """
        while True:
            try:
                exchange(sealed, final)
                return
            except FileNotFoundError:
                if not sealed.exists():
                    raise
                with contextlib.suppress(FileExistsError):
                    rename_new(sealed, final)
                    return
            except UnsupportedError:
                self._swap_in_two(sealed, final)
                return

    def _swap_in_two(self, sealed: Path, final: Path) -> None:
        """Puts a folder in the place of what is there, by two renames: for file systems that have no rename that swaps.
        Between the two there is nothing at `final`; see `tidy`.
        """
        old = sealed.with_name(f"{self.name}.replaced-{new_id()}")
        if not sealed.exists():
            raise FileNotFoundError(sealed)
        if os.path.lexists(final):
            os.rename(final, old)
        try:
            rename_new(sealed, final)
        except OSError:  # such as that someone took it over at this moment: what was there stays there
            if os.path.lexists(old) and not os.path.lexists(final):
                os.rename(old, final)
            raise
        if os.path.lexists(old):
            os.rename(old, sealed)


@contextlib.contextmanager
def _layer_named(place: Path) -> Iterator[None]:
    """Context manager: says of a folder that can't be renamed within its file system what it is."""
    try:
        yield
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
        raise StorageError(f"{place}: {LAYER}") from e


def _strip(sealed: Path, final: Path) -> None:
    """Removes what only writers need from what will be `final`, and makes the rest durable; warns of what stays."""
    for path in [
        path for place in (sealed, sealed / ITEMS, sealed / ITEMS / SOURCE) for path in place.glob(f".*{TEMPORARY}")
    ]:
        path.unlink(missing_ok=True)
    for name in (FAILURE, JOB):
        (sealed / name).unlink(missing_ok=True)
    for name in (UNITS, UNPACKED):
        remove_tree(sealed / name)
        if os.path.lexists(sealed / name):
            LOG.warning("%s can't be removed, and is published with the rest: delete it", final / name)
    for place in (sealed / ITEMS, sealed):
        if place.exists():
            sync_folder(place)


def new_id() -> str:
    """A name's random part, and a checksum of it: no folder that anyone else has named is taken for ours."""
    start = uuid.uuid4().hex[:16]
    return start + _checksum(start)


def _note(place: Path) -> Note:
    """What tells what lies in a place from anything else: its files, and those of its folders. Empty where nothing is."""
    try:
        found = place.lstat()
    except FileNotFoundError:
        return ()
    note = [("", 0, 0)]
    try:
        folders = [Path(entry) for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False)]
        for entry in itertools.chain.from_iterable(map(os.scandir, (place, *folders))):
            about = entry.stat(follow_symlinks=False)
            is_folder = entry.is_dir(follow_symlinks=False)
            path = entry.path.removeprefix(str(place))
            note.append((path, 0, 0) if is_folder else (path, about.st_size, about.st_mtime_ns))
    except OSError:  # no folder, or none that can be read
        return (("", found.st_size, found.st_mtime_ns),)
    return tuple(sorted(note))


def _is_id(text: str) -> bool:
    return len(text) == 24 and text[16:] == _checksum(text[:16])


def holds_plan(folder: Store) -> bool:
    """Whether a plan that Weightbeam has staged lies in a folder; somebody else may call a file so."""
    try:
        packed = io.BytesIO(folder.read(PLAN, 0, MAX_BYTES + 1))
        plan = parse_json(gzip.GzipFile(fileobj=packed).read(MAX_BYTES + 1))
    except (OSError, EOFError, ValueError, zlib.error):
        return False
    return isinstance(plan, dict) and isinstance(found := plan.get("hash"), str) and bool(HASH.fullmatch(found))


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def check_unmounted(folder: LocalFolder) -> None:
    """Raises StorageError where something is mounted in a staged folder."""
    if mounted := said_of_mounts(folder.folder):
        raise StorageError(f"{folder}: {mounted}; unmount it")


def _remove(folder: LocalFolder | Path) -> None:
    """Removes a staged folder, its plan first: what is left if this is stopped is no conversion that could go on."""
    with contextlib.suppress(OSError):
        Path(folder, PLAN).unlink(missing_ok=True)
    remove_tree(Path(folder))
