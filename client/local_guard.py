"""What SQL may do on a local read-only connection, and the standard driver's errors as ours.

Errors are told apart by SQLite's extended code, never by text.
"""

import sqlite3
from typing import Final

from ..protocol.errors import (
    BusyError,
    DatabasePathError,
    Detail,
    InvalidRequestError,
    NotPermittedError,
    OperationFailedError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
)
from ..protocol.sql_rules import (
    FUNCTIONS_REFUSED,
    PRAGMAS_READ,
    PRAGMAS_TELLING,
    PRAGMAS_WRITTEN,
    text_reason,
)

_LEAVING: Final = frozenset((sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH))
_STEPS: Final = frozenset((sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT))

# What writes is not refused here but by SQLite, to which the connection is read-only: virtual tables, full-text
# indexes among them, prepare statements that write when they are opened for a read.
_ONLY_READS: Final = "a snapshot only reads; use the client's execute for what changes something"

_AUTH, _PERM, _READONLY = 23, 3, 8
_BUSY, _LOCKED = 5, 6
_FULL, _CORRUPT, _NOTADB, _CANTOPEN = 13, 11, 26, 14
_MISMATCH, _RANGE = 20, 25
INTERRUPT: Final = 9


class LocalGuard:
    """The authorizer of one local connection. `refusal` is the reason of the last refusal, "" where there is none."""

    __slots__ = ("refusal",)

    def __init__(self) -> None:
        self.refusal = ""

    def authorize(
        self, action: int, first: str | None, second: str | None, _schema: str | None, _inner: str | None
    ) -> int:
        """SQLite's authorizer callback, asked when a statement is prepared; the arguments are SQLite's."""
        reason = _reason(action, (first or "").lower(), second)
        if reason is None:
            return sqlite3.SQLITE_OK
        self.refusal = reason
        return sqlite3.SQLITE_DENY


def _reason(action: int, first: str, second: str | None) -> str | None:
    if action == sqlite3.SQLITE_FUNCTION:
        name = (second or "").lower()
        return f"the function {name} leaves the database" if name in FUNCTIONS_REFUSED else None
    if action == sqlite3.SQLITE_PRAGMA:
        told = first in PRAGMAS_READ or first in PRAGMAS_WRITTEN
        if first in PRAGMAS_TELLING or (told and second is None):
            return None
        return f"PRAGMA {first} is not one that a client may use so"
    if action in _LEAVING:
        return "ATTACH and DETACH leave the database"
    if action in _STEPS:
        return "a snapshot is one transaction from its begin to its end"
    return None


def typed(error: Exception, path: str, refusal: str, sql: str) -> StorageError:
    """Our error for one that opening `path` or running a statement on it raised; `refusal` is the guard's."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        if isinstance(error, MemoryError):
            return OperationFailedError(
                "not enough memory for the statement", details={"exception": "MemoryError"}
            )
        return InvalidRequestError(f"the statement or a value does not fit: {type(error).__name__}: {error}")
    name = str(getattr(error, "sqlite_errorname", "SQLITE_ERROR"))
    details: dict[str, Detail] = {
        "sqlite_code": int(code),
        "sqlite_name": name,
        "sqlite_message": str(error),
    }
    # A few statements fail before SQLite asks its authorizer.
    refusal = refusal or text_reason(sql) or ""
    primary = code & 0xFF
    if primary == _READONLY:
        refusal = refusal or _ONLY_READS
    if refusal or primary in {_AUTH, _PERM}:
        return NotPermittedError(refusal or f"SQLite refused the statement: {error}", details=details)
    if primary in {_BUSY, _LOCKED}:
        return BusyError(f"another process holds the lock of {path}; repeat", details=details)
    if primary == _FULL:
        return StorageFullError(
            f"no space left for a large sort: {error}; free some and repeat", details=details
        )
    if primary in {_CORRUPT, _NOTADB}:
        return StorageCorruptError(
            f"{path} is damaged or no database: {error}; restore a backup", details=details | {"file": path}
        )
    if primary == _CANTOPEN:
        return DatabasePathError(f"{path} cannot be opened by this process: {error}", details=details)
    if primary in {_MISMATCH, _RANGE}:
        return InvalidRequestError(f"the bound values do not fit the statement: {error}", details=details)
    return OperationFailedError(f"{name}: {error}", details=details)


def is_schema_fault(error: sqlite3.Error) -> bool:
    """Whether SQLite could open the file but not read its schema: it is damaged, or newer than this SQLite."""
    code = getattr(error, "sqlite_errorcode", 0) or 0
    return code & 0xFF in {_CORRUPT, 1}
