"""Another system's face on this one: what macOS hasn't got is gone (`make test-pure SYSTEM=macos`).

No test replaces a Mac. What is covered: no renameat2, no page cache that takes hints, no preallocation, no affinity, no glibc, and
nothing below /proc, so neither boots nor processes nor containers are told apart.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from pathlib import Path
from typing import Any

GONE = ("posix_fadvise", "posix_fallocate", "sched_getaffinity", "copy_file_range", "splice")


def _hidden(path: object) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith("/proc/")


def as_macos() -> None:
    """Takes it all away, for the life of this process and of those that it forks."""
    from weightbeam.formats.storage import renaming

    for name in GONE:
        if hasattr(os, name):
            delattr(os, name)
    renaming.sys = _Other()  # type: ignore[attr-defined]
    for name in ("open", "readlink", "stat", "lstat"):
        _hide(name, os)
    _hide("open", io)
    builtins.open = io.open
    preadv = os.preadv

    def without_flags(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise NotImplementedError("preadv2")
        return preadv(fd, buffers, offset)

    os.preadv = without_flags  # type: ignore[assignment]


def _hide(name: str, module: Any) -> None:
    """Has a function of a module find nothing below /proc."""
    real = getattr(module, name)

    def hiding(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if _hidden(path):
            raise FileNotFoundError(2, os.strerror(2), path)
        return real(path, *arguments, **keywords)

    setattr(module, name, hiding)


class _Other:
    """`sys` of another system."""

    platform = "darwin"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def is_hidden() -> bool:
    """Whether this process has another system's face."""
    try:
        Path("/proc/self/stat").read_text()
    except FileNotFoundError:
        return True
    return False
