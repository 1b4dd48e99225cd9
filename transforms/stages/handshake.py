"""The handshake: before any unit, workers say that they can do the job, or by name of their host why they can't.

Every other stage is unpickled by importing this package. A worker that lacks it then fails before it has opened its
connection for data, for which Flink's side waits for minutes without a word
(org.apache.beam.runners.fnexecution.data.GrpcDataService, `createOutboundAggregator`, 2.62.0). So this stage travels as
source, which any Python can read, and its neighbours are Beam's own.
"""

# pyright: reportReturnType=false
# Beam says of `pcoll | transform` only that it is a PValue.

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import sys
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.utils.python_callable import PythonCallableWithSource

from weightbeam import __version__
from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import StorageError, reason, store_and_name
from weightbeam.formats.storage.identity import this_machine
from weightbeam.formats.text.installing import install
from weightbeam.transforms.stages.staged import AtWork

GREETINGS = 32  # are dealt out to the workers: most of a few dozen get one


class UnfitError(Exception):
    """A worker can't do the job; the message names its host and what helps."""


class GreetWorkers(beam.PTransform):
    """Some numbers -> how many there were, once as many workers as got one have shown that they can do the job.

    A worker must have this Python and this version of the package, the clients of the stores, and plan and output in
    sight.
    """

    def __init__(self, at_work: AtWork):
        super().__init__()
        self.packed = pickle.dumps(at_work)

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        ours = {"version": __version__, "python": "{}.{}".format(*sys.version_info), "packed": self.packed}
        there = functools.partial(
            PythonCallableWithSource(f"from __future__ import annotations\n{inspect.getsource(greet)}"), **ours
        )
        return (
            pcoll
            | "Deal" >> beam.Reshuffle()
            | "Greet" >> beam.FlatMap(there).with_output_types(int)
            | "AllGreetings" >> beam.CombineGlobally(beam.combiners.CountCombineFn()).without_defaults()
        )


def greet(number: int, version: str, python: str, packed: bytes) -> Iterator[int]:
    """The number, where this worker can do the job. Only its source goes to the worker: it names nothing of this
    module.
    """
    import socket
    import sys

    worker = f"the worker on {socket.gethostname()}"
    if (here := "{}.{}".format(*sys.version_info)) != python:
        raise RuntimeError(f"{worker} has Python {here}, and the command runs in {python}; both must be the same")
    try:
        import weightbeam
        from weightbeam.transforms.stages import handshake
    except ImportError as e:
        raise RuntimeError(
            f"{worker} lacks Weightbeam ({e}); install weightbeam {version} in the Python of its worker pool, or run the image"
        ) from None
    if weightbeam.__version__ != version:
        raise RuntimeError(
            f"{worker} has Weightbeam {weightbeam.__version__}, and the command {version}; both must be the same"
        )
    handshake.check_place(worker, packed)
    yield number


_FIT: set[bytes] = set()  # what this process was found fit for


def check_place(worker: str, packed: bytes) -> None:
    """Makes sure that this process sees the plan and what it is made of, and can write the output of a job.

    Raises:
      UnfitError: it can't.
    """
    if packed in _FIT:
        return
    try:
        at_work: AtWork = pickle.loads(packed)
        at_work.set_up()
        if not at_work.is_published():  # else this bundle is a repeated one
            inputs = filter(None, at_work.planned.places)
            for store in {store.url: store for store, _ in map(store_and_name, inputs)}.values():
                store.check_readable()
            check_writable(worker, at_work.staging)
            with contextlib.suppress(OSError):  # it's for show
                at_work.staging.note_worker(f"{this_machine()}-{os.getpid()}")
    except ImportError as e:
        raise UnfitError(
            f"{worker} lacks a client of the storage ({e}); there, {install('gcp')}, or run the image"
        ) from e
    except StorageError as e:
        # in a bucket and on the hub the reason says what helps
        helps = "" if "://" in str(e) else "; every host needs the same folders, or name gs://BUCKET/FOLDER"
        raise UnfitError(f"{worker} doesn't see what the command sees: {e}{helps}") from e
    except (OSError, RuntimeError) as e:
        raise UnfitError(f"{worker}: {e}") from e
    _FIT.add(packed)


def check_writable(worker: str, staging: Staging) -> None:
    """Raises UnfitError where this process can't write the output."""
    try:
        staging.output.check_writable()
    except OSError as e:
        raise UnfitError(
            f"{worker} can't write to {staging.output}: {reason(e)}; the user or the account that it runs as needs the right to"
        ) from e
