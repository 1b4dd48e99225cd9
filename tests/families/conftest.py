from pathlib import Path

import pytest
import support


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `cases/models.py` writes."""
    return support.generate(tmp_path_factory)
