"""The files that are open are still the files under the path: asked of the file system by `stat`."""

import os

from ..protocol.errors import StorageReplacedError
from ..protocol.limits import Limits

WAL_SUFFIX = "-wal"


class OpenFiles:
    """Device and inode of a database and its WAL as they were when they were opened.

    Only `stat` is used: opening and closing a database file by other means than SQLite drops the
    process's POSIX locks on it (sqlite.org, "How To Corrupt An SQLite Database File", 2.2).
    """

    __slots__ = ("_database", "_paths", "_wal")

    def __init__(self, path: str) -> None:
        self._paths = path, path + WAL_SUFFIX
        self._database, self._wal = (_identity(found) for found in self._paths)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the database."""
        return self._database

    def check(self) -> None:
        """Raise `StorageReplacedError` where a file was renamed, deleted or put in another's place."""
        database, wal = self._paths
        try:
            found = os.stat(database)
            if (found.st_dev, found.st_ino) != self._database:
                raise _replaced(database)
            found = os.stat(wal)
            if (found.st_dev, found.st_ino) != self._wal:
                raise _replaced(wal)
        except OSError as error:
            raise _replaced(str(error.filename)) from error


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _replaced(path: str) -> StorageReplacedError:
    return StorageReplacedError(
        f"{path} is no longer the file that is open: it was deleted, renamed or replaced while the worker ran",
        details={"file": path},
    )


def file_bytes(path: str) -> int:
    """The size of a file, 0 where none can be seen."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def disk_free_bytes(path: str) -> int:
    """Free bytes of the file system that holds a path, as an ordinary user sees them."""
    found = os.statvfs(os.path.dirname(path))
    return found.f_bavail * found.f_frsize


def disk_reserve_bytes(path: str, limits: Limits) -> int:
    """Below how many free bytes writes are refused: the smaller of a fixed size and a share of the whole."""
    found = os.statvfs(os.path.dirname(path))
    return min(
        limits.disk_reserve_bytes_max, found.f_blocks * found.f_frsize * limits.disk_reserve_percent // 100
    )
