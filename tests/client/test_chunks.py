"""Large values of a synchronous client: in parts, within the credit, between other threads' calls, and cut short."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage_worker.client import Client
from storage_worker.protocol.envelope import ARGUMENTS_FOLLOW, Chunk, Credit, Goodbye, Reply, encode
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    RequestTooLargeError,
    ResultTooLargeError,
    StorageError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import READ_BYTES
from storage_worker.protocol.statements import Statement
from tests.client.chunks import (
    AHEAD,
    FRAME,
    MOST,
    PART,
    chunks_of,
    grant,
    next_chunk,
    receive,
    row,
    small_limits,
)
from tests.client.fake import PATIENCE_S, Calls, FakeWorker, echo, frame_of, nothing, number, until
from tests.client.test_fork import in_child

LARGE = b"x" * 1_234
SHORT_S = 0.05


@pytest.fixture
def worker(runtime_directory: Path) -> Iterator[FakeWorker]:
    with FakeWorker(runtime_directory, echo, small_limits()) as fake:
        yield fake


def value_in(arguments: bytes) -> object:
    parameters = msgspec.msgpack.decode(arguments, type=Statement).parameters
    assert isinstance(parameters, list)
    return parameters[0]


def still_works(client: Client) -> None:
    assert client.query("select ?", ("works",)).scalar() == "works"


def body_bytes(size: int) -> int:
    """The size of the request's body that binds a value of so many bytes, with the fields that `execute` sends."""
    arguments = encode(Statement("x", [b"x" * size]))
    return len(encode([3, 2, "sql.execute", 2**40, 0, None, 0, 0])) + len(arguments)


AROUND_A_FRAME = [size for size in range(300, 400) if abs(body_bytes(size) - FRAME) <= 1]


@pytest.mark.parametrize("size", AROUND_A_FRAME)
def test_what_fits_a_frame_goes_in_one(worker: FakeWorker, size: int) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    still = client.query
    with Calls() as calls:
        first = calls.start(still, "select 1")
        peer.reply(peer.next().id, row(1))
        first.get()
        result = calls.start(client.execute, "x", (b"x" * size,))
        request = peer.next()
        assert bool(request.flags) == (body_bytes(size) > FRAME)
        arguments = receive(peer, request) if request.flags else bytes(request.arguments)
        assert value_in(arguments) == b"x" * size
        peer.reply(request.id, row(size))
        assert result.get().scalar() == size
    assert len(AROUND_A_FRAME) == 3


@pytest.mark.parametrize("parts", [5, 6, 9])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_arguments_arrive_whole_at_every_size(worker: FakeWorker, parts: int, beside: int) -> None:
    client, peer = worker.both()
    around = len(encode(Statement("x", [b"x" * 300]))) - 300
    value = os.urandom(parts * PART + beside - around)
    with Calls() as calls:
        result = calls.start(client.execute, "x", (value,))
        request = peer.next()
        assert request.flags == ARGUMENTS_FOLLOW
        data = receive(peer, request)
        assert len(data) == parts * PART + beside
        assert value_in(data) == value
        peer.reply(request.id, row(1))
        assert result.get().scalar() == 1


def test_nothing_goes_before_or_beyond_the_credit(worker: FakeWorker) -> None:
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.execute, "x", (LARGE,))
        request = peer.next()
        numbers: list[int] = []
        for count in (1, 3):
            # What another thread sends comes behind whatever was sent before it.
            still_works(client)
            assert peer.chunks.empty()
            grant(peer, request.id, count)
            numbers = [next_chunk(peer).sequence for _ in range(count)]
        assert numbers == [1, 2, 3]
        still_works(client)
        assert peer.chunks.empty()
        peer.fail(request.id, OverloadedError("full", outcome="not_committed"))
        peer.fail(peer.next().id, InvalidRequestError("no"))
        with pytest.raises(InvalidRequestError):
            result.get()


def test_many_threads_send_at_once(worker: FakeWorker) -> None:
    client, peer = worker.both()
    values = [bytes([place]) * 1_000 for place in range(8)]
    with Calls() as calls:
        results = {value: calls.start(client.execute, "x", (value,)) for value in values}
        requests = [peer.next() for _ in values]
        got: dict[int, bytes] = {request.id: b"" for request in requests}
        for _ in range(3):
            for request in requests:
                grant(peer, request.id, AHEAD)
            for _ in range(AHEAD * len(requests)):
                chunk = peer.chunks.get(timeout=PATIENCE_S) if got else None
                assert chunk is not None
                got[chunk.id] += chunk.part
                if len(got[chunk.id]) >= 1_000 + 5:
                    value = value_in(got[chunk.id])
                    peer.reply(chunk.id, row(value))
                    del got[chunk.id]
                if not got:
                    break
            if not got:
                break
        for value, result in results.items():
            assert result.get().scalar() == value


def test_a_refusal_in_the_middle_stops_it(worker: FakeWorker) -> None:
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.execute, "x", (LARGE,), retries=0)
        request = peer.next()
        grant(peer, request.id, 2)
        assert [next_chunk(peer).sequence for _ in range(2)] == [0, 1]
        peer.fail(request.id, OverloadedError("full", outcome="not_committed"))
        with pytest.raises(OverloadedError):
            result.get()
        # It says that nothing more of them comes.
        assert peer.next_cancel() == request.id
        grant(peer, request.id, 1)
        still_works(client)
        assert peer.chunks.empty()


def test_a_deadline_in_the_middle_leaves_nothing_committed(worker: FakeWorker) -> None:
    client, peer = worker.both()
    with pytest.raises(DeadlineExceededError) as caught:
        client.execute("x", (LARGE,), timeout=SHORT_S)
    assert caught.value.outcome == "not_committed"
    request = peer.next()
    assert peer.next_cancel() == request.id
    peer.fail(request.id, InvalidRequestError("cancelled"))
    still_works(client)


def test_a_worker_lost_before_they_were_whole_is_no_doubt(worker: FakeWorker) -> None:
    """What was not whole cannot have been committed, so the call is sent again even without a key."""
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.execute, "x", (LARGE,))
        request = peer.next()
        grant(peer, request.id, 1)
        next_chunk(peer)
        peer.close()
        other = worker.next_peer()
        again = other.next()
        assert value_in(receive(other, again)) == LARGE
        other.reply(again.id, row(5))
        assert result.get().scalar() == 5


def test_a_worker_lost_after_they_were_whole_leaves_a_doubt(worker: FakeWorker) -> None:
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.execute, "x", (LARGE,))
        receive(peer, peer.next())
        peer.close()
        with pytest.raises(WorkerUnavailableError) as caught:
            result.get()
    assert caught.value.outcome == "unknown"


def test_beyond_the_limit_nothing_is_sent(worker: FakeWorker) -> None:
    client, peer = worker.both()
    before = peer.bytes_read
    with pytest.raises(RequestTooLargeError) as caught:
        client.execute("x", (b"x" * MOST,))
    assert caught.value.details["chunked_bytes_max"] == MOST
    still_works(client)
    assert peer.requests.empty()
    assert peer.bytes_read < before + FRAME


def test_a_pipeline_keeps_its_order_around_them(worker: FakeWorker) -> None:
    client, peer = worker.both()
    worker.answer = nothing

    def call_all() -> list[object]:
        with client.pipeline() as pipeline:
            futures = [pipeline.execute("x", (value,)) for value in (1, LARGE, 2)]
            return [future.result().scalar() for future in futures]

    with Calls() as calls:
        results = calls.start(call_all)
        first = peer.next()
        assert number(first) == 1
        large = peer.next()
        assert value_in(receive(peer, large)) == LARGE
        peer.reply(first.id, row("a"))
        peer.reply(large.id, row("b"))
        last = peer.next()
        assert number(last) == 2
        peer.reply(last.id, row("c"))
        assert results.get() == ["a", "b", "c"]


def test_goodbye_in_the_middle_lets_them_go_on(worker: FakeWorker) -> None:
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.execute, "x", (LARGE,))
        request = peer.next()
        peer.send(frame_of(Goodbye("stopping")))
        assert value_in(receive(peer, request)) == LARGE
        peer.reply(request.id, row(1))
        assert result.get().scalar() == 1


def test_closing_in_the_middle_ends_it(worker: FakeWorker) -> None:
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.execute, "x", (LARGE,), retries=0)
        peer.next()
        client.close()
        with pytest.raises(StorageError) as caught:
            result.get()
    assert caught.value.outcome == "not_committed"


def test_a_forked_child_is_not_troubled_by_its_parents(worker: FakeWorker) -> None:
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.execute, "x", (LARGE,))
        request = peer.next()
        assert in_child(lambda: client.query("select ?", (2,)).scalar()) == 2
        worker.next_peer().join()
        assert value_in(receive(peer, request)) == LARGE
        peer.reply(request.id, row(1))
        assert result.get().scalar() == 1


# Results


@pytest.mark.parametrize("size", [1, PART - 20, PART, 5 * PART, 1_234])
def test_a_result_in_chunks(worker: FakeWorker, size: int) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    value = os.urandom(size)
    with Calls() as calls:
        result = calls.start(client.query, "select 1")
        request = peer.next()
        for place, data in enumerate(chunks_of(request.id, row(value))):
            if place >= AHEAD and (place - AHEAD) % 2 == 0 and place < -(-size // PART):
                assert peer.credits.get(timeout=PATIENCE_S) == Credit(request.id, 2)
            peer.send(data)
        assert result.get().scalar() == value


def test_results_come_between_each_other(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    values = [os.urandom(350), os.urandom(300), b"small"]
    with Calls() as calls:
        results = [calls.start(client.query, "select ?", (value,)) for value in values]
        frames: list[list[bytes]] = []
        for _ in values:
            request = peer.next()
            value = number(request)
            frames.append(
                chunks_of(request.id, row(value))
                if value != b"small"
                else [frame_of(Reply(request.id, msgspec.Raw(encode(row(value)))))]
            )
        while any(frames):
            for each in frames:
                if each:
                    peer.send(each.pop(0))
        assert [result.get().scalar() for result in results] == values


def test_a_result_that_breaks_off(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.query, "select 1", retries=0)
        request = peer.next()
        peer.send(b"".join(chunks_of(request.id, row(b"x" * 250))[:2]))
        peer.fail(request.id, ResultTooLargeError("the disk"))
        with pytest.raises(ResultTooLargeError):
            result.get()
        worker.answer = echo
        still_works(client)


def test_a_worker_lost_in_the_middle_of_a_result(worker: FakeWorker) -> None:
    """A read is asked for again, and nothing of what had come is in its result."""
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.query, "select 1")
        peer.send(b"".join(chunks_of(peer.next().id, row(b"x" * 250))[:2]))
        peer.close()
        other = worker.next_peer()
        other.send(b"".join(chunks_of(other.next().id, row(b"y" * 250))))
        assert result.get().scalar() == b"y" * 250


def test_what_a_worker_said_before_its_end_is_heard_although_it_takes_no_credit(worker: FakeWorker) -> None:
    """Credit for the first bytes meets a closed pipe while the rest is still to be read."""
    worker.answer = nothing
    client, peer = worker.both()
    with client.pipeline() as pipeline:
        large = pipeline.query("select ?", (1,))
        behind = pipeline.execute("insert", (2,))
        client._line.connected(2**63).flush(2**63)
        first, second = peer.next(), peer.next()
        *chunks, end = chunks_of(first.id, row(b"y" * 250))
        peer.send(b"".join(chunks))
        peer.reply(second.id, row(b"z" * READ_BYTES))
        peer.send(end)
        peer.close()
        assert large.result().scalar() == b"y" * 250
        assert behind.result().scalar() == b"z" * READ_BYTES


class _StopError(Exception):
    pass


@pytest.fixture
def stop() -> Iterator[Callable[[], None]]:
    """A signal to the main thread whose handler raises, as a KeyboardInterrupt would."""

    def raise_it(_number: int, _frame: object) -> None:
        raise _StopError

    before = signal.signal(signal.SIGUSR1, raise_it)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_while_it_waits_for_credit_is_clean(
    worker: FakeWorker, stop: Callable[[], None]
) -> None:
    client, peer = worker.both()
    uploads = client._line.connected(2**63)._exchange.uploads

    def waits() -> bool:
        turns: list[Any] = [getattr(upload.wake, "__self__", None) for upload in uploads.values()]
        return bool(turns) and all(turn is not None and turn.asleep for turn in turns)

    def interrupt() -> None:
        grant(peer, peer.next().id, 1)
        next_chunk(peer)
        until(waits)
        stop()

    with Calls() as calls:
        calls.start(interrupt)
        with pytest.raises(_StopError):
            client.execute("x", (LARGE,))
    peer.fail(peer.next_cancel(), InvalidRequestError("cancelled"))
    still_works(client)
    assert worker.peers.empty(), "the connection is still the first one"


def test_a_deadline_in_the_middle_of_a_result(worker: FakeWorker) -> None:
    """What still comes of it is dropped, and reaches nobody else."""
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.query, "select 1", timeout=SHORT_S)
        request = peer.next()
        frames = chunks_of(request.id, row(b"x" * 250))
        peer.send(frames[0])
        with pytest.raises(DeadlineExceededError):
            result.get()
        assert peer.next_cancel() == request.id
        peer.send(b"".join(frames[1:]))
        worker.answer = echo
        still_works(client)


def broken(frames: list[bytes], request_id: int) -> dict[str, list[bytes]]:
    return {
        "out of order": [frames[1]],
        "twice": [frames[0], frames[0]],
        "too large": [frame_of(Chunk(request_id, 0, b"x" * (PART + 1)))],
        "empty": [frame_of(Chunk(request_id, 0, b""))],
        "of nobody": [frame_of(Chunk(request_id + 1, 0, b"x"))],
        "credit of nobody": [frame_of(Credit(request_id + 1, 1))],
        "two results": [frames[0], frame_of(Reply(request_id, msgspec.Raw(encode(row(1)))))],
    }


@pytest.mark.parametrize("fault", broken([b""] * 2, 1))
def test_chunks_that_cannot_be_end_the_connection(worker: FakeWorker, fault: str) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.query, "select 1", retries=0)
        request = peer.next()
        frames = chunks_of(request.id, row(b"x" * 950))
        peer.send(b"".join(broken(frames, request.id)[fault]))
        with pytest.raises(ProtocolError):
            result.get()
        until(peer.ended.is_set)
        worker.answer = echo
        still_works(client)


def test_credit_beyond_the_bound_ends_the_connection(worker: FakeWorker) -> None:
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.execute, "x", (LARGE,), retries=0)
        grant(peer, peer.next().id, AHEAD + 1)
        with pytest.raises(ProtocolError):
            result.get()


def test_a_result_of_a_whole_may_be_asked_for(worker: FakeWorker) -> None:
    client = worker.client()
    assert client.query("select ?", (1,), max_result_bytes=MOST).scalar() == 1
    with pytest.raises(InvalidRequestError) as caught:
        client.query("select 1", max_result_bytes=MOST + 1)
    assert caught.value.details["chunked_bytes_max"] == MOST
