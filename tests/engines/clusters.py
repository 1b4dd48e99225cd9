"""Clusters of this machine's own: Flink, Spark and Prism, on hosts that are network namespaces with an address and a
worker pool each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import yaml
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc
from processes import ROOT, free_port, listening, running, wait_for, wait_until

from engines.programs import jars, need, prism

POOL = 50000  # the port of a host's worker pool
OPENED = (
    "java.lang",
    "java.lang.invoke",
    "java.net",
    "java.nio",
    "java.time",
    "java.util",
    "java.util.concurrent",
    "sun.nio.ch",
    "sun.util.calendar",
)
JAVA = (
    "java",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
)
NETWORKS = itertools.count(os.getpid() % 200)  # the third number of addresses


@dataclasses.dataclass(frozen=True)
class Engine:
    """A cluster that takes jobs.

    Attributes:
      endpoint: of its job service.
      pool: of the workers; empty where they are in the command's own process.
      hosts: the machines; none where everything is in one process.
      more: of Beam's options.
      group: of the processes of pool and workers; 0 where there are several.
    """

    endpoint: str
    pool: str
    hosts: Sequence[Host] = ()
    more: Sequence[str] = ()
    group: int = 0

    @property
    def options(self) -> list[str]:
        """Beam's, for a command."""
        where = (
            ["--environment_type=EXTERNAL", f"--environment_config={self.pool}"]
            if self.pool
            else ["--environment_type=LOOPBACK"]
        )
        return ["--runner=PortableRunner", f"--job_endpoint={self.endpoint}", *where, *self.more]

    def states(self) -> list[str]:
        """Of all jobs that it was given, the earliest first, as far as it keeps their order."""
        with grpc.insecure_channel(self.endpoint) as channel:
            jobs = beam_job_api_pb2_grpc.JobServiceStub(channel).GetJobs(beam_job_api_pb2.GetJobsRequest()).job_info
        return [beam_job_api_pb2.JobState.Enum.Name(job.state) for job in jobs]


# --- hosts ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Host:
    """A network namespace: a machine with an address of its own, but with this one's files.

    Attributes:
      name: of the namespace.
      address: on the bridge that joins all of them.
      bridge: this machine's end of it.
      port: the bridge's end of its link.
    """

    name: str
    address: str
    bridge: str
    port: str

    def command(self, *command: object) -> list[object]:
        """A command, on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def shape(self, rate: float) -> None:
        """Makes its link carry so many Mbit/s each way."""
        for end in (["-n", self.name, "qdisc", "add", "dev", "eth0"], ["qdisc", "add", "dev", self.port]):
            subprocess.run(
                ["tc", *end, "root", "tbf", "rate", f"{rate}mbit", "burst", "128k", "latency", "20ms"], check=True
            )

    def kill(self) -> None:
        """Ends all that runs there, at once."""
        for pid in subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        ).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def network(hosts: int) -> Iterator[tuple[str, list[Host]]]:
    """Hosts behind a bridge; this machine's own address there, and they."""
    need("ip", root=True)
    number = next(NETWORKS) % 250
    bridge, prefix = f"wb{number}", f"10.231.{number}"

    def ip(*words: object) -> None:
        subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)

    with ExitStack() as stack:
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{prefix}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        made = []
        for place in range(2, 2 + hosts):
            host = Host(f"{bridge}-{place}", f"{prefix}.{place}", bridge, f"{bridge}v{place}")
            ip("netns", "add", host.name)
            stack.callback(ip, "netns", "del", host.name)
            stack.callback(host.kill)
            ip("link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("link", "set", host.port, "master", bridge, "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
            ip("-n", host.name, "link", "set", "lo", "up")
            made.append(host)
        yield f"{prefix}.1", made


@contextmanager
def worker_pool(
    log: Path, port: int, host: Host | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Beam's pool, which starts a worker for each request; its process group."""
    command = [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", "--service_port", port]
    with running(log, *(host.command(*command) if host else command), environment=environment) as process:
        listening(port, host.address if host else "localhost")
        yield process.pid


@contextmanager
def job_server(log: Path, folder: Path, profile: str, driver: str, *options: str, heap: str = "512m") -> Iterator[str]:
    """One of Beam's job servers; its endpoint."""
    port = free_port()
    places = (
        "--job-host=localhost",
        f"--job-port={port}",
        "--artifact-port=0",
        "--expansion-port=0",
        f"--artifacts-dir={folder}",
    )
    properties = [option for option in options if option.startswith("-D")]
    rest = [option for option in options if not option.startswith("-D")]
    with running(log, *JAVA, f"-Xmx{heap}", *properties, "-cp", f"{jars(profile)}/*", driver, *places, *rest):
        listening(port)
        yield f"localhost:{port}"


# --- Flink ------------------------------------------------------------------------------------------------------------

FLINK_DRIVER = "org.apache.beam.runners.flink.FlinkJobServerDriver"


@contextmanager
def flink_in_one_process(folder: Path) -> Iterator[Engine]:
    """A job server with a small cluster in itself, and a pool."""
    port = free_port()
    server = job_server(folder / "jobs.log", folder, "flink", FLINK_DRIVER, "--flink-master=[local]")
    with server as endpoint, worker_pool(folder / "pool.log", port) as group:
        yield Engine(endpoint, f"localhost:{port}", more=("--parallelism=2",), group=group)


def flink_settings(manager: str, folder: Path, retried: bool, slots: int) -> dict[str, object]:
    """What a session cluster's configuration file says: deploy/flink's settings, in a network of the test's own."""
    deployed = yaml.safe_load((ROOT / "deploy/flink/deployment.yaml").read_text().partition("\n---")[0])["spec"][
        "flinkConfiguration"
    ]
    return {
        **deployed,
        "jobmanager.rpc.address": manager,
        "jobmanager.bind-host": "0.0.0.0",
        "rest.address": manager,
        "rest.bind-address": "0.0.0.0",
        "io.tmp.dirs": folder,
        "taskmanager.numberOfTaskSlots": slots,
        **({} if retried else {"restart-strategy.type": "none"}),
    }


# Every part of a task manager's memory, since no start script works it out.
FLINK_MEMORY = {
    "taskmanager.cpu.cores": "2.0",
    "taskmanager.memory.task.heap.size": "128m",
    "taskmanager.memory.task.off-heap.size": "0m",
    "taskmanager.memory.network.min": "64m",
    "taskmanager.memory.network.max": "64m",
    "taskmanager.memory.managed.size": "64m",
    "taskmanager.memory.framework.heap.size": "128m",
    "taskmanager.memory.framework.off-heap.size": "128m",
    "taskmanager.memory.jvm-metaspace.size": "256m",
    "taskmanager.memory.jvm-overhead.min": "64m",
    "taskmanager.memory.jvm-overhead.max": "64m",
}


@dataclasses.dataclass(frozen=True)
class FlinkHost:
    """What a host of a Flink cluster runs: a task manager and a pool."""

    host: Host
    folder: Path

    @contextmanager
    def started(self, round_: int = 0) -> Iterator[None]:
        """Context manager: it runs."""
        settings = {**FLINK_MEMORY, "taskmanager.host": self.host.address, "taskmanager.bind-host": self.host.address}
        words = [word for name, value in settings.items() for word in ("-D", f"{name}={value}")]
        main = ("org.apache.flink.runtime.taskexecutor.TaskManagerRunner", "--configDir", self.folder, *words)
        log = self.folder / f"{self.host.name}.{round_}.log"
        manager = running(log, *self.host.command(*JAVA, "-Xmx320m", "-cp", f"{jars('flink')}/*", *main))
        with worker_pool(self.folder / f"{self.host.name}.{round_}.pool.log", POOL, self.host), manager:
            wait_for(log, "Successful registration at resource manager")
            yield


@contextmanager
def flink(folder: Path, hosts: int = 2, retried: bool = False) -> Iterator[Engine]:
    """A session cluster in a network of its own; see `flink_on`."""
    with network(1 + hosts) as (_, places), flink_on(places, folder, retried) as engine:
        yield engine


@contextmanager
def flink_on(hosts: Sequence[Host], folder: Path, retried: bool = False, slots: int = 2) -> Iterator[Engine]:
    """A session cluster: a job manager on the first host, and a task manager and a pool on each other one."""
    manager, *places = hosts
    with ExitStack() as stack:
        settings = flink_settings(manager.address, folder, retried, slots)
        (folder / "flink-conf.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
        main = ("org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint", "--configDir", folder)
        stack.enter_context(
            running(folder / "manager.log", *manager.command(*JAVA, "-Xmx512m", "-cp", f"{jars('flink')}/*", *main))
        )
        listening(8081, manager.address)
        for host in places:
            stack.enter_context(FlinkHost(host, folder).started())
        endpoint = stack.enter_context(
            job_server(folder / "jobs.log", folder, "flink", FLINK_DRIVER, f"--flink-master={manager.address}:8081")
        )
        yield Engine(endpoint, f"localhost:{POOL}", places, (f"--parallelism={slots * len(places)}",))


# --- Spark ------------------------------------------------------------------------------------------------------------

SPARK_DRIVER = "org.apache.beam.runners.spark.SparkJobServerDriver"
OPENS = " ".join(option for option in JAVA if option.startswith("--add-opens"))


@contextmanager
def spark_in_one_process(folder: Path) -> Iterator[Engine]:
    """A job server with Spark in itself, two threads, and a pool."""
    port = free_port()
    server = job_server(
        folder / "jobs.log", folder, "spark", SPARK_DRIVER, "--spark-master-url=local[2]", "-Dspark.ui.enabled=false"
    )
    with server as endpoint, worker_pool(folder / "pool.log", port) as group:
        yield Engine(endpoint, f"localhost:{port}", group=group)


def alive_workers(page: str) -> int:
    """How many workers a master has, as its page tells programs; 0 while there is no page."""
    try:
        with urllib.request.urlopen(page, timeout=5) as answer:
            return json.load(answer)["aliveworkers"]
    except OSError:
        return 0


@contextmanager
def spark(folder: Path, hosts: int = 2) -> Iterator[Engine]:
    """A standalone cluster: a master, and hosts with two cores each; the driver is the job server."""
    home = jars("spark").parent  # what Spark calls so: the folder in which `jars` lies
    with ExitStack() as stack:
        here, places = stack.enter_context(network(hosts))
        port, page, settings = (
            free_port(),
            free_port(),
            {"SPARK_HOME": str(home), "SPARK_LOCAL_DIRS": str(folder), "SPARK_SCALA_VERSION": "2.12"},
        )
        start = (*JAVA, "-Xmx384m", "-cp", f"{home}/jars/*")
        master = ("org.apache.spark.deploy.master.Master", "--host", here, "--port", port, "--webui-port", page)
        stack.enter_context(running(folder / "master.log", *start, *master, environment=settings))
        listening(port, here)
        for host in places:
            size = ("--cores", 2, "--memory", "1g", "--work-dir", folder)
            main = ("org.apache.spark.deploy.worker.Worker", f"spark://{here}:{port}", "--host", host.address, *size)
            log = folder / f"{host.name}.log"
            stack.enter_context(worker_pool(folder / f"{host.name}.pool.log", POOL, host))
            stack.enter_context(running(log, *host.command(*start, *main), environment=settings))
        wait_until(
            lambda: alive_workers(f"http://{here}:{page}/json/") == hosts,
            lambda: "the workers didn't come to the master",
        )
        conf = {
            "spark.driver.host": here,
            "spark.driver.bindAddress": here,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": OPENS,
            "spark.ui.enabled": "false",
            "spark.locality.wait": "0s",  # else all tasks go where the first small partition is
            "spark.shuffle.reduceLocality.enabled": "false",
        }
        properties = [f"-D{name}={value}" for name, value in conf.items()]
        server = job_server(
            folder / "jobs.log", folder, "spark", SPARK_DRIVER, f"--spark-master-url=spark://{here}:{port}", *properties
        )
        yield Engine(stack.enter_context(server), f"localhost:{POOL}", places)


# --- Prism ------------------------------------------------------------------------------------------------------------


@contextmanager
def prism_with_pool(folder: Path) -> Iterator[Engine]:
    """Beam's own engine of one process, and a pool."""
    port, pool = free_port(), free_port()
    command = (prism(), f"--job_port={port}", "--serve_http=false", "--idle_shutdown_timeout=0s")
    with running(folder / "prism.log", *command), worker_pool(folder / "pool.log", pool) as group:
        listening(port)
        yield Engine(f"localhost:{port}", f"localhost:{pool}", group=group)
