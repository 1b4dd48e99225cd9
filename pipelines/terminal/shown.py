"""Values that are shown as tables and lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weightbeam.model_mappings.values import Value
from weightbeam.pipelines.terminal import tables
from weightbeam.pipelines.terminal.wording import worded


class Shown(Value):
    """A value that its command prints, fitted to the terminal, and a notebook shows as HTML.

    A subclass says what of it is seen, in `blocks`.
    """

    def blocks(self) -> Iterable[tables.Block]:
        """What a person sees of it."""
        raise NotImplementedError

    def whole(self) -> Iterable[tables.Block]:
        """What its text and its HTML show: also what its command says at the end, such as problems."""
        return self.blocks()

    def brief(self) -> str:
        return next((block for block in self.blocks() if isinstance(block, str) and block), "").partition("\n")[0]

    def complaint(self) -> str:
        """Why the command's exit status is 1 though it ran to its end, in a line; empty where it is 0."""
        return ""

    def show(self) -> None:
        """Prints it."""
        if blocks := list(_worded(self.blocks())):
            tables.show(blocks)

    def __str__(self) -> str:
        return tables.text(_worded(self.whole()), tables.terminal_width())

    def _repr_html_(self) -> str:
        return tables.page(_worded(self.whole()))


@dataclasses.dataclass(frozen=True, repr=False)
class Intended(Shown):
    """What a dry run says: what the command would do, for a person, and the same as figures."""

    seen: Sequence[tables.Block]
    figures: Mapping[str, Any]
    warnings: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return dict(self.figures)

    def blocks(self) -> list[tables.Block]:
        return [*self.seen, *(f"warning: {warning}" for warning in self.warnings)]


def _worded(blocks: Iterable[tables.Block]) -> Iterator[tables.Block]:
    return (worded(block) if isinstance(block, str) else block.worded(worded) for block in blocks)
