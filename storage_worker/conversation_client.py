"""A client of the conversation store of a database, for the commands: connected, and known to find that store."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import psutil

from . import conversation, launch
from .address import SCHEME
from .client.client import Client
from .client.local_guard import typed
from .client.terms import deadline_after, seconds_left
from .filesystem import check_path
from .protocol.envelope import Role
from .protocol.errors import InvalidRequestError
from .protocol.limits import DEFAULT_LIMITS

STORE: Final = "storage_worker.conversation:store"

_TABLE: Final = "select 1 from sqlite_master where type = 'table' and name = 'conversation_events'"

IDLE_SECONDS_MAX: Final = DEFAULT_LIMITS.shared_idle_ms / 1000 + launch.CHECKPOINT_SECONDS_MAX
"""How long a shared worker without clients takes to end."""


def has_store(path: str | os.PathLike[str]) -> bool | None:
    """Whether the conversation store is in a database; None where this process's SQLite cannot tell.

    Only looks: makes no file, changes none, starts no worker. Raises `DatabasePathError` where no worker can serve the
    path, `StorageCorruptError` where it holds no database.
    """
    real = check_path(path)
    # SQLite would make the files of the WAL again beside a database that was closed; then nobody has it open.
    mode = "mode=ro" if os.path.exists(f"{real}-wal") else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{Path(real).as_uri()}?{mode}", uri=True)) as database:
            return bool(database.execute(_TABLE).fetchall())
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            raise typed(error, real, "", _TABLE) from error
        # The worker's own may be newer, and tells what is wrong otherwise.
        return None


def require_store(path: str | os.PathLike[str]) -> None:
    """Raise `InvalidRequestError` where a database has no conversation store; else as `has_store`."""
    if has_store(path) is False:
        raise InvalidRequestError(
            f"there is no conversation store in {os.fspath(path)}; `storage-worker import` makes one, and so does a"
            f" worker that is started with stores=[{STORE!r}]",
            details={"store": STORE},
        )


def connect(target: str | os.PathLike[str], *, role: Role, name: str, timeout: float) -> Client:
    """A client of a database, whose worker is started where none runs, or of the worker at an address.

    A shared worker that runs without the conversation store, as one that `sql` started, is waited for: it ends 5 s
    after its last client, and one with the store takes its place. Arguments as of `storage_worker.connect`. Raises what
    that raises, and `InvalidRequestError` where the worker that runs does not serve the conversation store and does
    not end.
    """
    deadline_ns = deadline_after(timeout, DEFAULT_LIMITS)
    while True:
        client = launch.connect(
            target, role=role, stores=[STORE], name=name, timeout=seconds_left(deadline_ns)
        )
        try:
            client.call(conversation.rooms(page_rows=1), timeout=seconds_left(deadline_ns))
            return client
        except InvalidRequestError as error:
            with client:
                pid = _shared_pid(client, target, seconds_left(deadline_ns))
            if pid is None or not has_ended(pid, min(seconds_left(deadline_ns), IDLE_SECONDS_MAX)):
                raise _no_store(target, is_shared=pid is not None) from error
        except BaseException:
            client.close()
            raise


def _shared_pid(client: Client, target: str | os.PathLike[str], timeout: float) -> int | None:
    """The process of a shared worker; None for one of a program's own, and at an address, where none follows."""
    if str(target).startswith(SCHEME):
        return None
    found = client.status(timeout=timeout)
    return found.process.pid if found.shared else None


def has_ended(pid: int, seconds: float) -> bool:
    """Whether a process ends within some seconds."""
    try:
        psutil.Process(pid).wait(seconds)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def _no_store(target: str | os.PathLike[str], *, is_shared: bool) -> InvalidRequestError:
    which = f"the worker that runs for {os.fspath(target)} does not serve the conversation store"
    if is_shared:
        advice = (
            "It is a shared one and did not end in time, since it has other clients: end these, or stop it"
            " (`storage-worker stop`); then the next command starts one that does"
        )
    else:
        advice = (
            "Stop it (`storage-worker stop`), then the next command starts one that does; or have the program that"
            f" owns it start it with stores=[{STORE!r}]"
        )
    return InvalidRequestError(f"{which}. {advice}", details={"store": STORE})
