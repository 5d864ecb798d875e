"""What a client knows of one interactive transaction, without I/O: the same for every kind of client."""

from typing import Final, NoReturn, TypeVar

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
from ..protocol.statements import KnownOutcome
from . import calls
from .terms import check_key

R = TypeVar("R")

ROLLBACK_SECONDS: Final = 1.0
"""How long an orderly rollback may take; after it the connection is closed, which rolls back too."""


class TransactionState:
    """Whether the transaction goes on, and why not.

    Arguments: `limits`, the worker's; `lease` in seconds, None for the default; `request_key`, that of the
    commit at the end of the block, or None. `begin` is the call that begins it, `number` what the worker
    calls it, `ended_by` how it ended, "" while it has not. Raises `InvalidRequestError` where an argument
    cannot be.
    """

    def __init__(self, limits: Limits, lease: float | None, request_key: str | None) -> None:
        self.begin = calls.begin(_lease_ms(lease, limits))
        if request_key is not None:
            check_key(request_key, limits)
        self.key = request_key
        self.number = 0
        self.ended_by = ""
        self._in_doubt = False
        self._savepoints = 0

    @property
    def wants_commit(self) -> bool:
        """Whether the end of its block has to commit, or to say why it cannot."""
        return self.ended_by not in {"committed", "rolled back"}

    def check(self) -> None:
        """Raise `TransactionExpiredError` where it is over."""
        if self.ended_by:
            raise self.over()

    def over(self) -> TransactionExpiredError:
        """The error that says how it ended."""
        outcome: Outcome = "unknown" if self._in_doubt else "not_committed"
        if self.ended_by == "committed":
            outcome = "committed"
        return TransactionExpiredError(
            f"the interactive transaction was {self.ended_by}; begin a new one", outcome=outcome
        )

    def begun(self, answer: Reply | Failure) -> None:
        """Take the answer to its begin; raises the worker's refusal."""
        if isinstance(answer, Failure):
            raise error_of(answer)
        self.number = self.begin.operation.decode_result(answer.result)

    def result_of(self, call: Call[R], answer: Reply | Failure) -> R:
        """The result of a call inside it; raises the call's error, and notes where that ended it."""
        if isinstance(answer, Reply):
            if call is calls.ROLLBACK_CALL:
                self._in_doubt = False  # the answer to any other call may be older than the commit
            return call.operation.decode_result(answer.result)
        error = error_of(answer)
        if isinstance(error, TransactionExpiredError) or error.details.get("transaction_ended"):
            self.ended_by = "ended by the worker"
            if self._in_doubt:
                error.outcome = "unknown"
        raise error

    def doubt(self, error: BaseException) -> None:
        """Note how its commit failed: where nobody knows whether it took effect, no later error may deny it."""
        if not isinstance(error, StorageError) or error.outcome == "unknown":
            self._in_doubt = True

    def lost(self, error: WorkerUnavailableError) -> NoReturn:
        """Raise what a call ends with that was no commit and met that error."""
        if "sent" not in error.details:
            raise error
        self._end_by_loss()
        raise self.over() from error

    def lost_commit(self, error: WorkerUnavailableError, request_key: str | None) -> str:
        """The request key to look up after a commit whose worker was lost; raises where there is none."""
        if "sent" not in error.details and error.outcome != "unknown":
            raise error
        self.doubt(error)
        self._end_by_loss()
        if error.outcome == "not_committed":
            raise self.over() from error
        if request_key is None:
            raise error
        return request_key

    def looked_up(self, known: KnownOutcome, error: WorkerUnavailableError) -> None:
        """Take what became of that commit; raises where it did not take effect."""
        self._in_doubt = False
        if not known.committed:
            self._end_by_loss()
            raise self.over() from error
        self.ended_by = "committed"

    def _end_by_loss(self) -> None:
        self.ended_by = "in its commit" if self._in_doubt else "rolled back"
        self.ended_by += " when its connection was lost"

    def next_savepoint(self) -> str:
        """A name that no other savepoint of it has."""
        self._savepoints += 1
        return f"s{self._savepoints}"


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
