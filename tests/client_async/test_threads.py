"""Blocking functions in threads: the loop goes on, a few run at once, and a cancel leaves nothing behind its back."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest

from storage_worker.client import aio_threads
from storage_worker.client.aio_threads import THREADS_COUNT_MAX, clean_up_in_thread
from storage_worker.client.daemon_threads import start_daemon
from storage_worker.protocol.errors import DeadlineExceededError, WorkerUnavailableError
from tests.client_async.conftest import Run
from tests.client_async.peers import turns, until

label: ContextVar[str] = ContextVar("label", default="none")

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """With a deadline that does not pass within a test."""
    return await aio_threads.in_thread(function, *arguments, deadline_ns=2**62)


class Gate:
    """A function that waits until it is let through, and what is known of its runs."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._lock = threading.Lock()
        self.inside = 0
        self.inside_max = 0
        self.passed = 0

    def __call__(self) -> int:
        with self._lock:
            self.inside += 1
            self.inside_max = max(self.inside_max, self.inside)
        assert self.opened.wait(60)
        with self._lock:
            self.inside -= 1
            self.passed += 1
            return self.passed


def test_results_and_errors_come_back(run: Run[None]) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        label.set("of the task")
        assert await in_thread(label.get) == "of the task"
        assert await in_thread(int, "12") == 12
        assert await in_thread(threading.current_thread) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await in_thread(fail)
        with pytest.raises(SystemExit):
            await in_thread(raise_exit)

    run(main())


def raise_exit() -> None:
    raise SystemExit(3)


def test_a_few_run_at_once_and_the_loop_goes_on(run: Run[None]) -> None:
    async def main() -> None:
        gate = Gate()
        tasks = [asyncio.create_task(in_thread(gate)) for _ in range(3 * THREADS_COUNT_MAX)]
        await until(lambda: gate.inside == THREADS_COUNT_MAX)
        await turns(20)
        gate.opened.set()
        assert sorted(await asyncio.gather(*tasks)) == list(range(1, len(tasks) + 1))
        assert gate.inside_max == THREADS_COUNT_MAX

    run(main())
    gc.collect()
    assert len(aio_threads._turns) == 0


def test_who_waits_for_a_turn_leaves_at_once(run: Run[None]) -> None:
    async def main() -> None:
        gate = Gate()
        tasks = [asyncio.create_task(in_thread(gate)) for _ in range(THREADS_COUNT_MAX)]
        await until(lambda: gate.inside == THREADS_COUNT_MAX)
        late = asyncio.create_task(in_thread(gate))
        await turns(3)
        late.cancel()
        await asyncio.wait([late])
        assert late.cancelled()
        gate.opened.set()
        await asyncio.gather(*tasks)
        assert gate.passed == THREADS_COUNT_MAX
        assert await in_thread(int) == 0

    run(main())


def test_a_turn_that_does_not_come_in_time(run: Run[None]) -> None:
    """The function is not run then, and no turn is lost."""

    async def main() -> None:
        gate, late = Gate(), Gate()
        tasks = [asyncio.create_task(in_thread(gate)) for _ in range(THREADS_COUNT_MAX)]
        await until(lambda: gate.inside == THREADS_COUNT_MAX)
        with pytest.raises(DeadlineExceededError, match="threads") as found:
            await aio_threads.in_thread(late, deadline_ns=time.monotonic_ns())
        assert found.value.details == {"stage": "client"}
        gate.opened.set()
        await asyncio.gather(*tasks)
        tasks = [asyncio.create_task(in_thread(late)) for _ in range(2 * THREADS_COUNT_MAX)]
        await until(lambda: late.inside == THREADS_COUNT_MAX)
        late.opened.set()
        await asyncio.gather(*tasks)
        assert late.inside_max == THREADS_COUNT_MAX
        assert late.passed == 2 * THREADS_COUNT_MAX

    run(main())


def test_cleaning_up_needs_no_turn_and_holds_cancels_back(run: Run[None]) -> None:
    async def main() -> None:
        gate, cleaning = Gate(), Gate()
        tasks = [asyncio.create_task(in_thread(gate)) for _ in range(THREADS_COUNT_MAX)]
        await until(lambda: gate.inside == THREADS_COUNT_MAX)
        task = asyncio.create_task(clean_up_in_thread(cleaning))
        await until(lambda: cleaning.inside == 1)
        for _ in range(3):
            task.cancel()
            await turns(3)
        assert not task.done()
        cleaning.opened.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (cleaning.passed, gate.passed) == (1, 0)
        gate.opened.set()
        await asyncio.gather(*tasks)

    run(main())


def test_it_is_cleaned_up_without_a_thread_where_there_is_none(
    run: Run[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise WorkerUnavailableError("no thread")

    async def main() -> None:
        monkeypatch.setattr(aio_threads, "start_daemon", refuse)
        done: list[threading.Thread] = []
        await clean_up_in_thread(lambda: done.append(threading.current_thread()))
        assert done == [threading.current_thread()]
        for _ in range(THREADS_COUNT_MAX + 1):
            with pytest.raises(WorkerUnavailableError, match="no thread"):
                await in_thread(int)

    run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_who_is_cancelled_leaves_when_the_function_is_over(run: Run[None], *, fails: bool) -> None:
    """However often; what the function raises then is nobody's any more, and no reported error."""

    def work() -> None:
        gate()
        if fails:
            raise ZeroDivisionError

    async def main() -> None:
        task = asyncio.create_task(in_thread(work))
        await until(lambda: gate.inside == 1)
        for _ in range(3):
            task.cancel()
            await turns(3)
        assert not task.done()
        gate.opened.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert gate.passed == 1

    gate = Gate()
    run(main())


def test_what_was_given_is_let_go_without_the_garbage_collector(run: Run[None]) -> None:
    """A body may be large."""

    def fail(_: object) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        gate = Gate()
        given = weakref.ref(gate)
        with pytest.raises(ZeroDivisionError):
            await in_thread(fail, gate)
        inside, opened = threading.Event(), gate.opened
        task = asyncio.create_task(in_thread(enter, inside, gate))
        await until(inside.is_set)
        task.cancel()
        opened.set()
        await asyncio.wait([task])
        assert task.cancelled()
        del gate, task
        await until(lambda: given() is None)

    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()


def enter(inside: threading.Event, gate: Gate) -> int:
    inside.set()
    return gate()


def test_a_timeout_works_around_it(run: Run[None]) -> None:
    async def main() -> None:
        gate = Gate()
        scope = asyncio.timeout(None)

        async def expire() -> None:
            await until(lambda: gate.inside == 1)
            scope.reschedule(0)
            await turns(3)
            gate.opened.set()

        expiring = asyncio.create_task(expire())
        with pytest.raises(TimeoutError):
            async with scope:
                await in_thread(gate)
        await expiring
        assert gate.passed == 1

    run(main())


def test_a_loop_that_is_closed_meanwhile_is_not_told(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends all the same; what it raised would fail this test."""
    threads: list[threading.Thread] = []

    def start(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
        threads.append(start_daemon(name, target, *arguments))
        return threads[0]

    monkeypatch.setattr(aio_threads, "start_daemon", start)
    gate = Gate()
    loop = new_loop()
    # A task would be reported as destroyed; this is what its steps would do.
    work = in_thread(gate)
    loop.run_until_complete(_first_wait(work))
    loop.close()
    work.close()
    gate.opened.set()
    threads[0].join(60)
    assert gate.passed == 1


async def _first_wait(work: Coroutine[Any, Any, int]) -> None:
    """Go on to where it waits."""
    work.send(None)
