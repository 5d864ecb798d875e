import asyncio
import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import stat
import threading
import warnings
from multiprocessing.connection import Connection as Pipeline
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import storage_worker as sw
from storage_worker import finding, launch
from storage_worker.client.client import Client
from storage_worker.launch import StorageWorker, connect, find
from storage_worker.launch_async import connect_async
from storage_worker.lockfile import LockFile
from storage_worker.ownership import Ownership, SidePaths, is_owned, read_record, try_start_lock
from storage_worker.protocol.envelope import Role
from storage_worker.protocol.errors import (
    AlreadyOwnedError,
    CrashLoopError,
    DatabasePathError,
    InvalidRequestError,
    NotPermittedError,
    SchemaError,
    StorageError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import Limits
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import Nothing

from .conftest import starts_of
from .programs import first_line, start_program
from .test_ownership import record_of, write_stale
from .test_spawn import Fault
from .test_supervisor import QUICK

EXIT = Operation[[], None]("fake.exit", "control", Nothing, None)
STARTS_AT_ONCE = 32


def role_of(client: Client) -> Role:
    return client.connect().role


def test_a_host_has_a_worker_of_its_own(database: Path, fake_worker: Fault) -> None:
    with StorageWorker(database, durability="normal") as worker:
        assert worker.pid is not None
        assert str(database) in repr(worker)
        with worker.connect() as client:
            welcome = client.connect()
            assert (welcome.pid, welcome.role, welcome.synchronous) == (worker.pid, "write", "normal")
        worker.start()
        assert worker.restarts == 0
        record = read_record(str(database))
        assert record is not None
        assert record.address == worker.address
    assert worker.pid is None
    assert not is_owned(str(database))
    with pytest.raises(WorkerUnavailableError, match="was stopped"):
        worker.connect()
    worker.stop()


@pytest.mark.parametrize("role", ["read", "write", "admin"])
def test_a_host_gives_any_role(database: Path, fake_worker: Fault, role: Role) -> None:
    with StorageWorker(database) as worker, worker.connect(role) as client:
        assert role_of(client) == role


def test_a_pipe_is_a_connection_with_the_hosts_role(database: Path, fake_worker: Fault) -> None:
    with StorageWorker(database) as worker, worker.pipe("read").connect() as client:
        assert role_of(client) == "read"


def test_by_address_a_client_gets_no_more_than_write(database: Path, fake_worker: Fault) -> None:
    with StorageWorker(database) as worker:
        for role in ("read", "write"):
            with connect(worker.address, role=role) as client:
                assert role_of(client) == role
            with connect(database, role=role) as client:
                assert role_of(client) == role
        for target in (worker.address, database):
            with pytest.raises(NotPermittedError):
                connect(target, role="admin")
            with pytest.raises(InvalidRequestError, match="role"):
                connect(target, role="king")  # type: ignore[arg-type]


def test_clients_outlive_their_worker(database: Path, fake_worker: Fault) -> None:
    with StorageWorker(database, limits=QUICK) as worker:
        own, by_path, by_address = worker.connect(), connect(database), connect(worker.address)
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with worker.connect("admin") as after:
            assert after.connect().pid != pid
            # The secret is the same as before, so that what was granted then is good.
            assert role_of(after) == "admin"
        for client in (own, by_path, by_address):
            client.close()
        assert worker.restarts == 1


def test_a_client_of_a_crash_loop_is_told_at_once(database: Path, fake_worker: Fault) -> None:
    limits = msgspec.structs.replace(QUICK, crash_loop_deaths=2)
    with StorageWorker(database, limits=limits) as worker:
        fake_worker("exit at once")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(CrashLoopError, match="these are my last words"):
            worker.connect(timeout=300)
        with pytest.raises(CrashLoopError):
            worker.pipe(timeout=300)
        with pytest.raises(CrashLoopError):
            worker.wait()


def test_a_worker_that_an_administrator_stops_is_not_restarted(database: Path, fake_worker: Fault) -> None:
    with StorageWorker(database) as worker:
        assert not worker.wait(0)
        with find(database) as client, pytest.raises(WorkerUnavailableError):
            client.call(EXIT(), retries=0)
        assert worker.wait(60)
        with pytest.raises(WorkerUnavailableError, match="was stopped"):
            worker.connect()


def test_waiting_for_a_worker_that_never_started_ends(database: Path) -> None:
    assert StorageWorker(database).wait()


@pytest.mark.parametrize("target", ["missing parent", "directory"])
def test_a_bad_path_is_refused_before_anything_is_made(tmp_path: Path, target: str) -> None:
    path = tmp_path / "none" / "app.db" if target == "missing parent" else tmp_path
    for attempt in (StorageWorker, connect, find):
        with pytest.raises(DatabasePathError):
            attempt(path)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_told(database: Path, fake_worker: Fault) -> None:
    with pytest.raises(InvalidRequestError, match="durability"):
        StorageWorker(database, durability="none")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="not one text"):
        StorageWorker(database, stores="myapp:notes")
    with pytest.raises(InvalidRequestError, match="names no store"):
        StorageWorker(database, stores=["notes"])
    with pytest.raises(ValueError, match="must be at least 1"):
        StorageWorker(database, limits=Limits(busy_ms=0))
    with pytest.raises(InvalidRequestError, match="address"):
        connect("unix://relative")
    assert list(database.parent.iterdir()) == []


def test_the_error_of_a_worker_that_cannot_start_is_raised(database: Path, fake_worker: Fault) -> None:
    fake_worker("refuse")
    with pytest.raises(SchemaError, match="newer"), StorageWorker(database):
        pass
    with pytest.raises(SchemaError, match="newer"):
        connect(database)
    fake_worker("exit at once")
    with pytest.raises(WorkerUnavailableError, match="these are my last words"):
        connect(database)


def test_two_owners_are_one_too_many(database: Path, fake_worker: Fault) -> None:
    with StorageWorker(database) as worker:
        with pytest.raises(AlreadyOwnedError) as caught, StorageWorker(database):
            pass
        assert caught.value.details["pid"] == worker.pid
        assert caught.value.details["address"] == worker.address


def test_a_shared_worker_ends_after_its_last_client(
    database: Path, fake_worker: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "DEFAULT_LIMITS", Limits(shared_idle_ms=50))
    with connect(database) as first, connect(database) as second:
        worker = psutil.Process(first.connect().pid)
        assert second.connect().pid == worker.pid
        record = read_record(str(database))
        assert record is not None
        assert record.owner_pid is None
        with pytest.raises(AlreadyOwnedError), StorageWorker(database):
            pass
    worker.wait(60)
    assert not is_owned(str(database))
    assert starts_of(database) == 1


def test_a_shared_worker_that_was_killed_is_started_again_by_its_clients(
    database: Path, fake_worker: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "DEFAULT_LIMITS", Limits(shared_idle_ms=50))
    with connect(database) as client:
        first = client.connect().pid
        os.kill(first, signal.SIGKILL)
        with connect(database) as other:
            second = other.connect().pid
            assert second != first
    psutil.wait_procs([psutil.Process(second)], 60)
    assert starts_of(database) == 2


@pytest.mark.parametrize("stale", [record_of(1), record_of(os.getpid()), record_of(os.getppid(), boot="b")])
def test_a_stale_record_misleads_nobody(
    database: Path, fake_worker: Fault, monkeypatch: pytest.MonkeyPatch, stale: object
) -> None:
    monkeypatch.setattr(launch, "DEFAULT_LIMITS", Limits(shared_idle_ms=50))
    write_stale(database, stale)  # type: ignore[arg-type]
    with pytest.raises(WorkerUnavailableError, match="no worker runs"):
        find(database)
    with StorageWorker(database) as worker:
        assert worker.pid is not None
    write_stale(database, stale)  # type: ignore[arg-type]
    with connect(database) as client:
        pid = client.connect().pid
    psutil.wait_procs([psutil.Process(pid)], 60)


def test_a_moved_database_is_not_mistaken_for_the_one_in_its_place(
    tmp_path: Path, fake_worker: Fault
) -> None:
    (tmp_path / "dir").mkdir()
    with StorageWorker(tmp_path / "dir" / "app.db"):
        (tmp_path / "dir").rename(tmp_path / "moved")
        (tmp_path / "dir").mkdir()
        with StorageWorker(tmp_path / "dir" / "app.db") as second:
            # The moved record names the address where the second worker listens now.
            with pytest.raises(WorkerUnavailableError, match="did not answer in time"):
                find(tmp_path / "moved" / "app.db", timeout=0.5)
            with find(tmp_path / "dir" / "app.db") as client:
                assert client.connect().pid == second.pid


def test_whoever_finds_a_worker_for_maintenance_has_any_role(database: Path, fake_worker: Fault) -> None:
    with pytest.raises(WorkerUnavailableError, match="no worker runs"):
        find(database)
    assert list(database.parent.iterdir()) == []
    with StorageWorker(database):
        for role in ("read", "write", "admin"):
            with find(database, role=role) as client:
                assert role_of(client) == role


def test_a_worker_that_starts_is_waited_for(database: Path, fake_worker: Fault) -> None:
    lock = try_start_lock(str(database))
    assert lock is not None
    with pytest.raises(WorkerUnavailableError, match="another process starts or supervises it") as caught:
        connect(database, timeout=0.1)
    assert caught.value.outcome == "not_committed"
    lock.release()
    owned = Ownership.take(str(database))
    with pytest.raises(WorkerUnavailableError, match="did not answer in time"):
        connect(database, timeout=0.1)
    owned.release()


def test_a_worker_that_started_while_the_lock_was_awaited_is_taken(
    database: Path, fake_worker: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[Ownership] = []

    def overtaken(real: str) -> LockFile | None:
        if not owners:
            owners.append(Ownership.take(real))
        return try_start_lock(real)

    monkeypatch.setattr(finding, "try_start_lock", overtaken)
    monkeypatch.setattr(finding, "spawn", lambda _: pytest.fail("a second worker was started"))
    with pytest.raises(WorkerUnavailableError, match="did not answer in time"):
        connect(database, timeout=0.2)
    owners[0].release()


def test_a_slow_shared_start_goes_on_for_whoever_comes_next(database: Path, fake_worker: Fault) -> None:
    fake_worker("never answer")
    with pytest.raises(StorageError) as caught:
        connect(database, timeout=1.5)
    pid = caught.value.details["pid"]
    assert isinstance(pid, int)
    assert psutil.pid_exists(pid)
    os.kill(pid, signal.SIGKILL)


def starter(database: str, kind: str, ready: Pipeline, go: Pipeline) -> None:
    """In a forked child: start or find the worker when told, and say which it is, or who refused."""
    ready.send(None)
    go.recv()
    try:
        if kind == "owned":
            worker = StorageWorker(database)
            worker.start()
            ready.send(worker.pid)
            go.recv()
            worker.stop()
        else:
            with connect(database, timeout=60) as client:
                ready.send(client.connect().pid)
                go.recv()
    except StorageError as error:
        ready.send((error.code, error.details.get("pid")))


def start_at_once(database: Path, kind: str) -> None:
    """Many processes start the database's worker, or find it: one worker, known to all of them."""
    context = multiprocessing.get_context("fork")
    children = []
    for _ in range(STARTS_AT_ONCE):
        (ready, said), (told, go) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        child = context.Process(target=starter, args=(str(database), kind, said, told))
        child.start()
        said.close()
        told.close()
        children.append((child, ready, go))
    for _, ready, _ in children:
        ready.recv()
    for _, _, go in children:
        go.send(None)
    answers = [ready.recv() for _, ready, _ in children]
    [pid] = {answer for answer in answers if isinstance(answer, int)}
    for (child, ready, go), answer in zip(children, answers, strict=True):
        if isinstance(answer, int):
            go.send(None)
        child.join()
        child.close()
        ready.close()
        go.close()
    if kind == "shared":
        assert answers == [pid] * STARTS_AT_ONCE
    else:
        refused = [answer for answer in answers if answer != pid]
        assert refused == [(AlreadyOwnedError.code, pid)] * (STARTS_AT_ONCE - 1)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)


@pytest.mark.parametrize("kind", ["shared", "owned"])
def test_many_simultaneous_starts_give_one_worker(
    database: Path, fake_worker: Fault, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(launch, "DEFAULT_LIMITS", Limits(shared_idle_ms=50))
    start_at_once(database, kind)
    assert starts_of(database) == 1


@pytest.mark.parametrize("kind", ["shared", "owned"])
def test_many_simultaneous_starts_give_one_real_worker(
    database: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(launch, "DEFAULT_LIMITS", Limits(shared_idle_ms=50))
    start_at_once(database, kind)
    assert not is_owned(str(database))


@pytest.mark.parametrize("name", ["ä" * 60 + ".db", "資料" * 35 + ".db", "x" * 200])
def test_a_long_name_is_served(tmp_path: Path, fake_worker: Fault, name: str) -> None:
    with StorageWorker(tmp_path / name) as worker, worker.connect() as client:
        assert client.connect().pid == worker.pid


def test_everything_is_private_whatever_the_mask(database: Path, fake_worker: Fault) -> None:
    kept = os.umask(0)
    try:
        worker = StorageWorker(database)
        worker.start()
    finally:
        os.umask(kept)
    side = SidePaths.of(str(database))
    socket = Path(worker.address.removeprefix("unix://"))
    for path in (database, Path(side.lock), Path(side.record), Path(side.log), Path(side.start_lock), socket):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600, path
    for directory in (Path(side.directory), socket.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    worker.stop()
    assert not socket.exists()


def test_many_threads_start_connect_and_stop(tmp_path: Path, fake_worker: Fault) -> None:
    pids: list[int] = []

    def serve(number: int) -> None:
        with StorageWorker(tmp_path / f"{number}.db") as worker, worker.connect() as client:
            pids.append(client.connect().pid)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pids)) == 8


MAIN = """
import os, sys
from storage_worker import spawn
spawn.WORKER_MODULE = "tests.launch.fake_worker"
from storage_worker.launch import StorageWorker
with open({marks!r}, "a") as file:
    _ = file.write("main ran\\n")

with StorageWorker({path!r}) as worker:
    print(worker.connect().connect().pid == worker.pid, flush=True)
"""


@pytest.mark.parametrize("how", ["script", "-c", "standard input", "interactive"])
def test_a_worker_starts_without_running_the_main_module_again(
    tmp_path: Path, database: Path, how: str
) -> None:
    marks = tmp_path / "marks"
    main = MAIN.format(marks=str(marks), path=str(database))
    script = tmp_path / "script.py"
    script.write_text(main)
    forms = {
        "script": (str(script),),
        "-c": ("-c", main),
        "standard input": ("-",),
        "interactive": ("-i", "-q"),
    }[how]
    program = start_program("", forms=forms)
    # A blank line ends a block of an interactive session.
    heard, complaint = program.communicate({"standard input": main, "interactive": main + "\n"}.get(how))
    assert heard.split() == ["True"], complaint
    assert marks.read_text().splitlines() == ["main ran"]


def in_daemon(database: str, said: Pipeline) -> None:
    with StorageWorker(database) as worker, worker.connect() as client:
        said.send(client.connect().pid == worker.pid)


@pytest.mark.parametrize("package", ["multiprocess", "multiprocessing"])
def test_a_daemonic_process_may_start_a_worker(database: Path, fake_worker: Fault, package: str) -> None:
    context = __import__(package).get_context("fork")
    ready, said = context.Pipe(duplex=False)
    child = context.Process(target=in_daemon, args=(str(database), said), daemon=True)
    child.start()
    assert ready.recv()
    child.join()
    child.close()
    said.close()
    ready.close()


def in_child(worker: StorageWorker, said: Pipeline) -> None:
    pid = worker.pid
    worker.start()
    with worker.connect() as client:
        said.send((pid, client.connect().pid, role_of(client)))
    with worker.pipe("read").connect() as client:
        said.send(role_of(client))
    worker.stop()
    said.send("stopped nothing")


def test_a_forked_child_uses_its_parents_worker_and_leaves_it_alone(
    database: Path, fake_worker: Fault
) -> None:
    context = multiprocessing.get_context("fork")
    with StorageWorker(database) as worker, worker.connect("admin") as client:
        ready, said = context.Pipe(duplex=False)
        child = context.Process(target=in_child, args=(worker, said))
        child.start()
        assert ready.recv() == (worker.pid, worker.pid, "write")
        assert ready.recv() == "read"
        assert ready.recv() == "stopped nothing"
        child.join()
        assert child.exitcode == 0
        child.close()
        said.close()
        ready.close()
        assert worker.restarts == 0
        assert role_of(client) == "admin"


def test_what_was_made_before_a_fork_can_be_started_in_the_child(database: Path, fake_worker: Fault) -> None:
    context = multiprocessing.get_context("fork")
    worker = StorageWorker(database)

    def run(said: Pipeline) -> None:
        with worker:
            said.send(worker.pid is not None)

    ready, said = context.Pipe(duplex=False)
    child = context.Process(target=run, args=(said,))
    child.start()
    assert ready.recv()
    child.join()
    child.close()
    said.close()
    ready.close()


def test_where_no_thread_can_be_started_an_owner_is_told_and_a_shared_worker_serves(
    database: Path, fake_worker: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is at the interpreter's exit in some versions of Python."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(launch, "DEFAULT_LIMITS", Limits(shared_idle_ms=50))
    worker = StorageWorker(database)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(WorkerUnavailableError, match="cannot start the thread") as caught:
            worker.start()
        assert (caught.value.outcome, caught.value.retryable) == ("not_committed", False)
        with pytest.raises(WorkerUnavailableError, match="cannot start the thread"):
            asyncio.run(connect_async(database))
        assert not is_owned(str(database))
        with warnings.catch_warnings():
            # Nobody waits for the process that was started.
            warnings.simplefilter("ignore", ResourceWarning)
            with connect(database) as client:
                pid = client.connect().pid
    psutil.wait_procs([psutil.Process(pid)], 60)
    with worker, worker.connect() as client:
        assert client.connect().pid == worker.pid


HOST = MAIN.replace(
    "with StorageWorker({path!r}) as worker:", "worker = StorageWorker({path!r}); worker.start()\nif True:"
)


def test_a_host_that_forgets_to_stop_ends_at_once(tmp_path: Path, database: Path) -> None:
    host = start_program(
        HOST.format(marks=str(tmp_path / "marks"), path=str(database)) + "print(worker.pid)\n"
    )
    heard, complaint = host.communicate(timeout=60)
    assert (host.returncode, complaint) == (0, "")
    pid = int(heard.split()[1])
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(60)


def test_a_killed_host_frees_its_database_beside_a_living_child(
    tmp_path: Path, database: Path, fake_worker: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "DEFAULT_LIMITS", Limits(shared_idle_ms=50))
    host = start_program(
        HOST.format(marks=str(tmp_path / "marks"), path=str(database))
        + """
import signal
if os.fork() == 0:
    print(os.getpid(), flush=True)
signal.pause()
"""
    )
    first_line(host)
    child = int(first_line(host))
    try:
        host.kill()
        host.wait()
        with connect(database, timeout=60) as client:
            pid = client.connect().pid
    finally:
        os.kill(child, signal.SIGKILL)
        host.communicate()
    psutil.wait_procs([psutil.Process(pid)], 60)
    assert starts_of(database) == 2


def test_a_shared_worker_leaves_no_zombie_while_its_starter_lives(tmp_path: Path, database: Path) -> None:
    host = start_program(
        f"""
import sys
from storage_worker import launch, spawn
from storage_worker.protocol.limits import Limits
spawn.WORKER_MODULE = "tests.launch.fake_worker"
launch.DEFAULT_LIMITS = Limits(shared_idle_ms=50)
client = launch.connect({str(database)!r})
print(client.connect().pid, flush=True)
client.close()
sys.stdin.read()
"""
    )
    worker = int(first_line(host))
    for process in psutil.Process(host.pid).children():
        process.wait(60)
    assert not psutil.pid_exists(worker)
    host.communicate("")


def test_windows_is_told_at_the_import() -> None:
    program = start_program(
        """
import sys
sys.platform = "win32"
for absent in ("fcntl", "resource", "psutil", "multiprocess"):
    sys.modules[absent] = None
try:
    import storage_worker
except ImportError as error:
    print(error)
print([name for name in sys.modules if name.startswith("storage_worker.")])
"""
    )
    heard, complaint = program.communicate()
    assert heard.splitlines() == [
        "storage-worker runs on Linux and macOS; Windows is not supported yet",
        "[]",
    ], complaint


def test_a_host_loads_no_driver_of_its_own() -> None:
    program = start_program("import sys, json, storage_worker.launch; print(json.dumps(sorted(sys.modules)))")
    heard, complaint = program.communicate()
    assert "apsw" not in json.loads(heard), complaint


def test_a_client_that_only_reads_makes_no_database(tmp_path: Path) -> None:
    with pytest.raises(sw.DatabasePathError, match="no database"):
        sw.connect(tmp_path / "typo.db", role="read")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", [None, 7, ["app.db"]])
def test_what_is_no_path_and_no_address_is_refused(what: Any) -> None:
    with pytest.raises(sw.InvalidRequestError, match="path or an address"):
        sw.connect(what)


def test_another_address_is_refused() -> None:
    with pytest.raises(sw.InvalidRequestError, match="unix://"):
        sw.connect("tcp://localhost:1")


def test_limits_are_a_struct(database: Path) -> None:
    with pytest.raises(sw.InvalidRequestError, match=r"storage_worker\.Limits"):
        sw.StorageWorker(database, limits={"connections_max": 3})  # type: ignore[arg-type]


def test_a_worker_is_not_handed_over(database: Path) -> None:
    with pytest.raises(TypeError, match=r"worker\.pipe\(\)"):
        pickle.dumps(sw.StorageWorker(database))
