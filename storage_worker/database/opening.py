"""Connections as the worker opens them: pragmas in their order, SQLite's own limits from ours."""

import os
import random
import time
from typing import Literal

import apsw

from ..protocol.errors import BusyError, DatabasePathError, SchemaError, StorageCorruptError
from ..protocol.limits import KIB, Limits
from .connection import Database
from .faults import code_name, extended_code, typed

Durability = Literal["full", "normal"]

PAGE_BYTES = 4096
OPTIMIZE, OPTIMIZE_AT_OPEN = "pragma optimize", "pragma optimize=0x10002"

_SQLITE_LIMITS = (
    (apsw.SQLITE_LIMIT_LENGTH, "value_bytes_max"),
    (apsw.SQLITE_LIMIT_SQL_LENGTH, "sql_bytes_max"),
    (apsw.SQLITE_LIMIT_VARIABLE_NUMBER, "bind_values_max"),
    (apsw.SQLITE_LIMIT_EXPR_DEPTH, "expression_depth_max"),
    (apsw.SQLITE_LIMIT_COMPOUND_SELECT, "compound_selects_max"),
    (apsw.SQLITE_LIMIT_COLUMN, "columns_max"),
    (apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, "like_pattern_bytes_max"),
)


def sqlite_version() -> str:
    """The version of the SQLite that apsw carries."""
    return apsw.sqlite_lib_version()


def has_wal_reset_fault(version: str) -> bool:
    """Whether a SQLite version can corrupt a database when a checkpoint races a WAL reset.

    Fixed in 3.44.6, 3.50.7, 3.51.3 and from 3.53.0; 3.52.0 was withdrawn (sqlite.org, "WAL-reset bug").
    """
    major, minor, patch = (int(part) for part in version.split(".")[:3])
    branch = major, minor
    first_fixed = {(3, 44): 6, (3, 50): 7, (3, 51): 3}
    if branch in first_fixed:
        return patch < first_fixed[branch]
    return branch < (3, 53)


def open_writer(path: str, durability: Durability, limits: Limits) -> Database:
    """The one connection that writes and checkpoints; makes the database where there is none.

    Raises `BusyError` where foreign processes keep the switch to WAL busy, `StorageCorruptError` where
    the file is no database, `DatabasePathError` where it cannot be opened.
    """
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    connection = _connect(path, flags, limits)
    try:
        if os.stat(path).st_size == 0:
            connection.pragma("page_size", PAGE_BYTES)
            connection.pragma("auto_vacuum", "incremental")
        _switch_to_wal(connection, path, limits)
        connection.pragma("synchronous", durability)
        # Without it statistics take a scan of each index, however large it is.
        connection.pragma("analysis_limit", limits.analysis_rows_max)
        connection.pragma("foreign_keys", 1)
        connection.pragma("journal_size_limit", limits.wal_degraded_bytes)
        connection.pragma("wal_autocheckpoint", 0)
        # Below 0 it is in KiB. What SQLite takes by itself holds the indexes of a small database only.
        connection.pragma("cache_size", -(limits.writer_cache_bytes // KIB))
        _open_wal(connection)
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        return Database(connection, path, limits)
    except apsw.Error as error:
        connection.close(True)
        raise typed(error, path, "") from error


def open_reader(path: str, limits: Limits) -> Database:
    """A connection that only reads, of a database that a writer has opened."""
    connection = _connect(path, apsw.SQLITE_OPEN_READWRITE, limits)
    try:
        # Not opened read-only: such a connection cannot take part in recovery or the WAL index.
        connection.pragma("query_only", 1)
        _open_wal(connection)
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        return Database(connection, path, limits, read_only=True)
    except apsw.Error as error:
        connection.close(True)
        raise typed(error, path, "") from error


def open_copy(path: str, limits: Limits) -> Database:
    """A new database file as the target of a backup; refused where something is there already."""
    if os.path.lexists(path):
        raise DatabasePathError(f"{path} is there already; name a file that is not", details={"file": path})
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    connection = _connect(path, flags, limits)
    # What it is without that was decided when SQLite was compiled.
    connection.pragma("synchronous", "full")
    return Database(connection, path, limits)


def _connect(path: str, flags: int, limits: Limits) -> apsw.Connection:
    # Of the whole process. The bounds on one value and on columns alone would allow rows of gigabytes.
    apsw.hard_heap_limit(limits.sqlite_heap_bytes_max)
    try:
        connection = apsw.Connection(path, flags, statementcachesize=limits.statement_cache_count)
        # Before any pragma: the first one may meet a recovery that holds the lock.
        connection.set_busy_timeout(limits.busy_ms)
        connection.pragma("trusted_schema", 0)
        connection.pragma("mmap_size", 0)
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0)
        connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 0)
        for kind, name in _SQLITE_LIMITS:
            connection.limit(kind, getattr(limits, name))
        return connection
    except apsw.CantOpenError as error:
        raise DatabasePathError(
            f"{path} cannot be opened: {error}", details={"sqlite_name": code_name(extended_code(error))}
        ) from error


def _open_wal(connection: apsw.Connection) -> None:
    """Read once: SQLite opens the WAL with the first read, and later another file may lie in its place."""
    connection.execute("select count(*) from sqlite_schema").fetchall()


def _switch_to_wal(connection: apsw.Connection, path: str, limits: Limits) -> None:
    """Switch to WAL; a foreign reader may make that busy for a while."""
    end = time.monotonic() + limits.wal_switch_ms_max / 1000
    while True:
        try:
            mode = connection.pragma("journal_mode", "wal")
        except apsw.BusyError as error:
            if time.monotonic() >= end:
                raise BusyError(
                    f"another process keeps {path} busy, so that it cannot be switched to WAL; end that process"
                ) from error
            time.sleep(random.uniform(limits.busy_retry_ms_min, limits.busy_retry_ms_max) / 1000)
            continue
        if mode != "wal":
            raise SchemaError(f"{path} stays in journal mode {mode}: its file system may not allow WAL")
        return


def quick_check(database: Database) -> None:
    """Raise `StorageCorruptError` where SQLite's quick check of the whole file finds a fault."""
    found = [str(row[0]) for row in database.own("pragma quick_check(1)")]
    if found != ["ok"]:
        raise StorageCorruptError(
            f"{database.path} fails its quick check: {found[0]}; restore a backup",
            details={"file": database.path, "check": "quick_check"},
        )
