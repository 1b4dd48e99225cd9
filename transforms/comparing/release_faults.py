"""What of an export isn't what was written, beside its tensors: `config.json` field by field, the other small files by
their hashes, and what was put beside them that a loader would take for a part of the model.

The export's record, `weightbeam.json`, says what they were. Where it is missing, or of a version that didn't say it yet,
`config.json` is compared with what the checkpoint remembers of its release, and what differs is only said: an export
edits it.

Of any two releases it is said how they differ there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from weightbeam.formats.release.files import CONFIG, role_of
from weightbeam.formats.safetensors import DTYPES, INDEX, Tensor
from weightbeam.formats.storage import Store, reason
from weightbeam.formats.storage.strict_json import MAX_BYTES, read_json
from weightbeam.formats.targets.published import RECORD, strays_in
from weightbeam.formats.text.printable import printable, where_apart
from weightbeam.model_mappings.config import QUANTIZATIONS
from weightbeam.model_mappings.maxtext_config import FILE as MAXTEXT
from weightbeam.model_mappings.plan import holds, is_float

FIELD = f"{CONFIG}: "  # before the name of a field
HASH = "SHA-256 "
ADDED = "wasn't written by the export, and is taken for a part of it"

Said = tuple[str, str]  # a file or a field, and what is to be said of it


def find_release_faults(
    release: Store, record: Mapping[str, Any], remembered: Mapping[str, Any], accepted: Collection[str]
) -> tuple[list[Said], list[Said]]:
    """What is wrong with the small files of an export, and what is only to be said of them.

    Args:
      release: the export.
      record: its `weightbeam.json`; empty where there is none.
      remembered: `config.json` of the release that the checkpoint was made of; empty where nobody knows.
      accepted: fields of `config.json`, and names of files, that may be others than the export wrote.
    """
    files, config = record.get("files"), record.get("config")
    if not isinstance(files, Mapping) or not isinstance(config, Mapping):
        return [], _without_record(release, record, remembered)
    found = [
        *compare_config(release, config, "the export wrote"),
        *((name, "isn't what the export wrote") for name in _other_files(release, files)),
        *((printable(name), ADDED) for name in strays_in(release)),
    ]
    may = {what for what, said in found if _is_for_people(what, said) or _is_accepted(what, accepted)}
    return (
        [
            (what, f"{said}; if that is meant: --accept {what.removeprefix(FIELD)}")
            for what, said in found
            if what not in may
        ],
        [(what, said) for what, said in found if what in may],
    )


def find_dtype_faults(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> list[Said]:
    """The tensors of a dtype of which the export wrote fewer, and that doesn't hold the values of all that it wrote: they
    may be rounded, and no plan says so.

    Args:
      tensors: of the export, by name.
      record: its `weightbeam.json`.
    """
    wrote = record.get("dtypes")
    if not isinstance(wrote, Mapping) or not all(type(times) is int for times in wrote.values()):
        return []
    found: dict[str, list[str]] = {}
    known = {dtype.name: dtype for dtype in DTYPES.values()}
    floats = [known[other] for other in wrote if other in known and is_float(known[other])]
    for name, tensor in tensors.items():
        if is_float(tensor.dtype) and not all(holds(tensor.dtype, other) for other in floats):
            found.setdefault(tensor.dtype.name, []).append(name)
    what = "is {}; tensors of this dtype: {} here, and {} that the export wrote"
    more = [(dtype, names) for dtype, names in found.items() if len(names) > wrote.get(dtype, 0)]
    return [(names[-1], what.format(dtype, len(names), wrote.get(dtype, 0))) for dtype, names in more]


def _without_record(release: Store, record: Mapping[str, Any], remembered: Mapping[str, Any]) -> list[Said]:
    """What is to be said where nothing tells what the export wrote."""
    what = ("" if record else "is missing, and ") + f"doesn't say what {CONFIG} and the other small files were"
    edits = record.get("config_edits")
    expected = {**remembered, **(edits if isinstance(edits, Mapping) else {})}
    expected = {field: value for field, value in expected.items() if field not in QUANTIZATIONS}
    return [(RECORD, f"{what}, so they aren't compared"), *compare_remembered(release, expected)]


def compare_remembered(release: Store, remembered: Mapping[str, Any]) -> list[Said]:
    """The fields of a release's `config.json` that are others than a checkpoint remembers; nothing where it remembers
    none. An export says the dtype by its new name beside the old one.
    """
    if not remembered:
        return []
    ways = [remembered, {**remembered, "dtype": remembered.get("torch_dtype")}]
    plainly, renamed = (dict(compare_config(release, one, "the checkpoint was made with")) for one in ways)
    return [(field, said) for field, said in plainly.items() if field in renamed]


def compare_config(release: Store, expected: Mapping[str, Any], by: str) -> list[Said]:
    """The fields of a release's `config.json` that are others than `expected`, those of nested objects with dots; `by`
    says whose these are.
    """
    found, why = _config(release)
    if why:
        return [(CONFIG, why)]
    return [
        (field, f"{ours}, {by} {theirs}")
        for field, *values in _unlike_fields(found, expected)
        for ours, theirs in [where_apart(*values)]
    ]


def unlike_files(first: Store, second: Store) -> dict[str, tuple[str, str]]:
    """The small files of two releases that aren't the same, with what stands in the first and in the second: of
    `config.json` each field, as JSON, of the others their hash. Cards and licences are for people, and the index follows
    from the files of the weights.
    """
    both = first, second
    (one, why), (other, why_not) = map(_config, both)
    if why or why_not:
        found = {CONFIG: (why or "can be read", why_not or "can be read")}
    else:
        found = {field: (ours, theirs) for field, ours, theirs in _unlike_fields(one, other)}
    try:
        names = sorted({file.name for store in both for file in store.list() if _is_compared(file.name)})
    except OSError as e:
        return found | {"other small files": (f"can't be listed: {reason(e)}", "")}
    hashes = {printable(name): (_hash(first, name), _hash(second, name)) for name in names}
    return found | {name: each for name, each in hashes.items() if each[0] != each[1] or not each[0].startswith(HASH)}


def _config(release: Store) -> tuple[Any, str]:
    """`config.json`; and why it can't be read, else empty."""
    try:
        return read_json(release, CONFIG), ""
    except OSError as e:
        return None, f"can't be read: {reason(e)}"
    except ValueError as e:
        return None, f"can't be read: {e}"


def _is_compared(name: str) -> bool:
    return role_of(name) not in (None, "config", "card", "licence")


def _hash(store: Store, name: str) -> str:
    """A small file's hash, or why there is none."""
    try:
        store.check_file(name)
        data = store.read(name, 0, MAX_BYTES + 1)
    except FileNotFoundError:
        return "nothing"
    except OSError as e:
        return f"can't be read: {reason(e)}"
    return f"{HASH}{hashlib.sha256(data).hexdigest()[:12]}…" if len(data) <= MAX_BYTES else "too large to be compared"


def _unlike_fields(one: Any, other: Any) -> Iterator[tuple[str, str, str]]:
    """The fields that differ, with both values; those of `other` first."""
    ours, theirs = dict(_fields(one)), dict(_fields(other))
    for field in dict.fromkeys([*theirs, *ours]):
        if (field in ours) != (field in theirs) or not _is_alike(ours[field], theirs[field]):
            yield f"{FIELD}{printable('.'.join(field))}", _shown(ours, field), _shown(theirs, field)


def _fields(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The fields of an object by their paths."""
    if not isinstance(value, Mapping) or not (value or not path):
        yield path, value
        return
    for name, inner in value.items():
        yield from _fields(inner, (*path, name))


def _is_alike(a: Any, b: Any) -> bool:
    """Whether two values are one; true isn't 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_alike, a, b))
    return (a == b and isinstance(a, bool) == isinstance(b, bool)) or (a != a and b != b)  # both NaN


def _shown(fields: Mapping[tuple[str, ...], Any], field: tuple[str, ...]) -> str:
    return json.dumps(fields[field]) if field in fields else "nothing"


def _other_files(release: Store, files: Mapping[str, Any]) -> Iterator[str]:
    """The files beside `config.json` that aren't what their hashes say, or aren't there."""
    for name, known in files.items():
        if name != CONFIG and not _is_same(release, name, known):
            yield printable(name)


def _is_same(release: Store, name: str, known: Any) -> bool:
    """Whether a file has this hash, and is one that an export writes: its record may be a stranger's."""
    if name not in (INDEX, MAXTEXT) and role_of(name) is None:
        return False
    try:
        release.check_file(name)
        return hashlib.sha256(release.read(name, 0, MAX_BYTES)).hexdigest() == known
    except (OSError, ValueError):
        return False


def _is_for_people(what: str, said: str) -> bool:
    """Whether something is said of a file that no program reads: of a card, or of a licence that somebody added."""
    return role_of(what) == "card" or (role_of(what) == "licence" and said == ADDED)


def _is_accepted(what: str, accepted: Collection[str]) -> bool:
    """Whether a file, or a field or one that it lies in, is named."""
    name = what.removeprefix(FIELD)
    return any(f"{name}.".startswith(f"{one}.") or (one == CONFIG and what != name) for one in accepted)
