"""What the commands have in common that write a release: sizes, small files, what an output must be, and carrying the
plan out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weightbeam.formats.lease import HeldError
from weightbeam.formats.model_class import PIPELINE_TAGS, loading_code, model_class
from weightbeam.formats.naming import HUB, ORIGIN, Naming
from weightbeam.formats.release import edit_config, model_card, role_of
from weightbeam.formats.release_place import release_staging
from weightbeam.formats.release_target import (
    RECORD,
    IncompleteError,
    ReleaseFolder,
    ReleasePlace,
    others_in,
    plan_hash_of,
    record_of,
)
from weightbeam.formats.staging import BucketStaging
from weightbeam.formats.storage import StorageError, reason
from weightbeam.formats.strict_json import JsonError
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.arguments.parser import command_line
from weightbeam.pipelines.errors import Busy, Failed, Refused
from weightbeam.pipelines.keywords import asked_of
from weightbeam.pipelines.output import alone, check_room, look_for_job, problem_at, why_not_go_on
from weightbeam.pipelines.prepare import describe
from weightbeam.pipelines.progress import Report, reporter
from weightbeam.pipelines.report import BASE_BYTES, memory_parts, spare_bytes, units_text
from weightbeam.pipelines.shell import STDOUT, say
from weightbeam.pipelines.shown import Shown
from weightbeam.pipelines.slots import slots_of, slots_of_release
from weightbeam.pipelines.starting import get_ready
from weightbeam.pipelines.tables import count, human, pace
from weightbeam.pipelines.without_beam import says_threads
from weightbeam.transforms import baselines
from weightbeam.transforms.array_sums import CHECKED, Compared, compared_of
from weightbeam.transforms.files import FileLayout
from weightbeam.transforms.movement import Movement
from weightbeam.transforms.options import Delivery, ReleaseOptions, ToHub
from weightbeam.transforms.rows import ReleasePlan

if TYPE_CHECKING:
    from weightbeam.formats.hub_publishing import Published

LOG = logging.getLogger("weightbeam")
Kind = TypeVar("Kind", bound=ReleaseOptions)


@dataclasses.dataclass(frozen=True)
class Written:
    """Where a release is.

    Attributes:
      folder: its folder.
      seconds: that it took; 0 where it was finished already.
      written: bytes of tensors that this process wrote.
      state: `done`, or `nothing to do`.
      page: of the commit, where it was published on the hub.
      compared: how many arrays of a checkpoint were compared with their digests, where it was made of one.
      removed, replaced: files of the repository that the commit took away, and that have another content now.
    """

    folder: str
    seconds: float = 0.0
    state: str = "done"
    page: str = ""
    compared: Compared | None = None
    written: int = 0
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    def about(self, files: FileLayout) -> str:
        """The lines that say so."""
        if self.page:
            done = "published" if self.state == "done" else "published already"
            return "\n".join([f"{self.folder}: {done}, {self.page}", *said_of(self.removed, self.replaced)])
        if self.state != "done":
            return f"{self.folder} is finished already; nothing to do"
        what = f"{count(len(files.tensors), 'tensor')} in {count(len(files.files), 'file')}"
        size = sum(tensor.nbytes for tensor in files.tensors.values())
        return f"{self.folder}: {what}, {pace(size, self.written, self.seconds)}"

    def loading(self, config: Mapping[str, Any]) -> list[str]:
        """The lines that say how transformers loads the release, whose `config.json` is `config`."""
        if self.folder.startswith("gs://"):
            lines = [
                f"gcloud storage cp -r {shlex.quote(self.folder)} .",
                loading_code(config, self.folder.rpartition("/")[2]),
            ]
        elif self.folder.startswith("hf://"):
            lines = [loading_code(config, *repo_of(self.folder))]
        else:
            lines = [loading_code(config, self.folder)]
        return [f"{head:10}{line}" for head, line in zip(("load it:", ""), lines, strict=False)]


def said_of(removed: Sequence[str], replaced: Sequence[str]) -> list[str]:
    """The lines that say what a commit took away from a repository, and what it replaced there."""
    both = {"removed": removed, "replaced": replaced}
    return [f"{what} there: {', '.join(names)}" for what, names in both.items() if names]


def to_dict(planned: ReleasePlan, written: Written | None = None) -> dict[str, Any]:
    """What `--json` writes of a release that is planned or written."""
    plan, files = planned.plan, planned.files
    tensors = files.tensors if files else {}
    about = {
        "inputs": [url for url in planned.inputs if url],
        "family": plan.family,
        "model": plan.model,
        "tensors": {
            name: {"dtype": t.dtype.name, "shape": t.shape, "file": t.path, "lossy": planned.lossy.get(name)}
            for name, t in tensors.items()
        },
        "files": {file.name: file.size for file in files.files} if files else {},
        "left_out": dict(plan.dropped),
        "config_edits": dict(planned.config_edits),
        "problems": [
            {"kind": p.kind, "array" if p.is_array else "tensor": p.subject, "message": p.message}
            for p in plan.problems
        ],
        "warnings": list(planned.warnings),
        "note": plan.note,
        "units": len(planned.units),
        "slots": planned.slots,
        "bytes": {"source": planned.source_bytes, "target": planned.target_bytes},
        "memory": {"unit_bytes": planned.unit_bytes, "largest_unit_bytes": planned.unit_working_bytes},
    }
    if written is None:
        return about
    return (
        about
        | {"output": written.folder, "seconds": written.seconds, "state": written.state}
        | ({name: getattr(written, name) for name in ("page", "removed", "replaced")} if written.page else {})
        | ({CHECKED: written.compared.to_dict()} if written.compared else {})
    )


@dataclasses.dataclass(frozen=True, repr=False)
class Planned(Shown):
    """What a dry run says.

    Attributes:
      release: what would be written.
      text: the same for a person.
    """

    release: ReleasePlan
    text: str

    def to_dict(self) -> dict[str, Any]:
        return to_dict(self.release)

    def blocks(self) -> list[str]:
        return [self.text]


def say_plan(planned: ReleasePlan, text: str, args: argparse.Namespace, rest: Sequence[str]) -> int:
    """What a dry run prints: the plan, all that stands against it, and else the command that carries it out.

    Raises:
      Refused: something stands against it.
    """
    say(args, Planned(planned, text))
    problems = list(planned.plan.problems)
    if args.output and not args.output.startswith("hf://") and not problems:
        problems = check_release(find_place(planned, args.output), planned, asked_of(args, ToHub))
    refuse(problems)
    if args.json != STDOUT and not args.quiet:
        size = planned.files.size if planned.files else 0
        print(ready_text(args, rest, planned.inputs[0], f"{human(size)} to write"))
    return 0


def ready_text(args: argparse.Namespace, rest: Sequence[str], source: str, what: str) -> str:
    """The last lines of a dry run, as a plan's: what is written, and the command that does it."""
    return f"\nready: {what}\n  {command_line(args, rest, places=(source, args.output or 'OUTPUT'))}"


def size_lines(planned: ReleasePlan, threads: int, output: str | None = None) -> list[str]:
    """What a release takes, for a person: its files, the units, the memory."""
    if (files := planned.files) is None:
        return []
    most, parts = memory_parts(threads, planned.unit_bytes, spare_bytes(cast(Movement, planned), output), BASE_BYTES)
    return [
        f"release     {count(len(files.tensors), 'tensor')} in {count(len(files.files), 'file')}, {human(files.size)}",
        f"units       {units_text(planned)}",
        f"memory      at most {most}: {parts}",
    ]


def slots_for(
    asked: ReleaseOptions, beam: Sequence[str], source: str, output: str | None, resume: bool = False
) -> int | None:
    """Units at a time that those of a release are cut for: as the workers are known, or as a command cut them that is
    to be resumed.
    """
    # what goes to the hub is made in a folder first
    local = output if output and not output.startswith("hf://") else ""
    slots = slots_of(beam, asked.unit_bytes, None, source, local)
    return slots_of_release(local, slots) if resume and local else slots


def check_places(command: str, source: str, output: str, beam: Sequence[str]) -> None:
    """Raises `Refused` where an output isn't named, or one of Beam's options can't be."""
    if not says_threads(beam):
        from weightbeam.pipelines.options import check_options  # imports Beam

        check_options(beam, command, {"source": source, "output": output})
    if not output:
        missing = "--output is missing: the folder that the release should lie in"
        raise Refused(missing if source else f"{no_source(command)}\n{missing}")


def no_source(command: str) -> str:
    """What a command says that was given nothing to make a release of."""
    what = {"export": "the Orbax checkpoint", "quantize": "a release, or an Orbax checkpoint"}.get(
        command, "the release"
    )
    return f"--source is missing: {what}"


def repo_of(url: str) -> tuple[str, str]:
    """`owner/name` and the revision of `hf://owner/name@revision`, which may be empty; anything else as it is."""
    if not url.startswith(HUB):
        return url, ""
    repo, _, revision = url.removeprefix(HUB).partition("@")
    return repo, revision


def card_address(config: Mapping[str, Any], output: str, otherwise: str) -> tuple[str, str]:
    """A card's title, and the code in it that loads a release: of a repository by its name, elsewhere in its folder.

    Args:
      config: the release's `config.json`.
      output: where it goes.
      otherwise: the title where that is no repository.
    """
    repo, revision = repo_of(output) if output.startswith(HUB) else (".", "")
    title = otherwise if repo == "." else repo.rpartition("/")[2]
    return title, f"import transformers\n\nmodel = {loading_code(config, repo, revision)}"


def asked_paths(output: str | None, full_paths: bool | None) -> bool | None:
    """How a plan names its sources: as the user asked; for the hub by names, though it is made in a folder first."""
    return False if full_paths is None and output and output.startswith(HUB) else full_paths


def going_to(output: str | None, asked: Kind) -> Kind:
    """The options of a release that goes there."""
    return dataclasses.replace(asked, full_paths=asked_paths(output, asked.full_paths))


def naming_of(planned: ReleasePlan, output: str | None) -> Naming:
    """How a plan's sources are named where its release goes."""
    return Naming.of(output or "", planned.options.full_paths, planned.sources, planned.inputs)


def make_small_files(
    small: Mapping[str, bytes],
    config: Mapping[str, Any],
    edits: Mapping[str, Any],
    left_out: Collection[str],
    root: str,
    facts: Mapping[str, str],
    naming: Naming,
    output: str | None,
    title: str = "",
    **about: Any,
) -> dict[str, bytes]:
    """The small files of a release that is written: the ones of the release that it is made of, `config.json` edited,
    and a new card.

    Args:
      small: those of the release that it is made of.
      config: `config.json`, where it isn't among them.
      edits: of `config.json`, as `edit_config` takes them; none leave it byte for byte.
      left_out: roles of files that stay out.
      root: URL of that release.
      facts: what the card says.
      naming: how it names sources.
      output: where the release goes.
      title: of the card, where neither a repository nor the root has a name.
      about: more of the card's head.

    Raises:
      Refused: `config.json` can't be edited.
    """
    text = small["config.json"] if "config.json" in small else json.dumps(dict(config), indent=2).encode()
    done: list[str] = []
    if isinstance(origin := config.get(ORIGIN), str) and origin != (named := naming.text(origin)):
        edits = {**edits, "fields": {**(edits.get("fields") or {}), ORIGIN: named}}
    if edits:
        try:
            edited, done = edit_config(text.decode(), **edits)
        except (JsonError, UnicodeDecodeError) as e:
            raise Refused(f"config.json: {e}") from e
        text = edited.encode()
    kept = {name: small[name] for name in small if role_of(name) not in {"config", "card", *left_out}}
    stem = repo_of(root)[0].rpartition("/")[2]
    root = naming.name(root)
    base = repo_of(root)[0] if root.startswith(HUB) else None
    card = small["README.md"].decode(errors="replace") if "README.md" in small else None
    title, code = card_address(config, output or "", stem or title)
    page = model_card(
        title,
        code,
        {key: naming.text(value) for key, value in facts.items() if value},
        [naming.text(edit) for edit in done],
        base_model=base,
        card=card,
        pipeline_tag=PIPELINE_TAGS.get(model_class(config)),
        **about,
    )
    return {"config.json": text, **kept, "README.md": page.encode()}


def refuse(problems: Sequence[Problem]) -> None:
    """Raises `Refused` with all problems, if there are any."""
    if problems:
        raise Refused(f"{count(len(problems), 'problem')}:\n{describe(problems)}", problems)


def carry_out(
    planned: ReleasePlan, output: str, how: Delivery, beam: Sequence[str] = (), progress: bool | Report = True
) -> Written:
    """Carries a planned release out, or refuses to: into a folder, into a bucket, or as one commit of the hub."""
    if output.startswith("hf://"):
        return _to_hub(planned, output, how, beam, progress)
    if how.create_pr:
        raise Refused(f"--create_pr: only the hub has pull requests, and --output is {output}")
    staging = find_place(planned, output)
    refuse([*planned.plan.problems, *check_release(staging, planned, how)])
    refuse(planned.unreadable())
    if how.resume and _is_finished(staging, planned):
        return Written(str(staging.final), state="nothing to do", compared=compared_of(record_of(staging.final)))
    for warning in planned.warnings:
        LOG.warning(warning)
    with get_ready(cast(Movement, planned), staging, how.resume, beam), alone(staging, look_for_job(staging, beam)):
        return _write(planned, staging, output, how, beam, progress)


def _is_finished(staging: ReleasePlace, planned: ReleasePlan) -> bool:
    """Whether the very release that is wanted is published, and nothing is staged beside it."""
    return not staging.exists() and plan_hash_of(staging.final) == planned.hash


def _write(
    planned: ReleasePlan,
    staging: ReleasePlace,
    output: str,
    how: Delivery,
    beam: Sequence[str],
    progress: bool | Report,
) -> Written:
    """Writes a release to its place, which is this command's alone."""
    from weightbeam.pipelines.execution import run_units  # only now: it imports Beam

    start = time.monotonic()
    refuse(check_release(staging, planned, how))  # again: now nobody else changes it
    ours = {"source": planned.inputs[0], "output": output}
    written = run_units(cast(Movement, planned), staging, beam, ours, how, reporter(progress))
    if plan_hash_of(staging.final) != planned.hash:
        raise Failed(f"  the pipeline ended, but {staging.final} isn't its result")
    seconds = time.monotonic() - start
    compared = compared_of(record_of(staging.final))
    return Written(str(staging.final), seconds, compared=compared, written=written or 0)


def _to_hub(planned: ReleasePlan, output: str, how: Delivery, beam: Sequence[str], progress: bool | Report) -> Written:
    """Writes the release to a folder of this user's cache, which a later attempt goes on with, and publishes it as one
    commit. The folder is this command's alone until that is done.
    """
    # here: the hub's client takes a third of a second to import
    from weightbeam.formats.hub_publishing import check_target, look

    refuse(planned.plan.problems)
    named = naming_of(planned, output).name(planned.inputs[0])
    title = f"{planned.title} of {named} ({planned.hash[:12]})"
    listed = {**planned.texts, **dict.fromkeys([RECORD, *(name for name, *_ in planned.shards)])}
    asked = {"overwrite": how.overwrite, "create_pr": how.create_pr}
    place = _place_in_cache(planned)
    try:
        check_target(output)
        made = look(output, title, listed, **asked)
    except StorageError as e:
        raise Refused(f"--output={e}") from e
    if made:
        _clear(place)
        return Written(made.url, state="nothing to do", page=made.page)
    refuse(planned.unreadable())
    for warning in planned.warnings:
        LOG.warning(warning)
    is_left = not _is_finished(place, planned)
    ready = get_ready(cast(Movement, planned), place, True, beam) if is_left else contextlib.nullcontext()
    with ready, alone(place, look_for_job(place, beam)):
        written = _write_to_cache(planned, place, how, beam, progress)
        made = _publish_cached(planned, place, output, title, **asked)
    return dataclasses.replace(written, folder=made.url, page=made.page, removed=made.removed, replaced=made.replaced)


def _publish_cached(planned: ReleasePlan, place: ReleaseFolder, output: str, title: str, **asked: bool) -> Published:
    """Publishes the release that lies in the cache, whose place is this command's alone, and removes it there."""
    from weightbeam.formats.hub_publishing import publish

    try:
        files = planned.texts | place.made(planned.shards)
        made = publish(output, title, files, **asked, is_wanted=place.is_held)
    except (OSError, IncompleteError) as e:
        why = reason(e) if isinstance(e, OSError) else e
        raise Failed(f"  {why}\nThe release is in {place.final}; the same command publishes it.") from e
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"the release is in {place.final}; the same command publishes it") from e
    if made is None:
        raise Failed(f"  {place.final} was taken over by another command while this one slept; that publishes it")
    with contextlib.suppress(HeldError):  # somebody else's by now
        _remove(place)
    return made


def _place_in_cache(planned: ReleasePlan) -> ReleaseFolder:
    """Where a release lies on this machine until the hub has it; the plan's own."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = find_place(planned, str(cache / "weightbeam" / f"{planned.title.lower()}-{planned.hash[:16]}"))
    assert isinstance(place, ReleaseFolder)
    return place


def _write_to_cache(
    planned: ReleasePlan, place: ReleaseFolder, how: Delivery, beam: Sequence[str], progress: bool | Report
) -> Written:
    """Writes a release to its place in the cache, which is this command's alone, where it isn't there as it was
    planned.
    """
    if _is_finished(place, planned) and _is_as_noted(place, planned):
        with contextlib.suppress(IncompleteError):
            place.made(planned.shards)
            return Written(str(place.final), compared=compared_of(record_of(place.final)))
    if place.is_taken():  # the remains of one that was being removed
        place.remove()
    anew = place.exists() and bool(why_not_go_on(place, planned))
    how = dataclasses.replace(how, resume=not anew, overwrite=anew)
    written = _write(planned, place, str(place.final), how, beam, progress)
    _note(place).write_text(json.dumps(_marks(place, planned)))
    return written


def _note(place: ReleaseFolder) -> Path:
    """What says beside a release in the cache how its files were when they were written, for a command that comes later."""
    return Path(f"{place.final.url}.written")


def _marks(place: ReleaseFolder, planned: ReleasePlan) -> dict[str, list[int]]:
    """The inode of each file of weights, and the time of any change, which no tool sets back."""
    found = {name: os.stat(place.final.path(name)) for name, *_ in planned.shards}
    return {name: [stat.st_ino, stat.st_ctime_ns] for name, stat in found.items()}


def _is_as_noted(place: ReleaseFolder, planned: ReleasePlan) -> bool:
    """Whether nobody has touched the weights of a release in the cache since they were written."""
    try:
        return json.loads(_note(place).read_bytes()) == _marks(place, planned)
    except (OSError, ValueError):
        return False


def _remove(place: ReleaseFolder) -> None:
    """Removes a release in the cache."""
    place.remove()
    _note(place).unlink(missing_ok=True)


def _clear(place: ReleaseFolder) -> None:
    """Removes what lies in the cache of a release that is published, unless somebody is at work there."""
    if place.is_taken() or place.exists():
        with contextlib.suppress(Busy), alone(place):
            place.discard()
            _remove(place)


def find_place(planned: ReleasePlan, output: str) -> ReleasePlace:
    """The place of a release.

    Raises:
      Refused: nothing can be written there.
    """
    try:
        return release_staging(output, planned.hash)
    except StorageError as e:
        raise Refused(f"--output={e}") from e


@dataclasses.dataclass(frozen=True)
class _Found:
    """What lies where a release goes.

    Attributes:
      stopped: whether something is staged that wasn't published.
      there: whether anything is in the place itself.
      made_by: the hash of the plan that the release there was made by; None if that is none of ours.
    """

    stopped: bool
    there: bool
    made_by: str | None


def check_release(staging: ReleasePlace, planned: ReleasePlan, how: Delivery) -> list[Problem]:
    """What stands against writing a release there: the first that is found, in the order of the steps.

    Raises:
      Busy: another command is at work there, or it can't be looked at.
    """
    if problems := _check_kind(staging) or _check_inputs(staging, planned.inputs):
        return problems
    found = _look_at(staging)
    return (
        _check_stopped(staging, planned, how, found)
        or _check_there(staging, planned, how, found)
        or _check_room(staging, planned, found)
    )


def _check_kind(staging: ReleasePlace) -> list[Problem]:
    """Whether a release can lie there at all."""
    if isinstance(staging, ReleaseFolder):
        folder = staging.final.folder
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            return problem_at(staging.final, "is a link or a file; name a folder")
    return []


def _check_inputs(staging: ReleasePlace, inputs: Iterable[str]) -> list[Problem]:
    """Whether what the release is made of lies elsewhere."""
    for url in filter(None, inputs):
        for place in (staging.final, *staging.beside()):
            if lies_in(url, place.url) or lies_in(place.url, url):
                why = f"and {url}, which it is made of, lie in each other; choose another --output"
                return problem_at(staging.final, why)
    return []


def _look_at(staging: ReleasePlace) -> _Found:
    """Looks at what lies there, if nobody is at work."""
    try:
        staging.check_free()
        stopped, made_by = staging.exists(), plan_hash_of(staging.final)
        return _Found(stopped, staging.is_taken(), made_by)
    except OSError as e:
        raise Busy(f"  output: {reason(e)}") from e


def _check_stopped(staging: ReleasePlace, planned: ReleasePlan, how: Delivery, found: _Found) -> list[Problem]:
    """Whether it was said what to do with what a stopped command staged, and that can be done."""
    if not found.stopped:
        return []
    if how.resume:
        why = why_not_go_on(staging, planned)
        return problem_at(staging.plan_folder, why) if why else []
    todo = "go on with --resume, or start anew with --overwrite"
    return [] if how.overwrite else problem_at(staging.final, f"what a stopped command staged lies beside it; {todo}")


def _check_there(staging: ReleasePlace, planned: ReleasePlan, how: Delivery, found: _Found) -> list[Problem]:
    """Whether what lies in the place is the release that is wanted, or may be replaced."""
    is_wanted = how.resume and found.made_by == planned.hash
    if not found.there or (is_wanted and not how.overwrite):
        return []
    foreign = "isn't a release that Weightbeam wrote"
    if not how.overwrite:
        why = "; --overwrite replaces it" if found.made_by else f", and {foreign}; choose another --output"
        return problem_at(staging.final, f"exists{why}")
    if not found.made_by:
        why = f"{foreign}, and isn't deleted; choose another --output"
        return [] if _may_go(staging) else problem_at(staging.final, why)
    if others := sorted(set(others_in(staging.final)) - {baselines.FILE}):
        why = f"holds what Weightbeam didn't write there, and --overwrite would delete: {', '.join(others)}"
        return problem_at(staging.final, f"{why}; move it away, or choose another --output")
    return []


def _check_room(staging: ReleasePlace, planned: ReleasePlan, found: _Found) -> list[Problem]:
    """Whether the disk has room for a release of which nothing is staged."""
    if isinstance(staging, ReleaseFolder) and planned.files is not None and not found.stopped:
        return check_room(staging.final, planned.files.size)
    return []


def _may_go(staging: ReleasePlace) -> bool:
    """Whether what lies in the place, which is no release of ours, may be deleted: an empty folder, or what a stopped
    command left in a bucket.
    """
    return staging.is_remains() if isinstance(staging, BucketStaging) else not any(Path(staging.final.url).iterdir())


def lies_in(url: str, other: str) -> bool:
    """Whether a folder is another one or lies in it, links resolved."""
    if "://" in url or "://" in other:
        return f"{url}/".startswith(f"{other}/")
    return Path(url).resolve().is_relative_to(Path(other).resolve())
