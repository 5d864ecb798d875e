"""The synchronous client: every call of a program on its worker."""

import os
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

from ..protocol.envelope import Welcome
from ..protocol.limits import Limits
from ..protocol.operation import Call
from ..protocol.statements import Finding, Health, KnownOutcome, Rows
from ..protocol.status import WorkerStatus
from ..protocol.values import Parameters
from . import calls
from .connection import Connection
from .dial import Dialer
from .line import Line
from .pages import Pages
from .pipeline import Pipeline
from .terms import agree, deadline_after
from .transaction import InteractiveTransaction

if TYPE_CHECKING:
    from .snapshot import Snapshot

R = TypeVar("R")


class Client:
    """A program's access to one worker; many threads may use it at once.

    It connects at its first call, and anew after each loss and in each forked child. Every call takes

    - `timeout`: seconds for the whole call, reconnects and repeats included; 30 s by default;
    - `request_key` (writes): a text of 1 to 256 bytes that makes the write happen once, however often it
      is sent; such a write, and every read, is sent again by itself when the worker was lost;
    - `max_result_bytes`: the size of result that is allowed, 1 MiB by default and 64 MiB at most;
    - `retries`: how often the call is sent again after an error. By default a few times, and only after
      errors that are retryable and promise that nothing was committed; 0 for never.

    and raises, beside what its own text names, `OverloadedError`, `BusyError`, `DeadlineExceededError`,
    `WorkerUnavailableError`, `NotPermittedError`, `InvalidRequestError`, `RequestTooLargeError`,
    `ResultTooLargeError`, `RequestConflictError`, `ResultNotKeptError`, `StorageFullError`,
    `StorageCorruptError`, `StorageReplacedError`, `ProtocolError` or `OperationFailedError`. Each says by
    its `outcome` whether anything was committed, and the client can be used after each of them.

    Arguments: `dialer`, how the worker is reached; `connection`, one to it that exists already.
    """

    def __init__(self, dialer: Dialer, connection: Connection | None = None) -> None:
        self._line = Line(dialer, connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client belongs to its process; hand a Pipe or the worker's address to another one")

    @property
    def limits(self) -> Limits:
        """The worker's bounds, as its last Welcome said; the defaults before the first."""
        return self._line.limits

    def connect(self, *, timeout: float | None = None) -> Welcome:
        """Connect now, unless it is done already; what the worker said of itself and of its limits.

        `timeout` is in seconds. Raises `WorkerUnavailableError` where no worker answers until then, or the
        worker's own refusal.
        """
        return self._line.connected(deadline_after(timeout, self.limits)).welcome

    def execute(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> Rows:
        """Run exactly one statement that may write, durably; its rows and what it changed.

        `parameters` are None, int (64 bit), float, str or bytes: a sequence for `?`, a mapping for `:name`.
        """
        line = self._line
        call = calls.execute(sql, parameters, line.limits)
        return line.run(call, agree(line.limits, timeout, request_key, max_result_bytes, retries))

    def query(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> Rows:
        """Run exactly one statement that only reads; its rows.

        It sees everything that was acknowledged before, and this connection's earlier pipelined writes.
        """
        line = self._line
        call = calls.query(sql, parameters, line.limits)
        return line.run(call, agree(line.limits, timeout, None, max_result_bytes, retries))

    def batch(
        self,
        statements: Iterable[tuple[str, Parameters]],
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> list[Rows]:
        """Run pairs of SQL text and parameters in order, all or nothing; the result of each.

        Where one fails, `details["statement"]` of the error is its number, counted from 1.
        """
        line = self._line
        call = calls.batch(statements, line.limits)
        return line.run(call, agree(line.limits, timeout, request_key, max_result_bytes, retries))

    def script(
        self,
        sql: str,
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> Rows:
        """Run several statements in one text, all or nothing, alone; needs the role `admin`."""
        call = calls.script(sql)
        return self._line.run(call, agree(self.limits, timeout, request_key, max_result_bytes, retries))

    def call(
        self,
        call: Call[R],
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> R:
        """Run a store's operation, as in `client.call(notes.add("hello"))`; its result.

        Raises, beside the errors of every call, those that the store declares.
        """
        calls.check_call(call)
        return self._line.run(call, agree(self.limits, timeout, request_key, max_result_bytes, retries))

    def transaction(
        self, lease: float | None = None, *, timeout: float | None = None, request_key: str | None = None
    ) -> InteractiveTransaction:
        """An interactive transaction, exclusive from `with` on: `with client.transaction() as tx: ...`.

        It commits at the end of the block and rolls back where an exception leaves it. `lease` is how long
        it may last in seconds (5 by default, at most 60), `timeout` the seconds to wait for its turn, and
        `request_key` that of its commit.
        """
        return InteractiveTransaction(self._line, lease, timeout, request_key)

    def pipeline(self, window: int | None = None) -> Pipeline:
        """Many calls in flight, in order: `with client.pipeline() as p: futures = [p.execute(...), ...]`.

        `window` is how many may be unanswered, 128 by default; the next one waits for room. The end of the
        block waits for all and raises the first error.
        """
        return Pipeline(self._line, window)

    def pages(
        self,
        sql: str,
        key: Sequence[str],
        *,
        page_rows: int | None = None,
        parameters: Parameters = (),
        timeout: float | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> Iterator[Rows]:
        """Read a long result in pages, each a read of its own: no snapshot is held between them.

        `sql` is a select without a limit; the rows come in the order of `key`, columns of it that are
        unique together and never NULL. A page has at most `page_rows` rows (500 by default), and fewer
        where they would be over the size of a result. The other arguments are those of each read.

        Raises `InvalidRequestError` where the key is no column of the select or a row has none.
        """
        line = self._line
        pages = Pages(sql, key, page_rows, parameters, line.limits)

        def read(call: Call[Rows]) -> Rows:
            return line.run(call, agree(line.limits, timeout, None, max_result_bytes, retries))

        return pages.read(read)

    def snapshot(
        self, max_age: float | None = None, *, timeout: float | None = None, retries: int | None = None
    ) -> "Snapshot":
        """One state of the database, read in this process without a round trip.

        Use it so: `with client.snapshot() as snap: snap.query(...)`. The state is that at the begin of the
        block, with everything that was acknowledged before. `max_age` is how long it may last in seconds
        (10 by default, at most 60), `timeout` the seconds for its begin. See `Snapshot`.

        The begin of the block raises, beside the errors of every call, `OverloadedError` where too many
        snapshots are open, `SchemaError` where this process's SQLite cannot read the database,
        `DatabasePathError` or `StorageReplacedError` where this process does not see the worker's file,
        and `ForkedClientError` where one was open when this process was forked.
        """
        # Here, so that a host which takes none loads no SQLite.
        from .snapshot import Snapshot  # noqa: PLC0415

        return Snapshot(self._line, max_age, timeout, retries)

    def outcome(
        self, key: str, *, fence: bool = False, timeout: float | None = None, retries: int | None = None
    ) -> KnownOutcome:
        """What became of the write with this request key.

        With `fence` one that was not committed is forbidden for ever, so that it cannot come late.
        """
        limits = self.limits
        call = calls.outcome(key, fence=fence, limits=limits)
        return self._line.run(call, agree(limits, timeout, None, limits.result_bytes_max, retries))

    def status(self, *, timeout: float | None = None, retries: int | None = None) -> WorkerStatus:
        """Everything the worker says about itself: queues, latencies, files, clients."""
        limits = self.limits
        terms = agree(limits, timeout, None, limits.result_bytes_max, retries)
        return calls.status_of(self._line.run(calls.STATUS_CALL, terms))

    def health(self, *, timeout: float | None = None, retries: int | None = None) -> Health:
        """Whether the worker serves as it should, and why where it does not."""
        return self._line.run(calls.HEALTH_CALL, agree(self.limits, timeout, retries=retries))

    def backup(
        self, target: str | os.PathLike[str], *, timeout: float | None = None, retries: int | None = None
    ) -> int:
        """Copy the database to a path that does not exist yet; the copy's bytes. Needs the role `admin`.

        The files of a conversation store's payloads are not in it: `copy_payloads(client, target)` of
        `storage_worker.conversation.payload_copies` puts them beside the copy, within the next hour.
        """
        return self._line.run(calls.backup(target), agree(self.limits, timeout, retries=retries))

    def check(self, *, timeout: float | None = None, retries: int | None = None) -> list[Finding]:
        """Check the whole database; what is wrong with it, nothing where it is sound.

        Payloads are files beside it: `payload_client.check` of `storage_worker.conversation` looks at those.
        """
        return self._line.run(calls.CHECK_CALL, agree(self.limits, timeout, retries=retries))

    def stop(self, *, timeout: float | None = None) -> None:
        """Stop the worker after it has finished what it took on. Needs the role `admin`."""
        self._line.run(calls.STOP_CALL, agree(self.limits, timeout, retries=0))

    def close(self) -> None:
        """Close the connection; every call in flight and every later one fails."""
        self._line.close()
