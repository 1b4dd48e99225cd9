"""From the command line's arguments to a planned conversion, or to a refusal that lists everything at once."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts
import yaml

from weightbeam.formats.adapters import Adapter, open_adapter
from weightbeam.formats.orbax import item_metadata
from weightbeam.formats.printable import printable
from weightbeam.formats.safetensors import Checkpoint, open_checkpoint
from weightbeam.formats.storage import StorageError, Store, open_store, reason
from weightbeam.formats.storage.token import name_secret
from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.plan import PARAMETERS, Problem
from weightbeam.pipelines.errors import RefusedError
from weightbeam.pipelines.report import collapse, count
from weightbeam.transforms.conversion import UNKNOWN_FAMILY, Conversion, Options, prepare
from weightbeam.transforms.mesh import MeshError, Rules, RulesError, model_rules, read_rules

SHOWN = 20  # problems of one kind; the rest is counted
LINE = 5000  # characters of a problem: names and values in it are the files', however long
KINDS, NAME = 200, 300  # of tensors that an inventory lists, and characters of their names


def prepare_conversion(args: argparse.Namespace) -> Conversion:
    """Plans what the arguments ask for; problems stay in the plan.

    Raises:
      RefusedError: there is nothing to plan: no source, no such mesh.
    """
    if not args.source:
        raise RefusedError("--source is missing: the folder with config.json and the safetensors files")
    options = read_options(args)
    name_secret(args.hf_token_secret)
    checkpoint = open_source(args.source)
    try:
        return prepare(options, checkpoint, open_adapters(options))
    except MeshError as e:
        raise RefusedError(str(e)) from e


def open_adapters(options: Options) -> list[Adapter]:
    """The adapters that `--lora` names.

    Raises:
      RefusedError: there is no such folder, or it can't be looked at.
    """
    adapters = []
    for url, weight in options.lora:
        try:
            adapters.append(open_adapter(url, weight))
        except StorageError as e:
            raise RefusedError(f"--lora={e}") from e
        except OSError as e:
            raise RefusedError(f"--lora={url}: {reason(e)}") from e
    return adapters


def open_source(source: str) -> Checkpoint:
    """The weights that `--source` names.

    Raises:
      RefusedError: there are none, or they can't be looked at.
    """
    try:
        return open_checkpoint(source)
    except StorageError as e:
        raise RefusedError(str(e)) from e
    except OSError as e:  # of a folder that can't be looked at
        raise RefusedError(f"--source={source}: {reason(e)}") from e


def read_options(args: argparse.Namespace) -> Options:
    """The options that the arguments ask for.

    Raises:
      RefusedError: the file of sharding rules can't be read.
    """
    values = vars(args) | {"mesh": tuple(args.mesh or ()), "sharding_rules": sharding_rules(args.sharding_rules, args.maxtext_model)}
    values["lora"] = tuple(read_lora(text) for text in getattr(args, "lora", None) or ())
    return Options(**{field.name: values[field.name] for field in dataclasses.fields(Options)})


def read_lora(text: str) -> tuple[str, float]:
    """`PATH[,weight]`: where an adapter is, absolute, and what its deltas are multiplied by.

    Raises:
      RefusedError: there is no such store, or nobody can mean that weight.
    """
    path, _, last = text.rpartition(",")
    try:
        url, weight = (path, float(last)) if path else (text, 1.0)
    except ValueError:  # a path with a comma
        url, weight = text, 1.0
    if not 0 < abs(weight) < math.inf:
        raise RefusedError(f"--lora={text}: the weight should be a number other than 0")
    try:
        return open_store(url).url, weight
    except StorageError as e:
        raise RefusedError(f"--lora={e}") from e


def sharding_rules(file: str | None, model: str | None) -> Rules | None:
    """The rules that `--sharding_rules` asks for, for the MaxText model that was named; None without a file.

    Raises:
      RefusedError: the file can't be read, or doesn't hold rules.
    """
    if file is None:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
        try:
            given = json.loads(text)
        except ValueError:
            given = yaml.safe_load(text)
        return read_rules(given, model_rules(model))
    except OSError as e:
        raise RefusedError(f"--sharding_rules={file}: {e.strerror}") from e
    except yaml.MarkedYAMLError as e:
        where = f", line {e.problem_mark.line + 1}" if e.problem_mark else ""
        raise RefusedError(f"--sharding_rules={file}: neither JSON nor YAML: {e.problem or e}{where}") from e
    except (RulesError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise RefusedError(f"--sharding_rules={file}: {e}") from e


def options_of(args: argparse.Namespace, items: Store, stores: Mapping[str, ts.TensorStore]) -> Options:
    """The options that the checkpoint was made with: as given, else as it says, else as its arrays show."""
    custom = item_metadata(items)
    about = custom.get("weightbeam")
    said: dict[str, Any] = dict(about["options"]) if isinstance(about, dict) and isinstance(about.get("options"), dict) else {}
    if "scan_layers" in custom:
        said["scan_layers"] = custom["scan_layers"]
    if "vocab_size" not in said and (embedding := stores.get(f"{PARAMETERS}token_embedder.embedding")):
        said["vocab_size"] = embedding.shape[0]
    said.setdefault("mtp", any(key.startswith(f"{PARAMETERS}mtp_block.") for key in stores))
    said.setdefault("multimodal", any(key.startswith((f"{PARAMETERS}vision_encoder.", f"{PARAMETERS}audio_encoder.")) for key in stores))
    given = {key: value for key in ("scan_layers", "param_scan_axis", "maxtext_model") if (value := getattr(args, key, None)) is not None}
    if getattr(args, "lora", None):
        given["lora"] = tuple(map(read_lora, args.lora))
    left_out = {"mesh", "sharding_rules", "unit_bytes", "compression", "use_ocdbt", "use_zarr3", "step", "virtual"}
    known = {field.name for field in dataclasses.fields(Options)} - left_out
    return Options(**{key: value for key, value in (said | given).items() if key in known})


def refuse(conversion: Conversion, problems: Sequence[Problem]) -> None:
    """Says everything that stands against a conversion.

    Raises:
      RefusedError: there is something.
    """
    if not problems:
        return
    message = f"{count(len(problems), 'problem')}:\n{describe(problems)}"
    if any(problem.kind == UNKNOWN_FAMILY for problem in problems):
        message += f"\n\nWhat {conversion.checkpoint.root} holds:\n{inventory(conversion.checkpoint)}"
    raise RefusedError(message)


def inventory(checkpoint: Checkpoint) -> str:
    """The tensors of a checkpoint, numbers in their names collapsed."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for name, tensor in checkpoint.tensors.items():
        groups[pattern(name)][f"{tensor.dtype.name} {list(tensor.shape)}"] += 1
    lines = [
        f"  {sum(kinds.values()):>6} × {printable(name, NAME)}  {', '.join(sorted(kinds)[:3])}{' …' if len(kinds) > 3 else ''}"
        for name, kinds in itertools.islice(groups.items(), KINDS)
    ]
    if len(groups) > KINDS:
        lines.append(f"  … and {len(groups) - KINDS:,} more kinds of names")
    return "\n".join(lines) or "  no tensors"


def describe(problems: Iterable[Problem]) -> str:
    """All problems, by kind; those that differ only in numbers once, and many of one kind are counted."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        kinds[problem.kind].append(printable(str(problem), LINE))
    lines = []
    for kind, texts in kinds.items():
        different = collapse(texts)
        lines += [f"  {text}" for text in different[:SHOWN]]
        if len(different) > SHOWN:
            lines.append(f"  {kind}: … and {len(different) - SHOWN} more; weightbeam plan --json lists all")
    return "\n".join(lines)
