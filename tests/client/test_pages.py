"""Pages by key, against a real SQLite behind the fake worker."""

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from storage_worker.client import Client
from storage_worker.protocol.envelope import Request
from storage_worker.protocol.errors import (
    InvalidRequestError,
    OperationFailedError,
    RequestTooLargeError,
    ResultTooLargeError,
)
from storage_worker.protocol.statements import Rows
from tests.client.fake import FakeWorker, Peer, statement


class Database:
    """Answers statements by an SQLite database in memory; results over `bytes_max` are too large."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self.bytes_max = 10**9
        self.reads: list[int] = []

    def __call__(self, _peer: Peer, request: Request) -> object:
        asked = statement(request)
        try:
            cursor = self.connection.execute(asked.sql, asked.parameters)
            rows = cursor.fetchall()
        except sqlite3.Error as error:
            return OperationFailedError(str(error))
        if sum(len(str(row)) for row in rows) > self.bytes_max:
            return ResultTooLargeError("too large")
        self.reads.append(len(rows))
        return Rows(tuple(column[0] for column in cursor.description), rows)


@pytest.fixture
def database(worker: FakeWorker) -> Iterator[Database]:
    found = Database()
    found.connection.execute("create table t(id integer primary key, a text, b integer)")
    found.connection.executemany(
        "insert into t values (?, ?, ?)", [(place, f"a{place % 7}", place) for place in range(1, 104)]
    )
    worker.answer = found
    yield found
    found.connection.close()


@pytest.fixture
def client(worker: FakeWorker, database: Database) -> Client:
    return worker.client()


def everything(pages: Iterator[Rows]) -> list[tuple[Any, ...]]:
    return [row for page in pages for row in page]


@pytest.mark.parametrize("page_rows", [1, 10, 103, 104, 500])
def test_every_row_comes_once_and_in_order(client: Client, database: Database, page_rows: int) -> None:
    rows = everything(client.pages("select id, a from t", key=("id",), page_rows=page_rows))
    assert rows == [(place, f"a{place % 7}") for place in range(1, 104)]
    assert max(database.reads) <= page_rows + 1
    assert len(database.reads) == -(-103 // page_rows)


@pytest.mark.parametrize(
    "sql",
    [
        "select id, a from t order by a desc",
        "select id, a from t;",
        "select id, a from t -- a comment",
        "select t.id, t.a from t join t as u on u.id = t.id",
        "with s as (select * from t) select id, a from s",
        "select id, a from t union select id, a from t",
    ],
)
def test_any_select_can_be_paged(client: Client, sql: str) -> None:
    rows = everything(client.pages(sql, key=("id",), page_rows=10))
    assert [row[0] for row in rows] == list(range(1, 104))


def test_several_columns_order_together(client: Client) -> None:
    rows = everything(client.pages("select a, id from t", key=("a", "id"), page_rows=4))
    assert rows == sorted((f"a{place % 7}", place) for place in range(1, 104))


def test_positional_parameters_stand_before_the_pages_own(client: Client) -> None:
    pages = client.pages(
        "select id, ? as x from t where id > ?", key=("id",), page_rows=10, parameters=("x", 50)
    )
    assert everything(pages) == [(place, "x") for place in range(51, 104)]


def test_numbered_parameters_work(client: Client) -> None:
    pages = client.pages(
        "select id, ?2 as x from t where id > ?1 and id < ?1 + 20", ("id",), page_rows=4, parameters=(50, "x")
    )
    assert everything(pages) == [(place, "x") for place in range(51, 70)]


def test_named_parameters_work(client: Client) -> None:
    pages = client.pages(
        "select id from t where id > :low", key=("id",), page_rows=10, parameters={"low": 50}
    )
    assert everything(pages) == [(place,) for place in range(51, 104)]


def test_names_are_quoted_and_found_in_any_case(client: Client, database: Database) -> None:
    database.connection.execute('create table "odd"("the ""key""; drop table t" integer, "Größe" text)')
    database.connection.execute("insert into odd values (1, 'x'), (2, 'y')")
    pages = client.pages("select * from odd", key=('THE "KEY"; drop table t', "Größe"), page_rows=1)
    assert everything(pages) == [(1, "x"), (2, "y")]


def test_rows_that_change_between_pages_are_no_fault(client: Client, database: Database) -> None:
    """Each page is a read of its own: nothing is held, nothing comes twice."""
    seen = []
    for page in client.pages("select id from t", key=("id",), page_rows=10):
        seen.extend(page.rows)
        database.connection.execute("delete from t where id % 2 = 0")
    assert seen == [(place,) for place in range(1, 11)] + [(place,) for place in range(11, 104, 2)]


def test_pages_shrink_to_what_a_result_may_hold(client: Client, database: Database) -> None:
    database.connection.execute("update t set a = hex(zeroblob(500)) where id between 40 and 60")
    database.bytes_max = 2500
    rows = everything(client.pages("select id, a from t", key=("id",), page_rows=100))
    assert [row[0] for row in rows] == list(range(1, 104))


def test_a_row_that_is_too_large_alone_is_an_error(client: Client, database: Database) -> None:
    database.connection.execute("update t set a = hex(zeroblob(5000)) where id = 40")
    database.bytes_max = 2500
    seen: list[Any] = []
    with pytest.raises(ResultTooLargeError):
        seen.extend(
            row[0] for page in client.pages("select id, a from t", ("id",), page_rows=8) for row in page
        )
    assert seen == list(range(1, 40))


@pytest.mark.parametrize("page_rows", [2, 3, 4, 500])
def test_rows_with_the_same_key_are_an_error_and_never_lost(client: Client, page_rows: int) -> None:
    seen: list[Any] = []
    with pytest.raises(InvalidRequestError, match="same key"):
        seen.extend(
            row
            for page in client.pages("select a, id from t where id < 20", ("a",), page_rows=page_rows)
            for row in page
        )
    assert seen == []


def test_an_empty_result_has_no_pages(client: Client) -> None:
    assert everything(client.pages("select id from t where id < 0", key=("id",))) == []


@pytest.mark.parametrize("key", [("nope",), ("id", "b")])
def test_a_key_that_is_no_column_is_an_error(client: Client, key: tuple[str, ...]) -> None:
    """Even where SQLite would take a quoted name for a text."""
    with pytest.raises((InvalidRequestError, OperationFailedError)):
        everything(client.pages("select id, a from t", key=key, page_rows=10))


@pytest.mark.parametrize(
    "change", ["update t set b = null where id = 50", "update t set b = null where id = 1"]
)
@pytest.mark.parametrize("key", [("b",), ("a", "b")])
def test_a_key_that_is_null_is_an_error(
    client: Client, database: Database, change: str, key: tuple[str, ...]
) -> None:
    database.connection.execute(change)
    with pytest.raises(InvalidRequestError, match="NULL"):
        everything(client.pages("select a, b from t", key=key, page_rows=3))


def test_what_is_wrong_is_said_before_the_first_page_is_asked_for(client: Client) -> None:
    with pytest.raises(InvalidRequestError):
        client.pages("select id from t", key=("id",), parameters=(2**63,))
    with pytest.raises(RequestTooLargeError):
        client.pages("x" * 300_000, key=("id",))
