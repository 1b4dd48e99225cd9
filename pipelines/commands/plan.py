"""`weightbeam plan`: what a conversion would do, and every problem."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from weightbeam.formats.storage import is_hub
from weightbeam.model_mappings.maxtext_config import MaxTextConfig
from weightbeam.model_mappings.plan import Array, Problem
from weightbeam.pipelines.checking import virtual
from weightbeam.pipelines.loading import report as load_report
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.slots import slots_of, worker_of
from weightbeam.pipelines.running.sources import check_beam, plan_source, reading
from weightbeam.pipelines.running.without_beam import threads_in
from weightbeam.pipelines.terminal import report, tables
from weightbeam.pipelines.terminal.arguments.parser import command_line
from weightbeam.pipelines.terminal.errors import Refused, reworded
from weightbeam.pipelines.terminal.keywords import arguments_of, asked_of, takes
from weightbeam.pipelines.terminal.shell import STDOUT, say, write_json, write_text
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.layouts import Untold
from weightbeam.transforms.planning.makespan import Estimate, efforts_of, estimate
from weightbeam.transforms.planning.memory import memory_bound
from weightbeam.transforms.planning.options import ConvertOptions, Delivery, Linking, Simulation, Token, Unsaid

UNKNOWN = "unknown"  # the family of a plan that found none


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Shown):
    """What a conversion would do: a value to print, to show in a notebook, to ask, and to hand to `convert`.

    Attributes:
      conversion: the planned conversion, with all that the workers follow.
      threads: units that one process works on at a time, which its bound on memory follows from.
      estimates: the simulation, for each number of workers that was asked for.
      output: where the checkpoint would go, if that is known.
      as_command: the command that carries it out, as it was given; empty where a function was called.
      against: what stands against its output, if that is known.
      hf_token_secret: which secret holds the token that its source is read with, if it was made with one.
    """

    conversion: Conversion
    threads: int
    estimates: tuple[Estimate, ...] = ()
    output: str | None = None
    as_command: str = ""
    against: tuple[Problem, ...] = ()
    hf_token_secret: str | None = None

    @property
    def source(self) -> str:
        """Where the weights are, at its commit if it is a repository."""
        return self.conversion.source.root

    @functools.cached_property
    def problems(self) -> tuple[Problem, ...]:
        """All that stands against it; each has `kind`, `subject` and `message`."""
        return reworded((*self.conversion.plan.problems, *self.against))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What should be known of it, once each."""
        return report.warnings_of(self.conversion)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that it makes; each has `key`, `shape`, `dtype`, `logical_axes`, and `lossy`, a reason or None."""
        return self.conversion.plan.arrays

    def maxtext_config(self) -> MaxTextConfig:
        """What MaxText must be told.

        Raises:
          Refused: `config.json` doesn't say it.
        """
        if (found := self.conversion.plan.maxtext) is None:
            raise Refused(
                next(
                    (warning for warning in self.conversion.warnings if isinstance(warning, Untold)),
                    "nothing is known of what MaxText must be told",
                )
            )
        return found

    def check(self) -> None:
        """Raises `Refused` with all problems, if there are any."""
        refuse(self.problems, self.conversion.source)

    def to_dict(self) -> dict[str, Any]:
        simulated = {"workers": [dataclasses.asdict(each) for each in self.estimates]} if self.estimates else {}
        return (
            report.json_report(self.conversion, self.threads, self.output, self.problems)
            | virtual.json_report(self.conversion)
            | simulated
        )

    @property
    def command(self) -> str:
        """The command that carries it out."""
        if self.as_command:
            return self.as_command
        words = [
            "weightbeam convert",
            shlex.quote(self.source),
            shlex.quote(self.output or "OUTPUT"),
            *arguments_of(self.conversion.options),
        ]
        return " ".join(words)

    def verdict(self) -> Iterator[tables.Block]:
        """That it can be carried out, with what it takes, and the command. How long it takes is said where it was
        simulated: on this machine it depends on disks and neighbours that no plan knows.
        """
        conversion = self.conversion
        memory = tables.human(memory_bound(conversion, self.threads, self.output))
        times = (
            f"{tables.duration(each.wall_seconds)} on {tables.count(each.workers, 'worker')}" for each in self.estimates
        )
        parts = (
            f"{tables.human(conversion.made_bytes)} to write",
            f"at most {memory} of memory{' a worker' if self.estimates else ''}",
            " or ".join(times),
            f"MaxText's {conversion.plan.model}" if conversion.plan.model else "",
            *(f"but not for {mesh}, which MaxText will refuse" for mesh in report.refused_meshes(conversion)),
        )
        yield from ("", f"ready: {', '.join(filter(None, parts))}", f"  {self.command}")

    def blocks(self) -> Iterator[tables.Block]:
        if self.arrays:
            yield from report.plan_blocks(self.conversion, self.threads, self.output)
        if self.conversion.placements:
            yield from virtual.placement_blocks(self.conversion)
        if self.estimates:
            yield from report.estimate_blocks(self.estimates)
        if not self.problems:
            yield from self.verdict()

    def whole(self) -> Iterator[tables.Block]:
        yield from self.blocks()
        if self.problems:
            yield from (
                "",
                tables.count(len(self.problems), "problem") + ":",
                *(f"  {problem}" for problem in report.collapse(map(str, self.problems))),
            )

    def brief(self) -> str:
        what = (
            tables.count(len(self.problems), "problem") if self.problems else tables.human(self.conversion.target_bytes)
        )
        return f"{self.source}: {tables.count(len(self.arrays), 'array')}, {what}"


@takes(asked=ConvertOptions, token=Token)
def maxtext_config(source: str, *, asked: ConvertOptions, token: Token) -> MaxTextConfig:
    """What MaxText must be told of a checkpoint, from its `config.json`: a mapping; its text is `maxtext.yml`.

    Args:
      source: a folder, `gs://bucket/folder`, or `hf://organisation/model[@revision]`.

    Returns:
      The keys by their names, in MaxText's order.

    Raises:
      Refused: no such source, no table for it, or `config.json` doesn't say it all.

    Example:
      >>> wb.maxtext_config("models/qwen3")["base_emb_dim"]
      64
    """
    made = _plan(source, asked, Simulation(), token.hf_token_secret, ())
    if made.conversion.plan.family == UNKNOWN:
        made.check()
    return made.maxtext_config()


@takes(asked=ConvertOptions, token=Token, simulation=Simulation)
def plan(source: str, *, asked: ConvertOptions, token: Token, simulation: Simulation, beam: Sequence[str] = ()) -> Plan:
    """Plans a conversion from `config.json` and the headers of the safetensors files alone. Its problems stay in the
    plan.

    Args:
      source: a folder, `gs://bucket/folder`, or `hf://organisation/model[@revision]`.
      beam: Beam's options, as on the command line.

    Returns:
      The plan, with its arrays (shapes in elements, dtypes, chunks), bytes read and written, the bound on memory, what
      is lossy or left out, and all problems.

    Raises:
      Refused: there is nothing to plan: no such source, no such mesh.

    Example:
      >>> plan = wb.plan("models/qwen3", mesh="fsdp=8")
      >>> plan.problems
      ()
      >>> {array.key: array.shape for array in plan.arrays}["params.params.decoder.layers.mlp.wi_0.kernel"]
      (64, 2, 128)
    """
    _check_simulation(simulation)
    made = _plan(source, asked, simulation, token.hf_token_secret, beam)
    _read_small(made, source)  # `convert` may come later: the small files are those of now
    return made


def _read_small(made: Plan, source: str) -> None:
    """Reads the small files of a source that has no problems. Raises Refused where one can't be read."""
    if not made.problems:
        with reading(source):
            _ = made.conversion.small_hashes


def _plan(
    source: str,
    asked: ConvertOptions,
    simulation: Simulation,
    hf_token_secret: str | None,
    beam: Sequence[str],
    output: str | None = None,
) -> Plan:
    """The plan of a conversion into a place that is known or not: its units are cut for the workers that are, unless
    `unit_bytes` is given.
    """
    check_beam(beam)  # not whether its runner can do with them: here they are how `convert` would be called
    workers = simulation.workers
    worker = worker_of(beam, simulation.worker_gbps, simulation.worker_hour_price)
    slots = slots_of(beam, asked.unit_bytes, source, output or "")
    if workers and isinstance(asked.unit_bytes, Unsaid):
        slots = max(workers) * worker.threads
    conversion = plan_source(source, asked, hf_token_secret, slots)
    threads = threads_in(beam)
    estimates: list[Estimate] = []
    if workers and not conversion.plan.problems:
        efforts, files = list(efforts_of(conversion)), len(conversion.source.shards)
        estimates = [estimate(efforts, number, worker, files, is_hub(conversion.source.root)) for number in workers]
    return Plan(conversion, threads, tuple(estimates), output, hf_token_secret=hf_token_secret)


def placed(made: Plan, args: argparse.Namespace, rest: Sequence[str], source: str, command: str = "") -> Plan:
    """A plan with the command that carries it out, and with what stands against the output that the command names.

    Args:
      source: as the command names it.
      command: another one than `args` are of.
    """
    places = source, args.output or "OUTPUT"
    made = dataclasses.replace(made, as_command=command_line(args, rest, command, places))
    if not args.output:
        _read_small(made, source)
        return made
    from weightbeam.pipelines.commands.dry_run import problems_there  # only now: what writes takes a while to import

    how = asked_of(args, Linking if hasattr(args, "link") else Delivery)
    return dataclasses.replace(made, against=tuple(problems_there(made.conversion, args.output, how)))


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the plan, writes it as JSON if asked, and says whether it can be carried out."""
    if args.hosts and not args.load:
        raise Refused("--hosts needs --load: how many hosts read a part each")
    _check_simulation(asked_of(args, Simulation), args.load)
    made = _plan(
        args.source, asked_of(args, ConvertOptions), asked_of(args, Simulation), args.hf_token_secret, rest, args.output
    )
    made = placed(made, args, rest, made.source, "convert")
    loads = _plan_loads(made, args) if args.load else []
    if args.maxtext_config:
        if made.conversion.plan.family == UNKNOWN:
            made.check()
        text = made.maxtext_config().to_yaml()
        if args.maxtext_config == STDOUT or not args.dry_run:
            write_text("--maxtext_config", args.maxtext_config, text)
        if args.maxtext_config == STDOUT:
            made.check()
            return 0
    if not args.load:
        say(args, made)
    else:
        if args.json:
            write_json(
                args.json, made.to_dict() | {"load": [load_report.load_json(load, args.worker_gbps) for load in loads]}
            )
        if args.json != STDOUT and not args.quiet:
            made.show()
            for load in loads:
                tables.show(load_report.load_blocks(made.conversion, load, args.worker_gbps))
    made.check()
    return 0


def _check_simulation(asked: Simulation, load: bool = False) -> None:
    """Raises `Refused` where it is said what workers are, and not how many."""
    default = Simulation()
    if not asked.workers and asked.worker_hour_price != default.worker_hour_price:
        raise Refused("--worker_hour_price needs --workers: how many there are")
    if not asked.workers and not load and asked.worker_gbps != default.worker_gbps:
        raise Refused("--worker_gbps needs --workers or --load: how many workers there are, or that a mesh is loaded")


def _plan_loads(made: Plan, args: argparse.Namespace) -> list[load_report.LoadPlan]:
    """A load onto each mesh; none of a plan with problems. Raises Refused where no mesh is named."""
    if not made.conversion.meshes:
        raise Refused("--load needs --mesh: onto which devices, as in --mesh fsdp=16")
    if made.problems:
        return []
    return [load_report.plan_load(made.conversion, mesh, args.hosts or mesh.devices) for mesh in made.conversion.meshes]
