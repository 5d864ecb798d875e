"""The payload store's files and what they are named, and how one is read; no database here.

`objects/` holds a file for each payload, in one of 256 folders; `temporary/` what is being written, and what is being
removed. Everything under a name in `objects/` was synced and its content checked before it got that name.
"""

import errno
import hashlib
import operator
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ..filesystem import failure_of_file
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

BUFFER_BYTES = 256 * KIB
"""How much of a body is read at a time only to be hashed."""

Encoding = Literal["identity", "gzip"]

GZIP_WINDOW = 31
"""zlib's number for a gzip header and trailer around the largest window."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{32}")
_TEMPORARY = re.compile(r"[0-9a-f]{32}")

_NO_MEANS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Folder:
    """The directory of one database's payloads, and the paths in it. Makes and opens nothing by itself."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.objects = f"{path}/objects"
        self.temporary = f"{path}/temporary"

    @classmethod
    def inside(cls, side_directory: str) -> "Folder":
        """That of the database with this directory beside it."""
        return cls(f"{side_directory}/payloads")

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


def is_temporary(name: str) -> bool:
    """Whether a name in `temporary/` is that of a file that is written there, or of one that a sweep takes away."""
    return _TEMPORARY.fullmatch(name) is not None or is_name(name)


def encoding_of(size: int) -> Encoding:
    """How the file of a body of `size` bytes holds it."""
    return "gzip" if size <= GZIP_BYTES_MAX else "identity"


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
            "reason": why,
        },
    )


# Reading


@contextmanager
def opened(path: str, ref: PayloadRef) -> Iterator[int]:
    """A descriptor of a payload's file; `StorageCorruptError` where it is missing, no file, or has another size.

    Raises `DatabasePathError` where this process can open no file at all, which says nothing of this one.
    """
    wrong = contradiction(ref)
    if wrong is not None:
        raise damaged(ref, "record", wrong)
    try:
        # A link would lead elsewhere; a pipe under the name must not make the open wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise damaged(ref, "missing", "its file is missing") from error
    except OSError as error:
        if error.errno in _NO_MEANS:
            raise failure_of_file("cannot open the payload", path, error) from error
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
    """How many bytes a range has; `InvalidRequestError` where offset and length are no integers of at least 0 and 1."""
    try:
        is_range = operator.index(offset) >= 0 and operator.index(length) >= 1
    except TypeError:
        is_range = False
    if not is_range:
        raise InvalidRequestError(
            f"a range from {offset!r} of {length!r} bytes; it begins at 0 or later and takes at least 1 byte"
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
    for start in range(0, ref.bytes, chunk_bytes):
        chunk = _read(descriptor, ref, start, min(chunk_bytes, ref.bytes - start))
        digest.update(chunk)
        yield chunk
    _check_digest(ref, digest.hexdigest())


def stored_chunks(descriptor: int, ref: PayloadRef) -> Iterator[bytes]:
    """The file as it stands, packed or not and unchecked, at most `CHUNK_BYTES` at a time."""
    for start in range(0, ref.stored_bytes, CHUNK_BYTES):
        yield _read(descriptor, ref, start, min(CHUNK_BYTES, ref.stored_bytes - start))


def verify(descriptor: int, ref: PayloadRef) -> None:
    """Read the whole file and raise `StorageCorruptError` where it does not hold the body of the reference."""
    _check_digest(ref, digest_of(descriptor, ref))


def digest_of(descriptor: int, ref: PayloadRef) -> str:
    """The SHA-256 of the body that a file holds, which is read from its beginning."""
    if ref.encoding == "gzip":
        return hashlib.sha256(_unpack(descriptor, ref)).hexdigest()
    digest = hashlib.sha256()
    # One buffer that stays in the processor's cache: new memory for each part costs a fifth of the time.
    buffer = memoryview(bytearray(BUFFER_BYTES))
    left = ref.bytes
    while left:
        try:
            count = os.readv(descriptor, [buffer[:left]])
        except OSError as error:
            raise damaged(ref, "unreadable", f"its file cannot be read: {error.strerror}") from error
        if not count:
            raise damaged(ref, "size", f"its file ends {left} bytes too early")
        digest.update(buffer[:count])
        left -= count
    return digest.hexdigest()


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
    unpacking = zlib.decompressobj(wbits=GZIP_WINDOW)
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
