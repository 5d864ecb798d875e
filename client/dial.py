"""Reaching a worker: addresses, the hand-shake, and dialers, by which a client finds its worker again."""

import os
import select
import socket
import sys
import time
from contextlib import suppress
from typing import Final, Protocol

from ..protocol.envelope import (
    PROTOCOL_VERSION,
    Failure,
    Hello,
    Role,
    Welcome,
    decode_from_worker,
    encode,
    error_of,
)
from ..protocol.errors import InvalidRequestError, NotPermittedError, StorageError, WorkerUnavailableError
from ..protocol.framing import FrameReader, frame
from ..protocol.limits import DEFAULT_LIMITS, FRAME_HEADER_BYTES, KIB
from ..protocol.session import Session, check_welcome
from .connection import Connection
from .outgoing import SEND_FLAGS
from .retry import back_off_seconds
from .terms import milliseconds_left, seconds_left

SCHEME: Final = "unix://"

SOCKET_PATH_BYTES_MAX: Final = 107 if sys.platform == "linux" else 103
"""What `sun_path` holds beside its closing NUL."""

_HANDSHAKE_BYTES_MAX: Final = 64 * KIB
_RETRY_SECONDS_MAX: Final = 0.05


class _NotNowError(Exception):
    """An attempt failed for a reason that may pass: nobody listens, the backlog is full, the worker ends."""


class Dialer(Protocol):
    """How a client reaches its worker, the first time and after each loss."""

    def dial(self, deadline_ns: int) -> Connection:
        """A fresh connection; `deadline_ns` is on the monotonic clock.

        Raises `WorkerUnavailableError` with outcome `not_committed` where there is none until then, and
        `ForkedClientError` where this process is a forked child that cannot be served.
        """


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
        self.role = role
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
                return self._try_once(deadline_ns)
            except _NotNowError as error:
                failures += 1
                wait = min(back_off_seconds(failures, DEFAULT_LIMITS), _RETRY_SECONDS_MAX)
                if seconds_left(deadline_ns) <= wait:
                    raise self._unavailable(str(error)) from error
                time.sleep(wait)
            except StorageError as error:
                error.outcome = "not_committed"
                raise
            except OSError as error:
                if error.errno is None:
                    raise  # not the system's: raised by a signal's handler
                raise self._unavailable(str(error)) from error

    def _try_once(self, deadline_ns: int) -> tuple[socket.socket, Welcome]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            try:
                sock.connect(self._path)
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
                raise _NotNowError(
                    f"{error.strerror}; nobody listens, or too many connect at once"
                ) from error
            except PermissionError as error:
                raise NotPermittedError(
                    f"{self.address} is not open to this user: {error.strerror}"
                ) from error
            return sock, self._shake_hands(sock, deadline_ns)
        except BaseException:
            sock.close()
            raise

    def _shake_hands(self, sock: socket.socket, deadline_ns: int) -> Welcome:
        session = Session()
        sent_ns = time.monotonic_ns()
        hello = Hello(PROTOCOL_VERSION, self.name, os.getpid(), self.role, sent_ns, self.grant)
        session.from_client(hello)
        with suppress(ConnectionError):  # refused before the Hello: the reason is there to be read
            sock.send(frame(encode(hello)), SEND_FLAGS)
        answer = decode_from_worker(_read_frame(sock, deadline_ns))
        received_ns = time.monotonic_ns()
        session.from_worker(answer)
        if isinstance(answer, Welcome):
            check_welcome(answer, sent_ns, received_ns)
            return answer
        if isinstance(answer, Failure):
            error = error_of(answer)
            if not isinstance(error, WorkerUnavailableError):
                raise error
            raise _NotNowError(error.message) from error
        raise _NotNowError("the worker is ending")

    def _unavailable(self, why: str) -> WorkerUnavailableError:
        return WorkerUnavailableError(
            f"no worker can be reached at {self.address}: {why}",
            outcome="not_committed",
            details={"address": self.address, "reason": why},
        )


def _read_frame(sock: socket.socket, limit_ns: int) -> bytes:
    """One frame and not a byte more: what follows it is the connection's."""
    frames = FrameReader(_HANDSHAKE_BYTES_MAX)
    header = _read_exactly(sock, FRAME_HEADER_BYTES, limit_ns)
    bodies = frames.feed(header)
    if not bodies:
        bodies = frames.feed(_read_exactly(sock, int.from_bytes(header, "big"), limit_ns))
    return bodies[0]


def _read_exactly(sock: socket.socket, count: int, limit_ns: int) -> bytes:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    found = b""
    while len(found) < count:
        if not poller.poll(milliseconds_left(limit_ns)):
            raise _NotNowError("it did not answer the hand-shake in time")
        try:
            data = sock.recv(count - len(found))
        except ConnectionError as error:
            raise _NotNowError(f"the worker ended during the hand-shake: {error.strerror}") from error
        if not data:
            raise _NotNowError("the worker ended during the hand-shake")
        found += data
    return found


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
