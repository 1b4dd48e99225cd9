"""A checkpoint against its source: both are looked at, and the conversion of the source is planned again."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts

from weightbeam.formats.orbax import STEP, find_items, leaves, open_arrays, read_tree, record_of, unknown_beside
from weightbeam.formats.orbax.source import open_orbax
from weightbeam.formats.record.naming import is_name, is_named
from weightbeam.formats.record.provenance import RECORD as CHECKPOINT_RECORD
from weightbeam.formats.release.cutting import KIND
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.formats.storage import Store, is_hub, open_store
from weightbeam.formats.storage.held import held_item
from weightbeam.formats.storage.identity import Files, check_together
from weightbeam.formats.targets import published
from weightbeam.formats.targets.published import RECORD
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.plan import Problem
from weightbeam.model_mappings.trees import TreeError, is_state, recognize
from weightbeam.pipelines.checking.of_export import COPIED, find_left_out, plan_against_checkpoint
from weightbeam.pipelines.checking.recorded import options_made_with, recorded_options
from weightbeam.pipelines.checking.sides import find_export, in_order, only_named, source_of
from weightbeam.pipelines.checking.subject import Subject, compare_trees, plan_as
from weightbeam.pipelines.checking.verification import diff_command
from weightbeam.pipelines.checking.virtual import check_files, is_virtual, open_own_source
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.sources import check_beam, open_adapters, open_release, reading
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.transforms.comparing.array_sums import known_digests
from weightbeam.transforms.comparing.counterparts import copied
from weightbeam.transforms.comparing.metadata import find_metadata_faults
from weightbeam.transforms.comparing.release_faults import compare_remembered
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.options import ConvertOptions

LOG = logging.getLogger("weightbeam")


NO_HASH = f"isn't compared: {CHECKPOINT_RECORD} has no hash of it"


def plan_verification(
    checkpoint: str, source: str | None, given: Mapping[str, Any], hf_token_secret: str | None, beam: Sequence[str]
) -> Subject:
    """Looks at both sides, and plans the conversion of the release.

    Raises:
      Refused: it can't be compared.
      Failed: the files that a virtual checkpoint refers to have changed.
    """
    check_beam(beam, "verify")
    use_secret(hf_token_secret)
    if not checkpoint:
        raise Refused("--checkpoint is missing: what was made of the source")
    checkpoint, source = in_order(checkpoint, source)
    with reading(checkpoint):
        if (pair := find_export(checkpoint, source)) is not None:
            return plan_against_checkpoint(*pair, given)
        _refuse_options_of_exports(given)
        with held_item(find_items(checkpoint)) as items:
            found = _open_checkpoint(items, checkpoint, source, given)
            options = _options(found, given)
            is_settled = any(said.get("param_scan_axis") is not None for said in (given, recorded_options(items)))
            conversion = plan_as(options, found.source, found.arrays, open_adapters(options), is_settled)
            subject = None if conversion.plan.problems else _compare_metadata(found, conversion)
    refuse(_with_whole(conversion.plan.problems, options), conversion.source)
    assert subject
    return subject


def _with_whole(problems: Sequence[Problem], options: ConvertOptions) -> Sequence[Problem]:
    """The problems, and of a cut that isn't the source's what to do: the checkpoint says it, and not the user."""
    if not any(problem.kind == KIND for problem in problems):
        return problems
    message = f"the checkpoint was made with {options.cut}: name the whole release; one that is cut already, `weightbeam diff` compares"
    return [*problems, Problem("option", "--source", message)]


def _refuse_options_of_exports(given: Mapping[str, Any]) -> None:
    """Refuses the options that only an export has a use for. Raises Refused where there are any."""
    if given.get("like"):
        raise Refused("--like: is for an export that has tensors from a release; neither side is one; leave it out")
    if given.get("accept"):
        raise Refused("--accept: is for an export, whose small files are compared; neither side is one; leave it out")


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint, and the release that it is compared with.

    Attributes:
      items: what it says of itself, held.
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

    @property
    def arrays(self) -> dict[str, ts.TensorStore]:
        """Its arrays by MaxText's names for them, and by their keys."""
        return {**{name: self.stores[key] for name, key in self.weights.items()}, **self.stores}


def _open_checkpoint(items: Store, checkpoint: str, source: str | None, given: Mapping[str, Any]) -> _Checkpoint:
    """Looks at a checkpoint, and at the release that it is compared with.

    Raises:
      Refused: it can't be compared, or doesn't say with what.
      Failed: the files that a virtual checkpoint refers to have changed.
    """
    own, said = (
        (None, check_files(items)) if source or not is_virtual(items) else open_own_source(items, given.get("family"))
    )
    if said:
        LOG.info(said)
    stores, files, weights = open_arrays(items, complete=True), Files.of(open_store(items.url)), weights_of(items)
    check_together(items, items.list(recursive=False), files.files)
    if not given.get("lora"):
        _refuse_merged(items)
    _refuse_widened(items)
    made = record_of(items).get("options", {})
    opened = own or open_release(
        source or _named_source(items, checkpoint), bool(made.get("allow_links")), Cut.of(made, given.get("family"))
    )
    return _Checkpoint(items, stores, weights, files, opened, own is not None)


def _named_source(items: Store, checkpoint: str) -> str:
    """The release that a checkpoint says it was made of. Raises Refused where it doesn't say it, or has a name for it
    alone.
    """
    source = source_of(items)
    if is_name(source):
        raise Refused(only_named(str(items), source, checkpoint))
    LOG.info(f"compared with {source}, which it was made of")
    return source


def _refuse_merged(items: Store) -> None:
    """Refuses a checkpoint that an adapter of MaxText's was merged into, which can't be merged here again. Raises
    Refused where there was one.
    """
    for adapter in record_of(items).get("adapters", ()):
        if "lora_rank" in adapter:
            raise Refused(
                f"{items}: an adapter of MaxText's, {adapter['source']}, was merged into it; weightbeam diff compares it "
                "with another checkpoint, or --lora names the adapter as PEFT has it"
            )


def _refuse_widened(items: Store) -> None:
    """Refuses a checkpoint whose values were rounded, and then resharded to a wider dtype: by the release alone they
    can't be told. Raises Refused where it is one.
    """
    record = record_of(items)
    made, before, lossy = (record.get(name) for name in ("options", "resharded_from", "lossy"))
    if not (isinstance(made, Mapping) and isinstance(before, Mapping) and isinstance(lossy, Mapping)):
        return
    saved, reasons = made.get("save_dtype"), map(str, lossy.values())
    if saved == "float32" and any("rounded" in reason and not reason.endswith(saved) for reason in reasons):
        raise Refused(
            f"{items}: was rounded, and then resharded to {saved}, which the release doesn't tell; it is compared with what it "
            f"was resharded of:\n  {diff_command(str(before.get('checkpoint')), str(items))}"
        )


def _options(found: _Checkpoint, given: Mapping[str, Any]) -> ConvertOptions:
    """The options of the conversion into such a checkpoint. Raises Refused where adapters were merged into it, and
    nothing says where they are; or they are in the release already.
    """
    options = options_made_with(found.items, found.arrays, given, found.source.config)
    merged = published.record_of(found.source.root) if options.lora and not given.get("lora") else {}
    if (
        merged.get("kind") == "merge"
        and merged.get("adapters")
        and merged.get("source") == record_of(found.items).get("source")
    ):
        raise Refused(
            f"{found.source.root}: adapters were merged into it already, and {found.items} is compared with its base and "
            f"these; both are compared by\n  {diff_command(found.source.root, str(found.items))}"
        )
    if named := [url for url, _ in options.lora if is_name(url)]:
        raise Refused(
            f"{found.items} names the adapters that were merged into it, and not where they lie: {', '.join(named)}; --lora says where"
        )
    return options


def _compare_metadata(found: _Checkpoint, conversion: Conversion) -> Subject:
    """What is to be compared, with what can be said of it by the metadata alone."""
    items, stores, record = found.items, found.stores, record_of(found.items)
    arrays = conversion.plan.arrays
    places = {array.key: array.key if array.key in stores else found.weights.get(array.key, "") for array in arrays}
    keys = {array: key for array, key in places.items() if key in stores}
    names = {key: name for name, key in keys.items()}
    state = tuple(key for key in stores if key not in names and key != STEP.key and is_state(key))
    there = {names.get(key, key): store for key, store in stores.items() if key not in state}
    faults = (*compare_trees(conversion, there), *find_metadata_faults(items, stores, arrays, record))
    wrong = tuple(dict.fromkeys(faults))
    copies = {} if conversion.adapters else find_left_out(conversion)[1]  # an adapter changes what they are of
    notes = () if found.is_own else tuple(_source_notes(found.source, record))
    notes += tuple((name, NO_HASH) for name in unknown_beside(items.parent, record))
    return Subject(
        open_store(items.url),
        conversion,
        wrong,
        keys,
        state=state,
        counterparts={COPIED: list(copied(conversion.encodings, copies).values())} if copies else {},
        notes=notes,
        digested=open_orbax(items, any_tree=True) if known_digests(record) else None,
        sources=(*conversion.sources, found.files),
    )


def weights_of(items: Store) -> Mapping[str, str]:
    """The keys of a checkpoint's weights, by MaxText's names for them; empty where its tree isn't one that is known."""
    try:
        return recognize(leaves(read_tree(items))).weights
    except TreeError:
        return {}


def _source_notes(source: HfCheckpoint, record: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """What is to be known of a source that was edited since, or isn't the one that a checkpoint says it was made of: how its
    `config.json` differs. It may be an export whose record is lost.
    """
    made_of, config, release = record.get("source"), record.get("config"), open_store(source.root)
    if made_of == source.root or is_named(made_of, source):
        if source.cut or is_hub(source.root) or not isinstance(config, Mapping):
            return ()
        return compare_remembered(release, config)
    if is_recorded := release.exists(RECORD):
        _check_record(release)
    if made_of is None or not isinstance(config, Mapping):
        return ()
    why = f"isn't there, which an export would have, so {source.root} is taken for what the checkpoint was made of, which was {made_of}"
    return [*([] if is_recorded else [(RECORD, why)]), *compare_remembered(release, config)]


def _check_record(release: Store) -> None:
    """Makes sure that the record of a release is whole: one that is damaged may be that of an export, of which more is
    judged than its tensors. Raises Refused where it isn't.
    """
    record = published.record_of(release)
    if published.plan_hash_of(release) is None or not (record.get("command") == "export" or "kind" in record):
        raise Refused(
            f"{release.path(RECORD)}: is no record of Weightbeam's, or is damaged; without it nobody knows what "
            f"{release} was made of, and what its small files were. If it is an export, export it again"
        )
