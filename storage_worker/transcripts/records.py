"""What the readers of all formats give: sessions of a file, records of a session, and the events that a record becomes.

A record is one JSON value: a line of a log, a message of a list, a node of a tree. Its bodies are taken out of it,
each the body of one event, and what is left (the rest) goes with the first of them; each event says under `source`
where its body stood. So the record can be built again from its events exactly, whatever fields it has.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from ..conversation.bounds import NAME_CHARS_MAX
from ..protocol.limits import KIB

Path = tuple[str | int, ...]
"""Where a value stands in a record: the keys and places that lead to it."""

REST_BYTES_MAX: Final = 4 * KIB
"""The largest rest that stands among an event's attributes, with room for names beside it; a larger one is the body
of an event of its own."""

REST_DEPTH_MAX: Final = 32
"""How deep it may be nested there: a request carries a few levels more."""

ATTACHMENT: Final = "attachment"
RECORD: Final = "transcript_record"
"""The type of an event that says a record, or what is left of it, and is nothing that the store knows."""

canonical: Final = msgspec.json.Encoder(order="deterministic").encode
"""The canonical JSON of a value."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A part of a file: where it begins and how long it is, in bytes, and the line it begins in, counted from 1."""

    offset: int
    length: int
    line: int


class FilePart(msgspec.Struct, frozen=True, array_like=True):
    """What one file holds of a session: its parts, in their order."""

    path: str
    spans: list[Span]


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """One session, which is one piece of work.

    `format` is the name of its format, `session` and `room` are ids, `title` is that of the room; `spans` are the
    parts of the file at `path` that it is made of, and `beside` those of other files, which follow. `began_ms` is
    the first time that the file tells, None where none is needed to put several files in order.
    """

    format: str
    path: str
    session: str
    room: str
    title: str
    spans: list[Span]
    beside: list[FilePart] = []
    began_ms: int | None = None

    @property
    def parts(self) -> list[FilePart]:
        """All that it is made of, a part for each file."""
        return [FilePart(self.path, self.spans), *self.beside]

    @property
    def size_bytes(self) -> int:
        """How much of the files it is."""
        return sum(span.length for part in self.parts for span in part.spans)


class Problem(msgspec.Struct, frozen=True):
    """What could not be read: the file, the line, counted from 1 (0 for the whole file), and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}" if self.line else f"{self.path}: {self.reason}"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a record.

    `type` is the event's; `path` leads to its body, a text, list or object, None where it has none; `fields` are
    what it says beside that; `role` is that of a message. A body in base64 has a `media_type`.
    """

    type: str
    path: Path | None = None
    fields: dict[str, Any] = {}
    role: str = "user"
    media_type: str | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a session.

    `id` is unique in the session; `value` is what it says, `parts` are its events, at least one; `actor` is who says
    it, `created_ms` when, in milliseconds since 1970 in UTC, None where that is not known; `thread` is the id of
    the record whose message its thread begins with; `path` is the file it stands in, where its session has several.
    """

    id: str
    line: int
    value: Any
    parts: list[Part]
    actor: str = ""
    created_ms: int | None = None
    thread: str | None = None
    path: str | None = None


class JSONBody(msgspec.Struct, frozen=True):
    """A body that is a JSON value."""

    value: Any


class BinaryBody(msgspec.Struct, frozen=True):
    """A body that is no text."""

    data: bytes
    media_type: str


EventBody = str | JSONBody | BinaryBody | None


class PlannedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event as it is to be stored: what a part of a record says, and under `source` where it comes from."""

    id: str
    type: str
    role: str
    fields: dict[str, Any]
    body: EventBody


class Piece(msgspec.Struct, frozen=True):
    """What a stored event says of a record: its `source`, and its body, a text, bytes or a JSON value."""

    source: dict[str, Any]
    body: Any


def name_in(value: Any) -> str | None:
    """A text that can be an id, a role or a name in the store, else None; then it stands in the rest only."""
    return value if type(value) is str and 1 <= len(value) <= NAME_CHARS_MAX else None


def names(record: dict[str, Any], **wanted: str) -> dict[str, Any]:
    """The fields of an event by its own names, each taken from the record's member, where that is a usable text."""
    found = {ours: name_in(record.get(theirs)) for ours, theirs in wanted.items()}
    return {ours: value for ours, value in found.items() if value is not None}


def body_path(value: Any, *path: str | int) -> Path | None:
    """The path of a value that can be a body, None for any other."""
    return path if isinstance(value, str | list | dict) else None


# From a record to its events


def events_of(record: Record) -> Iterator[PlannedEvent]:
    """The events that a record becomes, in their order."""
    rest, bodies = _disassemble(record)
    encoded = canonical(rest)
    number = 0
    is_beside = len(encoded) <= REST_BYTES_MAX and is_plain(rest)
    if not is_beside:
        source: dict[str, Any] = {"record": record.id, "path": []}
        yield PlannedEvent(
            id=f"{record.id}/{number}",
            type=RECORD,
            role="",
            fields={"source": source},
            body=JSONBody(rest),
        )
        number += 1
    for part, body in zip(record.parts, bodies, strict=True):
        source = {"record": record.id}
        if number == 0:
            source["rest"] = rest
        if part.path is not None:
            source["path"] = list(part.path)
        yield PlannedEvent(
            id=f"{record.id}/{number}",
            type=part.type,
            role=part.role,
            fields={**part.fields, "source": source},
            body=body,
        )
        number += 1


def _disassemble(record: Record) -> tuple[Any, list[EventBody]]:
    """A record without the bodies of its parts, and these."""
    rest = record.value
    bodies: list[EventBody] = [None] * len(record.parts)
    # A body that stands inside another one is taken out of it first.
    order = sorted(range(len(bodies)), key=lambda place: -len(record.parts[place].path or ()))
    for place in order:
        part = record.parts[place]
        if part.path is None:
            continue
        rest, body = _remove_at(rest, part.path)
        if part.media_type is not None:
            bodies[place] = BinaryBody(base64.b64decode(body), part.media_type)
        else:
            bodies[place] = body if isinstance(body, str) else JSONBody(body)
    return rest, bodies


def _remove_at(value: Any, path: Path) -> tuple[Any, Any]:
    """A value without what the path leads to, and that; only what is changed is copied."""
    if not path:
        return None, value
    key, below = path[0], path[1:]
    changed = value.copy()
    if below:
        changed[key], found = _remove_at(value[key], below)
        return changed, found
    found = value[key]
    if isinstance(changed, dict):
        del changed[key]
    else:
        changed[key] = None
    return changed, found


def is_plain(value: Any) -> bool:
    """Whether a JSON value can cross the pipe as it is: not nested deeply, and no number of more than 64 bit."""
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        found, depth = waiting.pop()
        if isinstance(found, dict | list):
            if depth > REST_DEPTH_MAX:
                return False
            below = found.values() if isinstance(found, dict) else found
            waiting += [(each, depth + 1) for each in below]
        elif type(found) is int and not -(2**63) <= found < 2**63:
            return False
    return True


def is_base64(text: Any) -> bool:
    """Whether a text is base64 that decodes and encodes to exactly itself."""
    if not isinstance(text, str):
        return False
    try:
        return base64.b64encode(base64.b64decode(text, validate=True)).decode() == text
    except (binascii.Error, ValueError):
        return False


# From events to their record


def records_of(pieces: Iterable[Piece]) -> Iterator[tuple[str, Any]]:
    """The records of a session, with their ids, that events were made of, in the order of their first events.

    Other events may stand between those of one record: an import that was broken off there went on later.
    """
    gathered: dict[str, list[Piece]] = {}
    for piece in pieces:
        gathered.setdefault(piece.source["record"], []).append(piece)
    for found in gathered.values():
        yield _assemble(found)


def _assemble(pieces: list[Piece]) -> tuple[str, Any]:
    first = pieces[0].source
    value = first.get("rest")
    # What another body stood in comes before that one.
    for piece in sorted(pieces, key=lambda piece: len(piece.source.get("path", ()))):
        path = piece.source.get("path")
        if path is None:
            continue
        body = piece.body
        if isinstance(body, bytes | bytearray):
            body = base64.b64encode(body).decode()
        value = _insert_at(value, path, body)
    return str(first["record"]), value


def _insert_at(value: Any, path: list[str | int], body: Any) -> Any:
    """A value with a body at a path; what it holds already is changed in place."""
    if not path:
        return body
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = body
    return value


class Tally:
    """Counts records and takes the digest of them all: of their canonical JSON, each with its length."""

    def __init__(self) -> None:
        self.records = 0
        self._hash = hashlib.sha256()

    def add(self, value: Any) -> None:
        """Take one more record in."""
        encoded = canonical(value)
        self._hash.update(len(encoded).to_bytes(8, "big"))
        self._hash.update(encoded)
        self.records += 1

    @property
    def digest(self) -> str:
        """The digest of the records until now, in hex."""
        return self._hash.hexdigest()
