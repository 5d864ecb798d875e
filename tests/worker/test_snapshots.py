"""Leases of local snapshots: who is counted, shown and named, and what an end of one frees."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage_worker.protocol.errors import InvalidRequestError, OverloadedError, StorageReplacedError
from storage_worker.protocol.limits import DEFAULT_LIMITS, KIB
from storage_worker.protocol.statements import (
    HEALTH,
    SNAPSHOT,
    SNAPSHOT_END,
    Nothing,
    SnapshotEnd,
    SnapshotLease,
)
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.hostile import until
from tests.worker.raw import RawClient

ROOT = Path(__file__).parents[2]


def take(client: RawClient, number: int, age_ms: int = 60_000) -> object:
    return client.call(SNAPSHOT, SnapshotLease(number, age_ms))


def test_a_lease_tells_where_the_file_is_and_is_shown(worker: RunningWorker) -> None:
    reader, control = worker.connect(name="reads", role="read"), worker.connect()
    place = reader.call(SNAPSHOT, SnapshotLease(5, 60_000))
    found = worker.path.stat()
    assert (place.path, place.device, place.inode) == (str(worker.path), found.st_dev, found.st_ino)
    take(control, 6)
    first, second = control.status().snapshots
    assert (first.name, first.pid, first.overdue_ms) == ("reads", os.getpid(), 0)
    assert 59_000 < first.age_ms + first.left_ms <= 60_000
    assert second.name == "raw"
    for _ in range(2):  # an end that comes twice is none
        reader.call(SNAPSHOT_END, SnapshotEnd(5))
    assert [each.name for each in control.status().snapshots] == ["raw"]


def test_a_lease_ends_with_its_connection(worker: RunningWorker) -> None:
    client, control = worker.connect(), worker.connect()
    take(client, 5)
    client.close()
    until(control, lambda status: not status.snapshots)
    take(control, 5)


def test_a_lease_that_is_over_is_overdue_until_it_is_given_back(worker: RunningWorker) -> None:
    client = worker.connect(name="blocked")
    take(client, 5, age_ms=1)
    (found,) = until(client, lambda status: status.snapshots[0].overdue_ms > 0).snapshots
    assert (found.name, found.left_ms) == ("blocked", 0)
    client.call(SNAPSHOT_END, SnapshotEnd(5))
    assert client.status().snapshots == []


@pytest.mark.parametrize("age_ms", [0, -1, DEFAULT_LIMITS.snapshot_ms_max + 1, 2**64 - 1])
def test_ages_are_bounded(standing_worker: RunningWorker, age_ms: int) -> None:
    with RawClient(standing_worker.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            take(client, 5, age_ms)
        assert caught.value.details["snapshot_ms_max"] == DEFAULT_LIMITS.snapshot_ms_max
        assert client.status().snapshots == []


def test_their_number_is_bounded(start_worker: StartWorker) -> None:
    worker = start_worker(snapshots_max=2)
    client, other = worker.connect(), worker.connect()
    take(client, 1)
    take(other, 2)
    take(other, 2)  # sent again by a client that did not hear of it: the same one
    with pytest.raises(OverloadedError) as caught:
        take(client, 3)
    assert caught.value.details == {"bound": "snapshots", "snapshots_max": 2}
    assert caught.value.retry_after == DEFAULT_LIMITS.retry_after_ms_max / 1000
    other.close()
    until(client, lambda status: len(status.snapshots) == 1)
    take(client, 3)


def test_a_file_that_was_replaced_has_no_snapshot(worker: RunningWorker) -> None:
    client = worker.connect()
    worker.path.rename(worker.path.with_name("elsewhere.db"))
    with pytest.raises(StorageReplacedError):
        take(client, 1)
    assert client.status().snapshots == []


SMALL_WAL = {
    "wal_checkpoint_bytes": 64 * KIB,
    "wal_degraded_bytes": 256 * KIB,
    "wal_refuse_bytes": 512 * KIB,
    "wal_live_frames_max": 20,
    "wal_hold_ms_max": 1,
    "disk_check_ms": 1,
}

READER = """
import sys
import storage_worker as sw

with sw.connect(sys.argv[1], name="the reader") as client, client.snapshot(float(sys.argv[2])) as snap:
    print(snap.query("select count(*) from t").scalar(), flush=True)
    sys.stdin.read()
    try:
        print(snap.query("select count(*) from t").scalar())
    except sw.SnapshotExpiredError as error:
        print(error.code)
"""


@contextmanager
def reading_process(worker: RunningWorker, max_age: float) -> Iterator["subprocess.Popen[str]"]:
    """A process that has a snapshot of one row and says so; it goes on when its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, worker.address, str(max_age)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            yield process
        finally:
            process.kill()


def fill(client: RawClient, megabytes: int) -> None:
    for _ in range(megabytes * 10):
        client.execute("insert into t values(zeroblob(100000))")


def test_a_stopped_process_that_pins_the_wal_is_named_and_the_rest_protected(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(**SMALL_WAL)
    client = worker.connect()
    client.execute("create table t(a)")
    client.execute("insert into t values(1)")
    with reading_process(worker, 0.2) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(OverloadedError) as caught:
            fill(client, 10)
        assert caught.value.details["bound"] == "wal"
        assert f"a snapshot of client 'the reader' (pid {process.pid}" in caught.value.message
        status = until(client, lambda status: status.snapshots[0].overdue_ms > 0)
        assert status.snapshots[0].pid == process.pid
        assert "overdue by" in status.wal.pinned_by
        assert str(process.pid) in status.wal.pinned_by
        health = client.call(HEALTH, Nothing())
        assert health.state == "degraded"
        assert any(str(process.pid) in reason for reason in health.reasons)
        process.send_signal(signal.SIGCONT)
        until(client, lambda status: not status.snapshots and status.health.state == "healthy")
        fill(client, 1)
        assert process.communicate(timeout=60)[0] == "storage_snapshot_expired\n"


def test_an_idle_snapshot_that_is_over_lets_the_wal_start_over(start_worker: StartWorker) -> None:
    """Nothing is asked of it any more: its process does nothing but wait for its standard input."""
    worker = start_worker(**SMALL_WAL)
    client = worker.connect()
    client.execute("create table t(a)")
    client.execute("insert into t values(1)")
    with reading_process(worker, 2.0) as process:
        with pytest.raises(OverloadedError):
            fill(client, 10)
        until(client, lambda status: not status.snapshots and status.health.state == "healthy")
        fill(client, 3)
        assert process.communicate(timeout=60)[0] == "storage_snapshot_expired\n"


def test_a_killed_process_leaves_no_lease(start_worker: StartWorker) -> None:
    worker = start_worker()
    client = worker.connect()
    client.execute("create table t(a)")
    client.execute("insert into t values(1)")
    with reading_process(worker, 60.0) as process:
        assert len(client.status().snapshots) == 1
        process.kill()
        until(client, lambda status: not status.snapshots)
