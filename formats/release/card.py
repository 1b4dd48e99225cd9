"""The card of a release: the page that says what it was made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from weightbeam.formats.storage.strict_yaml import parse_yaml
from weightbeam.formats.text.installing import home_page

MAX_HEAD = 64 << 10  # characters of the metadata of a model card
TAG = "weightbeam"  # by which the hub finds what was made so
CODE = "```python\n{}\n```"
FENCE = re.compile(r"^```python\n.*?^```$", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"Written by \[?Weightbeam\b")  # in a card that nobody has edited
KEPT_FIELDS = (
    "license",
    "license_name",
    "license_link",
    "language",
    "pipeline_tag",
    "library_name",
    "extra_gated_prompt",
)


def model_card(
    title: str,
    code: str,
    facts: Mapping[str, str],
    edits: Sequence[str] = (),
    *,
    base_model: str | None = None,
    card: str | None = None,
    **about: Any,
) -> str:
    """A stub of a model card that says what a release was made of.

    Args:
      title: of the page.
      code: the Python that loads it.
      facts: what the page's table says, such as `{"weights": "gs://…/1000"}`.
      edits: of `config.json`.
      base_model: the repository that the release's files are from, `organisation/model`.
      card: the card of that release; fields about its licence are kept.
      about: more fields of the head, such as `pipeline_tag` (huggingface_hub 2, `ModelCardData`); empty ones are left
        out.
    """
    head = {"library_name": "transformers", "base_model": base_model, **about, **_kept_fields(card or "")}
    head = {name: value for name, value in head.items() if value} | {"tags": [*(about.get("tags") or ()), TAG]}
    lines = [
        f"# {title}",
        "",
        CODE.format(code),
        "",
        f"{written_by()} Say here what the model is for, and what it was trained on.",
        "",
    ]
    lines += [
        "| made of | |",
        "|---|---|",
        *(f"| {table_cell(name)} | {table_cell(value)} |" for name, value in facts.items()),
        "",
    ]
    if edits:
        lines += ["`config.json` differs from the release's in:", "", *(f"* `{edit}`" for edit in edits), ""]
    card = f"---\n{yaml.safe_dump(head, allow_unicode=True, sort_keys=False)}---\n\n" + "\n".join(lines)
    return card.encode(errors="backslashreplace").decode()  # a path needn't be UTF-8


def written_by() -> str:
    """The sentence that says so, with a link where the project has a page."""
    page = home_page()
    return f"Written by [Weightbeam]({page})." if page else "Written by Weightbeam."


def readdress(card: str, title: str, arguments: str) -> str:
    """A card that was written for a folder, as it is elsewhere: under another title, with code that loads the release
    from there; `arguments` are what `from_pretrained` takes in place of the folder.
    """
    card = FENCE.sub(lambda found: found[0].replace("'.'", arguments), card, count=1)
    return re.sub(r"^# .*$", lambda _: f"# {title}", card, count=1, flags=re.MULTILINE)


def table_cell(text: str) -> str:
    """A text as a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def _kept_fields(card: str) -> dict[str, str | list[str]]:
    """The fields of a card's head that are kept; empty where it has none that can be read."""
    parts = card.split("---", 2)
    if parts[0].strip() or len(parts) < 3:
        return {}
    try:
        fields = parse_yaml(parts[1][:MAX_HEAD], yaml.BaseLoader)
    except yaml.YAMLError:
        return {}
    kept = {key: fields[key] for key in KEPT_FIELDS if key in fields} if isinstance(fields, dict) else {}
    return {
        key: value
        for key, value in kept.items()
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    }
