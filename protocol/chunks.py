"""Values that are too large for one frame: how they are cut into chunks, and what the credit allows.

Both directions follow the same rules. Chunks are numbered from 0, each but the last is full, and the sender
never sends more of them than it was granted: `chunks_ahead_max` for a result from the beginning on; for
arguments nothing before the worker has admitted their request and says so by its first Credit. A receiver
grants more as it takes the chunks, and never so many that more than `chunks_ahead_max` are outstanding.
"""

from .envelope import Chunk
from .errors import ProtocolError
from .limits import PROTOCOL_ENVELOPE_BYTES, Limits


def part_bytes(limits: Limits) -> int:
    """The size of every part but the last."""
    return limits.chunk_bytes_max - PROTOCOL_ENVELOPE_BYTES


class Outflow:
    """One value on its way out. `offset` and `sequence` are where its next part begins, and that part's number.

    One thread may send while another one grants: what each of them counts the other only reads.

    Arguments: `size`, the value's bytes, at least 1; `limits`; `credit`, how many parts may go at first.
    """

    __slots__ = ("_ahead", "_granted", "_part", "offset", "sequence", "size")

    def __init__(self, size: int, limits: Limits, credit: int) -> None:
        self.size = size
        self.offset = 0
        self.sequence = 0
        self._granted = credit
        self._ahead = limits.chunks_ahead_max
        self._part = part_bytes(limits)

    @property
    def credit(self) -> int:
        """How many more parts may go."""
        return self._granted - self.sequence

    @property
    def is_over(self) -> bool:
        """Whether all parts are out."""
        return self.offset >= self.size

    @property
    def next_bytes(self) -> int:
        """The size of the part that may go next; 0 where none may."""
        return min(self._part, self.size - self.offset) if self.credit else 0

    def sent(self, count: int) -> None:
        """Note that the next part, of `count` bytes, went out."""
        self.offset += count
        self.sequence += 1

    def grant(self, count: int) -> None:
        """Allow more parts; `ProtocolError` where that is more than anybody may grant."""
        credit = self.credit
        if credit + count > self._ahead:
            raise ProtocolError(
                f"a credit of {count} chunks beside {credit}; no more than {self._ahead} may be outstanding",
                details={"chunks_ahead_max": self._ahead},
            )
        self._granted += count


class Inflow:
    """One value on its way in. `outstanding` is how many more parts its sender may send by now.

    Arguments: `limits`; `size`, the bytes that were announced, or None for up to `chunked_bytes_max`; `outstanding`,
    what the sender may send without a Credit.
    """

    __slots__ = ("_ahead", "_is_known", "_is_short", "_left", "_part", "_sequence", "outstanding")

    def __init__(self, limits: Limits, size: int | None, outstanding: int) -> None:
        self.outstanding = outstanding
        self._ahead = limits.chunks_ahead_max
        self._part = part_bytes(limits)
        self._is_known = size is not None
        self._left = limits.chunked_bytes_max if size is None else size
        self._sequence = 0
        self._is_short = False

    @property
    def is_over(self) -> bool:
        """Whether all that was announced is there."""
        return not self._left

    def take(self, chunk: Chunk) -> None:
        """Check the next part; `ProtocolError` where it is not the next, not granted, or of another size."""
        if chunk.sequence != self._sequence:
            raise _broken(chunk, f"number {self._sequence} was to come")
        if not self.outstanding:
            raise _broken(chunk, "it is beyond the credit")
        size = len(chunk.part)
        full = min(self._part, self._left)
        if not 0 < size <= full or self._is_short or (self._is_known and size < full):
            raise _broken(chunk, f"it has {size} bytes where {full} may come")
        self._sequence += 1
        self._left -= size
        self._is_short = size < self._part
        self.outstanding -= 1

    def to_grant(self) -> int:
        """How many more parts to grant now, at least half of what may be outstanding or else 0; they count as granted."""
        wanted = min(self._ahead, -(-self._left // self._part))
        count = wanted - self.outstanding
        if count <= 0 or (wanted == self._ahead and count * 2 < self._ahead):
            return 0
        self.outstanding += count
        return count


def _broken(chunk: Chunk, why: str) -> ProtocolError:
    return ProtocolError(
        f"chunk {chunk.sequence} of request {chunk.id} cannot be: {why}",
        details={"request": chunk.id, "sequence": chunk.sequence},
    )
