"""The errors of requests that the worker did not answer."""

from typing import Any, Final, TypeVar

from ..protocol.envelope import Reply
from ..protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    Outcome,
    ProtocolError,
    StorageError,
    WorkerUnavailableError,
    bare_error,
)
from ..protocol.limits import Limits
from ..protocol.operation import Call

R = TypeVar("R")

LAST_WORDS_SECONDS: Final = 1.0
"""How long it is waited for the end of what a worker said that takes nothing more; it is at hand, or close."""


def gone(message: str) -> WorkerUnavailableError:
    """Why a connection ended."""
    return WorkerUnavailableError(f"{message}; the client connects anew at its next call")


def lost(cause: StorageError, outcome: Outcome, *, sent: bool) -> StorageError:
    """One request's own copy of the error that ended its connection.

    `sent` says whether the worker can have the whole request; it stands in the details.
    """
    error = bare_error(type(cause), cause.message)
    error.retryable = cause.retryable
    error.retry_after = cause.retry_after
    error.outcome = outcome
    error.details = {**cause.details, "sent": sent}
    return error


def late(call: Call[Any], outcome: Outcome, limits: Limits, *, sent: bool) -> DeadlineExceededError:
    """The error of a request whose answer did not come in time, nor in the grace beyond it."""
    grace_ms = limits.reply_grace_ms
    return DeadlineExceededError(
        f"no answer to {call.operation.name} within its deadline and the {grace_ms} ms beyond it",
        outcome=outcome,
        details={"stage": "reply" if sent else "send", "reply_grace_ms": grace_ms},
    )


def lost_by(error: OSError) -> WorkerUnavailableError:
    """Why a connection ended whose socket raised that; raises an error that is not the system's again."""
    if error.errno is None:
        raise error  # ours, or raised by a signal's handler
    return gone(f"the connection was lost: {error.strerror}")


def result_of(call: Call[R], reply: Reply) -> R:
    """The result in an answer; `ProtocolError` where it does not decode, which undoes nothing of a write."""
    try:
        return call.operation.decode_result(reply.result)
    except ProtocolError as error:
        if call.operation.kind != "control":
            error.outcome = "committed" if call.operation.kind == "write" else "not_committed"
        raise


def called_inside() -> InvalidRequestError:
    """The error of a call inside another one of the same thread, which could never get its answer."""
    return InvalidRequestError(
        "a signal's handler or a finalizer used the client in the middle of another call of its thread"
    )


def other_loop() -> InvalidRequestError:
    """The error of an asynchronous client in another event loop, or thread, than the one that it serves."""
    return InvalidRequestError(
        "an asynchronous client belongs to the event loop that used it first; make one for each loop"
    )
