"""The options of every command. What an option takes stands once, in `KINDS`; what it means, with its command."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from weightbeam.pipelines.arguments.values import (
    amount,
    boolean,
    counts,
    distance,
    dtype_name,
    fraction,
    natural,
    port,
    positive,
    seconds,
    secret,
    size,
)
from weightbeam.transforms.options import Options


class Unsaid(int):
    """The default of an option for which something better may be found where nobody gives it."""


DEFAULTS = Options()
UNIT_BYTES = Unsaid(DEFAULTS.unit_bytes)
# An n2-standard-2 of Dataflow (batch, us-central1): list price in US$, 2 vCPUs × 0.056 + 8 GB × 0.003557, and 10 Gbit/s
# (cloud.google.com/dataflow/pricing, cloud.google.com/compute/docs/general-purpose-machines).
GBPS, HOUR_PRICE = 10.0, 0.14
CHECK_HELP = (
    "compare the source's bytes with their known hashes: auto those of a bucket on their way, "
    "true all of them, reading the files once more"
)
TOKEN_HELP = "the version of a secret in Secret Manager that holds the hub's token"
UNITS_HELP = (
    "bound on the memory of one unit of work, such as 64M "
    "(default: 128MiB, and smaller units where the workers are known)"
)

PATHS_HELP = (
    "how records and cards name sources: true: by full paths; false: by names alone (default: full paths in a folder, "
    "names on the hub, names of this machine's folders in gs://)"
)

# By its name alone, with a value, or as `--no_NAME`, which `parser.parse` reads.
TRUTH: dict[str, Any] = dict(type=boolean, nargs="?", const=True, metavar="true|false")
FLAG: dict[str, Any] = TRUTH | dict(default=False)
KINDS = {  # what an option takes, in whatever command
    "--accept": dict(action="append", metavar="FIELD|FILE"),
    "--adapter_only": TRUTH,
    "--allow_links": TRUTH,
    "--check_source": dict(choices=("true", "false", "auto")),
    "--checkpoint": dict(metavar="URL"),
    "--compression": dict(choices=("none", "zstd")),
    "--config": dict(metavar="FILE"),
    "--create_pr": FLAG,
    "--dry_run": FLAG,
    "--every": dict(type=positive, metavar="N"),
    "--fail_over": dict(type=distance, metavar="X"),
    "--family": dict(metavar="NAME|FILE.py"),
    "--format": dict(choices=("fp8",)),
    "--full_paths": TRUTH,
    "--hf_token_secret": dict(type=secret, metavar="NAME"),
    "--hosts": dict(type=positive, metavar="N"),
    "--interval": dict(type=seconds, metavar="TIME"),
    "--json": dict(metavar="FILE"),
    "--kind": dict(choices=("export", "quantize", "reshard")),
    "--like": dict(metavar="URL"),
    "--link": dict(choices=("hard", "symlink", "copy")),
    "--load": FLAG,
    "--log_file": dict(metavar="FILE"),
    "--lora": dict(action="append", metavar="PATH[,WEIGHT]"),
    "--lora_alpha": dict(type=amount, metavar="ALPHA"),
    "--max_shard_size": dict(type=size, metavar="BYTES"),
    "--maxtext_config": dict(metavar="FILE"),
    "--maxtext_model": dict(metavar="NAME"),
    "--mesh": dict(action="append", metavar="AXES"),
    "--moment_dtype": dict(type=dtype_name, choices=("keep", "bfloat16", "float32")),
    "--mtp": TRUTH,
    "--multimodal": TRUTH,
    "--once": FLAG,
    "--output": dict(metavar="URL"),
    "--overwrite": FLAG,
    "--param_scan_axis": dict(type=natural, metavar="N"),
    "--progress": dict(choices=("auto", "bar", "lines", "json", "none")),
    "--resume": FLAG,
    "--retry": dict(metavar="NAME"),
    "--run": dict(metavar="URL"),
    "--sample": dict(type=fraction, metavar="SHARE"),
    "--save_dtype": dict(type=dtype_name),
    "--scan_layers": TRUTH,
    "--serve": dict(type=port, metavar="PORT"),
    "--sha256": FLAG,
    "--sharding_rules": dict(metavar="FILE"),
    "--source": dict(metavar="URL"),
    "--state": dict(choices=("full", "params")),
    "--step": dict(type=natural, metavar="N"),
    "--tokenizer": dict(metavar="URL"),
    "--tolerance": dict(type=distance, metavar="X"),
    "--unit_bytes": dict(type=size, metavar="BYTES"),
    "--use_ocdbt": TRUTH,
    "--use_zarr3": TRUTH,
    "--virtual": FLAG,
    "--vocab_size": dict(type=positive, metavar="N"),
    "--worker_gbps": dict(type=amount, metavar="GBPS"),
    "--worker_hour_price": dict(type=amount, metavar="PRICE"),
    "--workers": dict(type=counts, metavar="N,N,…"),
}


def is_boolean(action: argparse.Action) -> bool:
    """Whether an option is true or false."""
    return action.type is boolean


def _add(place: argparse._ActionsContainer, name: str, help: str, **more: Any) -> None:
    """Adds an option of this kind to a parser, or to a group of one; `more` is said where a command has it otherwise."""
    place.add_argument(name, help=help, **{**KINDS.get(name, {}), **more})


def _add_storage(add: Callable[..., None]) -> None:
    """How a checkpoint that is made anew is stored."""
    add("--use_ocdbt", "one database, or a folder for each array (Pathways: false)", default=DEFAULTS.use_ocdbt)
    add("--use_zarr3", "zarr version 3 or 2 (Pathways: false)", default=DEFAULTS.use_zarr3)
    add("--compression", "zstd saves about a fifth of the disk and slows loading", default=DEFAULTS.compression)
    add("--unit_bytes", UNITS_HELP, default=UNIT_BYTES)


def _add_parts(add: Callable[..., None], of: str = "") -> None:
    """What is taken of the release where a checkpoint doesn't hold it."""
    towers = "true: with vision and audio towers, those of --like where the checkpoint has none"
    add("--multimodal", f"{of}{towers}; false: the language model alone")
    add("--mtp", f"{of}with --like's multi-token-prediction layers where the checkpoint has none", default=False)


def add_conversion(parser: argparse.ArgumentParser) -> None:
    """The options that say what is converted, and into what."""
    add = functools.partial(_add, parser.add_argument_group("what is converted"))
    add("--source", "config.json and the safetensors files: a folder, gs://bucket/folder, or hf://organisation/model[@revision]")
    add("--maxtext_model", "the MaxText model, such as llama3.1-8b, where config.json can't settle it")
    add("--family", "the table: one of ours, an installed package's, a file of your own, or identity (default: by config.json)")
    add("--vocab_size", "rows of MaxText's embedding: more pads with zeros, fewer cuts")
    add("--mtp", "convert the multi-token-prediction layers too", default=DEFAULTS.mtp)
    add("--check_source", CHECK_HELP, default=DEFAULTS.check_source)
    add("--allow_links", "take files of the source that are links to another folder", default=DEFAULTS.allow_links)
    add("--multimodal", "convert the vision and audio towers too", default=DEFAULTS.multimodal)
    add("--lora", "a PEFT adapter to merge: a folder, gs:// or hf://; may be repeated")
    add("--adapter_only", "write the adapter as MaxText's, and don't merge it", default=DEFAULTS.adapter_only)
    add("--hf_token_secret", f"{TOKEN_HELP}, for all workers")
    add = functools.partial(_add, parser.add_argument_group("layout of the checkpoint"))
    add("--scan_layers", "stack the layers of a kind in one array, as in MaxText", default=DEFAULTS.scan_layers)
    add("--param_scan_axis", "where the stacked axis goes, as in MaxText", default=DEFAULTS.param_scan_axis)
    told = "dtype of every float array; computed in float32, cast once"
    add("--save_dtype", told, choices=("bfloat16", "float32"), default=DEFAULTS.save_dtype)
    add("--mesh", "the mesh that loads it, such as fsdp=16,expert=4; repeat it for several (default: fit for any)")
    add("--sharding_rules", "your logical_axis_rules: a MaxText config (YAML), or JSON (default: those of MaxText's base.yml)")
    add = functools.partial(_add, parser.add_argument_group("storage"))
    _add_storage(add)
    add("--step", "the step under which the checkpoint is written", default=DEFAULTS.step)
    add("--virtual", "refer to the source's files for every array that lies in them already")
    add("--full_paths", PATHS_HELP)


def add_fit(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison with a MaxText configuration."""
    add = functools.partial(_add, parser)
    add("--source", "where config.json is: a folder, gs://bucket/folder, or hf://organisation/model[@revision]")
    add("--maxtext_model", "the name of a MaxText model, or a .yml that says its keys", metavar="NAME|FILE")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The options of a plan: those of the conversion, what is told of it, and on what it would run."""
    add_conversion(parser)
    add = functools.partial(_add, parser)
    add("--maxtext_config", "write maxtext.yml; - is standard output, and nothing else is printed")
    add("--output", "where the checkpoint would go")
    add("--resume", "of a conversion that goes on there")
    add("--overwrite", "of a conversion that replaces what is there")
    _add_simulation(parser)
    add("--load", "say how weightbeam.load would read it onto each --mesh")
    add("--hosts", "hosts that share the devices of a mesh, for --load; one for each device unless said")


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(_add, parser.add_argument_group("simulation"))
    add("--workers", "simulate it on N workers, such as 1,10,100: time and cost, on Dataflow or --runner's cluster")
    add("--worker_gbps", "a worker's network in Gbit/s (10^9 bits), each way", default=GBPS)
    add("--worker_hour_price", "of a worker with 2 vCPUs and 8 GB, in any currency", default=HOUR_PRICE)


def add_verification(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison; None stands for what the checkpoint says."""
    add = functools.partial(_add, parser)
    add("--source", "where config.json and the safetensors files are: a folder, gs:// or hf://")
    add("--checkpoint", "the Orbax checkpoint: its root, a step or an item, in a folder or in gs://")
    add("--like", "of an export: the release that its towers were taken from, where it isn't where the export says")
    add("--accept", "of an export: a field of config.json, or another small file, that may be another than the export wrote")
    add("--lora", "an adapter that was merged, where it isn't where the checkpoint says")
    add("--sample", "compare only this share of each array's tensors, such as 0.05, but one at least", default=1.0)
    add("--maxtext_model", "the MaxText model, such as llama3.1-8b, where neither config.json nor the checkpoint can settle it")
    add("--scan_layers", "whether layers are stacked")
    add("--param_scan_axis", "where the stacked axis is (default: 1)")
    add("--hf_token_secret", f"{TOKEN_HELP}, for all workers")


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison of any two checkpoints."""
    add = functools.partial(_add, parser)
    add("a", "a release or an Orbax checkpoint: a folder, gs:// or (releases) hf://", metavar="A")
    add("b", "another", metavar="B")
    add("--tolerance", "the largest absolute difference of an element that counts as none", default=0.0)
    add("--fail_over", "end with status 1 only where a tensor's relative change is over X: |a - b| / |a|, of its norms")
    add("--maxtext_model", "the MaxText model, where one is an Orbax checkpoint and neither can settle it")
    add("--family", "the table (default: by config.json)")
    add("--hf_token_secret", TOKEN_HELP)


def add_inspection(parser: argparse.ArgumentParser) -> None:
    """The options of an inspection; None stands for what the checkpoint says."""
    add = functools.partial(_add, parser)
    add("--checkpoint", "an Orbax checkpoint or safetensors files, in a folder, gs:// or (safetensors) hf://")
    add("--mesh", "what loading costs on a mesh, such as fsdp=16,expert=4; may be repeated")
    add("--sharding_rules", "your logical_axis_rules, as for convert (default: those that it was made for)")
    add("--source", "folder with the model's config.json, for a checkpoint that doesn't tell its logical axes", metavar="FOLDER")
    add("--maxtext_model", "the MaxText model, where neither config.json nor the checkpoint can settle it")


def add_output(parser: argparse.ArgumentParser) -> None:
    """The options that say where the checkpoint goes."""
    add = functools.partial(_add, parser.add_argument_group("output"))
    add("--output", "where the checkpoint goes: a folder or gs://bucket/folder; it must not hold that step yet")
    add("--link", "how --virtual puts the source's files into a folder (into a bucket: copy)", default="hard")
    add("--sha256", "with --virtual, read the source's files once and record their hashes")
    add("--resume", "go on with a stopped conversion")
    add("--overwrite", "replace a checkpoint, or throw a stopped conversion away")


def add_rewriting(parser: argparse.ArgumentParser) -> None:
    """The options of every command that makes a release of a release."""
    add = functools.partial(_add, parser)
    add("--source", "the release: a folder, gs://bucket/folder, or hf://organisation/model[@revision]")
    add("--output", "a folder or gs://bucket/folder for the new release, which must not be there yet; or hf://owner/name: one commit there")
    add("--create_pr", "on the hub, open a pull request")
    add("--max_shard_size", "bytes of tensors in a file, such as 5GB (default: as --source)")
    add("--unit_bytes", UNITS_HELP, default=UNIT_BYTES)
    add("--resume", "go on with a stopped command")
    add("--overwrite", "replace a release, or throw away what a stopped command staged")
    add("--full_paths", PATHS_HELP)
    add("--hf_token_secret", TOKEN_HELP)


def add_merge(parser: argparse.ArgumentParser) -> None:
    """The options of a merge."""
    add_rewriting(parser)
    _add(parser, "--family", "the table whose spellings of names count (default: by config.json)")
    _add(parser, "--lora", "a PEFT adapter to merge: a folder, gs:// or hf://; may be repeated")


def add_dequantization(parser: argparse.ArgumentParser) -> None:
    """The options of a dequantisation."""
    add_rewriting(parser)
    dtypes = ("bfloat16", "float16", "float32")
    _add(parser, "--save_dtype", "dtype of the values (default: what config.json says)", choices=dtypes)


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """The options of a quantisation."""
    add_rewriting(parser)
    add = functools.partial(_add, parser)
    add("--format", "what the weights of linear layers become", default="fp8")
    add("--like", "a release in FP8, whose scales come back where values didn't change; of an Orbax checkpoint as for export")
    add("--lora", "a PEFT adapter to merge on the way: a folder, gs:// or hf://; may be repeated")
    add("--maxtext_model", "of an Orbax checkpoint: the MaxText model, where neither it nor config.json settles it")
    add("--param_scan_axis", "of an Orbax checkpoint: where the layers are stacked, where its shapes fit several axes")
    add("--step", "of an Orbax checkpoint: which step, where the root has several")
    _add_parts(add, "of an Orbax checkpoint: ")


def add_materialization(parser: argparse.ArgumentParser) -> None:
    """The options that a virtual checkpoint leaves open."""
    add = functools.partial(_add, parser)
    add("--checkpoint", "the virtual checkpoint: its root, a step or an item, in a folder or in gs://")
    add("--output", "a folder or gs://bucket/folder for the new one; it must not hold that step yet")
    add("--resume", "go on with a stopped one")
    add("--overwrite", "replace a checkpoint, in a folder also the virtual one itself")
    add("--mesh", "target sharding, such as fsdp=16,expert=4 (default: that of the virtual checkpoint)")
    add("--sharding_rules", "your logical_axis_rules, as for convert (default: those of the virtual checkpoint)")
    _add_storage(add)
    add("--step", "the step under which it is written (default: that of the virtual checkpoint)")


def add_export(parser: argparse.ArgumentParser) -> None:
    """The options of an export; None stands for what the checkpoint, or the release that it should be like, says."""
    add = functools.partial(_add, parser)
    add("--source", "the Orbax checkpoint: its root, a step or an item, in a folder or in gs://")
    add("--output", "a folder or gs://bucket/folder for the release, which must not be there yet; or hf://owner/name: one commit there")
    add("--create_pr", "on the hub, open a pull request")
    add("--like", "the release whose config.json, tokenizer, names and dtypes are taken: a folder, gs:// or hf://")
    told = "dtype of every float tensor; auto: as --like has it"
    add("--save_dtype", told, choices=("auto", "bfloat16", "float16", "float32"), default="auto")
    add("--maxtext_model", "the MaxText model, where neither the checkpoint nor config.json settles it")
    add("--param_scan_axis", "where the layers are stacked, where the shapes fit several axes")
    add("--max_shard_size", "bytes of tensors in a file, such as 5GB (default: as --like, else 5GB)")
    add("--unit_bytes", UNITS_HELP, default=UNIT_BYTES)
    add("--step", "which step, where the root has several")
    add("--lora", "a PEFT adapter to merge on the way: a folder, gs:// or hf://; may be repeated")
    add("--family", "the table: one of ours, an installed package's or a file of your own (default: by config.json)")
    add("--maxtext_config", "a MaxText configuration (.yml) to make config.json of, for a model without a release")
    add("--tokenizer", "a folder, gs:// or hf:// whose tokenizer, chat template and processor are taken")
    _add_parts(add)
    add("--lora_alpha", "of an adapter that MaxText trained, where its metadata don't say it")
    add("--resume", "go on with a stopped export")
    add("--overwrite", "replace a release, or throw a stopped export away")
    add("--full_paths", PATHS_HELP)
    add("--hf_token_secret", TOKEN_HELP)


def add_reshard(parser: argparse.ArgumentParser) -> None:
    """The options of a reshard; None stands for what the checkpoint has."""
    add = functools.partial(_add, parser.add_argument_group("what is written"))
    add("--source", "the Orbax checkpoint, anyone's: its root, a step or an item, in a folder or in gs://")
    add("--output", "a folder or gs://bucket/folder for the new one; it must not hold that step yet")
    add("--step", "which step, where the source has several; and the one that is written (default: the source's)")
    add("--state", "params leaves out the optimizer and the rest, and calls the weights params.params", default="full")
    add("--save_dtype", "dtype of the weights; computed in float32, cast once", choices=("keep", "bfloat16", "float32"), default="keep")
    add("--moment_dtype", "dtype of the optimizer's moments", default="keep")
    add("--lora", "an adapter that MaxText trained, to merge: its Orbax checkpoint; may be repeated", metavar="CKPT[,WEIGHT]")
    add("--lora_alpha", "of an adapter whose metadata don't say it")
    add("--resume", "go on with a stopped one")
    add("--overwrite", "replace a checkpoint, or throw a stopped one away")
    add = functools.partial(_add, parser.add_argument_group("layout"))
    add("--mesh", "the mesh that loads it, such as fsdp=64; may be repeated (default: chunks stay as they are)")
    add("--scan_layers", "stack the layers of a kind in one array, or take them apart (default: as they are)")
    add("--param_scan_axis", "where the stacked axis goes (default: where it is)")
    add("--like", "a release of the model, if the checkpoint doesn't remember one: its table names axes and layers")
    add("--maxtext_config", "the run's MaxText configuration (.yml), in place of --like")
    add("--maxtext_model", "the MaxText model, where config.json can't settle it, or in place of --like")
    add("--family", "the table, as for convert (default: by config.json)")
    add("--sharding_rules", "your logical_axis_rules, as for convert")
    add = functools.partial(_add, parser.add_argument_group("storage"))
    add("--use_ocdbt", "one database, or a folder for each array (Pathways: false; default: as the source)")
    add("--use_zarr3", "zarr version 3 or 2 (Pathways: false; default: as the source)")
    add("--compression", "of every array (default: as it is where chunks are copied, else none)")
    add("--unit_bytes", UNITS_HELP, default=UNIT_BYTES)
    add("--full_paths", PATHS_HELP)
    add("--hf_token_secret", TOKEN_HELP)


def add_watching(parser: argparse.ArgumentParser) -> None:
    """The options that aren't of the configuration."""
    add = functools.partial(_add, parser)
    add("--config", "what to watch: a file, or gs://bucket/file")
    add("--run", "without a file: the checkpoints of a training run, whose steps are exported as they are committed")
    add("--like", "of --run: the release that gives config, tokenizer, names and dtypes, a folder, gs:// or hf://; or maxtext.yml")
    add("--output", "of --run: where the steps go: a folder, gs://bucket/folder, or hf://owner/name with a branch for each")
    add("--every", "of --run: take the multiples of this step only")
    add("--kind", "of --run: a release (the default), one in FP8, or the parameters as an Orbax checkpoint")
    lora = "of --run: whether a LoRA run's steps become adapters for PEFT (the default), or --like with them in it"
    parser.add_argument("--lora", help=lora, choices=("adapter", "merged"))
    on_nan = "of --run: what becomes of a step with NaN or infinities: nothing; it is published, but not made the newest (the default); the newest"
    parser.add_argument("--on_nan", help=on_nan, choices=("hold", "publish", "newest"))
    add("--save_dtype", "of --run: as for export or reshard", metavar="DTYPE")
    add("--maxtext_model", "of --run: the MaxText model, where neither the checkpoints nor config.json settle it")
    add("--full_paths", f"of --run: {PATHS_HELP}")
    add("--once", "look once, do what there is to do, and end")
    add("--interval", "how often to look", default="15m")
    add("--retry", "have what was refused, held or failed of this model or run begin anew, and end")
    add("--serve", "take the hub's webhooks too; their secret is in WEIGHTBEAM_WEBHOOK_SECRET")


def add_shell(parser: argparse.ArgumentParser, json: bool, progress: bool) -> None:
    """The options of every command that say what a person sees; they are no keywords of the API."""
    group = parser.add_argument_group("what you see")
    add = functools.partial(_add, group)
    add("--dry_run", "say what would be done, and every problem; write nothing")
    if json:
        add("--json", "write the result as JSON too; - is standard output, with nothing else on it")
    if progress:
        told = "a bar, lines, or JSON lines on standard error (auto: a bar on a terminal, else lines)"
        add("--progress", told, default="auto")
    group.add_argument("-q", "--quiet", help="nothing but warnings, errors and --json -", **FLAG)
    group.add_argument("-v", "--verbose", help="more, such as what a refused checkpoint holds", **FLAG)
    add("--log_file", "add all messages to this file too")
