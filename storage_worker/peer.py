"""One client as the worker sees it, and one request of it."""

import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from .protocol.envelope import Role
from .protocol.framing import FrameReader
from .protocol.session import Session

if TYPE_CHECKING:
    from .execution import Served


class Job:
    """One admitted request, from its admission to its answer.

    Times are nanoseconds on the machine's monotonic clock. `frame` is its answer, once there is one.
    `write_number` orders the writes of a client; of a read it is that of the last write before it.
    `alone` requests share no transaction; `replays` counts the runs that a mate's end undid. `behind`
    are requests whose answers it must wait for.
    """

    __slots__ = (
        "admitted_ns",
        "after_commit",
        "alone",
        "answered",
        "arguments",
        "behind",
        "bytes",
        "cancelled",
        "code",
        "deadline_ns",
        "frame",
        "id",
        "key",
        "needs_savepoint",
        "peer",
        "raw",
        "replays",
        "result_bytes_max",
        "served",
        "transaction",
        "write_number",
    )

    def __init__(
        self,
        peer: "Peer",
        request_id: int,
        served: "Served",
        raw: msgspec.Raw,
        size: int,
        deadline_ns: int,
        result_bytes_max: int,
        admitted_ns: int,
    ) -> None:
        self.peer = peer
        self.id = request_id
        self.served = served
        self.raw = raw
        self.arguments: Any = None
        self.bytes = size
        self.deadline_ns = deadline_ns
        self.result_bytes_max = result_bytes_max
        self.admitted_ns = admitted_ns
        self.key: str | None = None
        self.transaction = 0
        self.alone = served.solo
        self.needs_savepoint = False
        self.replays = 0
        self.cancelled = False
        self.answered = False
        self.write_number = 0
        self.behind: Sequence[Job] = ()
        self.frame: bytes = b""
        self.code = ""
        self.after_commit: Sequence[Callable[[], None]] = ()


class Peer:
    """One connection: its socket, what was said in its hand-shake, its requests in flight, its unread replies.

    `bodies` are frames that were read and wait to be served. A `paused` client leaves too many replies
    unread; no executor takes a request of it.
    """

    def __init__(self, sock: socket.socket, frame_bytes_max: int, connected_ns: int) -> None:
        self.socket = sock
        self.fd = sock.fileno()
        self.session = Session()
        self.frames = FrameReader(frame_bytes_max)
        self.bodies: deque[bytes] = deque()
        self.connected_ns = connected_ns
        self.name = ""
        self.pid = 0
        self.role: Role = "read"
        self.closed = False
        self.last_id = 0
        self.jobs: dict[int, Job] = {}
        self.bytes_in_flight = 0
        self.write_number = 0
        self.open_writes: dict[int, None] = {}
        self.paused = False
        self.unread: deque[bytes | memoryview] = deque()
        self.unread_bytes = 0
        self.unread_since_ns = 0
        self.events = 0
        self.answered_requests = 0
        self.refused_requests = 0
