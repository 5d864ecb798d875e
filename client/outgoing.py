"""What is on its way to a worker: whole frames, in order, in few writes, and never more than fits."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ..protocol.errors import DeadlineExceededError
from ..protocol.limits import KIB
from .endings import called_inside
from .readership import Readership
from .terms import seconds_left
from .waiter import ALL_WRITTEN, Waiter

BUFFER_BYTES: Final = 64 * KIB
"""How much requests that are left for later may come to before they are written."""

# A host may have given SIGPIPE its deadly default back; macOS knows no such flag.
SEND_FLAGS: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0) | socket.MSG_DONTWAIT


class Outgoing:
    """The outgoing bytes of one socket; whoever adds or writes some is between `enter` and `leave`.

    Arguments: `sock`, a connected socket, to which nothing is sent that must wait; `readers`, the lead over its incoming bytes. `written` counts
    the bytes that the system took; `left` are the bytes that it did not; `posted` small frames that never wait. Methods that write raise
    `OSError` where the socket is broken.
    """

    __slots__ = ("_is_inside", "_lock", "_readers", "_send", "_sock", "is_over", "left", "posted", "written")

    def __init__(self, sock: socket.socket, readers: Readership) -> None:
        # Reentrant only to know its owner: `let_go` must not take it from another thread.
        self._lock = threading.RLock()
        self._is_inside = False
        self.written = 0
        self.is_over = False
        self.left = bytearray()
        self.posted: deque[bytes] = deque()
        self._sock = sock
        self._send = sock.send
        self._readers = readers

    @property
    def is_torn(self) -> bool:
        """Whether an interrupt left unknown how much was written."""
        return self.written >= ALL_WRITTEN

    def enter(self, deadline_ns: int) -> None:
        """Take the right to write; `leave` gives it back.

        Raises `DeadlineExceededError` where others have it until then, `InvalidRequestError` where this very
        thread does: a signal's handler, or a finalizer, called in the middle of another call.
        """
        lock = self._lock
        if not lock.acquire(False) and not lock.acquire(timeout=seconds_left(deadline_ns)):
            raise DeadlineExceededError(
                "the deadline passed behind other requests of this client; nothing was sent",
                details={"stage": "send"},
            )
        if self._is_inside:
            lock.release()
            raise called_inside()
        self._is_inside = True

    def leave(self) -> None:
        """Give the right to write back; then the caller sees to `posted`."""
        self._is_inside = False
        self._lock.release()

    def let_go(self) -> None:
        """Give back what this thread has, where an interrupt left unknown whether it has it."""
        if self._lock.acquire(False):
            self._is_inside = False
            with suppress(RuntimeError):  # not this thread's any more
                while True:
                    self._lock.release()

    def try_enter(self) -> bool:
        """Take the right to write if nobody has it."""
        if not self._lock.acquire(False):
            return False
        if self._is_inside:
            self._lock.release()
            return False
        self._is_inside = True
        return True

    def write(self, waiter: Waiter, data: bytes) -> bool:
        """Write one frame, where nothing is left of others; whether all of it could be written at once."""
        count = self._sent(data)
        if count == len(data):
            waiter.end = 0
            return True
        self.left += memoryview(data)[count:]
        waiter.end = self.written + len(self.left)
        return False

    def send(self, waiter: Waiter, data: bytes, deadline_ns: int, read: Callable[[], object]) -> None:
        """Write one frame, or nothing, behind what is left, and `read` while there is no room; raises as `drain` does."""
        if self.left:
            self.drain(deadline_ns, read)
        if data and not self.write(waiter, data):
            self.drain(deadline_ns, read)

    def keep(self, waiter: Waiter, data: bytes) -> None:
        """Leave one frame to the next write."""
        self.left += data
        waiter.size = len(data)
        waiter.end = self.written + len(self.left)

    def drain(self, deadline_ns: int, read: Callable[[], object]) -> None:
        """Write everything that is left, and `read` while there is no room: both sides may be full.

        Raises `DeadlineExceededError` where the worker does not take it until then.
        """
        while True:
            self._write_some()
            if not self.left or self.is_over:
                return
            if time.monotonic_ns() >= deadline_ns:
                raise DeadlineExceededError(
                    "the worker did not take the request within its deadline", details={"stage": "send"}
                )
            if self._readers.await_room(self._sock, deadline_ns):
                try:
                    read()
                finally:
                    self._readers.leave()

    def post(self, data: bytes) -> None:
        """Send a small frame without ever waiting: at once, or behind what is being written."""
        self.posted.append(data)
        self.write_posted()

    def write_posted(self) -> None:
        """See to posted frames; whoever gave back the right to write calls it."""
        while self.posted and not self.is_over and self.try_enter():
            try:
                while self.posted:
                    self.left += self.posted.popleft()
                self._write_some()
            finally:
                self.leave()

    def push(self) -> None:
        """Write what the system takes of what is left, unless somebody is at it."""
        if self.left and not self.is_over and self.try_enter():
            try:
                self._write_some()
            finally:
                self.leave()

    def _write_some(self) -> None:
        del self.left[: self._sent(self.left)]

    def _sent(self, data: bytes | bytearray) -> int:
        """How many bytes the system took."""
        try:
            count = self._send(data, SEND_FLAGS)
        except BlockingIOError:
            return 0
        except BaseException as error:
            if not isinstance(error, OSError) or error.errno is None:
                # An interrupt, or what a signal's handler raised, leaves unknown how many: it may be all.
                self.written = ALL_WRITTEN
            raise
        self.written += count
        return count
