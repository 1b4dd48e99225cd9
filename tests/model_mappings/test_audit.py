"""The audit finds each kind of problem, names it, and finds all of them in one run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from facts.tiny import CONFIGS, shapes

from weightbeam.model_mappings.audit import is_disjoint
from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.plan import TensorSpec
from weightbeam.model_mappings.registry import family_of
from weightbeam.model_mappings.rules import rule, segments, stack

LLAMA = CONFIGS["llama"]
Q, K, UP, DOWN = (f"model.layers.1.{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "mlp.up", "mlp.down"))
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def audit_table(check, make_specs):
    """`audit_table(rules, shapes, drops, **dims)`: a table made by hand against plain tensors; the problems as `(kind,
    subject)`.
    """

    def audit_table(rules, tensors, drops=(), **dims):
        family = Family(
            "made-up",
            {},
            lambda c, layout: dims,
            lambda c, layout: [stack("", "", 0, rules)],
            lambda c, layout: dict(drops),
            "",
        )
        return [(problem.kind, problem.subject) for problem in check({}, make_specs(tensors), family=family).problems]

    return audit_table


def test_all_problems_in_one_run(check, make_specs):
    """A missing, an unused, a transposed, a flattened and an integer tensor: one report names each once, and nothing
    else.
    """
    specs = make_specs(shapes(LLAMA))
    del specs[K]
    specs |= make_specs({"model.layers.1.adapter.weight": (3, 4), UP: (10, 14), NORM: (10, 1)}) | make_specs(
        {DOWN: (10, 14)}, np.dtype("int8")
    )
    problems = check(LLAMA, specs).problems
    assert {(problem.kind, problem.subject) for problem in problems} == {
        ("missing", K),
        ("unused", "model.layers.1.adapter.weight"),
        ("shape", UP),
        ("shape", NORM),
        ("dtype", DOWN),
    }
    assert len(problems) == 5
    assert not any(problem.is_array for problem in problems)


def test_messages_say_what_was_expected_and_found(check, make_specs):
    """The array or the table's line, the shape or dtype that was found, and the file."""
    specs = make_specs(shapes(LLAMA))
    del specs[K]
    specs |= {UP: TensorSpec((10, 14), np.dtype(ml_dtypes.bfloat16), "model-00002.safetensors")} | make_specs(
        {DOWN: (10, 14)}, np.dtype("int8")
    )
    specs |= make_specs({"adapter": (3, 4)})
    text = {problem.kind: str(problem) for problem in check(LLAMA, specs).problems}
    assert (
        text["missing"]
        == f"missing: {K}: the llama table makes params.params.decoder.layers.self_attention.key.kernel of it, but no file holds it"
    )
    assert (
        text["shape"]
        == f'shape: {UP}: (10, 14) in model-00002.safetensors, the llama table says "mlp embed" = (14, 10)'
    )
    assert (
        text["dtype"]
        == f"dtype: {DOWN}: int8 in model.safetensors, but params.params.decoder.layers.mlp.wo.kernel is made of floating-point weights"
    )
    assert (
        text["unused"]
        == "unused: adapter: bfloat16 (3, 4) in model.safetensors: the llama table has no place for it, and doesn't drop it"
    )


def test_merged_axes_in_a_shape_message(check, make_specs):
    """Merged axes are shown as the table writes them, so that the reader sees heads x dim."""
    (problem,) = check(LLAMA, make_specs(shapes(LLAMA) | {Q: (48, 10)})).problems
    assert (
        str(problem)
        == f'shape: {Q}: (48, 10) in model.safetensors, the llama table says "(heads dim) embed" = (24, 10)'
    )


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32"])
def test_dtypes_that_are_no_weights(check, make_specs, dtype):
    """Integers are never taken for weights, whatever their size."""
    specs = make_specs(shapes(LLAMA)) | make_specs({DOWN: (10, 14)}, np.dtype(dtype))
    assert [(problem.kind, problem.subject) for problem in check(LLAMA, specs).problems] == [("dtype", DOWN)]


def test_tensors_without_elements(check, make_specs):
    """Orbax refuses to save such an array, whatever table makes it; the identity table makes one of any tensor."""
    identity = family_of(Config({"model_type": "x"}), None, "identity")
    found = check({"model_type": "x"}, make_specs({"a": (0,), "b": (3, 0, 4), "c": (2,)}), family=identity).problems
    assert [(problem.kind, problem.subject) for problem in found] == [("shape", "a"), ("shape", "b")]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes_that_are_weights(check, make_specs, dtype):
    """Any float will do; the checkpoint's are mixed."""
    specs = make_specs(shapes(LLAMA)) | make_specs({DOWN: (10, 14)}, np.dtype(dtype))
    assert check(LLAMA, specs).problems == []


@pytest.mark.parametrize("shape", [(3, 16, 10), (3, 12, 10), (4, 14, 10), (3, 10, 14), (14, 10), ()])
def test_fused_experts_of_another_size(check, make_specs, shape):
    """gate_up_proj is (expert, 2 x 7, embed) = (3, 14, 10): longer than both windows, shorter, another number of
    experts, transposed, another rank.
    """
    config, name = CONFIGS["qwen3_moe"], "model.layers.0.mlp.experts.gate_up_proj"
    problems = check(config, make_specs(shapes(config, fused=True) | {name: shape})).problems
    assert {(problem.kind, problem.subject) for problem in problems} == {("shape", name)}


def test_experts_that_config_json_does_not_count(check, make_specs):
    """One expert more in the files than in config.json is unused, one less is missing: no expert is dropped in silence."""
    config = CONFIGS["qwen3_moe"]
    for count, kind, expert in ((2, "unused", 2), (4, "missing", 3)):
        gates = {f"model.layers.{layer}.mlp.gate.weight": (count, 10) for layer in range(2)}
        problems = check(config | {"num_experts": count}, make_specs(shapes(config) | gates)).problems
        assert {(problem.kind, problem.subject) for problem in problems} == {
            (kind, f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight")
            for layer in range(2)
            for name in ("gate", "up", "down")
        }


def test_unclaimed_part(audit_table):
    """A tensor that is longer than its windows together; and one with every second row unused."""
    halves = [rule("gate", "gate_up[:4]", "mlp embed", ""), rule("up", "gate_up[4:8]", "mlp embed", "")]
    assert audit_table(halves, {"gate_up": (8, 3)}, mlp=4, embed=3) == []
    assert audit_table(halves, {"gate_up": (9, 3)}, mlp=4, embed=3) == [("unclaimed part", "gate_up")]
    evens = [rule("gate", "gate_up[0::2]", "mlp embed", "")]
    assert audit_table(evens, {"gate_up": (8, 3)}, mlp=4, embed=3) == [("unclaimed part", "gate_up")]


def test_overlap_in_a_tensor(audit_table):
    """Two lines that take the same elements, side by side or alternating; alternating lines that don't are fine."""

    def audit(first, second):
        return audit_table(
            [rule("gate", f"w[{first}]", "mlp", ""), rule("up", f"w[{second}]", "mlp", "")], {"w": (8,)}, mlp=4
        )

    assert audit("0::2", "1::2") == audit("1::2", "0::2") == audit(":4", "4:") == []
    assert audit(":4", ":4") == audit(":4", "3:7") == audit("0::2", "0::2") == audit("0::2", "4:") == [("overlap", "w")]
    whole = [rule("a", "w", "mlp", ""), rule("b", "w", "mlp", "")]
    assert audit_table(whole, {"w": (4,)}, mlp=4) == [("overlap", "w")]


def test_overlap_and_gap_in_an_array(audit_table):
    """Two lines that make the same elements of an array; elements that no line makes, unless a fill pads them."""

    def audit(first, second, **fill):
        rules = [
            rule("kernel", name, "mlp embed", "", mlp=segment, **fill)
            for name, segment in (("a", first), ("b", second))
        ]
        return audit_table(rules, {"a": (first.size, 3), "b": (second.size, 3)}, embed=3)

    one, two, three = segments(2, 3, 4)
    assert audit(*segments(2, 3)) == []
    assert audit(two, two) == [("overlap", "params.params.kernel")]
    assert audit(one, three) == [("gap", "params.params.kernel")]
    assert audit(one, three, fill=0.0) == []


def test_dropped_and_used(audit_table):
    """A drop that takes a tensor, or rows, that a line uses is a fault of the table."""
    rules = [rule("kernel", "w", "mlp embed", "")]
    for drop in ("w", "*", "w[2:]"):
        assert audit_table(rules, {"w": (4, 3)}, {drop: "no reason"}, mlp=4, embed=3) == [("overlap", "w")]


def test_window_dropped_of_a_tensor_that_no_line_uses(audit_table):
    """Dropping some rows of a tensor doesn't excuse the others."""
    rules = [rule("kernel", "w", "mlp embed", "")]
    assert audit_table(rules, {"w": (4, 3), "v": (4, 3)}, {"v[2:]": "no reason"}, mlp=4, embed=3) == [("unused", "v")]


def test_reasons_of_what_is_dropped(check, make_specs):
    """Rotary tables, a tied head and rows beyond a truncated vocabulary are listed with their reasons, and nothing else
    is.
    """
    places = [f"model.{of}rotary_emb." for of in ("layers.0.self_attn.", "layers.1.self_attn.", "")]
    names = [
        f"{place}{name}" for place in places for name in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")
    ]
    config = LLAMA | {"tie_word_embeddings": True}
    tensors = shapes(config) | dict.fromkeys(names, (3,)) | {"lm_head.weight": (16, 10)}
    checked = check(config, make_specs(tensors), Layout(vocab=11))
    assert checked.problems == []
    assert checked.dropped == dict.fromkeys(names, "computed, not learned") | {
        "lm_head.weight": "the head is tied to the embedding",
        "model.embed_tokens.weight[11:]": "beyond --vocab_size=11",
    }


def test_reasons_of_dropped_mtp_layers(check, make_specs):
    """Without --mtp the whole layer is dropped, and the reason names the option; with it only the copies that MaxText
    shares.
    """
    config = CONFIGS["deepseek_v3"]
    specs = make_specs(shapes(config))
    mtp = {name for name in specs if name.startswith("model.layers.3.")}
    assert check(config, specs).dropped == dict.fromkeys(mtp, "multi-token prediction, convert it with --mtp")
    copy = {"model.layers.3.embed_tokens.weight": "a copy of the embedding, MaxText shares it"}
    assert check(config, specs, Layout(mtp=True)).dropped == copy | {
        "model.layers.3.shared_head.head.weight": "MaxText's MTP block shares the model's head"
    }
    assert check(config, specs, Layout(mtp=True, maxtext="e591f30")).dropped == copy | {
        "model.layers.3.shared_head.norm.weight": "MaxText's MTP block shares the model's head and last norm",
        "model.layers.3.shared_head.head.weight": "MaxText's MTP block shares the model's head and last norm",
    }


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"])
def test_a_layer_too_many_is_not_one_for_prediction(check, make_specs, name):
    """Behind the last layer: one that has nothing of what multi-token prediction needs is unused."""
    config = CONFIGS[name]
    n = config["num_hidden_layers"]
    tensors = {key: shape for key, shape in shapes(config).items() if f"layers.{n}." not in key}
    more = {key.replace(f".{n - 1}.", f".{n}."): shape for key, shape in tensors.items() if f"layers.{n - 1}." in key}
    found = check(config, make_specs(tensors | more))
    assert more
    assert {(problem.kind, problem.subject) for problem in found.problems} == {("unused", key) for key in more}


def test_several_layers_for_prediction(check, make_specs):
    """All of them are left out where none is asked for."""
    config = CONFIGS["deepseek_v3"]
    tensors = shapes(config)
    more = {name.replace(".3.", ".4."): shape for name, shape in tensors.items() if name.startswith("model.layers.3.")}
    found = check(config | dict(num_nextn_predict_layers=2), make_specs(tensors | more))
    assert not found.problems
    assert more.keys() <= found.dropped.keys()


def test_mtp_of_a_checkpoint_without_it(check, make_specs):
    """--mtp where the files hold no such layer: every tensor of it is missing."""
    config = CONFIGS["kimi_k2"]
    problems = check(config, make_specs(shapes(config)), Layout(mtp=True)).problems
    expected = {name for name in shapes(config | {"num_nextn_predict_layers": 1}) if name.startswith("model.layers.3.")}
    expected = {name for name in expected if "shared_head.head" not in name and "embed_tokens" not in name}
    assert {(problem.kind, problem.subject) for problem in problems} == {("missing", name) for name in expected}


@pytest.mark.parametrize(("rows", "dropped"), [(18, 2), (11, 0)])
def test_rows_of_a_truncated_vocabulary(check, make_specs, rows, dropped):
    """A file with more or fewer rows than config.json's 16: an error when all are asked for; beyond a truncated
    vocabulary they don't matter.
    """
    names = ("model.embed_tokens.weight", "lm_head.weight")
    specs = make_specs(shapes(LLAMA) | dict.fromkeys(names, (rows, 10)))
    assert [(problem.kind, problem.subject) for problem in check(LLAMA, specs).problems] == [
        ("shape", name) for name in names
    ]
    truncated = check(LLAMA, specs, Layout(vocab=11))
    assert truncated.problems == []
    assert len(truncated.dropped) == dropped


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((range(4), range(3)), (range(4, 8), range(3)), True),
        ((range(4), range(3)), (range(3, 8), range(3)), False),
        ((range(4), range(3)), (range(4), range(3, 4)), True),
        ((range(0, 8, 2),), (range(1, 8, 2),), True),
        ((range(0, 8, 2),), (range(3, 8, 3),), False),
        ((range(0, 8, 2),), (range(3, 4),), True),
        ((), (), False),
    ],
)
def test_is_disjoint(a, b, expected):
    """Apart on one axis is apart; two claims on a scalar are the same element."""
    assert is_disjoint(a, b) is expected
    assert is_disjoint(b, a) is expected
