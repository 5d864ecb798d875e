import contextlib
import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from storage_worker import spawn
from storage_worker import supervisor as supervisors
from storage_worker.lockfile import LockFile
from storage_worker.ownership import SidePaths, is_owned, try_start_lock
from storage_worker.protocol.envelope import encode
from storage_worker.protocol.errors import (
    AlreadyOwnedError,
    CrashLoopError,
    DatabasePathError,
    DeadlineExceededError,
    SchemaError,
    StorageError,
    WorkerUnavailableError,
)
from storage_worker.protocol.framing import frame
from storage_worker.protocol.limits import Limits
from storage_worker.startup import Started, Startup
from storage_worker.supervisor import Supervisor

from .conftest import starts_of
from .programs import start_program
from .test_ownership import record_of
from .test_spawn import Fault, soon, startup_of

_before: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def note_children() -> None:
    """Other tests of this process may have left a fork server, which lives as long as it does."""
    _before.clear()
    _before.update(psutil.Process().children())


def started_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child not in _before]


QUICK = Limits(restart_backoff_ms_min=1, restart_backoff_ms_max=1, crash_loop_deaths=10_000)
GRACE_SECONDS = 30.0
"""Long enough that no test waits for it; a killed worker is a test that fails."""


@pytest.fixture
def supervise(fake_worker: Fault) -> Iterator[Callable[..., Supervisor]]:
    """Make a supervisor that the test's end stops."""
    made: list[Supervisor] = []

    def make(database: Path, limits: Limits = QUICK) -> Supervisor:
        made.append(Supervisor(startup_of(database, limits)))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.stop(GRACE_SECONDS)


Supervise = Callable[..., Supervisor]


def kill(supervisor: Supervisor) -> int:
    """Kill the running worker; its generation."""
    generation = supervisor.wait_running(soon())
    record = supervisor.record
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    return generation


def test_a_worker_runs_until_it_is_stopped(database: Path, supervise: Supervise) -> None:
    supervisor = supervise(database)
    with pytest.raises(WorkerUnavailableError, match="has not been started"):
        supervisor.wait_running(soon())
    assert supervisor.record is None
    supervisor.start(soon())
    supervisor.start(soon())
    record = supervisor.record
    assert record is not None
    assert record.owner_pid == os.getpid()
    assert supervisor.wait_running(soon()) == supervisor.generation == 1
    supervisor.stop(GRACE_SECONDS)
    supervisor.stop(GRACE_SECONDS)
    assert supervisor.record is None
    assert not is_owned(str(database))
    assert not psutil.pid_exists(record.pid)
    for act in (supervisor.start, supervisor.wait_running):
        with pytest.raises(WorkerUnavailableError, match="was stopped") as caught:
            act(soon())
        assert not caught.value.retryable


def test_a_supervisor_that_never_started_is_stopped_too(database: Path, supervise: Supervise) -> None:
    supervisor = supervise(database)
    supervisor.stop(GRACE_SECONDS)
    with pytest.raises(WorkerUnavailableError, match="was stopped"):
        supervisor.start(soon())


@pytest.mark.parametrize("status", ["killed", "ended by itself"])
def test_a_dead_worker_is_restarted_at_the_same_address(
    database: Path, supervise: Supervise, status: str
) -> None:
    supervisor = supervise(database)
    supervisor.start(soon())
    first = supervisor.record
    assert first is not None
    os.kill(first.pid, signal.SIGKILL if status == "killed" else signal.SIGTERM)
    assert supervisor.wait_running(soon(), after=1) == 2
    second = supervisor.record
    assert second is not None
    assert second.pid != first.pid
    assert second.worker != first.worker
    assert (second.address, second.secret) == (first.address, first.secret)


def test_two_hundred_restarts_leave_nothing(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "WORKER_MODULE", "tests.launch.bare_worker")
    monkeypatch.setenv("SW_ANSWER", frame(encode(Started(record_of(1)))).hex())
    supervisor = Supervisor(startup_of(database, QUICK))
    supervisor.start(soon())

    def restart() -> tuple[int, int, int]:
        """Descriptors, threads and children after one more death."""
        generation = supervisor.wait_running(soon())
        assert supervisor._child is not None
        supervisor._child.send_signal(signal.SIGKILL)
        supervisor.wait_running(soon(), after=generation)
        me = psutil.Process()
        return me.num_fds(), threading.active_count(), len(me.children())

    before = restart()
    assert {restart() for _ in range(200)} == {before}
    assert supervisor.generation == 202
    supervisor.stop(GRACE_SECONDS)


def test_a_crash_loop_is_told_to_every_waiter(
    database: Path, supervise: Supervise, fake_worker: Fault
) -> None:
    supervisor = supervise(database, msgspec.structs.replace(QUICK, crash_loop_deaths=3))
    supervisor.start(soon())
    errors: list[StorageError] = []

    def wait() -> None:
        try:
            supervisor.wait_running(soon(), after=10_000)
        except StorageError as error:
            errors.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    fake_worker("exit at once")
    kill(supervisor)
    for waiter in waiters:
        waiter.join()
    assert [type(error) for error in errors] == [CrashLoopError] * 4
    assert len(set(map(id, errors))) == 4
    for error in errors:
        assert error.details["deaths"] == 3
        assert "these are my last words" in error.message
        assert error.outcome == "not_committed"
        assert not error.retryable
    # Nobody restarts it any more, so others may.
    lock = try_start_lock(str(database))
    assert lock is not None
    lock.release()
    supervisor.stop(GRACE_SECONDS)
    with pytest.raises(CrashLoopError):
        supervisor.wait_running(soon())


def test_workers_that_die_after_their_start_are_a_crash_loop_too(
    database: Path, supervise: Supervise, fake_worker: Fault
) -> None:
    fake_worker("die after its start")
    supervisor = supervise(database, msgspec.structs.replace(QUICK, crash_loop_deaths=5))
    with contextlib.suppress(WorkerUnavailableError):  # it may have died before anyone could look
        supervisor.start(soon())
    with pytest.raises(CrashLoopError, match="exit status 5"):
        supervisor.wait_running(soon(), after=10_000)
    assert starts_of(database) == 5


def test_back_off_doubles_and_forgets(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(
        restart_backoff_ms_min=50,
        restart_backoff_ms_max=300,
        crash_loop_deaths=6,
        crash_loop_window_ms=30_000,
    )
    supervisor = Supervisor(startup_of(database, limits))
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waits = [supervisor._note_death("it died") for _ in range(5)]
    assert waits == [0.05, 0.1, 0.2, 0.3, 0.3]
    now += 31
    assert supervisor._note_death("it died") == 0.05
    for _ in range(4):
        supervisor._note_death("it died")
    with pytest.raises(CrashLoopError, match=r"died 6 times within 30 s.*it died$"):
        supervisor._note_death("it died")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("refuse", SchemaError),
        ("exit at once", WorkerUnavailableError),
        ("never answer", DeadlineExceededError),
    ],
)
def test_a_start_that_fails_leaves_nothing(
    database: Path, supervise: Supervise, fake_worker: Fault, fault: str, error: type[StorageError]
) -> None:
    fake_worker(fault)
    supervisor = supervise(database)
    deadline = soon(1.0 if error is DeadlineExceededError else 60.0)
    with pytest.raises(error):
        supervisor.start(deadline)
    assert started_children() == []
    assert not is_owned(str(database))
    lock = try_start_lock(str(database))
    assert lock is not None
    lock.release()
    with pytest.raises(error):
        supervisor.wait_running(soon())


def test_a_path_that_became_bad_fails_the_start(tmp_path: Path, supervise: Supervise) -> None:
    with pytest.raises(DatabasePathError):
        supervise(tmp_path / "none" / "app.db").start(soon())


def test_an_owned_database_is_refused_at_once(database: Path, supervise: Supervise) -> None:
    first = supervise(database)
    first.start(soon())
    record = first.record
    assert record is not None
    with pytest.raises(AlreadyOwnedError) as caught:
        supervise(database).start(soon())
    assert caught.value.details["pid"] == record.pid
    # The owner's log was not begun anew under its feet, and the owner runs on.
    assert first.wait_running(soon()) == 1


def test_whoever_supervises_keeps_others_from_starting(database: Path, supervise: Supervise) -> None:
    lock = try_start_lock(str(database))
    assert lock is not None
    with pytest.raises(AlreadyOwnedError, match="starts or supervises"):
        supervise(database).start(soon(0.05))
    late = supervise(database)
    thread = threading.Thread(target=late.start, args=(soon(),))
    thread.start()
    lock.release()
    thread.join()
    assert late.wait_running(soon()) == 1


def test_a_start_can_be_stopped(database: Path, supervise: Supervise, fake_worker: Fault) -> None:
    fake_worker("never answer")
    supervisor = supervise(database)
    errors: list[StorageError] = []

    def start() -> None:
        try:
            supervisor.start(soon())
        except StorageError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    supervisor.stop(0.05)
    thread.join()
    assert "was stopped" in errors[0].message
    assert started_children() == []


def test_a_stop_in_the_instant_of_a_start_is_not_lost(
    database: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervise(database)
    stopping: list[threading.Thread] = []

    def spawn_late(startup: Startup) -> spawn.Child:
        # The process is there, and the supervisor does not know it yet.
        child = spawn.spawn(startup)
        stopping.append(threading.Thread(target=supervisor.stop, args=(GRACE_SECONDS,)))
        stopping[0].start()
        with supervisor._changed:
            supervisor._changed.wait_for(lambda: supervisor._stopping)
        return child

    sent: list[tuple[threading.Thread, signal.Signals]] = []
    monkeypatch.setattr(
        supervisor, "_send_signal", lambda number: sent.append((threading.current_thread(), number))
    )
    monkeypatch.setattr(supervisors, "spawn", spawn_late)
    with contextlib.suppress(WorkerUnavailableError):  # it may have listened before it ended
        supervisor.start(soon())
    stopping[0].join()
    assert [number for thread, number in sent if thread is stopping[0]] == [signal.SIGTERM]
    assert started_children() == []


def test_a_start_that_waits_for_the_lock_can_be_stopped(database: Path, supervise: Supervise) -> None:
    lock = try_start_lock(str(database))
    assert lock is not None
    supervisor = supervise(database)
    errors: list[StorageError] = []

    def start() -> None:
        try:
            supervisor.start(soon())
        except StorageError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    supervisor.stop(GRACE_SECONDS)
    thread.join()
    assert "was stopped" in errors[0].message
    lock.release()


def test_a_restart_can_be_stopped(database: Path, supervise: Supervise, fake_worker: Fault) -> None:
    supervisor = supervise(database)
    supervisor.start(soon())
    fake_worker("never answer")
    kill(supervisor)
    with pytest.raises(WorkerUnavailableError, match="not running again in time"):
        supervisor.wait_running(soon(0.5), after=1)
    supervisor.stop(0.05)
    assert started_children() == []
    with pytest.raises(WorkerUnavailableError, match="was stopped"):
        supervisor.wait_running(soon())


def test_a_back_off_can_be_stopped(database: Path, supervise: Supervise) -> None:
    long = msgspec.structs.replace(QUICK, restart_backoff_ms_min=3_600_000, restart_backoff_ms_max=3_600_000)
    supervisor = supervise(database, long)
    supervisor.start(soon())
    kill(supervisor)
    with pytest.raises(WorkerUnavailableError, match="not running again in time"):
        supervisor.wait_running(soon(0.2), after=1)
    supervisor.stop(GRACE_SECONDS)


def test_a_worker_that_ignores_its_end_is_killed(
    database: Path, supervise: Supervise, fake_worker: Fault
) -> None:
    fake_worker("ignore SIGTERM")
    supervisor = supervise(database)
    supervisor.start(soon())
    supervisor.stop(0.05)
    assert started_children() == []


def test_many_threads_may_stop_it(database: Path, supervise: Supervise) -> None:
    supervisor = supervise(database)
    supervisor.start(soon())
    threads = [threading.Thread(target=supervisor.stop, args=(GRACE_SECONDS,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert started_children() == []


def test_an_interrupted_start_leaves_nothing(
    database: Path, supervise: Supervise, fake_worker: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_worker("never answer")
    supervisor = supervise(database)
    real = supervisor._changed.wait_for

    def interrupted(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and (timeout or 0) > 30:
            raise KeyboardInterrupt
        return real(predicate, timeout)

    monkeypatch.setattr(supervisor._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        supervisor.start(soon())
    monkeypatch.undo()
    supervisor.stop(0.05)
    assert started_children() == []


def test_a_fault_of_the_supervisor_is_told(
    database: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: faults.append(args.exc_value))
    supervisor = supervise(database)
    supervisor.start(soon())

    def broken(_how: str) -> float:
        raise MemoryError

    monkeypatch.setattr(supervisor, "_note_death", broken)
    kill(supervisor)
    with pytest.raises(WorkerUnavailableError, match="MemoryError"):
        supervisor.wait_running(soon(), after=1)
    assert [type(fault) for fault in faults] == [MemoryError]


def test_errors_are_each_their_own(database: Path) -> None:
    error = CrashLoopError("it died", details={"deaths": 3}, retry_after=1.5)
    twin = copy.copy(error)
    assert twin is not error
    assert (twin.message, twin.details, twin.retry_after) == ("it died", {"deaths": 3}, 1.5)


HOST = """
import os, signal, sys, time
from pathlib import Path
from storage_worker import spawn
from storage_worker import supervisor as supervisors
from storage_worker.supervisor import Supervisor
from tests.launch.test_spawn import startup_of
spawn.WORKER_MODULE = "tests.launch.fake_worker"
supervisor = Supervisor(startup_of(Path({path!r})))
supervisor.start(time.monotonic_ns() + 60_000_000_000)
print(supervisor.record.pid, flush=True)
"""


def test_a_host_that_is_killed_takes_its_worker_along(database: Path) -> None:
    host = start_program(
        HOST.format(path=str(database))
        + """
if os.fork() == 0:
    # A forked child holds copies of all of the host's descriptors, and lives on.
    print(os.getpid(), flush=True)
signal.pause()
"""
    )
    assert host.stdout is not None
    worker = psutil.Process(int(host.stdout.readline()))
    child = int(host.stdout.readline())
    host.kill()
    host.wait()
    try:
        worker.wait(60)
        for lock in (try_start_lock(str(database)), LockFile.try_take(SidePaths.of(str(database)).lock)):
            assert lock is not None
            lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        host.communicate()


def test_a_host_that_ends_without_a_word_takes_its_worker_along(database: Path) -> None:
    host = start_program(HOST.format(path=str(database)))
    heard, complaint = host.communicate(timeout=60)
    assert complaint == ""
    assert host.returncode == 0
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(heard)).wait(60)


def test_a_forked_child_knows_that_it_is_no_host(database: Path) -> None:
    program = (
        HOST.format(path=str(database))
        + """
pid = os.fork()
if pid == 0:
    os._exit(supervisor.in_host)
_, status = os.waitpid(pid, 0)
print(status, supervisor.in_host, flush=True)
supervisor.stop(60)
"""
    )
    # Python 3.12 and later complain of a fork beside the supervisor's thread, which is what this is about.
    host = start_program("", forms=("-W", "ignore:This process:DeprecationWarning", "-c", program))
    heard, complaint = host.communicate()
    assert heard.splitlines()[1] == "0 True"
    assert complaint == ""
