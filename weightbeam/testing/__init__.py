"""What a family, an encoding or a store of one's own must hold, as functions that a test calls; ours run through them.

    from weightbeam.testing import check_encoding, check_family, check_store, check_tree

Each raises `AssertionError` with all that it found. They need numpy and no test runner, no JAX, Orbax or PyTorch.

    family.py     a table against headers and against MaxText's tree
    encoding.py   stored tensors against their values
    store.py      a place where files lie, against the contract of `Store`
    draft.py      what `weightbeam new-family` writes, and whether it is finished
"""

from weightbeam.testing.draft import check_finished, read_headers, read_tree
from weightbeam.testing.encoding import check_encoding
from weightbeam.testing.family import check_elements, check_family, check_sizes_differ, check_tree
from weightbeam.testing.store import STORE_CHECKS, check_readable_store, check_store

__all__ = [
    "STORE_CHECKS", "check_elements", "check_encoding", "check_family", "check_finished", "check_readable_store",
    "check_sizes_differ", "check_store", "check_tree", "read_headers", "read_tree",
]  # fmt: skip
