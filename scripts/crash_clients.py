"""What the processes of the crash test do: each kind of client in its way, until it is stopped or killed."""

import asyncio
import bisect
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import ledger
import storage_worker as sw
from crash_points import STORE, SWITCH_VARIABLE
from crash_writes import (
    ANSWER_SECONDS_MAX,
    Answer,
    Diary,
    Life,
    Note,
    Perform,
    async_performer,
    client_performer,
    insert_of,
    life,
    live,
    live_async,
    transaction_performer,
)
from ledger import Fate, Ledger, LedgerWriter

PARENT_LOOKS_SECONDS = 0.2
PAUSE_SECONDS_MAX = 0.06
"""Clients think between two writes: the test is about order, and leaves the processor to what starts again."""

THREADS = 3
TASKS = 2
PIPELINED = 8
SNAPSHOT_SECONDS = 2.0

PRELOADED = (
    "crash_clients",
    "crash_report",
    "crash_faults",
    "typer",
    "storage_worker.client.snapshot",
    "storage_worker.launch_async",
)
"""What each process of the test would load by itself: it is there when it is forked."""

NUMBERS_EACH = 10
"""How many writers one client process may have."""

LIMITS = sw.Limits(
    # A crash loop is what this test makes; it must not end the supervision, nor slow it down.
    crash_loop_deaths=1_000_000,
    restart_backoff_ms_max=50,
    # Checkpoints, and holds of the readers for them, come often.
    wal_checkpoint_bytes=128 * 1024,
    wal_live_frames_max=100,
)


class Errand(NamedTuple):
    """What a process of the test is told. `own` is the first of its writers' numbers, `test` the test's process."""

    kind: str
    own: int
    address: str
    database: Path
    folder: Path
    stop_file: Path
    test: int
    switch: Path
    pipe: sw.Pipe | None

    @property
    def is_over(self) -> bool:
        """Whether it is to end; nobody writes on without the test."""
        return self.stop_file.exists() or not psutil.pid_exists(self.test)


class Pen:
    """How one writer notes: the fates of its writes and what is wrong.

    Arguments: `own`, its number; `tells`, whether it hears of an error as soon as that is there.
    """

    def __init__(self, folder: Path, own: int, *, tells: bool = True) -> None:
        self.own = own
        self._tells = tells
        self._notes = LedgerWriter(Ledger(folder).path(own))
        self._diary = Diary(folder / f"client-{own}.diary")
        self._dice = random.Random(own)

    def begin(self, number: int) -> Life:
        """A write's life, noted as sent."""
        self._notes.note(number, Fate.SENT)
        return life(self.own, number, self._tell, time.monotonic)

    def _tell(self, note: Note) -> None:
        if note.wrong or self._tells:
            self._diary.note(note)

    def end(self, number: int, fate: Fate) -> float:
        """Note what became of it; seconds to think before the next one."""
        self._notes.note(number, fate)
        return self._dice.uniform(0.0, PAUSE_SECONDS_MAX)

    def complain(self, wrong: str) -> None:
        """Note what is wrong."""
        self._diary.note(Note(wrong=f"client {self.own}: {wrong}"))

    def close(self) -> None:
        """Close its files."""
        self._notes.close()
        self._diary.close()


def write_until(is_over: Callable[[], bool], perform: Perform, folder: Path, own: int) -> None:
    """One writer: write and note it until `is_over`."""
    pen = Pen(folder, own)
    number = 0
    while not is_over():
        time.sleep(pen.end(number, live(pen.begin(number), perform)))
        number += 1
    pen.close()


def dialled(errand: Errand) -> sw.Client:
    """A client by address."""
    return sw.connect(errand.address, timeout=ANSWER_SECONDS_MAX, name=errand.kind)


def by_address(errand: Errand, ready: Callable[[int], None]) -> None:
    """One thread, by address."""
    with dialled(errand) as client:
        ready(0)
        write_until(lambda: errand.is_over, client_performer(client), errand.folder, errand.own)


def by_pipe(errand: Errand, ready: Callable[[int], None]) -> None:
    """One thread, by a pipe that was handed to this process."""
    assert errand.pipe is not None
    with errand.pipe.connect() as client:
        ready(0)
        write_until(lambda: errand.is_over, client_performer(client), errand.folder, errand.own)


def by_path(errand: Errand, ready: Callable[[int], None]) -> None:
    """One thread, by the database's path: the shared worker is found or started."""
    with sw.connect(errand.database, timeout=ANSWER_SECONDS_MAX, name=errand.kind, stores=[STORE]) as client:
        ready(0)
        write_until(lambda: errand.is_over, client_performer(client), errand.folder, errand.own)


def write_in_threads(
    is_over: Callable[[], bool], client: sw.Client, folder: Path, own: int, threads: int
) -> None:
    """Many writers on one client."""
    with ThreadPoolExecutor(threads) as pool:
        writers = [
            pool.submit(write_until, is_over, client_performer(client), folder, own + place)
            for place in range(threads)
        ]
    for writer in writers:
        writer.result()


def by_threads(errand: Errand, ready: Callable[[int], None]) -> None:
    """Many threads on one client."""
    with dialled(errand) as client:
        ready(0)
        write_in_threads(lambda: errand.is_over, client, errand.folder, errand.own, THREADS)


def by_transaction(errand: Errand, ready: Callable[[int], None]) -> None:
    """Interactive transactions."""
    with dialled(errand) as client:
        ready(0)
        write_until(lambda: errand.is_over, transaction_performer(client), errand.folder, errand.own)


def by_pipeline(errand: Errand, ready: Callable[[int], None]) -> None:
    """Blocks of pipelined writes."""
    # An answer is looked at behind those before it, some of which are sent again.
    pen = Pen(errand.folder, errand.own, tells=False)
    number = 0
    with dialled(errand) as client:
        ready(0)
        while not errand.is_over:
            time.sleep(_pipeline_block(client, pen, number))
            number += PIPELINED
    pen.close()


def _pipeline_block(client: sw.Client, pen: Pen, first: int) -> float:
    """Send some writes without waiting, then learn what became of each; seconds to think before the next."""
    rest = client_performer(client)
    begun: list[tuple[int, Life, Callable[[], Answer]]] = []
    try:
        with client.pipeline() as pipeline:
            for number in range(first, first + PIPELINED):
                insert = insert_of(pen.own, number)
                steps = pen.begin(number)
                future = pipeline.execute(
                    ledger.INSERT, insert.row, timeout=insert.timeout, request_key=insert.key
                )
                begun.append((number, steps, future.result))
    except sw.StorageError as error:
        if not error.retryable:
            pen.complain(f"a pipeline: {type(error).__name__}: {error}")
    return max((pen.end(number, live(steps, rest, end)) for number, steps, end in begun), default=0.0)


def by_asyncio(errand: Errand, ready: Callable[[int], None]) -> None:
    """Tasks of an event loop, some of whose calls are cancelled."""
    asyncio.run(_write_in_tasks(errand, ready))


async def _write_in_tasks(errand: Errand, ready: Callable[[int], None]) -> None:
    target = errand.database if errand.kind == "path, asyncio" else errand.address
    async with await sw.connect_async(
        target, timeout=ANSWER_SECONDS_MAX, name=errand.kind, stores=[STORE]
    ) as client:
        ready(0)
        await asyncio.gather(*(_write_in_task(errand, client, errand.own + place) for place in range(TASKS)))


async def _write_in_task(errand: Errand, client: sw.AsyncClient, own: int) -> None:
    pen = Pen(errand.folder, own)
    perform = async_performer(client)
    number = 0
    while not errand.is_over:
        await asyncio.sleep(pen.end(number, await live_async(pen.begin(number), perform)))
        number += 1
    pen.close()


def by_fork(errand: Errand, ready: Callable[[int], None]) -> None:
    """A process that forks while a call is in flight; both go on with the same client."""
    parent = os.getpid()
    with dialled(errand) as client, ThreadPoolExecutor(1) as pool:
        perform = client_performer(client)
        writer = pool.submit(write_until, lambda: errand.is_over, perform, errand.folder, errand.own)
        child = forked(
            lambda: write_until(
                lambda: errand.is_over or os.getppid() != parent, perform, errand.folder, errand.own + 1
            )
        )
        ready(child)
        writer.result()
        _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the forked child ended with {status}")


def by_snapshot(errand: Errand, ready: Callable[[int], None]) -> None:
    """Writes, and after each a local snapshot that must show it."""
    pen = Pen(errand.folder, errand.own)
    number = 0
    with dialled(errand) as client:
        ready(0)
        while not errand.is_over:
            fate = live(pen.begin(number), client_performer(client))
            pause = pen.end(number, fate)
            try:
                _look(client, pen, number, fate)
            except sw.StorageError as error:
                if not error.retryable:
                    pen.complain(f"a snapshot: {type(error).__name__}: {error}")
            time.sleep(pause)
            number += 1
    pen.close()


def _look(client: sw.Client, pen: Pen, number: int, fate: Fate) -> None:
    newest = "select max(rowid) from writes"
    with client.snapshot(SNAPSHOT_SECONDS, timeout=ANSWER_SECONDS_MAX) as snapshot:
        first = snapshot.query(newest).scalar()
        times = snapshot.query(ledger.COUNT_SQL, (pen.own, number)).scalar()
        if times > 1 or times < (fate is Fate.ACKNOWLEDGED) or (times and fate is Fate.NOT_COMMITTED):
            pen.complain(f"write {number}, {fate.name}, stands {times} times in a snapshot taken after it")
        if snapshot.query(newest).scalar() != first:
            pen.complain("a snapshot has changed")


KINDS: dict[str, Callable[[Errand, Callable[[int], None]], None]] = {
    "address": by_address,
    "pipe": by_pipe,
    "threads": by_threads,
    "pipeline": by_pipeline,
    "transaction": by_transaction,
    "asyncio": by_asyncio,
    "fork": by_fork,
    "snapshot": by_snapshot,
    "path": by_path,
    "path, asyncio": by_asyncio,
}

SHARED_KINDS = ("path", "path, asyncio")
OWNED_KINDS = tuple(kind for kind in KINDS if kind not in SHARED_KINDS)


def client_process(errand: Errand, reports: Any) -> None:
    """One client process. It shares no lock with others: it may be killed at any moment.

    It says once that it is connected, and which other process belongs to it, if one does.
    """
    os.environ[SWITCH_VARIABLE] = str(errand.switch)
    KINDS[errand.kind](errand, lambda other: reports.send_bytes(str(other).encode()))


def host_process(errand: Errand, reports: Any) -> None:
    """A host with a worker of its own, and threads of it that write."""
    os.environ[SWITCH_VARIABLE] = str(errand.switch)
    with (
        sw.StorageWorker(errand.database, limits=LIMITS, stores=[STORE]) as worker,
        worker.connect(name="the host's own") as client,
        bystander(),
    ):
        make_tables(client)
        reports.send_bytes(b"0")
        write_in_threads(lambda: errand.is_over, client, errand.folder, errand.own, 2)


def make_tables(client: sw.Client) -> None:
    """What the clients write to."""
    client.execute(ledger.CREATE)
    client.execute(ledger.CREATE_INDEX)


def delays(marks: Sequence[tuple[float, bool]], told_s: Iterable[float]) -> list[float]:
    """Seconds from a worker's death until a client was told, each from the last death before; sorted.

    All are times on the monotonic clock. `marks` are in order; with each goes whether it is a death, or another
    event from which on nothing can be said.
    """
    places = ((told, bisect.bisect_right(marks, (told, True))) for told in told_s)
    return sorted(told - marks[place - 1][0] for told, place in places if place and marks[place - 1][1])


def forked(work: Callable[[], None]) -> int:
    """Fork a child that does `work` and ends; its process id."""
    with warnings.catch_warnings():
        # That other threads run at the fork is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - the child must end here, whatever it was
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


@contextmanager
def bystander() -> Iterator[None]:
    """A child of this process that has nothing to do with the worker and holds copies of all descriptors."""
    parent = os.getpid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOKS_SECONDS)

    child = forked(wait)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
