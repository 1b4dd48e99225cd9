"""One process of a job that loads: `python member.py PROCESS PROCESSES PORT REQUEST ANSWERS`, where a request is a
file of JSON.

    {"devices": of all processes, "heartbeat": seconds after which JAX ends those who live, "abruptly": whether these end
    without JAX's farewell, "loads": [{"source": …,
    "mesh": [names, sizes], "options": {…}, "fault": [process, kind], "values": false, "waits": [process, path, "to call" or "to open"],
    "twice": whether another thread loads it, too, at the same time}, …]}

A list of sources, or of options, has one for each process. `waits` has a process call, or open its source, when there is such a file, or after a minute; when
it is done with a load, a process makes the file `done-LOAD-PROCESS` beside the request.

Writes JSON into the file of answers, a line for each load, of what this process holds of each array, `{"shards": {key:
[[index, digest], …]}, "read": bytes, "programs": …}`, or `{"refused": message, "devices": whether JAX's are begun}`,
`{"failed": message}`, `{"interrupted": true}`; with `values` the bytes of a shard in place of its digest. Not to its
standard output, where Gloo's threads write words of their own.
A process of its own, since the number of devices is settled when JAX starts.
"""

from __future__ import annotations

import base64
import concurrent.futures
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from digests import digest
from processes import read_so_far

# programs are compiled in a third of the time
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PROGRAMS: list[str] = []  # that were compiled
SIGNALS = {"dies": signal.SIGKILL, "sleeps": signal.SIGSTOP, "is interrupted": signal.SIGINT}


def values(array: np.ndarray) -> list:
    """All of it."""
    return [list(array.shape), array.dtype.name, base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def main(process: int, processes: int, port: str, request: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={request['devices'] // processes} {FAST}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            processes,
            process,
            heartbeat_timeout_seconds=request.get("heartbeat", 10),
            shutdown_timeout_seconds=100,
        )
    jax.monitoring.register_event_duration_secs_listener(note_program)
    for number, wanted in enumerate(request["loads"]):
        yield load_once(process, wanted)
        (folder / f"done-{number}-{process}").touch()


def note_program(event: str, *_: Any, **__: Any) -> None:
    if event.endswith("backend_compile_duration"):
        PROGRAMS.append(event)


def load_once(process: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """One load. A mesh of fewer devices than there are has the first of them."""
    import jax
    from jax._src import xla_bridge

    from weightbeam.pipelines.loading import load as loading
    from weightbeam.pipelines.loading.abstract import read_tree
    from weightbeam.pipelines.terminal.errors import Failed, Refused

    mesh = wanted["mesh"]["each"][process] if isinstance(wanted["mesh"], dict) else wanted["mesh"]
    if not isinstance(mesh, str):
        names, sizes = mesh
        mesh = jax.sharding.Mesh(np.array(jax.devices(), dtype=object)[: np.prod(sizes)].reshape(sizes), names)
    PROGRAMS.clear()
    before, plain, opening, version = read_so_far(), loading.Loading._read, loading._open, loading.__version__
    source, options = (
        each[process] if isinstance(each, list) else each for each in (wanted["source"], wanted.get("options", {}))
    )
    faulty, kind = wanted.get("fault", (None, ""))
    if faulty == process:
        break_reading(loading, kind, source)
    waiting, path, what = wanted.get("waits", (None, "", ""))
    if waiting == process and what == "to call":
        wait_for_file(Path(path))
    elif waiting == process:
        loading._open = lambda *arguments: wait_for_file(Path(path)) or opening(*arguments)
    load = functools.partial(loading.load, source, mesh=mesh, **options)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            other = [threads.submit(load)] if wanted.get("twice") else []
            tree = load()
            for each in other:
                each.result()
    except Refused as e:
        return {"refused": str(e), "devices": xla_bridge.backends_are_initialized()}
    except Failed as e:
        return {"failed": str(e)}
    except KeyboardInterrupt:
        return {"interrupted": True}
    finally:
        loading.Loading._read, loading._open, loading.__version__ = plain, opening, version
    read, compiled = read_so_far() - before, len(PROGRAMS)
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


def wait_for_file(path: Path) -> None:
    latest = time.monotonic() + 60
    while not path.exists() and time.monotonic() < latest:
        time.sleep(0.05)


def break_reading(loading: Any, kind: str, source: str) -> None:
    """Has this process fail, die, sleep or read for ten seconds or be interrupted in the middle of its reading, die while
    it opens the source, never come to its third vote, or fail there alone, be of another version, or lose the source that
    it has opened; or cuts a file short after the plan was made, or puts another in its place while it is read.
    """
    plain, calls = loading.Loading._read, []
    if kind == "is another version":
        loading.__version__ = "0.0.1"
        return
    if kind == "loses it":
        opening = loading._open
        loading._open = lambda *arguments: (opening(*arguments), shutil.rmtree(source))[0]
        return
    if kind == "dies opening":
        loading._open = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return
    if kind in ("misses", "breaks off"):
        vote = loading.Agreement.vote

        def third(self: Any) -> None:
            calls.append(1)
            if len(calls) == 3 and kind == "breaks off":
                raise ValueError("no room")
            time.sleep(600) if len(calls) == 3 else vote(self)

        loading.Agreement.vote = third
        return

    def broken(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if kind == "cuts":
            for path in Path(source).glob("*.safetensors"):
                os.truncate(path, path.stat().st_size // 2)
        elif kind == "replaces":
            if len(calls) == 3:
                os.replace(f"{source}/other", f"{source}/model.safetensors")
        elif len(calls) == 3:
            if kind == "is slow":
                time.sleep(10)
                return plain(self, *arguments)
            if kind == "sleeps":
                subprocess.Popen(["sh", "-c", f"sleep 10; kill -CONT {os.getpid()}"])
            if kind not in SIGNALS:
                raise OSError("the disk is on fire")
            os.kill(os.getpid(), SIGNALS[kind])
            time.sleep(2)  # so that it isn't done before it hears of an interrupt
        return plain(self, *arguments)

    loading.Loading._read = broken


if __name__ == "__main__":
    asked = Path(sys.argv[4])
    with Path(sys.argv[5]).open("w") as answers:
        for told in main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(asked.read_text()), asked.parent):
            print(json.dumps(told), file=answers, flush=True)
    if json.loads(asked.read_text()).get("abruptly"):
        os._exit(0)
