"""The driver's errors as ours, told apart by SQLite's extended code, never by text."""

import apsw

from ..protocol.errors import (
    BusyError,
    Detail,
    InvalidRequestError,
    NotPermittedError,
    OperationFailedError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
)

_BUSY = (apsw.BusyError, apsw.LockedError)
_CORRUPT = (apsw.CorruptError, apsw.NotADBError)
_REFUSED = (apsw.AuthError, apsw.PermissionsError)
_BINDINGS = (apsw.BindingsError, apsw.RangeError, apsw.MismatchError)
_DISK_FAULTS = frozenset((apsw.SQLITE_IOERR, apsw.SQLITE_CANTOPEN, apsw.SQLITE_CORRUPT, apsw.SQLITE_NOTADB))


class Aborted(Exception):
    """The progress handler ended the running statement; whoever set it knows why."""


def extended_code(error: apsw.Error) -> int:
    """SQLite's extended result code, or the plain one where the driver raised the error itself."""
    return int(getattr(error, "extendedresult", 0) or getattr(error, "result", 0) or 0)


def code_name(code: int) -> str:
    """SQLite's name of an extended result code."""
    names = apsw.mapping_extended_result_codes, apsw.mapping_result_codes
    return str(names[0].get(code) or names[1].get(code & 0xFF) or "SQLITE_ERROR")


def _is_full(error: apsw.Error) -> bool:
    # SQLite makes room for the WAL's index by writing, and says this where there is none.
    return isinstance(error, apsw.FullError) or extended_code(error) == apsw.SQLITE_IOERR_SHMSIZE


def is_disk_fault(error: BaseException) -> bool:
    """Whether a read, write or sync of the file system failed, or the file is damaged.

    `error` is the driver's, or ours that was raised from it. It counts against the connection, not only
    against the statement that met it.
    """
    cause = error if isinstance(error, apsw.Error) else error.__cause__
    if not isinstance(cause, apsw.Error):
        return False
    if _is_full(cause):
        return False
    code = extended_code(cause)
    # A virtual table's module says CORRUPT_VTAB of its own content, as of an index without its table.
    return code & 0xFF in _DISK_FAULTS and code != apsw.SQLITE_CORRUPT_VTAB


def typed(error: Exception, path: str, refusal: str) -> Exception:
    """Our error for one that running a statement raised.

    `path` is the database's, `refusal` the reason the guard gave for the statement, if it did. What is
    none of the driver's own was raised while values were bound or read: a number beyond 64 bit, a name
    that is not bound, stored text that is not UTF-8.
    """
    if isinstance(error, apsw.InterruptError):
        return Aborted()
    if isinstance(error, apsw.Error):
        return _typed(error, path, refusal)
    if isinstance(error, MemoryError):
        return OperationFailedError(
            "not enough memory for the statement", details={"exception": "MemoryError"}
        )
    if isinstance(error, KeyError):
        return InvalidRequestError(f"the statement has a parameter {error}, and the mapping has no such name")
    return InvalidRequestError(f"a value does not fit the statement: {type(error).__name__}: {error}")


def _typed(error: apsw.Error, path: str, refusal: str) -> StorageError:
    code = extended_code(error)
    details: dict[str, Detail] = {
        "sqlite_code": code,
        "sqlite_name": code_name(code),
        "sqlite_message": str(error),
    }
    if refusal or isinstance(error, _REFUSED):
        return NotPermittedError(refusal or f"SQLite refused the statement: {error}", details=details)
    if isinstance(error, _BUSY):
        return BusyError(
            f"another process holds the lock of {path}; repeat, or end that process", details=details
        )
    if _is_full(error):
        return StorageFullError(f"no space left for {path}: {error}; free some and repeat", details=details)
    if isinstance(error, _CORRUPT):
        return StorageCorruptError(
            f"{path} is damaged or no database: {error}; restore a backup", details=details | {"file": path}
        )
    if isinstance(error, _BINDINGS):
        return InvalidRequestError(f"the bound values do not fit the statement: {error}")
    return OperationFailedError(f"{details['sqlite_name']}: {error}", details=details)
