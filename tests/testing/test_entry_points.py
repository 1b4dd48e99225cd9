"""A package outside the project brings a family, an encoding and a store, by entry points alone; and a draft is finished
by a person's answers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import run
from safetensors.numpy import save_file

from weightbeam.formats.orbax import open_arrays
from weightbeam.formats.storage import open_store
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.drafting import draft, group
from weightbeam.model_mappings.plan import expand
from weightbeam.model_mappings.registry import load_family

ROOT = Path(__file__).parents[2]
MODULE = '''
"""Weights of int8 in eighths; files of a folder behind the scheme `shelf`."""

import dataclasses
import os

import numpy as np

from weightbeam.formats.encodings.encoding import InOrder
from weightbeam.formats.encodings.format import Companion, QuantizedFormat, dtypes
from weightbeam.formats.safetensors import BoxRead, Tensor
from weightbeam.formats.storage import LocalFolder, StorageError, Store
from weightbeam.model_mappings.boxes import extent


@dataclasses.dataclass(frozen=True, slots=True)
class Eighths(InOrder):
    weight: Tensor
    unit: Tensor
    label = "eighths"
    decode_rate = 1e9

    @property
    def shape(self):
        return self.weight.shape

    def reads(self, box):
        return BoxRead(self.weight, box), BoxRead(self.unit, ((0, 1),))

    def decode(self, stored, box, dtype, empty=np.empty):
        values = empty(extent(box), dtype)
        values[...] = stored[0].astype(np.float32) * stored[1][0]
        return values


FORMATS = QuantizedFormat(
    "eighths", "weight_q", dtypes(np.int8), (Companion("unit", dtypes(np.float32)),),
    lambda parts: Eighths(parts.codes, parts["unit"]), "weight", "nobody", ("eighths",),
)


class Shelf(Store):
    """The folder that SHELF names, to be read."""

    def _folder(self):
        return LocalFolder(os.environ["SHELF"] + "/" + self.url.partition("://")[2])

    def check_readable(self):
        self._folder().check_readable()

    def list(self, prefix="", recursive=True):
        return self._folder().list(prefix, recursive)

    def stat(self, name):
        return self._folder().stat(name)

    def read(self, name, start=0, stop=None):
        return self._folder().read(name, start, stop)

    def read_into(self, name, ranges):
        return self._folder().read_into(name, ranges)
'''
TESTS = """
import numpy as np
from outside import FORMATS, Shelf
from weightbeam.testing import check_encoding, check_readable_store
from weightbeam.testing.store import HELD


def test_encoding():
    codes = np.arange(-60, 60, dtype=np.int8).reshape(10, 12)
    stored = {"x.weight_q": codes, "x.unit": np.array([0.125], np.float32)}
    check_encoding(stored, codes.astype(np.float32) / 8, {"quant_method": "eighths"}, format="eighths")


def test_store(tmp_path, monkeypatch):
    monkeypatch.setenv("SHELF", str(tmp_path))
    for name, data in HELD.items():
        (tmp_path / "held" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "held" / name).write_bytes(data)
    check_readable_store(Shelf("shelf://held"))
"""
ENTRIES = """
[weightbeam.encodings]
eighths = outside:FORMATS

[weightbeam.stores]
shelf = outside:Shelf
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as pip would install it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "outside.py").write_text(MODULE)
    (folder / "test_outside.py").write_text(TESTS)
    about = folder / "outside-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    return folder


def with_site(site: Path, *command: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "tests")])
    return run(sys.executable, *command, cwd=cwd, env=os.environ | {"PYTHONPATH": path, **more})


def shelved(folder: Path) -> np.ndarray:
    """A release on the shelf `folder` whose weight is in eighths."""
    codes = np.arange(-60, 60, dtype=np.int8).reshape(10, 12)
    (folder / "model").mkdir(parents=True)
    save_file({"up.weight_q": codes, "up.unit": np.array([0.125], np.float32)}, folder / "model" / "model.safetensors")
    told = {"model_type": "any", "quantization_config": {"quant_method": "eighths"}}
    (folder / "model" / "config.json").write_text(json.dumps(told))
    return codes.astype(np.float32) / 8


def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    done = with_site(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(site / "test_outside.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_release_in_its_encoding_from_its_store(site: Path, tmp_path: Path) -> None:
    values = shelved(tmp_path)
    call = ("-m", "weightbeam", "convert", "shelf://model", "out", "--family", "identity", "--save_dtype", "float32")
    done = with_site(site, *call, cwd=tmp_path, SHELF=str(tmp_path))
    assert done.returncode == 0, done.stderr
    made = open_arrays(open_store(tmp_path / "out" / "0" / "items"))["params.params.up.weight"]
    np.testing.assert_array_equal(made.read().result(), values)
    done = with_site(site, "-m", "weightbeam", "verify", "out", cwd=tmp_path, SHELF=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_package_both_are_refused(site: Path, tmp_path: Path) -> None:
    shelved(tmp_path)
    for source, words in (
        ("shelf://model", "shelf:// isn't supported"),
        ("model", "quant_method 'eighths' isn't supported"),
    ):
        done = run(
            sys.executable,
            "-m",
            "weightbeam",
            "plan",
            source,
            "--family",
            "identity",
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 2
        assert words in done.stderr + done.stdout


def test_its_store_is_for_sources(site: Path, tmp_path: Path) -> None:
    shelved(tmp_path)
    call = ("-m", "weightbeam", "convert", "shelf://model", "shelf://out", "--family", "identity")
    done = with_site(site, *call, cwd=tmp_path, SHELF=str(tmp_path))
    assert done.returncode == 2
    assert "shelf://out: can be read, but not written to" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("[weightbeam.encodings]\nbad = outside:Shelf\n", "should be a weightbeam.formats.encodings.format.QuantizedFormat"),
        ("[weightbeam.encodings]\nbad = outside:NONE\n", "the encoding 'bad' of outside:NONE can't be loaded: AttributeError"),
        ("[weightbeam.encodings]\na = outside:FORMATS\nb = outside:FORMATS\n", "there is a format eighths already"),
    ],
)  # fmt: skip
def test_what_is_no_encoding(entries: str, words: str, site: Path, tmp_path: Path) -> None:
    """Refused in words, as a problem of the plan."""
    shelved(tmp_path)
    other = tmp_path / "site"
    (other / "outside-1.0.dist-info").mkdir(parents=True)
    (other / "outside.py").write_text(MODULE)
    (other / "outside-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (other / "outside-1.0.dist-info" / "entry_points.txt").write_text(entries)
    done = with_site(other, "-m", "weightbeam", "plan", "model", "--family", "identity", cwd=tmp_path)
    assert done.returncode == 2
    assert words in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr


# --- drafts -----------------------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "new", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "num_experts": 4, "moe_intermediate_size": 12,
}  # fmt: skip
LAYER = {
    "input_layernorm.weight": (24,), "post_attention_layernorm.weight": (24,), "self_attn.q_proj.weight": (48, 24),
    "self_attn.k_proj.weight": (16, 24), "self_attn.v_proj.weight": (16, 24), "self_attn.o_proj.weight": (24, 48),
    "self_attn.strange.weight": (24, 24),
}  # fmt: skip
DENSE = {
    f"mlp.{name}.weight": shape
    for name, shape in (("gate_proj", (40, 24)), ("up_proj", (40, 24)), ("down_proj", (24, 40)))
}
EXPERTS = {f"mlp.experts.{expert}.up_proj.weight": (12, 24) for expert in range(4)}
SHAPES = {"model.embed_tokens.weight": (50, 24), "model.norm.weight": (24,), "lm_head.weight": (50, 24)} | {
    f"model.layers.{layer}.{name}": shape
    for layer in range(3)
    for name, shape in (LAYER | (EXPERTS if layer else DENSE)).items()
}


def test_layers_that_are_alike_are_one_group() -> None:
    top, dense, sparse = group(SHAPES)
    assert [(each.prefix, each.layers) for each in (top, dense, sparse)] == [
        ("", ()),
        ("model.layers.{layer}.", (0,)),
        ("model.layers.{layer}.", (1, 2)),
    ]
    assert [(line.source, line.shape, line.experts) for line in sparse.lines if line.experts] == [
        ("mlp.experts.{expert}.up_proj.weight", (12, 24), 4)
    ]


def test_what_isnt_known_is_marked() -> None:
    """Axes have words where one fits, and every line waits for an answer."""
    text = draft("new", CONFIG, SHAPES, "a release").table
    assert (
        'rule("TODO/mlp.experts.{expert}.up_proj.weight", "mlp.experts.{expert}.up_proj.weight", "expert moe_mlp embed", "TODO TODO TODO"),'
        in text
    )
    assert re.search(r'"self_attn.strange.weight", "embed TODO1_24", .*# TODO: .*24 is embed', text)
    lines = [line for line in text.splitlines() if "rule(" in line and "import" not in line]
    assert len(lines) == 2 * len(LAYER) + len(DENSE) + 1
    assert all("TODO" in line for line in lines)
    compile(text, "new.py", "exec")
    two = draft("new", CONFIG | {"sparse_dim": 40}, SHAPES, "a release").table
    assert "mlp embed -> embed mlp" in two, "a fragment's line stays, and is marked"
    odd = draft("new", CONFIG | {"sparse_dim": 40}, SHAPES | {"odd.weight": (40, 7)}, "a release").table
    assert "40 is mlp or sparse_dim; 7 is no size of config.json" in odd


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    folder.mkdir()
    save_file({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_draft_makes_no_arrays(tmp_path: Path) -> None:
    """Where all its sizes are known, only their names aren't."""
    layer = {name: shape for name, shape in (LAYER | DENSE).items() if "strange" not in name} | {"odd.weight": (24,)}
    shapes = {name: shape for name, shape in SHAPES.items() if ".layers." not in name}
    shapes |= {f"model.layers.{number}.{name}": shape for number in range(3) for name, shape in layer.items()}
    drafted = draft("new", CONFIG, shapes, "a release")
    (tmp_path / "new.py").write_text(drafted.table)
    family = load_family(str(tmp_path / "new.py"))
    with pytest.raises(ConfigError, match=r"table of new is a draft: .*TODO.*lines are marked TODO"):
        expand(family, Config(CONFIG), Layout(shapes=shapes))


def test_a_draft_at_the_terminal(release: Path, tmp_path: Path) -> None:
    """Three files; the test fails with each line that waits; nothing is written over."""
    here = tmp_path / "here"
    here.mkdir()
    call = ("-m", "weightbeam", "new-family", "new", "--like", str(release))
    done = with_site(here, *call, cwd=here)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in here.iterdir()} == {"new.py", "test_new.py", "new.json"}
    tested = with_site(here, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_new.py", cwd=here)
    assert tested.returncode == 1
    assert re.search(r"\d+ lines are marked TODO", tested.stdout)
    planned = with_site(here, "-m", "weightbeam", "plan", str(release), "--family", "new.py", cwd=here)
    assert planned.returncode == 2
    assert "TODO" in planned.stderr
    again = with_site(here, *call, cwd=here)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    cases = (
        ("class", release, "can't be the name"),
        ("a-b", release, "can't be the name"),
        ("numpy", release, "is the name of an installed Python module"),
        ("b", here, "no safetensors"),
    )
    for name, like, words in cases:
        refused = with_site(here, "-m", "weightbeam", "new-family", name, "--like", str(like), cwd=here)
        assert (refused.returncode, words in refused.stderr) == (2, True)
