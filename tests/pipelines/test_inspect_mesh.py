"""`weightbeam inspect --mesh`: what loading costs, of our checkpoints and of MaxText's; and `--sharding_rules`, from
the file to the chunks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from processes import run
from support import (
    BF16,
    HERE,
    LLAMA,
    QWEN3_MOE,
    assert_same_bits,
    call,
    convert,
    make_release,
    random_tensors,
    reference,
    restore,
)

from weightbeam.formats.orbax import find_items, read_arrays
from weightbeam.transforms.cutting.mesh import Mesh, base_rules, partition_spec
from weightbeam.transforms.cutting.read_cost import load_of, shard_box, total

jax = lazily("jax")
ocp = lazily("orbax.checkpoint")

# 30 MB
MEDIUM = LLAMA | dict(
    vocab_size=4096,
    hidden_size=512,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=32,
    intermediate_size=2048,
)
READ_HOST = """
import json, sys
from pathlib import Path
from benchmarks.load import restore_host
print(json.dumps(restore_host(Path(sys.argv[1]), json.loads(sys.argv[2]))))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("medium") / "source", MEDIUM)


@pytest.fixture(scope="module")
def steps(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model for a mesh, for any mesh, and in plain files."""
    folder = tmp_path_factory.mktemp("loads")
    options = {
        "mesh": ["--mesh", "fsdp=16"],
        "any": [],
        "files": ["--mesh", "fsdp=16", "--use_ocdbt", "false", "--use_zarr3", "false"],
    }
    return {name: convert(source, folder / name, *given) for name, given in options.items()}


@pytest.fixture(scope="module")
def by_axis_0(steps: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same arrays without chunks, as stock Orbax saves them on one device: nothing in it tells where it comes from."""
    folder = tmp_path_factory.mktemp("stock")
    tree = jax.tree.map(np.asarray, ocp.PyTreeCheckpointer().restore(steps["mesh"] / "items"))
    with ocp.CheckpointManager(folder, item_names=("items",)) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
    return folder / "0"


def inspect(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str]:
    """Exit status, and what was printed."""
    capsys.readouterr()
    status = call("inspect", *arguments)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def all_arrays(shown: str) -> list[list[str]]:
    """Arrays, bytes, unit, reads, worst and mean of the last line of each table."""
    return [re.findall(r"[\d.,]+|[KMG]?B", line) for line in shown.splitlines() if line.startswith("all ")]


@pytest.mark.parametrize(("name", "worst"), [("mesh", 1.0), ("any", 1.1), ("files", 1.0)])
def test_our_checkpoints_read_what_is_needed(
    steps: dict[str, Path], capsys: pytest.CaptureFixture, name: str, worst: float
) -> None:
    """A line for each kind of array and one for all; a table for each mesh."""
    status, shown = inspect(capsys, steps[name], "--mesh", "fsdp=16", "--mesh", "fsdp=4,tensor=2")
    assert status == 0
    one, other = all_arrays(shown)
    assert float(one[4]) <= worst
    assert float(other[4]) <= (2.1 if name != "any" else 1.1)  # `tensor` wasn't asked for
    assert "fsdp=16: 16 hosts" in shown
    assert "fsdp=4,tensor=2: 8 hosts" in shown
    assert re.search(r"decoder\.layers\.mlp\.wo\.kernel +2048 × 2 × 512 +- × - × fsdp +", shown)


@pytest.mark.parametrize("mesh", ["fsdp=2,expert=2", "expert=4", "fsdp=2,expert=2,tensor=2"])
@pytest.mark.parametrize("case", ["deepseek3", "qwen3-moe"])
def test_a_mesh_with_experts_reads_what_is_needed(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture, case: str, mesh: str
) -> None:
    """MaxText 0.2.5 shards attention and routers over other axes than the rest (`embed_attn`, `embed_router`)."""
    made = convert(generated / "cases" / case, tmp_path / "made", "--mesh", mesh)
    status, shown = inspect(capsys, made, "--mesh", mesh)
    assert status == 0
    assert all_arrays(shown)[0][4:] == ["1.00", "1.00"]


@pytest.mark.parametrize("mesh", ["fsdp=16", "fsdp=2,tensor=4"])
@pytest.mark.parametrize("name", ["mesh", "any", "files"])
def test_the_operating_system_counts_the_same(steps: dict[str, Path], name: str, mesh: str) -> None:
    """What a process that reads one host's part gets from read(2), against the arithmetic; metadata come on top, some
    KB an array.
    """
    items, on = find_items(steps[name]), Mesh.parse(mesh)
    axes = json.loads((steps[name] / "conversion.json").read_bytes())["axes"]
    specs = {array.spec.key: array.spec for array in read_arrays(items) if array.spec.key in axes}
    over = {key: partition_spec(axes[key], base_rules()) for key in specs}
    load = total(load_of(spec, over[key], on) for key, spec in specs.items())
    for host in (0, on.devices - 1):
        boxes = {key: shard_box(spec.shape, over[key], on, host) for key, spec in specs.items()}
        command = [sys.executable, "-c", READ_HOST, str(items), json.dumps(boxes)]
        counted = json.loads(run(*command, cwd=HERE.parent, status=0).stdout)
        assert counted["nbytes"] == load.needed[host]
        assert load.fetched[host] <= counted["rchar"] <= load.fetched[host] + 100_000


def test_the_values_dont_depend_on_the_grid(steps: dict[str, Path]) -> None:
    """Chunks packed into shards, reaching across layers, and plain ones: the same bits, and those of a reference in
    numpy.
    """
    assert any(array.spec.chunk != array.spec.shard for array in read_arrays(find_items(steps["any"])))
    wanted = reference(MEDIUM, random_tensors(MEDIUM), BF16)
    for step in steps.values():
        assert_same_bits(restore(step), wanted)


def test_a_checkpoint_of_maxtexts(by_axis_0: Path, source: Path, capsys: pytest.CaptureFixture) -> None:
    """It needs the model's config.json, with no weights beside it; a host of 16 reads 16 times what it needs."""
    status, shown = inspect(capsys, by_axis_0, "--mesh", "fsdp=16")
    assert status == 2
    assert "--source FOLDER" in shown
    weightless = by_axis_0.parent / "config"
    weightless.mkdir()
    (weightless / "config.json").write_bytes((source / "config.json").read_bytes())
    for folder in (source, weightless):
        status, shown = inspect(capsys, by_axis_0, "--mesh", "fsdp=16", "--source", folder)
        assert status == 0
        (figures,) = all_arrays(shown)
        assert figures[0] == "12"
        assert 15 < float(figures[4]) <= 16  # norms are not sharded


def test_another_models_config_is_of_no_use(by_axis_0: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Arrays that it doesn't know aren't counted, and said; if it knows none, or is no model's, it is refused."""
    other = make_release(tmp_path / "moe", QWEN3_MOE)
    status, shown = inspect(capsys, by_axis_0, "--mesh", "fsdp=16", "--source", other)
    assert status == 0
    assert "not counted, since their logical axes aren't known: 3 arrays" in shown
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "unheard_of"}')
    status, shown = inspect(capsys, by_axis_0, "--mesh", "fsdp=16", "--source", tmp_path / "unknown")
    assert status == 2
    assert "unheard_of" in shown


def test_a_mesh_that_doesnt_divide_is_said(steps: dict[str, Path], capsys: pytest.CaptureFixture) -> None:
    """JAX refuses it, and so does MaxText."""
    status, shown = inspect(capsys, steps["mesh"], "--mesh", "fsdp=3")
    assert status == 0
    assert "fsdp=3 doesn't divide" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--mesh", "fsdp"], "fsdp=16"), (["--mesh", "fdsp=4"], "fdsp"), (["--mesh", "data=99999999"], "262,144 devices"),
     (["--mesh", "fsdp=2", "--sharding_rules", "nowhere.yml"], "nowhere.yml"), (["--mesh", "fsdp=2", "--source", "nowhere"], "no such folder")],
)  # fmt: skip
def test_wrong_options_are_refused(
    steps: dict[str, Path], capsys: pytest.CaptureFixture, options: list[str], said: str
) -> None:
    status, shown = inspect(capsys, steps["mesh"], *options)
    assert status == 2
    assert said in shown


def test_meshes_are_for_orbax_checkpoints(source: Path, capsys: pytest.CaptureFixture) -> None:
    assert inspect(capsys, source, "--mesh", "fsdp=2")[0] == 2


# --- rules of the user's own ------------------------------------------------------------------------------------------

RULES = """
# as MaxText's custom_mesh_and_rule
mesh_axes: ['rows', 'cols']
logical_axis_rules: [
  ['embed', ['rows']],
  ['embed_vocab', ['rows']],
  ['mlp', 'cols'],
]
"""


def plan(*arguments: object, file: Path) -> dict[str, Any]:
    assert call("plan", *arguments, "--json", file) == 0
    return json.loads(file.read_bytes())


def test_rules_of_a_file_make_the_chunks(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """YAML or JSON, whole or merged; the plan says what differs, the checkpoint remembers, and `inspect` goes by them."""
    (tmp_path / "rules.yml").write_text(RULES)
    (tmp_path / "rules.json").write_text('[["embed",\t["rows"]],\t["embed_vocab", "rows"], ["mlp", ["cols"]]]')
    mesh = "rows=4,cols=2"
    planned = [
        plan("--source", source, "--mesh", mesh, "--sharding_rules", tmp_path / name, file=tmp_path / "p")
        for name in ("rules.yml", "rules.json")
    ]
    wi, out = ("params.params.decoder.layers.mlp.wi_0.kernel", "params.params.decoder.layers.self_attention.out.kernel")
    for made in planned:
        assert made["arrays"][wi]["chunk"] == [128, 2, 1024]
        assert made["arrays"][out]["chunk"] == [16, 2, 32, 512]  # `embed_attn`, which these rules don't know
    assert "--sharding_rules, which differ for embed, embed_attn, embed_vocab, heads" in capsys.readouterr().out

    step = convert(source, tmp_path / "out", "--mesh", mesh, "--sharding_rules", str(tmp_path / "rules.yml"))
    status, shown = inspect(capsys, step, "--mesh", mesh)
    assert (status, all_arrays(shown)[0][4]) == (0, "1.00")
    assert re.search(r"wi_0.kernel … +512 × 2 × 2048 +rows × - × cols ", shown)
    assert "sharding_rules=3 rules" in inspect(capsys, step)[1]
    status, shown = inspect(
        capsys, step, "--mesh", "tensor=2", "--sharding_rules", HERE / "facts" / "logical_axis_rules.json"
    )
    assert status == 0
    assert re.search(r"wi_0.kernel … +512 × 2 × 2048 +- × - × tensor ", shown)


def test_a_models_rules_are_merged(source: Path, tmp_path: Path) -> None:
    """A file with nothing but a rule changes that one, as MaxText's llama2-7b.yml does."""
    (tmp_path / "model.yml").write_text("base_emb_dim: 512\nlogical_axis_rules: [['norm', 'fsdp']]\n")
    by_file = plan(
        "--source", source, "--mesh", "fsdp=4", "--sharding_rules", tmp_path / "model.yml", file=tmp_path / "p"
    )
    by_name = plan("--source", source, "--mesh", "fsdp=4", "--maxtext_model", "llama2-7b", file=tmp_path / "p")
    assert by_file["arrays"] == by_name["arrays"]
    assert by_file["arrays"]["params.params.decoder.decoder_norm.scale"]["partition"] == {"fsdp=4": ["fsdp"]}


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[[", "neither JSON nor YAML"), (b"a: [1\nb: 2", "line 2"), (b"\xff\xfe\xfa", "can't decode"), (b"", "list of rules"), (b"{}", "no logical_axis_rules"),
     (b"[[1, 2]]", "[1, 2]"), (b"!!python/object/apply:os.getcwd []", "neither JSON nor YAML")],
)  # fmt: skip
def test_a_wrong_file_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes, said: str
) -> None:
    """Exit status 2, the file and what is wrong with it."""
    (tmp_path / "rules").write_bytes(content)
    capsys.readouterr()
    assert call("plan", "--source", source, "--sharding_rules", tmp_path / "rules") == 2
    shown = capsys.readouterr().err
    assert f"--sharding_rules={tmp_path / 'rules'}" in shown
    assert said in shown
