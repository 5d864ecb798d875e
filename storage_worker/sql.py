"""The built-in `sql` store: statements of clients, checked and run in a transaction."""

from collections.abc import Callable, Mapping
from typing import Any

from .protocol.envelope import encode
from .protocol.errors import InvalidRequestError, RequestTooLargeError, StorageError, result_too_large
from .protocol.limits import Limits
from .protocol.statements import BATCH, EXECUTE, QUERY, Batch, Rows, Statement
from .protocol.values import WireParameters, check_parameters
from .transaction import Transaction


class SqlStore:
    """The handlers of `sql.execute`, `sql.query` and `sql.batch`.

    Arguments: `limits`, the bounds of SQL texts, bound values and batches. Each handler takes the
    transaction and its operation's arguments; `handlers` finds it by the operation's name. A refused text
    is a `RequestTooLargeError`, a refused value an `InvalidRequestError` that names its parameter.
    """

    def __init__(self, limits: Limits) -> None:
        self._sql_bytes_max = limits.sql_bytes_max
        self._values_max = limits.bind_values_max
        self._statements_max = limits.batch_statements_max

    @property
    def handlers(self) -> Mapping[str, Callable[[Transaction, Any], Any]]:
        """The handlers by the names of their operations."""
        return {EXECUTE.name: self.execute, QUERY.name: self.query, BATCH.name: self.batch}

    def execute(self, tx: Transaction, statement: Statement) -> Rows:
        """Run exactly one statement."""
        return tx.execute(statement.sql, self.checked(statement))

    def query(self, tx: Transaction, statement: Statement) -> Rows:
        """Run exactly one statement that must only read."""
        return tx.query(statement.sql, self.checked(statement))

    def batch(self, tx: Transaction, batch: Batch) -> list[Rows]:
        """Run statements in order; the first that fails ends the request, its number in the details."""
        statements = batch.statements
        if len(statements) > self._statements_max:
            raise InvalidRequestError(
                f"{len(statements)} statements; one batch takes {self._statements_max}",
                details={"batch_statements": len(statements), "batch_statements_max": self._statements_max},
            )
        results = []
        left = tx.result_bytes_max
        for number, statement in enumerate(statements, 1):
            try:
                rows = self.execute(tx, statement)
                results.append(rows)
                if rows.rows and (left := left - len(encode(rows))) < 0:
                    raise result_too_large(tx.result_bytes_max)
            except StorageError as error:
                error.details.setdefault("statement", number)
                raise
        return results

    def checked(self, statement: Statement) -> WireParameters:
        """The values of a statement, where its text and they may be run."""
        sql, most = statement.sql, self._sql_bytes_max
        # A character takes at most 4 bytes, so that short texts need no encoding to be measured.
        if len(sql) * 4 > most and (size := len(sql.encode("utf-8", "surrogatepass"))) > most:
            raise RequestTooLargeError(
                f"the SQL text of {size} bytes is over the {most} that one statement takes; bind large values",
                details={"sql_bytes": size, "sql_bytes_max": most},
            )
        return check_parameters(statement.parameters, self._values_max)
