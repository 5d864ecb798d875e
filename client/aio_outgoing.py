"""What an event loop's connection has to write: whole frames, in order, in few writes."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from .aio_waiter import AsyncWaiter
from .outgoing import BUFFER_BYTES, SEND_FLAGS
from .waiter import ALL_WRITTEN


class AsyncOutgoing:
    """The outgoing bytes of one socket.

    A frame is written at once where the caller says so and nothing is before it, else at the loop's next
    turn, together with those that came meanwhile. Until then it can be taken back. How much waits here is
    bounded by the connection, which lets so many requests in as the worker takes.

    Arguments: `loop`, the event loop; `sock`, a non-blocking socket; `lose`, called with the reason where it
    takes nothing more. `written` counts the bytes that the system took; `is_over` says that it gets no more.
    """

    __slots__ = (
        "_fd",
        "_is_due",
        "_left",
        "_loop",
        "_lose",
        "_send",
        "_unsent",
        "_watches",
        "is_over",
        "written",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, lose: Callable[[str], None]
    ) -> None:
        self.written = 0
        self._loop = loop
        self._fd = sock.fileno()
        self._send = sock.send
        self._lose = lose
        self._unsent: deque[AsyncWaiter] = deque()
        self._left = memoryview(b"")
        self._is_due = False
        self.is_over = False
        self._watches = False

    def add(self, waiter: AsyncWaiter, frame: bytes, *, at_once: bool) -> None:
        """Have a frame written; `at_once` where nothing else is expected in this turn of the loop."""
        if at_once and not self._left and not self._unsent:
            self._write(waiter, frame)
            return
        waiter.frame = frame
        self._unsent.append(waiter)
        if not self._is_due and not self._watches:
            self._is_due = True
            self._loop.call_soon(self._when_due)

    def flush(self) -> None:
        """Write what the system takes now, in one write; the rest when it has room."""
        if self.is_over:
            return
        if not self._left:
            self._left = self._join()
        if self._left:
            self._left = self._left[self._sent(self._left) :]
        if not self.is_over:
            self._watch(bool(self._left or self._unsent))

    def stop(self) -> None:
        """Write nothing more; the loop forgets the socket."""
        self._watch(False)
        self.let_go()

    def let_go(self) -> None:
        """Write nothing more, without a word to the loop: in a forked child it is the parent's."""
        self.is_over = True
        self._unsent.clear()
        self._left = memoryview(b"")

    def _write(self, waiter: AsyncWaiter, frame: bytes) -> None:
        count = self._sent(frame)
        if count == len(frame):
            waiter.end = 0
        elif not self.is_over:
            if count:
                self._left = memoryview(frame)[count:]
                waiter.end = self.written + len(self._left)
            else:
                waiter.frame = frame
                self._unsent.append(waiter)
            self._watch(True)

    def _sent(self, data: bytes | memoryview) -> int:
        """How many bytes the system took."""
        try:
            count = self._send(data, SEND_FLAGS)
            self.written += count
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._lose(f"the connection was lost: {error.strerror}")
            return 0
        except BaseException:
            # A KeyboardInterrupt leaves unknown how much was written: it may be all.
            self.written = ALL_WRITTEN
            self._lose("a write was interrupted")
            raise
        return count

    def _join(self) -> memoryview:
        """Take frames for one write; those that were taken back are empty."""
        unsent, parts, size = self._unsent, [], 0
        while unsent and size < BUFFER_BYTES:
            waiter = unsent.popleft()
            if waiter.gate is not None and waiter.gate.cancelled():
                continue  # its task takes it back in this very turn
            parts.append(waiter.frame)
            size += len(waiter.frame)
            waiter.end = self.written + size
            waiter.frame = b""
        return memoryview(b"".join(parts))

    def _when_due(self) -> None:
        self._is_due = False
        if not self._watches:
            self.flush()

    def _watch(self, wanted: bool) -> None:
        if wanted == self._watches:
            return
        self._watches = wanted
        if wanted:
            self._loop.add_writer(self._fd, self.flush)
        else:
            self._loop.remove_writer(self._fd)
