"""Keeping one worker running for the host that owns it: start, restart with back-off, stop."""

import copy
import enum
import os
import signal
import threading
import time
from collections import deque

import msgspec

from . import exits
from .client.daemon_threads import start_daemon
from .lockfile import LockFile
from .ownership import Record, already_owned, is_owned, read_record, try_start_lock
from .processes import started_of
from .protocol.errors import (
    CrashLoopError,
    DeadlineExceededError,
    StorageError,
    StorageReplacedError,
    WorkerUnavailableError,
)
from .spawn import Child, how_it_ended, last_words, module_path, spawn
from .startup import Startup

START_LOCK_PAUSE_SECONDS = 0.01

ENDED_SECONDS_MAX = 5.0
"""How long the system may take to end a process that was killed."""


class State(enum.Enum):
    """Where the supervised worker is. From `STOPPED`, `FAILED` and `CRASHED` nothing leads on."""

    NEW = enum.auto()
    STARTING = enum.auto()
    RUNNING = enum.auto()
    STOPPED = enum.auto()
    FAILED = enum.auto()
    CRASHED = enum.auto()


_OVER = frozenset({State.STOPPED, State.FAILED, State.CRASHED})


class Supervisor:
    """One worker of this process, kept running by a thread that waits for its end.

    `startup` tells the worker how to run; its owner is filled in here. The thread holds the database's
    start lock all the time, so that nobody else starts a worker between two of its own, and it keeps no
    process from exiting. In a forked child there is no such thread: the worker is the parent's.
    """

    def __init__(self, startup: Startup) -> None:
        self._startup = startup
        self._limits = startup.limits
        self._pid = os.getpid()
        self._deaths: deque[float] = deque()
        self._changed = threading.Condition()
        # What follows changes under the condition only.
        self._state = State.NEW
        self._stopping = False
        self._child: Child | None = None
        self._record: Record | None = None
        self._error: StorageError | None = None
        self._generation = 0

    @property
    def in_host(self) -> bool:
        """Whether this process supervises the worker, or may start to; not so in a forked child."""
        return self._state is State.NEW or self._pid == os.getpid()

    @property
    def generation(self) -> int:
        """How many workers have listened so far."""
        return self._generation

    @property
    def record(self) -> Record | None:
        """What the running worker said of itself; None while none listens."""
        return self._record

    def start(self, deadline_ns: int) -> None:
        """Start the worker and wait until it listens; `deadline_ns` is on the monotonic clock.

        The process that calls it is the worker's owner. Raises the typed error of whatever keeps it from that: `AlreadyOwnedError`, `DatabasePathError`,
        `SchemaError`, `WorkerUnavailableError`, `DeadlineExceededError` and more. Then nothing is left.
        """
        with self._changed:
            if self._state is State.NEW:
                self._pid = os.getpid()
                name = f"supervisor of {self._startup.path}"
                start_daemon(name, self._run, deadline_ns)
                self._state = State.STARTING
            try:
                # The thread keeps to the deadline, and then sees to it that the process ends.
                seconds = _seconds_to(deadline_ns) + ENDED_SECONDS_MAX
                self._changed.wait_for(lambda: self._state is not State.STARTING, seconds)
                if self._state is not State.RUNNING:
                    raise self._why_not()
            except BaseException:
                self._stopping = True
                self._changed.notify_all()
                self._send_signal(signal.SIGKILL)
                raise

    def wait_running(self, deadline_ns: int, after: int = 0) -> int:
        """Wait for a worker that listens, of a later generation than `after`; return its generation.

        Raises `CrashLoopError` where it is not restarted any more, `WorkerUnavailableError` where it was
        stopped, was never started, or does not listen until `deadline_ns` on the monotonic clock.
        """
        with self._changed:

            def decided() -> bool:
                if self._state is State.RUNNING:
                    return self._generation > after
                return self._state is not State.STARTING

            if not self._changed.wait_for(decided, _seconds_to(deadline_ns)):
                raise WorkerUnavailableError(
                    f"the worker of {self._startup.path} ended and was not running again in time",
                    outcome="not_committed",
                    details={"path": self._startup.path},
                )
            if self._state is not State.RUNNING:
                raise self._why_not()
            return self._generation

    def wait_over(self, seconds: float | None) -> bool:
        """Whether the worker is over, waited for at the most `seconds`; without them there is no bound.

        One that was never started is over. Raises `CrashLoopError` where it died too often.
        """
        with self._changed:
            over = self._changed.wait_for(lambda: self._state is State.NEW or self._is_over(), seconds)
            if self._state is State.CRASHED:
                raise self._why_not()
            return over

    def stop(self, grace_seconds: float) -> None:
        """End the worker for good: by itself, or killed where it still runs after `grace_seconds`.

        Any thread may call it, again and again, also while a restart is going on. Raises
        `WorkerUnavailableError` where even the killed process does not end.
        """
        with self._changed:
            if self._state is State.NEW:
                self._state = State.STOPPED
            self._stopping = True
            self._changed.notify_all()
            self._send_signal(signal.SIGTERM)
            if self._changed.wait_for(self._is_over, grace_seconds):
                return
            self._send_signal(signal.SIGKILL)
            if not self._changed.wait_for(self._is_over, ENDED_SECONDS_MAX):
                raise WorkerUnavailableError(
                    f"the worker of {self._startup.path} was killed, but the system has not ended it",
                    details={"path": self._startup.path},
                )

    def _is_over(self) -> bool:
        return self._state in _OVER

    def _send_signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.send_signal(number)

    def _why_not(self) -> StorageError:
        """Why no worker listens. Each caller gets an error of its own to tie a traceback to."""
        path = self._startup.path
        if self._state is State.STARTING:
            return DeadlineExceededError(
                f"the worker of {path} did not listen in time", details={"stage": "start", "path": path}
            )
        if self._error is not None:
            return copy.copy(self._error)
        what = "has not been started" if self._state is State.NEW else "was stopped; make a new one"
        error = WorkerUnavailableError(f"the worker of {path} {what}", outcome="not_committed")
        error.retryable = False
        return error

    def _run(self, deadline_ns: int) -> None:
        lock: LockFile | None = None
        over = State.STOPPED
        error: StorageError | None = None
        try:
            lock = self._take_start_lock(deadline_ns)
            child: Child | None = self._start_one(deadline_ns)
            while child is not None:
                status = child.wait()
                if status == exits.STOPPED:
                    return
                if status == exits.REPLACED:
                    raise StorageReplacedError(
                        f"the files of {self._startup.path} were deleted, renamed or replaced while they were open;"
                        " no other worker is started, since it would serve other files",
                        details={"file": self._startup.path},
                    )
                child = self._restart(f"it {how_it_ended(status or 0)}; {last_words(self._startup.path)}")
        except CrashLoopError as found:
            over, error = State.CRASHED, found
        except StorageError as found:
            over, error = State.FAILED, found
        except BaseException as found:
            over = State.FAILED
            error = WorkerUnavailableError(f"the supervisor of {self._startup.path} failed: {found!r}")
            raise
        finally:
            self._end(lock, over, error)

    def _end(self, lock: LockFile | None, over: State, error: StorageError | None) -> None:
        if self._child is not None:
            self._child.end(0)
        if lock is not None:
            lock.release()
        with self._changed:
            # What a worker that is being stopped says at its end is no error.
            stopped = self._stopping and over is not State.CRASHED
            self._state, self._error = (State.STOPPED, None) if stopped else (over, error)
            self._child = self._record = None
            self._changed.notify_all()

    def _take_start_lock(self, deadline_ns: int) -> LockFile:
        path = self._startup.path
        while True:
            lock = try_start_lock(path)
            owned, late = is_owned(path), time.monotonic_ns() >= deadline_ns
            if lock is not None and not owned:
                return lock
            if lock is not None:
                lock.release()
            # An owner that has just started is named once it has said who it is.
            if late or (owned and read_record(path) is not None):
                raise already_owned(path)
            # flock waits without a bound or not at all.
            if self._wait_stopping(START_LOCK_PAUSE_SECONDS):
                raise WorkerUnavailableError(f"the start of the worker of {path} was called off")

    def _start_one(self, deadline_ns: int) -> Child:
        child = spawn(
            msgspec.structs.replace(
                self._startup,
                owner_pid=self._pid,
                # Read anew for each start: a step of the system's clock moves it.
                owner_started=started_of(self._pid),
                sys_path=module_path(),
            )
        )
        with self._changed:
            self._child = child
            if self._stopping:
                child.send_signal(signal.SIGTERM)
        record = child.answer(deadline_ns)
        with self._changed:
            self._record = record
            self._state = State.RUNNING
            self._generation += 1
            self._changed.notify_all()
        return child

    def _restart(self, how: str) -> Child | None:
        """The next worker after one that ended; None where it was to end."""
        while True:
            with self._changed:
                if self._stopping:
                    return None
                self._state, self._record = State.STARTING, None
                self._changed.notify_all()
            if self._wait_stopping(self._note_death(how)):
                return None
            try:
                return self._start_one(time.monotonic_ns() + self._limits.start_ms_max * 1_000_000)
            except StorageError as error:
                if self._child is not None:
                    self._child.end(0)
                how = error.message

    def _note_death(self, how: str) -> float:
        """Seconds until the next start; `CrashLoopError` where there have been too many deaths."""
        limits, now = self._limits, time.monotonic()
        window = limits.crash_loop_window_ms / 1000
        self._deaths.append(now)
        while self._deaths[0] < now - window:
            self._deaths.popleft()
        count = len(self._deaths)
        if count >= limits.crash_loop_deaths:
            path = self._startup.path
            raise CrashLoopError(
                f"the worker of {path} died {count} times within {window:g} s and is not restarted any more;"
                f" the last time {how}",
                details={"path": path, "deaths": count, "window_ms": limits.crash_loop_window_ms},
            )
        # The bound on the exponent keeps the number small where very many deaths are allowed.
        backoff_ms = limits.restart_backoff_ms_min << min(count - 1, 32)
        return min(backoff_ms, limits.restart_backoff_ms_max) / 1000

    def _wait_stopping(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, seconds)


def _seconds_to(deadline_ns: int) -> float:
    return max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
