"""The example of docs/loading.md runs, over several devices."""

from __future__ import annotations

import os
import sys

from processes import run
from support import HERE


def test_load_nnx() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ran = run(sys.executable, "-m", "examples.load_nnx", cwd=HERE.parent, env=environment, status=0)
    assert "32 arrays on 4 devices; token 7 begins with [" in ran.stdout
