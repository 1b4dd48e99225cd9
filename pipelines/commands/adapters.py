"""`weightbeam export` of an adapter: MaxText's factors as a folder that PEFT and serving engines read, in whatever place a
release may be written to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weightbeam.formats.adapters.adapter import WEIGHTS
from weightbeam.formats.adapters.config import CONFIG
from weightbeam.formats.record.naming import HUB, Naming, digest
from weightbeam.formats.record.provenance import versions
from weightbeam.formats.release.files import CARD, model_card
from weightbeam.formats.release.model_class import PIPELINE_TAGS, loading_code, model_class
from weightbeam.formats.staging import PLAN, holds_plan
from weightbeam.formats.storage import LocalFolder, StorageError, reason
from weightbeam.formats.storage.uninterrupted import DONE
from weightbeam.formats.targets.published import RECORD, plan_hash_of, whole_files
from weightbeam.formats.targets.release import ReleaseTarget, release_staging
from weightbeam.formats.targets.release_place import ReleaseFolder, ReleasePlace
from weightbeam.model_mappings.boxes import whole
from weightbeam.pipelines.commands.releases import asked_paths, card_address, repo_of, said_of
from weightbeam.pipelines.running.output import alone
from weightbeam.pipelines.running.prepare import refuse
from weightbeam.pipelines.running.stopping import stopping
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import count, human
from weightbeam.transforms.cutting.files import plan_files
from weightbeam.transforms.planning.adapters import AdapterExport
from weightbeam.transforms.planning.inputs import Identity, pack_inputs


@dataclasses.dataclass(frozen=True, repr=False)
class ExportedAdapter(Shown):
    """What came of the export of an adapter.

    Attributes:
      folder: where it is.
      tensors: how many it has.
      size: of them, in bytes.
      rank, alpha: of all its modules.
      state: `done`, or `nothing to do`.
      page: of the commit, where it was published on the hub.
      removed, replaced: files of the repository that the commit took away, and that have another content now.
      source: what tells the content of the checkpoint.
    """

    folder: str
    tensors: int
    size: int
    rank: int
    alpha: float
    state: str = "done"
    page: str = ""
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def blocks(self) -> list[str]:
        if self.page:
            done = "published" if self.state == "done" else "published already"
            repo, revision = repo_of(self.folder)
            arguments = f"{repo!r}, revision={revision!r}" if revision else repr(repo)
            return [
                f"{self.folder}: {done}, {self.page}",
                *said_of(self.removed, self.replaced),
                f"load it:  peft.PeftModel.from_pretrained(model, {arguments})",
            ]
        about = f"{self.folder}: a PEFT adapter of rank {self.rank} with alpha {self.alpha:g}, {count(self.tensors, 'tensor')}, {human(self.size)}"
        return [about, f"load it:  peft.PeftModel.from_pretrained(model, {self.folder!r})"]


def export_adapter(
    planned: AdapterExport,
    output: str,
    overwrite: bool = False,
    create_pr: bool = False,
    full_paths: bool | None = None,
    published: str = "",
) -> ExportedAdapter:
    """Writes an adapter to a folder or a bucket, where it appears whole, or as one commit of the hub.

    Args:
      full_paths: as for a release, see `weightbeam.export`.
      published: where it goes from there.

    Raises:
      Refused: it can't be done; nothing was written.
      Failed: it failed on the way.
    """
    refuse(planned.problems)
    if output.startswith("hf://"):
        return _to_hub(planned, output, overwrite, create_pr, asked_paths(output, full_paths))
    if create_pr:
        raise Refused(f"--create_pr: only the hub has pull requests, and --output is {output}")
    plan_hash = _hash(planned, full_paths)
    naming = _naming(planned, output, full_paths)
    try:
        place = release_staging(output, plan_hash)
    except OSError as e:
        raise Refused(f"--output={reason(e)}") from e
    _check(place, overwrite)
    with alone(place):
        _check(place, overwrite)  # again: now nobody else changes it
        try:
            return _write(planned, place, plan_hash, naming, published or output)
        except OSError as e:
            raise Failed(f"  {output}: {reason(e)}") from e


def _naming(planned: AdapterExport, output: str, full_paths: bool | None) -> Naming:
    """How its sources are named where it goes."""
    like = planned.like
    return Naming.of(output, full_paths, [planned.source], [like.root]).knowing({like.root: like.told})


def _to_hub(
    planned: AdapterExport, output: str, overwrite: bool, create_pr: bool, full_paths: bool | None
) -> ExportedAdapter:
    """Writes it to a folder that is removed again, and publishes that."""
    # here: the hub's client takes a third of a second to import
    from weightbeam.formats.targets.hub import check_target, look, publish

    named = _naming(planned, output, full_paths).name(planned.source.root)
    title = f"Adapter of {named} ({_hash(planned, full_paths)[:12]})"
    try:
        check_target(output)
        listed = dict.fromkeys([WEIGHTS, CONFIG, CARD, RECORD])
        found = look(output, title, listed, overwrite=overwrite, create_pr=create_pr)
    except StorageError as e:
        raise Refused(f"--output={e}") from e
    if found:
        told = _told(planned, found.url, dict(planned.tensors()))
        return dataclasses.replace(told, state="nothing to do", page=found.page)
    with tempfile.TemporaryDirectory(prefix="weightbeam-") as parent:
        folder = Path(parent, "adapter")
        try:
            written = export_adapter(planned, str(folder), full_paths=full_paths, published=output)
        finally:
            DONE.clear()  # nothing is published, on the hub
        try:
            files = whole_files(LocalFolder(str(folder)))
            made = publish(output, title, files, overwrite=overwrite, create_pr=create_pr)
        except StorageError as e:
            raise Failed(f"  {e}") from e
    assert made
    return dataclasses.replace(written, folder=made.url, page=made.page, removed=made.removed, replaced=made.replaced)


def _hash(planned: AdapterExport, full_paths: bool | None) -> str:
    """Identifies the result: the checkpoint's files, the release that it is for, rank and alpha."""
    identity = Identity()
    identity.add("adapter", planned.source.identity, planned.like.root, planned.rank, planned.alpha, full_paths)
    return identity.hash


def _check(place: ReleasePlace, overwrite: bool) -> None:
    """Raises `Refused` where something is in the place that may not go."""
    if place.is_taken() and not _is_replaceable(place, overwrite):
        raise Refused(f"--output={place.final}: exists" + ("" if overwrite else "; --overwrite replaces an adapter"))


def _is_replaceable(place: ReleasePlace, overwrite: bool) -> bool:
    """Whether what is there is an empty folder, or an adapter and nothing else, which may be replaced."""
    if isinstance(place, ReleaseFolder):
        folder = Path(place.final.url)
        if folder.is_symlink() or not folder.is_dir():
            return False
        if not any(folder.iterdir()):
            return True
    held = {file.name for file in place.final.list()}
    staged = {PLAN} if holds_plan(place.final) else set()  # of who was killed once it was published
    return overwrite and held <= {WEIGHTS, CONFIG, RECORD, CARD} | staged


def _base_of(planned: AdapterExport, naming: Naming) -> tuple[str, str]:
    """What a loader is told of the release that it is for: `owner/name` and the revision, else its folder."""
    root = planned.like.root
    return repo_of(dataclasses.replace(naming, known={}).name(root))


def _card(planned: AdapterExport, naming: Naming, output: str) -> bytes:
    """Its card, whose code loads it into the release that it is for."""
    base, config = naming.name(planned.like.root), planned.like.config
    name, revision = _base_of(planned, naming)
    title, _ = card_address(config, output, f"Adapter of {name.rpartition('/')[2]}")
    repo = repo_of(output)[0] if output.startswith(HUB) else "."
    lines = [
        "import peft",
        "import transformers",
        "",
        f"base = {loading_code(config, name, revision)}",
        f"model = peft.PeftModel.from_pretrained(base, {repo!r})",
    ]
    facts = {
        "weights": naming.name(planned.source.root),
        "of": base,
        "rank": str(planned.rank),
        "alpha": f"{planned.alpha:g}",
    }
    about = {"library_name": "peft", "tags": ["lora"], "pipeline_tag": PIPELINE_TAGS.get(model_class(config))}
    related = {"base_model": name, "base_model_relation": "adapter"} if base.startswith(HUB) else {}
    return model_card(title, "\n".join(lines), facts, **related, **about).encode()


def _write(planned: AdapterExport, place: ReleasePlace, plan_hash: str, naming: Naming, output: str) -> ExportedAdapter:
    """Writes it, as a release of one file and one unit of work, and publishes it."""
    made = dict(planned.tensors())
    planned.source.check()
    entries = ((name, values.dtype, values.shape) for name, values in made.items())
    (file,) = plan_files(entries, max_shard_size=sys.maxsize).files
    files = [(WEIGHTS, file.header, file.size)]
    rows = [
        (dataclasses.replace(tensor, path=WEIGHTS), whole(tensor.shape), made[tensor.name]) for tensor in file.tensors
    ]
    record = {
        "command": "export",
        "kind": "adapter",
        "source": planned.source.root,
        "like": planned.like.root,
        "plan": plan_hash,
        "rank": planned.rank,
        "alpha": planned.alpha,
        "versions": versions(),
    }
    place.create(pack_inputs({"kind": "adapter", "hash": plan_hash}))
    with _discarded(place), stopping(place, plan_hash):
        config = planned.peft_config(list(made), _base_of(planned, naming)[0])
        target = ReleaseTarget(files, {CONFIG: config, CARD: _card(planned, naming, output)})
        target.prepare(place)
        target.write(place, 0, rows)
        target.assemble(place, 1, naming.told(record), overwrite=True)
    if plan_hash_of(place.final) != plan_hash:
        raise Failed(f"  {place.final} isn't what was written")
    return _told(planned, str(place.final), made)


def _told(planned: AdapterExport, folder: str, tensors: Mapping[str, np.ndarray]) -> ExportedAdapter:
    size = sum(values.nbytes for values in tensors.values())
    return ExportedAdapter(folder, len(tensors), size, planned.rank, planned.alpha, source=digest(planned.source))


@contextlib.contextmanager
def _discarded(place: ReleasePlace) -> Iterator[None]:
    """Context manager: what is staged is thrown away where that fails; it is made anew in a moment."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            place.discard()
        raise
