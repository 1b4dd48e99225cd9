"""The beginning of what a pipeline carries out, without Beam: the plan is staged, and its place prepared."""

from __future__ import annotations

import logging

from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import StorageError
from weightbeam.transforms.planning.options import Delivery
from weightbeam.transforms.planning.transfer import Transfer

LOG = logging.getLogger("weightbeam")


def stage(planned: Transfer, staging: Staging, how: Delivery) -> bool:
    """Stages a plan, and prepares its place.

    Args:
      planned: what to do; it has no problems.
      staging: where.
      how: whether to go on with what is staged there, and how the source's files get there, with `--virtual`.

    Returns:
      Whether anything is left to do but publishing.

    Raises:
      LinkError: the source's files can't be put there so; what was staged only now is removed. Or what is complete
        refers to others.
      TakenOverError: the place isn't there any more: a link above it may lead elsewhere by now.
    """
    if how.resume and planned.target.made_by(staging.checkpoint) == planned.hash:
        planned.check_complete(staging, how)
        return False
    try:
        _put_there(planned, staging, how)
    except FileNotFoundError as e:
        if staging.is_staged():
            raise
        raise staging.taken_over() from e
    return True


def _put_there(planned: Transfer, staging: Staging, how: Delivery) -> None:
    """Puts a plan into a place, or goes on with what is there, and prepares it; see `stage`."""
    resumed = how.resume and staging.is_staged()
    if resumed:
        staging.write_plan(planned.stage())
        staging.ledger.drop_unreadable()
        if changed := planned.target.find_changed(staging):
            LOG.warning(
                "%s: %d of the staged units aren't as they were written, and are made anew",
                staging.plan_folder,
                len(changed),
            )
            staging.ledger.withdraw(changed)
    else:
        staging.create(planned.stage())
    LOG.debug("%s in %s", "goes on" if resumed else "staged", staging.plan_folder)
    try:
        planned.prepare(staging, how)
    except StorageError:
        if not resumed:
            staging.discard()
        raise
