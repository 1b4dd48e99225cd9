"""Adapters over the weights of a checkpoint: the same tensors, some of them with a LoRA in them, or a refusal.

Every tensor of an adapter is used; what stands against it is a problem, all at once.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightbeam.formats.adapters.adapter import AdaptedModule, Adapter
from weightbeam.formats.adapters.config import CONFIG
from weightbeam.formats.adapters.delta import Delta
from weightbeam.formats.adapters.merged import MergedWeight, OwnBase, Replaced, Shifted
from weightbeam.formats.adapters.modules import IN_OUT, MARKED, PARAMETERS, ModuleFiles, WeightPart
from weightbeam.formats.adapters.patterns import PatternError
from weightbeam.formats.adapters.ties import Ties
from weightbeam.formats.encodings import Encoding
from weightbeam.formats.record.naming import name_of
from weightbeam.formats.safetensors import BoxRead, Tensor, read_boxes
from weightbeam.model_mappings.boxes import Box, meet
from weightbeam.model_mappings.plan import Problem, is_float

LAYOUT_CHANGED = (0, 19)  # of PEFT: what it calls the inputs of fused experts (huggingface/peft#3165)
FLOAT32_MAX = 3.4e38
COMPARED_BYTES = 16 << 20  # of two tensors at a time


@dataclasses.dataclass(frozen=True)
class Merging:
    """What adapters make of a checkpoint's tensors.

    Attributes:
      encodings: every tensor, merged where an adapter reaches it.
      problems: what stands against it.
      uses: for each adapter what each of its tensors is used for.
      touched: for each tensor that is changed the adapter's that changes it, for messages.
      copies: those of them that are changed because the embedding is, to which they are tied.
    """

    encodings: Mapping[str, Encoding]
    problems: tuple[Problem, ...]
    uses: tuple[Mapping[str, str], ...]
    touched: Mapping[str, str]
    copies: frozenset[str] = frozenset()

    def in_vain(self, dropped: Mapping[str, str]) -> list[Problem]:
        """The changed ones of the tensors that are left out, with the reason why: an adapter that changes them would be
        used in part. What is left out as a copy isn't lost.
        """
        message = "is changed by an adapter ({}), but left out: {}"
        return [
            Problem("adapter", name, message.format(tensor, dropped[name]))
            for name, tensor in self.touched.items()
            if name in dropped and name not in self.copies
        ]


@dataclasses.dataclass
class Change:
    """What is done to one tensor: deltas, DoRA's magnitudes, what is added to a bias, whole tensors in its place, and
    copies that take its place before the deltas are added.
    """

    deltas: list[Delta] = dataclasses.field(default_factory=list)
    magnitudes: list[Tensor] = dataclasses.field(default_factory=list)
    added: list[tuple[Tensor, float]] = dataclasses.field(default_factory=list)
    whole: list[Tensor] = dataclasses.field(default_factory=list)
    copies: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> str:
        """One of the adapters' tensors, for messages."""
        of_deltas, added = (delta.a for delta in self.deltas), (tensor for tensor, _ in self.added)
        return [*self.whole, *of_deltas, *added, *self.copies][0].name


class _RefusedError(ValueError):
    """A target can't be merged; the message says why."""


def merge(
    encodings: Mapping[str, Encoding],
    adapters: Sequence[Adapter],
    aliases: Mapping[str, str],
    model_type: str,
    ties: Ties,
    lost: frozenset[str] = frozenset(),
    cut: str = "",
) -> Merging:
    """Merges adapters, one after the other.

    Args:
      encodings: the base, by the names of a family's table, or as they are.
      adapters: what is merged; deltas of several are summed.
      aliases: of the family; empty for none.
      model_type: of the base's `config.json`.
      ties: which heads are the embedding, by the names of `encodings`.
      lost: tensors that something else stands against, which aren't missed here.
      cut: what is taken of the release, in words; empty for all of it.
    """
    found = collect(encodings, adapters, aliases, model_type, ties, lost, cut)
    problems = list(found.problems)
    merged = dict(encodings)
    for name, change in found.changes.items():
        try:
            merged[name] = _merge_tensor(encodings[name], change)
        except _RefusedError as e:
            problems.append(Problem("adapter", name, str(e)))
    touched = {name: change.first for name, change in found.changes.items()}
    copies = {head: of for head, of in ties.heads.items() if of in touched and head in encodings}
    return Merging(
        merged | {head: merged[of] for head, of in copies.items()},
        tuple(problems),
        found.uses,
        touched | {head: touched[of] for head, of in copies.items()},
        frozenset(copies),
    )


@dataclasses.dataclass(frozen=True)
class Changes:
    """What adapters do to each tensor, what stands against it, and for each adapter what each of its tensors is used
    for.
    """

    changes: Mapping[str, Change]
    problems: tuple[Problem, ...]
    uses: tuple[Mapping[str, str], ...]


def collect(
    encodings: Mapping[str, Encoding],
    adapters: Sequence[Adapter],
    aliases: Mapping[str, str],
    model_type: str,
    ties: Ties,
    lost: frozenset[str] = frozenset(),
    cut: str = "",
) -> Changes:
    """What adapters do to the tensors of a checkpoint; the arguments are those of `merge`. A head that is tied isn't
    among them: what changes it changes the embedding.
    """
    files = ModuleFiles(encodings, aliases, model_type, ties.heads)
    changes: dict[str, Change] = defaultdict(Change)
    problems: list[Problem] = []
    uses = []
    for adapter in adapters:
        applied = _Applied(adapter, files, changes)
        found = list(adapter.problems)
        if not found:
            found = [
                Problem("adapter", f"{adapter.root}: {name}", why)
                for name, why in applied.apply()
                if not _is_lost(name, lost)
            ]
            if found and cut:
                message = f"doesn't fit {cut} of its base; one of the whole release is merged first (weightbeam merge)"
                found.insert(0, Problem("adapter", adapter.root, f"{message}, and these are taken of what is made"))
            elif found and adapter.config.base and not _is_of(encodings, adapter.config.base):
                message = (
                    f"was trained on {adapter.config.base}, by its base_model_name_or_path; is that the base here?"
                )
                found.insert(0, Problem("adapter", adapter.root, message))
        problems += found
        uses.append(applied.used)
    message = "is changed by an adapter ({}), and tied to another tensor by config.json; to which of {} isn't known"
    problems += [
        Problem("adapter", name, message.format(changes[name].first, ", ".join(sorted(ties.unsure - {name}))))
        for name in sorted(ties.unsure & changes.keys())
    ]
    return Changes(changes, tuple(problems), tuple(uses))


def _is_of(encodings: Mapping[str, Encoding], base: str) -> bool:
    """Whether a checkpoint is the one that an adapter's configuration names, by where its files lie."""
    places = (f"{base.rstrip('/')}/", f"hf://{base}@")
    return any(encoding.weight.path.startswith(places) for encoding in encodings.values())


def other_bases(adapters: Iterable[Adapter], root: str) -> Iterator[str]:
    """What is said of adapters whose configuration names another base than the release is called, by the last parts of
    both names: shapes don't tell a base from its instruction-tuned release.
    """

    def last(url: str) -> str:
        return name_of(url).partition("@")[0].rpartition("/")[2].lower()

    for adapter in adapters:
        if adapter.config.base and last(adapter.config.base) != last(root):
            yield f"{adapter.root} was trained on {adapter.config.base}, by its base_model_name_or_path; is {root} that?"


def _is_lost(name: str, lost: frozenset[str]) -> bool:
    """Whether something else stands against the tensor that an adapter's tensor of this name is for."""
    wanted = name.removeprefix("base_model.model.").partition(".lora_")[0]
    return not lost.isdisjoint((wanted, f"{wanted}.weight"))


class _Applied:
    """An adapter on its way into the tensors of a checkpoint.

    Attributes:
      used: what each of its tensors is used for, by name.
    """

    def __init__(self, adapter: Adapter, files: ModuleFiles, changes: dict[str, Change]):
        """`changes`: what is done to each tensor, to which it adds what it does."""
        self._adapter, self._config, self._files, self._changes = adapter, adapter.config, files, changes
        self.used: dict[str, str] = {}

    def apply(self) -> Iterator[tuple[str, str]]:
        """Notes what an adapter changes; yields `(tensor of the adapter, why it can't be merged)`."""
        contents = self._adapter.contents
        if not contents.targets and not contents.whole:
            yield "adapter_model.safetensors", "holds nothing to merge"
        yield from self._apply_factors()
        yield from self._apply_whole()
        self.used.update(dict.fromkeys(contents.spare, "passed over, as PEFT does"))

    def _apply_factors(self) -> Iterator[tuple[str, str]]:
        """`apply` of the tensors whose products are added; what two modules would be added to is refused."""
        # by tensor and expert; a tied head is a module of its own beside the embedding, and PEFT adds up what they get
        reached: dict[tuple[str, int, bool], list[tuple[Box, str]]] = defaultdict(list)
        for target in self._adapter.contents.targets:
            try:
                deltas = self._apply_target(target)
            except (_RefusedError, PatternError) as e:
                yield target.a.name, str(e)
                continue
            if self._config.ties_factors and {*self._files.tied.values()}.intersection(tensor for tensor, _ in deltas):
                yield (
                    target.a.name,
                    "adapts the embedding and the head that is tied to it as one (ensure_weight_tying), and PEFT's own merge adds it to "
                    "their weight twice; give the base a head of its own first (lm_head.weight, tie_word_embeddings: false)",
                )
                continue
            twice: dict[str, str] = {}
            is_head = self._files.is_tied_head(f"{target.module}.weight")
            for tensor, delta in deltas:
                *experts, rows, columns = delta.reach(self._files.encodings[tensor].shape)
                for expert in range(*experts[0]) if experts else (0,):
                    others = reached[tensor, expert, is_head]
                    if by := next((by for other, by in others if meet((rows, columns), other)), None):
                        twice[by] = tensor
                    else:
                        others.append(((rows, columns), target.a.name))
            for by, tensor in twice.items():
                yield target.a.name, f"changes what {by} changes, too: {tensor} is adapted twice"

    def _apply_whole(self) -> Iterator[tuple[str, str]]:
        """`apply` of the tensors that take the place of the base's, and of copies of those, to which factors are added."""
        contents = self._adapter.contents
        whole, base = ("\n".join(f".{name}" for name in names) for names in (contents.whole, self._files.encodings))
        for saved in self._config.modules_to_save:
            if f"{saved}." not in whole and f".{saved}." in base:
                yield CONFIG, f"modules_to_save names {saved}, of which the adapter holds no tensor"
        for is_copy, tensors in ((False, contents.whole), (True, contents.copies)):
            for name, tensor in tensors.items():
                base = self._files.find(name)
                if base is None:
                    yield tensor.name, f"the base has no {name} that it could replace"
                elif why := self._why_not_put(tensor, name, base, is_copy):
                    yield tensor.name, why
                elif not self._files.is_tied_head(name) and (head := self._tied_copy(base, tensors)):
                    self.used[tensor.name] = f"the same as {head.name}, by the base's tied head"
                else:
                    (self._changes[base].copies if is_copy else self._changes[base].whole).append(tensor)
                    self.used[tensor.name] = f"put into {base}" + (" before its delta is added" if is_copy else "")

    def _why_not_put(self, tensor: Tensor, name: str, base: str, is_copy: bool) -> str | None:
        """Why a tensor can't take the place of the base's; None where it can."""
        if self._files.encodings[base].shape != tensor.shape:
            return f"is {tensor.shape}, the base's {base} {self._files.encodings[base].shape}; a model that was resized has to be resized first"
        if is_copy:
            return None
        if self._is_untied(name):
            return (
                f"was trained as a whole, and the base's head is tied to the embedding: PEFT changes {name} alone; give the base a "
                "head of its own first (lm_head.weight, tie_word_embeddings: false)"
            )
        if self._adapter.weight != 1:
            return f"is whole, not a LoRA, and can't be merged with the weight {self._adapter.weight:g}"
        return None

    def _is_untied(self, name: str) -> bool:
        """Whether a whole tensor takes the place of a head alone, or of an embedding alone, that are tied in the base:
        `modules_to_save` makes a copy of one, everything else is loaded into the weight of both.
        """
        if self._config.ties_saved:
            return False
        module = name.removesuffix(".weight")
        is_saved = any(f".{module}".endswith(f".{saved}") for saved in self._config.modules_to_save)
        return is_saved and (self._files.is_tied_head(name) or self._files.find(name) in self._files.tied.values())

    def _tied_copy(self, base: str, copies: Mapping[str, Tensor]) -> Tensor | None:
        """The copy, or the whole tensor, of a tied head, which PEFT loads into the embedding after the embedding's own (the
        base's modules in their order).
        """
        files = self._files
        return next(
            (tensor for name, tensor in copies.items() if files.is_tied_head(name) and files.find(name) == base), None
        )

    def _apply_target(self, target: AdaptedModule) -> list[tuple[str, Delta]]:
        """Notes what one module's tensors change; returns the deltas with the tensors that they are added to.

        Raises:
          _RefusedError, PatternError: they can't be merged.
        """
        module, parameter = target.module, None
        # patterns are of the parameter's name then
        is_parameter = _names(self._config.target_parameters, f"{module}.weight")
        if module.endswith(".base_layer") or is_parameter or not (places := self._files.places(module)):
            module, parameter = self._parameter(module)
            places = self._files.places_of_parameter(module, parameter)
        name = f"{module}.{parameter}" if parameter else module
        if not places:
            raise _RefusedError(f"the base has no weight of {name}")
        scaling = self._adapter.weight * self._config.scaling(name)
        if not 0 < abs(scaling) < FLOAT32_MAX:
            raise _RefusedError(f"its scaling, {scaling:g}, isn't a number that float32 holds")
        deltas = (self._fused if parameter else self._plain)(target, name, places, scaling)
        for tensor, delta in deltas:
            self._changes[tensor].deltas.append(delta)
            if magnitude := target.parts.get("magnitude"):
                if self._adapter.weight != 1:
                    raise _RefusedError(f"is a DoRA, which can't be merged with the weight {self._adapter.weight:g}")
                self._changes[tensor].magnitudes.append(magnitude)
        if bias := target.parts.get("bias"):
            if (base := self._files.find(f"{module}.bias")) is None:
                raise _RefusedError(f"{bias.name} is added to the bias of {module}, and the base has none")
            if self._files.encodings[base].shape != bias.shape:
                raise _RefusedError(f"{bias.name} is {bias.shape}, {base} is {self._files.encodings[base].shape}")
            self._changes[base].added.append((bias, scaling))
        tensors = list(dict.fromkeys(tensor for tensor, _ in deltas))
        what = tensors[0] + (f" and {len(tensors) - 1:,} more" if len(tensors) > 1 else "")
        self.used.update({part.name: f"merged into {what}" for part in target.parts.values()})
        return deltas

    def _check_rank(self, target: AdaptedModule, name: str, experts: int = 1) -> None:
        """The tensors must have the rank that the configuration says."""
        rank = self._config.rank(name)
        if target.a.shape[0] != rank * experts:
            of = f" for each of {experts} experts" if experts > 1 else ""
            raise _RefusedError(
                f"has rank {target.a.shape[0] / experts:g}{of}, adapter_config.json says {rank} for {name}"
            )

    def _plain(
        self, target: AdaptedModule, name: str, places: Sequence[WeightPart], scaling: float
    ) -> list[tuple[str, Delta]]:
        """The delta of a module: of a matrix, of an embedding, or of one expert whose weight is a part of a fused tensor."""
        self._check_rank(target, name)
        (place,) = places
        shape = self._files.encodings[place.tensor].shape
        if place.outputs is None:
            transposed = target.is_embedding or self._files.is_turned(name)
            delta, wanted = Delta(target.a, target.b, scaling, transposed=transposed), shape
        else:
            if "magnitude" in target.parts:
                raise _RefusedError(f"is a DoRA of one expert, which is a part of {place.tensor}; that isn't supported")
            expert, transposed = place.expert or 0, self._files.is_in_out(place.tensor)
            if expert >= shape[0]:
                raise _RefusedError(f"is of expert {expert}, {place.tensor} has {shape[0]}")
            offset = (0, place.row) if transposed else (place.row, 0)
            delta = Delta(target.a, target.b, scaling, place=expert, offset=offset, transposed=transposed)
            wanted = (shape[1], place.outputs) if transposed else (place.outputs, shape[2])
        if delta.shape != wanted:
            turned = ", turned around as a Conv1D's is," if self._files.is_turned(name) else ""
            raise _RefusedError(f"B · A{turned} is {delta.shape}, {place.tensor} takes {wanted}")
        return [(place.tensor, delta)]

    def _parameter(self, module: str) -> tuple[str, str]:
        """The module and the parameter of it that a wrapper is for: `.base_layer` stands once for each wrapper around this
        one. Raises _RefusedError where the configuration names no parameter of the module, or not as many as there are
        wrappers.
        """
        targets, inner = self._config.target_parameters, module
        while inner.endswith(".base_layer"):
            inner = inner.removesuffix(".base_layer")
        depth = (len(module) - len(inner)) // len(".base_layer")
        leaves = dict.fromkeys([*PARAMETERS, *(target.rpartition(".")[2] for target in targets)])
        named = [leaf for leaf in leaves if _names(targets, f"{inner}.{leaf}")]
        present = [leaf for leaf in named if self._files.places_of_parameter(inner, leaf)]
        if not present:
            raise _RefusedError(
                f"the base has no weight of {inner}"
                + (f", and none of its parameters {', '.join(named)}" if named else "")
            )
        if len(present) > 1 and not set(present) <= set(PARAMETERS):
            raise _RefusedError(
                f"target_parameters names {', '.join(present)} of one module, and which of them is meant isn't known"
            )
        if depth >= len(present):
            raise _RefusedError(
                f"is wrapped {depth + 1} times, but target_parameters names {len(present)} of its parameters: {', '.join(present)}"
            )
        return inner, present[len(present) - 1 - depth]

    def _fused(
        self, target: AdaptedModule, name: str, places: Sequence[WeightPart], scaling: float
    ) -> list[tuple[str, Delta]]:
        """The deltas of a parameter: a matrix, or the fused experts of a layer, which may be one tensor or many in the
        files.
        """
        shape = self._files.encodings[places[0].tensor].shape
        if target.is_embedding or self._config.use_dora or self._config.fan_in_fan_out:
            raise _RefusedError(
                f"is of a parameter, {name}, which PEFT can't adapt as an embedding, with use_dora, or with fan_in_fan_out"
            )
        if len(shape) == 2 and places[0].expert is None:
            return self._plain(target, name, places, scaling)
        if len(shape) not in (2, 3):
            raise _RefusedError(f"{places[0].tensor} is {shape}; a parameter of two or three axes is expected")
        whole = len(shape) == 3
        if whole:
            experts, sizes = shape[0], shape[1:]  # (rows, columns) in the files
            turned = self._files.is_in_out(places[0].tensor) != (self._files.model_type in IN_OUT)
        else:
            experts = 1 + max(place.expert or 0 for place in places)
            sizes = (
                sum(self._files.encodings[place.tensor].shape[0] for place in places if place.expert == 0),
                shape[1],
            )
            turned = self._files.model_type in IN_OUT
        self._check_rank(target, name, experts)
        a_first = self._is_first(target, name, (sizes[1], sizes[0]) if turned else sizes) != turned
        return [
            (
                place.tensor,
                Delta(
                    target.a,
                    target.b,
                    scaling,
                    experts,
                    expert=place.expert or 0,
                    offset=(place.row, 0),
                    transposed=a_first,
                ),
            )
            for place in places
        ]

    def _is_first(self, target: AdaptedModule, name: str, sizes: tuple[int, int]) -> bool:
        """Whether A's columns run along the first of the two axes that an expert has in memory; else along the second.

        Before PEFT 0.19 always the first; since then the second, but for modules that transformers marks `is_transposed`.
        Shapes tell it where the axes differ, and the version must agree; where they are equal, only the version can tell.

        Raises:
          _RefusedError: neither fits, they disagree, or it can't be told.
        """
        version = self._config.version
        said = None if version is None else (version < LAYOUT_CHANGED or self._files.model_type in MARKED)
        found = (target.a.shape[1], target.b.shape[0])
        fits = [first for first in (True, False) if found == (sizes if first else sizes[::-1])]
        told = "" if version is None else f" (peft_version {version[0]}.{version[1]})"
        if not fits:
            raise _RefusedError(
                f"A and B hold matrices of {found[0]} by {found[1]}; an expert of {name} is {sizes[0]} by {sizes[1]}"
            )
        if len(fits) == 2:
            if said is None:
                raise _RefusedError(
                    f"experts of {name} are square, so that only PEFT's version tells which side of them A belongs to, and adapter_config.json names no release"
                )
            return said
        if said is not None and said != fits[0]:
            raise _RefusedError(
                f"A has {found[0]} columns and B {found[1]} rows, the other way round than that version of PEFT writes {name}{told}"
            )
        return fits[0]


def _names(targets: Iterable[str], parameter: str) -> bool:
    """Whether one of `target_parameters` is a parameter's name, or the end of it."""
    return any(f".{parameter}".endswith(f".{target}") for target in targets)


def _merge_tensor(base: Encoding, change: Change) -> Encoding:
    """A tensor with all its changes. Raises _RefusedError where they can't be made together."""
    if change.whole:
        if len(change.whole) > 1 or change.deltas or change.added or change.copies:
            raise _RefusedError(
                f"is replaced by {change.whole[0].name}, and changed by another tensor of the adapters too"
            )
        return Replaced(change.whole[0])
    for other in change.copies[1:]:
        if not _is_same(change.copies[0], other):
            raise _RefusedError(
                f"has a copy in two adapters that isn't the same ({change.copies[0].path} and {other.path}): they were trained on "
                "different bases, and each would take the place of what the other is added to"
            )
    if change.copies:
        base = OwnBase(change.copies[0])
    if base.label is None and not is_float(base.weight.dtype):  # values as they are stored
        raise _RefusedError(f"is {base.weight.dtype}, and no adapter's change can be added to that")
    if change.added:
        return Shifted(base, tuple(change.added))
    if change.magnitudes and len(change.deltas) > 1:
        raise _RefusedError(
            "has a DoRA, whose norm is the base's, and another adapter; merge one first, and the other into the result"
        )
    return MergedWeight(base, tuple(change.deltas), change.magnitudes[0] if change.magnitudes else None)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes: copies of an embedding, which PEFT saves with every adapter that reaches
    it. Read some rows at a time.
    """
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    rows = max(1, COMPARED_BYTES * tensor.shape[0] // max(1, tensor.nbytes))
    for start in range(0, tensor.shape[0], rows):
        box = ((start, min(start + rows, tensor.shape[0])), *((0, size) for size in tensor.shape[1:]))
        (values, others), _ = read_boxes([BoxRead(tensor, box), BoxRead(other, box)])
        if values.tobytes() != others.tobytes():
            return False
    return True
