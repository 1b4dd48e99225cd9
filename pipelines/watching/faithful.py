"""Whether an export is its checkpoint's: every element, converted there again, within the one rounding that the export's dtype explains."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weightbeam.formats.safetensors import Checkpoint, open_checkpoint
from weightbeam.model_mappings.plan import is_float
from weightbeam.pipelines import diff
from weightbeam.pipelines.errors import FailedError, RefusedError
from weightbeam.pipelines.tables import count
from weightbeam.transforms.differences import coarser, spacing

STEPS = 2  # of the coarser dtype: one rounding, of a value that a factor has moved to the next binade


def compare_export(release: str, checkpoint: str, model: str | None = None, sample: float = 1.0) -> dict[str, Any]:
    """Compares an export with the checkpoint that it was made of.

    Args:
      release, checkpoint: their URLs.
      model: the MaxText model, where neither says it.
      sample: the share of the boxes of each array that is compared, one at least.

    Returns:
      How many `elements` and `arrays` were compared, and how many arrays are `rounded`.

    Raises:
      FailedError: something differs by more than that, or is missing; or it can't be compared.
    """
    try:
        where = [diff._look(release), diff._look(checkpoint)]
        (here, there), _ = diff._in_one_spelling(where, model)
    except RefusedError as e:
        raise FailedError(f"{release} isn't what was asked for: {e}") from e
    assert isinstance(where[0], Checkpoint)
    coarse = _coarsest(open_checkpoint(release))
    wrong = [f"{name} is missing in {'the export' if name in there else 'the checkpoint'}" for name in sorted(here.keys() ^ there.keys())]
    elements, rounded = 0, 0
    for name in [name for name in here if name in there]:
        mine, theirs = here[name], there[name]
        if mine.shape != theirs.shape:
            wrong.append(f"{name}: {mine.shape}, the checkpoint has {theirs.shape}")
            continue
        boxes = list(diff._cut(mine, theirs))
        differs = False
        for box in boxes[:: max(1, math.floor(1 / sample))]:
            a, b = mine.read(box), theirs.read(box)
            elements += a.size
            if beyond := _beyond(a, b, coarser(coarse, theirs.dtype) if is_float(theirs.dtype) else None):
                wrong.append(f"{name}: {beyond:,} of {a.size:,} elements differ by more than one rounding")
                break
            differs |= not np.array_equal(a.view(np.uint8), b.view(np.uint8))
        rounded += differs
    if wrong:
        raise FailedError(f"{count(len(wrong), 'array')} of the export aren't the checkpoint's:\n" + "\n".join(f"  {each}" for each in wrong[:20]))
    return {"elements": elements, "arrays": len(here), "rounded": rounded, "sample": sample}


def _coarsest(release: Checkpoint) -> np.dtype:
    """The floating-point dtype with the fewest bits of mantissa among a release's tensors."""
    found = np.dtype(np.float32)
    for shard in release.shards:
        for tensor in shard.tensors:
            found = (coarser(found, tensor.dtype) or found) if is_float(tensor.dtype) else found
    return found


def _beyond(a: np.ndarray, b: np.ndarray, step: np.dtype | None) -> int:
    """How many elements differ by more than `STEPS` steps of a dtype; NaN is NaN."""
    if a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        return 0
    with np.errstate(all="ignore"):
        x, y = np.ascontiguousarray(a).astype(np.float64), np.ascontiguousarray(b).astype(np.float64)
        wrong = (x != y) & ~(np.isnan(x) & np.isnan(y))
        if step is None:
            return int(np.count_nonzero(wrong))
        return int(np.count_nonzero(~(np.abs(x - y)[wrong] <= STEPS * spacing(np.maximum(np.abs(x[wrong]), np.abs(y[wrong])), step))))
