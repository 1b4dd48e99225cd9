"""The release that an export, a copy or a forward pass takes its form of: what `--like` names, what a checkpoint
remembers, or what a MaxText configuration says.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from weightbeam.formats.orbax import check_beside
from weightbeam.formats.orbax.source import OrbaxCheckpoint
from weightbeam.formats.record.naming import digest, is_name
from weightbeam.formats.record.provenance import tensors_of
from weightbeam.formats.release.archive import ARCHIVE, packed_files
from weightbeam.formats.release.cutting import cut_release
from weightbeam.formats.release.files import role_of, token_ids
from weightbeam.formats.release.small_files import carried_files
from weightbeam.formats.safetensors import HfCheckpoint, Shard, Tensor, open_hf
from weightbeam.formats.storage import StorageError, open_store, reason
from weightbeam.formats.storage.strict_json import JsonError, parse_json
from weightbeam.model_mappings.config_json import as_taken, config_json
from weightbeam.model_mappings.configuration import MaxTextConfigError
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.registry import UnknownFamilyError
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.maxtext_file import read_maxtext_yaml
from weightbeam.transforms.cutting.quantizing import Given
from weightbeam.transforms.planning.exporting import Like

LOG = logging.getLogger("weightbeam")
GENERATION = "generation_config.json"
TOKENIZER_ROLES = ("tokenizer", "chat template", "processor")


def find_like(checkpoint: OrbaxCheckpoint, like: str | None, with_parts: bool = False) -> Like:
    """The release that is named, else what the checkpoint remembers, else where it came from; parts can be taken of it
    where it is named, or `with_parts`.

    Raises:
      Refused: none is named, and the checkpoint remembers none.
      StorageError: it can't be read.
    """
    if like:
        try:
            return _open_like(like)
        except StorageError as e:
            raise Refused(f"--like={e}") from e
    record = checkpoint.record
    if isinstance(record.get("config"), dict) and isinstance(record.get("tensors"), dict):
        step = open_store(checkpoint.root).parent
        check_beside(step, record, ARCHIVE)
        release = _release_of(record) if with_parts else None
        return Like.of(_remembered(record), release=release, small=packed_files(step) or {})
    if isinstance(url := record.get("source"), str) and is_name(url):
        raise Refused(
            f"the checkpoint was made of {url}, which is a name and no place; --like says where that is, or names a release that it should be like"
        )
    if isinstance(url, str):
        try:
            return _open_like(url)
        except OSError as e:
            raise Refused(
                f"the checkpoint was made of {url}, which can't be read ({reason(e)}); name a release that it should be like with --like"
            ) from e
    raise Refused(
        "--like is missing: the release whose config.json, tokenizer and names are taken, since this checkpoint remembers none; "
        "a model without a release has a MaxText configuration, which export takes as --maxtext_config, and watch as --like"
    )


def _release_of(record: Mapping[str, Any]) -> HfCheckpoint | None:
    """The release that a checkpoint was made of; None where it isn't there any more, or was cut by a table that a file of
    the record's is.
    """
    try:
        cut = Cut.of(record.get("options"))
        release = None if is_name(url := record.get("source")) else _open_like(str(url)).release
        return release and cut_release(release, cut)
    except (OSError, UnknownFamilyError):
        return None


def read_maxtext_config(file: str) -> Like:
    """A release that a MaxText configuration describes.

    Raises:
      Refused: the file can't be read, or no family's model is like that.
    """
    given, told = as_taken(read_maxtext_yaml("--maxtext_config", file))
    if told:
        LOG.warning("%s: %s", file, told)
    try:
        made = config_json(given)
    except MaxTextConfigError as e:
        raise Refused(f"--maxtext_config={file}: {e}") from e
    if made.unknown:
        LOG.warning("%s: nothing in config.json says %s", file, ", ".join(made.unknown))
    for limit in made.limits:
        LOG.warning("%s: transformers computes what MaxText doesn't: %s", file, limit)
    small = {GENERATION: json.dumps(made.generation, indent=2).encode() + b"\n"}
    return Like("", made.config, small=small, model=made.model)


def read_tokenizer(where: str) -> dict[str, bytes]:
    """The files of the tokenizer that `--tokenizer` names.

    Raises:
      Refused: there is none.
    """
    try:
        open_store(where).check_readable()
        files = carried_files(where)
        taken = {name: files[name] for name in files if role_of(name) in TOKENIZER_ROLES}
    except StorageError as e:
        raise Refused(f"--tokenizer={e}") from e
    except OSError as e:
        raise Refused(f"--tokenizer={where}: {reason(e)}") from e
    if not any(role_of(name) == "tokenizer" for name in taken):
        raise Refused(f"--tokenizer={where}: holds no tokenizer, such as tokenizer.json or tokenizer.model")
    return taken


def with_tokenizer(small: Mapping[str, bytes], taken: Mapping[str, bytes]) -> dict[str, bytes]:
    """The small files of a release with another one's tokenizer; where they say nothing yet of the tokens that begin
    and end a text, its own.

    Raises:
      Refused: that can't be said in `generation_config.json`.
    """
    kept = {name: small[name] for name in small if role_of(name) not in TOKENIZER_ROLES}
    try:
        generation = parse_json(kept[GENERATION]) if GENERATION in kept else None
    except JsonError as e:
        raise Refused(f"{GENERATION}, into which the tokenizer's tokens go: {e}") from e
    if isinstance(generation, dict) and "eos_token_id" not in generation and (ids := token_ids(taken)):
        kept[GENERATION] = json.dumps(generation | ids, indent=2).encode() + b"\n"
    return {**kept, **taken}


def _open_like(url: str) -> Like:
    checkpoint = open_hf(url)
    problems = checkpoint.problems
    if checkpoint.config:
        problems = [each for each in problems if each.kind != "missing" or each.subject == "config.json"]
    refuse(problems, of=f"--like={url}")
    small = carried_files(checkpoint.root, checkpoint.opened)
    return Like.of(checkpoint, digest=digest(checkpoint), release=checkpoint, small=small)


def open_given(like: str) -> Given | None:
    """What the release that `--like` names gives to one in FP8; None where it isn't quantised itself.

    Raises:
      Refused: it can't be read.
    """
    try:
        return Given.of(open_hf(like))
    except OSError as e:
        raise Refused(f"--like={like}: {reason(e)}") from e


def _remembered(record: Mapping[str, Any]) -> HfCheckpoint:
    """The release that a checkpoint was made of, as its record describes it: names, dtypes and shapes, in their files.
    Raises StorageError where the record can't be read.
    """
    root = str(record.get("source", ""))
    files: dict[str, list[Tensor]] = {}
    for tensor in tensors_of(record).values():
        files.setdefault(tensor.path, []).append(dataclasses.replace(tensor, path=f"{root}/{tensor.path}"))
    shards = tuple(Shard(name, f"{root}/{name}", 0, "", tuple(tensors)) for name, tensors in files.items())
    return HfCheckpoint(root, dict(record["config"]), shards)
