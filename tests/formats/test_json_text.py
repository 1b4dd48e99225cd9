"""Edits of JSON against the same edits of dicts; what isn't edited keeps its bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbeam.formats.text import json_text

KEYS = st.sampled_from(["a", "b", "c", "ä", 'q"', "\\", ""])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
)
OBJECTS = st.recursive(
    st.dictionaries(KEYS, LEAVES, max_size=4),
    lambda child: st.dictionaries(KEYS, st.one_of(LEAVES, child), max_size=4),
    max_leaves=20,
)
STYLES = st.sampled_from(
    [
        dict(indent=2),
        dict(indent=4),
        dict(indent="\t"),
        dict(),
        dict(separators=(",", ":")),
        dict(indent=1, separators=(" ,", " : ")),
        dict(ensure_ascii=False),
    ]
)
PATHS = st.lists(KEYS, min_size=1, max_size=3).map(tuple)


def parent_of(tree: Any, path: json_text.Path) -> dict[str, Any] | None:
    for key in path[:-1]:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


@given(OBJECTS, STYLES, PATHS, st.one_of(LEAVES, OBJECTS), st.one_of(st.none(), KEYS), st.booleans())
@settings(deadline=None)
def test_the_same_as_on_dicts(
    tree: dict, style: dict, path: json_text.Path, value: Any, after: str | None, crlf: bool
) -> None:
    text = json.dumps(tree, **style) + "\n"
    text = " " + text.replace("\n", "\r\n") if crlf else text
    edited = copy.deepcopy(tree)
    place = parent_of(edited, path)
    assert (json_text.find(text, path) is not None) == (place is not None and path[-1] in place)
    assert json_text.get(text, path, "none") == (place.get(path[-1], "none") if place is not None else "none")
    if place is None:
        assert json_text.remove(text, path) == text
        with pytest.raises(KeyError):
            json_text.set_value(text, path, value, after)
        return
    old = place.pop(path[-1], None)
    assert json.loads(json_text.remove(text, path)) == edited
    place[path[-1]] = value
    written = json_text.set_value(text, path, value, after)
    assert json.loads(written) == edited
    if (found := json_text.find(text, path)) is not None:  # what surrounds a value that is replaced stays
        assert written.startswith(text[: found.value])
        assert written.endswith(text[found.stop :])
        assert json.loads(json_text.set_value(written, path, old)) == tree
    else:  # what is added can be taken away without a trace, but for blanks in an empty object
        removed = json_text.remove(written, path)
        assert removed == text or "".join(removed.split()) == "".join(text.split())


def test_a_value_that_is_added_looks_like_its_neighbours() -> None:
    text = '{\n    "a": 1.0e-05,\n    "b": {"c": []}\n}\n'
    text = json_text.set_value(text, ("new",), {"method": "fp8", "block": [128]}, after="a")
    text = json_text.set_value(text, ("b", "d"), 2)
    assert text == (
        '{\n    "a": 1.0e-05,\n    "new": {\n        "method": "fp8",\n        "block": [\n            128\n        ]\n    },\n'
        '    "b": {"c": [],"d": 2}\n}\n'
    )  # fmt: skip
