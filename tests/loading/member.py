"""One process of a job that loads: `python member.py PROCESS PROCESSES PORT REQUEST ANSWERS`, where a request is a
file of JSON.

    {"devices": of all processes, "loads": [{"source": …, "mesh": [names, sizes], "options": {…}, "fault": [process,
    kind], "values": false}, …]}

Writes JSON into the file of answers, a line for each load, of what this process holds of each array, `{"shards": {key:
[[index, digest], …]}, "read": bytes, "programs": …}`, or `{"refused": message}`, `{"failed": message}`; with `values`
the bytes of a shard in place of its digest. Not to its standard output, where Gloo's threads write words of their own.
A process of its own, since the number of devices is settled when JAX starts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# programs are compiled in a third of the time
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PROGRAMS: list[str] = []  # that were compiled


def read_bytes() -> int:
    """What this process has asked the system to read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def digest(array: np.ndarray) -> list:
    """As `support.digest`, which imports more than a member needs."""
    return [list(array.shape), array.dtype.name, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()]


def values(array: np.ndarray) -> list:
    """All of it."""
    return [list(array.shape), array.dtype.name, base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def main(process: int, processes: int, port: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={request['devices'] // processes} {FAST}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}", processes, process, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=100
        )
    jax.monitoring.register_event_duration_secs_listener(note_program)
    return (run(process, wanted) for wanted in request["loads"])


def note_program(event: str, *_: Any, **__: Any) -> None:
    if event.endswith("backend_compile_duration"):
        PROGRAMS.append(event)


def run(process: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """One load. A mesh of fewer devices than there are has the first of them."""
    import jax

    from weightbeam.pipelines.errors import Failed, Refused
    from weightbeam.pipelines.loading import load as loading
    from weightbeam.pipelines.loading.abstract import read_tree

    mesh = wanted["mesh"]
    if not isinstance(mesh, str):
        names, sizes = mesh
        mesh = jax.sharding.Mesh(np.array(jax.devices(), dtype=object)[: np.prod(sizes)].reshape(sizes), names)
    PROGRAMS.clear()
    before, plain, run_alone = read_bytes(), loading.Loading._read, loading.Loading._run
    faulty, kind = wanted.get("fault", (None, ""))
    if faulty == process:
        break_reading(loading, kind, wanted["source"])
    if kind == "cuts" and jax.process_count() > 1:
        wait_for_all_plans(loading)
    try:
        tree = loading.load(wanted["source"], mesh=mesh, **wanted.get("options", {}))
    except Refused as e:
        return {"refused": str(e)}
    except Failed as e:
        return {"failed": str(e)}
    finally:
        loading.Loading._read, loading.Loading._run = plain, run_alone
    read, compiled = read_bytes() - before, len(PROGRAMS)
    keys = [target.key for target in read_tree(tree).targets]
    tell = values if wanted.get("values") else digest
    shards = {
        key: [
            [[[cut.start or 0, cut.stop] for cut in shard.index], tell(np.asarray(shard.data))]
            for shard in array.addressable_shards
        ]
        for key, array in zip(keys, jax.tree.leaves(tree), strict=True)
    }
    return {"shards": shards, "read": read, "programs": compiled}


def wait_for_all_plans(loading: Any) -> None:
    """Has no process read anything before all have made their plans: one that plans with files that are cut short
    refuses them, and the others would wait for it.
    """
    from jax.experimental.multihost_utils import sync_global_devices

    plain = loading.Loading._run

    def waiting(self: Any) -> Any:
        sync_global_devices("all have planned")
        return plain(self)

    loading.Loading._run = waiting


def break_reading(loading: Any, kind: str, source: str) -> None:
    """Has this process fail, or die, in the middle of its reading; or cuts a file short, after the plan was made."""
    plain, calls = loading.Loading._read, []

    def broken(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if kind == "cuts":
            for path in Path(source).glob("*.safetensors"):
                os.truncate(path, path.stat().st_size // 2)
        elif len(calls) == 3:
            if kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk is on fire")
        return plain(self, *arguments)

    loading.Loading._read = broken


if __name__ == "__main__":
    with Path(sys.argv[5]).open("w") as answers:
        for told in main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(Path(sys.argv[4]).read_text())):
            print(json.dumps(told), file=answers, flush=True)
