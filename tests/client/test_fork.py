"""A client carried over a fork: the child never touches its parent's pipe, and nothing in it dead-locks."""

import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from storage_worker.client import Client
from storage_worker.client.connection import Connection
from storage_worker.protocol.errors import ForkedClientError
from storage_worker.protocol.statements import Rows
from tests.client.fake import PATIENCE_S, Calls, FakeWorker, Transactions, echo, nothing, number


def in_child(function: Callable[[], Any]) -> Any:
    """What `function` returns or raises in a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                result: Any = function()
            except Exception as error:  # noqa: BLE001 - raised again in the parent
                result = error
            os.write(writing, pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    result = pickle.loads(data)
    if isinstance(result, Exception):
        raise result
    return result


def test_a_forked_child_connects_anew(worker: FakeWorker) -> None:
    client, peer = worker.both()
    assert client.query("select ?", (1,)).scalar() == 1
    assert in_child(lambda: client.query("select ?", (2,)).scalar()) == 2
    child = worker.next_peer()
    assert child.hello is not None
    assert peer.hello is not None
    assert child.hello.pid != peer.hello.pid
    child.join()
    assert client.query("select ?", (3,)).scalar() == 3
    assert not peer.farewell
    assert worker.peers.empty()


def test_a_childs_close_and_end_leave_the_parent_alone(worker: FakeWorker) -> None:
    client, peer = worker.both()
    in_child(client.close)
    assert not peer.farewell
    assert not peer.ended.is_set()
    assert client.query("select ?", (1,)).scalar() == 1
    assert worker.peers.empty()


def test_a_fork_in_the_middle_of_many_calls(worker: FakeWorker) -> None:
    """Threads of the parent hold every lock there is; the child has them anew."""
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        results = [calls.start(client.query, "select ?", (n,)) for n in range(20)]
        requests = [peer.next() for _ in results]
        peer.reading.clear()
        blocked = calls.start(client.query, "select ?", (b"x" * 1_000_000,))
        behind = calls.start(client.query, "select ?", (21,))
        worker.answer = echo
        for _ in range(5):
            assert in_child(lambda: client.query("select ?", (2,)).scalar()) == 2
            worker.next_peer().join()
        peer.reading.set()
        for request in requests:
            peer.reply(request.id, Rows(("c",), [(number(request),)]))
        assert [result.get().scalar() for result in results] == list(range(20))
        assert len(blocked.get().scalar()) == 1_000_000
        assert behind.get().scalar() == 21


def test_a_fork_while_another_thread_connects(worker: FakeWorker) -> None:
    client, peer = worker.both()
    peer.close()
    worker.welcome = lambda _: None
    with Calls() as calls:
        stuck = calls.start(client.query, "select ?", (1,))
        waiting = worker.next_peer()
        worker.welcome = lambda welcome: welcome
        assert in_child(lambda: client.query("select ?", (2,)).scalar()) == 2
        waiting.close()
        assert stuck.get().scalar() == 1


def test_threads_that_fork_at_any_moment(worker: FakeWorker) -> None:
    client = worker.client()
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            assert client.query("select ?", (1,)).scalar() == 1

    with Calls() as calls:
        workers = [calls.start(work) for _ in range(4)]
        try:
            for place in range(30):
                assert in_child(partial(client.query, "select ?", (place,))).scalar() == place
        finally:
            over.set()
        for each in workers:
            each.get()


def test_a_child_hears_that_its_futures_are_the_parents(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with client.pipeline() as pipeline:
        sent = pipeline.execute("insert", (1,))
        assert not sent.done()
        kept = pipeline.execute("insert", (2,))
        for future in (sent, kept):
            with pytest.raises(ForkedClientError):
                in_child(future.result)
        for _ in range(2):
            if not peer.requests.empty() or not kept.done():
                request = peer.next()
                peer.reply(request.id, Rows(("c",), [(number(request),)]))
        assert (sent.result().scalar(), kept.result().scalar()) == (1, 2)


def test_a_transaction_stays_with_the_parent(worker: FakeWorker) -> None:
    worker.answer = Transactions()
    client, peer = worker.both()
    with client.transaction() as transaction:
        with pytest.raises(ForkedClientError):
            in_child(lambda: transaction.execute("insert"))
        transaction.execute("insert")
        assert not peer.ended.is_set()


class Stranded:
    """A dialer that works in the process that made it only."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pid = os.getpid()

    def dial(self, deadline_ns: int) -> Connection:
        if os.getpid() != self.pid:
            raise ForkedClientError("the client has no address to connect to in this process")
        return self.connection


def test_a_client_without_an_address_says_so_in_a_child(worker: FakeWorker) -> None:
    connection = worker.client()._line.connected(2**63)
    client = Client(Stranded(connection))
    assert client.query("select ?", (1,)).scalar() == 1
    with pytest.raises(ForkedClientError) as caught:
        in_child(lambda: client.query("select ?", (1,)))
    assert caught.value.outcome == "not_committed"


def test_the_parents_death_is_seen_in_spite_of_a_child(worker: FakeWorker) -> None:
    """A child that lives on does not keep its parent's connection open."""
    client, peer = worker.both()
    hold, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    client.close()
    assert peer.ended.wait(PATIENCE_S)
    os.close(release)
    os.waitpid(pid, 0)


def test_a_grandchild_connects_too(worker: FakeWorker) -> None:
    client = worker.client()

    def fork_again() -> object:
        assert client.query("select ?", (1,)).scalar() == 1
        return in_child(lambda: client.query("select ?", (2,)).scalar())

    assert in_child(fork_again) == 2
