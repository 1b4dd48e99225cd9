"""Edits of the text of `config.json`, so that it describes other weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weightbeam.formats.storage.strict_json import JsonError, parse_json
from weightbeam.formats.text import json_text
from weightbeam.model_mappings.config import NEXTN, QUANTIZATIONS, TEXT_SECTIONS

DTYPE_KEYS = ("dtype", "torch_dtype")
MAX_SECTIONS = 3  # how deep sections lie in each other


@dataclasses.dataclass(frozen=True)
class ConfigEdits:
    """What `config.json` should say otherwise.

    Attributes:
      dtype: of the weights; it is set wherever a dtype stands. None leaves the release's.
      vocab_size: rows of the embedding.
      drop_quantization: take out what describes a quantisation that is gone.
      quantization: the `quantization_config` of the new weights, in place of any other.
      nextn: layers of multi-token prediction that the weights have; only where the config has a number for them.
      fields: others, and what they become; a dot leads into a section.
    """

    dtype: str | None = None
    vocab_size: int | None = None
    drop_quantization: bool = False
    quantization: Mapping[str, Any] | None = None
    nextn: int | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def edit_config(text: str, edits: ConfigEdits) -> tuple[str, list[str]]:
    """Edits `config.json`, which is valid JSON, so that it describes other weights, and leaves all else as the release
    spells it.

    Returns:
      The new text, and what was edited, a line each. At the root both `dtype` (transformers 5) and `torch_dtype` (4,
      and engines built on it) stand, with the same value.

    Raises:
      JsonError: the text isn't a JSON object.
    """
    if not isinstance(parse_json(text.encode()), dict):
        raise JsonError("should be an object")
    editor = _Editor(text)
    if edits.quantization is not None or edits.drop_quantization:
        _edit_quantization(editor, edits.quantization)
    _edit_dtype(editor, edits.dtype)
    if edits.vocab_size is not None:
        places = list(editor.standing(TEXT_SECTIONS, "vocab_size"))
        editor.set_each(places or [(*_innermost_section(editor), "vocab_size")], edits.vocab_size)
    if edits.nextn is not None:
        editor.set_each(editor.standing(TEXT_SECTIONS, *NEXTN), edits.nextn)
    for field, value in edits.fields.items():
        editor.set(tuple(field.split(".")), value)
    return editor.text, editor.edits


def _edit_quantization(editor: _Editor, quantization: Mapping[str, Any] | None) -> None:
    """Takes out what describes another quantisation, in every section; the weights' own stands at the root."""
    own = None if quantization is None else QUANTIZATIONS[:1]
    for section in editor.sections():
        for key in QUANTIZATIONS:
            if (*section, key) != own:
                editor.remove((*section, key))
    if quantization is not None:
        editor.set(QUANTIZATIONS[:1], dict(quantization))


def _edit_dtype(editor: _Editor, dtype: str | None) -> None:
    """Sets the dtype wherever one stands, and at the root by both of its names; None leaves the release's."""
    if dtype is not None:
        editor.set_each(editor.standing(editor.sections(), *DTYPE_KEYS), dtype)
    known = dtype or next(filter(None, map(editor.get, editor.standing(TEXT_SECTIONS, *DTYPE_KEYS))), None)
    if known is not None:
        editor.set(("dtype",), known, after="torch_dtype")
        editor.set(("torch_dtype",), known, after="dtype")


def _innermost_section(editor: _Editor) -> json_text.Path:
    """The deepest section for the text model's sizes that there is."""
    return max((section for section in TEXT_SECTIONS if isinstance(editor.get(section), dict)), key=len, default=())


class _Editor:
    """A text of JSON, and what was done to it."""

    def __init__(self, text: str):
        self.text = text
        self.edits: list[str] = []

    def get(self, path: json_text.Path) -> Any:
        return json_text.get(self.text, path)

    def has(self, path: json_text.Path) -> bool:
        return json_text.find(self.text, path) is not None

    def standing(self, sections: Iterable[json_text.Path], *keys: str) -> Iterator[json_text.Path]:
        """Those members of the sections that there are; each is looked for when it is asked for, since an edit before
        may have replaced its section.
        """
        return (path for section in sections for key in keys if self.has(path := (*section, key)))

    def set_each(self, paths: Iterable[json_text.Path], value: Any) -> None:
        for path in paths:
            self.set(path, value)

    def set(self, path: json_text.Path, value: Any, after: str | None = None) -> None:
        name, had = ".".join(path), self.has(path)
        before = self.get(path)
        if had and before == value and type(before) is type(value):
            return
        self.text = json_text.set_value(self.text, path, value, after)
        short = [json.dumps(each) if not isinstance(each, dict) else "{…}" for each in (before, value)]
        self.edits.append(f"{name}: {short[0]} -> {short[1]}" if had else f"{name}: {short[1]} added")

    def remove(self, path: json_text.Path) -> None:
        if self.has(path):
            self.text = json_text.remove(self.text, path)
            self.edits.append(f"{'.'.join(path)} removed")

    def sections(self) -> list[json_text.Path]:
        """The root and every object below it, as deep as sections of a model lie; what describes a quantisation is
        none.
        """
        found: list[json_text.Path] = [()]
        for path in found:
            value = self.get(path) if path else json.loads(self.text)
            if len(path) < MAX_SECTIONS and isinstance(value, dict):
                found += [
                    (*path, key) for key, child in value.items() if isinstance(child, dict) and key not in QUANTIZATIONS
                ]
        return found
