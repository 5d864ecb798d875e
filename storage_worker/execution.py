"""Running one request's handler, for the writer and the readers alike."""

import errno
from collections.abc import Callable
from typing import Any

import msgspec

from .peer import Job
from .protocol.envelope import Failure, OutgoingReply, encode, failure_of
from .protocol.errors import (
    InvalidRequestError,
    OperationFailedError,
    Outcome,
    StorageError,
    StorageFullError,
    result_too_large,
)
from .protocol.framing import frame
from .protocol.limits import PROTOCOL_ENVELOPE_BYTES, Limits
from .protocol.operation import Kind, Operation
from .protocol.statements import Statement
from .protocol.status import Histogram
from .protocol.values import WireParameters
from .transaction import KeptFailure, Transaction

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_decode_failure = msgspec.msgpack.Decoder(Failure).decode

Run = Callable[[Transaction, Any], Any]
"""Runs an operation: a function of the transaction and the arguments' struct."""

Check = Callable[[Statement], WireParameters]
"""Checks one statement of a client; its values."""


class Served:
    """An operation as the worker serves it: what runs it, and its figures.

    A `plain` one runs one statement of a client, whose checked values `plain` gives. Nothing of a `keyless` one is in the database by itself, so
    that no receipt could tell of it. One that `adds` nothing is served also where nothing new is written.
    """

    __slots__ = (
        "adds",
        "admin",
        "failed",
        "for_writers",
        "keyless",
        "kind",
        "latency_us",
        "name",
        "operation",
        "plain",
        "run",
        "solo",
        "succeeded",
    )

    def __init__(
        self,
        operation: Operation[..., Any],
        run: Run,
        *,
        plain: Check | None = None,
        keyless: bool = False,
        adds: bool = True,
    ) -> None:
        self.operation = operation
        self.name = operation.name
        self.kind: Kind = operation.kind
        self.solo = operation.solo
        self.admin = operation.admin
        self.for_writers = operation.for_writers
        self.run = run
        self.plain = plain
        self.keyless = keyless
        self.adds = adds
        self.succeeded = 0
        self.failed = 0
        self.latency_us = Histogram()


def decode(job: Job, limits: Limits) -> Any:
    """The request's arguments; `InvalidRequestError` where they are not its operation's."""
    if job.arguments is None:
        raw: msgspec.Raw | bytes = job.raw
        if job.large is not None and job.large.arguments is not None:
            raw = job.large.arguments.read(0, job.large.arguments.size)
        job.arguments = job.served.operation.decode_arguments(raw, limits.nesting_depth_max)
    return job.arguments


def succeed(job: Job, result: object) -> None:
    """Make a result the request's answer; `ResultTooLargeError` where it is over what the request allows.

    One that is over what a frame takes is spooled, which raises as `Spools.keep` does.
    """
    try:
        body = encode(OutgoingReply(job.id, result))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise OperationFailedError(
            f"the result of {job.served.name} cannot be encoded: {error}",
            details={"exception": type(error).__name__},
        ) from error
    if len(body) > job.result_bytes_max and len(body) > job.result_bytes_max + _envelope_bytes(body):
        raise result_too_large(job.result_bytes_max)
    large = job.large
    if large is not None:
        large.drop_result()
        if len(body) > large.spools.frame_bytes_max:
            large.result = large.spools.keep(memoryview(body)[_envelope_bytes(body) :])
            body = encode(OutgoingReply(job.id, None))
    job.frame = frame(body)
    job.code = ""


def _envelope_bytes(body: bytes) -> int:
    # The array header, the tag and the id, which is at most nine bytes long.
    return 2 + {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.get(body[2], 1)


def fail(job: Job, error: StorageError, limits: Limits, outcome: Outcome | None = None) -> Failure:
    """Make a typed error the request's answer; `outcome` where the caller knows better than the error."""
    let_go(error)
    try:
        failure, body = _failure(job, error, limits, outcome)
    except Exception as broken:  # noqa: BLE001 - a store's error class may do anything
        kind = type(error).__name__
        stand_in = OperationFailedError(
            f"{job.served.name} failed with a {kind}, which cannot be sent: {_text_of(broken)}",
            details={"exception": kind, "operation": job.served.name},
        )
        failure, body = _failure(job, stand_in, limits, outcome)
    if job.large is not None:
        job.large.drop_result()
    job.frame = frame(body)
    job.code = failure.code
    return failure


def _failure(job: Job, error: StorageError, limits: Limits, outcome: Outcome | None) -> tuple[Failure, bytes]:
    failure = failure_of(job.id, error, limits.message_chars_max)
    if outcome is not None:
        failure.outcome = outcome
    body = encode(failure)
    if len(body) > limits.result_bytes_max + PROTOCOL_ENVELOPE_BYTES:
        failure.details = {}
        body = encode(failure)
    # What a store's error holds was never checked; its client must be able to read the answer.
    return _decode_failure(body), body


def let_go(error: BaseException) -> None:
    """Cut an error, and those behind it, off the frames that it came through.

    A frame whose variable holds the error that it raised would keep itself alive, and with it the request's arguments
    and result, until the garbage collector looks: a client that goes on failing would fill the memory.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        if each.__cause__ is each:
            each.__cause__ = None
        left += [each.__cause__, each.__context__]


def as_typed(error: BaseException, name: str) -> StorageError:
    """The typed error for whatever a handler raised, which has been dealt with then."""
    let_go(error)
    if isinstance(error, KeptFailure):
        return error.error
    if isinstance(error, StorageError):
        return error
    if isinstance(error, UnicodeEncodeError):
        return InvalidRequestError(f"{name}: a text holds a lone surrogate: {error}")
    kind = type(error).__name__
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return StorageFullError(f"{name} failed: {error}; free some space and repeat")
    return OperationFailedError(
        f"{name} failed: {kind}: {_text_of(error)}", details={"exception": kind, "operation": name}
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a host's exception may do anything
        return f"its text cannot be had ({type(broken).__name__})"
