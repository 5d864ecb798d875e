"""A forked child that does nothing but hold what it inherited."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sleeping_child() -> Iterator[int]:
    """Its process id; it is gone afterwards."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.pause()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
