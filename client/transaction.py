"""Interactive transactions: calls that see each other's changes and are committed together."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from .connection import Connection
from .line import Line
from .retry import Attempts
from .terms import Terms, agree
from .transaction_state import ROLLBACK_SECONDS, TransactionState

R = TypeVar("R")


class InteractiveTransaction:
    """A transaction that its client owns, alone, from `with` on until the end of the block.

    The end of the block commits; an exception rolls back. Nobody else writes meanwhile, so be quick: when
    the lease ends, the worker rolls back. Every call raises `TransactionExpiredError` once the transaction
    is over, by its lease, a lost connection, or a deadline in one of its statements. Calls are never sent
    again. Where the thread calls the client itself inside the block, writes are refused with
    `InvalidRequestError`; other threads go on.

    Arguments: `line`, the client's; `lease`, its longest life in seconds, None for the default; `timeout`,
    the seconds to wait for its turn; `request_key`, that of the commit at the end of the block, or None.
    """

    def __init__(
        self, line: Line, lease: float | None, timeout: float | None, request_key: str | None
    ) -> None:
        self._line = line
        self._state = TransactionState(line.limits, lease, request_key)
        self._timeout = timeout
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        if self._connection is not None:
            raise InvalidRequestError("a transaction is begun once; make another one")
        terms = agree(self._line.limits, self._timeout)
        attempts = Attempts(self._state.begin, terms, self._line.limits)
        while True:
            connection = self._line.reserve(terms.deadline_ns)
            try:
                self._begin_on(connection, terms)
            except StorageError as error:
                self._line.give_back(connection)
                error.outcome = "not_committed"
                time.sleep(attempts.seconds_before_next(error, answered=True))
            except BaseException:
                connection.close()
                self._line.give_back(connection)
                raise
            else:
                self._connection = connection
                return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self._begun()
        try:
            if error is None and self._state.wants_commit:
                self.commit(request_key=self._state.key)
        finally:
            try:
                self._leave(connection)
            finally:
                self._line.give_back(connection)

    def execute(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
    ) -> Rows:
        """Run one statement; see `Client.execute`. Where it fails, only the statement is undone."""
        return self._run(calls.execute(sql, parameters, self._line.limits), timeout, max_result_bytes)

    def query(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
    ) -> Rows:
        """Run one statement that only reads; it sees the transaction's own changes."""
        return self._run(calls.query(sql, parameters, self._line.limits), timeout, max_result_bytes)

    def batch(
        self,
        statements: Iterable[tuple[str, Parameters]],
        *,
        timeout: float | None = None,
        max_result_bytes: int | None = None,
    ) -> list[Rows]:
        """Run statements together or not at all; see `Client.batch`."""
        return self._run(calls.batch(statements, self._line.limits), timeout, max_result_bytes)

    def call(self, call: Call[R], *, timeout: float | None = None, max_result_bytes: int | None = None) -> R:
        """Run a store's operation inside the transaction; see `Client.call`."""
        calls.check_call(call)
        return self._run(call, timeout, max_result_bytes)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A part that an exception undoes alone: `with tx.savepoint(): ...`. They nest."""
        name = self._state.next_savepoint()
        self._run(calls.savepoint("open", name))
        try:
            yield
        except BaseException:
            self._undo(name)
            raise
        self._run(calls.savepoint("release", name))

    def commit(self, *, timeout: float | None = None, request_key: str | None = None) -> None:
        """Commit now, before the end of the block.

        With a request key a commit whose worker was lost is looked up, and reported as it went; without
        one the `WorkerUnavailableError` has the outcome `unknown`.
        """
        connection, state = self._alive(), self._state
        terms = agree(self._line.limits, timeout, request_key, None, 0)
        try:
            self._send(connection, calls.COMMIT_CALL, terms)
        except WorkerUnavailableError as error:
            key = state.lost_commit(error, request_key)
            try:
                question = calls.outcome(key, fence=False, limits=self._line.limits)
                known = self._line.run(question, Terms(terms.deadline_ns))
            except StorageError:
                raise error from None
            state.looked_up(known, error)
        except BaseException as error:
            state.doubt(error)
            raise
        else:
            state.ended_by = "committed"

    def rollback(self, *, timeout: float | None = None) -> None:
        """Undo everything now, before the end of the block."""
        self._run(calls.ROLLBACK_CALL, timeout)
        self._state.ended_by = "rolled back"

    def _begin_on(self, connection: Connection, terms: Terms) -> None:
        try:
            answer = connection.request(self._state.begin, terms)
        except StorageError:
            # A grant that comes late would keep the writer until its lease ends; other threads still get their answers.
            connection.retire()
            raise
        assert answer is not None, "the connection is this thread's"
        self._state.begun(answer)

    def _run(self, call: Call[R], timeout: float | None = None, result_bytes: int | None = None) -> R:
        connection = self._alive()
        terms = agree(self._line.limits, timeout, None, result_bytes, 0)
        try:
            return self._send(connection, call, terms)
        except WorkerUnavailableError as error:
            self._state.lost(error)

    def _send(self, connection: Connection, call: Call[R], terms: Terms) -> R:
        answer = connection.request(call, terms, self._state.number)
        assert answer is not None, "requests with a transaction's number are always taken"
        return self._state.result_of(call, answer)

    def _undo(self, name: str) -> None:
        """Roll a savepoint back; without certainty of that nothing of the transaction may be committed."""
        if self._state.ended_by:
            return
        try:
            self._run(calls.savepoint("rollback", name), ROLLBACK_SECONDS)
            self._run(calls.savepoint("release", name), ROLLBACK_SECONDS)
        except StorageError:
            self._begun().close()
            self._state.ended_by = "rolled back since a savepoint could not be"

    def _leave(self, connection: Connection) -> None:
        """See to it that the transaction is over."""
        if self._state.ended_by:
            return
        try:
            self.rollback(timeout=ROLLBACK_SECONDS)
        except TransactionExpiredError:
            return
        except BaseException as error:
            connection.close()
            if not isinstance(error, StorageError):
                raise

    def _begun(self) -> Connection:
        if self._connection is None:
            raise InvalidRequestError("the transaction has not begun; use it in a `with` statement")
        return self._connection

    def _alive(self) -> Connection:
        connection = self._begun()
        self._state.check()
        return connection
