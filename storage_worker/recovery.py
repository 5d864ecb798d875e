"""After a COMMIT or the disk has failed: what is known, a fence, a fresh connection.

The writer never guesses. A COMMIT that failed may have left frames in the WAL that come back to life when
the database is recovered; until a later COMMIT has taken their place nobody is told `not_committed`.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .database.connection import Database
from .database.faults import is_disk_fault
from .database.files import OpenFiles
from .database.opening import quick_check
from .execution import fail
from .peer import Job
from .protocol.errors import StorageCorruptError, StorageError, StorageFullError, WorkerUnavailableError
from .protocol.limits import Limits
from .watch import FatalError

if TYPE_CHECKING:
    from .writer import Writer

log = logging.getLogger(__name__)

FENCE = "insert into _sw_fence values(1, 1) on conflict do update set number = number + 1"

Reopen = Callable[[], tuple[Database, OpenFiles]]


class Recovery:
    """Brings a writer back to a known state, or raises `FatalError` where that cannot be done."""

    def __init__(self, writer: "Writer", reopen: Reopen, limits: Limits) -> None:
        self._writer = writer
        self._reopen = reopen
        self._limits = limits
        self.fence_owed = False
        """A COMMIT has failed and there is no space yet for the fence that must follow it."""

    def commit_failed(self, group: list[Job], error: StorageError) -> list[Job]:
        """Answer the requests of a transaction whose COMMIT failed."""
        writer = self._writer
        writer.status.failed_commits += 1
        writer.database.rollback()
        writer.receipts.settle(committed=False)
        try:
            self._fence()
        except StorageFullError as full:
            self.fence_owed = True
            self._fail_unknown(group, full, StorageFullError)
            return group
        except StorageError as failed:
            self._fail_unknown(group, error, WorkerUnavailableError)
            raise FatalError(f"a COMMIT failed, and so did its fence: {failed.message}", group) from error
        for job in group:
            fail(job, error, self._limits, "not_committed")
        try:
            self.after(error)
        except FatalError as fatal:
            fatal.done += group
            raise
        return group

    def _fail_unknown(self, group: list[Job], error: StorageError, kind: type[StorageError]) -> None:
        unknown = kind(
            f"a COMMIT failed and could not be settled ({error.message}); a request key tells its outcome later",
            outcome="unknown",
            details=error.details,
        )
        for job in group:
            fail(job, unknown, self._limits)

    def pay_fence(self) -> None:
        """Commit the fence that is owed; `StorageFullError` where there is still no space for it."""
        try:
            self._fence()
        except StorageFullError:
            raise
        except StorageError as error:
            raise FatalError(f"the fence after a failed COMMIT failed: {error.message}", []) from error
        self.fence_owed = False

    def after(self, error: StorageError) -> None:
        """After an I/O error or corruption: a fence, a fresh connection, and for corruption a check of the file.

        Other errors need nothing. No transaction may be open.
        """
        if not is_disk_fault(error):
            return
        corrupt = isinstance(error, StorageCorruptError)
        if not corrupt:
            try:
                self._fence()
            except StorageFullError:
                self.fence_owed = True
            except StorageError as again:
                raise FatalError(f"an I/O error does not go away: {again.message}", []) from again
        writer = self._writer
        writer.status.reopened += 1
        try:
            database, files = self._reopen()
        except StorageError as again:
            raise FatalError(f"the database cannot be opened again: {again.message}", []) from again
        writer.database.close()
        writer.use(database, files)
        if not corrupt:
            return
        try:
            quick_check(writer.database)
        except StorageError as damage:
            log.critical("writes are refused from now on: %s", damage)
            writer.refuse = damage

    def _fence(self) -> None:
        """Commit a small transaction at full durability on the same WAL; its error where that fails for long.

        An unsynced frame may come back to life at recovery; the fence's frames take its place.
        """
        database = self._writer.database
        level = database.own("pragma synchronous")[0][0]
        database.own("pragma synchronous=full")
        end = time.monotonic() + self._limits.fence_ms_max / 1000
        try:
            while not self._try_fence(last=time.monotonic() >= end):
                time.sleep(self._limits.busy_retry_ms_max / 1000)
        finally:
            database.own(f"pragma synchronous={level}")

    def _try_fence(self, *, last: bool) -> bool:
        database = self._writer.database
        for makes_room in (True, False):
            try:
                database.begin()
                database.own(FENCE)
                database.commit()
            except StorageFullError:
                database.rollback()
                if not makes_room:
                    raise
                self._make_room()
            except StorageError as error:
                log.warning("a fence failed: %s", error)
                database.rollback()
                if last:
                    raise
                return False
            else:
                break
        self._writer.status.fences += 1
        return True

    def _make_room(self) -> None:
        """Move what the WAL holds into the database, so that it can be written again from its start."""
        try:
            self._writer.database.checkpoint("passive")
        except StorageError as error:
            log.warning("no checkpoint makes room for a fence: %s", error.message)
