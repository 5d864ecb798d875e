"""Where a payload's file is, and what a test does to it."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import storage_worker as sw
from storage_worker.conversation import payload_client
from storage_worker.conversation.payload_check import PayloadFinding
from storage_worker.conversation.payload_files import Folder
from storage_worker.conversation.payload_sweep import Swept
from storage_worker.conversation.payloads import name_of
from storage_worker.conversation.records import PayloadRef
from tests.conversation.payload_store import STORES

LONG_AGO_S = 10 * 24 * 3600.0


class Payloads(NamedTuple):
    """A worker with the payload store, a client of it, and its directory."""

    worker: sw.StorageWorker
    client: sw.Client
    path: Path

    @property
    def folder(self) -> Folder:
        return Folder(f"{os.path.realpath(self.path)}-sw/payloads")

    def file(self, ref: PayloadRef) -> Path:
        return Path(self.folder.path_of(name_of(ref)))

    def put(self, body: Any, retention_class: str = "test", **options: Any) -> PayloadRef:
        return payload_client.put(self.client, body, retention_class=retention_class, **options)

    def row(self, ref: PayloadRef) -> tuple[Any, ...] | None:
        """Its state and count."""
        rows = self.client.query(
            "select state, reference_count from conversation_payloads where name = ?", (name_of(ref),)
        ).rows
        return rows[0] if rows else None

    def age(self, *refs: PayloadRef) -> None:
        """Have files, and the releases of their rows, be long ago."""
        for ref in refs:
            age(self.file(ref))
            self.client.execute(
                "update conversation_payloads set changed_ms = ? where name = ?", (0, name_of(ref))
            )

    def sweep(self, **options: Any) -> Swept:
        """A whole sweep."""
        slices = list(payload_client.sweep(self.client, **options))
        return Swept(
            sum(each.rows for each in slices),
            sum(each.files for each in slices),
            sum(each.bytes for each in slices),
            None,
        )

    def findings(self) -> list[PayloadFinding]:
        return list(payload_client.check(self.client))

    def checks(self, ref: PayloadRef) -> list[str]:
        """What a payload fails."""
        return [found.check for found in self.findings() if found.payload == name_of(ref)]

    def temporaries(self) -> list[str]:
        folder = Path(self.folder.temporary)
        # The first put makes it.
        return [each.name for each in folder.iterdir()] if folder.exists() else []


@contextmanager
def serving(path: Path) -> Iterator[Payloads]:
    """A worker for all tests of a module; its socket is not among those that no test may leave behind."""
    kept = os.environ["XDG_RUNTIME_DIR"]
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        try:
            worker = sw.StorageWorker(path, stores=STORES)
        finally:
            os.environ["XDG_RUNTIME_DIR"] = kept
        with worker, worker.connect("admin") as client:
            yield Payloads(worker, client, path)


def age(file: Path) -> None:
    """Have a file be untouched for long."""
    if file.exists():
        then = time.time() - LONG_AGO_S
        os.utime(file, (then, then))


def in_child(work: Callable[[], object]) -> int:
    """Run something in a forked child; its process id, for `status_of`."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:  # noqa: BLE001 - a child's test ends here, whatever it met
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def status_of(pid: int) -> int:
    """The exit status of a child, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
