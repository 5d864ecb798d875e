"""What hostile clients send and see, and the bystander who must not notice."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from storage_worker.protocol.envelope import Failure, FromWorker, OutgoingRequest, Reply, encode, error_of
from storage_worker.protocol.errors import StorageError
from storage_worker.protocol.framing import frame
from storage_worker.protocol.statements import EXECUTE, QUERY
from storage_worker.protocol.status import WorkerStatus
from tests.worker.conftest import RunningWorker
from tests.worker.raw import PATIENCE_S, RawClient

ENDLESS = "with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) from c"
"""A query that only a deadline or a cancel ends."""

ENDLESS_WRITE = f"insert into ledger select 'endless', ({ENDLESS})"

BOMB = b"\x91" * 100_000 + b"\xc0"
"""MessagePack arrays in each other, 100,000 deep."""

LEDGER = "create table if not exists ledger(owner text, number integer)"


class Bystander:
    """A client that writes a row of its own at each `check` and finds all of them, in the worker it began with."""

    def __init__(self, worker: RunningWorker) -> None:
        self.client = worker.connect(name="bystander")
        self._pid = worker.record.pid
        self._owner = f"{time.monotonic_ns()}"
        self._rows = 0
        self.client.execute(LEDGER)

    def check(self) -> None:
        self._rows += 1
        self.client.execute("insert into ledger values(?, ?)", self._owner, self._rows)
        rows = self.client.query("select number from ledger where owner = ? order by 1", self._owner).rows
        assert rows == [(number,) for number in range(1, self._rows + 1)]
        assert self.client.status().process.pid == self._pid


def request(
    request_id: int,
    arguments: bytes | object,
    operation: str = QUERY.name,
    *,
    deadline_ns: int = 0,
    result_bytes: int = 0,
    key: str | None = None,
    transaction: int = 0,
    flags: int = 0,
) -> bytes:
    """The body of a request; `arguments` are encoded, or bytes that are sent as they are."""
    raw = msgspec.Raw(arguments) if isinstance(arguments, bytes) else arguments
    return encode(
        OutgoingRequest(request_id, operation, deadline_ns, result_bytes, key, transaction, flags, raw)
    )


def ask_with(client: RawClient, arguments: bytes | object, operation: str = QUERY.name, **fields: Any) -> int:
    """Send a request of exactly these fields; its id."""
    client.last_id += 1
    client.send_bytes(frame(request(client.last_id, arguments, operation, **fields)))
    return client.last_id


def ask_many(
    client: RawClient, count: int, arguments: object, operation: str = QUERY.name, **fields: Any
) -> list[int]:
    """Send so many such requests in one write, which a worker that reads no more cannot hold up; their ids."""
    numbers = list(range(client.last_id + 1, client.last_id + 1 + count))
    client.last_id = numbers[-1]
    client.send_bytes(b"".join(frame(request(number, arguments, operation, **fields)) for number in numbers))
    return numbers


def refusal(
    client: RawClient, arguments: bytes | object, operation: str = QUERY.name, **fields: Any
) -> StorageError:
    """The typed error with which a request of these fields is refused; its connection stays."""
    answer = client.answer(ask_with(client, arguments, operation, **fields))
    assert isinstance(answer, Failure), answer
    assert client.query("select 1").scalar() == 1
    return error_of(answer)


def error_in(answer: Reply | Failure) -> StorageError:
    """The error that an answer is."""
    assert isinstance(answer, Failure), answer
    return error_of(answer)


def everything(client: RawClient) -> list[FromWorker]:
    """All that still comes until the worker has closed the connection."""
    found: list[FromWorker] = []
    try:
        while True:
            found.append(client.receive())
    except (EOFError, ConnectionResetError):
        # A connection that is closed with bytes of ours unread is reset instead.
        return found


def last_words(client: RawClient) -> StorageError:
    """The error of the whole connection with which the worker has closed it."""
    *_, last = everything(client)
    assert isinstance(last, Failure), last
    assert last.id == 0
    return error_of(last)


def statement(sql: bytes, *values: bytes) -> bytes:
    """The encoded arguments of one statement, from parts that are encoded or are no proper values at all."""
    text = b"\xda" + len(sql).to_bytes(2, "big") + sql
    return b"\x92" + text + b"\xdc" + len(values).to_bytes(2, "big") + b"".join(values)


def peak_bytes(worker: RunningWorker) -> int:
    """The most memory that a worker ever had."""
    told = Path(f"/proc/{worker.record.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in told.splitlines() if line.startswith("VmHWM"))


def table_is_empty(client: RawClient, name: str) -> bool:
    return client.query(f"select count(*) from {name}").rows == [(0,)]


def until(client: RawClient, holds: Callable[[WorkerStatus], object]) -> WorkerStatus:
    """Ask for the status until `holds` of it is true; that status."""
    end = time.monotonic() + PATIENCE_S
    while not holds(status := client.status()):
        assert time.monotonic() < end, status
    return status


WRITE = EXECUTE.name
