"""Interactive transactions: calls that see each other's changes and are committed together."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

from ..protocol.envelope import Failure, Reply, error_of
from ..protocol.errors import (
    InvalidRequestError,
    Outcome,
    StorageError,
    TransactionExpiredError,
    WorkerUnavailableError,
)
from ..protocol.limits import Limits
from ..protocol.operation import Call
from ..protocol.statements import Rows
from ..protocol.values import Parameters
from . import calls
from .connection import Connection
from .line import Line
from .retry import Attempts
from .terms import Terms, agree, check_key

R = TypeVar("R")

_ROLLBACK_SECONDS: Final = 1.0
"""How long an orderly rollback may take; after it the connection is closed, which rolls back too."""


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
        self._begin = calls.begin(_lease_ms(lease, line.limits))
        self._timeout = timeout
        if request_key is not None:
            check_key(request_key, line.limits)
        self._key = request_key
        self._connection: Connection | None = None
        self._number = 0
        self._savepoints = 0
        self._ended_by = ""

    def __enter__(self) -> Self:
        if self._connection is not None:
            raise InvalidRequestError("a transaction is begun once; make another one")
        terms = agree(self._line.limits, self._timeout)
        attempts = Attempts(self._begin, terms, self._line.limits)
        while True:
            connection = self._line.reserve(terms.deadline_ns)
            try:
                self._number = self._begin_on(connection, terms)
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
            if error is None and self._ended_by not in {"committed", "rolled back"}:
                self.commit(request_key=self._key)
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
        self._savepoints += 1
        name = f"s{self._savepoints}"
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
        connection = self._alive()
        terms = agree(self._line.limits, timeout, request_key, None, 0)
        try:
            self._send(connection, calls.COMMIT_CALL, terms)
        except WorkerUnavailableError as error:
            if "sent" not in error.details:
                raise
            self._ended_by = "rolled back when its connection was lost"
            if error.outcome == "not_committed":
                raise self._over() from error
            if request_key is None or not self._was_committed(request_key, terms, error):
                raise
        self._ended_by = "committed"

    def rollback(self, *, timeout: float | None = None) -> None:
        """Undo everything now, before the end of the block."""
        self._run(calls.ROLLBACK_CALL, timeout)
        self._ended_by = "rolled back"

    def _begin_on(self, connection: Connection, terms: Terms) -> int:
        try:
            answer = connection.request(self._begin, terms)
        except StorageError:
            # A grant that comes late would keep the writer until its lease ends.
            connection.close()
            raise
        assert answer is not None, "the connection is this thread's"
        if isinstance(answer, Failure):
            raise error_of(answer)
        return self._begin.operation.decode_result(answer.result)

    def _run(self, call: Call[R], timeout: float | None = None, result_bytes: int | None = None) -> R:
        connection = self._alive()
        terms = agree(self._line.limits, timeout, None, result_bytes, 0)
        try:
            return self._send(connection, call, terms)
        except WorkerUnavailableError as error:
            if "sent" not in error.details:
                raise
            self._ended_by = "rolled back when its connection was lost"
            raise self._over() from error

    def _send(self, connection: Connection, call: Call[R], terms: Terms) -> R:
        answer = connection.request(call, terms, self._number)
        assert answer is not None, "requests with a transaction's number are always taken"
        if isinstance(answer, Reply):
            return call.operation.decode_result(answer.result)
        error = error_of(answer)
        if isinstance(error, TransactionExpiredError) or error.details.get("transaction_ended"):
            self._ended_by = "ended by the worker"
        raise error

    def _was_committed(self, key: str, terms: Terms, error: StorageError) -> bool:
        """Whether a commit under that key took effect; raises where it did not, or where nobody answers."""
        question = calls.outcome(key, fence=False, limits=self._line.limits)
        try:
            known = self._line.run(question, Terms(terms.deadline_ns))
        except StorageError:
            return False
        if not known.committed:
            raise self._over() from error
        return True

    def _undo(self, name: str) -> None:
        """Roll a savepoint back; without certainty of that nothing of the transaction may be committed."""
        if self._ended_by:
            return
        try:
            self._run(calls.savepoint("rollback", name), _ROLLBACK_SECONDS)
            self._run(calls.savepoint("release", name), _ROLLBACK_SECONDS)
        except StorageError:
            self._begun().close()
            self._ended_by = "rolled back since a savepoint could not be"

    def _leave(self, connection: Connection) -> None:
        """See to it that the transaction is over."""
        if self._ended_by:
            return
        try:
            self.rollback(timeout=_ROLLBACK_SECONDS)
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
        if self._ended_by:
            raise self._over()
        return connection

    def _over(self) -> TransactionExpiredError:
        outcome: Outcome = "committed" if self._ended_by == "committed" else "not_committed"
        return TransactionExpiredError(
            f"the interactive transaction was {self._ended_by}; begin a new one", outcome=outcome
        )


def _lease_ms(lease: float | None, limits: Limits) -> int:
    if lease is None:
        return 0
    try:
        length = int((lease + 0.0) * 1000)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"the lease {lease!r} is no number of seconds") from error
    if not 1 <= length <= limits.lease_ms_max:
        raise InvalidRequestError(
            f"a lease of {lease} s; it takes 0.001 to {limits.lease_ms_max / 1000:g}",
            details={"lease_ms_max": limits.lease_ms_max},
        )
    return length
