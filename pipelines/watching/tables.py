"""What identifies the tables of this version: by what they say, and not by how it is written.

A watcher does again what other tables would make otherwise. So the key of a release or a step has a hash of the tables
in it: of their syntax, without comments, docstrings, annotations and layout, which is the same on every version of
Python.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from weightbeam import model_mappings
from weightbeam.transforms.planning.inputs import modules_of
from weightbeam.transforms.planning.transfer import DECODING_VERSION

ROOT = Path(str(model_mappings.__file__)).parent
UNSAID = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}  # fields of nodes that settle nothing


@functools.cache
def tables() -> str:
    """Identifies the tables and the decoding of this version: what made a release's values."""
    return hash_of({path.relative_to(ROOT).as_posix(): path.read_bytes() for path in modules_of(ROOT)})


def hash_of(sources: dict[str, bytes]) -> str:
    """Identifies modules by their syntax."""
    said = [DECODING_VERSION, [(name, syntax(ast.parse(source))) for name, source in sorted(sources.items())]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def syntax(node: Any) -> Any:
    """A syntax tree as JSON. Empty fields are left out: each version of Python adds some."""
    if isinstance(node, list):
        return [syntax(each) for each in node if not _is_docstring(each)]
    if not isinstance(node, ast.AST):
        return node if isinstance(node, str | int | None) else [type(node).__name__, repr(node)]
    fields = {name: syntax(value) for name, value in ast.iter_fields(node) if name not in UNSAID}
    return [type(node).__name__, {name: value for name, value in fields.items() if value not in (None, [])}]


def _is_docstring(node: Any) -> bool:
    """Whether a statement is a text by itself."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
