"""How a request or its transaction ends early: the watch on what runs, and what the writer raises for it."""

import time
from collections.abc import Callable

from . import exits
from .peer import Job
from .protocol.errors import (
    DeadlineExceededError,
    RequestCancelledError,
    StorageError,
    TransactionExpiredError,
    WorkerUnavailableError,
)

LOOK_NS = 5_000_000
"""How often `Watch.look` is asked."""


class TransactionGoneError(Exception):
    """SQLite has ended the group's transaction; `error` is why, and what its culprit is told."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class UndoneError(Exception):
    """A request left changes that only a savepoint could have undone; the group runs again."""


class FatalError(Exception):
    """The worker cannot go on; its supervisor starts another. `done` are requests that are answered first."""

    def __init__(self, message: str, done: list[Job], status: int = exits.FATAL) -> None:
        super().__init__(message)
        self.status = status
        self.done = done


class Watch:
    """What the progress handler asks: whether the running request must end, and why.

    `until_ns` is the worker's own end, 0 while none is in sight; `own_end_ns` that of work of its own, 0 while there
    is none.
    """

    def __init__(self) -> None:
        self.job: Job | None = None
        self.until_ns = 0
        self.own_end_ns = 0
        self.hostage_ns = 0
        self.started_ns = 0
        self.lease_ns = 0
        self.reason: StorageError | None = None
        self.hostage = False
        self.look: Callable[[], StorageError | None] = lambda: None
        """Asked from time to time what else ends a request that runs for long."""
        self._look_ns = 0

    def start(self, job: Job, now_ns: int, hostage_ns: int) -> None:
        """Watch a request that may run until its deadline, or until `hostage_ns` where that is not 0."""
        self.reason = None
        self.hostage = False
        self.hostage_ns = hostage_ns
        self.started_ns = now_ns
        self._look_ns = now_ns + LOOK_NS
        self.job = job

    def stop(self) -> bool:
        """SQLite's progress callback: true ends the running statement."""
        job = self.job
        if job is None:
            return 0 < self.own_end_ns <= time.monotonic_ns()
        now = time.monotonic_ns()
        if job.cancelled:
            self.reason = cancelled()
        elif now >= job.deadline_ns:
            self.reason = deadline_exceeded("execution")
        elif self.until_ns and now >= self.until_ns:
            self.reason = stopped()
        elif self.lease_ns and now >= self.lease_ns:
            self.reason = TransactionExpiredError("the lease of the interactive transaction ran out")
        elif self.hostage_ns and now >= self.hostage_ns:
            self.hostage = True
        elif now >= self._look_ns:
            self._look_ns = now + LOOK_NS
            self.reason = self.look()
            return self.reason is not None
        else:
            return False
        return True

    def end_reason(self) -> StorageError:
        """Why the statement was ended."""
        return self.reason or deadline_exceeded("execution")


def stopped() -> WorkerUnavailableError:
    """The answer to a request that the worker's end cut off."""
    return WorkerUnavailableError(
        "the worker stopped before the request was done; nothing was committed", outcome="not_committed"
    )


def cancelled() -> RequestCancelledError:
    """The answer to a request that its client cancelled."""
    return RequestCancelledError("the request was cancelled by its client; nothing was committed")


def deadline_exceeded(stage: str) -> DeadlineExceededError:
    """The answer to a request whose deadline passed in a stage that the worker knows."""
    return DeadlineExceededError(
        f"the deadline passed during {stage}; nothing was committed; allow more time",
        details={"stage": stage},
    )
