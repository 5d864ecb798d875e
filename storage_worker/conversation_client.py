"""A client of the conversation store of a database, for the commands: connected, and known to find that store."""

import os
from typing import Final

from . import conversation, launch
from .client.client import Client
from .client.terms import deadline_after, seconds_left
from .protocol.envelope import Role
from .protocol.errors import InvalidRequestError
from .protocol.limits import DEFAULT_LIMITS

STORE: Final = "storage_worker.conversation:store"


def connect(target: str | os.PathLike[str], *, role: Role, name: str, timeout: float) -> Client:
    """A client of a database, whose worker is started where none runs, or of the worker at an address.

    Arguments as of `storage_worker.connect`. Raises what that raises, and `InvalidRequestError` where the worker that
    runs was started without the conversation store.
    """
    deadline_ns = deadline_after(timeout, DEFAULT_LIMITS)
    client = launch.connect(target, role=role, stores=[STORE], name=name, timeout=timeout)
    try:
        client.call(conversation.rooms(page_rows=1), timeout=seconds_left(deadline_ns))
    except InvalidRequestError as error:
        client.close()
        raise InvalidRequestError(
            f"the worker that runs for {os.fspath(target)} does not serve the conversation store. Stop it"
            " (`storage-worker stop`), then the next command starts one that does; or have the program that owns it"
            f" start it with stores=[{STORE!r}]",
            details={"store": STORE},
        ) from error
    except BaseException:
        client.close()
        raise
    return client
