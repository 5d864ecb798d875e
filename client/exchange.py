"""What one connection has in flight, and whose answer comes in: no I/O, the same for every kind of client."""

from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from ..protocol.envelope import (
    CONNECTION_ID,
    Failure,
    FromWorker,
    OutgoingRequest,
    Reply,
    encode,
    error_of,
)
from ..protocol.errors import (
    InvalidRequestError,
    Outcome,
    ProtocolError,
    RequestTooLargeError,
    StorageError,
)
from ..protocol.framing import FrameReader
from ..protocol.limits import FRAME_HEADER_BYTES, KIB, PROTOCOL_ENVELOPE_BYTES, Limits
from ..protocol.operation import Call
from ..protocol.session import Session, State
from .endings import late, lost
from .terms import Terms

# A Failure must find room, however small the results are that a worker allows.
_FRAME_BYTES_LEAST: Final = 64 * KIB

ANSWERS: Final = (Reply, Failure)


class Finishable(Protocol):
    """Something that waits for an answer."""

    def finish(self, answer: Reply | Failure | StorageError) -> None:
        """Take the worker's word, or why there will be none."""
        ...


W = TypeVar("W", bound=Finishable)


class Exchange(Generic[W]):
    """The requests of an open connection: those that wait, and those that nobody waits for any more.

    `waiting` and `abandoned` are by request id. A request is `abandoned` before it is taken out of
    `waiting`, so that its answer finds it in one of the two, whichever thread reads it. `frames` cuts the
    incoming bytes.
    """

    def __init__(self, limits: Limits) -> None:
        self.waiting: dict[int, W] = {}
        self.abandoned: dict[int, W] = {}
        self.last_id = CONNECTION_ID
        self.frames = FrameReader(max(limits.result_bytes_max + PROTOCOL_ENVELOPE_BYTES, _FRAME_BYTES_LEAST))
        self._session = Session()
        self._session.state = State.OPEN

    def take(self, envelope: FromWorker) -> W | None:
        """Hand an answer to whoever waits for it; returns whose request it ended, None for a Goodbye.

        Raises the error that ends the connection: the worker's own, or `ProtocolError`.
        """
        if type(envelope) is not Reply and type(envelope) is not Failure:
            self._session.from_worker(envelope)
            return None
        request_id = envelope.id
        waiter = self.waiting.get(request_id)
        if waiter is not None:
            waiter.finish(envelope)
            if self.waiting.pop(request_id, None) is None:
                self.abandoned.pop(request_id, None)
            return waiter
        waiter = self.abandoned.pop(request_id, None)
        if waiter is not None:
            return waiter
        if isinstance(envelope, Failure) and request_id == CONNECTION_ID:
            raise error_of(envelope)
        raise ProtocolError(
            f"the worker answered request {request_id}, which is not in flight",
            details={"request": request_id},
        )


def request_of(request_id: int, call: Call[Any], terms: Terms, transaction: int) -> OutgoingRequest:
    """The envelope of a call."""
    return OutgoingRequest(
        request_id,
        call.operation.name,
        terms.deadline_ns,
        terms.result_bytes,
        terms.key,
        transaction,
        0,
        call.arguments,
    )


def frame_of(request: OutgoingRequest, limits: Limits) -> bytes:
    """A request as it is written.

    Raises `InvalidRequestError` where its arguments cannot be encoded, `RequestTooLargeError` where it is
    over the worker's limit.
    """
    try:
        body = encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(f"the arguments of {request.operation} cannot be sent: {error}") from error
    size, most = len(body), limits.request_bytes_max
    if size > most:
        raise RequestTooLargeError(
            f"the request {request.operation} of {size} bytes is over the limit of {most}",
            details={"request_bytes": size, "request_bytes_max": most},
        )
    return size.to_bytes(FRAME_HEADER_BYTES, "big") + body


def settled(
    answer: Reply | Failure | StorageError | None, call: Call[Any], limits: Limits, *, written: bool
) -> Reply | Failure:
    """The worker's answer; raises why there is none, with what is known of the outcome.

    `answer` None says that none came in time; `written` whether the system took the whole request.
    """
    if isinstance(answer, ANSWERS):
        return answer
    # What was not written by its deadline reaches the worker after it, and is not begun then.
    outcome: Outcome = "unknown" if written and call.operation.kind != "read" else "not_committed"
    if answer is not None:
        raise lost(answer, outcome, sent=written)
    raise late(call, outcome, limits, sent=written)
