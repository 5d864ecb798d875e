"""Keeps the WAL small: routine checkpoints, holds that let it restart, truncation when idle, and the alarm.

PASSIVE checkpoints alone do not bound the WAL: readers that overlap keep it from ever starting over.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .admission import NEVER_NS
from .database.connection import CheckpointMode
from .database.files import WAL_SUFFIX, disk_free_bytes, disk_reserve_bytes, file_bytes
from .protocol.errors import OverloadedError, StorageError, StorageFullError
from .protocol.limits import Limits
from .protocol.status import WalStatus
from .readers import Readers

if TYPE_CHECKING:
    from .writer import Writer

FRAME_HEADER_BYTES = 24
"""What the WAL adds to each page."""

log = logging.getLogger(__name__)


class Checkpoints:
    """Governs the WAL of one database. Used by the serving thread between groups, except `look` and what tells."""

    def __init__(self, writer: "Writer", readers: Readers, limits: Limits) -> None:
        self._writer = writer
        self._readers = readers
        self._limits = limits
        self._wal_path = writer.database.path + WAL_SUFFIX
        self._frame_bytes = int(writer.database.own("pragma page_size")[0][0]) + FRAME_HEADER_BYTES
        self._threshold = limits.wal_checkpoint_bytes // self._frame_bytes
        self._next_frames = self._threshold
        self._next_hold_frames = limits.wal_live_frames_max
        # A worker that was killed may have left a WAL of any size.
        self._idle_ns = time.monotonic_ns() + limits.wal_idle_ms * 1_000_000
        self._pinned_since_ns = 0
        self._failed_hold_ns = 0
        self._disk_checked_ns = 0
        self._checkpointed_ns = 0
        self.refuse: StorageError | None = None
        self.reserve_bytes = disk_reserve_bytes(writer.database.path, limits)
        self.free_bytes = disk_free_bytes(writer.database.path)
        self.status = WalStatus()
        self.snapshot_before: Callable[[int], str] = lambda _: ""
        """Names the client whose local snapshot began before a moment, "" where there is none."""

    def note_commit(self) -> bool:
        """Note what was written; whether a checkpoint is due."""
        frames = self._writer.database.wal_frames
        self._idle_ns = time.monotonic_ns() + self._limits.wal_idle_ms * 1_000_000
        if frames < self.status.live_frames:
            self.status.restarts += 1
            self._starts_over()
        self.status.live_frames = frames
        return frames >= self._next_frames

    def _starts_over(self) -> None:
        self._next_frames = self._threshold
        self._next_hold_frames = self._limits.wal_live_frames_max
        self._pinned_since_ns = 0

    def run(self) -> None:
        """Checkpoint, and where the WAL stays large hold new reads so that it can start over."""
        frames = self.status.live_frames
        self._next_frames = frames + self._threshold
        self._checkpoint("passive")
        if frames > self._next_hold_frames:
            self._next_hold_frames = frames + self._limits.wal_live_frames_max
            if not self._has_long_read():
                self._hold_reads(self._start_over)

    def _has_long_read(self) -> bool:
        """Whether a read outlasted a hold: it may go on for long, and it is no use to hold all others for it."""
        return any(watch.started_ns <= self._failed_hold_ns for watch in self._readers.busy())

    def _checkpoint(self, mode: CheckpointMode) -> bool:
        """Whether the whole WAL is in the database now, and empty where the mode says so."""
        started = time.monotonic_ns()
        try:
            frames, done = self._writer.database.checkpoint(mode)
        except StorageError as error:
            log.warning("a checkpoint failed: %s", error.message)
            self._writer.recovery.after(error)
            return False
        self._checkpointed_ns = time.monotonic_ns()
        self.status.checkpoints += 1
        took_ms = (self._checkpointed_ns - started) / 1e6
        self.status.longest_checkpoint_ms = max(self.status.longest_checkpoint_ms, took_ms)
        complete = frames == done and frames >= 0
        self._pinned_since_ns = 0 if complete else self._pinned_since_ns or started
        return complete

    def _start_over(self) -> None:
        if not self._checkpoint("passive"):
            return
        try:
            # The restart happens with the next frame that is written while no reader is in the WAL.
            self._writer.touch()
        except StorageError as error:
            log.warning("the WAL cannot be started over: %s", error.message)
        else:
            self.note_commit()

    def _hold_reads(self, work: Callable[[], None]) -> None:
        """Do something while the running reads have ended, or their time is over, and no new one starts."""
        started = time.monotonic_ns()
        status = self._readers.status
        self._readers.hold(started + self._limits.wal_hold_ms_max * 1_000_000)
        if self._readers.busy():
            self._failed_hold_ns = started
        try:
            work()
        finally:
            self._readers.resume()
            status.holds += 1
            status.longest_hold_ms = max(status.longest_hold_ms, (time.monotonic_ns() - started) / 1e6)

    def idle_ns(self) -> int:
        """When the WAL should be truncated if nothing is written until then; 0 where there is nothing to do."""
        return self._idle_ns

    def truncate(self) -> None:
        """Empty the WAL file; where a reader is in it, that is tried again later."""
        if self.status.live_frames > self._limits.wal_live_frames_max and not self._has_long_read():
            self._hold_reads(self._empty)
        else:
            self._empty()

    def _empty(self) -> None:
        self._idle_ns = 0
        if self._checkpoint("truncate"):
            self.status.truncations += 1
            self.status.live_frames = 0
            self._starts_over()
        else:
            self._idle_ns = time.monotonic_ns() + self._limits.wal_idle_ms * 1_000_000

    def look(self, now_ns: int) -> None:
        """Look at disk and WAL from time to time; sets what new writes are refused with."""
        if now_ns - self._disk_checked_ns < self._limits.disk_check_ms * 1_000_000:
            return
        self._disk_checked_ns = now_ns
        limits = self._limits
        path = self._writer.database.path
        try:
            self.free_bytes = disk_free_bytes(path)
        except OSError as error:
            # The directory has gone; the next commit tells what that means for the files that are open.
            log.warning("the free space below %s cannot be seen: %s", path, error)
            return
        self.status.wal_bytes = file_bytes(self._wal_path)
        self.status.database_bytes = file_bytes(path)
        if self.free_bytes < self.reserve_bytes:
            self.refuse = StorageFullError(
                f"{self.free_bytes} bytes are free below {path}, under the reserve of {self.reserve_bytes}; "
                "free some: service comes back by itself",
                details={"free_bytes": self.free_bytes, "reserve_bytes": self.reserve_bytes},
            )
        elif self._live_bytes > limits.wal_refuse_bytes:
            self.refuse = OverloadedError(
                f"the WAL holds {self._live_bytes} bytes, and {self._pinned_by()} keeps it from starting over; "
                "end that reader: service comes back by itself",
                retry_after=limits.retry_after_ms_max / 1000,
                details={"bound": "wal", "wal_bytes": self._live_bytes},
            )
        else:
            self.refuse = None

    @property
    def _live_bytes(self) -> int:
        return self.status.live_frames * self._frame_bytes

    def last_checkpoint_ago_ms(self, now_ns: int) -> int | None:
        """How long ago the last checkpoint ended, None where there was none."""
        return (now_ns - self._checkpointed_ns) // 1_000_000 if self._checkpointed_ns else None

    def degraded(self) -> str:
        """Why the WAL is a cause of alarm, "" where it is not."""
        pinned_by = self.pinned_by()
        return pinned_by and f"the WAL holds {self._live_bytes} bytes; {pinned_by} pins it"

    def pinned_by(self) -> str:
        """Who keeps the WAL from starting over, where it has grown so large that this matters; else ""."""
        return self._pinned_by() if self._live_bytes > self._limits.wal_degraded_bytes else ""

    def _pinned_by(self) -> str:
        """The oldest read of the worker, if it is older than the trouble."""
        for watch in sorted(self._readers.busy(), key=lambda watch: watch.started_ns):
            job = watch.job
            if job is not None and watch.started_ns < (self._pinned_since_ns or NEVER_NS):
                return f"{job.served.name} of client {job.peer.name!r} (pid {job.peer.pid})"
        return self.snapshot_before(self._pinned_since_ns or NEVER_NS) or "a process outside of the worker"
