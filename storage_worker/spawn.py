"""Starting a worker's process, hearing its answer, and waiting for its end: the host's side."""

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from .client.daemon_threads import start_daemon
from .filesystem import FILE_MODE, failure_of_file, private_directory
from .ownership import Record, SidePaths
from .processes import pidfd_of
from .protocol.envelope import Failure, error_of
from .protocol.errors import DeadlineExceededError, ProtocolError, WorkerUnavailableError
from .protocol.framing import FrameReader
from .protocol.limits import READ_BYTES
from .startup import ANSWER_BYTES_MAX, Started, Startup, decode_answer, encode_startup

WORKER_MODULE = f"{__package__}.worker"
LAST_WORDS_BYTES_MAX = 1_500

ENDING_SECONDS_MAX = 2.0
"""How long a worker that could not start may take to end by itself before it is killed."""


class Child:
    """A worker's process, signalled and waited for without ever meeting another one of the same id."""

    def __init__(self, process: subprocess.Popen[bytes], startup: Startup, message: bytes) -> None:
        self.pid = process.pid
        self._process = process
        self._path = startup.path
        self._message = message
        self._reaping = threading.Lock()
        # Where the host ignores SIGCHLD the system may have reaped it already.
        try:
            self._descriptor = pidfd_of(process.pid)
        except ProcessLookupError:
            self._descriptor = None

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit status (negative: the signal that ended it), or None where it still runs after `seconds`.

        Without `seconds` it waits without a bound. One thread at a time may wait.
        """
        if self._descriptor is None:
            try:
                return self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        if not poller.poll(None if seconds is None else seconds * 1000):
            return None
        with self._reaping:
            status = self._process.wait()
            self._let_go()
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, or nothing where the process has ended."""
        with self._reaping:
            self._process.send_signal(number)

    def end(self, seconds: float) -> int:
        """Its exit status; it is killed where it still runs after `seconds`."""
        status = self.wait(seconds)
        if status is None:
            self.send_signal(signal.SIGKILL)
            status = self.wait()
        assert status is not None, "a wait without a bound ends with a status"
        return status

    def leave(self) -> None:
        """Let it run on by itself; once it ends it is waited for, so that it leaves no zombie."""
        try:
            start_daemon(f"reaper of worker {self.pid}", self.wait)
        except WorkerUnavailableError:
            # Without a thread it is reaped when this process ends or starts another one.
            self._let_go()

    def answer(self, deadline_ns: int) -> Record:
        """Tell it how to start and hear its record; `deadline_ns` is on the monotonic clock.

        Raises the worker's own typed error where it cannot start, `WorkerUnavailableError` with its last
        words where it died, and after both it is gone. Raises `DeadlineExceededError` where it has not
        answered until then: it is left as it is.
        """
        body = None
        try:
            body = self._exchange(deadline_ns)
            heard = None if body is None else decode_answer(body)
        except ProtocolError:
            self.end(0)
            raise
        if isinstance(heard, Started):
            return heard.record
        status = self.end(ENDING_SECONDS_MAX)
        if isinstance(heard, Failure):
            raise error_of(heard)
        raise WorkerUnavailableError(
            f"the worker of {self._path} {how_it_ended(status)} before it listened; {last_words(self._path)}",
            outcome="not_committed",
            details={"path": self._path, "pid": self.pid, "exit_status": status},
        )

    def _let_go(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _exchange(self, deadline_ns: int) -> bytes | None:
        """Write the start message and read one frame; None where the pipe ended before."""
        writing, reading = self._process.stdin, self._process.stdout
        assert writing is not None, "made with a pipe"
        assert reading is not None, "made with a pipe"
        with writing, reading, selectors.DefaultSelector() as selector:
            # A long message fills the pipe of a process that does not read it.
            os.set_blocking(writing.fileno(), False)
            selector.register(writing, selectors.EVENT_WRITE)
            selector.register(reading, selectors.EVENT_READ)
            if self._descriptor is not None:
                # A child that is forked meanwhile may hold the pipe open beyond the worker's death.
                selector.register(self._descriptor, selectors.EVENT_READ)
            rest, frames = memoryview(self._message), FrameReader(ANSWER_BYTES_MAX)
            while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
                ready = [key.fileobj for key, _events in selector.select(left_ns / 1e9)]
                if writing in ready:
                    rest = _write_some(writing, rest)
                    if not rest:
                        selector.unregister(writing)
                        writing.close()
                if reading in ready:
                    data = os.read(reading.fileno(), READ_BYTES)
                    if (bodies := frames.feed(data)) or not data:
                        return bodies[0] if bodies else None
                elif self._descriptor in ready:
                    return None
        raise DeadlineExceededError(
            f"the worker of {self._path} (process {self.pid}) has not answered its start in time",
            details={"stage": "start", "path": self._path, "pid": self.pid},
        )


def _write_some(writing: IO[bytes], rest: memoryview) -> memoryview:
    try:
        return rest[os.write(writing.fileno(), rest) :]
    except BrokenPipeError:
        # It died; the end of its answer says so too, behind whatever it could still say.
        return rest[:0]


def spawn(startup: Startup) -> Child:
    """Start the process of a worker; `Child.answer` hears what comes of it.

    Only the holder of the database's start lock may call it, while no worker holds the database. Raises
    `WorkerUnavailableError` where no process can be started, `RequestTooLargeError` where the stores that
    are shipped to it are too large.
    """
    if not sys.executable:
        raise WorkerUnavailableError(
            "this program does not know its Python interpreter (sys.executable), so it cannot start a worker",
            outcome="not_committed",
        )
    message = encode_startup(startup)
    # -P: the directory that the host stands in is searched only if the host searches it.
    command = [sys.executable, "-P", "-m", WORKER_MODULE]
    log = _open_log(startup.path)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            # A session of its own keeps the terminal's interrupt from it: that is the host's affair.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": _python_path(startup.sys_path)},
        )
    except OSError as error:
        raise WorkerUnavailableError(
            f"the process of a worker for {startup.path} cannot be started: {error}", outcome="not_committed"
        ) from error
    finally:
        os.close(log)
    return Child(process, startup, message)


def _python_path(entries: list[str]) -> str:
    # An entry with a separator in it cannot be said here; the worker takes it from its `Startup`.
    return os.pathsep.join(entry for entry in entries if os.pathsep not in entry)


def module_path() -> list[str]:
    """This process's `sys.path` as another process can use it."""
    entries = []
    for entry in sys.path:
        try:
            found = os.path.abspath(entry)
            found.encode()
        except (OSError, TypeError, ValueError):
            # No directory to stand in any more, no path at all, or bytes that are no text.
            continue
        if "\0" not in found:
            entries.append(found)
    return entries


def _open_log(real: str) -> int:
    side = SidePaths.of(real)
    private_directory(side.directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if os.path.isfile(side.log) and not os.path.islink(side.log):
            # What the last worker said stays to be read: it may tell why it ended.
            os.replace(side.log, f"{side.log}.1")
        log = os.open(side.log, flags, FILE_MODE)
        os.fchmod(log, FILE_MODE)
    except OSError as error:
        raise failure_of_file("cannot open the worker's log", side.log, error) from error
    return log


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with exit status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def last_words(real: str) -> str:
    """The end of the log of the worker of a database, as a clause for a message."""
    log = Path(SidePaths.of(real).log)
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES_MAX))
            text = file.read().decode("utf-8", "replace").strip()
    except OSError as error:
        return f"its log {log} cannot be read: {error.strerror}"
    return f"its last words: {text}" if text else "it said nothing"
