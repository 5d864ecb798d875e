"""A real worker process for each test that asks for one."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage_worker.address import socket_address
from storage_worker.processes import started_of
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.spawn import Child, spawn
from storage_worker.startup import Startup
from tests.worker.gates import STORE, Gate
from tests.worker.raw import PATIENCE_S, SECRET, RawClient


class RunningWorker:
    """A worker and its address; `connect` gives a client that is closed with it."""

    def __init__(self, startup: Startup) -> None:
        self.startup = startup
        self.child: Child = spawn(startup)
        self.record = self.child.answer(time.monotonic_ns() + int(PATIENCE_S * 1e9))
        self.address = self.record.address
        self._clients: list[RawClient] = []

    @property
    def path(self) -> Path:
        return Path(self.startup.path)

    def connect(self, **options: Any) -> RawClient:
        client = RawClient(self.address, **options)
        self._clients.append(client)
        return client

    def leave(self) -> None:
        """Close all its clients."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    def log(self) -> str:
        return Path(f"{self.startup.path}-sw/worker.log").read_text()

    def stop(self) -> int:
        """End it gracefully; its exit status."""
        self.leave()
        self.child.send_signal(signal.SIGTERM)
        status = self.child.wait(PATIENCE_S)
        if status is None:
            self.child.send_signal(signal.SIGKILL)
            status = self.child.wait(PATIENCE_S)
        assert status is not None
        return status


StartWorker = Callable[..., RunningWorker]


def startup_for(path: Path, **changes: Any) -> Startup:
    """How a worker of this process is started; `changes` are limits, or fields of Startup."""
    real = os.path.realpath(path)
    of_startup = {name: changes.pop(name) for name in list(changes) if name in Startup.__struct_fields__}
    fields: dict[str, Any] = {
        "path": real,
        "address": socket_address(real),
        "durability": "full",
        "limits": msgspec.structs.replace(DEFAULT_LIMITS, **changes),
        "stores": [],
        "shipped": b"",
        "sql": True,
        "owner_pid": os.getpid(),
        "owner_started": started_of(os.getpid()),
        "secret": SECRET,
        "sys_path": list(sys.path),
    }
    return Startup(**(fields | of_startup))


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    """Start workers; keyword arguments are limits, or fields of Startup. All are stopped afterwards."""
    running: list[RunningWorker] = []

    def start(path: Path | None = None, **changes: Any) -> RunningWorker:
        worker = RunningWorker(startup_for(path or tmp_path / "test.db", **changes))
        running.append(worker)
        return worker

    yield start
    for worker in running:
        worker.stop()


@contextmanager
def standing(path: Path, **changes: Any) -> Iterator[RunningWorker]:
    """A worker for several tests; its socket is beside the usual ones."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as directory:
        worker = RunningWorker(startup_for(path, address=f"unix://{directory}/test.sock", **changes))
        yield worker
        assert "Traceback" not in worker.log()
        worker.stop()


@pytest.fixture(scope="module")
def standing_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorker]:
    """One worker for all tests of a module that need none of their own."""
    with standing(tmp_path_factory.mktemp("standing") / "test.db") as worker:
        yield worker


@pytest.fixture(scope="module")
def standing_gated_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorker]:
    """The same with the store `gates.gated`."""
    with standing(tmp_path_factory.mktemp("standing") / "test.db", stores=[STORE]) as worker:
        yield worker


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Where a handler of the store `gates.gated` stands until the test opens it."""
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


@pytest.fixture
def worker(start_worker: StartWorker) -> RunningWorker:
    """A worker with the default limits."""
    return start_worker()


@pytest.fixture
def client(worker: RunningWorker) -> RawClient:
    """A connection of role write."""
    return worker.connect()
