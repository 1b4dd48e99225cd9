"""What calls return: values that say of themselves what they are."""

from __future__ import annotations

import html
import json
from typing import Any

BRIEF = 200  # characters of what a `repr` tells


class Value:
    """A value for programs and for people: `to_dict` and `to_json`, a text, a short `repr`, and HTML in a notebook.

    A dataclass of this kind says `repr=False`: its fields may hold a whole plan.
    """

    def to_dict(self) -> dict[str, Any]:
        """What the command's `--json` writes."""
        raise NotImplementedError

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def brief(self) -> str:
        """What it is, in a line: the first line of its text."""
        return str(self).partition("\n")[0]

    def __repr__(self) -> str:
        brief = self.brief()
        return f"<weightbeam.{type(self).__name__}: {brief if len(brief) <= BRIEF else f'{brief[: BRIEF - 1]}…'}>"

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def preformatted(text: str) -> str:
    """Text as HTML that keeps its line breaks and blanks, and breaks lines that are too long."""
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
