"""The transaction that a store's handler sees."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from .protocol.errors import DeclaredError, InvalidRequestError, StorageError
from .protocol.statements import Rows
from .protocol.values import Parameters, Value


class Statements(Protocol):
    """What a transaction runs its statements on."""

    def run(
        self,
        sql: str,
        parameters: Sequence[Value] | Mapping[str, Value],
        result_bytes_max: int,
        reads_only: bool = False,
        named: bool = True,
    ) -> Rows:
        """Run one guarded statement to its end; with `reads_only` one that would change something is refused.

        The names of a query's columns are left out where they need not be `named`.
        """
        ...

    @property
    def side_directory(self) -> str:
        """The directory of the files beside the database."""
        ...

    def check_time(self) -> None:
        """End the request, by an error of its own, where its time is over."""
        ...

    @property
    def intact(self) -> bool:
        """Whether the transaction is still open after an error, and no statement took effect by half."""
        ...


class DeadTransactionError(Exception):
    """A handler went on after its transaction had ended; whatever it did since counts for nothing."""

    def __init__(self) -> None:
        super().__init__("this transaction has ended; a handler must not go on after that")


class KeptFailure(Exception):
    """Carries a declared failure whose writes are committed although the call fails."""

    def __init__(self, error: DeclaredError) -> None:
        super().__init__(error)
        self.error = error


_OVER = DeadTransactionError()


class Transaction:
    """One request's view of the database: a handler's only way to it.

    It lives as long as the SQLite transaction below it. Handlers are functions of the transaction and
    their arguments and may run more than once before they commit: what must happen once, and outside of
    the database, goes through `after_commit`.
    """

    __slots__ = (
        "_calls",
        "_calls_max",
        "_has_run",
        "_reads",
        "_result_bytes_max",
        "_statements",
        "ended_by",
    )

    def __init__(
        self, statements: Statements, result_bytes_max: int, *, reads: bool = False, calls_max: int = 0
    ) -> None:
        self._statements = statements
        self._result_bytes_max = result_bytes_max
        self._reads = reads
        self._calls: list[Callable[[], None]] | None = None
        self._calls_max = calls_max
        self._has_run = False
        self.ended_by: Exception | None = None

    @property
    def result_bytes_max(self) -> int:
        """How large the request's encoded result may be."""
        return self._result_bytes_max

    @property
    def side_directory(self) -> str:
        """The absolute path of the private directory beside the database, for files of the store's own."""
        return self._statements.side_directory

    def execute(self, sql: str, parameters: Parameters = ()) -> Rows:
        """Run one statement.

        Arguments: `sql`, one statement; `parameters`, its values by position or by name. Returns its
        rows and what it changed. Raises the typed error of the statement, which ends only what a
        savepoint of this request can undo.
        """
        return self._run(sql, parameters, self._reads)

    def _run(self, sql: str, parameters: Parameters, reads_only: bool, named: bool = True) -> Rows:
        if self.ended_by is not None:
            raise DeadTransactionError
        try:
            if self._has_run:
                # SQLite asks every thousand steps, which a short statement never makes; many of them would.
                self._statements.check_time()
            self._has_run = True
            return self._statements.run(sql, parameters, self._result_bytes_max, reads_only, named)
        except Exception as error:
            # An aborted write, a full disk or an I/O error may have taken the whole transaction with it.
            if not isinstance(error, StorageError) or not self._statements.intact:
                self.ended_by = error
            raise

    def query(self, sql: str, parameters: Parameters = ()) -> Rows:
        """Run one statement that must only read; arguments and result as of `execute`.

        Raises `InvalidRequestError` where the statement would change something.
        """
        return self._run(sql, parameters, True)

    def rows(self, sql: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        """The rows of a query, for handlers that need no names of columns; arguments and errors as of `query`.

        That costs less: to find the names takes as long as a short row.
        """
        return self._read(sql, parameters).rows

    def one(self, sql: str, parameters: Parameters = ()) -> tuple[Value, ...]:
        """The only row of a query; `LookupError` where there is none or more than one."""
        return self._read(sql, parameters).one()

    def scalar(self, sql: str, parameters: Parameters = ()) -> Any:
        """The first column of the only row of a query; `LookupError` where there is not exactly one row."""
        return self._read(sql, parameters).scalar()

    def _read(self, sql: str, parameters: Parameters) -> Rows:
        return self._run(sql, parameters, True, named=False)

    def now_ms(self) -> int:
        """The time, in milliseconds since 1970 in UTC."""
        return time.time_ns() // 1_000_000

    def new_id(self) -> str:
        """A new random id: 32 hexadecimal characters."""
        return secrets.token_hex(16)

    def after_commit(self, call: Callable[[], None]) -> None:
        """Have `call` called once in the worker after this request is committed, and never otherwise.

        It must be quick: the worker's other requests wait for it.
        """
        if self.ended_by is not None:
            raise DeadTransactionError
        if self._calls is None:
            self._calls = []
        if len(self._calls) >= self._calls_max:
            raise InvalidRequestError(f"a request may leave {self._calls_max} calls for after its commit")
        self._calls.append(call)

    def end(self) -> None:
        """Refuse every further call: the SQLite transaction below belongs to others now."""
        if self.ended_by is None:
            self.ended_by = _OVER

    @property
    def calls(self) -> Sequence[Callable[[], None]]:
        """What `after_commit` was given."""
        return self._calls or ()

    def fail(self, error: DeclaredError, *, keep: bool = False) -> NoReturn:
        """End the request with a failure that the store declares.

        With `keep` what the request wrote so far is committed although the call fails, and the error
        says so by its outcome.
        """
        if not keep:
            raise error
        error.outcome = "committed"
        raise KeptFailure(error)
