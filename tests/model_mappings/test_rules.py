"""The notation: windows, segments, and the errors of a line that contradicts itself."""

from __future__ import annotations

import numpy as np
import pytest

from weightbeam.model_mappings.rules import Segment, rule, segments, stack


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("[:4]", np.s_[:4,]),
        ("[4:]", np.s_[4:,]),
        ("[4:8]", np.s_[4:8,]),
        ("[0::2]", np.s_[0::2,]),
        ("[:, :4]", np.s_[:, :4]),
        ("[..., 1::2]", np.s_[:, :, 1::2]),
        ("[:3, ..., 1:]", np.s_[:3, :, 1:]),
        ("[:3, ...]", np.s_[:3, :, :]),
        ("[:1, :2, ..., :3]", np.s_[:1, :2, :3]),
        ("", ()),
    ],
)
def test_window_is_a_numpy_index(window, expected):
    """What stands in the brackets is what numpy would take."""
    (line,) = rule("wi", f"gate_up_proj{window}", "expert mlp embed", "")
    assert line.source == "gate_up_proj"
    assert line.window == expected


def test_window_of_a_tensor_with_name_axes():
    """Axes in the tensor's name don't count among the tensor's."""
    (line,) = rule("wi", "experts.{expert}.w[..., 2:]", "expert mlp embed", "")
    assert line.name_axes == ("expert",)
    assert line.window == np.s_[:, 2:]


def test_segments_lie_side_by_side():
    """Each begins where the one before ends; all know the whole."""
    assert segments(4, 4, 16) == [Segment(0, 4, 24), Segment(4, 4, 24), Segment(8, 16, 24)]


def test_rule_of_a_condition():
    """A line whose condition is false isn't there."""
    assert rule("wi", "w", "mlp", "", when=0) == []
    assert len(rule("wi", "w", "mlp", "", when=9)) == 1


def test_fill_of_a_segment_is_the_rules():
    """A padded vocabulary says its fill on the segment."""
    (line,) = rule("embedding", "w", "vocab embed", "", vocab=Segment(0, 4, 6, fill=0.0))
    assert line.fill == 0.0


@pytest.mark.parametrize(
    ("source", "axes", "names", "message"),
    [
        ("w[0", "mlp", "", "can't read the source 'w\\[0'"),
        ("w[]", "mlp", "", "can't read the source"),
        ("w", "mlp embed", "mlp", "names 1 axes, 'mlp embed' has 2"),
        ("w", "mlp embed -> (mlp embed)", "mlp embed", "names 2 axes"),
        ("experts.{expert}.w", "mlp expert -> expert mlp", "", "must come first"),
        ("experts.{expert}.w", "(expert mlp) embed", "", "must come first"),
        ("experts.{expert}.w", "mlp embed", "", "must come first"),
        ("w", "mlp embed -> embed", "", "must name the same axes"),
    ],
)
def test_lines_that_contradict_themselves(source, axes, names, message):
    """A typo in a table is found when the module is imported."""
    with pytest.raises(ValueError, match=message):
        rule("wi", source, axes, names)


def test_stack_names_its_axes():
    """As many words as stacked axes, no more and no less."""
    assert stack("", "", [[0, 1], [2, 3]], [], "outer inner").names == ("outer", "inner")
    for layers, words in (([0, 1], ""), (0, "layers"), ([[0, 1]], "layers")):
        with pytest.raises(ValueError, match="stacked axes"):
            stack("decoder", "", layers, [], words)
