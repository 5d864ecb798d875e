"""What one request writes: a transaction that does not fit into SQLite's cache goes to the WAL before its COMMIT."""

from .database.files import WAL_SUFFIX, disk_free_bytes, disk_reserve_bytes, file_bytes
from .protocol.errors import RequestTooLargeError, StorageError, StorageFullError
from .protocol.limits import Limits


class Growth:
    """The growth of one database's WAL while a request runs.

    Arguments: `path`, the database; `limits`, how much one request may write. What it writes over an older
    part of the file is not seen, and no more than that was there.
    """

    def __init__(self, path: str, limits: Limits) -> None:
        self._path = path
        self._bytes_max = limits.request_write_bytes_max
        self._reserve_bytes = disk_reserve_bytes(path, limits)
        self._start_bytes: int | None = None

    def begin(self) -> None:
        """Another request runs from now on."""
        self._start_bytes = None

    def room_bytes(self) -> int:
        """How much the database may grow now: not beyond what one request may write, nor beyond the disk's reserve.

        What is written stands in the WAL first and needs room in the database once more.
        """
        room = (disk_free_bytes(self._path) - self._reserve_bytes) // 2
        return max(0, min(self._bytes_max, room))

    def explained(self, error: StorageError) -> StorageError:
        """The error of a statement: where SQLite found no room, and the disk has some, it was the request's bound."""
        if not isinstance(error, StorageFullError):
            return error
        # Most of what was written stands in the WAL by then.
        has_grown = file_bytes(self._path + WAL_SUFFIX) >= self._bytes_max // 2
        return self._too_large() if has_grown and self.room_bytes() >= self._bytes_max else error

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"the request would write more than the {self._bytes_max} bytes that one may write; cut it into several",
            details={"request_write_bytes_max": self._bytes_max},
        )

    def refusal(self) -> StorageError | None:
        """Why the running request must end, if it must. The first look of each request only notes the size."""
        size = file_bytes(self._path + WAL_SUFFIX)
        if self._start_bytes is None:
            self._start_bytes = size
        written = size - self._start_bytes
        if written > self._bytes_max:
            return self._too_large()
        if written and disk_free_bytes(self._path) < self._reserve_bytes:
            return StorageFullError(
                f"the request would leave less than {self._reserve_bytes} bytes of disk space; free some and repeat",
                details={"disk_reserve_bytes": self._reserve_bytes},
            )
        return None
