"""Status again and again, and metrics, of real workers."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

import storage_worker as sw
from storage_worker.cli import app

pytestmark = pytest.mark.worker

WATCH = (sys.executable, "-c", "from storage_worker.cli import main; main()", "status")
END_SECONDS_MAX = 60.0


@pytest.fixture
def served(database: Path) -> Iterator[Path]:
    with sw.StorageWorker(database) as worker, worker.connect() as client:
        client.execute("create table t(a)")
        yield database


def test_metrics_are_what_a_scrape_reads(served: Path) -> None:
    result = CliRunner().invoke(app, ["metrics", str(served)])
    assert result.exit_code == 0
    families = {family.name: family for family in text_string_to_metric_families(result.stdout)}
    executed = families["storage_worker_operations_succeeded_requests"].samples
    assert any(sample.labels["name"] == "sql.execute" and sample.value == 1 for sample in executed)
    assert families["storage_worker_clients"].samples[0].value == 2


def test_metrics_of_no_worker_are_a_typed_error(database: Path) -> None:
    result = CliRunner().invoke(app, ["metrics", str(database)])
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "no worker serves" in result.stderr


def test_a_watch_for_programs_is_a_line_each_time_until_it_is_interrupted(served: Path) -> None:
    command = (*WATCH, str(served), "--watch", "--json", "--every", "0.1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS_MAX) == 0
    assert first["worker"] == second["worker"]
    assert second["uptime_ms"] > first["uptime_ms"]


def test_a_watch_in_a_terminal_shows_the_status_and_leaves_the_terminal_as_it_was(served: Path) -> None:
    ours, theirs = pty.openpty()
    command = (*WATCH, str(served), "--watch", "--every", "0.1")
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while b"healthy" not in seen:
            seen += os.read(ours, 65_536)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                data = os.read(ours, 65_536)
            except OSError:
                break  # the other side is closed
            if not data:
                break
            seen += data
        assert process.wait(END_SECONDS_MAX) == 0
    os.close(ours)
    enter, leave = b"\x1b[?1049h", b"\x1b[?1049l"
    assert seen.count(enter) == seen.count(leave) == 1


def test_a_watch_ends_with_a_typed_error_when_the_worker_has_ended(database: Path) -> None:
    with sw.StorageWorker(database):
        command = (*WATCH, str(database), "--watch", "--json", "--every", "0.1", "--timeout", "0.5")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
    out, _ = process.communicate(timeout=END_SECONDS_MAX)
    assert process.returncode == 3
    assert '"storage_unavailable"' in out


@pytest.mark.parametrize("command", ["status", "metrics"])
def test_help_has_examples(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"$ storage-worker {command} app.db" in result.output
