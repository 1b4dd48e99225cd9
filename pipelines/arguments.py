"""The command line's options, without Beam: `--help` must not wait for it."""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, cast

import weightbeam
from weightbeam.transforms.options import Options

DEFAULTS = Options()
UNITS_HELP = "bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the workers are known)"


class Unsaid(int):
    """The default of an option for which something better may be found where nobody gives it."""


UNIT_BYTES = Unsaid(DEFAULTS.unit_bytes)
PROGRESS = ("auto", "bar", "lines", "json", "none")
# An n2-standard-2 of Dataflow (batch, us-central1): list price in US$, 2 vCPUs × 0.056 + 8 GB × 0.003557, and 10 Gbit/s
# (cloud.google.com/dataflow/pricing, cloud.google.com/compute/docs/general-purpose-machines).
GBPS, HOUR_PRICE = 10.0, 0.14

OVERVIEW = """\
Weightbeam moves model weights between Hugging Face releases and MaxText or JAX.

  weightbeam plan    hf://Qwen/Qwen3-8B        what would happen
  weightbeam convert hf://Qwen/Qwen3-8B ckpt   into an Orbax checkpoint
  weightbeam verify  ckpt                      is every element right?
  weightbeam inspect ckpt                      what a checkpoint holds
  weightbeam export  ckpt tuned                back into a Hugging Face release
"""

PLAN = """\
Reads config.json and the headers of the safetensors files, and says what a conversion would do: arrays, chunks,
units, bytes, memory, what is lossy, what is left out and why, and every problem. It writes nothing but --json FILE.
The last line says whether the conversion can go ahead, and the command.

  weightbeam plan ~/models/Qwen3-8B
  weightbeam plan hf://deepseek-ai/DeepSeek-V3 --mesh fsdp=64 --workers 1,10,100

With --workers it simulates the conversion on so many workers of Dataflow, or of Flink
with --runner=FlinkRunner, from a bucket or the hub into a bucket: the time, the cost, and what limits them. `weightbeam help running` says what it assumes.

`weightbeam plan COMMAND …` plans another command, such as `weightbeam plan materialize ckpt new`.

Exit status: 0 the conversion can go ahead, 2 it can't.
"""

CONVERT = """\
Converts a checkpoint as one Beam pipeline: on this machine's cores by default, elsewhere with Beam's --runner. The
result lies in OUTPUT/STEP and loads in MaxText with load_parameters_path=OUTPUT/STEP/items. It appears there whole,
at the end. A conversion that was stopped goes on with --resume.

  weightbeam convert hf://Qwen/Qwen3-8B gs://bucket/qwen3-8b
  weightbeam convert ~/models/Llama-3.1-8B ckpt --mesh fsdp=16
  weightbeam convert ~/models/Qwen3-8B ckpt --scan_layers false

Every option of Beam's passes through, such as --direct_num_workers (threads of a local run).

Exit status: 0 done, 1 failed on the way, 2 refused before any work, 130 after Ctrl-C.
"""

INSPECT = """\
Shows what a checkpoint holds: the arrays of an Orbax checkpoint (ours or anyone's; its root, a step or an item), or
the tensors of a folder of safetensors files: shapes, dtypes, chunks and bytes.

With --mesh it says what loading an Orbax checkpoint costs on that mesh: bytes read by the bytes needed, and the
number of reads, for hosts with one device each (one with several reads no more than they do together). That needs the
logical axes of the arrays: Weightbeam's checkpoints tell them; for others, --source names a folder with the model's
config.json.

  weightbeam inspect ckpt
  weightbeam inspect ckpt --mesh fsdp=16 --mesh fsdp=8,tensor=2
  weightbeam inspect maxtext/0/items --mesh fsdp=16 --source ~/models/Llama
"""


FIT = """\
Compares what MaxText must be told of a release, from its config.json, with what one of MaxText's models or a file says: each
key that differs, what is needed, what is said, and what the difference would do. Says too what MaxText can't express. Reads
no weights.

  weightbeam fit ~/models/Qwen3-8B qwen3-8b
  weightbeam fit hf://Qwen/Qwen3-8B my_model.yml

Exit status: 0 it fits, 1 something differs, 2 it can't be compared.
"""

VERIFY = """\
Compares every element of a checkpoint with the tensors it was made of, in a way of its own: it reads the arrays back,
turns them into the tensors' layout, and says which are exact, which are rounded as documented, and which are
different, with the tensor and the first index. Works on checkpoints that MaxText's own converter wrote, too. As a
Beam pipeline: Beam's options pass through.

  weightbeam verify ckpt
  weightbeam verify ~/models/Qwen3-8B ckpt --sample 0.05

What isn't given is taken from the checkpoint: its source, its layout, its vocabulary, and whether it has MTP layers or towers.

Exit status: 0 all of it is right, 1 something differs, 2 it can't be compared.
"""


MATERIALIZE = """\
Makes an ordinary checkpoint of a virtual one: the same arrays, in chunks for a mesh, without any file of the source.
First it makes sure that the files which the checkpoint refers to are those it was made of. As a Beam pipeline: Beam's
options pass through.

  weightbeam materialize ckpt ordinary --mesh fsdp=16

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
  weightbeam diff hf://Qwen/Qwen3-8B ckpt/0/items --tolerance 1e-2

Exit status: 0 the same within the tolerance, 1 not, 2 they can't be compared.
"""


RESHARD = """\
Writes an Orbax checkpoint anew: cut for another mesh, with layers stacked or apart, in another dtype or storage, with or without
the optimizer. The checkpoint may be anyone's: one of Weightbeam's, of MaxText's training with all of its state, of post-training.
Chunks that fit already are copied as they are encoded; each other chunk is decoded once. As a Beam pipeline.

  weightbeam reshard ckpt ckpt64 --mesh fsdp=64
  weightbeam reshard run/checkpoints/1000 served --state params
  weightbeam reshard run/checkpoints/1000 apart --scan_layers false \\
      --like hf://Qwen/Qwen3-8B
  weightbeam reshard ckpt merged --lora run/checkpoints/500

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


EXPORT = """\
Writes an Orbax checkpoint as a Hugging Face release: safetensors files and index, config.json, tokenizer and the other small
files. The checkpoint may be one of Weightbeam's, of MaxText's converter, or one that MaxText's training wrote. What it remembers
of its release, or --like, says how the release should look. Values are computed in float32 and cast once. As a Beam pipeline.

  weightbeam export ckpt qwen3-8b-tuned
  weightbeam export run/checkpoints/1000 tuned --like hf://Qwen/Qwen3-8B

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


DEQUANTIZE = """\
Writes a quantised release with the values of its weights: computed in float32, cast once. What isn't quantised is carried over byte
for byte, config.json loses its quantization_config, and the other small files stay as they are. Every format that convert reads.

  weightbeam dequantize hf://deepseek-ai/DeepSeek-V3 deepseek-v3-bf16

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


QUANTIZE = """\
Writes the linear layers of a model as FP8 in blocks of 128 × 128, in DeepSeek's layout, which vLLM, SGLang and transformers load:
codes, and a float32 scale for each block. Embeddings, norms, routers, the head and towers stay as they are, and config.json names
them. The source is a release, or an Orbax checkpoint, which is exported in the same pass. As a Beam pipeline.

  weightbeam quantize --source ~/models/Qwen3-8B --output qwen3-8b-fp8
  weightbeam quantize run/checkpoints/1000 tuned-fp8 --like hf://Qwen/Qwen3-8B

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


MERGE = """\
Merges PEFT adapters into a release: the same safetensors files with the adapters in them, all else as it was. In float32 with one
cast; what no adapter reaches is carried over byte for byte, quantised weights included. As a Beam pipeline.

  weightbeam merge hf://Qwen/Qwen3-8B qwen3-8b-tuned --lora my-adapter
  weightbeam merge ~/models/Qwen3-8B both --lora math,0.7 --lora code,0.3

Exit status: 0 done, 1 failed on the way, 2 refused before any work.
"""


WATCH = """\
Converts the releases of the hub that a configuration asks for: looks for models that match, waits until a release is
complete, refuses it with the reason or converts, verifies and publishes it, and records each step in the output. Any
number of watchers may run at once. `weightbeam help watching` explains the configuration.

With --run it follows a training run instead: each step, once committed, becomes a release that transformers loads, compared with
the checkpoint, published and announced. `weightbeam help following` explains it.

  weightbeam watch --config watch.yaml --dry_run        what would be done
  weightbeam watch --config watch.yaml --once           for schedulers
  weightbeam watch --config gs://bucket/watch.yaml --interval 15m --serve 8080
  weightbeam watch --run gs://bucket/run/checkpoints --like hf://Qwen/Qwen3-8B \\
      --output hf://me/qwen3-8b-tuned --every 1000

Exit status: 0 nothing failed, 1 something did, 2 the configuration is refused.
"""

MODELS = """\
Lists the families that can be converted: the model_type of their config.json, MaxText's models among them, and what of them is supported.
"""

HELP = """\
Prints a page of the manual.
"""

COMPLETION = """\
Prints a script that completes commands and options for your shell.

  weightbeam completion bash >> ~/.bashrc
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are told in a line or two, with what may have been meant."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            commands = re.findall("'(.*?)'", wrong[2])
            message = f"no command {wrong[1]!r}{did_you_mean(wrong[1], commands)}; weightbeam --help lists them"
        self.exit(2, f"{self.format_usage()}{self.prog}: {message}\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` where something like it is known."""
    near = difflib.get_close_matches(word, list(known), 1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


class _Formatter(argparse.HelpFormatter):
    """Fits the texts to the terminal, but for lines that begin with blanks; shows the defaults that say something."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = itertools.groupby(text.splitlines(), key=lambda line: not line or line.startswith(" "))
        lines = [list(block) if as_it_is else textwrap.wrap(" ".join(block), width) for as_it_is, block in blocks]
        return "".join(f"{indent}{line}\n" for line in itertools.chain.from_iterable(lines))

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
        raise argparse.ArgumentTypeError(
            "it should be the name of a secret, projects/PROJECT/secrets/SECRET/versions/latest, and no token"
        )
    return text


def fraction(text: str) -> float:
    """A number above 0, up to 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0 and up to 1")
    return number


def size(text: str) -> int:
    """Bytes: a number, or one with K, M, G or T (or KiB, …: of 1024) or with KB, MB, GB or TB (of 1000), in letters of
    either case.
    """
    found = re.fullmatch(r"([0-9]+) *(?:([kmgt])(i?b)?|b)?", text.strip().lower(), re.ASCII)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} should be bytes, such as 134217728 or 128MiB")
    power = " kmgt".index(found[2] or " ")
    return int(found[1]) * (1000 if found[3] == "b" else 1024) ** power


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
    what = parser.add_argument_group("what is converted")
    add = what.add_argument
    add(
        "--source",
        metavar="URL",
        help="config.json and the safetensors files: a folder, gs://bucket/folder, or hf://organisation/model[@revision]",
    )
    add(
        "--maxtext_model",
        metavar="NAME",
        help="the MaxText model, such as llama3.1-8b, where config.json can't settle it",
    )
    add(
        "--family",
        metavar="NAME|FILE.py",
        help="the table: one of ours, an installed package's, a file of your own, or identity (default: by config.json)",
    )
    add(
        "--vocab_size", type=positive, metavar="N", help="rows of MaxText's embedding: more pads with zeros, fewer cuts"
    )
    add(
        "--mtp",
        type=boolean,
        default=DEFAULTS.mtp,
        metavar="true|false",
        help="convert the multi-token-prediction layers too",
    )
    add(
        "--check_source",
        choices=("true", "false", "auto"),
        default=DEFAULTS.check_source,
        help="compare the source's bytes with their known hashes: auto those of a bucket on their way, true all of them, reading the files once more",
    )
    add(
        "--allow_links",
        type=boolean,
        default=DEFAULTS.allow_links,
        metavar="true|false",
        help="take files of the source that are links to another folder",
    )
    add(
        "--multimodal",
        type=boolean,
        default=DEFAULTS.multimodal,
        metavar="true|false",
        help="convert the vision and audio towers too",
    )
    add(
        "--lora",
        action="append",
        metavar="PATH[,WEIGHT]",
        help="a PEFT adapter to merge: a folder, gs:// or hf://; may be repeated",
    )
    add(
        "--adapter_only",
        type=boolean,
        default=DEFAULTS.adapter_only,
        metavar="true|false",
        help="write the adapter as MaxText's, and don't merge it",
    )
    add(
        "--hf_token_secret",
        type=secret,
        metavar="NAME",
        help="the version of a secret in Secret Manager that holds the hub's token, for all workers",
    )
    add = parser.add_argument_group("layout of the checkpoint").add_argument
    add(
        "--scan_layers",
        type=boolean,
        default=DEFAULTS.scan_layers,
        metavar="true|false",
        help="stack the layers of a kind in one array, as in MaxText",
    )
    add(
        "--param_scan_axis",
        type=natural,
        default=DEFAULTS.param_scan_axis,
        metavar="N",
        help="where the stacked axis goes, as in MaxText",
    )
    add(
        "--save_dtype",
        choices=("bfloat16", "float32"),
        default=DEFAULTS.save_dtype,
        help="dtype of every float array; computed in float32, cast once",
    )
    add(
        "--mesh",
        action="append",
        metavar="AXES",
        help="the mesh that loads it, such as fsdp=16,expert=4; repeat it for several (default: fit for any)",
    )
    add(
        "--sharding_rules",
        metavar="FILE",
        help="your logical_axis_rules: a MaxText config (YAML), or JSON (default: those of MaxText's base.yml)",
    )
    add = parser.add_argument_group("storage").add_argument
    add(
        "--use_ocdbt",
        type=boolean,
        default=DEFAULTS.use_ocdbt,
        metavar="true|false",
        help="one database, or a folder for each array (Pathways: false)",
    )
    add(
        "--use_zarr3",
        type=boolean,
        default=DEFAULTS.use_zarr3,
        metavar="true|false",
        help="zarr version 3 or 2 (Pathways: false)",
    )
    add(
        "--compression",
        choices=("none", "zstd"),
        default=DEFAULTS.compression,
        help="zstd saves about a fifth of the disk and slows loading",
    )
    add("--unit_bytes", type=size, default=UNIT_BYTES, metavar="BYTES", help=UNITS_HELP)
    add(
        "--step",
        type=natural,
        default=DEFAULTS.step,
        metavar="N",
        help="the step under which the checkpoint is written",
    )
    add(
        "--virtual",
        action="store_true",
        default=False,
        help="refer to the source's files for every array that lies in them already",
    )


def add_fit(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison with a MaxText configuration."""
    add = parser.add_argument
    add(
        "--source",
        metavar="URL",
        help="where config.json is: a folder, gs://bucket/folder, or hf://organisation/model[@revision]",
    )
    add("--maxtext_model", metavar="NAME|FILE", help="the name of a MaxText model, or a .yml that says its keys")


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """The options of a plan that say on what the conversion would run."""
    add = parser.add_argument_group("simulation").add_argument
    add(
        "--workers",
        type=counts,
        metavar="N,N,…",
        help="simulate it on N workers, such as 1,10,100: time and cost, on Dataflow or --runner's cluster",
    )
    add(
        "--worker_gbps",
        type=amount,
        default=GBPS,
        metavar="GBPS",
        help="a worker's network in Gbit/s (10^9 bits), each way",
    )
    add(
        "--worker_hour_price",
        type=amount,
        default=HOUR_PRICE,
        metavar="PRICE",
        help="of a worker with 2 vCPUs and 8 GB, in any currency",
    )


def add_verification(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison; None stands for what the checkpoint says."""
    add = parser.add_argument
    add("--source", metavar="URL", help="where config.json and the safetensors files are: a folder, gs:// or hf://")
    add(
        "--checkpoint", metavar="URL", help="the Orbax checkpoint: its root, a step or an item, in a folder or in gs://"
    )
    add(
        "--lora",
        action="append",
        metavar="PATH[,WEIGHT]",
        help="an adapter that was merged, where it isn't where the checkpoint says",
    )
    add(
        "--sample",
        type=fraction,
        default=1.0,
        metavar="SHARE",
        help="compare only this share of each array's tensors, such as 0.05, but one at least",
    )
    add(
        "--maxtext_model",
        metavar="NAME",
        help="the MaxText model, such as llama3.1-8b, where neither config.json nor the checkpoint can settle it",
    )
    add("--scan_layers", type=boolean, metavar="true|false", help="whether layers are stacked")
    add("--param_scan_axis", type=natural, metavar="N", help="where the stacked axis is (default: 1)")
    add(
        "--hf_token_secret",
        type=secret,
        metavar="NAME",
        help="the version of a secret in Secret Manager that holds the hub's token, for all workers",
    )


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison of any two checkpoints."""
    add = parser.add_argument
    add("a", metavar="A", help="a release or an Orbax checkpoint: a folder, gs:// or (releases) hf://")
    add("b", metavar="B", help="another")
    add(
        "--tolerance",
        type=distance,
        default=0.0,
        metavar="X",
        help="the largest absolute difference of an element that counts as none",
    )
    add(
        "--maxtext_model",
        metavar="NAME",
        help="the MaxText model, where one is an Orbax checkpoint and neither can settle it",
    )
    add("--family", metavar="NAME|FILE.py", help="the table (default: by config.json)")
    add(
        "--hf_token_secret",
        type=secret,
        metavar="NAME",
        help="the version of a secret in Secret Manager that holds the hub's token",
    )


def add_inspection(parser: argparse.ArgumentParser) -> None:
    """The options of an inspection; None stands for what the checkpoint says."""
    add = parser.add_argument
    add(
        "--checkpoint",
        metavar="URL",
        help="an Orbax checkpoint or safetensors files, in a folder, gs:// or (safetensors) hf://",
    )
    add(
        "--mesh",
        action="append",
        metavar="AXES",
        help="what loading costs on a mesh, such as fsdp=16,expert=4; may be repeated",
    )
    add(
        "--sharding_rules",
        metavar="FILE",
        help="your logical_axis_rules, as for convert (default: those that it was made for)",
    )
    add(
        "--source",
        metavar="FOLDER",
        help="folder with the model's config.json, for a checkpoint that doesn't tell its logical axes",
    )
    add(
        "--maxtext_model",
        metavar="NAME",
        help="the MaxText model, where neither config.json nor the checkpoint can settle it",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """The options that say where the checkpoint goes."""
    add = parser.add_argument_group("output").add_argument
    add(
        "--output",
        metavar="URL",
        help="where the checkpoint goes: a folder or gs://bucket/folder; it must not hold that step yet",
    )
    add(
        "--link",
        choices=("hard", "symlink", "copy"),
        default="hard",
        help="how --virtual puts the source's files into a folder (into a bucket: copy)",
    )
    add(
        "--sha256",
        action="store_true",
        default=False,
        help="with --virtual, read the source's files once and record their hashes",
    )
    add("--resume", action="store_true", default=False, help="go on with a stopped conversion")
    add(
        "--overwrite",
        action="store_true",
        default=False,
        help="replace a checkpoint, or throw a stopped conversion away",
    )


def add_rewriting(parser: argparse.ArgumentParser) -> None:
    """The options of every command that makes a release of a release."""
    add = parser.add_argument
    add(
        "--source",
        metavar="URL",
        help="the release: a folder, gs://bucket/folder, or hf://organisation/model[@revision]",
    )
    add(
        "--output",
        metavar="URL",
        help="a folder or gs://bucket/folder for the new release, which must not be there yet; or hf://owner/name: one commit there",
    )
    add("--create_pr", action="store_true", default=False, help="on the hub, open a pull request")
    add(
        "--max_shard_size",
        type=size,
        metavar="BYTES",
        help="bytes of tensors in a file, such as 5GB (default: as --source)",
    )
    add("--unit_bytes", type=size, default=UNIT_BYTES, metavar="BYTES", help=UNITS_HELP)
    add("--resume", action="store_true", default=False, help="go on with a stopped command")
    add(
        "--overwrite",
        action="store_true",
        default=False,
        help="replace a release, or throw away what a stopped command staged",
    )
    add(
        "--hf_token_secret",
        type=secret,
        metavar="NAME",
        help="the version of a secret in Secret Manager that holds the hub's token",
    )


def add_merge(parser: argparse.ArgumentParser) -> None:
    """The options of a merge."""
    add_rewriting(parser)
    parser.add_argument(
        "--family", metavar="NAME|FILE.py", help="the table whose spellings of names count (default: by config.json)"
    )
    parser.add_argument(
        "--lora",
        action="append",
        metavar="PATH[,WEIGHT]",
        help="a PEFT adapter to merge: a folder, gs:// or hf://; may be repeated",
    )


def add_dequantization(parser: argparse.ArgumentParser) -> None:
    """The options of a dequantisation."""
    add_rewriting(parser)
    parser.add_argument(
        "--save_dtype",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of the values (default: what config.json says)",
    )


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """The options of a quantisation."""
    add_rewriting(parser)
    add = parser.add_argument
    add("--format", choices=("fp8",), default="fp8", help="what the weights of linear layers become")
    add(
        "--like",
        metavar="URL",
        help="a release in FP8, whose scales come back where values didn't change; of an Orbax checkpoint as for export",
    )
    add(
        "--lora",
        action="append",
        metavar="PATH[,WEIGHT]",
        help="a PEFT adapter to merge on the way: a folder, gs:// or hf://; may be repeated",
    )
    add(
        "--maxtext_model",
        metavar="NAME",
        help="of an Orbax checkpoint: the MaxText model, where neither it nor config.json settles it",
    )
    add(
        "--param_scan_axis",
        type=natural,
        metavar="N",
        help="of an Orbax checkpoint: where the layers are stacked, where its shapes fit several axes",
    )
    add("--step", type=natural, metavar="N", help="of an Orbax checkpoint: which step, where the root has several")


def add_materialization(parser: argparse.ArgumentParser) -> None:
    """The options that a virtual checkpoint leaves open."""
    add = parser.add_argument
    add(
        "--checkpoint",
        metavar="URL",
        help="the virtual checkpoint: its root, a step or an item, in a folder or in gs://",
    )
    add(
        "--output", metavar="URL", help="a folder or gs://bucket/folder for the new one; it must not hold that step yet"
    )
    add("--resume", action="store_true", default=False, help="go on with a stopped one")
    add(
        "--overwrite",
        action="store_true",
        default=False,
        help="replace a checkpoint, in a folder also the virtual one itself",
    )
    add(
        "--mesh",
        action="append",
        metavar="AXES",
        help="target sharding, such as fsdp=16,expert=4 (default: that of the virtual checkpoint)",
    )
    add(
        "--sharding_rules",
        metavar="FILE",
        help="your logical_axis_rules, as for convert (default: those of the virtual checkpoint)",
    )
    add(
        "--use_ocdbt",
        type=boolean,
        default=DEFAULTS.use_ocdbt,
        metavar="true|false",
        help="one database, or a folder for each array (Pathways: false)",
    )
    add(
        "--use_zarr3",
        type=boolean,
        default=DEFAULTS.use_zarr3,
        metavar="true|false",
        help="zarr version 3 or 2 (Pathways: false)",
    )
    add(
        "--compression",
        choices=("none", "zstd"),
        default=DEFAULTS.compression,
        help="zstd saves about a fifth of the disk and slows loading",
    )
    add("--unit_bytes", type=size, default=UNIT_BYTES, metavar="BYTES", help=UNITS_HELP)
    add(
        "--step",
        type=natural,
        metavar="N",
        help="the step under which it is written (default: that of the virtual checkpoint)",
    )


def add_export(parser: argparse.ArgumentParser) -> None:
    """The options of an export; None stands for what the checkpoint, or the release that it should be like, says."""
    add = parser.add_argument
    add("--source", metavar="URL", help="the Orbax checkpoint: its root, a step or an item, in a folder or in gs://")
    add(
        "--output",
        metavar="URL",
        help="a folder or gs://bucket/folder for the release, which must not be there yet; or hf://owner/name: one commit there",
    )
    add("--create_pr", action="store_true", default=False, help="on the hub, open a pull request")
    add(
        "--like",
        metavar="URL",
        help="the release whose config.json, tokenizer, names and dtypes are taken: a folder, gs:// or hf://",
    )
    add(
        "--save_dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="dtype of every float tensor; auto: as --like has it",
    )
    add(
        "--maxtext_model",
        metavar="NAME",
        help="the MaxText model, where neither the checkpoint nor config.json settles it",
    )
    add(
        "--param_scan_axis",
        type=natural,
        metavar="N",
        help="where the layers are stacked, where the shapes fit several axes",
    )
    add(
        "--max_shard_size",
        type=size,
        metavar="BYTES",
        help="bytes of tensors in a file, such as 5GB (default: as --like, else 5GB)",
    )
    add("--unit_bytes", type=size, default=UNIT_BYTES, metavar="BYTES", help=UNITS_HELP)
    add("--step", type=natural, metavar="N", help="which step, where the root has several")
    add(
        "--lora",
        action="append",
        metavar="PATH[,WEIGHT]",
        help="a PEFT adapter to merge on the way: a folder, gs:// or hf://; may be repeated",
    )
    add(
        "--family",
        metavar="NAME|FILE.py",
        help="the table: one of ours, an installed package's or a file of your own (default: by config.json)",
    )
    add(
        "--maxtext_config",
        metavar="FILE",
        help="a MaxText configuration (.yml) to make config.json of, for a model without a release",
    )
    add(
        "--tokenizer",
        metavar="URL",
        help="a folder, gs:// or hf:// whose tokenizer, chat template and processor are taken",
    )
    add(
        "--lora_alpha",
        type=amount,
        metavar="ALPHA",
        help="of an adapter that MaxText trained, where its metadata don't say it",
    )
    add("--resume", action="store_true", default=False, help="go on with a stopped export")
    add("--overwrite", action="store_true", default=False, help="replace a release, or throw a stopped export away")
    add(
        "--hf_token_secret",
        type=secret,
        metavar="NAME",
        help="the version of a secret in Secret Manager that holds the hub's token",
    )


def add_reshard(parser: argparse.ArgumentParser) -> None:
    """The options of a reshard; None stands for what the checkpoint has."""
    add = parser.add_argument_group("what is written").add_argument
    add(
        "--source",
        metavar="URL",
        help="the Orbax checkpoint, anyone's: its root, a step or an item, in a folder or in gs://",
    )
    add(
        "--output", metavar="URL", help="a folder or gs://bucket/folder for the new one; it must not hold that step yet"
    )
    add(
        "--step",
        type=natural,
        metavar="N",
        help="which step, where the source has several; and the one that is written (default: the source's)",
    )
    add(
        "--state",
        choices=("full", "params"),
        default="full",
        help="params leaves out the optimizer and the rest, and calls the weights params.params",
    )
    add(
        "--save_dtype",
        choices=("keep", "bfloat16", "float32"),
        default="keep",
        help="dtype of the weights; computed in float32, cast once",
    )
    add(
        "--moment_dtype",
        choices=("keep", "bfloat16", "float32"),
        default="keep",
        help="dtype of the optimizer's moments",
    )
    add(
        "--lora",
        action="append",
        metavar="CKPT[,WEIGHT]",
        help="an adapter that MaxText trained, to merge: its Orbax checkpoint; may be repeated",
    )
    add("--lora_alpha", type=amount, metavar="ALPHA", help="of an adapter whose metadata don't say it")
    add("--resume", action="store_true", default=False, help="go on with a stopped one")
    add("--overwrite", action="store_true", default=False, help="replace a checkpoint, or throw a stopped one away")
    add = parser.add_argument_group("layout").add_argument
    add(
        "--mesh",
        action="append",
        metavar="AXES",
        help="the mesh that loads it, such as fsdp=64; may be repeated (default: chunks stay as they are)",
    )
    add(
        "--scan_layers",
        type=boolean,
        metavar="true|false",
        help="stack the layers of a kind in one array, or take them apart (default: as they are)",
    )
    add("--param_scan_axis", type=natural, metavar="N", help="where the stacked axis goes (default: where it is)")
    add(
        "--like",
        metavar="URL",
        help="a release of the model, if the checkpoint doesn't remember one: its table names axes and layers",
    )
    add("--maxtext_model", metavar="NAME", help="the MaxText model, where config.json can't settle it")
    add("--family", metavar="NAME|FILE.py", help="the table, as for convert (default: by config.json)")
    add("--sharding_rules", metavar="FILE", help="your logical_axis_rules, as for convert")
    add = parser.add_argument_group("storage").add_argument
    add(
        "--use_ocdbt",
        type=boolean,
        metavar="true|false",
        help="one database, or a folder for each array (Pathways: false; default: as the source)",
    )
    add(
        "--use_zarr3",
        type=boolean,
        metavar="true|false",
        help="zarr version 3 or 2 (Pathways: false; default: as the source)",
    )
    add(
        "--compression",
        choices=("none", "zstd"),
        help="of every array (default: as it is where chunks are copied, else none)",
    )
    add("--unit_bytes", type=size, default=UNIT_BYTES, metavar="BYTES", help=UNITS_HELP)
    add(
        "--hf_token_secret",
        type=secret,
        metavar="NAME",
        help="the version of a secret in Secret Manager that holds the hub's token",
    )


def add_watching(parser: argparse.ArgumentParser) -> None:
    """The options that aren't of the configuration."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="what to watch: a file, or gs://bucket/file")
    add(
        "--run",
        metavar="URL",
        help="without a file: the checkpoints of a training run, whose steps are exported as they are committed",
    )
    add(
        "--like",
        metavar="URL",
        help="of --run: the release that gives config, tokenizer, names and dtypes, a folder, gs:// or hf://; or maxtext.yml",
    )
    add(
        "--output",
        metavar="URL",
        help="of --run: where the steps go: a folder, gs://bucket/folder, or hf://owner/name with a branch for each",
    )
    add("--every", type=positive, metavar="N", help="of --run: take the multiples of this step only")
    add(
        "--kind",
        choices=("export", "quantize", "reshard"),
        help="of --run: a release (the default), one in FP8, or the parameters as an Orbax checkpoint",
    )
    add(
        "--lora",
        choices=("adapter", "merged"),
        help="of --run: whether a LoRA run's steps become adapters for PEFT (the default), or --like with them in it",
    )
    add("--save_dtype", metavar="DTYPE", help="of --run: as for export or reshard")
    add(
        "--maxtext_model",
        metavar="NAME",
        help="of --run: the MaxText model, where neither the checkpoints nor config.json settle it",
    )
    add("--once", action="store_true", help="look once, do what there is to do, and end")
    add("--interval", type=seconds, default="15m", metavar="TIME", help="how often to look")
    add("--retry", metavar="MODEL", help="have what was refused or failed of this model begin anew, and end")
    add(
        "--serve",
        type=port,
        metavar="PORT",
        help="take the hub's webhooks too; their secret is in WEIGHTBEAM_WEBHOOK_SECRET",
    )


def add_shell(parser: argparse.ArgumentParser, json: bool, progress: bool) -> None:
    """The options of every command that say what a person sees; they are no keywords of the API."""
    add = parser.add_argument_group("what you see").add_argument
    add(
        "--dry_run",
        nargs="?",
        type=boolean,
        const=True,
        default=False,
        metavar="true|false",
        help="say what would be done, and every problem; write nothing",
    )
    if json:
        add(
            "--json", metavar="FILE", help="write the result as JSON too; - is standard output, with nothing else on it"
        )
    if progress:
        add(
            "--progress",
            choices=PROGRESS,
            default="auto",
            help="a bar, lines, or JSON lines on standard error (auto: a bar on a terminal, else lines)",
        )
    add("-q", "--quiet", action="store_true", help="nothing but warnings, errors and --json -")
    add("-v", "--verbose", action="store_true", help="more, such as what a refused checkpoint holds")
    add("--log_file", metavar="FILE", help="add all messages to this file too")


SHELL = frozenset({"dry_run", "json", "progress", "quiet", "verbose", "log_file"})  # the names of `add_shell`
WITHOUT_JSON = {"help", "completion"}
WITH_PROGRESS = {
    "convert",
    "verify",
    "materialize",
    "diff",
    "export",
    "dequantize",
    "quantize",
    "merge",
    "reshard",
    "watch",
}
POSITIONALS = {  # by command: the options that words without an option stand for; other commands' are argparse's own
    "convert": ("source", "output"),
    "plan": ("source", "output"),
    "verify": ("source", "checkpoint"),
    "materialize": ("checkpoint", "output"),
    "inspect": ("checkpoint",),
    "export": ("source", "output"),
    "dequantize": ("source", "output"),
    "quantize": ("source", "output"),
    "merge": ("source", "output"),
    "reshard": ("source", "output"),
    "fit": ("source", "maxtext_model"),
    "help": ("topic",),
    "completion": ("shell",),
}
USAGES = {
    "convert": "SOURCE OUTPUT [options]",
    "plan": "SOURCE [OUTPUT] [options]\n       weightbeam plan COMMAND … [options]",
    "verify": "[SOURCE] CHECKPOINT [options]",
    "materialize": "CHECKPOINT OUTPUT [options]",
    "inspect": "CHECKPOINT [options]",
    "export": "CHECKPOINT OUTPUT [options]",
    "dequantize": "SOURCE OUTPUT [options]",
    "quantize": "SOURCE OUTPUT [options]",
    "merge": "SOURCE OUTPUT --lora PATH [options]",
    "reshard": "CHECKPOINT OUTPUT [options]",
    "fit": "SOURCE MODEL [options]",
    "diff": "A B [options]",
    "help": "[TOPIC]",
    "completion": "bash|zsh|tcsh",
}


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        "weightbeam", description=OVERVIEW, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"weightbeam {weightbeam.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")

    def command(name: str, help: str, description: str) -> argparse.ArgumentParser:
        usage = f"weightbeam {name} {USAGES.get(name, '[options]')}"
        return commands.add_parser(
            name, help=help, description=description, usage=usage, formatter_class=_Formatter, allow_abbrev=False
        )

    convert = command("convert", "convert a release into an Orbax checkpoint", CONVERT)
    add_conversion(convert)
    add_output(convert)
    plan = command("plan", "say what a conversion would do, and every problem", PLAN)
    add_conversion(plan)
    plan.add_argument(
        "--maxtext_config", metavar="FILE", help="write maxtext.yml; - is standard output, and nothing else is printed"
    )
    plan.add_argument("--output", metavar="URL", help="where the checkpoint would go")
    add_simulation(plan)
    plan.add_argument("--load", action="store_true", help="say how weightbeam.load would read it onto each --mesh")
    plan.add_argument(
        "--hosts",
        type=positive,
        metavar="N",
        help="hosts that share the devices of a mesh, for --load; one for each device unless said",
    )
    add_fit(command("fit", "compare a release with a MaxText configuration, field by field", FIT))
    add_verification(command("verify", "compare a checkpoint with its source, element by element", VERIFY))
    add_export(command("export", "write a checkpoint as a Hugging Face release", EXPORT))
    add_reshard(command("reshard", "write a checkpoint anew, for another mesh or layout", RESHARD))
    add_dequantization(command("dequantize", "write a quantised release as an ordinary one", DEQUANTIZE))
    add_quantization(command("quantize", "write a release in FP8", QUANTIZE))
    add_merge(command("merge", "merge PEFT adapters into a release", MERGE))
    add_materialization(command("materialize", "make an ordinary checkpoint of a virtual one", MATERIALIZE))
    add_comparison(command("diff", "compare any two checkpoints, tensor by tensor", DIFF))
    add_inspection(command("inspect", "show what a checkpoint holds", INSPECT))
    add_watching(command("watch", "convert the hub's releases, or export a run's steps, as they come", WATCH))
    command("models", "list the families that can be converted", MODELS)
    topic = command("help", "print a page of the manual", HELP)
    topic.add_argument("--topic", metavar="TOPIC", help="a page; without one, their list")
    shell = command("completion", "print a script that completes commands and options", COMPLETION)
    shell.add_argument("--shell", metavar="SHELL", help="bash, zsh or tcsh")
    for name, made in commands.choices.items():
        add_shell(made, json=name not in WITHOUT_JSON, progress=name in WITH_PROGRESS)
    return parser


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    return cast("Mapping[str, argparse.ArgumentParser]", commands)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads a command line: what is ours, and what is left for Beam.

    Hyphens in the names of options are underscores. Words without an option are the command's places, in order. An
    option that isn't ours takes the word behind it along, unless that begins with a hyphen: Beam's options aren't known
    here.
    """
    parser = make_parser()
    commands = _commands(parser)
    given = list(arguments)
    if given[:1] == ["plan"] and len(given) > 1 and given[1] in commands and given[1] not in ("help", "completion"):
        given = [*given[1:], "--dry_run"]
    if not given or given[0] not in commands:
        return parser.parse_args(given), []
    name, words = given[0], given[1:]
    known, ours, places, rest = commands[name]._option_string_actions, [], [], []
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            option = "--" + option[2:].replace("-", "_")
        if option in known:
            ours.append(option + equals + value)
            if not equals and known[option].nargs is None and words:
                ours.append(words.pop(0))
        elif word.startswith("-") and len(word) > 1:
            rest.append(option + equals + value)
            if not equals and words and not words[0].startswith("-"):
                rest.append(words.pop(0))
        elif equals and f"--{option}" in known:
            commands[name].error(f"unexpected: {word}; did you mean --{word}?")
        else:
            places.append(word)
    args = commands[name].parse_args(ours if name in POSITIONALS else [*ours, *places])
    args.command = name
    if name in POSITIONALS:
        _place(commands[name], args, places)
    return args, rest


def command_line(args: argparse.Namespace, rest: Sequence[str] = ()) -> str:
    """The command line that `parse` read, with options in place of words, quoted for a shell; without what only says
    what a person sees.
    """
    commands = _commands(make_parser())
    parser = commands[args.command]
    blank = parser.parse_args([])
    words = ["weightbeam", args.command]
    for action in parser._actions:
        if action.dest in SHELL | {"help"} or (value := getattr(args, action.dest)) == getattr(blank, action.dest):
            continue
        for each in value if isinstance(value, list) else [value]:
            words += (
                [f"--{action.dest}"]
                if action.nargs == 0
                else [f"--{action.dest}", str(each).lower() if isinstance(each, bool) else str(each)]
            )
    return shlex.join([*words, *rest])


def _place(parser: argparse.ArgumentParser, args: argparse.Namespace, words: Sequence[str]) -> None:
    """Gives the words without an option to the places that no option named."""
    names = [name for name in POSITIONALS.get(args.command, ()) if getattr(args, name) is None]
    if args.command == "verify" and len(words) == 1:  # a checkpoint knows its source
        names = [name for name in ("checkpoint", "source") if name in names]
    if len(words) > len(names):
        parser.error(f"unexpected: {' '.join(words[len(names) :])}")
    for name, word in zip(names, words, strict=False):
        setattr(args, name, word)
