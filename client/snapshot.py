"""Snapshots of the synchronous client: local reads of one state of the database."""

import secrets
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from ..protocol.errors import InvalidRequestError, StorageError
from ..protocol.limits import Limits
from ..protocol.operation import Call
from ..protocol.statements import SNAPSHOT, SNAPSHOT_END, DatabaseFile, SnapshotEnd, SnapshotLease
from .connection import Connection
from .daemon_threads import start_daemon
from .line import Line
from .local_reads import LocalReads
from .terms import NS_PER_MS, agree, seconds_left

GIVE_BACK_SECONDS: Final = 1.0
"""How long to tell the worker of a snapshot's end may take; it only informs."""


class Lease:
    """What both kinds of client say to the worker about one snapshot.

    `take` registers it and `give_back` ends it. `age_ms` is how long it may last. Raises
    `InvalidRequestError` where `max_age`, in seconds or None for the default, cannot be.
    """

    def __init__(self, max_age: float | None, limits: Limits) -> None:
        self.age_ms = _age_ms(max_age, limits)
        number = secrets.randbits(63)
        self.take: Call[DatabaseFile] = Call(SNAPSHOT, SnapshotLease(number, self.age_ms))
        self.give_back: Call[None] = Call(SNAPSHOT_END, SnapshotEnd(number))


def _age_ms(max_age: float | None, limits: Limits) -> int:
    if max_age is None:
        return limits.snapshot_ms_default
    try:
        length = int((max_age + 0.0) * 1000)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"the age {max_age!r} is no number of seconds") from error
    if not 1 <= length <= limits.snapshot_ms_max:
        raise InvalidRequestError(
            f"a snapshot of {max_age} s; it takes 0.001 to {limits.snapshot_ms_max / 1000:g}",
            details={"snapshot_ms_max": limits.snapshot_ms_max},
        )
    return length


class Snapshot(LocalReads):
    """One state of the database, read in this process without a round trip; made by `Client.snapshot`.

    It begins with its `with` block, after everything that was acknowledged before, and ends with the
    block or by its age, whichever comes first; it holds no lock that others would wait for, only the space
    of what is written meanwhile. It goes on where the worker is lost, since its state is in the file. In a
    forked child it raises `ForkedClientError`, and leaves its parent's alone.
    """

    def __init__(self, line: Line, max_age: float | None, timeout: float | None, retries: int | None) -> None:
        super().__init__()
        self._line = line
        self._max_age = max_age
        self._timeout = timeout
        self._retries = retries
        self._lease: Lease | None = None
        self._home: Connection | None = None
        self._left = threading.Event()
        self._timer: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._lease is not None:
            raise InvalidRequestError("a snapshot is taken once; ask the client for another one")
        line = self._line
        terms = agree(line.limits, self._timeout, retries=self._retries)
        self._home = line.connected(terms.deadline_ns)
        self._lease = lease = Lease(self._max_age, line.limits)
        try:
            began_ns = time.monotonic_ns()
            place = line.run(lease.take, terms)
            self._home = home = line.connected(terms.deadline_ns)
            end_ns = began_ns + lease.age_ms * NS_PER_MS
            self._begin(place, end_ns, line.limits, home.welcome.sqlite_version)
            self._timer = start_daemon("ending a snapshot", self._expire, seconds_left(end_ns))
        except BaseException:
            self._end("it could not begin")
            self._give_back()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_inherited:
            return
        self._left.set()
        self._end("its block was left")
        self._give_back()

    def _expire(self, seconds: float) -> None:
        if not self._left.wait(seconds):
            self._end("it outlived its age")
            self._give_back()

    def _give_back(self) -> None:
        """Tell the worker, once, unless the connection has ended and the lease with it."""
        home, self._home = self._home, None
        if home is None or not home.is_open or self._lease is None:
            return
        with suppress(StorageError):
            self._line.run(self._lease.give_back, agree(self._line.limits, GIVE_BACK_SECONDS, retries=0))
