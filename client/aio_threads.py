"""Blocking functions for the tasks of an event loop, a few at a time, in threads that keep no process from ending."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from ..protocol.errors import DeadlineExceededError, WorkerUnavailableError
from .daemon_threads import start_daemon
from .terms import seconds_left

T = TypeVar("T")

THREADS_COUNT_MAX: Final = 8
"""How many functions run at once for one event loop; the others wait for their turns."""

_turns: WeakValueDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakValueDictionary()
"""Those of each event loop, as long as one of its tasks uses them."""


async def in_thread(function: Callable[..., T], *arguments: object, deadline_ns: int) -> T:
    """What a function that blocks for a short time returns or raises; the event loop goes on meanwhile.

    Not for one that raises `StopIteration`. A task that is cancelled before the function's turn came leaves at once;
    otherwise it leaves when the function is over, so that nothing of it goes on behind its back. Its turn is waited
    for until `deadline_ns` (monotonic clock). Raises `DeadlineExceededError` where it does not come by then, and
    `WorkerUnavailableError` where the system gives no thread.
    """
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = asyncio.Semaphore(THREADS_COUNT_MAX)
    await _take_turn(turns, deadline_ns)
    try:
        return await _outcome(_start(function, arguments))
    finally:
        # That wakes the next one, which a closed loop refuses.
        if not loop.is_closed():
            turns.release()


async def clean_up_in_thread(function: Callable[[], object]) -> None:
    """Run a function that ends what was begun; the task leaves when it is over, however often it is cancelled.

    It waits for no turn: those who have them all may be the reason why it is time to clean up. Where the system gives
    no thread, it runs here. Raises what the function raises.
    """
    try:
        work = _outcome(_start(function, ()))
    except WorkerUnavailableError:
        function()
    else:
        await work


async def _take_turn(turns: asyncio.Semaphore, deadline_ns: int) -> None:
    try:
        async with asyncio.timeout(seconds_left(deadline_ns)):
            await turns.acquire()
    except TimeoutError as error:
        raise DeadlineExceededError(
            f"the deadline passed while others used the {THREADS_COUNT_MAX} threads that read and write files for"
            f" this event loop; give it more time, or do less at once",
            details={"stage": "client"},
        ) from error


def _start(function: Callable[..., T], arguments: tuple[object, ...]) -> asyncio.Future[T]:
    over: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    start_daemon("storage file", copy_context().run, _work, over, function, arguments)
    return over


async def _outcome(over: asyncio.Future[T]) -> T:
    """What a thread ends with; cancels are held back until then."""
    cancelled: asyncio.CancelledError | None = None
    try:
        while not over.done():
            try:
                await asyncio.wait([over])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is None:
            return over.result()
        # Looked at, or it would be reported as an error that nobody has seen.
        over.exception()
        raise cancelled
    finally:
        # An error that is raised here holds this frame, which would hold the error.
        del over, cancelled


def _work(over: asyncio.Future[T], function: Callable[..., T], arguments: tuple[object, ...]) -> None:
    try:
        value = function(*arguments)
    except BaseException as error:  # noqa: BLE001 - raised in the task that waits
        _tell(over, over.set_exception, error)
    else:
        _tell(over, over.set_result, value)
    finally:
        # As above: the function's error holds this frame.
        del over


def _tell(over: asyncio.Future[T], end: Callable[..., None], outcome: object) -> None:
    # Nobody waits any more where the loop was closed meanwhile.
    with suppress(RuntimeError):
        over.get_loop().call_soon_threadsafe(end, outcome)
