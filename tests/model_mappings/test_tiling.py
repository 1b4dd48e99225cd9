"""For every family and layout: the table fits a checkpoint of it, and its cells tile arrays and tensors."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict

import numpy as np
import pytest
from facts import layouts_of, load_headers
from facts.tiny import CONFIGS, FUSED, shapes

from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.registry import family_of
from weightbeam.testing import check_elements
from weightbeam.testing.family import kept_rows

LAYOUTS = {"unscanned": Layout(scan=False), **{f"scan_axis={axis}": Layout(scan_axis=axis) for axis in range(4)}}
CASES = [
    *((name, name, False, Layout()) for name in CONFIGS),
    *((f"{name}-fused", name, True, Layout()) for name in FUSED),
    ("llama3.1", "llama", False, Layout(model="llama3.1-8b")),
    *(
        (f"{name}+mtp{'-fused' * fused}", name, fused, Layout(mtp=True))
        for name in ("deepseek_v3", "deepseek_v32")
        for fused in (False, True)
    ),
]


@pytest.mark.parametrize("vocab", [None, 16, 20, 11], ids=lambda vocab: f"vocab={vocab}")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("name", "is_fused", "base"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_cells_tile_arrays_and_tensors(check, make_specs, name, is_fused, base, layout, tied, vocab):
    """The audit has no problem, and counting shows that it is right.

    Every element of every array is made once, but for the padding of the vocabulary (16 rows to 20), and every element
    of every tensor is used once, but for what is dropped: rows beyond a truncated vocabulary (16 rows to 11) and MTP
    layers.
    """
    config = CONFIGS[name] | {"tie_word_embeddings": tied}
    tensors = shapes(config, is_fused)
    layout = dataclasses.replace(layout, model=base.model, mtp=base.mtp, vocab=vocab)
    checked = check(config, make_specs(tensors), layout)
    assert checked.problems == []

    used = {tensor: np.zeros(shape, np.int8) for tensor, shape in tensors.items()}
    for array in checked.arrays:
        made, box = np.zeros(array.shape, np.int8), whole(array.shape)
        for piece in (piece for cell in array.cells() for piece in cell.pieces(box)):
            piece.target.of(made, (0,) * made.ndim)[...] += 1
            piece.source.of(used[piece.tensor], (0,) * used[piece.tensor].ndim)[...] += 1
        by_token = {
            "params.params.token_embedder.embedding": made,
            "params.params.decoder.logits_dense.kernel": made.T,
        }.get(array.key)
        is_padded = by_token is not None and vocab == 20
        if is_padded:
            assert (by_token[16:] == 0).all()
            made = by_token[:16]
        assert (made == 1).all(), array.key
        assert array.fill == (0.0 if is_padded else None)
    for tensor, count in used.items():
        rows = kept_rows(checked.dropped, tensor, count.shape)
        assert (count[:rows] == 1).all(), tensor
        assert (count[rows:] == 0).all(), tensor
    embeddings = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if not tied else set())
    expected = {f"{tensor}[11:]" for tensor in embeddings} if vocab == 11 else set()
    if config.get("num_nextn_predict_layers"):
        copies = ("embed_tokens.weight", "shared_head.norm.weight", "shared_head.head.weight")
        expected |= {
            tensor
            for tensor in tensors
            if tensor.startswith("model.layers.3.") and (not base.mtp or tensor.endswith(copies))
        }
    assert set(checked.dropped) == expected


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", CONFIGS)
def test_scanned_arrays_are_the_unscanned_ones_stacked(check, make_specs, name, axis):
    """A scanned array has the shape of its layers' arrays and, on the scan axis or the last where there are fewer,
    their number.
    """
    specs = make_specs(shapes(CONFIGS[name]))
    layers = defaultdict(list)
    for array in check(CONFIGS[name], specs, Layout(scan=False)).arrays:
        layers[re.sub(r"layers_\d+", "layers", array.key)].append(array.shape)
    expected = {}
    for key, (shape, *others) in layers.items():
        assert set(others) <= {shape}
        at = min(axis, len(shape))
        expected[key] = (*shape[:at], 1 + len(others), *shape[at:]) if "layers." in key else shape
    assert {array.key: array.shape for array in check(CONFIGS[name], specs, Layout(scan_axis=axis)).arrays} == expected


HEADERS = load_headers()
FAMILY_CASES = [(name, layout) for name, entry in HEADERS.items() for layout in layouts_of(entry.config)]


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize(("name", "layout"), FAMILY_CASES)
def test_cells_tile_what_transformers_writes(name, layout, axis):
    """The same for the families whose checkpoints are known by what transformers wrote: every element made once, used
    once or dropped, and read back from where it went.
    """
    entry = HEADERS[name]
    laid_out = dataclasses.replace(layouts_of(entry.config)[layout], scan_axis=axis)
    check_elements(family_of(Config(entry.config)), entry.config, entry.tensors, {layout: laid_out})
