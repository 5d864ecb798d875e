"""The payload client for event loops: the same as the other one, and clean whenever a task is cancelled."""

import asyncio
import gc
import hashlib
import inspect
import io
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import storage_worker as sw
from storage_worker import conversation
from storage_worker.client.aio_threads import THREADS_COUNT_MAX, in_thread
from storage_worker.conversation import PayloadNotFoundError, payload_client, payload_client_async
from storage_worker.conversation import payload_files as files
from storage_worker.conversation import payload_placing as placing
from storage_worker.conversation.payload_client_async import (
    check_async,
    prepare_text_async,
    put_async,
    put_json_async,
    read_async,
    read_range_async,
    read_text_async,
    stream_async,
    sweep_async,
)
from storage_worker.conversation.payload_files import CHUNK_BYTES, GZIP_BYTES_MAX
from storage_worker.conversation.payload_writing import Source, advance, put_steps
from storage_worker.conversation.records import PayloadRef
from storage_worker.protocol.operation import Call
from tests.client_async.conftest import Run
from tests.client_async.peers import turns, until
from tests.conversation.payload_places import Payloads, in_child, status_of
from tests.conversation.payload_store import hold

MIB = 2**20

SIZES = (0, 1, 20_000, GZIP_BYTES_MAX, GZIP_BYTES_MAX + 1, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 7)

NOWHERE = PayloadRef("0" * 64, "text/plain", "test", 1, 21, "gzip")


Work = Callable[[sw.AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture
def serve(store: Payloads, run: Run[None]) -> Callable[[Work], None]:
    """Runs a test with a client of its own; nothing half-written is there afterwards."""

    def serve(work: Work) -> None:
        async def main() -> None:
            async with await store.worker.connect_async() as client:
                await work(client)

        run(main())
        assert store.temporaries() == []

    return serve


_seeds = itertools.count()


def new_body(size: int) -> bytes:
    """Bytes that do not shrink, and that no other test of the module has put."""
    return hashlib.shake_256(b"%d" % next(_seeds)).digest(size)


async def held(client: sw.AsyncClient, body: Any) -> PayloadRef:
    ref = await put_async(client, body)
    await client.call(hold(ref))
    return ref


async def parts_of(body: bytes, part_bytes: int) -> AsyncIterator[bytes]:
    for at in range(0, len(body), part_bytes):
        await asyncio.sleep(0)
        yield body[at : at + part_bytes]
        yield b""


# The same as the other client


@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_comes_back(store: Payloads, serve: Callable[[Work], None], size: int) -> None:
    body = new_body(size)

    async def main(client: sw.AsyncClient) -> None:
        ref = await held(client, body)
        assert (ref.bytes, ref.sha256) == (size, hashlib.sha256(body).hexdigest())
        assert ref.encoding == ("gzip" if size <= GZIP_BYTES_MAX else "identity")
        assert store.file(ref).stat().st_size == ref.stored_bytes
        assert await read_async(client, ref) == body
        for chunk_bytes in (size // 3 + 1, CHUNK_BYTES):
            chunks = [chunk async for chunk in stream_async(client, ref, chunk_bytes=chunk_bytes)]
            assert b"".join(chunks) == body
            assert all(0 < len(chunk) <= chunk_bytes for chunk in chunks)
        assert payload_client.read(store.client, ref) == body

    serve(main)


@pytest.mark.parametrize("size", SIZES)
def test_however_it_comes_it_is_one_payload(
    store: Payloads, serve: Callable[[Work], None], size: int
) -> None:
    body = new_body(size)

    async def main(client: sw.AsyncClient) -> None:
        reader = asyncio.StreamReader(limit=8 * MIB)
        reader.feed_data(body)
        reader.feed_eof()
        small = (body[at : at + 10_000] for at in range(0, size, 10_000))
        sources = (
            body, bytearray(body), memoryview(body), io.BytesIO(body), small, iter([b"", body, b""]), reader,
            parts_of(body, 10_000), parts_of(body, CHUNK_BYTES), parts_of(body, size + 1),
        )  # fmt: skip
        ref = store.put(body, "default")
        inode = store.file(ref).stat().st_ino
        for source in sources:
            assert await put_async(client, source, retention_class="default") == ref
        assert store.file(ref).stat().st_ino == inode

    serve(main)


def test_texts_and_json(store: Payloads, serve: Callable[[Work], None]) -> None:
    async def main(client: sw.AsyncClient) -> None:
        text = "a\0b é \U0001f600 " * 100_000
        ref = await held(client, text)
        assert ref.content_type == "text/plain"
        assert await read_text_async(client, ref) == text
        value = {"b": [1, None], "a": "é"}
        kept = await put_json_async(client, value, "kept")
        assert kept == payload_client.put_json(store.client, value, "kept")
        await client.call(hold(kept))
        assert await read_text_async(client, kept) == '{"a":"é","b":[1,null]}'
        for short in ("short", "x" * 16_384, "é" * 8_192):
            assert await prepare_text_async(client, short) == payload_client.prepare_text(store.client, short)
        for long in ("x" * 16_385, "é" * 8_193):
            body, preview = await prepare_text_async(client, long)
            assert isinstance(body, PayloadRef)
            assert (body, preview) == payload_client.prepare_text(store.client, long)
            await client.call(conversation.append("prepared", "note", body=body, preview=preview))
            assert await read_text_async(client, body) == long

    serve(main)


def test_two_retention_classes_are_two_payloads(store: Payloads, serve: Callable[[Work], None]) -> None:
    async def main(client: sw.AsyncClient) -> None:
        body = new_body(30_000)
        short, long = [await put_async(client, body, retention_class=label) for label in ("short", "long")]
        assert short.sha256 == long.sha256
        assert store.file(short) != store.file(long)
        await client.call(hold(long))
        assert await read_async(client, long) == body
        with pytest.raises(PayloadNotFoundError):
            await read_async(client, short)

    serve(main)


@pytest.mark.parametrize("size", [1000, GZIP_BYTES_MAX + 1000])
def test_ranges(serve: Callable[[Work], None], size: int) -> None:
    body = new_body(size)

    async def main(client: sw.AsyncClient) -> None:
        ref = await held(client, body)
        for offset, length in ((0, 1), (0, size + 1), (size - 1, 9), (size // 2, 100), (size, 1), (2**62, 1)):
            assert await read_range_async(client, ref, offset, length) == body[offset : offset + length]

    serve(main)


async def drained(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def outcome(error: BaseException) -> tuple[Any, ...]:
    found = [type(error), str(error)]
    if isinstance(error, sw.StorageError):
        found += [error.code, error.outcome, error.retryable, error.details]
    return tuple(found)


def failing() -> Iterator[bytes]:
    yield bytes(2 * MIB)
    raise ZeroDivisionError


REFUSED: dict[str, tuple[str, Callable[[PayloadRef], tuple[Any, ...]], dict[str, Any]]] = {
    "no such payload": ("read", lambda _: (NOWHERE,), {}),
    "no such payload, as a stream": ("stream", lambda _: (NOWHERE,), {}),
    "a negative range": ("read_range", lambda ref: (ref, -1, 1), {}),
    "an empty range": ("read_range", lambda ref: (ref, 0, 0), {}),
    "too large": ("read", lambda ref: (ref,), {"bytes_max": 10}),
    "no text": ("read_text", lambda ref: (ref,), {}),
    "a stream of nothing": ("stream", lambda ref: (ref,), {"chunk_bytes": 0}),
    "a lone surrogate": ("put", lambda _: ("\ud800",), {}),
    "a large text with one": ("prepare_text", lambda _: ("\ud800" * 20_000,), {}),
    "a short text with one": ("prepare_text", lambda _: ("\ud800" * 10_000,), {}),
    "one that stands in a row": ("prepare_text", lambda _: ("\ud800" * 1_000,), {}),
    "a type with one": ("put", lambda _: (b"x", "\ud800"), {}),
    "a type that is too long": ("put", lambda _: (bytes(MIB), "x" * 1000), {}),
    "no JSON": ("put_json", lambda _: (float("nan"),), {}),
    "parts that are no bytes": ("put", lambda _: ([b"x", 1],), {}),
    "a file of text": ("put", lambda _: (io.StringIO("text"),), {}),
    "no time": ("put", lambda _: (b"x",), {"timeout": 0}),
    "a time that is too long": ("put", lambda _: (b"x",), {"timeout": 1e6}),
    "a body that fails": ("put", lambda _: (failing(),), {}),
    "a body over the largest": ("put", lambda _: (bytes(4 * MIB + 1),), {}),
    "a stream over the largest": ("put", lambda _: (itertools.repeat(bytes(MIB)),), {}),
    "a grace time that is none": ("sweep", lambda _: (), {"grace_ms": "long"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_refused_alike(
    store: Payloads, serve: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(files, "PAYLOAD_BYTES_MAX", 4 * MIB)
    name, arguments, options = REFUSED[what]

    async def main(client: sw.AsyncClient) -> None:
        ref = await held(client, b"\xff" * 2000)
        with pytest.raises((sw.StorageError, ZeroDivisionError)) as expected:
            list(getattr(payload_client, name)(store.client, *arguments(ref), **options))
        work = getattr(payload_client_async, f"{name}_async")(client, *arguments(ref), **options)
        with pytest.raises(type(expected.value)) as found:
            await (drained(work) if inspect.isasyncgen(work) else work)
        assert outcome(found.value) == outcome(expected.value)
        assert await read_async(client, ref) == b"\xff" * 2000

    serve(main)


@pytest.mark.parametrize("size", [30_000, 3 * MIB])
def test_damage_is_told_alike(store: Payloads, serve: Callable[[Work], None], size: int) -> None:
    async def main(client: sw.AsyncClient) -> None:
        body = new_body(size)
        ref = await held(client, body)
        with store.file(ref).open("r+b") as file:
            file.seek(-20, os.SEEK_END)
            file.write(bytes(20))
        for work in (
            read_async(client, ref),
            read_text_async(client, ref),
            drained(stream_async(client, ref)),
        ):
            with pytest.raises(sw.StorageCorruptError) as found:
                await work
            with pytest.raises(sw.StorageCorruptError) as expected:
                payload_client.read(store.client, ref)
            assert outcome(found.value) == outcome(expected.value)
        store.file(ref).unlink()
        findings = [finding async for finding in check_async(client)]
        assert findings == store.findings()
        assert store.checks(ref) == ["missing"]
        assert await put_async(client, body) == ref
        assert await drained(check_async(client)) == []

    serve(main)


def test_a_sweep(store: Payloads, serve: Callable[[Work], None]) -> None:
    async def main(client: sw.AsyncClient) -> None:
        refs = [await put_async(client, new_body(100)) for _ in range(3)]
        kept = await held(client, new_body(100))
        store.age(*refs, kept)
        slices = [swept async for swept in sweep_async(client)]
        assert sum(swept.files for swept in slices) == len(refs)
        assert slices[-1].next is None
        assert [store.file(ref).exists() for ref in (*refs, kept)] == [False, False, False, True]

    serve(main)


@pytest.mark.parametrize("is_iterable", [True, False])
def test_what_is_read_by_await(serve: Callable[[Work], None], *, is_iterable: bool) -> None:
    """A stream's lines, which are what `async for` gives, may be longer than it takes."""

    class Readable:
        def __init__(self, reader: asyncio.StreamReader) -> None:
            self.read = reader.read

    async def main(client: sw.AsyncClient) -> None:
        for size in (0, 1000, 3 * MIB):
            body = bytes(size)
            reader = asyncio.StreamReader()
            reader.feed_data(body)
            reader.feed_eof()
            ref = await put_async(client, reader if is_iterable else Readable(reader))
            assert ref == await put_async(client, body)

    serve(main)


def test_an_awaited_body_in_small_parts_has_a_deadline(run: Run[None]) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"x"
        yield b""

    async def main() -> None:
        with pytest.raises(sw.DeadlineExceededError):
            await payload_client_async._AwaitedChunks(parts(), 0).take()

    run(main())


CALLS: dict[str, Callable[[PayloadRef], tuple[Any, ...]]] = {
    "put": lambda _: (b"x",),
    "put_json": lambda _: ([],),
    "prepare_text": lambda _: ("x" * 20_000,),
    "read": lambda ref: (ref,),
    "read_text": lambda ref: (ref,),
    "read_range": lambda ref: (ref, 0, 1),
    "stream": lambda ref: (ref,),
    "sweep": lambda _: (),
    "check": lambda _: (),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_client_of_the_other_kind_is_refused(
    store: Payloads, serve: Callable[[Work], None], name: str
) -> None:
    async def main(client: sw.AsyncClient) -> None:
        arguments = CALLS[name](await held(client, b"of the other kind"))
        with pytest.raises(sw.InvalidRequestError, match=r"payload_client_async$"):
            list(getattr(payload_client, name)(client, *arguments))
        work = getattr(payload_client_async, f"{name}_async")(store.client, *arguments)
        with pytest.raises(sw.InvalidRequestError, match=r"payload_client$"):
            await (drained(work) if inspect.isasyncgen(work) else work)

    serve(main)


def test_both_clients_take_the_same() -> None:
    names = [
        name
        for name, function in inspect.getmembers(payload_client, inspect.isfunction)
        if function.__module__ == payload_client.__name__ and not name.startswith("_")
    ]
    renamed = {"Client": "AsyncClient", "Source": "AsyncSource", "Iterator": "AsyncIterator"}
    source = {str(Source): "Source", str(payload_client_async.AsyncSource): "AsyncSource"}

    def text(annotation: object) -> str:
        found = source.get(str(annotation)) or inspect.formatannotation(annotation)
        return re.sub(r"[\w.]+\.(?=\w)", "", found)

    def as_async(annotation: object) -> str:
        return re.sub(r"\w+", lambda word: renamed.get(word[0], word[0]), text(annotation))

    assert len(names) > 8
    for name in names:
        ours = inspect.signature(getattr(payload_client, name))
        theirs = inspect.signature(getattr(payload_client_async, f"{name}_async"))
        assert [
            (each.name, each.kind, each.default, text(each.annotation)) for each in theirs.parameters.values()
        ] == [
            (each.name, each.kind, each.default, as_async(each.annotation))
            for each in ours.parameters.values()
        ]
        assert text(theirs.return_annotation) == as_async(ours.return_annotation)


@pytest.mark.parametrize(
    ("program", "loaded"),
    [
        ("import storage_worker.conversation as c; c.prepare_text", {"asyncio": False}),
        (
            "from storage_worker.conversation.payload_client_async import prepare_text_async",
            {"asyncio": True},
        ),
    ],
)
def test_what_an_import_loads(program: str, loaded: dict[str, bool]) -> None:
    program += "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert {name: name in modules for name in loaded} == loaded
    assert not modules & {"apsw", "sqlite3", "storage_worker.worker", "storage_worker.serving"}


# Side by side


class Halt:
    """Holds the thread that first does a step of writing, until it is let go on."""

    def __init__(self, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._step = step
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self.go_on = threading.Event()
        monkeypatch.setattr(placing, "reached", self._hold)

    def _hold(self, step: str) -> None:
        with self._lock:
            is_first = step == self._step and not self._reached.is_set()
            if is_first:
                self._reached.set()
        if is_first:
            assert self.go_on.wait(60)

    async def reached(self) -> None:
        await until(self._reached.is_set)


BODIES: dict[str, Callable[[bytes], Any]] = {
    "in memory": lambda body: body,
    "a file": io.BytesIO,
    "awaited": lambda body: parts_of(body, 100_000),
}

CASES = [(20_000, "in memory"), *((3 * MIB, how) for how in BODIES)]


@pytest.mark.parametrize(("size", "how"), CASES)
def test_others_go_on_while_a_file_is_written(
    store: Payloads, serve: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch, size: int, how: str
) -> None:
    halt = Halt("written", monkeypatch)

    async def main(client: sw.AsyncClient) -> None:
        body = new_body(size)
        task = asyncio.create_task(put_async(client, BODIES[how](body)))
        await halt.reached()
        assert (await client.query("select 1")).scalar() == 1
        other = await held(client, new_body(2 * MIB))
        assert len([chunk async for chunk in stream_async(client, other)]) == 2
        assert len(store.temporaries()) == 1
        halt.go_on.set()
        ref = await task
        await client.call(hold(ref))
        assert await read_async(client, ref) == body

    serve(main)


def test_a_source_that_blocks_holds_up_its_own_put_only(serve: Callable[[Work], None]) -> None:
    asked, given = threading.Event(), threading.Event()

    def source() -> Iterator[bytes]:
        yield bytes(MIB)
        asked.set()
        assert given.wait(60)
        yield bytes(MIB)

    async def main(client: sw.AsyncClient) -> None:
        task = asyncio.create_task(put_async(client, source()))
        await until(asked.is_set)
        assert (await client.query("select 1")).scalar() == 1
        given.set()
        assert (await task).bytes == 2 * MIB

    serve(main)


def test_more_puts_than_threads(serve: Callable[[Work], None]) -> None:
    async def main(client: sw.AsyncClient) -> None:
        bodies = [new_body(size) for size in range(MIB - 500_000, MIB + 500_000, 40_000)]
        assert len(bodies) > 2 * THREADS_COUNT_MAX
        refs = await asyncio.gather(*(held(client, body) for body in bodies))
        assert await asyncio.gather(*(read_async(client, ref) for ref in refs)) == bodies

    serve(main)


def test_copies_within_the_store_do_not_wait_for_each_other(serve: Callable[[Work], None]) -> None:
    """What reads a body in order to write it needs a thread for each, though not both at once."""

    async def main(client: sw.AsyncClient) -> None:
        refs = [await held(client, new_body(2 * MIB)) for _ in range(2 * THREADS_COUNT_MAX)]
        copies = await asyncio.gather(
            *(put_async(client, stream_async(client, ref), retention_class="copies") for ref in refs)
        )
        assert [copy.sha256 for copy in copies] == [ref.sha256 for ref in refs]

    serve(main)


def test_a_stream_reads_nothing_ahead(serve: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        asked.append((descriptor, offset))
        return real(descriptor, length, offset)

    real = os.pread

    async def main(client: sw.AsyncClient) -> None:
        ref = await held(client, new_body(3 * MIB))
        monkeypatch.setattr(os, "pread", pread)
        async with aclosing(stream_async(client, ref)) as chunks:  # type: ignore[type-var]
            for place in range(2):
                assert len(await anext(chunks)) == MIB
                assert [offset for _, offset in asked] == [at * MIB for at in range(place + 1)]
                await turns(3)
        # Left in the middle it has closed its file.
        assert_closed(asked[0][0])

    serve(main)


def assert_closed(descriptor: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# Cancelled, and other ends before the time


async def is_cancelled(task: asyncio.Task[Any]) -> bool:
    await asyncio.wait([task])
    return task.cancelled()


def placed(store: Payloads, body: bytes) -> list[Path]:
    """The files that hold a body."""
    return list(Path(store.folder.objects).glob(f"*/{hashlib.sha256(body).hexdigest()}-*"))


async def check_whole(store: Payloads, client: sw.AsyncClient, body: bytes) -> None:
    """Nothing of a body that was not put is there, and it can be put now."""
    assert store.temporaries() == []
    assert await drained(check_async(client)) == []
    ref = await held(client, body)
    assert await read_async(client, ref) == body


@pytest.mark.parametrize("step", ["made", "written"])
@pytest.mark.parametrize(("size", "how"), CASES)
def test_a_put_is_cancelled_while_its_file_is_written(
    store: Payloads,
    serve: Callable[[Work], None],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    how: str,
    step: str,
) -> None:
    halt = Halt(step, monkeypatch)
    body = new_body(size)

    async def main(client: sw.AsyncClient) -> None:
        task = asyncio.create_task(put_async(client, BODIES[how](body)))
        await halt.reached()
        assert len(store.temporaries()) == 1
        task.cancel()
        await turns(3)
        assert not task.done()
        halt.go_on.set()
        assert await is_cancelled(task)
        assert store.temporaries() == []
        assert placed(store, body) == []
        await check_whole(store, client, body)

    serve(main)


def test_a_put_is_cancelled_while_its_source_is_awaited(
    store: Payloads, serve: Callable[[Work], None]
) -> None:
    async def main(client: sw.AsyncClient) -> None:
        waits, ended = asyncio.Event(), asyncio.Event()

        async def source() -> AsyncIterator[bytes]:
            try:
                yield bytes(2 * MIB)
                waits.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        task = asyncio.create_task(put_async(client, source()))
        await waits.wait()
        assert len(store.temporaries()) == 1
        task.cancel()
        assert await is_cancelled(task)
        assert ended.is_set()
        await check_whole(store, client, bytes(2 * MIB))

    serve(main)


class Intercepted:
    """An asynchronous client that stops at one operation: before it is called, or when it was answered."""

    def __init__(self, client: sw.AsyncClient, name: str, *, is_answered: bool) -> None:
        self._call = client.call
        self._name = name
        self._is_answered = is_answered
        self.reached = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, call: Call[Any], **options: Any) -> Any:
        is_it = call.operation.name.endswith(self._name) and not self.reached.is_set()
        if not is_it:
            return await self._call(call, **options)
        if self._is_answered:
            await self._call(call, **options)
        self.reached.set()
        if self.error is not None:
            raise self.error
        return await asyncio.Event().wait()


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize(
    ("size", "name"),
    [
        (1000, "offer_payload"),
        (1000, "place_payload"),
        (2 * MIB, "payload_folder"),
        (2 * MIB, "place_payload"),
    ],
)
def test_a_put_is_cancelled_while_the_worker_is_asked(
    store: Payloads,
    serve: Callable[[Work], None],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    name: str,
    *,
    is_answered: bool,
) -> None:
    body = new_body(size)

    async def main(client: sw.AsyncClient) -> None:
        intercepted = Intercepted(client, name, is_answered=is_answered)
        monkeypatch.setattr(client, "call", intercepted)
        task = asyncio.create_task(put_async(client, body))
        await intercepted.reached.wait()
        task.cancel()
        assert await is_cancelled(task)
        assert len(placed(store, body)) == (is_answered and name == "place_payload")
        await check_whole(store, client, body)

    serve(main)


@pytest.mark.parametrize("size", [20_000, 2 * MIB])
def test_a_put_is_cancelled_at_any_moment(store: Payloads, serve: Callable[[Work], None], size: int) -> None:
    async def main(client: sw.AsyncClient) -> None:
        for count in range(40):
            body = new_body(size)
            task = asyncio.create_task(put_async(client, body))
            await turns(count * count // 4)
            task.cancel()
            if not await is_cancelled(task):
                assert task.result().sha256 == hashlib.sha256(body).hexdigest()
            assert store.temporaries() == []
        await check_whole(store, client, new_body(size))

    serve(main)


@asynccontextmanager
async def every_turn_taken(client: sw.AsyncClient) -> AsyncIterator[None]:
    """Puts whose sources give nothing have all the threads meanwhile."""
    lock, count, go_on = threading.Lock(), itertools.count(1), threading.Event()
    waiting = 0

    def source() -> Iterator[bytes]:
        nonlocal waiting
        with lock:
            waiting = next(count)
        assert go_on.wait(60)
        yield b"at last"

    tasks = [asyncio.create_task(put_async(client, source())) for _ in range(THREADS_COUNT_MAX)]
    try:
        await until(lambda: waiting == THREADS_COUNT_MAX)
        yield
        assert not any(task.done() for task in tasks)
    finally:
        go_on.set()
        await asyncio.gather(*tasks)


class Endless:
    """A body of 3 MiB so far, in the middle of which its put waits for more, or with `go_on` for its turn."""

    def __init__(self) -> None:
        self.waits, self.go_on = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield bytes(3 * MIB)
        self.waits.set()
        await self.go_on.wait()
        while True:
            yield bytes(MIB)


def test_no_turn_comes_in_time(store: Payloads, serve: Callable[[Work], None]) -> None:
    async def main(client: sw.AsyncClient) -> None:
        body = new_body(2 * MIB)
        ref = await held(client, body)
        endless = Endless()
        begun = asyncio.create_task(put_async(client, endless, timeout=2))
        await endless.waits.wait()
        async with every_turn_taken(client):
            endless.go_on.set()
            late: list[Awaitable[object]] = [
                begun,
                put_async(client, new_body(1000), timeout=1),
                put_async(client, io.BytesIO(new_body(2 * MIB)), timeout=1),
                read_async(client, ref, timeout=1),
                read_text_async(client, ref, timeout=1),
                read_range_async(client, ref, 0, 1, timeout=1),
                drained(stream_async(client, ref, timeout=1)),
            ]
            errors = await asyncio.gather(*late, return_exceptions=True)
            for error in errors:
                assert isinstance(error, sw.DeadlineExceededError)
                assert "threads" in error.message
                assert error.details == {"stage": "client"}
            assert store.temporaries() == []
        assert await read_async(client, ref) == body

    serve(main)


def test_the_next_part_of_a_stream_has_no_turn_in_time(serve: Callable[[Work], None]) -> None:
    async def main(client: sw.AsyncClient) -> None:
        ref = await held(client, new_body(3 * MIB))
        chunks = stream_async(client, ref, timeout=1)
        assert len(await anext(chunks)) == MIB
        async with every_turn_taken(client):
            with pytest.raises(sw.DeadlineExceededError, match="threads"):
                await anext(chunks)

    serve(main)


@pytest.mark.parametrize("is_turn_awaited", [False, True])
def test_a_cancelled_put_needs_no_turn_to_leave(
    store: Payloads, serve: Callable[[Work], None], *, is_turn_awaited: bool
) -> None:
    async def main(client: sw.AsyncClient) -> None:
        endless = Endless()
        task = asyncio.create_task(put_async(client, endless))
        await endless.waits.wait()
        assert len(store.temporaries()) == 1
        async with every_turn_taken(client):
            if is_turn_awaited:
                endless.go_on.set()
                await turns(3)
            fresh = asyncio.create_task(put_async(client, new_body(2 * MIB)))
            await turns(3)
            for each in (task, fresh):
                each.cancel()
                assert await is_cancelled(each)
            assert store.temporaries() == []

    serve(main)


def test_a_put_is_cancelled_again_while_it_cleans_up(
    store: Payloads, serve: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    removing, go_on = threading.Event(), threading.Event()

    def unlink(path: str) -> None:
        removing.set()
        assert go_on.wait(60)
        real(path)

    real = os.unlink

    async def main(client: sw.AsyncClient) -> None:
        endless = Endless()
        task = asyncio.create_task(put_async(client, endless))
        await endless.waits.wait()
        async with every_turn_taken(client):
            monkeypatch.setattr(os, "unlink", unlink)
            task.cancel()
            await turns(1)
            for _ in range(3):
                task.cancel()
                await turns(3)
            await until(removing.is_set)
            task.cancel()
            await turns(3)
            assert not task.done()
            go_on.set()
            assert await is_cancelled(task)
            assert store.temporaries() == []

    serve(main)


def test_a_stream_is_cancelled_while_it_reads(
    serve: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    descriptors: list[int] = []

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        descriptors.append(descriptor)
        if offset:
            reading.set()
            assert go_on.wait(60)
        return real(descriptor, length, offset)

    real = os.pread

    async def main(client: sw.AsyncClient) -> None:
        ref = await held(client, new_body(3 * MIB))
        monkeypatch.setattr(os, "pread", pread)
        task = asyncio.create_task(drained(stream_async(client, ref)))
        await until(reading.is_set)
        task.cancel()
        await turns(3)
        assert not task.done()
        go_on.set()
        assert await is_cancelled(task)
        assert len(descriptors) == 2
        assert_closed(descriptors[0])
        assert len(await read_async(client, ref)) == 3 * MIB

    serve(main)


def test_a_source_that_does_not_come_in_time(store: Payloads, serve: Callable[[Work], None]) -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield bytes(2 * MIB)
        await asyncio.Event().wait()

    async def late() -> AsyncIterator[bytes]:
        yield bytes(2 * MIB)
        raise TimeoutError("of its own")

    async def main(client: sw.AsyncClient) -> None:
        with pytest.raises(sw.DeadlineExceededError) as found:
            await put_async(client, silent(), timeout=0.3)
        assert found.value.details == {"stage": "client"}
        with pytest.raises(TimeoutError, match="of its own"):
            await put_async(client, late())
        await check_whole(store, client, bytes(2 * MIB))

    serve(main)


@pytest.mark.parametrize("part", ["text", None])
def test_a_source_that_gives_no_bytes(serve: Callable[[Work], None], part: Any) -> None:
    async def wrong() -> AsyncIterator[bytes]:
        yield b"x"
        yield part

    async def failing_late() -> AsyncIterator[bytes]:
        yield bytes(2 * MIB)
        raise ZeroDivisionError

    async def main(client: sw.AsyncClient) -> None:
        with pytest.raises(sw.InvalidRequestError, match=type(part).__name__):
            await put_async(client, wrong())
        with pytest.raises(ZeroDivisionError):
            await put_async(client, failing_late())

    serve(main)


@pytest.mark.parametrize("size", [1000, 2 * MIB])
def test_a_worker_that_was_lost_may_have_placed_the_body(
    serve: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    body = new_body(size)

    async def main(client: sw.AsyncClient) -> None:
        intercepted = Intercepted(client, "place_payload", is_answered=True)
        intercepted.error = files.damaged(NOWHERE, "missing", "its file is missing")
        monkeypatch.setattr(client, "call", intercepted)
        ref = await held(client, body)
        assert ref.sha256 == hashlib.sha256(body).hexdigest()
        refused = Intercepted(client, "place_payload", is_answered=False)
        refused.error = sw.OverloadedError("not now")
        monkeypatch.setattr(client, "call", refused)
        with pytest.raises(sw.OverloadedError, match="not now"):
            await put_async(client, body[1:])

    serve(main)


def test_a_forked_child_leaves_what_its_parent_writes(store: Payloads, serve: Callable[[Work], None]) -> None:
    async def main(client: sw.AsyncClient) -> None:
        waits, given = asyncio.Event(), asyncio.Event()

        async def source() -> AsyncIterator[bytes]:
            yield bytes(MIB)
            waits.set()
            await given.wait()
            yield bytes(MIB)

        task = asyncio.create_task(put_async(client, source()))
        await waits.wait()
        coroutine = task.get_coro()
        assert coroutine is not None

        def drop() -> None:
            coroutine.close()
            gc.collect()

        assert status_of(in_child(drop)) == 0
        given.set()
        assert (await task).bytes == 2 * MIB

    serve(main)


def test_steps_that_are_dropped_leave_nothing(store: Payloads) -> None:
    """As when their event loop is closed in the middle; no garbage collector has to look."""
    gc.disable()
    try:
        steps = put_steps(bytes(2 * MIB), None, "default", 2**62)
        asked = advance(steps)
        assert isinstance(asked, Call)
        assert advance(steps, store.client.call(asked)) is None
        assert advance(steps) is None
        assert len(store.temporaries()) == 1
        del steps
        assert store.temporaries() == []
    finally:
        gc.enable()


def test_a_loop_that_is_closed_in_the_middle(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """What waits for a turn is not woken any more, which the loop would refuse."""
    go_on = threading.Event()
    deadline_ns = time.monotonic_ns() + 60_000_000_000

    async def main() -> list[asyncio.Task[bool]]:
        count = THREADS_COUNT_MAX + 2
        tasks = [
            asyncio.create_task(in_thread(go_on.wait, 60, deadline_ns=deadline_ns)) for _ in range(count)
        ]
        await turns(3)
        return tasks

    loop = new_loop()
    # That tasks are pending when they go is what is tested.
    loop.set_exception_handler(lambda _loop, _context: None)
    try:
        tasks = loop.run_until_complete(main())
        loop.close()
        for task in tasks:
            coroutine = task.get_coro()
            assert coroutine is not None
            coroutine.close()
    finally:
        go_on.set()
