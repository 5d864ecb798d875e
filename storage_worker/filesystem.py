"""Where a database may lie, and directories and files that only their owner can read."""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil

from .protocol.errors import DatabasePathError, StorageError, StorageFullError

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

SIDE_DIRECTORY_SUFFIX = "-sw"
"""What the name of a database has behind it in that of the directory with its worker's files."""

JOURNAL_SUFFIX = "-journal"
"""The longest that SQLite hangs onto a database's name."""

DATABASE_SUFFIXES = ("", "-wal", "-shm", JOURNAL_SUFFIX)

PATH_BYTES_MAX = 512 - len(JOURNAL_SUFFIX)
"""SQLite's bound on a path (MAX_PATHNAME in its os_unix.c), with room for the suffix."""

MOUNTS_FILE = Path("/proc/self/mountinfo")

# SQLite's WAL needs memory shared between processes and locks that hold; these file systems do not
# give both (sqlite.org, "Write-Ahead Logging", and "How To Corrupt An SQLite Database File", 2.1).
REMOTE_KINDS = frozenset(
    "9p afpfs afs beegfs ceph cifs coda davfs glusterfs lustre macfuse ncpfs orangefs osxfuse prl_fs pvfs2"
    " smb3 smbfs vboxsf virtiofs vmhgfs webdav".split()
)
REMOTE_PREFIXES = ("fuse", "nfs")


class Mount(NamedTuple):
    """One mounted file system. `device` is None where the platform does not tell it."""

    point: str
    kind: str
    device: int | None


def check_path(path: str | os.PathLike[str]) -> str:
    """The real path of a database, whether it exists yet or not; makes and opens nothing.

    Raises `DatabasePathError` with the reason where no worker can serve it: a directory or special file,
    more than one hard link, a network or FUSE file system, no permission to write, a missing parent.
    """
    given = os.fspath(path)
    real = _resolve(given)
    try:
        parent = Path(real).parent.stat()
        if not stat.S_ISDIR(parent.st_mode):
            _refuse(given, "its parent is no directory")
        found = _stat(real)
    except FileNotFoundError:
        _refuse(given, f"the directory {Path(real).parent} does not exist; make it first")
    except OSError as error:
        _refuse(given, error.strerror or str(error))
    if found is not None:
        _check_file(given, real, found)
    if not _may_write(str(Path(real).parent)):
        _refuse(given, "its directory is read-only, and SQLite keeps files beside the database")
    _check_mount(given, real, parent.st_dev)
    return real


def _resolve(given: str) -> str:
    if not isinstance(given, str):
        _refuse(repr(given), "a path is text")
    if given in {"", ":memory:"}:
        _refuse(given, "it names no file; a worker serves a database file")
    try:
        given.encode()
        real = os.path.realpath(given)
        size = len(real.encode())
    except ValueError as error:  # a NUL, or bytes that are no UTF-8
        _refuse(given, f"SQLite takes no such name ({error})")
    if size > PATH_BYTES_MAX:
        _refuse(given, f"its {size} bytes are more than the {PATH_BYTES_MAX} that SQLite takes")
    name_bytes = len(Path(real).name.encode()) + len(JOURNAL_SUFFIX)
    if name_bytes > _name_bytes_max(real):
        _refuse(given, f"its name leaves no room for {JOURNAL_SUFFIX!r}, which SQLite hangs onto it")
    return real


def _name_bytes_max(real: str) -> int:
    try:
        return os.pathconf(Path(real).parent, "PC_NAME_MAX")
    except OSError:
        return 255  # the parent is missing, which is the reason that will be given


def _stat(path: str) -> os.stat_result | None:
    try:
        return Path(path).stat()
    except FileNotFoundError:
        return None


def _check_file(given: str, real: str, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        _refuse(given, "it is a directory")
    if not stat.S_ISREG(found.st_mode):
        _refuse(given, "it is no regular file")
    if found.st_nlink > 1:
        _refuse(given, f"it has {found.st_nlink} hard links; under another name others would not see its WAL")
    if not _may_write(real):
        _refuse(given, "it is read-only")


def _may_write(path: str) -> bool:
    return os.access(path, os.R_OK | os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _check_mount(given: str, real: str, device: int) -> None:
    mount = mount_of(real, device, mounts())
    if mount is None:
        return
    if mount.kind in REMOTE_KINDS or mount.kind.startswith(REMOTE_PREFIXES):
        _refuse(given, f"{mount.point} is a network or FUSE file system ({mount.kind}); use a local disk")
    if mount.point == real:
        _refuse(given, "the file is mounted by itself, so that its WAL would lie on another file system")


def mounts() -> list[Mount]:
    """What is mounted for this process, later mounts after earlier ones."""
    if sys.platform != "linux":
        return [Mount(found.mountpoint, found.fstype, None) for found in psutil.disk_partitions(all=True)]
    try:
        lines = MOUNTS_FILE.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []  # a sandbox without /proc, where nobody can tell
    return [_parse_mount(line) for line in lines if line]


def _parse_mount(line: bytes) -> Mount:
    # proc_pid_mountinfo(5): id, parent, major:minor, root, mount point, options, tags, "-", kind, ...
    head, tail = line.split(b" - ", 1)
    fields = head.split(b" ")
    major, minor = fields[2].split(b":")
    return Mount(
        os.fsdecode(_unescape(fields[4])), tail.split(b" ", 1)[0].decode(), os.makedev(int(major), int(minor))
    )


def _unescape(field: bytes) -> bytes:
    for char in b" \t\n\\":
        field = field.replace(b"\\%03o" % char, bytes([char]))
    return field


def mount_of(path: str, device: int, found: Iterable[Mount]) -> Mount | None:
    """The mount that holds a path whose directory lies on `device`; None where none is known.

    It is the one with the longest mount point. One that another mount hides has another device; where no
    device fits (Btrfs numbers its subvolumes by itself) the path alone decides.
    """
    candidates = [mount for mount in found if path == mount.point or _is_below(path, mount.point)]
    own = [mount for mount in candidates if mount.device == device or mount.point == path]
    best: Mount | None = None
    for mount in own or candidates:
        if best is None or len(mount.point) >= len(best.point):
            best = mount
    return best


def _is_below(path: str, point: str) -> bool:
    return path.startswith(point.rstrip("/") + "/")


def _refuse(given: str, reason: str) -> NoReturn:
    shown = given.encode("utf-8", "backslashreplace").decode()
    raise DatabasePathError(
        f"the database path {shown!r} is refused: {reason}", details={"path": shown, "reason": reason}
    )


def failure_of_file(what: str, path: str, error: OSError) -> StorageError:
    """The typed error where the system refuses something on a file; `what` begins the message."""
    kind = StorageFullError if error.errno in {errno.ENOSPC, errno.EDQUOT} else DatabasePathError
    return kind(f"{what} {path}: {error.strerror}", details={"path": path, "reason": error.strerror})


def private_directory(path: str) -> None:
    """Make a directory with mode 0700, or take one of that mode that is there.

    Raises `DatabasePathError` where it cannot be made, is no directory, or is another user's, and
    `StorageFullError` where there is no room for it.
    """
    place = Path(path)
    try:
        with contextlib.suppress(FileExistsError):
            place.mkdir(DIRECTORY_MODE)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to the user with id {found.st_uid}", path)
        if stat.S_IMODE(found.st_mode) != DIRECTORY_MODE:
            place.chmod(DIRECTORY_MODE)
    except OSError as error:
        raise failure_of_file("cannot make or open the directory", path, error) from error


def sync_directory(path: str) -> None:
    """Have what was made, renamed and removed in a directory survive a power loss. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(real: str) -> None:
    """Give a database's files that exist mode 0600.

    Raises `DatabasePathError` where they are another user's. By path, since opening and closing one of them
    here would drop SQLite's POSIX locks.
    """
    for suffix in DATABASE_SUFFIXES:
        try:
            found = Path(real + suffix).stat()
            if stat.S_IMODE(found.st_mode) != FILE_MODE:
                Path(real + suffix).chmod(FILE_MODE)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise failure_of_file("cannot make private", real + suffix, error) from error
