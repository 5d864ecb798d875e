"""A disk that fails: nothing is called `not_committed` on a guess, and nothing acknowledged is lost."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from storage_worker import exits
from storage_worker.database.connection import Database
from storage_worker.database.opening import Durability
from storage_worker.protocol.envelope import Failure, Reply
from storage_worker.protocol.errors import OperationFailedError, StorageCorruptError, StorageError
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import (
    BEGIN,
    COMMIT,
    EXECUTE,
    OUTCOME,
    ROLLBACK,
    Begin,
    Nothing,
    OutcomeQuestion,
    Statement,
)
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.faults import (
    DATABASE,
    FAULTY_STORE,
    FULL,
    IOERR_FSYNC,
    IOERR_READ,
    IOERR_WRITE,
    WAL,
    Fault,
    Faults,
)
from tests.worker.raw import PATIENCE_S, RawClient, wait_until_waiting
from tests.worker.workbench import Workbench, result

INSERT = "insert into t(a) values(?) returning id"
CREATE = "create table t(id integer primary key, a)"


@pytest.fixture
def faulty(start_worker: StartWorker) -> RunningWorker:
    worker = start_worker(stores=[FAULTY_STORE], fence_ms_max=300, group_work_ms_max=60_000)
    worker.connect().execute(CREATE)
    return worker


@contextmanager
def held_back(client: RawClient) -> Iterator[None]:
    """What is sent meanwhile waits, and makes one group afterwards."""
    number = client.call(BEGIN, Begin(60_000))
    yield
    client.call(ROLLBACK, Nothing(), transaction=number)


def add(client: RawClient, text: str, **options: Any) -> int:
    return client.ask(EXECUTE, Statement(INSERT, [text]), **options)


def failure(answer: Reply | Failure) -> Failure:
    assert isinstance(answer, Failure), answer
    return answer


def after_a_crash(worker: RunningWorker, to: Path) -> list[Any]:
    """What a recovery would find, if the machine stopped now with everything on its disk that was written."""
    to.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{worker.path}{suffix}", to / f"copy.db{suffix}")
    with closing(sqlite3.connect(to / "copy.db")) as copy:
        return [a for (a,) in copy.execute("select a from t order by id")]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("xSync", WAL, IOERR_FSYNC, 1), "storage_operation_failed"),
        (Fault("xSync", WAL, IOERR_FSYNC, 3), "storage_operation_failed"),
        (Fault("xWrite", WAL, IOERR_WRITE, 1), "storage_operation_failed"),
        (Fault("xWrite", WAL, FULL, 1), "storage_full"),
        (Fault("xWrite", WAL, FULL, 2), "storage_full"),
    ],
)
def test_a_commit_that_fails_and_then_a_fence_that_holds(
    faulty: RunningWorker, tmp_path: Path, fault: Fault, code: str
) -> None:
    clients = [faulty.connect() for _ in range(4)]
    kept = [add(client, "kept") for client in clients]
    for client, request in zip(clients, kept, strict=True):
        assert isinstance(client.answer(request), Reply)
    owner = faulty.connect()
    with held_back(owner):
        lost = [add(client, "lost", key=f"k{n}") for n, client in enumerate(clients)]
        wait_until_waiting(owner, 4)
        Faults(faulty.path).set(fault)
    for client, request in zip(clients, lost, strict=True):
        found = failure(client.answer(request))
        assert (found.code, found.outcome) == (code, "not_committed")
        assert found.details["sqlite_code"] == fault.code
    assert Faults(faulty.path).get() is None
    assert after_a_crash(faulty, tmp_path / "crash 1") == ["kept"] * 4
    # The same keys again are new: what failed has left nothing.
    for number, client in enumerate(clients):
        client.execute(INSERT, "again", key=f"k{number}")
    status = owner.status()
    assert status.writer.failed_commits == 1
    assert status.writer.fences >= 1
    assert status.writer.reopened == (code != "storage_full")
    assert status.receipts.kept == 4
    assert after_a_crash(faulty, tmp_path / "crash 2") == ["kept"] * 4 + ["again"] * 4


@pytest.mark.parametrize(
    "fault",
    [
        Fault("xSync", WAL, IOERR_FSYNC),
        Fault("xWrite", WAL, IOERR_WRITE),
    ],
)
def test_a_commit_that_cannot_be_settled_is_unknown(
    faulty: RunningWorker, start_worker: StartWorker, fault: Fault
) -> None:
    clients = [faulty.connect() for _ in range(3)]
    for client in clients:
        client.execute(INSERT, "kept")
    owner = faulty.connect()
    with held_back(owner):
        lost = [add(client, "lost", key=f"k{n}") for n, client in enumerate(clients)]
        wait_until_waiting(owner, 3)
        Faults(faulty.path).set(fault)
    for client, request in zip(clients, lost, strict=True):
        found = failure(client.answer(request))
        assert (found.code, found.outcome) == ("storage_unavailable", "unknown")
        assert "request key" in found.message
    assert faulty.child.wait(PATIENCE_S) == exits.FATAL, faulty.log()
    Faults(faulty.path).clear()
    client = start_worker(faulty.path).connect()
    states = [client.call(OUTCOME, OutcomeQuestion(f"k{n}", True)).state for n in range(3)]
    # They were one transaction.
    assert states in (["committed"] * 3, ["fenced"] * 3)
    rows = [a for (a,) in client.query("select a from t order by id")]
    assert rows == ["kept"] * 3 + ["lost"] * 3 * (states[0] == "committed")


def test_a_full_disk_without_space_for_the_fence(faulty: RunningWorker) -> None:
    client, other = faulty.connect(), faulty.connect()
    client.execute(INSERT, "kept")
    Faults(faulty.path).set(Fault("xWrite", WAL, FULL))
    found = failure(client.answer(add(client, "lost", key="k")))
    assert (found.code, found.outcome) == ("storage_full", "unknown")
    # Until the fence has followed nothing else is written; reads go on.
    for _ in range(3):
        found = failure(client.answer(add(client, "refused", key="k")))
        assert (found.code, found.outcome) == ("storage_full", "not_committed")
    found = failure(client.answer(client.ask(BEGIN, Begin(1000))))
    assert (found.code, found.outcome) == ("storage_full", "not_committed")
    assert client.query("select a from t").rows == [("kept",)]
    assert any("space" in reason for reason in other.status().health.reasons)
    Faults(faulty.path).clear()
    # Service comes back by itself, and what was unknown is known.
    other.execute(INSERT, "again")
    assert other.call(OUTCOME, OutcomeQuestion("k")).state == "not_found"
    assert other.query("select a from t").rows == [("kept",), ("again",)]
    status = other.status()
    assert (status.writer.failed_commits, status.writer.fences) == (1, 1)
    assert status.health.state == "healthy"


def test_who_waits_when_the_worker_ends_is_told_that_nothing_was_committed(
    faulty: RunningWorker,
) -> None:
    owner, first, other = (faulty.connect() for _ in range(3))
    with held_back(owner):
        # The first makes a group of its own.
        lost = first.ask("faults.alone", ["lost"])
        waits = add(other, "waits")
        wait_until_waiting(owner, 2)
        Faults(faulty.path).set(Fault("xSync", WAL, IOERR_FSYNC))
    assert failure(first.answer(lost)).outcome == "unknown"
    found = failure(other.answer(waits))
    assert (found.code, found.outcome) == ("storage_unavailable", "not_committed")
    assert faulty.child.wait(PATIENCE_S) == exits.FATAL, faulty.log()


def test_the_commit_of_an_interactive_transaction_that_fails(faulty: RunningWorker) -> None:
    client, other = faulty.connect(), faulty.connect()
    for number, fault in enumerate((Fault("xSync", WAL, IOERR_FSYNC, 1), Fault("xWrite", WAL, FULL, 1))):
        transaction = client.call(BEGIN, Begin(60_000))
        client.execute(INSERT, "lost", transaction=transaction)
        Faults(faulty.path).set(fault)
        found = failure(client.answer(client.ask(COMMIT, Nothing(), transaction=transaction, key="k")))
        assert found.outcome == "not_committed"
        assert found.details["sqlite_code"] == fault.code
        other.execute(INSERT, number)
    assert [a for (a,) in client.query("select a from t")] == [0, 1]
    assert client.call(OUTCOME, OutcomeQuestion("k")).state == "not_found"


def with_a_large_table(start_worker: StartWorker, tmp_path: Path) -> RunningWorker:
    path = tmp_path / "large.db"
    with closing(sqlite3.connect(path)) as made:
        made.execute(CREATE)
        made.execute("create table large(b)")
        made.executemany("insert into large values(zeroblob(?))", [(2000,)] * 2000)
        made.commit()
    # It does not fit into the cache, so that it has to be read.
    return start_worker(
        path, stores=[FAULTY_STORE], fence_ms_max=300, group_work_ms_max=60_000, writer_cache_bytes=2**20
    )


ADD_AND_READ = Operation[[str, bool], Any]("faults.add_and_read", "write", Statement, Any)


@pytest.mark.parametrize("swallow", [False, True])
def test_a_read_that_fails_inside_a_group(start_worker: StartWorker, tmp_path: Path, swallow: bool) -> None:
    worker = with_a_large_table(start_worker, tmp_path)
    clients = [worker.connect() for _ in range(3)]
    owner = worker.connect()
    owner.execute(INSERT, "before")  # so that the table it goes into need not be read
    with held_back(owner):
        first = add(clients[0], "first")
        culprit = clients[1].ask(ADD_AND_READ, ["culprit", swallow])
        second = add(clients[2], "second")
        Faults(worker.path).set(Fault("xRead", DATABASE, IOERR_READ, 1))
    found = failure(clients[1].answer(culprit))
    assert (found.code, found.outcome) == ("storage_operation_failed", "not_committed")
    assert found.details["sqlite_code"] == IOERR_READ
    for client, request in ((clients[0], first), (clients[2], second)):
        assert isinstance(client.answer(request), Reply)
    assert clients[1].call(ADD_AND_READ, ["well", False]) == 4_000_000
    assert sorted(str(a) for (a,) in owner.query("select a from t")) == ["before", "first", "second", "well"]
    assert owner.status().writer.reopened == 1


def test_a_read_that_fails_inside_an_interactive_transaction(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = with_a_large_table(start_worker, tmp_path)
    client = worker.connect()
    transaction = client.call(BEGIN, Begin(60_000))
    client.execute(INSERT, "lost", transaction=transaction)
    Faults(worker.path).set(Fault("xRead", DATABASE, IOERR_READ, 1))
    found = failure(client.answer(client.ask(ADD_AND_READ, ["x", False], transaction=transaction)))
    assert found.details["transaction_ended"] is True
    client.execute(INSERT, "well")
    assert client.query("select a from t").rows == [("well",)]
    assert client.status().writer.reopened == 1


def test_a_checkpoint_that_fails_is_no_reason_to_end(
    faulty: RunningWorker, start_worker: StartWorker
) -> None:
    faulty.stop()
    for code in (FULL, IOERR_WRITE):
        worker = start_worker(faulty.path, stores=[FAULTY_STORE], wal_checkpoint_bytes=40_000)
        client = worker.connect()
        Faults(worker.path).set(Fault("xWrite", DATABASE, code))
        for number in range(40):
            client.execute(INSERT, str(number) * 3000)
        assert client.query("select count(*) from t where length(a) >= 3000").scalar() % 40 == 0
        Faults(worker.path).clear()
        client.execute(INSERT, "well")
        assert worker.stop() == 0


@pytest.mark.parametrize(("durability", "level"), [("full", 2), ("normal", 1)])
def test_a_fence_is_durable_whatever_the_worker_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability, level: int
) -> None:
    levels: list[int] = []
    commit = Database.commit

    def fail_twice(database: Database) -> None:
        levels.append(database.own("pragma synchronous")[0][0])
        if len(levels) in {1, 2}:
            raise OperationFailedError("the disk failed")
        commit(database)

    with Workbench(tmp_path / "t.db", durability=durability) as bench:
        monkeypatch.setattr(Database, "commit", fail_twice)
        jobs = [bench.execute("create table lost(a)"), bench.execute("create table kept(a)")]
        bench.run_all()
        again = bench.execute("create table kept(a)")
        bench.run_all()
        monkeypatch.undo()
        for job in jobs:
            with pytest.raises(OperationFailedError) as caught:
                result(job)
            assert caught.value.outcome == "not_committed"
        result(again)
        # The group, a fence that fails, one that holds, the next group.
        assert levels == [level, 2, 2, level]
        assert bench.rows("select name from sqlite_schema where name in ('lost', 'kept')") == [("kept",)]


# A damaged file


def damage(path: Path) -> None:
    """Make a database in which a page of the table `bad` is garbage."""
    with closing(sqlite3.connect(path)) as made:
        made.execute("pragma page_size=4096")
        made.execute(CREATE)
        made.execute("create table bad(id integer primary key, b)")
        made.executemany("insert into bad(b) values(zeroblob(?))", [(1000,)] * 500)
        made.execute("insert into t(a) values('kept')")
        made.commit()
        (root,) = made.execute("select rootpage from sqlite_schema where name = 'bad'").fetchone()
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)


@pytest.mark.parametrize(
    "sql",
    [
        "update bad set b = 1",
        "insert into t(a) select sum(length(b)) from bad",
        "insert into t(a) select sum(length(b)) from bad returning a",
    ],
)
def test_writes_are_refused_where_the_file_is_damaged(
    start_worker: StartWorker, tmp_path: Path, sql: str
) -> None:
    path = tmp_path / "damaged.db"
    damage(path)
    worker = start_worker(path)
    client, other, owner = worker.connect(), worker.connect(), worker.connect()
    client.execute(INSERT, "before")
    with held_back(owner):
        mate = add(other, "mate")
        culprit = client.ask(EXECUTE, Statement(sql))
    found = failure(client.answer(culprit))
    assert (found.code, found.outcome) == ("storage_corrupt", "not_committed")
    assert failure(other.answer(mate)).code == "storage_corrupt"
    with pytest.raises(StorageCorruptError) as caught:
        other.execute(INSERT, "after")
    assert caught.value.details == {"file": str(path), "check": "quick_check"}
    with pytest.raises(StorageCorruptError):
        other.call(BEGIN, Begin(1000))
    assert other.query("select a from t").rows == [("kept",), ("before",)]
    health = other.status().health
    assert health.state == "degraded"
    assert "damaged" in str(health.reasons) or "quick check" in str(health.reasons)


def test_an_index_that_contradicts_its_own_content_is_no_damage_of_the_file(worker: RunningWorker) -> None:
    client = worker.connect()
    client.execute("create table t(id integer primary key, a)")
    client.execute("create virtual table f using fts5(a, content='t', content_rowid='id')")
    client.execute("insert into t(a) values('never indexed')")
    with pytest.raises(StorageError):
        client.execute("insert into f(f, rank) values('integrity-check', 1)")
    client.execute("insert into t(a) values('more')")
    assert client.status().writer.reopened == 0
