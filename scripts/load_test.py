#!/usr/bin/env python3
"""Fan out client processes on one worker, and on what a user would do instead, in alternating rounds.

    scripts/load_test.py --clients 32 --seconds 3 --workload insert --durability full --against direct,bare
    scripts/load_test.py --clients 8 --workload pipelined --depth 16 --against bare
    scripts/load_test.py --clients 1,8,32,128 --plot load.png --json load.json

The exit status is 0 where no operation failed, 1 where some did, 3 where a run could not be done at all.
"""

import bootstrap

# isort: split
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import typer
from rich.console import Console

import load_peers
import load_workloads
import storage_worker as sw
from corpus import CorpusError
from load_report import Measured, draw, print_report, ratios
from load_workloads import Durability, Message, Workload
from measuring import (
    CLIENTS_MAX,
    ClientFailedError,
    Run,
    complain,
    figures,
    latencies_ms,
    processes,
    run_clients,
    terminal,
    write_json,
)

PEERS = ("direct", "bare", "frames")
assert bootstrap.entered()

BARE_CLIENTS_MAX = 200
"""A process takes no more descriptors than this with it when it is started."""


class Plan(msgspec.Struct):
    """One load test."""

    workload: Workload
    durability: Durability
    seconds: float
    depth: int
    messages: list[Message]
    folder: Path | None


def run_worker(context: Any, plan: Plan, clients: int, path: Path) -> Run:
    """The storage worker: a pipe for each client process."""
    with sw.StorageWorker(path, durability=plan.durability, stores=["load_store:messages"]) as worker:
        with worker.connect() as client:
            load_workloads.prepare(client, plan.workload)
        pipes = [worker.pipe(role="write", name=f"client {number}") for number in range(clients)]
        return run_clients(
            context,
            load_workloads.worker_loop,
            [
                (pipe, number, plan.workload, plan.seconds, plan.depth, plan.messages)
                for number, pipe in enumerate(pipes)
            ],
            seconds=plan.seconds,
            worker_pid=worker.pid,
        )


def run_direct(context: Any, plan: Plan, clients: int, path: Path) -> Run:
    """Every client opens the file itself."""
    load_peers.prepare_file(path, plan.workload)
    return run_clients(
        context,
        load_peers.direct_loop,
        [
            (path, number, plan.workload, plan.seconds, plan.durability, plan.messages)
            for number in range(clients)
        ],
        seconds=plan.seconds,
    )


def run_bare(context: Any, plan: Plan, clients: int, path: Path) -> Run:
    """A poll loop with one connection."""
    load_peers.prepare_file(path, plan.workload)
    return _run_bare(context, plan, clients, path, plan.workload, sql=True)


def run_frames(context: Any, plan: Plan, clients: int, path: Path) -> Run:
    """A poll loop without SQL; whatever the workload is, it carries the same requests of one row."""
    return _run_bare(context, plan, clients, path, "insert", sql=False)


def _run_bare(context: Any, plan: Plan, clients: int, path: Path, workload: Workload, *, sql: bool) -> Run:
    if clients > BARE_CLIENTS_MAX:
        raise ClientFailedError(f"bare and frames take at most {BARE_CLIENTS_MAX} clients, not {clients}")
    depth = plan.depth if plan.workload == "pipelined" else 1
    pairs = [socket.socketpair() for _ in range(clients)]
    worker = context.Process(
        target=load_peers.bare_worker,
        args=([ours for ours, _ in pairs], path, plan.durability, sql),
        daemon=True,
    )
    worker.start()
    try:
        for ours, _ in pairs:
            ours.close()
        return run_clients(
            context,
            load_peers.bare_loop,
            [
                (theirs, number, workload, plan.seconds, depth, plan.messages)
                for number, (_, theirs) in enumerate(pairs)
            ],
            seconds=plan.seconds,
            worker_pid=worker.pid,
        )
    finally:
        for _, theirs in pairs:
            theirs.close()
        worker.kill()
        worker.join()


RUNNERS: dict[str, Callable[[Any, Plan, int, Path], Run]] = {
    "worker": run_worker,
    "direct": run_direct,
    "bare": run_bare,
    "frames": run_frames,
}


@contextmanager
def _database(folder: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="load-test-", dir=folder) as made:
        yield Path(made) / "load.db"


def measure(
    plan: Plan, kinds: list[str], clients: list[int], rounds: int, console: Console
) -> dict[tuple[str, int], list[Run]]:
    """All runs: round by round each number of clients and each kind in turn, each on a new database."""
    context = processes("load_workloads", "load_peers")
    runs: dict[tuple[str, int], list[Run]] = {}
    for number in range(rounds):
        for count in clients:
            for kind in kinds:
                with (
                    console.status(f"{kind}, {count} clients, round {number + 1} of {rounds}"),
                    _database(plan.folder) as path,
                ):
                    runs.setdefault((kind, count), []).append(RUNNERS[kind](context, plan, count, path))
    return runs


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 1,8,32") from error
    if not all(1 <= number <= CLIENTS_MAX for number in numbers):
        raise typer.BadParameter(f"between 1 and {CLIENTS_MAX} clients")
    return numbers


def _peers(text: str) -> list[str]:
    found = [part for part in text.split(",") if part]
    for peer in found:
        if peer not in PEERS:
            raise typer.BadParameter(f"no peer {peer!r}; there are {', '.join(PEERS)}")
    return found


def _choice(value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(allowed)}")
    return value


def main(
    clients: Annotated[
        str, typer.Option(help="Client processes; several numbers are measured one after the other.")
    ] = "8",
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds of each run.")] = 3.0,
    workload: Annotated[
        str, typer.Option(help="insert, read, mixed (4 reads to a write), pipelined or ingest.")
    ] = "insert",
    durability: Annotated[str, typer.Option(help="full or normal, the same for all kinds.")] = "full",
    against: Annotated[str, typer.Option(help="Peers: direct, bare, frames; several with commas.")] = "",
    depth: Annotated[
        int, typer.Option(min=1, max=128, help="Requests in flight per client when pipelined.")
    ] = 16,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each kind, in turns.")] = 2,
    transcript: Annotated[
        Path | None, typer.Option(help="Texts for ingest instead of the installed corpus.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the databases are made.", file_okay=False, exists=True)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latencies and throughput into this PNG.")] = None,
) -> None:
    """Measure one storage worker under many client processes, beside what a user would do instead."""
    counts, peers = _numbers(clients), _peers(against)
    wanted = msgspec.convert(_choice(workload, get_args(Workload)), Workload)
    level = msgspec.convert(_choice(durability, get_args(Durability)), Durability)
    console = terminal()
    try:
        messages = load_workloads.ingest_messages(transcript) if wanted == "ingest" else []
        plan = Plan(wanted, level, seconds, depth, messages, folder)
        runs = measure(plan, ["worker", *peers], counts, rounds, console)
    except (ClientFailedError, CorpusError, sw.StorageError) as error:
        complain(f"{type(error).__name__}: {error}")
        raise typer.Exit(3) from error
    measured = [
        Measured(kind, count, figures(found), [figures([run]) for run in found])
        for (kind, count), found in runs.items()
    ]
    how = f"{depth} deep, " if wanted == "pipelined" else ""
    title = f"{wanted}, {how}durability {level}, rounds: {rounds} of {seconds:g} s"
    print_report(console, title, measured)
    if json is not None:
        write_json(json, {"title": title, "measured": measured, "ratios": ratios(measured)})
    if plot is not None:
        most = max(counts)
        draw(
            plot,
            f"storage worker: {title}, {most} clients",
            {kind: latencies_ms(found) for (kind, count), found in runs.items() if count == most},
            _throughput(measured),
        )
        console.print(f"picture: {plot}")
    raise typer.Exit(1 if any(found.figures.errors for found in measured if found.kind == "worker") else 0)


def _throughput(measured: list[Measured]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for one in measured:
        found.setdefault(one.kind, {})[one.clients] = one.figures.operations_per_s
    return found


if __name__ == "__main__":
    typer.run(main)
