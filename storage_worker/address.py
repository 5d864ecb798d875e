"""The address of a database's worker: a Unix socket with a short path, in a directory of its user's own."""

import contextlib
import hashlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

from .filesystem import FILE_MODE, failure_of_file, private_directory
from .protocol.errors import DatabasePathError

SCHEME = "unix://"
SOCKET_PATH_BYTES_MAX = 99
"""A socket's path holds 103 bytes on macOS and 107 on Linux."""

NAME_DIGITS = 16
FRESH_PREFIX = "sw-"
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def socket_address(real: str) -> str:
    """The address for the worker of the database with the real path `real`.

    It is the same for every start, so that clients find a restarted worker where they found the one
    before. Where no directory of the usual ones can be used it is a fresh one, known from the record
    only. Raises `DatabasePathError` where there is none at all.
    """
    name = hashlib.sha256(real.encode()).hexdigest()[:NAME_DIGITS] + ".sock"
    for base in _bases():
        path = f"{base}/{name}"
        if _fits(path) and _is_usable(base):
            return SCHEME + path
    return f"{SCHEME}{_fresh_base()}/{name}"


def _bases() -> list[str]:
    own = f"storage-worker-{os.geteuid()}"
    bases = []
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        bases.append(f"{runtime}/storage-worker")
    # Without any directory for temporary files there may still be one for the runtime.
    with contextlib.suppress(FileNotFoundError):
        bases.append(f"{tempfile.gettempdir()}/{own}")
    bases.append(f"/tmp/{own}")  # noqa: S108 - used only where it is private and this user's
    return bases


def _fits(path: str) -> bool:
    try:
        # An address travels as text, which not every path of bytes is.
        path.encode()
    except UnicodeEncodeError:
        return False
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def _is_usable(base: str) -> bool:
    try:
        # In one that others could enter they may have laid a socket of theirs.
        if stat.S_IMODE(Path(base).lstat().st_mode) & OPEN_TO_OTHERS:
            return False
    except FileNotFoundError:
        pass
    except OSError:
        return False
    try:
        private_directory(base)
    except DatabasePathError:
        return False
    return True


def _fresh_base() -> str:
    for directory in (None, "/tmp"):  # noqa: S108 - mkdtemp makes a private directory
        try:
            base = tempfile.mkdtemp(prefix=FRESH_PREFIX, dir=directory)
        except OSError:
            continue
        if _fits(f"{base}/{'x' * NAME_DIGITS}.sock"):
            return base
        Path(base).rmdir()
    raise DatabasePathError(
        "there is no directory for the worker's socket: set XDG_RUNTIME_DIR or TMPDIR to a writable directory"
        f" whose path is shorter than {SOCKET_PATH_BYTES_MAX // 2} bytes"
    )


def socket_path(address: str) -> str:
    """The path of the socket of an address; `ValueError` where it is none."""
    if not address.startswith(SCHEME + "/"):
        raise ValueError(f"{address!r} is no address of a worker: those begin with {SCHEME}/")
    return address.removeprefix(SCHEME)


def listen(address: str, backlog: int) -> socket.socket:
    """The listening socket of a worker, mode 0600, in the place of whatever a dead one left there.

    Only the holder of the database's lock may call it. Raises `DatabasePathError` where its directory is
    gone and cannot be made again.
    """
    path = socket_path(address)
    private_directory(str(Path(path).parent))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Named into its place when it listens already, so that nobody ever meets one that refuses.
    new = f"{path.removesuffix('.sock')}.new"
    try:
        Path(new).unlink(missing_ok=True)
        listener.bind(new)
        Path(new).chmod(FILE_MODE)
        listener.listen(backlog)
        Path(new).replace(path)
    except OSError as error:
        listener.close()
        Path(new).unlink(missing_ok=True)
        raise failure_of_file("cannot make the worker's socket", path, error) from error
    return listener


def withdraw(address: str, inode: int) -> None:
    """Remove a socket that `listen` made, if the one in its place is still that: `inode_of` tells."""
    path = Path(socket_path(address))
    with contextlib.suppress(FileNotFoundError):
        if inode_of(address) != inode:
            return
        path.unlink()
        if path.parent.name.startswith(FRESH_PREFIX):
            with contextlib.suppress(OSError):  # what a killed worker left in it keeps it
                path.parent.rmdir()


def inode_of(address: str) -> int:
    """The inode of the socket in an address's place; `FileNotFoundError` where there is none."""
    return Path(socket_path(address)).lstat().st_ino


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end is this user's, asked of the kernel before a byte is read."""
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    else:
        # getpeereid: LOCAL_PEERCRED on SOL_LOCAL (0) gives a struct xucred, whose second field is the uid.
        _, uid = struct.unpack("II", sock.getsockopt(0, 1, struct.calcsize("II")))
    return bool(uid == os.geteuid())
