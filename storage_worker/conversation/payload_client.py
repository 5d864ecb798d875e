"""The payload store in a client: it writes and reads the files itself, so that only references cross the pipe."""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

from ..client.client import Client
from ..client.terms import deadline_after, seconds_left
from ..protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RequestTooLargeError,
    ResultTooLargeError,
    StorageCorruptError,
)
from ..protocol.limits import INLINE_BYTES_MAX, MIB
from ..protocol.operation import Call
from . import payload_files as files
from . import payload_placing as placing
from .bounds import RETENTION_DEFAULT
from .canonical import canonical_json, preview_of
from .payload_check import CheckPosition, PayloadFinding, check_payloads
from .payload_files import CHUNK_BYTES, Folder
from .payload_sweep import GRACE_MS_DEFAULT, SweepPosition, Swept, sweep_payloads
from .payloads import Offer, locate_payload, name_of, offer_payload, payload_folder, place_payload
from .records import JSON, TEXT, Body, PayloadRef

BINARY = "application/octet-stream"

READ_BYTES_MAX = 64 * MIB
"""The largest body that is read whole unless the call allows more."""

R = TypeVar("R")


@runtime_checkable
class Readable(Protocol):
    """What a body can be read from: a file open for reading bytes."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes, none at the end."""
        ...


Source = bytes | bytearray | memoryview | str | Readable | Iterable[bytes]
"""A body: bytes, a text (stored as UTF-8), or what gives its bytes in parts."""


class PreparedText(NamedTuple):
    """A text as `admit` and the other operations take it: its body, and the preview that they take with it."""

    body: Body
    preview: str


def put(
    client: Client,
    body: Source,
    content_type: str | None = None,
    retention_class: str = RETENTION_DEFAULT,
    *,
    timeout: float | None = None,
) -> PayloadRef:
    """Write a body into the payload store, unless it is there, and give the reference to it.

    It stays for the grace time (an hour); an operation that stores the reference makes it last. `content_type` is
    `text/plain` for a text and `application/octet-stream` for bytes. Of a body that comes in parts a few MiB are held
    in memory. `timeout` is in seconds, for all of it.

    Raises `RequestTooLargeError` for a body over 256 MiB, `StorageFullError`, `InvalidRequestError` for a text or a
    name that UTF-8 cannot carry, `DeadlineExceededError`, and the errors of a call.
    """
    if content_type is None:
        content_type = TEXT if isinstance(body, str) else BINARY
    deadline_ns = deadline_after(timeout, client.limits)
    writing = _Writing(client, content_type, retention_class, deadline_ns)
    if isinstance(body, str | bytes | bytearray | memoryview):
        data = memoryview(_encoded(body) if isinstance(body, str) else body).cast("B")
        if len(data) <= files.GZIP_BYTES_MAX:
            return writing.put_small(data)
        return writing.put_large(data)
    parts = _parts(body)
    head = next(parts, b"")
    # A part is shorter than that only at the end.
    if len(head) <= files.GZIP_BYTES_MAX:
        return writing.put_small(head)
    return writing.put_stream(itertools.chain((head,), parts))


def put_json(
    client: Client, value: Any, retention_class: str = RETENTION_DEFAULT, *, timeout: float | None = None
) -> PayloadRef:
    """Put the canonical JSON text of a value; arguments and errors as of `put`."""
    text = canonical_json(value, "the body")
    return put(client, text, JSON, retention_class, timeout=timeout)


def prepare_text(
    client: Client, text: str, retention_class: str = RETENTION_DEFAULT, *, timeout: float | None = None
) -> PreparedText:
    """A text of any size as the operations take it: itself up to 16 KiB, else a reference; with its preview.

    Errors as of `put`.
    """
    if len(text) * 4 <= INLINE_BYTES_MAX or len(_encoded(text)) <= INLINE_BYTES_MAX:
        return PreparedText(text, preview_of(text))
    return PreparedText(put(client, text, TEXT, retention_class, timeout=timeout), preview_of(text))


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the body holds a lone surrogate, which UTF-8 cannot carry") from error


def _parts(body: Readable | Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of a body in parts of `CHUNK_BYTES` and a last one."""
    given = iter(lambda: body.read(CHUNK_BYTES), b"") if isinstance(body, Readable) else iter(body)
    gathered = bytearray()
    for part in given:
        if not isinstance(part, bytes | bytearray | memoryview):
            raise InvalidRequestError(f"a body comes in parts of bytes, not of {type(part).__name__}")
        gathered += part
        while len(gathered) >= CHUNK_BYTES:
            yield bytes(gathered[:CHUNK_BYTES])
            del gathered[:CHUNK_BYTES]
    yield bytes(gathered)


class _Writing:
    """One body on its way into the store, until a deadline (monotonic clock, ns)."""

    def __init__(self, client: Client, content_type: str, retention_class: str, deadline_ns: int) -> None:
        # Refused here rather than by the worker, after the body was written.
        files.name_of("0" * 64, content_type, retention_class)
        self._client = client
        self._content_type = content_type
        self._retention_class = retention_class
        self._deadline_ns = deadline_ns

    def put_small(self, body: bytes | memoryview) -> PayloadRef:
        """Put a body that is held in memory and packed."""
        sha256 = _sha256(body)
        offer = self._offer(sha256, len(body))
        if offer.ref is not None:
            return offer.ref
        with placing.temporary_file(Folder(offer.folder)) as file:
            file.write(placing.pack(body))
            return self._place(file, len(body), lambda: sha256)

    def put_large(self, body: memoryview) -> PayloadRef:
        """Put a body that is held in memory and stored as it is; it is hashed while the rest is done."""
        folder = Folder(self._call(payload_folder()))
        with ThreadPoolExecutor(1, "payload-hash") as helper, placing.temporary_file(folder) as file:
            hashing = helper.submit(_sha256, body)
            self._write((body[at : at + CHUNK_BYTES] for at in range(0, len(body), CHUNK_BYTES)), file)
            return self._place(file, len(body), hashing.result)

    def put_stream(self, parts: Iterable[bytes]) -> PayloadRef:
        """Put a body that is stored as it is while it comes, whose size shows at its end."""
        folder = Folder(self._call(payload_folder()))
        digest = hashlib.sha256()
        with ThreadPoolExecutor(1, "payload-hash") as helper, placing.temporary_file(folder) as file:
            size = self._write(parts, file, lambda part: helper.submit(digest.update, part))
            return self._place(file, size, digest.hexdigest)

    def _write(
        self,
        parts: Iterable[bytes | memoryview],
        file: placing.TemporaryFile,
        hashed: Callable[[bytes | memoryview], Future[None]] | None = None,
    ) -> int:
        """Write the parts, each while `hashed` has it hashed; the size of them all."""
        size = 0
        for part in parts:
            if time.monotonic_ns() >= self._deadline_ns:
                raise DeadlineExceededError(
                    "the deadline passed while the body was written; nothing refers to it yet",
                    details={"stage": "client"},
                )
            size += len(part)
            _check_size(size)
            hashing = None if hashed is None else hashed(part)
            file.write(part)
            if hashing is not None:
                hashing.result()
        return size

    def _place(self, file: placing.TemporaryFile, size: int, sha256: Callable[[], str]) -> PayloadRef:
        """Have the worker put the file into its place, and see that it took it for the same body."""
        try:
            ref = self._call(place_payload(file.name, size, self._content_type, self._retention_class))
        except StorageCorruptError as error:
            # A worker that was lost may have placed it before it could say so.
            found = self._offer(sha256(), size).ref if error.details.get("check") == "missing" else None
            if found is None:
                raise
            return found
        if ref.sha256 != sha256():
            raise files.damaged(
                msgspec.structs.replace(ref, sha256=sha256()),
                "digest",
                "what was written of it is another body",
            )
        return ref

    def _offer(self, sha256: str, size: int) -> Offer:
        return self._call(offer_payload(sha256, self._content_type, self._retention_class, size))

    def _call(self, call: Call[R]) -> R:
        return _call(self._client, call, self._deadline_ns)


def _sha256(body: bytes | memoryview) -> str:
    return hashlib.sha256(body).hexdigest()


def _check_size(size: int) -> None:
    if size > files.PAYLOAD_BYTES_MAX:
        raise RequestTooLargeError(
            f"the body is over the {files.PAYLOAD_BYTES_MAX} bytes that a payload may have",
            details={"payload_bytes_max": files.PAYLOAD_BYTES_MAX},
        )


def _call(client: Client, call: Call[R], deadline_ns: int) -> R:
    """Make a call with the time that is left."""
    return client.call(call, timeout=seconds_left(deadline_ns))


# Reading


def read(
    client: Client, ref: PayloadRef, *, bytes_max: int = READ_BYTES_MAX, timeout: float | None = None
) -> bytes:
    """A whole body, checked against its hash. `bytes_max` is how many bytes it may have, `timeout` in seconds.

    Raises `PayloadNotFoundError`, `ResultTooLargeError` before anything is read, `StorageCorruptError`.
    """
    with _opened(client, ref, timeout) as (descriptor, found):
        if found.bytes > bytes_max:
            raise ResultTooLargeError(
                f"the payload has {found.bytes} bytes, over the {bytes_max} that were allowed; read it as a stream",
                details={"payload_bytes": found.bytes, "bytes_max": bytes_max},
            )
        return files.read_whole(descriptor, found)


def read_text(
    client: Client, ref: PayloadRef, *, bytes_max: int = READ_BYTES_MAX, timeout: float | None = None
) -> str:
    """A whole body as a text; `InvalidRequestError` where it is no UTF-8, else as `read`."""
    body = read(client, ref, bytes_max=bytes_max, timeout=timeout)
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the payload {ref.sha256} is no text in UTF-8: {error}") from error


def stream(
    client: Client, ref: PayloadRef, *, chunk_bytes: int = CHUNK_BYTES, timeout: float | None = None
) -> Iterator[bytes]:
    """A body in order, at most `chunk_bytes` at a time; what was read is right only when the end was reached.

    The hash of a body over 512 KiB is known at its end, where `StorageCorruptError` is raised if it is not the
    recorded one. `timeout` is how many seconds finding the body may take. Raises `PayloadNotFoundError`,
    `InvalidRequestError` for less than a byte at a time.
    """
    if chunk_bytes < 1:
        raise InvalidRequestError(f"a stream gives at least 1 byte at a time, not {chunk_bytes}")
    with _opened(client, ref, timeout) as (descriptor, found):
        yield from files.read_chunks(descriptor, found, chunk_bytes)


def read_range(
    client: Client, ref: PayloadRef, offset: int, length: int, *, timeout: float | None = None
) -> bytes:
    """`length` bytes of a body from `offset` on: cut at its end, empty from there on. Its hash is not checked.

    Raises `InvalidRequestError` for a negative offset or a length below 1, `PayloadNotFoundError`,
    `StorageCorruptError`.
    """
    with _opened(client, ref, timeout) as (descriptor, found):
        return files.read_range(descriptor, found, offset, length)


@contextmanager
def _opened(client: Client, ref: PayloadRef, timeout: float | None) -> Iterator[tuple[int, PayloadRef]]:
    """The open file of a payload, and what is recorded of it."""
    deadline_ns = deadline_after(timeout, client.limits)
    located = _call(client, locate_payload(ref), deadline_ns)
    path = Folder(located.folder).path_of(name_of(ref))
    with files.opened(path, located.ref) as descriptor:
        yield descriptor, located.ref


# Upkeep


def sweep(
    client: Client, *, grace_ms: int = GRACE_MS_DEFAULT, timeout: float | None = None
) -> Iterator[Swept]:
    """Sweep the whole store; what each slice has removed. `timeout` is in seconds, for each slice.

    `grace_ms` as of `sweep_payloads`. Others' calls come in between slices.
    """
    position: SweepPosition | None = SweepPosition()
    while position is not None:
        swept = client.call(sweep_payloads(position, grace_ms), timeout=timeout)
        yield swept
        position = swept.next


def check(client: Client, *, timeout: float | None = None) -> Iterator[PayloadFinding]:
    """Check the whole store against its rows and the references to it; what is wrong, nothing where all is well.

    `timeout` is in seconds, for each slice.
    """
    position: CheckPosition | None = CheckPosition()
    while position is not None:
        checked = client.call(check_payloads(position), timeout=timeout)
        yield from checked.findings
        position = checked.next
