"""One database of the crash test: its worker, the host that owns it where one does, and its clients.

Everything is started, stopped and killed by its process id; whatever falls is replaced.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

import crash_clients
import storage_worker as sw
from crash_clients import NUMBERS_EACH, OWNED_KINDS, SHARED_KINDS, Errand
from crash_points import STORE, SWITCH_VARIABLE, Switch
from crash_writes import ANSWER_SECONDS_MAX, WRITE_SECONDS_MAX, read_diaries
from ledger import Checked, Ledger, Seen
from storage_worker.address import socket_address
from storage_worker.client.pipe import Pipe
from storage_worker.ownership import read_record
from storage_worker.processes import process_is, started_of
from storage_worker.spawn import last_words

LOOK_SECONDS = 0.002
HOST_DEATH_SECONDS_MAX = 2.0
FLAT_TOLERANCE = 5
"""What a process may hold more than at its start: a snapshot's files, a connection that is being replaced."""


class Resources(msgspec.Struct):
    """What a process holds."""

    descriptors: int
    children: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Resources":
        """Those of a process."""
        process = psutil.Process(pid)
        return cls(process.num_fds(), len(process.children()), process.num_threads())


def not_flat(whose: str, first: Resources, last: Resources) -> list[str]:
    """What has grown."""
    return [
        f"{whose}: {name} grew from {before} to {after}"
        for name, before, after in zip(
            first.__struct_fields__,
            msgspec.structs.astuple(first),
            msgspec.structs.astuple(last),
            strict=True,
        )
        if after > before + FLAT_TOLERANCE
    ]


class Incarnation(msgspec.Struct, frozen=True):
    """One worker process; its id alone may come to mean another one."""

    pid: int
    started: float

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return process_is(self.pid, self.started)

    def signal(self, number: signal.Signals) -> bool:
        """Send it a signal; False where it has ended."""
        if not self.is_alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def wait_ended(self, seconds: float) -> bool:
        """Whether it ends in that time."""
        return wait_until(lambda: not self.is_alive, seconds)


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Look until it is so, for that long at the most; whether it is."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() >= end:
            return False
        # Asked, not waited for: these are not this process's children.
        time.sleep(LOOK_SECONDS)
    return True


class Member:
    """A process that uses the database: a client of some kind, or the host."""

    def __init__(self, context: Any, target: Callable[[Errand, Any], None], errand: Errand) -> None:
        self.kind = errand.kind
        receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=target, args=(errand, sender), daemon=False)
        self._process.start()
        self.pid: int = self._process.pid
        self._other: Incarnation | None = None
        self._first: Resources | None = None
        sender.close()
        with contextlib.closing(receiver):
            if not receiver.poll(ANSWER_SECONDS_MAX):
                self.kill()
                raise TimeoutError(f"the {self.kind} client did not connect in time")
            try:
                other = int(receiver.recv_bytes())
            except EOFError as error:
                self._process.join(ANSWER_SECONDS_MAX)
                raise TimeoutError(
                    f"the {self.kind} client ended with status {self._process.exitcode} before it was connected"
                ) from error
        if other:
            self._other = Incarnation(other, started_of(other) or 0.0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to the process that belongs to it."""
        os.kill(self.pid, number)
        if self._other is not None:
            self._other.signal(number)

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        return not self._process.is_alive()

    def settle(self) -> None:
        """Note what it holds, where that was not done before."""
        if self._first is None:
            self._first = Resources.of(self.pid)

    def growth(self) -> list[str]:
        """What it holds more than when it had settled."""
        if self._first is None:
            return []
        return not_flat(f"the {self.kind} client", self._first, Resources.of(self.pid))

    def kill(self) -> None:
        """End it at once, stopped or not."""
        self._process.kill()
        if self._other is not None:
            self._other.signal(signal.SIGKILL)
        self._process.join()

    def end(self, seconds: float) -> list[str]:
        """Wait for its own end; what is wrong with it."""
        self._process.join(seconds)
        status = self._process.exitcode
        if status is None:
            self.kill()
            return [f"the {self.kind} client did not end within {seconds:.0f} s"]
        return [] if status == 0 else [f"the {self.kind} client ended with status {status}"]


class Fleet:
    """A database and everybody who uses it.

    Arguments: `folder`, where all of it is kept; `context`, which starts processes; `owned`, whether a host owns
    the worker, else clients find or start a shared one by path. `wrong` is what was found.
    """

    def __init__(self, folder: Path, context: Any, *, owned: bool) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.owned = owned
        self.kinds = OWNED_KINDS if owned else SHARED_KINDS
        self.database = folder / "crash.db"
        self._real = os.path.realpath(self.database)
        self.address = socket_address(self._real)
        self.switch = Switch.make(folder / "switch")
        self.notes = Ledger(folder)
        self.wrong: list[str] = []
        self.marks: list[tuple[float, bool]] = []
        self.worker_outlived_host_s: list[float] = []
        self.members: dict[str, Member] = {}
        self.host: Member | None = None
        self._context = context
        self._stop_file = folder / "stop"
        self._seen = Seen()
        self._next = 0
        self._checker: sw.Client | None = None

    def start(self) -> None:
        """Start the worker and all clients."""
        if self.owned:
            self.start_host()
        else:
            # The first worker is started by this process; all later ones by clients.
            os.environ[SWITCH_VARIABLE] = str(self.switch.path)
            with sw.connect(self.database, timeout=ANSWER_SECONDS_MAX, stores=[STORE]) as client:
                crash_clients.make_tables(client)
        self._checker = sw.connect(self.address, timeout=ANSWER_SECONDS_MAX, name="checker")
        for kind in self.kinds:
            self.start_client(kind)

    @property
    def checker(self) -> sw.Client:
        """The test's own client."""
        assert self._checker is not None
        return self._checker

    def start_client(self, kind: str) -> None:
        """Start a client of a kind that has none."""
        pipe = Pipe.open(self.address, name=kind, deadline_ns=_soon_ns()) if kind == "pipe" else None
        self.members[kind] = Member(self._context, crash_clients.client_process, self._errand(kind, pipe))
        if pipe is not None:
            pipe.close()

    def start_host(self) -> None:
        """Start the host and with it the worker."""
        self.host = Member(self._context, crash_clients.host_process, self._errand("host", None))

    def _errand(self, kind: str, pipe: Pipe | None) -> Errand:
        own, self._next = self._next, self._next + NUMBERS_EACH
        return Errand(
            kind,
            own,
            self.address,
            self.database,
            self.folder,
            self._stop_file,
            os.getpid(),
            self.switch.path,
            pipe,
        )

    # The worker

    def worker(self) -> Incarnation:
        """The worker that is on record and runs, waited for."""
        found: list[Incarnation] = []

        def runs() -> bool:
            record = read_record(self._real)
            if record is None or not process_is(record.pid, record.pid_started):
                return False
            found.append(Incarnation(record.pid, record.pid_started))
            return True

        if not wait_until(runs, ANSWER_SECONDS_MAX):
            raise TimeoutError("no worker came back")
        return found[-1]

    def kill_worker(self, worker: Incarnation) -> None:
        """Kill it, and note when."""
        self.mark(death=True)
        worker.signal(signal.SIGKILL)

    def kill_starting(self) -> int:
        """Kill workers that the host has started and that may not listen yet; how many."""
        assert self.host is not None
        killed = 0
        for child in psutil.Process(self.host.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "storage_worker.worker" in child.cmdline():
                    child.kill()
                    killed += 1
        return killed

    def mark(self, *, death: bool, at_s: float | None = None) -> None:
        """Note a worker's death, or another event after which a client may hear of something late."""
        self.marks.append((time.monotonic() if at_s is None else at_s, death))

    # Between rounds

    def compare(self) -> Checked:
        """Wait until the worker answers, and compare what is new."""
        checked = self._seen.look(self.checker, self.notes)
        self.wrong += checked.wrong
        return checked

    def look_at_members(self) -> None:
        """None may end by itself."""
        for member in self._everybody():
            if member.has_ended:
                raise TimeoutError(f"{member.end(0.0)}")
            member.settle()

    def _everybody(self) -> list[Member]:
        return [*self.members.values(), *([] if self.host is None else [self.host])]

    # The end

    def stop(self) -> None:
        """Let everybody end, and gather what they say."""
        for member in self._everybody():
            self.wrong += member.growth()
        self._stop_file.touch()
        for member in self._everybody():
            self.wrong += member.end(WRITE_SECONDS_MAX * 2 + ANSWER_SECONDS_MAX)
        self.members.clear()
        self.host = None
        self.checker.close()
        if not self.owned:
            worker = self.worker()
            worker.signal(signal.SIGTERM)
            if not worker.wait_ended(ANSWER_SECONDS_MAX):
                self.wrong.append("the shared worker did not end after SIGTERM")
        self.wrong += [note.wrong for note in read_diaries(self.folder) if note.wrong]

    @property
    def last_words(self) -> str:
        """What the last worker said."""
        return last_words(self._real)

    @property
    def told_s(self) -> list[float]:
        """When writes in flight were told of their worker's death."""
        return [note.told_s for note in read_diaries(self.folder) if note.told_s]

    def close(self) -> None:
        """Kill whatever still runs."""
        self._stop_file.touch()
        for member in self._everybody():
            member.kill()
        if self._checker is not None:
            self._checker.close()
        record = read_record(self._real)
        if record is not None:
            Incarnation(record.pid, record.pid_started).signal(signal.SIGKILL)
        self.switch.close()


def _soon_ns() -> int:
    return time.monotonic_ns() + int(ANSWER_SECONDS_MAX * 1e9)
