"""Findings of a comparison, in one order whichever was made first."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

from weightbeam.transforms.comparing.verification import ArrayResult, FirstDifference
from weightbeam.transforms.stages.comparing import read_findings


def test_in_the_order_of_the_tasks(tmp_path: Path) -> None:
    """Keys, the first difference and the names of tensors don't depend on which thread was faster."""
    made = [
        (
            number,
            ArrayResult(key, 1, 1, False, FirstDifference(f"{number}", (), 0.0, 1.0), (1, f"{number}"), (f"{number}",)),
        )
        for number, key in enumerate(["b", "a", "b", "c"])
    ]
    file, seen = tmp_path / "findings", set()
    for order in itertools.permutations(made):
        file.write_bytes(pickle.dumps([pickle.dumps(each) for each in order]))
        found = read_findings(file, len(made))
        seen.add(repr(list(found.items())))
    assert len(seen) == 1
    assert list(found) == ["b", "a", "c"]
    assert (found["b"].first.tensor, found["b"].zero, found["b"].not_finite) == ("0", ("0", "2"), (2, "0"))
