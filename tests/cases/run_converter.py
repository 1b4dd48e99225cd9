"""Runs the converter of an installed MaxText on a folder of cases; `make_digests.py` makes one file of what it writes.

    PYTHONPATH=tests python tests/cases/run_converter.py --shapes FOLDER [CASE …]     # with Weightbeam
    PYTHON tests/cases/run_converter.py FOLDER [CASE …]

`PYTHON` is an interpreter of an environment that has MaxText and transformers, as they come from the package index (0.2.5
was run with jax 0.11.1, transformers 5.24.0, without torch, on a CPU). `FOLDER/<case>/hf` is the input,
`FOLDER/<case>/case.json` says the MaxText model and its sizes, and, where MaxText's mapping has other names than the
input, how tensors are respelled: `[[pattern, replacement], …]`. Beside them it writes `scanned.json` and
`unscanned.json`, digests of the arrays, or `scanned.txt` and `unscanned.txt`, the error that it ended with.

It calls what `to_maxtext` calls for each array: its mapping, its hooks, its readers and its stacking, unchanged. Only two
things come from elsewhere. The layers, which the converter knows by the model's name alone, are those of the case's
`config.json`. And the names and shapes that a model has are those of Weightbeam's plan (`--shapes`), which the tests
compare with MaxText's trees: to build each model takes ten times as long. `--whole` runs `to_maxtext` as it is instead, and reads
what it has saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEVICES = 4
LAYOUTS = {"scanned": "true", "unscanned": "false"}
Made = dict[str, list]  # {array: [shape, dtype, sha256 of its bytes]}


def arguments(case: dict[str, Any], layout: str, out: Path) -> list[str]:
    """Those of MaxText's configuration."""
    import maxtext

    return [
        "",
        str(Path(maxtext.__file__).parent / "configs" / "base.yml"),
        f"model_name={case['maxtext_model']}",
        f"base_output_directory={out}",
        f"scan_layers={LAYOUTS[layout]}",
        "run_name=case",
        "hardware=cpu",
        "skip_jax_distributed_system=true",
        "override_model_config=true",
        "attention=dot_product",
        *case["maxtext_overrides"],
    ]


def digest(values: Any) -> list:
    import numpy as np

    array = np.ascontiguousarray(values)
    return [list(array.shape), array.dtype.name, hashlib.sha256(array.tobytes()).hexdigest()]


def by_its_functions(folder: Path, case: dict[str, Any], layout: str, source: Path) -> Made:
    """Array by array, as `to_maxtext` makes them when it saves."""
    import numpy as np
    from maxtext.checkpoint_conversion import to_maxtext as converter
    from transformers import AutoConfig

    config = converter.pyconfig.initialize(arguments(case, layout, source))
    about, model = AutoConfig.from_pretrained(folder / "hf").to_dict(), case["maxtext_model"]
    loader = converter.LazyHFLoader(str(source), None, save_dtype=dtype_of(folder))
    mapping = converter.PARAM_MAPPING[model](about, config, config.scan_layers)
    hooks = converter.HOOK_FNS[model](about, config, config.scan_layers, saving_to_hf=False)
    shapes = {key: tuple(shape) for key, shape in json.loads((folder / "shapes.json").read_text())[layout].items()}
    made = {}
    for key in converter.validate_and_filter_param_map_keys(mapping.keys(), shapes.keys()):
        _, wanted = converter._get_maxtext_indices_and_shapes(key, {name: (0, shapes[name]) for name in shapes})
        load = converter._get_hf_loading_function(
            mapping.get(key), loader.get_tensor, hooks.get(key), wanted, config, key
        )
        values, names = np.asarray(load()), key if isinstance(key, tuple) else (key,)
        for number, name in enumerate(names):
            one = values[..., number] if isinstance(key, tuple) else values
            if one.shape != shapes[name]:
                raise ValueError(f"Shape mismatch for tensor '{name}'. Expected {shapes[name]}, but got {one.shape}.")
            made["params." + name.replace("-", ".")] = digest(one)
    return made


def as_a_whole(folder: Path, case: dict[str, Any], layout: str, source: Path) -> Made:
    """What `to_maxtext` saved."""
    import orbax.checkpoint as ocp
    from maxtext.checkpoint_conversion import to_maxtext as converter
    from transformers import AutoConfig

    converter.HF_MODEL_CONFIGS[case["maxtext_model"]] = AutoConfig.from_pretrained(folder / "hf")
    out = source / "out"
    converter.main(
        arguments(case, layout, out),
        hf_model_path=str(source),
        save_dtype=dtype_of(folder),
        simulated_cpu_devices_count=DEVICES,
    )
    saved = ocp.PyTreeCheckpointer().restore(out / "0" / "items")
    return {key: digest(values) for key, values in leaves(saved) if key.startswith("params.")}


def dtype_of(folder: Path) -> str:
    """`--save_dtype` of a case."""
    return "float32" if folder.name.endswith("-fp32") else "bfloat16"


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The arrays of a tree, by their names."""
    if not isinstance(tree, dict):
        yield ".".join(path), tree
        return
    for key, below in tree.items():
        yield from leaves(below, (*path, key))


def respell(folder: Path, case: dict[str, Any], out: Path) -> None:
    """A copy of a case, by the names that MaxText's mapping has."""
    import ml_dtypes  # noqa: F401  # numpy's bfloat16
    from safetensors.numpy import load_file, save_file

    tensors = {}
    for file in (folder / "hf").glob("*.safetensors"):
        for name, values in load_file(file).items():
            for pattern, replacement in case.get("respelled", []):
                name = re.sub(pattern, replacement, name)
            tensors[name] = values
    save_file(tensors, out / "model.safetensors")


def run(folder: Path, layout: str, is_whole: bool) -> str:
    """Writes the digests of a case, or its error; and says which."""
    for suffix in ("json", "txt"):
        (folder / f"{layout}.{suffix}").unlink(missing_ok=True)
    case, source = json.loads((folder / "case.json").read_text()), Path(tempfile.mkdtemp())
    try:
        respell(folder, case, source)
        made = (as_a_whole if is_whole else by_its_functions)(folder, case, layout, source)
        (folder / f"{layout}.json").write_text(json.dumps(dict(sorted(made.items()))))
    except Exception as e:  # whatever MaxText raises is the result
        traceback.print_exc()
        lines = f"{type(e).__name__}: {e}".splitlines()
        (folder / f"{layout}.txt").write_text("\n".join(line[:200] for line in lines) + "\n")  # some list all arrays
        return "failed"
    finally:
        shutil.rmtree(source)
    return "converted"


def write_shapes(folder: Path) -> None:
    """Names and shapes of a case's arrays, by Weightbeam's plan; none of arrays that repeat another."""
    import weightbeam as wb

    case = json.loads((folder / "case.json").read_text())
    vocab = next(int(one.partition("=")[2]) for one in case["maxtext_overrides"] if one.startswith("vocab_size="))
    asked = dict(maxtext_model=case["maxtext_model"], vocab_size=vocab)
    plans = {layout: wb.plan(str(folder / "hf"), scan_layers=layout == "scanned", **asked) for layout in LAYOUTS}
    shapes = {
        layout: {
            array.key.removeprefix("params.").replace(".", "-"): list(array.shape)
            for array in plan.arrays
            if not array.parts[0].rule.spare
        }
        for layout, plan in plans.items()
    }
    (folder / "shapes.json").write_text(json.dumps(shapes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}"
    for case in args.cases or sorted(case.parent.name for case in args.folder.glob("*/case.json")):
        if args.shapes:
            write_shapes(args.folder / case)
            continue
        for layout in LAYOUTS:
            print("case", case, layout, run(args.folder / case, layout, args.whole), flush=True)


if __name__ == "__main__":
    main()
