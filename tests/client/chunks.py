"""Small bounds for large values, and a worker's side of them, so that a few hundred bytes are large."""

from typing import Any

import msgspec

from storage_worker.protocol.envelope import Chunk, Credit, OutgoingReply, Request, encode
from storage_worker.protocol.limits import PROTOCOL_ENVELOPE_BYTES, Limits
from storage_worker.protocol.statements import Rows
from tests.client.fake import PATIENCE_S, Peer, frame_of, limits_with

PART = 100
AHEAD = 4
FRAME = 400
MOST = 5_000


def small_limits(**changes: int) -> Limits:
    """Requests go in chunks above 400 bytes, in parts of 100, 4 ahead, and up to 5,000."""
    return limits_with(
        **{
            "request_bytes_max": FRAME,
            "chunk_bytes_max": PROTOCOL_ENVELOPE_BYTES + PART,
            "chunks_ahead_max": AHEAD,
            "chunked_bytes_max": MOST,
            **changes,
        }
    )


def row(value: object) -> Rows:
    return Rows(("c",), [(value,)])


def grant(peer: Peer, request_id: int, count: int) -> None:
    peer.send(frame_of(Credit(request_id, count)))


def next_chunk(peer: Peer) -> Chunk:
    return peer.chunks.get(timeout=PATIENCE_S)


def receive(peer: Peer, request: Request, ahead: int = AHEAD) -> bytes:
    """Take the arguments that follow a request, as a worker does."""
    size = msgspec.msgpack.decode(request.arguments, type=int)
    data = b""
    while len(data) < size:
        grant(peer, request.id, min(ahead, -(-(size - len(data)) // PART)))
        for _ in range(min(ahead, -(-(size - len(data)) // PART))):
            data += next_chunk(peer).part
    return data


def chunks_of(request_id: int, result: Any) -> list[bytes]:
    """The frames of a result in chunks, with the reply that ends it."""
    data = encode(result)
    parts = [data[start : start + PART] for start in range(0, len(data), PART)]
    frames = [frame_of(Chunk(request_id, number, part)) for number, part in enumerate(parts)]
    return [*frames, frame_of(OutgoingReply(request_id, None))]
