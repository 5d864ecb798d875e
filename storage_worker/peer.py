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
    from .spool import Large
    from .transfers import Download, Upload


class Job(msgspec.Struct, eq=False):
    """One admitted request, from its admission to its answer.

    Times are nanoseconds on the machine's monotonic clock. `size` is that of its frame in bytes, `frame` its
    answer, once there is one. `write_number` orders the writes of a client; of a read it is that of the last
    write before it. `alone` requests share no transaction; `replays` counts the runs that a mate's end undid.
    `behind` are requests whose answers it must wait for. `large` has what is not kept in memory.
    """

    peer: "Peer"
    id: int
    served: "Served"
    raw: msgspec.Raw
    size: int
    deadline_ns: int
    result_bytes_max: int
    admitted_ns: int
    alone: bool
    arguments: Any = None
    key: str | None = None
    transaction: int = 0
    needs_savepoint: bool = False
    replays: int = 0
    cancelled: bool = False
    answered: bool = False
    write_number: int = 0
    behind: "Sequence[Job]" = ()
    frame: bytes = b""
    code: str = ""
    after_commit: Sequence[Callable[[], None]] = ()
    large: "Large | None" = None


class Peer:
    """One connection: its socket, what was said in its hand-shake, its requests in flight, its unread replies.

    `bodies` are frames that were read and wait to be served. A `paused` client leaves too many replies
    unread; no executor takes a request of it. `uploads` and `downloads` are arguments and results that travel
    in chunks, by request id; `spooled_bytes` those of results that were not sent yet,
    `argument_spools` and `argument_bytes` count the arguments.
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
        self.partial_bytes = 0
        self.unread_since_ns = 0
        self.events = 0
        self.uploads: dict[int, Upload] = {}
        self.downloads: dict[int, Download] = {}
        self.spooled_bytes = 0
        self.argument_spools = 0
        self.argument_bytes = 0
        self.answered_requests = 0
        self.refused_requests = 0
