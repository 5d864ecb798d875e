"""One deadline for all stages: what expires is answered when it expires, whatever else goes on."""

import sqlite3
import time
from collections.abc import Callable, Iterator

import pytest

from storage_worker.protocol.envelope import Cancel, Failure, OutgoingRequest, Reply, error_of
from storage_worker.protocol.errors import (
    BusyError,
    DeadlineExceededError,
    InvalidRequestError,
    RequestCancelledError,
    StorageError,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.statements import BEGIN, EXECUTE, QUERY, ROLLBACK, Begin, Nothing, Statement
from storage_worker.protocol.status import WorkerStatus
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.gates import STORE, Gate, read, write, write_alone
from tests.worker.hostile import ENDLESS, ENDLESS_WRITE, LEDGER, until
from tests.worker.raw import RawClient

INSERT = Statement("insert into t values(1)")
COUNT = Statement("select count(*) from t")


@pytest.fixture
def gated(standing_gated_worker: RunningWorker) -> Iterator[RunningWorker]:
    """A worker that other tests used before, with fresh tables."""
    worker = standing_gated_worker
    with RawClient(worker.address) as client:
        client.execute("create table t(a)")
        client.execute(LEDGER)
        yield worker
        worker.leave()
        until(client, lambda status: len(status.clients) == 1)
        client.execute("drop table t")
        client.execute("drop table ledger")


def failure(client: RawClient, request_id: int) -> StorageError:
    answer = client.answer(request_id)
    assert isinstance(answer, Failure), answer
    return error_of(answer)


def expired(client: RawClient, request_id: int, stage: str) -> None:
    error = failure(client, request_id)
    assert isinstance(error, DeadlineExceededError), error
    assert error.details["stage"] == stage
    assert error.outcome == "not_committed"
    assert error.retryable


def hold_the_writer(worker: RunningWorker, gate: Gate) -> RawClient:
    holder = worker.connect(name="holder")
    holder.ask(write_alone.name, [gate.path])
    gate.wait()
    return holder


def test_a_waiting_write_expires_while_another_runs(gated: RunningWorker, gate: Gate) -> None:
    holder, client = hold_the_writer(gated, gate), gated.connect()
    patient = client.ask(EXECUTE, INSERT)
    for seconds in (0.15, 0.05, 0.1):
        client.ask(EXECUTE, INSERT, seconds=seconds)
    # The shortest first, and all of them before what runs has ended.
    for request_id in (patient + 2, patient + 3, patient + 1):
        expired(client, request_id, "waiting")
    gate.open()
    assert isinstance(client.answer(patient), Reply)
    assert isinstance(holder.receive(), Reply)
    assert client.query("select count(*) from t").scalar() == 1


def test_a_read_that_waits_for_its_client_s_own_write_expires(gated: RunningWorker, gate: Gate) -> None:
    hold_the_writer(gated, gate)
    client = gated.connect()
    write_id = client.ask(EXECUTE, INSERT)
    read_id = client.ask(QUERY, COUNT, seconds=0.05)
    second = client.ask(QUERY, COUNT)
    status = gated.connect().status()
    assert status.lanes[1].waiting_requests == 3
    expired(client, read_id, "waiting")
    client.send(Cancel(second))
    assert isinstance(failure(client, second), RequestCancelledError)
    gate.open()
    assert isinstance(client.answer(write_id), Reply)


def test_a_read_expires_while_the_pool_is_taken(gated: RunningWorker, gate: Gate) -> None:
    client = gated.connect()
    standing = [client.ask(read.name, [gate.path]) for _ in range(2)]
    for _ in standing:
        gate.wait()
    late = client.ask(QUERY, Statement("select 'never asked before'"), seconds=0.05)
    expired(client, late, "waiting")
    for request_id in standing:
        gate.open()
        assert isinstance(client.receive(), Reply), request_id


def test_writes_wait_for_an_interactive_transaction_within_their_deadlines(gated: RunningWorker) -> None:
    owner, other = gated.connect(), gated.connect()
    number = owner.call(BEGIN, Begin(20_000))
    owner.execute("insert into t values(2)", transaction=number)
    late, patient = other.ask(EXECUTE, INSERT, seconds=0.05), other.ask(EXECUTE, INSERT)
    expired(other, late, "waiting")
    owner.call(ROLLBACK, Nothing(), transaction=number)
    assert isinstance(other.answer(patient), Reply)
    assert other.query("select a from t").rows == [(1,)]


def test_a_foreign_lock_makes_busy_of_a_deadline_and_no_more(gated: RunningWorker) -> None:
    client, control = gated.connect(), gated.connect()
    foreign = sqlite3.connect(gated.path, isolation_level=None)
    try:
        foreign.execute("begin immediate")
        late = client.ask(EXECUTE, INSERT, seconds=0.1)
        patient = client.ask(EXECUTE, INSERT)
        error = failure(client, late)
        assert isinstance(error, BusyError)
        assert error.outcome == "not_committed"
        assert control.query("select count(*) from t").scalar() == 0
        health = control.status().health
        assert (health.state, health.reasons) == ("degraded", ["another process holds SQLite's lock"])
        foreign.execute("rollback")
    finally:
        foreign.close()
    assert isinstance(client.answer(patient), Reply)
    status = control.status()
    assert status.writer.busy_retries > 0
    assert status.health.state == "healthy"
    assert client.query("select count(*) from t").scalar() == 1


def test_an_interactive_transaction_waits_for_a_foreign_lock_too(gated: RunningWorker) -> None:
    client = gated.connect()
    foreign = sqlite3.connect(gated.path, isolation_level=None)
    try:
        foreign.execute("begin immediate")
        late = client.ask(BEGIN, Begin(), seconds=0.1)
        assert isinstance(failure(client, late), BusyError)
        patient = client.ask(BEGIN, Begin())
        foreign.execute("rollback")
    finally:
        foreign.close()
    assert isinstance(client.answer(patient), Reply)


@pytest.mark.parametrize(("operation", "sql"), [(EXECUTE, ENDLESS_WRITE), (QUERY, ENDLESS)])
def test_a_deadline_ends_what_runs(gated: RunningWorker, operation: object, sql: str) -> None:
    client, other = gated.connect(), gated.connect()
    late = client.ask(operation, Statement(sql), seconds=0.1)  # type: ignore[arg-type]
    mate = other.ask(EXECUTE, INSERT)
    expired(client, late, "execution")
    assert isinstance(other.answer(mate), Reply)
    assert client.query("select count(*) from ledger").scalar() == 0


@pytest.mark.parametrize(("operation", "sql"), [(EXECUTE, ENDLESS_WRITE), (QUERY, ENDLESS)])
def test_a_cancel_ends_what_runs(gated: RunningWorker, operation: object, sql: str) -> None:
    client, control = gated.connect(name="client"), gated.connect()
    endless = client.ask(operation, Statement(sql))  # type: ignore[arg-type]
    until(control, lambda status: status.lanes[1].waiting_requests == 0 and _in_flight(status, "client"))
    client.send(Cancel(endless))
    error = failure(client, endless)
    assert isinstance(error, RequestCancelledError)
    assert error.outcome == "not_committed"
    assert client.query("select count(*) from ledger").scalar() == 0


def _in_flight(status: WorkerStatus, name: str) -> int:
    return next(each.in_flight_requests for each in status.clients if each.name == name)


def test_a_client_that_goes_takes_its_requests_along(gated: RunningWorker, gate: Gate) -> None:
    """What waits of it is not run, what runs of it is ended, and no place is lost."""
    control = gated.connect()
    cancelled = control.status().errors.get("storage_cancelled", 0)
    holder = hold_the_writer(gated, gate)
    with RawClient(gated.address, name="gone") as gone:
        gone.ask(EXECUTE, INSERT)
        gone.ask(QUERY, COUNT)
        gone.ask(QUERY, Statement(ENDLESS))
        until(control, lambda status: _in_flight(status, "gone") == 3)
    until(control, lambda status: all(each.name != "gone" for each in status.clients))
    with RawClient(gated.address, name="gone") as gone:
        gone.ask(QUERY, Statement(ENDLESS))
        until(control, lambda status: status.readers.running_requests == 1)
    status = until(control, lambda status: status.errors.get("storage_cancelled") == cancelled + 4)
    assert status.readers.running_requests == 0
    assert status.lanes[1].waiting_requests == 0
    gate.open()
    assert isinstance(holder.receive(), Reply)
    assert control.query("select count(*) from t").scalar() == 0


def _with_deadline(client: RawClient, deadline_ns: int) -> StorageError | None:
    client.last_id += 1
    client.send(OutgoingRequest(client.last_id, QUERY.name, deadline_ns, 0, None, 0, 0, COUNT))
    answer = client.answer(client.last_id)
    return error_of(answer) if isinstance(answer, Failure) else None


@pytest.mark.parametrize(
    ("deadline", "outcome"),
    [
        (lambda: 0, None),
        (lambda: 1, DeadlineExceededError),
        (lambda: time.monotonic_ns() - 1, DeadlineExceededError),
        (lambda: time.monotonic_ns() + DEFAULT_LIMITS.deadline_ms_max * 1_000_000 // 2, None),
        (lambda: time.monotonic_ns() + DEFAULT_LIMITS.deadline_ms_max * 2_000_000, InvalidRequestError),
        (lambda: 2**63, InvalidRequestError),
    ],
    ids=["none", "1", "passed", "far", "too far", "beyond all clocks"],
)
def test_deadlines_at_admission(
    gated: RunningWorker, deadline: Callable[[], int], outcome: type[StorageError] | None
) -> None:
    client = gated.connect()
    error = _with_deadline(client, deadline())
    assert error is None if outcome is None else type(error) is outcome
    if isinstance(error, DeadlineExceededError):
        assert error.details == {"stage": "admission"}


def test_without_a_deadline_the_default_is_in_force(start_worker: StartWorker, gate: Gate) -> None:
    worker = start_worker(stores=[STORE], deadline_ms_default=50)
    hold_the_writer(worker, gate)
    client = worker.connect()
    client.last_id = 1
    client.send(OutgoingRequest(1, write.name, 0, 0, None, 0, 0, [gate.path]))
    expired(client, 1, "waiting")
