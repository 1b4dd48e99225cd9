"""What an export and a merge have in common: their target is a release."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from weightbeam.formats.release.files import hash_each
from weightbeam.formats.safetensors import INDEX
from weightbeam.formats.staging import Staging
from weightbeam.formats.targets.release import ReleaseTarget
from weightbeam.transforms.comparing import baselines, odd_values
from weightbeam.transforms.cutting.files import FileLayout
from weightbeam.transforms.cutting.quantizing import Given
from weightbeam.transforms.planning.transfer import Source, Transfer


class ToRelease(Transfer):
    """A transfer into a release, with these fields beside those of every transfer.

    Attributes:
      files: where each tensor goes; None if there are problems.
      small: the release's small files as they will be; not staged.
      lossy: by tensor, why its values aren't the source's to the bit.
      config_edits: what of `config.json` has to change: `{field: value}`.
      given: the release in FP8 whose scales, and choice of weights, are taken; None for none.
    """

    files: FileLayout | None
    small: Mapping[str, bytes]
    lossy: Mapping[str, str]
    config_edits: Mapping[str, Any]
    given: Given | None

    @property
    def sources(self) -> tuple[Source, ...]:
        return *super().sources, *([self.given.files] if self.given else [])

    def staged(self) -> dict[str, Any]:
        return {**super().staged(), "given": self.given.files.to_json() if self.given else None}

    @property
    def layout(self) -> FileLayout:
        """The files of a plan without problems."""
        assert self.files is not None, "the plan has problems"
        return self.files

    def hash_small(self) -> dict[str, str]:
        return hash_each(self.small)

    @functools.cached_property
    def target(self) -> ReleaseTarget:
        files, index = (self.files.files, self.files.index) if self.files else ((), None)
        return ReleaseTarget(
            [(file.name, file.header, file.size) for file in files],
            {**self.small, **({} if index is None else {INDEX: index})},
            baselines.gather,
            frozenset({baselines.FILE}),
        )

    def conclude(self, place: Staging, ledger: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        return odd_values.not_finite_of(ledger)

    @property
    def target_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.files.tensors.values()) if self.files else 0
