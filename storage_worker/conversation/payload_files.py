"""The payload store's files: named by their content, private, whole before they have a name. Knows no database.

`objects/` holds a file for each payload, in one of 256 folders; `temporary/` what is being written, and what is being
removed. Everything under a name in `objects/` was synced and its content checked before it got that name.
"""

import hashlib
import os
import re
import secrets
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec

from ..filesystem import FILE_MODE, failure_of_file, private_directory
from ..protocol.errors import InvalidRequestError, StorageCorruptError
from ..protocol.limits import KIB, MIB
from .records import PayloadRef

GZIP_BYTES_MAX = 512 * KIB
"""Bodies up to this are packed; a larger one is stored as it is, so that a range of it can be read alone."""

PACKED_BYTES_MAX = GZIP_BYTES_MAX + 4 * KIB
"""The largest packed file: what cannot be made smaller grows by less than a thousandth."""

PAYLOAD_BYTES_MAX = 256 * MIB
"""The largest body: the worker reads it once in one request, well within the time that it gives a handler."""

CHUNK_BYTES = 1 * MIB
"""How much of a large body is held in memory at a time."""

SAMPLES_COUNT = 8
SAMPLE_BYTES = 4 * KIB
"""What of a large body is compared to see whether it may be the same as another one."""

Encoding = Literal["identity", "gzip"]

_GZIP = 31
"""zlib's number for a gzip header and trailer around the largest window."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{32}")
_TEMPORARY = re.compile(r"[0-9a-f]{32}")


def _pass(_: str) -> None:
    """Go on: nothing ends the process here."""


reached: Callable[[str], None] = _pass
"""Called with the name of each step that was just done; tests end the process in it."""


class Folder:
    """The directory of one database's payloads, and the paths in it. Makes and opens nothing by itself."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.objects = f"{path}/objects"
        self.temporary = f"{path}/temporary"

    def bucket_of(self, name: str) -> str:
        """The folder that the file `name` is in."""
        return f"{self.objects}/{name[:2]}"

    def path_of(self, name: str) -> str:
        """The path of the payload `name`; `ValueError` where that is no name, so that no stored text leads elsewhere."""
        if not is_name(name):
            raise ValueError(f"{name!r} is no name of a payload")
        return f"{self.bucket_of(name)}/{name}"

    def temporary_path(self, name: str) -> str:
        """The path of a file that is being written; `InvalidRequestError` where `name` is no such name."""
        if _TEMPORARY.fullmatch(name) is None:
            raise InvalidRequestError("the name of a temporary file is 32 hexadecimal characters")
        return f"{self.temporary}/{name}"

    def prepare(self) -> None:
        """Make the directories that are missing."""
        side = os.path.dirname(self.path)
        for directory in (self.path, self.objects, self.temporary):
            private_directory(directory)
        for directory in (os.path.dirname(side), side, self.path):
            _directories.sync(directory)


def name_of(sha256: str, content_type: str, retention_class: str) -> str:
    """The name of the payload of an identity, in the database and in the directory.

    Raises `InvalidRequestError` where there is no such identity.
    """
    if _SHA256.fullmatch(sha256) is None:
        raise InvalidRequestError("a SHA-256 is 64 hexadecimal characters, in small letters")
    try:
        kind = content_type.encode()
        label = b"%d:%b%b" % (len(kind), kind, retention_class.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError("content type or retention class hold a lone surrogate") from error
    return f"{sha256}-{hashlib.sha256(label).hexdigest()[:32]}"


def is_name(name: object) -> bool:
    """Whether something read from the database or a directory has the form of a payload's name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def encoding_of(size: int) -> Encoding:
    """How the file of a body of `size` bytes holds it."""
    return "gzip" if size <= GZIP_BYTES_MAX else "identity"


def pack(body: bytes | memoryview) -> bytes:
    """The content of the file of a body that is small enough to be packed."""
    return zlib.compress(body, wbits=_GZIP)


def contradiction(ref: PayloadRef) -> str | None:
    """What a reference or a row says that cannot be true of any payload; None where there is nothing."""
    if not 0 <= ref.bytes <= PAYLOAD_BYTES_MAX:
        return f"a body of {ref.bytes} bytes; the largest has {PAYLOAD_BYTES_MAX}"
    if ref.encoding != encoding_of(ref.bytes):
        return f"a body of {ref.bytes} bytes is not stored as {ref.encoding}"
    if ref.encoding == "identity" and ref.stored_bytes != ref.bytes:
        return f"a body of {ref.bytes} bytes, stored as it is in {ref.stored_bytes}"
    if not 0 <= ref.stored_bytes <= max(PACKED_BYTES_MAX, ref.bytes):
        return f"a body of {ref.bytes} bytes, packed into {ref.stored_bytes}"
    return None


def damaged(ref: PayloadRef, check: str, why: str) -> StorageCorruptError:
    """The error that names a payload and the check that it fails; one that is being placed has no hash yet."""
    return StorageCorruptError(
        f"the payload {ref.sha256 or 'that was written'} ({ref.content_type}, {ref.retention_class}) is damaged: {why}",
        details={
            "payload": ref.sha256,
            "content_type": ref.content_type,
            "retention_class": ref.retention_class,
            "check": check,
        },
    )


# Reading


@contextmanager
def opened(path: str, ref: PayloadRef) -> Iterator[int]:
    """A descriptor of a payload's file; `StorageCorruptError` where it is missing, no file, or has another size."""
    wrong = contradiction(ref)
    if wrong is not None:
        raise damaged(ref, "record", wrong)
    try:
        # A link would lead elsewhere; a pipe under the name must not make the open wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise damaged(ref, "missing", "its file is missing") from error
    except OSError as error:
        raise damaged(ref, "unreadable", f"its file cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise damaged(ref, "unreadable", "what stands in its place is no file")
        if found.st_size != ref.stored_bytes:
            raise damaged(ref, "size", f"its file has {found.st_size} bytes, recorded are {ref.stored_bytes}")
        yield descriptor
    finally:
        os.close(descriptor)


def read_whole(descriptor: int, ref: PayloadRef) -> bytes:
    """The body, checked against its size and hash."""
    is_packed = ref.encoding == "gzip"
    body = _unpack(descriptor, ref) if is_packed else _read(descriptor, ref, 0, ref.bytes)
    _check_digest(ref, hashlib.sha256(body).hexdigest())
    return body


def range_bytes(ref: PayloadRef, offset: int, length: int) -> int:
    """How many bytes a range has; `InvalidRequestError` where its offset is negative or its length below 1."""
    if offset < 0 or length < 1:
        raise InvalidRequestError(
            f"a range from {offset} of {length} bytes; it begins at 0 or later and takes at least 1 byte"
        )
    return max(0, min(length, ref.bytes - offset))


def read_range(descriptor: int, ref: PayloadRef, offset: int, length: int) -> bytes:
    """`length` bytes of the body from `offset` on, cut at its end.

    Nothing but the range is read of a body that is stored as it is, and nothing beyond it is unpacked of another one,
    so that its hash is not checked. `InvalidRequestError` where the offset is negative or the length below 1.
    """
    length = range_bytes(ref, offset, length)
    if not length:
        return b""
    if ref.encoding == "identity":
        return _read(descriptor, ref, offset, length)
    return _unpack(descriptor, ref, offset + length)[offset:]


def read_chunks(descriptor: int, ref: PayloadRef, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The body in order, at most `chunk_bytes` at a time.

    Its hash is known to be right only at the end, where `StorageCorruptError` is raised if it is not; that of a packed
    body is checked before its first chunk.
    """
    if ref.encoding == "gzip":
        body = read_whole(descriptor, ref)
        yield from (body[start : start + chunk_bytes] for start in range(0, len(body), chunk_bytes))
        return
    digest = hashlib.sha256()
    for chunk in _chunks(descriptor, ref, chunk_bytes):
        digest.update(chunk)
        yield chunk
    _check_digest(ref, digest.hexdigest())


def verify(descriptor: int, ref: PayloadRef) -> None:
    """Read the whole file and raise `StorageCorruptError` where it does not hold the body of the reference."""
    _check_digest(ref, _digest(descriptor, ref))


def _digest(descriptor: int, ref: PayloadRef) -> str:
    """The SHA-256 of the body that a file holds."""
    if ref.encoding == "gzip":
        return hashlib.sha256(_unpack(descriptor, ref)).hexdigest()
    digest = hashlib.sha256()
    for chunk in _chunks(descriptor, ref, CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(descriptor: int, ref: PayloadRef, chunk_bytes: int) -> Iterator[bytes]:
    for start in range(0, ref.bytes, chunk_bytes):
        yield _read(descriptor, ref, start, min(chunk_bytes, ref.bytes - start))


def _check_digest(ref: PayloadRef, found: str) -> None:
    if found != ref.sha256:
        raise damaged(ref, "digest", f"its content has the SHA-256 {found}")


def _read(descriptor: int, ref: PayloadRef, offset: int, length: int) -> bytes:
    parts: list[bytes] = []
    left = length
    while left:
        try:
            part = os.pread(descriptor, left, offset + length - left)
        except OSError as error:
            raise damaged(ref, "unreadable", f"its file cannot be read: {error.strerror}") from error
        if not part:
            raise damaged(ref, "size", f"its file ends {left} bytes too early")
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unpack(descriptor: int, ref: PayloadRef, end: int | None = None) -> bytes:
    """A packed body, or what of it stands before `end`; never more than its size and a byte."""
    packed = _read(descriptor, ref, 0, ref.stored_bytes)
    unpacking = zlib.decompressobj(wbits=_GZIP)
    try:
        # A byte more than there is shows what is too long, and has the end of the file looked at.
        body = unpacking.decompress(packed, ref.bytes + 1 if end is None else end)
    except zlib.error as error:
        raise damaged(ref, "gzip", f"its file cannot be unpacked: {error}") from error
    if end is not None and len(body) != end:
        raise damaged(ref, "size", f"it ends at byte {len(body)}, within the range")
    if end is None and (len(body) != ref.bytes or not unpacking.eof or unpacking.unused_data):
        raise damaged(ref, "gzip", f"its file does not unpack to exactly {ref.bytes} bytes")
    return body


# Writing


class TemporaryFile:
    """A file that a body is being written to, known to the worker by its `name`."""

    def __init__(self, name: str, path: str, descriptor: int) -> None:
        self.name = name
        self._path = path
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview) -> None:
        """Write all of it; `StorageFullError` where there is no room."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise failure_of_file("cannot write the payload", self._path, error) from error
        reached("written")


@contextmanager
def temporary_file(folder: Folder) -> Iterator[TemporaryFile]:
    """A new file to write a body to; removed at the end unless it was placed."""
    name = secrets.token_hex(16)
    path = folder.temporary_path(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, FILE_MODE)
    except OSError as error:
        raise failure_of_file("cannot write the payload", path, error) from error
    try:
        os.fchmod(descriptor, FILE_MODE)
        reached("made")
        yield TemporaryFile(name, path, descriptor)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(path)


def find(
    folder: Folder, sha256: str, content_type: str, retention_class: str, size: int
) -> PayloadRef | None:
    """The payload of an identity and size, checked, safe from a power loss and not to be swept soon; None without.

    None also where a file is there and damaged, so that it is written anew.
    """
    name = name_of(sha256, content_type, retention_class)
    path = folder.path_of(name)
    try:
        stored_bytes = os.lstat(path).st_size
    except FileNotFoundError:
        return None
    ref = PayloadRef(sha256, content_type, retention_class, size, stored_bytes, encoding_of(size))
    try:
        with opened(path, ref) as descriptor:
            verify(descriptor, ref)
            # Whoever put it may not have got as far as this.
            _directories.sync(folder.objects)
            _directories.sync(folder.bucket_of(name))
            return ref if touch(path) == os.fstat(descriptor).st_ino else None
    except StorageCorruptError:
        return None


def touch(path: str) -> int | None:
    """Make a file new, so that no sweep removes it; its inode where it still stands there afterwards.

    A sweep that began before sees that the file is new, or has taken it away before this looks for it.
    """
    try:
        os.utime(path, follow_symlinks=False)
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def place(folder: Folder, temporary: str, size: int, content_type: str, retention_class: str) -> PayloadRef:
    """Make a temporary file with a body of `size` bytes durable and give it the name of its payload.

    Where a sound file has that name already it stays, and so does the temporary one. Raises `StorageCorruptError`
    where the temporary file is missing or holds no such body.
    """
    path = folder.temporary_path(temporary)
    draft = PayloadRef("", content_type, retention_class, size, _packed_bytes(path, size), encoding_of(size))
    with opened(path, draft) as descriptor:
        sha256 = _digest_and_sync(descriptor, draft)
        found = find(folder, sha256, content_type, retention_class, size)
        if found is not None:
            return found
        name = name_of(sha256, content_type, retention_class)
        try:
            _move(folder, path, name)
        except OSError as error:
            raise failure_of_file("cannot place the payload", path, error) from error
    return msgspec.structs.replace(draft, sha256=sha256)


def _packed_bytes(path: str, size: int) -> int:
    """How many bytes the file of a body has: known of what is not packed, and else whatever it has."""
    if encoding_of(size) == "gzip":
        with suppress(FileNotFoundError):
            return os.lstat(path).st_size
    return size


def _digest_and_sync(descriptor: int, ref: PayloadRef) -> str:
    """Do both, side by side where that is worth a thread."""
    if ref.encoding == "gzip":
        sha256 = _digest(descriptor, ref)
        os.fsync(descriptor)
    else:
        with ThreadPoolExecutor(1, "payload-sync") as helper:
            syncing = helper.submit(os.fsync, descriptor)
            sha256 = _digest(descriptor, ref)
            syncing.result()
    reached("synced")
    return sha256


def _move(folder: Folder, path: str, name: str) -> None:
    bucket = folder.bucket_of(name)
    if not os.path.isdir(bucket):
        with _directories.changing(folder.objects):
            private_directory(bucket)
    _directories.sync(folder.objects)
    with _directories.changing(bucket):
        os.utime(path, follow_symlinks=False)
        os.rename(path, folder.path_of(name))
    reached("renamed")
    _directories.sync(bucket)
    reached("placed")


def is_placed(folder: Folder, ref: PayloadRef) -> bool:
    """Whether a payload's file is in its place; a look that takes microseconds, not at its content.

    Raises `StorageCorruptError` where its size is not that of the reference.
    """
    path = folder.path_of(name_of(ref.sha256, ref.content_type, ref.retention_class))
    try:
        with opened(path, ref) as descriptor:
            # A gzip file ends with the size of what it holds (RFC 1952, 2.3.1).
            if ref.encoding == "gzip":
                tail = _read(descriptor, ref, max(0, ref.stored_bytes - 4), min(4, ref.stored_bytes))
                if int.from_bytes(tail, "little") != ref.bytes:
                    raise damaged(ref, "size", f"its file does not hold {ref.bytes} bytes")
    except StorageCorruptError as error:
        if error.details["check"] == "missing":
            return False
        raise
    return True


def looks_like(folder: Folder, name: str, body: memoryview) -> bool:
    """Whether a file may hold a body, by a few samples; false where it cannot be read."""
    if not is_name(name):
        return False
    try:
        descriptor = os.open(folder.path_of(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        places = range(0, len(body), len(body) // SAMPLES_COUNT)
        return all(os.pread(descriptor, SAMPLE_BYTES, at) == body[at : at + SAMPLE_BYTES] for at in places)
    except OSError:
        return False
    finally:
        os.close(descriptor)


# Removing


def remove(folder: Folder, name: str, older_than_ns: int) -> None:
    """Remove the file of a payload unless it was touched since the nanosecond `older_than_ns`.

    It is taken out of its place first and looked at then: whoever touches it later does not find it there any more
    and writes it anew, and whoever did before is seen.
    """
    path, aside = folder.path_of(name), f"{folder.temporary}/{name}"
    with suppress(FileNotFoundError):
        os.rename(path, aside)
        reached("aside")
        if os.lstat(aside).st_mtime_ns > older_than_ns:
            # Where it was written anew meanwhile, one of two good files takes the other's place.
            os.rename(aside, path)
        else:
            os.unlink(aside)


def remove_temporary(folder: Folder, name: str) -> None:
    """Remove a file that nobody went on writing, or that a sweep left behind."""
    with suppress(FileNotFoundError):
        os.unlink(f"{folder.temporary}/{name}")


def old_bytes(path: str, older_than_ns: int) -> int | None:
    """The size of a file that was not touched since then; None for another one, or none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_mtime_ns <= older_than_ns else None


def listing(directory: str, after: str) -> list[str]:
    """The names in a directory behind `after`, in order; nothing where there is no such directory."""
    try:
        return sorted(name for name in os.listdir(directory) if name > after)
    except FileNotFoundError:
        return []


class _Directories:
    """Which directories are on the disk as they are, so that each change is synced once and none is forgotten.

    A process does not know what another one left behind: it syncs each directory at least once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changing: dict[str, int] = {}
        self._changes: dict[str, int] = {}
        self._synced: dict[str, int] = {}

    @contextmanager
    def changing(self, path: str) -> Iterator[None]:
        """Within, something in the directory changes: whoever sees that must not rely on an earlier sync."""
        with self._lock:
            self._changing[path] = self._changing.get(path, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._changing[path] -= 1
                self._changes[path] = self._changes.get(path, 0) + 1

    def sync(self, path: str) -> None:
        """Sync a directory, unless nothing in it has changed since that was done."""
        with self._lock:
            changes = self._changes.setdefault(path, 0)
            is_changing = self._changing.get(path, 0) > 0
            if self._synced.get(path, -1) >= changes and not is_changing:
                return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not is_changing:
            with self._lock:
                self._synced[path] = max(self._synced.get(path, -1), changes)


_directories = _Directories()
