"""A host that is killed while it starts its worker, at whatever moment, leaves none behind and no lock."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import psutil
import pytest

from storage_worker.lockfile import LockFile
from storage_worker.ownership import SidePaths, try_start_lock
from storage_worker.spawn import module_path

pytestmark = pytest.mark.worker

MARK = "STORAGE_WORKER_TEST_MARK"
END_SECONDS_MAX = 60.0

HOST = """
import sys
import storage_worker as sw
print("about to start", flush=True)
with sw.StorageWorker(sys.argv[1]) as worker:
    print(worker.pid, flush=True)
    sys.stdin.read()
"""


def marked(mark: str) -> list[psutil.Process]:
    """The processes that were started with a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("milliseconds", [0, 5, 20, 50, 200])
def test_a_host_killed_while_it_starts_its_worker_leaves_none(database: Path, milliseconds: int) -> None:
    mark = uuid.uuid4().hex
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(database)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(module_path()), MARK: mark},
    )
    assert host.stdout is not None
    assert host.stdout.readline() == b"about to start\n"
    threading.Event().wait(milliseconds / 1000)
    host.send_signal(signal.SIGKILL)
    host.communicate()
    _, alive = psutil.wait_procs(marked(mark), END_SECONDS_MAX)
    assert alive == []
    assert marked(mark) == []
    for lock in (try_start_lock(str(database)), LockFile.try_take(SidePaths.of(str(database)).lock)):
        assert lock is not None
        lock.release()
