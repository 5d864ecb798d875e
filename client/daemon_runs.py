"""Blocking functions for an event loop, in threads that keep no process from ending."""

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from ..protocol.errors import StorageError, WorkerUnavailableError
from .daemon_threads import start_daemon
from .forks import tell_after_fork
from .terms import seconds_left

T = TypeVar("T")

_SLACK_SECONDS: Final = 0.1
"""The function ends by the deadline itself and knows better why; it is not waited for much longer."""


class DaemonRuns(Generic[T]):
    """Runs of one blocking function, each in a daemon thread, one at a time.

    A task that is cancelled leaves its run behind, and the next one that asks takes it over: however many
    are cancelled, there is one thread. One task at a time may ask.

    Arguments: `function`, called with a deadline on the monotonic clock in ns, by which it returns;
    `discard`, called with a result that nobody waits for any more.
    """

    def __init__(self, function: Callable[[int], T], discard: Callable[[T], None]) -> None:
        self._function = function
        self._discard = discard
        self._run: _Run[T] | None = None
        tell_after_fork(self)

    async def result(self, deadline_ns: int) -> T:
        """What the function returns or raises; `WorkerUnavailableError` where it overruns its deadline."""
        while True:
            run, is_mine = self._run, False
            if run is None or run.loop is not asyncio.get_running_loop():
                run, is_mine = _Run(self._ended, self._discard), True
                run.start(self._function, deadline_ns)
                self._run = run
            try:
                async with asyncio.timeout(seconds_left(deadline_ns) + _SLACK_SECONDS):
                    return await run.wait()
            except StorageError:
                # One that was taken over had less time, perhaps.
                if is_mine or not seconds_left(deadline_ns):
                    raise
            except TimeoutError as error:
                raise WorkerUnavailableError(
                    "no worker was reached in time", outcome="not_committed"
                ) from error

    def after_fork(self) -> None:
        """The thread is the parent's."""
        self._run = None

    def _ended(self, run: "_Run[T]") -> None:
        if self._run is run:
            self._run = None


class _Run(Generic[T]):
    def __init__(self, ended: Callable[["_Run[T]"], None], discard: Callable[[T], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._ended = ended
        self._discard = discard
        self._gate: asyncio.Future[T] | None = None

    def start(self, function: Callable[[int], T], deadline_ns: int) -> None:
        start_daemon("reaching a worker", self._work, function, deadline_ns)

    async def wait(self) -> T:
        gate: asyncio.Future[T] = self.loop.create_future()
        self._gate = gate
        try:
            return await gate
        except asyncio.CancelledError:
            if gate.done() and not gate.cancelled() and gate.exception() is None:
                self._discard(gate.result())
            raise

    def _work(self, function: Callable[[int], T], deadline_ns: int) -> None:
        try:
            value = function(deadline_ns)
        except BaseException as error:  # noqa: BLE001 - raised in the task that waits
            self._tell(self._fail, error)
        else:
            if not self._tell(self._succeed, value):
                self._discard(value)

    def _tell(self, end: Callable[..., None], outcome: object) -> bool:
        try:
            self.loop.call_soon_threadsafe(end, outcome)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _succeed(self, value: T) -> None:
        self._ended(self)
        gate = self._gate
        if gate is None or gate.done():
            self._discard(value)
        else:
            gate.set_result(value)

    def _fail(self, error: BaseException) -> None:
        self._ended(self)
        gate = self._gate
        if gate is not None and not gate.done():
            gate.set_exception(error)
