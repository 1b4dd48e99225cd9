"""A stop: what it says, and that nothing is published after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import patience
from weightbeam.formats.storage.uninterrupted import DONE
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
        DONE.append(said)
    except (KeyboardInterrupt, SystemExit) as e:
        patience.hurry()
        with contextlib.suppress(OSError):
            staging.stop()
            if staging.is_held() and staging.is_public() and made_by(staging.final) == plan_hash:
                staging.tidy()
                staging.clean()
                if staging.exists():
                    staging.publish()
                if isinstance(e, KeyboardInterrupt):
                    raise KeyboardInterrupt(f"{said}; {e}" if str(e) else said) from None
                e.add_note(said)
        raise
