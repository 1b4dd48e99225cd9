"""`weightbeam quantize`: a release in FP8, from an ordinary one or straight from an Orbax checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from weightbeam.formats.safetensors import is_release
from weightbeam.formats.storage import open_store, reason
from weightbeam.formats.storage.token import name_secret
from weightbeam.pipelines import export, merge
from weightbeam.pipelines.arguments.options import UNIT_BYTES
from weightbeam.pipelines.errors import Refused
from weightbeam.pipelines.export import Exported
from weightbeam.pipelines.keywords import keywords_of, read_loras
from weightbeam.pipelines.merge import Merged
from weightbeam.pipelines.progress import Report
from weightbeam.pipelines.releases import asked_paths, carry_out, check_places, no_source, read_sizes, slots_for
from weightbeam.pipelines.shell import say
from weightbeam.transforms.exporting import Export
from weightbeam.transforms.merging import Merge, MergeOptions
from weightbeam.transforms.quantizing import FORMATS


def quantize(
    source: str,
    output: str,
    *,
    format: str = "fp8",
    like: str | None = None,
    maxtext_model: str | None = None,
    param_scan_axis: int | None = None,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = UNIT_BYTES,
    step: int | None = None,
    lora: str | Sequence[str] = (),
    multimodal: bool | None = None,
    mtp: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    create_pr: bool = False,
    full_paths: bool | None = None,
    hf_token_secret: str | None = None,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged | Exported:
    """Writes a release whose linear layers are FP8 in blocks of 128 × 128, as DeepSeek's are: for vLLM, SGLang and
    transformers.

    Args:
      source: a release, or an Orbax checkpoint, which is exported in the same pass.
      output: the folder of the new release, or one in `gs://`, which must not be there yet; or `hf://owner/name`, where
        it becomes one commit.
      format: `fp8`.
      like: a release in FP8 whose choice of weights is taken, and the scales of blocks that are still what they were;
        of an Orbax checkpoint also what `like` is for `export`.
      maxtext_model, param_scan_axis, step: of an Orbax checkpoint, as for `export`.
      lora: PEFT adapters to merge on the way, `PATH[,weight]` each.
      max_shard_size, unit_bytes, resume, overwrite, create_pr, full_paths, hf_token_secret, beam, progress: as for
        `export`.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.
    """
    check_places("quantize", source, output, beam)
    name_secret(hf_token_secret)
    planned = plan(
        source, format=format, like=like, maxtext_model=maxtext_model, param_scan_axis=param_scan_axis, max_shard_size=max_shard_size, unit_bytes=unit_bytes,
        step=step, lora=lora, multimodal=multimodal, mtp=mtp, output=output, full_paths=full_paths,
        slots=slots_for(unit_bytes, beam, source, output, resume),
    )  # fmt: skip
    written = carry_out(planned, output, resume, overwrite, beam, progress, create_pr)
    return Exported(planned, written) if isinstance(planned, Export) else Merged(planned, written)


def plan(
    source: str,
    *,
    format: str = "fp8",
    like: str | None = None,
    maxtext_model: str | None = None,
    param_scan_axis: int | None = None,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = UNIT_BYTES,
    step: int | None = None,
    lora: str | Sequence[str] = (),
    multimodal: bool | None = None,
    mtp: bool = False,
    output: str | None = None,
    full_paths: bool | None = None,
    slots: int | None = None,
) -> Merge | Export:
    """Plans a quantisation; problems stay in the plan. See `quantize`; `slots` as `plan_merge` has it.

    Raises:
      Refused: there is nothing to plan.
    """
    if format not in FORMATS:
        raise Refused(f"--format={format} should be {' or '.join(FORMATS)}")
    if not source:
        raise Refused(no_source("quantize"))
    try:
        released = is_release(open_store(source))
    except OSError as e:
        raise Refused(reason(e)) from e
    if not released:
        return export.plan(
            source, like=like, maxtext_model=maxtext_model, param_scan_axis=param_scan_axis, max_shard_size=max_shard_size, unit_bytes=unit_bytes, step=step,
            lora=lora, multimodal=multimodal, mtp=mtp, quantize=format, output=output, full_paths=full_paths, slots=slots,
        )  # fmt: skip
    of_checkpoints = {
        "maxtext_model": maxtext_model, "param_scan_axis": param_scan_axis, "step": step, "multimodal": multimodal, "mtp": mtp or None,
    }  # fmt: skip
    if vain := [f"--{name}" for name, value in of_checkpoints.items() if value is not None]:
        raise Refused(f"{', '.join(vain)}: of an Orbax checkpoint, and {source} is a release")
    given = export.open_given(like) if like else None
    if like and given is None:
        raise Refused(f"--like={like}: isn't quantised, and a release is quantised like one that is; leave it out")
    return merge.plan_with(
        source,
        MergeOptions(
            read_loras(lora) or (),
            **read_sizes(max_shard_size, unit_bytes),
            quantize=format,
            full_paths=asked_paths(output, full_paths),
        ),
        given,
        output,
        slots,
    )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Quantises, and says what came of it; with `--dry_run` whether it could."""
    if args.dry_run:
        name_secret(args.hf_token_secret)
        planned = plan(
            **keywords_of(args, plan), slots=slots_for(args.unit_bytes, rest, args.source, args.output, args.resume)
        )
        return (
            export.say_ready(planned, args, rest)
            if isinstance(planned, Export)
            else merge.say_ready(planned, args, rest)
        )
    say(args, quantize(**keywords_of(args, quantize), beam=rest))
    return 0
