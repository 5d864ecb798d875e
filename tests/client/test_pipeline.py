"""Pipelines: order, windows, few writes, errors, and lost workers."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_worker.client import Client, Pipeline, PipelineFuture
from storage_worker.protocol.envelope import Request
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OperationFailedError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    WorkerUnavailableError,
)
from storage_worker.protocol.statements import Rows
from tests.client.fake import (
    NOTHING,
    Calls,
    FakeWorker,
    Peer,
    echo,
    limits_with,
    nothing,
    number,
    until,
)

SHORT_S = 0.05


class Recorder:
    """Notes the order of requests, and fails those that `fail` names."""

    def __init__(self, *fail: object) -> None:
        self.values: list[Any] = []
        self.fail = set(fail)

    def __call__(self, peer: Peer, request: Request) -> object:
        value = number(request)
        self.values.append(value)
        if value in self.fail:
            return OperationFailedError(f"no {value}")
        return echo(peer, request)


def test_results_come_in_order(worker: FakeWorker) -> None:
    recorder = worker.answer = Recorder()
    client = worker.client()
    with client.pipeline() as pipeline:
        futures = [pipeline.execute("insert", (place,)) for place in range(1000)]
    assert [future.result().scalar() for future in futures] == list(range(1000))
    assert recorder.values == list(range(1000))
    assert all(future.done() for future in futures)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 256])
def test_no_more_than_the_window_is_in_flight(worker: FakeWorker, window: int) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:

        def fill() -> list[Any]:
            with client.pipeline(window) as pipeline:
                futures = [pipeline.execute("insert", (place,)) for place in range(window * 3)]
            return [future.result().scalar() for future in futures]

        filled = calls.start(fill)
        for _ in range(3):
            requests = [peer.next() for _ in range(window)]
            assert peer.requests.empty()
            for request in requests:
                peer.reply(request.id, Rows(("c",), [(number(request),)]))
        assert filled.get() == list(range(window * 3))


def test_no_more_bytes_than_the_worker_holds_are_in_flight(runtime_directory: Path) -> None:
    limits = limits_with(client_bytes_max=400_000, request_bytes_max=100_000, sql_bytes_max=50_000)
    with FakeWorker(runtime_directory, nothing, limits) as small:
        client, peer = small.both()
        connection = client._line.connected(2**63)

        def fill() -> None:
            with client.pipeline() as pipeline:
                for _ in range(40):
                    pipeline.execute("insert", (b"x" * 90_000,))

        with Calls() as calls:
            filled = calls.start(fill)
            left = 40
            while left:
                # What is there when the client waits is all that it dares to send.
                until(lambda: any(waiter.asleep for waiter in list(connection._waiting.values())))
                requests = [peer.next()]
                while not peer.requests.empty():
                    requests.append(peer.next())
                assert sum(len(request.arguments) for request in requests) <= 400_000
                left -= len(requests)
                for request in requests:
                    peer.reply(request.id, Rows())
            filled.get()


def test_requests_are_written_together(worker: FakeWorker) -> None:
    client = worker.client()
    connection = client._line.connected(2**63)
    writes: list[int] = []
    send = connection._outgoing._send

    def count(data: Any, flags: int) -> int:
        writes.append(len(data))
        return send(data, flags)

    connection._outgoing._send = count  # type: ignore[assignment]
    with client.pipeline(window=100) as pipeline:
        futures = [pipeline.execute("insert", (place,)) for place in range(1000)]
    assert [future.result().scalar() for future in futures] == list(range(1000))
    assert len([size for size in writes if size]) <= 150


def test_a_result_is_there_without_the_rest(worker: FakeWorker) -> None:
    """Asking for a result writes what is buffered."""
    with worker.client().pipeline() as pipeline:
        assert pipeline.execute("insert", (1,)).result().scalar() == 1
        assert pipeline.query("select ?", (2,)).result().scalar() == 2


def test_a_call_of_the_client_comes_behind_what_was_pipelined(worker: FakeWorker) -> None:
    recorder = worker.answer = Recorder()
    client = worker.client()
    with client.pipeline() as pipeline:
        for place in range(5):
            pipeline.execute("insert", (place,))
        client.query("select ?", ("read",))
    assert recorder.values == [0, 1, 2, 3, 4, "read"]


def test_batches_and_calls_can_be_pipelined(worker: FakeWorker) -> None:
    worker.answer = lambda _peer, request: [Rows()] if request.operation == "sql.batch" else Rows()
    with worker.client().pipeline() as pipeline:
        batch = pipeline.batch([("insert", (1,))])
        assert batch.result() == [Rows()]


def insert(client: Client, count: int, window: int | None = None) -> list[PipelineFuture[Rows]]:
    futures: list[PipelineFuture[Rows]] = []
    insert_into(futures, client, count, window)
    return futures


def insert_into(
    futures: list[PipelineFuture[Rows]],
    client: Client,
    count: int,
    window: int | None = None,
    then: Callable[[PipelineFuture[Rows]], None] = lambda future: None,
) -> Pipeline:
    """Insert the first numbers in one pipeline; `then` is called with each future inside the block."""
    with client.pipeline(window) as pipeline:
        for place in range(count):
            futures.append(pipeline.execute("insert", (place,)))
            then(futures[-1])
    return pipeline


def test_the_first_error_is_raised_at_the_end(worker: FakeWorker) -> None:
    recorder = worker.answer = Recorder(3, 7)
    futures: list[PipelineFuture[Rows]] = []
    with pytest.raises(OperationFailedError, match="no 3"):
        insert_into(futures, worker.client(), 500)
    assert len(recorder.values) == 500
    assert futures[499].result().scalar() == 499
    with pytest.raises(OperationFailedError, match="no 7"):
        futures[7].result()


def test_an_error_that_was_raised_by_its_future_is_not_raised_again(worker: FakeWorker) -> None:
    worker.answer = Recorder(3, 7)
    futures: list[PipelineFuture[Rows]] = []

    def look(future: PipelineFuture[Rows]) -> None:
        if len(futures) == 4:
            with pytest.raises(OperationFailedError, match="no 3"):
                future.result()

    with pytest.raises(OperationFailedError, match="no 7"):
        insert_into(futures, worker.client(), 10, then=look)


def test_many_errors_keep_the_first(worker: FakeWorker) -> None:
    worker.answer = Recorder(*range(5, 1000))
    pipelines: list[Pipeline] = []
    futures: list[PipelineFuture[Rows]] = []
    with pytest.raises(OperationFailedError, match="no 5"):
        insert_into(futures, worker.client(), 1000, 8, lambda future: pipelines.append(future._pipeline))
    assert len(pipelines[0]._failures) == 8


def test_a_blocks_own_exception_goes_first(worker: FakeWorker) -> None:
    recorder = worker.answer = Recorder(1)

    def fail(_future: PipelineFuture[Rows]) -> None:
        if len(futures) == 5:
            raise ZeroDivisionError

    futures: list[PipelineFuture[Rows]] = []
    with pytest.raises(ZeroDivisionError):
        insert_into(futures, worker.client(), 10, then=fail)
    assert recorder.values == [0, 1, 2, 3, 4]


def test_a_programs_end_does_not_wait(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()

    def end(future: PipelineFuture[Rows]) -> None:
        if len(futures) == 3:
            assert not future.done()
            raise KeyboardInterrupt

    futures: list[PipelineFuture[Rows]] = []
    with pytest.raises(KeyboardInterrupt):
        insert_into(futures, client, 10, then=end)
    assert sorted(peer.next_cancel() for _ in range(3)) == sorted(peer.next().id for _ in range(3))
    with pytest.raises(RequestCancelledError) as caught:
        futures[0].result()
    assert caught.value.outcome == "unknown"


def test_answers_that_have_come_are_told_although_the_block_was_interrupted(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    connection = client._line.connected(2**63)
    futures: list[PipelineFuture[Rows]] = []

    def end(future: PipelineFuture[Rows]) -> None:
        if len(futures) == 3:
            connection.flush(2**63)
            requests = [peer.next() for _ in futures]
            for request in requests[:2]:
                peer.reply(request.id, echo(peer, request))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        insert_into(futures, client, 3, then=end)
    assert [future.result().scalar() for future in futures[:2]] == [0, 1]
    with pytest.raises(RequestCancelledError) as caught:
        futures[2].result()
    assert caught.value.outcome == "unknown"


def test_after_an_interrupted_write_nobody_is_told_that_nothing_was_sent(worker: FakeWorker) -> None:
    """The signal comes after the system took the bytes, and before the client has counted them."""
    recorder = worker.answer = Recorder()
    client, _ = worker.both()
    outgoing = client._line.connected(2**63)._outgoing
    send = outgoing._send

    def send_and_interrupt(data: Any, flags: int, /) -> int:
        send(data, flags)
        outgoing._send = send
        raise KeyboardInterrupt

    pipeline = client.pipeline()
    futures = [pipeline.execute("insert", (n,)) for n in range(2)]
    outgoing._send = send_and_interrupt  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        futures[0].flush()
    for future in futures:
        with pytest.raises(WorkerUnavailableError) as caught:
            future.result()
        assert caught.value.outcome == "unknown"
        assert caught.value.details["sent"] is True
    assert client.query("select ?", (7,)).scalar() == 7
    worker.kill()
    assert sorted(recorder.values) == [0, 1, 7]


def test_a_result_that_does_not_decode_leaves_its_write_committed(worker: FakeWorker) -> None:
    worker.answer = lambda _peer, _request: "no rows"
    client = worker.client()
    for ask, outcome in ((client.execute, "committed"), (client.query, "not_committed")):
        with pytest.raises(ProtocolError) as caught:
            ask("x")
        assert caught.value.outcome == outcome
    pipeline = client.pipeline()
    with pytest.raises(ProtocolError) as caught:
        pipeline.execute("x").result()
    assert caught.value.outcome == "committed"


def test_a_bad_value_is_refused_and_the_pipeline_goes_on(worker: FakeWorker) -> None:
    recorder = worker.answer = Recorder()
    with worker.client().pipeline() as pipeline:
        pipeline.execute("insert", (1,))
        with pytest.raises(InvalidRequestError):
            pipeline.execute("insert", (2**63,))
        with pytest.raises(InvalidRequestError):
            pipeline.execute("insert", ("\ud800",))
        pipeline.execute("insert", (2,))
    assert recorder.values == [1, 2]


def test_an_ended_pipeline_takes_nothing(worker: FakeWorker) -> None:
    with worker.client().pipeline() as pipeline:
        pass
    with pytest.raises(InvalidRequestError):
        pipeline.execute("insert", (1,))


def test_a_refusal_is_not_repeated_behind_later_calls(worker: FakeWorker) -> None:
    def refuse(peer: Peer, request: Request) -> object:
        seen.append(number(request))
        return OverloadedError("full") if number(request) == 1 else echo(peer, request)

    seen: list[Any] = []
    worker.answer = refuse
    with pytest.raises(OverloadedError):
        insert(worker.client(), 4)
    assert seen == [0, 1, 2, 3]


def test_each_call_has_its_own_deadline(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with client.pipeline() as pipeline:
        late = pipeline.execute("insert", (1,), timeout=SHORT_S)
        good = pipeline.execute("insert", (2,))
        with pytest.raises(DeadlineExceededError) as caught:
            late.result()
        assert caught.value.outcome == "unknown"
        first, second = peer.next(), peer.next()
        assert peer.next_cancel() == first.id
        peer.reply(first.id, Rows(("c",), [("late",)]))
        peer.reply(second.id, Rows(("c",), [("own",)]))
        assert good.result().scalar() == "own"


def test_waiting_for_a_result_may_end_before_the_call(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with client.pipeline() as pipeline:
        future = pipeline.execute("insert", (1,))
        for timeout in (0, SHORT_S):
            with pytest.raises(DeadlineExceededError) as caught:
                future.result(timeout)
            assert caught.value.outcome == "unknown"
        request = peer.next()
        assert peer.cancels.empty()
        peer.reply(request.id, Rows(("c",), [(1,)]))
        assert future.result().scalar() == 1


def test_a_full_window_is_waited_for_within_the_deadline(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with client.pipeline(2) as pipeline:
        futures = [pipeline.execute("insert", (place,)) for place in range(2)]
        with pytest.raises(DeadlineExceededError) as caught:
            pipeline.execute("insert", (2,), timeout=SHORT_S)
        assert caught.value.outcome == "not_committed"
        assert caught.value.details["stage"] == "window"
        for _ in futures:
            request = peer.next()
            peer.reply(request.id, Rows(("c",), [(number(request),)]))
    assert peer.requests.empty()


def test_two_pipelines_of_one_client(worker: FakeWorker) -> None:
    client = worker.client()
    start = threading.Barrier(4)

    def fill(name: str) -> list[Any]:
        start.wait()
        with client.pipeline(16) as pipeline:
            futures = [pipeline.execute("insert", (f"{name}{place}",)) for place in range(300)]
        return [future.result().scalar() for future in futures]

    with Calls() as calls:
        filled = {name: calls.start(fill, name) for name in "abcd"}
        for name, result in filled.items():
            assert result.get() == [f"{name}{place}" for place in range(300)]


# Lost workers


class DyingAt:
    """Dies at one value, once."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.dead: set[Peer] = set()
        self.seen: list[Any] = []

    def __call__(self, peer: Peer, request: Request) -> object:
        if peer in self.dead:
            return NOTHING
        value = number(request)
        self.seen.append(value)
        if value != self.value:
            return echo(peer, request)
        self.value = None
        self.dead.add(peer)
        peer.close()
        return NOTHING


def test_reads_and_writes_with_keys_outlive_their_worker_in_order(worker: FakeWorker) -> None:
    dying = worker.answer = DyingAt(20)
    with worker.client().pipeline(16) as pipeline:
        futures = [
            pipeline.execute("insert", (place,), request_key=f"k{place}")
            if place % 2
            else pipeline.query("select ?", (place,))
            for place in range(60)
        ]
    assert [future.result().scalar() for future in futures] == list(range(60))
    # What was sent again may begin with calls whose answers were lost on their way.
    again = dying.seen[dying.seen.index(20) + 1 :]
    assert again == list(range(again[0], 60))


def keyed(pipeline: Pipeline, *values: int) -> list[PipelineFuture[Rows]]:
    return [pipeline.execute("insert", (value,), request_key=f"k{value}") for value in values]


def test_lost_calls_are_sent_again_in_order_whichever_result_is_asked_for(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with client.pipeline() as pipeline:
        futures = keyed(pipeline, *range(10))
        assert not futures[0].done()
        assert [number(peer.next()) for _ in futures] == list(range(10))
        recorder = worker.answer = Recorder()
        peer.close()
        assert futures[9].result().scalar() == 9
    assert recorder.values == list(range(10))


def test_lost_calls_are_sent_again_before_new_ones(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    connection = client._line.connected(2**63)
    with client.pipeline() as pipeline:
        futures = keyed(pipeline, 0, 1, 2)
        assert not futures[0].done()
        assert [number(peer.next()) for _ in futures] == [0, 1, 2]
        recorder = worker.answer = Recorder()
        peer.close()
        until(futures[0].done)
        assert not connection.is_open
        futures += keyed(pipeline, 3)
        assert futures[3].result().scalar() == 3
    assert recorder.values == [0, 1, 2, 3]


def test_writes_without_a_key_are_unknown_and_the_pipeline_goes_on(worker: FakeWorker) -> None:
    dying = worker.answer = DyingAt(5)
    futures: list[PipelineFuture[Rows]] = []

    def let_it_die(_future: PipelineFuture[Rows]) -> None:
        if len(futures) == 8:
            until(lambda: dying.value is None)

    with pytest.raises(WorkerUnavailableError) as caught:
        insert_into(futures, worker.client(), 40, 8, let_it_die)
    assert caught.value.outcome == "unknown"
    outcomes = [outcome_of(future) for future in futures]
    lost = [place for place, outcome in enumerate(outcomes) if outcome == "unknown"]
    assert 5 in lost
    assert len(lost) <= 8
    assert [value for value in outcomes if value != "unknown"] == [
        place for place in range(40) if place not in lost
    ]
    assert len(dying.seen) == len(set(dying.seen))


def outcome_of(future: PipelineFuture[Rows]) -> object:
    try:
        return future.result().scalar()
    except WorkerUnavailableError as error:
        return error.outcome


def test_what_was_never_written_is_sent_to_the_next_worker(worker: FakeWorker) -> None:
    recorder = worker.answer = Recorder()
    client, peer = worker.both()
    with client.pipeline() as pipeline:
        peer.close()
        futures = [pipeline.execute("insert", (place,)) for place in range(3)]
        assert [future.result().scalar() for future in futures] == [0, 1, 2]
    assert recorder.values == [0, 1, 2]
