"""Import real transcripts through one worker from many client processes, read all of it back and verify it.

    scripts/demo
    scripts/demo --all
    scripts/demo --clients 16 ../shared/data/tau-bench ../shared/data/irc

Each record is one durable write of its own. The source files themselves are written too, as large bodies. The
exit status is 0 where everything stands in the conversation store exactly as in its source, 1 where not, 3 where the
worker or the input failed.
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

import corpus
import import_checks
import storage_worker as sw
from import_checks import Expected, Verdict
from load_report import draw
from measuring import (
    ClientFailedError,
    Figures,
    Recorder,
    Run,
    Sample,
    complain,
    figures,
    latencies_ms,
    terminal,
    write_json,
)
from storage_worker.conversation_client import STORE
from storage_worker.import_fleet import Summary, import_paths
from storage_worker.protocol.status import WorkerStatus, percentile

assert bootstrap.entered()

DIFFERENCES_SHOWN_MAX = 10
READERS = 1

SAMPLE_PER_LANGUAGE = 60
"""How many conversations of each of the corpus's languages are imported, unless all of them are asked for."""


def write(worker: sw.StorageWorker, inputs: list[Path], clients: int) -> tuple[Summary, Run]:
    """Import everything with `clients` processes at once."""
    began = time.perf_counter()
    summary = import_paths(worker.address, inputs, processes=clients, with_latencies=True)
    samples = [Sample(b"".join(summary.latencies_s), summary.errors, 0.0)]
    return summary, Run(samples, time.perf_counter() - began, None)


def read_back(worker: sw.StorageWorker, expected: dict[str, Expected]) -> tuple[Verdict, Run]:
    """Read everything as a client that may only read."""
    began = time.perf_counter()
    with worker.connect(role="read", name="reader") as client:
        recorder = Recorder()
        verdict = import_checks.verify(client, expected, recorder)
        sample = recorder.sample()
    return verdict, Run([sample], time.perf_counter() - began, None)


def print_source(console: Console, inputs: list[Path], expected: dict[str, Expected]) -> None:
    """What there is to import."""
    table = Table(title="Source", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("format", "conversations", "records"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    sessions = Counter(one.format for one in expected.values())
    records: Counter[str] = Counter()
    for one in expected.values():
        records[one.format] += one.records
    for format_, count in sorted(sessions.items()):
        table.add_row(format_, f"{count:,}", f"{records[format_]:,}")
    console.print(table)
    files = [
        file for path in inputs for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file()
    ]
    largest = max((file.stat().st_size for file in files), default=0)
    console.print(f"{len(files):,} files, the largest of {largest:,} bytes", style="dim", highlight=False)


def print_result(
    console: Console,
    rows: list[tuple[str, int, Figures]],
    status: WorkerStatus,
    verdict: Verdict,
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
        console.print(f"NOT VERIFIED: {len(verdict.differences)} differences", style="bold red")
    else:
        console.print(
            f"verified: {verdict.sessions:,} conversations, {verdict.records:,} records, count and digest of each",
            style="bold green",
            highlight=False,
        )


def run(
    inputs: list[Path], clients: int, folder: Path, picture: Path, json: Path | None, console: Console
) -> bool:
    """The whole demonstration; whether everything was written without an error and verified."""
    with console.status("reading the transcripts"):
        expected = import_checks.expected_of(inputs)
    if not expected:
        raise corpus.CorpusError("no transcripts were found")
    print_source(console, inputs, expected)
    count = sum(one.records for one in expected.values())
    with sw.StorageWorker(folder / "demo.db", stores=[STORE]) as worker:
        with console.status(f"importing {count:,} records with {clients} processes"):
            summary, written = write(worker, inputs, clients)
        with console.status("reading everything back"):
            verdict, read = read_back(worker, expected)
        with worker.connect() as client:
            status = client.status()
    verdict.differences += [*map(str, summary.problems), *summary.failures]
    rows = [
        ("durable writes", clients, figures([written])),
        ("conversations read", READERS, figures([read])),
    ]
    print_result(console, rows, status, verdict)
    draw(
        picture,
        f"{count:,} records imported with {clients} processes, then read back",
        {name: latencies_ms([found]) for (name, _, _), found in zip(rows, (written, read), strict=True)},
        {name: {number: own.operations_per_s} for name, number, own in rows},
    )
    console.print(f"picture: {picture}", highlight=False)
    if json is not None:
        write_json(json, {"work": {name: own for name, _, own in rows}, "verdict": verdict})
    return not verdict.differences and not any(own.errors for _, _, own in rows)


def inputs_of(paths: list[Path], made: Path, *, is_whole: bool) -> list[Path]:
    """What is imported: the paths or the installed corpus, and their files as large bodies."""
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise corpus.CorpusError(f"there is no {', '.join(missing)}")
    chats = made / "inputs"
    chats.mkdir()
    corpus.write_sources(paths or [corpus.default_path()], chats)
    if not paths:
        corpus.write_as_chats(corpus.default_path(), chats, None if is_whole else SAMPLE_PER_LANGUAGE)
    return [*paths, chats]


def main(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Transcripts: files or folders. Default: a sample of chatterbot-corpus."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Import all of chatterbot-corpus, not a sample of each language.")
    ] = False,
    clients: Annotated[int, typer.Option(min=1, max=200, help="Client processes that write at once.")] = 8,
    folder: Annotated[
        Path | None, typer.Option(help="Keep the database here.", file_okay=False, exists=True)
    ] = None,
    picture: Annotated[Path, typer.Option(help="Where the picture of the latencies goes.")] = Path(
        "demo-latencies.png"
    ),
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Import real transcripts through one worker with many processes, read them back and verify them."""
    console = terminal()
    try:
        with tempfile.TemporaryDirectory(prefix="storage-worker-demo-") as made:
            inputs = inputs_of(paths or [], Path(made), is_whole=whole)
            fine = run(inputs, clients, folder or Path(made), picture.resolve(), json, console)
    except (ClientFailedError, corpus.CorpusError, sw.StorageError) as error:
        complain(f"{type(error).__name__}: {error}")
        raise typer.Exit(3) from error
    raise typer.Exit(0 if fine else 1)


if __name__ == "__main__":
    typer.run(main)
