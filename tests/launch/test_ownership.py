import fcntl
import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from storage_worker.lockfile import LockFile
from storage_worker.ownership import (
    Ownership,
    Record,
    SidePaths,
    already_owned,
    is_owned,
    read_record,
    try_start_lock,
)
from storage_worker.processes import boot_id, started_of
from storage_worker.protocol.errors import AlreadyOwnedError, DatabasePathError

from .programs import killed, start_program
from .test_filesystem import NOBODY


def record_of(pid: int, **changes: object) -> Record:
    record = Record(
        worker="0123456789abcdef",
        pid=pid,
        pid_started=started_of(pid) or 0.0,
        boot=boot_id(),
        host=socket.gethostname(),
        address="unix:///run/x.sock",
        started_ms=1,
        secret=b"\0\xff" * 16,
        owner_pid=None,
        version="1",
    )
    return msgspec.structs.replace(record, **changes)


def write_stale(database: Path, record: Record) -> None:
    owned = Ownership.take(str(database))
    owned.write_record(record)
    # As a killed worker leaves it: the lock is gone, the record is not.
    owned._lock.release()


def test_a_database_has_one_owner_that_is_named(database: Path) -> None:
    owned = Ownership.take(str(database))
    with pytest.raises(AlreadyOwnedError, match="has not said yet"):
        Ownership.take(str(database))
    record = record_of(os.getpid())
    owned.write_record(record)
    assert read_record(str(database)) == record
    assert is_owned(str(database))
    with pytest.raises(AlreadyOwnedError) as caught:
        Ownership.take(str(database))
    for name in ("pid", "worker", "address"):
        assert str(caught.value.details[name]) in caught.value.message
        assert caught.value.details[name] == getattr(record, name)
    owned.release()
    assert not is_owned(str(database))
    assert read_record(str(database)) is None
    Ownership.take(str(database)).release()


@pytest.mark.parametrize(
    "stale",
    [
        record_of(1),
        record_of(os.getpid()),
        record_of(os.getppid()),
        record_of(2**22 + 1),
        record_of(1, boot="another boot", host="another host"),
        record_of(os.getpid(), pid_started=12345.0),
    ],
    ids=["init", "ourselves", "a living stranger", "nobody", "elsewhere", "an id used again"],
)
def test_a_stale_record_never_refuses(database: Path, stale: Record) -> None:
    write_stale(database, stale)
    assert read_record(str(database)) == stale
    assert not is_owned(str(database))
    owned = Ownership.take(str(database))
    assert read_record(str(database)) is None
    owned.release()


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 5_000, b"\xff", b'{"worker": 1}', b"null"])
def test_a_broken_record_is_none(database: Path, text: bytes) -> None:
    write_stale(database, record_of(1))
    Path(SidePaths.of(str(database)).record).write_bytes(text)
    assert read_record(str(database)) is None
    Ownership.take(str(database)).release()


def test_another_users_record_is_refused(database: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    write_stale(database, record_of(1))
    os.chown(SidePaths.of(str(database)).record, NOBODY, NOBODY)
    with pytest.raises(DatabasePathError, match="was written by the user"):
        read_record(str(database))


def test_a_killed_owner_frees_the_database(database: Path) -> None:
    holder = start_program(
        f"""
import signal
from storage_worker.ownership import Ownership
owned = Ownership.take({str(database)!r})
print("held", flush=True)
signal.pause()
"""
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    assert is_owned(str(database))
    killed(holder)
    Ownership.take(str(database)).release()


def test_an_owner_outlasts_those_who_only_ask(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = SidePaths.of(str(database))
    Ownership.take(str(database)).release()
    asked = os.open(private.lock, os.O_RDONLY)
    fcntl.flock(asked, fcntl.LOCK_SH)
    tries = 0
    real = LockFile.try_take

    def answered_at_the_third(path: str) -> LockFile | None:
        nonlocal tries
        tries += 1
        if tries == 3:
            fcntl.flock(asked, fcntl.LOCK_UN)
        return real(path)

    monkeypatch.setattr(LockFile, "try_take", answered_at_the_third)
    Ownership.take(str(database)).release()
    assert tries == 3
    os.close(asked)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_side_files_are_private_whatever_the_mask(database: Path, mask: int) -> None:
    database.touch(0o644)
    kept = os.umask(mask)
    try:
        owned = Ownership.take(str(database))
        owned.write_record(record_of(1))
        start = try_start_lock(str(database))
        assert start is not None
        start.release()
    finally:
        os.umask(kept)
    side = Path(SidePaths.of(str(database)).directory)
    assert stat.S_IMODE(side.stat().st_mode) == 0o700
    assert {path.name for path in side.iterdir()} == {"lock", "record", "start.lock"}
    for path in (database, *side.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    owned.release()


def test_a_refused_path_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DatabasePathError):
        Ownership.take(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.parent.glob("*-sw")) == []


def test_asking_makes_no_file(tmp_path: Path) -> None:
    assert not is_owned(str(tmp_path / "app.db"))
    assert read_record(str(tmp_path / "app.db")) is None
    assert "starts or supervises" in already_owned(str(tmp_path / "app.db")).message
    assert list(tmp_path.iterdir()) == []


def test_the_start_lock_is_another_one(database: Path) -> None:
    start = try_start_lock(str(database))
    assert start is not None
    assert try_start_lock(str(database)) is None
    Ownership.take(str(database)).release()
    start.release()


def test_a_renamed_owner_leaves_anothers_record_alone(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    database = tmp_path / "dir" / "app.db"
    old = Ownership.take(str(database))
    (tmp_path / "dir").rename(tmp_path / "moved")
    (tmp_path / "dir").mkdir()
    new = Ownership.take(str(database))
    new.write_record(record_of(1))
    old.release()
    assert read_record(str(database)) == record_of(1)
    new.release()
