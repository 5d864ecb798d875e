"""An operating-system lock on a file that is never unlinked and that no forked child keeps."""

import os
import sys
import threading
from pathlib import Path

from .filesystem import FILE_MODE, failure_of_file
from .protocol.errors import DatabasePathError

if sys.platform != "win32":
    import fcntl

REPLACED_TRIES_MAX = 10

_held: set[int] = set()
# A forked child shares the lock of its parent and would keep it beyond the parent's death. So no fork
# happens between open and note, and the child closes what was noted. Re-entrant, because a signal
# handler may fork while its own thread is in here.
_forking = threading.RLock()


def _after_fork_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
    _forking.release()


if sys.platform != "win32":
    os.register_at_fork(
        before=_forking.acquire,
        after_in_parent=_forking.release,
        after_in_child=_after_fork_in_child,
    )


class LockFile:
    """A lock that this process holds until `release`, or until it ends."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._pid = os.getpid()

    @classmethod
    def try_take(cls, path: str) -> "LockFile | None":
        """Take the lock on the file `path`, made with mode 0600 where it is missing.

        Returns None where someone else holds it. Raises `DatabasePathError` where the file cannot be
        opened, or is replaced again and again while it is being locked.
        """
        for _ in range(REPLACED_TRIES_MAX):
            with _forking:
                descriptor = _open(path, os.O_RDWR | os.O_CREAT)
                taken = False
                try:
                    if not _lock(descriptor, fcntl.LOCK_EX, path):
                        return None
                    if _is_at(descriptor, path):
                        os.fchmod(descriptor, FILE_MODE)
                        _held.add(descriptor)
                        taken = True
                        return cls(path, descriptor)
                finally:
                    if not taken:
                        os.close(descriptor)
        raise DatabasePathError(
            f"the lock file {path} is replaced all the time; nothing may remove it", details={"path": path}
        )

    def in_place(self) -> bool:
        """Whether the locked file is still the one under its path."""
        return self._descriptor is not None and _is_at(self._descriptor, self.path)

    def release(self) -> None:
        """Give the lock up; nothing where that was done, or in a forked child, which never had it."""
        descriptor = self._descriptor
        if descriptor is None or self._pid != os.getpid():
            return
        with _forking:
            self._descriptor = None
            _held.discard(descriptor)
            # Closing alone would leave the lock with a child that was forked by other means.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def is_locked(path: str) -> bool:
    """Whether someone holds the lock on `path`; makes no file."""
    with _forking:
        if not os.path.lexists(path):
            return False
        descriptor = _open(path, os.O_RDONLY)
        try:
            return not _lock(descriptor, fcntl.LOCK_SH, path)
        finally:
            os.close(descriptor)


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        raise failure_of_file("cannot open the lock file", path, error) from error


def _lock(descriptor: int, kind: int, path: str) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise failure_of_file("cannot lock", path, error) from error
    return True


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the locked file is the one under the path, which another process may have replaced."""
    ours = os.fstat(descriptor)
    try:
        theirs = Path(path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
