"""The models, adapters and merged parameters that PEFT wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import support


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make_adapters.py` writes: once in a test run."""
    return support.write_once(
        tmp_path_factory, "adapters", [sys.executable, str(Path(__file__).parent / "make_adapters.py")]
    )
