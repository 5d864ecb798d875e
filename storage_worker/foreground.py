"""A worker that runs as long as the command that started it: until a signal, or until someone stops it."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from . import exits
from .launch import Durability, startup_of
from .ownership import Record, already_owned, is_owned, try_start_lock
from .processes import started_of
from .protocol.errors import WorkerUnavailableError
from .protocol.limits import Limits
from .signals import signals_call
from .spawn import Child, how_it_ended, last_words, module_path, spawn
from .startup import Startup

ENDING_SECONDS_SPARE = 5.0
"""What a worker gets beyond its own grace to write back its WAL."""


class SignalledError(Exception):
    """The process was asked to end; raised in the main thread while it waits for the worker."""


class Foreground:
    """One worker that ends with this process, and that any process finds by the database's path."""

    def __init__(self, startup: Startup, child: Child, record: Record) -> None:
        self.record = record
        self._startup = startup
        self._child = child

    @classmethod
    def start(
        cls,
        path: str | os.PathLike[str],
        *,
        stores: Sequence[str],
        durability: Durability,
        limits: Limits,
        sql: bool,
    ) -> "Foreground":
        """Start the worker and wait until it listens.

        `stores` are import strings, which are looked up in the directory this process stands in too. Raises
        `AlreadyOwnedError` where another worker holds the database, `DatabasePathError` where the path is
        refused, `SchemaError` where a migration fails, `WorkerUnavailableError` where the worker dies.
        """
        startup = msgspec.structs.replace(
            startup_of(path, stores, durability, limits, sql=sql),
            owner_pid=os.getpid(),
            owner_started=started_of(os.getpid()),
            sys_path=[str(Path.cwd()), *module_path()],
        )
        real = startup.path
        lock = try_start_lock(real)
        if lock is None:
            raise already_owned(real)
        try:
            if is_owned(real):
                raise already_owned(real)
            child = spawn(startup)
            deadline_ns = time.monotonic_ns() + limits.start_ms_max * 1_000_000
            try:
                record = child.answer(deadline_ns)
            except BaseException:
                child.end(0)
                raise
        finally:
            lock.release()
        return cls(startup, child, record)

    def wait(self) -> None:
        """Return when the worker has ended as it was told to, by a signal to this process or by a client.

        Raises `WorkerUnavailableError` with its last words where it ended in any other way.
        """
        try:
            with signals_call(_stop, signal.SIGINT, signal.SIGTERM):
                status = self._child.wait()
        except SignalledError:
            self._child.send_signal(signal.SIGTERM)
            status = self._child.end(self._startup.limits.stop_grace_ms / 1000 + ENDING_SECONDS_SPARE)
        assert status is not None, "a wait without a bound ends with a status"
        if status not in {0, exits.STOPPED}:
            path = self._startup.path
            raise WorkerUnavailableError(
                f"the worker of {path} {how_it_ended(status)}; {last_words(path)}",
                details={"path": path, "exit_status": status},
            )


def _stop(number: int, _: FrameType | None) -> None:
    raise SignalledError(signal.Signals(number).name)
