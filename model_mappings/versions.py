"""MaxText's versions, and what they call the axes of every family's arrays.

A table is written for the newest version. What an older one has otherwise stands in three places: the names of axes here, other
stacks in `Family.earlier`, and lines of the configuration that are `only_in` one. 0.2.5 is the package index's of October 2026,
e591f30 the repository's of August 2026; the trees of both are compared with the tables in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS = ("0.2.5", "e591f30")  # the newest first
NEWEST = DEFAULT = VERSIONS[0]  # what is written unless told
UNSAID = VERSIONS[-1]  # what was written before a record said it

EARLIER_AXES: Mapping[str, Mapping[str, str]] = {"e591f30": {"embed_attn": "embed", "embed_router": "embed_moe"}}


def axis_of(name: str | None, version: str) -> str | None:
    """What a version calls the logical axis that the newest calls `name`."""
    return EARLIER_AXES.get(version, {}).get(name or "", name)
