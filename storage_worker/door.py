"""The door: new connections, as many at once as may be in their hand-shakes; the others wait in the backlog."""

import logging
import selectors
import socket
import time
from collections.abc import Iterator

from .address import same_user
from .admission import NEVER_NS
from .peer import Peer
from .protocol.limits import Limits

log = logging.getLogger(__name__)

ACCEPTS_MAX = 64
"""Connections accepted in one turn."""

ACCEPT_PAUSE_NS = 1_000_000_000
"""How long nobody is accepted for want of a descriptor, unless a connection ends before."""


class Door:
    """One listening socket. `unfinished` are connections whose hand-shake has not ended, the oldest first."""

    def __init__(self, selector: selectors.BaseSelector, limits: Limits) -> None:
        self.unfinished: dict[Peer, None] = {}
        self._selector = selector
        self._limits = limits
        self._listener: socket.socket | None = None
        self._is_open = False
        self._again_ns = 0

    def listen_on(self, listener: socket.socket) -> None:
        """Take connections from a listening socket."""
        listener.setblocking(False)
        self._listener = listener
        self._open()

    def accept(self) -> Iterator[socket.socket]:
        """The connections of this user's processes that wait, while there is room for their hand-shakes."""
        assert self._listener is not None
        for _ in range(ACCEPTS_MAX):
            if not self._has_room:
                break
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # No descriptor is left. The backlog keeps them; a listener that stays readable would keep us busy.
                log.warning("cannot accept a connection: %s", error)
                self._again_ns = time.monotonic_ns() + ACCEPT_PAUSE_NS
                break
            if same_user(sock):
                yield sock
            else:
                sock.close()
        else:
            return  # more may wait; the others come first
        self._shut()

    @property
    def _has_room(self) -> bool:
        return len(self.unfinished) < self._limits.handshakes_unfinished_max

    def due_ns(self) -> int:
        """When there is something to do: a hand-shake is over its time, or the door opens again."""
        first = next(iter(self.unfinished), None)
        expiry_ns = NEVER_NS if first is None else self._expiry_ns(first)
        return min(expiry_ns, self._again_ns or NEVER_NS)

    def expired(self, now_ns: int) -> list[Peer]:
        """The connections whose hand-shake is over its time."""
        return [peer for peer in self.unfinished if now_ns >= self._expiry_ns(peer)]

    def _expiry_ns(self, peer: Peer) -> int:
        return peer.connected_ns + self._limits.handshake_ms_max * 1_000_000

    def look(self, now_ns: int) -> None:
        """Open again where there is room now, and the pause is over."""
        if not self._is_open and self._listener is not None and self._has_room and now_ns >= self._again_ns:
            self._again_ns = 0
            self._open()

    def end_pause(self) -> None:
        """A connection has ended: its descriptor is free."""
        if self._again_ns:
            self._again_ns = time.monotonic_ns()

    def _open(self) -> None:
        assert self._listener is not None
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_open = True

    def _shut(self) -> None:
        if self._is_open and self._listener is not None:
            self._selector.unregister(self._listener)
            self._is_open = False

    def close(self) -> None:
        """Close the listening socket."""
        if self._listener is not None:
            self._listener.close()
