"""`weightbeam dequantize`: a quantised release as an ordinary one."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from weightbeam.formats.release import small_files
from weightbeam.formats.storage import StorageError, open_store
from weightbeam.formats.storage.token import name_secret
from weightbeam.pipelines.arguments import size
from weightbeam.pipelines.errors import Refused
from weightbeam.pipelines.export import refuse
from weightbeam.pipelines.keywords import keywords_of
from weightbeam.pipelines.merge import Merged, carry_out, make_small
from weightbeam.pipelines.prepare import open_source
from weightbeam.pipelines.progress import Report
from weightbeam.pipelines.tables import count, human
from weightbeam.transforms.exporting import DTYPES
from weightbeam.transforms.merging import Merge, MergeOptions, plan_merge


def dequantize(
    source: str,
    output: str,
    *,
    save_dtype: str | None = None,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = "128MiB",
    resume: bool = False,
    overwrite: bool = False,
    hf_token_secret: str | None = None,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged:
    """Writes a quantised release with the values of its weights, computed in float32 and cast once; all else is its own bytes.

    Args:
      source: the release: a folder, `gs://bucket/folder` or `hf://organisation/model[@revision]`.
      output: the folder of the new one; it must not be there yet.
      save_dtype: of the values: `bfloat16`, `float16` or `float32`; None for what `config.json` says.
      max_shard_size: bytes of tensors in a file, such as `5GB`; by default the files hold what they held.
      unit_bytes, resume, overwrite, hf_token_secret, beam, progress: as for `merge`.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.
    """
    if beam:
        from weightbeam.pipelines.options import check_options  # imports Beam

        check_options(beam, "dequantize", {"source": source, "output": output})
    if not output:
        raise Refused("--output is missing: the folder that the release should lie in")
    name_secret(hf_token_secret)
    planned = plan(source, save_dtype=save_dtype, max_shard_size=max_shard_size, unit_bytes=unit_bytes)
    return carry_out(planned, output, resume, overwrite, beam, progress)


def plan(source: str, *, save_dtype: str | None = None, max_shard_size: int | str | None = None, unit_bytes: int | str = "128MiB") -> Merge:
    """Plans a dequantisation; problems stay in the plan. See `dequantize`.

    Raises:
      Refused: there is nothing to plan.
    """
    if not source:
        raise Refused("--source is missing: the quantised release")
    if save_dtype is not None and save_dtype not in DTYPES:
        raise Refused(f"--save_dtype={save_dtype} should be {', '.join(DTYPES)}")
    try:
        bounds = [None if value is None else size(str(value)) for value in (max_shard_size, unit_bytes)]
    except argparse.ArgumentTypeError as e:
        raise Refused(str(e)) from e
    options = MergeOptions((), bounds[0], bounds[1] or MergeOptions.unit_bytes, dequantize=True, save_dtype=save_dtype)
    checkpoint = open_source(source)
    planned = plan_merge(options, checkpoint, ())
    if planned.plan.problems:
        return planned
    try:
        return dataclasses.replace(planned, small=make_small(planned, small_files(open_store(checkpoint.root))))
    except StorageError as e:
        raise Refused(str(e)) from e


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Dequantises, and says what came of it; with `--dry_run` whether it could."""
    if args.dry_run:
        planned = plan(**keywords_of(args, plan))
        refuse(planned, planned.plan.problems)
        weights = sum(encoding.label is not None for encoding in planned.encodings.values())
        print(f"ready: {count(weights, 'tensor')} of {planned.checkpoint.root} can be dequantised, {human(planned.target_bytes)} will be written")
        return 0
    print(dequantize(**keywords_of(args, dequantize), beam=rest))
    return 0


if __name__ == "__main__":
    from weightbeam.pipelines.cli import main

    sys.exit(main(["dequantize", *sys.argv[1:]]))
