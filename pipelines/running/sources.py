"""From what a command names to what it reads: releases, adapters, the plan of a conversion; or to a refusal that lists
everything at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightbeam.formats.adapters import Adapter, open_adapter
from weightbeam.formats.release.cutting import cut_release
from weightbeam.formats.safetensors import HfCheckpoint, open_hf
from weightbeam.formats.storage import ChangedError, StorageError, reason
from weightbeam.formats.storage.identity import Files, Watched
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.families import identity
from weightbeam.pipelines.running.problems import LINE
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.running.without_beam import says_threads
from weightbeam.pipelines.terminal.errors import Failed, Refusals, Refused, refusing, try_each
from weightbeam.transforms.cutting.mesh import MeshError
from weightbeam.transforms.planning.conversion import Conversion, meshes_of
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions, ExportOptions, MergeOptions

READ = {  # what a command reads, where it isn't just any release
    "convert": "the folder with config.json and the safetensors files",
    "export": "the Orbax checkpoint",
    "materialize": "the virtual checkpoint",
    "quantize": "a release, or an Orbax checkpoint",
    "reshard": "the Orbax checkpoint",
}


def plan_source(source: str, options: ConvertOptions, hf_token_secret: str | None, slots: int | None) -> Conversion:
    """Plans a conversion, its units cut for `slots` of them at a time if that is known; problems stay in the plan.

    Raises:
      Refused: there is nothing to plan: no source, no such mesh.
    """
    check_named("convert", source=source)
    if options.family == identity.FAMILY.name and options.maxtext_model:
        raise Refused(
            f"--maxtext_model={options.maxtext_model}: --family=identity keeps the release's own names, which no MaxText model has; "
            "leave one of them out"
        )
    use_secret(hf_token_secret)
    checkpoint, adapters, _ = try_each(
        lambda: open_release(source, options.allow_links, options.cut),
        lambda: open_adapters(options),
        lambda: _check_meshes(options),
    )
    return plan_with(options, checkpoint, slots, adapters)


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


def open_release(source: str, allow_links: bool = False, cut: Cut | None = None) -> HfCheckpoint:
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


def check_places(beam: Sequence[str], command: str, **places: str) -> None:
    """Raises `Refused` where one of Beam's options can't be, or a place isn't named that a command needs."""
    check_beam(beam, command, places)
    check_named(command, **places)


def check_named(command: str, **places: str) -> None:
    """Raises `Refused` where a place isn't named that a command needs."""
    result = "checkpoint" if command in ("convert", "materialize", "reshard") else "release"
    output, read = f"the folder that the {result} should lie in", READ.get(command, "the release")
    told = {name: output if name == "output" else read for name, place in places.items() if not place}
    if told:
        raise Refused(*(f"--{name} is missing: {what}" for name, what in told.items()))


def check_beam(beam: Sequence[str], command: str = "", places: Mapping[str, str | None] | None = None) -> None:
    """Checks Beam's options, if there are any, as `check_options` does: that imports Beam, unless they say only how many
    threads there are.
    """
    if not says_threads(beam):
        from weightbeam.pipelines.running.beam_options import check_options

        check_options(beam, command, places)
