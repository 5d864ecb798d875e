"""The worker's own operations: SQL statements, interactive transactions, outcomes, control."""

from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec

from .operation import Operation
from .values import Value, WireParameters

T = TypeVar("T", bound=msgspec.Struct)


class Rows(msgspec.Struct, array_like=True):
    """What a statement gave.

    `columns` are the names of the result's columns, `rows` its rows as tuples, `rows_changed` how many
    rows an insert, update or delete touched, `last_insert_rowid` the row id of this statement's last insert, 0
    where it inserted nothing.
    """

    columns: tuple[str, ...] = ()
    rows: list[tuple[Any, ...]] = []
    rows_changed: int = 0
    last_insert_rowid: int = 0

    def __iter__(self) -> Iterator[tuple[Value, ...]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def one(self) -> tuple[Value, ...]:
        """The only row; `LookupError` where there is none or more than one."""
        if len(self.rows) != 1:
            raise LookupError(f"expected one row, found {len(self.rows)}")
        return self.rows[0]

    def scalar(self) -> Any:
        """The first column of the only row; `LookupError` where there is none or more than one."""
        return self.one()[0]

    def as_dicts(self) -> list[dict[str, Value]]:
        """The rows as mappings of column name to value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def into(self, struct: type[T]) -> list[T]:
        """The rows as msgspec structs whose fields are named like the columns.

        Raises `msgspec.ValidationError` where a value does not fit its field.
        """
        return [msgspec.convert(row, struct) for row in self.as_dicts()]


Result = Rows
"""The name under which `Client.execute` returns it."""


class Statement(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One SQL statement and what it binds."""

    sql: str
    parameters: WireParameters = []


class Batch(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Statements that take effect together or not at all."""

    statements: list[Statement]


class Script(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Several statements in one text, without parameters."""

    sql: str


class Begin(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Opens an interactive transaction that its client owns for at most `lease_ms`; 0 for the default."""

    lease_ms: int = 0


class SnapshotLease(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Registers a local snapshot of at most `age_ms`. `number` is a random one that its client chose."""

    number: int
    age_ms: int


class SnapshotEnd(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Ends the lease of a local snapshot; nothing happens where it has ended already."""

    number: int


class DatabaseFile(msgspec.Struct, array_like=True, frozen=True):
    """Where the database is, as a real path, and the device and inode of the file that the worker has open."""

    path: str
    device: int
    inode: int


class Nothing(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """No arguments."""


class Savepoint(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A step with a savepoint inside an interactive transaction. `name` is an identifier."""

    action: Literal["open", "release", "rollback"]
    name: str


class OutcomeQuestion(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks what became of the request with `key`; `fence` forbids it for ever where it is not found."""

    key: str
    fence: bool = False


class KnownOutcome(msgspec.Struct, array_like=True, frozen=True):
    """What became of a request key.

    `state` is `committed`, `not_found`, or `fenced` (it never was and never will be committed).
    `operation` names what was committed; `result` is its encoded result, or None where it was too
    large to keep or the request ended with a failure that kept what it wrote. `result_as` decodes it.
    """

    state: Literal["committed", "not_found", "fenced"]
    operation: str = ""
    result: bytes | None = None

    @property
    def committed(self) -> bool:
        """Whether the request was committed."""
        return self.state == "committed"

    def result_as(self, operation: Operation[Any, Any]) -> Any:
        """The kept result, decoded as that operation's; `LookupError` where none was kept."""
        if self.result is None:
            raise LookupError("no result is kept for this request key")
        return operation.decode_result(self.result)


class Backup(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Copies the database to an absolute path that does not exist yet."""

    target: str


class Finding(msgspec.Struct, array_like=True, frozen=True):
    """One line of a check of the database; no findings means it is sound."""

    text: str


class Health(msgspec.Struct, array_like=True, frozen=True):
    """Whether the worker serves as it should, and the reasons where it does not."""

    state: Literal["healthy", "degraded", "draining"]
    reasons: list[str]


EXECUTE = Operation[[str, WireParameters], Rows]("sql.execute", "write", Statement, Rows, checks_values=True)
QUERY = Operation[[str, WireParameters], Rows]("sql.query", "read", Statement, Rows, checks_values=True)
BATCH = Operation[[list[Statement]], list[Rows]]("sql.batch", "write", Batch, list[Rows], checks_values=True)
SCRIPT = Operation[[str], Rows]("sql.script", "write", Script, Rows, solo=True, admin=True)

BEGIN = Operation[[int], int]("sql.begin", "write", Begin, int, solo=True)
COMMIT = Operation[[], None]("sql.commit", "write", Nothing, None)
ROLLBACK = Operation[[], None]("sql.rollback", "write", Nothing, None)
SAVEPOINT = Operation[[str, str], None]("sql.savepoint", "write", Savepoint, None)

SNAPSHOT = Operation[[int, int], DatabaseFile]("sql.snapshot", "control", SnapshotLease, DatabaseFile)
SNAPSHOT_END = Operation[[int], None]("sql.snapshot_end", "control", SnapshotEnd, None)

OUTCOME = Operation[[str, bool], KnownOutcome]("worker.outcome", "write", OutcomeQuestion, KnownOutcome)
BACKUP = Operation[[str], int]("worker.backup", "write", Backup, int, solo=True, admin=True)
CHECK = Operation[[], list[Finding]]("worker.check", "read", Nothing, list[Finding])
STATUS = Operation[[], msgspec.Raw]("worker.status", "control", Nothing, msgspec.Raw)
HEALTH = Operation[[], Health]("worker.health", "control", Nothing, Health)
HEARTBEAT = Operation[[], None]("worker.heartbeat", "control", Nothing, None)
STOP = Operation[[], None]("worker.stop", "control", Nothing, None, admin=True)
