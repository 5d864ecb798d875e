"""Cancellation at every moment: no answer goes astray, the connection stays usable, nothing half-done is sent."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from storage_worker.protocol.envelope import Cancel, OutgoingReply, Request
from storage_worker.protocol.limits import MIB
from tests.client.fake import FakeWorker, limits_with, nothing, number
from tests.client_async.conftest import Run
from tests.client_async.peers import Near, away, both_of, client_of, row, turns, until

STEPS = range(9)
"""Turns of the loop; within this many a call is over, whatever it has to wait for in these tests."""


def check_protocol(near: Near) -> None:
    """Ids increase; each cancel names a request that was sent before it, once."""
    for peer in near.dialer.peers:
        sent: list[int] = []
        cancelled: list[int] = []
        for envelope in peer.heard:
            if isinstance(envelope, Request):
                sent.append(envelope.id)
            elif isinstance(envelope, Cancel):
                assert envelope.id in sent
                cancelled.append(envelope.id)
        assert sent == sorted(set(sent))
        assert len(cancelled) == len(set(cancelled))


@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("dial_steps", [0, 2])
def test_a_call_is_cancelled_at_every_turn(run: Run[None], in_flight: int, dial_steps: int) -> None:
    """In every order of the cancel and the answer, with and without others, while it connects too."""

    async def all_orders() -> None:
        for cancel_at, answer_at in itertools.product(STEPS, STEPS):
            await cancel_one(cancel_at, answer_at, in_flight, dial_steps)

    run(all_orders())


async def cancel_one(cancel_at: int, answer_at: int, in_flight: int, dial_steps: int) -> None:
    async with Near(steps=dial_steps) as near:
        if not dial_steps:
            await near.client.connect()
        others = [asyncio.create_task(near.client.query("select ?", (place,))) for place in range(in_flight)]
        task = asyncio.create_task(near.client.execute("insert", ("own",)))
        for step in STEPS:
            if step == cancel_at:
                task.cancel()
            if step >= answer_at and near.dialer.peers:
                near.peer.echo_all()
            await turns(1)
        await near.works()
        for place, other in enumerate(others):
            assert (await other).scalar() == place
        await asyncio.wait([task])
        if not task.cancelled():
            assert task.result().scalar() == "own"
        assert len(near.dialer.peers) == 1
        near.peer.listen()
        check_protocol(near)
        assert no_leftovers(near)


def no_leftovers(near: Near) -> bool:
    connection = near.client._line._connection
    assert connection is not None
    exchange = connection._exchange
    return not (exchange.waiting or exchange.abandoned or connection._held or connection._requests)


def test_a_call_cancelled_before_it_was_written_is_never_sent(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            first = asyncio.create_task(near.client.query("select ?", (1,)))
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 1)
            # Another one is in flight, so this one waits for the end of the loop's turn.
            late = [asyncio.create_task(near.client.execute("insert", (place,))) for place in (2, 3, 4)]
            await turns(1)
            late[1].cancel()
            await until(lambda: len(near.peer.requests) == 3)
            assert [number(request) for request in near.peer.requests] == [1, 2, 4]
            assert near.peer.cancels == []
            for request in near.peer.requests:
                near.peer.echo(request)
            assert (await first).scalar() == 1
            await asyncio.wait(late)
            assert late[1].cancelled()
            await near.works()

    run(main())


@pytest.mark.parametrize("taken", [0, 1, 100, 700_000])
def test_a_half_written_request_is_written_to_its_end_and_cancelled(run: Run[None], taken: int) -> None:
    """The worker stops reading in the middle of a large frame; the frames behind it must not be torn."""

    async def main() -> None:
        async with Near() as near:
            await near.client.connect()
            large = asyncio.create_task(near.client.execute("insert", (b"x" * 900_000,)))
            small = asyncio.create_task(near.client.execute("insert", (2,)))
            await turns(3)
            if taken:
                near.peer.heard += read_some(near, taken)
            await turns(2)
            large.cancel()
            await turns(2)
            await until(lambda: len(near.peer.requests) == 2)
            first, second = near.peer.requests
            await until(lambda: near.peer.cancels == [first.id])
            near.peer.say(OutgoingReply(first.id, row("late")))
            near.peer.echo(second)
            assert (await small).scalar() == 2
            await asyncio.wait([large])
            assert large.cancelled()
            await near.works()
            assert no_leftovers(near)

    run(main())


def read_some(near: Near, count: int) -> list[Any]:
    found: list[Any] = []
    left = count
    while left:
        try:
            data = near.peer.socket.recv(min(left, 65536))
        except BlockingIOError:
            break
        left -= len(data)
        found += near.peer.frames.feed(data)
    assert not found
    return found


def test_held_calls_are_cancelled_without_a_trace(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(limits_with(client_requests_max=2, pipeline_window=2)) as near:
            tasks = [asyncio.create_task(near.client.execute("insert", (place,))) for place in range(8)]
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 2)
            for place in (3, 4, 7):
                tasks[place].cancel()
            answered = 0
            while answered < 5:
                await until(lambda: len(near.peer.requests) > answered)  # noqa: B023 - used at once
                near.peer.echo(near.peer.requests[answered])
                answered += 1
            await asyncio.wait(tasks)
            assert [number(request) for request in near.peer.requests] == [0, 1, 2, 5, 6]
            assert near.peer.cancels == []
            assert [task.cancelled() for task in tasks] == [place in (3, 4, 7) for place in range(8)]
            await near.works()
            assert no_leftovers(near)

    run(main())


def test_a_cancelled_request_keeps_its_place_until_its_answer(run: Run[None]) -> None:
    """Else the worker, which has not ended it yet, would refuse the next one."""

    async def main() -> None:
        async with Near(limits_with(client_requests_max=1, pipeline_window=1)) as near:
            first = asyncio.create_task(near.client.execute("insert", (1,)))
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 1)
            second = asyncio.create_task(near.client.execute("insert", (2,)))
            await turns(2)
            first.cancel()
            await until(lambda: len(near.peer.cancels) == 1)
            await turns(5)
            assert len(near.peer.requests) == 1
            near.peer.say(OutgoingReply(near.peer.requests[0].id, row("late")))
            await until(lambda: len(near.peer.requests) == 2)
            near.peer.echo(near.peer.requests[1])
            assert (await second).scalar() == 2

    run(main())


def test_a_cancelled_caller_does_not_stop_the_others_from_connecting(run: Run[None]) -> None:
    async def once(cancel_at: int) -> None:
        async with Near(steps=4) as near:
            tasks = [asyncio.create_task(near.client.query("select ?", (place,))) for place in range(3)]
            await turns(cancel_at)
            tasks[0].cancel()
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) >= 2)
            for request in near.peer.requests:
                near.peer.echo(request)
            assert [(await task).scalar() for task in tasks[1:]] == [1, 2]
            assert len(near.dialer.peers) == 1

    async def main() -> None:
        for cancel_at in range(8):
            await once(cancel_at)

    run(main())


def test_a_cancelled_hand_shake_leaves_nothing(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        worker.welcome = lambda _welcome: None
        client = client_of(worker)
        task = asyncio.create_task(client.connect())
        peer = await away(worker.next_peer)
        await until(lambda: peer.hello is not None)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await away(peer.join)
        worker.welcome = lambda welcome: welcome
        assert (await client.query("select ?", (1,))).scalar() == 1
        await client.close()

    run(main())


WAITS: dict[str, Callable[[Awaitable[Any]], Awaitable[Any]]] = {
    "wait_for": lambda call: asyncio.wait_for(call, 0.3),
    "gather": lambda call: asyncio.wait_for(asyncio.gather(call), 0.3),
}


@pytest.mark.parametrize("way", WAITS)
def test_the_ways_of_asyncio_to_cancel(run: Run[None], worker: FakeWorker, way: str) -> None:
    async def main() -> None:
        worker.answer = nothing
        client, peer = await both_of(worker)
        async with client:
            with pytest.raises(TimeoutError):
                await WAITS[way](client.execute("insert", (1,)))
            request = await away(peer.next)
            assert await away(peer.next_cancel) == request.id
            next_call = asyncio.create_task(client.query("select ?", (2,)))
            second = await away(peer.next)
            peer.reply(request.id, row("late"))
            peer.reply(second.id, row(2))
            assert (await next_call).scalar() == 2

    run(main())


def test_large_answers_to_cancelled_calls_are_dropped(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        worker.answer = nothing
        client, peer = await both_of(worker)
        async with client:
            tasks = [
                asyncio.create_task(client.query("select ?", (place,), max_result_bytes=8 * MIB))
                for place in range(4)
            ]
            requests = [await away(peer.next) for _ in tasks]
            for task in tasks[:3]:
                task.cancel()
            for _ in range(3):
                await away(peer.next_cancel)
            sending = asyncio.create_task(away(send_large, peer, [request.id for request in requests]))
            assert len((await tasks[3]).scalar()) == 4_000_000
            await sending

    run(main())


def send_large(peer: Any, ids: list[int]) -> None:
    for request_id in ids:
        peer.reply(request_id, row(b"z" * 4_000_000))
