"""A worker's end: by a stop, a signal, its owner's or its last client's end, a handler that hangs; and its rest."""

import json
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage_worker import exits
from storage_worker.address import socket_path
from storage_worker.ownership import is_owned, read_record
from storage_worker.processes import pidfd_of
from storage_worker.protocol.envelope import Failure, Goodbye, OutgoingRequest, Reply, encode, error_of
from storage_worker.protocol.errors import NotPermittedError, StorageError, WorkerUnavailableError
from storage_worker.protocol.framing import frame
from storage_worker.protocol.limits import KIB
from storage_worker.protocol.statements import (
    BEGIN,
    EXECUTE,
    HEARTBEAT,
    QUERY,
    STOP,
    Begin,
    Nothing,
    Statement,
)
from storage_worker.spawn import module_path
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.gates import (
    STORE,
    Gate,
    hang_after_commit,
    insert_then_stand,
    lower_descriptors,
    read,
    read_quickly,
    spin,
    write,
)
from tests.worker.hostile import ENDLESS, ENDLESS_WRITE, LEDGER, until
from tests.worker.raw import PATIENCE_S, RawClient

INSERT = Statement("insert into t values(1)")


def failure(client: RawClient, request_id: int) -> StorageError:
    answer = client.answer(request_id)
    assert isinstance(answer, Failure), answer
    return error_of(answer)


def ended(worker: RunningWorker) -> int:
    """Its exit status; of a worker that ended properly nothing is left but the database."""
    status = worker.child.wait(PATIENCE_S)
    assert status is not None, "the worker goes on"
    return status


def is_tidy(worker: RunningWorker) -> None:
    assert not Path(socket_path(worker.address)).exists()
    assert not is_owned(str(worker.path))
    assert read_record(str(worker.path)) is None
    wal = Path(f"{worker.path}-wal")
    assert not wal.exists() or wal.stat().st_size == 0


def rest_of(client: RawClient) -> list[Any]:
    """What still comes until the connection's end."""
    found: list[Any] = []
    try:
        while True:
            found.append(client.receive())
    except (EOFError, ConnectionResetError):
        return found


@pytest.fixture
def gated(start_worker: StartWorker) -> RunningWorker:
    worker = start_worker(stores=[STORE])
    with RawClient(worker.address) as client:
        client.execute("create table t(a)")
        client.execute(LEDGER)
    return worker


# Stopping


def send_stop(worker: RunningWorker) -> int:
    with RawClient(worker.address, role="admin") as admin:
        assert isinstance(admin.answer(admin.ask(STOP, Nothing())), Reply)
    return exits.STOPPED


def send_sigterm(worker: RunningWorker) -> int:
    worker.child.send_signal(signal.SIGTERM)
    return 0


ENDS = {"stop": send_stop, "SIGTERM": send_sigterm}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_was_admitted_is_finished_and_nothing_new_is_taken(
    gated: RunningWorker, gate: Gate, end: Any
) -> None:
    holder, client, late = gated.connect(), gated.connect(), gated.connect()
    holder.ask(write.name, [gate.path])
    gate.wait()
    admitted = [client.ask(EXECUTE, INSERT) for _ in range(10)]
    until(late, lambda status: status.lanes[1].waiting_requests == 10)
    status = end(gated)
    # Each client is told, and what it sends now is refused.
    goodbye = late.receive()
    assert isinstance(goodbye, Goodbye)
    assert goodbye.reason
    error = failure(late, late.ask(EXECUTE, INSERT))
    assert isinstance(error, WorkerUnavailableError)
    assert error.outcome == "not_committed"
    assert isinstance(failure(late, late.ask(QUERY, Statement("select 1"))), WorkerUnavailableError)
    assert late.status().health.state == "draining"
    late.call(HEARTBEAT, Nothing())
    with RawClient(gated.address, greet=False) as another:
        refused = rest_of(another)
        assert [type(each) for each in refused] == [Failure]
        assert isinstance(error_of(refused[0]), WorkerUnavailableError)
    gate.open()
    assert isinstance(client.receive(), Goodbye)
    for request_id in admitted:
        answer = client.receive()
        assert isinstance(answer, Reply)
        assert answer.id == request_id
    assert rest_of(client) == []
    assert ended(gated) == status
    is_tidy(gated)


def test_an_idle_worker_stops_at_once(gated: RunningWorker) -> None:
    client = gated.connect()
    send_sigterm(gated)
    assert [type(each) for each in rest_of(client)] == [Goodbye]
    assert ended(gated) == 0
    is_tidy(gated)


def test_only_administrators_stop_it(gated: RunningWorker) -> None:
    client = gated.connect()
    assert isinstance(failure(client, client.ask(STOP, Nothing())), NotPermittedError)
    client.execute("insert into t values(1)")


def test_an_interrupt_from_the_terminal_is_the_hosts_affair(gated: RunningWorker) -> None:
    client = gated.connect()
    for _ in range(3):
        gated.child.send_signal(signal.SIGINT)
        client.execute("insert into t values(1)")
    assert client.status().health.state == "healthy"


def test_replies_that_were_not_read_yet_are_delivered_first(start_worker: StartWorker) -> None:
    worker = start_worker()
    client, control = worker.connect(name="slow"), worker.connect()
    for _ in range(20):
        client.ask(QUERY, Statement(f"select zeroblob({500 * KIB})"))
    until(control, lambda status: next(e for e in status.clients if e.name == "slow").in_flight_requests == 0)
    send_sigterm(worker)
    replies = [each for each in rest_of(client) if isinstance(each, Reply)]
    assert len(replies) == 20
    assert ended(worker) == 0


def test_what_it_has_not_read_by_its_end_is_refused(start_worker: StartWorker) -> None:
    """More than one read of requests lies in a client's pipe when the worker has nothing left to do."""
    worker = start_worker()
    client = worker.connect()
    with RawClient(worker.address, role="admin") as admin:
        worker.child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.record.pid, os.WSTOPPED)
        admin.ask(STOP, Nothing())
        requests = [
            OutgoingRequest(number, EXECUTE.name, 0, 0, None, 0, 0, Statement("select 1", ["x" * KIB]))
            for number in range(1, 121)
        ]
        client.send_bytes(b"".join(frame(encode(request)) for request in requests))
        worker.child.send_signal(signal.SIGCONT)
        answers = [envelope for envelope in rest_of(client) if not isinstance(envelope, Goodbye)]
    assert [answer.id for answer in answers] == [request.id for request in requests]
    for answer in answers:
        assert isinstance(answer, Failure)
        assert isinstance(error_of(answer), WorkerUnavailableError)
        assert answer.outcome == "not_committed"
    assert ended(worker) == exits.STOPPED
    is_tidy(worker)


def test_an_open_interactive_transaction_is_rolled_back_for_those_who_wait(gated: RunningWorker) -> None:
    owner, other = gated.connect(), gated.connect()
    number = owner.call(BEGIN, Begin(60_000))
    owner.call(EXECUTE, INSERT, transaction=number)
    waiting = other.ask(EXECUTE, Statement("insert into t values('other')"))
    until(gated.connect(), lambda status: status.lanes[1].waiting_requests == 1)
    send_sigterm(gated)
    assert isinstance(other.answer(waiting), Reply)
    assert rest_of(other) == []
    assert ended(gated) == 0
    is_tidy(gated)


SLOW_ENDS = {
    "a statement": (ENDLESS_WRITE, EXECUTE),
    "a read": (ENDLESS, QUERY),
}


@pytest.mark.parametrize(("sql", "operation"), SLOW_ENDS.values(), ids=SLOW_ENDS)
def test_after_the_grace_the_rest_fails_typed(start_worker: StartWorker, sql: str, operation: Any) -> None:
    worker = start_worker(stop_grace_ms=50)
    client, other, control = worker.connect(name="endless"), worker.connect(), worker.connect()
    client.execute(LEDGER)
    endless = client.ask(operation, Statement(sql))
    until(
        control,
        lambda status: status.lanes[1].admitted_requests == 2 and not status.lanes[1].waiting_requests,
    )
    send_sigterm(worker)
    error = failure(client, endless)
    assert isinstance(error, WorkerUnavailableError)
    assert error.outcome == "not_committed"
    assert error.retryable
    other.close()
    assert ended(worker) == 0
    is_tidy(worker)


def test_whoever_waits_for_a_foreign_lock_is_told_at_the_end(start_worker: StartWorker) -> None:
    worker = start_worker(stop_grace_ms=50)
    client, control = worker.connect(), worker.connect()
    client.execute("create table t(a)")
    with closing(sqlite3.connect(worker.path, isolation_level=None)) as foreign:
        foreign.execute("begin immediate")
        waiting = client.ask(EXECUTE, INSERT)
        until(control, lambda status: status.writer.busy_retries > 1)
        send_sigterm(worker)
        error = failure(client, waiting)
        assert isinstance(error, WorkerUnavailableError)
        assert error.outcome == "not_committed"
        assert ended(worker) == 0
        assert not is_owned(str(worker.path))


def test_a_handler_that_outlasts_the_grace_is_left_behind(start_worker: StartWorker, gate: Gate) -> None:
    """Nothing can end it but the end of the process; what waited is told that nothing of it was committed."""
    worker = start_worker(stores=[STORE], stop_grace_ms=50)
    holder, client = worker.connect(), worker.connect()
    client.execute("create table t(a)")
    stands = holder.ask(insert_then_stand.name, ["insert into t values(1)", gate.path])
    gate.wait()
    waiting = client.ask(EXECUTE, INSERT)
    until(worker.connect(), lambda status: status.lanes[1].waiting_requests == 1)
    send_sigterm(worker)
    error = failure(client, waiting)
    assert isinstance(error, WorkerUnavailableError)
    assert error.outcome == "not_committed"
    error = failure(holder, stands)
    assert isinstance(error, WorkerUnavailableError)
    assert error.outcome == "unknown"
    assert ended(worker) == exits.HUNG
    assert "gated.insert_then_stand" in worker.log()
    assert not Path(socket_path(worker.address)).exists()
    again = start_worker(stores=[STORE])
    assert again.connect().query("select count(*) from t").scalar() == 0


def test_a_read_handler_that_outlasts_the_grace_is_left_behind(start_worker: StartWorker, gate: Gate) -> None:
    worker = start_worker(stores=[STORE], stop_grace_ms=50)
    client = worker.connect()
    stands = client.ask(read.name, [gate.path])
    gate.wait()
    send_sigterm(worker)
    assert isinstance(failure(client, stands), WorkerUnavailableError)
    assert ended(worker) == 0
    assert not is_owned(str(worker.path))


def test_it_can_be_ended_while_it_starts(
    start_worker: StartWorker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SW_TEST_GATE", gate.path)
    found: list[Exception] = []

    def start() -> None:
        try:
            start_worker(stores=["tests.worker.slow_start:slow"])
        except StorageError as error:
            found.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    gate.wait()
    for child in psutil.Process().children():
        if "storage_worker.worker" in child.cmdline():
            child.send_signal(signal.SIGTERM)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert isinstance(found[0], WorkerUnavailableError)
    assert "SIGTERM" in str(found[0])


# The owner


HOST = """
import json, os, signal, sys, time
from pathlib import Path
from tests.worker.conftest import startup_for
from storage_worker.spawn import spawn
child = spawn(startup_for(Path(sys.argv[1]), **json.loads(sys.argv[2])))
record = child.answer(time.monotonic_ns() + 30_000_000_000)
if os.fork() == 0:
    # It holds whatever its parent had open.
    print(os.getpid(), record.pid, record.address, flush=True)
    while True:
        signal.pause()
while True:
    signal.pause()
"""


class Host:
    """A process that owns a worker, and has a child that outlives it."""

    def __init__(self, path: Path, store: str = STORE, **limits: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(path), json.dumps({"stores": [store], **limits})],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(module_path())},
        )
        assert self.process.stdout is not None
        child, worker, self.address = self.process.stdout.readline().split()
        self.child, self.worker = psutil.Process(int(child)), psutil.Process(int(worker))
        self._worker_end = pidfd_of(int(worker))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        for process in (self.child, self.worker):
            if process.is_running():
                process.kill()
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self._worker_end is not None:
            os.close(self._worker_end)

    def worker_ends(self) -> bool:
        """Whether the worker ends; nobody here waits for it as for a child."""
        if self._worker_end is None:
            return bool(psutil.wait_procs([self.worker], timeout=PATIENCE_S)[0])
        return bool(select.select([self._worker_end], [], [], PATIENCE_S)[0])


@pytest.fixture
def host(database: Path) -> Any:
    host = Host(database)
    yield host
    host.close()


@pytest.fixture
def patient_host(database: Path) -> Any:
    """Its worker may take longer than any test for what is in flight when the host ends."""
    host = Host(database, orphan_grace_ms=int(PATIENCE_S * 10_000))
    yield host
    host.close()


def test_its_end_is_seen_without_process_descriptors_too(database: Path) -> None:
    host = Host(database, "tests.worker.no_pidfd:plain")
    try:
        with RawClient(host.address) as client:
            client.execute("create table t(a)")
            host.kill()
            assert any(isinstance(each, Goodbye) for each in rest_of(client))
        assert host.worker_ends()
    finally:
        host.close()


def test_a_killed_hosts_worker_ends_although_a_child_of_the_host_lives(host: Host, database: Path) -> None:
    client = RawClient(host.address)
    client.execute("create table t(a)")
    host.kill()
    assert host.worker_ends()
    assert host.child.is_running()
    assert any(isinstance(each, Goodbye) for each in rest_of(client))
    client.close()
    assert not is_owned(str(database))
    assert not Path(socket_path(host.address)).exists()


@pytest.mark.parametrize("connections", [0, 3])
def test_with_nothing_in_flight_it_ends_without_its_grace(patient_host: Host, connections: int) -> None:
    clients = [RawClient(patient_host.address) for _ in range(connections)]
    for client in clients:
        client.execute("create table if not exists t(a)")
    patient_host.kill()
    assert patient_host.worker_ends()
    for client in clients:
        assert any(isinstance(each, Goodbye) for each in rest_of(client))
        client.close()


def test_what_is_in_flight_is_finished_first(patient_host: Host, gate: Gate) -> None:
    with RawClient(patient_host.address) as client:
        client.ask(write.name, [gate.path])
        gate.wait()
        patient_host.kill()
        # It knows already that it is to end.
        assert isinstance(client.receive(), Goodbye)
        gate.open()
        assert isinstance(client.receive(), Reply)
    assert patient_host.worker_ends()


@pytest.mark.parametrize("operation", [write, read, spin])
def test_it_ends_although_a_handler_does_not_return(
    host: Host, gate: Gate, database: Path, operation: Any
) -> None:
    with RawClient(host.address) as client, RawClient(host.address, name="control") as control:
        client.ask(operation.name, [] if operation is spin else [gate.path])
        until(
            control, lambda status: status.lanes[1].admitted_requests and not status.lanes[1].waiting_requests
        )
        host.kill()
        assert host.worker_ends()
    assert not is_owned(str(database))


# A shared worker


def test_a_shared_worker_ends_after_its_last_client(start_worker: StartWorker) -> None:
    worker = start_worker(owner_pid=None, owner_started=None, shared_idle_ms=300)
    first, second = worker.connect(), worker.connect()
    first.execute("create table t(a)")
    assert first.status().shared
    first.close()
    # It waits for as long as there is one: longer than its idle time.
    assert worker.child.wait(0.6) is None
    second.execute("insert into t values(1)")
    second.close()
    assert ended(worker) == 0
    is_tidy(worker)


def test_a_shared_worker_that_nobody_calls_ends_too(start_worker: StartWorker) -> None:
    worker = start_worker(owner_pid=None, owner_started=None, shared_idle_ms=50)
    assert ended(worker) == 0
    is_tidy(worker)


def test_a_client_that_comes_back_in_time_finds_it(start_worker: StartWorker) -> None:
    worker = start_worker(owner_pid=None, owner_started=None, shared_idle_ms=5_000)
    for _ in range(5):
        with RawClient(worker.address) as client:
            assert client.query("select 1").scalar() == 1
    assert worker.child.wait(0) is None


# Handlers that hang


HANGS = {
    "a write that waits": (write, True),
    "a write that computes": (spin, False),
    "a read that waits": (read, True),
    "a call after the commit": (hang_after_commit, True),
}


@pytest.mark.parametrize(("operation", "at_gate"), HANGS.values(), ids=HANGS)
def test_a_handler_that_never_returns_ends_the_worker(
    start_worker: StartWorker, gate: Gate, operation: Any, at_gate: bool
) -> None:
    worker = start_worker(stores=[STORE], handler_overrun_ms_max=100)
    client, other = worker.connect(name="guilty"), worker.connect()
    other.execute("create table t(a)")
    client.ask(operation.name, [gate.path] if at_gate else [], seconds=0.05)
    if at_gate:
        gate.wait()
    assert ended(worker) == exits.HUNG
    assert f"{operation.name} of client 'guilty'" in worker.log()
    # Everybody is told at once.
    (goodbye,) = rest_of(other)
    assert isinstance(goodbye, Goodbye)
    again = start_worker(stores=[STORE])
    assert again.connect().query("select count(*) from t").scalar() == 0


def test_who_waits_behind_a_hung_handler_hears_that_nothing_was_done(
    start_worker: StartWorker, gate: Gate
) -> None:
    worker = start_worker(stores=[STORE], handler_overrun_ms_max=100)
    client, other = worker.connect(), worker.connect()
    other.execute("create table t(a)")
    # Long enough for the other one to come.
    hung = client.ask(write.name, [gate.path], seconds=2)
    gate.wait()
    error = failure(other, other.ask(EXECUTE, INSERT))
    assert isinstance(error, WorkerUnavailableError)
    assert error.outcome == "not_committed"
    assert failure(client, hung).outcome == "unknown"
    assert ended(worker) == exits.HUNG


def test_a_quick_read_that_never_returns_ends_the_worker(start_worker: StartWorker, gate: Gate) -> None:
    worker = start_worker(stores=[STORE], handler_overrun_ms_max=100)
    client = worker.connect(name="guilty")
    while not client.status().readers.quick_reads:
        client.call(read_quickly, [""])
    client.ask(read_quickly.name, [gate.path], seconds=0.05)
    gate.wait()
    assert ended(worker) == exits.HUNG


def test_long_statements_are_ended_by_their_deadlines_and_hang_nobody(start_worker: StartWorker) -> None:
    worker = start_worker(handler_overrun_ms_max=1)
    client = worker.connect()
    client.execute(LEDGER)
    for operation, sql in ((EXECUTE, ENDLESS_WRITE), (QUERY, ENDLESS)):
        error = failure(client, client.ask(operation, Statement(sql), seconds=0.4))
        assert error.code == "storage_deadline"
    assert worker.child.wait(0) is None


# At rest


def cpu_seconds(worker: RunningWorker) -> float:
    times = psutil.Process(worker.record.pid).cpu_times()
    return times.user + times.system


def rest(client: RawClient, seconds: float = 1.5) -> None:
    """Let time pass in which the worker says nothing to a client."""
    assert not select.select([client.socket], [], [], seconds)[0]


def at_rest(_: RunningWorker, __: RawClient) -> None:
    """Nothing at all."""


def with_a_transaction(worker: RunningWorker, client: RawClient) -> None:
    """A write waits behind it, and the time at which the WAL would be truncated passes."""
    client.execute("insert into t values(1)")
    client.call(BEGIN, Begin(60_000))
    worker.connect().ask(EXECUTE, INSERT)


def with_a_backup_behind_a_transaction(worker: RunningWorker, client: RawClient) -> None:
    admin = worker.connect(role="admin")
    admin.execute(
        "insert into t with recursive c(n) as (select 1 union all select n + 1 from c limit 64)"
        " select zeroblob(200000) from c"
    )
    admin.ask("worker.backup", [f"{worker.path}.copy"])
    client.call(BEGIN, Begin(60_000))


RESTS = {
    "nothing": at_rest,
    "an open transaction": with_a_transaction,
    "a transaction before a copy": with_a_backup_behind_a_transaction,
}


@pytest.mark.parametrize("begin", RESTS.values(), ids=RESTS)
def test_it_uses_no_cpu_while_there_is_nothing_to_do(gated: RunningWorker, begin: Any) -> None:
    client = gated.connect()
    begin(gated, client)
    rest(client, 0.7)
    before = cpu_seconds(gated)
    rest(client)
    assert cpu_seconds(gated) - before < 0.3


LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("begin immediate")
print("locked", flush=True)
sys.stdin.read()
"""


def test_it_uses_little_cpu_while_others_hold_the_lock(gated: RunningWorker) -> None:
    client = gated.connect()
    locker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            LOCKER,
            str(gated.path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with locker:
        assert locker.stdout is not None
        assert locker.stdout.readline() == b"locked\n"
        client.ask(EXECUTE, INSERT)
        before = cpu_seconds(gated)
        rest(client)
        assert cpu_seconds(gated) - before < 0.6
        locker.communicate()
    assert isinstance(client.receive(), Reply)


def test_it_uses_no_cpu_while_it_drains(start_worker: StartWorker, gate: Gate) -> None:
    """A shared worker, of which every client has left while one's handler goes on."""
    worker = start_worker(
        stores=[STORE], owner_pid=None, owner_started=None, shared_idle_ms=10, stop_grace_ms=20_000
    )
    client = worker.connect()
    client.ask(read.name, [gate.path])
    gate.wait()
    client.close()
    before = cpu_seconds(worker)
    assert worker.child.wait(1.5) is None
    assert cpu_seconds(worker) - before < 0.4
    gate.open()
    assert ended(worker) == 0


def test_hundreds_of_idle_connections(gated: RunningWorker) -> None:
    control = gated.connect(name="control")
    before = control.status().process
    clients = [RawClient(gated.address, name=f"idle {number}") for number in range(350)]
    try:
        status = control.status()
        assert len(status.clients) == 351
        assert status.process.threads == before.threads
        assert status.process.descriptors == before.descriptors + 350
        assert status.process.resident_bytes - before.resident_bytes < 350 * 64 * KIB
        for client in clients[::50]:
            client.execute("insert into t values(1)")
        assert control.query("select count(*) from t").scalar() == 7
    finally:
        for client in clients:
            client.close()
    status = until(control, lambda status: len(status.clients) == 1)
    assert status.process.descriptors == before.descriptors


def test_descriptors_and_threads_stay_flat_over_thousands_of_connections(gated: RunningWorker) -> None:
    control = gated.connect()
    control.query("select 1")
    before = control.status().process

    def connect() -> None:
        for number in range(500):
            with RawClient(gated.address) as client:
                if number % 3 == 0:
                    client.query("select 1")
                elif number % 3 == 1:
                    # It goes without waiting for its answers.
                    client.ask(QUERY, Statement("select 1"))
                    client.ask(EXECUTE, INSERT)

    threads = [threading.Thread(target=connect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = until(control, lambda status: len(status.clients) == 1 and not status.lanes[1].waiting_requests)
    assert status.process.descriptors == before.descriptors
    assert status.process.threads == before.threads
    assert status.process.resident_bytes - before.resident_bytes < 8 * 1024 * KIB
    assert status.health.state == "healthy"


def test_without_descriptors_it_serves_those_who_are_there(gated: RunningWorker) -> None:
    client = gated.connect()
    client.call(lower_descriptors, [])
    with socket.socket(socket.AF_UNIX) as waits:
        waits.connect(socket_path(gated.address))
        before = cpu_seconds(gated)
        rest(client, 0.7)
        client.execute("insert into t values(1)")
        assert cpu_seconds(gated) - before < 0.3
    assert client.query("select count(*) from t").scalar() == 1
