"""What the worker tells of itself agrees with what was done, and names what is wrong."""

import json
import os
import resource
import sqlite3
from contextlib import closing

import msgspec
import pytest

from storage_worker.protocol.envelope import PROTOCOL_VERSION, Failure, error_of
from storage_worker.protocol.errors import (
    InvalidRequestError,
    OperationFailedError,
    OverloadedError,
    StorageError,
    StorageFullError,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.statements import (
    BEGIN,
    EXECUTE,
    HEALTH,
    HEARTBEAT,
    OUTCOME,
    QUERY,
    Begin,
    Nothing,
    OutcomeQuestion,
    Statement,
)
from storage_worker.protocol.status import OperationCounts, WorkerStatus, as_builtins, percentile
from storage_worker.version import VERSION
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.gates import STORE, Gate, write
from tests.worker.hostile import until

INSERT = Statement("insert into t values(1)")


def of_operation(status: WorkerStatus, name: str) -> OperationCounts:
    return next(each for each in status.operations if each.name == name)


def test_a_fresh_worker(start_worker: StartWorker) -> None:
    worker = start_worker(stores=[STORE], durability="normal", stop_grace_ms=1234)
    status = worker.connect(name="only", role="read").status()
    assert status.version == VERSION
    assert status.protocol_version == PROTOCOL_VERSION
    assert status.worker == worker.record.worker
    assert status.path == str(worker.path)
    assert status.address == worker.address
    assert abs(status.started_ms - worker.record.started_ms) < 60_000
    assert status.uptime_ms >= 0
    assert (status.shared, status.durability, status.synchronous) == (False, "normal", "normal")
    assert status.journal_mode == "wal"
    assert tuple(int(part) for part in status.sqlite_version.split(".")) >= (3, 50)
    assert (status.health.state, status.health.reasons) == ("healthy", [])
    assert status.stores == ["gated", "sql", "worker"]
    assert [lane.name for lane in status.lanes] == ["control", "foreground", "background"]
    assert (status.operations, status.errors, status.latency_us.count) == ([], {}, 0)
    assert (status.writer.groups, status.writer.committed_requests, status.writer.lease_owner) == (0, 0, "")
    assert status.readers.threads == DEFAULT_LIMITS.reader_threads
    assert status.receipts.kept == 0
    process = status.process
    assert process.pid == worker.record.pid
    assert 10_000_000 < process.resident_bytes < 100_000_000
    assert process.user_cpu_seconds > 0
    # The serving one, its deputy, and the readers.
    assert process.threads == 2 + DEFAULT_LIMITS.reader_threads
    assert 5 < process.descriptors < 60
    assert process.descriptors_max >= DEFAULT_LIMITS.connections_max
    assert process.disk_free_bytes > process.disk_reserve_bytes > 0
    assert [task.name for task in status.background] == ["receipts", "optimize"]
    assert [(each.name, each.pid, each.role) for each in status.clients] == [("only", os.getpid(), "read")]
    assert status.limits == msgspec.structs.replace(DEFAULT_LIMITS, stop_grace_ms=1234)


def test_counts_agree_with_what_was_done(start_worker: StartWorker) -> None:
    # However slow the machine is, no write outruns its group's budget and runs again.
    worker = start_worker(group_work_ms_max=600_000)
    client, other = worker.connect(name="busy", role="admin"), worker.connect(name="")
    client.execute("create table t(a unique)")
    for number in range(10):
        client.execute("insert into t values(?)", number)
    for _ in range(3):
        with pytest.raises(OperationFailedError):
            client.execute("insert into t values(1)")
    for _ in range(5):
        client.query("select 1")
    with pytest.raises(InvalidRequestError):
        client.query("select 1; select 2")
    client.call(HEARTBEAT, Nothing())
    client.execute("insert into t values(100)", key="k")
    client.execute("insert into t values(100)", key="k")
    assert client.call(OUTCOME, OutcomeQuestion("k")).committed
    refused = client.ask("no.such", [])
    assert isinstance(client.answer(refused), Failure)
    status = client.status()
    execute, query = of_operation(status, EXECUTE.name), of_operation(status, QUERY.name)
    assert (execute.succeeded_requests, execute.failed_requests) == (13, 3)
    assert execute.latency_us.count == 16
    assert execute.latency_us.p50 <= execute.latency_us.p99 <= execute.latency_us.largest
    assert (query.succeeded_requests, query.failed_requests) == (5, 1)
    assert of_operation(status, HEARTBEAT.name).succeeded_requests == 1
    assert of_operation(status, OUTCOME.name).succeeded_requests == 1
    assert status.errors == {"storage_operation_failed": 3, "storage_invalid_request": 2}
    assert status.latency_us.count == 16 + 6 + 1
    foreground = status.lanes[1]
    assert (foreground.admitted_requests, foreground.refused_requests) == (16 + 6 + 1, 0)
    assert status.lanes[0].admitted_requests == 2
    writer = status.writer
    # One by one: each is a group, also the failed ones.
    assert writer.groups == writer.committed_requests == writer.group_size_requests.count == 17
    assert writer.commit_us.count == 17
    assert percentile(writer.group_size_requests, 0.5) == 1
    assert (writer.busy_retries, writer.replays, writer.failed_commits, writer.fences) == (0, 0, 0, 0)
    readers = status.readers
    assert readers.quick_reads + readers.pooled_reads == 6
    receipts = status.receipts
    assert (receipts.kept, receipts.answered_again, receipts.conflicts) == (1, 1, 0)
    # An empty name is a name.
    assert [each.name for each in status.clients] == ["busy", ""]
    busy = status.clients[0]
    assert (busy.in_flight_requests, busy.in_flight_bytes, busy.unread_bytes) == (0, 0, 0)
    # The heartbeat too; the refused one had no place.
    assert busy.answered_requests == 16 + 6 + 1 + 1
    other.close()
    until(client, lambda status: len(status.clients) == 1)


def test_what_waits_is_shown(start_worker: StartWorker, gate: Gate) -> None:
    worker = start_worker(stores=[STORE])
    client, control = worker.connect(name="waits"), worker.connect(name="control")
    client.execute("create table t(a)")
    client.ask(write.name, [gate.path])
    gate.wait()
    for _ in range(3):
        client.ask(EXECUTE, INSERT)
    for _ in range(2):
        client.ask(QUERY, Statement("select 1"))
    status = control.status()
    foreground = status.lanes[1]
    assert foreground.waiting_requests == 5
    assert 5 * 20 < foreground.waiting_bytes < 5 * 200
    assert foreground.oldest_wait_ms > 0
    waits = next(each for each in status.clients if each.name == "waits")
    assert waits.in_flight_requests == 6
    assert waits.in_flight_bytes > foreground.waiting_bytes
    gate.open()
    for _ in range(6):
        client.receive()
    foreground = control.status().lanes[1]
    assert (foreground.waiting_requests, foreground.waiting_bytes, foreground.oldest_wait_ms) == (0, 0, 0)


def test_whoever_owns_the_writer_is_named(worker: RunningWorker) -> None:
    owner, control = worker.connect(name="the owner"), worker.connect()
    number = owner.call(BEGIN, Begin(60_000))
    writer = control.status().writer
    assert writer.lease_owner == "the owner"
    assert 0 < writer.lease_left_ms <= 60_000
    owner.call(EXECUTE, Statement("create table t(a)"), transaction=number)
    owner.close()
    until(control, lambda status: status.writer.lease_owner == "" and status.writer.lease_left_ms == 0)
    assert control.query("select count(*) from sqlite_schema where name = 't'").scalar() == 0


def test_a_full_disk_is_told_and_refuses_writes(start_worker: StartWorker) -> None:
    """The reserve is set so high that no disk has it."""
    worker = start_worker(disk_reserve_bytes_max=2**62, disk_reserve_percent=100, disk_check_ms=1)
    client = worker.connect()
    with pytest.raises(StorageFullError) as caught:
        client.execute("create table t(a)")
    assert caught.value.outcome == "not_committed"
    assert caught.value.retryable
    health = client.call(HEALTH, Nothing())
    assert health.state == "degraded"
    assert any("writes are refused" in reason for reason in health.reasons)
    assert client.query("select 1").scalar() == 1
    status = client.status()
    assert status.errors == {"storage_full": 1}
    assert status.process.disk_free_bytes < status.process.disk_reserve_bytes


def test_it_travels_as_json(worker: RunningWorker) -> None:
    client = worker.connect()
    client.execute("create table t(a)")
    plain = json.loads(json.dumps(as_builtins(client.status())))
    assert plain["writer"]["groups"] == 1
    assert plain["limits"]["reader_threads"] == 2
    assert plain["health"] == {"state": "healthy", "reasons": []}


def test_a_status_that_is_too_large_for_its_request_is_a_typed_error(worker: RunningWorker) -> None:
    client = worker.connect()
    for _ in range(2):
        answer = client.answer(client.ask("worker.status", [], result_bytes=100))
        assert isinstance(answer, Failure)
        assert isinstance(error_of(answer), StorageError)
    assert client.status().errors == {"storage_result_too_large": 2}


def test_every_operation_s_refusals_are_counted_for_client_and_worker(
    start_worker: StartWorker, gate: Gate
) -> None:
    worker = start_worker(stores=[STORE], client_requests_max=4, pipeline_window=4)
    client, control = worker.connect(name="many"), worker.connect()
    client.ask(write.name, [gate.path])
    gate.wait()
    for _ in range(10):
        client.ask(QUERY, Statement("select 1"))
    for _ in range(7):
        answer = client.receive()
        assert isinstance(answer, Failure)
        assert isinstance(error_of(answer), OverloadedError)
    status = control.status()
    assert status.lanes[1].refused_requests == 7
    assert next(each.refused_requests for each in status.clients if each.name == "many") == 7
    assert status.errors == {"storage_overloaded": 7}
    gate.open()


def test_a_lock_held_by_others_is_told(worker: RunningWorker) -> None:
    client, control = worker.connect(), worker.connect()
    client.execute("create table t(a)")
    with closing(sqlite3.connect(worker.path, isolation_level=None)) as foreign:
        foreign.execute("begin immediate")
        waiting = client.ask(EXECUTE, INSERT)
        status = until(control, lambda status: status.health.state == "degraded")
        assert status.health.reasons == ["another process holds SQLite's lock"]
        assert status.writer.busy_retries > 0
    client.answer(waiting)
    assert control.call(HEALTH, Nothing()).state == "healthy"


def test_the_descriptor_limit_is_raised_for_its_connections(start_worker: StartWorker) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        worker = start_worker(connections_max=500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert worker.connect().status().process.descriptors_max >= 500
