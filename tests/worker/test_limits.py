"""Requests and results at their limits and over them: a typed refusal each, and nothing of them stays."""

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from storage_worker.protocol.envelope import Reply
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OperationFailedError,
    ProtocolError,
    RequestConflictError,
    RequestTooLargeError,
    ResultTooLargeError,
    StorageError,
)
from storage_worker.protocol.framing import frame
from storage_worker.protocol.limits import DEFAULT_LIMITS, MIB
from storage_worker.protocol.statements import (
    BATCH,
    OUTCOME,
    SCRIPT,
    Batch,
    OutcomeQuestion,
    Script,
    Statement,
)
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.hostile import (
    WRITE,
    Bystander,
    ask_with,
    error_in,
    last_words,
    peak_bytes,
    refusal,
    request,
    table_is_empty,
)
from tests.worker.raw import RawClient

LIMITS = DEFAULT_LIMITS
INSERT = Statement("insert into kept values(1)")


@pytest.fixture
def client(standing_worker: RunningWorker) -> Iterator[RawClient]:
    """A client of the standing worker with an empty table `kept`; afterwards a bystander finds it as it was."""
    bystander = Bystander(standing_worker)
    with RawClient(standing_worker.address, role="admin") as client:
        client.execute("drop table if exists kept")
        client.execute("create table kept(a)")
        yield client
    bystander.check()
    bystander.client.close()


# Fields of the envelope


@pytest.mark.parametrize("before_ns", [1, 10**9, 10**18])
def test_a_deadline_in_the_past(client: RawClient, before_ns: int) -> None:
    deadline = max(1, time.monotonic_ns() - before_ns)
    error = refusal(client, INSERT, WRITE, deadline_ns=deadline)
    assert isinstance(error, DeadlineExceededError)
    assert error.details["stage"] == "admission"
    assert error.outcome == "not_committed"
    assert table_is_empty(client, "kept")


def test_a_deadline_too_far_away(client: RawClient) -> None:
    far = time.monotonic_ns() + LIMITS.deadline_ms_max * 1_000_000 + 3_600 * 10**9
    for deadline in (far, 2**63 - 1, 2**63, 2**64 - 1):
        error = refusal(client, INSERT, WRITE, deadline_ns=deadline)
        assert isinstance(error, InvalidRequestError)
        assert str(LIMITS.deadline_ms_max) in str(error)
    assert table_is_empty(client, "kept")
    near = time.monotonic_ns() + LIMITS.deadline_ms_max * 1_000_000
    assert isinstance(client.answer(ask_with(client, INSERT, WRITE, deadline_ns=near)), Reply)


@pytest.mark.parametrize("size", [LIMITS.chunked_bytes_max + 1, 2**32, 2**63, 2**64 - 1])
def test_a_result_that_may_not_be_allowed(client: RawClient, size: int) -> None:
    assert isinstance(refusal(client, INSERT, WRITE, result_bytes=size), InvalidRequestError)
    assert table_is_empty(client, "kept")
    answer = client.answer(ask_with(client, INSERT, WRITE, result_bytes=LIMITS.chunked_bytes_max))
    assert isinstance(answer, Reply)


@pytest.mark.parametrize("flags", [1, 2**31, 2**64 - 1])
def test_flags_that_nobody_knows(client: RawClient, flags: int) -> None:
    assert isinstance(refusal(client, INSERT, WRITE, flags=flags), InvalidRequestError)
    assert table_is_empty(client, "kept")


@pytest.mark.parametrize("number", [1, 2**63, 2**64 - 1])
def test_a_transaction_that_is_none(client: RawClient, number: int) -> None:
    error = refusal(client, INSERT, WRITE, transaction=number)
    assert error.code == "storage_transaction_expired"
    assert table_is_empty(client, "kept")


LONGEST = LIMITS.request_key_bytes_max
KEYS = {
    "empty": "",
    "a byte more": "k" * (LONGEST + 1),
    "long letters": "ü" * (LONGEST // 2 + 1),
    "huge": "k" * 900_000,
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_request_key_out_of_its_size(client: RawClient, key: str) -> None:
    assert isinstance(refusal(client, INSERT, WRITE, key=key), InvalidRequestError)
    assert table_is_empty(client, "kept")
    for fence in (False, True):
        assert isinstance(refusal(client, OutcomeQuestion(key, fence), OUTCOME.name), InvalidRequestError)


@pytest.mark.parametrize("key", ["k", "k" * LONGEST, "ü" * (LONGEST // 2), "a\0b", "\0"])
def test_a_request_key_of_any_letters(client: RawClient, key: str) -> None:
    for _ in range(2):
        assert client.execute("insert into kept values(1)", key=key).rows_changed == 1
    assert client.query("select count(*) from kept").scalar() == 1
    assert client.call(OUTCOME, OutcomeQuestion(key)).committed
    with pytest.raises(RequestConflictError):
        client.execute("insert into kept values(2)", key=key)


# Sizes of requests


def filled(size: int) -> bytes:
    """The body of a request of exactly so many bytes."""
    some = 70_000  # enough for the text's length to take four bytes
    around = len(request(1, ["select length(?)", ["x" * some]])) - some
    return request(1, ["select length(?)", ["x" * (size - around)]])


def test_the_largest_request(standing_worker: RunningWorker, client: RawClient) -> None:
    body = filled(LIMITS.request_bytes_max)
    assert len(body) == LIMITS.request_bytes_max
    with RawClient(standing_worker.address) as other:
        other.send_bytes(frame(body))
        assert isinstance(other.answer(1), Reply)


def test_a_larger_request_closes_the_connection(standing_worker: RunningWorker, client: RawClient) -> None:
    with RawClient(standing_worker.address) as other:
        with suppress(OSError):  # closed while it was still sending
            other.send_bytes(frame(filled(LIMITS.request_bytes_max + 1)))
        error = last_words(other)
        assert isinstance(error, ProtocolError)
        assert error.details["frame_bytes_max"] == LIMITS.request_bytes_max


@pytest.mark.parametrize("letter", ["x", "ü", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("operation", ["sql.query", "sql.execute"])
def test_sql_over_its_limit(client: RawClient, letter: str, operation: str) -> None:
    most = LIMITS.sql_bytes_max
    text = "select 1 --" + letter * ((most - 11) // len(letter.encode()))
    assert isinstance(client.answer(ask_with(client, Statement(text), operation)), Reply)
    error = refusal(client, Statement(text + letter), operation)
    assert isinstance(error, RequestTooLargeError)
    assert error.details["sql_bytes_max"] == most
    error = refusal(client, Batch([INSERT, Statement(text + letter)]), BATCH.name)
    assert isinstance(error, RequestTooLargeError)
    assert error.details["statement"] == 2
    assert table_is_empty(client, "kept")


def test_a_script_of_one_statement_over_the_limit_of_sql(client: RawClient) -> None:
    text = "insert into kept values(1);" + "insert into kept values('" + "x" * LIMITS.sql_bytes_max + "')"
    assert isinstance(refusal(client, Script(text), SCRIPT.name), StorageError)
    assert table_is_empty(client, "kept")


@pytest.mark.parametrize("named", [False, True])
def test_bound_values_over_their_limit(client: RawClient, named: bool) -> None:
    most = LIMITS.bind_values_max
    for count in (most, most + 1):
        sql = f"insert into kept select ?{most}" if not named else "insert into kept select :v1"
        values = {f"v{place}": place for place in range(1, count + 1)} if named else list(range(1, count + 1))
        number = ask_with(client, Statement(sql, values), WRITE)
        answer = client.answer(number)
        if count > most:
            error = error_in(answer)
            assert isinstance(error, InvalidRequestError)
            assert str(most) in str(error)
        else:
            assert isinstance(answer, Reply)
    assert client.query("select count(*) from kept").scalar() == 1


@pytest.mark.parametrize("sql", ["select ?32767", "select ?99999999999", "select ?0"])
def test_a_place_beyond_all_values(client: RawClient, sql: str) -> None:
    assert isinstance(refusal(client, Statement(sql, [1])), StorageError)


def test_a_batch_over_its_limit(client: RawClient) -> None:
    most = LIMITS.batch_statements_max
    error = refusal(client, Batch([INSERT] * (most + 1)), BATCH.name)
    assert isinstance(error, InvalidRequestError)
    assert error.details["batch_statements_max"] == most
    assert table_is_empty(client, "kept")
    assert len(client.call(BATCH, Batch([INSERT] * 1_000))) == 1_000


DEEP = {
    "expression": "select " + "-(" * 500 + "1" + ")" * 500,
    "brackets": "select " + "(" * 50_000 + "1" + ")" * 50_000,
    "sum": "select 1" + "+1" * 5_000,
    "compound": "select 1" + " union select 1" * 200,
    "columns": "select " + ",".join("1" for _ in range(501)),
    "subqueries": "select * from (" * 5_000 + "select 1" + ")" * 5_000,
    "joins": "select * from " + ",".join(f"kept k{n}" for n in range(100)),
    "arguments": "select max(" + ",".join("1" for _ in range(2_000)) + ")",
    "values": "select zeroblob(100000000)",
    "text": "select replace(hex(zeroblob(30000000)), '0', 'xxxxxxxx')",
    "view on itself": "create view self as select * from self",
}


@pytest.mark.parametrize("sql", DEEP.values(), ids=DEEP)
def test_sql_that_is_too_much_of_something(client: RawClient, sql: str) -> None:
    answer = client.answer(ask_with(client, Statement(sql), WRITE))
    if sql == DEEP["view on itself"]:
        assert isinstance(answer, Reply)
        error = refusal(client, Statement("select * from self"))
        client.execute("drop view self")
    else:
        error = error_in(answer)
    assert isinstance(error, OperationFailedError | InvalidRequestError | ResultTooLargeError)
    assert error.outcome == "not_committed"


# Results


READS_TOO_MUCH = {
    "a blob": "select zeroblob(2000000)",
    "a text": "select hex(zeroblob(600000))",
    "a text of long letters": "select replace(hex(zeroblob(200000)), '0', 'ü')",
    "rows without end": "with recursive c(n) as (select 1 union all select n + 1 from c) select n from c",
    "rows of nothing": "with recursive c(n) as (select 1 union all select n + 1 from c) select null from c",
}


@pytest.mark.parametrize("sql", READS_TOO_MUCH.values(), ids=READS_TOO_MUCH)
@pytest.mark.parametrize("operation", ["sql.query", "sql.execute"])
def test_a_read_over_its_result(client: RawClient, sql: str, operation: str) -> None:
    error = refusal(client, Statement(sql), operation, result_bytes=150_000)
    assert isinstance(error, ResultTooLargeError)
    assert error.outcome == "not_committed"
    assert error.details["result_bytes_max"] == 150_000


@pytest.mark.parametrize("operation", ["sql.query", "sql.execute"])
def test_the_largest_result(client: RawClient, operation: str) -> None:
    """To the byte: the result's own encoding counts, not the envelope around it."""
    most = 100_000
    around = 0
    for size in (most - 10_000, most, most + 1):
        arguments = Statement("select zeroblob(?)", [size - around])
        answer = client.answer(ask_with(client, arguments, operation, result_bytes=most))
        if size > most:
            assert isinstance(error_in(answer), ResultTooLargeError)
        else:
            assert isinstance(answer, Reply)
            around = around or len(bytes(answer.result)) - size
            assert len(bytes(answer.result)) == size + (around if size < most else 0)


WRITES_TOO_MUCH = {
    "returning": Statement("insert into kept values(zeroblob(5000)) returning a"),
    "many rows": Statement(
        "insert into kept with recursive c(n) as (select 1 union all select n + 1 from c where n < 3000)"
        " select n from c returning a"
    ),
    "no rows": Statement("insert into kept values(5)"),
    "delete": Statement("delete from kept returning zeroblob(2000)"),
}


@pytest.mark.parametrize("arguments", WRITES_TOO_MUCH.values(), ids=WRITES_TOO_MUCH)
@pytest.mark.parametrize("key", [None, "key"])
def test_a_write_over_its_result_is_rolled_back(
    client: RawClient, arguments: Statement, key: str | None, request: pytest.FixtureRequest
) -> None:
    client.execute("insert into kept values('before')")
    key = key and f"{key} of {request.node.name}"
    allowed = 1 if arguments.sql == WRITES_TOO_MUCH["no rows"].sql else 1_000
    for _ in range(3):
        error = refusal(client, arguments, WRITE, result_bytes=allowed, key=key)
        assert isinstance(error, ResultTooLargeError)
        assert error.outcome == "not_committed"
        assert client.query("select a from kept").rows == [("before",)]
    if key:
        # It never happened, so that the same key may still be used, and then it happens once.
        for _ in range(2):
            assert isinstance(client.answer(ask_with(client, arguments, WRITE, key=key)), Reply)
        assert client.query("select count(*) from kept").scalar() in (0, 2, 3001)


@pytest.mark.parametrize(
    "sql",
    ["drop table {}", "create table if not exists {}2(a)", "create index if not exists i_{0} on {0}(a)"],
)
def test_a_change_of_the_schema_over_its_result_is_rolled_back(client: RawClient, sql: str) -> None:
    """Known to return nothing, such a statement runs without a savepoint of its own."""
    client.execute("drop table if exists fresh")
    client.execute("drop table if exists fresh2")
    client.execute("create table fresh(a)")
    text = sql.format("fresh")
    client.call(
        BATCH,
        Batch(
            [
                Statement(text),
                Statement("drop table if exists fresh"),
                Statement("drop table if exists fresh2"),
            ]
        ),
    )
    client.execute("create table fresh(a)")
    schema = client.query("select name from sqlite_schema where name like '%fresh%' order by 1").rows
    assert isinstance(refusal(client, Statement(text), WRITE, result_bytes=1), ResultTooLargeError)
    assert client.query("select name from sqlite_schema where name like '%fresh%' order by 1").rows == schema


def test_a_kept_result_over_what_a_repeat_allows(client: RawClient) -> None:
    """The first one is committed, and no refusal of its repeat may deny that."""
    insert = Statement("insert into kept values(1) returning zeroblob(5000)")
    assert isinstance(client.answer(ask_with(client, insert, WRITE, key="repeat")), Reply)
    error = refusal(client, insert, WRITE, key="repeat", result_bytes=100)
    assert isinstance(error, ResultTooLargeError)
    assert error.outcome == "committed"
    assert client.query("select count(*) from kept").scalar() == 1
    assert isinstance(client.answer(ask_with(client, insert, WRITE, key="repeat")), Reply)


def test_a_batch_over_its_result_is_rolled_back(client: RawClient) -> None:
    statements = [Statement("insert into kept values(1) returning zeroblob(900)")] * 3
    error = refusal(client, Batch(statements), BATCH.name, result_bytes=2_000)
    assert isinstance(error, ResultTooLargeError)
    assert table_is_empty(client, "kept")


def test_a_batch_of_large_results_is_ended_before_they_are_many(start_worker: StartWorker) -> None:
    worker = start_worker()
    bystander = Bystander(worker)
    before = peak_bytes(worker)
    large = Statement("select zeroblob(1000000)")
    error = refusal(bystander.client, Batch([large] * 500), BATCH.name)
    assert isinstance(error, ResultTooLargeError)
    assert peak_bytes(worker) - before < 64 * MIB
    bystander.check()


HUGE_ROWS = {
    "blobs": "select " + ",".join(["zeroblob(8000000)"] * 400),
    "texts": "select " + ",".join(["printf('%.*c', 8000000, 'x')"] * 400),
    "read on the way": "select " + "+".join(["length(hex(zeroblob(4000000)))"] * 40),
    "written": "insert into ledger values(1, 1) returning " + ",".join(["zeroblob(8000000)"] * 400),
    "compared": "select " + ",".join(["zeroblob(8000000)"] * 400) + " union select " + ",".join(["1"] * 400),
}


def test_many_large_values_in_a_row(start_worker: StartWorker) -> None:
    """The bounds on one value and on columns allow 3 GB in one row, which is whole before it is measured."""
    worker = start_worker(value_bytes_max=8 * MIB, sqlite_heap_bytes_max=64 * MIB)
    bystander = Bystander(worker)
    for sql in HUGE_ROWS.values():
        for operation in ("sql.query", WRITE):
            error = error_in(bystander.client.answer(ask_with(bystander.client, Statement(sql), operation)))
            assert error.code in (
                "storage_operation_failed",
                "storage_result_too_large",
                "storage_invalid_request",
            )
            assert error.outcome == "not_committed"
            bystander.check()
    assert peak_bytes(worker) < 300 * MIB
