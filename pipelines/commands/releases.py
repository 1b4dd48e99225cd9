"""What the commands have in common that write a release: what a person is told of it, and its small files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from weightbeam.formats.adapters import Adapter
from weightbeam.formats.record.naming import ORIGIN, name_of
from weightbeam.formats.release.card import model_card
from weightbeam.formats.release.config_text import ConfigEdits, edit_config
from weightbeam.formats.release.files import role_of
from weightbeam.formats.release.model_class import PIPELINE_TAGS, loading_code, model_class
from weightbeam.formats.safetensors import HfCheckpoint, Tensor
from weightbeam.formats.storage import StorageError, branch_of, is_hub, repo_of
from weightbeam.formats.storage.strict_json import JsonError
from weightbeam.pipelines.commands.dry_run import conclude
from weightbeam.pipelines.running.carry import carry
from weightbeam.pipelines.running.slots import slots_of, slots_of_release
from weightbeam.pipelines.running.sources import check_beam, check_places
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.running.without_beam import threads_in
from weightbeam.pipelines.running.writing import DONE, Made, Written
from weightbeam.pipelines.terminal.errors import Refused, refusing
from weightbeam.pipelines.terminal.keywords import asked_of, keywords_of
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.pipelines.terminal.report import memory_text, units_text
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Intended
from weightbeam.pipelines.terminal.tables import Table, count, human, pace
from weightbeam.transforms.comparing.array_sums import CHECKED
from weightbeam.transforms.cutting.files import FileLayout
from weightbeam.transforms.cutting.quantizing import cut_off
from weightbeam.transforms.planning.adapter_export import AdapterExport
from weightbeam.transforms.planning.exporting import Like
from weightbeam.transforms.planning.options import ReleaseOptions, ToHub
from weightbeam.transforms.planning.to_release import ToRelease

Kind = TypeVar("Kind", bound=ReleaseOptions)
Release = TypeVar("Release", bound=ToRelease)


def about(written: Written, files: FileLayout) -> str:
    """The lines that say where a release is."""
    if written.page:
        done = "published" if written.state == DONE else "published already"
        lines = [f"{written.folder}: {done}, {written.page}", *said_of(written.removed, written.replaced)]
        return "\n".join(lines)
    if written.instead:
        return written.instead
    what = f"{count(len(files.tensors), 'tensor')} in {count(len(files.files), 'file')}"
    size = sum(tensor.nbytes for tensor in files.tensors.values())
    return f"{written.folder}: {what}, {pace(size, written.nbytes, written.seconds)}"


def loading(folder: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """The lines that say how transformers loads the release in a folder, whose `config.json` is `config`; where it would
    take the codes among its tensors for others, by way of their values.
    """
    if cut_off(tensors):
        lines = [f"weightbeam dequantize {shlex.quote(folder)} VALUES", loading_code(config, "VALUES")]
    elif folder.startswith("gs://"):
        lines = [f"gcloud storage cp -r {shlex.quote(folder)} .", loading_code(config, folder.rpartition("/")[2])]
    elif is_hub(folder):
        lines = [loading_code(config, *repo_of(folder))]
    else:
        lines = [loading_code(config, folder)]
    return [f"{head:10}{line}" for head, line in zip(("load it:", ""), lines, strict=False)]


def said_of(removed: Sequence[str], replaced: Sequence[str]) -> list[str]:
    """The lines that say what a commit took away from a repository, and what it replaced there."""
    both = {"removed": removed, "replaced": replaced}
    return [f"{what} there: {', '.join(names)}" for what, names in both.items() if names]


def to_dict(planned: ToRelease, written: Written | None = None) -> dict[str, Any]:
    """What `--json` writes of a release that is planned or written."""
    plan, files, lossy = planned.plan, planned.files, planned.lossy
    tensors = files.tensors if files else {}
    about = {
        "inputs": [url for url in planned.inputs if url],
        "family": plan.family,
        "model": plan.model,
        "tensors": {
            name: {"dtype": t.dtype.name, "shape": t.shape, "file": t.path, "lossy": lossy.get(name)}
            for name, t in tensors.items()
        },
        "files": {file.name: file.size for file in files.files} if files else {},
        "left_out": dict(plan.dropped),
        "config_edits": dict(planned.config_edits),
        "problems": [problem.to_dict() for problem in plan.problems],
        "warnings": list(planned.warnings),
        "note": plan.note,
        "units": len(planned.units),
        "slots": planned.slots,
        "bytes": {"source": planned.source_bytes, "target": planned.target_bytes},
        "memory": {"unit_bytes": planned.unit_bytes, "largest_unit_bytes": planned.unit_working_bytes},
        **({"rank": planned.rank, "alpha": planned.alpha} if isinstance(planned, AdapterExport) else {}),
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
class Released(Made):
    """A release that was written."""

    planned: ToRelease

    @property
    def folder(self) -> str:
        """Where the release is."""
        return self.written.folder

    @property
    def page(self) -> str:
        """Of the commit on the hub; empty elsewhere."""
        return self.written.page

    def to_dict(self) -> dict[str, Any]:
        return to_dict(self.planned, self.written)

    def blocks(self) -> list[str]:
        lines = [about(self.written, self.planned.layout)]
        if self.written.state == DONE or self.page:
            lines += self.details()
        return lines + (self.written.compared.lines() if self.written.compared else [])

    def details(self) -> list[str]:
        """What a person sees of one that is done: what it is, how to load it, how to check it."""
        raise NotImplementedError


def make_release(
    command: str,
    source: str,
    output: str,
    asked: ReleaseOptions,
    how: ToHub,
    beam: Sequence[str],
    progress: bool | Report,
    plan: Callable[..., Release],
) -> tuple[Release, Written]:
    """Plans a release, and carries the plan out; the arguments are the command's. `plan` as `plan_release` calls it."""
    check_places(beam, command, source=source, output=output)
    planned = plan_release(source, output, asked, how, beam, plan)
    return planned, carry(planned, output, how, beam, progress)


def plan_release(
    source: str,
    output: str | None,
    asked: ReleaseOptions,
    how: ToHub,
    beam: Sequence[str],
    plan: Callable[..., Release],
) -> Release:
    """Plans a release that is to be carried out so: `plan(source, asked=…, output=…, slots=…)`.

    Raises:
      Refused: there is nothing to plan, or the release is made of what it goes to.
    """
    use_secret(how.hf_token_secret)
    slots = slots_for(asked, beam, source, output, how.resume)
    planned = plan(source, asked=asked, output=output, slots=slots)
    check_stays(source, planned.source.root, output, how.create_pr)
    return planned


def run_release(
    args: argparse.Namespace,
    rest: Sequence[str],
    asked: ReleaseOptions,
    function: Callable[..., Released],
    plan: Callable[..., Release],
    rows: Callable[[Release], Iterable[tuple[str, str]]],
) -> int:
    """Makes a release, and says what came of it; with `--dry_run` the plan, all that stands against it, and else the
    command that carries it out.

    Args:
      function: makes the release.
      plan: makes the plan, as `plan_release` calls it.
      rows: say of it to a person what they don't of every release.

    Raises:
      Refused: something stands against it.
    """
    if not args.dry_run:
        say(args, function(**keywords_of(args, function), beam=rest))
        return 0
    check_beam(rest, args.command, {"source": args.source, "output": args.output})
    how = asked_of(args, ToHub)
    planned = plan_release(args.source, args.output, asked, how, rest, plan)
    table = Table.of((*rows(planned), *size_rows(planned, threads_in(rest), args.output)))
    say(args, Intended([table], to_dict(planned), planned.warnings))
    check_hub(args.output, args.create_pr)
    size = planned.files.size if planned.files else 0
    return conclude(args, rest, planned, how, human(size))


def check_hub(output: str | None, create_pr: bool) -> None:
    """Raises `Refused` where an output of the hub names no repository, or there is no token for it, or a pull request is
    asked of another place; asks nobody.
    """
    if output and is_hub(output):
        # here: the hub's client takes a third of a second to import
        from weightbeam.formats.targets.hub import check_address

        with refusing(StorageError, about="--output="):
            check_address(output)
    elif output and create_pr:
        raise Refused(f"--create_pr: only the hub has pull requests, and --output is {output}")


def size_rows(planned: ToRelease, threads: int, output: str | None) -> Iterator[tuple[str, str]]:
    """What a release takes, for a person: its files, the units, the memory."""
    if files := planned.files:
        yield (
            "release",
            f"{count(len(files.tensors), 'tensor')} in {count(len(files.files), 'file')}, {human(files.size)}",
        )
    if planned.units:  # else something stands against it
        yield "units", units_text(planned)
        yield "memory", memory_text(planned, threads, output)


def slots_for(asked: ReleaseOptions, beam: Sequence[str], source: str, output: str | None, resume: bool) -> int | None:
    """Units at a time that those of a release are cut for; see `running/slots.py`."""
    # what goes to the hub is made in a folder first
    local = output if output and not is_hub(output) else ""
    slots = slots_of(beam, asked.unit_bytes, source, local)
    return slots_of_release(local, slots) if resume and local else slots


def check_stays(source: str, root: str, output: str | None, create_pr: bool) -> None:
    """Makes sure that a release isn't made of the branch of the hub that it goes to: the same command, after a stop or a lost
    answer, would be carried out on its own result. A commit stays, and a pull request moves no branch.

    Args:
      source: as it was named.
      root: the same, at the commit at which it is read.
      output: where it goes.
      create_pr: whether as a pull request.

    Raises:
      Refused: the source is named by the branch, or the hub can't be asked whether it is.
    """
    if create_pr or not (output and is_hub(output) and is_hub(source)):
        return
    from weightbeam.formats.storage.hub import name_now

    (repo, revision), (target, branch) = (repo_of(url.rstrip("/")) for url in (source, output))
    with refusing(StorageError):
        is_same = branch_of(revision) == branch_of(branch) and (
            repo.lower() == target.lower() or name_now(repo) == name_now(target)
        )
    if is_same:
        raise Refused(
            f"--source={source}: is what the release goes to, and the same command would be carried out on its own result; "
            f"name the commit: {root}"
        )


def card_address(config: Mapping[str, Any], output: str, otherwise: str) -> tuple[str, str]:
    """A card's title, which is the name of the place, and the code in it that loads a release: of a repository by its
    name, elsewhere in its folder.

    Args:
      config: the release's `config.json`.
      output: where it goes; empty where that isn't known.
      otherwise: the title of what has no name.
    """
    repo, revision = repo_of(output) if is_hub(output) else (".", "")
    place = output if not output or "://" in output else os.path.abspath(output)
    title = name_of(place) or otherwise if repo == "." else repo.rpartition("/")[2]
    return title, f"import transformers\n\nmodel = {loading_code(config, repo, revision)}"


def going_to(output: str | None, asked: Kind) -> Kind:
    """The options of a release that goes there: for the hub its plan names the sources by names, though it is made in a
    folder first, unless the user says otherwise.
    """
    by_name = asked.full_paths is None and is_hub(output)
    return dataclasses.replace(asked, full_paths=False) if by_name else asked


def adapter_facts(adapters: Sequence[Adapter]) -> dict[str, str]:
    """What a card says of the adapters that are merged."""
    return {f"adapter {number}": f"{each.root}, weight {each.weight:g}" for number, each in enumerate(adapters, 1)}


def make_small_files(
    planned: ToRelease,
    of: Like | HfCheckpoint,
    small: Mapping[str, bytes],
    edits: ConfigEdits,
    facts: Mapping[str, str],
    output: str | None,
    **about: Any,
) -> dict[str, bytes]:
    """The small files of a release that is written: the ones of the release that it is made of, `config.json` edited,
    and a new card.

    Args:
      of: the release that it is made of.
      small: the small files of that; without `config.json` where nobody wrote one yet.
      edits: of `config.json`; none leave it byte for byte.
      facts: what the card says.
      output: where the release goes.
      about: more of the card's head.

    Raises:
      Refused: `config.json` can't be edited.
    """
    config, root, naming = of.config, of.root, planned.naming(output or "")
    text = small["config.json"] if "config.json" in small else json.dumps(dict(config), indent=2).encode()
    done: list[str] = []
    if isinstance(origin := config.get(ORIGIN), str) and origin != (named := naming.text(origin)):
        edits = dataclasses.replace(edits, fields={**edits.fields, ORIGIN: named})
    if edits != ConfigEdits():
        try:
            edited, done = edit_config(text.decode(), edits)
        except (JsonError, UnicodeDecodeError) as e:
            raise Refused(f"config.json: {e}") from e
        text = edited.encode()
    left_out = {"config", "card", "quantisation"} if edits.drop_quantization else {"config", "card"}
    kept = {name: small[name] for name in small if role_of(name) not in left_out}
    stem = repo_of(root)[0].rpartition("/")[2]
    root = naming.name(root)
    base = repo_of(root)[0] if is_hub(root) else None
    card = small["README.md"].decode(errors="replace") if "README.md" in small else None
    title, code = card_address(config, output or "", stem or planned.plan.family)
    page = model_card(
        title,
        code,
        {key: naming.text(value) for key, value in facts.items() if value},
        [naming.text(edit) for edit in done if not edit.startswith(ORIGIN)],  # the folder that it once lay in
        base_model=base,
        card=card,
        pipeline_tag=PIPELINE_TAGS.get(model_class(config)),
        **about,
    )
    return {"config.json": text, **kept, "README.md": page.encode()}
