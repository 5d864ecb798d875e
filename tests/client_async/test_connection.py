"""One connection and many tasks: every answer reaches its own call, and every end reaches all."""

import asyncio
import random
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from storage_worker.client import calls
from storage_worker.client.aio_connection import AsyncConnection
from storage_worker.client.terms import agree
from storage_worker.protocol.envelope import Goodbye, OutgoingReply, Request, failure_of
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    OverloadedError,
    ProtocolError,
    StorageError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import MIB
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import Health, Rows, Statement
from tests.client.fake import (
    NOTHING,
    PATIENCE_S,
    FakeWorker,
    Peer,
    echo,
    frame_of,
    limits_with,
    nothing,
    number,
)
from tests.client.test_connection import GARBAGE
from tests.client_async.conftest import Run
from tests.client_async.peers import Near, NearPeer, answered, away, both_of, client_of, row, turns, until

SHORT_S = 0.05

CUSTOM = Operation[[str, list[int]], Rows]("tests.custom", "write", Statement, Rows)


def test_a_reply_may_come_byte_by_byte(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            task = asyncio.create_task(near.client.query("select ?", (5,)))
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 1)
            for byte in frame_of(OutgoingReply(near.peer.requests[0].id, row(5))):
                near.peer.socket.send(bytes([byte]))
                await turns(2)
            assert (await task).scalar() == 5

    run(main())


def test_shuffled_answers_and_mixed_deadlines_of_fifty_tasks(run: Run[None]) -> None:
    """Each answer reaches its own call; some have given up before, some were cancelled, and theirs come late."""

    async def once(seed: int) -> None:
        chance = random.Random(seed)
        async with Near() as near:
            await near.client.connect()
            impatient = set(chance.sample(range(50), 12))
            cancelled = set(chance.sample(sorted(set(range(50)) - impatient), 12))
            tasks = {
                place: asyncio.create_task(
                    near.client.query(
                        "select ?",
                        (place,),
                        timeout=chance.uniform(0.01, SHORT_S)
                        if place in impatient
                        else chance.uniform(20, 600),
                        retries=0,
                    )
                )
                for place in range(50)
            }
            patient = set(range(50)) - impatient
            await until(lambda: patient <= {number(request) for request in near.peer.requests})
            for place in cancelled:
                tasks[place].cancel()
            gone = impatient | cancelled
            await asyncio.wait([tasks[place] for place in gone])
            # Where the machine is slow, an impatient one may end before it is sent.
            requests = list(near.peer.requests)
            ids = {request.id for request in requests if number(request) in gone}
            await until(lambda: set(near.peer.cancels) == ids)
            chance.shuffle(requests)
            for request in requests:
                near.peer.echo(request)
                if chance.random() < 0.3:
                    await turns(1)
            for place, task in tasks.items():
                if place in impatient:
                    with pytest.raises(DeadlineExceededError):
                        await task
                elif place in cancelled:
                    with pytest.raises(asyncio.CancelledError):
                        await task
                else:
                    assert (await task).scalar() == place
            await near.works()
            assert len(near.dialer.peers) == 1

    async def main() -> None:
        for seed in range(10):
            await once(seed)

    run(main())


def test_a_late_answer_is_dropped_and_the_outcome_is_unknown(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        worker.answer = nothing
        client, peer = await both_of(worker)
        async with client:
            with pytest.raises(DeadlineExceededError) as caught:
                await client.execute("insert into t values (?)", (1,), timeout=SHORT_S)
            assert caught.value.outcome == "unknown"
            assert caught.value.details["stage"] == "reply"
            late = await away(peer.next)
            assert await away(peer.next_cancel) == late.id
            with pytest.raises(DeadlineExceededError) as caught:
                await client.query("select 1", timeout=SHORT_S)
            assert caught.value.outcome == "not_committed"
            call = asyncio.create_task(client.query("select ?", (2,)))
            peer.reply((await away(peer.next)).id, row("late, too"))
            request = await away(peer.next)
            peer.reply(late.id, row("late"))
            peer.reply(request.id, row("own"))
            assert (await call).scalar() == "own"
        assert worker.peers.empty()

    run(main())


def test_the_workers_final_word_beyond_the_deadline_is_waited_for(run: Run[None]) -> None:
    """The grace is long here, so that the order decides and no clock."""

    async def main() -> None:
        async with Near(limits_with(reply_grace_ms=50_000)) as near:
            task = asyncio.create_task(near.client.execute("insert", (1,), timeout=SHORT_S))
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 1)
            await asyncio.sleep(SHORT_S)
            final = DeadlineExceededError("too late", details={"stage": "queue"})
            near.peer.say(failure_of(near.peer.requests[0].id, final, 100))
            with pytest.raises(DeadlineExceededError) as caught:
                await task
            assert caught.value.outcome == "not_committed"
            assert caught.value.details["stage"] == "queue"
            assert near.peer.cancels == []

    run(main())


def end_time(near: Near) -> None:
    """Let the time of all calls in flight be over, and the loop look at its timers before its sockets."""
    connection = near.client._line._connection
    assert connection is not None
    for waiter in connection._exchange.waiting.values():
        waiter.limit_ns = 1
    connection._ring()


def test_an_answer_that_came_while_the_loop_was_busy_is_taken(run: Run[None]) -> None:
    """Whatever the loop looks at first when it is free again, its timers or its sockets."""

    async def main() -> None:
        async with Near() as near:
            await near.client.connect()
            task = asyncio.create_task(near.client.execute("insert", (1,)))
            await until(lambda: len(near.peer.requests) == 1)
            near.peer.echo(near.peer.requests[0])
            end_time(near)
            assert (await task).scalar() == 1

    run(main())


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 11])
def test_a_death_reaches_every_waiter_wherever_the_frame_was_cut(run: Run[None], cut: int) -> None:
    async def main() -> None:
        async with Near() as near:
            await near.client.connect()
            writes = [asyncio.create_task(near.client.execute("insert", (n,))) for n in range(5)]
            reads = [asyncio.create_task(near.client.query("select ?", (n,), retries=0)) for n in range(5)]
            await until(lambda: len(near.peer.requests) == 10)
            near.peer.socket.send(frame_of(OutgoingReply(near.peer.requests[0].id, row(1)))[:cut])
            near.peer.socket.close()
            for write in writes:
                with pytest.raises(WorkerUnavailableError) as caught:
                    await write
                assert caught.value.outcome == "unknown"
                assert caught.value.retryable
            for read in reads:
                with pytest.raises(WorkerUnavailableError) as caught:
                    await read
                assert caught.value.outcome == "not_committed"
            await near.works()

    run(main())


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_a_protocol_error_and_the_next_call_connects_anew(run: Run[None], garbage: bytes) -> None:
    async def main() -> None:
        async with Near() as near:
            task = asyncio.create_task(near.client.execute("insert", (1,)))
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 1)
            near.peer.socket.send(garbage)
            with pytest.raises(ProtocolError) as caught:
                await task
            assert caught.value.outcome == "unknown"
            await near.works()
            assert len(near.dialer.peers) == 2

    run(main())


def test_answers_before_the_garbage_still_count(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            tasks = [asyncio.create_task(near.client.query("select ?", (n,))) for n in range(2)]
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 2)
            reply = frame_of(OutgoingReply(near.peer.requests[0].id, row("first")))
            near.peer.socket.send(reply + b"\xff\xff\xff\xff")
            assert (await tasks[0]).scalar() == "first"
            with pytest.raises(ProtocolError):
                await tasks[1]

    run(main())


def test_answers_that_came_before_a_failed_write_still_count(run: Run[None]) -> None:
    """A worker that ends answers what it has, and its end is met by a write before its answers are read."""

    async def main() -> None:
        async with Near() as near:
            await near.client.connect()
            tasks = [asyncio.create_task(near.client.execute("insert", (n,), retries=0)) for n in range(3)]
            await until(lambda: len(near.peer.requests) == 3)
            for request in near.peer.requests:
                near.peer.echo(request)
            near.peer.socket.close()
            connection = near.client._line._connection
            assert connection is not None
            connection._outgoing.add(connection._exchange.waiting[1], b"x", at_once=True)
            assert [(await task).scalar() for task in tasks] == [0, 1, 2]

    run(main())


async def read_no_more(
    near: Near,
) -> tuple[NearPeer, AsyncConnection, asyncio.Task[Rows], asyncio.Task[Rows]]:
    """A worker that has one insert and reads no more, and a second one that met that."""
    first = asyncio.create_task(near.client.execute("insert", (1,), retries=0))
    await until(lambda: bool(near.dialer.peers) and len(near.peer.requests) == 1)
    peer, connection = near.peer, near.client._line._connection
    assert connection is not None
    peer.socket.shutdown(socket.SHUT_RD)
    second = asyncio.create_task(near.client.execute("insert", (2,)))
    await until(lambda: not connection.is_open)
    return peer, connection, first, second


def test_a_worker_that_reads_no_more_is_heard_to_its_end(run: Run[None]) -> None:
    """It takes nothing more, but has not said its last word yet when a write meets that."""

    async def main() -> None:
        async with Near() as near:
            peer, _, first, second = await read_no_more(near)
            peer.echo(peer.requests[0])
            peer.socket.close()
            assert (await first).scalar() == 1
            # That one was never sent, and goes to the next connection.
            await until(lambda: near.peer is not peer and answered(near.peer, 2))
            assert (await second).scalar() == 2

    run(main())


def test_a_transaction_s_call_to_a_worker_that_reads_no_more_ends_at_once(run: Run[None]) -> None:
    """It has no other connection to go to, and nothing more is written to that one."""

    async def main() -> None:
        async with Near() as near:
            peer, connection, first, second = await read_no_more(near)
            terms = agree(connection.limits, None)
            inside = asyncio.create_task(connection.request(calls.COMMIT_CALL, terms, 1))
            await turns(2)
            assert inside.done()
            with pytest.raises(WorkerUnavailableError) as caught:
                await inside
            assert (caught.value.outcome, caught.value.details["sent"]) == ("not_committed", False)
            peer.echo(peer.requests[0])
            peer.socket.close()
            assert (await first).scalar() == 1
            await until(lambda: near.peer is not peer and answered(near.peer, 2))
            await second

    run(main())


def test_after_an_interrupted_write_nobody_is_told_that_nothing_was_sent(run: Run[None]) -> None:
    """The signal comes after the system took the bytes, and before the client has counted them."""

    async def main() -> None:
        async with Near() as near:
            await near.client.connect()
            connection = near.client._line._connection
            assert connection is not None
            outgoing = connection._outgoing
            send = outgoing._send

            def send_and_interrupt(data: Any, flags: int, /) -> int:
                send(data, flags)
                outgoing._send = send
                raise KeyboardInterrupt

            pipeline = near.client.pipeline()
            future = await pipeline.execute("insert", (1,))
            outgoing._send = send_and_interrupt  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                connection.flush()
            near.peer.socket.close()
            with pytest.raises(WorkerUnavailableError) as caught:
                await future
            assert caught.value.outcome == "unknown"
            assert len(near.dialer.peers) == 1

    run(main())


def test_closing_hears_what_has_come(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            tasks = [asyncio.create_task(near.client.execute("insert", (n,))) for n in range(2)]
            await until(lambda: bool(near.dialer.peers) and len(near.peer.requests) == 2)
            near.peer.echo(near.peer.requests[0])
            await near.client.close()
            assert (await tasks[0]).scalar() == 0
            with pytest.raises(WorkerUnavailableError) as caught:
                await tasks[1]
            assert caught.value.outcome == "unknown"

    run(main())


def test_a_failure_of_the_connection_reaches_all(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            tasks = [asyncio.create_task(near.client.execute("insert", (n,), retries=0)) for n in range(3)]
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 3)
            full = OverloadedError("answers were not read", details={"bound": "unread_bytes_max"})
            near.peer.say(failure_of(0, full, 100))
            found = await asyncio.gather(*tasks, return_exceptions=True)
            errors = [error for error in found if isinstance(error, OverloadedError)]
            assert {error.outcome for error in errors} == {"unknown"}
            assert {error.details["bound"] for error in errors} == {"unread_bytes_max"}
            assert len(set(map(id, errors))) == 3

    run(main())


def test_both_sides_full_is_no_dead_lock(run: Run[None], worker: FakeWorker) -> None:
    """The worker takes nothing before its answers are gone, and they fill the pipe, as the requests do."""

    async def main() -> None:
        worker.answer = lambda _peer, _request: row(b"x" * 4_000_000)
        async with client_of(worker) as client:
            await asyncio.gather(
                *(
                    client.query("select ?", (value,), max_result_bytes=8 * MIB)
                    for value in (1, b"y" * 900_000) * 6
                )
            )

    run(main())


def test_an_expired_large_request_leaves_the_connection_usable(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            await near.client.connect()
            for _ in range(2):
                with pytest.raises(DeadlineExceededError) as caught:
                    await near.client.execute("insert", (b"y" * 1_000_000,), timeout=SHORT_S)
                assert caught.value.outcome == "not_committed"
                assert caught.value.details["stage"] == "send"
            await near.works()
            # Only the half-written one was ever sent.
            assert [len(number(request)) for request in near.peer.requests] == [1_000_000, len("works")]
            assert near.peer.cancels == [near.peer.requests[0].id]
            assert len(near.dialer.peers) == 1

    run(main())


def test_a_request_that_was_written_in_part_was_not_committed(run: Run[None]) -> None:
    """Also where it was not the first to be written: the end of each frame is known."""

    async def main() -> None:
        async with Near() as near:
            await near.client.connect()
            calls = (near.client.execute("insert", (b"y" * 900_000,), retries=0) for _ in range(2))
            tasks = [asyncio.create_task(call) for call in calls]
            left = 1_000_000
            while left:
                await turns(3)
                with suppress(BlockingIOError):
                    data = near.peer.socket.recv(left)
                    near.peer.frames.feed(data)
                    left -= len(data)
            end_time(near)
            outcomes = []
            for task in tasks:
                with pytest.raises(DeadlineExceededError) as caught:
                    await task
                outcomes.append((caught.value.outcome, caught.value.details["stage"]))
            assert outcomes == [("unknown", "reply"), ("not_committed", "send")]
            await near.works()

    run(main())


def test_draining_moves_new_calls_and_held_ones_to_another_connection(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(limits_with(client_requests_max=1, pipeline_window=1)) as near:
            await near.client.connect()
            old = asyncio.create_task(near.client.execute("insert", (1,)))
            held = asyncio.create_task(near.client.execute("insert", (2,), retries=0))
            await until(lambda: len(near.peer.requests) == 1)
            first = near.peer
            first.say(Goodbye("stopping"))
            await until(lambda: len(near.dialer.peers) == 2 and len(near.peer.requests) == 1)
            near.peer.echo(near.peer.requests[0])
            assert (await held).scalar() == 2
            first.echo(first.requests[0])
            assert (await old).scalar() == 1
            await until(
                lambda: any(isinstance(envelope, Goodbye) for envelope in (*first.listen(), *first.heard))
            )

    run(main())


# Never more than the worker takes


class Counting:
    """Answers after a while, in threads of its own, and refuses what a worker would refuse."""

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self.requests_max = requests_max
        self.bytes_max = bytes_max
        self.most = 0
        self._waiting: list[tuple[Peer, Request]] = []
        self._lock = threading.RLock()

    def __call__(self, peer: Peer, request: Request) -> object:
        if request.operation == "worker.health":
            return Health("healthy", [])
        with self._lock:
            return self._take(peer, request)

    def answer_all(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for peer, request in random.Random(len(waiting)).sample(waiting, len(waiting)):
            result = echo(peer, request)
            peer.reply(request.id, result)

    def _take(self, peer: Peer, request: Request) -> object:
        self._waiting.append((peer, request))
        self.most = max(self.most, len(self._waiting))
        size = sum(len(waiting.arguments) for _, waiting in self._waiting)
        if len(self._waiting) > self.requests_max or size > self.bytes_max:
            return ProtocolError("more than a worker takes")
        if (
            len(self._waiting) >= self.requests_max
            or size > self.bytes_max * 2 / 3
            or number(request) == "last"
        ):
            self.answer_all()
        return NOTHING


def test_a_thousand_calls_at_once(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        counting = worker.answer = Counting(256, 8 * MIB)
        async with client_of(worker) as client:
            calls = [client.execute("insert", (place,), retries=0) for place in range(1000)]
            last = asyncio.create_task(answer_the_rest(counting))
            found = await asyncio.gather(*calls)
            last.cancel()
            assert [rows.scalar() for rows in found] == list(range(1000))
            assert counting.most == 256
        assert worker.next_peer() is not None
        assert worker.peers.empty()

    run(main())


async def answer_the_rest(counting: Counting) -> None:
    """The last part of a thousand is no full window."""
    while True:
        await asyncio.sleep(0.05)
        counting.answer_all()


def test_no_more_bytes_than_the_worker_holds(run: Run[None]) -> None:
    async def main() -> None:
        limits = limits_with(client_bytes_max=400_000, request_bytes_max=100_000, sql_bytes_max=50_000)
        async with Near(limits) as near:
            tasks = [asyncio.create_task(near.client.execute("insert", (b"x" * 90_000,))) for _ in range(40)]
            await until(lambda: len(near.dialer.peers) == 1)
            answered = most = 0
            while answered < 40:
                await until(lambda: len(near.peer.requests) > answered)  # noqa: B023 - used at once
                for _ in range(20):
                    near.peer.listen()
                    await turns(2)
                waiting = near.peer.requests[answered:]
                most = max(most, sum(len(request.arguments) for request in waiting))
                near.peer.say(OutgoingReply(waiting[0].id, row(1)))
                answered += 1
            await asyncio.gather(*tasks)
            assert 200_000 < most <= 400_000

    run(main())


def test_control_requests_pass_by_a_full_window(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(limits_with(client_requests_max=2, pipeline_window=2)) as near:
            tasks = [asyncio.create_task(near.client.execute("insert", (n,))) for n in range(5)]
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 2)
            health = asyncio.create_task(near.client.health())
            await until(lambda: len(near.peer.requests) == 3)
            near.peer.say(OutgoingReply(near.peer.requests[2].id, Health("healthy", [])))
            assert (await health).state == "healthy"
            for place in (0, 1, 3, 4, 5):
                await until(lambda: len(near.peer.requests) > place)  # noqa: B023 - used at once
                near.peer.echo(near.peer.requests[place])
            assert [(await task).scalar() for task in tasks] == list(range(5))

    run(main())


def test_a_held_call_ends_at_its_deadline_and_was_not_sent(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(limits_with(client_requests_max=1, pipeline_window=1)) as near:
            await near.client.connect()
            first = asyncio.create_task(near.client.execute("insert", (1,)))
            await turns(1)
            with pytest.raises(DeadlineExceededError) as caught:
                await near.client.execute("insert", (2,), timeout=SHORT_S)
            assert caught.value.outcome == "not_committed"
            assert caught.value.details["stage"] == "send"
            near.peer.echo(near.peer.requests[0])
            assert (await first).scalar() == 1
            await near.works()
            assert [number(request) for request in near.peer.requests] == [1, "works"]

    run(main())


def test_what_waits_for_its_turn_may_change_without_harm(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(limits_with(client_requests_max=1, pipeline_window=1)) as near:
            await near.client.connect()
            first = asyncio.create_task(near.client.execute("insert", (1,)))
            values = [2]
            second = asyncio.create_task(near.client.call(CUSTOM("insert", values)))
            await turns(3)
            values[0] = 3
            near.peer.echo(near.peer.requests[0])
            await until(lambda: len(near.peer.requests) == 2)
            near.peer.echo(near.peer.requests[1])
            assert ((await first).scalar(), (await second).scalar()) == (1, 2)

    run(main())


def test_requests_of_one_turn_are_written_together(run: Run[None]) -> None:
    async def main() -> None:
        async with Near() as near:
            await near.client.connect()
            connection = near.client._line._connection
            assert connection is not None
            send, writes = connection._outgoing._send, []

            def count(data: bytes, flags: int) -> int:
                writes.append(len(data))
                return send(data, flags)

            connection._outgoing._send = count  # type: ignore[assignment]
            tasks = [asyncio.create_task(near.client.execute("insert", (n,))) for n in range(100)]
            await until(lambda: len(near.peer.requests) == 100)
            for request in near.peer.requests:
                near.peer.echo(request)
            await asyncio.gather(*tasks)
            assert len(writes) == 2

    run(main())


def test_a_fault_inside_ends_the_connection_and_nothing_hangs(run: Run[None]) -> None:
    """As a KeyboardInterrupt in the middle of a read would: nobody knows any more what was taken in."""

    async def main() -> None:
        async with Near() as near:
            task = asyncio.create_task(near.client.execute("insert", (1,)))
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 1)
            connection = near.client._line._connection
            assert connection is not None
            connection._take = broken  # type: ignore[assignment,method-assign]
            near.peer.echo(near.peer.requests[0])
            with pytest.raises(InterruptedReadError):
                connection._read()
            with pytest.raises(WorkerUnavailableError) as caught:
                await task
            assert caught.value.outcome == "unknown"
            await near.works()

    run(main())


class InterruptedReadError(BaseException):
    pass


def broken(_data: bytes) -> None:
    raise InterruptedReadError


def test_closing_reaches_the_calls_in_flight(run: Run[None]) -> None:
    async def main() -> None:
        async with Near(limits_with(client_requests_max=2, pipeline_window=2)) as near:
            tasks = [asyncio.create_task(near.client.execute("insert", (n,))) for n in range(4)]
            await until(lambda: len(near.dialer.peers) == 1 and len(near.peer.requests) == 2)
            await near.client.close()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            outcomes = [error.outcome for error in found if isinstance(error, StorageError)]
            assert outcomes == ["unknown", "unknown", "not_committed", "not_committed"]
            near.peer.listen()
            assert near.peer.heard[-1] == Goodbye("closed")

    run(main())


def test_both_loops_answer_within_patience(run: Run[None], worker: FakeWorker) -> None:
    """A worker that dies wakes a task that waits for minutes."""

    async def main() -> None:
        worker.answer = nothing
        client, peer = await both_of(worker)
        async with client:
            task = asyncio.create_task(client.execute("insert", (1,), timeout=600))
            await away(peer.next)
            await away(peer.close)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(WorkerUnavailableError):
                    await task

    run(main())
