"""No command drops an array that the family's table names: every family, both versions of MaxText.

What each takes is compared with what the checkpoint holds, so that a rule that left an array out without a word would be
seen, whatever it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import convert, given

import weightbeam
from weightbeam.formats.orbax.source import open_orbax
from weightbeam.model_mappings.versions import VERSIONS
from weightbeam.pipelines.commands import diff, export, quantize, reshard, verify

CASES = [case for case in given() if case != "deepseek3-mtp-standalone"]
DIFFERENT = ("deepseek3", "deepseek3.2", "deepseek4", "qwen3-next")  # the trees of the versions
CONSTANT = ".mhc_norm."  # ones in MaxText, of which a release has no tensor
COLLECTIONS = ("params.MoEBiasVar.", "params.Tid2EidVar.")  # whose variables parameters repeat


@pytest.mark.parametrize(
    ("case", "version", "scan"),
    [
        (case, version, scan)
        for number, case in enumerate(CASES)
        for turn, version in enumerate(VERSIONS)
        for scan in (["true", "false"] if case in DIFFERENT else [["true", "false"][(number + turn) % 2]])
        if case in DIFFERENT or turn == number % len(VERSIONS)
        if not (case == "gemma4-small" and scan == "true")
    ],
)
def test_every_array_is_taken(generated: Path, tmp_path: Path, case: str, version: str, scan: str) -> None:
    """By each command that reads a checkpoint; what is said to repeat another one may be left to that one."""
    release, made = generated / "cases" / case, tmp_path / "out"
    convert(release, made, "--maxtext", version, "--scan_layers", scan)
    held = {key for key in open_orbax(made).arrays if key.startswith("params.")}
    variables = {f"params.params.{key.split('.', 2)[2]}" for key in held if key.startswith(COLLECTIONS)}
    repeated = held & variables
    constant = {key for key in held if CONSTANT in key}
    assert bool(repeated) == (version == VERSIONS[0] and case in DIFFERENT[:3])

    for state in ("full", "params"):
        assert held <= {array.key for array in reshard.plan(str(made), state=state).plan.arrays}
    for other in ({"state": "params"}, {"maxtext": VERSIONS[1]}, {"maxtext": VERSIONS[0]}):
        found = reshard.plan(str(made), **other).plan
        assert not found.problems
        assert held <= {key for array in found.arrays for key in array.parts[0].tensors} | set(found.dropped)
        assert held & set(found.dropped) <= repeated
    for planned in (export.plan(open_orbax(made), like=str(release)), quantize.plan(str(made), like=str(release))):
        assert held - repeated - constant <= {array.key for array in planned.plan.arrays}
    assert held <= set(weightbeam.open(str(made)))

    checked = verify.verify(str(made), str(release), progress=False)
    assert checked.ok
    assert held == set(checked.findings)
    compared = diff.diff(str(made), str(release), tolerance=1e9, progress=False)
    assert held - repeated - constant <= set(compared.tensors)
