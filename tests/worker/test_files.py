"""The files below a worker: replaced while it runs, and what it finds at its start."""

import os
import shutil
import signal
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage_worker.exits import REPLACED
from storage_worker.protocol.envelope import Failure
from storage_worker.protocol.errors import DatabasePathError, SchemaError, StorageCorruptError
from storage_worker.protocol.statements import BEGIN, COMMIT, EXECUTE, Begin, Nothing, Statement
from tests.worker.conftest import StartWorker
from tests.worker.foreign import foreign_process
from tests.worker.raw import PATIENCE_S, RawClient

INSERT = "insert into t values(?)"


def rows_in(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as database:
        return [a for (a,) in database.execute("select a from t order by rowid")]


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        version, mode = (
            database.execute(f"pragma {name}").fetchone()[0] for name in ("schema_version", "journal_mode")
        )
        return [f"{version} {mode}", *database.iterdump()]


# Replaced while the worker runs


def delete_wal(path: Path) -> Path:
    Path(f"{path}-wal").unlink()
    return path


def rename_wal(path: Path) -> Path:
    Path(f"{path}-wal").rename(f"{path}-wal.kept")
    return path


def replace_wal(path: Path) -> Path:
    shutil.copy(f"{path}-wal", f"{path}-wal.new")
    Path(f"{path}-wal.new").replace(f"{path}-wal")
    return path


def rename_database(path: Path) -> Path:
    return path.rename(path.with_name("renamed.db"))


def delete_database(path: Path) -> Path:
    kept = path.with_name("link.db")
    os.link(path, kept)
    path.unlink()
    return kept


def replace_database(path: Path) -> Path:
    kept = path.with_name("replaced.db")
    os.link(path, kept)
    with closing(sqlite3.connect(path.with_name("new.db"))) as new:
        new.execute("create table t(a)")
        new.execute("insert into t values('of another database')")
        new.commit()
    path.with_name("new.db").replace(path)
    return kept


def rename_directory(path: Path) -> Path:
    return path.parent.rename(path.parent.with_name("elsewhere")) / path.name


def directory_becomes_a_file(path: Path) -> Path:
    kept = rename_directory(path)
    path.parent.write_text("")
    return kept


REPLACEMENTS = [
    delete_wal, rename_wal, replace_wal, rename_database, delete_database, replace_database, rename_directory,
    directory_becomes_a_file,
]  # fmt: skip


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_nothing_is_acknowledged_into_files_that_were_replaced(
    start_worker: StartWorker, tmp_path: Path, replace: Callable[[Path], Path]
) -> None:
    path = tmp_path / "place" / "app.db"
    path.parent.mkdir()
    worker = start_worker(path, wal_idle_ms=600_000, disk_check_ms=1)
    client, other = worker.connect(), worker.connect()
    client.execute("create table t(a)")
    for number in range(20):
        client.execute(INSERT, number)
    kept = replace(path)
    assert other.query("select count(*) from t").scalar() == 20
    requests = [(each, each.ask(EXECUTE, Statement(INSERT, ["replaced"]))) for each in (client, other)]
    assert ("storage_replaced", "unknown") in [fate(each, request) for each, request in requests]
    assert worker.child.wait(PATIENCE_S) == REPLACED
    # What was acknowledged before is in the files that the worker had open.
    found = rows_in(kept)
    assert found[:20] == list(range(20))
    assert set(found[20:]) <= {"replaced"}
    if replace is replace_database:
        assert rows_in(path) == ["of another database"]


def fate(client: RawClient, request: int) -> tuple[str, str]:
    """Code and outcome. Who was in the transaction cannot know; who still waited does, or is never heard."""
    try:
        answer = client.answer(request)
    except (EOFError, ConnectionResetError):
        return "lost", "unknown"
    assert isinstance(answer, Failure)
    found = answer.code, answer.outcome
    assert found in {("storage_replaced", "unknown"), ("storage_unavailable", "not_committed")}
    return found


def test_an_interactive_commit_into_replaced_files(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker()
    client = worker.connect()
    client.execute("create table t(a)")
    transaction = client.call(BEGIN, Begin(60_000))
    client.execute(INSERT, 1, transaction=transaction)
    rename_database(worker.path)
    answer = client.answer(client.ask(COMMIT, Nothing(), transaction=transaction))
    assert isinstance(answer, Failure)
    assert (answer.code, answer.outcome) == ("storage_replaced", "unknown")
    assert worker.child.wait(PATIENCE_S) == REPLACED


# What is found at the start


def test_a_database_in_rollback_mode_becomes_one_in_wal_mode(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as old:
        old.execute("pragma page_size=1024")
        old.execute("create table t(a)")
        old.execute("insert into t values('old')")
        old.commit()
    path.chmod(0o644)
    client = start_worker(path).connect()
    client.execute(INSERT, "new")
    assert [a for (a,) in client.query("select a from t")] == ["old", "new"]
    assert client.welcome is not None
    assert client.welcome.journal_mode == "wal"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_hot_journal_is_rolled_back(start_worker: StartWorker, tmp_path: Path) -> None:
    path = tmp_path / "hot.db"
    with closing(sqlite3.connect(path)) as made:
        made.execute("create table t(a)")
        made.executemany("insert into t values(?)", [(number,) for number in range(1000)])
        made.commit()
    copy = tmp_path / "copy" / "hot.db"
    copy.parent.mkdir()
    with foreign_process(path, "pragma cache_size=1", "begin immediate", "update t set a = zeroblob(500)"):
        for suffix in ("", "-journal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    client = start_worker(copy).connect()
    assert client.query("select count(*), max(a) from t").rows == [(1000, 999)]


def test_an_empty_file_is_a_new_database(start_worker: StartWorker, tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    client = start_worker(path).connect()
    client.execute("create table t(a)")
    assert client.execute("pragma auto_vacuum").scalar() == 2


@pytest.mark.parametrize(
    "content",
    [b"this is no database at all, and not even short" * 100, b"SQLite format 3\0" + b"\xff" * 5000, b"xy"],
)
def test_a_file_that_is_no_database_is_refused_unchanged(
    start_worker: StartWorker, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "text.db"
    path.write_bytes(content)
    with pytest.raises(StorageCorruptError) as caught:
        start_worker(path)
    assert str(path) in caught.value.message
    assert path.read_bytes() == content


def test_refused_places(start_worker: StartWorker, tmp_path: Path) -> None:
    (tmp_path / "directory.db").mkdir()
    (tmp_path / "one.db").touch()
    (tmp_path / "two.db").hardlink_to(tmp_path / "one.db")
    os.mkfifo(tmp_path / "fifo.db")
    before = sorted(tmp_path.iterdir())
    for name in ("directory.db", "one.db", "two.db", "fifo.db"):
        with pytest.raises(DatabasePathError) as caught:
            start_worker(tmp_path / name)
        assert name in caught.value.message
    made = [path for path in sorted(tmp_path.iterdir()) if path not in before]
    # Only the log of the worker that could not start.
    assert all(path.name.endswith("-sw") for path in made)


def test_files_are_private_whatever_the_umask(start_worker: StartWorker, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        worker = start_worker()
        worker.connect().execute("create table t(a)")
        for path in (worker.path, *worker.path.parent.glob(f"{worker.path.name}-*")):
            wanted = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path
        for path in Path(f"{worker.path}-sw").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    finally:
        os.umask(umask)


def test_a_database_of_a_newer_release_is_refused_unchanged(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    path = tmp_path / "newer.db"
    start_worker(path).stop()
    with closing(sqlite3.connect(path)) as newer:
        newer.execute("update _sw_own set value = 99 where name = 'version'")
        newer.execute("create table t(a)")
        newer.execute("create index i on t(a)")
        newer.executemany("insert into t values(?)", [(number,) for number in range(2000)])
        newer.commit()
    before = dump(path)
    with pytest.raises(SchemaError) as caught:
        start_worker(path)
    assert caught.value.details["database_version"] == 99
    assert dump(path) == before


def test_a_killed_worker_leaves_what_was_acknowledged(start_worker: StartWorker) -> None:
    worker = start_worker()
    client = worker.connect()
    client.execute("create table t(a)")
    for number in range(20):
        client.execute(INSERT, number)
    worker.child.send_signal(signal.SIGKILL)
    worker.child.wait(PATIENCE_S)
    again = start_worker().connect()
    assert [a for (a,) in again.query("select a from t")] == list(range(20))
    again.execute(INSERT, 20)
