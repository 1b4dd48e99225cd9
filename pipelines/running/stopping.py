"""A stop: what it says, and that nothing is published after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import patience
from weightbeam.formats.storage.uninterrupted import PUBLISHED
from weightbeam.formats.targets import made_by


@contextlib.contextmanager
def stopping(staging: Staging, plan_hash: str) -> Iterator[None]:
    """Context manager: what is interrupted publishes nothing; its threads, or another runner's processes, may be at
    work still. What isn't is published, and a stop that comes later says so.

    Raises:
      KeyboardInterrupt: it was; the message says so where the plan with this hash was published before.
      SystemExit: the same, of a handler of a signal that ends the process; a note says so.
    """
    said = f"but {staging.final} was published already"
    try:
        yield
        PUBLISHED.append(said)
    except (KeyboardInterrupt, SystemExit) as e:
        patience.hurry()
        is_published, is_publishing = False, staging.is_publishing()
        try:
            is_published = _give_up(staging, plan_hash)
        except (KeyboardInterrupt, OSError):  # a second one, which waits for nothing; or there is no answer
            if is_publishing:
                raise KeyboardInterrupt(f"whether {staging.final} is published isn't known: look there") from None
        if is_published and isinstance(e, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{said}; {e}" if str(e) else said) from None
        if is_published:
            e.add_note(said)
        raise


def _give_up(staging: Staging, plan_hash: str) -> bool:
    """Takes a place from whoever is at work there; returns whether the plan's result was published before. Raises OSError
    where the store doesn't answer.
    """
    staging.stop()
    is_published = staging.is_held() and staging.is_public() and made_by(staging.final) == plan_hash
    if is_published:
        with contextlib.suppress(OSError):
            staging.tidy()
            staging.clean()
            if staging.exists():
                staging.publish()
    return is_published
