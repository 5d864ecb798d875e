"""Background work in slices, each short and in its own transaction, while no foreground request waits."""

import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

from .admission import Lane
from .database.connection import Backup, Database
from .database.opening import OPTIMIZE
from .execution import decode, fail, succeed
from .filesystem import SIDE_DIRECTORY_SUFFIX
from .peer import Job
from .protocol.errors import DatabasePathError, OverloadedError, StorageError
from .protocol.limits import Limits
from .protocol.status import BackgroundTask
from .watch import stopped
from .writer import Writer

log = logging.getLogger(__name__)

OPTIMIZE_EVERY_NS = 3600 * 10**9
TRIM_EVERY_NS = 10 * 10**9
SIDE_SUFFIXES = ("-journal", "-wal", "-shm")
BACKUP_PAGES = 64
"""Pages that one step of a backup copies; a slice makes as many steps as fit."""


class Task(Protocol):
    """Something to be done in slices."""

    status: BackgroundTask

    @property
    def ended(self) -> bool:
        """Whether it wants no slice any more and is to be forgotten."""
        ...

    def due_ns(self) -> int:
        """When it wants its next slice, on the monotonic clock; 0 for never."""
        ...

    def run_slice(self, until_ns: int) -> list[Job]:
        """Work until then, but on at least one unit; requests that have an answer now."""
        ...

    def abandon(self) -> list[Job]:
        """Leave nothing half-done behind, since the worker ends; requests that have an answer now."""
        ...


class Background:
    """Gives slices to tasks in turn."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ready_since_ns = 0
        self._ran_ns: dict[Task, int] = {}
        self.tasks: list[Task] = []

    def add(self, task: Task) -> None:
        """Add a task; there must be room for it."""
        self.tasks.append(task)

    def check_room(self) -> None:
        """Raise `OverloadedError` where there are as many tasks as there may be."""
        if len(self.tasks) >= self._limits.background_tasks_max:
            raise OverloadedError(
                f"{len(self.tasks)} background tasks run, which is the limit; repeat later",
                retry_after=self._limits.retry_after_ms_max / 1000,
                details={"bound": "background_tasks"},
            )

    def statuses(self, now_ns: int) -> list[BackgroundTask]:
        """What the tasks say of themselves."""
        for task in self.tasks:
            ran_ns = self._ran_ns.get(task)
            task.status.last_run_ago_ms = None if ran_ns is None else (now_ns - ran_ns) // 1_000_000
        return [task.status for task in self.tasks]

    def due_ns(self) -> int:
        """When the first task wants a slice; 0 for never."""
        return min((due for task in self.tasks if (due := task.due_ns())), default=0)

    def run(self, now_ns: int, *, foreground_waits: bool) -> list[Job]:
        """Run one slice of the task that is due and had no slice for longest, if there is one."""
        due = [task for task in self.tasks if 0 < task.due_ns() <= now_ns]
        if not due:
            self._ready_since_ns = 0
            return []
        self._ready_since_ns = self._ready_since_ns or now_ns
        starved_ns = now_ns - self._ready_since_ns
        if foreground_waits and starved_ns < self._limits.background_starved_ms_max * 1_000_000:
            return []
        self._ready_since_ns = 0
        task = min(due, key=lambda each: self._ran_ns.get(each, 0))
        status = task.status
        status.state = "running"
        failed = False
        try:
            done = task.run_slice(now_ns + self._limits.background_slice_ms_max * 1_000_000)
        except StorageError as error:
            status.last_error, failed, done = error.message, True, []
        ended_ns = self._ran_ns[task] = time.monotonic_ns()
        waits = 0 < task.due_ns() <= ended_ns
        status.state = "failed" if failed else "waiting" if waits else "idle"
        status.slices += 1
        status.longest_slice_ms = max(status.longest_slice_ms, (ended_ns - now_ns) / 1e6)
        if task.ended:
            self.tasks.remove(task)
            del self._ran_ns[task]
        return done

    def abandon(self) -> list[Job]:
        """End all tasks where they stand; the requests that have an answer now."""
        return [job for task in self.tasks for job in task.abandon()]


class TrimReceipts:
    """Deletes receipts that are over the age or the count."""

    ended = False

    def __init__(self, writer: Writer, limits: Limits) -> None:
        self._writer = writer
        self._rows = limits.receipts_trim_rows
        self._due_ns = time.monotonic_ns() + TRIM_EVERY_NS
        self.status = BackgroundTask(name="receipts")

    def due_ns(self) -> int:
        """At intervals, or at once while there are more."""
        return self._due_ns

    def run_slice(self, until_ns: int) -> list[Job]:
        """Trim in one transaction."""
        started = time.monotonic_ns()
        self._due_ns = started + TRIM_EVERY_NS
        if self._writer.receipts.needs_trim():
            trimmed = self._writer.receipts.status.trimmed
            self._writer.run_own(lambda: self._trim(until_ns))
            self.status.done_units += self._writer.receipts.status.trimmed - trimmed
        return []

    def _trim(self, until_ns: int) -> None:
        while self._writer.receipts.trim(self._rows) == self._rows:
            if time.monotonic_ns() >= until_ns:
                self._due_ns = time.monotonic_ns()
                return

    def abandon(self) -> list[Job]:
        """There is nothing to undo."""
        return []


class Optimize:
    """Keeps the statistics of SQLite's query planner current."""

    ended = False

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._due_ns = time.monotonic_ns() + OPTIMIZE_EVERY_NS
        self.status = BackgroundTask(name="optimize")

    def due_ns(self) -> int:
        """At intervals."""
        return self._due_ns

    def run_slice(self, until_ns: int) -> list[Job]:
        """One run, of as many rows as the connection's `analysis_limit` says. One that fails is repeated soon."""
        self._due_ns = until_ns + TRIM_EVERY_NS
        if not self._writer.run_own(self._optimize):
            return []
        self._due_ns = until_ns + OPTIMIZE_EVERY_NS
        self.status.done_units += 1
        return []

    def _optimize(self) -> None:
        self._writer.database.own(OPTIMIZE)

    def abandon(self) -> list[Job]:
        """There is nothing to undo."""
        return []


class CopyDatabase:
    """A backup that a client asked for; its request is answered when the copy is whole.

    Meanwhile the request stands in the lane `copies`, where its deadline, a cancel or the end of its
    connection finds it.
    """

    def __init__(
        self, job: Job, writer: Writer, copies: Lane, open_copy: Callable[[str], Database], limits: Limits
    ) -> None:
        self._job = job
        self._copies = copies
        self._limits = limits
        self.ended = False
        self._path = _checked_target(str(decode(job, limits).target), writer.database.path)
        self._target = open_copy(self._path)
        self._backup: Backup = self._target.backup_from(writer.database)
        self._page_bytes = int(writer.database.own("pragma page_size")[0][0])
        self.status = BackgroundTask(name="backup", state="waiting")
        copies.add(job)

    def due_ns(self) -> int:
        """At once until it is done."""
        return 0 if self.ended else 1

    def run_slice(self, until_ns: int) -> list[Job]:
        """Copy some pages, unless its client had another answer meanwhile."""
        if self._job.answered:
            self._end(keep=False)
            return []
        try:
            whole = self._backup.step(BACKUP_PAGES)
            while not whole and time.monotonic_ns() < until_ns:
                whole = self._backup.step(BACKUP_PAGES)
        except StorageError as error:
            return self._fail(error)
        left, total = self._backup.pages
        self.status.done_units, self.status.total_units = total - left, total
        if not whole:
            return []
        still_wanted = self._copies.remove(self._job)
        self._end(keep=still_wanted)
        if not still_wanted:
            return []
        succeed(self._job, total * self._page_bytes)
        return [self._job]

    def abandon(self) -> list[Job]:
        """Remove what is there of the copy."""
        return [] if self.ended else self._fail(stopped())

    def _fail(self, error: StorageError) -> list[Job]:
        still_wanted = self._copies.remove(self._job)
        self._end(keep=False)
        if not still_wanted:
            return []
        fail(self._job, error, self._limits, "not_committed")
        return [self._job]

    def _end(self, *, keep: bool) -> None:
        self.ended = True
        self._backup.finish()
        self._target.close()
        if keep:
            return
        # What is not a whole copy must not lie about as one.
        for suffix in ("", *SIDE_SUFFIXES):
            try:
                os.unlink(self._path + suffix)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("a part of a copy stays behind at %s: %s", self._path + suffix, error)


def _checked_target(path: str, database_path: str) -> str:
    """The path for a copy; `DatabasePathError` where it is one that must not be written to."""
    if not os.path.isabs(path) or "\0" in path:
        raise DatabasePathError(
            f"{path!r} is no absolute path; the worker runs elsewhere than its client", details={"file": path}
        )
    real = os.path.realpath(path)
    own = [database_path + suffix for suffix in ("", *SIDE_SUFFIXES)]
    if real in own or real.startswith(f"{database_path}{SIDE_DIRECTORY_SUFFIX}/"):
        raise DatabasePathError(
            f"{path} is a file of the database itself; name another", details={"file": path}
        )
    return path
