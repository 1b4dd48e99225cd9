"""A release that is compared with others while it is written: what is found is what `diff` finds afterwards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from quantised import fp8_llama
from servers.clients import asking
from servers.gcs import FakeGcs
from support import F32, LLAMA, QWEN3_MOE, convert, peft_adapter, random_tensors, save

import weightbeam as wb
from weightbeam.formats.storage import LocalFolder, open_store
from weightbeam.pipelines.diff import compare_pairs, open_pair
from weightbeam.transforms.baselines import FILE, compared_with, read_found
from weightbeam.transforms.differences import Difference

COUNTED = ("elements", "different", "beyond", "largest")  # what doesn't depend on how a tensor is cut


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two families a release, its checkpoint, and another release of the same shapes."""
    folder = tmp_path_factory.mktemp("made")
    for name, config in (("llama", LLAMA), ("moe", QWEN3_MOE)):
        tensors = random_tensors(config)
        save(folder / name / "like", config, tensors)
        convert(folder / name / "like", folder / name / "ckpt", "--save_dtype", "float32")
        other = {key: values.astype(F32) * np.float32(1.01) for key, values in tensors.items()}
        other["model.norm.weight"] = tensors["model.norm.weight"]
        other["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]
        other["extra.weight"] = np.ones(3, np.float32)
        save(folder / name / "other", config, other)
    return folder


def check(release: Path | str, url: str, found: dict[str, Difference]) -> dict[str, Difference]:
    """What was found says of every tensor that both have what a comparison of both says; returns that."""
    pair = open_pair(url, str(release))
    told = {name: each.difference for name, each in compare_pairs([pair])[0].tensors.items() if each.difference}
    assert found.keys() == told.keys()
    for name, difference in told.items():
        assert [getattr(found[name], field) for field in COUNTED] == [getattr(difference, field) for field in COUNTED]
        for field in ("total", "squares", "product", "left", "right"):
            assert math.isclose(getattr(found[name], field), getattr(difference, field), rel_tol=1e-4, abs_tol=1e-12)
    return told


@pytest.mark.parametrize("family", ["llama", "moe"])
def test_an_export(made: Path, tmp_path: Path, family: str) -> None:
    """In many units and with every bundle done twice; the release is the one that is written without it."""
    folder, output = made / family, tmp_path / "back"
    baselines = [str(folder / name) for name in ("like", "other")]
    with compared_with([*baselines, str(tmp_path / "nothing")]):
        wb.export(
            str(folder / "ckpt"),
            str(output),
            unit_bytes=100_000,
            beam=["--direct_runner_bundle_repeat=1"],
            progress=False,
        )
    found = read_found(LocalFolder(str(output)))
    assert found.keys() == set(baselines)
    same, differs = (check(output, url, found[url]) for url in baselines)
    assert not any(difference.different for difference in same.values())
    assert {name for name, difference in differs.items() if not difference.different} == {"model.norm.weight"}
    assert "model.embed_tokens.weight" not in differs
    wb.export(str(folder / "ckpt"), str(tmp_path / "plain"), unit_bytes=100_000, progress=False)
    assert not (tmp_path / "plain" / FILE).exists()
    for path in (tmp_path / "plain").iterdir():
        assert (output / path.name).read_bytes() == path.read_bytes()


def test_with_quantised_values(made: Path, tmp_path: Path) -> None:
    """A baseline in FP8 is compared by its values."""
    baseline = str(fp8_llama(tmp_path / "fp8")[0])
    with compared_with([baseline]):
        wb.export(str(made / "llama" / "ckpt"), str(tmp_path / "back"), progress=False)
    found = read_found(LocalFolder(str(tmp_path / "back")))[baseline]
    assert any(difference.different for difference in check(tmp_path / "back", baseline, found).values())


def test_a_merge(made: Path, tmp_path: Path) -> None:
    """Adapters are in the values that are compared."""
    like = made / "llama" / "like"
    q_proj = "model.layers.0.self_attn.q_proj"
    adapter, _ = peft_adapter(tmp_path / "adapter", {q_proj: random_tensors(LLAMA)[f"{q_proj}.weight"].shape})
    with compared_with([str(like)]):
        wb.merge(str(like), str(tmp_path / "merged"), lora=str(adapter), progress=False)
    found = check(tmp_path / "merged", str(like), read_found(LocalFolder(str(tmp_path / "merged")))[str(like)])
    changed = {name for name, difference in found.items() if difference.different}
    assert changed == {f"{q_proj}.weight"}


def test_what_wasnt_found_is_looked_for(made: Path, tmp_path: Path) -> None:
    """A quantised tensor isn't compared on the way, and one of which a part is known isn't known: both are read
    afterwards, and nothing else is.
    """
    like, output = str(made / "llama" / "like"), tmp_path / "fp8"
    with compared_with([like]):
        wb.quantize(str(made / "llama" / "ckpt"), str(output), like=like, progress=False)
    found = read_found(LocalFolder(str(output)))[like]
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


@pytest.fixture
def gcs() -> Iterator[FakeGcs]:
    with FakeGcs("bucket") as server, asking(server):
        yield server


def test_in_a_bucket(made: Path, gcs: FakeGcs) -> None:
    """Both the release and the one that it is compared with."""
    like = made / "llama" / "like"
    for path in like.iterdir():
        gcs.put("bucket", f"like/{path.name}", path.read_bytes())
    with compared_with(["gs://bucket/like"]):
        wb.export(str(made / "llama" / "ckpt"), "gs://bucket/back", progress=False)
    found = read_found(open_store("gs://bucket/back"))["gs://bucket/like"]
    assert not any(difference.different for difference in check("gs://bucket/back", "gs://bucket/like", found).values())


def test_a_resumed_export(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first attempt wrote without comparing isn't made again; a sum that lacks it isn't taken for the whole."""
    like, output = str(made / "llama" / "like"), tmp_path / "back"
    arguments = dict(unit_bytes=30_000, progress=False)
    from weightbeam.formats import release_target

    write, written = release_target.write_unit, []

    def fail(*given: object) -> None:
        if len(written) > 1:
            raise OSError("the disk is full")
        written.append(given)
        write(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(release_target, "write_unit", fail)
    with pytest.raises(wb.Failed):
        wb.export(str(made / "llama" / "ckpt"), str(output), **arguments)
    monkeypatch.undo()
    with compared_with([like]):
        wb.export(str(made / "llama" / "ckpt"), str(output), resume=True, **arguments)
    found = read_found(LocalFolder(str(output)))[like]
    pair = open_pair(like, str(output))
    whole = {name for name, each in found.items() if each.elements == math.prod(pair.first[name].shape)}
    assert whole < pair.first.keys()
    (told,) = compare_pairs([pair], known=[found])
    assert {each.status for each in told.tensors.values()} == {"equal"}
    assert json.loads((output / FILE).read_text()).keys() == {like}
