"""The places at which a worker of the crash test dies, and the switch that says at which one.

The product has no such places: `crash_store`, which only workers of the crash test load, wraps its functions. The
switch is a small file that the test and its workers map into their memory, so that it survives every death.
"""

import mmap
import os
import signal
import time
from enum import IntEnum
from pathlib import Path
from typing import Final, Self

STORE: Final = "crash_store:crashing"
"""The store that a worker is started with."""

SWITCH_VARIABLE: Final = "CRASH_TEST_SWITCH"
"""The environment variable that names the switch's file; without it nothing is wrapped."""


class Point(IntEnum):
    """Where a worker may die; `text` says it for people."""

    BEFORE_BEGIN = 1
    AFTER_REQUEST = 2
    RECEIPT = 3
    BEFORE_COMMIT = 4
    WAL_WRITE = 5
    WAL_SYNC = 6
    AFTER_COMMIT = 7
    AFTER_FILE_CHECK = 8
    BEFORE_REPLIES = 9
    AMID_REPLIES = 10
    HALF_REPLY = 11
    CHECKPOINT = 12
    AFTER_CHECKPOINT = 13
    TRIM = 14
    TRANSACTION = 15
    FENCE = 16
    SNAPSHOT = 17
    MIGRATION = 18
    RECORD = 19
    DRAIN = 20
    LEAVE = 21

    @property
    def text(self) -> str:
        """Where that is, in words."""
        return _TEXTS[self]

    @property
    def label(self) -> str:
        """Its name for tables and files."""
        return self.name.lower().replace("_", " ")


_TEXTS: Final = {
    Point.BEFORE_BEGIN: "before BEGIN",
    Point.AFTER_REQUEST: "after a request of a group ran",
    Point.RECEIPT: "after a receipt was stored, before its savepoint is released",
    Point.BEFORE_COMMIT: "before COMMIT",
    Point.WAL_WRITE: "in the middle of a COMMIT, half a write to the WAL done",
    Point.WAL_SYNC: "in the middle of a COMMIT, before the WAL's sync",
    Point.AFTER_COMMIT: "after COMMIT, before the file check",
    Point.AFTER_FILE_CHECK: "after the file check, before anybody is answered",
    Point.BEFORE_REPLIES: "before the replies of a group leave",
    Point.AMID_REPLIES: "in the middle of the replies: some clients have theirs, others not",
    Point.HALF_REPLY: "in the middle of one reply's frame",
    Point.CHECKPOINT: "in the middle of a checkpoint, half a page copied",
    Point.AFTER_CHECKPOINT: "after a checkpoint",
    Point.TRIM: "while receipts are trimmed, before their COMMIT",
    Point.TRANSACTION: "inside an interactive transaction",
    Point.FENCE: "after a request key was fenced, before that is committed",
    Point.SNAPSHOT: "after a snapshot was registered, before its client hears of it",
    Point.MIGRATION: "during a migration at the start",
    Point.RECORD: "at the start, listening but not yet on record",
    Point.DRAIN: "while it stops: clients have its goodbye",
    Point.LEAVE: "at its very end, the lock still held",
}

AT_START: Final = frozenset({Point.MIGRATION, Point.RECORD})
"""Points that a worker reaches only while it starts."""

AT_STOP: Final = frozenset({Point.DRAIN, Point.LEAVE})
"""Points that it reaches only while it stops."""

RARE: Final = frozenset(
    {Point.CHECKPOINT, Point.AFTER_CHECKPOINT, Point.TRIM, Point.FENCE, *AT_START, *AT_STOP}
)
"""Points that it passes now and then, not with every group."""

_ARMED, _PASSES, _DIED_NS, _MIGRATIONS, _HITS = range(5)
_CELL_BYTES = 8
_CELLS = _HITS + len(Point) + 1


class Switch:
    """One point at the most is armed: the worker that passes it so many times dies there.

    Arguments: `path`, a file made by `make`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _CELLS * _CELL_BYTES)
        self._cells = memoryview(self._memory).cast("q")

    @classmethod
    def make(cls, path: Path) -> Self:
        """A new switch with nothing armed."""
        path.write_bytes(bytes(_CELLS * _CELL_BYTES))
        return cls(path)

    def close(self) -> None:
        """Let go of the memory."""
        self._cells.release()
        self._memory.close()

    # The test's side

    def arm(self, point: Point, passes: int) -> None:
        """Have the worker that passes `point` for that many times die there."""
        if point is Point.MIGRATION:
            self._cells[_MIGRATIONS] += 1
        self._cells[_PASSES] = passes
        self._cells[_ARMED] = point

    def disarm(self) -> None:
        """Let every worker live."""
        self._cells[_ARMED] = 0

    def hits(self, point: Point) -> int:
        """How many workers have died there."""
        return self._cells[_HITS + point]

    @property
    def died_s(self) -> float:
        """When the last one died at a point, on the monotonic clock that all processes share."""
        return self._cells[_DIED_NS] / 1e9

    # Both sides

    @property
    def migrations(self) -> int:
        """How many migrations the store has."""
        return self._cells[_MIGRATIONS]

    def is_armed(self, point: Point) -> bool:
        """Whether a worker is to die there."""
        return self._cells[_ARMED] == point

    # The worker's side

    def passing(self, point: Point) -> None:
        """The worker is at that point: it dies where that was asked for."""
        if self._cells[_ARMED] == point and self.reaches(point):
            self.die(point)

    def reaches(self, point: Point) -> bool:
        """Count one passing; whether it is the one to `die` at."""
        cells = self._cells
        if cells[_ARMED] != point:
            return False
        cells[_PASSES] -= 1
        return cells[_PASSES] <= 0

    def die(self, point: Point) -> None:
        """Note the death and end this process at once."""
        cells = self._cells
        cells[_HITS + point] += 1
        cells[_DIED_NS] = time.monotonic_ns()
        # The next worker lives.
        cells[_ARMED] = 0
        os.kill(os.getpid(), signal.SIGKILL)


def switch_of_this_process() -> Switch | None:
    """The switch that the environment names; None where it names none."""
    path = os.environ.get(SWITCH_VARIABLE)
    return None if path is None else Switch(Path(path))
