"""`weightbeam new-family`: the first draft of a table, and the test beside it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import keyword
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightbeam.formats.release.source import open_source
from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.drafting import TODO, Draft, draft
from weightbeam.model_mappings.plan import TensorSpec
from weightbeam.model_mappings.registry import UnknownFamilyError, family_by_config
from weightbeam.pipelines.running.sources import open_release
from weightbeam.pipelines.terminal.errors import Refused, refusing
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import Block, Table, count


@dataclasses.dataclass(frozen=True, repr=False)
class Drafted(Shown):
    """The files of a draft.

    Attributes:
      name: of the family.
      drafted: what they hold.
      files: their names and texts.
      is_written: whether they lie in the current folder.
    """

    name: str
    drafted: Draft
    files: Mapping[str, str]
    is_written: bool = False

    def blocks(self) -> Iterator[Block]:
        rows = Table("layers", "tensors", "lines")
        for each in self.drafted.groups:
            layers = f"{each.layers[0]} to {each.layers[-1]}, {len(each.layers)}" if each.layers else "-"
            rows.add_row(layers, each.prefix or "beside layers", str(len(each.lines)))
        yield rows
        yield ""
        yield f"{'' if self.is_written else 'would write '}{', '.join(self.files)}: {self.brief()}"
        if self.is_written:
            yield f"next: python -m pytest test_{self.name}.py says each; weightbeam help contributors_day"

    def brief(self) -> str:
        return f"{count(self.drafted.open, 'mark')} {TODO} in the table"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "files": sorted(self.files), "open": self.drafted.open}


def new_family(name: str, like: str) -> Drafted:
    """Drafts a family's table from the headers of a release; writes nothing.

    Args:
      name: of the family, and of its module.
      like: the release: a folder, `gs://bucket/folder`, or `hf://organisation/model[@revision]`.

    Raises:
      Refused: the name can't be a module's, or is another one's, or the release can't be read.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise Refused(
            f"{name}: can't be the name of a Python module; take letters, digits and underscores, such as my_model"
        )
    found = None if name == "__main__" else importlib.util.find_spec(name)
    if found and found.origin and Path(found.origin).parent != Path.cwd():  # what is here is told by its file's name
        raise Refused(f"{name}: is the name of an installed Python module; take another one, such as my_{name}")
    release = open_release(like)
    held = open_source(release)
    if problems := [*release.problems, *held.problems]:
        found = "\n".join(map(str, problems))
        raise Refused(f"{like}: {count(len(problems), 'problem')}\n{found}", problems=problems)
    specs = held.specs()
    with refusing(ConfigError):
        made = draft(
            name, release.config, {each: spec.shape for each, spec in specs.items()}, like, _known(release.config)
        )
    headers = _headers(release.config, specs)
    return Drafted(name, made, {f"{name}.py": made.table, f"test_{name}.py": made.test, f"{name}.json": headers})


def _known(config: Mapping[str, Any]) -> str:
    """The family that has a `config.json` already; empty for none."""
    try:
        return family_by_config(Config(config)).name
    except UnknownFamilyError:
        return ""


def _headers(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> str:
    """What `weightbeam.testing.read_headers` reads, a tensor in a line."""
    tensors = (f"{json.dumps(each)}: {json.dumps([spec.dtype.name, *spec.shape])}" for each, spec in specs.items())
    lines = ",\n".join(tensors)
    return f'{{"config": {json.dumps(config)},\n"tensors": {{\n{lines}\n}}}}\n'


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Writes the files into the current folder, none of them over another one."""
    if not args.name or not args.like:
        raise Refused("NAME and --like are both needed: weightbeam new-family my_model --like RELEASE")
    made = new_family(args.name, args.like)
    if taken := [file for file in made.files if Path(file).exists()]:
        raise Refused(f"{', '.join(taken)}: is there already; take another name, or another folder")
    if not args.dry_run:
        for file, text in made.files.items():
            try:
                with open(file, "x") as out:
                    out.write(text)
            except OSError as e:
                raise Refused(f"{Path(file).absolute()}: {e.strerror}; go to a folder that can be written") from e
    say(args, dataclasses.replace(made, is_written=not args.dry_run))
    return 0
