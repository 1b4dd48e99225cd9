"""The package is pure: numpy and ml_dtypes, and nothing of the layers above it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from processes import run

ROOT = Path(__file__).parents[2]
SCRIPT = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
from weightbeam import model_mappings
names = [module.name for module in pkgutil.walk_packages(model_mappings.__path__, "weightbeam.model_mappings.")]
for name in names:
    importlib.import_module(name)
roots = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(json.dumps([sorted(names), sorted(roots)]))
"""


def test_importing_every_module_pulls_in_numpy_alone():
    """In a fresh interpreter: no jax, torch, apache_beam, orbax or tensorstore, and no formats, transforms or pipelines
    either.
    """
    done = run(sys.executable, "-c", SCRIPT, cwd=ROOT, status=0)
    names, roots = json.loads(done.stdout)
    files = {
        "weightbeam." + ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in (ROOT / "model_mappings").rglob("*.py")
    }
    assert set(names) == {name.removesuffix(".__init__") for name in files} - {"weightbeam.model_mappings"}
    assert roots == ["ml_dtypes", "numpy", "weightbeam"]
