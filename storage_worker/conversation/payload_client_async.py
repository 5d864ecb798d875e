"""The payload store in an asyncio program; what is done to files is done in threads, so that no event loop waits.

Every function of `payload_client` is here, with `_async` behind its name: arguments, results and errors are the same,
and what is asked of the worker is awaited. A task may be cancelled at any moment: it leaves within the time that a
step takes, which writes a few MiB or reads one body, and what it had begun to write is removed by then; where a body
comes by plain reads, one of these belongs to a step. A step that finds all threads in use waits for one until its
call's deadline.
"""

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Protocol, TypeGuard

from ..client.aio import AsyncClient
from ..client.aio_threads import clean_up_in_thread, in_thread
from ..client.terms import deadline_after, seconds_left
from ..protocol.errors import StorageError
from . import payload_reading as reading
from .bounds import READ_BYTES_MAX, RETENTION_DEFAULT
from .canonical import canonical_json, is_inline, preview_of
from .payload_check import CheckPosition, PayloadFinding, check_payloads
from .payload_client import PreparedText
from .payload_files import CHUNK_BYTES
from .payload_reading import check_client
from .payload_sweep import GRACE_MS_DEFAULT, SweepPosition, Swept, sweep_payloads
from .payload_writing import (
    Asked,
    Gathering,
    Source,
    advance,
    check_deadline,
    checked_source,
    deadline_exceeded,
    fail,
    put_steps,
)
from .payloads import Located, locate_payload
from .records import JSON, TEXT, PayloadRef

_OTHERS = "for a Client there is storage_worker.conversation.payload_client"


class AsyncReadable(Protocol):
    """What a body is read from with `await`: a stream or a file of an event loop."""

    async def read(self, size: int, /) -> bytes:
        """At most so many bytes, none at the end."""
        ...


AsyncSource = Source | AsyncReadable | AsyncIterable[bytes]
"""A body as `put` takes it, or what is read with `await` or `async for`."""


async def put_async(
    client: AsyncClient,
    body: AsyncSource,
    content_type: str | None = None,
    retention_class: str = RETENTION_DEFAULT,
    *,
    timeout: float | None = None,
) -> PayloadRef:
    """See `put`. A body may also come by `await body.read(size)`, or where it has none by `async for`: one part when
    the one before it was written.

    One that comes by plain reads or iteration is read in threads. What is given must not change until the end. After a
    cancel the body may be in the store; without a reference to it, it is swept after the grace time.
    """
    check_client(client, AsyncClient, _OTHERS)
    deadline_ns = deadline_after(timeout, client.limits)
    awaited = _awaited(body)
    chunks = None if awaited is None else _AwaitedChunks(awaited, deadline_ns)
    given = checked_source(body) if awaited is None else None
    steps = put_steps(given, content_type, retention_class, deadline_ns)

    async def answer(asked: Asked) -> object:
        if asked is not None:
            return await client.call(asked, timeout=seconds_left(deadline_ns))
        return None if chunks is None else await chunks.take()

    # Outside: it leaves nothing to close, and many may be cancelled while they wait for it.
    asked = await in_thread(advance, steps, deadline_ns=deadline_ns)
    try:
        while not isinstance(asked, PayloadRef):
            try:
                answered = await answer(asked)
            except StorageError as error:
                asked = await in_thread(fail, steps, error, deadline_ns=deadline_ns)
            else:
                asked = await in_thread(advance, steps, answered, deadline_ns=deadline_ns)
    except (Exception, asyncio.CancelledError):
        await clean_up_in_thread(steps.close)
        raise
    return asked


def _awaited(body: AsyncSource) -> AsyncIterable[bytes] | None:
    """The parts of a body that is awaited; None for another one."""
    # First: a stream that is read by `async for` gives lines, and fails where one is long.
    if _is_read_by_await(body):
        return _Reads(body)
    return body if isinstance(body, AsyncIterable) else None


def _is_read_by_await(body: AsyncSource) -> TypeGuard[AsyncReadable]:
    return inspect.iscoroutinefunction(getattr(body, "read", None))


class _Reads:
    """What is read with `await`, for `async for`."""

    def __init__(self, body: AsyncReadable) -> None:
        self._body = body

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        part = await self._body.read(CHUNK_BYTES)
        if part == b"":
            raise StopAsyncIteration
        return part


class _AwaitedChunks:
    """A body that is awaited, in chunks of `CHUNK_BYTES` and a shorter one, until a deadline (monotonic clock, ns)."""

    def __init__(self, body: AsyncIterable[bytes], deadline_ns: int) -> None:
        self._given = aiter(body)
        self._gathering = Gathering()
        self._deadline_ns = deadline_ns
        self._is_over = False

    async def take(self) -> bytes:
        """The next chunk, empty at the end; `DeadlineExceededError` where it does not come in time."""
        waiting = asyncio.timeout(seconds_left(self._deadline_ns))
        try:
            async with waiting:
                while not (self._gathering.is_enough or self._is_over):
                    # Parts that come without any wait never let that end in time.
                    check_deadline(self._deadline_ns)
                    await self._gather()
        except TimeoutError as error:
            if not waiting.expired():
                raise
            raise deadline_exceeded() from error
        return self._gathering.take()

    async def _gather(self) -> None:
        try:
            part = await anext(self._given)
        except StopAsyncIteration:
            self._is_over = True
        else:
            self._gathering.add(part)


async def put_json_async(
    client: AsyncClient, value: Any, retention_class: str = RETENTION_DEFAULT, *, timeout: float | None = None
) -> PayloadRef:
    """See `put_json`."""
    # Not in a thread, where it would hold the interpreter's lock just as long.
    text = canonical_json(value, "the body")
    return await put_async(client, text, JSON, retention_class, timeout=timeout)


async def prepare_text_async(
    client: AsyncClient, text: str, retention_class: str = RETENTION_DEFAULT, *, timeout: float | None = None
) -> PreparedText:
    """See `prepare_text`."""
    if is_inline(text):
        return PreparedText(text, preview_of(text))
    ref = await put_async(client, text, TEXT, retention_class, timeout=timeout)
    return PreparedText(ref, preview_of(text))


# Reading


async def read_async(
    client: AsyncClient, ref: PayloadRef, *, bytes_max: int = READ_BYTES_MAX, timeout: float | None = None
) -> bytes:
    """See `read`."""
    located, deadline_ns = await _locate(client, ref, timeout)
    return await in_thread(reading.read_whole, located, ref, bytes_max, deadline_ns=deadline_ns)


async def read_text_async(
    client: AsyncClient, ref: PayloadRef, *, bytes_max: int = READ_BYTES_MAX, timeout: float | None = None
) -> str:
    """See `read_text`."""
    located, deadline_ns = await _locate(client, ref, timeout)
    return await in_thread(reading.read_text, located, ref, bytes_max, deadline_ns=deadline_ns)


async def stream_async(
    client: AsyncClient, ref: PayloadRef, *, chunk_bytes: int = CHUNK_BYTES, timeout: float | None = None
) -> AsyncIterator[bytes]:
    """See `stream`; read with `async for`. A part is read when it is asked for, none ahead.

    `timeout` is also how many seconds each part may wait for a thread to read it.
    """
    reading.check_chunk(chunk_bytes)
    located, _ = await _locate(client, ref, timeout)
    chunks = reading.read_chunks(located, ref, chunk_bytes)
    try:
        while chunk := await in_thread(
            lambda: next(chunks, b""), deadline_ns=deadline_after(timeout, client.limits)
        ):
            yield chunk
    finally:
        # Where the loop was closed meanwhile, the thread that has it ends it.
        if inspect.getgeneratorstate(chunks) != inspect.GEN_RUNNING:
            chunks.close()


async def read_range_async(
    client: AsyncClient, ref: PayloadRef, offset: int, length: int, *, timeout: float | None = None
) -> bytes:
    """See `read_range`."""
    located, deadline_ns = await _locate(client, ref, timeout)
    return await in_thread(reading.read_range, located, ref, offset, length, deadline_ns=deadline_ns)


async def _locate(client: AsyncClient, ref: PayloadRef, timeout: float | None) -> tuple[Located, int]:
    """Where a payload is, and the deadline of the whole call (monotonic clock, ns)."""
    check_client(client, AsyncClient, _OTHERS)
    deadline_ns = deadline_after(timeout, client.limits)
    return await client.call(locate_payload(ref), timeout=seconds_left(deadline_ns)), deadline_ns


# Upkeep


async def sweep_async(
    client: AsyncClient, *, grace_ms: int = GRACE_MS_DEFAULT, timeout: float | None = None
) -> AsyncIterator[Swept]:
    """See `sweep`; read with `async for`."""
    check_client(client, AsyncClient, _OTHERS)
    position: SweepPosition | None = SweepPosition()
    while position is not None:
        swept = await client.call(sweep_payloads(position, grace_ms), timeout=timeout)
        yield swept
        position = swept.next


async def check_async(client: AsyncClient, *, timeout: float | None = None) -> AsyncIterator[PayloadFinding]:
    """See `check`; read with `async for`."""
    check_client(client, AsyncClient, _OTHERS)
    position: CheckPosition | None = CheckPosition()
    while position is not None:
        checked = await client.call(check_payloads(position), timeout=timeout)
        for finding in checked.findings:
            yield finding
        position = checked.next
