"""What each command may be told, said once: a dataclass for each, whose fields carry default, type, help and reader.

    class ExportOptions(ReleaseOptions):
        save_dtype: str = option("dtype of every float tensor; auto: as --like has it", AUTO, choices=(AUTO, *RELEASED))
        ─────────  ───           ──────────────────────────────────────────────────     ────  ─────────────────────────
        name       type          help                                                   default  reader, by name in `KINDS`

The command line (`pipelines/terminal/arguments/`), the API's signatures and their docstrings, the check of keywords
(`pipelines/terminal/keywords.py`), the targets in `watch.yaml`, Dataflow's template and `weightbeam/__init__.pyi` follow from
these. So a new option is one line here. A plan keeps its options as they are; `hashed` says which of them settle what
comes out. What changes no byte stands in `Delivery` and its kind. Imports neither numpy nor Beam: `--help` doesn't wait
for them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.versions import DEFAULT, VERSIONS
from weightbeam.transforms.planning.values import (
    amount,
    boolean,
    counts,
    distance,
    dtype_name,
    fraction,
    natural,
    naturals,
    positive,
    ranges,
    secret,
    size,
)

Kind = TypeVar("Kind")

AUTO, KEEP = "auto", "keep"  # dtypes: as the release has it, as the checkpoint has it
FULL, PARAMS = "full", "params"  # what of a training state is written
COMPUTED = ("bfloat16", "float32")  # dtypes of a checkpoint's arrays
CODED = "float8_e4m3fn"  # of arrays of codes, beside their scales
RELEASED = ("bfloat16", "float16", "float32")  # and of a release's tensors


class Unsaid(int):
    """The default of an option for which something better may be found where nobody gives it."""


UNIT_BYTES = Unsaid(128 << 20)
# An n2-standard-2 of Dataflow (batch, us-central1): list price in US$, 2 vCPUs × 0.056 + 8 GB × 0.003557, and 10 Gbit/s
# (cloud.google.com/dataflow/pricing, cloud.google.com/compute/docs/general-purpose-machines).
GBPS, HOUR_PRICE = 10.0, 0.14


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
      name: of the field, the keyword and, behind two hyphens, of the option.
      help: what it means, in the command line's words.
      default: where nobody gives it.
      read: reads its text, or raises `argparse.ArgumentTypeError`.
      choices: what it may be; empty for anything.
      metavar: what stands for its value.
      several: whether it may be given several times.
      raw: whether keywords are taken as they are: what they are read by is known later.
      group: the heading of the help page that it stands under.
      takes: the type of the keyword, as Python writes it; empty for that which `read` implies.
      short: its other name at the shell.
    """

    name: str
    help: str
    default: Any = None
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    several: bool = False
    raw: bool = False
    group: str = ""
    takes: str = ""
    short: str = ""

    @property
    def is_boolean(self) -> bool:
        """Whether it is true or false."""
        return self.read is boolean

    @property
    def annotation(self) -> str:
        """The type of the keyword."""
        types = {boolean: "bool", size: "int | str", natural: "int", positive: "int", counts: "Sequence[int]", naturals: "Sequence[int]"}
        types |= dict.fromkeys((amount, distance, fraction), "float")
        found = self.takes or ("str | Sequence[str]" if self.several else types.get(self.read, "str"))
        return f"{found} | None" if self.default is None else found


TRUTH: Mapping[str, Any] = dict(read=boolean, metavar="true|false")
KINDS: Mapping[str, Mapping[str, Any]] = {  # what an option takes, in whatever command
    "accept": dict(several=True, metavar="FIELD|FILE"),
    "adapter_only": TRUTH,
    "allow_links": TRUTH,
    "check_source": dict(choices=("true", "false", "auto")),
    "checkpoint": dict(metavar="URL"),
    "compression": dict(choices=("none", "zstd")),
    "create_pr": TRUTH,
    "dtype": dict(read=dtype_name, choices=RELEASED),
    "fail_over": dict(read=distance, metavar="X"),
    "experts": dict(read=ranges, metavar="A:B"),
    "family": dict(metavar="NAME|FILE.py"),
    "format": dict(choices=("fp8",)),
    "full_paths": TRUTH,
    "hf_token_secret": dict(read=secret, metavar="NAME"),
    "layers": dict(read=ranges, metavar="A:B,…"),
    "like": dict(metavar="URL"),
    "link": dict(choices=("hard", "symlink", "copy")),
    "lora": dict(several=True, metavar="PATH[,WEIGHT]"),
    "lora_alpha": dict(read=amount, metavar="ALPHA"),
    "max_shard_size": dict(read=size, metavar="BYTES"),
    "maxtext_config": dict(metavar="FILE"),
    "maxtext_model": dict(metavar="NAME"),
    "maxtext_patience": dict(read=amount, metavar="SECONDS"),
    "mesh": dict(several=True, metavar="AXES"),
    "moment_dtype": dict(read=dtype_name, choices=(KEEP, *COMPUTED)),
    "mtp": TRUTH,
    "multimodal": TRUTH,
    "output": dict(metavar="URL"),
    "overwrite": TRUTH,
    "prompt": dict(metavar="TEXT"),
    "param_scan_axis": dict(read=natural, metavar="N"),
    "quantize": dict(choices=("fp8",)),
    "resume": TRUTH,
    "sample": dict(read=fraction, metavar="SHARE"),
    "save_logits": dict(metavar="FILE"),
    "save_dtype": dict(read=dtype_name),
    "scan_layers": TRUTH,
    "sha256": TRUTH,
    "sharding_rules": dict(metavar="FILE", takes="str | Path | Mapping[str, Any] | Sequence[Any]"),
    "source": dict(metavar="URL"),
    "state": dict(choices=(FULL, PARAMS)),
    "step": dict(read=natural, metavar="N"),
    "token_ids": dict(read=naturals, metavar="N,N,…"),
    "tokenizer": dict(metavar="URL"),
    "tolerance": dict(read=distance, metavar="X"),
    "unit_bytes": dict(read=size, metavar="BYTES"),
    "use_ocdbt": TRUTH,
    "use_zarr3": TRUTH,
    "virtual": TRUTH,
    "vocab_rows": dict(read=positive, metavar="N"),
    "vocab_size": dict(read=positive, metavar="N"),
    "worker_gbps": dict(read=amount, metavar="GBPS"),
    "worker_hour_price": dict(read=amount, metavar="PRICE"),
    "workers": dict(read=counts, metavar="N,N,…"),
}  # fmt: skip


def option(help: str, default: Any = None, *, settles: bool = True, **about: Any) -> Any:
    """A field that is an option.

    Args:
      help: what it means.
      default: where nobody gives it.
      settles: whether a plan's hash depends on it; not where it names an input, whose content does.
      about: what `KINDS` doesn't say of its name, or says otherwise: fields of `Option`.
    """
    return dataclasses.field(default=default, metadata={"help": help, "settles": settles, "about": about})


def named(name: str, help: str, default: Any = None, **about: Any) -> Option:
    """The option of a name; `about` as of `option`."""
    return Option(name, help, default, **{**KINDS.get(name, {}), **about})


def options_of(kind: type) -> list[Option]:
    """The options of a class, in the order of its fields."""
    fields = [field for field in dataclasses.fields(kind) if "help" in field.metadata]
    return [named(each.name, each.metadata["help"], each.default, **each.metadata["about"]) for each in fields]


def hashed(options: Any) -> dict[str, Any]:
    """The options of a plan that settle what comes out, as JSON has them."""
    fields = [field.name for field in dataclasses.fields(options) if field.metadata.get("settles", True)]
    return {name: getattr(options, name) for name in fields}


def options_from(kind: type[Kind], said: Mapping[str, Any]) -> Kind:
    """The options that JSON holds; fields that this version doesn't know are left out."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _tuples(value) for name, value in said.items() if name in known})


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def options_as(kind: type[Kind], options: Any, **said: Any) -> Kind:
    """The options of one class as those of another: the fields that both have, and what is `said`."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    shared = {name: value for name, value in vars(options).items() if name in known}
    return kind(**shared | said)


# --- what stands in several commands ----------------------------------------------------------------------------------

PATHS_HELP = (
    "whether records and model cards name sources by their full paths, or by their names alone (default: paths in a "
    "folder, names on the hub; in gs:// names for what lies in this machine's folders)"
)
UNITS_HELP = (
    "bound on the memory of one unit of work, such as 64M "
    "(default: 128MiB, and smaller units where the workers are known)"
)
LORA_HELP = "a PEFT adapter to merge on the way: a folder, gs:// or hf://; may be repeated"
SOURCE_HELP = "config.json and the safetensors files: a folder, gs://bucket/folder, or hf://organisation/model[@revision]"
FAMILY_HELP = "the table; a file of your own has to be named, also where the checkpoint names it (default: the checkpoint's)"
RULES_HELP = "your logical_axis_rules, as for convert"
TOWERS_HELP = "true: with vision and audio towers, those of --like where the checkpoint has none; false: the language model alone"
ALPHA_HELP = "alpha of an adapter that MaxText trained, if its metadata lack it"
OF_CHECKPOINTS = "of an Orbax checkpoint"
LAYERS_HELP = "with --like's multi-token-prediction layers where the checkpoint has none"
OCDBT_HELP = "one database, or a folder for each array (Pathways: false)"
ZARR_HELP = "zarr version 3 or 2 (Pathways: false)"
COMPRESSION_HELP = "zstd saves about a fifth of the disk and slows loading"
MERGED_HELP = "a PEFT adapter to merge: a folder, gs:// or hf://; may be repeated"
STEP_HELP = "which step, where the root has several"
OUTPUT = "output"

GROUPS = ("what is read", "what is written", "", "layout", "storage", "simulation", OUTPUT)  # headings of help pages
_what, _written, _, _layout, _storage, _simulated, _output = (functools.partial(option, group=each) for each in GROUPS)
Adapters = tuple[tuple[str, float], ...]  # URL, and what its deltas are multiplied by
Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]  # what the file says


@dataclasses.dataclass(frozen=True)
class Token:
    """How a source is reached."""

    hf_token_secret: str | None = option("the version of a secret in Secret Manager that holds the hub's token, for all workers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Excerpt:
    """What is taken of a release, as if it held nothing else; None for all of it."""

    layers: str | None = _what("of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew")
    experts: str | None = _what("of each layer take these experts alone, such as 0:8, and their rows of the router")
    vocab_rows: int | None = _what("of the vocabulary take the first rows alone")

    @property
    def cut(self) -> Cut:
        """The excerpt as the `Cut` that a source is opened with."""
        return Cut(self.layers, self.experts, self.vocab_rows, getattr(self, "family", None))


@dataclasses.dataclass(frozen=True)
class Delivery:
    """How a result gets to its place: what changes no byte of it.

    Attributes:
      link: how the source's files get into a virtual checkpoint.
      sha256: read them once, and record their hashes.
      compared_with: releases that a new one is compared with on the way (`baselines.py`); no option, watchers say it.
      in_place: whether the source may be part of the checkpoint that is replaced, as it is where a virtual one is
        materialised.
      create_pr: whether the hub gets a pull request.
    """

    resume: bool = _output("go on with what a stopped command staged", False)
    overwrite: bool = _output("replace what is there, or throw away what a stopped command staged", False)
    link: str = "hard"
    sha256: bool = False
    compared_with: tuple[str, ...] = ()
    in_place: bool = False
    create_pr: bool = False


@dataclasses.dataclass(frozen=True)
class FromHub(Delivery, Token):
    """Of something that may be made of a release of the hub."""


@dataclasses.dataclass(frozen=True)
class ToHub(FromHub):
    """Of something that may go to the hub."""

    create_pr: bool = _output("on the hub, open a pull request", False)


@dataclasses.dataclass(frozen=True)
class Linking(FromHub):
    """Of a checkpoint that may refer to its source's files."""

    link: str = _output("how --virtual puts the source's files into a folder (into a bucket: copy)", "hard")
    sha256: bool = _output("with --virtual, read the source's files once and record their hashes", False)


# --- an Orbax checkpoint is written -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConvertOptions(Excerpt):
    """Of a conversion, as far as they change a byte or a chunk's key."""

    scan_layers: bool = _layout("stack the layers of a kind in one array, as in MaxText", True)
    param_scan_axis: int = _layout("where the stacked axis goes, as in MaxText", 1)
    save_dtype: str = _layout(f"dtype of every float array; computed in float32, cast once. {CODED}: FP8 weights stay codes, "
                              "each with its scales beside it, and everything else in its own dtype", "bfloat16", choices=(*COMPUTED, CODED))
    quantize: str | None = _what(f"fp8: quantise the linear layers and fused experts on the way, with the codes of weightbeam quantize; needs --save_dtype {CODED}")
    mesh: tuple[str, ...] = _layout("the mesh that loads it, such as fsdp=16,expert=4; repeat it for several (default: fit for any)", ())
    sharding_rules: Rules | None = _layout("your logical_axis_rules: a MaxText config (YAML), or JSON (default: those of MaxText's base.yml)")
    maxtext_model: str | None = _what("the MaxText model, such as llama3.1-8b, where config.json can't settle it")
    maxtext: str = _what("the version of MaxText whose tree and names of axes are written: 0.2.5 of PyPI, or its main branch in August 2026", DEFAULT, choices=VERSIONS)
    family: str | None = _what("the table: one of ours, an installed package's, a file of your own, or identity (default: by config.json)")
    vocab_size: int | None = _what("rows of MaxText's embedding: more pads with zeros, fewer cuts")
    mtp: bool = _what("convert the multi-token-prediction layers too", False)
    check_source: str = _what("compare the source's bytes with the hashes that its store states: auto: on the way, where a bucket does; "
                              "true: all of them, in a read of their own; false: none", "auto")
    allow_links: bool = _what("take files of the source that are links to another folder", False)
    multimodal: bool = _what("convert the vision and audio towers too", False)
    lora: Adapters = _what(MERGED_HELP, ())
    adapter_only: bool = _what("write the adapter as MaxText's, and don't merge it", False)
    use_ocdbt: bool = _storage(OCDBT_HELP, True)
    use_zarr3: bool = _storage(ZARR_HELP, True)
    compression: str = _storage(COMPRESSION_HELP, "none")
    unit_bytes: int = _storage(UNITS_HELP, UNIT_BYTES)
    step: int = _storage("the step under which the checkpoint is written", 0)
    virtual: bool = _storage("refer to the source's files for every array that lies in them already", False)
    full_paths: bool | None = _storage(PATHS_HELP)


@dataclasses.dataclass(frozen=True)
class MaterializeOptions:
    """What a virtual checkpoint leaves open; None for what it says itself."""

    mesh: tuple[str, ...] = option("target sharding, such as fsdp=16,expert=4 (default: that of the virtual checkpoint)", ())
    sharding_rules: Rules | None = option(f"{RULES_HELP} (default: those of the virtual checkpoint)", raw=True)
    use_ocdbt: bool = option(OCDBT_HELP, True)
    use_zarr3: bool = option(ZARR_HELP, True)
    compression: str = option(COMPRESSION_HELP, "none")
    unit_bytes: int = option(UNITS_HELP, UNIT_BYTES)
    step: int | None = option("the step under which it is written (default: that of the virtual checkpoint)")
    family: str | None = option(FAMILY_HELP)


@dataclasses.dataclass(frozen=True)
class ReshardOptions:
    """Of a reshard, as far as they change a byte or a chunk's key; None for what the checkpoint has."""

    layers: str | None = _written("take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew")
    experts: str | None = _written("of each layer take these experts alone, such as 0:8, and what the router has of them")
    state: str = _written("params leaves out the optimizer and the rest, and calls the weights params.params", FULL)
    save_dtype: str = _written("dtype of the weights; computed in float32, cast once", KEEP, choices=(KEEP, *COMPUTED))
    moment_dtype: str = _written("dtype of the optimizer's moments", KEEP)
    scan_layers: bool | None = _layout("stack the layers of a kind in one array, or take them apart (default: as they are)")
    param_scan_axis: int | None = _layout("where the stacked axis goes (default: where it is)")
    mesh: tuple[str, ...] = _layout("the mesh that loads it, such as fsdp=64; may be repeated (default: chunks stay as they are)", ())
    sharding_rules: Rules | None = _layout(RULES_HELP)
    maxtext: str | None = _layout("the version of MaxText whose tree and names of axes are written (default: the source's)", choices=VERSIONS)
    maxtext_model: str | None = _layout("the MaxText model, where config.json can't settle it, or in place of --like")
    family: str | None = _layout("the table, as for convert (default: by config.json)")
    use_ocdbt: bool | None = _storage("one database, or a folder for each array (Pathways: false; default: as the source)")
    use_zarr3: bool | None = _storage("zarr version 3 or 2 (Pathways: false; default: as the source)")
    compression: str | None = _storage("of every array (default: as it is where chunks are copied, else none)")
    unit_bytes: int = _storage(UNITS_HELP, UNIT_BYTES)
    step: int | None = _written("which step, where the source has several; and the one that is written (default: the source's)")
    lora: Adapters = _written("an adapter that MaxText trained, to merge: its Orbax checkpoint; may be repeated", (), metavar="CKPT[,WEIGHT]")
    lora_alpha: float | None = _written(ALPHA_HELP)
    full_paths: bool | None = _storage(PATHS_HELP)
    like: str | None = _layout("a release of the model, if the checkpoint doesn't remember one: its table names axes and layers", settles=False)
    maxtext_config: str | None = _layout("the run's MaxText configuration (.yml), in place of --like", settles=False)


# --- a release is written ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """Of every command that writes a release."""

    max_shard_size: int | None = option("bytes of tensors in a file, such as 5GB (default: as --source)")
    unit_bytes: int = option(UNITS_HELP, UNIT_BYTES)
    full_paths: bool | None = option(PATHS_HELP)


@dataclasses.dataclass(frozen=True)
class ExportOptions(ReleaseOptions):
    """Of an export; None for what the checkpoint, or the release that it should be like, says.

    Attributes:
      quantize: what `weightbeam quantize` writes of a checkpoint: the weights of linear layers, as `--format` says.
    """

    like: str | None = option("the release whose config.json, tokenizer, names and dtypes are taken: a folder, gs:// or hf://", settles=False)
    save_dtype: str = option(f"dtype of every float tensor; auto: as --like has it, without a release bfloat16; {CODED}: FP8 codes and scales of the checkpoint "
                             "as they are", AUTO, choices=(AUTO, *RELEASED, CODED))
    maxtext_model: str | None = option("the MaxText model, where neither the checkpoint nor config.json settles it")
    param_scan_axis: int | None = option("where the layers are stacked, where the shapes fit several axes")
    max_shard_size: int | None = option("bytes of tensors in a file, such as 5GB (default: as --like, else 5GB)")
    step: int | None = option(STEP_HELP, settles=False)
    lora: Adapters = option(LORA_HELP, ())
    lora_alpha: float | None = option(ALPHA_HELP, settles=False)
    family: str | None = option("the table: one of ours, an installed package's or a file of your own (default: by config.json)")
    maxtext_config: str | None = option("a MaxText configuration (.yml) to make config.json of, for a model without a release", settles=False)
    tokenizer: str | None = option("a folder, gs:// or hf:// whose tokenizer, chat template and processor are taken", settles=False)
    multimodal: bool | None = option(TOWERS_HELP)
    mtp: bool = option(LAYERS_HELP, False)
    quantize: str | None = None


@dataclasses.dataclass(frozen=True)
class MergeOptions(ReleaseOptions, Excerpt):
    """Of a merge; and what the other commands are that make a release of a release.

    Attributes:
      dequantize: write every quantised weight as its values.
      save_dtype: of these values; None for the model's.
      quantize: `fp8`: write the weights of linear layers so.
    """

    lora: Adapters = option(MERGED_HELP, ())
    family: str | None = option("the table whose spellings of names count (default: by config.json)")
    dequantize: bool = False
    save_dtype: str | None = None
    quantize: str | None = None


@dataclasses.dataclass(frozen=True)
class CutOptions(ReleaseOptions, Excerpt):
    """Of a part of a release."""

    family: str | None = option("the table that says where layers and experts are (default: by config.json)")


@dataclasses.dataclass(frozen=True)
class DequantizeOptions(ReleaseOptions, Excerpt):
    """Of a dequantisation."""

    save_dtype: str | None = option("dtype of the values (default: what config.json says)", choices=RELEASED)


@dataclasses.dataclass(frozen=True)
class QuantizeOptions(ReleaseOptions, Excerpt):
    """Of a quantisation; the source is a release or an Orbax checkpoint."""

    format: str = option("what the weights of linear layers become", "fp8")
    like: str | None = option("a release in FP8, whose scales come back where values didn't change; of an Orbax checkpoint as for export")
    lora: Adapters = option(LORA_HELP, ())
    maxtext_model: str | None = option(f"{OF_CHECKPOINTS}: the MaxText model, where neither it nor config.json settles it")
    param_scan_axis: int | None = option(f"{OF_CHECKPOINTS}: where the layers are stacked, where its shapes fit several axes")
    step: int | None = option(f"{OF_CHECKPOINTS}: {STEP_HELP}")
    multimodal: bool | None = option(f"{OF_CHECKPOINTS}: {TOWERS_HELP}")
    mtp: bool = option(f"{OF_CHECKPOINTS}: {LAYERS_HELP}", False)


# --- nothing is written -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Simulation:
    """On what a planned conversion would run."""

    workers: tuple[int, ...] = _simulated("simulate it on N workers, such as 1,10,100: time and cost, on Dataflow or --runner's cluster", ())
    worker_gbps: float = _simulated("a worker's network in Gbit/s (10^9 bits), each way", GBPS)
    worker_hour_price: float = _simulated("of a worker with 2 vCPUs and 8 GB, in any currency", HOUR_PRICE)


@dataclasses.dataclass(frozen=True)
class VerifyOptions(Token):
    """Of a comparison of a checkpoint with its source; None for what the checkpoint says."""

    like: str | None = option("of an export: the release that its towers were taken from, if it has moved since")
    accept: tuple[str, ...] = option("of an export: a field of config.json, or another small file, that may be another than the export wrote", ())
    lora: Adapters = option("an adapter that was merged, if it has moved since", ())
    sample: float = option("compare only this share of each array's tensors, such as 0.05, but one at least", 1.0)
    maxtext_model: str | None = option("the MaxText model, such as llama3.1-8b, where neither config.json nor the checkpoint can settle it")
    scan_layers: bool | None = option("whether layers are stacked (default: as the checkpoint says)")
    param_scan_axis: int | None = option("where the stacked axis is (default: as the checkpoint says)")
    family: str | None = option(FAMILY_HELP)


@dataclasses.dataclass(frozen=True)
class DiffOptions(Token):
    """Of a comparison of any two checkpoints."""

    tolerance: float = option("the largest absolute difference of an element that counts as none", 0.0)
    fail_over: float | None = option("end with status 1 only where a tensor's relative change is over X: |a - b| / |a|, of its norms")
    state: str = option("of two training states params compares the weights alone, full the optimizer and the rest, too", FULL)
    maxtext_model: str | None = option("the MaxText model, where one is an Orbax checkpoint and neither can settle it")
    family: str | None = option("the table (default: by config.json)")


@dataclasses.dataclass(frozen=True)
class LogitsOptions(Excerpt, Token):
    """Of a model that is run on some tokens."""

    prompt: str | None = option("text, which the release's tokenizer makes tokens of")
    token_ids: tuple[int, ...] = option("tokens by their numbers, such as 1,15043,3186, in place of --prompt", ())
    dtype: str = option("of the weights as they are computed with, and so of the arithmetic", "float32")
    tolerance: float | None = option("the relative difference of what a layer makes, |a - b| / |a|, that counts as none (default: 0, with --maxtext 1e-4)")
    maxtext: str | None = option("compare with MaxText itself: the Python of an environment that has it; converts the release into a temporary folder", metavar="PYTHON")
    maxtext_model: str | None = option("the MaxText model, where neither config.json nor the checkpoint can settle it")
    maxtext_patience: float = option("seconds that MaxText may take to begin, and for each layer", 1800.0)
    save_logits: str | None = option("write the logits (token, vocab) too, as numpy's .npy")


@dataclasses.dataclass(frozen=True)
class InspectOptions(Excerpt):
    """Of a look at a checkpoint; None for what it says."""

    mesh: tuple[str, ...] = option("what loading costs on a mesh, such as fsdp=16,expert=4; may be repeated", ())
    sharding_rules: Rules | None = option(f"{RULES_HELP} (default: those that it was made for)", raw=True)
    source: str | None = option("folder with the model's config.json, for a checkpoint that doesn't tell its logical axes", metavar="FOLDER")
    maxtext_model: str | None = option("the MaxText model, where neither config.json nor the checkpoint can settle it")
