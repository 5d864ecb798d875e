"""Both ends of an asynchronous client in one thread, so that the test decides about every step."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from storage_worker.client import AddressDialer
from storage_worker.client.aio import AsyncClient
from storage_worker.client.aio_connection import AsyncConnection
from storage_worker.client.aio_dial import AsyncAddressDialer
from storage_worker.protocol.envelope import (
    PROTOCOL_VERSION,
    Cancel,
    FromClient,
    Goodbye,
    OutgoingReply,
    Request,
    Welcome,
    decode_from_client,
    failure_of,
)
from storage_worker.protocol.errors import StorageError, WorkerUnavailableError
from storage_worker.protocol.framing import FrameReader
from storage_worker.protocol.limits import DEFAULT_LIMITS, MIB, Limits
from storage_worker.protocol.statements import Rows
from tests.client.fake import FakeWorker, Peer, frame_of, number


def welcome_with(limits: Limits) -> Welcome:
    now = time.monotonic_ns()
    return Welcome(PROTOCOL_VERSION, "near", os.getpid(), "write", limits, "3.54.0", "wal", "full", now)


def row(value: object) -> Rows:
    return Rows(("c",), [(value,)])


class NearPeer:
    """A worker's end of one connection, without a thread: it reads and writes when the test says so."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.frames = FrameReader(64 * MIB)
        self.heard: list[FromClient] = []
        self.is_over = False

    def listen(self, bytes_max: int = 1 << 20) -> list[FromClient]:
        """What the client said since the last time."""
        new: list[FromClient] = []
        try:
            while data := self.socket.recv(bytes_max):
                new += map(decode_from_client, self.frames.feed(data))
            self.is_over = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True
        self.heard += new
        return new

    @property
    def requests(self) -> list[Request]:
        self.listen()
        return [envelope for envelope in self.heard if isinstance(envelope, Request)]

    @property
    def cancels(self) -> list[int]:
        self.listen()
        return [envelope.id for envelope in self.heard if isinstance(envelope, Cancel)]

    def echo(self, request: Request) -> None:
        """Answer a statement with the first value that it binds, or with its size where it is large."""
        value = number(request)
        self.say(OutgoingReply(request.id, row(len(value) if isinstance(value, bytes) else value)))

    def echo_all(self) -> None:
        """Answer the statements that the client sent since the last time."""
        for envelope in self.listen():
            if isinstance(envelope, Request):
                self.echo(envelope)

    def say_row(self, request: Request, value: object) -> None:
        """Answer a request with one row of one value."""
        self.say(OutgoingReply(request.id, row(value)))

    def fail(self, request: Request, error: StorageError) -> None:
        self.say(failure_of(request.id, error, 1000))

    def say(self, envelope: object) -> None:
        data = frame_of(envelope)
        with suppress(BrokenPipeError):  # the client is gone
            assert self.socket.send(data) == len(data)


class NearDialer:
    """Connects to peers in this thread; `peers` has them in order. `steps` is how long that takes.

    It refuses while `is_down`.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS, steps: int = 0) -> None:
        self.limits = limits
        self.steps = steps
        self.peers: list[NearPeer] = []
        self.is_down = False

    async def dial(self, deadline_ns: int) -> AsyncConnection:
        await turns(self.steps)
        if self.is_down:
            raise WorkerUnavailableError("down", outcome="not_committed")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.peers.append(NearPeer(theirs))
        return AsyncConnection(ours, welcome_with(self.limits))

    @property
    def peer(self) -> NearPeer:
        """The one of the last connection."""
        return self.peers[-1]


class Near:
    """A client and its peers, closed with the block."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, steps: int = 0) -> None:
        self.dialer = NearDialer(limits, steps)
        self.client = AsyncClient(self.dialer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for peer in self.dialer.peers:
            peer.socket.close()

    @property
    def peer(self) -> NearPeer:
        return self.dialer.peer

    async def works(self) -> None:
        """Assert that the client answers a query, with its own answer."""
        task = asyncio.create_task(self.client.query("select ?", ("works",)))
        await until(lambda: bool(self.dialer.peers) and answered(self.peer, "works"))
        assert (await task).scalar() == "works"


def answered(peer: NearPeer, value: object) -> bool:
    """Answer everything that a client said, and see whether a statement with that value was among it."""
    new = peer.listen()
    if any(isinstance(envelope, Goodbye) for envelope in new):
        return False
    requests = [envelope for envelope in new if isinstance(envelope, Request)]
    for request in requests:
        peer.echo(request)
    return any(number(request) == value for request in requests)


async def turns(count: int) -> None:
    """Let the event loop turn that often."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait in the event loop until `condition` holds, through whatever sockets and threads have to do."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - sockets and other threads set no event
            await asyncio.sleep(0.0005)


def client_of(worker: FakeWorker) -> AsyncClient:
    """An asynchronous client of a fake worker; it connects at its first call."""
    return AsyncClient(AsyncAddressDialer(AddressDialer(worker.address)))


async def both_of(worker: FakeWorker) -> tuple[AsyncClient, Peer]:
    """A connected client and its connection from the worker's side."""
    client = client_of(worker)
    await client.connect()
    return client, await away(worker.next_peer)


async def away(function: Callable[..., Any], *args: Any) -> Any:
    """What a blocking function returns, while the event loop goes on."""
    return await asyncio.to_thread(function, *args)
