"""Token ids: given, or made of a prompt by the tokenizer of a release."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from weightbeam.formats.release.files import role_of
from weightbeam.pipelines.terminal.errors import Refused

NEEDED = ("config", "tokenizer", "chat template", "processor")


def tokenize(prompt: str, small: Mapping[str, bytes], where: str) -> list[int]:
    """The ids of a prompt's tokens, special ones as the tokenizer adds them.

    Args:
      small: the small files of the release `where`.

    Raises:
      Refused: there is no tokenizer, or transformers can't read it.
    """
    import transformers

    if not any(role_of(name) == "tokenizer" for name in small):
        raise Refused(f"--prompt: {where} holds no tokenizer, such as tokenizer.json; give --token_ids")
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in small if role_of(name) in NEEDED and "/" not in name):
            (Path(folder) / name).write_bytes(small[name])
        try:
            ids = transformers.AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]
        except (OSError, ValueError, TypeError, KeyError, ImportError) as e:
            raise Refused(f"--prompt: transformers can't read the tokenizer of {where}: {e}; give --token_ids") from e
    if not ids:
        raise Refused("--prompt: makes no tokens")
    return list(ids)
