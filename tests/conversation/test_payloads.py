"""The payload store: what is put comes back, and whatever is done to a file, the answer is right or typed."""

import hashlib
import io
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import storage_worker as sw
from storage_worker.conversation import PayloadNotFoundError, admit, append, payload, payload_range
from storage_worker.conversation import payload_client as client_side
from storage_worker.conversation import payload_files as files
from storage_worker.conversation import payload_placing as placing
from storage_worker.conversation.payload_files import CHUNK_BYTES, GZIP_BYTES_MAX
from storage_worker.conversation.payload_writing import advance, put_steps
from storage_worker.conversation.records import PayloadRef
from tests.conversation.payload_places import Payloads
from tests.conversation.payload_store import STORES, drop, hold

MIB = 2**20

SIZES = (0, 1, 20_000, GZIP_BYTES_MAX, GZIP_BYTES_MAX + 1, 3 * CHUNK_BYTES)


def body_of(size: int, seed: str) -> bytes:
    """Bytes that do not shrink, other ones for each seed."""
    return hashlib.shake_256(seed.encode()).digest(size)


def held(store: Payloads, body: Any, **options: Any) -> PayloadRef:
    ref = store.put(body, **options)
    store.client.call(hold(ref))
    return ref


@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_comes_back(store: Payloads, size: int) -> None:
    body = body_of(size, "back")
    ref = held(store, body)
    assert ref.bytes == size
    assert ref.sha256 == hashlib.sha256(body).hexdigest()
    assert ref.encoding == ("gzip" if size <= GZIP_BYTES_MAX else "identity")
    assert store.file(ref).stat().st_size == ref.stored_bytes
    assert client_side.read(store.client, ref) == body
    assert store.client.call(payload(ref), max_result_bytes=8 * MIB) == body
    for chunk_bytes in (size // 3 + 1, CHUNK_BYTES):
        chunks = list(client_side.stream(store.client, ref, chunk_bytes=chunk_bytes))
        assert b"".join(chunks) == body
        assert all(0 < len(chunk) <= chunk_bytes for chunk in chunks)
    assert store.temporaries() == []


@pytest.mark.parametrize("size", SIZES)
def test_however_it_comes_it_is_one_payload(store: Payloads, size: int) -> None:
    body = body_of(size, "one")
    ref = store.put(body)
    inode = store.file(ref).stat().st_ino
    small = (body[at : at + 1000] for at in range(0, size, 1000))
    for source in (bytearray(body), memoryview(body), io.BytesIO(body), small, iter([b"", body, b""])):
        assert store.put(source) == ref
    assert store.file(ref).stat().st_ino == inode
    assert store.temporaries() == []


@pytest.mark.parametrize("body", [None, 5, Path("file")])
def test_what_is_no_body(store: Payloads, body: Any) -> None:
    with pytest.raises(sw.InvalidRequestError, match=f"no {type(body).__name__}"):
        store.put(body)
    assert store.temporaries() == []


def test_what_is_put_again_is_new_for_the_sweep(store: Payloads) -> None:
    for size in (10, GZIP_BYTES_MAX + 10):
        body = body_of(size, "again")
        ref = store.put(body)
        store.age(ref)
        before = store.file(ref).stat().st_mtime_ns
        store.put(body)
        assert store.file(ref).stat().st_mtime_ns > before


@pytest.mark.parametrize("mask", [0, 0o777])
def test_files_are_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    kept = os.umask(0o022)
    try:
        with sw.StorageWorker(tmp_path / "app.db", stores=STORES) as worker, worker.connect() as client:
            os.umask(mask)
            store = Payloads(worker, client, tmp_path / "app.db")
            refs = [store.put(b"small"), store.put(bytes(GZIP_BYTES_MAX + 1))]
            with placing.temporary_file(store.folder):
                found = sorted(Path(store.folder.path).rglob("*"))
                modes = {stat.S_IMODE(each.stat().st_mode) for each in found if each.is_file()}
                assert modes == {0o600}
                assert len([each for each in found if each.is_file()]) == len(refs) + 1
            folders = [each for each in (Path(store.folder.path), *found) if each.is_dir()]
            assert {stat.S_IMODE(each.stat().st_mode) for each in folders} == {0o700}
    finally:
        os.umask(kept)


def test_two_retention_classes_are_two_payloads(store: Payloads) -> None:
    body = body_of(30_000, "classes")
    short, long = store.put(body, "short"), store.put(body, "long")
    assert short.sha256 == long.sha256
    assert store.file(short) != store.file(long)
    for ref, times in ((short, 1), (long, 2)):
        for _ in range(times):
            store.client.call(hold(ref))
    store.client.call(drop(short))
    store.age(short, long)
    store.sweep()
    store.age(short)
    store.sweep()
    assert not store.file(short).exists()
    assert store.row(short) is None
    assert store.row(long) == ("committed", 2)
    assert client_side.read(store.client, long) == body
    with pytest.raises(PayloadNotFoundError):
        client_side.read(store.client, short)


def test_content_types_are_told_apart(store: Payloads) -> None:
    refs = [store.put(b"types", content_type=kind) for kind in ("a/b", "a/c", "a", "é/\0")]
    assert len({store.file(ref) for ref in refs}) == len(refs)
    # What one field ends with the other may not begin with.
    assert files.name_of("0" * 64, "ab", "c") != files.name_of("0" * 64, "a", "bc")


@pytest.mark.parametrize("size", [1000, GZIP_BYTES_MAX + 1000])
def test_ranges(store: Payloads, size: int) -> None:
    body = body_of(size, "ranges")
    ref = held(store, body)
    far = 2**62
    ranges = [
        (0, 1), (0, size), (0, size + 1), (0, far), (1, 1), (size - 1, 1), (size - 1, 9), (size // 2, 100),
        (size, 1), (size, far), (size + 1, 1), (far, 1), (far, far),
    ]  # fmt: skip
    for offset, length in ranges:
        expected = body[offset : offset + length]
        assert client_side.read_range(store.client, ref, offset, length) == expected
        assert store.client.call(payload_range(ref, offset, length)) == expected
    for offset, length in (
        (-1, 1),
        (0, 0),
        (0, -1),
        (-far, far),
        (size, 0),
        (far, -far),
        (2**70, 1),
        (0, 2**70),
    ):
        with pytest.raises(sw.InvalidRequestError):
            store.client.call(payload_range(ref, offset, length))
        if max(abs(offset), abs(length)) < 2**63:
            with pytest.raises(sw.InvalidRequestError):
                client_side.read_range(store.client, ref, offset, length)
    untyped: Any = client_side.read_range
    for given in ((0.0, 1), (0, 1.0), ("0", 1), (None, 1)):
        with pytest.raises(sw.InvalidRequestError):
            untyped(store.client, ref, *given)


def test_a_range_of_an_empty_payload_is_empty(store: Payloads) -> None:
    ref = held(store, b"")
    assert client_side.read_range(store.client, ref, 0, 10) == b""
    assert list(client_side.stream(store.client, ref)) == []


def test_only_the_range_is_read_of_what_is_not_packed(
    store: Payloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = held(store, body_of(3 * MIB, "only"))
    asked = []

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        asked.append((offset, length))
        return real(descriptor, length, offset)

    real = os.pread
    monkeypatch.setattr(os, "pread", pread)
    assert len(client_side.read_range(store.client, ref, 2 * MIB, 100)) == 100
    assert asked == [(2 * MIB, 100)]


def test_nothing_beyond_a_range_is_unpacked(store: Payloads) -> None:
    """A packed file that is broken behind the range gives it."""
    body = body_of(400_000, "beyond")
    ref = held(store, body)
    with store.file(ref).open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(bytes(1000))
    assert client_side.read_range(store.client, ref, 100, 1000) == body[100:1100]
    with pytest.raises(sw.StorageCorruptError):
        client_side.read(store.client, ref)


def test_a_whole_read_is_bounded(store: Payloads) -> None:
    ref = held(store, bytes(2 * MIB))
    with pytest.raises(sw.ResultTooLargeError, match="2097152"):
        client_side.read(store.client, ref, bytes_max=2 * MIB - 1)
    assert len(client_side.read(store.client, ref, bytes_max=2 * MIB)) == 2 * MIB
    for call in (payload(ref), payload_range(ref, 0, 2 * MIB), payload_range(ref, 10, 2**40)):
        with pytest.raises(sw.ResultTooLargeError):
            store.client.call(call)
    assert len(store.client.call(payload_range(ref, MIB, MIB), max_result_bytes=2 * MIB)) == MIB
    # Refused before the file is looked at.
    store.file(ref).unlink()
    for call in (payload(ref), payload_range(ref, 0, 2 * MIB)):
        with pytest.raises(sw.ResultTooLargeError):
            store.client.call(call)
    assert store.put(bytes(2 * MIB)) == ref


def test_texts(store: Payloads) -> None:
    text = "a\0b é \U0001f600 " * 10_000
    ref = held(store, text)
    assert ref.content_type == "text/plain"
    assert client_side.read_text(store.client, ref) == text
    with pytest.raises(sw.InvalidRequestError):
        client_side.read_text(store.client, held(store, b"\xff\xfe"))
    with pytest.raises(sw.InvalidRequestError):
        store.put("\ud800")
    for options in ({"content_type": "\ud800"}, {"retention_class": "\ud800"}, {"content_type": ""}):
        with pytest.raises(sw.InvalidRequestError):
            store.put(b"x", **options)
    with pytest.raises(sw.InvalidRequestError):
        store.put(bytes(MIB), content_type="x" * 1000)


def test_json_is_stored_in_one_form(store: Payloads) -> None:
    ref = client_side.put_json(store.client, {"b": [1, None], "a": "é"})
    assert ref == client_side.put_json(store.client, {"a": "é", "b": [1, None]})
    store.client.call(hold(ref))
    assert client_side.read_text(store.client, ref) == '{"a":"é","b":[1,null]}'
    with pytest.raises(sw.InvalidRequestError):
        client_side.put_json(store.client, float("nan"))


def test_a_large_text_becomes_a_reference(store: Payloads) -> None:
    for text in ("short", "x" * 16_384, "é" * 8_192):
        body, preview = client_side.prepare_text(store.client, text)
        assert body == text
        assert text.startswith(preview)
    text = "é" * 8_193
    body, preview = client_side.prepare_text(store.client, text)
    assert isinstance(body, PayloadRef)
    event = store.client.call(append("prepared", "note", body=body, preview=preview))
    assert event.created
    assert store.row(body) == ("committed", 1)
    assert client_side.read_text(store.client, body) == text
    assert store.checks(body) == []
    # The event and the message refer to it.
    admitted = store.client.call(admit("prepared", body, preview=preview))
    assert admitted.created
    assert store.row(body) == ("committed", 3)
    assert store.checks(body) == []


@pytest.mark.parametrize("source", [["text"], [b"x", 1], io.StringIO("text"), [None]])
def test_what_is_no_bytes_is_refused(store: Payloads, source: Any) -> None:
    with pytest.raises(sw.InvalidRequestError):
        store.put(source)
    assert store.temporaries() == []


def test_a_body_has_a_largest_size(store: Payloads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAYLOAD_BYTES_MAX", 2 * MIB)
    assert store.put(bytes(2 * MIB)).bytes == 2 * MIB
    for body in (bytes(2 * MIB + 1), iter([bytes(MIB)] * 3)):
        with pytest.raises(sw.RequestTooLargeError):
            store.put(body)
    assert store.temporaries() == []


def test_a_put_that_takes_too_long_ends_and_leaves_nothing(store: Payloads) -> None:
    def slow() -> Iterator[bytes]:
        yield bytes(MIB)
        while True:
            yield bytes(1)

    with pytest.raises(sw.DeadlineExceededError):
        store.put(slow(), timeout=0.3)
    assert store.temporaries() == []


def test_a_source_that_fails_leaves_nothing(store: Payloads) -> None:
    def failing() -> Iterator[bytes]:
        yield bytes(2 * MIB)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put(failing())
    assert store.temporaries() == []


@pytest.mark.parametrize("size", [3000, 2 * MIB])
def test_views_of_any_shape(store: Payloads, size: int) -> None:
    body = body_of(size, "shape")
    spread = bytes(byte for each in body for byte in (each, 0))
    ref = store.put(body)
    assert store.put(memoryview(spread)[::2]) == ref
    assert store.put([memoryview(spread)[: size * 2 : 2]]) == ref
    assert store.put(memoryview(body).cast("I", (size // 8, 2))) == ref
    assert store.put(memoryview(body)[:0].cast("I")).bytes == 0


@pytest.mark.parametrize("options", [{"content_type": 5}, {"retention_class": None}])
def test_names_that_are_no_texts(store: Payloads, options: Any) -> None:
    with pytest.raises(sw.InvalidRequestError, match="is a text, no"):
        store.put(b"x", **options)


@pytest.mark.parametrize("body", [iter([b"x"]), iter([b"", b""]), io.BytesIO(b"x")])
def test_a_body_in_small_parts_has_a_deadline(body: Any) -> None:
    steps = put_steps(body, None, "test", 0)
    assert advance(steps) is None
    with pytest.raises(sw.DeadlineExceededError):
        advance(steps)


def test_a_process_that_gets_no_threads(store: Payloads, monkeypatch: pytest.MonkeyPatch) -> None:
    body = body_of(3 * MIB, "no threads")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        refs = [store.put(body, "one"), store.put(io.BytesIO(body), "two")]
    for ref in refs:
        store.client.call(hold(ref))
        assert client_side.read(store.client, ref) == body
