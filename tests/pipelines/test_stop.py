"""A stop stops, whoever runs the job: once it is said, nothing is published any more, and the same command with
`--resume` goes on at once.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pairs
import pytest
import warm
from processes import ROOT, free_port, listening, running, wait_until
from servers.clients import asking
from servers.gcs import FakeGcs
from servers.hub import FakeHub
from servers.late import LateGcs
from support import LLAMA, QWEN3_MOE, assert_same_bits, convert, make_release, restore

import weightbeam as wb
from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.staging import FolderStaging, TakenOverError, staging_at
from weightbeam.formats.staging.staging import PLAN
from weightbeam.formats.storage import open_store
from weightbeam.formats.storage.bucket import Bucket
from weightbeam.formats.targets import made_by
from weightbeam.formats.targets.orbax import OrbaxTarget
from weightbeam.pipelines.cli import Interrupts, main
from weightbeam.pipelines.running import writing
from weightbeam.pipelines.running.output import alone
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions, Delivery
from weightbeam.transforms.stages.assembly import stage
from weightbeam.transforms.stages.chain import _assemble, _ExpandFn, _ReadBoxesFn
from weightbeam.transforms.stages.staged import AtWork

MODEL = LLAMA | {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512}
MODEL_NAME = "llama2-7b"
UNITS = ("--unit_bytes", "200KB")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("stop") / "hf", MODEL)


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion that nobody stopped."""
    return convert(source, tmp_path_factory.mktemp("whole"), "--maxtext_model", MODEL_NAME)


# --- a service that goes on with what it calls cancelled --------------------------------------------------------------


@pytest.fixture(scope="module")
def lying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Beam's own job service and a worker pool, as options: it says that a stopped job is cancelled, and goes on with
    it, as Flink's does where the cluster isn't its own.
    """
    folder, jobs, workers = tmp_path_factory.mktemp("service"), free_port(), free_port()
    service = ("apache_beam.runners.portability.local_job_service_main", "--port", jobs)
    pool = ("apache_beam.runners.worker.worker_pool_main", "--service_port", workers)
    with (
        running(folder / "jobs.log", sys.executable, "-m", *service),
        running(folder / "workers.log", sys.executable, "-m", *pool),
    ):
        listening(jobs)
        listening(workers)
        where = ("--environment_type=EXTERNAL", f"--environment_config=localhost:{workers}")
        yield ("--runner=PortableRunner", f"--job_endpoint=localhost:{jobs}", *where)


def units_of(output: Path) -> int:
    """How many units the ledger of a conversion has, wherever its place was moved."""
    return len(list(output.glob("*/units/*/[0-9]*.json")))


def test_a_service_that_goes_on_with_a_stopped_job(
    source: Path, checkpoint: Path, lying: tuple[str, ...], tmp_path: Path
) -> None:
    """Its workers end by themselves: after the unit that they were at nothing is done, and nothing is ever published."""
    output = tmp_path / "out"
    words = ["convert", "--source", str(source), "--output", str(output), *UNITS, *lying]
    process = subprocess.Popen(
        [sys.executable, "-m", "weightbeam.pipelines.cli", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: units_of(output) > 2, lambda: "no unit was done", every=0.005)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "--resume goes on from there" in told
    assert not (output / "0").exists()
    done = units_of(output)
    time.sleep(3)  # in which all of it was done, and published
    assert units_of(output) == done
    assert not (output / "0").exists()
    assert main([*words, "--resume"]) == 0
    assert_same_bits(restore(output / "0"), restore(checkpoint))
    assert [path.name for path in output.iterdir()] == ["0"]


# --- after the publication -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "number"), pairs.each(["convert", "export"], [signal.SIGINT, signal.SIGTERM]))
def test_a_stop_after_the_publication_says_so(
    source: Path, checkpoint: Path, tmp_path: Path, command: str, number: signal.Signals
) -> None:
    """While the result is told, which takes as long as who reads it likes. Nothing but the result is left."""
    output, pipe = tmp_path / "out", tmp_path / "pipe"
    os.mkfifo(pipe)
    words = {
        "convert": (source, output, "--maxtext_model", MODEL_NAME),
        "export": (checkpoint, output, "--like", source),
    }
    made = output / "0" if command == "convert" else output
    process = warm.start(command, *words[command], "--json", pipe)
    wait_until(made.exists, process=process)
    wait_until(
        lambda: not [*tmp_path.glob("*.weightbeam-lease*"), *output.glob("*.weightbeam-lease*")], process=process
    )
    time.sleep(0.5)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 1)
    assert f"weightbeam {command}: stopped; but {made} was published already" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "pipe"]


def test_a_call_that_is_stopped_after_the_publication_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not what an earlier one published."""

    def interrupted(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "read_written", interrupted)
    for name in ("one", "other"):
        with pytest.raises(KeyboardInterrupt) as stopped:
            wb.convert(source, tmp_path / name, maxtext_model=MODEL_NAME, progress=False)
        assert str(stopped.value) == f"convert was stopped; but {tmp_path / name / '0'} was published already"
        assert (tmp_path / name / "0").is_dir()


# --- a store that doesn't answer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "matching", "words"),
    [
        ("stall", "GET", ("cut", "hf://org/m", "out", "--layers", "0:1")),
        ("slow", "config.json", ("cut", "hf://org/m", "out", "--layers", "0:1")),
        ("stall", "GET", ("diff", "hf://org/m", "{source}")),
        ("slow", "PUT", ("cut", "{source}", "hf://org/new", "--layers", "0:1")),
    ],
    ids=["headers", "a small file", "diff", "an upload"],
)
def test_a_stop_does_not_wait_for_a_store(
    kind: str, matching: str, words: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    """Which may not answer for minutes: nothing depends on what it would say."""
    hub = FakeHub()
    hub.users.add("hf_me")
    hub.writers.add("hf_me")
    hub.add("org/m", make_release(tmp_path / "hf", MODEL, files=2))
    with hub:
        faults = [server.fail(kind, seconds=60, matching=matching) for server in (hub, hub.cdn)]
        environment = (
            os.environ | hub.env("hf_me") | {"HF_HUB_DISABLE_XET": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        )
        process = warm.start(*(word.format(source=source) for word in words), env=environment, cwd=tmp_path)
        wait_until(lambda: any(fault.hits for fault in faults), process=process)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert f"weightbeam {words[0]}: stopped" in told
    assert not (tmp_path / "out").exists()
    assert "org/new" not in hub.repositories or not hub.held("org/new")


@pytest.mark.slow("a bucket that is gone, for which a stop waits a while")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_does_not_wait_for_a_bucket_that_is_gone(number: signal.Signals, source: Path, tmp_path: Path) -> None:
    """The lease can't be given back, nor the note be left that stops workers elsewhere; it ends within seconds."""
    with FakeGcs("bucket") as bucket:
        process = warm.start("convert", source, "gs://bucket/out", env=os.environ | bucket.env(), cwd=tmp_path)
        wait_until(
            lambda: any(entry.kind == "write" and "items" in entry.name for entry in bucket.log), process=process
        )
        bucket.stop()
        time.sleep(2)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 1)
    assert "weightbeam convert: stopped; gs://bucket/out doesn't answer; what is done is kept" in told


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["{tmp}/out", "gs://bucket/out"], ids=["folder", "bucket"])
def test_every_stage_looks_for_a_stop(output: str, source: Path, gcs: FakeGcs, tmp_path: Path) -> None:
    """Before a unit is read, before anything is put together, and before the units of a job that its engine begins
    anew; who goes on isn't stopped by a stop of before.
    """
    conversion, place = plan_conversion(ConvertOptions(), open_hf(source)), output.format(tmp=tmp_path)

    def stages(worker: Any) -> list[Callable[[], Any]]:
        at_work = AtWork(worker, conversion.hash)
        reading = _ReadBoxesFn(at_work, None, False)
        reading.setup()
        expanding = _ExpandFn(at_work)
        expanding.setup()
        return [
            lambda: list(reading.process((0, False))),
            lambda: list(expanding.process(len(conversion.units))),
            lambda: _assemble(0, at_work, False),
        ]

    staging = staging_at(place, 0, conversion.hash)
    staging.output.make()
    with staging.hold():
        stage(conversion, staging, Delivery())
        stopped = stages(pickle.loads(pickle.dumps(staging)))
        staging.stop()
        for each in stopped:
            with pytest.raises(OSError, match=r"stopped, taken over|is gone"):
                each()
    again = staging_at(place, 0, conversion.hash)
    with again.hold():
        stage(conversion, again, Delivery(resume=True))
        reading, expanding, _ = stages(pickle.loads(pickle.dumps(again)))
        assert len(reading()) == 1
        assert len(expanding()) == len(conversion.units)
        for each in stopped:
            with pytest.raises(OSError, match=r"stopped, taken over|is gone"):
                each()


def test_a_stop_says_what_is_kept(source: Path, tmp_path: Path) -> None:
    """Nothing before something is staged."""
    conversion = plan_conversion(ConvertOptions(), open_hf(source))
    staging = staging_at(str(tmp_path / "out"), 0, conversion.hash)
    with pytest.raises(KeyboardInterrupt) as stopped, alone(staging):
        raise KeyboardInterrupt
    assert stopped.value.args == ()
    staging.output.make()
    with staging.hold():
        stage(conversion, staging, Delivery())
    with pytest.raises(KeyboardInterrupt, match="what is done is kept"), alone(staging):
        raise KeyboardInterrupt


def test_a_stop_leaves_another_ones_place_alone(tmp_path: Path) -> None:
    """One that slept, lost the lease, and is stopped when it wakes."""
    slept, awake = (staging_at(tmp_path, 0, "plan") for _ in range(2))
    with slept.hold():
        slept.create(b"plan")
        os.utime(tmp_path / "0.weightbeam-lease", (0, 0), follow_symlinks=False)
        with awake.hold():
            slept.stop()
            awake.check()
            with pytest.raises(TakenOverError):
                slept.check()


@pytest.fixture
def before_renaming() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Has whoever gives a folder the name from which it is published wait just before, once; tells that it waits, and
    is told that it may go on.
    """
    waits, may, on = threading.Event(), threading.Event(), [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if on and event == "os.rename" and ".replaced-" in str(arguments[1]):
            on.clear()  # a hook stays
            waits.set()
            may.wait(120)  # a busy machine has stopped a command only after 30 s

    sys.addaudithook(hook)
    yield waits, may
    on.clear()
    may.set()


def interrupt_when(ready: Callable[[], bool], number: signal.Signals = signal.SIGINT) -> None:
    """Gives this process a signal at that moment, Ctrl-C by default."""

    def wait() -> None:
        wait_until(ready, lambda: "it never came so far", every=0.005)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


class _TooLongError(Exception):
    """What a handler of a signal raises, as time limits do."""


@pytest.mark.parametrize("error", [_TooLongError, SystemExit])
def test_what_a_handler_raises_ends_the_work(
    error: type[BaseException], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the last unit is under way: nothing is published by its threads once the call has ended."""
    write, writes = OrbaxTarget.write, threading.Event()

    def slow(self: OrbaxTarget, *arguments: Any) -> None:
        writes.set()
        time.sleep(0.5)
        write(self, *arguments)

    def handle(*_: object) -> None:
        raise error

    monkeypatch.setattr(OrbaxTarget, "write", slow)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        interrupt_when(writes.is_set, signal.SIGUSR1)
        with pytest.raises(wb.Failed if error is _TooLongError else error):
            wb.convert(source, tmp_path / "out", maxtext_model=MODEL_NAME, progress=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    time.sleep(2)
    assert not (tmp_path / "out" / "0").exists()
    wb.convert(source, tmp_path / "out", maxtext_model=MODEL_NAME, resume=True, progress=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_destructor_comes_again(number: signal.Signals) -> None:
    """Python prints and drops what is raised there."""
    interrupts = Interrupts()

    class Deaf:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # the handler is called here

    def work() -> None:
        Deaf()
        time.sleep(30)

    with interrupts.caught(), pytest.raises(KeyboardInterrupt):
        work()
    assert interrupts.came == number


def by_convert(source: Path, checkpoint: Path, output: str, **options: Any) -> str:
    """Converts; returns where the result is."""
    wb.convert(str(source), output, progress=False, **options)
    return f"{output}/0"


def by_export(source: Path, checkpoint: Path, output: str, **options: Any) -> str:
    """Exports; returns where the result is."""
    wb.export(str(checkpoint), output, like=str(source), maxtext_model=MODEL_NAME, progress=False, **options)
    return output


@pytest.mark.parametrize("command", [by_convert, by_export])
def test_an_interrupted_call_publishes_nothing(
    command: Callable[..., str],
    source: Path,
    checkpoint: Path,
    before_renaming: tuple[threading.Event, ...],
    tmp_path: Path,
) -> None:
    """As in a notebook: the process goes on, and with it the thread that is about to publish."""
    waits, may = before_renaming
    output = tmp_path / "made" / "out"
    interrupt_when(waits.is_set)
    with pytest.raises(KeyboardInterrupt):
        command(source, checkpoint, str(output))
    may.set()
    time.sleep(1)
    assert made_by(open_store(str(output))) is None
    assert made_by(open_store(str(output / "0"))) is None
    assert made_by(open_store(command(source, checkpoint, str(output), resume=True)))


@pytest.mark.parametrize("command", [by_convert, by_export])
def test_an_interrupted_call_publishes_nothing_in_a_bucket(
    command: Callable[..., str], source: Path, checkpoint: Path, gcs: FakeGcs
) -> None:
    """The store is asked to copy what publishes, and the answer takes its time."""
    slow = gcs.fail("slow", seconds=2, matching=r"rewriteTo/.*(commit_success\.txt|out%2Fweightbeam\.json)")
    interrupt_when(lambda: slow.hits > 0)
    with pytest.raises(KeyboardInterrupt):
        command(source, checkpoint, "gs://bucket/out")
    gcs.faults = []
    time.sleep(3)
    assert made_by(open_store("gs://bucket/out")) is None
    assert made_by(open_store("gs://bucket/out/0")) is None
    assert made_by(open_store(command(source, checkpoint, "gs://bucket/out", resume=True)))


def by_reference(source: Path, checkpoint: Path, output: str, **options: Any) -> str:
    """Converts where every array is virtual, so that the plan has no units; returns where the result is."""
    arrays = make_release(Path(output).parent / "hf", QWEN3_MOE)
    wb.convert(str(arrays), output, virtual=True, progress=False, **options)
    return f"{output}/0"


def by_an_engine(source: Path, checkpoint: Path, output: str, **options: Any) -> str:
    """Converts as a job of Beam's own job service, whose workers are threads of this process."""
    engine = ("--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK")
    return by_convert(source, checkpoint, output, beam=engine)


@pytest.mark.parametrize("command", [by_convert, by_export, by_reference, by_an_engine])
def test_an_interrupt_after_the_publication_says_so(
    command: Callable[..., str], source: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, published = FolderStaging.publish, threading.Event()

    def linger(self: FolderStaging, overwrite: bool = False) -> None:
        publish(self, overwrite)
        published.set()
        time.sleep(2)

    monkeypatch.setattr(FolderStaging, "publish", linger)
    interrupt_when(published.is_set)
    with pytest.raises(KeyboardInterrupt, match="was published already"):
        command(source, checkpoint, str(tmp_path / "out"))


@pytest.mark.parametrize("name", ["commit_success.txt", "weightbeam.json"])
@pytest.mark.parametrize("removes", [False, True])
def test_an_interrupt_once_the_marker_is_there_says_so(
    name: str, removes: bool, source: Path, checkpoint: Path, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its answer is, and while the right to publish is given back: the plan is staged still, and yet stock Orbax
    restores what is there.
    """
    method = "delete" if removes else "copy_all"
    does, published = getattr(Bucket, method), threading.Event()

    def linger(self: Bucket, what: Any, *more: Any) -> None:
        does(self, what, *more)
        if removes:
            is_it = str(what).startswith("claim.") and gcs.objects["bucket"].keys() & {f"out/{name}", f"out/0/{name}"}
        else:
            is_it = more and [file.name for file in more[0]] == [name]
        if is_it:
            published.set()
            time.sleep(2)

    monkeypatch.setattr(Bucket, method, linger)
    interrupt_when(published.is_set)
    with pytest.raises(KeyboardInterrupt, match="was published already"):
        (by_export if name == "weightbeam.json" else by_convert)(source, checkpoint, "gs://bucket/out")
    time.sleep(2)  # threads of what was stopped
    assert not [name for name in gcs.objects["bucket"] if ".weightbeam" in name]


@pytest.mark.parametrize("acts_late", [True, False])
def test_a_stop_while_a_release_gets_its_config(source: Path, checkpoint: Path, acts_late: bool) -> None:
    """Other loaders take the weights for a model once it is there: it doesn't come later, and is taken back."""
    with LateGcs(r"/config\.json/rewriteTo", acts_late) as gcs:
        words = ("export", checkpoint, "gs://bucket/out", "--like", source, "--maxtext_model", MODEL_NAME)
        process = warm.start(*words, env=os.environ | gcs.env())
        wait_until(gcs.asked.is_set, process=process)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert (process.returncode, "is kept" in told) == (130, True)
        assert "out/config.json" not in gcs.objects["bucket"]
        time.sleep(4)
        assert "out/config.json" not in gcs.objects["bucket"]
        assert "out/model.safetensors" in gcs.objects["bucket"]
        with asking(gcs):
            by_export(source, checkpoint, "gs://bucket/out", resume=True)
            assert made_by(open_store("gs://bucket/out"))


@pytest.mark.slow("waits for a bucket as long as a stop does; a second stop that waits for nothing always runs")
def test_a_stop_whose_bucket_freezes_while_it_is_asked_for_the_marker(source: Path) -> None:
    """It takes connections, and answers none: the stop ends in seconds, and says that nothing is known."""
    with LateGcs("rewriteTo.*/out/0/commit_success", True, seconds=1) as gcs:
        words = ("convert", source, "gs://bucket/out", "--maxtext_model", MODEL_NAME)
        process = warm.start(*words, env=os.environ | gcs.env())
        wait_until(gcs.asked.is_set, process=process)
        with gcs.lock:
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=120)
            took = time.monotonic() - start
    assert process.returncode == 130
    assert "whether gs://bucket/out/0 is published isn't known: look there" in told
    assert took < 40


def test_a_second_stop_waits_for_nothing_and_says_so(source: Path, checkpoint: Path) -> None:
    """While the bucket is asked for the marker: whether it will be there can't be known."""
    with LateGcs("rewriteTo.*/out/0/commit_success", True, seconds=6) as gcs:
        process = warm.start(
            "convert", source, "gs://bucket/out", "--maxtext_model", MODEL_NAME, env=os.environ | gcs.env()
        )
        wait_until(gcs.asked.is_set, process=process)
        with gcs.lock:  # nor does it answer what the first stop asks
            for _ in range(2):
                time.sleep(1.3)
                process.send_signal(signal.SIGINT)
            time.sleep(1)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "whether gs://bucket/out/0 is published isn't known: look there" in told


@pytest.mark.parametrize("command", [by_convert, by_export])
def test_an_interrupt_while_it_cleans_up_in_a_bucket_leaves_nothing_beside(
    command: Callable[..., str], source: Path, checkpoint: Path, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is gone already, by which a later command would know that the rest is its own."""
    delete, published = Bucket.delete, threading.Event()

    def linger(self: Bucket, name: str, *more: Any) -> None:
        delete(self, name, *more)
        if name.endswith(f"/{PLAN}") and not name.startswith("claim."):
            published.set()
            time.sleep(2)

    monkeypatch.setattr(Bucket, "delete", linger)
    interrupt_when(published.is_set)
    with pytest.raises(KeyboardInterrupt, match="was published already"):
        command(source, checkpoint, "gs://bucket/out")
    assert not [name for name in gcs.objects["bucket"] if ".weightbeam" in name]
