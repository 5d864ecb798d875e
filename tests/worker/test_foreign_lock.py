"""A process that is none of ours holds SQLite's lock: who has time waits, who has not is told, all others are served."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage_worker as sw
from storage_worker.protocol.envelope import Failure, Reply
from storage_worker.protocol.errors import BusyError
from storage_worker.protocol.statements import BEGIN, COMMIT, EXECUTE, HEALTH, Begin, Nothing, Statement
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.foreign import foreign_process
from tests.worker.raw import wait_until_waiting
from tests.worker.workbench import OneClient, Workbench, result

HOLD = "begin immediate"
INSERT = "insert into t values(?)"


@pytest.fixture
def served(worker: RunningWorker) -> RunningWorker:
    worker.connect().execute("create table t(a)")
    return worker


def test_the_patient_succeed_and_the_others_are_told(served: RunningWorker) -> None:
    patient, hurried, reader = (served.connect() for _ in range(3))
    with foreign_process(served.path, HOLD, "insert into t values('foreign')"):
        waits = [patient.ask(EXECUTE, Statement(INSERT, [number]), seconds=600) for number in range(3)]
        begins = patient.ask(BEGIN, Begin(1000), seconds=600)
        for seconds in (0.5, 1.0):
            # One that is waiting when its time is over, and several of one client.
            late = [hurried.ask(EXECUTE, Statement(INSERT, ["late"]), seconds=seconds) for _ in range(3)]
            for request in late:
                answer = hurried.answer(request)
                assert isinstance(answer, Failure)
                assert (answer.code, answer.outcome) == ("storage_busy", "not_committed")
        # Control and reads are answered meanwhile.
        assert reader.query("select a from t").rows == []
        health = reader.call(HEALTH, Nothing())
        assert health.state == "degraded"
        assert any("lock" in reason for reason in health.reasons)
        wait_until_waiting(reader, 4)
        assert reader.status().writer.busy_retries > 1
    for request in waits:
        assert isinstance(patient.answer(request), Reply)
    transaction = BEGIN.decode_result(patient.answer(begins).result)  # type: ignore[union-attr]
    patient.execute(INSERT, "interactive", transaction=transaction)
    patient.call(COMMIT, Nothing(), transaction=transaction)
    assert [a for (a,) in reader.query("select a from t")] == [0, 1, 2, "interactive"]
    assert reader.call(HEALTH, Nothing()).state == "healthy"


def test_three_seconds_of_a_foreign_lock_end_a_call_of_one_second_and_not_one_of_ten(
    served: RunningWorker,
) -> None:
    told: list[str] = []

    def insert(seconds: float) -> None:
        with sw.connect(served.address, name=f"{seconds:g} s") as client:
            try:
                client.execute(INSERT, (seconds,), timeout=seconds)
                told.append(f"{seconds:g} s: committed")
            except sw.StorageError as error:
                told.append(f"{seconds:g} s: {error.code}, {error.outcome}")

    patient, hurried = (threading.Thread(target=insert, args=(seconds,)) for seconds in (10.0, 1.0))
    with foreign_process(served.path, HOLD) as end_after:
        patient.start()
        hurried.start()
        hurried.join()
        # It took the first of the three seconds.
        assert told == ["1 s: storage_busy, not_committed"]
        end_after(2.0)
        patient.join()
    assert told[1:] == ["10 s: committed"]
    assert served.connect().query("select a from t").rows == [(10.0,)]


def test_a_lock_that_comes_and_goes(served: RunningWorker) -> None:
    client = served.connect()
    for number in range(3):
        with foreign_process(served.path, HOLD, f"insert into t values('foreign {number}')", "commit", HOLD):
            waits = client.ask(EXECUTE, Statement(INSERT, [number]))
            wait_until_waiting(served.connect(), 1)
        assert isinstance(client.answer(waits), Reply)
    rows = [a for (a,) in client.query("select a from t")]
    assert rows == ["foreign 0", 0, "foreign 1", 1, "foreign 2", 2]


def test_a_foreign_reader_holds_nobody(served: RunningWorker) -> None:
    client = served.connect()
    with foreign_process(served.path, "begin", "select * from t"):
        for number in range(10):
            client.execute(INSERT, number)
    assert client.query("select count(*) from t").scalar() == 10


def test_a_start_waits_for_a_lock(start_worker: StartWorker, tmp_path: Path) -> None:
    path = tmp_path / "rollback.db"
    # A rollback journal: the switch to WAL needs everybody to leave.
    with foreign_process(path, "create table t(a)", "begin", "select * from t"), pytest.raises(BusyError):
        start_worker(path, fence_ms_max=100)
    client = start_worker(path).connect()
    assert client.execute("pragma journal_mode").scalar() == "wal"


# On a workbench, where each attempt is the test's


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    with Workbench(tmp_path / "t.db") as found:
        found.execute("create table t(a)")
        found.run_all()
        yield found


def test_nothing_is_taken_while_the_lock_is_held(bench: Workbench) -> None:
    jobs = [bench.execute(INSERT, number, client=OneClient()) for number in range(3)]
    with foreign_process(bench.path, HOLD):
        assert bench.run() == []
        assert bench.writer.blocked
        assert not bench.writer.run_own(lambda: None)
        assert bench.run() == []
        assert bench.lane.requests == 3
    assert bench.run() == jobs
    assert not bench.writer.blocked
    for job in jobs:
        result(job)


def test_a_snapshot_that_is_behind_is_no_error(bench: Workbench) -> None:
    with foreign_process(bench.path, "insert into t values('foreign')"):
        job = bench.execute(INSERT, "own")
        assert bench.run() == [job]
    result(job)
    assert bench.rows("select a from t") == [("foreign",), ("own",)]
