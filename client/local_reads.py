"""Reads of the database's file in this process: one read-only connection in one read transaction.

It is shared by both kinds of snapshot; the lease at the worker is theirs.
"""

import ctypes
import os
import sqlite3
import threading
from time import monotonic_ns
from typing import Any, Final, NoReturn
from urllib.parse import quote

from ..protocol.errors import (
    DeadlineExceededError,
    ForkedClientError,
    InvalidRequestError,
    SchemaError,
    SnapshotExpiredError,
    StorageError,
    StorageReplacedError,
    result_too_large,
)
from ..protocol.limits import DEFAULT_LIMITS, KIB, Limits
from ..protocol.sql_rules import has_statement
from ..protocol.statements import DatabaseFile, Rows, Statement
from ..protocol.values import Parameters, check_parameters, lone_surrogate_place
from . import calls
from .endings import called_inside
from .forks import tell_after_fork
from .local_guard import INTERRUPT, LocalGuard, is_schema_fault, typed
from .terms import NS_PER_MS, Terms, agree, seconds_left

_KEPT_SQL_CHARS_MAX: Final = 16 * KIB
"""Columns of longer texts are looked up each time: what is kept of them must not grow with them."""

_FIRST_ROWS: Final = 2
"""Fetched without being measured one by one, so that a single row costs no loop; SQLite bounds each of them."""

_AS_THEY_ARE: Final = frozenset((type(None), str, bytes, int))
"""Kinds of values that the driver stores unchanged or refuses."""

_SQLITE_LIMITS: Final = (
    (sqlite3.SQLITE_LIMIT_LENGTH, "value_bytes_max"),
    (sqlite3.SQLITE_LIMIT_SQL_LENGTH, "sql_bytes_max"),
    (sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, "bind_values_max"),
    (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, "expression_depth_max"),
    (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, "compound_selects_max"),
    (sqlite3.SQLITE_LIMIT_COLUMN, "columns_max"),
)

_inherited: set[tuple[int, int]] = set()
"""Device and inode of files of which this process inherited an open connection.

SQLite keeps a process's locks on a file in one place, also for connections that are opened later. What it finds
there in a forked child are its parent's locks, which do not hold for the child: nothing it reads could be trusted.
"""


class LocalReads:
    """A read transaction on the database's file, from `_begin` to `_end`.

    Any number of threads may use it, one at a time; each waits for its turn.
    """

    def __init__(self) -> None:
        self._limits = DEFAULT_LIMITS
        self._lock = threading.RLock()
        self._is_inside = False
        self._guard = LocalGuard()
        self._connection: sqlite3.Connection | None = None
        self._cursor: Any = None
        self._columns: dict[str, tuple[str, ...]] = {}
        self._path = ""
        self._file: tuple[int, int] | None = None
        self._is_inherited = False
        self._ended_by = ""
        self._end_ns = 0
        self._deadline_ns = 0
        self._default_ns = 0
        self._result_bytes = 0
        tell_after_fork(self)

    def query(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
    ) -> Rows:
        """Run exactly one statement that only reads, here and now; its rows.

        It sees the database as it was when the snapshot began. `timeout` is seconds, 30 by default and
        never beyond the snapshot's age; the other arguments are those of `Client.query`. The calling
        thread is blocked meanwhile, for microseconds where a row is found by its key.

        Raises `SnapshotExpiredError` after the snapshot's end, `DeadlineExceededError`,
        `NotPermittedError` for what writes or leaves the database, `InvalidRequestError`,
        `RequestTooLargeError`, `ResultTooLargeError`, `ForkedClientError` in a forked child,
        `BusyError`, `StorageCorruptError` or `OperationFailedError`.
        """
        if timeout is None and max_result_bytes is None:
            with self._lock:
                return self._read(sql, parameters, 0, self._result_bytes)
        terms = agree(self._limits, timeout, None, max_result_bytes)
        return self._read_in_turn(sql, parameters, terms)

    def _read_in_turn(self, sql: str, parameters: Parameters, terms: Terms) -> Rows:
        """Read with terms of its own, the wait for other threads included."""
        if not self._lock.acquire(timeout=seconds_left(terms.deadline_ns)):
            raise DeadlineExceededError(
                "the deadline passed while other threads used the snapshot", details={"stage": "waiting"}
            )
        try:
            return self._read(sql, parameters, terms.deadline_ns, terms.result_bytes or self._result_bytes)
        finally:
            self._lock.release()

    def _read(  # noqa: C901 - the whole way of a point read in one piece: each call would cost it 2 percent
        self, sql: str, parameters: Parameters, deadline_ns: int, bytes_max: int
    ) -> Rows:
        if self._is_inside:
            raise called_inside()
        now = monotonic_ns()
        if now >= self._end_ns:
            self._refuse()
        self._is_inside = True
        try:
            self._deadline_ns = deadline_ns or now + self._default_ns
            columns = self._columns.get(sql)
            if columns is None:
                calls.check_sql(sql, self._limits)
            if type(parameters) is tuple:
                for value in parameters:
                    if type(value) not in _AS_THEY_ARE:
                        parameters = check_parameters(parameters, self._limits.bind_values_max)
                        break
            else:
                parameters = check_parameters(parameters, self._limits.bind_values_max)
            cursor = self._cursor
            cursor.execute(sql, parameters)
            rows = cursor.fetchmany(_FIRST_ROWS)
            if len(rows) == _FIRST_ROWS:
                rows = _measured(rows, cursor, bytes_max)
            elif rows:
                row = rows[0]
                left = bytes_max - len(row) - 1
                for value in row:
                    kind = type(value)
                    if kind is str or kind is bytes:
                        left -= len(value)
                if left < 0:
                    raise result_too_large(bytes_max)
            if columns is None:
                columns = self._note_columns(sql)
        except StorageError:
            self._renew_cursor()
            raise
        except Exception as error:
            raise self._failure(error, sql, parameters) from error
        finally:
            self._is_inside = False
        return Rows(columns, rows)

    def _note_columns(self, sql: str) -> tuple[str, ...]:
        """The columns of the statement that has just run; they stay the same while the snapshot lasts."""
        description = self._cursor.description
        if description is None and not has_statement(sql):
            raise InvalidRequestError("the SQL text holds no statement")
        columns = tuple([str(column[0]) for column in description or ()])
        if len(sql) <= _KEPT_SQL_CHARS_MAX:
            if len(self._columns) >= self._limits.statement_cache_count:
                self._columns.clear()
            self._columns[sql] = columns
        return columns

    def _failure(self, error: Exception, sql: str, parameters: Parameters) -> StorageError:
        """Our error for one of the driver's."""
        refusal, self._guard.refusal = self._guard.refusal, ""
        assert self._connection is not None, "it was open when the statement began"
        if not self._connection.in_transaction:
            self._end("SQLite ended its transaction after an error")
        else:
            self._renew_cursor()
        if getattr(error, "sqlite_errorcode", None) == INTERRUPT:
            if monotonic_ns() >= self._end_ns:
                return self._expired("it ended while the statement ran")
            return DeadlineExceededError(
                "the deadline passed while the statement ran", details={"stage": "execution"}
            )
        if not isinstance(error, sqlite3.DatabaseError):
            try:
                # These name the value at fault; the driver does not.
                calls.check_sql(sql, self._limits)
                checked = check_parameters(parameters, self._limits.bind_values_max)
            except StorageError as better:
                return better
            place = lone_surrogate_place(Statement(sql, checked))
            if place is not None:
                return InvalidRequestError(f"{place}: a lone surrogate, which UTF-8 cannot carry")
        return typed(error, self._path, refusal, sql)

    def _renew_cursor(self) -> None:
        """Let go of a half-read statement."""
        if self._connection is not None:
            self._cursor.close()
            self._cursor = self._connection.cursor()

    def _must_stop(self) -> bool:
        """SQLite's progress handler."""
        now = monotonic_ns()
        return now >= self._deadline_ns or now >= self._end_ns

    def _refuse(self) -> NoReturn:
        """Say why there is nothing to read from."""
        if self._is_inherited:
            raise ForkedClientError("the snapshot is its parent process's; take one in this process")
        if self._connection is not None:
            self._end("it outlived its age")
        if not self._ended_by:
            raise InvalidRequestError("the snapshot has not begun; use it in a `with` statement")
        raise self._expired(self._ended_by)

    def _expired(self, why: str) -> SnapshotExpiredError:
        return SnapshotExpiredError(f"the snapshot has ended: {why}; take a new one")

    def _begin(self, place: DatabaseFile, end_ns: int, limits: Limits, worker_sqlite: str) -> None:
        """Open the file and read from it, so that the state is now and stays the same.

        `end_ns` is when it ends on the monotonic clock, `worker_sqlite` the version of the worker's SQLite.
        """
        file = place.device, place.inode
        if file in _inherited:
            raise ForkedClientError(
                "a snapshot of this database was open when this process was forked, and SQLite's locks are not "
                "the child's; use query here, or fork while no snapshot is open"
            )
        with self._lock:
            self._limits, self._path, self._file = limits, place.path, file
            self._default_ns = limits.deadline_ms_default * NS_PER_MS
            self._result_bytes = limits.result_bytes_default
            try:
                self._connection = _connect(place.path, limits)
                _start_reading(self._connection, place, worker_sqlite)
                self._connection.set_authorizer(self._guard.authorize)
                self._connection.set_progress_handler(self._must_stop, limits.progress_steps)
                self._cursor = self._connection.cursor()
                self._end_ns = end_ns
            except sqlite3.Error as error:
                self._end("it could not begin")
                raise typed(error, place.path, "", "") from error
            except BaseException:
                self._end("it could not begin")
                raise

    def _end(self, why: str) -> None:
        """Let the file go; the end that came first is the one that is told."""
        # Before the lock, which a thread may hold for as long as its statement runs: that ends then.
        self._end_ns = 0
        with self._lock:
            self._ended_by = self._ended_by or why
            connection, self._connection = self._connection, None
            self._cursor = None
            if connection is not None:
                connection.close()
            self._file = None

    def after_fork(self) -> None:
        """Leave the parent's connection alone, and for ever: even to close it would touch the parent's file."""
        self._lock = threading.RLock()
        self._is_inside = False
        if self._file is None:
            return
        _inherited.add(self._file)
        for kept in (self._connection, self._cursor):
            if kept is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._connection = self._cursor = self._file = None
        self._is_inherited = True
        self._end_ns = 0


def _measured(rows: list[tuple[Any, ...]], rest: sqlite3.Cursor, bytes_max: int) -> list[tuple[Any, ...]]:
    """All rows, measured while they are stepped: what their encoding takes at the least."""
    left = bytes_max
    found: list[tuple[Any, ...]] = []
    for source in (rows, rest):
        for row in source:
            left -= len(row) + 1
            for value in row:
                kind = type(value)
                if kind is str or kind is bytes:
                    left -= len(value)
            if left < 0:
                raise result_too_large(bytes_max)
            found.append(row)
    return found


def _connect(path: str, limits: Limits) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?mode=ro",
        uri=True,
        timeout=limits.busy_ms / 1000,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=limits.statement_cache_count,
    )
    try:
        for pragma in ("query_only = 1", "trusted_schema = 0", "mmap_size = 0"):
            connection.execute(f"pragma {pragma}").close()
        for kind, name in _SQLITE_LIMITS:
            connection.setlimit(kind, getattr(limits, name))
    except BaseException:
        connection.close()
        raise
    return connection


def _start_reading(connection: sqlite3.Connection, place: DatabaseFile, worker_sqlite: str) -> None:
    """Begin, with a first read: before it the transaction would have no state yet."""
    connection.execute("begin").close()
    try:
        connection.execute("select count(*) from sqlite_master").fetchall()
    except sqlite3.Error as error:
        if is_schema_fault(error) and _version(worker_sqlite) > sqlite3.sqlite_version_info:
            raise SchemaError(
                f"this process's SQLite {sqlite3.sqlite_version} cannot read the schema, which SQLite "
                f"{worker_sqlite} made: {error}; use query, which runs in the worker",
                details={"sqlite_version": sqlite3.sqlite_version, "worker_sqlite_version": worker_sqlite},
            ) from error
        raise
    try:
        found = os.stat(place.path)
    except OSError as error:
        raise _other_file(place.path) from error
    if (found.st_dev, found.st_ino) != (place.device, place.inode):
        raise _other_file(place.path)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _other_file(path: str) -> StorageReplacedError:
    return StorageReplacedError(
        f"{path} is not the file that the worker has open: it was replaced, or this process sees other files; "
        "use query, which runs in the worker",
        outcome="not_committed",
        details={"file": path},
    )
