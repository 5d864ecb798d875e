"""Many calls in flight from one thread, in order, in few writes."""

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from ..protocol.envelope import Reply
from ..protocol.errors import DeadlineExceededError, StorageError
from ..protocol.operation import Call
from ..protocol.statements import Rows
from ..protocol.values import Parameters
from . import calls
from .connection import Connection
from .line import Line
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
from .terms import NS_PER_SECOND, Terms, agree
from .waiter import Waiter

R = TypeVar("R")

_NEVER_NS: Final = 2**63


class PipelineFuture(Waiter, Generic[R]):
    """The result of one pipelined call, once it is there; for the thread that uses the pipeline."""

    __slots__ = ("_call", "_connection", "_end", "_pipeline", "_terms")

    def __init__(self, pipeline: "Pipeline", call: Call[R], terms: Terms) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._call = call
        self._terms = terms
        self._connection: Connection | None = None
        self._end: CallEnd[R] | None = None

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._end is not None or self.wait(0)

    def result(self, timeout: float | None = None) -> R:
        """The call's result; raises its error.

        `timeout` is how many seconds to wait at most, beside the call's own deadline. Where they are over
        first, the `DeadlineExceededError` has the outcome `unknown`, and the call goes on.
        """
        end = self._end
        if end is None:
            until_ns = _NEVER_NS
            if timeout is not None:
                until_ns = time.monotonic_ns() + int((timeout + 0.0) * NS_PER_SECOND)
            if not self.wait(until_ns):
                raise no_result_yet(timeout)
            self._pipeline.end_lost()
            end = self.conclude()
        return end.tell()

    @property
    def is_lost(self) -> bool:
        """Whether its connection ended before an answer came."""
        return isinstance(self.answer, StorageError)

    def send(self, connection: Connection) -> bool:
        """Leave the call to the connection's next write; False where another thread reserved that."""
        self._connection = connection
        try:
            return connection.submit(self, self._call, self._terms, later=True)
        except BaseException as error:
            connection.interrupt(self, error)
            raise

    def flush(self) -> None:
        """Write the call, where that was not done yet."""
        connection = self._sent_on()
        try:
            # Without room until its deadline it gets no answer either; its result says so.
            with suppress(DeadlineExceededError):
                connection.flush(self._terms.deadline_ns)
        except BaseException as error:
            connection.interrupt(self, error)
            raise

    def wait(self, until_ns: int) -> bool:
        """Wait for the end of the call, at most until `until_ns`; whether it has ended."""
        connection = self._sent_on()
        limit_ns = self._terms.deadline_ns + connection.grace_ns
        if self.answer is None:
            self.flush()
            try:
                connection.wait(self, min(limit_ns, until_ns))
            except BaseException as error:
                connection.interrupt(self, error)
                raise
        return self.answer is not None or until_ns >= limit_ns

    def conclude(self) -> CallEnd[R]:
        """Take what the wait ended with; a call whose worker was lost is sent again where that is safe."""
        if self._end is None:
            try:
                self._end = CallEnd.of(self._call, self._sent_on().answer_of(self, self._call))
            except StorageError as error:
                self._end = self._sent_again(error)
        return self._end

    def abandon(self) -> None:
        """Cancel the call, unless its answer has come."""
        if self._end is not None:
            return
        connection = self._sent_on()
        if self.answer is None:
            connection.wait(self, 0)
        if self.answer is None:
            connection.abandon(self)
        if self.answer is None:
            self._end = CallEnd(error=left_early("unknown"))
        elif self.is_lost:
            try:
                connection.answer_of(self, self._call)
            except StorageError as error:
                self._end = CallEnd(error=error)

    def _sent_again(self, why: StorageError) -> CallEnd[R]:
        try:
            return CallEnd(self._pipeline.line.run(self._call, self._terms, why))
        except StorageError as error:
            return CallEnd(error=error)

    def _sent_on(self) -> Connection:
        assert self._connection is not None, "a future is made by sending its call"
        return self._connection


class Pipeline:
    """Calls of one thread, sent without waiting for the ones before.

    Their results come as futures, in order. A call waits for room where `window` of them, or about as many
    bytes as the worker holds for one client, are not answered yet. What is buffered is written when a part
    of the window is full, when a result is asked for, and at the end of the `with` block.

    The end of the block waits for all calls and raises the first error that no `result` has raised yet.
    Where an exception leaves the block it waits too, and only that exception is raised; where it ends the
    program (KeyboardInterrupt), unanswered calls are cancelled.

    A call is not sent again after an error, since those behind it were carried out already; only reads and
    calls with a request key whose worker was lost are, in their order.

    A worker drops a client that leaves too many answers unread for 10 s: go on calling, or ask for results.

    Arguments: `line`, the client's; `window`, 1 to the worker's `client_requests_max`, None for the default.
    """

    def __init__(self, line: Line, window: int | None) -> None:
        limits = line.limits
        self.line = line
        self._window = checked_window(window, limits)
        self._write_every = max(1, self._window // WRITES_PER_WINDOW)
        # With one more request of any size the worker still has room for what it counts beside the frames.
        self._bytes_max = (limits.client_bytes_max - limits.request_bytes_max) * 3 // 4
        self._in_flight: deque[PipelineFuture[Any]] = deque()
        self._failures = Failures(self._window)
        self._bytes = 0
        self._unwritten = 0
        self._is_closed = False
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = True
        if error is not None and not isinstance(error, Exception):
            while self._in_flight:
                self._in_flight.popleft().abandon()
            return
        while self._in_flight:
            self._in_flight[0].wait(_NEVER_NS)
            self._shift()
        if error is None:
            self._failures.tell()

    def execute(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
    ) -> PipelineFuture[Rows]:
        """Run one statement that may write; see `Client.execute`."""
        call = calls.execute(sql, parameters, self.line.limits)
        return self._add(call, timeout, request_key, max_result_bytes)

    def query(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
    ) -> PipelineFuture[Rows]:
        """Run one statement that only reads, after the pipeline's writes before it; see `Client.query`."""
        call = calls.query(sql, parameters, self.line.limits)
        return self._add(call, timeout, None, max_result_bytes)

    def batch(
        self,
        statements: Iterable[tuple[str, Parameters]],
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
    ) -> PipelineFuture[list[Rows]]:
        """Run statements together or not at all; see `Client.batch`."""
        call = calls.batch(statements, self.line.limits)
        return self._add(call, timeout, request_key, max_result_bytes)

    def call(
        self,
        call: Call[R],
        *,
        timeout: float | None = None,
        request_key: str | None = None,
        max_result_bytes: int | None = None,
    ) -> PipelineFuture[R]:
        """Run a store's operation; see `Client.call`."""
        calls.check_call(call)
        return self._add(call, timeout, request_key, max_result_bytes)

    def end_lost(self) -> None:
        """Send again, in order, the calls whose connection ended, where that is safe."""
        connection = self._connection
        if connection is None or connection.is_open:
            return
        for future in self._in_flight:
            if future.is_lost:
                future.conclude()

    def _add(
        self, call: Call[R], timeout: float | None, key: str | None, result_bytes: int | None
    ) -> PipelineFuture[R]:
        if self._is_closed:
            raise ended()
        terms = agree(self.line.limits, timeout, key, result_bytes)
        if len(self._in_flight) >= self._window or self._bytes > self._bytes_max:
            self._make_room(terms.deadline_ns)
        future = PipelineFuture(self, call, terms)
        while not future.send(self._current(terms.deadline_ns)):
            pass
        self._in_flight.append(future)
        self._bytes += future.size
        self._unwritten += 1
        if self._unwritten >= self._write_every:
            self._unwritten = 0
            future.flush()
        return future

    def _current(self, deadline_ns: int) -> Connection:
        connection = self.line.current(deadline_ns)
        if connection is not self._connection:
            self.end_lost()
            self._connection = connection
        return connection

    def _make_room(self, deadline_ns: int) -> None:
        in_flight = self._in_flight
        self._unwritten = 0
        while len(in_flight) >= self._window or self._bytes > self._bytes_max:
            if not in_flight[0].wait(deadline_ns):
                raise no_room()
            self._shift()
            while in_flight and in_flight[0].answer is not None:
                self._shift()

    def _shift(self) -> None:
        """Let go of the oldest call, which has ended, and remember it where it failed."""
        future = self._in_flight.popleft()
        self._bytes -= future.size
        if type(future.answer) is Reply:
            return  # decoded when its result is asked for
        self._failures.note(future.conclude())
