"""Models for the engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import LLAMA, make_release


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 200 MB: a conversion takes long enough to be met in the middle."""
    config = LLAMA | {"num_hidden_layers": 48, "hidden_size": 512, "intermediate_size": 1024}
    return make_release(tmp_path_factory.mktemp("model") / "large", config)
