"""What was meant by the name of a folder that isn't there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from weightbeam.formats.storage.store import HUB

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/([^/?#]+))?.*"
)
PICKLES = (".bin", ".pt", ".pth")
GGUF = ".gguf"
MEANT = f"; did you mean {HUB}"  # a release of the hub's


def foreign_format(name: str) -> str:
    """What a file is that holds weights otherwise than in safetensors, and what to do; empty where it can't be told."""
    if name.endswith(GGUF):
        return f"{name} is a GGUF file, made for llama.cpp: take the release with safetensors files that it was made of"
    if name.endswith(PICKLES):
        return f"{name} is a pickle file, which can run code when it is loaded: convert it to safetensors first"
    return ""


def hint(where: str) -> str:
    """What was meant by a folder that isn't there, as the end of a message; empty where nothing suggests itself."""
    if page := _PAGE.fullmatch(where):
        return f"{MEANT}{page[1]}" + (f"@{page[2]}?" if page[2] else "?")
    path = Path(os.path.expanduser(where))
    if path.is_file():
        return f"; {foreign_format(path.name) or f'it is a file: name its folder, {path.parent}'}"
    return f"{MEANT}{where}?" if _REPOSITORY.fullmatch(where.partition("@")[0]) else ""
