"""Statements of clients: results, refusals, and that nothing of a refused one stays."""

import pytest

from storage_worker.protocol.errors import (
    InvalidRequestError,
    NotPermittedError,
    OperationFailedError,
    ResultTooLargeError,
)
from storage_worker.protocol.statements import BATCH, Batch, Statement
from tests.worker.raw import RawClient


def test_rows_and_changes(client: RawClient) -> None:
    client.execute("create table t(id integer primary key, a)")
    assert client.execute("insert into t(a) values(?)", 7).last_insert_rowid == 1
    returned = client.execute("insert into t(a) values(?), (?) returning id, a", 8, 9)
    assert returned.as_dicts() == [{"id": 2, "a": 8}, {"id": 3, "a": 9}]
    assert returned.rows_changed == 2
    assert client.query("select a from t where a > ?", 7).rows == [(8,), (9,)]
    assert client.query("select a from t where 0").columns == ("a",)


@pytest.mark.parametrize(
    "sql",
    [
        "attach 'x.db' as x",
        "detach main",
        "vacuum",
        "/* c */ vacuum into 'x.db'",
        "begin",
        "commit",
        "rollback",
        "savepoint s",
        "release s",
        "create temp table t(a)",
        "create temporary view v as select 1",
        "create table temp.t(a)",
        "pragma journal_mode=delete",
        "pragma synchronous=off",
        "pragma writable_schema=on",
        "pragma query_only=off",
        "pragma foreign_keys=off",
        "pragma wal_checkpoint",
        "pragma mmap_size=1000000",
        "create table _sw_mine(a)",
        "create table _SW_MINE(a)",
        "delete from _sw_receipts",
        "update _sw_receipts set state = 'x'",
        "insert into _sw_fence values(1, 1)",
        "drop table _sw_receipts",
        "create index i on _sw_receipts(state)",
        "create trigger g after insert on _sw_receipts begin select 1; end",
        "alter table _sw_receipts add column x",
        "alter table t rename to _sw_t",
        "select load_extension('x')",
        "explain commit",
    ],
)
def test_refused_statements(client: RawClient, sql: str) -> None:
    with pytest.raises(NotPermittedError) as caught:
        client.execute(sql)
    assert caught.value.outcome == "not_committed"
    assert client.query("select 1").scalar() == 1


def test_the_header_is_defended(client: RawClient) -> None:
    with pytest.raises(OperationFailedError):
        client.execute("insert into sqlite_master(type, name) values('table', 'x')")


def test_one_statement_at_a_time(client: RawClient) -> None:
    with pytest.raises(InvalidRequestError):
        client.execute("create table a(x); create table b(x)")
    assert client.query("select count(*) from sqlite_schema where name in ('a', 'b')").scalar() == 0
    assert client.query("select 1; -- the end").scalar() == 1
    with pytest.raises(InvalidRequestError):
        client.execute(" -- nothing")


def test_a_query_only_reads(client: RawClient) -> None:
    client.execute("create table t(a)")
    with pytest.raises(InvalidRequestError):
        client.query("insert into t values(1)")
    assert client.query("select count(*) from t").scalar() == 0


def test_a_batch_is_all_or_nothing(client: RawClient) -> None:
    client.execute("create table t(a unique)")
    statements = [Statement("insert into t values(?)", [value]) for value in (1, 2, 1)]
    with pytest.raises(OperationFailedError) as caught:
        client.call(BATCH, Batch(statements))
    assert caught.value.details["statement"] == 3
    assert caught.value.details["sqlite_name"] == "SQLITE_CONSTRAINT_UNIQUE"
    assert client.query("select count(*) from t").scalar() == 0
    results = client.call(BATCH, Batch(statements[:2]))
    assert [rows.rows_changed for rows in results] == [1, 1]


def test_a_write_whose_result_is_too_large_is_rolled_back(client: RawClient) -> None:
    client.execute("create table t(a)")
    with pytest.raises(ResultTooLargeError):
        client.execute("insert into t values(zeroblob(100000)) returning a", result_bytes=1000)
    assert client.query("select count(*) from t").scalar() == 0
    with pytest.raises(ResultTooLargeError):
        client.query("select zeroblob(100000)", result_bytes=1000)
    assert client.query("select 1").scalar() == 1
