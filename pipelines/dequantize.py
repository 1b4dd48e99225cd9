"""`weightbeam dequantize`: a quantised release as an ordinary one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from weightbeam.formats.storage.token import name_secret
from weightbeam.pipelines.arguments.options import UNIT_BYTES
from weightbeam.pipelines.arguments.values import dtype_name
from weightbeam.pipelines.errors import Refused
from weightbeam.pipelines.keywords import keywords_of
from weightbeam.pipelines.merge import Merged, plan_with, say_ready
from weightbeam.pipelines.progress import Report
from weightbeam.pipelines.releases import asked_paths, carry_out, check_places, read_sizes, slots_for
from weightbeam.pipelines.shell import say
from weightbeam.transforms.exporting import DTYPES
from weightbeam.transforms.merging import Merge, MergeOptions


def dequantize(
    source: str,
    output: str,
    *,
    save_dtype: str | None = None,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = UNIT_BYTES,
    resume: bool = False,
    overwrite: bool = False,
    create_pr: bool = False,
    full_paths: bool | None = None,
    hf_token_secret: str | None = None,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged:
    """Writes a quantised release with the values of its weights, computed in float32 and cast once; all else is its own
    bytes.

    Args:
      save_dtype: of the values: `bfloat16`, `float16` or `float32`; None for what `config.json` says.
      source, output, max_shard_size, unit_bytes, resume, overwrite, create_pr, full_paths, hf_token_secret, beam,
        progress: as for `merge`.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.
    """
    check_places("dequantize", source, output, beam)
    name_secret(hf_token_secret)
    slots = slots_for(unit_bytes, beam, source, output, resume)
    planned = plan(
        source, save_dtype=save_dtype, max_shard_size=max_shard_size, unit_bytes=unit_bytes, output=output, full_paths=full_paths, slots=slots,
    )  # fmt: skip
    return Merged(planned, carry_out(planned, output, resume, overwrite, beam, progress, create_pr))


def plan(
    source: str,
    *,
    save_dtype: str | None = None,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = UNIT_BYTES,
    output: str | None = None,
    full_paths: bool | None = None,
    slots: int | None = None,
) -> Merge:
    """Plans a dequantisation; problems stay in the plan. See `dequantize`; `slots` as `plan_merge` has it.

    Raises:
      Refused: there is nothing to plan.
    """
    if save_dtype is not None and (save_dtype := dtype_name(save_dtype)) not in DTYPES:
        raise Refused(f"--save_dtype={save_dtype} should be {', '.join(DTYPES)}")
    return plan_with(
        source,
        MergeOptions(
            (),
            **read_sizes(max_shard_size, unit_bytes),
            dequantize=True,
            save_dtype=save_dtype,
            full_paths=asked_paths(output, full_paths),
        ),
        output=output,
        slots=slots,
    )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Dequantises, and says what came of it; with `--dry_run` whether it could."""
    if args.dry_run:
        name_secret(args.hf_token_secret)
        slots = slots_for(args.unit_bytes, rest, args.source, args.output, args.resume)
        return say_ready(plan(**keywords_of(args, plan), slots=slots), args, rest)
    say(args, dequantize(**keywords_of(args, dequantize), beam=rest))
    return 0
