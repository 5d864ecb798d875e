"""A small file system that fills up: typed refusals, nothing half done, and service again when space returns."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_worker.protocol.errors import (
    DatabasePathError,
    OverloadedError,
    StorageError,
    StorageFullError,
    TransactionExpiredError,
)
from storage_worker.protocol.statements import (
    BEGIN,
    COMMIT,
    OUTCOME,
    ROLLBACK,
    Begin,
    Nothing,
    OutcomeQuestion,
)
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.raw import RawClient

SIZE = 8 * 1024 * 1024
INSERT = "insert into t(a, b) values(?, zeroblob(?)) returning a"
TRIES_MAX = 100_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = f"a file system cannot be mounted here: {done.stderr.strip()}"
        if os.environ.get("CI") and os.geteuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    """Leave so many bytes free."""
    found = os.statvfs(place)
    filler = place / "filler"
    with filler.open("wb") as file:
        file.write(bytes(found.f_bavail * found.f_frsize - leave))
    return filler


class Ledger:
    """What was acknowledged and what was refused."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.kept: list[int] = []
        self.unknown: list[int] = []
        self.number = 0

    def add(self, size: int) -> StorageError | None:
        """Insert one row; the error where that fails."""
        self.number += 1
        try:
            self.client.execute(INSERT, self.number, size)
        except (StorageFullError, OverloadedError) as error:
            if error.outcome == "unknown":
                self.unknown.append(self.number)
            return error
        self.kept.append(self.number)
        return None

    def add_until_full(self, size: int) -> StorageError:
        for _ in range(TRIES_MAX):
            if (error := self.add(size)) is not None:
                return error
        raise AssertionError("the disk never fills up")

    def add_until_served(self, size: int) -> None:
        for _ in range(TRIES_MAX):
            if self.add(size) is None:
                return
        raise AssertionError("there is space, and no service")

    def check(self) -> None:
        found = [a for (a,) in self.client.query("select a from t order by a")]
        assert [a for a in found if a not in self.unknown] == self.kept
        assert self.client.query("pragma integrity_check").scalar() == "ok"


def started(start_worker: StartWorker, place: Path, **limits: Any) -> tuple[RunningWorker, Ledger]:
    worker = start_worker(place / "app.db", **({"disk_check_ms": 1} | limits))
    client = worker.connect()
    client.execute("create table t(a integer primary key, b)")
    return worker, Ledger(client)


def test_writes_are_refused_while_the_reserve_is_all_that_is_left(
    start_worker: StartWorker, small_disk: Path
) -> None:
    worker, ledger = started(start_worker, small_disk)
    ledger.add(1000)
    filler = fill(small_disk, leave=SIZE // 100)
    error = ledger.add_until_full(10)
    assert error.details["reserve_bytes"] == SIZE * 5 // 100
    assert "comes back by itself" in error.message
    health = worker.connect().status().health
    assert health.state == "degraded"
    ledger.check()
    filler.unlink()
    ledger.add_until_served(1000)
    ledger.check()
    assert worker.connect().status().health.state == "healthy"
    assert worker.stop() == 0


def test_a_disk_that_is_full_before_the_reserve_is_seen(start_worker: StartWorker, small_disk: Path) -> None:
    # As where another program takes the last byte.
    worker, ledger = started(start_worker, small_disk, disk_check_ms=600_000)
    ledger.add(3_000)
    filler = fill(small_disk, leave=0)
    for size in (100_000, 3_000, 10):
        assert ledger.add_until_full(size).code == "storage_full"
        ledger.check()
    filler.unlink()
    ledger.add_until_served(50_000)
    for _ in range(10):
        assert ledger.add(50_000) is None
    ledger.check()
    # Once a fence has followed, what was unknown is not committed.
    assert [a for (a,) in ledger.client.query("select a from t order by a")] == ledger.kept
    assert worker.stop() == 0


def test_a_database_that_fills_the_disk_to_its_reserve(start_worker: StartWorker, small_disk: Path) -> None:
    worker, ledger = started(start_worker, small_disk)
    for size in (100_000, 3_000, 10):
        assert ledger.add_until_full(size).code == "storage_full"
    ledger.check()
    assert worker.stop() == 0
    # The reserve leaves room for a start.
    ledger.client = start_worker(small_disk / "app.db", disk_check_ms=1).connect()
    ledger.check()


def test_a_start_on_a_full_disk(start_worker: StartWorker, small_disk: Path) -> None:
    worker, ledger = started(start_worker, small_disk)
    ledger.add(1000)
    worker.stop()
    filler = fill(small_disk, leave=0)
    for path in (small_disk / "app.db", small_disk / "new.db"):
        with pytest.raises(StorageFullError):
            start_worker(path)
    filler.unlink()
    ledger.client = start_worker(small_disk / "app.db").connect()
    ledger.add_until_served(1000)
    ledger.check()


def test_a_read_only_place_is_refused(start_worker: StartWorker, small_disk: Path) -> None:
    worker, _ = started(start_worker, small_disk)
    worker.stop()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for path in (small_disk / "app.db", small_disk / "new.db"):
        with pytest.raises(DatabasePathError) as caught:
            start_worker(path)
        assert str(path) in caught.value.message
        assert "ead-only" in caught.value.message


def test_an_interactive_transaction_meets_a_full_disk(start_worker: StartWorker, small_disk: Path) -> None:
    worker, ledger = started(start_worker, small_disk, disk_check_ms=600_000)
    client = worker.connect()
    filler = fill(small_disk, leave=400_000)
    transaction = client.call(BEGIN, Begin(60_000))
    error = fill_interactively(client, transaction)
    assert error.code == "storage_full"
    if not error.details.get("transaction_ended"):
        with contextlib.suppress(TransactionExpiredError):
            client.call(ROLLBACK, Nothing(), transaction=transaction)
    filler.unlink()
    ledger.add_until_served(50_000)
    ledger.check()


def fill_interactively(client: RawClient, transaction: int) -> StorageError:
    try:
        for number in range(100):
            client.execute(INSERT, 10_000 + number, 60_000, transaction=transaction)
        client.call(COMMIT, Nothing(), transaction=transaction)
    except StorageError as error:
        return error
    raise AssertionError("the disk never fills up")


def test_what_adds_nothing_is_served_below_the_reserve_and_a_repeat_is_told_the_truth(
    start_worker: StartWorker, small_disk: Path
) -> None:
    """A client that has lost an answer must be able to learn what became of its write."""
    worker, ledger = started(start_worker, small_disk)
    client = ledger.client
    client.execute("insert into t values(1000000, 'kept')", key="k")
    owner = worker.connect()
    number = owner.call(BEGIN, Begin(0))
    owner.execute("insert into t values(2000000, 'in a transaction')", transaction=number)
    fill(small_disk, leave=SIZE // 100)
    error = ledger.add_until_full(10)
    assert isinstance(error, StorageFullError)
    owner.call(COMMIT, Nothing(), transaction=number)
    assert client.execute("insert into t values(1000000, 'kept')", key="k").rows_changed == 1
    assert client.call(OUTCOME, OutcomeQuestion("k")).state == "committed"
    assert client.call(OUTCOME, OutcomeQuestion("new")).state == "not_found"
    with pytest.raises(StorageFullError) as caught:
        client.execute("insert into t values(3000000, 'new')", key="new")
    assert caught.value.outcome == "not_committed"
    found = [a for (a,) in client.query("select a from t where a > 999999 order by a")]
    assert found == [1_000_000, 2_000_000]
