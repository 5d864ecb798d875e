"""Reaching a worker: what is waited for, what is refused, and what the hand-shake checks."""

import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from storage_worker.client import AddressDialer, Client
from storage_worker.client.dial import SOCKET_PATH_BYTES_MAX
from storage_worker.protocol.envelope import PROTOCOL_VERSION, Goodbye, Welcome, failure_of
from storage_worker.protocol.errors import (
    InvalidRequestError,
    NotPermittedError,
    OverloadedError,
    ProtocolError,
    StorageError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS
from tests.client.fake import Calls, FakeWorker, frame_of, until

SHORT_S = 0.05


def dial(address: str, seconds: float = SHORT_S) -> Client:
    client = Client(AddressDialer(address))
    with client:
        client.connect(timeout=seconds)
    return client


def test_the_hello_says_who_asks_for_what(worker: FakeWorker) -> None:
    dialer = AddressDialer(worker.address, "admin", b"proof", "the name")
    with Client(dialer) as client:
        welcome = client.connect()
        assert welcome.worker == "fake"
        hello = worker.next_peer().hello
    assert hello is not None
    assert (hello.version, hello.name, hello.pid) == (PROTOCOL_VERSION, "the name", os.getpid())
    assert (hello.role, hello.grant) == ("admin", b"proof")


def test_connected_means_that_the_welcome_came(worker: FakeWorker) -> None:
    held: list[Welcome] = []
    worker.welcome = held.append
    with Calls() as calls, Client(AddressDialer(worker.address)) as client:
        connecting = calls.start(client.connect)
        peer = worker.next_peer()
        assert not connecting.is_there()
        until(lambda: bool(held))
        peer.send(frame_of(held[0]))
        assert connecting.get().worker == "fake"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "app.db",
        "tcp://127.0.0.1:80",
        "unix://",
        "unix://relative.sock",
        "unix:///with\0nul",
        "unix:///lone\ud800surrogate",
        f"unix:///{'x' * SOCKET_PATH_BYTES_MAX}",
        f"unix:///{'ö' * (SOCKET_PATH_BYTES_MAX // 2 + 1)}",
    ],
)
def test_addresses_that_cannot_be_are_refused(address: str) -> None:
    with pytest.raises(InvalidRequestError):
        AddressDialer(address)


@pytest.mark.parametrize("name", ["x" * 129, "lone \ud800"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        AddressDialer("unix:///tmp/x.sock", name=name)


def test_a_program_without_a_readable_name_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/\udcff"])
    assert AddressDialer("unix:///tmp/x.sock").name == "\\udcff"
    monkeypatch.setattr("sys.argv", [""])
    assert AddressDialer("unix:///tmp/x.sock").name == "python"


def test_nobody_there_is_unavailable_after_the_deadline(runtime_directory: Path) -> None:
    with pytest.raises(WorkerUnavailableError) as caught:
        dial(f"unix://{runtime_directory}/nobody.sock")
    assert caught.value.outcome == "not_committed"
    assert caught.value.retryable
    assert caught.value.details["address"] == f"unix://{runtime_directory}/nobody.sock"


def test_a_dead_workers_socket_is_unavailable(runtime_directory: Path) -> None:
    path = runtime_directory / "dead.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with pytest.raises(WorkerUnavailableError):
        dial(f"unix://{path}")
    path.unlink()


def test_a_worker_that_comes_late_is_waited_for(worker: FakeWorker) -> None:
    worker.kill()
    with Calls() as calls, Client(AddressDialer(worker.address)) as client:
        answer = calls.start(client.query, "select ?", (5,))
        worker.listen()
        assert answer.get().scalar() == 5


def test_a_full_backlog_is_waited_for(runtime_directory: Path) -> None:
    path = runtime_directory / "full.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting: list[socket.socket] = []
        try:
            while True:
                sock = socket.socket(socket.AF_UNIX)
                waiting.append(sock)
                sock.setblocking(False)
                sock.connect(str(path))
        except BlockingIOError:
            pass
        with Calls() as calls, Client(AddressDialer(f"unix://{path}")) as client:
            connecting = calls.start(client.connect)
            peers = [listener.accept()[0] for _ in waiting]  # those that waited, and then the client
            hello = peers[-1].recv(1000)
            assert hello
            peers[-1].sendall(frame_of(_welcome()))
            assert connecting.get().worker == "w"
        for sock in [*waiting, *peers]:
            sock.close()
    path.unlink()


def test_a_worker_that_never_answers_the_hello_is_unavailable(worker: FakeWorker) -> None:
    worker.welcome = lambda _: None
    with pytest.raises(WorkerUnavailableError) as caught:
        dial(worker.address)
    assert "hand-shake" in str(caught.value)


def test_a_worker_that_ends_in_the_hand_shake_is_dialled_again(worker: FakeWorker) -> None:
    answers = iter([b"", b"\0\0", frame_of(Goodbye("stopping"))])

    def end(welcome: Welcome) -> object:
        answer = next(answers, None)
        if answer is None:
            return welcome
        peer = worker.next_peer()
        peer.send(answer)
        peer.close()
        return None

    worker.welcome = end
    with Client(AddressDialer(worker.address)) as client:
        assert client.query("select ?", (1,)).scalar() == 1
    assert next(answers, None) is None


def test_a_refusal_in_the_hand_shake_is_raised(worker: FakeWorker) -> None:
    refusal = OverloadedError("1024 connections", retry_after=0.5, details={"bound": "connections_max"})
    worker.welcome = lambda _: frame_of(failure_of(0, refusal, 2000))
    with pytest.raises(OverloadedError) as caught:
        dial(worker.address, 30)
    assert caught.value.details == {"bound": "connections_max"}
    assert caught.value.retry_after == 0.5


def test_an_address_that_is_not_open_to_this_user(
    monkeypatch: pytest.MonkeyPatch, worker: FakeWorker
) -> None:
    class Guarded(socket.socket):
        def connect(self, _address: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("storage_worker.client.dial.socket.socket", Guarded)
    with pytest.raises(NotPermittedError) as caught:
        dial(worker.address, 30)
    assert caught.value.outcome == "not_committed"


def test_another_version_is_refused_with_both_named(worker: FakeWorker) -> None:
    worker.welcome = lambda welcome: msgspec.structs.replace(welcome, version=PROTOCOL_VERSION + 1)
    with pytest.raises(ProtocolError) as caught:
        dial(worker.address, 30)
    assert caught.value.details == {
        "client_version": PROTOCOL_VERSION,
        "worker_version": PROTOCOL_VERSION + 1,
    }


@pytest.mark.parametrize("shift_s", [-3600, 3600])
def test_another_clock_is_refused(worker: FakeWorker, shift_s: int) -> None:
    worker.welcome = lambda welcome: msgspec.structs.replace(
        welcome, clock_ns=time.monotonic_ns() + shift_s * 10**9
    )
    with pytest.raises(ProtocolError) as caught:
        dial(worker.address, 30)
    assert caught.value.outcome == "not_committed"
    assert "clock" in str(caught.value)


@pytest.mark.parametrize(
    "first",
    [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\0\0\0", frame_of("no envelope"), frame_of((4, 1, None))],
    ids=["negative", "empty", "huge", "no envelope", "a reply"],
)
def test_garbage_in_the_hand_shake_is_a_protocol_error(worker: FakeWorker, first: bytes) -> None:
    worker.welcome = lambda _: first
    with pytest.raises(ProtocolError) as caught:
        dial(worker.address, 30)
    assert caught.value.outcome == "not_committed"


def test_bytes_behind_the_welcome_are_the_connections(worker: FakeWorker) -> None:
    worker.welcome = lambda welcome: frame_of(welcome) + frame_of(Goodbye("stopping"))
    with Calls() as calls, Client(AddressDialer(worker.address)) as client:
        client.connect()
        worker.welcome = lambda welcome: welcome
        results = [calls.start(client.query, "select ?", (n,)) for n in range(5)]
        assert [result.get().scalar() for result in results] == list(range(5))


def test_sockets_do_not_pass_to_other_programs(worker: FakeWorker) -> None:
    connection = worker.client()._line.connected(2**63)
    assert not os.get_inheritable(connection._sock.fileno())


def test_one_connection_for_threads_that_need_it_at_once(worker: FakeWorker) -> None:
    start = threading.Barrier(8)
    with Calls() as calls, Client(AddressDialer(worker.address)) as client:

        def query(value: int) -> object:
            start.wait()
            return client.query("select ?", (value,)).scalar()

        results = [calls.start(query, place) for place in range(8)]
        assert [result.get() for result in results] == list(range(8))
        worker.next_peer()
        assert worker.peers.empty()


def test_a_thread_does_not_wait_for_anothers_dialling_beyond_its_deadline(worker: FakeWorker) -> None:
    worker.welcome = lambda _: None
    with Calls() as calls, Client(AddressDialer(worker.address)) as client:
        patient = calls.start(client.connect)
        peer = worker.next_peer()
        with pytest.raises(StorageError) as caught:
            client.query("select 1", timeout=SHORT_S)
        assert caught.value.outcome == "not_committed"
        worker.welcome = lambda welcome: welcome
        peer.close()
        assert patient.get().worker == "fake"


def _welcome() -> Welcome:
    return Welcome(PROTOCOL_VERSION, "w", 1, "write", DEFAULT_LIMITS, "3", "wal", "full", time.monotonic_ns())
