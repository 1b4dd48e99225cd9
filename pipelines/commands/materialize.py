"""`weightbeam materialize`: an ordinary checkpoint of a virtual one.

The ordinary conversion of the files that the virtual checkpoint refers to, with the options that it was made with. So
nothing is decided twice: bytes, chunks, digests, memory and `--resume` are those of `weightbeam convert`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import re
from collections.abc import Sequence

from weightbeam.formats.orbax import find_items, record_of
from weightbeam.formats.record.provenance import RECORD
from weightbeam.formats.staging import ITEMS, REPLACED
from weightbeam.formats.storage import LocalFolder, Store
from weightbeam.model_mappings.versions import UNSAID
from weightbeam.pipelines.checking.virtual import is_virtual, open_own_source, with_hashes
from weightbeam.pipelines.commands.convert import Converted, carry_out, dry_run
from weightbeam.pipelines.running.output import bring_back
from weightbeam.pipelines.running.problems import describe
from weightbeam.pipelines.running.sources import check_beam, check_named, check_places, plan_with, reading
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.keywords import asked_of, check_said, keywords_of, sharding_rules, takes
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.pipelines.terminal.shell import say
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.options import ConvertOptions, Delivery, MaterializeOptions, options_from

LOG = logging.getLogger("weightbeam")


@takes(asked=MaterializeOptions, how=Delivery)
def materialize(
    checkpoint: str,
    output: str,
    *,
    asked: MaterializeOptions,
    how: Delivery,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
) -> Converted:
    """Makes an ordinary checkpoint of a virtual one: the same arrays, in chunks for a mesh, without any file of the
    source.

    Args:
      checkpoint: the virtual checkpoint: its root, a step or an item, in a folder or in `gs://`.
      output: a folder or `gs://bucket/folder`; it must not hold that step yet.
      beam, progress: as for `convert`.

    Returns:
      Where the new checkpoint is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> linked = wb.convert("models/qwen3", "linked", virtual=True, scan_layers=False, progress=False)
      >>> wb.materialize("linked", "whole", mesh="fsdp=8", progress=False)
      <weightbeam.Converted: .../whole/0/items: 25 arrays, ...>
    """
    check_places(beam, "materialize", checkpoint=checkpoint, output=output)
    if how.overwrite:
        bring_back(output)
    conversion = plan_materialization(checkpoint, asked)
    return carry_out(conversion, output, dataclasses.replace(how, in_place=True), beam, progress)


def plan_materialization(checkpoint: str, asked: MaterializeOptions) -> Conversion:
    """The conversion that a virtual checkpoint was made by, but for the options that are given."""
    check_named("materialize", checkpoint=checkpoint)
    with reading(checkpoint):
        items = find_items(checkpoint)
        if is_virtual(items):
            return _plan(items, asked)
    # a command in place that was killed behind its end has left the virtual one beside what it made of it
    for replaced in _replaced_by(items):
        with contextlib.suppress(Refused, OSError):  # somebody's folder, or of an output of another plan
            if is_virtual(replaced) and (made := _plan(replaced, asked)).target.made_by(items.parent) == made.hash:
                return made
    raise Refused(
        f"{items} isn't virtual, or came here without its {items.parent.name}/conversion.json; there is nothing to materialise"
    )


def _plan(items: Store, asked: MaterializeOptions) -> Conversion:
    try:
        with reading(items.url):
            record = record_of(items)
            opened, found = open_own_source(items, asked.family)
            source = with_hashes(opened, record)
            made = options_from(ConvertOptions, {"maxtext": UNSAID, **record["options"]})
            check_said(made, items.parent.path(RECORD))
    except Failed as e:
        raise Refused(f"the files that the checkpoint refers to have changed:\n{e}") from e
    if damaged := source.find_damage():
        raise Refused(f"the files that the checkpoint refers to have changed:\n{describe(damaged)}", problems=damaged)
    LOG.info(found)
    with reading(items.url):
        given = {name: value for name, value in vars(asked).items() if value not in (None, ())}
        given |= (
            {"sharding_rules": rules} if (rules := sharding_rules(asked.sharding_rules, made.maxtext_model)) else {}
        )
        options = dataclasses.replace(made, virtual=False, **given)
        return dataclasses.replace(plan_with(options, source), made_of=str(record["source"]))


def _replaced_by(items: Store) -> list[Store]:
    """The items whose place others have taken, and that lie beside these."""
    step, root = items.parent, items.parent.parent
    if not isinstance(root, LocalFolder):
        return []
    return [root / name / ITEMS for name in root.folders() if re.fullmatch(re.escape(step.name) + REPLACED, name)]


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Materialises, and says what came of it."""
    if args.dry_run:
        check_beam(rest, "materialize", {"checkpoint": args.checkpoint, "output": args.output})
        conversion = plan_materialization(args.checkpoint, asked_of(args, MaterializeOptions))
        return dry_run(args, conversion, rest, args.checkpoint)
    say(args, materialize(**keywords_of(args, materialize), beam=rest))
    return 0
