"""What a misspelt name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` where something like it is known."""
    near = difflib.get_close_matches(word, list(known), 1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""
