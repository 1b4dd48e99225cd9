"""What others have put into a step: what is neither Orbax's nor ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weightbeam.formats.orbax.metadata import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    METADATA,
    STEP_FILES,
    STRINGS,
    item_handlers,
    plan_hash_of,
    record_of,
)
from weightbeam.formats.orbax.ocdbt import MANIFEST
from weightbeam.formats.safetensors import CONFIGS
from weightbeam.formats.staging import ATTEMPT, ITEMS, MARKER, PLAN, holds_plan
from weightbeam.formats.staging.links import SOURCE, SUMS
from weightbeam.formats.storage import Store

# below an item: of a database, be it that of an attempt or of references; and of an array without one, behind its key
OF_DATABASE = re.compile(rf"(({re.escape(ATTEMPT)}[0-9a-f]{{32,}}|{SOURCE})/)?(d/[0-9a-f]{{32}}|manifest\.[^/]+)")
OF_ARRAY = re.compile(r"\.zarray|\.zattrs|zarr\.json|c|(c/)?\d+([./]\d+)*")
ITEM_FOLDER = re.compile(rf"d|{re.escape(ATTEMPT)}.*|{ARRAY_METADATAS}|{SOURCE}")  # of any database
ZARR_FILES = (".zattrs", ".zgroup", ".zmetadata", "zarr.json")  # of a group of arrays


def others_in(step: Store) -> list[str]:
    """The files in a step, and the items, that someone put there. Of a step of ours it is known what is in it; else only
    files beside items and directly in them are looked at: what another item holds is up to whoever saved it.
    """
    own = {*STEP_FILES, MARKER, *([PLAN] if holds_plan(step) else [])}
    if plan_hash_of(step) is not None:
        return _others_in_ours(step, own)
    items = [name for name in step.folders() if (step / name).exists(METADATA)]
    places = {"": step, **{f"{name}/": step / name for name in items}}
    files = [(prefix, file.name) for prefix, place in places.items() for file in place.list(recursive=False)]
    own |= {MANIFEST, "checkpoint", *ZARR_FILES}  # "checkpoint" is of Orbax's former format
    # where there is no database, a folder of an item is an array
    folders = [
        f"{name}/{each}/" for name in items if (step / name).exists(MANIFEST) for each in (step / name).folders()
    ]
    return [
        *(f"{place}{name}" for place, name in files if name not in own and not name.startswith("_")),
        *(path for path in folders if not ITEM_FOLDER.fullmatch(path.split("/")[1])),
    ]


def _others_in_ours(step: Store, own: set[str]) -> list[str]:
    """The files in a step of ours that someone put there: its record says what the item holds, and which items came
    with a training state.
    """
    record = record_of(step / ITEMS)
    carried = {*_texts(record.get("carried")), *item_handlers(step)} - {ITEMS}
    references = record.get("references")
    named = references.get("files") if isinstance(references, dict) else None
    files = [str(file.get("name")) for file in named if isinstance(file, dict)] if isinstance(named, list) else []
    item = {METADATA, CHECKPOINT_METADATA, STRINGS, MARKER, f"{ARRAY_METADATAS}/process_0"}
    item |= {f"{SOURCE}/{name}" for name in (*files, *CONFIGS, SUMS)} if files else set()
    is_database, keys = (step / ITEMS).exists(MANIFEST), {"step", *_texts(record.get("digests"))}

    def is_of_item(name: str) -> bool:
        if name in item or is_database:
            return name in item or bool(OF_DATABASE.fullmatch(name))
        key, _, chunk = name.partition("/")
        return bool(OF_ARRAY.fullmatch(chunk)) and (key in keys or len(keys) == 1)  # of the step alone: no record

    found: dict[str, None] = {}
    for name in step.names():
        top, _, below = name.partition("/")
        if not (name in own or top in carried or (top == ITEMS and is_of_item(below))):
            found[name if top in (ITEMS, name) else f"{top}/"] = None
    return [*found]


def _texts(said: Any) -> list[str]:
    """The keys of an object, or the texts of a list; none of what is neither."""
    return [each for each in said if isinstance(each, str)] if isinstance(said, list | Mapping) else []
