"""Whether the patterns of a quantisation name the same modules of a cut as of the whole model.

A pattern goes into the cut with its layer's new number where `cut_config.renumber` knows the place of the number. What
another spelling names, only its matches tell:

    cut 2:4            "re:.*\\.2\\..*" names            in the cut
    model.layers.2.mlp          yes            model.layers.0.mlp   no: refused
    model.layers.3.mlp          no             model.layers.1.mlp   no

A regular expression, behind `re:`, `+:` or `-:`, or as a key of `dynamic`, fits from a name's beginning on
(vllm-project/compressed-tensors, utils/match.py; ModelCloud/GPTQModel, quantization/config.py `dynamic_get`); a text
with `*` is a glob of a whole name (NVIDIA/Model-Optimizer); any other names whole components.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from weightbeam.formats.adapters.patterns import PatternError, Patterns
from weightbeam.model_mappings.cut_config import Path

_EXPRESSION = re.compile(r"re:|[-+]:")
_TELLS_NUMBERS = re.compile(r"[0-9]|\\[dDwW](?![+*])")
_OF_EXPERTS = re.compile(r"experts\W*\d+(?![\d-])")  # has an expert's number
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a name


def against_patterns(
    names: Iterable[str], new_name: Callable[[str], str | None], renamed: Mapping[Path, str | None], option: str
) -> Iterator[tuple[str, str]]:
    """What stands against patterns that name other modules of the cut: the option, and why.

    Args:
      names: of the whole model's tensors.
      new_name: a tensor's name in the cut; None where it isn't kept.
      renamed: the patterns in the cut, `{(file, key, …, pattern): new pattern}`; None where one is left out.
      option: that asks for the cut.
    """
    if not (numbered := [path for path in renamed if _TELLS_NUMBERS.search(path[-1])]):
        return
    if not any(_OF_EXPERTS.search(path[-1]) for path in numbered):
        names = _one_expert_of(names)
    modules = _modules({name: new_name(name) for name in names})
    if all(module == new for module, new in modules.items()):
        return
    kept = [new for new in modules.values() if new]
    for file, *keys, text in numbered:
        new, place = renamed[(file, *keys, text)], f"{file}: {'.'.join(keys)!r} says {text!r}"
        is_name = not _is_pattern(text, keys)
        if is_name and (new != text or modules.get(text) == text):
            continue  # with a number whose place is known
        try:
            before = {modules[module] for module in _named(text, keys, modules)} - {None}
            after = set(_named(new, keys, kept)) if new else set()
        except PatternError:
            yield option, f"{place}: which modules it names can't be told"
            continue
        if other := sorted(map(str, before ^ after)):
            why = f"can't be renumbered: it would name other modules of the cut, such as {other[0]}"
            yield option, f"{place}, which {why}"


def _one_expert_of(names: Iterable[str]) -> Iterator[str]:
    """The names without those that differ from an earlier one in a number behind the first, which is a layer's."""
    seen = set[str]()
    for name in names:
        first = _NUMBER.search(name)
        end = first.end() if first else len(name)
        if (alike := name[:end] + _NUMBER.sub("#", name[end:])) not in seen:
            seen.add(alike)
            yield name


def _modules(names: Mapping[str, str | None]) -> dict[str, str | None]:
    """The modules that hold tensors, outer ones too, each with its name in the cut."""
    modules = dict[str, str | None]()
    for name, new in names.items():
        for module, became in zip(_above(name), _above(new or name), strict=True):
            if new or module not in modules:
                modules[module] = became if new else None
    return modules


def _above(name: str) -> list[str]:
    """The modules that a tensor is in, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _is_pattern(text: str, keys: Iterable[str]) -> bool:
    """Whether a text, by what is around it, may name several modules by their spelling."""
    return bool(_EXPRESSION.match(text)) or "dynamic" in keys or "*" in text


def _named(text: str, keys: Iterable[str], modules: Iterable[str]) -> list[str]:
    """The modules that a text names. Raises PatternError where it can't be followed."""
    expression = _EXPRESSION.match(text)
    if expression or "dynamic" in keys:
        patterns = Patterns({f"^(?:{text[expression.end() if expression else 0 :]}).*": True})
        return [module for module in modules if patterns.find(module, False)]
    if "*" in text:
        return fnmatch.filter(modules, text)
    return [module for module in modules if f".{text}." in f".{module}."]
