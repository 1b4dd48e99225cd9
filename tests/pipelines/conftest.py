from pathlib import Path

import pytest
import support


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one file, which no test changes; a test file that needs another has its own."""
    return support.make_release(tmp_path_factory.mktemp("source") / "hf")
