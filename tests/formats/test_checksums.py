"""Checksums of files that were read in pieces."""

from __future__ import annotations

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from weightbeam.formats.storage.checksums import Stretch, chain, combine, crc32c_of, sum_ranges
from weightbeam.formats.storage.store import as_base64


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_checksums_are_combined(parts: list[bytes]) -> None:
    """The checksum of the whole, from those of its parts alone."""
    at, stretches = 0, []
    for part in parts:
        stretches.append(Stretch(at, at + len(part), google_crc32c.value(part)))
        at += len(part)
    assert crc32c_of(stretches) == google_crc32c.value(b"".join(parts))
    assert as_base64(crc32c_of(stretches)) == as_base64(google_crc32c.Checksum(b"".join(parts)))


def test_of_any_length() -> None:
    zeros = bytes(5_000_011)
    assert combine(google_crc32c.value(b"head"), google_crc32c.value(zeros), len(zeros)) == google_crc32c.value(
        b"head" + zeros
    )


@given(
    st.binary(min_size=1, max_size=200),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=12),
    st.randoms(),
)
def test_what_was_read_and_what_is_left(data: bytes, spans: list[tuple[int, int]], dice) -> None:
    """Whatever was read, in whatever order and however often: with the gaps it is the whole file."""
    spans = [(min(a, b, len(data)), min(max(a, b), len(data))) for a, b in spans]
    noted = [
        stretch for start, stop in spans for stretch in sum_ranges([(start, memoryview(bytearray(data[start:stop])))])
    ]
    dice.shuffle(noted)
    known, gaps = chain(noted, len(data))
    every = [*known, *(Stretch(start, stop, google_crc32c.value(data[start:stop])) for start, stop in gaps)]
    assert crc32c_of(sorted(every)) == google_crc32c.value(data)
    assert sorted((part.start, part.stop) for part in every)[0][0] == 0
    assert sum(part.stop - part.start for part in every) == len(data)


def test_ranges_that_adjoin_are_one_stretch() -> None:
    data = bytes(range(100))
    ranges = [(start, memoryview(bytearray(data[start:stop]))) for start, stop in ((0, 10), (10, 30), (40, 50))]
    assert sum_ranges(ranges) == [
        Stretch(0, 30, google_crc32c.value(data[:30])),
        Stretch(40, 50, google_crc32c.value(data[40:50])),
    ]
