"""What is asked of `load`, jobs of several processes that load, and what they are held to."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lazily import lazily
from support import HERE, bare, digest

jax = lazily("jax")
traverse_util = lazily("flax.traverse_util")

Told = dict[str, list[dict[str, Any]]]  # for each load, by its name, what each process told; one that died told nothing


def abstract(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Each array as one of JAX's on the first device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {key: jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=here) for key, values in arrays.items()}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of values by their keys."""
    return traverse_util.unflatten_dict({tuple(key.split(".")): value for key, value in flat.items()})


def run_job(
    processes: int,
    loads: Mapping[str, Mapping[str, Any]],
    folder: Path,
    more: Mapping[str, str] | None = None,
    **asked: int,
) -> tuple[Told, list[subprocess.CompletedProcess[str]]]:
    """What the processes of a job tell of each load, and how they ended; `more` is added to their environment,
    `asked` to their request.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    request = folder / f"request-{processes}.json"
    request.write_text(json.dumps({"devices": 8, "loads": list(loads.values())} | asked, default=str))
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}"} | dict(more or {})
    command = [sys.executable, str(HERE / "loading" / "member.py")]
    told: Told = {name: [] for name in loads}
    started, ended = [], []
    for process in range(processes):  # files, since one that waits for a pipe to be read keeps the others waiting
        files = [(folder / f"{processes}-{process}.{kind}").open("w+") for kind in ("out", "err")]
        answers = folder / f"{processes}-{process}.answers"
        arguments = [*command, str(process), str(processes), port, str(request), str(answers)]
        started.append(
            (subprocess.Popen(arguments, stdout=files[0], stderr=files[1], env=environment), answers, *files)
        )
    for process, answers, *files in started:
        process.wait(timeout=500)
        out, err = (file.seek(0) or file.read() for file in files)
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        for name, line in zip(loads, answers.read_text().splitlines(), strict=False):  # one that died told less
            told[name].append(json.loads(line))
    return told, ended


def assert_holds(told: Mapping[str, Any], wanted: Mapping[str, np.ndarray]) -> None:
    """Every shard that a process holds is the part of the array that its index says."""
    assert "shards" in told, told
    assert {bare(key) for key in told["shards"]} == set(wanted)
    for key, shards in told["shards"].items():
        values = wanted[bare(key)]
        for index, found in shards:
            assert digest(values[tuple(slice(*cut) for cut in index)]) == found, (key, index)
