"""Writing the payload store's files, giving them their names, and removing them; no database here.

A file is written under a temporary name, checked and synced, and only then gets the name of its payload; the
directories are synced behind that. So what stands under a name is whole, in spite of a crash or a power loss.
"""

import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

import msgspec

from ..filesystem import FILE_MODE, failure_of_file, private_directory
from ..protocol.errors import StorageCorruptError
from ..protocol.limits import KIB
from .payload_files import GZIP_WINDOW, Folder, digest_of, encoding_of, is_name, name_of, opened, verify
from .records import PayloadRef
from .synced_directories import SyncedDirectories

P = ParamSpec("P")
T = TypeVar("T")

SAMPLES_COUNT = 8
SAMPLE_BYTES = 4 * KIB
"""What of a large body is compared to see whether it may be the same as another one."""


def _pass(_: str) -> None:
    """Go on: nothing ends the process here."""


reached: Callable[[str], None] = _pass
"""Called with the name of each step that was just done; tests end the process in it."""


_directories = SyncedDirectories()


def pack(body: bytes | memoryview) -> bytes:
    """The content of the file of a body that is small enough to be packed."""
    return zlib.compress(body, wbits=GZIP_WINDOW)


def prepare(folder: Folder) -> None:
    """Make the directories that are missing."""
    side = os.path.dirname(folder.path)
    if not (os.path.isdir(folder.objects) and os.path.isdir(folder.temporary)):
        for directory in (folder.path, folder.objects, folder.temporary):
            with _directories.changing(os.path.dirname(directory)):
                private_directory(directory)
    for directory in (os.path.dirname(side), side, folder.path):
        _directories.sync(directory)


class Helper:
    """A thread that does something beside its caller; where the system gives none, the caller does it itself."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._has_thread = True

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
        """Begin a function; what is returned waits for its result."""
        if self._has_thread:
            try:
                return self._pool.submit(function, *args, **kwargs).result
            except RuntimeError:
                # Its pool has queued it, so that a thread that came later would do it twice.
                self._has_thread = False
        result = function(*args, **kwargs)
        return lambda: result


@contextmanager
def helper(name: str) -> Iterator[Helper]:
    """A helper, whose work is over at the end."""
    with ThreadPoolExecutor(1, name) as pool:
        yield Helper(pool)


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
    owner = os.getpid()
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
        # A forked child drops its copy of what its parent goes on writing.
        if os.getpid() == owner:
            # What cannot be removed is swept; the error that ends the writing says more than this one.
            with suppress(OSError):
                os.unlink(path)


def find(
    folder: Folder, sha256: str, content_type: str, retention_class: str, size: int
) -> PayloadRef | None:
    """The payload of an identity and size, checked, safe from a power loss and not to be swept soon; None without.

    None also where a file is there and damaged, so that it is written anew. Raises `DatabasePathError` where it cannot
    be looked for.
    """
    name = name_of(sha256, content_type, retention_class)
    path = folder.path_of(name)
    try:
        stored_bytes = os.lstat(path).st_size
        ref = PayloadRef(sha256, content_type, retention_class, size, stored_bytes, encoding_of(size))
        with opened(path, ref) as descriptor:
            verify(descriptor, ref)
            # Whoever put it may not have got as far as this.
            _directories.sync(folder.objects)
            _directories.sync(folder.bucket_of(name))
            return ref if touch(path) == os.fstat(descriptor).st_ino else None
    except (FileNotFoundError, NotADirectoryError, StorageCorruptError):
        return None
    except OSError as error:
        raise failure_of_file("cannot look for the payload", path, error) from error


def touch(path: str) -> int | None:
    """Make a file new, so that no sweep removes it; its inode where it still stands there afterwards.

    A sweep that began before sees that the file is new, or has taken it away before this looks for it.
    """
    try:
        os.utime(path, follow_symlinks=False)
        return os.lstat(path).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def place(
    folder: Folder,
    temporary: str,
    size: int,
    content_type: str,
    retention_class: str,
    alike: Iterable[str] = (),
) -> PayloadRef:
    """Make a temporary file with a body of `size` bytes durable and give it the name of its payload.

    Where a sound file has that name already it stays, and so does the temporary one; `alike` are names of payloads
    that may be the same. Raises `StorageCorruptError` where the temporary file is missing or holds no such body.
    """
    path = folder.temporary_path(temporary)
    draft = PayloadRef("", content_type, retention_class, size, _packed_bytes(path, size), encoding_of(size))
    try:
        with opened(path, draft) as descriptor:
            # What is there already need not be synced.
            is_likely = any(_looks_like(descriptor, size, folder, name) for name in alike)
            sha256 = digest_of(descriptor, draft) if is_likely else _digest_and_sync(descriptor, draft)
            found = find(folder, sha256, content_type, retention_class, size)
            if found is not None:
                return found
            if is_likely:
                os.fsync(descriptor)
            reached("synced")
            _move(folder, path, name_of(sha256, content_type, retention_class))
    except OSError as error:
        raise failure_of_file("cannot place the payload", path, error) from error
    return msgspec.structs.replace(draft, sha256=sha256)


def _looks_like(descriptor: int, size: int, folder: Folder, name: str) -> bool:
    """Whether a payload's file may hold the same body, by a few samples; false where it cannot be read."""
    if not is_name(name):
        return False
    try:
        other = os.open(folder.path_of(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A row that is damaged may say of any size that it stands for a large body.
        places = range(0, size, max(1, size // SAMPLES_COUNT))
        return all(
            os.pread(descriptor, SAMPLE_BYTES, at) == os.pread(other, SAMPLE_BYTES, at) for at in places
        )
    except OSError:
        return False
    finally:
        os.close(other)


def _packed_bytes(path: str, size: int) -> int:
    """How many bytes the file of a body has: known of what is not packed, and else whatever it has."""
    if encoding_of(size) == "gzip":
        with suppress(FileNotFoundError):
            return os.lstat(path).st_size
    return size


def _digest_and_sync(descriptor: int, ref: PayloadRef) -> str:
    """Do both, side by side where that is worth a thread."""
    if ref.encoding == "gzip":
        sha256 = digest_of(descriptor, ref)
        os.fsync(descriptor)
    else:
        with helper("payload-sync") as beside:
            synced = beside.start(os.fsync, descriptor)
            sha256 = digest_of(descriptor, ref)
            synced()
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
            # Where it was written anew meanwhile, one of two good files takes the other's place. Whoever touched it
            # had synced it there, and commits without doing so again.
            bucket = folder.bucket_of(name)
            with _directories.changing(bucket):
                os.rename(aside, path)
            _directories.sync(bucket)
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
