"""Reads: at once where they proved quick, in the pool where not; what they see; and threads that outlive anything."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage_worker.admission import Lane
from storage_worker.database.opening import open_reader, open_writer
from storage_worker.execution import Served
from storage_worker.peer import Job
from storage_worker.protocol.envelope import Cancel, Failure, Reply, error_of
from storage_worker.protocol.errors import (
    InvalidRequestError,
    OperationFailedError,
    RequestCancelledError,
    ResultTooLargeError,
    StorageError,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import EXECUTE, QUERY, Nothing, Statement
from storage_worker.protocol.status import ReaderStatus
from storage_worker.readers import Reader, Readers
from tests.worker.conftest import RunningWorker
from tests.worker.gates import (
    RAISES,
    Gate,
    read_and_raise,
    read_around,
    read_badly,
    read_quickly,
    write,
)
from tests.worker.hostile import ENDLESS, until
from tests.worker.raw import RawClient
from tests.worker.workbench import OneClient

INSERT = Statement("insert into t values(1)")
COUNT = Statement("select count(*) from t")

STEPS = "with recursive c(n) as (select 1 union all select n + 1 from c limit (select n from knob)) select max(n) from c"
"""Quick or not, as the table says; it can be ended."""

ONE_STEP = "select instr(replace(hex(zeroblob(n)), '00', 'a'), replace(hex(zeroblob(n / 2)), '00', 'a') || 'b') from knob"
"""The same as a single step, which nothing ends."""


@pytest.fixture
def worker(standing_gated_worker: RunningWorker) -> Iterator[RunningWorker]:
    """A worker that other tests used before, with fresh tables."""
    worker = standing_gated_worker
    with RawClient(worker.address) as client:
        for sql in ("create table t(a)", "create table knob(n)", "insert into knob values(10)"):
            client.execute(sql)
        yield worker
        worker.leave()
        for sql in ("drop table t", "drop table knob"):
            client.execute(sql)
        until(client, lambda status: len(status.clients) == 1 and not status.readers.running_requests)


def figures(client: RawClient) -> ReaderStatus:
    return client.status().readers


def test_a_read_that_proved_quick_runs_at_once(worker: RunningWorker) -> None:
    client = worker.connect()
    sql = f"{STEPS} -- never asked before"
    before = figures(client)
    client.query(sql)
    after = figures(client)
    assert (after.pooled_reads - before.pooled_reads, after.quick_reads - before.quick_reads) == (1, 0)
    while figures(client).quick_reads < before.quick_reads + 5:
        client.query(sql)
    assert figures(client).pooled_reads < before.pooled_reads + 100


def make_quick(client: RawClient, ask: Callable[[], Any]) -> None:
    before = figures(client).quick_reads
    while figures(client).quick_reads == before:
        ask()


def test_a_quick_read_that_has_become_slow_goes_to_the_pool(worker: RunningWorker) -> None:
    client, writer = worker.connect(), worker.connect()
    make_quick(client, lambda: client.query(STEPS))
    writer.execute("update knob set n = 1000000000")
    pooled = figures(client).pooled_reads
    endless = client.ask(QUERY, Statement(STEPS))
    # It runs in the pool now, and holds up no write and no other read.
    until(writer, lambda status: status.readers.running_requests == 1)
    writer.execute("insert into t values(1)")
    assert writer.query("select count(*) from t").scalar() == 1
    assert figures(writer).running_requests == 1
    client.send(Cancel(endless))
    answer = client.answer(endless)
    assert isinstance(answer, Failure)
    assert isinstance(error_of(answer), RequestCancelledError)
    # From now on it begins there.
    writer.execute("update knob set n = 100000")
    before = figures(client)
    client.query(STEPS)
    assert figures(client).pooled_reads > max(before.pooled_reads, pooled)


def test_a_quick_read_that_becomes_one_long_step_beside_writes(worker: RunningWorker) -> None:
    """It cannot be ended on the serving thread; afterwards the waiting writes and reads go on at once."""
    client, writer = worker.connect(), worker.connect()
    make_quick(client, lambda: client.query(ONE_STEP))
    writer.execute("update knob set n = 200000")
    # In one write each, so that the worker finds reads and writes ready together.
    for _ in range(3):
        client.ask(QUERY, Statement(ONE_STEP))
        writes = [writer.ask(EXECUTE, INSERT) for _ in range(3)]
        assert isinstance(client.receive(), Reply)
        for request_id in writes:
            assert isinstance(writer.answer(request_id), Reply)
    assert writer.query("select count(*) from t").scalar() == 9


def test_a_quick_read_handler_that_waits_holds_up_one_round_only(worker: RunningWorker, gate: Gate) -> None:
    client, writer = worker.connect(), worker.connect()
    make_quick(client, lambda: client.call(read_quickly, [""]))
    for _ in range(2):
        standing = client.ask(read_quickly.name, [gate.path])
        gate.wait()
        # Other reads go to the pool meanwhile, and all else is answered.
        assert writer.query("select n from knob").scalar() == 10
        write_id = writer.ask(EXECUTE, INSERT)
        gate.open()
        assert isinstance(client.answer(standing), Reply)
        assert isinstance(writer.answer(write_id), Reply)


def test_a_read_sees_what_was_acknowledged_to_anyone_before(worker: RunningWorker) -> None:
    errors: list[str] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        with RawClient(worker.address) as writer, RawClient(worker.address) as reader:
            start.wait()
            for round_ in range(60):
                writer.execute("insert into t values(?)", number * 1000 + round_)
                # A text of its own goes to the pool, the other one soon runs at once.
                for extra in ("", f" and {round_} = {round_}"):
                    mine = "select max(a) from t where a between ? and ?" + extra
                    found = reader.query(mine, number * 1000, number * 1000 + 999).scalar()
                    if found != number * 1000 + round_:
                        errors.append(f"{number}: {found} after {round_}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    status = figures(worker.connect())
    assert status.quick_reads > 0
    assert status.pooled_reads > 0


def test_a_pipelined_read_sees_its_client_s_writes_before_it(worker: RunningWorker) -> None:
    client = worker.connect()
    expected = {}
    for number in range(120):
        if number % 3:
            client.ask(EXECUTE, INSERT)
        else:
            sql = COUNT.sql + (f" where {number} = {number}" if number % 2 else "")
            expected[client.ask(QUERY, Statement(sql))] = number - number // 3 - (number % 3 > 0)
    answers = {}
    for _ in range(120):
        answer = client.receive()
        assert isinstance(answer, Reply)
        if answer.id in expected:
            answers[answer.id] = QUERY.decode_result(answer.result).scalar()
    assert len(answers) == 40
    for request_id, count in answers.items():
        assert count >= expected[request_id]


def test_a_handler_s_statements_see_one_state(worker: RunningWorker, gate: Gate) -> None:
    reader, writer = worker.connect(), worker.connect()
    standing = reader.ask(read_around.name, [COUNT.sql, gate.path])
    gate.wait()
    writer.execute("insert into t values(1)")
    gate.open()
    answer = reader.answer(standing)
    assert isinstance(answer, Reply)
    assert read_around.decode_result(answer.result) == [0, 0]
    standing = reader.ask(read_around.name, [COUNT.sql, gate.path])
    gate.wait()
    gate.open()
    answer = reader.answer(standing)
    assert isinstance(answer, Reply)
    assert read_around.decode_result(answer.result) == [1, 1]


def test_nothing_is_written_by_a_read(worker: RunningWorker) -> None:
    client = worker.connect()
    for sql in (
        "insert into t values(1)",
        "delete from t",
        "create table u(a)",
        "insert into t values(1) returning a",
    ):
        with pytest.raises(InvalidRequestError):
            client.query(sql)
        with pytest.raises(StorageError):
            client.call(read_around, [sql, ""])
    assert client.query("select count(*) from t").scalar() == 0


@pytest.mark.parametrize("quick", [False, True])
def test_a_result_over_its_limit_ends_the_read(worker: RunningWorker, quick: bool) -> None:
    client = worker.connect()
    sql = "select zeroblob(2000)"
    if quick:
        make_quick(client, lambda: client.query(sql))
    with pytest.raises(ResultTooLargeError):
        client.query(sql, result_bytes=1_000)
    many = "with recursive c(n) as (select 1 union all select n + 1 from c) select n, zeroblob(100) from c"
    with pytest.raises(ResultTooLargeError):
        client.query(many)
    assert len(client.query(sql).rows) == 1


@pytest.mark.parametrize("what", RAISES)
def test_threads_outlive_whatever_a_handler_raises(worker: RunningWorker, what: str) -> None:
    client = worker.connect()
    threads = client.status().process.threads
    for _ in range(3):
        with pytest.raises(OperationFailedError):
            client.call(read_and_raise, [what])
    with pytest.raises(OperationFailedError):
        client.call(read_badly, [])
    # Both threads are still there to serve; and the one that runs quick reads, with its connection.
    endless = [client.ask(QUERY, Statement(ENDLESS)) for _ in range(2)]
    until(client, lambda status: status.readers.running_requests == 2)
    for request_id in endless:
        client.send(Cancel(request_id))
    until(client, lambda status: status.readers.running_requests == 0)
    assert client.query(COUNT.sql).scalar() == 0
    assert client.status().process.threads == threads


def test_a_write_waits_for_no_read(worker: RunningWorker, gate: Gate) -> None:
    client = worker.connect()
    for _ in range(4):
        client.ask(QUERY, Statement(ENDLESS))
    other = worker.connect()
    for number in range(20):
        other.execute("insert into t values(?)", number)
    assert figures(other).running_requests == 2


def test_reads_go_on_beside_a_write_that_does_not_end(worker: RunningWorker, gate: Gate) -> None:
    client, other = worker.connect(), worker.connect()
    make_quick(other, lambda: other.query(COUNT.sql))
    client.ask(write.name, [gate.path])
    gate.wait()
    for _ in range(20):
        assert other.query(COUNT.sql).scalar() == 0
    gate.open()


def test_long_texts_are_not_kept(worker: RunningWorker) -> None:
    """What is remembered of quick statements does not grow with their texts."""
    client = worker.connect()
    before = client.status().process.resident_bytes
    for number in range(120):
        assert client.query(f"select {number} -- {'x' * 200_000}").scalar() == number
    assert client.status().process.resident_bytes - before < 20 * 1024**2


# The pool alone


class Bench:
    """Readers on a real database, without a worker around them."""

    def __init__(self, path: Path) -> None:
        self.limits = msgspec.structs.replace(DEFAULT_LIMITS, quick_reads_remembered=2)
        self.writer = open_writer(str(path), "normal", self.limits)
        self.lane = Lane()
        self.finished: deque[Job] = deque()
        self.came = threading.Semaphore(0)
        self.readers = Readers(
            self.lane, lambda: open_reader(str(path), self.limits), self.limits, self._finish
        )
        self.client = OneClient()
        self.last_id = 0

    def _finish(self, job: Job) -> None:
        self.finished.append(job)
        self.came.release()

    def place(self, run: Callable[[], object], name: str = "test.read") -> Job:
        self.last_id += 1
        served = Served(Operation(name, "read", Nothing, Any), lambda _tx, _arguments: run())
        job = Job(self.client, self.last_id, served, msgspec.Raw(b"\x90"), 10, 2**62, 1000, 0, served.solo)
        self.lane.add(job)
        return job

    def run(self) -> list[Job]:
        return self.readers.run_quick(2**62)

    def wait(self) -> Job:
        assert self.came.acquire(timeout=30), "no read came back"
        return self.finished.popleft()

    def stop(self) -> None:
        self.readers.stop(2**62)
        self.writer.close()


@pytest.fixture
def bench(database: Path) -> Any:
    bench = Bench(database)
    yield bench
    bench.stop()


def test_a_failure_outside_of_a_handler_ends_no_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise OSError("broken")

    monkeypatch.setattr(Reader, "run", broken)
    for _ in range(4):
        job = bench.place(lambda: 1)
        bench.run()
        assert bench.wait() is job
        assert job.code == OperationFailedError.code
    monkeypatch.undo()
    job = bench.place(lambda: 1)
    bench.run()
    assert bench.wait() is job
    assert job.code == ""


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(bench: Bench) -> None:
    for name in ("test.a", "test.b", "test.c"):
        bench.place(lambda: 1, name)
        assert bench.run() == []
        bench.wait()
    for name, quick in (("test.b", True), ("test.c", True), ("test.a", False)):
        job = bench.place(lambda: 1, name)
        assert bench.run() == ([job] if quick else [])


def test_a_hold_waits_for_running_reads_and_starts_none(bench: Bench) -> None:
    stands, goes = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        goes.wait(30)

    bench.place(stand)
    bench.run()
    assert stands.wait(30)
    # It cannot end before it is over: the reader still stands.
    bench.readers.hold(1)
    second = bench.place(lambda: 2, "test.other")
    bench.run()
    holder = threading.Thread(target=bench.readers.hold, args=(2**62,))
    holder.start()
    holder.join(0.2)
    assert holder.is_alive()
    goes.set()
    holder.join(30)
    assert not holder.is_alive()
    assert bench.wait().code == ""
    assert second.frame == b""
    assert bench.readers.busy() == []
    bench.readers.resume()
    assert bench.wait() is second


def test_what_a_paused_client_asked_is_read_once_it_reads_again(bench: Bench) -> None:
    job = bench.place(lambda: 1)
    bench.client.paused = True
    bench.readers.pooled.pause(bench.client)
    bench.lane.pause(bench.client)
    assert bench.run() == []
    bench.client.paused = False
    bench.lane.resume(bench.client)
    bench.run()
    assert bench.wait() is job
    # And where it stood in the pool's lane already.
    bench.client.paused = True
    job = bench.place(lambda: 1, "test.other")
    bench.lane.remove(job)
    bench.readers.pooled.add(job)
    bench.readers.wake()
    bench.client.paused = False
    bench.readers.pooled.resume(bench.client)
    bench.readers.wake()
    assert bench.wait() is job


def test_no_wake_up_is_lost(bench: Bench) -> None:
    """Whenever a read comes while threads go to sleep or wake up, it is taken."""
    for number in range(2_000):
        bench.place(lambda: 1, f"test.{number}")
        bench.run()
        bench.wait()
    jobs = [bench.place(lambda: 1, f"test.{number}") for number in range(500)]
    bench.run()
    assert {bench.wait() for _ in jobs} == set(jobs)


def test_offered_reads_are_taken_by_the_pool(bench: Bench) -> None:
    job = bench.place(lambda: 1)
    bench.readers.offer()
    assert bench.wait() is job
    assert job.code == ""
