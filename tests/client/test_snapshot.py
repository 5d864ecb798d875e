"""Snapshots of the synchronous client, with a real worker beside them."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import storage_worker as sw
from storage_worker.client.local_reads import LocalReads
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.statements import DatabaseFile
from tests.client.fake import PATIENCE_S, Calls
from tests.client.test_fork import in_child

pytestmark = pytest.mark.worker

ROOT = Path(__file__).parents[2]

COUNT = "select count(*) from t"
INSERT = "insert into t(a) values (?)"
NUMBERS = "with recursive c(n) as (select 1 union all select n + 1 from c)"
ENDLESS = f"{NUMBERS} select count(*) from c"
"""A query that only a deadline ends."""


@pytest.fixture
def worker(database: Path) -> Iterator[sw.StorageWorker]:
    with sw.StorageWorker(database) as running:
        yield running


@pytest.fixture
def client(worker: sw.StorageWorker) -> Iterator[sw.Client]:
    with worker.connect() as connected:
        connected.execute("create table t(id integer primary key, a)")
        yield connected


def timer_of(snap: sw.Snapshot) -> threading.Thread:
    assert snap._timer is not None
    return snap._timer


def still_reads(snap: sw.Snapshot) -> None:
    assert snap.query("select ?", ("works",)).scalar() == "works"


def test_it_sees_what_was_acknowledged_and_holds_it_while_writers_go_on(client: sw.Client) -> None:
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            client.execute(INSERT, ("more",))

    with Calls() as calls:
        writing = calls.start(write)
        try:
            for number in range(20):
                row = client.execute(INSERT, (number,)).last_insert_rowid
                with client.snapshot() as snap:
                    assert snap.query("select a from t where id = ?", (row,)).scalar() == number
                    seen = snap.query(COUNT).scalar()
                    client.execute(INSERT, ("later",))
                    assert snap.query(COUNT).scalar() == snap.query("select count(a) from t").scalar() == seen
        finally:
            over.set()
        writing.get()


def test_it_gives_what_a_query_of_the_worker_gives(client: sw.Client) -> None:
    client.batch([(INSERT, (value,)) for value in (None, 2**63 - 1, -(2**63), 1.5, "x\0ü", b"\0\xff")])
    client.execute("create virtual table words using fts5(text)")
    client.execute("insert into words values('a storage worker')")
    client.execute("create virtual table boxes using rtree(id, low, high)")
    client.execute("insert into boxes values(7, 2, 3)")
    statements: list[tuple[str, Any]] = [
        ("select id, a as value from t order by id", ()),
        ("select * from t where id > 100", ()),
        ("select a from t where id = ?", [2]),
        ("select :one, :two", {"one": True, "two": float("inf")}),
        (f"{NUMBERS} select n, 'row ' || n from c limit 1000", ()),
        ("pragma table_info(t)", ()),
        ("select name from pragma_table_info('t')", ()),
        ("select value from json_each('[1, 2]')", ()),
        ("select rowid from words where words match 'storage'", ()),
        ("select id from boxes where low > 1", ()),
    ]
    with client.snapshot() as snap:
        for sql, parameters in statements:
            for _ in range(2):  # the second time the statement is known
                assert snap.query(sql, parameters) == client.query(sql, parameters)


@pytest.mark.parametrize(
    ("error", "statements"),
    [
        (
            sw.NotPermittedError,
            (
                "insert into t values(1, 1)|update t set a = 1|delete from t|drop table t|create table u(a)"
                "|create temp table u(a)|alter table t add column b|reindex|analyze|vacuum|/* */ vacuum into 'x'"
                "|attach 'x' as y|detach y|begin|commit|rollback|end|savepoint s|release s|create virtual table v using fts5(a)|insert into t select 1, 2|pragma query_only = 0"
                "|pragma user_version = 1|pragma writable_schema = 1|select load_extension('x')"
            ),
        ),
        (
            sw.InvalidRequestError,
            "|;|-- nothing\n|select 1; select 2|select '\0'|select '\ud800'|select ?|select cast(x'ff' as text)",
        ),
        (sw.OperationFailedError, "selec|select * from nowhere|select abs(-9223372036854775808)"),
        (sw.RequestTooLargeError, "select '" + "x" * 300_000 + "'"),
    ],
    ids=["writes and leaves", "no statement", "wrong", "long"],
)
def test_statements_that_are_refused(
    client: sw.Client, tmp_path: Path, error: type[sw.StorageError], statements: str
) -> None:
    files = set(tmp_path.iterdir())
    with client.snapshot() as snap:
        for sql in statements.split("|"):
            with pytest.raises(error) as caught:
                snap.query(sql)
            assert caught.value.outcome == "not_committed"
            still_reads(snap)
        with pytest.raises(sw.OperationFailedError) as failed:
            snap.query("selec")
        assert failed.value.details["sqlite_name"] == "SQLITE_ERROR"
    assert set(tmp_path.iterdir()) == files


def test_values_that_would_be_altered_are_refused_and_named(client: sw.Client) -> None:
    bad: list[Any] = [2**63, -(2**63) - 1, float("nan"), "\ud800", object(), 1j, bytearray(b"x"), [1]]
    with client.snapshot() as snap:
        for value in bad:
            with pytest.raises(sw.InvalidRequestError, match=r"parameters? 2"):
                snap.query("select ?, ?", (1, value))
            with pytest.raises(sw.InvalidRequestError, match="'b'"):
                snap.query("select :a, :b", {"a": 1, "b": value})
            still_reads(snap)
        for parameters in ("text", b"bytes", 5, {1: 2}, (1, 2), {"a": 1}):
            with pytest.raises(sw.InvalidRequestError):
                snap.query("select :b", parameters)  # type: ignore[arg-type]
        with pytest.raises(sw.InvalidRequestError):
            snap.query(["select 1"])  # type: ignore[arg-type]
        still_reads(snap)


def test_a_result_stops_at_its_limit(client: sw.Client) -> None:
    endless = f"{NUMBERS} select n from c"
    with client.snapshot() as snap:
        for sql in (
            endless,
            "select zeroblob(2000000)",
            "select zeroblob(600000) union all select zeroblob(600000)",
        ):
            with pytest.raises(sw.ResultTooLargeError) as caught:
                snap.query(sql)
            assert caught.value.details["result_bytes_max"] == DEFAULT_LIMITS.result_bytes_default
            still_reads(snap)
        assert len(snap.query("select zeroblob(2000000)", max_result_bytes=2_000_010).scalar()) == 2_000_000
        with pytest.raises(sw.ResultTooLargeError):
            snap.query("select 'abc'", max_result_bytes=4)
        assert snap.query("select 'abc'", max_result_bytes=5).scalar() == "abc"
        for wrong in (0, DEFAULT_LIMITS.chunked_bytes_max + 1):
            with pytest.raises(sw.InvalidRequestError):
                snap.query("select 1", max_result_bytes=wrong)


def test_a_deadline_ends_a_statement_and_nothing_else(client: sw.Client) -> None:
    with client.snapshot() as snap:
        with pytest.raises(sw.DeadlineExceededError) as caught:
            snap.query(ENDLESS, timeout=0.05)
        assert caught.value.details["stage"] == "execution"
        client.execute(INSERT, (1,))
        assert snap.query(COUNT).scalar() == 0
        with pytest.raises(sw.DeadlineExceededError):
            snap.query("select 1", timeout=0)
        with pytest.raises(sw.InvalidRequestError):
            snap.query("select 1", timeout=DEFAULT_LIMITS.deadline_ms_max)
        still_reads(snap)


def test_it_ends_by_its_age_without_a_call(client: sw.Client) -> None:
    with client.snapshot(0.05) as snap:
        timer_of(snap).join(PATIENCE_S)
        assert snap._connection is None
        assert client.status().snapshots == []
        with pytest.raises(sw.SnapshotExpiredError, match="outlived its age") as caught:
            snap.query("select 1")
        assert caught.value.retryable
        assert caught.value.outcome == "not_committed"


def test_its_age_ends_a_running_statement(client: sw.Client) -> None:
    with client.snapshot(0.2) as snap, pytest.raises(sw.SnapshotExpiredError):
        snap.query(ENDLESS)


def test_to_leave_its_block_ends_a_statement_of_another_thread(client: sw.Client) -> None:
    """Otherwise the block would wait for the statement's own deadline."""
    ended: list[BaseException] = []

    def read() -> None:
        try:
            snap.query(ENDLESS)
        except sw.StorageError as error:
            ended.append(error)

    with client.snapshot(60) as snap:
        reader = threading.Thread(target=read)
        reader.start()
        while not snap._is_inside:
            still_alive = reader.is_alive()
            assert still_alive
    reader.join(PATIENCE_S)
    assert isinstance(ended[0], sw.SnapshotExpiredError)


def test_a_call_after_its_age_is_refused_where_the_timer_is_late(client: sw.Client) -> None:
    with client.snapshot() as snap:
        snap._end_ns = 1
        with pytest.raises(sw.SnapshotExpiredError):
            snap.query("select 1")
        assert snap._connection is None


def test_it_lives_in_its_block_only(client: sw.Client) -> None:
    snap = client.snapshot()
    with pytest.raises(sw.InvalidRequestError, match="with"):
        snap.query("select 1")
    with snap:
        (lease,) = client.status().snapshots
        assert lease.pid == os.getpid()
        assert 9_000 < lease.age_ms + lease.left_ms <= 10_000
        assert lease.overdue_ms == 0
        with pytest.raises(sw.InvalidRequestError):
            snap.__enter__()
        still_reads(snap)
    assert client.status().snapshots == []
    with pytest.raises(sw.SnapshotExpiredError):
        snap.query("select 1")
    timer_of(snap).join(PATIENCE_S)
    assert not timer_of(snap).is_alive()


@pytest.mark.parametrize("max_age", [0, -1, 60.001, float("nan"), float("inf"), "1", 1e400])
def test_ages_that_cannot_be(client: sw.Client, max_age: Any) -> None:
    with pytest.raises(sw.InvalidRequestError), client.snapshot(max_age):
        pass
    assert client.status().snapshots == []


def test_a_transaction_that_sqlite_gave_up_ends_it(client: sw.Client) -> None:
    """Otherwise the next statement would read another state."""
    with client.snapshot() as snap:
        assert snap._connection is not None
        snap._connection.set_authorizer(None)
        snap._connection.rollback()
        with pytest.raises(sw.OperationFailedError):
            snap.query("selec")
        with pytest.raises(sw.SnapshotExpiredError):
            snap.query("select 1")


def test_threads_take_turns(client: sw.Client) -> None:
    client.batch([(INSERT, (f"row {number}",)) for number in range(1, 101)])

    def read(snap: sw.Snapshot, first: int) -> None:
        for number in range(200):
            key = (first + number) % 100 + 1
            timeout = 10.0 if number % 2 else None
            assert (
                snap.query("select a from t where id = ?", (key,), timeout=timeout).scalar() == f"row {key}"
            )

    with Calls() as calls, client.snapshot() as snap:
        for outcome in [calls.start(read, snap, 7 * place) for place in range(8)]:
            outcome.get()


def test_a_wait_for_other_threads_ends_with_the_deadline(client: sw.Client) -> None:
    with Calls() as calls, client.snapshot() as snap, snap._lock:
        with pytest.raises(sw.DeadlineExceededError) as caught:
            calls.start(snap.query, "select 1", timeout=0.05).get()
        assert caught.value.details["stage"] == "waiting"


class Curious(Mapping[str, Any]):
    """Parameters that use the snapshot while it binds them."""

    def __init__(self, snap: sw.Snapshot) -> None:
        self.snap = snap

    def __getitem__(self, name: str) -> Any:
        return self.snap.query("select 1").scalar()

    def __iter__(self) -> Iterator[str]:
        return iter(("a",))

    def __len__(self) -> int:
        return 1


def test_a_call_inside_a_call_of_the_same_thread_is_refused(client: sw.Client) -> None:
    with client.snapshot() as snap:
        with pytest.raises(sw.InvalidRequestError, match="in the middle"):
            snap.query("select :a", Curious(snap))
        still_reads(snap)


def test_a_reader_may_and_a_worker_without_sql_has_none(tmp_path: Path) -> None:
    with (
        sw.StorageWorker(tmp_path / "a.db") as worker,
        worker.connect(role="read") as reader,
        reader.snapshot() as snap,
    ):
        still_reads(snap)
    with (
        sw.StorageWorker(tmp_path / "b.db", sql=False) as worker,
        worker.connect() as client,
        pytest.raises(sw.InvalidRequestError),
        client.snapshot(),
    ):
        pass


def test_a_path_that_looks_like_parts_of_an_address(tmp_path: Path) -> None:
    with sw.StorageWorker(tmp_path / "a?b#c%41 ü.db") as worker, worker.connect() as client:
        client.execute("create table t(a)")
        with client.snapshot() as snap:
            assert snap.query(COUNT).scalar() == 0


def test_more_statements_than_are_kept(database: Path) -> None:
    limits = msgspec.structs.replace(DEFAULT_LIMITS, statement_cache_count=2)
    with (
        sw.StorageWorker(database, limits=limits) as worker,
        worker.connect() as client,
        client.snapshot() as snap,
    ):
        for _ in range(2):
            for number in range(5):
                rows = snap.query(f"select ? as c{number}", (number,))
                assert (rows.columns, rows.rows) == ((f"c{number}",), [(number,)])
            assert len(snap._columns) <= 2


def test_too_many_are_refused(database: Path) -> None:
    limits = msgspec.structs.replace(DEFAULT_LIMITS, snapshots_max=2)
    with sw.StorageWorker(database, limits=limits) as worker, worker.connect() as client:
        with client.snapshot(), client.snapshot() as second:
            with pytest.raises(sw.OverloadedError) as caught, client.snapshot(retries=0):
                pass
            assert caught.value.details["bound"] == "snapshots"
            still_reads(second)
        with client.snapshot() as third:
            still_reads(third)


def test_a_replaced_database_is_not_read(client: sw.Client, database: Path) -> None:
    database.rename(database.with_name("elsewhere.db"))
    sqlite3.connect(database).close()
    with pytest.raises(sw.StorageReplacedError), client.snapshot():
        pass
    assert client.status().snapshots == []


def test_another_file_than_the_workers_is_not_read(database: Path) -> None:
    """As in a container that shares the socket with the worker, but not the files."""
    sqlite3.connect(database).close()
    found = database.stat()
    reads = LocalReads()
    with pytest.raises(sw.StorageReplacedError) as caught:
        reads._begin(
            DatabaseFile(str(database), found.st_dev, found.st_ino + 1), 2**63, DEFAULT_LIMITS, "3.54.0"
        )
    assert caught.value.outcome == "not_committed"
    assert reads._connection is None
    missing = DatabaseFile(str(database.with_name("missing.db")), 1, 1)
    with pytest.raises(sw.DatabasePathError):
        LocalReads()._begin(missing, 2**63, DEFAULT_LIMITS, "3.54.0")
    assert not database.with_name("missing.db").exists()


@pytest.mark.skipif(sqlite3.sqlite_version_info >= (3, 44), reason="this SQLite can read all of it")
def test_a_schema_that_this_sqlite_cannot_read(client: sw.Client) -> None:
    client.execute("create view v as select group_concat(a, ',' order by a) from t")
    with pytest.raises(sw.SchemaError, match=sqlite3.sqlite_version), client.snapshot():
        pass
    assert client.status().snapshots == []


def test_a_lost_worker_leaves_it_its_state(worker: sw.StorageWorker, client: sw.Client) -> None:
    client.execute(INSERT, (1,))
    with client.snapshot() as snap:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert snap.query(COUNT).scalar() == 1
        client.execute(INSERT, (2,), request_key="once")
        assert client.status().snapshots == []
        assert snap.query(COUNT).scalar() == 1
    with client.snapshot() as snap:
        assert snap.query(COUNT).scalar() == 2


def test_a_closed_client_leaves_it_its_state(worker: sw.StorageWorker) -> None:
    client = worker.connect()
    with client.snapshot() as snap:
        client.close()
        still_reads(snap)


def test_a_forked_child_neither_uses_nor_ends_it(client: sw.Client) -> None:
    client.execute(INSERT, (1,))

    def use_everything(snap: sw.Snapshot) -> int:
        with pytest.raises(sw.ForkedClientError):
            snap.query(COUNT)
        snap.__exit__(None, None, None)
        # SQLite would take the parent's locks for its own.
        with pytest.raises(sw.ForkedClientError), client.snapshot():
            pass
        client.execute(INSERT, (2,))
        found = client.query(COUNT).scalar()
        assert isinstance(found, int)
        return found

    with client.snapshot() as snap:
        assert in_child(lambda: use_everything(snap)) == 2
        assert snap.query(COUNT).scalar() == 1
        assert len(client.status().snapshots) == 1

    def take_one() -> Any:
        with client.snapshot() as own:
            return own.query(COUNT).scalar()

    assert in_child(take_one) == 2


def test_a_fork_while_another_thread_reads(client: sw.Client) -> None:
    with Calls() as calls, client.snapshot(1.0) as snap:
        reading = calls.start(snap.query, ENDLESS)
        for _ in range(5):
            with pytest.raises(sw.ForkedClientError):
                in_child(lambda: snap.query("select 1"))
        with pytest.raises(sw.SnapshotExpiredError):
            reading.get()


ORDERLY_CHILD = """
import os, sys
import storage_worker as sw

with sw.connect(sys.argv[1]) as client, client.snapshot() as snap:
    before = snap.query("select sum(a), count(*) from t").rows
    child = os.fork()
    if child == 0:
        sys.exit(0)  # Python takes everything down that it knows of
    assert os.waitpid(child, 0)[1] == 0
    for round in range(20):
        client.execute("update t set a = a + 1")
    assert client.status().wal.checkpoints > 0
    assert snap.query("select sum(a), count(*) from t").rows == before
    print("the state is the same")
"""


def test_the_orderly_end_of_a_child_leaves_its_parents_locks(database: Path) -> None:
    """Without them the worker's checkpoints would write over what the parent reads."""
    limits = msgspec.structs.replace(DEFAULT_LIMITS, wal_checkpoint_bytes=10_000)
    with sw.StorageWorker(database, limits=limits) as worker, worker.connect() as client:
        client.execute("create table t(a)")
        client.execute(f"insert into t {NUMBERS} select n from c limit 20000")
        done = subprocess.run(
            [sys.executable, "-c", ORDERLY_CHILD, worker.address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.stdout == "the state is the same\n", done.stderr


HALTED = """
import sys
import storage_worker as sw

with sw.connect(sys.argv[1]) as client:
    snap = client.snapshot().__enter__()
    raise SystemExit(0)
"""


def test_a_process_with_an_open_one_ends(worker: sw.StorageWorker, client: sw.Client) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HALTED, worker.address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
