from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from lazily import lazily

torch = lazily("torch")


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `cases/models.py` writes."""
    return support.generate(tmp_path_factory)


@pytest.fixture
def no_grad() -> Iterator[None]:
    """`torch.no_grad()` around a test: as a decorator it would import torch to collect it."""
    with torch.no_grad():
        yield
