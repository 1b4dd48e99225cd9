"""Texts of strangers, made fit for a terminal, a log and a chat: names of tensors, fields of configs, what servers
answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters, halves of characters, what changes the direction of text (Unicode's bidi controls), what is
# invisible (zero width, tags, byte-order mark), and separators of lines.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
_BUT_LINES = re.compile(_UNPRINTABLE.pattern.replace(r"\x00-\x1f", r"\x00-\x09\x0b-\x1f"))

LINE, AHEAD = 60, 20  # characters of a text that is shown with another, and of those before they part


def printable(text: str, most: int | None = None, lines: bool = False) -> str:
    r"""A text without anything that a terminal would act on; each such character as Python writes it, such as `\x1b`.

    Args:
      text: anyone's.
      most: cut it to about so many characters.
      lines: whether it may have several lines, as a message of ours has.
    """
    cut = text if most is None or len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"
    return (_BUT_LINES if lines else _UNPRINTABLE).sub(lambda found: found[0].encode("unicode_escape").decode(), cut)


def without_user(url: str) -> str:
    """An address without who asks there, and with which password: `https://me:secret@host/x` -> `https://host/x`."""
    return re.sub(r"^(\w+://)?[^/?#]*@", r"\1", url)


def listed(names: Sequence[str], most: int = 10, what: str = "") -> str:
    """The first of some names, and how many more there are, of what they are: `a, b, c and 4 more`."""
    more = f" and {len(names) - most:,} more{what and ' '}{what}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def where_apart(one: str, other: str) -> tuple[str, str]:
    """Two texts to be shown beside each other: of long ones what stands where they part.

    >>> where_apart('["full", "full", "full", "full", "full", "full", "full", "full"]', '["full", "full", "sliding"]')
    ('["full", "full", "full", "full", "full", "full", "full", "fu…', '["full", "full", "sliding"]')
    """
    pairs = enumerate(zip(one, other, strict=False))
    apart = next((at for at, (here, there) in pairs if here != there), min(len(one), len(other)))
    begin = max(0, apart - AHEAD) if max(len(one), len(other)) > LINE else 0
    return _excerpt(one, begin), _excerpt(other, begin)


def _excerpt(text: str, begin: int) -> str:
    return f"{'…' if begin else ''}{text[begin : begin + LINE]}{'…' if len(text) > begin + LINE else ''}"
