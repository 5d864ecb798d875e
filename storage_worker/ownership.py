"""Who owns a database: an operating-system lock beside it, and a record that informs."""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from .filesystem import (
    FILE_MODE,
    SIDE_DIRECTORY_SUFFIX,
    check_path,
    failure_of_file,
    make_private,
    private_directory,
)
from .lockfile import LockFile, is_locked
from .protocol.errors import AlreadyOwnedError, DatabasePathError

RECORD_BYTES_MAX = 64 * 1024
TAKE_SECONDS_MAX = 0.1
"""How long `Ownership.take` outlasts an `is_owned` of another process, which holds the lock for an instant."""

TAKE_PAUSE_SECONDS = 0.001


class SidePaths(NamedTuple):
    """The files beside a database, all in one directory of its own."""

    directory: str
    lock: str
    start_lock: str
    record: str
    log: str

    @classmethod
    def of(cls, real: str) -> "SidePaths":
        """Those of the database with the real path `real`."""
        directory = real + SIDE_DIRECTORY_SUFFIX
        names = ("lock", "start.lock", "record", "worker.log")
        return cls(directory, *(f"{directory}/{name}" for name in names))


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker writes beside its database so that others find it.

    It proves nothing: only the lock says whether a worker lives. `worker` is the id of this start, `pid`
    and `pid_started` (seconds since the epoch) its process, `boot` and `host` the machine and its start,
    `address` where it listens, `started_ms` milliseconds since the epoch, `secret` what grants roles,
    `owner_pid` the process that it ends with or None where it is shared, `version` that of the package.
    """

    worker: str
    pid: int
    pid_started: float
    boot: str
    host: str
    address: str
    started_ms: int
    secret: bytes
    owner_pid: int | None
    version: str


class Ownership:
    """The lock of a database, held by the one worker that may write it."""

    def __init__(self, real: str, lock: LockFile) -> None:
        self.path = real
        self._lock = lock
        self._record = Path(SidePaths.of(real).record)

    @classmethod
    def take(cls, path: str) -> "Ownership":
        """Take the lock of the database at `path`, and make its files private.

        Raises `AlreadyOwnedError` naming the owner where another worker holds it, and `DatabasePathError`
        where no worker can serve the path.
        """
        real = check_path(path)
        side = SidePaths.of(real)
        private_directory(side.directory)
        end = time.monotonic() + TAKE_SECONDS_MAX
        while (lock := LockFile.try_take(side.lock)) is None:
            if time.monotonic() >= end:
                raise already_owned(real)
            time.sleep(TAKE_PAUSE_SECONDS)
        owned = cls(real, lock)
        try:
            make_private(real)
            # Whoever is refused from now on must not be told of the owner before.
            owned._forget()
        except BaseException:
            lock.release()
            raise
        return owned

    def write_record(self, record: Record) -> None:
        """Write the record, whole or not at all, readable by this user only.

        Raises `StorageFullError` or `DatabasePathError` where that fails.
        """
        new = self._record.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(new, flags, FILE_MODE), "wb") as file:
                os.fchmod(file.fileno(), FILE_MODE)
                file.write(msgspec.json.encode(record))
            new.replace(self._record)
        except OSError as error:
            raise failure_of_file("cannot write the record", str(self._record), error) from error

    def release(self) -> None:
        """Remove the record and give the lock up."""
        self._forget()
        self._lock.release()

    def _forget(self) -> None:
        # Where the directory was renamed, another worker's record may stand under the old path.
        if self._lock.in_place():
            with contextlib.suppress(FileNotFoundError):
                self._record.unlink()


def read_record(real: str) -> Record | None:
    """The record beside the database with the real path `real`; None where there is none to be read.

    Raises `DatabasePathError` where another user's worker wrote it.
    """
    path = SidePaths.of(real).record
    try:
        with open(path, "rb") as file:
            writer = os.fstat(file.fileno()).st_uid
            data = file.read(RECORD_BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise failure_of_file("another user's worker may have written the record", path, error) from error
    if writer != os.geteuid():
        # Whoever may write beside the database could otherwise lead this user's clients anywhere.
        raise DatabasePathError(
            f"the record {path} was written by the user with id {writer}; a worker serves its own user only",
            details={"path": path, "user": writer},
        )
    try:
        return msgspec.json.decode(data, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_owned(real: str) -> bool:
    """Whether a worker holds the lock of the database with the real path `real`; makes no file."""
    return is_locked(SidePaths.of(real).lock)


def already_owned(real: str) -> AlreadyOwnedError:
    """The error that names the worker that holds the lock, or says what keeps others from starting one."""
    if not is_owned(real):
        return AlreadyOwnedError(
            f"another process starts or supervises the worker of {real}; connect to it, or stop it",
            details={"path": real},
        )
    record = read_record(real)
    if record is None:
        return AlreadyOwnedError(
            f"another worker holds {real} and has not said yet where it listens; connect to it, or stop it",
            details={"path": real},
        )
    advice = "connect to it, or stop it"
    if record.owner_pid is None:
        advice = f"it is a shared one that ends 5 s after its last client: connect to it, repeat then, or stop it: storage-worker stop {real}"
    return AlreadyOwnedError(
        f"the worker {record.worker} (process {record.pid}) holds {real} and listens at {record.address}; {advice}",
        details={
            "path": real,
            "pid": record.pid,
            "worker": record.worker,
            "address": record.address,
            "started_ms": record.started_ms,
        },
    )


def try_start_lock(real: str) -> LockFile | None:
    """The lock of whoever may start a worker, or None where someone has it.

    A host that owns its worker holds it for as long as it restarts that worker.
    """
    side = SidePaths.of(real)
    private_directory(side.directory)
    return LockFile.try_take(side.start_lock)
