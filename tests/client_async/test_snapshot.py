"""Snapshots of the asynchronous client, with a real worker beside them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import storage_worker as sw
from tests.client.test_fork import in_child
from tests.client_async.conftest import Run
from tests.client_async.peers import turns

COUNT = "select count(*) from t"
INSERT = "insert into t(a) values (?)"
ENDLESS = "with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) from c"


@pytest.fixture
def worker(database: Path) -> Iterator[sw.StorageWorker]:
    with sw.StorageWorker(database) as running, running.connect() as client:
        client.execute("create table t(id integer primary key, a)")
        yield running


async def no_snapshots(client: sw.AsyncClient) -> None:
    """Return once the worker knows of none."""
    async with asyncio.timeout(60):
        while (await client.status()).snapshots:  # noqa: ASYNC110 - the worker sets no event
            await asyncio.sleep(0)


def test_it_sees_what_was_acknowledged_and_holds_it(run: Run[None], worker: sw.StorageWorker) -> None:
    async def main() -> None:
        async with await worker.connect_async(name="async") as client:
            for number in range(10):
                await client.execute(INSERT, (number,))
                snap = client.snapshot()
                async with snap:
                    await client.execute(INSERT, ("later",))
                    assert snap.query(COUNT).scalar() == 2 * number + 1
                    (lease,) = (await client.status()).snapshots
                    assert lease.name == "async"
                    assert 9_000 < lease.age_ms + lease.left_ms <= 10_000
                assert (await client.status()).snapshots == []
                with pytest.raises(sw.SnapshotExpiredError, match="block"):
                    snap.query(COUNT)
                with pytest.raises(sw.InvalidRequestError):
                    await snap.__aenter__()

    run(main())


def test_refusals_and_limits_are_the_same(run: Run[None], worker: sw.StorageWorker) -> None:
    async def main() -> None:
        async with await worker.connect_async() as client, client.snapshot() as snap:
            with pytest.raises(sw.NotPermittedError):
                snap.query("delete from t")
            with pytest.raises(sw.InvalidRequestError):
                snap.query("select ?", (2**63,))
            with pytest.raises(sw.ResultTooLargeError):
                snap.query("select zeroblob(100)", max_result_bytes=50)
            with pytest.raises(sw.DeadlineExceededError):
                snap.query(ENDLESS, timeout=0.05)
            assert snap.query(COUNT).scalar() == 0
            for wrong in (0, 61, "1"):
                with pytest.raises(sw.InvalidRequestError):
                    await client.snapshot(wrong).__aenter__()  # type: ignore[arg-type]
            assert len((await client.status()).snapshots) == 1

    run(main())


def test_it_ends_by_its_age_without_a_call(run: Run[None], worker: sw.StorageWorker) -> None:
    async def main() -> None:
        async with await worker.connect_async() as client, client.snapshot(0.05) as snap:
            await no_snapshots(client)
            assert snap._connection is None
            with pytest.raises(sw.SnapshotExpiredError, match="outlived its age"):
                snap.query(COUNT)

    run(main())


def test_a_thread_may_read_while_the_loop_goes_on(run: Run[None], worker: sw.StorageWorker) -> None:
    async def main() -> None:
        async with await worker.connect_async() as client, client.snapshot(0.5) as snap:
            reading = asyncio.create_task(asyncio.to_thread(snap.query, ENDLESS))
            await client.execute(INSERT, (1,))
            with pytest.raises(sw.SnapshotExpiredError):
                await reading
            assert (await client.query(COUNT)).scalar() == 1

    run(main())


@pytest.mark.parametrize("steps", range(8))
def test_a_cancelled_begin_leaves_nothing(run: Run[None], worker: sw.StorageWorker, steps: int) -> None:
    async def hold(client: sw.AsyncClient) -> None:
        async with client.snapshot():
            await asyncio.Event().wait()

    async def main() -> None:
        async with await worker.connect_async() as client:
            task = asyncio.create_task(hold(client))
            await turns(steps)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await no_snapshots(client)
            async with client.snapshot() as snap:
                assert snap.query(COUNT).scalar() == 0

    run(main())


def test_a_cancelled_end_gives_the_lease_back(run: Run[None], worker: sw.StorageWorker) -> None:
    async def main() -> None:
        async with await worker.connect_async() as client:
            snap = await client.snapshot().__aenter__()
            leaving = asyncio.create_task(snap.__aexit__(None, None, None))
            await turns(1)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert snap._connection is None
            await no_snapshots(client)

    run(main())


def test_a_closed_client_leaves_it_its_state(run: Run[None], worker: sw.StorageWorker) -> None:
    async def main() -> None:
        client = await worker.connect_async()
        async with client.snapshot() as snap:
            await client.close()
            assert snap.query(COUNT).scalar() == 0

    run(main())


def test_a_forked_child_neither_uses_nor_ends_it(run: Run[None], worker: sw.StorageWorker) -> None:
    async def main() -> None:
        async with await worker.connect_async() as client, client.snapshot() as snap:

            def in_another_process() -> Any:
                with pytest.raises(sw.ForkedClientError):
                    snap.query(COUNT)
                with pytest.raises(StopIteration):
                    snap.__aexit__(None, None, None).send(None)
                return "left alone"

            assert in_child(in_another_process) == "left alone"
            assert snap.query(COUNT).scalar() == 0
            assert len((await client.status()).snapshots) == 1

    run(main())
