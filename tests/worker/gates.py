"""A store whose handlers stop where the test wants them to, and the gates that the test opens for them.

Order is shown by gates, not by time: what is answered while a gate is closed was answered meanwhile.
"""

import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from storage_worker import Store
from storage_worker.transaction import Transaction

STORE = "tests.worker.gates:gated"

gated = Store("gated")


class Gate:
    """The test's side: `wait` until a handler stands at the gate, `open` it for one."""

    def __init__(self, directory: Path, patience_s: float = 30.0) -> None:
        self.path = str(directory)
        self._patience_ms = patience_s * 1000
        directory.mkdir()
        self._ends = []
        for name in ("arrived", "go"):
            os.mkfifo(directory / name)
            # Opened for both, so that neither side ever waits for the other to open it.
            self._ends.append(os.open(directory / name, os.O_RDWR))

    def wait(self) -> None:
        arrived = self._ends[0]
        poller = select.poll()
        poller.register(arrived, select.POLLIN)
        assert poller.poll(self._patience_ms), "no handler came to the gate"
        os.read(arrived, 1)

    def open(self) -> None:
        os.write(self._ends[1], b"x")

    def close(self) -> None:
        """Let all through that still stand there, or come later."""
        os.write(self._ends[1], b"x" * 1000)
        for end in self._ends:
            os.close(end)


def stand_at(gate: str) -> None:
    """The handler's side."""
    for name, flags in (("arrived", os.O_WRONLY), ("go", os.O_RDONLY)):
        end = os.open(f"{gate}/{name}", flags)
        try:
            if name == "arrived":
                os.write(end, b"x")
            else:
                os.read(end, 1)
        finally:
            os.close(end)


@gated.write
def write(tx: Transaction, gate: str) -> None:
    stand_at(gate)


@gated.write(solo=True)
def write_alone(tx: Transaction, gate: str) -> None:
    stand_at(gate)


@gated.write
def insert_then_stand(tx: Transaction, sql: str, gate: str) -> None:
    tx.execute(sql)
    stand_at(gate)


@gated.read
def read(tx: Transaction, gate: str) -> None:
    stand_at(gate)


@gated.read
def read_around(tx: Transaction, sql: str, gate: str) -> list[int]:
    """What one statement finds before the gate and behind it."""
    first = int(tx.scalar(sql))
    stand_at(gate)
    return [first, int(tx.scalar(sql))]


@gated.read
def read_quickly(tx: Transaction, gate: str) -> None:
    """Quick without a gate."""
    if gate:
        stand_at(gate)


@gated.write
def spin(tx: Transaction) -> None:
    """Never return, and never let go of the interpreter for long."""
    while True:
        pass


@gated.write
def hang_after_commit(tx: Transaction, gate: str) -> None:
    tx.after_commit(lambda: stand_at(gate))


class UglyError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even a text")


def _recurse() -> None:
    _recurse()


def _exit() -> NoReturn:
    sys.exit(0)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _close_generator() -> NoReturn:
    raise GeneratorExit


def _no_memory() -> NoReturn:
    raise MemoryError


def _ugly() -> NoReturn:
    raise UglyError


def _stop() -> NoReturn:
    raise StopIteration


RAISES: dict[str, Callable[[], object]] = {
    "SystemExit": _exit,
    "KeyboardInterrupt": _interrupt,
    "GeneratorExit": _close_generator,
    "MemoryError": _no_memory,
    "RecursionError": _recurse,
    "UglyError": _ugly,
    "StopIteration": _stop,
}


@gated.read
def read_and_raise(tx: Transaction, what: str) -> None:
    tx.scalar("select 1")
    RAISES[what]()


@gated.read
def read_badly(tx: Transaction) -> int:
    """A result that cannot be encoded."""
    return 2**70


@gated.write
def lower_descriptors(tx: Transaction) -> None:
    """Leave the worker no descriptor beyond those it has."""
    import resource

    used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
