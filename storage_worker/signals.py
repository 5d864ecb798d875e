"""What a process does at a signal, for as long as a block of it runs."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_call(
    handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals
) -> Iterator[None]:
    """Have these signals call `handler` in the main thread during the block; it does what it did before afterwards."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)
