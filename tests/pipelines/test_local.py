"""Local runs: nobody can reach them, no element is lost, threads share the work, and what goes wrong is said at once."""

from __future__ import annotations

import copy
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import apache_beam as beam
import pytest
import yaml
from apache_beam.options.pipeline_options import DebugOptions, PipelineOptions, StandardOptions
from apache_beam.testing.test_pipeline import TestPipeline
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.userstate import CombiningValueStateSpec
from processes import run
from servers.hub import FakeHub
from support import LLAMA, LLAMA_8B, call, make_release, random_tensors, save, split

from weightbeam.pipelines.running.beam_options import make_pipeline, pipeline_options
from weightbeam.pipelines.running.runners.local import run_threads
from weightbeam.pipelines.running.threads import ThreadError

ROOT = Path(__file__).parents[2]

WATCHING = """
import os, psutil
from weightbeam.transforms.stages import work
add = work.Tally.add
def watched(self, n):  # called by a thread that has just done a part of the work
    kinds = {found.laddr for found in psutil.Process().net_connections("all") if found.status == psutil.CONN_LISTEN}
    with open(os.environ["SEEN"], "a") as seen:
        print(len(kinds), flush=True, file=seen)
    add(self, n)
work.Tally.add = watched
"""


class Watched:
    """Runs commands in processes of their own that note what they listen on each time that a thread has done a part of
    the work.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.source = make_release(folder / "hf", files=2)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(WATCHING)

    def listening(self, *command: object, **environment: str) -> list[int]:
        """How many sockets the command listened on, at each look."""
        seen = self.folder / "seen"
        seen.write_text("")
        path = os.pathsep.join([str(self.folder / "site"), str(ROOT)])
        words = [sys.executable, "-m", "weightbeam", *command]
        run(*words, env=os.environ | environment | {"PYTHONPATH": path, "SEEN": str(seen)}, status=0)
        return [int(line) for line in seen.read_text().split()]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_the_looks_see_a_port(tmp_path: Path) -> None:
    """Else the tests below would prove nothing."""
    listen = "import socket; s = socket.socket(); s.bind(('localhost', 0)); s.listen()\n"
    script = f"{listen}{WATCHING}\nwork.Tally().add(1)"
    seen = {"SEEN": str(tmp_path / "seen"), "PYTHONPATH": str(ROOT)}
    run(sys.executable, "-c", script, env=os.environ | seen, status=0)
    assert (tmp_path / "seen").read_text() == "1\n"


def test_convert_listens_nowhere(watched: Watched) -> None:
    found = watched.listening(
        "convert",
        "--source",
        watched.source,
        "--output",
        watched.folder / "out",
        "--unit_bytes",
        "8000",
        "--direct_num_workers=4",
    )
    assert len(found) > 10
    assert set(found) == {0}


def test_materialize_listens_nowhere(watched: Watched) -> None:
    virtual = watched.folder / "virtual"
    assert call("convert", "--source", watched.source, "--output", virtual, "--virtual", "--scan_layers", "false") == 0
    found = watched.listening("materialize", virtual, "--output", watched.folder / "out", "--unit_bytes", "8000")
    assert len(found) > 5
    assert set(found) == {0}


def test_a_watchers_conversion_listens_nowhere(watched: Watched) -> None:
    """The watcher has no receiver here, and what it starts has none either."""
    with FakeHub() as hub:
        hub.add("acme/tiny", watched.source)
        settings = dict(
            output=str(watched.folder / "out"),
            models=["acme/*"],
            quiet_minutes=0,
            targets=[dict(name="any", unit_bytes=8000)],
        )
        (watched.folder / "watch.yaml").write_text(yaml.safe_dump(settings))
        found = watched.listening(
            "watch", "--config", watched.folder / "watch.yaml", "--once", **hub.env(), HF_HOME="/nonexistent"
        )
    assert len(found) > 5
    assert set(found) == {0}


def test_processes_are_refused(watched: Watched, capfd: pytest.CaptureFixture[str]) -> None:
    """Beam's own would talk through ports."""
    output = watched.folder / "out"
    assert (
        call("convert", "--source", watched.source, "--output", output, "--direct_running_mode=multi_processing") == 2
    )
    assert "ports" in capfd.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("limit", [1_000_000, 1_500_000, 2_000_000])
def test_too_little_memory_for_threads(tmp_path: Path, limit: int) -> None:
    """`ulimit -v`, in KiB: the run works or ends with a message, and never waits for a thread that isn't there."""
    source = save(tmp_path / "hf", LLAMA_8B | LLAMA, *split(random_tensors(LLAMA), 2))
    command = [
        sys.executable,
        "-m",
        "weightbeam",
        "convert",
        "--source",
        source,
        "--output",
        tmp_path / "out",
        "--direct_num_workers=8",
    ]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit << 10, limit << 10))

    ran = run(*command, env=os.environ | {"PYTHONPATH": str(ROOT)}, preexec_fn=limited)
    assert ran.returncode in (0, 1), ran.stderr
    assert (ran.returncode == 0) == (tmp_path / "out" / "0" / "commit_success.txt").exists()
    if ran.returncode:
        assert "ulimit -v" in ran.stderr
        assert "Traceback" not in ran.stderr


class Share(beam.DoFn):
    """The first element takes long; whoever has it does no other meanwhile."""

    others = threading.Event()
    lock = threading.Lock()
    done: ClassVar[list[int]] = []

    def process(self, number: int) -> None:
        if number == 0:
            assert self.others.wait(60), "the others' elements wait behind this one"
        with self.lock:
            self.done.append(number)
            if len(self.done) == 40:
                self.others.set()


def test_a_thread_that_is_ready_takes_the_next_element() -> None:
    """No element waits for a thread that is busy while another one has nothing to do."""
    Share.done.clear()
    Share.others.clear()
    with make_pipeline(pipeline_options(["--direct_num_workers=2"])) as pipeline:
        _ = pipeline | beam.Create(range(41)) | beam.Reshuffle() | beam.ParDo(Share())
    assert sorted(Share.done) == list(range(41))


class Fail(beam.DoFn):
    """One element fails when another thread is in the middle of one."""

    barrier = threading.Barrier(2)
    done: ClassVar[list[int]] = []

    def process(self, number: int) -> None:
        if number < 2:
            self.barrier.wait(60)
        if number == 0:
            raise KeyError("the first")
        time.sleep(0.2)
        self.done.append(number)


def test_the_others_stop_when_one_fails() -> None:
    """What is in the middle of an element ends it; no other is begun; the error is the stage's own."""
    Fail.done.clear()
    pipeline = make_pipeline(pipeline_options(["--direct_num_workers=2"]))
    _ = pipeline | beam.Create(range(30)) | beam.Reshuffle() | beam.ParDo(Fail())
    with pytest.raises(KeyError, match=r"the first \[while running 'ParDo\(Fail\)'\]"):
        pipeline.run()
    assert Fail.done == [1]


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were started end, and the message says what to do."""
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("worker-"):
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    stopped = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start"):
        run_threads([lambda: stopped.wait(60)] * 4, stopped.set)
    assert not any(thread.is_alive() for thread in started)
    started.clear()
    with (
        pytest.raises(ThreadError, match="--direct_num_workers"),
        make_pipeline(pipeline_options(["--direct_num_workers=4"])) as pipeline,
    ):
        _ = pipeline | beam.Create(range(10))


def test_views_of_copied_options_agree() -> None:
    """Beam copies a pipeline's options, and leaves one out that a job doesn't need; what one view says, all others and
    the job then know.
    """
    options = copy.deepcopy(pipeline_options(["--impersonate_service_account=somebody"]))
    options.view_as(StandardOptions).streaming = True
    options.view_as(DebugOptions).experiments = ["one"]
    assert options.view_as(StandardOptions) is options.view_as(StandardOptions)
    told = options.get_all_options()
    assert (told["streaming"], told["experiments"], told["impersonate_service_account"]) == (True, ["one"], None)


SEEN = beam.DoFn.StateParam(CombiningValueStateSpec("seen", sum))


class _Counting(beam.DoFn):
    def process(self, element: tuple[str, int], seen: Any = SEEN) -> Iterator[tuple[str, int]]:
        seen.add(1)
        yield element[0], seen.read()


class _Passing(beam.DoFn):
    def process(self, element: tuple[str, int]) -> Iterator[tuple[str, int]]:
        yield element


def test_a_pipeline_of_somebody_else_afterwards() -> None:
    """Its DoFns have the states that they have, also behind wrappers of Beam's."""
    with make_pipeline(pipeline_options([])) as ours:
        _ = ours | beam.Create([1]) | beam.Map(print)
    with TestPipeline(options=PipelineOptions(["--runtime_type_check"])) as theirs:
        passed = theirs | beam.Create([("a", 1), ("a", 2), ("b", 1)]) | beam.ParDo(_Passing())
        assert_that(passed | beam.ParDo(_Counting()), equal_to([("a", 1), ("a", 2), ("b", 1)]))
