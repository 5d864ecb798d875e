"""Our own form of what the store holds: JSON lines of rooms, sessions, payloads and events, with everything they say.

A head comes first. A room stands before the first event in it, a session before its own, and a payload, in parts of
bounded size, before the first event whose body it is, or a line that says why it is missing. Events stand in the order
of the log. Behind them stands the state of each session, and the last line says how many events there are: where it is
missing the export was cut off.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ..protocol.limits import KIB
from .files import SourceFile, UnreadableError, add_span, read_lines
from .records import Problem, Span, Transcript

NAME: Final = "export"
VERSION: Final = 1

HEAD_KIND: Final = "storage-worker-export"

PART_BYTES: Final = 512 * KIB
"""How much of a payload stands in one line."""


class Head(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=HEAD_KIND):
    """The first line: the form's version, and what was asked for; neither for everything."""

    version: int
    session: str | None = None
    room: str | None = None


class RoomLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="room"):
    """A room."""

    id: str
    title: str
    is_default: bool
    created_ms: int
    archived_ms: int | None


class SessionLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="session"):
    """A session as it was made; its events change it."""

    id: str
    room: str
    parent: str | None
    root: str
    created_ms: int


class MadeFields(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a session that was made."""

    parent: str | None
    root: str
    status: str
    runtime_binding: str | None
    first_preview: str | None
    activity_ms: int
    created_ms: int


class SessionStateLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="session_state"):
    """The state of a session behind its events: what lists show of it, and itself.

    `made` is None where only output without a room named it.
    """

    session: str
    room: str
    shown_status: str
    shown_preview: str
    shown_activity_ms: int
    made: MadeFields | None


class PayloadLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="payload"):
    """A part of a payload, from `offset` on; `size_bytes` is the size of all of it."""

    sha256: str
    content_type: str
    retention_class: str
    size_bytes: int
    offset: int
    data: bytes


class MissingLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="missing"):
    """A payload that could not be read, also where parts of it stand before this; `reason` says why."""

    sha256: str
    content_type: str
    retention_class: str
    size_bytes: int
    reason: str


class MessageRoot(msgspec.Struct, frozen=True, kw_only=True):
    """A message by what it is known by in any store: its id, and the place and time of its event."""

    id: str
    session: str
    sequence: int
    created_ms: int


class MessageFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a message says beside its event.

    `thread_root` is the number in the room of the message that its thread begins with, `root` which message that is,
    None where there is none with this number.
    """

    id: str
    number: int
    sequence: int
    role: str
    turn_id: str | None
    sender_label: str
    source: str | None
    agent_key: str | None
    thread_root: int | None
    root: MessageRoot | None
    status: str


class PayloadIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which payload an event's body is."""

    sha256: str
    size_bytes: int


class EventLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="event"):
    """An event; `attributes` is its JSON object, `body` its text (canonical JSON where `content_type` says so).

    Both are as they arrived; what the store said beside them is `added`. `room_named` is false where the caller left it
    to the store which room it is.
    """

    stream_id: int
    session: str
    sequence: int
    room: str
    room_named: bool
    actor: str
    type: str
    event_id: str | None
    aggregate_kind: str
    aggregate_id: str
    version: int
    client_transaction_id: str | None
    idempotency_key: str | None
    provenance: dict[str, Any] | None
    attributes: dict[str, Any]
    added: dict[str, Any]
    content_type: str | None
    body: str | None
    payload: PayloadIdentity | None
    preview: str
    retention_class: str
    created_ms: int
    message: MessageFields | None


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The last line: how many events stand before it."""

    events: int


Line = Head | RoomLine | SessionLine | PayloadLine | MissingLine | EventLine | SessionStateLine | End

PayloadKey = tuple[str, str | None, str]
"""What tells a payload from any other: its SHA-256, its content type and its retention class."""

encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Line).decode


def recognises(source: SourceFile) -> bool:
    """Whether a file begins with the head of an export."""
    return isinstance(source.first, dict) and source.first.get("kind") == HEAD_KIND


class _Place(msgspec.Struct):
    """What of a line says which room it belongs to."""

    kind: str
    id: str = ""
    session: str | None = None
    room: str | None = None
    sha256: str = ""
    content_type: str | None = None
    retention_class: str = ""
    offset: int = 0
    payload: PayloadIdentity | None = None
    events: int = 0


_decode_place: Final = msgspec.json.Decoder(_Place).decode


def sessions(source: SourceFile) -> Iterator[Transcript | Problem]:
    """A piece of work for each room: its events in their order, and what stands before them for them.

    Rooms that share a session are one piece, since the order of its events counts, too.
    """
    if source.first.get("version") != VERSION:
        told = f"an export of version {source.first.get('version')}; this release reads version {VERSION}"
        yield Problem(source.path, 1, told)
        return
    rooms = _Rooms()
    for line in read_lines(source.path):
        if isinstance(line, Problem):
            yield line
            continue
        if not line.raw.strip():
            continue
        if rooms.has_ended:
            yield Problem(source.path, line.span.line, "the export has ended before this")
            break
        try:
            reason = rooms.add(_decode_place(line.raw), line.span)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            reason = f"no line of an export: {error}"
        if reason is not None:
            yield Problem(source.path, line.span.line, reason)
    if not rooms.has_ended:
        yield Problem(source.path, 0, "the export is cut off: its last line is missing")
    for place, spans in enumerate(rooms.pieces()):
        found = source.transcript(NAME, spans, place)
        yield msgspec.structs.replace(found, room=f"{NAME}-{source.mark}")


class _Rooms:
    """Gathers the lines that belong together. Of the file only places are kept."""

    def __init__(self) -> None:
        self.has_ended = False
        self._has_begun = False
        self._events = 0
        self._spans: dict[str, list[Span]] = {}
        self._payloads: dict[PayloadKey, list[Span]] = {}
        self._given: set[tuple[str, int]] = set()
        self._with: dict[str, str] = {}

    def add(self, place: _Place, span: Span) -> str | None:
        """Take in the next line; what is wrong with it, or None."""
        if place.kind in ("payload", "missing"):
            key = (place.sha256, place.content_type, place.retention_class)
            if place.kind == "payload" and place.offset == 0:
                self._payloads[key] = []
            add_span(self._payloads.setdefault(key, []), span)
        elif place.kind == "room":
            self._spans_of(place.id).append(span)
        elif place.kind == "session":
            self._join(f"session {place.id}", f"room {place.room}")
            self._spans_of(place.room or "").append(span)
        elif place.kind == "session_state":
            self._join(f"session {place.session}", f"room {place.room}")
            self._spans_of(place.room or "").append(span)
        elif place.kind == "event":
            self._events += 1
            self._add_event(place, span)
        elif place.kind == "end":
            self.has_ended = True
            if place.events != self._events:
                return f"the export has {self._events} events instead of {place.events}: lines are missing"
        elif place.kind != HEAD_KIND or self._has_begun:
            return f"no line of an export: one of the kind {place.kind!r}"
        self._has_begun = True
        return None

    def _add_event(self, place: _Place, span: Span) -> None:
        room = place.room or ""
        self._join(f"session {place.session}", f"room {room}")
        spans = self._spans_of(room)
        if place.payload is not None:
            parts = self._payloads.get((place.payload.sha256, place.content_type, place.retention_class), [])
            # Once for each room: many events may have the same body.
            if parts and (room, parts[0].offset) not in self._given:
                self._given.add((room, parts[0].offset))
                spans += parts
        spans.append(span)

    def _spans_of(self, room: str) -> list[Span]:
        return self._spans.setdefault(room, [])

    def _join(self, one: str, other: str) -> None:
        first, second = self._first(one), self._first(other)
        if first != second:
            self._with[first] = second

    def _first(self, name: str) -> str:
        while (above := self._with.get(name)) is not None:
            # What is passed is hung further up, so that no way becomes long.
            self._with[name] = self._with.get(above, above)
            name = above
        return name

    def pieces(self) -> Iterator[list[Span]]:
        """The parts of the file that are one piece of work each, in the order of the file."""
        joined: dict[str, list[Span]] = {}
        for room, spans in self._spans.items():
            joined.setdefault(self._first(f"room {room}"), []).extend(spans)
        for spans in joined.values():
            ordered: list[Span] = []
            end = 0
            for span in sorted(spans, key=lambda span: span.offset):
                # A body that events of two rooms have stands there twice.
                if span.offset >= end:
                    add_span(ordered, span)
                    end = span.offset + span.length
            yield ordered


def lines(transcript: Transcript) -> Iterator[tuple[int, Line | Problem]]:
    """The lines of an export with their numbers, and what of it cannot be read."""
    for line in read_lines(transcript.path, transcript.spans):
        if isinstance(line, Problem):
            yield line.line, line
            continue
        number = line.span.line
        try:
            yield number, _line(line.raw)
        except UnreadableError as error:
            yield number, Problem(transcript.path, number, str(error))


def _line(raw: bytes) -> Line:
    try:
        return _decode(raw)
    except RecursionError:
        raise UnreadableError("JSON that is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise UnreadableError(f"no line of an export: {error}") from None
