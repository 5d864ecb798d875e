"""Files for large values on their way: they wait there and not in memory, however slow their client is.

A file has no name, lies on the disk of the database and is gone with its last use, or with the worker.
"""

import errno
import os
import tempfile
import threading
from typing import BinaryIO

import msgspec

from .database.files import disk_free_bytes, disk_reserve_bytes
from .ownership import SidePaths
from .protocol.errors import OperationFailedError, OverloadedError, StorageError, StorageFullError
from .protocol.limits import PROTOCOL_ENVELOPE_BYTES, Limits
from .protocol.status import SpoolStatus

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Spools:
    """All spools of a worker, bounded by count and bytes; any thread may make and close some.

    Arguments: `database`, the real path of the worker's database, in whose side directory the files lie; `limits`. `frame_bytes_max` is the largest body
    of an answer that is sent in one frame.
    """

    def __init__(self, database: str, limits: Limits) -> None:
        self._directory = SidePaths.of(database).directory
        self._database = database
        self._limits = limits
        self._lock = threading.Lock()
        self.frame_bytes_max = limits.result_bytes_max + PROTOCOL_ENVELOPE_BYTES
        self.status = SpoolStatus()

    def open(self, size: int) -> "Spool":
        """An empty spool for a value of so many bytes.

        Raises `OverloadedError` where that is more than the worker spools, `StorageFullError` where the disk has
        no room for it above its reserve, `OperationFailedError` where no file can be made.
        """
        self._reserve(size)
        try:
            left = disk_free_bytes(self._database) - size
            if left < disk_reserve_bytes(self._database, self._limits):
                raise StorageFullError(
                    f"no space beside {self._database} for a value of {size} bytes on its way; free some and repeat"
                )
            file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            self.release(size)
            raise _typed(error) from error
        except BaseException:
            self.release(size)
            raise
        return Spool(self, file, size)

    def keep(self, data: bytes | memoryview) -> "Spool":
        """A spool that holds a value; raises as `open` and `Spool.write` do."""
        spool = self.open(len(data))
        try:
            spool.write(data)
        except BaseException:
            spool.close()
            raise
        return spool

    def _reserve(self, size: int) -> None:
        status, limits = self.status, self._limits
        with self._lock:
            for name, most, wanted in (
                ("spools", limits.spools_max, status.spools + 1),
                ("spool_bytes", limits.spool_bytes_max, status.spooled_bytes + size),
            ):
                if wanted > most:
                    raise OverloadedError(
                        f"large values on their way come to {most} {name} already, which is the limit; repeat later",
                        retry_after=limits.retry_after_ms_max / 1000,
                        details={"bound": name},
                    )
            status.spools += 1
            status.spooled_bytes += size
            status.largest_bytes = max(status.largest_bytes, status.spooled_bytes)

    def release(self, size: int) -> None:
        """Give a spool's place back."""
        with self._lock:
            self.status.spools -= 1
            self.status.spooled_bytes -= size


class Spool:
    """One value in a file. `size` is what it holds once it is whole; one thread at a time uses it."""

    __slots__ = ("_file", "_spools", "size")

    def __init__(self, spools: Spools, file: BinaryIO, size: int) -> None:
        self._spools = spools
        self._file = file
        self.size = size

    def write(self, part: bytes | memoryview) -> None:
        """Add the next part; `StorageFullError` where the disk has no room for it."""
        rest = memoryview(part)
        try:
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError as error:
            raise _typed(error) from error

    def read(self, offset: int, count: int) -> bytes:
        """A part of the value; `OperationFailedError` where the disk does not give it back."""
        try:
            found = os.pread(self._file.fileno(), count, offset)
        except OSError as error:
            raise _typed(error) from error
        if len(found) != count:
            raise OperationFailedError("a large value on its way was cut short on the disk")
        return found

    def close(self) -> None:
        """Give the file and its place back; a second time does nothing."""
        if not self._file.closed:
            self._file.close()
            self._spools.release(self.size)


class Large(msgspec.Struct, eq=False):
    """The spools of one request: its arguments where they came in chunks, its result where it goes in some."""

    spools: Spools
    arguments: Spool | None = None
    result: Spool | None = None

    def drop_result(self) -> None:
        """Forget a result that is not sent."""
        if self.result is not None:
            self.result.close()
            self.result = None

    def close(self) -> None:
        """Let go of everything."""
        self.drop_result()
        if self.arguments is not None:
            self.arguments.close()
            self.arguments = None


def _typed(error: OSError) -> StorageError:
    if error.errno in _NO_SPACE:
        return StorageFullError(f"no space for a large value on its way: {error}; free some and repeat")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OverloadedError(
            "no descriptor is left for a large value on its way; repeat later",
            retry_after=1.0,
            details={"bound": "descriptors"},
        )
    return OperationFailedError(
        f"a large value on its way cannot be spooled: {error}", details={"exception": type(error).__name__}
    )
