"""Every command: what it is called with, and the options that it takes, in the order of its help page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from weightbeam.pipelines.terminal.arguments import texts
from weightbeam.transforms.planning.options import (
    GROUPS,
    OUTPUT,
    PATHS_HELP,
    SOURCE_HELP,
    TRUTH,
    ConvertOptions,
    CutOptions,
    Delivery,
    DequantizeOptions,
    DiffOptions,
    ExportOptions,
    FromHub,
    InspectOptions,
    Linking,
    LogitsOptions,
    MaterializeOptions,
    MergeOptions,
    Option,
    QuantizeOptions,
    ReshardOptions,
    Simulation,
    ToHub,
    Token,
    VerifyOptions,
    named,
    option,
    options_of,
)
from weightbeam.transforms.planning.values import port, positive, seconds


@dataclasses.dataclass(frozen=True)
class PlanShell:
    """Of a plan, at the shell only: a function returns it as a value."""

    maxtext_config: str | None = option("write maxtext.yml; - is standard output, and nothing else is printed")
    resume: bool = option("plan as for convert --resume", False)
    overwrite: bool = option("plan as for convert --overwrite", False)
    load: bool = option("say how weightbeam.load would read it onto each --mesh", False, **TRUTH)
    hosts: int | None = option(
        "hosts that share the devices of a mesh, for --load; one for each device unless said",
        read=positive,
        metavar="N",
    )


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What `weightbeam watch` makes of a run's steps, where options say it and no file."""

    kind: str | None = option(
        "of --run: a release (the default), one in FP8, or the parameters as an Orbax checkpoint",
        choices=("export", "quantize", "reshard"),
    )
    lora: str | None = option(
        "of --run: whether a LoRA run's steps become adapters for PEFT (the default), or --like with them in it",
        choices=("adapter", "merged"),
        several=False,
        metavar=None,
    )
    on_nan: str | None = option(
        "of --run: a step with NaN or infinities: hold: isn't published; publish: is, but not as the newest (the default); newest: is, like any other",
        choices=("hold", "publish", "newest"),
    )
    save_dtype: str | None = option("of --run: as for export or reshard", metavar="DTYPE")
    maxtext_model: str | None = option(
        "of --run: the MaxText model, where neither the checkpoints nor config.json settle it"
    )
    full_paths: bool | None = option(f"of --run: {PATHS_HELP}")


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """What a configuration doesn't say."""

    config: str | None = option("what to watch: a file, or gs://bucket/file", metavar="FILE")
    run: str | None = option(
        "without a file: the checkpoints of a training run, whose steps are exported as they are committed",
        metavar="URL",
    )
    like: str | None = option(
        "of --run: the release that gives config, tokenizer, names and dtypes, a folder, gs:// or hf://; or maxtext.yml"
    )
    output: str | None = option(
        "of --run: where the steps go: a folder, gs://bucket/folder, or hf://owner/name with a branch for each"
    )
    every: int | None = option("of --run: take the multiples of this step only", read=positive, metavar="N")


@dataclasses.dataclass(frozen=True)
class WatchShell:
    """How a watcher looks."""

    once: bool = option("look once, do what there is to do, and end", False, **TRUTH)
    interval: float = option("how often to look", "15m", read=seconds, metavar="TIME")
    retry: str | None = option(
        "have the next look begin anew what was refused, held or failed of this model or run, and end", metavar="NAME"
    )
    serve: int | None = option(
        "take the hub's webhooks too; their secret is in WEIGHTBEAM_WEBHOOK_SECRET", read=port, metavar="PORT"
    )


@dataclasses.dataclass(frozen=True)
class DraftShell:
    """What a table is drafted from."""

    like: str | None = option("the release whose config.json and headers are read: a folder, gs:// or hf://", metavar="RELEASE")


_SEEN: dict[str, Any] = dict(group="what you see")
DRY_RUN = Option("dry_run", "say what would be done, and every problem; write nothing", False, **TRUTH, **_SEEN)
JSON = Option(
    "json", "write the result as JSON too; - is standard output, with nothing else on it", metavar="FILE", **_SEEN
)
PROGRESS = Option(
    "progress", "a bar, lines, or JSON lines on standard error (auto: a bar on a terminal, else lines)", "auto",
    choices=("auto", "bar", "lines", "json", "none"), **_SEEN,
)  # fmt: skip
QUIET = Option("quiet", "nothing but warnings, errors and --json -", False, short="-q", **TRUTH, **_SEEN)
VERBOSE = Option("verbose", "more, such as what a refused checkpoint holds", False, short="-v", **TRUTH, **_SEEN)
AT_WORK = "more: where the work is staged, each unit of it that is done, what a refused checkpoint holds"
LOG_FILE = Option("log_file", "add all messages to this file too", metavar="FILE", **_SEEN)
SHELL = frozenset(each.name for each in (DRY_RUN, JSON, PROGRESS, QUIET, VERBOSE, LOG_FILE))


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `weightbeam`.

    Attributes:
      name: as it is typed.
      help: what it does, in a line.
      about: the text of its help page.
      usage: what follows its name.
      places: the options that words without an option stand for, in order: what each means.
      words: of those that have no option: argparse's own positionals.
      options: the classes of its function's keywords.
      shell: the classes of what is said at the shell only.
      module: that has its `run`; by default the one of its name in `pipelines/commands/`.
      json, progress, verbose: whether it has a result to write, and a way to it to show, and more to say of it.
      beam: whether it takes Beam's options beside its own.
    """

    name: str
    help: str
    about: str
    usage: str = "[options]"
    places: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    options: tuple[type, ...] = ()
    shell: tuple[type, ...] = ()
    words: bool = False
    module: str = ""
    json: bool = True
    progress: bool = False
    verbose: bool = True
    beam: bool = True

    @property
    def home(self) -> str:
        """The module that has its `run`."""
        return self.module or f"weightbeam.pipelines.commands.{self.name}"

    def all_options(self) -> list[Option]:
        """What its help page shows, in order: where it reads, what it is told, where it writes, what a person sees."""
        places = [each for name, each in self.places.items() if name != OUTPUT]
        to = [each for name, each in self.places.items() if name == OUTPUT]
        told = [*to, *(each for kind in (*self.options, *self.shell) for each in options_of(kind))]
        told.sort(key=lambda each: GROUPS.index(each.group))
        verbose = dataclasses.replace(VERBOSE, help=AT_WORK) if self.progress and OUTPUT in self.places else VERBOSE
        seen = [
            DRY_RUN,
            *([JSON] if self.json else ()),
            *([PROGRESS] if self.progress else ()),
            QUIET,
            *([verbose] if self.verbose else ()),
            LOG_FILE,
        ]
        return [*places, *told, *seen]


def _place(name: str, help: str, group: str = "") -> dict[str, Option]:
    return {name: named(name, help, group=group)}


def _to(help: str) -> dict[str, Option]:
    """Where a command writes."""
    return _place(OUTPUT, help, OUTPUT)


_FOLDER = "a folder or gs://bucket/folder"
_RELEASE = f"{_FOLDER} for the release, which must not be there yet; or hf://owner/name: one commit there"
_ANEW = f"{_FOLDER} for the new one; it must not hold that step yet"
_ORBAX = "the Orbax checkpoint: its root, a step or an item, in a folder or in gs://"
_ANY = "the release: a folder, gs://bucket/folder, or hf://organisation/model[@revision]"

COMMANDS = {
    command.name: command
    for command in (
        Command(
            "convert", "convert a release into an Orbax checkpoint", texts.CONVERT, "SOURCE OUTPUT [options]",
            _place("source", SOURCE_HELP, "what is read") | _to(f"where the checkpoint goes: {_FOLDER}; it must not hold that step yet"),
            (ConvertOptions, Linking), progress=True,
        ),
        Command(
            "plan", "say what a conversion would do, and every problem", texts.PLAN,
            "SOURCE [OUTPUT] [options]\n       weightbeam plan COMMAND … [options]",
            _place("source", SOURCE_HELP, "what is read") | _to("where the checkpoint would go"),
            (ConvertOptions, Token, Simulation), (PlanShell,),
        ),
        Command(
            "fit", "compare a release with a MaxText configuration, field by field", texts.FIT, "SOURCE MODEL [options]",
            _place("source", "where config.json is: a folder, gs://bucket/folder, or hf://organisation/model[@revision]")
            | {"maxtext_model": named("maxtext_model", "the name of a MaxText model, or a .yml that says its keys", metavar="NAME|FILE")},
            verbose=False, beam=False,
        ),
        Command(
            "verify", "compare a checkpoint with its source, element by element", texts.VERIFY, "[SOURCE] CHECKPOINT [options]",
            _place("source", "where config.json and the safetensors files are: a folder, gs:// or hf://") | _place("checkpoint", _ORBAX),
            (VerifyOptions,), progress=True,
        ),
        Command(
            "export", "write a checkpoint as a Hugging Face release", texts.EXPORT, "CHECKPOINT OUTPUT [options]",
            _place("source", _ORBAX) | _to(_RELEASE), (ExportOptions, ToHub), progress=True,
        ),
        Command(
            "reshard", "write a checkpoint anew, for another mesh or layout", texts.RESHARD, "CHECKPOINT OUTPUT [options]",
            _place("source", _ORBAX.replace("checkpoint:", "checkpoint, anyone's:"), "what is written") | _to(_ANEW),
            (ReshardOptions, FromHub), progress=True,
        ),
        Command(
            "cut", "write some layers, experts and rows of a release", texts.CUT, "SOURCE OUTPUT --layers A:B [options]",
            _place("source", _ANY) | _to(_RELEASE), (CutOptions, ToHub), progress=True,
        ),
        Command(
            "dequantize", "write a quantised release as an ordinary one", texts.DEQUANTIZE, "SOURCE OUTPUT [options]",
            _place("source", _ANY) | _to(_RELEASE), (DequantizeOptions, ToHub), progress=True,
        ),
        Command(
            "quantize", "write a release in FP8", texts.QUANTIZE, "SOURCE OUTPUT [options]",
            _place("source", f"{_ANY}; or an Orbax checkpoint") | _to(_RELEASE), (QuantizeOptions, ToHub), progress=True,
        ),
        Command(
            "merge", "merge PEFT adapters into a release", texts.MERGE, "SOURCE OUTPUT --lora PATH [options]",
            _place("source", _ANY) | _to(_RELEASE), (MergeOptions, ToHub), progress=True,
        ),
        Command(
            "materialize", "make an ordinary checkpoint of a virtual one", texts.MATERIALIZE, "CHECKPOINT OUTPUT [options]",
            _place("checkpoint", f"the virtual checkpoint{_ORBAX.removeprefix('the Orbax checkpoint')}") | _to(_ANEW),
            (MaterializeOptions, Delivery), progress=True,
        ),
        Command(
            "diff", "compare any two checkpoints, tensor by tensor", texts.DIFF, "A B [options]",
            {"a": Option("a", "a release or an Orbax checkpoint: a folder, gs:// or (releases) hf://", metavar="A"), "b": Option("b", "another", metavar="B")},
            (DiffOptions,), words=True, progress=True, beam=False,
        ),
        Command(
            "logits", "run a model on the CPU, a layer at a time, and compare its logits with another's or MaxText's", texts.LOGITS, "RELEASE [OTHER] [options]",
            _place("source", _ANY) | _place("other", "what is compared with it: a release, an Orbax checkpoint of the model, or a PEFT adapter for it"),
            (LogitsOptions,), progress=True, beam=False,
        ),
        Command(
            "inspect", "show what a checkpoint holds", texts.INSPECT, "CHECKPOINT [options]",
            _place("checkpoint", "an Orbax checkpoint or safetensors files, in a folder, gs:// or (safetensors) hf://"), (InspectOptions,), beam=False,
        ),
        Command(
            "watch", "convert the hub's releases, or export a run's steps, as they come", texts.WATCH,
            shell=(WatchOptions, RunOptions, WatchShell), progress=True, module="weightbeam.pipelines.watching.watch",
        ),
        Command(
            "new-family", "draft the table of a family, and the test beside it", texts.NEW_FAMILY, "NAME --like RELEASE",
            _place("name", "of the family, and of the files that are written into this folder"), shell=(DraftShell,),
            module="weightbeam.pipelines.commands.new_family", verbose=False, beam=False,
        ),
        Command("models", "list the families that can be converted", texts.MODELS, verbose=False, beam=False),
        Command(
            "help", "print a page of the manual, or what a command takes", texts.HELP, "[TOPIC]",
            {"topic": Option("topic", "a page or a command; without one, the list of pages", metavar="TOPIC")}, json=False, verbose=False, beam=False,
        ),
        Command(
            "completion", "print a script that completes commands and options", texts.COMPLETION, "bash|zsh|fish|tcsh|powershell",
            {"shell": Option("shell", "bash, zsh, fish, tcsh or powershell", metavar="SHELL")}, json=False, verbose=False, beam=False,
        ),
    )
}  # fmt: skip
