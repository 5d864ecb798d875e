"""A host that ends in one of many ways, without a `close()`, while 1 MiB of its writes is on its way.

Its arguments: the database's path; `owned` or `shared`; how it calls; how it ends; `answering` or `stopped`, whether the
worker goes on meanwhile. It prints the worker's process id, each number whose write was acknowledged, and `ending`
when the writes are on their way.
"""

import asyncio
import atexit
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import storage_worker as sw
from storage_worker import launch

CREATE = "create table t(id integer, data text)"
INSERT = "insert into t(id, data) values (?, ?)"
DATA = "x" * 16_384
IN_FLIGHT = 64
FIRST, LAST = 0, 1_000_000
"""The numbers of the write before all others, and of the one at the interpreter's exit."""

PATH, OWNERSHIP, CALLS, ENDING, WORKER = sys.argv[1:]


class HostFailedError(Exception):
    """What ends a host that ends by an exception."""


def say(what: object) -> None:
    """Print at once, whole, from any thread."""
    os.write(sys.stdout.fileno(), f"{what}\n".encode())


def silence(pid: int) -> None:
    """Stop the worker, where nothing is to be answered any more."""
    if WORKER == "stopped":
        os.kill(pid, signal.SIGSTOP)


def end() -> None:
    """End by an exception where it is to be that; a signal comes from outside."""
    say("ending")
    if ENDING == "exception":
        raise HostFailedError
    waiting = threading.Event()
    while ENDING.startswith("SIG"):
        # A signal that comes just before a wait without an end does not end that.
        waiting.wait(0.1)


def leave(_number: int, _frame: object) -> NoReturn:
    """End as servers do."""
    sys.exit(0)


def from_threads(client: sw.Client, numbers: Iterator[int]) -> None:
    """Each write in a thread that keeps no process."""
    some = threading.Event()

    def write_on() -> None:
        for number in numbers:
            client.execute(INSERT, (number, DATA))
            say(number)
            some.set()

    for _ in range(IN_FLIGHT):
        threading.Thread(target=write_on, daemon=True).start()
    if WORKER == "answering":
        some.wait()
    end()


def from_a_pipeline(client: sw.Client, numbers: Iterator[int]) -> None:
    """All writes from the main thread."""
    with client.pipeline() as pipeline:
        if WORKER == "stopped":
            # It fills up, and then waits for room.
            say("ending")
        written = [
            (number, pipeline.execute(INSERT, (number, DATA)))
            for number in itertools.islice(numbers, IN_FLIGHT)
        ]
        number, future = written.pop(0)
        future.result()
        say(number)
        end()
    for number, future in written:
        future.result()
        say(number)


async def from_tasks(client: sw.AsyncClient, numbers: Iterator[int]) -> None:
    """All writes from tasks of one loop, which are cancelled at its end."""
    some = asyncio.Event()

    async def write_on() -> None:
        for number in numbers:
            await client.execute(INSERT, (number, DATA))
            say(number)
            some.set()

    tasks = [asyncio.create_task(write_on()) for _ in range(IN_FLIGHT)]
    await asyncio.sleep(0)
    if WORKER == "answering":
        await some.wait()
    say("ending")
    if ENDING == "exception":
        raise HostFailedError
    if ENDING.startswith("SIG"):
        await asyncio.gather(*tasks)


def at_exit(write: Callable[[], object]) -> None:
    """Have one more write made when the interpreter ends."""

    def write_last() -> None:
        write()
        say(LAST)

    if ENDING == "atexit":
        atexit.register(write_last)


def run_plainly() -> None:
    """A host with the synchronous client."""
    client = worker.connect() if worker else sw.connect(PATH)
    client.execute(CREATE)
    at_exit(lambda: client.execute(INSERT, (LAST, DATA)))
    say(pid := client.connect().pid)
    client.execute(INSERT, (FIRST, DATA))
    say(FIRST)
    silence(pid)
    (from_threads if CALLS == "threads" else from_a_pipeline)(client, itertools.count(FIRST + 1))


async def run_in_a_loop() -> None:
    """A host with the asynchronous client."""

    async def write_last() -> None:
        # The loop of the other client is closed.
        last = await (worker.connect_async() if worker else sw.connect_async(PATH))
        await last.execute(INSERT, (LAST, DATA))

    client = await (worker.connect_async() if worker else sw.connect_async(PATH))
    await client.execute(CREATE)
    at_exit(lambda: asyncio.run(write_last()))
    say(pid := (await client.connect()).pid)
    await client.execute(INSERT, (FIRST, DATA))
    say(FIRST)
    silence(pid)
    await from_tasks(client, itertools.count(FIRST + 1))


launch.DEFAULT_LIMITS = sw.Limits(shared_idle_ms=50)  # type: ignore[attr-defined]
worker = sw.StorageWorker(PATH) if OWNERSHIP == "owned" else None
if worker is not None:
    worker.start()
if ENDING == "SIGTERM handled":
    signal.signal(signal.SIGTERM, leave)
if CALLS == "tasks":
    asyncio.run(run_in_a_loop())
else:
    run_plainly()
