"""Messages in the language in which one was asked.

A message names an option as the command line does: `--resume`, `--like`, `--state params`, `--mesh=fsdp=8`. Who called a
function reads `resume=True`, `like=`, `state="params"`, `mesh="fsdp=8"`. Commands that a message quotes (`weightbeam diff
…`) and Beam's options are the same in both.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

WORDS = "true|false|full|params|none|zstd|b?float(?:16|32)|[A-Z]{2,}"  # values that may follow an option after a blank
TOKEN = re.compile(
    r"weightbeam [a-z]+[^;\n]*"  # a command, which stays as it is
    r"|the same command"
    rf"|--(?P<name>[a-z]\w*)(?:=(?P<given>[^\s=:;,]+=[^\s:;]*[^\s:;,.]|(?:{WORDS})\b)|=| (?P<value>\w+=[\w=,]*\w|(?:{WORDS})\b))?"
    r"(?P<after>'s\b|:| was\b)?"
)
# Options that are keywords, too; written down, since whatever defines the command line has messages itself.
FLAGS = frozenset(("create_pr", "overwrite", "resume", "sha256", "virtual"))  # which are true where they are named
KEYWORDS = FLAGS.union(
    (
        "a",
        "accept",
        "adapter_only",
        "allow_links",
        "b",
        "check_source",
        "checkpoint",
        "compression",
        "family",
        "format",
    ),
    (
        "hf_token_secret",
        "like",
        "link",
        "lora",
        "lora_alpha",
        "max_shard_size",
        "maxtext_config",
        "maxtext_model",
        "mesh",
    ),
    ("moment_dtype", "mtp", "multimodal", "output", "param_scan_axis", "sample", "save_dtype", "scan_layers"),
    ("sharding_rules", "source", "state", "step", "tokenizer", "tolerance", "unit_bytes", "use_ocdbt", "use_zarr3"),
    ("vocab_size", "worker_gbps", "worker_hour_price", "workers", "full_paths", "fail_over"),
)
_at_the_shell = False


@contextlib.contextmanager
def at_the_shell() -> Iterator[None]:
    """Context manager: whoever reads the messages typed a command."""
    global _at_the_shell
    before, _at_the_shell = _at_the_shell, True
    try:
        yield
    finally:
        _at_the_shell = before


def worded(text: str) -> str:
    """A message as its reader would say it."""
    return text if _at_the_shell else TOKEN.sub(_in_python, text)


def _in_python(found: re.Match[str]) -> str:
    text, name = found[0], found["name"]
    if name is None:
        return "the same call" if text == "the same command" else text
    if name == "json":
        return "to_json()"
    if name not in KEYWORDS:
        return text
    after, value = found["after"] or "", found["given"] or found["value"]
    if value:
        if value in ("true", "false"):
            value = value.capitalize()
        elif not value.isupper():
            value = f'"{value}"'
        return f"{name}={value}{after}"
    if after:
        return name + after
    if text.endswith("=") or name not in FLAGS:
        return f"{name}="
    return f"{name}=True"
