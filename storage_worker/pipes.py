"""The pipes: accept, read frames, write answers. One selector over all of them; nothing ever blocks.

Whoever serves the pipes holds `role`; everything here is called with it held, except `wake`.
"""

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .door import Door
from .peer import Peer
from .protocol.envelope import CONNECTION_ID, encode, failure_of
from .protocol.errors import OverloadedError, ProtocolError, StorageError
from .protocol.framing import frame
from .protocol.limits import KIB, READ_BYTES, Limits

log = logging.getLogger(__name__)

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

VISIT_FRAMES = 8
"""Frames of one client that are served before the next client's, where more of them came at once."""

TURN_NS = 5_000_000
"""How long one turn serves clients that sent many frames; what is left over comes first in the next turn."""

WRITE_BYTES_MAX = 256 * KIB
"""Up to which size several frames are put together for one write; about what a socket takes at once."""

WAIT_NS_MAX = 3600 * 10**9
"""The longest wait; the system's own bound is a few weeks."""


class Conversation(Protocol):
    """Who understands what is said on the pipes."""

    def take_frame(self, peer: Peer, body: bytes) -> None:
        """A frame's body came from a client."""
        ...

    def forget(self, peer: Peer) -> None:
        """A connection was closed."""
        ...

    def refusal(self) -> StorageError | None:
        """Why no new connection is taken now."""
        ...

    def count_error(self, code: str) -> None:
        """An error was sent."""
        ...

    def pause(self, peer: Peer) -> None:
        """A client leaves too many replies unread: nothing more is to be done for it until it reads."""
        ...

    def resume(self, peer: Peer) -> None:
        """It reads again."""
        ...

    def send_next(self, peer: Peer) -> None:
        """A client that has downloads has read all before their next part: queue that, where it may go."""
        ...


class Pipes:
    """All connections of a worker, as bytes."""

    def __init__(self, limits: Limits) -> None:
        self.role = threading.Lock()
        self.peers: dict[int, Peer] = {}
        self.signals: list[int] = []
        self.emptied_ns = time.monotonic_ns()
        self._limits = limits
        self._touched: dict[Peer, None] = {}
        self._stuck: dict[Peer, None] = {}
        self._pending: dict[Peer, None] = {}
        """Clients of whose frames some still wait to be served, in the order of their turns."""
        self._selector = selectors.DefaultSelector()
        self.door = Door(self._selector, limits)
        self._partial: dict[Peer, None] = {}
        """Clients of whose last frame only a part has come; who made progress last is the last one."""
        self._partial_bytes = self._unread_bytes = 0
        self._wake_in, self._wake_out = os.pipe()
        for fd in (self._wake_in, self._wake_out):
            os.set_blocking(fd, False)
        self._watched: dict[int, Callable[[], None]] = {}
        self._selector.register(self._wake_in, _READ)

    def serve(self, conversation: Conversation) -> None:
        """Say who understands the frames."""
        self._conversation = conversation

    def listen_on(self, listener: socket.socket) -> None:
        """Accept connections from a listening socket."""
        self.door.listen_on(listener)
        self.emptied_ns = time.monotonic_ns()

    def turn(self, until_ns: int) -> None:
        """Wait for the pipes until then, at the most, and read or write what is ready."""
        wait = 0 if self._pending else min(until_ns, self.due_ns()) - time.monotonic_ns()
        knocks = False
        for key, events in self._selector.select(min(wait, WAIT_NS_MAX) / 1e9 if wait > 0 else 0):
            peer = key.data
            if peer is not None:
                # What was served before it in this turn may have closed it.
                if events & _WRITE and not peer.closed:
                    self._flush(peer)
                if events & _READ and not peer.closed and not peer.bodies:
                    self._read(peer)
            elif key.fd == self._wake_in:
                self._woken()
            elif key.fd in self._watched:
                self._watched[key.fd]()
            else:
                knocks = True
        if knocks:
            # After the others: what they said may end their hand-shakes, and make room.
            self._accept()
        if self._pending:
            self._serve_pending()

    def _serve_pending(self) -> None:
        """Serve clients that sent many frames in turn, a few of each, so that none waits for another's flood."""
        end_ns = time.monotonic_ns() + TURN_NS
        while self._pending and time.monotonic_ns() < end_ns:
            peer = next(iter(self._pending))
            del self._pending[peer]
            bodies = peer.bodies
            self._take(peer, [bodies.popleft() for _ in range(min(len(bodies), VISIT_FRAMES))])
            if bodies and peer.unread_bytes <= self._limits.unread_bytes_max:
                self._pending[peer] = None

    def wake(self) -> None:
        """End the current or the next turn's waiting; from any thread."""
        try:
            os.write(self._wake_out, b"\0")
        except BlockingIOError:
            return  # it is full of wake-ups already

    @property
    def signal_fd(self) -> int:
        """Where the interpreter writes the numbers of signals, so that a busy main thread delays none."""
        return self._wake_out

    def watch_readable(self, fd: int, call: Callable[[], None]) -> None:
        """Have `call` called once `fd` becomes readable."""

        def once() -> None:
            self._selector.unregister(fd)
            del self._watched[fd]
            call()

        self._watched[fd] = once
        self._selector.register(fd, _READ)

    def _woken(self) -> None:
        self.signals += [number for number in os.read(self._wake_in, READ_BYTES) if number]

    def due_ns(self) -> int:
        """When the next connection is over its time."""
        earliest = self.door.due_ns()
        if self._stuck:
            since = min(peer.unread_since_ns for peer in self._stuck)
            earliest = min(earliest, since + self._limits.unread_ms_max * 1_000_000)
        return earliest

    @property
    def has_unread(self) -> bool:
        """Whether replies wait for their clients to read."""
        return bool(self._stuck)

    def look_at_time(self, now_ns: int) -> None:
        """Drop connections that are over their time; accept again after a pause, or where there is room again."""
        self.door.look(now_ns)
        if now_ns < self.due_ns():
            return
        limits = self._limits
        for peer in self.door.expired(now_ns):
            error = ProtocolError(f"the hand-shake did not end within {limits.handshake_ms_max} ms")
            self.refuse_connection(peer, error)
        self.door.look(now_ns)
        for peer in list(self._stuck):
            if now_ns >= peer.unread_since_ns + limits.unread_ms_max * 1_000_000:
                log.warning("client %r (pid %d) does not read its replies: dropped", peer.name, peer.pid)
                self.drop(peer)

    # Connections

    def _accept(self) -> None:
        for sock in self.door.accept():
            sock.setblocking(False)
            peer = Peer(sock, self._limits.request_bytes_max, time.monotonic_ns())
            self.peers[peer.fd] = peer
            self.door.unfinished[peer] = None
            self._want(peer, _READ)
            refusal = self._too_many() or self._conversation.refusal()
            if refusal is not None:
                self.refuse_connection(peer, refusal)

    def _too_many(self) -> StorageError | None:
        most = self._limits.connections_max
        if len(self.peers) <= most:
            return None
        return OverloadedError(
            f"the worker has {most} connections, which is the limit",
            retry_after=self._limits.retry_after_ms_max / 1000,
            details={"bound": "connections"},
        )

    def refuse_connection(self, peer: Peer, error: StorageError) -> None:
        """Say why, and close."""
        if not peer.closed:
            self._conversation.count_error(error.code)
            failure = failure_of(CONNECTION_ID, error, self._limits.message_chars_max)
            self.queue(peer, frame(encode(failure)))
            self._flush(peer)
            self.drop(peer)

    def drop(self, peer: Peer) -> None:
        """Close a connection; its conversation forgets it."""
        if peer.closed:
            return
        peer.closed = True
        self._want(peer, 0)
        del self.peers[peer.fd]
        self.door.unfinished.pop(peer, None)
        self._stuck.pop(peer, None)
        self._touched.pop(peer, None)
        self._pending.pop(peer, None)
        peer.bodies.clear()
        peer.unread.clear()
        self._unread_bytes -= peer.unread_bytes
        peer.unread_bytes = 0
        self._note_partial(peer, 0)
        # A plain close: what was written before it still arrives.
        peer.socket.close()
        self.emptied_ns = time.monotonic_ns()
        self.door.end_pause()
        self._conversation.forget(peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = os.read(peer.fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(peer)
            return
        try:
            bodies = peer.frames.feed(data)
        except ProtocolError as error:
            self.refuse_connection(peer, error)
            return
        kept = peer.frames.bytes_kept
        if kept or peer.partial_bytes:
            self._note_partial(peer, kept)
        if len(bodies) <= VISIT_FRAMES:
            self._take(peer, bodies)
        else:
            peer.bodies.extend(bodies)
            self._pending[peer] = None

    def _note_partial(self, peer: Peer, kept: int) -> None:
        """Note how much of an unfinished frame is kept; where it is too much in all, let the slowest client go."""
        self._partial.pop(peer, None)
        self._partial_bytes += kept - peer.partial_bytes
        peer.partial_bytes = kept
        if kept:
            self._partial[peer] = None
        while self._partial_bytes > self._limits.partial_bytes_max and len(self._partial) > 1:
            slowest = next(iter(self._partial))
            log.warning("client %r (pid %d) keeps a frame unfinished: dropped", slowest.name, slowest.pid)
            self.drop(slowest)

    def _take(self, peer: Peer, bodies: list[bytes]) -> None:
        try:
            for body in bodies:
                self._conversation.take_frame(peer, body)
                if peer.closed:
                    return
            if peer.frames.error is not None and not peer.bodies:
                raise peer.frames.error
        except ProtocolError as error:
            self.refuse_connection(peer, error)

    def queue(self, peer: Peer, data: bytes) -> None:
        """Have frames written to a client with the next `flush`."""
        size = len(data)
        peer.unread.append(data)
        peer.unread_bytes += size
        self._unread_bytes += size
        self._touched[peer] = None
        if peer.unread_bytes > self._limits.unread_bytes_max and not peer.paused:
            self._conversation.pause(peer)

    def _drop_slowest(self) -> None:
        """Let the client go that leaves most unread of those that do not read: the memory is all clients'."""
        # Whatever is unread after a flush is its client's to read.
        peer = max(self._stuck, key=lambda each: each.unread_bytes)
        log.warning("client %r (pid %d) leaves too much unread: dropped", peer.name, peer.pid)
        self.drop(peer)

    def go_on(self, peer: Peer) -> None:
        """Have the downloads of a client go on with the next `flush`; it has made progress by now."""
        peer.unread_since_ns = time.monotonic_ns()
        self._touched[peer] = None
        if peer.spooled_bytes > self._limits.unread_bytes_max and not peer.paused:
            self._conversation.pause(peer)

    def flush(self) -> None:
        """Write what was queued since the last flush, one write for each client."""
        while self._touched:
            peer, _ = self._touched.popitem()
            if peer in self._stuck:
                # The selector says when its pipe takes more.
                self._after_flush(peer)
            else:
                self._flush(peer)
        while self._unread_bytes > self._limits.unread_total_bytes_max:
            self._drop_slowest()

    def _flush(self, peer: Peer) -> None:
        """Write what the pipe takes."""
        unread = peer.unread
        while unread:
            data = unread.popleft() if len(unread) == 1 else _first_of(unread)
            try:
                sent = os.write(peer.fd, data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.drop(peer)
                return
            if sent:
                peer.unread_bytes -= sent
                self._unread_bytes -= sent
                peer.unread_since_ns = 0
            if sent < len(data):
                unread.appendleft(memoryview(data)[sent:])
                break
        self._after_flush(peer)

    def _after_flush(self, peer: Peer) -> None:
        """Stop reading from a client that leaves too much unread; give one that reads its next part."""
        if peer.downloads and not peer.unread:
            self._conversation.send_next(peer)
        most = self._limits.unread_bytes_max
        too_much = peer.unread_bytes > most
        if peer.unread or peer.downloads:
            peer.unread_since_ns = peer.unread_since_ns or time.monotonic_ns()
            self._stuck[peer] = None
            # Where nothing is unread its credit is waited for.
            self._want(peer, _WRITE if too_much else _READ | _WRITE if peer.unread else _READ)
        elif peer.events != _READ:
            self._stuck.pop(peer, None)
            self._want(peer, _READ)
        if peer.paused and not too_much:
            if peer.bodies:
                self._pending[peer] = None
            if peer.spooled_bytes <= most:
                self._conversation.resume(peer)

    def _want(self, peer: Peer, events: int) -> None:
        if events == peer.events:
            return
        if not events:
            self._selector.unregister(peer.socket)
        elif not peer.events:
            self._selector.register(peer.socket, events, peer)
        else:
            self._selector.modify(peer.socket, events, peer)
        peer.events = events

    def close(self) -> None:
        """Close every connection and the listener."""
        for peer in list(self.peers.values()):
            self.drop(peer)
        self._selector.close()
        self.door.close()
        os.close(self._wake_in)
        os.close(self._wake_out)


def _first_of(unread: deque[bytes | memoryview]) -> bytes | memoryview:
    """Take as many frames as go well in one write."""
    parts = [unread.popleft()]
    size = len(parts[0])
    while unread and size + len(unread[0]) <= WRITE_BYTES_MAX:
        size += len(unread[0])
        parts.append(unread.popleft())
    return b"".join(parts) if len(parts) > 1 else parts[0]
