"""A client that speaks the protocol by hand, for tests that must send what no proper client would."""

import os
import socket
import time
from typing import Any, Self

import msgspec

from storage_worker.address import socket_path
from storage_worker.protocol.envelope import (
    PROTOCOL_VERSION,
    Failure,
    FromWorker,
    Hello,
    OutgoingRequest,
    Reply,
    Role,
    Welcome,
    decode_from_worker,
    encode,
    error_of,
)
from storage_worker.protocol.framing import FrameReader, frame
from storage_worker.protocol.limits import MIB, READ_BYTES
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import EXECUTE, QUERY, STATUS, Nothing, Rows, Statement
from storage_worker.protocol.status import WorkerStatus
from storage_worker.startup import grant_for

PATIENCE_S = 30.0
"""How long a test waits for an answer that must come."""

SECRET = b"s" * 32


class RawClient:
    """One connection. `send` and `receive` are single envelopes; `call` is one request and its answer."""

    def __init__(self, address: str, *, role: Role = "write", name: str = "raw", greet: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(socket_path(address))
        self._frames = FrameReader(64 * MIB)
        self._bodies: list[bytes] = []
        self.last_id = 0
        self.welcome: Welcome | None = None
        if greet:
            grant = grant_for(SECRET, role)
            self.send(Hello(PROTOCOL_VERSION, name, os.getpid(), role, time.monotonic_ns(), grant))
            welcome = self.receive()
            assert isinstance(welcome, Welcome), welcome
            self.welcome = welcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, envelope: msgspec.Struct) -> None:
        self.socket.sendall(frame(encode(envelope)))

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> FromWorker:
        """The next envelope; `EOFError` where the worker has closed the connection."""
        while not self._bodies:
            data = self.socket.recv(READ_BYTES)
            if not data:
                raise EOFError("the worker closed the connection")
            self._bodies += self._frames.feed(data)
        return decode_from_worker(self._bodies.pop(0))

    def ask(
        self,
        operation: Operation[Any, Any] | str,
        arguments: object,
        *,
        seconds: float = PATIENCE_S,
        key: str | None = None,
        transaction: int = 0,
        result_bytes: int = 0,
    ) -> int:
        """Send a request without waiting for its answer; its id."""
        self.last_id += 1
        name = operation if isinstance(operation, str) else operation.name
        deadline = time.monotonic_ns() + int(seconds * 1e9)
        self.send(OutgoingRequest(self.last_id, name, deadline, result_bytes, key, transaction, 0, arguments))
        return self.last_id

    def answer(self, request_id: int) -> Reply | Failure:
        """The answer of one request; answers of others that come before it must not be waited for later."""
        while True:
            envelope = self.receive()
            if isinstance(envelope, Reply | Failure) and envelope.id == request_id:
                return envelope

    def call(self, operation: Operation[Any, Any], arguments: object, **options: Any) -> Any:
        """The result of one request; its typed error is raised."""
        answer = self.answer(self.ask(operation, arguments, **options))
        if isinstance(answer, Failure):
            raise error_of(answer)
        return operation.decode_result(answer.result)

    def execute(self, sql: str, *parameters: object, **options: Any) -> Rows:
        rows: Rows = self.call(EXECUTE, Statement(sql, list(parameters)), **options)
        return rows

    def query(self, sql: str, *parameters: object, **options: Any) -> Rows:
        rows: Rows = self.call(QUERY, Statement(sql, list(parameters)), **options)
        return rows

    def status(self) -> WorkerStatus:
        return msgspec.msgpack.decode(self.call(STATUS, Nothing()), type=WorkerStatus)

    def close(self) -> None:
        self.socket.close()


def wait_until_waiting(client: RawClient, requests: int) -> None:
    """Return once so many requests wait for an executor; asked by a client that has none of them."""
    end = time.monotonic() + PATIENCE_S
    while client.status().lanes[1].waiting_requests != requests:
        assert time.monotonic() < end, client.status().lanes


def wait_until_running(client: RawClient, name: str) -> None:
    """Return once a request of the client of that name runs, where nobody else waits."""
    end = time.monotonic() + PATIENCE_S
    while True:
        status = client.status()
        flying = sum(each.in_flight_requests for each in status.clients if each.name == name)
        if flying and not status.lanes[1].waiting_requests:
            return
        assert time.monotonic() < end, status
