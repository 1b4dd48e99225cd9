"""A MaxText configuration in a file, with the other files that MaxText reads for it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from weightbeam.formats.storage import read_named
from weightbeam.formats.storage.strict_yaml import StrictLoader, parse_yaml
from weightbeam.model_mappings.config_json import LLAMA_ROPE, clean, is_dump, is_none
from weightbeam.model_mappings.maxtext_models import base, own_name, said_by
from weightbeam.pipelines.terminal.errors import Refused

LOG = logging.getLogger("weightbeam")
# bases of MaxText's own that say nothing of a model, but for base.yml, which is known
OWN_BASES = re.compile(r"(.*/)?(base\.yml|(inference|post_train)/(?!sft-vision)[^/]+\.yml)")
OF_RUNS = ("run_name", "steps", "per_device_batch_size", "base_output_directory")  # keys that no model's file has
MAX_BASES = 16  # files of which each is the base of the one before; MaxText has two


class MaxTextLoader(StrictLoader):
    """YAML as MaxText reads it, with the tags that Python's dump leaves: a tuple is a list, an enum its value. Nothing is
    made but these.
    """


def _plain(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node)
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    values = loader.construct_sequence(node, deep=True)  # type: ignore[arg-type]
    return values[0] if tag.startswith("object/apply:") and len(values) == 1 else values


MaxTextLoader.add_multi_constructor("tag:yaml.org,2002:python/", _plain)


def parse_maxtext_yaml(text: str | bytes, where: str) -> dict[str, Any]:
    """The keys that a MaxText configuration says, a run's own `config.yml` too; `where` it is, for messages.

    Raises:
      Refused: it is no YAML, says no keys, or is larger than any that is meant: to parse it takes seconds for each MB.
    """
    try:
        given = parse_yaml(text, MaxTextLoader)
    except (UnicodeDecodeError, yaml.YAMLError) as e:
        raise Refused(f"{where}: no YAML: {e}") from e
    if not isinstance(given, dict):
        raise Refused(f"{where}: it should hold keys and values, but is {type(given).__name__}")
    return given


def read_maxtext_yaml(option: str, file: str) -> dict[str, Any]:
    """The keys that a file of MaxText's (`.yml`) says, with those of the files that MaxText reads for it, and looks for in
    the same places (AI-Hypercomputer/maxtext, src/maxtext/configs/pyconfig.py, `_initialize_pydantic`, e591f30):

        configs/our_base.yml           below those of the file
        configs/mine.yml               base_config: our_base.yml, model_name: llama3-8b
        configs/models/llama3-8b.yml   above them; also in ../models

    Above the model's file MaxText has its command line alone, with `override_model_config`: a file that says that is taken
    for what the command line said. A model's file doesn't say its name, which is that of the file. `option` is what named
    it, for messages.

    Raises:
      Refused: one of them can't be read, or says no keys; or files are each other's base.
    """
    given = _read_with_base(option, file)
    is_models = _is_models_own(Path(file).stem, given)
    name = Path(file).stem if is_models else own_name(str(given.get("model_name")))
    known = said_by(name)
    if is_models and known is None:
        raise Refused(
            f"{option}={file}: doesn't say its model_name, and MaxText gives models whose names begin with {LLAMA_ROPE} another "
            f"rotary embedding; name one of MaxText's models in the file, such as model_name: {LLAMA_ROPE}-8b, or call the file otherwise"
        )
    instead = {key: base().get(key) for key in known or ()}
    if is_models:
        return instead | given | {"model_name": name, "override_model_config": True}
    folders = (Path(file).parent, Path(file).parent.parent, *_configs_around(file))
    places = (folder / "models" / f"{name}.yml" for folder in folders)
    path = next((path for path in places if known is not None and path.is_file()), None)
    if known is None or path is None or is_dump(given):
        return given
    if path.samefile(file):
        return given | {"override_model_config": True}
    theirs = _read(option, path)
    if given.get("override_model_config"):
        return instead | theirs | given
    if other := [key for key in given if key in theirs and clean(given[key]) != clean(theirs[key])]:
        LOG.warning("%s=%s: MaxText takes %s of %s, and so is done here", option, file, ", ".join(other), path)
    return instead | given | theirs | {"override_model_config": True}


def _is_models_own(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a file of that name, without `.yml`, is that of a model, and no run's: of one that MaxText has, or to which it
    gives Llama 3.1's rotary embedding by its name.
    """
    is_run = any(given.get(key) for key in ("model_name", "base_config")) or not given.keys().isdisjoint(OF_RUNS)
    by_name = name.startswith(LLAMA_ROPE) and given.get("rope_type") != LLAMA_ROPE
    return not is_run and (said_by(name) is not None or by_name)


def _is_usual(key: str, value: Any) -> bool:
    """Whether a base says of a key what MaxText's own base.yml does, which goes for nothing beside a model's file."""
    return key in base() and (is_none(value) or clean(value) == base()[key])


def _configs_around(file: str) -> list[Path]:
    """The folder of MaxText's own configurations that a file lies below, in a checkout."""
    folders = Path(file).resolve().parents
    return [folder for folder in folders if (folder / "base.yml").is_file() and (folder / "models").is_dir()]


def _read(option: str, file: str | Path) -> dict[str, Any]:
    try:
        return parse_maxtext_yaml(read_named(file), f"{option}={file}")
    except OSError as e:
        raise Refused(f"{option}={file}: {e.strerror}") from e


def _read_with_base(option: str, file: str, above: Sequence[Path] = ()) -> dict[str, Any]:
    """The keys of a file over those of its base; `above` are the files whose base it is."""
    given = _read(option, file)
    named = str(given.get("base_config") or "")
    places = (Path(file).parent, *_configs_around(file))
    there = next((path for folder in places if (path := folder / named).is_file()), Path(file))
    if named and there == Path(file) and not OWN_BASES.fullmatch(named) and not is_dump(given):
        LOG.warning(
            "%s=%s: its base_config, %s, isn't there; what it says isn't known, so MaxText's base.yml is taken",
            option, file, named,
        )  # fmt: skip
    if there.is_file() and there.resolve() != Path(file).resolve():
        above = (*above, Path(file).resolve())
        if there.resolve() in above or len(above) > MAX_BASES:
            raise Refused(f"{option}={file}: its base_config leads back to it, or through more than {MAX_BASES} files")
        below = _read_with_base(option, str(there), above)
        return {key: value for key, value in below.items() if not _is_usual(key, value)} | given
    return given
