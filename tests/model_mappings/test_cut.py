"""What a cut keeps, and what becomes of `config.json`: numbers and objects alone."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from weightbeam.model_mappings.cut import Cut, spans, spelled
from weightbeam.model_mappings.cut_config import (
    BY_NUMBER,
    ENDING,
    LIGHTNING,
    MADE,
    Renumbered,
    applied,
    check_experts,
    edit,
    renumber,
)
from weightbeam.model_mappings.left_out import SIZES
from weightbeam.model_mappings.registry import families

LAYERS = 24
STEMS = frozenset({"model.layers."})


def renumbered(layers: list[int], count: int, **more: Any) -> Renumbered:
    return Renumbered(count, {layer: number for number, layer in enumerate(layers)}, stems=STEMS, **more)


def cut(config: dict[str, Any], layers: list[int], count: int, **more: Any) -> dict[str, Any]:
    """`config` as it is in a cut that nothing stands against."""
    edits = edit(config, renumbered(layers, count, **more))
    assert not edits.problems
    return applied(config, edits.made)


@pytest.mark.parametrize(
    ("text", "ranges"),
    [("0:4", [(0, 4)]), ("0:2,58:61", [(0, 2), (58, 61)]), ("0,1,2,7", [(0, 3), (7, 8)]), (" 3 : 5 ", [(3, 5)])],
)
def test_ranges(text: str, ranges: list[tuple[int, int]]) -> None:
    assert spans(text) == tuple(ranges) == spans(spelled(spans(text)))


@pytest.mark.parametrize("text", ["", "a", "4:2", "3:3", "-1:2", "0:2,", "1:2:3", "0:99999999999"])
def test_no_ranges(text: str) -> None:
    with pytest.raises(ValueError, match="should be ranges"):
        spans(text)


def test_what_a_record_says() -> None:
    """Options of a record that anyone may have written; what isn't of the right kind is as if it weren't there."""
    assert Cut.of({"layers": "0:4", "experts": None, "vocab_rows": "x", "mesh": []}) == Cut("0:4")
    assert Cut.of({"layers": "4:", "experts": ["0:2"], "vocab_rows": True, "family": 1}) == Cut()
    assert not Cut.of(None)
    assert str(Cut("0:4", "0:8", 100)) == "layers 0:4, experts 0:8, rows of the vocabulary 0:100"


def test_values_by_layer() -> None:
    """Lists of values, lists of layers, tables by layer, how many of the first and of the last there are."""
    config = dict(
        num_hidden_layers=6, layer_types=list("aabbcc"), mlp_only_layers=[0, 4, 5], per_layer_config={"1": 1, "4": 4}, first_k_dense_replace=2,
        num_kv_shared_layers=1, max_window_layers=6, num_blocks=6, hidden_size=6, eos_token_id=[1, 2, 3, 4, 5, 6],
    )  # fmt: skip
    assert cut(config, [0, 4, 5], 6) == config | dict(
        num_hidden_layers=3, layer_types=list("acc"), mlp_only_layers=[0, 1, 2], per_layer_config={"1": 4}, first_k_dense_replace=1,
        num_kv_shared_layers=1, max_window_layers=3, num_blocks=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers", "said"),
    [
        (dict(model_type="exaone4"), range(2, 8), "the kind of layer 2 follows from its number, which would be another"),
        (dict(model_type="cohere2", layer_types=None), range(4, 8), ""),
        (dict(model_type="cohere2", sliding_window_pattern=2), range(2, 6), ""),
        (dict(model_type="vaultgemma", layer_types=list("abababab")), range(1, 3), ""),
        (dict(model_type="smollm3"), range(1, 5), "'no_rope_layers' isn't there"),
        (dict(model_type="mimo_v2_flash"), range(2, 4), "keep the first layers, or save the config with transformers"),
        (dict(model_type="mimo_v2_flash"), range(4), ""),
        (dict(model_type="glm4_moe_lite", first_k_dense_replace=1), range(1, 3), "the kind of layer 1 follows"),
        (dict(model_type="neomme"), range(4), "the kind of layer 3 follows"),
        (dict(model_type="neomme"), range(6), ""),
        (dict(model_type="flint"), range(4), "the kind of layer 3 follows"),
    ],
)  # fmt: skip
def test_kinds_of_layers_that_no_list_says(config: dict, layers: range, said: str) -> None:
    """As transformers makes them, by number."""
    config = config | dict(num_hidden_layers=8)
    found = edit(config, Renumbered(8, {old: new for new, old in enumerate(layers)})).problems
    assert [problem for problem in found if said and said in problem[1]][:1] == found[:1]
    assert bool(found) == bool(said)


def test_kinds_that_transformers_makes() -> None:
    """Each class without a table whose layers have kinds by number, when nothing says them."""
    by_number = {kind for field, kind in BY_NUMBER if field == "model_type"}
    with_table = SIZES.keys() | {kind for family in families() for kind in family.model_types}
    parts = {
        each for kind in CONFIG_MAPPING for each in (CONFIG_MAPPING[kind], *CONFIG_MAPPING[kind].sub_configs.values())
    }
    found: dict[str, dict[str, int | None]] = {field: {} for field in MADE}
    for part in parts:
        kind = getattr(part, "model_type", "vision")
        if (
            kind in with_table | LIGHTNING | by_number | {"kimi_linear"} or "vision" in kind
        ):  # Kimi's lists are in an object
            continue
        try:
            made = vars(part(num_hidden_layers=LAYERS))
        except Exception:  # a class that can't be made of nothing, each for a reason of its own
            continue
        for field in MADE:
            kinds = [*map(str, made.get(field) or ())]
            if len({*kinds}) > 1:
                blocks = (size for size in range(1, 13) if all(kinds[i] == kinds[i % size] for i in range(LAYERS)))
                found[field][kind] = next(blocks, None)
                assert not (by := MADE[field][kind][1]) or any(
                    [*map(str, getattr(part(num_hidden_layers=LAYERS, **{by: value}), field))] != kinds
                    for value in (2, 3, [0, 1, 2], "1,2")
                    if isinstance(value, str) == (by == "moe_layers_enum")
                    and isinstance(value, list) == by.endswith("ids")
                )
                fewer = getattr(part(num_hidden_layers=3), field)  # a cut of the first layers
                assert (kind in ENDING) == ([*map(str, fewer)] != kinds[:3]), kind
    assert found == {field: {kind: block for kind, (block, _) in kinds.items()} for field, kinds in MADE.items()}


def test_layers_that_share_an_indexer() -> None:
    """Each with the layer whose choice it takes."""
    config = dict(num_hidden_layers=5, indexer_types=["full", "shared", "full", "shared", "shared"], index_topk_freq=2)
    assert cut(config, [0, 2, 4], 5) == config | dict(num_hidden_layers=3, indexer_types=["full", "full", "shared"])
    config = dict(num_hidden_layers=5, index_topk_pattern="FSFSS")
    assert cut(config, [2, 4], 5) == dict(num_hidden_layers=2, index_topk_pattern="FS")


def test_texts_by_layer() -> None:
    """A letter for each, or numbers with commas between; some count from 1, in an object of their own."""
    config = dict(num_hidden_layers=5, hybrid_override_pattern="M*E-M", moe_layers_enum="1,2,4", ple_layer_ids=[1, 4])
    nested = dict(linear_attn_config=dict(head_dim=5, full_attn_layers=[2, 5], kda_layers=[1, 3, 4]))
    assert cut(config | nested, [0, 2, 4], 5) == dict(
        num_hidden_layers=3,
        hybrid_override_pattern="MEM",
        moe_layers_enum="1,2",
        ple_layer_ids=[1],
        linear_attn_config=dict(head_dim=5, full_attn_layers=[3], kda_layers=[1, 2]),
    )


def test_blocks_of_layers() -> None:
    """Letters that are repeated, and groups, stay where they still hold."""
    config = dict(num_hidden_layers=8, sliding_window_pattern="LLLG", layer_group_size=3, kda_lower_bound=-5.0)
    assert cut(config, [0, 1, 2], 8) == config | dict(num_hidden_layers=3)
    config = dict(num_hidden_layers=4, sliding_window_pattern="LLLG", layer_types=list("aaab"))
    assert cut(config, [2, 3], 4) == config | dict(num_hidden_layers=2, layer_types=["a", "b"])
    config = dict(num_hidden_layers=8, scale_attn_by_inverse_layer_idx=False, moe_layer_end_index=4)
    assert cut(config, [1, 3, 5], 8) == config | dict(num_hidden_layers=3, moe_layer_end_index=1)


def test_prediction_layers() -> None:
    """Behind the last layer they are kept with their values, or dropped with their number; elsewhere they stay."""
    step = dict(num_hidden_layers=3, rope_theta=[1.0, 2.0, 3.0, 9.0], partial_rotary_factors=[0.5, 1.0, 0.5, 1.0])
    assert cut(step, [0, 2], 3) == dict(
        num_hidden_layers=2, rope_theta=[1.0, 3.0, 9.0], partial_rotary_factors=[0.5, 0.5, 1.0]
    )
    config = dict(num_hidden_layers=3, num_nextn_predict_layers=1, compress_ratios=[1, 2, 3, 9])
    kept = cut(config, [0, 2, 3], 3, numbered_mtp=True)
    assert kept == dict(num_hidden_layers=2, num_nextn_predict_layers=1, compress_ratios=[1, 3, 9])
    dropped = cut(config, [0, 2], 3, numbered_mtp=True)
    assert dropped == dict(num_hidden_layers=2, num_nextn_predict_layers=0, compress_ratios=[1, 3])
    elsewhere = cut(config, [0, 2], 3)
    assert elsewhere == dict(num_hidden_layers=2, num_nextn_predict_layers=1, compress_ratios=[1, 3, 9])


def test_sections() -> None:
    """A text model's own section is edited, a tower's isn't; a vocabulary that no section names is added there."""
    tower = dict(num_hidden_layers=2, layer_types=["x", "y"])
    config = dict(vision_config=tower, text_config=dict(num_hidden_layers=2, layer_types=["a", "b"], num_experts=8))
    made = cut(config, [1], 2, experts=range(2, 4), vocab_rows=10)
    assert made == dict(
        vision_config=tower, text_config=dict(num_hidden_layers=1, layer_types=["b"], num_experts=2, vocab_size=10)
    )


@pytest.mark.parametrize(
    ("config", "layers", "message"),
    [
        (dict(full_attention_interval=4), [0, 1, 2, 4], "layer 4 would be layer 3, at another place of its block"),
        (dict(new_list=[0.1] * 8), [0, 1], "8 values, as many as there are layers, and whether"),
        (dict(wide_layers=[1, 5]), [0, 1], "'wide_layers' has 2 values, and whether it says something of each layer"),
        (dict(text_config=dict(other_pattern="ab")), [0, 1], "'text_config.other_pattern' is 'ab', and whether"),
        (dict(hybrid_override_pattern="M*M-"), [0, 1], "'hybrid_override_pattern' is 'M*M-', and whether"),
        (dict(attn_config=dict(full_attn_layers="2-5")), [0, 1], "should be numbers of layers with commas between"),
        (dict(moe_layers_enum="3-5"), [0, 1], "should be numbers of layers with commas between"),
        (dict(moe_layers_enum="4,5"), [0, 1], "and no layer of these is kept"),
        (dict(sliding_window_pattern="LLLG"), [1, 2], "layer 1 would be layer 0, at another place of its block"),
        (
            dict(block_types=["recurrent", "recurrent", "attention"]),
            [0, 2],
            "layer 2 would be layer 1, at another place",
        ),
        (
            dict(scale_attn_by_inverse_layer_idx=True),
            [1, 2],
            "what layer 1 computes depends on its number, which would be 0",
        ),
        (dict(model_type="diffllama"), [0, 2], "what layer 2 computes depends on its number"),
        (dict(layer_group_size=4), [0, 1, 2, 3], "is 4: what a layer computes depends on how many layers there are"),
        (
            dict(layer_group_size=3, kda_safe_gate=True),
            [0, 1, 3],
            "layer 3 would be layer 2, at another place of its block",
        ),
        (dict(attn_type_list=[0, 1] * 4), [0, 1], "what a layer computes depends on how many layers there are"),
        (dict(model_type="minimax", layer_types=list("abababab")), [0, 1], "depends on how many layers there are"),
        (dict(scale_depth=1.4), [0, 1], "depends on how many layers there are"),
        (dict(model_type="beam"), [0, 2], "what layer 2 computes depends on its number"),
        (dict(n_layers_per_attn_res_block=2), [0, 2], "layer 2 would be layer 1, at another place of its block"),
        (
            dict(model_type="gemma4_text", layer_types=["sliding"] * 7 + ["full_attention"]),
            [0, 1],
            "says 'sliding' of layer 1, and",
        ),
        (dict(num_kv_shared_layers=4, layer_types=list("abababab")), [0, 1, 4], "takes keys and values of layer 2"),
        (dict(indexer_types=["full", "shared"] * 4), [0, 3], "layer 3 takes the tokens that layer 2 chose"),
        (dict(index_topk_pattern="FSSFSSSS"), [0, 1, 5], "layer 5 takes the tokens that layer 3 chose"),
        (dict(index_topk_freq=4, index_skip_topk_offset=3), [0, 3, 4], "another place among those that share"),
        (
            dict(quantization_config={"ignore": ["re:.*layers\\.[0-3]\\..*"]}),
            [0],
            "a pattern of layers that can't be renumbered",
        ),
        (dict(quantization_config={"ignore": ["model.layers.1*"]}), [1, 10], "names more layers than 1"),
    ],
)
def test_what_cannot_be_cut(config: dict[str, Any], layers: list[int], message: str) -> None:
    edits = edit(config, renumbered(layers, 8 if layers != [1, 10] else 11))
    assert [option for option, _ in edits.problems] == ["--layers"]
    assert message in edits.problems[0][1]


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("lm_head", "lm_head"),
        ("model.layers.5.self_attn", "model.layers.1.self_attn"),
        ("model.layers.3.self_attn", None),
        ("model.layers.5", "model.layers.1"),
        ("model.layers.5*", "model.layers.1*"),
        ("layers.5.mlp", "layers.1.mlp"),
        ("re:.*layers\\.5\\..*", "re:.*layers\\.1\\..*"),
        (r"-:model\.layers\.5\.mlp", r"-:model\.layers\.1\.mlp"),
        (r"re:model\.layers\.\d+\.mlp.*", r"re:model\.layers\.\d+\.mlp.*"),
        ("model.layers.*.mlp", "model.layers.*.mlp"),
        ("vision_tower.encoder.layers.3.mlp", "vision_tower.encoder.layers.3.mlp"),
        ("model.layers.5.mlp.experts.2.up_proj", "model.layers.1.mlp.experts.0.up_proj"),
        ("model.layers.5.mlp.experts.1.up_proj", None),
        ("model.layers.5.mlp.gate", "model.layers.1.mlp.gate"),
    ],
)
def test_names_in_a_quantisation(name: str, new: str | None) -> None:
    """Module names, globs and regular expressions: renumbered, gone, or as they were."""
    assert renumber(name, renumbered([0, 5], 8, experts=range(2, 4))) == new


def test_lists_and_tables_of_a_quantisation() -> None:
    """Wherever they stand in what describes it, in `config.json` and beside it."""
    described = {
        "quant_method": "x", "bits": 4, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp", "model.layers.1.mlp"],
        "quantized_layers": {"model.layers.1.mlp": {"bits": 8}, "model.layers.0.mlp": {"bits": 2}},
    }  # fmt: skip
    config = dict(
        num_hidden_layers=2, quantization_config=described, **{"hf_quant_config.json": {"quantization": described}}
    )
    edits = edit(config, renumbered([1], 2), ["hf_quant_config.json"])
    new = described | {
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"],
        "quantized_layers": {"model.layers.0.mlp": {"bits": 8}},
    }
    made = applied(config, edits.made)
    assert made["quantization_config"] == made["hf_quant_config.json"]["quantization"] == new
    assert config["quantization_config"] is described
    assert described["modules_to_not_convert"][1:] == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_what_the_router_chooses() -> None:
    """No more experts than are left, of the groups that it chooses; which is said."""
    grouped = dict(n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4)
    edits = edit(grouped, renumbered([0], 1, experts=range(16)))
    assert applied(grouped, edits.made) == grouped | dict(n_routed_experts=16)
    plain = dict(num_local_experts=8, num_experts_per_tok=4)
    edits = edit(plain, renumbered([0], 1, experts=range(2)))
    assert applied(plain, edits.made) == dict(num_local_experts=2, num_experts_per_tok=2)
    assert edits.notes == ["num_experts_per_tok is 2, not 4: the router has no more experts to choose from"]
    assert [*check_experts(grouped, 16)] == [*check_experts(plain, 1)] == []
    assert "8 groups" in next(check_experts(grouped, 8))
    assert "8 groups" in next(check_experts(grouped, 20))
    assert not [*check_experts(grouped | dict(topk_method="group_limited_greedy"), 8)]
    unsaid = dict(model_type="deepseek_v3", n_routed_experts=256, num_experts_per_tok=8)
    assert "8 groups" in next(check_experts(unsaid, 12))
    assert not [*check_experts(unsaid | dict(model_type="glm_moe_dsa"), 12)]


def test_tokens_without_rows() -> None:
    """They are named, and one that pads is none: torch makes no embedding whose padding lies outside of it."""
    config = dict(vocab_size=100, bos_token_id=90, eos_token_id=3, pad_token_id=99)
    edits = edit(config, renumbered([0], 1, vocab_rows=50))
    assert applied(config, edits.made) == config | dict(vocab_size=50, pad_token_id=None)
    assert edits.notes == [
        "tokens from 50 on have no row, bos_token_id 90, pad_token_id 99 among them; the tokenizer knows them all the same"
    ]
