"""A database to migrate, and a transaction that only notes its statements."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from storage_worker.database.opening import open_writer
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.statements import Rows
from storage_worker.protocol.values import Value
from storage_worker.schema import Migrating, prepare_own_tables
from storage_worker.transaction import Transaction

RESULT_BYTES = 1_000_000


class MigratedFile(Migrating):
    """A new database file with the worker's own tables; `begun` counts its transactions."""

    def __init__(self, path: Path) -> None:
        self.database = open_writer(str(path), "normal", DEFAULT_LIMITS)
        prepare_own_tables(self.database)
        super().__init__(self.database, DEFAULT_LIMITS)
        self.begun = 0

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        self.begun += 1
        with super().transaction() as tx:
            yield tx

    def tables(self) -> list[str]:
        rows = self.database.own("select name from sqlite_schema where type = 'table' order by name")
        return [str(row[0]) for row in rows if not row[0].startswith("_sw_")]

    def numbers(self, store: str) -> list[int]:
        return sorted(each.number for each in self.applied_migrations(store))


class Noting:
    """Statements that are noted instead of run; each answers with the row `(1,)`."""

    intact = True
    side_directory = "/nowhere"

    def __init__(self) -> None:
        self.noted: list[tuple[str, object]] = []

    def check_time(self) -> None:
        """There is no end of time here."""

    def run(
        self,
        sql: str,
        parameters: Sequence[Value] | Mapping[str, Value],
        result_bytes_max: int,
        reads_only: bool = False,
        named: bool = True,
    ) -> Rows:
        self.noted.append((sql, parameters))
        return Rows(("a",), [(1,)])


def noting() -> tuple[Transaction, Noting]:
    """A transaction and where its statements are noted."""
    statements = Noting()
    return Transaction(statements, RESULT_BYTES), statements
