"""Write real transcripts through one worker from many client processes, read all of it back and verify it.

    scripts/demo
    scripts/demo --clients 16 ../shared/data/tau-bench ../shared/data/irc

Each message is one durable write of its own. The source files themselves are written too, as large bodies. The
exit status is 0 where everything stands in the database exactly as in its source, 1 where not, 3 where the worker
or the input failed.
"""

import bootstrap

# isort: split
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import demo_clients
import storage_worker as sw
import transcripts
from load_report import draw
from measuring import (
    ClientFailedError,
    Figures,
    Recorder,
    Run,
    complain,
    figures,
    latencies_ms,
    processes,
    run_clients,
    terminal,
    write_json,
)
from storage_worker.protocol.status import WorkerStatus, percentile
from transcripts import Transcripts

assert bootstrap.entered()

DIFFERENCES_SHOWN_MAX = 10
NAMES_SHOWN_MAX = 3
READERS = 1


def ingest(worker: sw.StorageWorker, source: Transcripts, clients: int) -> Run:
    """Write everything from `clients` processes at once, each with a pipe of its own."""
    arguments = [
        (worker.pipe(role="write", name=f"writer {number}"), share)
        for number, share in enumerate(demo_clients.shares(source.conversations, clients))
    ]
    return run_clients(processes("demo_clients"), demo_clients.write_share, arguments, worker_pid=worker.pid)


def read_back(worker: sw.StorageWorker, source: Transcripts) -> tuple[demo_clients.Verdict, Run]:
    """Read everything as a client that may only read."""
    began = time.perf_counter()
    with worker.connect(role="read", name="reader") as client:
        recorder = Recorder()
        verdict = demo_clients.verify(client, source, recorder)
        sample = recorder.sample()
    return verdict, Run([sample], time.perf_counter() - began, None)


def print_source(console: Console, source: Transcripts) -> None:
    """What was read."""
    table = Table(title="Source", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("kind", "conversations", "messages", "bytes", "largest body, bytes"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    kinds = Counter(conversation.kind for conversation in source.conversations)
    for kind, count in sorted(kinds.items()):
        sizes = [
            len(message.text.encode())
            for conversation in source.conversations
            if conversation.kind == kind
            for message in conversation.messages
        ]
        table.add_row(kind, f"{count:,}", f"{len(sizes):,}", f"{sum(sizes):,}", f"{max(sizes, default=0):,}")
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for name, reason in source.skipped:
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        shown = ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")
        console.print(f"skipped, {reason}: {shown} ({len(names)})", style="dim", highlight=False)


def print_result(
    console: Console,
    rows: list[tuple[str, int, Figures]],
    status: WorkerStatus,
    verdict: demo_clients.Verdict,
) -> None:
    """Throughput, latencies and errors; the worker's own figures; the verdict."""
    table = Table(title="Result", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("work")
    for heading in ("processes", "operations", "per second", "p50 ms", "p99 ms", "p99.9 ms", "max ms"):
        table.add_column(heading, justify="right")
    table.add_column("errors")
    for name, count, own in rows:
        table.add_row(
            name,
            str(count),
            f"{own.operations:,}",
            f"{own.operations_per_s:,.0f}",
            *(f"{value:,.2f}" for value in (own.p50_ms, own.p99_ms, own.p999_ms, own.max_ms)),
            ", ".join(f"{code} {number:,}" for code, number in sorted(own.errors.items())) or "none",
        )
    console.print(table)
    writer = status.writer
    console.print(
        f"worker: {writer.groups:,} commits for {writer.committed_requests:,} writes, commit p50"
        f" {percentile(writer.commit_us, 0.5) / 1e3:.2f} ms; database {status.wal.database_bytes / 2**20:.1f} MiB,"
        f" WAL {status.wal.wal_bytes / 2**20:.1f} MiB; resident {status.process.resident_bytes / 2**20:.0f} MiB",
        highlight=False,
    )
    for difference in verdict.differences[:DIFFERENCES_SHOWN_MAX]:
        console.print(f"  {difference}", style="red", highlight=False)
    if verdict.differences:
        console.print(f"NOT VERIFIED: {len(verdict.differences)} conversations differ", style="bold red")
    else:
        console.print(
            f"verified: {verdict.conversations:,} conversations, {verdict.messages:,} messages, count and digest of each",
            style="bold green",
            highlight=False,
        )


def run(
    paths: list[Path], clients: int, folder: Path, picture: Path, json: Path | None, console: Console
) -> bool:
    """The whole demonstration; whether everything was written without an error and verified."""
    with console.status("reading the transcripts"):
        source = transcripts.read(paths or [transcripts.default_path()], sources=True)
    print_source(console, source)
    with sw.StorageWorker(folder / "demo.db", stores=["transcripts_store:transcripts"]) as worker:
        with console.status(f"writing {source.message_count:,} messages from {clients} processes"):
            written = ingest(worker, source, clients)
        with console.status("reading everything back"):
            verdict, read = read_back(worker, source)
        with worker.connect() as client:
            status = client.status()
    rows = [("durable writes", clients, figures([written])), ("page reads", READERS, figures([read]))]
    print_result(console, rows, status, verdict)
    draw(
        picture,
        f"{source.message_count:,} durable writes from {clients} processes, then read back",
        {name: latencies_ms([found]) for (name, _, _), found in zip(rows, (written, read), strict=True)},
        {name: {count: own.operations_per_s} for name, count, own in rows},
    )
    console.print(f"picture: {picture}", highlight=False)
    if json is not None:
        write_json(json, {"work": {name: own for name, _, own in rows}, "verdict": verdict})
    return not verdict.differences and not any(own.errors for _, _, own in rows)


def main(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Transcripts: files or folders. Default: chatterbot-corpus.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=200, help="Client processes that write at once.")] = 8,
    folder: Annotated[
        Path | None, typer.Option(help="Keep the database here.", file_okay=False, exists=True)
    ] = None,
    picture: Annotated[Path, typer.Option(help="Where the picture of the latencies goes.")] = Path(
        "demo-latencies.png"
    ),
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Write real transcripts through one worker from many processes, read them back and verify them."""
    console = terminal()
    try:
        with tempfile.TemporaryDirectory(prefix="storage-worker-demo-") as made:
            fine = run(paths or [], clients, folder or Path(made), picture.resolve(), json, console)
    except (ClientFailedError, transcripts.TranscriptError, sw.StorageError) as error:
        complain(f"{type(error).__name__}: {error}")
        raise typer.Exit(3) from error
    raise typer.Exit(0 if fine else 1)


if __name__ == "__main__":
    typer.run(main)
