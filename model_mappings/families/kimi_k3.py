"""Kimi K3: Kimi delta attention, each fourth layer and the last latent attention with an output gate and without RoPE, experts in a latent
behind a dense layer, and residuals that weigh the blocks of layers before (attention residuals).

The release's names, shapes and config.json are as projects that load it have them (NVIDIA-NeMo/Megatron-Bridge #5130, lablup/mlxcel #1741,
ml-explore/mlx-lm #1626): its `A_log` is as long as a head, of which all beyond the heads is zeros; transformers (v5.23.0) has no such
class. MaxText's tree is read from a branch and wasn't run: its layers (AI-Hypercomputer/maxtext, src/maxtext/models/kimi_k3.py and
layers/latent_moe.py, 4b27699, and layers/attn_res.py, 674adcf), and the names that its tests want of its mapping (tests/utils/
kimi_k3_parity_utils.py, 6a39975). The branch has no scan of these layers. It keeps experts in MXFP4, too; here they are decoded. Which
logical axes the gate of its latent attention and the decoder's last two arrays have couldn't be read: none are named.

Its latent attention is MaxText's MLA, which scales the softmax by 0.1 · ln(rope_factor) + 1, squared, in contexts beyond
`original_max_position_embeddings`, though nothing turns (layers/attention_mla.py, e591f30 and 0.2.5). The release has no such scale, and
the branch's tests keep it off; the file of the whole model in a later one (configs/models/kimi-k3.yml, 25f141a) has 32, of which
config.json says nothing.
"""

from weightbeam.model_mappings.blocks import NORMS, common_drops, experts, gated_mlp, text_part, tied_head, top
from weightbeam.model_mappings.config import ConfigError
from weightbeam.model_mappings.configuration import copied, derived, fixed, inside, only, real, size, written
from weightbeam.model_mappings.families.deepseek import latent_attention, latent_eps
from weightbeam.model_mappings.family import Family, Tower
from weightbeam.model_mappings.lines import CONTEXT, MLP, NORM_TOPK, SIZES, TIED, architecture, eps
from weightbeam.model_mappings.rules import rule, stack

HF = "language_model.model."
HEAD = "language_model.lm_head"
MOE = "block_sparse_moe"
HAS = dict(  # what MaxText's layers have in any case
    mla_use_output_gate=True, latent_moe_use_norm=True, moe_layer_freq=1,
)  # fmt: skip


def residual(target, source):
    """A query, as a norm's scale times a projection, by which the blocks of layers before are weighed."""
    return [
        rule(f"{target}_norm/scale", f"{source}_norm.weight", "embed", "norm"),
        rule(f"{target}_proj/kernel", f"{source}_proj.weight", "1 embed -> embed 1", "embed -"),
    ]


def delta_attention(padded):
    """Kimi delta attention with a gate of full rank, a convolution each for query, key and value."""
    to, of = "self_attention", "self_attn"
    return [
        *(rule(f"{to}/{name}_proj/kernel", f"{of}.{name}_proj.weight", "linear embed -> embed linear", "embed heads") for name in "qkvg"),
        *(rule(f"{to}/{name}_conv1d/kernel", f"{of}.{name}_conv1d.weight", "linear 1 taps -> taps 1 linear", "") for name in "qkv"),
        rule(f"{to}/f_a_proj/kernel", f"{of}.f_a_proj.weight", "linear_dim embed -> embed linear_dim", "embed -"),
        rule(f"{to}/f_b_proj/kernel", f"{of}.f_b_proj.weight", "linear linear_dim -> linear_dim linear", "- heads"),
        *padded,
        rule(f"{to}/dt_bias", f"{of}.dt_bias", "linear", "heads"),
        rule(f"{to}/b_proj/kernel", f"{of}.b_proj.weight", "heads embed -> embed heads", "embed heads"),
        rule(f"{to}/o_norm/scale", f"{of}.o_norm.weight", "linear_dim", ""),
        rule(f"{to}/out/kernel", f"{of}.o_proj.weight", "embed linear -> linear embed", "heads embed"),
    ]


def linear(c):
    """The part of `config.json` about delta attention.

    Raises:
      ConfigError: it has what MaxText's layers haven't.
    """
    part, heads = c.part("linear_attn_config"), c.size("num_attention_heads")
    if part.size("num_heads") != heads:
        raise ConfigError(f"config.json: 'num_heads' of linear_attn_config is {part['num_heads']}; MaxText has as many as 'num_attention_heads', {heads}")
    if part.get("use_full_rank_gate") is not True:
        raise ConfigError("config.json: 'use_full_rank_gate' of linear_attn_config should be true: MaxText's layer has no gate of low rank")
    if other := next((key for key, value in HAS.items() if c.get(key) != value), None):
        raise ConfigError(f"config.json: {other!r} should be {HAS[other]!r}, as MaxText's layers are, but is {c.get(other)!r}")
    return part


def full_layers(c):
    """The layers with latent attention, from 0 on; `config.json` counts from 1.

    Raises:
      ConfigError: its two lists don't say one kind for each layer.
    """
    n, part = c.size("num_hidden_layers"), c.part("linear_attn_config")
    full, delta = (part.get(key) for key in ("full_attn_layers", "kda_layers"))
    if not (isinstance(full, list) and isinstance(delta, list)) or sorted([*full, *delta]) != [*range(1, n + 1)]:
        raise ConfigError(f"config.json: 'full_attn_layers' and 'kda_layers' of linear_attn_config should have each of the layers 1 to {n} once")
    return [layer - 1 for layer in full]


def decay(c, layout, layer):
    """How long the tensor of a layer's decays is: a head, or as many as there are heads, which is all that counts."""
    shape = layout.shapes.get(f"{HF}layers.{layer}.self_attn.A_log", (linear(c).size("head_dim"),))
    return shape[0] if len(shape) == 1 else 0


def dims(c, layout):
    c = text_part(c)
    part, nope, rope, v_dim, kv_lora = linear(c), *(c.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    heads, dim, moe_mlp = c.size("num_attention_heads"), part.size("head_dim"), c.size("moe_intermediate_size")
    return dict(
        embed=c.size("hidden_size"), heads=heads, mlp=c.size("intermediate_size"), linear=heads * dim, linear_dim=dim, taps=part.size("short_conv_kernel_size"),
        q_dim=nope + rope, kv_dim=nope + v_dim, v_dim=v_dim, q_lora=c.size("q_lora_rank"), kv_lora=kv_lora, kv_lora_rope=kv_lora + rope,
        expert=c.size("num_experts"), latent=c.size("routed_expert_hidden_size"), moe_mlp=moe_mlp, shared_mlp=moe_mlp * c.size("num_shared_experts"),
    )  # fmt: skip


def stacks(c, layout):
    c = text_part(c)
    heads, full, dense = c.size("num_attention_heads"), full_layers(c), c.count("first_k_dense_replace")
    common = [*NORMS, *residual("self_attention_res", "self_attention_res"), *residual("mlp_res", "mlp_res")]
    gate = rule("self_attention/g_proj/kernel", "self_attn.g_proj.weight", "(heads v_dim) embed -> embed heads v_dim", "")
    router = "mlp/routed_experts/gate"
    moe = [
        rule(f"{router}/kernel", f"{MOE}.gate.weight", "expert embed -> embed expert", "embed -"),
        rule(f"{router}/e_score_correction_bias", f"{MOE}.gate.e_score_correction_bias", "expert", "-"),
        # experts in a latent: AI-Hypercomputer/maxtext, src/maxtext/layers/latent_moe.py, 4b27699
        rule("mlp/routed_expert_down_proj/kernel", f"{MOE}.routed_expert_down_proj.weight", "latent embed -> embed latent", "embed latent_moe"),
        *experts("mlp/routed_experts", f"{MOE}.experts", c.size("moe_intermediate_size"), False, ("w1", "w3", "w2"), "latent"),
        rule("mlp/routed_expert_norm/scale", f"{MOE}.routed_expert_norm.weight", "latent", "norm"),
        rule("mlp/routed_expert_up_proj/kernel", f"{MOE}.routed_expert_up_proj.weight", "embed latent -> latent embed", "latent_moe embed"),
        *gated_mlp("mlp/shared_expert", f"{MOE}.shared_experts", "shared_mlp"),
    ]
    last = [
        rule("decoder/output_attn_res_norm/scale", "output_attn_res_norm.weight", "embed", ""),
        rule("decoder/output_attn_res_proj/kernel", "output_attn_res_proj.weight", "1 embed -> embed 1", ""),
    ]
    out = [top(c, layout, hf=HF, head=HEAD), stack("", HF, 0, last)]
    for i in range(c.size("num_hidden_layers")):
        length = decay(c, layout, i)
        padded = rule("self_attention/A_log", f"self_attn.A_log[:{heads}]", "heads", "heads", padded=length if length > heads else 0)
        attention = [*latent_attention(c), gate] if i in full else delta_attention([padded])
        out.append(stack(f"decoder/layers_{i}", f"{HF}layers.{{layer}}.", i, [*common, *attention, *(moe if i >= dense else gated_mlp())]))
    return out


def drops(c, layout):
    c = text_part(c)
    n, heads, full = c.size("num_hidden_layers"), c.size("num_attention_heads"), full_layers(c)
    padding = {f"{HF}layers.{i}.self_attn.A_log[{heads}:]": "zeros behind the heads' values" for i in range(n) if i not in full}
    towers = dict.fromkeys(("vision_tower.*", "mm_projector.*"), Tower("vision tower, MaxText's Kimi K3 has none"))
    return common_drops(c, layout, hf=HF, head=HEAD) | padding | towers


def kda_layers(keys):
    return [layer for layer in range(1, keys["base_num_decoder_layers"] + 1) if layer - 1 not in keys["full_attn_layers"]]


SITU = "MaxText's layers have the value of the release whatever its configuration says; logits differ"
LINES = (
    *SIZES, MLP, eps(1e-5), CONTEXT, *TIED, *architecture("kimi_linear", "KimiLinearForCausalLM", "kimi_linear"),
    size("head_dim", "linear_attn_config.head_dim"),
    size("short_conv_kernel_size", "linear_attn_config.short_conv_kernel_size"),
    real("gate_lower_bound", "linear_attn_config.gate_lower_bound"),
    derived("full_attn_layers", lambda c, model: full_layers(c), "linear_attn_config.full_attn_layers", to_field=lambda layers: [at + 1 for at in layers]),
    copied("linear_attn_config.kda_layers", kda_layers),
    size("attn_res_block_size", "attn_res_block_size"),
    *(size(name, name) for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    fixed("attention_type", "mla"),
    fixed("rope_factor", 1),  # base.yml's 40 would scale the softmax by 1.87
    latent_eps(1e-5, "the release's own code"),
    fixed("mla_use_output_gate", True),
    size("base_moe_mlp_dim", "moe_intermediate_size"),
    size("moe_intermediate_size", "moe_intermediate_size"),
    size("num_experts", "num_experts"),
    size("num_experts_per_tok", "num_experts_per_token"),
    size("shared_experts", "num_shared_experts"),
    size("num_shared_experts", "num_shared_experts"),
    derived("shared_intermediate_size", lambda c, model: c.size("moe_intermediate_size") * c.size("num_shared_experts")),
    size("routed_expert_hidden_size", "routed_expert_hidden_size"),
    real("routed_scaling_factor", "routed_scaling_factor", default=1.0),
    derived("first_num_dense_layers", lambda c, model: c.count("first_k_dense_replace"), "first_k_dense_replace"),
    derived("first_k_dense_replace", lambda c, model: c.count("first_k_dense_replace")),
    *(only(field, value, SITU) for field, value in (("hidden_act", "situ"), ("activation_situ_beta", 4.0), ("activation_situ_linear_beta", 25.0))),
    only("mla_use_nope", True, "MaxText's latent attention turns nothing by its position; logits differ much"),
    only("moe_renormalize", True, NORM_TOPK, default=True),
    only("moe_router_activation_func", "sigmoid", "MaxText's router has sigmoid scores; logits differ much", default="sigmoid"),
    *(only(field, 1, "MaxText's router chooses among all experts; logits differ", default=1) for field in ("num_expert_group", "topk_group")),
    *(written(field, value) for field, value in HAS.items()),
)  # fmt: skip

FAMILY = Family(
    name="kimi_k3",
    models={"kimi-k3": ("kimi_k3",)},
    dims=dims,
    stacks=stacks,
    drops=drops,
    copies=lambda c, layout: tied_head(text_part(c), layout, hf=HF, head=HEAD),
    configuration={"kimi_k3": inside("text_config", LINES)},
    trees="branch, models/kimi_k3.py, layers/latent_moe.py (4b27699), read; *not run*",
    releases="Kimi K3 (a branch of MaxText)",
    missing="vision tower, experts kept in MXFP4",
    layouts=("unscanned",),
)
