"""Pipelines in a notebook's kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import apache_beam.pipeline


@contextlib.contextmanager
def as_in_a_script() -> Iterator[None]:
    """Context manager: Beam makes and runs pipelines in IPython as it does elsewhere.

    Where it finds IPython it gives steps the cell's number, with a module that needs pandas, which Beam doesn't
    require, and leaves the pipeline's temporary folder to a runner of its own (apache_beam/utils/interactive_utils.py,
    pipeline.py, 2.77.0).
    """
    found = {name: getattr(apache_beam.pipeline, name) for name in ("alter_label_if_ipython", "is_in_ipython")}
    apache_beam.pipeline.alter_label_if_ipython = lambda *_: None  # type: ignore[attr-defined]
    apache_beam.pipeline.is_in_ipython = lambda: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(apache_beam.pipeline, name, function)
