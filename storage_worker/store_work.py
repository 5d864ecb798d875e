"""The background work that stores declare: one slice of it after the other, each in its own transaction."""

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from .database.faults import Aborted
from .execution import as_typed
from .peer import Job
from .protocol.limits import Limits
from .protocol.status import BackgroundTask
from .store import BackgroundWork
from .transaction import Transaction
from .writer import Writer

log = logging.getLogger(__name__)

NS_PER_SECOND: Final = 10**9

FIRST_SECONDS_MAX: Final = 60.0
"""Work begins that soon after the start at the latest, so that workers that live short do it too."""

AT_ONCE_NS: Final = 1
"""A time on the monotonic clock that has passed."""

REST_FACTOR: Final = 10
"""How many times as long as a slice took it rests where it took too long, or failed."""

LOCKED_SECONDS: Final = 1.0
"""How long it waits where a foreign process holds the lock."""


class StoreWork:
    """One store's background work as a task of the worker."""

    ended = False

    def __init__(self, work: BackgroundWork, writer: Writer, limits: Limits) -> None:
        self._work = work
        self._writer = writer
        self._limits = limits
        self._position: Any = None
        self._due_ns = 0
        self._put_off(min(work.every_s, FIRST_SECONDS_MAX))
        self.status = BackgroundTask(name=work.name)

    def due_ns(self) -> int:
        """At its interval, or at once while there is more of it."""
        return self._due_ns

    def run_slice(self, until_ns: int) -> list[Job]:
        """At least one call of the handler, and more while there is time; nothing ends one that takes longer."""
        self._run_once()
        while self._position is not None and self._due_ns == AT_ONCE_NS and time.monotonic_ns() < until_ns:
            self._run_once()
        return []

    def _run_once(self) -> None:
        found: list[Transaction] = []
        position, self._position = self._position, None
        began_ns = time.monotonic_ns()
        try:
            has_run = self._writer.run_own(lambda: self._run(position, found))
        finally:
            # After an error it begins anew, but not at once; and the foreground gets most of the time, however long
            # a slice takes.
            took_s = (time.monotonic_ns() - began_ns) / NS_PER_SECOND
            self._put_off(max(self._work.every_s, took_s * REST_FACTOR))
        if not has_run:
            self._position = position
            self._put_off(LOCKED_SECONDS)
            return
        self.status.done_units += 1
        if self._position is not None:
            if took_s * 1000 < self._limits.background_slice_ms_max:
                self._due_ns = AT_ONCE_NS
            else:
                self._put_off(took_s * REST_FACTOR)
        calls = [call for tx in found for call in tx.calls]
        if calls:
            self._writer.watched(lambda: self._call(calls))

    def _run(self, position: Any, found: list[Transaction]) -> None:
        limits = self._limits
        tx = Transaction(
            self._writer.database, limits.result_bytes_max, calls_max=limits.after_commit_calls_max
        )
        try:
            self._position = self._work.handler(tx, position)
            if tx.ended_by is not None:
                raise tx.ended_by
            found.append(tx)
        except BaseException as error:
            self._position = None
            # A handler may have swallowed what ended its transaction; that still is what happened.
            error = tx.ended_by or error
            if isinstance(error, Aborted):
                raise
            raise as_typed(error, self._work.name) from error
        finally:
            tx.end()

    def _call(self, calls: Sequence[Any]) -> None:
        for call in calls:
            try:
                call()
            except Exception:
                # It is committed; nobody but the log is there to be told.
                log.exception("a call after the commit of %s failed", self._work.name)

    def _put_off(self, seconds: float) -> None:
        self._due_ns = time.monotonic_ns() + int(seconds * NS_PER_SECOND)

    def abandon(self) -> list[Job]:
        """There is nothing to undo: the next worker begins anew."""
        return []
