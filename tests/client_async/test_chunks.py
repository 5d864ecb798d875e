"""Large values of an asynchronous client: in parts, within the credit, between other tasks' calls, and cut short."""

import asyncio
import os

import msgspec
import pytest

from storage_worker.protocol.envelope import ARGUMENTS_FOLLOW, Chunk, Credit, Goodbye, Request
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ProtocolError,
    RequestTooLargeError,
    WorkerUnavailableError,
)
from storage_worker.protocol.statements import Statement
from tests.client.chunks import AHEAD, MOST, PART, chunks_of, small_limits
from tests.client_async.conftest import Run
from tests.client_async.peers import Near, NearPeer, row, turns, until

LARGE = b"x" * 1_234


def chunks(peer: NearPeer) -> list[Chunk]:
    peer.listen()
    return [envelope for envelope in peer.heard if isinstance(envelope, Chunk)]


def credits_(peer: NearPeer) -> list[Credit]:
    peer.listen()
    return [envelope for envelope in peer.heard if isinstance(envelope, Credit)]


async def announced(near: Near, place: int = 0) -> Request:
    """The request in that place, counted among those whose arguments follow."""

    def large() -> list[Request]:
        return [request for request in near.peer.requests if request.flags == ARGUMENTS_FOLLOW]

    await until(lambda: bool(near.dialer.peers) and len(large()) > place)
    return large()[place]


async def receive(peer: NearPeer, request: Request) -> bytes:
    """Take the arguments that follow a request, as a worker does."""
    size = msgspec.msgpack.decode(request.arguments, type=int)
    parts = -(-size // PART)
    for start in range(0, parts, AHEAD):
        peer.say(Credit(request.id, min(AHEAD, parts - start)))
        await until(lambda: len(parts_of(peer, request.id)) >= min(parts, start + AHEAD))  # noqa: B023
    assert [part.sequence for part in parts_of(peer, request.id)] == list(range(parts))
    return b"".join(part.part for part in parts_of(peer, request.id))


def parts_of(peer: NearPeer, request_id: int) -> list[Chunk]:
    return [chunk for chunk in chunks(peer) if chunk.id == request_id]


def value_in(arguments: bytes) -> object:
    parameters = msgspec.msgpack.decode(arguments, type=Statement).parameters
    assert isinstance(parameters, list)
    return parameters[0]


@pytest.mark.parametrize("size", [395, 900, 1_000, MOST - 60])
def test_arguments_arrive_whole(run: Run[None], size: int) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            value = os.urandom(size)
            call = asyncio.create_task(near.client.execute("x", (value,)))
            request = await announced(near)
            assert value_in(await receive(near.peer, request)) == value
            near.peer.say_row(request, 1)
            assert (await call).scalar() == 1
            await near.works()

    run(main())


def test_nothing_goes_beyond_the_credit_and_others_go_between(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            call = asyncio.create_task(near.client.execute("x", (LARGE,)))
            request = await announced(near)
            await near.works()
            assert chunks(near.peer) == []
            near.peer.say(Credit(request.id, 2))
            await until(lambda: len(chunks(near.peer)) == 2)
            await near.works()
            assert len(chunks(near.peer)) == 2
            call.cancel()

    run(main())


def test_cancelling_in_the_middle(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            for granted in (0, 1, 3):
                call = asyncio.create_task(near.client.execute("x", (LARGE,)))
                request = await announced(near, [0, 1, 3].index(granted))
                if granted:
                    near.peer.say(Credit(request.id, granted))
                    await until(lambda: len(parts_of(near.peer, request.id)) == granted)  # noqa: B023
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                await until(lambda: request.id in near.peer.cancels)  # noqa: B023
                # Credit that comes too late moves nothing, and its answer reaches nobody.
                near.peer.say(Credit(request.id, 1))
                near.peer.fail(request, InvalidRequestError("cancelled"))
                await near.works()
                assert len(parts_of(near.peer, request.id)) == granted

    run(main())


def test_a_refusal_in_the_middle_stops_it(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            call = asyncio.create_task(near.client.execute("x", (LARGE,)))
            request = await announced(near)
            near.peer.say(Credit(request.id, 2))
            near.peer.fail(request, InvalidRequestError("no"))
            with pytest.raises(InvalidRequestError):
                await call
            await until(lambda: near.peer.cancels == [request.id])
            await near.works()

    run(main())


def test_a_deadline_in_the_middle(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            with pytest.raises(DeadlineExceededError) as caught:
                await near.client.execute("x", (LARGE,), timeout=0.05)
            assert caught.value.outcome == "not_committed"
            await until(lambda: len(near.peer.cancels) >= 1)
            near.peer.fail(near.peer.requests[0], InvalidRequestError("cancelled"))
            await near.works()

    run(main())


def test_a_lost_worker_is_no_doubt_before_they_were_whole(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            call = asyncio.create_task(near.client.execute("x", (LARGE,)))
            request = await announced(near)
            near.peer.say(Credit(request.id, 1))
            await until(lambda: len(chunks(near.peer)) == 1)
            near.peer.socket.close()
            await until(lambda: len(near.dialer.peers) == 2)
            again = await announced(near)
            await receive(near.peer, again)
            near.peer.socket.close()
            with pytest.raises(WorkerUnavailableError) as caught:
                await call
            assert caught.value.outcome == "unknown"

    run(main())


def test_goodbye_in_the_middle_lets_them_go_on(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            call = asyncio.create_task(near.client.execute("x", (LARGE,)))
            request = await announced(near)
            near.peer.say(Goodbye("stopping"))
            assert value_in(await receive(near.peer, request)) == LARGE
            near.peer.say_row(request, 1)
            assert (await call).scalar() == 1

    run(main())


def test_beyond_the_limit_nothing_is_sent(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            await near.client.connect()
            with pytest.raises(RequestTooLargeError):
                await near.client.execute("x", (b"x" * MOST,))
            await near.works()
            assert len(near.peer.requests) == 1

    run(main())


def test_more_than_the_worker_spools_for_one_client_waits_its_turn(run: Run[None]) -> None:
    """The worker would refuse it; small requests pass by meanwhile, and one that is cancelled is not sent."""

    async def main() -> None:
        async with Near(small_limits(client_spool_bytes_max=MOST)) as near:
            values = [bytes([place]) * 2_000 for place in range(4)]
            tasks = [asyncio.create_task(near.client.execute("x", (value,))) for value in values]
            first, second = await announced(near), await announced(near, 1)
            await near.works()
            tasks[2].cancel()
            assert len([each for each in near.peer.requests if each.flags]) == 2
            for request in (first, second):
                await receive(near.peer, request)
            near.peer.say_row(second, "second")
            last = await announced(near, 2)
            assert value_in(await receive(near.peer, last)) == values[3]
            near.peer.say_row(first, "first")
            near.peer.say_row(last, "last")
            assert (await tasks[0]).scalar() == "first"
            assert (await tasks[1]).scalar() == "second"
            assert (await tasks[3]).scalar() == "last"

    run(main())


def test_a_pipeline_keeps_its_order_around_them(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:

            async def call_all() -> list[object]:
                async with near.client.pipeline() as pipeline:
                    futures = [await pipeline.execute("x", (value,)) for value in (1, LARGE, 2)]
                    return [(await future).scalar() for future in futures]

            calls = asyncio.create_task(call_all())
            large = await announced(near)
            await turns(20)
            assert len(near.peer.requests) == 2
            await receive(near.peer, large)
            await until(lambda: len(near.peer.requests) == 3)
            place = {id(envelope): place for place, envelope in enumerate(near.peer.heard)}
            assert place[id(chunks(near.peer)[-1])] < place[id(near.peer.requests[2])]
            for request, answer in zip(near.peer.requests, "abc", strict=True):
                near.peer.say_row(request, answer)
            assert await calls == ["a", "b", "c"]

    run(main())


@pytest.mark.parametrize("size", [1, PART - 20, PART, 1_234])
def test_a_result_in_chunks(run: Run[None], size: int) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            value = os.urandom(size)
            call = asyncio.create_task(near.client.query("select 1"))
            await until(lambda: bool(near.dialer.peers) and bool(near.peer.requests))
            (request,) = near.peer.requests
            frames = chunks_of(request.id, row(value))
            for place, data in enumerate(frames):
                near.peer.socket.send(data)
                await until(lambda: sum(each.count for each in credits_(near.peer)) + AHEAD > place)  # noqa: B023
            assert (await call).scalar() == value
            await near.works()

    run(main())


def test_cancelling_in_the_middle_of_a_result(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            call = asyncio.create_task(near.client.query("select 1"))
            await until(lambda: bool(near.dialer.peers) and bool(near.peer.requests))
            (request,) = near.peer.requests
            frames = chunks_of(request.id, row(b"x" * 350))
            near.peer.socket.send(frames[0])
            await turns(5)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            near.peer.socket.send(b"".join(frames[1:]))
            await near.works()
            assert near.peer.cancels == [request.id]

    run(main())


def test_chunks_that_cannot_be_end_the_connection(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(small_limits()) as near:
            call = asyncio.create_task(near.client.query("select 1", retries=0))
            await until(lambda: bool(near.dialer.peers) and bool(near.peer.requests))
            near.peer.say(Chunk(near.peer.requests[0].id, 1, b"x"))
            with pytest.raises(ProtocolError):
                await call
            await near.works()

    run(main())
