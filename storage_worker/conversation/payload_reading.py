"""Reading a payload's file that the worker has located; both clients do it so."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from ..protocol.errors import InvalidRequestError, ResultTooLargeError
from . import payload_files as files
from .payload_files import Folder
from .payloads import Located, name_of
from .records import PayloadRef


def read_whole(located: Located, ref: PayloadRef, bytes_max: int) -> bytes:
    """A whole body of at most `bytes_max` bytes, checked; errors as of `payload_client.read`."""
    with _opened(located, ref) as descriptor:
        found = located.ref
        if found.bytes > bytes_max:
            raise ResultTooLargeError(
                f"the payload has {found.bytes} bytes, over the {bytes_max} that were allowed; read it as a stream",
                details={"payload_bytes": found.bytes, "bytes_max": bytes_max},
            )
        return files.read_whole(descriptor, found)


def read_text(located: Located, ref: PayloadRef, bytes_max: int) -> str:
    """A whole body as a text; errors as of `payload_client.read_text`."""
    try:
        return read_whole(located, ref, bytes_max).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the payload {ref.sha256} is no text in UTF-8: {error}") from error


def read_range(located: Located, ref: PayloadRef, offset: int, length: int) -> bytes:
    """`length` bytes from `offset` on; errors as of `payload_client.read_range`."""
    with _opened(located, ref) as descriptor:
        return files.read_range(descriptor, located.ref, offset, length)


def read_chunks(located: Located, ref: PayloadRef, chunk_bytes: int) -> Generator[bytes, None, None]:
    """The body in order, at most `chunk_bytes` at a time and never none; errors as of `payload_client.stream`."""
    with _opened(located, ref) as descriptor:
        yield from files.read_chunks(descriptor, located.ref, chunk_bytes)


def check_client(client: object, kind: type, advice: str) -> None:
    """Raise `InvalidRequestError`, which says `advice`, for what is no client of a kind."""
    if not isinstance(client, kind):
        raise InvalidRequestError(f"this takes {kind.__name__}, no {type(client).__name__}; {advice}")


def check_chunk(chunk_bytes: int) -> None:
    """Raise `InvalidRequestError` for less than a byte at a time."""
    if chunk_bytes < 1:
        raise InvalidRequestError(f"a stream gives at least 1 byte at a time, not {chunk_bytes}")


@contextmanager
def _opened(located: Located, ref: PayloadRef) -> Iterator[int]:
    """The open file of a payload."""
    with files.opened(Folder(located.folder).path_of(name_of(ref)), located.ref) as descriptor:
        yield descriptor
