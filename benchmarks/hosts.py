"""On 1, 2 and 4 hosts of a Flink cluster, from a bucket into a bucket, each host with a link of its own: is twice the
hosts half the time?

    PYTHONPATH=.:tests python -m benchmarks.hosts --folder out/bench --layers 26 --json benchmarks/results.json

The cluster is that of `tests/engines`: network namespaces with a task manager of one slot and a worker pool each, their
links shaped to `--rate` in either direction. The tests' bucket serves a Llama-like model of about 1 GB in bfloat16 from
outside of them. `--parallelism` says how many hosts a conversion gets.

All hosts, the bucket and the links between them are this machine's cores, which mustn't be what is measured: a local
conversion of a GB takes some 22 seconds of them, and over four links of 30 Mbit/s, at 70 seconds a GB, two cores have 140.
The data must be many times the largest unit, 65 MB, too: reading it while nothing can be written takes 17 seconds, on any
number of hosts.

What counts is the *work phase*, told by the links' own counters: from the first 4 MB that the hosts got from the bucket
until the bytes that they have sent are all but 1 %. Submission and the workers' start come before it, the assembly after it. The
*efficiency* of n hosts is the seconds of one by n times theirs. The *model's error* is by how much `weightbeam plan
--workers`, which simulates the same phase of the same units, is too slow or (negative) too fast.

It needs what `make test-engines` needs: Java, Maven and root's rights, and Google's client; without them it says so,
and measures nothing.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, make_parser, report
from benchmarks.measure import WEIGHTBEAM, run, tell
from benchmarks.models import MESH, make_source
from benchmarks.shaped_link import IN, OUT, PORT, clients_of, missing, serving
from weightbeam.formats.safetensors import open_hf
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.makespan import CLUSTER_START, Worker, efforts_of, estimate
from weightbeam.transforms.planning.options import ConvertOptions

if TYPE_CHECKING:
    from engines.clusters import Host  # pyright: ignore[reportMissingImports] — of the tests

HOSTS = (1, 2, 4)
RATE = 30.0  # Mbit/s
EFFICIENCY = 0.85  # at least
# bytes that came from the bucket when the work has begun, and the share they have sent when it has ended
BEGUN, ENDED = 4 << 20, 0.99
POLL = 0.05  # seconds between looks at the counters
PATIENCE = 600  # seconds for the first worker: a job's 150 MB of jars come to its hosts over the same slow links


class Phase:
    """The work phase of one conversion, told by the counters of links.

    Attributes:
      moments: seconds, and the bytes that the hosts got from the bucket and sent until then, from the beginning on.
    """

    def __init__(self, manager: Host, hosts: Sequence[Host]):
        self._manager, self._hosts = manager, hosts
        self.moments: list[tuple[float, int, int]] = []
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: the counters are read."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        start = self._counters()
        while not self._over.wait(POLL):
            to, back = self._counters()
            self.moments.append((time.monotonic(), to - start[0], back - start[1]))

    def _counters(self) -> tuple[int, int]:
        # what this machine, with the bucket, sent to any host; but the jars that it sent to the manager, which passes
        # them on from port to port
        got = passed(self._manager.bridge, "tx") - passed(self._manager.port, "tx")
        return got, sum(passed(host.port, "rx") for host in self._hosts)

    @property
    def seconds(self) -> float:
        """How long it took."""
        begun = next(at for at, to, _ in self.moments if to > BEGUN)
        ended = next(at for at, _, back in self.moments if back > ENDED * self.moments[-1][2])
        return ended - begun


def passed(device: str, way: str) -> int:
    """How many bytes have left this machine through a device (`tx`), or have come (`rx`)."""
    return int(Path(f"/sys/class/net/{device}/statistics/{way}_bytes").read_text())


def convert(source: Path, hosts: int, number: int, options: list[str], phase: Phase) -> float:
    """The seconds of the work phase of a conversion on so many hosts."""
    places = [f"gs://{IN}/{source.name}", f"gs://{OUT}/{hosts}-{number}"]
    options = [*options, f"--parallelism={hosts}", f"--job_server_timeout={PATIENCE}"]
    with phase.watched():
        run(WEIGHTBEAM, "convert", *places, "--mesh", MESH, *options)
    return phase.seconds


def simulate(source: Path, hosts: int, rate: float) -> float:
    """The same, simulated; `rate` in Mbit/s."""
    conversion = plan_conversion(ConvertOptions(mesh=(MESH,)), open_hf(str(source)), slots=hosts)
    worker = Worker(rate / 1000, 0.0, 1, engine="Flink", start=CLUSTER_START)
    shards = len(conversion.source.shards)
    return estimate(list(efforts_of(conversion)), hosts, worker, shards, from_hub=False).unit_seconds


def measure(source: Path, folder: Path, rounds: int, rate: float) -> tuple[list[Figure], dict[str, Any]]:
    """The figures, and every single round."""
    from engines.clusters import flink_on, network  # pyright: ignore[reportMissingImports] — of the tests
    from servers.server import process  # pyright: ignore[reportMissingImports]

    seconds: dict[int, list[float]] = {hosts: [] for hosts in HOSTS}
    with ExitStack() as stack:
        gateway, (manager, *others) = stack.enter_context(network(1 + max(HOSTS)))
        os.environ.update(clients_of(f"http://{gateway}:{PORT}"))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = stack.enter_context(flink_on([manager, *others], work, slots=1))
        for host in engine.hosts:
            host.shape(rate)
        for number, (count, runs) in itertools.product(range(1, rounds + 1), seconds.items()):
            # a new one: all is in its memory
            with process("gcs", f"--host={gateway}", f"--port={PORT}", f"--folder={folder}", f"--bucket={OUT}"):
                runs.append(convert(source, count, number, engine.options, Phase(manager, engine.hosts)))
            tell("hosts", f"round {number} of {rounds}: {count} hosts, {runs[-1]:.1f} s")
    took = {count: statistics.median(runs) for count, runs in seconds.items()}
    simulated = {count: simulate(source, count, rate) for count in HOSTS}
    errors = {count: simulated[count] / took[count] - 1 for count in HOSTS}
    figures = []
    for count in HOSTS:
        figures.append(Figure(f"Flink, {count} host{'s' * (count > 1)} of {rate:g} Mbit/s", "small", took[count], "s"))
        if count > 1:
            what, efficiency = f"Flink, efficiency of {count} hosts", took[1] / took[count] / count
            figures.append(Figure(what, "small", efficiency, limit=EFFICIENCY, at_least=True))
        figures.append(Figure(f"Flink, simulation's error of {count}", "small", errors[count]))
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    return figures, {"bytes": nbytes, "rate": rate, "seconds": seconds, "simulated": simulated, "errors": errors}


def main() -> None:
    """Measures, and prints the table."""
    parser = make_parser(__doc__, layers=26, rounds=1)
    parser.add_argument("--rate", type=float, default=RATE, help="of each host's link, in Mbit/s each way")
    args = parser.parse_args()
    if lacks := missing("java", "mvn"):
        return tell("hosts", f"not measured: {lacks} missing here")
    source = make_source("small", args.folder, args.layers)
    with serving(source, args.folder) as served:
        figures, details = measure(source, served, args.rounds, args.rate)
    report("hosts", figures, details, args)


if __name__ == "__main__":
    main()
