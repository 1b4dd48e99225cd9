from collections.abc import Iterator

import pytest
from lazily import lazily

torch = lazily("torch")


@pytest.fixture
def no_grad() -> Iterator[None]:
    """`torch.no_grad()` around a test: as a decorator it would import torch to collect it."""
    with torch.no_grad():
        yield
