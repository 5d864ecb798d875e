"""A client's life: it connects anew, repeats what may be repeated, and belongs to one loop and one process."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from storage_worker.client.aio import AsyncClient
from storage_worker.client.aio_connection import AsyncConnection
from storage_worker.protocol.envelope import failure_of
from storage_worker.protocol.errors import (
    BusyError,
    DeadlineExceededError,
    ForkedClientError,
    InvalidRequestError,
    NotPermittedError,
    OverloadedError,
    StorageError,
    StorageFullError,
    WorkerUnavailableError,
)
from tests.client.fake import PATIENCE_S, Calls, FakeWorker, Transactions, echo, nothing
from tests.client.test_client import Dying, Flaky
from tests.client.test_fork import in_child
from tests.client_async.conftest import Run
from tests.client_async.peers import Near, away, both_of, client_of, turns, until

ROOT = Path(__file__).parents[2]


# Repeats


def test_refusals_are_outlived(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        flaky = worker.answer = Flaky(OverloadedError("x", retry_after=0.001), BusyError("x"))
        async with client_of(worker) as client:
            assert (await client.execute("x", (1,), request_key="k")).scalar() == 1
        assert flaky.keys == ["k"] * 3

    run(main())


def test_a_full_disk_is_not_asked_again(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        flaky = worker.answer = Flaky(StorageFullError("x"))
        async with client_of(worker) as client:
            with pytest.raises(StorageFullError):
                await client.execute("x", (1,), retries=5)
        assert len(flaky.keys) == 1

    run(main())


@pytest.mark.parametrize("deaths", [1, 6])
def test_reads_and_writes_with_keys_outlive_their_worker(
    run: Run[None], worker: FakeWorker, deaths: int
) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            dying = worker.answer = Dying(deaths)
            assert (await client.query("select ?", (1,))).scalar() == 1
            assert dying.values == [1] * (deaths + 1)
            dying = worker.answer = Dying(deaths)
            assert (await client.execute("insert", (2,), request_key="k")).scalar() == 2
            assert dying.values == [2] * (deaths + 1)

    run(main())


def test_a_write_without_a_key_is_never_sent_twice(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        dying = worker.answer = Dying(1)
        async with client_of(worker) as client:
            with pytest.raises(WorkerUnavailableError) as caught:
                await client.execute("insert", (1,))
            assert caught.value.outcome == "unknown"
            assert dying.values == [1]
            assert (await client.execute("insert", (2,))).scalar() == 2

    run(main())


def test_a_worker_that_died_while_nothing_was_asked_is_not_noticed(run: Run[None]) -> None:
    """Not even by a write without a key and without repeats: nothing of it was sent to the dead one."""

    async def main() -> None:
        async with Near() as near:
            for place in range(5):
                task = asyncio.create_task(near.client.execute("insert", (place,), retries=0))
                await until(lambda: len(near.dialer.peers) > place)  # noqa: B023 - used at once
                await until(lambda: len(near.peer.requests) == 1)
                near.peer.echo(near.peer.requests[0])
                assert (await task).scalar() == place
                near.peer.socket.close()

    run(main())


def test_an_unreachable_worker_ends_with_the_deadline(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        worker.kill()
        async with client_of(worker) as client:
            with pytest.raises(WorkerUnavailableError) as caught:
                await client.execute("insert", (1,), timeout=0.1)
            assert caught.value.outcome == "not_committed"
            worker.listen()
            assert (await client.execute("insert", (2,))).scalar() == 2

    run(main())


def test_a_worker_that_comes_back_is_waited_for(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        client, _ = await both_of(worker)
        async with client:
            await away(worker.kill)
            tasks = [asyncio.create_task(client.execute("insert", (n,))) for n in range(20)]
            await turns(20)
            worker.listen()
            assert [(await task).scalar() for task in tasks] == list(range(20))
        worker.next_peer()
        assert worker.peers.empty()

    run(main())


def test_the_lock_of_another_dialing_task_is_waited_for_until_the_deadline(
    run: Run[None], worker: FakeWorker
) -> None:
    async def main() -> None:
        worker.welcome = lambda _welcome: None
        async with client_of(worker) as client:
            dialing = asyncio.create_task(client.connect())
            await away(worker.next_peer)
            with pytest.raises(DeadlineExceededError) as caught:
                await client.query("select 1", timeout=0.05)
            assert caught.value.details["stage"] == "connect"
            dialing.cancel()
            await asyncio.wait([dialing])

    run(main())


def test_a_hand_shake_that_does_not_come_is_left_at_the_deadline(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        worker.welcome = lambda _welcome: None
        async with client_of(worker) as client:
            with pytest.raises(WorkerUnavailableError) as caught:
                await client.query("select 1", timeout=0.05)
            assert "hand-shake" in caught.value.message
            assert caught.value.outcome == "not_committed"

    run(main())


def test_a_refused_hand_shake_is_the_workers_own_error(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        worker.welcome = lambda _welcome: failure_of(0, NotPermittedError("not you"), 100)
        async with client_of(worker) as client:
            with pytest.raises(NotPermittedError, match="not you"):
                await client.query("select 1")

    run(main())


def test_repeats_stay_within_the_deadline(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            near.dialer.is_down = True
            with pytest.raises(StorageError) as caught:
                await near.client.execute("insert", (1,), timeout=0.5)
            assert caught.value.outcome == "not_committed"
            near.dialer.is_down = False
            await near.works()

    run(main())


def test_a_client_that_is_closed_while_it_connects_stays_closed(run: Run[None]) -> None:
    async def main() -> None:
        for transaction in (False, True):
            near = Near(steps=4)
            call = begin(near.client) if transaction else near.client.query("select 1")
            task = asyncio.create_task(call)
            await turns(2)
            await near.client.close()
            with pytest.raises(InvalidRequestError, match="closed"):
                await task
            near.peer.listen()
            assert near.peer.is_over
            near.peer.socket.close()

    run(main())


async def begin(client: AsyncClient) -> object:
    async with client.transaction():
        raise AssertionError("the client was closed")


# One loop


def test_another_loop_is_refused_before_a_byte_is_sent(
    new_loop: Callable[[], asyncio.AbstractEventLoop], worker: FakeWorker
) -> None:
    worker.answer = nothing
    client = client_of(worker)
    with asyncio.Runner(loop_factory=new_loop) as first:
        first.run(client.connect())
        peer = worker.next_peer()

        async def misuse() -> None:
            for call in (partial(client.query, "select 1"), client.connect, client.status, client.close):
                with pytest.raises(InvalidRequestError, match="event loop"):
                    await call()
            with pytest.raises(InvalidRequestError, match="event loop"):
                async with client.transaction():
                    pass
            with pytest.raises(InvalidRequestError, match="event loop"):
                async with client.pipeline() as pipeline:
                    _ = await pipeline.execute("insert", (1,))

        with Calls() as calls:
            calls.start(run_in_new_loop, new_loop, misuse()).get()
        assert peer.requests.empty()
        worker.answer = echo
        assert first.run(client.query("select ?", (1,))).scalar() == 1
        first.run(client.close())


def run_in_new_loop(new_loop: Callable[[], asyncio.AbstractEventLoop], main: Any) -> Any:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


def run_elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    return run_in_new_loop(asyncio.new_event_loop, function(*args))


def test_a_client_of_a_loop_that_is_over_is_closed_by_anybody(
    new_loop: Callable[[], asyncio.AbstractEventLoop], worker: FakeWorker
) -> None:
    client = client_of(worker)
    run_in_new_loop(new_loop, client.connect())
    peer = worker.next_peer()

    async def use() -> None:
        with pytest.raises(InvalidRequestError, match="event loop"):
            await client.query("select 1")
        await client.close()

    run_in_new_loop(new_loop, use())
    peer.join()


def test_a_forgotten_client_leaves_no_connection(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        client, peer = await both_of(worker)
        assert (await client.query("select ?", (1,))).scalar() == 1
        del client
        gc.collect()
        await away(peer.join)

    run(main())


def test_a_client_that_is_only_used_by_its_call_is_not_forgotten(run: Run[Any], worker: FakeWorker) -> None:
    async def main() -> object:
        call = asyncio.create_task(client_of(worker).query("select ?", (5,)))
        await turns(3)
        gc.collect()
        return (await call).scalar()

    assert run(main()) == 5


def test_a_client_forgotten_in_another_thread_or_behind_its_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], worker: FakeWorker
) -> None:
    kept: list[AsyncClient] = []

    async def forget_elsewhere() -> None:
        client, peer = await both_of(worker)
        kept.append(client)
        del client
        thread = threading.Thread(target=kept.clear)
        thread.start()
        await away(thread.join)
        await away(peer.join)
        kept.append((await both_of(worker))[0])

    run_in_new_loop(new_loop, forget_elsewhere())
    kept.clear()
    gc.collect()


# Processes


@pytest.mark.parametrize("child_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_forked_child_connects_anew_and_leaves_the_parent_alone(
    run: Run[None], worker: FakeWorker, child_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The fork happens inside the running loop, with calls in flight."""

    async def main() -> None:
        worker.answer = nothing
        client, peer = await both_of(worker)
        flying = [asyncio.create_task(client.query("select ?", (n,))) for n in range(3)]
        requests = [await away(peer.next) for _ in flying]
        worker.answer = echo

        async def in_the_child() -> object:
            found = (await client.query("select ?", (2,))).scalar()
            async with client.pipeline() as pipeline:
                assert (await (await pipeline.execute("insert", (3,)))).scalar() == 3
            await client.close()
            return found

        assert in_child(lambda: run_in_new_loop(child_loop, in_the_child())) == 2
        child = await away(worker.next_peer)
        assert peer.hello is not None
        assert child.hello.pid != peer.hello.pid
        await away(child.join)
        for request, value in zip(requests, range(3), strict=True):
            peer.reply(request.id, echo(peer, request))
            assert (await flying[value]).scalar() == value
        assert (await client.query("select ?", (4,))).scalar() == 4
        assert not peer.farewell
        assert worker.peers.empty()
        await client.close()

    run(main())


def test_a_childs_end_leaves_the_parent_alone(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        client, peer = await both_of(worker)
        kept = [client]

        def forget() -> None:
            kept.clear()
            gc.collect()

        in_child(forget)
        in_child(partial(run_elsewhere, client.close))
        assert (await client.query("select ?", (1,))).scalar() == 1
        assert not peer.farewell
        assert worker.peers.empty()
        await client.close()

    run(main())


def test_a_child_hears_that_its_futures_are_the_parents(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near, near.client.pipeline() as pipeline:
            sent = await pipeline.execute("insert", (1,))
            await turns(2)
            kept = await pipeline.execute("insert", (2,))
            for future in (sent, kept):
                with pytest.raises(ForkedClientError):
                    in_child(partial(run_elsewhere, future.result))
            await until(lambda: len(near.peer.requests) == 2)
            for request in near.peer.requests:
                near.peer.echo(request)
            assert ((await sent).scalar(), (await kept).scalar()) == (1, 2)

    run(main())


def test_a_transaction_stays_with_the_parent(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        worker.answer = Transactions()
        async with client_of(worker) as client, client.transaction() as transaction:
            with pytest.raises(ForkedClientError):
                in_child(partial(run_elsewhere, transaction.execute, "insert", (2,)))
            assert (await transaction.execute("insert", (1,))).scalar() == 1

    run(main())


class Stranded:
    """A dialer that works in the process that made it only."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.pid = os.getpid()

    async def dial(self, deadline_ns: int) -> AsyncConnection:
        if os.getpid() != self.pid:
            raise ForkedClientError("the client has no address to connect to in this process")
        return self.connection


def test_a_client_without_an_address_says_so_in_a_child(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        async with client_of(worker) as other:
            connection = await other._line.current(2**62)
            client = AsyncClient(Stranded(connection))
            assert (await client.query("select ?", (1,))).scalar() == 1
            with pytest.raises(ForkedClientError) as caught:
                in_child(partial(run_elsewhere, client.query, "select ?", (1,)))
            assert caught.value.outcome == "not_committed"

    run(main())


def test_the_parents_death_is_seen_in_spite_of_a_child(run: Run[None], worker: FakeWorker) -> None:
    """A child that lives on does not keep its parent's connection open."""

    async def main() -> None:
        client, peer = await both_of(worker)
        hold, release = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        os.close(hold)
        await client.close()
        assert await away(peer.ended.wait, PATIENCE_S)
        os.close(release)
        await away(os.waitpid, pid, 0)

    run(main())


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("way", ["return", "exception", "exit", "pending"])
def test_a_process_with_open_clients_ends_at_once(worker: FakeWorker, kind: str, way: str) -> None:
    """In the middle of calls that nobody answers, and without `close`."""
    worker.answer = nothing
    program = f"""
import asyncio, sys, uvloop
from storage_worker.client import AddressDialer
from storage_worker.client.aio import AsyncClient
from storage_worker.client.aio_dial import AsyncAddressDialer

kept = []

async def main():
    clients = [AsyncClient(AsyncAddressDialer(AddressDialer({worker.address!r}))) for _ in range(3)]
    kept.extend(clients)
    for client in clients:
        await client.connect()
        for _ in range(2):
            kept.append(asyncio.create_task(client.query("select 1")))
        await clients[0].pipeline().execute("insert")
    await asyncio.sleep(0.01)
    if {way!r} == "exception":
        raise ZeroDivisionError
    if {way!r} == "exit":
        sys.exit(3)
    if {way!r} == "pending":
        asyncio.get_running_loop().call_later(0.01, sys.exit, 3)
        await kept[-1]

factory = {{"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}}[{kind!r}]
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == {"return": 0, "exception": 1, "exit": 3, "pending": 3}[way]
    if way == "exception":
        assert done.stderr.strip().endswith("ZeroDivisionError")
    elif way == "return":
        assert not done.stderr
    for _ in range(3):
        worker.next_peer().join()
