"""Models for the engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import LLAMA, random_tensors, save


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "llama", LLAMA, random_tensors(LLAMA))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 200 MB: a conversion takes long enough to be met in the middle."""
    config = LLAMA | {"num_hidden_layers": 48, "hidden_size": 512, "intermediate_size": 1024}
    return save(tmp_path_factory.mktemp("model") / "large", config, random_tensors(config))
