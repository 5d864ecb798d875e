"""Reaching a worker from an event loop."""

import asyncio
import socket
from typing import Protocol

from ..protocol.envelope import Welcome
from ..protocol.errors import StorageError
from .aio_connection import AsyncConnection
from .dial import UNANSWERED, AddressDialer, received
from .forks import tell_after_fork
from .handshake import HandShake, NotNowError
from .terms import seconds_left


class AsyncDialer(Protocol):
    """How an asynchronous client reaches its worker, the first time and after each loss."""

    async def dial(self, deadline_ns: int) -> AsyncConnection:
        """A fresh connection of the running event loop; deadline and errors as of `Dialer.dial`."""
        ...


class AsyncAddressDialer:
    """Dials one address. Arguments: `direct`, which knows it, and what to say there."""

    def __init__(self, direct: AddressDialer) -> None:
        self._direct = direct

    def __repr__(self) -> str:
        return repr(self._direct)

    async def dial(self, deadline_ns: int) -> AsyncConnection:
        """See `AsyncDialer.dial`. A full backlog and a worker that is not there yet are waited for."""
        failures = 0
        while True:
            try:
                return await self._try_once(deadline_ns)
            except (NotNowError, StorageError, OSError) as error:
                failures += 1
                wait = self._direct.seconds_before_next(error, failures, deadline_ns)
            await asyncio.sleep(wait)

    async def _try_once(self, deadline_ns: int) -> AsyncConnection:
        sock, shake = self._direct.begin()
        fresh = _Unfinished(sock)
        try:
            async with asyncio.timeout(seconds_left(deadline_ns)):
                welcome = await fresh.finish(shake)
        except TimeoutError as error:
            fresh.close()
            raise NotNowError(UNANSWERED) from error
        except BaseException:
            fresh.close()
            raise
        return AsyncConnection(sock, welcome)


class _Unfinished:
    """A socket whose hand-shake goes on, while other tasks may fork."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        tell_after_fork(self)

    async def finish(self, shake: HandShake) -> Welcome:
        """Wait for the Welcome."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptor = self._sock.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                try:
                    welcome = shake.feed(received(self._sock, shake.wanted))
                except BlockingIOError:
                    continue
                if welcome is not None:
                    return welcome
        finally:
            loop.remove_reader(descriptor)

    def close(self) -> None:
        self._sock.close()

    def after_fork(self) -> None:
        self._sock.close()
