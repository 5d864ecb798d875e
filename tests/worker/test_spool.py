"""Spools: private, nameless files, bounded, gone with their use; a disk without room undoes the write."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage_worker import spool as spool_module
from storage_worker.peer import Job
from storage_worker.protocol.errors import OperationFailedError, OverloadedError, StorageFullError
from storage_worker.protocol.limits import DEFAULT_LIMITS, KIB, MIB
from storage_worker.spool import Large, Spools
from tests.worker.workbench import Workbench, failure, rows_of


def spools_of(tmp_path: Path, **changes: int) -> Spools:
    (tmp_path / "t.db-sw").mkdir(exist_ok=True)
    return Spools(str(tmp_path / "t.db"), msgspec.structs.replace(DEFAULT_LIMITS, **changes))


@pytest.fixture
def spools(tmp_path: Path) -> Spools:
    return spools_of(tmp_path, spool_bytes_max=1_000, spools_max=3)


def figures(spools: Spools) -> tuple[int, int]:
    return spools.status.spools, spools.status.spooled_bytes


def test_what_is_written_is_read_and_nobody_else_finds_it(spools: Spools, tmp_path: Path) -> None:
    spool = spools.open(10)
    spool.write(b"01234")
    spool.write(memoryview(b"56789"))
    assert (spool.read(0, 10), spool.read(4, 3)) == (b"0123456789", b"456")
    assert list((tmp_path / "t.db-sw").iterdir()) == []
    found = os.fstat(spool._file.fileno())
    assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)
    assert found.st_dev == tmp_path.stat().st_dev
    for _ in range(2):
        spool.close()
        assert figures(spools) == (0, 0)
    assert spools.status.largest_bytes == 10


def test_bounds_of_count_and_bytes(spools: Spools) -> None:
    held = [spools.open(300) for _ in range(3)]
    with pytest.raises(OverloadedError) as caught:
        spools.open(1)
    assert caught.value.details == {"bound": "spools"}
    held.pop().close()
    with pytest.raises(OverloadedError) as caught:
        spools.open(401)
    assert caught.value.details == {"bound": "spool_bytes"}
    assert caught.value.retry_after
    held.append(spools.keep(b"x" * 400))
    assert figures(spools) == (3, 1_000)
    for each in held:
        each.close()


def test_a_disk_whose_reserve_would_be_used_up(spools: Spools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "disk_reserve_bytes", lambda *_: 100)
    monkeypatch.setattr(spool_module, "disk_free_bytes", lambda _: 150)
    spools.open(50).close()
    with pytest.raises(StorageFullError):
        spools.open(51)
    assert figures(spools) == (0, 0)


def fails_with(number: int) -> Any:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageFullError), (errno.EDQUOT, StorageFullError), (errno.EIO, OperationFailedError)],
)
def test_a_disk_that_fails(
    spools: Spools, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr("storage_worker.spool.os.write", fails_with(number))
    with pytest.raises(kind):
        spools.keep(b"x")
    assert figures(spools) == (0, 0)
    monkeypatch.setattr("storage_worker.spool.tempfile.TemporaryFile", lambda **_: fails_with(number)())
    with pytest.raises(kind):
        spools.open(1)
    assert figures(spools) == (0, 0)


def test_a_part_that_the_disk_does_not_give_back(spools: Spools) -> None:
    spool = spools.keep(b"abc")
    with pytest.raises(OperationFailedError):
        spool.read(1, 3)
    spool.close()


# In the writer


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    with Workbench(tmp_path / "t.db", result_bytes_max=64 * KIB, result_bytes_default=64 * KIB) as found:
        found.execute("create table t(a)")
        found.run_all()
        yield found


def large(job: Job, spools: Spools) -> Large:
    job.large = found = Large(spools)
    job.alone = True
    return found


RETURNING = "insert into t values(1) returning zeroblob(100000)"


def test_a_result_over_one_frame_is_spooled(bench: Workbench, tmp_path: Path) -> None:
    spools = spools_of(tmp_path, result_bytes_max=64 * KIB)
    small = bench.execute("insert into t values(0) returning 7")
    has = large(bench.execute(RETURNING), spools)
    large(small, spools)
    bench.run_all()
    assert rows_of(small).scalar() == 7
    assert has.result is not None
    assert has.result.size > 100_000
    assert figures(spools) == (1, has.result.size)
    has.close()
    assert figures(spools) == (0, 0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_without_room_for_its_result_a_write_is_undone(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    spools = spools_of(tmp_path, result_bytes_max=64 * KIB)
    job = bench.execute(RETURNING)
    large(job, spools)
    monkeypatch.setattr("storage_worker.spool.os.write", fails_with(number))
    bench.run_all()
    found = failure(job)
    expected = "storage_full" if number == errno.ENOSPC else "storage_operation_failed"
    assert (found.code, found.outcome) == (expected, "not_committed")
    assert bench.rows("select count(*) from t") == [(0,)]
    assert figures(spools) == (0, 0)
    # The connection is none the worse for it.
    assert bench.writer.status.reopened == 0
    again = bench.execute("insert into t values(2)")
    bench.run_all()
    assert rows_of(again).rows_changed == 1


def test_a_run_that_is_undone_leaves_no_spool(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spools = spools_of(tmp_path, result_bytes_max=64 * KIB)
    job = bench.execute(RETURNING)
    has = large(job, spools)
    bench.writer.try_begin(0)
    bench.writer.runner.run(job, 0, 0, mates=False)
    assert figures(spools)[0] == 1
    bench.writer._undo([job])
    assert has.result is None
    assert figures(spools) == (0, 0)
    bench.lane.take()


def test_a_deadline_before_the_commit_drops_the_result(bench: Workbench, tmp_path: Path) -> None:
    spools = spools_of(tmp_path, result_bytes_max=64 * KIB)
    job = bench.execute(RETURNING)
    large(job, spools)
    bench.writer.try_begin(0)
    bench.writer.runner.run(job, 0, 0, mates=False)
    job.deadline_ns = 1
    bench.writer.commit([job])
    assert failure(job).code == "storage_deadline"
    assert figures(spools) == (0, 0)
    assert bench.rows("select count(*) from t") == [(0,)]


def test_arguments_are_read_from_their_spool(bench: Workbench, tmp_path: Path) -> None:
    spools = spools_of(tmp_path)
    job = bench.execute("insert into t values(?)", b"x" * MIB)
    has = large(job, spools)
    has.arguments, job.raw = spools.keep(bytes(job.raw)), msgspec.Raw(b"\x05")
    bench.run_all()
    assert rows_of(job).rows_changed == 1
    assert bench.rows("select length(a) from t") == [(MIB,)]
    has.close()
