#!/usr/bin/env python3
"""Puts and reads of large bodies in the payload store against plain files, in alternating rounds.

    scripts/payload_benchmark.py
    scripts/payload_benchmark.py --megabytes 10 --rounds 50 --json payloads.json

A plain round writes a file, syncs it and reads it back; a round of the store puts a body, appends an event that
refers to it, and reads it back with its hash checked. Every body is a new one. The exit status is 0 where putting and
reading reach their share of the plain file's throughput, 1 where they do not, 3 where it could not be measured.
"""

import bootstrap

# isort: split
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

import storage_worker as sw
from measuring import complain, terminal, write_json
from storage_worker import conversation
from storage_worker.conversation import payload_client

assert bootstrap.entered()

SHARE_GOAL = 0.5
WARM_UP_ROUNDS = 2
FILES_OF_A_ROUND = 4
"""Two that stay, one that is written in vain, and some room."""

MIB = 2**20
STORE = "storage_worker.conversation:store"


class Figures(msgspec.Struct):
    """Milliseconds of each step, round by round."""

    plain_write_ms: list[float] = []
    plain_read_ms: list[float] = []
    put_ms: list[float] = []
    append_ms: list[float] = []
    read_ms: list[float] = []
    put_again_ms: list[float] = []

    @property
    def share(self) -> float:
        """The throughput of putting and reading over that of a plain file, by the medians of the rounds."""
        return _rounds(self.plain_write_ms, self.plain_read_ms) / _rounds(self.put_ms, self.read_ms)


def _rounds(*steps: list[float]) -> float:
    return float(median(sum(each) for each in zip(*steps, strict=True)))


def _timed(into: list[float], work: Callable[[], object]) -> None:
    began = time.perf_counter()
    work()
    into.append((time.perf_counter() - began) * 1e3)


def _write(path: Path, body: bytes) -> None:
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def plain_round(figures: Figures, path: Path, size: int) -> None:
    """Write, sync and read a plain file."""
    body = os.urandom(size)
    _timed(figures.plain_write_ms, lambda: _write(path, body))
    _timed(figures.plain_read_ms, path.read_bytes)


def store_round(figures: Figures, client: sw.Client, size: int) -> None:
    """Put a body, refer to it, read it, and put it again."""
    body = os.urandom(size)
    refs: list[conversation.PayloadRef] = []
    _timed(figures.put_ms, lambda: refs.append(payload_client.put(client, body)))
    call = conversation.append("benchmark", "note", body=refs[0])
    _timed(figures.append_ms, lambda: client.call(call))
    _timed(figures.read_ms, lambda: payload_client.read(client, refs[0], bytes_max=size))
    _timed(figures.put_again_ms, lambda: payload_client.put(client, body))


def touch_memory(path: Path, size: int) -> None:
    """Have the system touch so much memory for files: a virtual machine's first use of a page takes ten times longer."""
    part = bytes(MIB)
    with path.open("wb") as file:
        for _ in range(0, size, MIB):
            file.write(part)
    path.unlink()


def measure(size: int, rounds: int, folder: Path) -> Figures:
    """The figures of so many alternating rounds, after a few that do not count."""
    warm_up, figures = Figures(), Figures()
    touch_memory(folder / "ballast", FILES_OF_A_ROUND * (rounds + WARM_UP_ROUNDS) * size)
    with (
        sw.StorageWorker(folder / "benchmark.db", stores=[STORE]) as worker,
        worker.connect() as client,
    ):
        for number in range(-WARM_UP_ROUNDS, rounds):
            into = warm_up if number < 0 else figures
            kinds: list[Callable[[], None]] = [
                partial(plain_round, into, folder / f"plain-{number}", size),
                partial(store_round, into, client, size),
            ]
            for run in kinds if number % 2 else reversed(kinds):
                run()
    return figures


def main(
    megabytes: Annotated[int, typer.Option(min=1, max=256, help="Size of a body in MB.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, max=1_000, help="Rounds of each kind.")] = 30,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Measure puts and reads of large bodies against plain files."""
    try:
        with tempfile.TemporaryDirectory(prefix="payloads-") as folder:
            figures = measure(megabytes * 1_000_000, rounds, Path(folder))
    except sw.StorageError as error:
        complain(f"{type(error).__name__}: {error}")
        raise typer.Exit(3) from error
    table = Table("step", "median ms", "least ms", "most ms", box=SIMPLE_HEAD)
    for name in figures.__struct_fields__:
        values = getattr(figures, name)
        table.add_row(
            name.removesuffix("_ms").replace("_", " "),
            *(f"{value:.1f}" for value in (median(values), min(values), max(values))),
        )
    console = terminal()
    console.print(table)
    kept = figures.share >= SHARE_GOAL
    console.print(
        f"put and read: {figures.share:.2f} of write, sync and read of a plain file, the goal is {SHARE_GOAL}: "
        + ("[green]kept[/green]" if kept else "[red]missed[/red]")
    )
    if json is not None:
        write_json(json, {"megabytes": megabytes, "share": figures.share, "figures": figures})
    raise typer.Exit(0 if kept else 1)


if __name__ == "__main__":
    typer.run(main)
