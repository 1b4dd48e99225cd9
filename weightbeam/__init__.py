"""Weightbeam moves model weights between Hugging Face releases and MaxText/JAX.

    import weightbeam as wb

    plan = wb.plan("hf://Qwen/Qwen3-8B", mesh="fsdp=16")     # headers only; print(plan), plan.problems, plan.to_json()
    wb.convert(plan, "gs://bucket/qwen3-8b")                 # raises wb.Refused, wb.Failed
    assert wb.verify("gs://bucket/qwen3-8b").ok

Importing this module imports nothing else and changes nothing: each name is fetched when it is first used
(`weightbeam.pipelines.api`). The folders of the repository's top level are this package's subpackages:
`model_mappings`, `formats`, `transforms` and `pipelines` are links to them here, and plain folders where the package is
installed. Editors and type checkers read `__init__.pyi`, which `python -m deploy.face` writes.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0.dev0"
__all__ = [
    "Busy", "Failed", "Plan", "Progress", "Refused", "convert", "cut", "dequantize", "diff", "export", "fit", "inspect",
    "load", "logits", "materialize", "maxtext_config", "merge", "open", "plan", "quantize", "reshard", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # what Python's own machinery asks for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "maxtext":
        from importlib import import_module

        return import_module("weightbeam.maxtext")
    from weightbeam.pipelines import api

    if name not in api.HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
