"""The command line's options, without Beam: `--help` must not wait for it."""

from __future__ import annotations

import argparse
import math
import re

import weightbeam
from weightbeam.transforms.options import Options

DEFAULTS = Options()
# An n2-standard-2 of Dataflow (batch, us-central1): list price in US$, 2 vCPUs × 0.056 + 8 GB × 0.003557, and 10 Gbit/s
# (cloud.google.com/dataflow/pricing, cloud.google.com/compute/docs/general-purpose-machines).
GBPS, HOUR_PRICE = 10.0, 0.14

OVERVIEW = """\
Weightbeam turns Hugging Face checkpoints into MaxText's Orbax checkpoints.

  weightbeam plan    --source ~/models/Qwen3-8B                          what would happen, and every problem
  weightbeam convert --source ~/models/Qwen3-8B --output ckpt --mesh fsdp=16
  weightbeam verify  --source ~/models/Qwen3-8B --checkpoint ckpt        is every element right?
  weightbeam export  --source ckpt --output tuned                        a Hugging Face release of a checkpoint
  weightbeam merge   --source ~/models/Qwen3-8B --lora adapter --output m  PEFT adapters in a release
  weightbeam inspect ckpt                                                what a checkpoint holds
  weightbeam watch   --config watch.yaml                                 the hub's new releases, by themselves
"""

PLAN = """\
Reads config.json and the headers of the safetensors files, and says what a conversion would do: arrays, chunks, units,
bytes, memory, what is lossy, what is left out and why, and every problem. Writes nothing but --json FILE.

With --workers it simulates the conversion on so many workers of Dataflow, from a bucket or the hub into a bucket: the time, the
cost, and what limits them. docs/running.md says what it assumes.

  weightbeam plan --source ~/models/DeepSeek-V3 --mesh fsdp=64,expert=4 --workers 1,10,100

Exit status: 0 the conversion can go ahead, 2 it can't.
"""

CONVERT = """\
Converts a checkpoint as one Beam pipeline: on this machine's cores by default, elsewhere with Beam's --runner.
The result lies in OUTPUT/STEP and loads in MaxText with load_parameters_path=OUTPUT/STEP/items. It appears there whole,
at the end. A conversion that was stopped goes on with --resume.

  weightbeam convert --source ~/models/Llama-3.1-8B --output ckpt --maxtext_model llama3.1-8b --mesh fsdp=16
  weightbeam convert --source ~/models/DeepSeek-V3 --output ckpt --mesh fsdp=64,expert=4 --mesh fsdp=256
  weightbeam convert --source ~/models/Qwen3-8B --output ckpt --scan_layers false --save_dtype float32

Every option of Beam's passes through, such as --direct_num_workers (threads of a local run).

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""

INSPECT = """\
Shows what a checkpoint holds: the arrays of an Orbax checkpoint (ours or anyone's; its root, a step or an item), or the
tensors of a folder of safetensors files: shapes, dtypes, chunks and bytes.

With --mesh it says what loading an Orbax checkpoint costs on that mesh: bytes read by the bytes needed, and the number of
reads, for hosts with one device each (one with several reads no more than they do together). That needs the logical axes of
the arrays: Weightbeam's checkpoints tell them; for others, --source names a folder with the model's config.json.

  weightbeam inspect ckpt
  weightbeam inspect ckpt --mesh fsdp=16 --mesh fsdp=8,tensor=2
  weightbeam inspect maxtext/0/items --mesh fsdp=16 --source ~/models/Llama-3.1-8B --maxtext_model llama3.1-8b
"""


FIT = """\
Compares what MaxText must be told of a release, from its config.json, with what one of MaxText's models or a file says: each
key that differs, what is needed, what is said, and what the difference would do. Says too what MaxText can't express. Reads
no weights.

  weightbeam fit --source ~/models/Qwen3-8B --maxtext_model qwen3-8b
  weightbeam fit --source hf://Qwen/Qwen3-8B --maxtext_model my_model.yml

Exit status: 0 it fits, 1 something differs, 2 it can't be compared.
"""

VERIFY = """\
Compares every element of a checkpoint with the tensors it was made of, in a way of its own: it reads the arrays back, turns
them into the tensors' layout, and says which are exact, which are rounded as documented, and which are different, with the
tensor and the first index. Works on checkpoints that MaxText's own converter wrote, too. As a Beam pipeline: Beam's options
pass through.

  weightbeam verify --source ~/models/Qwen3-8B --checkpoint ckpt
  weightbeam verify --source ~/models/DeepSeek-V3 --checkpoint ckpt/0/items --sample 0.05

What isn't given is taken from the checkpoint: its layout, vocabulary, and whether it has MTP layers or towers.

Exit status: 0 all of it is right, 1 something differs, 2 it can't be compared.
"""


MATERIALIZE = """\
Makes an ordinary checkpoint of a virtual one: the same arrays, in chunks for a mesh, without any file of the source. First it
makes sure that the files which the checkpoint refers to are those it was made of. As a Beam pipeline: Beam's options pass
through.

  weightbeam materialize ckpt --output ordinary --mesh fsdp=16

The layout is the checkpoint's. The result is the same as that of weightbeam convert --mesh on the source.

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


DIFF = """\
Compares two checkpoints of any kinds, every element of every tensor, in one spelling: releases (quantised ones by their values)
and Orbax checkpoints, ours or MaxText's, in a folder, gs:// or (releases) hf://. Says of each tensor whether it is equal, rounded
(no element is off by more than one step of the coarser dtype), changed (largest and mean difference, the share of elements that
differ, the cosine of the angle between both) or missing. A release beside an Orbax checkpoint is compared as it would be
converted into it.

  weightbeam diff ~/models/Qwen3-8B qwen3-8b-tuned
  weightbeam diff hf://Qwen/Qwen3-8B ckpt/0/items --tolerance 1e-2 --json found.json

Exit status: 0 the same within the tolerance, 1 not, 2 they can't be compared.
"""


EXPORT = """\
Writes an Orbax checkpoint as a Hugging Face release: safetensors files and index, config.json, tokenizer and the other small
files. The checkpoint may be one of Weightbeam's, of MaxText's converter, or one that MaxText's training wrote. What it remembers
of its release, or --like, says how the release should look. Values are computed in float32 and cast once. As a Beam pipeline.

  weightbeam export --source ckpt --output qwen3-8b-tuned
  weightbeam export --source run/checkpoints/1000 --output tuned --like hf://Qwen/Qwen3-8B

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


MERGE = """\
Merges PEFT adapters into a release: the same safetensors files with the adapters in them, all else as it was. In float32 with one
cast; what no adapter reaches is carried over byte for byte, quantised weights included. As a Beam pipeline.

  weightbeam merge --source hf://Qwen/Qwen3-8B --lora my-adapter --output qwen3-8b-tuned
  weightbeam merge --source ~/models/Qwen3-8B --lora math,0.7 --lora gs://bucket/code,0.3 --output both

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


WATCH = """\
Converts the releases of the hub that a configuration asks for: looks for models that match, waits until a release is
complete, refuses it with the reason or converts, verifies and publishes it, and records each step in the output. Any number
of watchers may run at once. docs/watching.md explains the configuration.

  weightbeam watch --config watch.yaml --dry_run        what would be done
  weightbeam watch --config watch.yaml --once           for schedulers
  weightbeam watch --config gs://bucket/watch.yaml --interval 15m --serve 8080

Exit status: 0 nothing failed, 1 something did, 2 the configuration is refused.
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the texts as they are written, and shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS) or action.nargs == 0:
            return action.help
        default = str(action.default).lower() if isinstance(action.default, bool) else action.default
        return f"{action.help} (default: {default})"


def boolean(text: str) -> bool:
    """`true` or `false`, as MaxText writes them."""
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} should be true or false")
    return values[text.lower()]


MAX_INTEGER = 2**31 - 1


def natural(text: str) -> int:
    """An integer from 0 on."""
    if not text.isascii() or not text.isdigit() or int(text) > MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text!r} should be an integer from 0 to {MAX_INTEGER}")
    return int(text)


def positive(text: str) -> int:
    """An integer from 1 on."""
    if (number := natural(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a positive integer")
    return number


def counts(text: str) -> tuple[int, ...]:
    """Integers from 1 on, with commas between them."""
    return tuple(positive(number.strip()) for number in text.split(","))


def amount(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0")
    return number


def distance(text: str) -> float:
    """A number from 0 on."""
    return 0.0 if re.fullmatch(r"0*\.?0*", text) and text not in ("", ".") else amount(text)


def secret(text: str) -> str:
    """A version of a secret, as Secret Manager names it. What isn't one may be a token, and isn't repeated."""
    if not re.fullmatch(r"projects/[^/\s]+/secrets/[^/\s]+/versions/[^/\s]+", text):
        raise argparse.ArgumentTypeError("it should be the name of a secret, projects/PROJECT/secrets/SECRET/versions/latest, and no token")
    return text


def share(text: str) -> float:
    """A number above 0, up to 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0 and up to 1")
    return number


def size(text: str) -> int:
    """Bytes: a number, or one with KiB, MiB, GiB or TiB, or with KB, MB, GB or TB."""
    units = {f"{prefix}{kind}": base**power for kind, base in (("iB", 1024), ("B", 1000)) for power, prefix in enumerate("KMGT", 1)}
    for unit, factor in (units | {"": 1}).items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.isascii() and number.isdigit() and int(number) > 0:
            return int(number) * factor
    raise argparse.ArgumentTypeError(f"{text!r} should be bytes, such as 134217728 or 128MiB")


def seconds(text: str) -> float:
    """Seconds: a number with s, m, h or d."""
    number, factor = text[:-1], {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    if factor is None or not number.isascii() or not number.isdigit() or not 0 < int(number) < MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number with s, m, h or d, such as 15m")
    return float(int(number) * factor)


def port(text: str) -> int:
    """A number of a TCP port."""
    if (number := natural(text)) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} should be a port, up to 65535")
    return number


def add_conversion(parser: argparse.ArgumentParser) -> None:
    """The options that say what is converted, and into what."""
    add = parser.add_argument
    add("--source", metavar="URL", help="where config.json and the safetensors files are: a folder, gs://bucket/folder, or hf://organisation/model[@revision]")
    add(
        "--scan_layers",
        type=boolean,
        default=DEFAULTS.scan_layers,
        metavar="true|false",
        help="layers of a kind stacked in one array, as MaxText's scan_layers",
    )
    add("--param_scan_axis", type=natural, default=DEFAULTS.param_scan_axis, metavar="N", help="where the stacked axis goes, as in MaxText")
    add("--save_dtype", choices=("bfloat16", "float32"), default=DEFAULTS.save_dtype, help="dtype of every float array; computed in float32, cast once")
    add("--mesh", action="append", metavar="AXES", help="target sharding, such as fsdp=16,expert=4; repeat it to serve several meshes")
    add("--sharding_rules", metavar="FILE", help="your logical_axis_rules: a MaxText config (YAML), or JSON (default: those of MaxText's base.yml)")
    add("--maxtext_model", metavar="NAME", help="the MaxText model, such as llama3.1-8b, where config.json can't settle it")
    add("--family", metavar="NAME|FILE.py", help="the table: one of ours, an installed package's, a file of your own, or identity (default: by config.json)")
    add("--vocab_size", type=positive, metavar="N", help="rows of MaxText's embedding: more pads with zeros, fewer cuts")
    add("--mtp", type=boolean, default=DEFAULTS.mtp, metavar="true|false", help="convert the multi-token-prediction layers too")
    add(
        "--check_source",
        choices=("true", "false", "auto"),
        default=DEFAULTS.check_source,
        help="true reads the source's files once more, and compares their known hashes",
    )
    add("--allow_links", type=boolean, default=DEFAULTS.allow_links, metavar="true|false", help="take files of the source that are links to another folder")
    add("--multimodal", type=boolean, default=DEFAULTS.multimodal, metavar="true|false", help="convert the vision and audio towers too")
    add("--use_ocdbt", type=boolean, default=DEFAULTS.use_ocdbt, metavar="true|false", help="one database, or a folder for each array (Pathways: false)")
    add("--use_zarr3", type=boolean, default=DEFAULTS.use_zarr3, metavar="true|false", help="zarr version 3 or 2 (Pathways: false)")
    add("--compression", choices=("none", "zstd"), default=DEFAULTS.compression, help="zstd saves about a fifth of the disk and slows loading")
    add("--unit_bytes", type=size, default=f"{DEFAULTS.unit_bytes >> 20}MiB", metavar="BYTES", help="bound on the memory of one unit of work")
    add("--step", type=natural, default=DEFAULTS.step, metavar="N", help="the step under which the checkpoint is written")
    add("--lora", action="append", metavar="PATH[,WEIGHT]", help="a PEFT adapter to merge: a folder, gs:// or hf://; may be repeated")
    add("--adapter_only", type=boolean, default=DEFAULTS.adapter_only, metavar="true|false", help="write the adapter as MaxText's, and don't merge it")
    add("--virtual", action="store_true", default=False, help="refer to the source's files for every array that lies in them already")
    add("--hf_token_secret", type=secret, metavar="NAME", help="the version of a secret in Secret Manager that holds the hub's token, for all workers")


def add_fit(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison with a MaxText configuration."""
    add = parser.add_argument
    add("--source", metavar="URL", help="where config.json is: a folder, gs://bucket/folder, or hf://organisation/model[@revision]")
    add("--maxtext_model", metavar="NAME|FILE", help="the name of a MaxText model, or a .yml that says its keys")
    add("--json", metavar="FILE", help="write the differences as JSON too; - is standard output")


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """The options of a plan that say on what the conversion would run."""
    add = parser.add_argument
    add("--workers", type=counts, metavar="N,N,…", help="say how long it takes on N workers of Dataflow, such as 1,10,100, and what that costs")
    add("--worker_gbps", type=amount, default=GBPS, metavar="GBPS", help="a worker's network in Gbit/s (10^9 bits), each way")
    add("--worker_hour_price", type=amount, default=HOUR_PRICE, metavar="PRICE", help="of a worker with 2 vCPUs and 8 GB, in any currency")


def add_verification(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison; None stands for what the checkpoint says."""
    add = parser.add_argument
    add("--source", metavar="URL", help="where config.json and the safetensors files are: a folder, gs:// or hf://")
    add("--checkpoint", metavar="URL", help="the Orbax checkpoint: its root, a step or an item, in a folder or in gs://")
    add("--lora", action="append", metavar="PATH[,WEIGHT]", help="an adapter that was merged, where it isn't where the checkpoint says")
    add("--sample", type=share, default=1.0, metavar="SHARE", help="compare only this share of each array's tensors, such as 0.05, but one at least")
    add("--json", metavar="FILE", help="write what was found of each array as JSON too")
    add("--maxtext_model", metavar="NAME", help="the MaxText model, such as llama3.1-8b, where neither config.json nor the checkpoint can settle it")
    add("--scan_layers", type=boolean, metavar="true|false", help="whether layers are stacked")
    add("--param_scan_axis", type=natural, metavar="N", help="where the stacked axis is (default: 1)")
    add("--hf_token_secret", type=secret, metavar="NAME", help="the version of a secret in Secret Manager that holds the hub's token, for all workers")


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison of any two checkpoints."""
    add = parser.add_argument
    add("a", metavar="A", help="a release or an Orbax checkpoint: a folder, gs:// or (releases) hf://")
    add("b", metavar="B", help="another")
    add("--tolerance", type=distance, default=0.0, metavar="X", help="the largest absolute difference of an element that counts as none")
    add("--json", metavar="FILE", help="write what was found of each tensor as JSON too")
    add("--maxtext_model", metavar="NAME", help="the MaxText model, where one is an Orbax checkpoint and neither can settle it")
    add("--hf_token_secret", type=secret, metavar="NAME", help="the version of a secret in Secret Manager that holds the hub's token")


def add_inspection(parser: argparse.ArgumentParser) -> None:
    """The options of an inspection; None stands for what the checkpoint says."""
    add = parser.add_argument
    add("checkpoint", metavar="URL", help="an Orbax checkpoint or safetensors files, in a folder, gs:// or (safetensors) hf://")
    add("--mesh", action="append", metavar="AXES", help="what loading costs on a mesh, such as fsdp=16,expert=4; may be repeated")
    add("--sharding_rules", metavar="FILE", help="your logical_axis_rules, as for convert (default: those that it was made for)")
    add("--source", metavar="FOLDER", help="folder with the model's config.json, for a checkpoint that doesn't tell its logical axes")
    add("--maxtext_model", metavar="NAME", help="the MaxText model, where neither config.json nor the checkpoint can settle it")


def add_output(parser: argparse.ArgumentParser) -> None:
    """The options that say where the checkpoint goes."""
    add = parser.add_argument
    add("--output", metavar="URL", help="where the checkpoint goes: a folder or gs://bucket/folder; it must not hold that step yet")
    add("--link", choices=("hard", "symlink", "copy"), default="hard", help="how --virtual puts the source's files into a folder (into a bucket: copy)")
    add("--sha256", action="store_true", default=False, help="with --virtual, read the source's files once and record their hashes")
    add("--resume", action="store_true", default=False, help="go on with a stopped conversion")
    add("--overwrite", action="store_true", default=False, help="replace a checkpoint, or throw a stopped conversion away")


def add_merge(parser: argparse.ArgumentParser) -> None:
    """The options of a merge."""
    add = parser.add_argument
    add("--source", metavar="URL", help="the release: a folder, gs://bucket/folder, or hf://organisation/model[@revision]")
    add("--output", metavar="FOLDER", help="the folder of the new release; it must not be there yet")
    add("--lora", action="append", metavar="PATH[,WEIGHT]", help="a PEFT adapter to merge: a folder, gs:// or hf://; may be repeated")
    add("--max_shard_size", type=size, metavar="BYTES", help="bytes of tensors in a file, such as 5GB (default: as --source)")
    add("--unit_bytes", type=size, default=f"{DEFAULTS.unit_bytes >> 20}MiB", metavar="BYTES", help="bound on the memory of one unit of work")
    add("--resume", action="store_true", default=False, help="go on with a stopped merge")
    add("--overwrite", action="store_true", default=False, help="replace a release, or throw a stopped merge away")
    add("--hf_token_secret", type=secret, metavar="NAME", help="the version of a secret in Secret Manager that holds the hub's token")


def add_materialization(parser: argparse.ArgumentParser) -> None:
    """The options that a virtual checkpoint leaves open."""
    add = parser.add_argument
    add("checkpoint", metavar="URL", help="the virtual checkpoint: its root, a step or an item, in a folder or in gs://")
    add("--output", metavar="URL", help="a folder or gs://bucket/folder for the new one; it must not hold that step yet")
    add("--resume", action="store_true", default=False, help="go on with a stopped one")
    add("--overwrite", action="store_true", default=False, help="replace a checkpoint, in a folder also the virtual one itself")
    add("--mesh", action="append", metavar="AXES", help="target sharding, such as fsdp=16,expert=4 (default: that of the virtual checkpoint)")
    add("--sharding_rules", metavar="FILE", help="your logical_axis_rules, as for convert (default: those of the virtual checkpoint)")
    add("--use_ocdbt", type=boolean, default=DEFAULTS.use_ocdbt, metavar="true|false", help="one database, or a folder for each array (Pathways: false)")
    add("--use_zarr3", type=boolean, default=DEFAULTS.use_zarr3, metavar="true|false", help="zarr version 3 or 2 (Pathways: false)")
    add("--compression", choices=("none", "zstd"), default=DEFAULTS.compression, help="zstd saves about a fifth of the disk and slows loading")
    add("--unit_bytes", type=size, default=f"{DEFAULTS.unit_bytes >> 20}MiB", metavar="BYTES", help="bound on the memory of one unit of work")
    add("--step", type=natural, metavar="N", help="the step under which it is written (default: that of the virtual checkpoint)")


def add_export(parser: argparse.ArgumentParser) -> None:
    """The options of an export; None stands for what the checkpoint, or the release that it should be like, says."""
    add = parser.add_argument
    add("--source", metavar="URL", help="the Orbax checkpoint: its root, a step or an item, in a folder or in gs://")
    add("--output", metavar="URL", help="the folder of the release, which must not be there yet; or hf://owner/name: one commit there")
    add("--create_pr", action="store_true", default=False, help="on the hub, open a pull request")
    add("--like", metavar="URL", help="the release whose config.json, tokenizer, names and dtypes are taken: a folder, gs:// or hf://")
    add("--save_dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="dtype of every float tensor; auto: as --like has it")
    add("--maxtext_model", metavar="NAME", help="the MaxText model, where neither the checkpoint nor config.json settles it")
    add("--param_scan_axis", type=natural, metavar="N", help="where the layers are stacked, where the shapes fit several axes")
    add("--max_shard_size", type=size, metavar="BYTES", help="bytes of tensors in a file, such as 5GB (default: as --like, else 5GB)")
    add("--unit_bytes", type=size, default=f"{DEFAULTS.unit_bytes >> 20}MiB", metavar="BYTES", help="bound on the memory of one unit of work")
    add("--step", type=natural, metavar="N", help="which step, where the root has several")
    add("--dry_run", action="store_true", default=False, help="say what would be done, and every problem; write nothing")
    add("--lora_alpha", type=amount, metavar="ALPHA", help="of an adapter that MaxText trained, where its metadata don't say it")
    add("--resume", action="store_true", default=False, help="go on with a stopped export")
    add("--overwrite", action="store_true", default=False, help="replace a release, or throw a stopped export away")
    add("--hf_token_secret", type=secret, metavar="NAME", help="the version of a secret in Secret Manager that holds the hub's token")


def add_watching(parser: argparse.ArgumentParser) -> None:
    """The options that aren't of the configuration."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="what to watch: a file, or gs://bucket/file")
    add("--once", action="store_true", help="look once, do what there is to do, and end")
    add("--dry_run", action="store_true", help="look once and say what would be done; write nothing")
    add("--interval", type=seconds, default="15m", metavar="TIME", help="how often to look")
    add("--retry", metavar="MODEL", help="have what was refused or failed of this model begin anew, and end")
    add("--serve", type=port, metavar="PORT", help="take the hub's webhooks too; their secret is in WEIGHTBEAM_WEBHOOK_SECRET")


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser("weightbeam", description=OVERVIEW, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"weightbeam {weightbeam.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, help: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=description, formatter_class=_Formatter, allow_abbrev=False)

    convert = command("convert", "convert a checkpoint", CONVERT)
    add_conversion(convert)
    add_output(convert)
    plan = command("plan", "say what a conversion would do, and every problem", PLAN)
    add_conversion(plan)
    plan.add_argument("--json", metavar="FILE", help="write the plan as JSON too")
    plan.add_argument("--maxtext_config", metavar="FILE", help="write maxtext.yml; - is standard output, and nothing else is printed")
    add_simulation(plan)
    plan.add_argument("--load", action="store_true", help="say how weightbeam.load would read it onto each --mesh")
    plan.add_argument("--hosts", type=positive, metavar="N", help="hosts that share the devices of a mesh, for --load; one for each device unless said")
    fit = command("fit", "compare a release with a MaxText configuration, field by field", FIT)
    add_fit(fit)
    verify = command("verify", "compare a checkpoint with its source, element by element", VERIFY)
    add_verification(verify)
    add_export(command("export", "write a checkpoint as a Hugging Face release", EXPORT))
    add_merge(command("merge", "merge PEFT adapters into a release", MERGE))
    add_materialization(command("materialize", "make an ordinary checkpoint of a virtual one", MATERIALIZE))
    add_comparison(command("diff", "compare any two checkpoints, tensor by tensor", DIFF))
    inspect = command("inspect", "show what a checkpoint holds", INSPECT)
    add_inspection(inspect)
    add_watching(command("watch", "convert the hub's releases as they come", WATCH))
    return parser
