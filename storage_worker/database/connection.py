"""One SQLite connection: guarded statements of clients and stores, and the worker's own."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import apsw
import msgspec

from ..ownership import SidePaths
from ..protocol.errors import (
    InvalidRequestError,
    NotPermittedError,
    ResultTooLargeError,
    StorageError,
    result_too_large,
)
from ..protocol.limits import Limits
from ..protocol.sql_rules import has_statement, may_only_read, text_reason
from ..protocol.statements import Rows
from ..protocol.values import Value
from .faults import Aborted, is_disk_fault, typed
from .guard import Guard
from .script import split

# The driver keeps prepared statements by text and prepare flags. What clients and stores run carries this
# flag and the worker's own does not, so that neither can ever meet a statement prepared for the other.
GUARDED = apsw.SQLITE_PREPARE_PERSISTENT

KEPT_CHARS_MAX = 16_384
"""Longer texts are prepared anew each time, as the driver does: what is kept of them must not grow with them."""

ROW_MEMORY_BYTES, VALUE_MEMORY_BYTES = 64, 40
"""About what a row and one short value in it take."""

Bindings = Sequence[Value] | Mapping[str, Value]

CheckpointMode = Literal["passive", "truncate"]
_CHECKPOINTS = {"passive": apsw.SQLITE_CHECKPOINT_PASSIVE, "truncate": apsw.SQLITE_CHECKPOINT_TRUNCATE}


class Shape(msgspec.Struct, frozen=True):
    """What is known of a statement once it was prepared.

    `reads`: it changes nothing. `columns`: the names of its result's columns when it was prepared.
    """

    reads: bool
    columns: tuple[str, ...]


class Database:
    """A connection and its guard; used by one thread at a time. Made by `opening`."""

    def __init__(
        self, connection: apsw.Connection, path: str, limits: Limits, *, read_only: bool = False
    ) -> None:
        self.path = path
        self._read_only = read_only
        self._limits = limits
        self._connection = connection
        self._guard = Guard()
        connection.authorizer = self._guard.authorize
        self._cursor = connection.cursor()
        self._shapes: dict[str, Shape] = {}
        self._plain: set[str] = set()
        self._stop: Callable[[], bool] = lambda: False
        self._spoilt = False
        self._page_bytes = 0
        self.wal_frames = 0
        """Frames in the WAL after this connection's last commit."""
        connection.set_wal_hook(self._note_wal)
        self._guard.on = True

    def _note_wal(self, _: apsw.Connection, __: str, frames: int) -> int:
        self.wal_frames = frames
        return apsw.SQLITE_OK

    # Statements of clients and stores

    def run(
        self,
        sql: str,
        parameters: Bindings,
        result_bytes_max: int,
        reads_only: bool = False,
        named: bool = True,
    ) -> Rows:
        """Run one guarded statement to its end; with `reads_only` one that changes something is refused.

        The names of a query's columns are left out where they need not be `named`: to find them costs as much as a row.

        The rows are measured while they are stepped: past `result_bytes_max` the statement is closed and
        `ResultTooLargeError` raised. Raises `Aborted` where the progress handler ended it, else the
        typed error.
        """
        self._guard.refusal = ""
        self._spoilt = False
        shape = self._shapes.get(sql) or self.shape(sql, parameters)
        if reads_only and not shape.reads:
            raise InvalidRequestError(
                "a query must only read; use execute for what changes something", details={"use": "execute"}
            )
        connection = self._connection
        try:
            if shape.reads:
                self._cursor.execute(sql, parameters, prepare_flags=GUARDED)
                return self._fetch(sql, parameters, result_bytes_max, named)
            # The row id is this statement's or 0, never that of an earlier insert of another client.
            connection.set_last_insert_rowid(0)
            changes = connection.total_changes()
            self._cursor.execute(sql, parameters, prepare_flags=GUARDED)
            rows = self._fetch_changed(sql, parameters, result_bytes_max) if shape.columns else Rows()
            if connection.total_changes() != changes:
                rows.rows_changed = connection.changes()
                rows.last_insert_rowid = connection.last_insert_rowid()
            return rows
        except ResultTooLargeError:
            raise
        except Exception as error:
            self._reset()
            self._spoilt = self._spoilt or is_disk_fault(error)
            raise typed(error, self.path, self._guard.refusal) from error

    def shape(self, sql: str, parameters: Bindings = ()) -> Shape:
        """The shape of one guarded statement; typed errors where it is none, or more than one, or refused."""
        found = self._shapes.get(sql)
        if found is not None:
            return found
        if "\0" in sql:
            raise InvalidRequestError(
                "the SQL text holds a NUL, where SQLite would end it; bind such a text instead"
            )
        reason = text_reason(sql)
        if reason is not None:
            raise NotPermittedError(reason)
        found, rest = self._prepare(sql, parameters)
        if found is None:
            raise InvalidRequestError("the SQL text holds no statement")
        if rest and self._prepare(rest, ())[0] is not None:
            raise InvalidRequestError(
                "one statement at a time; use batch, or script for a text of several",
                details={"use": "script"},
            )
        if len(sql) <= KEPT_CHARS_MAX:
            if len(self._shapes) >= self._limits.statement_cache_count:
                self._shapes.clear()
                self._plain.clear()
            self._shapes[sql] = found
            if not found.reads and not found.columns:
                self._plain.add(sql)
        return found

    def is_plain(self, sql: str) -> bool:
        """Whether a text is known as one statement that changes something, returns nothing and never failed."""
        return sql in self._plain

    def forget_plain(self, sql: str) -> None:
        """Note that a statement has failed: it may do so again, and have changed something by then."""
        self._plain.discard(sql)

    def statements(self, sql: str) -> Iterator[str]:
        """Split a text of several statements without parameters, where SQLite too finds their ends."""
        return (text for text in split(sql) if has_statement(text))

    def check_time(self) -> None:
        """Raise `Aborted` where the running request must end, of which short statements are not asked."""
        if self._stop():
            raise Aborted

    def _prepare(self, sql: str, parameters: Bindings) -> tuple[Shape | None, str]:
        """Prepare the first statement of a text without running it: its shape, or None, and the rest."""
        found: list[tuple[Shape | None, str]] = []

        def note(cursor: apsw.Cursor, text: str, _: Any) -> bool:
            columns = tuple([str(column[0]) for column in cursor.get_description()])
            reads = cursor.is_readonly and may_only_read(sql)
            shape = Shape(reads, columns) if cursor.has_vdbe else None
            found.append((shape, sql.encode()[len(text.encode()) :].decode()))
            return False

        cursor = self._connection.cursor()
        cursor.exec_trace = note
        try:
            cursor.execute(sql, parameters, prepare_flags=GUARDED)
        except apsw.ExecTraceAbort:
            return found[0]
        except Exception as error:
            raise typed(error, self.path, self._guard.refusal) from error
        finally:
            cursor.close(True)
        return None, ""

    def _fetch(self, sql: str, parameters: Bindings, result_bytes_max: int, named: bool = True) -> Rows:
        cursor = self._cursor
        columns: tuple[str, ...] = ()
        rows: list[tuple[Any, ...]] = []
        left = result_bytes_max
        is_large = result_bytes_max > self._limits.result_bytes_max
        for row in self._weighed() if is_large else cursor:
            if named and not rows:
                columns = next(zip(*cursor.get_description(), strict=True))
            # What its encoding takes at the least: a byte for the row and one for each value.
            left -= len(row) + 1
            for value in row:
                kind = type(value)
                if kind is str or kind is bytes:
                    left -= len(value)
            if left < 0:
                self._reset()
                raise result_too_large(result_bytes_max)
            rows.append(row)
        if rows or not named:
            return Rows(columns, rows)
        # A finished statement no longer tells its columns; the schema may have changed since it was noted.
        shape = self._prepare(sql, parameters)[0]
        return Rows(shape.columns if shape else (), rows)

    def _weighed(self) -> Iterator[tuple[Any, ...]]:
        """The running statement's rows, as far as there is memory for them: many small ones take far more than sent."""
        most = left = self._limits.result_memory_bytes_max
        for row in self._cursor:
            left -= ROW_MEMORY_BYTES + VALUE_MEMORY_BYTES * len(row)
            if left < 0:
                self._reset()
                raise ResultTooLargeError(
                    f"the rows of the result would take more than {most} bytes of memory; read it in pages",
                    details={"result_memory_bytes_max": most},
                )
            yield row

    def _fetch_changed(self, sql: str, parameters: Bindings, result_bytes_max: int) -> Rows:
        """Fetch what a statement returns of its changes; they are made before its first row is read."""
        self._spoilt = True
        rows = self._fetch(sql, parameters, result_bytes_max)
        self._spoilt = False
        return rows

    def _reset(self) -> None:
        """Let go of a half-read statement; the next one gets a fresh cursor."""
        self._cursor.close(True)
        self._cursor = self._connection.cursor()

    # The worker's own statements

    def own(self, sql: str, parameters: Sequence[Value] = (), *, keep: bool = True) -> list[tuple[Any, ...]]:
        """Run a statement of the worker's own, unguarded, and `keep` it prepared; the driver's error becomes ours."""
        guard = self._guard
        guard.on = False
        try:
            return list(self._cursor.execute(sql, parameters, can_cache=keep))
        except Exception as error:
            self._reset()
            raise typed(error, self.path, "") from error
        finally:
            guard.on = True

    def bound_growth(self, room_bytes: int) -> None:
        """Let the database grow by so many bytes and no more; then SQLite says that it is full."""
        if not self._page_bytes:
            self._page_bytes = int(self.own("pragma page_size")[0][0])
        pages = int(self.own("pragma page_count")[0][0]) + max(1, room_bytes // self._page_bytes)
        # Each text is another one: kept, they would take the places of the clients' statements.
        self.own(f"pragma max_page_count={pages}", keep=False)

    def begin(self) -> None:
        """BEGIN IMMEDIATE; `BusyError` where a foreign process holds the lock."""
        self.own("begin immediate")

    def commit(self) -> None:
        """COMMIT at the connection's durability."""
        self.own("commit")

    def rollback(self) -> None:
        """ROLLBACK where a transaction is open; nothing where SQLite ended it already."""
        self._reset()
        if self._connection.in_transaction:
            try:
                self.own("rollback")
            except StorageError:
                # It can report that a page could not be read again, and has ended the transaction all the same.
                if self._connection.in_transaction:
                    raise

    @property
    def side_directory(self) -> str:
        """The directory of the files beside the database."""
        return SidePaths.of(self.path).directory

    @property
    def in_transaction(self) -> bool:
        """Whether SQLite has a transaction open: after an error the only thing to believe."""
        return self._connection.in_transaction

    @property
    def intact(self) -> bool:
        """Whether the transaction is still open after an error, and no statement took effect by half."""
        return self._read_only or (self._connection.in_transaction and not self._spoilt)

    def deferred_violations(self) -> int:
        """More than 0 where a deferred foreign key is violated, so that COMMIT would fail."""
        return self._connection.status(apsw.SQLITE_DBSTATUS_DEFERRED_FKS)[0]

    def set_progress(self, stop: Callable[[], bool]) -> None:
        """Have `stop` asked every `progress_steps` VM steps; true ends the running statement."""
        self._stop = stop
        self._connection.set_progress_handler(stop, self._limits.progress_steps)

    def checkpoint(self, mode: CheckpointMode) -> tuple[int, int]:
        """Checkpoint; frames in the WAL and how many of them are in the database now. Busy is no error."""
        try:
            return self._connection.wal_checkpoint(mode=_CHECKPOINTS[mode])
        except apsw.BusyError:
            return (-1, -1)
        except apsw.Error as error:
            raise typed(error, self.path, "") from error

    def backup_from(self, source: "Database") -> "Backup":
        """A running copy of another database into this empty one; that connection's writes join it."""
        backup = self._connection.backup("main", source._connection, "main")  # noqa: SLF001 - its own class
        return Backup(backup, self.path)

    def close(self) -> None:
        """Close the connection; a second time does nothing."""
        # Nothing that was committed depends on it, not even on a disk that fails once more.
        with contextlib.suppress(apsw.Error):
            self._connection.close(True)


class Backup:
    """A copy that is under way, made in steps."""

    def __init__(self, backup: apsw.Backup, path: str) -> None:
        self._backup = backup
        self._path = path

    def step(self, pages: int) -> bool:
        """Copy so many pages; whether it is done. Where a foreign process holds a lock it is not, and no error."""
        try:
            return self._backup.step(pages)
        except (apsw.BusyError, apsw.LockedError):
            return False
        except apsw.Error as error:
            raise typed(error, self._path, "") from error

    @property
    def pages(self) -> tuple[int, int]:
        """Pages still to copy, pages in all."""
        return self._backup.remaining, self._backup.page_count

    def finish(self) -> None:
        """End the copy."""
        self._backup.close(True)
