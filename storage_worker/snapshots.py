"""Leases of local snapshots: which clients read the file by themselves, since when and for how long.

A lease only informs and counts: its client ends the snapshot itself. One that is over and was not given
back belongs to a process that is stopped or blocked, and is shown as overdue until its connection ends.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from .database.files import OpenFiles
from .peer import Peer
from .protocol.errors import InvalidRequestError, OverloadedError
from .protocol.limits import Limits
from .protocol.statements import DatabaseFile, SnapshotLease
from .protocol.status import SnapshotStatus

MS = 1_000_000


class Lease(NamedTuple):
    """One snapshot; times are nanoseconds on the monotonic clock."""

    peer: Peer
    begun_ns: int
    end_ns: int


class Snapshots:
    """The leases of one database at `path`; `files` gives what the worker has open. Used by whoever serves the pipes."""

    def __init__(self, path: str, files: Callable[[], OpenFiles], limits: Limits) -> None:
        self._path = path
        self._files = files
        self._limits = limits
        self._leases: dict[int, Lease] = {}

    def take(self, peer: Peer, asked: SnapshotLease) -> DatabaseFile:
        """Register a snapshot; where its client finds the database.

        Raises `InvalidRequestError` where it is to last too long, `OverloadedError` where too many are
        registered, `StorageReplacedError` where the file under the path is another one.
        """
        limits, now = self._limits, time.monotonic_ns()
        if not 1 <= asked.age_ms <= limits.snapshot_ms_max:
            raise InvalidRequestError(
                f"a snapshot of {asked.age_ms} ms; it takes 1 to {limits.snapshot_ms_max}",
                details={"snapshot_ms_max": limits.snapshot_ms_max},
            )
        self._forget_lost()
        # The same number again is the same snapshot, asked for by a client that lost the first answer.
        if asked.number not in self._leases and len(self._leases) >= limits.snapshots_max:
            raise self._too_many(now)
        files = self._files()
        files.check()
        self._leases[asked.number] = Lease(peer, now, now + asked.age_ms * MS)
        return DatabaseFile(self._path, *files.identity)

    def end(self, number: int) -> None:
        """Note that a snapshot has ended."""
        self._leases.pop(number, None)

    def statuses(self, now_ns: int) -> list[SnapshotStatus]:
        """All of them, the oldest first."""
        self._forget_lost()
        return [
            SnapshotStatus(
                name=lease.peer.name,
                pid=lease.peer.pid,
                age_ms=(now_ns - lease.begun_ns) // MS,
                left_ms=max(0, lease.end_ns - now_ns) // MS,
                overdue_ms=max(0, now_ns - lease.end_ns) // MS,
            )
            for lease in self._by_age()
        ]

    def oldest_before(self, moment_ns: int) -> str:
        """Who has the oldest snapshot, if it began before that moment; else ""."""
        self._forget_lost()
        for lease in self._by_age()[:1]:
            if lease.begun_ns < moment_ns:
                overdue_ms = (time.monotonic_ns() - lease.end_ns) // MS
                late = f", overdue by {overdue_ms} ms" if overdue_ms > 0 else ""
                return f"a snapshot of client {lease.peer.name!r} (pid {lease.peer.pid}{late})"
        return ""

    def _by_age(self) -> list[Lease]:
        return sorted(self._leases.values(), key=lambda lease: lease.begun_ns)

    def _forget_lost(self) -> None:
        """Forget the leases whose connections have ended, of which nobody tells."""
        for number in [number for number, lease in self._leases.items() if lease.peer.closed]:
            del self._leases[number]

    def _too_many(self, now_ns: int) -> OverloadedError:
        limits = self._limits
        first_ms = (min(lease.end_ns for lease in self._leases.values()) - now_ns) // MS
        after_ms = min(max(first_ms, limits.retry_after_ms_min), limits.retry_after_ms_max)
        return OverloadedError(
            f"{limits.snapshots_max} snapshots are open, which is the limit; end some, or use query",
            retry_after=after_ms / 1000,
            details={"bound": "snapshots", "snapshots_max": limits.snapshots_max},
        )
