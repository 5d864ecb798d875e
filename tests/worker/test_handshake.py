"""How a connection begins: what is refused before a request, and the bounds on who may be there at all."""

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from storage_worker.address import same_user, socket_path
from storage_worker.protocol.envelope import (
    PROTOCOL_VERSION,
    Cancel,
    Failure,
    FromWorker,
    Goodbye,
    Hello,
    Reply,
    Role,
    Welcome,
    encode,
)
from storage_worker.protocol.errors import OperationFailedError, OverloadedError, ProtocolError
from storage_worker.protocol.framing import frame
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.statements import HEARTBEAT, Nothing, Statement
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.hostile import Bystander, everything, last_words, request, until
from tests.worker.raw import PATIENCE_S, RawClient

NOBODY = 65534

SHORT_MS = 1_000
"""How long a hand-shake may take where a test waits for that; longer than a busy machine needs for one."""


def hello(
    version: int = PROTOCOL_VERSION, name: str = "x", role: Role = "write", grant: bytes = b"", pid: int = 1
) -> Hello:
    return Hello(version, name, pid, role, time.monotonic_ns(), grant)


@pytest.fixture
def stranger(standing_worker: RunningWorker) -> Iterator[RawClient]:
    """A connection that has said nothing; afterwards a bystander finds the worker as it was."""
    bystander = Bystander(standing_worker)
    with RawClient(standing_worker.address, greet=False) as client:
        yield client
    bystander.check()
    bystander.client.close()


FIRST = {
    "request": request(1, Statement("select 1")),
    "cancel": encode(Cancel(1)),
    "goodbye": encode(Goodbye("")),
    "welcome": encode(Welcome(1, "w", 1, "read", DEFAULT_LIMITS, "3", "wal", "full", 1)),
    "failure": encode(Failure(0, "c", "m", False, "unknown", None, {})),
    "reply": b"\x93\x04\x01\xc0",
    "no role": encode([1, 1, "x", 1, "owner", 0, b""]),
    "role of another type": encode([1, 1, "x", 1, 7, 0, b""]),
    "no name": encode([1, 1, None, 1, "read", 0, b""]),
    "too short": encode([1, 1, "x"]),
    "grant of another type": encode([1, 1, "x", 1, "read", 0, 5]),
    "name with a lone surrogate": encode([1, 1]).replace(b"\x92", b"\x97")
    + b"\xa3\xed\xa0\x80\x01\xa4read\x00\xc4\x00",
}


@pytest.mark.parametrize("body", FIRST.values(), ids=FIRST)
def test_only_a_hello_comes_first(stranger: RawClient, body: bytes) -> None:
    stranger.send_bytes(frame(body))
    assert isinstance(last_words(stranger), ProtocolError)


def test_a_second_hello_closes_the_connection(stranger: RawClient) -> None:
    stranger.send(hello())
    assert isinstance(stranger.receive(), Welcome)
    stranger.send(hello())
    assert isinstance(last_words(stranger), ProtocolError)


@pytest.mark.parametrize("version", [0, -1, PROTOCOL_VERSION + 1, 2**64 - 1])
def test_another_version_is_refused_with_both_named(stranger: RawClient, version: int) -> None:
    stranger.send(hello(version))
    error = last_words(stranger)
    assert isinstance(error, ProtocolError)
    assert error.outcome == "not_committed"
    assert str(version) in str(error)
    assert str(PROTOCOL_VERSION) in str(error)


@pytest.mark.parametrize("name", ["", "\0", "x" * 100_000, "\n\x1b[2J", "ü\N{GRINNING FACE}", "%s%d{0}"])
def test_any_name_is_taken_and_cut_to_its_bound(stranger: RawClient, name: str) -> None:
    stranger.send(hello(name=name))
    assert isinstance(stranger.receive(), Welcome)
    most = DEFAULT_LIMITS.client_name_chars_max
    assert name[:most] in [each.name for each in stranger.status().clients]


@pytest.mark.parametrize("pid", [-(2**63), 0, 2**64 - 1])
def test_any_pid_is_taken_as_told(stranger: RawClient, pid: int) -> None:
    stranger.send(hello(name="odd pid", pid=pid))
    assert isinstance(stranger.receive(), Welcome)
    assert ("odd pid", pid) in [(each.name, each.pid) for each in stranger.status().clients]


def test_a_hello_and_requests_in_one_write(stranger: RawClient) -> None:
    stranger.send_bytes(frame(encode(hello())) + frame(request(1, Statement("select 1"))))
    assert isinstance(stranger.receive(), Welcome)
    assert isinstance(stranger.receive(), Reply)


def test_a_hello_by_the_byte(stranger: RawClient) -> None:
    for byte in frame(encode(hello())):
        stranger.send_bytes(bytes([byte]))
    assert isinstance(stranger.receive(), Welcome)


def test_nothing_is_granted_by_a_failed_hello(stranger: RawClient) -> None:
    stranger.send_bytes(frame(encode(hello(99))) + frame(request(1, Statement("select 1"))))
    assert [type(each) for each in everything(stranger)] == [Failure]


# Bounds


def test_an_unfinished_handshake_ends(start_worker: StartWorker) -> None:
    worker = start_worker(handshake_ms_max=SHORT_MS)
    bystander = Bystander(worker)
    slow = [worker.connect(greet=False) for _ in range(3)]
    for client, said in zip(slow, (b"", b"\x00", b"\x00\x00\x00\x20\x97"), strict=True):
        client.send_bytes(said)
    for client in slow:
        error = last_words(client)
        assert isinstance(error, ProtocolError)
        assert "hand-shake" in str(error)
    bystander.check()


def test_a_finished_handshake_has_no_such_end(start_worker: StartWorker) -> None:
    worker = start_worker(handshake_ms_max=SHORT_MS)
    early = worker.connect()
    assert "hand-shake" in str(last_words(worker.connect(greet=False)))
    assert early.query("select 1").scalar() == 1


def refused(worker: RunningWorker) -> OverloadedError:
    error = last_words(worker.connect(greet=False))
    assert isinstance(error, OverloadedError)
    assert error.outcome == "not_committed"
    assert error.retryable
    assert error.retry_after is not None
    return error


def test_unfinished_handshakes_are_bounded(start_worker: StartWorker) -> None:
    worker = start_worker(handshakes_unfinished_max=3)
    bystander = Bystander(worker)
    waiting = [worker.connect(greet=False) for _ in range(3)]
    late = worker.connect(greet=False)
    late.send(hello())
    bystander.check()
    late.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        late.receive()
    late.socket.settimeout(PATIENCE_S)
    for client in waiting:
        client.send(hello())
        assert isinstance(client.receive(), Welcome)
    assert isinstance(late.receive(), Welcome), "it waited in the backlog, and there is room now"


def test_stalled_handshakes_keep_others_out_for_no_longer_than_they_may_last(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(handshakes_unfinished_max=2, handshake_ms_max=SHORT_MS)
    stalled = [worker.connect(greet=False) for _ in range(2)]
    worker.connect().query("select 1")
    for client in stalled:
        assert isinstance(client.receive(), Failure)


def test_a_fan_out_of_many_connections_at_once_is_welcomed_whole(start_worker: StartWorker) -> None:
    worker = start_worker(handshakes_unfinished_max=4)
    clients = [worker.connect(greet=False) for _ in range(200)]
    for client in clients:
        client.send(hello())
    for client in clients:
        assert isinstance(client.receive(), Welcome)


def test_connections_are_bounded(start_worker: StartWorker) -> None:
    worker = start_worker(connections_max=3, handshakes_unfinished_max=3)
    bystander = Bystander(worker)
    others = [worker.connect() for _ in range(2)]
    for _ in range(5):
        assert refused(worker).details["bound"] == "connections"
    bystander.check()
    others[0].close()
    # The worker sees the end of the one and the beginning of the other in either order.
    assert welcomed_in_the_end(worker)
    bystander.check()


def welcomed_in_the_end(worker: RunningWorker) -> bool:
    for _ in range(1_000):
        client = worker.connect(greet=False)
        first = first_words(client)
        if isinstance(first, Welcome):
            return True
    return False


def first_words(client: RawClient) -> FromWorker:
    try:
        client.send(hello())
    except BrokenPipeError:
        return client.receive()  # refused before it could say a word
    return client.receive()


def test_many_come_and_go(standing_worker: RunningWorker) -> None:
    bystander = Bystander(standing_worker)
    before = bystander.client.status().process.descriptors
    for _ in range(200):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(socket_path(standing_worker.address))
    bystander.check()
    # Some of them still wait in the backlog.
    until(bystander.client, lambda status: status.process.descriptors <= before)
    bystander.client.close()


def test_the_worker_waits_for_a_descriptor(start_worker: StartWorker) -> None:
    """Without any left it takes nobody new, serves those it has, and goes on once there is one."""
    worker = start_worker()
    served, leaving = worker.connect(), worker.connect()
    limits = resource.prlimit(worker.record.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(worker.record.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    late = worker.connect(greet=False)
    late.send(hello())
    for _ in range(300):
        served.call(HEARTBEAT, Nothing())
    assert worker.log().count("cannot accept") <= 2, "it does not try again and again"
    resource.prlimit(worker.record.pid, resource.RLIMIT_NOFILE, limits)
    leaving.close()
    assert isinstance(late.receive(), Welcome)


def test_a_status_that_cannot_be_had_is_a_typed_error(start_worker: StartWorker) -> None:
    worker = start_worker()
    bystander = Bystander(worker)
    limits = resource.prlimit(worker.record.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(worker.record.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    with pytest.raises(OperationFailedError):
        bystander.client.status()
    resource.prlimit(worker.record.pid, resource.RLIMIT_NOFILE, limits)
    bystander.check()


# Users


def test_the_own_user_is_known() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert same_user(near)


def test_another_user_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with near, far:
        assert not same_user(near)


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_before_a_byte_is_read(standing_worker: RunningWorker) -> None:
    path = Path(socket_path(standing_worker.address))
    bystander = Bystander(standing_worker)
    with as_nobody(), socket.socket(socket.AF_UNIX) as sock, pytest.raises(PermissionError):
        sock.connect(str(path))
    path.parent.chmod(0o711)
    path.chmod(0o666)
    try:
        with as_nobody(), RawClient(standing_worker.address, greet=False) as other:
            with suppress(BrokenPipeError):  # closed already
                other.send(hello())
            assert everything(other) == []
    finally:
        path.chmod(0o600)
        path.parent.chmod(0o700)
    bystander.check()
    bystander.client.close()
