"""The face of the package as editors and type checkers see it: `weightbeam/__init__.pyi`, made of the commands' options.
`python -m deploy.face` writes it anew.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from weightbeam.pipelines.api import HOMES
from weightbeam.transforms.planning.options import Unsaid

FILE = Path(__file__).parents[1] / "weightbeam" / "__init__.pyi"
PACKAGE = "weightbeam.pipelines"
HEAD = '"""Written by `python -m deploy.face`, of the options that each command has."""\n\n'
IMPORTS = """\
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

"""


def text() -> str:
    """The stub as the file holds it: values, and functions whose options aren't spelled out in the code."""
    spelled, taken, needed = list[str](), list[tuple[str, str]](), set[tuple[str, str]]()
    for name, home in sorted(HOMES.items()):
        module = importlib.import_module(f"{PACKAGE}.{home}")
        found = getattr(module, name)
        if not hasattr(found, "__wrapped__"):
            taken.append((module.__name__, name))
            continue
        signature = inspect.signature(found)
        spelled.append(_spelled(name, signature, inspect.cleandoc(found.__doc__ or "")))
        words = set(re.findall(r"[A-Z]\w+", str(signature))) & set(vars(module))
        needed |= {(vars(module)[word].__module__, word) for word in words if inspect.isclass(vars(module)[word])}
    ours = {(module, word) for module, word in needed if module.startswith("weightbeam.")} - set(taken)
    lines = [f"from {module} import {word} as {word}" for module, word in sorted(taken)]
    lines += [f"from {module} import {word}" for module, word in sorted(ours) if word != "Report"]
    lines += ["from weightbeam.pipelines.terminal.progress import Report"]
    listed = "".join(f"    {name!r},\n" for name in sorted(HOMES)).replace("'", '"')
    body = (
        f"{HEAD}{IMPORTS}" + "\n".join(lines) + f"\n\n__version__: str\n__all__ = [\n{listed}]\n\n" + "\n".join(spelled)
    )
    return _formatted(body)


def _spelled(name: str, signature: inspect.Signature, doc: str) -> str:
    """A function of the stub."""
    parts, keywords = list[str](), False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not keywords:
            parts.append("*")
            keywords = True
        default = each.default + 0 if isinstance(each.default, Unsaid) else each.default
        kind = str(each.annotation)
        if each.kind is not each.KEYWORD_ONLY:  # a place
            kind = re.sub(r"\bstr\b", "str | PathLike[str]", kind)
        parts.append(f"{each.name}: {kind}" + ("" if default is each.empty else f" = {default!r}"))
    body = textwrap.indent(f'"""{doc}\n"""', "    ")
    return f"def {name}({', '.join(parts)}) -> {signature.return_annotation}:\n{body}\n"


def _formatted(code: str) -> str:
    """Code as ruff lays it out."""
    for command in (["check", "--fix", "--select", "I,F401"], ["format"]):
        ran = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(FILE), "-"]
        code = subprocess.run(ran, input=code, capture_output=True, text=True, check=True).stdout
    return code


if __name__ == "__main__":
    FILE.write_text(text())
