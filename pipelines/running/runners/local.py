"""The local runner: Beam's own in-process runner, its elements dealt out to threads. It listens nowhere.

Beam's ways to run several bundles at a time in one machine (`--direct_running_mode=multi_threading` and
`multi_processing`) talk through four gRPC servers on all interfaces, without credentials; one of them hands out any
file of the user (apache/beam, sdks/python/apache_beam/runners/portability/fn_api_runner/worker_handlers.py,
`GrpcServer`, 2.77.0). The first also loses elements now and then (runners/worker/data_plane.py,
`TimeBasedBufferingClosableOutputStream.flush`). Its in-memory mode has neither servers nor that fault: each of its
workers is a harness that is called as a function. So here each thread calls one.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import apache_beam as beam
from apache_beam.coders.coder_impl import CoderImpl, create_InputStream
from apache_beam.metrics.monitoring_infos import consolidate
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.fn_api_runner.execution import BundleContextManager, PartitionableBuffer
from apache_beam.runners.portability.fn_api_runner.fn_runner import BundleManager
from apache_beam.runners.runner import PipelineResult, PipelineRunner
from apache_beam.runners.worker.data_plane import InMemoryDataChannel, InMemoryDataChannelFactory

from weightbeam.pipelines.running.runners.runner import Job, Runner
from weightbeam.pipelines.running.threads import check_addresses, telling_of_threads
from weightbeam.transforms.execution.overlap import wait_for_all
from weightbeam.transforms.stages.chain import WRITTEN

RUNNER = "FnApiRunner"  # Beam's name for it
T = TypeVar("T")


class Local(Runner):
    """This process, its threads the workers."""

    names = (RUNNER, "DirectRunner")

    def find_problems(self, options: PipelineOptions, runner: PipelineRunner) -> Iterator[str]:
        direct = options.view_as(DirectOptions)
        if direct.direct_running_mode == "multi_processing":
            why = "Beam's processes talk through ports that are open to the network and ask for no password"
            yield f"--direct_running_mode=multi_processing: {why}; leave it out: threads do the same, --direct_num_workers=N of them"
        if direct.direct_num_workers < 0:
            yield f"--direct_num_workers={direct.direct_num_workers}: should be a number of threads, or 0 for one a core"

    def make(self, stage_bytes: int) -> PipelineRunner:
        return LocalRunner(stage_bytes)

    def count_written(self, job: Job) -> Callable[[], int]:
        """By a counter: the workers are threads."""
        before = WRITTEN.total
        return lambda: WRITTEN.total - before


class LocalRunner(FnApiRunner):
    """Beam's in-process runner with `--direct_num_workers` threads: each takes the next element when it is ready for
    one.
    """

    def __init__(self, stage_bytes: int):
        """`stage_bytes`: memory that the stages need, of all threads."""
        super().__init__()
        self._stage_bytes = stage_bytes

    def run_pipeline(self, pipeline: beam.Pipeline, options: PipelineOptions) -> PipelineResult:
        """Runs a pipeline to its end.

        Raises:
          ThreadError: the system refuses a thread.
          Exception: what a stage raised, as it raised it; by then no thread is at work any more.
        """
        direct = options.view_as(DirectOptions)
        # in memory, without Beam's warning that it has no threads; another one would bring workers that listen
        direct.direct_running_mode = ""
        check_addresses(direct.direct_num_workers, self._stage_bytes)
        with telling_of_threads():
            try:
                return super().run_pipeline(pipeline, options)
            except Exception:
                wait_for_all()
                raise

    def _get_bundle_manager(self, bundle_context_manager: BundleContextManager) -> BundleManager:
        if bundle_context_manager.stage.is_stateful():
            return super()._get_bundle_manager(bundle_context_manager)
        return _Threads(bundle_context_manager)


class _Threads(BundleManager):
    """Runs a stage as one bundle for each thread; all take their elements from the same queue. There are no more threads
    than elements: to make a worker ready takes as long as a small unit.
    """

    def process_bundle(
        self,
        inputs: Mapping[str, PartitionableBuffer],
        expected_outputs: Any,
        fired_timers: Mapping[Any, PartitionableBuffer],
        expected_output_timers: Mapping[Any, Any],
        dry_run: bool = False,
    ) -> tuple[beam_fn_api_pb2.InstructionResponse, list]:
        context = self.bundle_context_manager
        rest = (
            (name, element)
            for name, buffer in inputs.items()
            for element in split(buffer, context.get_input_coder_impl(name))
        )
        workers = context.worker_handlers
        first = list(itertools.islice(rest, len(workers)))
        elements = _Elements(itertools.chain(first, rest))

        def run(handler: Any) -> beam_fn_api_pb2.InstructionResponse:
            own = copy.copy(context)
            own._worker_handlers = [handler]
            _Channel.of(handler).elements = elements
            manager = BundleManager(own, cache_token_generator=self._cache_token_generator)
            return manager.process_bundle({}, expected_outputs, {}, {}, dry_run)[0]

        results = run_threads(
            [lambda handler=handler: run(handler) for handler in workers[: max(1, len(first))]], elements.stop
        )
        infos = consolidate(info for result in results for info in result.process_bundle.monitoring_infos)
        return beam_fn_api_pb2.InstructionResponse(
            process_bundle=beam_fn_api_pb2.ProcessBundleResponse(monitoring_infos=infos)
        ), []


class _Channel(InMemoryDataChannel):
    """A worker's end of Beam's in-process data channel: what comes in are the next of all elements, not some that were
    sent to it.
    """

    elements: _Elements

    @classmethod
    def of(cls, handler: Any) -> _Channel:
        """The worker's; it must stay the same, since Beam keeps what it builds on it from bundle to bundle."""
        cache = handler.bundle_processor_cache
        channel = cache.data_channel_factory.create_data_channel_from_url("")
        if not isinstance(channel, cls):
            channel = cls(handler.data_conn)
            cache.data_channel_factory = InMemoryDataChannelFactory(channel)
        return channel

    def input_elements(
        self, instruction_id: str, expected_inputs: Any, abort_callback: Any = None
    ) -> Iterator[beam_fn_api_pb2.Elements.Data]:
        for name, element in self.elements:
            yield beam_fn_api_pb2.Elements.Data(instruction_id=instruction_id, transform_id=name, data=element)


class _Elements:
    """Encoded elements and the transforms that they go into; an iterator that threads share, and that can be ended."""

    def __init__(self, elements: Iterable[tuple[str, bytes]]):
        self._rest = iter(elements)
        self._lock = threading.Lock()
        self._stopped = False

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        return self

    def __next__(self) -> tuple[str, bytes]:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._rest)

    def stop(self) -> None:
        """Ends it: who asks for another element gets none."""
        self._stopped = True


def split(buffer: Iterable[bytes], coder: CoderImpl) -> Iterator[bytes]:
    """Each element of a buffer by itself, encoded as it is there."""
    for encoded in buffer:
        stream = create_InputStream(encoded)
        start = 0
        while stream.size():
            coder.decode_from_stream(stream, True)
            stop = len(encoded) - stream.size()
            yield encoded[start:stop]
            start = stop


def run_threads(tasks: Iterable[Callable[[], T]], stop: Callable[[], object]) -> list[T]:
    """Runs each task in a thread of its own; returns their results, in order.

    Args:
      tasks: what to do.
      stop: tells the tasks to come to an end; called when one fails, or when waiting for them is interrupted.

    Raises:
      BaseException: what the first task to fail raised, when the others have ended; or the interruption, at once. What
        a handler of a signal raises, such as a time limit, looks like a failure: nothing goes on once that is told.
      RuntimeError: a thread can't be started; those that were have ended.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int, task: Callable[[], T]) -> None:
        try:
            results[number] = task()
        except BaseException as e:
            errors.append(e)
            stop()

    threads: list[threading.Thread] = []
    try:
        for number, task in enumerate(tasks):
            thread = threading.Thread(target=run, args=(number, task), name=f"worker-{number}", daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
    except BaseException as e:
        stop()
        for thread in threads if isinstance(e, Exception) else ():
            thread.join()
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(threads))]
