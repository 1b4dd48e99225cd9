"""Writing a plan's result to its place: what is ready before, the pipeline or what comes instead, and what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.staging import ITEMS, Staging
from weightbeam.formats.staging.links import LinkError
from weightbeam.formats.storage import StorageError
from weightbeam.formats.targets.published import changed_in
from weightbeam.formats.text.printable import listed, printable
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.running.output import check_output
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.stopping import stopping
from weightbeam.pipelines.running.without_beam import is_local
from weightbeam.pipelines.terminal.errors import Failed, Refused, refusing
from weightbeam.pipelines.terminal.progress import Report, reporter
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.transforms.comparing import odd_values
from weightbeam.transforms.comparing.array_sums import Compared, compared_of
from weightbeam.transforms.execution.overlap import overlaps
from weightbeam.transforms.planning.options import ConvertOptions, Delivery, options_of
from weightbeam.transforms.planning.transfer import Transfer
from weightbeam.transforms.stages.assembly import stage
from weightbeam.transforms.stages.head_start import head_start

LOG = logging.getLogger("weightbeam")
DONE, FINISHED, RUNNING = "done", "nothing to do", "running"  # states


@dataclasses.dataclass(frozen=True)
class Written:
    """Where a result is.

    Attributes:
      folder: its URL.
      seconds: that it took; 0 where it was finished already.
      nbytes: that this process wrote.
      state: `done`, `nothing to do`, or `running`, where a job goes on without this process.
      record: what it says of where it comes from; empty where it isn't there yet.
      in_folder: whether it is on a disk, not in a bucket.
      page: of the commit, where it was published on the hub.
      removed, replaced: files of the repository that the commit took away, and that have another content now.
    """

    folder: str
    seconds: float = 0.0
    nbytes: int = 0
    state: str = DONE
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    in_folder: bool = True
    page: str = ""
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    @property
    def compared(self) -> Compared | None:
        """How many arrays of a checkpoint were compared with their digests, where it was made of one."""
        return compared_of(self.record)

    @property
    def instead(self) -> str:
        """What is said where this process hasn't made it now; else empty."""
        if self.state == FINISHED:
            return f"{self.folder} is finished already; nothing to do"
        return f"{self.folder} will appear when the job is done" if self.state == RUNNING else ""


@dataclasses.dataclass(frozen=True, repr=False)
class Made(Shown):
    """What came of a command that writes.

    Attributes:
      planned: what was planned.
      written: where the result is, and what it took.
    """

    planned: Transfer
    written: Written

    @property
    def seconds(self) -> float:
        """See `Written`."""
        return self.written.seconds

    @property
    def state(self) -> str:
        """See `Written`."""
        return self.written.state


def find_place(planned: Transfer, output: str) -> Staging:
    """The place of a result.

    Raises:
      Refused: nothing can be written there.
    """
    with refusing(StorageError):  # of a small file of the source
        plan_hash = planned.hash
    with refusing(StorageError, about="--output="):
        return planned.target.place(output, plan_hash)


@contextlib.contextmanager
def get_ready(planned: Transfer, staging: Staging, resume: bool, beam: Sequence[str]) -> Iterator[None]:
    """Context manager: Beam is imported before the output is taken, since that takes a while and may be interrupted. If
    a link is to be filled, a local run reads the plan's first units meanwhile.

    Args:
      planned: has no problems.
      staging: where it will be carried out.
      resume: first units may be done already.
      beam: Beam's options.
    """
    with contextlib.ExitStack() as stack:
        if planned.units:
            if is_local(beam) and not resume and overlaps(*planned.places, staging.output.url):
                stack.enter_context(head_start(planned, staging))
            importlib.import_module("weightbeam.pipelines.running.graph")
        yield


def write(
    planned: Transfer, staging: Staging, output: str, how: Delivery, beam: Sequence[str], progress: bool | str | Report
) -> Written:
    """Writes a result to its place, which is this command's alone."""
    start, written = time.monotonic(), 0
    refuse(check_output(staging, planned, how), planned.source)  # again: now nobody else changes it
    if how.overwrite:
        staging.look_there()
        if staging.is_taken():
            LOG.info(_replaced(planned, staging))
    if planned.units:
        from weightbeam.pipelines.running.graph import run_units  # only now: it imports Beam

        counted = run_units(planned, staging, beam, _shown(planned, output), how, reporter(progress))
        if counted is None:
            return Written(str(staging.final), state=RUNNING)  # the job that was started publishes it
        written = counted
    else:
        _write_at_once(planned, staging, how)
    if planned.target.made_by(staging.final) != planned.hash:
        raise Failed(
            f"  the pipeline ended, but {staging.final} isn't its result; another command may have replaced it since. "
            "The same command with --overwrite writes it anew"
        )
    made = read_written(planned, staging, time.monotonic() - start, written)
    for line in odd_values.describe(made.record):
        LOG.warning(printable(line))
    return made


def _replaced(planned: Transfer, staging: Staging) -> str:
    """What lies in the place until the result does."""
    source, edited = None, list[str]()
    with contextlib.suppress(StorageError):  # a record that can't be read
        source = planned.target.record_of(staging.final).get("source")
        edited = changed_in(staging.final)
    made = f", which was made of {printable(source)}" if isinstance(source, str) else ""
    beside = [printable(name) for name in staging.final.folders() if name != ITEMS]
    line = f"replaces {staging.final}{made}" + (f", with {listed(beside)} in it" if beside else "")
    return line + (f"; changed in it since: {listed([*map(printable, edited)])}" if edited else "")


def read_written(
    planned: Transfer, staging: Staging, seconds: float = 0.0, written: int = 0, state: str = DONE
) -> Written:
    """The `Written` of a published result, with its record read."""
    record = planned.target.record_of(staging.final)
    return Written(str(staging.final), seconds, written, state, record, staging.on_disk)


def _shown(planned: Transfer, output: str) -> dict[str, Any]:
    """The command's own options, for who looks at the job: those that Beam is told of."""
    known = {each.name for each in options_of(ConvertOptions)} - {"sharding_rules"}
    asked = {name: value for name, value in vars(planned.options).items() if name in known}
    asked |= {"mesh": list(asked["mesh"])} if "mesh" in asked else {}
    return asked | {"source": planned.inputs[0], "output": output}


def _write_at_once(planned: Transfer, staging: Staging, how: Delivery) -> None:
    """A plan without units: every array is virtual, and a pipeline would have nothing to do."""
    try:
        with stopping(staging, planned.hash):
            if stage(planned, staging, how):
                planned.assemble(staging, how.overwrite)
            else:
                staging.publish(how.overwrite)
    except LinkError as e:
        raise Refused(Problem("link", "", str(e))) from e
    except (OSError, ValueError) as e:
        raise Failed(f"  {e}") from e
