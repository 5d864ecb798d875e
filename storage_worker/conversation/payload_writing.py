"""A body's way into the payload store, in steps between which the worker is asked; both clients take it.

A step only works on the body and on its file. Who asks the worker, and how that is waited for, is up to
`payload_client` and `payload_client_async`.
"""

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from ..protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RequestTooLargeError,
    StorageCorruptError,
    StorageError,
)
from ..protocol.operation import Call
from . import payload_files as files
from . import payload_placing as placing
from .bounds import STEP_BYTES
from .canonical import encoded
from .payload_files import CHUNK_BYTES, Folder
from .payloads import Offer, offer_payload, payload_folder, place_payload
from .records import TEXT, PayloadRef

BINARY = "application/octet-stream"

R = TypeVar("R")


@runtime_checkable
class Readable(Protocol):
    """What a body can be read from: a file open for reading bytes."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes, none at the end."""
        ...


Source = bytes | bytearray | memoryview | str | Readable | Iterable[bytes]
"""A body: bytes, a text (stored as UTF-8), or what gives its bytes in parts."""

Asked = Call[Any] | None
"""What a step ends with: a call that the worker is to answer, or None where the next chunk of the body is due."""

Steps = Generator[Asked, Any, R]


def checked_source(body: object) -> Source:
    """A body, or `InvalidRequestError` where it is nothing that one can be read from."""
    if isinstance(body, str | bytes | bytearray | memoryview | Readable | Iterable):
        return body
    raise InvalidRequestError(
        f"a body is bytes, a text, a file that is open for reading bytes, or what gives bytes in parts, no"
        f" {type(body).__name__}"
    )


def put_steps(
    body: Source | None, content_type: str | None, retention_class: str, deadline_ns: int
) -> Steps[PayloadRef]:
    """The steps that put a body, for `advance`; they end with the reference to it.

    They may run in different threads, one after the other. Where they are closed or dropped before the end, what was
    written is removed.

    Arguments: `body`, None for one whose chunks are given as answers: each of `CHUNK_BYTES`, then a shorter one and
    no bytes at all; `content_type`, None for that of the body's kind; `deadline_ns`, on the monotonic clock. Raises
    `InvalidRequestError` for a name that is no text or that UTF-8 cannot carry.
    """
    if content_type is None:
        content_type = TEXT if isinstance(body, str) else BINARY
    _check_label("content type", content_type)
    _check_label("retention class", retention_class)
    # Refused here rather than by the worker, after the body was written.
    files.name_of("0" * 64, content_type, retention_class)
    return _Writing(content_type, retention_class, deadline_ns).put(body)


def _check_label(what: str, given: object) -> None:
    if not isinstance(given, str):
        raise InvalidRequestError(f"the {what} of a body is a text, no {type(given).__name__}")


def advance(steps: Steps[R], answer: object = None) -> Asked | R:
    """Do the next step with the answer to the last one: a call's result, a chunk, or None to go on."""
    return _next(steps.send, answer)


def fail(steps: Steps[R], error: StorageError) -> Asked | R:
    """Do the next step with the error of the call; raises it where it cannot be mended."""
    return _next(steps.throw, error)


def _next(go_on: Callable[[Any], Asked], answer: object) -> Asked | Any:
    try:
        return go_on(answer)
    except StopIteration as end:
        return end.value


class _Writing:
    """One body on its way into the store, until a deadline (monotonic clock, ns)."""

    def __init__(self, content_type: str, retention_class: str, deadline_ns: int) -> None:
        self._content_type = content_type
        self._retention_class = retention_class
        self._deadline_ns = deadline_ns
        self._chunks: Iterator[bytes | memoryview] | None = None

    def put(self, body: Source | None) -> Steps[PayloadRef]:
        """Put a body, or with None one whose chunks are given."""
        if isinstance(body, str | bytes | bytearray | memoryview):
            data = _bytes_of(memoryview(encoded(body) if isinstance(body, str) else body))
            if len(data) <= files.GZIP_BYTES_MAX:
                return (yield from self._put_small(data))
            return (yield from self._put_large(data))
        if body is not None:
            self._chunks = _chunked(body, self._deadline_ns)
        head = yield from self._next_chunk()
        # A chunk is shorter than that only at the end.
        if len(head) <= files.GZIP_BYTES_MAX:
            return (yield from self._put_small(head))
        return (yield from self._put_stream(head))

    def _put_small(self, body: bytes | memoryview) -> Steps[PayloadRef]:
        """Put a body that is held in memory and packed."""
        sha256 = _sha256(body)
        offer = yield from self._offer(sha256, len(body))
        if offer.ref is not None:
            return offer.ref
        with placing.temporary_file(Folder(offer.folder)) as file:
            file.write(placing.pack(body))
            return (yield from self._place(file, len(body), lambda: sha256))

    def _put_large(self, body: memoryview) -> Steps[PayloadRef]:
        """Put a body that is held in memory and stored as it is; it is hashed while the rest is done."""
        self._chunks = (body[at : at + STEP_BYTES] for at in range(0, len(body), STEP_BYTES))
        folder = Folder((yield from _ask(payload_folder())))
        with placing.helper("payload-hash") as helper, placing.temporary_file(folder) as file:
            hashed = helper.start(_sha256, body)
            yield from self._write(file, (yield from self._next_chunk()))
            return (yield from self._place(file, len(body), hashed))

    def _put_stream(self, head: bytes | memoryview) -> Steps[PayloadRef]:
        """Put a body that is stored as it is while it comes, whose size shows at its end."""
        folder = Folder((yield from _ask(payload_folder())))
        digest = hashlib.sha256()
        with placing.helper("payload-hash") as helper, placing.temporary_file(folder) as file:
            size = yield from self._write(file, head, lambda part: helper.start(digest.update, part))
            return (yield from self._place(file, size, digest.hexdigest))

    def _next_chunk(self) -> Steps[bytes | memoryview]:
        """The next chunk of the body, empty at its end."""
        given: bytes = yield None
        return given if self._chunks is None else next(self._chunks, b"")

    def _write(
        self,
        file: placing.TemporaryFile,
        part: bytes | memoryview,
        hash_beside: Callable[[bytes | memoryview], Callable[[], None]] | None = None,
    ) -> Steps[int]:
        """Write a part and all that follow, each while `hash_beside` has it hashed; the size of them all."""
        size = 0
        while part:
            check_deadline(self._deadline_ns)
            size += len(part)
            _check_size(size)
            hashed = None if hash_beside is None else hash_beside(part)
            file.write(part)
            if hashed is not None:
                hashed()
            part = yield from self._next_chunk()
        return size

    def _place(self, file: placing.TemporaryFile, size: int, sha256: Callable[[], str]) -> Steps[PayloadRef]:
        """Have the worker put the file into its place, and see that it took it for the same body."""
        try:
            ref = yield from _ask(place_payload(file.name, size, self._content_type, self._retention_class))
        except StorageCorruptError as error:
            if error.details.get("check") != "missing":
                raise
            # A worker that was lost may have placed it before it could say so.
            found = yield from self._offer(sha256(), size)
            if found.ref is None:
                raise
            return found.ref
        if ref.sha256 != sha256():
            raise files.damaged(
                msgspec.structs.replace(ref, sha256=sha256()),
                "digest",
                "what was written of it is another body",
            )
        return ref

    def _offer(self, sha256: str, size: int) -> Steps[Offer]:
        return (yield from _ask(offer_payload(sha256, self._content_type, self._retention_class, size)))


def _ask(call: Call[R]) -> Steps[R]:
    answer: R = yield call
    return answer


def deadline_exceeded() -> DeadlineExceededError:
    """The error of a body that did not come, or could not be written, in time."""
    return DeadlineExceededError(
        "the deadline passed while the body was written; nothing refers to it yet",
        details={"stage": "client"},
    )


def check_deadline(deadline_ns: int) -> None:
    """Raise `DeadlineExceededError` where a deadline (monotonic clock, ns) is over."""
    if time.monotonic_ns() >= deadline_ns:
        raise deadline_exceeded()


def _bytes_of(view: memoryview) -> memoryview:
    """Its bytes, which are copied only where they do not lie side by side."""
    try:
        return view.cast("B")
    except (TypeError, ValueError):
        return memoryview(view.tobytes())


def _sha256(body: bytes | memoryview) -> str:
    return hashlib.sha256(body).hexdigest()


def _check_size(size: int) -> None:
    if size > files.PAYLOAD_BYTES_MAX:
        raise RequestTooLargeError(
            f"the body is over the {files.PAYLOAD_BYTES_MAX} bytes that a payload may have",
            details={"payload_bytes_max": files.PAYLOAD_BYTES_MAX},
        )


# Bodies that come in parts


class Gathering:
    """A body that comes in parts of any length, made into chunks of `CHUNK_BYTES`."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def is_enough(self) -> bool:
        """Whether there is a whole chunk to take."""
        return len(self._bytes) >= CHUNK_BYTES

    def add(self, part: object) -> None:
        """Add what came; `InvalidRequestError` where that is no bytes."""
        if not isinstance(part, bytes | bytearray | memoryview):
            raise InvalidRequestError(f"a body comes in parts of bytes, not of {type(part).__name__}")
        self._bytes += _bytes_of(memoryview(part))

    def take(self) -> bytes:
        """A whole chunk; at the end of the body what is left."""
        chunk = bytes(self._bytes[:CHUNK_BYTES])
        del self._bytes[:CHUNK_BYTES]
        return chunk


def _chunked(body: Readable | Iterable[bytes], deadline_ns: int) -> Iterator[bytes]:
    """The bytes of a body in chunks of `CHUNK_BYTES` and a last one, until a deadline (monotonic clock, ns)."""
    gathering = Gathering()
    for part in iter(lambda: body.read(CHUNK_BYTES), b"") if isinstance(body, Readable) else body:
        # Small parts, or empty ones, make no chunk for long.
        check_deadline(deadline_ns)
        gathering.add(part)
        while gathering.is_enough:
            yield gathering.take()
    yield gathering.take()
