"""A cut as a source: a view over an opened release that has fewer layers, experts and rows of the vocabulary.

    raw tensors ── kept, renumbered, whole rows of them ──▸ the release as everything else opens it
    config.json ── edited alike ──▸

What is kept stays where it lies: a tensor of the view is a stored one under another name, or a range of its rows, codes
and scales alike. So whatever reads a release reads a cut, and nothing else of the files is touched. Which tensors belong
to which layer, and whose rows are experts or tokens, tells the family's table (`model_mappings/anatomy.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from weightbeam.formats.encodings import Encoding
from weightbeam.formats.encodings.packed import PackedRows
from weightbeam.formats.release.cut_patterns import against_patterns
from weightbeam.formats.release.source import ReleaseTensors, open_source
from weightbeam.formats.safetensors import QUANT_CONFIGS, HfCheckpoint, Tensor, view
from weightbeam.model_mappings import cut_config
from weightbeam.model_mappings.anatomy import (
    EXPERT,
    LAYER,
    VOCAB,
    Anatomy,
    Blocks,
    Shapes,
    blocks_of,
    by_names,
    by_table,
    layer_count,
)
from weightbeam.model_mappings.boxes import Box, Range, whole
from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.cut import Cut, numbers, spans
from weightbeam.model_mappings.cut_config import Renumbered
from weightbeam.model_mappings.family import Family, rename
from weightbeam.model_mappings.plan import Problem
from weightbeam.model_mappings.registry import UnknownFamilyError, family_by_config, load_family

KIND = "cut"  # of its problems
NORM = re.compile(r"([^\d]*\.)(\d+)(\.(?:.*\.)?(?:\w*norm\w*|(?:\w*_)?ln(?:_\w*)?)\.weight)")
BIAS = re.compile(r"([^\d]*\.)(\d+)(\.\w[\w.]*bias)")
LAYERS, EXPERTS, ROWS = "--layers", "--experts", "--vocab_rows"
OPTIONS = {EXPERT: EXPERTS, VOCAB: ROWS, LAYER: LAYERS}  # that cut an axis
NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")  # a number in a tensor's name, of a layer or an expert


class CutError(ValueError):
    """A release can't be cut so.

    Attributes:
      problems: all that stands against it.
    """

    def __init__(self, *problems: tuple[str, str]):
        super().__init__("; ".join(f"{option} {message}" for option, message in problems))
        self.problems = [Problem(KIND, option, message) for option, message in problems]


def cut_release(checkpoint: HfCheckpoint, cut: Cut) -> HfCheckpoint:
    """The release with nothing in it but what a cut keeps. What stands against the cut is among its problems, and then
    it is whole.
    """
    if not cut or not checkpoint.config:  # that it is missing is a problem already
        return checkpoint
    try:
        return _Cutting(checkpoint, cut).made()
    except CutError as e:
        return dataclasses.replace(checkpoint, problems=(*checkpoint.problems, *e.problems))


class _Cutting:
    """A cut at work.

    Raises:
      CutError: it names what isn't there.
    """

    def __init__(self, checkpoint: HfCheckpoint, cut: Cut):
        self.checkpoint, self.cut = checkpoint, cut
        self.config = Config(checkpoint.config)
        self.source = open_source(checkpoint)
        self.count, self.anatomy = self._find_layers()
        self.layer_of = {name: self.anatomy.layer_of(name) for name in checkpoint.tensors}
        self._check_spelling()
        self.kept = self._number()

    def made(self) -> HfCheckpoint:
        """The view.

        Raises:
          CutError: what is left isn't a model, or can't be told apart in the files.
        """
        windows = self._windows()
        tensors = {
            name: dataclasses.replace(windows.get(name, tensor), name=new)
            for name, tensor in self.checkpoint.tensors.items()
            if (new := self._new_name(name)) is not None
        }
        edits = cut_config.edit(self.config, self.kept, [name for name in QUANT_CONFIGS if name in self.config])
        against = against_patterns(self.checkpoint.tensors, self._new_name, edits.renamed, self._option)
        if problems := [*edits.problems, *against]:
            raise CutError(*dict.fromkeys(problems))
        config = cut_config.applied(self.config, edits.made)
        made = view(
            self.checkpoint, tensors, config=config, edits=edits.made, cut=str(self.cut), notes=tuple(edits.notes)
        )
        if problems := [*self._compare_blocks(made), *self._check_ends(), *self._check_weights(made)]:
            raise CutError(*problems)
        return made

    def _check_spelling(self) -> None:
        """Numbers are written anew: a layer 00, or one in other digits, would become layer 0, beside it or in its
        place. Raises CutError where a tensor of a layer is spelled so.
        """
        for name, layer in self.layer_of.items():
            if layer is not None and (odd := [found for found in NUMBER.findall(name) if found != str(int(found))]):
                raise CutError(
                    (self._option, f"{name} is no tensor's name that can be numbered anew: {odd[0]} is {int(odd[0])}")
                )

    def _find_layers(self) -> tuple[int, Anatomy]:
        """How many layers the model has, and where everything is. Raises CutError where that can't be told."""
        try:
            count, found = layer_count(self.config), None
            with contextlib.suppress(UnknownFamilyError):
                family = load_family(self.cut.family) if self.cut.family else family_by_config(self.config)
                found = by_table(family, self.config, _shapes(self.source, family.aliases))
            return count, found or by_names(self.checkpoint.tensors, count)
        except ConfigError as e:
            raise CutError((self._option, str(e))) from e

    @property
    def _option(self) -> str:
        """The option that a problem of all of them is told of."""
        return LAYERS if self.cut.layers else EXPERTS if self.cut.experts else ROWS

    def _number(self) -> Renumbered:
        """What is kept, by its numbers. Raises CutError where what was named isn't there, or not so; all of it."""
        problems: list[tuple[str, str]] = []
        count = self.count
        there = sorted({layer for layer in self.layer_of.values() if layer is not None} | {*range(count)})
        layers = there
        if self.cut.layers:
            layers = numbers(self.cut.layers, there[-1] + 1)
            problems += [(LAYERS, why) for why in _against_layers(self.cut.layers, layers, there, count)]
        experts, rows = None, None
        if self.cut.experts:
            why = [*self._against_experts(self.cut.experts, layers)]
            problems += [(EXPERTS, each) for each in why]
            experts = None if why else range(*spans(self.cut.experts)[0])
        if self.cut.vocab_rows:
            problems += [(ROWS, why) for why in self._against_rows(self.cut.vocab_rows)]
            rows = self.cut.vocab_rows
        if problems:
            raise CutError(*problems)
        new = {layer: number for number, layer in enumerate(layers)}
        stems = frozenset(
            name[: found.start(1)]
            for name, layer in self.layer_of.items()
            if layer is not None and (found := NUMBER.search(name))
        )
        return Renumbered(count, new, len(there) > count, experts, rows, stems, self.anatomy.aliases)

    def _sizes(self, word: str) -> dict[str, int]:
        """How many experts, tokens or layers each tensor holds that has several side by side."""
        return {
            name: encoding.shape[found.number] // found.size
            for name, encoding in self.source.encodings.items()
            if (found := self.anatomy.axis_of(word, name)) is not None
        }

    def _against_experts(self, asked: str, layers: Collection[int]) -> Iterator[str]:
        alone = (expert for name in self.checkpoint.tensors if (expert := self.anatomy.expert_of(name)) is not None)
        there = max(max(alone, default=-1) + 1, *self._sizes(EXPERT).values(), 0)
        if not self.checkpoint.tensors:  # `config.json` is all that is known
            there = cut_config.expert_count(self.config)
        if self.anatomy.family is None:
            yield f"{asked}: there is no table for this model that says which tensors hold experts; --family names one"
        elif not there:
            yield f"{asked}: the model has no experts"
        elif len(spans(asked)) > 1:
            yield f"{asked}: experts that are kept lie side by side, such as 0:8"
        elif spans(asked)[0][1] > there:
            yield f"{asked}: each layer has experts 0 to {there - 1}"
        else:
            start, stop = spans(asked)[0]
            yield from (f"{asked}: {why}" for why in cut_config.check_experts(self.config, stop - start))
            kept = {None, *layers}
            names = (name for name in self.source.encodings if self.anatomy.layer_of(name) in kept)
            for name, why in itertools.islice(self.anatomy.why_not(EXPERT, names), 1):
                yield f"{asked}: {name} {why}"

    def _against_rows(self, asked: int) -> Iterator[str]:
        sizes = self._sizes(VOCAB)
        if not sizes:
            yield f"{asked}: there is no table for this model that says which tensors hold the vocabulary; --family names one"
        elif asked > min(sizes.values()):
            name, rows = min(sizes.items(), key=lambda each: each[1])
            yield f"{asked}: {name} has {rows} rows"
        for name, why in itertools.islice(self.anatomy.why_not(VOCAB, self.source.encodings), 1):
            yield f"{asked}: {name} {why}"

    def _new_name(self, name: str) -> str | None:
        """A stored tensor's name in the cut; None where it isn't kept. Raises CutError where its number stands where
        nobody looks for it.
        """
        experts = self.kept.experts
        layer, expert = self.layer_of[name], self.anatomy.expert_of(name) if experts else None
        if (layer is not None and layer not in self.kept.layers) or (
            expert is not None and expert not in (experts or ())
        ):
            return None
        new_numbers = (
            None if layer is None else self.kept.layers[layer],
            None if expert is None or experts is None else experts.index(expert),
        )
        new = name
        for found, number in reversed([*zip(NUMBER.finditer(name), new_numbers, strict=False)]):
            if number is not None:
                new = f"{new[: found.start(1)]}{number}{new[found.end(1) :]}"
        if (self.anatomy.layer_of(new), self.anatomy.expert_of(new) if experts else None) != new_numbers:
            raise CutError((LAYERS, f"{name}: the first numbers in its name aren't those of its layer and its expert"))
        return new

    def _windows(self) -> dict[str, Tensor]:
        """The stored tensors of which a part is kept, by their names. Raises CutError where that part doesn't lie side
        by side.
        """
        experts, rows, layers = self.kept.experts, self.kept.vocab_rows, self.kept.kept
        wanted: dict[str, Range] = {}
        if experts is not None:
            wanted[EXPERT] = experts.start, experts.stop
        if rows is not None:
            wanted[VOCAB] = 0, rows
        if self.kept.cuts_layers:
            wanted[LAYER] = layers[0], layers[-1] + 1
        found: dict[str, Tensor] = {}
        for name, encoding in self.source.encodings.items() if wanted else ():
            axes = {word: axis for word in wanted if (axis := self.anatomy.axis_of(word, name))}
            if LAYER in axes:
                self._check_side_by_side(name, encoding)
            if axes:
                box = list(whole(encoding.shape))
                for word, axis in axes.items():
                    box[axis.number] = wanted[word][0] * axis.size, wanted[word][1] * axis.size
                found |= _part_of(name, encoding, tuple(box), self.checkpoint.tensors, OPTIONS[next(iter(axes))])
        return found

    def _check_side_by_side(self, name: str, encoding: Encoding) -> None:
        """Raises `CutError` where the layers that are kept aren't one range of a weight that holds something of each."""
        layers = self.kept.kept
        if layers[-1] + 1 - layers[0] > len(layers):
            raise CutError(
                (LAYERS, f"{self.cut.layers}: {name} has something of each layer; keep layers that follow each other")
            )
        if encoding.label:  # in blocks, which may hold parts of two layers
            raise CutError(
                (
                    LAYERS,
                    f"{name} has something of each layer, and is quantised ({encoding.label}); dequantise it first",
                )
            )

    def _compare_blocks(self, made: HfCheckpoint) -> Iterator[tuple[str, str]]:
        """The layers that MaxText would take for others: blocks that are cut in half."""
        family = self.anatomy.family
        if family is None or not self.cut.layers or (found := self._blocks(family)) is None:
            return
        scan, blocks = found
        after = {rename(name, family.aliases): tensor.shape for name, tensor in made.tensors.items()}
        whole_blocks = (
            f"{self.cut.layers}: MaxText stacks the layers of this model in blocks of {blocks.length}; keep whole ones, or "
            "for other programs than MaxText name --family identity"
        )
        try:
            new = blocks_of(family, Config(made.config), after, scan).places
        except ConfigError as e:
            yield LAYERS, whole_blocks if blocks.length > 1 else f"{self.cut.layers}: {e}"
            return
        for layer, number in self.kept.layers.items():
            if layer in blocks.places and blocks.places[layer] != new.get(number):
                renumbered = f" as layer {number}" if number != layer else ""
                yield LAYERS, f"{whole_blocks}: layer {layer} would change its place{renumbered}"
                return

    def _check_ends(self) -> Iterator[tuple[str, str]]:
        """Of a model without a table: a first layer that has a norm which no other has (RWKV), or lacks one that all others
        have (ModernBERT's decoder), and a last one that alone has a norm or a bias (GPT-NeoX-Japanese). transformers makes
        the layer that is the first, or the last, so.
        """
        if self.anatomy.family is not None:
            return
        holders = defaultdict[str, set[int]](set)
        for name, layer in self.layer_of.items():
            if layer is not None and layer < self.count and (module := NORM.fullmatch(name) or BIAS.fullmatch(name)):
                holders[f"{module[1]}*{module[3]}"].add(layer)
        last, others = self.count - 1, {*range(1, self.count)}
        for name, layers in holders.items():
            for end, place, at, alone in (
                (0, "first", 0, layers == {0} or (layers == others and not name.endswith("bias"))),
                (last, "last", -1, layers == {last}),
            ):
                if alone and self.kept.kept[at] != end and not cut_config.tells_apart(end, self.config, self.count):
                    has = "alone has" if layers == {end} else "has no"
                    yield (
                        LAYERS,
                        f"{self.cut.layers}: layer {end} {has} {name}, and the {place} layer that is kept would be made so; keep it",
                    )

    def _blocks(self, family: Family) -> tuple[bool, Blocks] | None:
        """Whether MaxText scans the whole model, and its blocks; None where it has no such model."""
        shapes = _shapes(self.source, family.aliases)
        for scan in (True, False):
            with contextlib.suppress(ConfigError):
                return scan, blocks_of(family, self.config, shapes, scan)
        return None

    def _check_weights(self, made: HfCheckpoint) -> Iterator[tuple[str, str]]:
        """Weights whose codes and scales don't fit together any more."""
        if not self.source.problems:
            yield from (
                (self._option, f"{problem.subject}: {problem.message}") for problem in open_source(made).problems
            )


def _against_layers(asked: str, layers: list[int], there: list[int], count: int) -> Iterator[str]:
    """What is wrong with the layers that were asked for, of those that are there."""
    behind = [layer for layer in there if layer >= count]
    has = f"the model has layers 0 to {count - 1}" + (
        f", and for multi-token prediction {', '.join(map(str, behind))}" if behind else ""
    )
    if any(stop > there[-1] + 1 for _, stop in spans(asked)) or not {*layers} <= {*there}:
        yield f"{asked}: {has}"
    elif not any(layer < count for layer in layers):
        yield f"{asked}: names no layer of the model itself; {has}"
    if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
        yield f"{asked}: {', '.join(map(str, twice[:5]))} {'is' if len(twice) == 1 else 'are'} named twice"
    elif layers != sorted(layers):
        yield f"{asked}: layers stay in their order; name them from the first to the last"


def _shapes(source: ReleaseTensors, aliases: Mapping[str, str]) -> Shapes:
    """The shapes of a release's values, by the names of the table."""
    return {rename(name, aliases): encoding.shape for name, encoding in source.encodings.items()}


def _part_of(name: str, encoding: Encoding, box: Box, tensors: Mapping[str, Tensor], option: str) -> dict[str, Tensor]:
    """The stored tensors that hold a box of a weight, codes and scales alike, by their names. Raises CutError where
    what is stored can't be cut there.
    """
    if isinstance(encoding, PackedRows) and encoding.shape_tensor and box != whole(encoding.shape):
        says = (
            f"{encoding.shape_tensor.name} says the shape of the whole weight ({encoding.label}); dequantise it first"
        )
        raise CutError((option, f"{name}: {says}"))
    found: dict[str, Tensor] = {}
    for read in encoding.reads(box):
        seen, stored = read.tensor, tensors[read.tensor.name]  # which a format may see in another shape
        if read.box == whole(seen.shape):
            continue
        rows = (read.box[0], *whole(seen.shape)[1:])
        if stored.name in found or (
            stored.shape != seen.shape and (read.box, stored.shape[:1]) != (rows, seen.shape[:1])
        ):
            raise CutError(
                (option, f"{name}: what is kept of it isn't kept in rows of {stored.name}, as {encoding.label} has it")
            )
        found[stored.name] = stored.window(
            read.box if stored.shape == seen.shape else (read.box[0], *whole(stored.shape)[1:])
        )
    return found
