"""A release that is compared with others while it is written: what is found is what `diff` finds afterwards."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from quantised import fp8_llama
from servers.gcs import FakeGcs
from support import F32, LLAMA, QWEN3_MOE, convert, peft_adapter, random_tensors, read_tensors, save

import weightbeam as wb
from weightbeam.formats.safetensors import Tensor, open_hf
from weightbeam.formats.storage import LocalFolder, open_store
from weightbeam.formats.targets import release as release_target
from weightbeam.model_mappings.boxes import Box, whole
from weightbeam.model_mappings.registry import FAMILIES
from weightbeam.pipelines.checking.pairs import open_pair
from weightbeam.pipelines.checking.pairwise import compare_pairs
from weightbeam.transforms.comparing import baselines, differences
from weightbeam.transforms.comparing.baselines import FILE, Baseline, baseline_id, read_found
from weightbeam.transforms.comparing.differences import Difference
from weightbeam.transforms.planning.options import ToHub

COUNTED = ("elements", "different", "beyond", "largest")  # what doesn't depend on how a tensor is cut


# of which units of `UNIT_BYTES` take parts
WIDE = LLAMA | dict(vocab_size=4096, intermediate_size=1024)
UNIT_BYTES = 220_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of some models a release, its checkpoint, and another release of nearly the same shapes."""
    folder = tmp_path_factory.mktemp("made")
    for name, config in (("llama", LLAMA), ("moe", QWEN3_MOE), ("wide", WIDE)):
        tensors = random_tensors(config)
        save(folder / name / "like", config, tensors)
        convert(folder / name / "like", folder / name / "ckpt", "--save_dtype", "float32")
        other = {key: values.astype(F32) * np.float32(1.01) for key, values in tensors.items()}
        other["model.norm.weight"] = tensors["model.norm.weight"]
        other["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]
        other["extra.weight"] = np.ones(3, np.float32)
        save(folder / name / "other", config, other)
    return folder


def assert_as_compared(release: Path | str, url: str, found: dict[str, Difference]) -> dict[str, Difference]:
    """What was found says of every tensor that both have what a comparison of both says; returns that."""
    pair = open_pair(url, str(release))
    told = {name: each.difference for name, each in compare_pairs([pair])[0].tensors.items() if each.difference}
    assert found.keys() == told.keys()
    for name, difference in told.items():
        assert [getattr(found[name], field) for field in COUNTED] == [getattr(difference, field) for field in COUNTED]
        for field in ("total", "squares", "product", "left", "right"):
            assert math.isclose(getattr(found[name], field), getattr(difference, field), rel_tol=1e-4, abs_tol=1e-12)
    return told


@pytest.mark.parametrize("name", ["llama", "moe", "wide"])
@pytest.mark.parametrize("box_bytes", [differences.BOX_BYTES, 4096])
def test_an_export(made: Path, tmp_path: Path, name: str, box_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In many units and with every bundle done twice; the release is the one that is written without it."""
    folder, output = made / name, tmp_path / "back"
    monkeypatch.setattr(differences, "BOX_BYTES", box_bytes)
    boxes: set[Box] = set()
    compare = baselines._compare
    monkeypatch.setattr(baselines, "_compare", lambda *given: (boxes.add(given[2]), compare(*given))[1])
    others = [str(folder / other) for other in ("like", "other")]
    wb.export(
        str(folder / "ckpt"),
        str(output),
        how=ToHub(compared_with=(*others, str(tmp_path / "nothing"))),
        unit_bytes=UNIT_BYTES,
        beam=["--direct_runner_bundle_repeat=1"],
        progress=False,
    )
    assert any(start for box in boxes for start, _ in box) or (name != "wide" and box_bytes > 4096)
    found = read_found(LocalFolder(str(output)))
    told = {url: baseline_id(open_hf(url)) for url in others}
    assert found.keys() == set(told.values())
    same, differs = (assert_as_compared(output, url, found[told[url]]) for url in others)
    assert not any(difference.different for difference in same.values())
    assert {name for name, difference in differs.items() if not difference.different} == {"model.norm.weight"}
    assert "model.embed_tokens.weight" not in differs
    wb.export(str(folder / "ckpt"), str(tmp_path / "plain" / "back"), unit_bytes=UNIT_BYTES, progress=False)
    assert not (tmp_path / "plain" / "back" / FILE).exists()
    for path in (tmp_path / "plain" / "back").iterdir():
        assert (output / path.name).read_bytes() == path.read_bytes()


def test_with_quantised_values(made: Path, tmp_path: Path) -> None:
    """A baseline in FP8 is compared by its values."""
    baseline = str(fp8_llama(tmp_path / "fp8")[0])
    wb.export(
        str(made / "llama" / "ckpt"), str(tmp_path / "back"), how=ToHub(compared_with=(baseline,)), progress=False
    )
    found = read_found(LocalFolder(str(tmp_path / "back")))[baseline_id(open_hf(baseline))]
    assert any(difference.different for difference in assert_as_compared(tmp_path / "back", baseline, found).values())


def test_a_merge(made: Path, tmp_path: Path) -> None:
    """Adapters are in the values that are compared."""
    like = made / "llama" / "like"
    q_proj = "model.layers.0.self_attn.q_proj"
    adapter, _ = peft_adapter(tmp_path / "adapter", {q_proj: random_tensors(LLAMA)[f"{q_proj}.weight"].shape})
    wb.merge(
        str(like), str(tmp_path / "merged"), lora=str(adapter), how=ToHub(compared_with=(str(like),)), progress=False
    )
    found = assert_as_compared(
        tmp_path / "merged",
        str(like),
        read_found(LocalFolder(str(tmp_path / "merged")))[baseline_id(open_hf(str(like)))],
    )
    changed = {name for name, difference in found.items() if difference.different}
    assert changed == {f"{q_proj}.weight"}


@pytest.mark.parametrize("other", ["fp8", "like"])
def test_a_merge_into_codes(made: Path, tmp_path: Path, other: str) -> None:
    """Codes aren't values: what is carried as codes isn't compared on the way, whatever a baseline has there."""
    base = fp8_llama(tmp_path / "fp8")[0]
    baseline = str(base if other == "fp8" else made / "llama" / "like")
    q_proj = "model.layers.0.self_attn.q_proj"
    adapter, _ = peft_adapter(tmp_path / "adapter", {q_proj: random_tensors(LLAMA)[f"{q_proj}.weight"].shape})
    wb.merge(
        str(base), str(tmp_path / "merged"), lora=str(adapter), how=ToHub(compared_with=(baseline,)), progress=False
    )
    found = read_found(LocalFolder(str(tmp_path / "merged")))[baseline_id(open_hf(baseline))]
    pair = open_pair(baseline, str(tmp_path / "merged"))
    assert {"model.norm.weight", f"{q_proj}.weight"} <= found.keys() < pair.first.keys()
    told, wanted = compare_pairs([pair], known=[found])[0], compare_pairs([pair])[0]
    for name, verdict in wanted.tensors.items():
        assert (told.tensors[name].status, told.tensors[name].difference.different) == (
            verdict.status,
            verdict.difference.different,
        ), name


def test_another_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is found under any name that the family's table takes for the same, whichever the baseline has."""
    family = next(family for family in FAMILIES if "model.language_model" in family.aliases)
    monkeypatch.setattr(baselines, "family_of", lambda config: family)  # for which this is too little of a model
    long, short = "model.language_model", family.aliases["model.language_model"]
    held = {f"{long}.norm.weight": np.ones(8, np.float32), "codes": np.ones(8, np.uint8)}
    baseline = Baseline(str(save(tmp_path / "hf", {"model_type": "a"}, held)))
    for spelling in (long, short):
        wanted = Tensor(f"{spelling}.norm.weight", np.dtype(np.float32), (8,), "", 0)
        name, operand = baseline.find(wanted) or ("", None)
        assert (name, operand and operand.shape) == (f"{short}.norm.weight", (8,))
        assert baseline.find(dataclasses.replace(wanted, shape=(4, 2))) is None
        assert baseline.find(dataclasses.replace(wanted, name=f"{spelling}.norm")) is None
    assert baseline.find(Tensor("codes", np.dtype(np.uint8), (8,), "", 0)) is None


def test_a_baseline_that_cant_be_read(made: Path, tmp_path: Path) -> None:
    """Where it can't be opened, the other one is compared, and the export is none the worse. Where it gets lost on the
    way, nobody tries to read it again.
    """
    closed, like = tmp_path / "closed", str(made / "llama" / "like")
    closed.mkdir()
    (closed / "config.json").mkdir()
    wb.export(
        str(made / "llama" / "ckpt"),
        str(tmp_path / "back"),
        how=ToHub(compared_with=(str(closed), like)),
        progress=False,
    )
    assert_as_compared(
        tmp_path / "back", like, read_found(LocalFolder(str(tmp_path / "back")))[baseline_id(open_hf(like))]
    )
    lost = str(shutil.copytree(like, tmp_path / "lost"))
    opened = {url: Baseline(url) for url in (lost, like)}
    for file in Path(lost).glob("*.safetensors"):
        file.unlink()
    rows = [
        (Tensor(name, values.dtype, values.shape, "", 0), whole(values.shape), values)
        for name, values in read_tensors(Path(like)).items()
    ]
    found = baselines.compare_rows(opened, rows)
    assert opened[lost].is_lost
    assert found[lost] == {}
    assert assert_as_compared(like, like, found[like])
    assert opened[lost].find(rows[0][0]) is None


def test_what_wasnt_found_is_looked_for(made: Path, tmp_path: Path) -> None:
    """A quantised tensor isn't compared on the way, and one of which a part is known isn't known: both are read
    afterwards, and nothing else is.
    """
    like, output = str(made / "llama" / "like"), tmp_path / "fp8"
    wb.quantize(str(made / "llama" / "ckpt"), str(output), like=like, how=ToHub(compared_with=(like,)), progress=False)
    found = read_found(LocalFolder(str(output)))[baseline_id(open_hf(like))]
    pair = open_pair(like, str(output))
    missing = pair.first.keys() - found.keys()
    assert "model.layers.0.mlp.up_proj.weight" in missing
    assert "model.norm.weight" in found
    found["model.norm.weight"] = Difference(elements=1)
    read: set[str] = set()
    operands = {
        name: type(each)(
            each.shape, each.dtype, each.order, each.grain, lambda box, n=name, e=each: (read.add(n), e.read(box))[1]
        )
        for name, each in pair.first.items()
    }
    watched = type(pair)(pair.a, pair.b, operands, pair.second, {})
    (told,) = compare_pairs([watched], known=[found])
    assert read == missing | {"model.norm.weight"}
    assert told.tensors == compare_pairs([pair])[0].tensors


def test_in_a_bucket(made: Path, gcs: FakeGcs) -> None:
    """Both the release and the one that it is compared with."""
    like = made / "llama" / "like"
    for path in like.iterdir():
        gcs.put("bucket", f"like/{path.name}", path.read_bytes())
    wb.export(
        str(made / "llama" / "ckpt"), "gs://bucket/back", how=ToHub(compared_with=("gs://bucket/like",)), progress=False
    )
    found = read_found(open_store("gs://bucket/back"))[baseline_id(open_hf("gs://bucket/like"))]
    assert not any(
        difference.different
        for difference in assert_as_compared("gs://bucket/back", "gs://bucket/like", found).values()
    )


def test_a_resumed_export(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first attempt wrote without comparing isn't made again; a sum that lacks it isn't taken for the whole."""
    like, output = str(made / "wide" / "like"), tmp_path / "back"
    arguments = dict(unit_bytes=UNIT_BYTES, progress=False, beam=["--direct_num_workers=1"])
    write, written = release_target.write_unit, []

    def fail(*given: object) -> None:
        if len(written) > 1:
            raise OSError("the disk is full")
        written.append(given)
        write(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(release_target, "write_unit", fail)
    with pytest.raises(wb.Failed):
        wb.export(str(made / "wide" / "ckpt"), str(output), **arguments)
    monkeypatch.undo()
    wb.export(str(made / "wide" / "ckpt"), str(output), how=ToHub(resume=True, compared_with=(like,)), **arguments)
    found = read_found(LocalFolder(str(output)))[baseline_id(open_hf(like))]
    pair = open_pair(like, str(output))
    part = {name for name, each in found.items() if each.elements < math.prod(pair.first[name].shape)}
    assert part
    (told,) = compare_pairs([pair], known=[found])
    assert {each.status for each in told.tensors.values()} == {"equal"}
    assert json.loads((output / FILE).read_text()).keys() == {baseline_id(open_hf(like))}
