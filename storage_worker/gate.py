"""The questions that intake asks the worker's other parts about a request."""

from collections.abc import Callable

from .admission import Lane
from .peer import Job, Peer
from .protocol.envelope import Role, Welcome
from .protocol.errors import StorageError


class Gate:
    """What decides about requests beyond their bounds; the worker's other parts set it up."""

    def __init__(self) -> None:
        self.refuse_writes: Callable[[int], StorageError | None] = lambda _: None
        self.place_in_transaction: Callable[[Job], Lane | None] = lambda _: None
        self.control: Callable[[Job], None] = lambda _: None
        self.granted: Callable[[Role, bytes], Role] = lambda _, __: "read"
        self.welcome: Callable[[Peer], Welcome] | None = None
        self.writer_is_blocked: Callable[[], bool] = lambda: False
        self.wake_readers: Callable[[], None] = lambda: None
