"""The contract of a store: what any place where files lie must do, as one function for each promise."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weightbeam.formats.storage import File, StorageError, Store

DATA = random.Random(0).randbytes(200_000)
SHARD = "weights/model.safetensors"
HELD = {SHARD: DATA, "config.json": b"{}", "weights/more/tokenizer.json": b'{"a": 1}', "weights/more/empty": b""}
RACERS = 8


def _is(got: Any, wanted: Any, what: str) -> None:
    """Raises AssertionError in words where two values differ."""
    if got != wanted:
        raise AssertionError(f"{what}: {got!r:.300}, should be {wanted!r:.300}")


def _fails(kind: type[BaseException], call: Callable[[], object], what: str, words: str = "") -> None:
    """Raises AssertionError unless a call raises an error of this kind, with these words in its message."""
    try:
        got = call()
    except kind as e:
        if words not in str(e):
            raise AssertionError(f"{what}: the message {str(e)!r} should have {words!r} in it") from e
        return
    raise AssertionError(f"{what}: {got!r:.100}, should raise {kind.__name__}")


def names(files: Sequence[File]) -> list[str]:
    """The names of files."""
    return [file.name for file in files]


def fetch(store: Store, name: str, *ranges: tuple[int, int]) -> list[bytes]:
    """Ranges of a file, by `read_into`."""
    buffers = [bytearray(stop - start) for start, stop in ranges]
    store.read_into(name, [(start, memoryview(buffer)) for (start, _), buffer in zip(ranges, buffers, strict=True)])
    return [bytes(buffer) for buffer in buffers]


def names_are_listed(store: Store) -> None:
    """Names are sorted, begin as is asked, have any characters; folders are what names have before a slash."""
    for name in ("a", "b/c", "b/d/e", "ba", "z ü%2F+?#"):
        store.write(name, name.encode())
    _is(names(store.list()), ["a", "b/c", "b/d/e", "ba", "z ü%2F+?#"], "list()")
    _is(names(store.list("b")), ["b/c", "b/d/e", "ba"], "list('b')")
    _is(names(store.list("b/")), ["b/c", "b/d/e"], "list('b/')")
    _is(names(store.list("b/", recursive=False)), ["b/c"], "list('b/', recursive=False)")
    _is(names(store.list(recursive=False)), ["a", "ba", "z ü%2F+?#"], "list(recursive=False)")
    _is((store.list("none/"), store.list("c")), ([], []), "lists of what isn't there")
    _is(store.folders(), ["b"], "folders()")
    _is({"a", "ba"} - set(store.entries()), set(), "entries() lacks")
    below = store / "b"
    _is(names(below.list()), ["c", "d/e"], "list() of a folder below")
    _is(below.read("c"), b"b/c", "a file of a folder below")
    _is((below / "d").read("e"), b"b/d/e", "a file two folders below")
    _is(store.read("z ü%2F+?#"), "z ü%2F+?#".encode(), "a file of a strange name")
    _is(below.path("c"), f"{store.url}/b/c", "path()")
    _is((below.parent, below.name), (store, "b"), "parent and name")


def files_are_known(store: Store) -> None:
    """Size, time and version of a file are known, and its version changes with its content."""
    before = time.time() - 1
    store.write("a/b", b"12345")
    found = store.stat("a/b")
    if found is None:
        raise AssertionError("stat() of a file that was just written: None")
    _is((found.name, found.size), ("a/b", 5), "stat()")
    _is(before <= found.updated <= time.time() + 1, True, f"updated, {found.updated}, is about now")
    _is(store.list(), [found], "list() beside stat()")
    _is((store.stat("a"), store.stat("a/c")), (None, None), "stat() of what is no file")
    _is((store.exists("a/b"), store.exists("a")), (True, False), "exists()")
    time.sleep(0.01)
    store.write("a/b", b"54321")
    again = store.stat("a/b")
    _is(
        again is not None and again.version != found.version,
        True,
        "another content of the same size has another version",
    )


def ranges_are_read(store: Store) -> None:
    """Any range of a file, and nothing where there is nothing; a range that doesn't fit its file is an error."""
    store.write("x", DATA)
    store.write("empty", b"")
    _check_ranges(store, "x")
    _is((store.read("empty"), store.read("empty", 0, 10)), (b"", b""), "an empty file")
    _fails(FileNotFoundError, lambda: store.read("none"), "read() of what isn't there")
    _fails(StorageError, lambda: fetch(store, "none", (0, 1)), "read_into() of what isn't there")


def _check_ranges(store: Store, name: str) -> None:
    """Ranges of a file that holds `DATA`."""
    end = len(DATA)
    for start, stop in (
        (0, None),
        (0, 10),
        (500, None),
        (7, 7),
        (9, 7),
        (end - 5, end + 5),
        (end, None),
        (end + 9, end + 99),
    ):
        wanted = b"" if stop is not None and stop < start else DATA[start:stop]
        _is(store.read(name, start, stop), wanted, f"read({start}, {stop})")
    _is(fetch(store, name), [], "read_into() of no range")
    for seed in range(20):
        chosen = random.Random(seed)
        ranges = [(at, at + chosen.randrange(5000)) for at in chosen.sample(range(end - 5000), chosen.randrange(15))]
        _is(fetch(store, name, *ranges), [DATA[start:stop] for start, stop in ranges], f"read_into({ranges})")
    too_long = lambda: fetch(store, name, (0, 5), (end - 5, end + 1))  # noqa: E731
    _fails(StorageError, too_long, "a range beyond the end", "ends ")


def small_files_are_read_in_order(store: Store) -> None:
    """Many small files, in the order that is asked for."""
    given = [str(number) for number in range(50)]
    for name in given:
        store.write(name, name.encode())
    _is(list(store.read_many(given)), [name.encode() for name in given], "read_many()")


def writing_is_whole(store: Store) -> None:
    """A file is written over, made once, deleted as often as one likes; a folder goes with all in it, and no other."""
    store.check_writable()
    _is(store.list(), [], "what check_writable() leaves")
    store.write("a/b", b"1")
    store.write("a/b", b"2")
    _is(store.read("a/b"), b"2", "a file that was written over")
    _is((store.create("a/b", b"3"), store.create("a/c", b"3")), (False, True), "create() of what is there, and isn't")
    _is((store.read("a/b"), store.read("a/c")), (b"2", b"3"), "what create() wrote")
    store.delete("a/b")
    store.delete("a/b")
    _is(store.exists("a/b"), False, "a file that was deleted")
    store.write("ab/c", b"4")
    store.delete_folder("a")
    store.delete_folder("none")
    _is(names(store.list()), ["ab/c"], "what is left beside a folder that was deleted")
    store.delete_folder()
    _is(store.list(), [], "what is left of a folder that deleted itself")


def one_creates(store: Store) -> None:
    """Of racing threads one makes a file, though all of them write the same."""
    for number in range(5):
        name, start = str(number), threading.Barrier(RACERS)

        def create(_: int, name: str = name, start: threading.Barrier = start) -> bool:
            start.wait()
            return store.create(name, b"the same")

        with ThreadPoolExecutor(RACERS) as pool:
            _is(sorted(pool.map(create, range(RACERS))), [False] * (RACERS - 1) + [True], "create() of racers")


def stores_pickle(store: Store) -> None:
    """A store is sent to workers, and is a key of mappings."""
    store.write("a", b"1")
    again = pickle.loads(pickle.dumps(store))
    _is((again, again.read("a")), (store, b"1"), "a store that was pickled")
    _is(len({store, again, store / "b"}), 2, "different stores of three")


STORE_CHECKS: tuple[Callable[[Store], None], ...] = (
    names_are_listed,
    files_are_known,
    ranges_are_read,
    small_files_are_read_in_order,
    writing_is_whole,
    one_creates,
    stores_pickle,
)


def check_store(make: Callable[[], Store]) -> None:
    """Checks a store that can be written to against every promise of `Store`.

    Args:
      make: gives an empty folder of the store, another one at each call.

    Raises:
      AssertionError: one doesn't hold; by the name of the check.

    Example:
      >>> import tempfile
      >>> from weightbeam.formats.storage import LocalFolder
      >>> check_store(lambda: LocalFolder(tempfile.mkdtemp()))
    """
    for check in STORE_CHECKS:
        try:
            check(make())
        except AssertionError as e:
            raise AssertionError(f"{check.__name__}: {e}") from e


def check_readable_store(store: Store) -> None:
    """Checks a store that is only read, as the entry point `weightbeam.stores` may give it.

    Args:
      store: a folder of it that holds just the files of `weightbeam.testing.store.HELD`, by name.

    Raises:
      AssertionError: a promise doesn't hold.

    Example:
      >>> import tempfile
      >>> from weightbeam.formats.storage import LocalFolder
      >>> folder = LocalFolder(tempfile.mkdtemp())
      >>> for name, data in HELD.items():
      ...     folder.write(name, data)
      >>> check_readable_store(folder)
    """
    store.check_readable()
    _is(names(store.list()), sorted(HELD), "list()")
    _is(names(store.list(recursive=False)), ["config.json"], "list(recursive=False)")
    _is(names(store.list("weights/more/")), ["weights/more/empty", "weights/more/tokenizer.json"], "list() of a folder")
    for file in store.list():
        _is(store.stat(file.name), file, f"stat({file.name!r}) beside list()")
        _is((file.size, bool(file.version)), (len(HELD[file.name]), True), f"size and version of {file.name}")
        _is(store.read(file.name), HELD[file.name], f"read({file.name!r})")
    _is((store.stat("none"), store.stat("weights")), (None, None), "stat() of what is no file")
    _is(list(store.read_many(sorted(HELD))), [HELD[name] for name in sorted(HELD)], "read_many()")
    _check_ranges(store, SHARD)
    _fails(FileNotFoundError, lambda: store.read("none"), "read() of what isn't there")
    _fails(StorageError, lambda: fetch(store, "none", (0, 1)), "read_into() of what isn't there")
    again = pickle.loads(pickle.dumps(store))
    _is((again, again.read("config.json")), (store, b"{}"), "a store that was pickled")
    if not store.stages:
        _fails(StorageError, lambda: store.write("a", b"1"), "write() of a store that is only read")
