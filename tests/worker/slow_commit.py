"""A store that makes the worker's COMMIT as slow as the test wants it: imported by that worker only."""

from storage_worker import Store
from storage_worker.database.connection import Database
from storage_worker.transaction import Transaction
from tests.worker.gates import stand_at

slow = Store("slow")

_gates: list[str] = []
_commit = Database.commit


def _slow_commit(self: Database) -> None:
    while _gates:
        stand_at(_gates.pop())
    _commit(self)


Database.commit = _slow_commit  # type: ignore[method-assign]


@slow.write
def insert(tx: Transaction, gate: str) -> None:
    """Insert a row, and let the COMMIT wait at the gate."""
    tx.execute("insert into t values('slow')")
    _gates.append(gate)
