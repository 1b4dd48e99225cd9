"""Imports run one way: model_mappings -> formats -> transforms -> pipelines; and each package's own bans hold."""

import ast
import sys
from pathlib import Path

ORDER = ["model_mappings", "formats", "transforms", "pipelines"]
HEAVY = {"torch", "transformers", "jax", "orbax"}  # no worker and no conversion imports these
BANNED = {
    "model_mappings": HEAVY | {"apache_beam", "tensorstore", "safetensors"},
    "formats": HEAVY | {"apache_beam", "safetensors"},
    "transforms": HEAVY | {"safetensors"},
    "pipelines": HEAVY | {"safetensors"},
}


def imported(path: Path) -> set[str]:
    """The top-level packages that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def main() -> int:
    """Prints every import that runs the wrong way."""
    faults = []
    for rank, package in enumerate(ORDER):
        for path in sorted(Path(package).rglob("*.py")):
            faults += [f"{path} imports {name}" for name in sorted(imported(path) & (BANNED[package] | set(ORDER[rank + 1 :])))]
    print("\n".join(faults) or f"imports run one way: {' -> '.join(ORDER)}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
