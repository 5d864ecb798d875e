#!/usr/bin/env python3
"""What a worker costs: its start, its memory at rest, with many idle clients, and over many writes.

    scripts/footprint.py
    scripts/footprint.py --clients 1000 --writes 1000000 --json footprint.json

The exit status is 0 where every figure keeps its goal, 1 where one does not, 3 where it could not be measured.
"""

import bootstrap

# isort: split
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import storage_worker as sw
from load_workloads import CREATE, INSERT, VALUE
from measuring import complain, terminal, write_json

assert bootstrap.entered()

MIB = 2**20
START_SECONDS_GOAL = 0.5
REST_MIB_GOAL = 60.0
CLIENTS_MIB_GOAL = 150.0
GROWTH_MIB_GOAL = 8.0

SPARE_DESCRIPTORS = 200
SLICES = 20
CONNECT_SECONDS_MAX = 10.0


class Figure(msgspec.Struct):
    """One figure and the goal that it must not exceed."""

    name: str
    value: float
    goal: float
    unit: str

    @property
    def kept(self) -> bool:
        """Whether it keeps its goal."""
        return self.value <= self.goal


@contextmanager
def _worker(limits: sw.Limits | None = None) -> Iterator[sw.StorageWorker]:
    with (
        tempfile.TemporaryDirectory(prefix="footprint-") as folder,
        sw.StorageWorker(Path(folder) / "footprint.db", limits=limits) as worker,
    ):
        yield worker


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    return float(psutil.Process(pid).memory_info().rss) / MIB


def start_seconds() -> float:
    """From nothing to the first answer."""
    began = time.perf_counter()
    with _worker() as worker, worker.connect() as client:
        client.query("select 1")
        return time.perf_counter() - began


def rest_mib() -> float:
    """A worker that has answered one client."""
    with _worker() as worker, worker.connect() as client:
        client.query("select 1")
        return resident_mib(client.status().process.pid)


def clients_mib(count: int) -> float:
    """A worker with that many connected clients, each of which has asked something once."""
    limits = sw.Limits(connections_max=count + SPARE_DESCRIPTORS)
    with _worker(limits) as worker, ExitStack() as stack:
        for number in range(count):
            client = stack.enter_context(worker.connect(name=f"idle {number}", timeout=CONNECT_SECONDS_MAX))
            client.query("select 1")
        status = stack.enter_context(worker.connect()).status()
        if len(status.clients) < count:
            raise sw.WorkerUnavailableError(f"only {len(status.clients)} of {count} clients are connected")
        return resident_mib(status.process.pid)


def memory_over_writes(writes: int, console: Console) -> list[float]:
    """Resident MiB after each of `SLICES` equal parts of that many writes."""
    found = []
    part = max(1, writes // SLICES)
    with _worker() as worker, worker.connect() as client:
        client.execute(CREATE)
        pid = client.status().process.pid
        with console.status(f"{writes:,} writes") as shown:
            for place in range(SLICES):
                with client.pipeline() as pipeline:
                    for number in range(place * part, (place + 1) * part):
                        pipeline.execute(INSERT, (f"key{number}", VALUE, number))
                found.append(resident_mib(pid))
                shown.update(f"{(place + 1) * part:,} of {writes:,} writes: {found[-1]:.1f} MiB")
    return found


def main(
    clients: Annotated[int, typer.Option(min=1, max=100_000, help="Idle clients.")] = 1_000,
    writes: Annotated[
        int, typer.Option(min=SLICES, help="Writes over which memory must stay flat.")
    ] = 1_000_000,
    starts: Annotated[int, typer.Option(min=1, max=1_000, help="How often a worker is started.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Measure what a worker costs beside its work."""
    console = terminal()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        took = sorted(start_seconds() for _ in range(starts))
        memory = [rest_mib(), clients_mib(clients)]
        over_writes = memory_over_writes(writes, console)
    except sw.StorageError as error:
        complain(f"{type(error).__name__}: {error}")
        raise typer.Exit(3) from error
    # The first part fills caches that are bounded; what comes after it must not grow.
    growth = over_writes[-1] - over_writes[SLICES // 10]
    figures = [
        Figure("start to first answer, median", took[len(took) // 2], START_SECONDS_GOAL, "s"),
        Figure("resident at rest", memory[0], REST_MIB_GOAL, "MiB"),
        Figure(f"resident with {clients:,} idle clients", memory[1], CLIENTS_MIB_GOAL, "MiB"),
        Figure(f"growth over {writes:,} writes", growth, GROWTH_MIB_GOAL, "MiB"),
    ]
    table = Table("figure", "value", "goal", "", box=SIMPLE_HEAD)
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.value:.2f} {figure.unit}",
            f"at most {figure.goal:g} {figure.unit}",
            "[green]kept[/green]" if figure.kept else "[red]missed[/red]",
        )
    console.print(table)
    if json is not None:
        write_json(
            json, {"figures": figures, "starts_seconds": took, "resident_mib_over_writes": over_writes}
        )
    raise typer.Exit(0 if all(figure.kept for figure in figures) else 1)


if __name__ == "__main__":
    typer.run(main)
