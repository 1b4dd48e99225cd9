"""`weightbeam merge`: PEFT adapters into a release."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence

from weightbeam.formats.release import edit_config, model_card, role_of, small_files
from weightbeam.formats.release_target import plan_of, release_staging
from weightbeam.formats.storage import StorageError, open_store
from weightbeam.formats.storage.token import name_secret
from weightbeam.formats.strict_json import JsonError
from weightbeam.pipelines.arguments import size
from weightbeam.pipelines.errors import Failed, Refused
from weightbeam.pipelines.export import check_release, refuse
from weightbeam.pipelines.keywords import keywords_of, read_loras
from weightbeam.pipelines.output import alone
from weightbeam.pipelines.prepare import open_adapters, open_source
from weightbeam.pipelines.progress import Report, reporter
from weightbeam.pipelines.tables import count, human
from weightbeam.transforms.merging import Merge, MergeOptions, plan_merge

LOG = logging.getLogger("weightbeam")


@dataclasses.dataclass(frozen=True)
class Merged:
    """What came of a merge.

    Attributes:
      merge: what was planned.
      folder: where the release is.
      seconds: that it took.
      state: `done`, or `nothing to do` where it was finished already.
    """

    merge: Merge
    folder: str
    seconds: float = 0.0
    state: str = "done"

    def __str__(self) -> str:
        if self.state != "done":
            return f"{self.folder} is finished already; nothing to do"
        files, touched = self.merge.files, len(self.merge.merging.touched)
        assert files is not None
        rate = f" ({human(files.size / self.seconds)}/s)" if self.seconds else ""
        what = f"{count(len(files.tensors), 'tensor')} in {count(len(files.files), 'file')}, {human(files.size)}"
        done = "merged"
        if self.merge.options.dequantize:
            done, touched = "dequantised", sum(encoding.label is not None for encoding in self.merge.encodings.values())
        lines = [f"{self.folder}: {what} in {self.seconds:.1f} s{rate}", f"{count(touched, 'tensor')} {done}, the others are the release's own bytes"]
        if self.merge.plan.dropped:
            lines.append(f"{count(len(self.merge.plan.dropped), 'tensor')} left out: codes and scales of weights that are written as their values")
        return "\n".join(lines)


def merge(
    source: str,
    output: str,
    *,
    lora: str | Sequence[str] = (),
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = "128MiB",
    resume: bool = False,
    overwrite: bool = False,
    hf_token_secret: str | None = None,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged:
    """Merges PEFT adapters into a release, which appears in `output` whole, at the end.

    Args:
      source: the release: a folder, `gs://bucket/folder` or `hf://organisation/model[@revision]`.
      output: the folder of the new one; it must not be there yet.
      lora: adapters, `PATH[,weight]` each: a folder, `gs://` or `hf://`.
      max_shard_size: bytes of tensors in a file, such as `5GB`; by default the files stay as they are.
      unit_bytes: bound on the memory of a unit of work.
      resume: go on with a stopped merge.
      overwrite: replace a release, or throw a stopped merge away.
      hf_token_secret: the name of a secret with the hub's token.
      beam: Beam's options.
      progress: whether to show it, or what is told of it.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.
    """
    if beam:
        from weightbeam.pipelines.options import check_options  # imports Beam

        check_options(beam, "merge", {"source": source, "output": output})
    if not output:
        raise Refused("--output is missing: the folder that the release should lie in")
    name_secret(hf_token_secret)
    return carry_out(plan(source, lora=lora, max_shard_size=max_shard_size, unit_bytes=unit_bytes), output, resume, overwrite, beam, progress)


def plan(source: str, *, lora: str | Sequence[str] = (), max_shard_size: int | str | None = None, unit_bytes: int | str = "128MiB") -> Merge:
    """Plans a merge; problems stay in the plan. See `merge`.

    Raises:
      Refused: there is nothing to plan.
    """
    if not source:
        raise Refused("--source is missing: the release that the adapters are merged into")
    try:
        bounds = [None if value is None else size(str(value)) for value in (max_shard_size, unit_bytes)]
    except argparse.ArgumentTypeError as e:
        raise Refused(str(e)) from e
    options = MergeOptions(read_loras(lora) or (), bounds[0], bounds[1] or MergeOptions.unit_bytes)
    checkpoint = open_source(source)
    planned = plan_merge(options, checkpoint, open_adapters(options))
    if planned.plan.problems:
        return planned
    try:
        return dataclasses.replace(planned, small=make_small(planned, small_files(open_store(checkpoint.root))))
    except StorageError as e:
        raise Refused(str(e)) from e


def make_small(planned: Merge, small: Mapping[str, bytes]) -> dict[str, bytes]:
    """The small files of the release that is written: the release's own, `config.json` edited, and a new card."""
    text = small["config.json"].decode() if "config.json" in small else json.dumps(planned.checkpoint.config, indent=2)
    gone = planned.quantization == {}
    try:
        edited, edits = edit_config(text, drop_quantization=gone, quantization=planned.quantization or None)
    except (JsonError, UnicodeDecodeError) as e:
        raise Refused(f"config.json: {e}") from e
    made = {"config.json": edited.encode() if planned.quantization is not None else text.encode()}
    for name in small:
        if role_of(name) not in ("config", "card", *(("quantisation",) if gone else ())):
            made[name] = small[name]
    facts = {"base": planned.checkpoint.root}
    facts |= {f"adapter {number}": f"{adapter.root}, weight {adapter.weight:g}" for number, adapter in enumerate(planned.adapters, 1)}
    root = planned.checkpoint.root
    base = root.removeprefix("hf://").partition("@")[0] if root.startswith("hf://") else None
    card = small["README.md"].decode(errors="replace") if "README.md" in small else None
    edits = edits if planned.quantization is not None else []
    made["README.md"] = model_card((base or root).rpartition("/")[2], facts, edits, base_model=base, card=card).encode()
    return made


def carry_out(planned: Merge, output: str, resume: bool, overwrite: bool, beam: Sequence[str], progress: bool | Report) -> Merged:
    """Carries a planned merge out, or refuses to; see `merge`."""
    try:
        staging = release_staging(output, planned.hash)
    except StorageError as e:
        raise Refused(f"--output={e}") from e
    inputs = (planned.checkpoint.root, *(adapter.root for adapter in planned.adapters))
    refuse(planned, [*planned.plan.problems, *check_release(staging, planned, inputs, resume, overwrite)])
    refuse(planned, planned.unreadable())
    if resume and not staging.exists() and plan_of(staging.final) == planned.hash:
        return Merged(planned, str(staging.final), state="nothing to do")
    for warning in planned.warnings:
        LOG.warning(warning)
    start = time.monotonic()
    with alone(staging):
        refuse(planned, check_release(staging, planned, inputs, resume, overwrite))  # again: now nobody else changes it
        from weightbeam.pipelines.execution import run_units  # only now: it imports Beam

        run_units(planned, staging, beam, {"source": planned.checkpoint.root, "output": output}, resume, overwrite, report=reporter(progress))
    if plan_of(staging.final) != planned.hash:
        raise Failed(f"  the pipeline ended, but {staging.final} isn't its result")
    return Merged(planned, str(staging.final), time.monotonic() - start)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Merges, and says what came of it."""
    if args.dry_run:
        name_secret(args.hf_token_secret)
        planned = plan(**keywords_of(args, plan))
        problems = list(planned.plan.problems)
        if args.output and not problems:
            inputs = (planned.checkpoint.root, *(adapter.root for adapter in planned.adapters))
            problems = check_release(release_staging(args.output, planned.hash), planned, inputs, args.resume, args.overwrite)
        refuse(planned, problems)
        print(f"ready: {planned.checkpoint.root} and {len(planned.adapters)} adapters can be merged")
        return 0
    print(merge(**keywords_of(args, merge), beam=rest))
    return 0


if __name__ == "__main__":
    from weightbeam.pipelines.cli import main

    sys.exit(main(["merge", *sys.argv[1:]]))
