"""Reaching the worker of a database by its path: the one that runs, or a shared one started for it."""

import random
import time

import msgspec

from .client.connection import Connection
from .client.dial import AddressDialer
from .ownership import Record, is_owned, read_record, try_start_lock
from .protocol.envelope import Role
from .protocol.errors import AlreadyOwnedError, WorkerUnavailableError
from .spawn import module_path, spawn
from .startup import Startup, grant_for

PAUSE_SECONDS_MAX = 0.02
ATTEMPT_SECONDS_FIRST = 0.25
"""How long the first hand-shake may take before it is asked again who holds the database; then twice that."""


class RecordDialer:
    """Dials the worker that holds a database, as its record says.

    Arguments: `real`, the database's real path; `role`, proven by the record's secret where
    `with_grant`; `name`, the client's name or None.
    """

    def __init__(self, real: str, role: Role, name: str | None, *, with_grant: bool) -> None:
        self.path = real
        self._role: Role = role
        self._name = name
        self._with_grant = with_grant

    def dial(self, deadline_ns: int) -> Connection:
        """A connection to it; `WorkerUnavailableError` where no worker runs, or none answers until then."""
        attempt_ns = round(ATTEMPT_SECONDS_FIRST * 1e9)
        while is_owned(self.path):
            now = time.monotonic_ns()
            if now >= deadline_ns:
                raise WorkerUnavailableError(
                    f"the worker that holds {self.path} did not answer in time",
                    outcome="not_committed",
                    details={"path": self.path},
                )
            connection = self._attempt(min(deadline_ns, now + attempt_ns))
            if connection is not None:
                return connection
            attempt_ns *= 2
            pause(deadline_ns)
        raise WorkerUnavailableError(
            f"no worker runs for {self.path}", outcome="not_committed", details={"path": self.path}
        )

    def _attempt(self, deadline_ns: int) -> Connection | None:
        record = read_record(self.path)
        if record is None:
            return None
        grant = grant_for(record.secret, self._role) if self._with_grant else b""
        try:
            connection = AddressDialer(record.address, self._role, grant, self._name).dial(deadline_ns)
        except WorkerUnavailableError:
            # It may have ended, or have been restarted elsewhere, while it was being dialled.
            return None
        if connection.welcome.worker == record.worker:
            return connection
        # Restarted a moment ago, or its directory was moved and another database's worker listens there.
        connection.close()
        return None


class PathDialer:
    """Dials the worker of a database, and starts a shared one where none runs.

    Arguments: `startup`, what a shared worker is told; `role` and `name`, those of the client.
    """

    def __init__(self, startup: Startup, role: Role, name: str | None) -> None:
        self._startup = startup
        self._running = RecordDialer(startup.path, role, name, with_grant=False)

    def dial(self, deadline_ns: int) -> Connection:
        """A connection; `deadline_ns` is on the monotonic clock.

        Raises the typed error of a worker that cannot start, `WorkerUnavailableError` where none answers
        until then, `DeadlineExceededError` where the one that is being started takes longer.
        """
        path = self._startup.path
        while True:
            if is_owned(path):
                try:
                    return self._running.dial(deadline_ns)
                except WorkerUnavailableError:
                    # Where it ended meanwhile, the next one can be started.
                    if is_owned(path):
                        raise
            elif not self._try_start(deadline_ns):
                pause(deadline_ns)
            if time.monotonic_ns() >= deadline_ns:
                raise WorkerUnavailableError(
                    f"no worker of {path} listened in time, and another process starts or supervises it",
                    outcome="not_committed",
                    details={"path": path},
                )

    def _try_start(self, deadline_ns: int) -> bool:
        """Whether a worker was started, by this process or just before by another."""
        path = self._startup.path
        lock = try_start_lock(path)
        if lock is None:
            return False
        try:
            if not is_owned(path):
                start_shared(self._startup, deadline_ns)
            return True
        except AlreadyOwnedError:
            # A worker that ends, or one that its starter did not wait for.
            return False
        finally:
            lock.release()


def start_shared(startup: Startup, deadline_ns: int) -> Record:
    """Start a worker that outlives this process; only the holder of the start lock may call it.

    Raises its typed error where it cannot start, and `DeadlineExceededError` where it has not answered at
    `deadline_ns` on the monotonic clock: then it goes on starting, for whoever comes next.
    """
    child = spawn(msgspec.structs.replace(startup, sys_path=module_path()))
    try:
        return child.answer(deadline_ns)
    finally:
        child.leave()


def pause(deadline_ns: int) -> None:
    """Wait a moment for another process, which has no way to wake this one."""
    left = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
    time.sleep(min(left, random.uniform(0.25, 1.0) * PAUSE_SECONDS_MAX))
