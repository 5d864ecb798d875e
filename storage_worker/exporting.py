"""Writes what the store holds as JSON lines, in the form that `transcripts.exports` describes."""

import contextlib
import os
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

from . import conversation
from .client.client import Client
from .conversation import payload_client
from .conversation.bounds import STATES_COUNT_MAX
from .conversation.errors import PayloadNotFoundError
from .conversation.records import Event, Historic, Page, PayloadRef, Room, Said, Session, decode_object
from .filesystem import failure_of_file, sync_directory
from .ownership import SidePaths
from .protocol.errors import DatabasePathError, InvalidRequestError, StorageCorruptError, StorageError
from .protocol.operation import Call
from .transcripts import exports
from .transcripts.exports import (
    End,
    EventLine,
    Head,
    MadeFields,
    MessageFields,
    MessageRoot,
    MissingLine,
    PayloadIdentity,
    PayloadLine,
    RoomLine,
    SessionLine,
    SessionStateLine,
)
from .transcripts.records import Problem

T = TypeVar("T")
L = TypeVar("L", bound=msgspec.Struct)

STANDARD_OUTPUT: Final = "standard output"
"""How a problem names what is being written where that is no file."""

_ADVICE: Final = "import a good export or put its body again, then export again"

INCOMPLETE_END: Final = ".incomplete"

PAYLOADS_REMEMBERED_COUNT_MAX: Final = 10_000
"""Payloads that are known to stand in the export already; one that is forgotten stands there again."""


def export_lines(
    client: Client,
    session: str | None = None,
    room: str | None = None,
    *,
    name: str = STANDARD_OUTPUT,
    on_problem: Callable[[Problem], None],
    timeout: float | None = None,
) -> Iterator[bytes]:
    """Lines, each with its newline, of a session, of a room, or of everything; what comes meanwhile may be among them.

    A payload that cannot be read is missing: `on_problem` is told which, and in which line of the file with that
    `name`. `timeout` is in seconds, for each call. Raises `InvalidRequestError` where both are named, `SessionNotFoundError`,
    `RoomNotFoundError`.
    """
    if session is not None and room is not None:
        raise InvalidRequestError(
            "an export is of a session, of a room, or of everything; name one of the two"
        )
    return _Writing(client, name, on_problem, timeout).lines(session, room)


def all_pages(
    client: Client, operation: Callable[[int], Call[Page[T]]], *, timeout: float | None = None
) -> Iterator[T]:
    """The items of all pages of a list; `operation` takes the last page's cursor, 0 for the first page.

    `timeout` is in seconds, for each page.
    """
    cursor, more = 0, True
    while more:
        page = client.call(operation(cursor), timeout=timeout)
        yield from page.items
        cursor, more = page.cursor, page.more


class _Writing:
    """Puts before each event what it refers to and was not written yet, and behind them the states of their sessions."""

    def __init__(
        self, client: Client, name: str, on_problem: Callable[[Problem], None], timeout: float | None
    ) -> None:
        self._client = client
        self._name = name
        self._on_problem = on_problem
        self._timeout = timeout
        self._written = 0
        self._rooms: set[str] = set()
        self._sessions: dict[str, None] = {}
        self._payloads: OrderedDict[PayloadRef, None] = OrderedDict()

    def lines(self, session: str | None, room: str | None) -> Iterator[bytes]:
        """All lines of an export: the head, rooms and sessions, events with what they refer to, states, the end."""
        for line in self._lines(session, room):
            self._written += 1
            yield line

    def _lines(self, session: str | None, room: str | None) -> Iterator[bytes]:
        if room is not None and self._call(conversation.room(room)) is None:
            raise conversation.RoomNotFoundError(f"there is no room {room!r}", details={"room": room})
        # Output without a room leaves events of a session that was never made.
        if (
            session is not None
            and self._call(conversation.session(session)) is None
            and not self._call(conversation.history(session, page_rows=1)).items
        ):
            raise conversation.SessionNotFoundError(
                f"there is no session {session!r}", details={"session": session}
            )
        yield _line(Head(version=exports.VERSION, session=session, room=room))
        yield from self._all_rooms_and_sessions(room) if session is None else self._session(session)
        count = 0
        for historic in self._pages(lambda after: conversation.history(session, after, room=room)):
            yield from self._event(historic)
            count += 1
        yield from self._session_states()
        yield _line(End(events=count))

    def _all_rooms_and_sessions(self, room: str | None) -> Iterator[bytes]:
        """Those of everything, or a room and its sessions, also where no event names them."""
        if room is None:
            for each in self._pages(conversation.rooms):
                yield from self._room(each.id, each)
        else:
            yield from self._room(room)
        for session in self._pages(lambda after: conversation.sessions(room, after)):
            yield from self._session(session.id, session)

    def _event(self, historic: Historic) -> Iterator[bytes]:
        """An event's line, and before it those of its room, session and payload."""
        event = historic.event
        yield from self._room(event.room)
        # One that was not listed came meanwhile, or its own room is not the one that is written.
        yield from self._session(event.session)
        if isinstance(event.body, PayloadRef):
            yield from self._payload(event.body, event)
        yield _line(event_line(historic))

    def _session(self, name: str, session: Session | None = None) -> Iterator[bytes]:
        if name not in self._sessions:
            self._sessions[name] = None
            session = session or self._call(conversation.session(name))
            if session is not None:
                yield from self._room(session.room)
                yield _line(_copy(session, SessionLine))

    def _session_states(self) -> Iterator[bytes]:
        """The states of all sessions that were named, which may be behind the last event that was written of them."""
        names = list(self._sessions)
        for begin in range(0, len(names), STATES_COUNT_MAX):
            part = names[begin : begin + STATES_COUNT_MAX]
            for found in self._call(conversation.session_states(part)):
                shown = found.shown
                yield from self._room(shown.room)
                made = None if found.session is None else _copy(found.session, MadeFields)
                yield _line(
                    SessionStateLine(
                        session=shown.session,
                        room=shown.room,
                        shown_status=shown.status,
                        shown_preview=shown.preview,
                        shown_activity_ms=shown.activity_ms,
                        made=made,
                    )
                )

    def _room(self, name: str, room: Room | None = None) -> Iterator[bytes]:
        if name not in self._rooms:
            self._rooms.add(name)
            room = room or self._call(conversation.room(name))
            assert room is not None, "a session and an event stand in a room, and no room is ever deleted"
            yield _line(_copy(room, RoomLine))

    def _payload(self, ref: PayloadRef, event: Event) -> Iterator[bytes]:
        if ref in self._payloads:
            self._payloads.move_to_end(ref)
            return
        try:
            yield from self._parts(ref)
        except PayloadNotFoundError:
            yield self._missing(ref, event, "the store has none with this hash and these names")
        except StorageCorruptError as error:
            # What its message says beside the reason is told of the event.
            yield self._missing(ref, event, str(error.details.get("reason", error.message)))
        self._payloads[ref] = None
        if len(self._payloads) > PAYLOADS_REMEMBERED_COUNT_MAX:
            self._payloads.popitem(last=False)

    def _missing(self, ref: PayloadRef, event: Event, reason: str) -> bytes:
        """The line that stands for a payload, or for the rest of it, after telling that it is missing."""
        told = (
            f"the payload {ref.sha256} ({ref.content_type}, {ref.retention_class}) of the event {event.sequence} of the"
            f" session {event.session!r} cannot be read: {reason}; {_ADVICE}"
        )
        self._on_problem(Problem(self._name, self._written + 1, told))
        return _line(
            MissingLine(
                sha256=ref.sha256,
                content_type=ref.content_type,
                retention_class=ref.retention_class,
                size_bytes=ref.bytes,
                reason=reason,
            )
        )

    def _parts(self, ref: PayloadRef) -> Iterator[bytes]:
        offset = 0
        parts = payload_client.stream(
            self._client, ref, chunk_bytes=exports.PART_BYTES, timeout=self._timeout
        )
        held = b""
        for part in parts:
            if held:
                yield _payload_line(ref, offset, held)
                offset += len(held)
            held = part
        # Only the end shows whether all of it is right: what is damaged must not look whole.
        yield _payload_line(ref, offset, held)

    def _call(self, call: Call[T]) -> T:
        return self._client.call(call, timeout=self._timeout)

    def _pages(self, operation: Callable[[int], Call[Page[T]]]) -> Iterator[T]:
        return all_pages(self._client, operation, timeout=self._timeout)


def _line(value: msgspec.Struct) -> bytes:
    return exports.encode(value) + b"\n"


def _copy(record: Any, kind: type[L]) -> L:
    """The fields of a record that a line has, too."""
    return kind(**{name: getattr(record, name) for name in kind.__struct_fields__})


def _payload_line(ref: PayloadRef, offset: int, data: bytes) -> bytes:
    line = PayloadLine(
        sha256=ref.sha256,
        content_type=ref.content_type,
        retention_class=ref.retention_class,
        size_bytes=ref.bytes,
        offset=offset,
        data=data,
    )
    return _line(line)


def event_line(historic: Historic) -> EventLine:
    """An event and its message as the line that an export has of it."""
    event, said = historic.event, historic.message
    own = ("provenance", "attributes", "content_type", "body", "payload", "retention_class", "message")
    body, ref = (None, event.body) if isinstance(event.body, PayloadRef) else (event.body, None)
    return EventLine(
        **{name: getattr(event, name) for name in EventLine.__struct_fields__ if name not in own},
        provenance=None if event.provenance is None else msgspec.json.decode(event.provenance),
        attributes=decode_object(event.attributes_json),
        content_type=event.content_type if ref is None else ref.content_type,
        body=body,
        payload=None if ref is None else PayloadIdentity(sha256=ref.sha256, size_bytes=ref.bytes),
        retention_class=event.retention_class if ref is None else ref.retention_class,
        message=None if said is None else _message_fields(said),
    )


def _message_fields(said: Said) -> MessageFields:
    root = None if said.root is None else _copy(said.root, MessageRoot)
    others = {name: getattr(said, name) for name in MessageFields.__struct_fields__ if name != "root"}
    return MessageFields(**others, root=root)


# Where lines go


def write_lines(
    lines: Iterable[bytes], path: str, database: str, *, is_whole: Callable[[], bool] = lambda: True
) -> str:
    """Write lines to a file that is there whole or as it was before: under another name first, then put in its place.

    Where a file is there and `is_whole` says behind the last line that something is missing, that file stays, since it
    may have what is missing, and the lines stand beside it in one with `.incomplete` at the end of its name.

    Returns the path of what was written, of mode 0600. Raises `DatabasePathError` where the path is that of the database
    at `database` or of something of its own, is no regular file's, or cannot be written, and `StorageFullError` where
    there is no room.
    """
    # A link stays one: what it leads to is written.
    real = os.path.realpath(path)
    with _typed_failures(path):
        _check_target(real, os.path.realpath(database))
        descriptor, temporary = tempfile.mkstemp(prefix=".export-", dir=os.path.dirname(real))
        try:
            with open(descriptor, "wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            if os.path.exists(real) and not is_whole():
                path, real = f"{path}{INCOMPLETE_END}", f"{real}{INCOMPLETE_END}"
                _check_target(real, os.path.realpath(database))
            os.replace(temporary, real)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        sync_directory(os.path.dirname(real))
    return path


def write_out(lines: Iterable[bytes], file: BinaryIO) -> None:
    """Write lines to a standard output.

    Raises `StorageFullError` and `DatabasePathError` where that fails, `BrokenPipeError` where nobody reads any more.
    """
    with _typed_failures("to standard output"):
        file.writelines(lines)
        file.flush()


@contextlib.contextmanager
def _typed_failures(path: str) -> Iterator[None]:
    try:
        yield
    except (StorageError, BrokenPipeError):
        # Some of ours are OSErrors, too.
        raise
    except OSError as error:
        raise failure_of_file("cannot write the export", path, error) from error


def _check_target(real: str, database: str) -> None:
    """Raise `DatabasePathError` where an export must not be put in the place of what is at a path."""
    side = SidePaths.of(database).directory
    own = [database, *(f"{database}{end}" for end in ("-wal", "-shm", "-journal")), side]
    # By device and inode, whatever they are called: the path, and the folders that it stands in.
    above = real
    places = [real]
    while (above := os.path.dirname(above)) != places[-1]:
        places.append(above)
    if any(_is_same(place, each) for place in places for each in own):
        raise DatabasePathError(
            f"{real} belongs to the database {database}; name another file for the export",
            details={"path": real},
        )
    if os.path.exists(real) and not stat.S_ISREG(os.stat(real).st_mode):
        raise DatabasePathError(
            f"{real} is no regular file; name none to write to standard output", details={"path": real}
        )


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:
        return False
