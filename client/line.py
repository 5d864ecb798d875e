"""A client's line to its worker: the connection of the moment, its replacement, and repeats."""

import threading
import time
from contextlib import suppress
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
from .connection import Connection
from .dial import Dialer
from .endings import result_of
from .forks import tell_after_fork
from .retry import Attempts
from .terms import Terms, seconds_left

R = TypeVar("R")


class Line:
    """What keeps a client connected.

    One connection serves all threads. A thread with an interactive transaction keeps it to itself, and
    the others get another one meanwhile: on the transaction's connection the worker refuses them.

    Arguments: `dialer`, how the worker is reached; `connection`, one to it that exists already.
    """

    def __init__(self, dialer: Dialer, connection: Connection | None) -> None:
        self.limits: Limits = DEFAULT_LIMITS if connection is None else connection.limits
        self._dialer = dialer
        self._connection = connection
        self._dialing = threading.RLock()
        self._reserved: dict[int, Connection] = {}
        self._is_closed = False
        tell_after_fork(self)

    def run(self, call: Call[R], terms: Terms, failure: StorageError | None = None) -> R:
        """Send a call, again where its terms allow it, and decode its result.

        `failure` is why it has no answer yet, where it was sent before.
        """
        attempts: Attempts | None = None
        if failure is not None:
            attempts = Attempts(call, terms, self.limits)
            time.sleep(attempts.seconds_before_next(failure, answered=False))
        while True:
            try:
                answer = self._exchange(call, terms)
            except StorageError as error:
                attempts = attempts or Attempts(call, terms, self.limits)
                wait = attempts.seconds_before_next(error, answered=False)
            else:
                if type(answer) is Reply:
                    return result_of(call, answer)
                assert type(answer) is Failure, "an answer is one of the two"
                attempts = attempts or Attempts(call, terms, self.limits)
                wait = attempts.seconds_before_next(error_of(answer), answered=True)
            time.sleep(wait)

    def current(self, deadline_ns: int) -> Connection:
        """The calling thread's connection, as `connected`, found fast where it is there."""
        connection = self._connection
        if connection is None or not connection.is_open or self._reserved:
            return self.connected(deadline_ns)
        return connection

    def connected(self, deadline_ns: int) -> Connection:
        """The calling thread's connection, made anew where there is none that takes requests.

        Raises `DeadlineExceededError`, `InvalidRequestError` where the client was closed, or why the worker
        cannot be reached.
        """
        try:
            self._lock(deadline_ns)
            own = self._reserved.get(threading.get_ident())
            return own if own is not None and own.is_open else self._open(deadline_ns)
        finally:
            self._unlock()

    def reserve(self, deadline_ns: int) -> Connection:
        """A connection that takes only the calling thread's requests until `give_back`."""
        try:
            self._lock(deadline_ns)
            me = threading.get_ident()
            if me in self._reserved:
                raise InvalidRequestError(
                    "this thread has an interactive transaction already; use its savepoint() inside it"
                )
            connection = self._open(deadline_ns)
            self._connection = None
            self._reserved[me] = connection
        finally:
            self._unlock()
        try:
            connection.reserve(deadline_ns)
        except BaseException:
            self.give_back(connection)
            raise
        return connection

    def give_back(self, connection: Connection) -> None:
        """Let all threads use a reserved connection again, or close it where they have another one."""
        connection.share()
        for thread, reserved in list(self._reserved.items()):
            if reserved is connection:
                self._reserved.pop(thread, None)
        # Where another thread has the lock it is dialing, and this connection is not needed any more.
        try:
            if (
                self._dialing.acquire(blocking=False)
                and self._connection is None
                and connection.is_open
                and not self._is_closed
            ):
                self._connection = connection
                return
        finally:
            self._unlock()
        connection.retire()

    def close(self) -> None:
        """Close all connections; every later call fails."""
        self._is_closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        while self._reserved:
            with suppress(KeyError):
                self._reserved.popitem()[1].close()

    def after_fork(self) -> None:
        """Forget the parent's connections and locks; the next call connects anew."""
        self._dialing = threading.RLock()
        self._connection = None
        self._reserved = {}

    def _exchange(self, call: Call[Any], terms: Terms) -> Reply | Failure:
        """Send a call once and wait for its answer."""
        known = self._connection
        while True:
            connection = self.current(terms.deadline_ns)
            try:
                answer = connection.request(call, terms)
            except WorkerUnavailableError as error:
                # The worker may have gone while nothing was asked of it: nothing was tried yet, then.
                if connection is not known or error.details.get("sent") is not False:
                    raise
            else:
                if answer is not None:
                    return answer

    def _lock(self, deadline_ns: int) -> None:
        if not self._dialing.acquire(timeout=seconds_left(deadline_ns)):
            raise DeadlineExceededError(
                "the deadline passed while another thread connected; nothing was sent",
                details={"stage": "connect"},
            )

    def _unlock(self) -> None:
        # An interrupt may come before the lock was taken, or just after: only its owner can release it.
        with suppress(RuntimeError):
            self._dialing.release()

    def _open(self, deadline_ns: int) -> Connection:
        """The shared connection, as the holder of the lock."""
        self._refuse_if_closed()
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection
        if connection is not None:
            self._connection = None
            connection.retire()
        connection = self._dialer.dial(deadline_ns)
        self.limits = connection.limits
        self._connection = connection
        if self._is_closed:
            self._connection = None
            connection.close()
        self._refuse_if_closed()
        return connection

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise InvalidRequestError("the client was closed; make another one")
