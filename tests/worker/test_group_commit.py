"""Groups: whatever one request does, its mates commit, once; and what is undone runs again in its order."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_worker import exits
from storage_worker.peer import Job
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    OperationFailedError,
    RequestCancelledError,
    ResultTooLargeError,
    StorageError,
    StorageReplacedError,
)
from storage_worker.transaction import Transaction
from storage_worker.watch import FatalError
from tests.worker.workbench import OneClient, Workbench, end_deadline, failure, result, rows_of, when_started

ENDLESS = "with recursive c(n) as (values(1) union all select n + 1 from c) insert into t select n from c"
LONG = (
    "with recursive c(n) as (values(1) union all select n + 1 from c where n < 3000)"
    " insert into log select null, 'long' from c where n = 3000"
)

SCHEMA = (
    "create table t(a unique)",
    "create table log(n integer primary key, who)",
    "create table parent(id integer primary key)",
    "create table child(p references parent(id) deferrable initially deferred)",
    "create table noted(a)",
    "create table r_abort(a)",
    "create table r_fail(a)",
    "create table r_rollback(a)",
    "create trigger g1 after insert on r_abort begin insert into noted values(1); select raise(abort, 'x'); end",
    "create trigger g2 after insert on r_fail begin insert into noted values(1); select raise(fail, 'x'); end",
    "create trigger g3 after insert on r_rollback begin insert into noted values(1); select raise(rollback, 'x'); end",
    "create table r_before(a)",
    "create trigger g4 before insert on r_before when new.a = 2 begin select raise(fail, 'x'); end",
    "create table r_update(a)",
    "create trigger g5 before update on r_update begin insert into noted values(2); select raise(fail, 'x'); end",
    "insert into r_update values(1)",
    "create table cascade(p references parent(id) on delete cascade)",
    "create trigger g7 after delete on cascade begin select raise(fail, 'x'); end",
    "insert into parent values(5)",
    "insert into cascade values(5)",
    "insert into t values('free'), ('taken')",
)

BAD = (
    "insert into t values('bad'), ('taken')",
    "insert or abort into t values('bad'), ('taken')",
    "insert or fail into t values('bad'), ('taken')",
    "insert or rollback into t values('bad'), ('taken')",
    "update or fail t set a = 'bad'",
    "insert or fail into t values('bad'), ('taken') returning a",
    "insert or rollback into t values('bad'), ('taken') returning a",
    "insert into r_abort values('bad')",
    "insert into r_fail values('bad')",
    "insert into r_rollback values('bad')",
    "insert into r_before values(1), (2)",
    "update r_update set a = 'bad'",
    "replace into parent values(5)",
    "delete from parent",
    "insert into child values(77)",
    "insert into child values(77) returning p",
    "insert into nowhere values('bad')",
    "insert into t values(abs(-9223372036854775808))",
    "not even sql",
)

EVERYTHING = (
    "select 't', a from t union all select 'log', who from log union all select 'child', p from child union all"
    " select 'noted', a from noted union all select 'r', a from r_abort union all select 'r', a from r_fail"
    " union all select 'r', a from r_rollback union all select 'r', a from r_before"
    " union all select 'r', a from r_update"
    " union all select 'parent', id from parent union all select 'cascade', p from cascade"
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    with Workbench(tmp_path / "t.db") as found:
        for sql in SCHEMA:
            found.execute(sql)
        found.run_all()
        yield found


@pytest.mark.parametrize("sql", BAD)
def test_mates_of_a_failing_request_commit_once(bench: Workbench, sql: str) -> None:
    before = bench.rows(EVERYTHING)
    # Twice: the second time a text is known it may run without a savepoint.
    for _ in range(2):
        groups = bench.writer.status.groups
        mates = [bench.execute("insert into log(who) values(?)", "first")]
        bad = bench.execute(sql)
        mates += [bench.execute("insert into log(who) values(?)", "second"), bench.batch(LOG_TWICE)]
        done = bench.run_all()
        assert sorted(job.id for job in done) == sorted(job.id for job in [*mates, bad])
        assert bench.writer.status.groups == groups + 1
        assert failure(bad).outcome == "not_committed"
        for mate in mates:
            result(mate)
    added = [("log", who) for who in ("first", "second", "third")] * 2
    assert sorted(bench.rows(EVERYTHING)) == sorted(before + added)


LOG_TWICE = "insert into log(who) values('third')"


def test_a_statement_that_failed_once_is_run_with_care_from_then_on(bench: Workbench) -> None:
    sql = "insert into t values(?)"
    bench.execute(sql, "a")
    bench.execute(sql, "b")
    bench.run_all()
    for number, replays in ((1, 1), (2, 0), (3, 0)):
        mate = bench.execute("insert into log(who) values(?)", number, client=OneClient())
        bad = bench.execute(sql, "taken", client=OneClient())
        bench.run_all()
        result(mate)
        assert mate.replays == replays
        assert failure(bad).details["sqlite_name"] == "SQLITE_CONSTRAINT_UNIQUE"
    unbound = bench.execute("insert into log(who) values(?)", 1, 2, client=OneClient())
    mate = bench.execute("insert into log(who) values(?)", 4, client=OneClient())
    bench.run_all()
    assert failure(unbound).code == "storage_invalid_request"
    assert mate.replays == 0


@pytest.mark.parametrize("sql", BAD)
def test_a_failing_batch_leaves_nothing(bench: Workbench, sql: str) -> None:
    before = bench.rows(EVERYTHING)
    bad = bench.batch("insert into log(who) values('batch')", sql, "insert into log(who) values('behind')")
    mate = bench.execute("insert into log(who) values('mate')")
    bench.run_all()
    assert failure(bad).outcome == "not_committed"
    result(mate)
    assert sorted(bench.rows(EVERYTHING)) == sorted([*before, ("log", "mate")])


def test_a_group_of_failures_only(bench: Workbench) -> None:
    before = bench.rows(EVERYTHING)
    jobs = [bench.execute(sql) for sql in BAD for _ in range(3)]
    assert len(bench.run_all()) == len(jobs)
    assert {failure(job).outcome for job in jobs} == {"not_committed"}
    assert bench.rows(EVERYTHING) == before


def test_what_is_undone_runs_again_in_its_order(bench: Workbench) -> None:
    one, other = OneClient(), OneClient()
    expected = []
    for number in range(6):
        for client, name in ((one, "one"), (other, "other")):
            if number in {2, 4} and client is one:
                bench.execute("insert or rollback into t values('taken')", client=client)
            else:
                bench.execute("insert into log(who) values(?)", f"{name} {number}", client=client)
                expected.append(f"{name} {number}")
    bench.run_all()
    found = [who for (who,) in bench.rows("select who from log order by n")]
    for name in ("one", "other"):
        assert [who for who in found if name in who] == [who for who in expected if name in who]
    assert sorted(found) == sorted(expected)


def test_replays_are_bounded_and_then_a_request_runs_alone(bench: Workbench) -> None:
    runs: list[int] = []

    def count(tx: Transaction) -> int:
        runs.append(1)
        tx.execute("insert into log(who) values('counted')")
        return len(runs)

    mates = [bench.handler(count, client=OneClient()) for _ in range(3)]
    culprits = [
        bench.execute("insert or rollback into t values('taken')", client=OneClient()) for _ in range(6)
    ]
    bench.run_all()
    for culprit in culprits:
        assert failure(culprit).details["sqlite_name"] == "SQLITE_CONSTRAINT_UNIQUE"
    for mate in mates:
        result(mate)
        assert mate.replays == bench.limits.replays_max + 1
    assert len(runs) == 3 * (1 + bench.limits.replays_max + 1)
    assert bench.writer.status.solo_runs == 3
    assert len(bench.rows("select * from log")) == 3


def run_out_of_time(bench: Workbench, monkeypatch: pytest.MonkeyPatch, *jobs: Job) -> None:
    """Let the work budget of the group be over as soon as one of these runs beside others."""

    def end_budget(job: Job) -> None:
        if job in jobs:
            bench.writer.watch.hostage_ns = min(bench.writer.watch.hostage_ns, 1)

    when_started(bench, monkeypatch, end_budget)


@pytest.mark.parametrize("known", [False, True])
def test_a_long_write_holds_no_hostages(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if known:
        bench.execute(LONG)
        bench.run_all()
        bench.writer.database.own("delete from log")
    first = bench.execute("insert into log(who) values('first')", client=OneClient())
    long = bench.execute(LONG, client=OneClient())
    second = bench.execute("insert into log(who) values('second')", client=OneClient())
    run_out_of_time(bench, monkeypatch, long)
    assert bench.run() == []
    # It waits for its turn alone, and those whom it has held up come before it.
    assert bench.run() == [first, second]
    assert bench.run() == [long]
    assert bench.rows("select who from log order by n") == [("first",), ("second",), ("long",)]
    assert (first.replays, long.alone) == (1, True)
    for job in (first, long, second):
        assert rows_of(job).rows_changed == 1


def test_a_long_writes_own_clients_earlier_requests_stay_ahead_of_it(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.execute("insert into log(who) values('earlier')")
    long = bench.execute(LONG)
    bench.execute("insert into log(who) values('later')")
    run_out_of_time(bench, monkeypatch, long)
    bench.run_all()
    assert bench.rows("select who from log order by n") == [("earlier",), ("long",), ("later",)]


def test_a_long_read_in_a_write_lets_its_mates_commit_at_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:

    def read_long(tx: Transaction) -> int:
        tx.execute("insert into log(who) values('reader')")
        found = tx.scalar(
            "with recursive c(n) as (values(1) union all select n + 1 from c where n < 3000) select max(n) from c"
        )
        return int(found)

    mate = bench.execute("insert into log(who) values('mate')", client=OneClient())
    long = bench.handler(read_long, client=OneClient())
    run_out_of_time(bench, monkeypatch, long)
    assert bench.run() == [mate]
    assert mate.replays == 0
    assert bench.run() == [long]
    assert result(long) == 3000
    assert bench.rows("select who from log order by n") == [("mate",), ("reader",)]


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("drop trigger if exists late", "create trigger late after insert on t begin select 1; end"),
        ("create trigger if not exists early after insert on t begin select 1; end", "drop trigger early"),
        ("reindex", "create index late on t(a)"),
    ],
)
def test_what_changes_nothing_now_is_no_query(bench: Workbench, text: str, change: str) -> None:
    bench.execute("create trigger early after insert on t begin select 1; end")
    # SQLite calls it read-only as long as it finds nothing to do.
    for _ in range(2):
        bench.run_all()
        before = bench.rows("select name from sqlite_schema order by name")
        refused = bench.handler(lambda tx: tx.query(text))
        bench.run_all()
        assert failure(refused).code == "storage_invalid_request"
        assert bench.rows("select name from sqlite_schema order by name") == before
        bench.execute(change)


@pytest.mark.parametrize("known", [False, True])
def test_a_deadline_in_the_middle_of_a_group(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if known:
        bench.writer.database.shape(ENDLESS)
    mates = [bench.execute("insert into log(who) values(1)", client=OneClient()) for _ in range(3)]
    late = bench.execute(ENDLESS, client=OneClient())
    when_started(bench, monkeypatch, lambda job: end_deadline(job) if job is late else None)
    mates += [bench.execute("insert into log(who) values(1)", client=OneClient()) for _ in range(3)]
    bench.run_all()
    with pytest.raises(DeadlineExceededError) as caught:
        result(late)
    assert caught.value.outcome == "not_committed"
    assert caught.value.details == {"stage": "execution"}
    assert [rows_of(mate).rows_changed for mate in mates] == [1] * 6
    assert len(bench.rows("select * from log")) == 6
    assert len(bench.rows("select * from t")) == 2


def test_a_handler_that_outlives_its_deadline_is_not_committed(bench: Workbench) -> None:

    def dawdle(tx: Transaction) -> None:
        tx.execute("insert into log(who) values('late')")
        late.deadline_ns = 1

    late = bench.handler(dawdle)
    mate = bench.execute("insert into log(who) values('mate')", client=OneClient())
    bench.run_all()
    with pytest.raises(DeadlineExceededError):
        result(late)
    result(mate)
    assert bench.rows("select who from log") == [("mate",)]


def test_an_expired_request_is_answered_without_running(bench: Workbench) -> None:
    late = bench.execute("insert into log(who) values('late')", seconds=-1)
    mate = bench.execute("insert into log(who) values('mate')")
    bench.run_all()
    assert failure(late).details == {"stage": "waiting"}
    result(mate)
    assert bench.rows("select who from log") == [("mate",)]


def test_a_cancelled_write_takes_nothing_with_it(bench: Workbench) -> None:
    mate = bench.execute("insert into log(who) values('mate')", client=OneClient())

    def cancel_itself(tx: Transaction) -> None:
        tx.execute("insert into log(who) values('cancelled')")
        cancelled.cancelled = True
        tx.execute(ENDLESS)

    cancelled = bench.handler(cancel_itself, client=OneClient())
    bench.run_all()
    with pytest.raises(RequestCancelledError) as caught:
        result(cancelled)
    assert caught.value.outcome == "not_committed"
    result(mate)
    assert bench.rows("select who from log") == [("mate",)]


def test_a_request_cancelled_while_it_waits_to_run_again_does_not_run(bench: Workbench) -> None:
    runs: list[int] = []
    waiting = bench.handler(lambda tx: runs.append(1), client=OneClient())
    culprit = bench.execute("insert or rollback into t values('taken')", client=OneClient())
    assert bench.run() == [culprit]
    waiting.cancelled = True
    assert bench.run() == [waiting]
    with pytest.raises(RequestCancelledError):
        result(waiting)
    assert len(runs) == 1


def test_a_result_over_its_limit_rolls_back_its_write_only(bench: Workbench) -> None:
    mates = [bench.execute("insert into log(who) values('mate')")]
    large = bench.execute(
        "insert into log(who) values(1), (2), (3) returning zeroblob(400)", result_bytes=1000
    )
    mates.append(bench.execute("insert into log(who) values('mate') returning who"))
    assert len(bench.run()) == 3
    with pytest.raises(ResultTooLargeError):
        result(large)
    assert [rows_of(mate).rows_changed for mate in mates] == [1, 1]
    assert bench.rows("select who from log") == [("mate",), ("mate",)]


def test_calls_after_the_commit_are_made_once(bench: Workbench) -> None:
    called: list[str] = []

    def later(name: str, fails: bool) -> None:
        def work(tx: Transaction) -> None:
            tx.after_commit(lambda: called.append(name))
            if fails:
                raise ValueError

        bench.handler(work, client=OneClient())

    later("first", False)
    later("failed", True)
    bench.execute("insert or rollback into t values('taken')", client=OneClient())
    later("second", False)
    bench.run_all()
    assert called == ["first", "second"]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_call_after_the_commit_that_fails_is_only_logged(
    bench: Workbench, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []

    def bad() -> None:
        raise error("it broke")

    def work(tx: Transaction) -> int:
        tx.after_commit(bad)
        tx.after_commit(lambda: called.append("next"))
        tx.execute("insert into log(who) values('kept')")
        return 7

    job = bench.handler(work)
    bench.run_all()
    assert result(job) == 7
    assert called == ["next"]
    assert "it broke" in caplog.text
    assert bench.rows("select who from log") == [("kept",)]


def test_calls_after_the_commit_are_bounded(bench: Workbench) -> None:
    def work(tx: Transaction) -> None:
        for _ in range(bench.limits.after_commit_calls_max + 1):
            tx.after_commit(lambda: None)

    job = bench.handler(work)
    bench.run_all()
    with pytest.raises(StorageError):
        result(job)


def test_a_solo_request_shares_no_group(bench: Workbench) -> None:
    jobs = [bench.handler(lambda tx: None, client=OneClient(), solo=number == 1) for number in range(3)]
    assert bench.run() == [jobs[0], jobs[2]]
    assert bench.run() == [jobs[1]]


def test_a_transaction_that_cannot_be_begun_fails_requests_one_by_one(bench: Workbench) -> None:
    jobs = [bench.execute("insert into log(who) values(1)") for _ in range(2)]
    bench.writer.database.own("pragma query_only=1")
    assert bench.run() == [jobs[0]]
    with pytest.raises(OperationFailedError):
        result(jobs[0])
    bench.writer.database.own("pragma query_only=0")
    assert bench.run() == [jobs[1]]
    result(jobs[1])


class ReplacedFiles:
    """Files that are no longer those under the path."""

    def check(self) -> None:
        raise StorageReplacedError("another file lies in its place")


def test_whoever_has_an_answer_gets_it_where_the_worker_must_end(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = bench.execute("insert into log(who) values('late')", seconds=-1)
    written = bench.execute("insert into log(who) values('written')")
    monkeypatch.setattr(bench.writer, "files", ReplacedFiles())
    with pytest.raises(FatalError) as caught:
        bench.run()
    assert caught.value.done == [late, written]
    assert caught.value.status == exits.REPLACED
    assert failure(late).outcome == "not_committed"
    assert (failure(written).code, failure(written).outcome) == ("storage_replaced", "unknown")
