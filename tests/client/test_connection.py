"""One connection and many threads: every answer reaches its own waiter, and every end reaches all."""

import os
import random
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from storage_worker.client.waiter import Waiter
from storage_worker.protocol.envelope import Goodbye, OutgoingReply, Reply, Request
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    StorageError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS, READ_BYTES
from storage_worker.protocol.statements import Rows
from tests.client.fake import (
    NOTHING,
    PATIENCE_S,
    Calls,
    FakeWorker,
    Peer,
    echo,
    frame_of,
    limits_with,
    nothing,
    number,
    until,
)

SHORT_S = 0.05


def row(value: object) -> Rows:
    return Rows(("c",), [(value,)])


def test_a_reply_may_come_byte_by_byte(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.query, "select ?", (5,))
        for byte in frame_of(OutgoingReply(peer.next().id, row(5))):
            peer.send(bytes([byte]))
        assert result.get().scalar() == 5


def test_shuffled_answers_reach_fifty_threads(worker: FakeWorker) -> None:
    """Each answer reaches its own call; some calls have given up before, and their answers come late."""
    worker.answer = nothing
    client, peer = worker.both()
    impatient = set(range(0, 50, 5))
    with Calls() as calls:
        results = {
            place: calls.start(
                client.query, "select ?", (place,), timeout=SHORT_S if place in impatient else 30
            )
            for place in range(50)
        }
        requests = [peer.next() for _ in range(50)]
        cancelled = {peer.next_cancel() for _ in impatient}
        assert cancelled == {request.id for request in requests if number(request) in impatient}
        random.Random(7).shuffle(requests)
        for request in requests:
            peer.reply(request.id, row(number(request)))
        for place, result in results.items():
            if place in impatient:
                with pytest.raises(DeadlineExceededError):
                    result.get()
            else:
                assert result.get().scalar() == place


def test_a_late_answer_is_dropped_and_not_given_to_the_next_call(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with pytest.raises(DeadlineExceededError) as caught:
        client.execute("insert into t values (?)", (1,), timeout=SHORT_S)
    assert caught.value.outcome == "unknown"
    assert caught.value.details["stage"] == "reply"
    late = peer.next()
    assert peer.next_cancel() == late.id
    with Calls() as calls:
        result = calls.start(client.query, "select ?", (2,))
        request = peer.next()
        peer.reply(late.id, row("late"))
        peer.reply(request.id, row("own"))
        assert result.get().scalar() == "own"
    assert worker.peers.empty()


def test_an_expired_read_promises_that_nothing_was_committed(worker: FakeWorker) -> None:
    worker.answer = nothing
    client = worker.client()
    with pytest.raises(DeadlineExceededError) as caught:
        client.query("select 1", timeout=SHORT_S)
    assert caught.value.outcome == "not_committed"


def test_the_workers_final_word_beyond_the_deadline_is_waited_for(worker: FakeWorker) -> None:
    """The grace is long here, so that the order decides and no clock."""
    worker.kill()
    with FakeWorker(worker.path.parent, nothing, limits_with(reply_grace_ms=50_000)) as patient:
        client, peer = patient.both()
        with Calls() as calls:
            result = calls.start(client.execute, "insert into t values (?)", (1,), timeout=SHORT_S)
            request = peer.next()
            peer.fail(request.id, DeadlineExceededError("too late", details={"stage": "queue"}))
            with pytest.raises(DeadlineExceededError) as caught:
                result.get()
            assert caught.value.outcome == "not_committed"
            assert caught.value.details["stage"] == "queue"
        assert peer.cancels.empty()


def test_the_lead_goes_on_when_the_leader_has_its_answer(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        results = []
        for place in range(20):
            results.append((place, calls.start(client.query, "select ?", (place,))))
            request = peer.next()
            results[-1] = (request.id, results[-1][1])
        for place, (request_id, result) in enumerate(results):
            peer.reply(request_id, row(place))
            assert result.get().scalar() == place


def test_ids_increase_in_the_order_of_the_wire(worker: FakeWorker) -> None:
    seen: list[int] = []

    def note(peer: Peer, request: Request) -> object:
        seen.append(request.id)
        return echo(peer, request)

    worker.answer = note
    client = worker.client()

    def many() -> None:
        with client.pipeline() as pipeline:
            for place in range(100):
                pipeline.execute("insert into t values (?)", (place,))
                if place % 10 == 0:
                    client.query("select ?", (place,))

    with Calls() as calls:
        for _ in range(8):
            calls.start(many)
    assert seen == sorted(set(seen))
    assert len(seen) == 880


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 11])
def test_a_death_reaches_every_waiter_wherever_the_frame_was_cut(worker: FakeWorker, cut: int) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        writes = [calls.start(client.execute, "insert into t values (?)", (n,)) for n in range(5)]
        reads = [calls.start(client.query, "select ?", (n,), retries=0) for n in range(5)]
        requests = [peer.next() for _ in range(10)]
        peer.send(frame_of(OutgoingReply(requests[0].id, row(1)))[:cut])
        peer.close()
        for write in writes:
            with pytest.raises(WorkerUnavailableError) as caught:
                write.get()
            assert caught.value.outcome == "unknown"
            assert caught.value.retryable
        for read in reads:
            with pytest.raises(WorkerUnavailableError) as caught:
                read.get()
            assert caught.value.outcome == "not_committed"
    worker.answer = echo
    assert client.query("select ?", (3,)).scalar() == 3


GARBAGE = {
    "no envelope": frame_of("hello"),
    "no msgpack": b"\x00\x00\x00\x02\xc1\xc1",
    "negative length": b"\xff\xff\xff\xff",
    "a huge length": b"\x7f\xff\xff\xff",
    "an empty frame": b"\x00\x00\x00\x00",
    "a request's answer that was never asked for": frame_of(OutgoingReply(999, None)),
    "another Welcome": frame_of((2, 1, "w", 1, "write", DEFAULT_LIMITS, "", "", "", 0)),
    "a Hello": frame_of((1, 1, "w", 1, "write", 0)),
    "two goodbyes": frame_of(Goodbye("one")) + frame_of(Goodbye("two")),
    "random bytes": random.Random(3).randbytes(500),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_a_protocol_error_and_the_next_call_connects_anew(
    worker: FakeWorker, garbage: bytes
) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(client.execute, "insert into t values (?)", (1,))
        peer.next()
        peer.send(garbage)
        with pytest.raises(ProtocolError) as caught:
            result.get()
        assert caught.value.outcome == "unknown"
    worker.answer = echo
    assert client.execute("select ?", (4,)).scalar() == 4
    assert worker.next_peer() is not peer


def test_answers_before_the_garbage_still_count(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        first = calls.start(client.query, "select ?", (1,))
        request = peer.next()
        second = calls.start(client.query, "select ?", (2,))
        peer.next()
        peer.send(frame_of(OutgoingReply(request.id, row(1))) + b"\xff\xff\xff\xff")
        assert first.get().scalar() == 1
        with pytest.raises(ProtocolError):
            second.get()


def test_a_second_answer_to_one_request_is_garbage(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        first = calls.start(client.query, "select ?", (1,))
        answer = frame_of(OutgoingReply(peer.next().id, row(1)))
        second = calls.start(client.query, "select ?", (2,))
        peer.next()
        peer.send(answer + answer)
        assert first.get().scalar() == 1
        with pytest.raises(ProtocolError):
            second.get()


def test_a_failure_of_the_connection_reaches_all(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        results = [calls.start(client.execute, "insert into t values (?)", (n,), retries=0) for n in range(3)]
        for _ in results:
            peer.next()
        peer.fail(0, OverloadedError("answers were not read", details={"bound": "unread_bytes_max"}))
        errors = []
        for result in results:
            with pytest.raises(OverloadedError) as caught:
                result.get()
            errors.append(caught.value)
        assert {error.outcome for error in errors} == {"unknown"}
        assert {error.details["bound"] for error in errors} == {"unread_bytes_max"}
        assert len(set(map(id, errors))) == 3


def test_both_sides_full_is_no_dead_lock(worker: FakeWorker) -> None:
    """The worker takes nothing before its answers are gone, and they fill the pipe, as the requests do."""

    def flood(_peer: Peer, _request: Request) -> object:
        return row(b"x" * 4_000_000)

    worker.answer = flood
    with worker.client().pipeline(window=8) as pipeline:
        for _ in range(6):
            pipeline.query("select ?", (1,), max_result_bytes=8_000_000)
            pipeline.query("select ?", (b"y" * 900_000,), max_result_bytes=8_000_000)


def test_a_blocked_writer_takes_the_lead_from_a_leader_that_leaves(worker: FakeWorker) -> None:
    """A thread that writes a large request while another one reads must read itself when that one leaves."""
    worker.answer = nothing
    client, peer = worker.both()
    connection = client._line.connected(2**63)
    with Calls() as calls:
        reader = calls.start(client.query, "select ?", (0,))
        request = peer.next()
        peer.reading.clear()
        writer = calls.start(client.query, "select ?", (b"y" * 1_000_000,), max_result_bytes=8_000_000)
        until(lambda: connection._readers.writer_waits)
        peer.reply(request.id, row(0))
        assert reader.get().scalar() == 0
        # Nobody but the blocked writer is there to read this, and the worker reads only after it.
        peer.reply(request.id + 1, row(b"z" * 4_000_000))
        peer.reading.set()
        assert writer.get().scalar() == b"z" * 4_000_000


def test_an_expired_large_request_leaves_the_connection_usable(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    peer.reading.clear()
    client_error: StorageError | None = None
    # The reading thread is inside its last `recv`, so that two requests are needed to meet a full pipe.
    for _ in range(2):
        with pytest.raises(DeadlineExceededError) as caught:
            client.execute("insert into t values (?)", (b"y" * 1_000_000,), timeout=SHORT_S)
        client_error = caught.value
    assert client_error is not None
    assert client_error.outcome == "not_committed"
    assert client_error.details["stage"] == "send"
    worker.answer = echo
    peer.reading.set()
    assert client.query("select ?", (6,)).scalar() == 6
    assert worker.peers.empty()


def test_a_death_behind_buffered_requests_reaches_a_call_without_a_place(worker: FakeWorker) -> None:
    """What is left of a pipeline is written first; where that fails the call was never registered."""
    client, peer = worker.both()
    with client.pipeline() as pipeline:
        future = pipeline.query("select ?", (1,))
        peer.close()
        assert client.query("select ?", (2,), retries=0).scalar() == 2
        assert future.result().scalar() == 1


def test_what_the_worker_said_before_its_end_is_heard_after_a_write_met_it(worker: FakeWorker) -> None:
    """Nobody reads when the next write finds the pipe closed: the answers lie in it, and they are the truth."""
    worker.answer = nothing
    client, peer = worker.both()
    with client.pipeline() as pipeline:
        futures = [pipeline.execute("insert into t values (?)", (n,)) for n in range(3)]
        client._line.connected(2**63).flush(2**63)
        for request in [peer.next() for _ in futures][:2]:
            peer.reply(request.id, row(number(request)))
        peer.close()
        worker.answer = echo
        assert client.query("select ?", (7,)).scalar() == 7
        assert [future.result().scalar() for future in futures[:2]] == [0, 1]
        with pytest.raises(WorkerUnavailableError) as caught:
            futures[2].result()
        assert caught.value.outcome == "unknown"


def test_a_worker_that_reads_no_more_is_heard_to_its_end(worker: FakeWorker) -> None:
    """It takes nothing more, but has not said its last word yet when a write meets that."""
    worker.answer = nothing
    client, peer = worker.both()
    connection = client._line.connected(2**63)
    with client.pipeline() as pipeline, Calls() as calls:
        future = pipeline.execute("insert into t values (?)", (1,))
        connection.flush(2**63)
        request = peer.next()
        with peer.socket.dup() as mouth:
            mouth.shutdown(socket.SHUT_RD)
            worker.answer = echo
            another = calls.start(client.query, "select ?", (7,))
            until(lambda: not connection.is_open)
            mouth.sendall(frame_of(OutgoingReply(request.id, row(5))))
            peer.join()
        assert another.get().scalar() == 7
        assert future.result().scalar() == 5


def test_all_that_has_come_by_the_end_of_a_call_is_looked_at(worker: FakeWorker) -> None:
    """An answer behind more than one read of others' answers came in time."""
    worker.answer = nothing
    client, peer = worker.both()
    connection = client._line.connected(2**63)
    pipeline = client.pipeline()
    futures = [pipeline.execute("insert into t values (?)", (n,)) for n in range(2)]
    connection.flush(2**63)
    first, second = peer.next(), peer.next()
    peer.reply(first.id, row(b"y" * READ_BYTES))
    peer.reply(second.id, row(2))
    connection.wait(futures[1], 1)
    assert isinstance(futures[1].answer, Reply)


def test_answers_to_others_keep_nobody_beyond_the_end_of_its_call(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that reads for all goes on while something comes, which under load is always so."""
    worker.answer = nothing
    client, _ = worker.both()
    connection = client._line.connected(2**63)
    future = client.pipeline().execute("insert into t values (?)", (1,))
    now_ns = 0
    clock = SimpleNamespace(monotonic_ns=lambda: now_ns)
    monkeypatch.setattr("storage_worker.client.connection.time", clock)
    monkeypatch.setattr(connection, "_poll", lambda _milliseconds: True)
    reads = 0

    def read_another_s() -> bool:
        nonlocal reads, now_ns
        reads += 1
        assert reads < 1000, "it reads on and on"
        now_ns += 1_000_000
        return True

    monkeypatch.setattr(connection, "_read", read_another_s)
    connection.wait(future, 5_000_000)
    assert future.answer is None
    assert reads > 5


def test_a_follower_whose_time_is_over_waits_for_what_the_leader_is_about_to_read(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_worker.client.connection._LEADER_NS", int(PATIENCE_S * 1e9))
    worker.answer = nothing
    client, peer = worker.both()
    connection = client._line.connected(2**63)
    future = client.pipeline().execute("insert into t values (?)", (1,))
    connection.flush(2**63)
    readers = connection._readers
    assert readers.lock.acquire(blocking=False)
    peer.reply(peer.next().id, row(1))
    with Calls() as calls:
        waiting = calls.start(connection.wait, future, 1)
        until(lambda: bool(readers.followers) or waiting.is_there())
        readers.leave()
        waiting.get()
    assert isinstance(future.answer, Reply)


def test_an_answer_at_the_last_moment_counts(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    connection = client._line.connected(2**63)
    pipeline = client.pipeline()
    future = pipeline.execute("insert into t values (?)", (1,), timeout=SHORT_S)
    connection.flush(2**63)
    request = peer.next()
    abandon = connection.abandon

    def abandon_late(waiter: Waiter) -> None:
        peer.reply(request.id, row(1))
        connection.wait(waiter, time.monotonic_ns() + int(PATIENCE_S * 1e9))
        abandon(waiter)

    monkeypatch.setattr(connection, "abandon", abandon_late)
    assert future.result().scalar() == 1


def test_what_was_not_written_by_its_deadline_is_certain_although_it_is_written_then(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.answer = nothing
    client, _ = worker.both()
    connection = client._line.connected(2**63)
    pipeline = client.pipeline()
    future = pipeline.execute("insert into t values (?)", (1,), timeout=SHORT_S)
    # To say that it is not wanted any more takes the bytes before that along.
    monkeypatch.setattr(connection, "flush", lambda _deadline_ns: None)
    with pytest.raises(DeadlineExceededError) as caught:
        future.result()
    assert caught.value.outcome == "not_committed"
    assert caught.value.details["stage"] == "send"


def test_closing_a_client_hears_what_has_come(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    pipeline = client.pipeline()
    futures = [pipeline.execute("insert into t values (?)", (n,)) for n in range(2)]
    client._line.connected(2**63).flush(2**63)
    peer.reply(peer.next().id, row(1))
    client.close()
    assert futures[0].result().scalar() == 1
    with pytest.raises(WorkerUnavailableError) as caught:
        futures[1].result()
    assert caught.value.outcome == "unknown"


def test_draining_moves_new_calls_to_another_connection(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    connection = client._line.connected(2**63)
    with Calls() as calls:
        old = calls.start(client.query, "select ?", (1,))
        request = peer.next()
        peer.send(frame_of(Goodbye("stopping")))
        until(lambda: not connection.is_open)
        new = calls.start(client.query, "select ?", (3,))
        successor = worker.next_peer()
        successor.reply(successor.next().id, row(3))
        assert new.get().scalar() == 3
        peer.reply(request.id, row(1))
        assert old.get().scalar() == 1
    assert peer.ended.wait(PATIENCE_S)
    assert peer.farewell == "closed"


def await_signal() -> None:
    """Wait for a signal that may also have come already, but was not handled yet."""
    for _ in range(int(PATIENCE_S * 1000)):
        select.select([], [], [], 0.001)


class _AlarmError(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[Callable[[], None]]:
    """A signal whose handler raises, as a KeyboardInterrupt would."""

    def raise_it(_number: int, _frame: object) -> None:
        raise _AlarmError

    before = signal.signal(signal.SIGALRM, raise_it)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_wait_cancels_its_call_and_keeps_the_connection(
    worker: FakeWorker, alarm: Callable[[], None]
) -> None:
    client, peer = worker.both()
    connection = client._line.connected(2**63)

    def interrupt(_peer: Peer, _request: Request) -> object:
        until(lambda: all(waiter.asleep for waiter in connection._waiting.values()))
        alarm()
        return NOTHING

    worker.answer = interrupt
    with pytest.raises(_AlarmError):
        client.execute("insert into t values (?)", (1,))
    assert peer.next_cancel() == peer.next().id
    worker.answer = echo
    assert client.query("select ?", (2,)).scalar() == 2
    assert worker.peers.empty()


def test_interrupts_at_any_moment_leave_a_client_that_works(
    worker: FakeWorker, alarm: Callable[[], None]
) -> None:
    """An exception may come between any two steps; no answer goes astray, and no lock stays held."""
    client = worker.client()
    chance = random.Random(11)
    interrupted = 0
    with Calls() as calls:
        over = threading.Event()

        def others() -> None:
            place = 0
            while not over.is_set():
                place += 1
                assert client.query("select ?", (place,)).scalar() == place

        other = calls.start(others)
        try:
            for place in range(300):
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 2e-3))
                    for again in range(10):
                        value = place * 10 + again
                        assert client.query("select ?", (value,), retries=0).scalar() == value
                    await_signal()
                except _AlarmError:
                    interrupted += 1
                assert client.query("select ?", (place,)).scalar() == place
        finally:
            over.set()
        other.get()
    assert interrupted == 300


def test_a_call_inside_another_one_is_refused_at_once(worker: FakeWorker) -> None:
    """A signal's handler that uses the client would wait for itself."""
    worker.answer = nothing
    client, peer = worker.both()
    connection = client._line.connected(2**63)
    refusals: list[InvalidRequestError] = []

    def use(_number: int, _frame: object) -> None:
        worker.answer = nothing
        with pytest.raises(InvalidRequestError) as caught:
            client.query("select ?", (2,))
        refusals.append(caught.value)
        request = peer.next()
        peer.reply(request.id, row(number(request)))

    def signal_it(_peer: Peer, _request: Request) -> object:
        until(lambda: all(waiter.asleep for waiter in connection._waiting.values()))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        return NOTHING

    before = signal.signal(signal.SIGALRM, use)
    try:
        worker.answer = signal_it
        assert client.query("select ?", (1,)).scalar() == 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(refusals) == 1


def test_no_byte_is_sent_twice_where_a_handler_raises_our_own_error_behind_a_send(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    outgoing = client._line.connected(2**63)._outgoing
    send = outgoing._send

    def send_and_raise(data: bytes, flags: int) -> int:
        send(data, flags)
        monkeypatch.undo()
        raise InvalidRequestError("as a signal's handler that calls the client does")

    pipeline = client.pipeline()
    future = pipeline.execute("insert into t values (?)", (1,))
    monkeypatch.setattr(outgoing, "_send", send_and_raise)
    with pytest.raises(InvalidRequestError):
        future.result()
    assert number(peer.next()) == 1
    worker.answer = echo
    assert client.query("select ?", (2,)).scalar() == 2
    with pytest.raises(WorkerUnavailableError) as caught:
        future.result()
    assert caught.value.outcome == "unknown"
    peer.join()
    assert peer.requests.empty()


def test_a_deadly_sigpipe_does_not_kill_the_client(worker: FakeWorker) -> None:
    client, peer = worker.both()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        peer.close()
        assert client.query("select ?", (2,)).scalar() == 2
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_a_descriptor_beyond_1023_works(worker: FakeWorker) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("the system allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
    try:
        client = worker.client()
        assert client.query("select ?", (1,)).scalar() == 1
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
