"""What lies beside the weights of a step that is published: what changed, a card, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weightbeam.formats.adapters.adapter import open_adapter
from weightbeam.formats.hub_publishing import CARD
from weightbeam.formats.release import has_weights
from weightbeam.formats.safetensors import BoxRead, Tensor, read_boxes
from weightbeam.formats.storage import StorageError, Store, reason
from weightbeam.model_mappings.boxes import whole
from weightbeam.pipelines.diff import Pair, compare_pairs, open_pair
from weightbeam.pipelines.errors import Refused
from weightbeam.pipelines.watching import changes
from weightbeam.pipelines.watching.config import ADAPTER
from weightbeam.pipelines.watching.places import REPORT
from weightbeam.transforms import differences

SECTION = "## The training run"


def compare(release: Store, about: Mapping[str, Any]) -> dict[str, Any]:
    """Compares a release with the step before and with the release that the run began with; writes what changed beside
    it, as JSON and as a picture.

    Args:
      release: whole.
      about: what the report says: `run`, `step`, `commit`, `like`, …; and `before`, the `step` and `url` of the one
        before.

    Returns:
      Nothing that is worth recording: `describe` takes it from there.

    Raises:
      Failed, StorageError: something can't be read or written.
    """
    before, is_adapter = about.get("before"), about.get("lora") == ADAPTER
    others = {"before": before["url"]} if before else {}
    if (like := about.get("like")) and not is_adapter and has_weights(like):
        others["like"] = like
    changed_since = _adapter_changed_since if is_adapter else _changed_since
    compared, notes = changed_since(others, release.url)
    every = (
        compared.get("before")
        or compared.get("like")
        or changed_since({"itself": release.url}, release.url)[0]["itself"]
    )
    odd = changes.not_finite(every)
    names = {"before": f"step {before['step']}" if before else "", "like": str(about.get("like"))}
    said = {what: {"than": names[what], "tensors": changes.as_json(found)} for what, found in compared.items()}
    sentences = [text for what, tensors in compared.items() if (text := changes.sentence(tensors, names[what]))]
    found = {
        "run": about["run"],
        "step": about["step"],
        "said": sentences,
        "warnings": changes.warnings(compared.get("before"), odd, names["before"]),
        **said,
        "not_finite": odd,
        "unchanged": changes.unchanged(compared.get("before", {})),
        "notes": notes,
    }
    release.write(changes.JSON, json.dumps(found, indent=1).encode())
    drawn = (
        changes.picture(
            {names[what]: changes.grid_of(tensors) for what, tensors in compared.items()},
            f"{about['name']}, step {about['step']}",
        )
        if compared
        else None
    )
    if drawn:
        release.write(changes.PICTURE, drawn)
    return {}


def describe(release: Store, about: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the card beside a release, and at last its report.

    Args:
      release: compared, with its source and by `compare`.
      about: see there.

    Returns:
      What is worth recording: `said`, `warnings`.

    Raises:
      StorageError: something can't be read or written.
    """
    try:
        found = json.loads(release.read(changes.JSON))
        drawn = release.exists(changes.PICTURE)
    except (OSError, ValueError) as e:
        raise StorageError(f"{release.path(changes.JSON)}: {reason(e) if isinstance(e, OSError) else e}") from e
    warnings, sentences = found["warnings"], found["said"]
    _write_card(release, about, [*warnings, *sentences, *found["notes"]], drawn)
    release.write(REPORT, json.dumps({**about, "warnings": warnings, "changes": sentences}, indent=1).encode())
    return {"warnings": warnings, "said": sentences}


Compared = dict[str, dict[str, dict[str, Any]]]  # what changed, tensor by tensor, since each


def _changed_since(others: Mapping[str, str], release: str) -> tuple[Compared, list[str]]:
    """What changed in a release since each of others was one; and why it can't be compared with some."""
    pairs: dict[str, Pair] = {}
    notes: list[str] = []
    for what, other in others.items():
        try:
            pairs[what] = open_pair(other, release)
        except Refused as e:
            notes.append(f"not compared with {other}: {str(e).strip().splitlines()[0]}")
    compared: Compared = {}
    for what, found in zip(pairs, compare_pairs(list(pairs.values())), strict=True):
        compared[what] = changes.summarise({name: verdict.difference for name, verdict in found.tensors.items()})
    return compared, notes


def _adapter_changed_since(others: Mapping[str, str], adapter: str) -> tuple[Compared, list[str]]:
    """The same for adapters, which `diff` doesn't take; they are small."""
    after = _tensors(adapter)
    compared: Compared = {}
    for what, other in others.items():
        before = _tensors(other)
        same = [name for name in after if name in before and before[name].shape == after[name].shape]
        values, _ = read_boxes(
            [BoxRead(side[name], whole(side[name].shape)) for name in same for side in (before, after)]
        )
        compared[what] = changes.summarise(
            {name: differences.compare(*values[2 * number : 2 * number + 2]) for number, name in enumerate(same)}
        )
    return compared, []


def _tensors(adapter: str) -> dict[str, Tensor]:
    return {tensor.name: tensor for shard in open_adapter(adapter).files.shards for tensor in shard.tensors}


def _write_card(release: Store, about: Mapping[str, Any], said: list[str], drawn: bool) -> None:
    """Adds to the card what the run made."""
    try:
        card = release.read(CARD).decode(errors="replace").partition(f"\n{SECTION}")[0].rstrip()
    except FileNotFoundError:
        card = (
            f"# {about['name']}, step {about['step']}\n\nWritten by [Weightbeam](https://pypi.org/project/weightbeam/)."
        )
    except OSError as e:
        raise StorageError(f"{release.path(CARD)}: {reason(e)}") from e
    rows = {
        "run": about["run"],
        "step": about["step"],
        "committed": about["updated"],
        "commit": about["weights"],
        "like": about.get("like"),
        "rounded": about.get("rounded") or "nothing",
        "compared with the checkpoint": about.get("compared"),
        "what changed": "; ".join(said),
    }
    lines = [
        SECTION,
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in rows.items() if value not in (None, "")),
    ]
    lines += ["", f"Tensor by tensor: [{changes.JSON}]({changes.JSON})."]
    lines += ["", f"![The relative change of each kind of weight in each layer]({changes.PICTURE})"] if drawn else []
    text = "\n".join(lines)
    release.write(CARD, f"{card}\n\n{text}\n".encode())


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
