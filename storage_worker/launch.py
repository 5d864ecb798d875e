"""Starting the worker of a database, finding it, and connecting to it: the host's side."""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, Self, TypeVar, get_args

from .address import socket_address
from .client.client import Client
from .client.connection import Connection
from .client.dial import AddressDialer
from .client.pipe import Pipe
from .client.terms import deadline_after
from .filesystem import check_path
from .finding import PathDialer, RecordDialer, pause
from .protocol.envelope import Role
from .protocol.errors import (
    DatabasePathError,
    InvalidRequestError,
    NotPermittedError,
    WorkerUnavailableError,
)
from .protocol.limits import DEFAULT_LIMITS, Limits
from .shipping import ship
from .startup import Startup, grant_for
from .store import Store
from .supervisor import Supervisor

if TYPE_CHECKING:
    from .client.aio import AsyncClient

Durability = Literal["full", "normal"]

CHECKPOINT_SECONDS_MAX = 5.0
"""What a worker that is being stopped gets beyond its grace, for the checkpoint at its end."""

ATTEMPT_SECONDS = 0.25
"""How long a worker that runs is dialled before it is asked whether it still does."""

T = TypeVar("T")


class StorageWorker:
    """A worker of this process's own: started by it, restarted when it dies, ended with it.

    Use it as a context manager, or call `start` and `stop`. Arguments:

    - `path`: the database file; made where there is none, its directory must exist.
    - `stores`: `Store` objects or import strings such as `"myapp.storage:notes"`.
    - `durability`: `"full"`, acknowledged writes survive a power loss; `"normal"`, the death of any process.
    - `limits`: the bounds in force, `Limits()` by default.
    - `sql`: whether clients may send SQL.
    - `name`: the name of its clients in the worker's status, by default this program's.
    - `start_timeout`: seconds that the first start may take, by default that of the limits (10 s).

    Raises `DatabasePathError` where no worker can serve the path, `InvalidRequestError` for a store that
    cannot be handed over, `ValueError` for limits that contradict each other.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stores: Sequence[Store | str] = (),
        durability: Durability = "full",
        limits: Limits | None = None,
        sql: bool = True,
        name: str | None = None,
        start_timeout: float | None = None,
    ) -> None:
        self._limits = limits or DEFAULT_LIMITS
        self._startup = startup_of(path, stores, durability, self._limits, sql=sql)
        self._name = name
        self._start_timeout = start_timeout
        self._supervisor = Supervisor(self._startup)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a worker belongs to its host's process; hand worker.pipe() or worker.address to another one"
        )

    def __repr__(self) -> str:
        return f"<storage worker of {self._startup.path} at {self.address}>"

    @property
    def address(self) -> str:
        """Where it listens, the same after every restart: `unix://PATH`, for `connect` in any process."""
        return self._startup.address

    @property
    def pid(self) -> int | None:
        """The id of the worker's process; None while none listens."""
        record = self._supervisor.record
        return None if record is None else record.pid

    @property
    def restarts(self) -> int:
        """How often it was started again after it had died."""
        return max(0, self._supervisor.generation - 1)

    def start(self) -> None:
        """Start the worker and wait until it listens; nothing where it runs already, here or in the parent.

        Raises `AlreadyOwnedError` where another worker holds the database, `DeadlineExceededError` where
        the start takes too long, `WorkerUnavailableError` where the worker died or was stopped before, and
        what the worker itself says against it: `SchemaError`, `StorageCorruptError`, `BusyError` and more.
        Then no process is left.
        """
        limits = self._limits
        seconds = limits.start_ms_max / 1000 if self._start_timeout is None else self._start_timeout
        if self._supervisor.in_host:
            self._supervisor.start(deadline_after(seconds, limits))

    def stop(self, timeout: float | None = None) -> None:
        """End the worker: it takes nothing new, finishes what it has, and is killed after `timeout` seconds.

        By default it gets the grace of its limits (5 s) and a little more. May be called again, by any
        thread. In a forked child it does nothing: the worker is the parent's. Raises
        `WorkerUnavailableError` where the system does not end the killed process.
        """
        if self._supervisor.in_host:
            grace = self._limits.stop_grace_ms / 1000 + CHECKPOINT_SECONDS_MAX
            self._supervisor.stop(grace if timeout is None else timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the worker is over, because `stop` or an administrator stopped it.

        `timeout` is in seconds; without one it waits as long as that takes. Returns whether it is over.
        Raises `CrashLoopError` where it died too often to be restarted.
        """
        return self._supervisor.wait_over(timeout)

    def connect(
        self, role: Role = "write", *, name: str | None = None, timeout: float | None = None
    ) -> Client:
        """A client of this process with a role: `read`, `write`, or `admin`.

        It reaches the worker across its restarts, and in a forked child by its address. `name` is its name
        in the worker's status, `timeout` seconds (30 by default). Raises `CrashLoopError` where the worker
        is not restarted any more, `WorkerUnavailableError` where it was stopped or does not answer in time.
        """
        dialer = OwnDialer(self._supervisor, self._dialer(role, name))
        deadline_ns = deadline_after(timeout, self._limits)
        return Client(dialer, dialer.dial(deadline_ns))

    async def connect_async(
        self, role: Role = "write", *, name: str | None = None, timeout: float | None = None
    ) -> "AsyncClient":
        """An asynchronous client for the running event loop; arguments and errors as of `connect`."""
        # Programs without an event loop do not load one.
        from .client.aio import AsyncClient  # noqa: PLC0415
        from .dialers_async import AsyncOwnDialer  # noqa: PLC0415

        dialer = AsyncOwnDialer(self._supervisor, self._dialer(role, name))
        deadline_ns = deadline_after(timeout, self._limits)
        return AsyncClient(dialer, await dialer.dial(deadline_ns))

    def pipe(self, role: Role = "write", *, name: str | None = None, timeout: float | None = None) -> Pipe:
        """A connection for a child process, with its hand-shake done and that role, to be handed over.

        Arguments and errors as of `connect`.
        """
        dialer = self._dialer(role, name)
        deadline_ns = deadline_after(timeout, self._limits)
        return reach(
            self._supervisor,
            lambda until_ns: Pipe.open(dialer.address, role, dialer.grant, dialer.name, until_ns),
            deadline_ns,
        )

    def _dialer(self, role: Role, name: str | None) -> AddressDialer:
        check_role(role, get_args(Role))
        grant = grant_for(self._startup.secret, role)
        return AddressDialer(self.address, role, grant, self._name if name is None else name)


class OwnDialer:
    """Dials a worker that this process supervises; in a forked child, its address alone."""

    def __init__(self, supervisor: Supervisor, direct: AddressDialer) -> None:
        self._supervisor = supervisor
        self._direct = direct

    def dial(self, deadline_ns: int) -> Connection:
        """A connection; raises as `StorageWorker.connect` does. `deadline_ns` is on the monotonic clock."""
        return reach(self._supervisor, self._direct.dial, deadline_ns)


def reach(supervisor: Supervisor, attempt: Callable[[int], T], deadline_ns: int) -> T:
    """What `attempt(deadline_ns)` gives as soon as the supervised worker runs and answers."""
    if not supervisor.in_host:
        return attempt(deadline_ns)
    while True:
        # Waits for a restart, and knows when there will be none.
        supervisor.wait_running(deadline_ns)
        until_ns = min(deadline_ns, time.monotonic_ns() + round(ATTEMPT_SECONDS * 1e9))
        try:
            return attempt(until_ns)
        except WorkerUnavailableError:
            if until_ns == deadline_ns:
                raise
        # Where it failed at once, as for want of descriptors, it would fail as fast again.
        pause(deadline_ns)


def connect(
    path_or_address: str | os.PathLike[str],
    *,
    role: Role = "write",
    timeout: float | None = 5.0,
    name: str | None = None,
    stores: Sequence[Store | str] = (),
    durability: Durability = "full",
) -> Client:
    """A client of the worker at an address (`unix://PATH`), or of the worker of a database.

    For a database whose worker runs, whoever owns it, that one is taken; else a shared worker is started,
    which ends 5 s after its last client left. `stores` and `durability` tell how, and mean nothing for a
    worker that runs. The client finds or starts it again when it is lost.

    `role` is `read` or `write`, `timeout` seconds for the whole of it, `name` the client's name in the
    worker's status, by default this program's. Raises `NotPermittedError` for the role `admin`,
    `DatabasePathError` where no worker can serve the path, `WorkerUnavailableError` where none answers in
    time, and the error of a worker that cannot start, as `StorageWorker.start` does.
    """
    dialer = dialer_of(path_or_address, role, name, stores, durability)
    return Client(dialer, dialer.dial(deadline_after(timeout, DEFAULT_LIMITS)))


def dialer_of(
    path_or_address: str | os.PathLike[str],
    role: Role,
    name: str | None,
    stores: Sequence[Store | str],
    durability: Durability,
) -> AddressDialer | PathDialer:
    """How a worker is reached by its address, or by the path of its database; errors as of `connect`."""
    if role == "admin":
        raise NotPermittedError(
            "by path or address a client gets `write` at the most; the worker's host gives more:"
            " worker.connect('admin') or worker.pipe('admin')"
        )
    check_role(role, ("read", "write"))
    if isinstance(path_or_address, Pipe):
        raise InvalidRequestError("a pipe makes its client itself: pipe.connect()")
    if not isinstance(path_or_address, str | os.PathLike):
        raise InvalidRequestError(f"connect takes a database's path or an address, not {path_or_address!r}")
    if isinstance(path_or_address, str) and "://" in path_or_address:
        return AddressDialer(path_or_address, role, b"", name)
    if role == "read" and not os.path.exists(path_or_address):
        raise DatabasePathError(
            f"there is no database {os.fspath(path_or_address)!r} to read; a client of role write makes one",
            details={"path": os.path.abspath(os.fspath(path_or_address))},
        )
    startup = startup_of(path_or_address, stores, durability, DEFAULT_LIMITS, sql=True)
    return PathDialer(startup, role, name)


def find(
    path: str | os.PathLike[str],
    *,
    role: Role = "admin",
    timeout: float | None = 5.0,
    name: str | None = None,
) -> Client:
    """A client of the worker that runs for a database, with any role: for this user's own maintenance.

    Starts nothing. `timeout` is in seconds. Raises `WorkerUnavailableError` where no worker runs or answers
    in time, `DatabasePathError` where none can serve the path.
    """
    check_role(role, get_args(Role))
    dialer = RecordDialer(check_path(path), role, name, with_grant=True)
    return Client(dialer, dialer.dial(deadline_after(timeout, DEFAULT_LIMITS)))


def startup_of(
    path: str | os.PathLike[str],
    stores: Sequence[Store | str],
    durability: Durability,
    limits: Limits,
    *,
    sql: bool,
) -> Startup:
    """What a worker is told, but for its owner; checked as `StorageWorker` says."""
    if not isinstance(limits, Limits):
        raise InvalidRequestError(f"limits is a storage_worker.Limits, not {limits!r}")
    limits.check()
    if durability not in get_args(Durability):
        raise InvalidRequestError(f"the durability is 'full' or 'normal', not {durability!r}")
    if isinstance(stores, str):
        raise InvalidRequestError("stores is a sequence of stores, not one text")
    real = check_path(path)
    names, shipped = ship(stores)
    return Startup(
        path=real,
        address=socket_address(real),
        durability=durability,
        limits=limits,
        stores=names,
        shipped=shipped,
        sql=sql,
        owner_pid=None,
        owner_started=None,
        secret=secrets.token_bytes(32),
        sys_path=[],
    )


def check_role(role: str, allowed: Sequence[str]) -> None:
    """Raise `InvalidRequestError` where a role is none of those allowed."""
    if role not in allowed:
        raise InvalidRequestError(f"the role is one of {', '.join(allowed)}, not {role!r}")
