"""The whole error tree and its wire codes.

Each class says in its docstring when it is raised and what the user can do. `outcome` is a promise:
`not_committed` stands only where the worker knows that nothing was.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

Outcome = Literal["not_committed", "committed", "unknown"]
Detail = str | int | float | bool | None


class StorageError(Exception):
    """The base of every error of the storage worker.

    Arguments: `message`, what happened and what the user can do; `outcome`, whether the request's
    work was committed (the class's own promise by default); `retry_after`, seconds until a repeat
    makes sense, or None; `details`, a small map of names to plain values.
    """

    code: ClassVar[str] = "storage_error"
    default_retryable: ClassVar[bool] = False
    default_outcome: ClassVar[Outcome] = "not_committed"

    def __init__(
        self,
        message: str,
        *,
        outcome: Outcome | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Detail] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retryable: bool = self.default_retryable
        self.outcome: Outcome = outcome or self.default_outcome
        self.retry_after = retry_after
        self.details: dict[str, Detail] = dict(details or {})

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError subclasses pickle by their argument tuple; ours carry more than that.
        return _restore, (type(self), self.message, self.__dict__.copy())


def bare_error(kind: type[StorageError], message: str) -> StorageError:
    """An error of a class with the class's own promises, made without its `__init__`.

    A store's error may take other arguments than a message; what travels is what `StorageError` holds.
    """
    error = kind.__new__(kind)
    StorageError.__init__(error, message)
    return error


def _restore(kind: type[StorageError], message: str, state: dict[str, Any]) -> StorageError:
    error = bare_error(kind, message)
    error.__dict__.update(state)
    return error


class OverloadedError(StorageError):
    """No place in the queue; `details` name the bound. Repeat after `retry_after` seconds."""

    code = "storage_overloaded"
    default_retryable = True


class BusyError(StorageError):
    """A foreign process holds SQLite's lock and did not let go in time. Repeat, or end that process."""

    code = "storage_busy"
    default_retryable = True


class DeadlineExceededError(StorageError, TimeoutError):
    """The deadline passed; `details["stage"]` says where. Repeat with more time, or with a request key."""

    code = "storage_deadline"
    default_retryable = True


class RequestCancelledError(StorageError):
    """The request was cancelled by its client before it was committed."""

    code = "storage_cancelled"
    default_retryable = True


class RequestTooLargeError(StorageError):
    """The request is over a size limit. Send less at once, or put large bodies into the payload store."""

    code = "storage_request_too_large"


class ResultTooLargeError(StorageError):
    """The result is over the limit that the request allowed; a write was rolled back. Ask for less."""

    code = "storage_result_too_large"


def result_too_large(result_bytes_max: int) -> ResultTooLargeError:
    """The error of a result over the size that its request allowed."""
    return ResultTooLargeError(
        f"the result is over the {result_bytes_max} bytes that the request allowed; ask for less, or allow more",
        details={"result_bytes_max": result_bytes_max},
    )


class InvalidRequestError(StorageError):
    """Unknown operation, arguments that do not decode, or a value that cannot be stored unchanged."""

    code = "storage_invalid_request"


class ProtocolError(StorageError):
    """The bytes on the pipe are not the protocol, or not a version of it that is understood."""

    code = "storage_protocol"
    default_outcome = "unknown"


class NotPermittedError(StorageError, PermissionError):
    """The connection's role, or the rules for SQL, do not allow it."""

    code = "storage_not_permitted"


class RequestConflictError(StorageError):
    """The request key was used before with other content. Use a key of its own for each request."""

    code = "storage_request_conflict"


class WorkerUnavailableError(StorageError, ConnectionError):
    """The worker is gone or cannot start. Repeat; a request key makes a repeat of a write safe."""

    code = "storage_unavailable"
    default_retryable = True
    default_outcome: ClassVar[Outcome] = "unknown"


class CrashLoopError(WorkerUnavailableError):
    """The worker died too often in a short time and is not restarted any more. Read its last words."""

    code = "storage_crash_loop"
    default_retryable = False
    default_outcome = "not_committed"


class AlreadyOwnedError(StorageError):
    """Another worker holds the database; `details` name it. Connect to it, or stop it first."""

    code = "storage_already_owned"
    default_retryable = True


class DatabasePathError(StorageError):
    """The path is refused: a directory, hard-linked, on a network file system, or not writable."""

    code = "storage_path"


class ResultNotKeptError(StorageError):
    """A repeated request key whose result was too large to keep. It was committed; read it back."""

    code = "storage_result_not_kept"
    default_outcome = "committed"


class SnapshotExpiredError(StorageError):
    """The snapshot outlived its age. Take a new one."""

    code = "storage_snapshot_expired"
    default_retryable = True


class ForkedClientError(StorageError):
    """A client was used in a forked child that cannot reconnect. Make a client in the child."""

    code = "storage_forked_client"


class TransactionExpiredError(StorageError):
    """The interactive transaction is over: its lease ran out, or it was ended. Begin a new one."""

    code = "storage_transaction_expired"
    default_retryable = True


class StorageFullError(StorageError):
    """The disk or a quota is full. Service comes back by itself when space does."""

    code = "storage_full"
    default_retryable = True


class StorageCorruptError(StorageError):
    """The database or a payload fails a check; `details` name the file and the check. Restore a backup."""

    code = "storage_corrupt"


class StorageReplacedError(StorageError):
    """The file under the path is no longer the file that is open. The worker stops."""

    code = "storage_replaced"
    default_outcome = "unknown"


class SchemaError(StorageError):
    """The schema is newer than this release knows, or a migration failed or was changed."""

    code = "storage_schema"


class OperationFailedError(StorageError):
    """Any other SQL error, or an exception in a handler; `details` name it."""

    code = "storage_operation_failed"


class DeclaredError(StorageError):
    """The base of errors that a store declares: subclass it with a `code` of the store's own.

    A handler raises one with `Transaction.fail`. A client that knows the subclass raises it, another
    one a plain `DeclaredError` whose `wire_code` is the code.
    """

    code = "storage_declared"

    wire_code: str = ""

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if "code" not in vars(cls) and cls.code == DeclaredError.code:
            raise TypeError(f"give {cls.__name__} a code of its own: a client knows the error by it")


def _walk(kind: type[StorageError]) -> list[type[StorageError]]:
    return [kind] + [found for below in kind.__subclasses__() for found in _walk(below)]


def error_class(code: str) -> type[StorageError] | None:
    """The class of a wire code, or None where no imported module declares it."""
    if not _by_code or code not in _by_code:
        _by_code.update((kind.code, kind) for kind in reversed(_walk(StorageError)))
    return _by_code.get(code)


_by_code: dict[str, type[StorageError]] = {}
