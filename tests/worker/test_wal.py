"""The WAL stays small beside readers that overlap, says who pins it, and recovers by itself. In bytes, not in time."""

import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from storage_worker.checkpoints import Checkpoints
from storage_worker.database.connection import Database
from storage_worker.database.opening import open_reader
from storage_worker.protocol.envelope import Failure, Reply, error_of
from storage_worker.protocol.errors import OperationFailedError, OverloadedError, StorageError
from storage_worker.protocol.limits import KIB, MIB
from storage_worker.protocol.statements import BEGIN, COMMIT, EXECUTE, Begin, Nothing, Statement
from storage_worker.readers import Readers
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.gates import STORE, Gate, read_around
from tests.worker.hostile import until
from tests.worker.raw import RawClient
from tests.worker.workbench import Workbench

FRAME_BYTES = 4096 + 24

LARGE = Statement("insert into t values(zeroblob(?))", [200 * KIB])

SLOW_READ = "with recursive c(n) as (select 1 union all select n + 1 from c limit 20000) select max(n), count(*) from c, t where n = 1"

SMALL_WAL = {
    "wal_checkpoint_bytes": 256 * KIB,
    "wal_degraded_bytes": MIB,
    "wal_refuse_bytes": 3 * MIB,
    "disk_check_ms": 1,
}


def wal_bytes(worker: RunningWorker) -> int:
    return Path(f"{worker.path}-wal").stat().st_size


@contextmanager
def outside_reader(path: Path) -> Iterator[None]:
    """A read transaction of a process that is none of the worker's."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("begin")
        connection.execute("select count(*) from t").fetchall()
        yield


def write_until_refused(client: RawClient) -> OverloadedError:
    for _ in range(200):
        answer = client.answer(client.ask(EXECUTE, LARGE))
        if isinstance(answer, Failure):
            error = error_of(answer)
            assert isinstance(error, OverloadedError)
            return error
    pytest.fail("nothing was refused")


def write_until_served(client: RawClient) -> None:
    while isinstance(client.answer(client.ask(EXECUTE, LARGE)), Failure):
        pass


def test_readers_that_overlap_do_not_let_it_grow(start_worker: StartWorker) -> None:
    worker = start_worker(durability="normal")
    client = worker.connect()
    client.execute("create table t(a)")
    stop = threading.Event()

    def read() -> None:
        with RawClient(worker.address) as reader:
            while not stop.is_set():
                reader.query(SLOW_READ)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    largest = 0
    try:
        # More than the bound is written.
        for _ in range(80 * MIB // (200 * KIB)):
            client.execute(LARGE.sql, *LARGE.parameters)
            largest = max(largest, wal_bytes(worker))
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    status = client.status()
    assert largest < 64 * MIB
    assert status.readers.holds > 0
    assert status.readers.longest_hold_ms > 0
    assert status.wal.restarts > 0
    assert status.wal.checkpoints > status.wal.restarts
    assert status.health.state == "healthy"
    assert status.readers.pooled_reads > 20


def test_without_readers_routine_checkpoints_are_enough(start_worker: StartWorker) -> None:
    worker = start_worker(durability="normal")
    client = worker.connect()
    client.execute("create table t(a)")
    for _ in range(150):
        client.execute(LARGE.sql, *LARGE.parameters)
        assert wal_bytes(worker) < 8 * MIB
    status = client.status()
    assert status.readers.holds == 0
    assert status.wal.restarts >= 3


def test_an_outside_reader_is_named_and_writes_come_back_by_themselves(start_worker: StartWorker) -> None:
    worker = start_worker(durability="normal", **SMALL_WAL)
    client = worker.connect()
    client.execute("create table t(a)")
    with outside_reader(worker.path):
        error = write_until_refused(client)
        assert error.details["bound"] == "wal"
        assert error.details["wal_bytes"] == client.status().wal.live_frames * FRAME_BYTES > 3 * MIB
        assert error.retry_after
        assert "a process outside of the worker" in str(error)
        # Reads are served, and control; a client that asks is told why.
        rows = client.query("select count(*) from t").scalar()
        status = client.status()
        assert status.health.state == "degraded"
        assert any("a process outside of the worker pins it" in reason for reason in status.health.reasons)
        assert any(reason.startswith("writes are refused") for reason in status.health.reasons)
        assert status.wal.pinned_by == "a process outside of the worker"
        assert next(each.refused_requests for each in status.clients) == 1
        # It stays so while the reader stays.
        with pytest.raises(OverloadedError):
            client.execute(LARGE.sql, *LARGE.parameters)
        assert wal_bytes(worker) < 5 * MIB
    write_until_served(client)
    status = client.status()
    assert status.health.state == "healthy"
    assert status.wal.pinned_by == ""
    assert status.wal.live_frames * FRAME_BYTES < MIB
    assert client.query("select count(*) from t").scalar() == rows + 1


def test_a_read_of_the_worker_is_named_too(start_worker: StartWorker, gate: Gate) -> None:
    worker = start_worker(stores=[STORE], durability="normal", **SMALL_WAL)
    client, reader = worker.connect(), worker.connect(name="the slow one")
    client.execute("create table t(a)")
    standing = reader.ask(read_around.name, ["select count(*) from t", gate.path])
    gate.wait()
    error = write_until_refused(client)
    status = client.status()
    assert status.wal.pinned_by.startswith("gated.read_around of client 'the slow one' (pid ")
    assert status.wal.pinned_by in str(error)
    assert any(status.wal.pinned_by in reason for reason in status.health.reasons)
    assert status.readers.oldest_running_ms > 0
    gate.open()
    assert isinstance(reader.answer(standing), Reply)
    write_until_served(client)
    assert client.status().health.state == "healthy"


def test_writes_come_back_beside_readers_that_overlap(start_worker: StartWorker) -> None:
    """What pins the WAL is gone, but there is never a moment without a read."""
    worker = start_worker(durability="normal", wal_idle_ms=20, wal_live_frames_max=100, **SMALL_WAL)
    client = worker.connect()
    client.execute("create table t(a)")
    with outside_reader(worker.path):
        write_until_refused(client)
        holds = client.status().readers.holds
    stop = threading.Event()

    def read() -> None:
        with RawClient(worker.address) as reader:
            while not stop.is_set():
                reader.query(SLOW_READ)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for thread in readers:
        thread.start()
    try:
        write_until_served(client)
        assert client.status().readers.holds > holds
    finally:
        stop.set()
        for thread in readers:
            thread.join()


def test_it_is_truncated_when_idle(start_worker: StartWorker) -> None:
    worker = start_worker(wal_idle_ms=20, disk_check_ms=1)
    client = worker.connect()
    client.execute("create table t(a)")
    client.execute(LARGE.sql, *LARGE.parameters)
    until(client, lambda status: status.wal.truncations >= 1 and status.wal.wal_bytes == 0)
    assert wal_bytes(worker) == 0
    status = client.status()
    assert status.wal.live_frames == 0
    assert status.wal.database_bytes > 200 * KIB
    assert status.wal.last_checkpoint_ago_ms is not None
    # Where a reader is in it at that time, later.
    with outside_reader(worker.path):
        client.execute(LARGE.sql, *LARGE.parameters)
        checkpoints = client.status().wal.checkpoints
        until(client, lambda status: status.wal.checkpoints > checkpoints + 2)
        assert wal_bytes(worker) > 0
    until(client, lambda status: status.wal.wal_bytes == 0)


def test_a_wal_that_a_killed_worker_left_is_emptied(start_worker: StartWorker) -> None:
    worker = start_worker(wal_idle_ms=60_000)
    with RawClient(worker.address) as client:
        client.execute("create table t(a)")
        client.execute(LARGE.sql, *LARGE.parameters)
    worker.child.send_signal(signal.SIGKILL)
    assert worker.child.wait(30) == -signal.SIGKILL
    assert wal_bytes(worker) > 200 * KIB
    again = start_worker(wal_idle_ms=20, disk_check_ms=1)
    until(again.connect(), lambda status: status.wal.truncations == 1 and status.wal.wal_bytes == 0)
    assert again.connect().query("select count(*) from t").scalar() == 1


def test_interactive_transactions_are_checkpointed_like_others(start_worker: StartWorker) -> None:
    worker = start_worker(durability="normal", wal_idle_ms=60_000)
    client = worker.connect()
    client.execute("create table t(a)")
    for _ in range(60):
        number = client.call(BEGIN, Begin())
        client.call(EXECUTE, LARGE, transaction=number)
        client.call(COMMIT, Nothing(), transaction=number)
        assert wal_bytes(worker) < 8 * MIB
    assert client.status().wal.checkpoints >= 2


# Alone


class Governed:
    """Checkpoints on a real writer, without a worker."""

    def __init__(self, path: Path, **limits: int) -> None:
        changes: dict[str, Any] = dict(limits)
        self.bench = Workbench(path, **changes)
        of = self.bench.limits
        self.readers = Readers(self.bench.lane, lambda: open_reader(str(path), of), of, lambda _: None)
        self.checkpoints = Checkpoints(self.bench.writer, self.readers, of)

    def write(self) -> bool:
        """Insert a large row; whether a checkpoint is due then."""
        self.bench.execute("create table if not exists t(a)")
        self.bench.execute("insert into t values(zeroblob(204800))")
        self.bench.run_all()
        return self.checkpoints.note_commit()

    def close(self) -> None:
        self.readers.stop(2**62)
        self.bench.writer.database.close()


@pytest.fixture
def governed(database: Path) -> Iterator[Governed]:
    with closing(Governed(database, wal_checkpoint_bytes=256 * KIB, wal_live_frames_max=100)) as governed:
        yield governed


def test_a_failed_checkpoint_ends_nothing(governed: Governed, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> tuple[int, int]:
        raise OperationFailedError("no room", details={"sqlite_code": 13})

    monkeypatch.setattr(Database, "checkpoint", full)
    while not governed.write():
        pass
    governed.checkpoints.run()
    governed.checkpoints.truncate()
    assert governed.checkpoints.idle_ns() > 0
    assert governed.checkpoints.status.checkpoints == 0
    monkeypatch.undo()
    while not governed.write():
        pass
    governed.checkpoints.run()
    assert governed.checkpoints.status.checkpoints > 0
    governed.checkpoints.truncate()
    assert (governed.checkpoints.status.live_frames, governed.checkpoints.idle_ns()) == (0, 0)


def test_a_wal_that_cannot_be_started_over_ends_nothing(
    governed: Governed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise StorageError("no room")

    monkeypatch.setattr(governed.bench.writer, "touch", fails)
    while governed.checkpoints.status.live_frames < 200:
        governed.write()
    governed.checkpoints.run()
    assert governed.readers.status.holds == 1
    # The readers are let go again whatever happened.
    assert governed.readers._free.is_set()


def test_a_hold_restarts_the_wal(governed: Governed) -> None:
    while governed.checkpoints.status.live_frames < 200:
        governed.write()
    governed.checkpoints.run()
    assert governed.checkpoints.status.live_frames < 10
    assert governed.checkpoints.status.restarts == 1


def test_reads_are_not_held_again_for_one_that_outlasted_a_hold(governed: Governed) -> None:
    job = governed.bench.query("select 1")
    governed.bench.lane.remove(job)
    watch = governed.readers.watches[-1]
    watch.start(job, 1, 0)
    reader = governed.readers._pool[-1]
    reader.is_busy = True
    for expected in (1, 1, 1):
        before = governed.checkpoints.status.live_frames
        while governed.checkpoints.status.live_frames < before + 200:
            governed.write()
        governed.checkpoints.run()
        assert governed.readers.status.holds == expected
    watch.job, reader.is_busy = None, False
    governed.checkpoints._next_hold_frames = 0
    governed.checkpoints.run()
    assert governed.readers.status.holds == 2


def test_it_looks_at_no_connection_when_asked_from_another_thread(governed: Governed) -> None:
    """Status and refusals are given by whoever serves the pipes, while the writer's connection is at work."""
    governed.write()
    governed.bench.writer.database.begin()
    found: list[object] = []

    def look() -> None:
        governed.checkpoints.look(2**62)
        found.append((governed.checkpoints.degraded(), governed.checkpoints.pinned_by()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [("", "")]
    assert governed.checkpoints.status.wal_bytes > 200 * KIB
    governed.bench.writer.database.rollback()
