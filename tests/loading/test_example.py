"""The example of docs/howto/loading.md runs, over several devices."""

from __future__ import annotations

import os
import sys

import pytest
from processes import run
from support import HERE


@pytest.mark.parametrize("way", [("-m", "examples.load_nnx"), ("examples/load_nnx.py",)], ids=["module", "file"])
def test_load_nnx(way: tuple[str, ...]) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ran = run(sys.executable, *way, cwd=HERE.parent, env=environment, status=0)
    assert "33 arrays on 4 devices; token 7 begins with [" in ran.stdout
