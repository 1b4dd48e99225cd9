"""The pages that the code writes: the command line, from the options' values; Python, from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from types import ModuleType
from typing import Any

from weightbeam import testing
from weightbeam.model_mappings import blocks
from weightbeam.pipelines.api import HOMES
from weightbeam.pipelines.terminal.arguments.commands import COMMANDS, Command
from weightbeam.pipelines.terminal.arguments.texts import OVERVIEW
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.transforms.planning.options import Option

ENTRIES = {"Reference": ("reference/commands", "reference/api", "reference/extending")}
PARTS = ("Args:", "Returns:", "Raises:", "Example:")


def _is_of(found: Any, module: ModuleType) -> bool:
    """Whether it is a public function that a module defines."""
    return inspect.isfunction(found) and found.__module__ == module.__name__ and not found.__name__.startswith("_")


EXTENDING = {  # what others build on: a module, and the names of it that they use
    "weightbeam.formats.storage.store": ("Store",),
    "weightbeam.formats.encodings.encoding": ("Encoding", "Read", "StoredArray"),
    "weightbeam.formats.encodings.format": ("QuantizedFormat", "Companion", "QuantizedTensor", "dtypes"),
    "weightbeam.formats.targets.target": ("Target",),
    "weightbeam.model_mappings.family": ("Family", "rename"),
    "weightbeam.model_mappings.config": ("Config", "Layout"),
    "weightbeam.model_mappings.rules": ("Stack", "rule", "segments", "stack"),
    "weightbeam.model_mappings.ops": ("Scale", "Shift"),
    "weightbeam.model_mappings.blocks": tuple(name for name, each in vars(blocks).items() if _is_of(each, blocks)),
    "weightbeam.model_mappings.configuration": (
        *("size", "count", "real", "same", "truth", "mapped", "fixed"),
        *("derived", "written", "copied", "only", "unless", "inside"),
    ),
    "weightbeam.testing": tuple(name for name in testing.__all__ if name.islower()),
}


def pages() -> dict[str, str]:
    """Each page that the code writes, by its place on the site."""
    commands = {f"reference/commands/{name}.md": command_page(each) for name, each in COMMANDS.items()}
    return {
        "reference/commands.md": commands_page(),
        **commands,
        "reference/api.md": api_page(),
        "reference/extending.md": extending_page(),
    }


# --- the command line -------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """All commands, a line each."""
    rows = "".join(f"| [`{each.name}`](commands/{each.name}.md) | {each.help} |\n" for each in COMMANDS.values())
    listed = "\n".join(f"commands/{name}" for name in COMMANDS)
    return (
        f"# Commands\n\nWhat each command does, and what it takes. `weightbeam COMMAND --help` prints the same.\n\n"
        f"{_markdown(OVERVIEW)}\n\n| command | what it does |\n|---|---|\n{rows}\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    )


def command_page(command: Command) -> str:
    """What a command's `--help` says."""
    usage = f"```text\nweightbeam {command.name} {command.usage}\n```"
    return f"# weightbeam {command.name}\n\n{_markdown(command.about)}\n\n{usage}\n\n" + "\n".join(_tables(command))


def _tables(command: Command) -> Iterator[str]:
    """Its options, a table for each heading."""
    for group, options in groupby(command.all_options(), key=lambda each: each.group):
        yield f"## {(group or 'what it is called with').capitalize()}\n\n| option | takes | default | |\n|---|---|---|---|"
        for each in options:
            name = each.name if command.words and each.name in command.places else f"--{each.name}"
            short = f", `{each.short}`" if each.short else ""
            yield f"| `{name}`{short} | {_takes(each)} | {_default(each)} | {_cell(each.help)} |"
        yield ""


def _takes(option: Option) -> str:
    values = option.choices or (["true", "false"] if option.is_boolean else [option.metavar or option.name.upper()])
    return " ".join(f"`{_cell(each)}`" for each in values) + (", may repeat" if option.several else "")


def _default(option: Option) -> str:
    if option.default in (None, (), ""):
        return ""
    value = str(option.default).lower() if option.is_boolean else str(option.default)
    return f"`{_cell(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _markdown(text: str) -> str:
    """The text of a help page: what is indented there is code."""
    blocks = groupby(text.strip("\n").splitlines(), key=lambda line: line.startswith("  "))
    return "\n".join(
        "```text\n" + "\n".join(each[2:] for each in lines) + "\n```" if code else "\n".join(lines)
        for code, lines in blocks
    )


# --- Python -----------------------------------------------------------------------------------------------------------


def api_page() -> str:
    """Every public name, and what the functions return."""
    face = {name: getattr(importlib.import_module("weightbeam"), name) for name in HOMES}
    functions = [name for name, each in face.items() if inspect.isfunction(each)]
    returned = [each for name in functions for each in values_of(face[name]) if each.__name__ not in HOMES]
    classes = [each for each in face.values() if inspect.isclass(each) and not issubclass(each, Exception)]
    errors = [each for each in face.values() if inspect.isclass(each) and issubclass(each, Exception)]
    values = dict.fromkeys([*classes, *returned])
    return (
        "# Python\n\nEvery public name of `weightbeam`, with what it takes, returns and raises; "
        "[how they are used](python.md).\n\n## Functions\n\n"
        + "".join(_directive("autofunction", f"weightbeam.{name}") for name in functions)
        + "## Values\n\n"
        + "".join(map(_class, values))
        + "## Exceptions\n\n"
        + "".join(map(_class, errors))
    )


def values_of(function: Any) -> list[type]:
    """The classes of this package that a function says it returns."""
    module = inspect.getmodule(inspect.unwrap(function))
    said = str(inspect.signature(function).return_annotation)
    found = [getattr(module, word, None) for word in re.findall(r"\w+", said)]
    return [each for each in found if inspect.isclass(each) and each.__module__.startswith("weightbeam.")]


def extending_page() -> str:
    """What others build on."""
    head = (
        "# What to build on\n\nThe interfaces of a new store, format, family or target, and the checks of one's own. "
        "[The data model](../explanation/data_model.md) has the words that they use.\n\n"
    )
    return head + "".join(_section(importlib.import_module(module), names) for module, names in EXTENDING.items())


def _section(module: ModuleType, names: Iterable[str]) -> str:
    found = [(name, getattr(module, name)) for name in names]
    return f"## {module.__name__}\n\n" + "".join(
        _class(each) if inspect.isclass(each) else _directive("autofunction", f"{module.__name__}.{name}")
        for name, each in found
    )


def _class(each: type) -> str:
    said = _explained(each.__doc__ or "")  # its attributes, which stand in its own text
    members = ", ".join(name for name, _ in members_of(each) if name not in said)
    return _directive(
        "autoclass", f"{each.__module__}.{each.__qualname__}", *([f":members: {members}"] if members else ())
    )


def members_of(each: type) -> Iterator[tuple[str, Any]]:
    """The methods and properties that a class has for those who use it, but for what shows it."""
    for name, found in vars(each).items():
        plain = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if name.startswith("_") or name in vars(Shown) or not inspect.isfunction(plain):
            continue
        if plain.__name__ == name:  # else a field, whose default is a function
            yield name, plain


# --- what isn't documented --------------------------------------------------------------------------------------------


def undocumented() -> list[str]:
    """What a public name's docstring doesn't say, a line each: the site isn't built with any."""
    face = {name: getattr(importlib.import_module("weightbeam"), name) for name in HOMES}
    functions = {name: each for name, each in face.items() if inspect.isfunction(each)}
    classes = [each for each in face.values() if inspect.isclass(each)]
    classes += [each for function in functions.values() for each in values_of(function)]
    extended = {
        name: getattr(importlib.import_module(home), name) for home, names in EXTENDING.items() for name in names
    }
    extending = [each for each in extended.values() if inspect.isclass(each)]
    classes += extending
    missing = [f"{name}: no {part}" for name, each in functions.items() for part in _parts_missing(each, PARTS)]
    for name, each in extended.items():
        called = {name: each} if not inspect.isclass(each) else {f"{name}.{of}": one for of, one in members_of(each)}
        missing += [
            f"{name}: no {part}" for name, one in called.items() for part in _parts_missing(one, _parts_of(one))
        ]
    for each in dict.fromkeys(classes):
        documented = {"": each.__doc__} | {f".{name}": inspect.getdoc(member) for name, member in members_of(each)}
        missing += [f"{each.__name__}{name}: no docstring" for name, text in documented.items() if not text]
    return missing


def _parts_of(function: Any) -> Iterator[str]:
    """Those that the docstring of what others build on needs: no more than there is to say."""
    signature = inspect.signature(function)
    takes = signature.parameters.keys() - {"self"}
    if takes:
        yield "Args:"
    if takes and signature.return_annotation not in ("None", None):
        yield "Returns:"
    if function.__module__.startswith("weightbeam.testing"):
        yield from ("Raises:", "Example:")


def _parts_missing(function: Any, parts: Iterable[str]) -> Iterator[str]:
    """Of a public function's docstring."""
    text = (inspect.getdoc(function) or "").replace("\nYields:", "\nReturns:")
    yield from (part for part in parts if f"\n{part}" not in text)
    if re.search(r"\nReturns:\n\s+(`[^`]*`|[^`:\n])*:", text):
        yield "type before a colon in Returns, for which Sphinx takes what stands there"
    explained = _explained(text)
    keywords = {name.lstrip("*") for name in inspect.signature(function).parameters} - {"self"}
    yield from (f"word on {name}" for name in sorted(keywords - explained))


def _directive(kind: str, name: str, *options: str) -> str:
    inner = "\n".join([f".. {kind}:: {name}", *(f"   {each}" for each in options)])
    return f"```{{eval-rst}}\n{inner}\n```\n\n"


def _explained(docstring: str) -> set[str]:
    """The names that a docstring explains, a line each."""
    lines = re.findall(r"^  (\w[\w, ]*):", inspect.cleandoc(docstring), re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(lines)))
