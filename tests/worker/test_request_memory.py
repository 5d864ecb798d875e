"""What a request leaves behind in the worker: nothing in memory, the same arguments for a rerun, bounded writes."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import storage_worker as sw
from storage_worker.database.faults import Aborted
from storage_worker.peer import Job
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    OperationFailedError,
    RequestTooLargeError,
    StorageFullError,
)
from storage_worker.protocol.limits import MIB
from storage_worker.readers import Reader
from storage_worker.store_work import StoreWork
from tests.worker.workbench import Workbench, end_deadline, result, when_started


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector of cycles: what is left then is kept by a cycle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def jobs_left() -> int:
    return sum(isinstance(each, Job) for each in gc.get_objects())


def fail_by_value_error(_: sw.Transaction) -> None:
    raise ValueError("on purpose")


def fail_by_statement(tx: sw.Transaction) -> None:
    tx.execute("insert into missing values(1)")


def swallow_and_go_on(tx: sw.Transaction) -> None:
    try:
        tx.execute("insert into missing values(1)")
    except sw.StorageError as error:
        raise KeyError("another") from error


FAILING: dict[str, Callable[[Workbench], Job]] = {
    "a handler": lambda bench: bench.handler(fail_by_value_error),
    "a statement of a handler": lambda bench: bench.handler(fail_by_statement),
    "an error behind an error": lambda bench: bench.handler(swallow_and_go_on),
    "a plain statement": lambda bench: bench.execute("insert into t values(1, 2, 3)"),
    "a statement that fails in SQLite": lambda bench: bench.execute(
        "insert into t values(abs('x' || ?))", 2**62
    ),
    "a batch": lambda bench: bench.batch("insert into t values(1)", "insert into missing values(1)"),
    "a value that cannot be": lambda bench: bench.execute("insert into t values(?)", float("nan")),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_failed_request_is_forgotten_at_once(tmp_path: Path, kind: str) -> None:
    with Workbench(tmp_path / "app.db") as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        with uncollected():
            before = jobs_left()
            for _ in range(3):
                FAILING[kind](bench)
                assert bench.run_all()
            assert jobs_left() == before


def test_a_failed_read_is_forgotten_at_once(tmp_path: Path) -> None:
    with Workbench(tmp_path / "app.db") as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        from storage_worker.database.opening import open_reader

        reader = Reader(open_reader(str(bench.path), bench.limits), bench.limits)
        with uncollected():
            before = jobs_left()
            for sql in ("select * from missing", "select abs(-9223372036854775807 - 1)"):
                job = bench.query(sql)
                bench.lane.take()
                reader.run(job, job.admitted_ns)
                assert job.code
            job = bench.handler(fail_by_value_error)
            bench.lane.take()
            reader.run(job, job.admitted_ns)
            assert job.code == OperationFailedError.code
            del job
            assert jobs_left() == before
        reader.close()


def test_a_rerun_gets_its_arguments_as_they_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler must not change them; where one does, its second run, and the receipt, know nothing of it."""
    store = sw.Store("changing")

    @store.write
    def add(tx: sw.Transaction, items: list[str]) -> str:
        items.append("x")
        tx.execute("insert into t values(?)", (",".join(items),))
        return ",".join(items)

    with Workbench(tmp_path / "app.db", stores=[store]) as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        first = bench.call(add(["a"]), key="k")
        aborted = bench.execute(
            "insert into t with recursive c(n) as (select 1 union all select n + 1 from c) select n from c"
        )
        when_started(bench, monkeypatch, lambda job: end_deadline(job) if job is aborted else None)
        bench.run_all()
        monkeypatch.undo()
        assert (first.replays, result(first)) == (1, "a,x")
        assert bench.rows("select a from t") == [("a,x",)]
        again = bench.call(add(["a"]), key="k")
        bench.run_all()
        assert result(again) == "a,x"


LARGE = "insert into t with recursive c(n) as (select 1 union all select n + 1 from c) select randomblob(100000) from c"


def test_what_one_request_writes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_worker.watch.LOOK_NS", 0)
    with Workbench(tmp_path / "app.db", request_write_bytes_max=20 * MIB, writer_cache_bytes=MIB) as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        small, large = bench.execute("insert into t values('mate')"), bench.execute(LARGE)
        bench.run_all()
        with pytest.raises(RequestTooLargeError, match="one may write") as caught:
            result(large)
        assert caught.value.outcome == "not_committed"
        assert caught.value.details["request_write_bytes_max"] == 20 * MIB
        assert result(small).rows_changed == 1
        assert bench.rows("select a from t") == [("mate",)]


def test_a_request_that_would_fill_the_disk_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_worker.watch.LOOK_NS", 0)
    monkeypatch.setattr("storage_worker.growth.disk_free_bytes", lambda _: 1)
    with Workbench(tmp_path / "app.db") as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        large = bench.execute(LARGE)
        bench.run_all()
        with pytest.raises(StorageFullError, match="space"):
            result(large)
        assert bench.rows("select a from t") == []


def endless(tx: sw.Transaction, _: Any) -> None:
    tx.execute("insert into t values(1)")
    tx.query("with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) from c")


def test_background_work_that_does_not_end_is_ended(tmp_path: Path) -> None:
    store = sw.Store("tidy")
    store.background(every=1.0)(endless)
    with Workbench(tmp_path / "app.db", background_work_ms_max=50) as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        task = StoreWork(store.background_work["tidy.endless"], bench.writer, bench.limits)
        with pytest.raises(DeadlineExceededError, match="background work"):
            task.run_slice(2**62)
        assert bench.rows("select a from t") == []
        assert bench.writer.watch.own_end_ns == 0


def test_an_end_of_a_statement_is_no_store_s_error(tmp_path: Path) -> None:
    """What a slice swallows of it is told all the same."""
    store = sw.Store("tidy")

    @store.background(every=1.0)
    def swallow(tx: sw.Transaction, position: int | None) -> int | None:
        try:
            endless(tx, position)
        except Aborted:
            return None
        return None

    with Workbench(tmp_path / "app.db", background_work_ms_max=50) as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        task = StoreWork(store.background_work["tidy.swallow"], bench.writer, bench.limits)
        with pytest.raises(sw.StorageError):
            task.run_slice(2**62)
        assert bench.rows("select a from t") == []


def test_statistics_are_taken_of_a_bounded_number_of_rows(tmp_path: Path) -> None:
    with Workbench(tmp_path / "app.db") as bench:
        assert bench.rows("pragma analysis_limit") == [(bench.limits.analysis_rows_max,)]


def test_what_large_values_write_is_bounded_too(tmp_path: Path) -> None:
    """A statement of few steps is not looked at on its way; SQLite itself ends it."""
    with Workbench(tmp_path / "app.db", request_write_bytes_max=20 * MIB, writer_cache_bytes=MIB) as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        large = bench.execute(
            "insert into t with recursive c(n) as (select 1 union all select n + 1 from c where n < 30)"
            " select zeroblob(2000000) from c"
        )
        small = bench.execute("insert into t values('mate')")
        bench.run_all()
        with pytest.raises(RequestTooLargeError) as caught:
            result(large)
        assert caught.value.outcome == "not_committed"
        assert result(small).rows_changed == 1
        assert bench.rows("select a from t") == [("mate",)]
        for _ in range(12):
            job = bench.execute("insert into t values(zeroblob(5000000))")
            bench.writer._bound_ns = 0
            bench.run_all()
            assert result(job).rows_changed == 1
