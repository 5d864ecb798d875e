"""An asynchronous client's line to its worker: the connection of the moment, its replacement, and repeats."""

import asyncio
from typing import Any, TypeVar

from ..protocol.envelope import Failure, Reply, error_of
from ..protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    StorageError,
    WorkerUnavailableError,
)
from ..protocol.limits import DEFAULT_LIMITS, Limits
from ..protocol.operation import Call
from .aio_connection import AsyncConnection
from .aio_dial import AsyncDialer
from .endings import other_loop, result_of
from .forks import tell_after_fork
from .retry import Attempts
from .terms import Terms, seconds_left

R = TypeVar("R")


class AsyncLine:
    """What keeps an asynchronous client connected.

    One connection serves all tasks. Each interactive transaction has another one to itself, since on it the
    worker refuses everybody else; the last one is kept for the next transaction. The task that began the
    transaction uses that connection for its other calls, too, so that the worker can refuse its writes:
    they would wait for their own task.

    The first call ties it to the running event loop; in a forked child that happens anew.

    Arguments: `dialer`, how the worker is reached; `connection`, one to it that exists already.
    """

    def __init__(self, dialer: AsyncDialer, connection: AsyncConnection | None) -> None:
        self.limits: Limits = DEFAULT_LIMITS if connection is None else connection.limits
        self._dialer = dialer
        self._connection = connection
        self._spare: AsyncConnection | None = None
        self._reserved: dict[asyncio.Task[Any] | None, AsyncConnection] = {}
        self._loop = None if connection is None else connection.loop
        self._dialing = asyncio.Lock()
        self._is_closed = False
        tell_after_fork(self)

    def __del__(self) -> None:
        for connection in self._connections():
            connection.let_go()

    async def run(self, call: Call[R], terms: Terms, failure: StorageError | None = None) -> R:
        """Send a call, again where its terms allow it, and decode its result.

        `failure` is why it has no answer yet, where it was sent before.
        """
        attempts: Attempts | None = None
        if failure is not None:
            attempts = Attempts(call, terms, self.limits)
            await asyncio.sleep(attempts.seconds_before_next(failure, answered=False))
        while True:
            try:
                answer = await self._exchange(call, terms)
            except StorageError as error:
                attempts = attempts or Attempts(call, terms, self.limits)
                wait = attempts.seconds_before_next(error, answered=False)
            else:
                if type(answer) is Reply:
                    return result_of(call, answer)
                assert type(answer) is Failure, "an answer is one of the two"
                attempts = attempts or Attempts(call, terms, self.limits)
                wait = attempts.seconds_before_next(error_of(answer), answered=True)
            await asyncio.sleep(wait)

    def ready(self) -> AsyncConnection | None:
        """The calling task's connection, where it is there."""
        connection = self._connection
        if self._reserved:
            connection = self._reserved.get(asyncio.current_task(), connection)
        return connection if connection is not None and connection.is_open else None

    async def current(self, deadline_ns: int) -> AsyncConnection:
        """The calling task's connection, made anew where there is none that takes requests.

        Raises `DeadlineExceededError`, `InvalidRequestError` where the client was closed or belongs to
        another event loop, or why the worker cannot be reached.
        """
        self._tie()
        ready = self.ready()
        if ready is not None:
            return ready
        await self._lock(deadline_ns)
        try:
            connection = self._connection
            if connection is None or not connection.is_open or self._is_closed:
                self._connection = None
                self._connection = connection = await self._replace(connection, deadline_ns)
            return connection
        finally:
            self._dialing.release()

    async def reserve(self, deadline_ns: int) -> AsyncConnection:
        """A connection for a transaction of the calling task, until `give_back`."""
        self._tie()
        task = asyncio.current_task()
        if task in self._reserved:
            raise InvalidRequestError(
                "this task has an interactive transaction already; use its savepoint() inside it"
            )
        await self._lock(deadline_ns)
        try:
            connection, self._spare = self._spare, None
            if connection is None or not connection.is_open or self._is_closed:
                connection = await self._replace(connection, deadline_ns)
            self._reserved[task] = connection
            return connection
        finally:
            self._dialing.release()

    def give_back(self, connection: AsyncConnection) -> None:
        """Keep a reserved connection for the next transaction, or close it."""
        for task, reserved in list(self._reserved.items()):
            if reserved is connection:
                del self._reserved[task]
        if self._spare is None and connection.is_open and not self._is_closed:
            self._spare = connection
        else:
            connection.retire()

    def close(self) -> None:
        """Close all connections; every later call fails."""
        if self._loop is None or not self._loop.is_closed():
            self._tie()
        self._is_closed = True
        for connection in self._connections():
            if connection.loop.is_closed():
                connection.let_go()
            else:
                connection.close()
        self._connection = self._spare = None
        self._reserved.clear()

    def after_fork(self) -> None:
        """Forget the parent's connections and its event loop; the next call connects anew."""
        self._dialing = asyncio.Lock()
        self._connection = self._spare = self._loop = None
        self._reserved = {}

    async def _exchange(self, call: Call[Any], terms: Terms) -> Reply | Failure:
        """Send a call once and wait for its answer."""
        known = self._connection
        while True:
            connection = self.ready() or await self.current(terms.deadline_ns)
            try:
                answer = await connection.request(call, terms)
            except WorkerUnavailableError as error:
                # The worker may have gone while nothing was asked of it: nothing was tried yet, then.
                if connection is not known or error.details.get("sent") is not False:
                    raise
            else:
                if answer is not None:
                    return answer

    async def _replace(self, old: AsyncConnection | None, deadline_ns: int) -> AsyncConnection:
        """Dial another connection, as the holder of the lock."""
        if old is not None:
            old.retire()
        self._refuse_if_closed()
        connection = await self._dialer.dial(deadline_ns)
        self.limits = connection.limits
        if self._is_closed:
            connection.close()
        self._refuse_if_closed()
        return connection

    async def _lock(self, deadline_ns: int) -> None:
        try:
            async with asyncio.timeout(seconds_left(deadline_ns)):
                await self._dialing.acquire()
        except TimeoutError as error:
            raise DeadlineExceededError(
                "the deadline passed while another task connected; nothing was sent",
                details={"stage": "connect"},
            ) from error

    def _tie(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise other_loop()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise InvalidRequestError("the client was closed; make another one")

    def _connections(self) -> list[AsyncConnection]:
        found = [self._connection, self._spare, *self._reserved.values()]
        return [connection for connection in found if connection is not None]
