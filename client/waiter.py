"""A request that waits for its answer."""

import sys
from typing import TYPE_CHECKING, Final

from ..protocol.envelope import Failure, Reply
from ..protocol.errors import StorageError

if TYPE_CHECKING:
    from queue import SimpleQueue

Answer = Reply | Failure | StorageError
"""What ends a wait: the worker's word, or why there will be none."""

NOT_WRITTEN: Final = sys.maxsize

ALL_WRITTEN: Final = NOT_WRITTEN - 1
"""As many bytes as every request took that has its place among them: what is counted where nobody knows."""


class Waiter:
    """One request in flight; one thread at a time waits for it.

    `answer` is None until it ends. `end` is the place in the connection's outgoing bytes behind its
    frame, `size` the bytes of one that was left for later. `gate` wakes its thread where another one reads. `asleep` tells that its thread does nothing
    but wait, so that an exception from outside, a KeyboardInterrupt say, leaves no half-done work.
    """

    __slots__ = ("answer", "asleep", "end", "gate", "id", "size")

    def __init__(self) -> None:
        self.id = 0
        self.answer: Answer | None = None
        self.asleep = False
        self.end = NOT_WRITTEN
        self.size = 0
        self.gate: SimpleQueue[None] | None = None

    def finish(self, answer: Answer) -> None:
        """Set the answer and wake the thread that waits for it."""
        self.answer = answer
        # Looked at after the answer is set: its thread makes the gate before it looks for the answer.
        if self.gate is not None:
            self.gate.put(None)
