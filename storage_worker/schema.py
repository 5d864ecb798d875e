"""The worker's own tables, and the view of the database that migrations need."""

import contextlib
from collections.abc import Iterator

from .database.connection import Database
from .migrations import AppliedMigration
from .protocol.errors import SchemaError
from .protocol.limits import Limits
from .receipts import SCHEMA as RECEIPTS
from .transaction import Transaction

OWN_VERSION = 1
OWN_TABLES = (
    "create table if not exists _sw_fence(id integer primary key, number integer not null)",
    "create table if not exists _sw_own(name text primary key, value integer not null) without rowid",
    """create table if not exists _sw_migrations(
        store text not null, number integer not null, name text not null, checksum text not null,
        applied_ms integer not null, primary key(store, number)
    ) without rowid""",
    *RECEIPTS,
)


def prepare_own_tables(database: Database) -> None:
    """Make the worker's own tables; `SchemaError` where a newer release made others."""
    known = database.own("select 1 from sqlite_schema where name = '_sw_own'")
    version = database.own("select value from _sw_own where name = 'version'") if known else []
    if version and version[0][0] > OWN_VERSION:
        raise SchemaError(
            f"{database.path} was written by a newer release (layout {version[0][0]}, this one knows {OWN_VERSION}); "
            "use that release",
            details={"database_version": version[0][0], "version": OWN_VERSION},
        )
    if version:
        return
    database.begin()
    try:
        for statement in OWN_TABLES:
            database.own(statement)
        database.own("insert into _sw_own values('version', ?)", (OWN_VERSION,))
        database.commit()
    except BaseException:
        database.rollback()
        raise


class Migrating:
    """What a store's migrations run on."""

    def __init__(self, database: Database, limits: Limits) -> None:
        self._database = database
        self._limits = limits

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """BEGIN IMMEDIATE, then COMMIT, or where the block raises ROLLBACK."""
        self._database.begin()
        try:
            tx = Transaction(self._database, self._limits.result_bytes_max)
            yield tx
            tx.end()
            if self._database.deferred_violations():
                raise SchemaError("a foreign key constraint is violated at the end of the migration")
            self._database.commit()
        except BaseException:
            self._database.rollback()
            raise

    def statements(self, sql: str) -> list[str]:
        """Split a text of several statements."""
        return list(self._database.statements(sql))

    def applied_migrations(self, store: str) -> list[AppliedMigration]:
        """The records of one store."""
        rows = self._database.own(
            "select number, name, checksum, applied_ms from _sw_migrations where store = ?", (store,)
        )
        return [AppliedMigration(*row) for row in rows]

    def record_migration(self, store: str, migration: AppliedMigration) -> None:
        """Add a record inside the open transaction."""
        if not self._database.in_transaction:
            # A migration swallowed an error that had ended it; by itself the record would be committed.
            raise SchemaError("the migration ended its transaction and went on")
        self._database.own(
            "insert into _sw_migrations(store, number, name, checksum, applied_ms) values(?, ?, ?, ?, ?)",
            (store, migration.number, migration.name, migration.checksum, migration.applied_ms),
        )
