"""What lies beside the weights of a step that is published: what changed, a card, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weightbeam.formats.adapters.adapter import open_adapter
from weightbeam.formats.hub_publishing import CARD
from weightbeam.formats.release import has_weights
from weightbeam.formats.safetensors import BoxRead, read_boxes
from weightbeam.formats.storage import StorageError, Store, reason
from weightbeam.model_mappings.boxes import whole
from weightbeam.pipelines.diff import diff
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
    before = about.get("before")
    compared: dict[str, dict[str, dict[str, Any]]] = {}
    notes: list[str] = []
    is_adapter = about.get("lora") == ADAPTER
    for what, other in (("before", before and before["url"]), ("like", None if is_adapter else about.get("like"))):
        if other and (what == "before" or has_weights(other)):
            try:
                compared[what] = _compare(other, release.url, is_adapter)
            except Refused as e:
                notes.append(f"not compared with {other}: {str(e).strip().splitlines()[0]}")
    every = compared.get("before") or compared.get("like") or _compare(release.url, release.url, is_adapter)
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


def _compare(old: str, new: str, is_adapter: bool) -> dict[str, dict[str, Any]]:
    """What changed from one to the other, tensor by tensor; `diff` takes models, and adapters are small."""
    if not is_adapter:
        found = diff(old, new, progress=False)
        return changes.summarise({name: verdict.difference for name, verdict in found.tensors.items()})
    (before, after) = (
        {tensor.name: tensor for shard in open_adapter(url).files.shards for tensor in shard.tensors}
        for url in (old, new)
    )
    same = [name for name in after if name in before and before[name].shape == after[name].shape]
    reads = [BoxRead(side[name], whole(side[name].shape)) for name in same for side in (before, after)]
    values, _ = read_boxes(reads)
    return changes.summarise(
        {name: differences.compare(*values[2 * number : 2 * number + 2]) for number, name in enumerate(same)}
    )


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
