"""Group commit: many clients' writes in one transaction, each in its own savepoint.

The writer never guesses: after every error it looks whether SQLite still has the transaction. Where it
has not, nobody's work was committed; the culprit gets its failure and the others run again.
"""

import logging
import random
import time
from collections.abc import Callable

from . import exits
from .admission import Lane
from .database.connection import Database
from .database.faults import Aborted
from .database.files import OpenFiles
from .execution import as_typed, fail
from .interactive import Interactive
from .peer import Job
from .protocol.errors import BusyError, StorageError, StorageReplacedError
from .protocol.limits import Limits
from .protocol.statements import BEGIN
from .protocol.status import WriterStatus
from .receipts import Receipts
from .recovery import FENCE, Recovery, Reopen
from .runner import Runner
from .watch import FatalError, TransactionGoneError, UndoneError, cancelled, deadline_exceeded

log = logging.getLogger(__name__)

BOUND_NS = 100_000_000
"""How long a bound of the database's growth holds before it is taken anew."""


class Writer:
    """The one connection that writes. Used by the serving thread only."""

    def __init__(
        self,
        lane: Lane,
        reopen: Reopen,
        receipts: Callable[[Database], Receipts],
        limits: Limits,
    ) -> None:
        self.lane = lane
        self._limits = limits
        self.status = WriterStatus()
        self.refuse: StorageError | None = None
        """Why nothing is written any more: the file is damaged."""
        self.blocked_until_ns = 0
        self._bound_ns = 0
        self.database, self.files = reopen()
        self.receipts = receipts(self.database)
        self.runner = Runner(self.database, self.receipts, limits)
        self.watch = self.runner.watch
        self.recovery = Recovery(self, reopen, limits)
        self.interactive = Interactive(self, limits)
        self.special: dict[str, Callable[[Job], list[Job]]] = {BEGIN.name: self.interactive.open}
        """Operations that take the begun transaction over instead of running in a group."""

    def use(self, database: Database, files: OpenFiles) -> None:
        """Go on with a fresh connection."""
        self.database, self.files = database, files
        self._bound_ns = 0
        self.receipts.database = database
        self.runner.use(database)

    @property
    def blocked(self) -> bool:
        """Whether a foreign process holds SQLite's lock."""
        return self.blocked_until_ns > 0

    def run_group(self) -> list[Job]:
        """Run and commit one group of what is ready; the requests that have an answer now.

        One that must run alone makes a group of itself. Raises `FatalError` where the worker must end.
        """
        if self.refuse is not None:
            return self._refuse_all(self.refuse)
        done: list[Job] = []
        try:
            if not self.try_begin(time.monotonic_ns()):
                return done
        except StorageError as error:
            # One request hears of it, so that no loop is without an end.
            job = self.lane.take()
            if job is not None:
                fail(job, error, self._limits, "not_committed")
                done.append(job)
            return done
        try:
            self._run_begun(done)
        except FatalError as fatal:
            fatal.done[:0] = done
            raise
        return done

    def _refuse_all(self, error: StorageError) -> list[Job]:
        waiting = self.lane.remove_where(lambda _: True)
        for job in waiting:
            fail(job, error, self._limits)
        return waiting

    def try_begin(self, now_ns: int) -> bool:
        """Begin a transaction; where a foreign process holds the lock, note when to try again.

        Raises `StorageError` where it cannot be begun at all.
        """
        if self.recovery.fence_owed:
            self.recovery.pay_fence()
        try:
            self.database.begin()
        except BusyError:
            self.status.busy_retries += 1
            wait_ms = random.uniform(self._limits.busy_retry_ms_min, self._limits.busy_retry_ms_max)
            self.blocked_until_ns = now_ns + int(wait_ms * 1e6)
            return False
        except StorageError as error:
            self.database.rollback()
            self.recovery.after(error)
            raise
        self.blocked_until_ns = 0
        if now_ns >= self._bound_ns:
            # The progress handler looks too seldom at statements with large values; SQLite itself keeps this bound.
            self._bound_ns = now_ns + BOUND_NS
            self.database.bound_growth(self.runner.growth.room_bytes())
        return True

    def _run_begun(self, done: list[Job]) -> None:
        group: list[Job] = []
        try:
            special = self._fill(group, done)
        except TransactionGoneError as gone:
            self._transaction_gone(group, gone.error, done)
        except UndoneError:
            group[-1].needs_savepoint = True
            self._undo(group)
        else:
            done += self.special[group[0].served.name](group[0]) if special else self.commit(group)

    def _fill(self, group: list[Job], done: list[Job]) -> bool:
        """Take and run what is ready; true where the group is one request for `special`."""
        limits = self._limits
        now = time.monotonic_ns()
        end_ns = now + limits.group_work_ms_max * 1_000_000
        size = 0
        take, run, special = self.lane.take, self.runner.run, self.special
        requests_max, bytes_max, calls_max = (
            limits.group_requests_max,
            limits.group_bytes_max,
            limits.after_commit_calls_max,
        )
        while len(group) < requests_max and size < bytes_max:
            job = take(not group)
            if job is None:
                return False
            if job.cancelled or now >= job.deadline_ns:
                fail(job, cancelled() if job.cancelled else deadline_exceeded("waiting"), limits)
                done.append(job)
                continue
            group.append(job)
            if job.served.name in special:
                return True
            if not run(job, now, calls_max, len(group) > 1):
                # It ran too long beside others: they commit now, it runs alone after them.
                group.pop()
                job.alone, job.arguments = True, None
                self.lane.put_back([job])
                return False
            size += job.size + len(job.frame)
            now = time.monotonic_ns()
            if job.alone or now >= end_ns:
                return False
        return False

    def _transaction_gone(self, group: list[Job], error: BaseException, done: list[Job]) -> None:
        """The last of the group ended its transaction: it gets its answer, the others run again."""
        culprit = group[-1]
        if isinstance(error, Aborted):
            if self.watch.hostage:
                culprit.alone = True
                self._undo(group)
                return
            error = self.watch.end_reason()
        elif isinstance(error, BusyError) and culprit.replays <= self._limits.replays_max:
            self._undo(group)
            return
        self._undo(group[:-1])
        typed = as_typed(error, culprit.served.name)
        fail(culprit, self.runner.growth.explained(typed), self._limits, "not_committed")
        done.append(culprit)
        self.recovery.after(typed)

    def _undo(self, group: list[Job]) -> None:
        """Roll the group back and let its requests run again, in the order they had."""
        self.database.rollback()
        self.receipts.settle(committed=False)
        for job in group:
            job.replays += 1
            # Its handler may have changed them.
            job.arguments = None
            job.frame = b""
            if job.large is not None:
                job.large.drop_result()
            job.after_commit = ()
            if job.replays > self._limits.replays_max:
                job.alone = True
        self.status.replays += len(group)
        self.lane.put_back(group)

    def commit(self, group: list[Job]) -> list[Job]:
        """Commit the open transaction of these requests and check the files; they have their answers then."""
        if not group:
            self.database.rollback()
            return group
        started = time.monotonic_ns()
        if len(group) == 1 and started >= group[0].deadline_ns and not group[0].code:
            # Of several the others' commit is due within milliseconds, and a late result is still true.
            self.database.rollback()
            self.receipts.settle(committed=False)
            fail(group[0], deadline_exceeded("execution"), self._limits)
            return group
        try:
            self.database.commit()
        except StorageError as error:
            return self.recovery.commit_failed(group, error)
        self.receipts.settle(committed=True)
        ended = time.monotonic_ns()
        status = self.status
        status.groups += 1
        status.committed_requests += len(group)
        status.group_size_requests.observe(len(group))
        status.commit_us.observe((ended - started) // 1000)
        if group[0].alone:
            status.solo_runs += 1
        try:
            self.files.check()
        except StorageReplacedError as error:
            for job in group:
                fail(job, error, self._limits)
            raise FatalError(error.message, group, exits.REPLACED) from error
        self._after_commit(group)
        return group

    def run_own(self, work: Callable[[], None]) -> bool:
        """Run and commit work of the worker's own; false where a foreign process holds the lock.

        What takes longer than background work may is ended by `DeadlineExceededError`. Raises the error of what
        failed, with nothing left open, and `FatalError` where the worker must end.
        """
        if not self.try_begin(time.monotonic_ns()):
            return False
        try:
            self.watched(work)
        except BaseException as error:
            self.database.rollback()
            self.receipts.settle(committed=False)
            if isinstance(error, Aborted):
                raise deadline_exceeded("background work") from error
            if isinstance(error, StorageError):
                self.recovery.after(error)
            raise
        try:
            self.database.commit()
        except StorageError as error:
            self.recovery.commit_failed([], error)
            raise
        self.receipts.settle(committed=True)
        try:
            self.files.check()
        except StorageReplacedError as error:
            raise FatalError(error.message, [], exits.REPLACED) from error
        return True

    def watched(self, work: Callable[[], None]) -> None:
        """Do something of the worker's own; where it does not return, that takes the worker with it."""
        self.watch.own_end_ns = time.monotonic_ns() + self._limits.background_work_ms_max * 1_000_000
        try:
            work()
        finally:
            self.watch.own_end_ns = 0

    def touch(self) -> None:
        """Commit one row of the worker's own, so that a finished WAL starts over at once."""

        def fence() -> None:
            self.database.own(FENCE)

        self.run_own(fence)

    def _after_commit(self, group: list[Job]) -> None:
        for job in group:
            for call in job.after_commit:
                # One that does not return takes the worker with it, as a handler does.
                self.watch.job = job
                try:
                    call()
                except BaseException:
                    # The request is committed; its client must not be told otherwise. The log tells.
                    log.exception("a call after the commit of %s failed", job.served.name)
                finally:
                    self.watch.job = None
