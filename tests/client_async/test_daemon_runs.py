"""Blocking functions in daemon threads: one at a time, taken over, and never a result that is lost."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from storage_worker.client.daemon_runs import DaemonRuns
from storage_worker.protocol.errors import DatabasePathError, StorageError, WorkerUnavailableError
from tests.client.fake import PATIENCE_S, until
from tests.client_async.conftest import Run
from tests.client_async.peers import away, turns

NS_PER_S = 10**9


class Blocked:
    """A function that returns when the test says so; `calls` are the deadlines it was called with."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.discarded: list[int] = []
        self.error: StorageError | None = None
        self._go_on = threading.Semaphore(0)
        self.runs = DaemonRuns(self, self.discarded.append)

    def __call__(self, deadline_ns: int) -> int:
        self.calls.append(deadline_ns)
        number = len(self.calls)
        assert self._go_on.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error
        return number

    def go_on(self) -> None:
        self._go_on.release()


def soon(seconds: float = PATIENCE_S) -> int:
    return time.monotonic_ns() + int(seconds * NS_PER_S)


def test_its_result_and_its_error(run: Run[None]) -> None:
    async def main() -> None:
        blocked = Blocked()
        blocked.go_on()
        deadline = soon()
        assert await blocked.runs.result(deadline) == 1
        assert blocked.calls == [deadline]
        blocked.go_on()
        assert await blocked.runs.result(soon()) == 2
        blocked.error = DatabasePathError("no")
        blocked.go_on()
        with pytest.raises(DatabasePathError):
            await blocked.runs.result(soon())
        assert blocked.discarded == []

    run(main())


def test_a_run_that_was_left_is_taken_over(run: Run[None]) -> None:
    async def main() -> None:
        blocked = Blocked()
        for _ in range(20):
            left = asyncio.create_task(blocked.runs.result(soon()))
            await turns(3)
            left.cancel()
            await asyncio.wait([left])
        task = asyncio.create_task(blocked.runs.result(soon()))
        await turns(3)
        blocked.go_on()
        assert await task == 1
        assert len(blocked.calls) == 1
        assert blocked.discarded == []

    run(main())


def test_what_nobody_waits_for_is_discarded(run: Run[None]) -> None:
    async def main() -> None:
        blocked = Blocked()
        left = asyncio.create_task(blocked.runs.result(soon()))
        await turns(3)
        left.cancel()
        await asyncio.wait([left])
        blocked.go_on()
        await away(until, lambda: blocked.discarded == [1])
        blocked.go_on()
        assert await blocked.runs.result(soon()) == 2

    run(main())


def test_a_result_that_meets_the_cancel_is_discarded(run: Run[None]) -> None:
    """The result is given to the task, which is cancelled before it can take it."""

    async def main() -> None:
        blocked = Blocked()
        task = asyncio.create_task(blocked.runs.result(soon()))
        await turns(3)
        the_run = blocked.runs._run
        assert the_run is not None
        the_run._succeed(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert blocked.discarded == [1]
        blocked.go_on()
        await away(until, lambda: blocked.discarded == [1, 1])

    run(main())


def test_a_result_behind_the_loops_end_is_discarded(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    blocked = Blocked()

    async def leave() -> None:
        left = asyncio.create_task(blocked.runs.result(soon()))
        await turns(3)
        assert not left.done()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(leave())
    blocked.go_on()
    until(lambda: blocked.discarded == [1])
    blocked.go_on()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(blocked.runs.result(soon())) == 2


def test_one_that_was_taken_over_and_had_less_time_is_followed_by_another(run: Run[None]) -> None:
    async def main() -> None:
        blocked = Blocked()
        left = asyncio.create_task(blocked.runs.result(soon(0.01)))
        await turns(3)
        left.cancel()
        task = asyncio.create_task(blocked.runs.result(soon()))
        await turns(3)
        blocked.error = WorkerUnavailableError("its time was over", outcome="not_committed")
        blocked.go_on()
        await away(until, lambda: len(blocked.calls) == 2)
        blocked.error = None
        blocked.go_on()
        assert await task == 2

    run(main())


def test_a_function_that_overruns_its_deadline_is_not_waited_for(run: Run[None]) -> None:
    async def main() -> None:
        blocked = Blocked()
        with pytest.raises(WorkerUnavailableError) as caught:
            await blocked.runs.result(soon(0.01))
        assert caught.value.outcome == "not_committed"
        blocked.go_on()
        await away(until, lambda: blocked.discarded == [1])

    run(main())
