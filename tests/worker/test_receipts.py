"""Request keys: a write that carries one happens once, and its outcome can be asked for."""

import dataclasses
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage_worker.background import TrimReceipts
from storage_worker.protocol.envelope import ARGUMENTS_FOLLOW, Cancel, Failure, OutgoingRequest, Reply
from storage_worker.protocol.errors import (
    InvalidRequestError,
    OperationFailedError,
    RequestConflictError,
    ResultNotKeptError,
    ResultTooLargeError,
)
from storage_worker.protocol.statements import (
    BATCH,
    BEGIN,
    EXECUTE,
    OUTCOME,
    ROLLBACK,
    Batch,
    Begin,
    KnownOutcome,
    Nothing,
    OutcomeQuestion,
    Statement,
)
from storage_worker.receipts import NOTHING, fingerprint
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.raw import wait_until_waiting
from tests.worker.workbench import OneClient, Workbench, end_deadline, failure, result, rows_of

INSERT = "insert into t(a) values(?) returning id, a"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    with Workbench(tmp_path / "t.db", receipt_result_bytes_max=1000) as found:
        for sql in (
            "create table t(id integer primary key, a)",
            "create table u(a unique)",
            "insert into u values(1)",
        ):
            found.execute(sql)
        found.run_all()
        yield found


def values(bench: Workbench) -> list[Any]:
    return [a for (a,) in bench.rows("select a from t order by id")]


def assert_receipts(bench: Workbench, *keys: str) -> None:
    """These are kept and no others, and the count that trimming goes by is right."""
    assert sorted(key for (key,) in bench.rows("select key from _sw_receipts")) == sorted(keys)
    assert bench.writer.receipts.status.kept == len(keys)
    assert bench.writer.receipts.unsettled == NOTHING


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("sql", [INSERT, "insert into t(a) values(?)"])
def test_the_same_content_again(bench: Workbench, together: bool, sql: str) -> None:
    bench.execute(sql, 0)  # a text that is known could do without a savepoint
    bench.run_all()
    jobs = []
    for _ in range(3):
        jobs.append(bench.execute(sql, 7, key="k", client=OneClient()))
        if not together:
            bench.run_all()
    bench.run_all()
    assert values(bench) == [0, 7]
    assert rows_of(jobs[0]) == rows_of(jobs[1]) == rows_of(jobs[2])
    assert rows_of(jobs[2]).last_insert_rowid == 2
    assert bench.writer.receipts.status.answered_again == 2
    assert_receipts(bench, "k")


def test_other_content_is_a_conflict(bench: Workbench) -> None:
    bench.execute(INSERT, 7, key="k")
    others = [
        bench.execute(INSERT, 8, key="k"),
        bench.execute(INSERT, "7", key="k"),
        bench.execute(INSERT, 7.0, key="k"),
        bench.execute(INSERT + " ", 7, key="k"),
        bench.ask(BATCH, Batch([Statement(INSERT, [7])]), key="k"),
        bench.ask(EXECUTE, Statement(INSERT, {"1": 7}), key="k"),
    ]
    bench.run_all()
    for job in others:
        with pytest.raises(RequestConflictError) as caught:
            result(job)
        assert caught.value.details["key"] == "k"
    assert values(bench) == [7]
    assert_receipts(bench, "k")


def test_a_result_too_large_to_keep(bench: Workbench) -> None:
    first = bench.execute("insert into t(a) values(zeroblob(2000)) returning a", key="k")
    again = bench.execute("insert into t(a) values(zeroblob(2000)) returning a", key="k")
    outcome = bench.ask(OUTCOME, OutcomeQuestion("k"))
    bench.run_all()
    assert len(rows_of(first).scalar()) == 2000
    with pytest.raises(ResultNotKeptError) as caught:
        result(again)
    assert caught.value.outcome == "committed"
    assert result(outcome) == KnownOutcome("committed", "sql.execute", None)
    assert len(values(bench)) == 1
    assert_receipts(bench, "k")


def test_a_repeat_that_allows_a_smaller_result(bench: Workbench) -> None:
    bench.execute(INSERT, "x" * 500, key="k")
    bench.run_all()
    small = bench.execute(INSERT, "x" * 500, key="k", result_bytes=100)
    large = bench.execute(INSERT, "x" * 500, key="k")
    bench.run_all()
    with pytest.raises(ResultTooLargeError) as caught:
        result(small)
    assert caught.value.outcome == "committed"
    assert rows_of(large).rows == [(1, "x" * 500)]
    assert values(bench) == ["x" * 500]


def test_a_failed_request_leaves_no_receipt(bench: Workbench) -> None:
    failed = [
        bench.execute("insert into u values(1)", key="k1"),
        bench.execute("insert or rollback into u values(1)", key="k2"),
        bench.execute("insert into t(a) values(1), (2) returning zeroblob(9000)", key="k3", result_bytes=100),
        bench.execute("insert into nowhere values(1)", key="k4"),
        bench.ask(EXECUTE, Nothing(), key="k5"),
        bench.execute(INSERT, 1, key="k6", seconds=-1),
    ]
    bench.run_all()
    for job in failed:
        assert failure(job).outcome == "not_committed"
    assert_receipts(bench)
    bench.execute("delete from u")
    again = bench.execute("insert into u values(1)", key="k1")
    bench.run_all()
    assert rows_of(again).rows_changed == 1
    assert_receipts(bench, "k1")


def test_a_receipt_goes_with_a_group_that_is_undone(bench: Workbench) -> None:
    jobs = [bench.execute(INSERT, number, key=f"k{number}", client=OneClient()) for number in range(3)]
    culprit = bench.execute("insert or rollback into u values(1)", key="culprit", client=OneClient())
    jobs += [bench.execute(INSERT, number, key=f"k{number}", client=OneClient()) for number in range(3)]
    assert bench.run() == [culprit]
    assert_receipts(bench)
    bench.run_all()
    for first, again in zip(jobs[:3], jobs[3:], strict=True):
        assert rows_of(first) == rows_of(again)
    assert sorted(values(bench)) == [0, 1, 2]
    assert_receipts(bench, "k0", "k1", "k2")


@pytest.mark.parametrize("key", ["k", "ключ", "a\0b", "\0", " ", "x" * 256, "'; drop table t; --", "_sw_r"])
def test_any_text_is_a_key(bench: Workbench, key: str) -> None:
    first = bench.execute(INSERT, 1, key=key)
    other = bench.execute(INSERT, 2, key=key + "1")
    again = bench.execute(INSERT, 1, key=key)
    bench.run_all()
    assert rows_of(first) == rows_of(again)
    assert rows_of(other).rows == [(2, 2)]
    assert_receipts(bench, key, key + "1")


# Outcomes


def ask(bench: Workbench, key: str, *, fence: bool = False) -> KnownOutcome:
    job = bench.ask(OUTCOME, OutcomeQuestion(key, fence))
    bench.run_all()
    found = result(job)
    assert isinstance(found, KnownOutcome)
    return found


def test_outcomes(bench: Workbench) -> None:
    assert ask(bench, "k") == KnownOutcome("not_found")
    bench.execute(INSERT, 7, key="k")
    found = ask(bench, "k")
    assert (found.state, found.operation) == ("committed", "sql.execute")
    assert found.result_as(EXECUTE).rows == [(1, 7)]
    assert ask(bench, "k", fence=True) == found
    assert_receipts(bench, "k")


def test_a_fence_keeps_a_late_original_out(bench: Workbench) -> None:
    assert ask(bench, "k", fence=True) == KnownOutcome("fenced")
    late = bench.execute(INSERT, 7, key="k")
    bench.run_all()
    with pytest.raises(RequestConflictError) as caught:
        result(late)
    assert caught.value.details["fenced"] is True
    assert ask(bench, "k", fence=True) == ask(bench, "k") == KnownOutcome("fenced")
    assert values(bench) == []
    assert_receipts(bench, "k")


def test_a_fence_whose_time_is_over_counts_for_nothing(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = bench.writer.receipts
    insert = receipts._insert

    def insert_late(*values: Any) -> None:
        insert(*values)
        end_deadline(late)

    monkeypatch.setattr(receipts, "_insert", insert_late)
    bench.execute(INSERT, 7)
    late = bench.ask(OUTCOME, OutcomeQuestion("k", fence=True))
    bench.run_all()
    assert failure(late).outcome == "not_committed"
    monkeypatch.undo()
    assert_receipts(bench)
    assert receipts.status.fenced == 0
    assert ask(bench, "k", fence=True) == KnownOutcome("fenced")
    assert_receipts(bench, "k")
    assert receipts.status.fenced == 1


# Trimming


def trim(bench: Workbench) -> TrimReceipts:
    task = TrimReceipts(bench.writer, bench.limits)
    task.run_slice(2**63)
    return task


def keep(bench: Workbench, count: int, age_ms: int = 0) -> None:
    for number in range(count):
        bench.execute(INSERT, number, key=f"{age_ms} {number:04}")
    bench.run_all()
    bench.writer.database.own(
        "update _sw_receipts set created_ms = created_ms - ? where key like ?", (age_ms, f"{age_ms} %")
    )


def test_nothing_to_trim(bench: Workbench) -> None:
    keep(bench, 3)
    trim(bench)
    assert bench.writer.receipts.status.kept == 3


def test_trimming_by_age(tmp_path: Path) -> None:
    with Workbench(tmp_path / "t.db", receipts_age_ms_max=50_000, receipts_trim_rows=3) as bench:
        bench.execute("create table t(id integer primary key, a)")
        keep(bench, 10, age_ms=60_000)
        keep(bench, 5)
        trim(bench)
        assert_receipts(bench, *(f"0 {number:04}" for number in range(5)))
        assert bench.writer.receipts.status.trimmed == 10
        assert rows_of(bench_again(bench, "60000 0001")).rows == [(16, 1)]


def bench_again(bench: Workbench, key: str) -> Any:
    job = bench.execute(INSERT, 1, key=key)
    bench.run_all()
    return job


def test_trimming_by_count(tmp_path: Path) -> None:
    with Workbench(tmp_path / "t.db", receipts_count_max=4, receipts_trim_rows=3) as bench:
        bench.execute("create table t(id integer primary key, a)")
        keep(bench, 10, age_ms=1000)
        keep(bench, 2)
        trim(bench)
        assert bench.writer.receipts.status.kept == 4
        kept = {key for (key,) in bench.rows("select key from _sw_receipts")}
        assert {"0 0000", "0 0001"} < kept
        assert len(kept) == 4


def test_trimming_goes_on_in_the_next_slice(tmp_path: Path) -> None:
    with Workbench(tmp_path / "t.db", receipts_count_max=1, receipts_trim_rows=2) as bench:
        bench.execute("create table t(id integer primary key, a)")
        keep(bench, 7)
        task = TrimReceipts(bench.writer, bench.limits)
        kept = []
        while bench.writer.receipts.status.kept > 1:
            task.run_slice(0)  # each slice does one unit, even past its time
            kept.append(bench.writer.receipts.status.kept)
        assert kept == [5, 3, 1]
        assert len(bench.rows("select key from _sw_receipts")) == 1


def test_a_trim_that_fails_leaves_no_transaction_open(bench: Workbench) -> None:
    keep(bench, 3, age_ms=10**12)
    bench.writer.database.own(
        "create trigger g before delete on _sw_receipts begin select raise(abort, 'x'); end"
    )
    with pytest.raises(OperationFailedError):
        trim(bench)
    bench.writer.database.own("drop trigger g")
    assert bench.writer.receipts.status.kept == 3
    bench.execute(INSERT, 9)
    bench.run_all()
    trim(bench)
    assert_receipts(bench)


# Fingerprints


class Note(msgspec.Struct):
    text: str
    tags: dict[int, str]


@dataclasses.dataclass
class Place:
    x: int
    names: set[str]


def test_the_order_of_a_mapping_or_a_set_is_no_content() -> None:
    pairs = [(number, f"text {number}") for number in range(20)]
    shuffled = random.Random(3).sample(pairs, len(pairs))
    texts = [text for _, text in shuffled]
    for one, other in (
        ({text: number for number, text in pairs}, {text: number for number, text in shuffled}),
        (dict(pairs), dict(shuffled)),
        ({1: "a", "b": 2}, {"b": 2, 1: "a"}),
        ({(1, 2): "a", (0, 1): "b"}, {(0, 1): "b", (1, 2): "a"}),
        ([Note("a", dict(pairs))], [Note("a", dict(shuffled))]),
        ([Place(1, set(texts)), {1: 2}], [Place(1, {text for _, text in pairs}), {1: 2}]),
        ({1, "a", b"b", None}, {None, b"b", "a", 1}),
    ):
        assert fingerprint("op", one) == fingerprint("op", other)


def test_different_content_has_different_fingerprints() -> None:
    contents: list[Any] = [
        None, 0, False, 0.0, "", b"", [], {}, [None], [[]], {"a": 1}, {"a": 2}, {"b": 1}, {1: 1}, {2: 1}, {1: 2},
        {1: {2: 3}}, {1: {3: 2}}, {"1": 1}, [1, 2], [2, 1], {1, "a"}, {2, "a"}, Note("a", {1: "b"}), Note("a", {}),
    ]  # fmt: skip
    assert len({fingerprint("op", content) for content in contents}) == len(contents)
    assert fingerprint("op", 1) != fingerprint("po", 1)


# Against a real worker


@pytest.mark.parametrize("key", ["", "x" * 257, "ü" * 129])
def test_a_key_has_its_bounds(worker: RunningWorker, key: str) -> None:
    client = worker.connect()
    with pytest.raises(InvalidRequestError):
        client.execute("create table t(a)", key=key)
    client.execute("create table t(a)", key="x" * 256)


def test_an_outcome_is_answered_behind_what_is_in_flight(worker: RunningWorker) -> None:
    owner, writer, asker = (worker.connect() for _ in range(3))
    owner.execute("create table t(id integer primary key, a)")
    number = owner.call(BEGIN, Begin(60_000))
    # They wait for the owner; in the order of turns the question would come before the keyed request.
    for value in range(5):
        writer.ask(EXECUTE, Statement(INSERT, [value]))
    keyed = writer.ask(EXECUTE, Statement(INSERT, ["keyed"]), key="k")
    question = asker.ask(OUTCOME, OutcomeQuestion("k", True))
    other = asker.ask(EXECUTE, Statement(INSERT, ["other"]))
    wait_until_waiting(owner, 8)
    owner.call(ROLLBACK, Nothing(), transaction=number)
    # It keeps nobody from a turn meanwhile, its own client neither.
    asker.answer(other)
    found = OUTCOME.decode_result(asker.answer(question).result)  # type: ignore[union-attr]
    assert found.state == "committed"
    assert found.result_as(EXECUTE).rows[0][1] == "keyed"
    writer.answer(keyed)


def test_a_fenced_key_is_refused_to_a_delayed_original(worker: RunningWorker) -> None:
    one, other = worker.connect(), worker.connect()
    one.execute("create table t(id integer primary key, a)")
    assert other.call(OUTCOME, OutcomeQuestion("k", True)).state == "fenced"
    with pytest.raises(RequestConflictError):
        one.execute(INSERT, 1, key="k")
    assert other.query("select count(*) from t").scalar() == 0


def test_keys_outlive_a_killed_worker(start_worker: StartWorker) -> None:
    worker = start_worker()
    client = worker.connect()
    client.execute("create table t(id integer primary key, a)")
    first = client.execute(INSERT, 1, key="acknowledged")
    client.call(OUTCOME, OutcomeQuestion("fenced", True))
    for number in range(50):
        client.ask(EXECUTE, Statement(INSERT, [number]), key=f"in flight {number}")
    worker.child.send_signal(signal.SIGKILL)
    assert worker.child.wait(30.0) == -signal.SIGKILL
    client = start_worker().connect()
    assert client.execute(INSERT, 1, key="acknowledged") == first
    with pytest.raises(RequestConflictError):
        client.execute(INSERT, 1, key="fenced")
    states = [client.call(OUTCOME, OutcomeQuestion(f"in flight {number}")).state for number in range(50)]
    present = client.query("select a from t where id > 1 order by id").rows
    # One client's writes are done in their order, so what was committed is the beginning of what it sent.
    assert states == ["committed"] * len(present) + ["not_found"] * (50 - len(present))
    for number in range(50):
        client.execute(INSERT, number, key=f"in flight {number}")
    assert client.query("select a from t where id > 1 order by id").rows == [(n,) for n in range(50)]


def test_a_request_too_long_for_its_deadline_is_repeated_with_its_key(worker: RunningWorker) -> None:
    client = worker.connect()
    client.execute("create table t(id integer primary key, a)")
    slow = (
        "insert into t(a) with recursive c(n) as (values(1) union all select n + 1 from c where n < 2000000)"
        " select count(*) from c"
    )
    waits = client.ask(EXECUTE, Statement(slow), key="k", seconds=0.02)
    client.answer(waits)
    assert client.query("select count(*) from t").scalar() == 0
    done = client.execute(slow, key="k")
    assert client.execute(slow, key="k") == done
    assert client.query("select a from t").rows == [(2_000_000,)]


def test_a_question_behind_a_write_that_does_not_come_to_an_end_keeps_the_worker_idle(
    start_worker: StartWorker,
) -> None:
    """It stands where no executor takes it, and so does nothing until its write has an answer."""
    worker = start_worker()
    with worker.connect() as writer, worker.connect() as asker, worker.connect() as watcher:
        writer.execute("create table t(a)")
        # Its arguments are announced and do not come.
        writer.last_id += 1
        deadline = time.monotonic_ns() + 60 * 10**9
        writer.send(
            OutgoingRequest(writer.last_id, EXECUTE.name, deadline, 0, "k", 0, ARGUMENTS_FOLLOW, 1_000_000)
        )
        wait_until_waiting(watcher, 1)
        question = asker.ask(OUTCOME, OutcomeQuestion("k"))
        wait_until_waiting(watcher, 2)
        groups = watcher.status().writer.groups
        cancelled = writer.last_id
        writer.send(Cancel(cancelled))
        assert isinstance(writer.answer(cancelled), Failure)
        answer = asker.answer(question)
        assert isinstance(answer, Reply)
        assert OUTCOME.decode_result(answer.result).state == "not_found"
        assert watcher.status().writer.groups == groups + 1
