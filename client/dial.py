"""Reaching a worker: addresses, the hand-shake, and dialers, by which a client finds its worker again."""

import os
import select
import socket
import sys
import time
from contextlib import suppress
from typing import Final, Protocol

from ..protocol.envelope import Role, Welcome
from ..protocol.errors import InvalidRequestError, NotPermittedError, StorageError, WorkerUnavailableError
from ..protocol.limits import DEFAULT_LIMITS
from .connection import Connection
from .handshake import HandShake, NotNowError
from .outgoing import SEND_FLAGS
from .retry import back_off_seconds
from .terms import milliseconds_left, seconds_left

SCHEME: Final = "unix://"

SOCKET_PATH_BYTES_MAX: Final = 107 if sys.platform == "linux" else 103
"""What `sun_path` holds beside its closing NUL."""

UNANSWERED: Final = "it did not answer the hand-shake in time"
_RETRY_SECONDS_MAX: Final = 0.05


class Dialer(Protocol):
    """How a client reaches its worker, the first time and after each loss."""

    def dial(self, deadline_ns: int) -> Connection:
        """A fresh connection; `deadline_ns` is on the monotonic clock.

        Raises `WorkerUnavailableError` with outcome `not_committed` where there is none until then, and
        `ForkedClientError` where this process is a forked child that cannot be served.
        """
        ...


class AddressDialer:
    """Dials one address.

    Arguments: `address`, `unix://PATH`; `role`, the role to ask for; `grant`, the proof that the host
    allows it, or b""; `name`, the client's name in the worker's status, by default the program's.
    Raises `InvalidRequestError` where the address or the name cannot be used.
    """

    def __init__(
        self, address: str, role: Role = "write", grant: bytes = b"", name: str | None = None
    ) -> None:
        self.address = address
        self.role: Role = role
        self.grant = grant
        self.name = _checked_name(name)
        self._path = socket_path(address)

    def __repr__(self) -> str:
        return f"<dialer of {self.address} for role {self.role}>"

    def dial(self, deadline_ns: int) -> Connection:
        """See `Dialer.dial`. A full backlog and a worker that is not there yet are waited for."""
        return Connection(*self.reach(deadline_ns))

    def reach(self, deadline_ns: int) -> tuple[socket.socket, Welcome]:
        """A connected socket whose hand-shake is done, and what the worker said in it."""
        failures = 0
        while True:
            try:
                sock, shake = self.begin()
                try:
                    return sock, _finish(sock, shake, deadline_ns)
                except BaseException:
                    sock.close()
                    raise
            except (NotNowError, StorageError, OSError) as error:
                failures += 1
                wait = self.seconds_before_next(error, failures, deadline_ns)
            time.sleep(wait)

    def begin(self) -> tuple[socket.socket, HandShake]:
        """A connected non-blocking socket on which Hello was said, for the caller to go on with.

        Raises `NotNowError` where nobody takes the connection at the moment, `NotPermittedError`, or the
        system's error.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            shake = HandShake(self.role, self.grant, self.name)
            with suppress(ConnectionError):  # refused before the Hello: the reason is there to be read
                sock.send(shake.hello, SEND_FLAGS)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            sock.close()
            raise NotNowError(f"{error.strerror}; nobody listens, or too many connect at once") from error
        except PermissionError as error:
            sock.close()
            raise NotPermittedError(f"{self.address} is not open to this user: {error.strerror}") from error
        except BaseException:
            sock.close()
            raise
        return sock, shake

    def seconds_before_next(self, error: Exception, failures: int, deadline_ns: int) -> float:
        """Seconds to wait before the attempt after that number of failures, counted from 1.

        `error` is why the last one failed; where another one makes no sense it is raised, as `dial` says.
        """
        if isinstance(error, StorageError):
            error.outcome = "not_committed"
            raise error
        if isinstance(error, OSError):
            if error.errno is None:
                raise error  # not the system's: raised by a signal's handler
            raise self._unavailable(str(error)) from error
        wait = min(back_off_seconds(failures, DEFAULT_LIMITS), _RETRY_SECONDS_MAX)
        if seconds_left(deadline_ns) <= wait:
            raise self._unavailable(str(error)) from error
        return wait

    def _unavailable(self, why: str) -> WorkerUnavailableError:
        return WorkerUnavailableError(
            f"no worker can be reached at {self.address}: {why}",
            outcome="not_committed",
            details={"address": self.address, "reason": why},
        )


def _finish(sock: socket.socket, shake: HandShake, limit_ns: int) -> Welcome:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    while True:
        if not poller.poll(milliseconds_left(limit_ns)):
            raise NotNowError(UNANSWERED)
        welcome = shake.feed(received(sock, shake.wanted))
        if welcome is not None:
            return welcome


def received(sock: socket.socket, count: int) -> bytes:
    """At most that many bytes of a hand-shake, b"" at its end; `NotNowError` where the connection was lost."""
    try:
        return sock.recv(count)
    except ConnectionError as error:
        raise NotNowError(f"the worker ended during the hand-shake: {error.strerror}") from error


def socket_path(address: str) -> str:
    """The path in an address; `InvalidRequestError` where it is none that a socket can have."""
    if type(address) is not str or not address.startswith(f"{SCHEME}/"):
        raise InvalidRequestError(f"an address is {SCHEME} and an absolute path, not {address!r}")
    path = address.removeprefix(SCHEME)
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the address {address!r} holds what no path can") from error
    if "\0" in path or size > SOCKET_PATH_BYTES_MAX:
        raise InvalidRequestError(
            f"the socket path of {size} bytes in {address!r} is no path or too long; "
            f"one takes {SOCKET_PATH_BYTES_MAX} bytes",
            details={"path_bytes": size, "path_bytes_max": SOCKET_PATH_BYTES_MAX},
        )
    return path


def _checked_name(name: str | None) -> str:
    most = DEFAULT_LIMITS.client_name_chars_max
    if name is None:
        program = os.path.basename(sys.argv[0]) if sys.argv else ""
        # A program's name may hold bytes that are no text.
        return (program or "python").encode("utf-8", "backslashreplace").decode()[:most]
    if type(name) is not str or len(name) > most:
        raise InvalidRequestError(f"a client's name is a str of at most {most} characters, not {name!r:.200}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the client's name {name!r} holds a lone surrogate") from error
    return name
