from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage_worker.protocol.errors import InvalidRequestError, OperationFailedError, RequestTooLargeError
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.statements import BATCH, EXECUTE, QUERY, Batch, Statement
from storage_worker.sql import SqlStore
from storage_worker.transaction import Transaction

from .doubles import MigratedFile, noting

SMALL = msgspec.structs.replace(DEFAULT_LIMITS, sql_bytes_max=40, bind_values_max=3, batch_statements_max=2)


@pytest.fixture
def sql() -> SqlStore:
    """The store with small limits."""
    return SqlStore(SMALL)


@pytest.fixture
def tx(database: Path) -> Iterator[Transaction]:
    """A transaction on a database with a table `t(a)`."""
    file = MigratedFile(database)
    file.database.own("create table t(a unique)")
    with file.transaction() as tx:
        yield tx
    file.database.close()


class TestHandlers:
    def test_statements_run(self, sql: SqlStore, tx: Transaction) -> None:
        assert set(sql.handlers) == {EXECUTE.name, QUERY.name, BATCH.name}
        assert sql.handlers[EXECUTE.name](tx, Statement("insert into t values (?)", [1])).rows_changed == 1
        both = sql.batch(tx, Batch([Statement("insert into t values (2)"), Statement("select a from t")]))
        assert [rows.rows for rows in both] == [[], [(1,), (2,)]]
        named = sql.query(tx, Statement("select a from t where a > :least", {"least": 1}))
        assert named.scalar() == 2
        assert sql.batch(tx, Batch([])) == []

    def test_a_query_changes_nothing(self, sql: SqlStore, tx: Transaction) -> None:
        with pytest.raises(InvalidRequestError, match="only read"):
            sql.query(tx, Statement("insert into t values (1)"))

    def test_a_failing_statement_of_a_batch_is_numbered(self, sql: SqlStore, tx: Transaction) -> None:
        once = Statement("insert into t values (1)")
        with pytest.raises(OperationFailedError) as caught:
            sql.batch(tx, Batch([once, once]))
        assert caught.value.details["statement"] == 2


class TestBounds:
    @pytest.mark.parametrize("text", ["x" * 41, "ä" * 21, "\N{GRINNING FACE}" * 11, "x" * 100_000])
    def test_a_text_over_its_bytes(self, sql: SqlStore, text: str) -> None:
        tx, statements = noting()
        with pytest.raises(RequestTooLargeError, match="40") as caught:
            sql.execute(tx, Statement(text))
        assert caught.value.details == {"sql_bytes": len(text.encode()), "sql_bytes_max": 40}
        assert statements.noted == []

    @pytest.mark.parametrize("text", ["x" * 40, "ä" * 20, "\N{GRINNING FACE}" * 10])
    def test_a_text_at_its_bytes(self, sql: SqlStore, text: str) -> None:
        tx, statements = noting()
        sql.query(tx, Statement(text))
        assert statements.noted == [(text, [])]

    @pytest.mark.parametrize(
        "values", [[1, 2, 3, 4], {"a": 1, "b": 2, "c": 3, "d": 4}, [2**63], [float("nan")], [[1]], {"a": {}}]
    )
    def test_values_that_are_too_many_or_none_of_sqlite(self, sql: SqlStore, values: Any) -> None:
        tx, statements = noting()
        with pytest.raises(InvalidRequestError):
            sql.execute(tx, Statement("select ?", values))
        assert statements.noted == []

    def test_a_batch_over_its_statements(self, sql: SqlStore) -> None:
        tx, statements = noting()
        with pytest.raises(InvalidRequestError, match="3 statements; one batch takes 2"):
            sql.batch(tx, Batch([Statement("select 1")] * 3))
        assert statements.noted == []
