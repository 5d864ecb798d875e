#!/usr/bin/env python3
"""What the conversation store costs: ingest beside plain inserts, with many stored events, at opening, while listed.

    scripts/conversation_benchmark.py ingest --clients 8
    scripts/conversation_benchmark.py growth --events 1000000
    scripts/conversation_benchmark.py listing --events 80000

Each takes `--transcript`, a file of tau-bench sessions. The exit status is 0 where every figure keeps its goal,
1 where one does not, 3 where it could not be measured.
"""

import bootstrap

# isort: split
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

import conversation_workloads as workloads
import storage_worker as sw
from conversation_workloads import ROOM, STORES, Output
from measuring import ClientFailedError, Run, complain, figures, processes, run_clients, terminal
from storage_worker import conversation

assert bootstrap.entered()

TRANSCRIPT = Path(__file__).parents[2] / "shared" / "data" / "tau-bench" / "gpt-4o-airline.json"
INGEST_SHARE_GOAL = 0.5
GROWTH_GOAL = 1.2
OPENING_SECONDS_GOAL = 0.3
APPEND_GOAL = 1.5
"""How much slower, at the median, an appender may be while its session is listed; two cores are shared by all."""

APPEND_TAIL_GOAL = 3.0
"""The same for the slowest in a hundred: it may stand behind one page."""

FEW_EVENTS = 1_000
ADDED_EVENTS = 200
OPENINGS = 5

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Transcript = Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A file of tau-bench sessions.")]
Folder = Annotated[Path | None, typer.Option(file_okay=False, exists=True, help="Where databases are made.")]
Rounds = Annotated[int, typer.Option(min=1, max=100, help="Runs of each kind, in turns.")]


class Figure(NamedTuple):
    """A figure and the goal that it is held against: at least it, or at most."""

    name: str
    value: float
    goal: float
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Whether it keeps its goal."""
        return self.value >= self.goal if self.at_least else self.value <= self.goal


@contextmanager
def _worker(path: Path) -> Iterator[sw.StorageWorker]:
    with sw.StorageWorker(path, stores=STORES) as worker:
        with worker.connect() as client:
            client.execute(workloads.CREATE_PLAIN)
            client.call(conversation.create_room(ROOM))
        yield worker


@contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="conversation-", dir=folder) as made:
        yield Path(made)


def _context() -> Any:
    return processes("conversation_workloads")


def _report(title: str, runs: dict[str, list[Run]], found: list[Figure]) -> None:
    console = terminal()
    table = Table(
        "kind", "events/s", "p50 ms", "p99 ms", "worker CPU us", "errors", box=SIMPLE_HEAD, title=title
    )
    failed = False
    for kind, of_kind in runs.items():
        seen = figures(of_kind)
        failed = failed or bool(seen.errors)
        cpu = "" if seen.worker_cpu_us is None else f"{seen.worker_cpu_us:.0f}"
        table.add_row(
            kind,
            f"{seen.operations_per_s:,.0f}",
            f"{seen.p50_ms:.3f}",
            f"{seen.p99_ms:.3f}",
            cpu,
            str(seen.errors or ""),
        )
    console.print(table)
    for figure in found:
        sign = "at least" if figure.at_least else "at most"
        kept = "kept" if figure.kept else "NOT KEPT"
        console.print(f"{figure.name}: {figure.value:.2f} ({sign} {figure.goal:g}: {kept})")
    raise typer.Exit(1 if failed or not all(figure.kept for figure in found) else 0)


@app.command()
def ingest(
    clients: Annotated[int, typer.Option(min=1, max=200, help="Client processes.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds of each run.")] = 2.0,
    rounds: Rounds = 5,
    transcript: Transcript = TRANSCRIPT,
    folder: Folder = None,
) -> None:
    """Ingest real messages, and insert the same texts as plain rows, in turns on one worker."""
    outputs = workloads.read_outputs(transcript)
    loops = {"ingest_output": workloads.ingest_loop, "plain insert": workloads.plain_loop}
    runs: dict[str, list[Run]] = {kind: [] for kind in loops}
    context = _context()
    with _folder(folder) as made, _worker(made / "app.db") as worker:
        for number in range(rounds):
            for kind, loop in loops.items():
                arguments = [
                    (worker.pipe(), own, number * 10_000_000, seconds, outputs) for own in range(clients)
                ]
                run = run_clients(context, loop, arguments, seconds=seconds, worker_pid=worker.pid)
                runs[kind].append(run)
    speeds = [figures(of_kind).operations_per_s for of_kind in runs.values()]
    share = Figure("ingest_output over plain insert", speeds[0] / speeds[1], INGEST_SHARE_GOAL, at_least=True)
    _report(f"{clients} clients, durability full, {rounds} rounds of {seconds:g} s", runs, [share])


def _fill(context: Any, worker: sw.StorageWorker, events: int, outputs: list[Output], writers: int) -> None:
    share = -(-events // writers)
    share += -share % workloads.SESSION_EVENTS
    arguments = [
        (worker.pipe(), first, min(first + share, events), outputs) for first in range(0, events, share)
    ]
    run_clients(context, workloads.fill_loop, arguments)


def _add(context: Any, worker: sw.StorageWorker, events: int, mark: str, outputs: list[Output]) -> Run:
    numbers = [random.randrange(events) for _ in range(ADDED_EVENTS)]
    arguments = [(worker.pipe(), numbers, mark, outputs)]
    return run_clients(context, workloads.add_loop, arguments, worker_pid=worker.pid)


def _opening_seconds(path: Path) -> float:
    started = time.perf_counter()
    with sw.StorageWorker(path, stores=STORES) as worker, worker.connect() as client:
        client.call(conversation.rooms())
        return time.perf_counter() - started


@app.command()
def growth(
    events: Annotated[int, typer.Option(min=FEW_EVENTS, help="Events in the large store.")] = 1_000_000,
    writers: Annotated[int, typer.Option(min=1, max=64, help="Clients that fill it.")] = 2,
    rounds: Rounds = 10,
    transcript: Transcript = TRANSCRIPT,
    folder: Folder = None,
) -> None:
    """Compare a store of many events with one of 1,000: the cost of one more event, and the time it takes to open."""
    outputs = workloads.read_outputs(transcript)
    context = _context()
    sizes = {f"{FEW_EVENTS:,} events": FEW_EVENTS, f"{events:,} events": events}
    runs: dict[str, list[Run]] = {kind: [] for kind in sizes}
    with _folder(folder) as made:
        paths = {kind: made / f"{size}.db" for kind, size in sizes.items()}
        for kind, size in sizes.items():
            with _worker(paths[kind]) as worker:
                _fill(context, worker, size, outputs, writers)
        few, many = sizes
        with _worker(paths[few]) as small, _worker(paths[many]) as large:
            for number in range(rounds):
                for kind, worker in ((few, small), (many, large)):
                    runs[kind].append(_add(context, worker, sizes[kind], f"added {number}", outputs))
        empty, full = [], []
        for number in range(OPENINGS):
            empty.append(_opening_seconds(made / f"empty {number}.db"))
            full.append(_opening_seconds(paths[many]))
    costs = [figures(of_kind) for of_kind in runs.values()]
    found = [
        Figure("median time per event, many over few", costs[1].p50_ms / costs[0].p50_ms, GROWTH_GOAL),
        Figure(
            "worker CPU per event, many over few",
            (costs[1].worker_cpu_us or 0) / (costs[0].worker_cpu_us or 1),
            GROWTH_GOAL,
        ),
        Figure(
            "seconds to open, many over empty",
            statistics.median(full) - statistics.median(empty),
            OPENING_SECONDS_GOAL,
        ),
    ]
    _report(f"one client, {rounds} rounds of {ADDED_EVENTS} events", runs, found)


@app.command()
def listing(
    events: Annotated[int, typer.Option(min=1, help="Events of the session.")] = 80_000,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds of each run.")] = 5.0,
    rounds: Rounds = 3,
    folder: Folder = None,
) -> None:
    """List a long session while another client appends to it every 10 ms, and let it append alone, in turns."""
    session = "long session"
    context = _context()
    alone: list[Run] = []
    listed: list[Run] = []
    pages: list[Run] = []
    with _folder(folder) as made, _worker(made / "app.db") as worker, worker.connect() as client:
        with client.pipeline() as pipeline:
            for number in range(events):
                pipeline.call(conversation.append(session, "note", {"number": number}), timeout=60.0)
        for _ in range(rounds):
            arguments = [(worker.pipe(), session, seconds)]
            alone.append(run_clients(context, workloads.append_loop, arguments, seconds=seconds))
            ended = threading.Event()
            with ThreadPoolExecutor(1) as thread:
                sample = thread.submit(workloads.list_until, ended, client, session)
                try:
                    arguments = [(worker.pipe(), session, seconds)]
                    listed.append(run_clients(context, workloads.append_loop, arguments, seconds=seconds))
                finally:
                    ended.set()
                pages.append(Run([sample.result()], seconds, None))
    with_pages, without = figures(listed), figures(alone)
    found = [
        Figure("median append, while listed over alone", with_pages.p50_ms / without.p50_ms, APPEND_GOAL),
        Figure(
            "p99 of appends, while listed over alone", with_pages.p99_ms / without.p99_ms, APPEND_TAIL_GOAL
        ),
    ]
    runs = {"appends alone": alone, "appends while listed": listed, "pages": pages}
    _report(f"a session of {events:,} events", runs, found)


if __name__ == "__main__":
    try:
        app()
    except (ClientFailedError, sw.StorageError) as error:
        complain(f"{type(error).__name__}: {error}")
        raise SystemExit(3) from error
