"""The payload store in a client: it writes and reads the files itself, so that only references cross the pipe."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

from ..client.client import Client
from ..client.terms import deadline_after, seconds_left
from ..protocol.errors import StorageError
from . import payload_reading as reading
from .bounds import READ_BYTES_MAX, RETENTION_DEFAULT
from .canonical import canonical_json, is_inline, preview_of
from .payload_check import CheckPosition, PayloadFinding, check_payloads
from .payload_files import CHUNK_BYTES
from .payload_reading import check_client
from .payload_sweep import GRACE_MS_DEFAULT, SweepPosition, Swept, sweep_payloads
from .payload_writing import Source, advance, checked_source, fail, put_steps
from .payloads import Located, locate_payload
from .records import JSON, TEXT, Body, PayloadRef

_OTHERS = "for an AsyncClient there is storage_worker.conversation.payload_client_async"


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

    Raises `RequestTooLargeError` for a body over 256 MiB, `StorageFullError`, `DatabasePathError` where it cannot be
    written, `InvalidRequestError` for a text or a name that UTF-8 cannot carry, for what is no body and for what is no
    `Client`, `DeadlineExceededError`, and the errors of a call.
    """
    check_client(client, Client, _OTHERS)
    deadline_ns = deadline_after(timeout, client.limits)
    with closing(put_steps(checked_source(body), content_type, retention_class, deadline_ns)) as steps:
        asked = advance(steps)
        while not isinstance(asked, PayloadRef):
            try:
                answer = None if asked is None else client.call(asked, timeout=seconds_left(deadline_ns))
            except StorageError as error:
                asked = fail(steps, error)
            else:
                asked = advance(steps, answer)
        return asked


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
    if is_inline(text):
        return PreparedText(text, preview_of(text))
    return PreparedText(put(client, text, TEXT, retention_class, timeout=timeout), preview_of(text))


# Reading


def read(
    client: Client, ref: PayloadRef, *, bytes_max: int = READ_BYTES_MAX, timeout: float | None = None
) -> bytes:
    """A whole body, checked against its hash. `bytes_max` is how many bytes it may have, `timeout` in seconds.

    Raises `PayloadNotFoundError`, `ResultTooLargeError` before anything is read, `StorageCorruptError`.
    """
    located = _locate(client, ref, timeout)
    return reading.read_whole(located, ref, bytes_max)


def read_text(
    client: Client, ref: PayloadRef, *, bytes_max: int = READ_BYTES_MAX, timeout: float | None = None
) -> str:
    """A whole body as a text; `InvalidRequestError` where it is no UTF-8, else as `read`."""
    located = _locate(client, ref, timeout)
    return reading.read_text(located, ref, bytes_max)


def stream(
    client: Client, ref: PayloadRef, *, chunk_bytes: int = CHUNK_BYTES, timeout: float | None = None
) -> Iterator[bytes]:
    """A body in order, at most `chunk_bytes` at a time; what was read is right only when the end was reached.

    The hash of a body over 512 KiB is known at its end, where `StorageCorruptError` is raised if it is not the
    recorded one. `timeout` is how many seconds finding the body may take. Raises `PayloadNotFoundError`,
    `InvalidRequestError` for less than a byte at a time.
    """
    reading.check_chunk(chunk_bytes)
    located = _locate(client, ref, timeout)
    yield from reading.read_chunks(located, ref, chunk_bytes)


def read_range(
    client: Client, ref: PayloadRef, offset: int, length: int, *, timeout: float | None = None
) -> bytes:
    """`length` bytes of a body from `offset` on: cut at its end, empty from there on. Its hash is not checked.

    Raises `InvalidRequestError` for a negative offset or a length below 1, `PayloadNotFoundError`,
    `StorageCorruptError`.
    """
    located = _locate(client, ref, timeout)
    return reading.read_range(located, ref, offset, length)


def _locate(client: Client, ref: PayloadRef, timeout: float | None) -> Located:
    check_client(client, Client, _OTHERS)
    return client.call(locate_payload(ref), timeout=timeout)


# Upkeep


def sweep(
    client: Client, *, grace_ms: int = GRACE_MS_DEFAULT, timeout: float | None = None
) -> Iterator[Swept]:
    """Sweep the whole store; what each slice has removed. `timeout` is in seconds, for each slice.

    `grace_ms` as of `sweep_payloads`. Others' calls come in between slices.
    """
    check_client(client, Client, _OTHERS)
    position: SweepPosition | None = SweepPosition()
    while position is not None:
        swept = client.call(sweep_payloads(position, grace_ms), timeout=timeout)
        yield swept
        position = swept.next


def check(client: Client, *, timeout: float | None = None) -> Iterator[PayloadFinding]:
    """Check the whole store against its rows and the references to it; what is wrong, nothing where all is well.

    `timeout` is in seconds, for each slice.
    """
    check_client(client, Client, _OTHERS)
    position: CheckPosition | None = CheckPosition()
    while position is not None:
        checked = client.call(check_payloads(position), timeout=timeout)
        yield from checked.findings
        position = checked.next
