"""Snapshots of the asynchronous client: local reads of one state of the database."""

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from ..protocol.errors import InvalidRequestError, StorageError
from .aio_connection import AsyncConnection
from .aio_line import AsyncLine
from .local_reads import LocalReads
from .snapshot import GIVE_BACK_SECONDS, Lease
from .terms import NS_PER_MS, agree, seconds_left


class AsyncSnapshot(LocalReads):
    """One state of the database, read in this process; made by `AsyncClient.snapshot`, see `Snapshot`.

    Its block is entered and left with `async with`; `query` is a plain call, which blocks the event loop
    as long as SQLite takes. Where that is more than microseconds, let a thread do it:
    `await asyncio.to_thread(snap.query, ...)`. By its age it ends while the event loop runs.
    """

    def __init__(
        self, line: AsyncLine, max_age: float | None, timeout: float | None, retries: int | None
    ) -> None:
        super().__init__()
        self._line = line
        self._max_age = max_age
        self._timeout = timeout
        self._retries = retries
        self._lease: Lease | None = None
        self._home: AsyncConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._giving_back: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._lease is not None:
            raise InvalidRequestError("a snapshot is taken once; ask the client for another one")
        line = self._line
        terms = agree(line.limits, self._timeout, retries=self._retries)
        self._home = await line.current(terms.deadline_ns)
        self._lease = lease = Lease(self._max_age, line.limits)
        try:
            began_ns = time.monotonic_ns()
            place = await line.run(lease.take, terms)
            self._home = home = await line.current(terms.deadline_ns)
            end_ns = began_ns + lease.age_ms * NS_PER_MS
            self._begin(place, end_ns, line.limits, home.welcome.sqlite_version)
            self._timer = asyncio.get_running_loop().call_later(seconds_left(end_ns), self._expire)
        except BaseException:
            self._leave("it could not begin")
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_inherited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._leave("its block was left")
        if self._giving_back is not None:
            await asyncio.shield(self._giving_back)

    def _expire(self) -> None:
        self._leave("it outlived its age")

    def _leave(self, why: str) -> None:
        """End it now; the worker hears of it as soon as the event loop turns."""
        self._end(why)
        home, self._home = self._home, None
        if home is not None and home.is_open and self._lease is not None:
            self._giving_back = asyncio.get_running_loop().create_task(self._give_back(self._lease))

    async def _give_back(self, lease: Lease) -> None:
        with suppress(StorageError):
            await self._line.run(lease.give_back, agree(self._line.limits, GIVE_BACK_SECONDS, retries=0))
