"""Pipelines: order, windows, few writes, errors, cancellation, and lost workers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from storage_worker.client.aio_pipeline import AsyncPipeline, AsyncPipelineFuture
from storage_worker.protocol.envelope import OutgoingReply, Request
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OperationFailedError,
    OverloadedError,
    StorageError,
    WorkerUnavailableError,
)
from storage_worker.protocol.statements import Rows
from tests.client.fake import FakeWorker, echo, limits_with, number
from tests.client.test_pipeline import DyingAt, Recorder
from tests.client_async.conftest import Run
from tests.client_async.peers import Near, client_of, row, turns, until

SHORT_S = 0.3

Futures = list[AsyncPipelineFuture[Rows]]


async def insert_into(
    futures: Futures,
    pipeline: AsyncPipeline,
    count: int,
    then: Callable[[AsyncPipelineFuture[Rows]], Awaitable[None]] | None = None,
) -> None:
    """Insert the first numbers; `then` is called with each future inside the block."""
    async with pipeline:
        for place in range(count):
            futures.append(await pipeline.execute("insert", (place,)))
            if then is not None:
                await then(futures[-1])


def test_results_come_in_order(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        recorder = worker.answer = Recorder()
        futures: Futures = []
        async with client_of(worker) as client:
            await insert_into(futures, client.pipeline(), 1000)
            assert [(await future).scalar() for future in futures] == list(range(1000))
            assert [rows.scalar() for rows in await asyncio.gather(*futures)] == list(range(1000))
        assert recorder.values == list(range(1000))
        assert all(future.done() for future in futures)

    run(main())


@pytest.mark.parametrize("window", [1, 2, 3, 7, 256])
def test_no_more_than_the_window_is_in_flight(run: Run[None], window: int) -> None:
    async def main() -> None:
        async with Near() as near:
            futures: Futures = []
            await near.client.connect()
            filling = asyncio.create_task(insert_into(futures, near.client.pipeline(window), window * 3))
            for place in range(3):
                await until(lambda: len(near.peer.requests) == window * (place + 1))  # noqa: B023
                await turns(5)
                requests = near.peer.requests[window * place :]
                assert len(requests) == window
                for request in requests:
                    near.peer.echo(request)
            await filling
            assert [(await future).scalar() for future in futures] == list(range(window * 3))

    run(main())


def test_pipelines_and_calls_share_the_clients_places(run: Run[None]) -> None:
    """Three pipelines may have more in flight than the worker takes of one client; it sees no more."""

    async def main() -> None:
        async with Near(limits_with(client_requests_max=10, pipeline_window=8)) as near:
            await near.client.connect()
            found: list[Futures] = [[], [], []]
            filling = [
                asyncio.create_task(insert_into(futures, near.client.pipeline(), 40)) for futures in found
            ]
            answered = 0
            while answered < 120:
                await until(lambda: len(near.peer.requests) > answered)  # noqa: B023 - used at once
                await turns(3)
                requests = near.peer.requests[answered:]
                assert len(requests) <= 10
                for request in requests:
                    near.peer.echo(request)
                answered += len(requests)
            await asyncio.gather(*filling)
            for futures in found:
                assert [(await future).scalar() for future in futures] == list(range(40))
            order = [number(request) for request in near.peer.requests]
            assert sorted(order) == sorted([*range(40)] * 3)

    run(main())


def test_requests_are_written_together(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            await client.connect()
            connection = client._line._connection
            assert connection is not None
            send, writes = connection._outgoing._send, []

            def count(data: bytes, flags: int) -> int:
                writes.append(len(data))
                return send(data, flags)

            connection._outgoing._send = count  # type: ignore[assignment]
            await insert_into([], client.pipeline(window=100), 1000)
            assert len(writes) <= 150

    run(main())


def test_a_result_is_there_without_the_rest(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        async with client_of(worker) as client, client.pipeline() as pipeline:
            assert (await (await pipeline.execute("insert", (1,)))).scalar() == 1
            assert (await (await pipeline.query("select ?", (2,))).result()).scalar() == 2

    run(main())


def test_a_call_of_the_client_comes_behind_what_was_pipelined(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        recorder = worker.answer = Recorder()
        async with client_of(worker) as client, client.pipeline() as pipeline:
            for place in range(5):
                _ = await pipeline.execute("insert", (place,))
            await client.query("select ?", ("read",))
        assert recorder.values == [0, 1, 2, 3, 4, "read"]

    run(main())


def test_batches_and_calls_can_be_pipelined(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        worker.answer = lambda _peer, request: [Rows()] if request.operation == "sql.batch" else Rows()
        async with client_of(worker) as client, client.pipeline() as pipeline:
            batch = await pipeline.batch([("insert", (1,))])
            assert await batch == [Rows()]

    run(main())


def test_the_first_error_is_raised_at_the_end_unless_it_was_raised_before(
    run: Run[None], worker: FakeWorker
) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            recorder = worker.answer = Recorder(3, 7)
            futures: Futures = []
            with pytest.raises(OperationFailedError, match="no 3"):
                await insert_into(futures, client.pipeline(), 500)
            assert len(recorder.values) == 500
            assert (await futures[499]).scalar() == 499
            with pytest.raises(OperationFailedError, match="no 7"):
                await futures[7]

            async def look(future: AsyncPipelineFuture[Rows]) -> None:
                if len(others) == 4:
                    with pytest.raises(OperationFailedError, match="no 3"):
                        await future

            others: Futures = []
            with pytest.raises(OperationFailedError, match="no 7"):
                await insert_into(others, client.pipeline(), 10, look)

    run(main())


def test_many_errors_keep_the_first(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        worker.answer = Recorder(*range(5, 1000))
        async with client_of(worker) as client:
            pipeline = client.pipeline(8)
            with pytest.raises(OperationFailedError, match="no 5"):
                await insert_into([], pipeline, 1000)
            assert len(pipeline._failures) == 8

    run(main())


def test_a_blocks_own_exception_goes_first(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        recorder = worker.answer = Recorder(1)

        async def fail(_future: AsyncPipelineFuture[Rows]) -> None:
            if len(futures) == 5:
                raise ZeroDivisionError

        futures: Futures = []
        async with client_of(worker) as client:
            with pytest.raises(ZeroDivisionError):
                await insert_into(futures, client.pipeline(), 10, fail)
        assert recorder.values == [0, 1, 2, 3, 4]

    run(main())


@pytest.mark.parametrize("cancel_at", range(12))
def test_a_cancelled_block_cancels_what_has_no_answer(run: Run[None], cancel_at: int) -> None:
    """In whatever it was: filling its window, waiting for room, waiting for its end."""

    async def main() -> None:
        async with Near(limits_with(client_requests_max=5, pipeline_window=5)) as near:
            await near.client.connect()
            futures: Futures = []
            task = asyncio.create_task(insert_into(futures, near.client.pipeline(4), 9))
            for step in range(12):
                if step == cancel_at:
                    task.cancel()
                await turns(1)
                for envelope in near.peer.listen()[:2]:
                    if isinstance(envelope, Request):
                        near.peer.echo(envelope)
            await asyncio.wait([task])
            assert task.cancelled()
            for place, future in enumerate(futures):
                sent = place in [number(request) for request in near.peer.requests]
                assert await value_or_outcome(future) in (place, "unknown" if sent else "not_committed")
            answer_all(near)
            await near.works()
            connection = near.client._line._connection
            assert connection is not None
            assert not connection._exchange.waiting

    run(main())


def test_a_block_that_is_cancelled_at_its_end_cancels_what_it_waits_for(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            await near.client.connect()
            futures: Futures = []
            task = asyncio.create_task(insert_into(futures, near.client.pipeline(), 3))
            await until(lambda: len(near.peer.requests) == 3)
            near.peer.echo(near.peer.requests[0])
            await turns(5)
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: near.peer.cancels == [request.id for request in near.peer.requests[1:]])
            assert [await value_or_outcome(future) for future in futures] == [0, "unknown", "unknown"]

    run(main())


def answer_all(near: Near) -> None:
    """Answer what is still in flight, as a worker answers what was cancelled."""
    connection = near.client._line._connection
    assert connection is not None
    near.peer.listen()
    for request_id in sorted({*connection._exchange.waiting, *connection._exchange.abandoned}):
        if request_id in [request.id for request in near.peer.requests]:
            near.peer.say(OutgoingReply(request_id, row("late")))


def test_a_cancelled_wait_leaves_the_call_alone(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near, near.client.pipeline() as pipeline:
            future = await pipeline.execute("insert", (1,))
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(future.result(), 0.01)
                with pytest.raises(DeadlineExceededError) as caught:
                    await future.result(0.01)
                assert caught.value.outcome == "unknown"
                with pytest.raises(DeadlineExceededError):
                    await future.result(0)
            waits = [asyncio.ensure_future(future.result()) for _ in range(3)]
            await turns(2)
            waits[1].cancel()
            near.peer.echo(near.peer.requests[0])
            assert [(await wait).scalar() for wait in (waits[0], waits[2])] == [1, 1]
            assert near.peer.cancels == []

    run(main())


def test_a_call_waits_for_its_place_and_not_for_its_answer(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(limits_with(client_requests_max=1, pipeline_window=1)) as near:
            await near.client.connect()
            other = asyncio.create_task(near.client.execute("insert", ("other",)))
            await turns(1)
            async with near.client.pipeline() as pipeline:
                putting = asyncio.create_task(pipeline.execute("insert", (1,)))
                await turns(5)
                assert not putting.done()
                near.peer.echo(near.peer.requests[0])
                future = await putting
                assert not future.done()
                await until(lambda: len(near.peer.requests) == 2)
                near.peer.echo(near.peer.requests[1])
                assert (await future).scalar() == 1
            assert (await other).scalar() == "other"

    run(main())


def test_a_call_cancelled_while_it_waits_for_its_place_never_was(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(limits_with(client_requests_max=1, pipeline_window=1)) as near:
            await near.client.connect()
            other = asyncio.create_task(near.client.execute("insert", ("other",)))
            await turns(1)
            async with near.client.pipeline() as pipeline:
                with pytest.raises(TimeoutError):
                    _ = await asyncio.wait_for(pipeline.execute("insert", (1,)), 0.01)
                near.peer.echo(near.peer.requests[0])
                assert (await other).scalar() == "other"
                future = await pipeline.execute("insert", (2,))
                await until(lambda: len(near.peer.requests) == 2)
                near.peer.echo(near.peer.requests[1])
                assert (await future).scalar() == 2
            assert [number(request) for request in near.peer.requests] == ["other", 2]

    run(main())


def test_a_bad_value_is_refused_and_the_pipeline_goes_on(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        recorder = worker.answer = Recorder()
        async with client_of(worker) as client, client.pipeline() as pipeline:
            _ = await pipeline.execute("insert", (1,))
            for value in (2**63, "\ud800"):
                with pytest.raises(InvalidRequestError):
                    _ = await pipeline.execute("insert", (value,))
            _ = await pipeline.execute("insert", (2,))
        with pytest.raises(InvalidRequestError):
            _ = await pipeline.execute("insert", (3,))
        assert recorder.values == [1, 2]

    run(main())


def test_a_refusal_is_not_repeated_behind_later_calls(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        seen: list[Any] = []

        def refuse(peer: Any, request: Any) -> object:
            seen.append(number(request))
            return OverloadedError("full") if number(request) == 1 else echo(peer, request)

        worker.answer = refuse
        async with client_of(worker) as client:
            with pytest.raises(OverloadedError):
                await insert_into([], client.pipeline(), 4)
        assert seen == [0, 1, 2, 3]

    run(main())


def test_each_call_has_its_own_deadline(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near, near.client.pipeline() as pipeline:
            late = await pipeline.execute("insert", (1,), timeout=SHORT_S)
            good = await pipeline.execute("insert", (2,))
            with pytest.raises(DeadlineExceededError) as caught:
                await late
            assert caught.value.outcome == "unknown"
            first, second = near.peer.requests
            await until(lambda: near.peer.cancels == [first.id])
            near.peer.say(OutgoingReply(first.id, row("late")))
            near.peer.say(OutgoingReply(second.id, row("own")))
            assert (await good).scalar() == "own"

    run(main())


def test_a_deadline_that_nobody_waits_for_ends_the_call(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            pipeline = near.client.pipeline()
            future = await pipeline.execute("insert", (1,), timeout=SHORT_S)
            await until(lambda: len(near.peer.cancels) == 1)
            assert future.done()
            with pytest.raises(DeadlineExceededError):
                await pipeline.__aexit__(None, None, None)
            await near.works()

    run(main())


def test_a_full_window_is_waited_for_within_the_deadline(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near, near.client.pipeline(2) as pipeline:
            futures = [await pipeline.execute("insert", (place,)) for place in range(2)]
            with pytest.raises(DeadlineExceededError) as caught:
                _ = await pipeline.execute("insert", (2,), timeout=SHORT_S)
            assert caught.value.outcome == "not_committed"
            assert caught.value.details["stage"] == "window"
            for request in near.peer.requests:
                near.peer.echo(request)
            assert [(await future).scalar() for future in futures] == [0, 1]
            assert len(near.peer.requests) == 2

    run(main())


# Lost workers


def test_reads_and_writes_with_keys_outlive_their_worker_in_order(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        dying = worker.answer = DyingAt(20)
        async with client_of(worker) as client:
            futures: Futures = []
            async with client.pipeline(16) as pipeline:
                for place in range(60):
                    if place % 2:
                        futures.append(await pipeline.execute("insert", (place,), request_key=f"k{place}"))
                    else:
                        futures.append(await pipeline.query("select ?", (place,)))
            assert [rows.scalar() for rows in await asyncio.gather(*futures)] == list(range(60))
        again = dying.seen[dying.seen.index(20) + 1 :]
        assert again == list(range(again[0], 60))

    run(main())


def test_many_tasks_that_wait_send_lost_calls_again_once_and_in_order(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near, near.client.pipeline() as pipeline:
            futures = [
                await pipeline.execute("insert", (place,), request_key=f"k{place}") for place in range(6)
            ]
            waits = [asyncio.ensure_future(future.result()) for future in futures]
            await until(lambda: len(near.peer.requests) == 6)
            near.peer.socket.close()
            await until(lambda: len(near.dialer.peers) == 2)
            for place in range(6):
                await until(lambda: len(near.peer.requests) > place)  # noqa: B023 - used at once
                if place == 2:
                    # Whoever sends for all is cancelled; the next one goes on where it was.
                    waits[0].cancel()
                    await turns(3)
                    continue
                near.peer.echo(near.peer.requests[place])
            await until(lambda: len(near.peer.requests) > 6)
            near.peer.echo(near.peer.requests[6])
            assert [rows.scalar() for rows in await asyncio.gather(*waits[1:])] == [1, 2, 3, 4, 5]
            assert waits[0].cancelled()
            assert (await futures[0]).scalar() == 0
            assert [number(request) for request in near.peer.requests] == [0, 1, 2, 2, 3, 4, 5]
            assert near.peer.cancels == [near.peer.requests[2].id]

    run(main())


def test_writes_without_a_key_are_unknown_and_the_pipeline_goes_on(
    run: Run[None], worker: FakeWorker
) -> None:
    async def main() -> None:
        dying = worker.answer = DyingAt(5)
        futures: Futures = []

        async def let_it_die(_future: AsyncPipelineFuture[Rows]) -> None:
            if len(futures) == 8:
                await until(lambda: dying.value is None)

        async with client_of(worker) as client:
            with pytest.raises(WorkerUnavailableError) as caught:
                await insert_into(futures, client.pipeline(8), 40, let_it_die)
            assert caught.value.outcome == "unknown"
            outcomes = [await value_or_outcome(future) for future in futures]
        lost = [place for place, outcome in enumerate(outcomes) if outcome == "unknown"]
        assert 5 in lost
        assert len(lost) <= 8
        assert [value for value in outcomes if value != "unknown"] == [
            place for place in range(40) if place not in lost
        ]
        assert len(dying.seen) == len(set(dying.seen))

    run(main())


async def value_or_outcome(future: AsyncPipelineFuture[Rows]) -> object:
    try:
        return (await future).scalar()
    except StorageError as error:
        return error.outcome
