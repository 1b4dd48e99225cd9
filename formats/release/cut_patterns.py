"""Whether the patterns of a quantisation name the same modules of a cut as of the whole model.

A pattern goes into the cut with its layer's new number where `cut_config.renumber` knows the place of the number. What
another spelling names, only its matches tell:

    cut 2:4            "re:.*\\.2\\..*" names            in the cut
    model.layers.2.mlp          yes            model.layers.0.mlp   no: refused
    model.layers.3.mlp          no             model.layers.1.mlp   no

A regular expression, behind `re:`, `+:` or `-:`, fits from a name's beginning on (vllm-project/compressed-tensors,
utils/match.py; ModelCloud/GPTQModel, quantization/config.py `dynamic_get`); any other text names whole components.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from weightbeam.formats.adapters.patterns import PatternError, Patterns
from weightbeam.model_mappings.cut_config import Path

_EXPRESSION = re.compile(r"re:|[-+]:")
_TELLS_NUMBERS = re.compile(r"[0-9]|\\[dDwWsSbB]")


def against_patterns(names: Mapping[str, str | None], renamed: Mapping[Path, str | None]) -> Iterator[tuple[str, str]]:
    """What stands against patterns that name other modules of the cut: the option, and why.

    Args:
      names: the names of tensors in the cut; None where one isn't kept.
      renamed: the patterns in the cut, `{(file, key, …, pattern): new pattern}`; None where one is left out.
    """
    modules = dict[str, str | None]()
    for name, new in names.items():
        for module, became in zip(_above(name), _above(new or name), strict=True):
            if new or module not in modules:
                modules[module] = became if new else None
    kept = [new for new in modules.values() if new]
    for (file, *keys, text), new in renamed.items():
        is_expression = bool(_EXPRESSION.match(text))
        if not _TELLS_NUMBERS.search(text) or (new != text and not is_expression) or modules.get(text) == text:
            continue  # a name without a number, or with one whose place is known
        try:
            before = {modules[module] for module in _named(text, modules)} - {None}
            after = set(_named(new, kept)) if new else set()
        except PatternError:
            yield "--layers", f"{file}: {'.'.join(keys)!r} says {text!r}: which layers it names can't be told"
            continue
        if other := sorted(map(str, before ^ after)):
            yield (
                "--layers",
                f"{file}: {'.'.join(keys)!r} says {text!r}, which can't be renumbered: it would name other modules of the cut, such as {other[0]}",
            )


def _above(name: str) -> list[str]:
    """The modules that a tensor is in, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _named(text: str, modules: Iterable[str]) -> list[str]:
    """The modules that a pattern names.

    Raises:
      PatternError: it can't be followed.
    """
    if expression := _EXPRESSION.match(text):
        patterns = Patterns({f"^(?:{text[expression.end() :]}).*": True})
        return [module for module in modules if patterns.find(module, False)]
    return [module for module in modules if f".{text}." in f".{module}."]
