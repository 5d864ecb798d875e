"""A worker made of threads in the test's own process: it speaks the protocol and obeys the test."""

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from storage_worker.client import AddressDialer, Client
from storage_worker.protocol.envelope import (
    PROTOCOL_VERSION,
    Cancel,
    Chunk,
    Credit,
    Goodbye,
    Hello,
    OutgoingReply,
    Request,
    Welcome,
    decode_from_client,
    encode,
    failure_of,
)
from storage_worker.protocol.errors import InvalidRequestError, StorageError, TransactionExpiredError
from storage_worker.protocol.framing import FrameReader, frame
from storage_worker.protocol.limits import DEFAULT_LIMITS, Limits
from storage_worker.protocol.statements import Rows, Savepoint, Statement

PATIENCE_S = 60.0
"""How long a test waits for what must come; it never waits that long where all is well."""

Answer = Callable[["Peer", Request], object]
"""Answers one request: what it returns is sent as the result, or as a failure where it is an error.

Nothing is sent for `NOTHING`: then the test does it.
"""

NOTHING = object()


def frame_of(envelope: object) -> bytes:
    return frame(encode(envelope))


def statement(request: Request) -> Statement:
    return msgspec.msgpack.decode(request.arguments, type=Statement)


def number(request: Request) -> Any:
    """The first value that a statement binds; tests count their calls with it."""
    parameters = statement(request).parameters
    assert isinstance(parameters, list)
    return parameters[0]


def echo(_peer: "Peer", request: Request) -> Rows:
    """The result of every statement is what it binds."""
    parameters = statement(request).parameters
    row = tuple(parameters.values() if isinstance(parameters, dict) else parameters)
    return Rows(tuple(f"c{place}" for place in range(len(row))), [row], 1, 7)


def nothing(_peer: "Peer", _request: Request) -> object:
    return NOTHING


def limits_with(**values: int) -> Limits:
    return msgspec.structs.replace(DEFAULT_LIMITS, **values)


def until(condition: Callable[[], bool]) -> None:
    """Wait until another thread has come to where `condition` holds."""
    pause = threading.Event()
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.001)


class Transactions:
    """Answers interactive transactions as a worker does; `log` has what was asked, and with which number.

    A statement whose first value stands in `errors` gets that error.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.keys: list[str | None] = []
        self.owner: Peer | None = None
        self.number = 0
        self.errors: dict[object, StorageError] = {}

    def __call__(self, peer: "Peer", request: Request) -> object:
        name = request.operation.partition(".")[2]
        if name == "savepoint":
            step = msgspec.msgpack.decode(request.arguments, type=Savepoint)
            name = f"{step.action} {step.name}"
        self.log.append((name, request.transaction))
        self.keys.append(request.key)
        if name in self.errors:
            return self.errors.pop(name)
        if name == "begin":
            self.number += 1
            self.owner = peer
            return self.number
        if request.transaction:
            if peer is not self.owner or request.transaction != self.number:
                return TransactionExpiredError("it is over")
            if name in {"commit", "rollback"}:
                self.owner = None
                return None
            return None if " " in name else echo(peer, request)
        if peer is self.owner:
            return InvalidRequestError("send it through the transaction")
        return echo(peer, request)


class Peer:
    """One connection, from the worker's side. Everything that comes is put into queues."""

    def __init__(self, worker: "FakeWorker", sock: socket.socket) -> None:
        self.worker = worker
        self.socket = sock
        self.hello: Hello | None = None
        self.requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.cancels: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self.credits: queue.SimpleQueue[Credit] = queue.SimpleQueue()
        self.farewell = ""
        self.reading = threading.Event()
        self.reading.set()
        self.ended = threading.Event()
        self.bytes_read = 0
        # A test answers beside the connection's own thread, and a large frame takes many writes.
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def next(self) -> Request:
        """The next request that was not answered by itself."""
        return self.requests.get(timeout=PATIENCE_S)

    def next_cancel(self) -> int:
        return self.cancels.get(timeout=PATIENCE_S)

    def reply(self, request_id: int, result: object = None) -> None:
        self.send(frame_of(OutgoingReply(request_id, result)))

    def fail(self, request_id: int, error: StorageError) -> None:
        self.send(frame_of(failure_of(request_id, error, 2000)))

    def send(self, data: bytes) -> None:
        with self._sending, suppress(OSError):  # the client may be gone
            self.socket.sendall(data)

    def close(self) -> None:
        """Die, as seen from the client."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.join()

    def join(self) -> None:
        self.reading.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()

    def _serve(self) -> None:
        frames = FrameReader(DEFAULT_LIMITS.client_bytes_max)
        try:
            while True:
                self.reading.wait()
                data = self.socket.recv(65536)
                if not data:
                    return
                self.bytes_read += len(data)
                for body in frames.feed(data):
                    self._take(decode_from_client(body))
        except OSError:
            return
        finally:
            self.socket.close()
            self.ended.set()

    def _take(self, envelope: object) -> None:
        if isinstance(envelope, Hello):
            self.hello = envelope
            self.worker.greet(self, envelope)
        elif isinstance(envelope, Cancel):
            self.cancels.put(envelope.id)
        elif isinstance(envelope, Chunk):
            self.chunks.put(envelope)
        elif isinstance(envelope, Credit):
            self.credits.put(envelope)
        elif isinstance(envelope, Goodbye):
            self.farewell = envelope.reason
        elif isinstance(envelope, Request):
            # What follows in chunks is the test's to take.
            result = NOTHING if envelope.flags else self.worker.answer(self, envelope)
            if result is NOTHING:
                self.requests.put(envelope)
            elif isinstance(result, StorageError):
                self.fail(envelope.id, result)
            else:
                self.reply(envelope.id, result)


class FakeWorker:
    """A listener with an address; `peers` gives its connections in order.

    `answer` answers requests in the connection's thread; it may be changed at any time. `welcome` changes
    the Welcome before it is sent, None sends none.
    """

    def __init__(self, folder: Path, answer: Answer = echo, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path = folder / f"fake-{secrets.token_hex(4)}.sock"
        self.address = f"unix://{self.path}"
        self.answer = answer
        self.limits = limits
        self.welcome: Callable[[Welcome], object] = lambda welcome: welcome
        self.peers: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self._clients: list[Client] = []
        self._all: list[Peer] = []
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self.kill()

    def listen(self, backlog: int = 128) -> None:
        """Start, or start again at the same address."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(backlog)
        self._thread = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Die: nobody listens, and every connection ends."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self.path.unlink()
            listener.shutdown(socket.SHUT_RDWR)
            assert self._thread is not None
            self._thread.join(PATIENCE_S)
            listener.close()
        while self._all:
            self._all.pop().close()

    def next_peer(self) -> Peer:
        return self.peers.get(timeout=PATIENCE_S)

    def client(self) -> Client:
        """A connected client, closed with the worker."""
        client = Client(AddressDialer(self.address))
        self._clients.append(client)
        client.connect()
        return client

    def both(self) -> tuple[Client, Peer]:
        """A connected client and its connection from the worker's side."""
        client = self.client()
        return client, self.next_peer()

    def greet(self, peer: Peer, hello: Hello) -> None:
        welcome = self.welcome(
            Welcome(
                PROTOCOL_VERSION,
                "fake",
                os.getpid(),
                hello.role,
                self.limits,
                "3.54.0",
                "wal",
                "full",
                time.monotonic_ns(),
            )
        )
        if isinstance(welcome, bytes):
            peer.send(welcome)
        elif welcome is not None:
            peer.send(frame_of(welcome))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            if not self.path.exists():
                sock.close()
                return
            peer = Peer(self, sock)
            self._all.append(peer)
            self.peers.put(peer)


class Calls:
    """Calls in threads of their own, each with its result or its error; all have ended with the block."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def start(self, function: Callable[..., Any], *args: Any, **options: Any) -> "Outcome":
        outcome = Outcome()
        thread = threading.Thread(target=outcome.run, args=(function, args, options), daemon=True)
        self._threads.append(thread)
        thread.start()
        return outcome


class Outcome:
    def __init__(self) -> None:
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            self._value = function(*args, **options)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self._error = error
        finally:
            self._ended.set()

    def is_there(self) -> bool:
        return self._ended.is_set()

    def get(self) -> Any:
        assert self._ended.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        return self._value
