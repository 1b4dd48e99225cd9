"""Releases made to take a planner's time or memory: small files, with whatever sizes and names their writer liked.

`FOLDERS` are those that once did; `releases` makes others. Sparse files hold the data, so that none takes disk.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from support import INDEX, LLAMA, shapes

SIZES = {"BF16": 2, "F32": 4, "U8": 1, "I8": 1, "I32": 4, "F8_E4M3": 1}
Specs = Mapping[str, tuple[str, tuple[int, ...]]]


def write_file(path: Path, tensors: Specs) -> None:
    """A safetensors file of these tensors, all of them zeros that take no space."""
    entries, at = [], 0
    for name, (dtype, shape) in tensors.items():
        nbytes = SIZES[dtype]
        for size in shape:
            nbytes *= size
        entries.append(
            f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":{json.dumps(shape)},"data_offsets":[{at},{at + nbytes}]}}'
        )
        at += nbytes
    header = f"{{{','.join(entries)}}}".encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)


def write_release(folder: Path, config: Mapping[str, Any], *files: Specs) -> None:
    """A release of one file, or of several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if len(files) == 1:
        write_file(folder / "model.safetensors", files[0])
        return
    weight_map = {}
    for number, tensors in enumerate(files):
        write_file(folder / f"model-{number}.safetensors", tensors)
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def empty(names: Iterable[str]) -> Specs:
    return dict.fromkeys(names, ("BF16", (0,)))


def bf16(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("BF16", shape) for name, shape in shapes(config).items()}


def letters(number: int) -> str:
    """A name of letters for each number: inventories can't take them together."""
    made = ""
    while number:
        number, digit = divmod(number, 26)
        made += chr(97 + digit)
    return made or "a"


MIXTRAL = LLAMA | dict(model_type="mixtral", num_local_experts=1500, num_experts_per_tok=2, num_hidden_layers=2000)
GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=64, hidden_size=2, intermediate_size=1 << 27, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=2, num_local_experts=2, num_experts_per_tok=2, tie_word_embeddings=False,
)  # fmt: skip


def _int8(folder: Path, size: int) -> None:
    name = "model.layers.0.self_attn.q_proj"
    tensors = bf16(LLAMA)
    rows, columns = shapes(LLAMA)[f"{name}.weight"]
    tensors |= {
        f"{name}.weight": ("I8", (rows, columns)),
        f"{name}.SCB": ("F32", (rows,)),
        f"{name}.weight_format": ("U8", (size,)),
    }
    write_release(
        folder, LLAMA | dict(quantization_config=dict(quant_method="bitsandbytes", load_in_8bit=True)), tensors
    )


def _gptq(folder: Path, bias: int) -> None:
    """A bias that the table has no place for, as AutoGPTQ writes them, of any size."""
    name, rows, groups = "model.layers.0.self_attn.q_proj", 32, 1
    tensors = bf16(LLAMA | dict(num_attention_heads=bias // 8, num_key_value_heads=2))
    columns = tensors.pop(f"{name}.weight")[1][0]
    tensors |= {
        f"{name}.qweight": ("I32", (rows // 8, columns)),
        f"{name}.qzeros": ("I32", (groups, columns // 8)),
        f"{name}.scales": ("BF16", (groups, columns)),
        f"{name}.bias": ("BF16", (columns,)),
    }
    config = LLAMA | dict(
        num_attention_heads=bias // 8,
        quantization_config=dict(quant_method="gptq", bits=4, group_size=32, sym=True, desc_act=False),
    )
    write_release(folder, config, tensors)


def _gpt_oss(folder: Path) -> None:
    c = GPT_OSS
    wide, embed, experts = c["intermediate_size"], c["hidden_size"], c["num_local_experts"]
    layers = [f"model.layers.{i}" for i in range(2)]
    made: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, embed),
        "model.norm.weight": (embed,),
        "lm_head.weight": (64, embed),
    }
    for layer in layers:
        made |= {f"{layer}.{name}_layernorm.weight": (embed,) for name in ("input", "post_attention")}
        made |= {f"{layer}.self_attn.sinks": (2,)}
        for name, rows in dict(q=4, k=2, v=2).items():
            made |= {
                f"{layer}.self_attn.{name}_proj.weight": (rows, embed),
                f"{layer}.self_attn.{name}_proj.bias": (rows,),
            }
        made |= {f"{layer}.self_attn.o_proj.weight": (embed, 4), f"{layer}.self_attn.o_proj.bias": (embed,)}
        made |= {f"{layer}.mlp.router.weight": (experts, embed), f"{layer}.mlp.router.bias": (experts,)}
        made |= {
            f"{layer}.mlp.experts.gate_up_proj": (experts, embed, 2 * wide),
            f"{layer}.mlp.experts.gate_up_proj_bias": (experts, 2 * wide),
        }
        made |= {
            f"{layer}.mlp.experts.down_proj": (experts, wide, embed),
            f"{layer}.mlp.experts.down_proj_bias": (experts, embed),
        }
    write_release(folder, c, {name: ("BF16", shape) for name, shape in made.items()})


def _cut_off(folder: Path, files: int, whole: int) -> None:
    """A release most of whose files end in their headers, so that tensors of every layer are missing."""
    config = LLAMA | dict(model_type="mixtral", num_local_experts=256, num_experts_per_tok=2, num_hidden_layers=64)
    experts = itertools.product(range(64), range(256), ("w1", "w2", "w3"))
    names = [f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}.weight" for layer, expert, w in experts]
    write_release(folder, config, *(dict.fromkeys(names[file::files], ("BF16", (8, 8))) for file in range(files)))
    for file in range(whole, files):
        os.truncate(folder / f"model-{file}.safetensors", 100)


LARGE = LLAMA | dict(hidden_size=1 << 16, intermediate_size=1 << 21, num_attention_heads=1 << 13)

FOLDERS: dict[str, Callable[[Path], object]] = {
    "2,000 layers of 1,500 experts, 240,000 empty tensors": lambda f: write_release(
        f, MIXTRAL, empty(f"t{i}" for i in range(240_000))
    ),
    "2,000 layers of 80 experts, 240,000 empty tensors": lambda f: write_release(
        f, MIXTRAL | dict(num_local_experts=80), empty(f"t{i}" for i in range(240_000))
    ),
    "windows of 2^27 steps": _gpt_oss,
    "a weight_format of 3 GiB": lambda f: _int8(f, 3 << 30),
    "a weight_format of nothing": lambda f: _int8(f, 0),
    "a spare bias of 1 GiB": lambda f: _gptq(f, 1 << 29),
    "5 files of 240,000 tensors": lambda f: write_release(
        f, LLAMA, *(empty(f"{file}.{i}" for i in range(240_000)) for file in range(5))
    ),
    "240,000 names of letters": lambda f: write_release(
        f, LLAMA, empty(f"model.{letters(i)}.weight" for i in range(240_000))
    ),
    "240,000 names of letters, of no known model": lambda f: write_release(
        f, dict(model_type="x"), empty(f"model.{letters(i)}.weight" for i in range(240_000))
    ),
    "a name of 20 MB": lambda f: write_release(f, LLAMA, bf16(LLAMA) | {"x" * 20_000_000: ("BF16", (1,))}),
    "a name of 20 MB that is left out": lambda f: write_release(
        f, LLAMA, bf16(LLAMA) | {f"model.layers.{'9' * 20_000_000}.self_attn.rotary_emb.inv_freq": ("BF16", (1,))}
    ),
    "1.7 TiB": lambda f: write_release(f, LARGE, bf16(LARGE)),
    "more than can be meant": lambda f: write_release(f, LARGE | dict(num_hidden_layers=8), bf16(LARGE)),
    "36 of 40 files cut off, of 64 layers of 256 experts": lambda f: _cut_off(f, files=40, whole=4),
    "450,000 empty tensors": lambda f: write_release(f, LLAMA, empty(f"t{i}" for i in range(450_000))),
    "an index of a million entries": lambda f: (
        write_release(f, LLAMA, bf16(LLAMA)),
        (f / INDEX).write_text(json.dumps({"weight_map": {str(i): "model.safetensors" for i in range(1_000_000)}})),
    ),
    "an index of 500,000 files": lambda f: (
        write_release(f, LLAMA, bf16(LLAMA)),
        (f / INDEX).write_text(json.dumps({"weight_map": {f"{i}": f"{i}.safetensors" for i in range(500_000)}})),
    ),
}


# --- any others -------------------------------------------------------------------------------------------------------


def releases() -> st.SearchStrategy[tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]], int]]:
    """A config with sizes of any order of magnitude, tensors that fit it or don't, and how many strange ones there are
    besides.
    """
    size = st.integers(0, 40).map(lambda n: 1 << n) | st.integers(0, 1 << 20)
    fields = st.dictionaries(
        st.sampled_from(["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
                         "num_local_experts", "num_experts", "moe_intermediate_size", "n_routed_experts", "sliding_window"]),
        size, max_size=4,
    )  # fmt: skip
    kinds = st.sampled_from(["llama", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma3_text", "x"])
    shape = st.lists(size, max_size=3).map(tuple)
    strange = st.dictionaries(
        st.text(min_size=1, max_size=20), st.tuples(st.sampled_from(list(SIZES)), shape), max_size=4
    )
    count = st.sampled_from([0, 0, 10, 1000])

    def fitting(
        kind: str, fields: dict[str, int], strange: dict[str, Any], fits: bool, count: int
    ) -> tuple[dict[str, Any], dict[str, Any], int]:
        config = LLAMA | dict(model_type=kind) | fields
        small = fits and kind == "llama" and config["num_hidden_layers"] <= 200
        return config, (bf16(config) if small else bf16(LLAMA)) | strange, count

    return st.builds(fitting, kinds, fields, strange, st.booleans(), count)
