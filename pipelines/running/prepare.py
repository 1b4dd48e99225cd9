"""From options to a planned conversion, or to a refusal that lists everything at once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorstore as ts

from weightbeam.formats.adapters import Adapter, open_adapter
from weightbeam.formats.orbax import item_metadata
from weightbeam.formats.record.provenance import LONG
from weightbeam.formats.release.cutting import cut_release
from weightbeam.formats.safetensors import HfCheckpoint, open_hf
from weightbeam.formats.storage import ChangedError, StorageError, Store, open_store, reason
from weightbeam.formats.storage.identity import Files, Watched
from weightbeam.formats.storage.strict_json import check_texts, read_json
from weightbeam.formats.targets.published import RECORD
from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.doors import distrusted
from weightbeam.model_mappings.families import identity
from weightbeam.model_mappings.plan import Problem
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.scales import CODES
from weightbeam.model_mappings.trees import has_scales, is_scanned
from weightbeam.model_mappings.versions import DEFAULT
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.running.without_beam import says_threads
from weightbeam.pipelines.terminal.errors import Failed, Refusals, Refused, refusing, try_each
from weightbeam.pipelines.terminal.report import collapse
from weightbeam.pipelines.terminal.tables import count
from weightbeam.transforms.cutting.mesh import MeshError
from weightbeam.transforms.planning.conversion import Conversion, meshes_of
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.layouts import EMBEDDING, UNKNOWN_FAMILY, parts_of, version_of
from weightbeam.transforms.planning.options import ConvertOptions, ExportOptions, MergeOptions

LOG = logging.getLogger("weightbeam")
SHOWN = 20  # problems of one kind; the rest is counted
NO_SOURCE = "--source is missing: the folder with config.json and the safetensors files"
NO_OUTPUT = "--output is missing: the folder that the checkpoint should lie in"
LINE = 5000  # characters of a problem: names and values in it are the files', however long
KINDS, NAME = 200, 300  # of tensors that an inventory lists, and characters of their names


def plan_source(
    source: str, options: ConvertOptions, hf_token_secret: str | None = None, slots: int | None = None
) -> Conversion:
    """Plans a conversion, its units cut for `slots` of them at a time if that is known; problems stay in the plan.

    Raises:
      Refused: there is nothing to plan: no source, no such mesh.
    """
    if not source:
        raise Refused(NO_SOURCE)
    if options.family == identity.FAMILY.name and options.maxtext_model:
        raise Refused(
            f"--maxtext_model={options.maxtext_model}: --family=identity keeps the release's own names, which no MaxText model has; "
            "leave one of them out"
        )
    use_secret(hf_token_secret)
    checkpoint, adapters, _ = try_each(
        lambda: open_source(source, options.allow_links, options.cut),
        lambda: open_adapters(options),
        lambda: _check_meshes(options),
    )
    return plan_with(options, checkpoint, slots, adapters)


def check_read(sources: Iterable[Watched | Files]) -> None:
    """Makes sure, once all is read, that it is what was opened.

    Raises:
      Failed: it isn't.
    """
    try:
        for source in sources:
            source.check()
    except ChangedError as e:
        raise Failed(f"  {e.what}; compare it again") from e
    except OSError as e:
        raise Failed(f"  {e}") from e


def plan_with(
    options: ConvertOptions,
    checkpoint: HfCheckpoint,
    slots: int | None = None,
    adapters: Sequence[Adapter] | None = None,
) -> Conversion:
    """Plans a conversion of an opened source, with adapters that are opened here where they aren't yet.

    Raises:
      Refused: a mesh, or an adapter, can't be read.
    """
    _check_meshes(options)
    return plan_conversion(options, checkpoint, open_adapters(options) if adapters is None else adapters, slots)


def _check_meshes(options: ConvertOptions) -> None:
    with refusing(MeshError):
        meshes_of(options)


def open_adapters(options: ConvertOptions | MergeOptions | ExportOptions) -> list[Adapter]:
    """The adapters that `--lora` names.

    Raises:
      Refused: there is no such folder, or it can't be looked at; or what is taken of the release is numbered otherwise.
    """
    if options.lora and not isinstance(options, ExportOptions) and options.cut.renumbers:
        raise Refused(
            f"--lora beside {options.cut}: an adapter has the numbers of the whole release, and what is taken of it is numbered "
            "anew; merge it first (weightbeam merge), and take these of what is made. Adapters of a cut are merged into the cut"
        )
    adapters, refusals = [], Refusals()
    for url, weight in options.lora:
        with refusals.kept():
            try:
                adapters.append(open_adapter(url, weight))
            except StorageError as e:
                raise Refused(f"--lora={e}") from e
            except OSError as e:
                raise Refused(f"--lora={url}: {reason(e)}") from e
    refusals.check()
    return adapters


@contextlib.contextmanager
def reading(checkpoint: str) -> Iterator[None]:
    """Context manager: metadata of a checkpoint are read, which anyone may have written or damaged.

    Raises:
      Refused: they can't be read; whatever a reader stumbles over.
    """
    try:
        yield
    except BrokenPipeError:  # who reads what is said of them has seen enough
        raise
    except (StorageError, MeshError) as e:
        raise Refused(str(e)) from e
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        what = (str(e) if isinstance(e, OSError | ValueError) and str(e) else f"{type(e).__name__}: {e}").partition(
            " [tensorstore_spec="
        )[0]
        raise Refused(
            f"{checkpoint}: can't be read, its metadata are damaged or of a kind that isn't known: {what[:LINE]}"
        ) from e


def open_source(source: str, allow_links: bool = False, cut: Cut | None = None) -> HfCheckpoint:
    """The weights that `--source` names, or what is taken of them.

    Raises:
      Refused: there are none, or they can't be looked at.
    """
    try:
        return cut_release(open_hf(source, allow_links), cut or Cut())
    except StorageError as e:
        raise Refused(str(e)) from e
    except OSError as e:  # of a folder that can't be looked at
        raise Refused(f"--source={source}: {reason(e)}") from e


def read_record(release: str | Store) -> Mapping[str, Any]:
    """What `weightbeam.json` in a release says; nothing where there is none."""
    try:
        found = read_json(open_store(release), RECORD)
        check_texts({name: said for name, said in found.items() if name not in LONG} if isinstance(found, dict) else {})
    except (OSError, ValueError):
        return {}
    return distrusted(found) if isinstance(found, dict) else {}


def options_of_export(release: str | Store) -> dict[str, Any]:
    """The model, and the other options of a conversion back, with which a release was exported; empty where it wasn't."""
    record = read_record(release)
    made = record.get("options")
    if record.get("command") != "export" or not isinstance(made, dict):
        return {}
    said = {"maxtext_model": record.get("model"), **{name: made.get(name) for name in ("param_scan_axis", "family")}}
    said = {name: value for name, value in said.items() if value is not None}
    for name, value in said.items():
        if type(value) is not (int if name == "param_scan_axis" else str):
            raise Refused(f"{release}/{RECORD}: says {value!r} for --{name}, which can't be meant")
    return said | ({"multimodal": False} if made.get("multimodal") is False else {})  # the language model alone


def said_of(items: Store) -> dict[str, Any]:
    """The options that a checkpoint says it was made with; empty where it doesn't."""
    about = item_metadata(items).get("weightbeam")
    return dict(about["options"]) if isinstance(about, dict) and isinstance(about.get("options"), dict) else {}


def options_of(
    items: Store, stores: Mapping[str, ts.TensorStore], given: Mapping[str, Any], config: Mapping[str, Any]
) -> ConvertOptions:
    """The options that the checkpoint was made with: as given (where not None), else as it says, else as its arrays
    show; `config` is its release's.
    """
    custom, said = item_metadata(items), said_of(items)
    if has_scales(stores):
        said["save_dtype"] = CODES
    if "scan_layers" in custom:
        said["scan_layers"] = custom["scan_layers"]
    said.setdefault("scan_layers", is_scanned(stores))
    if "vocab_size" not in said and (embedding := stores.get(EMBEDDING)):
        said["vocab_size"] = embedding.shape[0]
    said = parts_of(stores) | said
    left_out = {"mesh", "sharding_rules", "unit_bytes", "compression", "use_ocdbt", "use_zarr3", "step", "virtual"}
    known = {field.name for field in dataclasses.fields(ConvertOptions)} - left_out
    said |= {key: value for key, value in given.items() if value is not None}
    options = ConvertOptions(**{key: value for key, value in said.items() if key in known})
    return options if "maxtext" in said else dataclasses.replace(options, maxtext=_version(options, stores, config))


def _version(options: ConvertOptions, keys: Collection[str], config: Mapping[str, Any]) -> str:
    """The version of MaxText whose arrays these are."""
    layout = Layout(scan=options.scan_layers, mtp=options.mtp, multimodal=options.multimodal)
    try:
        family = family_of(Config(config), options.maxtext_model, options.family)
        return version_of(family, Config(config), layout, keys)
    except (ConfigError, UnknownFamilyError):
        return DEFAULT  # the plan will say what is wrong


def check_beam(beam: Sequence[str], command: str = "", places: Mapping[str, str | None] | None = None) -> None:
    """Checks Beam's options, if there are any, as `check_options` does: that imports Beam, unless they say only how many
    threads there are.
    """
    if not says_threads(beam):
        from weightbeam.pipelines.running.beam_options import check_options

        check_options(beam, command, places)


def refuse(problems: Sequence[Problem], source: object = None, of: str = "") -> None:
    """Refuses what has problems; does nothing where there are none.

    Args:
      problems: all of them.
      source: what is read; of a release whose family nobody knows a person is told where to look.
      of: whose problems they are, where several things may have some.

    Raises:
      Refused: with all of them.
    """
    if not problems:
        return
    message = (f"{of}: " if of else "") + f"{count(len(problems), 'problem')}:\n{describe(problems)}"
    unknown = next((problem for problem in problems if problem.kind == UNKNOWN_FAMILY), None)
    if unknown and isinstance(source, HfCheckpoint) and not unknown.message.startswith("--"):
        LOG.debug(f"What {source.root} holds:\n{inventory(source)}\n")
        what, _, listed = unknown.message.partition("\n")  # the families, which fill a screen
        again = f"{printable(what.removesuffix(' Supported:'), NAME)} " if listed else ""
        message += f"\n{again}weightbeam inspect {shlex.quote(source.root)} lists what it holds."
    raise Refused(message, problems)


def inventory(checkpoint: HfCheckpoint) -> str:
    """The tensors of a checkpoint, numbers in their names collapsed."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for name, tensor in checkpoint.tensors.items():
        groups[pattern(name)][f"{tensor.dtype.name} {list(tensor.shape)}"] += 1
    lines = [
        f"  {sum(kinds.values()):>6} × {printable(name, NAME)}  {', '.join(sorted(kinds)[:3])}{' …' if len(kinds) > 3 else ''}"
        for name, kinds in itertools.islice(groups.items(), KINDS)
    ]
    if len(groups) > KINDS:
        lines.append(f"  … and {len(groups) - KINDS:,} more kinds of names")
    return "\n".join(lines) or "  no tensors"


def describe(problems: Iterable[Problem]) -> str:
    """All problems, by kind; those that differ only in numbers once, and many of one kind are counted."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        kinds[problem.kind].append(printable(str(problem), LINE, lines=problem.kind == UNKNOWN_FAMILY))
    lines = []
    for kind, texts in kinds.items():
        different = collapse(texts)
        lines += [f"  {text}" for text in different[:SHOWN]]
        if len(different) > SHOWN:
            lines.append(f"  {kind}: … and {len(different) - SHOWN} more; weightbeam plan --json lists all")
    return "\n".join(lines)
