"""Files of a bucket from components: which components make up a file."""

from __future__ import annotations

import pytest

from weightbeam.formats.storage.composing import Component, check_tiling
from weightbeam.formats.targets.release_bucket import PART_BYTES, join


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 4), (6, 10)], "4 to 6 are missing"),
        ([(0, 4), (3, 10)], "3 to 4 were written twice"),
        ([(0, 9)], "9 bytes"),
    ],
)
def test_what_is_no_whole_file(spans: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tiling("file", [Component(*span, "", 0) for span in spans], 10)


def test_neighbours_go_together() -> None:
    """In whatever order they come; not across a gap, a file, or the most that a component may have."""
    data = bytes(range(10))
    stretches = [("b", 0, data), ("a", 12, data), ("a", 0, data), ("a", 22, data), ("a", 32, bytes(PART_BYTES))]
    made = [
        (file, start, b"".join(held))
        for file, start, held in join((file, at, memoryview(part)) for file, at, part in stretches)
    ]
    assert [(file, start, len(held)) for file, start, held in made] == [
        ("a", 0, 10),
        ("a", 12, PART_BYTES),
        ("a", 12 + PART_BYTES, 20),
        ("b", 0, 10),
    ]
    assert made[1][2] == data + data + bytes(PART_BYTES - 20)
