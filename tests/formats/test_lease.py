"""The lease: one owner at a time, whoever races for it, and none that outlives its owner for long."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import elsewhere
import pytest

from weightbeam.formats.staging import lease
from weightbeam.formats.storage import store_and_name

ROOT = Path(__file__).parents[2]
TAKE = """import sys, time
from weightbeam.formats.staging import lease
from weightbeam.formats.storage import store_and_name
taken = lease.hold(*store_and_name(sys.argv[1]))
"""
HOLDER = TAKE + "with taken: print('held', flush=True); time.sleep(60)"


def hold(path: Path) -> AbstractContextManager[None]:
    return lease.hold(*store_and_name(str(path)))


def hold_elsewhere(path: Path) -> subprocess.Popen:
    """A process that holds the lease."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def pretend(path: Path, age: float = 0.0, **owner: object) -> None:
    """A lease of someone else, renewed `age` seconds ago."""
    os.symlink(json.dumps(dict(owner=1, host="elsewhere", processes="b", pid=1, process="1") | owner), path)
    when = time.time() - age
    os.utime(path, (when, when), follow_symlinks=False)


OTHERS = """import os, sys
from weightbeam.formats.staging import lease
from weightbeam.formats.storage import store_and_name
taken = lease.hold(*store_and_name(sys.argv[1]))
os.setgroups([]), os.setgid(65534), os.setuid(65534)
os.listdir(os.path.dirname(sys.argv[1]))
try:
    with taken: print("held")
except OSError as e:
    print(type(e).__name__)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_s_try_leaves_nothing(tmp_path: Path) -> None:
    """In a sticky folder nobody can take away what another user left; nor should the owner find something there that he
    can't.
    """
    os.chmod(tmp_path, 0o1777)
    for folder in tmp_path.parents[:3]:
        os.chmod(folder, folder.stat().st_mode | 0o055)
    pretend(tmp_path / "lease", age=10_000)
    ran = subprocess.run(
        [sys.executable, "-c", OTHERS, str(tmp_path / "lease")], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.stdout == "PermissionError\n", ran.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"lease", "lease.lock"}


def test_a_folder_that_is_a_loop_of_links(tmp_path: Path) -> None:
    """What the system says of it, and not that it isn't a lease."""
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"), hold(tmp_path / "one" / "lease"):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_lock_that_another_user_left(tmp_path: Path) -> None:
    """He was killed while he took or released a lease in a folder of all: others can't remove his file, and needn't."""
    os.chmod(tmp_path, 0o1777)
    for folder in tmp_path.parents[:3]:
        os.chmod(folder, folder.stat().st_mode | 0o055)
    lock, command = tmp_path / "lease.lock", [sys.executable, "-c", OTHERS, str(tmp_path / "lease")]
    lock.write_bytes(lease.LOCK_MARK)
    for _ in range(2):
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert ran.stdout == "held\n", ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["lease.lock"]
    assert lock.stat().st_uid == 0
    lock.unlink()
    os.mkfifo(lock, 0o644)
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.stdout == "ForeignError\n", ran.stderr


def test_a_lock_that_can_only_be_read_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it can't be locked, which doesn't mean that there are no locks (Linux, flock(2))."""
    lock, plain, opened = tmp_path / "lease.lock", fcntl.flock, os.open
    lock.write_bytes(lease.LOCK_MARK)

    def flock(fd: int, how: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        plain(fd, how)

    def open_as_another(path: Any, flags: int, *mode: int, **rest: Any) -> int:
        if path == lock and flags & os.O_ACCMODE == os.O_RDWR and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *mode, **rest)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(os, "open", open_as_another)
    monkeypatch.setattr(lease, "PATIENCE", 0.2)
    with pytest.raises(lease.HeldError, match=re.escape(f"has locked {lock}")), hold(tmp_path / "lease"):
        pass


HIDDEN = """import json, os, socket, sys
from weightbeam.formats.staging import lease
owner = dict(host=socket.gethostname(), processes=lease._processes(), pid=int(sys.argv[1]), process=sys.argv[2])
os.setgroups([]), os.setgid(65534), os.setuid(65534)
assert not os.path.exists(f"/proc/{sys.argv[1]}")
print(lease._is_gone(owner), lease._is_gone(owner | {"pid": 1 << 22}))
"""


def test_an_owner_that_proc_hides_lives(tmp_path: Path) -> None:
    """Another user's, where /proc is mounted so that each sees his own: it is there, and when it began isn't known."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", HIDDEN, str(os.getpid()), started]
    if os.geteuid() or subprocess.run([*command[:4], "mount -t proc -o hidepid=2 proc /proc"], check=False).returncode:
        pytest.skip("only root may mount")
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == ["False", "True"]


@pytest.mark.skipif(elsewhere.is_hidden(), reason="without /proc a dead process counts as alive until its parent looks")
def test_a_living_owner_keeps_everyone_out(tmp_path: Path) -> None:
    """And when it is killed, the next comes in at once."""
    path = tmp_path / "lease"
    process = hold_elsewhere(path)
    try:
        with pytest.raises(lease.HeldError, match=rf"process {process.pid} on .*renewed \d s ago$"), hold(path):
            pass
    finally:
        process.kill()
        # dead, and still among the processes until its parent looks
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert path.is_symlink()
    with hold(path):
        assert path.is_symlink()
    assert list(tmp_path.iterdir()) == []
    process.wait()


def test_a_process_that_stays_within_the_lock_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes a lease beside who is just taking or releasing it; once the lock is free, the next comes in."""
    monkeypatch.setattr(lease, "PATIENCE", 0.05)
    path, lock = tmp_path / "lease", tmp_path / "lease.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(lease.HeldError, match="has locked"), hold(path):
            pass
    assert not path.is_symlink()
    with hold(path):
        assert path.is_symlink()


def test_an_owner_elsewhere_is_stale_only_when_it_stops_renewing(tmp_path: Path) -> None:
    """Its process number says nothing here."""
    path = tmp_path / "lease"
    pretend(path, age=lease.STALE - 5)
    with pytest.raises(lease.HeldError, match="process 1 on elsewhere"), hold(path):
        pass
    path.unlink()
    pretend(path, age=lease.STALE + 5)
    with hold(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_is_set_back(tmp_path: Path) -> None:
    """A lease of tomorrow is nobody's: whoever held it would have renewed it by now. One of the next moment is held."""
    path = tmp_path / "lease"
    pretend(path, age=-lease.STALE + 5)
    with pytest.raises(lease.HeldError, match=r"renewed 0 s ago; if it is gone, wait 60 s"), hold(path):
        pass
    path.unlink()
    pretend(path, age=-86_400)
    with hold(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_owner_renews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long conversion stays the owner."""
    monkeypatch.setattr(lease, "HEARTBEAT", 0.02)
    path = tmp_path / "lease"
    with hold(path):
        os.utime(path, (0, 0), follow_symlinks=False)
        deadline = time.monotonic() + 5
        while path.lstat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - path.lstat().st_mtime < 5


def test_a_lease_that_was_taken_over_is_not_removed(tmp_path: Path) -> None:
    """An owner that slept too long finds another's lease, and leaves it."""
    path = tmp_path / "lease"
    with hold(path):
        path.unlink()
        pretend(path)
    assert path.is_symlink()


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b'{"owner": "ab'])
def test_a_lease_that_lost_its_bytes_is_taken_over(tmp_path: Path, content: bytes) -> None:
    """As where a file system has no links, and the power is cut."""
    path = tmp_path / "lease"
    path.write_bytes(content)
    os.utime(path, (0, 0))
    with hold(path):
        assert path.is_symlink()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b'{"owner": "a'])
def test_a_lease_that_does_not_say_who_has_it(tmp_path: Path, content: bytes) -> None:
    """As a power cut leaves one: it is waited for, and nobody is made up."""
    (tmp_path / "lease").write_bytes(content)
    said = r"another conversion \(its lease doesn't say whose\) is at work there"
    with pytest.raises(lease.HeldError, match=said), hold(tmp_path / "lease"):
        pass


def test_another_lease_is_not_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would never go stale."""
    monkeypatch.setattr(lease, "HEARTBEAT", 0.01)
    path = tmp_path / "lease"
    with hold(path):
        path.unlink()
        pretend(path, age=30)
        found = path.lstat().st_mtime
        time.sleep(0.3)
        assert path.lstat().st_mtime == found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Between the link that makes it this one's and the work under it: it is let go again, with its lock."""
    plain = os.utime

    def signalled(*arguments: Any, **keywords: Any) -> None:
        signal.raise_signal(number)
        plain(*arguments, **keywords)

    monkeypatch.setattr(lease.os, "utime", signalled)
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), lease.hold(*store_and_name(str(tmp_path / "x.lease"))):
            pytest.fail("the work began")
    finally:
        signal.signal(number, before)
    assert not list(tmp_path.iterdir())


def test_of_many_racers_for_a_stale_lease_one_wins(tmp_path: Path) -> None:
    """Ten times eight processes that all find it stale at the same time."""
    race = (
        TAKE
        + "sys.stdin.readline()\ntry:\n    with taken: print('won', flush=True); sys.stdin.readline()\nexcept lease.HeldError: print('lost', flush=True)\n"
    )
    for number in range(10):
        path = tmp_path / str(number)
        pretend(path, age=lease.STALE + 5)
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        racers = [subprocess.Popen([sys.executable, "-c", race, str(path)], **pipes) for _ in range(8)]
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        told = [racer.stdout.readline() for racer in racers]
        for racer in racers:
            racer.communicate("\n")
        assert sorted(told) == ["lost\n"] * 7 + ["won\n"]
    assert list(tmp_path.iterdir()) == []
