"""The asynchronous client: every call of a program on its worker, for one event loop."""

import os
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

from ..protocol.envelope import Welcome
from ..protocol.errors import ResultTooLargeError
from ..protocol.limits import Limits
from ..protocol.operation import Call
from ..protocol.statements import Finding, Health, KnownOutcome, Rows
from ..protocol.status import WorkerStatus
from ..protocol.values import Parameters
from . import calls
from .aio_connection import AsyncConnection
from .aio_dial import AsyncDialer
from .aio_line import AsyncLine
from .aio_pipeline import AsyncPipeline
from .aio_transaction import AsyncInteractiveTransaction
from .pages import Pages
from .terms import agree, deadline_after

if TYPE_CHECKING:
    from .aio_snapshot import AsyncSnapshot

R = TypeVar("R")


class AsyncClient:
    """A program's access to one worker from one event loop; any number of its tasks may use it at once.

    It has every method of `Client`, with the same arguments, results and errors; `await` each of them, and
    use `async with` and `async for`. Its calls never block the loop, and start no thread, except where a
    worker has to be found or started by its database's path; that thread keeps no process from ending.

    A call may be cancelled at any moment. What was not sent then never is; the worker is told to end the
    rest, and a late answer is dropped. A write takes effect wholly or not at all, and `outcome` tells by its
    request key which of the two.

    More calls than the worker takes of one client (256 by default) wait for their turns here, each within
    its own deadline.

    The client belongs to the event loop that uses it first; in another one, and in another thread, it
    raises `InvalidRequestError`. In a forked child it connects anew, for the child's own loop. Close it, or
    use `async with`; a process with an open one ends all the same.

    Arguments: `dialer`, how the worker is reached; `connection`, one to it that exists already.
    """

    def __init__(self, dialer: AsyncDialer, connection: AsyncConnection | None = None) -> None:
        self._line = AsyncLine(dialer, connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client belongs to its process; hand a Pipe or the worker's address to another one")

    @property
    def limits(self) -> Limits:
        """The worker's bounds, as its last Welcome said; the defaults before the first."""
        return self._line.limits

    async def connect(self, *, timeout: float | None = None) -> Welcome:
        """See `Client.connect`."""
        connection = await self._line.current(deadline_after(timeout, self.limits))
        return connection.welcome

    async def execute(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> Rows:
        """See `Client.execute`."""
        line = self._line
        call = calls.execute(sql, parameters, line.limits)
        return await line.run(call, agree(line.limits, timeout, request_key, max_result_bytes, retries))

    async def query(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> Rows:
        """See `Client.query`."""
        line = self._line
        call = calls.query(sql, parameters, line.limits)
        return await line.run(call, agree(line.limits, timeout, None, max_result_bytes, retries))

    async def batch(
        self,
        statements: Iterable[tuple[str, Parameters]],
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> list[Rows]:
        """See `Client.batch`."""
        line = self._line
        call = calls.batch(statements, line.limits)
        return await line.run(call, agree(line.limits, timeout, request_key, max_result_bytes, retries))

    async def script(
        self,
        sql: str,
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> Rows:
        """See `Client.script`."""
        terms = agree(self.limits, timeout, request_key, max_result_bytes, retries)
        return await self._line.run(calls.script(sql), terms)

    async def call(
        self,
        call: Call[R],
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
        retries: int | None = None,
    ) -> R:
        """See `Client.call`."""
        calls.check_call(call)
        terms = agree(self.limits, timeout, request_key, max_result_bytes, retries)
        return await self._line.run(call, terms)

    def transaction(
        self, lease: float | None = None, *, timeout: float | None = None, request_key: str | None = None
    ) -> AsyncInteractiveTransaction:
        """An interactive transaction, exclusive from `async with` on; arguments as of `Client.transaction`.

        Use it so: `async with client.transaction() as tx: await tx.execute(...)`.
        """
        return AsyncInteractiveTransaction(self._line, lease, timeout, request_key)

    def pipeline(self, window: int | None = None) -> AsyncPipeline:
        """Many calls in flight, in order; arguments as of `Client.pipeline`.

        Use it so: `async with client.pipeline() as p: futures = [await p.execute(...), ...]`, then
        `await futures[0]`. To wait for a call's turn takes one `await`, to wait for its result another one.
        """
        return AsyncPipeline(self._line, window)

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
    ) -> AsyncIterator[Rows]:
        """See `Client.pages`; read with `async for`."""
        pages = Pages(sql, key, page_rows, parameters, self.limits)

        async def read() -> AsyncIterator[Rows]:
            while not pages.are_over:
                terms = agree(self.limits, timeout, None, max_result_bytes, retries)
                try:
                    page = await self._line.run(pages.next_call(), terms)
                except ResultTooLargeError as error:
                    pages.shrink(error)
                else:
                    if pages.take(page):
                        yield page

        return read()

    def snapshot(
        self, max_age: float | None = None, *, timeout: float | None = None, retries: int | None = None
    ) -> "AsyncSnapshot":
        """One state of the database, read in this process; arguments as of `Client.snapshot`.

        Use it so: `async with client.snapshot() as snap: snap.query(...)`. The reads are plain calls: they
        block the event loop for microseconds where a row is found by its key; give longer ones to a thread.
        """
        # Here, so that a host which takes none loads no SQLite.
        from .aio_snapshot import AsyncSnapshot  # noqa: PLC0415

        return AsyncSnapshot(self._line, max_age, timeout, retries)

    async def outcome(
        self, key: str, *, fence: bool = False, timeout: float | None = None, retries: int | None = None
    ) -> KnownOutcome:
        """See `Client.outcome`."""
        limits = self.limits
        call = calls.outcome(key, fence=fence, limits=limits)
        return await self._line.run(call, agree(limits, timeout, None, limits.result_bytes_max, retries))

    async def status(self, *, timeout: float | None = None, retries: int | None = None) -> WorkerStatus:
        """See `Client.status`."""
        limits = self.limits
        terms = agree(limits, timeout, None, limits.result_bytes_max, retries)
        return calls.status_of(await self._line.run(calls.STATUS_CALL, terms))

    async def health(self, *, timeout: float | None = None, retries: int | None = None) -> Health:
        """See `Client.health`."""
        return await self._line.run(calls.HEALTH_CALL, agree(self.limits, timeout, retries=retries))

    async def backup(
        self, target: str | os.PathLike[str], *, timeout: float | None = None, retries: int | None = None
    ) -> int:
        """See `Client.backup`; payloads are copied by `copy_payloads` with a `Client`, in a thread."""
        return await self._line.run(calls.backup(target), agree(self.limits, timeout, retries=retries))

    async def check(self, *, timeout: float | None = None, retries: int | None = None) -> list[Finding]:
        """See `Client.check`."""
        return await self._line.run(calls.CHECK_CALL, agree(self.limits, timeout, retries=retries))

    async def stop(self, *, timeout: float | None = None) -> None:
        """See `Client.stop`."""
        await self._line.run(calls.STOP_CALL, agree(self.limits, timeout, retries=0))

    async def close(self) -> None:
        """See `Client.close`."""
        self._line.close()
