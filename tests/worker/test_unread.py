"""A client that does not read its replies: it waits or goes, the others notice nothing, memory stays in bounds."""

import socket
import time

import pytest

from storage_worker.protocol.envelope import Failure, Reply
from storage_worker.protocol.limits import MIB
from storage_worker.protocol.statements import BEGIN, EXECUTE, QUERY, STATUS, Begin, Statement
from storage_worker.protocol.status import ClientStatus, WorkerStatus
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.hostile import Bystander, ask_many, error_in, peak_bytes, until
from tests.worker.raw import RawClient

LARGE = Statement("select zeroblob(1000000)")
LARGE_WRITE = Statement("insert into ledger values('deaf', 1) returning zeroblob(1000000)")
COUNT = 100
BOUND = 2 * MIB
HOLD_MS = 600_000
"""Long enough that no test sees it pass."""


@pytest.fixture
def worker(start_worker: StartWorker) -> RunningWorker:
    """A worker that lets 2 MiB of replies wait, for as long as it takes."""
    return start_worker(unread_bytes_max=BOUND, result_bytes_max=2 * MIB, unread_ms_max=HOLD_MS)


def deaf_client(status: WorkerStatus) -> ClientStatus | None:
    return next((each for each in status.clients if each.name == "deaf"), None)


def is_over_its_bound(status: WorkerStatus) -> bool:
    deaf = deaf_client(status)
    return deaf is not None and deaf.unread_bytes > BOUND


def is_gone(status: WorkerStatus) -> bool:
    return deaf_client(status) is None


def settled(bystander: Bystander) -> WorkerStatus:
    """The status once nothing runs any more, however much still waits."""
    before: WorkerStatus | None = None
    while True:
        status = until(bystander.client, is_over_its_bound)
        if before and status.readers.running_requests == 0 and unread_by_it(before) == unread_by_it(status):
            return status
        before = status
        bystander.check()


def unread_by_it(status: WorkerStatus) -> int:
    deaf = deaf_client(status)
    assert deaf is not None
    return deaf.unread_bytes


@pytest.mark.parametrize(("arguments", "operation"), [(LARGE, QUERY.name), (LARGE_WRITE, EXECUTE.name)])
def test_it_waits_and_loses_nothing(worker: RunningWorker, arguments: Statement, operation: str) -> None:
    bystander = Bystander(worker)
    before = peak_bytes(worker)
    deaf = worker.connect(name="deaf")
    numbers = ask_many(deaf, COUNT, arguments, operation)
    settled(bystander)
    assert peak_bytes(worker) - before < COUNT * MIB // 2
    bystander.check()
    answers = [deaf.receive() for _ in numbers]
    assert sorted(each.id for each in answers if isinstance(each, Reply)) == numbers
    expected = COUNT if operation == EXECUTE.name else 0
    assert bystander.client.query("select count(*) from ledger where owner = 'deaf'").scalar() == expected
    assert deaf.query("select 1").scalar() == 1


def test_one_that_makes_no_progress_is_dropped(start_worker: StartWorker) -> None:
    worker = start_worker(unread_bytes_max=BOUND, result_bytes_max=2 * MIB, unread_ms_max=200)
    bystander = Bystander(worker)
    deaf = worker.connect(name="deaf")
    ask_many(deaf, COUNT, LARGE)
    status = until(bystander.client, is_gone)
    assert sum(lane.waiting_requests for lane in status.lanes) == 0
    assert "does not read its replies" in worker.log()
    # What the kernel had taken still arrives, and then the end.
    found = b""
    while data := received(deaf):
        found += data
    assert len(found) < BOUND
    bystander.check()


def received(client: RawClient) -> bytes:
    try:
        return client.socket.recv(MIB)
    except ConnectionResetError:
        return b""


def test_nothing_more_is_read_from_it(worker: RunningWorker) -> None:
    bystander = Bystander(worker)
    deaf = worker.connect(name="deaf")
    ask_many(deaf, COUNT, LARGE)
    until(bystander.client, is_over_its_bound)
    deaf.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        send_without_end(deaf)
    bystander.check()


def send_without_end(client: RawClient) -> None:
    sent = 0
    while sent < 8 * MIB:
        sent += client.socket.send(b"\0" * 65_536)


def test_its_waiting_requests_still_meet_their_deadlines(worker: RunningWorker) -> None:
    bystander = Bystander(worker)
    deaf = worker.connect(name="deaf")
    ask_many(deaf, COUNT, LARGE, deadline_ns=time.monotonic_ns() + 2 * 10**9)
    until(bystander.client, is_over_its_bound)
    until(bystander.client, lambda status: sum(lane.waiting_requests for lane in status.lanes) == 0)
    answers = [deaf.receive() for _ in range(COUNT)]
    failures = [error_in(answer).code for answer in answers if isinstance(answer, Failure)]
    assert set(failures) == {"storage_deadline"}
    assert len(failures) > COUNT // 2
    bystander.check()


def test_it_may_leave(worker: RunningWorker) -> None:
    bystander = Bystander(worker)
    for half in (False, True):
        deaf = worker.connect(name="deaf")
        ask_many(deaf, COUNT, LARGE)
        until(bystander.client, is_over_its_bound)
        if half:
            deaf.socket.shutdown(socket.SHUT_RDWR)
        else:
            deaf.close()
        status = until(bystander.client, is_gone)
        assert sum(lane.waiting_requests for lane in status.lanes) == 0
        bystander.check()


def test_a_transaction_of_one_is_ended_by_its_lease(worker: RunningWorker) -> None:
    bystander = Bystander(worker)
    deaf = worker.connect(name="deaf")
    number = deaf.call(BEGIN, Begin(300))
    ask_many(deaf, COUNT, LARGE_WRITE, EXECUTE.name, transaction=number)
    bystander.check()
    assert bystander.client.query("select count(*) from ledger where owner = 'deaf'").scalar() == 0
    answers = [deaf.receive() for _ in range(COUNT)]
    assert isinstance(answers[0], Reply)
    assert {error_in(each).code for each in answers if isinstance(each, Failure)} <= {
        "storage_transaction_expired"
    }


def test_answers_to_control_requests_are_bounded_too(worker: RunningWorker) -> None:
    """They take no place in a queue: only what is unread bounds them."""
    bystander = Bystander(worker)
    deaf = worker.connect(name="deaf")
    before = peak_bytes(worker)
    numbers = ask_many(deaf, 1_000, [], STATUS.name)
    assert unread_by_it(settled(bystander)) < BOUND + MIB
    assert peak_bytes(worker) - before < 16 * MIB
    answers = [deaf.receive() for _ in numbers]
    assert [each.id for each in answers if isinstance(each, Reply)] == numbers
