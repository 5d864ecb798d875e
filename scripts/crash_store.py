"""A store whose module makes its worker die where the switch says. Only workers of the crash test load it.

Its migrations are as many as the switch says, so that a worker of the test can always be given one more to run.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import apsw

from crash_points import Point, Switch, switch_of_this_process
from storage_worker import background
from storage_worker.database.connection import Database
from storage_worker.database.files import WAL_SUFFIX, OpenFiles
from storage_worker.intake import Intake
from storage_worker.interactive import Interactive
from storage_worker.ownership import Ownership
from storage_worker.peer import Peer
from storage_worker.pipes import Pipes
from storage_worker.receipts import Receipts
from storage_worker.runner import Runner
from storage_worker.snapshots import Snapshots
from storage_worker.store import Store
from storage_worker.transaction import Transaction

BASE_FILES = "unix"
TRIM_EVERY_NS = 100_000_000
OLD_RECEIPTS = 20

BEFORE: tuple[tuple[type, str, Point], ...] = (
    (Database, "begin", Point.BEFORE_BEGIN),
    (Database, "commit", Point.BEFORE_COMMIT),
    (Intake, "deliver", Point.BEFORE_REPLIES),
    (Ownership, "write_record", Point.RECORD),
    (Ownership, "release", Point.LEAVE),
)
AFTER: tuple[tuple[type, str, Point], ...] = (
    (Database, "commit", Point.AFTER_COMMIT),
    (Database, "checkpoint", Point.AFTER_CHECKPOINT),
    (Runner, "run", Point.AFTER_REQUEST),
    (Receipts, "store", Point.RECEIPT),
    (Receipts, "trim", Point.TRIM),
    (OpenFiles, "check", Point.AFTER_FILE_CHECK),
    (Snapshots, "take", Point.SNAPSHOT),
    (Intake, "drain", Point.DRAIN),
)


class MortalFile(apsw.VFSFile):
    """One open file; its worker may die in the middle of a write or before a sync."""

    def __init__(self, switch: Switch, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(BASE_FILES, name, flags)
        path = str(name.filename()) if isinstance(name, apsw.URIFilename) else str(name)
        self._switch = switch
        self._is_wal = path.endswith(WAL_SUFFIX)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802 - the driver's name
        """Write all, or half and die."""
        # With a WAL the database itself is written by checkpoints only.
        point = Point.WAL_WRITE if self._is_wal else Point.CHECKPOINT
        if self._switch.reaches(point):
            super().xWrite(bytes(data)[: len(data) // 2], offset)
            self._switch.die(point)
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802 - the driver's name
        """Sync, or die."""
        if self._is_wal:
            self._switch.passing(Point.WAL_SYNC)
        super().xSync(flags)


class MortalFiles(apsw.VFS):
    """The file system; SQLite's default one from here on."""

    def __init__(self, switch: Switch) -> None:
        super().__init__("mortal", BASE_FILES, makedefault=True)
        self._switch = switch

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> MortalFile:  # noqa: N802 - the driver's name
        """Open a file."""
        return MortalFile(self._switch, name, flags)


def wrap(owner: type, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a function of ours in a method's place; `make` gets the method."""
    original = getattr(owner, method)
    setattr(owner, method, functools.wraps(original)(make(original)))


def die_before(switch: Switch, point: Point) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function that passes a point before it calls the original."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            switch.passing(point)
            return original(*arguments, **named)

        return wrapped

    return make


def die_after(switch: Switch, point: Point) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function that passes a point after it called the original."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            switch.passing(point)
            return result

        return wrapped

    return make


def wrap_replies(switch: Switch) -> None:
    """The points between and inside replies."""
    flush, queue = Pipes._flush, Pipes.queue  # noqa: SLF001 - the place between two clients' replies

    def flush_one(pipes: Pipes, peer: Peer) -> None:
        flush(pipes, peer)
        if pipes._touched:  # noqa: SLF001 - others still wait for their reply
            switch.passing(Point.AMID_REPLIES)

    def queue_reply(pipes: Pipes, peer: Peer, data: bytes) -> None:
        if not peer.unread and switch.reaches(Point.HALF_REPLY):
            os.write(peer.fd, data[: len(data) // 2])
            switch.die(Point.HALF_REPLY)
        queue(pipes, peer, data)

    wrap(Pipes, "_flush", lambda _: flush_one)
    wrap(Pipes, "queue", lambda _: queue_reply)


def wrap_rest(switch: Switch) -> None:
    """Points that have a condition, and what makes receipts old enough to be trimmed."""
    outcome, needs_trim, run_next = Receipts.outcome, Receipts.needs_trim, Interactive.run_next

    def fence(receipts: Receipts, key: str, *, fence: bool) -> Any:
        known = outcome(receipts, key, fence=fence)
        if known.state == "fenced":
            switch.passing(Point.FENCE)
        return known

    def trim_needed(receipts: Receipts) -> bool:
        if switch.is_armed(Point.TRIM):
            for number in range(OLD_RECEIPTS):
                receipts.database.own(
                    "insert or ignore into _sw_receipts values(?, '', x'', 'fence', null, 0)",
                    (f"old/{number}",),
                )
        return needs_trim(receipts)

    def run_inside(interactive: Interactive) -> Any:
        done = run_next(interactive)
        if done and interactive.is_open:
            switch.passing(Point.TRANSACTION)
        return done

    wrap(Receipts, "outcome", lambda _: fence)
    wrap(Receipts, "needs_trim", lambda _: trim_needed)
    wrap(Interactive, "run_next", lambda _: run_inside)


def migration(number: int) -> Callable[[Transaction], None]:
    """One more migration; all of them have the same source."""

    def migrate(tx: Transaction) -> None:
        tx.execute("create table if not exists crash_migrations(number integer)")
        tx.execute("insert into crash_migrations values(?)", (number,))
        if mortal is not None:
            mortal.passing(Point.MIGRATION)

    migrate.__qualname__ = f"migration_{number}"
    return migrate


mortal = switch_of_this_process()
if mortal is not None:
    files = MortalFiles(mortal)
    for owner, method, point in BEFORE:
        wrap(owner, method, die_before(mortal, point))
    for owner, method, point in AFTER:
        wrap(owner, method, die_after(mortal, point))
    wrap_replies(mortal)
    wrap_rest(mortal)
    background.TRIM_EVERY_NS = TRIM_EVERY_NS

migrations = 0 if mortal is None else mortal.migrations
crashing = Store("crashing", migrations, [migration(number) for number in range(1, migrations + 1)])
