"""Many calls of one task in flight, in order, in few writes."""

import asyncio
import time
from collections import deque
from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from ..protocol.envelope import Reply
from ..protocol.errors import StorageError
from ..protocol.operation import Call
from ..protocol.statements import Rows
from ..protocol.values import Parameters
from . import calls
from .aio_connection import AsyncConnection
from .aio_line import AsyncLine
from .aio_waiter import AsyncWaiter
from .endings import other_loop
from .pipelined import (
    WRITES_PER_WINDOW,
    CallEnd,
    Failures,
    checked_window,
    ended,
    left_early,
    no_result_yet,
    no_room,
)
from .terms import NS_PER_SECOND, Terms, agree, seconds_left

R = TypeVar("R")

_NEVER_NS: Final = 2**63


class AsyncPipelineFuture(AsyncWaiter, Generic[R]):
    """The result of one pipelined call: `await` it, once or often, in any task of its event loop."""

    __slots__ = ("_call", "_connection", "_end", "_gates", "_pipeline", "_terms")

    def __init__(self, pipeline: "AsyncPipeline", call: Call[R], terms: Terms) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._call = call
        self._terms = terms
        self._connection: AsyncConnection | None = None
        self._gates: list[asyncio.Future[None]] = []
        self._end: CallEnd[R] | None = None

    def __await__(self) -> Generator[Any, None, R]:
        return self.result().__await__()

    def done(self) -> bool:
        """Whether `result` would return or raise at once, or send the call again."""
        return self._end is not None or self.answer is not None or self.is_late

    @property
    def is_lost(self) -> bool:
        """Whether its connection ended before an answer came."""
        return isinstance(self.answer, StorageError)

    async def result(self, timeout: float | None = None) -> R:
        """The call's result; raises its error.

        `timeout` is how many seconds to wait at most, beside the call's own deadline. Where they are over
        first, the `DeadlineExceededError` has the outcome `unknown`, and the call goes on, as it does where
        the waiting task is cancelled.
        """
        end = self._end
        if end is None:
            until_ns = _NEVER_NS
            if timeout is not None:
                until_ns = time.monotonic_ns() + int((timeout + 0.0) * NS_PER_SECOND)
            if not await self.wait(until_ns):
                raise no_result_yet(timeout)
            end = await self.conclude()
        return end.tell()

    def send(self, connection: AsyncConnection) -> bool:
        """Leave the call to the connection's next write; False where that takes nothing new."""
        self._connection = connection
        return connection.submit(self, self._call, self._terms, later=True)

    async def place(self) -> None:
        """Wait while the worker has no room for the call; one that is cancelled meanwhile is not sent."""
        try:
            while not self.is_placed and not self.done():
                await self._change(self._here())
        except BaseException:
            self.abandon()
            raise

    async def wait(self, until_ns: int = _NEVER_NS) -> bool:
        """Wait for the end of the call, at most until `until_ns`; whether it has ended."""
        if self.done():
            return True
        connection = self._here()
        connection.flush()
        try:
            async with asyncio.timeout(None if until_ns == _NEVER_NS else seconds_left(until_ns)):
                while not self.done():
                    await self._change(connection)
        except TimeoutError:
            return self.done()
        return True

    async def conclude(self) -> CallEnd[R]:
        """Take what the call ended with; one whose worker was lost is sent again where that is safe."""
        if self._end is None and self.is_lost:
            await self._pipeline.end_lost()
        if self._end is None:
            try:
                self._end = CallEnd.of(self._call, self._sent_on().answer_of(self, self._call))
            except StorageError as error:
                self._end = CallEnd(error=error)
        return self._end

    async def send_again(self) -> None:
        """Send the call again, after the loss of its connection, where that is safe."""
        if self._end is None:
            try:
                self._end = CallEnd(await self._pipeline.line.run(self._call, self._terms, self._why_lost()))
            except StorageError as error:
                self._end = CallEnd(error=error)

    def abandon(self) -> None:
        """Cancel the call, where it goes on."""
        if self._end is None and self.is_lost:
            self._end = CallEnd(error=self._why_lost())
        elif not self.done():
            was_sent = self._sent_on().abandon(self)
            self._end = CallEnd(error=left_early("unknown" if was_sent else "not_committed"))
        self.wake()

    def placed(self) -> None:
        """Wake the task that waits for its place."""
        self.wake()

    def wake(self) -> None:
        """Wake all tasks that wait."""
        for gate in self._gates:
            if not gate.done():
                gate.set_result(None)

    async def _change(self, connection: AsyncConnection) -> None:
        """Wait until something happened to the call."""
        gate = connection.loop.create_future()
        self._gates.append(gate)
        try:
            await gate
        finally:
            self._gates.remove(gate)

    def _why_lost(self) -> StorageError:
        try:
            self._sent_on().answer_of(self, self._call)
        except StorageError as error:
            return error
        raise AssertionError("only asked of a call without an answer")

    def _here(self) -> AsyncConnection:
        connection = self._sent_on()
        if connection.loop is not asyncio.get_running_loop():
            raise other_loop()
        return connection

    def _sent_on(self) -> AsyncConnection:
        assert self._connection is not None, "a future is made by sending its call"
        return self._connection


class AsyncPipeline:
    """Calls of one task, sent without waiting for the ones before.

    `future = await pipeline.execute(...)` waits for room in the window only; `await future` for the result.
    All else is as in `Pipeline`: what is buffered is written when a part of the window is full, when a
    result is waited for, and when the task waits for anything else. Where the task is cancelled in the
    block or at its end, unanswered calls are cancelled.

    Arguments: `line`, the client's; `window`, 1 to the worker's `client_requests_max`, None for the default.
    """

    def __init__(self, line: AsyncLine, window: int | None) -> None:
        self.line = line
        self._window = checked_window(window, line.limits)
        self._write_every = max(1, self._window // WRITES_PER_WINDOW)
        self._in_flight: deque[AsyncPipelineFuture[Any]] = deque()
        self._failures = Failures(self._window)
        self._unwritten = 0
        self._is_closed = False
        self._connection: AsyncConnection | None = None
        self._ending = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = True
        if error is not None and not isinstance(error, Exception):
            self._abandon()
            return
        try:
            while self._in_flight:
                await self._in_flight[0].wait()
                await self._shift()
        except BaseException:
            self._abandon()
            raise
        if error is None:
            self._failures.tell()

    async def execute(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
    ) -> AsyncPipelineFuture[Rows]:
        """See `Pipeline.execute`."""
        call = calls.execute(sql, parameters, self.line.limits)
        return await self._add(call, timeout, request_key, max_result_bytes)

    async def query(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
    ) -> AsyncPipelineFuture[Rows]:
        """See `Pipeline.query`."""
        call = calls.query(sql, parameters, self.line.limits)
        return await self._add(call, timeout, None, max_result_bytes)

    async def batch(
        self,
        statements: Iterable[tuple[str, Parameters]],
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
    ) -> AsyncPipelineFuture[list[Rows]]:
        """See `Pipeline.batch`."""
        call = calls.batch(statements, self.line.limits)
        return await self._add(call, timeout, request_key, max_result_bytes)

    async def call(
        self,
        call: Call[R],
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
    ) -> AsyncPipelineFuture[R]:
        """See `Pipeline.call`."""
        calls.check_call(call)
        return await self._add(call, timeout, request_key, max_result_bytes)

    async def end_lost(self) -> None:
        """Send again, in order, the calls whose connection ended, where that is safe."""
        async with self._ending:
            for future in tuple(self._in_flight):
                if future.is_lost:
                    await future.send_again()

    async def _add(
        self, call: Call[R], timeout: float | None, key: str | None, result_bytes: int | None
    ) -> AsyncPipelineFuture[R]:
        if self._is_closed:
            raise ended()
        terms = agree(self.line.limits, timeout, key, result_bytes)
        if len(self._in_flight) >= self._window:
            await self._make_room(terms.deadline_ns)
        future = AsyncPipelineFuture(self, call, terms)
        while not future.send(connection := await self._current(terms.deadline_ns)):
            continue
        self._in_flight.append(future)
        self._unwritten += 1
        if self._unwritten >= self._write_every:
            self._unwritten = 0
            connection.flush()
        if future.held is not None or future.upload is not None:
            try:
                await future.place()
            except BaseException:
                self._in_flight.remove(future)
                raise
        return future

    async def _current(self, deadline_ns: int) -> AsyncConnection:
        connection = self.line.ready() or await self.line.current(deadline_ns)
        if connection is not self._connection:
            await self.end_lost()
            self._connection = connection
        return connection

    async def _make_room(self, deadline_ns: int) -> None:
        in_flight = self._in_flight
        self._unwritten = 0
        while len(in_flight) >= self._window:
            if not await in_flight[0].wait(deadline_ns):
                raise no_room()
            await self._shift()
            while in_flight and in_flight[0].done():
                await self._shift()

    async def _shift(self) -> None:
        """Let go of the oldest call, which has ended, and remember it where it failed."""
        future = self._in_flight[0]
        if type(future.answer) is not Reply:  # a result is decoded when it is asked for
            self._failures.note(await future.conclude())
        del self._in_flight[0]

    def _abandon(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().abandon()
