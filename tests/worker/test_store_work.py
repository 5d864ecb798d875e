"""Background work that stores declare: in slices, each a transaction, after an error anew, and the sweep by itself."""

from collections.abc import Callable
from pathlib import Path

import pytest

import storage_worker as sw
from storage_worker.protocol.errors import InvalidRequestError, OperationFailedError
from storage_worker.store_work import StoreWork
from tests.worker.workbench import Workbench

EVERY_S = 30.0


def work_of(bench: Workbench, handler: Callable[[sw.Transaction, int | None], int | None]) -> StoreWork:
    store = sw.Store("tidy")
    store.background(every=EVERY_S)(handler)
    (work,) = store.background_work.values()
    bench.execute("create table if not exists t(a)")
    bench.run_all()
    return StoreWork(work, bench.writer, bench.limits)


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path / "app.db")


def test_slices_go_on_where_the_last_one_ended_and_begin_anew_at_the_end(bench: Workbench) -> None:
    seen: list[int | None] = []

    def handler(tx: sw.Transaction, position: int | None) -> int | None:
        seen.append(position)
        tx.execute("insert into t values(?)", (position,))
        following = (position or 0) + 1
        return following if following < 3 else None

    with bench:
        task = work_of(bench, handler)
        task.run_slice(0)
        assert (seen, task.due_ns()) == ([None], 1), "without time for more it was one, and more of it is due"
        task.run_slice(2**62)
        assert seen == [None, 1, 2]
        assert task.due_ns() > 1, "it is done, and waits for its interval"
        task.run_slice(0)
        assert seen[3:] == [None]
        assert bench.rows("select a from t") == [(None,), (1,), (2,), (None,)]
        assert task.status.done_units == 4


def test_an_error_undoes_its_slice_and_the_work_begins_anew(bench: Workbench) -> None:
    seen: list[int | None] = []

    def handler(tx: sw.Transaction, position: int | None) -> int | None:
        seen.append(position)
        tx.execute("insert into t values(?)", (position,))
        if position == 1 and len(seen) == 2:
            raise ValueError("broken")
        return 1 if position is None else None

    with bench:
        task = work_of(bench, handler)
        with pytest.raises(OperationFailedError, match=r"tidy\.handler failed: ValueError: broken"):
            task.run_slice(2**62)
        assert task.due_ns() > 1
        task.run_slice(2**62)
        assert seen == [None, 1, None, 1]
        assert bench.rows("select a from t") == [(None,), (None,), (1,)]
        assert not bench.writer.database.in_transaction


def test_a_swallowed_end_of_its_transaction_is_its_error(bench: Workbench) -> None:
    def handler(tx: sw.Transaction, _: int | None) -> int | None:
        tx.execute("insert into t values(1)")
        bench.writer.database.own("rollback")
        try:
            tx.execute("no statement")
        except sw.StorageError:
            return None
        return None

    with bench:
        task = work_of(bench, handler)
        with pytest.raises(sw.StorageError):
            task.run_slice(0)
        assert bench.rows("select a from t") == []


def test_what_is_left_for_after_the_commit_is_called_once_and_never_after_an_error(bench: Workbench) -> None:
    called: list[str] = []

    def handler(tx: sw.Transaction, position: int | None) -> int | None:
        tx.after_commit(
            lambda: called.append(f"{position}, in a transaction: {bench.writer.database.in_transaction}")
        )
        if position is not None:
            raise InvalidRequestError("no more")
        return 1

    with bench:
        task = work_of(bench, handler)
        with pytest.raises(InvalidRequestError):
            task.run_slice(2**62)
        assert called == ["None, in a transaction: False"]


def test_where_a_foreign_process_has_the_lock_the_slice_comes_later(bench: Workbench) -> None:
    seen: list[int | None] = []

    def handler(_: sw.Transaction, position: int | None) -> int | None:
        seen.append(position)
        return 7 if position is None else None

    with bench:
        task = work_of(bench, handler)
        task.run_slice(0)
        foreign, _ = bench._open()
        foreign.begin()
        task.run_slice(2**62)
        assert seen == [None]
        assert task.due_ns() > 1
        foreign.close()
        task.run_slice(0)
        assert seen == [None, 7]


@pytest.mark.parametrize("every", [0, -1.0, float("inf"), float("nan"), "60", None, True])
def test_an_interval_is_a_number_of_seconds(every: object) -> None:
    with pytest.raises(TypeError, match="every="):
        sw.Store("tidy").background(every=every)  # type: ignore[arg-type]


def test_its_name_is_its_own() -> None:
    store = sw.Store("tidy")

    @store.write
    def sweep(tx: sw.Transaction) -> None: ...

    def again(tx: sw.Transaction, position: int | None) -> int | None: ...

    again.__name__ = "sweep"
    with pytest.raises(TypeError, match="declared twice"):
        store.background(every=1.0)(again)


def test_a_worker_does_it_by_itself_and_tells_in_its_status(tmp_path: Path) -> None:
    with sw.StorageWorker(tmp_path / "app.db", stores=["tests.worker.tidy_store:tidy"]) as worker:
        client = worker.connect()
        while not client.query("select count(*) from tidied").scalar():
            client.execute("select 1")
        tasks = {task.name: task for task in client.status().background}
        assert tasks["tidy.tidy_up"].done_units > 0
        assert tasks["tidy.tidy_up"].last_error == ""


def test_the_conversation_store_sweeps_its_payloads_by_itself(tmp_path: Path) -> None:
    with sw.StorageWorker(tmp_path / "app.db", stores=["storage_worker.conversation:store"]) as worker:
        names = {task.name for task in worker.connect().status().background}
    assert "conversation.sweep" in names
    assert not (tmp_path / "app.db-sw" / "payloads").exists()
