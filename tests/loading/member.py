"""One process of a job that loads: `python member.py PROCESS PROCESSES PORT REQUEST`, where a request is JSON.

    {"devices": of all processes, "loads": [{"source": …, "mesh": [names, sizes] or text, "options": {…}, "fault": [process, kind]}, …]}

Prints JSON, for each load what this process holds of each array, `{"shards": {key: [[index, digest], …]}, "read": bytes, "programs": …}`,
or `{"refused": message}`, `{"failed": message}`. A process of its own, since the number of devices is settled when JAX starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np


def read_bytes() -> int:
    """What this process has asked the system to read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main(process: int, processes: int, port: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={request['devices'] // processes}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=100)
    jax.monitoring.register_event_duration_secs_listener(note_program)
    return [run(process, wanted) for wanted in request["loads"]]


PROGRAMS: list[str] = []  # that were compiled


def note_program(event: str, *_: Any, **__: Any) -> None:
    if event.endswith("backend_compile_duration"):
        PROGRAMS.append(event)


def run(process: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """One load."""
    import jax
    from support import digest

    from weightbeam.pipelines.errors import FailedError, RefusedError
    from weightbeam.pipelines.loading import load as loading
    from weightbeam.pipelines.loading.abstract import read_tree

    mesh = wanted["mesh"]
    if not isinstance(mesh, str):
        names, sizes = mesh
        mesh = jax.sharding.Mesh(np.array(jax.devices(), dtype=object).reshape(sizes), names)
    PROGRAMS.clear()
    before, plain = read_bytes(), loading.Loading._read
    if wanted.get("fault", [None])[0] == process:
        break_reading(loading, wanted["fault"][1])
    try:
        tree = loading.load(wanted["source"], mesh=mesh, **wanted.get("options", {}))
    except RefusedError as e:
        return {"refused": str(e)}
    except FailedError as e:
        return {"failed": str(e)}
    finally:
        loading.Loading._read = plain
    read, compiled = read_bytes() - before, len(PROGRAMS)
    keys = [target.key for target in read_tree(tree).targets]
    shards = {
        key: [[[[cut.start or 0, cut.stop] for cut in shard.index], digest(np.asarray(shard.data))] for shard in array.addressable_shards]
        for key, array in zip(keys, jax.tree.leaves(tree), strict=True)
    }
    return {"shards": shards, "read": read, "programs": compiled}


def break_reading(loading: Any, kind: str) -> None:
    """Has this process fail, or die, in the middle of its reading."""
    plain, calls = loading.Loading._read, []

    def broken(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            if kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk is on fire")
        return plain(self, *arguments)

    loading.Loading._read = broken


if __name__ == "__main__":
    told = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    print(json.dumps(told), flush=True)
