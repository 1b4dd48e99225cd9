"""Where what was made of a step is published: a folder, a bucket, or a repository of the hub.

It grows where no reader looks, below `.weightbeam/work`, and appears at its place whole:

    folder       <output>/step-1000, by one rename
    gs://        <output>/step-1000, copied within the bucket; `run.json` comes last, and says that it is whole
    hf://        the branch step-1000, by one commit; the newest step is `main`, by another one
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError

from weightbeam.formats.orbax import is_checkpoint
from weightbeam.formats.orbax import others_in as others_in_checkpoint
from weightbeam.formats.staging import MARKER
from weightbeam.formats.storage import (
    File,
    LocalFolder,
    StorageError,
    Store,
    is_hub,
    open_store,
    reason,
    store_to_write,
    sync_folder,
)
from weightbeam.formats.storage.bucket import Bucket
from weightbeam.formats.storage.hub import NoRepositoryError, api, hub_errors, retried
from weightbeam.formats.storage.local import mounts_in
from weightbeam.formats.storage.renaming import rename_new
from weightbeam.formats.storage.strict_json import JsonError, object_in, read_json
from weightbeam.formats.storage.uninterrupted import uninterrupted
from weightbeam.formats.targets.hub import (
    CARD,
    Files,
    HubAddress,
    OthersError,
    Published,
    changed_since,
    check_free,
    check_target,
    publish,
)
from weightbeam.formats.targets.published import changed_in, missing_in, others_in, replaced_in, whole_files
from weightbeam.formats.text.printable import listed
from weightbeam.pipelines.watching import changes
from weightbeam.pipelines.watching.records import NOTE, DamagedRecordError

WORK = ".weightbeam/work"
PLACE_OWNER = ".weightbeam/run.json"  # in the output: whose run is published there
STEP_REPORT = "run.json"  # in what is published: where it comes from
GONE = "gone-"  # how the name of a folder of work begins that is being deleted
RELEASE = "release"  # the folder that grows, below the work of one step
# of a commit that publishes a step: the run's name and the step's key, and the hub's number of a pull request
TITLE = re.compile(r"Step \d+ of .+ \(\S+-[0-9a-f]{12}\)( \(#\d+\))?")
# what readers look for first is copied last, in this order, and deleted first
LAST = (MARKER, "config.json", "adapter_config.json", STEP_REPORT)
BESIDE = (CARD, STEP_REPORT, changes.JSON, changes.PICTURE)  # what is written beside a release


class Place(abc.ABC):
    """Where the steps of one run, made into one target, are published. Whatever is asked of it raises OSError where that
    can't be told or done.

    Attributes:
      url: of all of them.
    """

    url: str

    @abc.abstractmethod
    def workplace(self, key: str, here: bool = False) -> Store:
        """The folder in which a step is made; on this machine, where it can't be made elsewhere."""

    @abc.abstractmethod
    def of(self, name: str) -> str:
        """The URL of one step."""

    def report(self, url: str) -> Mapping[str, Any]:
        """What a published step says of itself; empty where there is none, or not all of it."""
        with contextlib.suppress(NoRepositoryError):
            return _report(open_store(url))
        return {}

    @abc.abstractmethod
    def publish(self, release: Store, url: str, title: str, is_newest: Callable[[], bool]) -> dict[str, Any]:
        """Publishes a release; does nothing where that has happened. Returns what the record says of it.

        Args:
          release: where it was made.
          url: of the step.
          title: of a commit; it names this very result.
          is_newest: tells whether it is the run's newest, at the moment when that matters.
        """

    def is_whole(self, url: str, key: str, is_newest: Callable[[], bool]) -> bool:
        """Whether all is published that `publish` would have of the step of this key."""
        return self.report(url).get("key") == key

    @abc.abstractmethod
    def others(self, url: str, key: str, title: str) -> Sequence[str]:
        """What lies at the URL of a step, and isn't of the step that was published with this key and title: others put
        it there.
        """

    @abc.abstractmethod
    def remove(self, url: str, key: str, title: str) -> bool:
        """Removes the step that was published with this key and title, and nothing else: a watcher that slept may find
        another one at its URL. What a watcher has left that was stopped meanwhile goes first. Returns whether it was there;
        raises OSError also where what others have put there would go with it.
        """

    def _holds(self, url: str, key: str, title: str) -> bool:
        """Whether the step of this key is at a URL, and nothing else. Raises OSError where others have put something there."""
        found = self.report(url).get("key")
        if found not in (None, key):  # another step was published there since
            return False
        if others := self.others(url, key, title):
            raise StorageError(f"it holds what isn't of the step: {listed(others)}; move that away")
        return found == key

    @abc.abstractmethod
    def check_writable(self, dry_run: bool = False) -> None:
        """Makes sure that steps can be published here; for a dry run as far as that can be told without writing."""

    @abc.abstractmethod
    def owner(self) -> str | None:
        """The run whose steps are published here; None where there are none yet."""

    def own(self, run: str, output: str | None) -> None:  # noqa: B027
        """Says whose steps are published here, and by which output they are known; None where they are by none."""

    def known_as(self) -> str | None:
        """The output by which this place was known first: it may have been moved since, or be reached by another way.
        None where the place doesn't say.
        """
        return None

    def at(self, url: str) -> str:
        """The URL of a step that was recorded as `url` where the place was then."""
        return url

    def is_taken(self, url: str, key: str) -> bool:
        """Whether something else than the step of this key lies where that would be published."""
        return False


def owner_of(store: Store, name: str) -> str | None:
    """The run that a file of a store names; None where it isn't there.

    Raises:
      DamagedRecordError: it is no such file.
      StorageError: it can't be read.
    """
    return _json(store, name).get("run")


def told_other_run(url: str, run: str) -> str:
    """That a place is another run's."""
    return f"{url} holds the steps of {run}; two runs can't be published into one place"


def open_place(url: str, scratch: Path, create_pr: bool = False) -> Place:
    """The place that a URL names; `scratch` is a folder of this machine for what can't be made in place, `create_pr`
    opens pull requests on the hub.
    """
    if is_hub(url):
        return HubPlace(url, scratch, create_pr)
    store = store_to_write(url)
    return FolderPlace(store, scratch) if isinstance(store, LocalFolder) else BucketPlace(store, scratch)


def check_writable(output: Store, dry_run: bool = False) -> None:
    """Makes sure that a folder, or a folder of a bucket, can be written; for a dry run as far as that can be told
    without writing.

    Raises:
      StorageError: it can't be.
    """
    ours = output / ".weightbeam"
    try:
        if not dry_run:
            ours.make()
            ours.check_writable()
        elif isinstance(ours, LocalFolder):
            there = next(folder for folder in (ours.folder, *ours.folder.parents) if os.path.lexists(folder))
            if not there.is_dir():
                raise StorageError(f"{there} is no folder")
            if not os.access(there, os.W_OK | os.X_OK):
                raise StorageError(f"{there} can't be written to")
        else:
            output.list(PLACE_OWNER)  # whether there is such a bucket
    except OSError as e:
        raise StorageError(f"{output.url}: {reason(e)}") from e


def drop(work: Store, check: Callable[[], None] = lambda: None) -> None:
    """Deletes what was made in a folder, or what was taken out of sight, under a name that nobody uses: a watcher that
    slept deletes nothing that another makes there since. `check` raises where that one has taken over.

    Raises:
      OSError: it can't be.
    """
    if not isinstance(work, LocalFolder):
        files = work.list()
        check()
        _delete(work, files)
        return
    check()
    with contextlib.suppress(FileNotFoundError):
        os.rename(work.url, work.parent.path(f"{GONE}{os.urandom(8).hex()}"))
    for name in work.parent.folders() if work.parent.folder.is_dir() else ():  # also what one has left that was killed
        if re.fullmatch(rf"{GONE}[0-9a-f]{{16}}", name):
            work.parent.delete_folder(name)


class StorePlace(Place):
    """A folder, or a folder of a bucket."""

    def __init__(self, store: Store, scratch: Path):
        self.store, self.url, self._scratch = store, store.url, scratch

    def workplace(self, key: str, here: bool = False) -> Store:
        return self.store / WORK / key

    def of(self, name: str) -> str:
        return (self.store / name).url

    def others(self, url: str, key: str, title: str) -> Sequence[str]:
        step, report = open_store(url), self.report(url)
        if report.get("key") != key:
            return step.names()
        others = [name for name in _others_in(step) if name not in BESIDE]
        if isinstance(step, LocalFolder):
            others += mounts_in(step.folder)
        return [*dict.fromkeys([*others, *changed_in(step), *replaced_in(step, report.get("files"))])]

    def is_taken(self, url: str, key: str) -> bool:
        return self.report(url).get("key") != key and bool(open_store(url).names())

    def _aside(self, url: str) -> str:
        """The name below this place for what is removed of a step."""
        assert url.startswith(f"{self.url}/")
        return f"{WORK}/removed-{url.rpartition('/')[2]}"

    def check_writable(self, dry_run: bool = False) -> None:
        check_writable(self.store, dry_run)

    def owner(self) -> str | None:
        return owner_of(self.store, PLACE_OWNER)

    def own(self, run: str, output: str | None) -> None:
        (self.store / ".weightbeam").make()
        self.store.create(PLACE_OWNER, json.dumps({"run": run, "output": output}).encode())

    def known_as(self) -> str | None:
        output = _json(self.store, PLACE_OWNER).get("output")
        return output if isinstance(output, str) else None

    def at(self, url: str) -> str:
        return self.of(url.rpartition("/")[2])


class FolderPlace(StorePlace):
    """A folder: a step appears by a rename."""

    def publish(self, release: Store, url: str, title: str, is_newest: Callable[[], bool]) -> dict[str, Any]:
        if os.path.lexists(url):
            if self.report(url).get("key") != _report(release).get("key"):
                # as from another watcher with other options
                raise StorageError(f"{url} came there meanwhile, and isn't this step as it is made here; try again")
        else:
            _check_whole(release)
            sync_folder(Path(release.url))
            uninterrupted(lambda: os.rename(release.url, url), lambda _: f"but {url} is published", "")
            sync_folder(Path(self.url))
        return {}

    def is_taken(self, url: str, key: str) -> bool:
        return os.path.lexists(url) and self.report(url).get("key") != key

    def others(self, url: str, key: str, title: str) -> Sequence[str]:
        if os.path.islink(url):
            return [f"a link to {os.readlink(url)}"]
        return super().others(url, key, title)

    def remove(self, url: str, key: str, title: str) -> bool:
        """Takes it out of sight first, whole, and looks at it once more there, where nobody publishes another."""
        aside = self.store / self._aside(url)
        if self._drop(aside, url, key, title):
            return True
        if not self._holds(url, key, title):
            return False
        aside.parent.make()
        try:
            os.rename(url, aside.url)
        except FileNotFoundError:
            return False
        return self._drop(aside, url, key, title)

    def _drop(self, aside: Store, url: str, key: str, title: str) -> bool:
        """Deletes a step that was taken out of sight, or puts back what isn't that step."""
        try:
            is_ours = self._holds(aside.url, key, title)
            if is_ours:
                drop(aside)
        except StorageError:
            rename_new(Path(aside.url), Path(url))
            raise
        if not is_ours and os.path.lexists(aside.url):
            rename_new(Path(aside.url), Path(url))
        return is_ours


class BucketPlace(StorePlace):
    """A folder of a bucket: a step is whole once its report is there."""

    def workplace(self, key: str, here: bool = False) -> Store:
        return LocalFolder(str(self._scratch / key)) if here else super().workplace(key)

    def publish(self, release: Store, url: str, title: str, is_newest: Callable[[], bool]) -> dict[str, Any]:
        place = open_store(url)
        _check_whole(release)
        files = release.list()
        ours = {file.name: file for file in files}  # an attempt before may have copied some of them
        strays = [file.name for file in place.list() if not file.is_copy_of(ours.get(file.name))]
        if strays:
            raise StorageError(f"{url} holds what isn't of this step: {listed(strays)}; move it away")
        first, late = _apart(files)
        if isinstance(place, Bucket) and isinstance(release, Bucket):
            place.copy_all(release, first)
        else:
            for file in first:
                place.copy_new(release, file)

        def copy_late() -> None:
            for file in late:
                place.copy_new(release, file)

        unknown = f"{url} was being published; it is if {STEP_REPORT} is there"
        uninterrupted(copy_late, lambda _: f"but {url} is published", unknown)  # others' readers look for each of them
        return {}

    def remove(self, url: str, key: str, title: str) -> bool:
        """Its report goes first: without it, it is none. What else is removed is written down before, with the version
        of each object: none goes that was written since.
        """
        step = open_store(url)
        self._go_on_removing(step)
        there = step.list()
        if not self._holds(url, key, title):
            return False
        self.store.write(self._aside(url), json.dumps({file.name: file.version for file in there}).encode())
        _delete(step, there)
        self._go_on_removing(step)
        return True

    def _go_on_removing(self, step: Store) -> None:
        """Goes on with a removal that was stopped: deletes the objects that were noted then, unless the step has a report,
        since it was published anew.
        """
        noted = self._aside(step.url)
        if not (versions := object_in(self.store, noted)):
            return
        if not step.exists(STEP_REPORT):
            _delete(step, [file for file in step.list() if versions.get(file.name) == file.version])
        self.store.delete(noted)


class HubPlace(Place):
    """A repository: a step is a branch, and the newest is `main`; or each is a pull request."""

    def __init__(self, url: str, scratch: Path, create_pr: bool = False):
        self.url, self._scratch, self._repo, self._create_pr = url, scratch, HubAddress.parse(url).repo, create_pr

    def workplace(self, key: str, here: bool = False) -> Store:
        return LocalFolder(str(self._scratch / key))

    def of(self, name: str) -> str:
        return f"{self.url}@{name}"

    def publish(self, release: Store, url: str, title: str, is_newest: Callable[[], bool]) -> dict[str, Any]:
        files = whole_files(LocalFolder(release.url), BESIDE)
        if STEP_REPORT not in files:
            raise StorageError(f"{release}: has no {STEP_REPORT}, and isn't published")
        run = _report(release).get("run")
        if self._create_pr:
            made = self._commit(files, self.url, title, run, lambda: True)
            return {"pages": [made.page], "checkpoint": made.url} if made else {}
        said: dict[str, Any] = {}
        pages = [self._commit(files, url, title, run, lambda: True)]
        if is_newest():
            try:
                pages.append(self._commit(files, self.url, title, run, is_newest))
            except OthersError as e:
                said = {NOTE: f"isn't made the newest: {e}; what should be in each step belongs into `like`"}
        return {"pages": [made.page for made in pages if made], **said}

    def is_whole(self, url: str, key: str, is_newest: Callable[[], bool]) -> bool:
        """Whether the step's branch is there; of the newest step `main`, too."""
        is_there = super().is_whole(url, key, is_newest)
        return is_there and (self._create_pr or not is_newest() or super().is_whole(self.url, key, is_newest))

    def _commit(
        self, files: Files, url: str, title: str, run: str | None, is_wanted: Callable[[], bool]
    ) -> Published | None:
        """One commit, or a pull request; none where it isn't wanted any more. What others have committed stays, as does a
        card that they have edited.
        """

        def is_ours() -> bool:
            if (held := self.report(url).get("run")) not in (None, run):
                raise StorageError(told_other_run(url, held))
            return is_wanted()

        return publish(
            url, title, files, create_pr=self._create_pr, replace_card=True, earlier=TITLE, is_wanted=is_ours
        )

    def others(self, url: str, key: str, title: str) -> Sequence[str]:
        return changed_since(url, title, TITLE)

    def remove(self, url: str, key: str, title: str) -> bool:
        """A branch is deleted by its name: the hub knows no condition for that, so it is looked at just before; and again
        where the hub says that there is none, which it also says to a token that may not see the repository.
        """
        target = HubAddress.parse(url)
        assert target.branch.startswith("step-")
        is_there = self._holds(url, key, title)
        with hub_errors(target, target.repo, writing=True):
            if not is_there:
                retried(api().model_info)(target.repo)
                return False
            try:
                retried(api().delete_branch)(target.repo, branch=target.branch)
            except HfHubHTTPError as e:
                if e.response is None or e.response.status_code != 404:
                    raise
                if self._holds(url, key, title):
                    raise StorageError(f"{url}: the hub doesn't delete it, and says that it isn't there; it is") from e
        return True

    def check_writable(self, dry_run: bool = False) -> None:
        check_target(self.url)
        if not self._create_pr and self.owner() is None:
            check_free(self.url)  # what is there isn't a run's

    def owner(self) -> str | None:
        run = self.report(self.url).get("run")
        return run if isinstance(run, str) else None


def _others_in(step: Store) -> Sequence[str]:
    """What others have put into a step: a release, or a checkpoint in a folder of its own number."""
    inner = next((name for name in step.folders() if is_checkpoint(step / name)), None)
    if inner is None:
        return others_in(step)
    beside = (name for name in step.names() if not name.startswith(f"{inner}/"))
    return [*(f"{inner}/{name}" for name in others_in_checkpoint(step / inner)), *beside]


def _check_whole(release: Store) -> None:
    """Makes sure that nothing of a release is gone that its record and its index name."""
    if missing := missing_in(release):
        raise StorageError(f"{release}: isn't whole (missing: {listed(missing)}), and isn't published")


def _apart(files: Sequence[File]) -> tuple[list[File], list[File]]:
    """The files of a step, and those that readers look for first, in the order in which they are written."""
    late = [
        file
        for name in LAST
        for file in sorted(files, key=lambda file: file.name.count("/"), reverse=True)
        if file.name.rpartition("/")[2] == name
    ]
    return [file for file in files if file not in late], late


def _delete(step: Store, files: Sequence[File]) -> None:
    """Deletes files that were listed, what readers look for first before all else; in a bucket none that was written
    since.
    """
    others, late = _apart(files)
    for group in [*([file] for file in reversed(late)), others]:
        if isinstance(step, Bucket):
            step.delete_all(group)
        else:
            for file in group:
                step.delete(file.name)


def _json(store: Store, name: str) -> dict[str, Any]:
    """What a JSON file says; empty where there is none.

    Raises:
      DamagedRecordError: it says something else than an object.
      StorageError: it can't be read.
    """
    try:
        said = read_json(store, name)
    except FileNotFoundError:
        return {}
    except JsonError as e:
        raise DamagedRecordError(f"{store.path(name)}: {e}; delete it") from e
    except StorageError:
        raise
    except OSError as e:
        raise StorageError(f"{store.path(name)}: {reason(e)}") from e
    if not isinstance(said, dict):
        raise DamagedRecordError(f"{store.path(name)}: isn't a JSON object; delete it")
    return said


def _report(step: Store) -> dict[str, Any]:
    """What a step says of itself; empty where that isn't all there."""
    with contextlib.suppress(DamagedRecordError):
        return _json(step, STEP_REPORT)
    return {}
