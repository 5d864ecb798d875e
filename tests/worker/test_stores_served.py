"""Stores of a host in a real worker: their operations, their failures, their migrations."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage_worker.protocol.errors import (
    InvalidRequestError,
    NotPermittedError,
    OperationFailedError,
    ResultTooLargeError,
    SchemaError,
    StorageError,
)
from storage_worker.protocol.operation import Call
from storage_worker.protocol.statements import BEGIN, COMMIT, EXECUTE, Begin, Nothing, Statement
from tests.worker import notes_store as store
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.raw import RawClient
from tests.worker.test_files import dump


@pytest.fixture
def worker(start_worker: StartWorker) -> RunningWorker:
    return start_worker(stores=[store.NOTES])


def call(client: RawClient, call: Call[Any], **options: Any) -> Any:
    return client.call(call.operation, call.arguments, **options)


def test_operations(client: RawClient) -> None:
    assert call(client, store.add("hello")) == 1
    assert call(client, store.add("again", tags=("a", "b"))) == 2
    assert call(client, store.recent()) == [store.Note(2, "again"), store.Note(1, "hello")]
    assert call(client, store.recent(1)) == [store.Note(2, "again")]
    assert call(client, store.add_all(["x", "y"])) == [3, 4]
    assert call(client, store.called_after_commits()) == ["hello", "again", "x", "y"]


def test_a_declared_failure(client: RawClient) -> None:
    with pytest.raises(store.EmptyNoteError) as caught:
        call(client, store.add("", tags=("a",)))
    assert caught.value.details == {"tags": 1}
    assert caught.value.outcome == "not_committed"
    with pytest.raises(store.EmptyNoteError):
        call(client, store.add_all(["x", "", "y"]))
    assert call(client, store.recent()) == []
    assert call(client, store.called_after_commits()) == []


def test_a_failure_that_keeps_its_diagnosis(client: RawClient) -> None:
    call(client, store.add("a"), key="k")
    for _ in range(2):
        with pytest.raises(store.EmptyNoteError) as caught:
            call(client, store.try_add("a"), key="kept")
        assert caught.value.outcome == "committed"
        assert caught.value.details == {"why": "storage_operation_failed"}
    assert [note.text for note in call(client, store.recent())] == ["not added: a", "a"]


@pytest.mark.parametrize(
    "arguments", [[], [1], ["a", "b"], ["a", ["b"], "surplus"], {"text": "a"}, None, "a", [None], [b"a"]]
)
def test_arguments_that_are_not_the_signatures(client: RawClient, arguments: object) -> None:
    with pytest.raises(InvalidRequestError):
        client.call(store.add, arguments)
    assert call(client, store.recent()) == []


def test_a_read_writes_nothing(client: RawClient) -> None:
    with pytest.raises(InvalidRequestError):
        call(client, store.write_in_a_read())
    transaction = client.call(BEGIN, Begin(60_000))
    with pytest.raises(InvalidRequestError):
        call(client, store.write_in_a_read(), transaction=transaction)
    client.call(COMMIT, Nothing(), transaction=transaction)
    assert call(client, store.recent()) == []


def test_a_handler_cannot_end_the_worker(client: RawClient) -> None:
    with pytest.raises(OperationFailedError) as caught:
        call(client, store.leave_the_process())
    assert caught.value.details["exception"] == "SystemExit"
    assert call(client, store.recent()) == []


def test_a_result_over_its_limit(client: RawClient) -> None:
    call(client, store.add_all([str(number) * 100 for number in range(20)]))
    with pytest.raises(ResultTooLargeError):
        call(client, store.recent(), result_bytes=500)


def test_operations_inside_an_interactive_transaction(worker: RunningWorker, client: RawClient) -> None:
    other = worker.connect()
    transaction = client.call(BEGIN, Begin(60_000))
    call(client, store.add("inside"), transaction=transaction)
    assert [note.text for note in call(client, store.recent(), transaction=transaction)] == ["inside"]
    assert call(other, store.recent()) == []
    assert call(other, store.called_after_commits()) == []
    client.call(COMMIT, Nothing(), transaction=transaction)
    assert [note.text for note in call(other, store.recent())] == ["inside"]
    assert call(other, store.called_after_commits()) == ["inside"]


def test_a_read_of_several_statements_sees_one_state(worker: RunningWorker, client: RawClient) -> None:
    writer = worker.connect()
    call(writer, store.add("0"))
    for number in range(1, 10):
        read = client.ask(store.twice, [])
        call(writer, store.add(str(number)))
        answer = client.answer(read)
        first, second = store.twice.decode_result(answer.result)  # type: ignore[union-attr]
        assert first == second


def test_a_worker_without_sql(start_worker: StartWorker) -> None:
    client = start_worker(stores=[store.NOTES], sql=False).connect()
    assert call(client, store.add("hello")) == 1
    for operation, arguments in ((EXECUTE, Statement("select 1")), (BEGIN, Begin(1000))):
        with pytest.raises(InvalidRequestError):
            client.call(operation, arguments)


def test_a_client_of_role_read(worker: RunningWorker) -> None:
    call(worker.connect(), store.add("hello"))
    reader = worker.connect(role="read")
    assert len(call(reader, store.recent())) == 1
    with pytest.raises(NotPermittedError):
        call(reader, store.add("no"))
    with pytest.raises(NotPermittedError):
        reader.call(BEGIN, Begin(1000))


# Migrations


def columns(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return [row[1] for row in database.execute("pragma table_info(notes)")]


def test_a_newer_store_brings_the_database_up(start_worker: StartWorker, tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    worker = start_worker(stores=[store.NOTES])
    call(worker.connect(), store.add("kept"))
    worker.stop()
    worker = start_worker(stores=[store.NEWER])
    assert worker.connect().query("select text, pinned from notes").rows == [("kept", 0)]
    worker.stop()
    assert columns(path) == ["id", "text", "pinned"]


@pytest.mark.parametrize("name", [store.NOTES, store.CHANGED])
def test_what_the_database_is_ahead_of_is_refused_unchanged(
    start_worker: StartWorker, tmp_path: Path, name: str
) -> None:
    worker = start_worker(stores=[store.NEWER])
    client = worker.connect()
    client.execute("create table mine(a)")
    client.execute("create index i on mine(a)")
    for number in range(300):
        client.execute("insert into mine values(?)", number)
    worker.stop()
    before = dump(tmp_path / "test.db")
    with pytest.raises(SchemaError) as caught:
        start_worker(stores=[name])
    assert caught.value.details["store"] == "notes"
    assert dump(tmp_path / "test.db") == before
    start_worker(stores=[store.NEWER])


@pytest.mark.parametrize("name", [store.BROKEN, store.SWALLOWING])
def test_a_migration_that_fails_leaves_those_before_it(
    start_worker: StartWorker, tmp_path: Path, name: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        start_worker(stores=[name])
    assert caught.value.details["number"] == 2
    with closing(sqlite3.connect(tmp_path / "test.db")) as database:
        tables = [row[0] for row in database.execute("select name from sqlite_schema where type = 'table'")]
        applied = database.execute("select store, number from _sw_migrations").fetchall()
    assert "notes" in tables
    assert "half" not in tables
    assert applied == [("notes", 1)]
    client = start_worker(stores=[store.NOTES]).connect()
    assert call(client, store.add("hello")) == 1


@pytest.mark.parametrize(
    "name", ["tests.worker.no_such_module:notes", "tests.worker.notes_store:nothing", "nonsense"]
)
def test_a_store_that_is_not_there_is_named(start_worker: StartWorker, name: str) -> None:
    with pytest.raises(StorageError) as caught:
        start_worker(stores=[name])
    assert name in caught.value.message
