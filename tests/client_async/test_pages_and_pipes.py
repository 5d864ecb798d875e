"""Pages read with `async for`, and pre-opened pipes used by an event loop."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from storage_worker.client import Pipe
from storage_worker.protocol.errors import InvalidRequestError, RequestTooLargeError, ResultTooLargeError
from tests.client.fake import FakeWorker
from tests.client.test_pages import Database
from tests.client_async.conftest import Run
from tests.client_async.peers import away, client_of


@pytest.fixture
def database(worker: FakeWorker) -> Iterator[Database]:
    """A table of 103 rows behind the fake worker."""
    found = Database()
    found.connection.execute("create table t(id integer primary key, a text)")
    found.connection.executemany(
        "insert into t values (?, ?)", [(place, f"a{place % 7}") for place in range(1, 104)]
    )
    worker.answer = found
    yield found
    found.connection.close()


@pytest.mark.parametrize("page_rows", [1, 10, 103, 104, 500])
def test_every_row_comes_once_and_in_order(
    run: Run[None],
    worker: FakeWorker,
    database: Database,
    page_rows: int,
) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            pages = client.pages("select id, a from t", key=("id",), page_rows=page_rows)
            rows = [row async for page in pages for row in page]
        assert rows == [(place, f"a{place % 7}") for place in range(1, 104)]
        assert max(database.reads) <= page_rows + 1
        assert len(database.reads) == -(-103 // page_rows)

    run(main())


def test_pages_shrink_to_what_a_result_may_hold(
    run: Run[None],
    worker: FakeWorker,
    database: Database,
) -> None:
    async def main() -> None:
        database.connection.execute("update t set a = hex(zeroblob(500)) where id between 40 and 60")
        database.bytes_max = 2500
        async with client_of(worker) as client:
            rows = [
                row
                async for page in client.pages("select id, a from t", ("id",), page_rows=100)
                for row in page
            ]
            assert [row[0] for row in rows] == list(range(1, 104))
            database.bytes_max = 500
            with pytest.raises(ResultTooLargeError):
                _ = [page async for page in client.pages("select id, a from t", ("id",), page_rows=8)]

    run(main())


def test_pages_may_be_left_and_cancelled(
    run: Run[None],
    worker: FakeWorker,
    database: Database,
) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            async for page in client.pages("select id from t", ("id",), page_rows=10):
                assert page.rows[0] == (1,)
                break

            async def read(rows: list[object]) -> None:
                async for page in client.pages("select id from t", ("id",), page_rows=1):
                    rows.extend(page.rows)

            for cut in range(0, 60, 3):
                rows: list[object] = []
                task = asyncio.create_task(read(rows))
                for _ in range(cut):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert rows == [(place,) for place in range(1, len(rows) + 1)]
            assert (await client.query("select ?", (1,))).scalar() == 1

    run(main())


def test_what_is_wrong_is_said_before_the_first_page_is_asked_for(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            with pytest.raises(InvalidRequestError):
                client.pages("select id from t", key=("id",), parameters=(2**63,))
            with pytest.raises(RequestTooLargeError):
                client.pages("x" * 300_000, key=("id",))

    run(main())


def open_pipe(worker: FakeWorker) -> Pipe:
    return Pipe.open(worker.address, "read", b"proof", "child", time.monotonic_ns() + 30 * 10**9)


def test_a_client_of_a_pipe(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        with await away(open_pipe, worker) as pipe:
            first = await away(worker.next_peer)
            async with await pipe.connect_async() as client:
                assert (await client.query("select ?", (1,))).scalar() == 1
                assert worker.peers.empty()
                # Its descriptor serves one client, once.
                async with await pipe.connect_async() as other:
                    assert (await other.query("select ?", (2,))).scalar() == 2
                    second = await away(worker.next_peer)
                    assert (second.hello.role, second.hello.grant) == (first.hello.role, first.hello.grant)
                # The same role, also after the worker was lost.
                await away(first.close)
                assert (await client.query("select ?", (3,))).scalar() == 3
                third = await away(worker.next_peer)
                assert (third.hello.role, third.hello.grant) == ("read", b"proof")

    run(main())
