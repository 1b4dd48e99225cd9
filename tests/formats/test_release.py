"""The small files of a release, its config.json edited, and its model card, as transformers and huggingface_hub read
them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from lazily import lazily

from weightbeam.formats.release import small_files as release
from weightbeam.formats.release.card import WRITTEN, model_card, readdress
from weightbeam.formats.release.config_text import ConfigEdits, edit_config
from weightbeam.formats.release.files import role_of
from weightbeam.formats.release.small_files import small_files
from weightbeam.formats.storage import StorageError, open_store
from weightbeam.formats.storage.strict_json import JsonError

transformers = lazily("transformers")

TAKEN = {
    "config": ["config.json"],
    "generation": ["generation_config.json"],
    "tokenizer": [
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
        "tokenizer.model", "tokenizer.model.v3", "tekken.json", "qwen.tiktoken", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model",
    ],
    "chat template": ["chat_template.jinja", "chat_template.json", "tool_chat_template_deepseekv3.jinja", "additional_chat_templates/rag.jinja",
                      "additional_chat_templates/tool use+.jinja"],
    "processor": ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"],
    "quantisation": ["hf_quant_config.json", "quantize_config.json", "quant_config.json"],
    "licence": ["LICENSE", "LICENSE.txt", "LICENSE-MODEL", "LICENCE.md", "THIRD_PARTY_NOTICES.md", "USE_POLICY.md", "Notice", "COPYING"],
    "card": ["README.md"],
    "code": ["modeling_deepseek.py", "configuration_kimi_k25.py", "tokenization_kimi.py"],
}  # fmt: skip
LEFT = [
    "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "consolidated.00.pth", "LICENSE.safetensors", "license.pkl", "LICENSE.bin", "optimizer.pt", "model.gguf", "training_args.bin", "params.json",
    ".gitattributes", ".hidden.py", "figures/a.png", "original/tokenizer.model", "inference/model.py", "tokenizer.json/x", "README.md.safetensors",
    "../config.json", "additional_chat_templates/a.py", "additional_chat_templates/x/y.jinja", "tokenizer.pkl", "vocab.bin", "config.json\n",
]  # fmt: skip


def test_roles_by_name() -> None:
    assert {role: [name for name in names if role_of(name) != role] for role, names in TAKEN.items()} == {
        role: [] for role in TAKEN
    }
    assert [name for name in LEFT if role_of(name)] == []


def test_small_files_of_a_folder(tmp_path: Path) -> None:
    for name in [
        *(name for names in TAKEN.values() for name in names),
        "model.safetensors",
        "inference/model.py",
        "pytorch_model.bin",
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    outside = tmp_path.parent / f"{tmp_path.name}-secret"
    outside.write_text("secret")
    os.symlink(outside, tmp_path / "LICENSE-2")
    os.symlink("gone", tmp_path / "LICENSE-3")
    (tmp_path / "LICENSE-4").mkdir()
    store = open_store(tmp_path)
    files = small_files(store)
    assert dict(files) == {name: name.encode() for names in TAKEN.values() for name in names}
    assert files.left.keys() == {"LICENSE-2", "LICENSE-3", "LICENSE-4"}
    assert files.left["LICENSE-2"].startswith("a symbolic link that leads out of the folder")
    assert files.left["LICENSE-3"] == files.left["LICENSE-4"] == "no file: a symbolic link to nothing, or a folder"


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed most is taken first; the rest is left out with a reason."""
    monkeypatch.setattr(release, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(release, "MAX_BYTES", 150)
    monkeypatch.setattr(release, "MAX_FILES", 3)
    for name, size in {
        "config.json": 90,
        "LICENSE": 50,
        "a.py": 1,
        "b.py": 1,
        "tokenizer.json": 101,
        "README.md": 30,
    }.items():
        (tmp_path / name).write_bytes(b" " * size)
    files = small_files(open_store(tmp_path))
    left = files.left
    assert list(files) == ["config.json", "LICENSE", "a.py"]
    assert sorted(left) == ["README.md", "b.py", "tokenizer.json"]
    assert left["tokenizer.json"] == "has 101 bytes; a file of a release besides its weights has at most 100"


@pytest.mark.parametrize("text", ["{ }", "[]"], ids=["another size", "the same size"])
def test_a_file_that_changes(tmp_path: Path, text: str) -> None:
    """It isn't said to have had another number of bytes, which isn't always so."""
    (tmp_path / "config.json").write_text("{}")
    files = small_files(open_store(tmp_path))
    assert files.hashes
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StorageError, match="was changed or replaced since it was listed"):
        files["config.json"]
    (tmp_path / "config.json").unlink()
    with pytest.raises(StorageError, match="No such file"):
        files["config.json"]


LLAMA = """{
  "architectures": [
    "LlamaForCausalLM"
  ],
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "rope_type": "llama3"
  },
  "torch_dtype": "bfloat16",
  "vocab_size": 128256
}
"""


def test_nothing_else_changes() -> None:
    text, edits = edit_config(LLAMA, ConfigEdits(dtype="bfloat16"))
    assert text == LLAMA.replace(
        '  "torch_dtype": "bfloat16",\n', '  "torch_dtype": "bfloat16",\n  "dtype": "bfloat16",\n'
    )
    assert edits == ['dtype: "bfloat16" added']
    assert edit_config(text, ConfigEdits(dtype="bfloat16", vocab_size=128256, drop_quantization=True, nextn=0)) == (
        text,
        [],
    )
    text, edits = edit_config(LLAMA, ConfigEdits(dtype="float32", vocab_size=128000))
    assert edits == ['torch_dtype: "bfloat16" -> "float32"', 'dtype: "float32" added', "vocab_size: 128256 -> 128000"]
    assert '"rms_norm_eps": 1e-05,' in text


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("config", "options", "expected", "edits"),
    [
        (
            {
                "dtype": "bfloat16",
                "quantization_config": {"quant_method": "fp8", "dtype": "x"},
                "compression_config": {},
            },
            dict(dtype="float16", drop_quantization=True),
            {"dtype": "float16", "torch_dtype": "float16"},
            [
                "quantization_config removed",
                "compression_config removed",
                'dtype: "bfloat16" -> "float16"',
                'torch_dtype: "float16" added',
            ],
        ),
        (
            {
                "text_config": {"dtype": "bfloat16", "vocab_size": 8, "quantization_config": {"bits": 4}},
                "vision_config": {"dtype": "float32"},
            },
            dict(drop_quantization=True, vocab_size=7),
            {
                "text_config": {"dtype": "bfloat16", "vocab_size": 7},
                "vision_config": {"dtype": "float32"},
                "dtype": "bfloat16",
                "torch_dtype": "bfloat16",
            },
            [
                "text_config.quantization_config removed",
                'dtype: "bfloat16" added',
                'torch_dtype: "bfloat16" added',
                "text_config.vocab_size: 8 -> 7",
            ],
        ),
        (
            {
                "torch_dtype": None,
                "vocab_size": 8,
                "text_config": {"vocab_size": 8},
                "vision_config": {"vocab_size": 8, "torch_dtype": "float32"},
            },
            dict(dtype="float32", vocab_size=9),
            {
                "torch_dtype": "float32",
                "dtype": "float32",
                "vocab_size": 9,
                "text_config": {"vocab_size": 9},
                "vision_config": {"vocab_size": 8, "torch_dtype": "float32"},
            },
            [
                'torch_dtype: null -> "float32"',
                'dtype: "float32" added',
                "vocab_size: 8 -> 9",
                "text_config.vocab_size: 8 -> 9",
            ],
        ),
        (
            {"num_nextn_predict_layers": 1, "compression_config": {"a": 1}, "quantization_config": {"bits": 4}},
            dict(nextn=0, quantization=FP8),
            {"num_nextn_predict_layers": 0, "quantization_config": FP8},
            ["compression_config removed", "quantization_config: {…} -> {…}", "num_nextn_predict_layers: 1 -> 0"],
        ),
        (
            {"text_config": {}},
            dict(vocab_size=5),
            {"text_config": {"vocab_size": 5}},
            ["text_config.vocab_size: 5 added"],
        ),
        (
            {
                "thinker_config": {"text_config": {"dtype": "bfloat16", "tie_word_embeddings": True}},
                "talker_config": {"dtype": "bfloat16"},
            },
            dict(dtype="float32"),
            {
                "thinker_config": {"text_config": {"dtype": "float32", "tie_word_embeddings": True}},
                "talker_config": {"dtype": "float32"},
                "dtype": "float32",
                "torch_dtype": "float32",
            },
            [
                'talker_config.dtype: "bfloat16" -> "float32"',
                'thinker_config.text_config.dtype: "bfloat16" -> "float32"',
                'dtype: "float32" added',
                'torch_dtype: "float32" added',
            ],
        ),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_edits(config: Any, options: Any, expected: Any, edits: list[str], indent: int | None) -> None:
    text, named = edit_config(json.dumps(config, indent=indent), ConfigEdits(**options))
    assert json.loads(text) == expected
    assert named == edits
    if indent and all(config.values()):  # nobody indents an empty object
        assert text == json.dumps(json.loads(text), indent=indent)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', ""])
def test_what_is_no_config(text: str) -> None:
    with pytest.raises(JsonError):
        edit_config(text, ConfigEdits(dtype="float32"))


def test_transformers_reads_the_dtype(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float16",
        "quantization_config": FP8,
    }
    (tmp_path / "config.json").write_text(
        edit_config(json.dumps(config), ConfigEdits(dtype="bfloat16", drop_quantization=True))[0]
    )
    found = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (str(found.dtype), hasattr(found, "quantization_config")) == ("torch.bfloat16", False)


CARD = """---
license: other
license_name: deepseek
license_link: LICENSE-MODEL
language: [en, no]
tags:
- x
model-index: {}
---
# DeepSeek
---
"""


def test_model_card() -> None:
    facts = {"weights": "gs://bucket/run/1000", "config, tokenizer": "hf://org/base@abc | x"}
    about = {"pipeline_tag": "text-generation", "base_model_relation": "quantized", "tags": ["fp8"]}
    code = "model = transformers.AutoModelForCausalLM.from_pretrained('.')"
    text = model_card("tuned", code, facts, ['dtype: "bfloat16" added'], base_model="org/base", card=CARD, **about)
    card = ModelCard(text)
    expected = dict(
        library_name="transformers",
        base_model="org/base",
        license="other",
        license_name="deepseek",
        license_link="LICENSE-MODEL",
        language=["en", "no"],
        pipeline_tag="text-generation",
        base_model_relation="quantized",
        tags=["fp8", "weightbeam"],
    )
    assert card.data.to_dict() == expected
    assert r"| config, tokenizer | hf://org/base@abc \| x |" in card.text
    assert '* `dtype: "bfloat16" added`' in card.text
    assert card.text.split("```")[1] == f"python\n{code}\n"
    assert WRITTEN.search(text)
    assert "pypi.org" not in text
    moved = readdress(text, "other", "'me/other', revision='step-1'")
    assert "# other\n" in moved
    assert "from_pretrained('me/other', revision='step-1')" in moved
    assert readdress(moved, "tuned", "'.'") == moved.replace("# other", "# tuned")  # it names a repository already


LEVELS = "".join(f"b{n + 1}: &b{n + 1} [*b{n}, *b{n}]\n" for n in range(40))
BOMB = f"---\nb0: &b0 [x, x]\n{LEVELS}license: *b40\n---\n"
OBJECT = "---\nlicense: !!python/object/apply:os.getcwd {}\n---\n"
BAD = [
    "",
    "no head",
    "---\n- a\n---\n",
    "---\nlicense: {a: b}\n---\n",
    "---\n: : :\n---\n",
    "---\nlicense: [[a]]\n---",
    BOMB,
    OBJECT,
]


@pytest.mark.parametrize("card", BAD)
def test_cards_without_a_licence(card: str) -> None:
    head = model_card("x", "", {}, card=card).split("---")[1]
    assert yaml.safe_load(head) == {"library_name": "transformers", "tags": ["weightbeam"]}
