import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from storage_worker import spawn as spawns
from storage_worker.address import socket_address
from storage_worker.ownership import SidePaths, is_owned, read_record
from storage_worker.processes import started_of
from storage_worker.protocol.errors import (
    DatabasePathError,
    DeadlineExceededError,
    ProtocolError,
    SchemaError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import Limits
from storage_worker.spawn import Child, how_it_ended, last_words, module_path, spawn
from storage_worker.startup import Startup

Fault = Callable[[str], None]


def startup_of(database: Path, limits: Limits | None = None) -> Startup:
    return Startup(
        path=str(database),
        address=socket_address(str(database)),
        durability="full",
        limits=limits or Limits(),
        stores=[],
        shipped=b"",
        sql=True,
        owner_pid=os.getpid(),
        owner_started=started_of(os.getpid()),
        secret=b"s" * 32,
        sys_path=module_path(),
    )


def soon(seconds: float = 60.0) -> int:
    return time.monotonic_ns() + round(seconds * 1e9)


def test_a_worker_starts_and_stops(database: Path, fake_worker: Fault) -> None:
    child = spawn(startup_of(database))
    record = child.answer(soon())
    assert record.pid == child.pid
    assert record == read_record(str(database))
    assert is_owned(str(database))
    # No terminal's interrupt reaches it.
    assert os.getsid(child.pid) == child.pid
    assert child.wait(0) is None
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 0
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 0
    assert not is_owned(str(database))
    assert not psutil.pid_exists(child.pid)


def test_a_workers_own_error_is_raised(database: Path, fake_worker: Fault) -> None:
    fake_worker("refuse")
    child = spawn(startup_of(database))
    with pytest.raises(SchemaError, match="newer") as caught:
        child.answer(soon())
    assert caught.value.details == {"version": 7}
    assert child.wait(0) == 1


def test_the_last_words_of_a_worker_that_dies_are_told(database: Path, fake_worker: Fault) -> None:
    fake_worker("exit at once")
    child = spawn(startup_of(database))
    with pytest.raises(WorkerUnavailableError, match=r"exit status 3.*these are my last words") as caught:
        child.answer(soon())
    assert caught.value.details["exit_status"] == 3
    assert caught.value.outcome == "not_committed"


def test_a_signal_that_ended_a_worker_is_named(database: Path, fake_worker: Fault) -> None:
    fake_worker("die by a signal")
    with pytest.raises(WorkerUnavailableError, match=r"SIGABRT.*it said nothing"):
        spawn(startup_of(database)).answer(soon())


def test_an_answer_that_is_none_ends_the_worker(database: Path, fake_worker: Fault) -> None:
    fake_worker("speak nonsense")
    child = spawn(startup_of(database))
    with pytest.raises(ProtocolError):
        child.answer(soon())
    assert child.wait(0) == -signal.SIGKILL


def test_a_worker_that_does_not_answer_meets_the_deadline(database: Path, fake_worker: Fault) -> None:
    fake_worker("never answer")
    child = spawn(startup_of(database))
    with pytest.raises(DeadlineExceededError) as caught:
        child.answer(soon(0.3))
    assert caught.value.details["stage"] == "start"
    assert child.wait(0) is None
    assert child.end(0) == -signal.SIGKILL


def test_a_long_message_to_a_worker_that_never_reads_it_meets_the_deadline(database: Path) -> None:
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child = Child(sleeper, startup_of(database), b"x" * 1_000_000)
    with pytest.raises(DeadlineExceededError):
        child.answer(soon(0.3))
    child.end(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only there a death is seen by other means than the pipe")
def test_a_death_is_seen_although_another_process_holds_the_pipe(database: Path) -> None:
    # As one that was forked between the making of the pipes and the start of the worker does.
    dying = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert dying.stdout is not None
    kept = os.open(f"/dev/fd/{dying.stdout.fileno()}", os.O_WRONLY)
    with pytest.raises(WorkerUnavailableError, match="exit status 0"):
        Child(dying, startup_of(database), b"").answer(soon())
    os.close(kept)


def test_a_worker_that_is_let_go_leaves_no_zombie(database: Path, fake_worker: Fault) -> None:
    child = spawn(startup_of(database))
    child.answer(soon())
    child.leave()
    reaper = next(thread for thread in threading.enumerate() if str(child.pid) in thread.name)
    os.kill(child.pid, signal.SIGTERM)
    reaper.join(60)
    assert not psutil.pid_exists(child.pid)


def test_without_pidfds_it_works_too(
    database: Path, fake_worker: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawns, "pidfd_of", lambda _pid: None)
    child = spawn(startup_of(database))
    child.answer(soon())
    assert child.wait(0) is None
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 0


def test_a_worker_that_something_else_waited_for_has_ended(database: Path, fake_worker: Fault) -> None:
    child = spawn(startup_of(database))
    child.answer(soon())
    os.kill(child.pid, signal.SIGTERM)
    os.waitpid(child.pid, 0)
    assert child.wait() == 0
    child.send_signal(signal.SIGTERM)


def test_what_cannot_be_started_is_told(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(WorkerUnavailableError, match=r"sys\.executable"):
        spawn(startup_of(database))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkerUnavailableError, match="cannot be started") as caught:
        spawn(startup_of(database))
    assert caught.value.outcome == "not_committed"


def test_the_log_is_private_and_begins_anew(database: Path, fake_worker: Fault) -> None:
    fake_worker("exit at once")
    kept = os.umask(0)
    try:
        for _ in range(2):
            with pytest.raises(WorkerUnavailableError):
                spawn(startup_of(database)).answer(soon())
    finally:
        os.umask(kept)
    log = Path(SidePaths.of(str(database)).log)
    assert log.stat().st_mode & 0o777 == 0o600
    before = log.with_name("worker.log.1")
    assert (before.read_text(), before.stat().st_mode & 0o777) == ("these are my last words", 0o600)
    assert log.read_text() == "these are my last words"


def test_a_log_that_cannot_be_opened_is_told(database: Path) -> None:
    side = SidePaths.of(str(database))
    Path(side.directory).mkdir(0o700)
    Path(side.log).symlink_to("elsewhere")
    with pytest.raises(DatabasePathError, match="cannot open the worker's log"):
        spawn(startup_of(database))


def test_last_words_are_bounded_and_readable(database: Path) -> None:
    side = SidePaths.of(str(database))
    Path(side.directory).mkdir()
    assert "cannot be read" in last_words(str(database))
    Path(side.log).write_bytes(b"x" * 100_000 + b"\xff the end\n")
    assert last_words(str(database)).endswith("\N{REPLACEMENT CHARACTER} the end")
    assert len(last_words(str(database))) < 2_000


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "ended by SIGKILL"), (-99, "ended by signal 99")],
)
def test_an_end_is_told_in_words(status: int, words: str) -> None:
    assert words in how_it_ended(status)


def test_the_path_of_modules_is_what_another_process_can_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "relative", "/with:colon", "/\udcff", "/nul\0", tmp_path, "/plain"])
    assert module_path() == [
        str(tmp_path),
        str(tmp_path / "relative"),
        "/with:colon",
        str(tmp_path),
        "/plain",
    ]
    assert "/with:colon" not in spawns._python_path(module_path())
