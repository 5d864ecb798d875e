"""Finding a worker and connecting to it from an event loop: the host's side."""

import os
from collections.abc import Sequence

from .client.aio import AsyncClient
from .client.aio_dial import AsyncAddressDialer, AsyncDialer
from .client.dial import AddressDialer
from .client.terms import deadline_after
from .dialers_async import AsyncPathDialer
from .launch import Durability, dialer_of
from .protocol.envelope import Role
from .protocol.limits import DEFAULT_LIMITS
from .store import Store


async def connect_async(
    path_or_address: str | os.PathLike[str],
    *,
    role: Role = "write",
    timeout: float | None = 5.0,
    name: str | None = None,
    stores: Sequence[Store | str] = (),
    durability: Durability = "full",
) -> AsyncClient:
    """An asynchronous client of the worker at an address, or of the worker of a database.

    Use it so: `async with await connect_async("app.db") as client: ...`. Arguments, errors and what is
    started are as of `connect`. A worker's start and the search for one by path run in a daemon thread,
    which is gone when they are over.
    """
    found = dialer_of(path_or_address, role, name, stores, durability)
    dialer: AsyncDialer
    dialer = AsyncAddressDialer(found) if isinstance(found, AddressDialer) else AsyncPathDialer(found)
    return AsyncClient(dialer, await dialer.dial(deadline_after(timeout, DEFAULT_LIMITS)))
