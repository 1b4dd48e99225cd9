"""`weightbeam verify`: a checkpoint against its source, element by element."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import logging
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import tensorstore as ts

from weightbeam.formats.orbax import STEP, find_items, leaves, open_arrays, read_tree, record_of, unknown_beside
from weightbeam.formats.orbax.source import OrbaxCheckpoint, open_orbax
from weightbeam.formats.record.naming import is_name, is_named
from weightbeam.formats.record.provenance import RECORD as CHECKPOINT_RECORD
from weightbeam.formats.safetensors import HfCheckpoint, is_release, open_hf
from weightbeam.formats.storage import StorageError, Store, open_store, reason
from weightbeam.formats.storage.identity import Files, Watched
from weightbeam.formats.storage.token import name_secret
from weightbeam.formats.targets.published import RECORD
from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.family import Prediction, rename
from weightbeam.model_mappings.plan import PARAMETERS, Array, is_float
from weightbeam.model_mappings.registry import family_of
from weightbeam.model_mappings.trees import TreeError, is_scanned, is_state, recognize
from weightbeam.pipelines.commands.virtual import check_files, open_own_source
from weightbeam.pipelines.running.beam_options import check_options, make_pipeline, pipeline_options
from weightbeam.pipelines.running.prepare import (
    SHOWN,
    check_read,
    open_adapters,
    open_source,
    options_of,
    options_of_export,
    read_record,
    reading,
    refuse,
)
from weightbeam.pipelines.running.runners.failure import last_words
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.keywords import asked_of, keywords_of, takes
from weightbeam.pipelines.terminal.notebook import as_in_a_script
from weightbeam.pipelines.terminal.progress import Report, quiet, reporter, roots, watch_progress
from weightbeam.pipelines.terminal.report import collapse
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import CELL, count, human
from weightbeam.transforms.comparing.array_sums import (
    NOT_COMPARED,
    Compared,
    ShardsRead,
    ShardsTask,
    find_damage,
    shards_tasks,
)
from weightbeam.transforms.comparing.counterparts import Counterpart, copied, taken
from weightbeam.transforms.comparing.metadata import find_metadata_faults
from weightbeam.transforms.comparing.release_faults import compare_remembered, find_release_faults
from weightbeam.transforms.comparing.verification import ArrayResult, compared_elements, is_compared, tasks
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import prepare
from weightbeam.transforms.planning.options import Options, VerifyOptions
from weightbeam.transforms.stages.comparing import COMPARED, CompareArrays, StagedSubject, read_findings
from weightbeam.transforms.stages.staged import remember

LOG = logging.getLogger("weightbeam")
MISSING = "is missing"
OPTIMIZERS = ("opt_state", "optimizer", "outer_opt_state")  # how the keys of an optimizer's arrays begin
NOTES = "notes"  # in JSON
NO_HASH = f"isn't compared: {CHECKPOINT_RECORD} has no hash of it"
DAMAGED = f"isn't what {CHECKPOINT_RECORD} says was written, by its digest: the checkpoint is damaged"


@dataclasses.dataclass(frozen=True, repr=False)
class Verification(Shown):
    """What a comparison found.

    Attributes:
      checkpoint: what was compared.
      conversion: what it should be the result of.
      findings: of each array that was compared, by its key.
      wrong: arrays that are missing, unexpected or of another shape, and what is wrong with each.
      sample: the share of each array's tensors that was compared.
      export: the release, where it is the one that is judged: an export of the checkpoint.
      others: what was found of its tensors that no array makes, by what they were compared with.
      unjudged: its tensors that were compared with nothing, with the reason why the table leaves them out.
      notes: what of it, or of the source, isn't wrong and yet to be known, and what is to be said of that.
      digests: how many of the checkpoint's arrays were compared with the digests of its record; of an export.
      state: the checkpoint's arrays that are no weights, and weren't compared: a training state's.
    """

    checkpoint: str
    conversion: Conversion
    findings: Mapping[str, ArrayResult]
    wrong: tuple[tuple[str, str], ...]
    sample: float = 1.0
    export: str | None = None
    others: Mapping[str, Mapping[str, ArrayResult]] = dataclasses.field(default_factory=dict)
    unjudged: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()
    digests: Compared | None = None
    state: tuple[str, ...] = ()

    @property
    def _all(self) -> Mapping[str, ArrayResult]:
        return dict(itertools.chain(self.findings.items(), *(found.items() for found in self.others.values())))

    @property
    def ok(self) -> bool:
        """Whether all that was compared is right."""
        return not self.faults

    @property
    def left_out(self) -> list[str]:
        """Arrays that aren't in the checkpoint, and not among the parameters that MaxText loads."""
        return [key for key, what in self.wrong if what == MISSING and not key.startswith(PARAMETERS)]

    @property
    def faults(self) -> list[str]:
        """What differs, a line each: first what is missing or too much, then values."""
        left_out = set(self.left_out)
        faults = [f"{key.removeprefix(PARAMETERS)} {what}" for key, what in self.wrong if key not in left_out]
        return faults + [
            f"{key.removeprefix(PARAMETERS)}: {found.different:,} of {found.compared:,} elements differ"
            f"{f', by up to {found.largest:.3g}' if found.largest else ''}; {found.first}"
            for key, found in self._all.items()
            if found.different
        ]

    def check(self) -> None:
        """Raises `Failed` with all that differs, if anything does; the last line is the command that shows how much."""
        if faults := self.faults:
            lines = [f"  {fault}" for fault in faults[:SHOWN]]
            if len(faults) > SHOWN:
                lines.append(f"  … and {len(faults) - SHOWN} more; --json FILE has all")
            if any(found.different for found in self.findings.values()):
                what = "did training change" if self.state else "differs"
                lines.append(f"what {what}, and how much? {diff_command(self.conversion.source.root, self.checkpoint)}")
            raise Failed("\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """What `weightbeam verify --json` writes: what was found of each array, and of an export's other tensors, each by its
        key; and by `notes`, where there are any, what is to be known of what.
        """
        arrays: dict[str, Any] = {key: {"different": None, "message": what} for key, what in self.wrong}
        for key, found in self._all.items():
            message = str(found.first) if found.first else None
            arrays[key] = {
                "compared": found.compared,
                "different": found.different,
                "rounded": found.rounded,
                "message": message,
            }
        return {**arrays, NOTES: dict(self.notes)} if self.notes else arrays

    @property
    def warnings(self) -> list[str]:
        """What is right, and yet strange: tensors with NaN or infinite elements, matrices that are zero throughout, and the
        notes.
        """
        odd = [found.not_finite for found in self.findings.values() if found.not_finite[0]]
        zero = [name for found in self.findings.values() for name in found.zero]
        warnings = []
        if odd:
            elements = sum(number for number, _ in odd)
            are = "is" if elements == 1 else "are"
            warnings.append(
                f"{count(elements, 'element')} of the source {are} NaN or infinite, in {count(len(odd), 'array')}, the first in {odd[0][1]}"
            )
        if zero:
            warnings.append(
                f"{count(len(zero), 'tensor')} of the source {'is' if len(zero) == 1 else 'are'} zero throughout, the first is {zero[0]}"
            )
        warnings += [f"{key} {what}" for key, what in self.notes]
        return [printable(warning) for warning in warnings]

    def blocks(self) -> list[str]:
        kinds = Counter(map(_kind, self._all.values()))
        compared = _elements(self.findings)
        part = f", a sample of {self.sample:.3g}" if self.sample < 1 else ""
        judged = f" with {printable(self.export)}, which was exported of them" if self.export else ""
        lines = [f"{compared:,} elements of {count(len(self.findings), 'array')} compared{judged}{part}"]
        lines += [
            f"{_elements(found):,} elements of {count(len(found), 'tensor')} of it compared with {printable(origin)}"
            for origin, found in self.others.items()
        ]
        error = max((found.error for found in self._all.values()), default=0.0)
        texts = dict(
            exact="exact",
            rounded="rounded once, as the plan says",
            quantised=f"quantised: a tensor's relative error is at most {error:.2%}, by norms",
            different="different",
        )
        for kind, text in texts.items():
            if kinds[kind]:
                lines.append(f"  {kinds[kind]:>6,} {text}")
            if kind == "rounded":
                keys = [key.removeprefix(PARAMETERS) for key, found in self._all.items() if _kind(found) == "rounded"]
                lines += [f"         {printable(key, CELL)}" for key in collapse(keys)]
        if self.left_out:
            name = printable(self.left_out[0], CELL)
            lines.append(
                f"  {len(self.left_out):>6,} not in the checkpoint, and not among the parameters that MaxText loads: {name} …"
            )
        for why, times in Counter(self.unjudged.values()).items():
            lines.append(f"  {times:>6,} of its tensors compared with nothing: {printable(why)}")
        if self.state:
            lines.append(_state_text(self.state))
        if self.digests and self.digests.arrays:
            lines.append(f"{count(self.digests.arrays, 'array')} of the checkpoint compared with their digests")
        return [*lines, *(f"warning: {warning}" for warning in self.warnings)]

    def whole(self) -> list[str]:
        return [*self.blocks(), *self.faults]

    def brief(self) -> str:
        found = "nothing differs" if self.ok else count(len(self.faults), "fault")
        return f"{self.checkpoint}: {_elements(self.findings):,} elements of {count(len(self.findings), 'array')} compared, {found}"


def _kind(found: ArrayResult) -> str:
    """How an array, or a tensor, compares."""
    if found.different:
        return "different"
    return "quantised" if found.error else "rounded" if found.rounded else "exact"


def _state_text(keys: Sequence[str]) -> str:
    """That a training state's other arrays weren't compared."""
    optimizer = sum(key.startswith(OPTIMIZERS) for key in keys)
    others = sorted({key.partition(".")[0] for key in keys if not key.startswith(OPTIMIZERS)})
    parts = [f"its optimizer ({count(optimizer, 'array')})"] if optimizer else []
    parts += [f"its {' and '.join(others)} ({count(len(keys) - optimizer, 'array')})"] if others else []
    return f"a training state: {' and '.join(parts)} {'are' if len(keys) > 1 else 'is'} not compared"


def diff_command(a: str, b: str) -> str:
    """The command that compares any two checkpoints."""
    return f"weightbeam diff {shlex.quote(a)} {shlex.quote(b)}"


def _elements(findings: Mapping[str, ArrayResult]) -> int:
    """How many elements were compared."""
    return sum(found.compared for found in findings.values())


@takes(asked=VerifyOptions)
def verify(
    checkpoint: str,
    source: str | None = None,
    *,
    asked: VerifyOptions,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
) -> Verification:
    """Compares every element of a checkpoint with the tensors it was made of, in a way of its own. What differs doesn't
    raise: see `ok` and `check`.

    Args:
      checkpoint: an Orbax checkpoint, ours or MaxText's converter's: its root, a step or an item, in a folder or in
        `gs://`. Or a release that was exported, which is compared with the checkpoint it was made of.
      source: a folder, `gs://…` or `hf://…`; None for what the checkpoint says, and for the files of a virtual
        checkpoint. Of a release that was exported, the checkpoint.
      beam: Beam's options, as on the command line.
      progress: shown on standard error, told to a callback, or False for neither.

    Returns:
      What was compared, in elements and arrays, and what differs, by how much.

    Raises:
      Refused: it can't be compared.
      Failed: it failed on the way.

    Example:
      >>> compared = wb.verify("ckpt", progress=False)
      >>> compared.ok
      True
      >>> compared.check()  # raises `Failed` where anything differs
    """
    subject = plan_verification(checkpoint, source, _given(asked), asked.hf_token_secret, beam)
    findings = execute(subject, asked.sample, beam, reporter(progress))
    return subject.found(findings, asked.sample)


def _given(asked: VerifyOptions) -> dict[str, Any]:
    """What is said of the checkpoint's options; None for what it says itself."""
    given = {**vars(asked), "lora": asked.lora or None}
    return {name: value for name, value in given.items() if name not in ("sample", "hf_token_secret")}


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is compared.

    Attributes:
      items: the checkpoint's.
      conversion: of the release into such a checkpoint.
      wrong: arrays that are missing, unexpected or of another shape.
      keys: the checkpoint's key of each array.
      exported: whether the release is what is judged: an export of the checkpoint.
      state: the checkpoint's arrays that are no weights, and aren't compared.
      counterparts: an export's tensors that no array makes, and what they should be, by what that is.
      unjudged: its tensors that are compared with nothing, each with the reason why the table leaves it out.
      notes: as of `Verification`.
      digested: where the release is what is judged: the checkpoint, whose record may have digests.
      sources: what is read.
    """

    items: Store
    conversion: Conversion
    wrong: tuple[tuple[str, str], ...]
    keys: Mapping[str, str]
    exported: bool = False
    state: tuple[str, ...] = ()
    counterparts: Mapping[str, Sequence[Counterpart]] = dataclasses.field(default_factory=dict)
    unjudged: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()
    digested: OrbaxCheckpoint | None = None
    sources: tuple[Watched | Files, ...] = ()

    def shards(self, sample: float) -> list[ShardsTask]:
        """What is read for digests: nothing where only a sample of the tensors is."""
        whole = self.digested is not None and sample == 1
        return shards_tasks(self.digested.record, self.digested.weights.values()) if self.digested and whole else []

    def found(self, everything: Mapping[str, Any], sample: float) -> Verification:
        """The same with what was found."""
        read = [found.shares for found in everything.values() if isinstance(found, ShardsRead)]
        findings = {key: found for key, found in everything.items() if isinstance(found, ArrayResult)}
        export = self.conversion.source.root if self.exported else None
        others = {
            origin: {one.name: findings[one.name] for one in counterparts if one.name in findings}
            for origin, counterparts in self.counterparts.items()
        }
        keys = [array.key for array in self.conversion.plan.arrays]
        arrays = {key: findings[key] for key in keys if key in findings}
        wrong, notes, digests = self.wrong, self.notes, None
        if self.digested:
            digests, damaged = find_damage(self.digested.record, self.digested.weights.values(), read)
            wrong += tuple((f"{key} in {self.items}", DAMAGED) for key in damaged)
            lines = digests.lines() if everything else ()  # else nothing was read yet
            notes += tuple((NOT_COMPARED, line.removeprefix(NOT_COMPARED).strip()) for line in lines)
        return Verification(
            str(self.items),
            self.conversion,
            arrays,
            wrong,
            sample,
            export,
            others,
            self.unjudged,
            notes,
            digests,
            self.state,
        )


def plan_verification(
    checkpoint: str,
    source: str | None,
    given: Mapping[str, Any],
    hf_token_secret: str | None = None,
    beam: Sequence[str] = (),
) -> Subject:
    """Looks at both sides, and plans the conversion of the release.

    Raises:
      Refused: it can't be compared.
      Failed: the files that a virtual checkpoint refers to have changed.
    """
    check_options(beam, "verify", {"source": source, "checkpoint": checkpoint})
    name_secret(hf_token_secret)
    if not checkpoint:
        raise Refused("--checkpoint is missing: what was made of the source")
    checkpoint, source = _in_order(checkpoint, source)
    with reading(checkpoint):
        if (pair := find_export(checkpoint, source)) is not None:
            return _plan_export(*pair, given)
        _refuse_options_of_exports(given)
        found = _open_checkpoint(checkpoint, source, given)
        options = _options(found, given)
        conversion = prepare(options, found.source, open_adapters(options))
    refuse(conversion.plan.problems, conversion.source)
    with reading(checkpoint):
        return _compare_metadata(found, conversion)


def _refuse_options_of_exports(given: Mapping[str, Any]) -> None:
    """Refuses the options that only an export has a use for.

    Raises:
      Refused: there are any.
    """
    if given.get("like"):
        raise Refused("--like: is for an export that has tensors from a release; neither side is one; leave it out")
    if given.get("accept"):
        raise Refused("--accept: is for an export, whose small files are compared; neither side is one; leave it out")


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint, and the release that it is compared with.

    Attributes:
      stores: its arrays, by their keys.
      weights: the keys of its weights, by MaxText's names for them.
      files: which are watched while they are read.
      is_own: whether the release is the files that a virtual checkpoint refers to.
    """

    items: Store
    stores: Mapping[str, ts.TensorStore]
    weights: Mapping[str, str]
    files: Files
    source: HfCheckpoint
    is_own: bool


def _open_checkpoint(checkpoint: str, source: str | None, given: Mapping[str, Any]) -> _Checkpoint:
    """Looks at a checkpoint, and at the release that it is compared with.

    Raises:
      Refused: it can't be compared, or doesn't say with what.
      Failed: the files that a virtual checkpoint refers to have changed.
    """
    items = find_items(checkpoint)
    if virtual := check_files(items):
        LOG.info(virtual)
    stores, files, weights = open_arrays(items), Files.of(items), weights_of(items)
    if not given.get("lora"):
        _refuse_merged(items)
    if not source and not virtual:
        source = _source_of(items)
        if is_name(source):
            raise Refused(_only_named(str(items), source, checkpoint))
        LOG.info(f"compared with {source}, which it was made of")
    made = record_of(items).get("options", {})
    opened = open_source(source, bool(made.get("allow_links")), Cut.of(made)) if source else open_own_source(items)
    return _Checkpoint(items, stores, weights, files, opened, not source)


def _refuse_merged(items: Store) -> None:
    """Refuses a checkpoint that an adapter of MaxText's was merged into, which can't be merged here again.

    Raises:
      Refused: there was one.
    """
    for adapter in record_of(items).get("adapters", ()):
        if "lora_rank" in adapter:
            raise Refused(
                f"{items}: an adapter of MaxText's, {adapter['source']}, was merged into it; weightbeam diff compares it "
                "with another checkpoint, or --lora names the adapter as PEFT has it"
            )


def _options(found: _Checkpoint, given: Mapping[str, Any]) -> Options:
    """The options of the conversion into such a checkpoint.

    Raises:
      Refused: adapters were merged into it, and nothing says where they are.
    """
    weights = {name: found.stores[key] for name, key in found.weights.items()}
    options = options_of(found.items, {**weights, **found.stores}, given, found.source.config)
    if named := [url for url, _ in options.lora if is_name(url)]:
        raise Refused(
            f"{found.items} names the adapters that were merged into it, and not where they lie: {', '.join(named)}; --lora says where"
        )
    return options


def _compare_metadata(found: _Checkpoint, conversion: Conversion) -> Subject:
    """What is to be compared, with what can be said of it by the metadata alone."""
    items, stores, record = found.items, found.stores, record_of(found.items)
    arrays = conversion.plan.arrays
    keys = {
        array.key: array.key if array.key in stores else found.weights.get(array.key, array.key) for array in arrays
    }
    names = {key: name for name, key in keys.items()}
    state = tuple(key for key in stores if key not in names and key != STEP.key and is_state(key))
    there = {names.get(key, key): store for key, store in stores.items() if key not in state}
    faults = (*compare_trees(conversion, there), *find_metadata_faults(items, stores, arrays, record))
    wrong = tuple(dict.fromkeys(faults))
    notes = () if found.is_own else _source_notes(found.source, record)
    notes += tuple((name, NO_HASH) for name in unknown_beside(items.parent, record))
    return Subject(items, conversion, wrong, keys, state=state, notes=notes, sources=(*conversion.sources, found.files))


def weights_of(items: Store) -> Mapping[str, str]:
    """The keys of a checkpoint's weights, by MaxText's names for them; empty where its tree isn't one that is known."""
    try:
        return recognize(leaves(read_tree(items))).weights
    except TreeError:
        return {}


def _is_there(checkpoint: str) -> bool:
    try:
        return find_items(checkpoint) is not None
    except (StorageError, OSError):
        return False


def _source_of(items: Store) -> str:
    """The release that a checkpoint says it was made of.

    Raises:
      Refused: it doesn't say it.
    """
    record = record_of(items)
    if isinstance(source := record.get("source"), str):
        return source
    before = record.get("resharded_from")
    known = [before.get(name) for name in ("checkpoint", "first")] if isinstance(before, dict) else []
    if places := [place for place in known if isinstance(place, str)]:
        raise Refused(
            f"{items} was made of another checkpoint, and of no release that is known; compare it with that checkpoint, "
            f"or with a release:\n  {diff_command(next(filter(_is_there, places), places[0]), str(items))}\n"
            f"  weightbeam verify SOURCE {shlex.quote(str(items))}"
        )
    raise Refused(
        f"--source is missing: {items} doesn't say what it was made of; name the release that it should be, "
        f"or compare it with any checkpoint:\n  weightbeam verify SOURCE {shlex.quote(str(items))}\n  {diff_command('OTHER', str(items))}"
    )


def _source_notes(source: HfCheckpoint, record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What is to be known of a source that isn't the one that a checkpoint says it was made of: how its `config.json`
    differs. It may be an export whose record is lost.
    """
    made_of, config = record.get("source"), record.get("config")
    if made_of in (None, source.root) or is_named(made_of, source) or not isinstance(config, Mapping):
        return ()
    release = open_store(source.root)
    why = f"isn't there, so {source.root} is taken for what the checkpoint was made of, which was {made_of}"
    notes = compare_remembered(release, config)
    return (*([] if release.exists(RECORD) else [(RECORD, why)]), *notes)


def _in_order(checkpoint: str, source: str | None) -> tuple[str, str | None]:
    """Checkpoint and source: a release that isn't an export, where the checkpoint should stand, is the source of what
    stands where it should.

    Raises:
      Refused: both are Orbax checkpoints.
    """
    with contextlib.suppress(StorageError):  # which is told where they are looked for
        if source and is_release(open_store(checkpoint)) and not is_release(open_store(source)):
            return (checkpoint, source) if read_record(checkpoint).get("command") == "export" else (source, checkpoint)
        if source and not is_release(open_store(source)) and find_items(source) and find_items(checkpoint):
            raise Refused(
                f"{source} and {checkpoint} are both Orbax checkpoints, and verify compares one with the release that it was made of; "
                f"weightbeam diff compares any two:\n  {diff_command(source, checkpoint)}"
            )
    return checkpoint, source


def find_export(checkpoint: str, source: str | None) -> tuple[str, str] | None:
    """The release and the checkpoint it was exported of, where that is what should be judged, whichever is named first;
    else None.

    A release that stands where the checkpoint should is an export. One that stands where it should is one if its record
    says that it was made of this checkpoint.

    Raises:
      Refused: a release stands alone, and doesn't say what it was made of, or was made of another one; or adapters were
        merged on the way.
      StorageError: one of them can't be looked at.
    """
    try:
        stands_first = is_release(open_store(checkpoint))
    except StorageError:  # which is told where the checkpoint is looked for
        return None
    if stands_first:
        release, made_of = checkpoint, source
        record = read_record(release)
        if not made_of and not isinstance(made_of := record.get("source"), str):
            raise Refused(f"--source is missing: {release} doesn't say which checkpoint it was exported of")
        if not source and is_name(made_of):
            raise Refused(_only_named(release, made_of, checkpoint))
        with contextlib.suppress(StorageError):  # which is told where the checkpoint is looked for
            if is_release(open_store(made_of)):
                raise Refused(
                    f"{release} and {made_of} are both releases; weightbeam diff compares them:\n  {diff_command(made_of, release)}"
                )
    elif source and (record := read_record(source)).get("command") == "export":
        release, made_of = source, checkpoint
        items, origin = find_items(checkpoint), record.get("made_from")
        plan = record_of(items).get("plan")
        if not _is_made_of(record.get("source"), items) and (
            plan is None or not isinstance(origin, dict) or origin.get("plan") != plan
        ):
            return None
    else:
        return None
    if record.get("adapters"):
        raise Refused(
            f"{release}: adapters were merged into it while it was exported; weightbeam diff compares it with another release"
        )
    return release, made_of


def _is_made_of(said: object, items: Store) -> bool:
    """Whether a record says that it was made of this checkpoint: where it lies, or by its name."""
    return said == str(items) or (is_name(said) and is_named(said, open_orbax(items, any_tree=True)))


def _only_named(what: str, source: str, given: str) -> str:
    """What a command says whose other side is published without the paths of the machine where it was made."""
    return f"{what} was made of {source}, which is a name and no place; say where it is: weightbeam verify SOURCE {shlex.quote(given)}"


def _plan_export(release: str, checkpoint: str, given: Mapping[str, Any]) -> Subject:
    """Plans the comparison of an export with its checkpoint: the conversion back of what its headers say, by the same
    table and model.
    """
    opened = open_orbax(checkpoint)
    accept = given.get("accept") or ()
    asked = options_of_export(release) | {name: value for name, value in given.items() if value is not None}
    items, keys = open_store(opened.root), dict(opened.tree.weights)
    stores = open_arrays(items)
    weights = {name: stores[key] for name, key in keys.items()}
    exported = open_source(release)
    options = options_of(items, weights, {"scan_layers": is_scanned(weights), **asked}, exported.config)
    options = dataclasses.replace(options, lora=(), adapter_only=False)
    conversion = prepare(options, exported)
    refuse(conversion.plan.problems, conversion.source)
    record, remembered = read_record(release), opened.record.get("config")
    counterparts, wrong, unjudged, parts = _find_counterparts(conversion, record.get("taken"), given.get("like"))
    faults, notes = find_release_faults(
        open_store(release),
        record,
        remembered if isinstance(remembered, Mapping) else {},
        [accept] if isinstance(accept, str) else accept,
    )
    wrong = (*compare_trees(conversion, weights), *wrong, *faults)
    sources = (*conversion.sources, opened, *parts)
    return Subject(items, conversion, wrong, keys, True, (), counterparts, unjudged, tuple(notes), opened, sources)


def _find_counterparts(
    conversion: Conversion, record: Any, like: str | None
) -> tuple[dict[str, list[Counterpart]], list[tuple[str, str]], dict[str, str], list[HfCheckpoint]]:
    """An export's tensors that no array makes, with what they should be.

    Args:
      record: what the export says of the tensors that it has from a release.
      like: that release, where it isn't where the export says.

    Returns:
      The counterparts by what they are; what is wrong with those that have none; the tensors that nothing is known of,
      each with the reason why the table leaves it out; the releases that are read.

    Raises:
      Refused: the release can't be read.
    """
    names = _names_taken(record)
    if like and not names:
        raise Refused(f"--like: {conversion.source.root} has nothing from a release; leave it out")
    found: dict[str, list[Counterpart]] = {}
    wrong: dict[str, str] = {}
    parts: list[HfCheckpoint] = []
    if names:
        parts.append(release := _open_like(conversion.source.root, record.get("from"), like))
        found[f"{release.root}, which they were taken from"], wrong = taken(conversion.source, release, names)
    left, copies = _find_left_out(conversion, names)
    if pairs := copied(conversion.encodings, copies):
        found["those that they are copies of"] = list(pairs.values())
    return found, list(wrong.items()), {name: why for name, why in left.items() if name not in pairs}, parts


def _names_taken(record: Any) -> list[str]:
    """The tensors that an export has from a release, by its own names, as its record says."""
    said = record.get("tensors") if isinstance(record, Mapping) else None
    return [name for name in said if isinstance(name, str)] if isinstance(said, list) else []


def _find_left_out(conversion: Conversion, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """An export's tensors that the table leaves out, but for those of the `names`: each with the reason; and the copies
    among them, each with the tensor that it is a copy of.
    """
    config, options = Config(conversion.source.config), conversion.options
    family = family_of(config, options.maxtext_model, options.family)
    judged = {rename(name, family.aliases) for name in names}
    left = {
        name: why
        for name, why in conversion.plan.dropped.items()
        if name not in judged and name in conversion.encodings
    }
    copies = {
        copy: original
        for copy, original in family.copies(config, Layout()).items()
        if copy in left and not isinstance(left[copy], Prediction)
    }
    return left, copies


def _open_like(export: str, said: object, like: str | None) -> HfCheckpoint:
    """The release that towers or prediction layers were taken from.

    Args:
      said: where the export says that it is.
      like: where it is, if it isn't there.

    Raises:
      Refused: it can't be read, or nothing says where it is.
    """
    if not like and is_name(said):
        raise Refused(f"{export} has tensors of {said}, which is a name and no place; --like says where it is")
    url = like or str(said)
    try:
        return open_hf(url)
    except OSError as e:
        raise Refused(
            f"{url}, which the export has towers or prediction layers from, can't be read ({reason(e)}); name it with --like"
        ) from e


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compares, reports, and says whether all of it is right."""
    if args.dry_run:
        asked = asked_of(args, VerifyOptions)
        subject = plan_verification(args.checkpoint, args.source, _given(asked), args.hf_token_secret, rest)
        conversion = subject.conversion
        nbytes = human(sum(compared_bytes(array, args.sample) for array in conversion.plan.arrays))
        print(
            f"would compare {count(len(conversion.plan.arrays), 'array')}, {nbytes}, of {subject.items} with {conversion.source.root}"
        )
        subject.found({}, args.sample).check()
        return 0
    found = verify(**keywords_of(args, verify), beam=rest)
    say(args, found)
    found.check()
    return 0


def compare_trees(conversion: Conversion, stores: Mapping[str, ts.TensorStore]) -> Iterator[tuple[str, str]]:
    """The arrays that are missing, unexpected, of another shape, or integers where there should be none: `(key, what is
    wrong)`.
    """
    wanted = {array.key: array for array in conversion.plan.arrays}
    for key, array in wanted.items():
        if key not in stores:
            if not is_spare(array):
                yield key, MISSING
        elif tuple(stores[key].shape) != array.shape:
            yield key, f"has the shape {tuple(stores[key].shape)}, expected {array.shape}"
        elif is_float(array.dtype) and not is_float(np.dtype(stores[key].dtype.numpy_dtype)):
            yield key, f"is stored as {stores[key].dtype.name}, expected {array.dtype.name}"
    for key in sorted(set(stores) - set(wanted) - {STEP.key}):
        yield key, "is in the checkpoint, but nothing of the source belongs there"


def is_spare(array: Array) -> bool:
    """Whether an array only repeats another one, for other versions of MaxText: a checkpoint needn't have it."""
    return all(part.rule.spare for part in array.parts)


def compared_bytes(array: Array, sample: float) -> int:
    """Bytes of an array that are compared, about."""
    return compared_elements(array, sample) * array.dtype.itemsize


def execute(subject: Subject, sample: float, rest: Sequence[str], report: Report | None = None) -> dict[str, Any]:
    """Runs the comparison as a pipeline; see `read_findings`.

    Raises:
      Failed: it failed on the way.
    """
    conversion, all_tasks = subject.conversion, tasks(subject.conversion)
    skipped = {key for key, _ in subject.wrong} | {
        array.key for array in conversion.plan.arrays if is_spare(array) and array.key not in subject.keys
    }
    todo = [number for number, task in enumerate(all_tasks) if conversion.plan.arrays[task.array].key not in skipped]
    counterparts = [
        one for ones in subject.counterparts.values() for number, one in enumerate(ones) if is_compared(number, sample)
    ]
    shards = subject.shards(sample)
    todo += range(len(all_tasks), len(all_tasks) + len(counterparts) + len(shards))
    nbytes = sum(compared_bytes(array, sample) for array in conversion.plan.arrays if array.key not in skipped)
    nbytes += sum(one.nbytes for one in [*counterparts, *shards])
    remember(conversion)
    staged = StagedSubject(
        conversion.stage(), conversion.hash, subject.items, sample, subject.keys, subject.exported, counterparts, shards
    )
    noise = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings"
        try:
            pipeline = make_pipeline(pipeline_options(rest))
            before, places = COMPARED.total, [*roots(conversion.places), str(subject.items)]
            with (
                watch_progress(nbytes, lambda: COMPARED.total - before, "comparing", report, places=places),
                quiet(noise),
                as_in_a_script(),
            ):
                _ = pipeline | beam.Create(todo) | CompareArrays(staged, file)
                pipeline.run().wait_until_finish()
            found = read_findings(file, len(todo))
        except Exception as e:
            check_read(subject.sources)  # which says more
            raise Failed(f"  {last_words(e)}") from e
    check_read(subject.sources)
    return found
