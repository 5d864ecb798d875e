"""A connection's life as a table: hand-shake, open, draining, closed."""

import enum

from .envelope import (
    PROTOCOL_VERSION,
    Cancel,
    Chunk,
    Credit,
    Failure,
    FromClient,
    FromWorker,
    Goodbye,
    Hello,
    Reply,
    Request,
    Welcome,
)
from .errors import ProtocolError


class State(enum.Enum):
    """Where a connection is. In `draining` the worker takes nothing new and answers what it has."""

    HANDSHAKE = enum.auto()
    GREETED = enum.auto()
    OPEN = enum.auto()
    DRAINING = enum.auto()
    CLOSED = enum.auto()


_H, _G, _O, _D, _C = State

# Both ends see the same envelopes in the same order, so one table serves them. Three rules hold for
# it: Hello comes once and first; Welcome comes once and answers it; after a client's own Goodbye
# nothing of it follows. What is not in the table is a protocol error.
FROM_CLIENT: dict[tuple[State, type[FromClient]], State] = {
    (_H, Hello): _G,
    (_O, Request): _O,
    (_O, Cancel): _O,
    (_O, Chunk): _O,
    (_O, Credit): _O,
    (_O, Goodbye): _C,
    (_D, Request): _D,  # sent before the client could know; the worker refuses it by its own Failure
    (_D, Cancel): _D,
    (_D, Chunk): _D,
    (_D, Credit): _D,
    (_D, Goodbye): _C,
}
FROM_WORKER: dict[tuple[State, type[FromWorker]], State] = {
    (_H, Failure): _C,  # refused before a Hello was read: too many connections, another user
    (_H, Goodbye): _C,
    (_G, Welcome): _O,
    (_G, Failure): _C,
    (_G, Goodbye): _C,
    (_O, Reply): _O,
    (_O, Failure): _O,
    (_O, Chunk): _O,
    (_O, Credit): _O,
    (_O, Goodbye): _D,
    (_D, Reply): _D,
    (_D, Failure): _D,
    (_D, Chunk): _D,
    (_D, Credit): _D,
}


class Session:
    """The state of one connection, moved by what each side sends."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.HANDSHAKE

    def from_client(self, envelope: FromClient) -> None:
        """Note an envelope of the client; `ProtocolError` where it may not come now."""
        self.state = _next(FROM_CLIENT.get((self.state, type(envelope))), self.state, envelope)

    def from_worker(self, envelope: FromWorker) -> None:
        """Note an envelope of the worker; `ProtocolError` where it may not come now."""
        self.state = _next(FROM_WORKER.get((self.state, type(envelope))), self.state, envelope)


def _next(found: State | None, state: State, envelope: object) -> State:
    if found is None:
        raise ProtocolError(f"{type(envelope).__name__} may not come in state {state.name.lower()}")
    return found


def check_version(ours: int, theirs: int) -> None:
    """Raise `ProtocolError` naming both versions where they differ."""
    if ours != theirs:
        raise ProtocolError(
            f"the client speaks protocol version {theirs}, the worker {ours}; use the same release",
            outcome="not_committed",
            details={"client_version": theirs, "worker_version": ours},
        )


def check_hello(hello: Hello) -> None:
    """Refuse a client whose protocol version the worker does not speak."""
    check_version(PROTOCOL_VERSION, hello.version)


def check_welcome(welcome: Welcome, sent_ns: int, received_ns: int) -> None:
    """Refuse a worker of another version, or one whose monotonic clock is not the client's.

    `sent_ns` and `received_ns` are the client's monotonic clock at Hello and Welcome. Deadlines are
    absolute on that clock, so a worker in another time namespace would misread every one of them.
    """
    check_version(welcome.version, PROTOCOL_VERSION)
    if not sent_ns <= welcome.clock_ns <= received_ns:
        raise ProtocolError(
            "the worker's monotonic clock is not this process's: it runs in another time namespace "
            "or on another machine; connect from the same machine and namespace",
            outcome="not_committed",
            details={"sent_ns": sent_ns, "worker_ns": welcome.clock_ns, "received_ns": received_ns},
        )
