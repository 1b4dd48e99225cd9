"""Imports run one way: model_mappings -> formats -> transforms -> pipelines; and each package's own bans hold."""

import ast
import sys
from pathlib import Path

ROOT = "weightbeam"
ORDER = ["model_mappings", "formats", "transforms", "pipelines"]
HEAVY = {"torch", "transformers", "jax", "orbax"}  # no worker and no conversion imports these
BANNED = {
    "model_mappings": HEAVY | {"apache_beam", "tensorstore", "safetensors"},
    "formats": HEAVY | {"apache_beam", "safetensors"},
    "transforms": HEAVY | {"safetensors"},
    "pipelines": HEAVY | {"safetensors"},
}
# A module that is for one of these libraries, and imports it inside a function.
WITH_JAX = ("abstract", "agreement", "decoding", "load", "maxtext", "meeting", "mesh", "placing", "tree")
EXCEPTIONS: dict[str, set[str]] = {f"pipelines/loading/{name}.py": {"jax"} for name in WITH_JAX}


def imported(path: Path) -> set[str]:
    """What a module imports, anywhere in it: top-level packages, and the package's own folders."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            first, _, rest = module.partition(".")
            names.add(rest.split(".")[0] if first == ROOT else first)
            if first in ORDER:
                names.add(f"{first} without {ROOT}")
    return names


def main() -> int:
    """Prints every import that runs the wrong way."""
    faults = []
    for rank, package in enumerate(ORDER):
        for path in sorted(Path(package).rglob("*.py")):
            banned = (BANNED[package] | set(ORDER[rank + 1 :])) - EXCEPTIONS.get(path.as_posix(), set())
            faults += [
                f"{path} imports {name}" for name in sorted(imported(path)) if name in banned or " without " in name
            ]
    print("\n".join(faults) or f"imports run one way: {' -> '.join(ORDER)}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
