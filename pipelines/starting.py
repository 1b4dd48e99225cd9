"""Between a plan and its pipeline: Beam is imported, which takes seconds, and a local run begins to read meanwhile."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence

from weightbeam.formats.staging import Staging
from weightbeam.pipelines.without_beam import is_local
from weightbeam.transforms.head_start import head_start
from weightbeam.transforms.movement import Movement
from weightbeam.transforms.overlap import overlaps


@contextlib.contextmanager
def get_ready(plan: Movement, staging: Staging, resume: bool, beam: Sequence[str]) -> Iterator[None]:
    """Context manager: Beam is imported before the output is taken, since that takes a while and may be interrupted. If
    a link is to be filled, a local run reads the plan's first units meanwhile.

    Args:
      plan: has no problems.
      staging: where it will be carried out.
      resume: first units may be done already.
      beam: Beam's options.
    """
    with contextlib.ExitStack() as stack:
        if plan.units:
            if is_local(beam) and not resume and overlaps(*plan.inputs, staging.output.url):
                stack.enter_context(head_start(plan, staging))
            importlib.import_module("weightbeam.pipelines.execution")
        yield
