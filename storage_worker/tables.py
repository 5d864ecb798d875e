"""Status, rows and errors as a person reads them in a terminal, and as plain values for JSON."""

import base64
import math
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .protocol.errors import Detail, StorageError
from .protocol.limits import GIB, KIB, MIB
from .protocol.statements import Rows
from .protocol.status import Histogram, Percentiles, WorkerStatus, bucket_bounds, percentile

BLOB_BYTES_SHOWN_MAX = 32
BAR_CHARS_MAX = 40


def status_view(status: WorkerStatus) -> RenderableType:
    """The whole status as tables."""
    parts: list[RenderableType] = [_headline(status), _figures(status), _lanes(status)]
    if status.operations:
        parts.append(_operations(status))
    if status.errors:
        parts.append(_errors(status))
    parts.append(_histogram("group size, requests", status.writer.group_size_requests))
    parts.append(_histogram("commit, µs", status.writer.commit_us))
    if status.background:
        parts.append(_background(status))
    parts.append(_clients(status))
    if status.snapshots:
        parts.append(_snapshots(status))
    return Group(*parts)


def _headline(status: WorkerStatus) -> Text:
    health = status.health
    colour = "green" if health.state == "healthy" else "yellow"
    text = Text.assemble(
        (health.state, f"bold {colour}"),
        f"  {status.path}  worker {status.worker} (process {status.process.pid}), version {status.version},"
        f" SQLite {status.sqlite_version}, durability {status.durability}, up {duration(status.uptime_ms)}\n"
        f"{status.address}\n",
    )
    for reason in health.reasons:
        text.append(f"  {reason}\n", style=colour)
    return text


def _figures(status: WorkerStatus) -> Table:
    writer, readers, wal, process = status.writer, status.readers, status.wal, status.process
    latency, receipts = status.latency_us, status.receipts
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("latency", _latency(latency))
    table.add_row(
        "writer",
        f"{writer.groups:,} groups for {writer.committed_requests:,} requests, commit p50"
        f" {milliseconds(percentile(writer.commit_us, 0.5))}; {writer.busy_retries:,} busy retries,"
        f" {writer.replays:,} replays, {writer.solo_runs:,} alone, {writer.failed_commits:,} failed commits",
    )
    if writer.lease_owner:
        table.add_row(
            "transaction", f"{writer.lease_owner} owns the writer for {writer.lease_left_ms:,} ms more"
        )
    table.add_row(
        "readers",
        f"{readers.running_requests} of {readers.threads} running (oldest {readers.oldest_running_ms:.0f} ms),"
        f" {readers.waiting_requests:,} waiting; {readers.quick_reads:,} at once, {readers.pooled_reads:,} in the pool;"
        f" {readers.holds:,} holds, longest {readers.longest_hold_ms:.1f} ms",
    )
    last = wal.last_checkpoint_ago_ms
    table.add_row(
        "files",
        f"database {size(wal.database_bytes)}, WAL {size(wal.wal_bytes)} ({wal.live_frames:,} live frames);"
        f" {wal.checkpoints:,} checkpoints, last {'never' if last is None else duration(last) + ' ago'}"
        + (f"; pinned by {wal.pinned_by}" if wal.pinned_by else ""),
    )
    table.add_row(
        "request keys",
        f"{receipts.kept:,} kept, {receipts.answered_again:,} answered again, {receipts.conflicts:,} conflicts",
    )
    table.add_row(
        "process",
        f"{size(process.resident_bytes)} resident, CPU {process.user_cpu_seconds + process.system_cpu_seconds:.1f} s,"
        f" {process.threads} threads, {process.descriptors:,} of {process.descriptors_max:,} descriptors",
    )
    spool = status.spool
    table.add_row(
        "large values",
        f"{spool.uploads:,} coming, {spool.downloads:,} going; {size(spool.spooled_bytes)} spooled in {spool.spools:,}"
        f" files, at most {size(spool.largest_bytes)}",
    )
    table.add_row("disk", f"{size(process.disk_free_bytes)} free, reserve {size(process.disk_reserve_bytes)}")
    return table


def _latency(figures: Percentiles) -> str:
    parts = (
        (f"p{name}", value)
        for name, value in (("50", figures.p50), ("99", figures.p99), ("99.9", figures.p999))
    )
    return (
        ", ".join(f"{name} {milliseconds(value)}" for name, value in parts)
        + f", longest {milliseconds(figures.largest)} of {figures.count:,} reads and writes"
    )


def _lanes(status: WorkerStatus) -> Table:
    table = _table("Lanes", "lane", "waiting", "bytes", "oldest wait", "admitted", "refused")
    for lane in status.lanes:
        table.add_row(
            lane.name,
            f"{lane.waiting_requests:,}",
            size(lane.waiting_bytes),
            f"{lane.oldest_wait_ms:,.0f} ms",
            f"{lane.admitted_requests:,}",
            f"{lane.refused_requests:,}",
        )
    return table


def _operations(status: WorkerStatus) -> Table:
    table = _table("Operations", "operation", "succeeded", "failed", "p50", "p99", "p99.9", "longest")
    for found in sorted(status.operations, key=lambda one: one.name):
        latency = found.latency_us
        table.add_row(
            escape(found.name),
            f"{found.succeeded_requests:,}",
            f"{found.failed_requests:,}",
            *(milliseconds(value) for value in (latency.p50, latency.p99, latency.p999, latency.largest)),
        )
    return table


def _errors(status: WorkerStatus) -> Table:
    table = _table("Errors", "code", "count")
    for code, count in sorted(status.errors.items()):
        table.add_row(escape(code), f"{count:,}")
    return table


def _histogram(title: str, histogram: Histogram) -> RenderableType:
    most = max(histogram.counts)
    if not most:
        return Text(f"{title}: nothing counted yet", style="dim")
    table = _table(title, "from", "to", "count")
    table.add_column("")
    for bucket, count in enumerate(histogram.counts):
        if count:
            least, greatest = bucket_bounds(bucket)
            bar = "█" * math.ceil(BAR_CHARS_MAX * count / most)
            table.add_row(f"{least:,}", f"{max(greatest, least):,}", f"{count:,}", bar)
    return table


def _background(status: WorkerStatus) -> Table:
    table = _table("Background", "task", "state", "done", "slices", "longest slice", "last run")
    table.add_column("last error")
    for task in status.background:
        total = "" if task.total_units is None else f" of {task.total_units:,}"
        ago = task.last_run_ago_ms
        table.add_row(
            escape(task.name),
            task.state,
            f"{task.done_units:,}{total}",
            f"{task.slices:,}",
            f"{task.longest_slice_ms:.1f} ms",
            "never" if ago is None else f"{duration(ago)} ago",
            escape(task.last_error),
        )
    return table


def _clients(status: WorkerStatus) -> Table:
    table = _table(
        "Clients", "name", "pid", "role", "connected", "in flight", "bytes", "unread", "answered", "refused"
    )
    for client in status.clients:
        table.add_row(
            escape(client.name),
            str(client.pid),
            client.role,
            duration(client.connected_ms),
            f"{client.in_flight_requests:,}",
            size(client.in_flight_bytes),
            size(client.unread_bytes),
            f"{client.answered_requests:,}",
            f"{client.refused_requests:,}",
        )
    return table


def _snapshots(status: WorkerStatus) -> Table:
    table = _table("Snapshots", "client", "pid", "age", "left")
    for found in status.snapshots:
        overdue = found.overdue_ms
        table.add_row(
            escape(found.name),
            str(found.pid),
            duration(found.age_ms),
            f"overdue by {duration(overdue)}" if overdue else duration(found.left_ms),
            style="yellow" if overdue else "",
        )
    return table


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def rows_view(rows: Rows, *, written: bool) -> RenderableType:
    """A statement's result: its rows, and what it changed where it may write."""
    parts: list[RenderableType] = []
    if rows.columns:
        table = Table(*(escape(name) for name in rows.columns), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for row in rows.rows:
            table.add_row(*(_cell(value) for value in row))
        parts.append(table)
        parts.append(Text(_counted(len(rows)), style="dim"))
    if written:
        parts.append(Text(f"{_counted(rows.rows_changed)} changed"))
    return Group(*parts)


def _counted(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows:,} rows"


def _cell(value: Any) -> Text:
    if value is None:
        return Text("NULL", style="dim")
    if isinstance(value, bytes):
        more = "…" if len(value) > BLOB_BYTES_SHOWN_MAX else ""
        return Text(f"x'{value[:BLOB_BYTES_SHOWN_MAX].hex()}'{more} ({len(value):,} bytes)", style="cyan")
    if isinstance(value, str):
        return Text(printable(value))
    return Text(str(value), justify="right")


def printable(text: str) -> str:
    """A text from data as it can be shown: control characters, which could steer the terminal, are written out."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def rows_plain(rows: Rows) -> dict[str, Any]:
    """A statement's result for JSON.

    A blob becomes `{"base64": ...}` and an infinite number `{"real": "Infinity"}`, which JSON has no values for.
    """
    return {
        "columns": list(rows.columns),
        "rows": [[_plain(value) for value in row] for row in rows.rows],
        "rows_changed": rows.rows_changed,
        "last_insert_rowid": rows.last_insert_rowid,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, float) and math.isinf(value):
        return {"real": "Infinity" if value > 0 else "-Infinity"}
    return value


def error_view(error: StorageError, *, writes: bool) -> Text:
    """A typed error: what happened, where something `writes` whether that was committed, and the details."""
    text = Text.assemble((error.code, "bold red"), f": {printable(error.message)}")
    facts: list[tuple[str, Detail]] = []
    if writes:
        facts.append(("outcome", error.outcome.replace("_", " ")))
    if error.retry_after is not None:
        facts.append(("retry after", f"{error.retry_after:g} s"))
    # What the message says already is not said twice.
    facts.extend(
        (name, value)
        for name, value in error.details.items()
        if not (isinstance(value, str) and value in error.message)
    )
    for name, value in facts:
        text.append(printable(f"\n  {name}: {value}"), style="dim")
    return text


def error_plain(error: StorageError) -> dict[str, Any]:
    """A typed error for JSON."""
    return {
        "code": error.code,
        "message": error.message,
        "retryable": error.retryable,
        "outcome": error.outcome,
        "retry_after_seconds": error.retry_after,
        "details": error.details,
    }


def size(count: int) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def milliseconds(microseconds: float) -> str:
    """A length of time given in microseconds."""
    return f"{microseconds / 1000:,.2f} ms"


def duration(milliseconds: int) -> str:
    """A longer length of time: its two greatest units."""
    seconds = milliseconds // 1000
    for unit, name, below, smaller in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= unit:
            return f"{seconds // unit} {name} {seconds % unit // below} {smaller}"
    return f"{milliseconds / 1000:.1f} s"
