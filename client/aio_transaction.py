"""Interactive transactions of an asynchronous client."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

from ..protocol.errors import (
    InvalidRequestError,
    StorageError,
    TransactionExpiredError,
    WorkerUnavailableError,
)
from ..protocol.operation import Call
from ..protocol.statements import Rows
from ..protocol.values import Parameters
from . import calls
from .aio_connection import AsyncConnection
from .aio_line import AsyncLine
from .retry import Attempts
from .terms import Terms, agree
from .transaction_state import ROLLBACK_SECONDS, TransactionState

R = TypeVar("R")


class AsyncInteractiveTransaction:
    """A transaction that its client owns, alone, from `async with` on until the end of the block.

    Everything is as in `InteractiveTransaction`, with tasks in the place of threads: the block's task can
    only read with the client itself, and other tasks go on. The transaction has a connection of its own, so
    that pipelined writes that were not waited for have no order with it. A call inside it that is cancelled
    takes the transaction along, since nobody knows what a commit would commit then; where the commit itself
    is cancelled, the client's `outcome` tells by its request key what became of it.

    Arguments: `line`, the client's; the others as of `InteractiveTransaction`.
    """

    def __init__(
        self, line: AsyncLine, lease: float | None, timeout: float | None, request_key: str | None
    ) -> None:
        self._line = line
        self._state = TransactionState(line.limits, lease, request_key)
        self._timeout = timeout
        self._connection: AsyncConnection | None = None

    async def __aenter__(self) -> Self:
        if self._connection is not None:
            raise InvalidRequestError("a transaction is begun once; make another one")
        terms = agree(self._line.limits, self._timeout)
        attempts = Attempts(self._state.begin, terms, self._line.limits)
        while True:
            connection = await self._line.reserve(terms.deadline_ns)
            try:
                await self._begin_on(connection, terms)
            except StorageError as error:
                self._line.give_back(connection)
                error.outcome = "not_committed"
                wait = attempts.seconds_before_next(error, answered=True)
            except BaseException:
                connection.close()
                self._line.give_back(connection)
                raise
            else:
                self._connection = connection
                return self
            await asyncio.sleep(wait)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self._begun()
        try:
            if error is None and self._state.wants_commit:
                await self.commit(request_key=self._state.key)
        finally:
            try:
                await self._leave(connection)
            finally:
                self._line.give_back(connection)

    async def execute(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
    ) -> Rows:
        """See `InteractiveTransaction.execute`."""
        return await self._run(calls.execute(sql, parameters, self._line.limits), timeout, max_result_bytes)

    async def query(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
    ) -> Rows:
        """See `InteractiveTransaction.query`."""
        return await self._run(calls.query(sql, parameters, self._line.limits), timeout, max_result_bytes)

    async def batch(
        self,
        statements: Iterable[tuple[str, Parameters]],
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
    ) -> list[Rows]:
        """See `InteractiveTransaction.batch`."""
        return await self._run(calls.batch(statements, self._line.limits), timeout, max_result_bytes)

    async def call(
        self, call: Call[R], *, timeout: float | None = None, max_result_bytes: int | None = None
    ) -> R:
        """See `InteractiveTransaction.call`."""
        calls.check_call(call)
        return await self._run(call, timeout, max_result_bytes)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """A part that an exception undoes alone: `async with tx.savepoint(): ...`. They nest."""
        name = self._state.next_savepoint()
        await self._run(calls.savepoint("open", name))
        try:
            yield
        except BaseException:
            await self._undo(name)
            raise
        await self._run(calls.savepoint("release", name))

    async def commit(self, *, timeout: float | None = None, request_key: str | None = None) -> None:
        """See `InteractiveTransaction.commit`."""
        connection, state = self._alive(), self._state
        terms = agree(self._line.limits, timeout, request_key, None, 0)
        try:
            await self._send(connection, calls.COMMIT_CALL, terms)
        except WorkerUnavailableError as error:
            key = state.lost_commit(error, request_key)
            try:
                question = calls.outcome(key, fence=False, limits=self._line.limits)
                known = await self._line.run(question, Terms(terms.deadline_ns))
            except StorageError:
                raise error from None
            state.looked_up(known, error)
        except BaseException as error:
            state.doubt(error)
            raise
        else:
            state.ended_by = "committed"

    async def rollback(self, *, timeout: float | None = None) -> None:
        """See `InteractiveTransaction.rollback`."""
        await self._run(calls.ROLLBACK_CALL, timeout)
        self._state.ended_by = "rolled back"

    async def _begin_on(self, connection: AsyncConnection, terms: Terms) -> None:
        try:
            answer = await connection.request(self._state.begin, terms)
        except StorageError:
            # A grant that comes late would keep the writer until its lease ends.
            connection.close()
            raise
        assert answer is not None, "the connection is open and this transaction's"
        self._state.begun(answer)

    async def _run(self, call: Call[R], timeout: float | None = None, result_bytes: int | None = None) -> R:
        connection = self._alive()
        terms = agree(self._line.limits, timeout, None, result_bytes, 0)
        try:
            return await self._send(connection, call, terms)
        except WorkerUnavailableError as error:
            self._state.lost(error)
        except asyncio.CancelledError:
            if call.operation.kind != "read" and not self._state.ended_by:
                # Nobody knows any more what a commit would commit.
                connection.close()
                self._state.ended_by = "rolled back since a call inside it was cancelled"
            raise

    async def _send(self, connection: AsyncConnection, call: Call[R], terms: Terms) -> R:
        answer = await connection.request(call, terms, self._state.number)
        assert answer is not None, "requests with a transaction's number are always taken"
        return self._state.result_of(call, answer)

    async def _undo(self, name: str) -> None:
        """Roll a savepoint back; without certainty of that nothing of the transaction may be committed."""
        if self._state.ended_by:
            return
        try:
            await self._run(calls.savepoint("rollback", name), ROLLBACK_SECONDS)
            await self._run(calls.savepoint("release", name), ROLLBACK_SECONDS)
        except BaseException as error:
            self._begun().close()
            self._state.ended_by = "rolled back since a savepoint could not be"
            if not isinstance(error, StorageError):
                raise

    async def _leave(self, connection: AsyncConnection) -> None:
        """See to it that the transaction is over."""
        if self._state.ended_by:
            return
        try:
            await self.rollback(timeout=ROLLBACK_SECONDS)
        except TransactionExpiredError:
            return
        except BaseException as error:
            connection.close()
            if not isinstance(error, StorageError):
                raise

    def _begun(self) -> AsyncConnection:
        if self._connection is None:
            raise InvalidRequestError("the transaction has not begun; use it in an `async with` statement")
        return self._connection

    def _alive(self) -> AsyncConnection:
        connection = self._begun()
        self._state.check()
        return connection
