"""The traps that prototypes fell into: what a handler or a client's text could do to the worker's own."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from storage_worker.database.connection import Database
from storage_worker.database.faults import Aborted
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    DeclaredError,
    InvalidRequestError,
    NotPermittedError,
    OperationFailedError,
    RequestConflictError,
    ResultNotKeptError,
    ResultTooLargeError,
    StorageError,
    StorageFullError,
    StorageReplacedError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.receipts import Receipts
from storage_worker.recovery import FENCE
from storage_worker.runner import RELEASE, ROLLBACK_TO, SAVEPOINT
from storage_worker.transaction import DeadTransactionError, Transaction
from tests.worker.workbench import OneClient, Workbench, answer, end_deadline, failure, result, rows_of

ENDLESS = "with recursive c(n) as (values(1) union all select n + 1 from c) insert into t select n from c"
ENDLESS_READ = "with recursive c(n) as (values(1) union all select n + 1 from c) select max(n) from c"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    with Workbench(tmp_path / "t.db") as found:
        for sql in ("create table t(a)", "create table u(a unique)", "insert into u values(1)"):
            found.execute(sql)
        found.run_all()
        yield found


def between_mates(bench: Workbench, work: Callable[[Transaction], Any], **options: Any) -> Any:
    """Run a handler in a group of three; the answer's job. The mates must commit once."""
    kept = len(bench.rows("select * from t where a like 'mate%'"))
    mates = [bench.execute("insert into t values('mate 1')", client=OneClient())]
    job = bench.handler(work, client=OneClient(), **options)
    mates.append(bench.execute("insert into t values('mate 2')", client=OneClient()))
    bench.run_all()
    for mate in mates:
        assert rows_of(mate).rows_changed == 1
    assert len(bench.rows("select * from t where a like 'mate%'")) == kept + 2
    return job


def others(bench: Workbench) -> list[Any]:
    return [a for (a,) in bench.rows("select a from t where a not like 'mate%'")]


# What a handler swallows


@pytest.mark.parametrize("statement", [ENDLESS, ENDLESS_READ])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_handler_that_swallows_an_aborted_statement(
    bench: Workbench, statement: str, goes_on: bool
) -> None:
    seen: list[Exception] = []

    def swallow(tx: Transaction) -> str:
        tx.execute("insert into t values('before')")
        assert bench.writer.watch.job is not None
        end_deadline(bench.writer.watch.job)
        try:
            tx.execute(statement)
        except Exception as error:  # noqa: BLE001 - as a careless handler does
            seen.append(error)
        if goes_on:
            for _ in range(2):
                try:
                    tx.execute("insert into t values('after')")
                except Exception as error:  # noqa: BLE001
                    seen.append(error)
        return "all is well"

    job = between_mates(bench, swallow)
    with pytest.raises(DeadlineExceededError):
        result(job)
    assert isinstance(seen[0], Aborted)
    assert [type(error) for error in seen[1:]] == [DeadTransactionError] * (2 * goes_on)
    assert others(bench) == []


@pytest.mark.parametrize(
    "statement", ["insert or rollback into u values(1)", "insert or rollback into u values(1) returning a"]
)
def test_a_handler_that_swallows_a_rollback(bench: Workbench, statement: str) -> None:
    def swallow(tx: Transaction) -> None:
        try:
            tx.execute(statement)
        except OperationFailedError:
            tx.after_commit(never)

    job = between_mates(bench, swallow)
    assert failure(job).details["sqlite_name"] == "SQLITE_CONSTRAINT_UNIQUE"


def never() -> NoReturn:
    raise AssertionError("it was not committed")


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_full_database(bench: Workbench, swallows: bool, goes_on: bool) -> None:
    bench.writer.database.own("pragma max_page_count=40")

    def fill(tx: Transaction) -> str:
        tx.execute("insert into t values('before')")
        try:
            tx.execute("insert into t values(zeroblob(500000))")
        except StorageFullError:
            if not swallows:
                raise
        if goes_on:
            tx.execute("insert into t values('after')")
        return "done"

    job = between_mates(bench, fill)
    found = answer(job)
    if swallows and not hasattr(found, "code"):
        assert others(bench) == ["before"] + ["after"] * goes_on
    else:
        assert failure(job).code == "storage_full"
        assert failure(job).outcome == "not_committed"
        assert others(bench) == []


def test_an_error_that_a_handler_may_swallow(bench: Workbench) -> None:
    def insert_or_note(tx: Transaction) -> str:
        try:
            tx.execute("insert into u values(1)")
        except OperationFailedError:
            tx.execute("insert into t values('it was there')")
        try:
            tx.query(ENDLESS_READ.replace("from c)", "from c where n < 100)"))
            tx.query("select zeroblob(100000)")
        except ResultTooLargeError:
            tx.execute("insert into t values('it was large')")
        return "done"

    job = between_mates(bench, insert_or_note, result_bytes=1000)
    assert result(job) == "done"
    assert others(bench) == ["it was there", "it was large"]


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("insert into t values(1), (2), (3) returning zeroblob(400)", ResultTooLargeError),
        ("insert into t values(1), (2) returning cast(x'ff' as text)", InvalidRequestError),
        ("update t set a = a returning zeroblob(2000)", ResultTooLargeError),
    ],
)
@pytest.mark.parametrize("swallows", [False, True])
def test_a_half_read_returning(
    bench: Workbench, statement: str, error: type[StorageError], swallows: bool
) -> None:
    def read_half(tx: Transaction) -> None:
        try:
            tx.execute(statement)
        except error:
            if not swallows:
                raise

    job = between_mates(bench, read_half, result_bytes=1000)
    with pytest.raises(error) as caught:
        result(job)
    assert caught.value.outcome == "not_committed"
    assert others(bench) == []


@pytest.mark.parametrize(
    "statement",
    ["insert into t values('x')", "create table made(a)", "drop table t", "pragma user_version=5"],
)
def test_a_query_changes_nothing_even_where_its_refusal_is_swallowed(
    bench: Workbench, statement: str
) -> None:
    def swallow(tx: Transaction) -> None:
        with pytest.raises(InvalidRequestError):
            tx.query(statement)

    result(between_mates(bench, swallow))
    assert others(bench) == []
    assert bench.rows("select name from sqlite_schema where name in ('t', 'made')") == [("t",)]
    assert bench.rows("pragma user_version") == [(0,)]


# What a handler raises


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Bare(StorageError):
    code = "traps_bare"

    def __init__(self) -> None:  # it never calls the base's
        self.something = 1


class Odd(DeclaredError):
    code = "traps_odd"


def odd(**attributes: Any) -> Odd:
    error = Odd("an odd error")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def recurse() -> NoReturn:
    recurse()


ERRORS: list[BaseException] = [
    ValueError("plain"),
    ValueError("\udcff lone surrogate"),
    ValueError("x" * 100_000),
    KeyError(object()),
    Mute(),
    Bare(),
    StopIteration(),
    MemoryError(),
    AssertionError(),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    BaseExceptionGroup("several", [SystemExit(), ValueError()]),
    UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
    odd(),
    odd(message=7),
    odd(message=Mute()),
    odd(outcome="maybe"),
    odd(outcome="committed"),
    odd(retryable="often"),
    odd(retry_after=float("nan")),
    odd(retry_after="soon"),
    odd(details=None),
    odd(details={"a": object()}),
    odd(details={"a": float("nan"), "b": 2**70, "c": "x" * 100_000}),
    odd(details={str(number): "x" * 2000 for number in range(10_000)}),
    odd(wire_code=5),
    WorkerUnavailableError("a handler's lie"),
    StorageReplacedError("a handler's lie"),
    ResultNotKeptError("a handler's lie"),
    RequestConflictError("a handler's lie"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("key", [None, "k"])
def test_whatever_a_handler_raises(bench: Workbench, error: BaseException, key: str | None) -> None:
    def fails(tx: Transaction) -> None:
        tx.execute("insert into t values('gone')")
        raise error

    job = between_mates(bench, fails, key=key)
    found = failure(job)
    assert found.outcome == "not_committed"
    assert found.code
    assert others(bench) == []
    assert bench.rows("select count(*) from _sw_receipts") == [(0,)]


def test_a_handler_that_never_stops_calling_itself(bench: Workbench) -> None:
    job = between_mates(bench, lambda tx: recurse())
    assert failure(job).details["exception"] == "RecursionError"


@pytest.mark.parametrize(
    "value",
    [object(), "\udcff", 2**70, (1 for _ in range(2)), {object(): 1}, "x" * 2000],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("key", [None, "k"])
def test_a_result_that_cannot_be_sent(bench: Workbench, value: object, key: str | None) -> None:
    def give(tx: Transaction) -> object:
        tx.execute("insert into t values('gone')")
        return value

    job = between_mates(bench, give, key=key, result_bytes=1000)
    assert failure(job).outcome == "not_committed"
    assert others(bench) == []
    assert bench.rows("select count(*) from _sw_receipts") == [(0,)]


def test_a_request_without_memory_for_its_statement_is_an_error_of_its_own(bench: Workbench) -> None:
    job = between_mates(bench, lambda tx: tx.execute("insert into t values(zeroblob(100000000))"))
    assert failure(job).details["sqlite_name"] == "SQLITE_TOOBIG"


# Kept failures


class KeptError(DeclaredError):
    code = "traps_kept"


def note_and_fail(tx: Transaction) -> None:
    tx.execute("insert into t values('diagnosis')")
    tx.fail(KeptError("it failed", details={"n": 1}), keep=True)


def test_a_failure_that_keeps_what_was_written(bench: Workbench) -> None:
    job = between_mates(bench, note_and_fail)
    found = failure(job)
    assert (found.code, found.outcome, found.details) == ("traps_kept", "committed", {"n": 1})
    assert others(bench) == ["diagnosis"]


def test_a_kept_failure_is_answered_again_under_its_key(bench: Workbench) -> None:
    first = between_mates(bench, note_and_fail, key="k")
    again = between_mates(bench, note_and_fail, key="k")
    assert failure(first).id != failure(again).id
    assert (failure(again).code, failure(again).outcome) == ("traps_kept", "committed")
    assert failure(again).details == {"n": 1}
    assert others(bench) == ["diagnosis"]


def test_a_kept_failure_makes_its_calls_after_the_commit(bench: Workbench) -> None:
    called: list[int] = []

    def work(tx: Transaction) -> None:
        tx.after_commit(lambda: called.append(1))
        note_and_fail(tx)

    between_mates(bench, work, key="k")
    between_mates(bench, work, key="k")
    assert called == [1]


def test_one_error_object_kept_once_and_not_another_time(bench: Workbench) -> None:
    error = KeptError("always the same one")

    def work(keep: bool) -> Callable[[Transaction], None]:
        def fail(tx: Transaction) -> None:
            tx.execute("insert into t values(?)", (f"keep {keep}",))
            tx.fail(error, keep=keep)

        return fail

    outcomes = [failure(between_mates(bench, work(keep))).outcome for keep in (True, False, True)]
    assert outcomes == ["committed", "not_committed", "committed"]
    assert others(bench) == ["keep True", "keep True"]


def test_a_kept_failure_with_a_violated_foreign_key_keeps_nothing(bench: Workbench) -> None:
    bench.execute("create table parent(id integer primary key)")
    bench.execute("create table child(p references parent(id) deferrable initially deferred)")
    bench.run_all()

    def work(tx: Transaction) -> None:
        tx.execute("insert into child values(9)")
        note_and_fail(tx)

    for key in (None, "k"):
        job = between_mates(bench, work, key=key)
        assert failure(job).details["sqlite_name"] == "SQLITE_CONSTRAINT_FOREIGNKEY"
        assert failure(job).outcome == "not_committed"
    assert others(bench) == []
    assert bench.rows("select count(*) from _sw_receipts") == [(0,)]
    assert bench.writer.receipts.status.kept == 0


def test_a_kept_failure_after_a_swallowed_rollback_keeps_nothing(bench: Workbench) -> None:
    def work(tx: Transaction) -> None:
        with pytest.raises(OperationFailedError):
            tx.execute("insert or rollback into u values(1)")
        tx.fail(KeptError("it failed"), keep=True)

    job = between_mates(bench, work)
    assert failure(job).outcome == "not_committed"
    assert failure(job).details["sqlite_name"] == "SQLITE_CONSTRAINT_UNIQUE"


def test_a_kept_failure_that_cannot_be_sent_is_still_kept(bench: Workbench) -> None:
    def work(tx: Transaction) -> None:
        tx.execute("insert into t values('diagnosis')")
        tx.fail(odd(details={"a": float("nan")}, retryable="often"), keep=True)

    job = between_mates(bench, work)
    assert failure(job).outcome == "committed"
    assert others(bench) == ["diagnosis"]


# A transaction that outlives its request


def test_a_transaction_dies_with_its_request(bench: Workbench) -> None:
    leaked: list[Transaction] = []
    result(between_mates(bench, leaked.append))
    (old,) = leaked
    for call in (
        lambda: old.execute("insert into t values('leaked')"),
        lambda: old.query("select 1"),
        lambda: old.after_commit(never),
    ):
        with pytest.raises(DeadTransactionError):
            call()
    job = between_mates(bench, lambda tx: old.execute("insert into t values('leaked')"))
    assert failure(job).code == "storage_operation_failed"
    assert others(bench) == []


# Texts that are the worker's own


class Overheard:
    """A database that only notes what the worker says to it."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def own(self, sql: str, parameters: object = ()) -> list[tuple[int]]:
        self.texts.append(sql)
        return [(0,)] if "count(*)" in sql else []


def own_texts() -> list[str]:
    """The statements that the worker prepares for itself, letter by letter."""
    overheard = Overheard()
    receipts = Receipts(cast(Database, overheard), DEFAULT_LIMITS)
    receipts.find("k", b"")
    receipts.outcome("k", fence=True)
    receipts.trim(5)
    own = ["begin immediate", "commit", "rollback", SAVEPOINT, RELEASE, ROLLBACK_TO, FENCE]
    return list(dict.fromkeys([*overheard.texts, *own]))


@pytest.mark.parametrize("text", own_texts())
def test_a_client_says_what_the_worker_says(tmp_path: Path, text: str) -> None:
    """Before the worker has ever said it, between, and after; once by a statement, once in a handler."""
    with Workbench(tmp_path / "t.db", statement_cache_count=50) as bench:
        reads = text.startswith("select")
        values = [1] * text.count("?")
        for key in ("first", "second", "third"):
            said = bench.execute(text, *values)
            bench.execute("create table if not exists t(a)", key=f"make {key}")
            mate = bench.execute("insert into t values(?)", key, key=key)
            again = bench.execute(text, *values)
            handled = bench.handler(lambda tx: tx.execute(text, values))
            last = bench.execute("insert into t values('last') returning a")
            bench.run_all()
            for job in (said, again, handled):
                if reads:
                    result(job)
                else:
                    with pytest.raises(NotPermittedError):
                        result(job)
            assert rows_of(mate).rows_changed == 1
            assert rows_of(last).rows == [("last",)]
        assert len(bench.rows("select * from t")) == 6
        assert bench.rows("select count(*) from _sw_receipts") == [(6,)]


@pytest.mark.parametrize(
    "sql",
    [
        "create temp table t(a)",
        "create temporary table if not exists t(a)",
        "create table temp.t(a)",
        "create temp view t as select 1",
        "create view temp.t as select 1",
        "create temp trigger g after insert on t begin delete from t; end",
        "create trigger temp.g after insert on main.t begin delete from t; end",
        "create virtual table temp.t using fts5(a)",
        "create index temp.i on t(a)",
        "create temp table t as select 1",
    ],
)
def test_nobody_diverts_the_others_statements(bench: Workbench, sql: str) -> None:
    said = bench.execute(sql)
    handled = bench.handler(lambda tx: tx.execute(sql))
    mate = bench.execute("insert into t values('mate')")
    bench.run_all()
    for job in (said, handled):
        assert failure(job).code in {"storage_not_permitted", "storage_operation_failed"}
    result(mate)
    assert bench.rows("select a from main.t") == [("mate",)]
    assert bench.rows("select count(*) from temp.sqlite_schema") == [(0,)]


def test_a_trigger_that_writes_the_workers_tables_fails_whoever_fires_it(bench: Workbench) -> None:
    bench.execute("create trigger g after insert on u begin delete from _sw_receipts; end")
    bench.execute("insert into t values('kept')", key="k")
    fires = bench.execute("insert into u values(2)")
    bench.run_all()
    assert failure(fires).code == "storage_not_permitted"
    assert bench.rows("select count(*) from _sw_receipts") == [(1,)]


# The watch on a running request ends nothing of the worker's own


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("key", [None, "k"])
def test_the_workers_own_statements_are_not_ended_half_way(
    tmp_path: Path, fails: bool, key: str | None
) -> None:
    with Workbench(tmp_path / "t.db", progress_steps=1) as bench:
        bench.execute("create table t(a)")
        bench.run_all()

        def work(tx: Transaction) -> None:
            tx.execute("insert into t values('whole')")
            bench.writer.watch.until_ns = 1  # from now on every step of a watched statement ends it
            if fails:
                raise ValueError

        for _ in range(2):
            mate = bench.execute("insert into t values('mate')")
            job = bench.handler(work, key=key)
            while bench.lane.requests:
                bench.writer.watch.until_ns = 0
                bench.run()
            rows = [a for (a,) in bench.rows("select a from t")]
            if fails:
                assert failure(job).outcome == "not_committed"
                assert rows == ["mate"]
            else:
                result(job)
                assert sorted(rows) == ["mate", "whole"]
            result(mate)
            bench.writer.database.own("delete from t")
            bench.writer.database.own("delete from _sw_receipts")


@pytest.mark.parametrize("asked", range(1, 10))
@pytest.mark.parametrize("why", ["cancelled", "hostage"])
def test_a_plain_statement_that_is_ended_when_it_is_done_has_taken_no_effect(
    tmp_path: Path, asked: int, why: str
) -> None:
    """SQLite asks once more after a statement's last step; its end then undoes nothing by itself."""
    with Workbench(tmp_path / "t.db", progress_steps=1) as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        bench.execute("insert into t values(?)", 0)
        bench.run_all()
        watch = bench.writer.watch
        mate = bench.execute("insert into t values(?)", 1)
        job = bench.execute("insert into t values(?)", 2)
        left = asked

        def stop() -> bool:
            nonlocal left
            if watch.job is job:
                left -= 1
                if left == 0 and why == "hostage":
                    watch.hostage_ns = 1
                job.cancelled = job.cancelled or (left <= 0 and why == "cancelled")
            return watch.stop()

        bench.writer.database.set_progress(stop)
        bench.run_all()
        assert left <= 0
        assert result(mate).rows_changed == 1
        if why == "cancelled":
            assert failure(job).outcome == "not_committed"
        else:
            assert result(job).rows_changed == 1
        assert bench.rows("select a from t order by a") == [(0,), (1,)] + [(2,)] * (why == "hostage")
