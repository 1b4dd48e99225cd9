"""`weightbeam convert`: from a release to a published checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.record.extremes import NOT_FINITE
from weightbeam.formats.record.naming import is_name
from weightbeam.formats.staging import ITEMS
from weightbeam.formats.storage import ChangedError
from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.family import Beyond
from weightbeam.pipelines.commands.plan import Plan, placed
from weightbeam.pipelines.running.carry import carry
from weightbeam.pipelines.running.slots import slots_of, slots_of_checkpoint
from weightbeam.pipelines.running.sources import check_beam, check_places, plan_source
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.running.without_beam import threads_in
from weightbeam.pipelines.running.writing import Made
from weightbeam.pipelines.terminal import report
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import asked_of, keywords_of, spell_lora, takes
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.tables import count, human, pace
from weightbeam.transforms.comparing import odd_values
from weightbeam.transforms.cutting.virtual import REST_IS_WRITTEN
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.options import ConvertOptions, Delivery, Linking, options_of

DELIVERY = Delivery()
# src/maxtext/trainers/post_train/sft/train_sft.py against pre_train/train.py, 0.2.5, as run
SFT_ONLY = "            only MaxText's SFT applies an adapter; pre_train ignores lora.* without a word"


@dataclasses.dataclass(frozen=True, repr=False)
class Converted(Made):
    """What came of a conversion.

    Attributes:
      link: how the source's files got into a virtual checkpoint.
    """

    planned: Conversion
    link: str

    @property
    def path(self) -> str:
        """Where the checkpoint is: MaxText's `load_parameters_path`."""
        return f"{self.written.folder}/{ITEMS}"

    @property
    def odd_values(self) -> Mapping[str, Any]:
        """What its record says of NaN, infinities and matrices of zeros (`transforms/comparing/odd_values.py`)."""
        record = self.written.record
        return {field: record[field] for field in (NOT_FINITE, odd_values.ZERO) if field in record}

    @property
    def stated(self) -> list[str]:
        """The source's files whose hash is known, and wasn't compared with what was read."""
        return [shard["name"] for shard in self.written.record.get("shards", ()) if shard.get("hash") == "stated"]

    @property
    def warnings(self) -> list[str]:
        """What is strange about the values that were converted, and yet is as the release has it."""
        return [printable(line) for line in odd_values.describe(self.odd_values)]

    def blocks(self) -> list[str]:
        if self.written.instead:
            return [self.written.instead]
        conversion, step = self.planned, self.written.folder
        lines = [
            f"{self.path}: {count(len(conversion.plan.arrays), 'array')}, {pace(conversion.target_bytes, self.written.nbytes, self.seconds)}"
        ]
        if conversion.virtual_bytes:
            lines.append(
                f"{human(conversion.virtual_bytes)} of it are the source's own files ({self.link}); `weightbeam help virtual` says what that means"
            )
        if rounded := Counter(conversion.plan.lossy.values()):
            lines += [f"{count(times, 'array')} rounded: {reason}" for reason, times in rounded.items()]
        # a vocabulary that is cut was a warning
        if left_out := [why for why in conversion.plan.dropped.values() if not isinstance(why, Beyond)]:
            lines.append(f"{count(len(left_out), 'tensor')} left out on purpose; weightbeam plan says which and why")
        if self.stated:
            lines.append(
                f"the hashes of {count(len(self.stated), 'file')} of the source are as the "
                f"{'bucket' if conversion.source.root.startswith('gs://') else 'hub'} states them, and weren't compared; "
                "--check_source true reads and compares"
            )
        has_file = conversion.plan.maxtext is not None and not conversion.options.adapter_only
        if not self.maxtext:
            lines.append(f"load it:    weightbeam.load({step!r}, like=…); weightbeam help jax")
        else:
            lines += report.maxtext_lines(self.maxtext, step, has_file)
        lines += [SFT_ONLY] if conversion.options.adapter_only else []
        if conversion.plan.note:
            lines.append(f"            {conversion.plan.note}")
        check = ["weightbeam", "verify", step]
        record = self.written.record
        if any(is_name(each.get("source")) for each in [record, *record.get("adapters", ())]):  # it doesn't lead there
            check = ["weightbeam", "verify", conversion.source.root, step]
            for adapter in conversion.adapters:
                check += ["--lora", spell_lora(adapter.root, adapter.weight)]
        lines.append(f"check it:   {shlex.join(check)}")
        return lines

    @property
    def maxtext(self) -> dict[str, str]:
        """What MaxText must be told to load it: `load_parameters_path`, `scan_layers`, `model_name`, and what isn't
        MaxText's default; nothing where the arrays are the release's own.
        """
        if report.is_as_released(self.planned.plan):
            return {}
        return report.maxtext_flags(self.planned, self.path)

    def to_dict(self) -> dict[str, Any]:
        plan = self.planned.plan
        return {
            "path": self.path,
            "state": self.state,
            "source": self.planned.source.root,
            "arrays": len(plan.arrays),
            "bytes": {
                "target": self.planned.target_bytes,
                "written": self.written.nbytes,
                "virtual": self.planned.virtual_bytes,
            },
            "seconds": self.seconds,
            "maxtext": self.maxtext,
            "rounded": plan.lossy,
            "left_out": dict(plan.dropped),
            "stated": self.stated,
            "warnings": [*report.warnings_of(self.planned), *self.warnings],
            **self.odd_values,
        }


@takes(asked=ConvertOptions, how=Linking)
def convert(
    source: str | Plan,
    output: str,
    *,
    asked: ConvertOptions,
    how: Linking,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
) -> Converted:
    """Converts a release into an Orbax checkpoint at `output/step`, which appears there whole, at the end.

    Args:
      source: a folder, `gs://bucket/folder`, `hf://organisation/model[@revision]`, or what `plan` made of one, beside
        which there are no options: it was made with its own.
      output: a folder or `gs://bucket/folder`; it must not hold that step yet.
      beam: Beam's options, as on the command line, such as `["--runner=DataflowRunner", …]`.
      progress: shown on standard error, told to a callback, or False for neither.

    Returns:
      Where the checkpoint is, what it took in seconds and bytes, what is strange about its values, and what MaxText must be
      told.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> made = wb.convert("models/qwen3", "made", mesh="fsdp=8", progress=False)
      >>> made.path.endswith("made/0/items"), made.maxtext["scan_layers"]
      (True, 'true')
    """
    named = source.source if isinstance(source, Plan) else source
    check_places(beam, "convert", source=named, output=output)
    check_linking(source.conversion.options if isinstance(source, Plan) else asked, how)
    if isinstance(source, Plan):
        if given := [each.name for each in options_of(ConvertOptions) if getattr(asked, each.name) != each.default]:
            raise TypeError(f"a plan has its options already: {', '.join(given)}")
        use_secret(how.hf_token_secret or source.hf_token_secret)
        conversion = source.conversion
        _check_planned(conversion)
    else:
        conversion = plan_into(source, output, asked, how, beam)
    return carry_out(conversion, output, how, beam, progress)


def plan_into(source: str, output: str, asked: ConvertOptions, how: Linking, beam: Sequence[str]) -> Conversion:
    """Plans a conversion whose units are cut as `running/slots.py` says; problems stay in the plan. The output may be empty."""
    slots = slots_of(beam, asked.unit_bytes, source, output)
    slots = slots_of_checkpoint(output, asked.step, slots) if how.resume else slots
    return plan_source(source, asked, how.hf_token_secret, slots)


def carry_out(
    conversion: Conversion,
    output: str,
    how: Delivery = DELIVERY,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
) -> Converted:
    """Carries a planned conversion out, or refuses to; see `convert`."""
    written = carry(conversion, output, how, beam, progress, _warnings(conversion))
    return Converted(conversion, written, f"--link {how.link}" if written.in_folder else "copied into the bucket")


def check_linking(asked: ConvertOptions, how: Linking) -> None:
    """Refuses what is said of the source's files where nothing refers to them.

    Raises:
      Refused: something is.
    """
    if asked.virtual:
        return
    if vain := [f"--{name}" for name in ("link", "sha256") if getattr(how, name) != getattr(DELIVERY, name)]:
        raise Refused(f"{', '.join(vain)}: only a virtual checkpoint (--virtual) refers to the source's files")


def _check_planned(conversion: Conversion) -> None:
    """Makes sure that a source is what a plan was made of, which may be long ago. Raises Refused where it isn't, and
    only another plan helps.
    """
    try:
        conversion.check()
    except OSError as e:
        what = e.what if isinstance(e, ChangedError) else str(e)
        raise Refused(f"  {what}; plan it anew") from e


def _warnings(conversion: Conversion) -> Iterator[str]:
    """What should be known before; where a plan would say more, that it does."""
    for warning in report.warnings_of(conversion):
        yield f"{warning}; weightbeam plan --virtual says why" if warning.endswith(REST_IS_WRITTEN) else warning


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Converts, and says what came of it."""
    if args.dry_run:
        check_beam(rest, "convert", {"source": args.source, "output": args.output})
        asked, how = asked_of(args, ConvertOptions), asked_of(args, Linking)
        check_linking(asked, how)
        conversion = plan_into(args.source, args.output or "", asked, how, rest)
        return dry_run(args, conversion, rest, conversion.source.root)
    say(args, convert(**keywords_of(args, convert), beam=rest))
    return 0


def dry_run(args: argparse.Namespace, conversion: Conversion, rest: Sequence[str], source: str) -> int:
    """Shows what a command would do with its source, and everything that stands against it, its output among it."""
    made = placed(Plan(conversion, threads_in(rest), output=args.output), args, rest, source)
    say(args, made)
    made.check()
    return 0
