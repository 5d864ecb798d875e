#!/usr/bin/env python3
"""Import transcripts twice while workers and importers are killed at random, and compare the store with the source.

    scripts/import_test.py
    scripts/import_test.py --kills 100 --seed 7 ../shared/data/tau-bench

Whole importers, single client processes of theirs, and workers are killed; importers that were killed are started
again. After each of the two imports every session must have its source's number of records and digest, and the
second one must add nothing. The exit status is 0 where all of that holds, 1 where not, 3 where the test itself could
not go on.
"""

import bootstrap

# isort: split
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer
from multiprocess.connection import wait as wait_for_any
from multiprocess.context import SpawnContext
from rich.console import Console
from rich.table import Table

import import_checks
import storage_worker as sw
from import_checks import Expected
from measuring import Recorder, complain, terminal
from storage_worker.conversation import payload_client
from storage_worker.conversation_client import STORE
from storage_worker.import_fleet import Summary, import_paths

assert bootstrap.entered()

SHARED = Path(__file__).parents[2] / "shared" / "data"
PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 1.5
ENDING_SECONDS_MAX = 120.0
WRONG_SHOWN_MAX = 20


class Outcome(msgspec.Struct):
    """What the whole test found."""

    seed: int
    sessions: int = 0
    records: int = 0
    events: int = 0
    seconds: list[float] = []
    worker_kills: int = 0
    client_kills: int = 0
    importer_kills: int = 0
    wrong: list[str] = []


def importer(address: str, paths: list[str], processes: int, results: Any) -> None:
    """A process of its own that imports everything, and tells what became of it."""
    summary = import_paths(address, paths, processes=processes)
    results.send_bytes(msgspec.msgpack.encode(summary))


class Siege:
    """One import, which is broken off and taken up again until it is done."""

    def __init__(self, worker: sw.StorageWorker, outcome: Outcome, dice: random.Random) -> None:
        self._worker = worker
        self._outcome = outcome
        self._dice = dice
        self._context = SpawnContext()
        self._orphans: list[psutil.Process] = []

    def run(self, paths: list[str], processes: int, kills: int) -> Summary:
        """Import with `kills` kills on the way; the summary of the importer that came to the end."""
        while True:
            receiver, sender = self._context.Pipe(duplex=False)
            arguments = (self._worker.address, paths, processes, sender)
            process = self._context.Process(target=importer, args=arguments)
            process.start()
            sender.close()
            try:
                summary, kills = self._besiege(process, receiver, kills)
            finally:
                process.kill()
                process.join()
                receiver.close()
            if summary is not None:
                self._wait_for_orphans()
                return summary

    def _besiege(self, process: Any, receiver: Any, kills: int) -> tuple[Summary | None, int]:
        """Kill until the importer is done, or is killed itself; its summary, and the kills that are left."""
        while True:
            pause = self._dice.uniform(PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX) if kills else None
            if wait_for_any([receiver], timeout=pause):
                return msgspec.msgpack.decode(receiver.recv_bytes(), type=Summary), kills
            kills -= 1
            choice = self._dice.random()
            if choice < 0.4:
                if self._worker.pid is not None:
                    os.kill(self._worker.pid, signal.SIGKILL)
                    self._outcome.worker_kills += 1
            elif choice < 0.75:
                self._kill_client(process.pid)
            else:
                # What it has started ends by itself; meanwhile the next importer does the same work.
                self._orphans += psutil.Process(process.pid).children()
                self._outcome.importer_kills += 1
                return None, kills

    def _kill_client(self, pid: int) -> None:
        children = psutil.Process(pid).children()
        if children:
            self._dice.choice(children).kill()
            self._outcome.client_kills += 1

    def _wait_for_orphans(self) -> None:
        _, alive = psutil.wait_procs(self._orphans, timeout=ENDING_SECONDS_MAX)
        if alive:
            self._outcome.wrong.append(f"{len(alive)} clients outlived their importer")
        for process in alive:
            process.kill()


def check(worker: sw.StorageWorker, expected: dict[str, Expected], outcome: Outcome, name: str) -> int:
    """Compare the store with the source; how many events it holds."""
    with worker.connect() as client:
        verdict = import_checks.verify(client, expected, Recorder())
        outcome.wrong += [f"{name}: {difference}" for difference in verdict.differences]
        outcome.sessions, outcome.records = verdict.sessions, verdict.records
        outcome.wrong += [f"{name}: {finding}" for finding in payload_client.check(client)]
        return int(client.query("select count(*) from conversation_events").scalar())


def run(paths: list[Path], processes: int, kills: int, folder: Path, outcome: Outcome) -> None:
    """Both imports and both comparisons."""
    dice = random.Random(outcome.seed)
    expected = import_checks.expected_of(paths)
    # A crash loop is what this test makes; it must not end the supervision, nor slow it down.
    limits = sw.Limits(crash_loop_deaths=1_000_000, restart_backoff_ms_max=50)
    with sw.StorageWorker(folder / "import.db", stores=[STORE], limits=limits) as worker:
        counts = []
        for name, share in (("first import", kills - kills // 4), ("second import", kills // 4)):
            began = time.monotonic()
            summary = Siege(worker, outcome, dice).run([str(path) for path in paths], processes, share)
            outcome.seconds.append(time.monotonic() - began)
            outcome.wrong += [f"{name}: {text}" for text in (*summary.failures, *summary.problems)]
            counts.append(check(worker, expected, outcome, name))
        outcome.events = counts[0]
        if counts[0] != counts[1]:
            outcome.wrong.append(f"the second import added {counts[1] - counts[0]} events")
        with worker.connect(role="admin") as client:
            outcome.wrong += [f"integrity: {finding.text}" for finding in client.check(timeout=600.0)]


def print_outcome(console: Console, outcome: Outcome) -> None:
    """What was done and what was found."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("seed", str(outcome.seed))
    table.add_row(
        "killed",
        f"{outcome.worker_kills} workers, {outcome.client_kills} clients, {outcome.importer_kills} importers",
    )
    table.add_row(
        "stored", f"{outcome.sessions:,} sessions, {outcome.records:,} records, {outcome.events:,} events"
    )
    table.add_row("took", ", ".join(f"{seconds:.1f} s" for seconds in outcome.seconds))
    console.print(table)
    for text in outcome.wrong[:WRONG_SHOWN_MAX]:
        console.print(text, style="red", highlight=False, markup=False)
    verdict = (
        f"{len(outcome.wrong)} findings" if outcome.wrong else "as in the source, and the second adds nothing"
    )
    console.print(verdict, style="bold red" if outcome.wrong else "bold green")


def main(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Transcripts; ../shared/data by default.", exists=True)
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Client processes of an import.")] = 8,
    kills: Annotated[int, typer.Option(min=0, max=10_000, help="How often something is killed.")] = 40,
    seed: Annotated[int | None, typer.Option(help="Repeats the choices of an earlier run.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep the database here.", file_okay=False, exists=True)
    ] = None,
) -> None:
    """Import everything twice under kills; the store must hold what the source holds, once."""
    console = terminal()
    outcome = Outcome(seed=seed if seed is not None else random.randrange(2**32))
    console.print(f"seed {outcome.seed}", highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="import-test-") as made:
            run(paths or [SHARED], processes, kills, folder or Path(made), outcome)
    except (sw.StorageError, psutil.Error, OSError) as error:
        complain(f"seed {outcome.seed}: {type(error).__name__}: {error}")
        raise typer.Exit(3) from error
    print_outcome(console, outcome)
    raise typer.Exit(1 if outcome.wrong else 0)


if __name__ == "__main__":
    typer.run(main)
