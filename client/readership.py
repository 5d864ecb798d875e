"""Who of the threads that wait on one connection reads it: the leader, for all of them.

A thread that needs an answer leads if nobody does, and so reads its own answer without any hand-over.
The others follow: each sleeps at its own gate until its answer came, its time is over, or the leader
left. Nobody misses the leader's leaving: a follower registers before it looks whether somebody leads,
and a leader gives the lead up before it looks for followers.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from .endings import called_inside
from .terms import milliseconds_left, seconds_left
from .waiter import Waiter


class Readership:
    """The lead over one socket's incoming bytes. `lock` is held by the leader, a thread's identifier.

    Whoever leaves while there are `followers`, or while `writer_waits`, calls `hand_on`.
    """

    __slots__ = ("_bell", "followers", "leader", "lock", "writer_waits")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.leader = 0
        self.followers: dict[int, SimpleQueue[None]] = {}
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self.writer_waits = False

    def follow(self, waiter: Waiter, limit_ns: int) -> bool:
        """Sleep until something happened to `waiter` or to the lead; true where its time was over first.

        Raises `InvalidRequestError` where the thread leads already.
        """
        if self.leader == threading.get_ident() and self.lock.locked():
            raise called_inside()
        gate = waiter.gate
        if gate is None:
            gate = waiter.gate = SimpleQueue()
        self.followers[waiter.id] = gate
        try:
            if waiter.answer is None and self.lock.locked():
                waiter.asleep = True
                with suppress(Empty):
                    gate.get(timeout=seconds_left(limit_ns))
                waiter.asleep = False
        finally:
            self.followers.pop(waiter.id, None)
        return waiter.answer is None and time.monotonic_ns() >= limit_ns

    def hand_on(self) -> None:
        """Wake one follower, or a writer that waits for room, so that somebody reads.

        Every thread that leaves calls it: one that was just woken to lead may leave instead.
        """
        if self.lock.locked():
            return
        try:
            _, gate = self.followers.popitem()
        except KeyError:
            bell = self._bell
            if self.writer_waits and bell is not None:
                with suppress(OSError):  # full: it rings already; closed: nobody waits any more
                    bell[1].send(b"\0")
        else:
            gate.put(None)

    def await_room(self, sock: socket.socket, deadline_ns: int) -> bool:
        """Wait until `sock` may be written to, or has something that the caller must read.

        Returns whether the latter is so; the caller leads then and calls `leave` after reading. It must,
        since a worker that cannot get rid of its answers takes no requests. One writer waits at a time.
        """
        if self._bell is None:
            self._bell = _make_bell()
        ear = self._bell[0]
        poller = select.poll()
        self.writer_waits = True
        try:
            if self.lock.acquire(blocking=False):
                self.leader = threading.get_ident()
                return self._await_both(poller, sock, deadline_ns)
            poller.register(sock, select.POLLOUT)
            poller.register(ear, select.POLLIN)
            poller.poll(milliseconds_left(deadline_ns))
            with suppress(BlockingIOError):
                ear.recv(512)
            return False
        finally:
            self.writer_waits = False

    def _await_both(self, poller: select.poll, sock: socket.socket, deadline_ns: int) -> bool:
        must_read = False
        try:
            poller.register(sock, select.POLLIN | select.POLLOUT)
            must_read = any(
                event & ~select.POLLOUT for _, event in poller.poll(milliseconds_left(deadline_ns))
            )
        finally:
            if not must_read:
                self.leave()
        return must_read

    def leave(self) -> None:
        """Give the lead up; the next one is woken."""
        self.leader = 0
        self.lock.release()
        self.hand_on()

    def close(self) -> None:
        """Close what was opened, when nobody reads or writes any more."""
        for end in self._bell or ():
            end.close()


def poll_of(descriptor: int) -> Callable[[int], object]:
    """What waits some milliseconds until there is something to read, as one thread at a time may; true then."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return poller.poll


def has_unread(sock: socket.socket, timeout_ms: int = 0) -> bool:
    """Whether there is something to read, or the end, within that time; false where it is closed already."""
    descriptor = sock.fileno()
    return descriptor >= 0 and bool(poll_of(descriptor)(timeout_ms))


def _make_bell() -> tuple[socket.socket, socket.socket]:
    bell = socket.socketpair()
    for end in bell:
        end.setblocking(False)
    return bell
