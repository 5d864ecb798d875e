#!/usr/bin/env python3
"""Point reads of a snapshot against the standard sqlite3 module in the same process, in alternating rounds.

    scripts/snapshot_benchmark.py
    scripts/snapshot_benchmark.py --reads 5000 --rounds 100 --json snapshots.json

All kinds read the same rows of the same file by their keys, while the worker holds the file open. `snapshot` is
`snap.query(...)`; `sqlite3` is `connection.execute(...).fetchall()` in autocommit, as a program reads that does not
take a transaction for it; `sqlite3 in a transaction` is the same inside one, which holds a state as a snapshot does,
but checks and bounds nothing. Each kind has the file to itself in this process, except `sqlite3 beside a snapshot`:
SQLite shares locks between the connections of a process, so that an open snapshot spares autocommit its locking.

The exit status is 0 where snapshots reach their share of the reads per second of autocommit, 1 where they do not, 3
where it could not be measured.
"""

import bootstrap

# isort: split
import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

import storage_worker as sw
from measuring import complain, terminal, write_json

assert bootstrap.entered()

SHARE_GOAL = 0.9
WARM_UP_READS = 500
BATCH_ROWS = 1_000
SQL = "select body from notes where id = ?"

Read = Callable[[str, tuple[int]], Any]


class Figures(msgspec.Struct, kw_only=True):
    """Reads per second of each kind: the median of its rounds; `share` is the median of the rounds' ratios."""

    snapshot: float
    autocommit: float
    beside: float
    transaction: float
    share: float
    share_of_beside: float
    share_of_transaction: float


@contextmanager
def raw(path: str, *, begin: bool) -> Iterator[Read]:
    """The standard module, read-only, in autocommit or in a transaction."""
    with closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, isolation_level=None)) as found:
        if begin:
            found.execute("begin")

        def read(sql: str, parameters: tuple[int]) -> list[tuple[Any, ...]]:
            return found.execute(sql, parameters).fetchall()

        yield read


@contextmanager
def snapshot(client: sw.Client) -> Iterator[Read]:
    """A snapshot of the client."""
    with client.snapshot(60.0) as snap:
        yield snap.query


@contextmanager
def beside(client: sw.Client, path: str) -> Iterator[Read]:
    """The standard module in autocommit, while a snapshot is open that does nothing."""
    with client.snapshot(60.0), raw(path, begin=False) as read:
        yield read


def reads_per_s(read: Read, keys: list[tuple[int]]) -> float:
    """How many of the reads were done in a second."""
    for key in keys[:WARM_UP_READS]:
        read(SQL, key)
    began = time.perf_counter()
    for key in keys:
        read(SQL, key)
    return len(keys) / (time.perf_counter() - began)


def measure(folder: Path, rows: int, reads: int, rounds: int) -> Figures:
    """The figures of so many alternating rounds."""
    with sw.StorageWorker(folder / "benchmark.db") as worker, worker.connect() as client:
        client.execute("create table notes(id integer primary key, body text)")
        for first in range(0, rows, BATCH_ROWS):
            last = min(first + BATCH_ROWS, rows)
            client.batch([("insert into notes values(?, ?)", (id_, "x" * 50)) for id_ in range(first, last)])
        path = client.status().path
        kinds: dict[str, Callable[[], Any]] = {
            "snapshot": lambda: snapshot(client),
            "autocommit": lambda: raw(path, begin=False),
            "beside": lambda: beside(client, path),
            "transaction": lambda: raw(path, begin=True),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(rounds):
            keys = [(random.randrange(rows),) for _ in range(reads)]
            order = list(kinds) if number % 2 else list(reversed(kinds))
            for kind in order:
                with kinds[kind]() as read:
                    found[kind].append(reads_per_s(read, keys))
    return Figures(
        share=_share(found["snapshot"], found["autocommit"]),
        share_of_beside=_share(found["snapshot"], found["beside"]),
        share_of_transaction=_share(found["snapshot"], found["transaction"]),
        **{kind: median(values) for kind, values in found.items()},
    )


def _share(ours: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def main(
    rows: Annotated[int, typer.Option(min=1, max=10_000_000, help="Rows of the table.")] = 10_000,
    reads: Annotated[int, typer.Option(min=1, max=1_000_000, help="Reads of one round.")] = 5_000,
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Rounds of each kind.")] = 40,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Measure point reads of a snapshot against the standard sqlite3 module."""
    try:
        with tempfile.TemporaryDirectory(prefix="snapshots-") as folder:
            figures = measure(Path(folder), rows, reads, rounds)
    except sw.StorageError as error:
        complain(f"{type(error).__name__}: {error}")
        raise typer.Exit(3) from error
    table = Table("kind", "reads/s", "µs per read", "snapshot's share", box=SIMPLE_HEAD)
    for name, value, share in (
        ("snapshot", figures.snapshot, 1.0),
        ("sqlite3", figures.autocommit, figures.share),
        ("sqlite3 beside a snapshot", figures.beside, figures.share_of_beside),
        ("sqlite3 in a transaction", figures.transaction, figures.share_of_transaction),
    ):
        table.add_row(name, f"{value:,.0f}", f"{1e6 / value:.2f}", f"{share:.2f}")
    console = terminal()
    console.print(table)
    kept = figures.share >= SHARE_GOAL
    console.print(
        f"snapshot over sqlite3: {figures.share:.2f}, the goal is {SHARE_GOAL}: "
        + ("[green]kept[/green]" if kept else "[red]missed[/red]")
        + f" ({os.cpu_count()} cores, SQLite {sqlite3.sqlite_version})"
    )
    if json is not None:
        write_json(json, figures)
    raise typer.Exit(0 if kept else 1)


if __name__ == "__main__":
    typer.run(main)
