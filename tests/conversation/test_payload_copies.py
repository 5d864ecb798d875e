"""Copying the payloads of a database's copy, as a program does behind `Client.backup`."""

import asyncio
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import storage_worker as sw
from storage_worker.conversation import payload_client, payload_copies
from storage_worker.conversation.payload_copies import PayloadsCopied, copy_payloads
from storage_worker.conversation.records import PayloadRef
from tests.conversation.payload_places import Payloads, in_child, serving, status_of
from tests.conversation.payload_store import STORES, drop, hold


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Payloads]:
    with serving(tmp_path_factory.mktemp("store") / "app.db") as found:
        yield found


@pytest.fixture
def held(payloads: Payloads, request: pytest.FixtureRequest) -> Iterator[list[PayloadRef]]:
    """Payloads that something refers to, others in each test."""
    mark = request.node.name.encode()
    refs = [payloads.put(mark + bytes([number]) * 1_000) for number in range(5)]
    refs.append(payloads.put(mark + os.urandom(700_000)))
    for ref in refs:
        payloads.client.call(hold(ref))
    yield refs
    for ref in refs:
        payloads.client.call(drop(ref))
        payloads.client.execute("delete from conversation_payloads where sha256 = ?", (ref.sha256,))


def copies(payloads: Payloads, target: Path, **options: Any) -> PayloadsCopied:
    payloads.client.backup(target)
    return copy_payloads(payloads.client, target, **options)


def left(target: Path) -> list[str]:
    return sorted(each.name for each in target.parent.iterdir() if each.name != target.name)


def test_a_payload_that_is_released_and_swept_meanwhile_is_in_the_copy(
    payloads: Payloads, held: list[PayloadRef], tmp_path: Path
) -> None:
    target = tmp_path / "copy.db"
    payloads.client.backup(target)
    payloads.client.call(drop(held[0]))
    payloads.sweep()
    copied = copy_payloads(payloads.client, target)
    payloads.client.call(hold(held[0]))
    assert (copied.payloads, copied.findings) == (len(held), [])
    assert copied.bytes == sum(ref.stored_bytes for ref in held)
    with sw.StorageWorker(target, stores=STORES) as worker, worker.connect() as client:
        for ref in held:
            assert payload_client.read(client, ref) == payload_client.read(payloads.client, ref)
        assert not list(payload_client.check(client))
        # What is put there goes beside them.
        assert payload_client.put(client, "new").bytes == 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_nothing_is_left_where_a_file_cannot_be_written(
    payloads: Payloads,
    held: list[PayloadRef],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    sync, synced = os.fsync, []

    def refuse(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 4:
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    kind = sw.StorageFullError if code == errno.ENOSPC else sw.DatabasePathError
    target = tmp_path / "copy.db"
    with pytest.raises(kind, match="cannot copy the payloads to"):
        copies(payloads, target)
    assert left(target) == []
    monkeypatch.undo()
    assert copy_payloads(payloads.client, target).payloads == len(held)


def test_nothing_is_left_where_the_time_is_over(
    payloads: Payloads, held: list[PayloadRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy.db"
    payloads.client.backup(target)
    monkeypatch.setattr(payload_copies, "deadline_after", lambda *_: 0)
    with pytest.raises(sw.DeadlineExceededError, match="after 0 payloads"):
        copy_payloads(payloads.client, target, timeout=5.0)
    assert left(target) == []


def test_what_is_beside_the_copy_already_is_left_alone(
    payloads: Payloads, held: list[PayloadRef], tmp_path: Path
) -> None:
    target = tmp_path / "copy.db"
    assert copies(payloads, target).payloads == len(held)
    before = sorted(Path(f"{target}-sw").rglob("*"))
    with pytest.raises(sw.DatabasePathError, match="is there already"):
        copy_payloads(payloads.client, target)
    assert sorted(Path(f"{target}-sw").rglob("*")) == before


def test_a_file_with_a_flipped_byte_is_told_and_left_out(
    payloads: Payloads, held: list[PayloadRef], tmp_path: Path
) -> None:
    for ref in (held[0], held[-1]):
        file = payloads.file(ref)
        content = bytearray(file.read_bytes())
        content[500 if ref is held[-1] else len(content) // 2] ^= 1
        file.write_bytes(content)
    target = tmp_path / "copy.db"
    copied = copies(payloads, target)
    assert copied.payloads == len(held) - 2
    assert {each.payload for each in copied.findings} == {
        payloads.file(ref).name for ref in (held[0], held[-1])
    }
    assert len([each for each in Path(f"{target}-sw").rglob("*") if each.is_file()]) == copied.payloads


@pytest.mark.parametrize("change", ["content_type = 'other'", "sha256 = 'none'", "bytes = 2000000"])
def test_a_row_that_the_store_does_not_write_is_told(
    payloads: Payloads, held: list[PayloadRef], tmp_path: Path, change: str
) -> None:
    file = payloads.file(held[0]).name
    payloads.client.execute(f"update conversation_payloads set {change} where name = ?", (file,))
    copied = copies(payloads, tmp_path / "copy.db")
    assert copied.payloads == len(held) - 1
    assert [(each.payload, each.check) for each in copied.findings] == [(file, "record")]
    payloads.client.execute(
        "update conversation_payloads set sha256 = ? where name = ?", (held[0].sha256, file)
    )


def test_a_copy_without_payloads_gets_nothing(database: Path, tmp_path: Path) -> None:
    with sw.StorageWorker(database) as worker, worker.connect("admin") as client:
        target = tmp_path / "copy.db"
        with pytest.raises(sw.DatabasePathError, match="there is no copy"):
            copy_payloads(client, target)
        client.backup(target)
        assert copy_payloads(client, target) == PayloadsCopied(0, 0, [])
        assert not Path(f"{target}-sw").exists()
        target.write_bytes(b"no database " * 1_000)
        with pytest.raises(sw.StorageCorruptError):
            copy_payloads(client, target)


@pytest.mark.parametrize("step", [1, 3])
def test_what_a_killed_copy_leaves_is_gone_after_the_next_one(
    payloads: Payloads, held: list[PayloadRef], tmp_path: Path, step: int
) -> None:
    target = tmp_path / "copy.db"
    payloads.client.backup(target)
    sync, synced = os.fsync, []

    def die(descriptor: int) -> None:
        sync(descriptor)
        synced.append(descriptor)
        if len(synced) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def copy() -> None:
        pytest.MonkeyPatch().setattr(os, "fsync", die)
        with payloads.worker.connect() as client:
            copy_payloads(client, target)

    assert status_of(in_child(copy)) == -signal.SIGKILL
    side = Path(f"{target}-sw")
    assert list(side.iterdir()) != []
    assert copy_payloads(payloads.client, target).payloads == len(held)
    assert [each.name for each in side.iterdir()] == ["payloads"]


def test_two_copies_to_one_place(
    payloads: Payloads, held: list[PayloadRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy.db"
    payloads.client.backup(target)
    run, refused = payload_copies._Copying.run, []

    def run_twice(copying: Any, rows: Any) -> None:
        with pytest.raises(sw.DatabasePathError, match="being copied") as error:
            copy_payloads(payloads.client, target)
        refused.append(error)
        run(copying, rows)

    monkeypatch.setattr(payload_copies._Copying, "run", run_twice)
    assert copy_payloads(payloads.client, target).payloads == len(held)
    assert len(refused) == 1


def test_an_asynchronous_client_copies_nothing(payloads: Payloads, tmp_path: Path) -> None:
    async def main() -> None:
        async with await payloads.worker.connect_async() as client:
            with pytest.raises(sw.InvalidRequestError, match="in a thread"):
                copy_payloads(client, tmp_path / "copy.db")  # type: ignore[arg-type]

    asyncio.run(main())
