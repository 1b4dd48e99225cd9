"""`weightbeam.load`: a release or a checkpoint onto the devices of a JAX mesh, without a conversion between.

The plan is the converter's, and so are the bits. Reading runs ahead of the devices in a few threads, each with a buffer
of its own that the next step uses again.
"""

# pyright: reportInvalidTypeForm=false
# jax.Device is a variable to pyright.

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from weightbeam import __version__
from weightbeam.formats.storage import ChangedError, StorageError
from weightbeam.model_mappings.boxes import slices
from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.model_mappings.trees import has_scales
from weightbeam.pipelines.loading.abstract import Abstract, RequestedArray, every_parameter, mismatches, read_tree
from weightbeam.pipelines.loading.agreement import Agreement
from weightbeam.pipelines.loading.coded import Coded, CodedRelease
from weightbeam.pipelines.loading.decoding import alike, check_devices, compile_program, decoded
from weightbeam.pipelines.loading.meeting import TIMEOUT, Meeting
from weightbeam.pipelines.loading.mesh import check_jax, layout_of, named_sharding, open_mesh
from weightbeam.pipelines.loading.opening import CHOICES, at_commits, choose, find_commits, find_source, values_asked
from weightbeam.pipelines.loading.placing import bits, empty_arrays, exchange, place, settle
from weightbeam.pipelines.loading.release import MappedRelease
from weightbeam.pipelines.loading.schedule import (
    MAX_READERS,
    MIN_REMOTE_RUN,
    MIN_RUN,
    ON_THE_WAY,
    UNIT_BYTES,
    ReadBlock,
    ReadStep,
    ShardLayout,
    make_steps,
)
from weightbeam.pipelines.loading.scratch import Scratch, aligned_empty
from weightbeam.pipelines.loading.source import ArraySource, Wanted
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.sources import reading
from weightbeam.pipelines.running.without_beam import cores
from weightbeam.pipelines.terminal.errors import Failed, Refusals, Refused
from weightbeam.pipelines.terminal.exactness import check_arithmetic
from weightbeam.pipelines.terminal.keywords import check_known, read_options
from weightbeam.pipelines.terminal.progress import Report, reporter, watch_progress
from weightbeam.transforms.cutting.mesh import axes_in
from weightbeam.transforms.planning.conversion import rules_of
from weightbeam.transforms.planning.inputs import this_code
from weightbeam.transforms.planning.layouts import EMBEDDING, parts_of
from weightbeam.transforms.planning.options import ConvertOptions

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

LOG = logging.getLogger("weightbeam")
HOST, DEVICE = "host", "device"  # where codes become values
# how an error of an exchange begins, which may be a ValueError, too (jaxlib 0.10, where a result is fetched)
STATUS = re.compile("(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): ")
# of a step, as they were read: for each block what its devices get
Shares = list[dict["jax.Device", np.ndarray | Coded]]


def load(
    source: str | PathLike[str],
    like: Any = None,
    *,
    mesh: Mesh | str | None = None,
    release: str | PathLike[str] | None = None,
    unit_bytes: int | str = UNIT_BYTES,
    dequantize: str = HOST,
    timeout: float = TIMEOUT,
    progress: bool | str | Report = True,
    **options: Any,
) -> Any:
    """Loads a release or an Orbax checkpoint as a tree of `jax.Array`s.

    The bits are those that a conversion to the same dtypes would store. Each process calls it with the same arguments;
    each byte of the source is read once, by one of them, wherever the arrays are large. Nothing is read before all are
    there and have the same arguments and the same source; process 0 says for all which commit a branch of the hub is.

    Args:
      source: a folder, `gs://…`, or `hf://org/name[@revision]`; of an Orbax checkpoint its root, a step, or the item.
      like: what to load: MaxText's parameters as Linen's collection, an `nnx.State`, nested dicts, or a flat dict of
        Orbax's keys, with leaves that have `shape`, `dtype` and `sharding`. Without it all parameters, as nested dicts.
      mesh: shards the leaves that have no sharding, by MaxText's logical axis rules: a `jax.sharding.Mesh`, or
        `"fsdp=4,tensor=2"` for all devices.
      release: of a checkpoint that Weightbeam didn't write, such as a training run's, a release of its model, whose
        `config.json` tells its logical axes to `mesh`; the weights alone are loaded.
      unit_bytes: memory for a step, in bytes, or as on the command line (`"64M"`); up to eight of them are there at a
        time, on a host of six cores or more.
      dequantize: where codes become values: on the `host`, or plain FP8 on the `device`, which then has the same bits.
      timeout: seconds after which a process that isn't heard of counts as gone, and all others raise an error that names
        it; and for which exchanges among processes that are there may stand still, while none reads.
      progress: shown by process 0 on standard error, told to its callback, or False for neither.
      options: those of `weightbeam convert` that say what MaxText's tree is: `scan_layers`, `vocab_size`,
        `maxtext_model` …; `lora` merges adapters. Where `like` says them by its keys and shapes, they needn't be given.
        A checkpoint of FP8 codes is loaded as codes and scales; as values where `like` has no place for scales, or where
        `save_dtype` says of which dtype.

    Returns:
      A tree of `jax.Array`s, in the form of `like` (its keys, shapes, dtypes and shardings); without it nested dicts.

    Raises:
      Refused: before anything is read: there is no such source, or problems stand against it or against `like`:
        all of them; in this process or in another one, or the processes don't mean the same. Or an earlier load broke off
        in the middle of an exchange, or isn't over.
      Failed: on the way: a file can't be read, or was changed since; or another process failed, or isn't there.

    Example:
      >>> import jax
      >>> params = wb.load("models/qwen3", mesh=f"fsdp={jax.device_count()}")
      >>> params["params"]["params"]["decoder"]["layers"]["mlp"]["wi_0"]["kernel"].shape
      (64, 2, 128)
      >>> like = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, "float32", sharding=array.sharding), params)
      >>> wb.load("ckpt", like)["params"]["params"]["token_embedder"]["embedding"].dtype
      dtype('float32')
    """
    check_jax()
    with Meeting(timeout if _is_time(timeout) else TIMEOUT) as meeting:  # who refuses it has come, too
        shown = progress if meeting.process == 0 else False
        asked = meeting.agree(
            "arguments", lambda: _ask(like, mesh, unit_bytes, dequantize, shown, options, timeout), Asked.identity
        )
        commits = meeting.decide("commits", lambda: find_commits(source, asked.chosen, release))
        opened, chosen = meeting.agree(
            "source", lambda: _open(source, asked, commits, release), lambda found: _identity(found[0])
        )
        loading, build = meeting.agree(
            "arrays", lambda: _prepare(opened, chosen, asked), lambda made: made[0].identity()
        )
        return build(loading.run(meeting, asked.report))


def _is_time(timeout: Any) -> bool:
    return isinstance(timeout, int | float) and timeout > 0


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the arguments of a load ask for, as far as they say it without the source.

    Attributes:
      tree: what to load; None for all parameters.
      chosen: the options of a plan.
      given: those that were named, as they were given.
      mesh, dequantize: as they were given.
      unit_bytes: memory for a step.
      report: whom this process tells how far it has come.
    """

    tree: Abstract | None
    chosen: ConvertOptions
    given: Mapping[str, Any]
    mesh: Mesh | str | None
    unit_bytes: int
    dequantize: str
    report: Report | None = None

    def identity(self) -> dict[str, str]:
        """What the processes have to agree on; folders may have other names on other hosts."""
        said = {name: getattr(self.chosen, name) for name in sorted(self.given)}
        if "lora" in said:
            said["lora"] = [weight for _, weight in self.chosen.lora]
        said["mesh"] = self.mesh if isinstance(self.mesh, str) else type(self.mesh).__name__
        said |= {"unit_bytes": self.unit_bytes, "dequantize": self.dequantize}
        said["weightbeam"] = f"{__version__} ({this_code()[:16]})"  # which cuts a load into steps
        return {name: value if isinstance(value, str) else repr(value) for name, value in said.items()}


def _ask(
    like: Any,
    mesh: Mesh | str | None,
    unit_bytes: int | str,
    dequantize: str,
    progress: bool | str | Report,
    options: Mapping[str, Any],
    timeout: float,
) -> Asked:
    """What the arguments ask for. Raises Refused where they can't be meant, or this process can't count."""
    check_arithmetic()
    check_known(
        options, [*sorted(CHOICES), "mesh", "like", "release", "unit_bytes", "dequantize", "timeout", "progress"]
    )
    refusals = Refusals()
    with refusals.kept():
        if not _is_time(timeout):
            raise Refused(f"timeout={timeout!r} should be seconds, more than 0")
    with refusals.kept():
        if dequantize not in (HOST, DEVICE):
            raise Refused(
                f"dequantize={dequantize}: quantised weights are decoded on the {HOST}, or plain FP8 on the {DEVICE}"
            )
    tree, chosen, read, report = None, ConvertOptions(), ConvertOptions(), None
    with refusals.kept():
        if like is None and mesh is None:
            raise Refused(
                "like=… or mesh=… is missing: without a tree or a mesh nobody knows where the arrays should lie"
            )
        if isinstance(like, str):
            raise Refused(f"like={like!r}: should be a tree of arrays; a mesh is mesh={like!r}")
        tree = read_tree(like) if like is not None else None
    with refusals.kept():
        chosen = choose(options)
    with refusals.kept():
        read = read_options(ConvertOptions, {"unit_bytes": unit_bytes})
    with refusals.kept():
        report = reporter(progress)
    refusals.check()
    return Asked(tree, chosen, options, mesh, read.unit_bytes, dequantize, report)


def _identity(source: ArraySource) -> dict[str, str]:
    """What the processes have to agree on of a source; one that has gone since it was opened is refused."""
    with reading(source.url):
        return source.identity()


def _open(
    source: str | PathLike[str], asked: Asked, commits: Mapping[str, str], release: str | PathLike[str] | None
) -> tuple[ArraySource, ConvertOptions]:
    """The source at its commit, planned as the tree is where the options don't say it: with its layers scanned or not,
    its vocabulary, its parts.
    """
    source, release = commits.get(str(source), source), commits.get(str(release), release)
    tree, given = asked.tree, asked.given

    def options(said: Mapping[str, Any]) -> ConvertOptions:
        return dataclasses.replace(at_commits(choose(said), commits), unit_bytes=max(asked.unit_bytes, UNIT_BYTES))

    if tree is None:
        chosen = options(given)
        return find_source(source, chosen, release=release, values=values_asked(given), given=given), chosen
    completed = dict(given)
    values = values_asked(given, has_scales(tree.keys))
    shapes = {
        PARAMETERS + target.key.removeprefix(PARAMETERS).removeprefix("params."): target.shape
        for target in tree.targets
    }
    if rows := shapes.get(EMBEDDING, ())[:1]:
        completed.setdefault("vocab_size", rows[0])
    completed = parts_of(shapes) | completed
    scans = [completed["scan_layers"]] if "scan_layers" in completed else [True, False]
    return _find_layout(
        (options(completed | {"scan_layers": scan}) for scan in scans),
        lambda chosen: find_source(source, chosen, release=release, values=values),
        tree,
    )


def _find_layout(
    tried: Iterable[ConvertOptions], find: Callable[[ConvertOptions], ArraySource], tree: Abstract
) -> tuple[ArraySource, ConvertOptions]:
    """The source as it is planned with those of the options with which it lacks the fewest of the tree's keys. Raises the
    first refusal where all are refused.
    """
    found: list[tuple[int, ArraySource, ConvertOptions]] = []
    refusals: list[Refused] = []
    for chosen in tried:
        try:
            opened = find(chosen)
        except Refused as e:
            refusals.append(e)
            continue
        lacking = len(tree.spelled_as(opened.arrays).keys - opened.arrays.keys())
        found.append((lacking, opened, chosen))
        if not lacking:
            break
    if not found:
        raise refusals[0]
    _, opened, chosen = min(found, key=lambda each: each[0])
    return opened, chosen


def _prepare(
    opened: ArraySource, chosen: ConvertOptions, asked: Asked
) -> tuple[Loading, Callable[[Sequence[jax.Array]], Any]]:
    """The load of what is asked for, and what makes the tree of its arrays. Raises Refused where the source hasn't what
    is asked for, or nobody says where it should lie.
    """
    abstract = every_parameter(opened.arrays) if asked.tree is None else asked.tree.spelled_as(opened.arrays)
    if asked.mesh is not None:
        rules = rules_of(chosen)
        abstract = _shard(abstract, opened, open_mesh(asked.mesh, rules), rules)
    refuse([*opened.lost, *mismatches(abstract, opened.arrays)])
    if asked.dequantize == DEVICE and isinstance(opened, MappedRelease):
        opened = CodedRelease(opened.conversion)  # whose boxes may be codes, which `Loading` knows
    return Loading(opened, abstract.targets, asked.unit_bytes), abstract.build


def _shard(abstract: Abstract, source: ArraySource, mesh: Mesh, rules: Any) -> Abstract:
    """Shardings by logical axis rules for the targets that have none, and on the mesh for those with a partition spec."""
    from jax.sharding import NamedSharding, PartitionSpec

    targets, by_rules = [], False
    for target in abstract.targets:
        array = source.arrays.get(target.key)
        if isinstance(target.sharding, PartitionSpec):
            with contextlib.suppress(ValueError):  # of axes that the mesh hasn't, which `mismatches` says
                target = dataclasses.replace(target, sharding=NamedSharding(mesh, target.sharding))
        elif (
            target.sharding is None
            and array is not None
            and array.shape == target.shape
            and (array.has_axes or mesh.size == 1 or len(array.shape) < 2)
        ):
            target = dataclasses.replace(target, sharding=named_sharding(target.shape, array.axes, mesh, rules))
            by_rules = True
        targets.append(target)
    if by_rules and mesh.size > 1 and not set(mesh.axis_names).intersection(axes_in(rules)):
        named = ", ".join(map(str, mesh.axis_names))
        LOG.warning("no rule speaks of an axis of the mesh (%s), so that each device has all of each array", named)
    return dataclasses.replace(abstract, targets=tuple(targets))


class Loading:
    """One load: the schedule, and the arrays as they grow.

    Attributes:
      steps: the schedule.

    Raises:
      Refused: devices are to decode, and their bits aren't the host's.
    """

    def __init__(self, source: ArraySource, targets: Sequence[RequestedArray], unit_bytes: int = UNIT_BYTES):
        import jax

        self.source, self.targets = source, {target.key: target for target in targets}
        self.process = jax.process_index()
        self.layouts: dict[str, ShardLayout] = {}
        self.devices: dict[str, tuple[jax.Device, ...]] = {}
        for target in targets:
            assert target.sharding is not None
            self.layouts[target.key], self.devices[target.key] = layout_of(target.shape, target.sharding)
        check_devices({(self.devices[key], self.targets[key].dtype) for key in source.coded if key in self.targets})
        self._placed = 0  # bytes, of all processes
        source.sum_up()
        remote = "://" in source.url
        self.steps = make_steps(source, self.layouts, unit_bytes, MIN_REMOTE_RUN if remote else MIN_RUN)

    def _bytes_of(self, step: ReadStep) -> int:
        """What a step makes, in all processes."""
        return sum(math.prod(block.shape) * self.targets[block.key].dtype.itemsize for block in step.blocks)

    def identity(self) -> dict[str, str]:
        """What the processes have to agree on: what each array is, and how it lies on devices."""
        facts = {}
        for key, target in self.targets.items():
            layout, devices = self.layouts[key], [device.id for device in self.devices[key]]
            where = f"devices {devices}" if len(layout.readers) > 1 else "devices of one process"
            facts[key] = f"{target.dtype.name} {target.shape}, cut into {layout.counts}, on {where}"
        return facts

    def run(self, meeting: Meeting, report: Report | None = None) -> list[jax.Array]:
        """Loads everything, once the processes have met; the arrays in the order of the targets. Tells `report` how far
        it has come.

        Raises:
          Failed: a file can't be read, or was changed since it was opened; or another process failed.
        """
        import jax

        total = sum(map(self._bytes_of, self.steps))
        try:
            with watch_progress(total, lambda: self._placed, "loading", report, places=[self.source.url]):
                arrays = meeting.until(lambda: self._run(meeting))
        except (StorageError, OSError, ValueError, jax.errors.JaxRuntimeError) as e:
            if isinstance(e, jax.errors.JaxRuntimeError) or (
                STATUS.match(str(e)) and not (meeting.alone or meeting.agreed)
            ):
                raise self._lost(e, meeting) from e
            raise Failed(f"{self.source.url}: {e}") from e
        dtypes = {key: target.dtype for key, target in self.targets.items()}
        settled = settle(
            arrays,
            dtypes,
            {key: target.sharding for key, target in self.targets.items() if target.sharding is not None},
        )
        return [settled[key] for key in self.targets]

    def _lost(self, error: Exception, meeting: Meeting) -> Exception:
        """What is raised for an error of JAX. Raises Failed where it comes of a process that has stopped, or left."""
        import jax

        if jax.process_count() == 1:
            return error
        if "RESOURCE_EXHAUSTED" not in str(error):  # which is this process's own
            meeting.find_lost()
        return Failed(
            f"the exchange with the other {jax.process_count() - 1} processes failed; one of them may have stopped: {error}"
        )

    def _run(self, meeting: Meeting) -> dict[str, jax.Array]:
        import jax

        agreement = Agreement(meeting.go_on)
        partial = list(dict.fromkeys(block.key for step in self.steps for block in step.blocks if not block.is_whole))
        empty = empty_arrays(
            [
                (self.targets[key].shape, bits(self.targets[key].dtype), self.devices[key], self.layouts[key].counts)
                for key in partial
            ]
        )
        arrays = dict(zip(partial, empty, strict=True))
        readers = min(MAX_READERS, max(2, cores()))
        compilers = concurrent.futures.ThreadPoolExecutor(readers, "compile")
        try:
            for program in self._programs():  # while the first steps are read
                compilers.submit(compile_program, *program)
            with contextlib.closing(self._read_ahead(arrays, readers)) as steps:
                for step, reading in steps:
                    try:
                        with meeting.reading():
                            shares = reading.result()
                    except Exception as e:  # whatever it is, the others must learn of it
                        agreement.fail(_in_words(e))
                        shares = self._nothing(step)
                    meeting.go_on()
                    self._place(arrays, step, shares)
                    self._placed += self._bytes_of(step)
                    agreement.vote()
            self._conclude(agreement, meeting)
            jax.block_until_ready(list(arrays.values()))
        finally:
            compilers.shutdown(cancel_futures=True)
        return arrays

    def _read_ahead(
        self, arrays: Mapping[str, jax.Array], readers: int
    ) -> Generator[tuple[ReadStep, concurrent.futures.Future[Shares]]]:
        """The steps in their order, and what is read for each. So many threads read ahead, as long as a buffer is free:
        that of a step is, once the devices have what it put into `arrays`.
        """
        import jax

        free = [Scratch() for _ in range(readers + ON_THE_WAY)]
        busy: collections.deque[tuple[Scratch, ReadStep]] = collections.deque()
        waiting: collections.deque[tuple[ReadStep, Scratch, concurrent.futures.Future[Shares]]] = collections.deque()
        todo = collections.deque(self.steps)
        with concurrent.futures.ThreadPoolExecutor(readers, "load") as pool:
            try:
                while todo or waiting:
                    while todo and free:
                        step, scratch = todo.popleft(), free.pop()
                        waiting.append((step, scratch, pool.submit(self._read, step, scratch)))
                    step, scratch, reading = waiting.popleft()
                    yield step, reading
                    busy.append((scratch, step))
                    if len(busy) == ON_THE_WAY:
                        scratch, step = busy.popleft()
                        jax.block_until_ready([arrays[block.key] for block in step.blocks])
                        scratch.reset()
                        free.append(scratch)
            finally:
                for *_, reading in waiting:
                    reading.cancel()

    def _conclude(self, agreement: Agreement, meeting: Meeting) -> None:
        """Looks at the files once more, and at what was read of them; all learn whether it is right."""

        def check() -> None:
            with meeting.reading():
                self.source.check()

        for look in (check, lambda: self._compare(meeting)):
            try:
                look()
            except Exception as e:  # whatever it is, the others must learn of it
                agreement.fail(_in_words(e))
            agreement.vote()
            agreement.settle()

    def _compare(self, meeting: Meeting) -> None:
        """Compares what all processes have read together with what was written. Raises StorageError where it isn't that."""
        import jax
        from jax.experimental import multihost_utils

        def gather(sums: np.ndarray) -> np.ndarray:
            if jax.process_count() > 1:
                meeting.go_on()
                sums = np.asarray(multihost_utils.process_allgather(sums))
            return sums.reshape(-1, *sums.shape[-2:])

        for line in self.source.compare_read(sorted(self.targets), gather).lines():
            LOG.log(logging.WARNING if self.source.has_digests else logging.INFO, "%s: %s", self.source.url, line)

    def _read(self, step: ReadStep, scratch: Scratch) -> Shares:
        """Reads what this process needs for a step, everything in one go."""
        wanted, makers = [], []
        for block in step.blocks:
            dtype = self.targets[block.key].dtype
            kept = block.is_whole_direct  # a CPU device keeps such an array where it is
            for share in block.shares(self.process):
                wanted += [Wanted(block.key, box, dtype, share.is_one_box, share.others) for _, box in share.parts]
                makers += [aligned_empty if kept else scratch.empty] * len(share.parts)
        made, _ = self.source.make(wanted, scratch.empty, makers)
        rest = iter(made)
        shares = []
        for block in step.blocks:
            mine: dict[jax.Device, np.ndarray | Coded] = {}
            for share in block.shares(self.process):
                parts = [(box, next(rest)) for box, _ in share.parts]
                values = self._joined(share.shape, parts, self.targets[block.key].dtype, scratch)
                mine |= {self.devices[block.key][device]: values for device in share.devices}
            shares.append(mine)
        return shares

    def _programs(self) -> list[tuple[Any, ...]]:
        """What `compile_program` needs for each of the programs that decode."""
        wanted: dict[tuple[Any, ...], None] = {}
        for block in (block for step in self.steps for block in step.blocks if block.key in self.source.coded):
            forms = {}
            for share in block.shares(self.process):
                if share.is_one_box and (
                    form := self.source.form_of(
                        Wanted(block.key, share.parts[0][1], self.targets[block.key].dtype, alone=True)
                    )
                ):
                    forms |= {self.devices[block.key][device]: form for device in share.devices}
            wanted |= {(devices, form, *self._dtypes(block)): None for form, devices in alike(forms).items()}
        return list(wanted)

    def _dtypes(self, block: ReadBlock) -> tuple[np.dtype, np.dtype]:
        """Of a block's values, and of what devices make of codes: of these, or of their bits where the block is moved
        further.
        """
        dtype = self.targets[block.key].dtype
        return dtype, dtype if block.is_whole_direct else bits(dtype)

    @staticmethod
    def _joined(
        shape: tuple[int, ...], parts: Sequence[tuple[Any, Any]], dtype: np.dtype, scratch: Scratch
    ) -> np.ndarray | Coded:
        """A share of its parts; one that is the whole of it as it is."""
        if len(parts) == 1 and parts[0][1].shape == shape:
            return parts[0][1]
        joined = scratch.empty(shape, dtype)
        if sum(values.size for _, values in parts) < math.prod(shape):
            joined.view(np.uint8)[...] = 0  # padding, which is cut off again
        for box, values in parts:
            joined[slices(box)] = values
        return joined

    def _place(
        self, arrays: dict[str, jax.Array], step: ReadStep, shares: Sequence[Mapping[jax.Device, np.ndarray | Coded]]
    ) -> None:
        """Puts what was read for a step onto the devices; arrays that are exchanged whole all together."""
        whole: dict[tuple[jax.Device, ...], list[tuple[ReadBlock, Mapping[jax.Device, np.ndarray | jax.Array]]]] = {}
        for block, read in zip(step.blocks, shares, strict=True):
            mine = decoded(read, *self._dtypes(block))
            if block.is_whole_exchange:
                whole.setdefault(self.devices[block.key], []).append((block, mine))
            else:
                arrays[block.key] = place(
                    arrays.get(block.key), block, self.devices[block.key], mine, self.targets[block.key].dtype
                )
        for devices, together in whole.items():
            blocks, mine = zip(*together, strict=True)
            made = exchange(blocks, devices, mine, [self.targets[block.key].dtype for block in blocks])
            arrays |= {block.key: array for block, array in zip(blocks, made, strict=True)}

    def _nothing(self, step: ReadStep) -> Shares:
        """Empty shares, so that the other processes don't wait for this one."""
        return [
            {
                self.devices[block.key][device]: np.zeros(share.shape, self.targets[block.key].dtype)
                for share in block.shares(self.process)
                for device in share.devices
            }
            for block in step.blocks
        ]


def _in_words(error: Exception) -> Exception:
    """What failed, for who loads: nothing is kept of a load that could be started anew."""
    return Failed(f"{error.what}; load it again") if isinstance(error, ChangedError) else error
