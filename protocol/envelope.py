"""The envelopes of both directions, their codecs, and the protocol's version."""

from typing import Annotated, Any, Literal

import msgspec

from .errors import DeclaredError, Detail, Outcome, ProtocolError, StorageError, bare_error, error_class
from .limits import Limits

PROTOCOL_VERSION = 1

Role = Literal["read", "write", "admin"]
"""What a connection may do: read; also write; also run scripts, back up and stop the worker."""

CONNECTION_ID = 0
"""The request id of a Failure that concerns the whole connection."""

ARGUMENTS_FOLLOW = 1
"""The flag of a Request whose arguments come in chunks; in their place stands their size in bytes."""

_RequestId = Annotated[int, msgspec.Meta(ge=1)]
_Unsigned = Annotated[int, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class Hello(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """A client's first envelope. `grant` proves that the host gave it the role it asks for."""

    version: int
    name: str
    pid: int
    role: Role
    clock_ns: int
    grant: bytes = b""


class Welcome(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The worker's answer to Hello. `worker` is a fresh id of each start."""

    version: int
    worker: str
    pid: int
    role: Role
    limits: Limits
    sqlite_version: str
    journal_mode: str
    synchronous: str
    clock_ns: int


class Request(msgspec.Struct, array_like=True, tag=3):
    """One request as it is read: the arguments stay encoded until its executor decodes them.

    `deadline_ns` is on the machine's monotonic clock, 0 for the worker's default; `result_bytes` is
    the size of the result that is allowed, 0 for the default; `transaction` is 0 outside one. `flags` is
    `ARGUMENTS_FOLLOW` or 0.
    """

    id: _RequestId
    operation: str
    deadline_ns: _Unsigned
    result_bytes: _Unsigned
    key: str | None
    transaction: _Unsigned
    flags: _Unsigned
    arguments: msgspec.Raw


class OutgoingRequest(msgspec.Struct, array_like=True, tag=3):
    """A `Request` as it is written: arguments and envelope are encoded in one pass."""

    id: int
    operation: str
    deadline_ns: int
    result_bytes: int
    key: str | None
    transaction: int
    flags: int
    arguments: Any


class Reply(msgspec.Struct, array_like=True, tag=4):
    """The result of a request, still encoded."""

    id: _RequestId
    result: msgspec.Raw


class OutgoingReply(msgspec.Struct, array_like=True, tag=4):
    """A `Reply` as it is written: result and envelope are encoded in one pass."""

    id: int
    result: Any


class Failure(msgspec.Struct, array_like=True, tag=5):
    """The typed error that ends a request, or with id 0 the connection."""

    id: _Unsigned
    code: str
    message: str
    retryable: bool
    outcome: Outcome
    retry_after_ms: _Unsigned | None
    details: dict[str, Detail]


class Cancel(msgspec.Struct, array_like=True, tag=6):
    """Asks the worker to end a request; its Reply or Failure still comes."""

    id: _RequestId


class Chunk(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """One part of a request's arguments or of its result, numbered from 0, sent only within the credit.

    A result that came in chunks ends with a Reply that holds nothing.
    """

    id: _RequestId
    sequence: _Unsigned
    part: bytes


class OutgoingChunk(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """A `Chunk` as it is written."""

    id: int
    sequence: int
    part: bytes | memoryview


class Credit(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """Allows so many more chunks of a request's arguments or of its result."""

    id: _RequestId
    count: _Count


class Goodbye(msgspec.Struct, array_like=True, tag=7):
    """The sender starts nothing more on this connection."""

    reason: str


FromClient = Hello | Request | Cancel | Chunk | Credit | Goodbye
FromWorker = Welcome | Reply | Failure | Chunk | Credit | Goodbye

_from_client = msgspec.msgpack.Decoder(FromClient)
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode

_REQUEST_HEAD = encode(OutgoingRequest(0, "", 0, 0, None, 0, 0, None))[:2]


def decode_from_client(body: bytes) -> FromClient:
    """Decode what a client sent; `ProtocolError` where it is no envelope."""
    try:
        return _from_client.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a client's frame is no envelope: {error}") from error


def request_id_of(body: bytes) -> int | None:
    """The id of a Request whose rest cannot be decoded, or None where the frame is no Request.

    Values nested thousands deep defeat every decoder; their sender still gets an answer of its own.
    """
    head = _REQUEST_HEAD
    if not body.startswith(head):
        return None
    first = body[len(head)] if len(body) > len(head) else 0xFF
    size = 1 + {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(first, 0)
    try:
        return msgspec.msgpack.decode(body[len(head) : len(head) + size], type=_RequestId)
    except msgspec.MsgspecError:
        return None


def decode_from_worker(body: bytes) -> FromWorker:
    """Decode what a worker sent; `ProtocolError` where it is no envelope."""
    try:
        return _from_worker.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the worker's frame is no envelope: {error}") from error


def failure_of(request_id: int, error: StorageError, message_chars_max: int) -> Failure:
    """The Failure that carries a typed error."""
    code = error.wire_code if isinstance(error, DeclaredError) and error.wire_code else error.code
    wait = error.retry_after
    return Failure(
        request_id,
        code,
        _sendable(error.message, message_chars_max),
        error.retryable,
        error.outcome,
        None if wait is None else max(0, round(wait * 1000)),
        {
            _sendable(name, message_chars_max): _sendable_detail(value, message_chars_max)
            for name, value in error.details.items()
        },
    )


def _sendable(text: object, chars_max: int) -> str:
    # A text may quote a client's, or come from a host's code; what cannot be encoded is escaped, never lost.
    return str(text)[:chars_max].encode("utf-8", "backslashreplace").decode()


def _sendable_detail(value: Detail, chars_max: int) -> Detail:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        # Decimal text of a huge integer is refused by Python, or takes seconds.
        return value if -(2**63) <= value < 2**63 else hex(value)[:chars_max]
    return _sendable(value, chars_max)


def error_of(failure: Failure) -> StorageError:
    """The typed error that a Failure carries."""
    kind = error_class(failure.code) or DeclaredError
    wait = failure.retry_after_ms
    error = bare_error(kind, failure.message)
    error.retryable = failure.retryable
    error.outcome = failure.outcome
    error.retry_after = None if wait is None else wait / 1000
    error.details = failure.details
    if isinstance(error, DeclaredError):
        error.wire_code = failure.code
    return error
