"""Copying the payloads of a database's copy: the files that its rows name, which a copy of the database alone lacks.

The database is copied first. A payload's file never changes, and one that the copy names is swept an hour after its
last release at the earliest, so that all of them are still there. They are written into a directory of another name,
checked and synced, and that is put in its place when it is whole.
"""

import fcntl
import itertools
import os
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from ..client.client import Client
from ..client.local_guard import typed
from ..client.terms import deadline_after
from ..filesystem import (
    DIRECTORY_MODE,
    FILE_MODE,
    SIDE_DIRECTORY_SUFFIX,
    failure_of_file,
    private_directory,
    sync_directory,
)
from ..protocol.errors import DatabasePathError, DeadlineExceededError, StorageCorruptError, StorageError
from . import payload_files as files
from .payload_check import PayloadFinding
from .payload_files import Folder
from .payload_reading import check_client
from .payloads import FIELDS, record_of
from .records import PayloadRef

_UNFINISHED = "payloads-copied"
"""The directory that is being filled, beside its place; a copy that was killed leaves it to the next one."""

_TABLE = "select 1 from sqlite_master where type = 'table' and name = 'conversation_payloads'"
# In the order of their names, so that each folder is filled and synced once.
_ROWS = f"select name, {FIELDS} from conversation_payloads order by name"  # noqa: S608 - of constants


class PayloadsCopied(msgspec.Struct, frozen=True):
    """What was copied: so many payloads, and the bytes of their files; `findings` are those that are damaged here."""

    payloads: int
    bytes: int
    findings: list[PayloadFinding]


def copy_payloads(
    client: Client, target: str | os.PathLike[str], *, timeout: float | None = None
) -> PayloadsCopied:
    """Copy the payloads that a copy of the client's database refers to, into the directory beside that copy.

    `target` is what `Client.backup` was given, within the last hour; no worker may have been started for it. A payload
    that is missing or damaged is left out and told in `findings`; all others are there, or none where this raises.
    Nothing is made where the copy has no payloads. `timeout` is in seconds for all of it; without one it takes what it
    takes. Any role will do.

    Raises `DatabasePathError` where there is no copy, something stands in the way or cannot be written,
    `StorageFullError`, `DeadlineExceededError`, `StorageCorruptError` where the copy cannot be read, and the errors of
    a call.
    """
    check_client(client, Client, "in an event loop call it in a thread, with a Client")
    deadline_ns = None if timeout is None else deadline_after(timeout, client.limits)
    source = _folder_beside(client.status(timeout=timeout).path)
    real = os.path.realpath(target)
    if not os.path.exists(real):
        raise DatabasePathError(
            f"there is no copy {real} to add payloads to; make it first: client.backup(...)",
            details={"path": real},
        )
    place = _folder_beside(real)
    if os.path.lexists(place.path):
        raise DatabasePathError(
            f"{place.path} is there already, of another database or since a worker has served the copy; remove it, or"
            " copy to another place",
            details={"path": place.path},
        )
    try:
        with _rows(real) as rows:
            first = next(rows, None)
            if first is None:
                return PayloadsCopied(0, 0, [])
            with _whole(place) as folder:
                copying = _Copying(source, folder, deadline_ns)
                copying.run(itertools.chain([first], rows))
                return PayloadsCopied(copying.payloads, copying.bytes, copying.findings)
    except sqlite3.Error as error:
        raise typed(error, real, "", _ROWS) from error
    except StorageError:
        # Some of ours are OSErrors, too.
        raise
    except OSError as error:
        raise failure_of_file("cannot copy the payloads to", place.path, error) from error


def _folder_beside(real: str) -> Folder:
    return Folder.inside(f"{real}{SIDE_DIRECTORY_SUFFIX}")


@contextmanager
def _rows(real: str) -> Iterator[Iterator[tuple[object, ...]]]:
    """The rows of a copy that nobody has open: read so that no file of a WAL comes beside it."""
    uri = f"{Path(real).as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        yield database.execute(_ROWS) if database.execute(_TABLE).fetchall() else iter(())


@contextmanager
def _whole(place: Folder) -> Iterator[Folder]:
    """A directory to fill, which is put in its place and synced at the end; nothing of it is left after an error."""
    side = os.path.dirname(place.path)
    private_directory(side)
    with _alone(side):
        made = f"{side}/{_UNFINISHED}"
        with suppress(FileNotFoundError):
            shutil.rmtree(made)
        try:
            filling = Folder(made)
            for directory in (filling.path, filling.objects, filling.temporary):
                os.mkdir(directory, DIRECTORY_MODE)
            yield filling
            for directory in (filling.objects, filling.path):
                sync_directory(directory)
            os.rename(filling.path, place.path)
            made = place.path
            for directory in (side, os.path.dirname(side)):
                sync_directory(directory)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            # It stays where there is something else in it.
            with suppress(OSError):
                os.rmdir(side)
            raise


@contextmanager
def _alone(side: str) -> Iterator[None]:
    """Within, nobody else copies payloads into a directory; the lock ends with this process at the latest."""
    descriptor = os.open(side, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DatabasePathError(
                f"payloads are being copied into {side} already; wait for the end of that",
                details={"path": side},
            ) from error
        try:
            yield
        finally:
            # Closing alone would leave the lock with a child that was forked meanwhile.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


class _Copying:
    """Copies the payloads of rows, which come in the order of their names, until a deadline (monotonic clock, ns)."""

    def __init__(self, source: Folder, target: Folder, deadline_ns: int | None) -> None:
        self.payloads = 0
        self.bytes = 0
        self.findings: list[PayloadFinding] = []
        self._source = source
        self._target = target
        self._deadline_ns = deadline_ns

    def run(self, rows: Iterable[tuple[object, ...]]) -> None:
        """Copy all of them."""
        bucket = None
        for name, *fields in rows:
            if self._deadline_ns is not None and time.monotonic_ns() >= self._deadline_ns:
                raise DeadlineExceededError(
                    f"the deadline passed after {self.payloads} payloads; no payload was left beside the copy",
                    details={"stage": "client"},
                )
            ref = record_of(name, tuple(fields))
            if ref is None:
                told = "its row is not one that the store writes"
                self.findings.append(PayloadFinding(str(name), "record", told))
                continue
            path = self._target.path_of(str(name))
            if os.path.dirname(path) != bucket:
                self._end(bucket)
                bucket = os.path.dirname(path)
                os.mkdir(bucket, DIRECTORY_MODE)
            self._copy(str(name), ref, path)
        self._end(bucket)

    def _end(self, bucket: str | None) -> None:
        if bucket is not None:
            sync_directory(bucket)

    def _copy(self, name: str, ref: PayloadRef, path: str) -> None:
        try:
            with files.opened(self._source.path_of(name), ref) as descriptor:
                _copy_file(descriptor, ref, path)
        except StorageCorruptError as error:
            with suppress(FileNotFoundError):
                os.unlink(path)
            self.findings.append(PayloadFinding(name, str(error.details["check"]), error.message))
        else:
            self.payloads += 1
            self.bytes += ref.stored_bytes


def _copy_file(descriptor: int, ref: PayloadRef, path: str) -> None:
    """Copy a payload's file, check what was written, and sync it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, FILE_MODE), "w+b") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        file.writelines(files.stored_chunks(descriptor, ref))
        file.seek(0)
        files.verify(file.fileno(), ref)
        os.fsync(file.fileno())
