"""A store's migrations: where they are found, and how a database is brought up to its store's version."""

import hashlib
import importlib.util
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from .protocol.errors import (
    BusyError,
    SchemaError,
    StorageCorruptError,
    StorageFullError,
    StorageReplacedError,
)
from .transaction import Transaction

MigrationFunction = Callable[[Transaction], None]
MigrationSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | MigrationFunction]
"""A folder of numbered `.sql` files, or in their order callables and such files."""

_FILE_NAME = re.compile(r"(?P<number>[0-9]{4,})_(?P<name>[A-Za-z0-9_]+)\.sql")

# These say what is wrong with the machine, not with the schema, and what to do about it.
_ENVIRONMENT_ERRORS = (BusyError, StorageFullError, StorageCorruptError, StorageReplacedError)


class Migration(msgspec.Struct, frozen=True):
    """One step of a store's schema: SQL text, or a function of the transaction."""

    number: int
    name: str
    checksum: str
    sql: str
    function: Any = None


class AppliedMigration(msgspec.Struct, frozen=True):
    """The record of a migration in the database. `applied_ms` is milliseconds since 1970 in UTC."""

    number: int
    name: str
    checksum: str
    applied_ms: int


class MigratedStore(Protocol):
    """What is asked of a store to migrate it."""

    name: str
    version: int

    def migrations(self) -> tuple[Migration, ...]:
        """All its migrations, in order."""
        ...


class MigratingDatabase(Protocol):
    """What is asked of a database to migrate it. The records are the worker's own table."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """BEGIN IMMEDIATE, then COMMIT, or where the block raises ROLLBACK."""
        ...

    def statements(self, sql: str) -> list[str]:
        """Split a text of several statements."""
        ...

    def applied_migrations(self, store: str) -> list[AppliedMigration]:
        """The records of one store, in any order."""
        ...

    def record_migration(self, store: str, migration: AppliedMigration) -> None:
        """Add a record inside the open transaction."""
        ...


class Origin(msgspec.Struct, frozen=True):
    """What a store was given as its migrations, and by which file; relative paths start beside that."""

    given: str | tuple[Any, ...]
    file: str | None


def origin_of(source: MigrationSource | None, file: str | None) -> Origin:
    """Note what a store was given; nothing is read before the migrations are asked for."""
    if source is None:
        return Origin((), file)
    if isinstance(source, str | os.PathLike):
        return Origin(os.fspath(source), file)
    return Origin(tuple(source), file)


def read_migrations(origin: Origin, store: str) -> tuple[Migration, ...]:
    """Read a store's migrations.

    A relative path is looked for beside the file that declares the store (without one, as in a notebook:
    in the working directory), then as a path whose first part is an import package. Raises `SchemaError`
    where one is missing, has a wrong name, or they are not numbered 1, 2, 3 and so on.
    """
    if not isinstance(origin.given, str):
        return tuple(_listed(entry, number, origin, store) for number, entry in enumerate(origin.given, 1))
    folder = _locate(origin.given, origin.file, store)
    if not folder.is_dir():
        raise _refusal(store, f"its migrations, {folder}, are no folder")
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".sql")]
    found = sorted((_sql_file(entry, store) for entry in files), key=lambda each: each.number)
    for number, migration in enumerate(found, 1):
        if migration.number != number:
            raise _refusal(
                store,
                f"its migrations in {folder} are not numbered 1, 2, 3: {migration.name} stands at {number}",
            )
    return tuple(found)


def migrate(database: MigratingDatabase, stores: Iterable[MigratedStore]) -> None:
    """Bring a database up to the versions of its stores, each migration in a transaction of its own.

    Every store is checked before the first migration of any runs, so that a refused database stays
    unchanged. Raises `SchemaError` where the database is newer than a store, an applied migration was
    changed, or a migration fails: then those before it stay applied. A busy, full or faulty database
    raises its own error.
    """
    planned = [(store, _pending(database, store)) for store in stores]
    for store, pending in planned:
        for migration in pending:
            _apply(database, store.name, migration)


def _pending(database: MigratingDatabase, store: MigratedStore) -> Sequence[Migration]:
    known = store.migrations()
    if len(known) != store.version:
        raise _refusal(store.name, f"it declares version {store.version} and has {len(known)} migrations")
    applied = sorted(database.applied_migrations(store.name), key=lambda each: each.number)
    if applied and applied[-1].number > store.version:
        raise SchemaError(
            f"store {store.name}: the database is at version {applied[-1].number}, this program knows "
            f"versions up to {store.version}; use the newer release of the program",
            details={"store": store.name, "database_version": applied[-1].number, "version": store.version},
        )
    for number, (record, migration) in enumerate(zip(applied, known, strict=False), 1):
        if record.number != number:
            raise _refusal(store.name, f"the database has no record of migration {number}, but of later ones")
        if record.checksum != migration.checksum:
            raise SchemaError(
                f"store {store.name}: migration {number} ({migration.name}) was changed after it was applied; "
                "restore it and put the change into a new migration",
                details={"store": store.name, "number": number, "name": migration.name},
            )
    return known[len(applied) :]


def _apply(database: MigratingDatabase, store: str, migration: Migration) -> None:
    try:
        with database.transaction() as tx:
            if migration.function is not None:
                migration.function(tx)
            for statement in database.statements(migration.sql):
                tx.execute(statement)
            record = AppliedMigration(migration.number, migration.name, migration.checksum, tx.now_ms())
            database.record_migration(store, record)
    except _ENVIRONMENT_ERRORS:
        raise
    except Exception as error:
        raise SchemaError(
            f"store {store}: migration {migration.number} ({migration.name}) failed and was rolled back: "
            f"{type(error).__name__}: {error}",
            details={"store": store, "number": migration.number, "exception": type(error).__name__},
        ) from error


def _listed(entry: object, number: int, origin: Origin, store: str) -> Migration:
    if isinstance(entry, str | os.PathLike):
        migration = _sql_file(_locate(os.fspath(entry), origin.file, store), store)
        if migration.number != number:
            raise _refusal(store, f"the migration {entry} stands at place {number} of its list")
        return migration
    name = getattr(entry, "__qualname__", None)
    if not callable(entry) or name is None or inspect.iscoroutinefunction(entry):
        raise _refusal(
            store, f"its migration {number}, {entry!r}, is neither a .sql file nor a plain function"
        )
    try:
        source = textwrap.dedent(inspect.getsource(entry))
    except (OSError, TypeError):
        source = ""
    return Migration(number, str(name), _checksum(f"{name}\n{source}"), "", entry)


def _sql_file(file: Path, store: str) -> Migration:
    parts = _FILE_NAME.fullmatch(file.name)
    if parts is None:
        raise _refusal(store, f"the migration {file} has no name like 0001_what_it_does.sql")
    try:
        sql = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refusal(store, f"the migration {file} cannot be read: {error}") from error
    return Migration(int(parts["number"]), parts["name"], _checksum(sql), sql)


def _locate(path: str, file: str | None, store: str) -> Path:
    places = [Path(file).parent / path if file is not None else Path(path).absolute()]
    package, *rest = Path(path).parts or [""]
    if rest and package.isidentifier():
        places += [Path(root, *rest) for root in _folders_of(package)]
    for place in places:
        if place.is_dir() or place.is_file():
            return place
    looked = " and ".join(str(place) for place in places)
    raise _refusal(store, f"its migrations {path} are not found; looked at {looked}")


def _folders_of(package: str) -> Iterable[str]:
    module = sys.modules.get(package)
    if module is not None:
        return getattr(module, "__path__", ())
    # Where it is found, without running it.
    spec = importlib.util.find_spec(package)
    return () if spec is None else spec.submodule_search_locations or ()


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _refusal(store: str, reason: str) -> SchemaError:
    return SchemaError(f"store {store}: {reason}", details={"store": store})
