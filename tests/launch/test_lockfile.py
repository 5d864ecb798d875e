import os
import signal
from pathlib import Path

import pytest

from storage_worker import lockfile
from storage_worker.lockfile import LockFile, is_locked
from storage_worker.protocol.errors import DatabasePathError

from .programs import first_line, killed, start_program


def take(path: Path) -> LockFile:
    lock = LockFile.try_take(str(path))
    assert lock is not None
    return lock


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(str(path))
    assert not path.exists()
    lock = take(path)
    assert is_locked(str(path))
    assert LockFile.try_take(str(path)) is None
    lock.release()
    lock.release()
    assert not is_locked(str(path))
    assert path.exists()
    take(path).release()


@pytest.mark.parametrize("mask", [0o000, 0o777])
def test_a_lock_file_is_private(tmp_path: Path, mask: int) -> None:
    kept = os.umask(mask)
    try:
        take(tmp_path / "lock").release()
    finally:
        os.umask(kept)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_replaced_while_it_was_locked_is_locked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    real = lockfile._lock
    replaced: list[int] = []

    def replace_once(descriptor: int, kind: int, locked: str) -> bool:
        if not replaced:
            replaced.append(path.stat().st_ino)
            path.rename(tmp_path / "away")
            path.touch()
        return real(descriptor, kind, locked)

    monkeypatch.setattr(lockfile, "_lock", replace_once)
    lock = take(path)
    assert lock.in_place()
    assert replaced != [path.stat().st_ino]
    assert is_locked(str(path))
    path.unlink()
    assert not lock.in_place()
    lock.release()


def test_a_file_that_is_replaced_all_the_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockfile, "_is_at", lambda _descriptor, _path: False)
    with pytest.raises(DatabasePathError, match="replaced all the time"):
        LockFile.try_take(str(tmp_path / "lock"))


def test_a_lock_file_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(DatabasePathError, match="cannot open the lock file"):
        LockFile.try_take(str(tmp_path / "lock"))
    with pytest.raises(DatabasePathError, match="cannot open the lock file"):
        is_locked(str(tmp_path / "lock"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_forked_child_keeps_no_lock_beyond_its_parent(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    holder = start_program(
        f"""
import os, signal
from storage_worker.lockfile import LockFile
lock = LockFile.try_take({path!r})
if os.fork() == 0:
    lock.release()
    print(os.getpid(), flush=True)
signal.pause()
"""
    )
    child = int(first_line(holder))
    try:
        assert is_locked(path)
        holder.kill()
        holder.wait()
        assert not is_locked(path)
    finally:
        os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    holder = start_program(
        f"""
import signal
from storage_worker.lockfile import LockFile
lock = LockFile.try_take({path!r})
print("held", flush=True)
signal.pause()
"""
    )
    first_line(holder)
    assert LockFile.try_take(path) is None
    killed(holder)
    take(tmp_path / "lock").release()
