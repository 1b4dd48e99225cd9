"""From a bucket into a bucket over a slow link, against reading and writing the same bytes at once: are both directions
of it used?

    python -m benchmarks.shaped_link --folder out/bench --layers 26 53 --rounds 3 --json benchmarks/results.json

Two network namespaces are joined by a link of 240 Mbit/s each way (`tc tbf`). In one the tests' bucket serves a
Llama-like model of about 0.99 GB in bfloat16, and then one of 2 GB, for which start-up and assembly take as long; in the
other run, in turns, so that what else the machine does changes them alike:

- *raw*: TensorStore reads all objects in ranges of 8 MiB, 16 at a time, and meanwhile writes as many bytes as objects of 16 MiB, 16
  at a time. Only the transfer is on the clock.
- *convert*: `weightbeam convert` as a subprocess, with four threads and with one; start-up, imports and assembly are inside.

The medians count, and the ratio is that to the raw transfer of the same round. It needs root's rights, for the
namespaces, and Google's client (`pip install '.[gcp]'`); without them it says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import TESTS
from benchmarks.figures import Figure, make_parser, report
from benchmarks.measure import WEIGHTBEAM, Run, run, tell
from benchmarks.models import MESH, make_source

RATE = 240  # Mbit/s, each way
SHAPE = ("tbf", "rate", f"{RATE}mbit", "burst", "128k", "latency", "20ms")
SERVER, CLIENT = "wbl-server", "wbl-client"  # the namespaces
ADDRESS, PORT = "10.232.0.1", 9000  # of the bucket
IN, OUT, RAW = "in-bucket", "out-bucket", "raw-bucket"
THREADS = {4: 1.15, 1: 1.25}  # how many, and the limit: times the raw transfer
READ, WRITE, AT_A_TIME = 8 << 20, 16 << 20, 16  # bytes of the raw transfer's requests and objects, and how many of each


def missing(*programs: str) -> str:
    """What this machine lacks, of these programs, too; empty if nothing."""
    lacks = [program for program in ("ip", "tc", *programs) if shutil.which(program) is None]
    lacks += ["root's rights"] if os.geteuid() else []
    if not (importlib.util.find_spec("google") and importlib.util.find_spec("google.cloud.storage")):
        lacks.append("google-cloud-storage")
    return ", ".join(lacks)


@contextmanager
def link() -> Iterator[None]:
    """Context manager: two namespaces, and a link between them that is as slow in both directions."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with ExitStack() as stack:
        for name in (SERVER, CLIENT):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("-n", SERVER, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", CLIENT)
        for name, address in ((SERVER, ADDRESS), (CLIENT, "10.232.0.2")):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *SHAPE], check=True)
        yield


def at(namespace: str, *command: object) -> list[str]:
    """A command in one of the namespaces."""
    return ["ip", "netns", "exec", namespace, *map(str, command)]


@contextmanager
def bucket(folder: Path) -> Iterator[dict[str, str]]:
    """A server with the buckets that are the folder's sub-folders; the environment of its clients."""
    options = ("--host", ADDRESS, "--port", PORT, "--folder", folder, "--bucket", OUT, "--bucket", RAW)
    with subprocess.Popen(
        at(SERVER, sys.executable, TESTS / "servers/gcs.py", *options), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout
            url = server.stdout.readline().strip()
            listing = f"import urllib.request; urllib.request.urlopen('{url}/storage/v1/b/{IN}/o').read()"
            # the server sums the objects when they are first listed; a bucket has the sums
            subprocess.run(at(SERVER, sys.executable, "-c", listing), check=True)
            yield clients_of(url)
        finally:
            server.terminate()


def clients_of(url: str) -> dict[str, str]:
    """The environment of a bucket's clients."""
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        "GOOGLE_CLOUD_PROJECT": "test",
    }


@contextmanager
def serving(source: Path, folder: Path) -> Iterator[Path]:
    """Context manager: a folder with the source in the folder of a bucket, for a server."""
    served = folder / "served"
    shutil.rmtree(served, ignore_errors=True)
    shutil.copytree(source, served / IN / source.name, copy_function=os.link)
    yield served
    shutil.rmtree(served)


def transfer(source: Path) -> float:
    """Reads the objects of a folder that is served, and writes as many bytes at the same time; returns the seconds it
    took.
    """
    import tensorstore as ts

    served, target = (ts.KvStore.open({"driver": "gcs", "bucket": name}).result() for name in (IN, RAW))
    sizes = {path.name: path.stat().st_size for path in source.iterdir()}
    block = os.urandom(WRITE)
    start = time.monotonic()
    parts = [
        (f"{source.name}/{name}", slice(at, min(at + READ, size)))
        for name, size in sizes.items()
        for at in range(0, size, READ)
    ]
    with ThreadPoolExecutor(AT_A_TIME) as readers, ThreadPoolExecutor(AT_A_TIME) as writers:
        reads = readers.map(lambda part: len(served.read(part[0], byte_range=part[1]).result().value), parts)
        writes = writers.map(
            lambda number: target.write(str(number), block).result(), range(-(-sum(sizes.values()) // WRITE))
        )
        if sum(reads) != sum(sizes.values()) or not all(writes):
            raise RuntimeError("the bucket doesn't have what the folder has")
    seconds = time.monotonic() - start
    target.delete_range(ts.KvStore.KeyRange()).result()
    return seconds


def convert(source: Path, threads: int, output: str, *options: str | Path) -> Run:
    """A conversion from one bucket into the other."""
    places = (f"gs://{IN}/{source.name}", f"gs://{OUT}/{output}")
    return run(*at(CLIENT, WEIGHTBEAM, "convert", *places, "--mesh", MESH, f"--direct_num_workers={threads}", *options))


def measure(source: Path, served: Path, rounds: int, options: Sequence[str]) -> tuple[list[Figure], dict[str, Any]]:
    """The figures for a model, and every single round."""
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    size = f"{nbytes / 1e9:.2f} GB"
    raw: list[float] = []
    made: dict[int, list[Run]] = {threads: [] for threads in THREADS}
    for number in range(1, rounds + 1):
        command = at(CLIENT, sys.executable, "-m", "benchmarks.shaped_link", "--transfer", source)
        with bucket(served) as environment:  # a new one each time: it holds everything in memory
            os.environ.update(environment)
            raw.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            for threads, runs in made.items():
                runs.append(convert(source, threads, f"converted-{threads}", *options))
        told = (f"{threads} threads {runs[-1].seconds:.1f} s" for threads, runs in made.items())
        tell("link", f"{size}, round {number} of {rounds}: raw {raw[-1]:.1f} s, {', '.join(told)}")
    figures = [Figure("link, raw transfer", size, statistics.median(raw), "s")]
    for threads, runs in made.items():
        ratio = statistics.median(one.seconds / alone for one, alone in zip(runs, raw, strict=True))
        what = f"link, convert with {threads} thread{'s' if threads > 1 else ''}"
        figures.append(Figure(what, size, statistics.median(one.seconds for one in runs), "s"))
        figures.append(Figure(f"{what}, of raw", size, ratio, "×", THREADS[threads]))
        figures.append(Figure(f"{what}, CPU", size, statistics.median(one.cpu_seconds for one in runs), "s"))
    seconds = {f"convert_seconds_{threads}": [one.seconds for one in runs] for threads, runs in made.items()}
    return figures, {"bytes": nbytes, "raw_seconds": raw, **seconds}


def main() -> None:
    """Measures, and prints the table."""
    parser = make_parser(__doc__, layers=None, rounds=3)
    parser.add_argument("--layers", type=int, nargs="+", default=(26, 53), help="of each model; 26 make about 1 GB")
    parser.add_argument("--options", default="", help="more options of the conversion, such as '--unit_bytes 24MiB'")
    # the raw transfer, in a namespace
    parser.add_argument("--transfer", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.transfer:
        print(json.dumps(transfer(args.transfer)))
        return
    if lacks := missing():
        return tell("link", f"not measured: {lacks} missing here")
    figures, details = list[Figure](), dict[str, Any]()
    for layers in args.layers:
        source = make_source("small", args.folder, layers)
        with serving(source, args.folder) as served, link():
            found, details[source.name] = measure(source, served, args.rounds, shlex.split(args.options))
        figures += found
    report("link", figures, details, args)


if __name__ == "__main__":
    main()
