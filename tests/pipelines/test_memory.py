"""Memory as a promise: a hard limit far below the model's size, and a budget that threads wait for."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run
from support import LLAMA, LLAMA_8B, convert, make_release, shapes

from weightbeam.formats.orbax import find_items, open_arrays
from weightbeam.formats.orbax.source import open_orbax
from weightbeam.formats.storage.local import RWF_DONTCACHE
from weightbeam.transforms.execution import arena

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
WIDE = LLAMA_8B | dict(num_hidden_layers=5, vocab_size=64_000, num_key_value_heads=32, intermediate_size=11_008)
VIRTUAL = 768 * MIB  # what threads and libraries reserve without using it; a limit on addresses counts it


def sparse(folder: Path, config: dict[str, Any] = WIDE) -> Path:
    """A checkpoint of zeros in bfloat16, 3.1 GB unless told, which takes no room on the disk."""
    header, offset = {}, 0
    for name, shape in shapes(config).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    return folder


@pytest.fixture
def group() -> Iterator[Path | None]:
    """A control group whose memory can be limited; None where the system doesn't let us have one."""
    for root in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        made = Path(root) / f"weightbeam-{uuid.uuid4().hex[:8]}"
        try:
            made.mkdir()
        except OSError:
            continue
        if any((made / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            yield made
            made.rmdir()
            return
        made.rmdir()
    yield None


def run_within(
    limit: int, group: Path | None, *command: object, seconds: float = 100
) -> subprocess.CompletedProcess[str]:
    """Runs a command that can't have more than `limit` bytes."""

    def limited() -> None:
        if group is None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit + VIRTUAL, limit + VIRTUAL))
        else:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    if group is not None:
        file = group / "memory.limit_in_bytes"
        (file if file.exists() else group / "memory.max").write_text(str(limit))
    return run(*command, cwd=ROOT, preexec_fn=limited, timeout=seconds)


def test_a_model_of_many_times_the_limit(tmp_path: Path, group: Path | None) -> None:
    """The process may have no more than `weightbeam plan` says that it needs, a sixth of the model's size. Far less
    doesn't do.
    """
    source = sparse(tmp_path / "source")
    options = [*("--source", str(source), "--mesh", "fsdp=16", "--unit_bytes", "48MiB"), "--direct_num_workers=2"]
    script = [sys.executable, "-m", "weightbeam", "plan"]
    run(*script, *options, "--json", tmp_path / "plan.json", cwd=ROOT, status=0)
    limit = json.loads((tmp_path / "plan.json").read_text())["memory"]["per_worker_bytes"]
    assert 6 * limit < (source / "model.safetensors").stat().st_size < 7 * limit
    command = [
        sys.executable,
        "-m",
        "weightbeam",
        "convert",
        *options,
        "--output",
        str(tmp_path / "out"),
        "--compression",
        "zstd",
    ]
    done = run_within(limit, group, *command)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "0" / "commit_success.txt").exists()
    if group is not None:
        assert run_within(limit // 4, group, *command, "--overwrite").returncode == -9, "the limit doesn't limit"


WIDEST = LLAMA_8B | dict(  # a layer of Llama 3.1 405B
    num_hidden_layers=1, hidden_size=16_384, intermediate_size=53_248, num_attention_heads=128, num_key_value_heads=8, vocab_size=256
)  # fmt: skip


@pytest.mark.skipif("LARGE_CHUNKS" not in os.environ, reason="writes 26 GB; make soak runs it")
def test_every_command_keeps_the_bound(tmp_path: Path, group: Path | None) -> None:
    """That of its plan, with the threads and units that it has unless told, of the widest weights that there are."""
    source, made = sparse(tmp_path / "source", WIDEST), tmp_path / "made"
    script = [sys.executable, "-m", "weightbeam"]
    run(*script, "plan", source, "--json", tmp_path / "plan.json", cwd=ROOT, status=0)
    limit = json.loads((tmp_path / "plan.json").read_text())["memory"]["per_worker_bytes"]
    for command in (
        ("convert", source, made),
        ("convert", source, tmp_path / "folders", "--use_ocdbt", "false"),
        ("verify", source, made),
        ("reshard", made, tmp_path / "resharded", "--mesh", "fsdp=4"),
        ("export", made, tmp_path / "back", "--like", source),
        ("quantize", source, tmp_path / "quantised"),
    ):
        done = run_within(limit, group, *script, *command, seconds=300)
        assert done.returncode == 0, (command, done.stderr)
        for name in ("folders", "resharded", "back", "quantised"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)


ONE_HEAP = """
import ctypes, os, sys, threading
from weightbeam.formats.heaps import use_one_heap
if sys.argv[1] == "one": use_one_heap()
libc, wait = ctypes.CDLL(None), threading.Barrier(9)
libc.malloc.restype = ctypes.c_void_p
def take():
    libc.malloc(ctypes.c_size_t(5000))
    wait.wait()
threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads: thread.start()
wait.wait()
libc.fdopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, file)
libc.fflush(file)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of another C library")
def test_a_command_has_one_heap() -> None:
    """Where glibc would have one for each thread."""
    heaps = [
        run(sys.executable, "-c", ONE_HEAP, how, cwd=ROOT, status=0).stdout.count("<heap nr=")
        for how in ("one", "many")
    ]
    assert heaps[0] == 1 < heaps[1]


TRAINED = """
import sys, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
values = np.resize(np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32), (3686, 32, 4096))
tree = {"params": {"params": {"decoder": {"layers": {"mlp": {"wi_0": {"kernel": jnp.asarray(values)}}}}}}}
ocp.PyTreeCheckpointer().save(sys.argv[1], tree)
"""


@pytest.mark.skipif("LARGE_CHUNKS" not in os.environ, reason="writes 6 GB; make soak runs it")
@pytest.mark.parametrize("options", [("--mesh", "fsdp=2"), ("--save_dtype", "bfloat16", "--compression", "zstd")])
def test_one_chunk_that_is_larger_than_the_limit(tmp_path: Path, group: Path | None, options: tuple[str, ...]) -> None:
    """1.8 GiB of float32 in a single zstd chunk with all layers, as training writes it, is cut anew within 1.5 GiB, to
    the bit.
    """
    source = tmp_path / "run" / "7" / "items"
    run(sys.executable, "-c", TRAINED, source, status=0)
    (chunk,) = {array.chunk_bytes for array in open_orbax(source, any_tree=True).arrays.values()}
    assert chunk > 1_800 * MIB
    command = [sys.executable, "-m", "weightbeam", "reshard", str(source), str(tmp_path / "out"), *options]
    done = run_within(1536 * MIB, group, *command, seconds=500)
    assert done.returncode == 0, done.stderr
    stores = [
        open_arrays(items)["params.params.decoder.layers.mlp.wi_0.kernel"]
        for items in (find_items(source), find_items(tmp_path / "out"))
    ]
    for row in range(0, 3686, 400):
        old, new = (np.asarray(store[row].read().result()) for store in stores)
        assert old.astype(new.dtype).tobytes() == new.tobytes()


def cached(file: Path) -> int:
    """Bytes of a file that the system keeps in memory."""
    size = file.stat().st_size
    # private: ctypes wants it writable
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE) as pages:
        held = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), held) == 0
        return mmap.PAGESIZE * sum(page & 1 for page in held)


def uncache(file: Path) -> None:
    """Has the system forget a file that it may forget; skips the test where it doesn't."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(file):
        pytest.skip("this file system lies in memory")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of 33 MB."""
    config = LLAMA | dict(vocab_size=32_000, hidden_size=256)
    return make_release(tmp_path / "source", config)


def test_what_was_written_leaves_the_page_cache(source: Path, tmp_path: Path) -> None:
    """Else a large checkpoint would push out all that others read. What the assembly read of it, a few pages of each
    unit, may stay.
    """
    uncache(source / "model.safetensors")  # or this test can't be had
    files = list((convert(source, tmp_path / "out", "--mesh", "fsdp=16") / "items").glob("ocdbt.process_*/d/*"))
    assert sum(file.stat().st_size for file in files) > 30 * MIB
    assert sum(map(cached, files)) < 2 * MIB


@pytest.mark.parametrize("was_cached", [True, False])
def test_reading_leaves_the_page_cache_as_it_was(source: Path, tmp_path: Path, was_cached: bool) -> None:
    shard = source / "model.safetensors"
    uncache(shard)
    with shard.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, RWF_DONTCACHE)
        except OSError:
            pytest.skip("this system keeps what it reads")
    if was_cached:
        shard.read_bytes()
    convert(source, tmp_path / "out", "--mesh", "fsdp=16")
    assert cached(shard) < 2 * MIB if not was_cached else cached(shard) > 30 * MIB


def test_a_thread_waits_for_the_budget() -> None:
    """Two arenas that don't fit together: the second comes when the first is given back, or is gone."""
    for end in ("given back", "gone"):
        first = arena.take(60, budget=100)
        taken = threading.Event()
        waiting = threading.Thread(
            target=lambda taken=taken: (arena.give_back(arena.take(60, budget=100)), taken.set())
        )
        waiting.start()
        time.sleep(0.05)
        assert not taken.is_set()
        if end == "given back":
            arena.give_back(first)
        del first
        gc.collect()
        waiting.join(5)
        assert taken.is_set(), end


def test_no_thread_waits_for_itself() -> None:
    """A runner that reads all units of a bundle before it writes any takes more than the budget, and goes on."""
    arenas = [arena.take(60, budget=100) for _ in range(3)]
    for one in arenas:
        arena.give_back(one)
