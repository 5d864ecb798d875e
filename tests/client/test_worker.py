"""The synchronous client against a real worker: every kind of call, and a worker's death."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import storage_worker as sw
from tests.client.children import sleeping_child

WAITERS = 8


@pytest.fixture
def worker(database: Path) -> Iterator[sw.StorageWorker]:
    with sw.StorageWorker(database) as running:
        yield running


@pytest.fixture
def client(worker: sw.StorageWorker) -> Iterator[sw.Client]:
    with worker.connect() as connected:
        connected.execute("create table t(id integer primary key, a)")
        yield connected


def fail_inside(block: AbstractContextManager[Any], tx: sw.InteractiveTransaction) -> None:
    with block:
        tx.execute("delete from t")
        raise LookupError


def test_statements_batches_and_keys(client: sw.Client) -> None:
    assert client.execute("insert into t(a) values(:a)", {"a": "x\0y"}).last_insert_rowid == 1
    assert client.query("select a from t").scalar() == "x\0y"
    client.batch([("insert into t(a) values(?)", (1,)), ("insert into t(a) values(?)", (2,))])
    for _ in range(3):
        client.execute("insert into t(a) values(3)", request_key="once")
    assert client.query("select count(*) from t").scalar() == 4
    assert client.outcome("once").committed
    assert client.outcome("never", fence=True).state == "fenced"
    with pytest.raises(sw.RequestConflictError):
        client.execute("insert into t(a) values(4)", request_key="never")
    with pytest.raises(sw.NotPermittedError):
        client.script("select 1; select 2")


def test_pipeline_pages_and_transaction(client: sw.Client) -> None:
    with client.pipeline() as pipeline:
        futures = [pipeline.execute("insert into t(a) values(?)", (number,)) for number in range(500)]
        counted = pipeline.query("select count(*) from t")
    assert [future.result().last_insert_rowid for future in futures] == list(range(1, 501))
    assert counted.result().scalar() == 500
    pages = list(client.pages("select id, a from t", ["id"], page_rows=120))
    assert [len(page) for page in pages] == [120, 120, 120, 120, 20]
    with client.transaction() as tx:
        tx.execute("delete from t where id > 10")
        with pytest.raises(LookupError):
            fail_inside(tx.savepoint(), tx)
        assert tx.query("select count(*) from t").scalar() == 10
    undone = client.transaction()
    with pytest.raises(LookupError):
        fail_inside(undone, undone)
    assert client.query("select count(*) from t").scalar() == 10


def test_status_health_and_maintenance(worker: sw.StorageWorker, client: sw.Client, tmp_path: Path) -> None:
    assert client.health().state == "healthy"
    assert client.status().process.pid == worker.pid
    assert client.check() == []
    copy = tmp_path / "copy.db"
    with worker.connect(role="admin") as admin:
        assert admin.backup(copy) == copy.stat().st_size
        admin.script("create table u(a); insert into u values(1)")
    assert client.query("select count(*) from u").scalar() == 1


def test_roles_of_pipes(worker: sw.StorageWorker, client: sw.Client) -> None:
    with worker.pipe(role="read").connect() as reader:
        assert reader.query("select count(*) from t").scalar() == 0
        with pytest.raises(sw.NotPermittedError):
            reader.execute("insert into t(a) values(1)")
    assert client.query("select count(*) from t").scalar() == 0


def test_many_threads_on_one_client(client: sw.Client) -> None:
    def insert(first: int) -> None:
        for number in range(first, first + 20):
            client.execute("insert into t(id, a) values(?, ?)", (number, threading.get_ident()))
            assert client.query("select id from t where id = ?", (number,)).scalar() == number

    threads = [threading.Thread(target=insert, args=(1 + 20 * each,)) for each in range(WAITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.query("select count(*) from t").scalar() == 20 * WAITERS


def test_a_killed_worker_is_told_to_every_waiter_beside_a_living_child(
    worker: sw.StorageWorker, client: sw.Client
) -> None:
    """The child was forked with all descriptors; a pipe's end kept open there must not hide the death."""
    told: list[sw.StorageError] = []
    begun = threading.Barrier(WAITERS + 1)

    def write(number: int) -> None:
        begun.wait()
        endless = "with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) from c"
        try:
            client.execute(
                f"insert into t(id, a) values(?, ({endless}))", (number,), timeout=600.0, retries=0
            )
        except sw.StorageError as error:
            told.append(error)

    threads = [threading.Thread(target=write, args=(each,)) for each in range(WAITERS)]
    with sleeping_child():
        for thread in threads:
            thread.start()
        begun.wait()
        while client.status().lanes[1].admitted_requests < WAITERS + 1:
            pass
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
    assert [type(error) for error in told] == [sw.WorkerUnavailableError] * WAITERS
    assert {error.outcome for error in told} == {"unknown"}
    assert client.query("select count(*) from t").scalar() == 0
    assert worker.restarts == 1
