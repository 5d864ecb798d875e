"""Work in the background: short slices beside the foreground, and copies that are whole or not there."""

import select
import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest

from storage_worker.background import TRIM_EVERY_NS, Background, Optimize, TrimReceipts
from storage_worker.peer import Job
from storage_worker.protocol.envelope import Cancel, Failure, Reply, error_of
from storage_worker.protocol.errors import (
    DatabasePathError,
    DeadlineExceededError,
    InvalidRequestError,
    NotPermittedError,
    OverloadedError,
    RequestCancelledError,
    StorageError,
    StorageFullError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.statements import BACKUP, BEGIN, ROLLBACK, Backup, Begin, Nothing
from storage_worker.protocol.status import BackgroundTask, WorkerStatus
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.gates import STORE, Gate, write_alone
from tests.worker.hostile import until
from tests.worker.raw import RawClient, wait_until_waiting
from tests.worker.workbench import Workbench, result

MS = 1_000_000
SLICE_NS = DEFAULT_LIMITS.background_slice_ms_max * MS
STARVED_NS = DEFAULT_LIMITS.background_starved_ms_max * MS


# Slices, with a clock of the test's own


class Counting:
    """A task that counts its slices."""

    def __init__(self, name: str, due_ns: int = 1, slices: int = 1_000_000) -> None:
        self.status = BackgroundTask(name=name)
        self.due = due_ns
        self.left = slices
        self.untils: list[int] = []
        self.error: StorageError | None = None
        self.abandoned = False

    @property
    def ended(self) -> bool:
        return self.left == 0

    def due_ns(self) -> int:
        return 0 if self.ended else self.due

    def run_slice(self, until_ns: int) -> list[Job]:
        self.untils.append(until_ns)
        if self.error is not None:
            raise self.error
        self.left -= 1
        return []

    def abandon(self) -> list[Job]:
        self.abandoned = True
        return []


def background(*tasks: Counting) -> Background:
    made = Background(DEFAULT_LIMITS)
    for task in tasks:
        made.add(task)
    return made


def test_a_slice_runs_when_nothing_waits() -> None:
    task = Counting("one")
    at_work = background(task)
    for now in (5, 6, 7):
        at_work.run(now, foreground_waits=False)
    assert task.untils == [5 + SLICE_NS, 6 + SLICE_NS, 7 + SLICE_NS]
    assert task.status.slices == 3


def test_the_foreground_comes_first_until_the_background_has_starved() -> None:
    task = Counting("one")
    at_work = background(task)
    at_work.run(MS, foreground_waits=True)
    at_work.run(STARVED_NS, foreground_waits=True)
    assert task.untils == []
    at_work.run(MS + STARVED_NS, foreground_waits=True)
    assert len(task.untils) == 1
    # And then it has to starve again.
    at_work.run(2 * MS + STARVED_NS, foreground_waits=True)
    at_work.run(MS + 2 * STARVED_NS, foreground_waits=True)
    assert len(task.untils) == 1
    at_work.run(2 * MS + 2 * STARVED_NS, foreground_waits=True)
    assert len(task.untils) == 2


def test_what_is_not_due_does_not_starve() -> None:
    task = Counting("one", due_ns=10 * STARVED_NS)
    at_work = background(task)
    assert at_work.due_ns() == 10 * STARVED_NS
    at_work.run(MS, foreground_waits=True)
    at_work.run(10 * STARVED_NS, foreground_waits=True)
    assert task.untils == []


def test_tasks_take_turns() -> None:
    tasks = [Counting(name) for name in "abc"]
    at_work = background(*tasks)
    for now in range(1, 10):
        at_work.run(now, foreground_waits=False)
    assert [len(task.untils) for task in tasks] == [3, 3, 3]


def test_a_task_that_has_ended_goes() -> None:
    tasks = [Counting("short", slices=1), Counting("long")]
    at_work = background(*tasks)
    for now in range(1, 4):
        at_work.run(now, foreground_waits=False)
    assert len(at_work.tasks) == 1
    assert [status.name for status in at_work.statuses(10)] == ["long"]


def test_a_failed_slice_is_told_and_the_next_one_may_succeed() -> None:
    task = Counting("one")
    at_work = background(task)
    task.error = StorageFullError("no room")
    assert at_work.run(1, foreground_waits=False) == []
    assert (task.status.state, task.status.last_error) == ("failed", "no room")
    task.error = None
    at_work.run(2, foreground_waits=False)
    assert (task.status.state, task.status.last_error) == ("waiting", "no room")
    task.due = 2**62
    assert at_work.statuses(2**62)[0].last_run_ago_ms is not None


def test_there_is_a_bound_and_everything_can_be_abandoned() -> None:
    tasks = [Counting(str(number)) for number in range(DEFAULT_LIMITS.background_tasks_max)]
    at_work = background(*tasks[:-1])
    at_work.check_room()
    at_work.add(tasks[-1])
    with pytest.raises(OverloadedError) as caught:
        at_work.check_room()
    assert caught.value.retry_after
    assert caught.value.details == {"bound": "background_tasks"}
    assert at_work.abandon() == []
    assert all(task.abandoned for task in tasks)


# Receipts and statistics


def keyed(bench: Workbench, count: int) -> None:
    for number in range(count):
        bench.execute("insert into t values(1)", key=f"key {number}")
    for job in bench.run_all():
        result(job)


def test_receipts_over_the_count_are_trimmed_the_oldest_first(database: Path) -> None:
    with Workbench(database, receipts_count_max=100, receipts_trim_rows=20) as bench:
        bench.execute("create table t(a)")
        keyed(bench, 250)
        task = TrimReceipts(bench.writer, bench.limits)
        due = task.due_ns()
        # A slice without time does one step all the same, and asks for more at once.
        task.run_slice(0)
        assert task.status.done_units == 20
        assert task.due_ns() < due
        while bench.writer.receipts.status.kept > 100:
            task.run_slice(2**62)
        assert task.due_ns() > due
        assert task.status.done_units == bench.writer.receipts.status.trimmed == 150
        assert bench.rows("select count(*) from _sw_receipts") == [(100,)]
        task.run_slice(2**62)
        assert task.status.done_units == 150
        assert not bench.writer.database.in_transaction


def test_receipts_over_the_age_are_trimmed(database: Path) -> None:
    with Workbench(database) as bench:
        bench.execute("create table t(a)")
        keyed(bench, 5)
        task = TrimReceipts(bench.writer, bench.limits)
        task.run_slice(2**62)
        assert bench.rows("select count(*) from _sw_receipts") == [(5,)]
        bench.writer.database.own("update _sw_receipts set created_ms = 0 where key < 'key 3'")
        task.run_slice(2**62)
        assert bench.rows("select key from _sw_receipts") == [("key 3",), ("key 4",)]


def test_a_trim_that_fails_leaves_nothing_open(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Workbench(database, receipts_count_max=1) as bench:
        bench.execute("create table t(a)")
        keyed(bench, 5)
        task = TrimReceipts(bench.writer, bench.limits)
        kept = bench.writer.receipts.status.kept

        def full(_: int) -> int:
            bench.writer.database.own("delete from _sw_receipts")
            raise StorageFullError("no room")

        monkeypatch.setattr(bench.writer.receipts, "trim", full)
        with pytest.raises(StorageFullError):
            task.run_slice(2**62)
        assert not bench.writer.database.in_transaction
        assert bench.writer.receipts.status.kept == kept
        assert bench.rows("select count(*) from _sw_receipts") == [(5,)]
        monkeypatch.undo()
        task.run_slice(2**62)
        assert bench.rows("select count(*) from _sw_receipts") == [(1,)]


def test_a_foreign_lock_puts_a_trim_off(database: Path) -> None:
    with Workbench(database, receipts_count_max=1) as bench:
        bench.execute("create table t(a)")
        keyed(bench, 5)
        task = TrimReceipts(bench.writer, bench.limits)
        foreign, _ = bench._open()
        foreign.begin()
        assert task.run_slice(2**62) == []
        foreign.close()
        assert bench.rows("select count(*) from _sw_receipts") == [(5,)]
        assert task.due_ns() > TRIM_EVERY_NS


def test_statistics_are_kept_current(database: Path) -> None:
    with Workbench(database) as bench:
        task = Optimize(bench.writer)
        due = task.due_ns()
        task.run_slice(due)
        assert task.due_ns() > due
        assert task.status.done_units == 1


# Copies


def whole(path: Path) -> int:
    """The rows of a copy, once it was found sound."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as copy:
        assert copy.execute("pragma integrity_check").fetchall() == [("ok",)]
        return int(copy.execute("select count(*) from t").fetchone()[0])


def fill(client: RawClient, mib: int) -> None:
    client.execute("create table t(a integer primary key, b)")
    client.execute(
        "insert into t(b) with recursive c(n) as (select 1 union all select n + 1 from c limit ?)"
        " select randomblob(16000) from c",
        mib * 64,
    )


def ask_for_copy(client: RawClient, path: Path | str, *, seconds: float = 30.0) -> int:
    return client.ask(BACKUP, Backup(str(path)), seconds=seconds)


def refusal(client: RawClient, path: Path | str) -> StorageError:
    answer = client.answer(ask_for_copy(client, path))
    assert isinstance(answer, Failure), answer
    return error_of(answer)


def failure(client: RawClient, request_id: int) -> StorageError:
    answer = client.answer(request_id)
    assert isinstance(answer, Failure), answer
    return error_of(answer)


def runs_now(client: RawClient) -> WorkerStatus:
    """The status of a worker in which a copy is under way."""
    status = until(
        client, lambda status: any(task.name == "backup" and task.slices for task in status.background)
    )
    assert isinstance(status, WorkerStatus)
    return status


def test_a_copy_beside_writers_is_sound_and_holds_all_that_was_acknowledged_before(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker(durability="normal")
    admin = worker.connect(role="admin")
    fill(admin, 24)
    stop = threading.Event()
    acknowledged = [0] * 4

    def work(number: int) -> None:
        with RawClient(worker.address) as client:
            while not stop.is_set():
                client.execute("insert into t(b) values(randomblob(2000))")
                acknowledged[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        while min(acknowledged) < 5:
            admin.query("select 1")
        before = 24 * 64 + sum(acknowledged)
        at_start = list(acknowledged)
        copy = ask_for_copy(admin, tmp_path / "copy.db")
        answer = admin.answer(copy)
        assert isinstance(answer, Reply)
        beside = [now - then for now, then in zip(acknowledged, at_start, strict=True)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    # Each of them was served while it went on.
    assert min(beside) > 0
    assert whole(tmp_path / "copy.db") >= before
    assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
    assert BACKUP.decode_result(answer.result) == (tmp_path / "copy.db").stat().st_size
    status = admin.status()
    assert [task.name for task in status.background] == ["receipts", "optimize"]
    assert admin.query("select count(*) from t").scalar() == 24 * 64 + sum(acknowledged)


def test_requests_are_served_between_slices(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker(durability="normal", background_slice_ms_max=1)
    admin, client = worker.connect(role="admin"), worker.connect()
    fill(admin, 32)
    copy = ask_for_copy(admin, tmp_path / "copy.db")
    task = next(task for task in runs_now(client).background if task.name == "backup")
    assert task.total_units
    assert 0 < task.done_units <= task.total_units
    served = 0
    while not select.select([admin.socket], [], [], 0)[0]:
        client.execute("insert into t(b) values(1)")
        assert client.query("select count(*) from t where a = 1").scalar() == 1
        served += 1
    assert served > 0
    assert isinstance(admin.answer(copy), Reply)
    # The last one may have come behind it.
    assert whole(tmp_path / "copy.db") - 32 * 64 in {served - 1, served}


def test_reads_behind_a_copy_wait_for_it_and_writes_do_not(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker(durability="normal", background_slice_ms_max=1)
    admin = worker.connect(role="admin")
    fill(admin, 24)
    copy = ask_for_copy(admin, tmp_path / "copy.db")
    count = admin.ask("sql.query", ["select count(*) from t", []])
    insert = admin.ask("sql.execute", ["insert into t(b) values(1)", []])
    order = [admin.receive() for _ in range(3)]
    assert [answer.id for answer in order if isinstance(answer, Reply)] == [insert, copy, count]


@pytest.fixture
def admin(worker: RunningWorker) -> RawClient:
    client = worker.connect(role="admin")
    client.execute("create table t(a)")
    return client


def test_refused_targets(worker: RunningWorker, admin: RawClient, tmp_path: Path) -> None:
    there = tmp_path / "there.db"
    there.write_bytes(b"precious")
    (tmp_path / "link.db").symlink_to(tmp_path / "nowhere.db")
    (tmp_path / "folder").mkdir()
    alias = tmp_path / "alias"
    alias.symlink_to(worker.path.parent, target_is_directory=True)
    before = sorted(tmp_path.iterdir())
    for target in (
        there,
        tmp_path / "link.db",
        tmp_path / "folder",
        tmp_path / "missing" / "copy.db",
        "relative.db",
        "",
        "/dev/null/copy.db",
        f"{tmp_path}/nul\0.db",
        tmp_path / ("x" * 300),
        worker.path,
        f"{worker.path}-journal",
        f"{worker.path}-wal",
        alias / f"{worker.path.name}-journal",
        f"{worker.path}-sw/record2",
    ):
        error = refusal(admin, target)
        assert isinstance(error, DatabasePathError), target
        assert error.outcome == "not_committed"
    assert there.read_bytes() == b"precious"
    assert sorted(tmp_path.iterdir()) == before
    admin.execute("insert into t values(1)")


def test_a_copy_is_for_administrators(worker: RunningWorker, tmp_path: Path) -> None:
    assert isinstance(refusal(worker.connect(), tmp_path / "copy.db"), NotPermittedError)


def test_a_copy_takes_no_request_key(admin: RawClient, tmp_path: Path) -> None:
    """It could not keep its promise: nothing of it is in the database."""
    answer = admin.answer(admin.ask(BACKUP, Backup(str(tmp_path / "copy.db")), key="k"))
    assert isinstance(answer, Failure)
    assert isinstance(error_of(answer), InvalidRequestError)
    answer = admin.answer(admin.ask(BEGIN, Begin(), key="k"))
    assert isinstance(answer, Failure)
    assert isinstance(error_of(answer), InvalidRequestError)


@pytest.fixture
def slow(start_worker: StartWorker, tmp_path: Path) -> tuple[RunningWorker, RawClient, Path]:
    """A worker whose copies take many slices, an administrator of it, and where the copy goes."""
    worker = start_worker(durability="normal", background_slice_ms_max=1)
    admin = worker.connect(role="admin", name="admin")
    fill(admin, 24)
    return worker, admin, tmp_path / "copies" / "copy.db"


Slow = tuple[RunningWorker, RawClient, Path]


def nothing_is_left(control: RawClient, path: Path) -> None:
    until(control, lambda status: all(task.name != "backup" for task in status.background))
    assert list(path.parent.iterdir()) == []
    # And the next one succeeds.
    assert control.query("select 1").scalar() == 1


def test_a_cancelled_copy_is_removed(slow: Slow) -> None:
    worker, admin, path = slow
    path.parent.mkdir()
    copy = ask_for_copy(admin, path)
    control = worker.connect(role="admin")
    runs_now(control)
    admin.send(Cancel(copy))
    assert isinstance(failure(admin, copy), RequestCancelledError)
    nothing_is_left(control, path)
    assert isinstance(control.answer(ask_for_copy(control, path)), Reply)
    assert whole(path) == 24 * 64


def test_a_copy_that_waits_for_an_interactive_transaction_can_be_cancelled(slow: Slow) -> None:
    worker, admin, path = slow
    path.parent.mkdir()
    copies = [ask_for_copy(admin, path, seconds=seconds) for seconds in (30, 0.3)]
    owner = worker.connect()
    number = owner.call(BEGIN, Begin(60_000))
    error = failure(admin, copies[1])
    assert isinstance(error, DatabasePathError | DeadlineExceededError)
    admin.send(Cancel(copies[0]))
    assert isinstance(failure(admin, copies[0]), RequestCancelledError)
    owner.call(ROLLBACK, Nothing(), transaction=number)
    nothing_is_left(worker.connect(), path)


def test_a_copy_s_deadline_is_kept_while_a_statement_runs(
    start_worker: StartWorker, tmp_path: Path, gate: Gate
) -> None:
    worker = start_worker(stores=[STORE], durability="normal", background_slice_ms_max=1)
    admin, other = worker.connect(role="admin"), worker.connect()
    fill(admin, 24)
    path = tmp_path / "copies" / "copy.db"
    path.parent.mkdir()
    other.ask(write_alone.name, [gate.path])
    gate.wait()
    # Its begin is followed at once by a statement that stands, so that it can neither wait longer nor get done.
    copy = ask_for_copy(admin, path, seconds=2)
    admin.ask(write_alone.name, [gate.path])
    wait_until_waiting(other, 2)
    gate.open()
    gate.wait()
    assert other.status().background[-1].name == "backup"
    error = failure(admin, copy)
    assert isinstance(error, DeadlineExceededError)
    assert error.details == {"stage": "execution"}
    gate.open()
    nothing_is_left(other, path)


def test_a_copy_whose_deadline_passes_is_removed(slow: Slow) -> None:
    worker, admin, path = slow
    path.parent.mkdir()
    error = failure(admin, ask_for_copy(admin, path, seconds=0.03))
    assert isinstance(error, DeadlineExceededError)
    nothing_is_left(worker.connect(), path)


def test_a_copy_whose_client_goes_is_removed(slow: Slow) -> None:
    worker, admin, path = slow
    path.parent.mkdir()
    ask_for_copy(admin, path)
    control = worker.connect()
    runs_now(control)
    admin.close()
    nothing_is_left(control, path)


def test_a_copy_that_a_stop_cuts_off_is_removed(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker(durability="normal", background_slice_ms_max=1, stop_grace_ms=1)
    admin = worker.connect(role="admin")
    fill(admin, 24)
    path = tmp_path / "copies" / "copy.db"
    path.parent.mkdir()
    copy = ask_for_copy(admin, path)
    runs_now(worker.connect())
    admin.ask("worker.stop", [])
    error = failure(admin, copy)
    assert isinstance(error, WorkerUnavailableError)
    assert error.outcome == "not_committed"
    assert worker.child.wait(30) is not None
    assert list(path.parent.iterdir()) == []


def test_two_copies_go_on_side_by_side_and_no_third(start_worker: StartWorker, tmp_path: Path) -> None:
    # Two tasks are the worker's own.
    worker = start_worker(durability="normal", background_slice_ms_max=1, background_tasks_max=4)
    admin = worker.connect(role="admin")
    fill(admin, 24)
    copies = [ask_for_copy(admin, tmp_path / f"copy {number}.db") for number in range(3)]
    error = failure(admin, copies.pop())
    assert isinstance(error, OverloadedError)
    assert error.retry_after
    assert not (tmp_path / "copy 2.db").exists()
    for _ in copies:
        assert isinstance(admin.receive(), Reply)
    for number in range(2):
        assert whole(tmp_path / f"copy {number}.db") == 24 * 64


def test_whoever_locks_the_database_holds_up_no_copy(slow: Slow) -> None:
    worker, admin, path = slow
    path.parent.mkdir()
    copy = ask_for_copy(admin, path)
    runs_now(worker.connect())
    with closing(sqlite3.connect(worker.path, isolation_level=None)) as foreign:
        foreign.execute("begin immediate")
        foreign.execute("insert into t(b) values('not committed')")
        assert isinstance(admin.answer(copy), Reply)
        foreign.execute("rollback")
    assert whole(path) == 24 * 64
