"""Libraries that take seconds to import, imported by the tests that use them: collecting needs none of them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


class lazily:  # noqa: N801, it stands where an import would
    """A module that is imported when one of its names is first used.

        torch = lazily("torch")
        jnp = lazily("jax.numpy")

    Attributes:
      _name: the module's full name.
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what pytest asks of everything in a module
            raise AttributeError(name)
        module = importlib.import_module(self._name)
        if not hasattr(module, name) and importlib.util.find_spec(f"{self._name}.{name}"):
            return importlib.import_module(f"{self._name}.{name}")
        return getattr(module, name)
