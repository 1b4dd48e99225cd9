"""`weightbeam fit`: a release against a MaxText configuration, field by field."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.config_json import as_taken, full_keys
from weightbeam.model_mappings.configuration import MaxTextConfigError
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.maxtext_config import MaxTextConfig, compare, effect_of, maxtext_config
from weightbeam.model_mappings.naming import ModelNameError, ModelNaming, name_model
from weightbeam.model_mappings.plan import expand
from weightbeam.model_mappings.registry import UnknownFamilyError, family_by_config
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.sources import open_release
from weightbeam.pipelines.terminal import tables
from weightbeam.pipelines.terminal.errors import Refused, refusing
from weightbeam.pipelines.terminal.keywords import keywords_of, takes
from weightbeam.pipelines.terminal.maxtext_file import read_maxtext_yaml
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Shown

LOG = logging.getLogger("weightbeam")
PIPELINES = ("ici_pipeline_parallelism", "dcn_pipeline_parallelism")  # in MaxText's configurations


@dataclasses.dataclass(frozen=True, repr=False)
class Fit(Shown):
    """A release against a MaxText configuration.

    Attributes:
      source: the release.
      against: the MaxText model, or the file.
      needed: what MaxText must be told for the release.
      differences: `{MaxText's key: (needed, said)}`.
    """

    source: str
    against: str
    needed: MaxTextConfig
    differences: dict[str, tuple[Any, Any]]

    @property
    def ok(self) -> bool:
        """Whether the configuration fits as it is, and expresses the model."""
        return not self.differences and not self.needed.limits

    def to_dict(self) -> dict[str, Any]:
        differences = [
            {"key": key, "needed": need, "said": said, "effect": effect_of(key)}
            for key, (need, said) in self.differences.items()
        ]
        limits, unknown = list(self.needed.limits), list(self.needed.unknown)
        return {
            "source": self.source,
            "maxtext": self.against,
            "differences": differences,
            "limits": limits,
            "unknown": unknown,
        }

    def brief(self) -> str:
        return f"{self.source}: {self.blocks()[-1]}"

    def complaint(self) -> str:
        return "" if self.ok else self.brief()

    def blocks(self) -> list[tables.Block]:
        blocks: list[tables.Block] = []
        if self.differences:
            rows = tables.Table("MaxText's key", "needed", "said", "what the difference does")
            for key, (need, said) in self.differences.items():
                rows.add_row(key, _text(need), _text(said), effect_of(key))
            blocks += [rows, ""]
        blocks += [f"MaxText can't express this: {limit}" for limit in self.needed.limits]
        if self.needed.unknown:
            blocks.append(f"fields of config.json that nothing here is about: {', '.join(self.needed.unknown)}")
        if not self.differences:
            return [*blocks, f"{self.against} fits{', but for that' if self.needed.limits else ''}"]
        return [
            *blocks,
            f"{tables.count(len(self.differences), 'difference')} from {self.against}; MaxText must be told: {self.needed.command_line()}",
        ]


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


@takes()
def fit(source: str, maxtext_model: str) -> Fit:
    """Compares a release with a MaxText configuration; reads no weights.

    Args:
      source: a folder, `gs://bucket/folder`, or `hf://organisation/model[@revision]`.
      maxtext_model: the name of one of MaxText's models, or a file (`.yml`) that says its keys.

    Returns:
      The differences, and the keys that MaxText must be told besides the model's name.

    Raises:
      Refused: no such source, model or file, or a model that has no table.

    Example:
      >>> compared = wb.fit("models/qwen3", "qwen3-0.6b")
      >>> compared.ok  # the sizes are others
      False
    """
    if not maxtext_model:
        raise Refused("--maxtext_model is missing: one of MaxText's models, or a file of its keys")
    theirs = _read(maxtext_model)
    named = str(theirs.get("model_name") or "default")
    release = open_release(source)
    if not release.config:
        refuse(release.problems, of=source)
    config = Config(release.config)
    with refusing(ConfigError, UnknownFamilyError):
        family = family_by_config(config)
        try:
            naming = name_model(family, config)
        except ModelNameError:
            naming = ModelNaming(named)
        if naming.model is None and config.get("model_type") in family.types_of(named):
            naming = ModelNaming(named)
        if family.variant(naming.model or "") != family.variant(named) and config.get("model_type") in family.types_of(
            named
        ):
            naming = ModelNaming(named)  # the table would be that name's
        # which is up to whoever converts, where the family has both
        is_scanned = theirs.get("scan_layers") is not False
        layout = Layout(scan=is_scanned if len(family.layouts) > 1 else "scanned" in family.layouts)
        needed = maxtext_config(family, config, layout, naming)
        shapes = {name: tensor.shape for name, tensor in release.tensors.items()}
        needed = _under_that_name(needed, family, config, dataclasses.replace(layout, model=named, shapes=shapes))
    if staged := [key for key in PIPELINES if theirs.get(key) not in (None, 1)]:
        limit = f"{' and '.join(staged)} other than 1 make it stack layers by stages, which no checkpoint of Weightbeam's has"
        needed = dataclasses.replace(needed, limits=(*needed.limits, limit))
    return Fit(source, maxtext_model, needed, compare(needed, theirs))


def _under_that_name(needed: MaxTextConfig, family: Family, config: Config, layout: Layout) -> MaxTextConfig:
    """What MaxText must be told, with what it makes of the model's name alone, such as the query's scale: no key says it."""
    try:
        expand(family, config, layout)
    except ConfigError as e:
        return dataclasses.replace(needed, limits=(*needed.limits, f"under the name {layout.model}: {e}"))
    return needed


def _read(maxtext_model: str) -> dict[str, Any]:
    """All keys that a model or a file of MaxText's says. Raises Refused where there is no such model, or the file can't
    be read.
    """
    option = f"--maxtext_model={maxtext_model}"
    named = maxtext_model.endswith((".yml", ".yaml"))
    given = read_maxtext_yaml("--maxtext_model", maxtext_model) if named else {"model_name": maxtext_model}
    taken, told = as_taken(given)
    if told:
        LOG.warning("%s: %s", maxtext_model, told)
    try:
        return full_keys(taken)
    except MaxTextConfigError as e:
        raise Refused(f"{option}: {e}") from e


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the differences; 1 if there are any."""
    missing = [f"--{name}" for name in ("source", "maxtext_model") if not getattr(args, name)]
    if missing:
        raise Refused(
            f"{' and '.join(missing)} missing: weightbeam fit SOURCE MODEL, a release and a MaxText model or its configuration"
        )
    found = fit(**keywords_of(args, fit))
    say(args, found)
    return 0 if found.ok else 1
