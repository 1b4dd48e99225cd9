"""Token ids: given, or made of a prompt by the tokenizer of a release."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from weightbeam.formats.release.files import role_of
from weightbeam.pipelines.terminal.errors import Refused

NEEDED = ("config", "tokenizer", "chat template", "processor")


class Tokenizer:
    """The tokenizer of a release, as transformers reads it.

    Raises:
      Refused: there is none, or transformers can't read it.
    """

    def __init__(self, small: Mapping[str, bytes], where: str):
        """The one among the small files of the release `where`."""
        import transformers

        if not any(role_of(name) == "tokenizer" for name in small):
            raise Refused(f"--prompt: {where} holds no tokenizer, such as tokenizer.json; give --token_ids")
        with tempfile.TemporaryDirectory() as folder:
            for name in (name for name in small if role_of(name) in NEEDED and "/" not in name):
                (Path(folder) / name).write_bytes(small[name])
            try:
                self._read = transformers.AutoTokenizer.from_pretrained(folder)
            except (OSError, ValueError, TypeError, KeyError, ImportError) as e:
                raise Refused(
                    f"--prompt: transformers can't read the tokenizer of {where}: {e}; give --token_ids"
                ) from e

    def ids(self, prompt: str) -> tuple[int, ...]:
        """The ids of a prompt's tokens, special ones as the tokenizer adds them. Raises Refused where there are none."""
        if not (ids := self._read(prompt)["input_ids"]):
            raise Refused("--prompt: makes no tokens")
        return tuple(ids)

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each token."""
        return {token: self._read.decode([token]) for token in set(ids)}
