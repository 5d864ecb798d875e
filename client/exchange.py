"""What one connection has in flight, and whose answer comes in: no I/O, the same for every kind of client."""

from collections import deque
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from ..protocol.envelope import (
    CONNECTION_ID,
    Chunk,
    Credit,
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
    StorageError,
)
from ..protocol.framing import FrameReader
from ..protocol.limits import FRAME_HEADER_BYTES, KIB, PROTOCOL_ENVELOPE_BYTES, Limits
from ..protocol.operation import Call
from ..protocol.session import Session, State
from .chunks import Download, Upload
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
    incoming bytes. `uploads` and `downloads` are the large values on their way, `credits` what is to be sent for
    the latter. `is_draining` says that the worker takes nothing new.
    """

    def __init__(self, limits: Limits) -> None:
        self.waiting: dict[int, W] = {}
        self.abandoned: dict[int, W] = {}
        self.uploads: dict[int, Upload] = {}
        self.downloads: dict[int, Download] = {}
        self.credits: deque[Credit] = deque()
        self.is_draining = False
        self.last_id = CONNECTION_ID
        self._limits = limits
        self.frames = FrameReader(max(limits.result_bytes_max + PROTOCOL_ENVELOPE_BYTES, _FRAME_BYTES_LEAST))
        self._session = Session()
        self._session.state = State.OPEN

    def take(self, envelope: FromWorker) -> W | None:
        """Hand an answer to whoever waits for it; returns whose request it ended, None where it ended none.

        Raises the error that ends the connection: the worker's own, or `ProtocolError`.
        """
        if type(envelope) is not Reply and type(envelope) is not Failure:
            self._take_other(envelope)
            return None
        request_id = envelope.id
        if self.downloads and (download := self.downloads.pop(request_id, None)) and type(envelope) is Reply:
            envelope = download.whole(envelope)
        waiter = self.waiting.get(request_id)
        if waiter is not None:
            waiter.finish(envelope)
            if self.waiting.pop(request_id, None) is None:
                self.abandoned.pop(request_id, None)
            if self.uploads:
                self._end_upload(request_id)
            return waiter
        waiter = self.abandoned.pop(request_id, None)
        if waiter is not None:
            return waiter
        if isinstance(envelope, Failure) and request_id == CONNECTION_ID:
            raise error_of(envelope)
        raise _not_in_flight("answered", request_id)

    def forget(self, request_id: int) -> None:
        """Nobody waits for a request any more: nothing more of its large values goes or is kept."""
        if self.uploads:
            self._end_upload(request_id)
        self.downloads.pop(request_id, None)

    def _end_upload(self, request_id: int) -> None:
        upload = self.uploads.pop(request_id, None)
        if upload is not None:
            upload.is_ended = True
            upload.wake()

    def end_transfers(self) -> None:
        """The connection is over, and with it all that was on its way."""
        for request_id in tuple(self.uploads):
            self._end_upload(request_id)
        self.downloads.clear()

    def _take_other(self, envelope: FromWorker) -> None:
        if type(envelope) is Chunk:
            self._take_chunk(envelope)
        elif type(envelope) is Credit:
            upload = self.uploads.get(envelope.id)
            if upload is not None:
                upload.flow.grant(envelope.count)
                upload.wake()
            elif envelope.id > self.last_id:
                raise _not_in_flight("granted chunks for", envelope.id)
        else:
            self._session.from_worker(envelope)
            self.is_draining = True

    def _take_chunk(self, chunk: Chunk) -> None:
        request_id = chunk.id
        download = self.downloads.get(request_id)
        if download is None:
            if request_id not in self.waiting:
                if request_id in self.abandoned:
                    return
                raise _not_in_flight("sent a chunk for", request_id)
            download = self.downloads[request_id] = Download(self._limits)
        count = download.take(chunk)
        if count:
            self.credits.append(Credit(request_id, count))


def _not_in_flight(what: str, request_id: int) -> ProtocolError:
    return ProtocolError(
        f"the worker {what} request {request_id}, which is not in flight", details={"request": request_id}
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


def frame_of(request: OutgoingRequest, limits: Limits) -> tuple[bytes, Upload | None]:
    """A request as it is written, and where it is too large for one frame the arguments that follow it.

    Raises `InvalidRequestError` where its arguments cannot be encoded, `RequestTooLargeError` where they are
    over the worker's limit.
    """
    upload = None
    try:
        body = encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(f"the arguments of {request.operation} cannot be sent: {error}") from error
    if len(body) > limits.request_bytes_max:
        upload = Upload(request, body, limits)
        body = encode(request)
    return len(body).to_bytes(FRAME_HEADER_BYTES, "big") + body, upload


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
