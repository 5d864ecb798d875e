"""Bytes to frames and back: incremental, bounded, indifferent to how the bytes are split."""

from .errors import ProtocolError
from .limits import FRAME_HEADER_BYTES

_HEADER = FRAME_HEADER_BYTES


def frame(body: bytes) -> bytes:
    """The frame of one body: its length as a signed 32-bit big-endian number, then the body.

    The body's size is bounded by `Limits` long before the length field could overflow.
    """
    return len(body).to_bytes(_HEADER, "big") + body


class FrameReader:
    """Cuts a byte stream into frame bodies.

    A negative length, the 64-bit extension (which announces itself as -1) and a length above
    `frame_bytes_max` are a `ProtocolError` as soon as the four bytes are there, so that nothing of an
    announced size is ever allocated beyond what was received. After that the reader stays broken.
    """

    __slots__ = ("_kept", "_wanted", "error", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.error: ProtocolError | None = None
        self._kept = bytearray()
        self._wanted = _HEADER

    @property
    def bytes_kept(self) -> int:
        """Bytes of an unfinished frame, its header included."""
        return len(self._kept)

    @property
    def bytes_missing(self) -> int:
        """Bytes that may follow without going beyond the unfinished frame, or the next one's header."""
        return (self._wanted if self._kept else _HEADER) - len(self._kept)

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes of the stream; return the bodies of all frames they complete.

        Frames that came whole in front of a bad length are returned, since how the bytes were split
        must not decide about them; then `error` is set, and the next call raises it.
        """
        if self.error is not None:
            raise self.error
        kept = self._kept
        if kept:
            kept += data
            if len(kept) < self._wanted:
                return []
            data = bytes(kept)
            kept.clear()
        bodies: list[bytes] = []
        start, end = 0, len(data)
        wanted = _HEADER
        while end - start >= _HEADER:
            body_start = start + _HEADER
            size = int.from_bytes(data[start:body_start], "big")
            if size > self.frame_bytes_max:
                self.error = self._refusal(data[start:body_start])
                if bodies:
                    return bodies
                raise self.error
            stop = body_start + size
            if stop > end:
                wanted = _HEADER + size
                break
            bodies.append(data[body_start:stop])
            start = stop
        if start < end:
            kept += data[start:]
            self._wanted = wanted
        return bodies

    def _refusal(self, header: bytes) -> ProtocolError:
        size = int.from_bytes(header, "big", signed=True)
        if size < 0:
            return ProtocolError(
                f"a frame announces {size} bytes, which is no length", details={"frame_bytes": size}
            )
        return ProtocolError(
            f"a frame announces {size} bytes; the limit is {self.frame_bytes_max}",
            details={"frame_bytes": size, "frame_bytes_max": self.frame_bytes_max},
        )
