"""The real writer on a real database, driven by hand: what is in a group and when it runs is the test's choice."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from storage_worker.admission import Lane
from storage_worker.database.connection import Database
from storage_worker.database.files import OpenFiles
from storage_worker.database.opening import Durability, open_writer
from storage_worker.execution import Served
from storage_worker.operations import served_operations
from storage_worker.peer import Job, Peer
from storage_worker.protocol.envelope import Failure, Reply, decode_from_worker, encode, error_of
from storage_worker.protocol.framing import FrameReader
from storage_worker.protocol.limits import DEFAULT_LIMITS, MIB
from storage_worker.protocol.operation import Call, Operation
from storage_worker.protocol.statements import BACKUP, BATCH, EXECUTE, QUERY, Batch, Rows, Statement
from storage_worker.receipts import Receipts
from storage_worker.schema import prepare_own_tables
from storage_worker.store import Store
from storage_worker.transaction import Transaction
from storage_worker.writer import Writer

Work = Callable[[Transaction], Any]

_UNHURRIED = {"group_work_ms_max": 600_000}
"""Groups that take as long as they like, so that a busy machine does not close them."""

_EVER_S = 3600.0
"""A deadline that no test reaches."""


class OneClient(Peer):
    """A client without a socket."""

    def __init__(self, name: str = "client") -> None:
        self.name = name
        self.pid = 1
        self.closed = False
        self.paused = False


class Workbench:
    """A writer. Requests are placed by `ask`, run by `run`, and read back by `result`."""

    def __init__(
        self,
        path: Path,
        *,
        stores: Sequence[Store] = (),
        durability: Durability = "normal",
        **limits: int,
    ) -> None:
        self.path = path
        self.limits = msgspec.structs.replace(DEFAULT_LIMITS, **(_UNHURRIED | limits))
        self.lane = Lane()
        self.durability: Durability = durability
        self.writer = Writer(self.lane, self._open, self._receipts, self.limits)
        self.operations = served_operations(stores, self.writer, self.limits, sql=True)
        self.writer.special[BACKUP.name] = lambda _: []
        self.client = OneClient()
        self._last_id = 0

    def _open(self) -> tuple[Database, OpenFiles]:
        return open_writer(str(self.path), self.durability, self.limits), OpenFiles(str(self.path))

    def _receipts(self, database: Database) -> Receipts:
        prepare_own_tables(database)
        return Receipts(database, self.limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.database.close()

    def ask(
        self,
        operation: Operation[Any, Any],
        arguments: object,
        *,
        client: OneClient | None = None,
        seconds: float = _EVER_S,
        key: str | None = None,
        transaction: int = 0,
        result_bytes: int = MIB,
    ) -> Job:
        """Place a request; inside an interactive transaction into its own lane."""
        return self._place(
            self.operations[operation.name], arguments, client, seconds, key, transaction, result_bytes
        )

    def call(self, call: Call[Any], **options: Any) -> Job:
        return self.ask(call.operation, call.arguments, **options)

    def execute(self, sql: str, *parameters: object, **options: Any) -> Job:
        return self.ask(EXECUTE, Statement(sql, list(parameters)), **options)

    def query(self, sql: str, *parameters: object, **options: Any) -> Job:
        return self.ask(QUERY, Statement(sql, list(parameters)), **options)

    def batch(self, *statements: str, **options: Any) -> Job:
        return self.ask(BATCH, Batch([Statement(sql) for sql in statements]), **options)

    def handler(self, work: Work, **options: Any) -> Job:
        """Place a request that runs a function of the transaction, as a store's handler would."""
        solo = options.pop("solo", False)
        operation = Operation[[], Any]("traps.handler", "write", Statement, Any, solo=solo)
        served = Served(operation, lambda tx, _: work(tx))
        defaults: dict[str, Any] = {
            "client": None,
            "seconds": _EVER_S,
            "key": None,
            "transaction": 0,
            "result_bytes": MIB,
        }
        return self._place(served, Statement(""), **(defaults | options))

    def _place(
        self,
        served: Served,
        arguments: object,
        client: OneClient | None,
        seconds: float,
        key: str | None,
        transaction: int,
        result_bytes: int,
    ) -> Job:
        self._last_id += 1
        now = time.monotonic_ns()
        job = Job(
            client or self.client,
            self._last_id,
            served,
            msgspec.Raw(encode(arguments)),
            100,
            now + int(seconds * 1e9),
            result_bytes,
            now,
            served.solo,
        )
        job.key = key
        job.transaction = transaction
        (self.writer.interactive.lane if transaction else self.lane).add(job)
        return job

    def run(self) -> list[Job]:
        """Run one group."""
        return self.writer.run_group()

    def run_all(self) -> list[Job]:
        """Run groups until nothing waits."""
        done: list[Job] = []
        while self.lane.requests:
            done += self.run()
        return done

    def step(self) -> list[Job]:
        """Run the next request of the interactive transaction."""
        return self.writer.interactive.run_next()

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What the database holds, asked on the writer's connection outside of any transaction."""
        assert not self.writer.database.in_transaction
        return self.writer.database.own(sql)


def when_started(bench: Workbench, monkeypatch: pytest.MonkeyPatch, act: Callable[[Job], None]) -> None:
    """Have `act` done whenever a request is being watched, just before it runs."""
    watch = bench.writer.watch
    start = watch.start

    def start_and_act(job: Job, now_ns: int, hostage_ns: int) -> None:
        start(job, now_ns, hostage_ns)
        act(job)

    monkeypatch.setattr(watch, "start", start_and_act)


def end_deadline(job: Job) -> None:
    """Let the time of a running request be over."""
    job.deadline_ns = 1


def answer(job: Job) -> Reply | Failure:
    """What its client reads."""
    assert job.frame, "the request has no answer yet"
    found = decode_from_worker(FrameReader(64 * MIB).feed(job.frame)[0])
    assert isinstance(found, Reply | Failure)
    assert found.id == job.id
    return found


def result(job: Job) -> Any:
    """The request's result; its typed error is raised."""
    found = answer(job)
    if isinstance(found, Failure):
        raise error_of(found)
    return job.served.operation.decode_result(found.result)


def failure(job: Job) -> Failure:
    """The request's failure."""
    found = answer(job)
    assert isinstance(found, Failure), found
    return found


def rows_of(job: Job) -> Rows:
    found = result(job)
    assert isinstance(found, Rows)
    return found
