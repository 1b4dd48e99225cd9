"""A folder as it was listed once, for who reads many of its files and says one thing of all of them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence

from weightbeam.formats.storage import LocalFolder, StorageError, Store
from weightbeam.formats.storage.identity import check_together
from weightbeam.formats.storage.store import File


@contextlib.contextmanager
def held(folder: Store) -> Iterator[Store]:
    """Context manager: gives a view of a folder in which each file is the one that lay there at first, though a path leads
    elsewhere for a while:

        listed    a file is opened, and has the inode and the time that it had    listed again, with the same result
          A         A    A    B: refused    A                                       A

    In a bucket, where each version of a file is told from all others, the folder itself.

    Raises:
      StorageError: in the end, if something isn't what it was.
    """
    files, names = folder.list(), folder.names()
    yield _HeldFolder(folder.url, files, names) if isinstance(folder, LocalFolder) else folder
    check_together(folder, files, folder.list())
    if others := {*folder.names()} ^ {*names}:
        raise StorageError(f"{folder.path(min(others))} came or went while the files beside it were read")


@contextlib.contextmanager
def held_item(items: Store) -> Iterator[Store]:
    """Context manager: the same of an item of a checkpoint and the step around it, and only of the files that lie directly
    there, by which both say what they are.
    """
    step = items.parent
    said, of_step = items.list(recursive=False), step.list(recursive=False)
    yield _HeldItem(items.url, said, of_step) if isinstance(items, LocalFolder) else items
    check_together(items, said, items.list(recursive=False))
    check_together(step, of_step, step.list(recursive=False))


class _HeldFolder(LocalFolder):
    """A folder whose files are held: all of them, or those that lie directly there if it isn't known what lies below."""

    def __init__(self, url: str, files: Sequence[File], names: Sequence[str] | None = None):
        super().__init__(url)
        self._files, self._names = {file.name: file for file in files}, names

    def __truediv__(self, name: str) -> LocalFolder:  # type: ignore[override]
        return LocalFolder(f"{self.url}/{name}")

    def names(self) -> Sequence[str]:
        return super().names() if self._names is None else self._names

    def list(self, prefix: str = "", recursive: bool = True) -> list[File]:
        if self._names is None and (recursive or "/" in prefix):
            return super().list(prefix, recursive)
        found = (self._files[name] for name in sorted(self._files) if name.startswith(prefix))
        return [file for file in found if recursive or "/" not in file.name.removeprefix(prefix)]

    def stat(self, name: str) -> File | None:
        return super().stat(name) if self._names is None and "/" in name else self._files.get(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if (file := self.stat(name)) is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", self.path(name))
        return self.read_known(file, start, stop)


class _HeldItem(_HeldFolder):
    """An item, whose parent is the step, in which its own files are named, too."""

    def __init__(self, url: str, files: Sequence[File], of_step: Sequence[File]):
        super().__init__(url, files)
        self._of_step = of_step

    @property
    def parent(self) -> LocalFolder:  # type: ignore[override]
        return _HeldStep(self)


class _HeldStep(_HeldFolder):
    def __init__(self, item: _HeldItem):
        super().__init__(item.url.rpartition("/")[0], item._of_step)
        self._item = item

    def __truediv__(self, name: str) -> LocalFolder:
        return self._item if name == self._item.name else super().__truediv__(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        folder, _, below = name.partition("/")
        return (
            self._item.read(below, start, stop)
            if below and folder == self._item.name
            else super().read(name, start, stop)
        )
