"""Files and rows that are not what the store left there: typed errors that name the payload, at bounded memory."""

import hashlib
import itertools
import os
import random
import tracemalloc
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import storage_worker as sw
from storage_worker.conversation import PayloadNotFoundError, append, payload, payload_range
from storage_worker.conversation import payload_client as client_side
from storage_worker.conversation.payload_files import CHUNK_BYTES, GZIP_BYTES_MAX
from storage_worker.conversation.payloads import locate_payload, name_of, place_payload
from storage_worker.conversation.records import PayloadRef
from storage_worker.protocol.operation import Call
from tests.conversation.payload_places import Payloads
from tests.conversation.payload_store import drop, hold

MIB = 2**20
MEMORY_BYTES_MAX = 8 * MIB
WORKER_BYTES_MAX = 24 * MIB

SMALL, LARGE = 50_000, GZIP_BYTES_MAX + 300_000


def body_of(size: int, seed: object) -> bytes:
    return random.Random(str(seed)).randbytes(size)


def flip(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def lengthen(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"\0")


def delete(file: Path) -> None:
    file.unlink()


def link(file: Path) -> None:
    """Put a link to a good copy into its place."""
    copy = file.with_name("copy")
    file.rename(copy)
    file.symlink_to(copy)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def other_body(file: Path) -> None:
    """A good file, but of another body."""
    body = body_of(1, "other") * LARGE
    size = file.stat().st_size
    file.write_bytes(body[:size])


DAMAGES: dict[Callable[[Path], None], set[str]] = {
    flip: {"digest", "gzip"},
    cut: {"size"},
    empty: {"size"},
    lengthen: {"size"},
    delete: {"missing"},
    link: {"unreadable"},
    pipe: {"size", "unreadable"},
    folder: {"unreadable", "size"},
    other_body: {"digest", "gzip"},
}


def mend(file: Path) -> None:
    """Have nothing stand there."""
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named(store: Payloads, size: int, damage: Callable[[Path], None]) -> None:
    body = body_of(size, (size, damage.__name__))
    ref = store.put(body)
    store.client.call(hold(ref))
    damage(store.file(ref))
    reads: list[Callable[[], object]] = [
        lambda: client_side.read(store.client, ref),
        lambda: client_side.read_text(store.client, ref),
        lambda: list(client_side.stream(store.client, ref)),
        lambda: store.client.call(payload(ref)),
    ]
    if DAMAGES[damage] & {"size", "missing", "unreadable"}:
        reads += [
            lambda: client_side.read_range(store.client, ref, 10, 10),
            lambda: store.client.call(payload_range(ref, 10, 10)),
            lambda: store.client.call(hold(ref)),
        ]
    for read in reads:
        with pytest.raises((sw.StorageCorruptError, PayloadNotFoundError)) as raised:
            read()
        assert raised.value.details["payload"] == ref.sha256
        assert ref.sha256 in raised.value.message
        if isinstance(raised.value, sw.StorageCorruptError):
            assert raised.value.details["check"] in DAMAGES[damage]
    assert [check in DAMAGES[damage] for check in store.checks(ref)] == [True]
    assert store.row(ref) == ("committed", 1)
    # The next one who has the body mends it.
    if damage is folder:
        mend(store.file(ref))
    assert store.put(body) == ref
    assert client_side.read(store.client, ref) == body
    assert store.checks(ref) == []


def test_a_stream_gives_no_end_to_what_is_damaged(store: Payloads) -> None:
    body = body_of(3 * CHUNK_BYTES, "stream")
    ref = store.put(body)
    store.client.call(hold(ref))
    flip(store.file(ref))
    stream = client_side.stream(store.client, ref)
    assert len(b"".join(itertools.islice(stream, 3))) == len(body)
    with pytest.raises(sw.StorageCorruptError, match=ref.sha256):
        next(stream)
    assert store.put(body) == ref


@cache
def bomb(size: int) -> bytes:
    packing = zlib.compressobj(9, wbits=31)
    return b"".join([packing.compress(bytes(MIB)) for _ in range(size // MIB)]) + packing.flush()


def memory_of(work: Callable[[], object]) -> int:
    """The most that Python held at a time while this ran."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def worker_peak(store: Payloads) -> int:
    """The most memory that the worker ever had, in bytes."""
    status = Path(f"/proc/{store.worker.pid}/status")
    if not status.exists():
        pytest.skip("the system does not tell")
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


@pytest.mark.parametrize("says", [1000, 100 * MIB])
def test_a_gzip_bomb_is_not_unpacked(store: Payloads, says: int) -> None:
    """A file that opens to 100 MB, of the recorded size, under a row that says so or not."""
    ref = store.put(body_of(1000, ("bomb", says)))
    store.client.call(hold(ref))
    data = bomb(100 * MIB)
    store.file(ref).write_bytes(data)
    store.client.execute(
        "update conversation_payloads set stored_bytes = ?, bytes = ? where name = ?",
        (len(data), says, name_of(ref)),
    )
    before = worker_peak(store)

    def read() -> None:
        reads: list[Callable[[], object]] = [
            lambda: store.client.call(payload(ref), max_result_bytes=8 * MIB),
            lambda: client_side.read(store.client, ref, bytes_max=200 * MIB),
            lambda: list(client_side.stream(store.client, ref)),
        ]
        if says == 1000:
            # What stands at the beginning is there, whatever follows.
            assert store.client.call(payload_range(ref, 0, 1000)) == bytes(1000)
            assert store.client.call(payload_range(ref, 900, 1000)) == bytes(100)
        else:
            reads.append(lambda: store.client.call(payload_range(ref, 0, 1000)))
        for each in reads:
            with pytest.raises(sw.StorageCorruptError, match=ref.sha256):
                each()
        assert len(store.checks(ref)) == 1

    assert memory_of(read) < MEMORY_BYTES_MAX
    assert worker_peak(store) - before < WORKER_BYTES_MAX
    restore(store, ref)


def restore(store: Payloads, ref: PayloadRef) -> None:
    store.client.execute("delete from conversation_payloads where name = ?", (name_of(ref),))
    store.client.execute("delete from holdings where payload_sha256 = ?", (ref.sha256,))
    mend(store.file(ref))


def test_a_large_body_takes_little_memory(store: Payloads) -> None:
    size = 40 * MIB
    before = worker_peak(store)

    def work() -> PayloadRef:
        ref = store.put(bytes(MIB) for _ in range(size // MIB))
        assert store.put(bytes(MIB) for _ in range(size // MIB)) == ref
        store.client.call(hold(ref))
        assert sum(len(chunk) for chunk in client_side.stream(store.client, ref)) == size
        assert store.checks(ref) == []
        return ref

    kept: list[PayloadRef] = []
    assert memory_of(lambda: kept.append(work())) < MEMORY_BYTES_MAX
    assert worker_peak(store) - before < WORKER_BYTES_MAX
    restore(store, *kept)


OUTSIDE = "../../../../outside"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("sha256", "../" * 20 + "etc/passwd"),
        ("sha256", "0" * 64),
        ("sha256", b"\0" * 64),
        ("content_type", "other"),
        ("content_type", ""),
        ("retention_class", "../x"),
        ("bytes", -1),
        ("bytes", 2**62),
        ("bytes", "many"),
        ("stored_bytes", 2**62),
        ("stored_bytes", 3),
        ("encoding", "zip"),
        ("encoding", "identity"),
    ],
)
def test_whatever_a_row_says_is_checked(store: Payloads, column: str, value: Any) -> None:
    ref = store.put(body_of(3000, (column, value)))
    store.client.call(hold(ref))
    kept = store.client.query(
        f"select {column} from conversation_payloads where name = ?", (name_of(ref),)
    ).scalar()
    change = f"update conversation_payloads set {column} = ? where name = ?"
    store.client.execute(change, (value, name_of(ref)))
    for call in (payload(ref), payload_range(ref, 0, 10)):
        with pytest.raises(sw.StorageCorruptError, match=ref.sha256):
            store.client.call(call)
    with pytest.raises(sw.StorageCorruptError, match=ref.sha256):
        client_side.read(store.client, ref)
    assert [check in {"record", "size"} for check in store.checks(ref)] == [True]
    store.client.execute(change, (kept, name_of(ref)))
    assert client_side.read(store.client, ref) == body_of(3000, (column, value))
    assert store.checks(ref) == []


@pytest.mark.parametrize("name", [OUTSIDE, "/etc/passwd", "..", "", "a\0b", f"{'0' * 64}-{'0' * 32}/../x"])
def test_a_name_in_a_row_leads_nowhere(store: Payloads, name: str) -> None:
    outside = store.path.parent / "outside"
    outside.write_text("mine")
    for state, count in (("committed", 1), ("released", 0)):
        store.client.execute(
            "insert into conversation_payloads values (?, ?, 'a', 'b', 4, 4, 'identity', ?, ?, 0, 0)",
            (name, "0" * 64, state, count),
        )
        if name:
            assert (name, "record") in [(found.payload, found.check) for found in store.findings()]
        store.sweep(grace_ms=0)
        assert outside.read_text() == "mine"
        store.client.execute("delete from conversation_payloads where name = ?", (name,))


def test_a_reference_is_not_believed(store: Payloads) -> None:
    small = store.put(body_of(2000, "believed"))
    large = store.put(body_of(LARGE, "believed"))
    change = msgspec.structs.replace
    wrong = [
        change(small, bytes=1999),
        change(small, stored_bytes=small.stored_bytes + 1),
        change(small, stored_bytes=0),
        change(small, encoding="identity"),
        change(small, bytes=2**40, stored_bytes=2**40, encoding="identity"),
        change(large, encoding="gzip"),
        change(large, bytes=LARGE - 1),
        change(large, bytes=LARGE + 1, stored_bytes=LARGE + 1),
    ]
    for ref in wrong:
        with pytest.raises((sw.InvalidRequestError, sw.StorageCorruptError)):
            store.client.call(hold(ref))
        assert store.row(ref) is None
    unknown = [
        change(small, sha256="0" * 64),
        change(large, content_type="x"),
        change(large, retention_class="y"),
    ]
    for ref in unknown:
        calls: list[Call[Any]] = [
            hold(ref),
            drop(ref),
            payload(ref),
            payload_range(ref, 0, 1),
            locate_payload(ref),
        ]
        for call in calls:
            with pytest.raises(PayloadNotFoundError):
                store.client.call(call)
    for sha256 in ("0" * 63, "0" * 65, "A" * 64, "../" * 21 + "x", "0" * 64 + "\n"):
        with pytest.raises(sw.InvalidRequestError):
            store.client.call(hold(change(small, sha256=sha256)))
    with pytest.raises(PayloadNotFoundError):
        store.client.call(append("believed", "note", body=unknown[0]))
    assert not store.client.query("select 1 from conversation_events where session_id = 'believed'").rows


def test_only_a_good_file_is_placed(store: Payloads) -> None:
    temporary = Path(store.folder.temporary)
    name = "0123456789abcdef" * 2
    good = zlib.compress(b"good", wbits=31)

    def place(size: int, name: str = name) -> PayloadRef:
        return store.client.call(place_payload(name, size, "a", "b"))

    for content, size in (
        (good, 3),
        (good, 5),
        (good[:-1], 4),
        (good + b"x", 4),
        (b"good", 4),
        (b"", 0),
        (good, LARGE),
    ):
        (temporary / name).write_bytes(content)
        with pytest.raises(sw.StorageCorruptError):
            place(size)
    with pytest.raises(sw.StorageCorruptError):
        place(2**60)
    (temporary / name).write_bytes(good)
    (store.path.parent / name).write_bytes(good)
    for trick in (
        f"../{name}",
        f"../../../{name}",
        str(store.path.parent / name),
        name[:-1],
        name.upper(),
        f"{name}\n",
    ):
        with pytest.raises(sw.InvalidRequestError):
            place(4, trick)
    ref = place(4)
    assert ref.sha256 == hashlib.sha256(b"good").hexdigest()
    assert not (temporary / name).exists()
    with pytest.raises(sw.StorageCorruptError) as raised:
        place(4)
    assert raised.value.details["check"] == "missing"


def test_a_count_that_is_wrong_is_found(store: Payloads) -> None:
    assert store.findings() == []
    ref = store.put(body_of(100, "count"))
    store.client.call(hold(ref))
    update = "update conversation_payloads set reference_count = ?, state = ? where name = ?"
    for count, state, checks in (
        (2, "committed", ["count"]),
        (0, "released", ["count"]),
        (1, "released", ["state"]),
    ):
        store.client.execute(update, (count, state, name_of(ref)))
        assert [found.check for found in store.findings()] == checks
    store.client.execute("delete from conversation_payloads where name = ?", (name_of(ref),))
    assert [(found.payload, found.check) for found in store.findings()] == [(name_of(ref), "row")]
    store.client.execute(
        "update holdings set payload_sha256 = '../x' where payload_sha256 = ?", (ref.sha256,)
    )
    assert [(found.payload, found.check) for found in store.findings()] == [("../x", "record")]
    store.client.execute("delete from holdings where payload_sha256 = '../x'")
    assert store.findings() == []
