"""SQLite, safe and fast for programs that run as several processes.

One worker process owns the only write connection; every other process is a client. A host starts a worker
with `StorageWorker`, any process finds or starts the shared one of a database with `connect`, or with
`connect_async` for an event loop.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    # Before anything else is imported: half of it needs what Windows does not have.
    raise ImportError("storage-worker runs on Linux and macOS; Windows is not supported yet")

from .client import Client, InteractiveTransaction, Pipe, Pipeline, PipelineFuture
from .launch import StorageWorker, connect
from .protocol.envelope import Role
from .protocol.errors import (
    AlreadyOwnedError,
    BusyError,
    CrashLoopError,
    DatabasePathError,
    DeadlineExceededError,
    DeclaredError,
    ForkedClientError,
    InvalidRequestError,
    NotPermittedError,
    OperationFailedError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    RequestConflictError,
    RequestTooLargeError,
    ResultNotKeptError,
    ResultTooLargeError,
    SchemaError,
    SnapshotExpiredError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageReplacedError,
    TransactionExpiredError,
    WorkerUnavailableError,
)
from .protocol.limits import Limits
from .protocol.operation import Call, Operation
from .protocol.statements import KnownOutcome, Result, Rows
from .protocol.status import WorkerStatus
from .store import Store, StoreOperation
from .transaction import Transaction
from .version import VERSION as __version__

if TYPE_CHECKING:
    from .client.aio import AsyncClient
    from .client.aio_pipeline import AsyncPipeline, AsyncPipelineFuture
    from .client.aio_snapshot import AsyncSnapshot
    from .client.aio_transaction import AsyncInteractiveTransaction
    from .client.snapshot import Snapshot
    from .launch_async import connect_async

_AT_FIRST_USE = {
    "AsyncClient": "client.aio",
    "AsyncInteractiveTransaction": "client.aio_transaction",
    "AsyncPipeline": "client.aio_pipeline",
    "AsyncPipelineFuture": "client.aio_pipeline",
    "AsyncSnapshot": "client.aio_snapshot",
    "Snapshot": "client.snapshot",
    "connect_async": "launch_async",
}
"""Where the names are that bring asyncio or SQLite with them, which not every host needs."""


def __getattr__(name: str) -> Any:
    module = _AT_FIRST_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = [
    "AlreadyOwnedError",
    "AsyncClient",
    "AsyncInteractiveTransaction",
    "AsyncPipeline",
    "AsyncPipelineFuture",
    "AsyncSnapshot",
    "BusyError",
    "Call",
    "Client",
    "CrashLoopError",
    "DatabasePathError",
    "DeadlineExceededError",
    "DeclaredError",
    "ForkedClientError",
    "InteractiveTransaction",
    "InvalidRequestError",
    "KnownOutcome",
    "Limits",
    "NotPermittedError",
    "Operation",
    "OperationFailedError",
    "OverloadedError",
    "Pipe",
    "Pipeline",
    "PipelineFuture",
    "ProtocolError",
    "RequestCancelledError",
    "RequestConflictError",
    "RequestTooLargeError",
    "Result",
    "ResultNotKeptError",
    "ResultTooLargeError",
    "Role",
    "Rows",
    "SchemaError",
    "Snapshot",
    "SnapshotExpiredError",
    "StorageCorruptError",
    "StorageError",
    "StorageFullError",
    "StorageReplacedError",
    "StorageWorker",
    "Store",
    "StoreOperation",
    "Transaction",
    "TransactionExpiredError",
    "WorkerStatus",
    "WorkerUnavailableError",
    "__version__",
    "connect",
    "connect_async",
]
