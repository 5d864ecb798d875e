"""Pre-opened connections, handed to children by both process libraries."""

import copy
import importlib
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from storage_worker.client import Pipe
from storage_worker.protocol.envelope import Request
from storage_worker.protocol.errors import WorkerUnavailableError
from tests.client.fake import PATIENCE_S, FakeWorker, Peer, echo, number

LIBRARIES = ["multiprocessing", "multiprocess"]


def open_pipe(worker: FakeWorker) -> Pipe:
    return Pipe.open(worker.address, "read", b"proof", "child", time.monotonic_ns() + 30 * 10**9)


def test_a_pipe_is_a_connection_whose_hand_shake_is_done(worker: FakeWorker) -> None:
    with open_pipe(worker) as pipe:
        peer = worker.next_peer()
        assert peer.hello is not None
        assert (peer.hello.role, peer.hello.grant, peer.hello.name) == ("read", b"proof", "child")
        assert (pipe.role, pipe.address, pipe.welcome.worker) == ("read", worker.address, "fake")
        with pipe.connect() as client:
            assert client.query("select ?", (1,)).scalar() == 1
        assert worker.peers.empty()
        peer.join()


def test_a_second_client_dials_anew_with_the_same_role(worker: FakeWorker) -> None:
    with open_pipe(worker) as pipe, pipe.connect() as first, pipe.connect() as second:
        assert first.query("select ?", (1,)).scalar() == 1
        assert second.query("select ?", (2,)).scalar() == 2
        one, two = worker.next_peer(), worker.next_peer()
        assert one.hello is not None
        assert two.hello is not None
        assert (two.hello.role, two.hello.grant) == (one.hello.role, one.hello.grant)


def test_a_client_of_a_pipe_outlives_its_worker(worker: FakeWorker) -> None:
    with open_pipe(worker) as pipe:
        worker.next_peer().close()
        with pipe.connect() as client:
            assert client.execute("insert", (1,)).scalar() == 1


def test_a_closed_pipe_closes_its_connection(worker: FakeWorker) -> None:
    open_pipe(worker).close()
    worker.next_peer().join()
    pipe = open_pipe(worker)
    peer = worker.next_peer()
    del pipe
    peer.join()


def test_nobody_there_is_unavailable(worker: FakeWorker) -> None:
    worker.kill()
    with pytest.raises(WorkerUnavailableError):
        Pipe.open(worker.address, deadline_ns=time.monotonic_ns() + 10**7)


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_other_ways_to_hand_it_over_are_refused(worker: FakeWorker, take: Callable[[object], object]) -> None:
    with open_pipe(worker) as pipe, pytest.raises(TypeError, match="multiprocess"):
        take(pipe)


def query(pipe: Pipe, value: int) -> Any:
    with pipe.connect() as client:
        return client.query("select ?", (value,)).scalar()


def child_by_argument(pipe: Pipe, results: Any) -> None:
    results.put((query(pipe, 5), os.getpid()))


def child_by_queue(pipes: Any, results: Any) -> None:
    results.put((query(pipes.get(), 6), os.getpid()))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_as_an_argument_of_a_process(worker: FakeWorker, library: str, method: str) -> None:
    context = importlib.import_module(library).get_context(method)
    with open_pipe(worker) as pipe:
        peer = worker.next_peer()
        results = context.SimpleQueue()
        process = context.Process(target=child_by_argument, args=(pipe, results))
        process.start()
        assert results.get() == (5, process.pid)
        process.join()
        pipe.close()
        peer.join()
        if method == "fork":
            # Its parent has the same descriptor, so that it dialled another connection.
            assert worker.next_peer().hello is not None
        else:
            assert worker.peers.empty()
            assert peer.farewell == "closed"
        results.close()
        process.close()
        if method == "forkserver":
            importlib.import_module(f"{library}.forkserver")._forkserver._stop()


@pytest.mark.parametrize("library", LIBRARIES)
def test_through_a_queue(worker: FakeWorker, library: str) -> None:
    context = importlib.import_module(library).get_context("spawn")
    pipe = open_pipe(worker)
    peer = worker.next_peer()
    pipes, results = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=child_by_queue, args=(pipes, results))
    process.start()
    pipes.put(pipe)
    assert results.get() == (6, process.pid)
    process.join()
    # The library sends a copy: this end is closed without any doing of the host.
    peer.join()
    assert peer.farewell == "closed"
    assert worker.peers.empty()
    for each in (pipes, results, process):
        each.close()
    importlib.import_module(f"{library}.resource_sharer").stop(PATIENCE_S)


def child_of_two(first: Pipe, second: Pipe, results: Any) -> None:
    results.put([query(first, 1), query(second, 2)])


def test_a_pipe_that_was_handed_over_serves_no_second_client(worker: FakeWorker) -> None:
    """Two processes on one connection would read each other's answers: whoever comes second dials."""
    served: dict[int, Peer] = {}

    def note(peer: Peer, request: Request) -> object:
        served[number(request)] = peer
        return echo(peer, request)

    worker.answer = note
    context = importlib.import_module("multiprocessing").get_context("spawn")
    with open_pipe(worker) as pipe:
        handed_over = worker.next_peer()
        results = context.SimpleQueue()
        process = context.Process(target=child_of_two, args=(pipe, pipe, results))
        process.start()
        assert query(pipe, 3) == 3
        assert results.get() == [1, 2]
        process.join()
        assert served[1] is handed_over
        assert len(set(served.values())) == 3
        results.close()
        process.close()
