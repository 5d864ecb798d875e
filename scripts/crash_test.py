#!/usr/bin/env python3
"""Kill workers, clients and hosts at random moments under load, and hold the database against a ledger.

    scripts/crash_test.py --kills 200 --seed 7
    scripts/crash_test.py --kills 20 --host-kills 10

Every client notes each write before it sends it and again when it knows its end. After each kill and at the end:
no acknowledged write is lost, none stands twice (those repeated with their request key included), one without a
key whose end is unknown stands once at the most, what was called not committed does not stand at all. Descriptors,
children and threads of the host and of the clients stay flat. The exit status is 0 where all of that holds, 1
where not, 3 where the test itself could not go on.
"""

import bootstrap

# isort: split
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer
from multiprocess.connection import wait as wait_for_any
from rich.console import Console
from rich.progress import track
from rich.table import Table

import crash_clients
import ledger
import storage_worker as sw
from crash_clients import ANSWER_SECONDS_MAX, WRITE_SECONDS_MAX, ClientReport, Resources
from ledger import Checked, Fate, Ledger
from measuring import complain, processes, quantile, terminal

assert bootstrap.entered()

RECHECKED_WRITES = 200
"""How many writes of each client before the newest are looked at again after a kill; the end looks at all."""

HOST_DEATH_SECONDS_MAX = 2.0
FLAT_TOLERANCE = 3
WRONG_SHOWN_MAX = 20


class Outcome(msgspec.Struct):
    """What the whole test found."""

    seed: int
    kills: int = 0
    client_kills: int = 0
    host_kills: int = 0
    checks: int = 0
    fates: dict[str, int] = {}
    answered_after_s: list[float] = []
    worker_outlived_host_s: list[float] = []
    resources: list[Resources] = []
    wrong: list[str] = []


class Fleet:
    """The client processes of one worker; one that is killed is replaced by another with a number of its own."""

    def __init__(self, worker: sw.StorageWorker, notes: Ledger) -> None:
        self._worker = worker
        self._notes = notes
        self._context = processes("crash_clients")
        self._stop_file = notes.folder / "stop"
        self._running: dict[Any, Any] = {}
        self._next = 0

    def add(self) -> None:
        """Start one more client and wait until it is connected."""
        own, self._next = self._next, self._next + 1
        receiver, sender = self._context.Pipe(duplex=False)
        arguments = (
            self._worker.pipe(role="write", name=f"client {own}"),
            own,
            self._notes.path(own),
            self._stop_file,
            sender,
        )
        process = self._context.Process(target=crash_clients.client_process, args=arguments, daemon=True)
        process.start()
        sender.close()
        self._running[receiver] = process
        if not receiver.poll(ANSWER_SECONDS_MAX):
            raise TimeoutError(f"client {own} did not connect")
        receiver.recv_bytes()

    def kill_one(self, dice: random.Random) -> None:
        """Kill a client and start its successor."""
        receiver = dice.choice(list(self._running))
        self._end(receiver)
        self.add()

    def stop(self) -> list[ClientReport]:
        """Let all clients end and gather what they say."""
        self._stop_file.touch()
        reports = []
        deadline = time.monotonic() + WRITE_SECONDS_MAX * 2 + ANSWER_SECONDS_MAX
        while self._running:
            ready: list[Any] = wait_for_any(
                list(self._running), timeout=max(0.0, deadline - time.monotonic())
            )
            for receiver in ready:
                try:
                    reports.append(msgspec.msgpack.decode(receiver.recv_bytes(), type=ClientReport))
                except EOFError:
                    reports.append(
                        ClientReport(
                            Resources(0, 0, 0), Resources(0, 0, 0), ["a client ended without a word"]
                        )
                    )
                self._end(receiver)
            if not ready:
                raise TimeoutError(f"{len(self._running)} clients did not end")
        return reports

    def close(self) -> None:
        """Kill whatever still runs."""
        for receiver in list(self._running):
            self._end(receiver)

    def _end(self, receiver: Any) -> None:
        process = self._running.pop(receiver)
        process.kill()
        process.join()
        process.close()
        receiver.close()


def kill_workers(
    worker: sw.StorageWorker,
    notes: Ledger,
    clients: int,
    outcome: Outcome,
    kills: int,
    dice: random.Random,
    end: float,
) -> None:
    """The main part: kill, wait for the next worker to answer, compare."""
    fleet = Fleet(worker, notes)
    watched: dict[int, int] = {}
    try:
        with worker.connect(name="checker") as checker:
            for _ in range(clients):
                fleet.add()
            for number in track(range(kills), description="killing workers"):
                if time.monotonic() > end:
                    outcome.wrong.append(f"out of time after {number} kills")
                    break
                # A random moment, most often while the worker serves, now and then while it starts.
                time.sleep(dice.uniform(0.0, 0.2))
                killed_at = time.monotonic()
                outcome.kills += _kill_worker()
                if number % 5 == 0:
                    time.sleep(dice.uniform(0.0, 0.3))
                    outcome.kills += _kill_worker()
                if number % 10 == 9:
                    fleet.kill_one(dice)
                    outcome.client_kills += 1
                notes.read()
                checker.query("select 1", timeout=ANSWER_SECONDS_MAX)
                _add(outcome, ledger.check(checker, notes, bodies=False, after=watched))
                outcome.answered_after_s.append(time.monotonic() - killed_at)
                outcome.resources.append(Resources.now())
                watched = {
                    own: max(fates, default=0) - RECHECKED_WRITES for own, fates in notes.fates.items()
                }
            for report in fleet.stop():
                outcome.wrong.extend(report.wrong)
                outcome.wrong.extend(_not_flat("a client", report.first, report.last))
    finally:
        fleet.close()
    if len(outcome.resources) > 1:
        outcome.wrong.extend(_not_flat("the host", outcome.resources[0], outcome.resources[-1]))


def _kill_worker() -> int:
    """Kill this process's worker, also one that does not listen yet; how many were killed."""
    killed = 0
    for child in psutil.Process().children():
        try:
            if "storage_worker.worker" in child.cmdline():
                child.kill()
                killed += 1
        except psutil.NoSuchProcess:
            continue
    return killed


def _add(outcome: Outcome, checked: Checked) -> None:
    outcome.checks += 1
    outcome.wrong.extend(checked.wrong)


def _not_flat(whose: str, first: Resources, last: Resources) -> list[str]:
    return [
        f"{whose}: {name} grew from {before} to {after}"
        for name, before, after in zip(
            first.__struct_fields__,
            msgspec.structs.astuple(first),
            msgspec.structs.astuple(last),
            strict=True,
        )
        if after > before + FLAT_TOLERANCE
    ]


def kill_hosts(
    database: Path, folder: Path, outcome: Outcome, kills: int, clients: int, dice: random.Random
) -> None:
    """Kill whole hosts; each time the worker must follow and the next host must get the database."""
    context = processes("crash_clients")
    for number in track(range(kills), description="killing hosts"):
        receiver, sender = context.Pipe(duplex=False)
        own = [1_000_000 + number * clients + place for place in range(clients)]
        host = context.Process(target=crash_clients.host_process, args=(database, folder, own, sender))
        host.start()
        sender.close()
        try:
            if not receiver.poll(ANSWER_SECONDS_MAX):
                raise TimeoutError("a host did not start")
            worker = psutil.Process(int(receiver.recv_bytes()))
            time.sleep(dice.uniform(0.0, 0.5))
            host.kill()
            killed_at = time.monotonic()
            worker.wait(ANSWER_SECONDS_MAX)
            outcome.worker_outlived_host_s.append(time.monotonic() - killed_at)
            outcome.host_kills += 1
        finally:
            host.kill()
            host.join()
            receiver.close()
    late = [took for took in outcome.worker_outlived_host_s if took > HOST_DEATH_SECONDS_MAX]
    outcome.wrong.extend(f"a worker outlived its host by {took:.2f} s" for took in late)


def check_everything(database: Path, notes: Ledger, outcome: Outcome) -> None:
    """The last word: a fresh worker, every write, its content and SQLite's own check."""
    with sw.StorageWorker(database) as worker, worker.connect() as client:
        notes.read()
        _add(outcome, ledger.check(client, notes, bodies=True))
        outcome.wrong.extend(f"integrity: {finding.text}" for finding in client.check(timeout=600.0))
    outcome.fates = {fate.name.lower(): notes.count(fate) for fate in Fate}


def print_outcome(console: Console, outcome: Outcome) -> None:
    """What was done and what was found."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("seed", str(outcome.seed))
    table.add_row(
        "kills", f"{outcome.kills} workers, {outcome.client_kills} clients, {outcome.host_kills} hosts"
    )
    table.add_row(
        "writes", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in outcome.fates.items())
    )
    table.add_row("checks", f"{outcome.checks:,}")
    if outcome.answered_after_s:
        took = sorted(outcome.answered_after_s)
        table.add_row("answer after a kill", f"p50 {quantile(took, 0.5):.2f} s, longest {took[-1]:.2f} s")
    if outcome.worker_outlived_host_s:
        table.add_row("worker outlived its host", f"longest {max(outcome.worker_outlived_host_s):.2f} s")
    if outcome.resources:
        first, last = outcome.resources[0], outcome.resources[-1]
        table.add_row(
            "host, first and last",
            f"descriptors {first.descriptors} and {last.descriptors}, children {first.children} and {last.children},"
            f" threads {first.threads} and {last.threads}",
        )
    console.print(table)
    for text in outcome.wrong[:WRONG_SHOWN_MAX]:
        console.print(text, style="red", highlight=False)
    verdict = (
        f"{len(outcome.wrong)} findings" if outcome.wrong else "nothing lost, nothing twice, everything flat"
    )
    console.print(verdict, style="bold red" if outcome.wrong else "bold green")


def main(
    kills: Annotated[int, typer.Option(min=0, max=100_000, help="How often a worker is killed.")] = 200,
    host_kills: Annotated[int, typer.Option(min=0, max=10_000, help="How often a whole host is killed.")] = 3,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 8,
    seed: Annotated[int | None, typer.Option(help="Repeats the random moments of an earlier run.")] = None,
    seconds_max: Annotated[
        float, typer.Option(min=1, help="Begin no further kill after this time.")
    ] = 1_200.0,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the database and the ledgers here.", file_okay=False, exists=True),
    ] = None,
) -> None:
    """Kill workers, clients and hosts under load; nothing acknowledged may be lost or stand twice."""
    console = terminal()
    outcome = Outcome(seed=seed if seed is not None else random.randrange(2**32))
    console.print(f"seed {outcome.seed}", highlight=False)
    dice = random.Random(outcome.seed)
    # A crash loop is what this test makes; it must not end the supervision, nor slow it down.
    limits = sw.Limits(crash_loop_deaths=1_000_000, restart_backoff_ms_max=50)
    try:
        with tempfile.TemporaryDirectory(prefix="crash-test-") as made:
            place = folder or Path(made)
            database, notes = place / "crash.db", Ledger(place)
            with sw.StorageWorker(database, limits=limits) as worker:
                with worker.connect() as client:
                    client.execute(ledger.CREATE)
                    client.execute(ledger.CREATE_INDEX)
                end = time.monotonic() + seconds_max
                kill_workers(worker, notes, clients, outcome, kills, dice, end)
            kill_hosts(database, place, outcome, host_kills, clients, dice)
            check_everything(database, notes, outcome)
    except (sw.StorageError, TimeoutError, psutil.TimeoutExpired) as error:
        complain(f"seed {outcome.seed}: {type(error).__name__}: {error}")
        raise typer.Exit(3) from error
    print_outcome(console, outcome)
    raise typer.Exit(1 if outcome.wrong else 0)


if __name__ == "__main__":
    typer.run(main)
