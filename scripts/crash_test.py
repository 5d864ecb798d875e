#!/usr/bin/env python3
"""Kill and stop workers, hosts and clients, at random and at named points, and hold the database against a ledger.

    scripts/crash_test.py --rounds 1000 --seconds-max 600 --seed 7
    scripts/crash_test.py --points

Each round does one fault of a shuffled deck: SIGKILL, SIGSTOP beyond the deadlines and SIGCONT, SIGTERM, to the
worker, the host or a client of any kind, or the worker's own death at a named point. Two databases are served: one by
a worker that a host owns, one by a shared worker that its clients find or start by path. The clients write through
one thread, many threads on one client, a pipeline, interactive transactions, an event loop with cancelled calls, a
pipe that was handed over, an address, a path, a client carried over a fork, and read local snapshots.

Every client notes each write before it sends it and again when it knows its end. After each round and at the end: no
acknowledged write is lost, none stands twice (those repeated with their request key included), what was called not
committed, or was fenced by `outcome`, never stands, and `outcome` tells the truth about every key whose end no client
knows. A write in flight is told of its worker's death within a second, although a child of the host that has nothing
to do with it holds all of the host's descriptors; a worker follows its host within two. Descriptors, children and
threads stay flat, each migration ran once, and SQLite finds the database sound.

The same seed gives the same faults in the same order; what the processes do between them is the system's choice. The
exit status is 0 where all of that holds and as many rounds were done as asked for, 1 where not, 3 where the test
itself could not go on. What a lost power may leave of a disk is shown elsewhere: `tests/worker/test_power_loss.py`.
"""

import bootstrap

# isort: split
import os
import random
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

import ledger
import storage_worker as sw
from crash_clients import PRELOADED, delays
from crash_faults import faults, rounds_of_a_deck, tally
from crash_fleet import Fleet, Resources, not_flat
from crash_points import Point
from crash_report import Outcome, print_outcome
from ledger import Fate
from measuring import complain, processes, terminal, write_json

assert bootstrap.entered()

TOLD_SECONDS_MAX = 1.0
CHECK_SECONDS_MAX = 600.0


def run(folder: Path, outcome: Outcome, rounds: int, seconds_max: float) -> None:
    """The whole test in an empty folder; adds to `outcome` what it does and finds."""
    context = processes(*PRELOADED)
    began = time.monotonic()
    with ExitStack() as stack:
        fleets = {owned: Fleet(folder / name, context, owned=owned) for owned, name in FLEETS.items()}
        for fleet in fleets.values():
            stack.callback(fleet.close)
        for fleet in fleets.values():
            fleet.start()
        first = Resources.of(os.getpid())
        do_rounds(fleets, outcome, rounds, began + seconds_max)
        # Its own clients have been there all the time, through every restart.
        outcome.wrong += not_flat("the test's own process", first, Resources.of(os.getpid()))
        for fleet in fleets.values():
            finish(fleet, outcome)
    outcome.seconds = time.monotonic() - began
    outcome.wrong += shortfall(outcome, rounds)
    for took in (outcome.told_after_s, outcome.round_s, outcome.worker_outlived_host_s):
        took.sort()


FLEETS = {True: "owned", False: "shared"}


def do_rounds(fleets: dict[bool, Fleet], outcome: Outcome, rounds: int, end: float) -> None:
    """One fault after another, and after each a look at what is stored."""
    drawn = faults(outcome.seed)
    for _ in track(range(rounds), description="rounds"):
        began = time.monotonic()
        if began > end:
            return
        fault, dice = next(drawn)
        fleet = fleets[fault.owned]
        try:
            counts = outcome.faults if fault.act(fleet, dice) else outcome.missed
            counts[fault.name] = counts.get(fault.name, 0) + 1
            outcome.writes_judged += fleet.compare().writes
            fleet.look_at_members()
        except (sw.StorageError, TimeoutError) as error:
            error.add_note(f"in the round {outcome.rounds}, {fault.name}; the worker: {fleet.last_words}")
            raise
        outcome.rounds += 1
        outcome.round_s.append(time.monotonic() - began)


def finish(fleet: Fleet, outcome: Outcome) -> None:
    """Let all clients of a fleet end, and have the last word: a fresh worker, every write, SQLite's own check."""
    fleet.stop()
    notes = fleet.notes
    notes.read()
    with sw.StorageWorker(fleet.database) as worker, worker.connect() as client:
        everything = ledger.check(client, notes, bodies=True)
        asked = ledger.check_outcomes(client, notes)
        fleet.wrong += everything.wrong + asked.wrong
        fleet.wrong += [f"integrity: {finding.text}" for finding in client.check(timeout=CHECK_SECONDS_MAX)]
        fleet.wrong += check_migrations(client, fleet.switch.migrations)
    outcome.outcomes_asked += asked.writes
    told = delays(fleet.marks, fleet.told_s)
    outcome.told_after_s += told
    outcome.worker_outlived_host_s += fleet.worker_outlived_host_s
    outcome.wrong += [f"{FLEETS[fleet.owned]}: {wrong}" for wrong in fleet.wrong]
    outcome.wrong += [
        f"a client was told of a worker's death after {took:.2f} s"
        for took in told
        if took > TOLD_SECONDS_MAX
    ]
    for point in Point:
        outcome.points[point.label] = outcome.points.get(point.label, 0) + fleet.switch.hits(point)
    for fate in Fate:
        name = fate.name.lower()
        outcome.fates[name] = outcome.fates.get(name, 0) + notes.count(fate)


def check_migrations(client: sw.Client, count: int) -> list[str]:
    """Each ran once, however often a worker died in one."""
    if not count:
        return []
    rows = client.query("select number, count(*) from crash_migrations group by number order by number").rows
    return (
        [] if rows == [(number, 1) for number in range(1, count + 1)] else [f"{count} migrations left {rows}"]
    )


def shortfall(outcome: Outcome, rounds: int) -> list[str]:
    """What was asked for and did not happen: a test that killed nothing has shown nothing."""
    wrong = []
    if outcome.rounds < rounds:
        wrong.append(f"only {outcome.rounds:,} of {rounds:,} rounds were done")
    if rounds >= rounds_of_a_deck():
        wrong += [f"it never happened: {name}" for name in tally(Counter(outcome.faults))]
    return wrong


def print_points() -> None:
    """The named points."""
    table = Table("crash point", "where the worker dies")
    for point in Point:
        table.add_row(point.label, point.text)
    terminal().print(table)


def main(
    rounds: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many faults.")] = 200,
    seconds_max: Annotated[
        float, typer.Option(min=1, help="Begin no further round after this time.")
    ] = 600.0,
    seed: Annotated[int | None, typer.Option(help="Repeats the faults of an earlier run.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Keep the databases and the ledgers in this empty folder.", file_okay=False, exists=True
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures here.", dir_okay=False)] = None,
    points: Annotated[bool, typer.Option("--points", help="List the named crash points and end.")] = False,
) -> None:
    """Kill and stop workers, hosts and clients; nothing acknowledged may be lost or stand twice."""
    if points:
        print_points()
        return
    outcome = Outcome(seed=seed if seed is not None else random.randrange(2**32))
    console = terminal()
    console.print(f"seed {outcome.seed}", highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="crash-test-") as made:
            run(folder or Path(made), outcome, rounds, seconds_max)
    except (sw.StorageError, TimeoutError) as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        complain(f"seed {outcome.seed}: {type(error).__name__}: {error} {notes}")
        raise typer.Exit(3) from error
    print_outcome(console, outcome)
    if json is not None:
        write_json(json, outcome)
    raise typer.Exit(1 if outcome.wrong else 0)


if __name__ == "__main__":
    typer.run(main)
