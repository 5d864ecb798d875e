"""What the processes of the crash test do: write, note, and repeat what carries a request key."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

import ledger
import storage_worker as sw
from ledger import Fate, Ledger, LedgerWriter

WRITE_SECONDS_MAX = 10.0
ANSWER_SECONDS_MAX = 30.0
REPEATS_MAX = 20


class Resources(msgspec.Struct):
    """What a process holds."""

    descriptors: int
    children: int
    threads: int

    @classmethod
    def now(cls) -> "Resources":
        """Those of this process."""
        me = psutil.Process()
        return cls(me.num_fds(), len(me.children()), threading.active_count())


class ClientReport(msgspec.Struct):
    """What a client process says at its end."""

    first: Resources
    last: Resources
    wrong: list[str]


def write_until(stopped: Callable[[], bool], client: sw.Client, own: int, path: Path) -> list[str]:
    """Write and note it until `stopped`; return what contradicts itself already here."""
    notes, wrong = LedgerWriter(path), []
    number = 0
    while not stopped():
        notes.note(number, Fate.SENT)
        write = _keyed if ledger.is_keyed(number) else _unkeyed
        fate, complaint = write(stopped, client, own, number)
        notes.note(number, fate)
        if complaint:
            wrong.append(f"client {own}, write {number}: {complaint}")
        number += 1
    notes.close()
    return wrong


def _unkeyed(_stopped: Callable[[], bool], client: sw.Client, own: int, number: int) -> tuple[Fate, str]:
    row = (own, number, 0, ledger.body_of(own, number))
    try:
        client.execute(ledger.INSERT, row, timeout=WRITE_SECONDS_MAX)
    except sw.StorageError as error:
        fates = {"committed": Fate.ACKNOWLEDGED, "unknown": Fate.UNKNOWN, "not_committed": Fate.NOT_COMMITTED}
        return fates[error.outcome], "" if error.retryable else f"{type(error).__name__}: {error}"
    return Fate.ACKNOWLEDGED, ""


def _keyed(stopped: Callable[[], bool], client: sw.Client, own: int, number: int) -> tuple[Fate, str]:
    """Repeat with the same key until it is acknowledged; some are repeated after that too."""
    row, key = (own, number, 1, ledger.body_of(own, number)), ledger.key_of(own, number)
    first: sw.Result | None = None
    for _ in range(REPEATS_MAX):
        try:
            result = client.execute(ledger.INSERT, row, timeout=WRITE_SECONDS_MAX, request_key=key)
        except sw.StorageError as error:
            if not error.retryable:
                return Fate.UNKNOWN, f"{type(error).__name__}: {error}"
            if stopped():
                return Fate.ACKNOWLEDGED if first else Fate.UNKNOWN, ""
            continue
        if first is not None:
            same = result.last_insert_rowid == first.last_insert_rowid
            return Fate.ACKNOWLEDGED, "" if same else "its repeat gave another result"
        if number % 10:
            return Fate.ACKNOWLEDGED, ""
        first = result
    return Fate.ACKNOWLEDGED if first else Fate.UNKNOWN, f"no answer after {REPEATS_MAX} attempts"


def client_process(pipe: sw.Pipe, own: int, path: Path, stop_file: Path, reports: Any) -> None:
    """One client process of the test. It shares no lock with others: it may be killed at any moment."""
    client = pipe.connect()
    client.query("select 1", timeout=ANSWER_SECONDS_MAX)
    first = Resources.now()
    reports.send_bytes(b"")
    wrong = write_until(stop_file.exists, client, own, path)
    client.query("select 1", timeout=ANSWER_SECONDS_MAX)
    reports.send_bytes(msgspec.msgpack.encode(ClientReport(first, Resources.now(), wrong)))
    client.close()


def host_process(database: Path, folder: Path, clients: list[int], started: Any) -> None:
    """A host with a worker of its own and a thread for each client, until it is killed."""
    notes = Ledger(folder)
    with sw.StorageWorker(database) as worker:
        for own in clients:
            arguments = (lambda: False, worker.connect(), own, notes.path(own))
            threading.Thread(target=write_until, args=arguments, daemon=True).start()
        started.send_bytes(str(worker.pid).encode())
        signal.pause()
