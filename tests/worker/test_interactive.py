"""Interactive transactions: what their owner sees, what ends them, and that nothing of an ended one stays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_worker.execution import Served
from storage_worker.peer import Job
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    DeclaredError,
    InvalidRequestError,
    OperationFailedError,
    RequestConflictError,
    StorageError,
    TransactionExpiredError,
)
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import (
    BACKUP,
    BEGIN,
    COMMIT,
    OUTCOME,
    ROLLBACK,
    SAVEPOINT,
    Backup,
    Begin,
    KnownOutcome,
    Nothing,
    OutcomeQuestion,
    Savepoint,
)
from storage_worker.transaction import Transaction
from tests.worker.workbench import OneClient, Workbench, end_deadline, failure, result, rows_of, when_started

ENDLESS = "with recursive c(n) as (values(1) union all select n + 1 from c) insert into t select n from c"
ENDLESS_READ = "with recursive c(n) as (values(1) union all select n + 1 from c) select max(n) from c"


class Owner:
    """A client that has begun a transaction on a workbench; each call runs at once."""

    def __init__(self, bench: Workbench, lease_ms: int = 60_000) -> None:
        self.bench = bench
        self.client = OneClient()
        job = bench.ask(BEGIN, Begin(lease_ms), client=self.client)
        assert bench.run() == [job]
        self.number: int = result(job)

    def send(self, operation: Operation[Any, Any], arguments: object, **options: Any) -> Job:
        return self.bench.ask(operation, arguments, client=self.client, transaction=self.number, **options)

    def finish(self, job: Job) -> Any:
        assert job in self.bench.step()
        return result(job)

    def do(self, operation: Operation[Any, Any], arguments: object = Nothing(), **options: Any) -> Any:
        return self.finish(self.send(operation, arguments, **options))

    def execute(self, sql: str, *parameters: object, **options: Any) -> Any:
        options |= {"client": self.client, "transaction": self.number}
        return self.finish(self.bench.execute(sql, *parameters, **options))

    def query(self, sql: str, **options: Any) -> list[tuple[Any, ...]]:
        options |= {"client": self.client, "transaction": self.number}
        job = self.bench.query(sql, **options)
        self.finish(job)
        return rows_of(job).rows

    def handler(self, work: Any, **options: Any) -> Any:
        options |= {"client": self.client, "transaction": self.number}
        return self.finish(self.bench.handler(work, **options))

    def savepoint(self, action: str, name: str) -> None:
        self.do(SAVEPOINT, Savepoint(action, name))  # type: ignore[arg-type]

    def commit(self, **options: Any) -> None:
        self.do(COMMIT, **options)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    with Workbench(tmp_path / "t.db") as found:
        for sql in (
            "create table t(a unique)",
            "create table parent(id integer primary key)",
            "create table child(p references parent(id) deferrable initially deferred)",
        ):
            found.execute(sql)
        found.run_all()
        yield found


@pytest.fixture
def owner(bench: Workbench) -> Owner:
    return Owner(bench)


def kept(bench: Workbench) -> list[Any]:
    return [a for (a,) in bench.rows("select a from t order by rowid")]


def assert_ended(bench: Workbench, owner: Owner) -> None:
    """Nothing of the transaction is left, its owner is told so, and others are served."""
    assert not bench.writer.interactive.is_open
    assert kept(bench) == []
    with pytest.raises(TransactionExpiredError):
        owner.execute("insert into t values('late')")
    other = bench.execute("insert into t values('other')")
    bench.run_all()
    result(other)
    assert kept(bench) == ["other"]


def test_its_owner_sees_its_own_changes(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    assert owner.query("select a from t") == [(1,)]
    owner.execute("create table made(a)")
    owner.execute("insert into made values(2)")
    owner.commit()
    assert kept(bench) == [1]
    assert bench.rows("select a from made") == [(2,)]


def test_a_rollback_leaves_nothing(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)", key="k")
    owner.do(ROLLBACK)
    assert bench.rows("select count(*) from _sw_receipts") == [(0,)]
    assert bench.writer.receipts.status.kept == 0
    assert_ended(bench, owner)


@pytest.mark.parametrize("lease_ms", [-1, 60_001, 2**62])
def test_a_lease_is_bounded(bench: Workbench, lease_ms: int) -> None:
    with pytest.raises(InvalidRequestError):
        Owner(bench, lease_ms)
    assert not bench.writer.database.in_transaction


def test_a_failed_statement_ends_nothing(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    for sql in (
        "insert into t values(2), (1)",
        "insert or fail into t values(2), (1)",
        "insert into nowhere values(1)",
        "commit",
        "create temp table x(a)",
    ):
        with pytest.raises(StorageError):
            owner.execute(sql)
    owner.execute("insert into t values(3)")
    owner.commit()
    assert kept(bench) == [1, 3]


@pytest.mark.parametrize(
    "sql", ["insert or rollback into t values(1)", "insert or rollback into t values(1) returning a"]
)
def test_what_ends_its_transaction_says_so(bench: Workbench, owner: Owner, sql: str) -> None:
    owner.execute("insert into t values(1)")
    waiting = bench.execute("insert into t values(2)", client=owner.client, transaction=owner.number)
    bench.writer.interactive.lane.remove(waiting)
    with pytest.raises(OperationFailedError) as caught:
        owner.execute(sql)
    assert caught.value.details["transaction_ended"] is True
    assert caught.value.details["sqlite_name"] == "SQLITE_CONSTRAINT_UNIQUE"
    assert caught.value.outcome == "not_committed"
    assert_ended(bench, owner)


@pytest.mark.parametrize("sql", [ENDLESS, ENDLESS_READ])
@pytest.mark.parametrize("known", [False, True])
def test_a_deadline_that_ends_a_statement_ends_the_transaction(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, sql: str, known: bool
) -> None:
    if known:
        bench.writer.database.shape(sql)
    owner = Owner(bench)
    owner.execute("insert into t values('before')")
    when_started(bench, monkeypatch, end_deadline)
    with pytest.raises(DeadlineExceededError) as caught:
        owner.execute(sql)
    monkeypatch.undo()
    assert caught.value.details["transaction_ended"] is True
    assert "rolled back" in caught.value.message
    assert_ended(bench, owner)


def test_a_deadline_that_a_handler_swallows_ends_it_too(
    bench: Workbench, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallow(tx: Transaction) -> None:
        try:
            tx.execute(ENDLESS)
        except Exception:  # noqa: BLE001 - as a careless handler does
            tx.after_commit(lambda: None)

    when_started(bench, monkeypatch, end_deadline)
    with pytest.raises(DeadlineExceededError):
        owner.handler(swallow)
    monkeypatch.undo()
    assert_ended(bench, owner)


def test_a_deadline_in_the_queue_ends_nothing(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    with pytest.raises(DeadlineExceededError):
        owner.execute("insert into t values(2)", seconds=-1)
    owner.execute("insert into t values(3)")
    owner.commit()
    assert kept(bench) == [1, 3]


def test_a_lease_that_ends_in_a_statement(bench: Workbench) -> None:
    owner = Owner(bench, lease_ms=50)
    owner.execute("insert into t values('before')")
    with pytest.raises(TransactionExpiredError) as caught:
        owner.execute(ENDLESS)
    assert caught.value.details["transaction_ended"] is True
    assert_ended(bench, owner)


def test_a_lease_that_ends_between_statements(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    interactive = bench.writer.interactive
    assert interactive.end_if_lost(interactive.end_ns - 1) == []
    waiting = owner.send(ROLLBACK, Nothing())
    assert interactive.end_if_lost(interactive.end_ns) == [waiting]
    assert failure(waiting).code == "storage_transaction_expired"
    assert "lease" in failure(waiting).message
    assert_ended(bench, owner)


def test_a_client_that_is_lost(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    owner.client.closed = True
    bench.writer.interactive.end_if_lost(0)
    assert_ended(bench, owner)


def test_a_commit_after_its_deadline_commits_nothing(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    with pytest.raises(DeadlineExceededError):
        owner.commit(seconds=-1)
    if bench.writer.interactive.is_open:
        owner.do(ROLLBACK)
    assert_ended(bench, owner)


def test_what_it_sent_behind_its_begin_without_the_number_is_refused(bench: Workbench) -> None:
    client, other = OneClient(), OneClient()
    begin = bench.ask(BEGIN, Begin(1000), client=client)
    behind = [
        bench.execute("insert into t values(1)", client=client),
        bench.ask(BEGIN, Begin(1000), client=client),
    ]
    others = bench.execute("insert into t values(2)", client=other)
    assert bench.run() == [begin, *behind]
    for job in behind:
        with pytest.raises(InvalidRequestError):
            result(job)
    assert not others.frame


def test_no_transaction_or_backup_begins_inside(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    with pytest.raises(InvalidRequestError):
        owner.do(BEGIN, Begin(1000))
    with pytest.raises(InvalidRequestError):
        owner.do(BACKUP, Backup("/nowhere/at/all.db"))
    owner.commit()
    assert kept(bench) == [1]


def test_the_numbers_of_others_and_of_ended_ones_are_refused(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    owner.do(ROLLBACK)
    ended, owner = owner, Owner(bench)
    owner.execute("insert into t values(1)")
    for number in (ended.number, owner.number + 1, 2**63):
        job = bench.execute("insert into t values(2)", client=owner.client, transaction=number)
        assert job in bench.step()
        with pytest.raises(TransactionExpiredError):
            result(job)
    stranger = bench.execute("insert into t values(2)", client=OneClient(), transaction=owner.number)
    assert stranger in bench.step()
    with pytest.raises(TransactionExpiredError):
        result(stranger)
    owner.commit()
    assert kept(bench) == [1]


def test_requests_behind_the_commit_are_told(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    commit = owner.send(COMMIT, Nothing())
    behind = owner.send(COMMIT, Nothing())
    assert bench.step() == [commit, behind]
    assert result(commit) is None
    with pytest.raises(TransactionExpiredError):
        result(behind)
    assert kept(bench) == [1]


# Savepoints


def test_savepoints(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    owner.savepoint("open", "a")
    owner.execute("insert into t values(2)")
    owner.savepoint("open", "b")
    owner.execute("insert into t values(3)")
    owner.savepoint("rollback", "b")
    owner.execute("insert into t values(4)")
    owner.savepoint("release", "b")
    owner.savepoint("rollback", "a")
    owner.savepoint("rollback", "a")
    with pytest.raises(InvalidRequestError):
        owner.savepoint("rollback", "b")
    owner.execute("insert into t values(5)")
    owner.savepoint("release", "a")
    with pytest.raises(InvalidRequestError):
        owner.savepoint("release", "a")
    owner.commit()
    assert kept(bench) == [1, 5]


def test_savepoints_of_one_name_are_nested(bench: Workbench, owner: Owner) -> None:
    # As in SQLite itself, capital and small letters are the same.
    owner.savepoint("open", "a")
    owner.execute("insert into t values(1)")
    owner.savepoint("open", "A")
    owner.execute("insert into t values(2)")
    owner.savepoint("rollback", "a")
    owner.savepoint("release", "a")
    assert owner.query("select a from t") == [(1,)]
    owner.savepoint("rollback", "A")
    assert owner.query("select a from t") == []
    owner.savepoint("release", "A")
    owner.commit()
    assert kept(bench) == []


@pytest.mark.parametrize(
    "name", ["", "1a", "_sw_r", "a b", "a;commit", 'a"', "a'", "ä", "a" * 64, "a\0", "a\n"]
)
def test_a_savepoints_name_is_an_identifier(bench: Workbench, owner: Owner, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        owner.savepoint("open", name)
    owner.savepoint("open", "commit")
    owner.savepoint("release", "commit")
    owner.commit()


def test_savepoints_are_bounded(bench: Workbench, owner: Owner) -> None:
    for number in range(bench.limits.savepoints_max):
        owner.savepoint("open", f"s{number}")
    with pytest.raises(InvalidRequestError):
        owner.savepoint("open", "more")
    owner.savepoint("release", "s0")
    owner.commit()


# Foreign keys


def test_a_deferred_violation_may_be_mended_until_the_commit(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into child values(7)")
    owner.execute("insert into t values(1)")
    with pytest.raises(InvalidRequestError):
        owner.commit(key="k")
    owner.execute("insert into parent values(7)")
    owner.commit(key="k")
    assert kept(bench) == [1]


def test_a_violation_that_is_not_mended_can_be_rolled_back(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into child values(7)")
    owner.execute("insert into child values(8) returning p")
    with pytest.raises(InvalidRequestError):
        owner.commit()
    owner.do(ROLLBACK)
    assert_ended(bench, owner)


# Request keys


def test_a_repeated_commit_is_answered_and_happens_once(bench: Workbench, owner: Owner) -> None:
    owner.execute("insert into t values(1)")
    owner.commit(key="k")
    again = Owner(bench)
    again.execute("insert into t values(2)")
    again.commit(key="k")
    assert kept(bench) == [1]
    assert bench.rows("select count(*) from _sw_receipts") == [(1,)]
    assert bench.writer.receipts.status.kept == 1


def test_a_commit_under_a_key_of_something_else(bench: Workbench) -> None:
    bench.execute("insert into t values(1)", key="k")
    bench.ask(OUTCOME, OutcomeQuestion("fenced", True))
    bench.run_all()
    owner = Owner(bench)
    owner.execute("insert into t values(2)")
    for key in ("k", "fenced"):
        with pytest.raises(RequestConflictError):
            owner.commit(key=key)
    owner.commit(key="its own")
    assert kept(bench) == [1, 2]


def test_keys_inside(bench: Workbench, owner: Owner) -> None:
    first = owner.execute("insert into t values(1)", key="k")
    assert owner.execute("insert into t values(1)", key="k") == first
    with pytest.raises(RequestConflictError):
        owner.execute("insert into t values(2)", key="k")
    owner.savepoint("open", "s")
    owner.execute("insert into t values(3)", key="undone")
    owner.savepoint("rollback", "s")
    outcome = owner.do(OUTCOME, OutcomeQuestion("undone"))
    assert outcome == KnownOutcome("not_found")
    owner.commit()
    assert kept(bench) == [1]
    assert bench.rows("select key from _sw_receipts") == [("k",)]
    assert bench.writer.receipts.status.kept == 1


# Handlers of stores


def test_calls_after_the_commit_wait_for_it(bench: Workbench, owner: Owner) -> None:
    called: list[str] = []

    def later(name: str) -> None:
        owner.handler(lambda tx: tx.after_commit(lambda: called.append(name)))

    later("first")
    owner.savepoint("open", "s")
    later("undone")
    owner.savepoint("rollback", "s")
    later("second")
    assert called == []
    owner.commit()
    assert called == ["first", "second"]
    for end in (ROLLBACK, COMMIT):
        again = Owner(bench)
        again.handler(lambda tx: tx.after_commit(lambda: called.append("third")))
        again.do(end)
    assert called == ["first", "second", "third"]


def test_calls_after_the_commit_are_bounded_for_the_whole(bench: Workbench, owner: Owner) -> None:
    for _ in range(bench.limits.after_commit_calls_max):
        owner.handler(lambda tx: tx.after_commit(lambda: None))
    with pytest.raises(InvalidRequestError):
        owner.handler(lambda tx: tx.after_commit(lambda: None))
    owner.commit()


class KeptError(DeclaredError):
    code = "traps_kept"


def test_a_kept_failure_is_kept_by_the_commit(bench: Workbench, owner: Owner) -> None:
    def note(tx: Transaction) -> None:
        tx.execute("insert into t values('diagnosis')")
        tx.fail(KeptError("it failed"), keep=True)

    with pytest.raises(StorageError) as caught:
        owner.handler(note, key="k")
    assert caught.value.code == "traps_kept"
    assert caught.value.outcome == "not_committed"
    owner.commit()
    assert kept(bench) == ["diagnosis"]
    again = bench.handler(note, key="k")
    bench.run_all()
    assert failure(again).outcome == "committed"


def test_a_stores_read_inside_reads_only(bench: Workbench, owner: Owner) -> None:
    operation = Operation[[], Any]("traps.read", "read", Nothing, Any)

    def read(tx: Transaction, _: object) -> Any:
        with pytest.raises(InvalidRequestError):
            tx.execute("insert into t values('written by a read')")
        return tx.scalar("select a from t")

    bench.operations["traps.read"] = Served(operation, read)
    owner.execute("insert into t values('own')")
    assert owner.do(operation) == "own"
    with pytest.raises(InvalidRequestError):
        owner.query("create table made(a)")
    owner.commit()
    assert kept(bench) == ["own"]
    assert bench.rows("select name from sqlite_schema where name = 'made'") == []
