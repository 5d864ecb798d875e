"""Interactive transactions on a real worker: who waits, who is told, and what lets the others go on."""

import contextlib
from typing import Any

import pytest

from storage_worker.protocol.envelope import Cancel, Failure, Reply
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotPermittedError,
    TransactionExpiredError,
)
from storage_worker.protocol.statements import (
    BEGIN,
    COMMIT,
    EXECUTE,
    ROLLBACK,
    SCRIPT,
    Begin,
    Nothing,
    Script,
    Statement,
)
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.raw import RawClient, wait_until_running, wait_until_waiting

INSERT = "insert into t values(?)"
ENDLESS = "with recursive c(n) as (values(1) union all select n + 1 from c) insert into t select n from c"


@pytest.fixture
def served(worker: RunningWorker) -> RunningWorker:
    worker.connect().execute("create table t(a)")
    return worker


def begin(client: RawClient, lease_ms: int = 60_000) -> int:
    return int(client.call(BEGIN, Begin(lease_ms)))


def rows(client: RawClient) -> list[Any]:
    return [a for (a,) in client.query("select a from t order by rowid")]


def test_others_wait_within_their_deadlines_and_read_meanwhile(served: RunningWorker) -> None:
    owner, other, hurried = (served.connect() for _ in range(3))
    transaction = begin(owner)
    owner.execute(INSERT, "owner", transaction=transaction)
    waits = other.ask(EXECUTE, Statement(INSERT, ["other"]))
    begins = other.ask(BEGIN, Begin(60_000))
    with pytest.raises(DeadlineExceededError) as caught:
        hurried.execute(INSERT, "hurried", seconds=0.5)
    assert caught.value.details == {"stage": "waiting"}
    assert rows(hurried) == []
    status = hurried.status()
    assert status.writer.lease_owner == "raw"
    assert 0 < status.writer.lease_left_ms <= 60_000
    owner.call(COMMIT, Nothing(), transaction=transaction)
    assert isinstance(other.answer(waits), Reply)
    again = BEGIN.decode_result(other.answer(begins).result)  # type: ignore[union-attr]
    assert again != transaction
    other.execute(INSERT, "again", transaction=again)
    other.call(COMMIT, Nothing(), transaction=again)
    assert rows(hurried) == ["owner", "other", "again"]
    assert hurried.status().writer.lease_owner == ""


def test_a_lease_that_runs_out_lets_the_others_go_on(served: RunningWorker) -> None:
    owner, other = served.connect(), served.connect()
    transaction = begin(owner, lease_ms=100)
    with contextlib.suppress(TransactionExpiredError):  # on a busy machine it is over by now
        owner.execute(INSERT, "owner", transaction=transaction)
    other.execute(INSERT, "other")
    for request in (
        owner.ask(EXECUTE, Statement(INSERT, ["late"]), transaction=transaction),
        owner.ask(COMMIT, Nothing(), transaction=transaction),
        owner.ask(ROLLBACK, Nothing(), transaction=transaction),
    ):
        answer = owner.answer(request)
        assert isinstance(answer, Failure)
        assert (answer.code, answer.outcome) == ("storage_transaction_expired", "not_committed")
        assert "lease" in answer.message
    assert rows(other) == ["other"]
    transaction = begin(owner)
    owner.call(ROLLBACK, Nothing(), transaction=transaction)


@pytest.mark.parametrize("running", [False, True])
def test_a_lost_owner_lets_the_others_go_on(served: RunningWorker, running: bool) -> None:
    owner, other = served.connect(), served.connect()
    transaction = begin(owner)
    owner.execute(INSERT, "owner", transaction=transaction)
    waits = other.ask(EXECUTE, Statement(INSERT, ["other"]))
    if running:
        owner.ask(EXECUTE, Statement(ENDLESS), transaction=transaction)
    wait_until_waiting(served.connect(), 1)
    owner.close()
    assert isinstance(other.answer(waits), Reply)
    assert rows(other) == ["other"]


def test_the_owners_call_without_the_number_is_refused_at_once(served: RunningWorker) -> None:
    owner = served.connect()
    transaction = begin(owner)
    for operation, arguments in ((EXECUTE, Statement(INSERT, ["dead-lock"])), (BEGIN, Begin(1000))):
        with pytest.raises(InvalidRequestError):
            owner.call(operation, arguments)
    owner.execute(INSERT, "owner", transaction=transaction)
    # A read waits for nobody, and sees what is committed.
    assert rows(owner) == []
    owner.call(COMMIT, Nothing(), transaction=transaction)
    assert rows(owner) == ["owner"]


def test_what_is_sent_behind_the_begin_without_the_number_is_refused(served: RunningWorker) -> None:
    owner = served.connect()
    begins = owner.ask(BEGIN, Begin(60_000))
    behind = owner.ask(EXECUTE, Statement(INSERT, ["dead-lock"]))
    assert isinstance(owner.answer(begins), Reply)
    answer = owner.answer(behind)
    assert isinstance(answer, Failure)
    assert answer.code == "storage_invalid_request"


def test_steps_without_a_transaction(served: RunningWorker) -> None:
    client, other = served.connect(), served.connect()
    transaction = begin(other)
    for operation in (COMMIT, ROLLBACK):
        with pytest.raises(TransactionExpiredError):
            client.call(operation, Nothing(), transaction=transaction)
        with pytest.raises(TransactionExpiredError):
            client.call(operation, Nothing(), transaction=transaction + 1)
    other.call(ROLLBACK, Nothing(), transaction=transaction)
    with pytest.raises(TransactionExpiredError):
        client.call(COMMIT, Nothing())
    with pytest.raises(NotPermittedError):
        client.call(SCRIPT, Script("commit"))


def test_a_cancelled_statement_ends_the_transaction(served: RunningWorker) -> None:
    owner, other = served.connect(name="owner"), served.connect()
    transaction = begin(owner)
    owner.execute(INSERT, "owner", transaction=transaction)
    request = owner.ask(EXECUTE, Statement(ENDLESS), transaction=transaction)
    wait_until_running(other, "owner")
    owner.send(Cancel(request))
    answer = owner.answer(request)
    assert isinstance(answer, Failure)
    assert answer.code == "storage_cancelled"
    other.execute(INSERT, "other")
    assert rows(other) == ["other"]


def test_many_one_after_the_other(start_worker: StartWorker) -> None:
    worker = start_worker(wal_checkpoint_bytes=100_000, wal_live_frames_max=50)
    clients = [worker.connect() for _ in range(3)]
    clients[0].execute("create table t(a)")
    for number in range(60):
        client = clients[number % 3]
        transaction = begin(client)
        client.execute(INSERT, str(number) * 2000, transaction=transaction)
        client.execute(INSERT, number, transaction=transaction)
        client.call(ROLLBACK if number % 5 == 0 else COMMIT, Nothing(), transaction=transaction)
    kept = [a for a in rows(clients[0]) if isinstance(a, int)]
    assert kept == [number for number in range(60) if number % 5]
    # Checkpoints are made for them as for groups.
    status = clients[0].status()
    assert status.wal.checkpoints > 0
    assert status.wal.live_frames < 150
