"""A request of an event loop's that waits for its answer."""

import asyncio

from ..protocol.envelope import Failure, OutgoingRequest, Reply
from ..protocol.errors import StorageError
from .chunks import Upload
from .waiter import NOT_WRITTEN, Answer


class AsyncWaiter:
    """One request in flight; one task waits at its `gate`.

    `held` is the request while it waits for its place, `frame` its bytes while the system has none of
    them, `end` the place in the connection's outgoing bytes behind it, `size` the bytes that it counts
    for. `answer` is None until there is one; `is_late` says that it did not come by `limit_ns`. `upload` are
    arguments that follow the request in chunks.
    """

    __slots__ = ("answer", "end", "frame", "gate", "held", "id", "is_late", "limit_ns", "size", "upload")

    def __init__(self, gate: asyncio.Future[None] | None = None) -> None:
        self.id = 0
        self.answer: Answer | None = None
        self.is_late = False
        self.limit_ns = 0
        self.end = NOT_WRITTEN
        self.size = 0
        self.frame = b""
        self.held: OutgoingRequest | None = None
        self.upload: Upload | None = None
        self.gate = gate

    @property
    def is_placed(self) -> bool:
        """Whether the whole request was given to the connection's outgoing bytes."""
        return self.held is None and (self.upload is None or self.upload.is_whole)

    def finish(self, answer: Reply | Failure | StorageError) -> None:
        """Set the answer and wake whoever waits for it."""
        self.answer = answer
        self.wake()

    def give_up(self, *, was_written: bool) -> None:
        """No answer came in time. What was not written by now reaches the worker too late to be begun."""
        if not was_written:
            self.end = NOT_WRITTEN
        self.is_late = True
        self.wake()

    def placed(self) -> None:
        """It has its place at last."""

    def wake(self) -> None:
        """Wake the task that waits; one that was cancelled meanwhile is awake already."""
        gate = self.gate
        if gate is not None and not gate.done():
            gate.set_result(None)
