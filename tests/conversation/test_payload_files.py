"""The payload store's files without a worker: names, syncs of directories, what is placed and what is only found."""

import errno
import os
import shutil
import stat
import threading
import zlib
from collections import Counter
from pathlib import Path

import pytest

from storage_worker.conversation import payload_files as files
from storage_worker.conversation import payload_placing as placing
from storage_worker.conversation import payloads
from storage_worker.conversation.payload_files import GZIP_BYTES_MAX, PACKED_BYTES_MAX, Folder
from storage_worker.conversation.records import PayloadRef
from storage_worker.protocol.errors import (
    DatabasePathError,
    InvalidRequestError,
    StorageCorruptError,
    StorageFullError,
)

LARGE = bytes(GZIP_BYTES_MAX) + b"and a bit"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "app.db-sw").mkdir()
    found = Folder(f"{tmp_path}/app.db-sw/payloads")
    placing.prepare(found)
    return found


class Syncs(Counter[int]):
    """How often each directory was synced, and files."""

    files = 0

    def of(self, directory: str) -> int:
        return self[Path(directory).stat().st_ino]

    def note(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self[found.st_ino] += 1
        else:
            self.files += 1


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    counts = Syncs()
    monkeypatch.setattr(os, "fsync", counts.note)
    return counts


def placed(folder: Folder, body: bytes, kind: str = "a", alike: tuple[str, ...] = ()) -> PayloadRef:
    with placing.temporary_file(folder) as file:
        file.write(body if len(body) > GZIP_BYTES_MAX else placing.pack(body))
        return placing.place(folder, file.name, len(body), kind, "b", alike)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../x",
        "/etc/passwd",
        f"{'0' * 64}-{'0' * 31}",
        f"{'0' * 64}-{'0' * 32}\n",
        f"{'0' * 64}/{'0' * 32}",
    ],
)
def test_only_a_name_becomes_a_path(folder: Folder, name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        folder.path_of(name)
    assert not files.is_name(name)


def test_names_belong_to_identities() -> None:
    name = files.name_of("0" * 64, "a", "b")
    assert files.is_name(name)
    assert name == files.name_of("0" * 64, "a", "b")
    assert len({name, files.name_of("0" * 64, "ab", ""), files.name_of("1" * 64, "a", "b")}) == 3
    for sha256 in ("", "0" * 63, "G" * 64, "0" * 64 + "\n"):
        with pytest.raises(InvalidRequestError):
            files.name_of(sha256, "a", "b")


def test_what_does_not_shrink_fits_the_largest_file() -> None:
    assert len(placing.pack(os.urandom(GZIP_BYTES_MAX))) <= PACKED_BYTES_MAX


def test_packed_files_are_ordinary_gzip() -> None:
    assert zlib.decompress(placing.pack(b"text"), wbits=31) == b"text"
    assert placing.pack(b"text") == placing.pack(b"text")


def test_each_change_of_a_directory_is_synced_once(folder: Folder, synced: Syncs) -> None:
    first = placed(folder, b"first")
    bucket = folder.bucket_of(payloads.name_of(first))
    assert synced.of(bucket) == 1
    assert synced.of(folder.objects) == 1
    before = dict(synced)
    for _ in range(3):
        assert placing.find(folder, first.sha256, "a", "b", 5) == first
    assert dict(synced) == before
    second = placed(folder, b"first", "other type")
    assert folder.bucket_of(payloads.name_of(second)) == bucket
    assert synced.of(bucket) == 2
    assert synced.of(folder.objects) == 1


def test_whoever_sees_a_change_that_is_not_synced_yet_syncs_it(folder: Folder, synced: Syncs) -> None:
    ref = placed(folder, b"seen")
    bucket = folder.bucket_of(payloads.name_of(ref))
    with placing._directories.changing(bucket):
        for count in (2, 3):
            placing.find(folder, ref.sha256, "a", "b", 4)
            assert synced.of(bucket) == count
    for _ in range(2):
        placing.find(folder, ref.sha256, "a", "b", 4)
        assert synced.of(bucket) == 4


def test_a_file_is_synced_before_it_has_its_name(
    folder: Folder, synced: Syncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def reached(step: str) -> None:
        steps.append((step, synced.files, bool(list(Path(folder.objects).rglob("*-*")))))

    monkeypatch.setattr(placing, "reached", reached)
    placed(folder, b"order")
    assert steps == [
        ("made", 0, False),
        ("written", 0, False),
        ("synced", 1, False),
        ("renamed", 1, True),
        ("placed", 1, True),
    ]


@pytest.mark.parametrize("is_told", [False, True])
def test_a_large_body_that_is_there_is_found(folder: Folder, synced: Syncs, is_told: bool) -> None:
    ref = placed(folder, LARGE)
    inode = Path(folder.path_of(payloads.name_of(ref))).stat().st_ino
    synced.files = 0
    assert placed(folder, LARGE, alike=(payloads.name_of(ref),) if is_told else ()) == ref
    assert Path(folder.path_of(payloads.name_of(ref))).stat().st_ino == inode
    assert list(Path(folder.temporary).iterdir()) == []
    # What seems to be there already is not synced before that is known.
    assert synced.files == (0 if is_told else 1)


@pytest.mark.parametrize("alike", ["", "../../x", "0" * 64 + "-" + "0" * 32])
def test_what_only_seems_to_be_there_is_synced(folder: Folder, synced: Syncs, alike: str) -> None:
    other = placed(folder, LARGE, "other type")
    synced.files = 0
    ref = placed(folder, LARGE, alike=(alike or payloads.name_of(other),))
    assert synced.files == 1
    assert Path(folder.path_of(payloads.name_of(ref))).read_bytes() == LARGE


def test_a_damaged_file_is_replaced(folder: Folder) -> None:
    for body in (b"small", LARGE):
        ref = placed(folder, body)
        file = Path(folder.path_of(payloads.name_of(ref)))
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert placing.find(folder, ref.sha256, "a", "b", len(body)) is None
        assert placed(folder, body) == ref
        assert file.read_bytes() == good


def test_a_short_read_is_an_error(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is cut while it is read."""
    ref = placed(folder, LARGE)
    path = folder.path_of(payloads.name_of(ref))
    with files.opened(path, ref) as descriptor:
        os.truncate(path, 100)
        for read in (
            lambda: files.read_range(descriptor, ref, 50, 100),
            lambda: files.read_whole(descriptor, ref),
            lambda: files.verify(descriptor, ref),
        ):
            with pytest.raises(StorageCorruptError, match="too early"):
                read()
        assert files.read_range(descriptor, ref, 50, 50) == bytes(50)


@pytest.mark.parametrize("body", [b"small", LARGE])
def test_a_full_disk_is_told_as_such(folder: Folder, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    for name in ("fsync", "rename", "write"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            with pytest.raises(StorageFullError):
                placed(folder, body)
        assert list(Path(folder.temporary).iterdir()) == []
    assert placed(folder, body).bytes == len(body)


def test_tables_that_refer_are_named_plainly() -> None:
    for name in ("", "a b", "a;drop", "A", "_x", "a" * 64):
        with pytest.raises(ValueError, match="no name"):
            payloads.refer_from(name)


def test_directories_that_are_made_anew_are_synced_anew(folder: Folder, synced: Syncs) -> None:
    shutil.rmtree(folder.path)
    placing.prepare(folder)
    assert synced.of(str(Path(folder.path).parent)) == 1
    assert synced.of(folder.path) == 1
    placing.prepare(folder)
    assert synced.of(folder.path) == 1


def test_a_file_that_is_put_back_is_synced_there(folder: Folder, synced: Syncs) -> None:
    """Whoever found it there commits a reference without another sync."""
    ref = placed(folder, b"back")
    name = payloads.name_of(ref)
    before = synced.of(folder.bucket_of(name))
    placing.remove(folder, name, 0)
    assert placing.find(folder, ref.sha256, "a", "b", 4) == ref
    assert synced.of(folder.bucket_of(name)) == before + 1


def test_what_a_row_says_of_a_small_body_does_not_matter(folder: Folder) -> None:
    for body in (b"", b"abc"):
        ref = placed(folder, body)
        assert placed(folder, body, "other type", (payloads.name_of(ref),)).sha256 == ref.sha256


def test_the_error_that_ends_the_writing_is_told(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def write() -> None:
        with placing.temporary_file(folder) as file:
            monkeypatch.setattr(os, "write", refuse)
            monkeypatch.setattr(os, "unlink", refuse)
            file.write(b"body")

    with pytest.raises(DatabasePathError, match="cannot write the payload"):
        write()


def test_what_a_process_has_no_means_to_open_is_not_damaged(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = placed(folder, b"sound")

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    for look in (
        lambda: files.is_placed(folder, ref),
        lambda: placing.find(folder, ref.sha256, "a", "b", 5),
    ):
        with pytest.raises(DatabasePathError, match="Too many open files"):
            look()


def test_a_foreign_file_where_a_folder_belongs(folder: Folder) -> None:
    ref = placed(folder, b"foreign")
    bucket = Path(folder.bucket_of(payloads.name_of(ref)))
    shutil.rmtree(bucket)
    bucket.write_bytes(b"mine")
    assert placing.find(folder, ref.sha256, "a", "b", 7) is None
    with pytest.raises(DatabasePathError, match="Not a directory"):
        placed(folder, b"foreign")
    bucket.unlink()
    bucket.symlink_to(bucket)
    with pytest.raises(DatabasePathError, match="cannot look for the payload"):
        placing.find(folder, ref.sha256, "a", "b", 7)


def test_without_threads_the_caller_does_it_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    with placing.helper("test") as helper:
        for number in range(3):
            helper.start(done.append, number)()
    assert done == [0, 1, 2]
    refused.clear()
    ref = placed(folder, LARGE)
    assert len(refused) == 1
    assert Path(folder.path_of(payloads.name_of(ref))).read_bytes() == LARGE
