"""What lies beside the weights of a step that is published: what changed, a card, and where it comes from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from weightbeam.formats.adapters.adapter import open_adapter
from weightbeam.formats.record.naming import Naming, digest
from weightbeam.formats.release.card import CODE, TAG, readdress, table_cell, written_by
from weightbeam.formats.release.files import CARD, has_weights
from weightbeam.formats.safetensors import BoxRead, HfCheckpoint, Tensor, read_boxes
from weightbeam.formats.storage import HUB, StorageError, Store, is_hub, open_store, reason
from weightbeam.formats.storage.local import is_temporary
from weightbeam.formats.targets.published import RECORD, contents_of, record_of
from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.trust import as_said
from weightbeam.pipelines.checking.comparison import Comparison
from weightbeam.pipelines.checking.pairs import ComparedPair, open_pair
from weightbeam.pipelines.checking.pairwise import compare_pairs
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.watching import changes
from weightbeam.pipelines.watching.config import ADAPTER
from weightbeam.pipelines.watching.places import BESIDE, STEP_REPORT
from weightbeam.transforms.comparing import baselines, differences

SECTION = "## The training run"

# of what a report is made of; not in the report
ADDRESS = ("place", "revision", "named", "full_paths")


def compare(url: str, about: Mapping[str, Any], aside: str) -> dict[str, Any]:
    """Compares a release with the step before and with the release that the run began with; writes what changed, as JSON
    and as a picture.

    Args:
      url: of the release, which is whole.
      about: what the report says: `run`, `step`, `commit`, `like`, …; and `before`, the `step` and `url` of the one
        before.
      aside: URL of where what changed is written: not beside the release, which may be read by `verify` meanwhile.

    Returns:
      Nothing that is worth recording: `describe` takes it from there.

    Raises:
      Failed, StorageError: something can't be read or written.
    """
    release, store = open_store(url), open_store(aside)
    before, is_adapter = about.get("before"), about.get("lora") == ADAPTER
    others = {"before": before["url"]} if before else {}
    if (like := about.get("like")) and not is_adapter and has_weights(like):
        others["like"] = like
    if is_adapter:
        compared, notes = _adapter_changed_since(others, release)
    else:
        compared, notes = _changed_since(others, release, about.get("named", {}).get(str(like), ""))
    every = compared.get("before") or compared.get("like") or _compared_with_itself(url, is_adapter)
    odd = changes.not_finite(every)
    naming = _naming(about)
    names = {"before": f"step {before['step']}" if before else "", "like": naming.name(str(about.get("like")))}
    said = {what: {"than": names[what], "tensors": changes.as_json(tensors)} for what, tensors in compared.items()}
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
    store.write(changes.JSON, json.dumps(naming.apply(found), indent=1).encode())
    grids = {names[what]: changes.grid_of(tensors) for what, tensors in compared.items()}
    drawn = changes.picture(grids, f"{about['name']}, step {about['step']}") if grids else None
    store.write(changes.PICTURE, drawn) if drawn else store.delete(changes.PICTURE)
    return {}


def describe(url: str, about: Mapping[str, Any], aside: str) -> dict[str, Any]:
    """Writes beside a release what changed and a card, takes away what was found while it was written, and at last writes
    its report.

    Args:
      url: of the release, compared, with its source and by `compare`.
      about: see there.
      aside: see there.

    Returns:
      What is worth recording: `said`, `warnings`, and in how many tensors an element is `not_finite`.

    Raises:
      StorageError: something can't be read or written.
    """
    release, store = open_store(url), open_store(aside)
    try:
        found = json.loads(written := store.read(changes.JSON))
        drawn = store.read(changes.PICTURE) if store.exists(changes.PICTURE) else None
    except (OSError, ValueError) as e:
        raise StorageError(f"{store.path(changes.JSON)}: {reason(e) if isinstance(e, OSError) else e}") from e
    for name in release.names():
        if is_temporary(name):  # of a watcher that was killed in the next lines
            release.delete(name)
    release.write(changes.JSON, written)
    if drawn:
        release.write(changes.PICTURE, drawn)
    warnings, sentences = found["warnings"], found["said"]
    said = {name: value for name, value in about.items() if name not in ADDRESS}
    report = _naming(about).apply({**said, "warnings": warnings, "changes": sentences})
    _write_card(release, about, report, [*warnings, *sentences, *found["notes"]], drawn is not None)
    release.delete(baselines.FILE)
    report["files"] = contents_of(release, {*BESIDE} - {STEP_REPORT})
    release.write(STEP_REPORT, json.dumps(report, indent=1).encode())
    return {"warnings": warnings, "said": sentences, "not_finite": len(found["not_finite"])}


def _naming(about: Mapping[str, Any]) -> Naming:
    """How sources are named where a step is published."""
    before, like = about.get("before"), about.get("like")
    others = [before["url"] if before else "", like or ""]
    return Naming.of(about["place"], about["full_paths"], others=others).knowing(about["named"])


def _changed_since(
    others: Mapping[str, str], release: Store, like: str
) -> tuple[dict[str, changes.Tensors], list[str]]:
    """What changed in a release since each of others was one; and why it can't be compared with some. What was found
    while it was written isn't looked for again, but for that of others that have been replaced since.

    Args:
      others: the releases, by what they are to it.
      release: what was made.
      like: what tells the content of the one that it was made like; empty where nothing does.
    """
    found = baselines.read_found(release)
    pairs: dict[str, ComparedPair] = {}
    known: list[Mapping[str, differences.Difference]] = []
    notes: list[str] = []
    for what, other in others.items():
        try:
            pair = open_pair(other, release.url)
        except Refused as e:
            notes.append(f"not compared with {other}: {str(e).strip().splitlines()[0]}")
            continue
        source = pair.sources[0]
        if what == "like" and like and digest(source) != like:
            notes.append(f"not compared with {other}: it isn't what the step was made like any more")
            continue
        pairs[what] = pair
        known.append(found.get(baselines.baseline_id(source), {}) if isinstance(source, HfCheckpoint) else {})
    compared = compare_pairs(list(pairs.values()), known=known) if pairs else []
    return {what: _summary(comparison) for what, comparison in zip(pairs, compared, strict=True)}, notes


def _adapter_changed_since(others: Mapping[str, str], adapter: Store) -> tuple[dict[str, changes.Tensors], list[str]]:
    """What changed in an adapter since each of others was one; and why it can't be compared with some."""
    compared: dict[str, changes.Tensors] = {}
    notes: list[str] = []
    for what, other in others.items():
        try:
            compared[what] = _adapter_changes(other, adapter.url)
        except StorageError as e:
            notes.append(f"not compared with {other}: {e}")
    return compared, notes


def _compared_with_itself(release: str, is_adapter: bool) -> changes.Tensors:
    """What isn't finite is told of a comparison, also where there is nothing to compare with."""
    return _adapter_changes(release, release) if is_adapter else _summary(*compare_pairs([open_pair(release, release)]))


def _summary(comparison: Comparison) -> changes.Tensors:
    return {name: verdict.difference for name, verdict in comparison.tensors.items() if verdict.difference is not None}


def _adapter_changes(old: str, new: str) -> changes.Tensors:
    """What changed from one adapter to another. `diff` takes models, and adapters are small."""
    before, after = _tensors(old), _tensors(new)
    same = [name for name in after if name in before and before[name].shape == after[name].shape]
    values, _ = read_boxes([BoxRead(side[name], whole(side[name].shape)) for name in same for side in (before, after)])
    return {name: differences.compare(*values[2 * number : 2 * number + 2]) for number, name in enumerate(same)}


def _tensors(adapter: str) -> dict[str, Tensor]:
    return {tensor.name: tensor for shard in open_adapter(adapter).files.shards for tensor in shard.tensors}


def _write_card(
    release: Store, about: Mapping[str, Any], report: Mapping[str, Any], said: list[str], drawn: bool
) -> None:
    """Adds to the card what the run made."""
    title, arguments = f"{about['name']}, step {about['step']}", "'.'"
    if on_hub := is_hub(about["place"]):
        repo, revision = about["place"].removeprefix(HUB), about["revision"]
        title = repo.rpartition("/")[2]
        arguments = f"{repo!r}, revision={revision!r}" if revision else repr(repo)
    try:
        card = release.read(CARD).decode(errors="replace").partition(f"\n{SECTION}")[0].rstrip()
        card = readdress(card, title, arguments)
    except FileNotFoundError:
        card = _card_of_checkpoint(title, arguments, on_hub)
    except OSError as e:
        raise StorageError(f"{release.path(CARD)}: {reason(e)}") from e
    rows = {
        "run": report["run"],
        "step": about["step"],
        "committed": about["updated"],
        "commit": about["weights"],
        "like": report.get("like"),
        "rounded": report.get("rounded") or "nothing",
        "compared with the checkpoint": about.get("compared"),
        "what changed": "; ".join(said),
    }
    lines = [
        SECTION,
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {table_cell(str(value))} |" for name, value in rows.items() if value not in (None, "")),
    ]
    lines += ["", f"Tensor by tensor: [{changes.JSON}]({changes.JSON})."]
    lines += ["", f"![The relative change of each kind of weight in each layer]({changes.PICTURE})"] if drawn else []
    text = "\n".join(lines)
    page = f"{card}\n\n{text}\n".encode(errors="backslashreplace")
    release.write(CARD, page)
    record = record_of(release)
    if isinstance(files := record.get("files"), dict):
        files[CARD] = hashlib.sha256(page).hexdigest()
        record["options"] = as_said(record.get("options", {}))
        release.write(RECORD, json.dumps(record, indent=1).encode())


def _card_of_checkpoint(title: str, arguments: str, on_hub: bool) -> str:
    """The card of an Orbax checkpoint, without what the run made."""
    imports, where = "", arguments
    if on_hub:
        imports, where = "import huggingface_hub\n", f"huggingface_hub.snapshot_download({arguments})"
    code = CODE.format(f"{imports}import weightbeam as wb\n\nparams = wb.load({where})")
    head = f"---\ntags:\n- maxtext\n- orbax\n- {TAG}\n---\n\n"
    return f"{head}# {title}\n\n{code}\n\n{written_by()}"
