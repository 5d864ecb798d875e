"""Fixtures for all tests, and the check that each of them leaves nothing running or open."""

import gc
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# Real time is not asserted; a failing example is printed so that it can be run again.
settings.register_profile("tests", deadline=None, print_blob=True)
settings.load_profile("tests")

LEAVING_SECONDS = 10.0
"""How long children and threads that are on their way out may take; nothing waits where all are gone."""

FOLDERS_WITHOUT_WORKERS = {"tests", "protocol", "client", "store", "transcripts"}

DESCRIPTORS = Path("/proc/self/fd")
TASKS = Path("/proc/self/task")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `scripts/check` leaves out."""
    for item in items:
        if item.path.parent.name not in FOLDERS_WITHOUT_WORKERS:
            item.add_marker(pytest.mark.worker)


@pytest.fixture(scope="session", autouse=True)
def runtime_directory() -> Iterator[Path]:
    """A private place for sockets, short enough for their names, gone with the test run."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp", ignore_cleanup_errors=True) as name:
        kept = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = name
        yield Path(name)
        if kept is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = kept


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """The path of a database that does not exist yet."""
    return tmp_path / "app.db"


@pytest.fixture(autouse=True)
def nothing_left_behind(runtime_directory: Path) -> Iterator[None]:
    """Fail a test after which a child, a thread, a descriptor or a served socket is still there."""
    children = _children()
    threads = set(threading.enumerate())
    descriptors = _descriptors()
    yield
    started = [child for child in _children() - children if not _is_tracker(child)]
    _, alive = psutil.wait_procs(started, timeout=LEAVING_SECONDS)
    left = [f"process {child.pid}: {_command(child)}" for child in alive]
    for child in alive:
        child.kill()
    for thread in set(threading.enumerate()) - threads:
        thread.join(LEAVING_SECONDS)
        if thread.is_alive():
            left.append(f"thread {thread.name}")
    left += [f"a worker still serves {path.name}" for path in _served(runtime_directory)]
    if len(_descriptors()) > len(descriptors):
        gc.collect()
        opened = _descriptors()
        if len(opened) > len(descriptors):
            left += [
                f"descriptor {number}: {target}" for number, target in opened.items() - descriptors.items()
            ]
    if left:
        pytest.fail("left behind: " + "; ".join(left))


def _children() -> set[psutil.Process]:
    if not TASKS.is_dir():
        return set(psutil.Process().children())
    # Where the system lists them, nobody has to look at every process there is.
    found = set()
    for task in TASKS.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            for pid in (task / "children").read_text().split():
                with suppress(psutil.NoSuchProcess):
                    found.add(psutil.Process(int(pid)))
    return found


def _is_tracker(child: psutil.Process) -> bool:
    # multiprocessing keeps one for the life of a process that ever spawned.
    return "resource_tracker" in _command(child)


def _command(child: psutil.Process) -> str:
    try:
        return " ".join(child.cmdline())
    except psutil.Error:
        return "gone"


def _descriptors() -> dict[int, str]:
    """Open sockets, files and the like with what they lead to; empty where the system does not tell."""
    found: dict[int, str] = {}
    if not DESCRIPTORS.is_dir():
        return found
    for entry in DESCRIPTORS.iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue  # the descriptor with which the folder was listed
        # Pipes also belong to multiprocessing's tracker, which stays; devices are opened once and kept.
        if not target.startswith(("pipe:", "/dev/", "/proc/")):
            found[int(entry.name)] = target
    return found


def _served(runtime: Path) -> list[Path]:
    """Sockets that still answer; those of killed workers are removed."""
    served = []
    for path in runtime.glob("storage-worker/*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)
            else:
                served.append(path)
    return served
