"""What the end-to-end tests share: checkpoints to convert, the command, stock Orbax, MaxText's digests, and a reference
in plain numpy.
"""

from __future__ import annotations

import fcntl
import functools
import gzip
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import training_run
from digests import digest as digest
from facts.tiny import shapes as shapes
from lazily import lazily
from measured import call as call
from processes import run
from safetensors import safe_open
from safetensors.numpy import save_file

from weightbeam.formats.encodings import Encoding
from weightbeam.formats.orbax import find_items, open_arrays
from weightbeam.formats.safetensors import HfCheckpoint, Shard, Tensor, read_boxes
from weightbeam.formats.targets import orbax, release
from weightbeam.model_mappings.boxes import Box, whole
from weightbeam.pipelines.cli import main

ocp = lazily("orbax.checkpoint")

HERE = Path(__file__).parent
BF16, F32, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn)
INDEX = "model.safetensors.index.json"
TIME = 1_767_225_600 * 10**9  # of files, in nanoseconds


# --- the command, and what it makes -----------------------------------------------------------------------------------


def convert(source: Path, output: Path, *options: str) -> Path:
    """Runs `weightbeam convert` in this process; returns the step's folder."""
    assert main(["convert", "--source", str(source), "--output", str(output), *options]) == 0
    step = options[options.index("--step") + 1] if "--step" in options else "0"
    return output / step


def reshard(source: Path, output: Path, *options: object, status: int = 0) -> Path:
    """Runs `weightbeam reshard` in this process; returns the folder of the only step."""
    assert call("reshard", source, output, *options) == status
    return find_items(output).folder.parent if status == 0 else output


def arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by its key."""
    return {key: np.asarray(store.read().result()) for key, store in open_arrays(find_items(checkpoint)).items()}


def stop_midway(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a command whose second unit can't be written."""
    with monkeypatch.context() as patched:
        for module in (orbax, release):
            patched.setattr(module, "write_unit", _full_after_one(module.write_unit))
        assert call(*arguments) == 1


def _full_after_one(write: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose second call and all others meet a full disk."""
    calls = []

    def write_one(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(*given, **named)

    return write_one


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree's leaves by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def restore(step: Path) -> dict[str, np.ndarray]:
    """The parameters of a checkpoint as stock Orbax restores them, without `params.params.`; variables of other
    collections without `params.`
    """
    tree = ocp.PyTreeCheckpointer().restore(step / "items")
    assert set(tree) == {"step", "params", "opt_state"}
    assert (tree["step"], tree["opt_state"]) == (int(step.name), {})
    return flatten(tree["params"].pop("params")) | flatten(tree["params"])


def bare(key: str) -> str:
    """An array's key as `restore` has it."""
    return key.removeprefix("params.").removeprefix("params.")


def converted(source: Path, output: Path, *options: str) -> dict[str, np.ndarray]:
    """`convert` and `restore`."""
    return restore(convert(source, output, *options))


def digests(arrays: Mapping[str, np.ndarray]) -> dict[str, list]:
    return {key: digest(array) for key, array in arrays.items()}


def assert_same_bits(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert set(got) == set(wanted)
    differing = {
        key: (digest(got[key]), digest(wanted[key])) for key in wanted if digest(got[key]) != digest(wanted[key])
    }
    assert not differing


# --- MaxText's own bits -----------------------------------------------------------------------------------------------


@functools.cache
def given(version: str = "e591f30") -> dict[str, dict]:
    """What the converter of a version of MaxText made of each case, see `cases/make_digests.py`."""
    return json.loads(gzip.decompress((HERE / "cases" / f"digests-{version}.json.gz").read_bytes()))


def given_arrays(case: str, layout: str, version: str = "e591f30") -> dict[str, list]:
    """The digests of a case's arrays, by their names without `params.params.`, or `params.` of other collections."""
    found = given(version)[case][layout]
    return {key.removeprefix("params.").removeprefix("params."): value for key, value in found.items()}


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file, by the safetensors library."""
    with safe_open(path, "np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, by the safetensors library."""
    return {name: values for path in sorted(folder.glob("*.safetensors")) for name, values in read_file(path).items()}


def read_model(generated: Path, model: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The config of a model that `cases/models.py` wrote, the tensors of its files, and its `state_dict()`."""
    folder = generated / "models" / model
    return read_config(folder), read_tensors(folder), read_file(generated / "models" / f"{model}.state.safetensors")


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_bytes())


def input_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """One digest of names, dtypes, shapes and bytes, whatever files they are in."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype.name} {tensor.shape} ".encode() + tensor.tobytes())
    return sha.hexdigest()


def generate(factory: pytest.TempPathFactory) -> Path:
    """The folder that `cases/models.py` wrote."""
    return write_once(factory, "generated", [sys.executable, str(HERE / "cases" / "models.py")])


def write_once(factory: pytest.TempPathFactory, name: str, script: list[str]) -> Path:
    """The folder that a script wrote, which is its last argument: once in a test run, by whichever of pytest-xdist's
    processes comes first.
    """
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            run(*script, root / f"{name}.part", status=0, timeout=900, env=os.environ | {"PYTHONPATH": str(HERE)})
            (root / f"{name}.part").rename(folder)
    return folder


def decoded(encoding: Encoding, box: Box | None = None, dtype: np.dtype = F32) -> np.ndarray:
    """The values of a box of a tensor, by default of all of it."""
    box = whole(encoding.shape) if box is None else box
    return encoding.decode(read_boxes(encoding.reads(box))[0], box, dtype)


# --- checkpoints made here --------------------------------------------------------------------------------------------

LLAMA = dict(
    model_type="llama", vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
    num_hidden_layers=2, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_MOE = LLAMA | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
DEEPSEEK = LLAMA | dict(
    model_type="deepseek_v3", num_key_value_heads=4, num_hidden_layers=3, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8, moe_intermediate_size=24, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
)  # fmt: skip

# Real sizes, for plans: no tensor of these is ever made.
LLAMA_8B = LLAMA | dict(
    vocab_size=128256,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
    num_hidden_layers=32,
)
DEEPSEEK_V3 = DEEPSEEK | dict(
    vocab_size=129280, hidden_size=7168, num_attention_heads=128, num_key_value_heads=128, intermediate_size=18432, num_hidden_layers=61,
    first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=2048,
    n_routed_experts=256,
)  # fmt: skip


def random_tensors(config: Mapping[str, Any], dtype: np.dtype = BF16, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights for a small model."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes(config).items()}


def save(folder: Path, config: Mapping[str, Any], *shards: Mapping[str, np.ndarray]) -> Path:
    """Writes a checkpoint: one file, or several with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if len(shards) == 1:
        save_file(dict(shards[0]), folder / "model.safetensors")
        return folder
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(dict(shard), folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def make_release(
    folder: Path, config: Mapping[str, Any] = LLAMA, files: int = 1, dtype: np.dtype = BF16, seed: int = 0
) -> Path:
    """Writes a checkpoint of random weights, neighbours in different files where there are several."""
    return save(folder, config, *split(random_tensors(config, dtype, seed), files))


def make_dated_release(folder: Path, seed: int) -> Path:
    """The same, and all have the same sizes and times, as of reproducible archives."""
    for path in make_release(folder, seed=seed).iterdir():
        os.utime(path, ns=(TIME, TIME))
    return folder


def files_of(release: Path) -> dict[str, bytes | Path]:
    """A checkpoint as it is published: weights from where they are, the small files' bytes."""
    return {
        path.name: path if path.suffix == ".safetensors" else path.read_bytes() for path in sorted(release.iterdir())
    }


def begin_run(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint in float32, and the state with which a run of it begins."""
    like = make_release(folder / "like", LLAMA | dict(architectures=["LlamaForCausalLM"], dtype="float32"), dtype=F32)
    step = convert(like, folder / "ours", "--save_dtype", "float32", "--maxtext_model", "llama2-7b")
    return like, training_run.load_state(step)


def peft_adapter(
    folder: Path, modules: Mapping[str, tuple[int, int]], rank: int = 4, **config: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """An adapter as PEFT stores it, of random factors with alpha twice the rank, and its tensors.

    Args:
      modules: by name, (rows, columns) of the weights that it is for.
      config: fields of its `LoraConfig`.
    """
    import peft  # only now: imports torch

    rng, factors = np.random.default_rng(len(modules)), {}
    for module, (rows, columns) in modules.items():
        for name, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            factors[f"base_model.model.{module}.lora_{name}.weight"] = rng.standard_normal(shape, np.float32)
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in modules})
    peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM", **config
    ).save_pretrained(folder)
    return folder, factors


def split(tensors: Mapping[str, np.ndarray], parts: int) -> list[dict[str, np.ndarray]]:
    """Tensors dealt out to `parts` files, neighbours into different ones."""
    return [dict(list(tensors.items())[part::parts]) for part in range(parts)]


def headers_only(
    config: Mapping[str, Any],
    dtype: np.dtype = BF16,
    shard_bytes: int = 5_000_000_000,
    known: Mapping[str, tuple[int, ...]] | None = None,
) -> HfCheckpoint:
    """A checkpoint that is known by its headers, without files, whatever its size; its tensors are those `known`, else
    `shapes(config)`.
    """
    shards: list[Shard] = []
    tensors: list[Tensor] = []
    offset = 0

    def close() -> None:
        nonlocal offset
        shards.append(Shard(tensors[0].path, f"/nowhere/{tensors[0].path}", offset, 0, tuple(tensors)))
        tensors.clear()
        offset = 0

    for name, shape in (known or shapes(config)).items():
        tensors.append(Tensor(name, dtype, shape, f"model-{len(shards):05}.safetensors", offset))
        offset += tensors[-1].nbytes
        if offset >= shard_bytes:
            close()
    if tensors:
        close()
    return HfCheckpoint("/nowhere", dict(config), tuple(shards))


# --- a reference in plain numpy ---------------------------------------------------------------------------------------


def unfuse(config: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """transformers v5's in-memory spelling (experts in two tensors) -> the hub's (three for each expert)."""
    mixtral = config["model_type"] == "mixtral"
    made = {}
    for name, values in state.items():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith(".experts.gate_up_proj"):
            width = values.shape[1] // 2
            parts = {
                ("w1" if mixtral else "gate_proj"): values[:, :width],
                ("w3" if mixtral else "up_proj"): values[:, width:],
            }
        elif name.endswith(".experts.down_proj"):
            parts = {("w2" if mixtral else "down_proj"): values}
        else:
            made[name] = values
            continue
        prefix = name.rpartition(".")[0]
        made |= {
            f"{prefix}.{expert}.{part}.weight": stacked[expert]
            for part, stacked in parts.items()
            for expert in range(len(stacked))
        }
    return made


def reference(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: np.dtype, paired_rope: bool = False
) -> dict[str, np.ndarray]:
    """MaxText's scanned arrays of a model in the hub's spelling: float32 throughout, one cast at the end.

    Every kernel is `x.T` reshaped; layers are stacked on axis 1, experts on axis 0 (MaxText, utils/param_mapping.py,
    e591f30). DeepSeek's router bias is a variable besides, with its layers on axis 0 (0.2.5, layers/moe.py).
    """
    c = config
    heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    layers, dense = c["num_hidden_layers"], c.get("first_k_dense_replace", 0)
    experts = c.get("n_routed_experts") or c.get("num_local_experts") or c.get("num_experts") or 0

    def get(name: str, *shape: int) -> np.ndarray:
        flipped = tensors[f"{name}.weight" if f"{name}.weight" in tensors else name].astype(np.float32).T
        return flipped.reshape(shape or flipped.shape)

    def pair(values: np.ndarray) -> np.ndarray:
        """(embed, heads, dim): the two rotary halves of each head, one element of each in turn."""
        halves = values[..., : dim // 2], values[..., dim // 2 :]
        return np.stack(halves, -1).reshape(values.shape) if paired_rope else values

    def gated(target: str, source: str) -> dict[str, np.ndarray]:
        return {
            f"{target}.{to}.kernel": get(f"{source}.{name}")
            for to, name in dict(wi_0="gate_proj", wi_1="up_proj", wo="down_proj").items()
        }

    def layer(i: int) -> dict[str, np.ndarray]:
        prefix = f"model.layers.{i}."
        here = prefix + "self_attn."
        made = {
            f"{to}_self_attention_layer_norm.scale": get(f"{prefix}{name}_layernorm")
            for to, name in dict(pre="input", post="post_attention").items()
        }
        attention: dict[str, np.ndarray] = {}
        if "kv_lora_rank" in c:
            attention["wq_a.kernel"], attention["q_norm.scale"] = get(here + "q_a_proj"), get(here + "q_a_layernorm")
            attention["wq_b.kernel"] = get(here + "q_b_proj", c["q_lora_rank"], heads, -1)
            attention["wkv_a.kernel"], attention["kv_norm.scale"] = (
                get(here + "kv_a_proj_with_mqa"),
                get(here + "kv_a_layernorm"),
            )
            attention["wkv_b.kernel"] = get(here + "kv_b_proj", c["kv_lora_rank"], heads, -1)
            attention["out.kernel"] = get(here + "o_proj", heads, c["v_head_dim"], -1)
        else:
            scale = np.float32(dim**-0.5) if c["model_type"] in ("llama", "mistral", "mixtral") else np.float32(1)
            attention["query.kernel"] = pair(get(here + "q_proj", -1, heads, dim)) * scale
            attention["key.kernel"] = pair(get(here + "k_proj", -1, kv, dim))
            attention["value.kernel"] = get(here + "v_proj", -1, kv, dim)
            attention["out.kernel"] = get(here + "o_proj", heads, dim, -1)
            if c["model_type"].startswith("qwen3"):
                attention["query_norm.scale"], attention["key_norm.scale"] = get(here + "q_norm"), get(here + "k_norm")
        made |= {f"self_attention.{name}": values for name, values in attention.items()}
        if not experts or i < dense:
            return made | gated("mlp", f"{prefix}mlp")
        source, names = f"{prefix}mlp", dict(wi_0="gate_proj", wi_1="up_proj", wo="down_proj")
        router = {"deepseek_v3": "DeepSeekMoeBlock_0.MoeBlock_0", "mixtral": "MoeBlock_0", "qwen3_moe": "moe_block"}[
            c["model_type"]
        ]
        if c["model_type"] == "mixtral":
            source, names = f"{prefix}block_sparse_moe", dict(wi_0="w1", wi_1="w3", wo="w2")
        made[f"{router}.gate.kernel"] = get(f"{source}.gate")
        made |= {
            f"{router}.{to}": np.stack([get(f"{source}.experts.{e}.{name}") for e in range(experts)])
            for to, name in names.items()
        }
        if c["model_type"] == "deepseek_v3":
            made[f"{router}.gate.bias"] = get(f"{source}.gate.e_score_correction_bias")
            made |= gated("DeepSeekMoeBlock_0.shared_experts", f"{source}.shared_experts")
        return made

    arrays = {"token_embedder.embedding": get("model.embed_tokens").T, "decoder.decoder_norm.scale": get("model.norm")}
    if not c.get("tie_word_embeddings"):
        arrays["decoder.logits_dense.kernel"] = get("lm_head")
    deepseek = "kv_lora_rank" in c
    for name, ids in {
        "dense_layers": range(dense),
        "moe_layers" if deepseek else "layers": range(dense, layers),
    }.items():
        stacked = [layer(i) for i in ids]
        arrays |= {
            f"decoder.{name}.{key}": np.stack([one[key] for one in stacked], 1)
            for key in (stacked[0] if stacked else ())
        }
    bias = "decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias"
    if bias in arrays:
        arrays[f"MoEBiasVar.{bias}"] = arrays[bias].T
    return {key: values.astype(dtype) for key, values in arrays.items()}


def nbytes(config: Mapping[str, Any], itemsize: int = 2) -> int:
    """Bytes of a model's weights."""
    return sum(math.prod(shape) for shape in shapes(config).values()) * itemsize
