"""`weightbeam export` of an adapter: MaxText's factors as a folder that PEFT and serving engines read."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weightbeam.formats.adapters.adapter import WEIGHTS
from weightbeam.formats.adapters.config import CONFIG
from weightbeam.formats.storage import TEMPORARY, LocalFolder, open_store, reason, sync_folder
from weightbeam.pipelines.errors import Failed, Refused
from weightbeam.pipelines.prepare import describe
from weightbeam.pipelines.tables import count, human
from weightbeam.transforms.adapters import AdapterExport
from weightbeam.transforms.files import plan_files


@dataclasses.dataclass(frozen=True)
class ExportedAdapter:
    """What came of the export of an adapter.

    Attributes:
      folder: where it is.
      tensors: how many it has.
      size: of them, in bytes.
      rank, alpha: of all its modules.
    """

    folder: str
    tensors: int
    size: int
    rank: int
    alpha: float
    state: str = "done"

    def to_dict(self) -> dict[str, Any]:
        """What `--json` writes."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        about = f"{self.folder}: a PEFT adapter of rank {self.rank} with alpha {self.alpha:g}, {count(self.tensors, 'tensor')}, {human(self.size)}"
        return f"{about}\nload it:  peft.PeftModel.from_pretrained(model, {self.folder!r})"


def export_adapter(planned: AdapterExport, output: str, overwrite: bool = False) -> ExportedAdapter:
    """Writes an adapter to a folder, which appears there whole.

    Raises:
      Refused: it can't be done; nothing was written.
      Failed: it failed on the way.
    """
    if planned.problems:
        raise Refused(f"{count(len(planned.problems), 'problem')}:\n{describe(planned.problems)}", planned.problems)
    try:
        store = open_store(output)
    except OSError as e:
        raise Refused(f"--output={e}") from e
    if not isinstance(store, LocalFolder):
        raise Refused(f"--output={output}: an adapter is written to a folder")
    folder = store.folder
    if folder.exists() and not _is_replaceable(folder, overwrite):
        raise Refused(f"--output={output}: exists" + ("" if overwrite else "; --overwrite replaces an adapter"))
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        tensors = dict(planned.tensors())
        planned.source.check()
        temporary.mkdir(parents=True)
        _write(temporary / WEIGHTS, tensors)
        (temporary / CONFIG).write_bytes(planned.peft_config(list(tensors)))
        sync_folder(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    except OSError as e:
        raise Failed(f"  {output}: {reason(e)}") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ExportedAdapter(
        str(folder), len(tensors), sum(values.nbytes for values in tensors.values()), planned.rank, planned.alpha
    )


def _is_replaceable(folder: Path, overwrite: bool) -> bool:
    """Whether a folder is empty, or holds an adapter and nothing else, which may be replaced."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    held = {path.name for path in folder.iterdir()}
    return not held or (overwrite and held <= {WEIGHTS, CONFIG, "README.md"})


def _write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One safetensors file."""
    (file,) = plan_files(
        ((name, values.dtype, values.shape) for name, values in tensors.items()), max_shard_size=sys.maxsize
    ).files
    with path.open("xb") as out:
        out.write(file.header)
        for tensor in file.tensors:
            out.write(np.ascontiguousarray(tensors[tensor.name]).reshape(-1).view(np.uint8).data)
        out.flush()
        os.fsync(out.fileno())
