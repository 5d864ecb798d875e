"""More than the worker can do: typed refusals at once, control that never waits, memory within its bounds."""

import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from storage_worker.protocol.envelope import Cancel, Failure, Reply, error_of
from storage_worker.protocol.errors import OverloadedError, RequestCancelledError, StorageError
from storage_worker.protocol.limits import KIB, MIB
from storage_worker.protocol.statements import (
    EXECUTE,
    HEALTH,
    HEARTBEAT,
    QUERY,
    Health,
    Nothing,
    Statement,
)
from storage_worker.protocol.status import WorkerStatus
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.gates import STORE, Gate, read, spin, write, write_alone
from tests.worker.hostile import ENDLESS, ENDLESS_WRITE, LEDGER, until
from tests.worker.raw import RawClient

SMALL = {"pipeline_window": 4, "quick_reads_remembered": 8}
"""Limits that go with few places."""

INSERT = Statement("insert into t values(1)", [])


def hold_the_writer(client: RawClient, gate: Gate) -> int:
    """Have the writer stand at the gate; the id of the request that does."""
    request_id = client.ask(write_alone.name, [gate.path])
    gate.wait()
    return request_id


def failures(client: RawClient, count: int) -> list[OverloadedError]:
    """The next answers, all of them refusals."""
    found = []
    for _ in range(count):
        answer = client.receive()
        assert isinstance(answer, Failure), answer
        error = error_of(answer)
        assert isinstance(error, OverloadedError), error
        assert error.retryable
        assert error.outcome == "not_committed"
        assert error.retry_after is not None
        assert 0 < error.retry_after <= 5
        found.append(error)
    return found


def test_64_clients_that_send_too_much_are_refused_at_once(start_worker: StartWorker, gate: Gate) -> None:
    worker = start_worker(stores=[STORE], queue_requests_max=100, client_requests_max=6, **SMALL)
    control = worker.connect(name="control")
    control.execute("create table t(a)")
    held = hold_the_writer(control, gate)
    clients = [worker.connect(name=f"client {number}") for number in range(64)]
    for client in clients:
        for _ in range(20):
            client.ask(EXECUTE, INSERT)
    # All refusals come while nothing is served: 99 places are left beside the one at the gate.
    status = until(control, lambda status: status.errors.get("storage_overloaded") == 64 * 20 - 99)
    foreground = status.lanes[1]
    assert (foreground.waiting_requests, foreground.refused_requests) == (99, 64 * 20 - 99)
    assert sum(each.in_flight_requests for each in status.clients) == 100
    assert sum(each.refused_requests for each in status.clients) == 64 * 20 - 99
    bounds: Counter[object] = Counter()
    admitted = {}
    for client, each in zip(clients, status.clients[1:], strict=True):
        assert each.name.startswith("client")
        refused = failures(client, each.refused_requests)
        bounds.update(error.details["bound"] for error in refused)
        admitted[client] = 20 - len(refused)
    assert set(bounds) == {"client_requests", "worker_requests"}
    assert max(admitted.values()) == 6
    gate.open()
    assert isinstance(control.answer(held), Reply)
    for client, count in admitted.items():
        for _ in range(count):
            assert isinstance(client.receive(), Reply)
    assert control.query("select count(*) from t").scalar() == 99
    # There is room again.
    for client in clients[:3]:
        client.execute("insert into t values(1)")


def test_bytes_are_bounded_for_the_client_and_the_worker(start_worker: StartWorker, gate: Gate) -> None:
    worker = start_worker(
        stores=[STORE],
        sql_bytes_max=64 * KIB,
        request_bytes_max=256 * KIB,
        client_bytes_max=512 * KIB,
        queue_bytes_max=MIB,
        group_bytes_max=512 * KIB,
    )
    control = worker.connect()
    control.execute("create table t(a)")
    hold_the_writer(control, gate)
    large = Statement("insert into t values(?)", [b"x" * 100 * KIB])
    clients = [worker.connect() for _ in range(3)]
    for client in clients[:2]:
        for _ in range(6):
            client.ask(EXECUTE, large)
        assert [error.details["bound"] for error in failures(client, 1)] == ["client_bytes"]
    clients[2].ask(EXECUTE, large)
    assert [error.details["bound"] for error in failures(clients[2], 1)] == ["worker_bytes"]
    # What still fits is taken.
    small = clients[2].ask(EXECUTE, INSERT)
    assert control.status().lanes[1].waiting_bytes <= MIB
    gate.open()
    assert isinstance(clients[2].answer(small), Reply)


ONE_LONG_STEP = (
    "instr(replace(hex(zeroblob(2000000)), '00', 'a'), replace(hex(zeroblob(1000000)), '00', 'a') || 'b')"
)

Start = Callable[[RawClient, Gate], int]


def _at_a_gate(client: RawClient, gate: Gate) -> int:
    request_id = client.ask(write.name, [gate.path])
    gate.wait()
    return request_id


def _reading_at_a_gate(client: RawClient, gate: Gate) -> int:
    request_id = client.ask(read.name, [gate.path])
    gate.wait()
    return request_id


def _endless_write(client: RawClient, _: Gate) -> int:
    return client.ask(EXECUTE, Statement(ENDLESS_WRITE))


def _endless_read(client: RawClient, _: Gate) -> int:
    return client.ask(QUERY, Statement(ENDLESS))


def _spinning(client: RawClient, _: Gate) -> int:
    return client.ask(spin.name, [])


def _one_long_step(client: RawClient, _: Gate) -> int:
    """A single step of SQLite's machine, which nothing interrupts: it would take minutes."""
    return client.ask(EXECUTE, Statement(f"insert into t select {ONE_LONG_STEP}"))


LONG: dict[str, Start] = {
    "a handler that waits": _at_a_gate,
    "a read handler that waits": _reading_at_a_gate,
    "a statement of many steps": _endless_write,
    "a read of many steps": _endless_read,
    "a handler that computes": _spinning,
    "a statement of one long step": _one_long_step,
}


@pytest.mark.parametrize("start", LONG.values(), ids=LONG)
def test_control_is_answered_while_something_long_runs(
    start_worker: StartWorker, gate: Gate, start: Start
) -> None:
    """Also refused, cancelled and expired requests are answered meanwhile; and the worker stops."""
    worker = start_worker(stores=[STORE], client_requests_max=8, stop_grace_ms=50, **SMALL)
    client, other, admin = (
        worker.connect(name="long"),
        worker.connect(name="other"),
        worker.connect(role="admin"),
    )
    client.execute("create table t(a)")
    client.execute(LEDGER)
    start(client, gate)
    until(other, lambda status: status.lanes[1].waiting_requests == 0 and in_flight(status, "long") == 1)
    for _ in range(3):
        other.call(HEARTBEAT, Nothing())
        assert other.call(HEALTH, Nothing()) == Health("healthy", [])
    waiting = [other.ask(EXECUTE, INSERT) for _ in range(7)]
    late = other.ask(EXECUTE, INSERT, seconds=0.05)
    refused = other.ask(EXECUTE, INSERT)
    if start in {_reading_at_a_gate, _endless_read}:
        # Reads hold up no writes.
        assert isinstance(other.answer(waiting[-1]), Reply)
    else:
        assert error_of_answer(other.answer(refused)).code == "storage_overloaded"
        assert error_of_answer(other.answer(late)).details == {"stage": "waiting"}
        other.send(Cancel(waiting[0]))
        assert isinstance(error_of_answer(other.answer(waiting[0])), RequestCancelledError)
    assert in_flight(admin.status(), "long") == 1
    stop = admin.ask("worker.stop", [])
    assert isinstance(admin.answer(stop), Reply)
    assert admin.call(HEALTH, Nothing()).state == "draining"
    assert worker.child.wait(30) is not None


def in_flight(status: WorkerStatus, name: str) -> int:
    return next(each.in_flight_requests for each in status.clients if each.name == name)


def error_of_answer(answer: Reply | Failure) -> StorageError:
    assert isinstance(answer, Failure), answer
    return error_of(answer)


def test_a_slow_commit_keeps_nobody_without_an_answer(start_worker: StartWorker, gate: Gate) -> None:
    worker = start_worker(stores=[STORE, "tests.worker.slow_commit:slow"])
    client, other, third = worker.connect(), worker.connect(), worker.connect()
    client.execute("create table t(a)")
    slow = client.ask("slow.insert", [gate.path])
    gate.wait()
    late = other.ask(EXECUTE, INSERT, seconds=0.05)
    assert error_of_answer(other.answer(late)).details == {"stage": "waiting"}
    queued = other.ask(EXECUTE, INSERT)
    assert other.status().writer.committed_requests == 1
    # Nothing of it can be seen yet, by a read that goes to the pool meanwhile.
    assert third.query("select count(*) from t").scalar() == 0
    gate.open()
    assert isinstance(client.answer(slow), Reply)
    assert isinstance(other.answer(queued), Reply)
    assert other.query("select count(*) from t").scalar() == 2


def test_a_client_that_reads_nothing_gets_no_more_done_than_it_may_leave_unread(
    start_worker: StartWorker,
) -> None:
    size = 512 * KIB
    worker = start_worker(unread_bytes_max=2 * MIB, result_bytes_max=MIB, group_bytes_max=MIB)
    reader, control = worker.connect(name="reader"), worker.connect()
    sql = f"select zeroblob({size})"
    for _ in range(3):
        reader.query(sql)
    ids = [reader.ask(QUERY, Statement(sql)) for _ in range(100)]
    status = until(control, lambda status: unread(status) > 2 * MIB)
    before = status.process.resident_bytes
    for _ in range(20):
        status = control.status()
        # The bound, what one round of quick reads makes at once, and one reply of each thread.
        assert unread(status) <= 2 * MIB + 6 * size
    assert in_flight(status, "reader") > 50
    assert status.process.resident_bytes - before < 16 * MIB
    answers = [reader.receive() for _ in ids]
    assert {
        answer.id for answer in answers if isinstance(answer, Reply) and len(answer.result) > size
    } == set(ids)
    assert in_flight(control.status(), "reader") == 0


def unread(status: WorkerStatus) -> int:
    return next(each.unread_bytes for each in status.clients if each.name == "reader")


def test_results_of_one_group_are_bounded_too(start_worker: StartWorker, gate: Gate) -> None:
    """Small requests with large results: a group closes at its bytes, whichever they are."""
    worker = start_worker(stores=[STORE], group_bytes_max=2 * MIB, group_work_ms_max=10_000)
    control = worker.connect()
    control.execute("create table t(a)")
    hold_the_writer(control, gate)
    clients = [worker.connect() for _ in range(4)]
    returning = Statement("insert into t values(1) returning zeroblob(524288)")
    ids = [(client, client.ask(EXECUTE, returning)) for client in clients for _ in range(4)]
    groups = control.status().writer.groups
    gate.open()
    for client, request_id in ids:
        assert isinstance(client.answer(request_id), Reply)
    assert control.status().writer.groups - groups >= 4


def test_memory_stays_in_bounds_under_a_flood(start_worker: StartWorker, gate: Gate) -> None:
    worker = start_worker(
        stores=[STORE],
        sql_bytes_max=64 * KIB,
        request_bytes_max=256 * KIB,
        client_bytes_max=2 * MIB,
        queue_bytes_max=8 * MIB,
    )
    control = worker.connect()
    control.execute("create table t(a)")
    hold_the_writer(control, gate)
    before = control.status().process.resident_bytes
    large = Statement("insert into t values(?)", [b"x" * 200 * KIB])
    clients = [worker.connect() for _ in range(16)]
    for _, client in itertools.product(range(40), clients):
        client.ask(EXECUTE, large)
    status = until(control, lambda status: status.lanes[1].refused_requests >= 600)
    assert status.lanes[1].waiting_bytes <= 8 * MIB
    # 128 MB were sent; 8 MiB of them may wait, and each client may have sent a part of its next request.
    assert status.process.resident_bytes - before < 40 * MIB
    gate.open()


def test_an_unknown_cancel_is_no_matter(worker: RunningWorker) -> None:
    client = worker.connect()
    done = client.ask(QUERY, Statement("select 1"))
    assert isinstance(client.answer(done), Reply)
    for request_id in (done, done + 1_000):
        client.send(Cancel(request_id))
    assert client.query("select 2").scalar() == 2
