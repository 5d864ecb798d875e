"""Every operation that a worker serves, by name."""

from collections.abc import Iterable
from typing import Any

from .execution import Run, Served
from .protocol import statements as own
from .protocol.errors import InvalidRequestError, TransactionExpiredError
from .protocol.limits import Limits
from .protocol.statements import Finding, OutcomeQuestion, Rows, Script
from .registry import Stores
from .sql import SqlStore
from .store import Store
from .transaction import Transaction
from .writer import Writer

CONTROL = (own.STATUS, own.HEALTH, own.HEARTBEAT, own.STOP)
SNAPSHOTS = (own.SNAPSHOT, own.SNAPSHOT_END)
TRANSACTION_STEPS = (own.COMMIT, own.ROLLBACK, own.SAVEPOINT)


def served_operations(
    stores: Iterable[Store], writer: Writer, limits: Limits, *, sql: bool
) -> dict[str, Served]:
    """The worker's own operations, those of SQL where it is served, and those of the stores."""
    found = [
        Served(own.OUTCOME, _outcome(writer), adds=False),
        Served(own.CHECK, _check),
        Served(own.BACKUP, _never, keyless=True, adds=False),
        *(Served(operation, _never) for operation in CONTROL),
    ]
    if sql:
        store = SqlStore(limits)
        handlers = store.handlers
        found += [
            Served(own.EXECUTE, handlers[own.EXECUTE.name], plain=store.checked),
            Served(own.QUERY, handlers[own.QUERY.name], plain=store.checked),
            Served(own.BATCH, handlers[own.BATCH.name]),
            Served(own.SCRIPT, _script(writer)),
            Served(own.BEGIN, _never, keyless=True),
            *(Served(operation, _never) for operation in SNAPSHOTS),
            *(Served(operation, _outside, adds=False) for operation in TRANSACTION_STEPS),
        ]
    found += [Served(operation, operation.run) for operation in Stores(stores).operations.values()]
    by_name = {served.name: served for served in found}
    if len(by_name) < len(found):
        raise InvalidRequestError("a store has the name of one of the worker's own: sql, worker")
    return by_name


def _outcome(writer: Writer) -> Run:
    def outcome(_: Transaction, question: OutcomeQuestion) -> Any:
        return writer.receipts.outcome(question.key, fence=question.fence)

    return outcome


def _script(writer: Writer) -> Run:
    def script(tx: Transaction, arguments: Script) -> Rows:
        result = Rows()
        for statement in writer.database.statements(arguments.sql):
            result = tx.execute(statement)
        return result

    return script


def _check(tx: Transaction, _: own.Nothing) -> list[Finding]:
    found = [str(row[0]) for row in tx.query("pragma integrity_check")]
    broken = [
        f"{table!s}: row {rowid!s} has no parent row"
        for table, rowid, *_ in tx.query("pragma foreign_key_check")
    ]
    return [Finding(text) for text in found if text != "ok"] + [Finding(text) for text in broken]


def _outside(_: Transaction, __: Any) -> Any:
    raise TransactionExpiredError("no interactive transaction of this connection is open; begin one")


def _never(_: Transaction, __: Any) -> Any:
    raise AssertionError("served by the pipes' side, not by a handler")
