"""Renames that Python doesn't offer: one that replaces nothing, and one that swaps. Both happen in one step or not at
all. And whether a user may rename something.

Linux has them on most of its own file systems (renameat2, since 3.15); NFS, FUSE and other systems don't.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import threading
from pathlib import Path

NOREPLACE, EXCHANGE = 1, 2  # include/uapi/linux/fs.h
HERE = -100  # AT_FDCWD
UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
# of a file system without links
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
_ONE = threading.Lock()


class UnsupportedError(OSError):
    """The file system hasn't got such a rename."""


def _renameat2(old: Path, new: Path, flags: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux") or not hasattr(library, "renameat2"):
        raise UnsupportedError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(old))
    sys.audit("weightbeam.rename", str(old), str(new), flags)
    if library.renameat2(HERE, os.fsencode(old), HERE, os.fsencode(new), flags):
        number = ctypes.get_errno()
        if number in UNSUPPORTED:
            raise UnsupportedError(number, os.strerror(number), str(old))
        raise OSError(number, os.strerror(number), str(old), None, str(new))


def exchange(one: Path, other: Path) -> None:
    """Swaps two files or folders: at no moment is there nothing at either place.

    Raises:
      FileNotFoundError: one isn't there; nothing happens.
      UnsupportedError: the file system can't; nothing happens.
    """
    _renameat2(one, other, EXCHANGE)


def rename_new(old: Path, new: Path) -> None:
    """Renames a file or a folder, unless there is something at its new place.

    Where the file system can't do both in one step, two processes that rename to one place at the same time may both be
    told that they did.

    Raises:
      FileExistsError: there is.
    """
    try:
        _renameat2(old, new, NOREPLACE)
        return
    except UnsupportedError:
        pass
    with _ONE:
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        os.rename(old, new)


def link_new(old: Path, new: Path) -> None:
    """Gives a file a second name, or where there are no hard links renames it.

    Raises:
      FileExistsError: there is a file of that name.
    """
    try:
        os.link(old, new)
    except OSError as e:
        if e.errno not in NO_LINKS:
            raise
        rename_new(old, new)


def is_anothers(path: Path) -> bool:
    """Whether a sticky folder, such as `/tmp`, keeps this user from renaming and removing what lies at a path."""
    folder, user = path.parent.stat(), os.geteuid()
    return bool(folder.st_mode & stat.S_ISVTX) and user not in (0, folder.st_uid, path.lstat().st_uid)
