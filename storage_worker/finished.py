"""What reader threads have finished, on its way to whoever serves the pipes."""

import threading
from collections import deque
from collections.abc import Callable, Iterator

from .peer import Job
from .protocol.limits import KIB

LARGE_ANSWER_BYTES = 64 * KIB

SENT_SECONDS_MAX = 1.0
"""How long a reader thread waits for its answer to be sent: for ever it would when the worker ends."""


class Finished:
    """Answered requests of reader threads. Arguments: `wake`, which has somebody take them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: deque[tuple[Job, threading.Event | None]] = deque()
        self._taken: list[threading.Event] = []

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def hand_in(self, job: Job) -> None:
        """Take a request that a reader thread has finished; from any thread.

        Returns once a large answer is on its way: before that nobody knows whether its client reads, and a
        thread that went on would fill the memory with answers for one that does not.
        """
        sent = threading.Event() if _is_large(job) else None
        self._jobs.append((job, sent))
        self._wake()
        if sent is not None:
            sent.wait(SENT_SECONDS_MAX)

    def take(self) -> Iterator[Job]:
        """The requests that were handed in."""
        while self._jobs:
            job, sent = self._jobs.popleft()
            if sent is not None:
                self._taken.append(sent)
            yield job

    def sent(self) -> None:
        """What was taken is on its way."""
        while self._taken:
            self._taken.pop().set()


def _is_large(job: Job) -> bool:
    return len(job.frame) > LARGE_ANSWER_BYTES or (job.large is not None and job.large.result is not None)
