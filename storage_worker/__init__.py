"""SQLite, safe and fast for programs that run as several processes.

One worker process owns the only write connection; every other process is a client. A host starts a worker
with `StorageWorker`, any process finds or starts the shared one of a database with `connect`.
"""

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

__all__ = [
    "AlreadyOwnedError",
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
]
