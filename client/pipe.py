"""Pre-opened connections that a host hands to its children."""

import functools
import importlib
import os
import socket
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

from ..protocol.envelope import Role, Welcome
from .client import Client
from .connection import Connection
from .dial import AddressDialer
from .forks import tell_after_fork

if TYPE_CHECKING:
    from .aio import AsyncClient

_PROCESS_LIBRARIES = ("multiprocessing", "multiprocess")


@final
class Pipe:
    """A connection whose hand-shake is done, with the role that the host gave it.

    It travels to another process as an argument of a `Process`, or through a queue or connection, of
    `multiprocessing` and of `multiprocess`; `connect` makes a client of it there. Its descriptor serves one
    client, once: a second `connect`, and one in a forked child, dials the same worker anew with the same role.

    The host closes its own end once the child has it, by `close`, a `with` block, or by letting go of the
    object: until then the worker cannot see that the child died.

    Arguments: `dialer`, how the worker is reached again; `sock`, the connected socket, or None where it is
    gone; `welcome`, what the worker said. `open` makes one.
    """

    def __init__(self, dialer: AddressDialer, sock: socket.socket | None, welcome: Welcome) -> None:
        _learn_to_travel()
        self.welcome = welcome
        self._dialer = dialer
        # Taken out by one atomic step, so that no two threads get the same socket.
        self._own = [] if sock is None else [sock]
        self._lent: list[socket.socket] = []
        tell_after_fork(self)

    @classmethod
    def open(
        cls,
        address: str,
        role: Role = "write",
        grant: bytes = b"",
        name: str | None = None,
        deadline_ns: int = 0,
    ) -> Self:
        """Connect and shake hands; `deadline_ns` is on the monotonic clock, the rest as in `AddressDialer`.

        Raises `WorkerUnavailableError` where no worker answers until then, or the worker's own refusal.
        """
        dialer = AddressDialer(address, role, grant, name)
        return cls(dialer, *dialer.reach(deadline_ns))

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Pipe is handed to a process by multiprocessing or multiprocess; plain pickle cannot carry it"
        )

    def __repr__(self) -> str:
        return f"<pipe to {self.address} for role {self.role}>"

    @property
    def address(self) -> str:
        """Where the worker listens."""
        return self._dialer.address

    @property
    def role(self) -> Role:
        """The role that the worker granted."""
        return self.welcome.role

    def connect(self) -> Client:
        """A client on this connection; it dials the same address, with the same role, where that is gone."""
        try:
            sock = self._own.pop()
        except IndexError:
            return Client(self._dialer)
        return Client(self._dialer, Connection(sock, self.welcome))

    async def connect_async(self) -> "AsyncClient":
        """A client for the running event loop; else as `connect`."""
        # Programs without an event loop do not load one.
        from .aio import AsyncClient  # noqa: PLC0415
        from .aio_connection import AsyncConnection  # noqa: PLC0415
        from .aio_dial import AsyncAddressDialer  # noqa: PLC0415

        dialer = AsyncAddressDialer(self._dialer)
        try:
            sock = self._own.pop()
        except IndexError:
            return AsyncClient(dialer)
        return AsyncClient(dialer, AsyncConnection(sock, self.welcome))

    def close(self) -> None:
        """Close this process's end. A client made by `connect` is not touched."""
        for sockets in (self._own, self._lent):
            while sockets:
                sockets.pop().close()

    def after_fork(self) -> None:
        """Let go of the parent's socket: it carries one process's requests."""
        self.close()

    def lend(self, reduction: Any) -> tuple[Any, ...]:
        """How a pickler of a process library carries the pipe; `reduction` is that library's module."""
        dialer = self._dialer
        parts = (dialer.address, dialer.role, dialer.grant, dialer.name, self.welcome)
        try:
            sock = self._own.pop()
        except IndexError:
            return _rebuild, (*parts, None)
        carrier = reduction.DupFd(sock.fileno())
        if reduction.context.get_spawning_popen() is None:
            sock.close()  # the library sends a copy
        else:
            self._lent.append(sock)  # the child gets this very descriptor when it is started
        return _rebuild, (*parts, carrier)


def _rebuild(address: str, role: Role, grant: bytes, name: str, welcome: Welcome, carrier: Any) -> Pipe:
    dialer = AddressDialer(address, role, grant, name)
    if carrier is None:
        return Pipe(dialer, None, welcome)
    descriptor = carrier.detach()
    os.set_inheritable(descriptor, False)
    return Pipe(dialer, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, descriptor), welcome)


@functools.cache
def _learn_to_travel() -> None:
    # At the first pipe, so that programs without one do not load the libraries.
    for library in _PROCESS_LIBRARIES:
        reduction = importlib.import_module(f"{library}.reduction")
        reduction.ForkingPickler.register(Pipe, functools.partial(_reduce, reduction))


def _reduce(reduction: Any, pipe: Pipe) -> tuple[Any, ...]:
    return pipe.lend(reduction)
