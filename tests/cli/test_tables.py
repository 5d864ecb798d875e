"""What people and programs are shown."""

import io

import msgspec
from rich.console import Console, RenderableType

import storage_worker as sw
from storage_worker.protocol.errors import OverloadedError
from storage_worker.protocol.statements import Rows
from storage_worker.protocol.status import (
    BackgroundTask,
    ClientStatus,
    Lane,
    OperationCounts,
    SnapshotStatus,
    SpoolStatus,
)
from storage_worker.tables import (
    duration,
    error_plain,
    error_view,
    rows_plain,
    rows_view,
    size,
    status_view,
)
from tests.protocol.test_status import a_status


def shown(view: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200, no_color=True).print(view)
    return out.getvalue()


def test_rows_show_null_blobs_and_what_changed() -> None:
    text = shown(
        rows_view(Rows(("a", "b"), [(None, b"\x01\x02"), (1.5, "hi")], rows_changed=2), written=True)
    )
    assert "NULL" in text
    assert "x'0102' (2 bytes)" in text
    assert "2 rows changed" in text


def test_long_blobs_are_cut() -> None:
    assert "…" in shown(rows_view(Rows(("a",), [(b"x" * 100,)]), written=False))


def test_data_can_neither_steer_the_terminal_nor_mark_up_text() -> None:
    text = shown(rows_view(Rows(("[red]x[/red]",), [("\x1b[2J[bold]z[/bold]\x00",)]), written=False))
    assert "\x1b" not in text
    assert r"\x1b[2J[bold]z[/bold]\x00" in text
    assert "[red]x[/red]" in text


def test_json_rows_keep_what_json_has_no_values_for() -> None:
    plain = rows_plain(Rows(("a",), [(b"\x00",), (float("inf"),), (float("-inf"),), (2**53 + 1,)]))
    assert plain["rows"] == [
        [{"base64": "AA=="}],
        [{"real": "Infinity"}],
        [{"real": "-Infinity"}],
        [2**53 + 1],
    ]
    assert msgspec.json.decode(msgspec.json.encode(plain)) == plain


def test_a_typed_error_says_what_happened_and_what_to_do() -> None:
    error = OverloadedError("no place [x]", retry_after=0.25, details={"bound": "worker_requests"})
    text = shown(error_view(error, writes=True))
    assert "storage_overloaded: no place [x]" in text
    assert "outcome: not committed" in text
    assert "outcome" not in shown(error_view(error, writes=False))
    assert "retry after: 0.25 s" in text
    assert "bound: worker_requests" in text
    assert error_plain(error) == {
        "code": "storage_overloaded",
        "message": "no place [x]",
        "retryable": True,
        "outcome": "not_committed",
        "retry_after_seconds": 0.25,
        "details": {"bound": "worker_requests"},
    }


def test_an_error_steers_no_terminal() -> None:
    text = shown(error_view(sw.InvalidRequestError("no \x1b[2J", details={"name": "\x1b]0;"}), writes=False))
    assert "\x1b" not in text
    assert "no \\x1b[2J" in text
    assert "name: \\x1b]0;" in text


def test_an_error_does_not_say_twice_what_its_message_says() -> None:
    error = sw.DatabasePathError(
        "app.db is a directory", details={"path": "app.db", "file": "b.db", "size": 1}
    )
    text = shown(error_view(error, writes=True))
    assert "  path:" not in text
    assert "file: b.db" in text
    assert "size: 1" in text


def test_a_status_shows_every_part() -> None:
    status = a_status()
    status.operations = [OperationCounts(name="notes.add", kind="write", succeeded_requests=1_234)]
    status.clients = [ClientStatus(name="[web] 1", pid=77, role="write")]
    status.snapshots = [
        SnapshotStatus(name="[web] 2", pid=78, age_ms=500, left_ms=9_500, overdue_ms=0),
        SnapshotStatus(name="web 3", pid=79, age_ms=61_000, left_ms=0, overdue_ms=51_000),
    ]
    status.background = [BackgroundTask(name="optimize", state="failed", last_error="no")]
    status.spool = SpoolStatus(uploads=2, downloads=3, spools=7, spooled_bytes=2**20, largest_bytes=2**21)
    status.lanes = [Lane(name="control"), Lane(name="foreground", waiting_requests=5)]
    text = shown(status_view(status))
    for expected in (
        "degraded",
        "the WAL is large",
        "notes.add",
        "1,234",
        "[web] 1",
        "[web] 2",
        "9.5 s",
        "overdue by 51.0 s",
        "optimize",
        "storage_busy",
        "foreground",
        "commit, µs",
        "2 coming, 3 going; 1.0 MiB spooled in 7 files, at most 2.0 MiB",
    ):
        assert expected in text


def test_sizes_and_durations() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 * 2**20, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert [duration(n) for n in (0, 1_500, 61_000, 3_661_000, 90_000_000)] == [
        "0.0 s",
        "1.5 s",
        "1 min 1 s",
        "1 h 1 min",
        "1 d 1 h",
    ]
