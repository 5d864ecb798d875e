"""Asynchronous clients of real workers: every method, cancellation and kills under load, starts and searches."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import storage_worker as sw
from storage_worker import launch
from storage_worker.ownership import is_owned
from tests.client.test_fork import in_child
from tests.client_async.conftest import Run
from tests.client_async.peers import away, turns, until
from tests.client_async.test_line import run_elsewhere
from tests.worker import notes_store as store

ROOT = Path(__file__).parents[2]

CREATE = "create table t(id integer primary key, a)"
INSERT = "insert into t(a) values (?)"


def test_every_method(run: Run[None], database: Path, tmp_path: Path) -> None:
    async def main(worker: sw.StorageWorker) -> None:
        async with await worker.connect_async("admin") as client:
            welcome = await client.connect()
            assert (welcome.pid, welcome.role) == (worker.pid, "admin")
            await client.script(f"{CREATE}; create table u(b)")
            assert (await client.execute(INSERT, (1,), request_key="one")).last_insert_rowid == 1
            await client.batch([(INSERT, (2,)), (INSERT, (3,))])
            assert (await client.query("select count(*) from t")).scalar() == 3
            async with client.transaction(lease=5.0) as transaction:
                await transaction.execute(INSERT, (4,))
                with pytest.raises(ZeroDivisionError):
                    await fail_inside(transaction)
                assert (await transaction.query("select max(a) from t")).scalar() == 4
            async with client.pipeline() as pipeline:
                futures = [await pipeline.execute(INSERT, (place,)) for place in range(5, 1000)]
            assert [(await future).last_insert_rowid for future in futures] == list(range(5, 1000))
            rows = [
                row
                async for page in client.pages("select id, a from t", ("id",), page_rows=90)
                for row in page
            ]
            assert rows == [(place, place) for place in range(1, 1000)]
            assert await client.call(store.add("hello"), request_key="note") == 1
            assert (await client.outcome("note")).result_as(store.add) == 1
            assert (await client.outcome("one")).committed
            assert (await client.outcome("never", fence=True)).state == "fenced"
            status = await client.status()
            assert status.path == str(database)
            assert (await client.health()).state == "healthy"
            assert await client.check() == []
            assert await client.backup(tmp_path / "copy.db") > 0
            await client.stop()
        assert await away(worker.wait, 60)

    with sw.StorageWorker(database, stores=[store.NOTES]) as worker:
        run(main(worker))


async def fail_inside(transaction: sw.AsyncInteractiveTransaction) -> None:
    async with transaction.savepoint():
        await transaction.execute(INSERT, (5,))
        raise ZeroDivisionError


def test_a_thousand_calls_at_once(run: Run[None], database: Path) -> None:
    async def main(worker: sw.StorageWorker) -> None:
        async with await worker.connect_async() as client:
            await client.execute(CREATE)
            await asyncio.gather(*(client.execute(INSERT, (place,), retries=0) for place in range(1000)))
            counts = await asyncio.gather(*(client.query("select count(*) from t") for _ in range(1000)))
            assert {rows.scalar() for rows in counts} == {1000}
            lanes = {lane.name: lane for lane in (await client.status()).lanes}
            assert lanes["foreground"].refused_requests == 0

    with sw.StorageWorker(database, durability="normal") as worker:
        run(main(worker))


def test_a_write_that_was_cancelled_is_done_wholly_or_not_at_all(run: Run[None], database: Path) -> None:
    """After hundreds of cancels at every moment each key's outcome and the table say the same."""

    async def write(client: sw.AsyncClient, place: int) -> None:
        pair = [(INSERT, (f"{place} one",)), (INSERT, (f"{place} two",))]
        await client.batch(pair, request_key=f"k{place}", retries=0)

    async def main(worker: sw.StorageWorker) -> None:
        chance = random.Random(5)
        ends: dict[int, str] = {}
        pause = 0.0005
        async with await worker.connect_async() as client:
            await client.execute(CREATE)
            for first in range(0, 480, 8):
                tasks = {
                    place: asyncio.create_task(write(client, place)) for place in range(first, first + 8)
                }
                if first % 3:
                    await turns(first // 8 % 20)
                else:
                    await asyncio.sleep(pause)
                    # Keep close to the moment at which the answers come, however fast the machine is.
                    pause *= 0.7 if any(task.done() for task in tasks.values()) else 1.4
                for place in chance.sample(sorted(tasks), 5):
                    tasks[place].cancel()
                await asyncio.wait(tasks.values())
                ends |= {
                    place: "cancelled" if task.cancelled() else "failed" if task.exception() else "done"
                    for place, task in tasks.items()
                }
            # A fence keeps what was cancelled from coming late.
            outcomes = {place: (await client.outcome(f"k{place}", fence=True)).committed for place in ends}
            stored = Counter(str(row[0]) for row in await client.query("select a from t"))
        for place, end in ends.items():
            assert stored[f"{place} one"] == stored[f"{place} two"] == outcomes[place]
            if end == "done":
                assert outcomes[place]
        assert set(ends.values()) == {"cancelled", "done"}

    with sw.StorageWorker(database, durability="normal") as worker:
        run(main(worker))


def test_a_running_statement_ends_when_its_call_is_cancelled(run: Run[None], database: Path) -> None:
    endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"

    async def main(worker: sw.StorageWorker) -> None:
        async with await worker.connect_async() as client:
            await client.execute(CREATE)
            for sql, call in ((endless, client.query), (f"insert into t(a) {endless}", client.execute)):
                task = asyncio.create_task(call(sql, timeout=600))
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.wait([task])
                # The writer is free again.
                await client.execute(INSERT, (1,), timeout=30)
            assert (await client.query("select count(*) from t")).scalar() == 2

    with sw.StorageWorker(database) as worker:
        run(main(worker))


def test_kills_under_load(run: Run[None], database: Path) -> None:
    """Reads and writes with keys do not notice; other writes get an error whose outcome is true."""
    acknowledged: set[str] = set()
    unknown: set[str] = set()

    async def work(client: sw.AsyncClient, name: int, over: asyncio.Event) -> None:
        number = 0
        while not over.is_set():
            number += 1
            keyed, plain = f"{name} {number} keyed", f"{name} {number} plain"
            await client.execute(INSERT, (keyed,), request_key=keyed)
            acknowledged.add(keyed)
            assert (await client.query("select count(*) from t where a = ?", (keyed,))).scalar() == 1
            try:
                await client.execute(INSERT, (plain,))
                acknowledged.add(plain)
            except sw.WorkerUnavailableError as error:
                if error.outcome == "unknown":
                    unknown.add(plain)

    async def main(worker: sw.StorageWorker) -> None:
        over = asyncio.Event()
        async with await worker.connect_async() as client:
            await client.execute(CREATE)
            tasks = [asyncio.create_task(work(client, name, over)) for name in range(32)]
            for restarts in range(3):
                seen = len(acknowledged)
                await until(lambda: len(acknowledged) > seen + 100)  # noqa: B023 - used at once
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
                await until(lambda: worker.restarts > restarts)  # noqa: B023 - used at once
            over.set()
            await asyncio.gather(*tasks)
            stored = Counter(
                row[0] for row in await client.query("select a from t", max_result_bytes=8 << 20)
            )
        assert acknowledged <= set(stored)
        assert set(stored) <= acknowledged | unknown
        assert [value for value, count in stored.items() if count > 1] == []

    with sw.StorageWorker(database) as worker:
        run(main(worker))


def test_a_worker_that_is_not_restarted_any_more(run: Run[Any], database: Path) -> None:
    async def main(worker: sw.StorageWorker) -> None:
        async with await worker.connect_async() as client:
            await client.execute(CREATE)
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(sw.CrashLoopError) as caught:
                await client.query("select 1")
            assert caught.value.outcome == "not_committed"
        with pytest.raises(sw.CrashLoopError):
            await worker.connect_async()

    with sw.StorageWorker(database, limits=sw.Limits(crash_loop_deaths=1)) as worker:
        run(main(worker))
    with pytest.raises(sw.WorkerUnavailableError):
        run(worker.connect_async())


def test_calls_that_are_cancelled_while_the_worker_restarts_leave_one_thread(
    run: Run[None], database: Path
) -> None:
    async def main(worker: sw.StorageWorker) -> None:
        async with await worker.connect_async() as client:
            assert worker.pid is not None
            threads = threading.active_count()
            os.kill(worker.pid, signal.SIGKILL)
            await until(lambda: worker.pid is None)
            most = 0
            for _ in range(50):
                task = asyncio.create_task(client.query("select 1"))
                await turns(5)
                task.cancel()
                await asyncio.wait([task])
                most = max(most, threading.active_count())
            assert most <= threads + 1
            assert (await client.query("select 1")).scalar() == 1

    limits = sw.Limits(restart_backoff_ms_min=300)
    with sw.StorageWorker(database, limits=limits) as worker:
        run(main(worker))


# Finding and starting


@pytest.fixture
def quick_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared workers end soon after their last client."""
    monkeypatch.setattr(launch, "DEFAULT_LIMITS", sw.Limits(shared_idle_ms=50))


def test_a_path_is_enough(run: Run[None], database: Path, quick_to_leave: None) -> None:
    """The example of the guide, and many at once: one worker."""

    async def main() -> None:
        async with await sw.connect_async(database, timeout=60) as client:
            await client.execute(CREATE)
        clients = await asyncio.gather(*(sw.connect_async(database, timeout=60) for _ in range(16)))
        workers = {(await client.connect()).worker for client in clients}
        assert len(workers) == 1
        address = (await clients[0].status()).address
        async with await sw.connect_async(address, role="read", name="by address") as reader:
            with pytest.raises(sw.NotPermittedError):
                await reader.execute(INSERT, (1,))
            names = [peer.name for peer in (await reader.status()).clients]
            assert "by address" in names
        for client in clients:
            await client.close()
        await until(lambda: not is_owned(str(database)))

    run(main())


def test_a_shared_worker_that_was_killed_is_started_again(
    run: Run[None], database: Path, quick_to_leave: None
) -> None:
    async def main() -> None:
        async with await sw.connect_async(database, timeout=60) as client:
            await client.execute(CREATE)
            for place in range(3):
                os.kill((await client.connect()).pid, signal.SIGKILL)
                await asyncio.gather(
                    *(client.execute(INSERT, (n,), request_key=f"{place} {n}") for n in range(20))
                )
            assert (await client.query("select count(*) from t")).scalar() == 60
        await until(lambda: not is_owned(str(database)))

    run(main())


def test_what_cannot_be_reached_or_asked_for(run: Run[None], tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(sw.NotPermittedError):
            await sw.connect_async(tmp_path / "a.db", role="admin")
        with pytest.raises(sw.DatabasePathError):
            await sw.connect_async(tmp_path)
        with pytest.raises(sw.InvalidRequestError):
            await sw.connect_async(tmp_path / "a.db", role="nobody")  # type: ignore[arg-type]
        with pytest.raises(sw.WorkerUnavailableError):
            await sw.connect_async(f"unix://{tmp_path}/no.sock", timeout=0.05)

    run(main())


@pytest.mark.parametrize("after", [1, 3, 0.05, 0.3])
def test_a_start_may_be_cancelled_at_any_moment(
    run: Run[None], database: Path, quick_to_leave: None, after: float
) -> None:
    """It goes on for whoever comes next; nothing is left where nobody comes."""

    async def main() -> None:
        task = asyncio.create_task(sw.connect_async(database, timeout=60))
        await (turns(int(after)) if isinstance(after, int) else asyncio.sleep(after))
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().close()
        async with await sw.connect_async(database, timeout=60) as client:
            await client.execute(CREATE)
        await until(lambda: not is_owned(str(database)))

    run(main())


def test_a_forked_child_finds_the_worker(run: Run[None], database: Path) -> None:
    async def main(worker: sw.StorageWorker) -> None:
        async with await worker.connect_async() as own, await sw.connect_async(database) as found:
            await own.execute(CREATE)

            async def in_the_child() -> list[object]:
                return [(await client.query("select count(*) from t")).scalar() for client in (own, found)]

            assert in_child(partial(run_elsewhere, in_the_child)) == [0, 0]
            for client in (own, found):
                await client.execute(INSERT, (1,))
            assert (await own.query("select count(*) from t")).scalar() == 2

    with sw.StorageWorker(database) as worker:
        run(main(worker))


@pytest.mark.parametrize(
    ("kind", "moment"), [("asyncio", "start"), ("uvloop", "connected"), ("asyncio", "writing")]
)
def test_a_process_ends_at_once_and_what_was_acknowledged_is_there(
    database: Path, run_program: Callable[[str], Any], kind: str, moment: str
) -> None:
    program = f"""
import asyncio, os, sys, uvloop
import storage_worker as sw
from storage_worker import launch
launch.DEFAULT_LIMITS = sw.Limits(shared_idle_ms=50)
os.environ["STARTED_FOR"] = {str(database)!r}

async def main():
    start = asyncio.create_task(sw.connect_async({str(database)!r}, timeout=60))
    if {moment!r} == "start":
        await asyncio.sleep(0.05)
        return
    client = await start
    await client.execute("create table if not exists t(a)")
    if {moment!r} == "writing":
        tasks = [asyncio.create_task(client.execute("insert into t values (?)", (n,))) for n in range(500)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        print(sum(task.exception() is None for task in done), flush=True)

factory = {{"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}}[{kind!r}]
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""
    out = run_program(program)

    async def count() -> int:
        async with await sw.connect_async(database, timeout=60) as client:
            await client.execute("create table if not exists t(a)")
            found: int = (await client.query("select count(*) from t")).scalar()
        # The program's own worker may still be on its way to the database.
        await until(lambda: not is_owned(str(database)) and not is_started_for(database))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "DEFAULT_LIMITS", sw.Limits(shared_idle_ms=50))
        stored = asyncio.run(count())
    if moment == "writing":
        assert stored >= int(out)


def is_started_for(database: Path) -> bool:
    """Whether a process runs that a program started which had named that database in its environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get("STARTED_FOR") == str(database):
                return True
    return False


@pytest.fixture
def run_program() -> Callable[[str], str]:
    """Runs a program that must succeed in silence; what it printed."""

    def run_it(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run_it
