"""`weightbeam materialize`: an ordinary checkpoint of a virtual one.

The ordinary conversion of the files that the virtual checkpoint refers to, with the options that it was made with. So nothing
is decided twice: bytes, chunks, digests, memory and `--resume` are those of `weightbeam convert`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from weightbeam.formats.links import HARD
from weightbeam.formats.orbax import find_items, record_of
from weightbeam.formats.storage import StorageError
from weightbeam.pipelines.convert import convert
from weightbeam.pipelines.errors import FailedError, RefusedError
from weightbeam.pipelines.prepare import open_adapters, sharding_rules
from weightbeam.pipelines.virtual import check_files, open_own_source
from weightbeam.transforms.conversion import options_from, prepare
from weightbeam.transforms.mesh import MeshError

STORAGE = ("use_ocdbt", "use_zarr3", "compression", "unit_bytes")  # what a virtual checkpoint leaves open


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Checks the files, then converts them."""
    if rest:
        from weightbeam.pipelines.options import check_options  # imports Beam

        check_options(rest, args)
    if not args.output:
        raise RefusedError("--output is missing: the folder that the checkpoint should lie in")
    try:
        items = find_items(args.checkpoint)
        if not check_files(items):
            raise RefusedError(f"{items} isn't virtual, or came here without its {items.parent.name}/conversion.json; there is nothing to materialise")
        checkpoint = open_own_source(items)
    except StorageError as e:
        raise RefusedError(str(e)) from e
    except FailedError as e:
        raise RefusedError(f"the files that the checkpoint refers to have changed:\n{e}") from e
    made = options_from(record_of(items)["options"])
    given = {key: getattr(args, key) for key in STORAGE} | {"virtual": False}
    if args.mesh:
        given["mesh"] = tuple(args.mesh)
    if args.sharding_rules:
        given["sharding_rules"] = sharding_rules(args.sharding_rules, made.maxtext_model)
    if args.step is not None:
        given["step"] = args.step
    options = dataclasses.replace(made, **given)
    args.step, args.link, args.sha256 = options.step, HARD, False
    try:
        return convert(prepare(options, checkpoint, open_adapters(options)), args, rest)
    except MeshError as e:
        raise RefusedError(str(e)) from e


if __name__ == "__main__":
    from weightbeam.pipelines.cli import main

    sys.exit(main(["materialize", *sys.argv[1:]]))
