"""Reaching workers from an event loop: a supervised one, and the one of a path."""

import asyncio
import random
import time

from .client.aio_connection import AsyncConnection
from .client.aio_dial import AsyncAddressDialer
from .client.connection import Connection
from .client.daemon_runs import DaemonRuns
from .client.dial import AddressDialer
from .finding import ATTEMPT_SECONDS_FIRST, PAUSE_SECONDS_MAX, PathDialer
from .protocol.errors import WorkerUnavailableError
from .supervisor import Supervisor


class AsyncPathDialer:
    """Finds or starts the worker of a database as its `dialer` does, in a thread that keeps no process."""

    def __init__(self, dialer: PathDialer) -> None:
        self._runs = DaemonRuns(dialer.dial, Connection.close)

    async def dial(self, deadline_ns: int) -> AsyncConnection:
        """A connection; deadline and errors as of `PathDialer.dial`."""
        connection = await self._runs.result(deadline_ns)
        return AsyncConnection(connection.hand_over(), connection.welcome)


class AsyncOwnDialer:
    """Dials a worker that this process supervises; in a forked child, its address alone."""

    def __init__(self, supervisor: Supervisor, direct: AddressDialer) -> None:
        self._supervisor = supervisor
        self._direct = AsyncAddressDialer(direct)
        # The supervisor's thread wakes other threads only.
        self._restarts = DaemonRuns(supervisor.wait_running, lambda _generation: None)

    async def dial(self, deadline_ns: int) -> AsyncConnection:
        """A connection; deadline and errors as of `OwnDialer.dial`."""
        supervisor = self._supervisor
        while supervisor.in_host:
            if supervisor.record is None:
                await self._restarts.result(deadline_ns)
            until_ns = min(deadline_ns, time.monotonic_ns() + round(ATTEMPT_SECONDS_FIRST * 1e9))
            try:
                return await self._direct.dial(until_ns)
            except WorkerUnavailableError:
                if until_ns == deadline_ns:
                    raise
            # Where it failed at once, as for want of descriptors, it would fail as fast again.
            await asyncio.sleep(random.uniform(0.25, 1.0) * PAUSE_SECONDS_MAX)
        return await self._direct.dial(deadline_ns)
