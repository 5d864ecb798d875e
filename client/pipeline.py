"""Many calls in flight from one thread, in order, in few writes."""

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, cast

from ..protocol.envelope import Failure, Reply, error_of
from ..protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RequestCancelledError,
    StorageError,
)
from ..protocol.operation import Call
from ..protocol.statements import Rows
from ..protocol.values import Parameters
from . import calls
from .connection import Connection
from .line import Line
from .terms import NS_PER_SECOND, Terms, agree
from .waiter import Waiter

R = TypeVar("R")

_NEVER_NS: Final = 2**63

_WRITES_PER_WINDOW: Final = 4
"""A part of a window is written while the worker still has the others to do."""


class PipelineFuture(Waiter, Generic[R]):
    """The result of one pipelined call, once it is there; for the thread that uses the pipeline."""

    __slots__ = ("_call", "_connection", "_error", "_is_over", "_is_told", "_pipeline", "_terms", "_value")

    def __init__(self, pipeline: "Pipeline", call: Call[R], terms: Terms) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._call = call
        self._terms = terms
        self._connection: Connection | None = None
        self._is_over = False
        self._is_told = False
        self._value: Any = None
        self._error: StorageError | None = None

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._is_over or self.wait(0)

    def result(self, timeout: float | None = None) -> R:
        """The call's result; raises its error.

        `timeout` is how many seconds to wait at most, beside the call's own deadline. Where they are over
        first, the `DeadlineExceededError` has the outcome `unknown`, and the call goes on.
        """
        if not self._is_over:
            until_ns = _NEVER_NS
            if timeout is not None:
                until_ns = time.monotonic_ns() + int((timeout + 0.0) * NS_PER_SECOND)
            if not self.wait(until_ns):
                raise DeadlineExceededError(
                    f"no result within {timeout} s; the call goes on",
                    outcome="unknown",
                    details={"stage": "wait"},
                )
            self._pipeline.end_lost()
            self.conclude()
        if self._error is not None:
            self._is_told = True
            raise self._error
        return cast(R, self._value)

    @property
    def has_untold_error(self) -> bool:
        """Whether it ended with an error that `result` has not raised."""
        return self._error is not None and not self._is_told

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

    def conclude(self) -> None:
        """Take what the wait ended with; a call whose worker was lost is sent again where that is safe."""
        if self._is_over:
            return
        self._is_over = True
        try:
            answer = self._sent_on().answer_of(self, self._call)
        except StorageError as error:
            self._send_again(error)
            return
        if isinstance(answer, Failure):
            self._error = error_of(answer)
            return
        try:
            self._value = self._call.operation.decode_result(answer.result)
        except StorageError as error:
            self._error = error

    def abandon(self) -> None:
        """Cancel the call."""
        if not self._is_over:
            self._is_over = True
            self._error = RequestCancelledError("the pipeline was left before its answer", outcome="unknown")
            self._sent_on().abandon(self)

    def _send_again(self, why: StorageError) -> None:
        try:
            self._value = self._pipeline.line.run(self._call, self._terms, why)
        except StorageError as error:
            self._error = error

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
        size = limits.pipeline_window if window is None else window
        if type(size) is not int or not 1 <= size <= limits.client_requests_max:
            raise InvalidRequestError(
                f"a pipeline's window of {window!r}; it takes 1 to {limits.client_requests_max}",
                details={"client_requests_max": limits.client_requests_max},
            )
        self.line = line
        self._window = size
        self._write_every = max(1, size // _WRITES_PER_WINDOW)
        # With one more request of any size the worker still has room for what it counts beside the frames.
        self._bytes_max = (limits.client_bytes_max - limits.request_bytes_max) * 3 // 4
        self._in_flight: deque[PipelineFuture[Any]] = deque()
        self._failed: list[PipelineFuture[Any]] = []
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
            for future in self._failed:
                if future.has_untold_error:
                    future.result()

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
            raise InvalidRequestError("the pipeline's block has ended")
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
                raise DeadlineExceededError(
                    "the deadline passed while the pipeline's window was full; nothing was sent",
                    details={"stage": "window"},
                )
            self._shift()
            while in_flight and in_flight[0].answer is not None:
                self._shift()

    def _shift(self) -> None:
        """Let go of the oldest call, which has ended, and remember it where it failed."""
        future = self._in_flight.popleft()
        self._bytes -= future.size
        if type(future.answer) is Reply:
            return  # decoded when its result is asked for
        future.conclude()
        if future.has_untold_error:
            if len(self._failed) >= self._window:
                self._failed = [failed for failed in self._failed if failed.has_untold_error]
            # Enough to have the first one in the end, however many fail.
            if len(self._failed) < self._window:
                self._failed.append(future)
