"""What a client can ask for, as calls: the one description that every kind of client shares.

Each function checks what can be checked before the first byte is sent and raises `InvalidRequestError`
or `RequestTooLargeError` that names the statement, the parameter or the limit.
"""

import os
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ..protocol.errors import InvalidRequestError, ProtocolError, RequestTooLargeError, StorageError
from ..protocol.limits import Limits
from ..protocol.operation import Call
from ..protocol.statements import (
    BACKUP,
    BATCH,
    BEGIN,
    CHECK,
    COMMIT,
    EXECUTE,
    HEALTH,
    OUTCOME,
    QUERY,
    ROLLBACK,
    SAVEPOINT,
    SCRIPT,
    STATUS,
    STOP,
    Backup,
    Batch,
    Begin,
    KnownOutcome,
    Nothing,
    OutcomeQuestion,
    Rows,
    Savepoint,
    Script,
    Statement,
)
from ..protocol.status import WorkerStatus
from ..protocol.values import Parameters, check_parameters
from .terms import check_key

COMMIT_CALL: Final = Call(COMMIT, Nothing())
ROLLBACK_CALL: Final = Call(ROLLBACK, Nothing())
CHECK_CALL: Final = Call(CHECK, Nothing())
HEALTH_CALL: Final = Call(HEALTH, Nothing())
STATUS_CALL: Final = Call(STATUS, Nothing())
STOP_CALL: Final = Call(STOP, Nothing())


def execute(sql: str, parameters: Parameters, limits: Limits) -> Call[Rows]:
    """One statement that may write."""
    check_sql(sql, limits)
    return Call(EXECUTE, Statement(sql, check_parameters(parameters, limits.bind_values_max)))


def query(sql: str, parameters: Parameters, limits: Limits) -> Call[Rows]:
    """One statement that only reads."""
    check_sql(sql, limits)
    return Call(QUERY, Statement(sql, check_parameters(parameters, limits.bind_values_max)))


def batch(statements: Iterable[tuple[str, Parameters]], limits: Limits) -> Call[list[Rows]]:
    """Statements with their parameters that take effect together or not at all."""
    checked: list[Statement] = []
    for number, item in enumerate(statements, 1):
        if number > limits.batch_statements_max:
            raise InvalidRequestError(
                f"more than {limits.batch_statements_max} statements; one batch takes no more",
                details={"batch_statements_max": limits.batch_statements_max},
            )
        try:
            sql, parameters = _pair(item)
            check_sql(sql, limits)
            checked.append(Statement(sql, check_parameters(parameters, limits.bind_values_max)))
        except StorageError as error:
            error.message = f"statement {number}: {error.message}"
            error.details.setdefault("statement", number)
            raise
    return Call(BATCH, Batch(checked))


def _pair(item: object) -> tuple[Any, Any]:
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise InvalidRequestError("a statement of a batch is a pair of SQL text and parameters")


def script(sql: str) -> Call[Rows]:
    """Several statements in one text."""
    _check_text(sql)
    return Call(SCRIPT, Script(sql))


def begin(lease_ms: int) -> Call[int]:
    """The start of an interactive transaction; its result is the transaction's number."""
    return Call(BEGIN, Begin(lease_ms))


def savepoint(action: Any, name: str) -> Call[None]:
    """A step with a savepoint inside an interactive transaction."""
    return Call(SAVEPOINT, Savepoint(action, name))


def outcome(key: str, *, fence: bool, limits: Limits) -> Call[KnownOutcome]:
    """What became of the request with a key."""
    check_key(key, limits)
    return Call(OUTCOME, OutcomeQuestion(key, fence))


def status_of(raw: msgspec.Raw) -> WorkerStatus:
    """What a status call gave; `ProtocolError` where worker and client differ about it."""
    try:
        return msgspec.msgpack.decode(raw, type=WorkerStatus)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the worker's status does not decode: {error}; the releases differ") from error


def backup(target: str | os.PathLike[str]) -> Call[int]:
    """A copy of the database, at a path that the worker can understand from wherever it stands."""
    try:
        path = os.path.abspath(os.fspath(target))
    except TypeError as error:
        raise InvalidRequestError(f"the target of a backup is a path, not {target!r}") from error
    return Call(BACKUP, Backup(path))


def check_call(call: object) -> None:
    """Raise `InvalidRequestError` where `call` is not what an operation made."""
    if not isinstance(call, Call):
        raise InvalidRequestError(
            f"a call is made by an operation, as in client.call(notes.add('hello')), not {type(call).__name__}"
        )


def check_sql(sql: str, limits: Limits) -> None:
    """Raise where `sql` is no text or over the limit of one statement."""
    most = limits.sql_bytes_max
    # A character takes at most 4 bytes, so that short texts need no encoding to be measured.
    if type(sql) is str and len(sql) * 4 <= most:
        return
    _check_text(sql)
    size = len(sql.encode("utf-8", "surrogatepass"))
    if size > most:
        raise RequestTooLargeError(
            f"the SQL text of {size} bytes is over the {most} that one statement takes; bind large values",
            details={"sql_bytes": size, "sql_bytes_max": most},
        )


def _check_text(sql: object) -> None:
    if type(sql) is not str:
        raise InvalidRequestError(f"the SQL is a str, not a {type(sql).__name__}")
