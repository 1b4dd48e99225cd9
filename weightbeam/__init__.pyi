"""Written by `python -m deploy.face`, of the options that each command has."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from weightbeam.model_mappings.maxtext_config import MaxTextConfig
from weightbeam.pipelines.checking.comparison import Comparison
from weightbeam.pipelines.checking.verification import Verification
from weightbeam.pipelines.commands.adapters import ExportedAdapter
from weightbeam.pipelines.commands.convert import Converted
from weightbeam.pipelines.commands.export import Exported
from weightbeam.pipelines.commands.fit import Fit
from weightbeam.pipelines.commands.inspect import Inspection
from weightbeam.pipelines.commands.merge import Merged
from weightbeam.pipelines.commands.plan import Plan as Plan
from weightbeam.pipelines.commands.reshard import Resharded
from weightbeam.pipelines.forward.report import Logits
from weightbeam.pipelines.loading.load import load as load
from weightbeam.pipelines.loading.tree import open as open
from weightbeam.pipelines.terminal.errors import Busy as Busy
from weightbeam.pipelines.terminal.errors import Failed as Failed
from weightbeam.pipelines.terminal.errors import Refused as Refused
from weightbeam.pipelines.terminal.progress import Progress as Progress
from weightbeam.pipelines.terminal.progress import Report

__version__: str
__all__ = [
    "Busy",
    "Failed",
    "Plan",
    "Progress",
    "Refused",
    "convert",
    "cut",
    "dequantize",
    "diff",
    "export",
    "fit",
    "inspect",
    "load",
    "logits",
    "materialize",
    "maxtext_config",
    "merge",
    "open",
    "plan",
    "quantize",
    "reshard",
    "verify",
]

def convert(
    source: str | PathLike[str] | Plan,
    output: str | PathLike[str],
    *,
    layers: str | None = None,
    experts: str | None = None,
    vocab_rows: int | None = None,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    save_dtype: str = "bfloat16",
    quantize: str | None = None,
    mesh: str | Sequence[str] = (),
    sharding_rules: str | Path | Mapping[str, Any] | Sequence[Any] | None = None,
    maxtext_model: str | None = None,
    maxtext: str = "0.2.5",
    family: str | None = None,
    vocab_size: int | None = None,
    mtp: bool = False,
    check_source: str = "auto",
    allow_links: bool = False,
    multimodal: bool = False,
    lora: str | Sequence[str] = (),
    adapter_only: bool = False,
    use_ocdbt: bool = True,
    use_zarr3: bool = True,
    compression: str = "none",
    unit_bytes: int | str = 134217728,
    step: int = 0,
    virtual: bool = False,
    full_paths: bool | None = None,
    hf_token_secret: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    link: str = "hard",
    sha256: bool = False,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
) -> Converted:
    """Converts a release into an Orbax checkpoint at `output/step`, which appears there whole, at the end.

    Args:
      source: a folder, `gs://bucket/folder`, `hf://organisation/model[@revision]`, or what `plan` made of one, beside
        which there are no options: it was made with its own.
      output: a folder or `gs://bucket/folder`; it must not hold that step yet.
      beam: Beam's options, as on the command line, such as `["--runner=DataflowRunner", …]`.
      progress: shown on standard error, told to a callback, or False for neither.
      layers: of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and their rows of the router.
      vocab_rows: of the vocabulary take the first rows alone.
      scan_layers: stack the layers of a kind in one array, as in MaxText.
      param_scan_axis: where the stacked axis goes, as in MaxText.
      save_dtype: dtype of every float array; computed in float32, cast once. float8_e4m3fn: FP8 weights stay codes,
        each with its scales beside it, and everything else in its own dtype.
      quantize: fp8: quantise the linear layers and fused experts on the way, with the codes of weightbeam.quantize;
        needs save_dtype= float8_e4m3fn.
      mesh: the mesh that loads it, such as fsdp=16,expert=4; a list for several (default: fit for any).
      sharding_rules: your logical_axis_rules: a MaxText config (YAML), or JSON (default: those of MaxText's base.yml).
      maxtext_model: the MaxText model, such as llama3.1-8b, where config.json can't settle it.
      maxtext: the version of MaxText whose tree and names of axes are written: 0.2.5 of PyPI, or its main branch in
        August 2026.
      family: the table: one of ours, an installed package's, a file of your own, or identity (default: by config.json).
      vocab_size: rows of MaxText's embedding: more pads with zeros, fewer cuts.
      mtp: convert the multi-token-prediction layers too.
      check_source: compare the source's bytes with the hashes that its store states: auto: on the way, where a bucket
        does; true: all of them, in a read of their own; false: none.
      allow_links: take files of the source that are links to another folder.
      multimodal: convert the vision and audio towers too.
      lora: a PEFT adapter to merge: a folder, gs:// or hf://; or a list of them.
      adapter_only: write the adapter as MaxText's, and don't merge it.
      use_ocdbt: one database, or a folder for each array (Pathways: false).
      use_zarr3: zarr version 3 or 2 (Pathways: false).
      compression: zstd saves about a fifth of the disk and slows loading.
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      step: the step under which the checkpoint is written.
      virtual: refer to the source's files for every array that lies in them already.
      full_paths: whether records and model cards name sources by their full paths, or by their names alone (default:
        paths in a folder, names on the hub; in gs:// names for what lies in this machine's folders).
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      resume: go on with what a stopped command staged.
      overwrite: replace what is there, or throw away what a stopped command staged.
      link: how virtual=True puts the source's files into a folder (into a bucket: copy).
      sha256: with virtual=True, read the source's files once and record their hashes.

    Returns:
      Where the checkpoint is, what it took in seconds and bytes, what is strange about its values, and what MaxText must be
      told.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> made = wb.convert("models/qwen3", "made", mesh="fsdp=8", progress=False)
      >>> made.path.endswith("made/0/items"), made.maxtext["scan_layers"]
      (True, 'true')
    """

def cut(
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    layers: str | None = None,
    experts: str | None = None,
    vocab_rows: int | None = None,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = 134217728,
    full_paths: bool | None = None,
    family: str | None = None,
    hf_token_secret: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    create_pr: bool = False,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged:
    """Writes a part of a release as a release of its own: the tensors that are kept are its own bytes, codes and scales
    among them, and `config.json` describes them.

    Args:
      source, output, beam, progress: as for `merge`.
      layers: of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and their rows of the router.
      vocab_rows: of the vocabulary take the first rows alone.
      max_shard_size: bytes of tensors in a file, such as 5GB (default: as source=).
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      full_paths: whether records and model cards name sources by their full paths, or by their names alone (default:
        paths in a folder, names on the hub; in gs:// names for what lies in this machine's folders).
      family: the table that says where layers and experts are (default: by config.json).
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      resume: go on with what a stopped command staged.
      overwrite: replace what is there, or throw away what a stopped command staged.
      create_pr: on the hub, open a pull request.

    Returns:
      Where the smaller release is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.cut("models/qwen3", "one_layer", layers="0:1", progress=False)
      <weightbeam.Merged: .../one_layer: 14 tensors in 1 file, ...>
    """

def dequantize(
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    layers: str | None = None,
    experts: str | None = None,
    vocab_rows: int | None = None,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = 134217728,
    full_paths: bool | None = None,
    save_dtype: str | None = None,
    hf_token_secret: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    create_pr: bool = False,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged:
    """Writes a quantised release with the values of its weights, computed in float32 and cast once; all else is its own
    bytes.

    Args:
      source, output, beam, progress: as for `merge`.
      layers: of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and their rows of the router.
      vocab_rows: of the vocabulary take the first rows alone.
      max_shard_size: bytes of tensors in a file, such as 5GB (default: as source=).
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      full_paths: whether records and model cards name sources by their full paths, or by their names alone (default:
        paths in a folder, names on the hub; in gs:// names for what lies in this machine's folders).
      save_dtype: dtype of the values (default: what config.json says).
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      resume: go on with what a stopped command staged.
      overwrite: replace what is there, or throw away what a stopped command staged.
      create_pr: on the hub, open a pull request.

    Returns:
      Where the new release is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.dequantize("models/qwen3-fp8", "plain", save_dtype="float32", progress=False)
      <weightbeam.Merged: .../plain: 25 tensors in 1 file, ...>
    """

def diff(
    a: str | PathLike[str],
    b: str | PathLike[str],
    *,
    hf_token_secret: str | None = None,
    tolerance: float = 0.0,
    fail_over: float | None = None,
    state: str = "full",
    maxtext_model: str | None = None,
    family: str | None = None,
    progress: bool | Report = True,
) -> Comparison:
    """Compares two checkpoints of any kinds, every element, in bounded memory; of two training states all arrays. What
    differs doesn't raise: see `Comparison.ok`.

    Args:
      a, b: releases (quantised or not) or Orbax checkpoints (a root, a step or an item): folders, `gs://…`, releases
        also `hf://…`.
      progress: shown on standard error, told to a callback, or False for neither.
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      tolerance: the largest absolute difference of an element that counts as none.
      fail_over: end with status 1 only where a tensor's relative change is over X: |a - b| / |a|, of its norms.
      state: of two training states params compares the weights alone, full the optimizer and the rest, too.
      maxtext_model: the MaxText model, where one is an Orbax checkpoint and neither can settle it.
      family: the table (default: by config.json).

    Returns:
      The tensors of both sides, equal, different and by how much, or on one side alone.

    Raises:
      Refused: one of them can't be looked at, or problems stand against it.
      Failed: it failed on the way.

    Example:
      >>> compared = wb.diff("models/qwen3", "ckpt", progress=False)
      >>> compared.ok
      True
    """

def export(
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = 134217728,
    full_paths: bool | None = None,
    like: str | None = None,
    save_dtype: str = "auto",
    maxtext_model: str | None = None,
    param_scan_axis: int | None = None,
    step: int | None = None,
    lora: str | Sequence[str] = (),
    lora_alpha: float | None = None,
    family: str | None = None,
    maxtext_config: str | None = None,
    tokenizer: str | None = None,
    multimodal: bool | None = None,
    mtp: bool = False,
    hf_token_secret: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    create_pr: bool = False,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Exported | ExportedAdapter:
    """Writes an Orbax checkpoint as a Hugging Face release: safetensors files, index, `config.json`, tokenizer and the
    rest. An adapter of MaxText's becomes a folder for PEFT.

    Args:
      source: the checkpoint: its root, a step or the item, in a folder or in `gs://`; one that MaxText's training
        wrote, too.
      output: the folder of the release, which must not be there yet; or `hf://owner/name`, where it becomes one commit.
      beam: Beam's options.
      progress: whether to show it, or what is told of it.
      max_shard_size: bytes of tensors in a file, such as 5GB (default: as like=, else 5GB).
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      full_paths: whether records and model cards name sources by their full paths, or by their names alone (default:
        paths in a folder, names on the hub; in gs:// names for what lies in this machine's folders).
      like: the release whose config.json, tokenizer, names and dtypes are taken: a folder, gs:// or hf://.
      save_dtype: dtype of every float tensor; auto: as like= has it, without a release bfloat16; float8_e4m3fn: FP8
        codes and scales of the checkpoint as they are.
      maxtext_model: the MaxText model, where neither the checkpoint nor config.json settles it.
      param_scan_axis: where the layers are stacked, where the shapes fit several axes.
      step: which step, where the root has several.
      lora: a PEFT adapter to merge on the way: a folder, gs:// or hf://; or a list of them.
      lora_alpha: alpha of an adapter that MaxText trained, if its metadata lack it.
      family: the table: one of ours, an installed package's or a file of your own (default: by config.json).
      maxtext_config: a MaxText configuration (.yml) to make config.json of, for a model without a release.
      tokenizer: a folder, gs:// or hf:// whose tokenizer, chat template and processor are taken.
      multimodal: true: with vision and audio towers, those of like= where the checkpoint has none; false: the language
        model alone.
      mtp: with like's multi-token-prediction layers where the checkpoint has none.
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      resume: go on with what a stopped command staged.
      overwrite: replace what is there, or throw away what a stopped command staged.
      create_pr: on the hub, open a pull request.

    Returns:
      Where the release is, and what it took; of an adapter, the folder for PEFT.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> tuned = wb.export("ckpt", "tuned", progress=False)
      >>> wb.diff("models/qwen3", "tuned", progress=False).ok
      True
    """

def fit(source: str | PathLike[str], maxtext_model: str | PathLike[str]) -> Fit:
    """Compares a release with a MaxText configuration; reads no weights.

    Args:
      source: a folder, `gs://bucket/folder`, or `hf://organisation/model[@revision]`.
      maxtext_model: the name of one of MaxText's models, or a file (`.yml`) that says its keys.

    Returns:
      The differences, and the keys that MaxText must be told besides the model's name.

    Raises:
      Refused: no such source, model or file, or a model that has no table.

    Example:
      >>> compared = wb.fit("models/qwen3", "qwen3-0.6b")
      >>> compared.ok  # the sizes are others
      False
    """

def inspect(
    checkpoint: str | PathLike[str],
    *,
    layers: str | None = None,
    experts: str | None = None,
    vocab_rows: int | None = None,
    mesh: str | Sequence[str] = (),
    sharding_rules: str | Path | Mapping[str, Any] | Sequence[Any] | None = None,
    source: str | None = None,
    maxtext_model: str | None = None,
) -> Inspection:
    """Looks at a checkpoint: its arrays or tensors; with meshes, what loading it costs.

    Args:
      checkpoint: an Orbax checkpoint (its root, a step or an item), or safetensors files, in a folder, `gs://` or
        (safetensors) `hf://`.
      layers: of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and their rows of the router.
      vocab_rows: of the vocabulary take the first rows alone.
      mesh: what loading costs on a mesh, such as fsdp=16,expert=4; or a list of them.
      sharding_rules: your logical_axis_rules, as for convert (default: those that it was made for).
      source: folder with the model's config.json, for a checkpoint that doesn't tell its logical axes.
      maxtext_model: the MaxText model, where neither config.json nor the checkpoint can settle it.

    Returns:
      The arrays or tensors, with shapes, dtypes, chunks and bytes; for each mesh, bytes read by the bytes that are needed.

    Raises:
      Refused: it can't be read.

    Example:
      >>> wb.inspect("ckpt").brief()
      '.../ckpt/0/items (parameters): 15 arrays (step among them), ...'
    """

def logits(
    source: str | PathLike[str],
    other: str | PathLike[str] | None = None,
    *,
    hf_token_secret: str | None = None,
    layers: str | None = None,
    experts: str | None = None,
    vocab_rows: int | None = None,
    prompt: str | None = None,
    token_ids: Sequence[int] = (),
    dtype: str = "float32",
    tolerance: float | None = None,
    maxtext: str | None = None,
    maxtext_model: str | None = None,
    maxtext_patience: float = 1800.0,
    save_logits: str | None = None,
    progress: bool | Report = True,
) -> Logits:
    """Runs a model on some tokens with transformers' own layers, the weights of one layer in memory at a time; and
    another one, or MaxText, beside it. What differs doesn't raise: see `Logits.ok`. Needs torch and transformers.

    Args:
      source: a release, quantised or not: a folder, `gs://…`, `hf://…`.
      other: what is compared with it: a release, an Orbax checkpoint of the model, or a PEFT adapter for it.
      progress: shown on standard error, told to a callback, or False for neither.
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      layers: of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and their rows of the router.
      vocab_rows: of the vocabulary take the first rows alone.
      prompt: text, which the release's tokenizer makes tokens of.
      token_ids: tokens by their numbers, such as 1,15043,3186, in place of prompt=.
      dtype: of the weights as they are computed with, and so of the arithmetic.
      tolerance: the relative difference of what a layer makes, |a - b| / |a|, that counts as none (default: 0, with
        maxtext= 1e-4).
      maxtext: compare with MaxText itself: the Python of an environment that has it; converts the release into a
        temporary folder.
      maxtext_model: the MaxText model, where neither config.json nor the checkpoint can settle it.
      maxtext_patience: seconds that MaxText may take to begin, and for each layer.
      save_logits: write the logits (token, vocab) too, as numpy's .npy.

    Returns:
      The logits, of shape (token, vocab), and how far the other's are from them; it prints as the command does.

    Raises:
      Refused: it can't be done: everything that stands against it.
      Failed: it failed on the way.

    Example:
      >>> compared = wb.logits("models/qwen3", "ckpt", token_ids=(1, 2, 3), progress=False)
      >>> compared.ok
      True
    """

def materialize(
    checkpoint: str | PathLike[str],
    output: str | PathLike[str],
    *,
    mesh: str | Sequence[str] = (),
    sharding_rules: str | Path | Mapping[str, Any] | Sequence[Any] | None = None,
    use_ocdbt: bool = True,
    use_zarr3: bool = True,
    compression: str = "none",
    unit_bytes: int | str = 134217728,
    step: int | None = None,
    family: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
) -> Converted:
    """Makes an ordinary checkpoint of a virtual one: the same arrays, in chunks for a mesh, without any file of the
    source.

    Args:
      checkpoint: the virtual checkpoint: its root, a step or an item, in a folder or in `gs://`.
      output: a folder or `gs://bucket/folder`; it must not hold that step yet.
      beam, progress: as for `convert`.
      mesh: target sharding, such as fsdp=16,expert=4 (default: that of the virtual checkpoint).
      sharding_rules: your logical_axis_rules, as for convert (default: those of the virtual checkpoint).
      use_ocdbt: one database, or a folder for each array (Pathways: false).
      use_zarr3: zarr version 3 or 2 (Pathways: false).
      compression: zstd saves about a fifth of the disk and slows loading.
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      step: the step under which it is written (default: that of the virtual checkpoint).
      family: the table; a file of your own has to be named, also where the checkpoint names it (default: the
        checkpoint's).
      resume: go on with what a stopped command staged.
      overwrite: replace what is there, or throw away what a stopped command staged.

    Returns:
      Where the new checkpoint is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> linked = wb.convert("models/qwen3", "linked", virtual=True, scan_layers=False, progress=False)
      >>> wb.materialize("linked", "whole", mesh="fsdp=8", progress=False)
      <weightbeam.Converted: .../whole/0/items: 25 arrays, ...>
    """

def maxtext_config(
    source: str | PathLike[str],
    *,
    layers: str | None = None,
    experts: str | None = None,
    vocab_rows: int | None = None,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    save_dtype: str = "bfloat16",
    quantize: str | None = None,
    mesh: str | Sequence[str] = (),
    sharding_rules: str | Path | Mapping[str, Any] | Sequence[Any] | None = None,
    maxtext_model: str | None = None,
    maxtext: str = "0.2.5",
    family: str | None = None,
    vocab_size: int | None = None,
    mtp: bool = False,
    check_source: str = "auto",
    allow_links: bool = False,
    multimodal: bool = False,
    lora: str | Sequence[str] = (),
    adapter_only: bool = False,
    use_ocdbt: bool = True,
    use_zarr3: bool = True,
    compression: str = "none",
    unit_bytes: int | str = 134217728,
    step: int = 0,
    virtual: bool = False,
    full_paths: bool | None = None,
    hf_token_secret: str | None = None,
) -> MaxTextConfig:
    """What MaxText must be told of a checkpoint, from its `config.json`: a mapping; its text is `maxtext.yml`.

    Args:
      source: a folder, `gs://bucket/folder`, or `hf://organisation/model[@revision]`.
      layers: of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and their rows of the router.
      vocab_rows: of the vocabulary take the first rows alone.
      scan_layers: stack the layers of a kind in one array, as in MaxText.
      param_scan_axis: where the stacked axis goes, as in MaxText.
      save_dtype: dtype of every float array; computed in float32, cast once. float8_e4m3fn: FP8 weights stay codes,
        each with its scales beside it, and everything else in its own dtype.
      quantize: fp8: quantise the linear layers and fused experts on the way, with the codes of weightbeam.quantize;
        needs save_dtype= float8_e4m3fn.
      mesh: the mesh that loads it, such as fsdp=16,expert=4; a list for several (default: fit for any).
      sharding_rules: your logical_axis_rules: a MaxText config (YAML), or JSON (default: those of MaxText's base.yml).
      maxtext_model: the MaxText model, such as llama3.1-8b, where config.json can't settle it.
      maxtext: the version of MaxText whose tree and names of axes are written: 0.2.5 of PyPI, or its main branch in
        August 2026.
      family: the table: one of ours, an installed package's, a file of your own, or identity (default: by config.json).
      vocab_size: rows of MaxText's embedding: more pads with zeros, fewer cuts.
      mtp: convert the multi-token-prediction layers too.
      check_source: compare the source's bytes with the hashes that its store states: auto: on the way, where a bucket
        does; true: all of them, in a read of their own; false: none.
      allow_links: take files of the source that are links to another folder.
      multimodal: convert the vision and audio towers too.
      lora: a PEFT adapter to merge: a folder, gs:// or hf://; or a list of them.
      adapter_only: write the adapter as MaxText's, and don't merge it.
      use_ocdbt: one database, or a folder for each array (Pathways: false).
      use_zarr3: zarr version 3 or 2 (Pathways: false).
      compression: zstd saves about a fifth of the disk and slows loading.
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      step: the step under which the checkpoint is written.
      virtual: refer to the source's files for every array that lies in them already.
      full_paths: whether records and model cards name sources by their full paths, or by their names alone (default:
        paths in a folder, names on the hub; in gs:// names for what lies in this machine's folders).
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.

    Returns:
      The keys by their names, in MaxText's order.

    Raises:
      Refused: no such source, no table for it, or `config.json` doesn't say it all.

    Example:
      >>> wb.maxtext_config("models/qwen3")["base_emb_dim"]
      64
    """

def merge(
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    layers: str | None = None,
    experts: str | None = None,
    vocab_rows: int | None = None,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = 134217728,
    full_paths: bool | None = None,
    lora: str | Sequence[str] = (),
    family: str | None = None,
    hf_token_secret: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    create_pr: bool = False,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged:
    """Merges PEFT adapters into a release, which appears in `output` whole, at the end.

    Args:
      source: the release: a folder, `gs://bucket/folder` or `hf://organisation/model[@revision]`.
      output: a folder or `gs://bucket/folder` for the new one, which must not be there yet; or `hf://owner/name`, where
        it becomes one commit.
      beam: Beam's options.
      progress: whether to show it, or what is told of it.
      layers: of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and their rows of the router.
      vocab_rows: of the vocabulary take the first rows alone.
      max_shard_size: bytes of tensors in a file, such as 5GB (default: as source=).
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      full_paths: whether records and model cards name sources by their full paths, or by their names alone (default:
        paths in a folder, names on the hub; in gs:// names for what lies in this machine's folders).
      lora: a PEFT adapter to merge: a folder, gs:// or hf://; or a list of them.
      family: the table whose spellings of names count (default: by config.json).
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      resume: go on with what a stopped command staged.
      overwrite: replace what is there, or throw away what a stopped command staged.
      create_pr: on the hub, open a pull request.

    Returns:
      Where the new release is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.merge("models/qwen3", "merged", lora="adapter,0.5", progress=False)  # at half its weight
      <weightbeam.Merged: .../merged: 25 tensors in 1 file, ...>
    """

def plan(
    source: str | PathLike[str],
    *,
    layers: str | None = None,
    experts: str | None = None,
    vocab_rows: int | None = None,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    save_dtype: str = "bfloat16",
    quantize: str | None = None,
    mesh: str | Sequence[str] = (),
    sharding_rules: str | Path | Mapping[str, Any] | Sequence[Any] | None = None,
    maxtext_model: str | None = None,
    maxtext: str = "0.2.5",
    family: str | None = None,
    vocab_size: int | None = None,
    mtp: bool = False,
    check_source: str = "auto",
    allow_links: bool = False,
    multimodal: bool = False,
    lora: str | Sequence[str] = (),
    adapter_only: bool = False,
    use_ocdbt: bool = True,
    use_zarr3: bool = True,
    compression: str = "none",
    unit_bytes: int | str = 134217728,
    step: int = 0,
    virtual: bool = False,
    full_paths: bool | None = None,
    hf_token_secret: str | None = None,
    workers: Sequence[int] = (),
    worker_gbps: float = 10.0,
    worker_hour_price: float = 0.14,
    beam: Sequence[str] = (),
) -> Plan:
    """Plans a conversion from `config.json` and the headers of the safetensors files alone. Its problems stay in the
    plan.

    Args:
      source: a folder, `gs://bucket/folder`, or `hf://organisation/model[@revision]`.
      beam: Beam's options, as on the command line.
      layers: of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and their rows of the router.
      vocab_rows: of the vocabulary take the first rows alone.
      scan_layers: stack the layers of a kind in one array, as in MaxText.
      param_scan_axis: where the stacked axis goes, as in MaxText.
      save_dtype: dtype of every float array; computed in float32, cast once. float8_e4m3fn: FP8 weights stay codes,
        each with its scales beside it, and everything else in its own dtype.
      quantize: fp8: quantise the linear layers and fused experts on the way, with the codes of weightbeam.quantize;
        needs save_dtype= float8_e4m3fn.
      mesh: the mesh that loads it, such as fsdp=16,expert=4; a list for several (default: fit for any).
      sharding_rules: your logical_axis_rules: a MaxText config (YAML), or JSON (default: those of MaxText's base.yml).
      maxtext_model: the MaxText model, such as llama3.1-8b, where config.json can't settle it.
      maxtext: the version of MaxText whose tree and names of axes are written: 0.2.5 of PyPI, or its main branch in
        August 2026.
      family: the table: one of ours, an installed package's, a file of your own, or identity (default: by config.json).
      vocab_size: rows of MaxText's embedding: more pads with zeros, fewer cuts.
      mtp: convert the multi-token-prediction layers too.
      check_source: compare the source's bytes with the hashes that its store states: auto: on the way, where a bucket
        does; true: all of them, in a read of their own; false: none.
      allow_links: take files of the source that are links to another folder.
      multimodal: convert the vision and audio towers too.
      lora: a PEFT adapter to merge: a folder, gs:// or hf://; or a list of them.
      adapter_only: write the adapter as MaxText's, and don't merge it.
      use_ocdbt: one database, or a folder for each array (Pathways: false).
      use_zarr3: zarr version 3 or 2 (Pathways: false).
      compression: zstd saves about a fifth of the disk and slows loading.
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      step: the step under which the checkpoint is written.
      virtual: refer to the source's files for every array that lies in them already.
      full_paths: whether records and model cards name sources by their full paths, or by their names alone (default:
        paths in a folder, names on the hub; in gs:// names for what lies in this machine's folders).
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      workers: simulate it on N workers, such as 1,10,100: time and cost, on Dataflow or --runner's cluster.
      worker_gbps: a worker's network in Gbit/s (10^9 bits), each way.
      worker_hour_price: of a worker with 2 vCPUs and 8 GB, in any currency.

    Returns:
      The plan, with its arrays (shapes in elements, dtypes, chunks), bytes read and written, the bound on memory, what
      is lossy or left out, and all problems.

    Raises:
      Refused: there is nothing to plan: no such source, no such mesh.

    Example:
      >>> plan = wb.plan("models/qwen3", mesh="fsdp=8")
      >>> plan.problems
      ()
      >>> {array.key: array.shape for array in plan.arrays}["params.params.decoder.layers.mlp.wi_0.kernel"]
      (64, 2, 128)
    """

def quantize(
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    layers: str | None = None,
    experts: str | None = None,
    vocab_rows: int | None = None,
    max_shard_size: int | str | None = None,
    unit_bytes: int | str = 134217728,
    full_paths: bool | None = None,
    format: str = "fp8",
    like: str | None = None,
    lora: str | Sequence[str] = (),
    maxtext_model: str | None = None,
    param_scan_axis: int | None = None,
    step: int | None = None,
    multimodal: bool | None = None,
    mtp: bool = False,
    hf_token_secret: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    create_pr: bool = False,
    beam: Sequence[str] = (),
    progress: bool | Report = True,
) -> Merged | Exported:
    """Writes a release whose linear layers are FP8 in blocks of 128 × 128, as DeepSeek's are: for vLLM, SGLang and
    transformers.

    Args:
      source: a release, or an Orbax checkpoint, which is exported in the same pass.
      output, beam, progress: as for `export`.
      layers: of the release take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and their rows of the router.
      vocab_rows: of the vocabulary take the first rows alone.
      max_shard_size: bytes of tensors in a file, such as 5GB (default: as source=).
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      full_paths: whether records and model cards name sources by their full paths, or by their names alone (default:
        paths in a folder, names on the hub; in gs:// names for what lies in this machine's folders).
      format: what the weights of linear layers become.
      like: a release in FP8, whose scales come back where values didn't change; of an Orbax checkpoint as for export.
      lora: a PEFT adapter to merge on the way: a folder, gs:// or hf://; or a list of them.
      maxtext_model: of an Orbax checkpoint: the MaxText model, where neither it nor config.json settles it.
      param_scan_axis: of an Orbax checkpoint: where the layers are stacked, where its shapes fit several axes.
      step: of an Orbax checkpoint: which step, where the root has several.
      multimodal: of an Orbax checkpoint: true: with vision and audio towers, those of like= where the checkpoint has
        none; false: the language model alone.
      mtp: of an Orbax checkpoint: with like's multi-token-prediction layers where the checkpoint has none.
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      resume: go on with what a stopped command staged.
      overwrite: replace what is there, or throw away what a stopped command staged.
      create_pr: on the hub, open a pull request.

    Returns:
      Where the new release is, and what it took.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.quantize("models/qwen3", "smaller", progress=False)
      <weightbeam.Merged: .../smaller: 39 tensors in 1 file, ...>
    """

def reshard(
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    layers: str | None = None,
    experts: str | None = None,
    state: str = "full",
    save_dtype: str = "keep",
    moment_dtype: str = "keep",
    scan_layers: bool | None = None,
    param_scan_axis: int | None = None,
    mesh: str | Sequence[str] = (),
    sharding_rules: str | Path | Mapping[str, Any] | Sequence[Any] | None = None,
    maxtext: str | None = None,
    maxtext_model: str | None = None,
    family: str | None = None,
    use_ocdbt: bool | None = None,
    use_zarr3: bool | None = None,
    compression: str | None = None,
    unit_bytes: int | str = 134217728,
    step: int | None = None,
    lora: str | Sequence[str] = (),
    lora_alpha: float | None = None,
    full_paths: bool | None = None,
    like: str | None = None,
    maxtext_config: str | None = None,
    hf_token_secret: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
) -> Resharded:
    """Writes an Orbax checkpoint anew: for other meshes, with layers stacked or apart, in another dtype or storage,
    with or without the optimizer.

    Args:
      source: the checkpoint, anyone's: its root, a step or the item, in a folder or in `gs://`.
      output: a folder or `gs://bucket/folder`; it must not hold that step yet.
      beam, progress: as for `convert`.
      layers: take these layers alone, such as 0:4 or 0:2,58:61; they are numbered anew.
      experts: of each layer take these experts alone, such as 0:8, and what the router has of them.
      state: params leaves out the optimizer and the rest, and calls the weights params.params.
      save_dtype: dtype of the weights; computed in float32, cast once.
      moment_dtype: dtype of the optimizer's moments.
      scan_layers: stack the layers of a kind in one array, or take them apart (default: as they are).
      param_scan_axis: where the stacked axis goes (default: where it is).
      mesh: the mesh that loads it, such as fsdp=64; or a list of them (default: chunks stay as they are).
      sharding_rules: your logical_axis_rules, as for convert.
      maxtext: the version of MaxText whose tree and names of axes are written (default: the source's).
      maxtext_model: the MaxText model, where config.json can't settle it, or in place of like=.
      family: the table, as for convert (default: by config.json).
      use_ocdbt: one database, or a folder for each array (Pathways: false; default: as the source).
      use_zarr3: zarr version 3 or 2 (Pathways: false; default: as the source).
      compression: of every array (default: as it is where chunks are copied, else none).
      unit_bytes: bound on the memory of one unit of work, such as 64M (default: 128MiB, and smaller units where the
        workers are known).
      step: which step, where the source has several; and the one that is written (default: the source's).
      lora: an adapter that MaxText trained, to merge: its Orbax checkpoint; or a list of them.
      lora_alpha: alpha of an adapter that MaxText trained, if its metadata lack it.
      full_paths: whether records and model cards name sources by their full paths, or by their names alone (default:
        paths in a folder, names on the hub; in gs:// names for what lies in this machine's folders).
      like: a release of the model, if the checkpoint doesn't remember one: its table names axes and layers.
      maxtext_config: the run's MaxText configuration (.yml), in place of like=.
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      resume: go on with what a stopped command staged.
      overwrite: replace what is there, or throw away what a stopped command staged.

    Returns:
      Where the new checkpoint is, what it took, and how each array went, copied or cut anew.

    Raises:
      Refused: it can't be done; nothing was written. `problems` has all of them.
      Failed: it failed on the way; what is done is kept for `resume`.

    Example:
      >>> wb.reshard("ckpt", "ckpt8", mesh="fsdp=8", scan_layers=False, progress=False)
      <weightbeam.Resharded: .../ckpt8/0/items: 26 arrays (step among them), ...>
    """

def verify(
    checkpoint: str | PathLike[str],
    source: str | PathLike[str] | None = None,
    *,
    hf_token_secret: str | None = None,
    like: str | None = None,
    accept: str | Sequence[str] = (),
    lora: str | Sequence[str] = (),
    sample: float = 1.0,
    maxtext_model: str | None = None,
    scan_layers: bool | None = None,
    param_scan_axis: int | None = None,
    family: str | None = None,
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
      beam: Beam's options, as on the command line: `--direct_num_workers=N`, how many threads compare.
      progress: shown on standard error, told to a callback, or False for neither.
      hf_token_secret: the version of a secret in Secret Manager that holds the hub's token, for all workers.
      like: of an export: the release that its towers were taken from, if it has moved since.
      accept: of an export: a field of config.json, or another small file, that may be another than the export wrote.
      lora: an adapter that was merged, if it has moved since.
      sample: compare only this share of each array's tensors, such as 0.05, but one at least.
      maxtext_model: the MaxText model, such as llama3.1-8b, where neither config.json nor the checkpoint can settle it.
      scan_layers: whether layers are stacked (default: as the checkpoint says).
      param_scan_axis: where the stacked axis is (default: as the checkpoint says).
      family: the table; a file of your own has to be named, also where the checkpoint names it (default: the
        checkpoint's).

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
