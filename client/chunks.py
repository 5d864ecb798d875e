"""Large values in chunks, from the client's side: arguments that follow their request, results that come in parts."""

from collections.abc import Callable
from typing import Final

import msgspec

from ..protocol.chunks import Inflow, Outflow
from ..protocol.envelope import ARGUMENTS_FOLLOW, Chunk, OutgoingChunk, OutgoingRequest, Reply, encode
from ..protocol.errors import ProtocolError, RequestTooLargeError
from ..protocol.framing import frame
from ..protocol.limits import Limits
from .waiter import Waiter

_NOTHING: Final = msgspec.Raw(encode(None))
_CAME: Final = Reply(1, _NOTHING)


class Upload:
    """The arguments of one request that follow it in chunks.

    It makes the request the announcement that goes before them. `wake` is called when a credit came, or when the
    request has ended, which `is_ended` says.

    Arguments: `request`; `body`, its encoding; `limits`, the worker's. Raises `RequestTooLargeError` where the
    arguments are over what the worker takes in chunks.
    """

    __slots__ = ("_data", "_request", "flow", "is_ended", "wake")

    def __init__(self, request: OutgoingRequest, body: bytes, limits: Limits) -> None:
        arguments, request.arguments = request.arguments, None
        data = memoryview(body)[len(encode(request)) - len(_NOTHING) :]
        if len(data) > limits.chunked_bytes_max:
            request.arguments = arguments
            raise RequestTooLargeError(
                f"the arguments of {request.operation} of {len(data)} bytes are over the limit of"
                f" {limits.chunked_bytes_max}",
                details={"argument_bytes": len(data), "chunked_bytes_max": limits.chunked_bytes_max},
            )
        request.flags |= ARGUMENTS_FOLLOW
        request.arguments = len(data)
        self._request = request
        self._data = data
        self.flow = Outflow(len(data), limits, 0)
        self.is_ended = False
        self.wake: Callable[[], None] = _nobody

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self._request.id

    @property
    def is_whole(self) -> bool:
        """Whether all parts were given out."""
        return self.flow.is_over

    def next_frame(self) -> bytes:
        """The frame of the next part; empty where the worker has granted none."""
        flow = self.flow
        count = flow.next_bytes
        if not count:
            return b""
        part = self._data[flow.offset : flow.offset + count]
        data = frame(encode(OutgoingChunk(self._request.id, flow.sequence, part)))
        flow.sent(count)
        if flow.is_over:
            self._data = memoryview(b"")
        return data


def _nobody() -> None:
    """Nobody waits yet."""


class Turn(Waiter):
    """A thread's wait for the next credit of its upload, or for the end of the request with that id."""

    __slots__ = ()

    def __init__(self, request_id: int) -> None:
        super().__init__()
        self.id = request_id

    def come(self) -> None:
        """Wake it; what came stands elsewhere."""
        self.finish(_CAME)


class Download:
    """A result that comes in chunks. Arguments: `limits`, the worker's."""

    __slots__ = ("_data", "_flow")

    def __init__(self, limits: Limits) -> None:
        self._flow = Inflow(limits, None, limits.chunks_ahead_max)
        self._data = bytearray()

    def take(self, chunk: Chunk) -> int:
        """Take the next part; how many more to grant. `ProtocolError` where it may not come."""
        self._flow.take(chunk)
        self._data += chunk.part
        return self._flow.to_grant()

    def whole(self, end: Reply) -> Reply:
        """The reply with the whole result; `ProtocolError` where its end holds one of its own."""
        if bytes(end.result) != bytes(_NOTHING):
            raise ProtocolError(f"request {end.id} has two results", details={"request": end.id})
        return Reply(end.id, msgspec.Raw(self._data))
