"""An adapter of MaxText's as one of PEFT's: the exact inverse of the way there, and an adapter that PEFT loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from safetensors.numpy import save_file
from servers.clients import asking
from servers.gcs import FakeGcs
from servers.hub import FakeHub
from support import call, decoded, read_config, read_file

import weightbeam as wb
from weightbeam.formats.adapters import merge, open_adapter
from weightbeam.formats.adapters.ties import find_ties
from weightbeam.formats.orbax.source import open_orbax
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.storage import open_store
from weightbeam.formats.targets.release import ReleaseTarget
from weightbeam.model_mappings.config import Config
from weightbeam.pipelines.commands.export import export, plan
from weightbeam.pipelines.running.carry import carry
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.transforms.planning.adapters import is_adapter, read_adapter
from weightbeam.transforms.planning.options import Delivery
from weightbeam.transforms.stages.staged import load


def there(folder: Path, output: Path, *options: str) -> Path:
    """A PEFT adapter as MaxText's checkpoint."""
    only = ("--adapter_only", "true", "--save_dtype", "float32", "--lora", folder / "adapter")
    assert call("convert", "--source", folder / "base", "--output", output, *only, *options) == 0
    return output


def back(checkpoint: Path, base: Path, output: Path, **options: object) -> Path:
    """MaxText's checkpoint as a PEFT adapter."""
    assert is_adapter(open_orbax(checkpoint))
    export(str(checkpoint), str(output), like=str(base), progress=False, **options)
    return output


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("plain", ("--maxtext_model", "llama3.1-8b")),
        ("one-layer", ("--maxtext_model", "llama2-7b", "--scan_layers", "false")),
        ("one-layer", ("--maxtext_model", "llama3.1-8b", "--param_scan_axis", "0")),
        ("rslora", ("--maxtext_model", "llama3.1-8b")),
        ("patterns", ("--maxtext_model", "llama3.1-8b")),
    ],
)
def test_there_and_back(written: Path, tmp_path: Path, case: str, options: tuple[str, ...]) -> None:
    """What it adds to each weight is what it was; of a plain adapter the factors too: all but the query's, whose factor
    isn't a power of two, to the bit.
    """
    folder = written / case
    made = back(there(folder, tmp_path / "ckpt", *options), folder / "base", tmp_path / "adapter")
    given, found = (read_file(adapter / "adapter_model.safetensors") for adapter in (folder / "adapter", made))
    assert set(given) == set(found)
    if case in ("plain", "one-layer"):
        exact = [name for name in given if np.array_equal(given[name], found[name])]
        assert all("q_proj.lora_B" in name for name in set(given) - set(exact))
        for name in given:
            np.testing.assert_allclose(found[name], given[name], rtol=2e-7)
    encodings = open_source(open_hf(folder / "base")).encodings
    ties = find_ties(Config(), encodings)
    merged = [merge(encodings, [open_adapter(adapter)], {}, "llama", ties) for adapter in (folder / "adapter", made)]
    assert not merged[1].problems
    for name in merged[0].touched:
        np.testing.assert_allclose(
            decoded(merged[1].encodings[name]), decoded(merged[0].encodings[name]), rtol=1e-5, atol=1e-6
        )


def test_peft_loads_it(written: Path, tmp_path: Path) -> None:
    """And merges it to what it merged before."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = written / "one-layer"
    made = back(
        there(folder, tmp_path / "ckpt", "--maxtext_model", "llama3.1-8b"), folder / "base", tmp_path / "adapter"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    merged = peft.PeftModel.from_pretrained(model, made).merge_and_unload().state_dict()
    for name, values in read_file(folder / "merged.safetensors").items():
        np.testing.assert_allclose(merged[name].numpy(), values, rtol=2e-6, atol=2e-6)


ODD = [
    *(("lora", {"lora_rank": value}) for value in ([4], {}, "4", None, 4.0, 10**400)),
    *(
        ("lora", {"lora_alpha": value})
        for value in (float("inf"), float("nan"), 10**400, 1e308, 1e-320, "8", [8], True, 0)
    ),
    *(("options", {"param_scan_axis": value}) for value in (None, "x", [1], {}, float("nan"), True)),
    *(("options", {"maxtext_model": value}) for value in (True, -1, [1], {}, float("nan"))),
]


@pytest.mark.parametrize(("where", "changed"), ODD, ids=lambda each: str(each)[:40])
def test_odd_metadata_are_refused(
    adapter: Path, written: Path, tmp_path: Path, where: str, changed: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, before any work, with --lora_alpha, too; it is the adapter that is named."""
    shutil.copytree(adapter, tmp_path / "ckpt")
    for path in (tmp_path / "ckpt" / "0").rglob("*"):
        if path.name == ("_CHECKPOINT_METADATA" if where == "lora" else "conversion.json"):
            said = json.loads(path.read_text())
            about = said["custom_metadata"] if where == "lora" else said
            about[where] |= changed
            path.write_text(json.dumps(said))
    base = written / "plain" / "base"
    for options in ([], ["--lora_alpha", "8"]):
        assert call("export", tmp_path / "ckpt", tmp_path / "out", "--like", base, *options) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "Traceback" not in said
        assert str(tmp_path / "ckpt") in said
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def adapter(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return there(written / "plain", tmp_path_factory.mktemp("adapter") / "ckpt", "--maxtext_model", "llama3.1-8b")


def test_without_metadata_alpha_must_be_named(written: Path, tmp_path: Path) -> None:
    """As in adapters of MaxText's own converter, which forgets it."""
    folder = written / "plain"
    checkpoint = there(folder, tmp_path / "ckpt", "--maxtext_model", "llama3.1-8b")
    for path in (checkpoint / "0" / "_CHECKPOINT_METADATA", checkpoint / "0" / "items" / "_CHECKPOINT_METADATA"):
        metadata = json.loads(path.read_text())
        del metadata["custom_metadata"]["lora"]
        path.write_text(json.dumps(metadata))
    with pytest.raises(Refused, match=r"\blora_alpha"):
        back(checkpoint, folder / "base", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    back(checkpoint, folder / "base", tmp_path / "adapter", lora_alpha=6)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    with pytest.raises(Refused, match="exists"):
        back(checkpoint, folder / "base", tmp_path / "adapter", lora_alpha=6)


def test_without_a_record_the_axis_of_the_layers_follows_from_the_shapes(written: Path, tmp_path: Path) -> None:
    """As training leaves it, or a copy of `items` alone; an axis that is named is taken as it is."""
    folder, axis = written / "plain", ("--param_scan_axis", "0")
    checkpoint = there(folder, tmp_path / "ckpt", "--maxtext_model", "llama3.1-8b", *axis)
    wanted = read_file(back(checkpoint, folder / "base", tmp_path / "wanted") / "adapter_model.safetensors")
    items = shutil.copytree(checkpoint / "0" / "items", tmp_path / "copy" / "0" / "items").parents[1]
    export = ("export", items, tmp_path / "adapter", "--like", folder / "base", "--maxtext_model", "llama3.1-8b")
    for named in ((), axis):
        assert call(*export, *named, "--lora_alpha", "8", "--overwrite") == 0
        found = read_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert {name: values.tobytes() for name, values in found.items()} == {
            name: values.tobytes() for name, values in wanted.items()
        }
    assert call(*export, "--param_scan_axis", "1", "--lora_alpha", "8", "--overwrite") == 2


def test_the_command(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """`export` sees that it is an adapter; the checkpoint remembers the release that it is for."""
    folder = written / "plain"
    checkpoint = there(folder, tmp_path / "ckpt", "--maxtext_model", "llama3.1-8b")
    assert call("export", "--source", checkpoint, "--output", tmp_path / "adapter") == 0
    assert "a PEFT adapter of rank 4 with alpha 6" in capsys.readouterr().out
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert call("export", "--source", checkpoint, "--output", tmp_path / "adapter") == 2
    assert (
        call(
            "export", "--source", checkpoint, "--output", tmp_path / "adapter", "--overwrite", "--like", folder / "base"
        )
        == 0
    )


def test_into_a_bucket_and_onto_the_hub(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The folder's files, byte for byte but for what names the base and the source: whole at once in a bucket, one
    commit or a pull request on the hub. Nothing else is left anywhere, and nothing of anybody else's is replaced.
    """
    checkpoint = there(written / "plain", tmp_path / "ckpt", "--maxtext_model", "llama3.1-8b")
    assert call("export", checkpoint, tmp_path / "adapter") == 0

    def same(files: dict[str, bytes]) -> dict[str, object]:
        """What of them is the same wherever they are."""
        assert files.keys() == {"adapter_model.safetensors", "adapter_config.json", "weightbeam.json", "README.md"}
        assert json.loads(files["weightbeam.json"])["rank"] == 4
        config = json.loads(files["adapter_config.json"]) | {"base_model_name_or_path": ""}
        return {"weights": files["adapter_model.safetensors"], "config": config}

    wanted = same({path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()})
    with FakeGcs("bucket") as gcs, asking(gcs):
        objects = gcs.objects["bucket"]
        for options, status in (((), 0), ((), 2), (("--overwrite",), 0)):
            assert call("export", checkpoint, "gs://bucket/run/adapter", *options) == status
            held = {name.removeprefix("run/adapter/"): bytes(made.data) for name, made in objects.items()}
            assert same(held) == wanted
        assert "gs://bucket/run/adapter: exists" in capsys.readouterr().err
        stranger = open_store("gs://bucket/run/theirs")
        stranger.write("model.safetensors", b"")
        assert call("export", checkpoint, "gs://bucket/run/theirs", "--overwrite") == 2
        assert stranger.exists("model.safetensors")
    assert call("export", checkpoint, tmp_path / "x", "--create_pr") == 2
    with FakeHub() as hub:
        for name, value in hub.env("hf_secret").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        assert call("export", checkpoint, "hf://org/adapter") == 2  # the token isn't known
        hub.users.add("hf_secret")
        hub.writers.add("hf_secret")
        assert call("export", checkpoint, "hf://org/adapter") == 0
        assert "published" in capsys.readouterr().out
        files = hub.repositories["org/adapter"].branches["main"].files
        held = {name: bytes(made.data) for name, made in files.items() if name != ".gitattributes"}
        assert same(held) == wanted
        asked = len(hub.log)
        assert call("export", checkpoint, "hf://org/adapter") == 0
        assert "published already" in capsys.readouterr().out
        assert {entry.kind for entry in hub.log[asked:]}.isdisjoint({"preupload", "create"})
        assert call("export", checkpoint, "hf://org/reviewed", "--create_pr") == 0
        (pull,) = hub.repositories["org/reviewed"].pulls
        assert pull.title.startswith("Adapter of ")
        close_session()


def test_workers_make_the_same_plan(adapter: Path, written: Path, tmp_path: Path) -> None:
    """With an alpha that only the command names, too, and in units of a few rows, whose results are the same."""
    shutil.copytree(adapter / "0" / "items", tmp_path / "copy" / "0" / "items")
    for path in (tmp_path / "copy").rglob("_CHECKPOINT_METADATA"):
        path.unlink()
    asked = dict(like=str(written / "plain" / "base"), maxtext_model="llama3.1-8b")
    made = back(adapter, written / "plain" / "base", tmp_path / "whole") / "adapter_model.safetensors"
    planned = plan(str(tmp_path / "copy"), **asked, lora_alpha=6.5, param_scan_axis=1, unit_bytes=2000)
    assert len(planned.units) > 4
    assert load(planned.stage()).hash == planned.hash
    other = plan(str(tmp_path / "copy"), **asked | {"maxtext_model": "llama2-7b"}, lora_alpha=6.5, param_scan_axis=1)
    assert other.hash != plan(str(tmp_path / "copy"), **asked, lora_alpha=6.5, param_scan_axis=1).hash
    carry(planned, str(tmp_path / "parts"), Delivery(), progress=False)
    assert json.loads((tmp_path / "parts" / "adapter_config.json").read_text())["lora_alpha"] == 6.5
    assert (tmp_path / "parts" / "adapter_model.safetensors").read_bytes() == made.read_bytes()


def test_what_was_stopped_of_another_adapter_is_refused_by_name(
    adapter: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was replaced meanwhile, by one whose layers hold other factors: which files changed is said."""
    base, checkpoint = written / "plain" / "base", shutil.copytree(adapter, tmp_path / "ckpt")

    def stopped(*_: object, **__: object) -> None:
        raise OSError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(ReleaseTarget, "complete", stopped)
        with pytest.raises(Failed, match="no more"):
            back(checkpoint, base, tmp_path / "out")
    shutil.rmtree(checkpoint)
    shutil.copytree(there(written / "one-layer", tmp_path / "other", "--maxtext_model", "llama3.1-8b"), checkpoint)
    with pytest.raises(Refused) as refused:
        back(checkpoint, base, tmp_path / "out", resume=True)
    assert "another plan" in str(refused.value)
    assert "another version" not in str(refused.value)


def test_an_adapter_takes_no_models_place(adapter: Path, written: Path, tmp_path: Path) -> None:
    """Nor does `--overwrite` delete the release that it is for."""
    base = written / "plain" / "base"
    wb.cut(str(base), str(tmp_path / "model"), layers="0:1", progress=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with pytest.raises(Refused, match="is a model, which no adapter takes the place of"):
        back(adapter, base, tmp_path / "model", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_nothing_but_zeros_is_no_adapter(written: Path, tmp_path: Path) -> None:
    """PEFT could do nothing with a file without tensors."""
    folder = shutil.copytree(written / "plain", tmp_path / "zeros")
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file({name: np.zeros_like(values) for name, values in read_file(path).items()}, path)
    checkpoint = there(folder, tmp_path / "ckpt", "--maxtext_model", "llama3.1-8b")
    with pytest.raises(Refused, match="nothing but zeros"):
        back(checkpoint, folder / "base", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_another_model_is_refused(written: Path, tmp_path: Path) -> None:
    """Shapes by config.json, and kernels that its table doesn't have."""
    checkpoint = there(written / "plain", tmp_path / "ckpt", "--maxtext_model", "llama3.1-8b")
    config = read_config(written / "plain" / "base") | {"hidden_size": 64, "head_dim": 16}
    planned = read_adapter(open_orbax(checkpoint), config)
    assert {problem.kind for problem in planned.problems} == {"shape"}
