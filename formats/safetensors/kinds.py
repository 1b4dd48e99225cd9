"""What a folder is that holds no model in safetensors files, and what to do with it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from weightbeam.formats.storage import LocalFolder, Store
from weightbeam.formats.storage.meant import GGUF, PICKLES, foreign_format


def snapshot_in(store: Store) -> Store:
    """The newest snapshot of a repository's folder in a hub's cache (`models--organisation--name`); any other folder is
    itself.
    """
    if (
        not isinstance(store, LocalFolder)
        or not (store.folder / "snapshots").is_dir()
        or (store.folder / "config.json").exists()
    ):
        return store
    main = store.folder / "refs" / "main"
    snapshots = sorted(path for path in (store.folder / "snapshots").iterdir() if path.is_dir())
    if main.is_file():
        snapshots = [path for path in snapshots if path.name == main.read_text(encoding="utf-8").strip()] or snapshots
    return LocalFolder(str(snapshots[0])) if len(snapshots) == 1 else store


def describe_other(store: Store, entries: Sequence[str]) -> str:
    """What a folder is that isn't a model in safetensors files, and what to do; empty where it can't be told."""
    names = set(entries)

    def first(*endings: str) -> str:
        return next((name for name in sorted(names) if name.endswith(endings)), "")

    if "model_index.json" in names:
        return "a diffusers pipeline of several models; a language model among them has a folder of its own, such as text_encoder/"
    if "modules.json" in names and "config.json" not in names:
        return "a sentence-transformers model; the transformer in it has a folder of its own, such as 0_Transformer/"
    if "adapter_config.json" in names and "config.json" not in names:
        return "a LoRA adapter, not a model: merge and convert take its base model as --source, and this folder with --lora"
    if (
        names & {"_METADATA", "_CHECKPOINT_METADATA"}
        or ("items" in names and "commit_success.txt" in names)
        or _holds_steps(store, names)
    ):
        return "an Orbax checkpoint already: weightbeam inspect, verify, reshard and export take it"
    if gguf := first(GGUF):
        return foreign_format(gguf)
    if "snapshots" in names:
        return "a repository in a hub's cache, with several snapshots or none: name one of snapshots/…"
    if cached := next((name for name in sorted(names) if name.startswith("models--")), ""):
        return f"a hub's cache: name hf://{cached.removeprefix('models--').replace('--', '/')}, or one of {cached}/snapshots/…"
    if pickle := first(*PICKLES):
        return foreign_format(pickle)
    return ""


def _holds_steps(store: Store, names: set[str]) -> bool:
    """Whether a local folder has numbered folders of Orbax's."""
    if not isinstance(store, LocalFolder):
        return False
    marks = ("_CHECKPOINT_METADATA", "items", "default", "commit_success.txt")
    return any(os.path.exists(store.path(f"{name}/{mark}")) for name in names if name.isdecimal() for mark in marks)
