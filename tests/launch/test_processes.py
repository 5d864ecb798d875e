import os
import select
import subprocess
import sys

import psutil
import pytest

from storage_worker import processes
from storage_worker.processes import boot_id, open_pidfd, process_is, started_of

needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd here")


def test_this_process_is_itself() -> None:
    started = started_of(os.getpid())
    assert started is not None
    assert process_is(os.getpid(), started)
    assert not process_is(os.getpid(), started - 60)


@pytest.mark.parametrize("pid", [0, -1, 2**31 - 1, 2**70])
def test_no_process_has_an_impossible_id(pid: int) -> None:
    assert started_of(pid) is None
    assert not process_is(pid, 0.0)


def test_a_process_that_nobody_waited_for_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    started = psutil.Process(child.pid).create_time()
    assert child.stdout is not None
    # waitid leaves the zombie.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process_is(child.pid, started)
    with pytest.raises(ProcessLookupError):
        open_pidfd(child.pid, started)
    child.communicate()


@needs_pidfd
def test_a_pidfd_tells_the_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = started_of(child.pid)
    assert started is not None
    descriptor = open_pidfd(child.pid, started)
    assert descriptor is not None
    assert not os.get_inheritable(descriptor)
    assert select.select([descriptor], [], [], 0)[0] == []
    child.communicate(b"\n")
    assert select.select([descriptor], [], [], 60)[0] == [descriptor]
    os.close(descriptor)


def test_a_stranger_of_the_same_id_is_not_watched() -> None:
    started = started_of(os.getpid())
    assert started is not None
    with pytest.raises(ProcessLookupError):
        open_pidfd(os.getpid(), started - 60)
    with pytest.raises(ProcessLookupError):
        open_pidfd(2**22 + 5, started)


@needs_pidfd
def test_without_pidfds_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_pid: int) -> int:
        raise PermissionError("a sandbox forbids it")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    started = started_of(os.getpid())
    assert started is not None
    assert open_pidfd(os.getpid(), started) is None
    with pytest.raises(ProcessLookupError):
        open_pidfd(os.getpid(), started - 60)


def test_the_boot_has_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert boot_id() == boot_id() != ""
    monkeypatch.setattr(processes, "BOOT_ID_FILE", processes.BOOT_ID_FILE / "none")
    assert boot_id() == boot_id() != ""
